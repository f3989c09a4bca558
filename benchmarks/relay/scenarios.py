"""What is asked of a target: five loads, and the figures drawn from each.

A scenario takes a running target and returns samples. A target of several processes gives more than one:
everything it runs, and each kind of process alone, because relaying and measuring are two costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from instrument import load
from running import Running, role_of


@dataclass(frozen=True, slots=True)
class Options:
    """How long and how hard; one round of one scenario."""

    seconds: float
    seed: int
    real_time: bool
    streams: int = 200
    itl_ms: int = 20  # 50 events/s per stream, a fast engine
    tokens: int = 250  # five seconds of answer at that pace
    gateway_streams: int = 5
    idle_streams: int = 2000
    short_concurrency: int = 32
    soak_minutes: float = 10


@dataclass(slots=True)
class Sample:
    """Figures of one target in one round. `whole` is False when a stream was lost or damaged."""

    target: str
    metrics: dict[str, float]
    whole: bool
    note: str = ""
    raw: list[dict] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    title: Callable[[Options], str]
    measure: Callable[[Running, Options], list[Sample]]
    streams: Callable[[Options], int]  # what a target must hold to take part


def _run(target: Running, options: Options, *arguments: object, seconds: float | None = None) -> dict:
    seconds = options.seconds if seconds is None else seconds
    rebuilt = ["--rebuilt", "--stamp-content"] if target.target.rebuilds_json else []
    return load(
        [*target.arguments(), *rebuilt, "--seed", str(options.seed), "--duration-s", str(seconds)]
        + [str(argument) for argument in arguments],
        real_time=options.real_time,
        within_s=seconds + 120,
    )


def _shares(result: dict) -> dict[str, dict[str, float]]:
    """CPU seconds and memory by role, for a target with several roles; {} for one that only relays."""
    roles: dict[str, dict[str, float]] = {}
    for process in result.get("target", {}).get("processes", ()):
        role = roles.setdefault(
            role_of(process["command"]), {"cpu_s": 0.0, "rss_kb": 0.0, "rss_kb_start": 0.0}
        )
        for key in role:
            role[key] += process[key]
    return roles if len(roles) > 1 else {}


def _quantiles(prefix: str, result: dict, histogram: str, *names: str) -> dict[str, float]:
    """Quantiles of one of the result's histograms; {} if it has no sample, for nothing is not 0 us."""
    found = result[histogram]
    return {f"{prefix}{name}_us": found[name] for name in names} if found["n"] else {}


def _waited(result: dict) -> dict[str, float]:
    """How long the target was ready to run while others had its CPU: how disturbed this run was."""
    if "target" not in result:
        return {}
    return {"cpu_waited_percent": 100 * result["target"]["cpu_wait_s"] / result["window_s"]}


def _note(result: dict) -> str:
    problems = []
    if not result["integrity"]["ok"]:
        problems.append(result["first_error"] or str(result["integrity"]))
    target = result.get("target")
    if target and abs(target["cpu_s"] - target["cpu_s_ticks"]) > 0.05 + 0.1 * target["cpu_s"]:
        problems.append(f"CPU by ticks {target['cpu_s_ticks']} s, by schedstat {target['cpu_s']:.2f} s")
    return "; ".join(problems)


def streaming(target: Running, options: Options, streams: int, *more: object) -> list[Sample]:
    """A load of streams. `more`: further arguments of sse_load."""
    shape = ("--concurrency", streams, "--itl-ms", options.itl_ms, "--tokens", options.tokens)
    result = _run(target, options, *shape, "--warmup-s", 1.5, "--drain-s", 0.2, *more)
    events = result["events"]
    metrics = {
        "events_per_s": result["events_per_s"],
        "kept_pace": result["events_per_s"] / (streams * 1000 / options.itl_ms),
        **_quantiles("", result, "latency_us", "p50", "p90", "p99", "p99.9", "max"),
        **_quantiles("gap_error_", result, "gap_error_us", "p50", "p99"),
        **_quantiles("first_event_", result, "first_event_us", "p50"),
        **_waited(result),
    }
    if "target" in result and events:
        metrics["cpu_us_per_event"] = result["target"]["us_per_event"]
    samples = [Sample(target.target.name, metrics, result["integrity"]["ok"], _note(result), [result])]
    for role, share in _shares(result).items():
        if role != "supervisor" and events:
            cost = {"cpu_us_per_event": share["cpu_s"] * 1e6 / events}
            samples.append(Sample(f"{target.target.name}: {role} alone", cost, samples[0].whole))
    return samples


def paced(target: Running, options: Options) -> list[Sample]:
    """Many streams at a chat engine's pace: what an event costs, and when it arrives."""
    return streaming(target, options, options.streams)


def gateway(target: Running, options: Options) -> list[Sample]:
    """A load that even a slow gateway keeps. All have their stamps in the text, so all carry the same."""
    return streaming(target, options, options.gateway_streams, "--stamp-content", "--rebuilt")


