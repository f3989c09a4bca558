"""What the middleware costs an app, beside no tap at all and beside a proxy in front of it.

Three set-ups take turns in shuffled order, freshly started each time: the app alone, the app with the
middleware and a meter, the app behind `llmtap proxy`. Streams run at a fixed pace; each event carries the
moment it was made, and the client, on another CPU, takes the moment it has it: one host, one clock. CPU is
the scheduler's own account (`/proc/PID/task/*/schedstat`) of each process, over the streams.

    .venv/bin/python benchmarks/middleware/cost.py [--streams 50] [--rate 40] [--rounds 5] [--json FILE]
"""

import argparse
import asyncio
import json
import os
import platform
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
HOUSE = HERE.parents[1]
SERVERS_CPU, CLIENT_CPU = 0, 1
READY_S = 60.0
STAMP = re.compile(rb"~(\d+)~")
SETUPS = ("alone", "middleware", "proxy")

Figures = dict[str, float]


def port_free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def started(*argv: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process on the servers' CPU, and its children with it."""
    process = subprocess.Popen(
        ["taskset", "-c", str(SERVERS_CPU), sys.executable, "-P", "-m", *argv],
        env={**os.environ, "PYTHONPATH": str(HOUSE), **environ},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(url: str) -> None:
    end = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (OSError, urllib.error.URLError):
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def cpu_ns(pid: int) -> int:
    total = 0
    for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        total += int(stat.read_text().split()[0])
    return total


def children_of(pid: int) -> dict[str, int]:
    """The relay and the meter of a proxy, by name."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        for name in ("relay", "meter"):
            if f".{name}".encode() in command:
                found[name] = int(child)
    return found


# ---------------------------------------------------------------- the client


async def one_stream(port: int, events: int, gap_us: int, delay_s: float, late_ns: list[int]) -> None:
    """Reads one stream to its end; raises ValueError for one that is not whole."""
    await asyncio.sleep(delay_s)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    target = f"/v1/chat/completions?events={events}&gap_us={gap_us}"
    body = b'{"model":"m","stream":true}'
    head = (
        f"POST {target} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    seen, tail, got = 0, b"", b""
    while data := await reader.read(1 << 16):
        now_ns = time.monotonic_ns()
        got = tail + data
        last = 0
        for m in STAMP.finditer(got):
            late_ns.append(now_ns - int(m[1]))
            seen, last = seen + 1, m.end()
        tail = got[last:]
    writer.close()
    if seen != events or not got.endswith(b"0\r\n\r\n"):
        raise ValueError(f"{seen} of {events} events")


async def load(port: int, options: argparse.Namespace) -> list[int]:
    """The one-way times of all events, in ns."""
    late_ns: list[int] = []
    gap_us = round(1e6 / options.rate)
    events = round(options.rate * options.seconds)
    spread_s = gap_us / 1e6  # streams begin evenly over one gap, as no crowd would by chance
    await asyncio.gather(
        *(
            one_stream(port, events, gap_us, i * spread_s / options.streams, late_ns)
            for i in range(options.streams)
        )
    )
    return late_ns


# ---------------------------------------------------------------- one turn of one set-up


def measure(setup: str, options: argparse.Namespace) -> Figures:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tap-"))
        path, port, admin, listen = f"{folder}/tap.sock", port_free(), port_free(), port_free()
        quiet = ("--set", "log.level=warning")
        uvicorn = ("uvicorn", "--app-dir", str(HERE), "app:app", "--port", str(port))
        uvicorn += ("--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "warning")
        pids = {}
        if setup == "middleware":
            meter = ("llmtap.cli", "meter", "--listen-socket", path, "--admin", f"127.0.0.1:{admin}", *quiet)
            pids["meter"] = stack.enter_context(started(*meter)).pid
            wait_for(f"http://127.0.0.1:{admin}/healthz")
            environ = {"LLMTAP_BENCH_SOCKET": path}
        else:
            environ = {}
        pids["app"] = stack.enter_context(started(*uvicorn, **environ)).pid
        wait_for(f"http://127.0.0.1:{port}/")
        target = port
        if setup == "proxy":
            proxy = ("llmtap.cli", "proxy", "--upstream", f"http://127.0.0.1:{port}", *quiet)
            proxy += ("--listen", f"127.0.0.1:{listen}", "--admin", f"127.0.0.1:{admin}")
            supervisor = stack.enter_context(started(*proxy)).pid
            wait_for(f"http://127.0.0.1:{admin}/readyz")
            pids |= children_of(supervisor)
            target = listen
        elif setup == "middleware":
            wait_for(f"http://127.0.0.1:{admin}/readyz")
        asyncio.run(load(target, argparse.Namespace(streams=5, rate=50, seconds=0.5)))  # warm
        before = {name: cpu_ns(pid) for name, pid in pids.items()}
        late_ns = asyncio.run(load(target, options))
        time.sleep(0.2)  # the meter's last batch
        used = {name: cpu_ns(pid) - before[name] for name, pid in pids.items()}
        figures: Figures = {f"{name}_us": ns / 1e3 / len(late_ns) for name, ns in used.items()}
        if setup != "alone":
            figures["measured"] = told(admin)
    late_ns.sort()
    figures["path_us"] = figures["app_us"] + figures.get("relay_us", 0.0)
    for name, q in (("p50_us", 0.5), ("p99_us", 0.99)):
        figures[name] = late_ns[round(q * (len(late_ns) - 1))] / 1e3
    return figures


def told(admin: int) -> float:
    """Streams that the meter shows; what is missing would be a cost of another kind."""
    url = f"http://127.0.0.1:{admin}/api/v1/exchanges?limit=1000&method=POST"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return float(len(json.load(answer)["exchanges"]))


def table(rounds: dict[str, list[Figures]]) -> str:
    """Medians over the rounds, with the range."""
    names = ("path_us", "app_us", "relay_us", "meter_us", "p50_us", "p99_us")
    lines = ["| set-up | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for setup, figures in rounds.items():
        cells = []
        for name in names:
            values = [f[name] for f in figures if name in f]
            shown = (
                f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})" if values else "-"
            )
            cells.append(shown)
        lines.append(f"| {setup} | " + " | ".join(cells) + " |")
    base = [f["path_us"] for f in rounds["alone"]]
    for setup in ("middleware", "proxy"):
        ratios = [f["path_us"] / b for f, b in zip(rounds[setup], base, strict=True)]
        added = [f["p50_us"] - b["p50_us"] for f, b in zip(rounds[setup], rounds["alone"], strict=True)]
        lines.append(
            f"\n{setup}: CPU in the path {statistics.median(ratios):.2f} x alone "
            f"({min(ratios):.2f}-{max(ratios):.2f}); p50 {statistics.median(added):+.0f} us, round by round"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--rate", type=float, default=40.0, help="events per second of each stream")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=7, help="of the order within the rounds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.sched_setaffinity(0, {CLIENT_CPU})
    order = random.Random(options.seed)
    rounds: dict[str, list[Figures]] = {setup: [] for setup in SETUPS}
    for number in range(options.rounds):
        for setup in order.sample(SETUPS, len(SETUPS)):
            figures = measure(setup, options)
            rounds[setup].append(figures)
            print(f"round {number + 1} {setup}: {figures}", file=sys.stderr, flush=True)
    load_avg = " ".join(f"{x:.1f}" for x in os.getloadavg())
    about: dict[str, Any] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "load": load_avg,
        **vars(options),
    }
    print(
        f"{options.streams} streams of {options.rate:g} events/s; load average {load_avg}\n\n{table(rounds)}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps({"about": about, "rounds": rounds}, indent=1, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
