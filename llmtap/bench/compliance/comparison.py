"""Checks of the IETF draft's requirements on comparisons of systems (section 6) and on testers (section 7).

Most checks get a comparison (`bench/report/compare.py`) with the `reports` of one test on each system; those
on testers get one report. `ROWS` has the requirements with their checks, for `judge.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import accumulate, pairwise
from typing import Final

import msgspec

from llmtap.bench.compliance.evidence import (
    Check,
    ComplianceVerdict,
    Report,
    Step,
    at,
    cannot_tell,
    count,
    measured,
    met,
    not_applicable,
    not_met,
    requirements,
    text,
    verdict,
    workload,
)
from llmtap.report.values import leaves


def noted(report: Report, *words: str) -> str | None:
    notes = map(str, at(report, "sut.notes") or ())
    return next((note for note in notes if any(word in note.lower() for word in words)), None)


def _said(what: str, *words: str) -> Check:
    def check(report: Report) -> ComplianceVerdict:
        note = noted(report, *words)
        if note is None:
            return cannot_tell(f"no note of {what} (sut.notes)")
        return met(f"the tester notes: {note}")

    return check


def _varied(report: Report) -> ComplianceVerdict:
    note = noted(report, "production traffic", "traffic of production")
    names = {str(workload(step).get("name")) for step in measured(report) if workload(step)}
    traces = {str(at(step, "result.plan.trace")) for step in measured(report)} - {"None"}
    shown = ", ".join(sorted(names | traces)) or "no workload"
    if note is not None:
        return met(f"the tester notes: {note}")
    return cannot_tell(
        f"this report has {shown}; no note of a comparison with production traffic (sut.notes)"
    )


RUNS_MIN: Final = 3
APART_MAX_S: Final = 3_600.0
"""Longest time between two runs of a comparison, since one sender cannot test two systems at once."""
_DIGITS: Final = 12
_PRODUCTION: Final = ("as in production", "production-representative", "production configuration")


def _reports(report: Report) -> Sequence[Report]:
    return report.get("reports") or ()


def _systems(report: Report) -> list[list[Report]]:
    """Return the runs of each system: as the comparison counts them, else grouped by SUT and target."""
    reports = list(_reports(report))
    told = [one.get("runs") for one in at(report, "comparison.systems") or ()]
    if told and all(isinstance(runs, int) for runs in told) and sum(told) == len(reports):
        ends = list(accumulate(told))
        return [reports[end - runs : end] for runs, end in zip(told, ends, strict=True)]
    found: dict[bytes, list[Report]] = {}
    for one in reports:
        key = msgspec.json.encode([one.get("sut"), one.get("target"), one.get("arms")], order="sorted")
        found.setdefault(key, []).append(one)
    return list(found.values())


def sequence(step: Step) -> str:
    """Return a text that identifies the requests of a load and their planned times."""
    told = workload(step)
    what = (
        f"{told['name']} {str(told.get('sha256'))[:_DIGITS]}"
        if told
        else f"{at(step, 'result.plan.trace')} of {at(step, 'result.plan.rows')} rows"
    )
    arrivals = msgspec.json.encode(at(step, "result.plan.arrivals"), order="sorted").decode()
    n, seed, texts = (at(step, f"result.plan.{name}") for name in ("requests", "seed", "texts"))
    words = "" if texts is None else f", texts {texts}"
    return f"{what}, {n} requests, seed {seed}{words}, {arrivals}"


def _loads(runs: Sequence[Report]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for one in runs:
        for step in measured(one):
            found.setdefault(str(step.get("name")), set()).add(sequence(step))
    return found


def _same_requests(report: Report) -> ComplianceVerdict:
    first, *others = [_loads(runs) for runs in _systems(report)] or [{}]
    if not others:
        return cannot_tell("there is one system, or none")
    if not any((first, *others)):
        return cannot_tell("the reports have no loads")
    shared = [name for name in first if all(name in other for other in others)]
    differing = [name for name in shared if any(other[name] != first[name] for other in others)]
    if differing:
        return not_met(f"other requests in {', '.join(differing)}")
    if not shared:
        return not_met("the systems have no load in common")
    names = {name for loads in (first, *others) for name in loads}
    sample = min(first[shared[0]])
    return met(f"{len(shared)} of {len(names)} loads in common, with equal requests: {sample}")


def _all_equal(report: Report, path: str, what: str, *, needed: bool = True) -> ComplianceVerdict:
    told = [at(one, path) for one in _reports(report)]
    if not told:
        return cannot_tell("there are no reports")
    if needed and not all(text(value) for value in told):
        return cannot_tell(f"{what} is not stated by all ({path})")
    kinds = sorted({_shown(value) for value in told})
    return met(f"{what}: {kinds[0]}") if len(kinds) == 1 else not_met(f"{what}: {' / '.join(kinds)}")


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return (
            ", ".join(f"{name} {_shown(held)}" for name, held in value.items() if held is not None) or "none"
        )
    return text(value) or "none"


def _equal(path: str, what: str) -> Check:
    return lambda report: _all_equal(report, path, what)


def _equal_hardware(report: Report) -> ComplianceVerdict:
    found = _all_equal(report, "sut.hardware.accelerator", "accelerator")
    if found.status == "met":
        found = _all_equal(report, "sut.hardware.count", "accelerators", needed=False)
    if found.status == "not met" and _per_gpu(report).status == "met":
        return met(f"{found.evidence}; normalised by accelerators")
    return found


def _differs(report: Report) -> ComplianceVerdict | None:
    """Return the verdict that normalising does not apply, or None if the hardware differs."""
    same = [
        _all_equal(report, f"sut.hardware.{name}", name, needed=False) for name in ("accelerator", "count")
    ]
    if all(one.status == "met" for one in same):
        return not_applicable(f"equal hardware: {', '.join(one.evidence for one in same)}")
    return None


def _normalised(report: Report, name: str, what: str) -> ComplianceVerdict:
    same = _differs(report)
    if same is not None:
        return same
    told = at(report, "comparison.normalised") or ()
    values = [(one.get("label"), one.get(name)) for one in told]
    if not values or any(value is None for _, value in values):
        return not_met(f"hardware differs, and {what} is not reported of every system")
    return met(", ".join(f"{label} {_shown(value)} {what}" for label, value in values))


def _per_gpu(report: Report) -> ComplianceVerdict:
    return _normalised(report, "tokens_per_gpu_second", "tokens per GPU-second")


def _per_price(report: Report) -> ComplianceVerdict:
    return _normalised(report, "tokens_per_currency", "tokens per unit of money")


def _method(report: Report) -> ComplianceVerdict:
    return _normalised(report, "method", "is how")


def _runs(report: Report) -> ComplianceVerdict:
    runs = [len(one) for one in _systems(report)]
    if not runs:
        return cannot_tell("there are no reports")
    evidence = f"{' and '.join(map(count, runs))} runs, {RUNS_MIN} of each system wanted"
    return verdict(min(runs) >= RUNS_MIN, evidence)


def _intervals(report: Report) -> ComplianceVerdict:
    told = [one for one in at(report, "comparison.comparisons") or () if one.get("low") is not None]
    if told:
        return met(f"{len(told)} differences with intervals")
    within = [one for one in _reports(report) if any(_with_interval(one.get("measurements")))]
    if within and len(within) == len(_reports(report)):
        return met("the figures of each report have intervals")
    return not_met("figures without confidence intervals")


def _with_interval(tree: object) -> Iterator[bool]:
    if isinstance(tree, Mapping):
        if tree.get("low") is not None and tree.get("high") is not None:
            yield True
        for held in tree.values():
            yield from _with_interval(held)
    elif isinstance(tree, list | tuple):
        for held in tree:
            yield from _with_interval(held)


def _tested(report: Report) -> ComplianceVerdict:
    told = [one for one in at(report, "comparison.comparisons") or () if one.get("p") is not None]
    methods = sorted({str(one["method"]) for one in told if one.get("method")})
    if not told:
        return not_met("no difference was tested")
    return met(f"{len(told)} differences tested" + (f" by {', '.join(methods)}" if methods else ""))


def _specification(report: Report) -> ComplianceVerdict:
    def described(one: Report) -> set[str]:
        own = ("sha256", "seed", "requests")
        return {
            msgspec.json.encode(
                {k: v for k, v in workload(step).items() if k not in own}, order="sorted"
            ).decode()
            for step in measured(one)
        }

    told = [described(one) for one in _reports(report)]
    if not told or not all(told):
        return cannot_tell("the reports have no loads")
    names = sorted({str(workload(step).get("name")) for one in _reports(report) for step in measured(one)})
    if any(one != told[0] for one in told):
        return not_met(f"workloads that are described differently: {', '.join(names)}")
    return met(f"one description: {', '.join(names)}")


def _duration(report: Report) -> ComplianceVerdict:
    """Compare the duration parameter, or the number of requests of tests without one."""
    asked = _all_equal(report, "params.duration", "duration (s)", needed=False)
    if asked.status != "met" or at(_reports(report)[0], "params.duration") is not None:
        return asked
    return _all_equal(report, "params.requests", "requests", needed=False)


def _together(report: Report) -> ComplianceVerdict:
    spans = sorted(span for one in _reports(report) if (span := _span(one)) is not None)
    if len(spans) < max(2, len(_reports(report))):
        return cannot_tell("the reports do not report when they were made")
    apart_s = max((b[0] - a[1]).total_seconds() for a, b in pairwise(spans))
    evidence = f"at most {max(0.0, apart_s) / 60:.0f} min between two runs, from {spans[0][0]:%Y-%m-%d %H:%M}"
    return verdict(apart_s <= APART_MAX_S, evidence)


def _span(report: Report) -> tuple[datetime, datetime] | None:
    windows = [at(step, "result.window") or {} for step in measured(report)]
    try:
        begins = [datetime.fromisoformat(one["start"]) for one in windows]
        ends = [datetime.fromisoformat(one["end"]) for one in windows]
    except (KeyError, ValueError):
        return None
    return (min(begins), max(ends)) if begins else None


def _production(report: Report) -> ComplianceVerdict:
    notes = [noted(runs[0], *_PRODUCTION) for runs in _systems(report)]
    if not notes or None in notes:
        return cannot_tell(
            "not of every system it is noted that it is configured as in production (sut.notes)"
        )
    return met("; ".join(map(str, notes)))


def _differences(report: Report) -> ComplianceVerdict:
    systems = _systems(report)
    if not systems:
        return cannot_tell("there are no reports")
    firsts = [{"sut": runs[0].get("sut"), "target": runs[0].get("target")} for runs in systems]
    told = [{path: _shown(value) for path, value in leaves(one)} for one in firsts]
    paths = {path for one in told for path in one}
    differing = sorted(path for path in paths if len({one.get(path) for one in told}) > 1)
    if not differing:
        return met("no difference in what was declared")
    return met(
        "; ".join(f"{path}: {' / '.join(one.get(path, 'none') for one in told)}" for path in differing)
    )


ROWS: Final = requirements(
    {
        "6.1-1a": _same_requests,
        "6.1-1b": _equal("sut.boundary", "boundary"),
        "6.1-1c": _equal_hardware,
        "6.1-1d": _equal("params", "parameters"),
        "6.2-p1": _per_gpu,
        "6.2-p2": _per_price,
        "6.2-p3": _method,
        "6.3-p1": _intervals,
        "6.3-p2": _runs,
        "6.3-p3": _tested,
        "6.4-p1": _specification,
        "6.4-p2": _duration,
        "6.4-p3": _equal("warmup", "warm-up"),
        "6.4-p4": _equal("params", "parameters, criteria among them"),
        "6.4-p5": _together,
        "6.4-p6": _production,
        "6.4-p7": _differences,
        "7.1-1": _said("whether to publish was considered", "publish", "publication"),
        "7.2-1": _varied,
        "7.4-1a": _said("that the system was isolated", "isolated"),
        "7.4-1b": _said("that recovery was prepared", "recovery"),
        "7.4-1c": _said("that failures were watched for", "monitor", "watch"),
    }
)
