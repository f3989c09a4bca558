"""The trace formats `guidellm` (lengths with times in seconds) and `guidellm-data` (prompts and lengths).

Both are read and written. `guidellm` is the input of guidellm's `--profile kind=replay`: JSON Lines of
`timestamp`, `input_length`, `output_length`, and optional `hash_ids` (of 512-token blocks) and `duration`.
Its reader and writer are `LengthFields` of `mooncake.py`.

`guidellm-data`: JSON Lines with a prompt and counts under any of guidellm's names.

Source: guidellm 0.8.1.
"""

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Final

from llmtap.traces.bodies import JOINED, prompt_columns, read_object, write_prompts
from llmtap.traces.format import LENGTHS, NO_FAILED, FormatError, TraceFormat
from llmtap.traces.formats.mooncake import LengthFields, looks
from llmtap.traces.text import COUNT_MAX, clipped, first_objects, read_lines

_TRACE: Final = LengthFields(name="guidellm", places=9, durations=True)

_PROMPTS: Final = (
    "prompt", "instruction", "question", "input", "context", "content", "conversation", "turn", "text",
)  # fmt: skip
_INPUTS: Final = ("prompt_tokens_count", "input_tokens_count")
_OUTPUTS: Final = ("output_tokens_count", "completion_tokens_count")


def _read_dataset(stream: BinaryIO, notes: list[str]) -> Iterator[dict[str, Any]]:
    others = dict[str, None]()
    for number, line in read_lines(stream):
        row = read_object(line, f"line {number}")
        name = next((n for n in _PROMPTS if n in row), None)
        prompt = None if name is None else row[name]
        if prompt is not None and not isinstance(prompt, str):
            raise FormatError(f"line {number}: {name}: expected text")
        read, made = (_count(row, names, number) for names in (_INPUTS, _OUTPUTS))
        if prompt is None and read is None:
            raise FormatError(f"line {number}: prompt: neither it nor prompt_tokens_count is there")
        others.update(dict.fromkeys(k for k in row if k != name and k not in (*_INPUTS, *_OUTPUTS)))
        text = {} if prompt is None else prompt_columns(prompt)
        yield {"input_tokens": read, "output_tokens": made, **text}
    if others:
        notes.append(f"columns that are not kept: {', '.join(others)}")


def _count(row: Mapping[str, Any], names: tuple[str, ...], number: int) -> int | None:
    name = next((n for n in names if n in row), None)
    value = None if name is None else row[name]
    if value is None or value == "":
        return None
    text = str(value)
    if isinstance(value, bool) or len(text) > 18 or not text.isdecimal() or int(text) > COUNT_MAX:
        raise FormatError(f"line {number}: {name}: expected a whole number, got {clipped(text)}")
    return int(text)


def _sniff_dataset(head: bytes, name: str) -> bool:
    # A count under one of its own names: a bare `prompt` could be anybody's.
    counts = {*_INPUTS, *_OUTPUTS}
    objects = first_objects(head)
    return any(counts & o.keys() for o in objects[:1])


FORMATS: Final = (
    TraceFormat(
        name="guidellm",
        title="guidellm trace (JSON Lines, seconds)",
        extensions=(".jsonl",),
        holds=LENGTHS | {"prefix blocks", "end of the answer"},
        needs=LENGTHS,
        why={
            "prefix blocks": "blocks of 512 tokens: it rejects rows whose number of ids is another",
            **NO_FAILED,
        },
        sniff=lambda head, name: looks(head) == (True, True),
        opens=_TRACE.read,
        writes=_TRACE.write,
    ),
    TraceFormat(
        name="guidellm-data",
        title="guidellm dataset (JSON Lines)",
        extensions=(".jsonl",),
        holds=frozenset({"input tokens", "output tokens", "request body"}),
        needs=frozenset({"request body"}),
        why={
            "request body": JOINED,
            "arrival": "guidellm sends a dataset by a rate of its own",
            **NO_FAILED,
        },
        sniff=_sniff_dataset,
        info={"level": "full"},
        rows=_read_dataset,
        writes=lambda writer: write_prompts(
            writer, {"input_tokens": "prompt_tokens_count", "output_tokens": "output_tokens_count"}
        ),
    ),
)
