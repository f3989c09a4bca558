"""Every command of the README does what it says there."""

from pathlib import Path

import pytest

from tests.docs.walkthrough import PAGE_S, walked


@pytest.mark.realtime
@pytest.mark.timeout(PAGE_S + 120)
def test_each_command_of_the_readme_runs() -> None:
    walked(Path(__file__).parents[2] / "README.md")
