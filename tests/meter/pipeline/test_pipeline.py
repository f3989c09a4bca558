import dataclasses
import json
import logging
import re
from typing import Any

import pytest

from llmtap.channel.frames import FrameKind, Hello
from llmtap.clock import ManualClock
from llmtap.exchange.outcome import Outcome, ReadingLimit
from llmtap.export.prometheus import exposition
from llmtap.export.sinks import SeriesKey
from llmtap.meter.admin.views import metrics_of, summary_of
from llmtap.meter.options import MeterOptions, TenantOptions
from llmtap.meter.pipeline import pipeline as module
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.meter.pipeline.exchanges import Query
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.metrics.slo import SloOptions
from tests.meter.sinks import CollectingSink
from tests.support.traffic.streams import streamed
from tests.support.traffic.tap_frames import Script

S = 1_000_000_000


def tally(**options: int) -> ExchangePipeline:
    return ExchangePipeline(MeterOptions(**options), ManualClock(now_ns=S))


def test_failures_are_counted_always_and_told_once_for_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    t = tally()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            t.on_error("ValueError", ValueError("odd"))
        t.on_error("bad_batch", "not a batch")
    assert t.errors == {"ValueError": 3, "bad_batch": 1}
    assert [record.getMessage().split()[1] for record in caplog.records] == [
        "kind=ValueError",
        "kind=bad_batch",
    ]
    assert summary_of(t)()["meter_errors"] == t.errors


def test_values_of_a_server_that_cannot_be_true_are_counted_by_reason() -> None:
    t, x = tally(), streamed(100, 140)
    x.invalid_values = {"server_time_too_long": 2, "token_count": 1}
    t.on_end(x)
    assert summary_of(t)()["meter_errors"] == {"server_time_too_long": 2, "token_count": 1}


def test_bodies_under_way_are_bounded_together_and_what_is_not_kept_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BODIES_BYTES_MAX", 1_000)
    t = tally()
    assembler = Assembler(Hello(relay="r", pid=1, clock="mono", anchor_mono_ns=0, anchor_wall_ns=0), t)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 900\r\n\r\n"

    def uploads(*seqs: int) -> None:
        for seq in seqs:
            frames = Script().frame(FrameKind.OPEN, seq, 1, 0, head)
            assembler.digest(frames.frame(FrameKind.REQUEST_DATA, seq, 2, 0, b"x" * 800).frames())

    uploads(1, 2)
    assert t.errors == {"body_memory": 1}
    assembler.digest(Script().frame(FrameKind.DROP, 1).frames())
    uploads(3)
    assembler.digest(Script().frame(FrameKind.CLOSE, 3, 3, 0, b"not JSON").frames())
    uploads(4)
    assembler.digest(Script().close(4, 3).frames())
    uploads(5)
    assembler.discard()
    uploads(6)
    assembler.lose()
    uploads(7)
    assert t.errors == {"body_memory": 1, "DecodeError": 1}
    assert t.open_exchanges == 1


def test_limits_of_reading_are_counted_by_name_from_zero() -> None:
    t = tally()
    assert set(t.reading_limits.values()) == {0}
    x = streamed(100, 140)
    x.reading_limits = (ReadingLimit.KEPT_EVENTS, ReadingLimit.STRUCTURE_VALUES)
    t.on_end(x)
    t.on_end(streamed(100, 140))
    body = metrics_of(t).render()[0]
    for limit, n in (("kept_events", 1), ("structure_values", 1), ("revisions", 0)):
        assert b'llmtap_reading_limits_total{limit="%s"} %d.0' % (limit.encode(), n) in body
        assert summary(t)["reading_limits"][limit] == n


def test_one_line_for_each_exchange_at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    t = tally()
    t.on_end(streamed(100, 140, outcome=Outcome.TRUNCATED, model="a b\n"))
    t.on_end(dataclasses.replace(streamed(100, 140), stream=False))
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("event=exchange id=r-1 tenant='default' model='a b\\n' ")
    assert "outcome=truncated ttft_ms=100.000" in first and "ttft_ms=- e2e_ms=" in second


def test_every_sink_gets_each_exchange_once_and_its_errors_are_counted() -> None:
    t, sink = tally(), CollectingSink()
    t.sinks[:0] = [CollectingSink(RuntimeError("odd")), sink]
    t.on_end(streamed(100, 140))
    assert ([x.id for x in sink.exchanges], sink.keys) == (["r-1"], [SeriesKey("default", "m")])
    assert summary_of(t)()["n"] == 1
    assert t.errors == {"listener": 1}


