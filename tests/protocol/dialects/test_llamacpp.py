"""Invariant: tokens come from the best sign that an event has: ids, probabilities, a running count."""

from typing import Any

import pytest

from llmtap.protocol.delta import TokenSource
from llmtap.protocol.dialects.llamacpp import LlamaCpp
from tests.protocol.dialects.events import encode, event, told


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"index": 0, "content": text, "stop": False, **more}


TEXT = {"is": "content", "output": True, "content": True, "choices": (0,), "text": "Hi"}
IDS = {"token_source": TokenSource.TOKEN_IDS}
TIMINGS = {
    "cache_n": 4,
    "prompt_ms": 20.5,
    "predicted_n": 5,
    "predicted_ms": 60.25,
    "predicted_per_token_ms": 12,
}
LAST = {"stop": True, "tokens_predicted": 5, "tokens_evaluated": 7, "model": "m"}
ENDED = {
    "is": "metadata", "also": ["usage"], "model": "m",
    "counts": {"input": 7, "output": 5, "reasoning": None, "cached": None},
    "usage": {"tokens_predicted": 5, "tokens_evaluated": 7},
}  # fmt: skip


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (part("Hi"), TEXT),
        (part("Hi", tokens=[1, 2]), TEXT | IDS | {"tokens": 2}),
        (part("Hi", tokens=[1], completion_probabilities=[{}, {}]), TEXT | IDS | {"tokens": 1}),
        (
            part("Hi", tokens=[], completion_probabilities=[{}, {}]),
            TEXT | {"tokens": 2, "token_source": TokenSource.LOGPROBS},
        ),
        (part("Hi", tokens_predicted=3), TEXT | {"tokens": 3, "token_source": TokenSource.RUNNING_USAGE}),
        (part("", tokens=[7]), {"is": "metadata", "output": True, "choices": (0,), "tokens": 1} | IDS),
        (part(""), {"is": "metadata"}),
        ({"prompt_progress": {"total": 9}}, {"is": "metadata"}),
        (part("", **LAST, stop_type="limit"), ENDED | {"finish_reason": "limit"}),
        (part("", **LAST, stopped_word=True), ENDED | {"finish_reason": "word"}),
        (part("Hi", stop=True, stop_type="eos"), TEXT | {"finish_reason": "eos"}),
        (
            {"error": {"code": 503, "type": "unavailable_error", "message": "m"}},
            {"is": "error", "error_type": "unavailable_error", "error_message": "m"},
        ),
        ({"x": 1}, {"is": "metadata", "parsed": False}),
        (b"{", {"is": "metadata", "parsed": False}),
    ],
)
def test_what_an_event_says(value: Any, said: dict[str, Any]) -> None:
    assert told(LlamaCpp().read_event(event(value))) == said


def test_a_running_clock_and_count() -> None:
    dialect = LlamaCpp()
    deltas = [
        dialect.read_event(event(part("x", timings={"predicted_n": n, "predicted_ms": n * 1.5}, index=i)))
        for n, i in ((1, 0), (2, 0), (2, 1), (4, 0))
    ]
    assert [d.tokens for d in deltas] == [1, 1, 2, 2]
    assert [d.server_clock_ns for d in deltas] == [1_500_000, 3_000_000, 3_000_000, 6_000_000]


def test_whole_answers() -> None:
    one = {"content": "Hi", "tokens": [], **LAST, "stop_type": "eos", "timings": TIMINGS}
    said = told(LlamaCpp().read_body(encode(one)))
    assert (said["is"], said["also"], said["text"], said["finish_reason"]) == (
        "content",
        ["usage"],
        "Hi",
        "eos",
    )
    said = told(LlamaCpp().read_body(encode([one | {"index": 0}, one | {"index": 1, "content": "you"}, 3])))
    assert (said["text"], said["choices"], said["model"]) == ("Hiyou", (0, 1), "m")
    assert (said["counts"]["input"], said["counts"]["output"]) == (14, 10)
    failed = encode({"error": {"code": 400, "type": "invalid_request_error", "message": "m"}})
    assert told(LlamaCpp().read_body(failed))["error_type"] == "invalid_request_error"
    assert [LlamaCpp().read_body(b).parsed for b in (b"[]", b"{}", b"3", b'{"content":3}')] == [False] * 4
