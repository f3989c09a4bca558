"""Simulated server with the APIs of OpenAI, Anthropic and Ollama, which sends each token at a scheduled time.

`SimServer` has the aiohttp application with all its routes, and starts the WebSocket sessions and the gRPC
services; `llmtap sim serve` and the self-test run it. An `Endpoint` parses a request, and the reception
(`reception.py`) decides the answer and its schedule. `delivery.py` and `sender.py` deliver the answer; one
pacer wakes the senders of all answers. The actual send times (`truth.py`) can be compared with a measurement:
they are in `SimServer.send_times`, at `GET /sim/truth?since=N`, and in a file. Headers `x-sim-*` change the
options of one request (`options.py`).

With a fixed schedule, the head of a stream is sent at once. With an engine, it is sent with the first write,
so that the status of the response is 503 if the engine gave the request up before.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import HttpVersion11, web

from llmtap.clock import Clock
from llmtap.json_types import JsonObject
from llmtap.sim.server import openai, shapes
from llmtap.sim.server.delivery import BREAKS
from llmtap.sim.server.openai import openai_error
from llmtap.sim.server.options import CHOICES_MAX, EngineOptions, SimOptions
from llmtap.sim.server.realtime import SimulatedRealtimeSession
from llmtap.sim.server.reception import BUSY, FILTERED, RETRY_AFTER_S, Reception
from llmtap.sim.server.sender import ServerJob, reset_connection
from llmtap.sim.server.shapes import BROKEN, Answer, Shape, SimulatedRequest
from llmtap.sim.server.websocket import SimulatedResponsesSession, SimulatedSession

BODY_BYTES_MAX: Final = 64 << 20
"""Maximum size of a request body in bytes; a longer body gets the status 413."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint with its functions to parse a request, to write an answer, and to report an error."""

    path: str
    read: Callable[[bytes], SimulatedRequest]
    shape: Callable[[Answer], Shape]
    error: Callable[[int, str, str], JsonObject]
    choices_max: int = 1
    """Largest number of choices in an answer."""


ENDPOINTS: Final = (
    Endpoint("/v1/chat/completions", openai.read_chat, openai.OpenAIChatShape, openai_error, CHOICES_MAX),
    Endpoint("/bench/chat/completions", openai.read_bench_chat, openai.ExoBenchShape, openai_error),
    Endpoint(
        "/v1/completions", openai.read_completions, openai.OpenAICompletionsShape, openai_error, CHOICES_MAX
    ),
    Endpoint("/v1/responses", openai.read_responses_request, openai.OpenAIResponsesShape, openai_error),
    Endpoint("/v1/messages", shapes.read_messages, shapes.AnthropicShape, shapes.anthropic_error),
    Endpoint("/api/chat", shapes.read_ollama_chat, shapes.OllamaChat, shapes.ollama_error),
    Endpoint("/api/generate", shapes.read_ollama_generate, shapes.OllamaGenerate, shapes.ollama_error),
)
SESSIONS: Final[tuple[type[SimulatedSession], ...]] = (SimulatedRealtimeSession, SimulatedResponsesSession)


