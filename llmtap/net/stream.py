"""Read and write one TCP socket, with a timestamp for each read.

A Stream calls its handler with the bytes of each `recv` and the time at which they arrived, and keeps bytes
that the kernel does not accept. Its owner applies back-pressure: `write` returns False, and `on_drained`
follows. `open_stream` chooses the compiled class or the Python one; `TlsStream` is in `net/tls.py`.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from llmtap import native
from llmtap.clock import Clock, SystemClock, WallAnchor
from llmtap.net.lag import PythonLagMeter
from llmtap.net.tcp_info import ReceivedSegments, acked_bytes_of, has_left, has_several_events, out_of_order

READ_BYTES_MAX: Final = 65_536
"""Maximum length of a read in bytes, and so of the bytes that wait for a slow receiver, per direction."""
SO_TIMESTAMPNS: Final = 35
"""Socket option for receive timestamps (Linux asm-generic/socket.h)."""
LAG_ABSURD_NS: Final = 60_000_000_000
"""A lag above this bound means that the wall clock was set: no read waits a minute."""
LAG_DOUBT_NS: Final = 10_000_000
"""Minimum lag of a read for which the clocks are checked: the wall clock was possibly set."""
MAPPING_NS: Final = 1_000_000
KERNEL_FLOOR_NS: Final = 300_000
"""Least error of a timestamp of the kernel: twice the drift of the wall clock in 50 ms at the 500 ppm of NTP
(0.05 ms), and the time until the kernel stamps a packet (at most 0.11 ms seen on a quiet machine, 0.35 ms on
a busy one: benchmarks/relay, truth.py)."""
SAMPLE_NS_MAX: Final = 1_000_000_000
"""Longest regular time between two samples of the clocks."""
STEP_NS: Final = 1_000_000
"""If the wall clock moves by more against the monotonic one, it was set, not slewed. An anchor that is wrong
by more is replaced."""
_ANCILLARY_BYTES: Final = 64
_TIMESPEC: Final = struct.Struct("@ll")
_LINGER_NONE: Final = struct.pack("ii", 1, 0)

mono_ns = SystemClock.mono_ns


def is_quiet(sock: socket.socket) -> bool:
    """Return whether a non-blocking socket is open and has nothing to read, not even its end."""
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def keep_stamps_on() -> socket.socket:
    """Return a socket with receive timestamps switched on. Keep it open while other sockets need timestamps.

    Linux begins to stamp a moment after the first socket asks, and ends with the last one. Without stamps a
    packet gets the time at which it is read.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    return sock


class Handler(Protocol):
    """Receiver of the events of a stream."""

    def on_data(self, data: bytes, t_ns: int) -> None:
        """Bytes arrived at monotonic time `t_ns`."""

    def on_eof(self) -> None:
        """The peer closed its sending side; writing to the peer possibly still works."""

    def on_lost(self, error: OSError | None) -> None:
        """The connection broke. Called once, never after `close`."""

    def on_drained(self) -> None:
        """All bytes that `write` kept are now in the kernel."""


