"""Invariant: numbers present and missing make up all that were given out, and what is missing is explained by
no more than what was said of it.
"""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.read.integrity import check_integrity, latest_ledger
from llmtap.capture.schema import SCHEMA, CaptureInfo, CaptureLedger, RelayCount
from llmtap.capture.store.rows import exchanges_of, to_batch
from tests.support.storage.captures import ledger
from tests.support.traffic.exchanges import streamed


def batch(*seqs: int, relay: str = "run.0.1", capture: str = "c1") -> pa.RecordBatch:
    exchanges = [streamed(seq, words=0, relay=relay) for seq in seqs]
    return to_batch(exchanges, capture=capture, level="shape")[0]


NOTHING = CaptureLedger()


def info(word: CaptureLedger = NOTHING, capture: str = "c1", **told: Any) -> CaptureInfo:
    return CaptureInfo(capture=capture, ledger=word, **told)


UNDER_WAY = ledger(9, unsettled=3)
AFTER_RELOAD = ledger(8, dropped={"no_meter": 3}, unsettled=2)
KEPT_NOT = [ledger(5, not_kept={"disk": 1}), ledger(9, not_kept={"disk": 2, "memory": 1})]
OF_TWO = [ledger(5, not_kept={"disk": 2}), ledger(9, not_kept={"disk": 1}, meter="m2")]
CASES: list[tuple[str, list[CaptureLedger], list[list[int]], dict[str, object]]] = [
    (
        "a whole capture lacks nothing",
        [ledger(4)],
        [[1, 2], [4, 3]],
        {"present": 4, "ranges": [], "missing": 0, "unexplained": 0, "exact": True, "ok": True},
    ),
    (
        "missing numbers are ranges, and not explained by themselves",
        [ledger(9)],
        [[2, 3, 7]],
        {
            "present": 3,
            "ranges": [(1, 1), (4, 6), (8, 9)],
            "missing": 6,
            "unexplained": 6,
            "exact": True,
            "ok": False,
        },
    ),
    (
        "drops of a relay explain as many",
        [ledger(9, dropped={"overflow": 2, "no_meter": 1})],
        [[1, 2, 3, 5, 7]],
        {"missing": 4, "unexplained": 1, "exact": True},
    ),
    (
        "exchanges under way may explain",
        [UNDER_WAY],
        [[1, 2, 3, 5]],
        {"missing": 2, "running": 3, "unexplained": 2, "exact": False},
    ),
    (
        "a running capture that lacks only running streams is whole",
        [ledger(5, unsettled=2)],
        [[1, 3, 4]],
        {"missing": 0, "running": 2, "ranges": [(2, 2), (5, 5)], "ok": True},
    ),
    # The last report had 2 under way; their rows came later.
    (
        "rows since the last report settle what was under way",
        [AFTER_RELOAD],
        [[4, 5, 6, 7, 8]],
        {"missing": 3, "running": 0, "unsettled": 0, "unexplained": 0, "exact": True, "ok": True},
    ),
    (
        "drops explain before exchanges under way do",
        [AFTER_RELOAD],
        [[4, 5, 6, 7]],
        {"missing": 3, "running": 1, "unsettled": 1, "unexplained": 0, "exact": False},
    ),
    (
        "nothing runs in a closed capture",
        [ledger(5, unsettled=2, closed=True)],
        [[1, 3, 4]],
        {"missing": 2, "running": 0, "unexplained": 0},
    ),
    (
        "those begun after the last report, too",
        [ledger(4)],
        [[1, 2, 3, 4, 6, 9]],
        {"opened": 9, "ranges": [(5, 5), (7, 8)], "since": 3, "exact": False, "ok": True},
    ),
    (
        "a range across the last report counts from there",
        [ledger(5)],
        [[1, 2, 3, 8]],
        {"ranges": [(4, 7)], "since": 2, "unexplained": 2},
    ),
    (
        "what a meter could not keep is accounted for",
        KEPT_NOT,
        [[1, 2, 3, 4, 5]],
        {"unexplained": 1, "not_kept": {"disk": 2, "memory": 1}},
    ),
    (
        "each meter counts anew",
        OF_TWO,
        [[1, 2, 3, 4, 5, 6]],
        {"ok": True, "not_kept": {"disk": 3}, "meters": 2},
    ),
    ("a relay without rows lacks all", [ledger(3)], [], {"ranges": [(1, 3)]}),
    (
        "a relay without a report is known by its rows",
        [NOTHING],
        [[1, 4]],
        {"ranges": [(2, 3)], "unexplained": 0, "exact": False},
    ),
    (
        "rows that are there twice are counted",
        [ledger(3)],
        [[1, 2, 2], [3, 2]],
        {"duplicates": 2, "missing": 0, "ok": False},
    ),
]


