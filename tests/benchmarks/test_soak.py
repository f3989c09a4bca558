"""What the soak judges by: growth of planted series, counts of a planted capture, its plan of a day."""

import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("scipy", reason="scipy is not installed: make setup")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "soak"))

import accounts
import day
import growth
import verdict
import watching

from llmtap.capture.schema import CaptureLedger, RelayCount
from llmtap.exchange.exchange import Exchange, Timeline, Tokens
from llmtap.exchange.outcome import Outcome, TokenSource
from tests.support.storage.captures import write_capture

BOUNDS = verdict.Bounds({"supervisor": 1.0, "relay": 2.0, "meter": 12.0}, 2)
S = 1_000_000_000


def test_a_line_is_told_exactly() -> None:
    times = [float(t) for t in range(601)]
    found = growth.growth(times, [100 + t / 60 for t in times])
    # A MiB a minute over ten minutes; medians of thirds are those of their middles.
    assert found.slope == pytest.approx(1.0, abs=0.02)
    assert found.low <= found.slope <= found.high
    assert found.grown == pytest.approx(10 * 2 / 3, abs=0.1)


def test_noise_without_a_trend_has_no_slope_and_outliers_do_not_make_one() -> None:
    dice = Random(5)
    times = [float(t) for t in range(600)]
    values = [50 + dice.gauss(0, 0.1) + (200 if dice.random() < 0.02 else 0) for _ in times]
    found = growth.growth(times, values)
    assert found.low <= 0 <= found.high
    assert abs(found.grown) < 0.1


@given(st.floats(1, 1e6), st.integers(7, 300))
def test_what_stays_does_not_grow(value: float, n: int) -> None:
    found = growth.growth([float(t) for t in range(n)], [value] * n)
    assert found is None or (found.grown, found.slope, found.low, found.high) == (0, 0, 0, 0)
    assert growth.growth([0, 1, 2], [1, 2, 3]) is None, "too little"


def looks(role: str, pid: int, begin: int, end: int, mib_per_minute: float = 0.0) -> list[watching.Look]:
    return [
        watching.Look(float(t), pid, role, 1024 * (50 + (t - begin) / 60 * mib_per_minute), None, 10, 1)
        for t in range(begin, end)
    ]


def judged(seen: list[watching.Look], before: int = 10, after: int = 10) -> verdict.Verdict:
    roles = ("supervisor", "relay", "meter")
    return verdict.judged(seen, 400, 1_000, dict.fromkeys(roles, before), dict.fromkeys(roles, after), BOUNDS)


def test_a_leak_is_found_in_the_process_that_has_it() -> None:
    flat = looks("supervisor", 1, 0, 1_000) + looks("meter", 3, 0, 1_000)
    assert judged(flat + looks("relay", 2, 0, 1_000)).wrong == []
    (complaint,) = judged(flat + looks("relay", 2, 0, 1_000, 0.5)).wrong
    assert complaint.startswith("relay: memory grew by 3.")


def test_only_the_last_life_is_judged_and_without_its_start() -> None:
    """A relay that grew, and was replaced, is gone; the new one's own start is not growth."""
    others = looks("supervisor", 1, 0, 1_000) + looks("meter", 3, 0, 1_000)
    replaced = looks("relay", 2, 0, 500, 50.0) + looks("relay", 4, 500, 1_000)
    assert judged(others + replaced).wrong == []
    late = looks("relay", 2, 0, 990) + looks("relay", 4, 995, 1_000)
    (complaint,) = judged(others + late).wrong
    assert complaint == "relay: no process lived long enough to be judged"


def test_files_at_rest_may_grow_by_so_many() -> None:
    seen = looks("supervisor", 1, 0, 1_000) + looks("relay", 2, 0, 1_000) + looks("meter", 3, 0, 1_000)
    assert judged(seen, 10, 12).wrong == []
    assert len(judged(seen, 10, 13).wrong) == 3


