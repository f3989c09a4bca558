"""Every command of the how-tos does what it says there."""

from pathlib import Path

import pytest

from tests.docs.walkthrough import PAGE_S, walked

FOLDER = Path(__file__).parents[2] / "docs" / "howto"
PAGES = [pytest.param(page, id=page.stem) for page in sorted(FOLDER.glob("*.md"))]


@pytest.mark.realtime
@pytest.mark.timeout(PAGE_S + 120)
@pytest.mark.parametrize("page", PAGES)
def test_each_command_of_a_how_to_runs(page: Path) -> None:
    walked(page)
