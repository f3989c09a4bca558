#!/usr/bin/env python3
"""Is the passive tap right, cheap and honest? Against a server that logs when it sent each event.

- paced: 200 streams, 50 events/s each, no proxy. Every exchange, the error of each gap, CPU per event, and in
  alternating rounds without the tap: how far it moves the latency of the traffic itself.
- stop: a ring of 4 MiB, and the watching process stopped for 1 s: what is lost is told, and what is measured
  is right.
- flood: more events than it can follow: packets lost are told, memory stays bounded.

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
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "relay"))
import instrument  # noqa: E402

GAP_P99_US = 20.0
"""The bound that `paced` checks."""
KEPT = ("opened", "measured", "dropped", "unsettled", "packets", "missing_bytes")
CASES = {
    "paced": {"streams": 200, "itl_ms": 20, "tokens": 250, "ring": "64MiB"},
    "stop": {"streams": 100, "itl_ms": 10, "tokens": 200, "ring": "4MiB"},
    "flood": {"streams": 400, "itl_ms": 2, "tokens": 400, "ring": "8MiB"},
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--seconds", type=float, default=5.0, help="of load in each round")
    parser.add_argument("--rounds", type=int, default=3, help="of `paced`, with the tap and without")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    instrument.compile_all()
    out = {case: run_case(case, options.seconds, options.rounds) for case in options.case or CASES}
    print(json.dumps(out, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps(out, indent=1) + "\n")
    bad = [name for name, told in out.items() if not told["ok"]]
    for name in bad:
        print(f"failed: {name}", file=sys.stderr)
    return 1 if bad else 0


def run_case(case: str, seconds: float, rounds: int) -> dict:
    real_time = instrument.real_time_allowed()
    about = CASES[case]
    told: list[dict] = []
    with_tap, without = [], []
    for _ in range(rounds if case == "paced" else 1):
        with tempfile.TemporaryDirectory(prefix="watch-") as name, instrument.spinner():
            folder = Path(name)
            log = folder / "schedule.csv"
            if case == "paced":
                with instrument.server(real_time) as port:
                    without.append(
                        instrument.load(
                            arguments(about, port, seconds), real_time=real_time, within_s=seconds + 40
                        )
                    )
            with (
                instrument.server(real_time, "--schedule-log", str(log)) as port,
                watching(port, folder, about["ring"]) as tap,
            ):
                if case == "stop":
                    stopping = threading.Timer(seconds / 2, tap.stop_for_a_second)
                    stopping.start()
                with_tap.append(
                    instrument.load(
                        arguments(about, port, seconds), real_time=real_time, within_s=seconds + 40
                    )
                )
                time.sleep(1.5)
                figures = tap.figures()
            told.append(figures | compare(folder / "capture", log))
    relays = told[-1]
    ok = relays["wrong"] == 0 and relays["accounted"]
    out = {"rounds": told, "machine": os.uname().release, "cpus": os.cpu_count()}
    if case == "paced":
        ok = ok and all(t["gap_error_us"]["p99"] <= GAP_P99_US and not t["packets"].get("lost") for t in told)
        out["traffic_p50_us"] = {"without": p50(without), "with": p50(with_tap)}
    else:
        ok = ok and (case == "stop" or relays["packets"]["lost"] > 0)
    return out | {"ok": ok}


def arguments(about: dict, port: int, seconds: float) -> list[str]:
    """Those of sse_load."""
    return [
        "--url", f"http://127.0.0.1:{port}/v1/chat/completions", "--concurrency", str(about["streams"]),
        "--itl-ms", str(about["itl_ms"]), "--tokens", str(about["tokens"]), "--warmup-s", "1",
        "--duration-s", str(seconds), "--drain-s", "8", "--pid", str(os.getpid()),
    ]  # fmt: skip


def p50(results: list[dict]) -> list[float]:
    return [round(r["latency_us"]["p50"], 1) for r in results if r.get("latency_us")]


class Tap:
    """A running `llmtap watch`."""

    def __init__(self, process: subprocess.Popen[bytes], admin: int) -> None:
        self.admin = admin
        self._process = process
        self.children = {
            ("watcher" if b"vantage.passive" in Path(f"/proc/{pid}/cmdline").read_bytes() else "meter"): int(
                pid
            )
            for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        }
        self._cpu_ns = {name: cpu_ns(pid) for name, pid in self.children.items()}

    def stop_for_a_second(self) -> None:
        os.kill(self.children["watcher"], signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(self.children["watcher"], signal.SIGCONT)

    def figures(self) -> dict:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.admin}/api/v1/summary?window=all&by=none", timeout=30
        ) as answer:
            summary = json.load(answer)
        (relay,) = summary["relays"].values()
        status = Path(f"/proc/{self.children['watcher']}/status").read_text()
        (rss,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
        settled = relay["measured"] + sum(relay["dropped"].values()) + relay["unsettled"]
        cpu = {name: (cpu_ns(pid) - self._cpu_ns[name]) / 1e6 for name, pid in self.children.items()}
        return {
            **{name: relay[name] for name in KEPT},
            "accounted": relay["opened"] == settled,
            "uncertainty_us": None if summary["uncertainty"] is None else summary["uncertainty"] * 1e6,
            "watcher_rss_mib_max": round(int(rss) / 1024, 1),
            "cpu_ms": {name: round(ms, 1) for name, ms in cpu.items()},
            "watcher_us_per_packet": round(cpu["watcher"] * 1e3 / max(1, relay["packets"]["captured"]), 2),
        }


def cpu_ns(pid: int) -> int:
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


@contextmanager
def watching(port: int, folder: Path, ring: str) -> Iterator[Tap]:
    admin = instrument.free_port()
    argv = [sys.executable, "-P", "-m", "llmtap.cli", "watch", "--interface", "lo", "--port", str(port)]
    argv += ["--admin", f"127.0.0.1:{admin}", "--capture", str(folder / "capture")]
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
        yield Tap(process, admin)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def compare(capture: Path, log: Path) -> dict:
    """Gaps of the tap against those of the server; the capture's offsets are whole microseconds."""
    import pyarrow.parquet as pq

    sent: dict[str, list[int]] = {}
    with log.open() as file:
        for row in csv.reader(file):
            if row and row[1].isdigit():
                sent.setdefault(row[0], []).append(int(row[2]))
    errors: list[float] = []
    wrong = events = matched = 0
    for path in capture.glob("*.parquet"):
        columns = ["request_id", "outcome", "event_us", "event_class"]
        for row in pq.read_table(path, columns=columns).to_pylist():
            truth = sent.get(row["request_id"] or "")
            if truth is None or row["outcome"] != "complete":
                continue
            matched += 1
            mine = [
                us for us, kind in zip(row["event_us"], row["event_class"], strict=True) if kind == "content"
            ]
            events += len(mine)
            if len(mine) != len(truth):
                wrong += 1
                continue
            errors += [
                abs((b - a) - (d - c) / 1e3)
                for a, b, c, d in zip(mine, mine[1:], truth, truth[1:], strict=False)
            ]
    errors.sort()
    at = {name: quantile(errors, q) for name, q in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))}
    return {"matched": matched, "events": events, "wrong": wrong, "gap_error_us": at}


def quantile(ordered: list[float], q: float) -> float:
    return round(ordered[int(q * (len(ordered) - 1))], 1) if ordered else float("inf")


if __name__ == "__main__":
    sys.exit(main())
