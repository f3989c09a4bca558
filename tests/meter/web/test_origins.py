"""A page of another origin sends requests to the admin port, in a real browser."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from llmtap.meter.admin.server import admin_app
from tests.meter.web.dashboard import a_tally, is_live, served
from tests.support.browser import CHROMIUM, browser
from tests.support.servers.peer import wait_until

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

ATTACK = """(() => {
  const put = (kind, about) => document.body.append(Object.assign(document.createElement(kind), about));
  fetch("%(tap)sapi/v1/live?tenant=fetch", { mode: "no-cors" }).catch(() => {});
  fetch("%(tap)sapi/v1/live?tenant=cors").catch(() => {});
  new EventSource("%(tap)sapi/v1/live?tenant=source");
  put("img", { src: "%(tap)sapi/v1/exchanges?tenant=image" });
  put("script", { src: "%(tap)smetrics?tenant=script" });
  put("iframe", { src: "%(tap)s?tenant=frame" });
  put("a", { id: "link", href: "%(tap)s?tenant=link", textContent: "link" });
})()"""
MEANS = ("fetch", "cors", "source", "image", "script", "frame")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"], ids=["another site", "another port"])
async def test_a_foreign_page_opens_the_dashboard_by_a_link_and_reads_nothing(host: str) -> None:
    answered: dict[str, int] = {}

    async def record(request: web.Request, response: web.StreamResponse) -> None:
        answered[request.query.get("tenant", request.path)] = response.status

    async def page_of_another(request: web.Request) -> web.Response:
        return web.Response(text="<!doctype html><title>other</title><body>", content_type="text/html")

    tally, other = a_tally(), web.Application()
    other.router.add_get("/", page_of_another)
    app = admin_app(tally)
    app.on_response_prepare.append(record)
    async with (
        asyncio.timeout(240),
        TestServer(app) as tap,
        TestServer(other) as site,
        browser() as running,
    ):
        page = await running.page()
        await page.open(f"http://{host}:{site.port}/")
        await page.until("document.title === 'other'")
        await page.look(ATTACK % {"tap": f"http://127.0.0.1:{tap.port}/"})
        await wait_until(lambda: answered.keys() >= set(MEANS))
        assert answered == dict.fromkeys(MEANS, 403)
        assert tally.subscribers == 0
        await page.look("document.getElementById('link').click()")
        await is_live(page)
        assert answered["link"] == 200


READ = """fetch("/metrics").then(async (answer) => [answer.status, await answer.text()])"""


async def test_a_page_under_a_name_of_its_own_reads_nothing() -> None:
    """Over plain http the browser sends neither `Origin` nor `Sec-Fetch-Site` with what the page asks for."""

    async with (
        asyncio.timeout(240),
        served(a_tally()) as url,
        browser("--host-resolver-rules=MAP evil.example 127.0.0.1") as running,
    ):
        page = await running.page()
        for name, status, words in (
            ("evil.example", 403, "meter.admin_token"),
            ("127.0.0.1", 200, "llmtap_exchanges_total"),
            ("localhost", 200, "llmtap_exchanges_total"),
        ):
            await page.open(f"{url.replace('127.0.0.1', name)}healthz")
            await page.until(f"location.hostname === '{name}' && document.readyState === 'complete'")
            found, message = await page.look(READ)
            assert (found, words in message) == (status, True), name
