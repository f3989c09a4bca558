"""Tests are checked before anything is sent, run in order, kept, judged and continued."""

import json
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from llmtap.bench.report.report import load_document
from llmtap.bench.report.texts import full_markdown, minimum_text
from llmtap.bench.run.perform import ORDER, Bench
from llmtap.bench.run.session import Folder
from llmtap.bench.run.test import TESTS
from llmtap.bench.run.test import test_named as one_test
from llmtap.bench.sut.sut import load_bench
from llmtap.errors import ConfigError
from llmtap.json_types import json_value
from llmtap.report.bench import deviation_texts
from tests.bench.support import SERVE, Silent, sim
from tests.support.servers.peer import play

EXAMPLE = Path(__file__).parents[3] / "config/bench-sim.toml"
NOBODY = "http://127.0.0.1:9"
QUICK = ("target.endpoint=completions", "target.metrics=none", "ttft.requests=12", "ttft.concurrency=4")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that all tests here share; it keeps nothing of one load for the next."""
    with sim("--ttft", "20ms", "--itl", "1ms") as served:
        yield served


def bench(results: Path, url: str, *sets: str, tests: Sequence[str] = ("ttft",), **more: Any) -> Bench:
    file = load_bench(None, target=url, sets=[*QUICK, *sets], tests=tests)
    return Bench(file, Folder(results), Silent(), **({"warmup": "3", "selftest": False} | more))


def run(one: Bench, *names: str) -> dict[str, Any]:
    document: dict[str, Any] = json_value(play(one.run(names or ("ttft",)), limit_s=250))
    return document


def steps(one: Bench) -> list[tuple[str, str]]:
    assert isinstance(one.watcher, Silent)
    return one.watcher.steps


CONVERSATIONS = """
name = "tasks"
[input]
distribution = "fixed"
tokens = 24
[output]
distribution = "fixed"
tokens = 8
[conversations]
turns = { distribution = "uniform", min = 3, max = 3 }
think = { distribution = "fixed", time = "0s" }
"""


def test_a_compound_system_has_the_times_of_its_tasks(tmp_path: Path, url: str) -> None:
    """Three turns of 20 ms to the first token and 7 ms to the eighth each: a task takes at least 81 ms."""
    workload = tmp_path / "tasks.toml"
    workload.write_text(CONVERSATIONS)
    sets = ("sut.boundary=compound system", f"ttft.workload={workload}", "ttft.requests=12")
    (report,) = run(bench(tmp_path / "r", url, *sets))["tests"]
    (tasks,) = report["tasks"]
    assert (tasks["step"], tasks["task"], tasks["n"], tasks["duration"]["n"]) == (
        "load",
        "conversation",
        4,
        4,
    )
    assert tasks["duration"]["min"] >= 0.081
    table = report["tables"][-1]
    assert table["caption"] == "Task times of the compound system, end to end (4.1.3)"
    assert table["rows"][0][:4] == ["load", "conversation", "4", "4"]
    assert "Task times of the compound system" in full_markdown({"tests": [report]})


def test_the_order_has_every_test_and_what_others_need_first() -> None:
    assert sorted(ORDER) == sorted(TESTS)
    assert ORDER[0] == "throughput"
    assert ORDER.index("capacity") < ORDER.index("memory-pressure")


def test_the_model_load_of_a_server_that_is_started_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    command = [*SERVE[:-1], f"127.0.0.1:{port}", "--ttft", "20ms"]
    one = bench(tmp_path, f"http://127.0.0.1:{port}", f"sut.start={json.dumps(command)}")
    document = run(one)
    (report,) = document["tests"]
    load = report["model_load"]
    assert load["port_open"] <= load["ready"] <= load["first_token"]
    line = report["configuration"]["Cold start: model load (4.5.3)"]
    assert line in minimum_text(document) and line in full_markdown(document)
    judged = {one["id"]: one["status"] for one in report["compliance"]["rows"]}
    assert (judged["4.5.3-1"], judged["4.5.3-2"]) == ("met", "met")
    assert "llmtap" in (tmp_path / "server.log").read_text()
    assert json_value(load_document(tmp_path).tests[0].model_load) == load


def test_a_test_leaves_its_report_judged_and_a_second_run_measures_nothing(tmp_path: Path, url: str) -> None:
    document = run(bench(tmp_path, url, command="llmtap bench ttft", selftest=True))
    setup = json.loads((tmp_path / "bench.json").read_text())
    again = bench(tmp_path, url, selftest=True)
    cached = run(again)
    (report,) = document["tests"]
    assert (setup["command"], setup["asked"]) == ("llmtap bench ttft", ["ttft"])
    assert [(step["name"], step["load"]["closed"], step["cached"]) for step in report["steps"]] == [
        ("load", 4, False)
    ]
    assert report["steps"][0]["requests"]["rows"] == 12
    assert "12 requests byte for byte" in report["exact_requests"]
    assert report["compliance"]["level"] == "not compliant"
    assert "timeline" not in report["steps"][0]["result"]
    assert report["warmups"][0]["requests"] == 3
    assert [note for note in report["notes"] if "no measured prompt was sent to warm up" in note]
    assert report["configuration"]["Control of output length (4.3.1)"] == "max_tokens with ignore_eos"
    # By a letter of the draft. The variant of B in the loads' results is a note.
    assert report["itl_option"] == "A"
    assert report["steps"][0]["result"]["metrics"]["itl"]["option"] == "B-even"
    assert [note for note in report["notes"] if "is B-even, which is no option of 4.6.3" in note]
    assert report["configuration"]["ITL option (4.6.3)"] == "A: time between chunks"
    assert report["selftest"]["unmatched"] == 0
    assert f"n {report['selftest']['n']:,}" in report["configuration"]["error of our own times"]
    assert cached["tests"][0]["selftest"] == report["selftest"]
    assert report["versions"]["llmtap"]
    assert report["round_trip"] > 0
    assert "NTP offset of the load generator (4.7.2)" in report["configuration"]
    assert "Network round trip (4.7.3)" in report["configuration"]
    assert cached["tests"][0]["round_trip"] == report["round_trip"]
    assert json.loads((tmp_path / "ttft/result.json").read_text())["measurements"] == report["measurements"]
    assert steps(again) == [("load", "measured before")]
    assert cached["tests"][0]["measurements"] == report["measurements"]
    assert cached["tests"][0]["warmups"] == report["warmups"]
    assert load_document(tmp_path).tests[0].measurements == report["measurements"]
    # A newer version may have written further fields of the SUT.
    for place in (tmp_path / "bench.json", tmp_path / "ttft/result.json"):
        stored = json.loads(place.read_text())
        stored["sut"]["further"] = stored["sut"]["hardware"]["further"] = 1
        place.write_text(json.dumps(stored))
    newer = load_document(tmp_path)
    assert json_value(newer.sut) == json_value(newer.tests[0].sut) == report["sut"]


def test_several_go_on_without_the_one_that_cannot_run(tmp_path: Path, url: str) -> None:
    one = bench(tmp_path, url, tests=("ttft", "prefix-cache"))
    document = run(one, "prefix-cache", "ttft")
    assert [report["test"] for report in document["tests"]] == ["ttft"]
    (left,) = document["not_run"]
    assert (left["test"], left["begun"]) == ("prefix-cache", False)
    assert "[arms.cache_off]" in left["why"]
    assert steps(one)[0][0] == "prefix-cache"


def test_runs_have_steps_and_seeds_of_their_own_and_the_first_is_where_it_was(
    tmp_path: Path, url: str
) -> None:
    first = bench(tmp_path, url, runs=3)
    document = run(first)
    more = bench(tmp_path, url, runs=4)
    again = run(more)
    assert isinstance(first.watcher, Silent)
    title = "ttft (5.1 Time to First Token)"
    assert [message.partition(";")[0] for message in first.watcher.remaining] == [
        f"{title}, run 1 of 3, then 2 more",
        f"{title}, run 2 of 3, then 1 more",
        f"{title}, run 3 of 3",
    ]
    assert [report["run"] for report in document["tests"]] == [1]
    assert [(one["run"], one["seed"]) for one in document["repeats"]] == [(2, 1_000_042), (3, 2_000_042)]
    assert document["runs"] == 3
    place = tmp_path / "ttft"
    reports = [json.loads((place / at / "result.json").read_text()) for at in (".", "run-2", "run-3")]
    assert [report["steps"][0]["result"]["plan"]["seed"] for report in reports] == [42, 1_000_042, 2_000_042]
    assert [report["warmups"][0]["requests"] for report in reports] == [3, 3, 3]
    assert len({report["steps"][0]["requests"]["sha256"] for report in reports}) == 3
    assert [message == "measured before" for _, message in steps(more)] == [True, True, True, False]
    assert [one["run"] for one in again["repeats"]] == [2, 3, 4]
    assert [one.run for one in load_document(tmp_path).repeats] == [2, 3, 4]


def stored(place: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def refused(one: Bench, *names: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        run(one, *names)
    assert caught.value.place == "--results"
    assert steps(one) == [], "nothing is sent"
    return caught.value


def test_other_parameters_replace_nothing_unless_somebody_says_so(tmp_path: Path, url: str) -> None:
    document = run(bench(tmp_path, url, runs=2))
    before = stored(tmp_path)
    for sets, more, says in (
        (("ttft.requests=13",), {}, "requests: 12, now 13"),
        ((), {"warmup": "2"}, 'warmup: "3", now "2"'),
        ((), {"seed": 7}, "seed: 42, now 7"),
        ((), {"quick": True}, "quick: false, now true"),
        (("target.model=other",), {}, 'target.model: null, now "other"'),
        (("target.headers.authorization=x",), {}, "target.headers.authorization: none, now"),
    ):
        why = refused(bench(tmp_path, url, *sets, **more))
        assert says.replace("null", "none") in why.problem
        assert "--again" in (why.hint or "")
    many = refused(bench(tmp_path, url, "ttft.requests=13", "ttft.concurrency=3", warmup="2", seed=7))
    assert many.problem.endswith("and 1 more")
    assert stored(tmp_path) == before
    anew = bench(tmp_path, url, "ttft.requests=13", again=True)
    second = run(anew)
    assert [len(one["tests"][0]["steps"]) for one in (document, second)] == [1, 1]
    assert second["tests"][0]["steps"][0]["requests"]["rows"] == 13
    assert not (tmp_path / "ttft/run-2").exists(), "it was of other parameters"


def test_a_key_that_is_another_one_is_refused_and_shown_nowhere(tmp_path: Path, url: str) -> None:
    run(bench(tmp_path, url, "target.headers.authorization=Bearer hunter1"))
    why = refused(bench(tmp_path, url, "target.headers.authorization=Bearer hunter2"))
    assert "a key or the query of a URL" in why.problem
    assert "hunter" not in str(why)
    assert b"hunter" not in b"".join(stored(tmp_path).values())


class Impatient(Silent):
    """Stops a benchmark as soon as a step of that name begins."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.stop: Any = None

    def step(self, name: str, message: str, seconds: float | None = None) -> None:
        super().step(name, message)
        if name == self.name:
            self.stop()


