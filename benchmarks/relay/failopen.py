#!/usr/bin/env python3
"""kill -9 of the meter under load: do the clients notice, and is the count of what went unmeasured exact?

The same load runs in pairs, shuffled: once undisturbed, once with the meter killed (several times) while the
streams run. Compared are integrity (every stream whole, every event once), the latency of every event, and
the ledger: requests that the server read = opened = measured + not measured, nothing unsettled.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import instrument
from running import Running, descendants, role_of, running
from targets import TARGETS, installed

STREAMS, ITL_MS, TOKENS = 200, 20, 100


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="pairs (default 5)")
    parser.add_argument("--kills", type=int, default=2, help="per disturbed run (default 2)")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--meter-cpu", type=int, default=instrument.TARGET_CPU)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if reason := installed(TARGETS["llmtap"]):
        raise SystemExit(reason)
    instrument.compile_all()
    real_time = instrument.real_time_allowed()
    runs: dict[str, list[dict]] = {"undisturbed": [], "meter killed": []}
    with instrument.spinner():
        for number in range(options.rounds):
            for name in random.Random(number).sample(list(runs), 2):
                print(f"round {number + 1}: {name} ...", file=sys.stderr, flush=True)
                kills = options.kills if name == "meter killed" else 0
                runs[name].append(one_run(options, kills, real_time))
    ok = report(runs)
    if options.json:
        options.json.write_text(json.dumps(runs, indent=1))
    return 0 if ok else 1


def one_run(options: argparse.Namespace, kills: int, real_time: bool) -> dict:
    with (
        tempfile.TemporaryDirectory() as folder,
        instrument.server(real_time) as upstream,
        running(TARGETS["llmtap"], upstream, meter_cpu=options.meter_cpu) as there,
    ):
        before, asked_before = settled(there), reached(there)
        latencies = Path(folder) / "latency.csv"
        killer = threading.Thread(target=kill_meters, args=(there, kills, options.seconds))
        killer.start()
        result = instrument.load(
            [
                *there.arguments(),
                *("--concurrency", str(STREAMS), "--itl-ms", str(ITL_MS), "--tokens", str(TOKENS)),
                *("--warmup-s", "1", "--drain-s", "5", "--duration-s", str(options.seconds)),
                *("--latency-csv", str(latencies)),
            ],
            real_time=real_time,
            within_s=options.seconds + 60,
        )
        killer.join()
        ledger = settled(there)
        asked = reached(there)
        lates_us = sorted((int(row[-1]) - int(row[-2])) / 1e3 for row in read_rows(latencies))
    return {
        "integrity": result["integrity"]["ok"],
        "events": len(lates_us),
        "latencies_us": lates_us,
        "asked": asked - asked_before - 1,  # the server has counted the question before, too
        "ledger": {name: ledger[name] - before[name] for name in ("opened", "measured", "dropped")},
        "reasons": ledger["reasons"],
        "unsettled": ledger["unsettled"],
        "measured_by_the_last_meter": ledger["n"],
    }


def read_rows(path: Path) -> list[list[str]]:
    with path.open() as lines:
        return [row for row in csv.reader(lines) if row and row[-1].isdigit()]


def kill_meters(there: Running, kills: int, seconds: float) -> None:
    """At even intervals within the measured window."""
    for _ in range(kills):
        time.sleep(1 + seconds / (kills + 1) - 0.5)
        assert there.pid is not None
        for pid in descendants(there.pid):
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            if role_of(command) == "meter":
                os.kill(pid, signal.SIGKILL)


def settled(there: Running) -> dict:
    """The ledger over all relays, once nothing is on its way and a meter answers."""
    give_up = time.monotonic() + 20
    while True:
        try:
            with urllib.request.urlopen(f"{there.admin}/api/v1/summary?window=all", timeout=5) as answer:
                summary = json.load(answer)
        except OSError:
            summary = {"relays": {}}
        relays = summary["relays"].values()
        quiet = relays and not any(r.get("unsettled", 1) or r.get("streams", 1) for r in relays)
        if quiet or time.monotonic() > give_up:
            break
        time.sleep(0.2)
    time.sleep(1.2)  # a status later, what was settled last is in it, too
    with urllib.request.urlopen(f"{there.admin}/api/v1/summary?window=all", timeout=5) as answer:
        summary = json.load(answer)
    relays = list(summary["relays"].values())
    reasons: dict[str, int] = {}
    for relay in relays:
        for reason, count in relay["dropped"].items():
            reasons[reason] = reasons.get(reason, 0) + count
    return {
        "opened": sum(r["opened"] for r in relays),
        "measured": sum(r["measured"] for r in relays),
        "dropped": sum(reasons.values()),
        "unsettled": sum(r["unsettled"] for r in relays),
        "reasons": reasons,
        "n": summary["n"],
    }


def reached(there: Running) -> int:
    """Requests that the server behind the tap has read: what the ledger is held against."""
    with urllib.request.urlopen(f"{there.upstream}/sim/stats", timeout=5) as answer:
        return int(json.load(answer)["requests"])


def percentile(ranked: list[float], share: float) -> float:
    return ranked[min(len(ranked) - 1, int(len(ranked) * share))]


def report(runs: dict[str, list[dict]]) -> bool:
    calm = sorted(x for run in runs["undisturbed"] for x in run["latencies_us"])
    bound = percentile(calm, 0.999)
    ok = True
    print(f"baseline: {len(calm)} events, p99.9 {bound:.0f} us, max {calm[-1]:.0f} us")
    names = "run, events, whole, p50 us, p99, p99.9, max, later than the baseline's p99.9, asked, opened, "
    names += "measured, not measured, exact"
    print("| " + " | ".join(names.split(", ")) + " |\n|" + "---|" * 13)
    for name, several in runs.items():
        for run in several:
            lates, ledger = run["latencies_us"], run["ledger"]
            beyond = sum(1 for x in lates if x > bound)
            exact = (
                run["asked"] == ledger["opened"] == ledger["measured"] + ledger["dropped"]
                and run["unsettled"] == 0
            )
            ok = ok and exact and run["integrity"]
            points = " | ".join(f"{percentile(lates, p):.0f}" for p in (0.5, 0.99, 0.999))
            reasons = ", ".join(f"{k} {v}" for k, v in run["reasons"].items())
            print(
                f"| {name} | {run['events']} | {run['integrity']} | {points} | {lates[-1]:.0f} |"
                f" {beyond} ({beyond / len(lates):.3%}) | {run['asked']} | {ledger['opened']} |"
                f" {ledger['measured']} | {ledger['dropped']} ({reasons}) | {exact} |"
            )
            run["latencies_us"] = {
                "p50": percentile(lates, 0.5),
                "p99": percentile(lates, 0.99),
                "max": lates[-1],
            }
    return ok


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent)
    sys.exit(main())
