"""What the dashboard says where there is nothing, where something is amiss, and of a stream under way."""

import asyncio
import json
import random
from typing import Any

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from llmtap import native
from llmtap.clock import ManualClock
from llmtap.exchange.outcome import Outcome
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from tests.meter.web.dashboard import (
    HELLO,
    VIEWS,
    a_tally,
    an_empty_tally,
    dashboard,
    is_live,
    own_clock,
    reads,
    shown,
    under_way,
)
from tests.support.browser import CHROMIUM, Page
from tests.support.traffic.experiments import an_experiment
from tests.support.traffic.streams import streamed
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
  const node = document.getElementById("announcement");
  window.announcements = [];
  const about = { childList: true, characterData: true, subtree: true };
  new MutationObserver(() => window.announcements.push(node.textContent)).observe(node, about);
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
    await page.until(f"window.announcements?.some((one) => one.startsWith({json.dumps(words)}))")


async def test_where_nothing_has_passed_each_view_says_what_to_do() -> None:
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

    async with dashboard(an_empty_tally()) as (page, url):
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
        assert figures["Met their objectives"] == DASH
        assert page.problems == []
        assert await page.look("window.llmtap.errors") == []


async def test_an_empty_window_says_which_one_shows_the_last_exchange() -> None:
    clock = ManualClock(now_ns=40 * S)
    tally = an_empty_tally(clock=clock)
    tally.on_open()
    tally.on_end(streamed(80, 120, seq=1))
    clock.advance(100 * S)

    async with dashboard(tally) as (page, url):
        await page.open(url)
        await is_live(page)
        message = await view(page, "overview")
        assert "No exchange has ended in this window (1m). The last exchange ended" in message
        assert 'the window "5m" shows it' in message
        assert page.problems == []


def with_arms(tally: ExchangePipeline, shares: dict[str, int]) -> ExchangePipeline:
    """So many exchanges of each arm, all of one kind, one arm after the other as long as it has some."""
    rng = random.Random(5)
    assignment = [arm for n in range(max(shares.values())) for arm in shares if n < shares[arm]]
    for seq, arm in enumerate(assignment, 1):
        first = rng.randrange(80, 120)
        x = streamed(first, first + rng.randrange(40, 50), first + rng.randrange(90, 100), seq=seq)
        x.arm, x.unit = arm, f"{seq:016x}"
        tally.on_open()
        tally.experiments.on_assignment(arm, x.unit, False)
        tally.on_end(x)
    return tally


async def test_an_experiment_that_a_worse_arm_ended_says_so_and_shows_unadjusted_differences() -> None:
    experiment = an_experiment(stop_worse=("failed",), covariate="request_bytes")
    tally = an_empty_tally(experiment)
    for seq in range(1, 385):
        x = streamed(100, 140 + seq % 5, seq=seq)
        x.arm, x.unit = ("marked", "control")[seq % 2], f"{seq:016x}"
        x.request_bytes = 100 + 10 * (seq % 7)
        x.outcome = Outcome.TRUNCATED if x.arm == "marked" else x.outcome
        tally.on_open()
        tally.experiments.on_assignment(x.arm, x.unit, False)
        tally.on_end(x)
    result: Any = tally.experiments.results()()
    unadjusted = result["differences"]["marked"]["tbc"]["mean"]["unadjusted_difference"]

    async with dashboard(tally) as (page, url):
        await page.open(url + "#experiment")
        await page.until("document.querySelector('main [role=alert]')")
        alarm = await page.look("document.querySelector('main [role=alert]').textContent")
        assert (
            f"Stopped at {result['stopped']['at']}: marked is worse than control in failed, by 100" in alarm
        )
        words = await shown(page)
        assert "means adjusted by request_bytes" in words
        assert "curl -X POST" not in words
        row = "[...document.querySelectorAll('main > div:not([hidden]) tbody tr')]"
        row += ".find((row) => row.children[1].textContent === 'TBC')"
        cells = await page.look(f"[...{row}.children].map((cell) => cell.textContent)")
        assert cells[4].startswith(f"{1e6 * unadjusted:.0f} µs (")
        assert page.problems == []


async def test_a_ramp_names_its_stage() -> None:
    tally = an_empty_tally(an_experiment(schedule="1%, 10%", stop_worse=("failed",)))

    async with dashboard(tally) as (page, url):
        await page.open(url + "#experiment")
        await reads(page, "Stage 1 of 2: marked gets 1 % of the units since")
        assert "The figures are of this stage alone." in await shown(page)
        assert page.problems == []


