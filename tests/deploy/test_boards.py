"""The boards: what the code makes, as Grafana's classic model has it, asking for what can be scraped."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.traffic.exposed import FUNCTIONS, exposed, labels_grouped, selectors

HOUSE = Path(__file__).parents[2]
FOLDER = HOUSE / "deploy" / "grafana"
FILES = sorted((FOLDER / "boards").glob("*.json"))


def boards() -> list[Any]:
    return [pytest.param(json.loads(file.read_text()), id=file.stem) for file in FILES]


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for panel in panels(board):
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def known() -> dict[str, frozenset[str]]:
    """What can be scraped, and what the rules make of it."""
    found = dict(exposed())
    rules = yaml.safe_load((HOUSE / "deploy" / "prometheus" / "llmtap-rules.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "record" in rule:
                found[rule["record"]] = frozenset(rule["labels"])
    return found | {"ALERTS": frozenset({"alertname", "alertstate", "severity", "slo", "instance"})}


def test_the_files_are_what_the_code_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-B", str(FOLDER / "boards.py"), str(tmp_path)], check=True, timeout=200)
    made = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert made == {file.name: file.read_text() for file in FILES}, "run: python deploy/grafana/boards.py"


@pytest.mark.parametrize("board", boards())
def test_variables_have_all_and_each_is_used(board: dict[str, Any]) -> None:
    variables = {v["name"]: v for v in board["templating"]["list"]}
    assert list(variables)[:2] == ["datasource", "job"]
    text = " ".join(query for _, query in queries(board))
    for name, variable in variables.items():
        if name == "datasource":
            continue
        assert (variable["includeAll"], variable["multi"], variable["allValue"]) == (True, True, ".*")
        assert f'=~"${name}"' in text, name
        (_, matched) = selectors(variable["definition"])[0]
        metric = re.search(r"llmtap_\w+", variable["definition"])
        label = variable["definition"].rsplit(" ", 1)[1].rstrip(")")
        assert metric is not None
        assert {label, *matched} <= exposed()[metric[0]]
    assert set(re.findall(r"\$(\w+)", text)) <= {*variables, "__rate_interval", "__range"}


@pytest.mark.parametrize("board", boards())
def test_every_query_asks_for_what_there_is(board: dict[str, Any]) -> None:
    names = known()
    for title, query in queries(board):
        assert query.count("(") == query.count(")"), title
        assert query.count("{") == query.count("}"), title
        assert set(re.findall(r"\b([a-z_]+)\s*\(", query)) <= FUNCTIONS, query
        found = selectors(query)
        assert found, f"{title}: {query} names no metric"
        labels: set[str] = set()
        for name, matched in found:
            assert name in names, f"{title}: {name}"
            assert matched <= names[name], f"{title}: {matched - names[name]} of {name}"
            labels |= names[name]
        assert labels_grouped(query) <= labels, f"{title}: {query}"
