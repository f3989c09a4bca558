"""A body becomes one text; what that loses is counted."""

import pytest

from llmtap.traces.format import TraceWritten
from llmtap.traces.prompts import PromptTexts


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ('{"prompt": "a"}', "a"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "a"),
        (
            '{"system": "s", "messages": [{"role": "user", "content": "a"}, {"role": "x", "content": ""}]}',
            "s\n\na",
        ),
        ('{"messages": [{"role": "user", "content": null}]}', None),
        ('{"input": [1, 2]}', None),
        ("[]", None),
        ("", None),
    ],
)
def test_the_texts_are_joined_in_their_order(body: str, prompt: str | None) -> None:
    assert PromptTexts().of(body) == prompt


def test_what_is_lost_is_counted() -> None:
    texts, written = PromptTexts(), TraceWritten(rows=3)
    for body in ("[]", '{"prompt": "a", "tools": [{}]}', '{"system": "s", "prompt": "a"}'):
        texts.of(body)
    texts.report(written)
    assert (written.rows, written.dropped) == (2, {"no text in the body": 1})
    assert written.notes == [
        "1 prompts are several messages, joined by empty lines",
        "1 prompts lost tools, or parts that are not text",
    ]
