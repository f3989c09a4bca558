"""OpenSLO's documents, field by field."""

import re
from typing import Any

import pytest
import yaml

from llmtap.errors import ConfigError
from llmtap.meter.options import SloOptions
from llmtap.meter.slo import SloClass
from llmtap.slo.openslo import object_name, render
from llmtap.slo.rules import promises

RFC_1123 = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def documents(**classes: SloOptions) -> list[dict[str, Any]]:
    text = render(promises(SloClass.of(n, o) for n, o in classes.items()), "tap", "https://wiki")
    return list(yaml.safe_load_all(text))


GOLD = SloOptions(objectives="ttft:500ms", target=0.99)


def test_a_service_whom_to_tell_and_an_slo_for_each_class() -> None:
    found = documents(gold=GOLD, rest=GOLD)
    assert [(d["apiVersion"], d["kind"], d["metadata"]["name"]) for d in found] == [
        ("openslo/v1", "Service", "tap"), ("openslo/v1", "AlertNotificationTarget", "tap-page"),
        ("openslo/v1", "AlertNotificationTarget", "tap-ticket"), ("openslo/v1", "SLO", "tap-gold"),
        ("openslo/v1", "SLO", "tap-rest"),
    ]  # fmt: skip


def test_an_slo() -> None:
    *_, slo = documents(gold=GOLD)
    spec = slo["spec"]
    policies = spec.pop("alertPolicies")
    assert spec == {
        "description": "Exchanges that meet ttft:500ms.",
        "service": "tap",
        "indicator": {
            "metadata": {"name": "tap-gold-good", "displayName": "gold: good exchanges"},
            "spec": {
                "ratioMetric": {
                    "counter": True,
                    "good": source('sum(llmtap_slo_good_total{job="tap",slo="gold"})'),
                    "total": source('sum(llmtap_slo_events_total{job="tap",slo="gold"})'),
                }
            },
        },
        "timeWindow": [{"duration": "30d", "isRolling": True}],
        "budgetingMethod": "Occurrences",
        "objectives": [{"displayName": "ttft:500ms", "target": 0.99}],
    }
    assert [policy["metadata"]["name"] for policy in policies] == [
        "tap-gold-page-1h", "tap-gold-page-6h", "tap-gold-ticket-1d", "tap-gold-ticket-3d",
    ]  # fmt: skip
    assert policies[0] == {
        "kind": "AlertPolicy",
        "metadata": {"name": "tap-gold-page-1h"},
        "spec": {
            "description": "Runbook: https://wiki/LlmtapErrorBudgetBurn.md",
            "alertWhenBreaching": True,
            "alertWhenResolved": False,
            "alertWhenNoData": False,
            "conditions": [
                {
                    "kind": "AlertCondition",
                    "metadata": {"name": "tap-gold-burn-1h"},
                    "spec": {
                        "description": "The error budget of gold burns more than 14.4 times"
                        " faster than allowed.",
                        "severity": "page",
                        "condition": {
                            "kind": "burnrate", "op": "gt", "threshold": 14.4, "lookbackWindow": "1h",
                            "alertAfter": "0m",
                        },
                    },
                }
            ],
            "notificationTargets": [{"targetRef": "tap-page"}],
        },
    }  # fmt: skip


def source(query: str) -> dict[str, object]:
    return {"metricSource": {"type": "Prometheus", "spec": {"query": query}}}


@pytest.mark.parametrize(
    ("text", "name"),
    [("gold", "gold"), ("Team_A", "team-a"), ("a.b", "a-b"), ("-x-", "x"), ("x" * 80, "x" * 63)],
)
def test_names_are_those_of_kubernetes_objects(text: str, name: str) -> None:
    assert object_name(text) == name
    assert RFC_1123.fullmatch(name)


def test_two_classes_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"slo\.a-b: and slo\.a_b are both 'a-b'"):
        documents(**{"a_b": GOLD, "a-b": GOLD})
