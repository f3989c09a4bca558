"""Turn a request of any API into a job of the simulated server, and record how it ended.

`Reception` gets a `SimulatedRequest` from the code of a protocol (`server.py`, `websocket.py`,
`grpc_service.py`), draws its faults and its answer, plans its tokens (`delivery.py`), and returns a
`ServerJob` (`sender.py`). `submit` then submits the job to the engine (`live.py`), if there is one. The
protocol's code sends the answer with the sender of the job and calls `end` afterwards, which adds the job to
the truth log and the metrics.
"""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from llmtap.clock import Clock, SystemClock
from llmtap.net.pacing import Pacer, Waker
from llmtap.sim.server.delivery import (
    DeliveredText,
    Delivery,
    EngineSource,
    PlannedSource,
    PlanSource,
    fixed_schedule,
)
from llmtap.sim.server.gauges import EngineMetrics
from llmtap.sim.server.live import LiveEngine, Ticket, live_of
from llmtap.sim.server.options import TOKENS_MAX, EngineOptions, FaultKind, SimOptions, for_request
from llmtap.sim.server.sender import Gatherer, RequestFaults, ResponseSender, ServerJob
from llmtap.sim.server.shapes import Answer, BadRequest, Choice, Shape, SimulatedRequest
from llmtap.sim.server.truth import Submitted, Truth, TruthLog
from llmtap.units import NEVER
from llmtap.workload.prompts.text import answer_tokens, count_tokens, token_ids, token_texts

ANSWERED: Final = frozenset({"complete", "refused", "blocked", "stall", "slow"})
"""Outcomes of answers that were sent completely."""
NOT_THE_ENGINES: Final = frozenset({"429", "503", "refused"})
"""Outcomes of requests that are rejected before they reach the engine, as by a real API server."""
FILTERED: Final = "the prompt was filtered: it triggered the content management policy"
BUSY: Final = {
    429: ("rate_limit_exceeded", "too many requests"),
    503: ("overloaded", "the engine is overloaded"),
}
"""Code and message of a rejection by status."""
RETRY_AFTER_S: Final = "1"


REFUSAL: Final = "I'm sorry, but I can't help with that."


def draw_faults(options: SimOptions, chance: random.Random) -> RequestFaults:
    """Draw the faults, always with three numbers, so that one rate does not affect the others."""
    at = (chance.random(), chance.random(), chance.random())
    fault: FaultKind | None = None
    reached = 0.0
    for kind, rate in options.faults.rates():
        reached += rate
        if at[0] < reached:
            fault = kind
            break
    g = options.guardrails
    return RequestFaults(
        fault=fault,
        refusal=g.refusal if at[1] < g.refusal_rate else None,
        block_after=g.block_after if at[2] < g.block_rate else None,
    )


def choose_text(
    request: SimulatedRequest, options: SimOptions, faults: RequestFaults, key: str, exact: bool
) -> Choice:
    """Return the text of a choice.

    `exact`: the text has the number of tokens in the options; the limit of the request is ignored.
    """
    match faults.refusal:
        case "content_filter" | "error":
            return Choice([], "content_filter")
        case "text" | "field" as kind:
            return Choice(token_texts(REFUSAL), refused=kind == "field")
    natural, limit = options.tokens, request.max_tokens
    count, finish = natural, "stop"
    if not exact:
        count = max(limit or natural if request.ignore_eos else natural, request.min_tokens)
        if limit is not None and (count > limit or request.ignore_eos):
            count, finish = limit, "length"
    if count > TOKENS_MAX:
        count, finish = TOKENS_MAX, "length"
    choice = Choice(list(answer_tokens(count, key)), finish)
    if request.stop:
        _cut_at_stop(choice, request)
    return choice


