"""What a relay sends about one streamed exchange, as rows for `pack_batch`."""

from typing import Any

import msgspec

from llmtap.channel.frames import Anchored, Closing, FrameKind, Hello, pack_batch
from llmtap.channel.status import RelayStatus

MS = 1_000_000
_REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
    b"X-Request-Id: req-%d\r\nContent-Length: %d\r\n\r\n"
)
_RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Script:
    """Rows of frames, in the order in which they were written."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def frame(self, kind: int, seq: int = 0, t_ns: int = 0, extra_ns: int = 0, data: bytes = b"") -> "Script":
        self.rows += (int(kind), seq, t_ns, extra_ns, data)
        return self

    def hello(self, relay: str = "r0", *, guest: bool = False) -> "Script":
        hello = Hello(
            relay=relay,
            pid=7,
            clock="mono",
            anchor_mono_ns=0,
            anchor_wall_ns=1_700_000_000_000_000_000,
            guest=guest,
        )
        return self.frame(FrameKind.HELLO, data=msgspec.json.encode(hello))

    def anchor(self, mono_ns: int, wall_ns: int, steps: int, since_ns: int) -> "Script":
        about = msgspec.json.encode(Anchored(steps=steps, since_ns=since_ns))
        return self.frame(FrameKind.ANCHOR, 0, mono_ns, wall_ns, about)

    def status(self, status: RelayStatus) -> "Script":
        return self.frame(FrameKind.STATUS, data=msgspec.json.encode(status))

    def request(self, seq: int, t_ms: int = 0) -> "Script":
        """Opened and read at `t_ms`, handed on 1 ms later."""
        body = b'{"model":"tiny","stream":true,"messages":[]}'
        t = t_ms * MS
        self.frame(FrameKind.OPEN, seq, t, 0, _REQUEST % (seq, len(body)))
        self.frame(FrameKind.REQUEST_DATA, seq, t, 0, body)
        self.frame(FrameKind.REQUEST_END, seq, t)
        return self.frame(FrameKind.SUBMIT, seq, t + MS, MS)

    def head(self, seq: int, t_ms: int) -> "Script":
        return self.frame(FrameKind.RESPONSE_HEAD, seq, t_ms * MS, 20_000, _RESPONSE)

    def events(self, seq: int, t_ms: int, *events: str) -> "Script":
        """One read with these events in it, in one HTTP chunk."""
        payload = "".join(f"data: {event}\n\n" for event in events).encode()
        return self.frame(
            FrameKind.RESPONSE_DATA, seq, t_ms * MS, 30_000, b"%x\r\n%s\r\n" % (len(payload), payload)
        )

    def word(self, seq: int, t_ms: int, text: str = "word") -> "Script":
        delta = {"model": "tiny", "choices": [{"index": 0, "delta": {"content": text}}]}
        return self.events(seq, t_ms, msgspec.json.encode(delta).decode())

    def end(self, seq: int, t_ms: int, output: int) -> "Script":
        """Finish reason, usage, end marker, last chunk, end."""
        finish = '{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'
        usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": output}}
        self.events(seq, t_ms, finish, msgspec.json.encode(usage).decode(), "[DONE]")
        self.frame(FrameKind.RESPONSE_DATA, seq, t_ms * MS, 30_000, b"0\r\n\r\n")
        return self.frame(FrameKind.RESPONSE_END, seq, t_ms * MS)

    def close(self, seq: int, t_ms: int, **closing: Any) -> "Script":
        said = Closing(**{"outcome": "complete", **closing})
        return self.frame(FrameKind.CLOSE, seq, t_ms * MS, 0, msgspec.json.encode(said))

    def stream(self, seq: int, words: int = 3) -> "Script":
        """A whole exchange: submitted at 1 ms, a word every 20 ms from 101 ms on."""
        self.request(seq).head(seq, 100)
        for i in range(words):
            self.word(seq, 101 + 20 * i)
        end = 101 + 20 * words
        return self.end(seq, end, words).close(seq, end + 1, lag_ns=5_000)

    def frames(self) -> list[tuple[int, int, int, int, bytes]]:
        rows = self.rows
        return list(zip(rows[0::5], rows[1::5], rows[2::5], rows[3::5], rows[4::5], strict=True))

    def pack(self, batch_no: int) -> bytes:
        """As one batch; the script is empty afterwards."""
        batch = pack_batch(batch_no, self.rows)
        self.rows = []
        return batch
