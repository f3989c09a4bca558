"""Synthetic-Uniform and Synthetic-Skewed: random token ids without meaning.

A.1.4 gives a generator: one `random.Random(seed)`; for each request the input length, the output length, and
then that many ids, all by `randint`. Synthetic-Uniform is that very sequence. A.2 gives no generator:
Synthetic-Skewed is the same but for how the two lengths are drawn.

As one generator makes everything, a row needs all rows before it. Its state is kept at every 64th row, so
that prompts may be asked for in any order.

Source: seed 000, 4.3.2.1, 4.3.2.2, A.1 and A.2.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from llmtap.workload.claims import Claim
from llmtap.workload.composed import REQUEST, TOKENIZER, RandomIds, check_rows
from llmtap.workload.lengths import LogNormal, UniformLengths, described
from llmtap.workload.plan import WorkloadPlan
from llmtap.workload.prompts.prompt import ElasticSource, Fit, Prompt
from llmtap.workload.prompts.token_ids import CL100K_IDS, count_ids, random_ids
from llmtap.workload.requests import Requests
from llmtap.workload.sharing import NO_CONTEXT

__all__ = ["SKEWED", "UNIFORM", "SyntheticWorkload"]

_EVERY: Final = 64
"""Rows between two states that are kept: 2.5 KB each, 40 MB for a million rows."""


@dataclass(frozen=True, slots=True)
class SyntheticWorkload:
    """A workload of random ids by one generator."""

    name: str
    input: UniformLengths | LogNormal
    output: UniformLengths | LogNormal
    lengths: Callable[[Random], tuple[int, int]]
    """Draws input and output of a request."""
    about: Mapping[str, Any]
    claims: tuple[Claim, ...]
    """What the draft says of its lengths."""
    sharing: None = None

    def describe(self) -> Mapping[str, object]:
        return {
            "name": self.name,
            "input": {**described(self.input), "of": "the prompt"},
            "output": {**described(self.output), "control": "max_tokens"},
            "content": RandomIds().describe(),
            "sharing": None,
            "conversations": None,
            "data": None,
            "tokenizer": {
                **TOKENIZER,
                "name": "none: token ids", "source": "ids of cl100k_base, special ones left out",
                "vocabulary": CL100K_IDS,
            },
            "generation": "A.1.4: one random.Random(seed); per request input length, output length, then the"
            " ids by randint(0, 100255)",
            "request": REQUEST,
            "deviations": [],
            **self.about,
        }  # fmt: skip

    def requests(self, count: int, seed: int) -> Requests:
        requests, random = Requests(), Random(seed)
        for _ in range(count):
            given, made = self.lengths(random)
            requests.arrival_ns.append(0)
            requests.input.append(given)
            requests.output.append(made)
            count_ids(random, given)
        return requests

    def plan(self, count: int, seed: int) -> WorkloadPlan:
        requests = self.requests(count, seed)
        return WorkloadPlan(requests, requests.input[:], array("q", [NO_CONTEXT]) * count)

    def prompts(self, requests: Requests, seed: int) -> ElasticSource:
        """`requests` are the first of `requests(count, seed)`. Raises ValueError where they are not."""
        # The first rows are enough to tell another seed or workload; all would cost as much as the ids.
        first = range(min(len(requests), _EVERY))
        check_rows(self.requests(len(first), seed), requests.taken(first))
        return _Sequence(self.lengths, seed)


@dataclass(slots=True)
class _Sequence:
    """The sequence of the generator, at any row."""

    lengths: Callable[[Random], tuple[int, int]]
    seed: int
    _random: Random = field(init=False)
    _next: int = 0
    """The row that `_random` makes next."""
    _states: list[tuple[int, "array[int]", float | None]] = field(default_factory=list)
    """Before each row that is a multiple of `_EVERY`, as far as we came."""

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def prompt(self, row: int) -> Prompt:
        self._go_to(row)
        given, _ = self.lengths(self._random)
        self._next += 1
        return Prompt(ids=random_ids(self._random, given))

    def sized(self, row: int, tokens: int) -> Prompt:
        """Ids are prescribed: they stay what they are."""
        return self.prompt(row)

    def fitted(self, fit: Fit) -> "_Sequence":
        return self

    def _go_to(self, row: int) -> None:
        known = min(row // _EVERY, len(self._states) - 1)
        if not self._next <= row or known * _EVERY > self._next:
            version, words, gauss = self._states[known]
            self._random.setstate((version, tuple(words), gauss))
            self._next = known * _EVERY
        while True:
            if self._next == len(self._states) * _EVERY:
                version, words, gauss = self._random.getstate()
                self._states.append((version, array("I", words), gauss))
            if self._next == row:
                return
            count_ids(self._random, self.lengths(self._random)[0])
            self._next += 1


_UNIFORM_INPUT: Final = UniformLengths(min=128, max=512)
_UNIFORM_OUTPUT: Final = UniformLengths(min=64, max=256)
_SKEWED_INPUT: Final = LogNormal(mu=5.5, sigma=1.0, min=32, max=4_096)
_SKEWED_OUTPUT: Final = LogNormal(mu=4.5, sigma=1.2, min=16, max=2_048)


def _uniform(random: Random) -> tuple[int, int]:
    return random.randint(128, 512), random.randint(64, 256)


def _skewed(random: Random) -> tuple[int, int]:
    given, made = random.lognormvariate(5.5, 1.0), random.lognormvariate(4.5, 1.2)
    return max(32, min(4_096, round(given))), max(16, min(2_048, round(made)))


UNIFORM: Final = SyntheticWorkload(
    "synthetic-uniform", _UNIFORM_INPUT, _UNIFORM_OUTPUT, _uniform,
    {
        "about": "random tokens, lengths uniform: a controlled baseline",
        "source": "seed 000, 4.3.2.1 and A.1",
        "deviations": [],
    },
    (
        Claim("message", "min", 128, "A.1.1"),
        Claim("message", "max", 512, "A.1.1"),
        Claim("message", "mean", 320, "A.1.1"),
        Claim("output", "min", 64, "A.1.2"),
        Claim("output", "max", 256, "A.1.2"),
        Claim("output", "mean", 160, "A.1.2"),
    ),
)  # fmt: skip
SKEWED: Final = SyntheticWorkload(
    "synthetic-skewed", _SKEWED_INPUT, _SKEWED_OUTPUT, _skewed,
    {
        "about": "random tokens, lengths lognormal: scheduling with high variance of lengths",
        "source": "seed 000, 4.3.2.2 and A.2",
        "deviations": [
            {
                "section": "A.2", "says": "no generation method",
                "here": "A.1.4's, with lognormvariate, rounded, for the two lengths",
            },
            {
                "section": "4.3.2.2", "says": "caps, and no floors",
                "here": "A.2's floors of 32 and 16 as well",
            },
            {
                "section": "A.2.1", "says": "mean ~405",
                "here": "403.4 is the mean before floor and cap, 399.6 after: lengths beyond them are cut"
                " to them, not drawn anew",
            },
        ],
    },
    (
        Claim("message", "min", 32, "A.2.1"),
        Claim("message", "max", 4_096, "A.2.1"),
        Claim("message", "p50", 245, "A.2.1"),
        Claim("message", "mean", 405, "A.2.1"),
        Claim("output", "min", 16, "A.2.2"),
        Claim("output", "max", 2_048, "A.2.2"),
        Claim("output", "p50", None, "4.3.2.2: exp(mu)"),
        Claim("output", "mean", None, "A.2.2"),
    ),
)  # fmt: skip
