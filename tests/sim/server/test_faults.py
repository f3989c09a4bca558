"""Guardrails and faults: each as a client meets it, and as llmtap's own reader understands it."""

import random
from typing import Any

import aiohttp
import pytest

from llmtap.exchange.outcome import Outcome
from llmtap.sim.server.options import FaultOptions, GuardrailOptions, SimOptions
from llmtap.sim.server.reception import REFUSAL, RequestFaults, draw_faults
from llmtap.units import Duration
from llmtap.workload.prompts.text import count_tokens
from tests.support.servers.sim_engine import CHAT, PATHS, ask_chat, engine, explained, json_events

MS = 1_000_000
TIMED = SimOptions(ttft=Duration(2 * MS), itl=Duration(1 * MS), tokens=10)


def due(truth: dict[str, Any]) -> list[float]:
    """When tokens were due, in ms from acceptance."""
    return [(at - truth["accepted_ns"]) / MS for at in truth["due_ns"][0]]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        ({"x_sim_input_filter_ms": "5"}, [7, 8, 9, 10, 11, 12, 13, 14, 15, 16]),
        ({"x_sim_output_hold": "4"}, [5, 5, 5, 5, 9, 9, 9, 9, 11, 11]),
        ({"x_sim_output_hold": "4", "x_sim_output_filter_ms": "2"}, [7, 7, 7, 7, 11, 11, 11, 11, 13, 13]),
        ({"x_sim_output_hold": "all"}, [11] * 10),
    ],
)
async def test_filters_delay_what_they_look_at(headers: dict[str, str], expected: list[float]) -> None:
    async with engine(TIMED) as e:
        _, body = await e.answer(CHAT, ask_chat(stream=True), **headers)
        (truth,) = await e.truths()
    assert due(truth) == expected
    text = "".join(x["choices"][0]["delta"].get("content", "") for x in json_events(body))
    assert count_tokens(text) == 10, "and nothing is lost"
    assert all(s >= d for s, d in zip(truth["sent_ns"][0], truth["due_ns"][0], strict=True))


