"""Parse a request: its head, and the fields of its body that an exchange needs, into an Exchange.

`observer.py` feeds `RequestReader` with the body, read by read. A function that is passed in returns the
tenant. `prompt.py` parses the messages, for captures only. A request with a header field of MCP counts as a
call of an MCP server, except if its path is one of inference and its body names a model. If its path is not
one of inference, the body is not read.

Source: docs/dialects.md; W3C Trace Context; llm-d's request headers for objectives; modelcontextprotocol.io
SEP-2243 and streamable HTTP; a2a-protocol.org.
"""

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from llmtap.errors import PeerProtocolError
from llmtap.exchange.bounds import Share, bounded
from llmtap.exchange.exchange import A2A, Exchange
from llmtap.exchange.label import LABEL_FIELD, UNKNOWN, label_of
from llmtap.protocol.encoding import Decoder
from llmtap.protocol.http1 import ChunkedDecoder, Framing, RequestHead, parse_request_head
from llmtap.protocol.json_memory import bounded_decoder
from llmtap.protocol.target import routed_path, split_target
from llmtap.protocol.tiers import tier_of
from llmtap.protocol.websocket import negotiates_deflate

REQUEST_BYTES_MAX: Final = 8 << 20
"""Maximum size of a request body; a longer one is not stored, so its model is unknown."""
_PIECE_BYTES: Final = 64
"""Memory that a piece of the body takes in addition to its bytes."""
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
"""Names of endpoints by the end of the path; of several matches, the first one counts."""

_STREAMED_PATHS: Final = (
    "/generate_stream",
    ":streamGenerateContent",
    "/converse-stream",
    "/invoke-with-response-stream",
)
"""Ends of paths whose answers are always streams; `stream` in the body has no effect."""
_STREAM_BY_DEFAULT: Final = frozenset({"ollama.chat", "ollama.generate"})
"""Endpoints that answer with a stream unless the body has `"stream": false`."""

_MCP: Final = (b"mcp-method", b"mcp-name", b"mcp-session-id", b"mcp-protocol-version")
_METHODS_WITH_NAME: Final = ("tools/call", "prompts/get")
"""MCP methods whose field `mcp-name` has the name of a tool or prompt. For other methods, the field can have
the address of a document, which must not be stored."""
_match_method: Final = re.compile(r"[a-z][a-zA-Z]{0,31}(?:/[a-zA-Z_]{1,31}){0,3}").fullmatch
_match_name: Final = re.compile(r"[A-Za-z0-9_./-]{1,96}").fullmatch

_MODEL_PATH: Final = re.compile(
    r"/models/([^/:]{1,256}):(?:streamG|g)enerateContent$"
    r"|/model/([^/]{1,1024})/(?:converse|invoke)(?:-stream|-with-response-stream)?$"
)

Identify = Callable[[RequestHead, str, Callable[[], Any]], str]
"""`(head, path, body) -> tenant`; `body()` is the request's JSON value, or None if it has none."""

OnRequest = Callable[[Exchange, RequestHead, bytes], bool]
"""`(exchange, head, body) -> wants_text`, called by the observer when the request is complete. Returns
whether the text of the answer is to be captured, too. `body` is decoded, and empty if it was not stored."""


class _RequestBody(msgspec.Struct):
    """Fields of a request body that every exchange needs, of any type."""

    model: Any = None
    stream: Any = None
    service_tier: Any = None
    speed: Any = None


_decode_request: Final = bounded_decoder(_RequestBody)
_decode_value: Final = bounded_decoder()


