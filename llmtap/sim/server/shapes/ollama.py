"""Ollama's own chat and generate: a line of JSON for each piece, the last with the counts and times in ns.

It streams unless told not to. There is no word for silence, and none for a filter: what was refused just
stops.

Source: ollama/ollama docs/api.md; shared/dialects/dialects.md section 4.
"""

from typing import Any

import msgspec

from llmtap.sim.server.shapes.shape import Answer, SimulatedRequest, decode, lines_of, text_of

__all__ = ["OllamaChat", "OllamaGenerate", "read_chat", "read_generate"]

CREATED_AT = "2023-11-14T22:13:20Z"


class _Message(msgspec.Struct):
    role: str = "user"
    content: Any = None


class _Options(msgspec.Struct):
    num_predict: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    min_tokens: int | None = 0
    ignore_eos: bool | None = False


class _Request(msgspec.Struct):
    model: str = "sim"
    messages: list[_Message] | None = None
    prompt: str | None = None
    system: str | None = None
    stream: bool | None = True
    options: _Options | None = None


def read_chat(body: bytes) -> SimulatedRequest:
    """What a request to `/api/chat` asks for. Raises BadRequest."""
    r: _Request = decode(body, _Request)
    return _asked(r, "\n".join(text_of(m.content) for m in r.messages or ()))


def read_generate(body: bytes) -> SimulatedRequest:
    """What a request to `/api/generate` asks for. Raises BadRequest."""
    r: _Request = decode(body, _Request)
    return _asked(r, "\n".join(filter(None, (r.system, r.prompt))))


def _asked(r: _Request, prompt: str) -> SimulatedRequest:
    o = r.options or _Options()
    wanted = o.num_predict if o.num_predict is not None and o.num_predict >= 0 else None  # -1: no limit
    return SimulatedRequest(
        model=r.model, stream=r.stream is not False, prompts=(prompt,), max_tokens=wanted,
        min_tokens=o.min_tokens or 0, ignore_eos=bool(o.ignore_eos), stop=lines_of(o.stop), seed=o.seed,
        include_usage=True,
    )  # fmt: skip


class OllamaChat:
    """Writes one answer, which has one choice."""

    media_type = "application/x-ndjson"

    def __init__(self, answer: Answer) -> None:
        self.id = f"ollama-sim{answer.number}"
        self._answer = answer
        self._choice = answer.choices[0]

    def _said(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _line(self, text: str, **more: Any) -> dict[str, Any]:
        head = {"model": self._answer.asked.model, "created_at": CREATED_AT, **self._said(text)}
        return {**head, "done": bool(more), **more}

    def _how(self) -> dict[str, Any]:
        reason = "length" if self._choice.finish == "length" else "stop"
        a = self._answer
        return {
            "done_reason": reason, "total_duration": a.prompt_ns + a.output_ns, "load_duration": 0,
            "prompt_eval_count": a.prompt_tokens, "prompt_eval_duration": a.prompt_ns,
            "eval_count": a.sent[0], "eval_duration": a.output_ns,
        }  # fmt: skip

    def opening(self) -> bytes:
        return b""

    def chunk(self, index: int, first: int, last: int, final: bool) -> bytes:
        self._answer.sent[index] = last
        if last == first:
            return b""
        return msgspec.json.encode(self._line("".join(self._choice.pieces[first:last]))) + b"\n"

    def ending(self) -> bytes:
        return msgspec.json.encode(self._line("", **self._how())) + b"\n"

    def keepalive(self) -> bytes:
        return b""

    def failure(self) -> bytes:
        return b'{"error":"the engine broke down"}\n'

    def whole(self) -> dict[str, Any]:
        self._answer.sent[0] = len(self._choice.pieces)
        return self._line(self._choice.text, **self._how())


class OllamaGenerate(OllamaChat):
    """The same for `/api/generate`, which has the text in `response`."""

    def _said(self, text: str) -> dict[str, Any]:
        return {"response": text}
