"""Middleware that measures the requests of aiohttp.web applications, and reports them to a meter.

    setup(app, socket="/run/llmtap/tap.sock")

aiohttp sends every response through `request.writer`. The middleware wraps the methods of this writer until
the response has ended.

The request's body is measured if a handler reads it with `json`, `text`, `read` or `post`, but not if it
reads `request.content`. A file that the kernel sends (`web.FileResponse`) counts as a response without a
body. WebSockets, and requests that match `skip`, pass unmeasured and are counted.
"""

import asyncio
from collections.abc import Awaitable, Collection, Mapping
from typing import Any, Final

from aiohttp import HttpVersion10, web
from aiohttp.typedefs import Handler, Middleware

from llmtap.protocol.inference import NOT_INFERENCE, SkipRules
from llmtap.vantage.middleware.exchange import (
    TAP_BYTES,
    AppExchange,
    Emitter,
    Emitters,
    mono_ns,
    request_head,
)

_SWITCHING: Final = 101
_WRAPPED_METHODS: Final = ("write_headers", "write", "write_eof", "enable_compression")


def setup(
    app: web.Application, *, socket: str, skip: Collection[str] = NOT_INFERENCE, tap_bytes: int = TAP_BYTES
) -> None:
    """Measure the requests of `app`, as its outermost middleware, until the app ends.

    The options are those of `LlmtapMiddleware`. Raises ConfigError.
    """
    skip_rules = SkipRules(skip)
    emitters = Emitters(socket, tap_bytes)

    async def connect(_: web.Application) -> None:
        emitters.current()  # connect now, so that the meter lists the app before its first request

    async def disconnect(_: web.Application) -> None:
        await emitters.close()

    app.middlewares.insert(0, _middleware(emitters, skip_rules))
    app.on_startup.append(connect)
    app.on_cleanup.append(disconnect)


def _middleware(emitters: Emitters, skip_rules: SkipRules) -> Middleware:
    @web.middleware
    async def measure(request: web.Request, handler: Handler) -> web.StreamResponse:
        rule = skip_rules.rule_of(request.method, request.path, request.query_string, request.raw_headers)
        arrival_ns = mono_ns()
        emitter = emitters.current()
        if rule is not None:
            if emitter is not None:
                emitter.skip(rule)
            return await handler(request)
        call = None if emitter is None else _wrap_writer(emitter, request, arrival_ns)
        try:
            return await handler(request)
        except BaseException as exc:
            if call is not None:
                call.on_exception(exc)
            raise

    return measure


def _wrap_writer(emitter: Emitter, request: web.Request, arrival_ns: int) -> "_Call | None":
    """Wrap the writer of a request, to measure it. Return None if llmtap's code fails. Never raises."""
    exchange = None
    try:
        version = "1.0" if request.version <= HttpVersion10 else "1.1"
        # Remove Content-Encoding from the reported head, because aiohttp decodes the reported body.
        fields = [(n, v) for n, v in request.raw_headers if n.lower() != b"content-encoding"]
        head = request_head(request.method, _wire_bytes(request.raw_path), version, fields)
        exchange = AppExchange(emitter, request.method, head, arrival_ns)
        if not request.body_exists:
            exchange.request_without_body()
        return _Call(exchange, request)
    except Exception as exc:
        if exchange is not None:
            exchange.give_up(exc)
        else:
            emitter.on_failure(exc)
            emitter.pass_unmeasured("middleware_error")
        return None


