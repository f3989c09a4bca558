"""5.1 and 5.4: time to first token, and the time between tokens."""

import re
from collections.abc import Sequence
from typing import Final

from llmtap.bench.compliance.evidence import (
    Step,
    arrivals_of,
    at,
    cell,
    count,
    declared,
    has_levels,
    has_requests,
    is_closed,
    is_measured,
    is_open,
    measured,
    over,
    several,
    slots_of,
    steps,
    table,
    table_has,
    text,
    workload,
    workload_is,
)
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
from llmtap.bench.compliance.workloads import fully_specified

__all__ = ["ROWS", "load_model", "workload_defined"]

P99_MIN: Final = 1_000
P999_MIN: Final = 10_000
_TTFT: Final = ("ttft",)
_ITL: Final = ("itl",)
_PERCENTILES: Final = ("P50", "P90", "P95", "P99", "P99.9")
_EDGES: Final = (0, 256, 512, 1_024, 2_048, 4_096)
OUTPUT_MIN: Final = 50
REQUESTS_MIN: Final = 100
GAPS_MIN: Final = 5_000
LEVELS: Final = (25, 50, 75, 90)


# ---------------------------------------------------------------- 5.1.2


def workload_defined(report: Report) -> ComplianceVerdict:
    """One of 4.3.2, or another one that is fully specified."""
    return over(report, fully_specified(report))


def load_model(report: Report) -> ComplianceVerdict:
    def judge(step: Step) -> ComplianceVerdict:
        mode = at(step, "result.load.mode")
        return met(f"{mode} loop") if mode in ("open", "closed") else not_met("the load model is not told")

    return over(report, judge)


def _requests(report: Report) -> ComplianceVerdict:
    def judge(step: Step) -> ComplianceVerdict:
        planned = at(step, "result.plan.requests")
        return met(f"{several(planned, 'request')} planned") if planned else not_met("no number of requests")

    return over(report, judge)


def _rate(report: Report) -> ComplianceVerdict:
    def judge(step: Step) -> ComplianceVerdict:
        rate = at(step, "result.plan.arrivals.rate_rps") or at(step, "result.load.planned_rps")
        return met(f"{rate:g} requests/s") if rate else not_met("no rate")

    return over(report, judge, is_open, "no load is an open loop")


def _distribution(report: Report) -> ComplianceVerdict:
    def judge(step: Step) -> ComplianceVerdict:
        process = arrivals_of(step)
        return met(f"arrivals {process}") if process else not_met("no arrival distribution")

    return over(report, judge, is_open, "no load is an open loop")


def _concurrency(report: Report) -> ComplianceVerdict:
    def judge(step: Step) -> ComplianceVerdict:
        slots = slots_of(report, step)
        return (
            met(f"{count(slots)} at a time") if slots else not_met("how many requests at a time is not told")
        )

    return over(report, judge, is_closed, "no load is a closed loop")


def _hardware(report: Report) -> ComplianceVerdict:
    told = at(report, "sut.hardware") or {}
    if text(told.get("accelerator")) == "none":
        return met("no accelerator")
    lacking = [name for name in ("accelerator", "count", "memory") if not text(told.get(name))]
    if lacking:
        return not_met(f"sut.hardware lacks {', '.join(lacking)}")
    return met(f"{told['count']} x {told['accelerator']}, {told['memory']} each")


def _poisson(report: Report) -> ComplianceVerdict:
    def judge(step: Step) -> ComplianceVerdict:
        process = arrivals_of(step)
        return (
            met("arrivals poisson") if process == "poisson" else not_met(f"arrivals {process}, not poisson")
        )

    return over(report, judge, is_open, "no load is an open loop")


# ---------------------------------------------------------------- 5.1.3 to 5.1.5


