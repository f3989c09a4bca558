"""Prometheus recording rules and burn-rate alerts of the SLO classes, and alerts about llmtap itself.

Each class has a group whose recordings have the names that Sloth uses, so dashboards for Sloth work; the last
group watches llmtap (`self_alerts.yaml`). Two differences from Sloth: windows of a day and longer sum the
5-minute rates of all tenants together (two series instead of two per tenant), so a long window weighs
exchanges and not minutes; and an alarm requires so many exchanges in its long window that a single bad one
cannot raise it, as in the meter.

Source: SRE Workbook, chapter 5; `metrics/slo.py` has the arithmetic.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

import yaml

from llmtap.errors import ConfigError
from llmtap.metrics.slo import PERIOD_NS, Alarm, SloClass, burn_rate_max, events_min

__all__ = ["SLO_ALERTS", "check_job", "missing_alarms", "render", "runbook_url", "self_alerts", "window_name"]

BURN: Final = "LlmtapErrorBudgetBurn"
"""The alert of every alarm."""
OUTDATED: Final = "LlmtapSloRulesOutdated"
SLO_ALERTS: Final = (BURN, OUTDATED)
EVENTS: Final = "llmtap_slo_events_total"
GOOD: Final = "llmtap_slo_good_total"
"""The counters of `/metrics`, by class and tenant."""
SHORT: Final = ("5m", "30m", "1h", "2h", "6h")
LONG: Final = ("1d", "3d", "30d")
"""The windows of Sloth's recordings: those of the alarms, and the period."""
INTERVAL_S: Final = 30
"""Between evaluations; sums over the recorded rates need it."""
_MINUTE_NS: Final = 60_000_000_000
_HOUR_NS: Final = 60 * _MINUTE_NS
_DAY_NS: Final = 24 * _HOUR_NS
PERIOD_DAYS: Final = PERIOD_NS // _DAY_NS
_RATE: Final = "rate5m"
_EVENTS_RATE: Final = f"slo:llmtap_slo_events:{_RATE}"
_GOOD_RATE: Final = f"slo:llmtap_slo_good:{_RATE}"
_JOB_CHARS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.:/-")
_YAML_WIDTH: Final = 110


Rule = dict[str, Any]
"""A recording or alerting rule, as the rules file has it."""


def check_job(job: str) -> str:
    """Return the job name if it needs no quoting in queries. Raises ConfigError."""
    if not job or not _JOB_CHARS.issuperset(job):
        raise ConfigError("--job", f"{job!r} is no name for a job", "letters, digits and _ . : / - only")
    return job


def missing_alarms(slo: SloClass) -> list[str]:
    """A sentence for each alarm that is left out because it can never ring."""
    most = burn_rate_max(slo.target)
    told = []
    for alarm in slo.unreachable:
        long, short = window_name(alarm.long_ns), window_name(alarm.short_ns)
        instead = f'; burn = {{ "{long}" = N }} sets one below {most:.4g}' if alarm.severity == "page" else ""
        told.append(
            f"slo.{slo.name}: no {alarm.severity} over {long} and {short}: a burn rate above {alarm.factor:g}"
            f" can't be seen at the target {slo.target:g}, where it is {most:.4g} with every exchange"
            f" bad{instead}"
        )
    return told


def runbook_url(runbooks: str, alert: str) -> str:
    """The page of an alert: `runbooks`/ALERT.md, or `runbooks` with its `{alert}` replaced."""
    if "{alert}" in runbooks:
        return runbooks.replace("{alert}", alert)
    return f"{runbooks.rstrip('/')}/{alert}.md"


def window_name(ns: int) -> str:
    """A window as Prometheus writes durations: `5m`, `6h`, `3d`."""
    for unit, scale in (("d", _DAY_NS), ("h", _HOUR_NS)):
        if ns % scale == 0:
            return f"{ns // scale}{unit}"
    return f"{ns // _MINUTE_NS}m"