@pytest.mark.parametrize(
    ("headers", "sent"),
    [
        ({"x_sim_block_after": "3"}, 3),
        ({"x_sim_block_after": "0"}, 0),
        ({"x_sim_block_after": "6", "x_sim_output_hold": "4"}, 4),
        ({"x_sim_block_after": "6", "x_sim_output_hold": "all"}, 0),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_blocked_midway(headers: dict[str, str], sent: int, stream: bool) -> None:
    async with engine(TIMED) as e:
        request = ask_chat(stream=stream, stream_options={"include_usage": True})
        _, body = await e.answer(CHAT, request, **headers)
        (truth,) = await e.truths()
    x = explained(body, CHAT).exchange
    assert x.finish_reason == "content_filter"
    assert x.tokens.output == sent == len(truth["sent_ns"][0])
    assert x.refusal is not None and x.refusal["kind"] == ("output_guardrail" if sent else "input_guardrail")
    assert (truth["outcome"], truth["finish"]) == ("blocked", ["content_filter"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
async def test_refusals(path: str, stream: bool) -> None:
    kinds = {}
    async with engine(TIMED) as e:
        for how in ("content_filter", "text", "field", "error"):
            request = {**PATHS[path], "stream": stream, "stream_options": {"include_usage": True}}
            status, body = await e.answer(path, request, x_sim_refusal=how)
            assert status == (400 if how == "error" else 200)
            refusal = explained(body, path).exchange.refusal
            kinds[how] = refusal["kind"] if refusal else None
        truths = await e.truths()
    assert [truth["outcome"] for truth in truths] == ["refused"] * 4
    assert [truth["status"] for truth in truths] == [200, 200, 200, 400]
    assert truths[0]["sent_ns"] == truths[3]["sent_ns"] == [[]]
    assert len(truths[1]["sent_ns"][0]) == len(truths[2]["sent_ns"][0]) == count_tokens(REFUSAL)
    assert kinds["text"] == "model_refusal"
    if path in (CHAT, "/v1/responses"):
        assert kinds["field"] == "model_refusal"
    if path in (CHAT, "/v1/completions"):
        assert kinds["content_filter"] == "input_guardrail"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fault", "outcome"),
    [("unfinished", Outcome.TRUNCATED), ("error", Outcome.UPSTREAM_ERROR), ("stall", Outcome.COMPLETE)],
)
async def test_faults_that_leave_http_whole(path: str, fault: str, outcome: Outcome) -> None:
    async with engine(TIMED) as e:
        headers = {"x_sim_fault": fault, "x_sim_fault_after": "4", "x_sim_stall_ms": "20"}
        status, body = await e.answer(path, {**PATHS[path], "stream": True}, **headers)
        (truth,) = await e.truths()
    assert status == 200
    assert explained(body, path).exchange.outcome is outcome
    assert truth["outcome"] == fault
    if fault == "stall":
        assert due(truth) == [2, 3, 4, 5, 26, 27, 28, 29, 30, 31]
    else:
        assert len(truth["sent_ns"][0]) == 4


@pytest.mark.parametrize("fault", ["reset", "truncate"])
@pytest.mark.parametrize("after", ["4", "0", "99"])
@pytest.mark.parametrize("stream", [True, False])
async def test_faults_that_break_the_connection(fault: str, after: str, stream: bool) -> None:
    async with engine(TIMED) as e:
        got = b""
        with pytest.raises(aiohttp.ClientError):
            async with e.post(
                CHAT, ask_chat(stream=stream), x_sim_fault=fault, x_sim_fault_after=after
            ) as response:
                async for data in response.content.iter_any():
                    got += data
        (truth,) = await e.truths()
        status, _ = await e.answer(CHAT, ask_chat())
        assert status == 200, "and the next is served"
    assert truth["outcome"] == fault
    assert b"[DONE]" not in got
    if stream and fault == "truncate":
        assert got and not got.endswith(b"\n\n"), "in the middle of an event"
        assert len(truth["sent_ns"][0]) == min(int(after), 9)


def test_rates_are_kept_and_a_seed_repeats_them() -> None:
    options = SimOptions(
        faults=FaultOptions(stall_rate=0.1, busy_rate=0.2, slow_rate=0.3),
        guardrails=GuardrailOptions(refusal_rate=0.25, block_rate=0.5, block_after=3),
    )
    drawn = [draw_faults(options, random.Random(f"{i}")) for i in range(4_000)]
    assert drawn == [draw_faults(options, random.Random(f"{i}")) for i in range(4_000)]
    for share, found in (
        (0.1, sum(m.fault == "stall" for m in drawn)),
        (0.2, sum(m.fault == "429" for m in drawn)),
        (0.3, sum(m.fault == "slow" for m in drawn)),
        (0.4, sum(m.fault is None for m in drawn)),
        (0.25, sum(m.refusal is not None for m in drawn)),
        (0.5, sum(m.block_after == 3 for m in drawn)),
    ):
        assert abs(found / 4_000 - share) < 0.03
    assert draw_faults(SimOptions(), random.Random(0)) == RequestFaults()


@pytest.mark.parametrize(
    ("headers", "stream", "finish", "reason", "prompt_tokens"),
    [
        ({}, True, "stop", "stop", 1),
        ({"x_sim_fault": "429"}, True, None, None, 0),
        ({"x_sim_refusal": "error"}, True, None, None, 0),
        ({"x_sim_refusal": "content_filter"}, True, "content_filter", "content_filter", 0),
        ({"x_sim_block_after": "2"}, True, "content_filter", "content_filter", 1),
        ({"x_sim_fault": "error"}, True, None, "error", 1),
        ({"x_sim_fault": "unfinished"}, True, None, "abort", 1),
        ({"x_sim_fault": "reset"}, True, None, "abort", 1),
        ({"x_sim_fault": "truncate", "x_sim_fault_after": "0"}, True, None, "abort", 1),
        ({"x_sim_fault": "stall", "x_sim_stall_ms": "3"}, True, "stop", "stop", 1),
    ],
)
async def test_only_what_was_answered_has_a_finish_and_only_what_was_taken_in_counts(
    headers: dict[str, str], stream: bool, finish: str | None, reason: str | None, prompt_tokens: int
) -> None:
    async with engine(TIMED) as e:
        try:
            await e.answer(CHAT, ask_chat(stream=stream), **headers)
        except aiohttp.ClientError:
            assert headers["x_sim_fault"] in ("reset", "truncate")
        truths = await e.ended()  # a client that was reset knows it before
        metrics = await e.metrics()
    assert truths[0]["finish"] == [finish]
    success = {name: n for name, n in metrics.items() if name.startswith("vllm:request_success_total{")}
    assert {name.split('finished_reason="')[1].split('"')[0] for name, n in success.items() if n} == (
        {reason} if reason else set()
    )
    assert metrics['vllm:prompt_tokens_total{engine="0",model_name="sim"}'] == prompt_tokens
