#!/usr/bin/env python3
"""Is the tap right? Its figures held against a server that logs when it really sent each event.

For each load (1, 50, 500 streams) and each clock (kernel, mono) every exchange the tap reports is matched to
the server's log by its request id. Compared, all in CLOCK_MONOTONIC of this one machine:

- each inter-chunk gap, tap minus server: what a reader of the tap's ITL is wrong by;
- TTFT: the tap's (first content - submit) against the server's (first send - arrival of the request in the
  server's kernel). The wait of a request until the server reads it is part of what a client waits.

Beside each error stands the uncertainty that the tap reported with that very exchange, and the share of
errors that lie within it.

With --packets (root or CAP_NET_RAW), two `llmtap watch` stand beside the relay, one on each side, and the
times that the relay says it added to a request and to its chunks are compared with the packets' times.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import instrument
from running import Running, running
from targets import Target, find_llmtap, llmtap

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "watch"))
from watch import captured, watching

ITL_MS = 20
TTFT_MS = 50
TOKENS = 100
PAGE = 500
ADDED = ("request", "first_chunk", "chunk_max")
ROUNDING_US = 2
"""Two offsets in a capture are whole microseconds."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", default="1,50,500", help="loads, default 1,50,500")
    parser.add_argument("--clock", default="kernel,mono")
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--meter-cpu", type=int, default=instrument.TARGET_CPU)
    parser.add_argument("--packets", action="store_true", help="compare `added` with packets")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    reason = find_llmtap()
    if reason:
        raise SystemExit(reason)
    instrument.compile_all()
    real_time = instrument.real_time_allowed()
    rows = []
    with instrument.spinner():
        for clock in options.clock.split(","):
            for streams in map(int, options.streams.split(",")):
                print(f"{clock}, {streams} streams ...", file=sys.stderr, flush=True)
                rows.append(measure(clock, streams, options, real_time))
    print(table(rows))
    if options.packets:
        print("\n" + table_of_added(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


def measure(clock: str, streams: int, options: argparse.Namespace, real_time: bool) -> dict:
    """One load: the errors of every exchange, as figures."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "sent.csv"
        more = ("--set", f"relay.clock={clock}", "--set", "meter.exchanges_kept=20000")
        target = Target(f"llmtap {clock}", llmtap(*more), find_llmtap)
        sides = [Path(folder) / side for side in ("client", "server")] if options.packets else []
        with (
            instrument.server(real_time, "--schedule-log", str(log)) as upstream,
            running(target, upstream, meter_cpu=options.meter_cpu) as there,
        ):
            with both_sides(there, sides):
                result = instrument.load(
                    [
                        *there.arguments(),
                        *("--concurrency", str(streams), "--itl-ms", str(ITL_MS), "--ttft-ms", str(TTFT_MS)),
                        *("--tokens", str(TOKENS), "--warmup-s", "1", "--drain-s", "3"),
                        *("--duration-s", str(options.seconds)),
                    ],
                    real_time=real_time,
                    within_s=options.seconds + 60,
                )
                time.sleep(1.5)
            exchanges = list(all_exchanges(there.admin))
        row = compare(clock, streams, exchanges, read_log(log), result)
        return row | {"added": compare_added(exchanges, *map(packets, sides))} if sides else row


@contextmanager
def both_sides(there: Running, captures: list[Path]) -> Iterator[None]:
    """Watch the packets on both sides of the relay, if there are captures to make."""
    with ExitStack() as stack:
        for url, capture in zip((there.url, there.upstream), captures, strict=False):
            stack.enter_context(watching(urlsplit(url).port, capture))
        yield


def packets(capture: Path) -> dict[str, dict]:
    rows = captured(capture, "arrival_ns", "submit_us", "event_us", "uncertainty_us")
    return {row["request_id"]: row for row in rows}


def compare_added(exchanges: list[dict], client: dict[str, dict], server: dict[str, dict]) -> dict:
    """Return, for each part of `added`, its values by the relay and by the packets, and their differences."""
    said, truth, errors = ({name: [] for name in ADDED} for _ in range(3))
    within = dict.fromkeys(ADDED, 0)
    for x in exchanges:
        near, far = client.get(x["request_id"] or ""), server.get(x["request_id"] or "")
        if near is None or far is None or len(near["event_us"]) != len(far["event_us"]):
            continue
        shift_us = (near["arrival_ns"] - far["arrival_ns"]) / 1e3
        chunks = [shift_us + a - b for a, b in zip(near["event_us"], far["event_us"], strict=True)]
        seen = (far["submit_us"] - near["submit_us"] - shift_us, chunks[0], max(chunks))
        width_us = x["uncertainty"] * 1e6 + near["uncertainty_us"] + far["uncertainty_us"] + ROUNDING_US
        for name, us in zip(ADDED, seen, strict=True):
            said[name].append(x["added"][name] * 1e6)
            truth[name].append(us)
            errors[name].append(said[name][-1] - us)
            within[name] += abs(errors[name][-1]) <= width_us
    if not truth["request"]:
        raise SystemExit(f"no exchange of {len(exchanges)} is in both captures")
    return {
        name: {
            "n": len(errors[name]),
            "relay_us": spread(said[name]),
            "packets_us": spread(truth[name]),
            "difference_us": spread(errors[name]),
            "within": within[name] / len(errors[name]),
        }
        for name in ADDED
    }


def all_exchanges(admin: str) -> Iterable[dict]:
    """Every complete stream the tap still holds, with its events."""
    cursor = None
    while True:
        query = f"limit={PAGE}&events=1&outcome=complete" + (f"&next={cursor}" if cursor else "")
        with urllib.request.urlopen(f"{admin}/api/v1/exchanges?{query}", timeout=60) as answer:
            page = json.load(answer)
        yield from (x for x in page["exchanges"] if x["stream"])
        cursor = page["next"]
        if not cursor:
            return


def read_log(path: Path) -> dict[str, list[tuple[int, int]]]:
    """By request id: for each event when it was sent, and when the request had arrived, ns."""
    sent: dict[str, list[tuple[int, int]]] = {}
    with path.open() as lines:
        for row in csv.reader(lines):
            if len(row) == 5 and row[1].isdigit():
                sent.setdefault(row[0], []).append((int(row[2]), int(row[4])))
    return sent


def compare(clock: str, streams: int, exchanges: list[dict], sent: dict, result: dict) -> dict:
    gap_us, ttft_us, widths_us = [], [], []
    gaps_within = ttft_within = matched = 0
    for x in exchanges:
        truth = sent.get(x["request_id"] or "")
        times = [e["t"] for e in x["events"] if e["class"] == "content"]
        if truth is None or len(truth) != TOKENS or len(times) != TOKENS:
            continue
        matched += 1
        width_us = x["uncertainty"] * 1e6
        widths_us.append(width_us)
        sent_ns, arrival_ns = truth[0]
        error = x["metrics"]["ttft"] * 1e6 - (sent_ns - arrival_ns) / 1e3
        ttft_us.append(error)
        ttft_within += abs(error) <= width_us
        for i in range(1, TOKENS):
            error = (times[i] - times[i - 1]) * 1e6 - (truth[i][0] - truth[i - 1][0]) / 1e3
            gap_us.append(error)
            gaps_within += abs(error) <= width_us
    if not matched:
        raise SystemExit(f"no exchange of {len(exchanges)} matches the server's log of {len(sent)}")
    return {
        "clock": clock,
        "streams": streams,
        "exchanges": matched,
        "client_event_latency_us": result["latency_us"],
        "gaps": len(gap_us),
        "gap_error_us": spread([abs(e) for e in gap_us]),
        "gaps_within": gaps_within / len(gap_us),
        "ttft_error_us": spread([abs(e) for e in ttft_us]),
        "ttft_within": ttft_within / len(ttft_us),
        "uncertainty_us": spread(widths_us),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Percentiles by nearest rank."""
    ranked = sorted(values)
    n = len(ranked)
    return {
        name: ranked[min(n - 1, max(0, -(-n * part // 1000) - 1))]
        for name, part in (("p50", 500), ("p99", 990), ("p99.9", 999), ("max", 1000))
    }


def table(rows: list[dict]) -> str:
    heads = "clock, streams, exchanges, gaps, gap error us: p50, p99, p99.9, max, within, "
    heads += "TTFT error us: p50, p99, max, within, uncertainty us: p50, max"
    names = heads.split(", ")
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for r in rows:
        gap, ttft, width = r["gap_error_us"], r["ttft_error_us"], r["uncertainty_us"]
        cells = [
            r["clock"],
            r["streams"],
            r["exchanges"],
            r["gaps"],
            *(f"{gap[k]:.0f}" for k in ("p50", "p99", "p99.9", "max")),
            f"{r['gaps_within']:.4%}",
            *(f"{ttft[k]:.0f}" for k in ("p50", "p99", "max")),
            f"{r['ttft_within']:.2%}",
            *(f"{width[k]:.0f}" for k in ("p50", "max")),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def table_of_added(rows: list[dict]) -> str:
    heads = "clock, streams, added, exchanges, by the relay us: p50, p99, by packets us: p50, p99, "
    heads += "relay - packets us: p50, p99, max, within"
    names = heads.split(", ")
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for r in rows:
        for name, part in r["added"].items():
            cells = [r["clock"], r["streams"], name, part["n"]]
            cells += [f"{part[of][q]:.0f}" for of in ("relay_us", "packets_us") for q in ("p50", "p99")]
            cells += [f"{part['difference_us'][q]:.0f}" for q in ("p50", "p99", "max")]
            lines.append("| " + " | ".join(map(str, [*cells, f"{part['within']:.2%}"])) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent)
    sys.exit(main())
