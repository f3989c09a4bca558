"""Check a benchmark report, or a comparison, against every requirement of the IETF draft that applies to it.

Input: the JSON of a report (`judge`) or of a comparison (`judge_comparison`). Output: a `Matrix` with the
verdict and evidence of each requirement. Unconditional compliance: every MUST and SHOULD is satisfied.
Conditional compliance: every MUST is satisfied (section 2). Either level also needs every condition: the
minimums that the draft states without a key word, and a valid result. A requirement without evidence counts
as not satisfied. A procedure that was not followed is a deviation.

This module also has the checks of comparisons (section 6), which get the reports of one test on each system
and their comparison (`bench/report/compare.py`), and the checks of testers (section 7). All other checks are
in `preparation.py` and `procedures.py`. Source: IETF draft, 2, 6, 7.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, pairwise
from typing import Any, Final, Literal

import msgspec

from llmtap.bench.compliance import preparation, procedures
from llmtap.bench.compliance.evidence import (
    CONDITIONS,
    MUSTS,
    SHOULDS,
    Check,
    ComplianceVerdict,
    Report,
    Requirement,
    Step,
    Subject,
    at,
    cannot_tell,
    count_text,
    measured_steps,
    met,
    not_applicable,
    not_met,
    requirements,
    text,
    verdict,
    workload,
    workload_name,
)
from llmtap.report.values import leaves

RUNS_MIN: Final = 3
RUN_GAP_MAX_S: Final = 3_600.0
"""Longest pause between two runs of a comparison. The draft requires runs at the same time, but a load
generator can test only one system at a time."""
_DIGITS: Final = 12
_PRODUCTION: Final = ("as in production", "production-representative", "production configuration")


# ---------------------------------------------------------------- checks of testers (draft, section 7)


def find_note(report: Report, *words: str) -> str | None:
    """Return the first note of the tester (`sut.notes`) that contains one of these words, or None."""
    notes = map(str, at(report, "sut.notes") or ())
    return next((note for note in notes if any(word in note.lower() for word in words)), None)


def _check_note(what: str, *words: str) -> Check:
    def check(report: Report) -> ComplianceVerdict:
        note = find_note(report, *words)
        return met(f"the tester notes: {note}") if note else cannot_tell(f"no note of {what} (sut.notes)")

    return check


def _judge_production_traffic(report: Report) -> ComplianceVerdict:
    workloads = (
        ", ".join(sorted({str(workload_name(step)) for step in measured_steps(report)})) or "no workload"
    )
    what = f"a comparison with production traffic; this report has {workloads}"
    return _check_note(what, "production traffic", "traffic of production")(report)


# ---------------------------------------------------------------- checks of comparisons (draft, section 6)


def _reports_of(report: Report) -> Sequence[Report]:
    return report.get("reports") or ()


def _reports_by_system(report: Report) -> list[Sequence[Report]]:
    """Return the reports of each system: parts of the list of all reports, which is in the same order."""
    ends = [0, *accumulate(one["runs"] for one in at(report, "comparison.systems") or ())]
    return [_reports_of(report)[begin:end] for begin, end in pairwise(ends)]


def request_sequence_text(step: Step) -> str:
    """Return a text that identifies the requests of a load and their planned times."""
    description = workload(step)
    source = (
        f"{description['name']} {str(description.get('sha256'))[:_DIGITS]}"
        if description
        else f"{at(step, 'result.plan.trace')} of {at(step, 'result.plan.rows')} rows"
    )
    arrivals = msgspec.json.encode(at(step, "result.plan.arrivals"), order="sorted").decode()
    n, seed, texts = (at(step, f"result.plan.{name}") for name in ("requests", "seed", "texts"))
    texts_part = "" if texts is None else f", texts {texts}"
    return f"{source}, {n} requests, seed {seed}{texts_part}, {arrivals}"


def _loads_by_run(runs: Sequence[Report]) -> dict[str, set[str]]:
    by_name: dict[str, set[str]] = {}
    for report in runs:
        for step in measured_steps(report):
            by_name.setdefault(str(step.get("name")), set()).add(request_sequence_text(step))
    return by_name


def _judge_same_requests(report: Report) -> ComplianceVerdict:
    loads = [_loads_by_run(runs) for runs in _reports_by_system(report)]
    if len(loads) < 2:
        return cannot_tell("there is one system, or none")
    names = {name for one in loads for name in one}
    if not names:
        return cannot_tell("the reports have no loads")
    shared = [name for name in loads[0] if all(name in other for other in loads)]
    differing = [name for name in shared if any(other[name] != loads[0][name] for other in loads)]
    if differing:
        return not_met(f"other requests in {', '.join(differing)}")
    if not shared:
        return not_met("the systems have no load in common")
    sample = min(loads[0][shared[0]])
    return met(f"{len(shared)} of {len(names)} loads in common, with equal requests: {sample}")


def _check_equal_values(path: str, what: str, *, needed: bool = True) -> Check:
    """Return a check that all reports have an equal value at `path`.

    `what`: name of the value in the evidence. `needed`: the verdict is "cannot tell" if a value is missing.
    """

    def check(report: Report) -> ComplianceVerdict:
        values = [at(one, path) for one in _reports_of(report)]
        if not values:
            return cannot_tell("there are no reports")
        if needed and not all(text(value) for value in values):
            return cannot_tell(f"{what} is not stated by all ({path})")
        kinds = sorted({_value_text(value) for value in values})
        return verdict(len(kinds) == 1, f"{what}: {' / '.join(kinds)}")

    return check


def _value_text(value: object) -> str:
    if isinstance(value, Mapping):
        parts = [f"{name} {_value_text(held)}" for name, held in value.items() if held is not None]
        return ", ".join(parts) or "none"
    return text(value) or "none"


_ACCELERATOR: Final = "sut.hardware.accelerator"
_COUNT: Final = "sut.hardware.count"


def _judge_equal_hardware(report: Report) -> ComplianceVerdict:
    result = _check_equal_values(_ACCELERATOR, "accelerator")(report)
    if result.status == "met":
        result = _check_equal_values(_COUNT, "accelerators", needed=False)(report)
    if result.status == "not met" and _per_gpu(report).status == "met":
        return met(f"{result.evidence}; normalised by accelerators")
    return result


def _check_normalised(name: str, what: str) -> Check:
    """Return a check that systems with different hardware report a figure per GPU or per unit of money.

    `name`: member of `comparison.normalised`. `what`: unit of the figure in the evidence.
    """

    def check(report: Report) -> ComplianceVerdict:
        paths = (_ACCELERATOR, _COUNT)
        same = [_check_equal_values(path, path.rpartition(".")[2], needed=False)(report) for path in paths]
        if all(one.status == "met" for one in same):
            return not_applicable(f"equal hardware: {', '.join(one.evidence for one in same)}")
        systems = at(report, "comparison.normalised") or ()
        values = [(one.get("label"), one.get(name)) for one in systems]
        if not values or any(value is None for _, value in values):
            return not_met(f"hardware differs, and {what} is not reported of every system")
        return met(", ".join(f"{label} {_value_text(value)} {what}" for label, value in values))

    return check


_per_gpu: Final = _check_normalised("tokens_per_gpu_second", "tokens per GPU-second")


def _judge_runs(report: Report) -> ComplianceVerdict:
    runs = [len(one) for one in _reports_by_system(report)]
    if not runs:
        return cannot_tell("there are no reports")
    evidence = f"{' and '.join(map(count_text, runs))} runs, {RUNS_MIN} of each system wanted"
    return verdict(min(runs) >= RUNS_MIN, evidence)


def _differences_that_have(report: Report, name: str) -> list[Mapping[str, Any]]:
    return [one for one in at(report, "comparison.comparisons") or () if one.get(name) is not None]


def _judge_intervals(report: Report) -> ComplianceVerdict:
    n = len(_differences_that_have(report, "low"))
    return verdict(n, f"{n} differences with intervals", if_not_met="figures without confidence intervals")


def _judge_significance(report: Report) -> ComplianceVerdict:
    differences = _differences_that_have(report, "p")
    methods = ", ".join(sorted({str(one["method"]) for one in differences if one.get("method")}))
    return verdict(
        differences,
        f"{len(differences)} differences tested by {methods}",
        if_not_met="no difference was tested",
    )


def _judge_specification(report: Report) -> ComplianceVerdict:
    own = ("sha256", "seed", "requests")
    descriptions: list[set[bytes]] = []
    names = set()
    for one in _reports_of(report):
        loads = [workload(step) for step in measured_steps(one)]
        names |= {str(load.get("name")) for load in loads}
        described = [{k: v for k, v in load.items() if k not in own} for load in loads]
        descriptions.append({msgspec.json.encode(load, order="sorted") for load in described})
    if not descriptions or not all(descriptions):
        return cannot_tell("the reports have no loads")
    workloads = ", ".join(sorted(names))
    differ = f"workloads that are described differently: {workloads}"
    return verdict(
        all(one == descriptions[0] for one in descriptions),
        f"one description: {workloads}",
        if_not_met=differ,
    )


def _judge_duration(report: Report) -> ComplianceVerdict:
    """Judge whether all reports have an equal `duration`, or in a test without it, as many requests."""
    by_duration = _check_equal_values("params.duration", "duration (s)", needed=False)(report)
    if by_duration.status != "met" or at(_reports_of(report)[0], "params.duration") is not None:
        return by_duration
    return _check_equal_values("params.requests", "requests", needed=False)(report)


def _judge_run_gaps(report: Report) -> ComplianceVerdict:
    spans = sorted(span for one in _reports_of(report) if (span := _run_span(one)) is not None)
    if len(spans) < max(2, len(_reports_of(report))):
        return cannot_tell("the reports do not report when they were made")
    gap_s = max((b[0] - a[1]).total_seconds() for a, b in pairwise(spans))
    evidence = f"at most {max(0.0, gap_s) / 60:.0f} min between two runs, from {spans[0][0]:%Y-%m-%d %H:%M}"
    return verdict(gap_s <= RUN_GAP_MAX_S, evidence)


def _run_span(report: Report) -> tuple[datetime, datetime] | None:
    windows = [at(step, "result.window") or {} for step in measured_steps(report)]
    try:
        begins = [datetime.fromisoformat(one["start"]) for one in windows]
        ends = [datetime.fromisoformat(one["end"]) for one in windows]
    except (KeyError, ValueError):
        return None
    return (min(begins), max(ends)) if begins else None


def _judge_production_configuration(report: Report) -> ComplianceVerdict:
    notes = [find_note(runs[0], *_PRODUCTION) for runs in _reports_by_system(report)]
    if not notes or None in notes:
        return cannot_tell("no note of each system that it is configured as in production (sut.notes)")
    return met("; ".join(map(str, notes)))


def _judge_differences(report: Report) -> ComplianceVerdict:
    firsts = [
        {"sut": runs[0].get("sut"), "target": runs[0].get("target")} for runs in _reports_by_system(report)
    ]
    if not firsts:
        return cannot_tell("there are no reports")
    leaf_values = [{path: _value_text(value) for path, value in leaves(one)} for one in firsts]
    paths = {path for one in leaf_values for path in one}
    differing = sorted(path for path in paths if len({one.get(path) for one in leaf_values}) > 1)
    texts = (f"{path}: {' / '.join(one.get(path, 'none') for one in leaf_values)}" for path in differing)
    return met("; ".join(texts) or "no difference in what was declared")


ROWS: Final = requirements(
    {
        "6.1-1a": _judge_same_requests,
        "6.1-1b": _check_equal_values("sut.boundary", "boundary"),
        "6.1-1c": _judge_equal_hardware,
        "6.1-1d": _check_equal_values("params", "parameters"),
        "6.2-p1": _per_gpu,
        "6.2-p2": _check_normalised("tokens_per_currency", "tokens per unit of money"),
        "6.2-p3": _check_normalised("method", "is how"),
        "6.3-p1": _judge_intervals,
        "6.3-p2": _judge_runs,
        "6.3-p3": _judge_significance,
        "6.4-p1": _judge_specification,
        "6.4-p2": _judge_duration,
        "6.4-p3": _check_equal_values("warmup", "warm-up"),
        "6.4-p4": _check_equal_values("params", "parameters, criteria among them"),
        "6.4-p5": _judge_run_gaps,
        "6.4-p6": _judge_production_configuration,
        "6.4-p7": _judge_differences,
        "7.1-1": _check_note("whether to publish was considered", "publish", "publication"),
        "7.2-1": _judge_production_traffic,
        "7.4-1a": _check_note("that the system was isolated", "isolated"),
        "7.4-1b": _check_note("that recovery was prepared", "recovery"),
        "7.4-1c": _check_note("that failures were watched for", "monitor", "watch"),
    }
)


# ---------------------------------------------------------------- level of compliance


REQUIREMENTS: Final[tuple[Requirement, ...]] = (*preparation.ROWS, *procedures.ROWS, *ROWS)
Overall = Literal["unconditionally compliant", "conditionally compliant", "not compliant"]
_SATISFIED: Final = frozenset({"met", "not applicable"})
COMPARISON: Final[Subject] = "comparison"


@dataclass(frozen=True, slots=True)
class JudgedRequirement:
    """Requirement of the draft with the verdict on one report."""

    requirement: Requirement
    verdict: ComplianceVerdict

    @property
    def is_satisfied(self) -> bool:
        return self.verdict.status in _SATISFIED

    def to_dict(self) -> dict[str, object]:
        """Return the row of a JSON report: the requirement with status and evidence."""
        fields = self.requirement.to_dict()
        return {**fields, "status": self.verdict.status, "evidence": self.verdict.evidence}


@dataclass(frozen=True, slots=True)
class Matrix:
    """Verdicts on a report or a comparison, and the level of compliance that follows."""

    test: str
    """Name of the judged test."""
    rows: tuple[JudgedRequirement, ...]

    @property
    def status(self) -> Overall:
        if self._unsatisfied(MUSTS | CONDITIONS):
            return "not compliant"
        return "conditionally compliant" if self._unsatisfied(SHOULDS) else "unconditionally compliant"

    @property
    def blocking_ids(self) -> tuple[str, ...]:
        """Ids of the unsatisfied requirements that prevent a better level of compliance."""
        needed = self._unsatisfied(MUSTS | CONDITIONS)
        return tuple(one.requirement.id for one in needed or self._unsatisfied(SHOULDS))

    @property
    def deviations(self) -> tuple[JudgedRequirement, ...]:
        """Unsatisfied requirements of level `procedure`, which do not affect compliance."""
        return self._unsatisfied(frozenset({"procedure"}))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of a report's `compliance`: level, counts, deviations and all rows."""
        return {
            "test": self.test,
            "level": self.status,
            "why": list(self.blocking_ids),
            "must": self._level_counts(MUSTS),
            "conditions": self._level_counts(CONDITIONS),
            "should": self._level_counts(SHOULDS),
            "deviations": [one.requirement.id for one in self.deviations],
            "rows": [one.to_dict() for one in self.rows],
        }

    def _unsatisfied(self, levels: frozenset[str]) -> tuple[JudgedRequirement, ...]:
        return tuple(one for one in self.rows if one.requirement.level in levels and not one.is_satisfied)

    def _level_counts(self, levels: frozenset[str]) -> dict[str, int]:
        rows = [one for one in self.rows if one.requirement.level in levels]
        return {
            "n": len(rows),
            "satisfied": sum(one.is_satisfied for one in rows),
            "not_applicable": sum(one.verdict.status == "not applicable" for one in rows),
        }


def judge(report: Report) -> Matrix:
    """Judge the report of one test by all requirements that apply to it."""
    test = str(report.get("test"))
    rows = [
        JudgedRequirement(one, one.check(report))
        for one in REQUIREMENTS
        if one.subject != COMPARISON and (not one.binds or test in one.binds)
    ]
    return Matrix(test, tuple(rows))


def judge_comparison(reports: Sequence[Report], comparison: Mapping[str, Any] | None = None) -> Matrix:
    """Judge reports of one test on several systems (section 6). `comparison`: JSON of a `TestComparison`."""
    evidence: Report = {"reports": list(reports), "comparison": comparison or {}}
    rows = [JudgedRequirement(one, one.check(evidence)) for one in REQUIREMENTS if one.subject == COMPARISON]
    return Matrix(COMPARISON, tuple(rows))
