"""A replay's result in the terminal: rates by their names, whose metrics, and findings by their weight."""

from typing import Any

import pytest
from rich.console import Console

from llmtap.report.replay import render_replay
from tests.support.replay_results import replay_result

GOOD = replay_result()


def shown(result: dict[str, Any]) -> str:
    console = Console(width=200, no_color=True, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(render_replay(result), soft_wrap=True)
    return capture.get()


def finding(says: str, **more: Any) -> dict[str, Any]:
    return {"what": "x", "figure": 1, "limit": 0, "says": says, **more}


def test_the_heading_tells_what_was_planned_and_sent() -> None:
    first = shown(replay_result(60)).splitlines()[0]
    assert first == (
        "trace.csv to http://host:8000 · arrivals recorded at 20 req/s · 60 of 60 sent"
        " · 20.34 of 20.34 req/s planned"
    )
    assert "req/s planned" not in shown(replay_result(5, closed=True))


def test_arrivals_are_told_as_they_were_given() -> None:
    plan = GOOD["plan"] | {"arrivals": {"arrivals": "gamma:burstiness=0.25", "given": "gamma:cv=2"}}
    assert "· arrivals gamma:cv=2 (gamma:burstiness=0.25) ·" in shown(GOOD | {"plan": plan})


def test_findings_that_invalidate_are_told_from_those_that_do_not() -> None:
    said = [finding("it was late"), finding("tokens differ", invalidates=False)]
    text = shown(GOOD | {"verdict": {"valid": False, "findings": said}})
    assert "NOT VALID: it was late\n" in text
    assert "mind: tokens differ\n" in text


def test_the_clocks_of_other_hosts_are_told() -> None:
    clock = {"host": "n1\x1b", "shared": False, "rtt": 0.001, "offset": 0.0025, "drift": 0.0}
    text = shown(GOOD | {"sender": GOOD["sender"] | {"clocks": [clock]}})
    assert "clocks     n1\\u001b within 0.500 ms, 2.50 ms ahead (allowed for)" in text
    assert "clocks " not in shown(GOOD)


@pytest.mark.parametrize(
    ("scrape", "said"),
    [
        ({"url": "http://h/metrics", "scrapes": 9, "failed": 0}, "scraped    http://h/metrics, 9 times"),
        ({"url": "http://h/metrics", "scrapes": 1, "failed": 1, "gave_up": True,
          "failures": {"status 404": 1}},
         "scraped    nothing: http://h/metrics was asked once (status 404)"),
    ],
)  # fmt: skip
def test_whose_metrics_were_scraped_is_told(scrape: dict[str, Any], said: str) -> None:
    system = GOOD["system"]
    text = shown(GOOD | {"system": system | {"summary": system["summary"] | {"scrape": scrape}}})
    assert f"{said}\n" in text
    assert "scrapes of the server failed" not in text
