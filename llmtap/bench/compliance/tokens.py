"""4.4: how tokens are counted."""

from typing import Final

from llmtap.bench.compliance.evidence import at, count, declared, several, steps, text
from llmtap.bench.compliance.requirement import (
    ComplianceVerdict,
    Report,
    Requirement,
    met,
    not_applicable,
    not_met,
    row,
)

__all__ = ["ROWS"]

REFERENCE: Final = "cl100k_base"


def _method(report: Report) -> ComplianceVerdict:
    """What is declared, beside where counts came from."""
    option = {"native": "A (native)", "reference": "B (reference)"}.get(
        str(at(report, "sut.tokenizer.counting"))
    )
    if option is None:
        return not_met("neither option is declared (sut.tokenizer.counting)")
    sources: dict[str, int] = {}
    for step in steps(report):
        for source, n in (at(step, "result.tokens.source") or {}).items():
            sources[source] = sources.get(source, 0) + (n or 0)
    guessed = sources.get("chunks", 0)
    if guessed:
        return not_met(
            f"option {option} is declared, and tokens of {several(guessed, 'answer')} were taken to be one"
            " each, by chunk: no tokenizer counts so"
        )
    told = ", ".join(f"{source} {count(n)}" for source, n in sorted(sources.items()))
    return met(f"option {option}" + (f"; counts by {told}" if told else ""))


def _reference(report: Report) -> ComplianceVerdict:
    """Of a comparison whose systems have different tokenizers."""
    reports = report.get("reports")
    if reports is None:
        return not_applicable("one system: nothing is compared across tokenizers")
    names = {text(at(one, "sut.tokenizer.name")) or "unknown" for one in reports}
    methods = {str(at(one, "sut.tokenizer.counting")) for one in reports}
    if len(names) == 1 and "unknown" not in names and methods == {"native"}:
        return not_applicable(f"all systems have one tokenizer: {names.pop()}")
    if methods == {"reference"} and names == {REFERENCE}:
        return met(f"option B with {REFERENCE} for all")
    return not_met(f"tokens counted by {', '.join(sorted(methods))}: {', '.join(sorted(names))}")


ROWS: Final[tuple[Requirement, ...]] = (
    row(
        "4.4.1-1a", "MUST", "report", "The tokenizer has a name and a version.",
        declared("sut.tokenizer.name", "tokenizer"),
    ),
    row(
        "4.4.1-1b", "MUST", "report", "The size of its vocabulary.",
        declared("sut.tokenizer.vocabulary", "vocabulary"),
    ),
    row("4.4.1-1c", "MUST", "report", "Where it comes from.", declared("sut.tokenizer.source", "source")),
    row("4.4.2-1", "MUST", "report", "Whether each system's own tokenizer counts, or one for all.", _method),
    row(
        "4.4.2-2", "RECOMMENDED", "comparison",
        "Systems with different tokenizers are compared by counts of cl100k_base.", _reference,
    ),
    row(
        "4.4.3-1a", "MUST", "report", "Whether BOS and EOS are counted.",
        declared("sut.tokenizer.special", "BOS and EOS"),
    ),
    row(
        "4.4.3-1b", "MUST", "report", "How tokens of system prompts are counted.",
        declared("sut.tokenizer.system_prompt", "system prompt"),
    ),
    row(
        "4.4.3-1c", "MUST", "report", "How tokens that format tool calls are counted.",
        declared("sut.tokenizer.tools", "tool calls"),
    ),
)  # fmt: skip