def test_a_day_has_the_requests_of_a_day() -> None:
    one, same = (day.Day(2, 96, 15, 32, seed=1) for _ in range(2))
    assert one.offsets_ns == same.offsets_ns
    assert [one.request(n) for n in range(500)] == [same.request(n) for n in range(500)]
    assert (one.requests, one.hours) == (172_800, 24)
    assert one.offsets_ns[-1] / S == pytest.approx(900, rel=0.02)
    # One wave: the first half of the day has (1/2 + amplitude / pi) of it.
    first = sum(ns < 450 * S for ns in one.offsets_ns)
    assert first / one.requests == pytest.approx(0.5 + 0.8 / 3.14159, abs=0.01)
    asked = [one.request(n) for n in range(10_000)]
    assert sum(r.tokens for r in asked) / len(asked) == pytest.approx(32, rel=0.05)
    assert sum(not r.stream for r in asked) / len(asked) == pytest.approx(0.1, abs=0.01)
    assert all(0 <= r.leave_after < max(1, r.tokens // 2) for r in asked)


def row(seq: int) -> Exchange:
    return Exchange(
        relay="r1",
        seq=seq,
        arrival_wall_ns=seq * S,
        timeline=Timeline(arrival_ns=0),
        method="POST",
        path="/v1/chat/completions",
        status=200,
        stream=True,
        outcome=Outcome.COMPLETE,
        tokens=Tokens(input=5, output=3, source=TokenSource.USAGE),
        request_id=f"soak-{seq}",
    )


def metrics(n: int, output: int) -> bytes:
    return (
        f'llmtap_exchanges_total{{tenant="a",model="m",outcome="complete"}} {n}\n'
        'llmtap_exchanges_total{tenant="a",model="m",outcome="refused"} 0\n'
        f'llmtap_output_tokens_total{{tenant="a",model="m",source="usage"}} {output}\n'
        f'llmtap_input_tokens_total{{tenant="a",model="m"}} {5 * n}\n'
    ).encode()


def settled(folder: Path, seqs: list[int], opened: int, text: bytes, **more: object) -> accounts.Accounts:
    count = RelayCount(opened, dict(more.pop("dropped", {})), 0)  # type: ignore[call-overload]
    write_capture(
        folder / "llmtap-1.parquet",
        [row(seq) for seq in seqs],
        ledger=CaptureLedger({"r1": count}, {}, "m1", closed=True),
        began_ns=1,
    )
    given = {
        "asked": opened,
        "retried": 0,
        "whole": set(range(opened + 1)),
        "tokens": [3] * (opened + 1),
        "metrics": text,
        "kills_ns": [],
        "lost_max": 0,
        "before_ns": S,
        "after_ns": S,
    } | more
    return accounts.settle(folder, **given)


def test_counts_that_agree_say_nothing(tmp_path: Path) -> None:
    found = settled(tmp_path, [1, 2, 3], 3, metrics(3, 9))
    assert found.wrong == []
    assert (found.rows, found.opened, found.compared, found.lost) == (3, 3, 3, 0)
    assert found.kept == accounts.Sums(Counter(complete=3), Counter(usage=9), 15)
    assert settled(tmp_path / "drop", [1, 3], 3, metrics(2, 6), dropped={"overflow": 1}).wrong == []


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"asked": 2}, "clients asked 2 times"),
        ({"tokens": [4] * 4}, "3 of 3 whole streams have another number of tokens"),
        ({"text": metrics(3, 8)}, "the last meter counts"),
    ],
)
def test_a_planted_difference_is_told(tmp_path: Path, more: dict[str, object], says: str) -> None:
    text = more.pop("text", metrics(3, 9))
    assert isinstance(text, bytes)
    (complaint,) = settled(tmp_path, [1, 2, 3], 3, text, **more).wrong
    assert complaint.startswith(says)


def test_a_row_that_is_missing_has_to_be_near_a_kill(tmp_path: Path) -> None:
    """Number n arrived at second n. 50 is lost: a kill at second 50 explains it, at second 90 it does not."""
    seqs = [n for n in range(1, 101) if n != 50]
    near = settled(tmp_path / "near", seqs, 100, metrics(99, 297), kills_ns=[50 * S], lost_max=1)
    assert near.wrong == [] and near.lost == 1
    far = settled(tmp_path / "far", seqs, 100, metrics(99, 297), kills_ns=[90 * S], lost_max=1)
    assert far.wrong == ["1 numbers are missing where no meter was killed"]
    many = settled(tmp_path / "many", seqs, 100, metrics(99, 297), kills_ns=[50 * S], lost_max=0)
    assert len(many.wrong) == 1 and "at most 0" in many.wrong[0]


def test_processes_of_the_proxy_are_told_apart() -> None:
    commands = ("python -m llmtap.vantage.relay", "python -m llmtap.meter", "llmtap proxy")
    assert list(map(watching.role_of, commands)) == ["relay", "meter", "supervisor"]
    text = b'a_total{x="1"} 2\na_total{x="2"} 3.5\na_total_more 7\nb 1\n'
    assert watching.sums(text, "a_total", "b", "c") == {"a_total": 5.5, "b": 1.0, "c": 0}
