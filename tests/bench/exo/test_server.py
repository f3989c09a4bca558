"""Servers that are not ours: they are asked by their own fields, and what they tell of themselves is told."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from llmtap.bench.exo.mode import ExoGrid
from llmtap.bench.exo.result import ExoResult
from llmtap.bench.exo.server import Placement, placement_of
from llmtap.errors import ConfigError
from tests.bench.exo.exo import LIMIT_S, bench
from tests.support.servers.peer import play

INSTANCE = {
    "MlxRingInstance": {
        "instanceId": "i1",
        "shardAssignments": {
            "modelId": "m/one",
            "runnerToShard": {"r1": {"PipelineShardMetadata": {}}, "r2": {"PipelineShardMetadata": {}}},
            "nodeToRunner": {"n1": "r1", "n2": "r2"},
        },
    }
}


def test_the_placement_is_that_of_the_model_s_instance() -> None:
    other = {"MlxJacclInstance": {"shardAssignments": {"modelId": "m/two"}}}
    assert placement_of({"i0": other, "i1": INSTANCE}, "m/one") == Placement("Pipeline", "MlxRing", 2)
    assert placement_of({"i0": other}, "m/one") == placement_of(None, "m/one") == Placement()


class Asked:
    """A server that is not ours, and what it was asked."""

    def __init__(self, owner: str, answer: Any) -> None:
        self.owner = owner
        self.answer = answer
        self.url = ""
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.nodes_asked = 0

    async def models(self, request: web.Request) -> web.Response:
        models = [{"id": "m/one", "owned_by": self.owner}, {"id": "m/two", "owned_by": self.owner}]
        return web.json_response({"object": "list", "data": models})

    async def state(self, request: web.Request) -> web.Response:
        return web.json_response({"instances": {"i1": INSTANCE}, "topology": {"nodes": ["n1"]}, "tasks": {}})

    async def nodes(self, request: web.Request) -> web.Response:
        self.nodes_asked += 1
        return web.json_response({"n1": {"sysPower": 40.0, "temp": 51.0}, "n2": {"sysPower": 60}})

    async def chat(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        self.bodies.append(await request.json())
        await asyncio.sleep(0.3)  # longer than the durations that it reports: others are not believed
        return web.json_response(self.answer)


@asynccontextmanager
async def served(server: Asked, tls: ssl.SSLContext | None = None) -> AsyncIterator[Asked]:
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/state", server.state)
    app.router.add_get("/state/nodeSystem", server.nodes)
    app.router.add_post("/bench/chat/completions", server.chat)
    app.router.add_post("/v1/chat/completions", server.chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        server.url = f"http{'' if tls is None else 's'}://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()


def whole(cached: int, **more: Any) -> dict[str, Any]:
    """A chat completion in one piece."""
    return {
        "id": "c", "object": "chat.completion", "created": 1, "model": "m/one",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "x" * 300}, "finish_reason": "length"}
        ],
        "usage": {
            "prompt_tokens": 60, "completion_tokens": 9, "total_tokens": 69,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
        **more,
    }  # fmt: skip


def stats(hit: str) -> dict[str, Any]:
    return {
        "prompt_tps": 1_234.5, "generation_tps": 40.0, "prompt_tokens": 60, "generation_tokens": 9,
        "peak_memory_usage": {"inBytes": 5}, "prefix_cache_hit": hit,
    }  # fmt: skip


async def against(server: Asked, **grid: Any) -> ExoResult:
    async with served(server):
        result = await bench(server.url, ExoGrid(pp=[60], tg=[9], **grid), model="m/one")
        if server.owner == "exo":
            assert server.nodes_asked
        return result


@pytest.mark.parametrize(("hit", "cached"), [("none", 0), ("partial", 20)])
def test_exo_s_own_rates_come_through(hit: str, cached: int) -> None:
    server = Asked("exo", whole(cached, generation_stats=stats(hit)))
    result = play(against(server, concurrency=[2]), LIMIT_S)
    assert set(server.paths) == {"/bench/chat/completions"}
    assert [body["use_prefix_cache"] for body in server.bodies] == [False, False]
    assert not any("ignore_eos" in body or body["stream"] for body in server.bodies)
    assert len({json.dumps(body["messages"]) for body in server.bodies}) == 1, "one prompt for the batch"
    for one in result.runs:
        assert one.timing == "server" and one.timing_source == "generation_stats"
        assert one.stats.prompt_tps == pytest.approx(1_234.5)
        assert one.stats.generation_tps == pytest.approx(40.0)
        assert one.prefix_cache_hit == hit
        assert one.output_text_preview == "x" * 200
        assert (one.placement_sharding, one.placement_instance_meta, one.placement_nodes) == (
            "Pipeline", "MlxRing", 2,
        )  # fmt: skip
    assert result.cluster["state"].keys() == {"instances", "topology"}
    assert result.system_metrics["nodes"]["n2"]["series"]["power"]["values"][0] == 60.0
    assert result.runs[0].batch.energy is not None
    assert result.runs[0].batch.energy.average_power_w == pytest.approx(100.0)


def test_an_exact_hit_of_exo_has_no_rate_of_its_own() -> None:
    server = Asked("exo", whole(60, generation_stats=stats("exact")))
    (one,) = play(against(server, use_prefix_cache=True), LIMIT_S).runs
    assert server.bodies[0]["use_prefix_cache"] is True
    assert (one.prefix_cache_hit, one.stats.prompt_tps, one.prompt_tps_stored) == ("exact", None, False)
    assert one.timing == "server" and one.stats.generation_tps == pytest.approx(40.0)


def test_llama_cpp_is_asked_by_its_own_fields() -> None:
    timings = {"prompt_n": 60, "prompt_ms": 30.0, "predicted_n": 9, "predicted_ms": 160.0}
    server = Asked("llamacpp", whole(0, timings=timings))
    (one,) = play(against(server), LIMIT_S).runs
    assert server.paths == ["/v1/chat/completions"]
    body = server.bodies[0]
    assert (body["ignore_eos"], body["cache_prompt"], body["max_tokens"]) == (True, False, 9)
    assert one.timing == "server" and one.eos_banned
    assert one.stats.prompt_tps == pytest.approx(2_000.0)
    assert one.stats.generation_tps == pytest.approx(50.0)


def test_of_a_server_nobody_knows_it_is_said_that_answers_may_end_early() -> None:
    server = Asked("someone", whole(0))
    result = play(against(server), LIMIT_S)
    assert "ignore_eos" not in server.bodies[0]
    assert not result.runs[0].eos_banned
    notes = result.cluster["bench"]["notes"]
    assert any("end early" in note for note in notes)
    assert any("own tokenizer" in note for note in notes)


def test_which_model_has_to_be_said_where_there_are_several() -> None:
    async def refused() -> ConfigError:
        async with served(Asked("exo", {})) as server:
            with pytest.raises(ConfigError) as caught:
                await bench(server.url, ExoGrid(pp=[60], tg=[9]))
            return caught.value

    error = play(refused(), LIMIT_S)
    assert error.place == "--model" and "m/one, m/two" in error.problem


def test_another_ca_is_trusted_for_all_that_is_asked(tmp_path: Path) -> None:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(tls)
    server = Asked("exo", whole(0, generation_stats=stats("none")))

    async def measured() -> ExoResult:
        async with served(server, tls):
            with pytest.raises(ConfigError, match="certificate not trusted"):
                await bench(server.url, ExoGrid(pp=[60], tg=[9]), model="m/one")
            return await bench(
                server.url, ExoGrid(pp=[60], tg=[9]), model="m/one", ca=str(tmp_path / "ca.pem")
            )

    result = play(measured(), LIMIT_S)
    assert [one.outcome for one in result.runs] == ["complete"]
    assert server.nodes_asked and result.system_metrics["nodes"].keys() == {"n1", "n2"}
