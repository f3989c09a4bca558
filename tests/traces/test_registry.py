"""Each sample is claimed by one format, its own; what could be two is asked for, what is none is told."""

import io
import json

import pytest

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import FormatError, batch_of
from llmtap.traces.formats.parquet_capture import FORMAT as PARQUET
from llmtap.traces.registry import FORMATS, SNIFF_BYTES, detect, format_for_file, format_named


def capture() -> bytes:
    out = io.BytesIO()
    PARQUET.write(out, CaptureInfo(), [batch_of(1, {"arrival_ns": [1]})])
    return out.getvalue()


BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
LONG = {"model": "m", "messages": [{"role": "user", "content": "x" * (SNIFF_BYTES * 2)}]}


def lines(*values: object) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def one(value: object, indent: int | None = None) -> bytes:
    return json.dumps(value, indent=indent).encode()


MOONCAKE = {"timestamp": 27482, "input_length": 695, "output_length": 52, "hash_ids": [46, 47]}
DYNAMO = {"schema": "dynamo.request.trace.v1", "event_type": "tool_start", "event_time_unix_ms": 1}
BURST_1 = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURST_3 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
ASKED = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": BODY}
HAR = {"version": "1.2", "creator": {"name": "x", "version": "1"}}


def talk(turn: object) -> list[object]:
    return [{"id": "a", "conversations": [turn]}]


SAMPLES: list[tuple[str, str, bytes]] = [
    ("llmtap", "a.parquet", capture()),
    ("mooncake", "a.jsonl", lines(MOONCAKE)),
    ("azure", "a.csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"),
    ("burstgpt", "a.csv", f"{BURST_1}\n5,ChatGPT,472,18,490,Conversation log\n".encode()),
    ("burstgpt", "a.csv", f"{BURST_3}\n19440110.0,1722ac,43,GPT-4,9,4,13,Conversation log\n".encode()),
    ("dynamo", "a.jsonl", lines({"timestamp": 5, "event": DYNAMO})),
    ("dynamo", "a.jsonl", lines(DYNAMO)),
    ("otlp", "a.jsonl", lines({"resourceSpans": []})),
    (
        "tracelab",
        "a.jsonl",
        lines(
            {
                "session_id": "a",
                "round_index": 0,
                "input_tokens_total": 5,
                "timing_events": [],
            }
        ),
    ),
    (
        "tracelab-replay",
        "a.csv",
        b"id,input_len,output_len,arrival_time,round_idx,tool_wait_after_ms,prefix_len\na,1,2,0,0,5,0\n",
    ),
    (
        "servegen",
        "a.jsonl",
        lines(
            {
                "request_id": 0,
                "timestamp": 0.5,
                "data": {"input_tokens": 1, "output_tokens": 2},
            }
        ),
    ),
    ("servegen", "a.json", one([{"timestamp": 1, "data": {"input_tokens": 1, "output_tokens": 2}}], 1)),
    ("servegen", "chunk-1-trace.csv", b"0,2.53,1.003,Gamma,0.99,0.39\n600,0,0,,0,0\n"),
    ("servegen", "chunk-1-dataset.json", one({"0": {"input_tokens": "{23: 0.5, 24: 0.5}"}}, 2)),
    ("weka", "a.json", one({"id": "a", "block_size": 64, "requests": [{"t": 0.0, "hash_ids": [1]}]})),
    ("aiperf", "a.jsonl", lines({"timestamp": 0, "payload": BODY, "session_id": "a"})),
    ("aiperf", "a.jsonl", lines({"timestamp": 0, "input_length": 3, "output_length": 4, "session_id": "a"})),
    ("guidellm", "a.jsonl", lines({"timestamp": 1.5, "input_length": 3, "output_length": 4, "duration": 1})),
    ("aiperf", "a.jsonl", lines({"timestamp": 0, "input_length": 3, "hash_ids": [1]})),
    ("aiperf", "a.jsonl", lines({"input_length": 3, "output_length": 4})),
    ("aiperf", "a.jsonl", lines({"input_length": 3.0})),
    ("aiperf", "a.jsonl", lines(MOONCAKE, {"timestamp": 28000.5, "input_length": 3})),
    ("otlp", "a.jsonl", b'{ "resourceSpans": []}\n'),
    ("vllm-custom", "a.jsonl", lines({"prompt": "hi", "output_tokens": 3})),
    ("sharegpt", "a.json", one(talk({"from": "human", "value": "hi"}), indent=2)),
    ("sharegpt", "a.json", one(talk({"from": "human", "value": "x" * 99_999}))),
    ("openai-batch", "a.jsonl", lines(ASKED | {"body": LONG})),
    ("har", "a.json", b"\xef\xbb\xbf" + one({"log": {**HAR, "entries": []}}, indent=1)),
    ("har", "a.json", one({"log": {**HAR, "pages": ["x" * 99_999], "entries": []}})),
]


