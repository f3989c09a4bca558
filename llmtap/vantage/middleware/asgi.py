"""Middleware that measures the requests of ASGI 3 applications (FastAPI, Starlette, LiteLLM) for a meter.

    app.add_middleware(LlmtapMiddleware, socket="/run/llmtap/tap.sock")

Each message is forwarded unmodified, and a message of the app is sent before it is reported. The scope loses
only the header field `x-llmtap-label`, which the relay removes, too. Add this middleware last: in Starlette
that makes it the outermost.

| scope | effect |
|---|---|
| `http` | measured as an exchange |
| `websocket` | passes unmeasured, counted as dropped for the reason `websocket` |
| `http` or `websocket` that matches `skip` | passes unmeasured, counted as skipped |
| `lifespan` | passes; at the app's end, waits up to 2 s until the meter has the last frames |

The middleware learns of a client's disconnect as the app does: by `http.disconnect` or an OSError of `send`.

Source: the ASGI specification, version 3.0, HTTP and WebSocket 2.5, Lifespan 2.0.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any, Final
from urllib.parse import quote

from llmtap.exchange.label import LABEL_FIELD
from llmtap.protocol.inference import NOT_INFERENCE, SkipRules
from llmtap.vantage.middleware.exchange import (
    TAP_BYTES,
    AppExchange,
    Emitter,
    Emitters,
    mono_ns,
    request_head,
)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_SHUTDOWN_MESSAGES: Final = ("lifespan.shutdown.complete", "lifespan.shutdown.failed")
_STATUS_WITHOUT_ANSWER: Final = 500
"""Status that a server sends if the app raises an exception, or returns without a response."""
_USUALLY_WITHOUT_BODY: Final = frozenset({"GET", "HEAD", "DELETE", "OPTIONS", "TRACE"})
"""Methods whose requests have a body only if their header shows it."""


class LlmtapMiddleware:
    """ASGI middleware that measures the requests of an application. Raises ConfigError.

    Args:
        socket: path of the meter's socket (`llmtap meter --listen-socket`); the meter can start later.
        skip: requests that are not measured: HTTP methods, and paths (including all paths below them).
        tap_bytes: maximum size of all frames that wait for the meter; above it, exchanges are dropped.
    """

    def __init__(
        self, app: App, *, socket: str, skip: Collection[str] = NOT_INFERENCE, tap_bytes: int = TAP_BYTES
    ) -> None:
        self._app = app
        self._skip_rules = SkipRules(skip)
        self._emitters = Emitters(socket, tap_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        app_scope = _without_label(scope)
        if kind in ("http", "websocket") and (rule := _skip_rule(self._skip_rules, scope)) is not None:
            if (emitter := self._emitters.current()) is not None:
                emitter.skip(rule)
            await self._app(app_scope, receive, send)
        elif kind == "http":
            arrival_ns = mono_ns()
            emitter = self._emitters.current()
            call = None if emitter is None else _wrap_calls(emitter, scope, receive, send, arrival_ns)
            if call is None:
                await self._app(app_scope, receive, send)
                return
            try:
                await self._app(app_scope, call.receive, call.send)
            except BaseException as exc:
                call.on_exception(exc)
                raise
            call.exchange.on_app_end("returned", _STATUS_WITHOUT_ANSWER)
        elif kind == "lifespan":
            await self._handle_lifespan(scope, receive, send)
        else:
            if kind == "websocket" and (emitter := self._emitters.current()) is not None:
                emitter.pass_unmeasured("websocket")
            await self._app(app_scope, receive, send)

    async def _handle_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._emitters.current()  # connect now, so that the meter lists the app before its first request

        async def close_and_send(message: Message) -> None:
            if message.get("type") in _SHUTDOWN_MESSAGES:
                await self._emitters.close()
            await send(message)

        await self._app(scope, receive, close_and_send)


def _without_label(scope: Scope) -> Scope:
    """Return the scope without the header field of labels; the scope itself if it has none. Never raises."""
    try:
        fields = scope.get("headers", ())
        if iter(fields) is fields:
            return scope  # an iterator can be read only once, so leave it to the app
        others = [field for field in fields if field[0].lower() != LABEL_FIELD]
        return scope if len(others) == len(fields) else {**scope, "headers": others}
    except Exception:
        return scope  # pass the headers unchanged, even if they are not a list of fields


def _skip_rule(skip_rules: SkipRules, scope: Scope) -> str | None:
    """Return the rule that excludes a request from measurement; None: it is measured. Never raises."""
    try:
        query = scope.get("query_string", b"").decode("latin-1")
        fields = scope.get("headers", ())
        if iter(fields) is fields:
            fields = ()  # an iterator can be read only once, so leave it to the app
        return skip_rules.rule_of(scope.get("method", ""), scope["path"], query, fields)
    except Exception:
        return None  # measure the request: if that fails as well, `_wrap_calls` counts the error


def _wrap_calls(
    emitter: Emitter, scope: Scope, receive: Receive, send: Send, arrival_ns: int
) -> "_Call | None":
    """Wrap `receive` and `send` for one request. Return None if llmtap's code fails. Never raises."""
    try:
        method = scope["method"]
        target = scope.get("raw_path") or quote(scope["path"], safe="/:@!$&'()*+,;=~%").encode()
        query = scope.get("query_string")
        version, fields = scope.get("http_version", "1.1"), scope["headers"]
        if iter(fields) is fields:
            raise TypeError("scope['headers']: expected a list, got an iterator, which only the app may read")
        head = request_head(method, target + b"?" + query if query else target, version, fields)
        is_whole = not _may_have_body(method, fields)
    except Exception as exc:
        emitter.on_failure(exc)
        emitter.pass_unmeasured("middleware_error")
        return None
    exchange = AppExchange(emitter, method, head, arrival_ns)
    if is_whole:
        exchange.request_without_body()
    return _Call(exchange, receive, send)


