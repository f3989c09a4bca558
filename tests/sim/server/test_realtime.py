"""OpenAI's Realtime over WebSocket, by a client that is not ours: aiohttp's."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from llmtap.sim.server.options import SimOptions
from llmtap.sim.server.reception import REFUSAL
from llmtap.units import Duration
from llmtap.workload.prompts.text import count_tokens
from tests.sim.server.sessions import DELTA, REALTIME, SessionClient, text_of
from tests.sim.server.sessions import session as open_session
from tests.support.servers.sim_engine import Engine, engine

MS = 1_000_000


class Client(SessionClient):
    async def ask(self, text: str = "hi", **more: Any) -> None:
        """In the conversation."""
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        await self.say("conversation.item.create", item=item)
        await self.say("response.create", **more)


@asynccontextmanager
async def session(e: Engine, **headers: str) -> AsyncIterator[Client]:
    async with open_session(e, REALTIME, **headers) as opened:
        yield Client(opened.socket)


async def test_a_response_has_its_events_in_order_and_exact_counts() -> None:
    async with engine() as e, session(e) as client:
        await client.ask("The river ran slow.")
        events = await client.hear_until("response.done")
    assert [event["type"] for event in events] == [
        "conversation.item.added",
        "conversation.item.done",
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        *[DELTA] * 5,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]
    done = events[-1]["response"]
    assert (done["status"], done["usage"]["input_tokens"], done["usage"]["output_tokens"]) == (
        "completed",
        5,
        5,
    )
    assert count_tokens(text_of(events)) == 5
    assert events[-5]["text"] == text_of(events) == done["output"][0]["content"][0]["text"]
    assert len({event["event_id"] for event in events}) == len(events)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("no json", "invalid event"),
        ('{"type": "input_audio_buffer.append", "audio": ""}', "type: expected an event such as"),
        ('{"type": "session.update", "session": {"output_modalities": ["audio"]}}', "'text' is supported"),
        ('{"type": "response.cancel"}', "no response is running"),
        ('{"type": "response.create", "response": {"max_output_tokens": 0}}', "got 0"),
    ],
)
async def test_what_does_not_fit_is_an_error_event_and_the_session_goes_on(message: str, says: str) -> None:
    async with engine() as e, session(e) as client:
        await client.socket.send_str(message)
        error = await client.receive()
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        assert says in error["error"]["message"]
        await client.ask()
        assert (await client.hear_until("response.done"))[-1]["response"]["status"] == "completed"


async def test_one_response_at_a_time_and_it_can_be_cancelled() -> None:
    async with (
        engine(SimOptions(ttft=Duration(MS), itl=Duration(MS), tokens=9_000)) as e,
        session(e) as client,
    ):
        await client.ask(event_id="long")
        await client.hear_until(DELTA)
        await client.say("response.create", event_id="second")
        refused = (await client.hear_until("error"))[-1]
        assert refused["error"]["event_id"] == "second" and "is running" in refused["error"]["message"]
        await client.say("response.cancel")
        done = (await client.hear_until("response.done"))[-1]["response"]
        assert (done["id"], done["status"]) == ("resp_sim1", "cancelled")
        assert 0 < done["usage"]["output_tokens"] < 9_000
        await client.ask(response={"max_output_tokens": 3})
        await client.hear_until("response.done")
        truths = await e.ended(2)
    assert [truth["outcome"] for truth in truths] == ["cancelled", "complete"]
    assert len(truths[0]["sent_ns"][0]) == done["usage"]["output_tokens"]


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
