"""Mooncake's traces: JSON Lines with times in milliseconds and one id per block of 512 tokens.

`{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [int, ...]}`. The last block
may be partial, so that a prompt of n tokens has ceil(n / 512) ids. What a Mooncake file held comes back byte
for byte.

AIPerf, guidellm and vLLM read the same fields, the latter two with times in seconds: they have formats of
their own here. A file that could be any of them is taken for this one, unless its times have fractions.

Source: shared/traces/formats.md 1.1; kvcache-ai/Mooncake, FAST25-release/traces.
"""

from collections.abc import Iterable
from typing import BinaryIO, Final

import pyarrow as pa

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import TraceFormat, TraceSource, TraceWritten, WriteOptions
from llmtap.traces.formats.timed_lengths import STYLES, LengthReading, looks, read_lengths, write_lengths

__all__ = ["FORMAT"]

_READING: Final = LengthReading(name="mooncake", places=6, spelling="0", sizes=(512,))


def _read(stream: BinaryIO) -> TraceSource:
    return read_lengths(stream, _READING)


def _write(
    out: BinaryIO, info: CaptureInfo, batches: Iterable[pa.RecordBatch], options: WriteOptions
) -> TraceWritten:
    return write_lengths(out, info, batches, options, _READING)


def _sniff(head: bytes, name: str) -> bool:
    found, fractions = looks(head)
    return found and not fractions


FORMAT: Final = TraceFormat(
    name="mooncake",
    title="Mooncake trace (JSON Lines, milliseconds)",
    extensions=(".jsonl",),
    holds=frozenset({"arrival", "input tokens", "output tokens", "prefix blocks"}),
    needs=frozenset({"arrival", "input tokens", "output tokens"}),
    why={
        "arrival": "in whole milliseconds, from the first one",
        "prefix blocks": "blocks of 512 tokens; the ids of others go over, but readers that count them "
        "(guidellm) reject such rows",
        "outcome and status": "a failed request has no place: it is left out, and counted",
        "session and turn": "only shared blocks tell which requests belong together",
    },
    styles=STYLES,
    sniff=_sniff,
    read=_read,
    write=_write,
)
