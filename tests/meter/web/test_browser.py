"""The dashboard in a real browser: it shows what the API says, and takes nothing from traffic for markup."""

import json
import random
from unittest import mock

import aiohttp
import pytest

from llmtap.meter.pipeline import exchanges as recent_api
from tests.meter.web.dashboard import (
    TITLES,
    VIEWS,
    a_tally,
    an_empty_tally,
    dashboard,
    is_live,
    reads,
    shown,
    under_way,
)
from tests.support.browser import CHROMIUM
from tests.support.traffic.streams import reader_wait_ns, streamed

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

MS = 1_000_000
DASH = "\N{EN DASH}"
HOSTILE = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>'
COUNTS = "document.querySelector('.counts').textContent"
TENANTS = "document.querySelector('#main tbody').rows.length"


async def test_every_view_shows_figures_and_complains_of_nothing() -> None:
    tally = a_tally()

    async with dashboard(tally) as (page, url):
        under_way(tally)
        await page.open(url)
        await is_live(page)
        for number, (view, title) in enumerate(zip(VIEWS, TITLES, strict=True), 1):
            await page.press(str(number))
            await page.until(f"location.hash === '#{view}'")
            await reads(page, title)
            await is_live(page)
        await page.press("1")
        await page.until("document.querySelectorAll('#main .plot > svg').length >= 4")
        text = await shown(page)
        for words in (
            "TTFT",
            "option",
            "User idle",
            "20 tokens/s",
            "Smooth goodput",
            "n 200",
            "few",
            "acme",
            "zebra",
            "refused 22",
        ):
            assert words in text, words
        await page.press("2")
        await page.until(f"{COUNTS}.startsWith('2 under way')")
        assert "1 waiting, 0 streaming, 1 stalled" in await page.look(COUNTS)
        names = "[...document.querySelectorAll('.names li')].map((name) => name.textContent)"
        # Until the right edge has passed its arrival, the name of a stream is followed by "(starts)".
        await page.until(f"({names}).join() === 'acme · tiny,acme · tiny'")
        await page.until("window.llmtap.renders.some((one) => one.name === 'tape')")
        await page.press("5")
        await page.until("document.querySelectorAll('.forest .row').length === 2")
        await page.press("6")
        await page.until(
            "document.querySelector('#main > div:not([hidden])').innerText.includes('overflow 5')"
        )
        assert page.problems == []
        assert await page.look("window.llmtap.errors") == []
        assert {request.split("/")[2] for request in page.requests if not request.startswith("data:")} == {
            url.split("/")[2]
        }
        renders = await page.look("window.llmtap.renders")
        assert {"overview", "streams", "live", "tape"} <= {render["name"] for render in renders}


async def test_an_exchange_is_inspected_chunk_by_chunk() -> None:
    async with dashboard() as (page, url):
        await page.open(url + "#exchanges")
        await page.until("document.querySelectorAll('#main tbody a').length > 50")
        await page.look(
            "[...document.querySelectorAll('#main tbody a')].find((a) => a.textContent === 'r-200').click()"
        )
        await page.until("document.querySelector('.facts dl')")
        await page.until("document.querySelector('.plot.tall > svg')")
        text = await shown(page)
        for words in ("Exchange r-200", "user idle", "waits", "chunk", "deadline", "content", "late by"):
            assert words in text, words
        rows = await page.look(
            "document.querySelectorAll('main > div:not([hidden]) > div:not([hidden]) table tbody tr').length"
        )
        assert rows == 40
        query = f"{url}api/v1/exchanges?id=r-200"
        async with aiohttp.ClientSession() as session, session.get(query) as answer:
            result = (await answer.json())["exchanges"][0]
        idle = result["metrics"]["user_idle"]
        drawn = await page.look(
            "import('/assets/reader.js').then(async ({ follow }) => {"
            " const told = await (await fetch('/api/v1/exchanges?id=r-200&events=1')).json();"
            " const x = told.exchanges[0];"
            " return follow(x.events, x.timeline.submit, 0.05, x.tokens.output).idle; })"
        )
        assert drawn == pytest.approx(idle, abs=1e-6)
        await page.open(url + "#exchanges/r-999")
        await reads(page, "r-999 is not kept")
        assert page.problems == []


async def test_a_long_list_of_chunks_is_folded_and_an_answer_in_one_piece_has_no_ttft() -> None:
    tally = an_empty_tally()
    # The reader (20 tokens/s) waits for the first chunk and for the 61st, which comes 900 ms late.
    long = streamed(*(100 + 40 * i + (900 if i >= 60 else 0) for i in range(120)), seq=1)
    whole = streamed(100, seq=2)
    whole.stream = False
    for x in (long, whole):
        tally.on_open()
        tally.on_end(x)
    table = "main > div:not([hidden]) > div:not([hidden])"
    rows = f"[...document.querySelectorAll('{table} tbody tr')]"
    numbers = f"{rows}.map((row) => Number(row.cells[0].textContent))"
    heads = f"[...document.querySelectorAll('{table} thead th')].map((head) => head.innerText)"

    async with dashboard(tally) as (page, url):
        await page.open(url + "#exchanges/r-1")
        await page.until(f"{rows}.length === 26")
        assert await page.look(numbers) == [*range(1, 21), 61, *range(116, 121)]
        await page.look("document.getElementById('unfold').click()")
        assert await page.look(numbers) == list(range(1, 121))
        await page.open(url + "#exchanges")
        await page.until(f"{rows}.length === 2")
        place = (await page.look(heads)).index("TTFT")
        assert await page.look(f"{rows}.map((row) => row.cells[{place}].textContent)") == [DASH, "100 ms"]
        assert page.problems == []


