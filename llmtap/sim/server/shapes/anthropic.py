"""Anthropic's Messages API on the simulated server: read requests, write streams, whole answers and errors.

`read` returns a `SimulatedRequest`; `AnthropicShape` returns the bytes of an answer. A stream has content
blocks that start, grow and stop; `ping` events are the keep-alive; the input tokens are counted at the start.

Source: anthropics/anthropic-sdk-python types; docs/dialects.md.
"""

from typing import Any

from llmtap.sim.server.shapes import shape


class _Request(shape.CommonRequest, kw_only=True):
    messages: list[shape.Message]
    system: Any = None
    stop_sequences: list[str] | None = None


def read(body: bytes) -> shape.SimulatedRequest:
    """Read a request. Raises BadRequest."""
    r: _Request = shape.decode(body, _Request)
    said = [shape.text_of(r.system), *(shape.text_of(m.content) for m in r.messages)]
    return r.asked("\n".join(filter(None, said)), stop=shape.lines_of(r.stop_sequences))


def anthropic_error(status: int, code: str, message: str) -> dict[str, Any]:
    kinds = {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}
    kind = kinds.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class AnthropicShape(shape.Shape):
    def __init__(self, answer: shape.Answer) -> None:
        super().__init__(answer, "msg_sim")

    def _event(self, kind: str, **fields: Any) -> bytes:
        return shape.sse({"type": kind, **fields}, kind)

    def _message(self, content: list[Any], how: dict[str, Any], output_tokens: int) -> dict[str, Any]:
        usage = {
            "input_tokens": self._answer.prompt_tokens, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0, "output_tokens": output_tokens,
        }  # fmt: skip
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self._asked.model,
            "content": content, **how, "usage": usage,
        }  # fmt: skip

    def _how(self) -> dict[str, Any]:
        choice = self._choice
        reason = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal"}[choice.finish]
        if choice.refused:
            reason = "refusal"
        if choice.stop_text is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": choice.stop_text}

    def opening(self) -> bytes:
        nothing = {"stop_reason": None, "stop_sequence": None}
        message = self._message([], nothing, min(1, len(self._choice.pieces)))
        begun = self._event("message_start", message=message)
        if not self._choice.pieces:
            return begun
        return begun + self._event("content_block_start", index=0, content_block={"type": "text", "text": ""})

    def chunk(self, index: int, first: int, last: int, final: bool) -> bytes:
        text = self._take(index, first, last)
        events = b""
        if last > first:
            delta = {"type": "text_delta", "text": text}
            events = self._event("content_block_delta", index=0, delta=delta)
        if final and self._choice.pieces:
            events += self._event("content_block_stop", index=0)
        return events

    def ending(self) -> bytes:
        usage = {"output_tokens": self._answer.sent[0]}
        return self._event("message_delta", delta=self._how(), usage=usage) + self._event("message_stop")

    def keepalive(self) -> bytes:
        return self._event("ping")

    def failure(self) -> bytes:
        return self._event("error", error={"type": "api_error", "message": shape.BROKEN})

    def whole(self) -> dict[str, Any]:
        content = [{"type": "text", "text": self._choice.text}] if self._choice.pieces else []
        return self._message(content, self._how(), len(self._choice.pieces))
