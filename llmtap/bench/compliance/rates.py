"""5.2, 5.3 and 5.5: how much a system takes."""

from collections.abc import Callable
from typing import Final

from llmtap.bench.compliance.evidence import (
    Step,
    at,
    count,
    counted,
    is_closed,
    is_measured,
    is_open,
    lacking,
    lasted,
    lasts,
    over,
    seconds,
    slots_of,
    steps,
    table_has,
    text,
    workload_is,
)
from llmtap.bench.compliance.latency import load_model, workload_defined
from llmtap.bench.compliance.requirement import (
    Check,
    ComplianceVerdict,
    Report,
    Requirement,
    cannot_tell,
    met,
    not_applicable,
    not_met,
    row,
)

__all__ = ["ROWS"]

_THROUGHPUT: Final = ("throughput",)
_TRADEOFF: Final = ("tradeoff",)
_CAPACITY: Final = ("capacity",)
DURATION_MIN_S: Final = 60
DURATION_STABLE_S: Final = 300
LEVELS_MIN: Final = 10
LEVELS: Final = tuple(range(10, 121, 10))
RAMP_UP: Final = 0.1
PER_SLOT_MIN: Final = 100
COMPLETION_MIN: Final = 0.99


def _params(among: Callable[[Step], bool] | None, none: str, *names: str) -> Check:
    """Whether setup parameters have values, where some load is of that load model."""

    def check(report: Report) -> ComplianceVerdict:
        if not steps(report):
            return cannot_tell("the report has no loads")
        if among is not None and not any(among(step) for step in steps(report) if is_measured(step)):
            return not_applicable(none)
        told = {name: at(report, f"params.{name}") for name in names}
        lacking = [name for name, value in told.items() if value is None]
        if lacking:
            return not_met(f"{' and '.join(lacking)} not defined")
        return met(", ".join(f"{name} {text(value)}" for name, value in told.items()))

    return check


def _open(*names: str) -> Check:
    return _params(is_open, "no load is an open loop", *names)


def _closed(*names: str) -> Check:
    return _params(is_closed, "no load is a closed loop", *names)


def _limit(report: Report) -> ComplianceVerdict:
    told = at(report, "measurements")
    if told is None or "limit" not in told:
        return cannot_tell("the report does not tell where its search ended")
    if told["limit"] is None:
        return not_met("the highest load that was tried was sustained: no saturation was found")
    broken = [one for one in told.get("levels") or () if at(one, "holds") is False]
    why = f": {broken[-1]['why']}" if broken and broken[-1].get("why") else ""
    return met(f"{text(told['limit'])} was not sustained{why}")


def _ramp_up(report: Report) -> ComplianceVerdict:
    spans = [
        (window["from"], window["to"])
        for one in at(report, "measurements.levels") or ()
        if (window := at(one, "window")) and None not in (window.get("from"), window.get("to"))
    ]
    if not spans:
        return cannot_tell("which part of each load counts is not told")
    shares = [begin / end for begin, end in spans if end]
    least = min(shares, default=0.0)
    evidence = f"of {len(spans)} loads the first {least:.0%} or more is not counted"
    return met(evidence) if least >= RAMP_UP - 1e-9 else not_met(evidence)


def _all_open(report: Report) -> ComplianceVerdict:
    def judge(step: Step) -> ComplianceVerdict:
        mode = at(step, "result.load.mode")
        return met("open loop") if mode == "open" else not_met(f"{mode or 'unknown'} loop")

    return over(report, judge, is_measured)


def _percents(report: Report) -> list[float]:
    """Of capacity: the levels that were measured."""
    levels = at(report, "measurements.levels") or ()
    told = [one["percent"] for one in levels if at(one, "percent") is not None]
    return sorted(map(float, told))


def _enough_levels(report: Report) -> ComplianceVerdict:
    levels = at(report, "measurements.levels")
    if levels is None:
        return cannot_tell("the report tells no levels")
    evidence = f"{len(levels)} levels, {LEVELS_MIN} needed"
    return met(evidence) if len(levels) >= LEVELS_MIN else not_met(evidence)


def _span(report: Report) -> ComplianceVerdict:
    percents = _percents(report)
    if not percents:
        return cannot_tell("what share of capacity the levels are is not told")
    evidence = f"from {percents[0]:g} to {percents[-1]:g} % of capacity"
    told = at(report, "measurements") or {}
    signs = [told.get(name) is not None for name in ("saturation_rps", "queue_grows_from_rps")]
    if percents[0] > 10:
        return not_met(f"{evidence}: not from 10 %")
    if percents[-1] < 100 and not any(signs):
        return not_met(f"{evidence}, and no saturation was seen")
    return met(evidence + (", with signs of saturation" if any(signs) else ""))


def _all_levels(report: Report) -> ComplianceVerdict:
    percents = _percents(report)
    if not percents:
        return cannot_tell("what share of capacity the levels are is not told")
    less = lacking(percents, LEVELS)
    evidence = f"levels {', '.join(f'{one:g}' for one in percents)} %"
    return not_met(f"{evidence}; without {', '.join(map(str, less))} %") if less else met(evidence)


def _fixed_output(report: Report) -> ComplianceVerdict:
    tokens = at(report, "params.output_tokens")
    if tokens is None:
        return not_met("answers have the workload's own lengths")
    return met(f"answers of {count(tokens)} tokens")


