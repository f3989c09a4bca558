#!/usr/bin/env python3
"""A day of traffic in a quarter of an hour: does memory stay flat, do files stay flat, do the counts agree?

The whole proxy (supervisor, relay, meter with capture, tenants, classes, an experiment) stands before an
emulated gateway; an arm of the experiment goes to `llmtap sim serve`, which refuses, resets and stalls.
Meters are killed, configurations reloaded, files rotated, /metrics is scraped each second. Exits 1 when
memory or open files grew more than stated, or when clients, counters and capture differ.

    .venv/bin/python benchmarks/soak/soak.py [--minutes 15] [--html FILE] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import uvloop
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent / "relay"))

import instrument  # noqa: E402 (of benchmarks/relay)
from accounts import Accounts, settle  # noqa: E402
from day import Client, Day  # noqa: E402
from shown import show, write_page  # noqa: E402
from verdict import Bounds, judged  # noqa: E402
from watching import LOCAL, Watch, processes, scraped  # noqa: E402

RESULTS = HERE / "results"
LLMTAP = HERE.parents[1] / ".venv/bin/llmtap"
HANG_UPS = (0.04, 0.20, 0.36)
KILLS = (0.12, 0.28)
"""When, in parts of the run. All in the first part: what is judged are processes that were left alone."""
KILLED = "meter killed"
WARM = 0.4
"""From here on memory and files are judged."""
ROTATE_DAY_S, ROTATE_S_MIN = 300, 1
"""The default of capture.rotate_every, which is compressed as the day is."""
FLUSH_S, MOMENT_S = 0.5, 0.5
"""What a killed meter may lose: capture.flush, and a moment."""
AWAY_S = 15.0
"""Around a kill: the longest answer before it, and a meter's start behind it."""
READY_S, CALM_S, SETTLE_S, REST_S = 60.0, 60.0, 60.0, 6.0
"""Rest: longer than an idle upstream connection is kept (relay.upstream_keepalive, 4 s)."""
WARM_DAY = (20, 1, 1 / 20, 8, 0, "warm")
"""Some answers beforehand: rate, compression, minutes, tokens, seed, name."""
EXPECTED = ("complete", "cancelled", "cut", "429", "502", "503")
"""Ends of requests: what the shaky arm answers and cuts; the relay's 502 where it resets before a head."""
OVERFLOW_SHARE_MAX = 0.01
METRICS = (
    "llmtap_exchanges_total",
    "llmtap_output_tokens_total",
    "llmtap_capture_exchanges_total",
    "llmtap_capture_waiting_exchanges",
    "llmtap_capture_dropped_exchanges_total",
    "llmtap_tap_dropped_exchanges_total",
    "llmtap_label_overflow_total",
    "llmtap_capture_files_total",
    "llmtap_meter_errors_total",
)

CONFIG = """[meter]
series_max = 80

[tenants]
max = 32

[slo.gold]
objectives = "ttft:100ms tpot:20ms"
target = 0.95
tenants = ["tenant-1*"]

[slo.default]
objectives = "ttft:500ms e2e:10s"
target = 0.9
burn = {{ "1h" = 8.0, "6h" = 4.0 }}

[capture]
to = "{folder}/capture"
rotate_every = "{rotate_s:g}s"

[experiment]
enabled = true
name = "soak"
unit = "request"
key = "soak"

[[experiment.arms]]
name = "control"
weight = 19

[[experiment.arms]]
name = "shaky"
weight = 1
upstream = "http://127.0.0.1:{shaky}"
"""
FAULTS = {"unavailable_rate": 0.2, "busy_rate": 0.1, "reset_rate": 0.05, "stall_rate": 0.02}


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=15, help="of the run (default 15: all 24 hours)")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second, on that day's average")
    parser.add_argument("--compression", type=float, default=96, help="so many times as fast (default 96)")
    parser.add_argument("--tokens", type=float, default=32, help="of an answer, on average (default 32)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--html", type=Path, metavar="FILE", help="memory and files over time, as a page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result there, too")
    bounds = parser.add_argument_group("bounds of what may grow after the warm-up, last third less first")
    bounds.add_argument("--supervisor-mib", type=float, default=1.0)
    bounds.add_argument("--relay-mib", type=float, default=2.0)
    bounds.add_argument("--meter-mib", type=float, default=12.0, help="its windows fill for an hour; README")
    bounds.add_argument("--files", type=int, default=2, help="open files of a process, at rest")
    return parser.parse_args()


