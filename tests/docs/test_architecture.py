"""ARCHITECTURE.md names what is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_every_path_exists() -> None:
    paths = set(re.findall(r"[(`](llmtap/[\w./]+)", TEXT))
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_package_has_a_row() -> None:
    packages = {path.parent.name for path in (ROOT / "llmtap").glob("*/__init__.py")}
    rows = set(re.findall(r"^\| `(\w+)/`", TEXT, re.MULTILINE))
    assert packages - rows == set()
