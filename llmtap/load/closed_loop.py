"""A few hundred streams, N at a time: the client of the demo.

Closed loop, so not a load test: a slow answer delays the next request. The load room grows in a later issue.
"""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from llmtap.clock import SystemClock
from llmtap.net.failures import failure_said

__all__ = ["ClosedLoop", "stream_all"]


@dataclass(slots=True)
class ClosedLoop:
    """What the clients saw. Times in ns."""

    completed: int = 0
    failed: int = 0
    first_error: str | None = None
    ttft_ns: list[int] = field(default_factory=list)
    """From the call to the first event, one per completed stream: the client's vantage."""
    gaps_ns: list[int] = field(default_factory=list)


async def stream_all(
    url: str,
    *,
    streams: int,
    concurrency: int,
    headers: Callable[[int], dict[str, str]],
    done: Callable[[], None],
) -> ClosedLoop:
    """Ask for `streams` streamed chat completions, `concurrency` at a time; `done` after each."""
    seen = ClosedLoop()
    numbers = iter(range(streams))
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120)
    ) as session:

        async def client() -> None:
            for number in numbers:
                try:
                    await _one(session, url, number, headers(number), seen)
                except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
                    seen.failed += 1
                    seen.first_error = seen.first_error or failure_said(exc)
                done()

        await asyncio.gather(*(client() for _ in range(concurrency)))
    return seen


async def _one(
    session: aiohttp.ClientSession, url: str, number: int, headers: dict[str, str], seen: ClosedLoop
) -> None:
    clock = SystemClock()
    body = {
        "model": "sim",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": f"Stream number {number}, please."}],
    }
    began_ns = clock.mono_ns()
    stamps: list[int] = []
    tail = b""
    async with session.post(url, json=body, headers=headers) as response:
        if response.status != 200:
            raise ValueError(f"status {response.status}")
        async for chunk in response.content.iter_any():
            stamps.append(clock.mono_ns())
            tail = (tail + chunk)[-64:]
    if not tail.endswith(b"data: [DONE]\n\n"):
        raise ValueError("the stream was cut")
    seen.completed += 1
    seen.ttft_ns.append(stamps[0] - began_ns)
    seen.gaps_ns += [b - a for a, b in itertools.pairwise(stamps)]
