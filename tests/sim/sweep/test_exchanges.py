"""A simulated Exchange measures as a tap measures the same answer, and its capture is like any other."""

import json
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmtap
from llmtap.cli.main import main
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.exchange.outcome import Outcome, TokenSource
from llmtap.metrics.latency import DEFAULT_BENEFIT, chunking_of, measure
from llmtap.metrics.objectives import Objectives
from llmtap.metrics.summary import Summary
from llmtap.sim.engine import RunRecord
from llmtap.sim.model_options import ServingSetup, read_serving
from llmtap.sim.sweep.simulate import (
    ExchangeMaker,
    ExchangeMeasuring,
    VirtualMeter,
    open_run_writer,
    simulate,
)
from llmtap.traces.convert import convert
from llmtap.workload.requests import Requests
from llmtap.workload.trace import load_trace

MS = 1_000_000
EPOCH_NS = 1_700_000_000 * 10**9
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 16\r\n\r\n"


def column(*values: int) -> "array[int]":
    return array("q", values)


def requests(arrival_ns: int = 0, given: int = 7, **more: object) -> Requests:
    """One request; its output does not matter, since tokens are told."""
    return Requests(column(arrival_ns), column(given), column(1), column(1), **more)  # type: ignore[arg-type]


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def passing_by(arrival_ns: int, token_ns: list[int], end_ns: int) -> Exchange:
    """The same answer through an observer: an event for each token, and usage at the end."""
    o = Observer("sim-x", 1, arrival_ns, EPOCH_NS + arrival_ns, REQUEST)
    o.request_data(b'{"model": "sim"}', arrival_ns)
    o.request_end(arrival_ns)
    o.on_submit(arrival_ns, 0)
    o.response_head(HEAD, token_ns[0], 0)
    frame = {"object": "chat.completion.chunk", "model": "sim"}
    for t_ns in token_ns:
        choice = {"index": 0, "delta": {"content": "word"}, "finish_reason": None}
        o.response_data(event(frame | {"choices": [choice]}), t_ns, 0)
    usage = {"prompt_tokens": 7, "completion_tokens": len(token_ns), "total_tokens": 7 + len(token_ns)}
    stop = event(frame | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage})
    o.response_data(stop + b"data: [DONE]\n\n", end_ns, 0)
    o.response_end(end_ns)
    return o.finish(end_ns, "complete", None, None, 0, 0, 0, 0)


@given(
    st.integers(0, 10**12),
    st.lists(st.integers(0, 10**10), min_size=1, max_size=40),
    st.integers(0, 10**9),
)
def test_it_measures_as_the_same_answer_passing_by(arrival_ns: int, gaps: list[int], rest_ns: int) -> None:
    token_ns = [arrival_ns + sum(gaps[: i + 1]) for i in range(len(gaps))]
    end_ns = token_ns[-1] + rest_ns
    ours = ExchangeMaker("x", requests(arrival_ns, epoch_ns=EPOCH_NS)).exchange(
        0, token_ns, end_ns, served=True
    )
    live = passing_by(arrival_ns, token_ns, end_ns)
    mine, theirs = measure(ours), measure(live)
    assert mine.metrics() == theirs.metrics()
    assert (mine.tbc_ns, mine.itl_even_ns, mine.itl_policy) == (
        theirs.tbc_ns,
        theirs.itl_even_ns,
        theirs.itl_policy,
    )
    for name in (
        "relay",
        "seq",
        "id",
        "arrival_wall_ns",
        "outcome",
        "method",
        "path",
        "endpoint",
        "dialect",
        "model",
        "response_model",
        "tenant",
        "status",
        "stream",
        "finish_reason",
        "tokens",
        "usage",
        "error",
        "no_token_reason",
    ):
        assert getattr(ours, name) == getattr(live, name), name
    result = ours.to_dict(mine.metrics(), chunking_of(ours))
    assert result["timeline"] == live.to_dict(theirs.metrics(), chunking_of(live))["timeline"]


