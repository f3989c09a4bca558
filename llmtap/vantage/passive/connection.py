"""Follow TCP connections by their packets, and pass both byte streams in order to `conversation.py`.

`watcher.py` and `file_vantage.py` pass IP packets to a `ConnectionTable`, which assigns each one to its
`Connection`. The number of connections is bounded; silent ones are forgotten.

A hole is a range of bytes that were in no captured packet. It is final, because the bytes will not come any
more, if the receiver acknowledged them, if the packet ring has overflowed recently, if a later request
begins, or after HOLE_NS. Then all exchanges under way are dropped, and measuring resumes at a segment that
begins a request. If a client pipelines requests at that time, a request could get the response of an earlier
one; clients of LLM servers do not pipeline.

The times within a connection never decrease. If a packet's timestamp is a little earlier than that of the
previous packet (queues of an adapter, several interfaces in one file), the packet gets the time of the
previous one, and the difference counts as an error of all times of the exchange. After a step of the clock,
the exchanges under way are dropped.
"""

import re
from collections import OrderedDict
from collections.abc import Collection
from ipaddress import ip_address
from mmap import mmap
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
    parse_segment,
    reverse_flow,
)

HOLE_NS: Final = 3_000_000_000
"""Age at which a hole is final. Inside a cluster, even several retransmissions take less time."""
_REQUEST_LINE: Final = re.compile(rb"[A-Z]{3,16} [\x21-\x7e]+ HTTP/1\.[01]\r\n")
"""Matches a request line. No JSON body contains such a line, because JSON escapes CR and LF."""
_TLS_RECORD: Final = re.compile(rb"[\x14-\x18]\x03[\x00-\x04]")
CONNECTIONS_MAX: Final = 65_536
"""Maximum number of connections in a table, which takes about 100 MB if all of them have had requests."""
SILENT_NS: Final = 600_000_000_000
"""Time without a packet after which a connection is forgotten; its next request makes it known again."""
LOST_SILENT_NS: Final = 30_000_000_000
"""Time without a packet after which an idle connection is forgotten if its end is possibly among lost
packets."""
DISORDER_NS_MAX: Final = 10_000_000
"""Maximum time by which a packet can be stamped before its predecessor. A longer time shows a step of the
clock, because queues of an adapter and of the kernel hold packets for less."""
CLOCK_STEP_NS: Final = 1_000_000_000
"""If a packet is stamped earlier than the latest packet of all connections by more than this time, the clock
was set: a program that captures several interfaces delays packets for less."""
_SPECIAL: Final = FIN | SYN | RST | CUT_OFF


def begins_request(payload: bytes) -> bool:
    """Return whether the payload of a segment begins with a complete request line."""
    return _REQUEST_LINE.match(payload) is not None


class WatchCounts:
    """Counts of connections by how they were followed, and of bytes that were in no captured packet."""

    __slots__ = ("connections", "missing_bytes")

    def __init__(self) -> None:
        self.connections: dict[str, int] = {}
        """Number of connections by kind. With a request: `followed` from their beginning, or `joined` later.
        Without a request: `encrypted`, `http2`, `not_http`. `overflow`: number of packets of connections that
        did not fit into the table."""
        self.missing_bytes = 0  # bytes that were in no captured packet

    def add(self, kind: str) -> None:
        """Count a connection by its kind, a key of `connections`."""
        self.connections[kind] = self.connections.get(kind, 0) + 1


