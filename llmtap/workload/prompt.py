"""What a request says, before it is anybody's JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from llmtap.workload.requests import Requests

__all__ = ["Prompt", "PromptSource", "Workload"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of `text` and `ids`, and what stands before it."""

    text: str = ""
    """The user's message."""
    ids: Sequence[int] = ()
    """The prompt as tokens, where a workload prescribes them (IETF seed 000, A.1.4)."""
    system: str = ""
    """The system prompt; most shared prefixes are one."""
    history: tuple[tuple[str, str], ...] = ()
    """Earlier turns of the conversation: role and text, from the first."""


class PromptSource(Protocol):
    """Makes prompts; the same for a row always, in whatever order it is asked."""

    def prompt(self, row: int) -> Prompt:
        """The prompt of a row, of as many tokens as its `Requests.input` says by the tokenizer in use."""
        ...


class Workload(Protocol):
    """Requests as somebody described them: lengths, sharing, conversations. Arrivals are told apart."""

    @property
    def name(self) -> str: ...

    def describe(self) -> Mapping[str, object]:
        """All that makes it again, as JSON: distributions, caps, sharing, sources with their versions."""
        ...

    def requests(self, count: int, seed: int) -> Requests:
        """So many of them; `arrival_ns` is all 0."""
        ...

    def prompts(self, requests: Requests, seed: int) -> PromptSource:
        """What those requests say."""
        ...
