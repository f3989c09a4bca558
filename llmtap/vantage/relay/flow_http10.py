"""An exchange whose client speaks HTTP/1.0, and so cannot be sent chunks: the one case of re-framing."""

from typing import TYPE_CHECKING

from llmtap.clock import SystemClock
from llmtap.errors import PeerProtocolError
from llmtap.net.stream import Stream
from llmtap.protocol.http1 import ChunkedScanner, Framing, ResponseHead
from llmtap.vantage.relay.flow import RESPONSE_DATA, Flow

if TYPE_CHECKING:
    from llmtap.vantage.relay.connection import ClientConnection
    from llmtap.vantage.relay.relay import Relay

__all__ = ["FlowToHttp10"]

mono_ns = SystemClock.mono_ns


class FlowToHttp10(Flow):
    """A Flow that takes chunks off, and tells the client the end by closing."""

    __slots__ = ("_chunks",)

    def __init__(self, relay: "Relay", client: "ClientConnection", stream: Stream) -> None:
        super().__init__(relay, client, stream)
        self._chunks: ChunkedScanner | None = None

    def _frame_answer(self, head: ResponseHead) -> bool:
        if head.framing is Framing.CHUNKED:
            self._chunks = ChunkedScanner()
        return head.framing is Framing.LENGTH

    def _dechunks(self) -> bool:
        return True

    def _reframed(self, body: bytes) -> bytes:
        if self._chunks is None:
            return body
        pieces: list[bytes] = []
        self._chunks.feed(body, pieces)
        return b"".join(pieces)

    def _pass_body(self, framing: Framing) -> None:
        if self._chunks is None:
            super()._pass_body(framing)

    def on_data(self, data: bytes, t_ns: int) -> None:
        if self._chunks is None or self._scanner is None:
            super().on_data(data, t_ns)
            return
        try:
            end = self._scanner.feed(data)
        except PeerProtocolError as exc:
            self._upstream_broke(exc)
            return
        if end >= 0 and end < len(data):
            data = data[:end]
            self._said_too_much()
        payload = self._reframed(data)
        try:
            sent = self._stream.write(payload) if payload else True
        except OSError:
            self.client_gone()
            return
        self.last_ns = t_ns
        self.response_bytes += len(data)
        if self.tapped:
            self.tapped = self._tap.offer(RESPONSE_DATA, self.seq, t_ns, mono_ns() - t_ns, data)
        if end >= 0:
            self._body_complete(t_ns)
        elif not sent:
            self.pause_upstream()

    def _client_sees_close(self) -> bool:
        return self._chunks is not None or super()._client_sees_close()

    def on_eof(self) -> None:
        # For this client the close is the end of a chunked answer, but not for the upstream.
        if self._chunks is not None:
            self.on_lost(None)
        else:
            super().on_eof()
