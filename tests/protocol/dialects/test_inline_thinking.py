"""Invariant: however an answer is cut into pieces, the same text comes out as reasoning and as content."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.protocol.dialects.openai_chat import InlineThinking


def taken_apart(*pieces: str) -> tuple[str, str]:
    thinking = InlineThinking()
    parts = [*(thinking.feed(p) for p in pieces), thinking.close()]
    return "".join(r for r, _ in parts), "".join(c for _, c in parts)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("", "", ""),
        ("<think>a</think>b", "a", "b"),
        ("\n <thinking>a</thinking>\n\nb", "a", "\n \n\nb"),
        ("<thought>a</think>b</thought>c", "a</think>b", "c"),
        ("<think>never closed", "never closed", ""),
        ("<think>almost</thin", "almost</thin", ""),
        ("<thin", "", "<thin"),
        ("say <think>b</think>", "", "say <think>b</think>"),
        ("<think>a</think><think>b</think>", "a", "<think>b</think>"),
    ],
)
def test_what_is_thought_and_what_is_said(text: str, reasoning: str, content: str) -> None:
    assert taken_apart(text) == (reasoning, content)
    assert taken_apart(*text) == (reasoning, content), "letter by letter"


pieces = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<thought>", "</thought>", "<", "</", "th", "ink>", " ", "\n", "a"]
    )
).map("".join)


@given(pieces)
def test_what_is_held_back_is_shorter_than_a_marker(text: str) -> None:
    thinking = InlineThinking()
    out = 0
    for fed, letter in enumerate(text, 1):
        out += sum(map(len, thinking.feed(letter)))
        assert fed - out <= len("<thinking></thinking>")