def render(classes: Sequence[SloClass], job: str, runbooks: str) -> str:
    """The rules file, with comments on what was left out.

    Args:
        classes: `SloClass.with_tickets` of each.
        job: the scrape job's name in Prometheus.
        runbooks: where the pages of `deploy/runbooks/` are served, as `runbook_url` takes it.
    """
    kept = f"--storage.tsdb.retention.time={PERIOD_DAYS + 5}d; its default is 15d"
    head = (
        "Made by `llmtap slo generate --format prometheus`: change the objectives, and make it again.",
        f"Windows of {LONG[-1]} need a Prometheus that keeps its samples for so long ({kept}).",
    )
    parts = [_commented(head), "groups:\n"]
    for slo in classes:
        about = f"{slo.name}: {slo.target:.10g} of the exchanges meet {slo.objectives.text}."
        parts.append(_commented([about]))
        parts.append(_commented((f"Left out: {told}." for told in missing_alarms(slo)), 2))
        alerts = [*(_burn_alert(slo, alarm, job) for alarm in slo.alarms), _outdated(slo, job)]
        parts.append(_group(f"llmtap-slo-{slo.name}", [*_recordings(slo, job), *alerts], runbooks))
    parts.append(_commented(["The tap about itself, and what it takes to see anything at all."]))
    parts.append(_group("llmtap-tap", [_unwatched(classes, job), *self_alerts(job)], runbooks))
    return "".join(parts)


def _recordings(slo: SloClass, job: str) -> list[Rule]:
    """The recordings of a class; each uses only those before it."""
    identity = _identity(slo, job)
    this = f'{{sloth_id="{identity["sloth_id"]}"}}'
    found = [
        _recording(_EVENTS_RATE, f"sum(rate({_counter(EVENTS, slo, job)}[5m]))", identity),
        _recording(_GOOD_RATE, f"sum(rate({_counter(GOOD, slo, job)}[5m]))", identity),
    ]
    for name in SHORT:
        good = f"sum(rate({_counter(GOOD, slo, job)}[{name}]))"
        events = f"sum(rate({_counter(EVENTS, slo, job)}[{name}]))"
        found.append(_error_ratio(name, good, events, identity))
    for name in LONG:
        good = f"sum_over_time({_GOOD_RATE}{this}[{name}])"
        events = f"sum_over_time({_EVENTS_RATE}{this}[{name}])"
        found.append(_error_ratio(name, good, events, identity))
    burn = f"max without (sloth_window) ({{}}) / {slo.budget:.10g}"
    meta = {
        "slo:objective:ratio": f"vector({slo.target:.10g})",
        "slo:error_budget:ratio": f"vector({slo.budget:.10g})",
        "slo:time_period:days": f"vector({PERIOD_DAYS})",
        "slo:current_burn_rate:ratio": burn.format(f"slo:sli_error:ratio_rate{SHORT[0]}{this}"),
        "slo:period_burn_rate:ratio": burn.format(f"slo:sli_error:ratio_rate{LONG[-1]}{this}"),
        "slo:period_error_budget_remaining:ratio": f"1 - slo:period_burn_rate:ratio{this}",
    }
    found += [_recording(record, expr, identity) for record, expr in meta.items()]
    about = {"sloth_mode": "llmtap", "sloth_objective": f"{100 * slo.target:.10g}"}
    found.append(
        _recording("sloth_slo_info", "vector(1)", identity | about | {"sloth_spec": "prometheus/v1"})
    )
    return found


def _burn_alert(slo: SloClass, alarm: Alarm, job: str) -> Rule:
    """The alert of an alarm; its value is the burn rate over the long window."""
    identity = _identity(slo, job)
    this = f'{{sloth_id="{identity["sloth_id"]}"}}'
    long, short = window_name(alarm.long_ns), window_name(alarm.short_ns)
    budget, factor = f"{slo.budget:.10g}", f"{alarm.factor:.10g}"
    least = events_min(slo.target, alarm.factor)
    if long in LONG:
        counted = f"{INTERVAL_S} * sum_over_time({_EVENTS_RATE}{this}[{long}])"
    else:
        counted = f"sum(increase({_counter(EVENTS, slo, job)}[{long}]))"
    expr = (
        f"max without (sloth_window) (slo:sli_error:ratio_rate{long}{this}) / {budget} > {factor}\n"
        "and\n"
        f"max without (sloth_window) (slo:sli_error:ratio_rate{short}{this}) / {budget} > {factor}\n"
        f"and on ()\n{counted} >= {least}\n"
    )
    days = PERIOD_DAYS / alarm.factor
    return _alert(
        BURN,
        alarm.severity,
        expr,
        f"{slo.name}: the error budget burns more than {factor} times faster than allowed",
        f"Over {long} it burns {{{{ $value | humanize }}}} times faster than allowed, and over {short}, too,"
        f" more than {factor} times: over {100 * slo.budget * alarm.factor:.4g} % of the exchanges of"
        f" {slo.name} miss {slo.objectives.text} (allowed: {100 * slo.budget:.10g} %). At this rate the"
        f" budget of {PERIOD_DAYS} days lasts less than {days:.3g} days.",
        labels={"slo": slo.name, "long": long, "short": short, "sloth_severity": alarm.severity},
    )


