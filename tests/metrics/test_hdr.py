"""HdrHistograms: the library reads ours, and we read those of other tools, and nothing else."""

import io
from base64 import b64decode, b64encode
from itertools import chain
from struct import pack
from zlib import compress, decompress

import pytest
from hdrh.histogram import HdrHistogram
from hdrh.log import HistogramLogWriter
from hypothesis import given
from hypothesis import strategies as st

from llmtap.metrics import hdr
from llmtap.metrics.histogram import Histogram

DAY_NS = 86_400 * 10**9
BY_LIBRARY = "HISTFAAAACp4nJNpmSzMwMDAwQABzFCakYHBb8pEfwYG+w8QASYmJma2w/xMAHX0BSc="
"""0, 1, 2, 5, 5, 5 and 1,000 as the package hdrhistogram 0.10.8 encodes them (1 to a day in ns, 3 digits)."""


def payload(encoded: str) -> bytes:
    """Header and counts, without the compression, whose bytes depend on zlib."""
    return decompress(b64decode(encoded)[8:])


def test_the_encoding_is_that_of_the_library() -> None:
    encoded = hdr.encode(Histogram([0, 1, 2, 5, 5, 5, 1_000]))
    assert b64decode(encoded)[:4] == b64decode(BY_LIBRARY)[:4] == bytes.fromhex("1c849314")
    assert payload(encoded) == payload(BY_LIBRARY)
    assert list(hdr.values(BY_LIBRARY)) == [(0, 1), (1, 1), (2, 1), (5, 3), (1_000, 1)]


@given(st.lists(st.integers(0, 80_000 * 10**9), max_size=600))
def test_the_values_are_read_again_within_their_error(values: list[int]) -> None:
    found = [value for value, n in hdr.values(hdr.encode(Histogram(values))) for _ in range(n)]
    assert found == pytest.approx(sorted(values), rel=0.0025, abs=1)


@given(st.lists(st.integers(-5, 10**15), max_size=60), st.lists(st.integers(0, 10**14), max_size=60))
def test_the_library_reads_and_merges_what_we_encode(ours: list[int], theirs: list[int]) -> None:
    merged = HdrHistogram(1, DAY_NS, 3)
    for values in (ours, theirs):
        merged.add(HdrHistogram.decode(hdr.encode(Histogram(values))))
    recorded = HdrHistogram(1, DAY_NS, 3)
    for value in ours + theirs:
        recorded.record_value(min(max(value, 0), DAY_NS))
    assert merged.get_total_count() == recorded.get_total_count() == len(ours + theirs)
    for percent in (1, 50, 90, 100):
        expected = recorded.get_value_at_percentile(percent)
        assert merged.get_value_at_percentile(percent) == pytest.approx(expected, rel=0.0025, abs=1)


@given(
    st.lists(st.integers(1, 10**12), max_size=60),
    st.integers(1, 5),
    st.sampled_from((1, 1_000)),
    st.sampled_from((10**12, 1 << 62)),
)
def test_a_histogram_of_any_precision_and_range_is_read(
    values: list[int], digits: int, lowest: int, highest: int
) -> None:
    written = HdrHistogram(lowest, highest, digits)
    for value in values:
        written.record_value(value)
    found = [value for value, n in hdr.values(written.encode().decode()) for _ in range(n)]
    assert found == pytest.approx(sorted(values), rel=10**-digits, abs=lowest)


def encoded(
    counts: bytes = b"\x02",
    *,
    outer: int = 0x1C849314,
    inner: int = 0x1C849313,
    offset: int = 0,
    digits: int = 3,
    lowest: int = 1,
    highest: int = 10**9,
    ratio: float = 1.0,
    more: int = 0,
) -> str:
    head = pack(">iiiiqqd", inner, len(counts) + more, offset, digits, lowest, highest, ratio)
    packed = compress(head + counts)
    return b64encode(pack(">ii", outer, len(packed)) + packed).decode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "?",
        "AAAA",
        encoded(outer=0x1C849303),
        encoded(inner=0x1C849303 - 1),
        encoded(inner=0x1C849301),
        encoded(digits=0),
        encoded(digits=6),
        encoded(lowest=0),
        encoded(lowest=-1),
        encoded(lowest=10**9),
        encoded(highest=-1),
        encoded(offset=1),
        encoded(ratio=0.5),
        encoded(more=1),
        encoded(b"\x80"),
        encoded(b"\xff\xff\xff\x7f\x02"),
        encoded()[:-8],
        encoded(b"\x02" * (8 << 20)),
        encoded(b"\x02" * (2 << 20)),
    ],
)
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HdrHistogram"):
        list(hdr.values(text))


@given(st.binary(max_size=40), st.integers(1, 5), st.integers(1, 1 << 62), st.integers(1, 1 << 62))
def test_nothing_that_a_file_has_is_more_than_an_error(
    counts: bytes, digits: int, low: int, high: int
) -> None:
    try:
        assert all(n > 0 for _, n in hdr.values(encoded(counts, digits=digits, lowest=low, highest=high)))
    except ValueError:
        pass


def test_a_log_of_another_tool_is_merged_by_tag() -> None:
    """Three intervals of a tool that records microseconds with two digits."""
    out = io.StringIO()
    writer = HistogramLogWriter(out)
    writer.output_log_format_version()
    writer.output_base_time(0)
    writer.output_legend()
    parts = {"": [[100, 200], [300_000]], "get": [[50]]}
    text = ""
    for tag, intervals in parts.items():
        for values in intervals:
            histogram = HdrHistogram(1, 3_600_000_000, 2)
            for value in values:
                histogram.record_value(value)
            writer.output_interval_histogram(histogram, 1.0, 2.0)
        lines = out.getvalue().splitlines()
        out.seek(0)
        out.truncate()
        text += "".join(f"Tag={tag},{line}\n" if tag and line[0].isdigit() else f"{line}\n" for line in lines)
    merged = hdr.read_log(text.splitlines(), 1_000)
    assert {tag: histogram.n for tag, histogram in merged.items()} == {"": 3, "get": 1}
    assert [value for value, _ in merged[""].buckets()] == pytest.approx([1e5, 2e5, 3e8], rel=0.01)
    assert merged["get"].max == pytest.approx(50_000, rel=0.01)
    with pytest.raises(ValueError, match=r"^line 2: expected start, length"):
        hdr.read_log(["#", "1,2,3"], 1)
    with pytest.raises(ValueError, match=r"^line 1: .* must have the length that its header declares"):
        hdr.read_log([f"0.0,1.0,2.0,{BY_LIBRARY[:-8]}"], 1)


def test_a_log_that_we_write_has_the_values_of_its_histograms() -> None:
    times = {"ttft": [5, 7_000_000, 9_000_000], "e2e": [80_000_000]}
    text = hdr.log_text({name: hdr.encode(Histogram(values)) for name, values in times.items()}, 2.5)
    assert "Tag=ttft,0.000,2.500," in text
    merged = hdr.read_log(text.splitlines(), 1)
    found = {name: [value for value, _ in histogram.buckets()] for name, histogram in merged.items()}
    assert list(found) == list(times)
    assert list(chain(*found.values())) == pytest.approx(list(chain(*times.values())), rel=0.0025)
