#!/usr/bin/env python3
"""The relay beside other proxies: what a streamed event costs, how late it comes, what an open stream weighs.

Rounds are interleaved and shuffled: each round runs every scenario, and in it every target, freshly started
and alone on its CPU, in an order of its own. See README.md for what is measured and what limits it.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import instrument
from install import INSTALLERS
from report import Round, markdown, terminal, write_results
from running import NotReady, running
from scenarios import SCENARIOS, Options, Sample
from targets import TARGETS, add_other_llmtap, installed, version_command

RESULTS = Path(__file__).resolve().parent / "results"
USUAL = ["paced", "short", "idle", "gateway"]  # all but the soak


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(TARGETS)
    parser.add_argument("--only", metavar="TARGET,..", help=f"these targets: {names}")
    parser.add_argument(
        "--other", type=Path, metavar="PROGRAM", help="an llmtap of another commit, as target llmtap-other"
    )
    parser.add_argument(
        "--scenario", metavar="NAME,..", help=f"of {', '.join(SCENARIOS)}; default all but soak"
    )
    parser.add_argument("--rounds", type=int, help="default 5; a soak has 1")
    parser.add_argument("--seconds", type=float, default=5, help="measured per run (default 5)")
    parser.add_argument("--quick", action="store_true", help="1 round of 2 seconds: does it all work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result as JSON there, too")
    parser.add_argument(
        "--install", action="append", choices=INSTALLERS, help="install a gateway first; needs a network"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of the order of runs and of the load (default 1)"
    )
    load = parser.add_argument_group("load")
    load.add_argument("--streams", type=int, default=200, help="of the paced load (default 200)")
    load.add_argument("--gateway-streams", type=int, default=5, help="of the gateway load (default 5)")
    load.add_argument("--idle-streams", type=int, default=2000, help="held open, silent (default 2000)")
    load.add_argument("--soak-minutes", type=float, default=10)
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--meter-cpu",
        type=int,
        default=instrument.TARGET_CPU,
        help="CPU of llmtap's meter process (default 0, that of the relay: all its work on one CPU)",
    )
    machine.add_argument("--no-spin", action="store_true", help="let the CPUs go idle between events")
    machine.add_argument("--no-real-time", action="store_true", help="server and client at ordinary priority")
    return parser.parse_args()


def chosen(text: str | None, known: dict, usual: list[str], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",")] if text else usual
    for name in names:
        if name not in known:
            say(f"unknown {what} {name!r}\nhint: one of {', '.join(known)}")
            raise SystemExit(2)
    return names


def present(names: list[str]) -> list[str]:
    """Those that can run here; says why the others cannot."""
    found = []
    for name in names:
        reason = installed(TARGETS[name])
        if reason:
            say(f"skipped {name}: {reason}")
        else:
            found.append(name)
    return found


def version_of(name: str) -> str | None:
    command = version_command(TARGETS[name])
    if not command:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[0] if lines and done.returncode == 0 else "unknown"


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def about_this_run(names: list[str], arguments: argparse.Namespace, real_time: bool) -> dict:
    facts: dict[str, object] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{cpu_model()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "load average before": ", ".join(f"{load:.1f}" for load in os.getloadavg()),
        "instrument": "real-time priority" if real_time else "ordinary priority",
        "CPUs kept awake": "no" if arguments.no_spin else "yes",
        "llmtap's meter on CPU": arguments.meter_cpu,
        "seconds per run": arguments.seconds,
        "seed": arguments.seed,
    }
    return facts | {name: version for name in names if (version := version_of(name))}


def headline(sample: Sample) -> str:
    """A run in a few words, for the progress."""
    shown = {
        "cpu_us_per_event": "{:.1f} us CPU/event",
        "p50_us": "p50 {:.0f} us",
        "p99_us": "p99 {:.0f} us",
        "cpu_us_per_request": "{:.1f} us CPU/request",
        "quiet_p50_us": "quiet p50 {:.0f} us",
        "kb_per_stream": "{:.1f} KiB/stream",
        "growth_kb_per_min": "{:+.1f} KiB/min",
    }
    figures = [text.format(sample.metrics[key]) for key, text in shown.items() if key in sample.metrics]
    if sample.metrics.get("kept_pace", 1) < 0.98:
        figures.append(f"kept {sample.metrics['kept_pace']:.0%} of the pace")
    return ", ".join(figures) + (f"  ! {sample.note}" if sample.note else "")


def measure(name: str, scenario: str, options: Options, upstream: int, meter_cpu: int) -> list[Sample] | None:
    """One run on a fresh target. None: it failed, and says why; the others go on."""
    try:
        with running(TARGETS[name], upstream, meter_cpu=meter_cpu) as target:
            return SCENARIOS[scenario].measure(target, options)
    except (NotReady, instrument.LoadFailed, subprocess.TimeoutExpired) as error:
        say(f"  ! {error}")
        return None


def main() -> int:
    arguments = read_arguments()
    for name in arguments.install or ():
        say(f"installing {name}")
        INSTALLERS[name]()
    if arguments.quick:
        arguments.seconds = 2
    if (os.cpu_count() or 1) < 2:
        raise SystemExit("this takes two CPUs: one for the target, one for server and client")

    if arguments.other:
        add_other_llmtap(arguments.other)
    scenarios = chosen(arguments.scenario, SCENARIOS, USUAL, "scenario")
    names = present(chosen(arguments.only, TARGETS, list(TARGETS), "target"))
    rounds_wanted = arguments.rounds or (1 if arguments.quick or scenarios == ["soak"] else 5)
    instrument.compile_all()
    real_time = not arguments.no_real_time and instrument.real_time_allowed()
    if not real_time:
        say("server and client run at ordinary priority: latencies hold more of this machine's own delays")
    about = about_this_run(names, arguments, real_time)
    dice = random.Random(arguments.seed)
    rounds: list[Round] = []
    failures = 0
    started = time.monotonic()

    def options_of(number: int) -> Options:
        return Options(
            seconds=arguments.seconds,
            seed=arguments.seed * 1000 + number,
            real_time=real_time,
            streams=arguments.streams,
            gateway_streams=arguments.gateway_streams,
            idle_streams=arguments.idle_streams,
            soak_minutes=arguments.soak_minutes,
        )

    options = options_of(0)
    for scenario in scenarios:
        for name in names:
            limit = TARGETS[name].streams_max
            if limit is not None and SCENARIOS[scenario].streams(options) > limit:
                say(f"{scenario}: without {name}, which is measured with up to {limit} streams")

    # A killed run takes down what it started as an ended one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with (
        nullcontext() if arguments.no_spin else instrument.spinner(),
        instrument.server(real_time) as upstream,
    ):
        for number in range(1, rounds_wanted + 1):
            options = options_of(number)
            for scenario in scenarios:
                streams = SCENARIOS[scenario].streams(options)
                able = [n for n in names if (TARGETS[n].streams_max or streams) >= streams]
                for name in dice.sample(able, len(able)):
                    samples = measure(name, scenario, options, upstream, arguments.meter_cpu)
                    failures += samples is None
                    rounds += [Round(number, scenario, sample) for sample in samples or ()]
                    for sample in samples or ():
                        at = f"{time.monotonic() - started:5.0f} s  {number}/{rounds_wanted} {scenario:8}"
                        say(f"{at} {sample.target:24} {headline(sample)}")

    titles = {scenario: f"{scenario}: {SCENARIOS[scenario].title(options)}" for scenario in scenarios}
    print(terminal(titles, rounds, names))
    page = markdown(titles, rounds, names, about)
    stem = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    path = write_results(RESULTS, stem, page, rounds, about)
    if arguments.json:
        arguments.json.write_text(path.read_text())
    say(f"\n{path.with_suffix('.md')}\n{path}")
    return 0 if rounds and not failures and all(entry.sample.whole for entry in rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
