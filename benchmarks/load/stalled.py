#!/usr/bin/env python3
"""Is an open loop open? A server that stops for 5 s in the middle of 500 requests a second.

The server (`benchmarks/relay/sse_server.c`, on CPU 1) is stopped by SIGSTOP and goes on by SIGCONT; `llmtap
replay` (on CPU 0) is to send on as if nothing were: not one request later for it. What the stall makes of
TTFT is known in advance: who was sent while the server stood still waits until it goes on. See README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent / "relay")]

import instrument  # noqa: E402

RATE_RPS = 500
LOAD_S, STALL_AT_S, STALL_S = 12.0, 4.0, 5.0
TTFT_S = 0.01
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    instrument.compile_all()
    rows = []
    with instrument.spinner():
        for _ in range(options.rounds):
            for stalled in (False, True):
                rows.append(one(stalled))
                print(f"{'stalled' if stalled else 'undisturbed'}: done", file=sys.stderr, flush=True)
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    return 0 if all(row["sent"] == RATE_RPS * LOAD_S for row in rows) else 1


def one(stalled: bool) -> dict[str, Any]:
    """One load; figures in seconds."""
    with tempfile.TemporaryDirectory(prefix="stalled-") as name:
        result = Path(name, "result.json")
        server = subprocess.Popen(
            [
                instrument.BUILD / "sse_server",
                "--port",
                "0",
                "--with-parent",
                "--ttft-ms",
                str(TTFT_S * 1e3),
                "--itl-ms",
                "2",
                "--tokens",
                "5",
            ],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {instrument.INSTRUMENT_CPU}),
        )
        with instrument.stopped_afterwards(server):
            assert server.stdout
            port = int(json.loads(server.stdout.readline())["listening"].rpartition(":")[2])
            trace = Path(name, "trace.csv")
            rows = "".join(f"2023-11-16 18:15:4{i},8,5\n" for i in range(2))  # in Azure's form, and repeated
            trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
            load = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "llmtap.cli",
                    "replay",
                    trace,
                    "--target",
                    f"http://127.0.0.1:{port}",
                    "--arrivals",
                    "uniform",
                    "--rate",
                    str(RATE_RPS),
                    "--requests",
                    str(int(RATE_RPS * LOAD_S)),
                    "--model",
                    "sim-model",
                    "--metrics",
                    "none",
                    "--json",
                    result,
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                preexec_fn=lambda: os.sched_setaffinity(0, {instrument.TARGET_CPU}),
            )
            with instrument.stopped_afterwards(load):
                if stalled:
                    wait_for_requests(port)
                    time.sleep(STALL_AT_S)
                    server.send_signal(signal.SIGSTOP)
                    time.sleep(STALL_S)
                    server.send_signal(signal.SIGCONT)
                load.wait(timeout=LOAD_S + 120)
        told = json.loads(result.read_text())
    return {
        "stalled": stalled,
        "sent": told["load"]["sent"],
        "late": {q: told["dispatch_lateness"][q] for q in (*QUANTILES, "max")},
        "ttft": {q: told["metrics"]["ttft"][q] for q in QUANTILES},
        "corrected": {q: told["corrected"]["ttft"][q] for q in QUANTILES},
        "expected": expected() if stalled else dict.fromkeys(QUANTILES, TTFT_S),
        "verdict": told["verdict"],
    }


def wait_for_requests(port: int) -> None:
    """Until the load has begun."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/sim/stats", timeout=10) as answer:
            if json.load(answer)["requests"] > RATE_RPS / 10:
                return
        time.sleep(0.02)
    raise TimeoutError("the load did not begin")


def expected() -> dict[str, float]:
    """TTFT quantiles by the schedule alone."""
    waits = []
    for i in range(int(RATE_RPS * LOAD_S)):
        sent_s = i / RATE_RPS - STALL_AT_S
        waits.append(TTFT_S + (STALL_S - sent_s if 0 <= sent_s < STALL_S else 0.0))
    waits.sort()
    return {q: waits[int(share * len(waits))] for q, share in QUANTILES.items()}


def table(rows: list[dict[str, Any]]) -> str:
    heads = ["run", "sent", "late p50 ms", "p99", "max", "TTFT p50 / p90 / p99 s", "from schedule"]
    lines = [[*heads, "by the schedule alone"], ["---"] * (len(heads) + 1)]
    for row in rows:
        late = [f"{row['late'][name] * 1e3:.2f}" for name in ("p50", "p99", "max")]
        kinds = (row["ttft"], row["corrected"], row["expected"])
        told = [" / ".join(f"{kind[q]:.3f}" for q in QUANTILES) for kind in kinds]
        lines.append(["stalled 5 s" if row["stalled"] else "undisturbed", str(row["sent"]), *late, *told])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    raise SystemExit(main())
