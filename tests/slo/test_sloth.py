"""Sloth's specification, field by field."""

import yaml

from llmtap.meter.options import SloOptions
from llmtap.meter.slo import SloClass
from llmtap.slo.rules import promises
from llmtap.slo.sloth import render


def specification(**classes: SloOptions) -> tuple[str, dict[str, object]]:
    text = render(promises(SloClass.of(n, o) for n, o in classes.items()), "tap", "https://wiki/")
    return text, yaml.safe_load(text)


def test_a_class_is_an_slo() -> None:
    _, found = specification(gold=SloOptions(objectives="ttft:500ms", target=0.999))
    (slo,) = found.pop("slos")  # type: ignore[misc]
    assert found == {"version": "prometheus/v1", "service": "tap", "labels": {"tap": "llmtap"}}
    assert slo == {
        "name": "gold",
        "objective": 99.9,
        "description": "Exchanges that meet ttft:500ms.",
        "sli": {
            "events": {
                "error_query": 'sum(rate(llmtap_slo_events_total{job="tap",slo="gold"}[{{.window}}]))'
                ' - sum(rate(llmtap_slo_good_total{job="tap",slo="gold"}[{{.window}}]))',
                "total_query": 'sum(rate(llmtap_slo_events_total{job="tap",slo="gold"}[{{.window}}]))',
            }
        },
        "alerting": {
            "name": "LlmtapErrorBudgetBurn",
            "labels": {"slo": "gold"},
            "annotations": {
                "summary": "gold: the error budget burns too fast (ttft:500ms)",
                "runbook_url": "https://wiki/LlmtapErrorBudgetBurn.md",
            },
            "page_alert": {"labels": {"severity": "page"}},
            "ticket_alert": {"labels": {"severity": "ticket"}},
        },
    }


def test_a_severity_that_can_never_ring_is_disabled() -> None:
    text, found = specification(loose=SloOptions(objectives="e2e:1s", target=0.8))
    (slo,) = found["slos"]  # type: ignore[misc]
    assert slo["alerting"]["page_alert"] == {"disable": True}
    assert slo["alerting"]["ticket_alert"] == {"labels": {"severity": "ticket"}}
    assert text.count("# slo.loose: no page") == 2


def test_burn_rates_that_sloth_cannot_take_are_told() -> None:
    text, _ = specification(batch=SloOptions(objectives="e2e:1s", target=0.9, burn={"1h": 8.0, "6h": 6.0}))
    assert "# slo.batch: its burn rate over 1h is 8, Sloth's is 14.4, which can never be seen" in text
    assert "over 6h" not in text


def test_percentages_have_no_noise() -> None:
    _, found = specification(gold=SloOptions(objectives="ttft:1s", target=0.9995))
    assert found["slos"][0]["objective"] == 99.95  # type: ignore[index]
