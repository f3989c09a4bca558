"""Binary format of the frames (observations) that a vantage sends to the meter, packed in batches by column.

`FrameKind` lists all kinds of frames, with the meaning of their fields; the vantages (relay, middleware,
passive) use it. `__init__.py` writes batches with `FrameRows`, the meter reads them with `BatchReader`. The
structs of the frames' data (Hello, Closing, Assigned) are here, too, and RelayStatus in `status.py`. By
columns, the relay packs a thousand frames with a handful of C calls:

    +--------+--------+---------+----------+----------+-----------+-------------+---------+
    | magic  | frames | payload | batch_no | kind u8  | seq i64   | t_ns i64    | ...     |
    | u32    | u32    | u32     | u64      | x frames | x frames  | x frames    |         |
    +--------+--------+---------+----------+----------+-----------+-------------+---------+
      ... extra_ns i64 x frames | length u32 x frames | the data of all frames, joined |

All integers are in the host's byte order. The meter acknowledges a batch that it has processed with its
number (u64). A u64 with the CONTROL bit is a control word to the relay (see `channel/experiment.py`).
"""

import struct
from array import array
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, Final

import msgspec

from llmtap import native

Frame = tuple[int, int, int, int, bytes]
"""`(kind, seq, t_ns, extra_ns, data)`"""


class FrameKind:
    """Kinds of frames, as plain ints for speed. `t` and `extra` are a frame's two times, in ns. "Added
    latency": delay added by llmtap, from the read of the bytes until they were written to the other side."""

    HELLO: Final = 1
    """First frame of a connection. data: Hello as JSON."""
    OPEN: Final = 2
    """An exchange begins. t: time of the read of the request's first byte; data: the request head as
    received. If the request was complete at once, extra is the time of its last byte, and data also has its
    body."""
    REQUEST_DATA: Final = 3
    """Part of the request's body. t: time of the read; data: body bytes with their HTTP framing."""
    REQUEST_END: Final = 4
    """The request is complete. t: time of the read that held its last byte."""
    SUBMIT: Final = 5
    """The request was sent. t: start of the send in which the upstream's socket took its last byte; extra:
    time since the read of that byte."""
    INTERIM: Final = 6
    """An interim response (1xx). t: time of the read; data: its head."""
    RESPONSE_HEAD: Final = 7
    """Head of the response. t: time of the read; extra: added latency; data: the head as received."""
    RESPONSE_DATA: Final = 8
    """Part of the body. t: time of the read; extra: added latency; data: the bytes with HTTP framing."""
    RESPONSE_END: Final = 9
    """The response is complete. t: time of the read that held its last byte."""
    UPGRADED: Final = 10
    """The connection becomes a tunnel (WebSocket). t: time of this change."""
    TUNNEL_UP: Final = 11
    """Bytes of a tunnel from the client. t: time of the read; extra: added latency; data: the bytes."""
    TUNNEL_DOWN: Final = 12
    """Bytes of a tunnel from the upstream. t: time of the read; extra: added latency; data: the bytes."""
    CLOSE: Final = 13
    """The exchange is over. t: time when the client's socket accepted the last byte; data: Closing as
    JSON."""
    DROP: Final = 14
    """Forget this exchange: not all of its frames could be sent. The relay has counted it."""
    STATUS: Final = 15
    """Status of the relay itself, sent twice a second. data: RelayStatus as JSON."""
    SENT: Final = 17
    """Short form of OPEN, REQUEST_DATA, REQUEST_END and SUBMIT, for a request that came whole in one read and
    was sent whole on an idle connection to the upstream. t: time of the read;
    extra: start of the send to the upstream; data: head and body as received."""
    ANSWER: Final = 16
    """A whole answer in one read. t: time of the read; extra: added latency; data: head and body as
    received."""
    ARM: Final = 18
    """The exchange takes part in an experiment. data: Assigned as JSON. Sent as soon as the arm is known, so
    that a slow arm's exchanges are counted as early as a fast one's."""
    HELD: Final = 20
    """The client's socket took no bytes, so reading from the upstream paused. t: end of the pause; extra: its
    length."""
    RESPONSE_AT_ONCE: Final = 21
    """As RESPONSE_DATA, for bytes that possibly belong to several events and arrived in one TCP segment, so
    that `t` is the time of each event."""
    ANCHOR: Final = 19
    """The wall clock was set, or has drifted: later timestamps are dated by a new pair of readings. t: the
    monotonic clock, extra: the wall clock, both read together; data: Anchored as JSON."""


