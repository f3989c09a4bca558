"""Parts of the page by themselves, imported in a real browser: lanes, the live feed."""

import pytest

from llmtap.export.sinks import CaptureState
from tests.meter.web.dashboard import an_empty_tally, play, reads
from tests.support.browser import CHROMIUM, Page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")


class _Troubled:
    """A recorder whose disk is full."""

    def state(self) -> CaptureState:
        return CaptureState(problem="disk_full", dropped={"disk_full": 3, "deleted": 5})


def test_a_capture_in_trouble_is_not_well() -> None:
    tally = an_empty_tally()
    tally.recorder = _Troubled()  # type: ignore[assignment]

    async def scene(page: Page, url: str) -> None:
        await page.open(url + "#tap")
        await reads(page, "The capture is paused: disk_full.")
        await reads(page, "Exchanges are missing from the capture: disk_full 3.")
        assert page.problems == []

    play(scene, tally)
