"""How far a benchmark is: its loads as lines that stay, and under them the load under way."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from llmtap.cli.replay_progress import Bars, ReplayLines, painted
from llmtap.clock import SystemClock
from llmtap.units import NS_PER_S

__all__ = ["BenchLines", "watching"]

_MEASURED_BEFORE: Final = "measured before"


class BenchLines(ReplayLines):
    """Lines on standard error, for a log."""

    def __init__(self) -> None:
        super().__init__()
        self._began_ns = SystemClock.mono_ns()

    def step(self, name: str, said: str) -> None:
        print(f"llmtap: {self._passed()} {name}: {said}", file=sys.stderr, flush=True)

    def left(self, said: str) -> None:
        if said:
            print(f"llmtap: {self._passed()} left: {said}", file=sys.stderr, flush=True)

    def _passed(self) -> str:
        """Minutes and seconds since the start."""
        seconds = (SystemClock.mono_ns() - self._began_ns) // NS_PER_S
        return f"{seconds // 60:02d}:{seconds % 60:02d}"


class _BenchBars(Bars, BenchLines):
    """Loads, and what is left of them, scroll by; the line at the bottom is painted over."""

    def step(self, name: str, said: str) -> None:
        self._print(f"{name}: {said}", "dim" if said.startswith(_MEASURED_BEFORE) else "none")
        self.hide()

    def left(self, said: str) -> None:
        if said:
            self._print(f"left: {said}", "dim")

    def _print(self, line: str, style: str) -> None:
        self._bar.console.print(f"{self._passed()} {line}", style=style, markup=False, highlight=False)

    def _say(self, words: str) -> None:
        self._print(words, "none")


@contextmanager
def watching() -> Iterator[BenchLines]:
    """Somebody to tell."""
    if not sys.stderr.isatty():
        yield BenchLines()
        return
    with painted() as bar:
        yield _BenchBars(bar)