class _Call:
    """Wrapper of the writer's methods during one response; reports the request and the response."""

    __slots__ = (
        "_connection_task",
        "_enable_compression",
        "_exchange",
        "_is_compressed",
        "_request",
        "_request_end_ns",
        "_write",
        "_write_eof",
        "_write_headers",
        "_writer",
    )

    def __init__(self, exchange: AppExchange, request: web.Request) -> None:
        writer: Any = request.writer
        self._exchange = exchange
        self._request = request
        self._writer = writer
        self._connection_task = request.task
        """Task of the connection, whose end is the end of the answer."""
        self._request_end_ns = 0
        """Time at which the app had the whole request; 0 before."""
        self._is_compressed = False  # whether the writer compresses the response
        self._write_headers = writer.write_headers
        self._write = writer.write
        self._write_eof = writer.write_eof
        self._enable_compression = writer.enable_compression
        for name in _WRAPPED_METHODS:
            setattr(writer, name, getattr(self, name))
        # If aiohttp itself fails to send an answer, only the end of the connection's task shows it.
        self._connection_task.add_done_callback(self._on_connection_end)
        request.content.on_eof(self._on_request_end)

    def _on_request_end(self) -> None:
        self._request_end_ns = mono_ns()

    # ---------------------------------------------------------------- the writer's interface

    def enable_compression(self, *args: Any, **options: Any) -> None:
        self._is_compressed = True
        self._enable_compression(*args, **options)

    async def write_headers(self, status_line: str, headers: Mapping[str, str]) -> None:
        t_ns = mono_ns()
        await self._read_request()
        await self._await_writer(self._write_headers(status_line, headers), t_ns)
        try:
            self._report_head(int(status_line.split(" ", 2)[1]), headers, t_ns)
        except Exception as exc:
            self._exchange.give_up(exc)
        self._restore_writer_at_end()

    async def write(self, chunk: bytes, **options: Any) -> None:
        t_ns = mono_ns()
        passed_ns = await self._await_writer(self._write(chunk, **options), t_ns)
        if chunk:
            self._exchange.answer_data(chunk, t_ns)
        self._exchange.add_own_time(passed_ns)

    async def write_eof(self, chunk: bytes = b"") -> None:
        t_ns = mono_ns()
        passed_ns = await self._await_writer(self._write_eof(chunk), t_ns)
        if chunk:
            self._exchange.answer_data(chunk, t_ns)
        await self._read_request()
        self._exchange.complete(t_ns, passed_ns)
        self._restore_writer_at_end()

    async def _await_writer(self, writer_call: Awaitable[None], t_ns: int) -> int:
        """Await a call of the writer, which began at `t_ns`. Return the time of its end."""
        turns = self._exchange.turns
        try:
            await writer_call
        except OSError:
            self._exchange.on_client_disconnect()
            self._restore_writer_at_end()
            raise
        except Exception as exc:
            self._exchange.on_app_end(f"failed in aiohttp's writer ({type(exc).__name__})")
            self._restore_writer_at_end()
            raise
        passed_ns = mono_ns()
        self._exchange.add_pause(turns, passed_ns - t_ns)
        return passed_ns

    def _report_head(self, status: int, headers: Mapping[str, str], t_ns: int) -> None:
        if status == _SWITCHING:
            self._exchange.leave_unmeasured("websocket")
            return
        fields = [(_wire_bytes(name), _wire_bytes(value)) for name, value in headers.items()]
        if self._is_compressed:
            # Remove Content-Encoding from the reported head: the writer compresses the bytes after this
            # wrapper has reported them.
            fields = [(name, value) for name, value in fields if name.lower() != b"content-encoding"]
        self._exchange.answer_head(status, fields, t_ns)

    # ---------------------------------------------------------------- the request's body, and the end

    async def _read_request(self) -> None:
        """Report the body of the request if the handler has read all of it. Do not wait for the rest."""
        exchange, request = self._exchange, self._request
        if exchange.is_over or exchange.request_over or request.can_read_body:
            return
        try:
            body = await request.read()
        except Exception:
            return  # the body is cut off or too long; the handler, which reads it too, gets this exception
        end_ns = self._request_end_ns
        exchange.request_data(body, end_ns, last=True, submit_ns=end_ns)

    def on_exception(self, error: BaseException) -> None:
        """Record that the handler raised. If the answer has not begun, aiohttp now sends one through the
        writer."""
        if isinstance(error, asyncio.CancelledError):
            # aiohttp cancels a handler when the server shuts down and, if so configured, when the client
            # disconnects. A closed transport shows that the client has disconnected.
            transport = self._request.transport
            if transport is None or transport.is_closing():
                self._exchange.on_client_disconnect()
            else:
                self._exchange.on_app_end("was cancelled")
        elif self._exchange.status is not None:
            self._exchange.on_app_end(f"raised {type(error).__name__}")
        self._restore_writer_at_end()

    def _on_connection_end(self, _: "asyncio.Task[None]") -> None:
        self._exchange.on_app_end("ended its connection")
        self._restore_writer_at_end()

    def _restore_writer_at_end(self) -> None:
        """If the exchange has ended, restore the writer's methods, because the wrappers form a cycle of
        references that would delay the release of memory."""
        if self._exchange.is_over and self._writer is not None:
            for name in _WRAPPED_METHODS:
                delattr(self._writer, name)
            self._connection_task.remove_done_callback(self._on_connection_end)
            self._writer = None


def _wire_bytes(text: str) -> bytes:
    """Return the bytes that aiohttp received as `text`: it decodes UTF-8, and other bytes to surrogates."""
    return text.encode("utf-8", "surrogateescape")
