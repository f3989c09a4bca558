"""4.3: what is asked of the server, and whether somebody else could ask the same."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from llmtap.bench.compliance.evidence import (
    STANDARD_WORKLOADS,
    Step,
    at,
    boundary,
    over,
    text,
    workload,
    workload_is,
)
from llmtap.bench.compliance.requirement import (
    Check,
    ComplianceVerdict,
    Report,
    Requirement,
    met,
    not_met,
    row,
    worst,
)

__all__ = ["ROWS", "fully_specified"]

Judge = Callable[[Step], ComplianceVerdict]
NO_WORKLOAD: Final = "the report does not say what the requests were"
_ENGINE: Final = ("ttft", "throughput", "tradeoff", "itl", "capacity")
"""Tests that leave the workload to the tester: 5.6 to 5.10 have their own, which 4.3.2.1 cannot replace."""
_GATEWAY: Final = ("ttft", "throughput", "tradeoff", "itl", "guardrail-overhead")
"""The same without 5.5, which recommends Synthetic-Uniform, and with 5.10, which recommends this one."""


def _is_custom(step: Step) -> bool:
    return workload(step).get("name") not in STANDARD_WORKLOADS


def _name(step: Step) -> str:
    return str(workload(step).get("name") or at(step, "result.plan.trace"))


def _custom(report: Report) -> ComplianceVerdict:
    return over(
        report, lambda step: met(f"{_name(step)}, which is none of 4.3.2"), _is_custom,
        "its workloads are those of 4.3.2",
    )  # fmt: skip


def _custom_specified(report: Report) -> ComplianceVerdict:
    return over(report, fully_specified(report), _is_custom, "its workloads are those of 4.3.2")


def fully_specified(report: Report) -> Judge:
    """Whether a load tells all that 4.3.1 lists of its workload."""

    def judge(step: Step) -> ComplianceVerdict:
        parts = [part(report, step) for part in (_input, _output, _content, _sharing)]
        found = worst(parts, NO_WORKLOAD)
        told = f"workload {_name(step)}: lengths, contents and sharing are told"
        return met(told) if found.status == "met" else found

    return judge


def _described(step: Step) -> Mapping[str, Any]:
    """Where a load tells its lengths: in its workload, or of the rows of its trace."""
    return workload(step) or at(step, "result.plan.lengths") or {}


def _lengths(step: Step, side: str, fixed: object) -> ComplianceVerdict:
    """Distribution, parameters and unit; `fixed` is one length for all, whatever the workload says."""
    told = _described(step)
    if fixed:
        return met(f"{side}: fixed, {text(fixed)} tokens")
    if not told:
        trace = at(step, "result.plan.trace")
        return not_met(f"{side} lengths are those of the trace {trace}" if trace else NO_WORKLOAD)
    lengths = told.get(side)
    if not isinstance(lengths, Mapping) or not lengths:
        return not_met(f"{_name(step)} does not tell its {side} lengths")
    lacking = [name for name in ("distribution", "unit") if not lengths.get(name)]
    if lacking:
        return not_met(f"{side} lengths lack {' and '.join(lacking)}")
    if (
        not any(isinstance(lengths.get(name), int | float | list) for name in lengths)
        and "within" not in lengths
    ):
        return not_met(f"{side} lengths are {lengths['distribution']}, without parameters or a histogram")
    return met(f"{side}: {_said(lengths)}")


def _said(lengths: Mapping[str, Any]) -> str:
    figures = [
        f"{name} {text(value)}"
        for name, value in lengths.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return " ".join([str(lengths.get("distribution")), *figures, f"in {lengths.get('unit')}"])


def _input(report: Report, step: Step) -> ComplianceVerdict:
    return _lengths(step, "input", at(step, "result.plan.input_tokens"))


def _output(report: Report, step: Step) -> ComplianceVerdict:
    found = _lengths(step, "output", at(report, "params.output_tokens"))
    if found.status != "met":
        return found
    control = at(_described(step), "output.control")
    return (
        met(f"{found.evidence}, by {control}") if control else not_met("how outputs are limited is not told")
    )


def _content(report: Report, step: Step) -> ComplianceVerdict:
    content = workload(step).get("content")
    if not isinstance(content, Mapping) or not content.get("domain"):
        return not_met("neither domain nor language of the contents is told")
    language = content.get("language") or "no language"
    prompt = at(workload(step), "sharing.tokens")
    system = "no system prompt" if prompt is None else "the shared context is the system prompt"
    return met(f"{content['domain']}, {language}; {system}")


def _sharing(report: Report, step: Step) -> ComplianceVerdict:
    told = workload(step)
    if "sharing" not in told:
        return not_met("whether prompts share a prefix is not told")
    sharing = told["sharing"]
    if sharing is None:
        return met("no prefix is shared")
    lengths, fraction = sharing.get("tokens"), sharing.get("fraction")
    known = lengths.get("distribution") if isinstance(lengths, Mapping) else lengths
    if fraction is None or not known:
        return not_met("how many requests share how long a prefix is not told")
    shown = _said(lengths) if isinstance(lengths, Mapping) else f"{text(lengths)} tokens"
    return met(f"{fraction:.0%} share a prefix: {shown}")


def _each(judge: Callable[[Report, Step], ComplianceVerdict]) -> Check:
    return lambda report: over(report, lambda step: judge(report, step))


def _for_engine(report: Report) -> ComplianceVerdict:
    other = boundary(report, "model engine")
    return other or workload_is("synthetic-uniform")(report)


def _for_gateway(report: Report) -> ComplianceVerdict:
    other = boundary(report, "application gateway")
    return other or workload_is("conversation")(report)


def _seeded(report: Report) -> ComplianceVerdict:
    def judge(step: Step) -> ComplianceVerdict:
        seed, digest = at(step, "result.plan.seed"), workload(step).get("sha256")
        if seed is None:
            return not_met("the load has no seed")
        return met(f"seed {seed}" + (f", sequence sha256 {digest[:12]}" if digest else ""))

    return over(report, judge)


def _seed_told(report: Report) -> ComplianceVerdict:
    seed = report.get("seed")
    return not_met("the report names no seed") if seed is None else met(f"seed {seed}")


def _published(report: Report) -> ComplianceVerdict:
    exact = report.get("exact_requests")
    if exact:
        return met(f"the requests lie in {exact}")

    def judge(step: Step) -> ComplianceVerdict:
        told = workload(step)
        if not told.get("generation") or told.get("seed") is None:
            return not_met("neither the requests nor how they are made again is in the report")
        return met(f"made again by llmtap {at(report, 'versions.llmtap')} with seed {told['seed']}")

    return over(report, judge)


def _of_data(part: str, what: str) -> Check:
    def judge(step: Step) -> ComplianceVerdict:
        told = text(workload(step)["data"].get(part))
        return met(f"{what}: {told}") if told else not_met(f"{what} of the data set is not told")

    def from_data(step: Step) -> bool:
        return bool(workload(step).get("data"))

    return lambda report: over(report, judge, from_data, "no load was drawn from a data set")


ROWS: Final[tuple[Requirement, ...]] = (
    row("4.3-1", "MAY", "tester", "A workload of one's own may be used.", _custom),
    row("4.3-2", "MUST", "report", "A workload of one's own is fully specified.", _custom_specified),
    row(
        "4.3.1-1a", "MUST", "setup",
        "The workload tells its input lengths: distribution, parameters, unit.", _each(_input),
    ),
    row(
        "4.3.1-1b", "MUST", "setup",
        "The workload tells its output lengths: distribution, parameters, control, unit.", _each(_output),
    ),
    row(
        "4.3.1-1c", "MUST", "setup", "The workload tells its contents: domain, language, system prompt.",
        _each(_content),
    ),
    row(
        "4.3.1-1d", "MUST", "setup",
        "The workload tells what share of requests has how long a common prefix.",
        _each(_sharing),
    ),
    row(
        "4.3.2.1-1", "REQUIRED", "setup", "A model engine is tested with Synthetic-Uniform.", _for_engine,
        _ENGINE,
    ),
    row(
        "4.3.2.3-1", "RECOMMENDED", "setup", "An application gateway is tested with Conversation.",
        _for_gateway, _GATEWAY,
    ),
    row(
        "4.3.2.5-1", "REQUIRED", "setup", "Long contexts are tested with the Long Context workload.",
        workload_is("long-context", "long-context-uniform"), ("long-context",),
    ),
    row("4.3.3-1", "MUST", "tester", "Workloads are made with deterministic seeds.", _seeded),
    row("4.3.3-2", "MUST", "report", "The seed is reported.", _seed_told),
    row(
        "4.3.3-3", "SHOULD", "tester", "The exact requests are published, or what makes them again.",
        _published,
    ),
    row("4.3.3-4a", "MUST", "report", "Of a data set: its version.", _of_data("version", "version")),
    row(
        "4.3.3-4b", "MUST", "report", "Of a data set: how its subset was chosen.",
        _of_data("subset", "subset"),
    ),
    row(
        "4.3.3-4c", "MUST", "report", "Of a data set: how it was preprocessed.",
        _of_data("preprocessing", "preprocessing"),
    ),
)  # fmt: skip
