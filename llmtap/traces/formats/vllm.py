"""The trace formats `vllm-custom` (prompts) and `vllm-timed-trace` (lengths) of vLLM's `bench serve`.

Both are JSON Lines, read and written. `vllm-custom`: `{"prompt": str, "output_tokens": int}` a line; the
count may be missing.

`vllm-timed-trace`: Mooncake's fields with times in seconds (`LengthFields` of `mooncake.py`). vLLM makes the
prompt of the `hash_ids` alone, so a row without ids is not written. vLLM takes a block for 16 tokens unless
told otherwise. When read, the block size is the first of 16, 64 and 512 that the first rows agree with.

Source: vLLM's benchmark.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import msgspec

from llmtap.traces.bodies import JOINED, prompt_columns, write_prompts
from llmtap.traces.format import LENGTHS, NO_FAILED, TraceFormat, TraceWriter
from llmtap.traces.formats.mooncake import LengthFields
from llmtap.traces.text import BODY_BYTES_MAX, Count, JsonLines, first_objects

_TIMED: Final = LengthFields(
    name="vllm-timed-trace", places=9, sizes=(16, 64, 512), any_size=True, blocks_needed=True
)


class _Custom(msgspec.Struct):
    prompt: str
    output_tokens: Count | None = None


def _read_custom(stream: BinaryIO, notes: list[str]) -> Iterator[dict[str, Any]]:
    lines = JsonLines(stream, _Custom, bytes_max=BODY_BYTES_MAX)
    for row, _ in lines.rows():
        yield {"output_tokens": row.output_tokens, **prompt_columns(row.prompt)}
    notes += lines.notes()


def _write_custom(writer: TraceWriter) -> None:
    write_prompts(writer, {"output_tokens": "output_tokens"})
    uncounted = writer.rows - writer.told.get("output tokens", 0)
    writer.note(uncounted, "rows have no output_tokens: vLLM needs --custom-output-len")


def _write_timed(writer: TraceWriter) -> None:
    _TIMED.write(writer)
    size = _TIMED.size_written(writer.info)
    if writer.rows and size != 16:
        writer.notes.append(f"vLLM needs --timed-trace-chunk-hash-size {size}")


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
        sniff=lambda head, name: (
            bool(objects := first_objects(head))
            and all({"prompt"} <= o.keys() <= {"prompt", "output_tokens"} for o in objects)
        ),
        info={"level": "full"},
        rows=_read_custom,
        writes=_write_custom,
    ),
    # Its fields are Mooncake's, and guidellm's: it is read with --from.
    TraceFormat(
        name="vllm-timed-trace",
        title="vLLM bench, timed trace (JSON Lines, seconds)",
        extensions=(".jsonl",),
        holds=LENGTHS | {"prefix blocks"},
        needs=LENGTHS | {"prefix blocks"},
        why={"session and turn": "it has no field for it", **NO_FAILED},
        opens=_TIMED.read,
        writes=_write_timed,
    ),
)
