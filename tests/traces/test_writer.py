"""Rows go out in time order from the smallest arrival, unless they go back where they came from."""

import pytest

from llmtap.capture.schema import CaptureInfo
from llmtap.exchange.outcome import Outcome
from llmtap.traces.format import TraceWritten, batch_of
from llmtap.traces.writer import FAILED, Outgoing, int_lists
from tests.support.trace_files import rows

S = 10**9


def sent(
    info: CaptureInfo, times: str = "zero", **columns: list[object]
) -> tuple[list[object], TraceWritten]:
    written = TraceWritten()
    going = Outgoing("f", info, written, columns=("seq",), needs={"arrival_ns": "no arrival"}, times=times)
    n = len(columns["arrival_ns"])
    found = going.batches([batch_of(n, {"seq": list(range(n)), **columns})])
    return rows(found, "seq", "arrival_ns"), written


def test_a_foreign_trace_is_sorted_and_counts_from_its_smallest_arrival() -> None:
    found, written = sent(
        CaptureInfo(source="g", arrivals="trace"), arrival_ns=[30 * S, None, 20 * S, 30 * S]
    )
    assert found == [(2, 0), (0, 10 * S), (3, 10 * S)]
    assert (written.rows, written.dropped) == (3, {"no arrival": 1})
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
