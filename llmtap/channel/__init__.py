r"""Send a vantage's frames to the meter over a local socket without blocking, and count what was measured.

`Tap` is the sender of a relay, a watcher or an application with the middleware; `Ledger` counts. `frames.py`
has the format, `experiment.py` the assignment to arms. The receiver is `meter/pipeline/receiver.py`. Frames
are sent as one batch after FLUSH_S, or as soon as the batch has FLUSH_BYTES. When the channel is half full,
new exchanges are dropped. When it is full, a running exchange that adds a frame is dropped, too. An exchange
is always dropped as a whole, and counted. Every exchange has a number, and is in exactly one of these states:

    open -> closed, waiting for the meter's acknowledgement -> measured
      \____________________\____> dropped, for one reason

so that `opened = measured + dropped + unsettled` is true at any moment; `unsettled` counts the first two
states. Exchanges that were running when their relay died are counted by `Reckoning` in `meter/relays.py`.
"""

import asyncio
import logging
import os
import socket
import stat
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from llmtap.channel.frames import (
    ACK,
    CONTROL,
    Closing,
    Frame,
    FrameKind,
    Hello,
    PythonFrameRows,
    make_frame_rows,
)
from llmtap.channel.status import RelayStatus

FLUSH_S: Final = 0.01
"""Time that frames wait for a batch under load. With more time, each batch would block the event loop for
longer; with less time, batches would use more CPU."""
FLUSH_CALM_S: Final = 0.05
"""Time that frames wait under low load: while a batch has fewer than FRAMES_CALM frames for each FLUSH_S."""
FRAMES_CALM: Final = 16
FLUSH_BYTES: Final = 128 << 10
RECONNECT_S: Final = 0.1
SOCKET_PATH_BYTES_MAX: Final = 107
"""Maximum length of a socket's path: sun_path has 108 bytes, one of them for the final zero byte
(unix(7))."""


class Ledger:
    """Numbers the exchanges of a vantage, and counts them by state (see the docstring of the module)."""

    __slots__ = ("_closed_by_batch", "dropped", "live", "measured", "opened")

    def __init__(self) -> None:
        self.opened = 0
        """Number of exchanges so far; the latest one has this number."""
        self.measured = 0
        """Number of exchanges all of whose frames the meter has."""
        self.dropped: dict[str, int] = {}  # number of dropped exchanges by reason
        self.live: set[int] = set()
        """Numbers (seq) of the running exchanges whose frames are sent to the meter."""
        self._closed_by_batch: dict[int, int] = {}  # number of ended exchanges by the batch of their end

    @property
    def unsettled(self) -> int:
        """Number of exchanges that run or wait for the meter's acknowledgement."""
        return len(self.live) + sum(self._closed_by_batch.values())

    def counts(self) -> dict[str, Any]:
        """Return the counts as fields of RelayStatus."""
        return {
            "opened": self.opened,
            "measured": self.measured,
            "dropped": dict(self.dropped),
            "unsettled": self.unsettled,
        }

    def open(self) -> int:
        """Return the number of a new exchange. The caller must then call `begin` or `drop` for it."""
        self.opened += 1
        return self.opened

    def begin(self, seq: int) -> None:
        """Note that the exchange's frames are sent to the meter from now on."""
        self.live.add(seq)

    def close(self, seq: int, batch_no: int) -> None:
        """Note that the last frame of the exchange is in batch `batch_no`."""
        self.live.discard(seq)
        self._closed_by_batch[batch_no] = self._closed_by_batch.get(batch_no, 0) + 1

    def drop(self, seq: int, reason: str) -> None:
        """Count the exchange as dropped for this reason, so that it is not measured."""
        self.live.discard(seq)
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def acknowledge(self, batch_no: int) -> None:
        """Count the exchanges whose last frames are in batches up to this number as measured."""
        for number in [n for n in self._closed_by_batch if n <= batch_no]:
            self.measured += self._closed_by_batch.pop(number)

    def lose_meter(self) -> None:
        """Drop all running exchanges, and all exchanges that the meter has not acknowledged."""
        lost = self.unsettled
        self.live.clear()
        self._closed_by_batch.clear()
        if lost:
            self.dropped["meter_lost"] = self.dropped.get("meter_lost", 0) + lost


