"""A load is warmed up for by other requests, primed, sent, and kept where its result says it is."""

import gzip
import json
import stat
from array import array
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from llmtap.bench.run.session import REQUESTS_FILE, Load, StoredRequests, make_load, write_requests
from llmtap.load.bodies import BodyMaker, prepare
from llmtap.load.options import BodyOptions
from llmtap.metrics.deadlines import Benefit
from llmtap.workload.registry import workload_named
from llmtap.workload.requests import Requests
from tests.bench.support import session_to, sim, truths
from tests.support.servers.peer import play


def load_of(folder: Path, tokens: int, output: int, *, requests: int = 6) -> Load:
    file = folder / f"{tokens}-{output}.toml"
    file.write_text(f"input = {tokens}\noutput = {output}\n")
    return make_load(str(file), slots=2, seed=42, requests=requests)


def test_the_cache_is_primed_after_the_warm_up_and_just_before_the_load(tmp_path: Path) -> None:
    warm, prime, load = (load_of(tmp_path, 20, output, requests=n) for output, n in ((2, 3), (3, 2), (5, 4)))
    with sim("--ttft", "5ms", "--itl", "1ms") as url:
        session = session_to(url, tmp_path, warmup="3")
        result = play(session.measure("load", load, warm_by=warm, prime=prime), limit_s=250)
        report = sorted(truths(url), key=lambda one: int(one["accepted_ns"]))
    assert [len(one["sent_ns"][0]) for one in report] == [2] * 3 + [3] * 2 + [5] * 4
    assert (result.n, result.result["primed"], result.result["warmup"]["requests"]) == (4, 2, 3)


def test_a_load_is_judged_for_the_reader_and_measured_again_for_another(tmp_path: Path) -> None:
    def smooth(reader: Benefit) -> tuple[bool, dict[str, Any]]:
        session = session_to(url, tmp_path, warmup="none")
        session.reader = reader
        result = play(session.measure("load", load_of(tmp_path, 20, 3)), limit_s=250)
        return result.cached, result.result["smooth_goodput"]

    with sim("--ttft", "5ms", "--itl", "1ms") as url:
        default = smooth(Benefit())
        slow, again = (smooth(Benefit.at_speed(10, alpha=2)) for _ in range(2))
    assert (default[0], slow[0], again[0]) == (False, False, True)
    assert [report["speed_tokens_per_second"] for _, report in (default, slow, again)] == [20, 10, 10]
    assert (default[1]["alpha"], slow[1]["alpha"]) == (5, 2)


def test_a_result_names_the_place_where_its_capture_lies_in_the_end(tmp_path: Path) -> None:
    with sim("--ttft", "5ms", "--itl", "1ms") as url:
        session = session_to(url, tmp_path, "ttft", warmup="none")
        result = play(session.measure("search/4rps", load_of(tmp_path, 20, 3)), limit_s=250)
    place = tmp_path / "ttft/steps/search/4rps"
    assert Path(result.result["capture"]["to"]) == place / "capture"
    assert (place / "capture").is_dir()
    stored = json.loads((place / "step.json").read_text())
    assert stored["result"]["capture"] == result.result["capture"]
    # Only the owner may read the requests.
    requests = [place / REQUESTS_FILE, *place.rglob("*.parquet")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in requests] == [0o600] * 3
    assert not list(tmp_path.rglob("*.unfinished"))


def stored(folder: Path, requests: Requests, **more: Any) -> tuple[StoredRequests, list[dict[str, Any]]]:
    """What is told, and the lines of the file, if there is one."""
    prompts = workload_named("synthetic-uniform", "TRACE").prompts(requests, 7)
    maker = BodyMaker(BodyOptions(endpoint="completions", model="m"))
    with prepare(requests, prompts, maker) as prepared:
        report = write_requests(prepared, requests, folder, **({"planned": True} | more))
    file = folder / REQUESTS_FILE
    lines = gzip.decompress(file.read_bytes()).splitlines() if file.exists() else []
    return report, [json.loads(line) for line in lines]


def three() -> Requests:
    requests = workload_named("synthetic-uniform", "TRACE").requests(3, 7)
    requests.arrival_ns = array("q", [0, 500_000_000, 1_250_000_000])
    return requests


def test_each_line_has_a_request_as_it_was_sent(tmp_path: Path) -> None:
    requests = three()
    report, lines = stored(tmp_path, requests)
    assert [line["arrival"] for line in lines] == [0.0, 0.5, 1.25]
    assert [line["after"] for line in lines] == [None] * 3
    assert [len(line["body"]["prompt"]) for line in lines] == list(requests.input)
    assert [line["body"]["max_tokens"] for line in lines] == list(requests.output)
    assert report.rows == 3
    raw = [
        line.partition(b'"body":')[2][:-1]
        for line in gzip.decompress((tmp_path / REQUESTS_FILE).read_bytes()).splitlines()
    ]
    assert report.bytes == sum(map(len, raw))
    assert report.sha256 == sha256(b"".join(raw)).hexdigest()


def test_too_many_bytes_leave_their_digest(tmp_path: Path) -> None:
    whole, _ = stored(tmp_path, three())
    (tmp_path / REQUESTS_FILE).unlink()
    report, lines = stored(tmp_path, three(), bytes_max=whole.bytes - 1)
    assert lines == []
    assert report == msgspec.structs.replace(whole, file=None)


def test_who_waits_for_whom_and_what_nobody_planned(tmp_path: Path) -> None:
    requests = three()
    requests.after, requests.think_ns = array("q", [-1, 0, 1]), array("q", [0, 0, 0])
    _, lines = stored(tmp_path, requests, planned=False)
    assert [line["after"] for line in lines] == [None, 0, 1]
    assert [line["arrival"] for line in lines] == [None] * 3
