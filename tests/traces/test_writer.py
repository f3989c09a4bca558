"""Rows go out in time order from the smallest arrival, unless they go back where they came from."""

import pytest

from llmtap.capture.schema import CaptureInfo
from llmtap.exchange.outcome import Outcome
from llmtap.traces.format import TraceWritten, batch_of
from llmtap.traces.writer import FAILED, BlockIds, Outgoing, int_lists
from tests.support.workloads.trace_files import rows

S = 10**9


def sent(
    info: CaptureInfo, times: str = "zero", **columns: list[object]
) -> tuple[list[object], TraceWritten]:
    written = TraceWritten()
    going = Outgoing("f", info, written, columns=("seq",), needs=("arrival_ns",), times=times)
    n = len(columns["arrival_ns"])
    found = going.batches([batch_of(n, {"seq": list(range(n)), **columns})])
    return rows(found, "seq", "arrival_ns"), written


def test_a_foreign_trace_is_sorted_and_counts_from_its_smallest_arrival() -> None:
    found, written = sent(
        CaptureInfo(source="g", arrivals="trace"), arrival_ns=[30 * S, None, 20 * S, 30 * S]
    )
    assert found == [(2, 0), (0, 10 * S), (3, 10 * S)]
    assert (written.rows, written.dropped) == (3, {"no arrival time": 1})
    assert written.notes == ["arrivals count from the smallest one, 20 s of the source's own time"]


def test_its_own_trace_goes_back_as_it_was() -> None:
    found, written = sent(CaptureInfo(source="f", arrivals="trace"), arrival_ns=[30 * S, 20 * S])
    assert found == [(0, 30 * S), (1, 20 * S)]
    assert written.notes == []


def test_dates_stay_dates() -> None:
    found, written = sent(CaptureInfo(arrivals="wall"), "date", arrival_ns=[30 * S, 20 * S])
    assert found == [(1, 20 * S), (0, 30 * S)]
    assert written.notes == []


@pytest.mark.parametrize("outcome", [None, *Outcome])
def test_a_failed_request_is_dropped_and_counted(outcome: Outcome | None) -> None:
    found, written = sent(CaptureInfo(), arrival_ns=[1], outcome=[outcome])
    assert bool(found) == (outcome not in FAILED)
    assert written.dropped == ({} if found else {"failed request": 1})


def test_lists_come_as_lists() -> None:
    batch = batch_of(4, {"blocks": [[1, 2], None, [], [3]]})
    assert int_lists(batch.column("blocks").slice(1)) == [None, [], [3]]


# ---------------------------------------------------------------- prefix blocks


def of(
    blocks: list[list[int] | None], tokens: list[int], size: int, unit: str, kind: str
) -> tuple[list[list[int] | None], TraceWritten]:
    made = BlockIds(CaptureInfo(blocks=kind), 512)
    n = len(blocks)
    columns = {"blocks": blocks, "input_tokens": tokens, "block_size": [size] * n, "block_unit": [unit] * n}
    return made.of(batch_of(n, columns)), reported(made)


def reported(made: BlockIds) -> TraceWritten:
    written = TraceWritten()
    made.report(written)
    return written


def test_salted_hashes_are_numbered_by_first_use_over_all_batches() -> None:
    made = BlockIds(CaptureInfo(blocks="salted"), 512)
    columns = {"block_size": [512, 512], "block_unit": ["tokens", "tokens"], "input_tokens": [1_000, 600]}
    assert made.of(batch_of(2, {"blocks": [[-9, 7], [-9, 5]], **columns})) == [[0, 1], [0, 2]]
    assert made.of(batch_of(2, {"blocks": [[7, 5], None], **columns})) == [[1, 2], None]
    assert reported(made).notes == ["1 rows have no prefix blocks, and are written without them"]


@pytest.mark.parametrize(
    ("size", "unit", "blocks", "tokens", "found", "changed"),
    [
        (512, "tokens", [[-9, 7]], [600], [[-9, 7]], None),
        (256, "tokens", [[1, 2, 3], [1, 2, 3, 4]], [600, 1024], [[2, 3], [2, 4]], "2 rows had smaller"),
        (256, "tokens", [[]], [0], [[]], "1 rows had smaller blocks: of their ids every n-th, and the last"),
        (
            2048,
            "bytes",
            [[1, 2]],
            [600],
            [[1, 2]],
            "blocks of 2,048 bytes go out as ids of 512 tokens: 0 rows",
        ),
        (
            2048,
            "bytes",
            [[1, 2, 3]],
            [600],
            [[1, 2, 3]],
            "1 rows have another number of ids than ceil(input_length / 512); with meter.tokenizer set",
        ),
        (1024, "tokens", [[1]], [600], [[1]], "blocks of 1,024 tokens go out as ids of 512 tokens: 1 rows"),
    ],
)
def test_other_sizes_are_made_larger_or_left(
    size: int,
    unit: str,
    blocks: list[list[int] | None],
    tokens: list[int],
    found: list[list[int]],
    changed: str | None,
) -> None:
    made, told = of(blocks, tokens, size, unit, "trace")
    assert made == found
    assert told.notes == []
    if changed is None:
        assert told.changed == {}
    else:
        assert changed in told.changed["prefix blocks"]


def test_a_rule_that_is_broken_is_counted() -> None:
    _, told = of([[1], [1, 2], []], [1024, 600, 5], 512, "tokens", "trace")
    assert told.notes == ["2 rows have another number of ids than ceil(input_length / 512)"]
    assert told.changed == {}, "they came like this"