def test_a_request_that_makes_no_token_is_an_empty_answer() -> None:
    x = ExchangeMaker("x", requests()).exchange(0, (), 5 * MS, served=True)
    assert (x.outcome, x.no_token_reason, x.tokens.output, x.status) == (Outcome.COMPLETE, "empty", 0, 200)
    assert (measure(x).ttft_ns, measure(x).e2e_ns, measure(x).ttfb_ns) == (None, 5 * MS, 5 * MS)
    assert Objectives.parse("ttft:1s").meets(measure(x), x) is False


OUTCOMES = [
    # tokens that left before it was given up, outcome, status, streamed, its counts, its words
    ((), Outcome.UPSTREAM_ERROR, 503, False, (None, None, TokenSource.NONE), None),
    ((3 * MS, 4 * MS), Outcome.TRUNCATED, 200, True, (7, 2, TokenSource.RUNNING_USAGE), 7 + 2),
]


@pytest.mark.parametrize(("token_ns", "outcome", "status", "stream", "tokens", "total"), OUTCOMES)
def test_what_the_scheduler_gave_up_failed_upstream_and_misses_every_objective(
    token_ns: tuple[int, ...],
    outcome: Outcome,
    status: int,
    stream: bool,
    tokens: tuple[int | None, int | None, TokenSource],
    total: int | None,
) -> None:
    x = ExchangeMaker("x", requests()).exchange(0, token_ns, 5 * MS, served=False)
    assert (x.outcome, x.status, x.stream) == (outcome, status, stream)
    assert (x.tokens.input, x.tokens.output, x.tokens.source) == tokens
    assert (x.usage or {}).get("total_tokens") == total
    assert (x.finish_reason, x.error) == (None, "given up by the scheduler")
    assert Objectives.parse("ttft:1s tpot:1s e2e:1s").meets(measure(x), x) is False
    assert measure(x).e2e_ns == 5 * MS


@pytest.mark.parametrize(("found", "cached"), [((), None), ((0,), 0), ((5,), 5), ((-1,), None)])
def test_what_the_prefix_cache_had_is_in_the_usage(found: tuple[int, ...], cached: int | None) -> None:
    played = RunRecord.for_requests(1, 1)
    played.cached = column(*found)
    x = ExchangeMaker("x", requests(), played).exchange(0, (5,), 6, served=True)
    assert x.tokens.cached == cached
    details = None if cached is None else {"cached_tokens": cached}
    assert (x.usage or {}).get("prompt_tokens_details") == details


def three() -> ExchangeMaker:
    columns = (array("q", [0, 10 * MS, 20 * MS]), *(array("q", [n] * 3) for n in (5, 4, 4)))
    return ExchangeMaker("x", Requests(*columns))


def test_slow_is_who_had_any_gap_above_the_bound() -> None:
    meter = VirtualMeter(three(), Summary(), DEFAULT_BENEFIT, 10 * MS, lambda x: None)
    meter.on_ended(0, [100 * MS], 100 * MS, served=True)  # one token has no gap, however late
    meter.on_ended(1, [100 * MS, 110 * MS, 120 * MS], 500 * MS, served=True)
    assert meter.slow_requests == 0
    meter.on_ended(2, [100 * MS, 110 * MS, 120 * MS + 1, 121 * MS], 121 * MS, served=False)
    assert meter.slow_requests == 1


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
    recorder = open_run_writer(to, scheduler, requests)
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
    result = reported("--by", "arm")
    assert (result["load"]["mode"], list(result["by"]["arm"])) == ("open", ["x"])
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
    result = simulate(
        "continuous_batching",
        requests,
        ServingSetup(serving=serving),
        measuring=ExchangeMeasuring(capture=tmp_path / "c"),
    ).to_dict()
    convert(str(tmp_path / "c"), str(back), target_format="mooncake")
    assert back.read_text() == trace.read_text()
    # What the cache had is whole blocks only: 512 tokens, of which one is made again, and 1,024.
    cached = {x.seq: x.tokens.cached for x in llmtap.read(tmp_path / "c").exchanges()}
    assert cached == {1: 0, 2: 511, 3: 1_024, 4: 0}
    assert result["engine"]["prefix_hits"] == sum(cached.values())
    # And the capture is a trace with the same blocks again.
    assert load_trace(str(tmp_path / "c")).requests.blocks == requests.blocks