def short(target: Running, options: Options) -> list[Sample]:
    """Small answers in one piece: what a request costs when all are busy, and adds when all is quiet."""
    common = ("--no-stream", "--warmup-s", 0.7, "--drain-s", 0.2)
    quiet = _run(target, options, *common, "--concurrency", 1, seconds=options.seconds / 2)
    busy = _run(target, options, *common, "--concurrency", options.short_concurrency)
    metrics = {
        "requests_per_s": busy["requests_per_s"],
        **_quantiles("busy_", busy, "request_us", "p50", "p99"),
        **_quantiles("quiet_", quiet, "request_us", "p50", "p99"),
        **_waited(busy),
    }
    if "target" in busy and busy["requests"]:
        metrics["cpu_us_per_request"] = busy["target"]["us_per_request"]
    whole = busy["integrity"]["ok"] and quiet["integrity"]["ok"]
    samples = [Sample(target.target.name, metrics, whole, _note(busy) or _note(quiet), [quiet, busy])]
    for role, share in _shares(busy).items():
        if role != "supervisor" and busy["requests"]:
            cost = {"cpu_us_per_request": share["cpu_s"] * 1e6 / busy["requests"]}
            samples.append(Sample(f"{target.target.name}: {role} alone", cost, whole))
    return samples


def idle(target: Running, options: Options) -> list[Sample]:
    """Streams that are open and silent: memory over that of the same process before they came."""
    if target.pid is None:
        return []
    streams = options.idle_streams
    # What is allocated once, at the first requests, is not a stream's.
    warm = ("--concurrency", 16, "--tokens", 20, "--itl-ms", 1, "--warmup-s", 0)
    _run(target, options, *warm, "--drain-s", 1, seconds=0.5)
    time.sleep(0.5)
    result = _run(target, options, "--hold", streams, seconds=min(options.seconds, 3))
    held = result["held"]

    def memory(of: dict) -> dict[str, float]:
        grown_kb = of["rss_kb"] - of["rss_kb_start"]
        return {
            "kb_per_stream": grown_kb / held if held else float("nan"),
            "idle_mb": of["rss_kb_start"] / 1024,
            "held_mb": of["rss_kb"] / 1024,
            "streams": held,
        }

    whole = result["integrity"]["ok"] and held == streams
    note = _note(result) or ("" if held == streams else f"only {held} of {streams} streams opened")
    samples = [Sample(target.target.name, memory(result["target"]), whole, note, [result])]
    for role, share in _shares(result).items():
        samples.append(Sample(f"{target.target.name}: {role} alone", memory(share), whole))
    return samples


def soak(target: Running, options: Options) -> list[Sample]:
    """The paced load for long: does memory settle?

    One load run after the other on the same target, so that memory is read between them as well as within.
    """
    if target.pid is None:
        return []
    slices = max(3, round(options.soak_minutes * 2))  # of half a minute
    slice_s = options.soak_minutes * 60 / slices
    shape = ("--concurrency", options.streams, "--itl-ms", options.itl_ms, "--tokens", options.tokens)
    results = [_run(target, options, *shape, "--warmup-s", 1, seconds=slice_s) for _ in range(slices)]
    rss_mb = [result["target"]["rss_kb"] / 1024 for result in results]
    settled = rss_mb[len(rss_mb) // 3 :]
    minutes = slice_s / 60 * max(1, len(settled) - 1)
    metrics = {
        "first_mb": rss_mb[0],
        "last_mb": rss_mb[-1],
        "max_mb": max(rss_mb),
        "growth_kb_per_min": (settled[-1] - settled[0]) * 1024 / minutes,
        "p99_us": max(result["latency_us"]["p99"] for result in results),
        "cpu_us_per_event": results[-1]["target"]["us_per_event"],
    }
    notes = "; ".join(filter(None, map(_note, results)))
    whole = all(result["integrity"]["ok"] for result in results)
    samples = [Sample(target.target.name, metrics, whole, notes, results)]
    for role, share in _shares(results[-1]).items():
        first_kb = _shares(results[0]).get(role, share)["rss_kb"]
        memory = {"first_mb": first_kb / 1024, "last_mb": share["rss_kb"] / 1024}
        samples.append(Sample(f"{target.target.name}: {role} alone", memory, whole))
    return samples


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "paced",
            lambda o: f"{o.streams} streams at {1000 // o.itl_ms} events/s each",
            paced,
            lambda o: o.streams,
        ),
        Scenario(
            "short",
            lambda o: f"short requests: {o.short_concurrency} callers for CPU, 1 for added latency",
            short,
            lambda o: 1,
        ),
        Scenario("idle", lambda o: f"{o.idle_streams} open, silent streams", idle, lambda o: o.idle_streams),
        Scenario(
            "gateway",
            lambda o: (
                f"{o.gateway_streams} streams at {1000 // o.itl_ms} events/s each, a load every gateway keeps"
            ),
            gateway,
            lambda o: o.gateway_streams,
        ),
        Scenario(
            "soak", lambda o: f"the paced load for {o.soak_minutes:g} minutes", soak, lambda o: o.streams
        ),
    )
}
