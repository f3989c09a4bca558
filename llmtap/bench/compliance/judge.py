"""Check a benchmark report, or a comparison, against every requirement of the IETF draft that applies to it.

Input: the JSON of a report (`judge`) or of a comparison (`judge_comparison`). Output: a `Matrix` with the
verdict and evidence of each requirement. The checks themselves are in the modules beside this one.
Unconditional compliance: every MUST and SHOULD is satisfied. Conditional: every MUST is (section 2). Missing
evidence counts as not satisfied. A procedure that was not followed is a deviation. `listing` is the table of
`llmtap bench compliance`. Source: IETF draft, 2, 6.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from llmtap.bench.compliance import comparison, preparation, procedures
from llmtap.bench.compliance.evidence import MUSTS, SHOULDS, ComplianceVerdict, Report, Requirement, Subject
from llmtap.bench.run.test import ReportTable

_READING: Final = "asks the reader to consult the terminology document: no test satisfies or breaks it"
_WORDS: Final = "lists the key words"
_STATUS: Final = "defines what compliance is: it is carried out in Matrix"
EXCLUDED: Final[Mapping[str, str]] = {
    "Abstract-1": _READING,
    "1-1": _READING,
    **{f"2-{n}": _WORDS for n in range(1, 12)},
    **{f"2-{n}": _STATUS for n in range(12, 17)},
}
"""Key words of the draft that demand nothing, by section and place, and why."""


REQUIREMENTS: Final[tuple[Requirement, ...]] = (*preparation.ROWS, *procedures.ROWS, *comparison.ROWS)


Overall = Literal["unconditionally compliant", "conditionally compliant", "not compliant"]
_SATISFIED: Final = frozenset({"met", "not applicable"})
COMPARISON: Final[Subject] = "comparison"


@dataclass(frozen=True, slots=True)
class Judged:
    requirement: Requirement
    verdict: ComplianceVerdict

    @property
    def satisfied(self) -> bool:
        return self.verdict.status in _SATISFIED

    def to_dict(self) -> dict[str, object]:
        found = self.requirement.to_dict()
        return {**found, "status": self.verdict.status, "evidence": self.verdict.evidence}


@dataclass(frozen=True, slots=True)
class Matrix:
    test: str
    rows: tuple[Judged, ...]

    @property
    def status(self) -> Overall:
        if self._left(MUSTS):
            return "not compliant"
        return "conditionally compliant" if self._left(SHOULDS) else "unconditionally compliant"

    @property
    def why(self) -> tuple[str, ...]:
        """Ids of the requirements that prevent the next better status."""
        return tuple(one.requirement.id for one in self._left(MUSTS) or self._left(SHOULDS))

    @property
    def deviations(self) -> tuple[Judged, ...]:
        return self._left(frozenset({"procedure"}))

    def to_dict(self) -> dict[str, Any]:
        return {
            "test": self.test, "level": self.status, "why": list(self.why),
            "must": self._counts(MUSTS), "should": self._counts(SHOULDS),
            "deviations": [one.requirement.id for one in self.deviations],
            "rows": [one.to_dict() for one in self.rows],
        }  # fmt: skip

    def _left(self, levels: frozenset[str]) -> tuple[Judged, ...]:
        return tuple(one for one in self.rows if one.requirement.level in levels and not one.satisfied)

    def _counts(self, levels: frozenset[str]) -> dict[str, int]:
        rows = [one for one in self.rows if one.requirement.level in levels]
        return {
            "n": len(rows),
            "satisfied": sum(one.satisfied for one in rows),
            "not_applicable": sum(one.verdict.status == "not applicable" for one in rows),
        }


def judge(report: Report) -> Matrix:
    test = str(report.get("test"))
    rows = [
        Judged(one, one.check(report))
        for one in REQUIREMENTS
        if one.subject != COMPARISON and (not one.binds or test in one.binds)
    ]
    return Matrix(test, tuple(rows))


def judge_comparison(reports: Sequence[Report], comparison: Mapping[str, Any] | None = None) -> Matrix:
    """Judge reports of one test on several systems (6); `comparison`: see `bench/report/compare.py`."""
    together: Report = {"reports": list(reports), "comparison": comparison or {}}
    rows = [Judged(one, one.check(together)) for one in REQUIREMENTS if one.subject == COMPARISON]
    return Matrix(COMPARISON, tuple(rows))


def listing() -> ReportTable:
    rows = []
    for one in REQUIREMENTS:
        binds = ", ".join(one.binds) if one.binds else "all tests"
        of = "comparisons" if one.subject == COMPARISON else binds
        rows.append([one.id, one.level, of, one.subject, one.says])
    return ReportTable(
        caption=f"Requirements of the IETF draft: {len(rows)}",
        heads=["Demand", "Level", "Of", "Subject", "What"], rows=rows,
    )  # fmt: skip
