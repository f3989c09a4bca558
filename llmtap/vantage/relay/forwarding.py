"""Run the forwarding thread of a relay: collect its frames, and continue the bodies that it returns.

After `HAND_OVER_READS` reads of a body, the thread (native/forwarder.c) reads and writes both sockets, until
the body ends or an event needs the event loop. See "The forwarding thread" in ARCHITECTURE.md.
"""

import asyncio
from typing import Any, Final

from llmtap import native
from llmtap.channel import Tap
from llmtap.net.stream import Timebase

HAND_OVER_READS: Final = 8
"""Number of reads of a body that the event loop forwards before it lends the body to the thread."""


class ForwardingThread:
    """Owner of the forwarding thread: it handles the thread's signals in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tap: Tap, timebase: Timebase) -> None:
        assert native.compiled is not None
        self._loop = loop
        self._tap = tap
        self._timebase = timebase
        self.forwarder: Any = native.compiled.Forwarder(timebase.lag, HAND_OVER_READS)
        self._fd: int = self.forwarder.fileno()
        """Descriptor that is readable when the thread has events."""
        self.forwarder.set_clock(timebase.offset_ns, timebase.since_ns)
        timebase.on_sample = self.forwarder.set_clock
        tap.source = self.forwarder
        tap.collect()  # this also sends the thread the maximum size of its frames
        loop.add_reader(self._fd, self._on_signal)

    def _on_signal(self) -> None:
        """Take back the connections that the thread has returned, and collect its frames."""
        loans = self.forwarder.take_returned()
        self._tap.collect()
        for loan in loans:
            try:
                loan.deliver()
            except Exception as exc:
                # Only report the error, as asyncio does for a failed callback, so that the other bodies are
                # still delivered.
                message = "the event loop could not continue a body that the forwarding thread returned"
                self._loop.call_exception_handler({"message": message, "exception": exc})

    def close(self) -> None:
        """Take all bodies back from the thread, and end it."""
        self._loop.remove_reader(self._fd)
        self.forwarder.close()
        self._timebase.on_sample = None
        self._tap.collect()
        self._tap.source = None
