"""Invariant: numbers present and missing make up all that were given out, and what is missing is explained by
no more than what was said of it.
"""

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.read.integrity import Integrity, check, latest_ledger
from llmtap.capture.schema import SCHEMA, CaptureInfo, CaptureLedger, RelayCount
from llmtap.capture.store.rows import exchanges_of, to_batch
from tests.support.captures import ledger
from tests.support.exchanges import streamed


def batch(*seqs: int, relay: str = "run.0.1", capture: str = "c1") -> pa.RecordBatch:
    exchanges = [streamed(seq, words=0, relay=relay) for seq in seqs]
    return to_batch(exchanges, capture=capture, level="shape")[0]


NOTHING = CaptureLedger()


def info(word: CaptureLedger = NOTHING, capture: str = "c1", **told: Any) -> CaptureInfo:
    return CaptureInfo(capture=capture, ledger=word, **told)


def one(checked: Integrity) -> dict[str, object]:
    (capture,) = checked.captures
    (relay,) = capture.relays
    return {
        "present": relay.present, "ranges": relay.ranges, "missing": capture.missing,
        "unexplained": capture.unexplained, "exact": capture.exact, "ok": checked.ok,
    }  # fmt: skip


def test_a_whole_capture_lacks_nothing() -> None:
    assert one(check([info(ledger(4))], [batch(1, 2), batch(4, 3)])) == {
        "present": 4, "ranges": [], "missing": 0, "unexplained": 0, "exact": True, "ok": True,
    }  # fmt: skip


def test_missing_numbers_are_ranges_and_not_explained_by_themselves() -> None:
    assert one(check([info(ledger(9))], [batch(2, 3, 7)])) == {
        "present": 3, "ranges": [(1, 1), (4, 6), (8, 9)], "missing": 6, "unexplained": 6, "exact": True,
        "ok": False,
    }  # fmt: skip


def test_what_a_relay_dropped_explains_as_many() -> None:
    dropped = {"overflow": 2, "no_meter": 1}
    found = one(check([info(ledger(9, dropped=dropped))], [batch(1, 2, 3, 5, 7)]))
    assert (found["missing"], found["unexplained"], found["exact"]) == (4, 1, True)


def test_what_was_under_way_is_given_the_benefit_of_the_doubt() -> None:
    found = one(check([info(ledger(9, unsettled=3))], [batch(1, 2, 3, 5)]))
    assert (found["missing"], found["unexplained"], found["exact"]) == (5, 2, False)


def test_what_began_after_the_last_word_is_too() -> None:
    checked = check([info(ledger(4))], [batch(1, 2, 3, 4, 6, 9)])
    assert one(checked)["ok"] is True
    (relay,) = checked.captures[0].relays
    assert (relay.opened, relay.ranges, relay.since, relay.exact) == (9, [(5, 5), (7, 8)], 3, False)


def test_a_range_across_the_last_word_is_counted_from_there() -> None:
    checked = check([info(ledger(5))], [batch(1, 2, 3, 8)])
    (relay,) = checked.captures[0].relays
    assert (relay.ranges, relay.since, relay.unexplained) == ([(4, 7)], 2, 2)


def test_what_a_meter_could_not_keep_is_accounted_for() -> None:
    words = [ledger(5, not_kept={"disk": 1}), ledger(9, not_kept={"disk": 2, "memory": 1})]
    checked = check(map(info, words), [batch(1, 2, 3, 4, 5)])
    assert one(checked)["unexplained"] == 1
    assert checked.captures[0].not_kept == {"disk": 2, "memory": 1}


def test_each_meter_counts_anew() -> None:
    words = [ledger(5, not_kept={"disk": 2}), ledger(9, not_kept={"disk": 1}, meter="m2")]
    checked = check(map(info, words), [batch(1, 2, 3, 4, 5, 6)])
    assert one(checked)["ok"] is True
    assert (checked.captures[0].not_kept, checked.captures[0].meters) == ({"disk": 3}, 2)


def test_a_relay_of_which_no_row_is_there_lacks_all() -> None:
    assert one(check([info(ledger(3))], []))["ranges"] == [(1, 3)]


def test_a_relay_that_never_spoke_is_known_by_its_rows() -> None:
    found = one(check([info()], [batch(1, 4)]))
    assert (found["ranges"], found["unexplained"], found["exact"]) == ([(2, 3)], 0, False)


def test_rows_that_are_there_twice_are_counted() -> None:
    checked = check([info(ledger(3))], [batch(1, 2, 2), batch(3, 2)])
    assert (checked.captures[0].duplicates, checked.captures[0].missing, checked.ok) == (2, 0, False)


