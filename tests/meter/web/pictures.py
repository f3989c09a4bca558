"""The pictures of the dashboard in `docs/images`: planted traffic, and a page whose clock stands still.

All that is in them is made from one seed: what the meter saw, and what the page drew when. Two runs with one
browser and its fonts make the same pictures, but for a shade of some rounded corner.
"""

import asyncio
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final
from unittest import mock

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from aiohttp.typedefs import Handler

from llmtap.channel.frames import Assigned, FrameKind, Hello
from llmtap.clock import ManualClock
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome
from llmtap.meter.admin import live_feed as live
from llmtap.meter.admin.server import admin_app
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.metrics.slo import SloOptions
from tests.meter.web.dashboard import VIEWS, is_live, own_clock, reads, served, shown
from tests.support.browser import Page, browser
from tests.support.traffic.experiments import an_experiment
from tests.support.traffic.relay_status import relay_status
from tests.support.traffic.streams import streamed
from tests.support.traffic.tap_frames import Script

S: Final = 1_000_000_000
MS: Final = 1_000_000
NOON_NS: Final = 1_768_478_400 * S
"""2026-01-15T12:00:00Z, as of the page's clock."""
BEGAN_S: Final = 40
SECONDS: Final = 90
BEATS: Final = 30
"""Of these seconds the page hears by the live feed, one after the other."""
PER_SECOND: Final = 10
STREAMS: Final = 36
TENANTS: Final = {"acme": 8, "chat-eu": 5, "chat-us": 5, "beta": 3, "nightly": 1}
SLOS: Final = {
    "interactive": SloOptions(objectives="ttft:900ms tpot:60ms", target=0.95, tenants=("acme", "chat-*")),
    "default": SloOptions(objectives="ttft:2s user_idle:4s", target=0.9),
}
GUARDED: Final = {"name": "guarded", "headers": {"X-Guardrail": "on"}}
HELD: Final = 6
"""Tokens that the guarded arm lets go together."""

LOOKS: Final = {
    "light": {"width": 1_440, "height": 1_000},
    "dark": {"width": 1_440, "height": 1_000, "dark": True},
    "phone": {"width": 375, "height": 760, "scale": 2.0},
}
PLACES: Final = (*VIEWS, "inspector")
PICTURES: Final = frozenset(f"{place}-{look}.png" for place in PLACES for look in LOOKS)
WORDS: Final = {
    "overview": "Requests/s",
    "streams": f"{STREAMS} under way",
    "exchanges": "Newest exchanges",
    "chunking": "Single tokens",
    "experiment": "output-guardrail runs",
    "tap": "Longest delay",
    "inspector": "added to the request",
}
"""What can be read once the place is filled."""
TURNS: Final = """new Promise((done) => requestAnimationFrame(() => setTimeout(
  () => requestAnimationFrame(() => setTimeout(done)))))"""
"""What the page has put off to a later frame has begun."""
DRAWN: Final = """[...document.querySelectorAll("main > div:not([hidden]) .plot")]
  .filter((plot) => plot.clientWidth)
  .every((plot) => plot.querySelector("svg"))"""


async def make(folder: Path, looks: Iterable[str] = LOOKS) -> dict[str, str]:
    """Take every picture of these looks; return what could be read on each, by its name."""
    tally, result = await planted()
    beats = _Beats(result)
    words: dict[str, str] = {}
    async with served(tally, None, beats.between) as url, browser() as running:
        for look in looks:
            page = await running.page()
            await page.screen(**LOOKS[look])
            await own_clock(page)
            await page.open(url)
            await is_live(page)
            await beats.play(page)
            for place in PLACES:
                await show(page, place, await worst(tally) if place == "inspector" else place)
                await page.picture(folder / f"{place}-{look}.png")
                words[f"{place}-{look}.png"] = await shown(page)
            assert page.problems == []
            assert await page.look("window.llmtap.errors") == []
            await running.send("Target.closeTarget", {"targetId": page.target})
    return words


async def show(page: Page, place: str, named: str) -> None:
    """Until all of the place is drawn."""
    # Away and back: what is shown is drawn anew, with all that has come since.
    await page.look("location.hash = 'exchanges/none'")
    await page.until("location.hash === '#exchanges/none'")
    await page.look(TURNS)
    await page.look(f"advance(1); location.hash = '{named}'; scrollTo(0, 0)")
    await reads(page, WORDS[place])
    await is_live(page)
    await page.look(TURNS)
    if place == "streams":
        await page.look("advance(1000)")
        for work in ("tape", "streams"):
            now = f"one.name === '{work}' && one.at >= performance.now()"
            await page.until(f"llmtap.renders.some((one) => {now})")
    await page.until(DRAWN)


