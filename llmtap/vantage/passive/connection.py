"""Follow one TCP connection from its packets, and pass both byte streams in order to `conversation.py`.

Bytes that no packet brought are a hole. A hole is final if the receiver acknowledged the missing bytes, if
the packet ring has overflowed lately, if a later request begins, or after HOLE_NS. Then all exchanges under
way are dropped, and measuring resumes at a segment that begins a request. If a client pipelines requests at
that time, a request could get the response of an earlier one; clients of LLM servers do not pipeline.
"""

import re
from typing import Final

from llmtap.errors import PeerProtocolError
from llmtap.vantage.passive.conversation import Conversation, FrameSink, UnfollowableError
from llmtap.vantage.passive.segments import (
    ACK,
    CUT_OFF,
    FIN,
    RST,
    SYN,
    EarlyBytes,
    LostSyncError,
    TcpDirection,
)

HOLE_NS: Final = 3_000_000_000
"""Longer than several retransmissions take inside a cluster."""
_REQUEST_LINE: Final = re.compile(rb"[A-Z]{3,16} [\x21-\x7e]+ HTTP/1\.[01]\r\n")
"""No JSON body contains such a line: there CR and LF are escaped."""
_TLS_RECORD: Final = re.compile(rb"[\x14-\x18]\x03[\x00-\x04]")


def begins_request(payload: bytes) -> bool:
    """Return whether a segment begins with a whole request line."""
    return _REQUEST_LINE.match(payload) is not None


class WatchCounts:
    """Counts of connections by how they were followed, and of bytes that no packet brought."""

    __slots__ = ("connections", "missing_bytes")

    def __init__(self) -> None:
        self.connections: dict[str, int] = {}
        """With a request: `followed` from their beginning, or `joined` later. Without one: `encrypted`,
        `http2`, `not_http`. `overflow`: packets of connections for which the table had no room."""
        self.missing_bytes = 0

    def add(self, kind: str) -> None:
        self.connections[kind] = self.connections.get(kind, 0) + 1


class Connection:
    """One TCP connection; `client` and `server` are its two byte streams."""

    __slots__ = (
        "_conversation", "_counts", "_fresh", "_uncounted", "client", "ignored", "last_ns", "over",
        "ring_lost", "server",
    )  # fmt: skip

    def __init__(self, sink: FrameSink, counts: WatchCounts, early: EarlyBytes, kind: str) -> None:
        self.client = TcpDirection(early, is_up=True)
        self.server = TcpDirection(early, is_up=False)
        self.client.peer, self.server.peer = self.server, self.client
        self.over = False
        """Both sides have closed the connection."""
        self.ignored = False
        """It does not carry HTTP/1.1."""
        self.ring_lost = False
        """The ring has overflowed lately: missing bytes will not come."""
        self.last_ns = 0
        self._counts = counts
        self._conversation = Conversation(sink)
        self._fresh = True
        self._uncounted = kind  # until its first request

    @property
    def has_asked(self) -> bool:
        """Whether a request has begun on it."""
        return self._conversation.began

    def segment(
        self, way: TcpDirection, seq: int, ack: int, flags: int, window: int, payload: bytes, t_ns: int
    ) -> None:
        """Process a segment from one side."""
        peer = way.peer
        if flags & RST:
            self._reset(way, seq, t_ns)
            return
        if self.ignored:
            self.over = bool(flags & FIN)
            return
        if flags & SYN:
            if way.next is None:
                way.begin(seq + 1)
            if flags & ACK and peer.next is None:
                peer.begin(ack)
            seq = (seq + 1) & 0xFFFFFFFF
            if not payload:
                return
        if flags & ACK and peer.next is not None and (unseen := peer.distance(ack)) > 0:
            self.lose(t_ns, "packets_lost", unseen)  # the receiver has what did not come here
        elif way.is_up and way.next is not None and (n := way.distance(seq)) > 0 and begins_request(payload):
            self.lose(t_ns, "packets_lost", n)  # what came before was answered
        if way.next is None:
            if not way.is_up or not begins_request(payload):
                self._look(payload)
                return
            way.begin(seq)
            peer.begin(ack)
        elif way.is_up and peer.next is None and payload:
            peer.begin(ack)
        if way.is_up and not window:
            self._conversation.window_closed(t_ns)
        try:
            pieces = way.add(seq, flags, payload, t_ns)
        except LostSyncError as exc:
            self.lose(t_ns, exc.reason)
            return
        if not pieces and self.ring_lost and way.hole_ns:
            self.lose(t_ns, "packets_lost")
            return
        for piece, piece_ns, piece_flags in pieces:
            if piece:
                self.take(way, piece, piece_ns)
            if way.next is None:
                return
            if piece_flags & CUT_OFF:
                self.lose(piece_ns, "packets_cut")
                return
            if piece_flags & FIN:
                way.next = (way.next + 1) & 0xFFFFFFFF
                self._conversation.ended(piece_ns, by_client=way.is_up)
                self.over = self._conversation.over
                if self.over:
                    return

    def take(self, way: TcpDirection, payload: bytes, t_ns: int) -> None:
        """Process bytes that are in order."""
        try:
            if way.is_up:
                self._conversation.request(payload, t_ns)
                if self._uncounted and self._conversation.began:
                    self._counts.add(self._uncounted)
                    self._uncounted = ""
            else:
                self._conversation.response(payload, t_ns)
        except UnfollowableError as exc:
            self._ignore(exc.kind)
            self.lose(t_ns, "not_understood")
        except PeerProtocolError:
            self.lose(t_ns, "not_understood")

    def lose(self, t_ns: int, reason: str, missing_bytes: int = 0) -> None:
        """Drop the exchanges under way; measuring resumes at the next request."""
        self._counts.missing_bytes += missing_bytes
        self._conversation.lose(t_ns, reason)
        self.client.forget()
        self.server.forget()

    def sweep(self, t_ns: int) -> None:
        """Drop the exchanges under way if a hole is too old."""
        for way in (self.client, self.server):
            if way.hole_ns and t_ns - way.hole_ns > HOLE_NS:
                self.lose(t_ns, "packets_lost")

    def give_up(self, t_ns: int, reason: str) -> None:
        """Stop following the connection."""
        self._conversation.give_up(t_ns, reason)
        self.client.forget()
        self.server.forget()

    def release(self) -> None:
        """Drop the references between the parts, so that no garbage collector is needed."""
        for way in (self.client, self.server):
            way.forget()
            del way.peer

    def _reset(self, way: TcpDirection, seq: int, t_ns: int) -> None:
        ahead = 0 if way.next is None else way.distance(seq)
        if ahead < -1:
            return  # RFC 5961 3.2: the receiver ignores it. A FIN may be one behind.
        if ahead > 0:
            self.lose(t_ns, "packets_lost", ahead)
        self._conversation.reset(t_ns, by_client=way.is_up)
        self.over = True

    def _look(self, payload: bytes) -> None:
        """Look at the first payload of a connection that was joined in the middle."""
        if self._fresh and payload:
            self._fresh = False
            if _TLS_RECORD.match(payload):
                self._ignore("encrypted")

    def _ignore(self, kind: str) -> None:
        self.ignored = True
        self._counts.add(kind)
