"""From tokens made to writes due: the stages between the engine and the socket, in the order they stand
there.

    made by the engine -> input filter -> output filter -> chunks -> faults -> coalescing -> keep-alives

Each is a generator that reads the one before as far as it must, so that an answer of a hundred thousand
tokens costs nothing until it is sent. Times are ns from when the request was accepted.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from llmtap.sim.options import FaultKind, SimOptions

__all__ = ["BREAKS", "Chunk", "Said", "Write", "writes"]

BREAKS: frozenset[FaultKind] = frozenset({"reset", "truncate", "unfinished", "error"})
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


@dataclass(slots=True)
class Said:
    """One choice, as far as its delivery goes."""

    made_ns: Iterator[int]
    tokens: int
    """That the engine makes of it."""
    block_after: int | None = None
    """The output filter stops the answer at this token."""


def writes(said: list[Said], options: SimOptions, fault: FaultKind | None) -> Iterator[Write]:
    """All writes of a streamed answer, in order."""
    streams = [_chunks(i, one, options) for i, one in enumerate(said)]
    chunks = streams[0] if len(streams) == 1 else heapq.merge(*streams, key=lambda chunk: chunk.due_ns)
    after = max(0, min(options.faults.fault_after, sum(one.tokens for one in said) - 1))
    since_ns = 0
    if fault == "stall":
        chunks = _stalled(chunks, after, options.faults.stall)
    elif fault == "slow":
        since_ns = options.faults.slow
        chunks = _not_before(chunks, since_ns)
    elif fault in BREAKS:
        chunks = _broken(chunks, after)
    made = _coalesced(chunks, options.pacing.coalesce)
    if options.pacing.keepalive:
        return _kept_alive(made, options.pacing.keepalive, since_ns)
    return made


def _chunks(choice: int, said: Said, options: SimOptions) -> Iterator[Chunk]:
    """The chunks of one choice."""
    g = options.guardrails
    if not said.tokens:  # refused before the engine
        yield Chunk(g.input_filter, choice, 0, 0, True)
        return
    hold = said.tokens if g.output_hold == "all" else max(1, g.output_hold)
    size = options.pacing.tokens_per_chunk
    begun = 0
    due_ns = 0
    for due_ns, last in _let_go(_filtered(said.made_ns, g.input_filter, g.input_beside), said.tokens, hold):
        due_ns += g.output_filter
        if said.block_after is not None and last > said.block_after:
            # What the filter holds when it blocks is never let go.
            kept = said.block_after // hold * hold
            if begun < kept:
                yield Chunk(due_ns, choice, begun, kept, False)
            yield Chunk(due_ns, choice, kept, kept, True)
            return
        while last - begun >= size:
            yield Chunk(due_ns, choice, begun, begun + size, begun + size == said.tokens)
            begun += size
    if begun < said.tokens:
        yield Chunk(due_ns, choice, begun, said.tokens, True)


def _filtered(made_ns: Iterator[int], took_ns: int, beside: bool) -> Iterator[int]:
    """What the filter of the prompt does: the engine starts after it, or its tokens wait for it."""
    if not took_ns:
        return made_ns
    if beside:
        return (max(due_ns, took_ns) for due_ns in made_ns)
    return (due_ns + took_ns for due_ns in made_ns)


def _let_go(made_ns: Iterator[int], tokens: int, hold: int) -> Iterator[tuple[int, int]]:
    """(due, tokens let go until then): `hold` at a time, when the last of them is made."""
    for i in range(1, tokens + 1):
        due_ns = next(made_ns)
        if i % hold == 0 or i == tokens:
            yield due_ns, i


def _stalled(chunks: Iterable[Chunk], after: int, stall_ns: int) -> Iterator[Chunk]:
    seen = 0
    for chunk in chunks:
        seen += chunk.last - chunk.first
        yield chunk if seen <= after else chunk._replace(due_ns=chunk.due_ns + stall_ns)


def _not_before(chunks: Iterable[Chunk], ns: int) -> Iterator[Chunk]:
    for chunk in chunks:
        yield chunk if chunk.due_ns >= ns else chunk._replace(due_ns=ns)


def _broken(chunks: Iterable[Chunk], after: int) -> Iterator[Chunk]:
    seen = 0
    for chunk in chunks:
        seen += chunk.last - chunk.first
        if seen > after or (chunk.final and not seen):
            yield chunk._replace(breaks=True)
            return
        yield chunk


def _coalesced(chunks: Iterable[Chunk], window_ns: int) -> Iterator[Write]:
    """Chunks due within a window from the first leave together; without one, those due at once."""
    batch: list[Chunk] = []
    leave_ns = 0
    for chunk in chunks:
        if batch and chunk.due_ns > leave_ns:
            yield Write(leave_ns, tuple(batch))
            batch = []
        if not batch:
            leave_ns = chunk.due_ns + window_ns
        batch.append(chunk)
    yield Write(batch[-1].due_ns, tuple(batch))  # the end of an answer empties the buffer


def _kept_alive(made: Iterable[Write], every_ns: int, since_ns: int) -> Iterator[Write]:
    for write in made:
        while write.due_ns - since_ns > every_ns:
            since_ns += every_ns
            yield Write(since_ns, ())
        yield write
        since_ns = write.due_ns
