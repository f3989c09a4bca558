"""`llmtap replay` over each protocol that it speaks, beside what the server says that it really sent.

    .venv/bin/python benchmarks/load/protocols.py [--rate 50] [--seconds 10] [--tokens 40] [--rounds 3]
        [--only http,grpc] [--json FILE]

For every round and protocol `llmtap sim serve` is started anew, with a fixed schedule and a log of when it
wrote each token, and `llmtap replay` sends it Poisson arrivals. The truth of a TTFT is the first token's
write - the request read whole, of a gap the time between two writes. What lies between a write of gRPC's and
its bytes on the wire nobody logs: its own threads do that.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from llmtap.metrics.statistics import percentile

LLMTAP = [sys.executable, "-m", "llmtap.cli"]
SCHEMES = {"http": "http", "realtime": "ws", "grpc": "grpc"}
TTFT_MS, ITL_MS = 150, 20
PROMPT_TOKENS = 100
HEADS = (
    "protocol",
    "sent",
    "TTFT p50, true",
    "told",
    "p99, true",
    "told",
    "gap p50, true",
    "told",
    "p99, true",
    "told",
    "lateness p99",
    "uncertainty p99",
    "CPU s",
    "verdict",
)


@contextmanager
def serving(folder: Path, tokens: int) -> Iterator[tuple[dict[str, int], Path]]:
    """A server's ports by scheme, and its log."""
    truth = folder / "truth.jsonl"
    http, grpc = free_ports(2)
    command = [
        *LLMTAP,
        "sim",
        "serve",
        "--listen",
        f"127.0.0.1:{http}",
        "--grpc",
        f"127.0.0.1:{grpc}",
        "--ttft",
        f"{TTFT_MS}ms",
        "--itl",
        f"{ITL_MS}ms",
        "--tokens",
        str(tokens),
        "--truth",
        str(truth),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            for _ in range(2):
                if not server.stdout.readline():
                    sys.exit("the server did not start")
            yield {"http": http, "ws": http, "grpc": grpc}, truth
        finally:
            server.terminate()
            try:
                server.wait(70)
            except subprocess.TimeoutExpired:
                server.kill()


def trial(protocol: str, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """What one replay told, and what was true."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace, told = folder / "trace.csv", folder / "told.json"
        rows = [f"2026-01-01 00:00:0{i % 10}.0000000,{PROMPT_TOKENS},{args.tokens}" for i in range(10)]
        trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
        with serving(folder, args.tokens) as (ports, log):
            scheme = SCHEMES[protocol]
            command = [
                *LLMTAP,
                "replay",
                str(trace),
                "--arrivals",
                "poisson",
                "--rate",
                str(args.rate),
                "--requests",
                str(round(args.rate * args.seconds)),
                "--seed",
                str(seed),
                "--metrics",
                "none",
                "--target",
                f"{scheme}://127.0.0.1:{ports[scheme]}",
                "--json",
                str(told),
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode not in (0, 1):
                sys.exit(done.stdout)
        return figures(json.loads(told.read_text()), log) | {"protocol": protocol, "seed": seed}


def figures(told: dict[str, Any], log: Path) -> dict[str, Any]:
    """Latencies in ms, both sides of the same requests."""
    truths = [json.loads(line) for line in log.read_text().splitlines()]
    answers = [(one["accepted_ns"], one["sent_ns"][0]) for one in truths if "sent_ns" in one]
    ttft = sorted((sent[0] - accepted) / 1e6 for accepted, sent in answers if sent)
    gaps = sorted((b - a) / 1e6 for _, sent in answers for a, b in pairwise(sent))
    load, metrics, shares = told["load"], told["metrics"], (("p50", 0.5), ("p99", 0.99))
    return {
        "sent": load["sent"],
        "planned": load["planned"],
        "answers": len(ttft),
        "outcomes": told["outcomes"],
        "valid": told["verdict"]["valid"],
        "findings": [one["says"] for one in told["verdict"]["findings"]],
        "ttft": {p: (percentile(ttft, q), metrics["ttft"][p] * 1e3) for p, q in shares},
        "gap": {p: (percentile(gaps, q), metrics["tbc"][p] * 1e3) for p, q in shares},
        "lateness": told["dispatch_lateness"]["p99"] * 1e3,
        "uncertainty": told["uncertainties"]["p99"] * 1e3,
        "cpu": sum(one["cpu_seconds"] for one in told["sender"]["processes"]),
        "tokens": told["tokens"]["output"],
        "clock": told["sender"]["clock"],
    }


def rows_of(trials: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """A row for each protocol: medians over the rounds, and how many of them were valid."""
    for protocol in dict.fromkeys(one["protocol"] for one in trials):
        ours = [one for one in trials if one["protocol"] == protocol]
        cells = [f"{sum(o['sent'] for o in ours)} of {sum(o['planned'] for o in ours)}"]
        for name in ("ttft", "gap"):
            for p in ("p50", "p99"):
                cells += [f"{statistics.median(o[name][p][side] for o in ours):.1f}" for side in (0, 1)]
        cells += [f"{statistics.median(o[name] for o in ours):.1f}" for name in ("lateness", "uncertainty")]
        cpu = statistics.median(o["cpu"] / o["tokens"] * 1e3 for o in ours)
        yield [protocol, *cells, f"{cpu:.2f}", f"{sum(o['valid'] for o in ours)} of {len(ours)} valid"]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(SCHEMES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    protocols = [name for name in args.only.split(",") if name in SCHEMES]
    trials = []
    for seed in range(args.rounds):
        for protocol in protocols:
            trials.append(trial(protocol, args, seed))
            print(json.dumps(trials[-1]), file=sys.stderr)
    print(
        f"{platform.platform()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; times in ms, medians"
    )
    for line in (list(HEADS), ["---"] * len(HEADS), *rows_of(trials)):
        print(f"| {' | '.join(line)} |")
    if args.json is not None:
        args.json.write_text(json.dumps(trials, indent=1) + "\n")


main()