IDS = [f"{i}-{name}" for i, (name, _, _) in enumerate(SAMPLES)]


@pytest.mark.parametrize(("expected", "name", "data"), SAMPLES, ids=IDS)
def test_a_sample_is_what_it_is(expected: str, name: str, data: bytes) -> None:
    assert detect(name, data[:SNIFF_BYTES]).name == expected


def test_every_format_that_reads_has_a_sample_or_shares_one() -> None:
    # It is written like another's: such files are told by --from.
    shared = {"inference-perf"}
    assert {f.name for f in FORMATS} - {s[0] for s in SAMPLES} <= shared


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "the file is empty"),
        (b"\x00\x01\x02\x03" * 100, "the format of the file is not known"),
        (b"Whose woods these are\n", "the format of the file is not known"),
        (b"null", "the format of the file is not known"),
        (b"a,b,c\n1,2,3\n", "the format of the file is not known"),
        (b'{"log": "INFO started"}\n', "the format of the file is not known"),
        (b"{" * 10_000, "the format of the file is not known"),
    ],
)
def test_what_is_nothing_is_told(data: bytes, problem: str) -> None:
    for name in ("", "a.json", "a.csv", "a.har", "a.parquet"):
        with pytest.raises(FormatError, match=problem):
            detect(name, data)


def test_members_of_an_unknown_format_are_named_so_that_a_misspelt_one_is_seen() -> None:
    with pytest.raises(FormatError, match="members 'prompt', 'label', 'lable'; the format"):
        detect("a.jsonl", b'{"prompt": "a", "label": "x"}\n{"prompt": "b", "lable": "x"}\n')


def test_content_decides_over_the_name() -> None:
    assert detect("a.har", capture()).name == "llmtap"
    assert detect("a.parquet", lines(MOONCAKE)).name == "mooncake"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("x.csv", "set --to to one of azure, inference-perf, burstgpt"),
        ("x.jsonl", "set --to to one of mooncake, .*openai-batch"),
        ("x", "does not show the format; set --to"),
        ("x.txt", "does not show the format"),
        ("parquet", "does not show the format"),
    ],
)
def test_a_target_whose_name_may_mean_several_is_asked_for(name: str, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        format_for_file(name)


def test_what_begins_like_a_name_is_offered_first() -> None:
    with pytest.raises(FormatError, match=r"'a'; did you mean azure or aiperf\?"):
        format_named("a")


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        (
            lines(MOONCAKE) + b'{"timestamp": NaN, "input_length": 1, "output_length": 1}\n',
            "line 2: is not valid JSON",
        ),
        (b"[" + one(MOONCAKE) + b"]\n", "line 1: expected a JSON object, got a JSON array"),
        (lines(MOONCAKE) + b"null\n", "line 2: expected a JSON object"),
        (one(MOONCAKE) + one(MOONCAKE) + b"\n", "line 1: is not valid JSON"),
        (lines(MOONCAKE).replace(b"\n", b"\r") * 2, "line 1: is not valid JSON"),
    ],
)
def test_a_line_that_is_no_json_object_is_named(head: bytes, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        detect("a.jsonl", head)


@pytest.mark.parametrize("order", ["le", "be"])
def test_a_file_in_another_encoding_is_named(order: str) -> None:
    head = ("\ufeff" + lines(MOONCAKE).decode()).encode(f"utf-16-{order}")
    with pytest.raises(FormatError, match="UTF-16"):
        detect("a.jsonl", head)


@pytest.mark.parametrize("header", ["TIMESTAMP, ContextTokens, GeneratedTokens", "timestamp,input,output"])
def test_a_table_of_another_form_is_refused_with_its_columns(header: str) -> None:
    with pytest.raises(FormatError) as caught:
        detect("a.csv", f"{header}\r\n2023-11-16 18:15:46,1,2\r\n".encode())
    assert all(repr(name) in str(caught.value) for name in header.split(","))


@pytest.mark.parametrize("head", [b"hello\n", b'{\n "a": 1\n}\n', b"a,b\n1,2\n"])
def test_another_file_has_no_line_to_blame(head: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        detect("a.jsonl", head)
    assert "line" not in str(caught.value)