def is_socket_replaceable(path: str) -> bool:
    """Return whether other users can write to a socket's directory, and so replace the socket by their own.

    In a directory with the sticky bit, such as /tmp, they cannot replace it.
    """
    try:
        mode = os.stat(os.path.dirname(path) or ".").st_mode
    except OSError:
        return False
    return bool(mode & 0o022) and not mode & stat.S_ISVTX


log = logging.getLogger(__name__)
_json = msgspec.json.Encoder()


class FrameSource(Protocol):
    """Another thread that makes frames of measured exchanges.

    `size`: memory of the frames that wait in this thread, counted as in FrameRows.
    """

    @property
    def size(self) -> int: ...
    def set_room(self, size: int, /) -> None:
        """Set the maximum `size` of the waiting frames. Above it, the thread drops exchanges."""

    def collect(self, rows: PythonFrameRows, /) -> list[int]:
        """Move the frames to `rows`. Return the numbers of the exchanges that the thread dropped."""
        ...

    def forget(self) -> None:
        """Drop the waiting frames, and stop measuring the exchanges that the thread forwards."""


class Tap:
    """Sender of the frames of one vantage to the meter.

    Args:
        path: path of the meter's socket.
        bytes_max: maximum memory of all frames that the meter has not acknowledged.
        hello: returns the first frame of each connection.
        on_word: called with control words from the meter.
        news: called before each batch; if it returns a frame, the frame is sent first.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        path: str,
        bytes_max: int,
        hello: Callable[[], Hello],
        on_word: Callable[[int], None] | None = None,
        news: Callable[[], Frame | None] | None = None,
    ) -> None:
        self._loop = loop
        self._path = path
        self._bytes_max = bytes_max
        self._make_hello = hello
        """Returns the first frame of a connection."""
        self._on_word = on_word
        """Function that is called with each control word of the meter."""
        self._news = news
        """Returns facts for the next batch, such as a clock that was set; None: there are none."""
        self.ledger = Ledger()
        self._sock: socket.socket | None = None
        self.rows = make_frame_rows()
        """Frames for the next batch. The timer that sends the batch runs while `rows` is not empty."""
        self.source: FrameSource | None = None
        """Thread that forwards streams; its frames are collected before each batch. None: no such thread."""
        self._batch_no = 0
        """Number of the latest batch."""
        self._unsent: deque[memoryview] = deque()
        """Batches that the socket has not taken."""
        self._in_flight: deque[tuple[int, int]] = deque()  # (batch number, bytes) not yet acknowledged
        self._outstanding_bytes = 0  # bytes of batches that are not sent or not acknowledged
        self._ack_part = b""  # first bytes of an acknowledgement whose rest has not arrived
        self._timer: asyncio.TimerHandle | None = None
        self._flush_s = FLUSH_CALM_S
        """Time for which frames are collected into one batch."""
        self._is_writing = False
        """Whether the loop watches until the socket takes more bytes."""
        self._is_closed = False
        self._all_settled = asyncio.Event()
        """Set when the meter has acknowledged all batches, or the connection has ended."""

    @property
    def pending_bytes(self) -> int:
        waiting = 0 if self.source is None else self.source.size
        return self.rows.size + waiting + self._outstanding_bytes

    @property
    def connected(self) -> bool:
        """Whether there is a connection to the meter."""
        return self._sock is not None

    def open(
        self, t_ns: int, data: bytes, extra_ns: int = 0, kind: int = FrameKind.OPEN, arm: bytes | None = None
    ) -> tuple[int, bool]:
        """Number a new exchange. Return the number, and whether the exchange will be measured.

        `kind`: OPEN or SENT; `arm`: data of an ARM frame, which follows; None: no ARM frame.
        """
        ledger = self.ledger
        seq = ledger.open()
        if self._sock is None:
            ledger.drop(seq, "no_meter")
            return seq, False
        # New exchanges can use half of the memory. The rest is for running ones, so that fewer are dropped.
        if self.rows.size + self._outstanding_bytes > self._bytes_max // 2:
            ledger.drop(seq, "overflow")
            return seq, False
        ledger.begin(seq)
        self._append(kind, seq, t_ns, extra_ns, data)
        if arm is not None:
            self._append(FrameKind.ARM, seq, t_ns, 0, arm)
        return seq, True

    def offer(self, kind: int, seq: int, t_ns: int, extra_ns: int, data: bytes = b"") -> bool:
        """Add a frame. Return False if the exchange is not measured any more, so that no more are needed."""
        if seq not in self.ledger.live:
            return False
        rows = self.rows
        if rows.add(kind, seq, t_ns, extra_ns, data):
            return True
        if rows.size + self._outstanding_bytes > self._bytes_max:
            self.drop(seq, t_ns, "overflow")
            return False
        self._append(kind, seq, t_ns, extra_ns, data)
        if rows.size > FLUSH_BYTES:
            self._flush()
        return True

    def close_exchange(self, seq: int, t_ns: int, closing: Closing) -> None:
        """Add the last frame of an exchange."""
        offered = self.offer(FrameKind.CLOSE, seq, t_ns, 0, _json.encode(closing))
        # The offer has possibly sent a batch and found that the meter is gone, so check the ledger again.
        if offered and seq in self.ledger.live:
            self.ledger.close(seq, self._batch_no + 1 if self.rows else self._batch_no)

    def drop(self, seq: int, t_ns: int, reason: str) -> None:
        """Drop a running exchange. Does nothing if it has ended or was already dropped."""
        if seq in self.ledger.live:
            self.ledger.drop(seq, reason)
            self.rows.epoch += 1
            # Add this small frame even if the channel is full: it makes the meter release the exchange.
            self._append(FrameKind.DROP, seq, t_ns, 0, b"")

    def collect(self) -> None:
        """Move the frames of the forwarding thread to `rows` now, so that they precede frames that are added
        later."""
        if not self._take_from_source():
            return
        if self.rows.size > FLUSH_BYTES:
            self._flush()
        else:
            self._start_timer()

    def _take_from_source(self) -> bool:
        """Move the frames of the source to `rows`. Return whether there were any."""
        if self.source is None:
            return False
        before = len(self.rows)
        for seq in self.source.collect(self.rows):
            if seq in self.ledger.live:
                self.ledger.drop(seq, "overflow")
        self._set_bounds()
        return len(self.rows) > before

    def status(self, status: RelayStatus) -> None:
        """Send a status, unless the channel is full."""
        if self._sock is not None and self.pending_bytes < self._bytes_max:
            self._append(FrameKind.STATUS, 0, status.t_ns, 0, _json.encode(status))

    def close(self) -> None:
        """Send as many frames as possible without waiting, then disconnect."""
        self._flush()
        self._is_closed = True
        if self._timer:
            self._timer.cancel()
        self._disconnect()

    async def drain(self, timeout_s: float) -> None:
        """Send all frames, and wait up to `timeout_s` until the meter has acknowledged them."""
        self._flush()
        if self._outstanding_bytes:
            self._all_settled.clear()
            try:
                await asyncio.wait_for(self._all_settled.wait(), timeout_s)
            except TimeoutError:
                pass

    def _append(self, kind: int, seq: int, t_ns: int, extra_ns: int, data: bytes) -> None:
        self.rows.put(kind, seq, t_ns, extra_ns, data)
        self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._flush_s, self._flush)

    def _set_bounds(self) -> None:
        """Set how much memory `rows` and the forwarding thread can use for frames without asking the Tap."""
        self.rows.bound = min(FLUSH_BYTES, self._bytes_max - self._outstanding_bytes)
        if self.source is not None:
            self.source.set_room(self._bytes_max - self._outstanding_bytes - self.rows.size)

    def _flush(self) -> None:
        """Make a batch of the collected frames and send it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        had_frames = self._take_from_source()
        if not self.rows:
            return
        if self._sock is None:
            self.rows.clear()
            return
        self._batch_no += 1
        is_calm = len(self.rows) < FRAMES_CALM * self._flush_s / FLUSH_S
        self._flush_s = FLUSH_CALM_S if is_calm else FLUSH_S
        batch = self.rows.pack(self._batch_no, None if self._news is None else self._news())
        self._in_flight.append((self._batch_no, len(batch)))
        self._outstanding_bytes += len(batch)
        self._set_bounds()
        self._unsent.append(memoryview(batch))
        if not self._is_writing:
            self._send()
        if had_frames:
            self._start_timer()  # collect the next frames in time; without frames, the thread wakes the loop

    def _send(self) -> None:
        """Write batches until the socket takes no more."""
        sock = self._sock
        assert sock is not None
        try:
            while self._unsent:
                sent = sock.send(self._unsent[0])
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    self._unsent.popleft()
        except (BlockingIOError, InterruptedError):
            if not self._is_writing:
                self._is_writing = True
                self._loop.add_writer(sock, self._send)
            return
        except OSError:
            self._on_meter_lost()
            return
        if self._is_writing:
            self._is_writing = False
            self._loop.remove_writer(sock)

    def _on_readable(self) -> None:
        """Read acknowledgements and control words from the meter."""
        assert self._sock is not None
        try:
            data = self._sock.recv(4_096)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._on_meter_lost()
            return
        data = self._ack_part + data
        whole = len(data) // ACK.size * ACK.size
        self._ack_part = data[whole:]
        batch_no = 0
        for (word,) in ACK.iter_unpack(data[:whole]):
            if word < CONTROL:
                batch_no = word
            elif self._on_word is not None:
                self._on_word(word)
        if batch_no:
            while self._in_flight and self._in_flight[0][0] <= batch_no:
                self._outstanding_bytes -= self._in_flight.popleft()[1]
            self._set_bounds()
            self.ledger.acknowledge(batch_no)
            if not self._outstanding_bytes:
                self._all_settled.set()

    def _on_meter_lost(self) -> None:
        """The connection to the meter is lost: drop all unacknowledged exchanges, and connect again."""
        before = self.ledger.unsettled
        self._disconnect()
        log.warning("event=meter_lost unmeasured=%d socket=%s", before, self._path)
        if not self._is_closed:
            self._loop.call_later(RECONNECT_S, self.connect)

    def _disconnect(self) -> None:
        """Close the connection and forget all frames: a new connection begins with an empty state."""
        if self._sock is not None:
            self._loop.remove_reader(self._sock)
            if self._is_writing:
                self._loop.remove_writer(self._sock)
                self._is_writing = False
            self._sock.close()
            self._sock = None
        self.rows.clear()
        self.rows.epoch += 1
        if self.source is not None:
            self.source.forget()
        self._unsent.clear()
        self._in_flight.clear()
        self._outstanding_bytes = 0
        self._set_bounds()
        self._ack_part = b""
        self._all_settled.set()
        self.ledger.lose_meter()

    def connect(self) -> None:
        """Connect to the meter; if it does not listen, try again every RECONNECT_S."""
        if self._is_closed or self._sock is not None:
            return
        sock = None
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            sock.connect(self._path)
        except OSError:  # no meter listens, or there is no file descriptor left
            if sock is not None:
                sock.close()
            self._loop.call_later(RECONNECT_S, self.connect)
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._sock = sock
        self._loop.add_reader(sock, self._on_readable)
        self._append(FrameKind.HELLO, 0, 0, 0, _json.encode(self._make_hello()))
        self._flush()
