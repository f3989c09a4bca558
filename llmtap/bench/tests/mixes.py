"""Random loads of two tests: requests of several length classes (fairness), shared prefixes (prefix cache).

`open_mix` and `closed_mix` make a `Load` from a `ClassMix`; `prefixes_of` makes a `Prefixes`, whose methods
make loads with shared prefixes and the load that fills a cache with them.

Classes: 5.6.2 requires Synthetic-Skewed, and also classes whose ranges and ratio contradict it. `ClassMix`
keeps the ratio and the ranges of the classes; within a range, the lengths follow the log-normal distributions
of Synthetic-Skewed. `SkewedClasses` is Synthetic-Skewed; a request belongs to the class whose ranges contain
its lengths, and most requests belong to no class.

Prefixes: `texts` is the seed of the words, `seed` is the seed of lengths, arrivals and sharing. A longer load
begins with the same rows as a shorter one.

Source: IETF draft, 4.3.2.2, 4.3.2.4, 5.6.2, 5.7, A.2 and A.4.
"""

import itertools
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from statistics import NormalDist
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from llmtap.bench.run.session import WORDS, Load
from llmtap.bench.sut.sut import TokenCounting
from llmtap.errors import ConfigError
from llmtap.load.replay.plan import ReplayPlan, take_settings
from llmtap.options.fields import opt
from llmtap.units import NS_PER_S
from llmtap.workload.arrivals import Arrivals, parse_arrivals
from llmtap.workload.ietf import SKEWED
from llmtap.workload.lengths import LogNormal, UniformLengths, mean_of, uniform_draw
from llmtap.workload.plan import (
    TOKENIZER,
    ComposedWorkload,
    ConversationPrompts,
    ConversationScript,
    GeneratedScript,
    PlannedTurn,
    PlannedWorkload,
    RandomIds,
    Sharing,
    WorkloadPlan,
    assemble_plan,
    workload_description,
)
from llmtap.workload.prompts.fitting import ElasticPrompts
from llmtap.workload.prompts.prompt import ElasticSource
from llmtap.workload.prompts.prose import ProseWords
from llmtap.workload.prompts.tokenizer import OWN, load_counter
from llmtap.workload.registry import is_workload, report_of, workload_named
from llmtap.workload.requests import Requests

Tokens = Annotated[int, Meta(ge=1, le=1 << 24)]
_INPUT: Final = LogNormal(mu=5.5, sigma=1.0)
_OUTPUT: Final = LogNormal(mu=4.5, sigma=1.2)
"""Log-normal distributions of Synthetic-Skewed (IETF A.2), without its minimum and maximum."""
_IDS_COUNTED: Final[Mapping[str, Any]] = {"name": "none: token ids", "source": "whole numbers"}
_STANDARD: Final = NormalDist()
_SKEWED_REQUESTS_MAX: Final = 1_000_000
"""Largest number of requests of Synthetic-Skewed that can be sent so that each class has enough of them. The
draft's long class is 1.4 % of all requests, so 500 requests of this class need 36,000 requests."""
_STEPS: Final = 2_000
"""Number of quantiles from which a mean length is computed. The error is below 0.1 tokens for the draft's
ranges."""


class RequestClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A class of requests (IETF 5.6.2)."""

    name: Annotated[str, opt("name in small letters", pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    share: Annotated[float, opt("fraction of all requests; the sum is 1", gt=0, le=1)]
    input: Annotated[tuple[Tokens, Tokens], opt("range of prompt lengths, tokens")]
    output: Annotated[tuple[Tokens, Tokens], opt("range of response lengths, tokens")]


SHORT: Final = RequestClass(name="short", share=0.8, input=(64, 256), output=(32, 128))
LONG: Final = RequestClass(name="long", share=0.2, input=(1_024, 4_096), output=(256, 1_024))


def check_classes(classes: Sequence[RequestClass]) -> None:
    """Raise ConfigError unless there are two or more classes of different names whose shares add up to 1."""
    if len(classes) < 2:
        problem = f"expected at least two classes (IETF draft, section 5.6.2), got {len(classes)}"
        raise ConfigError("classes", problem, "add a class to the list")
    names = [one.name for one in classes]
    if len(set(names)) < len(names):
        problem = f"expected a different name for each class, got {', '.join(names)}"
        raise ConfigError("classes", problem, "rename the classes that have the same name")
    for one in classes:
        for what, (low, high) in (("input", one.input), ("output", one.output)):
            if low > high:
                raise ConfigError(
                    "classes",
                    f"class {one.name}: {what} ends at {high:,}, below its start {low:,}",
                    f"write the smaller number first: {what} = [{high}, {low}]",
                )
    shares = sum(one.share for one in classes)
    if not math.isclose(shares, 1, abs_tol=1e-6):
        problem = f"the shares of the classes add up to {shares:g}, but must add up to 1"
        raise ConfigError("classes", problem, "change the share of a class")


@dataclass(frozen=True, slots=True)
class ClassMix(PlannedWorkload):
    """Workload of requests of several classes, mixed by the shares of the classes (IETF 5.6.2)."""

    classes: tuple[RequestClass, ...]
    content: ProseWords | RandomIds = field(default_factory=ProseWords)
    """Generator of the texts of prompts."""
    name: str = "request-classes"

    def only_class(self, name: str) -> "ClassMix":
        """Return the workload that has only the requests of one class."""
        (one,) = (one for one in self.classes if one.name == name)
        return replace(self, classes=(msgspec.structs.replace(one, share=1.0),))

    def describe(self) -> Mapping[str, object]:
        """Return the description of the workload for the report, with its deviations from 4.3.2.2."""
        counted: dict[str, Any] = {}
        deviations = [
            {
                "section": "4.3.2.2",
                "says": "log-normal lengths up to a cap",
                "here": "the lengths of 5.6.2's classes in their ratio, within whose ranges they are as these"
                " log-normals have them",
            },
        ]
        if isinstance(self.content, RandomIds):
            counted = {"tokenizer": {**TOKENIZER, **_IDS_COUNTED}}
        else:
            here = "random words of a token each: a chat takes text"
            deviations.append({"section": "4.3.2.2", "says": "random token sequences", "here": here})
        return workload_description(
            self.name,
            _lengths_document(_INPUT, "the prompt"),
            _lengths_document(_OUTPUT, "the answer"),
            self.content.describe(),
            about="requests of classes, mixed by share",
            source="IETF draft, 5.6.2, 4.3.2.2 and A.2",
            classes=msgspec.to_builtins(self.classes),
            deviations=deviations,
            **counted,
        )

    def class_names(self, seed: int) -> Iterator[str | None]:
        """Yield the name of each row's class (None: no class), for any number of rows."""
        return (one.name for one in self._draw_classes(seed))

    def mean_tokens(self) -> float:
        """Return the mean number of tokens of a request: prompt and response."""
        return sum(
            one.share * (_mean_length(_INPUT, one.input) + _mean_length(_OUTPUT, one.output))
            for one in self.classes
        )

    def plan(self, count: int, seed: int) -> WorkloadPlan:
        """Return the prompt and response lengths of `count` requests."""
        input_random, output_random = Random(f"{seed}/input"), Random(f"{seed}/output")
        turns = (
            PlannedTurn(
                _length_quantile(_INPUT, one.input, uniform_draw(input_random)),
                _length_quantile(_OUTPUT, one.output, uniform_draw(output_random)),
            )
            for one in self._draw_classes(seed)
        )
        return assemble_plan(turns, count, seed)

    def source(self, plan: WorkloadPlan, seed: int) -> ElasticSource:
        return ComposedWorkload(self.name, _INPUT, _OUTPUT, self.content).source(plan, seed)

    def _draw_classes(self, seed: int) -> Iterator[RequestClass]:
        random, shares = Random(f"{seed}/class"), [one.share for one in self.classes]
        while True:
            yield random.choices(self.classes, shares)[0]


