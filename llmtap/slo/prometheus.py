"""Rules for Prometheus: what it computes of the objectives and keeps, and what it calls somebody for.

A group for each class, with Sloth's names for what is recorded, so that whatever shows Sloth's objectives
shows these; then a group about the tap itself (`watches.py`). Two things differ from what Sloth would write.
Windows of a day and longer add up the 5-minute rates of all tenants together, two series instead of two for
each tenant; so a long window weighs exchanges, not minutes. And an alarm needs so many exchanges in its long
window that one bad one cannot ring it, as the meter's own does.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from llmtap.errors import ConfigError
from llmtap.metrics.burn import Alarm, events_min
from llmtap.slo.document import commented, to_yaml
from llmtap.slo.rules import (
    BURN,
    EVENTS,
    GOOD,
    LONG,
    PERIOD_DAYS,
    SHORT,
    Alert,
    Objective,
    Recording,
    missing,
    runbook_url,
    window,
)
from llmtap.slo.self_alerts import watches

__all__ = ["INTERVAL_S", "SLO_ALERTS", "burn_alert", "check_job", "recordings", "render"]

INTERVAL_S: Final = 30
"""Between evaluations; sums over the recorded rates need it."""
_RATE: Final = "rate5m"
_EVENTS_RATE: Final = f"slo:llmtap_slo_events:{_RATE}"
_GOOD_RATE: Final = f"slo:llmtap_slo_good:{_RATE}"
_JOB_CHARS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.:/-")
OUTDATED: Final = "LlmtapSloRulesOutdated"
SLO_ALERTS: Final = (BURN, OUTDATED)


def check_job(job: str) -> str:
    """The job, if it is one that can stand in queries as it is. Raises ConfigError."""
    if not job or not _JOB_CHARS.issuperset(job):
        raise ConfigError("--job", f"{job!r} is no name for a job", "letters, digits and _ . : / - only")
    return job


def render(promises: Sequence[Objective], job: str, runbooks: str) -> str:
    """The rules file, with comments on what was left out.

    Args:
        promises: the classes.
        job: the scrape job's name in Prometheus.
        runbooks: where the pages of `deploy/runbooks/` are served, as `runbook_url` takes it.
    """
    kept = f"--storage.tsdb.retention.time={PERIOD_DAYS + 5}d; its default is 15d"
    head = (
        "Made by `llmtap slo generate --format prometheus`: change the objectives, and make it again.",
        f"Windows of {LONG[-1]} need a Prometheus that keeps its samples for so long ({kept}).",
    )
    parts = [commented(head), "groups:\n"]
    for promise in promises:
        about = f"{promise.name}: {promise.target:.10g} of the exchanges meet {promise.bounds}."
        parts.append(commented([about]))
        parts.append(commented((f"Left out: {told}." for told in missing(promise)), (0, 2)))
        alerts = [burn_alert(promise, alarm, job) for alarm in promise.alarms]
        alerts.append(_outdated(promise, job))
        parts.append(_group(f"llmtap-slo-{promise.name}", recordings(promise, job), alerts, runbooks))
    parts.append(commented(["The tap about itself, and what it takes to see anything at all."]))
    parts.append(_group("llmtap-tap", [], [_unwatched(promises, job), *watches(job)], runbooks))
    return "".join(parts)


def recordings(promise: Objective, job: str) -> list[Recording]:
    """What is kept about a class, in an order in which each finds what it needs."""
    identity = _identity(promise, job)
    this = f'{{sloth_id="{identity["sloth_id"]}"}}'
    found = [
        Recording(_EVENTS_RATE, f"sum(rate({_counter(EVENTS, promise, job)}[5m]))", identity),
        Recording(_GOOD_RATE, f"sum(rate({_counter(GOOD, promise, job)}[5m]))", identity),
    ]
    for name in SHORT:
        good = f"sum(rate({_counter(GOOD, promise, job)}[{name}]))"
        events = f"sum(rate({_counter(EVENTS, promise, job)}[{name}]))"
        found.append(_error_ratio(name, good, events, identity))
    for name in LONG:
        good = f"sum_over_time({_GOOD_RATE}{this}[{name}])"
        events = f"sum_over_time({_EVENTS_RATE}{this}[{name}])"
        found.append(_error_ratio(name, good, events, identity))
    burn = f"max without (sloth_window) ({{}}) / {promise.budget:.10g}"
    meta = {
        "slo:objective:ratio": f"vector({promise.target:.10g})",
        "slo:error_budget:ratio": f"vector({promise.budget:.10g})",
        "slo:time_period:days": f"vector({PERIOD_DAYS})",
        "slo:current_burn_rate:ratio": burn.format(f"slo:sli_error:ratio_rate{SHORT[0]}{this}"),
        "slo:period_burn_rate:ratio": burn.format(f"slo:sli_error:ratio_rate{LONG[-1]}{this}"),
        "slo:period_error_budget_remaining:ratio": f"1 - slo:period_burn_rate:ratio{this}",
    }
    found += [Recording(record, expr, identity) for record, expr in meta.items()]
    about = {"sloth_mode": "llmtap", "sloth_objective": f"{100 * promise.target:.10g}"}
    found.append(Recording("sloth_slo_info", "vector(1)", identity | about | {"sloth_spec": "prometheus/v1"}))
    return found


def burn_alert(promise: Objective, alarm: Alarm, job: str) -> Alert:
    """An alarm as an alert, whose value is the burn rate over the long window."""
    identity = _identity(promise, job)
    this = f'{{sloth_id="{identity["sloth_id"]}"}}'
    long, short = window(alarm.long_ns), window(alarm.short_ns)
    budget, factor = f"{promise.budget:.10g}", f"{alarm.factor:.10g}"
    least = events_min(promise.target, alarm.factor)
    if long in LONG:
        counted = f"{INTERVAL_S} * sum_over_time({_EVENTS_RATE}{this}[{long}])"
    else:
        counted = f"sum(increase({_counter(EVENTS, promise, job)}[{long}]))"
    expr = (
        f"max without (sloth_window) (slo:sli_error:ratio_rate{long}{this}) / {budget} > {factor}\n"
        "and\n"
        f"max without (sloth_window) (slo:sli_error:ratio_rate{short}{this}) / {budget} > {factor}\n"
        f"and on ()\n{counted} >= {least}\n"
    )
    days = PERIOD_DAYS / alarm.factor
    return Alert(
        BURN,
        alarm.severity,
        expr,
        f"{promise.name}: the error budget burns more than {factor} times faster than allowed",
        f"Over {long} it burns {{{{ $value | humanize }}}} times faster than allowed, and over {short}, too,"
        f" more than {factor} times: over {100 * promise.budget * alarm.factor:.4g} % of the exchanges of"
        f" {promise.name} miss {promise.bounds} (allowed: {100 * promise.budget:.10g} %). At this rate the"
        f" budget of {PERIOD_DAYS} days lasts less than {days:.3g} days.",
        labels={"slo": promise.name, "long": long, "short": short, "sloth_severity": alarm.severity},
    )


def _outdated(promise: Objective, job: str) -> Alert:
    """Rules of another file than the proxy reads would stay green whatever happens.

    One alert for each proxy and class, however much differs: every operand has the labels of the target.
    """
    this = f'job="{job}",slo="{promise.name}"'
    target = f"llmtap_slo_target_ratio{{{this}}}"
    differs = [f"{target} != {promise.target:.10g}"]
    for objective, bound_ns in promise.bounds_ns:
        bound = f'llmtap_slo_objective_seconds{{{this},objective="{objective}"}} == {bound_ns / 1e9!r}'
        differs.append(f"{target}\nunless ignoring (objective)\n{bound}")
    known = "|".join(objective for objective, _ in promise.bounds_ns)
    more = f'llmtap_slo_objective_seconds{{{this},objective!~"{known}"}}'
    differs.append(f"{target}\nand ignoring (objective)\n{more}")
    differs.append(f'absent({target})\nand on ()\nmax(up{{job="{job}"}}) == 1\n')
    return Alert(
        OUTDATED,
        "ticket",
        "\nor\n".join(differs),
        f"{promise.name}: these rules are of other objectives than the proxy has",
        f"The rules were made for {promise.bounds} and a target of {promise.target:.10g}; the proxy has other"
        f" ones, or no class {promise.name} at all. Their alerts mean nothing until they are made again.",
        wait="15m",
        labels={"slo": promise.name},
    )


def _unwatched(promises: Sequence[Objective], job: str) -> Alert:
    """A class that came after the rules were made: nobody is called for it."""
    known = "|".join(promise.name for promise in promises)
    return Alert(
        OUTDATED,
        "ticket",
        f'llmtap_slo_target_ratio{{job="{job}",slo!~"{known}"}}',
        "{{ $labels.slo }}: the proxy has this class, and the rules have not",
        "For 15 minutes the proxy has judged by a class {{ $labels.slo }} that was not there when the rules"
        " were made: no alert watches it until they are made again.",
        wait="15m",
    )


def _identity(promise: Objective, job: str) -> dict[str, str]:
    return {"sloth_id": f"{job}-{promise.name}", "sloth_service": job, "sloth_slo": promise.name}


def _counter(name: str, promise: Objective, job: str) -> str:
    return f'{name}{{job="{job}",slo="{promise.name}"}}'


def _error_ratio(name: str, good: str, events: str, identity: Mapping[str, str]) -> Recording:
    # Nothing where nothing counted: a NaN would spoil every sum over it. And rate() extrapolates each counter
    # by itself, so that where all are good the two can differ by a hair.
    expr = f"clamp_min(\n  1 - {good}\n  / ({events} > 0),\n  0\n)\n"
    return Recording(f"slo:sli_error:ratio_rate{name}", expr, {**identity, "sloth_window": name})


def _group(name: str, recorded: list[Recording], alerts: Iterable[Alert], runbooks: str) -> str:
    rules: list[dict[str, Any]] = [
        {"record": r.record, "expr": r.expr, "labels": dict(r.labels)} for r in recorded
    ]
    rules += [_alert(alert, runbooks) for alert in alerts]
    return to_yaml([{"name": name, "interval": f"{INTERVAL_S}s", "rules": rules}])


def _alert(alert: Alert, runbooks: str) -> dict[str, Any]:
    written: dict[str, Any] = {"alert": alert.name, "expr": alert.expr}
    if alert.wait is not None:
        written["for"] = alert.wait
    written["labels"] = {"severity": alert.severity, **(alert.labels or {})}
    written["annotations"] = {
        "summary": alert.summary,
        "description": alert.description,
        "runbook_url": runbook_url(runbooks, alert.name),
    }
    return written