def _may_have_body(method: str, fields: list[tuple[bytes, bytes]]) -> bool:
    for name, value in fields:
        if name == b"content-length":
            return value != b"0"
        if name == b"transfer-encoding":
            return True
    # With HTTP/2 and 3, a body needs neither Content-Length nor Transfer-Encoding.
    return method not in _USUALLY_WITHOUT_BODY


class _Call:
    """The `receive` and `send` that the app gets for one request; they report what passes."""

    __slots__ = ("_receive", "_send", "exchange")

    def __init__(self, exchange: AppExchange, receive: Receive, send: Send) -> None:
        self.exchange = exchange
        self._receive = receive
        self._send = send

    async def receive(self) -> Message:
        """Receive a message for the application, and measure it as a part of the request."""
        message = await self._receive()
        t_ns = mono_ns()
        exchange = self.exchange
        if not exchange.is_over:
            try:
                if message["type"] == "http.request":
                    if not exchange.request_over:
                        last = not message.get("more_body", False)
                        exchange.request_data(message.get("body", b""), t_ns, last=last)
                elif message["type"] == "http.disconnect":
                    exchange.on_client_disconnect()
            except Exception as exc:
                exchange.give_up(exc)
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the application, and measure it as a part of the answer."""
        t_ns = mono_ns()
        exchange = self.exchange
        turns = exchange.turns
        try:
            await self._send(message)
        except OSError:
            exchange.on_client_disconnect()
            raise
        if not exchange.is_over:
            try:
                passed_ns = mono_ns()
                exchange.add_pause(turns, passed_ns - t_ns)
                self._report_message(message, t_ns, passed_ns)
            except Exception as exc:
                exchange.give_up(exc)

    def _report_message(self, message: Message, t_ns: int, passed_ns: int) -> None:
        """Report a sent message. `passed_ns`: time at which the server had taken it."""
        exchange = self.exchange
        kind, last = message["type"], False
        if kind == "http.response.body":
            body = message.get("body", b"")
            if body:
                exchange.answer_data(body, t_ns)
            last = not message.get("more_body", False)
        elif kind == "http.response.start":
            exchange.answer_head(message["status"], message.get("headers", ()), t_ns)
        elif kind in ("http.response.pathsend", "http.response.zerocopysend"):
            # The server reads the file itself, so its bytes are not seen here.
            last = not message.get("more_body", False)
        if last:
            exchange.complete(t_ns, passed_ns)
        else:
            exchange.add_own_time(passed_ns)

    def on_exception(self, error: BaseException) -> None:
        """Record that the app ended with an exception."""
        if isinstance(error, asyncio.CancelledError):
            self.exchange.on_app_end("was cancelled", _STATUS_WITHOUT_ANSWER)
        else:
            self.exchange.on_app_end(f"raised {type(error).__name__}", _STATUS_WITHOUT_ANSWER)
