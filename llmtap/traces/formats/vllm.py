"""Inputs of vLLM's `bench serve`: `custom` prompts, and `timed_trace`.

`vllm-custom`: `{"prompt": str, "output_tokens": int}` a line; the count may be missing. vLLM makes the prompt
a user's one message by the model's chat template.

`vllm-timed-trace`: Mooncake's fields with times in seconds. The prompt is made of the `hash_ids` alone, so a
row without ids is left out. vLLM takes a block for 16 tokens unless told otherwise; the notes give the flag.
When read, the size is the first of 16, 64 and 512 of which the first rows have the right number. A file of
milliseconds, as for `--timed-trace-sec-multiplier 0.001`, is a Mooncake file.

Source: shared/traces/formats.md 1.6; the multiplier's default of 1 is in vllm-project/vllm's own help.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import BinaryIO, Final

import msgspec
import pyarrow as pa

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.bodies import JOINED, PromptTexts, TextRows, compact, prompt_columns
from llmtap.traces.format import (
    LENGTHS,
    NO_FAILED,
    TraceFormat,
    TraceSource,
    TraceWritten,
    WriteOptions,
    trace_source,
)
from llmtap.traces.formats.mooncake import LengthFields
from llmtap.traces.text import BODY_BYTES_MAX, Count, JsonLines, first_objects
from llmtap.traces.writer import Outgoing

__all__ = ["FORMATS"]

_TIMED: Final = LengthFields(
    name="vllm-timed-trace", places=9, sizes=(16, 64, 512), any_size=True, blocks_needed=True
)


class _Custom(msgspec.Struct):
    prompt: str
    output_tokens: Count | None = None


def _read_custom(stream: BinaryIO) -> TraceSource:
    return trace_source(partial(_custom_batches, stream), "vllm-custom", level="full")


def _custom_batches(stream: BinaryIO, notes: list[str]) -> Iterator[pa.RecordBatch]:
    lines, rows = JsonLines(stream, _Custom, bytes_max=BODY_BYTES_MAX), TextRows()
    for found, _ in lines:
        for row in found:
            yield from rows.add(output_tokens=row.output_tokens, **prompt_columns(row.prompt))
    yield from rows.rest()
    notes += lines.notes()


def _write_custom(
    out: BinaryIO, info: CaptureInfo, batches: Iterable[pa.RecordBatch], options: WriteOptions
) -> TraceWritten:
    written, texts, uncounted = TraceWritten(), PromptTexts(), 0
    columns = ("request_body", "output_tokens")
    going = Outgoing("vllm-custom", info, written, columns=columns, needs=("request_body",), times="none")
    for batch in going.batches(batches):
        prompts = texts.of_all(batch, written)
        for prompt, made in zip(prompts, batch.column("output_tokens").to_pylist(), strict=True):
            if prompt is not None:
                uncounted += made is None
                row = {"prompt": prompt} if made is None else {"prompt": prompt, "output_tokens": made}
                out.write(compact(row).encode() + b"\n")
    texts.report(written)
    written.note(uncounted, "rows have no output_tokens: vLLM needs --custom-output-len")
    return written


def _sniff_custom(head: bytes, name: str) -> bool:
    objects = first_objects(head)
    return bool(objects) and all({"prompt"} <= o.keys() <= {"prompt", "output_tokens"} for o in objects)


def _write_timed(
    out: BinaryIO, info: CaptureInfo, batches: Iterable[pa.RecordBatch], options: WriteOptions
) -> TraceWritten:
    written = _TIMED.write(out, info, batches, options)
    size = _TIMED.size_written(info)
    if written.rows and size != 16:
        written.notes.append(f"vLLM must be told: --timed-trace-chunk-hash-size {size}")
    return written


FORMATS: Final = (
    TraceFormat(
        name="vllm-custom",
        title="vLLM bench, custom prompts (JSON Lines)",
        extensions=(".jsonl",),
        holds=frozenset({"output tokens", "request body"}),
        needs=frozenset({"request body"}),
        why={
            "request body": JOINED,
            "arrival": "vLLM sends custom prompts by a rate of its own",
            "input tokens": "counted anew by the tokenizer of the benchmark",
            **NO_FAILED,
        },
        sniff=_sniff_custom,
        read=_read_custom,
        write=_write_custom,
    ),
    # Its fields are Mooncake's, and guidellm's: it is read with --from.
    TraceFormat(
        name="vllm-timed-trace",
        title="vLLM bench, timed trace (JSON Lines, seconds)",
        extensions=(".jsonl",),
        holds=LENGTHS | {"prefix blocks"},
        needs=LENGTHS | {"prefix blocks"},
        why={"session and turn": "it has no field for it", **NO_FAILED},
        read=_TIMED.read,
        write=_write_timed,
    ),
)