class Hello(msgspec.Struct, kw_only=True):
    """First frame of a connection: identity of the sender."""

    relay: str
    pid: int
    """Process id of the sender."""
    clock: str
    """Source of the timestamps: `mono` (the process), `kernel`, or `packet` (captured packets)."""
    vantage: str = ""
    """Kind of the vantage: `relay`, `middleware` or `passive`; empty: not reported."""
    side: str = ""
    """Side of the gateway in a pair of vantages, as in `Exchange.side`; empty: not part of a pair."""
    listen: str = ""
    """URL of the address where clients connect; empty for an app with the middleware."""
    anchor_mono_ns: int
    """Monotonic time at the same moment as `anchor_wall_ns`."""
    anchor_wall_ns: int
    anchor_steps: int = 0
    """Number of times that the wall clock was set since the relay started."""
    switch: int = 0
    """Last control word that the sender received. A meter that has just started learns the state of the
    switch from it."""
    skipped: int = 0
    """Number of requests that the sender had skipped before this connection."""
    guest: bool = False
    """Whether the sender is an app with the middleware, and not a process of this proxy. The meter does not
    wait for such a sender when it ends."""
    implementation: str = ""
    """Implementation of the parts that can be compiled: `native` or `python`; empty: not reported."""
    implementation_reason: str = ""
    """Why the compiled parts are not used; empty: they are."""


