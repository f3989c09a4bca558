"""The dashboard over a meter that has seen what a test wants it to have seen, in a real browser."""

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from aiohttp import web
from aiohttp.test_utils import TestServer
from aiohttp.typedefs import Middleware

from llmtap.channel.experiment import Experiment
from llmtap.channel.frames import Hello
from llmtap.clock import ManualClock
from llmtap.exchange.outcome import Outcome
from llmtap.meter.admin.server import admin_app
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.metrics.slo import SloOptions
from tests.support.browser import Page, browser
from tests.support.traffic.experiments import an_experiment
from tests.support.traffic.relay_status import relay_status
from tests.support.traffic.streams import streamed
from tests.support.traffic.tap_frames import Script

VIEWS: Final = ("overview", "streams", "exchanges", "chunking", "experiment", "tap")
TITLES: Final = (
    "Now",
    "Streams under way",
    "Newest exchanges",
    "Chunking of answers",
    "Experiment",
    "State of llmtap",
)
HELLO: Final = Hello(
    relay="r0", pid=1, clock="kernel", listen="http://0.0.0.0:8181", anchor_mono_ns=0, anchor_wall_ns=0
)
MS: Final = 1_000_000
S: Final = 1_000_000_000

"""What happens on a page that is still empty, and where the dashboard is."""

OWN_CLOCK: Final = """(() => {
  const raf = window.requestAnimationFrame, began = Date.UTC(2026, 0, 15, 12);
  let now = 100000;
  performance.now = () => now;
  window.requestAnimationFrame = (work) => raf.call(window, () => work(now));
  window.Date = new Proxy(Date, {
    construct: (date, args) => (args.length ? new date(...args) : new date(began + now)),
    get: (date, name) => (name === "now" ? () => began + now : Reflect.get(date, name)),
  });
  const timer = window.setTimeout;
  window.setTimeout = (work, ms, ...rest) => timer.call(window, work, ms >= 15000 ? 1e9 : ms, ...rest);
  window.advance = (ms) => { now += ms; };
})()"""
"""What the page takes for the time stands still until `advance(ms)`. Its timers run, so it asks and draws;
only the 15 s after which it gives up an answer never end."""


def an_empty_tally(
    experiment: Experiment | None = None, clock: ManualClock | None = None, **about: Any
) -> ExchangePipeline:
    """A meter that has run for a minute, at 100 s of a clock that stands still: one relay, and no traffic."""
    clock = clock or ManualClock(now_ns=40 * S)
    tally = ExchangePipeline(MeterOptions(), clock, experiment, **about)
    clock.advance(60 * S)
    tally.relays.join(HELLO)
    tally.on_status("r0", relay_status())
    return tally


def a_tally(tenant: str = "acme", model: str = "tiny", arm: str = "marked") -> ExchangePipeline:
    """A meter that has seen some of everything."""
    arms = ({"name": "control"}, {"name": arm, "headers": {"X-Arm": "b"}})
    slo = SloOptions(objectives="ttft:200ms tpot:50ms", target=0.95, tenants=())
    tally = an_empty_tally(an_experiment(*arms), slos={"gold": slo})
    tally.on_status("r0", relay_status(opened=200, measured=195, dropped={"overflow": 5}, lag_ns_max=2 * MS))
    rng = random.Random(7)
    for seq in range(1, 201):
        first = rng.randrange(50, 300)
        times = [first + 40 * i + rng.randrange(0, 20) + (900 if i > 20 else 0) for i in range(40)]
        outcome = Outcome.REFUSED if seq % 9 == 0 else Outcome.COMPLETE
        who = tenant if seq % 2 else "zebra"
        x = streamed(*times, seq=seq, tenant=who, model=model, outcome=outcome)
        x.arm, x.unit = ("control", arm)[seq % 2], f"{seq:016x}"
        if outcome is Outcome.REFUSED:
            x.refusal = {
                "kind": "model_refusal",
                "source": "text",
                "confidence": "low",
                "detail": {"t": tenant},
            }
        tally.on_open()
        tally.experiments.on_assignment(x.arm, x.unit, False)
        tally.on_end(x)
    return tally


def under_way(tally: ExchangePipeline, tenant: str = "acme") -> Assembler:
    """One stream that has begun to answer (`r1-1`), and one that has not (`r1-2`)."""
    now_ms = tally.clock.mono_ns() // MS
    hello = Hello(relay="r1", pid=1, clock="mono", anchor_mono_ns=0, anchor_wall_ns=0)
    assembler = Assembler(hello, tally)
    tally.streams.join(assembler)
    script = Script().request(1, now_ms - 3_000).head(1, now_ms - 2_500).request(2, now_ms - 1_000)
    for i in range(10):
        script.word(1, now_ms - 2_400 + 40 * i)
    assembler.digest(script.frames())
    for observer, _ in assembler.running_exchanges():
        observer.exchange.tenant = tenant
    return assembler


@asynccontextmanager
async def dashboard(
    tally: ExchangePipeline | None = None, token: str | None = None, *between: Middleware
) -> AsyncIterator[tuple[Page, str]]:
    """A page in a browser of its own, and the URL of the meter; `between` stand between both."""
    async with (
        served(a_tally() if tally is None else tally, token, *between) as url,
        browser() as running,
    ):
        page = await running.page()
        await page.screen(1_280, 900)
        yield page, url


@asynccontextmanager
async def served(
    tally: ExchangePipeline, token: str | None = None, *between: Middleware
) -> AsyncIterator[str]:
    """The admin port of this meter; yields its URL."""
    app: web.Application = admin_app(tally, token)
    app.middlewares.extend(between)
    server = TestServer(app)
    await server.start_server()
    try:
        yield f"http://127.0.0.1:{server.port}/"
    finally:
        await server.close()


async def own_clock(page: Page) -> None:
    """From the next page on, time passes only by `advance(ms)`."""
    await page.send("Page.addScriptToEvaluateOnNewDocument", source=OWN_CLOCK)
    await page.send("Emulation.setTimezoneOverride", timezoneId="UTC")


async def is_live(page: Page) -> None:
    await page.until("document.getElementById('status')?.dataset.state === 'live'")


async def reads(page: Page, words: str) -> None:
    """Until these words can be read in the view that is shown."""
    await page.until(f"document.getElementById('main').innerText.includes({json.dumps(words)})")


async def shown(page: Page) -> str:
    """What can be read in the view that is shown."""
    return str(await page.look("document.getElementById('main').innerText"))
