"""However the bytes of a file are cut, the elements are those that json.loads finds."""

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.traces.text import elements
from llmtap.traces.text.elements import ElementsError, ElementSplitter, read_elements

ENTRIES = ("log", "entries")
CASES: list[tuple[str, bytes, tuple[str, ...], list[Any]]] = [
    ("empty", b"[]", (), []),
    ("empty with blanks", b" \n[ \r\n\t] \n", (), []),
    ("numbers and words", b"[1, -2.5e3,true , null]", (), [1, -2500.0, True, None]),
    ("strings with brackets", rb'["a]b", "{\"x\": [", "\\", "\\\"]"]', (), ["a]b", '{"x": [', "\\", '\\"]']),
    ("strings with commas", b'["a,b","c:d"]', (), ["a,b", "c:d"]),
    ("nested", b'[{"a": [1, {"b": "]"}], "c": {}}, [], [[]], {}]', (),
     [{"a": [1, {"b": "]"}], "c": {}}, [], [[]], {}]),
    ("byte order mark", b"\xef\xbb\xbf[1]", (), [1]),
    ("an array in an object", b'{"a": [0], "log": {"x": {"entries": [9]}, "entries": [1, {"y": 2}]}} ',
     ENTRIES, [1, {"y": 2}]),
    ("such a key elsewhere", b'{"entries": [5], "b": {"log": {"entries": 6}}, "log": {"entries": [7]}}',
     ENTRIES, [7]),
    ("the same key as a word", b'{"a": "log", "log" : 3, "data":[{"log": []}]}', ("data",), [{"log": []}]),
    ("an escaped key", rb'{"d\u0061ta": [1]}', ("data",), [1]),
    ("the second of two such objects", b'{"log": {"a": 1}, "log": {"entries": [1]}}', ENTRIES, [1]),
    ("keys inside an array do not count", b'[{"data": [2]}]', (), [{"data": [2]}]),
    ("long strings before it", b'{"x": "' + b"a]\\\"" * 500 + b'", "data": [1]}', ("data",), [1]),
]  # fmt: skip


def split(data: bytes, path: tuple[str, ...], sizes: list[int]) -> list[Any]:
    splitter, out, at = ElementSplitter(path), [], 0
    for size in [*sizes, len(data)]:
        out += splitter.feed(data[at : at + size])
        at += size
    splitter.close()
    assert splitter.count == len(out)
    return [json.loads(element) for element in out]


@pytest.mark.parametrize(("data", "path", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_every_cutting_gives_the_same_elements(
    data: bytes, path: tuple[str, ...], expected: list[Any]
) -> None:
    assert split(data, path, []) == expected
    assert split(data, path, [1] * len(data)) == expected
    for cut in range(min(len(data), 200)):
        assert split(data, path, [cut, 0]) == expected


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\[]{},: \u00e9\n'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(
    values=st.lists(VALUES, max_size=6),
    path=st.lists(st.sampled_from(["log", "entries", 'a"', "é"]), max_size=3).map(tuple),
    beside=VALUES,
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
    sizes=st.lists(st.integers(0, 9), max_size=80),
)
def test_what_json_wrote_is_found_again(
    values: list[Any],
    path: tuple[str, ...],
    beside: Any,
    indent: int | None,
    ascii_only: bool,
    sizes: list[int],
) -> None:
    document: Any = values
    for key in reversed(path):
        document = {"beside": beside, key: document, "behind": beside}
    data = json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode()
    assert split(data, path, sizes) == values


@pytest.mark.parametrize(
    ("data", "path", "problem"),
    [
        (b"", (), "no JSON array"),
        (b"  ", (), "no JSON array"),
        (b"\xef\xbb", (), "no JSON array"),
        (b"x[1]", (), "byte 0"),
        (b"{}", (), "a JSON object where an array"),
        (b"[1] 2", (), "there is more behind"),
        (b"[1,]", (), "element 1 is empty"),
        (b"[,1]", (), "element 0 is empty"),
        (b"[1}", (), "byte 2"),
        (b'[{"a": 1}, {"b', (), "inside element 1"),
        (b'["a\\', (), "inside element 0"),
        (b"[", (), "inside element 0"),
        (b'{"a": 1}', ("data",), "no JSON array at data"),
        (b'{"log": {"a": [1]}}', ("log", "entries"), "no JSON array at log.entries"),
        (b"[1]", ("data",), "no JSON array at data"),
        (b'{"data": {"x": [1]}}', ("data",), "no JSON array at data"),
    ],
)
def test_what_is_no_such_array_is_told(data: bytes, path: tuple[str, ...], problem: str) -> None:
    for sizes in ([], [1] * len(data)):
        with pytest.raises(ElementsError, match=problem):
            split(data, path, sizes)


def test_an_element_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "ELEMENT_BYTES_MAX", 1_000)
    splitter = ElementSplitter()
    with pytest.raises(ElementsError, match="element 0 at byte 1 is longer"):
        for data in [b'["'] + [b"x" * 100] * 20:
            splitter.feed(data)


def test_what_went_by_is_not_held() -> None:
    splitter = ElementSplitter(("log", "entries"))
    splitter.feed(b'{"pages": ["')
    for _ in range(100):
        splitter.feed(b"p" * 1_000)
    splitter.feed(b'"], "log": {"entries": [')
    for _ in range(100):
        splitter.feed(b'{"a": "' + b"x" * 1_000 + b'"},')
    assert len(splitter._buffer) < 2_000


def test_a_file_is_read_by_and_by() -> None:
    data = json.dumps([{"n": i, "text": "x" * 1_000} for i in range(1_000)]).encode()
    found = [json.loads(element) for element in read_elements(io.BytesIO(data))]
    assert [value["n"] for value in found] == list(range(1_000))