@dataclass(frozen=True, slots=True)
class SkewedClasses(ClassMix):
    """Synthetic-Skewed as in IETF 4.3.2.2, with classes for some of its requests (`skewed_classes`)."""

    def only_class(self, name: str) -> ClassMix:
        return ClassMix(self.classes, self.content).only_class(name)

    def describe(self) -> Mapping[str, object]:
        return {**SKEWED.describe(), "classes": msgspec.to_builtins(self.classes)}

    def class_names(self, seed: int) -> Iterator[str | None]:
        for prompt, response in SKEWED.draw_lengths(seed):
            yield next(
                (
                    one.name
                    for one in self.classes
                    if one.input[0] <= prompt <= one.input[1] and one.output[0] <= response <= one.output[1]
                ),
                None,
            )

    def mean_tokens(self) -> float:
        return mean_of(SKEWED.input) + mean_of(SKEWED.output)

    def plan(self, count: int, seed: int) -> WorkloadPlan:
        return SKEWED.plan(count, seed)

    def source(self, plan: WorkloadPlan, seed: int) -> ElasticSource:
        return SKEWED.prompts(plan.requests, seed)


def skewed_classes(
    classes: Sequence[RequestClass], content: ProseWords | RandomIds, *, per_class: int
) -> SkewedClasses:
    """Return Synthetic-Skewed with these classes; the share of each class is computed from its ranges.

    `content`: prompt texts of the loads that have only one class. `per_class`: number of requests that each
    class needs. Raises ConfigError if this needs more than `_SKEWED_REQUESTS_MAX` requests of the workload.
    """
    assert isinstance(SKEWED.input, LogNormal) and isinstance(SKEWED.output, LogNormal)
    with_shares = []
    for one in classes:
        share = _probability(SKEWED.input, one.input) * _probability(SKEWED.output, one.output)
        if share * _SKEWED_REQUESTS_MAX < per_class:
            raise ConfigError(
                "classes",
                f"class {one.name}: its ranges contain only {share:.2g} of all requests of synthetic-skewed",
                "set wider ranges, or workload = request-classes",
            )
        with_shares.append(msgspec.structs.replace(one, share=share))
    return SkewedClasses(tuple(with_shares), content)


def _probability(lengths: LogNormal, span: tuple[int, int]) -> float:
    """Return the probability that a length, rounded and clipped, is in `span`, including both its ends."""
    low, high = max(span[0], lengths.min), min(span[1], lengths.max)
    if low > high:
        return 0.0
    mu, sigma = lengths.log_parameters
    # The workload clips lengths to its limits, so a span that reaches a limit includes the tail beyond it.
    first = 0.0 if low == lengths.min else _STANDARD.cdf((math.log(low - 0.5) - mu) / sigma)
    last = 1.0 if high == lengths.max else _STANDARD.cdf((math.log(high + 0.5) - mu) / sigma)
    return last - first


def _length_quantile(skewed: LogNormal, span: tuple[int, int], u: float) -> int:
    """Return the quantile `u` of the log-normal distribution, limited to `span` including both its ends."""
    low, high = span
    mu, sigma = skewed.log_parameters
    first, last = (_STANDARD.cdf((math.log(edge) - mu) / sigma) for edge in (low - 0.5, high + 0.5))
    p = min(max(first + u * (last - first), 2**-54), 1 - 2**-53)
    return max(low, min(high, skewed.quantile(p)))


@cache
def _mean_length(skewed: LogNormal, span: tuple[int, int]) -> float:
    """Return the mean of a skewed distribution that is cut to a span, by numeric integration."""
    return math.fsum(_length_quantile(skewed, span, (i + 0.5) / _STEPS) for i in range(_STEPS)) / _STEPS


