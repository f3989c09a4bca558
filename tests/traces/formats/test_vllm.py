"""vLLM's custom prompts hold a text; its timed trace cannot do without blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.bodies import compact
from llmtap.traces.format import FormatError, batch_of
from llmtap.traces.formats import mooncake
from llmtap.traces.formats.vllm import CUSTOM, TIMED_TRACE
from llmtap.traces.prompts import prompt_body
from tests.support.trace_files import from_trace, read, rows, trace, write


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


def test_an_error_names_line_and_field_and_no_text() -> None:
    with pytest.raises(FormatError, match="line 2: prompt: expected str, got int"):
        read(CUSTOM, b'{"prompt": "secret"}\n{"prompt": 4111111111111111}\n')


@given(st.lists(st.tuples(st.text(min_size=1), st.none() | st.integers(0, 10**17)), max_size=10))
def test_what_custom_can_hold_survives(table: list[tuple[str, int | None]]) -> None:
    bodies = [compact(prompt_body(prompt)) for prompt, _ in table]
    batch = batch_of(len(table), {"request_body": bodies, "output_tokens": [n for _, n in table]})
    data, _ = write(CUSTOM, CaptureInfo(), [batch])
    names = ("request_body", "output_tokens")
    assert rows(read(CUSTOM, data)[1], *names) == rows([batch], *names)


def test_a_mooncake_trace_keeps_its_blocks_and_says_their_size() -> None:
    source, batches = read(mooncake.FORMAT, trace("mooncake/synthetic_trace.rows_1_2500.jsonl.gz"))
    data, written = write(TIMED_TRACE, source.info, batches)
    assert written.notes == ["vLLM must be told: --timed-trace-chunk-hash-size 512"]
    source, again = read(TIMED_TRACE, data)
    assert source.info.block_size == 512
    names = ("arrival_ns", "input_tokens", "output_tokens", "blocks", "block_size")
    assert rows(again, *names) == rows(batches, *names)
    assert not TIMED_TRACE.sniff(data[:65_536], "x.jsonl")


def test_a_row_without_blocks_would_be_an_empty_prompt() -> None:
    info, batch = from_trace("x", {
        "arrival_ns": [0, 1, 2, 3], "input_tokens": [16, 16, 0, 17], "output_tokens": [1, 1, 1, 1],
        "blocks": [None, [], [], [1, 2]], "block_size": [16] * 4, "block_unit": ["tokens"] * 4,
    })  # fmt: skip
    data, written = write(TIMED_TRACE, info, [batch])
    assert written.dropped == {"no prefix blocks": 2}
    assert rows(read(TIMED_TRACE, data)[1], "input_tokens", "blocks", "block_size") == [
        (0, [], 16),
        (17, [1, 2], 16),
    ]
