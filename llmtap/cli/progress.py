"""Show the progress of replays and benchmarks: a bar with live figures on a terminal, else log lines.

`watching_progress` yields a listener. A command passes it to a replay or a benchmark, which calls its
methods. `LatestProgress` keeps the figures for `llmtap demo`. `ReplaySignals` handles Ctrl-C during a replay.
"""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from llmtap.cli.shared import print_message
from llmtap.clock import SystemClock
from llmtap.errors import printable
from llmtap.load.replay.perform import Replay, ReplayStage
from llmtap.load.workers.worker_handle import Progress
from llmtap.units import NS_PER_S

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

LINE_INTERVAL_NS: Final = 10 * NS_PER_S
"""Minimum time between two log lines."""
WARM_UP_AUTO: Final = "100 requests or more, 10,000 tokens or more, until latency is stable"
"""Text of the message on an automatic warm-up: how long it lasts."""


class ProgressLines:
    """Progress listener that prints lines on standard error, for a log."""

    def __init__(self) -> None:
        self._began_ns = self._printed_ns = SystemClock.mono_ns()
        """`_printed_ns`: time of the latest line, because one is printed at intervals only."""
        self._under_way = 0
        """Number of requests in flight."""
        self._stop_signals = 0
        """Number of signals to stop so far."""
        self._load_ns = 0
        """Start of the current load in monotonic ns; 0 before its first report."""
        self._load_s: float | None = None
        """Duration of the load in seconds; None if only the number of requests is known."""
        self._end_ns: int | None = None
        """Estimated end of the benchmark in monotonic ns; None while it is not known."""

    def on_reading(self, done: int, of: int | None) -> None:
        pass

    def on_preparing(self, done: int, of: int) -> None:
        pass

    def on_warming(self, how: str, done: int = 0, of: int | None = None, what: str = "requests") -> None:
        if how == "none":
            return
        if of is None:
            how = f"{WARM_UP_AUTO} (shorter: --warmup 8)" if how == "auto" else f"{how} requests"
            self._printed_ns = SystemClock.mono_ns()
            self._print(f"warming the server up: {how}")
        elif self._is_due():
            limit = "at most " * (what == "probes")
            self._print(f"warming the server up: {done:,} of {limit}{of:,} {what}")

    def on_sending(self, progress: Progress, planned: int | None) -> None:
        self._under_way = progress.under_way
        # Make this text even if nothing is printed: the first call stores the start of the load.
        remaining_text = self._remaining_text(progress, planned)
        if self._is_due() or not (progress.left or progress.under_way):
            self._print(progress_text(progress, planned) + remaining_text + self._end_text())

    def on_writing_capture(self, done: int, of: int) -> None:
        pass

    def on_comparing(self, done: int, of: int | None) -> None:
        pass

    def report_stop(self) -> None:
        """Print what a signal does: the first stops sending, the second cancels the responses in flight."""
        self._stop_signals += 1
        answers = f"{self._under_way:,} answer{'' if self._under_way == 1 else 's'}"
        if self._stop_signals == 1:
            in_flight = f": {answers} in flight, signal again to cancel them" if self._under_way else ""
            self._print(f"stopping{in_flight}")
        elif self._stop_signals == 2 and self._under_way:
            self._print(f"cancelling {answers}")

    def step(self, name: str, message: str, seconds: float | None = None) -> None:
        """Print the name of a benchmark's load and a message on it. `seconds`: duration of the load."""
        self._load_ns, self._load_s = 0, seconds
        self._print(f"{self._elapsed_text()} {name}: {message}")

    def report_remaining(self, text: str) -> None:
        """Print a text on the tests and loads that remain."""
        if text:
            self._print(f"{self._elapsed_text()} to do: {text}")

    def estimate_remaining(self, seconds: float) -> None:
        """Set the estimated time until the end of the benchmark."""
        self._end_ns = SystemClock.mono_ns() + round(seconds * NS_PER_S)

    def _end_text(self) -> str:
        """Return a text with the estimated time until the end of the benchmark; empty if it is not known."""
        if self._end_ns is None:
            return ""
        left_s = max(0, self._end_ns - SystemClock.mono_ns()) // NS_PER_S
        return f"; all tests end in about {left_s // 60}:{left_s % 60:02d}"

    def _print(self, text: str) -> None:
        print_message(text)

    def _is_due(self) -> bool:
        """Return whether the next line is due. If it is, restart the interval until the line after it."""
        now_ns = SystemClock.mono_ns()
        is_due = now_ns - self._printed_ns >= LINE_INTERVAL_NS
        if is_due:
            self._printed_ns = now_ns
        return is_due

    def _elapsed_text(self) -> str:
        """Return the minutes and seconds since the start, as `[02:05]`."""
        seconds = (SystemClock.mono_ns() - self._began_ns) // NS_PER_S
        return f"[{seconds // 60:02d}:{seconds % 60:02d}]"

    def _remaining_text(self, progress: Progress, planned: int | None) -> str:
        """Return a text with the time until the last request is sent, from the load's duration or rate.

        It does not include the time until the last answer ends, which is unknown.
        """
        if not progress.left or (planned is not None and progress.sent >= planned):
            return ", all sent" if progress.under_way else ""
        now_ns = SystemClock.mono_ns()
        self._load_ns = self._load_ns or now_ns
        passed_s = (now_ns - self._load_ns) / NS_PER_S
        left_s = 0.0
        if self._load_s is not None:
            left_s = self._load_s - passed_s
        elif progress.ended and planned is not None:
            left_s = passed_s * (planned - progress.sent) / progress.sent
        if left_s < 1:
            return ""
        return f", {left_s // 60:.0f}:{left_s % 60:02.0f} until the last request, then the last answers"


