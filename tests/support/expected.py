"""Texts that are compared with files; `pytest --rewrite-golden` rewrites the files."""

from difflib import unified_diff
from itertools import islice
from pathlib import Path

import pytest

COLUMNS_SHOWN, LINES_SHOWN = 300, 60
"""Of a difference."""


def check_expected(file: Path, found: str, config: pytest.Config) -> None:
    """Fail where the text is not that of the file."""
    if config.getoption("--rewrite-golden"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(found.encode())
    expected = file.read_bytes().decode() if file.exists() else ""
    if found != expected:  # an assertion would compare letter by letter, which takes minutes
        lines = unified_diff(expected.split("\n"), found.split("\n"), file.name, "now", lineterm="")
        shown = "\n".join(line[:COLUMNS_SHOWN] for line in islice(lines, LINES_SHOWN))
        pytest.fail(f"run pytest --rewrite-golden if this is as it should be\n{shown}", pytrace=False)
