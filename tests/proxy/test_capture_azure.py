"""Arrivals and lengths of the Azure conversation trace, sent through the tap and read back from its capture.

Invariant: lengths and counts are those sent; every arrival and every event's time lies within the system call
that sent its bytes, give or take the uncertainty that the row itself reports.
"""

import asyncio
import csv
import gzip
import json
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow.dataset
import pytest

from llmtap.clock import SystemClock, WallAnchor
from tests.support.busy_machine import BUSY_SHARE, waited_s
from tests.support.capturing import capturing
from tests.support.data import TRACES
from tests.support.peer import play
from tests.support.raw_client import RawClient, request
from tests.support.upstream import Call, upstream

TRACE = TRACES / "azure_llm_2023" / "AzureLLMInferenceTrace_conv.rows_1_12000.csv.gz"

CHAT = "/v1/chat/completions"
ROWS = 150
SPEED = 5
"""Times as fast as it was: 150 rows, 24 s, become 5 s."""
CLOCKS_NS = 300_000
"""Two processes map wall to monotonic time on their own; the file rounds to a microsecond."""
TOGETHER_NS = 1_000_000
"""Events that went out so close behind each other, or while the relay was kept from reading, may come in one
read, whose stamp is the last one's."""


@dataclass
class Sent:
    """One row of the trace, as it was sent; monotonic ns."""

    at_s: float
    input: int
    output: int
    request_ns: tuple[int, int] = (0, 0)
    """Around the call that sent the request."""
    events_ns: list[tuple[int, int]] = field(default_factory=list)
    """Around each call that sent an event."""


