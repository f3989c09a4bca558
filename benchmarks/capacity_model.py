#!/usr/bin/env python3
"""What a million concurrent streams would take: measured costs, times how much of each there is.

    .venv/bin/python benchmarks/capacity_model.py [--streams 1000000] [--events 20] [--json FILE]

Inputs are figures that benchmarks of this repository measured: of their newest results where there are
some, else those that are published in their READMEs, with file and date. Each has a range; the interval of
an output is what its inputs' ranges make of it, all at their best and all at their worst. It is arithmetic,
and no test of a million streams: what does not grow in proportion (a switch, a scheduler, a Prometheus) is
not in it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from llmtap.vantage.relay.options import RelayOptions

HERE = Path(__file__).resolve().parent
PORTS = 60_999 - 32_768 + 1
"""Of one source address to one upstream address: Linux's default net.ipv4.ip_local_port_range."""
WIRE_BYTES = 14 + 20 + 32 + 6
"""Around an event that travels alone: Ethernet, IPv4, TCP with time stamps, the chunk's own framing."""
FILES_OF_A_STREAM = 2
KIB_OF_A_GIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured figure with its range, and where it stands."""

    low: float
    mid: float
    high: float
    source: str
    date: str

    @classmethod
    def exact(cls, value: float, source: str, date: str) -> Figure:
        return cls(value, value, value, source, date)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What was measured."""

    relay_us: Figure
    """CPU of a relay for an event."""
    meter_us: Figure
    relay_kib: Figure
    """Memory of a relay for an open stream."""
    meter_kib: Figure
    proxy_mib: Figure
    """Of a proxy without streams: supervisor, one relay, meter."""
    relay_mib: Figure
    """Of each further relay without streams."""
    event_bytes: Figure
    """Of an event's payload."""
    series: Figure
    """In an exposition, for each pair of tenant and model."""


