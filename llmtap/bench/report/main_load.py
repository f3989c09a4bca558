"""The load that stands for a test where a report has room for one (C.1).

It is what the test is about: of a search the highest level that held, of shares of capacity the highest, of
classes the mix, of configurations the one that others are compared with. A load by which a test only looked
for capacity stands for nothing.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from llmtap.bench.compliance.evidence import Step, at, measured, name_of
from llmtap.bench.compliance.requirement import Report

__all__ = ["main_load"]

_Rule = Callable[[Report, Sequence[Step]], Step | None]


def main_load(report: Report) -> Step | None:
    """Of one test: one that was answered, if any was; None where it has no load."""
    loads = [load for load in measured(report) if at(load, "result.metrics.ttft.n")] or measured(report)
    rule = _RULES.get(str(report.get("test")))
    chosen = None if rule is None else rule(report, loads)
    plain = [load for load in loads if not load.get("arm")] or loads
    return chosen or max(plain, key=lambda load: at(load, "result.n") or 0, default=None)


def _called(name: str) -> _Rule:
    return lambda report, loads: next((load for load in loads if name_of(load) == name), None)


def _greatest(pattern: str) -> _Rule:
    """The load with the greatest number in its name."""

    def rule(report: Report, loads: Sequence[Step]) -> Step | None:
        named = [(found, load) for load in loads if (found := re.fullmatch(pattern, name_of(load)))]
        return max(named, key=lambda one: float(one[0][1]))[1] if named else None

    return rule


def _highest_held(report: Report, loads: Sequence[Step]) -> Step | None:
    """Of the levels that held, or kept up where nothing was to be held; of none, the lowest."""
    told: Mapping[str, Any] = at(report, "measurements") or {}
    limit = told.get("limit")
    tried = [(level, one) for one in told.get("levels") or () if (level := _level(one)) is not None]
    held = [(level, one) for level, one in tried if _holds(one) and (limit is None or level < limit)]
    if not tried:
        return None
    _, chosen = max(held, key=_first) if held else min(tried, key=_first)
    return _called(str(chosen.get("step")))(report, loads)


def _level(one: Mapping[str, Any]) -> float | None:
    """Requests per second, or at a time."""
    told: float | None = one.get("offered_rps", one.get("concurrency"))
    return told


def _holds(one: Mapping[str, Any]) -> bool:
    holds = one.get("holds")
    return bool(one.get("queue") == "stable" if holds is None else holds)


def _first(one: tuple[float, object]) -> float:
    return one[0]


def _base(report: Report, loads: Sequence[Step]) -> Step | None:
    """The level that others are compared with."""
    levels: Sequence[Any] = at(report, "measurements.levels") or ({},)
    return _called(str(at(levels[0], "step")))(report, loads)


_RULES: Final[Mapping[str, _Rule]] = {
    "throughput": _highest_held,
    "tradeoff": _highest_held,
    "itl": _greatest(r"([\d.]+)-percent"),
    "capacity": _highest_held,
    "fairness": _called("mix"),
    "prefix-cache": _called("0/off"),
    "memory-pressure": _base,
    "long-context": _greatest(r"(\d+)-tokens"),
    "guardrail-overhead": _greatest(r"([\d.]+)-percent/0/baseline"),
}