def _other_tokens(report: Report) -> ComplianceVerdict:
    """Whether the report says so where tokens come that are no content (5.1.3.1)."""
    others = [
        step
        for step in steps(report)
        if at(step, "result.metrics.ttft_any.n") != at(step, "result.metrics.ttft.n")
        or at(step, "result.metrics.ttft_any.mean") != at(step, "result.metrics.ttft.mean")
    ]
    if not any(at(step, "result.metrics.ttft.n") for step in steps(report)):
        return cannot_tell("no first token is in the report")
    if not others:
        n = sum(at(step, "result.metrics.ttft.n") or 0 for step in steps(report))
        return not_applicable(f"content came first in all of {several(n, 'answer')}")
    said = [note for note in map(str, report.get("notes") or ()) if "content token" in note]
    return (
        met(said[0]) if said else not_met("tokens came before the content, and the report does not note it")
    )


def _percentiles(report: Report) -> ComplianceVerdict:
    found = table(report, 1)
    if found is None:
        return not_met("the report has no Table 1")
    lacking = [name for name in _PERCENTILES if cell(found, f"TTFT {name}") is None]
    if lacking:
        return not_met(f"Table 1 has no {', '.join(lacking)}")
    return met(", ".join(f"{name} {cell(found, f'TTFT {name}')}" for name in _PERCENTILES))


def _varies(report: Report) -> bool:
    """Whether inputs are of more than one length, as far as is known."""
    told = [at(workload(step), "input.distribution") for step in measured(report)]
    return any(name != "fixed" for name in told) or not told


def _buckets(report: Report) -> ComplianceVerdict:
    if not _varies(report):
        return not_applicable("all inputs have one length")
    found = table(report, 2)
    if found is None:
        return not_met("the report has no Table 2")
    edges = {int(n) for cells in found["rows"] for n in re.findall(r"\d+", cells[0].replace(",", ""))}
    shown = ", ".join(cells[0] for cells in found["rows"])
    return met(shown) if edges and edges <= set(_EDGES) else not_met(f"buckets {shown}")


def _sample_count(report: Report) -> ComplianceVerdict:
    found = table(report, 1)
    requests = None if found is None else cell(found, "Requests")
    samples = at(report, "measurements.ttft.n")
    if requests is None and samples is None:
        return not_met("neither Table 1 nor the measurements tell how many samples there are")
    return met(f"{count(samples)} samples" if samples is not None else f"{requests} requests")


def _lines(report: Report) -> Sequence[tuple[str, str]]:
    """The configuration summary: labels in small letters, and what they say."""
    told = report.get("configuration") or {}
    return [(str(label).lower(), text(said)) for label, said in told.items()]


def _line(what: str, *words: str, or_else: Check | None = None) -> Check:
    """Whether the configuration summary has lines for each of `words` (alternatives by `|`), or the report
    has it elsewhere."""

    def check(report: Report) -> ComplianceVerdict:
        found = []
        for word in words:
            line = next(
                (f"{k}: {v}" for k, v in _lines(report) if v and k.startswith(tuple(word.split("|")))), None
            )
            if line is None:
                other = None if or_else is None else or_else(report)
                return other if other is not None and other.status == "met" else not_met(f"{what} is missing")
            found.append(line)
        return met("; ".join(found))

    return check


def _model_and_hardware(report: Report) -> ComplianceVerdict:
    model, hardware = declared("sut.model", "model")(report), _hardware(report)
    if "not met" in (model.status, hardware.status):
        return not_met(model.evidence if model.status == "not met" else hardware.evidence)
    return met(f"{model.evidence}; {hardware.evidence}")


def _warmed(report: Report) -> ComplianceVerdict:
    told = [one for one in report.get("warmups") or () if not one.get("skipped")]
    if not told:
        return not_met("no warm-up is told")
    one = told[0]
    requests, tokens = (one.get(name) or 0 for name in ("requests", "tokens"))
    return met(f"warm-up: {several(requests, 'request')}, {several(tokens, 'token')}")


def _guarded(report: Report) -> ComplianceVerdict:
    found = [
        declared(f"sut.guardrails.{side}_filter", f"{side} filter")(report) for side in ("input", "output")
    ]
    if any(one.status == "not met" for one in found):
        return not_met("guardrails are not declared (sut.guardrails)")
    return met("; ".join(one.evidence for one in found))


