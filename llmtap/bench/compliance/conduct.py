"""7: what testers and operators owe to others. Only they can say whether they did: in `[sut] notes`."""

from typing import Final

from llmtap.bench.compliance.evidence import at, measured, workload
from llmtap.bench.compliance.requirement import (
    Check,
    ComplianceVerdict,
    Report,
    Requirement,
    cannot_tell,
    met,
    row,
)

__all__ = ["ROWS", "noted"]

_CAPACITY: Final = ("throughput", "tradeoff", "capacity", "memory-pressure")
_PRESSURE: Final = ("memory-pressure",)


def noted(report: Report, *words: str) -> str | None:
    """The first of the tester's notes on the SUT that has one of these words."""
    notes = map(str, at(report, "sut.notes") or ())
    return next((note for note in notes if any(word in note.lower() for word in words)), None)


def _said(what: str, *words: str) -> Check:
    def check(report: Report) -> ComplianceVerdict:
        note = noted(report, *words)
        if note is None:
            return cannot_tell(f"nobody notes {what} (sut.notes)")
        return met(f"the tester notes: {note}")

    return check


def _varied(report: Report) -> ComplianceVerdict:
    """Other workloads than one, and production's own."""
    note = noted(report, "production traffic", "traffic of production")
    names = {str(workload(step).get("name")) for step in measured(report) if workload(step)}
    traces = {str(at(step, "result.plan.trace")) for step in measured(report)} - {"None"}
    shown = ", ".join(sorted(names | traces)) or "no workload"
    if note is not None:
        return met(f"the tester notes: {note}")
    return cannot_tell(
        f"this report has {shown}; nobody notes a comparison with production traffic (sut.notes)"
    )


ROWS: Final[tuple[Requirement, ...]] = (
    row(
        "7.1-1", "SHOULD", "tester", "Whether to publish figures of capacity has been considered.",
        _said("whether to publish was considered", "publish", "publication"), _CAPACITY,
    ),
    row(
        "7.2-1", "SHOULD", "tester", "Workloads are varied, and results verified with production traffic.",
        _varied,
    ),
    row(
        "7.4-1a", "SHOULD", "tester", "Memory is put under pressure on isolated systems.",
        _said("that the system was isolated", "isolated"), _PRESSURE,
    ),
    row(
        "7.4-1b", "SHOULD", "tester", "Recovery from it has been prepared.",
        _said("that recovery was prepared", "recovery"), _PRESSURE,
    ),
    row(
        "7.4-1c", "SHOULD", "tester", "Cascading failures are watched for.",
        _said("that failures were watched for", "monitor", "watch"), _PRESSURE,
    ),
)  # fmt: skip
