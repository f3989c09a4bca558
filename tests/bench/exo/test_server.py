"""Servers that are not ours: they are asked by their own fields, and what they tell of themselves is told."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from llmtap.bench.exo.mode import ExoGrid
from llmtap.bench.exo.result import ExoResult
from llmtap.bench.exo.server import Placement, PlacementFilter, placement_of
from llmtap.errors import ConfigError, LlmtapError
from tests.bench.exo.exo import LIMIT_S, bench, know_power
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

    def routes(self) -> list[web.RouteDef]:
        return []

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
    app.router.add_routes(server.routes())
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
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m/one",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "x" * 300}, "finish_reason": "length"}
        ],
        "usage": {
            "prompt_tokens": 60,
            "completion_tokens": 9,
            "total_tokens": 69,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
        **more,
    }


def stats(hit: str) -> dict[str, Any]:
    return {
        "prompt_tps": 1_234.5,
        "generation_tps": 40.0,
        "prompt_tokens": 60,
        "generation_tokens": 9,
        "peak_memory_usage": {"inBytes": 5},
        "prefix_cache_hit": hit,
    }


async def against(server: Asked, **grid: Any) -> ExoResult:
    async with served(server):
        result = await bench(server.url, ExoGrid(pp=[60], tg=[9], **grid), model="m/one")
        if server.owner == "exo":
            assert server.nodes_asked
        return result


@pytest.mark.parametrize(("hit", "cached"), [("none", 0), ("partial", 20)])
def test_exo_s_own_rates_come_through(monkeypatch: pytest.MonkeyPatch, hit: str, cached: int) -> None:
    know_power(monkeypatch)
    server = Asked("exo", whole(cached, generation_stats=stats(hit)))
    result = play(against(server, concurrency=[2]), LIMIT_S)
    assert set(server.paths) == {"/bench/chat/completions"}
    assert [body["use_prefix_cache"] for body in server.bodies] == [False, False]
    assert not any("ignore_eos" in body or body["stream"] for body in server.bodies)
    assert len({json.dumps(body["messages"]) for body in server.bodies}) == 1, "one prompt for the batch"
    for one in result.runs:
        assert one.timing == "server"
        assert one.stats.prompt_tps == pytest.approx(1_234.5)
        assert one.stats.generation_tps == pytest.approx(40.0)
        assert one.prefix_cache_hit == hit
        assert one.output_text_preview == "x" * 200
        assert (one.placement_sharding, one.placement_instance_meta, one.placement_nodes) == (
            "Pipeline",
            "MlxRing",
            2,
        )
    assert result.cluster["state"].keys() == {"instances", "topology"}
    assert result.system_metrics.nodes["n2"]["series"]["power"]["values"][0] == 60.0
    assert result.system_metrics.energy.average_power_w == pytest.approx(100.0)
    batch = result.runs[0].batch
    assert batch.wall_s is not None and batch.joules == pytest.approx(100.0 * batch.wall_s)


def test_an_exact_hit_of_exo_has_the_stored_rate_that_exo_reports() -> None:
    """Seed 003: "The reported prompt_tps is the TPS from when the cache entry was originally created"."""
    server = Asked("exo", whole(60, generation_stats=stats("exact")))
    (one,) = play(against(server, use_prefix_cache=True), LIMIT_S).runs
    assert server.bodies[0]["use_prefix_cache"] is True
    assert (one.prefix_cache_hit, one.stats.prompt_tps, one.prompt_tps_stored) == ("exact", 1_234.5, True)
    assert one.timing == "server" and one.stats.generation_tps == pytest.approx(40.0)
    assert one.stats.peak_memory_usage == {"inBytes": 5}
    assert "download_duration_s" not in json.loads(msgspec.json.encode(one))


def preview(meta: str, sharding: str, *nodes: str, error: str | None = None) -> dict[str, Any]:
    """One of exo's `/instance/previews`."""
    name = f"{meta}-{sharding}-{len(nodes)}"
    instance = {
        f"{meta}Instance": {
            "instanceId": name,
            "shardAssignments": {
                "modelId": "m/one",
                "runnerToShard": {f"{name}-{n}": {f"{sharding}ShardMetadata": {"on": n}} for n in nodes},
                "nodeToRunner": {n: f"{name}-{n}" for n in nodes},
            },
        }
    }
    return {
        "model_id": "m/one",
        "sharding": sharding,
        "instance_meta": meta,
        "instance": instance,
        "error": error,
    }


PREVIEWS = [
    preview("MlxRing", "Pipeline", "n1"),
    preview("MlxRing", "Tensor", "n1"),
    preview("MlxRing", "Pipeline", "n1", "n2"),
    preview("MlxJaccl", "Tensor", "n1", "n2"),
    preview("MlxJaccl", "Pipeline", "n1", "n2"),
    preview("MlxJaccl", "Tensor", "n1", "n2", "n3", error="no"),
]


