"""JSON whose value would take much memory is refused before it is decoded; a text with its signs is not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.protocol.dialects.openai_shapes import read_json
from llmtap.protocol.json_memory import (
    VALUE_BYTES_MAX,
    JsonTooLarge,
    bounded_decoder,
    check_memory,
    exact_value_bytes,
    value_bytes,
)

N = 4_000_000
DENSE = {
    "objects": b"[" + b"{}," * N + b"1]",
    "arrays": b"[" + b"[]," * N + b"1]",
    "strings": b"[" + b'"ab",' * N + b"1]",
    "numbers": b"[" + b"1," * N + b"1]",
}


@pytest.mark.parametrize("name", DENSE)
def test_a_value_that_takes_too_much_memory_is_refused(name: str) -> None:
    with pytest.raises(JsonTooLarge):
        check_memory(DENSE[name])
    assert read_json(DENSE[name]) is None
    with pytest.raises(ValueError, match="MiB of memory"):
        bounded_decoder()(DENSE[name])


def test_a_text_may_hold_as_many_brackets_and_commas_as_it_likes() -> None:
    text = '{[,\\"' * N
    data = json.dumps({"a": text}).encode()
    assert value_bytes(data) > VALUE_BYTES_MAX > exact_value_bytes(data)
    assert bounded_decoder(dict[str, str])(data) == {"a": text}


@given(st.recursive(st.text('{[,"\\x'), lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=20))
def test_signs_within_strings_do_not_count(value: object) -> None:
    def strip(one: object) -> object:
        if isinstance(one, dict):
            return {str(i): strip(v) for i, v in enumerate(one.values())}
        return [strip(v) for v in one] if isinstance(one, list) else "x"

    data = json.dumps(value).encode()
    assert exact_value_bytes(data) == value_bytes(json.dumps(strip(value)).encode())
