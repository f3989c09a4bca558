"""Runs of one and two workers -> what scaling keeps, how even the spread is, how many one meter takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

KEPT_MIN = 0.9
"""Events per CPU second of two workers, of those of one: the project's goal."""
PACE_MIN = 0.98


@dataclass(frozen=True, slots=True)
class Worker:
    """One relay over one run's window."""

    cpu: int
    cpu_s: float
    events: float
    connections: int

    @property
    def us_per_event(self) -> float:
        return self.cpu_s * 1e6 / max(1.0, self.events)


@dataclass(frozen=True, slots=True)
class Run:
    """One proxy under load."""

    workers: Sequence[Worker]
    meter_cpu_s: float
    events: int
    wanted: float
    """Events that the pace asks for."""
    window_s: float
    p50_us: float
    p99_us: float
    waited_s: float
    """For how long its processes could have run, and others did."""
    unmeasured: int
    whole: bool

    @property
    def kept(self) -> float:
        return self.events / self.wanted

    @property
    def events_per_cpu_s(self) -> float:
        """Of the relays alone: what a core that did nothing else would carry."""
        return self.events / sum(worker.cpu_s for worker in self.workers)

    @property
    def meter_us_per_event(self) -> float:
        return self.meter_cpu_s * 1e6 / max(1, self.events)


@dataclass(frozen=True, slots=True)
class Spread:
    """How connections fell to two workers, over all rounds."""

    first: int
    second: int

    @property
    def share(self) -> float:
        """Of the worker that has fewer."""
        return min(self.first, self.second) / max(1, self.first + self.second)

    @property
    def z(self) -> float:
        """How far off even it is, in standard deviations of fair coins."""
        n = self.first + self.second
        return abs(self.first - self.second) / sqrt(n) if n else 0.0


def scaling(single: Sequence[Run], two: Run) -> float:
    """Events per CPU second of two workers, of what the single ones show of the same CPUs.

    A worker beside the instrument pays for cold caches, alone as well as in a pair; so each worker's events
    are priced at what the single one on its CPU needed for one.
    """
    price = {run.workers[0].cpu: run.workers[0].us_per_event for run in single}
    expected_s = sum(worker.events * price[worker.cpu] for worker in two.workers) / 1e6
    return expected_s / sum(worker.cpu_s for worker in two.workers)


def report(
    rounds: Sequence[Mapping[str, Run]],
    live: Mapping[str, float] | None,
    about: Mapping[str, Any],
    console: Console,
) -> dict[str, Any]:
    """Tables, and the same as JSON. `rounds`: set-up -> run; all but `two` have one worker."""
    kept = [scaling([run for name, run in one.items() if name != "two"], one["two"]) for one in rounds]
    table = Table(
        "set-up", "events/s", "us per event", "events per CPU second", "meter us/event", "p50, p99 us"
    )
    figures: dict[str, Any] = {}
    for name in sorted(rounds[0]):
        runs = [one[name] for one in rounds]
        relay_us = [1e6 / run.events_per_cpu_s for run in runs]
        meter_us = [run.meter_us_per_event for run in runs]
        rates = [run.events / run.window_s for run in runs]
        figures[name] = {
            "relay_us_per_event": _spread(relay_us),
            "meter_us_per_event": _spread(meter_us),
            "events_per_s": _spread(rates),
            "events_per_cpu_s": _spread([run.events_per_cpu_s for run in runs]),
            "kept_pace": _spread([run.kept for run in runs]),
            "p50_us": _spread([run.p50_us for run in runs]),
            "p99_us": _spread([run.p99_us for run in runs]),
        }
        table.add_row(
            name,
            f"{median(rates):,.0f}",
            _text(relay_us, 1),
            _text([run.events_per_cpu_s for run in runs], 0),
            _text(meter_us, 1),
            f"{median(run.p50_us for run in runs):,.0f}, {median(run.p99_us for run in runs):,.0f}",
        )
    console.print(table)
    spread = Spread(*(sum(one["two"].workers[i].connections for one in rounds) for i in (0, 1)))
    shares = [
        min(w.connections for w in one["two"].workers)
        / max(1, sum(w.connections for w in one["two"].workers))
        for one in rounds
    ]
    ratio = [run.meter_us_per_event * run.events_per_cpu_s / 1e6 for one in rounds for run in one.values()]
    workers_per_meter = [1 / one for one in ratio if one]
    console.print(f"kept from one worker to two: {_text(kept, 3)} of events per CPU second; goal {KEPT_MIN}")
    console.print(
        f"connections: {spread.first:,} and {spread.second:,}, {spread.z:.1f} deviations of fair coins"
        f" off even; the smaller share of a round {_text(shares, 2)}"
    )
    console.print(
        f"relays that one meter keeps up with, each with a core filled: {_text(workers_per_meter, 1)}"
    )
    if live:
        told = ", ".join(f"{key.removesuffix('_kib')} {v:.1f} KiB" for key, v in live.items() if "kib" in key)
        console.print(f"a live stream of {live['events']:.0f} events: {told}")
    everything = [run for one in rounds for run in one.values()]
    wrong = []
    if not all(run.whole for run in everything):
        wrong.append("a stream was damaged")
    if median(kept) < KEPT_MIN:
        wrong.append(
            f"two workers keep {median(kept):.2f} of one's events per CPU second, less than {KEPT_MIN}"
        )
    slow = sum(run.kept < PACE_MIN for run in everything)
    if slow:
        console.print(f"{slow} of {len(everything)} runs kept less than {PACE_MIN:.0%} of their pace")
    lost = sum(run.unmeasured for run in everything)
    if lost:
        console.print(f"{lost:,} exchanges went unmeasured, counted")
    for complaint in wrong:
        console.print(f"WRONG: {complaint}", highlight=False)
    return {
        "about": dict(about),
        "ok": not wrong,
        "wrong": wrong,
        "kept": _spread(kept),
        "figures": figures,
        "connections": asdict(spread) | {"z": spread.z, "smaller_share": _spread(shares)},
        "workers_per_meter": _spread(workers_per_meter),
        "live": dict(live) if live else None,
        "rounds": [{name: asdict(run) for name, run in one.items()} for one in rounds],
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def _text(values: Sequence[float], digits: int) -> str:
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"
