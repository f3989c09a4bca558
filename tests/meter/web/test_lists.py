"""Lists on the dashboard: what a filter finds and denies, rows that hold still, the way back to one."""

import json

import pytest

from llmtap.exchange.outcome import Outcome
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.metrics.phases import PHASES
from tests.meter.web.dashboard import an_empty_tally, dashboard, own_clock, reads
from tests.support.browser import CHROMIUM, Page
from tests.support.traffic.exchanges import streamed as measured
from tests.support.traffic.streams import streamed

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

LISTED = "[...document.querySelectorAll('main > div:not([hidden]) tbody a')].map((a) => a.textContent)"
COUNTS = "document.querySelector('main > div:not([hidden]) .bar .counts').textContent"
FOCUS = "document.activeElement"


def ended(tally: ExchangePipeline, *, seqs: range, tenant: str = "common") -> ExchangePipeline:
    """These have ended, one after the other."""
    for seq in seqs:
        tally.on_open()
        tally.on_end(streamed(100, 140, 2_000, seq=seq, tenant=tenant))
    return tally


async def filter_by(page: Page, words: str) -> None:
    await page.look(
        f"(() => {{ const field = document.getElementById('filter'); field.value = {json.dumps(words)};"
        " field.dispatchEvent(new Event('input')); })()"
    )


