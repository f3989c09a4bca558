"""Types and helpers of compliance checks: requirement, verdict, and access to parts of a benchmark report.

The checks are in `preparation.py`, `procedures.py` and `judge.py`: functions of a report's JSON that return a
`ComplianceVerdict`. `requirements` connects them with the rows of `requirements.csv`. REQUIRED and SHALL
count as MUST, RECOMMENDED counts as SHOULD (BCP 14). Requirements without a key word have the level
`condition` if compliance needs them as much as a MUST: minimums that the draft states ("at least 60 seconds")
and a valid result. The others have the level `procedure` and do not affect compliance. A missing part of a
report is None, not an error. Source: IETF draft, 2.
"""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast
from urllib.parse import urlsplit

from llmtap.workload.public_data import PUBLISHED

Report = Mapping[str, Any]
"""JSON of a test's report, or of a comparison: `{"reports": [...], "comparison": ...}`."""
Step = Mapping[str, Any]
"""JSON of one load of a report (`BenchStep`); its `result` is as in `llmtap replay --json`."""
Level = Literal[
    "MUST",
    "MUST NOT",
    "REQUIRED",
    "SHALL",
    "SHOULD",
    "SHOULD NOT",
    "RECOMMENDED",
    "MAY",
    "OPTIONAL",
    "condition",
    "procedure",
]
Subject = Literal["load generator", "procedure", "report", "setup", "tester", "comparison", "definition"]
Status = Literal["met", "not met", "not applicable", "cannot tell"]

MUSTS: Final = frozenset({"MUST", "MUST NOT", "REQUIRED", "SHALL"})
CONDITIONS: Final = frozenset({"condition"})
"""Level of the requirements without a key word that compliance needs: stated minimums, and a valid result."""
SHOULDS: Final = frozenset({"SHOULD", "SHOULD NOT", "RECOMMENDED"})
_BY_GRAVITY: Final[tuple[Status, ...]] = ("not met", "cannot tell", "met", "not applicable")
DATA_SETS: Final = {name: PUBLISHED[name].title for name in ("conversation", "code-completion")}
"""By name of the workload: title of its data set. Only these two workloads of IETF 4.3.2 are data sets."""
MODEL_LOAD: Final = "Cold start: model load (4.5.3)"
"""Label of the line about the model load in the configuration of a report."""
NO_LOADS: Final = "the report has no loads"
NO_OPEN: Final = "no load of this test is an open loop"
NO_CLOSED: Final = "no load of this test is a closed loop"
_CAPACITY_SEARCH: Final = "capacity/"
"""Prefix of the names of loads that only search for the capacity; checks of the test's loads skip them."""
_DURATION_SHARE_MIN: Final = 0.99
"""A load passes if it lasts this share of the required duration: random arrivals end before the exact end."""
_PROTOCOLS: Final = {"http": "SSE", "https": "SSE", "ws": "WebSocket", "wss": "WebSocket", "grpc": "gRPC"}
_IDS: Final = {"content.kind": "ids", "sharing": None}
_LONG: Final = {"content.kind": "document", "output.tokens": 256, "sharing": None}
_STANDARD: Final[Mapping[str, Mapping[str, Any]]] = {
    "synthetic-uniform": {
        "input.distribution": "uniform",
        "input.min": 128,
        "input.max": 512,
        "output.distribution": "uniform",
        "output.min": 64,
        "output.max": 256,
        **_IDS,
    },
    "synthetic-skewed": {
        "input.distribution": "lognormal",
        "input.mu": 5.5,
        "input.sigma": 1.0,
        "input.max": 4_096,
        "output.distribution": "lognormal",
        "output.mu": 4.5,
        "output.sigma": 1.2,
        "output.max": 2_048,
        **_IDS,
    },
    "conversation": {"sharing.fraction": 0.5, "sharing.tokens.tokens": 200},
    "code-completion": {
        "output.distribution": "lognormal",
        "output.mu": 4.0,
        "output.sigma": 1.5,
        "sharing.fraction": 0.8,
    },
    "long-context": {"input.values": [8_192, 16_384, 32_768, 65_536, 131_072], **_LONG},
    "long-context-uniform": {
        "input.distribution": "uniform",
        "input.min": 8_192,
        "input.max": 32_768,
        **_LONG,
    },
}
"""By name: properties of each workload of IETF 4.3.2. The draft defines the Long Context workload twice:
`long-context` follows A.5, and `long-context-uniform` follows 4.3.2.5."""


