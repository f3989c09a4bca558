"""5.6 to 5.10: systems whose requests differ, and systems in several states."""

from collections.abc import Mapping
from typing import Any, Final

from llmtap.bench.compliance.evidence import (
    Step,
    at,
    count,
    has_levels,
    has_requests,
    is_closed,
    is_measured,
    lasts,
    measured,
    name_of,
    over,
    slots_of,
    table_has,
    workload,
    workload_is,
)
from llmtap.bench.compliance.requirement import (
    ComplianceVerdict,
    Report,
    Requirement,
    cannot_tell,
    met,
    not_met,
    row,
)

__all__ = ["ROWS"]

_FAIRNESS: Final = ("fairness",)
_PREFIXES: Final = ("prefix-cache",)
_PRESSURE: Final = ("memory-pressure",)
_CONTEXT: Final = ("long-context",)
_GUARDRAIL: Final = ("guardrail-overhead",)
PER_CLASS_MIN: Final = 500
MIX_MIN_S: Final = 300
PRESSURE_MIN_S: Final = 120
PER_LENGTH_MIN: Final = 20
OUTPUT: Final = 256
CONCURRENCY_MAX: Final = 4
SHARES: Final = (0.7, 0.9)
LEVELS: Final = (25, 50, 75)


def _arms(report: Report) -> set[str]:
    return {str(step.get("arm") or "") for step in measured(report)}


# ---------------------------------------------------------------- 5.6


def _is_mix(step: Step) -> bool:
    return is_measured(step) and not name_of(step).startswith("alone")


def _share_of_saturation(report: Report) -> ComplianceVerdict:
    share = at(report, "measurements.load_share")
    if share is None:
        return cannot_tell("what share of saturation the load was is not told")
    evidence = f"{share:.0%} of saturation, {SHARES[0]:.0%} to {SHARES[1]:.0%} recommended"
    return met(evidence) if SHARES[0] - 0.005 <= share <= SHARES[1] + 0.005 else not_met(evidence)


def _classes(report: Report) -> Mapping[str, Any]:
    told = at(report, "measurements.classes")
    return told if isinstance(told, Mapping) else {}


def _two_classes(report: Report) -> ComplianceVerdict:
    classes = _classes(report)
    evidence = f"classes: {', '.join(classes) or 'none'}"
    return met(evidence) if len(classes) > 1 else not_met(evidence)


def _per_class(report: Report) -> ComplianceVerdict:
    sent = {name: at(one, "sent") for name, one in _classes(report).items()}
    if not sent or None in sent.values():
        return cannot_tell("requests by class are not told")
    told = ", ".join(f"{name} {count(n)}" for name, n in sent.items())
    evidence = f"{told} requests, {PER_CLASS_MIN} of each needed"
    return met(evidence) if min(sent.values()) >= PER_CLASS_MIN else not_met(evidence)


def _isolated(report: Report) -> ComplianceVerdict:
    classes = _classes(report)
    if not classes:
        return cannot_tell("no classes are told")
    lacking = [name for name, one in classes.items() if not at(one, "alone.sent")]
    if lacking:
        return not_met(f"not measured alone: {', '.join(lacking)}")
    alone = ", ".join(f"{name} {count(one['alone']['sent'])}" for name, one in classes.items())
    basis = at(report, "measurements.isolation")
    return met(f"requests of each class alone: {alone}" + (f", as many {basis} per second" if basis else ""))


# ---------------------------------------------------------------- 5.7


def _both_states(report: Report) -> ComplianceVerdict:
    arms = _arms(report)
    off, on = ({arm for arm in arms if word in arm} for word in ("off", "on"))
    evidence = f"configurations measured: {', '.join(sorted(arms - {''})) or 'the target alone'}"
    return met(evidence) if off and on else not_met(evidence)


