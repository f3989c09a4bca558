from array import array
from collections.abc import Sequence
from typing import Any

from llmtap.protocol.repetition import Fixed, RunColumns

FINGERPRINT: str

def plain_request(
    raw: bytes, /
) -> tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes, int, bool, bool] | None: ...
def plain_response(raw: bytes, /) -> tuple[int, bytes, list[tuple[bytes, bytes]], int, bool, bool] | None: ...
def write_head(
    start: bytes, fields: list[tuple[bytes, bytes]], host: bytes | None, end: bytes, /
) -> bytes | None: ...

class TokenRun:
    """Compiled twin of `PythonTokenRun` in protocol/repetition.py."""

    keeps_texts: bool
    full: bool
    def __init__(
        self,
        fixed: Fixed,
        chunked: bool,
        keeps_texts: bool,
        /,
    ) -> None: ...
    def __len__(self) -> int: ...
    def add(self, data: bytes, t_ns: int, added_ns: int, /) -> bool: ...
    def take(self) -> RunColumns: ...

class FrameBatch:
    """Compiled twin of `PythonFrameBatch` in channel/frames.py."""

    last_ns: int | None
    def __init__(self, packed: bytes, n: int, /) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> FrameBatch: ...
    def __next__(self) -> tuple[int, int, int, int, bytes]: ...
    def unrecognised(self, live: dict[int, Any], /) -> FrameBatch: ...

def gap_figures(times: list[int], step: int, /) -> tuple[list[int], int, float, int] | None: ...
def count_by_float(values: list[int], counts: dict[int, int], /) -> tuple[int, int, int] | None: ...
def count_by_edge(values: Sequence[int], edges: Sequence[int], counts: array[int], /) -> int | None: ...

class LagMeter:
    """Compiled twin of `PythonLagMeter` in net/lag.py."""

    buckets: list[int]
    sum_ns: int
    max_ns: int
    def __init__(self, floor_ns: int, /, *, blind_ns: int = 0, turns: int = 1) -> None: ...
    def note(self, t_ns: int, lag_ns: int, /) -> None: ...
    def worst_since(self, t_ns: int, /) -> int: ...
    def forget_before(self, t_ns: int, /) -> None: ...
    def take_max(self) -> int: ...

class FrameRows:
    """Compiled twin of `PythonFrameRows` in channel/frames.py."""

    bound: int
    epoch: int
    size: int
    def __len__(self) -> int: ...
    def add(self, kind: int, seq: int, t_ns: int, extra_ns: int, data: bytes, /) -> bool: ...
    def put(self, kind: int, seq: int, t_ns: int, extra_ns: int, data: bytes, /) -> None: ...
    def pack(self, batch_no: int, news: tuple[int, int, int, int, bytes] | None = None, /) -> bytes: ...
    def clear(self) -> None: ...

class FlowState:
    """Compiled twin of `PythonFlowState` in vantage/relay/flow.py."""

    seq: int
    last_ns: int
    response_bytes: int
    tapped: bool
    loan: Loan | None

class Passage:
    """Compiled twin of `Flow.on_data` in vantage/relay/flow.py, for plain reads."""

    def __init__(
        self,
        flow: FlowState,
        client: Reader,
        framing: int,
        scanner: Any,
        rows: FrameRows,
        forwarder: Forwarder | None = None,
        /,
    ) -> None: ...

class Reader:
    """Compiled twin of `PlainStream._readable` and `KernelStream._readable` in net/stream.py."""

    passage: Passage | None
    doubt_ns: int
    def __init__(self, stream: Any, timebase: Any, stamped: bool, /) -> None: ...
    def __call__(self) -> None: ...
    def is_quiet(self) -> bool:
        """Return whether the connection is open and has no unread bytes."""

    def came_at_once(self, data: bytes, /) -> bool: ...
    def stamped_since(self, t_ns: int, /) -> bool:
        """Return whether all reads since a time have exact timestamps of the kernel."""

    def reclaim(self) -> None:
        """Take the socket back from the forwarding thread, if it has it."""

    def close(self) -> None: ...

class Loan:
    """An exchange's sockets while the forwarding thread has them."""

    last_ns: int
    def reclaim(self) -> None:
        """Take both sockets back now."""

    def deliver(self) -> None:
        """Continue a body that the thread has returned."""

    def handle(self) -> None:
        """Handle the reason for which the thread returned the sockets."""

class Forwarder:
    """The forwarding thread (native/forwarder.h); a FrameSource of channel/__init__.py."""

    reads: int
    lent: int
    lent_total: int
    size: int
    def __init__(self, lag: LagMeter, reads: int, /) -> None: ...
    def fileno(self) -> int: ...
    def set_clock(self, offset_ns: int, since_ns: int, /) -> None:
        """Set the offset from the wall clock to the monotonic clock, valid for stamps since a time."""

    def set_room(self, size: int, /) -> None:
        """Set how many bytes of frames the thread may keep."""

    def collect(self, rows: FrameRows, /) -> list[int]:
        """Move the frames to `rows`. Return the exchanges dropped for lack of memory."""

    def forget(self) -> None:
        """Drop the waiting frames, and stop measuring the lent bodies."""

    def take_returned(self) -> list[Loan]:
        """Take the loans that the thread has returned."""

    def close(self) -> None: ...
