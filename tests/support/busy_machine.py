"""Tests that compare what a real server did, in real time, with what was planted in it.

Their bounds hold on a machine that gives processes the CPU when they want it. Where it did not, which the
kernel says (Documentation/accounting/psi.rst), a figure beyond its bound says nothing, and the test is made
again.
"""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["BUSY_SHARE", "measures", "waited_s"]

TIMES = 3
BUSY_SHARE = 0.1
"""Of the time, somebody waited for a CPU."""
LIMIT_S = 900
_PRESSURE = Path("/proc/pressure/cpu")


def measures(test: Callable[..., None]) -> Callable[..., None]:
    """A test that measures: made up to three times, where the machine was busy."""

    @functools.wraps(test)
    def wrapper(**given: Any) -> None:
        for n in range(1, TIMES + 1):
            if "tmp_path" in given:
                place = given["tmp_path"] / f"try{n}"
                place.mkdir()
            began, waited = time.monotonic(), waited_s()
            try:
                test(**(given | {"tmp_path": place} if "tmp_path" in given else given))
                return
            except AssertionError as exc:
                share = (waited_s() - waited) / (time.monotonic() - began)
                if n == TIMES or share < BUSY_SHARE:
                    raise
                print(f"try {n} failed, with somebody waiting for a CPU {share:.0%} of the time: {exc}")

    return pytest.mark.timeout(LIMIT_S)(wrapper)


def waited_s() -> float:
    """How long, since the machine began, there was a process that waited for a CPU."""
    try:
        some = _PRESSURE.read_text().splitlines()[0]
    except OSError:  # a kernel that does not count it: it may have been all the time
        return time.monotonic()
    return int(some.rpartition("total=")[2]) / 1e6
