"""Rows go out in time order from the smallest arrival, unless they go back where they came from."""

import io
from collections.abc import Sequence

import pytest

from llmtap.capture.schema import CaptureInfo
from llmtap.exchange.outcome import Outcome
from llmtap.traces.format import FAILED, TraceWriter, batch_of
from llmtap.traces.formats.mooncake import BlockIds
from tests.support.workloads.trace_files import rows

S = 10**9


def sent(info: CaptureInfo, times: str = "zero", **columns: list[object]) -> tuple[list[object], TraceWriter]:
    n = len(columns["arrival_ns"])
    batches = [batch_of(n, {"seq": list(range(n)), **columns})]
    writer = TraceWriter("f", io.BytesIO(), info, batches)
    return rows(writer.rows_to_write(("seq",), ("arrival_ns",), times=times), "seq", "arrival_ns"), writer


def test_a_foreign_trace_is_sorted_and_counts_from_its_smallest_arrival() -> None:
    info = CaptureInfo(source="g", arrivals="trace")
    found, written = sent(info, arrival_ns=[30 * S, None, 20 * S, 30 * S])
    assert found == [(2, 0), (0, 10 * S), (3, 10 * S)]
    assert (written.rows, written.dropped) == (3, {"no arrival time": 1})
    assert written.notes == ["arrivals count from the smallest one, 20 s of the source's own time"]


def test_its_own_trace_goes_back_as_it_was_and_dates_stay_dates() -> None:
    found, written = sent(CaptureInfo(source="f", arrivals="trace"), arrival_ns=[30 * S, 20 * S])
    assert (found, written.notes) == ([(0, 30 * S), (1, 20 * S)], [])
    found, written = sent(CaptureInfo(arrivals="wall"), "date", arrival_ns=[30 * S, 20 * S])
    assert (found, written.notes) == ([(1, 20 * S), (0, 30 * S)], [])


@pytest.mark.parametrize("outcome", [None, *Outcome])
def test_a_failed_request_is_dropped_and_counted(outcome: Outcome | None) -> None:
    found, written = sent(CaptureInfo(), arrival_ns=[1], outcome=[outcome])
    assert bool(found) == (outcome not in FAILED)
    assert written.dropped == ({} if found else {"failed request": 1})


Ids = Sequence[Sequence[int] | None]


def block_ids(
    kind: str, *parts: tuple[Ids, list[int]], size: int = 512, unit: str = "tokens"
) -> tuple[list[Ids], TraceWriter]:
    """Ids that are written of batches of blocks and input tokens."""
    writer = TraceWriter("f", io.BytesIO(), CaptureInfo(blocks=kind), [])
    made = BlockIds(writer)
    found: list[Ids] = []
    for blocks, tokens in parts:
        n = len(blocks)
        columns = {
            "blocks": blocks,
            "input_tokens": tokens,
            "block_size": [size] * n,
            "block_unit": [unit] * n,
        }
        found.append(made.ids_of_rows(batch_of(n, columns)))
    made.report()
    return found, writer


def test_salted_hashes_are_numbered_by_first_use_over_all_batches() -> None:
    found, written = block_ids("salted", ([[-9, 7], [-9, 5]], [1_000, 600]), ([[7, 5], None], [1_000, 600]))
    assert found == [[[0, 1], [0, 2]], [[1, 2], None]]
    assert written.notes == ["1 rows have no prefix blocks, and are written without them"]


@pytest.mark.parametrize(
    ("size", "unit", "blocks", "tokens", "found", "changed"),
    [
        (512, "tokens", [[-9, 7]], [600], [[-9, 7]], None),
        (256, "tokens", [[1, 2, 3], [1, 2, 3, 4]], [600, 1024], [[2, 3], [2, 4]], "2 rows had smaller"),
        (256, "tokens", [[]], [0], [[]], "1 rows had smaller blocks: of their ids every n-th, and the last"),
        (2048, "bytes", [[1, 2]], [600], [[1, 2]], "blocks of 2,048 bytes go out as ids of 512 tokens: 0"),
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
    blocks: list[list[int]],
    tokens: list[int],
    found: list[list[int]],
    changed: str | None,
) -> None:
    made, result = block_ids("trace", (blocks, tokens), size=size, unit=unit)
    assert (made, result.notes) == ([found], [])
    assert result.changed == {} if changed is None else changed in result.changed["prefix blocks"]


def test_a_rule_that_is_broken_is_counted() -> None:
    _, result = block_ids("trace", ([[1], [1, 2], []], [1024, 600, 5]))
    assert result.notes == ["2 rows have another number of ids than ceil(input_length / 512)"]
    assert result.changed == {}, "they came like this"
