"""How many tokens a prompt is for who serves it: by a tokenizer, or by what the server said of others.

A counter of plain text leaves out what a chat template puts around the messages; `chat_template.py` has the
one that renders it, `calibration.py` the one that was fitted to a server's `usage`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from llmtap.workload.prompts.chat_template import ChatTemplate
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.text import Words
from llmtap.workload.prompts.tokenizer import Tokenizer, fitting_words, open_tokenizer

__all__ = [
    "CHAT_TEMPLATE", "MODEL", "REFERENCE", "ChatCounter", "TextCounter", "TokenCounter", "as_text",
    "load_counter",
]  # fmt: skip

CHAT_TEMPLATE: Final = "chat template"
MODEL: Final = "model tokenizer"
REFERENCE: Final = "reference tokenizer"
_SAMPLE: Final = bytes(range(0, 256, 16))


class TokenCounter(Protocol):
    """Counts whole prompts."""

    @property
    def way(self) -> str:
        """How it counts, for whoever reads the figures."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """By which it counts texts."""
        ...

    @property
    def words(self) -> Words:
        """What texts are best made of, for it to count right."""
        ...

    def count(self, prompts: Sequence[Prompt]) -> list[int]: ...

    def overhead(self, like: Prompt) -> tuple[int, int]:
        """Tokens before and behind the user's text in prompts with this one's system prompt and history."""
        ...


def as_text(prompt: Prompt) -> str:
    """A prompt without roles, as a completion gets it and a reference tokenizer counts it."""
    said = (prompt.system, *(text for _, text in prompt.history), prompt.text)
    return "\n\n".join(text for text in said if text)


def load_counter(text: str, *, chat: bool, place: str) -> TokenCounter:
    """The counter of `tiktoken:NAME`, `sim`, a tokenizer.json or a model's folder.

    Of a folder the chat template is taken where the prompts are for a chat endpoint, and else the special
    tokens that completions get; a file or a name is a reference, by which plain text is counted. Raises
    ConfigError that names `place`.
    """
    tokenizer = open_tokenizer(text, place)
    if not Path(text).is_dir():
        return TextCounter(tokenizer)
    if chat:
        return ChatCounter(tokenizer, ChatTemplate.load(Path(text), place))
    return TextCounter(tokenizer, way=MODEL, specials=tokenizer.specials)


class TextCounter:
    """Counts plain text, and so many special tokens with it."""

    def __init__(self, tokenizer: Tokenizer, *, way: str = REFERENCE, specials: int = 0) -> None:
        self.way = way
        self.tokenizer = tokenizer
        self._specials = specials
        self.words = fitting_words(tokenizer)

    def count(self, prompts: Sequence[Prompt]) -> list[int]:
        counts = self.tokenizer.counts([as_text(prompt) for prompt in prompts])
        return [len(p.ids) or n + self._specials for p, n in zip(prompts, counts, strict=True)]

    def overhead(self, like: Prompt) -> tuple[int, int]:
        if not like.system and not like.history:
            return self._specials, 0
        sample = self.words.text(_SAMPLE)
        with_it = Prompt(text=sample, system=like.system, history=like.history)
        both, alone = self.tokenizer.counts([as_text(with_it), sample])
        return self._specials + both - alone, 0


class ChatCounter:
    """Counts what a chat template makes of the messages: special tokens, roles, and where the answer begins.

    Source: seed 003, "Prompt Construction": the overhead is measured with a sample message.
    """

    way = CHAT_TEMPLATE

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.words = fitting_words(tokenizer)
        self._template = template

    def count(self, prompts: Sequence[Prompt]) -> list[int]:
        counts = self.tokenizer.counts([self._template.render(prompt) for prompt in prompts])
        return [len(p.ids) or n for p, n in zip(prompts, counts, strict=True)]

    def overhead(self, like: Prompt) -> tuple[int, int]:
        sample = self.words.text(_SAMPLE)
        rendered = self._template.render(Prompt(text=sample, system=like.system, history=like.history))
        head, found, _ = rendered.rpartition(sample)
        if not found:
            whole, text = self.tokenizer.counts([rendered, sample])
            return max(0, whole - text), 0
        # What stands before decides how the text's first word is cut, and never what stands behind it.
        whole, until, before = self.tokenizer.counts([rendered, head + sample, head])
        return before, whole - until