class Connection:
    """One TCP connection. `client` and `server` are the byte streams that these two sides send."""

    __slots__ = (
        "_conversation",
        "_counts",
        "_is_unchecked",
        "_uncounted_kind",
        "client",
        "clock_steps",
        "ignored",
        "last_ns",
        "over",
        "ring_lost",
        "server",
    )

    def __init__(self, sink: FrameSink, counts: WatchCounts, early: EarlyBytes, kind: str) -> None:
        self.client = TcpDirection(early, is_up=True)
        self.server = TcpDirection(early, is_up=False)
        self.client.peer, self.server.peer = self.server, self.client
        self.over = False
        """Whether both sides have closed the connection."""
        self.ignored = False
        """Whether the connection carries another protocol than HTTP/1.1, so that its packets are ignored."""
        self.ring_lost = False
        """Whether the packet ring overflowed recently, so that missing bytes will not come any more."""
        self.last_ns = 0  # time of the latest packet
        self.clock_steps = 0
        """How often the clock had been set before the latest packet of the connection."""
        self._counts = counts
        self._conversation = Conversation(sink)
        self._is_unchecked = True  # whether no payload has been checked for TLS
        self._uncounted_kind = kind  # kind (WatchCounts) to count at the first request; "": already counted

    @property
    def has_request(self) -> bool:
        """Whether a request has begun on the connection."""
        return self._conversation.began

    def may_have_ended(self, loss_ns: int) -> bool:
        """Return whether the end of the connection is possibly among lost packets.

        That is so if packets were lost after its latest packet (`loss_ns`: time of the latest loss), or if
        its position in the stream is unknown. False while an exchange is under way.
        """
        if self.ignored or self._conversation.is_busy:
            return False
        return self.client.next_seq is None or self.last_ns < loss_ns

    def add_segment(
        self, way: TcpDirection, seq: int, ack: int, flags: int, window: int, payload: bytes, t_ns: int
    ) -> None:
        """Process a segment that the side `way` sent."""
        peer = way.peer
        if flags & RST:
            self._reset(way, seq, t_ns)
            return
        if self.ignored:
            self.over = bool(flags & FIN)
            return
        if flags & SYN:
            if way.next_seq is None:
                way.begin(seq + 1)
            if flags & ACK and peer.next_seq is None:
                peer.begin(ack)
            seq = (seq + 1) & 0xFFFFFFFF
            if not payload:
                return
        if flags & ACK and peer.next_seq is not None and (unseen := peer.distance(ack)) > 0:
            # The side `way` acknowledges bytes of its peer that were not captured, so they will not come.
            self.drop_exchanges(t_ns, "packets_lost", unseen)
        elif way.is_up and way.next_seq is not None and begins_request(payload) and way.distance(seq) > 0:
            # A new request begins, so the missing bytes before it will not come.
            self.drop_exchanges(t_ns, "packets_lost", way.distance(seq))
        if way.next_seq is None:
            if not way.is_up or not begins_request(payload):
                self._check_first_payload(payload)
                return
            way.begin(seq)
            peer.begin(ack)
        elif way.is_up and peer.next_seq is None and payload:
            peer.begin(ack)
        if way.is_up and not window:
            self._conversation.on_window_closed(t_ns)
        try:
            pieces = way.add(seq, flags, payload, t_ns)
        except LostSyncError as exc:
            self.drop_exchanges(t_ns, exc.reason)
            return
        if not pieces and self.ring_lost and way.hole_ns:
            self.drop_exchanges(t_ns, "packets_lost")
            return
        for piece, piece_ns, piece_flags in pieces:
            if piece:
                self.add_in_order(way, piece, piece_ns)
            if way.next_seq is None:
                return
            if piece_flags & CUT_OFF:
                self.drop_exchanges(piece_ns, "packets_cut")
                return
            if piece_flags & FIN:
                way.next_seq = (way.next_seq + 1) & 0xFFFFFFFF
                self._conversation.on_fin(piece_ns, by_client=way.is_up)
                self.over = self._conversation.over
                if self.over:
                    return

    def time_of(self, t_ns: int, clock_steps: int) -> int:
        """Return the time to use for a packet that was stamped before its predecessor, or after a step of the
        clock, which drops the exchanges under way."""
        back_ns = self.last_ns - t_ns
        if clock_steps == self.clock_steps and back_ns <= DISORDER_NS_MAX:
            self._conversation.on_time_step_back(back_ns)
            return self.last_ns
        self.clock_steps = clock_steps
        if self._conversation.is_busy or self.client.hole_ns or self.server.hole_ns:
            self.drop_exchanges(t_ns, "clock_step")
        return t_ns

    def add_in_order(self, way: TcpDirection, payload: bytes, t_ns: int) -> None:
        """Process the next bytes that the side `way` sent."""
        try:
            if way.is_up:
                self._conversation.feed_request(payload, t_ns)
                if self._uncounted_kind and self._conversation.began:
                    self._counts.add(self._uncounted_kind)
                    self._uncounted_kind = ""
            else:
                self._conversation.feed_response(payload, t_ns)
        except UnfollowableError as exc:
            self._ignore(exc.kind)
            self.drop_exchanges(t_ns, "not_understood")
        except PeerProtocolError:
            self.drop_exchanges(t_ns, "not_understood")

    def drop_exchanges(self, t_ns: int, reason: str, missing_bytes: int = 0) -> None:
        """Drop the exchanges under way; measuring resumes at the next request."""
        self._counts.missing_bytes += missing_bytes
        self._conversation.drop_exchanges(t_ns, reason)
        self.client.forget()
        self.server.forget()

    def sweep(self, t_ns: int) -> None:
        """Drop the exchanges under way if a hole is too old."""
        for way in (self.client, self.server):
            if way.hole_ns and t_ns - way.hole_ns > HOLE_NS:
                self.drop_exchanges(t_ns, "packets_lost")

    def give_up(self, t_ns: int, reason: str) -> None:
        """Stop following the connection."""
        self._conversation.give_up(t_ns, reason)
        self.client.forget()
        self.server.forget()

    def release(self) -> None:
        """Drop the references between the two directions, so that no garbage collection is needed."""
        for way in (self.client, self.server):
            way.forget()
            del way.peer

    def _reset(self, way: TcpDirection, seq: int, t_ns: int) -> None:
        """Handle an RST, which ends the connection unless its position is wrong."""
        ahead = 0 if way.next_seq is None else way.distance(seq)
        if ahead < -1:
            return  # RFC 5961 3.2: the receiver ignores such an RST. (After a FIN, -1 is the right position.)
        if ahead > 0:
            self.drop_exchanges(t_ns, "packets_lost", ahead)
        self._conversation.on_rst(t_ns, by_client=way.is_up)
        self.over = True

    def _check_first_payload(self, payload: bytes) -> None:
        """Ignore the connection if its first captured payload is TLS. Called for payload before the first
        request if the start of the connection was not captured."""
        if self._is_unchecked and payload:
            self._is_unchecked = False
            if _TLS_RECORD.match(payload):
                self._ignore("encrypted")

    def _ignore(self, kind: str) -> None:
        """Ignore the connection from now on. `kind`: why, as counted."""
        self.ignored = True
        self._counts.add(kind)


