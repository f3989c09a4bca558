"""The relay's wish for short slices of CPU time: a wish, never a condition."""

import os
import platform
import subprocess
import sys

import pytest

from llmtap.relay import urgency

LOOK = """
import os
from llmtap.relay.urgency import ask_for_short_slices
os.nice(3)
done = ask_for_short_slices()
print(done, os.sched_getscheduler(0) == os.SCHED_OTHER, os.getpriority(os.PRIO_PROCESS, 0))
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no number for the system call")
def test_the_wish_changes_neither_policy_nor_niceness() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", str(os.getpriority(os.PRIO_PROCESS, 0) + 3)]


def test_an_unknown_machine_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "abacus")
    assert urgency.ask_for_short_slices() is False


def test_who_was_given_another_policy_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_BATCH)
    assert urgency.ask_for_short_slices() is False
