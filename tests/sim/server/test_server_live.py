"""The simulated server with an engine behind it: every stage in between works as before, what the engine is
asked for is on record, and whoever leaves or is turned away leaves nothing behind."""

import asyncio
import json
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from llmtap.exchange.outcome import Outcome
from llmtap.sim.engine import Engine as Core
from llmtap.sim.engine import run_virtual
from llmtap.sim.model_options import (
    IterationModel,
    LatencyModel,
    ServingSetup,
    read_model_options,
    read_serving,
)
from llmtap.sim.schedulers.registry import SCHEDULERS
from llmtap.sim.server.options import EngineOptions, SimOptions
from llmtap.workload.prompts.text import count_tokens
from llmtap.workload.requests import Requests
from tests.support.servers.sim_engine import CHAT, PATHS, Engine, ask_chat, engine, explained, json_events

MS = 1_000_000
TEN = SimOptions(tokens=10)
LABELS = '{engine="0",model_name="sim"}'


def behind(scheduler: str = "continuous_batching", **serving: str) -> EngineOptions:
    """An engine that takes 1 ms for a token, and as much for 20 tokens of a prompt."""
    setup = ServingSetup(
        model=LatencyModel(alpha_ns=5 * MS, beta_ns=1 * MS, gamma=0.3),
        readings=read_model_options({"bin_edges": "1,20"}),
        iterations=IterationModel(beta_ns=1 * MS, gamma=0.3, prefill_ns=MS / 20),
        serving=read_serving(serving),
    )
    return EngineOptions(scheduler, setup)


class Times:
    """What the virtual driver says of each request."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, int] = {}

    def on_ended(self, request: int, token_ns: Sequence[int], end_ns: int, *, served: bool) -> None:
        self.tokens[request], self.ends[request] = list(token_ns), end_ns


def virtually(options: EngineOptions, truths: list[dict[str, Any]]) -> Times:
    """The arrivals that a server logged, in virtual time."""
    query = sorted((one for t in truths for one in t["submitted"]), key=lambda one: one["number"])
    assert [one["number"] for one in query] == list(range(len(query)))
    columns = (array("q", [one[name] for one in query]) for name in ("arrival_ns", "input", "output"))
    arrivals, given, made = columns
    requests = Requests(arrivals, given, made, array("q", [one["predicted"] for one in query]))
    times = Times()
    core = Core(SCHEDULERS[options.scheduler].build(requests, options.setup), options.servers)
    run_virtual(requests, core, servers=options.servers, watch=times)
    return times


async def idle(e: Engine) -> dict[str, float]:
    """The metrics, where the engine has nothing left of anybody."""
    metrics = await e.metrics()
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert metrics[f"vllm:{name}{LABELS}"] == 0
    return metrics


@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
async def test_tokens_are_made_and_sent_when_the_virtual_engine_says(scheduler: str) -> None:
    options = behind(scheduler)
    async with engine(TEN, behind=options) as e:

        async def one(i: int) -> None:
            await asyncio.sleep(0.004 * i)
            body = ask_chat(stream=i % 3 > 0, max_tokens=5 + 3 * i, ignore_eos=True, n=1 + i % 2)
            status, answer = await e.answer(CHAT, body)
            assert status == 200
            if i % 3:
                assert answer.endswith(b"data: [DONE]\n\n")
                finished = [x["choices"][0]["finish_reason"] for x in json_events(answer)]
                assert finished.count("length") == 1 + i % 2
            else:
                assert json.loads(answer)["usage"]["completion_tokens"] == (5 + 3 * i) * (1 + i % 2)

        await asyncio.gather(*(one(i) for i in range(9)))
        truths = await e.ended(9)
        await idle(e)
    times = virtually(options, truths)
    for truth in truths:
        over_ns = max(times.ends[one["number"]] for one in truth["submitted"])
        for one, made, due, sent in zip(
            truth["submitted"], truth["made_ns"], truth["due_ns"], truth["sent_ns"], strict=True
        ):
            assert one["arrival_ns"] == truth["accepted_ns"]
            assert len(made) == one["output"]
            assert made == times.tokens[one["number"]]
            assert due == (made if truth["stream"] else [over_ns] * len(made))
            assert all(s >= d for s, d in zip(sent, due, strict=True))
        assert truth["ended_ns"] >= over_ns, "of a whole batch, with the longest in it"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
async def test_who_is_given_up_before_a_token_is_told_when_to_come_back(path: str, stream: bool) -> None:
    serving = {"seqs_max": "1", "kv_tokens": "60000", "give_up": "late", "ttft": "20ms", "tbt": "100s"}
    async with engine(SimOptions(tokens=50_000), behind=behind(**serving)) as e:
        staying = asyncio.create_task(e.answer(CHAT, ask_chat(stream=True)))
        await e.until("running")
        async with e.post(path, {**PATHS[path], "stream": stream}) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert "error" in await response.json()
        (truth,) = await e.truths()
        assert (truth["outcome"], truth["status"], truth["sent_ns"]) == ("given_up", 503, [[]])
        assert truth["finish"] == [None]
        staying.cancel()
        await e.ended(2)
        await idle(e)


@pytest.mark.parametrize("path", PATHS)
async def test_who_is_given_up_midway_is_told_in_the_stream(path: str) -> None:
    """A second prompt is so long that the first request's next token is late."""
    serving = {"give_up": "late", "tbt": "8ms", "ttft": "10s"}
    async with engine(SimOptions(tokens=30_000), behind=behind(**serving)) as e:
        query: dict[str, Any] = {**PATHS[path], "stream": True}
        if "max_tokens" in query:
            query["max_tokens"] = 30_000
        async with e.post(path, query) as response:
            body = await response.content.readany()
            long = ask_chat(messages=[{"role": "user", "content": "and " * 1_500}], max_tokens=1)
            await e.answer(CHAT, long)
            body += await response.read()
        truths = await e.ended(2)
        await idle(e)
    truth = next(t for t in truths if t["stream"])
    assert (truth["outcome"], truth["status"], truth["finish"]) == ("given_up", 200, [None])
    sent = len(truth["sent_ns"][0])
    assert 0 < sent == len(truth["made_ns"][0]) < 30_000, "what was made has left"
    assert explained(body, path).exchange.outcome is Outcome.UPSTREAM_ERROR


