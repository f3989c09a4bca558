"""OpenAI's Responses over WebSocket, by a client that is not ours: aiohttp's."""

import pytest

from llmtap.sim.server.options import SimOptions
from llmtap.units import Duration
from llmtap.workload.prompts.text import count_tokens
from tests.sim.server.sessions import DELTA, RESPONSES, session, text_of
from tests.support.servers.sim_engine import engine, json_events

MS = 1_000_000
DONE = "response.completed"


async def test_the_events_are_those_of_the_stream() -> None:
    body = {"model": "m", "input": "The river ran slow.", "seed": 1}
    async with engine() as e, session(e, RESPONSES) as client:
        _, streamed = await e.answer(RESPONSES, {**body, "stream": True})
        await client.say("response.create", **body)
        events = await client.hear_until(DONE)
    for event in events:
        for item in (
            event,
            event.get("response", {}),
            event.get("item", {}),
            *event.get("response", {}).get("output", ()),
        ):
            for name in ("id", "item_id"):
                if name in item:
                    item[name] = item[name].replace("sim2", "sim1")
    assert events == json_events(streamed)
    assert events[-1]["response"]["usage"]["output_tokens"] == 5


async def test_a_lane_is_answered_in_order_and_lanes_at_the_same_time() -> None:
    slow = SimOptions(ttft=Duration(MS), itl=Duration(MS), tokens=3_000)
    async with engine(slow) as e, session(e, RESPONSES) as client:
        for lane, limit in (("a", None), ("a", 3), ("b", 2), (None, 2)):
            more = {} if lane is None else {"stream_id": lane}
            await client.say("response.create", input="hi", max_output_tokens=limit, **more)
        events = await client.hear_until(DONE, "response.incomplete")
        events += await client.hear_until(DONE, "response.incomplete")
        # The first of lane a is still under way, and the second of it has not begun.
        ended = [event.get("stream_id") for event in events if event["type"] == "response.incomplete"]
        assert sorted(map(str, ended)) == ["None", "b"]
        begun = [event.get("stream_id") for event in events if event["type"] == "response.created"]
        assert sorted(map(str, begun)) == ["None", "a", "b"]
        assert any(event["type"] == DELTA and event.get("stream_id") == "a" for event in events)


async def test_a_response_continues_another_of_the_session() -> None:
    async with engine() as e, session(e, RESPONSES) as client:
        await client.say("response.create", input="hi")
        events = await client.hear_until(DONE)
        first = events[-1]["response"]
        await client.say("response.create", input="hi", previous_response_id=first["id"])
        second = (await client.hear_until(DONE))[-1]["response"]
        await client.say("response.create", input="hi", previous_response_id="resp_none", stream_id="x")
        refused = await client.receive()
    assert text_of(events) == first["output"][0]["content"][0]["text"]
    assert second["usage"]["input_tokens"] == count_tokens(f"hi\n{text_of(events)}\nhi")
    assert (refused["status"], refused["error"]["code"]) == (400, "previous_response_not_found")
    assert refused["stream_id"] == "x"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("no json", "invalid request body"),
        ('{"type": "response.dance"}', "response.dance"),
        ('{"type": "response.create"}', "input"),
        ('{"type": "response.create", "input": "hi", "max_output_tokens": 0}', "got 0"),
    ],
)
async def test_what_does_not_fit_is_an_error_event_and_the_session_goes_on(message: str, says: str) -> None:
    async with engine() as e, session(e, RESPONSES) as client:
        await client.socket.send_str(message)
        error = await client.receive()
        assert (error["type"], error["status"], error["error"]["type"]) == (
            "error",
            400,
            "invalid_request_error",
        )
        assert says in error["error"]["message"]
        await client.say("response.create", input="hi")
        assert (await client.hear_until(DONE))[-1]["response"]["status"] == "completed"
