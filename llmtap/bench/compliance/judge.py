"""A report held against every demand of seed 000 that binds it; the list of all demands."""

from collections.abc import Mapping, Sequence
from typing import Any

from llmtap.bench.compliance.matrix import COMPARISON, Judged, Matrix
from llmtap.bench.compliance.requirement import Report
from llmtap.bench.compliance.requirements import REQUIREMENTS
from llmtap.bench.run.test import ReportTable

__all__ = ["judge", "judge_comparison", "listing"]


def judge(report: Report) -> Matrix:
    """One test's report."""
    test = str(report.get("test"))
    rows = [
        Judged(one, one.check(report))
        for one in REQUIREMENTS
        if one.subject != COMPARISON and (not one.binds or test in one.binds)
    ]
    return Matrix(test, tuple(rows))


def judge_comparison(reports: Sequence[Report], comparison: Mapping[str, Any] | None = None) -> Matrix:
    """Reports of one test on several systems, several of each, by section 6.

    `comparison` is what was made of them, as `bench/compare.py` has it: `systems` (in the order of the
    reports, with the number of `runs` of each), `comparisons` (figures with `p`, `low` and `high`) and
    `normalised`.
    """
    together: Report = {"reports": list(reports), "comparison": comparison or {}}
    rows = [Judged(one, one.check(together)) for one in REQUIREMENTS if one.subject == COMPARISON]
    return Matrix(COMPARISON, tuple(rows))


def listing() -> ReportTable:
    """All demands, without a report."""
    rows = []
    for one in REQUIREMENTS:
        binds = ", ".join(one.binds) if one.binds else "all tests"
        of = "comparisons" if one.subject == COMPARISON else binds
        rows.append([one.id, one.level, of, one.subject, one.says])
    return ReportTable(
        caption=f"What IETF seed 000 demands: {len(rows)} demands",
        heads=["Demand", "Level", "Of", "Subject", "What"], rows=rows,
    )  # fmt: skip
