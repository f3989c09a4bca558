"""Anthropic's Messages: blocks that start, grow and stop; `ping` for silence; the input counted at the start.

Source: anthropics/anthropic-sdk-python types; shared/dialects/dialects.md section 4.
"""

from typing import Any

import msgspec

from llmtap.sim.server.shapes.shape import Answer, Choice, SimulatedRequest, decode, lines_of, text_of

__all__ = ["AnthropicShape", "read"]


class _Message(msgspec.Struct):
    role: str = "user"
    content: Any = None


class _Request(msgspec.Struct):
    messages: list[_Message]
    model: str = "sim"
    system: Any = None
    stream: bool | None = False
    max_tokens: int | None = None
    min_tokens: int | None = 0
    ignore_eos: bool | None = False
    stop_sequences: list[str] | None = None
    seed: int | None = None


def read(body: bytes) -> SimulatedRequest:
    """What a request asks for. Raises BadRequest."""
    r: _Request = decode(body, _Request)
    said = [text_of(r.system), *(text_of(m.content) for m in r.messages)]
    return SimulatedRequest(
        model=r.model, stream=bool(r.stream), prompts=("\n".join(filter(None, said)),),
        max_tokens=r.max_tokens, min_tokens=r.min_tokens or 0, ignore_eos=bool(r.ignore_eos),
        stop=lines_of(r.stop_sequences), seed=r.seed, include_usage=True,
    )  # fmt: skip


class AnthropicShape:
    """Writes one answer, which has one choice."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer) -> None:
        self.id = f"msg_sim{answer.number}"
        self._answer = answer
        self._choice = answer.choices[0]

    def _event(self, kind: str, **fields: Any) -> bytes:
        return (
            b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode({"type": kind, **fields}) + b"\n\n"
        )

    def _message(self, content: list[Any], how: dict[str, Any], output_tokens: int) -> dict[str, Any]:
        usage = {
            "input_tokens": self._answer.prompt_tokens, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0, "output_tokens": output_tokens,
        }  # fmt: skip
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self._answer.asked.model,
            "content": content, **how, "usage": usage,
        }  # fmt: skip

    def opening(self) -> bytes:
        nothing = {"stop_reason": None, "stop_sequence": None}
        begun = self._event(
            "message_start", message=self._message([], nothing, min(1, len(self._choice.pieces)))
        )
        if not self._choice.pieces:
            return begun
        block = {"type": "text", "text": ""}
        return begun + self._event("content_block_start", index=0, content_block=block)

    def chunk(self, index: int, first: int, last: int, final: bool) -> bytes:
        self._answer.sent[index] = last
        events = b""
        if last > first:
            delta = {"type": "text_delta", "text": "".join(self._choice.pieces[first:last])}
            events = self._event("content_block_delta", index=0, delta=delta)
        if final and self._choice.pieces:
            events += self._event("content_block_stop", index=0)
        return events

    def ending(self) -> bytes:
        usage = {"output_tokens": self._answer.sent[0]}
        return self._event("message_delta", delta=_how(self._choice), usage=usage) + self._event(
            "message_stop"
        )

    def keepalive(self) -> bytes:
        return self._event("ping")

    def failure(self) -> bytes:
        return self._event("error", error={"type": "api_error", "message": "the engine broke down"})

    def whole(self) -> dict[str, Any]:
        content = [{"type": "text", "text": self._choice.text}] if self._choice.pieces else []
        return self._message(content, _how(self._choice), len(self._choice.pieces))


def _how(choice: Choice) -> dict[str, Any]:
    reason = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal"}[choice.finish]
    if choice.refused:
        reason = "refusal"
    if choice.stop_text is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": choice.stop_text}
