"""OpenSLO documents (`openslo/v1`): a service, who is told, and for each class an SLO with its alarms.

A condition of OpenSLO has one window, the long one; without the short ones alarms end later than ours. Names
are those of Kubernetes objects (RFC 1123), so that a class's may have to change.
"""

import re
from collections.abc import Iterable
from typing import Any, Final

from llmtap.errors import ConfigError
from llmtap.metrics.burn import Alarm
from llmtap.slo.document import commented, to_yaml
from llmtap.slo.rules import BURN, EVENTS, GOOD, PERIOD_DAYS, Objective, missing, runbook_url, window

__all__ = ["object_name", "render"]

_VERSION: Final = "openslo/v1"
_NAME_CHARS_MAX: Final = 63
_SEVERITIES: Final = {"page": "Somebody looks now.", "ticket": "Somebody looks this week."}


def render(promises: Iterable[Objective], job: str, runbooks: str) -> str:
    """All documents, apart by `---`. Raises ConfigError where two classes would have one name."""
    promises = list(promises)
    names: dict[str, str] = {}
    for promise in promises:
        name = object_name(promise.name)
        if names.setdefault(name, promise.name) != promise.name:
            raise ConfigError(
                f"slo.{promise.name}",
                f"and slo.{names[name]} are both {name!r} in OpenSLO, whose names have lower-case letters,"
                " digits and - only",
                "rename one",
            )
    head = [
        "Made by `llmtap slo generate --format openslo`: change the objectives, and make it again.",
        "What OpenSLO has no place for: the short window of each alarm, and the least number of exchanges.",
    ]
    lost = [f"{told}." for promise in promises for told in missing(promise)]
    documents = [_service(job), *(_target(job, severity) for severity in _SEVERITIES)]
    documents += [_slo(promise, job, runbooks) for promise in promises]
    return commented(head) + commented(lost, (0, 2)) + "---\n".join(to_yaml(one) for one in documents)


def object_name(text: str) -> str:
    """A name that RFC 1123 allows: lower-case letters, digits and `-`, 63 at most."""
    return re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")[:_NAME_CHARS_MAX].rstrip("-")


def _service(job: str) -> dict[str, Any]:
    return {
        "apiVersion": _VERSION,
        "kind": "Service",
        "metadata": {"name": object_name(job), "displayName": job},
        "spec": {"description": "LLM traffic, as the tap in front of the gateway sees it."},
    }


def _target(job: str, severity: str) -> dict[str, Any]:
    return {
        "apiVersion": _VERSION,
        "kind": "AlertNotificationTarget",
        "metadata": {"name": object_name(f"{job}-{severity}")},
        "spec": {"description": _SEVERITIES[severity], "target": severity},
    }


def _slo(promise: Objective, job: str, runbooks: str) -> dict[str, Any]:
    name = object_name(f"{job}-{promise.name}")
    selector = f'{{job="{job}",slo="{promise.name}"}}'
    return {
        "apiVersion": _VERSION,
        "kind": "SLO",
        "metadata": {"name": name, "displayName": promise.name},
        "spec": {
            "description": f"Exchanges that meet {promise.bounds}.",
            "service": object_name(job),
            "indicator": {
                "metadata": {"name": f"{name}-good", "displayName": f"{promise.name}: good exchanges"},
                "spec": {
                    "ratioMetric": {
                        "counter": True,
                        "good": _metric(f"sum({GOOD}{selector})"),
                        "total": _metric(f"sum({EVENTS}{selector})"),
                    }
                },
            },
            "timeWindow": [{"duration": f"{PERIOD_DAYS}d", "isRolling": True}],
            "budgetingMethod": "Occurrences",
            "objectives": [{"displayName": promise.bounds, "target": promise.target}],
            "alertPolicies": [_policy(name, promise, alarm, job, runbooks) for alarm in promise.alarms],
        },
    }


def _metric(query: str) -> dict[str, Any]:
    return {"metricSource": {"type": "Prometheus", "spec": {"query": query}}}


def _policy(name: str, promise: Objective, alarm: Alarm, job: str, runbooks: str) -> dict[str, Any]:
    long = window(alarm.long_ns)
    return {
        "kind": "AlertPolicy",
        "metadata": {"name": f"{name}-{alarm.severity}-{long}"},
        "spec": {
            "description": f"Runbook: {runbook_url(runbooks, BURN)}",
            "alertWhenBreaching": True,
            "alertWhenResolved": False,
            "alertWhenNoData": False,
            "conditions": [
                {
                    "kind": "AlertCondition",
                    "metadata": {"name": f"{name}-burn-{long}"},
                    "spec": {
                        "description": f"The error budget of {promise.name} burns more than"
                        f" {alarm.factor:g} times faster than allowed.",
                        "severity": alarm.severity,
                        "condition": {
                            "kind": "burnrate",
                            "op": "gt",
                            "threshold": round(alarm.factor, 10),
                            "lookbackWindow": long,
                            "alertAfter": "0m",
                        },
                    },
                }
            ],
            "notificationTargets": [{"targetRef": object_name(f"{job}-{alarm.severity}")}],
        },
    }
