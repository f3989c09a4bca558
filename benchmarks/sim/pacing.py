"""How late does `llmtap sim serve` send, against its own schedule?

    .venv/bin/python benchmarks/sim/pacing.py [--streams 500] [--rate 20] [--seconds 20] [--json FILE]

The server runs on one CPU of its own, a reader that only counts bytes on another. Streams start at random in
the first seconds. Lateness of a write is the moment just before `write` minus the moment it was due, as the
server's own truth log (`GET /sim/truth`) has it; the reader checks that every stream was whole. PACING.md has
figures.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import uvloop
from started import cpu_of, wait_ready

RAMP_S = 4.0
HERE = Path(__file__).resolve()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens per second of each stream")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each stream")
    parser.add_argument("--jitter", type=float, default=0.0)
    parser.add_argument(
        "--scheduler",
        default="fixed",
        help="with an engine, which decides how fast tokens come; --rate x --seconds is how many then",
    )
    parser.add_argument("--serving", action="append", default=[], help="of the engine, NAME=VALUE")
    parser.add_argument("--server-cpu", type=int, default=0)
    parser.add_argument("--client-cpu", type=int, default=1)
    parser.add_argument(
        "--fifo",
        action="store_true",
        help="run the server at real-time priority: others on its CPU wait (root)",
    )
    parser.add_argument("--set", action="append", default=[], help="passed to sim serve")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    tokens = round(args.rate * args.seconds)
    command = [
        sys.executable,
        "-P",
        "-m",
        "llmtap.cli",
        "sim",
        "serve",
        "--listen",
        f"127.0.0.1:{port}",
        "--tokens",
        str(tokens),
        *(part for item in args.set for part in ("--set", item)),
    ]
    if args.scheduler == "fixed":
        itl = f"{1e3 / args.rate:.6f}ms"
        command += ["--ttft", "200ms", "--itl", itl, "--set", f"pacing.jitter={args.jitter}"]
    else:
        serving = (part for item in args.serving for part in ("--serving", item))
        command += ["--scheduler", args.scheduler, *serving]

    def settle() -> None:
        os.sched_setaffinity(0, {args.server_cpu})
        if args.fifo:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))

    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=settle)
    try:
        wait_ready(f"http://127.0.0.1:{port}/health", server)
        os.sched_setaffinity(0, {args.client_cpu})
        began = cpu_of(server.pid), time.monotonic()
        whole = uvloop.run(_read_all(port, args.streams))
        cpu_s, wall_s = cpu_of(server.pid) - began[0], time.monotonic() - began[1]
        truths = _truths(port)
    finally:
        server.terminate()
        server.wait(10)
    result = _figures(truths) | {
        "scheduler": args.scheduler,
        "serving": args.serving,
        "streams": args.streams,
        "rate": args.rate,
        "tokens": tokens,
        "whole": whole,
        "fifo": args.fifo,
        "server_cpu_s": round(cpu_s, 2),
        "wall_s": round(wall_s, 2),
        "cpu_us_per_token": round(1e6 * cpu_s / (args.streams * tokens), 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if whole == args.streams else 1


async def _read_all(port: int, streams: int) -> int:
    """How many streams came whole."""
    loop = asyncio.get_running_loop()
    body = json.dumps({"messages": [{"role": "user", "content": "pace"}], "stream": True}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: sim\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    whole = 0

    async def one(delay_s: float) -> None:
        nonlocal whole
        await asyncio.sleep(delay_s)
        sock = socket.socket()
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        await loop.sock_sendall(sock, head + body)
        done = loop.create_future()
        tail = b""

        def readable() -> None:
            nonlocal tail
            data = sock.recv(1 << 16)
            tail = (tail + data)[-64:]
            if not data or tail.endswith(b"\r\n0\r\n\r\n"):
                loop.remove_reader(sock)
                done.set_result(b"[DONE]" in tail)

        loop.add_reader(sock, readable)
        ended = await done
        whole += ended  # not in one expression: its left side would be read before the wait
        sock.close()

    # At random: evenly spaced, many would share a phase, and their tokens would always be due at once.
    chance = random.Random(1)
    await asyncio.gather(*(one(chance.uniform(0, RAMP_S)) for _ in range(streams)))
    return whole


def _truths(port: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    since = 0
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/sim/truth?since={since}") as response:
            page = json.load(response)
        if not page["truths"]:
            return found
        found += page["truths"]
        since = page["next"]


def _figures(truths: list[dict[str, Any]]) -> dict[str, Any]:
    """Percentiles of lateness in us, of all tokens and of those sent while every stream ran."""
    full_from = max(t["accepted_ns"] for t in truths)
    full_to = min(t["ended_ns"] for t in truths)
    every: list[int] = []
    full: list[int] = []
    for t in truths:
        for due, sent in zip(t["due_ns"][0], t["sent_ns"][0], strict=True):
            assert sent >= due, "a token was sent before it was due"
            every.append(sent - due)
            if full_from <= due < full_to:
                full.append(sent - due)
    # With an engine the first may have ended before the last began.
    running = _percentiles(full) if full else None
    return {"late_us": _percentiles(every), "late_us_all_streams_running": running}


def _percentiles(values: list[int]) -> dict[str, float]:
    values.sort()
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
    found = {
        name: round(values[min(len(values) - 1, int(q * len(values)))] / 1e3, 1) for name, q in at.items()
    }
    return {"n": len(values), **found, "max": round(values[-1] / 1e3, 1)}


if __name__ == "__main__":
    sys.exit(main())