class Stream(Protocol):
    """One connection, plain (PlainStream) or encrypted (TlsStream)."""

    handler: Handler
    closed: bool
    resumed_ns: int
    """End of the latest pause; bytes with an earlier stamp waited because of the pause."""

    @property
    def paused(self) -> bool:
        """Whether reading is suspended."""
        ...

    @property
    def pending(self) -> int:
        """Number of bytes written but not yet taken by the kernel."""
        ...

    @property
    def acked_bytes(self) -> int:
        """Number of bytes that the peer's kernel has acknowledged; it grows while the peer reads."""
        ...

    @property
    def received_bytes(self) -> int:
        """Number of bytes that arrived, also of those that no handler has seen; 0 where handlers see all."""
        ...

    @property
    def out_of_order(self) -> bool:
        """Whether the kernel's timestamps of this connection are possibly too early."""
        ...

    def came_at_once(self, data: bytes) -> bool:
        """Return whether `data`, from the last read, possibly belongs to several events and arrived in one
        TCP segment; False if that is unknown."""
        ...

    def stamped_since(self, t_ns: int) -> bool:
        """Return whether all reads since `t_ns` have exact timestamps of the kernel."""
        ...

    def write(self, data: bytes) -> bool:
        """Return True if the kernel accepted all data; False if some is pending. Raises OSError if the
        connection is broken."""
        ...

    def pause(self) -> None:
        """Read nothing until `resume`."""
        ...

    def resume(self) -> None:
        """Read again."""
        ...

    def shutdown_write(self) -> None:
        """Send the end of this side's data; the peer can still send."""
        ...

    def peer_left(self) -> bool:
        """Return whether the peer has closed its side, even if bytes are unread: for a paused stream."""
        ...

    def look_again(self) -> None:
        """Watch the socket for data again."""
        ...

    def is_alive(self) -> bool:
        """Return False if the peer has closed, or has sent anything: for an idle connection."""
        ...

    def has_unread(self) -> bool:
        """Return whether the peer has sent bytes that are unread."""
        ...

    def close(self) -> None:
        """Close the connection; pending bytes are not sent."""
        ...

    def abort(self) -> None:
        """Close with a TCP reset, so that the peer sees an incomplete message."""
        ...


class Timebase:
    """Converts kernel timestamps (wall clock) to monotonic time; records lag, detects clock steps."""

    __slots__ = (
        "_checked_ns",
        "_clock",
        "_errors",
        "_noticed_ns",
        "_offset_before_ns",
        "anchor",
        "lag",
        "offset_ns",
        "on_sample",
        "since_ns",
        "steps",
        "width_ns",
    )

    def __init__(self, clock: Clock, lag: PythonLagMeter) -> None:
        self._clock = clock
        self.lag = lag
        """Meter of the event loop's delays."""
        self.anchor = WallAnchor.sample(clock)
        """Converts timestamps to dates; the same object until the wall clock is set or has drifted."""
        self.offset_ns = self.anchor.mono_ns - self.anchor.wall_ns
        """Monotonic clock minus wall clock, as last sampled."""
        self.width_ns = self.anchor.width_ns
        """Error of `offset_ns`: the duration of the readings, and the drift since the previous readings."""
        self.steps = 0
        """Number of times that the wall clock was set since the start."""
        self.since_ns = 0
        """The wall clock was last set after this monotonic time; 0: it was not set since the start."""
        self._checked_ns = self.anchor.mono_ns
        """Monotonic time of the latest check of the clocks."""
        self._noticed_ns = 0
        """Time at which the latest step of the wall clock was noticed."""
        self._offset_before_ns = self.offset_ns
        """Offset of the clocks before that step, for earlier stamps."""
        self._errors = PythonLagMeter(KERNEL_FLOOR_NS)
        """Uncertainty of each comparison of the clocks."""
        self.on_sample: Callable[[int, int], None] | None = None
        """Called with `offset_ns` and `since_ns` after each sample of the clocks."""

    def error_since(self, t_ns: int) -> int:
        """Return the largest error of a mapped timestamp since `t_ns`, as measured by two samples."""
        return self._errors.worst_since(t_ns - SAMPLE_NS_MAX)

    def check(self) -> None:
        """Check whether the wall clock was set; takes about 1 us, so call it once for each batch, not for
        each chunk."""
        now_ns = self._clock.mono_ns()
        if abs(now_ns - self._clock.wall_ns() - self.offset_ns) > STEP_NS:
            # The clock was set, or this process was paused between the two readings: resample() finds out
            # which.
            self.resample()
        else:
            self._checked_ns = now_ns

    def resample(self) -> None:
        """Sample both clocks; twice a second is enough for drift."""
        fresh = WallAnchor.sample(self._clock)
        if fresh.width_ns > STEP_NS:
            return  # This process was paused between the two readings, so they differ by too much.
        offset_ns = fresh.mono_ns - fresh.wall_ns
        tolerance_ns = STEP_NS + fresh.width_ns
        drift_ns = abs(offset_ns - self.offset_ns)
        self.width_ns = fresh.width_ns
        if drift_ns > tolerance_ns:
            self.steps += 1
            self.since_ns, self._noticed_ns = self._checked_ns, fresh.mono_ns
            self._offset_before_ns = self.offset_ns
            self.anchor = fresh
        else:
            self.width_ns += drift_ns
            if abs(offset_ns - (self.anchor.mono_ns - self.anchor.wall_ns)) > tolerance_ns:
                self.anchor = fresh  # Many small drifts have added up to more than the tolerance.
            self._errors.note(fresh.mono_ns, self.width_ns)
        self.offset_ns = offset_ns
        self._checked_ns = fresh.mono_ns
        if self.on_sample is not None:
            self.on_sample(offset_ns, self.since_ns)

    def place(self, now_ns: int, wall_ns: int, resumed_ns: int = 0) -> int:
        """Return the monotonic time of a kernel stamp (`wall_ns`) that is implausibly far from `now_ns`.

        The stamp is converted with the present offset between the clocks or, if the wall clock was set
        between stamp and read, with the previous one. If neither gives a possible time, return `now_ns`. The
        lag begins at `resumed_ns`, if that is later than the stamp.
        """
        self.check()
        t_ns = wall_ns + self.offset_ns
        if not self.since_ns <= t_ns <= now_ns:
            t_ns = wall_ns + self._offset_before_ns
            if t_ns > min(now_ns, self._noticed_ns):
                return now_ns
        lag_ns = now_ns - max(t_ns, resumed_ns)
        if lag_ns >= LAG_ABSURD_NS:
            return now_ns
        self.lag.note(now_ns, lag_ns)
        return t_ns


