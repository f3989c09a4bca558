"""4.6: how tokens come over the wire, and what that makes of the time between them."""

from typing import Final

from llmtap.bench.compliance.evidence import Step, at, boundary, count, over, protocol, several, steps
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

__all__ = ["ROWS", "as_declared"]

OPTIONS: Final = {
    "A": "time between chunks",
    "B": "distributed over the tokens of a chunk",
    "C": "the server's",
}


def as_declared(option: str) -> str:
    """A name of `metrics/DEFINITIONS.md` with the draft's letter for itself: `B (even)` for `B-even`."""
    return option.replace("B-even", "B (even)")


def _by_protocol(wanted: str, of: str) -> Check:
    def check(report: Report) -> ComplianceVerdict:
        other = boundary(report, of)
        if other is not None:
            return other
        spoken = protocol(report)
        if spoken is None:
            return cannot_tell("the target's address does not tell its protocol")
        return met(spoken) if spoken == wanted else not_met(f"{spoken}, not {wanted}")

    return check


def _protocol(report: Report) -> ComplianceVerdict:
    told, seen = at(report, "sut.protocol"), protocol(report)
    if told and seen and seen.lower() not in str(told).lower():
        return not_met(f"{told} is declared, and {seen} was spoken")
    return met(str(told or seen)) if told or seen else not_met("the protocol is not told")


def _chunking(report: Report) -> ComplianceVerdict:
    told = at(report, "sut.chunking")

    def judge(step: Step) -> ComplianceVerdict:
        share, known = (
            at(step, "result.chunking.single_token_share"),
            at(step, "result.chunking.chunks_with_known_tokens"),
        )
        if share is None:
            return met(str(told)) if told else not_met("how many tokens a chunk has is not told")
        return met(
            f"{share:.1%} of {count(known)} chunks have one token" + (f"; declared: {told}" if told else "")
        )

    return over(report, judge)


def _handling(report: Report) -> ComplianceVerdict:
    def judge(step: Step) -> ComplianceVerdict:
        policies = at(step, "result.metrics.itl.policy") or {}
        if not policies:
            return cannot_tell("no gap between tokens was measured")
        seen = (f"{as_declared(policy)}: {several(n, 'answer')}" for policy, n in policies.items())
        return met("; ".join(seen))

    return over(report, judge)


def _option(report: Report) -> ComplianceVerdict:
    """`A`, `B`, `C`, a variant such as `B (even)`, or several of them: `A + B (even)`."""
    told = report.get("itl_option")
    options = [one.strip()[:1].upper() for one in str(told or "").split("+")]
    if not all(option in OPTIONS for option in options):
        return not_met("none of A, B and C is declared (itl_option)")
    if "C" in options and not _told_by_server(report):
        return not_met("C is declared, and the server told no times of tokens")
    return met(f"option {told}: {' and '.join(OPTIONS[option] for option in options)}")


def _server_side(report: Report) -> ComplianceVerdict:
    told = _told_by_server(report)
    if not told:
        return not_applicable("the server tells no times of tokens")
    option = str(report.get("itl_option"))
    evidence = f"the server told {count(told)} gaps between tokens; the option is {option}"
    return met(evidence) if "C" in option else not_met(evidence)


def _told_by_server(report: Report) -> int:
    return sum(at(step, "result.metrics.itl_server.n") or 0 for step in steps(report))


ROWS: Final[tuple[Requirement, ...]] = (
    row(
        "4.6.1-1", "RECOMMENDED", "setup", "An application gateway is tested over SSE.",
        _by_protocol("SSE", "application gateway"),
    ),
    row(
        "4.6.1-2", "RECOMMENDED", "setup", "A model engine is tested over gRPC.",
        _by_protocol("gRPC", "model engine"),
    ),
    row("4.6.2-1a", "MUST", "report", "The protocol.", _protocol),
    row("4.6.2-1b", "MUST", "report", "Whether a chunk has one token, or may have several.", _chunking),
    row("4.6.2-1c", "MUST", "report", "What is made of chunks with several tokens for ITL.", _handling),
    row("4.6.3-1", "MUST", "report", "Which of the options A, B and C the ITL is of.", _option),
    row("4.6.3-2", "RECOMMENDED", "procedure", "ITL is the server's, where it tells times.", _server_side),
)  # fmt: skip
