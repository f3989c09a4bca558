"""Classes of tenants, how they were kept to, and alarms that can ring."""

import random
from typing import Any

import pytest

from llmtap.clock import ManualClock
from llmtap.errors import ConfigError
from llmtap.exchange.outcome import Outcome, Reading
from llmtap.meter.slo import BURN_WINDOWS, SloBook
from llmtap.meter.tenants import Labels
from llmtap.metrics.latency import measure
from llmtap.metrics.slo import SloOptions, check_slos
from tests.support.traffic.streams import streamed

S = 1_000_000_000
GOOD, BAD = 100, 900
"""First token, ms; the objective is 500 ms."""


def book(clock: ManualClock, **classes: SloOptions) -> SloBook:
    check_slos(classes)
    return SloBook(classes, clock)


def slo(**about: Any) -> SloOptions:
    return SloOptions(**{"objectives": "ttft:500ms", **about})


def ended(slos: SloBook, tenant: str, ttft_ms: int, **about: Any) -> bool | None:
    x = streamed(ttft_ms, ttft_ms + 40, tenant=tenant)
    for name, value in about.items():
        setattr(x, name, value)
    return slos.judge(x, measure(x), slos.class_of_tenant(tenant), tenant)


def windows(slos: SloBook, name: str) -> dict[str, Any]:
    result: Any = slos.freeze().to_dict()[name]
    found: dict[str, Any] = result["windows"]
    return found


def test_a_name_goes_before_a_pattern_and_a_pattern_before_the_default() -> None:
    slos = book(
        ManualClock(),
        rest=slo(),
        teams=slo(tenants=("team-*",)),
        gold=slo(tenants=("team-a", "acme")),
        odd=slo(tenants=("team-?",)),
    )
    found = {name: slos.class_of_tenant(name) for name in ("team-a", "team-b", "acme", "x")}
    assert {name: c and c.name for name, c in found.items()} == {
        "team-a": "gold",
        "team-b": "teams",
        "acme": "gold",
        "x": "rest",
    }
    assert slos.tenants == ["team-a", "acme"]


def test_attainment_and_burn_rate_by_class_and_tenant() -> None:
    clock = ManualClock()
    slos = book(clock, gold=slo(target=0.9, tenants=("a", "b")))
    clock.advance(25 * S)
    for i in range(10):
        assert ended(slos, "a", GOOD) is True
        assert ended(slos, "b", BAD if i < 4 else GOOD) is (i >= 4)
    result: Any = slos.freeze().to_dict()["gold"]
    assert result["windows"]["5m"] == {
        "seconds": 25.0,
        "counted": 20,
        "good": 16,
        "not_judged": 0,
        "own_faults": 0,
        "attainment": 0.8,
        "burn_rate": pytest.approx(2.0),
        "marks": [],
    }
    assert result["by"]["tenant"]["b"]["6h"] == {
        "seconds": 25.0,
        "counted": 10,
        "good": 6,
        "not_judged": 0,
        "own_faults": 0,
        "attainment": 0.6,
        "burn_rate": pytest.approx(4.0),
        "marks": [],
    }
    assert slos.freeze().burn_rates()["gold", "1h"] == pytest.approx(2.0)
    clock.advance(3_600 * S)
    of = windows(slos, "gold")
    assert (of["5m"]["seconds"], of["6h"]["seconds"]) == (pytest.approx(300, abs=30), 3_625.0)
    assert slos.freeze().total == {("gold", "a"): (10, 10, 0, 0), ("gold", "b"): (10, 6, 0, 0)}
    assert (result["objectives"], result["target"], result["burn_rate_max"]) == (
        "ttft:500ms",
        0.9,
        pytest.approx(10.0),
    )


def owners_alarmed(slos: SloBook) -> list[tuple[str | None, str]]:
    result: Any = slos.freeze().to_dict()["all"]
    return [(alarm["tenant"], alarm["long"]) for alarm in result["alarms"] if alarm["ringing"]]


def notified(slos: SloBook) -> list[tuple[str | None, str]]:
    result: Any = slos.freeze().to_dict()["all"]
    return [
        (one["tenant"], one["long"]) for one in result["alarms"] if one["ringing"] and not one["inhibited"]
    ]


def test_each_tenant_of_a_template_has_a_budget_and_one_cause_one_alarm() -> None:
    clock = ManualClock()
    slos = book(clock, all=slo(target=0.99, per="tenant"))
    clock.advance(25 * S)
    for _ in range(100):
        ended(slos, "big", BAD)
        ended(slos, "small", GOOD)
    # Half of all exchanges are bad, so the class burns, too. Only one tenant does.
    assert owners_alarmed(slos) == [("big", "1h"), ("big", "6h")]
    assert notified(slos) == [("big", "1h")]
    for _ in range(50):
        ended(slos, "small", BAD)
    assert owners_alarmed(slos) == [(None, "1h"), (None, "6h")]
    # As one budget, the class rings for one tenant.
    whole = book(clock, all=slo(target=0.99))
    for _ in range(100):
        ended(whole, "big", BAD)
        ended(whole, "small", GOOD)
    assert owners_alarmed(whole) == [(None, "1h"), (None, "6h")]
    assert notified(whole) == [(None, "1h")]