def summary(t: ExchangePipeline, window: str = "1m", **how: Any) -> Any:
    return summary_of(t, window, **how)()


def test_a_tenants_class_judges_it_and_its_own_name_stays_out_when_there_is_no_room() -> None:
    slos = {
        "gold": SloOptions(objectives="ttft:50ms", tenants=("vip-*",)),
        "rest": SloOptions(objectives="ttft:1s"),
    }
    t = ExchangePipeline(MeterOptions(), ManualClock(now_ns=S), tenants=TenantOptions(max=1), slos=slos)
    for tenant in ("a", "vip-1", "vip-2"):
        t.on_end(streamed(100, 140, tenant=tenant))
    out = summary(t, by=("tenant", "class"))
    assert {name: part["n"] for name, part in out["by"]["tenant"].items()} == {"a": 1, "other": 2}
    assert {name: part["goodput"]["met"] for name, part in out["by"]["class"].items()} == {
        "gold": 0,
        "rest": 1,
    }
    assert out["slo"]["gold"]["by"]["tenant"].keys() == {"other"}
    body, _ = metrics_of(t).render()
    assert b'llmtap_slo_events_total{slo="gold",tenant="other"} 2.0' in body
    assert b'kind="content",model="m",reading="dialect",tenant="a",le="0.05"} 0.0' in body


def test_names_that_the_configuration_tells_have_their_place() -> None:
    slos = {"gold": SloOptions(objectives="ttft:50ms", tenants=("vip",))}
    tenants = TenantOptions(max=2, names={"key-1": "acme"})
    t = ExchangePipeline(MeterOptions(), ManualClock(), tenants=tenants, slos=slos)
    for tenant in ("a", "b", "vip", "acme", "default"):
        t.on_end(streamed(100, tenant=tenant))
    assert summary(t)["by"]["tenant"].keys() == {"other", "vip", "acme", "default"}


def test_wide_stamps_are_flagged_counted_and_left_out_on_request() -> None:
    t = tally(uncertainty_limit=5_000_000)
    for lag_ns in (5_000_000, 5_000_001):
        x = streamed(100, 140)
        x.uncertainty_ns = lag_ns
        t.on_end(x)
    assert [x.uncertain for _, x, _ in t.recent_exchanges.find(Query())] == [True, False]
    assert summary(t)["uncertain"] == {"n": 1, "included": True, "limit": 0.005}
    assert (summary(t)["n"], summary(t, certain=True)["n"]) == (2, 1)
    assert summary(t, certain=True)["uncertainty"] == 0.005
    assert b'llmtap_uncertain_exchanges_total{model="m",tenant="default"} 1.0' in metrics_of(t).render()[0]


def test_a_class_of_tenants_has_a_reader_of_its_own() -> None:
    slos = {"fast": SloOptions(objectives="ttft:1s", tenants=("a",), alpha=1.0, reader_tokens_per_second=10)}
    t = ExchangePipeline(MeterOptions(reader_grace_tokens=1), ManualClock(now_ns=S), slos=slos)
    for tenant in ("a", "b"):
        t.on_end(streamed(250, 290, tenant=tenant))
    by = summary(t, by=("tenant",))["by"]["tenant"]
    # Due at V i: 100 and 50 ms after submit.
    assert [by[name]["metrics"]["smooth_benefit"]["mean"] for name in ("a", "b")] == [
        pytest.approx(2 - 0.15),
        pytest.approx(2 - 5 * 0.2),
    ]
    assert [by[name]["smooth_goodput"]["speed_tokens_per_second"] for name in ("a", "b")] == [10, 20]
    query = Query()
    kept = json.loads(t.recent_exchanges.to_json(t.recent_exchanges.find(query), query))["exchanges"]
    assert [x["metrics"]["user_idle"] for x in kept] == [0.2, 0.15]


@pytest.mark.parametrize(("listened_to", "good"), [(True, 0), (False, 1)])
def test_bounds_that_a_client_brings_can_be_left_alone(listened_to: bool, good: int) -> None:
    slos = {"all": SloOptions(objectives="ttft:500ms")}
    t = ExchangePipeline(MeterOptions(request_objectives=listened_to), ManualClock(now_ns=S), slos=slos)
    x = streamed(100, 140)
    x.slo_ttft_ns = 1_000_000
    t.on_end(x)
    goodput: Any = summary_of(t, "all")()["goodput"]
    assert (goodput["counted"], goodput["met"]) == (1, good)
    body, _ = metrics_of(t).render()
    assert f'llmtap_slo_good_total{{slo="all",tenant="default"}} {good}.0'.encode() in body


