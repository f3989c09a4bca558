"""Recorded requests reach the server as they were; and answers without usage are counted by tokenizer."""

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from llmtap.load.options import BodyOptions, ScheduleOptions
from llmtap.load.replay.perform import add_shape_and_turn
from llmtap.load.replay.plan import make_plan
from llmtap.workload.requests import Requests
from tests.load.replay.support import replayed
from tests.support.servers.peer import chunk, play
from tests.support.traffic.exchanges import streamed

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
Sent = list[tuple[str, dict[str, Any]]]


def bursts(n: int, burst: int) -> bytes:
    """A streamed answer of `n` events of `burst` tokens each, without usage."""
    base = {"id": "c", "object": "chat.completion.chunk", "model": "m"}
    deltas = [({"content": " sea" * burst}, None)] * n + [({}, "stop")]
    events = [
        base | {"choices": [{"index": 0, "delta": delta, "finish_reason": end}]} for delta, end in deltas
    ]
    data = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    return HEAD + b"".join(map(chunk, [*data, b"data: [DONE]\n\n"])) + b"0\r\n\r\n"


@asynccontextmanager
async def recorder(answer: bytes) -> AsyncIterator[tuple[str, Sent]]:
    """A server that notes path and body of each POST, and always gives this answer."""
    sent: Sent = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, _ = head.split(b" ", 2)
                length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
                body = await reader.readexactly(int(length or 0))
                if method == b"POST":
                    sent.append((path.decode(), json.loads(body)))
                models = b'{"data":[{"id":"m"}]}'
                plain = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(models), models)
                writer.write(answer if method == b"POST" else plain)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", sent
    finally:
        server.close()
        await asyncio.sleep(0)


BATCH = [
    ("/v1/embeddings", {"model": "e", "input": "A text"}),
    ("/v1/responses", {"model": "g", "input": "Name a cape.", "max_output_tokens": 8}),
    ("/v1/messages", {"model": "c", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/rerank", {"model": "r", "query": "q", "documents": ["a"]}),
    ("/v1/chat/completions", {"model": "g", "messages": [{"role": "user", "content": "hi"}]}),
]


def batch(path: Path, *more: dict[str, Any]) -> str:
    rows = [
        {"custom_id": str(i), "method": "POST", "url": url, "body": body}
        for i, (url, body) in enumerate(BATCH)
    ]
    path.write_text("\n".join(json.dumps(row) for row in (*rows, *more)))
    return str(path)


def test_each_recorded_request_keeps_path_and_body_and_what_cannot_be_sent_is_counted(tmp_path: Path) -> None:
    wrong = {"custom_id": "x", "method": "GET", "url": "/v1/models", "body": {}}
    plan = make_plan(ScheduleOptions(source=batch(tmp_path / "b.jsonl", wrong), arrivals="at-once"))

    async def work() -> tuple[Sent, dict[str, Any]]:
        async with recorder(bursts(1, 1)) as (url, sent):
            return sent, await replayed(plan, url)

    sent, result = play(work(), 120)
    assert sorted(map(str, sent)) == sorted(map(str, BATCH))
    assert list(result["plan"]["rows_unsendable"].values()) == [1]
    body = result["plan"]["body"]
    assert body["kinds"] == {"made": 0, "data_set": 0, "recorded": 5}
    assert body["temperature"] is None and body["stream"] is None, "nobody sent them"
    assert set(body["paths"]) == {path for path, _ in BATCH}


def test_prompts_of_another_endpoint_than_the_one_that_was_named_are_noted(tmp_path: Path) -> None:
    place = tmp_path / "p.jsonl"
    place.write_text('{"prompt": "a", "output_tokens": 7}\n')

    async def work(body: BodyOptions) -> tuple[Sent, list[str]]:
        plan = make_plan(ScheduleOptions(source=str(place), arrivals="at-once"))
        async with recorder(bursts(1, 1)) as (url, sent):
            return sent, (await replayed(plan, url, body=body))["plan"]["notes"]

    for body, notes in ((BodyOptions(), 0), (BodyOptions(endpoint="completions"), 1)):
        ((path, request),), told = play(work(body), 120)
        assert (path, request["max_tokens"]) == ("/v1/chat/completions", 7)
        assert len([note for note in told if "--endpoint" in note]) == notes


def test_the_limit_of_a_recorded_request_is_the_one_in_its_body() -> None:
    bodies = [b'{"prompt": "a", "max_tokens": 7}', b'{"prompt": "b"}', b""]
    numbers = array("q", [90, 90, 90])
    requests = Requests(array("q", [0, 0, 0]), numbers, numbers, bodies=bodies)
    exchanges = [streamed() for _ in bodies]
    for row, x in enumerate(exchanges):
        add_shape_and_turn(x, row, requests)
    assert [x.shape.max_tokens for x in exchanges if x.shape is not None] == [7, None, 90]


def test_only_streaming_that_was_asked_for_is_added_where_the_endpoint_can_stream(tmp_path: Path) -> None:
    plan = make_plan(ScheduleOptions(source=batch(tmp_path / "b.jsonl"), arrivals="at-once"))

    async def work() -> Sent:
        async with recorder(bursts(1, 1)) as (url, sent):
            await replayed(plan, f"{url}/v1", body=BodyOptions(stream=True))
            return sent

    streamed = {path: body.get("stream") for path, body in play(work(), 120)}
    assert streamed == {
        "/v1/embeddings": None,
        "/v1/rerank": None,
        "/v1/responses": True,
        "/v1/messages": True,
        "/v1/chat/completions": True,
    }


def test_a_tokenizer_counts_answers_without_usage_and_without_one_tokens_are_not_valid() -> None:
    plan = make_plan(ScheduleOptions(source="conversation", requests=4, arrivals="at-once"))

    async def work(tokenizer: str | None) -> dict[str, Any]:
        async with recorder(bursts(4, 5)) as (url, _):
            return await replayed(plan, url, tokenizer=tokenizer)

    counted, by_chunks = (play(work(tokenizer), 120) for tokenizer in ("sim", None))
    assert (counted["tokens"]["output"], counted["tokens"]["source"]) == (80, {"tokenizer": 4})
    assert counted["verdict"]["figures"]["tokens"]["state"] == "valid"
    assert (by_chunks["tokens"]["output"], by_chunks["tokens"]["source"]) == (16, {"chunks": 4})
    states = {name: one["state"] for name, one in by_chunks["verdict"]["figures"].items()}
    assert states["tokens"] == "not_valid" and not by_chunks["verdict"]["valid"]
    assert not by_chunks["verdict"]["failed"]