def test_an_alarm_of_a_class_inhibits_those_of_its_tenants_in_other_windows() -> None:
    clock = ManualClock()
    slos = book(clock, all=slo(target=0.95, per="tenant"))
    clock.advance(25 * S)
    # The class has a burn rate of 11.4, and four of its tenants 20: at 14.4 they ring, at 6 the class does.
    for _ in range(100):
        for tenant, t in (
            ("a", BAD),
            ("b", BAD),
            ("c", BAD),
            ("d", BAD),
            ("e", GOOD),
            ("f", GOOD),
            ("g", GOOD),
        ):
            ended(slos, tenant, t)
    assert owners_alarmed(slos) == [("a", "1h"), ("b", "1h"), ("c", "1h"), ("d", "1h"), (None, "6h")]
    assert notified(slos) == [(None, "6h")]


def test_an_outage_of_tenants_with_few_exchanges_each_rings_for_the_class() -> None:
    clock = ManualClock()
    slos = book(clock, all=slo(target=0.999, per="tenant"))
    clock.advance(25 * S)
    # 20 are too few for an alarm of one tenant, which needs 70 in an hour and 167 in 6 hours.
    for i in range(2_000):
        ended(slos, f"t{i % 100}", BAD)
    assert owners_alarmed(slos) == [(None, "1h"), (None, "6h")]


def test_what_a_request_asks_for_itself_comes_first() -> None:
    slos = book(ManualClock(), gold=slo(tenants=("a",)))
    assert ended(slos, "a", GOOD, slo_ttft_ns=50_000_000) is False
    assert ended(slos, "a", BAD, slo_ttft_ns=2_000_000_000) is True
    assert ended(slos, "x", BAD, slo_ttft_ns=2_000_000_000) is True
    assert slos.freeze().total == {("gold", "a"): (2, 1, 0, 0), ("requested", "x"): (1, 1, 0, 0)}


def test_outcomes_that_say_nothing_of_the_gateway_do_not_count() -> None:
    slos = book(ManualClock(), gold=slo())
    assert ended(slos, "a", GOOD, outcome=Outcome.REJECTED) is None
    assert ended(slos, "a", BAD, outcome=Outcome.TAP_ERROR) is None
    assert ended(slos, "a", GOOD, outcome=Outcome.UPSTREAM_ERROR) is False
    assert slos.freeze().total == {("gold", "a"): (1, 0, 0, 2)}


