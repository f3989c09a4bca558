"""A server in the form of OpenAI's, Anthropic's and Ollama's, whose every send is due at a known moment.

A request is read by its endpoint (`endpoints.py`), drawn its mishaps (`mishaps.py`), told what to say
(`choices.py`), and planned, or handed to the engine (`plan.py`, `live.py`); it is delivered (`delivery.py`,
`sender.py`) by one pacer for all. What was really sent when is kept (`truth.py`) for whoever wants to hold a
measurement against it: `SimServer.sent`, `GET /sim/truth?since=N`, and a file. Headers `x-sim-*` change the
options for one request; `options.py` has their names.

With a fixed schedule the head of a stream is sent at once. With an engine it leaves with the first write: a
request that the engine gives up before is told so by its status.
"""

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import HttpVersion11, web

from llmtap.clock import Clock, SystemClock
from llmtap.net.pacing import Pacer, Waker
from llmtap.sim.gateway.choices import block, choose
from llmtap.sim.gateway.delivery import BREAKS, Delivery, Said
from llmtap.sim.gateway.endpoints import ENDPOINTS, Endpoint, openai_error
from llmtap.sim.gateway.gauges import Gauges
from llmtap.sim.gateway.live import Live, Ticket, live_of
from llmtap.sim.gateway.mishaps import Mishaps, draw
from llmtap.sim.gateway.options import EngineOptions, SimOptions, for_request
from llmtap.sim.gateway.plan import Fed, FixedSchedule, Planned, Planner, Source, Work
from llmtap.sim.gateway.prompts import prefix_blocks, prompt_lengths
from llmtap.sim.gateway.sender import Gatherer, Sender, reset
from llmtap.sim.gateway.shapes.shape import Answer, Asked, BadRequest, Shape
from llmtap.sim.gateway.truth import Submitted, Truth, TruthLog
from llmtap.units import NEVER
from llmtap.workload.words import say

__all__ = ["SimServer"]

ANSWERED: Final = frozenset({"complete", "refused", "blocked", "stall", "slow"})
"""Outcomes of answers that came to their end."""
BODY_BYTES_MAX: Final = 64 << 20
FILTERED: Final = "the prompt was filtered: it triggered the content management policy"


@dataclass(slots=True)
class _Job:
    """A request that is to be answered."""

    api: Endpoint
    options: SimOptions
    answer: Answer
    shape: Shape
    mishaps: Mishaps
    delivery: Delivery
    source: Source
    outcome: str
    """When all goes as drawn."""
    truth: Truth
    stamps: list[int]


