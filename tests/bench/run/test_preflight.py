"""What cannot run is told before anything is sent, and leaves everything as it was."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llmtap.bench.run.folder import Folder
from llmtap.bench.run.perform import Bench
from llmtap.bench.run.test import TESTS
from llmtap.bench.sut.file import load_bench
from llmtap.errors import ConfigError
from tests.bench.support import Silent
from tests.support.peer import play

NOBODY = "http://127.0.0.1:9"
RATE = "ttft.rate=4"


class _NotFound(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def not_found() -> Iterator[str]:
    """A server that has nothing at all."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _NotFound) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def refused(
    results: Path, *sets: str, url: str = NOBODY, tests: Sequence[str] = ("ttft",)
) -> tuple[ConfigError, Silent]:
    file = load_bench(None, target=url, sets=sets, tests=tests)
    watcher = Silent()
    one = Bench(file, Folder(results), watcher, warmup="2", quick=True)
    with pytest.raises(ConfigError) as caught:
        play(one.run(tests), limit_s=120)
    return caught.value, watcher


def test_a_server_that_is_not_there_is_told_before_a_load_is_begun(tmp_path: Path) -> None:
    for named in ((), ("target.model=tiny", "target.server=vllm")):
        why, watcher = refused(tmp_path / "a/b", RATE, *named)
        assert (why.place, why.problem) == (
            "--target", f"{NOBODY} cannot be reached: connection refused",
        )  # fmt: skip
        assert (watcher.steps, watcher.lefts) == ([], [])
        assert list(tmp_path.iterdir()) == [], "folders on the way are ours, too"


def test_nobody_there_is_one_error_of_all_tests(tmp_path: Path) -> None:
    why, watcher = refused(tmp_path / "r", RATE, tests=list(TESTS))
    assert "cannot be reached" in why.problem
    assert watcher.steps == []
    assert list(tmp_path.iterdir()) == []


def test_of_arms_that_has_no_server_is_named(tmp_path: Path) -> None:
    arms = ("arms.cache_off.about=off", f"arms.cache_on.url={NOBODY}/on")
    with not_found() as url:
        why, _ = refused(tmp_path / "r", *arms, url=url, tests=("prefix-cache",))
    assert why.place == "[arms.cache_on] url"


def test_a_path_that_the_server_has_not_is_what_it_is_told_by(tmp_path: Path) -> None:
    with not_found() as url:
        why, _ = refused(tmp_path / "r", RATE, url=f"{url}/nope")
        assert why.place == "target.model"
        assert why.hint == f"{url}/nope/v1/models was asked: is the path of the URL right?"
        # It is the load that asks for a model: bodies of a trace need none.
        assert list(tmp_path.iterdir()) == []
        several, _ = refused(
            tmp_path / "r", RATE, "itl.max_rate=4", "itl.output_tokens=200", url=f"{url}/nope",
            tests=("ttft", "itl"),
        )  # fmt: skip
    assert several.place == "target.model"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "place", "problem"),
    [
        ("arrivals=foo", "tests.ttft.arrivals", "no arrival process is called 'foo'"),
        ("arrivals=gamma:cv=x", "tests.ttft.arrivals", "gamma: cv"),
        ("workload=nope", "tests.ttft.workload", "no workload is called 'nope'"),
        ("workload=nope.toml", "tests.ttft.workload", "there is no file nope.toml"),
    ],
)
def test_a_workload_or_arrivals_that_there_are_not(
    tmp_path: Path, given: str, place: str, problem: str
) -> None:
    why, _ = refused(tmp_path / "r", RATE, given)
    assert why.place == place
    assert problem in why.problem
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_is_as_it_was(tmp_path: Path) -> None:
    empty, used = tmp_path / "empty", tmp_path / "used"
    empty.mkdir()
    (used / "throughput").mkdir(parents=True)
    (used / "bench.json").write_text('{"asked": ["throughput"]}')
    (used / "throughput/mine").write_text("kept")
    with not_found() as url:
        for place in (empty, used):
            refused(place, RATE)
            refused(place, RATE, url=url)
    assert list(empty.iterdir()) == []
    assert sorted(path.name for path in used.rglob("*")) == ["bench.json", "mine", "throughput"]
    assert (used / "bench.json").read_text() == '{"asked": ["throughput"]}'


def test_the_arms_that_a_guardrail_has_are_told_with_the_nearest(tmp_path: Path) -> None:
    for given, place, says in (
        ("target.model=x", "[arms.baseline]", "in the file of --config"),
        ("arms.baseline.about=none", "[arms.input_filter], [arms.output_filter] or [arms.full]", "in the"),
    ):
        why, _ = refused(tmp_path / "r", given, tests=("guardrail-overhead",))
        assert why.place == place
        assert (why.hint or "").startswith(says)
    both = ("arms.baseline.about=none", "arms.input.about=filtered")
    why, _ = refused(tmp_path / "r", *both, tests=("guardrail-overhead",))
    assert why.hint == "[arms.input] is none of them: did you mean [arms.input_filter]?"
