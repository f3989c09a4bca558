"""Frames of one relay back into Exchanges: one Observer for each exchange that is open there.

An exchange that cannot be understood is given up, counted and told once; the others go on.
"""

from collections.abc import Iterable
from typing import Final, Protocol

import msgspec

from llmtap.record.exchange import Exchange
from llmtap.record.observer import Observer
from llmtap.tap.frames import Assigned, Closing, FrameKind, Hello, RelayStatus

__all__ = ["Assembler", "Sink"]

Frame = tuple[int, int, int, int, bytes]
"""`(kind, seq, t_ns, extra_ns, data)`"""

# Plain ints: comparing with an IntEnum's member costs ten times as much, and this runs for every frame.
_OPEN: Final = int(FrameKind.OPEN)
_REQUEST_DATA: Final = int(FrameKind.REQUEST_DATA)
_REQUEST_END: Final = int(FrameKind.REQUEST_END)
_SUBMIT: Final = int(FrameKind.SUBMIT)
_RESPONSE_HEAD: Final = int(FrameKind.RESPONSE_HEAD)
_RESPONSE_DATA: Final = int(FrameKind.RESPONSE_DATA)
_RESPONSE_END: Final = int(FrameKind.RESPONSE_END)
_UPGRADED: Final = int(FrameKind.UPGRADED)
_TUNNEL_UP: Final = int(FrameKind.TUNNEL_UP)
_TUNNEL_DOWN: Final = int(FrameKind.TUNNEL_DOWN)
_CLOSE: Final = int(FrameKind.CLOSE)
_DROP: Final = int(FrameKind.DROP)
_STATUS: Final = int(FrameKind.STATUS)
_ANSWER: Final = int(FrameKind.ANSWER)
_SENT: Final = int(FrameKind.SENT)
_ARM: Final = int(FrameKind.ARM)

_closing: Final = msgspec.json.Decoder(Closing)
_assigned: Final = msgspec.json.Decoder(Assigned)
_status: Final = msgspec.json.Decoder(RelayStatus)


class Sink(Protocol):
    """Who is told what came of the frames (the Tally)."""

    def observe(
        self, relay: str, seq: int, arrival_ns: int, arrival_wall_ns: int, head: bytes, clock: str
    ) -> Observer: ...
    def opened(self) -> None: ...
    def forgot(self, n: int = 1) -> None: ...
    def ended(self, x: Exchange) -> None: ...
    def assigned(self, arm: Assigned) -> None: ...
    def status(self, relay: str, status: RelayStatus) -> None: ...
    def failed(self, kind: str, error: BaseException | str) -> None: ...


class Assembler:
    """The open exchanges of one connection of one relay."""

    def __init__(self, hello: Hello, sink: Sink) -> None:
        self._hello = hello
        self._sink = sink
        self._live: dict[int, Observer] = {}

    def __len__(self) -> int:
        """Exchanges open now."""
        return len(self._live)

    def digest(self, frames: Iterable[Frame]) -> None:
        """Takes in the frames of a batch, in order. Never raises for what is in them."""
        live = self._live
        for kind, seq, t_ns, extra_ns, data in frames:
            try:
                if kind == _RESPONSE_DATA:
                    # Frames of an exchange that was given up are passed over, here and below.
                    if seq in live:
                        live[seq].response_data(data, t_ns, extra_ns)
                elif kind == _OPEN:
                    self._open(seq, t_ns, extra_ns, data)
                elif kind == _SENT:
                    self._open(seq, t_ns, t_ns, data)
                    live[seq].submitted(extra_ns, extra_ns - t_ns)
                elif kind == _STATUS:
                    self._sink.status(self._hello.relay, _status.decode(data))
                elif seq in live:
                    self._tell(live[seq], kind, seq, t_ns, extra_ns, data)
            except Exception as error:  # measuring may fail, traffic and the other exchanges may not
                self._sink.failed(type(error).__name__, error)
                self._forget(seq)

    def discard(self) -> int:
        """Gives up all that is open: the relay is gone. Returns how many that were."""
        n = len(self._live)
        self._live.clear()
        self._sink.forgot(n)
        return n

    def _open(self, seq: int, t_ns: int, whole_ns: int, data: bytes) -> None:
        head, body = _split(data) if whole_ns else (data, b"")
        hello = self._hello
        wall_ns = hello.anchor_wall_ns + t_ns - hello.anchor_mono_ns
        self._forget(seq)
        # Counted before it is understood: what follows gives it up by the same number.
        self._sink.opened()
        try:
            observer = self._live[seq] = self._sink.observe(
                hello.relay, seq, t_ns, wall_ns, head, hello.clock
            )
        except Exception:
            self._sink.forgot()
            raise
        if whole_ns:
            if body:
                observer.request_data(body, whole_ns)
            observer.request_end(whole_ns)

    def _tell(self, observer: Observer, kind: int, seq: int, t_ns: int, extra_ns: int, data: bytes) -> None:
        if kind == _REQUEST_DATA:
            observer.request_data(data, t_ns)
        elif kind == _REQUEST_END:
            observer.request_end(t_ns)
        elif kind == _SUBMIT:
            observer.submitted(t_ns, extra_ns)
        elif kind == _ANSWER:
            head, body = _split(data)
            observer.response_head(head, t_ns, extra_ns)
            if body:
                observer.response_data(body, t_ns, extra_ns)
            observer.response_end(t_ns)
        elif kind == _RESPONSE_HEAD:
            observer.response_head(data, t_ns, extra_ns)
        elif kind == _RESPONSE_END:
            observer.response_end(t_ns)
        elif kind == _CLOSE:
            self._close(seq, t_ns, data)
        elif kind == _DROP:
            self._forget(seq)
        elif kind == _UPGRADED:
            observer.upgraded(t_ns)
        elif kind == _ARM:
            self._sink.assigned(_assigned.decode(data))
        elif kind == _TUNNEL_UP:
            observer.tunnel(data, None, t_ns, extra_ns)
        elif kind == _TUNNEL_DOWN:
            observer.tunnel(None, data, t_ns, extra_ns)
        # INTERIM heads say nothing that an exchange keeps; kinds of a newer relay are passed over.

    def _close(self, seq: int, t_ns: int, data: bytes) -> None:
        closing = _closing.decode(data)
        exchange = self._live[seq].finish(
            delivered_ns=t_ns or None,
            outcome=closing.outcome,
            status=closing.status,
            error=closing.error,
            paused_ns=closing.paused_ns,
            lag_ns=closing.lag_ns,
            request_bytes=closing.request_bytes,
            response_bytes=closing.response_bytes,
        )
        if closing.arm is not None:
            exchange.arm, exchange.route = closing.arm, closing.route
            exchange.unit, exchange.excluded = closing.unit, closing.excluded
        del self._live[seq]
        self._sink.ended(exchange)

    def _forget(self, seq: int) -> None:
        if self._live.pop(seq, None) is not None:
            self._sink.forgot()


def _split(message: bytes) -> tuple[bytes, bytes]:
    """Head and body of a message that the relay has found to be whole."""
    end = message.find(b"\r\n\r\n") + 4
    return message[:end], message[end:]
