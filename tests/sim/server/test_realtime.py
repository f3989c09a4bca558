"""OpenAI's Realtime over WebSocket, by a client that is not ours: aiohttp's."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from llmtap.exchange.observer import Observer
from llmtap.sim.model_options import ServingSetup, read_serving
from llmtap.sim.server.answers import REFUSAL
from llmtap.sim.server.options import EngineOptions, SimOptions
from llmtap.units import Duration
from llmtap.workload.prompts.text import count_tokens
from tests.support.servers.peer import scene
from tests.support.servers.sim_engine import QUICK, Engine, engine

MS = 1_000_000
UPGRADE = (
    b"GET /v1/realtime?model=m HTTP/1.1\r\nHost: sim\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MTIzNDU2Nzg5MDEyMzQ1Ng==\r\n\r\n"
)
DELTA = "response.output_text.delta"


class Client:
    """One session."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def say(self, kind: str, **fields: Any) -> None:
        await self.socket.send_json({"type": kind, **fields})

    async def hear(self) -> dict[str, Any]:
        event: dict[str, Any] = await self.socket.receive_json(timeout=100)
        return event

    async def hear_until(self, *kinds: str) -> list[dict[str, Any]]:
        """Events up to the first of these kinds."""
        events = [await self.hear()]
        while events[-1]["type"] not in kinds:
            events.append(await self.hear())
        return events

    async def ask(self, text: str = "hi", **more: Any) -> None:
        """In the conversation."""
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        await self.say("conversation.item.create", item=item)
        await self.say("response.create", **more)


@asynccontextmanager
async def session(e: Engine, **headers: str) -> AsyncIterator[Client]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with e.session.ws_connect(f"{e.url}/v1/realtime?model=m", headers=named) as socket:
        client = Client(socket)
        assert (await client.hear())["type"] == "session.created"
        yield client


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == DELTA)


@scene
async def test_a_response_has_its_events_in_order_and_exact_counts() -> None:
    async with engine() as e, session(e) as client:
        await client.ask("The river ran slow.")
        events = await client.hear_until("response.done")
    assert [event["type"] for event in events] == [
        "conversation.item.added", "conversation.item.done", "response.created", "response.output_item.added",
        "conversation.item.added", "response.content_part.added", *[DELTA] * 5, "response.output_text.done",
        "response.content_part.done", "response.output_item.done", "conversation.item.done", "response.done",
    ]  # fmt: skip
    done = events[-1]["response"]
    assert (done["status"], done["usage"]["input_tokens"], done["usage"]["output_tokens"]) == (
        "completed",
        5,
        5,
    )
    assert count_tokens(text_of(events)) == 5
    assert events[-5]["text"] == text_of(events) == done["output"][0]["content"][0]["text"]
    assert len({event["event_id"] for event in events}) == len(events)


@scene
async def test_settings_of_the_session_hold_until_a_response_says_otherwise() -> None:
    async with engine() as e, session(e) as client:
        settings = {"type": "realtime", "instructions": "Be brief.", "max_output_tokens": 2}
        await client.say("session.update", session=settings)
        updated = (await client.hear())["session"]
        assert (updated["instructions"], updated["max_output_tokens"]) == ("Be brief.", 2)
        apart = {"conversation": "none", "input": [{"role": "user", "content": "hi"}]}
        for response, tokens in ((apart, 2), ({**apart, "max_output_tokens": 3}, 3), (apart, 2)):
            await client.say("response.create", response=response)
            events = await client.hear_until("response.done")
            usage = events[-1]["response"]["usage"]
            assert usage["output_tokens"] == tokens
            assert usage["input_tokens"] == count_tokens("Be brief.\nhi"), "nothing of it is remembered"
            assert events[-1]["response"]["conversation_id"] is None


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("no json", "does not fit"),
        ('{"type": "response.dance"}', "response.dance"),
        ('{"type": "input_audio_buffer.append", "audio": ""}', "does not hear"),
        ('{"type": "session.update", "session": {"output_modalities": ["audio"]}}', "it can be text"),
        ('{"type": "conversation.item.create"}', "item: there is none"),
        ('{"type": "response.cancel"}', "no response to cancel"),
        ('{"type": "response.create", "response": {"max_output_tokens": 0}}', "cannot be 0"),
    ],
)
@scene
async def test_what_does_not_fit_is_an_error_event_and_the_session_goes_on(message: str, says: str) -> None:
    async with engine() as e, session(e) as client:
        await client.socket.send_str(message)
        error = await client.hear()
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        assert says in error["error"]["message"]
        await client.ask()
        assert (await client.hear_until("response.done"))[-1]["response"]["status"] == "completed"


@scene
async def test_one_response_at_a_time_and_it_can_be_cancelled() -> None:
    async with (
        engine(SimOptions(ttft=Duration(MS), itl=Duration(MS), tokens=9_000)) as e,
        session(e) as client,
    ):
        await client.ask(event_id="long")
        await client.hear_until(DELTA)
        await client.say("response.create", event_id="second")
        refused = (await client.hear_until("error"))[-1]
        assert refused["error"]["event_id"] == "second" and "under way" in refused["error"]["message"]
        await client.say("response.cancel")
        done = (await client.hear_until("response.done"))[-1]["response"]
        assert (done["id"], done["status"]) == ("resp_sim1", "cancelled")
        assert 0 < done["usage"]["output_tokens"] < 9_000
        await client.ask(response={"max_output_tokens": 3})
        await client.hear_until("response.done")
        truths = await e.ended(2)
    assert [truth["outcome"] for truth in truths] == ["cancelled", "complete"]
    assert len(truths[0]["sent_ns"][0]) == done["usage"]["output_tokens"]