class Anchored(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Data of an ANCHOR frame: from which time on its pair of clock readings is valid."""

    steps: int = 0
    """Number of times that the wall clock was set since the relay started, without drift."""
    since_ns: int = 0
    """Requests that arrived up to this monotonic time came before the wall clock was set."""


class Assigned(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Arm that an exchange was assigned to, and the unit of randomisation."""

    arm: str
    unit: str
    """Identifier of the unit: request, conversation or tenant."""
    single: bool = False
    """Whether the request is a unit by itself, because no conversation or tenant was found."""
    own_headers: bool = False
    """Whether the client itself sent a header field that another arm sets."""


class Closing(msgspec.Struct, kw_only=True, omit_defaults=True):
    """End of an exchange, as the relay saw it."""

    outcome: str
    status: int | None = None
    """Status that the client received, from the upstream or from the relay itself; None: no status."""
    error: str | None = None
    paused_ns: int = 0
    """Time in which a slow client paused the answer."""
    lag_ns: int = 0
    """Error of the timestamp of a read that holds one event."""
    stall_ns: int = 0
    """Longest time in which the event loop did not read its sockets, as far as its probes show."""
    connect_ns: int | None = None
    """Time to connect to the upstream, with look-up and TLS; None if a kept-alive connection was used."""
    connected_ns: int | None = None
    """Time when the new connection was ready."""
    send_wait_ns: int = 0
    """Total time in which the upstream's socket did not take bytes of the request."""
    request_bytes: int = 0
    """Size of the request with its head."""
    response_bytes: int = 0
    retries: int = 0
    """Number of times that the request was sent again because a kept-alive connection was closed."""
    arm: str | None = None
    """Name of the experiment's arm."""
    route: str | None = None
    """Name of the route that chose the upstream."""
    unit: str | None = None
    """Identifier of the experiment's unit: conversation or tenant."""
    excluded: str | None = None
    """Why the request does not count for the experiment; None: it counts."""


MAGIC: Final = 0x4C4C5402
_HEAD: Final = struct.Struct("=IIIQ")
ACK: Final = struct.Struct("=Q")
CONTROL: Final = 1 << 63
"""Bit that marks a control word. Batch numbers begin with 1, and are never large enough to have this bit."""
BATCH_BYTES_MAX: Final = 64 << 20
"""Maximum size of a batch. A longer one cannot come from llmtap, so the reader refuses it."""
FRAME_BYTES: Final = 128
"""Assumed memory of a frame in addition to its data."""


def pack_batch(batch_no: int, rows: list[Any]) -> bytes:
    """Return one batch of a flat list `[kind, seq, t_ns, extra_ns, data, kind, seq, ...]`."""
    datas = rows[4::5]
    blob = b"".join(datas)
    head = _HEAD.pack(MAGIC, len(datas), len(blob), batch_no)
    columns = [array("q", rows[i::5]).tobytes() for i in (1, 2, 3)]
    return b"".join((head, bytes(rows[0::5]), *columns, array("I", map(len, datas)).tobytes(), blob))


class PythonFrameRows:
    """Frames of the next batch, in Python: the reference of the compiled class.

    Attributes:
        bound: limit in bytes up to which `add` takes frames.
        epoch: grows when an exchange stops being measured. Direct callers of `add` then ask the Tap whether
            their exchange is still measured.
        size: bytes of the data, and FRAME_BYTES for each frame.
    """

    __slots__ = ("_rows", "bound", "epoch", "size")

    def __init__(self) -> None:
        self.bound = self.epoch = 0
        self.clear()

    def __len__(self) -> int:
        return len(self._rows) // 5

    def add(self, kind: int, seq: int, t_ns: int, extra_ns: int, data: bytes) -> bool:
        """Add a frame within `bound`, and return True. Return False if only the Tap can add it: if the frame
        exceeds `bound`, or is the first one, for which the Tap must start its timer."""
        if self.size + len(data) + FRAME_BYTES > self.bound or not self._rows:
            return False
        self.put(kind, seq, t_ns, extra_ns, data)
        return True

    def put(self, kind: int, seq: int, t_ns: int, extra_ns: int, data: bytes) -> None:
        """Add a frame without a check of `bound`."""
        self._rows += (kind, seq, t_ns, extra_ns, data)
        self.size += len(data) + FRAME_BYTES

    def pack(self, batch_no: int, news: Frame | None = None) -> bytes:
        """Return all frames as one batch, and remove them. `news`: frame to put before all except HELLO."""
        rows = self._rows
        if news is not None:
            at = 5 if rows and rows[0] == FrameKind.HELLO else 0
            rows[at:at] = news
        batch = pack_batch(batch_no, rows)
        self.clear()
        return batch

    def clear(self) -> None:
        self._rows: list[Any] = []
        self.size = 0


def make_frame_rows() -> PythonFrameRows:
    """Return the compiled rows, or else those in Python."""
    rows: PythonFrameRows = PythonFrameRows() if native.compiled is None else native.compiled.FrameRows()
    return rows


class PythonFrameBatch:
    """The frames of one batch, in order: an iterator; the reference of the compiled one.

    `last_ns`: `t_ns` of the last frame. `len()` returns the number of all frames, including those taken.
    """

    __slots__ = ("_frames", "_n", "last_ns")

    def __init__(self, packed: bytes, n: int) -> None:
        view = memoryview(packed)[_HEAD.size :]
        seqs, stamps, extras = (view[n + 8 * n * i : n + 8 * n * (i + 1)].cast("q") for i in range(3))
        ends = accumulate(view[25 * n : 29 * n].cast("I"), initial=_HEAD.size + 29 * n)
        datas = [packed[start:end] for start, end in pairwise(ends)]
        self._frames = zip(view[:n], seqs, stamps, extras, datas, strict=True)
        self._n = n
        """Number of frames."""
        self.last_ns = stamps[-1] if n else None

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[Frame]:
        return self._frames

    def __next__(self) -> Frame:
        return next(self._frames)

    def unrecognised(self, live: dict[int, Any]) -> Iterator[Frame]:
        """Iterate over the frames that were not taken yet, without the token events that an exchange expects.

        Args:
            live: the open exchanges (Observer) by seq. The compiled implementation adds token events to their
            `token_run` and skips them; this one leaves that to `Observer.response_data`.
        """
        return self._frames


def make_frame_batch(packed: bytes, n: int) -> PythonFrameBatch:
    """Return the batch of `n` frames in the compiled or the Python implementation."""
    kind: type[PythonFrameBatch] = PythonFrameBatch if native.compiled is None else native.compiled.FrameBatch
    return kind(packed, n)


class BatchReader:
    """Parser of a stream of batches. A read can end at any byte."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, PythonFrameBatch]]:
        """Yield the number and the frames of each complete batch. Raises ValueError if bytes are no batch."""
        buf = self._buffer
        buf += data
        while len(buf) >= _HEAD.size:
            magic, n, blob_len, batch_no = _HEAD.unpack_from(buf)
            size = _HEAD.size + n * (1 + 8 + 8 + 8 + 4) + blob_len
            if magic != MAGIC:
                raise ValueError(f"expected a batch of frames that begins with {MAGIC:#x}, got {magic:#x}")
            if size > BATCH_BYTES_MAX:
                raise ValueError(f"expected a batch of at most {BATCH_BYTES_MAX} bytes, got {size}")
            if len(buf) < size:
                return
            packed = bytes(memoryview(buf)[:size])
            del buf[:size]
            yield batch_no, make_frame_batch(packed, n)
