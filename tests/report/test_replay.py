"""A replay's result in the terminal: rates by their names, whose metrics, and findings by their weight."""

from typing import Any

import pytest
from rich.console import Console

from llmtap.report.replay import render_replay, render_verdicts
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


def test_the_verdict_is_said_last_and_also_where_nothing_speaks_against_the_figures() -> None:
    assert shown(GOOD).splitlines()[-1].startswith("verdict    Valid. Nothing that is checked speaks against")
    said = [finding("it was\x1b late"), finding("tokens differ", invalidates=False)]
    lines = shown(GOOD | {"verdict": {"valid": False, "findings": said}}).splitlines()
    assert lines[-3:] == [
        "verdict    Not valid. What speaks against the figures:", "NOT VALID: it was\\u001b late",
        "mind: tokens differ",
    ]  # fmt: skip
    lines = shown(GOOD | {"verdict": {"valid": True, "findings": said[1:]}}).splitlines()
    assert lines[-2:] == ["verdict    Valid. But mind:", "mind: tokens differ"]
    unjudged = {name: part for name, part in GOOD.items() if name != "verdict"}
    assert shown(unjudged).splitlines()[-1].startswith("verdict    Nobody has judged")


def test_verdicts_of_several_replays_are_told_by_their_names() -> None:
    console = Console(width=200, no_color=True, force_terminal=False, highlight=False)
    good, bad = GOOD["verdict"], {"valid": False, "findings": [finding("it was late")]}
    with console.capture() as capture:
        console.print(render_verdicts({"replay-1.json": good, "replay-2\x1b.json": bad}), soft_wrap=True)
    lines = capture.get().splitlines()
    assert lines[0] == "replay     replay-1.json"
    assert lines[1].startswith("verdict    Valid.")
    assert lines[2:] == [
        "replay     replay-2\\u001b.json", "verdict    Not valid. What speaks against the figures:",
        "NOT VALID: it was late",
    ]  # fmt: skip


def test_connections_opened_before_the_load_are_told_from_the_others() -> None:
    (process,) = GOOD["sender"]["processes"]
    assert f"· {process['connections_opened']:,} connections\n" in shown(GOOD)
    processes = [process | {"connections_opened": n, "connections_opened_before": n - 1} for n in (4, 3)]
    text = shown(GOOD | {"sender": GOOD["sender"] | {"processes": processes}})
    assert "· 7 connections (5 opened before the load)\n" in text


def test_retries_are_told_with_their_reasons_and_what_counts_from_where() -> None:
    assert "retries" not in shown(GOOD)
    load = GOOD["load"] | {"retries": {"n": 3, "reasons": {"429": 2, "closed": 1}}}
    text = shown(GOOD | {"load": load})
    assert "· 3 retries" in text.splitlines()[0]
    assert "retries    3 (429 2, closed 1); lateness is of first attempts, latencies count from" in text