# Faults.


@pytest.mark.parametrize(
    ("headers", "kind", "outcome"),
    [
        ({"x_sim_fault": "429"}, "rate_limit_error", "429"),
        ({"x_sim_fault": "503"}, "server_error", "503"),
        ({"x_sim_refusal": "error"}, "invalid_request_error", "refused"),
        ({"x_sim_itl": "soon"}, "invalid_request_error", None),
    ],
)
@scene
async def test_who_is_turned_away_gets_an_error_event(
    headers: dict[str, str], kind: str, outcome: str | None
) -> None:
    async with engine() as e, session(e, **headers) as client:
        for name in ("one", "two"):
            await client.say("response.create", event_id=name)
            error = (await client.hear())["error"]
            assert (error["type"], error["event_id"]) == (kind, name)
        assert [truth["outcome"] for truth in await e.ended(2 if outcome else 0)] == (
            [outcome] * 2 if outcome else []
        )


@pytest.mark.parametrize(
    ("headers", "text", "status", "outcome"),
    [
        ({"x_sim_refusal": "text"}, REFUSAL, "completed", "refused"),
        ({"x_sim_refusal": "content_filter"}, "", "incomplete", "refused"),
        ({"x_sim_block_after": "2"}, None, "incomplete", "blocked"),
        ({"x_sim_fault": "error", "x_sim_fault_after": "3"}, None, "failed", "error"),
        ({"x_sim_fault": "stall", "x_sim_stall_ms": "5"}, None, "completed", "stall"),
    ],
)
@scene
async def test_a_response_that_goes_wrong_says_so(
    headers: dict[str, str], text: str | None, status: str, outcome: str
) -> None:
    async with engine() as e, session(e, **headers) as client:
        await client.ask()
        events = await client.hear_until("response.done")
        (truth,) = await e.ended()
    assert events[-1]["response"]["status"] == status
    assert text is None or text_of(events) == text
    assert count_tokens(text_of(events)) == len(truth["sent_ns"][0])
    assert truth["outcome"] == outcome
    assert any(event["type"] == "error" for event in events) is (status == "failed")


@pytest.mark.parametrize(("fault", "code"), [("reset", 1006), ("truncate", 1006), ("unfinished", 1000)])
@scene
async def test_a_session_that_breaks_off(fault: str, code: int) -> None:
    async with engine() as e:
        async with session(e, x_sim_fault=fault, x_sim_fault_after="3") as client:
            await client.ask()
            seen = 0
            with pytest.raises(aiohttp.WSMessageTypeError):
                while (await client.hear())["type"] != "response.done":
                    seen += 1
            assert seen > 3
            assert client.socket.close_code == code
        truths = await e.ended()
    assert truths[0]["outcome"] == fault and truths[0]["finish"] == [None]
    assert len(truths[0]["sent_ns"][0]) == 3


@scene
async def test_a_client_that_asks_and_leaves_in_one_breath_leaves_nothing_either() -> None:
    """Its response is cancelled before it has begun."""
    behind = EngineOptions("continuous_batching", ServingSetup(serving=read_serving({"kv_tokens": "60000"})))
    async with engine(SimOptions(tokens=50_000), behind=behind) as e:
        host, port = e.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(UPGRADE)
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"type": "response.create"}).encode()
        writer.write(bytes((0x81, 0x80 | len(body), 0, 0, 0, 0)) + body + bytes((0x88, 0x80, 0, 0, 0, 0)))
        await reader.read()
        writer.close()
        truths = await e.ended()
        metrics = await e.metrics()
    assert truths[0]["outcome"] == "client_left"
    for name in ("num_requests_running", "num_requests_waiting"):
        assert metrics[f'vllm:{name}{{engine="0",model_name="sim"}}'] == 0


@scene
async def test_a_plain_get_is_told_what_the_path_is_for() -> None:
    async with engine() as e, e.session.get(f"{e.url}/v1/realtime") as response:
        assert response.status == 426
        assert "WebSocket" in (await response.json())["error"]["message"]


@scene
async def test_a_session_is_closed_when_the_server_goes_away() -> None:
    async with aiohttp.ClientSession() as clients:
        async with engine() as e:
            socket = await clients.ws_connect(f"{e.url}/v1/realtime")
            await socket.receive()
            waiting = asyncio.create_task(socket.receive())
            await asyncio.sleep(0)
        assert (await waiting).type is aiohttp.WSMsgType.CLOSE
        assert socket.close_code == aiohttp.WSCloseCode.GOING_AWAY


@scene
async def test_our_own_reader_understands_a_session() -> None:
    """The bytes as they came down the connection, cut anywhere."""
    async with engine() as e:
        host, port = e.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(UPGRADE)
        answer = await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"type": "response.create"}).encode()
        writer.write(bytes((0x81, 0x80 | len(body), 0, 0, 0, 0)) + body)
        down = b""
        while b'"type":"response.done"' not in down:
            down += await reader.read(1 << 16)
        writer.close()
    observer = Observer("test", 1, 0, 0, UPGRADE)
    observer.response_head(answer, 1, 0)
    observer.upgraded(1)
    for at in range(0, len(down), 7):
        observer.tunnel(None, down[at : at + 7], 2 + at, 0)
    x = observer.finish(None, "complete", None, None, 0, 0, 0, 0)
    assert (x.dialect, x.status, x.finish_reason) == ("openai.realtime", 101, "completed")
    assert (x.tokens.output, x.tokens.input, x.unparsed_events, x.error) == (QUICK.tokens, 0, 0, None)
