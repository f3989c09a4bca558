"""Turn generated tokens into scheduled writes: the source of tokens, and the stages before the socket.

    made by the engine -> input filter -> output filter -> chunks -> faults -> coalescing -> keep-alives

A `Delivery` has the stages of one answer. A source reports each token when it is made (`on_token`); the
sender (`sender.py`) takes the due writes (`take`). A `Write` has the indexes of tokens of choices, not their
bytes. Times are ns of any clock. No stage reads a clock, so the content and the due time of a write do not
depend on the time at which it is taken.

Tokens come from a `PlanSource`, which reports to the delivery all tokens made until a given time. It is a
schedule known when the request is accepted (`PlannedSource`), or an engine (`EngineSource`, `live.py`).
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, chain, count, repeat
from typing import Final, NamedTuple, Protocol

from llmtap.sim.server.live import LiveEngine, Ticket
from llmtap.sim.server.options import FaultKind, SimOptions
from llmtap.units import NEVER

BREAKS: Final[frozenset[FaultKind]] = frozenset({"reset", "truncate", "unfinished", "error"})
"""Faults that break an answer off before its end."""


class Chunk(NamedTuple):
    """Consecutive tokens of a choice, which are sent as one event: from `first` to `end` - 1."""

    due_ns: int
    """Time at which it should be sent."""
    choice: int
    first: int
    """Index of its first token in the choice."""
    end: int
    """Index after its last token."""
    is_final: bool
    """Whether the choice ends after these tokens."""
    breaks_off: bool = False
    """Whether a fault breaks the answer off at this chunk."""


class Write(NamedTuple):
    """Chunks that are sent in one write; a write without chunks is a keep-alive."""

    due_ns: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class DeliveredText:
    """Properties of one choice (text) of an answer that its delivery needs."""

    tokens: int
    block_after: int | None = None
    """Number of tokens after which the output filter blocks the answer; None: never."""
    ends_separately: bool = False
    """Whether `on_choice_end` ends the choice (at the end of its batch) instead of its last token."""


class Delivery:
    """Stages of one answer between the source of its tokens and the socket."""

    def __init__(
        self, texts: Sequence[DeliveredText], options: SimOptions, fault: FaultKind | None, begin_ns: int = 0
    ) -> None:
        """`begin_ns`: time at which the request was accepted."""
        g, p = options.guardrails, options.pacing
        self._texts = texts
        self._hold_sizes = [max(1, one.tokens if g.output_hold == "all" else g.output_hold) for one in texts]
        """For each choice: number of tokens that a filter collects before it lets them pass."""
        self._filter_ns = g.output_filter
        """Time that the output filter takes."""
        self._chunk_tokens = p.tokens_per_chunk
        """Number of tokens in a chunk."""
        self._made_tokens = [0] * len(texts)
        """For each choice: number of tokens made so far."""
        self._chunked_tokens = [0] * len(texts)
        """Number of tokens of each choice that are in chunks."""
        self._ended_choices = [False] * len(texts)
        """For each choice: whether its source has ended."""
        self._open_choices = len(texts)
        """Number of choices that have not ended."""
        self._fault = fault
        """Kind of fault that the answer gets; None: none."""
        self._fault_after = max(0, min(options.faults.fault_after, sum(one.tokens for one in texts) - 1))
        """Number of tokens that are sent before the fault."""
        self._stall_ns = options.faults.stall
        """Length of the pause of the fault `stall`."""
        self._slow_ns = begin_ns + options.faults.slow
        """Time before which the fault `slow` sends nothing."""
        self._sent_tokens = 0
        self._coalesce_ns = p.coalesce
        """Time for which chunks are collected into one write."""
        self._batch: list[Chunk] = []
        """Chunks that are collected for the next write."""
        self._write_ns = NEVER
        """Time at which the chunks in `_batch` are sent, unless the answer ends earlier."""
        self._ready_writes: deque[Write] = deque()
        """Writes whose content is decided, in order of time."""
        self._keepalive_ns = p.keepalive
        """Pause after which a keep-alive is sent."""
        self._last_write_ns = self._slow_ns if fault == "slow" else begin_ns
        self.is_closed = False
        """Whether the answer has ended or was broken off, so that further tokens are ignored."""
        self.all_taken = False
        """Whether the answer has ended, and the sender has taken all writes."""
        for choice, text in enumerate(texts):
            if not text.tokens:  # The choice was refused, so no source reports its end.
                self._add_chunk(Chunk(begin_ns + g.input_filter, choice, 0, 0, True))

    def on_token(self, choice: int, at_ns: int) -> None:
        """Record that the next token of a choice was made. Times must not decrease from call to call."""
        if self._ended_choices[choice] or self.is_closed:
            return
        n = self._made_tokens[choice] = self._made_tokens[choice] + 1
        text, hold = self._texts[choice], self._hold_sizes[choice]
        last = n == text.tokens
        if n % hold and not last:
            return
        due_ns = at_ns + self._filter_ns
        first, size = self._chunked_tokens[choice], self._chunk_tokens
        if text.block_after is not None and n > text.block_after:
            # The filter blocks the answer: write the released groups of tokens, and discard the held tokens.
            released = text.block_after // hold * hold
            if first < released:
                self._add_chunk(Chunk(due_ns, choice, first, released, False))
            self._add_chunk(Chunk(due_ns, choice, released, released, True))
            return
        ends = last and not text.ends_separately
        add_chunk = self._collect if self._fault is None else self._add_chunk
        while n - first >= size:
            end = first + size
            add_chunk(Chunk(due_ns, choice, first, end, ends and end == n))
            first = end
        if last and first < n:
            add_chunk(Chunk(due_ns, choice, first, n, ends))
            first = n
        self._chunked_tokens[choice] = first

    def on_choice_end(self, choice: int, at_ns: int) -> None:
        """Record that a choice has ended, after its last token."""
        if self._ended_choices[choice] or self.is_closed:
            return
        tokens = self._texts[choice].tokens
        self._add_chunk(Chunk(at_ns + self._filter_ns, choice, tokens, tokens, True))

    def give_up(self, at_ns: int) -> None:
        """Break the answer off, because the engine gave it up. Tokens in the output filter are lost."""
        if self.is_closed:
            return
        if self._batch:
            at_ns = max(at_ns, self._batch[-1].due_ns)
        elif self._ready_writes:
            at_ns = max(at_ns, self._ready_writes[-1].due_ns)
        self._collect(Chunk(at_ns, 0, self._chunked_tokens[0], self._chunked_tokens[0], False, True))

    def take(self, now_ns: int) -> Write | None:
        """Return the next write if it is due, else None. Report all tokens made until `now_ns` first."""
        ready, every_ns = self._ready_writes, self._keepalive_ns
        if not ready and self._batch and self._write_ns <= now_ns:
            self._flush()
        if ready:
            due_ns = ready[0].due_ns
            if not every_ns or due_ns - self._last_write_ns <= every_ns:
                if due_ns > now_ns:
                    return None
                self._last_write_ns = due_ns
                write = ready.popleft()
                self.all_taken = self.is_closed and not ready
                return write
        if every_ns and not self.all_taken and self._last_write_ns + every_ns <= now_ns:
            self._last_write_ns += every_ns
            return Write(self._last_write_ns, ())
        return None

    def next_ns(self) -> int:
        """Return the time at which `take` returns the next write, if no token is made before."""
        due_ns = self._ready_writes[0].due_ns if self._ready_writes else self._write_ns
        if self._keepalive_ns and not self.all_taken:
            return min(due_ns, self._last_write_ns + self._keepalive_ns)
        return due_ns

    def _add_chunk(self, chunk: Chunk) -> None:
        """Apply the fault of the request, if any, to a chunk, and collect the chunk for a write."""
        if self.is_closed:
            return
        fault = self._fault
        if fault is not None:
            self._sent_tokens += chunk.end - chunk.first
            if fault == "slow":
                chunk = chunk._replace(due_ns=max(chunk.due_ns, self._slow_ns))
            elif self._sent_tokens > self._fault_after:
                if fault == "stall":
                    chunk = chunk._replace(due_ns=chunk.due_ns + self._stall_ns)
                elif fault in BREAKS:
                    chunk = chunk._replace(breaks_off=True)
            elif fault in BREAKS and chunk.is_final and not self._sent_tokens:
                chunk = chunk._replace(breaks_off=True)
        self._collect(chunk)

    def _collect(self, chunk: Chunk) -> None:
        """Add a chunk to the next write, which has all chunks due within a window after its first chunk."""
        batch = self._batch
        if batch and chunk.due_ns > self._write_ns:
            self._flush()
        if not batch:
            self._write_ns = chunk.due_ns + self._coalesce_ns
        batch.append(chunk)
        if chunk.is_final:
            self._ended_choices[chunk.choice] = True
            self._open_choices -= 1
        if chunk.breaks_off or not self._open_choices:
            self._write_ns = chunk.due_ns  # The end of an answer is written without waiting for the window.
            self._flush()
            self.is_closed = True

    def _flush(self) -> None:
        """Make one write of the collected chunks."""
        self._ready_writes.append(Write(self._write_ns, tuple(self._batch)))
        self._batch.clear()
        self._write_ns = NEVER


def fixed_schedule(options: SimOptions, chance: random.Random) -> Iterator[int]:
    """Yield the due times of an endless sequence of tokens, in ns after the request was accepted.

    Without jitter, token i is due at `ttft + i * itl`, so that a late token does not delay later tokens.
    `chance`: random generator of this answer only, so that answers do not depend on each other.
    """
    ttft_ns = round(options.ttft * _random_factor(options.spread, chance))
    itl_ns = round(options.itl * _random_factor(options.spread, chance))
    sigma = options.pacing.jitter
    if not sigma:
        return count(ttft_ns, itl_ns)
    # The mean of the lognormal factor is exp(mu + sigma^2 / 2). With this mu it is 1, so that jitter does not
    # change the mean rate.
    mu = -sigma * sigma / 2
    gaps = (round(itl_ns * chance.lognormvariate(mu, sigma)) for _ in repeat(None))
    return accumulate(chain((ttft_ns,), gaps))


def _random_factor(spread: float, chance: random.Random) -> float:
    return 1 + chance.uniform(-spread, spread)


class PlanSource(Protocol):
    """Source of an answer's tokens."""

    given_up: bool
    """Whether the engine gave up the request."""
    next_ns: int
    """Time of the next token, if known; NEVER for an engine, which calls `EngineSource.on_news`."""

    @property
    def cached_tokens(self) -> int | None:
        """Number of prompt tokens found in the prefix cache; None: no cache, or not known yet."""

    def advance(self, now_ns: int) -> None:
        """Report to the delivery all tokens that were made until `now_ns`."""

    def close(self, now_ns: int) -> None:
        """Discard the remaining tokens. Must be called at the end of the request."""


