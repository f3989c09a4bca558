"""4.5: whether the server was warm when it was measured, or cold where a cold start was."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from llmtap.bench.compliance.evidence import at, count, name_of, several, steps
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
    worst,
)

__all__ = ["REQUESTS_MIN", "ROWS", "TOKENS_MIN"]

REQUESTS_MIN: Final = 100
TOKENS_MIN: Final = 10_000
"""Both, as the draft wants the greater of the two."""
VARIATION_MAX: Final = 0.10

WarmUp = Mapping[str, Any]


def _made(report: Report) -> Sequence[WarmUp]:
    """The warm-ups that were made; one that was skipped says why in `skipped`."""
    return [one for one in report.get("warmups") or () if not one.get("skipped")]


def _says_cold(report: Report) -> str | None:
    """Where the report says that a cold start is what it measures."""
    said = [*(report.get("configuration") or {}).values(), *(report.get("notes") or ())]
    return next((one for one in said if "cold start" in str(one).lower()), None)


def _each(judge: Callable[[WarmUp], ComplianceVerdict]) -> Check:
    """Over all warm-ups; each configuration that was measured needs its own."""

    def check(report: Report) -> ComplianceVerdict:
        made, cold = _made(report), _says_cold(report)
        if not steps(report):
            return cannot_tell("the report has no loads")
        if not made:
            return not_applicable(f"cold start: {cold}") if cold else not_met("no warm-up was made")
        cold_arms = {str(step.get("arm") or "") for step in steps(report)} - {
            str(one.get("arm") or "") for one in made
        }
        if cold_arms:
            named = ", ".join(sorted(arm or "the target" for arm in cold_arms))
            return not_met(f"no warm-up in this configuration: {named}")
        return worst([judge(one) for one in made], "")

    return check


def _loaded(warmup: WarmUp) -> ComplianceVerdict:
    """A model that has answered, evenly, is in memory: there is no other sign of it from outside."""
    n = warmup.get("requests") or 0
    if not n:
        return cannot_tell("it answered nothing before it was measured")
    if not warmup.get("probes"):
        return cannot_tell(f"{several(n, 'answer')}, whose latency was not probed")
    if not warmup.get("stable"):
        return cannot_tell(f"{several(n, 'answer')}, whose latency had not settled")
    return met(f"{several(n, 'answer')} before the measurement, and a latency that had settled")


def _processed(warmup: WarmUp) -> ComplianceVerdict:
    n, tokens = warmup.get("requests") or 0, warmup.get("tokens") or 0
    evidence = (
        f"{several(n, 'request')} of {REQUESTS_MIN} and {count(tokens)} output tokens of {count(TOKENS_MIN)}"
    )
    return met(evidence) if n >= REQUESTS_MIN and tokens >= TOKENS_MIN else not_met(evidence)


def _drained(warmup: WarmUp) -> ComplianceVerdict:
    probes, n, failed = (warmup.get(name) for name in ("probes", "requests", "failed"))
    if probes:
        return met(f"all its answers had come: {len(probes)} probes followed, one at a time")
    if n and failed == 0:
        return met(f"all its {several(n, 'answer')} had come, and none had failed")
    return cannot_tell("nothing shows that its answers had all come")


def _prefixes(report: Report) -> ComplianceVerdict:
    """The cache was filled where each load that is to find it warm had its prefixes sent before it, or finds
    something there."""
    warm = [step for step in steps(report) if name_of(step).endswith("/warm")]
    if not warm:
        return cannot_tell("no load is told to have found the cache filled")
    primed = [at(step, "result.primed") or 0 for step in warm]
    hits = [at(step, "result.tokens.cached") or 0 for step in warm]
    evidence = (
        f"{len(warm)} warm loads: {count(sum(primed))} prefixes sent before them, {count(sum(hits))} input"
    )
    evidence += " tokens told to come from the cache"
    return met(evidence) if all(primed) or all(hits) else cannot_tell(evidence)


def _probed(warmup: WarmUp) -> ComplianceVerdict:
    before, after = at(warmup, "before.ttft"), at(warmup, "after.ttft")
    if before is None or after is None:
        return not_met("no probe before and after it has a latency")
    return met(f"a probe's TTFT was {before * 1e3:.1f} ms before and {after * 1e3:.1f} ms after")


def _settled(warmup: WarmUp) -> ComplianceVerdict:
    told = [
        f"{name.upper()} {value:.1%}"
        for name, value in (warmup.get("variation") or {}).items()
        if value is not None
    ]
    if not told:
        return not_met("too few probes to see their variation")
    evidence = f"consecutive probes vary by {', '.join(told)}, less than {VARIATION_MAX:.0%} wanted"
    return met(evidence) if warmup.get("stable") else not_met(evidence)


def _skipped(report: Report) -> ComplianceVerdict:
    cold = _says_cold(report)
    made = _made(report)
    if cold is None:
        return not_applicable("no cold start is measured")
    if made:
        return not_met(f"a cold start is measured, after a warm-up of {count(made[0].get('requests') or 0)}")
    return met("a cold start is measured, and no warm-up was made")


def _indicated(report: Report) -> ComplianceVerdict:
    if _made(report) or not steps(report):
        return not_applicable("no cold start is measured")
    cold = _says_cold(report)
    if cold is None:
        return not_met("nothing was warmed up, and the report does not call it a cold start")
    return met(f"it says: {cold}")


ROWS: Final[tuple[Requirement, ...]] = (
    row("4.5.1-1a", "MUST", "procedure", "The model is in the accelerator's memory.", _each(_loaded)),
    row(
        "4.5.1-1b", "MUST", "procedure",
        "100 requests, and 10,000 tokens of output, are processed beforehand.", _each(_processed),
    ),
    row("4.5.1-1c", "MUST", "procedure", "The queue has drained before the measurement.", _each(_drained)),
    row(
        "4.5.1-1d", "MUST", "procedure", "A prefix cache under test is filled with what is representative.",
        _prefixes, ("prefix-cache",),
    ),
    row("4.5.2-1a", "SHOULD", "procedure", "A probe is timed before and after the warm-up.", _each(_probed)),
    row(
        "4.5.2-1b", "SHOULD", "procedure", "Consecutive probes vary by less than 10 %.", _each(_settled),
    ),
    row("4.5.3-1", "MUST", "procedure", "A cold start is measured without a warm-up.", _skipped),
    row("4.5.3-2", "MUST", "report", "The report says clearly where a cold start is measured.", _indicated),
)  # fmt: skip
