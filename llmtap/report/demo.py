"""Result of the demo for a newcomer: a sentence with the verdict, then the figures of both arms.

Takes the public JSON of the tap's summary, experiment and exchanges. Lines fit into 100 columns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from llmtap.metrics.experiment import FIRST_LOOK
from llmtap.metrics.statistics import SAMPLES_MIN, percentile
from llmtap.report.document import Note, Table
from llmtap.report.values import MARK, at, figure_text, milliseconds, number

__all__ = ["demo_blocks"]

_ROWS: Final = (
    ("ttft", "p50", "time to first token", "request sent until the first text"),
    ("ttft", "p95", "the same, p95", "95 of 100 responses begin earlier"),
    ("tbc_max", "p50", "longest pause", "longest wait between two chunks"),
    ("tpot", "p50", "time per output token", "mean after the first token"),
    ("e2e", "p50", "end to end", "request sent until the last byte"),
)  # fmt: skip
"""Metric, statistic, title and meaning."""
_Json = Mapping[str, Any]


def demo_blocks(summary: _Json, experiment: _Json, exchanges: Sequence[_Json]) -> Iterator[Note | Table]:
    """`exchanges` are those of the summary, with their uncertainties."""
    control = experiment["control"]
    arms = experiment["arms"]
    other = next(name for name in arms if name != control)
    yield Note(_verdict(experiment, other), "bold")
    if at(experiment, "sample_ratio", "alarm"):
        yield Note("warning: the arms did not get their shares of the requests; do not compare them", "red")
    rows = [
        *_counts(arms, control, other),
        *_times(experiment, control, other),
        _grouping(arms, control, other),
    ]
    yield Table(["median, ms", control, other, "difference (95 %)", "meaning"], rows)
    yield from map(Note, _about_the_tap(summary, exchanges))
    if any(MARK in cell for row in rows for cell in row):
        yield Note(f"{MARK} needs more samples: a p99 needs {SAMPLES_MIN['p99']:,}", "yellow")


def _verdict(experiment: _Json, arm: str) -> str:
    refused = sum(experiment["arms"][arm]["refusals"].values())
    refusals = f"refused {refused:,} of {experiment['arms'][arm]['ended']:,} requests"
    ttft = at(experiment, "differences", arm, "ttft", "mean") or {}
    if ttft.get("different") and ttft.get("anytime_interval"):
        low, high = map(_ms, sorted(map(abs, ttft["anytime_interval"])))
        does = "adds" if ttft["difference"] > 0 else "saves"
        level = f"{100 * (1 - experiment.get('alpha', 0.05)):g} %"
        mean = _ms(abs(ttft["difference"]))
        return f"The guardrail {does} {mean} ms to the first token ({level}: {low} to {high}) and {refusals}."
    if any(one["units"] < FIRST_LOOK for one in experiment["arms"].values()):
        why = f"A comparison needs {FIRST_LOOK} requests of each arm"
    else:
        why = "No significant difference in the time to the first token"
    return f"{why}; the guardrail {refusals}."


def _counts(arms: _Json, *names: str) -> Iterator[list[str]]:
    def row(title: str, of: Callable[[_Json], int], meaning: str) -> list[str]:
        return [title, *(f"{of(arms[name]):,}" for name in names), "-", meaning]

    yield row("requests", lambda arm: arm["ended"], "each goes to a random arm")
    yield row("refused", lambda arm: sum(arm["refusals"].values()), "by the guardrail, before the model")


def _times(experiment: _Json, control: str, other: str) -> Iterator[list[str]]:
    for metric, statistic, title, meaning in _ROWS:
        figures = [experiment["arms"][name]["metrics"].get(metric) or {} for name in (control, other)]
        by = at(experiment, "differences", other, metric, statistic) or {}
        difference = "-" if by.get("difference") is None else _signed(by["difference"])
        if by.get("interval"):
            low, high = (_signed(end).removeprefix("+") for end in by["interval"])
            difference += f" ({low} to {high})"
        yield [title, *(figure_text(one, statistic) for one in figures), difference, meaning]


def _grouping(arms: _Json, *names: str) -> list[str]:
    a_read = [number(at(arms[name], "chunking", "events_per_read"), 2) for name in names]
    return ["chunks at a time", *a_read, "-", "the output filter holds text back"]


def _about_the_tap(summary: _Json, exchanges: Sequence[_Json]) -> Iterator[str]:
    if (goodput := summary.get("goodput") or {}).get("counted"):
        met, counted = goodput["met"], goodput["counted"]
        yield f"objectives   {met:,} of {counted:,} requests met {goodput['objectives']}"
    added = at(summary, "added", "first_chunk") or {}
    if added.get("n"):
        yield f"added        the tap itself added {figure_text(added, 'p50')} ms (median) to the first chunk"
    if widths := sorted(x["uncertainty"] for x in exchanges):
        p50, p99 = (milliseconds(percentile(widths, p)) for p in (0.5, 0.99))
        yield f"uncertainty  of a time of one request: median {p50} ms, p99 {p99} ms"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}"


def _signed(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:+,.0f}" if abs(ms) >= 9.5 else f"{ms:+.1f}"