class _Beats:
    """The live feed a second at a time: what the meter said then, when the page is ready for it."""

    def __init__(self, result: list[bytes]) -> None:
        self._summaries = result
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._connected = asyncio.Event()

    @web.middleware
    async def between(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/api/v1/live":
            return await handler(request)
        queue = self._queue = asyncio.Queue()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self._connected.set()
        while True:
            await response.write(await queue.get())

    async def play(self, page: Page) -> None:
        await self._connected.wait()
        self._connected.clear()
        for n, result in enumerate(self._summaries, 1):
            await page.look("advance(1000)")
            self._queue.put_nowait(result)
            await page.until(f"llmtap.renders.filter((one) => one.name === 'live').length >= {n}")


async def worst(tally: ExchangePipeline) -> str:
    """Where to find the exchange whose reader waited longest, of the newest of the guarded arm."""
    query = "/api/v1/exchanges?arm=guarded&outcome=complete&limit=50"
    async with TestClient(TestServer(admin_app(tally))) as client, client.get(query) as answer:
        found = (await answer.json())["exchanges"]
    chosen = max(found, key=lambda x: x["metrics"]["user_idle"])
    return f"exchanges/{chosen['id']}"


async def planted() -> tuple[ExchangePipeline, list[bytes]]:
    """A meter with a minute and a half of traffic, and what its live feed said in the last seconds of it."""
    rng = random.Random(1)
    clock = ManualClock(now_ns=BEGAN_S * S, wall_offset_ns=NOON_NS)
    disclosed = {"systems": ["simulated: a filter of answers that holds 6 tokens and refuses 4 %"]}
    experiment = an_experiment(
        {"name": "control"}, GUARDED, name="output-guardrail", start_wall_ns=NOON_NS, disclosure=disclosed
    )
    tally = ExchangePipeline(MeterOptions(), clock, experiment, slos=SLOS)
    run_streams(rng, tally, end_ms=(BEGAN_S + SECONDS) * 1_000)
    result = []
    # Without a pause, what the feed said is never said again.
    with mock.patch.object(live, "SUMMARY_S", 0.0):
        async with TestClient(TestServer(admin_app(tally))) as client:
            for second in range(SECONDS):
                for n in range(PER_SECOND):
                    clock.advance(S // PER_SECOND)
                    end_one(rng, tally, second * PER_SECOND + n + 1)
                say_all_is_well(tally)
                if second >= SECONDS - BEATS:
                    result.append(await a_beat(client))
    return tally, result


async def a_beat(client: TestClient[Any, Any]) -> bytes:
    """What the live feed says now."""
    async with client.get("/api/v1/live?exchanges=0") as answer:
        async for line in answer.content:
            if line.startswith(b"data:"):
                return b"event: summary\n" + line + b"\n"
    raise AssertionError("the feed said nothing")


def say_all_is_well(tally: ExchangePipeline) -> None:
    """The relays' word of themselves."""
    passed = SECONDS * PER_SECOND
    about = {"clock": "kernel", "anchor_mono_ns": 0, "anchor_wall_ns": NOON_NS}
    for number, (name, share) in enumerate({"r0": 0.54, "r1": 0.46}.items()):
        n = round(passed * share)
        open_ = STREAMS * number
        if name not in tally.relays.to_dict(tally.clock.mono_ns()):
            tally.relays.join(Hello(relay=name, pid=100 + number, **about))
        tally.on_status(
            name,
            relay_status(
                opened=n + open_,
                measured=n,
                unsettled=open_,
                streams=open_,
                connections=open_ + 3,
                cpu_ns=round(1.9 * S * share),
                rss_bytes=41_000_000 + 900_000 * number,
                lag_ns_max=300_000 + 90_000 * number,
                bytes_up=n * 2_100,
                bytes_down=n * 19_000,
            ),
        )


def end_one(rng: random.Random, tally: ExchangePipeline, seq: int) -> None:
    """An exchange ends now."""
    x = an_exchange(rng, seq)
    x.arrival_wall_ns = tally.clock.wall_ns() - (x.timeline.response_end_ns or 0)
    assert x.arm is not None
    assert x.unit is not None
    tally.on_open()
    tally.experiments.on_assignment(x.arm, x.unit, False)
    tally.on_end(x)


def an_exchange(rng: random.Random, seq: int) -> Exchange:
    """One of either arm. The guarded one begins later, holds some tokens back, and refuses some answers."""
    guarded = rng.random() < 0.5
    times = chunk_times_ms(rng, rng.randrange(30, 110), guarded=guarded)
    outcome = Outcome.COMPLETE
    draw = rng.random()
    if guarded and draw < 0.04:
        outcome, times = Outcome.REFUSED, times[:HELD]
    elif draw > 0.99:
        outcome = Outcome.CLIENT_CANCELLED
    (tenant,) = rng.choices(list(TENANTS), list(TENANTS.values()))
    model = "large" if rng.random() < 0.6 else "small"
    x = streamed(*times, seq=seq, tenant=tenant, model=model, outcome=outcome)
    x.relay = f"r{seq % 2}"
    x.arm, x.unit = ("guarded" if guarded else "control"), f"{rng.getrandbits(64):016x}"
    x.endpoint, x.dialect, x.clock = "chat.completions", "openai.chat", "kernel"
    x.request_id = f"req-{seq:05}"
    x.reads = len(set(times))
    x.request_bytes, x.response_bytes = rng.randrange(800, 5_000), 240 * len(times)
    x.uncertainty_ns = rng.randrange(60_000, 400_000)
    x.added.request_ns = rng.randrange(120_000, 300_000)
    x.added.first_chunk_ns = rng.randrange(40_000, 80_000)
    x.added.chunk_max_ns = 30_000
    x.finish_reason = "stop" if outcome is Outcome.COMPLETE else None
    if outcome is Outcome.REFUSED:
        x.finish_reason = "content_filter"
        x.refusal = {"kind": "output_guardrail", "source": "finish_reason", "confidence": "high"}
        x.guardrail = {
            "phase": "output",
            "action": "block",
            "signal": "finish_reason",
            "event": HELD,
            "late": True,
            "tokens_before": HELD,
        }
    return x


def chunk_times_ms(rng: random.Random, n: int, *, guarded: bool) -> list[int]:
    """When the tokens come, in ms since submit; one answer in eight pauses."""
    t = rng.lognormvariate(math.log(320), 0.35) + (95 if guarded else 0)
    pause_at = rng.randrange(5, n) if rng.random() < 0.125 else None
    times = []
    for i in range(n):
        times.append(round(t))
        t += max(4, rng.gauss(42, 12)) + (rng.uniform(1_200, 4_000) if i == pause_at else 0)
    if guarded:
        # The filter lets a few go together, when the last of them has come.
        times = [times[min(n - 1, HELD * (i // HELD) + HELD - 1)] for i in range(n)]
    return times


def run_streams(rng: random.Random, tally: ExchangePipeline, *, end_ms: int) -> None:
    """What is under way at the end: streams that have begun within the last 15 s."""
    hello = Hello(relay="r1", pid=101, clock="kernel", anchor_mono_ns=0, anchor_wall_ns=NOON_NS)
    assembler = Assembler(hello, tally)
    tally.streams.join(assembler)
    first = SECONDS * PER_SECOND
    tenants = {}
    for n, ago_ms in enumerate(sorted((rng.randrange(300, 15_000) for _ in range(STREAMS)), reverse=True), 1):
        seq, began_ms = first + n, end_ms - ago_ms
        guarded = rng.random() < 0.5
        arm = Assigned(arm="guarded" if guarded else "control", unit=f"{rng.getrandbits(64):016x}")
        script = Script().request(seq, began_ms)
        script.frame(FrameKind.ARM, seq, began_ms * MS, 0, msgspec.json.encode(arm))
        times = [began_ms + t for t in chunk_times_ms(rng, 400, guarded=guarded)]
        if times[0] < end_ms:
            script.head(seq, times[0] - 40)
        for t in times:
            if t < end_ms:
                script.word(seq, t)
        assembler.digest(script.frames())
        (tenants[seq],) = rng.choices(list(TENANTS), list(TENANTS.values()))
    for observer, _ in assembler.running_exchanges():
        observer.exchange.tenant = tenants[observer.exchange.seq]
        observer.exchange.model = "large" if observer.exchange.seq % 3 else "small"