def wait_for(url: str, limit_s: float = READY_S) -> None:
    give_up = time.monotonic() + limit_s
    while True:
        try:
            with LOCAL.open(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (OSError, urllib.error.URLError):
            pass
        if time.monotonic() > give_up:
            raise SystemExit(f"{url} does not answer after {limit_s:.0f} s")
        time.sleep(0.1)


@contextmanager
def started(argv: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own; ended in order, and what is left of the group is killed."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("LLMTAP_", "OTEL_"))}
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ, process_group=0
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def hang_up(watch: Watch) -> None:
    os.kill(watch.supervisor, signal.SIGHUP)
    watch.did("SIGHUP")


def kill_meter(watch: Watch, kills_ns: list[int]) -> None:
    for pid, role in processes(watch.supervisor).items():
        if role == "meter":
            os.kill(pid, signal.SIGKILL)
            kills_ns.append(time.time_ns())
    watch.did(KILLED)


async def act(watch: Watch, seconds: float, kills_ns: list[int]) -> None:
    plan = [(part, "SIGHUP") for part in HANG_UPS] + [(part, "kill") for part in KILLS]
    for part, what in sorted(plan):
        await asyncio.sleep(max(0.0, part * seconds - watch.now_s()))
        await asyncio.to_thread(wait_calm, watch)
        if what == "kill":
            kill_meter(watch, kills_ns)
        else:
            hang_up(watch)


def wait_calm(watch: Watch) -> None:
    """Until the last act is over: one relay is left, a meter hears it, and has heard the others out.

    A relay that leaves while there is no meter takes its last words along, and nobody can count by them.
    """
    give_up = time.monotonic() + CALM_S
    while time.monotonic() < give_up:
        relays = [role for role in processes(watch.supervisor).values() if role == "relay"]
        try:
            told = summary(watch.admin)["relays"].values()
        except OSError:
            told = []
        if len(relays) == 1 == sum(one["connected"] and "opened" in one for one in told):
            return
        time.sleep(0.2)


async def tell(watch: Watch, client: Client, seconds: float) -> None:
    """A line every half a minute, for who waits."""
    while True:
        await asyncio.sleep(30)
        latest = {one.role: one.rss / 1024 for one in watch.looks[-8:]}
        memory = ", ".join(f"{role} {mib:.1f}" for role, mib in sorted(latest.items()))
        done = sum(client.outcomes.values())
        say(f"{watch.now_s():5.0f} of {seconds:.0f} s: {done:,} answers; MiB: {memory}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def summary(admin: int) -> dict:
    with LOCAL.open(f"http://127.0.0.1:{admin}/api/v1/summary?window=10s", timeout=20) as answer:
        return json.load(answer)


def settled(admin: int) -> bytes:
    """The text of /metrics once nothing is under way, waits or is unsettled. Raises SystemExit."""
    give_up = time.monotonic() + SETTLE_S
    while time.monotonic() < give_up:
        told = summary(admin)
        relays = told["relays"].values()
        busy = any(r.get("unsettled") or r.get("streams") for r in relays if r["connected"])
        if not busy and not told["capture"]["waiting"]:
            time.sleep(2.0)  # a relay speaks twice a second: its last words are in, too
            return scraped(admin, 60)
        time.sleep(0.2)
    raise SystemExit(f"exchanges are still under way {SETTLE_S:.0f} s after the last answer")


def lost_max(watch: Watch, rate_rps: float) -> int:
    """What killed meters may have lost: what waited in memory when last scraped, and what came since."""
    most = 0.0
    for killed_s in (act.t_s for act in watch.acts if act.what == KILLED):
        last = max(
            (one for one in watch.scrapes if one.t_s < killed_s), key=lambda one: one.t_s, default=None
        )
        since_s = killed_s - (0.0 if last is None else last.t_s)
        waiting = 0.0 if last is None else last.sums["llmtap_capture_waiting_exchanges"]
        most += waiting + rate_rps * (since_s + FLUSH_S + MOMENT_S)
    return round(most)


async def play(day: Day, watch: Watch, port: int, kills_ns: list[int]) -> Client:
    """The day itself; its clients are gone when it returns."""
    client = Client(port, day)
    beside = [asyncio.create_task(act(watch, day.seconds, kills_ns))]
    beside.append(asyncio.create_task(tell(watch, client, day.seconds)))
    try:
        await client.run()
        await beside[0]
    finally:
        for task in beside:
            task.cancel()
        client.close()
    return client


def warm_up(port: int) -> None:
    """A few answers, so that the files of a proxy that works are open before they are counted."""
    few = Day(*WARM_DAY)

    async def work() -> None:
        client = Client(port, few)
        await client.run()
        client.close()

    uvloop.run(work())


def run(arguments: argparse.Namespace, day: Day, folder: Path) -> dict:
    listen, admin, shaky = (instrument.free_port() for _ in range(3))
    rotate_s = max(ROTATE_S_MIN, ROTATE_DAY_S / arguments.compression)
    config = folder / "soak.toml"
    config.write_text(CONFIG.format(folder=folder, rotate_s=rotate_s, shaky=shaky))
    sim = [str(LLMTAP), "sim", "serve", "--listen", f"127.0.0.1:{shaky}"]
    for key, rate in FAULTS.items():
        sim += ["--set", f"faults.{key}={rate}"]
    kills_ns: list[int] = []
    with (
        instrument.server(real_time=False) as upstream,
        started(sim, folder / "sim.log"),
        started(
            [
                str(LLMTAP),
                "proxy",
                "--upstream",
                f"http://127.0.0.1:{upstream}",
                "--config",
                str(config),
                "--listen",
                f"127.0.0.1:{listen}",
                "--admin",
                f"127.0.0.1:{admin}",
                "--set",
                "log.level=warning",
            ],
            folder / "proxy.log",
        ) as proxy,
    ):
        wait_for(f"http://127.0.0.1:{shaky}/health")
        wait_for(f"http://127.0.0.1:{admin}/readyz")
        warm = Day(*WARM_DAY).requests
        warm_up(listen)
        time.sleep(REST_S)
        with Watch(proxy.pid, admin, METRICS) as watch:
            files_before = watch.files_at_rest()
            client = uvloop.run(play(day, watch, listen, kills_ns))
            load_s = watch.now_s()
            metrics = settled(admin)
            time.sleep(REST_S)
            files_after = watch.files_at_rest()
        proxy.send_signal(signal.SIGTERM)
        status = proxy.wait(90)
    away_ns = round(AWAY_S * 1e9)
    accounts = settle(
        folder / "capture",
        asked=sum(client.outcomes.values()) + warm,
        retried=client.retried,
        whole=client.whole,
        tokens=day.tokens,
        metrics=metrics,
        kills_ns=kills_ns,
        lost_max=lost_max(watch, day.rate_rps_max),
        before_ns=away_ns,
        after_ns=away_ns,
    )
    if status:
        accounts.wrong.append(f"the proxy ended with {status} on SIGTERM")
    bounds = Bounds(
        {"supervisor": arguments.supervisor_mib, "relay": arguments.relay_mib, "meter": arguments.meter_mib},
        arguments.files,
    )
    verdict = judged(watch.looks, WARM * day.seconds, load_s, files_before, files_after, bounds)
    return {
        "about": about(arguments, day),
        "clients": {
            "outcomes": dict(client.outcomes),
            "retried": client.retried,
            "bytes": client.bytes,
            "late_s_max": client.late_s_max,
            "under_way_max": client.under_way_max,
            "whole_streams": len(client.whole),
            "seconds": load_s,
        },
        "rotate_s": rotate_s,
        "growth": verdict.to_dict(),
        "accounts": accounts.to_dict(),
        "watched": watch.to_dict(),
        "proxy_log": (folder / "proxy.log").read_text(errors="replace")[-4_000:],
        "wrong": verdict.wrong + wrong_with(client, accounts),
    }


def wrong_with(client: Client, accounts: Accounts) -> list[str]:
    unanswered = {how: n for how, n in client.outcomes.items() if how not in EXPECTED}
    found = [f"clients saw {n:,} times: {how}" for how, n in unanswered.items()]
    overflow = accounts.dropped.get("overflow", 0)
    if overflow > OVERFLOW_SHARE_MAX * accounts.opened:
        found.append(
            f"{overflow:,} exchanges found the tap full: beside what else runs here, this machine cannot"
            " carry the load, and nothing is to be concluded; lower --rate"
        )
    return found + accounts.wrong


def about(arguments: argparse.Namespace, day: Day) -> dict[str, object]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{os.cpu_count()} CPUs, Linux {platform.release()}",
        "python": platform.python_version(),
        "load average at the end": ", ".join(f"{load:.1f}" for load in os.getloadavg()),
        "hours of the day": day.hours,
        "requests": day.requests,
        "tokens": sum(day.tokens),
        "compression": arguments.compression,
        "minutes": arguments.minutes,
        "requests per second of the day": arguments.rate,
        "seed": arguments.seed,
    }


def main() -> int:
    arguments = read_arguments()
    day = Day(arguments.rate, arguments.compression, arguments.minutes, arguments.tokens, arguments.seed)
    instrument.compile_all()
    say(
        f"{day.requests:,} requests in {arguments.minutes:g} minutes: {day.hours:.1f} hours of"
        f" {arguments.rate:g} requests/s, {arguments.compression:g} times as fast"
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="llmtap-soak-") as folder:
        result = run(arguments, day, Path(folder))
    show(result, Console(width=130))
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(result, indent=1) + "\n"
    places = [
        RESULTS / f"{datetime.now(UTC):%Y%m%d-%H%M%S}.json",
        *([arguments.json] if arguments.json else []),
    ]
    for place in places:
        place.write_text(text)
        say(str(place))
    if arguments.html:
        write_page(result, arguments.html)
        say(str(arguments.html))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
