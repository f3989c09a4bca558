"""A data set as a workload: a subset by seed, in an order by seed, with the texts as they are.

The items of a data set are shuffled by the seed, and the first of them are taken, so that more requests begin
with those that fewer have. Where more are wanted than there are, the same order begins again, which
`describe()` says: a prefix cache then finds whole prompts.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, BinaryIO, Final, Protocol

from llmtap.capture.read.streams import opened
from llmtap.errors import ConfigError
from llmtap.traces.format import FormatError
from llmtap.workload.claims import Claim
from llmtap.workload.composed import REQUEST, TOKENIZER, check_rows
from llmtap.workload.lengths import Lengths, described, drawn, lengths_told
from llmtap.workload.plan import ConversationScript, PlannedTurn, Speaker, WorkloadPlan, assemble
from llmtap.workload.prompts.prompt import ElasticSource
from llmtap.workload.prompts.prose import fitted_text, prose
from llmtap.workload.prompts.words import count_tokens
from llmtap.workload.requests import Requests
from llmtap.workload.sharing import Sharing

__all__ = ["DataSet", "Pair", "RecordedDataset", "file_described", "reading"]

Pair = tuple[str, str]
"""What was asked and what was answered."""
SUBSET: Final = (
    "the items shuffled by random.Random('SEED/subset'), the first of them; from the first again where"
    " more are asked for than there are"
)
_SAMPLED: Final = 500
"""Pairs, at most, of which lengths are told: as many of whole files of code are counted in a second."""
_TOKENS_MAX: Final = 32_768
"""A conversation ends where its next prompt would be longer."""


class DataSet(Protocol):
    """Items of one pair or, where they are conversations, of several."""

    @property
    def items(self) -> Sequence[range]:
        """The numbers of each one's pairs."""
        ...

    def pair(self, number: int) -> Pair: ...

    def context(self, number: int, tokens: int, seed: int) -> str:
        """The text of a context that requests share, of exactly so many tokens."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """File, sha256, version, preprocessing and what became of it, content (seed 000, 4.3.3)."""
        ...


@dataclass(frozen=True, slots=True)
class RecordedDataset:
    """A workload of a data set's texts; `output` and `sharing` are the workload's own, if it has any."""

    name: str
    data: DataSet
    content: Mapping[str, Any]
    output: Lengths | None = None
    """None: the answers' own lengths."""
    sharing: Sharing | None = None
    claims: tuple[Claim, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    input: None = None
    """The data's."""

    @property
    def converses(self) -> bool:
        return any(len(item) > 1 for item in self.data.items)

    def describe(self) -> Mapping[str, object]:
        without = ", without context and history" if self.sharing else ""
        told, message, answer = self._lengths()
        made = {**answer, "of": f"the answer, {told}"} if self.output is None else described(self.output)
        return {
            "name": self.name,
            "input": {**message, "of": f"the message{without}, {told}"},
            "output": {**made, "control": "max_tokens"},
            "content": self.content,
            "sharing": self.sharing.describe() if self.sharing else None,
            "conversations": {
                "turns": "the data's", "think": "none: the data has no times",
                "prompt": "history and new message, both as in the data", "tokens_max": _TOKENS_MAX,
            } if self.converses else None,
            "data": {**self.data.describe(), "subset": SUBSET},
            "tokenizer": TOKENIZER,
            "generation": "the data's texts, untouched; contexts and lengths that are not the data's:"
            " random.Random, one generator for each column, seeded with SEED/COLUMN",
            "request": REQUEST,
            "deviations": [],
            **self.about,
        }  # fmt: skip

    def _lengths(self) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """Of which pairs lengths are told; those of messages, and of answers."""
        numbers = [number for item in self.data.items for number in item]
        step = math.ceil(len(numbers) / _SAMPLED)
        pairs = [self.data.pair(number) for number in numbers[::step]]
        message, answer = (
            lengths_told([max(1, count_tokens(text)) for text in texts]) for texts in zip(*pairs, strict=True)
        )
        return "of all pairs" if step == 1 else f"of one in {step:,} pairs", message, answer

    def plan(self, count: int, seed: int) -> WorkloadPlan:
        return assemble(
            self._turns(seed), count, seed, sharing=self.sharing, converses=self.converses,
            tokens_max=_TOKENS_MAX if self.converses else None,
        )  # fmt: skip

    def requests(self, count: int, seed: int) -> Requests:
        return self.plan(count, seed).requests

    def prompts(self, requests: Requests, seed: int) -> ElasticSource:
        """`requests` are the first of `requests(count, seed)`. Raises ValueError where they are not."""
        plan = self.plan(len(requests), seed)
        check_rows(plan.requests, requests)
        return Speaker(plan, _AsRecorded(self.data, plan, seed))

    def _turns(self, seed: int) -> Iterator[PlannedTurn]:
        items = self.data.items
        made = Random(f"{seed}/output")
        order = Random(f"{seed}/subset").sample(range(len(items)), len(items))
        while True:
            for item in order:
                for number in items[item]:
                    message, answer = map(count_tokens, self.data.pair(number))
                    output = answer if self.output is None else drawn(self.output, made)
                    yield PlannedTurn(message, max(1, output), number == items[item].start, place=number)


@dataclass(frozen=True, slots=True)
class _AsRecorded(ConversationScript):
    data: DataSet
    plan: WorkloadPlan
    seed: int

    def message(self, row: int, tokens: int) -> str:
        text = self.data.pair(self.plan.places[row])[0]
        if tokens == self.plan.messages[row]:
            return text
        more = max(0, tokens - self.plan.messages[row])
        return fitted_text(text, tokens, more=" " + prose(more, f"{self.seed}/{row}"))

    def answer(self, row: int, tokens: int) -> str:
        text = self.data.pair(self.plan.places[row])[1]
        return fitted_text(text, tokens, more=" " + prose(tokens, f"{self.seed}/{row}/answer"))

    def context(self, number: int, tokens: int) -> str:
        return self.data.context(number, tokens, self.seed)


@contextmanager
def reading(path: Path, place: str) -> Iterator[BinaryIO]:
    """The file, decompressed. Raises ConfigError of the place for what is wrong with it."""
    try:
        with opened(str(path), 1, None) as file:
            yield file.stream
    except FormatError as exc:
        raise ConfigError(place, f"{path}: {exc}") from None
    except (OSError, EOFError) as exc:
        raise ConfigError(place, f"{path} cannot be read: {getattr(exc, 'strerror', None) or exc}") from None


def file_described(path: Path) -> dict[str, Any]:
    """Name and sha256 of a file as it lies there."""
    with path.open("rb") as file:
        return {"file": path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