@pytest.mark.parametrize(("tenants", "counted"), [(None, ["a", "b"]), (("a",), ["a"]), ((), [])])
def test_labels_count_for_the_tenants_that_may_set_them(
    tenants: tuple[str, ...] | None, counted: list[str]
) -> None:
    t = ExchangePipeline(MeterOptions(label_tenants=tenants), ManualClock(now_ns=S))
    for name in ("a", "b"):
        x = streamed(100, 140, tenant=name, outcome=Outcome.REFUSED)
        x.label = "should-answer"
        t.on_end(x)
    labels: Any = summary_of(t, "all")()["labels"]
    assert labels["should-answer"]["refused"] == len(counted)
    assert labels["ignored"] == ({"not-accepted": 2 - len(counted)} if len(counted) < 2 else {})
    query = Query.parse({"label": "should-answer"})
    assert [x.tenant for _, x, _ in t.recent_exchanges.find(query)] == counted[::-1]


def test_refused_requests_are_those_that_labels_and_experiments_count() -> None:
    t = ExchangePipeline(MeterOptions(), ManualClock(now_ns=S))
    by_text = {"kind": "model_refusal", "source": "text_pattern", "confidence": "low"}
    for seq, (outcome, refusal) in enumerate(
        [(Outcome.REFUSED, None), (Outcome.COMPLETE, by_text), (Outcome.COMPLETE, None)], 1
    ):
        x = streamed(100, 140, seq=seq, outcome=outcome)
        x.refusal = refusal
        t.on_end(x)
    for value, seqs in (("1", [2, 1]), ("0", [3])):
        assert [x.seq for _, x, _ in t.recent_exchanges.find(Query.parse({"refused": value}))] == seqs


TOOL = "Mcp-Method: tools/call\r\nMcp-Name: get_weather\r\n"


@pytest.mark.parametrize(
    ("headers", "method", "name"),
    [
        (TOOL, "tools/call", "get_weather"),
        ("Mcp-Method: resources/read\r\nMcp-Name: file:///home/ann/letter.txt\r\n", "resources/read", ""),
        ("Mcp-Method: tools/call\r\nMcp-Name: =?base64?w6Q=?=\r\n", "tools/call", "other"),
        ("Mcp-Session-Id: 1868a90c\r\n", "POST", ""),
    ],
)
def test_requests_to_mcp_servers_are_timed_apart_and_their_bodies_are_not_read(
    headers: str, method: str, name: str
) -> None:
    clock, every = ManualClock(now_ns=S), CollectingSink()
    t = ExchangePipeline(MeterOptions(), clock)
    t.sinks.append(every)
    assembler = Assembler(Hello(relay="r", pid=1, clock="mono", anchor_mono_ns=0, anchor_wall_ns=0), t)
    body = b'{"model":"m","choices":[{"delta":{"content":"secret"}}]}'
    head = f"POST /mcp HTTP/1.1\r\nHost: g\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    frames = Script().frame(FrameKind.OPEN, 1, 0, 0, head).frame(FrameKind.REQUEST_DATA, 1, 1, 0, body)
    frames.frame(FrameKind.REQUEST_END, 1, 1).frame(FrameKind.SUBMIT, 1, 2)
    frames.frame(FrameKind.RESPONSE_HEAD, 1, 3, 0, answer)
    frames.frame(FrameKind.RESPONSE_DATA, 1, 4, 0, b"data: " + body + b"\n\n")
    assembler.digest(frames.frame(FrameKind.RESPONSE_END, 1, 80_000_002).close(1, 80).frames())
    text, _ = metrics_of(t).render()
    labels = f'method="{method}",name="{name}",outcome="complete",tenant="default"'
    labels = labels.replace('name="",', "")
    family = b"llmtap_mcp_request_duration_seconds"
    assert b"%b_count{%b} 1.0" % (family, labels.encode()) in text
    assert b"%b_sum{%b} 0.08" % (family, labels.encode()) in text
    assert (every.exchanges, t.open_exchanges, t.errors) == ([], 0, {})
    clock.now_ns += S
    summary = summary_of(t)()
    assert (summary["n"], summary["load"]["offered_rps"]) == (0, 0)
    assert b"secret" not in text


CHAT = b'{"model":"m","messages":[]}'
REPLY = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def _exchanged(
    t: ExchangePipeline,
    fields: str,
    *,
    path: str = "/v1/chat/completions",
    body: bytes = CHAT,
    answer: bytes = b"200 OK",
    **closing: Any,
) -> None:
    """One request and its answer through the frames of a relay."""
    assembler = Assembler(Hello(relay="r", pid=1, clock="mono", anchor_mono_ns=0, anchor_wall_ns=0), t)
    head = f"POST {path} HTTP/1.1\r\nHost: g\r\n{fields}Content-Length: {len(body)}\r\n\r\n".encode()
    frames = Script().frame(FrameKind.SENT, 1, 1, 2, head + body)
    if answer:
        frames.frame(FrameKind.ANSWER, 1, 3, 0, REPLY % answer)
    assembler.digest(frames.close(1, 80, **closing).frames())


