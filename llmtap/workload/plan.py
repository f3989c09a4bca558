"""From turns to requests, and from requests to what they say.

Who describes a workload tells one turn after the other (`PlannedTurn`), and can write its texts
(`ConversationScript`). Here
turns become columns with contexts, histories and blocks, and a row becomes a prompt, in any order of rows.
Turns come in one order always, each column of numbers from a generator of its own: a row is the same however
many are asked for.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

from llmtap.workload.prompts.prompt import Fit, Prompt
from llmtap.workload.requests import Requests
from llmtap.workload.sharing import BLOCK_TOKENS, NO_CONTEXT, SharedBlocks, Sharing

__all__ = ["ConversationScript", "PlannedTurn", "Speaker", "WorkloadPlan", "assemble", "rows_before"]


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """A message, and how long its answer will be, in tokens."""

    message: int
    output: int
    opens: bool = True
    """The first of its conversation."""
    think_ns: int = 0
    place: int = 0
    """Where its texts stand in the data, if there is any."""


class ConversationScript(Protocol):
    """The texts of a workload: of exactly so many tokens, the same for the same arguments always."""

    def message(self, row: int, tokens: int) -> str: ...

    def answer(self, row: int, tokens: int) -> str:
        """What the model is taken to have answered to the row."""
        ...

    def context(self, number: int, tokens: int) -> str: ...


@dataclass(slots=True)
class WorkloadPlan:
    """Requests, and what they are made of."""

    requests: Requests = field(default_factory=Requests)
    messages: "array[int]" = field(default_factory=lambda: array("q"))
    """Tokens of each new message."""
    contexts: "array[int]" = field(default_factory=lambda: array("q"))
    """Number of each one's context; NO_CONTEXT where it has none."""
    lengths: tuple[int, ...] = ()
    """Tokens of each context."""
    places: "array[int]" = field(default_factory=lambda: array("q"))
    """Of each turn, `Turn.place`."""


def assemble(
    turns: Iterator[PlannedTurn],
    count: int,
    seed: int,
    *,
    sharing: Sharing | None = None,
    converses: bool = False,
    tokens_max: int | None = None,
) -> WorkloadPlan:
    """The first `count` turns, or all, as requests; turns whose prompt would be longer than `tokens_max` are
    left out, with all that follow them in their conversation."""
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
    """What the project's own tokenizer counts."""
    return made(tokens)


@dataclass(slots=True)
class Speaker:
    """A `PromptSource` that reads from a script. Contexts are written once, and kept."""

    plan: WorkloadPlan
    script: ConversationScript
    fit: Fit = _as_wanted
    _contexts: dict[int, str] = field(default_factory=dict)

    def prompt(self, row: int) -> Prompt:
        return self.sized(row, self.plan.requests.input[row])

    def sized(self, row: int, tokens: int) -> Prompt:
        """The row's prompt with a message so much longer or shorter that it has `tokens` in all.

        Its context and history stay what they are; the message has one token at least.
        """
        plan = self.plan
        message = max(1, plan.messages[row] + tokens - plan.requests.input[row])
        return Prompt(
            text=self._message(row, message), system=self._context(plan.contexts[row]),
            history=tuple(self._history(row)),
        )  # fmt: skip

    def fitted(self, fit: Fit) -> "Speaker":
        """The same, but each part has its tokens by the count that `fit` knows."""
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
    """Earlier turns of the row's conversation, from the first."""
    rows: list[int] = []
    while requests.after and (row := requests.after[row]) >= 0:
        rows.append(row)
    return rows[::-1]