def rows_of_trace() -> list[Sent]:
    with gzip.open(TRACE, "rt", newline="") as lines:
        rows = [row for row, _ in zip(csv.DictReader(lines), range(ROWS), strict=False)]
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    return [
        Sent((t - times[0]) / SPEED, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for t, row in zip(times, rows, strict=True)
    ]


async def answer(call: Call, plan: list[Sent]) -> str | None:
    sent = plan[int(call.head.get("x-request-id") or b"0")]
    await call.body()
    await call.say(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    usage = {"prompt_tokens": sent.input, "completion_tokens": sent.output, "total_tokens": 0}
    for i in range(sent.output):
        await asyncio.sleep(0.003)
        finish = "stop" if i == sent.output - 1 else None
        value = {
            "model": "m",
            "choices": [{"index": 0, "delta": {"content": f"w{i} "}, "finish_reason": finish}],
        }
        data = b"data: " + json.dumps(value).encode() + b"\n\n"
        before = time.monotonic_ns()
        await call.say(b"%x\r\n%s\r\n" % (len(data), data))
        sent.events_ns.append((before, time.monotonic_ns()))
    data = b"data: " + json.dumps({"model": "m", "choices": [], "usage": usage}).encode() + b"\n\n"
    data += b"data: [DONE]\n\n"
    await call.say(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))
    return None


async def ask(port: int, number: int, sent: Sent, began: float) -> None:
    client = await RawClient.connect(port)
    try:
        text = "word " * sent.input
        body = {"model": "m", "stream": True, "max_tokens": sent.output, "messages": [
            {"role": "user", "content": text}
        ]}  # fmt: skip
        raw = request("POST", CHAT, f"X-Request-Id: {number}", body=json.dumps(body).encode())
        await asyncio.sleep(max(0.0, began + sent.at_s - time.monotonic()))
        before = time.monotonic_ns()
        await client.send(raw)
        sent.request_ns = (before, time.monotonic_ns())
        answer = await client.answer(b"POST")
        assert answer.whole
    finally:
        client.close()


async def capture(folder: Path, plan: list[Sent]) -> tuple[WallAnchor, int, bool]:
    async with upstream() as gateway:
        gateway.at(CHAT, lambda call: answer(call, plan))
        async with capturing(gateway.url, str(folder), "relay.workers=2") as proxy:
            anchor = WallAnchor.sample(SystemClock())
            began, waited = time.monotonic() + 0.5, waited_s()
            async with asyncio.TaskGroup() as group:
                for number, sent in enumerate(plan):
                    group.create_task(ask(proxy.ports.listen, number, sent, began))
            busy = waited_s() - waited > BUSY_SHARE * (time.monotonic() - began)
            await proxy.ports.measured(ROWS)
            summary = await proxy.ports.told("/api/v1/summary?window=all")
    return anchor, round(summary["uncertainty"] * 1e9), busy


@dataclass
class Result:
    plan: list[Sent]
    anchor: WallAnchor
    stall_ns: int
    """The relays' worst stall, as they say themselves."""
    busy: bool
    """As the kernel says."""
    files: str
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("azure")
    plan = rows_of_trace()
    anchor, stall_ns, busy = play(capture(folder, plan), limit_s=250)
    rows = pyarrow.dataset.dataset(folder).to_table().to_pylist()
    rows.sort(key=lambda row: int(row["request_id"]))
    return Result(plan, anchor, stall_ns, busy, str(folder / "*.parquet"), rows)


def test_lengths_are_those_sent(result: Result) -> None:
    assert [int(row["request_id"]) for row in result.rows] == list(range(ROWS))
    assert [row["input_tokens"] for row in result.rows] == [sent.input for sent in result.plan]
    assert [row["output_tokens"] for row in result.rows] == [sent.output for sent in result.plan]
    assert [row["max_tokens"] for row in result.rows] == [sent.output for sent in result.plan]
    assert [row["prompt_bytes"] for row in result.rows] == [5 * sent.input for sent in result.plan]
    assert [len(row["blocks"]) for row in result.rows] == [-(-5 * sent.input // 2048) for sent in result.plan]
    assert {row["token_source"] for row in result.rows} == {"usage"}


def test_arrivals_are_those_sent(result: Result) -> None:
    for row, sent in zip(result.rows, result.plan, strict=True):
        arrival_ns = result.anchor.to_mono_ns(row["arrival_ns"])
        slack_ns = row["uncertainty_us"] * 1_000 + CLOCKS_NS
        before, after = sent.request_ns
        assert before - slack_ns <= arrival_ns <= after + slack_ns, row["request_id"]


def test_events_have_the_times_they_were_sent_at(result: Result) -> None:
    late, n = [], 0
    for row, sent in zip(result.rows, result.plan, strict=True):
        arrival_ns = result.anchor.to_mono_ns(row["arrival_ns"])
        contents = [
            arrival_ns + us * 1_000
            for us, kind in zip(row["event_us"], row["event_class"], strict=True)
            if kind == "content"
        ]
        assert len(contents) == sent.output
        slack_ns = row["uncertainty_us"] * 1_000 + CLOCKS_NS
        for i, (t_ns, (before, after)) in enumerate(zip(contents, sent.events_ns, strict=True)):
            nearby = [
                b for b, _ in sent.events_ns[i + 1 : i + 4] if b - after < result.stall_ns + TOGETHER_NS
            ]
            latest = max([after, *nearby])
            assert before - slack_ns <= t_ns, (row["request_id"], i)
            if t_ns > latest + slack_ns:
                late.append((row["request_id"], i, t_ns - latest))
        n += len(contents)
    # The kernel stamps a packet when it gets to it: under load that is a thread which waits for a CPU
    # as well, and no relay can know of that.
    assert len(late) <= (n // 100 if result.busy else 0), late


def test_every_reader_finds_the_same(result: Result) -> None:
    columns = "request_id, arrival_ns, input_tokens, output_tokens, submit_us, first_content_us, event_us"
    names = columns.split(", ")
    expected = [tuple(row[name] for name in names) for row in result.rows]
    found = duckdb.sql(f"SELECT {columns} FROM '{result.files}' ORDER BY CAST(request_id AS INT)").fetchall()
    assert found == expected
    frame = polars.read_parquet(result.files).select(names).rows()
    assert sorted(frame, key=lambda row: int(row[0])) == expected
