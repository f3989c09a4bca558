"""A run against a real `llmtap sim serve`, watched: what the server did stands in both kinds of samples."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import pytest

from llmtap.clock import SystemClock
from llmtap.load.monitor.watch import Watch
from llmtap.report.render import terminal_text
from llmtap.report.summary import system_blocks
from tests.support.nvml import FakeGpu, FakeNvml
from tests.support.peer import scene, wait_until

SERVE = [sys.executable, "-P", "-m", "llmtap.cli", "sim", "serve", "--listen", "127.0.0.1:0"]
TOKENS, STREAMS = 400, 3
PERIOD_NS = 100_000_000
THE_LAST = ({}, {"no answer in time": 1})
"""The last scrape waits no longer than a period, and so may fail on a busy machine; no other may."""


@contextmanager
def sim(*args: str) -> Iterator[tuple[str, int]]:
    """A simulated server: its URL and pid."""
    with subprocess.Popen(
        [*SERVE, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "http://" in line, line
            yield line[line.index("http://") :].split("/v1")[0], process.pid
        finally:
            process.terminate()


async def ask(session: aiohttp.ClientSession, url: str) -> int:
    """A chat whose answer has so many tokens; how many the server says it had."""
    body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS}
    more = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    async with session.post(f"{url}/v1/chat/completions", json={**body, **more}) as response:
        assert response.status == 200
        text = await response.text()
    usage = [json.loads(line[6:]).get("usage") for line in text.splitlines() if line.startswith("data: {")]
    return int(next(told for told in usage if told)["completion_tokens"])


@scene
async def test_a_real_server_is_watched_from_both_sides() -> None:
    nvml = FakeNvml(FakeGpu(milliwatts=[200_000]))
    with sim("--scheduler", "continuous_batching") as (url, pid):
        watch = Watch(SystemClock(), f"{url}/v1", period_ns=PERIOD_NS, nvml=nvml)
        start_ns = SystemClock().mono_ns()
        watch.start()
        async with aiohttp.ClientSession() as session:
            await wait_until(lambda: "running" in watch.latest())
            async with asyncio.TaskGroup() as tasks:
                answers = [tasks.create_task(ask(session, url)) for _ in range(STREAMS)]
                await wait_until(lambda: watch.latest()["running"] == STREAMS)
            tokens = sum(answer.result() for answer in answers)
            await wait_until(lambda: watch.latest().get("generation_tokens") == tokens)
        series = await watch.close(start_ns)
    told = series.summary(from_ns=start_ns, tokens=tokens)
    assert tokens >= STREAMS
    assert told["server"]["generation_tokens"]["total"] == tokens
    assert told["server"]["running"]["max"] == STREAMS
    assert told["server"]["waiting"]["n"] == told["server"]["running"]["n"] > 2
    assert 0 < told["server"]["kv_use"]["max"] <= 1
    assert told["scrape"]["failures"] in THE_LAST
    # The server was found by its port.
    assert [process["pid"] for process in told["processes"]["server"]] == [pid]
    assert os.getpid() in [process["pid"] for process in told["processes"]["sender"]]
    assert told["system"]["server_cpu"]["n"] > 2 and told["system"]["server_memory"]["max"] > 1 << 20
    # 200 W for as long as it was watched, on as many tokens.
    energy = told["energy"]
    assert energy["power"] == pytest.approx(200)
    assert energy["joules"] == pytest.approx(200 * energy["seconds"])
    assert energy["joules_per_token"] == pytest.approx(energy["joules"] / tokens)
    # One axis: both kinds lie in the same seconds since the start.
    whole = json.loads(json.dumps(series.to_dict(), allow_nan=False))
    for part in ("system", "server"):
        assert 0 <= whole[part]["t"][0] < whole[part]["t"][-1] < 60
    text = terminal_text(system_blocks(told), 120)
    for said in ("server, CPU", "KV use", f"output tokens {tokens:,}", "GPU 0, power", "W on average"):
        assert said in text


@scene
async def test_a_target_that_is_away_is_told_and_no_more() -> None:
    watch = Watch(
        SystemClock(), "http://127.0.0.1:1/v1", period_ns=PERIOD_NS, nvml=FakeNvml(fails="Driver Not Loaded")
    )
    start_ns = SystemClock().mono_ns()
    watch.start()
    await wait_until(lambda: "host_cpu" in watch.latest())
    series = await watch.close(start_ns)
    told = series.summary()
    assert told["server"] == {}
    assert told["gpu"] is None and told["energy"] is None
    assert told["why_not"] == {"server": "nobody listens on port 1", "gpu": "no NVML: Driver Not Loaded"}
    late = told["scrape"]["failures"].pop("no answer in time", 0)
    assert late <= 1
    assert told["scrape"]["failures"] == {"connection refused": told["scrape"]["failed"] - late}
    assert told["scrape"]["url"] == "http://127.0.0.1:1/metrics"
    assert not told["scrape"]["gave_up"], "who is not there may come yet"


@scene
async def test_metrics_may_be_elsewhere() -> None:
    with sim() as (url, _):
        watch = Watch(
            SystemClock(), "https://gateway.invalid", metrics=f"{url}/metrics", period_ns=PERIOD_NS,
            nvml=FakeNvml(fails="no"),
        )  # fmt: skip
        watch.start()
        await wait_until(lambda: "running" in watch.latest())
        series = await watch.close(0)
    assert series.about["why_not"]["server"] == "gateway.invalid is not a loopback address"
    assert series.about["scrape"]["failures"] in THE_LAST
