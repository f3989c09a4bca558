"""From tokens made to writes due: the stages between the engine and the socket, in the order they stand
there.

    made by the engine -> input filter -> output filter -> chunks -> faults -> coalescing -> keep-alives

One answer's stages are a `Delivery`. It is told of each token when it is made (`made`), and asked what is due
(`take`), so it need not know when the next one will be: tokens may come from a plan, or from an engine that
does not know itself. Times are ns of any clock. No stage looks at one: what is written, and when it is due,
does not depend on how late anybody asks.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from llmtap.sim.server.options import FaultKind, SimOptions
from llmtap.units import NEVER

__all__ = ["BREAKS", "Chunk", "DeliveredText", "Delivery", "Write"]

BREAKS: Final[frozenset[FaultKind]] = frozenset({"reset", "truncate", "unfinished", "error"})
"""Faults that end the answer."""


class Chunk(NamedTuple):
    """Tokens that leave in one event."""

    due_ns: int
    choice: int
    first: int
    last: int
    """One past the last token."""
    final: bool
    """The choice ends with it."""
    breaks: bool = False
    """Here the answer breaks off instead."""


class Write(NamedTuple):
    """What leaves at one moment; nothing in it stands for a keep-alive."""

    due_ns: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class DeliveredText:
    """One choice, as far as its delivery goes."""

    tokens: int
    """That the engine makes of it."""
    block_after: int | None = None
    """The output filter stops the answer at this token."""
    ends_apart: bool = False
    """It does not end with its last token but when it is said to be `over`."""


class Delivery:
    """The stages of one answer."""

    def __init__(
        self, said: Sequence[DeliveredText], options: SimOptions, fault: FaultKind | None, begin_ns: int = 0
    ) -> None:
        """`begin_ns` is when the request was accepted."""
        g, p = options.guardrails, options.pacing
        self._said = said
        self._holds = [max(1, one.tokens if g.output_hold == "all" else g.output_hold) for one in said]
        self._filter_ns = g.output_filter
        # Beside the engine, the filter of the prompt holds what is made before it has spoken.
        self._open_ns = begin_ns + g.input_filter if g.input_beside else 0
        self._size = p.tokens_per_chunk
        self._made = [0] * len(said)
        self._begun = [0] * len(said)
        """Tokens of each choice that are in chunks."""
        self._over = [False] * len(said)
        self._open = len(said)
        """Choices that are not over."""
        self._fault = fault
        self._fault_after = max(0, min(options.faults.fault_after, sum(one.tokens for one in said) - 1))
        self._stall_ns = options.faults.stall
        self._slow_ns = begin_ns + options.faults.slow
        self._seen = 0
        self._window_ns = p.coalesce
        self._batch: list[Chunk] = []
        self._leave_ns = NEVER
        """When the batch leaves, if the answer does not end before."""
        self._ready: deque[Write] = deque()
        self._every_ns = p.keepalive
        self._spoke_ns = self._slow_ns if fault == "slow" else begin_ns
        self.closed = False
        """Nothing that is made from now on will be written."""
        self.ended = False
        """Everything was taken."""
        for choice, one in enumerate(said):
            if not one.tokens:  # refused before the engine
                self._chunk(Chunk(begin_ns + g.input_filter, choice, 0, 0, True))

    def made(self, choice: int, at_ns: int) -> None:
        """The next token of a choice is made. Times never fall, whatever the choice."""
        if self._over[choice] or self.closed:
            return
        n = self._made[choice] = self._made[choice] + 1
        one, hold = self._said[choice], self._holds[choice]
        last = n == one.tokens
        if n % hold and not last:
            return
        due_ns = (at_ns if at_ns > self._open_ns else self._open_ns) + self._filter_ns
        begun, size = self._begun[choice], self._size
        if one.block_after is not None and n > one.block_after:
            # What the filter holds when it blocks is never let go.
            kept = one.block_after // hold * hold
            if begun < kept:
                self._chunk(Chunk(due_ns, choice, begun, kept, False))
            self._chunk(Chunk(due_ns, choice, kept, kept, True))
            return
        ends = last and not one.ends_apart
        chunk = self._collect if self._fault is None else self._chunk
        while n - begun >= size:
            end = begun + size
            chunk(Chunk(due_ns, choice, begun, end, ends and end == n))
            begun = end
        if last and begun < n:
            chunk(Chunk(due_ns, choice, begun, n, ends))
            begun = n
        self._begun[choice] = begun

    def over(self, choice: int, at_ns: int) -> None:
        """A choice whose tokens are all made ends."""
        if self._over[choice] or self.closed:
            return
        tokens = self._said[choice].tokens
        due_ns = max(at_ns, self._open_ns) + self._filter_ns
        self._chunk(Chunk(due_ns, choice, tokens, tokens, True))

    def give_up(self, at_ns: int) -> None:
        """The engine makes no more of it: what the output filter held is lost, and the answer breaks off."""
        if self.closed:
            return
        if self._batch:
            at_ns = max(at_ns, self._batch[-1].due_ns)
        elif self._ready:
            at_ns = max(at_ns, self._ready[-1].due_ns)
        self._collect(Chunk(at_ns, 0, self._begun[0], self._begun[0], False, True))

    def take(self, now_ns: int) -> Write | None:
        """The next write, if it is due. All that was made until now has been told."""
        ready, every_ns = self._ready, self._every_ns
        if not ready and self._batch and self._leave_ns <= now_ns:
            self._let_go()
        if ready:
            due_ns = ready[0].due_ns
            if not every_ns or due_ns - self._spoke_ns <= every_ns:
                if due_ns > now_ns:
                    return None
                self._spoke_ns = due_ns
                write = ready.popleft()
                self.ended = self.closed and not ready
                return write
        if every_ns and not self.ended and self._spoke_ns + every_ns <= now_ns:
            self._spoke_ns += every_ns
            return Write(self._spoke_ns, ())
        return None

    def next_ns(self) -> int:
        """When to ask again at the latest, if nothing is made until then."""
        due_ns = self._ready[0].due_ns if self._ready else self._leave_ns
        if self._every_ns and not self.ended:
            return min(due_ns, self._spoke_ns + self._every_ns)
        return due_ns

    def _chunk(self, chunk: Chunk) -> None:
        """Faults."""
        if self.closed:
            return
        fault = self._fault
        if fault is not None:
            self._seen += chunk.last - chunk.first
            if fault == "slow":
                chunk = chunk._replace(due_ns=max(chunk.due_ns, self._slow_ns))
            elif self._seen > self._fault_after:
                if fault == "stall":
                    chunk = chunk._replace(due_ns=chunk.due_ns + self._stall_ns)
                elif fault in BREAKS:
                    chunk = chunk._replace(breaks=True)
            elif fault in BREAKS and chunk.final and not self._seen:
                chunk = chunk._replace(breaks=True)
        self._collect(chunk)

    def _collect(self, chunk: Chunk) -> None:
        """Chunks due within a window from the first leave together; without one, those due at once."""
        batch = self._batch
        if batch and chunk.due_ns > self._leave_ns:
            self._let_go()
        if not batch:
            self._leave_ns = chunk.due_ns + self._window_ns
        batch.append(chunk)
        if chunk.final:
            self._over[chunk.choice] = True
            self._open -= 1
        if chunk.breaks or not self._open:
            self._leave_ns = chunk.due_ns  # the end of an answer empties the buffer
            self._let_go()
            self.closed = True

    def _let_go(self) -> None:
        self._ready.append(Write(self._leave_ns, tuple(self._batch)))
        self._batch.clear()
        self._leave_ns = NEVER
