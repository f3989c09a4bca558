"""Trouble as the dashboard tells it: alarms that ring, what went unmeasured, a tap that is lost.

And figures that would flatter, or would be taken for more than they are.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec
import pytest

from llmtap.clock import ManualClock
from llmtap.exchange.exchange import EventLog
from llmtap.exchange.outcome import Outcome
from llmtap.meter.admin import live_feed as live
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from tests.meter.web.dashboard import HELLO, a_tally, an_empty_tally, dashboard, is_live, reads, shown
from tests.support.browser import CHROMIUM, Page
from tests.support.traffic.relay_status import relay_status
from tests.support.traffic.steps import rise
from tests.support.traffic.streams import streamed

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

S = 1_000_000_000
STATUS = "document.getElementById('status')"


async def choose(page: Page, select: str, value: str) -> None:
    await page.look(
        f"(() => {{ const choice = document.getElementById('{select}'); choice.value = '{value}';"
        " choice.dispatchEvent(new Event('change')); })()"
    )


async def test_an_alarm_that_rings_stands_above_all_figures() -> None:
    async with dashboard() as (page, url):
        await page.open(url)
        await reads(page, "gold uses its error budget too fast: burn rate 20 over the 60 s measured")
        alarm = await page.look("document.querySelector('main [role=alert]').textContent")
        assert "burn rate 20 over the 60 s measured; page above 14.4 over 1h and 5m." in alarm
        assert await page.look("document.querySelectorAll('main > div:not([hidden]) .banner').length") == 1
        text = await shown(page)
        assert text.index("gold uses") < text.index("Requests/s")
        for words in ("Burn-rate alarms", "the 60 s measured: 20", "firing"):
            assert words in text, words
        # It is read out once, not with every answer.
        await page.look("window.banner = document.querySelector('main [role=alert]')")
        n = await page.look("llmtap.renders.filter((one) => one.name === 'overview').length")
        await page.until(f"llmtap.renders.filter((one) => one.name === 'overview').length > {n + 1}")
        assert await page.look("banner.isConnected")
        assert page.problems == []


async def test_an_upstream_that_is_down_stands_above_all_figures() -> None:
    tally = a_tally()
    tally.on_status(
        "r0", relay_status(t_ns=99 * S, opened=1, measured=1, upstreams={"http://gw:8000": False})
    )
    alert = "document.querySelector('main > div:not([hidden]) .banner.bad')?.textContent"

    async with dashboard(tally) as (page, url):
        for view in ("overview", "tap"):
            await page.open(f"{url}#{view}")
            await page.until(
                f"{alert}.startsWith('http://gw:8000 accepts no connection: clients get 502 or 504.')"
            )
        assert page.problems == []


async def test_a_step_of_ttft_stands_above_all_figures() -> None:
    tally = an_empty_tally(clock=(clock := ManualClock(now_ns=40 * S)))
    rise(tally.steps, clock)

    async with dashboard(tally) as (page, url):
        await page.open(url)
        await reads(page, "UTC the TTFT of tiny is 1.60 times (")
        text = await page.look("document.querySelector('main [role=alert]').textContent")
        assert "at the same load and prompt length: 0.158 s instead of" in text
        clock.advance(600 * S)
        await page.until("!document.querySelector('main [role=alert]')")
        assert page.problems == []


async def test_a_view_that_is_shown_again_is_not_stale_while_it_awaits_its_answer() -> None:
    async with dashboard() as (page, url):
        await page.open(f"{url}#overview")
        await is_live(page)
        stale = (
            "import('/assets/polling.js').then(({ Poll }) => { const poll = new Poll('', null, 1000); %s })"
        )
        times = (
            "poll.runs = true; const now = performance.now(); [poll.at, poll.began] = [now - %d, now - %d];"
        )
        result = " return [poll.fresh, poll.staleFor() !== null];"
        for at, began, expected in (
            (60_000, 500, [False, False]),
            (60_000, 6_000, [False, True]),
            (100, 500, [True, False]),
            (6_000, 60_000, [True, True]),
        ):
            assert await page.look(stale % (times % (at, began) + result)) == expected


async def test_what_went_unmeasured_is_told_with_its_reasons_and_since_when() -> None:
    tally = ExchangePipeline(MeterOptions(), clock := ManualClock(now_ns=40 * S))
    clock.advance(20 * S)
    tally.relays.join(HELLO)
    tally.on_status("r0", relay_status(opened=14, measured=1, dropped={"meter_lost": 10, "no_meter": 3}))

    async with dashboard(tally) as (page, url):
        await page.open(url)
        await reads(page, "13 exchanges were not measured since the relays started: why")
        await reads(page, "The meter started at")
        await page.look("document.querySelector('main a[href=\"#tap\"]').click()")
        await reads(page, "10 were running when the meter ended; 3 began while no meter was connected.")
        assert "Not measured, by reason: meter_lost 10, no_meter 3." in await shown(page)
        assert page.problems == []


async def test_a_failure_is_one_of_the_upstream_or_of_llmtap_and_a_disconnect_is_none() -> None:
    tally = an_empty_tally()
    ended = [Outcome.TRUNCATED] * 3 + [Outcome.CLIENT_CANCELLED] * 2 + [Outcome.CLIENT_ERROR] * 2
    for seq, outcome in enumerate(ended, 1):
        x = streamed(100, 120, seq=seq, outcome=outcome)
        if outcome is Outcome.CLIENT_ERROR:
            x.timeline.events = EventLog()
        tally.on_open()
        tally.on_end(x)
    red = "[...document.querySelectorAll('main .outcomes .bad')].map((one) => one.textContent)"
    rows = (
        "[...document.querySelectorAll('main > div:not([hidden]) tbody td.bad')]"
        ".map((one) => one.textContent)"
    )

    async with dashboard(tally) as (page, url):
        await page.open(url)
        await reads(page, "3 of 7 exchanges failed (42.9 %)")
        assert await page.look(red) == ["truncated 3 (42.9 %)"]
        await page.open(url + "#exchanges")
        await page.until(f"{rows}.length === 3")
        assert set(await page.look(rows)) == {"truncated"}
        await page.open(url + "#chunking")
        await reads(page, "4 tokens generated before, \u2013 after the client disconnected")
        await reads(page, "client_error 2")
        assert page.problems == []


async def test_the_overview_points_to_times_that_are_unreliable() -> None:
    tally = an_empty_tally()
    for seq in range(1, 11):
        x = streamed(100, 120, seq=seq)
        x.uncertainty_ns = 20_000_000 if seq == 1 else 1_000
        tally.on_open()
        tally.on_end(x)

    async with dashboard(tally) as (page, url):
        words = "10.0 % of the exchanges have an uncertainty above 10"
        await page.open(url)
        await reads(page, words)
        await reads(page, "their times are unreliable. See Health")
        await page.look("document.querySelector('main .banner a[href=\"#tap\"]').click()")
        await reads(page, "llmtap gets too little CPU.")
        assert words in await shown(page)
        assert page.problems == []


async def test_the_live_feed_is_asked_anew_when_another_question_was_answered() -> None:
    async with dashboard() as (page, url):
        await page.open(url)
        await is_live(page)
        request = await page.look(
            """import('/assets/polling.js').then(async ({ Feed }) => {
              let asked = 0;
              const api = { async *events() { asked++; throw new Error('away'); } };
              const feed = new Feed(api, () => {});
              const turn = () => new Promise((done) => setTimeout(done, 20));
              const found = [];
              feed.start();
              for (let i = 0; i < 4; i++) {
                await turn();
                found.push(asked);
                feed.retryNow();
              }
              feed.stop();
              return found;
            })"""
        )
        assert request == [1, 2, 3, 4]
        assert page.problems == []


async def test_time_of_which_nothing_is_known_is_a_gap_in_the_charts() -> None:
    async with dashboard() as (page, url):
        await page.open(url)
        await is_live(page)
        drawn = await page.look(
            """import('/assets/charts.js').then(({ History }) => {
              const history = new History(['a']);
              for (const second of [1, 2, 4, 60, 61]) history.add(new Date(second * 1000), { a: second });
              const { t, series } = history.toDraw();
              return [t.map((at) => at / 1000), series.a];
            })"""
        )
        assert drawn == [[1, 2, 4, 59.999, 60, 61], [1, 2, 4, None, 60, 61]]
        assert page.problems == []


async def test_a_finding_stands_beside_the_figure_whose_p_decided() -> None:
    tally = a_tally()
    result = tally.experiments.results

    def found() -> Callable[[], dict[str, Any]]:
        work = result()
        return lambda: {**work(), "findings": [{"arm": "marked", "metric": "ttft", "p": 1e-9}]}

    says = (
        "[...document.querySelectorAll('main > div:not([hidden]) tbody tr')]"
        ".find((row) => row.children[1].textContent === 'TTFT').lastChild"
    )

    with mock.patch.object(tally.experiments, "results", found):
        async with dashboard(tally) as (page, url):
            await page.open(url + "#experiment")
            await page.until(f"{says}.textContent === 'finding'")
            assert await page.look("document.getElementById('figure').value") == "mean"
            await choose(page, "figure", "p50")
            await page.until(f"{says}.textContent === 'finding for the mean'")
            assert not await page.look(f"{says}.classList.contains('finding')")
            assert page.problems == []


async def test_an_answer_without_a_token_has_no_empty_picture() -> None:
    tally = an_empty_tally()
    x = streamed(100, seq=1, outcome=Outcome.REFUSED)
    x.timeline.events = EventLog()
    tally.on_open()
    tally.on_end(x)
    tally.on_open()
    tally.on_end(streamed(100, 140, seq=2))
    figure = "document.querySelector('.plot.tall').closest('figure').checkVisibility()"

    async with dashboard(tally) as (page, url):
        await page.open(url + "#exchanges/r-2")
        await reads(page, "A reader of 20 tokens/s")
        assert await page.look(figure)
        await page.look("location.hash = 'exchanges/r-1'")
        await reads(page, "No event carried output, so there is no chart.")
        assert not await page.look(figure)
        assert page.problems == []


async def test_a_live_feed_without_a_free_place_is_told_and_asked_again() -> None:
    async with dashboard() as (page, url):
        with mock.patch.object(live, "SUBSCRIBERS_MAX", 0):
            await page.open(url)
            await page.until(f"{STATUS}?.dataset.state === 'failed'")
            assert "(503)" in await page.look(f"{STATUS}.textContent")
            # Figures that other requests bring are shown nevertheless.
            await page.until("document.getElementById('main').innerText.includes('acme')")
        await is_live(page)


async def test_a_window_that_is_full_says_nothing_of_the_meters_age() -> None:
    async with dashboard() as (page, url):
        await page.open(url)
        await reads(page, "1m (55 s)")
        assert "The meter started" not in await shown(page)
        await choose(page, "window", "1h")
        await reads(page, "The meter started at")
        assert page.problems == []


async def test_exchanges_that_died_with_a_relay_are_told_with_what_their_clients_got() -> None:
    tally = a_tally()
    now_ns = tally.clock.mono_ns()
    epoch = tally.relays.join(msgspec.structs.replace(HELLO, relay="r9"))
    tally.relays.update("r9", relay_status(opened=12, measured=3, unsettled=9), now_ns)
    tally.relays.leave("r9", epoch, 9, now_ns - 6 * S)

    async with dashboard(tally) as (page, url):
        for view in ("overview", "tap"):
            await page.open(f"{url}#{view}")
            await reads(page, "9 exchanges were lost since the start (outcome tap_error)")
            await reads(page, "the client got an incomplete response or none")
        text = await shown(page)
        assert "Their traffic was forwarded." in text, "of the 5 dropped ones"
        assert "relay_lost" not in text
        assert page.problems == []


async def test_a_process_that_ended_in_order_is_not_listed_and_one_that_died_is() -> None:
    tally = a_tally()
    now_ns = tally.clock.mono_ns()
    for name, unsettled in (("ended", 0), ("died", 2)):
        epoch = tally.relays.join(msgspec.structs.replace(HELLO, relay=name))
        tally.relays.update(
            name, relay_status(opened=12, measured=12 - unsettled, unsettled=unsettled), now_ns
        )
        tally.relays.leave(name, epoch, unsettled, now_ns - 6 * S)

    async with dashboard(tally) as (page, url):
        await page.open(f"{url}#tap")
        await reads(page, "Not listed: processes that have ended (1), with 12 measured exchanges.")
        rows = await page.look(
            "[...document.querySelectorAll('main tbody th, main tbody td:first-child')]"
            ".map((cell) => cell.textContent)"
        )
        assert "died" in rows and "ended" not in rows
        assert page.problems == []


async def test_a_control_that_is_not_clean_has_a_banner() -> None:
    tally = a_tally()
    tally.experiments.on_assignment("control", "f" * 16, False, own_headers=True)

    async with dashboard(tally) as (page, url):
        await page.open(f"{url}#experiment")
        await reads(page, "sent X-Arm themselves, so this arm is not clean")
        await reads(page, "experiment.strip_headers = true removes it")
        assert page.problems == []
