"""The reference pages have all that the program has, and are tables that Markdown understands."""

import re

import pytest

from llmtap.config import help_by_key
from llmtap.meter.admin.openapi import ROUTES
from llmtap.meter.admin.schemas import SCHEMAS
from llmtap.sim.server.options import keys as engine_keys
from tests.docs.documents import hook

generate = hook("generate")


def section(page: str, heading: str) -> str:
    """What stands below a heading, up to the next of its kind."""
    level = heading.split(" ")[0]
    _, found, rest = page.partition(f"\n{heading}\n")
    assert found, f"no heading {heading}"
    return rest.split(f"\n{level} ")[0]


def test_every_key_is_there_with_its_meaning() -> None:
    page = generate.options_page()
    for key, meaning in help_by_key().items():
        place, _, name = key.rpartition(".")
        rows = section(page, f"## [{place}]").splitlines()
        (row,) = [line for line in rows if line.startswith(f"| `{name}` |")]
        assert generate.plain(meaning) in row
        assert meaning, key
    for key in engine_keys():
        assert not key.key or f"| `{key.key}` |" in section(page, "## llmtap sim serve")


def test_every_path_and_schema_is_there_and_links_lead_somewhere() -> None:
    page = generate.api_page()
    for route in ROUTES:
        assert f"## {route.method.upper()} {generate.plain(route.path)}\n" in page
    for name in SCHEMAS:
        assert f"\n### {name}\n" in page
    headings = [line.lstrip("# ").lower() for line in page.splitlines() if line.startswith("#")]
    slugs = {re.sub(r"[^\w -]", "", heading) for heading in headings}
    assert {*re.findall(r"\]\(#([^)]*)\)", page)} <= slugs


@pytest.mark.parametrize("name", ["options_page", "commands_page", "api_page"])
def test_each_row_of_a_table_has_as_many_cells_as_its_head(name: str) -> None:
    width = None
    for line in getattr(generate, name)().splitlines():
        cells = re.sub(r"`[^`]*`", "", line).count("|")
        if not line.startswith("|"):
            width = None
            continue
        width = width or cells
        assert cells == width, line
