"""How long the dashboard takes for an update while 200 streams are under way.

The simulated engine, the tap in front of it with an experiment and objectives, 200 clients that always have a
stream open, and a headless Chromium. The page itself notes how long each piece of its work took
(`window.llmtap.renders`): an answer worked into the page, a frame of the lanes, a chart. Rastering is not in
it; the frames a second of the lanes tell of that.

    .venv/bin/python benchmarks/web/updates.py [--streams 200] [--seconds 20] [--json FILE]

Exit code 1 where an update took 100 ms or more.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.browser import CHROMIUM, Page, browser  # noqa: E402
from tests.support.servers.live_proxy import port_free  # noqa: E402

LIMIT_MS: Final = 100.0
VIEWS: Final = ("overview", "streams", "exchanges", "chunking", "experiment", "tap")
TENANTS: Final = ("acme", "beta", "chat-eu", "chat-us", "nightly")
HEADER: Final = "x-llm-d-inference-fairness-id"
ENGINE: Final = (
    "--ttft",
    "400ms",
    "--itl",
    "45ms",
    "--tokens",
    "300",
    "--spread",
    "0.6",
    "--set",
    "pacing.jitter=0.6",
    "--set",
    "faults.stall_rate=0.12",
    "--set",
    "faults.stall=4s",
    "--set",
    "faults.fault_after=40",
)
CONFIG: Final = """
[log]
level = "warning"

[[tenants.rules]]
header = "x-llm-d-inference-fairness-id"

[slo.interactive]
objectives = "ttft:900ms tpot:60ms"
target = 0.95
tenants = ["acme", "chat-*"]

[slo.default]
objectives = "ttft:2s user_idle:4s"
target = 0.9

[experiment]
enabled = true
name = "output-guardrail"
unit = "request"

[[experiment.arms]]
name = "control"

[[experiment.arms]]
name = "guarded"

[experiment.arms.headers]
x-sim-input-filter = "60ms"
x-sim-output-hold = "6"
x-sim-output-filter = "40ms"
x-sim-refusal-rate = "0.04"

[experiment.disclosure]
systems = ["simulated: a filter of prompts (60 ms), one of answers that holds 6 tokens (40 ms); refuses 4 %"]
"""


async def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0, help="in each view")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("there is no chromium")
    async with tap() as (target, admin), loaded(target, args.streams), browser() as running:
        page = await running.page()
        await page.screen(1_440, 1_000)
        await page.open(f"{admin}/")
        await until_open(admin, args.streams)
        found = await measure(page, args.seconds)
        problems = page.problems
    for problem in problems:
        print(f"the page complained: {problem}")
    worst = show(found, args.streams)
    if args.json:
        about = {"streams": args.streams, "machine": platform.platform(), "cpus": os.cpu_count()}
        args.json.write_text(json.dumps({**about, "renders_ms": found}))
    return int(worst >= LIMIT_MS or bool(problems))


async def measure(page: Page, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each piece of work, by view and name."""
    found: dict[str, list[float]] = defaultdict(list)
    for view in VIEWS:
        await page.look(f"location.hash = '{view}'")
        await page.until(
            f"location.hash === '#{view}' && document.getElementById('status').dataset.state === 'live'"
        )
        await asyncio.sleep(2)  # the first lanes are drawn
        if view == "overview":
            await page.until("document.querySelectorAll('.plot > svg').length >= 4", 60)
        await page.look("window.llmtap.renders.length = 0")
        await asyncio.sleep(seconds)
        renders = await page.look("window.llmtap.renders")
        for render in renders:
            found[f"{view}: {render['name']}"].append(render["ms"])
        if view == "streams":
            shown = await page.look("document.querySelector('.counts').textContent")
            frames = sum(render["name"] == "tape" for render in renders)
            print(f"lanes: {shown}; {frames / seconds:.0f} frames/s")
    return dict(found)


def show(found: dict[str, list[float]], streams: int) -> float:
    """Prints a table; returns the longest."""
    table = Table(title=f"Time per update at {streams} live streams, ms")
    for head in ("view: work", "n", "p50", "p99", "max"):
        table.add_column(head, justify="left" if head.startswith("view") else "right")
    worst = 0.0
    for name, values in sorted(found.items()):
        values = sorted(values)
        worst = max(worst, values[-1])
        p50, p99 = values[len(values) // 2], values[min(len(values) - 1, int(len(values) * 0.99))]
        table.add_row(name, str(len(values)), f"{p50:.1f}", f"{p99:.1f}", f"{values[-1]:.1f}")
    Console(width=100).print(table)
    return worst


@asynccontextmanager
async def tap() -> AsyncIterator[tuple[str, str]]:
    """Engine and tap; the URLs of the tap and of its admin port."""
    engine, listen, admin = (f"127.0.0.1:{port_free()}" for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "llmtap.toml"
        config.write_text(CONFIG)
        serve = await started("sim", "serve", "--listen", engine, *ENGINE)
        proxy = await started(
            "proxy",
            "--upstream",
            f"http://{engine}",
            "--listen",
            listen,
            "--admin",
            admin,
            "--config",
            str(config),
        )
        try:
            await until_ready(f"http://{engine}/health", f"http://{admin}/readyz")
            yield f"http://{listen}", f"http://{admin}"
        finally:
            for process in (proxy, serve):
                process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            proxy.send_signal(signal.SIGTERM)  # a second one ends it now, streams or not
            for process in (proxy, serve):
                try:
                    async with asyncio.timeout(15):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()


async def started(*args: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "llmtap.cli",
        *args,
        stdout=asyncio.subprocess.DEVNULL,
        cwd=ROOT,
        start_new_session=True,
    )


async def until_ready(*urls: str) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(60):
        for url in urls:
            while True:
                try:
                    async with session.get(url) as answer:
                        if answer.status == 200:
                            break
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)


async def until_open(admin: str, streams: int) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(60):
        count = 0
        while count < streams * 0.9:
            async with session.get(f"{admin}/api/v1/streams?limit=1") as answer:
                count = (await answer.json())["count"]
            await asyncio.sleep(0.2)


@asynccontextmanager
async def loaded(target: str, streams: int) -> AsyncIterator[None]:
    """So many clients, each with a stream open at any time."""
    rng = random.Random(1)
    url = f"{target}/v1/chat/completions"

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        await asyncio.sleep(rng.random() * 5)
        while True:
            body: dict[str, Any] = {
                "model": "large" if number % 3 else "small",
                "stream": True,
                "max_tokens": rng.randrange(80, 300),
                "stream_options": {"include_usage": True},
                "messages": [{"role": "user", "content": "Hello"}],
            }
            headers = {HEADER: TENANTS[number % len(TENANTS)]}
            try:
                async with session.post(url, json=body, headers=headers) as answer:
                    async for _ in answer.content.iter_any():
                        pass
            except aiohttp.ClientError:
                await asyncio.sleep(0.5)

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        clients = [asyncio.create_task(client(session, number)) for number in range(streams)]
        try:
            yield
        finally:
            for one in clients:
                one.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