async def test_an_exchange_that_comes_in_several_answers_is_shown_whole() -> None:
    with mock.patch.multiple(recent_api, PAGE_BYTES_MAX=1, EVENTS_SLICE=7):
        async with dashboard() as (page, url):
            await page.open(url + "#exchanges/r-200")
            await page.until("document.querySelector('.facts dl')")
            table = "main > div:not([hidden]) > div:not([hidden]) table"
            rows = f"document.querySelectorAll('{table} tbody tr').length"
            await page.until(f"{rows} === 40")
            assert sum("r-200" in query for query in page.requests if "/exchanges?" in query) == 6
            assert page.problems == []


async def test_the_reader_of_the_page_is_the_reader_of_the_metrics() -> None:
    rng = random.Random(3)
    cases = []
    for _ in range(50):
        times = sorted(rng.randrange(0, 5_000 * MS) for _ in range(rng.randrange(1, 80)))
        submit = rng.randrange(-1_000 * MS, 100 * MS)
        cases.append((times, submit, reader_wait_ns(times, submit) / 1e9))

    async with dashboard() as (page, url):
        await page.open(url)
        await is_live(page)
        query = [
            ([{"t": t / 1e9, "class": "content", "tokens": 1} for t in times], submit / 1e9)
            for times, submit, _ in cases
        ]
        found = await page.look(
            "import('/assets/reader.js').then(({ follow }) =>"
            f" {json.dumps(query)}.map(([events, submit]) => follow(events, submit, 0.05).idle))"
        )
        assert found == pytest.approx([idle for _, _, idle in cases], abs=1e-6)


async def test_names_from_traffic_are_text_everywhere() -> None:
    tally = a_tally(tenant=HOSTILE, model=HOSTILE, arm="marked")

    async with dashboard(tally) as (page, url):
        under_way(tally, HOSTILE)
        await page.open(url)
        for number in "123456":
            await page.press(number)
            await is_live(page)
            if number in "1234":
                await reads(page, "onerror=")
        for where in ("#exchanges/r-199", f"#exchanges/{HOSTILE}", "#<img src=x onerror=window.pwned=1>"):
            await page.open(url + where)
            await is_live(page)
        await page.look("new Promise((done) => setTimeout(done, 300))")
        assert await page.look("window.pwned") is None
        assert await page.look("document.querySelectorAll('main img, main script').length") == 0
        assert page.problems == []


async def test_with_a_token_the_page_asks_for_it_and_tells_nobody() -> None:
    async with dashboard(token="s3cret") as (page, url):
        await page.open(url)
        await page.until("document.getElementById('token-dialog')?.open")

        async def answer(token: str) -> None:
            await page.look(
                f"document.getElementById('token').value = {json.dumps(token)};"
                " document.getElementById('token-form').requestSubmit()"
            )

        await answer("wrong")
        await page.until("document.getElementById('token-problem').textContent.includes('refused')")
        await answer("s3cret")
        await reads(page, "n 200")
        await is_live(page)
        assert await page.look("sessionStorage.getItem('llmtap.token')") == "s3cret"
        assert await page.look("document.cookie + JSON.stringify(localStorage)") == "{}"
        assert not [request for request in page.requests if "s3cret" in request]
        assert (await page.send("Network.getCookies"))["cookies"] == []
        # Again in the same tab: nobody is asked.
        await page.open(url + "?again")
        await reads(page, "n 200")
        assert not await page.look("document.getElementById('token-dialog').open")
        # The browser itself reports the refused requests; nothing else may be said.
        assert [problem for problem in page.problems if "401" not in problem] == []


async def test_keys_filter_and_sort() -> None:
    async with dashboard() as (page, url):
        await page.open(url)
        await is_live(page)
        await page.press("/")
        assert await page.look("document.activeElement.id") == "filter"
        for letter in "zeb":
            await page.press(letter)
        await page.until(f"{TENANTS} === 1")
        assert "zebra" in await shown(page)
        await page.press("Escape")
        await page.until(f"{TENANTS} === 2")
        await page.look("document.querySelector('#main th button').click()")
        assert await page.look("document.querySelector('#main th[aria-sort]').textContent") == "name"
        await page.press("?")
        assert await page.look("document.getElementById('help').open")
        await page.press("Escape")
        await page.look("document.getElementById('help').close()")
        await page.look("document.activeElement.blur()")
        await page.press("ArrowRight")
        await page.until("location.hash === '#streams'")
        await page.press("ArrowLeft")
        await page.until("location.hash === '#overview'")
        for landmark in ("header", "nav[aria-label]", "main", "[aria-live=polite]"):
            assert await page.look(f"document.querySelectorAll('{landmark}').length") == 1, landmark
        named = "(table) => table.caption && table.querySelector('thead th[scope=col]')"
        assert await page.look(f"[...document.querySelectorAll('main table')].every({named})")
        assert page.problems == []
