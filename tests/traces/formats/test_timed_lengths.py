"""The same fields, read as different tools read them."""

import io

import pytest

from llmtap.traces.formats import timed_lengths
from llmtap.traces.formats.timed_lengths import LengthReading, looks
from tests.support.trace_files import rows

DATA = b'{"timestamp": 1.5, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]}\n'


@pytest.mark.parametrize(
    ("places", "sizes", "ns", "size"),
    [(6, (512,), 1_500_000, 512), (9, (512,), 1_500_000_000, 512), (9, (64, 16), 1_500_000_000, 16)],
)
def test_unit_and_block_size_are_the_readers(places: int, sizes: tuple[int, ...], ns: int, size: int) -> None:
    reading = LengthReading(name="f", places=places, spelling="short", sizes=sizes)
    source = timed_lengths.read_lengths(io.BytesIO(DATA), reading)
    assert rows(source.batches, "arrival_ns", "block_size") == [(ns, size)]
    assert source.info.style["timestamp"] == "float"


def test_fractions_and_durations_tell_seconds() -> None:
    assert looks(DATA) == (True, True)
    assert looks(DATA.replace(b"1.5", b"1")) == (True, False)
    assert looks(DATA.replace(b"1.5", b"1").replace(b"hash_ids", b"duration")) == (True, True)
    assert looks(DATA.replace(b"timestamp", b"time")) == (False, False)
