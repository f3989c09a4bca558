"""Plan the requests of a workload (shared contexts, conversations, think times), and write their prompts.

A workload passes the drawn lengths of each turn (`PlannedTurn`) to `assemble`, which returns a `WorkloadPlan`
with the requests as columns. `Speaker` writes the prompt of a row from the texts of a `ConversationScript`.
Also here: the options of sharing (`Sharing`), conversations and think times. Arrivals are in `arrivals.py`;
the plan of a replay is `load/replay/plan.py`.

A row is the same however many are requested. Answers in a prompt's history are text of the planned length,
not what a server answered, so prompts are the same in each run.
"""

import itertools
import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from statistics import NormalDist
from typing import Annotated, Any, Final, Protocol

import msgspec

from llmtap.units import Duration, to_seconds
from llmtap.workload.lengths import Fixed, Lengths, described, drawn, uniform_draw
from llmtap.workload.prompts.prompt import Fit, Prompt
from llmtap.workload.requests import Requests

BLOCK_TOKENS: Final = 16
"""vLLM's block size; a prefix cache finds only whole blocks."""
NO_CONTEXT: Final = -1
_CONTEXTS_MAX: Final = 100_000
"""Contexts are kept in memory: 1,000 tokens each make half a GB."""


class Sharing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contexts (shared prompt prefixes) and who has them."""

    fraction: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """Of requests, or of conversations if there are any."""
    tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] | Lengths
    contexts: Annotated[int, msgspec.Meta(ge=1, le=_CONTEXTS_MAX)] = 1
    zipf: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Zipf exponent s; 0: all contexts are equally popular."""

    @property
    def tokens_drawn(self) -> Lengths:
        return Fixed(tokens=self.tokens) if isinstance(self.tokens, int) else self.tokens

    def lengths(self, seed: int) -> tuple[int, ...]:
        """Return the tokens of each context, the most popular first."""
        random = Random(f"{seed}/context lengths")
        return tuple(drawn(self.tokens_drawn, random) for _ in range(self.contexts))

    def choices(self, random: Random) -> Iterator[int]:
        """Yield each request's context, NO_CONTEXT if none; endless, one number of `random` each."""
        ends = [self.fraction * end for end in itertools.accumulate(zipf_shares(self.contexts, self.zipf))]
        while True:
            u = random.random()
            # The last end may differ from the fraction by rounding.
            yield min(bisect_right(ends, u), self.contexts - 1) if u < self.fraction else NO_CONTEXT

    def describe(self) -> Mapping[str, Any]:
        return {
            "fraction": self.fraction,
            "contexts": self.contexts,
            "popularity": {"distribution": "zipf", "s": self.zipf}
            if self.zipf
            else {"distribution": "uniform"},
            "tokens": described(self.tokens_drawn),
            "block_tokens": BLOCK_TOKENS,
        }


def zipf_shares(count: int, s: float) -> list[float]:
    """Return the share of each of `count`, the most popular first: k^-s / sum of all."""
    weights = [k**-s for k in range(1, count + 1)]
    whole = sum(weights)
    return [weight / whole for weight in weights]