def _lengths_document(skewed: LogNormal, of: str) -> dict[str, Any]:
    mu, sigma = skewed.log_parameters
    scope = {"of": of, "unit": "tokens", "within": "the class's range"}
    return {"distribution": "lognormal, truncated", "mu": mu, "sigma": sigma, **scope}


def open_mix(
    mix: ClassMix,
    *,
    rate_rps: float,
    seed: int,
    duration_s: float = 0.0,
    per_class: int = 0,
    counting: TokenCounting = WORDS,
) -> Load:
    """Return an open-loop load with Poisson arrivals.

    It lasts at least `duration_s` and has at least `per_class` requests of each class.
    """
    arrivals = parse_arrivals("poisson", rate_rps=rate_rps, seed=seed)
    missing = {one.name: per_class for one in mix.classes}
    offsets = array("q")
    until_ns = round(duration_s * NS_PER_S)
    for name, at_ns in zip(mix.class_names(seed), arrivals, strict=False):
        offsets.append(at_ns)
        if name is not None:
            missing[name] -= 1
        if at_ns >= until_ns and max(missing.values()) <= 0:
            break
    load = closed_mix(mix, slots=1, requests=len(offsets), seed=seed, counting=counting)
    return _as_open_loop(load, offsets, arrivals, rate_rps)


def _as_open_loop(load: Load, offsets: "array[int]", arrivals: Arrivals, rate_rps: float) -> Load:
    """Return the requests of a closed loop as an open loop with these arrival offsets."""
    load.plan.requests.arrival_ns = offsets
    load.plan.about = {**load.plan.about, "arrivals": arrivals.describe()}
    return replace(load, slots=None, rate_rps=rate_rps)


def closed_mix(
    mix: ClassMix, *, slots: int, requests: int, seed: int, counting: TokenCounting = WORDS
) -> Load:
    """Return a closed-loop load with the requests of a mix."""
    class_names = list(itertools.islice(mix.class_names(seed), requests))
    parts = mix.plan(requests, seed)
    about = {"workload": report_of(mix, parts.requests, seed), "arrivals": None, "seed": seed}
    plan = _replay_plan(parts.requests, mix.source(parts, seed), about, counting)
    return Load(plan=plan, slots=slots, class_of=class_names.__getitem__)


def _replay_plan(
    requests: Requests, source: ElasticSource, about: dict[str, Any], counting: TokenCounting
) -> ReplayPlan:
    counter = load_counter(counting.tokenizer or OWN, chat=counting.chat, place="[target] tokenizer")
    prompts = ElasticPrompts(source, requests, counter)
    return ReplayPlan(
        requests,
        prompts,
        {**about, "requests": len(requests)},
        [],
        counter.tokenizer.decode,
        settings=take_settings(about["workload"]),
    )


