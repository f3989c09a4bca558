"""Put the TCP segments of one direction of a connection in order. No IO.

Early segments are kept, within bounds, until the bytes before them arrive. Bytes that arrive twice are used
once. If the copies differ, nobody knows which one the receiver got, and LostSyncError is raised. A copy is
compared with the last piece that was returned. More early bytes than the bounds allow raise it, too.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from llmtap.errors import LlmtapError

__all__ = ["EarlyBytes", "LostSyncError", "TcpDirection"]

EARLY_SEGMENTS_MAX: Final = 1_024
EARLY_BYTES_MAX: Final = 1 << 20
"""Bounds of one direction: several times what is under way on a fast connection inside a cluster."""
HALF: Final = 1 << 31
MASK: Final = 0xFFFFFFFF


class LostSyncError(LlmtapError):
    """The bytes cannot be put in order; `reason` is the reason for dropping the exchanges under way."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class EarlyBytes:
    """Bytes of early segments of all connections, with their bound."""

    limit: int = 64 << 20
    used: int = 0


class TcpDirection:
    """Byte stream of one side of a connection.

    Args:
        is_up: from client to server.
        early: bound of all connections.
    """

    __slots__ = (
        "_early", "_early_bytes", "_kept", "_position", "hole_ns", "is_up", "last", "next",
        "peer",
    )  # fmt: skip

    def __init__(self, early: EarlyBytes, *, is_up: bool) -> None:
        self.is_up = is_up
        self.peer: TcpDirection = self
        self.next: int | None = None
        """Sequence number of the next byte; None while it is unknown."""
        self.last = b""
        """The piece that ends at `next`."""
        self.hole_ns = 0
        """When the first early segment came; 0: none is kept."""
        self._early = early
        self._early_bytes = 0
        self._kept: list[tuple[int, int, bytes, int]] = []  # heap: (position, t_ns, payload, flags)
        self._position = 0  # of `next`, counted without wrapping

    def begin(self, seq: int) -> None:
        """Expect the byte with this sequence number; forget all that was kept."""
        self.forget()
        self.next = seq & MASK

    def forget(self) -> None:
        """Forget the position in the stream and all early segments."""
        self.next = None
        self.last = b""
        self.hole_ns = 0
        self._early.used -= self._early_bytes
        self._early_bytes = 0
        self._kept.clear()

    def distance(self, seq: int) -> int:
        """Return how far `seq` is ahead of the next byte; negative: behind."""
        assert self.next is not None
        return ((seq - self.next + HALF) & MASK) - HALF

    def add(self, seq: int, flags: int, payload: bytes, t_ns: int) -> list[tuple[bytes, int, int]]:
        """Return the pieces that are in order now, as `(payload, t_ns, flags)`; `next` is behind them.

        A piece that waited for another one has the later time. Raises LostSyncError.
        """
        ahead = self.distance(seq)
        if ahead > 0:
            self._keep(self._position + ahead, flags, payload, t_ns)
            return []
        pieces: list[tuple[bytes, int, int]] = []
        self._take(pieces, ahead, payload, t_ns, flags)
        while self._kept and self._kept[0][0] <= self._position:
            position, kept_ns, payload, flags = heappop(self._kept)
            self._early.used -= len(payload)
            self._early_bytes -= len(payload)
            self._take(pieces, position - self._position, payload, max(t_ns, kept_ns), flags)
        if not self._kept:
            self.hole_ns = 0
        return pieces

    def _take(
        self, pieces: list[tuple[bytes, int, int]], behind: int, payload: bytes, t_ns: int, flags: int
    ) -> None:
        """Append a piece that begins at `next`, or `-behind` bytes before it."""
        if behind < 0:
            # One byte just before `next` is a keep-alive probe, whose content means nothing.
            if len(payload) > 1 or behind != -1:
                self._compare(-behind, payload)
            n = len(payload)
            payload = payload[-behind:]
            if not payload and n < -behind:
                return  # all of it, and its FIN, came before
        assert self.next is not None
        self.next = (self.next + len(payload)) & MASK
        self._position += len(payload)
        if payload:
            self.last = payload
        pieces.append((payload, t_ns, flags))

    def _compare(self, behind: int, payload: bytes) -> None:
        """Raise LostSyncError if bytes before `next` differ from those that were returned last."""
        last = self.last
        n = min(behind, len(last))
        mine = payload[behind - n : behind]  # where it overlaps `last`
        start = len(last) - n
        if mine != last[start : start + len(mine)]:
            raise LostSyncError("contradicting")

    def _keep(self, position: int, flags: int, payload: bytes, t_ns: int) -> None:
        if not self._kept:
            self.hole_ns = t_ns
        early = self._early
        early.used += len(payload)
        self._early_bytes += len(payload)
        heappush(self._kept, (position, t_ns, payload, flags))
        if (
            len(self._kept) > EARLY_SEGMENTS_MAX
            or self._early_bytes > EARLY_BYTES_MAX
            or early.used > early.limit
        ):
            raise LostSyncError("packets_lost")
