"""What is asked about a class: which alarms, with which burn rates, and which cannot ring."""

import pytest

from llmtap.meter.options import SloOptions
from llmtap.meter.slo import SloClass
from llmtap.slo.rules import Objective, missing, promises, runbook_url, window

HOUR_NS = 3_600_000_000_000


def promise(target: float, **burn: float) -> Objective:
    options = SloOptions(objectives="tpot:50ms ttft:500ms", target=target, burn=burn)
    return Objective.of(SloClass.of("gold", options))


def told(asked: Objective) -> list[tuple[str, str, str, float]]:
    return [(a.severity, window(a.long_ns), window(a.short_ns), round(a.factor, 6)) for a in asked.alarms]


def test_the_four_alarms_of_the_workbook() -> None:
    assert told(promise(0.99)) == [
        ("page", "1h", "5m", 14.4), ("page", "6h", "30m", 6.0),
        ("ticket", "1d", "2h", 3.0), ("ticket", "3d", "6h", 1.0),
    ]  # fmt: skip
    assert missing(promise(0.99)) == []


@pytest.mark.parametrize(
    ("target", "left"),
    [
        (0.999, ["1h", "6h", "1d", "3d"]),
        (0.95, ["1h", "6h", "1d", "3d"]),  # 14.4 x 0.05 = 0.72
        (0.93, ["6h", "1d", "3d"]),  # 14.4 x 0.07 = 1.008
        (0.9, ["6h", "1d", "3d"]),
        (0.8, ["1d", "3d"]),  # 6 x 0.2 = 1.2
        (0.5, ["3d"]),  # 3 x 0.5 = 1.5
    ],
)
def test_an_alarm_that_cannot_ring_is_left_out(target: float, left: list[str]) -> None:
    asked = promise(target)
    assert [window(a.long_ns) for a in asked.alarms] == left
    assert len(asked.alarms) + len(asked.unreachable) == 4
    assert len(missing(asked)) == 4 - len(left)


def test_what_is_left_out_is_told_with_the_arithmetic_and_a_way() -> None:
    first, *more = missing(promise(0.9))
    assert more == []
    assert first == (
        "slo.gold: no page over 1h and 5m: a burn rate above 14.4 can't be seen at the target 0.9, where it"
        ' is 10 with every exchange bad; burn = { "1h" = N } sets one below 10'
    )
    assert "burn =" not in missing(promise(0.5))[-1], "tickets have the Workbook's burn rates only"


def test_the_classs_own_burn_rates_are_those_of_its_pages() -> None:
    assert told(promise(0.9, **{"1h": 8.0, "6h": 4.0}))[:2] == [
        ("page", "1h", "5m", 8.0),
        ("page", "6h", "30m", 4.0),
    ]
    # As the meter has it: who names one of the two has that one.
    assert [a[1] for a in told(promise(0.9, **{"6h": 4.0}))] == ["6h", "1d", "3d"]


def test_bounds_and_budget_are_written_without_noise() -> None:
    asked = promise(0.99)
    assert (asked.bounds, asked.budget, asked.name) == ("ttft:500ms tpot:50ms", 0.01, "gold")
    assert promise(0.9995).budget == 0.0005


def test_classes_keep_their_order() -> None:
    classes = [SloClass.of(name, SloOptions(objectives="e2e:1s")) for name in ("b", "a")]
    assert [asked.name for asked in promises(classes)] == ["b", "a"]


@pytest.mark.parametrize(
    ("hours", "name"), [(1 / 12, "5m"), (0.5, "30m"), (1, "1h"), (6, "6h"), (24, "1d"), (72, "3d")]
)
def test_windows_are_named_as_prometheus_writes_them(hours: float, name: str) -> None:
    assert window(round(hours * HOUR_NS)) == name


@pytest.mark.parametrize(
    ("runbooks", "url"),
    [
        ("https://wiki/tap", "https://wiki/tap/LlmtapDown.md"),
        ("https://wiki/tap/", "https://wiki/tap/LlmtapDown.md"),
        ("https://docs/runbooks/{alert}.html", "https://docs/runbooks/LlmtapDown.html"),
        ("https://wiki/{alert}?from={alert}", "https://wiki/LlmtapDown?from=LlmtapDown"),
    ],
)
def test_a_page_is_a_file_of_the_alerts_name_or_where_the_url_says(runbooks: str, url: str) -> None:
    assert runbook_url(runbooks, "LlmtapDown") == url
