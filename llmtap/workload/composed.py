"""A workload composed of distributions of lengths, contents, shared contexts and conversations.

`Composed` is built by `custom.py` (a user's file) and `ietf.py`. It draws the requests without arrivals with
the functions of `plan.py`, and makes their prompts: generated text, a file's text, or random token ids.
`PlannedWorkload`, defined here, is the base class of `Composed`, of `Simulated` (`synthetic.py`) and of the
data sets (`datasets.py`). Each column has its own random generator, so changing one distribution leaves the
other columns as they were.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from llmtap.workload.lengths import Lengths, described, drawn
from llmtap.workload.plan import (
    NO_CONTEXT,
    Conversations,
    ConversationScript,
    PlannedTurn,
    Sharing,
    Speaker,
    WorkloadPlan,
    assemble,
    rows_before,
)
from llmtap.workload.prompts.prompt import CL100K_IDS, ElasticSource, Fit, Prompt, random_ids
from llmtap.workload.prompts.prose import ProseWords, ProseWriter
from llmtap.workload.prompts.text import VOCABULARY
from llmtap.workload.requests import Requests

REQUEST: Final[Mapping[str, Any]] = {"temperature": 0.0, "max_tokens": "output", "stop": None}
"""Default request body; `max_tokens` is the row's output (IETF draft, A.1.2, A.1.3)."""
TOKENIZER: Final[Mapping[str, Any]] = {
    "name": "llmtap words", "source": "llmtap/workload/prompts/text.py", "vocabulary": len(VOCABULARY),
    "special_tokens": "not counted: lengths are of the texts alone, without BOS, roles and templates",
    "system_prompt": "counted in the input",
}  # fmt: skip
"""IETF draft, 4.4. Senders that count differently report it."""
GENERATION: Final = (
    "Python's random.Random, one generator for each column, seeded with the text SEED/COLUMN; a row takes one"
    " number of each, which the distribution's quantile function turns into a length. Texts are seeded with"
    " SEED/ROW"
)


def description(
    name: str, given: Mapping[str, Any], made: Mapping[str, Any], content: Mapping[str, Any], **members: Any
) -> dict[str, Any]:
    """Return the description of a workload by its lengths and content; `members`: those that differ."""
    return {
        "name": name, "input": given, "output": {**made, "control": "max_tokens"}, "content": content,
        "sharing": None, "conversations": None, "data": None, "tokenizer": TOKENIZER,
        "generation": GENERATION, "request": REQUEST, "deviations": [], **members,
    }  # fmt: skip


class PlannedWorkload:
    __slots__ = ()

    def plan(self, count: int, seed: int) -> WorkloadPlan:
        raise NotImplementedError

    def source(self, plan: WorkloadPlan, seed: int) -> ElasticSource:
        raise NotImplementedError

    def requests(self, count: int, seed: int) -> Requests:
        return self.plan(count, seed).requests

    def prompts(self, requests: Requests, seed: int) -> ElasticSource:
        """`requests`: the first of `requests(count, seed)`. Raises ValueError for others."""
        plan = self.plan(len(requests), seed)
        check_rows(plan.requests, requests)
        return self.source(plan, seed)


@dataclass(frozen=True, slots=True)
class RandomIds:
    vocabulary: int = CL100K_IDS

    def describe(self) -> Mapping[str, Any]:
        return {
            "kind": "ids", "domain": "random token ids", "language": None,
            "ids": [0, self.vocabulary - 1],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Composed(PlannedWorkload):
    name: str
    input: Lengths
    """Of the new message, without context and history."""
    output: Lengths
    content: ProseWriter | RandomIds = field(default_factory=ProseWords)
    sharing: Sharing | None = None
    conversations: Conversations | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    """Additional or different members of `describe`."""

    def describe(self) -> Mapping[str, object]:
        more = "" if self.sharing is None and self.conversations is None else ", without context and history"
        members = {
            "sharing": self.sharing.describe() if self.sharing else None,
            "conversations": self.conversations.describe() if self.conversations else None,
            **self.about,
        }
        given = {**described(self.input), "of": f"the message{more}"}
        return description(self.name, given, described(self.output), self.content.describe(), **members)

    def plan(self, count: int, seed: int) -> WorkloadPlan:
        talk = self.conversations
        return assemble(
            self._turns(seed), count, seed, sharing=self.sharing, converses=talk is not None,
            tokens_max=talk.tokens_max if talk else None,
        )  # fmt: skip

    def source(self, plan: WorkloadPlan, seed: int) -> ElasticSource:
        if isinstance(self.content, RandomIds):
            return _Numbers(plan, self.content.vocabulary, seed)
        return Speaker(plan, Written(self.content, plan, seed))

    def _turns(self, seed: int) -> Iterator[PlannedTurn]:
        given, made, turns, think = (
            Random(f"{seed}/{what}") for what in ("input", "output", "turns", "think")
        )
        talk = self.conversations
        while True:
            left = talk.turns_drawn(turns) if talk else 1
            yield PlannedTurn(drawn(self.input, given), drawn(self.output, made))
            for _ in range(left - 1):
                assert talk is not None
                think_ns = talk.think_drawn_ns(think)
                yield PlannedTurn(drawn(self.input, given), drawn(self.output, made), False, think_ns)


def check_rows(planned: Requests, asked: Requests) -> None:
    if planned.input != asked.input or planned.output != asked.output:
        raise ValueError("these are not the first requests of the workload with this seed")


@dataclass(frozen=True, slots=True)
class Written(ConversationScript):
    writer: ProseWriter
    plan: WorkloadPlan
    seed: int

    def message(self, row: int, tokens: int) -> str:
        context = self.plan.contexts[row]
        # Requests that share a context, or a conversation, have one topic.
        first = [*rows_before(self.plan.requests, row), row][0]
        topic = f"{self.seed}/{first}" if context == NO_CONTEXT else f"{self.seed}/context/{context}"
        return self.writer.text(tokens, f"{self.seed}/{row}", topic)

    def answer(self, row: int, tokens: int) -> str:
        return ProseWords().text(tokens, f"{self.seed}/{row}/answer", "")

    def context(self, number: int, tokens: int) -> str:
        key = f"{self.seed}/context/{number}"
        return self.writer.text(tokens, key, key)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Prompts of random token ids, of exactly the wanted length."""

    plan: WorkloadPlan
    vocabulary: int
    seed: int

    def prompt(self, row: int) -> Prompt:
        return Prompt(ids=[*self._before(row), *self._ids(f"{row}", self.plan.messages[row])])

    def sized(self, row: int, tokens: int) -> Prompt:
        return self.prompt(row)

    def fitted(self, fit: Fit) -> "_Numbers":
        return self

    def _before(self, row: int) -> list[int]:
        plan = self.plan
        context = plan.contexts[row]
        ids = [] if context == NO_CONTEXT else self._ids(f"context/{context}", plan.lengths[context])
        for earlier in rows_before(plan.requests, row):
            ids += self._ids(f"{earlier}", plan.messages[earlier])
            ids += self._ids(f"{earlier}/answer", plan.requests.output[earlier])
        return ids

    def _ids(self, key: str, count: int) -> list[int]:
        return random_ids(Random(f"{self.seed}/{key}"), count, self.vocabulary)