def cut_blocked(choice: Choice, after: int, options: SimOptions) -> None:
    """Cut a choice that the output filter blocks after token `after`. Tokens that the filter holds at this
    time are discarded."""
    tokens, hold = len(choice.pieces), options.guardrails.output_hold
    if after < tokens:
        size = tokens if hold == "all" else max(1, hold)
        del choice.pieces[after // size * size :]
        choice.finish, choice.stop_text = "content_filter", None


def _cut_at_stop(choice: Choice, request: SimulatedRequest) -> None:
    """End the choice where the first stop string is complete, but not before `min_tokens`.

    The tokens of the stop string count as output, but are not sent.
    """
    text = choice.text
    start = sum(map(len, choice.pieces[: request.min_tokens]))
    matches = [(at, stop) for stop in request.stop if (at := text.find(stop, start)) >= 0]
    if not matches:
        return
    at, stop = min(matches, key=lambda hit: hit[0] + len(hit[1]))
    chars = 0
    for i, piece in enumerate(choice.pieces):
        begun, chars = chars, chars + len(piece)
        choice.pieces[i] = piece[: max(0, at - begun)]
        if chars >= at + len(stop):
            del choice.pieces[i + 1 :]
            break
    choice.finish, choice.stop_text = "stop", stop


def prompt_lengths(request: SimulatedRequest) -> list[int]:
    """Return the number of tokens of each prompt. If several prompts were given as tokens, only the sum is
    known, and it is divided equally."""
    if request.prompt_tokens is None:
        return [count_tokens(prompt) for prompt in request.prompts]
    each, more = divmod(request.prompt_tokens, max(1, len(request.prompts)))
    return [each + (i < more) for i in range(len(request.prompts))]


def prefix_blocks(prompt: str, size: int) -> tuple[int, ...]:
    """Return the hash of each whole block of `size` tokens, which includes the hash of the block before."""
    tokens = token_ids(prompt)
    blocks: list[int] = []
    before = 0
    for end in range(size, len(tokens) + 1, size):
        before = hash((before, *tokens[end - size : end]))
        blocks.append(before)
    return tuple(blocks)


class Reception:
    """Accepts the requests of a server, from all its protocols."""

    def __init__(
        self,
        options: SimOptions,
        clock: Clock | None = None,
        *,
        engine: EngineOptions | None = None,
        truth_file: Path | None = None,
    ) -> None:
        """`engine`: engine that makes all answers; None: each answer has a fixed schedule."""
        self.options = options
        self.clock = clock or SystemClock()
        self.pacer = Pacer(self.clock)
        self._engine = engine
        self._live_engine: LiveEngine | None = None
        if engine is not None:
            self._live_engine = live_of(engine, options.seed, Waker(self.pacer, self._advance).call_at)
        self.truths = TruthLog(self.clock, truth_file)
        self._count = 0
        self.gauges = EngineMetrics(
            options.model, None if self._live_engine is None else self._live_engine.state
        )
        answer_tokens(1, "")  # Build the cached text now, not during the first request.

    def close(self) -> None:
        self.pacer.close()
        self.truths.close()

    def _advance(self, now_ns: int) -> int:
        assert self._live_engine is not None
        self._live_engine.advance(now_ns)
        return self._live_engine.next_ns

    def accept(
        self,
        request: SimulatedRequest,
        shape_of: Callable[[Answer], Shape],
        *,
        path: str,
        headers: Mapping[str, str],
        accepted_ns: int,
        choices_max: int = 1,
        request_id: str | None = None,
    ) -> ServerJob:
        """Determine an answer completely before any of it is sent.

        `headers`: HTTP headers, or for gRPC the metadata. A request without an id gets the id of its answer.
        Raises ValueError for an invalid request; it then has no effect on later ones.
        """
        options = for_request(self.options, headers, fixed=self._engine is None)
        wanted = len(request.prompts) * request.n
        if not 1 <= wanted <= choices_max:
            raise BadRequest(f"the request wants {wanted} choices; expected 1 to {choices_max}")
        if request.max_tokens is not None and request.max_tokens < 1:
            raise BadRequest(f"max_tokens: expected 1 or more, got {request.max_tokens}")
        self._count += 1
        # The answer to a request with a seed depends only on this seed, so that it can be repeated. Without a
        # seed, it depends on the number of the request.
        key = f"{options.seed}/" + (f"seed {request.seed}" if request.seed is not None else f"{self._count}")
        chance = random.Random(key)
        faults = draw_faults(options, chance)
        exact = "x-sim-tokens" in headers
        choices = [
            choose_text(request, options, faults, f"{options.seed}/{request.seed}/{i}/{prompt}", exact)
            for prompt in request.prompts
            for i in range(request.n)
        ]
        block_after = faults.block_after if faults.refusal is None else None
        ends_separately = self._engine is not None and not self._engine.iterates
        texts = [DeliveredText(len(choice.pieces), block_after, ends_separately) for choice in choices]
        made_ns: list[list[int]] = [[] for _ in choices]
        delivery = Delivery(texts, options, faults.fault, accepted_ns)
        lengths = prompt_lengths(request)
        source: PlanSource
        if self._live_engine is not None:
            source = EngineSource(self._live_engine, delivery, made_ns)
            source.tickets = self._tickets(request, texts, lengths, source)
        else:
            plans = [(fixed_schedule(options, chance), one.tokens) for one in texts]
            source = PlannedSource(delivery, plans, made_ns, accepted_ns, options.guardrails.input_filter)
        if block_after is not None:
            for choice in choices:
                cut_blocked(choice, block_after, options)
        answer = Answer(self._count, request, sum(lengths), choices, options.dialect)
        shape = shape_of(answer)
        outcome: str = faults.fault or "complete"
        if faults.refusal is not None:
            outcome = "refused"
        elif any(choice.finish == "content_filter" for choice in choices):
            outcome = "blocked"
        truth = Truth(
            id=request_id or shape.id,
            path=path,
            model=request.model,
            stream=request.stream,
            accepted_ns=accepted_ns,
            prompt_tokens=answer.prompt_tokens,
            made_ns=made_ns,
            due_ns=[[] for _ in choices],
            sent_ns=[[] for _ in choices],
            finish=[None] * len(choices),
        )
        self.gauges.on_begin()
        stamps = self.truths.begin(truth.id)
        return ServerJob(options, answer, shape, faults, delivery, source, outcome, truth, stamps)

    def _tickets(
        self,
        request: SimulatedRequest,
        texts: list[DeliveredText],
        lengths: list[int],
        listener: EngineSource,
    ) -> list[Ticket]:
        assert self._engine is not None
        limit, size = self._engine.tokens_max, self._engine.block_tokens
        shared: list[tuple[int, ...]] = [()] * len(lengths)
        if size and request.prompt_tokens is None and request.use_prefix_cache:
            shared = [prefix_blocks(prompt, size) for prompt in request.prompts]
        tickets = []
        for i, text in enumerate(texts):
            prompt = i // request.n
            input_tokens, output_tokens = lengths[prompt], text.tokens
            if limit is not None and input_tokens + output_tokens > limit:
                raise BadRequest(
                    f"the prompt has {input_tokens} tokens and the answer would have {output_tokens};"
                    f" the limit of both together is {limit}"
                )
            if output_tokens:  # Without output tokens, the engine does not get the request.
                tickets.append(Ticket(listener, i, input_tokens, output_tokens, shared[prompt], prompt))
        return tickets

    def submit(self, job: ServerJob) -> None:
        """Submit a job to the engine, at once or after the input filter.

        Must be called in the same iteration of the event loop in which the request was accepted, since an
        engine does not accept events of the past.
        """
        if isinstance(job.source, EngineSource):
            accepted_ns = job.truth.accepted_ns
            job.source.submit(accepted_ns, accepted_ns + job.options.guardrails.input_filter)

    async def wait_for_input_filter(self, job: ServerJob) -> None:
        """Wait until the input filter has decided."""
        await self.pacer.wait_until(job.truth.accepted_ns + job.options.guardrails.input_filter)

    def make_sender(self, job: ServerJob) -> ResponseSender:
        """Return the sender of a stream; the caller must call `abandon` at the end."""
        return ResponseSender(job, self.gauges, self.pacer, self.clock)

    async def wait_to_begin(self, job: ServerJob, sender: ResponseSender) -> bool:
        """Wait until the head of a stream may be sent. Return False if the engine gave
        up the request before."""
        source = job.source
        if job.faults.fault == "slow":
            await self.pacer.wait_until(job.truth.accepted_ns + job.options.faults.slow)
        if isinstance(source, EngineSource):
            source.on_news = sender.wake
            sender.wake()
            await sender.begins
            if source.given_up:
                sender.abandon()
                return False
        return True

    async def wait_until_complete(self, job: ServerJob) -> int | None:
        """Wait until an answer is complete and due. Return the due time, or None if it was given up."""
        source = job.source
        gatherer = Gatherer(job, self.pacer)
        if isinstance(source, EngineSource):
            source.on_news = gatherer.wake
            gatherer.wake()
            try:
                await gatherer.done
            finally:
                gatherer.close()
            if source.given_up:
                return None
        else:
            gatherer.take_due(NEVER)  # The schedule is known: take all writes at once.
            gatherer.close()
        await self.pacer.wait_until(gatherer.due_ns)
        return gatherer.due_ns

    def end(self, job: ServerJob) -> None:
        """Close the source of an answer, and add the request to the truth log and the metrics."""
        job.source.close(self.clock.mono_ns())
        truth = job.truth
        truth.ended_ns = self.clock.mono_ns()
        if isinstance(job.source, EngineSource):
            truth.submitted = [
                Submitted(
                    choice=one.choice,
                    number=one.number,
                    arrival_ns=one.arrival_ns,
                    input=one.input,
                    output=one.output,
                    predicted=one.predicted,
                    cached=one.cached,
                )
                for one in job.source.tickets
                if one.arrival_ns
            ]
        sent = [stamp for stamps in truth.sent_ns for stamp in stamps]
        made = [stamp for stamps in truth.made_ns for stamp in stamps]
        if made and not sent:
            self.gauges.on_prompt(truth.prompt_tokens)
        # Use the send times of a stream; without streaming, the times at which the engine made the tokens.
        times = sent if truth.stream else made
        answered = truth.outcome in ANSWERED and truth.status == 200
        reasons: list[str] = []
        if answered or truth.outcome not in NOT_THE_ENGINES:
            other = "error" if truth.outcome == "error" else "abort"
            reasons = [finish or other for finish in truth.finish]
        self.gauges.on_ended(
            tokens=len(sent),
            first_to_last_ns=max(times) - min(times) if times else None,
            e2e_ns=truth.ended_ns - truth.accepted_ns,
            reasons=reasons,
            whole=answered,
        )
        self.truths.end(truth)
