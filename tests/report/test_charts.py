"""Charts of report pages in a real browser: a pointer shows values, dragging zooms, lines can be hidden."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from llmtap.report.bench import bench_html
from llmtap.report.pairs import pairs_html
from llmtap.report.replay import replay_html
from llmtap.report.sweep_page import sweep_html
from tests.report.simulated_runs import run
from tests.report.test_pairs import summary
from tests.support.browser import CHROMIUM, Page, browser
from tests.support.results.bench_documents import CHARTS, bench_document, bench_report
from tests.support.results.replay_results import replay_result

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

SWEEP = sweep_html([run(s, r) for s in ("a", "<b>") for r in (3, 1, 9)])
PAGES = {
    "replay": replay_html(replay_result()),
    "bench": bench_html(bench_document(bench_report(charts=CHARTS))),
    "sweep": SWEEP,
    "pairs": pairs_html(summary(group=4)),
    "bars": sweep_html([run(f"a-scheduler-with-a-long-name-{i}", 1) for i in range(9)]),
}
MISSING = """[...document.querySelectorAll(".plot")]
  .filter((plot) => !plot.querySelector("svg > svg > *, svg > path:not([class])")).length"""
WRONG = """[...document.querySelectorAll(".plot svg *")].filter((node) =>
  [...node.attributes].some(({ value }) => /NaN|Infinity|undefined/.test(value))).length"""
TIP = "(({ hidden, textContent }) => (hidden ? '' : textContent))(document.querySelector('.plot-tip'))"
RANGES = """[...document.querySelectorAll(".plot")].map(({ chart }) => chart).filter(({ plot }) => plot.timed)
  .map(({ area }) => [area.left, area.right].map((pixel) => Math.round(area.x.back(pixel) * 100) / 100))"""


@asynccontextmanager
async def report_page(html: str, folder: Path) -> AsyncIterator[Page]:
    file = folder / "page.html"
    file.write_text(html, encoding="utf-8")
    async with browser() as running:
        page = await running.page()
        await page.screen(1_280, 900)
        await page.open(file.as_uri())
        await page.until("document.querySelector('.plot > svg')")
        yield page
        assert page.problems == []


async def points(page: Page, plot: str) -> list[dict[str, Any]]:
    """Places of the points of a plot in the window; it is scrolled into view.

    Two frames later the browser has sent the event of this scrolling, which hides what a pointer shows.
    """
    found: list[dict[str, Any]] = await page.look(
        f"""(async () => {{ const node = document.getElementById("{plot}"); node.scrollIntoView();
          for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame);
          const {{ left, top }} = node.getBoundingClientRect();
          return node.chart.points.map(({{ x, y, one, i }}) =>
            ({{ x: left + x, y: top + y, said: one.texts?.[i] ?? "", name: one.name }})); }})()"""
    )
    return found


async def drag(page: Page, start: tuple[float, float], end: tuple[float, float]) -> None:
    await page.mouse("mousePressed", *start, button="left", buttons=1, clickCount=1)
    await page.mouse("mouseMoved", *end, button="left", buttons=1)
    await page.mouse("mouseReleased", *end, button="left", clickCount=1)


@pytest.mark.parametrize("name", PAGES)
async def test_every_chart_is_drawn_and_on_a_phone_none_is_wider_than_the_page(
    name: str, tmp_path: Path
) -> None:
    async with report_page(PAGES[name], tmp_path) as page:
        for width in (1_280, 390):
            await page.screen(width, 900)
            # Each chart is drawn anew, twice if the page's own width changes with it.
            await page.until(
                "[...document.querySelectorAll('.plot')].every((one) => one.chart.width <= one.clientWidth)"
                f" && document.scrollingElement.scrollWidth <= {width}"
            )
            assert await page.look(MISSING) == await page.look(WRONG) == 0


async def test_a_pointer_shows_the_values_of_the_nearest_point(tmp_path: Path) -> None:
    async with report_page(SWEEP, tmp_path) as page:
        for point in await points(page, "throughput-0"):
            await page.mouse("mouseMoved", point["x"] + 3, point["y"] - 3)
            assert point["said"] in (await page.look(TIP)).split("\n\n")
            assert point["said"].startswith(f"{point['name']}\n")
        await page.mouse("mouseMoved", 1, 1)
        assert await page.look(TIP) == ""


async def test_a_stretch_of_the_run_is_shown_in_all_charts_over_time(tmp_path: Path) -> None:
    async with report_page(PAGES["replay"], tmp_path) as page:
        whole = await page.look(RANGES)
        assert len(whole) > 5
        first, *_, last = await points(page, "load-0")
        await drag(page, (first["x"] + 50, first["y"]), (last["x"] - 100, first["y"]))
        chosen = await page.look(RANGES)
        assert all(one == chosen[0] for one in chosen)
        assert whole[0][0] < chosen[0][0] < chosen[0][1] < whole[0][1]
        await page.look(
            "document.getElementById('load-0').dispatchEvent(new MouseEvent('dblclick', { bubbles: true }))"
        )
        assert await page.look(RANGES) == whole


async def test_a_line_that_is_hidden_is_in_no_chart(tmp_path: Path) -> None:
    async with report_page(SWEEP, tmp_path) as page:
        assert {one["name"] for one in await points(page, "throughput-0")} == {"a", "<b>"}
        await page.look("document.getElementById('page-line-0').click()")
        shown = {one["name"] for one in await points(page, "throughput-0")}
        assert len(shown) == 1
        assert (await page.look("document.getElementById('page-shown').textContent")).startswith(
            "1 of 2 lines"
        )
