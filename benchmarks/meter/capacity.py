"""How many streamed events one core can measure, and what the meter does when more come.

`digest`: batches as relays pack them go through BatchReader, Assembler, SSE, dialect, metrics, windows
and exposition, in this process. Kinds of streams are interleaved, several rounds, and CPU time is read,
so that a noisy neighbour moves the figures little. `overload`: a real meter process gets more than it
can take, through a real Tap; every exchange must be measured or counted as dropped. Meanwhile somebody
scrapes it without a pause.

    .venv/bin/python benchmarks/meter/capacity.py [--rounds 5] [--json FILE]
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llmtap.channel import Tap
from llmtap.channel.frames import BatchReader, Closing, FrameKind, Hello, pack_batch
from llmtap.clock import SystemClock, WallAnchor
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.meter.pipeline.pipeline import ExchangePipeline

STREAMS = 200
"""Open at once."""
EVENTS = 200
"""Events with output in each stream."""
MS = 1_000_000

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CLOSE = json.dumps({"outcome": "complete", "lag_ns": 100_000}).encode()


def sse(value: dict[str, Any], name: str | None = None) -> bytes:
    line = b"" if name is None else b"event: %s\n" % name.encode()
    return line + b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def chat(**choice: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-9f8e7d6c5b4a",
        "object": "chat.completion.chunk",
        "created": 1_760_000_000,
        "model": "acme-8b",
        "system_fingerprint": "fp_44709d6fcb",
        "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None, **choice}],
    }


USAGE = {"prompt_tokens": 120, "completion_tokens": EVENTS, "total_tokens": 120 + EVENTS}


def plain() -> Iterator[bytes]:
    """Text, one token a chunk, the total at the end: what most streams are."""
    yield sse(chat(delta={"role": "assistant", "content": ""}))
    for i in range(EVENTS):
        yield sse(chat(delta={"content": f" tok{i}"}))
    yield sse(chat(finish_reason="stop"))
    yield sse({**chat(), "choices": [], "usage": USAGE})
    yield b"data: [DONE]\n\n"


def running() -> Iterator[bytes]:
    """A usage object on every chunk, the first with a role, too (vLLM's continuous_usage_stats)."""

    def usage(n: int) -> dict[str, int]:
        return {"prompt_tokens": 120, "completion_tokens": n, "total_tokens": 120 + n}

    yield sse({**chat(delta={"role": "assistant", "content": ""}), "usage": usage(0)})
    for i in range(EVENTS):
        yield sse({**chat(delta={"content": f" tok{i}"}), "usage": usage(i + 1)})
    yield sse({**chat(finish_reason="stop"), "usage": usage(EVENTS)})
    yield b"data: [DONE]\n\n"


def tools() -> Iterator[bytes]:
    """A tool call, argument by argument."""
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": ""}}
    yield sse(chat(delta={"role": "assistant", "tool_calls": [call]}))
    for i in range(EVENTS):
        yield sse(chat(delta={"tool_calls": [{"index": 0, "function": {"arguments": f'"{i}",'}}]}))
    yield sse(chat(finish_reason="tool_calls"))
    yield b"data: [DONE]\n\n"


def completions() -> Iterator[bytes]:
    """The older API, without a role."""

    def choice(text: str, reason: str | None = None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}

    top = {"id": "cmpl-1", "object": "text_completion", "created": 1_760_000_000, "model": "acme-8b"}
    for i in range(EVENTS):
        yield sse({**top, "choices": [choice(f" tok{i}")]})
    yield sse({**top, "choices": [choice("", "stop")]})
    yield sse({**top, "choices": [], "usage": USAGE})
    yield b"data: [DONE]\n\n"


def responses() -> Iterator[bytes]:
    """OpenAI's named events, each with its number and padding."""

    def event(kind: str, number: int, **members: Any) -> bytes:
        value = {"type": f"response.{kind}", "sequence_number": number, **members}
        return sse(value, f"response.{kind}")

    response = {"id": "resp_1", "object": "response", "model": "acme-8b"}
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0, "logprobs": []}
    yield event("created", 0, response={**response, "status": "in_progress"})
    for i in range(EVENTS):
        padding = f"{i * 2_654_435_761 % (1 << 48):x}"
        yield event("output_text.delta", i + 1, **place, delta=f" tok{i}", obfuscation=padding)
    usage = {"input_tokens": 120, "output_tokens": EVENTS, "total_tokens": 120 + EVENTS}
    yield event("completed", EVENTS + 1, response={**response, "status": "completed", "usage": usage})


def anthropic() -> Iterator[bytes]:
    """Anthropic's named events."""
    usage = {"input_tokens": 120, "output_tokens": 1}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "acme", "usage": usage}
    yield sse({"type": "message_start", "message": message}, "message_start")
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    yield sse(block, "content_block_start")
    for i in range(EVENTS):
        delta = {"type": "text_delta", "text": f" tok{i}"}
        yield sse({"type": "content_block_delta", "index": 0, "delta": delta}, "content_block_delta")
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": EVENTS}}
    yield sse(end, "message_delta")
    yield sse({"type": "message_stop"}, "message_stop")


