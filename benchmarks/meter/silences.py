"""Are stalled streams found while they stall, how soon, and is no other stream reported?

A server on loopback sends a token every 100 ms in each of 200 streams, through a real proxy. At random times,
a stream stalls for 5.5 to 9 s behind keep-alives, and as many others for 2 to 4 s, which is below the
threshold of 5 s. `/api/v1/silences` is read ten times a second and compared with the server's own times.

    .venv/bin/python benchmarks/meter/silences.py [--streams 200] [--stalls 20] [--seconds 60] [--seed 1]
"""

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

GAP_S = 0.1
THRESHOLD_S = 5.0
POLL_S = 0.1
FOUND_S_MAX = 1.0
"""Time after the threshold within which a stall must be found."""
LATE_S = 0.25
"""A stream may be reported this long after its next token left the server: the relay sends its frames every
10 ms, and the answer of the admin port was computed before it arrived here."""


@dataclass(slots=True)
class Stall:
    model: str
    start_s: float
    length_s: float
    last_token_s: float | None = None
    next_token_s: float | None = None
    found_s: float | None = None

    @property
    def counts(self) -> bool:
        return self.length_s >= THRESHOLD_S


@dataclass(slots=True)
class Run:
    began_s: float
    seconds: float
    stalls: dict[str, Stall]
    wrong: list[tuple[str, float]] = field(default_factory=list)
    polls: int = 0
    answer_s: list[float] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return time.monotonic() > self.began_s + self.seconds


def plan(streams: int, stalls: int, seconds: float, seed: int) -> dict[str, Stall]:
    rng = random.Random(seed)
    models = rng.sample(range(streams), 2 * stalls)
    planned = {}
    for i, number in enumerate(models):
        length_s = rng.uniform(5.5, 9) if i < stalls else rng.uniform(2, 4)
        start_s = rng.uniform(2, seconds - 12)
        planned[f"m-{number}"] = Stall(f"m-{number}", start_s, length_s)
    return planned


def token(n: int) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":"word%d "}}]}\n\n' % n


async def serve(run: Run, request: web.Request) -> web.StreamResponse:
    body = await request.json()
    stall = run.stalls.get(body["model"])
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    n = 0
    while not run.over:
        since_s = time.monotonic() - run.began_s
        if stall is not None and stall.start_s <= since_s < stall.start_s + stall.length_s:
            await response.write(b": keep-alive\n\n")
        else:
            await response.write(token(n))
            n += 1
            now_s = time.monotonic()
            if stall is not None and since_s < stall.start_s:
                stall.last_token_s = now_s
            elif stall is not None and stall.next_token_s is None:
                stall.next_token_s = now_s
        await asyncio.sleep(GAP_S)
    await response.write(b"data: [DONE]\n\n")
    return response


async def read_stream(session: aiohttp.ClientSession, url: str, model: str) -> None:
    body = {"model": model, "stream": True, "messages": []}
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, response.status
        async for _ in response.content.iter_any():
            pass


async def poll(session: aiohttp.ClientSession, admin: str, run: Run) -> None:
    while not run.over:
        asked_s = time.monotonic()
        async with session.get(f"{admin}/api/v1/silences?limit=1000") as response:
            answer: Any = await response.json()
        now_s = time.monotonic()
        run.answer_s.append(now_s - asked_s)
        run.polls += 1
        for stream in answer["streams"]:
            stall = run.stalls.get(stream["model"])
            if stall is None or not is_silent(stall, now_s):
                run.wrong.append((stream["model"], stream["silent"]))
            elif stall.found_s is None:
                stall.found_s = now_s
        await asyncio.sleep(POLL_S)


def is_silent(stall: Stall, now_s: float) -> bool:
    """Whether the server's times allow the stream to be reported now."""
    if stall.last_token_s is None or now_s - stall.last_token_s < THRESHOLD_S:
        return False
    return stall.next_token_s is None or (
        now_s < stall.next_token_s + LATE_S and stall.next_token_s - stall.last_token_s >= THRESHOLD_S
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@asynccontextmanager
async def proxy(upstream: str) -> AsyncIterator[tuple[str, str]]:
    listen, admin = free_port(), free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "llmtap.cli",
        "proxy",
        "--upstream",
        upstream,
        "--listen",
        f"127.0.0.1:{listen}",
        "--admin",
        f"127.0.0.1:{admin}",
        "--set",
        "log.level=warning",
    )
    try:
        async with aiohttp.ClientSession() as session:
            for _ in range(300):
                try:
                    async with session.get(f"http://127.0.0.1:{admin}/readyz") as answer:
                        if answer.status == 200:
                            break
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)
        yield f"http://127.0.0.1:{listen}", f"http://127.0.0.1:{admin}"
    finally:
        process.terminate()
        await process.wait()


async def measure(args: argparse.Namespace) -> Run:
    run = Run(time.monotonic(), args.seconds, plan(args.streams, args.stalls, args.seconds, args.seed))
    app = web.Application()
    app.router.add_post("/v1/chat/completions", lambda request: serve(run, request))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        proxy(f"http://127.0.0.1:{port}") as (url, admin),
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        asyncio.TaskGroup() as group,
    ):
        run.began_s = time.monotonic()
        for i in range(args.streams):
            group.create_task(read_stream(session, url, f"m-{i}"))
        group.create_task(poll(session, admin, run))
    await runner.cleanup()
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--stalls", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=argparse.FileType("w"))
    args = parser.parse_args()
    run = asyncio.run(measure(args))
    planted = [stall for stall in run.stalls.values() if stall.counts]
    found = [stall for stall in planted if stall.found_s is not None]
    after = sorted(s.found_s - s.last_token_s - THRESHOLD_S for s in found if s.found_s and s.last_token_s)
    reports = len(found) + len(run.wrong)
    result = {
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "streams": args.streams,
        "seconds": args.seconds,
        "planted": len(planted),
        "found": len(found),
        "recall": len(found) / len(planted),
        "precision": len(found) / reports if reports else None,
        "wrong": run.wrong,
        "found_after_threshold_s": {"median": statistics.median(after), "max": after[-1]} if after else None,
        "answers": run.polls,
        "answer_s": {"median": statistics.median(run.answer_s), "max": max(run.answer_s)},
    }
    print(json.dumps(result, indent=2))
    if args.json:
        json.dump(result, args.json)
    right = len(found) == len(planted) and not run.wrong and after[-1] <= FOUND_S_MAX
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
