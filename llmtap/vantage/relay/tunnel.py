"""Forward both directions of a connection after an upgrade (WebSocket), with back-pressure and timestamps.

`flow.py` makes a `Tunnel` of two streams. The end of one side is forwarded to the other side after all bytes.
The tunnel is over when both sides have ended, when the connection of one side breaks, or when
`on_idle_limit()` is called. A TLS connection cannot end in one direction only, so a TLS side that has
received the other side's end sends nothing after it.
"""

from collections.abc import Callable

from llmtap.channel.frames import FrameKind
from llmtap.exchange.outcome import Outcome
from llmtap.net.stream import Stream


class _Direction:
    """One direction of a tunnel. It is the handler of its source stream."""

    __slots__ = ("_kind", "_tunnel", "end_forwarded", "ended", "sink", "source")

    def __init__(self, tunnel: "Tunnel", kind: int, source: Stream, sink: Stream) -> None:
        self._tunnel = tunnel
        self._kind = kind
        self.source = source
        """Stream from which the bytes are read."""
        self.sink = sink
        """Stream to which the bytes are written."""
        self.ended = False
        """Whether the source has sent its end."""
        self.end_forwarded = False
        """Whether the sink has received all bytes and the end."""

    def on_data(self, data: bytes, t_ns: int) -> None:
        try:
            sent = self.sink.write(data)
        except OSError as exc:
            self._tunnel.on_sink_error(self, exc)
            return
        self._tunnel.on_forwarded(self._kind, data, t_ns)
        if not sent:
            self.source.pause()

    def on_eof(self) -> None:
        self.ended = True
        if not self.sink.pending:
            self.forward_end()  # if bytes are pending, `sink_drained` forwards the end after them

    def forward_end(self) -> None:
        """Forward the end of the source, after all its bytes."""
        self.sink.shutdown_write()
        self.end_forwarded = True
        self._tunnel.on_end_forwarded(self)

    def sink_drained(self) -> None:
        """Continue after the sink has taken all bytes."""
        if self.ended:
            self.forward_end()
        else:
            self.source.resume()

    def on_lost(self, error: OSError | None) -> None:
        self._tunnel.on_source_lost(self, error)

    def on_drained(self) -> None:
        # This stream is the sink of the other direction.
        self._tunnel.other(self).sink_drained()


class Tunnel:
    """Both directions of an upgraded connection.

    Args:
        on_forwarded: called for each read, with the kind of frame, the forwarded bytes, and their timestamp.
        on_end: called with the outcome and an error text (None: no error) when both connections are closed.
    """

    def __init__(
        self,
        client: Stream,
        upstream: Stream,
        on_forwarded: Callable[[int, bytes, int], None],
        on_end: Callable[[Outcome, str | None], None],
    ) -> None:
        self.on_forwarded = on_forwarded
        """Called with the bytes that one side sent, after they were forwarded."""
        self._on_end = on_end
        self._client = client
        self._upstream = upstream
        self._outcome = Outcome.COMPLETE
        self._error: str | None = None
        self.up = _Direction(self, FrameKind.TUNNEL_UP, client, upstream)  # from the client
        self.down = _Direction(self, FrameKind.TUNNEL_DOWN, upstream, client)  # to the client
        client.handler = self.up
        upstream.handler = self.down

    def other(self, direction: _Direction) -> _Direction:
        return self.down if direction is self.up else self.up

    def on_end_forwarded(self, direction: _Direction) -> None:
        """Record that one direction ended properly. The tunnel ends when both directions have ended."""
        other = self.other(direction)
        if direction.sink.closed and not other.ended:
            other.on_eof()  # a TLS sink has closed both directions at once, and reports no end of its own
        elif other.end_forwarded:
            self._end()

    def on_sink_error(self, direction: _Direction, error: OSError) -> None:
        """Handle an error of the sink of `direction`, which took no bytes.

        If the upstream has ended, discard the bytes and wait for the client's end: closing the connection
        while the client sends could destroy bytes that the client has not read yet.
        """
        if direction is self.down or not self.down.ended:
            self._on_break(self.other(direction), error)

    def on_source_lost(self, direction: _Direction, error: OSError | None) -> None:
        """Handle that the source's connection of `direction` broke or was closed."""
        if not direction.ended or (error is not None and direction is self.up):
            self._on_break(direction, error)
            return
        other = self.other(direction)
        if not other.ended:
            # Resume the sink: it was possibly paused, because the lost connection did not take its bytes.
            direction.sink.resume()
        elif not other.end_forwarded:
            other.forward_end()

    def _on_break(self, direction: _Direction, error: OSError | None) -> None:
        """End the tunnel, because the source of `direction` closed its connection too early."""
        by_client = direction is self.up
        side = "client" if by_client else "upstream"
        if self._outcome is Outcome.COMPLETE:  # the first break determines the outcome
            self._outcome = Outcome.CLIENT_CANCELLED if by_client else Outcome.UPSTREAM_RESET
            self._error = f"the {side} broke the tunnel ({type(error).__name__ if error else 'closed'})"
        if not by_client and self._client.pending:
            # Let the client receive the bytes from before the break.
            self._upstream.close()
            self.down.ended = self.up.ended = self.up.end_forwarded = True
        else:
            self._end()

    def on_idle_limit(self) -> None:
        """End the tunnel after `relay.idle_timeout` without a byte."""
        if self.down.ended:
            pass  # keep the outcome COMPLETE: the client has received everything, but does not close its side
        elif self.up.ended or self._upstream.pending:
            self._outcome = Outcome.UPSTREAM_TIMEOUT
            self._error = "the upstream sent nothing for relay.idle_timeout"
        else:
            # Neither side sent anything, and either could have: so the outcome blames neither.
            self._outcome = Outcome.TRUNCATED
            self._error = "both sides of the tunnel sent nothing for relay.idle_timeout"
        self._end()

    def _end(self) -> None:
        self._client.close()
        self._upstream.close()
        self._on_end(self._outcome, self._error)