async def test_a_split_that_is_not_as_configured_is_an_alarm() -> None:
    tally = with_arms(an_empty_tally(an_experiment()), {"control": 260, "marked": 60})

    async with dashboard(tally) as (page, url):
        await page.open(url + "#experiment")
        await page.until("document.querySelector('main [role=alert]')")
        alarm = await page.look("document.querySelector('main [role=alert]').textContent")
        assert "Sample ratio mismatch" in alarm
        assert "control 260 (50.0 % expected), marked 60 (50.0 % expected)" in alarm
        assert "no comparison below can be trusted" in alarm
        assert page.problems == []


async def test_an_experiment_begins_with_its_result_or_with_what_is_missing_for_one() -> None:
    tally = with_arms(an_empty_tally(an_experiment()), {"control": 20, "marked": 10})

    async with dashboard(tally) as (page, url):
        await page.open(url + "#experiment")
        await reads(page, "marked: no result yet.")
        words = await shown(page)
        assert "needs 50 units in each arm: control has 20, marked has 10." in words
        assert "Findings in 13 comparisons: none. Only shares are compared so far." in words
        assert page.problems == []

    several = with_arms(an_empty_tally(an_experiment()), {"control": 90, "marked": 90})
    async with dashboard(several) as (page, url):
        await page.open(url + "#experiment")
        await reads(page, "marked shows no difference in the median time to first token")
        assert "Findings in 13 comparisons: none." in await shown(page)
        assert page.problems == []


async def test_labels_are_a_table_of_all_traffic_and_of_each_arm() -> None:
    tally = an_empty_tally(an_experiment())
    for seq in range(1, 21):
        arm = ("marked", "control")[seq % 2]
        refused = arm == "marked" and seq <= 4
        x = streamed(100, 150, seq=seq, outcome=Outcome.REFUSED if refused else Outcome.COMPLETE)
        x.arm, x.unit, x.label = arm, f"{seq:016x}", "should-answer" if seq < 20 else "unknown"
        tally.on_end(x)
    rows = """[...document.querySelectorAll("main > div:not([hidden]) [aria-label^=Refusals] tbody tr")]
      .map((row) => [...row.cells].map((cell) => cell.textContent))"""

    async with dashboard(tally) as (page, url):
        await page.open(url)
        await is_live(page)
        assert "Labels that do not count: unknown 1." in await view(page, "overview")
        overall = ["all", "should-answer", "17", "2", "0", "false positives", "10.5 %", "2.94 % to 31.4 %"]
        assert await page.look(rows) == [overall]
        await view(page, "experiment")
        assert await page.look(rows) == [
            ["control", "should-answer", "10", "0", "0", "false positives", "0.0 %", "0.0 % to 33.9 %"],
            ["marked", "should-answer", "7", "2", "0", "false positives", "22.2 %", "4.80 % to 61.8 %"],
        ]


async def test_a_stream_under_way_is_followed_chunk_by_chunk_until_it_ends() -> None:
    tally = an_empty_tally()
    assembler = under_way(tally)

    async with dashboard(tally) as (page, url):
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
        await page.until("document.querySelector('.plot.tall > svg')")
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


async def test_the_span_of_the_lanes_follows_the_oldest_stream_until_one_is_chosen() -> None:
    tally = an_empty_tally()
    under_way(tally)
    old = Assembler(HELLO, tally)
    tally.streams.join(old)
    now_ms = tally.clock.mono_ns() // 1_000_000
    ago = "document.querySelector('.axis').firstChild.textContent"

    async with dashboard(tally) as (page, url):
        await page.open(url + "#streams")
        await page.until(f"{ago}.startsWith('11.')")  # 10 s, and the delay of the picture
        old.digest(Script().request(1, now_ms - 25_000).frames())
        await page.until(f"parseFloat({ago}) > 25")
        await page.look(
            "document.getElementById('span').value = '60';"
            "document.getElementById('span').dispatchEvent(new Event('change'))"
        )
        await page.until(f"{ago}.startsWith('61.')")
        assert page.problems == []


