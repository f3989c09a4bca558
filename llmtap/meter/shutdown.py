"""Shutdown of the meter process: waits for its relays, so that exchanges under way are still measured.

| event | meaning | the meter waits for its relays |
|---|---|---|
| SIGTERM | the proxy ends; an init system may signal the whole group at once | `drain_s` and a grace |
| HANDOVER_LINE on stdin | another meter takes over; the relays of this one drain | the same |
| SIGTERM again, SIGUSR1 | end now; with SIGUSR1 another meter follows and the relays stay | no |
| stdin ends | the supervisor died: relays drain, and nobody else would stop us | the same, 24 s at most |

SETTINGS_LINE on stdin ends nothing: it carries the changed settings of a reload.

A meter that was started by hand has no supervisor: its stdin is ignored, Ctrl-C and a hang-up are SIGTERM.
Apps with the middleware are not waited for.

After HANDOVER_LINE the exchanges of the draining relays are still measured and captured here, but the other
meter answers all requests. So hello and status of each of our relays are sent to it, twice a second and once
at the end, marked as measured elsewhere (`Successor`).
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

import msgspec

from llmtap.channel.frames import ACK, FrameKind, Hello, pack_batch
from llmtap.channel.status import RelayStatus
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.meter.pipeline.receiver import Receiver
from llmtap.meter.setup import HANDOVER_LINE, RENEW, SETTINGS_LINE, Changeable

LINE_BYTES: Final = 4_096
GRACE_S: Final = 5.0
"""Time that the meter waits for the last batches of the relays after their own time limit."""
ORPHAN_S: Final = 24.0
"""Time limit after the supervisor's death: relays end within 22 s, and the last files take 4 s more. An init
system allows 30 s."""

log = logging.getLogger(__name__)


class ShutdownListener:
    """Listener for the signals and lines on stdin that end the process or change its settings.

    Args:
        drain_s: time for relays to finish streams.
        change: called with changed settings.
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
        self._change = change
        self._unread_bytes = b""
        self._limit_s = drain_s + GRACE_S
        self._end_event = asyncio.Event()
        self._terminating = False
        self._now = asyncio.Event()
        self.orphaned = False
        self.successor: str | None = None
        loop.add_signal_handler(signal.SIGTERM, self._on_term)
        loop.add_signal_handler(RENEW, self._on_renewal)
        # A terminal's Ctrl-C and hang-up reach the whole group; if there is a supervisor, it decides.
        for number in (signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, (lambda: None) if supervised else self._on_term)
        if supervised:
            loop.add_signal_handler(signal.SIGUSR2, lambda: None)
            loop.add_reader(sys.stdin.fileno(), self._on_stdin)

    async def wait(self) -> None:
        """Wait for the first event that ends the process."""
        await self._end_event.wait()

    async def wait_for_relays(self, receiver: Receiver) -> None:
        """Wait until all relays have disconnected, or the time limit is reached."""
        self._loop.call_later(self._limit_s, self._now.set)
        left = self._loop.create_task(receiver.wait_for_relays())
        enough = self._loop.create_task(self._now.wait())
        await asyncio.wait((left, enough), return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        enough.cancel()

    def _on_term(self) -> None:
        if self._terminating:
            self._now.set()
        self._terminating = True
        self._end_event.set()

    def _on_renewal(self) -> None:
        self._now.set()
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
            log.info("event=meter_succeeded socket=%s", self.successor)
            self._end_event.set()
        elif line.startswith(SETTINGS_LINE):
            new = msgspec.json.decode(line.removeprefix(SETTINGS_LINE), type=Changeable)
            # Relays that are draining keep their earlier time limit, which may be the longer one.
            self._limit_s = max(self._limit_s, new.drain_s + GRACE_S)
            self._change(new)
            log.info("event=meter_changed config=%s", new.config)

    def _on_orphaned(self) -> None:
        self._loop.remove_reader(sys.stdin.fileno())
        log.error("event=supervisor_lost child=meter")
        self.orphaned = self._terminating = True
        self._loop.call_later(min(self._limit_s, ORPHAN_S), self._now.set)
        self._end_event.set()


REPORT_S: Final = 0.5
ANSWER_S: Final = 2.0
"""Time limit of an answer. A meter that has just started answers in milliseconds, or in a second if all
streams begin at once."""

_json = msgspec.json.Encoder()


class Successor:
    """Sends hello and status of this meter's relays to the meter that takes over, until their end."""

    def __init__(self, path: str, pipeline: ExchangePipeline) -> None:
        self._pipeline = pipeline
        self._lines = {name: _SuccessorConnection(path) for name in pipeline.relays.connected()}
        self._ended_event = asyncio.Event()
        self._reports: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._reports = asyncio.get_running_loop().create_task(self._report_until_over())

    async def finish(self) -> None:
        self._ended_event.set()
        if self._reports is not None:
            await self._reports
        await self._report()
        for line in self._lines.values():
            line.close()

    async def _report_until_over(self) -> None:
        while not self._ended_event.is_set():
            await self._report()
            try:
                await asyncio.wait_for(self._ended_event.wait(), REPORT_S)
            except TimeoutError:
                pass

    async def _report(self) -> None:
        word = self._pipeline.experiments.latest_switch
        for hello, status, more in list(self._pipeline.relays.accounts(self._lines)):
            marked = msgspec.structs.replace(hello, elsewhere=True, switch=word or hello.switch)
            line = self._lines[hello.relay]
            if await line.report(marked, status) and not more:
                line.close()
                del self._lines[hello.relay]


class _SuccessorConnection:
    def __init__(self, path: str) -> None:
        self._path = path
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._batch_no = 0
        self._is_acknowledged = False
        self._is_closed_for_good = False

    async def report(self, hello: Hello, status: RelayStatus) -> bool:
        """Send a relay's hello and status. Return whether the other meter processed them.

        If the other meter cannot be reached, the next report includes these counts.
        """
        while not self._is_closed_for_good:
            known = self._is_acknowledged
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._send(hello, status)
                return True
            except TimeoutError:
                self.close()
                return False
            except (OSError, EOFError):
                # A peer that hangs up without an answer cannot read these frames: stop sending.
                self._is_closed_for_good = self._streams is not None and not self._is_acknowledged
                self.close()
                if not known:
                    return False
            self._is_acknowledged = False  # that meter has gone; another one may listen now
        return False

    async def _send(self, hello: Hello, status: RelayStatus) -> None:
        rows: list[object] = [FrameKind.STATUS, 0, status.t_ns, 0, _json.encode(status)]
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(self._path)
            rows = [FrameKind.HELLO, 0, 0, 0, _json.encode(hello), *rows]
        reader, writer = self._streams
        self._batch_no += 1
        writer.write(pack_batch(self._batch_no, rows))
        await writer.drain()
        # Skip the control words of an experiment, which are for relays.
        while ACK.unpack(await reader.readexactly(ACK.size)) != (self._batch_no,):
            pass
        self._is_acknowledged = True

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