def test_relays_and_captures_are_told_apart() -> None:
    infos = [info(ledger(2)), info(ledger(2, relay="run.1.1")), info(ledger(3, relay="b.0.1"), "c2")]
    rows = [batch(1, 2), batch(2, relay="run.1.1"), batch(1, 2, 3, relay="b.0.1", capture="c2")]
    checked = check(infos, rows)
    assert [(c.capture, [(r.relay, r.missing) for r in c.relays]) for c in checked.captures] == [
        ("c1", [("run.0.1", 0), ("run.1.1", 1)]),
        ("c2", [("b.0.1", 0)]),
    ]


def test_the_last_word_holds_in_whatever_order_files_are_given() -> None:
    early = CaptureLedger({"r": RelayCount(5, {"overflow": 1}, 3)}, {"disk": 1}, "m")
    late = CaptureLedger({"r": RelayCount(5, {"overflow": 1}, 0)}, {"disk": 2}, "m")
    for words in ([early, late], [late, early]):
        assert latest_ledger([info(word) for word in words]) == CaptureLedger(
            {"r": RelayCount(5, {"overflow": 1}, 0)}, {"disk": 2}
        )


def test_steps_of_the_wall_clock_are_told_with_the_first_row_after() -> None:
    exchanges = [
        streamed(i, words=0, anchor=anchor) for i, anchor in ((1, 0), (2, 0), (4, 2), (3, 2), (5, 3))
    ]
    rows = to_batch(exchanges, capture="c1", level="shape")[0]
    (relay,) = check([info(ledger(5))], [rows]).captures[0].relays
    assert [(step["anchor"], step["seq"]) for step in relay.clock_set] == [(2, 3), (3, 5)]


def test_damage_and_an_orderly_end_are_told() -> None:
    infos = [info(ledger(1), damaged={"batches": 1, "bytes": 70}), info(ledger(1, closed=True))]
    (capture,) = check(infos, [batch(1)]).captures
    assert (capture.damaged, capture.closed) == ({"batches": 1, "bytes": 70}, True)
    assert not check(infos[:1], [batch(1)]).captures[0].closed


def test_only_the_end_of_the_last_file_is_the_end() -> None:
    files = [info(ledger(1, closed=True), began_ns=1), info(ledger(1, meter="m2"), began_ns=2)]
    assert not check(files, [batch(1)]).captures[0].closed
    assert not check(files[::-1], [batch(1)]).captures[0].closed
    assert (
        check([*files, info(ledger(1, meter="m3", closed=True), began_ns=3)], [batch(1)]).captures[0].closed
    )


def test_a_meter_that_gave_way_may_write_its_last_file_after_the_other_has_begun() -> None:
    gave_way = [info(ledger(1, meter="m1"), began_ns=1), info(ledger(1, meter="m1"), began_ns=3)]
    for closed in (False, True):
        files = [*gave_way, info(ledger(1, meter="m2", closed=closed), began_ns=2)]
        assert check(files, [batch(1)]).captures[0].closed is closed


def test_of_a_trace_without_relays_nothing_is_said() -> None:
    nulls = pa.RecordBatch.from_arrays([pa.nulls(3, field.type) for field in SCHEMA], schema=SCHEMA)
    checked = check([CaptureInfo(source="mooncake")], [nulls])
    assert (checked.captures, checked.unnumbered, checked.ok) == ([], 3, True)


@given(
    st.lists(st.integers(1, 40), max_size=60), st.integers(0, 40), st.integers(0, 9), st.integers(0, 9),
    st.integers(0, 9), st.integers(1, 5),
)  # fmt: skip
def test_numbers_add_up(
    seqs: list[int], opened: int, dropped: int, unsettled: int, lost: int, cut: int
) -> None:
    word = ledger(opened, dropped={"overflow": dropped}, unsettled=unsettled, not_kept={"disk": lost})
    parts = [batch(*seqs[i : i + cut]) for i in range(0, len(seqs), cut)]
    (capture,) = check([info(word)], parts).captures
    (relay,) = capture.relays
    missing = {n for first, last in relay.ranges for n in range(first, last + 1)}
    known = max([opened, *seqs])
    assert missing == set(range(1, known + 1)) - set(seqs)
    assert relay.opened == known == relay.present + relay.missing
    assert relay.duplicates == len(seqs) - len(set(seqs))
    assert relay.since == len([n for n in missing if n > opened])
    assert capture.unexplained == max(0, len(missing) - dropped - unsettled - relay.since - lost)
    assert relay.exact == (not unsettled and not relay.since)


def test_responses_of_a_session_share_a_number_and_are_no_duplicates() -> None:
    exchanges = [streamed(1), *(streamed(2, part=part) for part in (1, 2, 3)), streamed(3)]
    rows = to_batch(exchanges, capture="c1", level="shape")[0]
    assert rows.column("seq").to_pylist() == [1, 2, None, None, 3]
    assert [x.id for x in exchanges_of(rows)] == [x.id for x in exchanges]
    told = check([info(ledger(3))], [rows])
    assert (told.ok, told.captures[0].duplicates, told.captures[0].missing) == (True, 0, 0)
