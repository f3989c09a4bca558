"""Random loads of two tests: requests of several length classes (fairness), shared prefixes (prefix cache).

`open_mix` and `closed_mix` make a `Load` of a `ClassMix`; `prefixes_of` makes a `Prefixes`, whose methods
make loads with shared prefixes and the load that fills a cache with them.

Classes: 5.6.2 asks for Synthetic-Skewed and for classes whose ranges and ratio contradict it. Here ratio and
ranges hold; lengths within a range follow the log-normals. Prefixes: `texts` is the seed of the words, and
the other seed that of lengths, arrivals and sharing. A row does not depend on the number of rows.

Source: IETF draft, 4.3.2.2, 4.3.2.4, 5.6.2, 5.7, A.2 and A.4.
"""

import itertools
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import NormalDist
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from llmtap.bench.run.loads import Load
from llmtap.errors import ConfigError
from llmtap.load.replay.plan import ReplayPlan
from llmtap.units import NS_PER_S
from llmtap.workload.arrivals import parse_arrivals
from llmtap.workload.lengths import LogNormal, UniformLengths, uniform_draw
from llmtap.workload.plan import (
    GENERATION,
    REQUEST,
    TOKENIZER,
    Composed,
    ConversationScript,
    PlannedTurn,
    RandomIds,
    Sharing,
    Speaker,
    Written,
    assemble,
    check_rows,
)
from llmtap.workload.plan import WorkloadPlan as Parts
from llmtap.workload.prompts.fitting import ElasticPrompts
from llmtap.workload.prompts.prompt import CL100K_IDS, ElasticSource, Fit, Prompt, random_ids
from llmtap.workload.prompts.prose import ProseWords
from llmtap.workload.prompts.tokenizer import OWN, load_counter
from llmtap.workload.registry import is_workload, report_of, workload_named
from llmtap.workload.requests import Requests

Tokens = Annotated[int, Meta(ge=1, le=1 << 24)]
_INPUT: Final = LogNormal(mu=5.5, sigma=1.0)
_OUTPUT: Final = LogNormal(mu=4.5, sigma=1.2)
"""Log-normals of Synthetic-Skewed (A.2), without its floor and cap."""
_IDS_COUNTED: Final[Mapping[str, Any]] = {"name": "none: token ids", "source": "whole numbers"}
_STANDARD: Final = NormalDist()
_STEPS: Final = 2_000
"""Steps of the quantile function for a mean: exact to 0.1 tokens for the draft's ranges."""


class RequestClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A class of requests (5.6.2)."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="name in small letters")]
    share: Annotated[float, Meta(gt=0, le=1, description="fraction of all requests; the sum is 1")]
    input: Annotated[tuple[Tokens, Tokens], Meta(description="range of prompt lengths, tokens")]
    output: Annotated[tuple[Tokens, Tokens], Meta(description="range of response lengths, tokens")]


SHORT: Final = RequestClass(name="short", share=0.8, input=(64, 256), output=(32, 128))
LONG: Final = RequestClass(name="long", share=0.2, input=(1_024, 4_096), output=(256, 1_024))


def check_classes(classes: Sequence[RequestClass], place: str = "classes") -> None:
    if len(classes) < 2:
        raise ConfigError(place, "are fewer than two: there is nobody to be unfair to (5.6.2)")
    names = [one.name for one in classes]
    if len(set(names)) < len(names):
        raise ConfigError(place, f"a name comes twice: {', '.join(names)}")
    for one in classes:
        for what, (low, high) in (("input", one.input), ("output", one.output)):
            if low > high:
                raise ConfigError(place, f"{one.name}: {what} is from {low:,} to {high:,}")
    shares = sum(one.share for one in classes)
    if not math.isclose(shares, 1, abs_tol=1e-6):
        raise ConfigError(place, f"shares add up to {shares:g}, not to 1")


