"""Plan the requests of a workload (shared contexts, conversations, think times), and write their prompts.

`ComposedWorkload` is a workload of distributions of lengths (`ietf.py`, `registry.py`). It passes the drawn
lengths of each turn (`PlannedTurn`) to `assemble_plan`, which returns a `WorkloadPlan` with the requests as
columns, and makes their prompts: generated text or random token ids. `ConversationPrompts` writes the prompt
of a row from the texts of a `ConversationScript`. `PlannedWorkload` is the base class of `ComposedWorkload`
and of the data sets (`datasets.py`). Each column has its own random generator, so that a change of one
distribution does not change the other columns. Arrivals are in `arrivals.py`; the plan of a replay is
`load/replay/plan.py`.

A row does not depend on the number of rows that are requested. The answers in a prompt's history are
generated texts of the planned length, and not the answers of the server, so prompts are the same in each run.
"""

import itertools
import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Annotated, Any, Final, Protocol

import msgspec

from llmtap.units import Duration, to_seconds
from llmtap.workload.lengths import (
    Lengths,
    as_lengths,
    correlated_draw,
    describe_lengths,
    draw_length,
    uniform_draw,
)
from llmtap.workload.prompts.prompt import CL100K_IDS, ElasticSource, Fit, Prompt, random_ids
from llmtap.workload.prompts.prose import ProseWords, ProseWriter
from llmtap.workload.prompts.text import VOCABULARY
from llmtap.workload.requests import Requests, int_column

BLOCK_TOKENS: Final = 16
"""Number of tokens in a block, as in vLLM. A prefix cache finds only whole blocks."""
NO_CONTEXT: Final = -1
"""Context number of a request that has no context."""
_CONTEXTS_MAX: Final = 100_000
"""Maximum number of contexts, which are kept in memory: 0.5 GB with 1,000 tokens each."""


class Sharing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contexts (shared prompt prefixes), and the share of requests that have one."""

    fraction: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """Fraction of the requests that have a context (of the conversations, if the workload has any)."""
    tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] | Lengths
    """Length of each of the `contexts`: a number, or a distribution."""
    contexts: Annotated[int, msgspec.Meta(ge=1, le=_CONTEXTS_MAX)] = 1
    zipf: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Zipf exponent s of the popularity of contexts; 0: all are equally popular."""

    def lengths(self, seed: int) -> tuple[int, ...]:
        """Return the tokens of each context, the most popular first."""
        random = Random(f"{seed}/context lengths")
        return tuple(draw_length(as_lengths(self.tokens), random) for _ in range(self.contexts))

    def context_choices(self, random: Random) -> Iterator[int]:
        """Yield the context of each request, or NO_CONTEXT, endlessly. Each step draws one number."""
        ends = [self.fraction * end for end in itertools.accumulate(zipf_shares(self.contexts, self.zipf))]
        while True:
            u = random.random()
            # By rounding, the last end can be a little below the fraction: stay within the list.
            yield min(bisect_right(ends, u), self.contexts - 1) if u < self.fraction else NO_CONTEXT

    def describe(self) -> Mapping[str, Any]:
        return {
            "fraction": self.fraction,
            "contexts": self.contexts,
            "popularity": {"distribution": "zipf", "s": self.zipf}
            if self.zipf
            else {"distribution": "uniform"},
            "tokens": describe_lengths(as_lengths(self.tokens)),
            "block_tokens": BLOCK_TOKENS,
        }


def zipf_shares(count: int, s: float) -> list[float]:
    """Return the share of each of `count` items, the most popular first: k^-s / (sum over all items)."""
    weights = [k**-s for k in range(1, count + 1)]
    whole = sum(weights)
    return [weight / whole for weight in weights]


