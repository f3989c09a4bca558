#!/usr/bin/env python3
"""How right are load generators? Each is held against a server that knows when it sent every token.

The server (`benchmarks/relay/sse_server.c`, on CPU 1, at real-time priority where allowed) answers by an
exact schedule and logs its real sends; each generator has CPU 0 to itself, its children included. They take
turns in shuffled order, round after round. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "relay"), str(HERE.parents[1])]

import instrument  # noqa: E402
from accuracy_report import report  # noqa: E402
from cases import Case, cases  # noqa: E402
from install import INSTALLERS, tokenizer  # noqa: E402
from peers import TOOLS, Tool  # noqa: E402
from trial import Json, trial  # noqa: E402

RESULTS = HERE / "results"
QUICK_S = 4.0


def main() -> int:
    options = parse()
    for name in options.install:
        print(f"installing {name} ...", file=sys.stderr, flush=True)
        INSTALLERS[name]()
    if options.install:
        return 0
    if options.report:
        print(report(together([json.loads(path.read_text()) for path in options.report])))
        return 0
    loads = chosen(cases(QUICK_S if options.quick else options.seconds), options.cases, "--cases")
    tools = chosen({tool.name: tool for tool in TOOLS}, options.only, "--only")
    skipped = {name: reason for name, tool in tools.items() if (reason := tool.find())}
    tools = {name: tool for name, tool in tools.items() if name not in skipped}
    instrument.compile_all()
    tokenizer()
    result = {
        "when": time.strftime("%Y-%m-%d %H:%M"),
        "machine": f"{os.cpu_count()} CPUs, {platform.release()}, load {os.getloadavg()[0]:.1f} before",
        "python": platform.python_version(),
        "real_time": instrument.real_time_allowed(),
        "rounds": 1 if options.quick else options.rounds,
        "seed": options.seed,
        "llmtap_options": options.llmtap,
        "cases": {name: {"load_s": case.load_s, "requests": case.requests} for name, case in loads.items()},
        "tools": {name: {"version": tool.version(), "itl": tool.itl} for name, tool in tools.items()},
        "skipped": skipped,
        "trials": [],
    }
    began = time.monotonic()
    os.sched_setaffinity(0, {instrument.INSTRUMENT_CPU})
    with instrument.spinner():
        for row in turns(loads, tools, result["rounds"], options, result["real_time"]):
            result["trials"].append(row)
            save(result, options.json)
    result["took_s"] = time.monotonic() - began
    save(result, options.json)
    print(report(result))
    return 1 if any("failed" in row for row in result["trials"]) else 0


def turns(
    loads: dict[str, Case], tools: dict[str, Tool], rounds: int, options: argparse.Namespace, real_time: bool
):
    """The trials, load by load; within each round all tools meet the same load, in shuffled order."""
    rng = random.Random(options.seed)
    more = tuple(shlex.split(options.llmtap))
    for round_number in range(rounds):
        for name, case in loads.items():
            order = [tool for tool in tools.values() if case.streams or tool.open_loop]
            rng.shuffle(order)
            for tool in order:
                began = time.monotonic()
                seed = options.seed + round_number
                keep = options.keep and options.keep / f"{name}-{tool.name.split()[0]}-{round_number}"
                row = trial(tool, case, seed=seed, real_time=real_time, llmtap=more, keep=keep)
                took_s = time.monotonic() - began
                print(
                    f"{name}, round {round_number + 1}: {tool.name}: {brief(row)} ({took_s:.0f} s)",
                    file=sys.stderr,
                    flush=True,
                )
                yield {"case": name, "tool": tool.name, "round": round_number, "took_s": took_s, **row}


def brief(row: Json) -> str:
    if "failed" in row:
        return f"failed: {row['failed'].splitlines()[0]}"
    ttft, itl = row["error"]["ttft_p99_ms"], row["error"]["itl_p99_ms"]
    return f"TTFT p99 {ttft:+.1f} ms, ITL p99 {itl:+.1f} ms, {row['rps']:.1f} req/s"


def together(results: list[Json]) -> Json:
    """Several runs as one: the first's machine and date, the trials of all."""
    whole = dict(results[0])
    for name in ("cases", "tools", "skipped"):
        whole[name] = {key: value for result in reversed(results) for key, value in result[name].items()}
    whole["skipped"] = {name: why for name, why in whole["skipped"].items() if name not in whole["tools"]}
    whole["trials"] = [trial for result in results for trial in result["trials"]]
    whole["rounds"] = " + ".join(str(result["rounds"]) for result in results)
    whole["took_s"] = sum(result.get("took_s", 0) for result in results)
    return whole


def save(result: Json, path: Path | None) -> None:
    """After each trial: a run that is broken off is not lost."""
    RESULTS.mkdir(exist_ok=True)
    path = path or RESULTS / f"accuracy-{result['when'].replace(' ', '-').replace(':', '')}.json"
    path.write_text(json.dumps(result, indent=1))


def chosen(all_of_them: dict, names: str | None, option: str) -> dict:
    """Those named, whole or by their beginnings; all without a name."""
    if not names:
        return all_of_them
    found = set()
    for name in names.split(","):
        meant = {name} if name in all_of_them else {there for there in all_of_them if there.startswith(name)}
        if not meant:
            raise SystemExit(f"{option}: no {name!r}; there are {', '.join(all_of_them)}")
        found |= meant
    return {name: one for name, one in all_of_them.items() if name in found}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"one round of {QUICK_S:g} s each: does it work?"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12, help="of each load, default 12")
    parser.add_argument(
        "--cases", metavar="A,B", help="only loads whose names begin so, e.g. closed,open-240"
    )
    parser.add_argument("--only", metavar="A,B", help="only tools whose names begin so, e.g. llmtap,sse")
    parser.add_argument("--llmtap", default="", metavar="OPTIONS", help="for llmtap replay: --llmtap=--fresh")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: results/accuracy-DATE.json")
    parser.add_argument(
        "--report",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="only print the tables of saved results",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what tools and server wrote")
    parser.add_argument(
        "--install",
        nargs="+",
        default=[],
        choices=sorted(INSTALLERS),
        metavar="NAME",
        help=f"install and end: {', '.join(sorted(INSTALLERS))}",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
