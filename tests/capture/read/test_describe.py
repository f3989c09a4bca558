from array import array
from typing import Any

import pyarrow as pa
import pytest

from llmtap.capture.read.describe import CapturedWorkload, describe
from llmtap.capture.schema import SCHEMA, CaptureInfo
from llmtap.capture.store.rows import to_batch
from llmtap.exchange.exchange import BACK, FRONT, Exchange, RequestShape, Tokens, Turn
from llmtap.exchange.outcome import Outcome, TokenSource
from llmtap.metrics.objectives import Objectives
from llmtap.metrics.statistics import percentile
from llmtap.metrics.summary import Summary
from tests.support.traffic.exchanges import streamed


def batch(*exchanges: Exchange, capture: str = "c1") -> pa.RecordBatch:
    return to_batch(exchanges, capture=capture, level="shape")[0]


def workload(*batches: pa.RecordBatch, **options: Any) -> dict[str, Any]:
    summed = CapturedWorkload(**options)
    for one in batches:
        summed.add(one)
    return summed.to_dict()


def blocks(*ids: int, size: int | None = 512) -> RequestShape:
    return RequestShape(blocks=array("q", ids), block_size=size, block_unit="tokens")


def test_arrivals_are_put_in_order_before_their_gaps_are_taken() -> None:
    first = batch(streamed(2, at_ms=3_000), streamed(1, at_ms=0))
    told = workload(first, batch(streamed(3, at_ms=1_000), streamed(4, at_ms=1_000)))["arrivals"]
    gaps = [1.0, 0.0, 2.0]
    deviation = (sum((gap - 1) ** 2 for gap in gaps) / 3) ** 0.5
    assert told == {
        "n": 4,
        "seconds": 3.0,
        "rate_rps": 1.0,
        "gap_cv": pytest.approx(deviation),
        "ties": 1 / 3,
    }


def test_lengths_have_percentiles_by_the_one_rule_and_their_source() -> None:
    lengths = [5, 100, 7, 3_000, 12]
    xs = [streamed(i, tokens=Tokens(n, 2 * n, source=TokenSource.CHUNKS)) for i, n in enumerate(lengths)]
    xs.append(streamed(9, tokens=Tokens(), shape=RequestShape(tokens=8)))
    told = workload(batch(*xs[:2]), batch(*xs[2:]))
    figures = told["input_tokens"]
    assert figures["p90"] == pytest.approx(percentile(sorted([*lengths, 8]), 0.9))
    assert (figures["n"], figures["min"], figures["max"], figures["total"]) == (6, 5, 3_000, 3_132)
    assert figures["source"] == {"usage": 5, "tokenizer": 1}
    assert (told["output_tokens"]["n"], told["output_tokens"]["source"]) == (5, {"chunks": 5})


def test_the_silences_of_captured_streams_are_those_of_their_events() -> None:
    left = streamed(3, 1, outcome=Outcome.CLIENT_CANCELLED)
    left.timeline.response_end_ns = None
    left.timeline.delivered_ns = (left.timeline.last_token_ns or 0) + 30_000_000_000
    whole = streamed(4)
    whole.stream = False
    rows = batch(streamed(1, 3, gap_ms=2_000), streamed(2, 3), left, whole)
    found: Any = describe([CaptureInfo()], [rows])["silences"]
    assert found["streams"] == 3
    assert (found["next_token"]["n"], found["next_token"]["resumed"]) == (3, 2)
    assert {row["silence"]: (row["n"], row["resumed"]) for row in found["next_token"]["went_on"]} == {
        1: (3, 2),
        2: (3, 2),
        5: (1, 0),
        10: (1, 0),
        30: (1, 0),
        60: (0, 0),
        120: (0, 0),
        300: (0, 0),
    }
    assert found["next_token"]["timeout"] is None


def test_a_cache_without_end_hits_every_block_but_the_first_of_its_kind() -> None:
    """Blocks of two captures or sizes are never the same."""
    asked = [blocks(1, 2, 3), blocks(1, 2, 9), blocks(7), blocks(1, 2, size=16)]
    xs = [streamed(i, shape=shape) for i, shape in enumerate(asked)]
    told = workload(batch(xs[0]), batch(*xs[1:], streamed(4)), batch(xs[0], capture="c2"))["prefix"]
    assert told[0] == {
        "capture": "c1",
        "unit": "tokens",
        "block_size": 512,
        "blocks": 7,
        "hits": 2,
        "share": pytest.approx(2 / 7),
    }
    assert [(p["capture"], p["block_size"], p["hits"]) for p in told[1:]] == [("c1", 16, 0), ("c2", 512, 0)]


def test_conversations_are_counted_across_batches() -> None:
    def turn(seq: int, session: str, number: int, think_ms: int | None, by: str) -> Exchange:
        think_ns = None if think_ms is None else think_ms * 1_000_000
        return streamed(seq, turn=Turn(session, "prefix", number, None, think_ns, by))

    first = batch(turn(1, "a", 0, None, "human"), turn(2, "b", 0, None, "human"))
    told = workload(first, batch(turn(3, "a", 1, 50, "tool"), turn(4, "a", 2, 9_000, "human"), streamed(5)))
    sessions = told["sessions"]
    assert (sessions["n"], sessions["exchanges"], sessions["single_turn_share"]) == (2, 4, 0.5)
    assert (sessions["turns"]["mean"], sessions["turns"]["max"]) == (2, 3)
    assert sessions["tool_turn_share"] == 0.25
    assert (sessions["think"]["human"]["p50"], sessions["think"]["tool"]["p50"]) == (9.0, 0.05)
    assert sessions["source"] == {"prefix": 4}


