"""One demand of seed 000, and the verdict on it.

Its key words are those of BCP 14: REQUIRED and SHALL are MUST, RECOMMENDED is SHOULD. What the draft gives a
number for without a key word is of level `procedure`: section 2 makes compliance of MUST and SHOULD alone, so
a procedure that was left is a deviation, which a report has to name, and never costs a test its compliance.

Source: IETF seed 000, 2; RFC 2119, RFC 8174.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

__all__ = [
    "MUSTS",
    "SHOULDS",
    "Check",
    "ComplianceVerdict",
    "Level",
    "Report",
    "Requirement",
    "Status",
    "Subject",
    "cannot_tell",
    "met",
    "not_applicable",
    "not_met",
    "row",
    "worst",
]  # fmt: skip

Report = Mapping[str, Any]
"""What one test found, as JSON; where systems are compared, `{"reports": [...], "comparison": ...}`."""
Level = Literal[
    "MUST", "MUST NOT", "REQUIRED", "SHALL", "SHOULD", "SHOULD NOT", "RECOMMENDED", "MAY", "OPTIONAL",
    "procedure",
]  # fmt: skip
Subject = Literal[
    "load generator", "procedure", "report", "setup", "tester", "comparison", "definition"
]  # fmt: skip
Status = Literal["met", "not met", "not applicable", "cannot tell"]

MUSTS: Final = frozenset({"MUST", "MUST NOT", "REQUIRED", "SHALL"})
SHOULDS: Final = frozenset({"SHOULD", "SHOULD NOT", "RECOMMENDED"})
_GRAVEST: Final[tuple[Status, ...]] = ("not met", "cannot tell", "met", "not applicable")


@dataclass(frozen=True, slots=True)
class ComplianceVerdict:
    """What a report shows of a demand."""

    status: Status
    evidence: str
    """The figure or statement that it rests on: `1,000 requests, 1,000 needed`."""


Check = Callable[[Report], ComplianceVerdict]


@dataclass(frozen=True, slots=True)
class Requirement:
    """One demand."""

    id: str
    """`4.2.5-2` is the second key word of section 4.2.5; `4.2.6-1c` the third item of the list that its first
    one governs; `5.3.2-p1` something without a key word."""
    section: str
    level: Level
    says: str
    """In our words."""
    binds: tuple[str, ...]
    """Names of tests; empty: all of them."""
    subject: Subject
    check: Check

    def to_dict(self) -> dict[str, object]:
        """As public JSON."""
        return {
            "id": self.id, "section": self.section, "level": self.level, "says": self.says,
            "binds": list(self.binds), "subject": self.subject,
        }  # fmt: skip


def row(
    id: str, level: Level, subject: Subject, says: str, check: Check, binds: tuple[str, ...] = ()
) -> Requirement:
    """A demand, whose section is in its id."""
    return Requirement(id, id.rpartition("-")[0], level, says, binds, subject, check)


def met(evidence: str) -> ComplianceVerdict:
    """The report shows that it was done."""
    return ComplianceVerdict("met", evidence)


def not_met(evidence: str) -> ComplianceVerdict:
    """The report shows that it was not, or lacks what it has to state."""
    return ComplianceVerdict("not met", evidence)


def not_applicable(evidence: str) -> ComplianceVerdict:
    """The case that it speaks of did not arise."""
    return ComplianceVerdict("not applicable", evidence)


def cannot_tell(evidence: str) -> ComplianceVerdict:
    """It may have been done; this report does not show it."""
    return ComplianceVerdict("cannot tell", evidence)


def worst(verdicts: list[ComplianceVerdict], nothing: str) -> ComplianceVerdict:
    """The gravest of several, which says how many share it; `nothing` is why there are none."""
    if not verdicts:
        return cannot_tell(nothing)
    gravest = min(verdicts, key=lambda verdict: _GRAVEST.index(verdict.status))
    alike = sum(verdict.status == gravest.status for verdict in verdicts)
    more = f" ({alike} of {len(verdicts)})" if len(verdicts) > 1 else ""
    return ComplianceVerdict(gravest.status, gravest.evidence + more)