class SharedBlocks:
    """Numbers the whole blocks of prompts: equal numbers for equal beginnings."""

    def __init__(self, lengths: tuple[int, ...] = ()) -> None:
        """`lengths`: tokens of each context."""
        self._next = itertools.count()
        self._contexts = [self._new(tokens // BLOCK_TOKENS) for tokens in lengths]

    def _new(self, count: int) -> tuple[int, ...]:
        return tuple(itertools.islice(self._next, max(0, count)))

    def of(self, tokens: int, context: int = NO_CONTEXT, before: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return the blocks of a prompt that begins with those `before`, else with its context's."""
        begun = before or (() if context == NO_CONTEXT else self._contexts[context])
        # A block that is only partly of the context belongs to the prompt.
        return begun + self._new(tokens // BLOCK_TOKENS - len(begun))


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    message: int
    output: int
    opens: bool = True
    think_ns: int = 0
    place: int = 0


class ConversationScript(Protocol):
    """Texts of a workload, of exactly the given length, always the same for the same arguments."""

    def message(self, row: int, tokens: int) -> str: ...

    def answer(self, row: int, tokens: int) -> str:
        """Assumed answer of the model to the row."""
        ...

    def context(self, number: int, tokens: int) -> str: ...


@dataclass(slots=True)
class WorkloadPlan:
    requests: Requests = field(default_factory=Requests)
    messages: "array[int]" = field(default_factory=lambda: array("q"))
    contexts: "array[int]" = field(default_factory=lambda: array("q"))
    """Context number of each; NO_CONTEXT if none."""
    lengths: tuple[int, ...] = ()
    places: "array[int]" = field(default_factory=lambda: array("q"))
    """`PlannedTurn.place` of each."""


def assemble(
    turns: Iterator[PlannedTurn],
    count: int,
    seed: int,
    *,
    sharing: Sharing | None = None,
    converses: bool = False,
    tokens_max: int | None = None,
) -> WorkloadPlan:
    """Return the first `count` turns, or all, as requests. A turn whose prompt would be longer than
    `tokens_max` is left out, with all that follow it in its conversation."""
    plan = WorkloadPlan(lengths=sharing.lengths(seed) if sharing else ())
    requests = plan.requests
    choices = sharing.choices(Random(f"{seed}/context")) if sharing else None
    blocks = SharedBlocks(plan.lengths) if sharing or converses else None
    if blocks:
        requests.block_tokens = BLOCK_TOKENS
    context, history, over = NO_CONTEXT, 0, False
    before: tuple[int, ...] = ()
    for turn in turns:
        if len(requests) == count:
            break
        if turn.opens:
            context = next(choices) if choices else NO_CONTEXT
            history = 0 if context == NO_CONTEXT else plan.lengths[context]
            over, before = False, ()
        elif over or (tokens_max is not None and history + turn.message > tokens_max):
            over = True
            continue
        tokens = history + turn.message
        requests.arrival_ns.append(0)
        requests.input.append(tokens)
        requests.output.append(turn.output)
        plan.messages.append(turn.message)
        plan.contexts.append(context)
        plan.places.append(turn.place)
        if converses:
            requests.after.append(NO_CONTEXT if turn.opens else len(requests) - 2)
            requests.think_ns.append(turn.think_ns)
        if blocks:
            before = blocks.of(tokens, context, before)
            requests.blocks.append(before)
        history = tokens + turn.output
    return plan


def _as_wanted(made: Callable[[int], str], tokens: int) -> str:
    return made(tokens)


@dataclass(slots=True)
class Speaker:
    plan: WorkloadPlan
    script: ConversationScript
    fit: Fit = _as_wanted
    _contexts: dict[int, str] = field(default_factory=dict)

    def prompt(self, row: int) -> Prompt:
        return self.sized(row, self.plan.requests.input[row])

    def sized(self, row: int, tokens: int) -> Prompt:
        """Return the row's prompt of `tokens` in all: the message is longer or shorter, context and history
        stay."""
        plan = self.plan
        message = max(1, plan.messages[row] + tokens - plan.requests.input[row])
        return Prompt(
            text=self._message(row, message), system=self._context(plan.contexts[row]),
            history=tuple(self._history(row)),
        )  # fmt: skip

    def fitted(self, fit: Fit) -> "Speaker":
        """Return the same source with parts fitted by `fit`."""
        return replace(self, fit=fit, _contexts={})

    def _message(self, row: int, tokens: int) -> str:
        return self.fit(lambda n: self.script.message(row, n), tokens)

    def _context(self, number: int) -> str:
        if number == NO_CONTEXT:
            return ""
        if number not in self._contexts:
            tokens = self.plan.lengths[number]
            self._contexts[number] = self.fit(lambda n: self.script.context(number, n), tokens)
        return self._contexts[number]

    def _history(self, row: int) -> Iterator[tuple[str, str]]:
        for earlier in rows_before(self.plan.requests, row):
            yield "user", self._message(earlier, self.plan.messages[earlier])
            yield "assistant", self._answer(earlier)

    def _answer(self, row: int) -> str:
        return self.fit(lambda n: self.script.answer(row, n), self.plan.requests.output[row])


def rows_before(requests: Requests, row: int) -> list[int]:
    rows: list[int] = []
    while requests.after and (row := requests.after[row]) >= 0:
        rows.append(row)
    return rows[::-1]


_P95 = NormalDist().inv_cdf(0.95)


class _Think(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="distribution"):
    """Think times."""


class ThinkFixed(_Think, frozen=True, kw_only=True, tag="fixed"):
    time: Duration

    def quantile_ns(self, p: float) -> int:
        return int(self.time)

    def describe(self) -> Mapping[str, Any]:
        return {"distribution": "fixed", "time": to_seconds(self.time), "unit": "s"}


class ThinkExponential(_Think, frozen=True, kw_only=True, tag="exponential"):
    mean: Duration

    def quantile_ns(self, p: float) -> int:
        return round(-self.mean * math.log1p(-p))

    def describe(self) -> Mapping[str, Any]:
        return {"distribution": "exponential", "mean": to_seconds(self.mean), "unit": "s"}


class ThinkLogNormal(_Think, frozen=True, kw_only=True, tag="lognormal"):
    median: Duration
    p95: Duration

    def __post_init__(self) -> None:
        if not 0 < self.median <= self.p95:
            raise ValueError("a lognormal needs a median above 0 and a p95 that is no less")

    def quantile_ns(self, p: float) -> int:
        sigma = math.log(self.p95 / self.median) / _P95
        return round(self.median * math.exp(sigma * NormalDist().inv_cdf(p)))

    def describe(self) -> Mapping[str, Any]:
        told = {"median": to_seconds(self.median), "p95": to_seconds(self.p95)}
        return {"distribution": "lognormal", **told, "unit": "s"}


Think = ThinkFixed | ThinkExponential | ThinkLogNormal


class Conversations(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    turns: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | Lengths
    think: Think
    tokens_max: Annotated[int, msgspec.Meta(ge=1)] = 32_768
    """Longest prompt, as of a context window; the conversation ends before a longer one."""

    def turns_drawn(self, random: Random) -> int:
        return drawn(self._turns, random)

    @property
    def _turns(self) -> Lengths:
        return Fixed(tokens=self.turns) if isinstance(self.turns, int) else self.turns

    def think_drawn_ns(self, random: Random) -> int:
        return self.think.quantile_ns(uniform_draw(random))

    def describe(self) -> Mapping[str, Any]:
        return {
            "turns": {**described(self._turns), "unit": "turns"},
            "think": self.think.describe(),
            "prompt": "history and new message; answers in the history are text of the planned length",
            "tokens_max": self.tokens_max,
        }
