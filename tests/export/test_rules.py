"""The rules file: Sloth's names, our numbers, and nothing that the exporter does not have."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmtap.export.rules import inhibition_rules, missing_alarms, render, self_alerts, window_name
from llmtap.metrics.slo import SloClass, SloOptions
from tests.support.traffic.exposed import FUNCTIONS, OF_A_SCRAPE, exposed, labels_grouped, selectors

HOUSE = Path(__file__).parents[2]


def asked(**classes: SloOptions) -> list[SloClass]:
    return [SloClass.of(name, options).with_tickets() for name, options in classes.items()]


GOLD = SloOptions(objectives="ttft:500ms tpot:50ms", target=0.99)
BATCH = SloOptions(objectives="e2e:120s", target=0.9, tenants=("nightly-*",))

EACH = SloOptions(objectives="ttft:500ms tpot:50ms", target=0.99, per="tenant")


def groups(job: str = "llmtap", runbooks: str = "https://wiki/tap/", **classes: SloOptions) -> dict[str, Any]:
    text = render(asked(**(classes or {"gold": GOLD})), job, runbooks)
    return {group["name"]: group for group in yaml.safe_load(text)["groups"]}


def rules(name: str = "llmtap-slo-gold", **more: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = groups(**more)[name]["rules"]
    return found


def recorded(**more: Any) -> dict[str, dict[str, Any]]:
    return {rule["record"]: rule for rule in rules(**more) if "record" in rule}


def alerts(**more: Any) -> list[dict[str, Any]]:
    return [rule for rule in rules(**more) if rule.get("alert") == "LlmtapErrorBudgetBurn"]


def test_alerts_have_the_windows_factors_and_least_counts() -> None:
    told = []
    for rule in alerts():
        long, short = rule["labels"]["long"], rule["labels"]["short"]
        ratios = re.findall(r"ratio_rate(\w+)\{.*?\}\) / (\S+) > (\S+)", rule["expr"])
        least = int(rule["expr"].rsplit(">= ", 1)[1])
        assert ratios == [(long, "0.01", ratios[0][2]), (short, "0.01", ratios[0][2])]
        told.append((rule["labels"]["severity"], long, short, ratios[0][2], least))
    # 1 / (14.4 x 0.01) = 6.9, 1 / 0.06 = 16.7, 1 / 0.03 = 33.3, 1 / 0.01 = 100
    assert told == [
        ("page", "1h", "5m", "14.4", 7),
        ("page", "6h", "30m", "6", 17),
        ("ticket", "1d", "2h", "3", 34),
        ("ticket", "3d", "6h", "1", 100),
    ]


def test_a_template_has_the_alarms_of_the_class_and_of_its_tenants() -> None:
    made = alerts(gold=EACH)
    assert [rule["labels"]["long"] for rule in made] == ["1h", "6h", "1d", "3d"] * 2
    for of_class, of_tenant in zip(made[:4], made[4:], strict=True):
        # The class is silent while the alarm of exactly one tenant rings, which is the same expression.
        tenants = "".join(line.strip() for line in of_tenant["expr"].splitlines())
        assert tenants in "".join(line.strip() for line in of_class["expr"].splitlines())
        assert "unless on ()\ncount(\n" in of_class["expr"] and of_class["expr"].endswith(") == 1\n")
        assert "and on (tenant)" in of_tenant["expr"]
        assert of_class["labels"] | {"per": "tenant"} == of_tenant["labels"]
        assert "$labels.tenant" in of_tenant["annotations"]["summary"]
    assert not any("by_tenant" in name for name in recorded())


def matches(alert: dict[str, str], matchers: list[str]) -> bool:
    for matcher in matchers:
        name, sign, value = re.fullmatch(r"(\w+) (=~|=) \"?(.*?)\"?", matcher).groups()  # type: ignore[union-attr]
        got = alert.get(name, "")
        if (re.fullmatch(value, got) is None) if sign == "=~" else got != value:
            return False
    return True


def inhibited(alert: dict[str, str], firing: list[dict[str, str]]) -> bool:
    """Alertmanager's rule: a source fires, the alert is a target, and the labels of `equal` are equal."""
    return any(
        matches(alert, rule["target_matchers"])
        and matches(source, rule["source_matchers"])
        and all(alert.get(name, "") == source.get(name, "") for name in rule.get("equal", ()))
        for rule in yaml.safe_load(inhibition_rules("llmtap"))["inhibit_rules"]
        for source in firing
    )


def burn(severity: str, long: str, **labels: str) -> dict[str, str]:
    names = {"alertname": "LlmtapErrorBudgetBurn", "sloth_service": "llmtap", "slo": "gold"}
    return {**names, "severity": severity, "long": long, **labels}


def test_one_cause_sends_one_page() -> None:
    owners: list[dict[str, str]] = [{}, {"tenant": "a"}, {"tenant": "b"}]
    of_gold = [
        burn(severity, long, **owner)
        for owner in owners
        for severity, long in (("page", "1h"), ("page", "6h"), ("ticket", "1d"), ("ticket", "3d"))
    ]
    other = burn("page", "6h", slo="batch")
    assert [one for one in [*of_gold, other] if not inhibited(one, [*of_gold, other])] == [of_gold[0], other]
    # Without the alert of the class, each tenant has a page; another tenant's does not suppress it.
    tenants = [one for one in of_gold if "tenant" in one]
    assert [one for one in tenants if not inhibited(one, tenants)] == [
        burn("page", "1h", tenant="a"),
        burn("page", "1h", tenant="b"),
    ]
    down = {"alertname": "LlmtapUpstreamDown", "severity": "page", "job": "llmtap", "instance": "a"}
    assert [one for one in [*of_gold, down] if not inhibited(one, [*of_gold, down])] == [down]
    assert not inhibited(burn("page", "1h", sloth_service="another"), [down])


