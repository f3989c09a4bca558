"""A page for each alert, with what somebody needs at night, and commands that name what there is."""

import re
from pathlib import Path
from typing import Any

import pytest

from llmtap.export.rules import BURN_ALERT, OUTDATED_ALERT, self_alerts
from tests.support.traffic.exposed import exposed

FOLDER = Path(__file__).parents[2] / "deploy" / "runbooks"
ALERTS = [BURN_ALERT, OUTDATED_ALERT, *(alert["alert"] for alert in self_alerts("llmtap"))]
SECTIONS = ["What it means", "What users see", "Look first", "What to do", "Silence"]


def page(alert: str) -> str:
    return (FOLDER / f"{alert}.md").read_text()


def test_there_is_a_page_for_each_alert_and_no_other() -> None:
    assert sorted(file.stem for file in FOLDER.glob("*.md") if file.stem != "README") == sorted(ALERTS)
    index = (FOLDER / "README.md").read_text()
    assert sorted(re.findall(r"^\| \[(\w+)\]\(\1\.md\)", index, re.MULTILINE)) == sorted(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_a_page_has_its_sections_and_three_checks_with_commands(alert: str) -> None:
    text = page(alert)
    assert text.startswith(f"# {alert}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    look = text.split("## Look first")[1].split("## ")[0]
    checks = re.split(r"^\d\. ", look, flags=re.MULTILINE)[1:]
    assert len(checks) == 3
    assert all("`" in check for check in checks)
    assert f"amtool silence add alertname={alert}" in text


@pytest.mark.parametrize("alert", self_alerts("llmtap"), ids=lambda alert: alert["alert"])
def test_a_page_says_its_severity(alert: dict[str, Any]) -> None:
    name, severity = alert["alert"], alert["labels"]["severity"]
    assert f"Severity: `{severity}`." in page(name)
    assert f"| [{name}]({name}.md) | {severity} |" in (FOLDER / "README.md").read_text()


def test_metrics_that_pages_name_exist() -> None:
    bare = {
        name.removesuffix(end) for name in exposed() for end in ("", "_bucket", "_sum", "_count", "_total")
    }
    for alert in ALERTS:
        for name in re.findall(r"\bllmtap_[a-z_]*[a-z]", page(alert)):
            assert name in bare or any(known.startswith(name) for known in bare), f"{alert}: {name}"