@dataclass(frozen=True, slots=True)
class ComplianceVerdict:
    """Result of judging a report by one requirement."""

    status: Status
    evidence: str
    """Sentence with the facts from which the status follows."""


Check = Callable[[Report], ComplianceVerdict]
LoadJudge = Callable[[Report, Step], ComplianceVerdict]
StepFilter = Callable[[Step], bool]


@dataclass(frozen=True, slots=True)
class Requirement:
    """One requirement of the IETF draft, with the function that judges it."""

    id: str
    """Section of the IETF draft, and place in it. `4.2.5-2`: second key word. `4.2.6-1c`: third item (c) of
    the list after the first key word. `5.3.2-p1`: first requirement without a key word."""
    section: str
    """Section of the IETF draft."""
    level: Level
    """Key word of the requirement, such as MUST."""
    says: str
    """Text of the requirement."""
    binds: tuple[str, ...]
    """Names of the tests to which the requirement applies; empty: all tests."""
    subject: Subject
    """Part of the benchmark that must satisfy the requirement."""
    check: Check
    """Function that judges a report by the requirement."""

    def to_dict(self) -> dict[str, object]:
        fields = asdict(self)
        del fields["check"]
        return fields


def requirements(checks: Mapping[str, Check]) -> tuple[Requirement, ...]:
    """Return the requirements of `requirements.csv` that have a check, in the order of the draft."""
    with Path(__file__).with_name("requirements.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return tuple(
        Requirement(
            row["id"],
            row["id"].rpartition("-")[0],
            cast(Level, row["level"]),
            row["says"],
            tuple(row["tests"].split()),
            cast(Subject, row["subject"]),
            checks[row["id"]],
        )
        for row in rows
        if row["id"] in checks
    )


# ---------------------------------------------------------------- make a verdict


def met(evidence: str) -> ComplianceVerdict:
    return ComplianceVerdict("met", evidence)


def not_met(evidence: str) -> ComplianceVerdict:
    """Return the verdict on a report that shows a violation, or lacks a required statement."""
    return ComplianceVerdict("not met", evidence)


def verdict(is_met: object, evidence: str, *, if_not_met: str = "") -> ComplianceVerdict:
    """Return the verdict "met" or "not met". `if_not_met`: evidence if not met; if empty, `evidence`."""
    return met(evidence) if is_met else not_met(if_not_met or evidence)


def not_applicable(evidence: str) -> ComplianceVerdict:
    return ComplianceVerdict("not applicable", evidence)


def cannot_tell(evidence: str) -> ComplianceVerdict:
    """Return the verdict on a requirement for which the report has no evidence."""
    return ComplianceVerdict("cannot tell", evidence)


def worst_verdict(verdicts: Sequence[ComplianceVerdict], if_empty: str) -> ComplianceVerdict:
    """Return the gravest of the verdicts, and add to its evidence the number of verdicts with its status.

    `if_empty`: evidence of the result "cannot tell", which is returned if there are no verdicts.
    """
    if not verdicts:
        return cannot_tell(if_empty)
    gravest = min(verdicts, key=lambda verdict: _BY_GRAVITY.index(verdict.status))
    same_status_count = sum(verdict.status == gravest.status for verdict in verdicts)
    count_suffix = f" ({same_status_count} of {len(verdicts)})" if len(verdicts) > 1 else ""
    return ComplianceVerdict(gravest.status, gravest.evidence + count_suffix)


# ---------------------------------------------------------------- parts of a report


def at(tree: object, path: str) -> Any:
    """Return the value at a path such as `metrics.ttft.n`, or None."""
    for name in path.split("."):
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(name)
    return tree


def steps(report: Report) -> Sequence[Step]:
    return report.get("steps") or ()


def name_of(step: Step) -> str:
    return str(step.get("name") or "")


def is_measured(step: Step) -> bool:
    """Return whether a load belongs to the test itself, not to a search for the capacity."""
    return not name_of(step).startswith(_CAPACITY_SEARCH)


def measured_steps(report: Report) -> Sequence[Step]:
    return [step for step in steps(report) if is_measured(step)]


