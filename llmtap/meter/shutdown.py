"""Shutdown of the meter process: waits for its relays, so that exchanges under way are still measured.

| event | meaning | the meter waits for its relays |
|---|---|---|
| SIGTERM | the proxy ends; an init system can signal the whole group at once | `drain_s` and a grace |
| HANDOVER_LINE on stdin | another meter takes over; the relays of this one drain | the same |
| SIGTERM again | end now | no |
| stdin ends | the supervisor died: relays drain, and nobody else would stop us | the same, 24 s at most |

SETTINGS_LINE on stdin ends nothing: it carries the changed settings of a reload. CAPTURE_END_LINE precedes
HANDOVER_LINE if the other meter does not continue the capture of this one.

A meter that was started by hand has no supervisor: its stdin is ignored, and Ctrl-C and a hang-up act as
SIGTERM. No meter waits for apps with the middleware.

After HANDOVER_LINE the exchanges of the draining relays are still measured and captured here, but the other
meter answers all requests; `state.py` sends it their figures.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

import msgspec

from llmtap.meter.pipeline.receiver import Receiver
from llmtap.meter.setup import CAPTURE_END_LINE, HANDOVER_LINE, SETTINGS_LINE, Changeable

LINE_BYTES: Final = 4_096
GRACE_S: Final = 5.0
"""Time that the meter waits after the relays' own time limit (`drain_s`), for their last batches."""
ORPHAN_S: Final = 24.0
"""Time limit after the supervisor's death: relays end within 22 s, and the last files take 4 s more. An init
system allows 30 s."""

log = logging.getLogger(__name__)


class ShutdownListener:
    """Listener for the signals and lines on stdin that end the process or change its settings.

    Args:
        drain_s: time for relays to finish their streams.
        change: called with the settings that a reload has changed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        drain_s: float,
        change: Callable[[Changeable], None],
        *,
        supervised: bool = True,
    ) -> None:
        self._loop = loop
        self._apply_settings = change
        """Function that applies changed settings."""
        self._unread_bytes = b""
        """Start of a line on stdin whose end has not arrived."""
        self._limit_s = drain_s + GRACE_S
        """Time after which the meter ends although relays are still connected."""
        self._end_event = asyncio.Event()
        """Set when the meter is to end after its relays."""
        self._is_terminating = False
        """Whether a signal has come: a second one ends the meter at once."""
        self._end_now_event = asyncio.Event()
        """Set when the meter must end at once."""
        self.is_orphaned = False
        """Whether the supervisor has ended, so that no other process will end this meter."""
        self.successor: str | None = None
        """State folder of the meter that replaces this one; None: no meter does."""
        self.ends_capture = False
        """Whether the meter that replaces this one has another capture, so that this capture ends."""
        loop.add_signal_handler(signal.SIGTERM, self._on_term)
        # Ctrl-C and a hang-up of the terminal reach the whole process group. If there is a supervisor, ignore
        # them here: the supervisor decides when this process ends.
        for number in (signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, (lambda: None) if supervised else self._on_term)
        if supervised:
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                loop.add_signal_handler(number, lambda: None)
            loop.add_reader(sys.stdin.fileno(), self._on_stdin)

    async def wait(self) -> None:
        """Wait for the first event that ends the process."""
        await self._end_event.wait()

    async def wait_for_relays(self, receiver: Receiver) -> None:
        """Wait until all relays have disconnected, or the time limit is reached."""
        self._loop.call_later(self._limit_s, self._end_now_event.set)
        left = self._loop.create_task(receiver.wait_for_relays())
        enough = self._loop.create_task(self._end_now_event.wait())
        await asyncio.wait((left, enough), return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        enough.cancel()

    def _on_term(self) -> None:
        if self._is_terminating:
            self._end_now_event.set()
        self._is_terminating = True
        self._end_event.set()

    def _on_stdin(self) -> None:
        data = os.read(sys.stdin.fileno(), LINE_BYTES)
        if not data:
            self._on_orphaned()
        *lines, self._unread_bytes = (self._unread_bytes + data).split(b"\n")
        for line in lines:
            self._on_line(line)

    def _on_line(self, line: bytes) -> None:
        if line.startswith(HANDOVER_LINE):
            self.successor = os.fsdecode(line.removeprefix(HANDOVER_LINE))
            log.info("event=meter_replaced state=%s", self.successor)
            self._end_event.set()
        elif line == CAPTURE_END_LINE:
            self.ends_capture = True
        elif line.startswith(SETTINGS_LINE):
            new = msgspec.json.decode(line.removeprefix(SETTINGS_LINE), type=Changeable)
            # Keep the longer time limit, because relays that are already draining keep their earlier limit.
            self._limit_s = max(self._limit_s, new.drain_s + GRACE_S)
            self._apply_settings(new)
            log.info("event=meter_changed config=%s", new.config)

    def _on_orphaned(self) -> None:
        self._loop.remove_reader(sys.stdin.fileno())
        log.error(
            "event=supervisor_lost child=meter hint='the meter ends after its relays: start llmtap again'"
        )
        self.is_orphaned = self._is_terminating = True
        self._loop.call_later(min(self._limit_s, ORPHAN_S), self._end_now_event.set)
        self._end_event.set()