class SimServer:
    """The server; `app` is for aiohttp to run."""

    def __init__(
        self,
        options: SimOptions,
        clock: Clock | None = None,
        *,
        planner: Planner | None = None,
        engine: EngineOptions | None = None,
        truth_file: Path | None = None,
    ) -> None:
        """With `engine` there is one behind all answers; else each is planned for itself."""
        self._options = options
        self._clock = clock or SystemClock()
        self._planner = planner or FixedSchedule()
        self._pacer = Pacer(self._clock)
        self._engine = engine
        self._live: Live | None = None
        if engine is not None:
            self._live = live_of(engine, options.seed, Waker(self._pacer, self._advance).sooner)
        self._truths = TruthLog(self._clock, truth_file)
        self._count = 0
        self.gauges = Gauges(options.model, None if self._live is None else self._live.state)
        say(1, "")  # writes the text, which is not to be the first request's burden
        self.app = web.Application(client_max_size=BODY_BYTES_MAX)
        self.app.add_routes([web.post(api.path, self._handler(api)) for api in ENDPOINTS])
        self.app.add_routes([
            web.get("/v1/models", self._models),
            web.get("/v1/models/{id:.+}", self._model),
            web.get("/api/tags", self._tags),
            web.get("/health", self._health),
            web.get("/metrics", self._metrics),
            web.get("/sim/truth", self._truth),
            web.route("*", "/{path:.*}", self._unknown),
        ])  # fmt: skip
        self.app.on_cleanup.append(self._close)

    @property
    def sent(self) -> OrderedDict[str, list[int]]:
        """By request id: the monotonic ns just before each token was written."""
        return self._truths.sent

    def _advance(self, now_ns: int) -> int:
        assert self._live is not None
        self._live.advance(now_ns)
        return self._live.next_ns

    async def _close(self, app: web.Application) -> None:
        self._pacer.close()
        self._truths.close()

    # What is not an answer.

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [_model(self._options.model)]})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if name != self._options.model:
            return _json(openai_error(404, "model_not_found", f"there is no model {name!r}"), 404)
        return _json(_model(name))

    async def _unknown(self, request: web.Request) -> web.Response:
        what = f"there is no {request.method} {request.path}"
        return _json(openai_error(404, "unknown_url", what), 404)

    async def _tags(self, request: web.Request) -> web.Response:
        return _json({"models": [{"name": self._options.model, "model": self._options.model}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=self.gauges.text(), headers={"Content-Type": content_type})

    async def _truth(self, request: web.Request) -> web.Response:
        since = request.query.get("since", "0")
        if not since.isdigit():
            return _json({"error": "since is the number of a request"}, 400)
        return _json(self._truths.since(int(since)))

    # Answers.

    def _handler(self, api: Endpoint) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._handle(request, api)

        return handle

    async def _handle(self, request: web.Request, api: Endpoint) -> web.StreamResponse:
        body = await request.read()
        accepted_ns = self._clock.mono_ns()
        try:
            job = self._job(request, api, body, accepted_ns)
        except ValueError as exc:
            return _json(api.error(400, "invalid_request", str(exc)), 400)
        headers = {"x-request-id": job.truth.id}
        self.gauges.began(job.answer.prompt_tokens)
        try:
            match job.mishaps:
                case Mishaps(fault="429" | "503" as status):
                    return self._turned_away(job, int(status), headers)
                case Mishaps(refusal="error"):
                    await self._pacer.wait_until(accepted_ns + job.options.guardrails.input_filter)
                    job.truth.outcome, job.truth.status = "refused", 400
                    return _json(api.error(400, "content_filter", FILTERED), 400, headers)
            if isinstance(job.source, Fed):
                job.source.ask(accepted_ns, accepted_ns + job.options.guardrails.wait_ns)
            if job.answer.asked.stream:
                return await self._stream(request, job, headers)
            return await self._whole(request, job, headers)
        finally:
            job.source.close(self._clock.mono_ns())
            self._end(job)

    def _job(self, request: web.Request, api: Endpoint, body: bytes, accepted_ns: int) -> _Job:
        """Everything about an answer, before anything is sent. Raises ValueError."""
        asked = api.read(body)
        options = for_request(self._options, request.headers, fixed=self._engine is None)
        wanted = len(asked.prompts) * asked.n
        if not 1 <= wanted <= api.choices_max:
            raise BadRequest(f"{wanted} answers were asked for; there can be 1 to {api.choices_max}")
        if asked.max_tokens is not None and asked.max_tokens < 1:
            raise BadRequest(f"the most tokens of an answer cannot be {asked.max_tokens}")
        self._count += 1
        # With a seed of its own a request meets the same fate each time; else the order decides.
        key = f"{options.seed}/" + (f"seed {asked.seed}" if asked.seed is not None else f"{self._count}")
        chance = random.Random(key)
        mishaps = draw(options, chance)
        exact = "x-sim-tokens" in request.headers
        choices = [
            choose(asked, options, mishaps, f"{options.seed}/{asked.seed}/{i}/{prompt}", exact)
            for prompt in asked.prompts
            for i in range(asked.n)
        ]
        said = []
        for choice in choices:
            block_after = mishaps.block_after if mishaps.refusal is None else None
            apart = self._engine is not None and not self._engine.iterates
            said.append(Said(len(choice.pieces), block_after, apart))
        made_ns: list[list[int]] = [[] for _ in choices]
        fault = mishaps.fault
        delivery = Delivery(said, options, fault, accepted_ns)
        lengths = prompt_lengths(asked)
        source: Source
        if self._live is not None:
            source = Fed(self._live, delivery, made_ns)
            source.tickets = self._tickets(asked, said, lengths, source)
        else:
            plans = [
                (self._planner.plan(Work(sum(lengths), one.tokens, options), chance).due_ns, one.tokens)
                for one in said
            ]
            source = Planned(delivery, plans, made_ns, accepted_ns, options.guardrails.wait_ns)
        for choice, one in zip(choices, said, strict=True):
            if one.block_after is not None:
                block(choice, one.block_after, options)
        answer = Answer(self._count, asked, sum(lengths), choices, options.dialect)
        shape = api.shape(answer)
        request_id = request.headers.get("x-request-id", shape.id)
        truth = Truth(
            id=request_id, path=api.path, model=asked.model, stream=asked.stream, accepted_ns=accepted_ns,
            prompt_tokens=answer.prompt_tokens, made_ns=made_ns, due_ns=[[] for _ in choices],
            sent_ns=[[] for _ in choices], finish=[choice.finish for choice in choices],
        )  # fmt: skip
        outcome: str = fault or "complete"
        if mishaps.refusal is not None:
            outcome = "refused"
        elif any(choice.finish == "content_filter" for choice in choices):
            outcome = "blocked"
        stamps = self._truths.begin(request_id)
        return _Job(api, options, answer, shape, mishaps, delivery, source, outcome, truth, stamps)

    def _tickets(self, asked: Asked, said: list[Said], lengths: list[int], listener: Fed) -> list[Ticket]:
        """What the engine is asked for: a request of its own for each choice. Raises BadRequest."""
        assert self._engine is not None
        limit, size = self._engine.tokens_max, self._engine.block_tokens
        shared: list[tuple[int, ...]] = [()] * len(lengths)
        if size and asked.prompt_tokens is None:
            shared = [prefix_blocks(prompt, size) for prompt in asked.prompts]
        tickets = []
        for i, one in enumerate(said):
            prompt = i // asked.n
            given, made = lengths[prompt], one.tokens
            if limit is not None and given + made > limit:
                raise BadRequest(
                    f"the prompt has {given} tokens and the answer would have {made}; together they can have "
                    f"{limit}"
                )
            if made:  # else it is refused before the engine
                tickets.append(Ticket(listener, i, given, made, shared[prompt], prompt))
        return tickets

    def _turned_away(
        self, job: _Job, status: int, headers: dict[str, str], outcome: str | None = None
    ) -> web.Response:
        job.truth.outcome, job.truth.status = outcome or str(status), status
        after_s = -(-job.options.faults.retry_after // 1_000_000_000)
        code, message = {
            429: ("rate_limit_exceeded", "too many requests"),
            503: ("overloaded", "the engine is overloaded"),
        }[status]
        return _json(job.api.error(status, code, message), status, {**headers, "Retry-After": str(after_s)})

    def _given_up(self, job: _Job, headers: dict[str, str]) -> web.Response:
        """The engine is not going to serve it, and nothing of it was sent."""
        return self._turned_away(job, 503, headers, "given_up")

    async def _stream(self, request: web.Request, job: _Job, headers: dict[str, str]) -> web.StreamResponse:
        truth, source = job.truth, job.source
        sender = Sender(
            job.answer, job.shape, job.delivery, source, truth, job.stamps, self.gauges, self._pacer,
            self._clock, job.outcome,
        )  # fmt: skip
        try:
            if job.mishaps.fault == "slow":
                await self._pacer.wait_until(truth.accepted_ns + job.options.faults.slow)
            if isinstance(source, Fed):
                source.on_news = sender.wake
                sender.wake()
                await sender.begins
                if source.given_up:
                    sender.abandon()
                    return self._given_up(job, headers)
            media_type = f"{job.shape.media_type}; charset=utf-8"
            response = web.StreamResponse(
                headers={"Content-Type": media_type, "Cache-Control": "no-cache", **headers}
            )
            transport = request.transport
            if transport is None:
                return response  # the client has gone
            await response.prepare(request)
            sender.start(transport, framed=request.version >= HttpVersion11)
            await sender.done
        finally:
            sender.abandon()
        return response

    async def _whole(self, request: web.Request, job: _Job, headers: dict[str, str]) -> web.Response:
        truth, shape, fault, source = job.truth, job.shape, job.mishaps.fault, job.source
        gatherer = Gatherer(job.delivery, source, self._pacer)
        if isinstance(source, Fed):
            source.on_news = gatherer.wake
            gatherer.wake()
            try:
                await gatherer.done
            finally:
                gatherer.close()
            if source.given_up:
                return self._given_up(job, headers)
        else:
            gatherer.act(NEVER)  # all is known
            gatherer.close()
        due_ns = gatherer.due_ns
        await self._pacer.wait_until(due_ns)
        transport = request.transport
        if transport is None or transport.is_closing():
            return web.Response()
        first_ns = min((made[0] for made in truth.made_ns if made), default=due_ns)
        job.answer.prompt_ns, job.answer.output_ns = first_ns - truth.accepted_ns, due_ns - first_ns
        job.answer.cached_tokens = source.cached_tokens
        body = msgspec.json.encode(shape.whole())
        truth.outcome = job.outcome
        if fault in BREAKS:
            if fault == "error":
                truth.status = 500
                return _json(job.api.error(500, "internal_error", "the engine broke down"), 500, headers)
            if fault == "reset":
                reset(transport)
                return web.Response()
            if fault == "truncate":
                lines = ("HTTP/1.1 200 OK", "Content-Type: application/json", f"Content-Length: {len(body)}")
                head = "\r\n".join((*lines, "", ""))
                transport.write(head.encode() + body[: len(body) // 2])
                transport.close()
                return web.Response()
            body = body[: len(body) // 2]
        if job.answer.output_tokens:
            self.gauges.first(first_ns - truth.accepted_ns)
        now_ns = self._clock.mono_ns()
        for i, choice in enumerate(job.answer.choices):
            truth.due_ns[i] = [due_ns] * len(choice.pieces)
            truth.sent_ns[i] = [now_ns] * len(choice.pieces)
            job.stamps += truth.sent_ns[i]
        truth.late_ns_max = now_ns - due_ns
        return web.Response(body=body, content_type="application/json", headers=headers)

    def _end(self, job: _Job) -> None:
        truth = job.truth
        truth.ended_ns = self._clock.mono_ns()
        if isinstance(job.source, Fed):
            truth.submitted = [_submitted(one) for one in job.source.tickets if one.arrival_ns]
        sent = [stamp for stamps in truth.sent_ns for stamp in stamps]
        # When it streams, what the client could see; else what the engine did.
        seen = sent if truth.stream else [stamp for stamps in truth.made_ns for stamp in stamps]
        answered = truth.outcome in ANSWERED and truth.status == 200
        self.gauges.ended(
            tokens=len(sent), first_to_last_ns=max(seen) - min(seen) if seen else None,
            e2e_ns=truth.ended_ns - truth.accepted_ns, reasons=truth.finish if answered else [],
        )  # fmt: skip
        self._truths.end(truth)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "llmtap"}


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode(content)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def _submitted(ticket: Ticket) -> Submitted:
    return Submitted(
        choice=ticket.choice, number=ticket.number, arrival_ns=ticket.arrival_ns, input=ticket.input,
        output=ticket.output, predicted=ticket.predicted, cached=ticket.cached,
    )  # fmt: skip