def _identical(report: Report) -> ComplianceVerdict:
    """Loads of one repeat with the cache off and on (`0/off`, `0/cold`): the same work in the same words."""
    by_repeat: dict[str, dict[str, str]] = {}
    for step in measured(report):
        repeat, _, state = name_of(step).rpartition("/")
        digest = workload(step).get("sha256")
        if state in ("off", "cold") and digest:
            plan = at(step, "result.plan")
            told = f"sha256 {digest[:12]}, seed {plan.get('seed')}, texts {plan.get('texts')}"
            by_repeat.setdefault(repeat, {})[state] = told
    pairs = [one for one in by_repeat.values() if len(one) == 2]
    if not pairs:
        return cannot_tell("no two loads can be held against each other")
    other = [one for one in pairs if one["off"] != one["cold"]]
    if other:
        return not_met(f"{len(other)} of {len(pairs)} repeats: off {other[0]['off']}; on {other[0]['cold']}")
    return met(f"{len(pairs)} repeats with the same requests off and on: {pairs[0]['off']}")


# ---------------------------------------------------------------- 5.8


def _oversubscribed(report: Report) -> ComplianceVerdict:
    told = at(report, "params.levels")
    if not told:
        return cannot_tell("levels are not told")
    above = [float(one) for one in told if float(one) > 100]
    evidence = f"{', '.join(f'{float(one):g} %' for one in told)} of capacity"
    return met(evidence) if above else not_met(f"{evidence}: none is above it")


def _capacity_known(report: Report) -> ComplianceVerdict:
    capacity, source = at(report, "measurements.capacity"), str(at(report, "measurements.capacity_source"))
    if capacity is None:
        return cannot_tell("the capacity that levels are of is not told")
    evidence = f"{count(capacity)} at a time: {source}"
    return met(evidence) if "5.5" in source else cannot_tell(evidence)


# ---------------------------------------------------------------- 5.9


def _short_output(report: Report) -> ComplianceVerdict:
    tokens = at(report, "params.output_tokens")
    if tokens is None:
        return cannot_tell("the length of answers is not told")
    evidence = f"answers of {count(tokens)} tokens, {OUTPUT} wanted"
    return met(evidence) if tokens == OUTPUT else not_met(evidence)


def _few_at_a_time(report: Report) -> ComplianceVerdict:
    """Loads that measure latency; a test may look for throughput with more."""

    def judge(step: Step) -> ComplianceVerdict:
        slots = slots_of(report, step)
        if not is_closed(step):
            return not_met("no closed loop")
        if slots is None:
            return cannot_tell("how many requests were kept at a time is not told")
        return (
            met(f"{slots} at a time")
            if slots <= CONCURRENCY_MAX
            else not_met(f"{slots} at a time, 4 at most")
        )

    return over(report, judge, _is_latency)


def _is_latency(step: Step) -> bool:
    return is_measured(step) and "at-a-time" not in name_of(step)


def _short_warm_up(report: Report) -> ComplianceVerdict:
    said = str(at(report, "configuration.Warm-up") or "")
    if not said:
        return cannot_tell("what it was warmed up with is not told")
    return met(said)


# ---------------------------------------------------------------- 5.10


def _four_configurations(report: Report) -> ComplianceVerdict:
    arms = _arms(report)
    shown = sorted(arm or "the target" for arm in arms)
    evidence = f"{len(arms)} configurations: {', '.join(shown) or 'none'}"
    return met(evidence) if len(arms) >= 4 else not_met(f"{evidence}; none, input, output and all are wanted")


