"""A file that differs in form alone is read as the plain one; a damaged one is refused by its name.

In neither case is it read as another format, and no exception but ConfigError leaves the reader.
"""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtap.errors import ConfigError
from llmtap.traces.registry import open_trace


def lines(*values: object) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SPAN = {
    "traceId": "t",
    "spanId": "s",
    "startTimeUnixNano": "1700000000000000000",
    "endTimeUnixNano": "1700000001000000000",
    "attributes": [
        {"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}},
        {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "5"}},
    ],
}
DYNAMO = {
    "schema": "dynamo.request.trace.v1",
    "event_type": "request_end",
    "request": {"request_id": "a", "request_received_ms": 1.7e12, "input_tokens": 5, "output_tokens": 6},
}
ROUND = {
    "session_id": "a",
    "round_index": 0,
    "input_tokens_total": 5,
    "output_tokens": 6,
    "timing_events": [{"event_type": "user_message", "timestamp": "2026-01-01T00:00:00Z"}],
}
MOONCAKE = {"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
ENTRY = {
    "startedDateTime": "2026-01-01T00:00:00Z",
    "timings": {"send": 1, "wait": 50, "receive": 49},
    "request": {
        "method": "POST",
        "url": "https://x/v1/chat/completions",
        "headers": [],
        "postData": {"text": json.dumps(CHAT)},
    },
    "response": {"status": 200, "headers": [], "content": {"mimeType": "application/json", "text": "{}"}},
}
PLAIN: dict[str, tuple[str, bytes]] = {
    "mooncake": ("jsonl", lines(MOONCAKE, {**MOONCAKE, "timestamp": 2000})),
    "guidellm": ("jsonl", lines({"timestamp": 1, "input_length": 6, "output_length": 5, "duration": 1}) * 2),
    "aiperf": ("jsonl", lines({"timestamp": 5, "session_id": "a", "input_length": 3}) * 2),
    "vllm-custom": ("jsonl", lines({"prompt": "a"}, {"prompt": "b", "output_tokens": 3})),
    "openai-batch": (
        "jsonl",
        lines({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}) * 2,
    ),
    "dynamo": ("jsonl", lines(DYNAMO) * 2),
    "weka": (
        "jsonl",
        lines({"id": "a", "block_size": 64, "requests": [{"t": 0, "type": "s", "in": 5, "hash_ids": [1]}]})
        * 2,
    ),
    "otlp": ("jsonl", lines({"resourceSpans": [{"scopeSpans": [{"spans": [SPAN]}]}]})),
    "tracelab": ("jsonl", lines(ROUND, {**ROUND, "round_index": 1})),
    "servegen": ("jsonl", lines({"timestamp": 0.5, "data": {"input_tokens": 1, "output_tokens": 2}}) * 2),
    "azure": ("csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + b"2023-11-16 18:15:46.68,374,44\n" * 2),
    "burstgpt": (
        "csv",
        b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        + b"5,ChatGPT,472,18,490,Conversation log\n" * 2,
    ),
    "tracelab-replay": (
        "csv",
        b"session_id,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\n" + b"a,0,0,5,6,7\n" * 2,
    ),
    "sharegpt": (
        "json",
        lines([{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}]),
    ),
    "har": ("har", lines({"log": {"version": "1.2", "creator": {}, "entries": [ENTRY]}})),
}
SAME: dict[str, Callable[[bytes], bytes]] = {
    "CRLF": lambda data: data.replace(b"\n", b"\r\n"),
    "byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "no newline at the end": lambda data: data.rstrip(b"\n"),
    "blank lines": lambda data: data.replace(b"\n", b"\n\n"),
    "compressed": gzip.compress,
}
DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "not UTF-8": lambda data: data + b"\xff\n",
    "text at the end": lambda data: data + b"hello\n",
    "NUL bytes at the end": lambda data: data + b"\0\0\0\n",
    "UTF-16": lambda data: data.decode().encode("utf-16"),
    "compressed and cut": lambda data: gzip.compress(data)[:-12],
    "two lines in one": lambda data: data.replace(b"\n", b" ", 1) * 2,
    "nested too deeply": lambda data: b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n" + data,
    "one line of JSON null": lambda data: data + b"null\n",
}


def read(place: Path, name: str | None = None) -> tuple[str, list[dict[str, Any]]]:
    with open_trace(str(place), source_format=name) as trace:
        rows = [row for batch in trace.source.batches for row in batch.to_pylist()]
    return trace.format.name, rows


def written(folder: Path, name: str, form: str, data: bytes) -> Path:
    place = folder / f"trace.{PLAIN[name][0]}{'.gz' if form.startswith('compressed') else ''}"
    place.write_bytes(data)
    return place


@pytest.mark.parametrize("form", SAME)
@pytest.mark.parametrize("name", PLAIN)
def test_another_form_of_a_file_is_the_same_trace(name: str, form: str, tmp_path: Path) -> None:
    data = PLAIN[name][1]
    plain = read(written(tmp_path, name, "", data))
    assert plain[0] == name and plain[1]
    assert read(written(tmp_path, name, form, SAME[form](data))) == plain


@pytest.mark.parametrize("form", DAMAGED)
@pytest.mark.parametrize("name", PLAIN)
def test_a_damaged_file_is_refused_by_its_name(name: str, form: str, tmp_path: Path) -> None:
    place = written(tmp_path, name, form, DAMAGED[form](PLAIN[name][1]))
    for given in (None, name):
        with pytest.raises(ConfigError) as caught:
            read(place, given)
        assert caught.value.place == str(place)


def test_a_document_of_several_lines_is_refused_with_the_cure(tmp_path: Path) -> None:
    place = tmp_path / "spans.json"
    place.write_bytes(json.dumps(json.loads(PLAIN["otlp"][1]), indent=2).encode())
    with pytest.raises(ConfigError, match=r"line 1: .*jq"):
        read(place)
