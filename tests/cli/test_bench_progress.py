"""On a terminal one thing at a time is under way, under lines that stay; in a log there are lines alone."""

import io
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress as RichProgress
from rich.progress import TextColumn

from llmtap.cli import bench_progress
from llmtap.cli.bench_progress import BenchLines, watching
from llmtap.cli.replay_progress import Bars
from llmtap.load.workers.worker_handle import Progress


def progress(under_way: int, ended: int = 5) -> Progress:
    return Progress(9, under_way, ended, 0, 5, 0, None, None, None, None, None)


def bar() -> tuple[RichProgress, io.StringIO]:
    out = io.StringIO()
    return RichProgress(TextColumn("{task.description}"), console=Console(file=out, width=100)), out


def shown(of: RichProgress) -> list[tuple[str, float, float | None]]:
    return [(task.description, task.completed, task.total) for task in of.tasks if task.visible]


def test_one_thing_is_under_way_at_a_time() -> None:
    place, _ = bar()
    bars = Bars(place)
    bars.preparing(3, 9)
    assert shown(place) == [("preparing prompts", 3, 9)]
    bars.warming("none")
    assert shown(place) == [("preparing prompts", 3, 9)]
    bars.warming("auto")
    assert shown(place) == [("warming up", 0, None)]
    bars.sending(progress(4), 14)
    assert shown(place) == [("sending", 5, 14)]
    # The next load begins where this one did.
    bars.preparing(1, 4)
    assert shown(place) == [("preparing prompts", 1, 4)]
    bars.hide()
    assert shown(place) == []


def test_steps_and_what_is_left_stay_above_it() -> None:
    place, out = bar()
    watcher: Any = bench_progress._BenchBars(place)
    watcher.step("load", "8 at a time, 12 requests")
    watcher.sending(progress(2), 12)
    watcher.stopping()
    watcher.left("")
    watcher.left("2 of 4 levels")
    watcher.step("other", "measured before")
    assert shown(place) == []
    lines = [line.partition(" ")[2] for line in out.getvalue().splitlines()]
    assert lines == [
        "load: 8 at a time, 12 requests", "stopping: 2 answers under way, again to cut them",
        "left: 2 of 4 levels", "other: measured before",
    ]  # fmt: skip


def test_a_log_has_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with watching() as watcher:  # pytest's stderr is no terminal
        assert type(watcher) is BenchLines
        watcher.step("load", "8 at a time")
        watcher.left("")
        watcher.left("then 2 more")
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 2)[2] for line in said] == ["load: 8 at a time", "left: then 2 more"]