PRIMER_TOKENS: Final = 16
"""Number of tokens after the prefix in a request that is only sent to fill the cache."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """A workload that shares prefixes, with the tokenizer that counts its prompts."""

    workload: ComposedWorkload
    counting: TokenCounting = WORDS
    """How the tokens of prompts are counted."""
    output_tokens: int | None = None
    """Length of all responses; None: the lengths of the workload."""

    @property
    def sharing(self) -> Sharing:
        assert self.workload.sharing is not None
        return self.workload.sharing

    def open_load(self, count: int, seed: int, texts: int, rate_rps: float) -> Load:
        arrivals = parse_arrivals("poisson", rate_rps=rate_rps, seed=seed)
        offsets = array("q", itertools.islice(arrivals, count))
        return _as_open_loop(self.closed_load(count, seed, texts, 1), offsets, arrivals, rate_rps)

    def closed_load(self, count: int, seed: int, texts: int, slots: int) -> Load:
        parts = self._workload_plan(count, seed)
        return Load(plan=self._make_plan(parts, self._script(parts, texts), seed, texts), slots=slots)

    def primer(self, seed: int, texts: int) -> Load:
        """Return a load that fills a cache with the prefixes of these seeds: it sends each of them once.

        The message after a prefix differs from those of the measured loads. Each response has one token.
        """
        lengths = self.sharing.lengths(seed)
        n = len(lengths)
        requests = Requests(
            array("q", bytes(8 * n)),
            array("q", [tokens + PRIMER_TOKENS for tokens in lengths]),
            array("q", [1] * n),
        )
        parts = WorkloadPlan(
            lengths=lengths,
            requests=requests,
            messages=array("q", [PRIMER_TOKENS] * n),
            contexts=array("q", range(n)),
            pair_numbers=array("q", [0] * n),
        )
        return Load(plan=self._make_plan(parts, _Primer(self._script(parts, texts)), seed, texts), slots=1)

    def row_prefixes(self, count: int, seed: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the index of each row's prefix (or NO_CONTEXT), and the number of tokens of each prefix."""
        parts = self._workload_plan(count, seed)
        return parts.contexts, parts.lengths

    def _workload_plan(self, count: int, seed: int) -> WorkloadPlan:
        parts = self.workload.plan(count, seed)
        if self.output_tokens is not None:
            parts.requests.output = array("q", [self.output_tokens]) * len(parts.requests)
        return parts

    def _script(self, parts: WorkloadPlan, texts: int) -> GeneratedScript:
        """Return the script of all texts."""
        content = self.workload.content
        assert not isinstance(content, RandomIds)
        return GeneratedScript(content, parts, texts)

    def _make_plan(
        self, parts: WorkloadPlan, script: ConversationScript, seed: int, texts: int
    ) -> ReplayPlan:
        about = {
            "workload": report_of(self.workload, parts.requests, seed),
            "arrivals": None,
            "seed": seed,
            "texts": texts,
        }
        return _replay_plan(parts.requests, ConversationPrompts(parts, script), about, self.counting)


@dataclass(frozen=True, slots=True)
class _Primer(ConversationScript):
    """Script with the prefixes of `script` but other messages, so that only prefixes get into the cache."""

    script: GeneratedScript

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
    counting: TokenCounting = WORDS,
    fraction: float | None = None,
    tokens: tuple[int, int] | None = None,
    contexts: int | None = None,
    output_tokens: int | None = None,
) -> Prefixes:
    """Return a workload that shares prefixes. Arguments that are not None replace its own settings.

    `fraction`: share of requests with a prefix. `tokens`: range of prefix lengths. `contexts`: number of
    prefixes. Raises ConfigError if the workload shares no prefixes, or has fixed texts or conversations.
    """
    if not is_workload(name):
        raise ConfigError(
            "workload",
            f"there is no workload {name!r}",
            "expected a name such as code-completion, or a FILE.toml",
        )
    workload = workload_named(name, "workload")
    if not isinstance(workload, ComposedWorkload) or isinstance(workload.content, RandomIds):
        raise ConfigError(
            "workload",
            f"the prompts of {name!r} are fixed, so a cache could contain them before the test",
            "expected code-completion, conversation, or a FILE.toml with generated texts",
        )
    if workload.conversations is not None:
        raise ConfigError(
            "workload",
            f"{name!r} has conversations, whose requests repeat earlier turns: a cache contains these",
            "expected a workload without conversations",
        )
    sharing = workload.sharing
    if sharing is None and tokens is None:
        raise ConfigError(
            "prefix_tokens",
            f"is not given, and the requests of {name} share no prefix",
            "such as prefix_tokens = [512, 1024]",
        )
    if sharing is None:
        assert tokens is not None
        sharing = Sharing(fraction=1.0, tokens=UniformLengths(min=tokens[0], max=tokens[1]))
    changed = Sharing(
        fraction=sharing.fraction if fraction is None else fraction,
        tokens=sharing.tokens if tokens is None else UniformLengths(min=tokens[0], max=tokens[1]),
        contexts=contexts or sharing.contexts,
        zipf=sharing.zipf,
    )
    return Prefixes(replace(workload, sharing=changed), counting, output_tokens)
