"""A copy of the package that a proxy runs from: a test can upgrade it, or break it."""

import shutil
from pathlib import Path
from typing import Final

import llmtap

_DEAD: Final = "raise SystemExit(3)\n"


class OwnProgram:
    """`folder` is what has to be on the import path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(Path(llmtap.__file__).parent, folder / "llmtap")
        self._relay = folder / "llmtap/vantage/relay/__main__.py"
        self._sound = self._relay.read_text()

    def change(self, name: str, old: str, new: str) -> None:
        """In a file of the package."""
        file = self.folder / "llmtap" / name
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))

    def relays_fail(self) -> None:
        """From now on, whichever is started."""
        self._relay.write_text(_DEAD)

    def relays_work(self) -> None:
        self._relay.write_text(self._sound)
