"""The trace format `servegen`: requests that ServeGen generated, as JSON Lines or a JSON array. Read only.

ServeGen returns objects `Request`; a file has their fields: `{"request_id": int, "timestamp": seconds,
"data": {"input_tokens": int, "output_tokens": int, ...}}`. `reason_ratio` is the share of the output that is
reasoning. `image_tokens`, `audio_tokens` and `video_tokens` are lists with the number of tokens of each
picture, sound or video; they are input tokens in addition to `text_tokens`.

The files in ServeGen's repository are not requests: `chunk-N-trace.csv` and `chunk-N-dataset.json` are the
parameters of a client, from which ServeGen generates requests. Such a file causes an error.

Source: alibaba/ServeGen f891d11, servegen/construct.py.
"""

import io
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import msgspec
from msgspec import Struct

from llmtap.traces.bodies import read_elements
from llmtap.traces.format import LENGTHS, FormatError, TraceFormat, TraceRow
from llmtap.traces.text import (
    Number,
    TokenCount,
    error_of,
    first_objects,
    json_rows,
    number_ns,
    read_count,
    start_of,
)

_SECOND_PLACES: Final = 9
"""Power of ten for `number_ns`, because a second has 10**9 ns."""
_RATES_OF_CLIENT: Final = re.compile(rb"\d+,[\d.e+-]+,[\d.e+-]+,(Gamma|Weibull)?,[\d.e+-]+,[\d.e+-]+\r?\n")
_LENGTHS_OF_CLIENT: Final = re.compile(rb'\{\s*"\d+":\s*\{\s*"\w+":\s*"\{')
_FIRST_OF_ARRAY: Final = re.compile(
    rb'\[\s*\{\s*("request_id":\s*\d+,\s*)?"timestamp":\s*[\d.e+-]+,\s*"data":\s*\{'
)
_FIRST_BYTES: Final = 4_096


class _Data(Struct):
    """Member `data` of a request: its numbers of tokens."""

    output_tokens: TokenCount
    input_tokens: TokenCount | None = None
    text_tokens: TokenCount | None = None
    image_tokens: list[TokenCount] = []
    audio_tokens: list[TokenCount] = []
    video_tokens: list[TokenCount] = []
    reason_ratio: float | None = None
    """Share of the output tokens that are reasoning."""


class _Request(Struct):
    """One request of a ServeGen trace."""

    timestamp: Number
    data: _Data
    """Numbers of tokens of the request."""
    request_id: int | None = None


def _rows(stream: BinaryIO, notes: list[str]) -> Iterator[TraceRow]:
    buffered: Any = stream if hasattr(stream, "peek") else io.BufferedReader(stream)
    begin = start_of(buffered.peek(_FIRST_BYTES))
    if _is_client(begin):
        raise FormatError(
            "the file has the parameters of a ServeGen client, not requests: generate a workload with "
            "ServeGen, and write its requests as JSON Lines"
        )
    is_array = begin.startswith(b"[")
    requests = _array_rows(buffered) if is_array else json_rows(buffered, _Request, notes)
    for request, number in requests:
        where = f"{'request' if is_array else 'line'} {number}"
        data = request.data
        texts = [n for n in (data.input_tokens, data.text_tokens) if n is not None]
        if not texts:
            raise FormatError(
                f"{where}: data.input_tokens: is missing, and data.text_tokens, too; one of them is required"
            )
        ratio = data.reason_ratio
        if ratio is not None and not 0 <= ratio <= 1:
            raise FormatError(f"{where}: data.reason_ratio: expected a share from 0 to 1, got {ratio:g}")
        yield {
            "id": None if request.request_id is None else str(request.request_id),
            "arrival_ns": number_ns(request.timestamp, _SECOND_PLACES, number, "timestamp"),
            "input_tokens": sum([*texts, *data.image_tokens, *data.audio_tokens, *data.video_tokens]),
            "output_tokens": data.output_tokens,
            "images": len(data.image_tokens) or None,
            "reasoning_tokens": None if ratio is None else round(data.output_tokens * ratio),
        }


def _array_rows(stream: BinaryIO) -> Iterator[tuple[_Request, int]]:
    for number, element in enumerate(read_elements(stream), 1):
        try:
            yield msgspec.convert(element, _Request, dec_hook=read_count), number
        except (ValueError, RecursionError) as exc:
            raise FormatError(str(error_of(exc, number)).replace("line", "request", 1)) from None


def _is_client(head: bytes) -> bool:
    """Return whether a file has the parameters of a client (its rates, or its lengths) and no requests."""
    return _RATES_OF_CLIENT.match(head) is not None or _LENGTHS_OF_CLIENT.match(head) is not None


def _sniff(head: bytes, name: str) -> bool:
    text = start_of(head)
    if _is_client(text):
        return True
    if text.startswith(b"["):
        return _FIRST_OF_ARRAY.match(text) is not None
    objects = first_objects(head)
    return bool(objects) and all(
        {"timestamp", "data"} <= one.keys() and _has_tokens(one["data"]) for one in objects
    )


def _has_tokens(data: object) -> bool:
    return isinstance(data, dict) and "output_tokens" in data


FORMAT: Final = TraceFormat(
    name="servegen",
    title="ServeGen requests (JSON Lines or JSON)",
    extensions=(".jsonl", ".json"),
    aspects=LENGTHS,
    sniff=_sniff,
    info={"arrivals": "trace"},
    rows=_rows,
)
