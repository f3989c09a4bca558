"""From the frames of a relay to `/metrics`: answers of three readings have series of their own.

Objectives of tokens judge an inferred answer only with `meter.judge_inferred`."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmtap.channel.frames import FrameKind, Hello
from llmtap.clock import ManualClock
from llmtap.meter.admin.views import metrics_of, summary_of
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.metrics.slo import SloOptions
from tests.support.traffic.tap_frames import MS, Script

S = 1_000_000_000
HELLO = Hello(relay="r", pid=1, clock="mono", anchor_mono_ns=0, anchor_wall_ns=0)
HEAD = b"POST /api/ask HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
WORDS = ("The", " lake", " was", " calm", " and", " the", " boat", " went", " on", ".")
STREAMS: dict[str, list[Any]] = {
    "dialect": [
        {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": word}}]}
        for word in WORDS
    ]
    + [{"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}],
    "inferred": [{"kind": "speak", "fragment": word} for word in WORDS],
    "none": [{"kind": "progress", "percent": i} for i in range(40)],
}
TTFT_MS = {"dialect": 100, "inferred": 300}


def frames(seq: int, events: Iterable[Any], ttft_ms: int) -> Script:
    """A request submitted at 1 ms, and an answer whose events come every 10 ms from `ttft_ms` later on."""
    script = Script().frame(FrameKind.SENT, seq, MS, MS, HEAD)
    script.frame(FrameKind.RESPONSE_HEAD, seq, 3 * MS, 0, ANSWER)
    t_ns = (1 + ttft_ms) * MS
    for event in events:
        script.frame(FrameKind.RESPONSE_DATA, seq, t_ns, 0, b"data: %b\n\n" % json.dumps(event).encode())
        t_ns += 10 * MS
    return script.frame(FrameKind.RESPONSE_END, seq, t_ns).close(seq, t_ns // MS)


def observed(*, judge_inferred: bool) -> ExchangePipeline:
    slos = {"all": SloOptions(objectives="ttft:200ms")}
    clock = ManualClock(now_ns=S)
    pipeline = ExchangePipeline(MeterOptions(judge_inferred=judge_inferred), clock, slos=slos)
    assembler = Assembler(HELLO, pipeline)
    for seq, (reading, events) in enumerate(STREAMS.items(), 1):
        assembler.digest(frames(seq, events, TTFT_MS.get(reading, 50)).frames())
    return pipeline


def samples(pipeline: ExchangePipeline, name: str, label: str) -> dict[str, float]:
    """The values of a metric by one of its labels."""
    text = metrics_of(pipeline).render()[0].decode()
    return {
        sample.labels[label]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and sample.labels.get("kind", "content") == "content"
    }


def test_inferred_answers_have_series_of_their_own() -> None:
    pipeline = observed(judge_inferred=False)
    assert samples(pipeline, "llmtap_time_to_first_token_seconds_sum", "reading") == pytest.approx(
        {reading: ms / 1e3 for reading, ms in TTFT_MS.items()}
    )
    assert samples(pipeline, "llmtap_time_to_first_token_seconds_count", "reading") == {
        "dialect": 1,
        "inferred": 1,
    }
    assert samples(pipeline, "llmtap_answers_without_dialect_total", "reading") == {"inferred": 1, "none": 1}
    limits = samples(pipeline, "llmtap_reading_limits_total", "limit")
    assert {limit for limit, n in limits.items() if n} == {"kept_events"}


@pytest.mark.parametrize(
    ("judge_inferred", "counted", "good", "not_judged"), [(False, 1, 1, 2), (True, 2, 1, 1)]
)
def test_objectives_of_tokens_judge_inferred_answers_only_if_configured(
    judge_inferred: bool, counted: int, good: int, not_judged: int
) -> None:
    """The inferred answer has a TTFT of 300 ms, and 200 ms are allowed."""
    pipeline = observed(judge_inferred=judge_inferred)
    figures = {
        name: samples(pipeline, f"llmtap_slo_{name}_total", "slo")["all"]
        for name in ("events", "good", "not_judged")
    }
    assert figures == {"events": counted, "good": good, "not_judged": not_judged}
    summary_: Any = summary_of(pipeline)()
    goodput = summary_["goodput"]
    assert (goodput["counted"], goodput["met"], goodput["not_judged"]) == (counted, good, not_judged)


def test_an_agents_task_is_no_stream_of_tokens() -> None:
    """A2A 0.3 names itself in its events alone; the first text comes after 900 ms."""
    slos = {"all": SloOptions(objectives="ttft:200ms")}
    pipeline = ExchangePipeline(MeterOptions(), ManualClock(now_ns=S), slos=slos)
    task = {"kind": "task", "id": "t", "contextId": "c", "status": {"state": "working"}}
    parts = [{"kind": "text", "text": "Done."}]
    events: list[Any] = [
        task,
        {"kind": "artifact-update", "taskId": "t", "artifact": {"artifactId": "a", "parts": parts}},
        {"kind": "status-update", "taskId": "t", "status": {"state": "completed"}, "final": True},
    ]
    wrapped = [{"jsonrpc": "2.0", "id": 1, "result": event} for event in events]
    Assembler(HELLO, pipeline).digest(frames(1, wrapped, 900).frames())
    summary_: Any = summary_of(pipeline)()
    assert (summary_["n"], summary_["without_dialect"], summary_["outcomes"]) == (1, [], {"complete": 1})
    assert summary_["goodput"] is None, "neither counted nor left unjudged"