def test_an_interruption_keeps_what_was_whole(tmp_path: Path, url: str) -> None:
    levels = ("tradeoff.max_rate=20", "tradeoff.levels=50,100", "tradeoff.duration=1s")
    one = bench(tmp_path, url, *levels, tests=("tradeoff",), quick=True)
    watcher = Impatient("levels/100.0")
    watcher.stop, one.watcher = one.stop, watcher
    stopped = run(one, "tradeoff")
    (partial,) = stopped["tests"]
    assert stopped["stopped"]
    assert stopped["verdict"]["grade"] == "not valid"
    assert partial["steps"][0]["name"] == "levels/050.0"
    assert partial["tables"][0]["rows"][0][0] == "levels/050.0"
    assert partial["compliance"] is None
    assert sum("stopped" in note for note in deviation_texts(stopped)) == 1
    assert not any(" not met " in note for note in deviation_texts(stopped))
    assert "not judged" in full_markdown(stopped)
    assert not (tmp_path / "tradeoff/result.json").exists()
    other = bench(tmp_path, url, *levels[1:], "tradeoff.max_rate=30", tests=("tradeoff",), quick=True)
    assert "max_rate: 20.0, now 30.0" in refused(other, "tradeoff").problem
    again = bench(tmp_path, url, *levels, tests=("tradeoff",), quick=True)
    document = run(again, "tradeoff")
    assert [name for name, _ in watcher.steps] == ["levels/050.0", "levels/100.0"]
    assert [message == "measured before" for _, message in steps(again)] == [True, False]
    assert [step["cached"] for step in document["tests"][0]["steps"]] == [True, False]


