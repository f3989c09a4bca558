"""A message has exactly the tokens it was to have, always the same for its key, and begins like no other."""

import ast
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.workload.prompts.prose import (
    LANGUAGES,
    Code,
    Document,
    ProseWords,
    ProseWriter,
    fitted_text,
    program,
    prose,
)
from llmtap.workload.prompts.text import count_tokens

WRITERS: list[ProseWriter] = [ProseWords(), Document(), Code()]
TEXT = st.text(alphabet="the and AZ09 ,.'\n\té漢😀#-", max_size=80)


@given(st.sampled_from(WRITERS), st.integers(0, 1_500), st.text(max_size=6))
def test_a_message_has_exactly_its_tokens(writer: ProseWriter, tokens: int, key: str) -> None:
    text = writer.text(tokens, key, "topic")
    assert count_tokens(text) == tokens
    assert text == writer.text(tokens, key, "topic")


@given(st.integers(0, 200), st.integers(0, 200), st.text(max_size=4))
def test_a_longer_text_begins_with_the_shorter_one(a: int, b: int, key: str) -> None:
    short, long = sorted((a, b))
    assert prose(long, key).startswith(prose(short, key))


@given(TEXT, st.integers(0, 120), TEXT)
def test_any_text_can_be_cut_or_made_longer(text: str, tokens: int, more: str) -> None:
    fitted = fitted_text(text, tokens, more=more)
    assert count_tokens(fitted) == tokens
    if count_tokens(text) == tokens and more:
        assert fitted == text


def test_what_is_cut_is_the_texts_own_beginning() -> None:
    assert fitted_text("one two three four", 2) == "one two"
    assert fitted_text("one two", 4) == "one two.."
    assert fitted_text("one two", 4, more=" three four five") == "one two three four"
    assert fitted_text("one ", 3) == "one..", "a full stop would join the space"


def output(key: str, language: str, parts: int) -> str:
    return "".join(text for text, _ in islice(program(key, language), parts))


@pytest.mark.parametrize("key", ["a", "b", "42/7", ""])
def test_python_is_python(key: str) -> None:
    tree = ast.parse(output(key, "python", 40))
    assert len(tree.body) == 39, "a comment, and a function each"


@pytest.mark.parametrize("language", LANGUAGES)
def test_brackets_close_and_files_differ(language: str) -> None:
    texts = [output(f"{i}", language, 12) for i in range(50)]
    for text in texts:
        for opening, closing in ("()", "[]", "{}"):
            assert text.count(opening) == text.count(closing)
    assert len({text.partition("\n")[0] for text in texts}) == 50