@dataclass(frozen=True, slots=True)
class ClassMix:
    classes: tuple[RequestClass, ...]
    content: Literal["words", "ids"] = "words"
    vocabulary: int = CL100K_IDS
    """Upper bound of token ids."""
    name: str = "request-classes"

    def alone(self, name: str) -> "ClassMix":
        (one,) = (one for one in self.classes if one.name == name)
        whole = msgspec.structs.replace(one, share=1.0)
        return ClassMix((whole,), self.content, self.vocabulary)

    def describe(self) -> Mapping[str, object]:
        content = RandomIds(self.vocabulary) if self.content == "ids" else ProseWords()
        return {
            "name": self.name,
            "about": "requests of classes, mixed by share",
            "source": "IETF draft, 5.6.2, 4.3.2.2 and A.2",
            "classes": msgspec.to_builtins(self.classes),
            "input": _described(_INPUT, "the prompt"),
            "output": {**_described(_OUTPUT, "the answer"), "control": "max_tokens"},
            "content": content.describe(),
            "sharing": None,
            "conversations": None,
            "data": None,
            "tokenizer": {**TOKENIZER, **_IDS_COUNTED} if self.content == "ids" else TOKENIZER,
            "generation": GENERATION,
            "request": REQUEST,
            "deviations": [
                {
                    "section": "4.3.2.2", "says": "log-normal lengths up to a cap",
                    "here": "the lengths of 5.6.2's classes in their ratio, within whose ranges they are"
                    " as these log-normals have them",
                },
                *([] if self.content == "ids" else [{
                    "section": "4.3.2.2", "says": "random token sequences",
                    "here": "random words of a token each: a chat takes text",
                }]),
            ],
        }  # fmt: skip

    def names(self, seed: int) -> Iterator[str]:
        """Yield the class of each row, endlessly."""
        return (one.name for one in self._drawn(seed))

    def mean_tokens(self) -> float:
        return sum(
            one.share * (_mean_length(_INPUT, one.input) + _mean_length(_OUTPUT, one.output))
            for one in self.classes
        )

    def requests(self, count: int, seed: int) -> Requests:
        return self._parts(count, seed).requests

    def prompts(self, requests: Requests, seed: int) -> ElasticSource:
        """Return the prompts of `requests(count, seed)`. Raises ValueError for other requests."""
        parts = self._parts(len(requests), seed)
        check_rows(parts.requests, requests)
        if self.content == "ids":
            return _Ids(requests, self.vocabulary, seed)
        return Speaker(parts, Written(ProseWords(), parts, seed))

    def _parts(self, count: int, seed: int) -> Parts:
        return assemble(self._turns(seed), count, seed)

    def _turns(self, seed: int) -> Iterator[PlannedTurn]:
        given, made = Random(f"{seed}/input"), Random(f"{seed}/output")
        for one in self._drawn(seed):
            yield PlannedTurn(
                _length(_INPUT, one.input, uniform_draw(given)),
                _length(_OUTPUT, one.output, uniform_draw(made)),
            )

    def _drawn(self, seed: int) -> Iterator[RequestClass]:
        ends = list(itertools.accumulate(one.share for one in self.classes))
        random = Random(f"{seed}/class")
        while True:
            u = random.random()
            # The last end is 1 but for rounding.
            yield next((c for c, end in zip(self.classes, ends, strict=True) if u < end), self.classes[-1])


def _length(skewed: LogNormal, span: tuple[int, int], u: float) -> int:
    """Return quantile u of the lengths within a span, both ends included."""
    low, high = span
    mu, sigma = skewed.logarithm
    first, last = (_STANDARD.cdf((math.log(edge) - mu) / sigma) for edge in (low - 0.5, high + 0.5))
    p = min(max(first + u * (last - first), 2**-54), 1 - 2**-53)
    return max(low, min(high, skewed.quantile(p)))


def _mean_length(skewed: LogNormal, span: tuple[int, int]) -> float:
    return math.fsum(_length(skewed, span, (i + 0.5) / _STEPS) for i in range(_STEPS)) / _STEPS


def _described(skewed: LogNormal, of: str) -> dict[str, Any]:
    mu, sigma = skewed.logarithm
    about = {"of": of, "unit": "tokens", "within": "the class's range"}
    return {"distribution": "lognormal, truncated", "mu": mu, "sigma": sigma, **about}


