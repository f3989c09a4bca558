"""What vLLM's `bench serve` reads: `custom` prompts, and `timed_trace`.

`vllm-custom`: `{"prompt": str, "output_tokens": int}` a line; the count may be missing. vLLM wraps the prompt
in the model's chat template, so that it becomes a user's one message.

`vllm-timed-trace`: Mooncake's fields; the prompt is made of the `hash_ids` alone, so that a row without any
would be an empty prompt: it is left out. Times are in vLLM's own unit, seconds. vLLM takes a block for 16
tokens unless told otherwise: the notes give the flag for other sizes. Reading, the size is the first of 16,
64 and 512 of which the first rows have the right number. A file of milliseconds, as for
`--timed-trace-sec-multiplier 0.001`, is a Mooncake file.

Source: shared/traces/formats.md 1.6; the multiplier's default of 1 is said in vllm-project/vllm's own help.
"""

from collections.abc import Iterable, Iterator
from typing import BinaryIO, Final

import msgspec
import pyarrow as pa

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.bodies import TextRows, asked_columns, compact
from llmtap.traces.format import TraceFormat, TraceSource, TraceWritten, WriteOptions
from llmtap.traces.formats.timed_lengths import STYLES, LengthReading, block_size, read_lengths, write_lengths
from llmtap.traces.prompts import JOINED, PromptTexts, prompt_body
from llmtap.traces.text.jsonl import BODY_BYTES_MAX, Count, JsonLines, first_objects
from llmtap.traces.text.lines import LINE_STYLES, LineWriter, Style
from llmtap.traces.writer import Outgoing

__all__ = ["CUSTOM", "FORMATS", "TIMED_TRACE"]

_READING: Final = LengthReading(
    name="vllm-timed-trace",
    places=9,
    spelling="float",
    sizes=(16, 64, 512),
    any_size=True,
    blocks_needed=True,
)


class _Custom(msgspec.Struct):
    prompt: str
    output_tokens: Count | None = None


def _read_custom(stream: BinaryIO) -> TraceSource:
    lines = JsonLines(stream, _Custom, line_bytes_max=BODY_BYTES_MAX)
    info = CaptureInfo(level="full", arrivals="trace", source="vllm-custom", style=lines.style)
    source = TraceSource(info, iter(()))

    def batches() -> Iterator[pa.RecordBatch]:
        rows = TextRows()
        for found, _ in lines:
            for row in found:
                body = prompt_body(row.prompt)
                yield from rows.add(
                    request_body=compact(body), level="full", output_tokens=row.output_tokens,
                    **asked_columns(body),
                )  # fmt: skip
        yield from rows.rest()
        source.notes += lines.notes()

    source.batches = batches()
    return source


def _write_custom(
    out: BinaryIO, info: CaptureInfo, batches: Iterable[pa.RecordBatch], options: WriteOptions
) -> TraceWritten:
    written, texts, uncounted = TraceWritten(), PromptTexts(), 0
    lines = LineWriter(out, Style("vllm-custom", info, options))
    needs = {"request_body": "no request body"}
    columns = ("request_body", "output_tokens")
    going = Outgoing("vllm-custom", info, written, columns=columns, needs=needs, times="none")
    for batch in going.batches(batches):
        prompts = texts.of_all(batch, written)
        for prompt, made in zip(prompts, batch.column("output_tokens").to_pylist(), strict=True):
            if prompt is None:
                continue
            uncounted += made is None
            row = {"prompt": prompt} if made is None else {"prompt": prompt, "output_tokens": made}
            lines.add([compact(row)])
    lines.close()
    texts.report(written)
    if uncounted:
        written.notes.append(f"{uncounted:,} rows have no output_tokens: vLLM needs --custom-output-len")
    return written


def _sniff_custom(head: bytes, name: str) -> bool:
    objects = first_objects(head)
    return bool(objects) and all({"prompt"} <= o.keys() <= {"prompt", "output_tokens"} for o in objects)


def _read_timed(stream: BinaryIO) -> TraceSource:
    return read_lengths(stream, _READING)


def _write_timed(
    out: BinaryIO, info: CaptureInfo, batches: Iterable[pa.RecordBatch], options: WriteOptions
) -> TraceWritten:
    written = write_lengths(out, info, batches, options, _READING)
    size = block_size(info, _READING)
    if written.rows and size != 16:
        written.notes.append(f"vLLM must be told: --timed-trace-chunk-hash-size {size}")
    return written


def _sniff_timed(head: bytes, name: str) -> bool:
    return False  # the fields are Mooncake's, and guidellm's: only --from can say


CUSTOM: Final = TraceFormat(
    name="vllm-custom",
    title="vLLM bench, custom prompts (JSON Lines)",
    extensions=(".jsonl",),
    holds=frozenset({"output tokens", "request body"}),
    needs=frozenset({"request body"}),
    why={
        "request body": JOINED,
        "arrival": "vLLM sends custom prompts by a rate of its own",
        "input tokens": "counted anew by the tokenizer of the benchmark",
        "outcome and status": "a failed request has no place: it is left out, and counted",
    },
    styles=LINE_STYLES,
    sniff=_sniff_custom,
    read=_read_custom,
    write=_write_custom,
)

TIMED_TRACE: Final = TraceFormat(
    name="vllm-timed-trace",
    title="vLLM bench, timed trace (JSON Lines, seconds)",
    extensions=(".jsonl",),
    holds=frozenset({"arrival", "input tokens", "output tokens", "prefix blocks"}),
    needs=frozenset({"arrival", "input tokens", "output tokens", "prefix blocks"}),
    why={
        "session and turn": "it has no field for it",
        "outcome and status": "a failed request has no place: it is left out, and counted",
    },
    styles=STYLES,
    sniff=_sniff_timed,
    read=_read_timed,
    write=_write_timed,
)

FORMATS: Final = (CUSTOM, TIMED_TRACE)
