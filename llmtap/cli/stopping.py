"""Ctrl-C and SIGTERM alike: an exception in the main thread, so that all is put away before the end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

__all__ = ["Stopped", "stoppable"]

_EXIT: Final = 128
"""What a shell adds to a signal's number."""


class Stopped(KeyboardInterrupt):
    """A signal came."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = _EXIT + number
        """What the process is to end with."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Raises Stopped where a signal comes inside. From then on others do nothing: the process is on its way
    out, and what it puts away takes a second."""
    before: dict[int, Any] = {}
    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(number)
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            # Who was started with one ignored (nohup, a shell's background) goes on ignoring it.
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, stop)
    try:
        yield
    except KeyboardInterrupt:
        # Some libraries raise their own where a handler raised ours.
        raise Stopped(came[0] if came else signal.SIGINT) from None
    finally:
        if not came:
            for each, handler in before.items():
                signal.signal(each, handler)