class LatestProgress(ProgressLines):
    """Progress listener that stores the latest progress and prints nothing."""

    progress: Progress | None = None

    def on_sending(self, progress: Progress, planned: int | None) -> None:
        self.progress = progress

    def _print(self, text: str) -> None:
        pass


class ProgressBar(ProgressLines):
    """Progress listener for a terminal: a bar with figures of the current step, below the printed lines."""

    def __init__(self, bar: "RichProgress") -> None:
        super().__init__()
        self._bar = bar
        self._activity = ""
        """Name of the step that the bar shows; empty: there is no bar."""

    def _show(self, activity: str, done: int, of: int | None, text: str = "") -> None:
        if activity != self._activity:
            self._hide()
            self._activity = activity
            self._bar.add_task(activity, total=of, text=text)
        self._bar.update(self._bar.task_ids[0], completed=done, total=of, text=text)

    def _hide(self) -> None:
        self._activity = ""
        for task in self._bar.task_ids:
            self._bar.remove_task(task)

    def on_reading(self, done: int, of: int | None) -> None:
        self._show("reading", done, of)

    def on_preparing(self, done: int, of: int) -> None:
        self._show("preparing prompts", done, of)

    def on_warming(self, how: str, done: int = 0, of: int | None = None, what: str = "requests") -> None:
        if how != "none":
            activity = "warming up" if what == "requests" else "warming up: probes"
            self._show(activity, done, of, WARM_UP_AUTO if how == "auto" else "")

    def on_sending(self, progress: Progress, planned: int | None) -> None:
        self._under_way = progress.under_way
        text = progress_text(progress, None) + self._remaining_text(progress, planned) + self._end_text()
        self._show("sending", progress.ended, planned, text)

    def on_writing_capture(self, done: int, of: int) -> None:
        self._show("writing", done, of)

    def on_comparing(self, done: int, of: int | None) -> None:
        self._show("reading what was captured", done, of)

    def step(self, name: str, message: str, seconds: float | None = None) -> None:
        super().step(name, message, seconds)
        self._hide()

    def _print(self, text: str) -> None:
        self._bar.console.print(f"llmtap: {printable(text)}", markup=False, highlight=False)


def progress_text(p: Progress, planned: int | None) -> str:
    """Return a line with the counts and latencies of a load so far. `planned`: number of requests to send."""
    parts = [
        f"sent {p.sent:,}" + ("" if planned is None else f" of {planned:,}"),
        f"in flight {p.under_way:,}",
    ]
    if p.failed:
        parts.append(f"failed {p.failed:,}")
    if p.ttft_p50_ns is not None and p.ttft_p99_ns is not None:
        parts.append(f"TTFT {p.ttft_p50_ns / 1e6:,.0f} / {p.ttft_p99_ns / 1e6:,.0f} ms")
    if p.tbc_p50_ns is not None and p.tbc_p99_ns is not None:
        parts.append(f"TBC {p.tbc_p50_ns / 1e6:,.1f} / {p.tbc_p99_ns / 1e6:,.1f} ms")
    if p.lateness_p99_ns is not None:
        parts.append(f"late p99 {p.lateness_p99_ns / 1e6:,.2f} ms")
    return ", ".join(parts)


@contextmanager
def watching_progress() -> Iterator[ProgressLines]:
    """Yield a listener that shows progress: as a bar on a terminal, otherwise as log lines."""
    if not sys.stderr.isatty():
        yield ProgressLines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    with RichProgress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as bar:
        yield ProgressBar(bar)


class ReplaySignals:
    """Handler of signals (see `ReceivedSignals.handler`) from the start of a replay until it is reported."""

    def __init__(self, replay: Replay, listener: ProgressLines, loop: asyncio.AbstractEventLoop) -> None:
        self._replay = replay
        self._listener = listener
        self._loop = loop
        self._has_warned = False
        """Whether the user was warned that the next signal discards the report."""

    def __call__(self) -> bool:
        """Handle a signal. Return False if the caller must interrupt the replay at once."""
        match self._replay.stage:
            # A closed event loop cannot run `_stop`: the replay has failed, so the caller must end it.
            case ReplayStage.SENDING if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._stop)
                return True
            case ReplayStage.REPORTING if not self._has_warned:
                self._has_warned = True
                message = b"llmtap: the load has ended; signal again to stop before the report is written\n"
                os.write(2, message)  # Not print(): it cannot be used while the signal interrupts a print().
                return True
        return False

    def _stop(self) -> None:
        self._listener.report_stop()
        self._replay.stop()