def test_inhibitions_name_alerts_that_exist() -> None:
    known = {rule["alert"] for group in groups().values() for rule in group["rules"] if "alert" in rule}
    named = set(re.findall(r"alertname = (\w+)", inhibition_rules("llmtap")))
    assert named <= known


def test_outdated_compares_the_target_and_each_bound_in_seconds() -> None:
    odd = SloOptions(objectives="ttft:1500us tpot:50ms", target=0.99)
    (rule,) = [r for r in rules(gold=odd) if r.get("alert") == "LlmtapSloRulesOutdated"]
    told = re.findall(r'objective="(\w+)"\} == (\S+)', rule["expr"])
    # What `/metrics` has for it, to the last digit: ns / 1e9.
    assert [(name, float(bound)) for name, bound in told] == [("ttft", 1_500_000 / 1e9), ("tpot", 0.05)]
    assert 'objective!~"ttft|tpot"' in rule["expr"]
    assert "ttft:1500us tpot:50ms and a target of 0.99" in rule["annotations"]["description"]


def test_an_unreachable_alarm_is_a_comment_and_no_rule() -> None:
    text = render(asked(batch=BATCH), "llmtap", "x")
    said = " ".join(line.removeprefix("# ").strip() for line in text.splitlines() if line.startswith("#"))
    assert "Omitted: slo.batch: no page over 1h and 5m: a burn rate above 14.4 can't be seen" in said
    found = yaml.safe_load(text)["groups"][0]["rules"]
    assert [r["labels"]["long"] for r in found if r.get("alert") == "LlmtapErrorBudgetBurn"] == [
        "6h",
        "1d",
        "3d",
    ]


def test_every_name_and_label_is_one_that_can_be_scraped_or_is_recorded() -> None:
    known = dict(exposed())
    for name, rule in recorded(gold=EACH).items():
        known[name] = frozenset(rule["labels"]) | ({"tenant"} if "by_tenant" in name else set())
    example = yaml.safe_load((HOUSE / "deploy/prometheus/reader-alerts.yaml").read_text())["groups"]
    made = [*groups(gold=EACH, batch=BATCH).values(), *example]
    queries = [rule["expr"] for group in made for rule in group["rules"]]
    for query in queries:
        assert query.count("(") == query.count(")"), query
        assert set(re.findall(r"\b([a-z_]+)\s*\(", query)) <= FUNCTIONS, query
        labels: set[str] = set()
        for name, matched in selectors(query):
            assert name in known, f"{name} in {query}"
            assert matched <= known[name], f"{matched - known[name]} of {name} in {query}"
            labels |= known[name]
        assert labels_grouped(query) <= labels | {"sloth_window"}, query


def test_what_is_summed_keeps_what_tells_a_tap_apart() -> None:
    # But for those about the job as a whole.
    summed = [alert for alert in self_alerts("llmtap") if " by (" in alert["expr"]]
    assert len(summed) > 10
    for alert in summed:
        for grouped in re.findall(r"by \(([^)]*)\)", alert["expr"]):
            assert set(grouped.split(", ")) >= OF_A_SCRAPE, alert["alert"]


def test_files_that_a_capture_deleted_at_its_limit_cause_no_alert() -> None:
    (alert,) = (one for one in self_alerts("llmtap") if one["alert"] == "LlmtapCaptureIncomplete")
    counted = re.findall(r"\(\s*llmtap_capture_dropped_exchanges_total\{([^}]*)\}", alert["expr"])
    assert len(counted) == 2
    assert all('reason!="deleted"' in labels for labels in counted)


# ------------------------------------------------------------------ the alarms of a class


def a_class(target: float, **burn: float) -> SloClass:
    return SloClass.of(
        "gold", SloOptions(objectives="tpot:50ms ttft:500ms", target=target, burn=burn)
    ).with_tickets()


@pytest.mark.parametrize(
    ("target", "left"),
    [
        (0.999, ["1h", "6h", "1d", "3d"]),
        (0.95, ["1h", "6h", "1d", "3d"]),  # 14.4 x 0.05 = 0.72
        (0.93, ["6h", "1d", "3d"]),  # 14.4 x 0.07 = 1.008
        (0.9, ["6h", "1d", "3d"]),
        (0.8, ["1d", "3d"]),  # 6 x 0.2 = 1.2
        (0.5, ["3d"]),  # 3 x 0.5 = 1.5
    ],
)
def test_an_alarm_that_cannot_ring_is_left_out(target: float, left: list[str]) -> None:
    slo = a_class(target)
    assert [window_name(a.long_ns) for a in slo.alarms] == left
    assert len(slo.alarms) + len(slo.unreachable_alarms) == 4
    assert len(missing_alarms(slo)) == 4 - len(left)
