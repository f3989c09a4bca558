"""TGI's own `/generate_stream` and `/generate`: one token an event, and no end marker.

The last event repeats the whole text, which is metadata, and counts the tokens, the special one at the end
included. A special token is generated and is no text. `index` counts messages of the server, not tokens.

Source: huggingface/text-generation-inference router/src/server.rs, lib.rs;
shared/dialects/dialects.md section 4.
"""

from typing import Any

import msgspec

from llmtap.protocol.delta import Delta, EventClass, TokenSource, UsageCounts
from llmtap.protocol.dialects.native_shapes import (
    FIRST,
    Fields,
    ObjectReader,
    add_counts,
    counted,
    failure_in,
    figures,
    gather,
    piece,
    text_of,
)
from llmtap.protocol.dialects.openai_shapes import read_json, sum_counts, unknown
from llmtap.protocol.sse import SseEvent

__all__ = ["Tgi"]


class _Event(msgspec.Struct, gc=False):
    token: Any = None
    details: Any = None
    generated_text: Any = None
    error: Any = None
    error_type: Any = None


class Tgi(ObjectReader):
    """Reads one answer."""

    name = "tgi.native"
    fields = Fields(_Event)

    __slots__ = ()

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        if isinstance(value.get("token"), dict) or "generated_text" in value:
            return 3 if "generated_text" in value and "details" in value else 2
        named = "error_type" in value or path.endswith(("/generate_stream", "/generate"))
        return int("error" in value and named)

    def _read(self, said: _Event, data: bytes, event: SseEvent) -> Delta:
        if said.error:
            return _read_failure(data, said, event.event)
        token = said.token
        if isinstance(token, dict):
            text = "" if token.get("special") is True else text_of(token.get("text"))
            if text:
                delta = piece(EventClass.CONTENT, text)
            else:
                # Generated all the same: a special token, or one that ends no character yet.
                delta = Delta(EventClass.METADATA, output=True, choices=FIRST)
            delta.tokens, delta.token_source = 1, TokenSource.TOKEN_IDS
        elif said.details is None and said.generated_text is None:
            return unknown(event.event)
        else:
            delta = Delta(EventClass.METADATA)
        if isinstance(said.details, dict):
            _add_details(delta, said.details)
        return delta

    def read_body(self, body: bytes) -> Delta:
        answers = self.fields.answers(read_json(body))
        if not answers:
            return unknown()
        if answers[0].error:
            return _read_failure(body, answers[0], None)
        texts = [text_of(a.generated_text) for a in answers]
        choices = tuple(i for i, text in enumerate(texts) if text)
        delta = gather(((EventClass.CONTENT, t) for t in texts if t), choices=choices)
        delta.parsed = any(a.generated_text is not None for a in answers)
        counts: list[UsageCounts] = []
        for details in (a.details for a in answers if isinstance(a.details, dict)):
            delta.also = ()
            _add_details(delta, details)
            if delta.counts is not None:
                counts.append(delta.counts)
        if counts:
            delta.counts = sum_counts(counts)
        return delta


def _add_details(delta: Delta, details: dict[str, Any]) -> None:
    """Add the end of an answer: its reason, and the number of tokens."""
    delta.finish_reason = text_of(details.get("finish_reason")) or None
    of_input = details.get("input_length")
    if of_input is None and isinstance(prefill := details.get("prefill"), list) and prefill:
        of_input = len(prefill)
    add_counts(delta, counted(of_input, details.get("generated_tokens")), figures(details))


def _read_failure(data: bytes, said: _Event, name: bytes | None) -> Delta:
    """Read an `error`, which is a text; `error_type` is its kind."""
    delta = failure_in(read_json(data), name)
    if isinstance(said.error_type, str) and delta.error_type == "error":
        delta.error_type = said.error_type
    return delta
