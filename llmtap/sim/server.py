"""A server in the form of OpenAI's, Anthropic's and Ollama's, whose every send is due at a known moment.

A request is read by its shape (`shapes/`), planned (`plan.py`), drawn its mishaps (`mishaps.py`), and
delivered (`delivery.py`, `sender.py`) by one pacer for all. What was really sent when is kept (`truth.py`)
for whoever wants to hold a measurement against it: `SimServer.sent`, `GET /sim/truth?since=N`, and a file.
Headers `x-sim-*` change the options for one request; `options.py` has their names.
"""

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import HttpVersion11, web

from llmtap.clock import Clock, SystemClock
from llmtap.sim.delivery import BREAKS, Said, Write, writes
from llmtap.sim.gauges import Gauges
from llmtap.sim.mishaps import REFUSAL, Mishaps, draw
from llmtap.sim.options import CHOICES_MAX, TOKENS_MAX, SimOptions, for_request
from llmtap.sim.pacing import Pacer
from llmtap.sim.plan import FixedSchedule, Planner, Work
from llmtap.sim.sender import Sender, reset
from llmtap.sim.shapes import anthropic, ollama, openai_chat, openai_completions, openai_responses
from llmtap.sim.shapes.shape import Answer, Asked, BadRequest, Choice, Shape
from llmtap.sim.truth import Truth, TruthLog
from llmtap.sim.words import count_tokens, cut_tokens, say

__all__ = ["SimServer"]

ANSWERED: Final = frozenset({"complete", "refused", "blocked", "stall", "slow"})
"""Outcomes of answers that came to their end."""
BODY_BYTES_MAX: Final = 64 << 20
FILTERED: Final = "the prompt was filtered: it triggered the content management policy"


@dataclass(frozen=True, slots=True)
class _Api:
    """An endpoint: how its requests are read and its answers written."""

    path: str
    read: Callable[[bytes], Asked]
    shape: Callable[[Answer], Shape]
    error: Callable[[int, str, str], dict[str, Any]]
    choices_max: int = 1


def _openai_error(status: int, code: str, message: str) -> dict[str, Any]:
    kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
    kind = kinds.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _anthropic_error(status: int, code: str, message: str) -> dict[str, Any]:
    kinds = {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}
    return {
        "type": "error",
        "error": {"type": kinds.get(status, "invalid_request_error"), "message": message},
    }


def _ollama_error(status: int, code: str, message: str) -> dict[str, Any]:
    return {"error": message}


_APIS: Final = (
    _Api("/v1/chat/completions", openai_chat.read, openai_chat.OpenAIChat, _openai_error, CHOICES_MAX),
    _Api(
        "/v1/completions", openai_completions.read, openai_completions.OpenAICompletions, _openai_error,
        CHOICES_MAX,
    ),
    _Api("/v1/responses", openai_responses.read, openai_responses.OpenAIResponses, _openai_error),
    _Api("/v1/messages", anthropic.read, anthropic.Anthropic, _anthropic_error),
    _Api("/api/chat", ollama.read_chat, ollama.OllamaChat, _ollama_error),
    _Api("/api/generate", ollama.read_generate, ollama.OllamaGenerate, _ollama_error),
)  # fmt: skip


