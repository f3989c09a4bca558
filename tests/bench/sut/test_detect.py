"""What a server tells is told right, with its source; the rest is a comment that can be filled in."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from llmtap.bench.sut.detect import Detected, detect, starter_text
from llmtap.bench.sut.sut import BenchTarget, load_bench
from llmtap.errors import ConfigError
from llmtap.workload.prompts.text import tokenizer_json
from tests.bench.support import sim
from tests.support.servers.loading import events
from tests.support.servers.peer import play


@asynccontextmanager
async def serving(answers: dict[str, Any], stream: list[bytes] | None = None) -> AsyncIterator[str]:
    """A server that knows these paths: JSON, or text; and a stream for whatever it is asked to generate."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "POST" and stream is not None:
            assert (await request.json())["stream"] is True
            return web.Response(body=b"".join(stream), headers={"Content-Type": "text/event-stream"})
        if request.path not in answers:
            return web.json_response({"error": "no such thing"}, status=404)
        told = answers[request.path]
        return web.Response(text=told) if isinstance(told, str) else web.json_response(told)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def found(answers: dict[str, Any], stream: list[bytes] | None = None, **target: Any) -> Detected:
    async def run() -> Detected:
        async with serving(answers, stream) as url:
            return await detect(BenchTarget(url=url, **target))

    told: Detected = play(run(), limit_s=250)
    return told


def values(detected: Detected) -> dict[str, Any]:
    return {key: fact.value for key, fact in detected.facts.items()}


def models(*ids: str, owner: str = "vllm", **more: Any) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": one, "owned_by": owner, **more} for one in ids]}


def loaded(detected: Detected, tmp_path: Path) -> Any:
    file = tmp_path / "bench.toml"
    file.write_text(starter_text(detected), encoding="utf-8")
    return load_bench(file)


def test_our_own_simulator_is_known_with_its_chunks(tmp_path: Path) -> None:
    with sim("--set", "pacing.tokens_per_chunk=4") as url:
        detected = asyncio.run(detect(BenchTarget(url=url)))
    told = values(detected)
    assert told["sut.software"] == "llmtap sim serve"
    assert told["sut.chunking"] == "several tokens per chunk"
    assert told["sut.protocol"] == "SSE"
    assert told["sut.clock.placement"] == "same machine"
    assert told["target.endpoint"] == "completions"
    assert told["target.server"] == "vllm"
    assert told["sut.tokenizer.vocabulary"] == len(tokenizer_json()["model"]["vocab"])
    file = loaded(detected, tmp_path)
    assert (file.target.url, file.target.model) == (url, told["target.model"])
    assert file.sut.chunking == "several tokens per chunk"
    assert file.sut.hardware.count == 0


def test_vllm_tells_its_version_its_cache_and_its_model(tmp_path: Path) -> None:
    answers = {
        "/v1/models": models("qwen", root="Qwen/Qwen2-7B"),
        "/version": {"version": "0.9.1"},
        "/metrics": 'vllm:cache_config_info{block_size="16",enable_prefix_caching="False"} 1.0\n',
    }
    detected = found(answers, events(6))
    told = values(detected)
    assert told["sut.software"] == "vLLM 0.9.1"
    assert told["sut.boundary"] == "model engine"
    assert told["sut.prefix_cache"] is False
    assert told["sut.tokenizer.source"] == "Qwen/Qwen2-7B"
    assert told["sut.chunking"] == "one token per chunk"
    assert told["target.server"] == "vllm"
    assert detected.facts["target.server"].source == "owned_by of GET /v1/models"
    assert loaded(detected, tmp_path).sut.prefix_cache is False


def test_sglang_tells_what_it_was_started_with() -> None:
    told = values(
        found(
            {
                "/v1/models": models("m", owner="sglang"),
                "/get_model_info": {"model_path": "org/m"},
                "/get_server_info": {
                    "version": "0.4.6",
                    "disable_radix_cache": True,
                    "max_running_requests": 48,
                    "tp_size": 2,
                    "quantization": "fp8",
                },
            }
        )
    )
    assert told["sut.software"] == "SGLang 0.4.6"
    assert told["sut.prefix_cache"] is False
    assert told["sut.max_batch"] == 48
    assert told["sut.model"] == "org/m, fp8"


def test_litellm_is_a_gateway_with_guardrails(tmp_path: Path) -> None:
    answers = {
        "/v1/models": models("a", "b", owner="openai"),
        "/health/readiness": {"litellm_version": "1.70.0"},
        "/guardrails/list": {
            "guardrails": [{"guardrail_name": "pii", "litellm_params": {"mode": ["pre_call", "post_call"]}}]
        },
    }
    detected = found(answers, events(3), model="a")
    told = values(detected)
    assert told["sut.boundary"] == "application gateway"
    assert told["sut.software"] == "LiteLLM 1.70.0"
    assert told["sut.guardrails.names"] == ["pii"]
    assert told["sut.guardrails.input_filter"] is told["sut.guardrails.output_filter"] is True
    assert told["target.endpoint"] == "chat.completions"
    assert detected.hints["target.model"] == "one of a, b"
    assert loaded(detected, tmp_path).sut.guardrails.names == ["pii"]


def test_every_example_in_a_comment_can_be_declared(tmp_path: Path) -> None:
    text = starter_text(Detected("http://127.0.0.1:1"))
    file = tmp_path / "bench.toml"
    declared = text.partition("\n# Configurations")[0]
    file.write_text(re.sub(r"^# ([a-z_]+ = )", r"\1", declared, flags=re.MULTILINE))
    read = load_bench(file)
    assert (read.sut.tokenizer.vocabulary, read.sut.clock.accuracy) == (151_936, "2ms")
    assert (read.sut.start, read.target.processes) == (["vllm", "serve", "NAME"], 1)
    assert "4.4.3" in text


@pytest.mark.parametrize(
    "text", ['a "quote"', "back\\slash", "line\nbreak", "tab\tand\x7fdelete", "наука 数"], ids=ascii
)
def test_whatever_a_server_says_is_toml(tmp_path: Path, text: str) -> None:
    detected = Detected("http://127.0.0.1:1")
    detected.add_fact("sut.model", text, "it said so")
    assert loaded(detected, tmp_path).sut.model == text


def test_nobody_there_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        asyncio.run(detect(BenchTarget(url="http://127.0.0.1:9")))
    assert caught.value.place == "--target"
    assert caught.value.problem == "http://127.0.0.1:9 cannot be reached: connection refused"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_endpoint_that_exists_is_written_to_the_file(tmp_path: Path, path: str) -> None:
    """Without `endpoint` in its file, a benchmark sends completions also to a server of chats alone."""

    async def run() -> Detected:
        async def answer(request: web.Request) -> web.Response:
            if request.path == "/v1/models":
                return web.json_response(models("m", owner="somebody"))
            known = request.method == "POST" and request.path == path
            return web.Response(text="{}", content_type="application/json", status=200 if known else 404)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            return await detect(BenchTarget(url=f"http://127.0.0.1:{runner.addresses[0][1]}"))
        finally:
            await runner.cleanup()

    file = loaded(play(run()), tmp_path)
    assert file.target.endpoint == path.removeprefix("/v1/").replace("/", ".")
