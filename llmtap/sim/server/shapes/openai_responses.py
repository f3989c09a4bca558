"""OpenAI's Responses: named events that count up, the whole answer again at the end, and no end marker.

Source: openai/openai-python types/responses; shared/dialects/dialects.md section 3.3.
"""

from typing import Any

import msgspec

from llmtap.sim.server.shapes.shape import CREATED, Answer, SimulatedRequest, decode, text_of

__all__ = ["OpenAIResponsesShape", "read"]


class _Request(msgspec.Struct):
    input: str | list[Any]
    model: str = "sim"
    instructions: str | None = None
    stream: bool | None = False
    max_output_tokens: int | None = None
    min_tokens: int | None = 0
    ignore_eos: bool | None = False
    seed: int | None = None


def read(body: bytes) -> SimulatedRequest:
    """What a request asks for. Raises BadRequest."""
    r: _Request = decode(body, _Request)
    said = [r.instructions or ""]
    said += [r.input] if isinstance(r.input, str) else map(_said, r.input)
    return SimulatedRequest(
        model=r.model, stream=bool(r.stream), prompts=("\n".join(filter(None, said)),),
        max_tokens=r.max_output_tokens, min_tokens=r.min_tokens or 0, ignore_eos=bool(r.ignore_eos),
        seed=r.seed, include_usage=True,
    )  # fmt: skip


def _said(item: Any) -> str:
    return text_of(item.get("content")) if isinstance(item, dict) else ""


class OpenAIResponsesShape:
    """Writes one answer, which has one choice."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer) -> None:
        self.id = f"resp_sim{answer.number}"
        self._item_id = f"msg_sim{answer.number}"
        self._answer = answer
        self._choice = answer.choices[0]
        self._sequence = 0

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = msgspec.json.encode({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + event + b"\n\n"

    def _response(self, status: str, reason: str | None = None) -> dict[str, Any]:
        ended = status != "in_progress"
        sent = self._answer.sent[0]
        usage = {
            "input_tokens": self._answer.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": self._answer.cached_tokens or 0, "cache_write_tokens": 0,
            },
            "output_tokens": sent, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._answer.prompt_tokens + sent,
        }  # fmt: skip
        return {
            "id": self.id, "object": "response", "created_at": CREATED, "status": status, "error": None,
            "incomplete_details": {"reason": reason} if reason else None, "model": self._answer.asked.model,
            "output": [self._item(status)] if ended and sent else [], "parallel_tool_calls": True,
            "tool_choice": "auto", "tools": [], "usage": usage if ended else None,
        }  # fmt: skip

    def _item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part(self._said())]
        return {
            "id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content,
        }  # fmt: skip

    def _part(self, text: str) -> dict[str, Any]:
        if self._choice.refused:
            return {"type": "refusal", "refusal": text}
        return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}

    def _said(self) -> str:
        return "".join(self._choice.pieces[: self._answer.sent[0]])

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _how(self) -> tuple[str, str | None]:
        """Status, and why it is incomplete."""
        reasons = {"stop": None, "length": "max_output_tokens", "content_filter": "content_filter"}
        reason = reasons[self._choice.finish]
        return ("incomplete" if reason else "completed"), reason

    def opening(self) -> bytes:
        begun = self._event("response.created", response=self._response("in_progress"))
        begun += self._event("response.in_progress", response=self._response("in_progress"))
        if not self._choice.pieces:
            return begun
        begun += self._event("response.output_item.added", output_index=0, item=self._item("in_progress"))
        return begun + self._event("response.content_part.added", **self._place, part=self._part(""))

    def chunk(self, index: int, first: int, last: int, final: bool) -> bytes:
        self._answer.sent[index] = last
        events = b""
        refused = self._choice.refused
        if last > first:
            text = "".join(self._choice.pieces[first:last])
            kind = "response.refusal.delta" if refused else "response.output_text.delta"
            more: dict[str, Any] = {} if refused else {"logprobs": []}
            events = self._event(kind, **self._place, delta=text, **more)
        if final and self._answer.sent[index]:
            status, _ = self._how()
            said = self._said()
            if refused:
                events += self._event("response.refusal.done", **self._place, refusal=said)
            else:
                events += self._event("response.output_text.done", **self._place, text=said, logprobs=[])
            events += self._event("response.content_part.done", **self._place, part=self._part(said))
            events += self._event("response.output_item.done", output_index=0, item=self._item(status))
        return events

    def ending(self) -> bytes:
        status, reason = self._how()
        return self._event(f"response.{status}", response=self._response(status, reason))

    def keepalive(self) -> bytes:
        return b": keep-alive\n\n"

    def failure(self) -> bytes:
        error = {
            "type": "server_error",
            "code": "server_error",
            "message": "the engine broke down",
            "param": None,
        }
        return self._event("error", error=error)

    def whole(self) -> dict[str, Any]:
        self._answer.sent[0] = len(self._choice.pieces)
        return self._response(*self._how())
