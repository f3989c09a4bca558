"""Packets made by hand, and a sink that makes Exchanges of the frames."""

import socket
import struct
from collections import Counter
from typing import Any

from llmtap.channel import Ledger
from llmtap.channel.frames import Closing, FrameKind, Hello
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.protocol.http1 import RequestHead
from llmtap.protocol.inference import SkipRules
from llmtap.vantage.passive.connection import ConnectionTable
from llmtap.vantage.passive.segments import ACK, FIN, SYN

ASK = b'POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 15\r\n\r\n{"stream":true}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PORT = 8000


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


EVENTS = [chunk(b'data: {"choices":[{"index":0,"delta":{"content":"w%d "}}]}\n\n' % n) for n in range(5)]
LAST = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
PIECES = (HEAD, *EVENTS, LAST)
ANSWER = b"".join(PIECES)
COMPLETE = ("complete", 200, 6)


class Sink:
    """A FrameSink that measures on the spot, with the ledger of the channel."""

    def __init__(self) -> None:
        self.done: list[Exchange] = []
        self.ledger = Ledger()
        self.kinds: list[int] = []
        hello = Hello(relay="wire", pid=1, clock="packet", anchor_mono_ns=0, anchor_wall_ns=0)
        self.assembler = Assembler(hello, self)  # type: ignore[arg-type]

    def _frame(self, *frame: Any) -> None:
        self.kinds.append(frame[0])
        self.assembler.digest([frame])

    def count_if_skipped(self, head: RequestHead) -> bool:
        return SkipRules(["/health"]).rule_of_head(head.method, head.target, head.headers) is not None

    def open(self, t_ns: int, data: bytes, extra_ns: int = 0, kind: int = FrameKind.OPEN) -> tuple[int, bool]:
        seq = self.ledger.open()
        self.ledger.begin(seq)
        self._frame(kind, seq, t_ns, extra_ns, data)
        return seq, True

    def offer(self, kind: int, seq: int, t_ns: int, extra_ns: int, data: bytes = b"") -> bool:
        self._frame(kind, seq, t_ns, extra_ns, data)
        return True

    def close_exchange(self, seq: int, t_ns: int, closing: Closing) -> None:
        import msgspec

        self.ledger.close(seq, 1)
        self.ledger.acknowledge(1)
        self._frame(FrameKind.CLOSE, seq, t_ns, 0, msgspec.json.encode(closing))

    def drop(self, seq: int, t_ns: int, reason: str) -> None:
        assert seq in self.ledger.live
        self.ledger.drop(seq, reason)
        self._frame(FrameKind.DROP, seq, t_ns, 0, b"")

    @property
    def dropped(self) -> dict[str, int]:
        return self.ledger.dropped

    # What the assembler calls.

    def observe(self, relay: str, seq: int, t_ns: int, wall_ns: int, head: bytes, clock: str) -> Observer:
        return Observer(relay, seq, t_ns, wall_ns, head, clock)

    def on_open(self) -> None: ...
    def on_discard(self, n: int = 1) -> None: ...
    def on_end(self, x: Exchange) -> None:
        self.done.append(x)

    def on_error(self, kind: str, error: object) -> None:
        raise AssertionError(kind, error)

    def said(self) -> list[tuple[str, int | None, int]]:
        """Outcome, status and number of events of each exchange that was measured."""
        ledger = self.ledger
        assert ledger.opened == ledger.measured + sum(ledger.dropped.values()) + ledger.unsettled
        return [(x.outcome.value, x.status, len(x.timeline.events)) for x in self.done]


class Wire:
    """A connection whose packets pass 1 ms apart. `table` may be a list, which keeps them."""

    def __init__(
        self, table: ConnectionTable | list[tuple[int, bytes]], *, v6: bool = False, client_port: int = 40_000
    ) -> None:
        self.table, self.v6, self.t_ns = table, v6, 1_000_000_000
        self.ports = (client_port, PORT)
        self.at = [0xFFFFFFF0, 0x7FFFFFF0]  # the client's numbers wrap on their way

    def make(
        self, side: int, data: bytes = b"", flags: int = ACK, seq: int | None = None, window: int = 512
    ) -> bytes:
        """The next packet from the client (0) or the server (1)."""
        if seq is None:
            seq = self.at[side]
            self.at[side] = (seq + len(data) + (1 if flags & (SYN | FIN) else 0)) & 0xFFFFFFFF
        ports = struct.pack("!HH", *(self.ports if side == 0 else self.ports[::-1]))
        tcp = ports + struct.pack("!IIBBHHH", seq, self.at[1 - side], 0x50, flags, window, 0, 0) + data
        if self.v6:
            ends = [socket.inet_pton(socket.AF_INET6, a) for a in ("fd00::1", "fd00::2")]
            return struct.pack("!IHBB", 6 << 28, len(tcp), 6, 64) + ends[side] + ends[1 - side] + tcp
        ends = [socket.inet_aton(a) for a in ("10.0.0.1", "10.0.0.2")]
        head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 1, 0x4000, 64, 6, 0)
        return head + ends[side] + ends[1 - side] + tcp

    def pass_(self, *packets: bytes) -> None:
        for packet in packets:
            self.t_ns += 1_000_000
            if isinstance(self.table, list):
                self.table.append((self.t_ns, packet))
            else:  # padded, as on a link
                self.table.add_packet(packet + b"\0\0", 0, len(packet) + 2, self.t_ns)

    def up(self, data: bytes = b"", flags: int = ACK, **about: int) -> None:
        self.pass_(self.make(0, data, flags, **about))

    def down(self, *datas: bytes, flags: int = ACK, **about: int) -> None:
        for data in datas or (b"",):
            self.pass_(self.make(1, data, flags, **about))

    def connect(self) -> None:
        self.up(flags=SYN)
        self.down(flags=SYN | ACK)
        self.up()

    def close(self) -> None:
        self.up(flags=FIN | ACK)
        self.down(flags=FIN | ACK)

    def answer(self) -> None:
        self.down(*PIECES)

    def exchange(self) -> None:
        self.up(ASK)
        self.answer()

    def begin(self, *downs: bytes) -> None:
        """Connect, ask, and answer with these pieces."""
        self.connect()
        self.up(ASK)
        if downs:
            self.down(*downs)


def counted(table: ConnectionTable) -> Counter[str]:
    return Counter(table.counts.connections)
