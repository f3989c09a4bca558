#!/usr/bin/env python3
"""Is the passive tap right, cheap and honest? Against a server that logs when it sent each event.

- paced: 200 streams, 50 events/s each, no proxy. Every exchange, the error of each gap; in alternating runs
  without the tap, how far it moves the latency of the traffic, and through nginx, what an event costs there.
- stop: a ring of 4 MiB, and the watching process stopped for 1 s: what is lost is told, and what is measured
  is right.
- flood: as many events as the load can send, while the watching process runs for a tenth of the time, so that
  it cannot follow on any machine: packets lost are told, memory stays bounded, traffic is not slowed.

Needs root, or CAP_NET_RAW; uses the loopback interface only.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "relay"))
import instrument  # noqa: E402
from running import Running, descendants, role_of, running  # noqa: E402
from scenarios import Options, Sample, streaming  # noqa: E402
from targets import TARGETS, installed  # noqa: E402

GAP_P99_US = 20.0
NGINX_SHARE = 0.35
MOVED_P50_US = 5.0
"""Bounds that are checked: a gap's error, the watching process beside nginx, the traffic's median."""
GROWTH_MIB = 96
"""Of memory beside the ring: `watch.tap_bytes`, and early segments of all connections."""
KEPT = ("opened", "measured", "dropped", "unsettled", "packets", "missing_bytes")


@dataclass(frozen=True, slots=True)
class Case:
    """A load, and the ways it takes in turn."""

    streams: int
    itl_ms: int
    tokens: int
    ring_mib: int
    ways: tuple[str, ...]
    stop_s: float = 0.0
    """The watching process is stopped for this time: once, or with `again` for nine tenths of the run."""
    again: bool = False


CASES = {
    "paced": Case(200, 20, 250, 64, ("without", "with", "nginx")),
    "stop": Case(100, 10, 200, 4, ("with",), stop_s=1.0),
    "flood": Case(400, 2, 400, 4, ("without", "with"), stop_s=0.09, again=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--seconds", type=float, default=5.0, help="of load in each run")
    parser.add_argument("--rounds", type=int, default=3, help="of each case but `stop`, which has one")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    instrument.compile_all()
    out = {}
    for case in options.case or CASES:
        out[case] = run_case(case, options.seconds, 1 if case == "stop" else options.rounds)
    print(json.dumps(out, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps(out, indent=1) + "\n")
    bad = [f"{case}: {problem}" for case, told in out.items() for problem in told["problems"]]
    for line in bad:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if bad else 0


def run_case(case: str, seconds: float, rounds: int) -> dict:
    about = CASES[case]
    ways = [way for way in about.ways if way != "nginx" or not installed(TARGETS["nginx"])]
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    told: list[dict] = []
    with instrument.spinner():
        for number in range(rounds):
            for way in ways if number % 2 == 0 else reversed(ways):
                figures, seen = run_way(case, way, seconds, number)
                runs[way].append(figures)
                told += seen
    problems = [text for seen in told for text in problems_of(case, seen)]
    out = {
        "machine": os.uname().release,
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "runs": runs,
        "tap": told,
        "problems": problems,
    }

    def middle(way: str, name: str) -> float:
        return median(run[name] for run in runs[way])

    if "without" in runs:
        out["moved_p50_us"] = round(middle("with", "p50_us") - middle("without", "p50_us"), 2)
        out["events_per_s_ratio"] = round(
            middle("with", "events_per_s") / middle("without", "events_per_s"), 3
        )
        if out["moved_p50_us"] > MOVED_P50_US:
            problems.append(f"the median latency of the traffic moved by {out['moved_p50_us']} us")
    if "nginx" in runs:
        nginx = middle("nginx", "cpu_us_per_event")
        costs = ("watcher_us_per_event", "cpu_us_per_event")
        out["nginx_share"] = {name: round(middle("with", name) / nginx, 3) for name in costs}
        if out["nginx_share"]["watcher_us_per_event"] > NGINX_SHARE:
            problems.append(f"an event costs {out['nginx_share']} times nginx's")
    elif case == "paced":
        problems.append(f"not compared with nginx: {installed(TARGETS['nginx'])}")
    return out


def run_way(case: str, way: str, seconds: float, number: int) -> tuple[dict[str, float], list[dict]]:
    """One run: figures of the load, and what the tap saw of it if there was one."""
    about, real_time = CASES[case], instrument.real_time_allowed()
    options = Options(seconds, number, real_time, itl_ms=about.itl_ms, tokens=about.tokens)

    def load(target: Running) -> dict[str, float]:
        return figures_of(streaming(target, options, about.streams, "--drain-s", 8))

    with tempfile.TemporaryDirectory(prefix="watch-") as name:
        folder = Path(name)
        log = folder / "schedule.csv"
        with instrument.server(real_time, "--schedule-log", str(log)) as upstream:
            if way != "with":
                with running(TARGETS["nginx" if way == "nginx" else "direct"], upstream) as target:
                    return load(target), []
            with watching(upstream, folder / "capture", f"{about.ring_mib}MiB") as tap:
                if about.stop_s:
                    times = round(0.9 * seconds / about.stop_s) if about.again else 1
                    wait_s = 0.0 if about.again else seconds / 2
                    threading.Timer(wait_s, tap.stop, (about.stop_s, times)).start()
                url = f"http://127.0.0.1:{upstream}/v1/chat/completions"
                figures = load(Running(TARGETS["direct"], url, [], tap.pid))
                time.sleep(1.5)
                seen = tap.figures()
        return figures, [seen | compare(folder / "capture", log)]


def figures_of(samples: list[Sample]) -> dict[str, float]:
    """The figures of all processes of a target, and the CPU of each kind."""
    out = {name: round(value, 2) for name, value in samples[0].metrics.items()}
    for sample in samples[1:]:
        kind = sample.target.split(": ")[1].split()[0]
        out[f"{kind}_us_per_event"] = round(sample.metrics["cpu_us_per_event"], 2)
    return out


def problems_of(case: str, seen: dict) -> list[str]:
    """What is wrong with what the tap saw."""
    out = []
    if seen["wrong"] or not seen["matched"]:
        out.append(f"{seen['wrong']} of {seen['matched']} exchanges have not the events that were sent")
    settled = seen["measured"] + sum(seen["dropped"].values()) + seen["unsettled"]
    if seen["opened"] != settled:
        out.append(f"{seen['opened']} exchanges were opened, {settled} are accounted for")
    if seen["rss_growth_mib"] > CASES[case].ring_mib + GROWTH_MIB:
        out.append(f"memory grew by {seen['rss_growth_mib']} MiB")
    if case == "paced":
        if seen["packets"]["lost"] or seen["matched"] != seen["sent"]:
            out.append(f"{seen['matched']} of {seen['sent']} exchanges, packets {seen['packets']}")
        if seen["gap_error_us"]["p99"] > GAP_P99_US:
            out.append(f"gap error {seen['gap_error_us']} us")
    elif not seen["packets"]["lost"]:
        out.append("no packet was lost, so the case shows nothing")
    return out


class Tap:
    """A running `llmtap watch`."""

    def __init__(self, pid: int, admin: int) -> None:
        self.pid = pid
        self._admin = admin
        kinds = {role_of(Path(f"/proc/{child}/cmdline").read_text()): child for child in descendants(pid)}
        self._watcher = kinds["watcher"]
        self._rss_kib = self._memory_kib("VmRSS")

    def _memory_kib(self, name: str) -> int:
        status = Path(f"/proc/{self._watcher}/status").read_text()
        return int(status.partition(f"{name}:")[2].split()[0])

    def stop(self, seconds: float, times: int) -> None:
        """Stop the watching process `times` times; between two stops it runs for a ninth of that time."""
        for _ in range(times):
            os.kill(self._watcher, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(self._watcher, signal.SIGCONT)
            time.sleep(seconds / 9)

    def figures(self) -> dict:
        url = f"http://127.0.0.1:{self._admin}/api/v1/summary?window=all&by=none"
        with urllib.request.urlopen(url, timeout=30) as answer:
            summary = json.load(answer)
        (relay,) = summary["relays"].values()
        return {
            **{name: relay[name] for name in KEPT},
            "uncertainty_us": None if summary["uncertainty"] is None else summary["uncertainty"] * 1e6,
            "rss_growth_mib": round((self._memory_kib("VmHWM") - self._rss_kib) / 1024, 1),
        }


@contextmanager
def watching(port: int, capture: Path, ring: str = "64MiB") -> Iterator[Tap]:
    """`llmtap watch` of a port of the loopback interface, ready; its capture is whole at the end."""
    admin = instrument.free_port()
    argv = [sys.executable, "-P", "-m", "llmtap.cli", "watch", "--interface", "lo", "--port", str(port)]
    argv += ["--admin", f"127.0.0.1:{admin}", "--capture", str(capture)]
    argv += ["--set", f"watch.ring_bytes={ring}", "--set", "log.level=warning"]
    process = subprocess.Popen(argv, preexec_fn=lambda: os.sched_setaffinity(0, {instrument.TARGET_CPU}))
    try:
        end = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{admin}/readyz", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit("llmtap watch did not start") from None
                time.sleep(0.1)
        yield Tap(process.pid, admin)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def captured(capture: Path, *columns: str) -> Iterator[dict]:
    """Rows of a capture's complete exchanges."""
    import pyarrow.parquet as pq

    for path in capture.glob("*.parquet"):
        for row in pq.read_table(path, columns=["request_id", "outcome", *columns]).to_pylist():
            if row["outcome"] == "complete":
                yield row


