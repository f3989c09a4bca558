"""How far a benchmark is: its loads as lines that stay, and under them the load under way."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llmtap.cli.replay_progress import Lines, figures
from llmtap.clock import SystemClock
from llmtap.load.messages import Progress
from llmtap.units import NS_PER_S

__all__ = ["BenchLines", "watching"]

_MEASURED_BEFORE = "measured before"


class BenchLines(Lines):
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


class _Bar(BenchLines):
    """Loads, and what is left of them, scroll by; the line at the bottom is painted over."""

    def __init__(self, bar: Any) -> None:
        super().__init__()
        self._bar = bar
        self._task = bar.add_task("", total=None, said="", visible=False)

    def step(self, name: str, said: str) -> None:
        self._print(f"{name}: {said}", "dim" if said.startswith(_MEASURED_BEFORE) else "none")
        self._bar.update(self._task, visible=False)

    def left(self, said: str) -> None:
        if said:
            self._print(f"left: {said}", "dim")

    def _print(self, line: str, style: str) -> None:
        self._bar.console.print(f"{self._passed()} {line}", style=style, markup=False, highlight=False)

    def _say(self, words: str) -> None:
        self._print(words, "none")

    def _show(self, what: str, done: int, of: int | None, said: str = "") -> None:
        self._bar.update(self._task, description=what, completed=done, total=of, said=said, visible=True)

    def preparing(self, done: int, of: int) -> None:
        self._show("preparing prompts", done, of)

    def warming(self, how: str) -> None:
        if how != "none":
            self._show("warming up", 0, None)

    def sending(self, progress: Progress, planned: int) -> None:
        self._under_way = progress.under_way
        self._show("sending", progress.ended, planned, figures(progress, None))

    def writing(self, done: int, of: int) -> None:
        self._show("writing", done, of)


@contextmanager
def watching() -> Iterator[BenchLines]:
    """Somebody to tell."""
    if not sys.stderr.isatty():
        yield BenchLines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(20),
        TextColumn("{task.fields[said]}", markup=False),
    )  # fmt: skip
    with RichProgress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as bar:
        yield _Bar(bar)
