"""Forward both directions of a connection after an upgrade (WebSocket), with back-pressure and timestamps.

`flow.py` makes a `Tunnel` of two streams. The tunnel calls `passed` with the bytes and the time of each read
that it forwarded, and `over(outcome, error)` at the end; `silent()` ends an idle one. The end of each side is
forwarded behind all its bytes; the tunnel is over when both sides have ended, or one has broken it. A TLS
connection cannot close in one direction only: once it has received the other side's end, it sends no more.
"""

from collections.abc import Callable

from llmtap.channel.frames import FrameKind
from llmtap.exchange.outcome import Outcome
from llmtap.net.stream import Stream


class _Direction:
    """One direction of a tunnel; the handler of its source stream."""

    __slots__ = ("_kind", "_tunnel", "ended", "passed", "sink", "source")

    def __init__(self, tunnel: "Tunnel", kind: int, source: Stream, sink: Stream) -> None:
        self._tunnel = tunnel
        self._kind = kind
        self.source = source
        self.sink = sink
        self.ended = False
        self.passed = False
        """The sink has received all bytes and the end."""

    def on_data(self, data: bytes, t_ns: int) -> None:
        try:
            sent = self.sink.write(data)
        except OSError as exc:
            self._tunnel.not_taken(self, exc)
            return
        self._tunnel.passed(self._kind, data, t_ns)
        if not sent:
            self.source.pause()

    def on_eof(self) -> None:
        self.ended = True
        if not self.sink.pending:
            self.pass_end()  # otherwise `sink_drained` forwards the end

    def pass_end(self) -> None:
        """Forward the end of the source, after all its bytes."""
        self.sink.shutdown_write()
        self.passed = True
        self._tunnel.end_passed(self)

    def sink_drained(self) -> None:
        if self.ended:
            self.pass_end()
        else:
            self.source.resume()

    def on_lost(self, error: OSError | None) -> None:
        self._tunnel.lost(self, error)

    def on_drained(self) -> None:
        # This stream is the sink of the other direction.
        self._tunnel.other(self).sink_drained()


class Tunnel:
    """Both directions of an upgraded connection.

    Args:
        passed: called with kind of frame, data and stamp of what was passed on.
        over: called when both sides are closed.
    """

    def __init__(
        self,
        client: Stream,
        upstream: Stream,
        passed: Callable[[int, bytes, int], None],
        over: Callable[[Outcome, str | None], None],
    ) -> None:
        self.passed = passed
        self._over = over
        self._client = client
        self._upstream = upstream
        self._outcome = Outcome.COMPLETE
        self._error: str | None = None
        self.up = _Direction(self, FrameKind.TUNNEL_UP, client, upstream)
        self.down = _Direction(self, FrameKind.TUNNEL_DOWN, upstream, client)
        client.handler = self.up
        upstream.handler = self.down

    def other(self, direction: _Direction) -> _Direction:
        return self.down if direction is self.up else self.up

    def end_passed(self, direction: _Direction) -> None:
        """Note that one direction ended properly; the tunnel ends when both have."""
        other = self.other(direction)
        if direction.sink.closed and not other.ended:
            other.on_eof()  # TLS closes both directions of the sink at once, which then reports no end
        elif other.passed:
            self._end()

    def not_taken(self, direction: _Direction, error: OSError) -> None:
        """Handle a sink that refused bytes.

        If the upstream has ended, the bytes are discarded, and the tunnel waits for the client's end: closing
        while the client sends could destroy bytes that it has not read yet.
        """
        if direction is self.down or not self.down.ended:
            self._broken(self.other(direction), error)

    def lost(self, direction: _Direction, error: OSError | None) -> None:
        """Note that the connection of the source of `direction` broke or was closed."""
        if not direction.ended or (error is not None and direction is self.up):
            self._broken(direction, error)
            return
        other = self.other(direction)
        if not other.ended:
            # Reading from the sink may be paused, because the lost side did not take its bytes.
            direction.sink.resume()
        elif not other.passed:
            other.pass_end()

    def _broken(self, direction: _Direction, error: OSError | None) -> None:
        """End the tunnel: the source of `direction` closed too early."""
        by_client = direction is self.up
        side = "client" if by_client else "upstream"
        if self._outcome is Outcome.COMPLETE:  # the first break determines the outcome
            self._outcome = Outcome.CLIENT_CANCELLED if by_client else Outcome.UPSTREAM_RESET
            self._error = f"the {side} broke the tunnel ({type(error).__name__ if error else 'closed'})"
        if not by_client and self._client.pending:
            # Let the client receive the bytes from before the break.
            self._upstream.close()
            self.down.ended = self.up.ended = self.up.passed = True
        else:
            self._end()

    def silent(self) -> None:
        """End the tunnel after `relay.idle_timeout` without a byte."""
        if self.down.ended:
            pass  # complete: the client has received all, but does not close
        elif self.up.ended or self._upstream.pending:
            self._outcome = Outcome.UPSTREAM_TIMEOUT
            self._error = "the upstream sent nothing for too long"
        else:
            # It is unknown which side should have sent, so the outcome names neither.
            self._outcome = Outcome.TRUNCATED
            self._error = "both sides of the tunnel sent nothing for too long"
        self._end()

    def _end(self) -> None:
        self._client.close()
        self._upstream.close()
        self._over(self._outcome, self._error)
