"""Parse a request: its head, and the fields of its body that an exchange needs, into an Exchange.

`observer.py` feeds `RequestReader` with the body, read by read. The tenant comes from a function that is
passed in. Bodies of requests to MCP servers are not read. `prompt.py` parses the messages, for captures only.

Source: docs/dialects.md; W3C Trace Context; llm-d's request headers for objectives; modelcontextprotocol.io
SEP-2243 and streamable HTTP; a2a-protocol.org.
"""

import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from llmtap.errors import PeerProtocolError
from llmtap.exchange.bounds import Share, bounded
from llmtap.exchange.exchange import Exchange
from llmtap.protocol.encoding import Decoder
from llmtap.protocol.http1 import ChunkedDecoder, Framing, RequestHead, parse_request_head

REQUEST_BYTES_MAX: Final = 8 << 20
"""A longer request body is not kept, and its model is then not known from it."""
_PIECE_BYTES: Final = 64
_SLO_MS_MAX: Final = 3_600_000

_ENDPOINTS: Final = (
    ("/chat/completions", "chat.completions"),
    ("/completions", "completions"),
    ("/responses", "responses"),
    ("/messages", "messages"),
    ("/realtime", "realtime"),
    ("/embeddings", "embeddings"),
    ("/api/chat", "ollama.chat"),
    ("/api/generate", "ollama.generate"),
    ("/generate_stream", "tgi.generate_stream"),
    ("/generate", "generate"),
    ("/completion", "llamacpp.completion"),
    ("/v2/chat", "cohere.chat"),
    ("/api/v1/chat", "lmstudio.chat"),
    (":streamGenerateContent", "gemini.generate"),
    (":generateContent", "gemini.generate"),
    ("/converse-stream", "bedrock.converse"),
    ("/converse", "bedrock.converse"),
    ("/invoke-with-response-stream", "bedrock.invoke"),
    ("/invoke", "bedrock.invoke"),
)
"""By the end of the path; the first that fits."""

_STREAMED_PATHS: Final = (
    "/generate_stream", ":streamGenerateContent", "/converse-stream", "/invoke-with-response-stream",
)  # fmt: skip
"""A path with one of these ends is answered with a stream; the body does not decide it."""
_STREAMED_UNLESS: Final = frozenset({"ollama.chat", "ollama.generate"})
"""Endpoints that answer with a stream unless the body has `"stream": false`."""

_MCP: Final = (b"mcp-method", b"mcp-name", b"mcp-session-id", b"mcp-protocol-version")
_NAMED: Final = ("tools/call", "prompts/get")
"""Methods whose name is one of a tool or prompt, and no address of somebody's document."""
_method: Final = re.compile(r"[a-z][a-zA-Z]{0,31}(?:/[a-zA-Z_]{1,31}){0,3}").fullmatch
_name: Final = re.compile(r"[A-Za-z0-9_./-]{1,96}").fullmatch

_MODEL_PATH: Final = re.compile(
    r"/models/([^/:]{1,256}):(?:streamG|g)enerateContent$"
    r"|/model/([^/]{1,1024})/(?:converse|invoke)(?:-stream|-with-response-stream)?$"
)

Identify = Callable[[RequestHead, str, Callable[[], Any]], str]
"""`(head, path, body) -> tenant`; `body()` is the request's JSON value, or None if it has none."""

Hear = Callable[[Exchange, RequestHead, bytes], bool]
"""`(exchange, head, body)`, once the request is whole: whoever captures is shown it, and says whether the
text of the answer is wanted too. The body has no codings; it is empty where it was not kept."""


class _RequestBody(msgspec.Struct):
    model: Any = None
    stream: Any = None


_decode_request = msgspec.json.Decoder(_RequestBody).decode