def test_nothing_is_summed_up_as_null() -> None:
    nulls = pa.RecordBatch.from_arrays([pa.nulls(2, field.type) for field in SCHEMA], schema=SCHEMA)
    for told in (workload(), workload(nulls), workload(nulls.slice(0, 0))):
        assert told["arrivals"] == {"n": 0, "seconds": 0.0, "rate_rps": None, "gap_cv": None, "ties": None}
        assert told["input_tokens"]["p50"] is None
        assert told["sessions"] is None
        assert told["prefix"] == []


# ---------------------------------------------------------------- with the Summary


INFO = CaptureInfo(capture="c1", level="shape", tap_version="0.1.0")


def described(*exchanges: Exchange, **options: Any) -> dict[str, Any]:
    info = options.pop("info", INFO)
    return describe([info], [batch(*exchanges)], **options)


def test_the_summary_is_that_of_the_exchanges_within_a_microsecond() -> None:
    xs = [streamed(i, words=3 + i, at_ms=100 * i, gap_ms=20.0001) for i in range(9)]
    live = Summary(Objectives.parse("ttft:99ms tpot:1ms"))
    for x in xs:
        live.add(x)
    told = described(*xs, objectives=live.objectives)
    seconds = told["window"]["seconds"]
    expected: dict[str, Any] = live.to_dict(told["window"], seconds)
    for name, figures in expected["metrics"].items():
        found = told["metrics"][name]
        assert found["n"] == figures["n"], name
        if name != "smooth_benefit" and figures["n"]:
            for figure in ("mean", "p50", "p99", "max"):
                assert found[figure] == pytest.approx(figures[figure], abs=1.01e-6, rel=0.001), name
    for name in ("n", "outcomes", "tokens", "goodput", "chunking", "refusals"):
        assert told[name] == expected[name]
    assert seconds == pytest.approx(0.8 + (100 + 10 * 20.0001 + 1) / 1e3, abs=1e-6)
    assert told["window"]["start"] == "2023-11-14T22:13:20Z"


def test_a_summary_can_be_split_and_the_most_frequent_come_first() -> None:
    xs = [streamed(i, tenant="a" if i else "b", arm="x" if i == 2 else None) for i in range(4)]
    told = described(*xs, by=("tenant", "arm", "session"))
    assert {name: part["n"] for name, part in told["by"]["tenant"].items()} == {"a": 3, "b": 1}
    assert list(told["by"]["tenant"]) == ["a", "b"]
    assert {name: part["n"] for name, part in told["by"]["arm"].items()} == {"none": 3, "x": 1}
    assert list(told["by"]["session"]) == ["none"]


def test_groups_beyond_the_bound_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmtap.capture.read.describe.GROUPS_MAX", 9)
    xs = [streamed(i, words=0, tenant=f"t{i}") for i in range(14)]
    groups = described(*xs, by=("tenant",))["by"]["tenant"]
    assert len(groups) == 10
    assert groups["other"]["n"] == 5


def test_outcomes_that_nobody_told_are_not_complete() -> None:
    at = SCHEMA.get_field_index("outcome")
    rows = batch(streamed(1), streamed(2), streamed(3))
    rows = rows.set_column(at, SCHEMA.field(at), pa.array(["refused", None, None], pa.string()))
    told = describe([INFO], [rows])
    assert told["outcomes"] == {"refused": 1, "unknown": 2}


def test_what_files_say_of_themselves_is_told() -> None:
    told = described(
        streamed(1), info=CaptureInfo(source="mooncake", arrivals="trace", damaged={"batches": 2})
    )
    about = told["capture"]
    assert (about["source"], about["level"], about["damaged"], about["rows"]) == (["mooncake"], [], 2, 1)
    assert (told["window"]["start"], told["load"]["mode"]) == (None, "recorded")


def without(rows: pa.RecordBatch, *columns: str) -> pa.RecordBatch:
    for name in columns:
        at = SCHEMA.get_field_index(name)
        rows = rows.set_column(at, SCHEMA.field(at), pa.nulls(rows.num_rows, SCHEMA.field(at).type))
    return rows


def test_a_trace_that_tells_no_times_but_arrivals_has_no_rate_of_ends_and_no_uncertainty() -> None:
    rows = batch(streamed(1), streamed(2, at_ms=500))
    told: Any = describe(
        [INFO], [without(rows, "response_end_us", "submit_us", "uncertainty_us")], by=("tenant",)
    )
    for one in (told, told["by"]["tenant"]["acme"]):
        assert (one["load"]["achieved_rps"], one["uncertainty"]) == (None, None)
    told = describe([INFO], [rows])
    assert told["uncertainty"] == 50e-6
    assert told["load"]["achieved_rps"] == pytest.approx(2 / 0.641)


def test_of_both_sides_of_a_gateway_each_request_counts_once_except_by_side() -> None:
    xs = [streamed(i, tenant="acme") for i in range(5)]
    for i, x in enumerate(xs):
        x.side = FRONT if i < 2 else BACK
    told: Any = describe([CaptureInfo()], [batch(*xs[::2]), batch(*xs[1::2])], by=("side", "tenant"))
    assert (told["n"], told["workload"]["rows"], told["capture"]["back_rows"]) == (2, 2, 3)
    assert {side: part["n"] for side, part in told["by"]["side"].items()} == {FRONT: 2, BACK: 3}
    assert told["by"]["tenant"]["acme"]["n"] == 2
