"""Strings of 8 MB wherever a client, an upstream or a relay chooses one: none is kept, shown or logged whole.

Frames go through the real readers of the meter; every output that shows an exchange is searched for the key
that is planted in the strings.
"""

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest

import llmtap
from llmtap.capture.options import CaptureOptions
from llmtap.capture.schema import CaptureInfo
from llmtap.channel.frames import Assigned, BatchReader, Closing, FrameKind, Hello, pack_batch
from llmtap.clock import ManualClock, SystemClock
from llmtap.exchange.bounds import BOUNDS
from llmtap.exchange.request import REQUEST_BYTES_MAX
from llmtap.export.opentelemetry.exporter import OtlpExporter
from llmtap.export.options import OtlpOptions
from llmtap.meter.admin.views import metrics_of
from llmtap.meter.options import MeterOptions, TenantOptions, TenantRule
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.meter.pipeline.exchanges import Query, StreamsQuery
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.meter.pipeline.recorder import Recorder
from tests.meter.sinks import CollectingSink
from tests.support.servers.otlp_receiver import OtlpReceiver

SIZE = 8_000_000
assert SIZE < REQUEST_BYTES_MAX
KEY = "sk-Ab3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3hJ6kL9nO2"
FILLER = "word." * (SIZE // 5)
TEXT_MAX = 512
"""No string that an exchange shows is longer."""


def text_of(field: str, plant: str) -> str:
    """A string for a field, with the key in it: far behind its bound, across it, or alone."""
    if plant == "alone":
        return KEY
    at = 1_100 if plant == "behind" else BOUNDS[field].chars - 25
    return f"{FILLER[: at - 1]}.{KEY}.{FILLER[at:]}"


class Relay:
    """Sends frames to an assembler, each as a batch of its own."""

    def __init__(self, assembler: Assembler) -> None:
        self._assembler = assembler
        self._reader = BatchReader()
        self._batch = 0

    def say(self, kind: FrameKind, t_ns: int, data: bytes | str | object = b"", seq: int = 1) -> None:
        if isinstance(data, msgspec.Struct):
            data = msgspec.json.encode(data)
        raw = data.encode("latin-1") if isinstance(data, str) else data
        self._batch += 1
        for _, frames in self._reader.feed(pack_batch(self._batch, [int(kind), seq, t_ns, 0, raw])):
            self._assembler.digest(frames)


def ask(relay: Relay, plant: str, *, with_id: bool) -> None:
    """A request with long strings."""
    body = json.dumps(
        {
            "model": text_of("model", plant),
            "stream": True,
            "messages": [{"role": text_of("shape.roles", plant)[:2_000], "content": "x"}],
            "response_format": {"type": text_of("shape.response_format", plant)[:2_000]},
        }
    ).encode()
    head = (
        f"POST /{text_of('path', plant)}/v1/chat/completions HTTP/1.1\r\nhost: g\r\n"
        f"x-team: {text_of('tenant', plant)}\r\ntraceparent: {text_of('trace_parent', plant)}\r\n"
        + (f"x-request-id: {text_of('request_id', plant)}\r\n" if with_id else "")
        + f"content-length: {len(body)}\r\n\r\n"
    )
    relay.say(FrameKind.OPEN, 1, head)
    relay.say(FrameKind.ARM, 1, Assigned(arm=FILLER, unit=FILLER))
    relay.say(FrameKind.REQUEST_DATA, 2, body)
    relay.say(FrameKind.REQUEST_END, 3)
    relay.say(FrameKind.SUBMIT, 4)


def stream(relay: Relay, plant: str) -> None:
    """A stream with long strings."""
    long = text_of("finish_reason", plant)
    relay.say(
        FrameKind.RESPONSE_HEAD,
        5,
        f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; x={FILLER}\r\n"
        f"x-litellm-applied-guardrails: {long}\r\nserver-timing: {long};dur=0\r\n"
        f"x-request-id: {text_of('request_id', plant)}\r\n\r\n",
    )
    for event in (
        {"model": text_of("response_model", plant), "choices": [{"index": 0, "delta": {"content": "a"}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": long}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1, long: 1, "tier": long}},
    ):
        relay.say(FrameKind.RESPONSE_DATA, 6, f"data: {json.dumps(event)}\n\n")
    relay.say(FrameKind.RESPONSE_DATA, 7, "data: [DONE]\n\n")


def refuse(relay: Relay, plant: str) -> None:
    """A guardrail's error with a long string; a body of more than 1 MiB is not read as one."""
    long = text_of("guardrail", plant)[:1_000_000]
    relay.say(FrameKind.RESPONSE_HEAD, 5, "HTTP/1.1 400 Bad\r\ncontent-type: application/json\r\n\r\n")
    filtered = {"content_filter_result": {long: {"filtered": True}}}
    body = {"error": {"code": "content_filter", "type": "t", "message": "m", "innererror": filtered}}
    relay.say(FrameKind.RESPONSE_DATA, 6, json.dumps(body))


def fail(relay: Relay, plant: str) -> None:
    """An error whose type is a long string."""
    relay.say(FrameKind.RESPONSE_HEAD, 5, "HTTP/1.1 500 Bad\r\ncontent-type: application/json\r\n\r\n")
    error = {"type": text_of("finish_reason", plant), "code": text_of("finish_reason", plant)}
    relay.say(FrameKind.RESPONSE_DATA, 6, json.dumps({"error": error | {"message": "m"}}))


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


def strings_of(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """`(field, string)` of all strings in a record, names of members included."""
    if isinstance(value, str):
        if not isinstance(value, Enum):
            yield name, value
    elif is_dataclass(value):
        for f in fields(value):
            yield from strings_of(getattr(value, f.name), f"{name}.{f.name}" if name else f.name)
    elif isinstance(value, dict):
        for one in (*value, *value.values()):
            yield from strings_of(one, name)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from strings_of(one, name)


def leaks(text: str | bytes) -> list[str]:
    """Parts of the key in a text."""
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return [KEY[i : i + 8] for i in range(3, len(KEY) - 8) if KEY[i : i + 8] in text]


@pytest.mark.parametrize("plant", ["behind", "across", "alone"])
@pytest.mark.parametrize("answer", [stream, refuse, fail])
def test_no_string_is_long_and_no_key_is_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, receiver: OtlpReceiver, plant: str, answer: Any
) -> None:
    caplog.set_level(logging.INFO)
    rules = TenantOptions(rules=(TenantRule(header="x-team"),))
    tally = ExchangePipeline(MeterOptions(), ManualClock(), tenants=rules, salt="s")
    options = CaptureOptions(to=str(tmp_path), level="shape")
    info = CaptureInfo(capture="c", level="shape", block_size=16, block_unit="bytes")
    recorder = Recorder(options, SystemClock(), info, salt=bytes(32))
    tally.attach_recorder(recorder)
    sink = CollectingSink()
    tally.sinks.append(sink)
    exporter = OtlpExporter(OtlpOptions(endpoint=receiver.endpoint), ManualClock(now_ns=1), "1")
    tally.sinks.append(exporter)
    recorder.start()
    hello = Hello(relay="r" * SIZE, pid=1, clock="c" * SIZE, anchor_mono_ns=0, anchor_wall_ns=0)
    assembler = Assembler(hello, tally)
    tally.streams.join(assembler)
    relay = Relay(assembler)

    ask(relay, plant, with_id=answer is not stream)
    answer(relay, plant)
    (running,) = asyncio.run(tally.streams.find(StreamsQuery()))
    under_way = json.dumps(running.to_dict())
    relay.say(FrameKind.RESPONSE_END, 8)
    relay.say(
        FrameKind.CLOSE,
        9,
        Closing(outcome="complete", error=FILLER, arm=FILLER, route=FILLER, unit=FILLER, excluded=FILLER),
    )
    recorder.close(60)
    exporter.close(60)

    assert tally.errors == {}
    (x,) = sink.exchanges
    assert None not in (x.model, x.trace_parent, x.request_id, x.arm, x.route, x.unit, x.excluded)
    assert x.method == "POST" and x.path and x.endpoint == "chat.completions" and x.tenant != "default"
    found = dict.fromkeys(name for name, _ in strings_of(x))
    for name, text in strings_of(x):
        assert len(text) <= BOUNDS[name].chars, name
        assert not leaks(text), name
    if answer is stream:
        assert None not in (x.response_model, x.finish_reason, x.usage, x.server_timing)
    if answer is refuse:
        assert {"refusal", "guardrail"} <= set(found)

    query = Query.parse({"events": "1"})
    api = tally.recent_exchanges.to_json(tally.recent_exchanges.find(query), query)
    metrics, _ = metrics_of(tally).render("")
    (row,) = llmtap.read(tmp_path).table().to_pylist()
    assert row["level"] == "shape" and row["message_roles"] == ["other"]
    log = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("event=exchange ") for line in log)
    exported = [request.SerializeToString() for request in (*receiver.traces, *receiver.metrics)]
    assert any(b"llmtap.exchange.id" in body for body in exported)
    written = (under_way, api, metrics, repr(row), "\n".join(log), *exported)
    for output in written:
        assert not leaks(output)
    for texts in (json.loads(under_way), json.loads(api), row):
        assert max(len(text) for _, text in strings_of(texts)) <= TEXT_MAX
    assert max(map(len, log)) < 2_000
    assert max(map(len, exported)) < 20_000
    assert sum(len(text) for _, text in strings_of(x)) < tally.recent_exchanges.weight_bytes < 100_000