def padded() -> Iterator[bytes]:
    """As OpenAI sends it: each chunk ends in a string of another length and no meaning."""
    yield sse({**chat(delta={"role": "assistant", "content": ""}), "usage": None, "obfuscation": "Jq"})
    for i in range(EVENTS):
        padding = f"{i * 2_654_435_761 % (1 << 48):x}"
        yield sse({**chat(delta={"content": f" tok{i}"}), "usage": None, "obfuscation": padding})
    yield sse({**chat(finish_reason="stop"), "usage": None, "obfuscation": "yZ"})
    yield sse({**chat(), "choices": [], "usage": USAGE, "obfuscation": "x"})
    yield b"data: [DONE]\n\n"


def stamped() -> Iterator[bytes]:
    """As `benchmarks/relay/sse_server.c` sends it: each chunk begins with its time and its number."""

    def event(i: int, **choice: Any) -> bytes:
        value = chat(**choice)
        choices = value.pop("choices")
        value |= {"t_ns": 987_654_321_000 + i * 5_012_345, "seq": i, "choices": choices}
        if i == EVENTS + 1:
            value |= {"choices": [], "usage": USAGE}
        return sse(value)

    yield event(0, delta={"role": "assistant", "content": " word0"})
    for i in range(1, EVENTS):
        yield event(i, delta={"content": f" word{i}"})
    yield event(EVENTS, finish_reason="stop")
    yield event(EVENTS + 1)
    yield b"data: [DONE]\n\n"


KINDS: dict[str, tuple[str, Callable[[], Iterator[bytes]]]] = {
    "chat": ("/v1/chat/completions", plain),
    "chat, running usage": ("/v1/chat/completions", running),
    "chat, padded": ("/v1/chat/completions", padded),
    "chat, stamped": ("/v1/chat/completions", stamped),
    "chat, tool call": ("/v1/chat/completions", tools),
    "completions": ("/v1/completions", completions),
    "responses": ("/v1/responses", responses),
    "anthropic": ("/v1/messages", anthropic),
}


def request(path: str, tenant: str) -> bytes:
    body = b'{"model":"acme-8b","stream":true,"messages":[{"role":"user","content":"How are you?"}]}'
    head = f"POST {path} HTTP/1.1\r\nHost: gateway\r\nx-llm-d-inference-fairness-id: {tenant}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def batches(kind: str) -> tuple[list[bytes], int]:
    """One wave of STREAMS streams as a relay would pack it, and how many events it has."""
    path, stream = KINDS[kind]
    events = list(stream())
    rows: list[Any] = []
    out: list[bytes] = []
    t_ns = 0

    def add(frame: FrameKind, seq: int, extra_ns: int = 0, data: bytes = b"") -> None:
        rows.extend((int(frame), seq, t_ns, extra_ns, data))
        if len(rows) >= 5 * 400:  # what 10 ms of 40,000 events/s come to
            out.append(pack_batch(len(out) + 1, rows))
            rows.clear()

    for seq in range(1, STREAMS + 1):
        add(FrameKind.SENT, seq, t_ns + 50_000, request(path, f"tenant-{seq % 20}"))
    for seq in range(1, STREAMS + 1):
        add(FrameKind.RESPONSE_HEAD, seq, 30_000, HEAD)
    for event in events:
        chunk = b"%x\r\n%b\r\n" % (len(event), event)
        for seq in range(1, STREAMS + 1):
            t_ns += 25_000
            add(FrameKind.RESPONSE_DATA, seq, 30_000, chunk)
    for seq in range(1, STREAMS + 1):
        add(FrameKind.RESPONSE_DATA, seq, 30_000, b"0\r\n\r\n")
        add(FrameKind.RESPONSE_END, seq)
        add(FrameKind.CLOSE, seq, 0, CLOSE)
    if rows:
        out.append(pack_batch(len(out) + 1, rows))
    return out, len(events) * STREAMS


def digest(packed: list[bytes], tally: ExchangePipeline) -> int:
    """CPU ns for one wave."""
    hello = Hello(relay="r", pid=1, clock="kernel", anchor_mono_ns=0, anchor_wall_ns=1_760_000_000 * 10**9)
    assembler, reader = Assembler(hello, tally), BatchReader()
    before = time.process_time_ns()
    for data in packed:
        for _, frames in reader.feed(data):
            assembler.digest(assembler.unrecognised(frames))
    return time.process_time_ns() - before


