"""DEFINITIONS.md and the code say the same terms: each named function exists, each public one is named."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import llmtap.metrics
from llmtap.exchange.exchange import Exchange, Timeline
from llmtap.metrics.catalogue import METRICS
from llmtap.metrics.latency import metrics_of
from llmtap.metrics.objectives import BOUNDS

HERE = Path(llmtap.metrics.__file__).parent
TEXT = (HERE / "DEFINITIONS.md").read_text(encoding="utf-8")
NO_TERMS = {
    "catalogue",
    "hdr",
    "histogram",
    "statistics.t_quantile",
    "idle_cost.check_idle_cost",
    "refusals.is_refused",
    "refusals.label_key",
    "refusals.labels_document",
    "slo.check_slos",
    "statistics.parse_percentiles",
    "summary.with_objectives",
}
"""Modules and functions that define no term: a table, containers and their formats, a distribution, checks,
parts of a term, and counts of labels."""


def tables() -> list[list[list[str]]]:
    """Every table: rows of cells, the head first, the rule left out."""
    found: list[list[list[str]]] = []
    inside = False
    for line in TEXT.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not inside:
            found.append([])
            inside = True
        if not re.fullmatch(r"[-: |]+", line):
            found[-1].append(cells)
    return found


TERMS = [
    (row[0], row[head.index("function")]) for head, *rows in tables() if "function" in head for row in rows
]


def resolve(reference: str) -> object:
    """What `module.name` or `module.Class.name` means in this room."""
    module, *names = reference.split(".")
    found: object = import_module(f"llmtap.metrics.{module}")
    for name in names:
        found = getattr(found, name)
    return found


def public_functions() -> set[str]:
    """`module.function` of every public function of the room."""
    found = set()
    for path in HERE.glob("*.py"):
        if path.stem == "__init__" or path.stem in NO_TERMS:
            continue
        module = import_module(f"llmtap.metrics.{path.stem}")
        found |= {
            f"{path.stem}.{name}"
            for name, member in inspect.getmembers(module, inspect.isfunction)
            if member.__module__ == module.__name__ and not name.startswith("_")
        }
    return found - NO_TERMS


@pytest.mark.parametrize(("term", "function"), TERMS, ids=lambda text: text[:40])
def test_each_term_names_a_function_that_exists_and_says_what_it_does(term: str, function: str) -> None:
    reference = re.fullmatch(r"`([a-z_]+(?:\.\w+)+)`", function)
    assert reference, f"{term}: {function} is no `module.function`"
    found = resolve(reference[1])
    assert callable(found)
    assert inspect.getdoc(found)


def test_each_public_function_has_its_term() -> None:
    named = {function.strip("`") for _, function in TERMS}
    assert public_functions() - named == set()


NAMES = {*(metric.name for metric in METRICS), *BOUNDS, *metrics_of(Exchange("r", 1, 0, Timeline(0)))}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_public_name_is_defined(name: str) -> None:
    assert f"`{name}`" in TEXT


def test_each_row_has_the_cells_of_its_head() -> None:
    for head, *rows in tables():
        assert {len(row) for row in rows} == {len(head)}, head
