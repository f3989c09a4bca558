#!/usr/bin/env python3
"""From one worker to two: does an event still cost what it cost?

Relays share nothing but the port, so two should carry twice as many events for twice the CPU. On two cores,
which server and client need too, throughput cannot show that; CPU time can. Three set-ups take turns: one
worker on the first CPU, one on the second, two on both. Each worker has the same load, and server and client
have the same work: beside a single worker, as many streams pass no proxy. So two are to cost what the two
single ones cost together. Also: how evenly the kernel spreads connections over two listening
sockets, what one meter takes beside them, and what a live stream weighs.

    .venv/bin/python benchmarks/scaling/scaling.py [--rounds 7] [--seconds 10] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent / "relay"))

import instrument  # noqa: E402 (of benchmarks/relay)
from figures import Run, Worker, report  # noqa: E402
from running import NotReady, Running, descendants, role_of, running  # noqa: E402
from targets import Target, find_llmtap, llmtap  # noqa: E402

RESULTS = HERE / "results"
ITL_MS, TOKENS = 20, 250  # as in benchmarks/relay: 50 events/s a stream
LIVE_ITL_MS, LIVE_TOKENS = 200, 1_000
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))
STATUS_S = 1.5
"""A relay speaks of itself twice a second."""


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="of all three set-ups (default 7)")
    parser.add_argument("--seconds", type=float, default=10, help="measured per run (default 10)")
    parser.add_argument("--streams", type=int, default=100, help="for each worker (default 100)")
    parser.add_argument("--cpus", default="0,1", help="of the two workers (default 0,1)")
    parser.add_argument(
        "--alone", action="store_true", help="nothing beside a single worker: server and client do half then"
    )
    parser.add_argument("--live", type=int, default=1_000, help="streams whose memory is read (0: none)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result there, too")
    parser.add_argument("--no-real-time", action="store_true", help="server and client at ordinary priority")
    return parser.parse_args()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def placed(upstream: int, cpus: list[int]) -> Iterator[tuple[Running, dict[int, int]]]:
    """A proxy with a worker on each of these CPUs, and which pid has which. Its meter may run anywhere."""
    target = Target(f"llmtap, {len(cpus)} workers", llmtap("--workers", str(len(cpus))), find_llmtap)
    with running(target, upstream) as there:
        assert there.pid is not None
        of_relay: dict[int, int] = {}
        left = list(cpus)
        for pid in [there.pid, *descendants(there.pid)]:
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            relay = role_of(command) == "relay"
            allowed = {left.pop(0)} if relay else set(range(os.cpu_count() or 1))
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), allowed)
            if relay:
                (of_relay[pid],) = allowed
        if left:
            raise NotReady(f"{len(cpus) - len(left)} of {len(cpus)} relays are there")
        yield there, of_relay


def relays(admin: str) -> dict[int, dict[str, Any]]:
    """What relays said last of themselves, by pid."""
    with LOCAL.open(f"{admin}/api/v1/summary?window=10s", timeout=10) as answer:
        told = json.load(answer)["relays"].values()
    return {one["pid"]: one for one in told if one["connected"] and "opened" in one}


def one_run(upstream: int, cpus: list[int], arguments: argparse.Namespace, seed: int, real_time: bool) -> Run:
    streams = arguments.streams * len(cpus)
    beside = 0 if arguments.alone else 2 * arguments.streams - streams

    def load(target: list[str], streams: int) -> dict[str, Any]:
        return instrument.load(
            [
                *target,
                "--concurrency",
                str(streams),
                "--itl-ms",
                str(ITL_MS),
                "--tokens",
                str(TOKENS),
                "--warmup-s",
                "1.5",
                "--drain-s",
                "0.2",
                "--seed",
                str(seed),
                "--duration-s",
                str(arguments.seconds),
            ],
            real_time=real_time,
            within_s=arguments.seconds + 120,
        )

    with placed(upstream, cpus) as (there, of_relay), ThreadPoolExecutor(1) as pool:
        time.sleep(STATUS_S)
        before = relays(there.admin)
        direct = pool.submit(load, ["--url", f"http://127.0.0.1:{upstream}"], beside) if beside else None
        result = load(there.arguments(), streams)
        if direct is not None and not direct.result()["integrity"]["ok"]:
            raise instrument.LoadFailed("a stream that passed no proxy was damaged")
        time.sleep(STATUS_S)
        after = relays(there.admin)
        unmeasured = sum(sum(one["dropped"].values()) for one in after.values())
    spent = {one["pid"]: one["cpu_s"] for one in result["target"]["processes"]}
    roles = {one["pid"]: role_of(one["command"]) for one in result["target"]["processes"]}
    # The relays' shares of the events are those of the bytes that they carried from start to end.
    carried = {pid: after[pid]["bytes_down"] - before[pid]["bytes_down"] for pid in of_relay}
    workers = [
        Worker(
            cpu,
            spent.get(pid, 0.0),
            result["events"] * carried[pid] / max(1, sum(carried.values())),
            after[pid]["accepted"] - before[pid]["accepted"],
        )
        for pid, cpu in of_relay.items()
    ]
    return Run(
        workers=workers,
        meter_cpu_s=sum(s for pid, s in spent.items() if roles[pid] == "meter"),
        events=result["events"],
        wanted=streams * 1000 / ITL_MS * result["window_s"],
        window_s=result["window_s"],
        p50_us=result["latency_us"]["p50"],
        p99_us=result["latency_us"]["p99"],
        waited_s=result["target"]["cpu_wait_s"],
        unmeasured=unmeasured,
        whole=result["integrity"]["ok"],
    )


def rss_kib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024


def live_memory(upstream: int, arguments: argparse.Namespace, real_time: bool) -> dict[str, float]:
    """What a stream under way weighs, KiB by role, when it has about so many events behind it."""
    streams = arguments.live
    with placed(upstream, [0]) as (there, _):
        warm = ["--concurrency", "16", "--tokens", "20", "--itl-ms", "1", "--warmup-s", "0", "--drain-s", "1"]
        instrument.load([*there.arguments(), *warm, "--duration-s", "0.5"], real_time=real_time, within_s=60)
        time.sleep(0.5)
        assert there.pid is not None
        before = {pid: rss_kib(pid) for pid in [there.pid, *descendants(there.pid)]}
        result = instrument.load(
            [
                *there.arguments(),
                "--concurrency",
                str(streams),
                "--itl-ms",
                str(LIVE_ITL_MS),
                "--tokens",
                str(LIVE_TOKENS),
                "--warmup-s",
                "2",
                "--drain-s",
                "0.1",
                "--in-step",
                "--duration-s",
                str(arguments.seconds),
            ],
            real_time=real_time,
            within_s=arguments.seconds + 120,
        )
    # Answers are longer than the run: until its end each stream only grows.
    found = {"events": (2 + arguments.seconds) * 1000 / LIVE_ITL_MS, "streams": float(streams)}
    for one in result["target"]["processes"]:
        if one["pid"] in before:
            key = f"{role_of(one['command'])}_kib"
            grown = max(one["rss_kb_max"], one["rss_kb"]) - before[one["pid"]]
            found[key] = found.get(key, 0.0) + grown / streams
    return found


def main() -> int:
    arguments = read_arguments()
    if reason := find_llmtap():
        raise SystemExit(reason)
    first, second = (int(cpu) for cpu in arguments.cpus.split(","))
    setups = {"one, first CPU": [first], "one, second CPU": [second], "two": [first, second]}
    instrument.compile_all()
    real_time = not arguments.no_real_time and instrument.real_time_allowed()
    about = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{os.cpu_count()} CPUs, Linux {platform.release()}",
        "python": platform.python_version(),
        "load average before": ", ".join(f"{load:.1f}" for load in os.getloadavg()),
        "instrument": "real-time priority" if real_time else "ordinary priority",
        "streams per worker": arguments.streams,
        "streams past a single worker": 0 if arguments.alone else arguments.streams,
        "events per second of a stream": 1000 / ITL_MS,
        "seconds": arguments.seconds,
        "seed": arguments.seed,
    }
    dice = random.Random(arguments.seed)
    rounds: list[dict[str, Run]] = []
    live = None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with instrument.spinner() if real_time else nullcontext(), instrument.server(real_time) as upstream:
        for number in range(arguments.rounds):
            found: dict[str, Run] = {}
            for name in dice.sample(list(setups), len(setups)):
                seed = arguments.seed * 1000 + number
                found[name] = one = one_run(upstream, setups[name], arguments, seed, real_time)
                cost = ", ".join(f"CPU {w.cpu}: {w.us_per_event:.1f} us/event" for w in one.workers)
                say(f"round {number + 1}, {name}: {cost}; kept {one.kept:.0%} of the pace")
            rounds.append(found)
        if arguments.live:
            live = live_memory(upstream, arguments, real_time)
    result = report(rounds, live, about, Console(width=130))
    text = json.dumps(result, indent=1) + "\n"
    RESULTS.mkdir(exist_ok=True)
    for place in [
        RESULTS / f"{datetime.now(UTC):%Y%m%d-%H%M%S}.json",
        *([arguments.json] if arguments.json else []),
    ]:
        place.write_text(text)
        say(str(place))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
