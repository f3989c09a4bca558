"""The silent streams on the dashboard: which they are, and what became of earlier ones."""

import pytest

from llmtap.channel.frames import Hello
from llmtap.exchange.outcome import Outcome
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from tests.meter.web.dashboard import MS, an_empty_tally, dashboard, reads
from tests.support.browser import CHROMIUM
from tests.support.traffic.streams import streamed
from tests.support.traffic.tap_frames import Script

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

NONE = "\N{EN DASH}"
ROWS = """[...document.querySelectorAll("[aria-label='Silent streams'] tbody tr")].map(
  (row) => [...row.cells].map((cell) => cell.textContent))"""


def a_meter_with_silences() -> ExchangePipeline:
    """Of 40 finished streams that were silent for 8 s, 3 went on. One is silent now, one waits, one sends."""
    pipeline = an_empty_tally()
    for seq in range(1, 41):
        resumed = seq <= 3
        x = streamed(*((100, 140, 8_140) if resumed else (100, 140)), seq=seq, model="tiny")
        x.timeline.response_end_ns = (8_140 if resumed else 20_140) * MS
        x.outcome = Outcome.COMPLETE if resumed else Outcome.TRUNCATED
        pipeline.on_open()
        pipeline.on_end(x)
    hello = Hello(relay="r1", pid=1, clock="mono", anchor_mono_ns=0, anchor_wall_ns=0)
    assembler = Assembler(hello, pipeline)
    pipeline.relays.join(hello)
    pipeline.streams.join(assembler)
    now_ms = pipeline.clock.mono_ns() // MS
    script = Script()
    for seq in (1, 2, 3):
        script.request(seq, now_ms - 9_000).head(seq, now_ms - 8_990)
    for seq, last_ms in ((1, now_ms - 7_500), (3, now_ms - 10)):
        for i in reversed(range(6)):
            script.word(seq, last_ms - 20 * i, f"word{i}")
    assembler.digest(script.frames())
    return pipeline


async def test_silent_streams_are_listed_with_the_share_that_went_on() -> None:
    async with dashboard(a_meter_with_silences()) as (page, url):
        await page.open(url + "#streams")
        await reads(page, "2 of 3 running streams sent no token for 5 s or longer")
        await page.until(f"{ROWS}.length === 2")
        first, second = await page.look(ROWS)
        assert first[:7] == ["r1-2", "default", "tiny", NONE, "first token", "9.00 s", "9 s"]
        assert first[7] == NONE, "no finished stream has waited so long for its first token"
        assert second[:7] == ["r1-1", "default", "tiny", NONE, "next token", "7.50 s", "7.50 s"]
        assert second[7].startswith("3 of 40: 7.50 % (")
        await page.look(
            "(() => { const field = document.getElementById('filter'); field.value = 'nobody';"
            " field.dispatchEvent(new Event('input')); })()"
        )
        await reads(page, "0 match the filter")
        assert page.problems == []


async def test_without_silent_streams_there_is_a_sentence_and_no_table() -> None:
    async with dashboard(an_empty_tally()) as (page, url):
        await page.open(url + "#streams")
        await reads(page, "0 of 0 running streams sent no token for 5 s or longer")
        assert await page.look(f"{ROWS}.length") == 0
        assert not await page.look(
            "document.querySelector(\"[aria-label='Silent streams']\").checkVisibility()"
        )
        assert page.problems == []
