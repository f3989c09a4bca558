"""Turn the JSON of an A/B experiment into lines for `llmtap top`, and into the result of `llmtap demo`.

The input is the public JSON of `/api/v1/experiment`, in which `meter/experiments.py` has compared the arms;
this module makes no statistical tests. The lines (`experiment_lines`) have the state, the sample ratio, the
significant differences that the JSON lists, and the arms whose chunks arrive several at a time. The result of
the demo (`demo_blocks`) is a verdict, a table and notes, for 100 columns; it also needs the summary and the
exchanges.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from llmtap.metrics.experiment import FIRST_LOOK
from llmtap.metrics.statistics import percentile
from llmtap.report.document import Note, Table
from llmtap.report.summary import not_judged_text
from llmtap.report.values import (
    FEW,
    METRIC_TITLES,
    at,
    burst_sentences,
    counts_text,
    figure_text,
    is_marked,
    milliseconds,
    number,
    p_text,
)

_COUNTS: Final = {"tokens_per_chunk": "tokens per chunk", "output_tokens": "output tokens"}
_SHARES: Final = {
    "refused": "share refused",
    "failed": "share failed",
    "cancelled": "share cancelled",
    "false_positives": "share of false positives",
    "false_negatives": "share of false negatives",
}
_TITLES: Final = {
    **METRIC_TITLES,
    "ttft_any": "TTFT of any token",
    "user_idle": "user idle latency",
    **_COUNTS,
    **_SHARES,
}
_WHOLE_MS_MIN: Final = 9.5
"""Smallest difference in ms that is shown without decimals."""
_Json = Mapping[str, Any]


def experiment_lines(experiment: _Json) -> list[str]:
    """Return the experiment as lines: its state, then cautions, then the differences of the arms."""
    if experiment.get("state") in (None, "none"):
        return ["no experiment is configured"]
    arms = experiment.get("arms") or {}
    ended = ", ".join(f"{name} {arm['ended']:,} of {arm['assigned']:,} ended" for name, arm in arms.items())
    aa = " (A/A: nothing is changed)" if experiment.get("aa") else ""
    assignment = f"assigned by {experiment.get('unit')}, control {experiment.get('control')}"
    lines = [f"experiment {experiment.get('name')}: {experiment['state']}{aa}, {assignment}; {ended}"]
    ratio = experiment.get("sample_ratio") or {}
    units, p = counts_text(ratio.get("units") or {}), ratio.get("p")
    if ratio.get("alarm"):
        lines.append(f"ALARM: units {units} are not the configured shares; all figures below are invalid")
    lines += [f"warning: {warning}" for warning in experiment.get("warnings") or ()]
    for caution in experiment.get("cautions") or ():
        chunks, usual = number(caution["events_per_read"], 3), number(caution["control_events_per_read"], 3)
        lines.append(
            f"caution: {caution['arm']}: chunks come {chunks} at a time ({experiment['control']}: {usual}),"
            " so most gaps are 0: its TBC, ITL and TPOT flatter it, its TTFT and longest pause do not"
        )
    if stopped := experiment.get("stopped"):
        more = _signed_text(stopped["figure"].partition(".")[0], stopped.get("difference"))
        lines.append(
            f"stopped: {stopped['arm']} was worse in {stopped['figure']} ({more}) at {stopped['at']}"
        )
    if not ratio.get("alarm"):
        lines.append(f"split: {units} units, as configured" + ("" if p is None else f" (p {p_text(p)})"))
    findings = experiment.get("findings") or []
    lines += [_finding_text(experiment, finding) for finding in findings]
    pending = [f"{name} has {arm['units']:,}" for name, arm in arms.items() if arm["units"] < FIRST_LOOK]
    if pending:
        lines.append(f"means are compared from {FIRST_LOOK} units an arm on: {', '.join(pending)}")
    elif not findings:
        lines.append(f"no difference stands in {experiment.get('comparisons')} comparisons so far")
    return lines


def _finding_text(experiment: _Json, finding: _Json) -> str:
    arm, metric = finding["arm"], finding["metric"]
    name = "share" if metric in _SHARES else "mean"
    difference = experiment["differences"][arm][metric].get(name) or {}
    text = f"{arm}: {_TITLES.get(metric, metric)} {_signed_text(metric, difference.get('difference'))}"
    if name == "mean":
        text += " in the mean"
    if difference.get("anytime_interval") is not None:
        low, high = (_signed_text(metric, end) for end in difference["anytime_interval"])
        text += f" ({100 * (1 - experiment.get('alpha', 0.05)):g} %: {low} to {high})"
    return f"{text}, p {p_text(finding['p'], 1)} at every look"


def _signed_text(metric: str, value: float | None) -> str:
    return "?" if value is None else metric_text(metric, value, signed=True)


def metric_text(metric: str, value: float, *, signed: bool = False) -> str:
    """Return the value of a compared metric (seconds, tokens or a share) with its unit."""
    sign = "-" if value < 0 else "+" if signed and value else ""
    if metric in _SHARES:
        return f"{sign}{abs(value):.1%}"
    return f"{sign}{number(abs(value), 3) if metric in _COUNTS else f'{milliseconds(abs(value))} ms'}"


_DEMO_ROWS: Final = (
    ("ttft", "p50", "time to first token", "request sent until the first text"),
    ("ttft", "p95", "the same, p95", "95 of 100 begin within this time"),
    ("tbc_max", "p50", "longest pause", "longest wait between two chunks"),
    ("tpot", "p50", "time per output token", "mean; low if tokens arrive together"),
    ("e2e", "p50", "end to end", "request sent until the last byte"),
)
"""Rows of the table: metric, statistic, title and meaning."""


def demo_blocks(summary: _Json, experiment: _Json, exchanges: Sequence[_Json]) -> Iterator[Note | Table]:
    """Yield the result of the demo: the verdict, the table of both arms, and notes.

    `exchanges`: the exchanges of the summary as JSON, for their uncertainties (in seconds).
    """
    arms, control = experiment["arms"], experiment["control"]
    other = next(name for name in arms if name != control)
    pair = (arms[control], arms[other])
    refused = [sum(arm["refusals"].values()) for arm in pair]
    yield Note(ttft_sentence(experiment, other, "The guardrail"), "bold")
    yield Note(f"The guardrail refused {refused[1]:,} of {arms[other]['ended']:,} requests.", "bold")
    if at(experiment, "sample_ratio", "alarm"):
        yield Note("warning: the arms did not get their shares of the requests; do not compare them", "red")
    per_read = [number(at(arm, "chunking", "events_per_read"), 2) for arm in pair]
    ended = [f"{arm['ended']:,}" for arm in pair]
    rows = [
        ["requests", *ended, "-", f"{control} or {other}, chosen at random"],
        ["refused", *(f"{n:,}" for n in refused), "-", "by the guardrail, before the model"],
        *_demo_time_rows(experiment, control, other),
        ["chunks arriving together", *per_read, "-", "the output filter delays text"],
    ]
    yield Table(["median, ms", control, other, "difference (95 %)", "meaning"], rows)
    for caution in experiment.get("cautions") or ():
        if caution["arm"] == other and "tpot" in caution["metrics"]:
            sentence, advice = burst_sentences(caution["events_per_read"], other)
            yield Note(f"caution: {sentence}", "yellow")
            yield Note(f"         {advice}", "yellow")
    yield from map(Note, _proxy_lines(summary, exchanges))
    if is_marked(rows):
        yield Note(FEW, "yellow")


def ttft_sentence(experiment: _Json, arm: str, subject: str) -> str:
    """Return a sentence on the difference of the median time to first token, with its interval."""
    units = {name: experiment["arms"][name]["units"] for name in (experiment["control"], arm)}
    if min(units.values()) < FIRST_LOOK:
        unit = experiment.get("unit", "unit")
        return f"A comparison needs {FIRST_LOOK} {unit}s of each arm; there are {counts_text(units)}."
    level = 1 - experiment.get("alpha", 0.05)
    for metric, title in (("ttft", "time to first token"), ("e2e", "end-to-end latency")):
        median = at(experiment, "differences", arm, metric, "p50") or {}
        # If an arm has too few streams, TTFT has no interval: then use the end-to-end latency.
        if median.get("interval") is not None:
            return change_sentence(
                subject, f"the median {title}", median["difference"], median["interval"], level
            )
    return f"There are no intervals yet of the median time to first token and end-to-end latency of {arm}."


def change_sentence(
    subject: str, metric: str, difference: float, interval: Sequence[float], level: float
) -> str:
    """Return a sentence on a difference in seconds and its interval. `level`: confidence of the interval."""
    low, high = interval
    if low <= 0 <= high:
        return f"{subject} does not change {metric} significantly."
    places = 0 if abs(difference) * 1e3 >= _WHOLE_MS_MIN else 1
    shown = (abs(difference), *sorted((abs(low), abs(high))))
    text, low_ms, high_ms = (f"{seconds * 1e3:,.{places}f}" for seconds in shown)
    effect = f"adds {text} ms to" if low > 0 else f"saves {text} ms of"
    return f"{subject} {effect} {metric} ({100 * level:g} % confidence: {low_ms} to {high_ms} ms)."


def _demo_time_rows(experiment: _Json, control: str, other: str) -> Iterator[list[str]]:
    for metric, statistic, title, meaning in _DEMO_ROWS:
        figures = [experiment["arms"][name]["metrics"].get(metric) or {} for name in (control, other)]
        comparison = at(experiment, "differences", other, metric, statistic) or {}
        difference = (
            "-" if comparison.get("difference") is None else _signed_ms_text(comparison["difference"])
        )
        if comparison.get("interval"):
            low, high = (_signed_ms_text(end).removeprefix("+") for end in comparison["interval"])
            difference += f" ({low} to {high})"
        yield [title, *(figure_text(one, statistic) for one in figures), difference, meaning]


def _proxy_lines(summary: _Json, exchanges: Sequence[_Json]) -> Iterator[str]:
    if (goodput := summary.get("goodput") or {}).get("counted"):
        met, counted = goodput["met"], goodput["counted"]
        suffix = f"; {unknown}" if (unknown := not_judged_text(goodput)) else ""
        yield f"objectives   {met:,} of {counted:,} requests met {goodput['objectives']}{suffix}"
    added = at(summary, "added", "first_chunk") or {}
    if added.get("n"):
        yield f"added        llmtap itself added {figure_text(added, 'p50')} ms (median) to the first chunk"
    if widths := sorted(x["uncertainty"] for x in exchanges):
        p50, p99 = (milliseconds(percentile(widths, p)) for p in (0.5, 0.99))
        yield f"uncertainty  of a time of one request: median {p50} ms, p99 {p99} ms"


def _signed_ms_text(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:+,.0f}" if abs(ms) >= _WHOLE_MS_MIN else f"{ms:+.1f}"
