"""After an upgrade: two connections spliced into one, both ways, with back-pressure and stamps."""

from typing import TYPE_CHECKING

from llmtap.net.stream import Stream
from llmtap.record.outcome import Outcome
from llmtap.tap.frames import FrameKind

if TYPE_CHECKING:
    from llmtap.relay.flow import Flow

__all__ = ["Tunnel"]


class _Direction:
    """Bytes from one stream to the other; the handler of the one they come from."""

    __slots__ = ("_kind", "_tunnel", "ended", "sink", "source")

    def __init__(self, tunnel: "Tunnel", kind: int, source: Stream, sink: Stream) -> None:
        self._tunnel = tunnel
        self._kind = kind
        self.source = source
        self.sink = sink
        self.ended = False

    def on_data(self, data: bytes, t_ns: int) -> None:
        try:
            sent = self.sink.write(data)
        except OSError as exc:
            self._tunnel.broken(self.sink, exc)
            return
        self._tunnel.flow.tunnelled(self._kind, data, t_ns)
        if not sent:
            self.source.pause()

    def on_eof(self) -> None:
        self.ended = True
        if self.sink.pending:
            return  # the end follows when the sink has taken the rest
        self._pass_end()

    def _pass_end(self) -> None:
        self.sink.shutdown_write()
        self._tunnel.ended()

    def sink_drained(self) -> None:
        if self.ended:
            self._pass_end()
        else:
            self.source.resume()

    def on_lost(self, error: OSError | None) -> None:
        self._tunnel.broken(self.source, error)

    def on_drained(self) -> None:
        # This stream is the sink of the other direction.
        self._tunnel.other(self).sink_drained()


class Tunnel:
    """Two streams, each other's sink."""

    def __init__(self, flow: "Flow", client: Stream, upstream: Stream) -> None:
        self.flow = flow
        self._client = client
        self._upstream = upstream
        self.up = _Direction(self, int(FrameKind.TUNNEL_UP), client, upstream)
        self.down = _Direction(self, int(FrameKind.TUNNEL_DOWN), upstream, client)
        client.handler = self.up
        upstream.handler = self.down

    def other(self, direction: _Direction) -> _Direction:
        """The opposite direction."""
        return self.down if direction is self.up else self.up

    def ended(self) -> None:
        """One direction has ended in order; the tunnel is over when both have."""
        if self.up.ended and self.down.ended:
            self._close()
            self.flow.tunnel_over(Outcome.COMPLETE, None)

    def broken(self, stream: Stream, error: OSError | None) -> None:
        """One side is gone: so is the other."""
        by_client = stream is self._client
        self._close()
        outcome = Outcome.CLIENT_CANCELLED if by_client else Outcome.UPSTREAM_RESET
        who = "client" if by_client else "upstream"
        self.flow.tunnel_over(
            outcome, f"the {who} broke the tunnel ({type(error).__name__ if error else 'closed'})"
        )

    def _close(self) -> None:
        self._client.close()
        self._upstream.close()