def _by_length(report: Report) -> ComplianceVerdict:
    if not _varies(report):
        return not_applicable("all inputs have one length")
    return table_has(2, ("Input Tokens", "P50", "P95", "P99"))(report)


def _drawn(report: Report) -> ComplianceVerdict:
    kinds = [chart.get("kind") for chart in report.get("charts") or () if "TTFT" in str(chart.get("title"))]
    drawn = [kind for kind in kinds if kind in ("cdf", "histogram")]
    return met(" and ".join(map(str, drawn))) if drawn else not_met("neither histogram nor CDF of TTFT")


# ---------------------------------------------------------------- 5.4


def _long_enough(report: Report) -> ComplianceVerdict:
    levels = [one for one in at(report, "measurements.levels") or () if isinstance(one, dict)]
    short = sum(one.get("too_short") or 0 for one in levels)
    if short:
        return not_met(f"{several(short, 'answer')} had fewer than {OUTPUT_MIN} tokens: in no figure")

    def judge(step: Step) -> ComplianceVerdict:
        output = at(step, "result.plan.workload.output") or {}
        asked = at(report, "params.output_tokens") or output.get("tokens") or output.get("min")
        if asked is not None and asked < OUTPUT_MIN:
            return not_met(f"answers of {asked} tokens were asked for, {OUTPUT_MIN} needed")
        if not levels:
            return cannot_tell("the lengths of answers are not told")
        return met(f"no answer had fewer than {OUTPUT_MIN} tokens")

    return over(report, judge, is_measured)


def _without_ttft(report: Report) -> ComplianceVerdict:
    """Each answer has one gap less than chunks with output: the time before the first is no gap."""

    def judge(step: Step) -> ComplianceVerdict:
        gaps, chunks = at(step, "result.metrics.tbc.n"), at(step, "result.chunking.content_events")
        first = at(step, "result.metrics.ttft_any.n")
        if not gaps or not chunks or not first:
            return cannot_tell("the report lacks the numbers of gaps, chunks and answers")
        evidence = f"{several(gaps, 'gap')} of {several(chunks, 'chunk')} in {several(first, 'answer')}"
        return met(evidence) if gaps <= chunks - first else not_met(evidence)

    return over(report, judge, is_measured)


def _gaps(report: Report) -> ComplianceVerdict:
    def judge(step: Step) -> ComplianceVerdict:
        n = at(step, "result.metrics.tbc.n")
        if n is None:
            return cannot_tell("the number of gaps is not told")
        evidence = f"{count(n)} gaps between tokens, {count(GAPS_MIN)} wanted"
        return met(evidence) if n >= GAPS_MIN else not_met(evidence)

    return over(report, judge, is_measured)


def _defined(item: str, says: str, check: Check) -> Requirement:
    return row(f"5.1.2-1{item}", "MUST", "setup", says, check, _TTFT)


def _summary(item: str, says: str, check: Check) -> Requirement:
    return row(f"5.1.5-1{item}", "MUST", "report", says, check, _TTFT)


