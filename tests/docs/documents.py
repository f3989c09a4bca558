"""The fenced blocks of a Markdown page, the commands in them, and the hooks of the site's build.

A block that is not to be run has a comment right before it that says why:

    <!-- not run: needs a cluster -->

A block with a title (as mkdocs writes it: ```toml title="llmtap.toml") is a file of that name.
"""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]

SHELL: Final = ("sh", "bash", "console")
_FENCE: Final = re.compile(r"(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)")
_TITLE: Final = re.compile(r'\btitle="([^"]+)"')
_NOT_RUN: Final = re.compile(r"\s*<!--\s*not run:\s*(.*?)\s*-->\s*")


class Block(NamedTuple):
    """One fenced block."""

    line: int
    """Of its opening fence, from 1."""
    language: str
    """Empty where the page names none."""
    title: str | None
    text: str
    not_run: str | None
    """Why not; None for what is to be run."""


def pages() -> list[Path]:
    """README.md and all pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def hook(name: str) -> ModuleType:
    """Import docs/NAME.py, which is in no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(text: str) -> Iterator[Block]:
    """Those of a page, in order. Raises ValueError for one without an end."""
    lines = iter(enumerate(text.splitlines(), 1))
    above = ""
    for number, line in lines:
        opening = _FENCE.fullmatch(line)
        if opening is None:
            above = line if line.strip() else above
            continue
        inside = []
        for _, inner in lines:
            if inner.strip().startswith(opening["fence"]) and not inner.strip().strip(opening["fence"][0]):
                break
            inside.append(inner.removeprefix(opening["indent"]))
        else:
            raise ValueError(f"line {number}: the block has no end")
        info = opening["info"].strip()
        title, why = _TITLE.search(info), _NOT_RUN.fullmatch(above)
        yield Block(
            number,
            info.split(maxsplit=1)[0] if info else "",
            title and title[1],
            "".join(f"{one}\n" for one in inside),
            why and why[1],
        )
        above = ""


def commands(block: Block) -> list[str]:
    """Of a block of a shell's language: one a line, or a few lines that end with a backslash. In a console's
    block what follows `$ `; the rest of it is what the commands say."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.language == "console":
            line = line.removeprefix("$ ") if line.startswith("$ ") else ""
        line = line.strip()
        if line and not line.startswith("#"):
            found.append(line)
    return found
