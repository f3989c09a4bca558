"""What the dashboard says where there is nothing, where something is amiss, and of a stream under way."""

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from llmtap import native
from tests.meter.web.dashboard import (
    VIEWS,
    an_empty_tally,
    is_live,
    own_clock,
    play,
    reads,
    shown,
    under_way,
)
from tests.support.browser import CHROMIUM, Page
from tests.support.traffic.tap_frames import Script

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

S = 1_000_000_000
DASH = "\N{EN DASH}"
STATUS = "document.getElementById('status')"
ROWS = "document.querySelectorAll('main > div:not([hidden]) tbody tr').length"
FIGURES = """Object.fromEntries([...document.querySelectorAll("main > div:not([hidden]) .card")].map(
  (card) => [card.querySelector("dt").textContent, card.querySelector(".value").textContent]))"""
"""The figure of each card by its name."""
LISTENER = """addEventListener("DOMContentLoaded", () => {
  const node = document.getElementById("said");
  window.heard = [];
  const about = { childList: true, characterData: true, subtree: true };
  new MutationObserver(() => window.heard.push(node.textContent)).observe(node, about);
})"""
"""Keeps all that screen readers are told."""


async def view(page: Page, name: str) -> str:
    """What the view says once it is live."""
    await page.look(f"location.hash = '{name}'")
    await page.until(f"document.querySelector('#tabs a[aria-current]').hash === '#{name}'")
    await is_live(page)
    return await shown(page)


async def hears(page: Page, words: str) -> None:
    """Until screen readers have been told something that begins so."""
    await page.until(f"window.heard?.some((one) => one.startsWith({json.dumps(words)}))")


def test_where_nothing_has_passed_each_view_says_what_to_do() -> None:
    wanted = {
        "overview": [
            "No exchange has ended in this window (1m)",
            "curl -N http://127.0.0.1:8181/v1",
            "no objectives",
        ],
        "streams": ["No stream is running", "curl -N http://127.0.0.1:8181/v1"],
        "exchanges": ["No exchange has ended yet", "curl -N http://127.0.0.1:8181/v1"],
        "chunking": ["No exchange has ended in this window (1m)", "No kept exchange was refused"],
        "experiment": ["No experiment is configured", "--config config/experiment.toml", "aa = true"],
        "tap": [
            "no exchange has begun since the start",
            "No exchange was dropped",
            "No capture is running",
            "r0",
            f"meter: {native.NAME}",
        ],
    }
    assert set(wanted) == set(VIEWS)

    async def scene(page: Page, url: str) -> None:
        await page.open(url)
        await is_live(page)
        for name, sentences in wanted.items():
            await view(page, name)
            for words in sentences:
                await reads(page, words)
            assert "NaN" not in await shown(page), name
        await view(page, "overview")
        await page.until(f"({FIGURES})['In flight'] === '0'")
        figures = await page.look(FIGURES)
        # What is unknown is a dash; only what was counted is 0.
        assert (figures["Requests/s"], figures["In flight"]) == ("0", "0")
        assert (figures["TTFT"], figures["ITL"], figures["User idle"]) == (DASH, DASH, DASH)
        assert figures["Goodput"] == DASH
        assert page.problems == []
        assert await page.look("window.llmtap.errors") == []

    play(scene, an_empty_tally())


def test_a_stream_under_way_is_followed_chunk_by_chunk_until_it_ends() -> None:
    tally = an_empty_tally()
    assembler = under_way(tally)

    async def scene(page: Page, url: str) -> None:
        await page.send("Page.addScriptToEvaluateOnNewDocument", source=LISTENER)
        await page.open(url + "#exchanges/r1-1")
        await reads(page, "This exchange has run for 3 s")
        await hears(page, "r1-1 is running")
        text = await shown(page)
        for words in ("Exchange r1-1", "acme", "tiny", "openai.chat"):
            assert words in text, words
        # The reader waits 0.6 s for the first of ten words, which come faster than he reads; he has read them
        # all at 0.6 + 10 x 0.05 = 1.1 s, and waits again since then: 0.6 + 1.9.
        assert "waited 2.50 s so far (red line), and waits now" in text
        assert await page.look(ROWS) == 10
        await page.until("document.querySelector('.plot.tall .main-svg')")
        # Another word at 3.5 s, seen half a second later: what is shown follows.
        assembler.digest(Script().word(1, 100_500).frames())
        tally.clock.advance(S)
        await page.until(f"{ROWS} === 11")
        await reads(page, "This exchange has run for 4 s")
        await reads(page, "has waited 3.45 s so far")
        # The stream that waits for its first token has nothing to show but its waiting.
        await page.look("location.hash = '#exchanges/r1-2'")
        await reads(page, "Exchange r1-2")
        await reads(page, "waited 2 s so far (red line), and waits now")
        assert await page.look(ROWS) == 0
        await page.look("location.hash = '#exchanges/r1-1'")
        await reads(page, "This exchange has run for 4 s")
        assembler.digest(Script().end(1, 100_800, 11).close(1, 100_801).frames())
        await reads(page, "in total (red line)")
        await hears(page, "Ended: complete")
        text = await shown(page)
        assert "This exchange has run" not in text
        assert "content" in text
        assert page.problems == []
        assert await page.look("window.llmtap.errors") == []

    play(scene, tally)


def test_a_tap_that_hangs_is_stale_and_one_that_answers_again_is_live() -> None:
    answers, held = asyncio.Event(), asyncio.Event()

    @web.middleware
    async def gate(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == "/api/v1/summary" and not answers.is_set():
            held.set()
            await answers.wait()
        return await handler(request)

    async def scene(page: Page, url: str) -> None:
        answers.set()
        await page.send("Page.addScriptToEvaluateOnNewDocument", source=LISTENER)
        await own_clock(page)
        await page.open(url)
        await reads(page, "n 200")
        await is_live(page)
        answers.clear()
        await held.wait()  # the page asks one question after the other: no answer is on its way
        await page.look("advance(30000)")
        await page.until(f"{STATUS}.dataset.state === 'stale'")
        assert "stale: the last answer was received 30 s ago" in await page.look(f"{STATUS}.innerText")
        assert await page.look("document.getElementById('main').classList.contains('stale')")
        await hears(page, "stale: ")
        assert "n 200" in await shown(page), "the last figures stay"
        answers.set()
        await is_live(page)
        assert not await page.look("document.getElementById('main').classList.contains('stale')")
        assert page.problems == []

    play(scene, None, None, gate)
