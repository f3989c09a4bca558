"""The tables of documents that a meter made."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.exchange.exchange import OUTPUT, EventLog, Exchange, Timeline, Tokens
from llmtap.exchange.outcome import FAILED, EventClass, Outcome, TokenSource
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.latency import chunking_of, measure
from llmtap.top.streams import silences_table, sparkline, streams_table
from llmtap.top.table import ViewTable, facts, firing_sentences, flow_lines, warnings_of
from llmtap.top.views import VIEWS, Documents, event_table, fact_lines
from tests.support.servers.fake_admin import a_silent_stream, a_stream, recorded
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
    return view.table(Documents(documents["summary"], beside))


def cells(found: ViewTable) -> dict[str, dict[str, str]]:
    keys = [column.key for column in found.columns]
    return {row.key: dict(zip(keys, (cell.text for cell in row.cells), strict=True)) for row in found.rows}


def test_a_client_that_left_or_sent_a_wrong_request_is_no_failure() -> None:
    # A tenant has a row of its own once a request of it was accepted.
    rows = [streamed(100 + i, 3, tenant=outcome.value) for i, outcome in enumerate(Outcome)]
    rows += [streamed(i, 3, tenant=outcome.value, outcome=outcome) for i, outcome in enumerate(Outcome, 1)]
    found = cells(table("tenants", recorded(rows)))
    assert {name for name, row in found.items() if row["failed"] != "0"} == {o.value for o in FAILED}


def test_the_tap_of_a_passive_vantage_tells_its_packets() -> None:
    documents = some()
    documents["summary"]["relays"]["w0"] = {
        "vantage": "passive",
        "connected": True,
        "packets": {"captured": 900, "lost": 3},
        "side": "server",
        "watched": {"followed": 4, "encrypted": 1},
        "missing_bytes": 70_000,
        "dropped": {"packets_lost": 1},
    }
    found = cells(table("tap", documents))
    mine = {key.removeprefix("passive w0/"): line for key, line in found.items() if "w0" in key}
    assert {name: line["value"] for name, line in mine.items() if not line["about"].startswith("ms")} == {
        "state": "connected",
        "packets captured": "900",
        "packets lost": "3",
        "watched followed": "4",
        "watched encrypted": "1",
        "missing": "68.4 KiB",
        "dropped": "1",
    }
    assert "side: server" in mine["missing"]["about"]


def test_a_relay_that_ended_in_order_is_only_counted() -> None:
    documents = some()
    ended = {"connected": False, "opened": 12, "measured": 12, "lost": 0, "dropped": {}}
    documents["summary"]["relays"] |= {"r8": ended, "r9": ended | {"dropped": {"meter_lost": 1}}}
    found = cells(table("tap", documents))
    assert not any("r8" in key for key in found)
    assert found["relay r9/state"]["value"] == "GONE"
    assert found["relays/ended"]["value"] == "1" and "12 measured exchanges" in found["relays/ended"]["about"]


def test_exchanges_that_died_with_a_relay_are_shown_with_what_happened_to_them() -> None:
    reason = "the relay died, so the client got an incomplete response or none"
    documents = some()
    documents["summary"]["relays"]["w0"] = {"connected": False, "lost": 9, "lost_reason": reason}
    line = cells(table("tap", documents))["relay w0/lost"]
    assert (line["value"], line["about"]) == ("9", f"counted as tap_error: {reason}")
    assert any(fact.startswith("9 lost") for fact in facts(documents["summary"]))


def test_burn_rates_and_alarms_of_classes_are_shown_and_a_firing_alarm_is_in_the_header() -> None:
    quiet = some()["summary"]
    states = [line["state"] for line in cells(table("slo", {"summary": quiet})).values()]
    assert states == ["quiet until 7 counted", "quiet until 17 counted"]
    assert firing_sentences(quiet) == []
    bad = recorded([streamed(i, 3, outcome=Outcome.UPSTREAM_ERROR) for i in range(1, 11)])["summary"]
    found = cells(table("slo", {"summary": bad}))
    assert found["default 1h"] == {
        "class": "default",
        "state": "FIRING",
        "severity": "page",
        "limit": "14.4",
        "counted": "10",
        "not_judged": "0",
        "own_faults": "0",
        "long": "100 over the 1 s measured",
        "short": "100 over the 1 s measured",
        "objectives": "ttft:500ms tpot:50ms",
        "target": "99.0%",
    }
    assert found["default 6h"]["state"] == "quiet until 17 counted"
    [message] = firing_sentences(bad)
    assert (
        "default uses its error budget too fast: burn rate 100 over the 1 s measured; page above" in message
    )
    whole = {**bad["slo"]["default"]["windows"]["1h"], "seconds": 3_400.0, "burn_rate": 15.0}
    bad["slo"]["default"]["windows"]["1h"] = whole
    assert "burn rate 15 over 1h and 100 over the 1 s measured" in firing_sentences(bad)[0]


def test_an_alarm_of_a_tenant_has_its_name_and_burn_rates() -> None:
    summary = recorded([streamed(i, 3, outcome=Outcome.UPSTREAM_ERROR) for i in range(1, 11)])["summary"]
    slo = summary["slo"]["default"]
    windows = {name: {**window, "burn_rate": 50.0, "counted": 9} for name, window in slo["windows"].items()}
    slo["by"]["tenant"]["acme"] = windows
    slo["alarms"] = [{**slo["alarms"][0], "tenant": "acme"}]
    row = cells(table("slo", {"summary": summary}))["acme (default) 1h"]
    assert (row["class"], row["counted"], row["long"]) == ("acme (default)", "9", "50 over the 1 s measured")
    assert firing_sentences(summary)[0].startswith(
        "acme (default) uses its error budget too fast: burn rate 50 over"
    )


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


def test_a_stream_that_its_client_held_has_both_figures() -> None:
    x = streamed(1, 5)
    events = x.timeline.events.t_ns
    x.timeline.holds.extend((events[1] + 5_000_000, events[2]))
    x.timeline.paused_ns = events[2] - events[1] - 5_000_000
    (document,) = recorded([x])["events"].values()
    lines = list(fact_lines(document))
    assert "held by the client 15.0 ms" in lines
    assert "longest pause delivered 20.0 ms, of the server alone at least 20.0 ms" in lines
    assert "TPOT delivered 20.0 ms, of the server alone at least 16.2 ms" in lines
    assert not any("held" in line for line in fact_lines({**document, "held": None}))


def test_every_view_stands_a_tap_that_tells_nothing() -> None:
    for view in VIEWS:
        for beside in ({}, {view.path or "": {}}):
            assert view.table(Documents({}, beside)).columns


def test_relays_that_are_silent_or_gone_and_upstreams_that_are_down_are_told_of() -> None:
    down = "UPSTREAM DOWN: http://gw:8000 accepts no connection; clients get 502 or 504"
    (silent,) = warnings_of(recorded(relay=False)["summary"])
    assert silent.startswith("NO RELAY REPORTS")
    result = recorded()["summary"]
    relay = result["relays"]["r0"]
    assert warnings_of(result) == [down]
    result["relays"]["r1"] = relay
    assert warnings_of(result) == [down], "once, although both relays say so"
    relay["status_age"] = 60.0
    assert warnings_of(result) == [silent, down]
    relay["upstreams"] = {"http://gw:8000": True}
    assert warnings_of(result) == [silent]
    assert warnings_of({}) == []
    capture = {"pause": {"sentence": "The disk is full."}}
    assert warnings_of({"capture": capture}) == ["CAPTURE PAUSED: The disk is full."]
    assert warnings_of(result | {"capture": capture})[-1] == "CAPTURE PAUSED: The disk is full."


def test_a_model_whose_ttft_has_risen_is_a_line_until_it_returns() -> None:
    model = {"state": "step", "sentence": "Since 14:05 UTC ...", "step": {"until": None}}
    summary = {"ttft_steps": {"models": {"tiny": model, "small": {"sentence": "", "step": None}}}}
    assert warnings_of(summary) == ["TTFT HAS RISEN: Since 14:05 UTC ..."]
    assert warnings_of({"ttft_steps": {"models": {"tiny": model | {"state": "few"}}}}) == []
    model["step"] = {"until": 1.0}
    assert warnings_of(summary) == []


def test_each_part_of_the_time_has_a_level_by_the_largest() -> None:
    timeline = [[0.0, 1], [0.1, 1], [1.5, 8], [3.9, 1]]
    assert sparkline(timeline, 4, 0.0, 4.0) == "▂█·▁"
    assert sparkline(timeline, 2, 2.0, 4.0) == "·█"
    assert sparkline([[4.0, 1]], 4, 0.0, 4.0) == "···█"


def test_a_silent_stream_is_a_line_with_what_became_of_earlier_ones() -> None:
    new = {"silence": 30.0, "n": 0, "resumed": 0, "until": None, "share": None, "low": None, "high": None}
    streams = [
        a_silent_stream(1),
        a_silent_stream(2, kind="first_token", past=new),
        a_silent_stream(3, past={**new, "n": 9, "resumed": 2}),
    ]
    document = {"threshold": 5.0, "running": 40, "not_judged": 1, "count": 3, "streams": streams}
    found = cells(silences_table(document))
    assert found["r0-1"] == {
        "tenant": "acme",
        "model": "tiny",
        "silent": "31.2",
        "waits": "next token",
        "read": "0.4",
        "past": "3 of 240, 1.2% (0.4% to 3.8%)",
        "tokens": "17",
        "age": "40.5",
        "upstream": "http://gw:8000",
        "arm": "-",
        "id": "r0-1",
    }
    assert [found[f"r0-{seq}"]["past"] for seq in (2, 3)] == ["-", "2 of 9"]
    assert found["r0-2"]["waits"] == "first token"
    (note,) = silences_table(document).notes
    assert "3 of 40" in note
    assert "1 not judged" in note


def table_streams(result: dict[str, Any]) -> ViewTable:
    return streams_table(result)


def test_a_stream_is_a_line_with_what_is_known_of_it() -> None:
    silent = a_stream(2, ttft=None, since_last=None, model=None, timeline=[], age=0.5)
    result = {"count": 7, "window": 10.0, "streams": [a_stream(), silent]}
    first, second = table_streams(result).rows
    assert [cell.text for cell in first.cells[:8]] == [
        "acme",
        "tiny",
        "2",
        "100",
        "3",
        "3",
        "50.0",
        "·█········█············█",
    ]
    assert [cell.text for cell in second.cells[:8]] == ["acme", "-", "0.5", "-", "3", "3", "-", "·" * 24]
    assert (
        table_streams(result)
        .notes[0]
        .startswith("7 streams under way, the 2 newest below; tokens over the last 10 s")
    )


def test_facts_flow_into_lines_and_are_never_torn() -> None:
    message = ["one", "two three", "four", "a fact longer than the line"]
    assert flow_lines(message, 15) == ["one · two three", "four", "a fact longer than the line"]
    assert flow_lines(["日本", "語"], 7) == ["日本", "語"], "each letter is two cells wide"
    assert flow_lines([], 10) == []


def test_the_address_of_a_trace_is_whole_and_escaped() -> None:
    url = f"https://traces.example/{'a' * 300}?\x1b[31m"
    assert list(fact_lines({"trace_url": url}))[-1] == f"trace https://traces.example/{'a' * 300}?\\u001b[31m"


MS = 1_000_000


def result(x: Exchange, benefit: Benefit | None = None) -> dict[str, Any]:
    metrics = measure(x, benefit or Benefit()).metrics()
    document: dict[str, Any] = json.loads(json.dumps(x.to_dict(metrics, chunking_of(x), events=True)))
    return document


def exchange(chunks: list[tuple[int, int]], *, declared: bool = True, total: int | None = None) -> Exchange:
    """Chunks as (ms since submit, tokens); submitted 3 ms after arrival at 1 s."""
    log = EventLog()
    arrival, submit = 1_000 * MS, 1_003 * MS
    log.add(submit + MS, EventClass.ROLE, 50, -1, 0)
    for t_ms, tokens in chunks:
        log.add(submit + t_ms * MS, EventClass.CONTENT, 100, tokens if declared else -1, OUTPUT)
    log.add(log.t_ns[-1] + MS, EventClass.DONE, 12, -1, 0)
    first = submit + chunks[0][0] * MS
    count = sum(n for _, n in chunks) if total is None else total
    return Exchange(
        relay="r",
        seq=1,
        arrival_wall_ns=0,
        stream=True,
        status=200,
        method="POST",
        path="/v1/x",
        timeline=Timeline(
            arrival_ns=arrival,
            submit_ns=submit,
            first_any_ns=submit + MS,
            first_token_ns=first,
            first_content_ns=first,
            last_token_ns=log.t_ns[-2],
            response_end_ns=log.t_ns[-1],
            events=log,
        ),
        tokens=Tokens(output=count, source=TokenSource.USAGE),
    )


def waits_ms(x: dict[str, Any], v_ns: int = 50 * MS) -> list[float]:
    texts = [row.cells[-1].text for row in event_table(x, v_ns).rows]
    return [float(t.split()[1].replace(",", "")) for t in texts if t.startswith("WAITS")]


def test_a_worked_example() -> None:
    """A reader of 20 tokens/s: 2 tokens at 100 ms, 1 at 180, 1 at 400."""
    table = event_table(result(exchange([(100, 2), (180, 1), (400, 1)])))
    assert [tuple(cell.text for cell in row.cells) for row in table.rows] == [
        ("0", "1.00", "-", "role", "-", "50", "-", ""),
        ("1", "100", "99.0", "content", "2", "100", "0", "WAITS 100 ms"),
        ("2", "180", "80.0", "content", "1", "100", "200", "20.0 ms ahead"),
        ("3", "400", "220", "content", "1", "100", "250", "WAITS 150 ms"),
        ("4", "401", "1.00", "done", "-", "12", "-", ""),
    ]
    assert table.notes == ("a reader of 20 tokens/s, from submit on",)
    assert result(exchange([(100, 2), (180, 1), (400, 1)]))["metrics"]["user_idle"] == pytest.approx(0.25)


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 6)), min_size=1, max_size=30),
    st.booleans(),
    st.integers(0, 60) | st.none(),
    st.sampled_from((5.0, 20.0, 33.0)),
)
def test_waits_add_up_to_the_meters_figure(
    gaps: list[tuple[int, int]], declared: bool, total: int | None, speed: float
) -> None:
    t_ms, chunks = 2, []
    for gap, tokens in gaps:
        t_ms += gap
        chunks.append((t_ms, tokens))
    benefit = Benefit.at_speed(speed)
    document = result(exchange(chunks, declared=declared, total=total), benefit)
    summed = sum(waits_ms(document, benefit.reader_ns_per_token))
    # Texts have three digits.
    assert summed == pytest.approx(document["metrics"]["user_idle"] * 1e3, rel=0.006, abs=0.01)


def test_tokens_that_nobody_declares_are_told_as_what_they_count_for() -> None:
    x = exchange([(100, 1), (180, 1)], declared=False)
    x.tokens.source = TokenSource.CHUNKS
    table = event_table(result(x))
    assert [row.cells[4].text for row in table.rows] == ["-", "~1", "~1", "-"]
    assert "~1: no token count declared" in table.notes[0]
