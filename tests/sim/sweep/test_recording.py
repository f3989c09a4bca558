"""Invariant: what a run writes is a capture like any other, and one that was cut short says so."""

import json
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest

import llmtap
from llmtap.cli.main import main
from llmtap.exchange.exchange import Exchange
from llmtap.sim.model_options import ModelOptions, read_serving
from llmtap.sim.sweep.simulate import ExchangeMaker, run_writer, simulate
from llmtap.traces.convert import convert
from llmtap.workload.requests import Requests
from llmtap.workload.trace import load_trace

US, MS = 1_000, 1_000_000
EPOCH_NS = 1_700_000_000 * 10**9


def work(n: int, **more: object) -> Requests:
    """n requests, 1 ms apart, of 20 tokens in and 3 out."""
    columns = (array("q", range(0, n * MS, MS)), *(array("q", [k] * n) for k in (20, 3, 3)))
    return Requests(*columns, **more)  # type: ignore[arg-type]


def exchanges(requests: Requests, scheduler: str = "x") -> list[Exchange]:
    """Each with tokens 5, 7 and 9 ms after its arrival; every fourth is given up after two."""
    make, found = ExchangeMaker(scheduler, requests).exchange, []
    for i, at_ns in enumerate(requests.arrival_ns):
        times = [at_ns + 5 * MS, at_ns + 7 * MS, at_ns + 9 * MS][: 2 if i % 4 == 3 else 3]
        found.append(make(i, times, times[-1] + MS, served=i % 4 != 3))
    return found


def record(to: Path | str, requests: Requests, scheduler: str = "x", *, close: bool = True) -> list[Exchange]:
    recorder = run_writer(to, scheduler, requests)
    made = exchanges(requests, scheduler)
    for x in reversed(made):  # who came first need not end first
        recorder.add(x)
    if close:
        recorder.close()
    return made


def test_reader_report_and_convert_take_it_and_find_nothing_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reported(*args: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["llmtap", "report", str(to), "--json", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        out, err = capsys.readouterr()
        assert err == ""
        return json.loads(out)

    to = tmp_path / "runs" / "a"
    made = record(to, work(50, epoch_ns=EPOCH_NS))
    capture = llmtap.read(to)
    assert capture.integrity().ok
    assert capture.integrity().captures[0].closed
    assert capture.info.arrivals == "wall"
    assert {x.seq: x.arrival_wall_ns for x in capture.exchanges()} == {x.seq: x.arrival_wall_ns for x in made}
    assert reported("--integrity")["ok"]
    told = reported("--by", "arm")
    assert (told["load"]["mode"], list(told["by"]["arm"])) == ("open", ["x"])
    report = convert(str(to), str(tmp_path / "m.jsonl"), target_format="mooncake")
    assert (report.rows_read, report.rows_written) == (50, 38)  # a failed request has no place there


def test_a_trace_without_dates_keeps_its_own_zero(tmp_path: Path) -> None:
    record(tmp_path, work(2))
    capture = llmtap.read(tmp_path)
    assert capture.info.arrivals == "trace"
    assert sorted(x.arrival_wall_ns for x in capture.exchanges()) == [0, MS]


def test_a_mooncake_trace_comes_back_as_it_was(tmp_path: Path) -> None:
    """With the last block of each prompt, which is not full."""
    rows = [
        (0, 1_100, 3, [7, 8, 9]),
        (1_000, 512, 1, [7]),
        (2_000, 1_030, 2, [7, 8, 11]),
        (9_000, 5, 4, [12]),
    ]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    trace, back = tmp_path / "m.jsonl", tmp_path / "back.jsonl"
    trace.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    requests = load_trace(str(trace)).requests_at(count=len(rows))
    serving = read_serving({"prefix_cache": "true"})
    told = simulate(
        "continuous_batching", requests, ModelOptions(), serving=serving, capture=tmp_path / "c"
    ).to_dict()
    convert(str(tmp_path / "c"), str(back), target_format="mooncake")
    assert back.read_text() == trace.read_text()
    # What the cache had is whole blocks only: 512 tokens, of which one is made again, and 1,024.
    cached = {x.seq: x.tokens.cached for x in llmtap.read(tmp_path / "c").exchanges()}
    assert cached == {1: 0, 2: 511, 3: 1_024, 4: 0}
    assert told["engine"]["prefix_hits"] == sum(cached.values())
    # And the capture is a trace with the same blocks again.
    assert load_trace(str(tmp_path / "c")).requests.blocks == requests.blocks
