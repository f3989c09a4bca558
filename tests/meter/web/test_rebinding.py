"""A page whose name was made to point at the admin port asks it, in a real browser."""

import asyncio

import pytest

from tests.support.browser import CHROMIUM, browser
from tests.support.dashboard import a_tally, served

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

READ = """fetch("/metrics").then(async (answer) => [answer.status, await answer.text()])"""


def test_a_page_under_a_name_of_its_own_reads_nothing() -> None:
    """Over plain http the browser sends neither `Origin` nor `Sec-Fetch-Site` with what the page asks for."""

    async def run() -> None:
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
                found, said = await page.look(READ)
                assert (found, words in said) == (status, True), name

    asyncio.run(run())