def run_digest(rounds: int, console: Console) -> dict[str, Any]:
    waves = {kind: batches(kind) for kind in KINDS}
    # Every exchange is kept as in production: the newest thousand, with their events.
    tallies = {kind: ExchangePipeline(MeterOptions(), SystemClock()) for kind in KINDS}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        for kind, (packed, n) in waves.items():
            us = digest(packed, tallies[kind]) / 1e3 / n
            if number:  # the first one warms up
                times[kind].append(us)
    table = Table("stream", "CPU us per event", "min to max", "events/s on one core", title="Meter capacity")
    out: dict[str, Any] = {}
    for kind, found in times.items():
        median = statistics.median(found)
        out[kind] = {"us_per_event": median, "rounds": found, "events_per_second": 1e6 / median}
        table.add_row(kind, f"{median:.2f}", f"{min(found):.2f} to {max(found):.2f}", f"{1e6 / median:,.0f}")
    console.print(table)
    return out


async def flood(path: str, seconds: float, loop_events: int) -> dict[str, Any]:
    """Offers as much as this process can for a while, then waits for the meter to catch up."""
    loop = asyncio.get_running_loop()
    clock = SystemClock()
    anchor = WallAnchor.sample(clock)
    hello = Hello(
        relay="flood",
        pid=os.getpid(),
        clock="mono",
        anchor_mono_ns=anchor.mono_ns,
        anchor_wall_ns=anchor.wall_ns,
    )
    tap = Tap(loop, path, 16 << 20, lambda: hello)
    tap.connect()
    events = [b"%x\r\n%b\r\n" % (len(e), e) for e in plain()]
    opening = request("/v1/chat/completions", "flood")
    closing = Closing(outcome="complete")
    end_ns = clock.mono_ns() + round(seconds * 1e9)
    offered = 0
    while (now := clock.mono_ns()) < end_ns:
        live = [seq for seq, ok in (tap.open(now, opening, now, FrameKind.SENT) for _ in range(20)) if ok]
        for seq in live:
            tap.offer(FrameKind.RESPONSE_HEAD, seq, now, 0, HEAD)
        for at, event in enumerate(events):
            for seq in live:
                offered += tap.offer(FrameKind.RESPONSE_DATA, seq, now, 0, event)
            if at % loop_events == 0:
                await asyncio.sleep(0)
        for seq in live:
            tap.offer(FrameKind.RESPONSE_END, seq, clock.mono_ns(), 0)
            tap.close_exchange(seq, clock.mono_ns(), closing)
        await asyncio.sleep(0)
    await tap.drain(60)
    ledger = tap.ledger
    result = {
        "seconds": seconds,
        "events_offered": offered,
        "opened": ledger.opened,
        "measured": ledger.measured,
        "dropped": dict(ledger.dropped),
        "unsettled": ledger.unsettled,
    }
    tap.close()
    return result


class Scraper:
    """Asks for `/metrics` again and again, in a thread, and keeps how long each answer took."""

    def __init__(self, admin: str) -> None:
        self._url = f"http://{admin}/metrics"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.seconds: list[float] = []

    def __enter__(self) -> "Scraper":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            with urllib.request.urlopen(self._url, timeout=60) as answer:
                answer.read()
            self.seconds.append(time.monotonic() - began)


def run_overload(seconds: float, console: Console) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/tap"
        with socket.create_server(("127.0.0.1", 0)) as free:
            admin = f"127.0.0.1:{free.getsockname()[1]}"
        setup = {"options": {"admin": admin}, "socket": path, "log": {"level": "warning"}}
        meter = subprocess.Popen(
            [sys.executable, "-m", "llmtap.meter"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert meter.stdin is not None and meter.stdout is not None
        try:
            meter.stdin.write(json.dumps(setup).encode() + b"\n")
            meter.stdin.flush()
            meter.stdout.readline()
            with Scraper(admin) as scraper:
                result = asyncio.run(flood(path, seconds, 8))
            result["scrape_s"] = scraper.seconds
            with urllib.request.urlopen(f"http://{admin}/api/v1/summary?window=all", timeout=60) as answer:
                summary = json.load(answer)
            ticks = Path(f"/proc/{meter.pid}/stat").read_text().rsplit(")", 1)[1].split()
            result["meter_cpu_s"] = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
        finally:
            meter.stdin.close()
            meter.wait(30)
    result["meter_n"] = summary["n"]
    dropped = sum(result["dropped"].values())
    result["exact"] = (
        result["opened"] == result["measured"] + dropped and result["meter_n"] == result["measured"]
    )
    console.print(
        f"Overload, {seconds:g} s: {result['opened']:,} exchanges began, {result['measured']:,} measured, "
        f"{dropped:,} dropped whole and counted ({result['dropped']}); the meter has {summary['n']:,}; "
        f"{'adds up exactly' if result['exact'] else 'DOES NOT ADD UP'}. /metrics was answered "
        f"{len(scraper.seconds)} times, in {statistics.median(scraper.seconds):.2f} s at the median and "
        f"{max(scraper.seconds):.2f} s at most"
    )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of overload")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console()
    result = {"digest": run_digest(args.rounds, console), "overload": run_overload(args.seconds, console)}
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["overload"]["exact"] else 1


if __name__ == "__main__":
    sys.exit(main())