class PlannedSource:
    """Source of tokens with a fixed schedule."""

    given_up = False
    cached_tokens = None

    def __init__(
        self,
        delivery: Delivery,
        plans: Sequence[tuple[Iterator[int], int]],
        made_ns: Sequence[list[int]],
        begin_ns: int,
        wait_ns: int,
    ) -> None:
        """`plans`: for each choice, the times of its tokens relative to the start of the schedule, and the
        number of its tokens. `made_ns`: for each choice, list to which the time of each token is added, as if
        the schedule started at `begin_ns`. It really starts `wait_ns` later, after the input filter."""
        self._delivery = delivery
        self._made_ns = made_ns
        """For each choice: times at which its tokens were made (`Truth.made_ns`)."""
        self._begin_ns = begin_ns + wait_ns
        self._wait_ns = wait_ns
        """Time that the input filter takes."""
        self._times = [times for times, _ in plans]
        """For each choice: iterator over the times of its tokens, from the begin."""
        self._tokens_left = [tokens for _, tokens in plans]
        """For each choice: number of tokens that are not made yet."""
        self._next_tokens = [
            (self._begin_ns + next(times), i) for i, (times, tokens) in enumerate(plans) if tokens
        ]
        """Heap with the time of the next token of each choice that has one."""
        heapify(self._next_tokens)
        self.next_ns = self._next_tokens[0][0] if self._next_tokens else NEVER

    def advance(self, now_ns: int) -> None:
        """Pass on all tokens whose time has come."""
        next_tokens, delivery = self._next_tokens, self._delivery
        while next_tokens and next_tokens[0][0] <= now_ns and not delivery.is_closed:
            at_ns, choice = next_tokens[0]
            self._made_ns[choice].append(at_ns - self._wait_ns)
            delivery.on_token(choice, at_ns)
            self._tokens_left[choice] -= 1
            if self._tokens_left[choice]:
                heapreplace(next_tokens, (self._begin_ns + next(self._times[choice]), choice))
            else:
                heappop(next_tokens)
        self.next_ns = next_tokens[0][0] if next_tokens else NEVER

    def close(self, now_ns: int) -> None:
        pass