@pytest.mark.parametrize(
    ("wish", "fits"),
    [
        (PlacementFilter(), [0, 2, 3, 4]),
        (PlacementFilter(instance_meta="jaccl", sharding="tensor", nodes_min=2, nodes_max=2), [3]),
        (PlacementFilter(instance_meta="ring", nodes_min=2), [2]),
        (PlacementFilter(sharding="tensor", nodes_max=1), [1]),
        (PlacementFilter(nodes_min=3), []),
    ],
)
def test_a_placement_is_chosen_by_the_options_of_the_document(wish: PlacementFilter, fits: list[int]) -> None:
    assert [i for i, one in enumerate(PREVIEWS) if wish.matches(one)] == fits


class Cluster(Asked):
    """An exo cluster with its documented endpoints: n2 has to download, and runners load for a while."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__("exo", whole(0, generation_stats=stats("none")))
        self.fails = fails
        self.calls: list[tuple[str, Any]] = []
        self.instances: dict[str, Any] = {}
        self.downloading: list[str] = []
        self.looks = 0

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/instance/previews", self.previews),
            web.get("/state/downloads/{node}", self.downloads),
            web.post("/download/start", self.start),
            web.post("/instance", self.create),
            web.get("/state/instances/{id}", self.instance),
            web.get("/state/runners/{id}", self.runner),
            web.delete("/instance/{id}", self.delete),
        ]

    async def state(self, request: web.Request) -> web.Response:
        return web.json_response({"instances": {"i1": INSTANCE, **self.instances}})

    async def nodes(self, request: web.Request) -> web.Response:
        self.nodes_asked += 1
        report = {"gpuUsage": 0.9, "temp": 50.0, "sysPower": 40.0, "pcpuUsage": 0.25, "ecpuUsage": 0.5}
        return web.json_response({"n1": report})

    async def previews(self, request: web.Request) -> web.Response:
        assert request.query["model_id"] == "m/one"
        return web.json_response({"previews": PREVIEWS})

    async def downloads(self, request: web.Request) -> web.Response:
        node = request.match_info["node"]
        shard = {"TensorShardMetadata": {"modelCard": {"modelId": "m/one"}}}
        if node == "n2" and node not in self.downloading:
            return web.json_response([])
        return web.json_response([{"DownloadCompleted": {"shardMetadata": shard}}])

    async def start(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(("download", body))
        self.downloading.append(body["targetNodeId"])
        return web.json_response({})

    async def create(self, request: web.Request) -> web.Response:
        instance = (await request.json())["instance"]
        ((_, inner),) = instance.items()
        self.calls.append(("create", inner["instanceId"]))
        self.instances[inner["instanceId"]] = instance
        return web.json_response({})

    async def instance(self, request: web.Request) -> web.Response:
        result = self.instances.get(request.match_info["id"])
        return web.json_response(result, status=404 if result is None else 200)

    async def runner(self, request: web.Request) -> web.Response:
        self.looks += 1
        if self.fails:
            return web.json_response({"RunnerFailed": {"errorMessage": "no memory"}})
        return web.json_response({"RunnerReady": {}} if self.looks > 4 else {"RunnerLoading": {}})

    async def delete(self, request: web.Request) -> web.Response:
        self.calls.append(("delete", request.match_info["id"]))
        del self.instances[request.match_info["id"]]
        return web.json_response({})


WISH = PlacementFilter(instance_meta="jaccl", sharding="tensor", nodes_min=2, nodes_max=2)
"""As in the example of seed 003, "Reproducing Results"."""


def test_the_model_is_downloaded_placed_measured_and_removed() -> None:
    cluster = Cluster()

    async def measured() -> ExoResult:
        async with served(cluster):
            return await bench(cluster.url, ExoGrid(pp=[60], tg=[9]), model="m/one", placement=WISH)

    result = play(measured(), LIMIT_S)
    name = "MlxJaccl-Tensor-2"
    assert cluster.calls == [
        ("download", {"targetNodeId": "n2", "shardMetadata": {"TensorShardMetadata": {"on": "n2"}}}),
        ("create", name),
        ("delete", name),
    ]
    (one,) = result.runs
    assert (one.placement_sharding, one.placement_instance_meta, one.placement_nodes) == (
        "Tensor",
        "MlxJaccl",
        2,
    )
    assert isinstance(one.download_duration_s, float)
    series = result.system_metrics.nodes["n1"]["series"]
    assert (series["performance_cores"]["values"][0], series["efficiency_cores"]["values"][0]) == (0.25, 0.5)
    assert series["power"]["values"][0] == 40.0


def test_an_instance_that_fails_is_removed_and_the_reason_told() -> None:
    cluster = Cluster(fails=True)

    async def measured() -> None:
        async with served(cluster):
            with pytest.raises(LlmtapError, match=r"a runner of .* failed: no memory; see exo's log"):
                await bench(cluster.url, ExoGrid(pp=[60], tg=[9]), model="m/one", placement=WISH)

    play(measured(), LIMIT_S)
    assert [call for call, _ in cluster.calls] == ["download", "create", "delete"]


def test_which_model_has_to_be_said_where_there_are_several() -> None:
    async def refused() -> ConfigError:
        async with served(Asked("exo", {})) as server:
            with pytest.raises(ConfigError) as caught:
                await bench(server.url, ExoGrid(pp=[60], tg=[9]))
            return caught.value

    error = play(refused(), LIMIT_S)
    assert error.place == "--model" and "m/one, m/two" in error.problem
