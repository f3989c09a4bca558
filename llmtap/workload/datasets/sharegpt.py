"""ShareGPT-shaped files: what people asked and what a model answered (seed 000, A.3.1).

The draft's preprocessing keeps conversations with one assistant turn at least. A request is what was asked
before the first answer, as in vLLM's benchmark; or each of a conversation's answers is one, and has the turns
before it as its history. The reader is that of `llmtap convert`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from llmtap.errors import ConfigError
from llmtap.traces.bodies import messages_of, read_object
from llmtap.traces.formats import sharegpt
from llmtap.workload.datasets.recorded import Pair, file_described, reading
from llmtap.workload.prompts.prose import prose

__all__ = ["CONTENT", "ShareGpt", "read_sharegpt"]

CONTENT: Final = {"kind": "data", "domain": "conversation", "language": "the data's"}
_VERSION: Final = "the file's sha256; A.3.1 asks for vicuna_cleaned of 2023-04-12"


@dataclass(frozen=True, slots=True)
class ShareGpt:
    """Conversations."""

    pairs: list[Pair]
    items: Sequence[range]
    about: Mapping[str, Any] = field(default_factory=dict)

    def pair(self, number: int) -> Pair:
        return self.pairs[number]

    def context(self, number: int, tokens: int, seed: int) -> str:
        """A system prompt: the data has none that all share."""
        return prose(tokens, f"{seed}/context/{number}")

    def describe(self) -> Mapping[str, Any]:
        return self.about


def read_sharegpt(path: Path, place: str, *, whole: bool = False) -> ShareGpt:
    """First questions, or `whole` conversations. Raises ConfigError of the place."""
    pairs: list[Pair] = []
    items: list[range] = []
    with reading(path, place) as file:
        source = sharegpt.FORMAT.read(file)
        empty = 0
        # A conversation's rows come together, its first one as turn 0.
        for turn, asked, answer in _rows(source.batches):
            if turn == 0:
                items.append(range(len(pairs), len(pairs)))
            if turn and not whole:
                continue
            if not asked.strip() or not answer.strip():
                empty += 1
                continue
            pairs.append((asked, answer))
            items[-1] = range(items[-1].start, len(pairs))
        found = len(items)
        items = [item for item in items if item]
    if not items:
        raise ConfigError(place, f"{path} has no conversation with a question and an answer")
    notes = [*source.notes, *([f"{empty:,} turns have no text, and were left out"] if empty else [])]
    about = {
        **file_described(path),
        "dataset": "ShareGPT-shaped",
        "version": _VERSION,
        "preprocessing": "conversations with one assistant turn or more; "
        + (
            "each answer is a request, with the turns before it as history"
            if whole
            else "what was asked before the first answer is the prompt, that answer's length the output"
        )
        + "; texts untouched",
        "conversations": found,
        "kept": len(items),
        "notes": notes,
    }
    return ShareGpt(pairs, items, about)


def _rows(batches: Iterator[Any]) -> Iterator[tuple[int, str, str]]:
    """Turn, what was asked anew, and the answer."""
    said = 0
    for batch in batches:
        columns = (batch.column(name).to_pylist() for name in ("turn", "request_body", "response_text"))
        for turn, body, answer in zip(*columns, strict=True):
            messages = messages_of(read_object(body, "conversation")) or []
            new = messages if turn == 0 else messages[said:]
            said = len(messages) + 1
            yield turn, "\n\n".join(text for role, text in new if role != "assistant"), answer
