"""Takes a request in, whatever protocol it came by, and writes down how it ended.

Here a request is drawn its mishaps (`mishaps.py`), told what to say (`choices.py`), and planned or prepared
for the engine (`plan.py`, `live.py`). What comes of that is a `ServerJob`, which a protocol's own code
carries out with a `ResponseSender` or a `Gatherer`, and hands back at its end.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llmtap.clock import Clock, SystemClock
from llmtap.net.pacing import Pacer, Waker
from llmtap.sim.server.answers import RequestFaults, block, choose, draw_faults, prefix_blocks, prompt_lengths
from llmtap.sim.server.delivery import (
    DeliveredText,
    Delivery,
    EngineSource,
    FixedSchedule,
    PlannedSource,
    PlannedWork,
    Planner,
    PlanSource,
)
from llmtap.sim.server.gauges import EngineMetrics
from llmtap.sim.server.live import LiveEngine, Ticket, live_of
from llmtap.sim.server.options import EngineOptions, SimOptions, for_request
from llmtap.sim.server.sender import Gatherer, ResponseSender
from llmtap.sim.server.shapes.shape import Answer, BadRequest, Shape, SimulatedRequest
from llmtap.sim.server.truth import Submitted, Truth, TruthLog
from llmtap.units import NEVER
from llmtap.workload.prompts.words import say

__all__ = ["BUSY", "FILTERED", "Reception", "ServerJob"]

ANSWERED: Final = frozenset({"complete", "refused", "blocked", "stall", "slow"})
"""Outcomes of answers that came to their end."""
NOT_THE_ENGINES: Final = frozenset({"429", "503", "turned_away", "refused"})
"""Outcomes of requests that an engine behind an API server does not hear of, where they were not answered."""
FILTERED: Final = "the prompt was filtered: it triggered the content management policy"
BUSY: Final = {
    429: ("rate_limit_exceeded", "too many requests"),
    503: ("overloaded", "the engine is overloaded"),
}
"""By status: code and sentence for who is turned away."""


@dataclass(slots=True)
class ServerJob:
    """A request that is to be answered."""

    options: SimOptions
    answer: Answer
    shape: Shape
    mishaps: RequestFaults
    delivery: Delivery
    source: PlanSource
    outcome: str
    """When all goes as drawn."""
    truth: Truth
    stamps: list[int]

    @property
    def door(self) -> int | None:
        """The status by which it is turned away at once."""
        match self.mishaps:
            case RequestFaults(fault="429" | "503" as status):
                return int(status)
            case RequestFaults(refusal="error"):
                return 400
        return None

    def turned_away(self, status: int) -> None:
        """Nothing of an answer is sent, but an error of this status."""
        truth, source = self.truth, self.source
        truth.status = status
        if status == 400:
            truth.outcome = "refused"
        elif not source.given_up:
            truth.outcome = str(status)
        else:
            truth.outcome = (
                "turned_away" if isinstance(source, EngineSource) and source.turned_away else "given_up"
            )

    @property
    def retry_after_s(self) -> int:
        """When to come back, for who is turned away."""
        return -(-self.options.faults.retry_after // 1_000_000_000)


class Reception:
    """One for all requests to a server."""

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
        self.options = options
        self.clock = clock or SystemClock()
        self.pacer = Pacer(self.clock)
        self._planner = planner or FixedSchedule()
        self._engine = engine
        self._live: LiveEngine | None = None
        if engine is not None:
            self._live = live_of(engine, options.seed, Waker(self.pacer, self._advance).sooner)
        self.truths = TruthLog(self.clock, truth_file)
        self._count = 0
        self.gauges = EngineMetrics(options.model, None if self._live is None else self._live.state)
        say(1, "")  # writes the text, which is not to be the first request's burden

    def close(self) -> None:
        self.pacer.close()
        self.truths.close()

    def _advance(self, now_ns: int) -> int:
        assert self._live is not None
        self._live.advance(now_ns)
        return self._live.next_ns

    def take(
        self,
        asked: SimulatedRequest,
        shape_of: Callable[[Answer], Shape],
        *,
        path: str,
        headers: Mapping[str, str],
        accepted_ns: int,
        choices_max: int = 1,
        request_id: str | None = None,
    ) -> ServerJob:
        """Everything about an answer, before anything is sent. `headers`: those of HTTP, or what stands for
        them; a request without an id gets that of its answer. Raises ValueError, and nothing has happened."""
        options = for_request(self.options, headers, fixed=self._engine is None)
        wanted = len(asked.prompts) * asked.n
        if not 1 <= wanted <= choices_max:
            raise BadRequest(f"{wanted} answers were asked for; there can be 1 to {choices_max}")
        if asked.max_tokens is not None and asked.max_tokens < 1:
            raise BadRequest(f"the most tokens of an answer cannot be {asked.max_tokens}")
        self._count += 1
        # With a seed of its own a request meets the same fate each time; else the order decides.
        key = f"{options.seed}/" + (f"seed {asked.seed}" if asked.seed is not None else f"{self._count}")
        chance = random.Random(key)
        mishaps = draw_faults(options, chance)
        exact = "x-sim-tokens" in headers
        choices = [
            choose(asked, options, mishaps, f"{options.seed}/{asked.seed}/{i}/{prompt}", exact)
            for prompt in asked.prompts
            for i in range(asked.n)
        ]
        said = []
        for choice in choices:
            block_after = mishaps.block_after if mishaps.refusal is None else None
            apart = self._engine is not None and not self._engine.iterates
            said.append(DeliveredText(len(choice.pieces), block_after, apart))
        made_ns: list[list[int]] = [[] for _ in choices]
        fault = mishaps.fault
        delivery = Delivery(said, options, fault, accepted_ns)
        lengths = prompt_lengths(asked)
        source: PlanSource
        if self._live is not None:
            source = EngineSource(self._live, delivery, made_ns)
            source.tickets = self._tickets(asked, said, lengths, source)
        else:
            plans = [
                (
                    self._planner.plan(PlannedWork(sum(lengths), one.tokens, options), chance).due_ns,
                    one.tokens,
                )
                for one in said
            ]
            source = PlannedSource(delivery, plans, made_ns, accepted_ns, options.guardrails.wait_ns)
        for choice, one in zip(choices, said, strict=True):
            if one.block_after is not None:
                block(choice, one.block_after, options)
        answer = Answer(self._count, asked, sum(lengths), choices, options.dialect)
        shape = shape_of(answer)
        outcome: str = fault or "complete"
        if mishaps.refusal is not None:
            outcome = "refused"
        elif any(choice.finish == "content_filter" for choice in choices):
            outcome = "blocked"
        truth = Truth(
            id=request_id or shape.id, path=path, model=asked.model, stream=asked.stream,
            accepted_ns=accepted_ns, prompt_tokens=answer.prompt_tokens, made_ns=made_ns,
            due_ns=[[] for _ in choices], sent_ns=[[] for _ in choices], finish=[None] * len(choices),
        )  # fmt: skip
        self.gauges.began()
        stamps = self.truths.begin(truth.id)
        return ServerJob(options, answer, shape, mishaps, delivery, source, outcome, truth, stamps)

    def _tickets(
        self, asked: SimulatedRequest, said: list[DeliveredText], lengths: list[int], listener: EngineSource
    ) -> list[Ticket]:
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

    def ask(self, job: ServerJob) -> None:
        """The engine gets it, at once or when the input filter lets it pass. To be called in the turn of the
        loop in which it was accepted: the engine is not told of what is past."""
        if isinstance(job.source, EngineSource):
            accepted_ns = job.truth.accepted_ns
            job.source.ask(accepted_ns, accepted_ns + job.options.guardrails.wait_ns)

    async def filtered(self, job: ServerJob) -> None:
        """Returns when the input filter has spoken."""
        await self.pacer.wait_until(job.truth.accepted_ns + job.options.guardrails.input_filter)

    def sender(self, job: ServerJob) -> ResponseSender:
        """Who streams it. Whoever gets it says `abandon` at the end."""
        return ResponseSender(
            job.answer, job.shape, job.delivery, job.source, job.truth, job.stamps, self.gauges, self.pacer,
            self.clock, job.outcome,
        )  # fmt: skip

    async def begins(self, job: ServerJob, sender: ResponseSender) -> bool:
        """Returns when the head of a stream may leave; False when the engine gave it up before."""
        source = job.source
        if job.mishaps.fault == "slow":
            await self.pacer.wait_until(job.truth.accepted_ns + job.options.faults.slow)
        if isinstance(source, EngineSource):
            source.on_news = sender.wake
            sender.wake()
            await sender.begins
            if source.given_up:
                sender.abandon()
                return False
        return True

    async def gathered(self, job: ServerJob) -> int | None:
        """Returns when all of an answer is made and due, and when that was; None when it was given up."""
        source = job.source
        gatherer = Gatherer(job.delivery, source, self.pacer)
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
            gatherer.act(NEVER)  # all is known
            gatherer.close()
        await self.pacer.wait_until(gatherer.due_ns)
        return gatherer.due_ns

    def end(self, job: ServerJob) -> None:
        """Nothing more will be sent of it."""
        job.source.close(self.clock.mono_ns())
        truth = job.truth
        truth.ended_ns = self.clock.mono_ns()
        if isinstance(job.source, EngineSource):
            truth.submitted = [_submitted(one) for one in job.source.tickets if one.arrival_ns]
        sent = [stamp for stamps in truth.sent_ns for stamp in stamps]
        made = [stamp for stamps in truth.made_ns for stamp in stamps]
        if made and not sent:
            self.gauges.taken_in(truth.prompt_tokens)
        # When it streams, what the client could see; else what the engine did.
        seen = sent if truth.stream else made
        self.gauges.ended(
            tokens=len(sent), first_to_last_ns=max(seen) - min(seen) if seen else None,
            e2e_ns=truth.ended_ns - truth.accepted_ns, reasons=_reasons(truth), whole=_is_answered(truth),
        )  # fmt: skip
        self.truths.end(truth)


def _is_answered(truth: Truth) -> bool:
    return truth.outcome in ANSWERED and truth.status == 200


def _reasons(truth: Truth) -> list[str]:
    """How each choice ended, as the engine would count it."""
    if not _is_answered(truth) and truth.outcome in NOT_THE_ENGINES:
        return []
    other = "error" if truth.outcome == "error" else "abort"
    return [finish or other for finish in truth.finish]


def _submitted(ticket: Ticket) -> Submitted:
    return Submitted(
        choice=ticket.choice, number=ticket.number, arrival_ns=ticket.arrival_ns, input=ticket.input,
        output=ticket.output, predicted=ticket.predicted, cached=ticket.cached,
    )  # fmt: skip
