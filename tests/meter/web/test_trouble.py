"""Trouble as the dashboard tells it: alarms that ring, what went unmeasured, a tap that is lost.

And figures that would flatter, or would be taken for more than they are.
"""

import pytest

from llmtap.clock import ManualClock
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from tests.meter.web.dashboard import HELLO, play, reads, shown
from tests.support.browser import CHROMIUM, Page
from tests.support.traffic.relay_status import relay_status

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

S = 1_000_000_000
STATUS = "document.getElementById('status')"


def test_an_alarm_that_rings_stands_above_all_figures() -> None:
    async def scene(page: Page, url: str) -> None:
        await page.open(url)
        await reads(page, "gold uses its error budget too fast: burn rate 20.0 over the 60 s measured")
        alarm = await page.look("document.querySelector('main [role=alert]').textContent")
        assert alarm.endswith("burn rate 20.0 over the 60 s measured; page above 14.4 over 1h and 5m.")
        text = await shown(page)
        assert text.index("gold uses") < text.index("Requests/s")
        for words in ("Burn-rate alarms", "the 60 s measured: 20.0", "firing"):
            assert words in text, words
        # It is read out once, not with every answer.
        await page.look("window.banner = document.querySelector('main [role=alert]')")
        n = await page.look("llmtap.renders.filter((one) => one.name === 'overview').length")
        await page.until(f"llmtap.renders.filter((one) => one.name === 'overview').length > {n + 1}")
        assert await page.look("banner.isConnected")
        assert page.problems == []

    play(scene)


def test_what_went_unmeasured_is_told_with_its_reasons_and_since_when() -> None:
    tally = ExchangePipeline(MeterOptions(), clock := ManualClock(now_ns=40 * S))
    clock.advance(20 * S)
    tally.relays.join(HELLO)
    tally.status("r0", relay_status(opened=14, measured=1, dropped={"meter_lost": 10, "no_meter": 3}))

    async def scene(page: Page, url: str) -> None:
        await page.open(url)
        await reads(page, "13 exchanges were not measured since the relays started: why")
        await reads(page, "The meter started at")
        await page.look("document.querySelector('main a[href=\"#tap\"]').click()")
        await reads(page, "10 were running when the meter ended; 3 began while no meter was connected.")
        assert "Not measured, by reason: meter_lost 10, no_meter 3." in await shown(page)
        assert page.problems == []

    play(scene, tally)
