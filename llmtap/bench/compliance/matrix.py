"""Verdicts on all demands that bind a report, and what they make of its compliance.

Compliance is of one test (section 2). All MUST and all SHOULD: unconditionally; all MUST: conditionally. A
claim is only as good as what supports it, so what a report cannot show counts as not satisfied. Procedures
without a key word are no part of it: where they were left, they are listed as deviations.

Source: IETF seed 000, 2; section 6 for comparisons.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

from llmtap.bench.compliance.requirement import MUSTS, SHOULDS, ComplianceVerdict, Requirement, Subject
from llmtap.bench.run.test import ReportTable

__all__ = ["COMPARISON", "Judged", "Matrix", "Overall"]

Overall = Literal["unconditionally compliant", "conditionally compliant", "not compliant"]
_SATISFIED: Final = frozenset({"met", "not applicable"})
COMPARISON: Final[Subject] = "comparison"


@dataclass(frozen=True, slots=True)
class Judged:
    """A demand and the verdict on it."""

    requirement: Requirement
    verdict: ComplianceVerdict

    @property
    def satisfied(self) -> bool:
        """It was met, or did not arise."""
        return self.verdict.status in _SATISFIED

    def to_dict(self) -> dict[str, object]:
        """As public JSON."""
        found = self.requirement.to_dict()
        return {**found, "status": self.verdict.status, "evidence": self.verdict.evidence}


@dataclass(frozen=True, slots=True)
class Matrix:
    """All demands on one report, in the order of the draft."""

    test: str
    """Its name; or `comparison`."""
    rows: tuple[Judged, ...]

    @property
    def status(self) -> Overall:
        """As section 2 has it."""
        if self._left(MUSTS):
            return "not compliant"
        return "conditionally compliant" if self._left(SHOULDS) else "unconditionally compliant"

    @property
    def why(self) -> tuple[str, ...]:
        """Ids of the demands that keep it from the next better status."""
        return tuple(one.requirement.id for one in self._left(MUSTS) or self._left(SHOULDS))

    @property
    def deviations(self) -> tuple[Judged, ...]:
        """Procedures that were left, or that nobody can see."""
        return self._left(frozenset({"procedure"}))

    def to_dict(self) -> dict[str, Any]:
        """As public JSON."""
        return {
            "test": self.test, "level": self.status, "why": list(self.why),
            "must": self._counts(MUSTS), "should": self._counts(SHOULDS),
            "deviations": [one.requirement.id for one in self.deviations],
            "rows": [one.to_dict() for one in self.rows],
        }  # fmt: skip

    def table(self) -> ReportTable:
        """Every demand, its verdict and the evidence."""
        return ReportTable(
            caption=f"Compliance of {self.test} with IETF seed 000: {self.status}",
            heads=["Demand", "Level", "What", "ComplianceVerdict", "Evidence"],
            rows=[
                [
                    one.requirement.id, one.requirement.level, one.requirement.says, one.verdict.status,
                    one.verdict.evidence,
                ]
                for one in self.rows
            ],
        )  # fmt: skip

    def summary_lines(self) -> list[str]:
        """The status, what it rests on, and each demand that is in its way."""
        must, should = self._counts(MUSTS), self._counts(SHOULDS)
        counts = f"{must['satisfied']} of {must['n']} MUST, {should['satisfied']} of {should['n']} SHOULD"
        lines = [f"{self.test}: {self.status} ({counts})"]
        for levels in (MUSTS, SHOULDS):
            lines += [_line(one) for one in self._left(levels)]
        return lines + [f"deviation {_line(one)}" for one in self.deviations]

    def _left(self, levels: frozenset[str]) -> tuple[Judged, ...]:
        return tuple(one for one in self.rows if one.requirement.level in levels and not one.satisfied)

    def _counts(self, levels: frozenset[str]) -> dict[str, int]:
        """How many demands there are, how many are satisfied, and of those how many did not arise."""
        rows = [one for one in self.rows if one.requirement.level in levels]
        return {
            "n": len(rows),
            "satisfied": sum(one.satisfied for one in rows),
            "not_applicable": sum(one.verdict.status == "not applicable" for one in rows),
        }


def _line(one: Judged) -> str:
    found = one.requirement
    return f"{found.id} {found.level}, {one.verdict.status}: {found.says} {one.verdict.evidence}"
