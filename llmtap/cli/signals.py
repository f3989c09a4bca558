"""Ctrl-C and SIGTERM alike: an exception in the main thread, so that all is put away before the end."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

__all__ = ["Heard", "Stopped", "stoppable"]

_EXIT: Final = 128
"""What a shell adds to a signal's number."""


class Stopped(KeyboardInterrupt):
    """A signal came."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = _EXIT + number
        """What the process is to end with."""


class Heard:
    """What came until now, and what is done instead of raising Stopped."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.instead: Callable[[], bool] | None = None
        """Called by the handler of a signal, between any two steps of the main thread; False: raise."""

    @property
    def code(self) -> int | None:
        """What the process is to end with, by the first signal; None where none came."""
        return _EXIT + self.numbers[0] if self.numbers else None


@contextmanager
def stoppable() -> Iterator[Heard]:
    """Raises Stopped where a signal comes inside, unless `instead` of what it gives sees to it. Once that was
    raised others do nothing: the process is on its way out, and what it puts away takes a second."""
    before: dict[int, Any] = {}
    heard = Heard()
    raised = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        heard.numbers.append(number)
        if heard.instead is not None and heard.instead():
            return
        raised = True
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(heard.numbers[0])

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            # Who was started with one ignored (nohup, a shell's background) goes on ignoring it.
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, stop)
    try:
        yield heard
    except KeyboardInterrupt:
        # Some libraries raise their own where a handler raised ours.
        raise Stopped(heard.numbers[0] if heard.numbers else signal.SIGINT) from None
    finally:
        if not raised:
            for each, handler in before.items():
                signal.signal(each, handler)
