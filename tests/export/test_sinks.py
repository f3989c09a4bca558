import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.exchange.trace_context import TraceParent, parse_trace_parent

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("text", "flags", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", 1, True),
        (f"00-{TRACE}-{SPAN}-00", 0, False),
        (f" 00-{TRACE}-{SPAN}-03\t", 3, True),
        (f"cc-{TRACE}-{SPAN}-fe", 254, False),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", 1, True),
    ],
)
def test_a_valid_traceparent_is_read(text: str, flags: int, sampled: bool) -> None:
    parent = parse_trace_parent(text)
    assert parent == TraceParent(TRACE, SPAN, flags)
    assert parent.sampled is sampled


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "x",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01x",
        f"00_{TRACE}_{SPAN}_01",
        f"cc-{TRACE}-{SPAN}-01.more",
    ],
)
def test_what_is_not_valid_counts_as_none(text: str | None) -> None:
    assert parse_trace_parent(text) is None


@given(st.text())
def test_no_text_is_too_odd(text: str) -> None:
    parent = parse_trace_parent(text)
    assert parent is None or len(parent.trace_id) == 32