class RequestReader:
    """Reader of one request, which sets the fields of its Exchange `x`. `raw`: the request's head. `identify`
    returns the tenant, `on_request` is called with the complete request, and memory for the body is taken
    from `share`."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_encoding",
        "_head",
        "_identify",
        "_keeps_body",
        "_mcp_fields",
        "_on_request",
        "_path",
        "_share",
        "_taken_bytes",
        "_x",
        "method",
        "offers_deflate",
        "path",
        "wants_stream",
        "wants_text",
    )

    def __init__(
        self,
        x: Exchange,
        raw: bytes,
        identify: Identify | None = None,
        on_request: OnRequest | None = None,
        share: Share | None = None,
    ) -> None:
        self._x = x
        self._share = Share() if share is None else share
        """Memory limit for the body, shared by all exchanges."""
        self._body: list[bytes] = []
        self._keeps_body = False
        self._body_bytes = 0  # size of the body so far
        self._taken_bytes = 0  # memory taken from `_share` for the body
        self._identify = identify
        """Returns the tenant of a request."""
        self._on_request = on_request
        """Function that is called when the request is complete."""
        self._head: RequestHead | None = None
        """Head of the request; None if it is malformed."""
        self._path = ""  # can contain secrets, so it is used only for the tenant and the model, never stored
        self.path = ""
        """Path by which the dialect is recognised (`routed_path`), cut and cleaned in the same way as
        `Exchange.path`."""
        self._mcp_fields: dict[bytes, str] = {}
        """Header fields of an MCP request, which name the called method and tool."""
        self._encoding: bytes | None = None
        """Content encodings of the body (gzip and so on); None: not compressed."""
        self.method = b""
        self.wants_stream = False
        """Whether the request demands a streamed answer."""
        self.wants_text = False
        """Whether the recorder needs the text of the answer."""
        self.offers_deflate = False
        """Whether the client offers compressed WebSocket messages."""
        try:
            head = self._head = parse_request_head(raw)
        except PeerProtocolError:
            return  # the relay refuses such a request as well, and reports the outcome
        self._keeps_body = True
        self.method = head.method
        x.method = bounded("method", head.method.decode("latin-1"))
        sent = split_target(head.target)[0]
        self._path = routed_path(sent)
        x.path = bounded("path", sent)
        bare = self._path.rstrip("/")
        self.path = x.path if bare == sent else bounded("path", bare)
        x.endpoint = endpoint_of(self._path)
        for name, value in head.headers:
            match name.lower():
                case b"x-request-id":
                    x.request_id = bounded("request_id", value.decode("latin-1"))
                case b"traceparent":
                    x.trace_parent = bounded("trace_parent", value.decode("latin-1"))
                case b"x-llm-d-slo-ttft-ms":
                    x.slo_ttft_ns = _ms_to_ns(value)
                case b"x-llm-d-slo-tpot-ms":
                    x.slo_tpot_ns = _ms_to_ns(value)
                case lower if lower == LABEL_FIELD:
                    label = label_of(value.decode("latin-1"))
                    # Several fields with different labels contradict each other, and it is unknown which of
                    # them is right.
                    x.label = label if x.label in (None, label) else UNKNOWN
                case b"content-encoding":
                    self._encoding = value
                case b"sec-websocket-extensions":
                    self.offers_deflate = self.offers_deflate or negotiates_deflate([value])
                case b"a2a-version" if x.endpoint is None:
                    x.endpoint = A2A
                case lower if lower in _MCP:
                    self._mcp_fields[lower] = value.decode("latin-1")
        if self._mcp_fields and (x.endpoint is None or x.endpoint == A2A):
            self._keeps_body = False
            x.endpoint, x.call = "mcp", bounded("call", _call_name(self._mcp_fields, x.method))

    def feed(self, data: bytes) -> None:
        if not self._keeps_body:
            return
        self._body_bytes += len(data)
        taken_bytes = len(data) + _PIECE_BYTES
        if self._body_bytes > REQUEST_BYTES_MAX or not self._share.take(taken_bytes):
            self._drop_body()
            return
        self._taken_bytes += taken_bytes
        self._body.append(data)

    def end(self) -> None:
        """Parse the body, because it is complete or no more of it will come. A second call does nothing."""
        head, self._head = self._head, None
        if head is None:
            return
        path, self._path = self._path, ""
        body = self._decoded_body(chunked=head.framing is Framing.CHUNKED)
        self._drop_body()
        request = _RequestBody()
        if body.lstrip().startswith(b"{"):
            try:
                request = _decode_request(body)
            except (ValueError, RecursionError):
                pass
        model = request.model or _model_of_path(path)
        if isinstance(model, str) and model:
            self._x.model = bounded("model", model)
        elif self._mcp_fields and self._x.call is None:
            # Old MCP transports use a path of inference, `/messages`. Count such a request as a call of MCP
            # only if its body names no model, so that an MCP field cannot remove a request from the figures.
            self._x.call = bounded("call", _call_name(self._mcp_fields, self._x.method))
        self._x.service_tier_requested = tier_of(request.service_tier, request.speed)
        self.wants_stream = (
            request.stream is True
            or path.rstrip("/").endswith(_STREAMED_PATHS)
            or (self._x.endpoint in _STREAM_BY_DEFAULT and request.stream is None)
        )
        if self._identify is not None:
            self._x.tenant = bounded("tenant", self._identify(head, path, lambda: _decode_json(body)))
        if self._on_request is not None and self._x.call is None:
            self.wants_text = self._on_request(self._x, head, body)

    def _drop_body(self) -> None:
        """Stop keeping the body, and return its memory to the shared limit."""
        self._keeps_body = False
        self._body.clear()
        self._share.give(self._taken_bytes)
        self._taken_bytes = 0

    def _decoded_body(self, *, chunked: bool) -> bytes:
        body = b"".join(self._body)
        try:
            if chunked:
                body = ChunkedDecoder().feed(body)
            return Decoder(self._encoding, decoded_bytes_max=REQUEST_BYTES_MAX).feed(body) if body else b""
        except PeerProtocolError:
            return b""


def _call_name(fields: dict[bytes, str], method: str) -> str:
    """Return the method and name of an MCP request; without the field `mcp-method`, the HTTP method."""
    mcp_method, name = fields.get(b"mcp-method", method), fields.get(b"mcp-name", "")
    if b"mcp-method" in fields and not _match_method(mcp_method):
        return "other"
    if mcp_method not in _METHODS_WITH_NAME or not name:
        return mcp_method
    return f"{mcp_method} {name}" if _match_name(name) else f"{mcp_method} other"


def _decode_json(body: bytes) -> Any:
    try:
        return _decode_value(body)
    except (ValueError, RecursionError):
        return None


def _model_of_path(path: str) -> str | None:
    match = _MODEL_PATH.search(path)
    return None if match is None else (match[1] or match[2]).replace("%2F", "/")


def _ms_to_ns(value: bytes) -> int | None:
    """Return a header's milliseconds (whole or decimal) in ns; None if it is not a positive number."""
    try:
        ms = float(value)
    except ValueError:
        return None
    # Return None if the value rounds to 0 ns, because no exchange can meet an objective of 0.
    return round(ms * 1e6) or None if 0 < ms <= _SLO_MS_MAX else None


def endpoint_of(path: str) -> str | None:
    """Return the name of the API endpoint at the end of a path; None if it is not known."""
    bare = path.rstrip("/")
    return next((name for suffix, name in _ENDPOINTS if bare.endswith(suffix)), None)
