"""One iteration of an engine that composes anew at every step, and what such an engine tells of itself."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from llmtap.sim.engine import Made, Scheduler

__all__ = ["Iterating", "Iteration", "IterationState", "made_later"]


@dataclass(frozen=True, slots=True)
class Iteration:
    """What a server does in one forward pass."""

    duration_ns: int
    prefill: Sequence[tuple[int, int]] = ()
    """Requests, and how many tokens of their prompt are taken in. One whose prompt is then whole makes its
    first token in the same iteration."""
    decode: Sequence[int] = ()
    """Requests that make their next token."""


@dataclass(slots=True)
class IterationState:
    """What an engine tells of itself: now, and counts since it began. As vLLM's `/metrics` has them."""

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    """Share of the KV memory that requests hold."""
    kv_peak: float = 0.0
    """The most that it has been."""
    preemptions: int = 0
    preempted: int = 0
    """Requests that were preempted at least once."""
    recovered: int = 0
    """Of these, how many were served to the end all the same."""
    preempted_tokens: int = 0
    """Tokens whose KV was thrown away by preemption, to be taken in again."""
    prefix_queries: int = 0
    """Tokens of prompts looked for in the prefix cache."""
    prefix_hits: int = 0
    """Those that were there."""


class Iterating(Scheduler, Protocol):
    """A scheduler that composes anew at every iteration, and tells of itself."""

    state: IterationState


def made_later(made: Made, due_ns: Sequence[int]) -> Made:
    """The same tokens, each of which leaves when it is due."""
    leaving = sorted(zip(due_ns, made.tokens, strict=True))
    return replace(made, tokens=[request for _, request in leaving], due_ns=[due for due, _ in leaving])