def levels_of(report: Report) -> list[Mapping[str, Any]]:
    levels = at(report, "measurements.levels")
    return [one for one in levels if isinstance(one, Mapping)] if isinstance(levels, list | tuple) else []


def level_filter(report: Report) -> StepFilter:
    """Return a filter of the loads of the test's levels; if there are no levels, of all measured loads."""
    names = {one.get("step") for one in levels_of(report)} - {None}
    return lambda step: is_measured(step) and (not names or step.get("name") in names)


def level_of(report: Report, step: Step) -> Mapping[str, Any]:
    return next((one for one in levels_of(report) if one.get("step") == step.get("name")), {})


def is_open_loop(step: Step) -> bool:
    return bool(at(step, "result.load.mode") == "open")


def is_closed_loop(step: Step) -> bool:
    return bool(at(step, "result.load.mode") == "closed")


def any_step(step: Step) -> bool:
    """Select every load (a `StepFilter`)."""
    return True


def arms_of(loads: Iterable[Step]) -> list[str]:
    return sorted({str(step.get("arm") or "the target") for step in loads})


def arrivals_of(step: Step) -> str | None:
    process = at(step, "result.plan.arrivals.arrivals")
    return process if isinstance(process, str) else None


def sent_seconds(report: Report, step: Step) -> float | None:
    """Return the seconds for which a load was sent.

    The first known value of these is returned: end of the counted window of the load's level, duration at
    which the load was stopped, span of the arrivals (open loop), time until the last response.
    """
    duration_s = at(level_of(report, step), "window.to")
    if duration_s is None and at(step, "result.load.stopped") is not None:
        duration_s = at(report, "params.duration")
    span, n = at(step, "result.arrivals.sent.span"), at(step, "result.arrivals.sent.n")
    if duration_s is None and is_open_loop(step) and span and n and n > 1:
        duration_s = span + span / (n - 1)
    if duration_s is None:
        duration_s = at(step, "result.window.seconds")
    return None if duration_s is None else float(duration_s)


def slots_of(report: Report, step: Step) -> int | None:
    """Return the concurrency of a closed loop."""
    candidates = (
        at(step, "load.closed"),
        level_of(report, step).get("concurrency"),
        at(report, "params.concurrency"),
    )
    return next((slots for slots in candidates if isinstance(slots, int)), None)


def protocol(report: Report) -> str | None:
    url = at(report, "target.url")
    return _PROTOCOLS.get(urlsplit(url).scheme) if isinstance(url, str) else None


def workload(step: Step) -> Mapping[str, Any]:
    return at(step, "result.plan.workload") or {}


def workload_name(step: Step) -> str | None:
    name: str | None = workload(step).get("name") or at(step, "result.plan.trace")
    return name


def workload_differences(report: Report, step: Step) -> list[str]:
    """Return how the workload of a load differs from the one with the same name in IETF 4.3.2, as texts."""
    description, name = workload(step), str(workload_name(step))
    if name not in _STANDARD:
        return [f"{name} is none of the workloads of 4.3.2"]
    texts = [
        f"{path} is {text(at(description, path)) or 'not reported'}, not {text(value) or 'none'}"
        for path, value in _STANDARD[name].items()
        if text(at(description, path)) != text(value)
    ]
    if name in DATA_SETS and not description.get("data"):
        texts.append(f"no file of {DATA_SETS[name]} was given: lengths and texts are generated")
    fixed = at(report, "params.output_tokens")
    # One length for all answers differs from the workload, but a capacity test must have it (draft, 5.5.2).
    if fixed not in (None, at(description, "output.tokens")) and report.get("test") != "capacity":
        texts.append(f"all answers have {text(fixed)} tokens")
    return texts


def table(report: Report, number: int) -> Mapping[str, Any] | None:
    for candidate in report.get("tables") or ():
        if str(at(candidate, "caption")).startswith(f"Table {number}:"):
            rows = [list(map(str, cells)) for cells in at(candidate, "rows") or () if cells]
            return {"heads": list(map(str, at(candidate, "heads") or ())), "rows": rows}
    return None


