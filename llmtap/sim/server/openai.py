"""OpenAI's chat completions, completions and Responses APIs on the simulated server, with vLLM's variants.

The `read_` functions turn the body of a request into a `SimulatedRequest`; the shapes return the bytes of
streams and whole answers; `openai_error` returns the body of an error.

OpenAI sends the role first and the finish reason last, each in a separate chunk; vLLM sends the finish reason
with the last tokens. With vLLM's `continuous_usage_stats`, every chunk has the usage so far. The stream of
Responses has named events with sequence numbers, repeats the whole answer at the end, and has no end marker.

Source: openai/openai-openapi; openai/openai-python types/responses; vllm entrypoints/openai; exo-bench's
methodology; docs/dialects.md.
"""

from typing import Any, Final

import msgspec

from llmtap.json_types import JsonObject
from llmtap.sim.server import shapes as shape
from llmtap.workload.prompts.text import token_ids

_DONE: Final = b"data: [DONE]\n\n"


def openai_error(status: int, code: str, message: str) -> JsonObject:
    """Return the body of an error response in OpenAI's format."""
    kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
    kind = kinds.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


# ---------------------------------------------------------------- APIs of chat and of completions


class _StreamOptions(msgspec.Struct):
    """Field `stream_options` of a request."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _CompletionRequest(shape.CommonRequest, kw_only=True):
    """Fields of the body that chat completions and completions share."""

    stop: str | list[str] | None = None
    n: int | None = 1
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = False

    def to_completion(self, *prompts: str, **more: Any) -> shape.SimulatedRequest:
        """Return the request with these prompts, like `to_request`, and with the fields of this class."""
        options = self.stream_options or _StreamOptions()
        return self.to_request(
            *prompts,
            stop=shape.stop_texts(self.stop),
            n=1 if self.n is None else self.n,
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
            token_ids=bool(self.return_token_ids),
            **more,
        )


class _ChatRequest(_CompletionRequest, kw_only=True):
    """Body of a request for chat completions."""

    messages: list[shape.Message]
    max_completion_tokens: int | None = None


class _CompletionsRequest(_CompletionRequest, kw_only=True):
    """Body of a request for completions."""

    prompt: str | list[Any]


def read_chat(body: bytes) -> shape.SimulatedRequest:
    """Parse the body of a chat completion. Raises BadRequest."""
    r: _ChatRequest = shape.decode(body, _ChatRequest)
    limit = r.max_tokens if r.max_completion_tokens is None else r.max_completion_tokens
    return r.to_completion("\n".join(shape.text_of(m.content) for m in r.messages), max_tokens=limit)


class _BenchChatRequest(_ChatRequest, kw_only=True):
    """Body of a request to exo's benchmark endpoint."""

    use_prefix_cache: bool | None = False


def read_bench_chat(body: bytes) -> shape.SimulatedRequest:
    """Parse the body of a request to exo's benchmark endpoint. Raises BadRequest.

    The answer of this endpoint has exactly `max_tokens` tokens and is not streamed. By default, the request
    does not use the prefix cache.
    """
    r: _BenchChatRequest = shape.decode(body, _BenchChatRequest)
    request = read_chat(body)
    request.stream, request.ignore_eos, request.stop = False, True, ()
    request.use_prefix_cache = bool(r.use_prefix_cache)
    return request


def read_completions(body: bytes) -> shape.SimulatedRequest:
    """Parse the body of a completion, whose prompts are texts or lists of token ids. Raises BadRequest."""
    r: _CompletionsRequest = shape.decode(body, _CompletionsRequest)
    match r.prompt:
        case str() as text:
            return r.to_completion(text)
        case [str(), *_] as texts if all(isinstance(text, str) for text in texts):
            return r.to_completion(*texts)
        case [int(), *_] as tokens if all(isinstance(token, int) for token in tokens):
            return r.to_completion(str(tokens), prompt_tokens=len(tokens))
        case [[int(), *_], *_] as lists if all(isinstance(tokens, list) for tokens in lists):
            return r.to_completion(*map(str, lists), prompt_tokens=sum(map(len, lists)))
    raise shape.BadRequest(
        "prompt: expected a text, a list of texts, a list of token ids, or a list of lists of token ids"
    )