class SharedBlocks:
    """Gives numbers to the whole blocks of prompts. Prompts with equal beginnings get equal numbers."""

    def __init__(self, lengths: tuple[int, ...] = ()) -> None:
        """`lengths`: tokens of each context."""
        self._block_numbers = itertools.count()
        self._contexts = [self._new_blocks(tokens // BLOCK_TOKENS) for tokens in lengths]
        """By context: numbers of its blocks."""

    def _new_blocks(self, count: int) -> tuple[int, ...]:
        return tuple(itertools.islice(self._block_numbers, max(0, count)))

    def blocks_of(
        self, tokens: int, context: int = NO_CONTEXT, before: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """Return the blocks of a prompt. It begins with the blocks `before`, or with those of its context."""
        begun = before or (() if context == NO_CONTEXT else self._contexts[context])
        # A block that is only partly in the context is not shared, so it gets a new number.
        return begun + self._new_blocks(tokens // BLOCK_TOKENS - len(begun))


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """Lengths of one request before its prompt is made."""

    message: int
    """Number of tokens of the new message; `output`: of the answer."""
    output: int
    """Number of tokens of the answer."""
    is_first: bool = True
    """Whether the turn begins a conversation."""
    think_ns: int = 0
    """Pause of the user before the turn."""
    pair_number: int = 0
    """Number of the turn's pair in the data set; 0 if the texts are generated."""


class ConversationScript(Protocol):
    """Texts of a workload. Each has exactly the given length; equal arguments give equal texts."""

    def message(self, row: int, tokens: int) -> str:
        """Return the message of a row."""
        ...

    def answer(self, row: int, tokens: int) -> str:
        """Return the text that later prompts contain as the answer to this row."""
        ...

    def context(self, number: int, tokens: int) -> str:
        """Return the text of a shared context."""
        ...


@dataclass(slots=True)
class WorkloadPlan:
    """Requests of a workload, with the lengths of the parts of their prompts."""

    requests: Requests = field(default_factory=Requests)
    messages: "array[int]" = field(default_factory=int_column)
    """Tokens of the new message of each request."""
    contexts: "array[int]" = field(default_factory=int_column)
    """Context number of each request, or NO_CONTEXT."""
    lengths: tuple[int, ...] = ()
    """Tokens of each context."""
    pair_numbers: "array[int]" = field(default_factory=int_column)
    """`PlannedTurn.pair_number` of each request."""


def assemble_plan(
    turns: Iterator[PlannedTurn],
    count: int,
    seed: int,
    *,
    sharing: Sharing | None = None,
    has_conversations: bool = False,
    tokens_max: int | None = None,
) -> WorkloadPlan:
    """Return the first `count` turns (or all, if there are fewer) as requests.

    A turn with a prompt longer than `tokens_max` is omitted, with all later turns of its conversation.
    """
    plan = WorkloadPlan(lengths=sharing.lengths(seed) if sharing else ())
    requests = plan.requests
    context_choices = sharing.context_choices(Random(f"{seed}/context")) if sharing else None
    blocks = SharedBlocks(plan.lengths) if sharing or has_conversations else None
    if blocks:
        requests.block_tokens = BLOCK_TOKENS
    context, history, over = NO_CONTEXT, 0, False
    before: tuple[int, ...] = ()
    for turn in turns:
        if len(requests) == count:
            break
        if turn.is_first:
            context = next(context_choices) if context_choices else NO_CONTEXT
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
        plan.pair_numbers.append(turn.pair_number)
        if has_conversations:
            requests.after.append(-1 if turn.is_first else len(requests) - 2)
            requests.think_ns.append(turn.think_ns)
        if blocks:
            before = blocks.blocks_of(tokens, context, before)
            requests.blocks.append(before)
        history = tokens + turn.output
    return plan


def _make_unfitted(made: Callable[[int], str], tokens: int) -> str:
    """Make a text as it is: default of `ConversationPrompts.fit`."""
    return made(tokens)


@dataclass(slots=True)
class ConversationPrompts:
    """Prompts of a plan with the texts of a script: context, history and message."""

    plan: WorkloadPlan
    script: ConversationScript
    fit: Fit = _make_unfitted
    """Function that makes a text as long as wanted, by a tokenizer."""
    _contexts: dict[int, str] = field(default_factory=dict)
    """By number: text of a context, because many prompts share it."""

    def prompt(self, row: int) -> Prompt:
        return self.resized_prompt(row, self.plan.requests.input[row])

    def resized_prompt(self, row: int, tokens: int) -> Prompt:
        """Return the row's prompt with `tokens` tokens in total. Only the length of the message changes."""
        plan = self.plan
        message = max(1, plan.messages[row] + tokens - plan.requests.input[row])
        return Prompt(
            text=self._message_text(row, message),
            system=self._context_text(plan.contexts[row]),
            history=tuple(self._history(row)),
        )

    def with_fit(self, fit: Fit) -> "ConversationPrompts":
        """Return a copy of these prompts in which `fit` makes each part."""
        return replace(self, fit=fit, _contexts={})

    def _message_text(self, row: int, tokens: int) -> str:
        return self.fit(lambda n: self.script.message(row, n), tokens)

    def _context_text(self, number: int) -> str:
        """Return the text before all messages of a conversation, which others can share."""
        if number == NO_CONTEXT:
            return ""
        if number not in self._contexts:
            tokens = self.plan.lengths[number]
            self._contexts[number] = self.fit(lambda n: self.script.context(number, n), tokens)
        return self._contexts[number]

    def _history(self, row: int) -> Iterator[tuple[str, str]]:
        for earlier in earlier_rows(self.plan.requests, row):
            yield "user", self._message_text(earlier, self.plan.messages[earlier])
            yield "assistant", self._answer_text(earlier)

    def _answer_text(self, row: int) -> str:
        return self.fit(lambda n: self.script.answer(row, n), self.plan.requests.output[row])


def earlier_rows(requests: Requests, row: int) -> list[int]:
    """Return the earlier rows of the conversation of a row, in their order."""
    rows: list[int] = []
    while requests.after and (row := requests.after[row]) >= 0:
        rows.append(row)
    return rows[::-1]


class _Think(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="distribution"):
    """Base class of the distributions of think times."""

    def describe(self) -> Mapping[str, Any]:
        times = {name: to_seconds(time) for name, time in msgspec.structs.asdict(self).items()}
        return {"distribution": self.__struct_config__.tag, **times, "unit": "s"}


class ThinkFixed(_Think, frozen=True, kw_only=True, tag="fixed"):
    """The same pause before every turn."""

    time: Duration
    """Length of the pause."""

    def quantile_ns(self, p: float) -> int:
        return int(self.time)


class ThinkExponential(_Think, frozen=True, kw_only=True, tag="exponential"):
    """Exponential distribution of the pauses before turns."""

    mean: Duration

    def quantile_ns(self, p: float) -> int:
        return round(-self.mean * math.log1p(-p))


Think = ThinkFixed | ThinkExponential


class Conversations(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers of turns, and pauses between them."""

    turns: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | Lengths
    think: Think
    """Pauses of the user between turns."""
    tokens_max: Annotated[int, msgspec.Meta(ge=1)] = 32_768
    """Maximum length of a prompt, such as a context window. A conversation ends before a longer prompt."""

    def draw_turns(self, random: Random) -> int:
        return draw_length(as_lengths(self.turns), random)

    def draw_think_ns(self, random: Random) -> int:
        return self.think.quantile_ns(uniform_draw(random))

    def describe(self) -> Mapping[str, Any]:
        return {
            "turns": {**describe_lengths(as_lengths(self.turns)), "unit": "turns"},
            "think": self.think.describe(),
            "prompt": "history and new message; answers in the history are text of the planned length",
            "tokens_max": self.tokens_max,
        }


# ---------------------------------------------------------------- classes of workloads

REQUEST: Final[Mapping[str, Any]] = {"temperature": 0.0, "max_tokens": "output", "stop": None}
"""Default fields of a request body. `max_tokens` is the row's output length (IETF draft, A.1.2, A.1.3)."""
SET_BY: Final = {
    "model": "--model",
    "messages": "the workload",
    "prompt": "the workload",
    "input": "the workload",
    "stream": "--stream or --no-stream",
    "max_tokens": "the workload",
    "max_completion_tokens": "the workload",
    "max_output_tokens": "the workload",
}
"""Fields of a body that `[request]` of a workload must not set, each with the option that sets it."""
TOKENIZER: Final[Mapping[str, Any]] = {
    "name": "llmtap words",
    "source": "llmtap/workload/prompts/text.py",
    "vocabulary": len(VOCABULARY),
    "special_tokens": "not counted: lengths are of the texts alone, without BOS, roles and templates",
    "system_prompt": "counted in the input",
}
"""Description of llmtap's own tokenizer (IETF draft, 4.4). With another tokenizer, reports describe that."""
GENERATION: Final = (
    "Python's random.Random, one generator for each column, seeded with the text SEED/COLUMN; a row takes one"
    " number of each, which the distribution's quantile function turns into a length. Texts are seeded with"
    " SEED/ROW"
)


def workload_description(
    name: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    content: Mapping[str, Any],
    **members: Any,
) -> dict[str, Any]:
    """Return the description of a workload by its lengths and content.

    `members`: further members, or other values than the defaults here.
    """
    return {
        "name": name,
        "input": inputs,
        "output": outputs,
        "content": content,
        "sharing": None,
        "conversations": None,
        "data": None,
        "tokenizer": TOKENIZER,
        "generation": GENERATION,
        "request": REQUEST,
        "deviations": [],
        **members,
    }


class PlannedWorkload:
    """Base class of workloads whose requests and prompts come from a `WorkloadPlan`."""

    __slots__ = ()

    def plan(self, count: int, seed: int) -> WorkloadPlan:
        raise NotImplementedError

    def source(self, plan: WorkloadPlan, seed: int) -> ElasticSource:
        raise NotImplementedError

    def requests(self, count: int, seed: int) -> Requests:
        return self.plan(count, seed).requests

    def prompts(self, requests: Requests, seed: int) -> ElasticSource:
        """Return the source of the prompts of `requests`.

        These must be the first rows of `self.requests(count, seed)`; otherwise ValueError is raised.
        """
        plan = self.plan(len(requests), seed)
        check_rows(plan.requests, requests)
        return self.source(plan, seed)


@dataclass(frozen=True, slots=True)
class RandomIds:
    """Prompts of random token ids."""

    vocabulary: int = CL100K_IDS

    def describe(self) -> Mapping[str, Any]:
        return {
            "kind": "ids",
            "domain": "random token ids",
            "language": None,
            "ids": [0, self.vocabulary - 1],
        }


@dataclass(frozen=True, slots=True)
class ComposedWorkload(PlannedWorkload):
    """A workload of distributions of lengths, a generator of texts, and shared prefixes."""

    name: str
    input: Lengths
    """Distribution of the length of a new message, without context and history."""
    output: Lengths
    content: ProseWriter | RandomIds = field(default_factory=ProseWords)
    sharing: Sharing | None = None
    conversations: Conversations | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    """Additional or different members of `describe`."""
    correlation: float = 0.0
    """Correlation between the normal scores of the input length and the output length."""
    models: Mapping[str, float] = field(default_factory=dict)
    """Share of the requests that go to each model, by its name."""

    def describe(self) -> Mapping[str, object]:
        more = "" if self.sharing is None and self.conversations is None else ", without context and history"
        members = {
            "sharing": self.sharing.describe() if self.sharing else None,
            "conversations": self.conversations.describe() if self.conversations else None,
            **({"correlation": self.correlation} if self.correlation else {}),
            **({"models": dict(self.models)} if self.models else {}),
            **self.about,
        }
        input_description = {**describe_lengths(self.input), "of": f"the message{more}"}
        return workload_description(
            self.name, input_description, describe_lengths(self.output), self.content.describe(), **members
        )

    def plan(self, count: int, seed: int) -> WorkloadPlan:
        talk = self.conversations
        plan = assemble_plan(
            self._draw_turns(seed),
            count,
            seed,
            sharing=self.sharing,
            has_conversations=talk is not None,
            tokens_max=talk.tokens_max if talk else None,
        )
        if self.models:
            names, shares = list(self.models), list(self.models.values())
            plan.requests.models = Random(f"{seed}/models").choices(names, shares, k=len(plan.requests))
        return plan

    def source(self, plan: WorkloadPlan, seed: int) -> ElasticSource:
        if isinstance(self.content, RandomIds):
            return _RandomIdPrompts(plan, self.content.vocabulary, seed)
        return ConversationPrompts(plan, GeneratedScript(self.content, plan, seed))

    def _draw_turns(self, seed: int) -> Iterator[PlannedTurn]:
        """Yield random turns without end; the turns of a conversation follow each other."""
        input_random, output_random, turns_random, think_random = (
            Random(f"{seed}/{what}") for what in ("input", "output", "turns", "think")
        )
        talk = self.conversations
        while True:
            remaining = talk.draw_turns(turns_random) if talk else 1
            yield self._draw_turn(input_random, output_random)
            for _ in range(remaining - 1):
                assert talk is not None
                think_ns = talk.draw_think_ns(think_random)
                yield replace(self._draw_turn(input_random, output_random), is_first=False, think_ns=think_ns)

    def _draw_turn(self, input_random: Random, output_random: Random) -> PlannedTurn:
        input_share, output_share = uniform_draw(input_random), uniform_draw(output_random)
        if self.correlation:
            output_share = correlated_draw(input_share, output_share, self.correlation)
        return PlannedTurn(self.input.quantile(input_share), self.output.quantile(output_share))


def check_rows(planned: Requests, requests: Requests) -> None:
    if planned.input != requests.input or planned.output != requests.output:
        raise ValueError(
            "the lengths of the requests are not those of this workload: use its seed and its file"
        )


@dataclass(frozen=True, slots=True)
class GeneratedScript(ConversationScript):
    """Texts that a generator makes."""

    writer: ProseWriter
    plan: WorkloadPlan
    seed: int

    def message(self, row: int, tokens: int) -> str:
        context = self.plan.contexts[row]
        # Use the same topic for all requests with the same context, or of the same conversation.
        first = [*earlier_rows(self.plan.requests, row), row][0]
        topic = f"{self.seed}/{first}" if context == NO_CONTEXT else f"{self.seed}/context/{context}"
        return self.writer.text(tokens, f"{self.seed}/{row}", topic)

    def answer(self, row: int, tokens: int) -> str:
        return ProseWords().text(tokens, f"{self.seed}/{row}/answer", "")

    def context(self, number: int, tokens: int) -> str:
        key = f"{self.seed}/context/{number}"
        return self.writer.text(tokens, key, key)


@dataclass(frozen=True, slots=True)
class _RandomIdPrompts:
    """Prompts of random token ids, which have exactly the planned length."""

    plan: WorkloadPlan
    vocabulary: int
    seed: int

    def prompt(self, row: int) -> Prompt:
        return Prompt(ids=[*self._earlier_ids(row), *self._ids(f"{row}", self.plan.messages[row])])

    def resized_prompt(self, row: int, tokens: int) -> Prompt:
        return self.prompt(row)

    def with_fit(self, fit: Fit) -> "_RandomIdPrompts":
        return self

    def _earlier_ids(self, row: int) -> list[int]:
        plan = self.plan
        context = plan.contexts[row]
        ids = [] if context == NO_CONTEXT else self._ids(f"context/{context}", plan.lengths[context])
        for earlier in earlier_rows(plan.requests, row):
            ids += self._ids(f"{earlier}", plan.messages[earlier])
            ids += self._ids(f"{earlier}/answer", plan.requests.output[earlier])
        return ids

    def _ids(self, key: str, count: int) -> list[int]:
        return random_ids(Random(f"{self.seed}/{key}"), count, self.vocabulary)
