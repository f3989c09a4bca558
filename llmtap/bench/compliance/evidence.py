"""Types and helpers of compliance checks: requirement, verdict, and access to parts of a benchmark report.

The checks are in `preparation.py`, `procedures.py` and `judge.py`: functions of a report's JSON that return a
`ComplianceVerdict`. `requirements` connects them with the rows of `requirements.csv`. REQUIRED and SHALL are
MUST, RECOMMENDED is SHOULD (BCP 14). A requirement without a key word has level `procedure` and does not
affect compliance. A missing part of a report is None, not an error. Source: IETF draft, 2.
"""

import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

Report = Mapping[str, Any]
"""JSON of a test's report, or of a comparison: `{"reports": [...], "comparison": ...}`."""
Step = Mapping[str, Any]
"""One load of a report: name, arm, load, cached, and its result as in `llmtap replay --json`."""
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
DATA_SETS: Final = {"conversation": "ShareGPT (A.3.1)", "code-completion": "The Stack (A.4.1)"}
"""Data sets from which workloads of 4.3.2 are drawn."""
MODEL_LOAD: Final = "Cold start: model load (4.5.3)"
"""Name of its line in the configuration of a report."""
NO_LOADS: Final = "the report has no loads"
NO_OPEN: Final = "no load of this test is an open loop"
NO_CLOSED: Final = "no load of this test is a closed loop"
_PILOTS: Final = "capacity/"
"""First part of the names of loads that only search for the capacity."""
_NEARLY: Final = 0.99
"""Share of a duration that is enough: the last Poisson arrival may come a little before the end."""
_PROTOCOLS: Final = {"http": "SSE", "https": "SSE", "ws": "WebSocket", "wss": "WebSocket", "grpc": "gRPC"}
_IDS: Final = {"content.kind": "ids", "sharing": None}
_LONG: Final = {"content.kind": "document", "output.tokens": 256, "sharing": None}
_STANDARD: Final[Mapping[str, Mapping[str, Any]]] = {
    "synthetic-uniform": {
        "input.distribution": "uniform", "input.min": 128, "input.max": 512,
        "output.distribution": "uniform", "output.min": 64, "output.max": 256, **_IDS,
    },
    "synthetic-skewed": {
        "input.distribution": "lognormal", "input.mu": 5.5, "input.sigma": 1.0, "input.max": 4_096,
        "output.distribution": "lognormal", "output.mu": 4.5, "output.sigma": 1.2, "output.max": 2_048,
        **_IDS,
    },
    "conversation": {"sharing.fraction": 0.5, "sharing.tokens.tokens": 200},
    "code-completion": {
        "output.distribution": "lognormal", "output.mu": 4.0, "output.sigma": 1.5, "sharing.fraction": 0.8,
    },
    "long-context": {"input.values": [8_192, 16_384, 32_768, 65_536, 131_072], **_LONG},
    "long-context-uniform": {
        "input.distribution": "uniform", "input.min": 8_192, "input.max": 32_768, **_LONG,
    },
}  # fmt: skip
"""Properties of each workload of 4.3.2. `long-context` is as in A.5, `long-context-uniform` as in 4.3.2.5."""


@dataclass(frozen=True, slots=True)
class ComplianceVerdict:
    status: Status
    evidence: str


Check = Callable[[Report], ComplianceVerdict]
LoadJudge = Callable[[Report, Step], ComplianceVerdict]
Among = Callable[[Step], bool]


@dataclass(frozen=True, slots=True)
class Requirement:
    id: str
    """`4.2.5-2`: second key word of 4.2.5; `4.2.6-1c`: third item of its list; `5.3.2-p1`: no key word."""
    section: str
    level: Level
    says: str
    binds: tuple[str, ...]
    """Names of tests; empty: all of them."""
    subject: Subject
    check: Check

    def to_dict(self) -> dict[str, object]:
        told = asdict(self)
        del told["check"]
        return told


