"""Lists on the dashboard: what a filter finds and denies, rows that hold still, the way back to one."""

import json

import pytest

from llmtap.meter.pipeline.pipeline import ExchangePipeline
from tests.meter.web.dashboard import an_empty_tally, play, reads
from tests.support.browser import CHROMIUM, Page
from tests.support.traffic.streams import streamed

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

LISTED = "[...document.querySelectorAll('main > div:not([hidden]) tbody a')].map((a) => a.textContent)"
SAID = "document.querySelector('main > div:not([hidden]) .bar .counts').textContent"
FOCUS = "document.activeElement"


def ended(tally: ExchangePipeline, *, seqs: range, tenant: str = "common") -> ExchangePipeline:
    """These have ended, one after the other."""
    for seq in seqs:
        tally.opened()
        tally.ended(streamed(100, 140, 2_000, seq=seq, tenant=tenant))
    return tally


async def filter_by(page: Page, words: str) -> None:
    await page.look(
        f"(() => {{ const field = document.getElementById('filter'); field.value = {json.dumps(words)};"
        " field.dispatchEvent(new Event('input')); })()"
    )


def test_a_filter_finds_what_is_kept_and_not_among_the_newest_hundred() -> None:
    tally = ended(an_empty_tally(), seqs=range(1, 3), tenant="rare")
    ended(tally, seqs=range(3, 303))

    async def scene(page: Page, url: str) -> None:
        await page.open(url + "#exchanges")
        await page.until(f"{SAID} === 'the newest 100 kept, the last to end first'")
        await filter_by(page, "rar")
        await page.until(f"{LISTED}.join() === 'r-2,r-1'")
        assert await page.look(SAID) == "2 of all 302 kept fit the filter"
        await filter_by(page, "nobody")
        await reads(page, "None of those kept fits.")
        await filter_by(page, "")
        await page.until(f"{SAID} === 'the newest 100 kept, the last to end first'")
        assert page.problems == []

    play(scene, tally)


def test_rows_hold_still_for_the_keyboard_and_go_on_when_it_leaves() -> None:
    tally = ended(an_empty_tally(), seqs=range(1, 121))

    async def scene(page: Page, url: str) -> None:
        await page.send("Emulation.setFocusEmulationEnabled", enabled=True)
        await page.open(url + "#exchanges")
        await page.until(f"{LISTED}[0] === 'r-120'")
        await page.look("document.querySelectorAll('main > div:not([hidden]) tbody a')[80].focus()")
        assert await page.look(f"{FOCUS}.textContent") == "r-40"
        ended(tally, seqs=range(121, 171))
        await page.until(f"{SAID}.endsWith('held while you are in it; 50 newer')")
        assert await page.look(f"{FOCUS}.textContent") == "r-40"
        assert await page.look(f"{LISTED}[0]") == "r-120"
        await page.press("Escape")
        await page.until(f"{LISTED}[0] === 'r-170'")
        assert "held" not in await page.look(SAID)
        assert page.problems == []

    play(scene, tally)
