"""Turn a request of any API into a job of the simulated server, and record the end of the request.

The code of a protocol (`server.py`, `websocket.py`, `grpc_service.py`) passes a `SimulatedRequest` to
`Reception.accept`, which draws its faults and its answer, plans its tokens (`delivery.py`), and returns a
`ServerJob` (`sender.py`). `submit` then submits the job to the engine (`live.py`), if there is one. The
protocol's code sends the answer with the sender of the job. Finally it calls `end`, which adds the job to the
truth log and the metrics.
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
from llmtap.sim.server.live import LiveEngine, Ticket, make_live_engine
from llmtap.sim.server.options import TOKENS_MAX, EngineOptions, FaultKind, SimOptions, for_request
from llmtap.sim.server.sender import Gatherer, RequestFaults, ResponseSender, ServerJob
from llmtap.sim.server.shapes import Answer, BadRequest, Choice, Shape, SimulatedRequest
from llmtap.sim.server.truth import Submitted, Truth, TruthLog
from llmtap.units import NEVER
from llmtap.workload.prompts.text import answer_tokens, count_tokens, token_ids, token_texts

ANSWERED: Final = frozenset({"complete", "refused", "blocked", "stall", "slow"})
"""Outcomes of answers that were sent completely."""
REJECTED: Final = frozenset({"429", "503", "refused"})
"""Outcomes of requests that the API server rejects before they reach the engine."""
FILTERED: Final = "the prompt was filtered: it triggered the content management policy"
"""Message of a rejection by the input filter."""
BUSY: Final = {
    429: ("rate_limit_exceeded", "too many requests"),
    503: ("overloaded", "the engine is overloaded"),
}
"""Code and message of a rejection, by its status."""
RETRY_AFTER_S: Final = "1"


REFUSAL: Final = "I'm sorry, but I can't help with that."
"""Text of an answer in which the model refuses the request."""


def draw_faults(options: SimOptions, chance: random.Random) -> RequestFaults:
    """Draw the faults of a request. Every call draws three numbers, so that no rate affects later draws."""
    draws = (chance.random(), chance.random(), chance.random())
    fault: FaultKind | None = None
    rates_sum = 0.0
    for kind, rate in options.faults.rates():
        rates_sum += rate
        if draws[0] < rates_sum:
            fault = kind
            break
    g = options.guardrails
    return RequestFaults(
        fault=fault,
        refusal=g.refusal if draws[1] < g.refusal_rate else None,
        block_after=g.block_after if draws[2] < g.block_rate else None,
    )


def choose_text(
    request: SimulatedRequest, options: SimOptions, faults: RequestFaults, key: str, exact: bool
) -> Choice:
    """Return the text of a choice. `key`: random seed of the text.

    `exact`: whether the text has the number of tokens in the options, even beyond the limit of the request.
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
    """Remove the tokens that the output filter does not release if it blocks after `after` tokens."""
    tokens, hold = len(choice.pieces), options.guardrails.output_hold
    if after < tokens:
        size = tokens if hold == "all" else max(1, hold)
        del choice.pieces[after // size * size :]
        choice.finish, choice.stop_text = "content_filter", None


def _cut_at_stop(choice: Choice, request: SimulatedRequest) -> None:
    """End a choice at the first stop string that is complete, but not before `min_tokens`.

    The tokens of the stop string count as output, but their text is not sent.
    """
    text = choice.text
    start = sum(map(len, choice.pieces[: request.min_tokens]))
    matches = [(index, stop) for stop in request.stop if (index := text.find(stop, start)) >= 0]
    if not matches:
        return
    index, stop = min(matches, key=lambda match: match[0] + len(match[1]))
    piece_end = 0
    for i, piece in enumerate(choice.pieces):
        piece_start, piece_end = piece_end, piece_end + len(piece)
        choice.pieces[i] = piece[: max(0, index - piece_start)]
        if piece_end >= index + len(stop):
            del choice.pieces[i + 1 :]
            break
    choice.finish, choice.stop_text = "stop", stop


def prompt_lengths(request: SimulatedRequest) -> list[int]:
    """Return the number of tokens of each prompt. If the prompts were given as token ids, only the sum is
    known: it is divided equally."""
    if request.prompt_tokens is None:
        return [count_tokens(prompt) for prompt in request.prompts]
    each, more = divmod(request.prompt_tokens, max(1, len(request.prompts)))
    return [each + (i < more) for i in range(len(request.prompts))]


def prefix_blocks(prompt: str, size: int) -> tuple[int, ...]:
    """Return, for each whole block of `size` tokens, a hash of all tokens up to the end of the block."""
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
        self._engine_options = engine
        """Options of the simulated engine; None: answers have planned times."""
        self._live_engine: LiveEngine | None = None
        """Simulated engine; None: answers have planned times."""
        if engine is not None:
            wake_at = Waker(self.pacer, self._advance).call_at
            self._live_engine = make_live_engine(engine, options.seed, wake_at)
        self.truths = TruthLog(self.clock, truth_file)
        """Log of the exact times, with which tests compare measured times."""
        self._count = 0
        """Number of requests so far."""
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
        """Determine the whole answer to a request, before any of it is sent.

        `headers`: HTTP headers, or the metadata of a gRPC call. `request_id`: id of the request; None: the id
        of its answer. Raises ValueError for an invalid request, which has no effect on the answers to later
        requests.
        """
        options = for_request(self.options, headers, fixed=self._engine_options is None)
        choice_count = len(request.prompts) * request.n
        if not 1 <= choice_count <= choices_max:
            raise BadRequest(f"n: expected 1 to {choices_max} choices (prompts times n), got {choice_count}")
        if request.max_tokens is not None and request.max_tokens < 1:
            raise BadRequest(f"max_tokens: expected 1 or more, got {request.max_tokens}")
        self._count += 1
        # If the request has a seed, the answer depends only on this seed, the server's seed and the request,
        # so that it can be repeated. Otherwise, it also depends on the number of the request.
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
        ends_separately = self._engine_options is not None and not self._engine_options.iterates
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
        """Return a ticket for each choice of the answer."""
        assert self._engine_options is not None
        limit, size = self._engine_options.tokens_max, self._engine_options.block_tokens
        shared: list[tuple[int, ...]] = [()] * len(lengths)
        if size and request.prompt_tokens is None and request.use_prefix_cache:
            shared = [prefix_blocks(prompt, size) for prompt in request.prompts]
        tickets = []
        for i, text in enumerate(texts):
            prompt = i // request.n
            input_tokens, output_tokens = lengths[prompt], text.tokens
            if limit is not None and input_tokens + output_tokens > limit:
                raise BadRequest(
                    f"the prompt has {input_tokens} tokens and the answer would have {output_tokens}; the"
                    f" maximum of their sum is {limit} (the KV memory of the engine)"
                )
            if output_tokens:  # A refused choice has no output tokens and does not reach the engine.
                tickets.append(Ticket(listener, i, input_tokens, output_tokens, shared[prompt], prompt))
        return tickets

    def submit(self, job: ServerJob) -> None:
        """Submit a job to the engine, if there is one. The request arrives there after the input filter.

        Must be called in the same iteration of the event loop as `accept`, because the engine does not accept
        arrivals in the past.
        """
        if isinstance(job.source, EngineSource):
            accepted_ns = job.truth.accepted_ns
            job.source.submit(accepted_ns, accepted_ns + job.options.guardrails.input_filter)

    async def wait_for_input_filter(self, job: ServerJob) -> None:
        """Wait for the duration of the input filter, before a rejection by the filter is sent."""
        await self.pacer.wait_until(job.truth.accepted_ns + job.options.guardrails.input_filter)

    def make_sender(self, job: ServerJob) -> ResponseSender:
        """Return the sender of a stream. The caller must call its `abandon` at the end."""
        return ResponseSender(job, self.gauges, self.pacer, self.clock)

    async def wait_to_begin(self, job: ServerJob, sender: ResponseSender) -> bool:
        """Wait until the head of a stream is due. Return False if the engine gave the request up before."""
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
        """Wait until an answer that is not streamed is due. Return the due time; None: it was given up."""
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
                    input=one.input_tokens,
                    output=one.output_tokens,
                    predicted=one.predicted_tokens,
                    cached=one.cached_tokens,
                )
                for one in job.source.tickets
                if one.arrival_ns
            ]
        sent = [stamp for stamps in truth.sent_ns for stamp in stamps]
        made = [stamp for stamps in truth.made_ns for stamp in stamps]
        if made and not sent:
            self.gauges.on_prompt(truth.prompt_tokens)
        # The time per output token is that between the send times of a stream. An answer that is not streamed
        # has only one send time, so use the times at which the engine made its tokens.
        times = sent if truth.stream else made
        answered = truth.outcome in ANSWERED and truth.status == 200
        reasons: list[str] = []
        if answered or truth.outcome not in REJECTED:
            unfinished_reason = "error" if truth.outcome == "error" else "abort"
            reasons = [finish or unfinished_reason for finish in truth.finish]
        self.gauges.on_ended(
            tokens=len(sent),
            first_to_last_ns=max(times) - min(times) if times else None,
            e2e_ns=truth.ended_ns - truth.accepted_ns,
            reasons=reasons,
            whole=answered,
        )
        self.truths.end(truth)
