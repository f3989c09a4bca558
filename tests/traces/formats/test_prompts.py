"""Datasets of prompts: vLLM's custom prompts and guidellm's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.bodies import compact, prompt_columns
from llmtap.traces.format import FormatError, TraceFormat, batch_of
from llmtap.traces.registry import by_name
from tests.support.workloads.trace_files import read, rows, write

CUSTOM, DATASET = by_name("vllm-custom"), by_name("guidellm-data")


def test_a_prompt_is_one_message_of_a_user() -> None:
    data = b'{"prompt":"Why \\ud83d\\ude00?","output_tokens":5}\n{"prompt":"x"}\n'
    assert CUSTOM.sniff(data, "x.jsonl")
    source, batches = read(CUSTOM, data)
    assert rows(batches, "request_body", "output_tokens", "message_roles") == [
        ('{"messages":[{"role":"user","content":"Why 😀?"}]}', 5, ["user"]),
        ('{"messages":[{"role":"user","content":"x"}]}', None, ["user"]),
    ]
    again, written = write(CUSTOM, source.info, batches)
    assert again.decode() == '{"prompt":"Why 😀?","output_tokens":5}\n{"prompt":"x"}\n'
    assert written.notes == ["1 rows have no output_tokens: vLLM needs --custom-output-len"]


def test_several_messages_are_joined_and_bodies_without_text_dropped() -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    bodies = [compact({"messages": said, "tools": [{}]}), '{"messages":[]}', "no JSON", None]
    batch = batch_of(4, {"request_body": bodies, "output_tokens": [1, 2, 3, 4]})
    data, written = write(CUSTOM, CaptureInfo(), [batch])
    assert data == b'{"prompt":"Be brief.\\n\\nHi","output_tokens":1}\n'
    assert written.rows == 1
    assert written.dropped == {"no request body": 1, "no text in the body": 2}
    assert written.notes == [
        "1 prompts are several messages, joined by empty lines",
        "1 prompts lost tools, or parts that are not text",
    ]


def test_a_dataset_is_read_by_the_names_of_its_columns() -> None:
    as_json = b'{"question": "Why?", "prompt_tokens_count": 3, "id": 7, "output_tokens_count": 5}\n'
    assert DATASET.sniff(as_json, "x.jsonl")
    source, batches = read(DATASET, as_json)
    body = '{"messages":[{"role":"user","content":"Why?"}]}'
    assert rows(batches, "request_body", "input_tokens", "output_tokens") == [(body, 3, 5)]
    assert source.notes == ["columns that are not kept: id"]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b'{"prompt": "a"}\n{"prompt": 3}\n', "line 2: prompt: expected text"),
        (b'{"other": 1}\n', "line 1: prompt: neither it nor"),
        (b'{"prompt": "a"\n', "line 1: not valid JSON"),
        (
            b'{"prompt": "a", "output_tokens_count": "many"}\n',
            "line 1: output_tokens_count: expected",
        ),
    ],
)
def test_an_error_of_a_dataset_names_the_line(data: bytes, told: str) -> None:
    with pytest.raises(FormatError) as caught:
        read(DATASET, data)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize("fmt", [CUSTOM, DATASET], ids=["vllm-custom", "guidellm-data"])
@given(st.lists(st.tuples(st.text(min_size=1), st.none() | st.integers(0, 10**17)), max_size=10))
def test_whatever_it_can_hold_survives(fmt: TraceFormat, table: list[tuple[str, int | None]]) -> None:
    bodies = [prompt_columns(prompt)["request_body"] for prompt, _ in table]
    counts = [n for _, n in table]
    batch = batch_of(len(table), {"request_body": bodies, "input_tokens": counts, "output_tokens": counts})
    data, written = write(fmt, CaptureInfo(), [batch])
    assert written.rows == len(table)
    names = ("request_body", "output_tokens", *(["input_tokens"] if fmt is DATASET else []))
    assert rows(read(fmt, data)[1], *names) == rows([batch], *names)