@pytest.mark.parametrize(("words", "rows", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_what_is_missing_and_what_explains_it(
    words: list[CaptureLedger], rows: list[list[int]], expected: dict[str, object]
) -> None:
    checked = check_integrity(map(info, words), [batch(*seqs) for seqs in rows])
    told = checked.to_dict()
    (capture,) = told["captures"]  # type: ignore[misc]
    (relay,) = capture["relays"]
    assert {**relay, **capture, "ok": told["ok"]}.items() >= expected.items()


def test_relays_and_captures_are_told_apart() -> None:
    infos = [info(ledger(2)), info(ledger(2, relay="run.1.1")), info(ledger(3, relay="b.0.1"), "c2")]
    rows = [batch(1, 2), batch(2, relay="run.1.1"), batch(1, 2, 3, relay="b.0.1", capture="c2")]
    found = [
        (c.capture, [(r.relay, r.missing) for r in c.relays]) for c in check_integrity(infos, rows).captures
    ]
    assert found == [("c1", [("run.0.1", 0), ("run.1.1", 1)]), ("c2", [("b.0.1", 0)])]


def test_the_last_word_holds_in_whatever_order_files_are_given() -> None:
    early = CaptureLedger({"r": RelayCount(5, {"overflow": 1}, 3)}, {"disk": 1}, "m")
    late = CaptureLedger({"r": RelayCount(5, {"overflow": 1}, 0)}, {"disk": 2}, "m")
    for words in ([early, late], [late, early]):
        assert latest_ledger([info(word) for word in words]) == CaptureLedger(
            {"r": RelayCount(5, {"overflow": 1}, 0)}, {"disk": 2}
        )


@pytest.mark.parametrize(("lost", "exact"), [(0, True), (1, False)])
def test_lost_packets_make_the_count_inexact(lost: int, exact: bool) -> None:
    count = RelayCount(2, packets={"captured": 9, "lost": lost})
    checked = check_integrity([info(CaptureLedger({"run.0.1": count}, {}, "m"))], [batch(1, 2)])
    assert checked.captures[0].exact is exact


def test_damage_and_an_orderly_end_are_told() -> None:
    infos = [info(ledger(1), damaged={"batches": 1, "bytes": 70}), info(ledger(1, closed=True))]
    (capture,) = check_integrity(infos, [batch(1)]).captures
    assert (capture.damaged, capture.closed) == ({"batches": 1, "bytes": 70}, True)
    assert not check_integrity(infos[:1], [batch(1)]).captures[0].closed


def test_only_the_end_of_the_last_file_is_the_end() -> None:
    files = [info(ledger(1, closed=True), began_ns=1), info(ledger(1, meter="m2"), began_ns=2)]
    assert not check_integrity(files, [batch(1)]).captures[0].closed
    assert not check_integrity(files[::-1], [batch(1)]).captures[0].closed
    assert (
        check_integrity([*files, info(ledger(1, meter="m3", closed=True), began_ns=3)], [batch(1)])
        .captures[0]
        .closed
    )


def test_a_meter_that_gave_way_may_write_its_last_file_after_the_other_has_begun() -> None:
    gave_way = [info(ledger(1, meter="m1"), began_ns=1), info(ledger(1, meter="m1"), began_ns=3)]
    for closed in (False, True):
        files = [*gave_way, info(ledger(1, meter="m2", closed=closed), began_ns=2)]
        assert check_integrity(files, [batch(1)]).captures[0].closed is closed


def test_of_a_trace_without_relays_nothing_is_said() -> None:
    nulls = pa.RecordBatch.from_arrays([pa.nulls(3, field.type) for field in SCHEMA], schema=SCHEMA)
    checked = check_integrity([CaptureInfo(source="mooncake")], [nulls])
    assert (checked.captures, checked.unnumbered, checked.ok) == ([], 3, True)


@given(
    st.lists(st.integers(1, 40), max_size=60),
    st.integers(0, 40),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(1, 5),
)
def test_numbers_add_up(
    seqs: list[int], opened: int, dropped: int, unsettled: int, lost: int, cut: int
) -> None:
    word = ledger(opened, dropped={"overflow": dropped}, unsettled=unsettled, not_kept={"disk": lost})
    parts = [batch(*seqs[i : i + cut]) for i in range(0, len(seqs), cut)]
    (capture,) = check_integrity([info(word)], parts).captures
    (relay,) = capture.relays
    missing = {n for first, last in relay.ranges for n in range(first, last + 1)}
    known = max([opened, *seqs])
    assert missing == set(range(1, known + 1)) - set(seqs)
    assert relay.opened == known == relay.present + relay.missing + relay.running
    left = max(0, len(missing) - dropped - relay.since)
    assert relay.running == relay.unsettled == min(unsettled, left)
    assert relay.duplicates == len(seqs) - len(set(seqs))
    assert relay.since == len([n for n in missing if n > opened])
    assert capture.unexplained == max(0, len(missing) - dropped - unsettled - relay.since - lost)
    assert relay.exact == (not relay.unsettled and not relay.since)


def test_responses_of_a_session_share_a_number_and_are_no_duplicates() -> None:
    exchanges = [streamed(1), *(streamed(2, part=part) for part in (1, 2, 3)), streamed(3)]
    rows = to_batch(exchanges, capture="c1", level="shape")[0]
    assert rows.column("seq").to_pylist() == [1, 2, 2, 2, 3]
    assert [x.id for x in exchanges_of(rows)] == [x.id for x in exchanges]
    told = check_integrity([info(ledger(3))], [rows])
    assert (told.ok, told.captures[0].duplicates, told.captures[0].missing) == (True, 0, 0)
    assert told.unnumbered == 0
    twice = check_integrity([info(ledger(3))], [rows, rows])
    assert twice.captures[0].duplicates == 3
