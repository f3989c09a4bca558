import json

from llmtap.capture.schema import SCHEMA
from llmtap.exchange.saved import explain, read_saved
from llmtap.traces.answer_replay import answer_columns, text_said


def played(*events: object, path: str = "/v1/chat/completions") -> tuple[dict[str, object], str | None]:
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    explained = explain(read_saved((head + body).encode(), path=path))
    return answer_columns(explained), text_said(explained)


def choice(index: int = 0, finish: str | None = None, **delta: str) -> dict[str, object]:
    return {"object": "chat.completion.chunk", "model": "m",
            "choices": [{"index": index, "delta": delta, "finish_reason": finish}]}  # fmt: skip


def test_of_several_choices_the_first_ones_text_is_kept() -> None:
    _, text = played(choice(0, content="a"), choice(1, content="b"), choice(0, content="c"))
    assert text == "ac"


def test_a_refusal_is_what_was_said_and_reasoning_is_not() -> None:
    row, text = played(
        choice(reasoning_content="hm"), choice(refusal="I "), choice(refusal="won't", finish="stop")
    )
    assert text == "I won't"
    assert (row["outcome"], row["refusal_kind"]) == ("refused", "model_refusal")


def test_nothing_said_is_none() -> None:
    row, text = played(choice(finish="stop"))
    assert text is None
    assert (row["input_tokens"], row["input_token_source"], row["token_source"]) == (None, None, None)


def test_the_columns_are_a_captures() -> None:
    row, _ = played(choice(content="a", finish="stop"))
    assert row.keys() <= set(SCHEMA.names)
    assert (row["dialect"], row["finish_reason"], row["outcome"]) == ("openai.chat", "stop", "complete")