@dataclass(slots=True)
class _Job:
    """A request that is to be answered."""

    api: _Api
    options: SimOptions
    answer: Answer
    shape: Shape
    mishaps: Mishaps
    writes: Iterator[Write]
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
        truth_file: Path | None = None,
    ) -> None:
        self._options = options
        self._clock = clock or SystemClock()
        self._planner = planner or FixedSchedule()
        self._pacer = Pacer(self._clock)
        self._truths = TruthLog(self._clock, truth_file)
        self._count = 0
        self.gauges = Gauges(options.model)
        say(1, "")  # writes the text, which is not to be the first request's burden
        self.app = web.Application(client_max_size=BODY_BYTES_MAX)
        self.app.add_routes([web.post(api.path, self._handler(api)) for api in _APIS])
        self.app.add_routes([
            web.get("/v1/models", self._models),
            web.get("/api/tags", self._tags),
            web.get("/health", self._health),
            web.get("/metrics", self._metrics),
            web.get("/sim/truth", self._truth),
        ])  # fmt: skip
        self.app.on_cleanup.append(self._close)

    @property
    def sent(self) -> OrderedDict[str, list[int]]:
        """By request id: the monotonic ns just before each token was written."""
        return self._truths.sent

    async def _close(self, app: web.Application) -> None:
        self._pacer.close()
        self._truths.close()

    # What is not an answer.

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._options.model, "object": "model", "created": 0, "owned_by": "llmtap"}
        return _json({"object": "list", "data": [model]})

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

    def _handler(self, api: _Api) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._handle(request, api)

        return handle

    async def _handle(self, request: web.Request, api: _Api) -> web.StreamResponse:
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
            if job.answer.asked.stream:
                return await self._stream(request, job, headers)
            return await self._whole(request, job, headers)
        finally:
            self._end(job)

    def _job(self, request: web.Request, api: _Api, body: bytes, accepted_ns: int) -> _Job:
        """Everything about an answer, before anything is sent. Raises ValueError."""
        asked = api.read(body)
        options = for_request(self._options, request.headers)
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
        choices, said, made_ns = [], [], []
        prompt_tokens = asked.prompt_tokens
        if prompt_tokens is None:
            prompt_tokens = sum(map(count_tokens, asked.prompts))
        for prompt in asked.prompts:
            for i in range(asked.n):
                choice = _choice(asked, options, mishaps, f"{options.seed}/{asked.seed}/{i}/{prompt}", exact)
                work = Work(prompt_tokens, len(choice.pieces), options)
                made: list[int] = []
                due_ns = _noted(self._planner.plan(work, chance).due_ns, accepted_ns, made)
                delivery = Said(due_ns, len(choice.pieces))
                if mishaps.refusal is None and mishaps.block_after is not None:
                    delivery.block_after = mishaps.block_after
                    _block(choice, mishaps.block_after, options)
                choices.append(choice)
                said.append(delivery)
                made_ns.append(made)
        answer = Answer(self._count, asked, prompt_tokens, choices, options.dialect)
        shape = api.shape(answer)
        request_id = request.headers.get("x-request-id", shape.id)
        truth = Truth(
            id=request_id, path=api.path, model=asked.model, stream=asked.stream, accepted_ns=accepted_ns,
            prompt_tokens=prompt_tokens, made_ns=made_ns, due_ns=[[] for _ in choices],
            sent_ns=[[] for _ in choices], finish=[choice.finish for choice in choices],
        )  # fmt: skip
        outcome: str = mishaps.fault or "complete"
        if mishaps.refusal is not None:
            outcome = "refused"
        elif any(choice.finish == "content_filter" for choice in choices):
            outcome = "blocked"
        stamps = self._truths.begin(request_id)
        delivered = writes(said, options, mishaps.fault)
        return _Job(api, options, answer, shape, mishaps, delivered, outcome, truth, stamps)

    def _turned_away(self, job: _Job, status: int, headers: dict[str, str]) -> web.Response:
        job.truth.outcome, job.truth.status = str(status), status
        after_s = -(-job.options.faults.retry_after // 1_000_000_000)
        code, message = {
            429: ("rate_limit_exceeded", "too many requests"),
            503: ("overloaded", "the engine is overloaded"),
        }[status]
        return _json(job.api.error(status, code, message), status, {**headers, "Retry-After": str(after_s)})

    async def _stream(self, request: web.Request, job: _Job, headers: dict[str, str]) -> web.StreamResponse:
        truth = job.truth
        sender = Sender(
            job.answer, job.shape, job.writes, truth, job.stamps, self.gauges, self._clock, job.outcome
        )
        if job.mishaps.fault == "slow":
            await self._pacer.wait_until(truth.accepted_ns + job.options.faults.slow)
        media_type = f"{job.shape.media_type}; charset=utf-8"
        response = web.StreamResponse(
            headers={"Content-Type": media_type, "Cache-Control": "no-cache", **headers}
        )
        transport = request.transport
        if transport is None:
            return response  # the client has gone
        await response.prepare(request)
        sender.start(transport, framed=request.version >= HttpVersion11)
        self._pacer.add(sender.due_ns, sender.act)
        try:
            await sender.done
        finally:
            sender.abandon()
        return response

    async def _whole(self, request: web.Request, job: _Job, headers: dict[str, str]) -> web.Response:
        truth, shape, fault = job.truth, job.shape, job.mishaps.fault
        due_ns = truth.accepted_ns + deque(job.writes, maxlen=1)[0].due_ns
        await self._pacer.wait_until(due_ns)
        transport = request.transport
        if transport is None or transport.is_closing():
            return web.Response()
        first_ns = min((made[0] for made in truth.made_ns if made), default=due_ns)
        job.answer.prompt_ns, job.answer.output_ns = first_ns - truth.accepted_ns, due_ns - first_ns
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
        sent = [stamp for stamps in truth.sent_ns for stamp in stamps]
        # When it streams, what the client could see; else what the engine did.
        seen = sent if truth.stream else [stamp for stamps in truth.made_ns for stamp in stamps]
        answered = truth.outcome in ANSWERED and truth.status == 200
        self.gauges.ended(
            tokens=len(sent), first_to_last_ns=max(seen) - min(seen) if seen else None,
            e2e_ns=truth.ended_ns - truth.accepted_ns, reasons=truth.finish if answered else [],
        )  # fmt: skip
        self._truths.end(truth)


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode(content)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def _noted(due_ns: Iterator[int], accepted_ns: int, made_ns: list[int]) -> Iterator[int]:
    """The plan as it is read, with what was read written down."""
    for due in due_ns:
        made_ns.append(accepted_ns + due)
        yield due


def _choice(asked: Asked, options: SimOptions, mishaps: Mishaps, key: str, exact: bool) -> Choice:
    """What is to be said. `exact`: so many tokens as the options say, whatever else is asked for."""
    match mishaps.refusal:
        case "content_filter" | "error":
            return Choice([], "content_filter")
        case "text" | "field" as kind:
            return Choice(cut_tokens(REFUSAL), refused=kind == "field")
    natural, limit = options.tokens, asked.max_tokens
    count, finish = natural, "stop"
    if not exact:
        count = max(limit or natural if asked.ignore_eos else natural, asked.min_tokens)
        if limit is not None and (count > limit or asked.ignore_eos):
            count, finish = limit, "length"
    if count > TOKENS_MAX:
        count, finish = TOKENS_MAX, "length"
    choice = Choice(list(say(count, key)), finish)
    if asked.stop:
        _stop(choice, asked)
    return choice


def _stop(choice: Choice, asked: Asked) -> None:
    """End the choice where a stop string is complete, not before `min_tokens`.

    The string was generated and counts, and is not said.
    """
    text = choice.text
    start = sum(map(len, choice.pieces[: asked.min_tokens]))
    found = [(at, stop) for stop in asked.stop if (at := text.find(stop, start)) >= 0]
    if not found:
        return
    at, stop = min(found, key=lambda hit: hit[0] + len(hit[1]))
    chars = 0
    for i, piece in enumerate(choice.pieces):
        begun, chars = chars, chars + len(piece)
        choice.pieces[i] = piece[: max(0, at - begun)]
        if chars >= at + len(stop):
            del choice.pieces[i + 1 :]
            break
    choice.finish, choice.stop_text = "stop", stop


def _block(choice: Choice, after: int, options: SimOptions) -> None:
    """What is left of a choice that the output filter stops at token `after`; what it holds then is lost."""
    tokens, hold = len(choice.pieces), options.guardrails.output_hold
    if after < tokens:
        size = tokens if hold == "all" else max(1, hold)
        del choice.pieces[after // size * size :]
        choice.finish, choice.stop_text = "content_filter", None