async def move_mouse_to(page: Page, selector: str) -> None:
    box = await page.look(
        f"(({{ left, top, width, height }}) => [left + Math.min(20, width / 2), top + height / 2])"
        f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
    )
    await page.send("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])


async def test_a_filter_finds_what_is_kept_and_not_among_the_newest_hundred() -> None:
    tally = ended(an_empty_tally(), seqs=range(1, 3), tenant="rare")
    ended(tally, seqs=range(3, 303))

    async with dashboard(tally) as (page, url):
        await page.open(url + "#exchanges")
        await page.until(f"{COUNTS} === 'the newest 100 kept, the last to end first'")
        await filter_by(page, "rar")
        await page.until(f"{LISTED}.join() === 'r-2,r-1'")
        assert await page.look(COUNTS) == "2 of all 302 kept fit the filter"
        await filter_by(page, "nobody")
        await reads(page, "None of those kept fits.")
        await filter_by(page, "")
        await page.until(f"{COUNTS} === 'the newest 100 kept, the last to end first'")
        assert page.problems == []


async def test_rows_hold_still_for_the_keyboard_and_go_on_when_it_leaves() -> None:
    tally = ended(an_empty_tally(), seqs=range(1, 121))

    async with dashboard(tally) as (page, url):
        await page.send("Emulation.setFocusEmulationEnabled", enabled=True)
        await page.open(url + "#exchanges")
        await page.until(f"{LISTED}[0] === 'r-120'")
        await page.look("document.querySelectorAll('main > div:not([hidden]) tbody a')[80].focus()")
        assert await page.look(f"{FOCUS}.textContent") == "r-40"
        ended(tally, seqs=range(121, 171))
        await page.until(f"{COUNTS}.endsWith('held while you are in it; 50 newer')")
        assert await page.look(f"{FOCUS}.textContent") == "r-40"
        assert await page.look(f"{LISTED}[0]") == "r-120"
        await page.press("Escape")
        await page.until(f"{LISTED}[0] === 'r-170'")
        assert "held" not in await page.look(COUNTS)
        assert page.problems == []


async def test_rows_hold_still_under_the_mouse() -> None:
    tally = ended(an_empty_tally(), seqs=range(1, 21))

    async with dashboard(tally) as (page, url):
        await page.open(url + "#exchanges")
        await page.until(f"{LISTED}[0] === 'r-20'")
        await move_mouse_to(page, "main > div:not([hidden]) tbody a")
        ended(tally, seqs=range(21, 24))
        await page.until(f"{COUNTS}.endsWith('held while you are in it; 3 newer')")
        assert await page.look(f"{LISTED}[0]") == "r-20"
        await move_mouse_to(page, "h1")
        await page.until(f"{LISTED}[0] === 'r-23'")
        assert page.problems == []


async def test_escape_leads_from_an_exchange_to_its_row_and_place() -> None:
    tally = ended(an_empty_tally(), seqs=range(1, 101))

    async with dashboard(tally) as (page, url):
        await page.send("Emulation.setFocusEmulationEnabled", enabled=True)
        await page.open(url + "#exchanges")
        await page.until(f"{LISTED}.length === 100")
        await page.look("window.link = document.querySelectorAll('main > div:not([hidden]) tbody a')[70]")
        await page.look("link.focus()")
        place = await page.look("scrollY")
        assert place > 500
        await page.press("Enter")
        await page.until("location.hash === '#exchanges/r-30'")
        await reads(page, "Exchange r-30")
        assert await page.look("document.title") == "r-30 \N{MIDDLE DOT} llmtap"
        await page.press("Escape")
        await page.until("location.hash === '#exchanges'")
        await page.until(f"{FOCUS}.textContent === 'r-30'")
        assert await page.look("scrollY") == place
        assert await page.look("document.title") == "Exchanges \N{MIDDLE DOT} llmtap"
        assert page.problems == []


async def test_the_list_says_when_each_ended_in_what_zone() -> None:
    tally = ended(an_empty_tally(), seqs=range(1, 2))

    async with dashboard(tally) as (page, url):
        await own_clock(page)
        await page.send("Emulation.setTimezoneOverride", timezoneId="Etc/GMT-3")
        await page.open(url + "#exchanges")
        await reads(page, "ended, GMT+3")
        await page.until(f"{LISTED}.length === 1")
        cell = "document.querySelectorAll('main > div:not([hidden]) tbody td')[0]"
        # It arrived at 22:13:20 UTC, and took 2 s.
        assert await page.look(f"{cell}.textContent") == "01:13:22"
        assert await page.look(f"{cell}.title") == "arrived 2023-11-14T22:13:20.000Z"
        assert page.problems == []


async def test_of_more_than_can_be_asked_for_only_those_are_denied_that_were_looked_at() -> None:
    tally = ExchangePipeline(MeterOptions(exchanges_kept=2_000), an_empty_tally().clock)
    ended(tally, seqs=range(1, 2), tenant="rare")
    ended(tally, seqs=range(2, 1_003))

    async with dashboard(tally) as (page, url):
        await page.open(url + "#exchanges")
        await page.until(f"{LISTED}.length === 100")
        await filter_by(page, "rare")
        await reads(page, "None of the newest 1,000 kept fits.")
        assert page.problems == []


async def test_the_wait_of_an_exchange_has_a_bar_for_each_part_on_one_scale() -> None:
    tally = an_empty_tally()
    for seq in range(1, 121):
        x = measured(seq)
        if seq == 120:
            x.timeline.first_token_ns = x.timeline.first_content_ns = x.timeline.arrival_ns + 900_000_000
        tally.on_open()
        tally.on_end(x)
    bars = "[...document.querySelectorAll('.parts .row')]"

    async with dashboard(tally) as (page, url):
        await page.open(url + "#exchanges/run.0.1-120")
        await reads(page, "Unusual: 'first token' took 800 ms, and 0 ms in the median of 120 streams")
        names = await page.look(f"{bars}.map((row) => row.querySelector('.name').textContent)")
        assert names == [phase.title for phase in PHASES]
        widths = await page.look(f"{bars}.map((row) => row.querySelector('svg').clientWidth)")
        assert len(set(widths)) == 1
        # Of 900 ms, 89 are the head's, 10 those of the first byte, and 800 those of the first token.
        drawn = f"{bars}.flatMap((row) => [...row.querySelectorAll('rect')].map((bar) => "
        shape = "[bar.getAttribute('class'), +bar.getAttribute('x'), +bar.getAttribute('width')]))"
        shapes = await page.look(drawn + shape)
        kind, x, width = shapes[-1]
        assert (kind, round(x, 1), round(width, 1)) == ("unusual", 11.1, 88.9)
        assert all(one[0] == "point" for one in shapes[:-1])
        await page.open(url + "#exchanges/run.0.1-1")
        await reads(page, "No part is unusual beside 120 streams")
        assert page.problems == []


async def test_a_stream_that_its_client_held_has_both_figures() -> None:
    tally = an_empty_tally()
    x = measured(1, 40)
    times = x.timeline.events.t_ns
    x.timeline.holds.extend((times[10] + 5_000_000, times[20]))
    x.timeline.paused_ns = times[20] - times[10] - 5_000_000
    tally.on_open()
    tally.on_end(x)

    async with dashboard(tally) as (page, url):
        await page.open(url + "#exchanges/run.0.1-1")
        await reads(page, "200 ms; server alone at least 20 ms")
        await reads(page, "20 ms; server alone at least 15 ms")
        assert page.problems == []


async def test_an_exchange_links_to_its_trace() -> None:
    options = MeterOptions(trace_url="https://traces.example/{trace_id}")
    tally = ExchangePipeline(options, an_empty_tally().clock)
    x = streamed(100, 140, 2_000, seq=1)
    x.trace_parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    tally.on_open()
    tally.on_end(x)

    async with dashboard(tally) as (page, url):
        await page.open(f"{url}#exchanges/{x.id}")
        await reads(page, "0af7651916cd43dd8448eb211c80319c")
        link = "document.querySelector('main a[target=_blank]')"
        assert await page.look(f"{link}.href") == "https://traces.example/0af7651916cd43dd8448eb211c80319c"
        assert page.problems == []


async def test_a_refusal_of_unknown_stage_has_its_reason_on_the_page() -> None:
    tally = an_empty_tally()
    x = streamed(100, 140, 2_000, seq=1)
    x.outcome = Outcome.REFUSED
    x.refusal = {
        "kind": "guardrail",
        "source": "finish_reason",
        "confidence": "medium",
        "detail": {"event": 1, "stage": "unknown", "why": "no usage: input or output"},
    }
    x.guardrail = {"phase": "unknown", "action": "blocked", "signal": "finish_reason", "event": 1}
    tally.on_open()
    tally.on_end(x)

    async with dashboard(tally) as (page, url):
        await page.open(f"{url}#exchanges/{x.id}")
        await reads(page, "stage unknown: no usage: input or output")
        await reads(page, "blocked, unknown (finish_reason)")
        assert page.problems == []
