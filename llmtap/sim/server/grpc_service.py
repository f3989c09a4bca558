"""vLLM's and SGLang's engine services over gRPC (method Generate), served by the simulated engine.

`server.py` starts `GrpcService` beside the HTTP server. Calls use the same `Reception` as HTTP requests, and
are answered by a stream of messages that `GrpcInference` writes. Before each message it writes the length, as
on the wire, because several messages can be written together. The metadata of a call have the role of HTTP
headers: `x-sim-*` change the options. gRPC's own threads write to the wire. So the truth log has an earlier
time: when a message was passed to the coroutine that passes it to gRPC.

Faults: a rejected request gets a status and no message. A gRPC server cannot reset or cut a connection, so a
call ends with the status that its client would report: `reset` UNAVAILABLE, `truncate` DATA_LOSS, `error`
INTERNAL. `unfinished` ends with status OK, without a finish reason or usage.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, cast

import grpc
import grpc.aio

from llmtap.protocol.vllm_grpc import (
    REQUEST_ID,
    SERVICE,
    SGLANG_SERVICE,
    GrpcChunk,
    GrpcUsage,
    read_request,
    write_chunk,
)
from llmtap.sim.server.reception import BUSY, FILTERED, RETRY_AFTER_S, Reception
from llmtap.sim.server.sender import ServerJob
from llmtap.sim.server.shapes import Answer, BadRequest, Shape, SimulatedRequest
from llmtap.workload.prompts.text import token_ids

PREFIX: Final = struct.Struct("!BI")
"""Prefix of a gRPC message: compressed flag, length."""


def read(data: bytes, service: str) -> tuple[SimulatedRequest, str]:
    """Parse the request message of a call. Return the request and its id. Raises BadRequest."""
    try:
        r = read_request(data, service)
    except ValueError as exc:
        raise BadRequest(str(exc)) from None
    parsed = SimulatedRequest(
        model="sim",
        stream=True,
        prompts=(r.text,),
        prompt_tokens=len(r.token_ids) or None,
        max_tokens=r.max_tokens,
        min_tokens=r.min_tokens,
        ignore_eos=r.ignore_eos,
        stop=tuple(r.stop),
        seed=r.seed,
        include_usage=True,
    )
    return parsed, r.request_id


class GrpcInference(Shape):
    """Writes one answer (one choice, always streamed). gRPC itself sends keep-alives and errors."""

    media_type = ""

    def __init__(self, answer: Answer, service: str, request_id: str) -> None:
        super().__init__(answer, "generate-sim")
        self._service = service
        self._request_id = request_id or self.id

    def chunk(self, index: int, first: int, last: int, final: bool) -> bytes:
        self._answer.sent_tokens[index] = last
        if first == last:
            return b""
        return self._frame_message(
            GrpcChunk([token_ids(piece)[0] for piece in self._choice.pieces[first:last]])
        )

    def ending(self) -> bytes:
        answer = self._answer
        usage = GrpcUsage(answer.prompt_tokens, answer.sent_tokens[0], answer.cached_tokens or 0)
        return self._frame_message(GrpcChunk(finish_reason=self._choice.finish, usage=usage))

    def _frame_message(self, chunk: GrpcChunk) -> bytes:
        message = write_chunk(chunk, self._service, self._request_id)
        return PREFIX.pack(0, len(message)) + message


_STATUSES: Final = {
    400: grpc.StatusCode.PERMISSION_DENIED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
"""gRPC status of a rejected request, by the HTTP status of the rejection. 400 is a refusal by a guardrail."""
_FAILURES: Final = {
    "reset": (grpc.StatusCode.UNAVAILABLE, "the connection was reset"),
    "truncate": (grpc.StatusCode.DATA_LOSS, "the connection was closed within a message"),
    "error": (grpc.StatusCode.INTERNAL, "the engine broke down"),
    "given_up": (grpc.StatusCode.INTERNAL, "the engine gave the request up"),
}
"""gRPC status and message by the outcome of an answer that broke off."""
_MESSAGE_BYTES_MAX: Final = 64 << 20
"""Maximum size of a request in bytes, the same as over HTTP."""


class _MessagePipe:
    """Replacement for a transport: a `ResponseSender` writes bytes to it, and `next` returns the messages."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._news_event = asyncio.Event()
        """Set when a message was written or the answer has ended."""
        self._has_ended = False
        """Whether the sender has written its last byte."""

    # Methods of asyncio.Transport, which the sender calls:

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self._buffered_bytes

    def get_extra_info(self, name: str) -> None:
        return None

    def write(self, data: bytes) -> None:
        """Take the bytes of framed messages from the sender, as a transport does."""
        start = 0
        while start + PREFIX.size <= len(data):
            end = start + PREFIX.size + PREFIX.unpack_from(data, start)[1]
            if end > len(data):
                return  # The fault `truncate` cut the message: gRPC cannot send a part of it.
            self._messages.append(data[start + PREFIX.size : end])
            start = end
        self._buffered_bytes += len(data)
        self._news_event.set()

    def close(self) -> None:
        """Do nothing: `_stream` ends the call with a status."""

    def abort(self) -> None:
        """Do nothing, like `close`: messages that were already written are still sent."""

    # Methods that `GrpcService` calls:

    def end(self, done: "asyncio.Future[None]") -> None:
        """Record that no more messages will be written."""
        self._has_ended = True
        self._news_event.set()

    async def next(self) -> bytes | None:
        """Return the next message; None at the end."""
        while not self._messages:
            if self._has_ended:
                return None
            self._news_event.clear()
            await self._news_event.wait()
        message = self._messages.popleft()
        self._buffered_bytes = self._buffered_bytes - len(message) - PREFIX.size if self._messages else 0
        return message