def test_six_hours_of_compressed_time_against_everything_kept() -> None:
    rng = random.Random(5)
    clock = ManualClock(now_ns=3 * S)
    slos = book(clock, gold=slo(target=0.95))
    lengths = {"5m": (300, 30), "30m": (1_800, 150), "1h": (3_600, 300), "6h": (21_600, 1_800)}
    assert tuple(lengths) == BURN_WINDOWS
    kept: list[tuple[int, bool]] = []
    while clock.now_ns < 15 * 3_600 * S:
        clock.advance(round(rng.expovariate(1 / 40) * S))
        met = ended(slos, rng.choice("ab"), rng.choice((GOOD, GOOD, BAD)))
        assert met is not None
        kept.append((clock.now_ns, met))
        if rng.random() < 0.1:
            result = windows(slos, "gold")
            for name, (length, step) in lengths.items():
                start = 3 + max(0, (clock.now_ns // S - 3) // step * step - length + step)
                inside = [good for t, good in kept if t >= start * S]
                assert (result[name]["counted"], result[name]["good"]) == (len(inside), sum(inside)), name
    assert slos.freeze().total[("gold", "a")][0] + slos.freeze().total[("gold", "b")][0] == len(kept)


def ringing(slos: SloBook) -> list[bool]:
    result: Any = slos.freeze().to_dict()["gold"]
    return [alarm["ringing"] for alarm in result["alarms"]]


def test_an_alarm_rings_when_both_of_its_windows_burn_and_ends_with_the_short_one() -> None:
    clock = ManualClock()
    slos = book(clock, gold=slo(target=0.99))
    for count, expected in ((60, [True, True]), (6, [False, True]), (30, [False, False])):
        for i in range(count):
            ended(slos, "a", BAD if count == 60 and i % 4 == 0 else GOOD)
            clock.advance(60 * S)
        assert ringing(slos) == expected


def test_an_alarm_does_not_ring_on_too_few() -> None:
    slos = book(ManualClock(), gold=slo(target=0.9, burn={"1h": 5.0}))
    ended(slos, "a", BAD)
    assert ringing(slos) == [False], "one bad exchange is no trend"
    ended(slos, "a", BAD)
    result: Any = slos.freeze().to_dict()["gold"]
    assert result["alarms"] == [
        {
            "tenant": None,
            "severity": "page",
            "long": "1h",
            "short": "5m",
            "burn_rate": 5.0,
            "reachable": True,
            "events_min": 2,
            "ringing": True,
            "inhibited": False,
        }
    ]


def test_a_standard_alarm_that_can_never_ring_is_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    slos = book(ManualClock(), loose=slo(target=0.9))
    assert "event=alarm_unreachable slo=loose target=0.9 burn_rate=14.4 burn_rate_max=10" in caplog.text
    result: Any = slos.freeze().to_dict()["loose"]
    assert [(a["long"], a["short"], a["burn_rate"], a["reachable"]) for a in result["alarms"]] == [
        ("6h", "30m", 6.0, True),
        ("1h", "5m", 14.4, False),
    ]


@pytest.mark.parametrize(
    ("classes", "place", "problem"),
    [
        ({"gold": slo(objectives="ttft:500")}, "slo.gold.objectives", "unit"),
        ({"gold": slo(objectives="speed:5ms")}, "slo.gold.objectives", "unknown objective"),
        ({"gold": slo(target=99)}, "slo.gold.target", "share between 0 and 1"),
        ({"gold": slo(target=0.9, burn={"1h": 14.4})}, "slo.gold.burn.1h", "1 / (1 - 0.9) = 10"),
        ({"gold": slo(burn={"3d": 1.0})}, "slo.gold.burn", "no alarm"),
        ({"a": slo(), "b": slo()}, "slo.b.tenants", "slo.a"),
        ({"a": slo(tenants=("x",)), "b": slo(tenants=("x",))}, "slo.b.tenants", "already in slo.a"),
        ({"a": slo(tenants=("*",)), "b": slo(tenants=("chat-*",))}, "slo.b.tenants", "has no effect"),
        ({"so so": slo()}, "slo.so so", "not a valid class name"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(
    classes: dict[str, SloOptions], place: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as failure:
        check_slos(classes)
    assert failure.value.place == place
    assert problem in failure.value.problem


def test_an_answer_that_was_not_understood_is_neither_counted_nor_good() -> None:
    clock = ManualClock()
    slos = book(clock, gold=slo(target=0.9, tenants=("a",)))
    for times in (GOOD, BAD):
        x = streamed(times, times + 40, tenant="a")
        x.reading, x.no_token_reason = Reading.NONE, "only_metadata"
        assert slos.judge(x, measure(x), slos.class_of_tenant("a"), "a") is None
    result: Any = slos.freeze().to_dict()["gold"]
    window = result["windows"]["5m"]
    figures = [window[name] for name in ("counted", "not_judged", "attainment", "burn_rate")]
    assert figures == [0, 2, None, None]
    assert slos.freeze().burn_rates() == {}
    assert slos.freeze().total == {("gold", "a"): (0, 0, 2, 0)}


@pytest.mark.parametrize(
    ("count_own_faults", "counted", "own_faults", "attainment"), [(False, 1, 2, 1.0), (True, 3, 0, 1 / 3)]
)
def test_faults_of_llmtap_are_counted_apart_or_are_bad_if_the_class_says_so(
    count_own_faults: bool, counted: int, own_faults: int, attainment: float
) -> None:
    slos = book(ManualClock(), gold=slo(target=0.9, tenants=("a",), count_own_faults=count_own_faults))
    ended(slos, "a", GOOD)
    for outcome in (Outcome.REJECTED, Outcome.TAP_ERROR):
        ended(slos, "a", GOOD, outcome=outcome)
    window = windows(slos, "gold")["5m"]
    assert [window[name] for name in ("counted", "own_faults", "attainment")] == [
        counted,
        own_faults,
        attainment,
    ]
    assert slos.freeze().total == {("gold", "a"): (counted, 1, 0, own_faults)}


def test_after_a_change_the_windows_of_a_class_begin_at_the_change() -> None:
    clock = ManualClock()
    same = slo(target=0.9, tenants=("b",))
    old = book(clock, gold=slo(target=0.9, tenants=("a",)), same=same)
    clock.advance(600 * S)
    ended(old, "a", BAD)
    ended(old, "b", BAD)
    new = book(clock, gold=slo(target=0.8, tenants=("a",)), same=same)
    new.absorb(old.export()(), 0, Labels(9, 9, 9))
    clock.advance(20 * S)
    ended(new, "a", GOOD)
    newest = book(clock, gold=slo(target=0.8, tenants=("a",)), same=same)
    newest.absorb(new.export()(), 0, Labels(9, 9, 9))
    clock.advance(10 * S)
    changed, kept = windows(newest, "gold"), windows(newest, "same")
    assert [(changed[name]["seconds"], changed[name]["counted"]) for name in ("5m", "6h")] == [(30.0, 1)] * 2
    assert (kept["6h"]["seconds"], kept["6h"]["counted"]) == (630.0, 1)
