"""OpenAI's chat completions, and vLLM's dialect of them.

OpenAI sends the role first and how it ended last, each in a chunk of its own; vLLM lets the last tokens say
how it ended. Usage on every chunk, with the counts so far, is vLLM's `continuous_usage_stats`.

Source: openai/openai-openapi; vllm entrypoints/openai; shared/dialects/dialects.md sections 3.1 and 3.5.
"""

from typing import Any, Final

import msgspec

from llmtap.sim.server.shapes.shape import (
    CREATED,
    Answer,
    Choice,
    SimulatedRequest,
    decode,
    lines_of,
    text_of,
)
from llmtap.workload.prompts.text import token_ids

__all__ = ["OpenAIChatShape", "StreamOptions", "read", "usage_of"]

_DONE: Final = b"data: [DONE]\n\n"


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Message(msgspec.Struct):
    role: str = "user"
    content: Any = None


class _Request(msgspec.Struct):
    messages: list[_Message]
    model: str = "sim"
    stream: bool | None = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = 0
    ignore_eos: bool | None = False
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = 1
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False


def read(body: bytes) -> SimulatedRequest:
    """What a request asks for. Raises BadRequest."""
    r: _Request = decode(body, _Request)
    options = r.stream_options or StreamOptions()
    return SimulatedRequest(
        model=r.model, stream=bool(r.stream), prompts=("\n".join(text_of(m.content) for m in r.messages),),
        max_tokens=r.max_tokens if r.max_completion_tokens is None else r.max_completion_tokens,
        min_tokens=r.min_tokens or 0, ignore_eos=bool(r.ignore_eos), stop=lines_of(r.stop), seed=r.seed,
        n=1 if r.n is None else r.n, include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats), token_ids=bool(r.return_token_ids),
    )  # fmt: skip


def usage_of(answer: Answer, output_tokens: int) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": answer.prompt_tokens, "completion_tokens": output_tokens,
        "total_tokens": answer.prompt_tokens + output_tokens,
    }  # fmt: skip
    if answer.cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": answer.cached_tokens}
    return usage


class OpenAIChatShape:
    """Writes one answer."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer) -> None:
        self.id = f"chatcmpl-sim{answer.number}"
        self._answer = answer
        self._asked = answer.asked
        self._vllm = answer.dialect == "vllm"
        self._continuous = self._vllm and self._asked.include_usage and self._asked.continuous_usage
        self._head = {
            "id": self.id, "object": "chat.completion.chunk", "created": CREATED, "model": self._asked.model,
        }  # fmt: skip

    def _frame(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        frame: dict[str, Any] = {**self._head, "choices": choices}
        if usage is not None:
            frame["usage"] = usage
        elif self._continuous:
            frame["usage"] = usage_of(self._answer, sum(self._answer.sent))
        elif self._asked.include_usage and not self._vllm:
            frame["usage"] = None
        return b"data: " + msgspec.json.encode(frame) + b"\n\n"

    def opening(self) -> bytes:
        frames = []
        for i, choice in enumerate(self._answer.choices):
            delta: dict[str, Any] = {"role": "assistant", "content": ""}
            if choice.refused:
                delta = {"role": "assistant", "content": None, "refusal": ""}
            frames.append(
                self._frame([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
            )
        return b"".join(frames)

    def chunk(self, index: int, first: int, last: int, final: bool) -> bytes:
        choice = self._answer.choices[index]
        self._answer.sent[index] = last
        frames = b""
        if last > first:
            text = choice.pieces[first] if last == first + 1 else "".join(choice.pieces[first:last])
            delta = ({"refusal": text} if choice.refused else {"content": text}) if text else {}
            said: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            if self._vllm:
                said["token_ids"] = token_ids(text) if self._asked.token_ids else None
                if final:
                    return self._frame([said | self._how(choice)])
            frames = self._frame([said])
        if final:
            frames += self._frame([{"index": index, "delta": {}, "logprobs": None, **self._how(choice)}])
        return frames

    def _how(self, choice: Choice) -> dict[str, Any]:
        if not self._vllm:
            return {"finish_reason": choice.finish}
        return {"finish_reason": choice.finish, "stop_reason": choice.stop_text}

    def ending(self) -> bytes:
        if not self._asked.include_usage:
            return _DONE
        return self._frame([], usage_of(self._answer, sum(self._answer.sent))) + _DONE

    def keepalive(self) -> bytes:
        return b": keep-alive\n\n"

    def failure(self) -> bytes:
        error = {
            "message": "the engine broke down",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
        # vLLM goes on to its end marker.
        return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n" + (_DONE if self._vllm else b"")

    def whole(self) -> dict[str, Any]:
        choices = []
        for i, choice in enumerate(self._answer.choices):
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            if choice.refused:
                message |= {"content": None, "refusal": choice.text}
            choices.append({"index": i, "message": message, "logprobs": None, **self._how(choice)})
        return {
            **self._head, "object": "chat.completion", "choices": choices,
            "usage": usage_of(self._answer, self._answer.output_tokens),
        }  # fmt: skip
