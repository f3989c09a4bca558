"""Ollama's chat and generate APIs on the simulated server: read requests, write streams, answers and errors.

A stream is a line of JSON for each piece; the last has the counts and the times in ns. Ollama streams unless
the request says otherwise. It has no keep-alive and no finish reason for a refusal, which ends as `stop`.

Source: ollama/ollama docs/api.md; docs/dialects.md.
"""

from typing import Any, Final

import msgspec

from llmtap.sim.server.shapes import shape

_CREATED_AT: Final = "2023-11-14T22:13:20Z"


class _Options(shape.CommonRequest, kw_only=True):
    num_predict: int | None = None
    stop: str | list[str] | None = None


class _Request(msgspec.Struct):
    model: str = "sim"
    messages: list[shape.Message] | None = None
    prompt: str | None = None
    system: str | None = None
    stream: bool | None = True
    options: _Options | None = None

    def asked(self, prompt: str) -> shape.SimulatedRequest:
        o = self.options or _Options()
        limit = o.num_predict if o.num_predict is not None and o.num_predict >= 0 else None  # -1: no limit
        return o.asked(
            prompt,
            model=self.model,
            stream=self.stream is not False,
            max_tokens=limit,
            stop=shape.lines_of(o.stop),
        )


def read_chat(body: bytes) -> shape.SimulatedRequest:
    """Read a request to `/api/chat`. Raises BadRequest."""
    r: _Request = shape.decode(body, _Request)
    return r.asked("\n".join(shape.text_of(m.content) for m in r.messages or ()))


def read_generate(body: bytes) -> shape.SimulatedRequest:
    """Read a request to `/api/generate`. Raises BadRequest."""
    r: _Request = shape.decode(body, _Request)
    return r.asked("\n".join(filter(None, (r.system, r.prompt))))


def ollama_error(status: int, code: str, message: str) -> dict[str, Any]:
    return {"error": message}


class OllamaChat(shape.Shape):
    media_type = "application/x-ndjson"

    def __init__(self, answer: shape.Answer) -> None:
        super().__init__(answer, "ollama-sim")

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _line(self, text: str, **more: Any) -> dict[str, Any]:
        head = {"model": self._asked.model, "created_at": _CREATED_AT, **self._content(text)}
        return {**head, "done": bool(more), **more}

    def _last_line(self, text: str) -> dict[str, Any]:
        a = self._answer
        return self._line(
            text, done_reason="length" if self._choice.finish == "length" else "stop",
            total_duration=a.prompt_ns + a.output_ns, load_duration=0, prompt_eval_count=a.prompt_tokens,
            prompt_eval_duration=a.prompt_ns, eval_count=a.sent[0], eval_duration=a.output_ns,
        )  # fmt: skip

    def chunk(self, index: int, first: int, last: int, final: bool) -> bytes:
        text = self._take(index, first, last)
        return msgspec.json.encode(self._line(text)) + b"\n" if last > first else b""

    def ending(self) -> bytes:
        return msgspec.json.encode(self._last_line("")) + b"\n"

    def failure(self) -> bytes:
        return msgspec.json.encode(ollama_error(500, "", shape.BROKEN)) + b"\n"

    def whole(self) -> dict[str, Any]:
        self._answer.sent[0] = len(self._choice.pieces)
        return self._last_line(self._choice.text)


class OllamaGenerate(OllamaChat):
    """The same for `/api/generate`, which has the text in `response`."""

    def _content(self, text: str) -> dict[str, Any]:
        return {"response": text}
