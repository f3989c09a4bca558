"""Invariant: lines and their places do not depend on how the bytes were cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.protocol.sse import LineParser


def parse(
    body: bytes, edges: list[int], line_bytes_max: int = 1 << 20
) -> tuple[list[tuple[int, int, bytes]], int]:
    parser = LineParser(line_bytes_max)
    cuts = [0, *sorted(e % (len(body) + 1) for e in edges), len(body)]
    events = [e for a, b in pairwise(cuts) for e in parser.feed(body[a:b])] + parser.close()
    assert parser.offset == len(body)
    return [(e.start, e.end, e.data or b"") for e in events], parser.skipped


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        (b"", []),
        (b"{}\n", [(0, 3, b"{}")]),
        (b"{}\n[1]", [(0, 3, b"{}"), (3, 6, b"[1]")]),
        (b"{}\r\n{}\r\n", [(0, 4, b"{}"), (4, 8, b"{}")]),
        (b"\n{}\n", [(0, 1, b""), (1, 4, b"{}")]),
        ('{"a":"\u2028\u0085"}\n'.encode(), [(0, 14, '{"a":"\u2028\u0085"}'.encode())]),
        (b"a\rb\n", [(0, 4, b"a\rb")]),
    ],
)
def test_a_line_ends_in_lf(body: bytes, lines: list[tuple[int, int, bytes]]) -> None:
    for edges in ([], list(range(len(body)))):
        assert parse(body, edges) == (lines, 0)


@given(st.lists(st.sampled_from([b"{}", b"\n", b"\r\n", b"x" * 9, b"\r"]), max_size=12).map(b"".join),
       st.lists(st.integers(0, 99), max_size=6))  # fmt: skip
def test_every_cut_gives_the_same_lines(body: bytes, edges: list[int]) -> None:
    assert parse(body, edges, 12) == parse(body, [], 12)


def test_a_line_that_is_too_long_is_passed_over() -> None:
    body = b"x" * 30 + b"\n{}\n" + b"y" * 30
    for edges in ([], [5, 20, 31], list(range(len(body)))):
        assert parse(body, edges, 10) == ([(31, 34, b"{}")], 2)