class SimServer:
    """The simulated server; aiohttp runs its `app`."""

    def __init__(
        self,
        options: SimOptions,
        clock: Clock | None = None,
        *,
        engine: EngineOptions | None = None,
        truth_file: Path | None = None,
    ) -> None:
        """`engine`: engine that makes all answers; None: each answer has a fixed schedule."""
        self.reception = Reception(options, clock, engine=engine, truth_file=truth_file)
        self._options = options
        self._clock = self.reception.clock
        self.gauges = self.reception.gauges
        self._truths = self.reception.truths
        self.grpc_port: int | None = None
        """Port of the gRPC service; None: there is none."""
        self._sessions: set[SimulatedSession] = set()
        self._session_count = 0
        """Number of WebSocket sessions so far, for their names."""
        self.app = web.Application(client_max_size=BODY_BYTES_MAX)
        self.app.add_routes([web.post(api.path, partial(self._handle, api)) for api in ENDPOINTS])
        self.app.add_routes(
            [
                web.get("/v1/models", self._answer_models),
                web.get("/health", self._answer_health),
                web.get("/metrics", self._answer_metrics),
                web.get("/sim/truth", self._answer_truth),
                *(web.get(kind.path, partial(self._session, kind)) for kind in SESSIONS),
                web.route("*", "/{path:.*}", self._answer_unknown_path),
            ]
        )
        self.app.on_shutdown.append(self._close_sessions)
        self.app.on_cleanup.append(self._close)

    def serve_grpc(self, host: str, port: int, tls: tuple[bytes, bytes] | None = None) -> None:
        """Also serve vLLM's and SGLang's engine services over gRPC while `app` runs, at `grpc_port`.

        `tls`: certificate and key (PEM).
        """
        # Imported here, because the import of gRPC takes 18 MB and 40 ms.
        from llmtap.sim.server.grpc_service import GrpcService

        service = GrpcService(self.reception)

        async def start(app: web.Application) -> None:
            self.grpc_port = await service.start(host, port, tls)

        async def stop(app: web.Application) -> None:
            await service.stop()

        self.app.on_startup.append(start)
        self.app.on_shutdown.append(stop)

    @property
    def send_times(self) -> OrderedDict[str, list[int]]:
        """Time at which each token was written to the connection (monotonic ns), by request id."""
        return self._truths.send_times

    async def _close(self, app: web.Application) -> None:
        self.reception.close()

    async def _answer_health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _answer_models(self, request: web.Request) -> web.Response:
        model = {"id": self._options.model, "object": "model", "created": 0, "owned_by": "llmtap"}
        return _json_response({"object": "list", "data": [model]})

    async def _answer_unknown_path(self, request: web.Request) -> web.Response:
        message = f"there is no endpoint {request.method} {request.path}"
        return _json_response(openai_error(404, "unknown_url", message), 404)

    async def _answer_metrics(self, request: web.Request) -> web.Response:
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=self.gauges.text(), headers={"Content-Type": content_type})

    async def _answer_truth(self, request: web.Request) -> web.Response:
        since = request.query.get("since", "0")
        if not since.isdigit():
            return _json_response({"error": f"since: expected a number of 0 or more, got {since!r}"}, 400)
        return _json_response(self._truths.page_since(int(since)))

    async def _handle(self, api: Endpoint, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        accepted_ns = self._clock.mono_ns()
        reception = self.reception
        try:
            job = reception.accept(
                api.read(body),
                api.shape,
                path=api.path,
                headers=request.headers,
                accepted_ns=accepted_ns,
                choices_max=api.choices_max,
                request_id=request.headers.get("x-request-id"),
            )
        except ValueError as exc:
            return _json_response(api.error(400, "invalid_request", str(exc)), 400)
        headers = {"x-request-id": job.truth.id}
        try:
            match job.rejection_status:
                case 400:
                    await reception.wait_for_input_filter(job)
                    job.set_rejected(400)
                    return _json_response(api.error(400, "content_filter", FILTERED), 400, headers)
                case int(status):
                    return _rejection_response(api, job, status, headers)
            reception.submit(job)
            if job.answer.request.stream:
                return await self._stream(request, api, job, headers)
            return await self._respond_whole(request, api, job, headers)
        finally:
            reception.end(job)

    async def _stream(
        self, request: web.Request, api: Endpoint, job: ServerJob, headers: dict[str, str]
    ) -> web.StreamResponse:
        sender = self.reception.make_sender(job)
        try:
            if not await self.reception.wait_to_begin(job, sender):
                return _rejection_response(api, job, 503, headers)
            media_type = f"{job.shape.media_type}; charset=utf-8"
            response = web.StreamResponse(
                headers={"Content-Type": media_type, "Cache-Control": "no-cache", **headers}
            )
            transport = request.transport
            if transport is None:
                return response  # The client has disconnected, so nothing can be sent.
            await response.prepare(request)
            sender.start(transport, framed=request.version >= HttpVersion11)
            await asyncio.shield(sender.done)
        finally:
            sender.abandon()
        return response

    async def _respond_whole(
        self, request: web.Request, api: Endpoint, job: ServerJob, headers: dict[str, str]
    ) -> web.Response:
        truth, shape, fault = job.truth, job.shape, job.faults.fault
        due_ns = await self.reception.wait_until_complete(job)
        if due_ns is None:
            return _rejection_response(api, job, 503, headers)
        transport = request.transport
        if transport is None or transport.is_closing():
            return web.Response()
        first_ns = min((made[0] for made in truth.made_ns if made), default=due_ns)
        job.complete(first_ns, due_ns)
        body = msgspec.json.encode(shape.full_answer())
        truth.outcome = job.outcome
        if fault in BREAKS:
            if fault == "error":
                truth.status = 500
                return _json_response(api.error(500, "internal_error", BROKEN), 500, headers)
            if fault == "reset":
                reset_connection(transport)
                return web.Response()
            if fault == "truncate":
                lines = ("HTTP/1.1 200 OK", "Content-Type: application/json", f"Content-Length: {len(body)}")
                head = "\r\n".join((*lines, "", ""))
                transport.write(head.encode() + body[: len(body) // 2])
                transport.close()
                return web.Response()
            body = body[: len(body) // 2]
        else:
            truth.finish = [choice.finish for choice in job.answer.choices]
        if job.answer.output_tokens:
            self.gauges.on_prompt(truth.prompt_tokens)
            self.gauges.on_first_token(first_ns - truth.accepted_ns)
        now_ns = self._clock.mono_ns()
        for i, choice in enumerate(job.answer.choices):
            truth.due_ns[i] = [due_ns] * len(choice.pieces)
            truth.sent_ns[i] = [now_ns] * len(choice.pieces)
            job.send_times += truth.sent_ns[i]
        truth.late_ns_max = now_ns - due_ns
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def _session(self, kind: type[SimulatedSession], request: web.Request) -> web.StreamResponse:
        self._session_count += 1
        session = kind(self.reception, request, self._session_count)
        self._sessions.add(session)
        try:
            return await session.run()
        finally:
            self._sessions.discard(session)

    async def _close_sessions(self, app: web.Application) -> None:
        await asyncio.gather(*(session.close() for session in self._sessions))


def _rejection_response(api: Endpoint, job: ServerJob, status: int, headers: dict[str, str]) -> web.Response:
    job.set_rejected(status)
    retry = {"Retry-After": RETRY_AFTER_S}
    return _json_response(api.error(status, *BUSY[status]), status, {**headers, **retry})


def _json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode(content)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