@dataclass(frozen=True, slots=True)
class _Ids:
    """Prompts of random token ids of exact length."""

    requests: Requests
    vocabulary: int
    seed: int

    def prompt(self, row: int) -> Prompt:
        return Prompt(ids=random_ids(Random(f"{self.seed}/{row}"), self.requests.input[row], self.vocabulary))

    def sized(self, row: int, tokens: int) -> Prompt:
        return self.prompt(row)

    def fitted(self, fit: Fit) -> "_Ids":
        return self


def open_mix(
    mix: ClassMix,
    *,
    rate_rps: float,
    seed: int,
    duration_s: float = 0.0,
    per_class: int = 0,
    tokenizer: str | None = None,
    chat: bool = True,
) -> Load:
    """Return an open-loop load with Poisson arrivals and a minimum duration and requests per class."""
    arrivals = parse_arrivals("poisson", rate_rps=rate_rps, seed=seed)
    missing = {one.name: per_class for one in mix.classes}
    offsets = array("q")
    until_ns = round(duration_s * NS_PER_S)
    for name, at_ns in zip(mix.names(seed), arrivals, strict=False):
        offsets.append(at_ns)
        missing[name] -= 1
        if at_ns >= until_ns and max(missing.values()) <= 0:
            break
    requests = mix.requests(len(offsets), seed)
    requests.arrival_ns = offsets
    return _load(mix, requests, seed, arrivals.describe(), tokenizer, chat, rate_rps=rate_rps)


def closed_mix(
    mix: ClassMix, *, slots: int, requests: int, seed: int, tokenizer: str | None = None, chat: bool = True
) -> Load:
    """Return requests of the mix as a closed loop."""
    return _load(mix, mix.requests(requests, seed), seed, None, tokenizer, chat, slots=slots)


def _load(
    mix: ClassMix, requests: Requests, seed: int, arrivals: Mapping[str, object] | None,
    tokenizer: str | None, chat: bool, *, slots: int | None = None, rate_rps: float | None = None,
) -> Load:  # fmt: skip
    counter = load_counter(tokenizer or OWN, chat=chat, place="[target] tokenizer")
    prompts = ElasticPrompts(mix.prompts(requests, seed), requests, counter)
    about = {
        "workload": report_of(mix, requests, seed), "arrivals": arrivals, "seed": seed,
        "requests": len(requests),
    }  # fmt: skip
    named = list(itertools.islice(mix.names(seed), len(requests)))
    plan = ReplayPlan(requests, prompts, about, [], counter.tokenizer.decode)
    return Load(plan=plan, closed=slots, rate_rps=rate_rps, class_of=named.__getitem__)


