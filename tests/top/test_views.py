"""The tables of documents that a meter made."""

from typing import Any

from llmtap.exchange.outcome import FAILED, Outcome
from llmtap.top.table import ViewTable, firing, flowed, troubles
from llmtap.top.views import VIEWS, Shown, sparkline, streams_table
from tests.support.servers.fake_admin import a_stream, recorded
from tests.support.traffic.exchanges import streamed
from tests.support.traffic.experiments import an_experiment

BY_NAME = {view.name: view for view in VIEWS}


def some() -> dict[str, Any]:
    refusal = {"kind": "output_guardrail", "source": "finish_reason", "detail": {}, "confidence": "high"}
    return recorded(
        [
            streamed(1, 5, tenant="acme", model="tiny"),
            streamed(2, 5, tenant="acme", model="big", gap_ms=80),
            streamed(3, 2, tenant="globex", model="tiny", outcome=Outcome.TRUNCATED),
            streamed(4, 1, tenant="globex", model="tiny", outcome=Outcome.REFUSED, refusal=refusal),
        ],
        experiment=an_experiment(),
    )


def table(name: str, documents: dict[str, Any]) -> ViewTable:
    view = BY_NAME[name]
    beside = {} if view.path is None else {view.path: documents.get(view.path)}
    return view.table(Shown(documents["summary"], beside))


def cells(found: ViewTable) -> dict[str, dict[str, str]]:
    keys = [column.key for column in found.columns]
    return {row.key: dict(zip(keys, (cell.text for cell in row.cells), strict=True)) for row in found.rows}


def test_a_client_that_left_or_sent_a_wrong_request_is_no_failure() -> None:
    rows = [streamed(i, 3, tenant=outcome.value, outcome=outcome) for i, outcome in enumerate(Outcome, 1)]
    found = cells(table("tenants", recorded(rows)))
    assert {name for name, row in found.items() if row["failed"] != "0"} == {o.value for o in FAILED}


def test_the_tap_of_a_passive_vantage_tells_its_packets() -> None:
    documents = some()
    documents["summary"]["relays"]["w0"] = {
        "vantage": "passive", "connected": True, "packets": {"captured": 900, "lost": 3}, "side": "server",
        "watched": {"followed": 4, "encrypted": 1}, "missing_bytes": 70_000, "dropped": {"packets_lost": 1},
    }  # fmt: skip
    found = cells(table("tap", documents))
    mine = {key.removeprefix("passive w0/"): line for key, line in found.items() if "w0" in key}
    assert {name: line["value"] for name, line in mine.items() if not line["about"].startswith("ms")} == {
        "state": "connected", "packets captured": "900", "packets lost": "3", "watched followed": "4",
        "watched encrypted": "1", "missing": "68.4 KiB", "dropped": "1",
    }  # fmt: skip
    assert "side: server" in mine["missing"]["about"]


def test_burn_rates_and_alarms_of_classes_are_shown_and_a_firing_alarm_is_in_the_header() -> None:
    quiet = some()["summary"]
    states = [line["state"] for line in cells(table("slo", {"summary": quiet})).values()]
    assert states == ["quiet until 7 counted", "quiet until 17 counted"]
    assert firing(quiet) == []
    bad = recorded([streamed(i, 3, outcome=Outcome.UPSTREAM_ERROR) for i in range(1, 11)])["summary"]
    found = cells(table("slo", {"summary": bad}))
    assert found["default 1h"] == {
        "class": "default", "state": "FIRING", "severity": "page", "limit": "14.4", "counted": "10",
        "long": "100 over the 1 s measured", "short": "100 over the 1 s measured",
        "objectives": "ttft:500ms tpot:50ms", "target": "99.0%",
    }  # fmt: skip
    assert found["default 6h"]["state"] == "quiet until 17 counted"
    [said] = firing(bad)
    assert "default uses its error budget too fast: burn rate 100 over the 1 s measured; page above" in said
    whole = {**bad["slo"]["default"]["windows"]["1h"], "seconds": 3_400.0, "burn_rate": 15.0}
    bad["slo"]["default"]["windows"]["1h"] = whole
    assert "burn rate 15 over 1h and 100 over the 1 s measured" in firing(bad)[0]


def test_names_of_others_are_harmless_in_every_view() -> None:
    evil = ["\x1b[31mred", "[bold]x[/bold]", "a\nb\r", "\u202egnp", "x" * 500, "[/]", "tenant'; drop"]
    documents = recorded(
        [streamed(i, 3, tenant=name, model=name, path=name) for i, name in enumerate(evil, 1)]
    )
    for name in BY_NAME:
        for row in table(name, documents).rows:
            for cell in row.cells:
                assert cell.text.isprintable()
                assert len(cell.text) <= 170
    assert "[bold]x[/bold]" in [line["name"] for line in cells(table("tenants", documents)).values()]


def test_every_view_stands_a_tap_that_tells_nothing() -> None:
    for view in VIEWS:
        for beside in ({}, {view.path or "": {}}):
            assert view.table(Shown({}, beside)).columns


def test_relays_that_are_silent_or_gone_and_upstreams_that_are_down_are_told_of() -> None:
    down = "UPSTREAM DOWN: http://gw:8000 accepts no connection; clients get 502 or 504"
    (silent,) = troubles(recorded(relay=False)["summary"])
    assert silent.startswith("NO RELAY REPORTS")
    told = recorded()["summary"]
    relay = told["relays"]["r0"]
    assert troubles(told) == [down]
    told["relays"]["r1"] = relay
    assert troubles(told) == [down], "once, although both relays say so"
    relay["status_age"] = 60.0
    assert troubles(told) == [silent, down]
    relay["upstreams"] = {"http://gw:8000": True}
    assert troubles(told) == [silent]
    assert troubles({}) == []


def test_each_part_of_the_time_has_a_level_by_the_largest() -> None:
    timeline = [[0.0, 1], [0.1, 1], [1.5, 8], [3.9, 1]]
    assert sparkline(timeline, 4, 0.0, 4.0) == "▂█·▁"
    assert sparkline(timeline, 2, 2.0, 4.0) == "·█"
    assert sparkline([[4.0, 1]], 4, 0.0, 4.0) == "···█"


def table_streams(told: dict[str, Any]) -> ViewTable:
    return streams_table(Shown({}, {"streams": told}))


def test_a_stream_is_a_line_with_what_is_known_of_it() -> None:
    silent = a_stream(2, ttft=None, since_last=None, model=None, timeline=[], age=0.5)
    told = {"count": 7, "window": 10.0, "streams": [a_stream(), silent]}
    first, second = table_streams(told).rows
    assert [cell.text for cell in first.cells[:8]] == [
        "acme", "tiny", "2", "100", "3", "3", "50.0", "·█········█············█",
    ]  # fmt: skip
    assert [cell.text for cell in second.cells[:8]] == ["acme", "-", "0.5", "-", "3", "3", "-", "·" * 24]
    assert (
        table_streams(told)
        .notes[0]
        .startswith("7 streams under way, the 2 newest below; tokens over the last 10 s")
    )


def test_facts_flow_into_lines_and_are_never_torn() -> None:
    said = ["one", "two three", "four", "a fact longer than the line"]
    assert flowed(said, 15) == ["one · two three", "four", "a fact longer than the line"]
    assert flowed(["日本", "語"], 7) == ["日本", "語"], "each letter is two cells wide"
    assert flowed([], 10) == []
