"""The trace format `vllm-custom`: prompts of vLLM's `bench serve`, JSON Lines, read and written.

A line is `{"prompt": str, "output_tokens": int}`, or without `output_tokens`. llmtap adds the expected answer
as `label`, which vLLM ignores: `should-refuse` or `should-answer`.

Source: vLLM's benchmark.
"""

from collections.abc import Iterator
from typing import BinaryIO, Final

import msgspec
import pyarrow as pa

from llmtap.exchange.label import label_of
from llmtap.json_types import JsonObject
from llmtap.traces.bodies import compact_json, messages_of, part_types, read_object, request_columns
from llmtap.traces.format import NO_FAILED, FormatError, TraceFormat, TraceRow, TraceWriter
from llmtap.traces.text import BODY_BYTES_MAX, TokenCount, first_objects, json_rows


class _Row(msgspec.Struct, omit_defaults=True):
    """One line of a data set for vLLM's benchmark."""

    prompt: str
    output_tokens: TokenCount | None = None
    label: str | None = None


def prompt_columns(prompt: str, max_tokens: int | None) -> TraceRow:
    """Return the columns of a capture for a request that has one user message."""
    body: JsonObject = {"messages": [{"role": "user", "content": prompt}]}
    if max_tokens:
        body["max_tokens"] = int(max_tokens)
    return {"request_body": compact_json(body), "level": "full", **request_columns(body)}


def _read(stream: BinaryIO, notes: list[str]) -> Iterator[TraceRow]:
    for row, _ in json_rows(stream, _Row, notes, bytes_max=BODY_BYTES_MAX):
        columns = {"output_tokens": row.output_tokens, "label": label_of(row.label)}
        yield columns | prompt_columns(row.prompt, row.output_tokens)


def _prompt_of(body: str) -> tuple[str, bool, bool]:
    """Return the texts of a request's messages, joined by empty lines, and two flags.

    First flag: whether several messages were joined. Second flag: whether the request has tools, or parts
    that are not text, which are left out.
    """
    try:
        request = read_object(body, "request")
    except FormatError:
        request = {}
    messages = messages_of(request) or []
    types = part_types(request.get("messages"))
    has_others = bool(request.get("tools")) or any(kind not in ("text", "input_text") for kind in types)
    return "\n\n".join(text for _, text in messages if text), len(messages) > 1, has_others


def _write(writer: TraceWriter) -> None:
    joined = reduced = 0
    prompts: list[str] = []

    def reasons_to_drop(batch: pa.RecordBatch) -> list[str | None]:
        nonlocal joined, reduced
        parsed = [_prompt_of(body) for body in batch.column("request_body").to_pylist()]
        prompts[:] = [prompt for prompt, _, _ in parsed if prompt]
        joined += sum(several for prompt, several, _ in parsed if prompt)
        reduced += sum(has_others for prompt, _, has_others in parsed if prompt)
        return [None if prompt else "no text in the body" for prompt, _, _ in parsed]

    columns = ("request_body", "output_tokens", "label")
    for batch in writer.rows_to_write(columns, ("request_body",), times="none", reasons=reasons_to_drop):
        counts, labels = (batch.column(name).to_pylist() for name in ("output_tokens", "label"))
        lines = map(_Row, prompts, counts, labels)
        writer.out.write(msgspec.json.Encoder().encode_lines(lines))
    writer.note(joined, "prompts are several messages, joined by empty lines")
    writer.note(reduced, "prompts lost tools, or parts that are not text")
    uncounted = writer.rows - writer.counts.get("output tokens", 0)
    writer.note(uncounted, "rows have no output_tokens: vLLM needs --custom-output-len")


FORMAT: Final = TraceFormat(
    name="vllm-custom",
    title="vLLM bench, custom prompts (JSON Lines)",
    extensions=(".jsonl",),
    aspects=frozenset({"output tokens", "request body", "label"}),
    required_aspects=frozenset({"request body"}),
    remarks={
        "request body": "one text: of several messages those of all, joined by empty lines, without roles",
        "arrival": "vLLM sends custom prompts by a rate of its own",
        "input tokens": "counted anew by the tokenizer of the benchmark",
        **NO_FAILED,
    },
    sniff=lambda head, name: (
        bool(objects := first_objects(head))
        and all({"prompt"} <= o.keys() <= set(_Row.__struct_fields__) for o in objects)
    ),
    info={"level": "full"},
    rows=_read,
    write_rows=_write,
)
