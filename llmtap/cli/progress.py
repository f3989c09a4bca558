"""Show the progress of replays and benchmarks: a bar with live figures on a terminal, else log lines.

`watching_replay` and `watching_bench` give a command the listener that it passes to a replay or a benchmark,
which calls the listener's methods. `LatestProgress` keeps the figures for `llmtap demo`. `Answering` handles
Ctrl-C during a replay.
"""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, assert_never

from llmtap.clock import SystemClock
from llmtap.load.replay.perform import Replay, ReplayStage
from llmtap.load.workers.worker_handle import Progress
from llmtap.units import NS_PER_S

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

EVERY_NS: Final = 10_000_000_000
WARM_UP_AUTO: Final = "100 requests or more, 10,000 tokens or more, until latency is stable"


class ReplayLines:
    """Lines on standard error, for a log."""

    def __init__(self) -> None:
        self._told_ns = SystemClock.mono_ns()
        self._under_way = 0
        self._stops = 0
        self._load_ns = 0
        """Start of the current load; 0 before its first report."""
        self._load_s: float | None = None
        """Duration of the load; None if only the number of requests is known."""

    def reading(self, done: int, of: int | None) -> None:
        pass

    def preparing(self, done: int, of: int) -> None:
        pass

    def warming(self, how: str, done: int = 0, of: int | None = None, what: str = "requests") -> None:
        if how == "none":
            return
        if of is None:
            how = f"{WARM_UP_AUTO} (shorter: --warmup 8)" if how == "auto" else f"{how} requests"
            print(f"llmtap: warming the server up: {how}", file=sys.stderr)
            self._told_ns = SystemClock.mono_ns()
        elif self._is_due():
            print(f"llmtap: warming the server up: {_warmed(done, of, what)}", file=sys.stderr)

    def _is_due(self) -> bool:
        now_ns = SystemClock.mono_ns()
        if now_ns - self._told_ns < EVERY_NS:
            return False
        self._told_ns = now_ns
        return True

    def sending(self, progress: Progress, planned: int | None) -> None:
        self._under_way = progress.under_way
        left = self._left(progress, planned)  # at each report, so that the first one begins the load
        if self._is_due() or not (progress.left or progress.under_way):
            print(f"llmtap: {figures(progress, planned)}{left}", file=sys.stderr)

    def _left(self, progress: Progress, planned: int | None) -> str:
        """Format the time until the last request, by the load's duration or by the rate so far.

        The time after it is unknown: answers differ in length.
        """
        if not progress.left or (planned is not None and progress.sent >= planned):
            return ", all sent" if progress.under_way else ""
        now_ns = SystemClock.mono_ns()
        self._load_ns = self._load_ns or now_ns
        passed_s = (now_ns - self._load_ns) / NS_PER_S
        if self._load_s is not None:
            left_s = self._load_s - passed_s
        elif progress.ended and planned is not None:
            left_s = passed_s * (planned - progress.sent) / progress.sent
        else:
            return ""
        return (
            f", {left_s // 60:.0f}:{left_s % 60:02.0f} until the last request, then the last answers"
            if left_s >= 1
            else ""
        )

    def writing(self, done: int, of: int) -> None:
        pass

    def comparing(self, done: int, of: int | None) -> None:
        pass

    def stopping(self) -> None:
        """Report a request to stop. The second one cancels the responses in flight."""
        self._stops += 1
        answers = f"{self._under_way:,} answer{'' if self._under_way == 1 else 's'}"
        if self._stops == 1 and self._under_way:
            self._say(f"stopping: {answers} in flight, signal again to cancel them")
        elif self._stops == 1:
            self._say("stopping")
        elif self._stops == 2 and self._under_way:
            self._say(f"cancelling {answers}")

    def _say(self, words: str) -> None:
        print(f"llmtap: {words}", file=sys.stderr, flush=True)


