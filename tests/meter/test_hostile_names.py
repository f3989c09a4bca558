"""A hundred thousand tenants, each with a name of its own: counted, and in a thousand series."""

import json
import re

import pytest

from llmtap.channel.frames import FrameKind, Hello
from llmtap.clock import ManualClock
from llmtap.meter.admin.views import metrics_of
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.meter.pipeline.pipeline import ExchangePipeline

NAMES = 100_000
KNOWN_MAX = 1_000

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
CLOSING = json.dumps({"outcome": "complete"}).encode()


@pytest.mark.once
def test_a_hundred_thousand_tenants_are_a_thousand_and_the_rest() -> None:
    tally = ExchangePipeline(MeterOptions(), ManualClock())
    hello = Hello(relay="r", pid=1, clock="mono", anchor_mono_ns=0, anchor_wall_ns=0)
    assembler = Assembler(hello, tally)
    for seq in range(1, NAMES + 1):
        name = b"tenant-%d" % seq + b"x" * (seq % 3_000)  # in length without end, too
        request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n"
        request += b"x-llm-d-inference-fairness-id: " + name + b"\r\ncontent-length: 0\r\n\r\n"
        assembler.digest([
            (int(FrameKind.SENT), seq, seq, seq + 1, request),
            (int(FrameKind.RESPONSE_HEAD), seq, seq + 2, 0, HEAD),
            (int(FrameKind.RESPONSE_DATA), seq, seq + 3, 0, b"data: [DONE]\n\n"),
            (int(FrameKind.RESPONSE_END), seq, seq + 4, 0, b""),
            (int(FrameKind.CLOSE), seq, seq + 5, 0, CLOSING),
        ])  # fmt: skip
    assert tally.errors == {}
    assert tally.labels.overflow["tenant"] == NAMES - KNOWN_MAX
    body, _ = metrics_of(tally).render("")
    tenants = set(re.findall(rb'tenant="([^"]*)"', body))
    assert len(tenants) == KNOWN_MAX + 1
    assert b"other" in tenants
    assert max(map(len, tenants)) < 300