class GrpcService:
    """Server of vLLM's and SGLang's services. Call `start` and `stop` in the event loop that serves calls."""

    def __init__(self, reception: Reception) -> None:
        self._reception = reception
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, port: int, tls: tuple[bytes, bytes] | None = None) -> int:
        """Start serving. Return the port. Raises OSError if the address cannot be bound.

        `tls`: certificate and key (PEM).
        """
        server = self._server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
                ("grpc.http2.max_concurrent_streams", 1 << 20),
            )
        )
        for name in (SERVICE, SGLANG_SERVICE):
            # Pass no serializers, so that gRPC passes requests and messages as bytes.
            method = grpc.unary_stream_rpc_method_handler(partial(self._generate, name))
            service = grpc.method_handlers_generic_handler(name, {"Generate": method})
            server.add_generic_rpc_handlers((service,))
        address = f"[{host}]:{port}" if ":" in host else f"{host or '[::]'}:{port}"
        try:
            if tls is None:
                bound = server.add_insecure_port(address)
            else:
                certificate, key = tls
                bound = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
        except RuntimeError as exc:
            raise OSError(0, str(exc)) from None
        if not bound:
            raise OSError(0, "the address cannot be bound; is the port in use?")
        await server.start()
        return int(bound)

    async def stop(self) -> None:
        """Stop serving, and end running calls at once."""
        # The server refers to this object. Remove the reference to it, so that both and gRPC's poller are
        # freed.
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    async def _generate(self, service: str, request: bytes, context: Any) -> None:
        """Handle one call."""
        reception = self._reception
        accepted_ns = reception.clock.mono_ns()
        metadata: Mapping[str, str] = {
            key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)
        }
        try:
            request_, request_id = read(request, service)
            job = reception.accept(
                request_,
                lambda answer: GrpcInference(answer, service, request_id),
                path=f"/{service}/Generate",
                headers=metadata,
                accepted_ns=accepted_ns,
                request_id=request_id or None,
            )
        except ValueError as exc:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(exc))
            return
        try:
            if (status := job.rejection_status) is not None:
                if status == 400:
                    await reception.wait_for_input_filter(job)
                await self._reject(job, status, context)
            reception.submit(job)
            await self._stream(job, context)
        finally:
            reception.end(job)

    async def _stream(self, job: ServerJob, context: Any) -> None:
        pipe = _MessagePipe()
        sender = self._reception.make_sender(job)
        try:
            if not await self._reception.wait_to_begin(job, sender):
                await self._reject(job, 503, context)
            await context.send_initial_metadata(((REQUEST_ID, job.truth.id),))
            sender.done.add_done_callback(pipe.end)
            sender.start(cast(asyncio.Transport, pipe), framed=False)
            while (message := await pipe.next()) is not None:
                await context.write(message)
        finally:
            sender.abandon("client_left")
        if failure := _FAILURES.get(job.truth.outcome):
            await context.abort(*failure)

    async def _reject(self, job: ServerJob, status: int, context: Any) -> None:
        """Reject a call. This never returns: `context.abort` raises an exception, which ends the call."""
        job.set_rejected(status)
        code, message = BUSY.get(status, ("content_filter", FILTERED))
        retry = (("retry-after", RETRY_AFTER_S),) if status in BUSY else ()
        await context.abort(_STATUSES[status], f"{code}: {message}", retry)