async def test_the_charts_begin_with_what_the_meter_kept_before_the_page_was_opened() -> None:
    clock = ManualClock(now_ns=600 * S)
    tally = ExchangePipeline(MeterOptions(), clock)
    tally.relays.join(HELLO)
    for _ in range(12):
        tally.on_end(streamed(100, 140))
        clock.advance(10 * S)
    steps: list[str] = []

    @web.middleware
    async def asked(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == "/api/v1/history":
            steps.append(request.query["step"])
        return await handler(request)

    points = """import('/assets/charts.js').then(async ({ History }) => {
      const history = new History(['ttft_p50', 'achieved_rps']);
      history.add(new Date(1000), { ttft_p50: 1 });
      const kept = await (await fetch('/api/v1/history?step=10s')).json();
      history.begin(kept);
      history.add(new Date(1000 * (kept.end + 1)), { ttft_p50: 9 });
      history.begin(kept);
      const { t, series } = history.toDraw();
      return [t.length, t.at(-2) - t.at(-3), series.ttft_p50.slice(-2), series.achieved_rps[0]];
    })"""

    async with dashboard(tally, None, asked) as (page, url):
        await page.open(url)
        await is_live(page)
        n, step_ms, latest, rate = await page.look(points)
        assert (n, step_ms, rate) == (13, 10_000, 0.1)
        assert latest == [pytest.approx(0.1), 9]
        await page.look(
            "document.getElementById('period').value = 'last 24 hours';"
            "document.getElementById('period').dispatchEvent(new Event('change'))"
        )
        await reads(page, "Each point covers 5 minutes")
        await page.until("document.getElementById('status').dataset.state === 'live'")
        assert page.problems == []
    assert steps[0] == "10s"
    assert "5m" in steps


async def test_on_a_phone_the_figures_that_matter_are_on_the_first_screen() -> None:
    tally = a_tally()
    places = """[...document.querySelectorAll("main > div:not([hidden]) .card")].slice(0, 3).map((card) => [
      card.querySelector("dt").textContent, card.querySelector("dd").getBoundingClientRect().bottom,
    ])"""

    async with dashboard(tally) as (page, url):
        await page.screen(390, 760, scale=2)
        await page.open(url)
        await is_live(page)
        await reads(page, "Requests/s")
        figures = dict(await page.look(places))
        assert list(figures) == ["TTFT", "Met their objectives", "Requests/s"]
        assert all(bottom <= 760 for bottom in figures.values()), figures


async def test_of_a_stream_longer_than_a_minute_what_came_before_is_one_chunk() -> None:
    tally = an_empty_tally()
    assembler = Assembler(HELLO, tally)
    tally.streams.join(assembler)
    tally.clock.advance(400 * S)
    script = Script().request(1, 400_000).head(1, 400_100)
    for i in range(95):
        script.word(1, 400_900 + 1_000 * i)
    assembler.digest(script.frames())

    async with dashboard(tally) as (page, url):
        await page.open(url + "#exchanges/r0-1")
        await reads(page, "This exchange has run for 100 s")
        await page.look("document.getElementById('unfold').click()")
        rows = await page.look(
            "[...document.querySelectorAll('main > div:not([hidden]) tbody tr')]"
            ".map((row) => [...row.children].map((cell) => cell.textContent))"
        )
        # The last minute begins at 440 s: words of 440.9 to 494.9 s are in it, 40 came before.
        assert [row[5] for row in rows] == ["40", *["1"] * 55]
        assert {row[3] for row in rows} == {DASH}, "of what class they are nobody has told"
        assert page.problems == []


async def test_a_tap_that_hangs_is_stale_and_one_that_answers_again_is_live() -> None:
    answers, held = asyncio.Event(), asyncio.Event()

    @web.middleware
    async def gate(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == "/api/v1/summary" and not answers.is_set():
            held.set()
            await answers.wait()
        return await handler(request)

    async with dashboard(None, None, gate) as (page, url):
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


async def test_a_lost_connection_is_said_and_the_page_goes_on_by_itself() -> None:
    async def online(page: Page, yes: bool) -> None:
        await page.send(
            "Network.emulateNetworkConditions",
            offline=not yes,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )

    async with dashboard() as (page, url):
        await page.open(url)
        await reads(page, "n 200")
        await online(page, False)
        await page.until(f"{STATUS}.dataset.state === 'failed'")
        assert "llmtap does not answer" in await page.look(f"{STATUS}.innerText")
        assert "n 200" in await shown(page)
        await online(page, True)
        await is_live(page)
        # The browser itself tells of what it could not load; nothing else may be said.
        assert [problem for problem in page.problems if "net::ERR_" not in problem] == []


async def test_without_a_relay_it_says_that_nothing_is_measured() -> None:
    async with dashboard(ExchangePipeline(MeterOptions(), ManualClock(now_ns=S))) as (page, url):
        await page.open(url)
        await reads(page, "No relay is connected to the meter, so nothing is measured.")
        await view(page, "tap")
        await reads(page, "No process is connected to the meter: nothing is measured.")
        await reads(page, "No relay has connected to this meter.")
        assert page.problems == []