def pack_addresses(addresses: Collection[str]) -> frozenset[bytes]:
    """Return IPv4 and IPv6 addresses as the bytes in packets. Raises ValueError for other texts."""
    return frozenset(ip_address(address.partition("%")[0]).packed for address in addresses)


class ConnectionTable:
    """Connections of one interface or file, each with its state.

    Args:
        sink: gets the frames of all exchanges.
        ports: ports of the servers; empty: any, and the side that sends the first request is the client.
        hosts: packed addresses of the servers; empty: any.
        local: packed addresses of this host, to set `sides`; empty: `sides` stays empty.
        counts: counts that several tables share; None: the table has its own.
    """

    def __init__(
        self,
        sink: FrameSink,
        ports: Collection[int] = (),
        hosts: frozenset[bytes] = frozenset(),
        *,
        local: frozenset[bytes] = frozenset(),
        counts: WatchCounts | None = None,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self.counts = WatchCounts() if counts is None else counts
        self.sides: set[str] = set()
        """Places of this host in the captured connections: `client`, `server`, `host` (both) or `middle`
        (neither)."""
        self._sink = sink
        self._ports = frozenset(port.to_bytes(2) for port in ports)
        """Ports of the servers to watch, each as two bytes in network order; empty: all."""
        self._hosts = hosts
        """Addresses of the servers to watch; empty: all."""
        self._local = local
        """Addresses of this host, which show whether it is the client or the server."""
        self._early_bytes = EarlyBytes()
        """Memory of all segments that came too early, with its limit."""
        self._directions: dict[bytes, tuple[Connection, TcpDirection]] = {}
        """By flow (addresses and ports): its connection, and the direction in it."""
        self._without_request: OrderedDict[bytes, Connection] = OrderedDict()
        """By flow from the client: connections without a request at their last check, the oldest first."""
        self._connections_max = connections_max
        self._ring_lost = False
        """Whether the ring lost packets recently, so that missing bytes never come."""
        self._ring_lost_ns = 0
        """Time of the latest lost packet; connections can have ended then unseen."""
        self._clock_steps = 0
        """How often the clock of the packets was set."""
        self.now_ns = 0
        """Latest time of a packet since the latest step of the clock."""

    def __len__(self) -> int:
        return len(self._directions) // 2

    def add_packet(self, buf: bytes | mmap, start: int, stop: int, t_ns: int) -> None:
        """Process the IP packet between `start` and `stop` in `buf`, which was captured at `t_ns`."""
        segment = parse_segment(buf, start, stop)
        if segment is None:
            return
        flow, seq, ack, flags, window, start, stop = segment
        member = self._directions.get(flow)
        if member is None:
            member = self._begin(flow, flags, buf[start:stop])
            if member is None:
                return
        connection, way = member
        if t_ns >= self.now_ns:
            self.now_ns = t_ns
        elif self.now_ns - t_ns > CLOCK_STEP_NS:
            self.now_ns = t_ns
            self._clock_steps += 1
        if t_ns < connection.last_ns or connection.clock_steps != self._clock_steps:
            t_ns = connection.time_of(t_ns, self._clock_steps)
        if (
            seq == way.next_seq
            and start < stop
            and ack == way.peer.next_seq
            and not way.hole_ns
            and not flags & _SPECIAL
        ):
            # Fast path for nearly every segment: it is the next of its direction, and no bytes are missing.
            payload = buf[start:stop]
            way.next_seq = (seq + stop - start) & 0xFFFFFFFF
            way.last_payload = payload
            connection.last_ns = t_ns
            connection.add_in_order(way, payload, t_ns)
            return
        if (
            flags & SYN
            and way.is_up
            and (connection.ignored or way.next_seq not in (None, (seq + 1) & 0xFFFFFFFF))
        ):
            # A new connection with the same ports: the end of the previous one was not captured.
            connection.give_up(t_ns, "packets_lost")
            self._forget(flow)
            member = self._begin(flow, flags, b"")
            if member is None:
                return
            connection, way = member
        connection.last_ns = t_ns
        connection.add_segment(way, seq, ack, flags, window, buf[start:stop], t_ns)
        if connection.over:
            self._forget(flow if way.is_up else reverse_flow(flow))

    def on_ring_loss(self, t_ns: int, *, now: bool) -> None:
        """Set whether the ring lost packets recently (`now`). While it did, all holes are final at once."""
        if now:
            self._ring_lost_ns = t_ns
        if now or self._ring_lost:
            self._ring_lost = now
            for connection in self._connections().values():
                connection.ring_lost = now
                if now and (connection.client.hole_ns or connection.server.hole_ns):
                    connection.drop_exchanges(t_ns, "packets_lost")

    def sweep(self, t_ns: int) -> None:
        """Drop the exchanges of connections with an old hole, and forget silent connections."""
        for flow, connection in self._connections().items():
            connection.sweep(t_ns)
            silent_ns = t_ns - connection.last_ns
            if silent_ns > SILENT_NS or (
                silent_ns > LOST_SILENT_NS and connection.may_have_ended(self._ring_lost_ns)
            ):
                connection.give_up(t_ns, "silent")
                self._forget(flow)

    def close(self, t_ns: int) -> None:
        """Drop the running exchanges, because no more packets will come, and forget all connections."""
        for flow, connection in self._connections().items():
            connection.give_up(max(t_ns, connection.last_ns), "watch_ended")
            self._forget(flow)

    def _connections(self) -> dict[bytes, Connection]:
        return {flow: connection for flow, (connection, way) in self._directions.items() if way.is_up}

    def _serves(self, address: bytes, port: bytes) -> bool:
        """Return whether this address and port are those of a server that is to be watched."""
        return (not self._ports or port in self._ports) and (not self._hosts or address in self._hosts)

    def _begin(self, flow: bytes, flags: int, payload: bytes) -> tuple[Connection, TcpDirection] | None:
        """Follow a new connection. Return None if its server is not watched, or if it cannot be followed."""
        n = (len(flow) - 4) // 2
        source, target = flow[:n], flow[n : 2 * n]
        up = self._serves(target, flow[-2:])
        if up == self._serves(source, flow[-4:-2]):
            if not up:
                return None
            # Either end could be the server. Only a SYN or the first bytes of a request show the direction.
            if not flags & SYN and not begins_request(payload):
                return None
            up = not (flags & SYN and flags & ACK)
        if not payload and not flags & SYN:
            return None
        if len(self._directions) >= 2 * self._connections_max and not self._make_room():
            self.counts.add("overflow")
            return None
        if not up:
            flow, source, target = reverse_flow(flow), target, source
        kind = "followed" if flags & SYN else "joined"
        connection = Connection(self._sink, self.counts, self._early_bytes, kind)
        connection.ring_lost = self._ring_lost
        connection.clock_steps = self._clock_steps
        from_client, from_server = (connection, connection.client), (connection, connection.server)
        self._directions[flow], self._directions[reverse_flow(flow)] = from_client, from_server
        self._without_request[flow] = connection
        if self._local:
            by_client, by_server = source in self._local, target in self._local
            self.sides.add(
                "host"
                if by_client and by_server
                else "client"
                if by_client
                else "server"
                if by_server
                else "middle"
            )
        return from_client if up else from_server

    def _make_room(self) -> bool:
        """Forget the oldest connection without a request, for a new one. Return False if there is none."""
        while self._without_request:
            flow, connection = self._without_request.popitem(last=False)
            if not connection.has_request:
                self._forget(flow)
                return True
        return False

    def _forget(self, flow: bytes) -> None:
        """Forget a connection, given by the flow from its client."""
        connection, _ = self._directions.pop(flow)
        del self._directions[reverse_flow(flow)]
        self._without_request.pop(flow, None)
        connection.release()
