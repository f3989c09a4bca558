"""4.8: safety systems that answers pass, and what they refused."""

from typing import Final

from llmtap.bench.compliance.evidence import at, boundary, count, declared, several, steps, text
from llmtap.bench.compliance.requirement import (
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

_FILTERS: Final = ("input_filter", "output_filter")


def _state(report: Report) -> dict[str, bool | None]:
    return {name: at(report, f"sut.guardrails.{name}") for name in _FILTERS}


def _shown(state: dict[str, bool | None]) -> str:
    words = {True: "on", False: "off", None: "not declared"}
    return ", ".join(f"{name.replace('_', ' ')} {words[value]}" for name, value in state.items())


def _accounted(report: Report) -> ComplianceVerdict:
    state = _state(report)
    unsaid = [name for name, value in state.items() if value is None]
    return not_met(_shown(state)) if unsaid else met(_shown(state))


def _named(report: Report) -> ComplianceVerdict:
    names, state = text(at(report, "sut.guardrails.names")), _state(report)
    if names:
        return met(names)
    if None in state.values():
        return not_met("neither names of safety systems nor whether there are any")
    return not_applicable("there are none" if not any(state.values()) else "no name is known")


def _refused(report: Report) -> ComplianceVerdict:
    refused = report.get("refused")
    if refused is None:
        return not_met("how many requests were refused is not told")
    sent = sum(at(step, "result.n") or 0 for step in steps(report))
    return met(f"{count(refused)} of {several(sent, 'request')} were refused")


def _enabled(report: Report) -> ComplianceVerdict:
    other = boundary(report, "application gateway")
    if other is not None:
        return other
    state = _state(report)
    if None in state.values():
        return cannot_tell(_shown(state))
    return met(_shown(state)) if any(state.values()) else not_met(_shown(state))


def _noted(report: Report) -> ComplianceVerdict:
    other = boundary(report, "application gateway")
    if other is not None:
        return other
    state = _state(report)
    if None in state.values():
        return not_met(_shown(state))
    return met(_shown(state)) if False in state.values() else not_applicable(_shown(state))


def _compared(report: Report) -> ComplianceVerdict:
    other = boundary(report, "application gateway")
    if other is not None:
        return other
    arms = {str(step.get("arm") or "the target") for step in steps(report)}
    evidence = f"configurations measured: {', '.join(sorted(arms)) or 'none'}"
    return met(evidence) if len(arms) > 1 else not_met(evidence)


ROWS: Final[tuple[Requirement, ...]] = (
    row("4.8-1", "MUST", "setup", "Safety systems are accounted for.", _accounted),
    row(
        "4.8.1-1a", "MUST", "report", "Whether prompts are filtered.",
        declared("sut.guardrails.input_filter", "input filter"),
    ),
    row(
        "4.8.1-1b", "MUST", "report", "Whether answers are filtered.",
        declared("sut.guardrails.output_filter", "output filter"),
    ),
    row("4.8.1-1c", "MUST", "report", "Names of safety systems, where they are known.", _named),
    row("4.8.1-1d", "MUST", "report", "Whether requests were refused.", _refused),
    row(
        "4.8.2-1", "SHOULD", "setup", "A gateway as in production has its safety systems on.", _enabled,
    ),
    row(
        "4.8.2-2", "MUST", "report", "Of a gateway as in production, it is noted where they are off.", _noted,
    ),
    # One test's report can only speak of itself: comparing is what 5.10 is.
    row(
        "4.8.2-3", "SHOULD", "tester", "A gateway is tested with safety systems on and off.", _compared,
        ("guardrail-overhead",),
    ),
)  # fmt: skip
