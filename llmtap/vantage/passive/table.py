"""Table of the TCP connections on one interface or in one file: assigns each packet to its connection.

`watcher.py` and `file_vantage.py` pass IP packets to a `ConnectionTable`; a `Connection` (`connection.py`)
for each TCP connection to the server turns them into frames. The number of connections is bounded; silent
ones are forgotten.
"""

import socket
from collections import OrderedDict
from collections.abc import Collection
from mmap import mmap
from typing import Final

from llmtap.vantage.passive.connection import Connection, WatchCounts, begins_request
from llmtap.vantage.passive.conversation import FrameSink
from llmtap.vantage.passive.segments import (
    ACK,
    CUT_OFF,
    FIN,
    RST,
    SYN,
    EarlyBytes,
    TcpDirection,
    parse_segment,
    reverse_flow,
)

CONNECTIONS_MAX: Final = 65_536
"""About 100 MB where all of them have asked."""
SILENT_NS: Final = 600_000_000_000
"""A connection without a packet for this time is forgotten; it is joined again at its next request."""
_SPECIAL: Final = FIN | SYN | RST | CUT_OFF


def pack_addresses(addresses: Collection[str]) -> frozenset[bytes]:
    """Return IPv4 and IPv6 addresses as in packets. Raises OSError for text that is no address."""
    packed = []
    for address in addresses:
        bare = address.partition("%")[0]
        packed.append(socket.inet_pton(socket.AF_INET6 if ":" in bare else socket.AF_INET, bare))
    return frozenset(packed)


class ConnectionTable:
    """Connections of one interface or file, each with its state.

    Args:
        sink: gets the frames of all exchanges.
        ports: of the servers; empty: any, told by who sends the first request.
        hosts: packed addresses of the servers; empty: any.
        local: packed addresses of this host, to tell which side of the network this is.
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
        """Where the connections were seen: `client`, `server`, `host` (both), `middle`."""
        self._sink = sink
        self._ports = frozenset(port.to_bytes(2) for port in ports)
        self._hosts = hosts
        self._local = local
        self._early = EarlyBytes()
        self._ways: dict[bytes, tuple[Connection, TcpDirection]] = {}
        self._silent_ones: OrderedDict[bytes, Connection] = OrderedDict()
        """By flow of the client: those that had not asked when they were last looked at, oldest first."""
        self._connections_max = connections_max
        self._ring_lost = False

    def __len__(self) -> int:
        return len(self._ways) // 2

    def packet(self, buf: bytes | mmap, start: int, stop: int, t_ns: int) -> None:
        """Take the IP packet between `start` and `stop`, which passed at `t_ns`."""
        segment = parse_segment(buf, start, stop)
        if segment is None:
            return
        flow, seq, ack, flags, window, start, stop = segment
        found = self._ways.get(flow)
        if found is None:
            found = self._begin(flow, flags, buf[start:stop])
            if found is None:
                return
        connection, way = found
        if (
            seq == way.next
            and start < stop
            and ack == way.peer.next
            and not way.hole_ns
            and not flags & _SPECIAL
        ):
            # Nearly every segment: the next of its direction, while nothing is missing.
            payload = buf[start:stop]
            way.next = (seq + stop - start) & 0xFFFFFFFF
            way.last = payload
            connection.last_ns = t_ns
            connection.take(way, payload, t_ns)
            return
        if (
            flags & SYN
            and way.is_up
            and (connection.ignored or way.next not in (None, (seq + 1) & 0xFFFFFFFF))
        ):
            # The same ports again: the end of the connection before was missed.
            connection.give_up(t_ns, "packets_lost")
            self._forget(flow)
            found = self._begin(flow, flags, b"")
            if found is None:
                return
            connection, way = found
        connection.last_ns = t_ns
        connection.segment(way, seq, ack, flags, window, buf[start:stop], t_ns)
        if connection.over:
            self._forget(flow if way.is_up else reverse_flow(flow))

    def ring_lost(self, t_ns: int, *, now: bool) -> None:
        """The ring lost packets (`now`), or has not for a while. Until then a hole is final at once."""
        if now or self._ring_lost:
            self._ring_lost = now
            for connection in self._connections().values():
                connection.ring_lost = now
                if now and (connection.client.hole_ns or connection.server.hole_ns):
                    connection.lose(t_ns, "packets_lost")

    def sweep(self, t_ns: int) -> None:
        """Drop exchanges with old holes, and forget silent connections."""
        for flow, connection in self._connections().items():
            connection.sweep(t_ns)
            if t_ns - connection.last_ns > SILENT_NS:
                connection.give_up(t_ns, "silent")
                self._forget(flow)

    def close(self, t_ns: int) -> None:
        """No more packets: drop the exchanges under way."""
        for flow, connection in self._connections().items():
            connection.give_up(t_ns, "watch_ended")
            self._forget(flow)

    def _connections(self) -> dict[bytes, Connection]:
        return {flow: connection for flow, (connection, way) in self._ways.items() if way.is_up}

    def _serves(self, address: bytes, port: bytes) -> bool:
        return (not self._ports or port in self._ports) and (not self._hosts or address in self._hosts)

    def _begin(self, flow: bytes, flags: int, payload: bytes) -> tuple[Connection, TcpDirection] | None:
        """Follow a connection that was not known; return None where it is none of ours."""
        n = (len(flow) - 4) // 2
        source, target = flow[:n], flow[n : 2 * n]
        up = self._serves(target, flow[-2:])
        if up == self._serves(source, flow[-4:-2]):
            if not up:
                return None
            # Either end could be the server's: only a beginning tells.
            if not flags & SYN and not begins_request(payload):
                return None
            up = not (flags & SYN and flags & ACK)
        if not payload and not flags & SYN:
            return None
        if len(self._ways) >= 2 * self._connections_max and not self._make_room():
            self.counts.add("overflow")
            return None
        if not up:
            flow, source, target = reverse_flow(flow), target, source
        kind = "followed" if flags & SYN else "joined"
        connection = Connection(self._sink, self.counts, self._early, kind)
        connection.ring_lost = self._ring_lost
        from_client, from_server = (connection, connection.client), (connection, connection.server)
        self._ways[flow], self._ways[reverse_flow(flow)] = from_client, from_server
        self._silent_ones[flow] = connection
        if self._local:
            by_client, by_server = source in self._local, target in self._local
            self.sides.add(
                "host" if by_client and by_server
                else "client" if by_client else "server" if by_server else "middle"
            )  # fmt: skip
        return from_client if up else from_server

    def _make_room(self) -> bool:
        """Forget the oldest connection that has not asked anything."""
        while self._silent_ones:
            flow, connection = self._silent_ones.popitem(last=False)
            if not connection.has_asked:
                self._forget(flow)
                return True
        return False

    def _forget(self, flow: bytes) -> None:
        """Forget a connection by the flow of its client."""
        connection, _ = self._ways.pop(flow)
        del self._ways[reverse_flow(flow)]
        self._silent_ones.pop(flow, None)
        connection.release()
