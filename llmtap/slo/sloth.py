"""A specification for Sloth (`prometheus/v1`), which makes rules of it: `sloth generate -i slo.yaml`.

Sloth's windows and burn rates are its own, the Workbook's over 30 days; a class's own burn rates and the
least number of exchanges have no place in its format. What that changes stands in comments.
"""

from collections.abc import Iterable
from typing import Any, Final

from llmtap.metrics.burn import STANDARD_ALARMS, reachable
from llmtap.slo.document import commented, to_yaml
from llmtap.slo.rules import BURN, EVENTS, GOOD, Objective, missing, runbook_url, window

__all__ = ["render"]

_STANDARD: Final = {alarm.long_ns: alarm.factor for alarm in STANDARD_ALARMS}


def render(promises: Iterable[Objective], job: str, runbooks: str) -> str:
    """The specification, one service with an SLO for each class; see `prometheus.render`."""
    promises = list(promises)
    head = [
        "Made by `llmtap slo generate --format sloth`: change the objectives, and make it again.",
        "Unlike --format prometheus this knows no least number of exchanges: one bad one at night may ring.",
    ]
    lost = [told for promise in promises for told in _lost(promise)]
    document = {
        "version": "prometheus/v1",
        "service": job,
        "labels": {"tap": "llmtap"},
        "slos": [_slo(promise, job, runbooks) for promise in promises],
    }
    return commented(head) + commented(lost, (0, 2)) + to_yaml(document)


def _slo(promise: Objective, job: str, runbooks: str) -> dict[str, Any]:
    selector = f'{{job="{job}",slo="{promise.name}"}}[{{{{.window}}}}]'
    total = f"sum(rate({EVENTS}{selector}))"
    alerting: dict[str, Any] = {
        "name": BURN,
        "labels": {"slo": promise.name},
        "annotations": {
            "summary": f"{promise.name}: the error budget burns too fast ({promise.bounds})",
            "runbook_url": runbook_url(runbooks, BURN),
        },
    }
    for severity in ("page", "ticket"):
        can_ring = any(alarm.severity == severity for alarm in promise.alarms)
        alerting[f"{severity}_alert"] = {"labels": {"severity": severity}} if can_ring else {"disable": True}
    return {
        "name": promise.name,
        "objective": round(100 * promise.target, 10),
        "description": f"Exchanges that meet {promise.bounds}.",
        "sli": {
            "events": {
                "error_query": f"{total} - sum(rate({GOOD}{selector}))",
                "total_query": total,
            }
        },
        "alerting": alerting,
    }


def _lost(promise: Objective) -> Iterable[str]:
    """Where Sloth's alarms will differ from the class's own."""
    for told in missing(promise):
        yield f"{told}. Sloth writes it all the same, or none of its severity."
    for alarm in promise.alarms:
        standard = _STANDARD[alarm.long_ns]
        if alarm.factor != standard:
            never = "" if reachable(promise.target, standard) else ", which can never be seen at this target"
            yield (
                f"slo.{promise.name}: its burn rate over {window(alarm.long_ns)} is {alarm.factor:g},"
                f" Sloth's is {standard:g}{never}."
            )