def test_the_duration_is_announced_after_the_first_load_and_then_what_is_left(
    tmp_path: Path, url: str
) -> None:
    sets = ("tradeoff.max_rate=20", "tradeoff.levels=50,100", "tradeoff.duration=1s")
    one = bench(tmp_path, url, *sets, tests=("ttft", "tradeoff"), quick=True)
    run(one, "ttft", "tradeoff")
    assert isinstance(one.watcher, Silent)
    known = [message.endswith(" left") for message in one.watcher.remaining]
    assert known == sorted(known) and known[:2] == [False, False] and known[-1]
    # One estimate before each load but the first; each load and each test shortens it.
    estimates_s = one.watcher.estimates_s
    assert len(estimates_s) == 2
    assert estimates_s[0] > estimates_s[1] > 1


@pytest.mark.parametrize(
    ("test", "sets", "loads"),
    [
        ("ttft", ("ttft.rate=4", "ttft.concurrency=none", "ttft.requests=10000"), [(10_000, 0.0, 4.0)]),
        # As long as nothing is known, the first level is assumed to be the highest that holds.
        (
            "throughput",
            ("throughput.rate_max=4", "throughput.duration=60s"),
            [(0, 60.0, 1.0), (0, 60.0, 2.0)],
        ),
        ("tradeoff", ("tradeoff.max_rate=20", "tradeoff.levels=10,100"), [(0, 60.0, 2.0), (0, 60.0, 20.0)]),
    ],
)
def test_the_loads_of_a_test_follow_from_its_parameters(
    tmp_path: Path, test: str, sets: Sequence[str], loads: list[tuple[float, float, float]]
) -> None:
    one = bench(tmp_path, NOBODY, *sets, tests=tuple({"ttft", test}))
    declared = one_test(test)
    expected = declared.expected(*one._prepare(declared))
    assert [(load.requests, load.seconds, load.rate_rps) for load in expected.loads] == loads


