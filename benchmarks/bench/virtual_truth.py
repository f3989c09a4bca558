"""What an engine does by itself, in virtual time: the truths that `planted.py` plants and cannot write down.

A server whose tokens are due at known times has known percentiles; an engine with a queue has none in closed
form. The engine of `llmtap sim serve` is the one that is played here, over many more requests than a test
sends, without a network, a clock or a load generator. Times are in seconds.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from llmtap.metrics.saturation import jain_readings
from llmtap.metrics.statistics import percentile
from llmtap.sim.engine import Engine, run_virtual
from llmtap.sim.model_options import ServingSetup, read_model_options, read_serving
from llmtap.sim.schedulers.registry import SCHEDULERS
from llmtap.workload.requests import Requests

NS = 1_000_000_000
MANY = 5_000
"""Requests of a stream that stands for an endless one."""


@dataclass(frozen=True, slots=True)
class Shape:
    """An engine, and what it is asked: tokens of each prompt and answer, and what share is like that."""

    scheduler: str
    serving: Mapping[str, str]
    classes: Sequence[tuple[float, int, int]]


@dataclass(slots=True)
class _Times:
    """When each token of each request left."""

    tokens: dict[int, Sequence[int]] = field(default_factory=dict)

    def ended(self, request: int, token_ns: Sequence[int], end_ns: int, *, served: bool) -> None:
        if served:
            self.tokens[request] = list(token_ns)


def _played(shape: Shape, arrival_ns: Sequence[int]) -> tuple[dict[int, Sequence[int]], list[int]]:
    """When the tokens of each request left, and of which class it is."""
    random = Random("planted")
    weights = [share for share, _, _ in shape.classes]
    kinds = random.choices(range(len(weights)), weights, k=len(arrival_ns))
    made = array("q", [shape.classes[kind][2] for kind in kinds])
    given = array("q", [shape.classes[kind][1] for kind in kinds])
    requests = Requests(array("q", arrival_ns), given, made, array("q", made))
    setup = ServingSetup(readings=read_model_options({}), serving=read_serving(dict(shape.serving)))
    times = _Times()
    run_virtual(requests, Engine(SCHEDULERS[shape.scheduler].build(requests, setup)), watch=times)
    return times.tokens, kinds


def _arrivals(rate_rps: float, count: int, *, poisson: bool) -> list[int]:
    random, at, found = Random("arrivals"), 0.0, []
    for _ in range(count):
        at += random.expovariate(rate_rps) if poisson else 1 / rate_rps
        found.append(round(at * NS))
    return found


def backlog_rps(shape: Shape, count: int = 2_000) -> float:
    """Requests per second of an engine for which there is always one waiting."""
    tokens, _ = _played(shape, [0] * count)
    return count / max(times[-1] for times in tokens.values()) * NS


def ttfts(
    shape: Shape, rate_rps: float, *, count: int = MANY, poisson: bool = True
) -> dict[int, list[float]]:
    """TTFT of a stream of requests, ascending, by the index of the class."""
    arrivals = _arrivals(rate_rps, count, poisson=poisson)
    tokens, kinds = _played(shape, arrivals)
    found: dict[int, list[float]] = {kind: [] for kind in range(len(shape.classes))}
    for request, times in tokens.items():
        found[kinds[request]].append((times[0] - arrivals[request]) / NS)
    return {kind: sorted(values) for kind, values in found.items()}


def gaps(shape: Shape, rate_rps: float, *, count: int = MANY) -> list[float]:
    """Times between tokens, ascending."""
    tokens, _ = _played(shape, _arrivals(rate_rps, count, poisson=True))
    return sorted((later - earlier) / NS for times in tokens.values() for earlier, later in pairwise(times))


def knee(shape: Shape, rates: Sequence[float], seconds: float) -> float | None:
    """The lowest of these rates, evenly spaced and for so long, with a TTFT P99 above twice the smallest of
    all (5.3.4)."""
    p99s = []
    for rate in rates:
        found = percentile(ttfts(shape, rate, count=round(rate * seconds), poisson=False)[0], 0.99)
        assert found is not None
        p99s.append(found)
    return next((rate for rate, p99 in zip(rates, p99s, strict=True) if p99 > 2 * min(p99s)), None)


def jain(shape: Shape, rate_rps: float, alone_rps: Sequence[float]) -> tuple[float, dict[int, float]]:
    """Jain's index by class, and each class's inflation at P50, of endless streams."""
    alone = {}
    for kind, (one, rate) in enumerate(zip(shape.classes, alone_rps, strict=True)):
        single = Shape(shape.scheduler, shape.serving, [(1.0, *one[1:])])
        alone[kind] = ttfts(single, rate)[0]
    return compared(ttfts(shape, rate_rps), alone)


def compared(
    mixed: Mapping[int, Sequence[float]], alone: Mapping[int, Sequence[float]]
) -> tuple[float, dict[int, float]]:
    """The same of TTFTs by class, ascending."""
    middle = {kind: _median(values) for kind, values in alone.items()}
    read = jain_readings(
        {str(kind): list(values) for kind, values in mixed.items()}, {str(k): m for k, m in middle.items()}
    )
    assert read.per_class is not None
    return read.per_class, {kind: _median(values) / middle[kind] for kind, values in mixed.items()}


def _median(values: Sequence[float]) -> float:
    found = percentile(values, 0.5)
    assert found is not None
    return found
