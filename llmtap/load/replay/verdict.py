"""Verdict on a replay: the state of each figure, from the findings (`findings.py`), and one sentence.

`verdict_of` also decides whether a requested figure is not valid or the load failed. `result.py` stores the
verdict as `verdict`.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct, field

from llmtap.gates.figures import bounded_figures
from llmtap.load.replay.findings import FIGURES, FROM_SCHEDULE, REQUESTED, Finding, JudgedFinding, check_gaps
from llmtap.report.values import METRIC_TITLES, at


class FigureState(StrEnum):
    """Validity of a figure."""

    VALID = "valid"
    DOUBTFUL = "doubtful"
    NOT_VALID = "not_valid"


class FigureVerdict(Struct, frozen=True):
    """Validity of one figure, with the findings that limit it."""

    state: FigureState
    requested: bool
    """Whether an option names the figure, so that a problem makes the result invalid."""
    error: float | None
    """Largest possible error in seconds, if known."""
    share: float | None
    """Share of the requests that the findings concern."""
    findings: list[str]
    """Kinds of the findings that make the figure invalid or doubtful."""


class LoadVerdict(Struct, frozen=True):
    """Verdict on a load, with the state of each figure."""

    valid: bool
    """Whether the load did not fail, and every requested figure is valid or doubtful."""
    failed: bool
    """Whether the load failed, so that no figure counts."""
    partial: bool
    """Whether only a part of the requested load was sent."""
    invalid_figures: list[str] = field(name="not_valid")
    """Names of the requested figures that are not valid."""
    sentence: str = field(name="says")
    """The verdict in one sentence."""
    figures: dict[str, FigureVerdict]
    findings: list[JudgedFinding]
    unchecked: list[str]
    """Checks that were not possible, as texts."""


def verdict_of(problems: Sequence[Finding], result: Mapping[str, Any]) -> LoadVerdict:
    bounds = bounded_figures(result)
    requested = REQUESTED | bounds.keys()
    figures: dict[str, FigureVerdict] = {}
    for name in FIGURES:
        if not _has_figure(name, result):
            continue
        spoiled = [one for one in problems if name in one.invalid_figures]
        doubted = [one for one in problems if name in one.doubtful_figures]
        errors = [one.error for one in (*spoiled, *doubted) if one.error is not None]
        shares = [one.share for one in (*spoiled, *doubted) if one.share is not None]
        figures[name] = FigureVerdict(
            FigureState.NOT_VALID if spoiled else FigureState.DOUBTFUL if doubted else FigureState.VALID,
            requested=name in requested,
            error=max(errors, default=None),
            share=max(shares, default=None),
            findings=[one.kind for one in (*spoiled, *doubted)],
        )
    states = {name: one.state for name, one in figures.items()}
    invalid = [n for n, state in states.items() if state is FigureState.NOT_VALID and n in requested]
    failed, is_partial = any(one.failed for one in problems), any(one.partial for one in problems)
    return LoadVerdict(
        # Judge by the findings, not by `figures`: `figures` has no entry for a metric that the result lacks.
        valid=not any(one.invalidates(requested) for one in problems),
        failed=failed,
        partial=is_partial,
        invalid_figures=invalid,
        sentence=verdict_sentence(states, failed=failed, partial=is_partial),
        figures=figures,
        findings=[one.to_judged(requested) for one in problems],
        unchecked=check_gaps(result),
    )


def _has_figure(name: str, result: Mapping[str, Any]) -> bool:
    """Return whether a result has the figure."""
    if name in FROM_SCHEDULE:
        return bool(at(result, "corrected", name.removesuffix("_scheduled"), "n"))
    match name:
        case "load":
            return True
        case "tokens" | "input_tokens":
            return at(result, "tokens", "output" if name == "tokens" else "input") is not None
        case "goodput":
            return bool(at(result, "goodput", "counted"))
        case "smooth_goodput":
            return bool(at(result, "smooth_goodput", "n"))
    return bool(at(result, "metrics", name, "n"))


def verdict_sentence(states: Mapping[str, str], *, failed: bool = False, partial: bool = False) -> str:
    """Return the verdict in one sentence, from the state of each figure that was measured.

    The state that most figures have comes last, as "all other figures". If a failed load measured only one or
    two figures, these are named, because "all figures" would suggest that latencies were measured.
    """
    by_state = {
        state: [figure_title(name) for name, one in states.items() if one == state]
        for state in (FigureState.NOT_VALID, FigureState.DOUBTFUL, FigureState.VALID)
    }
    # `most`: state of most figures (of two equal ones, the better), whose names the sentence leaves out.
    most = max(reversed(by_state), key=lambda state: len(by_state[state]))
    few = 0 < len(states) <= 2
    parts = [
        f"{state.replace('_', ' ')}: {', '.join(names)}"
        for state, names in by_state.items()
        if names and (few or state is not most)
    ]
    if not few:
        parts.append(f"all {'other ' if parts else ''}figures are {most.replace('_', ' ')}")
    begin = "the load failed; " if failed else ""
    begin += "only a part of the load was sent; " if partial else ""
    return begin + "; ".join(parts)


def figure_title(name: str) -> str:
    if name in FROM_SCHEDULE:
        return f"{METRIC_TITLES[name.removesuffix('_scheduled')]} from schedule"
    others = {
        "load": "request rates",
        "tokens": "output tokens",
        "input_tokens": "input tokens",
        "goodput": "goodput",
        "smooth_goodput": "smooth goodput",
    }
    return others.get(name) or METRIC_TITLES[name]
