"""Datasets of prompts: vLLM's custom prompts."""

from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.bodies import compact_json
from llmtap.traces.format import batch_of
from llmtap.traces.formats.vllm import prompt_columns
from llmtap.traces.registry import format_named
from tests.support.workloads.trace_files import read, rows, write

CUSTOM = format_named("vllm-custom")


def test_a_prompt_is_one_message_of_a_user() -> None:
    data = b'{"prompt":"Why \\ud83d\\ude00?","output_tokens":5}\n{"prompt":"x"}\n'
    assert CUSTOM.sniff(data, "x.jsonl")
    source, batches = read(CUSTOM, data)
    assert rows(batches, "request_body", "output_tokens", "message_roles") == [
        ('{"messages":[{"role":"user","content":"Why 😀?"}],"max_tokens":5}', 5, ["user"]),
        ('{"messages":[{"role":"user","content":"x"}]}', None, ["user"]),
    ]
    again, written = write(CUSTOM, source.info, batches)
    assert again.decode() == '{"prompt":"Why 😀?","output_tokens":5}\n{"prompt":"x"}\n'
    assert written.notes == ["1 rows have no output_tokens: vLLM needs --custom-output-len"]


def test_a_label_is_a_column_and_an_unknown_word_is_not_kept() -> None:
    data = b'{"prompt":"a","output_tokens":1,"label":"should-refuse"}\n{"prompt":"b","label":"maybe"}\n'
    assert CUSTOM.sniff(data, "x.jsonl")
    source, batches = read(CUSTOM, data)
    assert rows(batches, "label") == [("should-refuse",), ("unknown",)]
    again, _ = write(CUSTOM, source.info, batches)
    assert again == data.replace(b"maybe", b"unknown")


def test_several_messages_are_joined_and_bodies_without_text_dropped() -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    message = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    bodies = [compact_json({"messages": message, "tools": [{}]}), '{"messages":[]}', "no JSON", None]
    batch = batch_of(4, {"request_body": bodies, "output_tokens": [1, 2, 3, 4]})
    data, written = write(CUSTOM, CaptureInfo(), [batch])
    assert data == b'{"prompt":"Be brief.\\n\\nHi","output_tokens":1}\n'
    assert written.rows == 1
    assert written.dropped == {"no request body": 1, "no text in the body": 2}
    assert written.notes == [
        "1 prompts are several messages, joined by empty lines",
        "1 prompts lost tools, or parts that are not text",
    ]


@given(st.lists(st.tuples(st.text(min_size=1), st.none() | st.integers(0, 10**17)), max_size=10))
def test_whatever_it_can_hold_survives(table: list[tuple[str, int | None]]) -> None:
    bodies = [prompt_columns(*row)["request_body"] for row in table]
    counts = [n for _, n in table]
    batch = batch_of(len(table), {"request_body": bodies, "input_tokens": counts, "output_tokens": counts})
    data, written = write(CUSTOM, CaptureInfo(), [batch])
    assert written.rows == len(table)
    names = ("request_body", "output_tokens")
    assert rows(read(CUSTOM, data)[1], *names) == rows([batch], *names)
