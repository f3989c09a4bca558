"""How far a replay is: a bar with live figures where somebody sees it, else a line now and then."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from llmtap.clock import SystemClock
from llmtap.load.workers.worker_handle import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

__all__ = ["Bars", "ReplayLines", "painted", "watching"]

EVERY_NS: Final = 10_000_000_000


class ReplayLines:
    """Lines on standard error, for a log."""

    def __init__(self) -> None:
        self._told_ns = SystemClock.mono_ns()
        self._under_way = 0
        self._stops = 0

    def reading(self, done: int, of: int | None) -> None:
        pass

    def preparing(self, done: int, of: int) -> None:
        pass

    def warming(self, how: str) -> None:
        if how != "none":
            print("llmtap: warming the server up", file=sys.stderr)

    def sending(self, progress: Progress, planned: int) -> None:
        self._under_way = progress.under_way
        now_ns = SystemClock.mono_ns()
        if now_ns - self._told_ns >= EVERY_NS or not (progress.left or progress.under_way):
            self._told_ns = now_ns
            print(f"llmtap: {figures(progress, planned)}", file=sys.stderr)

    def writing(self, done: int, of: int) -> None:
        pass

    def comparing(self, done: int, of: int | None) -> None:
        pass

    def stopping(self) -> None:
        """Somebody wants it to stop; the second time, at once."""
        self._stops += 1
        answers = f"{self._under_way:,} answer{'' if self._under_way == 1 else 's'}"
        if self._stops == 1 and self._under_way:
            self._say(f"stopping: {answers} under way, again to cut them")
        elif self._stops == 1:
            self._say("stopping")
        elif self._stops == 2 and self._under_way:
            self._say(f"cutting {answers}")

    def _say(self, words: str) -> None:
        print(f"llmtap: {words}", file=sys.stderr, flush=True)


class Bars(ReplayLines):
    """One line, painted over: of what is under way, how much is done, and figures."""

    def __init__(self, bar: "RichProgress") -> None:
        super().__init__()
        self._bar = bar
        self._what = ""

    def hide(self) -> None:
        """Nothing is under way."""
        self._what = ""
        for task in self._bar.task_ids:
            self._bar.remove_task(task)

    def _show(self, what: str, done: int, of: int | None, said: str = "") -> None:
        if what != self._what:
            self.hide()
            self._what = what
            self._bar.add_task(what, total=of, said=said)
        self._bar.update(self._bar.task_ids[0], completed=done, total=of, said=said)

    def reading(self, done: int, of: int | None) -> None:
        self._show("reading", done, of)

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

    def comparing(self, done: int, of: int | None) -> None:
        self._show("reading what was captured", done, of)

    def _say(self, words: str) -> None:
        self._bar.console.print(f"llmtap: {words}", markup=False, highlight=False)


def figures(p: Progress, planned: int | None) -> str:
    """A line of them."""
    said = [
        f"sent {p.sent:,}" + ("" if planned is None else f" of {planned:,}"),
        f"in flight {p.under_way:,}",
    ]
    if p.failed:
        said.append(f"failed {p.failed:,}")
    if p.ttft_p50_ns is not None and p.ttft_p99_ns is not None:
        said.append(f"TTFT {p.ttft_p50_ns / 1e6:,.0f} / {p.ttft_p99_ns / 1e6:,.0f} ms")
    if p.tbc_p50_ns is not None and p.tbc_p99_ns is not None:
        said.append(f"TBC {p.tbc_p50_ns / 1e6:,.1f} / {p.tbc_p99_ns / 1e6:,.1f} ms")
    if p.lateness_p99_ns is not None:
        said.append(f"late p99 {p.lateness_p99_ns / 1e6:,.2f} ms")
    return ", ".join(said)


@contextmanager
def painted() -> Iterator["RichProgress"]:
    """The place of `Bars`, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(20), MofNCompleteColumn(),
        TextColumn("{task.fields[said]}", markup=False),
    )  # fmt: skip
    with RichProgress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as bar:
        yield bar


@contextmanager
def watching() -> Iterator[ReplayLines]:
    """Somebody to tell."""
    if not sys.stderr.isatty():
        yield ReplayLines()
        return
    with painted() as bar:
        yield Bars(bar)
