"""Write and read HdrHistogram's encoding V2 and its logs (`.hlog`), to exchange histograms with other tools.

`encode` writes a `Histogram`; `values` reads an encoded histogram of any range and precision. `log_text` and
`read_log` write and read logs, in which each line has the histogram of an interval. The package
`hdrhistogram` is not used, because it has no wheels for some machines and does not limit the size of
decompressed data (docs/decisions.md); the tests compare this code with it.

Source: HdrHistogram's `encodeIntoCompressedByteBuffer`, V2, and the format of HistogramLogWriter 1.3.
"""

import re
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from struct import Struct
from struct import error as StructError
from typing import Final
from zlib import compress, decompressobj
from zlib import error as zlib_error

from llmtap.metrics.histogram import Histogram

_HIGHEST: Final = 86_400 * 10**9
"""Highest value that `encode` writes: a day in ns."""
_DIGITS: Final = 3
"""Number of significant decimal digits of the histograms that `encode` writes: an error of 0.1 %."""
_INNER_COOKIE: Final = 0x1C849313
"""Magic number at the start of the decompressed data; `_OUTER_COOKIE`: of the compressed data."""
_OUTER_COOKIE: Final = 0x1C849314
_BYTES_MAX: Final = 4 << 20
"""Maximum size of the decompressed counts in bytes, against decompression bombs. An ordinary histogram has at
most 38,000 buckets with nine bytes each."""
_HEAD: Final = Struct(">iiiiqqd")
"""Header of the counts: cookie, length of the payload, offset, significant digits, lowest, highest, ratio."""
_COMPRESSED: Final = Struct(">ii")
"""Header of the compressed data: cookie, length of the data."""
_LINE: Final = re.compile(r"(?:Tag=([^,\s]*),)?[\d.]+,([\d.]+),[\d.]+,(HIST[A-Za-z0-9+/=]+)")
LOG_LINE_BYTES_MAX: Final = 8 << 20
TAGS_MAX: Final = 1_000
"""Maximum number of tags in a log that is accepted: each tag needs a histogram of some KB in memory."""


def encode(histogram: Histogram) -> str:
    """Return the counts as a compressed HdrHistogram V2 in base64.

    Values are whole ns up to a day, with three significant digits; negative values count as 0. Each value is
    encoded as the middle of its bucket in `histogram`, so the error of HdrHistogram's buckets (0.1 %) is
    added to the error of these buckets.
    """
    shape = _Buckets.of(1, _HIGHEST, _DIGITS)
    counts: Counter[int] = Counter()
    for value, count in histogram.buckets():
        counts[shape.index(min(max(round(value), 0), _HIGHEST))] += count
    payload, reached = bytearray(), 0
    for index in sorted(counts):
        if zeros := index - reached:
            payload += _zigzag_bytes(-zeros if zeros > 1 else 0)
        payload += _zigzag_bytes(counts[index])
        reached = index + 1
    head = _HEAD.pack(_INNER_COOKIE, len(payload), 0, _DIGITS, 1, _HIGHEST, 1.0)
    packed = compress(head + payload)
    return b64encode(_COMPRESSED.pack(_OUTER_COOKIE, len(packed)) + packed).decode()


def values(text: str) -> Iterator[tuple[float, int]]:
    """Yield the middle of each bucket of an encoded histogram, ascending, with the number of its values.

    Raises ValueError if the text is no HdrHistogram V2, or too large.
    """
    shape, payload = _decode(text)
    last = shape.index(shape.highest)
    index = at = 0
    while at < len(payload):
        number = shift = 0
        more = True
        while more:
            if at >= len(payload):
                raise ValueError("the HdrHistogram is cut off in the middle of a count: write the log again")
            byte = payload[at]
            more = byte > 0x7F and shift < 56
            number |= (byte & 0x7F if more else byte) << shift
            shift, at = shift + 7, at + 1
        number = (number >> 1) ^ -(number & 1)
        if number <= 0:
            index += -number or 1
            continue
        if index > last:
            raise ValueError(
                f"the HdrHistogram has a value above its maximum, {shape.highest}: write it again"
            )
        yield shape.middle(index), number
        index += 1