def test_files_of_others_are_not_written_among(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError) as caught:
        run(bench(tmp_path, NOBODY))
    assert caught.value.place == "--results"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


RATE = "ttft.rate=4"


def refused_first(
    results: Path, *sets: str, url: str = NOBODY, tests: Sequence[str] = ("ttft",)
) -> tuple[ConfigError, Silent]:
    file = load_bench(None, target=url, sets=sets, tests=tests)
    watcher = Silent()
    one = Bench(file, Folder(results), watcher, warmup="2", quick=True)
    with pytest.raises(ConfigError) as caught:
        play(one.run(tests), limit_s=120)
    return caught.value, watcher


def test_a_path_that_the_server_has_not_is_what_it_is_told_by(tmp_path: Path, url: str) -> None:
    nobody, _ = refused_first(tmp_path / "nobody", RATE)
    assert (nobody.place, list(tmp_path.iterdir())) == ("--target", []), "nothing is written"
    why, _ = refused_first(tmp_path / "r", RATE, url=f"{url}/nope")
    assert why.place == "target.model"
    assert why.hint == f"check the path of --target: the request was sent to {url}/nope/v1/models"
    two = ("itl.max_rate=4", "itl.output_tokens=200")
    several, _ = refused_first(tmp_path / "r", RATE, *two, url=f"{url}/nope", tests=("ttft", "itl"))
    assert several.place == "target.model"


def test_the_example_file_of_all_tests_passes_the_checks_before_the_load(tmp_path: Path) -> None:
    """The first error is that nothing listens at the target: the parameters of all tests are right."""
    file = load_bench(EXAMPLE, target=NOBODY, sets=(), tests=list(TESTS))
    with pytest.raises(ConfigError) as caught:
        run(Bench(file, Folder(tmp_path / "r"), Silent(), quick=True), *TESTS)
    assert caught.value.place == "--target", caught.value


@pytest.mark.parametrize(
    ("given", "place", "problem"),
    [
        ("arrivals=foo", "tests.ttft.arrivals", "no arrival process is called 'foo'"),
        ("arrivals=ramp", "tests.ttft.arrivals", "ramp"),
        ("workload=nope", "tests.ttft.workload", "no workload is called 'nope'"),
    ],
)
def test_a_workload_or_arrivals_that_there_are_not(
    tmp_path: Path, given: str, place: str, problem: str
) -> None:
    why, _ = refused_first(tmp_path / "r", RATE, given)
    assert why.place == place
    assert problem in why.problem
    assert list(tmp_path.iterdir()) == []