def _outdated(slo: SloClass, job: str) -> Rule:
    """Rules of another file than the proxy reads would stay green whatever happens.

    One alert for each proxy and class, however much differs: every operand has the labels of the target.
    """
    this = f'job="{job}",slo="{slo.name}"'
    target = f"llmtap_slo_target_ratio{{{this}}}"
    differs = [f"{target} != {slo.target:.10g}"]
    for objective, bound_ns in slo.objectives.bounds:
        bound = f'llmtap_slo_objective_seconds{{{this},objective="{objective}"}} == {bound_ns / 1e9!r}'
        differs.append(f"{target}\nunless ignoring (objective)\n{bound}")
    known = "|".join(objective for objective, _ in slo.objectives.bounds)
    more = f'llmtap_slo_objective_seconds{{{this},objective!~"{known}"}}'
    differs.append(f"{target}\nand ignoring (objective)\n{more}")
    differs.append(f'absent({target})\nand on ()\nmax(up{{job="{job}"}}) == 1\n')
    return _alert(
        OUTDATED,
        "ticket",
        "\nor\n".join(differs),
        f"{slo.name}: these rules are of other objectives than the proxy has",
        f"The rules were made for {slo.objectives.text} and a target of {slo.target:.10g}; the proxy has"
        f" other ones, or no class {slo.name} at all. Their alerts mean nothing until they are made again.",
        wait="15m",
        labels={"slo": slo.name},
    )


def _unwatched(classes: Sequence[SloClass], job: str) -> Rule:
    """Alert about a class that was added after the rules were generated."""
    known = "|".join(slo.name for slo in classes)
    return _alert(
        OUTDATED,
        "ticket",
        f'llmtap_slo_target_ratio{{job="{job}",slo!~"{known}"}}',
        "{{ $labels.slo }}: the proxy has this class, and the rules have not",
        "For 15 minutes the proxy has judged by a class {{ $labels.slo }} that was not there when the rules"
        " were made: no alert watches it until they are made again.",
        wait="15m",
    )


def _recording(record: str, expr: str, labels: Mapping[str, str]) -> Rule:
    return {"record": record, "expr": expr, "labels": dict(labels)}


def _alert(
    name: str,
    severity: str,
    expr: str,
    summary: str,
    description: str,
    wait: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> Rule:
    return {
        "alert": name,
        "expr": expr,
        **({} if wait is None else {"for": wait}),
        "labels": {"severity": severity, **(labels or {})},
        "annotations": {"summary": summary, "description": description},
    }


def self_alerts(job: str) -> list[Rule]:
    """Return the alerts about llmtap itself."""
    text = (files("llmtap.export.rules") / "self_alerts.yaml").read_text(encoding="utf-8")
    rules: list[Rule] = yaml.safe_load(text.replace("@JOB@", job))
    return rules


def _identity(slo: SloClass, job: str) -> dict[str, str]:
    return {"sloth_id": f"{job}-{slo.name}", "sloth_service": job, "sloth_slo": slo.name}


def _counter(name: str, slo: SloClass, job: str) -> str:
    return f'{name}{{job="{job}",slo="{slo.name}"}}'


def _error_ratio(name: str, good: str, events: str, identity: Mapping[str, str]) -> Rule:
    # Nothing where nothing counted: a NaN would spoil every sum over it. And rate() extrapolates each counter
    # by itself, so that where all are good the two can differ by a hair.
    expr = f"clamp_min(\n  1 - {good}\n  / ({events} > 0),\n  0\n)\n"
    return _recording(f"slo:sli_error:ratio_rate{name}", expr, {**identity, "sloth_window": name})


def _group(name: str, rules: Iterable[Rule], runbooks: str) -> str:
    rules = list(rules)
    for rule in rules:
        if "alert" in rule:
            rule["annotations"]["runbook_url"] = runbook_url(runbooks, rule["alert"])
    return _to_yaml([{"name": name, "interval": f"{INTERVAL_S}s", "rules": rules}])


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Writes repeated values in full instead of anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _to_yaml(document: Any) -> str:
    text: str = yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_YAML_WIDTH,
        default_flow_style=False,
    )  # fmt: skip
    return text


def _commented(lines: Iterable[str], indent: int = 0) -> str:
    """Sentences as wrapped comments; `indent` is of the second and further lines of each."""
    return "".join(
        textwrap.fill(line, _YAML_WIDTH, initial_indent="# ", subsequent_indent="# " + " " * indent) + "\n"
        for line in lines
    )
