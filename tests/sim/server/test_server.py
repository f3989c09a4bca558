"""The simulated engine: an answer in the form of OpenAI's, and every token sent when it was due."""

import json
from itertools import pairwise
from typing import Any

import pytest

from llmtap.sim.server.options import SimOptions
from llmtap.units import Duration
from llmtap.workload.prompts.text import count_tokens
from tests.support.servers.sim_engine import CHAT, ask_chat, engine, json_events

MS = 1_000_000


@pytest.mark.parametrize(
    ("body", "headers", "tokens", "finish"),
    [
        ({}, {}, 5, "stop"),
        ({"max_tokens": 2}, {}, 2, "length"),
        ({"max_tokens": 50}, {}, 5, "stop"),
        ({"max_tokens": 50, "min_tokens": 8}, {}, 8, "stop"),
        ({"max_tokens": 50, "ignore_eos": True}, {}, 50, "length"),
        ({"max_tokens": 2}, {"x_sim_tokens": "9"}, 9, "stop"),
        ({"max_tokens": 3000, "ignore_eos": True}, {}, 3000, "length"),
    ],
)
async def test_how_many_tokens(
    body: dict[str, Any], headers: dict[str, str], tokens: int, finish: str
) -> None:
    async with engine() as e:
        for stream in (False, True):
            query = ask_chat(stream=stream, stream_options={"include_usage": True}, **body)
            status, answer = await e.answer(CHAT, query, **headers)
            assert status == 200
            if stream:
                events = json_events(answer)
                text = "".join(x["choices"][0]["delta"].get("content", "") for x in events[:-1])
                assert events[-2]["choices"][0]["finish_reason"] == finish
                usage = events[-1]["usage"]
            else:
                whole = json.loads(answer)
                text, usage = whole["choices"][0]["message"]["content"], whole["usage"]
                assert whole["choices"][0]["finish_reason"] == finish
            assert count_tokens(text) == usage["completion_tokens"] == tokens


async def test_a_stop_string_ends_the_answer_and_is_not_said() -> None:
    async with engine(SimOptions(ttft=Duration(0), itl=Duration(0), tokens=60)) as e:
        _, answer = await e.answer(CHAT, ask_chat(stream=False))
        text = json.loads(answer)["choices"][0]["message"]["content"]
        words = text.split(" ")
        stop = words[4] + " " + words[5][:2]  # in the middle of a token
        _, answer = await e.answer(CHAT, ask_chat(stop=[stop, "never said"]), x_sim_dialect="vllm")
        choice = json.loads(answer)["choices"][0]
        assert choice["message"]["content"] == text[: text.find(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        tokens = json.loads(answer)["usage"]["completion_tokens"]
        assert tokens == count_tokens(text[: text.find(stop)]) + 2, "what completed it was generated"
        _, answer = await e.answer(CHAT, ask_chat(stop=stop, min_tokens=30))
        assert json.loads(answer)["usage"]["completion_tokens"] >= 30


async def test_several_choices_differ_and_all_are_told() -> None:
    async with engine() as e:
        _, answer = await e.answer(CHAT, ask_chat(n=3))
        whole = json.loads(answer)
        texts = [choice["message"]["content"] for choice in whole["choices"]]
        assert len(set(texts)) == 3
        assert whole["usage"]["completion_tokens"] == 15
        _, answer = await e.answer(CHAT, ask_chat(n=3, stream=True))
        output = ["", "", ""]
        finished = set()
        for event in json_events(answer):
            choice = event["choices"][0]
            output[choice["index"]] += choice["delta"].get("content", "")
            if choice["finish_reason"]:
                finished.add(choice["index"])
        assert output == texts
        assert finished == {0, 1, 2}


async def test_every_token_is_sent_when_it_is_due_and_never_before() -> None:
    """Due at request + ttft + i * itl, so that lateness does not add up; what was done is on record."""
    async with engine(SimOptions(ttft=Duration(30 * MS), itl=Duration(5 * MS), tokens=20)) as e:
        await e.answer(CHAT, ask_chat(stream=True), x_request_id="mine")
        sent = e.server.send_times["mine"]
        (truth,) = await e.truths()
        assert truth["id"] == "mine"
        assert truth["due_ns"][0] == truth["made_ns"][0]
        assert truth["due_ns"][0] == [truth["accepted_ns"] + (30 + 5 * i) * MS for i in range(20)]
        assert truth["sent_ns"][0] == sent
        assert all(stamp >= due for stamp, due in zip(sent, truth["due_ns"][0], strict=True))
        assert truth["late_ns_max"] == max(s - d for s, d in zip(sent, truth["due_ns"][0], strict=True))
        assert all(b > a for a, b in pairwise(sent))


async def test_a_request_may_ask_for_its_own_schedule() -> None:
    slow = SimOptions(ttft=Duration(60_000 * MS), itl=Duration(60_000 * MS), tokens=4)
    async with engine(slow) as e:
        headers = {"x_sim_ttft_ms": "1.5", "x_sim_itl": "0", "x_sim_tokens": "3", "x_request_id": "r"}
        async with e.post(CHAT, ask_chat(stream=True), **headers) as response:
            assert response.headers["x-request-id"] == "r"
            await response.read()
        assert len(e.server.send_times["r"]) == 3
        (truth,) = await e.truths()
        assert truth["due_ns"] == [[truth["accepted_ns"] + 1_500_000] * 3]


async def test_silence_is_filled_when_asked() -> None:
    async with engine(SimOptions(ttft=Duration(50 * MS), itl=Duration(0), tokens=1)) as e:
        _, body = await e.answer(CHAT, ask_chat(stream=True), x_sim_keepalive_ms="20")
        assert body.startswith(b": keep-alive\n\n: keep-alive\n\ndata: ")
        query = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        _, body = await e.answer("/v1/messages", {**query, "max_tokens": 9}, x_sim_keepalive_ms="20")
        assert body.startswith(b'event: ping\ndata: {"type":"ping"}\n\n' * 2 + b"event: message_start")
        _, body = await e.answer("/api/chat", query, x_sim_keepalive_ms="20")
        assert [json.loads(line)["done"] for line in body.splitlines()] == [False, True]


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"n": 0}, {}),
        ({"n": 1000}, {}),
        ({"max_tokens": 0}, {}),
        ({"max_tokens": -1}, {}),
        ({}, {"x_sim_nonsense": "1"}),
    ],
)
async def test_what_cannot_be_is_refused(body: dict[str, Any], headers: dict[str, str]) -> None:
    async with engine() as e:
        status, answer = await e.answer(CHAT, ask_chat(**body), **headers)
        assert status == 400
        assert json.loads(answer)["error"]["message"]