PRIMER_TOKENS: Final = 16
"""Tokens of the message after a prefix that is sent only to fill the cache; its response has one token."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """A workload that shares prefixes, and how its prompts are counted."""

    workload: Composed
    tokenizer: str | None = None
    chat: bool = True
    output_tokens: int | None = None
    """Response length in place of the workload's own lengths."""

    @property
    def sharing(self) -> Sharing:
        assert self.workload.sharing is not None
        return self.workload.sharing

    def open(self, count: int, seed: int, texts: int, rate_rps: float) -> Load:
        arrivals = parse_arrivals("poisson", rate_rps=rate_rps, seed=seed)
        parts = self._parts(count, seed)
        parts.requests.arrival_ns = array("q", itertools.islice(arrivals, count))
        plan = self._plan(parts, self._script(parts, texts), seed, texts, arrivals.describe())
        return Load(plan=plan, rate_rps=rate_rps)

    def closed(self, count: int, seed: int, texts: int, slots: int) -> Load:
        parts = self._parts(count, seed)
        plan = self._plan(parts, self._script(parts, texts), seed, texts, None)
        return Load(plan=plan, closed=slots)

    def primer(self, seed: int, texts: int) -> Load:
        """Return a load with each prefix of these seeds once, each with a message of its own."""
        lengths = self.sharing.lengths(seed)
        parts = Parts(lengths=lengths)
        for number, tokens in enumerate(lengths):
            parts.requests.arrival_ns.append(0)
            parts.requests.input.append(tokens + PRIMER_TOKENS)
            parts.requests.output.append(1)
            parts.messages.append(PRIMER_TOKENS)
            parts.contexts.append(number)
            parts.places.append(0)
        plan = self._plan(parts, _Primer(self._script(parts, texts)), seed, texts, None)
        return Load(plan=plan, closed=1)

    def shared(self, count: int, seed: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the number of each row's prefix (or NO_CONTEXT), and the tokens of each prefix."""
        parts = self._parts(count, seed)
        return parts.contexts, parts.lengths

    def _parts(self, count: int, seed: int) -> Parts:
        parts = self.workload.plan(count, seed)
        if self.output_tokens is not None:
            parts.requests.output = array("q", [self.output_tokens]) * len(parts.requests)
        return parts

    def _script(self, parts: Parts, texts: int) -> Written:
        content = self.workload.content
        assert not isinstance(content, RandomIds)
        return Written(content, parts, texts)

    def _plan(
        self,
        parts: Parts,
        script: ConversationScript,
        seed: int,
        texts: int,
        arrivals: dict[str, object] | None,
    ) -> ReplayPlan:
        requests = parts.requests
        counter = load_counter(self.tokenizer or OWN, chat=self.chat, place="[target] tokenizer")
        about = {
            "workload": report_of(self.workload, requests, seed), "arrivals": arrivals, "seed": seed,
            "texts": texts, "requests": len(requests),
        }  # fmt: skip
        prompts = ElasticPrompts(Speaker(parts, script), requests, counter)
        return ReplayPlan(requests, prompts, about, [], counter.tokenizer.decode)


@dataclass(frozen=True, slots=True)
class _Primer(ConversationScript):
    """The contexts of a script with other messages, so that only prefixes get into the cache."""

    script: Written

    def message(self, row: int, tokens: int) -> str:
        return self.script.writer.text(
            tokens, f"{self.script.seed}/primer/{row}", f"{self.script.seed}/primer"
        )

    def answer(self, row: int, tokens: int) -> str:
        return self.script.answer(row, tokens)

    def context(self, number: int, tokens: int) -> str:
        return self.script.context(number, tokens)


def prefixes_of(
    name: str,
    *,
    tokenizer: str | None = None,
    chat: bool = True,
    fraction: float | None = None,
    tokens: tuple[int, int] | None = None,
    contexts: int | None = None,
    output_tokens: int | None = None,
) -> Prefixes:
    """Return a workload with another sharing. Raises ConfigError: it shares nothing, or has fixed texts."""
    if not is_workload(name):
        raise ConfigError("workload", f"no workload is called {name!r}", "such as code-completion")
    workload = workload_named(name, "workload")
    if not isinstance(workload, Composed) or isinstance(workload.content, RandomIds):
        raise ConfigError(
            "workload", f"the texts of {name} cannot be written anew, so that a cache does not know them",
            "code-completion, conversation, or a FILE.toml of written texts",
        )  # fmt: skip
    if workload.conversations is not None:
        raise ConfigError("workload", f"{name} has conversations, whose later turns share what went before")
    sharing = workload.sharing
    if sharing is None and tokens is None:
        raise ConfigError(
            "prefix_tokens",
            f"is not given, and the requests of {name} share no prefix",
            "prefix_tokens = [512, 1024]",
        )
    if sharing is None:
        assert tokens is not None
        sharing = Sharing(fraction=1.0, tokens=UniformLengths(min=tokens[0], max=tokens[1]))
    changed = Sharing(
        fraction=sharing.fraction if fraction is None else fraction,
        tokens=sharing.tokens if tokens is None else UniformLengths(min=tokens[0], max=tokens[1]),
        contexts=contexts or sharing.contexts, zipf=sharing.zipf,
    )  # fmt: skip
    return Prefixes(replace(workload, sharing=changed), tokenizer, chat, output_tokens)