async def test_what_the_memory_can_never_hold_is_refused_as_too_long() -> None:
    async with engine(SimOptions(tokens=100), behind=behind(kv_tokens="128")) as e:
        body = ask_chat(messages=[{"role": "user", "content": "and" + " and" * 28}])
        status, answer = await e.answer(CHAT, body)
        assert status == 400
        assert "128" in json.loads(answer)["error"]["message"]
        body = ask_chat(messages=[{"role": "user", "content": "and" + " and" * 27}])
        assert (await e.answer(CHAT, body))[0] == 200
        (truth,) = await e.truths()
        assert truth["submitted"][0]["number"] == 0, "the engine never heard of the other"


@pytest.mark.parametrize("stream", [True, False])
async def test_the_prefix_cache_shows_in_usage_and_metrics(stream: bool) -> None:
    async with engine(TEN, behind=behind(prefix_cache="true")) as e:
        usages = []
        for last in ("one", "two"):
            shown = "the same words again and again " * 6 + last
            messages = [{"role": "user", "content": shown}]
            body = ask_chat(stream=stream, stream_options={"include_usage": True}, messages=messages)
            _, answer = await e.answer(CHAT, body)
            usages.append((json_events(answer)[-1] if stream else json.loads(answer))["usage"])
        truths = await e.truths()
        metrics = await idle(e)
    length = count_tokens("the same words again and again " * 6 + "one")
    shared = (length - 1) // 16 * 16
    assert [usage["prompt_tokens_details"] for usage in usages] == [
        {"cached_tokens": 0},
        {"cached_tokens": shared},
    ]
    assert [usage["prompt_tokens"] for usage in usages] == [length] * 2
    assert [truth["submitted"][0]["cached"] for truth in truths] == [0, shared]
    assert metrics[f"vllm:prefix_cache_queries_total{LABELS}"] == 2 * length
    assert metrics[f"vllm:prefix_cache_hits_total{LABELS}"] == shared