_RELAY, _DAY = "benchmarks/relay/README.md", "2026-11-22"
PUBLISHED = Inputs(
    relay_us=Figure(33.4, 39.8, 48.0, _RELAY, _DAY),
    meter_us=Figure(11.4, 15.0, 17.2, _RELAY, _DAY),
    relay_kib=Figure(2.6, 2.7, 2.8, _RELAY, _DAY),
    # All of llmtap less its relay, each with its own range.
    meter_kib=Figure(9.7 - 2.8, 9.8 - 2.7, 9.8 - 2.6, _RELAY, _DAY),
    proxy_mib=Figure.exact(125.4, _RELAY, _DAY),
    relay_mib=Figure.exact(27.9, _RELAY, _DAY),
    event_bytes=Figure.exact(250, _RELAY, _DAY),
    series=Figure.exact(832_000 / 2_000, "benchmarks/meter/README.md", "2026-11-21"),
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is asked for."""

    streams: float = 1_000_000
    events_per_s: float = 20
    """Events per second of a stream: 20 tokens/s, one per event, is the pace of a fast reader."""
    busy: float = 0.6
    """Share of a core that is planned to be used: the rest is for bursts, and for those that fail."""
    pairs: float = 50
    """Of tenant and model, seen by each proxy."""


@dataclass(frozen=True, slots=True)
class Need:
    """One line of the answer."""

    what: str
    low: float
    mid: float
    high: float
    formula: str
    digits: int = 0

    def text(self) -> str:
        mid, low, high = (f"{value:,.{self.digits}f}" for value in (self.mid, self.low, self.high))
        return mid if low == high else f"{mid} ({low} to {high})"


def needs(scenario: Scenario, inputs: Inputs, streams_max: int = RelayOptions().streams) -> list[Need]:
    """What the scenario takes. `streams_max`: of a worker, by its options."""
    lines = [
        _needs(scenario, {name: getattr(getattr(inputs, name), end) for name in _NAMES}, streams_max)
        for end in ("low", "mid", "high")
    ]
    return [
        Need(what, *sorted_ends(*(line[what] for line in lines)), _FORMULAS[what][0], _FORMULAS[what][1])
        for what in _FORMULAS
    ]


_NAMES = tuple(field.name for field in fields(Inputs))
_FORMULAS = {
    "events/s": ("streams x events/s of each", 0),
    "relay cores at 100 % load": ("events/s x relay CPU per event", 0),
    "meter cores at 100 % load": ("events/s x meter CPU per event", 0),
    "workers": ("the larger of relay cores / busy, and streams / relay.streams", 0),
    "workers per meter": ("relay CPU per event / meter CPU per event, rounded down, at least 1", 0),
    "proxies, each with one meter": ("workers / workers per meter, rounded up", 0),
    "cores": ("(relay cores + meter cores) / busy", 0),
    "memory, GiB": ("streams x (KiB in relay + KiB in meter) + base memory of all processes", 0),
    "open files": ("2 for each stream", 0),
    "source addresses": ("streams / 28,232 ports, for each upstream address", 0),
    "network, each direction, Gbit/s": ("events/s x (event + 72 bytes) x 8", 1),
    "series to scrape": ("proxies x pairs of tenant and model x series per pair", 0),
    "series after recording rules": ("pairs x series per pair, summed over proxies", 0),
}


def _needs(s: Scenario, of: Mapping[str, float], streams_max: int) -> dict[str, float]:
    events = s.streams * s.events_per_s
    relay_cores, meter_cores = (events * of[name] / 1e6 for name in ("relay_us", "meter_us"))
    by_limit = s.streams / streams_max
    workers = math.ceil(max(relay_cores / s.busy, by_limit))
    to_a_meter = max(1, math.floor(of["relay_us"] / of["meter_us"]))
    proxies = math.ceil(workers / to_a_meter)
    empty_mib = proxies * of["proxy_mib"] + max(0, workers - proxies) * of["relay_mib"]
    memory_kib = s.streams * (of["relay_kib"] + of["meter_kib"]) + empty_mib * 1024
    return {
        "events/s": events,
        "relay cores at 100 % load": relay_cores,
        "meter cores at 100 % load": meter_cores,
        "workers": workers,
        "workers per meter": to_a_meter,
        "proxies, each with one meter": proxies,
        "cores": (relay_cores + meter_cores) / s.busy,
        "memory, GiB": memory_kib / KIB_OF_A_GIB,
        "open files": s.streams * FILES_OF_A_STREAM,
        "source addresses": math.ceil(s.streams / PORTS),
        "network, each direction, Gbit/s": events * (of["event_bytes"] + WIRE_BYTES) * 8 / 1e9,
        "series to scrape": proxies * s.pairs * of["series"],
        "series after recording rules": s.pairs * of["series"],
    }


def sorted_ends(low: float, mid: float, high: float) -> tuple[float, float, float]:
    """Low inputs do not always make low outputs."""
    return min(low, mid, high), mid, max(low, mid, high)


# ---------------------------------------------------------------- what was measured last


def measured(root: Path = HERE) -> Inputs:
    """PUBLISHED, and in its place what the newest results below `root` hold, of `relay` and of `scaling`."""
    inputs = PUBLISHED
    for folder, read in (("relay", _of_relay), ("scaling", _of_scaling)):
        found = sorted((root / folder / "results").glob("*.json"))
        for path in reversed(found):
            newer = read(json.loads(path.read_text()), f"benchmarks/{folder}/results/{path.name}")
            if newer:
                inputs = replace(inputs, **newer)
                break
    return inputs


def _of_scaling(document: Mapping[str, Any], source: str) -> dict[str, Figure]:
    """Of two workers: what an event costs; of live streams: what they weigh."""
    date = str(document["about"]["date"])
    two = document["figures"]["two"]
    found = {
        name: Figure(two[key]["min"], two[key]["median"], two[key]["max"], source, date)
        for name, key in (("relay_us", "relay_us_per_event"), ("meter_us", "meter_us_per_event"))
    }
    for role, name in (("relay", "relay_kib"), ("meter", "meter_kib")):
        kib = (document.get("live") or {}).get(f"{role}_kib")
        if kib is not None:
            found[name] = Figure.exact(kib, source, date)
    return found


def _of_relay(document: Mapping[str, Any], source: str) -> dict[str, Figure]:
    """Of llmtap's rows in `paced` and `idle`."""
    date = str(document["about"]["date"])
    found: dict[str, Figure] = {}

    def values(scenario: str, target: str, metric: str) -> list[float]:
        rows = (one for one in document["rounds"] if one["scenario"] == scenario)
        samples = (one["sample"] for one in rows)
        return sorted(
            s["metrics"][metric] for s in samples if s["target"] == target and metric in s["metrics"]
        )

    for name, scenario, target, metric in (
        ("relay_us", "paced", "llmtap: relay alone", "cpu_us_per_event"),
        ("meter_us", "paced", "llmtap: meter alone", "cpu_us_per_event"),
        ("relay_kib", "idle", "llmtap: relay alone", "kb_per_stream"),
        ("meter_kib", "idle", "llmtap: meter alone", "kb_per_stream"),
        ("proxy_mib", "idle", "llmtap", "idle_mb"),
        ("relay_mib", "idle", "llmtap: relay alone", "idle_mb"),
    ):
        told = values(scenario, target, metric)
        if told:
            found[name] = Figure(told[0], told[len(told) // 2], told[-1], source, date)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = Scenario()
    parser.add_argument("--streams", type=float, default=usual.streams)
    parser.add_argument("--events", type=float, default=usual.events_per_s, help="a second, of each stream")
    parser.add_argument("--busy", type=float, default=usual.busy, help="share of a core to plan with")
    parser.add_argument("--pairs", type=float, default=usual.pairs, help="of tenant and model")
    parser.add_argument(
        "--published", action="store_true", help="the READMEs' figures, whatever was measured"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if not (
        arguments.streams > 0 and arguments.events >= 0 and 0 < arguments.busy <= 1 and arguments.pairs >= 0
    ):
        parser.error("streams are above 0, events and pairs not below, and a core is busy from above 0 to 1")
    scenario = Scenario(arguments.streams, arguments.events, arguments.busy, arguments.pairs)
    inputs = PUBLISHED if arguments.published else measured()
    found = needs(scenario, inputs)
    print(
        f"{scenario.streams:,.0f} streams of {scenario.events_per_s:g} events/s,"
        f" cores {scenario.busy:.0%} busy, {scenario.pairs:g} pairs\n"
    )
    print("| input | measured | from |\n|---|---|---|")
    for name in _NAMES:
        one: Figure = getattr(inputs, name)
        print(f"| {name} | {one.mid:.4g} ({one.low:.4g} to {one.high:.4g}) | {one.source}, {one.date} |")
    print("\n| resource | amount | calculation |\n|---|---:|---|")
    for need in found:
        print(f"| {need.what} | {need.text()} | {need.formula} |")
    if arguments.json:
        told = {"scenario": asdict(scenario), "inputs": asdict(inputs), "needs": [asdict(n) for n in found]}
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
