"""Loads that share prefixes, which can be written anew: the same lengths, arrivals and sharing in other
words.

A prefix cache remembers what it was asked, so who measures it twice needs prefixes that it has not seen, and
the second time those that it has and nothing behind them. So here two seeds make a load: one its lengths,
arrivals and who shares what, the other (`texts`) its words. Loads of one first seed are the same work for a
server that remembers nothing.

Source: IETF seed 000, 4.3.2.4, A.4 and 5.7.
"""

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from llmtap.bench.run.loads import Load
from llmtap.errors import ConfigError
from llmtap.load.replay.plan import ReplayPlan
from llmtap.workload.arrivals import parse_arrivals
from llmtap.workload.composed import Composed, RandomIds, Written
from llmtap.workload.lengths import UniformLengths
from llmtap.workload.plan import ConversationScript, Sharing, Speaker
from llmtap.workload.plan import WorkloadPlan as Parts
from llmtap.workload.prompts.fitting import ElasticPrompts
from llmtap.workload.prompts.tokenizer import OWN, load_counter
from llmtap.workload.registry import is_workload, report_of, workload_named

__all__ = ["Prefixes", "prefixes_of"]

PRIMER_TOKENS: Final = 16
"""Of the message behind a prefix that is sent only so that it is known; its answer is of one token."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """A workload that shares prefixes, and how its prompts are counted."""

    workload: Composed
    tokenizer: str | None = None
    chat: bool = True
    output_tokens: int | None = None
    """Of every answer, in place of the workload's own lengths."""

    @property
    def sharing(self) -> Sharing:
        assert self.workload.sharing is not None
        return self.workload.sharing

    def open(self, count: int, seed: int, texts: int, rate_rps: float) -> Load:
        """So many requests of Poisson arrivals."""
        arrivals = parse_arrivals("poisson", rate_rps=rate_rps, seed=seed)
        parts = self._parts(count, seed)
        parts.requests.arrival_ns = array("q", itertools.islice(arrivals, count))
        plan = self._plan(parts, self._script(parts, texts), seed, texts, arrivals.describe())
        return Load(plan=plan, rate_rps=rate_rps)

    def closed(self, count: int, seed: int, texts: int, slots: int) -> Load:
        """So many requests in a closed loop."""
        parts = self._parts(count, seed)
        plan = self._plan(parts, self._script(parts, texts), seed, texts, None)
        return Load(plan=plan, closed=slots)

    def primer(self, seed: int, texts: int) -> Load:
        """Each prefix of a load of these seeds once, one after the other, behind it a message of no other
        load."""
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
        """By row, which prefix it shares (NO_CONTEXT: none), and the tokens of each prefix."""
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
    """The contexts of a script, and other messages: what is primed is the prefix, not a request."""

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
    """A workload by name, with another sharing where that is given.

    Raises ConfigError, which names the parameter: of a workload that shares nothing, or whose texts are not
    llmtap's own and so cannot be written anew.
    """
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
