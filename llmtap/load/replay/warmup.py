"""What a SUT is warmed up with: requests as long as those that are measured, in other words.

A server that keeps prefixes answers a prompt that it had before from its cache. So nothing that is going to
be measured is sent beforehand: a prompt of a warm-up has the words of one that will be (or its token ids) in
another order, which leaves it as long, to a token or so, and makes it begin like none.
"""

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, TypeVar

from llmtap.load.replay.plan import ReplayPlan
from llmtap.workload.prompts.prompt import Prompt, PromptSource
from llmtap.workload.requests import Requests

__all__ = ["other_words"]

T = TypeVar("T")
ROWS_MAX: Final = 128
"""A warm-up is of 100 requests (4.5.1); one that takes more begins again with the first."""
LETTERS_MAX: Final = 20
"""Of a word, on average; what has more is written without spaces, and mixed letter by letter."""
_WORD: Final = re.compile(r"\s*\S+")
"""With the space before it, which belongs to its token."""


def other_words(plan: ReplayPlan) -> ReplayPlan:
    """The first requests of a plan with the words of each prompt in another order; nobody waits for a turn
    before it. The plan itself where its requests are bodies that somebody recorded, and no prompts."""
    if plan.prompts is None:
        return plan
    given = plan.requests
    count = min(len(given), ROWS_MAX)
    requests = Requests(
        array("q", bytes(8 * count)), given.input[:count], given.output[:count],
        tenants=given.tenants[:count],
    )  # fmt: skip
    return ReplayPlan(requests, _Mixed(plan.prompts), {}, [], plan.decode)


@dataclass(frozen=True, slots=True)
class _Mixed:
    """Each part of a prompt, mixed."""

    source: PromptSource

    def prompt(self, row: int) -> Prompt:
        random, prompt = Random(f"warm-up/{row}"), self.source.prompt(row)
        return Prompt(
            text=_reworded(prompt.text, random),
            ids=_mixed(prompt.ids, random),
            system=_reworded(prompt.system, random),
            history=tuple((role, _reworded(said, random)) for role, said in prompt.history),
        )


def _reworded(text: str, random: Random) -> str:
    words = _WORD.findall(text)
    if len(text) > LETTERS_MAX * len(words):
        return "".join(_mixed(text, random))
    words[:1] = [" " + first.lstrip() for first in words[:1]]
    return "".join(_mixed(words, random)).lstrip()


def _mixed(parts: Sequence[T], random: Random) -> list[T]:
    """In any order, but what was the first is the last."""
    first, others = list(parts[:1]), list(parts[1:])
    random.shuffle(others)
    return [*others, *first]