class OpenAIChatShape(shape.Shape):
    """Writes the answer of chat completions."""

    _id_prefix = "chatcmpl-sim"
    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def __init__(self, answer: shape.Answer) -> None:
        super().__init__(answer, self._id_prefix)
        self._is_vllm = answer.dialect == "vllm"
        self._has_running_usage = (
            self._is_vllm and self._request.include_usage and self._request.continuous_usage
        )
        """Whether every chunk has the usage so far."""
        self._head = {
            "id": self.id,
            "object": self._chunk_object,
            "created": shape.CREATED,
            "model": self._request.model,
        }
        """Fields that all chunks of the answer have."""

    def _delta_fields(self, choice: shape.Choice, text: str) -> JsonObject:
        """Return the fields of a choice in a chunk, with a piece of its text."""
        return {"delta": {"refusal" if choice.refused else "content": text} if text else {}}

    def _full_fields(self, choice: shape.Choice) -> JsonObject:
        """Return the fields of a choice in an answer that is not streamed, with its whole text."""
        content, refusal = (None, choice.text) if choice.refused else (choice.text, None)
        return {"message": {"role": "assistant", "content": content, "refusal": refusal}}

    def _usage(self, output_tokens: int) -> JsonObject:
        answer = self._answer
        usage: JsonObject = {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": answer.prompt_tokens + output_tokens,
        }
        if answer.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": answer.cached_tokens}
        return usage

    def _frame(self, choices: list[JsonObject], usage: JsonObject | None = None) -> bytes:
        frame: JsonObject = {**self._head, "choices": choices}
        if usage is not None:
            frame["usage"] = usage
        elif self._has_running_usage:
            frame["usage"] = self._usage(sum(self._answer.sent_tokens))
        elif self._request.include_usage and not self._is_vllm:
            frame["usage"] = None
        return shape.sse(frame)

    def opening(self) -> bytes:
        frames = []
        for i, choice in enumerate(self._answer.choices):
            delta: JsonObject = {"role": "assistant", "content": None if choice.refused else ""}
            if choice.refused:
                delta["refusal"] = ""
            frames.append(
                self._frame([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
            )
        return b"".join(frames)

    def chunk(self, index: int, first: int, last: int, final: bool) -> bytes:
        choice = self._answer.choices[index]
        text = self._take(index, first, last)
        frames = b""
        if last > first:
            delta_fields = self._delta_fields(choice, text)
            entry = {"index": index, **delta_fields, "logprobs": None, "finish_reason": None}
            if self._is_vllm:
                entry["token_ids"] = token_ids(text) if self._request.token_ids else None
                if final:
                    return self._frame([entry | self._finish_fields(choice)])
            frames = self._frame([entry])
        if final:
            ended = {
                "index": index,
                **self._delta_fields(choice, ""),
                "logprobs": None,
                **self._finish_fields(choice),
            }
            frames += self._frame([ended])
        return frames

    def _finish_fields(self, choice: shape.Choice) -> JsonObject:
        finish: JsonObject = {"finish_reason": choice.finish}
        return {**finish, "stop_reason": choice.stop_text} if self._is_vllm else finish

    def ending(self) -> bytes:
        if not self._request.include_usage:
            return _DONE
        return self._frame([], self._usage(sum(self._answer.sent_tokens))) + _DONE

    def keepalive(self) -> bytes:
        return b": keep-alive\n\n"

    def failure(self) -> bytes:
        error = {"message": shape.BROKEN, "type": "InternalServerError", "param": None, "code": 500}
        # vLLM sends its end marker even after an error.
        return shape.sse({"error": error}) + (_DONE if self._is_vllm else b"")

    def full_answer(self) -> JsonObject:
        choices = [
            {"index": i, **self._full_fields(choice), "logprobs": None, **self._finish_fields(choice)}
            for i, choice in enumerate(self._answer.choices)
        ]
        usage = self._usage(self._answer.output_tokens)
        return {**self._head, "object": self._object, "choices": choices, "usage": usage}


class ExoBenchShape(OpenAIChatShape):
    """Writes a chat completion with exo's two rates in tokens per second (exo-bench methodology).

    The prompt rate is the number of uncached prompt tokens / the time to the first token. The generation rate
    is (output tokens - 1) / the time from the first to the last token.
    """

    def full_answer(self) -> JsonObject:
        answer = self._answer
        prompt_tokens, output_tokens, cached_tokens = (
            answer.prompt_tokens,
            answer.output_tokens,
            answer.cached_tokens or 0,
        )
        stats = {
            "prompt_tps": _tokens_per_second(prompt_tokens - cached_tokens, answer.prompt_ns),
            "generation_tps": _tokens_per_second(output_tokens - 1, answer.output_ns),
            "prompt_tokens": prompt_tokens,
            "generation_tokens": output_tokens,
            "prefix_cache_hit": "none"
            if not cached_tokens
            else "partial"
            if cached_tokens < prompt_tokens
            else "exact",
        }
        return {**super().full_answer(), "generation_stats": stats}


def _tokens_per_second(tokens: int, ns: int) -> float:
    """Return tokens / duration, in tokens per second; 0 if the duration is 0."""
    return max(tokens, 0) * 1e9 / ns if ns > 0 else 0.0


class OpenAICompletionsShape(OpenAIChatShape):
    """Writes the answer of the completions API, which differs from chat in the fields of a choice."""

    _id_prefix = "cmpl-sim"
    _object = _chunk_object = "text_completion"

    def opening(self) -> bytes:
        return b""

    def _delta_fields(self, choice: shape.Choice, text: str) -> JsonObject:
        """Return the fields of a choice in a chunk."""
        return {"text": text}

    def _full_fields(self, choice: shape.Choice) -> JsonObject:
        """Return the fields of a choice in an answer that is no stream."""
        return {"text": choice.text}


# ---------------------------------------------------------------- Responses API


class _ResponsesRequest(shape.CommonRequest, kw_only=True):
    """Body of a request to the Responses API."""

    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: int | None = None


def read_responses_request(body: bytes) -> shape.SimulatedRequest:
    """Parse the body of a request to the Responses API. Raises BadRequest."""
    r: _ResponsesRequest = shape.decode(body, _ResponsesRequest)
    items = [r.input] if isinstance(r.input, str) else [i for i in r.input if isinstance(i, dict)]
    texts = [r.instructions, *(i if isinstance(i, str) else shape.text_of(i.get("content")) for i in items)]
    return r.to_request("\n".join(filter(None, texts)), max_tokens=r.max_output_tokens)


class OpenAIResponsesShape(shape.Shape):
    """Writes the answer of the Responses API."""

    def __init__(self, answer: shape.Answer) -> None:
        super().__init__(answer, "resp_sim")
        self._item_id = f"msg_sim{answer.number}"
        self._next_sequence_number = 0
        """Number of the next event of the answer."""
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        """Fields that say to which part of the answer an event belongs."""

    def _event(self, kind: str, **fields: Any) -> bytes:
        kind = kind if kind == "error" else f"response.{kind}"
        event = {"type": kind, "sequence_number": self._next_sequence_number, **fields}
        self._next_sequence_number += 1
        return self._encode_event(event, kind)

    def _encode_event(self, event: JsonObject, kind: str) -> bytes:
        """Return the bytes of an event: a server-sent event, unless a subclass writes WebSocket messages."""
        return shape.sse(event, kind)

    def _response(self, status: str, reason: str | None = None) -> JsonObject:
        ended = status != "in_progress"
        sent_tokens, prompt_tokens = self._answer.sent_tokens[0], self._answer.prompt_tokens
        usage = {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": self._answer.cached_tokens or 0,
                "cache_write_tokens": 0,
            },
            "output_tokens": sent_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt_tokens + sent_tokens,
        }
        return {
            "id": self.id,
            "object": "response",
            "created_at": shape.CREATED,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": reason} if reason else None,
            "model": self._request.model,
            "output": [self._item(status)] if ended and sent_tokens else [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage if ended else None,
        }

    def _item(self, status: str) -> JsonObject:
        content = [] if status == "in_progress" else [self._part(self.sent_text)]
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _part(self, text: str) -> JsonObject:
        if self._choice.refused:
            return {"type": "refusal", "refusal": text}
        return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}

    def opening(self) -> bytes:
        events = self._event("created", response=self._response("in_progress"))
        events += self._event("in_progress", response=self._response("in_progress"))
        if not self._choice.pieces:
            return events
        events += self._event("output_item.added", output_index=0, item=self._item("in_progress"))
        return events + self._event("content_part.added", **self._place, part=self._part(""))

    def chunk(self, index: int, first: int, last: int, final: bool) -> bytes:
        refused, text = self._choice.refused, self._take(index, first, last)
        events = b""
        kind, more = ("refusal", {}) if refused else ("output_text", {"logprobs": list[str]()})
        if last > first:
            events = self._event(f"{kind}.delta", **self._place, delta=text, **more)
        if final and last:
            content = self.sent_text
            whole: JsonObject = {"refusal" if refused else "text": content, **more}
            events += self._event(f"{kind}.done", **self._place, **whole)
            events += self._event("content_part.done", **self._place, part=self._part(content))
            events += self._event("output_item.done", output_index=0, item=self._item(self._status()[0]))
        return events

    def ending(self) -> bytes:
        status, reason = self._status()
        return self._event(status, response=self._response(status, reason))

    def keepalive(self) -> bytes:
        return b": keep-alive\n\n"

    def failure(self) -> bytes:
        error = {"type": "server_error", "code": "server_error", "message": shape.BROKEN, "param": None}
        return self._event("error", error=error)

    def full_answer(self) -> JsonObject:
        self._answer.sent_tokens[0] = len(self._choice.pieces)
        return self._response(*self._status())
