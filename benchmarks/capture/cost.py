"""What a capture costs: CPU of the meter, and bytes on disk beside other ways to keep the same traffic.

The traffic is made up, seeded, and looks like that of a chat service: prompts with the lengths of Azure's
conversation trace (mean 1,250 tokens, about 5 KB), a shared system prompt for a third of them, conversations
of several turns, streams of 205 tokens with an ITL of 20 ms and log-normal jitter.

`size`: the frames of all exchanges go through a meter with a capture, at each privacy level, and the files
are weighed: bytes per event are those of the Parquet columns of the event lists, bytes per exchange those of
all others, footer included. Beside it the same traffic in the format of GoReplay (its documented text form,
written by this script), and as raw bytes.
`cpu`: the same frames with and without a capture, interleaved; CPU time of the whole process, all threads.

    .venv/bin/python benchmarks/capture/cost.py [--exchanges 2000] [--rounds 5] [--json FILE]

The relay's share is measured by the relay's own benchmark, which has a target with a capture:

    python3 benchmarks/relay/run.py --only llmtap,llmtap-capture --scenario paced
"""

import argparse
import gzip
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

import llmtap
from llmtap.capture.options import CaptureOptions
from llmtap.capture.schema import CaptureInfo
from llmtap.channel.frames import BatchReader, FrameKind, Hello, pack_batch
from llmtap.clock import SystemClock
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.meter.pipeline.recorder import Recorder
from llmtap.units import Bytes, Duration

TOKENS: Final = 205
"""Mean output of Azure's conversation trace, rows 1 to 12,000."""
PROMPT_BYTES: Final = 5_000
S: Final = 1_000_000_000
MS: Final = 1_000_000
EVENT_COLUMNS: Final = ("event_us", "event_class", "event_bytes", "event_tokens", "event_flags")
SEPARATOR: Final = "\n🐵🙈🙉\n".encode()
"""Between the messages of a GoReplay file."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange on the wire."""

    arrival_ns: int
    request: bytes
    head: bytes
    chunks: list[tuple[int, bytes]]
    """`(ns of the read, bytes)`"""