def table_value(report_table: Mapping[str, Any] | None, label: str) -> str | None:
    """Return the second cell of the row whose first cell is `label`; None if it is empty or missing."""
    for cells in () if report_table is None else report_table["rows"]:
        if len(cells) > 1 and _is_same_label(label, cells[0]):
            return None if cells[1].strip() in ("", "-") else cells[1]
    return None


def _is_same_label(wanted: str, own: str) -> bool:
    """Return whether a label of the report is the draft's label, possibly with a unit such as ` (ms)`."""

    def plain(label: str) -> str:
        return label.replace("\u2019", "'").strip().lower()

    return plain(wanted) in (plain(own), plain(own).partition(" (")[0])


# ---------------------------------------------------------------- values as text


def text(value: object) -> str:
    """Return the text of a JSON value; empty if it is absent or "unknown"."""
    match value:
        case None | "" | "unknown":
            return ""
        case bool():
            return "yes" if value else "no"
        case int():
            return count_text(value)
        case float():
            return f"{value:g}"
        case list() | tuple():
            return ", ".join(text(item) for item in value)
    return str(value)


def count_text(n: float | None) -> str:
    return "?" if n is None else f"{n:,.0f}"


def plural(n: float | None, noun: str) -> str:
    return f"{count_text(n)} {noun}" + ("" if n == 1 else "s")


def duration_text(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if abs(seconds) * scale >= 1:
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds * 1e6:.3g} us"


# ---------------------------------------------------------------- functions that make checks


def judge_loads(
    report: Report, judge: LoadJudge, step_filter: StepFilter = any_step, if_none: str = NO_LOADS
) -> ComplianceVerdict:
    """Judge each load that the filter selects, and return the gravest verdict with the name of its load.

    `if_none`: evidence of the verdict "not applicable", which is returned if the filter selects no load.
    """
    loads = steps(report)
    chosen = [step for step in loads if step_filter(step)]
    if loads and not chosen:
        return not_applicable(if_none)
    verdicts = []
    for step in chosen:
        judged = judge(report, step)
        name = step.get("name") if len(chosen) > 1 else None
        verdicts.append(
            ComplianceVerdict(judged.status, f"{name}: {judged.evidence}" if name else judged.evidence)
        )
    return worst_verdict(verdicts, NO_LOADS)


def each_load(step_filter: StepFilter = any_step, if_none: str = NO_LOADS) -> Callable[[LoadJudge], Check]:
    """Return a decorator that makes a check of all loads in the filter from a function that judges one."""
    return lambda judge: lambda report: judge_loads(report, judge, step_filter, if_none)


def each_level(judge: LoadJudge) -> Check:
    """Return a check of all levels of the test, from a function that judges one load."""
    return lambda report: judge_loads(report, judge, level_filter(report))


def has_value(
    path: str, shown: str, missing: str, step_filter: StepFilter = any_step, if_none: str = NO_LOADS
) -> Check:
    """Return a check that each filtered load has a value at `path`.

    `shown`: format of the evidence for a value. `missing`: evidence if there is no value.
    """

    def judge(report: Report, step: Step) -> ComplianceVerdict:
        value = at(step, path)
        return met(shown.format(value)) if value else not_met(missing)

    return lambda report: judge_loads(report, judge, step_filter, if_none)


def judges_value_at(path: str, missing: str) -> Callable[[Callable[[Any], ComplianceVerdict]], Check]:
    """Return a decorator that makes a check of the report's value at `path` from a function that judges it.

    If the report has no value there, the verdict is "cannot tell" with the evidence `missing`.
    """

    def decorate(judge: Callable[[Any], ComplianceVerdict]) -> Check:
        def check(report: Report) -> ComplianceVerdict:
            value = at(report, path)
            return cannot_tell(missing) if value in (None, [], {}) else judge(value)

        return check

    return decorate


def is_declared(path: str, what: str) -> Check:
    """Return a check that the report has a value at `path`. `what`: name of the value in the evidence."""

    def check(report: Report) -> ComplianceVerdict:
        value = text(at(report, path))
        return verdict(value, f"{what}: {value}", if_not_met=f"{what} is not stated ({path})")

    return check


