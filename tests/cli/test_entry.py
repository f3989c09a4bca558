"""Ctrl-C before a command has begun: the process ends with 130 and says nothing, not even where it was."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys

when, *sys.argv[1:] = sys.argv[1:]

class CtrlC:
    "It comes while that module is looked for: in the middle of whatever reads it."
    def find_spec(self, name, path=None, target=None):
        if name == when:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
from llmtap.cli.entry import main
main()
"""
REPLAY = ("replay", "conversation", "--rate", "4", "--target", "http://127.0.0.1:9")


def interrupted(when: str, *args: str, ignoring: bool = False) -> "subprocess.CompletedProcess[str]":
    """A command that gets a SIGINT as it reads that module; who starts it may have it ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignoring else signal.default_int_handler)
    try:
        command = [sys.executable, "-P", "-c", SCRIPT, when, *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=280)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("when", ["llmtap.cli.main", "typer", "llmtap.cli.tap", "llmtap.cli.bench_exo"])
def test_while_the_command_line_is_read(when: str) -> None:
    done = interrupted(when, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("when", "args"),
    [
        ("llmtap.load.replay.perform", REPLAY),
        ("llmtap.load.replay.plan", REPLAY),
        ("llmtap.capture.read.describe", ("report", "nowhere")),
        ("llmtap.config", ("proxy", "--check")),
        ("llmtap.sim.server.server", ("sim", "serve", "--listen", "127.0.0.1:0")),
        ("llmtap.bench.run.test", ("bench", "list")),
        (
            "llmtap.bench.exo.mode",
            ("bench", "exo", "--target", "http://127.0.0.1:9", "--pp", "9", "--tg", "9"),
        ),
    ],
)
def test_while_a_command_reads_what_it_needs(when: str, args: tuple[str, ...]) -> None:
    done = interrupted(when, *args)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_who_was_started_deaf_stays_deaf() -> None:
    done = interrupted("typer", "--version", ignoring=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("llmtap ")