def traffic(n: int, seed: int) -> list[Exchange]:
    rng = random.Random(seed)
    words = [
        "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=max(1, int(rng.gauss(5, 2)))))
        for _ in range(5_000)
    ]

    def text(size: int) -> str:
        return " ".join(rng.choices(words, k=max(1, size // 6)))

    system = text(1_500)
    talks: list[list[dict[str, str]]] = []
    out = []
    t_ns = 0
    for _ in range(n):
        t_ns += round(rng.expovariate(5.84) * S)  # Azure: 5.84 requests a second
        if talks and rng.random() < 0.5:
            talk = talks[rng.randrange(len(talks))]
        else:
            talk = [{"role": "system", "content": system}] if rng.random() < 0.33 else []
            talks = [*talks[-50:], talk]
        talk.append({"role": "user", "content": text(round(rng.lognormvariate(7.5, 1)))})
        tokens = max(2, round(rng.gauss(TOKENS, 60)))
        answer = [rng.choice(words) for _ in range(tokens)]
        out.append(exchange(t_ns, list(talk), answer, rng))
        talk.append({"role": "assistant", "content": " ".join(answer)})
        while sum(len(m["content"]) for m in talk) > 4 * PROMPT_BYTES:
            talk.pop(0)
    return out


def exchange(t_ns: int, messages: list[dict[str, str]], answer: list[str], rng: random.Random) -> Exchange:
    body = json.dumps(
        {"model": "acme-8b", "stream": True, "max_tokens": 1_024, "messages": messages}
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer sk-not-a-real-key\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    name = f"chatcmpl-{rng.getrandbits(64):016x}"
    read_ns = t_ns + round(rng.lognormvariate(5.3, 0.4) * MS)
    chunks = []
    for i, word in enumerate(answer):
        value = {
            "id": name,
            "object": "chat.completion.chunk",
            "created": 1_760_000_000,
            "model": "acme-8b",
            "choices": [{"index": 0, "delta": {"content": f" {word}"}, "finish_reason": None}],
        }
        if i == len(answer) - 1:
            value["choices"] = [{"index": 0, "delta": {}, "finish_reason": "stop"}]
            value["usage"] = {
                "prompt_tokens": len(body) // 4,
                "completion_tokens": len(answer),
                "total_tokens": 0,
            }
        event = b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
        chunks.append((read_ns, b"%x\r\n%b\r\n" % (len(event), event)))
        read_ns += round(rng.lognormvariate(0, 0.08) * 20 * MS)
    done = b"data: [DONE]\n\n"
    chunks.append((read_ns, b"%x\r\n%b\r\n0\r\n\r\n" % (len(done), done)))
    answer_head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return Exchange(t_ns, head.encode() + body, answer_head, chunks)


def frames(exchanges: list[Exchange]) -> list[bytes]:
    """As one relay would pack them, in order of time."""
    close = json.dumps({"outcome": "complete", "lag_ns": 100_000}).encode()
    rows: list[tuple[int, int, int, int, int, bytes]] = []
    for seq, x in enumerate(exchanges, 1):
        rows.append((x.arrival_ns, FrameKind.SENT, seq, x.arrival_ns, x.arrival_ns + 50_000, x.request))
        first = x.chunks[0][0]
        rows.append((first - 1, FrameKind.RESPONSE_HEAD, seq, first, 30_000, x.head))
        for t_ns, data in x.chunks:
            rows.append((t_ns, FrameKind.RESPONSE_DATA, seq, t_ns, 30_000, data))
        rows.append((t_ns + 1, FrameKind.RESPONSE_END, seq, t_ns, 0, b""))
        rows.append((t_ns + 2, FrameKind.CLOSE, seq, t_ns + 60_000, 0, close))
    rows.sort(key=lambda row: row[0])
    return [
        pack_batch(number, [item for row in rows[at : at + 400] for item in row[1:]])
        for number, at in enumerate(range(0, len(rows), 400), 1)
    ]


def play(packed: list[bytes], recorder: Recorder | None) -> float:
    """CPU seconds of all threads."""
    tally = ExchangePipeline(MeterOptions(), SystemClock())
    if recorder is not None:
        recorder.start()
        tally.attach_recorder(recorder)
    hello = Hello(relay="r", pid=1, clock="kernel", anchor_mono_ns=0, anchor_wall_ns=1_760_000_000 * S)
    assembler, reader = Assembler(hello, tally), BatchReader()
    before = time.process_time()
    for data in packed:
        for _, batch in reader.feed(data):
            assembler.digest(assembler.unrecognised(batch))
        if recorder is not None:
            # As fast as it goes is faster than any traffic: let the thread have its turns.
            while recorder.state().waiting > 2_000:
                time.sleep(0.01)
    if recorder is not None:
        recorder.close(60)
    return time.process_time() - before


def recording(folder: Path, level: str) -> Recorder:
    full = ("*",) if level == "full" else ()
    options = CaptureOptions(
        to=str(folder),
        level=level,
        full_tenants=full,
        rotate_every=Duration(3_600 * S),  # type: ignore[arg-type]
        memory_bytes=Bytes(1 << 30),
    )
    info = CaptureInfo(
        capture="bench", tap_version=llmtap.__version__, level=level, block_unit="bytes", block_size=2_048
    )
    return Recorder(options, SystemClock(), info, salt=bytes(32))


def weigh(folder: Path) -> dict[str, float]:
    """Compressed bytes by the files' own footers."""
    events = rows = n_events = total = 0
    for file in sorted(folder.glob("*.parquet")):
        total += file.stat().st_size
        meta = pq.read_metadata(file)
        rows += meta.num_rows
        for group in range(meta.num_row_groups):
            for column in range(meta.num_columns):
                found = meta.row_group(group).column(column)
                if found.path_in_schema.split(".")[0] in EVENT_COLUMNS:
                    events += found.total_compressed_size
        n_events += sum(map(len, pq.read_table(file, columns=["event_us"])["event_us"].to_pylist()))
    return {
        "bytes": total,
        "rows": rows,
        "events": n_events,
        "bytes_per_event": events / n_events,
        "bytes_per_exchange": (total - events) / rows,
    }


def goreplay(exchanges: list[Exchange]) -> bytes:
    """Requests and responses as `gor --output-file --output-http-track-response` lays them out: a line of
    kind, id, time and latency, the message, a separator. Read from its documentation; not made by it."""
    out = bytearray()
    for number, x in enumerate(exchanges, 1):
        out += b"1 %024x %d 0\n" % (number, x.arrival_ns) + x.request + SEPARATOR
        answer = x.head + b"".join(data for _, data in x.chunks)
        out += b"2 %024x %d %d\n" % (number, x.arrival_ns, x.chunks[0][0] - x.arrival_ns) + answer + SEPARATOR
    return bytes(out)


def run_size(exchanges: list[Exchange], packed: list[bytes], console: Console) -> dict[str, Any]:
    out: dict[str, Any] = {}
    table = Table("kept as", "bytes per event", "bytes per exchange beside", "MB", "of raw", title="Size")
    raw = sum(len(x.request) + len(x.head) + sum(len(d) for _, d in x.chunks) for x in exchanges)

    def row(name: str, n_bytes: float, per_event: str = "", per_exchange: str = "") -> None:
        table.add_row(name, per_event, per_exchange, f"{n_bytes / 1e6:.2f}", f"{n_bytes / raw:.1%}")

    row("raw bytes on the wire", raw)
    with tempfile.TemporaryDirectory() as name:
        for level in ("none", "shape", "full"):
            folder = Path(name) / level
            play(packed, recording(folder, level))
            found = out[level] = weigh(folder)
            row(
                f"capture, {level}",
                found["bytes"],
                f"{found['bytes_per_event']:.2f}",
                f"{found['bytes_per_exchange']:.0f}",
            )
        data = goreplay(exchanges)
        zipped = len(gzip.compress(data, 6))
        out["GoReplay"] = {"bytes": len(data), "gzip": zipped}
        row("GoReplay", len(data))
        row("GoReplay, gzip", zipped)
    console.print(table)
    return {"raw": raw, **out}


def run_cpu(exchanges: list[Exchange], packed: list[bytes], rounds: int, console: Console) -> dict[str, Any]:
    n = len(exchanges)
    found: dict[str, list[float]] = {"off": [], "none": [], "shape": [], "full": []}
    with tempfile.TemporaryDirectory() as name:
        for number in range(rounds + 1):
            for level in random.Random(number).sample(list(found), len(found)):
                folder = Path(name) / f"{level}-{number}"
                cpu_s = play(packed, None if level == "off" else recording(folder, level))
                if number:  # the first one warms up
                    found[level].append(cpu_s / n * 1e6)
    table = Table("capture", "CPU us per exchange", "min to max", "more than off", title="The meter's CPU")
    off = statistics.median(found["off"])
    for level, us in found.items():
        median = statistics.median(us)
        table.add_row(level, f"{median:.0f}", f"{min(us):.0f} to {max(us):.0f}", f"{median / off - 1:+.1%}")
    console.print(table)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--exchanges", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console()
    exchanges = traffic(args.exchanges, args.seed)
    packed = frames(exchanges)
    result = {
        "size": run_size(exchanges, packed, console),
        "cpu": run_cpu(exchanges, packed, args.rounds, console),
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    shape = result["size"]["shape"]
    return 0 if shape["bytes_per_event"] <= 3 and shape["bytes_per_exchange"] <= 400 else 1


if __name__ == "__main__":
    sys.exit(main())
