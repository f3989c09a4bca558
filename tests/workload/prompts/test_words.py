"""The engine's tokenizer against the package `tokenizers`: whatever the text, both count and cut the same.

And whatever is said has exactly the tokens that it was to have.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.workload.prompts.text import VOCABULARY, count_tokens, cut, say, token_ids, tokenizer_json

tokenizers = pytest.importorskip("tokenizers", reason="the extra `tokenizers` is not installed")


@pytest.fixture(scope="module")
def judge() -> Any:
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json()))


@given(st.one_of(st.text(), st.text(alphabet="the and AZ09 ,.'\n\té漢😀", max_size=60)))
def test_any_text_has_the_same_tokens_in_both_and_comes_back(judge: Any, text: str) -> None:
    encoded = judge.encode(text)
    assert token_ids(text) == encoded.ids
    assert count_tokens(text) == len(encoded.ids)
    assert "".join(cut(text)) == text
    assert judge.decode(encoded.ids) == text


@given(st.integers(0, 9_000), st.text(max_size=5))
def test_what_is_said_has_exactly_the_tokens_it_was_to_have(judge: Any, count: int, key: str) -> None:
    said = say(count, key)
    assert len(said) == count
    assert judge.encode("".join(said)).ids == [i for token in said for i in token_ids(token)]
    assert len(judge.encode("".join(said)).ids) == count
    assert say(count, key) == said
    assert list(say(count // 2, key)) == list(said[: count // 2]), "a shorter answer begins alike"


def test_keys_tell_texts_apart() -> None:
    assert len({"".join(say(50, f"key {i}")) for i in range(100)}) > 50


def test_an_english_sentence_is_about_a_token_a_word() -> None:
    text = "It was still early in the morning, and the river ran slow and cold under the trees."
    assert 17 <= count_tokens(text) <= 22


def test_the_vocabulary_is_small_and_every_byte_is_in_it() -> None:
    assert 256 < len(VOCABULARY) < 4_000
    assert sorted(VOCABULARY.values()) == list(range(len(VOCABULARY)))