def compare(capture: Path, log: Path) -> dict:
    """Gaps of the tap against those of the server; the capture's offsets are whole microseconds."""
    sent: dict[str, list[int]] = {}
    with log.open() as file:
        for row in csv.reader(file):
            if row and row[1].isdigit():
                sent.setdefault(row[0], []).append(int(row[2]))
    errors: list[float] = []
    wrong = events = matched = 0
    for row in captured(capture, "event_us", "event_class"):
        truth = sent.get(row["request_id"] or "")
        if truth is None:
            continue
        matched += 1
        mine = [us for us, kind in zip(row["event_us"], row["event_class"], strict=True) if kind == "content"]
        events += len(mine)
        if len(mine) != len(truth):
            wrong += 1
            continue
        errors += [
            abs((b - a) - (d - c) / 1e3) for a, b, c, d in zip(mine, mine[1:], truth, truth[1:], strict=False)
        ]
    errors.sort()
    at = {name: quantile(errors, q) for name, q in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))}
    return {"sent": len(sent), "matched": matched, "events": events, "wrong": wrong, "gap_error_us": at}


def quantile(ordered: list[float], q: float) -> float:
    return round(ordered[int(q * (len(ordered) - 1))], 1) if ordered else float("inf")


if __name__ == "__main__":
    sys.exit(main())
