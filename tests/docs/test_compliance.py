"""The audit page names places and tests that exist, and has all requirements of the draft."""

import re

import pytest

from llmtap.bench.compliance.judge import REQUIREMENTS
from tests.docs.documents import ROOT, hook
from tests.support.expected import check_expected

PAGE = (ROOT / "docs" / "compliance.md").read_text(encoding="utf-8")
GENERATE = hook("generate")
BEFORE, _, REST = PAGE.partition(GENERATE.REQUIREMENTS_BEGIN)
TABLE, _, AFTER = REST.partition(GENERATE.REQUIREMENTS_END)
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (BEFORE + AFTER).splitlines()
    if line.startswith("| ") and "`llmtap/" in line
]
PLACES = sorted(set(re.findall(r"`((?:llmtap|tests)/[\w/]+\.py)(?:::(\w+))?`", PAGE)))


def test_there_are_rows_of_all_five_documents() -> None:
    assert len(re.findall(r"^## ", PAGE, re.MULTILINE)) == 5
    assert len(ROWS) > 80
    for *_, code, test in ROWS:
        assert code.startswith("`llmtap/") and test.startswith("`tests/"), (code, test)


@pytest.mark.parametrize(("path", "name"), PLACES)
def test_each_place_and_test_exists(path: str, name: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert not name or re.search(rf"^\s*(?:async )?(?:def|class) {name}\b", text, re.MULTILINE), name


def test_the_page_in_the_repository_has_the_table_of_requirements(pytestconfig: pytest.Config) -> None:
    check_expected(ROOT / "docs" / "compliance.md", GENERATE.with_requirements(PAGE), pytestconfig)


def test_each_requirement_has_the_code_that_carries_it_out_and_its_row() -> None:
    sections = {row[0] for row in ROWS}
    lines = TABLE.splitlines()
    for one in REQUIREMENTS:
        parts = one.section.split(".")
        # 4.2 itself is all of its subsections.
        prefixes = {".".join(parts[: i + 1]) for i in range(len(parts))}
        assert prefixes & sections or one.section == "4.2", one.id
        assert len([line for line in lines if line.startswith(f"| {one.id} |")]) == 1
