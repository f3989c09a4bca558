"""Invariant: every event is one token, and a special one is no text."""

from typing import Any

import pytest

from llmtap.protocol.delta import TokenSource
from llmtap.protocol.dialects.registry import TABLES
from tests.protocol.dialects.events import encode, event, told

Tgi = TABLES["tgi.native"]


def token(text: Any, *, special: bool = False, **more: Any) -> dict[str, Any]:
    one = {"id": 5, "text": text, "logprob": -0.1, "special": special}
    return {"index": 2, "token": one, "generated_text": None, "details": None, **more}


ONE = {"tokens": 1, "token_source": TokenSource.TOKEN_IDS, "output": True, "choices": (0,)}
TEXT = {"is": "content", "content": True, "text": "Hi", **ONE}
DETAILS = {"finish_reason": "eos_token", "generated_tokens": 5, "seed": None, "input_length": 6}
ENDED = {
    "also": ["usage"],
    "finish_reason": "eos_token",
    "usage": DETAILS,
    "counts": {"input": 6, "output": 5, "reasoning": None, "cached": None},
}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (token("Hi"), TEXT),
        (token(" "), {"is": "content", "blank": True, "text": " ", **ONE}),
        (token("</s>", special=True), {"is": "metadata", **ONE}),
        (token("</s>", special=True, details=DETAILS), {"is": "metadata", **ONE, **ENDED}),
        (token("Hi", details=DETAILS, generated_text="Hi"), {**TEXT, **ENDED}),
        (token("Hi", details={"finish_reason": "length"}), {**TEXT, "finish_reason": "length"}),
        (
            {"error": "it broke", "error_type": "generation"},
            {"is": "error", "error_type": "generation", "error_message": "it broke"},
        ),
        ({"x": 1}, {"is": "metadata", "parsed": False}),
        (b"{", {"is": "metadata", "parsed": False}),
    ],
)
def test_what_an_event_says(value: Any, said: dict[str, Any]) -> None:
    assert told(Tgi().read_event(event(value))) == said


def test_a_text_that_repeats_the_tokens_is_no_output() -> None:
    reader = Tgi()
    assert reader.read_event(event(token("Hi"))).output
    whole = {"token": None, "generated_text": "Hi", "details": DETAILS}
    assert told(reader.read_event(event(whole))) == {"is": "metadata", **ENDED}


def test_a_whole_answer() -> None:
    assert told(Tgi().read_body(b'{"generated_text":"Hi"}')) == {
        "is": "content",
        "output": True,
        "content": True,
        "text": "Hi",
        "choices": (0,),
    }
    details = DETAILS | {"input_length": None, "prefill": [{"id": 1}, {"id": 2}], "tokens": [{"id": 3}]}
    said = told(Tgi().read_body(encode({"generated_text": "Hi", "details": details})))
    assert said["counts"]["input"] == 2
    assert (
        told(Tgi().read_body(b'{"error":"too long","error_type":"validation"}'))["error_type"] == "validation"
    )
    assert [Tgi().read_body(b).parsed for b in (b"[]", b"{}", b"3", b"[3]")] == [False] * 4