@pytest.mark.parametrize(
    ("fields", "path", "body", "measured"),
    [
        ("Mcp-Session-Id: x\r\n", "/v1/chat/completions", CHAT, 1),
        ("Mcp-Session-Id: x\r\nConnection: Mcp-Session-Id\r\n", "/anything", CHAT, 1),
        ("Mcp-Method: tools/call\r\nMcp-Name: a\r\n", "/v1/messages", CHAT, 1),
        ("A2A-Version: 1.0\r\n", "/v1/chat/completions", CHAT, 1),
        # An MCP server of the old transport: JSON-RPC names no model.
        ("Mcp-Protocol-Version: 1\r\n", "/messages", b'{"jsonrpc":"2.0","method":"ping"}', 0),
        ("Mcp-Session-Id: x\r\n", "/mcp", CHAT, 0),
    ],
)
def test_no_field_takes_an_inference_request_out(fields: str, path: str, body: bytes, measured: int) -> None:
    clock = ManualClock(now_ns=S)
    t = ExchangePipeline(MeterOptions(), clock)
    _exchanged(t, fields, path=path, body=body)
    clock.now_ns += S
    summary = summary_of(t)()
    assert (summary["n"], summary["load"]["offered_rps"]) == (measured, measured)
    text, _ = metrics_of(t).render()
    assert (b"llmtap_mcp_request_duration_seconds_count" in text) == (not measured)


def test_an_endpoint_is_recognised_by_the_path_that_gateways_route_by() -> None:
    every = CollectingSink()
    t = ExchangePipeline(MeterOptions(), ManualClock(now_ns=S))
    t.sinks.append(every)
    for path in (
        "/v1beta/models/gemini-2%3AstreamGenerateContent",
        "/x/../v1//chat%2e/..;a/chat/completions;b",
    ):
        _exchanged(t, "", path=path, body=b"{}")
    gemini, chat = every.exchanges
    assert (gemini.endpoint, gemini.model) == ("gemini.generate", "gemini-2")
    assert chat.endpoint == "chat.completions"


@pytest.mark.parametrize(
    ("answer", "closing", "place"),
    [
        (b"200 OK", {}, True),
        (b"302 Found", {}, True),
        (b"400 Bad Request", {}, False),
        (b"401 Unauthorized", {}, False),
        (b"403 Forbidden", {}, False),
        (b"404 Not Found", {}, False),
        (b"429 Too Many Requests", {}, False),
        (b"503 Service Unavailable", {}, False),
        # llmtap's own answers, and clients that left before any.
        (b"", {"outcome": "client_error", "status": 400}, False),
        (b"", {"outcome": "rejected", "status": 200}, False),
        (b"", {"outcome": "upstream_error", "status": 502}, False),
        (b"", {"outcome": "client_cancelled"}, False),
    ],
)
def test_only_an_accepted_request_takes_a_place(answer: bytes, closing: dict[str, Any], place: bool) -> None:
    t = ExchangePipeline(MeterOptions(), ManualClock(now_ns=S))
    tenant = "x-llm-d-inference-fairness-id: junk\r\n"
    _exchanged(t, tenant, answer=answer, **closing)
    _exchanged(
        t, tenant + "Mcp-Method: tools/call\r\nMcp-Name: tool\r\n", path="/mcp", answer=answer, **closing
    )
    text, _ = metrics_of(t).render()
    assert (b'tenant="junk"' in text, b'model="m"' in text, b'name="tool"' in text) == (place,) * 3
    assert t.labels.overflow == {"tenant": 0, "model": 0, "series": 0}


def test_tools_beyond_the_bound_share_a_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "CALLS_MAX", 2)
    t = tally()
    for name in ("a", "b", "c", "d", "a"):
        x = streamed(100, 140)
        x.call = f"tools/call {name}"
        t.on_end(x)
    text, _ = metrics_of(t).render()
    found = re.findall(
        rb'llmtap_mcp_request_duration_seconds_count\{method="(\S+?)",(.*?)outcome.*\} (\d)', text
    )
    assert found == [
        (b"tools/call", b'name="a",', b"2"),
        (b"tools/call", b'name="b",', b"1"),
        (b"other", b"", b"2"),
    ]