class PlainStream:
    """A TCP socket; the timestamp of a read is taken after `recv`."""

    __slots__ = (
        "_fd",
        "_loop",
        "_out",
        "_reading",
        "_recv",
        "_send",
        "_sock",
        "_timebase",
        "closed",
        "handler",
        "pending",
        "resumed_ns",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, handler: Handler, timebase: Timebase
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._recv = sock.recv
        self._send = sock.send
        self._timebase = timebase
        self._out: deque[bytes] | None = None
        """Bytes that the kernel has not taken; None: there were never any."""
        self.handler = handler
        self.pending = 0
        """Size of `_out` in bytes."""
        self.closed = False
        """Whether `close` or `abort` was called, or the connection was lost."""
        self.resumed_ns = 0
        """End of the latest pause."""
        self._reading = True
        """Whether the loop watches for data; False during a pause."""
        self._watch_for_data()

    def fileno(self) -> int:
        return self._fd

    def _watch_for_data(self) -> None:
        """Let the event loop call the reader when there are data."""
        self._loop.add_reader(self._fd, self._readable)

    def _readable(self) -> None:
        try:
            data = self._recv(READ_BYTES_MAX)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self.lose(exc)
            return
        t_ns = mono_ns()
        if data:
            self.handler.on_data(data, t_ns)
        else:
            self.ended()

    def ended(self) -> None:
        """Handle the end of the peer's data."""
        # A socket at its end stays readable. Stop watching it, or the loop would spin.
        self.pause()
        self.handler.on_eof()

    def write(self, data: bytes) -> bool:
        if not self.pending:
            try:
                sent = self._send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            if sent == len(data):
                return True
            data = data[sent:]
        self.keep(data)
        return False

    def keep(self, data: bytes) -> None:
        """Send `data` as soon as the kernel takes it."""
        if self._out is None:
            self._out = deque()
            self._loop.add_writer(self._fd, self._writable)
        self._out.append(data)
        self.pending += len(data)

    def _writable(self) -> None:
        out = self._out
        assert out is not None
        try:
            while out:
                # Join the waiting pieces: one call then sends them all.
                first = out[0] if len(out) == 1 else b"".join(out)
                sent = self._send(first)
                self.pending -= sent
                out.clear()
                if sent < len(first):
                    out.append(first[sent:])
                    return
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self.lose(exc)
            return
        self._out = None
        self._loop.remove_writer(self._fd)
        self.handler.on_drained()

    @property
    def paused(self) -> bool:
        """Whether reading is suspended."""
        return not self._reading

    @property
    def acked_bytes(self) -> int:
        """Number of bytes that the peer's kernel has acknowledged."""
        return acked_bytes_of(self._sock)

    @property
    def received_bytes(self) -> int:
        """Always 0: the handler sees each byte as soon as it is read."""
        return 0

    @property
    def out_of_order(self) -> bool:
        """Whether the kernel's timestamps of this connection are possibly too early."""
        return out_of_order(self._sock)

    def came_at_once(self, data: bytes) -> bool:
        """Always False: without timestamps of the kernel this is unknown."""
        return False

    def stamped_since(self, t_ns: int) -> bool:
        """Always False: reads have no timestamps of the kernel."""
        return False

    def pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def resume(self) -> None:
        if not self._reading and not self.closed:
            self._reading = True
            self.resumed_ns = mono_ns()
            self._watch_for_data()

    def shutdown_write(self) -> None:
        """Send the end of this side's data; the peer can still send."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # The peer has closed already; the reader will report it.

    def peer_left(self) -> bool:
        """Return whether the peer has closed its side, even if bytes are unread: for a paused stream."""
        return has_left(self._sock)

    def look_again(self) -> None:
        """Watch the socket again if the peer has closed or reset the connection.

        libuv stops watching at the first error event: if bytes and a reset come in the same turn, the one
        callback reads the bytes, and the reset would never be noticed.
        """
        if self._reading and self.peer_left():
            self._loop.remove_reader(self._fd)
            self._watch_for_data()

    def is_alive(self) -> bool:
        """Return False if the peer has closed, or has sent anything: for an idle connection."""
        return not self.closed and is_quiet(self._sock)

    def has_unread(self) -> bool:
        """Return whether the peer has sent bytes that are unread."""
        try:
            return not self.closed and bool(self._recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def lose(self, error: OSError) -> None:
        """Close, and call `on_lost` of the handler."""
        handler = self.handler
        self.close()
        handler.on_lost(error)

    def close(self) -> None:
        if not self.closed:
            self.pause()
            self.closed = True
            if self._out is not None:
                self._out = None
                self.pending = 0
                self._loop.remove_writer(self._fd)
            self._sock.close()

    def abort(self) -> None:
        """Close with a TCP reset, so that the peer sees an incomplete message."""
        if not self.closed:
            try:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
            except OSError:
                pass
            self.close()


class KernelStream(PlainStream):
    """A TCP socket whose reads carry the kernel's receive stamp of their last segment, in monotonic ns.

    Our own lateness is not part of the stamp; it goes to the lag meter.
    """

    __slots__ = ("_received", "_recvmsg", "_unstamped_ns")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, handler: Handler, timebase: Timebase
    ) -> None:
        super().__init__(loop, sock, handler, timebase)
        self._recvmsg = sock.recvmsg
        self._received = ReceivedSegments()
        """Counts that show whether a read came in one TCP segment."""
        self._unstamped_ns = 0
        """Time of the last read without a timestamp of the kernel; 0: there was none."""
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)

    def _readable(self) -> None:
        try:
            data, ancillary, _, _ = self._recvmsg(READ_BYTES_MAX, _ANCILLARY_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self.lose(exc)
            return
        now_ns = mono_ns()
        if not data:
            self.ended()
            return
        t_ns = now_ns
        if ancillary:
            seconds, ns = _TIMESPEC.unpack(ancillary[0][2])
            timebase = self._timebase
            t_ns = seconds * 1_000_000_000 + ns + timebase.offset_ns
            lag_ns = now_ns - t_ns
            if 0 <= lag_ns < LAG_DOUBT_NS and t_ns >= self.resumed_ns:
                timebase.lag.note(now_ns, lag_ns)
            elif -MAPPING_NS < lag_ns < 0:
                # The packet's stamp is later than the read, within the error of the clocks' mapping: use the
                # time of the read.
                t_ns = now_ns
                timebase.lag.note(now_ns, 0)
            else:
                t_ns = timebase.place(now_ns, seconds * 1_000_000_000 + ns, self.resumed_ns)
                if t_ns == now_ns:
                    self._unstamped_ns = now_ns
        else:
            self._unstamped_ns = now_ns
        self._received.add(len(data), READ_BYTES_MAX)
        self.handler.on_data(data, t_ns)

    def came_at_once(self, data: bytes) -> bool:
        """Return whether data of several events arrived in one TCP segment."""
        return has_several_events(data) and self._received.came_at_once(self._sock)

    def stamped_since(self, t_ns: int) -> bool:
        """Return whether all reads since a time have exact timestamps of the kernel."""
        return self._unstamped_ns < t_ns and not self.out_of_order


class CompiledStream(PlainStream):
    """A TCP socket with a compiled reader; stamps are the kernel's if `stamped`, else taken on read."""

    __slots__ = ("reader",)

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        handler: Handler,
        timebase: Timebase,
        *,
        stamped: bool,
    ) -> None:
        assert native.compiled is not None
        self._fd = sock.fileno()
        self.reader: Any = native.compiled.Reader(self, timebase, stamped)
        """Compiled reader of the socket, which calls the handler."""
        if stamped:
            sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        super().__init__(loop, sock, handler, timebase)

    def _watch_for_data(self) -> None:
        self._loop.add_reader(self._fd, self.reader)

    def resume(self) -> None:
        super().resume()
        # Treat each read as doubtful, until `place` finds that the bytes of the pause have been read.
        self.reader.doubt_ns = 0

    def place(self, now_ns: int, wall_ns: int) -> int:
        """Return the time of a read whose timestamp seems too early, or whose bytes came while reading was
        paused."""
        t_ns = self._timebase.place(now_ns, wall_ns, self.resumed_ns)
        if t_ns >= self.resumed_ns:
            self.reader.doubt_ns = LAG_DOUBT_NS
        return t_ns

    def came_at_once(self, data: bytes) -> bool:
        """Return whether data of several events arrived in one TCP segment."""
        return bool(self.reader.came_at_once(data))

    def stamped_since(self, t_ns: int) -> bool:
        """Return whether all reads since a time have exact timestamps of the kernel."""
        return bool(self.reader.stamped_since(t_ns))

    def is_alive(self) -> bool:
        return bool(self.reader.is_quiet())

    def lend(self) -> None:
        """Stop watching the socket, because the forwarding thread has it. Only for a stream that is read, and
        to which nothing is pending."""
        self._loop.remove_reader(self._fd)

    def take_back(self) -> None:
        """Watch the socket again, after the forwarding thread has given it back."""
        if self._reading:
            self._watch_for_data()

    def close(self) -> None:
        self.reader.reclaim()
        super().close()
        self.reader.close()


def open_stream(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, handler: Handler, timebase: Timebase, clock: str
) -> PlainStream:
    """Return the stream for a connected, non-blocking TCP socket and `relay.clock`."""
    if native.compiled is not None:
        return CompiledStream(loop, sock, handler, timebase, stamped=clock == "kernel")
    kind = KernelStream if clock == "kernel" else PlainStream
    return kind(loop, sock, handler, timebase)
