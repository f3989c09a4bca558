"""What the sessions of both APIs have in common."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from llmtap.exchange.observer import Observer
from llmtap.exchange.session import Session
from llmtap.protocol.websocket import frame
from tests.sim.server.sessions import REALTIME, RESPONSES, session, upgrade
from tests.support.servers.sim_engine import QUICK, engine

BOTH = pytest.mark.parametrize("path", [REALTIME, RESPONSES])
CREATE = json.dumps({"type": "response.create", "input": "hi"})
ASK = {"response": {"input": [{"content": "hi"}]}, "input": "hi"}
"""Fields of a request for either API."""


def message(text: str) -> bytes:
    return frame(text.encode(), key=bytes(4))


@BOTH
@pytest.mark.parametrize(
    ("headers", "kind", "outcome"),
    [
        ({"x_sim_fault": "429"}, "rate_limit_error", "429"),
        ({"x_sim_refusal": "error"}, "invalid_request_error", "refused"),
        ({"x_sim_itl": "soon"}, "invalid_request_error", None),
    ],
)
async def test_who_is_turned_away_gets_an_error_event(
    path: str, headers: dict[str, str], kind: str, outcome: str | None
) -> None:
    async with engine() as e, session(e, path, **headers) as client:
        for name in ("one", "two"):
            await client.say("response.create", event_id=name, stream_id=name, **ASK)
            event = await client.receive()
            assert event["error"]["type"] == kind
            assert name == (event["error"]["event_id"] if path == REALTIME else event["stream_id"])
        assert [truth["outcome"] for truth in await e.ended(2 if outcome else 0)] == (
            [outcome] * 2 if outcome else []
        )


@BOTH
@pytest.mark.parametrize(("fault", "code"), [("reset", 1006), ("truncate", 1006), ("unfinished", 1000)])
async def test_a_session_that_breaks_off(path: str, fault: str, code: int) -> None:
    async with engine() as e:
        async with session(e, path, x_sim_fault=fault, x_sim_fault_after="3") as client:
            await client.say("response.create", **ASK)
            with pytest.raises(aiohttp.WSMessageTypeError):
                await client.hear_until("response.done", "response.completed")
            assert client.socket.close_code == code
        truths = await e.ended()
    assert truths[0]["outcome"] == fault and truths[0]["finish"] == [None]
    assert len(truths[0]["sent_ns"][0]) == 3


@BOTH
async def test_our_own_reader_has_an_exchange_for_each_response(path: str) -> None:
    """The bytes as they came down the connection, cut anywhere."""
    async with engine() as e:
        host, port = e.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(upgrade(path))
        answer = await reader.readuntil(b"\r\n\r\n")
        down: list[bytes] = []
        end = b'"type":"response.done"' if path == REALTIME else b'"type":"response.completed"'
        for _ in range(2):
            writer.write(message(CREATE))
            got = b""
            while end not in got:
                got += await reader.read(1 << 16)
            down.append(got)
        writer.close()
    found: list[Any] = []

    def observe(t_ns: int) -> Observer:
        observer = Observer("test", 1, t_ns, 0, upgrade(path))
        observer.response_head(answer, t_ns, 0)
        return observer

    read = Session(path.rpartition("/")[2], observe, found.append, lambda: None)
    for begin_ns, data in zip((0, 1_000_000), down, strict=True):
        read.client_data(message(CREATE), begin_ns, 0)
        for at in range(0, len(data), 7):
            read.server_data(data[at : at + 7], begin_ns + at, 0)
    assert [x.dialect for x in found] == [f"openai.{path.rpartition('/')[2]}"] * 2
    assert [(x.finish_reason, x.tokens.output, x.unparsed_events, x.error) for x in found] == [
        ("completed", QUICK.tokens, 0, None)
    ] * 2