ROWS: Final[tuple[Requirement, ...]] = (
    row(
        "5.6.2-1", "REQUIRED", "setup", "The workload is Synthetic-Skewed.", workload_is("synthetic-skewed"),
        _FAIRNESS,
    ),
    row(
        "5.6.2-2", "RECOMMENDED", "procedure", "The load is 70 to 90 % of saturation.", _share_of_saturation,
        _FAIRNESS,
    ),
    row(
        "5.6.2-p1", "procedure", "setup", "There are two classes of requests or more.", _two_classes,
        _FAIRNESS,
    ),
    row("5.6.2-p2", "procedure", "procedure", "500 requests or more of each class.", _per_class, _FAIRNESS),
    row("5.6.3-p1", "procedure", "procedure", "Each class is measured alone, too.", _isolated, _FAIRNESS),
    row(
        "5.6.3-p2", "procedure", "procedure", "The mix lasts 300 s or more.", lasts(MIX_MIN_S, _is_mix),
        _FAIRNESS,
    ),
    row(
        "5.6.5-p1", "procedure", "report", "Classes as in Table 8.",
        table_has(8, ("Class", "Count", "TTFT P50", "TTFT P99", "TPOT P50", "TPOT P99")), _FAIRNESS,
    ),
    row(
        "5.6.5-p2", "procedure", "report", "Fairness as in Table 9.",
        table_has(9, ("Metric", "Value"), ("Jain's Fairness Index",)), _FAIRNESS,
    ),
    row(
        "5.7.2-1", "RECOMMENDED", "setup", "The workload is Code Completion.", workload_is("code-completion"),
        _PREFIXES,
    ),
    row("5.7.2-2", "MUST", "procedure", "The cache is off, and then on.", _both_states, _PREFIXES),
    row("5.7.3-p1", "procedure", "procedure", "Off and on have identical requests.", _identical, _PREFIXES),
    row(
        "5.7.5-p1", "procedure", "report", "Configurations as in Table 10.",
        table_has(
            10, ("Configuration", "TTFT P50", "TTFT P95", "TTFT P99"),
            ("Cache Disabled", "Cache (Cold)", "Cache (Warm)"),
        ),
        _PREFIXES,
    ),
    row(
        "5.8.2-1", "RECOMMENDED", "setup", "The workload is Long Context.",
        workload_is("long-context", "long-context-uniform"), _PRESSURE,
    ),
    row(
        "5.8.2-p1", "procedure", "setup", "Concurrency is above capacity.", _oversubscribed, _PRESSURE,
    ),
    row("5.8.3-p1", "procedure", "procedure", "Capacity is known from 5.5.", _capacity_known, _PRESSURE),
    row(
        "5.8.3-p2", "procedure", "procedure", "Each level lasts 120 s or more.", lasts(PRESSURE_MIN_S),
        _PRESSURE,
    ),
    row(
        "5.8.5-p1", "procedure", "report", "Degradation as in Table 11.",
        table_has(11, ("Oversub Level", "Complete", "Preempt", "Fail Rate", "TTFT P99")), _PRESSURE,
    ),
    row(
        "5.9.2-1", "REQUIRED", "setup", "The workload is Long Context.",
        workload_is("long-context", "long-context-uniform"), _CONTEXT,
    ),
    row("5.9.2-p1", "procedure", "setup", "Answers have 256 tokens.", _short_output, _CONTEXT),
    row("5.9.2-p2", "procedure", "procedure", "A closed loop of 1 to 4.", _few_at_a_time, _CONTEXT),
    row(
        "5.9.2-p3", "procedure", "procedure", "20 requests or more of each length.",
        has_requests(PER_LENGTH_MIN, among=_is_latency), _CONTEXT,
    ),
    row(
        "5.9.3-p1", "procedure", "procedure", "It is warmed up with short contexts.", _short_warm_up,
        _CONTEXT,
    ),
    row(
        "5.9.5-p1", "procedure", "report", "Lengths as in Table 12.",
        table_has(12, ("Context (tokens)", "TTFT Mean", "TTFT P95", "ms/1K tokens")), _CONTEXT,
    ),
    row(
        "5.10.2-1", "RECOMMENDED", "setup", "The workload is Conversation.", workload_is("conversation"),
        _GUARDRAIL,
    ),
    row(
        "5.10.2-p1", "procedure", "procedure",
        "No filter, input filter, output filter, and all are measured.",
        _four_configurations, _GUARDRAIL,
    ),
    row(
        "5.10.2-p2", "procedure", "procedure", "Loads are 25, 50 and 75 % of capacity.",
        has_levels(LEVELS, "capacity"),
        _GUARDRAIL,
    ),
    row(
        "5.10.5-p1", "procedure", "report", "Configurations as in Table 13.",
        table_has(13, ("Configuration", "TTFT P50", "TTFT P99", "E2E P50", "E2E P99")), _GUARDRAIL,
    ),
    row(
        "5.10.5-p2", "procedure", "report", "Throughput as in Table 14.",
        table_has(14, ("Configuration", "Max Throughput", "Reduction")), _GUARDRAIL,
    ),
)  # fmt: skip