def _criteria(report: Report) -> ComplianceVerdict:
    told = at(report, "measurements.criteria") or {}
    completion, ttft = told.get("completion"), told.get("ttft_p99")
    if completion is None or ttft is None:
        return not_met("the report tells no criteria of completion and TTFT P99")
    memory = told.get("memory_errors")
    evidence = f"{completion:.0%} complete, TTFT P99 <= {seconds(ttft)}, {text(memory)} out of memory"
    return met(evidence) if completion >= COMPLETION_MIN and memory == 0 else not_met(evidence)


def _long_enough(report: Report) -> ComplianceVerdict:
    """60 seconds, and 100 completions per slot: the longer of the two is when both are over."""

    def judge(step: Step) -> ComplianceVerdict:
        time, slots = lasted(report, step), slots_of(report, step)
        outcomes = at(step, "result.outcomes")
        if time is None or slots is None or outcomes is None:
            return cannot_tell("time, concurrency or completions are not told")
        done = sum(outcomes.get(name) or 0 for name in ("complete", "refused")) / slots
        evidence = f"{time:.0f} s of {DURATION_MIN_S}, {done:.0f} completions per slot of {PER_SLOT_MIN}"
        return met(evidence) if time >= DURATION_MIN_S and done >= PER_SLOT_MIN else not_met(evidence)

    return over(report, judge, counted(report))


def _defined(item: str, says: str, check: Check) -> Requirement:
    return row(f"5.2.2-1{item}", "MUST", "setup", says, check, _THROUGHPUT)


ROWS: Final[tuple[Requirement, ...]] = (
    _defined("a", "The workload, by name or in full.", workload_defined),
    _defined("b", "How long each load lasts.", _params(None, "", "duration")),
    _defined("c", "The load model.", load_model),
    _defined("d", "Of an open loop: the lowest and the highest rate.", _open("rate_min", "rate_max")),
    _defined("e", "Of an open loop: the increment of rates.", _open("rate_step")),
    _defined(
        "f", "Of a closed loop: the lowest and the highest concurrency.",
        _closed("concurrency_min", "concurrency_max"),
    ),
    _defined("g", "Of a closed loop: the increment of concurrencies.", _closed("concurrency_step")),
    row(
        "5.2.2.1-1", "RECOMMENDED", "procedure", "Each load lasts 300 s, for stable figures.",
        lasts(DURATION_STABLE_S), _THROUGHPUT,
    ),
    row(
        "5.2.2.1-p1", "procedure", "procedure", "Each load lasts 60 s or more.", lasts(DURATION_MIN_S),
        _THROUGHPUT,
    ),
    row(
        "5.2.3.1-p1", "procedure", "procedure",
        "The search finds a load that is not sustained: the queue grows, fewer than 90 % complete, or P99 is"
        " above 10 x the P50 of a lower load.", _limit, _THROUGHPUT,
    ),
    row(
        "5.2.3.2-p1", "procedure", "procedure", "The first 10 % of each load is not counted.", _ramp_up,
        _THROUGHPUT,
    ),
    row(
        "5.2.5.1-p1", "procedure", "report", "Throughput as in Table 3.",
        table_has(
            3, ("Metric", "Value"),
            (
                "Max Output Throughput", "Max Request Throughput", "Max Input Throughput", "Sustainable Load",
                "Tokens per GPU-second",
            ),
        ),
        _THROUGHPUT,
    ),
    row(
        "5.2.5.2-p1", "procedure", "report", "Latency at the highest throughput as in Table 4.",
        table_has(4, ("Metric", "P50", "P95", "P99"), ("TTFT", "TPOT", "End-to-End")), _THROUGHPUT,
    ),
    row("5.3.2-1", "REQUIRED", "procedure", "Loads are open loops.", _all_open, _TRADEOFF),
    row(
        "5.3.2-p1", "procedure", "procedure", "Each level lasts 60 s or more.", lasts(DURATION_MIN_S),
        _TRADEOFF,
    ),
    row("5.3.2-p2", "procedure", "procedure", "There are 10 levels or more.", _enough_levels, _TRADEOFF),
    row(
        "5.3.2-p3", "procedure", "procedure", "Levels go from 10 % of capacity to saturation.", _span,
        _TRADEOFF,
    ),
    row(
        "5.3.3-p1", "procedure", "procedure", "Levels are 10, 20, ... 120 % of capacity.", _all_levels,
        _TRADEOFF,
    ),
    row(
        "5.3.5-p1", "procedure", "report", "The curve as in Table 5.",
        table_has(
            5,
            (
                "Offered (r/s)", "Achieved (tok/s)", "TTFT P50", "TTFT P99", "TPOT P50", "TPOT P99",
                "Success",
            ),
        ),
        _TRADEOFF,
    ),
    row(
        "5.5.2-1", "RECOMMENDED", "setup", "The workload is Synthetic-Uniform.",
        workload_is("synthetic-uniform"), _CAPACITY,
    ),
    row("5.5.2-p1", "procedure", "setup", "All answers have one length.", _fixed_output, _CAPACITY),
    row(
        "5.5.2-p2", "procedure", "procedure",
        "A level passes with 99 % complete, TTFT P99 below a bound, and no memory exhausted.", _criteria,
        _CAPACITY,
    ),
    row(
        "5.5.3-p1", "procedure", "procedure",
        "Each level lasts 60 s and 100 completions per slot or more.", _long_enough, _CAPACITY,
    ),
    row(
        "5.5.5-p1", "procedure", "report", "The search as in Table 7.",
        table_has(7, ("Concurrency", "Completion", "TTFT P99", "TPOT P99", "Errors", "Status")), _CAPACITY,
    ),
)  # fmt: skip