@dataclass(frozen=True, slots=True)
class _Buckets:
    """Buckets of a histogram: 2**half_exponent buckets in each octave, and twice that number in the first."""

    unit_exponent: int
    """Binary logarithm of the smallest difference between two values."""
    half_exponent: int
    """Binary logarithm of the number of buckets in an octave."""
    highest: int
    """Largest value that has a bucket."""

    @classmethod
    def of(cls, lowest: int, highest: int, digits: int) -> "_Buckets":
        return cls(lowest.bit_length() - 1, (2 * 10**digits - 1).bit_length() - 1, highest)

    def index(self, value: int) -> int:
        """Return the index of the bucket that counts a value."""
        value >>= self.unit_exponent
        octave = max(0, value.bit_length() - self.half_exponent - 1)
        return (octave << self.half_exponent) + (value >> octave)

    def middle(self, index: int) -> float:
        """Return the mean of the smallest and the largest value of a bucket."""
        octave = max(0, (index >> self.half_exponent) - 1)
        step = octave + self.unit_exponent
        return ((index - (octave << self.half_exponent)) << step) + ((1 << step) - 1) / 2


def _zigzag_bytes(number: int) -> bytes:
    """Encode a number as ZigZag LEB128, except that the ninth byte has 8 bits, as in HdrHistogram."""
    remaining = number << 1 if number >= 0 else (-number << 1) - 1
    out = bytearray()
    while remaining > 0x7F and len(out) < 8:
        out.append(remaining & 0x7F | 0x80)
        remaining >>= 7
    out.append(remaining)
    return bytes(out)


def _decode(text: str) -> tuple[_Buckets, bytes]:
    """Return the buckets and the encoded counts. Raises ValueError unless both headers are valid for V2."""
    try:
        raw = b64decode(text, validate=True)
        outer, size = _COMPRESSED.unpack_from(raw)
        inflater = decompressobj()
        body = inflater.decompress(raw[_COMPRESSED.size :], _BYTES_MAX)
        inner, length, offset, digits, lowest, highest, ratio = _HEAD.unpack_from(body)
    except (ValueError, StructError, zlib_error) as exc:
        raise ValueError(f"expected a compressed HdrHistogram in base64: {exc}") from None
    if (outer, inner) != (_OUTER_COOKIE, _INNER_COOKIE):
        raise ValueError(f"expected a compressed HdrHistogram V2, got the codes {outer:#x} and {inner:#x}")
    if (offset, ratio) != (0, 1.0):
        raise ValueError(
            f"the HdrHistogram has the offset {offset} and the ratio {ratio:g}; only offset 0 and ratio 1 can"
            " be read"
        )
    if not 1 <= digits <= 5 or not 1 <= lowest <= highest // 2:
        raise ValueError(
            f"the HdrHistogram has {digits} significant digits and the range {lowest} to {highest}; expected"
            " 1 to 5 digits, a lowest value >= 1, and a highest value of at least twice the lowest"
        )
    if size != len(raw) - _COMPRESSED.size or not inflater.eof or length != len(body) - _HEAD.size:
        raise ValueError(
            "the HdrHistogram must have the length that its header declares: write the log again"
        )
    return _Buckets.of(lowest, highest, digits), body[_HEAD.size :]


def log_text(histograms: Mapping[str, str], seconds: float) -> str:
    """Return a log with a line for each encoded histogram: its name as tag, and `seconds` as interval."""
    lines = ["#[Histogram log format version 1.3]", "#[values in nanoseconds, written by llmtap]"]
    lines.append('"StartTimestamp","Interval_Length","Interval_Max","Interval_Compressed_Histogram"')
    for tag, text in histograms.items():
        # By convention, the maximum in a log line is in ms, while the values are in ns.
        highest = max((value for value, _ in values(text)), default=0.0)
        lines.append(f"Tag={tag},0.000,{seconds:.3f},{highest / 1e6:.3f},{text}")
    return "\n".join(lines) + "\n"


def read_log(lines: Iterable[str], ns_per_unit: int) -> dict[str, Histogram]:
    """Return the histograms of a log by tag ("" without a tag), in ns, each merged over all intervals.

    Raises ValueError, with the line number, for an invalid line.
    """
    merged: dict[str, Histogram] = {}
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line[0] in '#"':
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"line {number}: expected start, length, maximum and an HdrHistogram in base64")
        tag = match[1] or ""
        if tag not in merged and len(merged) >= TAGS_MAX:
            raise ValueError(f"line {number}: the log has more than {TAGS_MAX:,} tags: split it by tags")
        histogram = merged.setdefault(tag, Histogram())
        try:
            for value, count in values(match[3]):
                histogram.record_copies(round(value * ns_per_unit), count)
        except ValueError as exc:
            raise ValueError(f"line {number}: {exc}") from None
    return merged