class RequestReader:
    """Reader of one request into its Exchange `x`. `identify` returns the tenant, `hear` gets the whole
    request, `share` is where room for the body is taken."""

    __slots__ = (
        "_body", "_coding", "_head", "_hear", "_identify", "_keeps", "_path", "_share", "_size", "_taken",
        "_x", "method", "wants_stream", "wants_text",
    )  # fmt: skip

    def __init__(
        self,
        x: Exchange,
        raw: bytes,
        identify: Identify | None = None,
        hear: Hear | None = None,
        share: Share | None = None,
    ) -> None:
        self._x = x
        self._share = Share() if share is None else share
        self._body: list[bytes] = []
        self._keeps = False
        self._size = 0
        self._taken = 0
        self._identify = identify
        self._hear = hear
        self._head: RequestHead | None = None
        self._path = ""  # as sent: rules may name tenants by it, and nobody else is told
        self._coding: bytes | None = None
        self.method = b""
        self.wants_stream = False
        self.wants_text = False
        try:
            head = self._head = parse_request_head(raw)
        except PeerProtocolError:
            return  # the relay refused it as well, and says so at the end
        self._keeps = True
        self.method = head.method
        x.method = bounded("method", head.method.decode("latin-1"))
        self._path = _path(head.target)
        x.path = bounded("path", self._path)
        bare = self._path.rstrip("/")
        x.endpoint = next((name for suffix, name in _ENDPOINTS if bare.endswith(suffix)), None)
        for name, value in head.headers:
            match name.lower():
                case b"x-request-id":
                    x.request_id = bounded("request_id", value.decode("latin-1"))
                case b"traceparent":
                    x.trace_parent = bounded("trace_parent", value.decode("latin-1"))
                case b"x-llm-d-slo-ttft-ms":
                    x.slo_ttft_ns = _ms(value)
                case b"x-llm-d-slo-tpot-ms":
                    x.slo_tpot_ns = _ms(value)
                case b"content-encoding":
                    self._coding = value
                case b"a2a-version":
                    x.endpoint = "a2a"
        told = {name.lower(): value.decode("latin-1") for name, value in head.headers if name.lower() in _MCP}
        if told:
            self._keeps = False
            x.endpoint, x.call = "mcp", bounded("call", _call(told, x.method))

    def feed(self, data: bytes) -> None:
        if not self._keeps:
            return
        self._size += len(data)
        taken = len(data) + _PIECE_BYTES
        if self._size > REQUEST_BYTES_MAX or not self._share.take(taken):
            self._let_go()
            return
        self._taken += taken
        self._body.append(data)

    def end(self) -> None:
        """The request is over, or nobody will send more of it. A second call does nothing."""
        head, self._head = self._head, None
        if head is None:
            return
        path, self._path = self._path, ""
        body = self._payload(chunked=head.framing is Framing.CHUNKED)
        self._let_go()
        request = _RequestBody()
        if body.lstrip().startswith(b"{"):
            try:
                request = _decode_request(body)
            except (ValueError, RecursionError):
                pass
        model = request.model or _model_in(path)
        if isinstance(model, str) and model:
            self._x.model = bounded("model", model)
        self.wants_stream = (
            request.stream is True
            or path.rstrip("/").endswith(_STREAMED_PATHS)
            or (self._x.endpoint in _STREAMED_UNLESS and request.stream is None)
        )
        if self._identify is not None:
            self._x.tenant = bounded("tenant", self._identify(head, path, lambda: _json(body)))
        if self._hear is not None and self._x.call is None:
            self.wants_text = self._hear(self._x, head, body)

    def _let_go(self) -> None:
        self._keeps = False
        self._body.clear()
        self._share.give(self._taken)
        self._taken = 0

    def _payload(self, *, chunked: bool) -> bytes:
        body = b"".join(self._body)
        try:
            if chunked:
                body = ChunkedDecoder().feed(body)
            return Decoder(self._coding, decoded_bytes_max=REQUEST_BYTES_MAX).feed(body) if body else b""
        except PeerProtocolError:
            return b""


def _call(told: dict[bytes, str], method: str) -> str:
    """Return the method and name of an MCP request; the HTTP method where no header has its own."""
    called, name = told.get(b"mcp-method", method), told.get(b"mcp-name", "")
    if b"mcp-method" in told and not _method(called):
        return "other"
    if called not in _NAMED or not name:
        return called
    return f"{called} {name}" if _name(name) else f"{called} other"


def _json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return None


def _model_in(path: str) -> str | None:
    found = _MODEL_PATH.search(path)
    return None if found is None else unquote(found[1] or found[2], errors="replace")


def _ms(value: bytes) -> int | None:
    """Nanoseconds of a header in whole or decimal milliseconds; None for what is no positive number."""
    try:
        ms = float(value)
    except ValueError:
        return None
    # Below half a nanosecond it would be a bound of 0, which nothing can meet.
    return round(ms * 1e6) or None if 0 < ms <= _SLO_MS_MAX else None


def _path(target: bytes) -> str:
    path = target.partition(b"?")[0]
    if not path.startswith(b"/"):
        _, found, rest = path.partition(b"://")
        if found:
            path = b"/" + rest.partition(b"/")[2]
    return path.decode("latin-1")