ROWS: Final[tuple[Requirement, ...]] = (
    _defined("a", "The workload, by name or in full.", workload_defined),
    _defined("b", "The number of requests.", _requests),
    _defined("c", "The load model.", load_model),
    _defined("d", "Of an open loop: its rate.", _rate),
    _defined("e", "Of an open loop: the distribution of arrivals.", _distribution),
    _defined("f", "Of a closed loop: how many requests at a time.", _concurrency),
    _defined("g", "The configuration of the SUT: its boundary.", declared("sut.boundary", "boundary")),
    _defined("h", "The model: name, version, quantization.", declared("sut.model", "model")),
    _defined("i", "The hardware: accelerator, how many, memory.", _hardware),
    _defined("j", "Whether prefixes are cached.", declared("sut.prefix_cache", "prefix caching")),
    row(
        "5.1.2.1-1a", "MUST", "procedure", "1,000 requests or more, for P99.", has_requests(P99_MIN, "P99"),
        _TTFT,
    ),
    # Not optional: 5.1.4.1 demands P99.9 of every report.
    row(
        "5.1.2.1-1b", "MUST", "procedure", "10,000 requests or more, for P99.9.",
        has_requests(P999_MIN, "P99.9"), _TTFT,
    ),
    row("5.1.2.2-1", "REQUIRED", "procedure", "In an open loop, arrivals are Poisson.", _poisson, _TTFT),
    row(
        "5.1.3.1-1", "MUST", "report",
        "Where other tokens come before the content: that, and what TTFT is to.",
        _other_tokens, _TTFT,
    ),
    row("5.1.4.1-1", "MUST", "report", "TTFT at P50, P90, P95, P99 and P99.9.", _percentiles, _TTFT),
    row(
        "5.1.4.2-1", "RECOMMENDED", "report",
        "TTFT by input length has its edges at 256, 512, 1,024, 2,048 and 4,096 tokens.", _buckets, _TTFT,
    ),
    row("5.1.4.3-1", "MUST", "report", "The number of samples.", _sample_count, _TTFT),
    _summary(
        "a", "SUT configuration and boundary.",
        _line("the SUT", "sut|boundary", or_else=declared("sut.boundary", "boundary")),
    ),
    _summary(
        "b", "Model and hardware.",
        _line("model or hardware", "model", "hardware", or_else=_model_and_hardware),
    ),
    _summary("c", "The workload.", _line("the workload", "workload")),
    _summary("d", "Load model and its parameters.", _line("the load model", "load model")),
    _summary(
        "e", "Number of requests, and duration.",
        _line("requests or duration", "request", "test duration|duration"),
    ),
    _summary("f", "How it was warmed up.", _line("the warm-up", "warm-up", or_else=_warmed)),
    _summary(
        "g", "Whether prefixes are cached.",
        _line("prefix caching", "prefix", or_else=declared("sut.prefix_cache", "prefix caching")),
    ),
    _summary("h", "Guardrails.", _line("guardrails", "guardrail", or_else=_guarded)),
    _summary("i", "The results.", _percentiles),
    _summary("j", "TTFT by input length, where that varies.", _by_length),
    row(
        "5.1.5.2-1", "SHOULD", "report", "The results are a table.",
        table_has(
            1, ("Metric", "Value"),
            ("Requests", *(f"TTFT {name}" for name in (*_PERCENTILES, "Mean", "Min", "Max"))),
        ),
        _TTFT,
    ),
    row("5.1.5.4-1", "SHOULD", "report", "A histogram or a CDF of TTFT.", _drawn, _TTFT),
    row(
        "5.4.2-1", "RECOMMENDED", "setup", "The workload is Synthetic-Uniform or Conversation.",
        workload_is("synthetic-uniform", "conversation"), _ITL,
    ),
    row("5.4.2-2", "MUST", "procedure", "Answers have 50 tokens or more.", _long_enough, _ITL),
    row(
        "5.4.2-3", "RECOMMENDED", "procedure", "Loads are 25, 50, 75 and 90 % of saturation.",
        has_levels(LEVELS, "saturation"),
        _ITL,
    ),
    row(
        "5.4.2-p1", "procedure", "procedure", "100 requests or more at each load.",
        has_requests(REQUESTS_MIN, "figures of a request"), _ITL,
    ),
    row("5.4.2-p2", "procedure", "procedure", "5,000 gaps or more at each load.", _gaps, _ITL),
    row("5.4.3-1", "MUST NOT", "procedure", "TTFT is in no ITL.", _without_ttft, _ITL),
    row(
        "5.4.5-p1", "procedure", "report", "ITL as in Table 6.",
        table_has(6, ("Metric", "Value"), ("P99/P50 Ratio",)), _ITL,
    ),
)  # fmt: skip
