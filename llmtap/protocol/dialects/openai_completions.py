"""Read OpenAI's older completions as Deltas: a choice has a `text`, or only token ids.

With `echo` the first text holds the prompt: only usage or token ids count right then.

Source: openai/openai-openapi openapi.yaml.
"""

from typing import Any, Final

import msgspec

from llmtap.protocol.delta import Delta, EventClass
from llmtap.protocol.dialects import openai_beside
from llmtap.protocol.dialects.openai_shapes import BAD_JSON, CHOICES_MAX, Findings, Index, read_json


class _Logprobs(msgspec.Struct, gc=False):
    tokens: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct, gc=False):
    text: Any = None
    index: Index = 0
    finish_reason: str | None = None
    stop_reason: Any = None
    """Stands alone where Bedrock invokes DeepSeek; vLLM puts the matched text or token beside the reason."""
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    content_filter_results: Any = None


class _Chunk(openai_beside.ChunkFields, gc=False):
    choices: list[_Choice] | None = None


_decode: Final = msgspec.json.Decoder(_Chunk).decode


class OpenAICompletions(openai_beside.ChoicesReader):
    name = "openai.completions"
    names_read: Final = frozenset(_Chunk.__struct_encode_fields__)

    __slots__ = ("_spoken",)

    def __init__(self) -> None:
        super().__init__()
        self._spoken: set[int] = set()

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        kind = value.get("object")
        if isinstance(kind, str) and kind.startswith("text_completion"):
            return 3
        choices = value.get("choices")
        if isinstance(choices, list):
            # Together repeats a chat delta as `text`: where both are, it is chat.
            # vLLM's tokens-only generate has neither.
            if any(
                isinstance(c, dict) and ("text" in c or "token_ids" in c) and "delta" not in c
                for c in choices
            ):
                return 2
        elif not any(name in value for name in openai_beside.BESIDE_NAMES):
            return 0
        return int(path.endswith("/completions") and not path.endswith("/chat/completions"))

    def _decoded(self, data: bytes) -> _Chunk | None:
        try:
            return _decode(data)
        except BAD_JSON:
            names = ("text", "content_filter_results", "stop_reason")
            return openai_beside.build_chunk(
                read_json(data), _Chunk, _Choice, lambda get: {name: get(name) for name in names}
            )

    def _read(self, chunk: _Chunk, data: bytes, name: bytes | None, *, streamed: bool) -> Delta:
        for choice in chunk.choices or ():
            if choice.finish_reason is None and isinstance(choice.stop_reason, str):
                choice.finish_reason = choice.stop_reason
        delta = super()._read(chunk, data, name, streamed=streamed)
        delta.repeatable = (
            streamed
            and openai_beside.is_plain(chunk, name)
            and delta.text != ""
            and delta.tokens < 0
            and delta.finish_reason is None
            and delta.model is None
            and chunk.usage is None
            and chunk.timings is None
            and chunk.choices is not None
            and chunk.choices[0].content_filter_results is None
        )
        return delta

    def _read_choice(
        self, choice: _Choice, position: int, findings: Findings, *, streamed: bool, replaced: bool
    ) -> None:
        index, text, reason = choice.index, choice.text, choice.finish_reason
        findings.choice(
            index,
            ids=len(choice.token_ids or ()),
            logprobs=0 if choice.logprobs is None else len(choice.logprobs.tokens or ()),
        )
        spoken = isinstance(text, str) and bool(text)
        if reason:
            verdict = findings.finish(reason, choice.content_filter_results)
            if verdict is not None and streamed and spoken and index not in self._spoken:
                # The only text, in the very block of the verdict, stands in for the answer.
                replaced = verdict.substituted = True
                verdict.action = "replaced"
        if choice.content_filter_results is not None:
            findings.filtered(choice.content_filter_results, alone=text is None)
        if spoken and not replaced:
            findings.piece(index, EventClass.CONTENT, text)
            if len(self._spoken) < CHOICES_MAX:
                self._spoken.add(index)
