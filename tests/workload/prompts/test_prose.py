"""A message has exactly the tokens it was to have, always the same for its key, and begins like no other."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.errors import ConfigError
from llmtap.workload.programs import Code
from llmtap.workload.prompts.prose import Document, FileText, ProseWords, ProseWriter, fitted_text, prose
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


def test_a_file_is_said_from_a_line_of_the_keys_choice(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("".join(f"Line {i} of the book, and no other one.\n\n" for i in range(300)))
    writer = FileText(file, "content.file")
    for tokens in (0, 1, 7, 8, 9, 50, 5_000):
        assert count_tokens(writer.text(tokens, "a", "")) == tokens
    assert writer.text(60, "a", "") != writer.text(60, "b", "")
    assert "of the book, and no other one." in writer.text(60, "a", "")
    told = writer.describe()
    assert (told["file"], told["lines"], len(str(told["sha256"]))) == ("book.txt", 300, 64)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b" \n\n", "has no text"), (b"ab\xff", "is not UTF-8: byte 2"), (None, "cannot be read")],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes | None, problem: str) -> None:
    file = tmp_path / "book.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        FileText(file, "content.file in x.toml")
    assert caught.value.place == "content.file in x.toml"