class LatestProgress(ReplayLines):
    """Holds the latest progress, and prints nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.progress: Progress | None = None

    def warming(self, how: str, done: int = 0, of: int | None = None, what: str = "requests") -> None:
        pass

    def sending(self, progress: Progress, planned: int | None) -> None:
        self.progress = progress


class Bars(ReplayLines):
    """One line with a bar and figures of the current step, redrawn in place."""

    def __init__(self, bar: "RichProgress") -> None:
        super().__init__()
        self._bar = bar
        self._what = ""

    def hide(self) -> None:
        """Remove the bar."""
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

    def warming(self, how: str, done: int = 0, of: int | None = None, what: str = "requests") -> None:
        if how != "none":
            what = "warming up" if what == "requests" else "warming up: probes"
            self._show(what, done, of, WARM_UP_AUTO if how == "auto" else "")

    def sending(self, progress: Progress, planned: int | None) -> None:
        self._under_way = progress.under_way
        said = figures(progress, None) + self._left(progress, planned)
        self._show("sending", progress.ended, planned, said)

    def writing(self, done: int, of: int) -> None:
        self._show("writing", done, of)

    def comparing(self, done: int, of: int | None) -> None:
        self._show("reading what was captured", done, of)

    def _say(self, words: str) -> None:
        self._bar.console.print(f"llmtap: {words}", markup=False, highlight=False)


def _warmed(done: int, of: int, what: str) -> str:
    return f"{done:,} of {'at most ' * (what == 'probes')}{of:,} {what}"


def figures(p: Progress, planned: int | None) -> str:
    """Return a line with the figures of the progress."""
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
    """Context of the terminal's line for `Bars`."""
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
def watching_replay() -> Iterator[ReplayLines]:
    """Report progress as a bar on a terminal, otherwise as log lines."""
    if not sys.stderr.isatty():
        yield ReplayLines()
        return
    with painted() as bar:
        yield Bars(bar)


_TELLING: Final = b"llmtap: the load has ended; signal again to stop before the report is written\n"
_STDERR: Final = 2


class Answering:
    """Handler of signals during a replay, until its report is written (`Heard.instead`)."""

    def __init__(self, one: Replay, audience: ReplayLines, loop: asyncio.AbstractEventLoop) -> None:
        self._one = one
        self._audience = audience
        self._loop = loop
        self._told = False

    def __call__(self) -> bool:
        """Handle a signal. False: interrupt the replay where it is."""
        stage = self._one.stage
        match stage:
            case ReplayStage.PREPARING:
                return False
            case ReplayStage.SENDING:
                if self._loop.is_closed():
                    return False  # it failed
                self._loop.call_soon_threadsafe(self._stop)
                return True
            case ReplayStage.TELLING:
                again, self._told = self._told, True
                if not again:
                    # Not by print, which may be what was interrupted.
                    os.write(_STDERR, _TELLING)
                return not again
        assert_never(stage)

    def _stop(self) -> None:
        self._audience.stopping()
        self._one.stop()


_MEASURED_BEFORE: Final = "measured before"


class BenchLines(ReplayLines):
    """Lines on standard error, for a log."""

    def __init__(self) -> None:
        super().__init__()
        self._began_ns = SystemClock.mono_ns()

    def step(self, name: str, said: str, seconds: float | None = None) -> None:
        self._load_ns, self._load_s = 0, seconds
        print(f"llmtap: {self._passed()} {name}: {said}", file=sys.stderr, flush=True)

    def left(self, said: str) -> None:
        if said:
            print(f"llmtap: {self._passed()} to do: {said}", file=sys.stderr, flush=True)

    def _passed(self) -> str:
        """Return the minutes and seconds since the start."""
        seconds = (SystemClock.mono_ns() - self._began_ns) // NS_PER_S
        return f"[{seconds // 60:02d}:{seconds % 60:02d}]"


class _BenchBars(Bars, BenchLines):
    """Scrolling lines for finished loads, above one line that is redrawn in place."""

    def step(self, name: str, said: str, seconds: float | None = None) -> None:
        self._load_ns, self._load_s = 0, seconds
        self._print(f"{name}: {said}", "dim" if said.startswith(_MEASURED_BEFORE) else "none")
        self.hide()

    def left(self, said: str) -> None:
        if said:
            self._print(f"to do: {said}", "dim")

    def _print(self, line: str, style: str) -> None:
        self._bar.console.print(f"{self._passed()} {line}", style=style, markup=False, highlight=False)

    def _say(self, words: str) -> None:
        self._print(words, "none")


@contextmanager
def watching_bench() -> Iterator[BenchLines]:
    """Report progress as a bar on a terminal, otherwise as log lines."""
    if not sys.stderr.isatty():
        yield BenchLines()
        return
    with painted() as bar:
        yield _BenchBars(bar)