class EngineSource:
    """Source of tokens from an engine. As the engine's `TokenListener`, it reports tokens to the delivery."""

    next_ns = NEVER

    def __init__(self, live: LiveEngine, delivery: Delivery, made_ns: Sequence[list[int]]) -> None:
        self._engine = live
        """Engine that makes the tokens."""
        self._delivery = delivery
        self._made_ns = made_ns
        """For each choice: times at which its tokens were made (`Truth.made_ns`)."""
        self.tickets: Sequence[Ticket] = ()
        """Tickets of the answer's choices."""
        self.given_up = False
        """Whether the engine refused the request."""
        self.on_news: Callable[[], None] = _do_nothing
        """Function to call after a token or an end was reported to the delivery."""

    @property
    def cached_tokens(self) -> int | None:
        """Sum of the cached tokens of all prompts; only the first choice of each prompt counts."""
        by_prompt = {ticket.prompt: ticket.cached_tokens for ticket in reversed(self.tickets)}
        known = [cached for cached in by_prompt.values() if cached is not None]
        return sum(known) if known else None

    def submit(self, now_ns: int, arrival_ns: int) -> None:
        """Submit the choices, which arrive at the engine at `arrival_ns`, the end of the input filter."""
        self._engine.submit(now_ns, arrival_ns, self.tickets)

    def advance(self, now_ns: int) -> None:
        self._engine.advance(now_ns)

    def close(self, now_ns: int) -> None:
        """Remove the choices from the engine, because the client has disconnected."""
        self._engine.leave(now_ns, self.tickets)
        self.on_news = _do_nothing

    def on_token(self, choice: int, at_ns: int) -> None:
        self._made_ns[choice].append(at_ns)
        self._delivery.on_token(choice, at_ns)
        self.on_news()

    def on_end(self, choice: int, at_ns: int) -> None:
        self._delivery.on_choice_end(choice, at_ns)
        self.on_news()

    def on_refused(self, at_ns: int) -> None:
        self.given_up = True
        self._delivery.give_up(at_ns)
        self.on_news()


def _do_nothing() -> None:
    """Do nothing: default of `EngineSource.on_news`."""
