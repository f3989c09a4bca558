"""The view of an exchange shows both sides of the gateway, one above the other."""

import pytest

from llmtap.exchange.exchange import BACK, FRONT
from tests.meter.test_pairs import AFTER_MS, Stage, stream
from tests.meter.web.dashboard import dashboard, reads
from tests.support.browser import CHROMIUM

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

LANES = """[...document.querySelectorAll(".parts .row")].filter((row) => row.querySelector("a")).map(
  (row) => {
    const [span, ...ticks] = row.querySelectorAll("rect");
    return [row.querySelector("a").textContent, Number(span.getAttribute("x")), ticks.length];
  })"""


async def test_a_pair_is_shown_in_lanes_as_soon_as_it_is_known() -> None:
    stage = Stage()
    stage.play(FRONT, stream(0, added_ms=15))
    stage.play(BACK, stream(11))

    async with dashboard(stage.pipeline) as (page, url):
        await page.open(url + "#exchanges/front-1")
        await reads(page, "Chunks")
        assert await page.look(LANES) == []
        stage.report(FRONT, BACK, at_ms=AFTER_MS)
        await reads(page, "Both sides of the gateway")
        (front, back) = await page.look(LANES)
        assert (front[0], front[1], front[2]) == ("front", 0, 6)
        assert (back[0], back[2]) == ("back: delivered", 6)
        assert back[1] == pytest.approx(100 * 11 / 176, abs=0.1)
        await reads(page, "15 ms (14.0 ms to 15.0 ms)")
        assert page.problems == []
