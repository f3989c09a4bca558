"""OpenAI's older completions, and vLLM's dialect of them: text for a prompt, for several, or for tokens.

Source: openai/openai-openapi; shared/dialects/dialects.md section 3.2.
"""

from typing import Any

import msgspec

from llmtap.sim.server.shapes.openai_chat import OpenAIChatShape, StreamOptions, usage_of
from llmtap.sim.server.shapes.shape import CREATED, Answer, BadRequest, SimulatedRequest, decode, lines_of
from llmtap.workload.prompts.text import token_ids

__all__ = ["OpenAICompletionsShape", "read"]


class _Request(msgspec.Struct):
    prompt: str | list[Any]
    model: str = "sim"
    stream: bool | None = False
    max_tokens: int | None = None
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
    prompts, prompt_tokens = _prompts(r.prompt)
    options = r.stream_options or StreamOptions()
    return SimulatedRequest(
        model=r.model, stream=bool(r.stream), prompts=prompts, prompt_tokens=prompt_tokens,
        max_tokens=r.max_tokens, min_tokens=r.min_tokens or 0, ignore_eos=bool(r.ignore_eos),
        stop=lines_of(r.stop), seed=r.seed, n=1 if r.n is None else r.n,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats), token_ids=bool(r.return_token_ids),
    )  # fmt: skip


def _prompts(prompt: str | list[Any]) -> tuple[tuple[str, ...], int | None]:
    """The prompts, and how many tokens they have where they came as tokens."""
    match prompt:
        case str():
            return (prompt,), None
        case [str(), *_] if all(isinstance(text, str) for text in prompt):
            return tuple(prompt), None
        case [int(), *_] if all(isinstance(token, int) for token in prompt):
            return (str(prompt),), len(prompt)
        case [[int(), *_], *_] if all(isinstance(tokens, list) for tokens in prompt):
            return tuple(map(str, prompt)), sum(map(len, prompt))
    raise BadRequest("prompt is a text, tokens, or a list of either")


class OpenAICompletionsShape(OpenAIChatShape):
    """Writes one answer. The frame, usage and ending are chat's; what stands in a choice is not."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self.id = f"cmpl-sim{answer.number}"
        self._head = {
            "id": self.id, "object": "text_completion", "created": CREATED, "model": self._asked.model,
        }  # fmt: skip

    def opening(self) -> bytes:
        return b""

    def chunk(self, index: int, first: int, last: int, final: bool) -> bytes:
        choice = self._answer.choices[index]
        self._answer.sent[index] = last
        frames = b""
        if last > first:
            text = "".join(choice.pieces[first:last])
            said: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
            if self._vllm:
                said["token_ids"] = token_ids(text) if self._asked.token_ids else None
                if final:
                    return self._frame([said | self._how(choice)])
            frames = self._frame([said])
        if final:
            frames += self._frame([{"index": index, "text": "", "logprobs": None, **self._how(choice)}])
        return frames

    def whole(self) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [
                {"index": i, "text": choice.text, "logprobs": None, **self._how(choice)}
                for i, choice in enumerate(self._answer.choices)
            ],
            "usage": usage_of(self._answer, self._answer.output_tokens),
        }