def only_for_boundary(boundary: str) -> Callable[[Check], Check]:
    """Return a decorator that makes a check not applicable to systems with another `sut.boundary`."""

    def decorate(check: Check) -> Check:
        def check_if_applicable(report: Report) -> ComplianceVerdict:
            own_boundary = at(report, "sut.boundary")
            if own_boundary is None:
                return cannot_tell("it depends on the SUT's boundary, which is not declared (sut.boundary)")
            return (
                check(report)
                if own_boundary == boundary
                else not_applicable(f"the SUT's boundary is {own_boundary}")
            )

        return check_if_applicable

    return decorate


def lasts_at_least(needed: float, step_filter: StepFilter | None = None) -> Check:
    """Return a check that each load was sent for at least `needed` seconds.

    `step_filter`: selects the loads; None: the loads of the test's levels.
    """

    def judge(report: Report, step: Step) -> ComplianceVerdict:
        duration_s = sent_seconds(report, step)
        if duration_s is None:
            return cannot_tell("how long it lasted is not reported")
        return verdict(duration_s >= needed * _DURATION_SHARE_MIN, f"{duration_s:.1f} s, {needed:g} s needed")

    return lambda report: judge_loads(report, judge, step_filter or level_filter(report))


def has_requests(needed: int, what: str = "", step_filter: StepFilter = is_measured) -> Check:
    """Return a check that each load has at least `needed` requests. `what`: text appended to the evidence."""

    def judge(report: Report, step: Step) -> ComplianceVerdict:
        n = at(step, "result.n")
        if n is None:
            return cannot_tell("the number of requests is not reported")
        return verdict(n >= needed, f"{plural(n, 'request')}, {count_text(needed)} needed" + what)

    return lambda report: judge_loads(report, judge, step_filter)


def has_levels(wanted: Sequence[int], of: str) -> Check:
    """Return a check that the parameter `levels` contains all percentages in `wanted`.

    `of`: the quantity of which the levels are percentages, for the text of the verdict.
    """

    @judges_value_at("params.levels", "the levels of load are not reported")
    def check(levels: Any) -> ComplianceVerdict:
        return judge_levels(list(map(float, levels)), wanted, f" of {of}")

    return check


def judge_levels(levels: Sequence[float], wanted: Sequence[int], of: str = "") -> ComplianceVerdict:
    """Judge whether `levels` contains all percentages in `wanted`. `of`: text appended to the evidence."""
    evidence = f"{', '.join(f'{own:g} %' for own in levels)}{of}"
    lacking = [f"{level} %" for level in wanted if not any(abs(own - level) < 0.5 for own in levels)]
    return verdict(not lacking, evidence, if_not_met=f"{evidence}; without {', '.join(lacking)}")


def workload_is(*names: str, step_filter: StepFilter = is_measured) -> Check:
    """Return a check that the workload of each filtered load is one of `names`, exactly as in the draft."""
    wanted = " or ".join(names)

    def judge(report: Report, step: Step) -> ComplianceVerdict:
        name = workload_name(step)
        if name is None:
            return cannot_tell(f"what the requests were is not reported; {wanted} is wanted")
        if name not in names:
            return not_met(f"workload {name}, not {wanted}")
        differing = workload_differences(report, step)
        if differing:
            return not_met(f"workload {name} differs from the draft's: {'; '.join(differing)}")
        readings = [
            f"{at(one, 'section')}: {at(one, 'here')}" for one in workload(step).get("deviations") or ()
        ]
        return met("; ".join([f"workload {name}", *readings]))

    return lambda report: judge_loads(report, judge, step_filter)


def table_has(number: int, heads: Iterable[str] = (), labels: Iterable[str] = ()) -> Check:
    """Return a check that the report has a table of the draft.

    `heads`: required column heads. `labels`: required first cells of rows.
    """
    heads, labels = tuple(heads), tuple(labels)

    def check(report: Report) -> ComplianceVerdict:
        report_table = table(report, number)
        if report_table is None:
            return not_met(f"the report has no Table {number}")
        firsts = [cells[0] for cells in report_table["rows"]]
        parts = ((heads, report_table["heads"]), (labels, firsts))
        lacking = [
            one for wanted, own in parts for one in wanted if not any(_is_same_label(one, o) for o in own)
        ]
        if lacking:
            return not_met(f"Table {number} lacks {', '.join(lacking)}")
        return verdict(
            firsts, f"Table {number} with {len(firsts)} rows", if_not_met=f"Table {number} has no rows"
        )

    return check
