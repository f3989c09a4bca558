"""The benchmark endpoint of exo: exactly `max_tokens`, rates of the server, no prefix cache by default."""

import json
from typing import Any

import pytest

from llmtap.bench.exo.mode import ExoGrid
from llmtap.sim.model_options import ServingSetup, read_serving
from llmtap.sim.server.options import EngineOptions, SimOptions
from llmtap.units import Duration
from llmtap.workload.prompts.text import count_tokens
from tests.bench.exo.exo import bench
from tests.support.servers.sim_engine import Engine, engine

BENCH = "/bench/chat/completions"
PROMPT = " ".join(f"word{i}" for i in range(200))


async def asked(e: Engine, **body: Any) -> dict[str, Any]:
    status, answer = await e.answer(BENCH, {"messages": [{"role": "user", "content": PROMPT}], **body})
    assert status == 200, answer
    found: dict[str, Any] = json.loads(answer)
    return found


async def test_rates_are_those_of_the_schedule() -> None:
    """exo-bench: prompt tokens / prefill time; (completion tokens - 1) / (last token - first token)."""
    async with engine(SimOptions(ttft=Duration(50_000_000), itl=Duration(10_000_000), tokens=3)) as e:
        answer = await asked(e, max_tokens=11, stream=True, stop=[" "])
    stats, tokens = answer["generation_stats"], count_tokens(PROMPT)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (stats["prompt_tokens"], stats["generation_tokens"]) == (tokens, 11)
    assert count_tokens(answer["choices"][0]["message"]["content"]) == 11
    assert stats["prompt_tps"] == pytest.approx(tokens / 0.05)
    assert stats["generation_tps"] == pytest.approx(10 / 0.1)
    assert stats["prefix_cache_hit"] == "none"


async def test_the_prefix_cache_is_off_unless_it_is_wanted() -> None:
    serving = read_serving({"prefix_cache": "true", "block": "16"})
    behind = EngineOptions("continuous_batching", ServingSetup(serving=serving))
    async with engine(SimOptions(tokens=2), behind=behind) as e:
        cached = {"max_tokens": 2, "use_prefix_cache": True}
        wanted = [cached, cached, {"max_tokens": 2}]
        hits = [(await asked(e, **body))["generation_stats"]["prefix_cache_hit"] for body in wanted]
    assert hits == ["none", "partial", "none"]


async def test_one_token_has_no_rate() -> None:
    async with engine() as e:
        assert (await asked(e, max_tokens=1))["generation_stats"]["generation_tps"] == 0
        assert (await e.answer(BENCH, {"messages": [], "use_prefix_cache": "yes"}))[0] == 400


async def test_bench_exo_takes_its_rates() -> None:
    options = SimOptions(ttft=Duration(50_000_000), itl=Duration(10_000_000))
    async with engine(options) as e:
        result = await bench(e.url, ExoGrid(pp=[60], tg=[9]), server="exo")
        assert {truth["path"] for truth in await e.truths()} == {BENCH}
    [run] = result.runs
    assert run.timing == "server"
    assert (run.stats.prompt_tokens, run.stats.generation_tokens) == (60, 9)
    assert run.stats.prompt_tps == pytest.approx(60 / 0.05)
    assert run.stats.generation_tps == pytest.approx(8 / 0.08)
