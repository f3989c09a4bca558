"""A request as one prompt, for tools that take no messages.

A body with one message gives its text. Of several the texts are joined by empty lines, the earlier turns
first: what two conversations share at their beginning they still share, and the length stays about right; who
said what is lost. Pictures, sounds and tools are lost, too.
"""

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from llmtap.traces.bodies import messages_of, read_object
from llmtap.traces.format import FormatError, TraceWritten

__all__ = ["JOINED", "PromptTexts", "prompt_body"]

JOINED: Final = "one text: of several messages those of all, joined by empty lines, without roles"
"""Why a body is not kept whole."""


def prompt_body(prompt: str) -> dict[str, Any]:
    """The request that such a tool makes of a prompt: one message of a user's."""
    return {"messages": [{"role": "user", "content": prompt}]}


class PromptTexts:
    """Makes the prompts of one file, and counts."""

    __slots__ = ("joined", "reduced", "silent")

    def __init__(self) -> None:
        self.joined = 0
        """Prompts made of several messages."""
        self.silent = 0
        """Bodies without any text."""
        self.reduced = 0
        """Bodies with more than text: tools, pictures."""

    def of(self, body: str) -> str | None:
        """The prompt; None where the body has no text, which is counted."""
        try:
            request = read_object(body, "request")
        except FormatError:
            request = {}
        messages = messages_of(request)
        prompt = "\n\n".join(text for _, text in messages or () if text)
        if not prompt:
            self.silent += 1
            return None
        assert messages is not None
        self.joined += len(messages) > 1
        self.reduced += bool(request.get("tools")) or _has_media(request)
        return prompt

    def of_all(self, batch: pa.RecordBatch, written: TraceWritten) -> list[str | None]:
        """Those of a batch; rows without one are not counted as written."""
        prompts = [self.of(body) for body in batch.column("request_body").to_pylist()]
        if None in prompts:
            written.count(batch.filter(pa.array([prompt is None for prompt in prompts])), sign=-1)
        return prompts

    def report(self, written: TraceWritten) -> None:
        """Adds the counts."""
        if self.silent:
            written.drop("no text in the body", self.silent)
            written.rows -= self.silent
        if self.joined:
            written.notes.append(f"{self.joined:,} prompts are several messages, joined by empty lines")
        if self.reduced:
            written.notes.append(f"{self.reduced:,} prompts lost tools, or parts that are not text")


def _has_media(request: Mapping[str, Any]) -> bool:
    messages = request.get("messages")
    if not isinstance(messages, list):
        return False
    contents = (m.get("content") for m in messages if isinstance(m, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, dict) and part.get("type") not in ("text", "input_text") for part in parts)