def requirements(checks: Mapping[str, Check]) -> tuple[Requirement, ...]:
    """Return the requirements of `requirements.csv` that have a check, in the order of the draft."""
    with Path(__file__).with_name("requirements.csv").open(encoding="utf-8", newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    return tuple(
        Requirement(
            row["id"], row["id"].rpartition("-")[0], row["level"], row["says"],
            tuple(row["tests"].split()), row["subject"], checks[row["id"]],
        )
        for row in rows
        if row["id"] in checks
    )  # fmt: skip


# ---------------------------------------------------------------- verdicts


def met(evidence: str) -> ComplianceVerdict:
    return ComplianceVerdict("met", evidence)


def not_met(evidence: str) -> ComplianceVerdict:
    """The report shows a violation, or lacks a statement that the draft demands."""
    return ComplianceVerdict("not met", evidence)


def verdict(is_met: object, evidence: str, *, otherwise: str = "") -> ComplianceVerdict:
    """Return met or not met; `otherwise`: evidence if it is not met, by default the same."""
    return met(evidence) if is_met else not_met(otherwise or evidence)


def not_applicable(evidence: str) -> ComplianceVerdict:
    return ComplianceVerdict("not applicable", evidence)


def cannot_tell(evidence: str) -> ComplianceVerdict:
    """The report shows neither that it was done nor that it was not."""
    return ComplianceVerdict("cannot tell", evidence)


def worst(verdicts: Sequence[ComplianceVerdict], nothing: str) -> ComplianceVerdict:
    """Return the gravest verdict and how many share it; `nothing`: evidence if there are none."""
    if not verdicts:
        return cannot_tell(nothing)
    gravest = min(verdicts, key=lambda verdict: _GRAVEST.index(verdict.status))
    alike = sum(verdict.status == gravest.status for verdict in verdicts)
    more = f" ({alike} of {len(verdicts)})" if len(verdicts) > 1 else ""
    return ComplianceVerdict(gravest.status, gravest.evidence + more)


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
    return not name_of(step).startswith(_PILOTS)


def measured(report: Report) -> Sequence[Step]:
    return [step for step in steps(report) if is_measured(step)]


def levels_of(report: Report) -> list[Mapping[str, Any]]:
    levels = at(report, "measurements.levels")
    return [one for one in levels if isinstance(one, Mapping)] if isinstance(levels, list | tuple) else []


def counted(report: Report) -> Among:
    """Return whether a load is one of the test's levels; without a list of levels, whether it is measured."""
    names = {one.get("step") for one in levels_of(report)} - {None}
    return lambda step: is_measured(step) and (not names or step.get("name") in names)


def level_of(report: Report, step: Step) -> Mapping[str, Any]:
    return next((one for one in levels_of(report) if one.get("step") == step.get("name")), {})


def is_open(step: Step) -> bool:
    return bool(at(step, "result.load.mode") == "open")


def is_closed(step: Step) -> bool:
    return bool(at(step, "result.load.mode") == "closed")


def every(step: Step) -> bool:
    return True


def arms(loads: Iterable[Step]) -> list[str]:
    return sorted({str(step.get("arm") or "the target") for step in loads})


def arrivals_of(step: Step) -> str | None:
    told = at(step, "result.plan.arrivals.arrivals")
    return told if isinstance(told, str) else None


def lasted(report: Report, step: Step) -> float | None:
    """Return for how many seconds a load was sent.

    By preference: as its level states, the time that ended it, the span of arrivals, until the last answer.
    """
    told = at(level_of(report, step), "window.to")
    if told is None and at(step, "result.load.stopped") is not None:
        told = at(report, "params.duration")
    span, n = at(step, "result.arrivals.sent.span"), at(step, "result.arrivals.sent.n")
    if told is None and is_open(step) and span and n and n > 1:
        told = span + span / (n - 1)
    if told is None:
        told = at(step, "result.window.seconds")
    return None if told is None else float(told)


def slots_of(report: Report, step: Step) -> int | None:
    """Return the concurrency of a closed loop."""
    named = re.search(r"(\d+)-?(?:slots|at-a-time)", name_of(step))
    told = (
        at(step, "load.closed"), level_of(report, step).get("concurrency"), named and int(named[1]),
        at(report, "params.concurrency"),
    )  # fmt: skip
    return next((slots for slots in told if isinstance(slots, int)), None)


def protocol(report: Report) -> str | None:
    url = at(report, "target.url")
    return _PROTOCOLS.get(urlsplit(url).scheme) if isinstance(url, str) else None


def workload(step: Step) -> Mapping[str, Any]:
    return at(step, "result.plan.workload") or {}


def workload_name(step: Step) -> str | None:
    name: str | None = workload(step).get("name") or at(step, "result.plan.trace")
    return name


def departures(report: Report, step: Step) -> list[str]:
    """Return how a workload differs from that of the same name in 4.3.2, or that there is none."""
    told, name = workload(step), str(workload_name(step))
    if name not in _STANDARD:
        return [f"{name} is none of the workloads of 4.3.2"]
    found = [
        f"{path} is {text(at(told, path)) or 'not told'}, not {text(value) or 'none'}"
        for path, value in _STANDARD[name].items()
        if text(at(told, path)) != text(value)
    ]
    if name in DATA_SETS and not told.get("data"):
        found.append(f"no file of {DATA_SETS[name]} was given: lengths and texts are generated")
    fixed = at(report, "params.output_tokens")
    # 5.5.2 asks for answers of one length.
    if fixed not in (None, at(told, "output.tokens")) and report.get("test") != "capacity":
        found.append(f"all answers have {text(fixed)} tokens")
    return found


def table(report: Report, number: int) -> Mapping[str, Any] | None:
    for found in report.get("tables") or ():
        if re.match(rf"\s*Table {number}\b", str(at(found, "caption"))):
            rows = [list(map(str, cells)) for cells in at(found, "rows") or () if cells]
            return {"heads": list(map(str, at(found, "heads") or ())), "rows": rows}
    return None


def cell(found: Mapping[str, Any] | None, label: str) -> str | None:
    """Return the value beside a label in a table of two columns, or None."""
    for cells in () if found is None else found["rows"]:
        if len(cells) > 1 and _same(label, cells[0]):
            return None if cells[1].strip() in ("", "-") else cells[1]
    return None


def _same(wanted: str, own: str) -> bool:
    def plain(label: str) -> str:
        return label.replace("\u2019", "'").strip().lower()

    return plain(wanted) in (plain(own), re.sub(r"\s*\([^)]*\)$", "", plain(own)))


# ---------------------------------------------------------------- texts


def text(value: object) -> str:
    match value:
        case None | "" | "unknown":
            return ""
        case bool():
            return "yes" if value else "no"
        case int():
            return count(value)
        case float():
            return f"{value:g}"
        case list() | tuple():
            return ", ".join(text(item) for item in value)
    return str(value)


def count(n: float | None) -> str:
    return "?" if n is None else f"{n:,.0f}"


def several(n: float | None, noun: str) -> str:
    return f"{count(n)} {noun}" + ("" if n == 1 else "s")


def seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if abs(value) * scale >= 1:
            return f"{value * scale:.4g} {unit}"
    return f"{value * 1e6:.3g} us"


# ---------------------------------------------------------------- kinds of checks


def over(report: Report, judge: LoadJudge, among: Among = every, none: str = NO_LOADS) -> ComplianceVerdict:
    """Return the gravest verdict over the loads `among`, with the load's name; `none`: why there are none."""
    loads = steps(report)
    chosen = [step for step in loads if among(step)]
    if loads and not chosen:
        return not_applicable(none)
    verdicts = []
    for step in chosen:
        one = judge(report, step)
        name = step.get("name") if len(chosen) > 1 else None
        verdicts.append(ComplianceVerdict(one.status, f"{name}: {one.evidence}" if name else one.evidence))
    return worst(verdicts, NO_LOADS)


def each_load(among: Among = every, none: str = NO_LOADS) -> Callable[[LoadJudge], Check]:
    """Make a check of a judge of one load."""
    return lambda judge: lambda report: over(report, judge, among, none)


def each_level(judge: LoadJudge) -> Check:
    """Make a check of a judge of one load, over the test's levels."""
    return lambda report: over(report, judge, counted(report))


def states(path: str, shown: str, missing: str, among: Among = every, none: str = NO_LOADS) -> Check:
    """Return a check that each load `among` has a value at `path`, which `shown` formats for the evidence."""

    def judge(report: Report, step: Step) -> ComplianceVerdict:
        value = at(step, path)
        return met(shown.format(value)) if value else not_met(missing)

    return lambda report: over(report, judge, among, none)


def reads(path: str, missing: str) -> Callable[[Callable[[Any], ComplianceVerdict]], Check]:
    """Make a check of a function of the report's value at `path`; without a value the check cannot tell."""

    def decorate(judge: Callable[[Any], ComplianceVerdict]) -> Check:
        def check(report: Report) -> ComplianceVerdict:
            value = at(report, path)
            return cannot_tell(missing) if value in (None, [], {}) else judge(value)

        return check

    return decorate


def declared(path: str, what: str) -> Check:
    """Return a check that the report has a value at `path`."""

    def check(report: Report) -> ComplianceVerdict:
        said = text(at(report, path))
        return verdict(said, f"{what}: {said}", otherwise=f"{what} is not stated ({path})")

    return check


def only_at(boundary: str) -> Callable[[Check], Check]:
    """Make a check apply only where the SUT has this boundary."""

    def decorate(check: Check) -> Check:
        def checked(report: Report) -> ComplianceVerdict:
            told = at(report, "sut.boundary")
            if told is None:
                return cannot_tell("it depends on the SUT's boundary, which is not declared (sut.boundary)")
            return check(report) if told == boundary else not_applicable(f"the SUT's boundary is {told}")

        return checked

    return decorate


def lasts(needed: float, among: Among | None = None) -> Check:
    def judge(report: Report, step: Step) -> ComplianceVerdict:
        found = lasted(report, step)
        if found is None:
            return cannot_tell("how long it lasted is not reported")
        return verdict(found >= needed * _NEARLY, f"{found:.1f} s, {needed:g} s needed")

    return lambda report: over(report, judge, among or counted(report))


def has_requests(needed: int, what: str = "", among: Among = is_measured) -> Check:
    def judge(report: Report, step: Step) -> ComplianceVerdict:
        n = at(step, "result.n")
        if n is None:
            return cannot_tell("the number of requests is not reported")
        return verdict(n >= needed, f"{several(n, 'request')}, {count(needed)} needed" + what)

    return lambda report: over(report, judge, among)


def has_levels(wanted: Sequence[int], of: str) -> Check:
    """Return a check that the parameter `levels` has these percentages of `of`."""

    @reads("params.levels", "the levels of load are not reported")
    def check(told: Any) -> ComplianceVerdict:
        return all_levels(list(map(float, told)), wanted, f" of {of}")

    return check


def all_levels(told: Sequence[float], wanted: Sequence[int], of: str = "") -> ComplianceVerdict:
    evidence = f"{', '.join(f'{one:g} %' for one in told)}{of}"
    lacking = [f"{level} %" for level in wanted if not any(abs(one - level) < 0.5 for one in told)]
    return verdict(not lacking, evidence, otherwise=f"{evidence}; without {', '.join(lacking)}")


def workload_is(*names: str) -> Check:
    """Return a check that each load has one of these workloads, as the draft describes it."""
    wanted = " or ".join(names)

    def judge(report: Report, step: Step) -> ComplianceVerdict:
        name = workload_name(step)
        if name is None:
            return cannot_tell(f"what the requests were is not reported; {wanted} is wanted")
        if name not in names:
            return not_met(f"workload {name}, not {wanted}")
        differing = departures(report, step)
        if differing:
            return not_met(f"workload {name} differs from the draft's: {'; '.join(differing)}")
        readings = [
            f"{at(one, 'section')}: {at(one, 'here')}" for one in workload(step).get("deviations") or ()
        ]
        return met("; ".join([f"workload {name}", *readings]))

    return lambda report: over(report, judge, is_measured)


def table_has(number: int, heads: Iterable[str] = (), labels: Iterable[str] = ()) -> Check:
    """Return a check that the report has a table of the draft, with these heads and first cells."""
    heads, labels = tuple(heads), tuple(labels)

    def check(report: Report) -> ComplianceVerdict:
        found = table(report, number)
        if found is None:
            return not_met(f"the report has no Table {number}")
        firsts = [cells[0] for cells in found["rows"]]
        parts = ((heads, found["heads"]), (labels, firsts))
        lacking = [one for wanted, own in parts for one in wanted if not any(_same(one, o) for o in own)]
        if lacking:
            return not_met(f"Table {number} lacks {', '.join(lacking)}")
        return verdict(
            firsts, f"Table {number} with {len(firsts)} rows", otherwise=f"Table {number} has no rows"
        )

    return check
