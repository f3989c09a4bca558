"""The dashboard for everybody: by keyboard alone, by screen reader, in the system's colours, on a phone."""

from itertools import pairwise
from typing import Any

import pytest

from tests.meter.web.dashboard import VIEWS, a_tally, dashboard, is_live, under_way
from tests.support.browser import CHROMIUM, Page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

PLACES = (*VIEWS, "exchanges/r-199", "exchanges/r1-1", "exchanges/r-999")
"""Every view, an exchange that has ended, one under way, and one that is not kept."""
NAMED = {
    "button",
    "link",
    "searchbox",
    "textbox",
    "combobox",
    "listbox",
    "checkbox",
    "image",
    "img",
    "Canvas",
    "table",
    "region",
    "dialog",
    "navigation",
    "DisclosureTriangle",
}
"""Roles that mean nothing without a name."""
TABBABLE = """[...document.querySelectorAll(
  "a[href], button, input, select, textarea, summary, [tabindex='0']")].filter(
  (one) => one.checkVisibility() && !one.closest("dialog:not([open])"))"""
HEADINGS = """[...document.querySelectorAll("h1, h2, h3, h4, h5, h6")].filter((one) => one.checkVisibility())
  .map((one) => Number(one.tagName[1]))"""
PALE = """(() => {
  const rgba = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = ([r, g, b], a, under) => [r, g, b].map((one, i) => one * a + under[i] * (1 - a));
  const channel = (one) => (one <= 10.31 ? one / 3294.6 : ((one / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  // Ink and ground of the last one of `chain` as they are seen, on `behind`.
  const seen = (chain, behind) => {
    const [style, ...rest] = chain;
    const bg = rgba(style.backgroundColor);
    const ground = over(bg, bg[3], behind);
    const ink = rgba(style.color);
    const inner = rest.length ? seen(rest, ground) : [over(ink, ink[3], ground), ground];
    return inner.map((one) => over(one, Number(style.opacity), behind));
  };
  const found = [];
  let looked = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || parent.closest("svg, script, noscript, .unseen, .narrow-unseen, option")) {
      continue;
    }
    if (!parent.checkVisibility({ visibilityProperty: true })) continue;
    const chain = [];
    for (let one = parent; one; one = one.parentElement) chain.unshift(getComputedStyle(one));
    const [ink, ground] = seen(chain, [255, 255, 255]).map(luminance);
    const ratio = (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
    const size = parseFloat(chain.at(-1).fontSize), bold = Number(chain.at(-1).fontWeight) >= 700;
    looked++;
    // WCAG 2.2, 1.4.3: 4.5, or 3 for 18 points and for 14 points in bold.
    if (ratio < (size >= 24 || (bold && size >= 18.66) ? 3 : 4.5)) found.push([node.data.trim(), ratio]);
  }
  return { looked, found };
})()"""
"""Texts whose contrast with what is behind them is too low, as computed from the styles in effect."""


async def at(page: Page, place: str) -> None:
    """Until this place is shown and live, and has been filled."""
    await page.look(f"location.hash = '{place}'")
    view = place.partition("/")[0]
    await page.until(f"document.querySelector('#tabs a[aria-current]').hash === '#{view}'")
    await is_live(page)
    wanted = {
        "overview": "requests/s",
        "streams": "under way",
        "exchanges": "newest exchanges",
        "chunking": "single tokens",
        "experiment": "sample ratio",
        "tap": "longest delay",
        "exchanges/r-199": "added to the request",
        "exchanges/r1-1": "this exchange has run for",
        "exchanges/r-999": "is not kept",
    }[place]
    await page.until(f"document.getElementById('main').innerText.toLowerCase().includes('{wanted}')")


async def test_everything_that_can_be_used_has_a_name_and_headings_have_an_order() -> None:
    tally = a_tally()

    async with dashboard(tally) as (page, url):
        under_way(tally)
        await page.open(url)
        await is_live(page)
        for place in PLACES:
            await at(page, place)
            nodes = [node for node in await accessible(page) if not node["ignored"]]
            roles = [node["role"]["value"] for node in nodes]
            nameless = [
                (node["role"]["value"], node.get("properties"))
                for node in nodes
                if node["role"]["value"] in NAMED and not node.get("name", {}).get("value", "").strip()
            ]
            assert nameless == [], place
            for landmark in ("banner", "navigation", "main"):
                assert roles.count(landmark) == 1, (place, landmark)
            assert {"button", "link", "combobox", "searchbox"} <= set(roles)
            levels = await page.look(HEADINGS)
            assert levels[0] == 1
            assert levels.count(1) == 1
            assert all(below <= above + 1 for above, below in pairwise(levels)), place
            twice = await page.look(
                "(() => { const ids = [...document.querySelectorAll('[id]')].map((one) => one.id);"
                " return ids.filter((id, i) => id && ids.indexOf(id) !== i); })()"
            )
            assert twice == []
        assert await page.look("document.documentElement.lang") == "en"
        assert page.problems == []


async def accessible(page: Page) -> list[dict[str, Any]]:
    """What the browser tells a screen reader."""
    await page.send("Accessibility.enable")
    nodes: list[dict[str, Any]] = (await page.send("Accessibility.getFullAXTree"))["nodes"]
    return nodes


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_every_text_can_be_read_on_what_is_behind_it(dark: bool) -> None:
    tally = a_tally()

    async with dashboard(tally) as (page, url):
        under_way(tally)
        await page.screen(1_280, 900, dark=dark)
        await page.open(url)
        await is_live(page)
        for place in PLACES:
            await at(page, place)
            result = await page.look(PALE)
            assert result["found"] == [], place
            assert result["looked"] > 20, place
        # What is old is marked, and can still be read.
        await page.look("document.getElementById('main').classList.add('stale')")
        assert (await page.look(PALE))["found"] == []
        await page.look("document.getElementById('help').showModal()")
        assert (await page.look(PALE))["found"] == []
        assert page.problems == []


async def test_the_keyboard_reaches_everything_in_its_order_and_shows_where_it_is() -> None:
    async with dashboard() as (page, url):
        await page.send("Emulation.setFocusEmulationEnabled", enabled=True)
        await page.open(url)
        await is_live(page)
        await page.until("document.querySelector('#main tbody').rows.length === 2")
        await page.press("Tab")
        assert await page.look("document.activeElement.id") == "skip"
        assert await page.look("document.activeElement.getBoundingClientRect().top >= 0"), "it is seen now"
        await page.press("Enter")
        assert await page.look("document.activeElement.id") == "main"
        await page.look("document.activeElement.blur(); document.getElementById('skip').focus()")
        n = await page.look(f"(window.wanted = {TABBABLE}).length")
        assert n > 25
        assert await page.look("wanted.indexOf(document.activeElement)") == 0
        for expected in range(1, n):
            await page.press("Tab")
            found = await page.look("wanted.indexOf(document.activeElement)")
            assert found == expected, await page.look("document.activeElement.outerHTML.slice(0, 200)")
            ring = await page.look(
                "(({ outlineStyle, outlineWidth }) => [outlineStyle, parseFloat(outlineWidth)])"
                "(getComputedStyle(document.activeElement))"
            )
            assert ring[0] != "none", expected
            assert ring[1] >= 2, expected
        assert page.problems == []


async def test_colours_are_the_systems_until_somebody_chooses() -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(255, 255, 255)", "rgb(20, 24, 29)"
    axis = "getComputedStyle(document.querySelector('#main .plot text.x')).fill"

    async with dashboard() as (page, url):
        await page.screen(1_280, 900, dark=True)
        await page.open(url)
        await is_live(page)
        assert await page.look(ground) == dark
        assert await page.look("document.getElementById('theme-now').textContent") == "auto"
        await page.until("document.querySelectorAll('#main .plot text.x').length > 0")
        assert await page.look(axis) == "rgb(230, 233, 236)"
        await page.screen(1_280, 900)
        await page.until(f"{ground} === '{light}'")
        await page.until(f"{axis} === 'rgb(27, 31, 36)'")
        await page.look("document.activeElement.blur()")
        await page.press("t")
        assert await page.look("document.getElementById('theme-now').textContent") == "light"
        await page.screen(1_280, 900, dark=True)
        await page.until("matchMedia('(prefers-color-scheme: dark)').matches")
        assert await page.look(ground) == light
        await page.open(url + "?again")
        await is_live(page)
        assert await page.look(ground) == light, "the choice is kept"
        assert page.problems == []


async def test_on_a_phone_nothing_makes_the_page_wider_than_it_is() -> None:
    """WCAG 2.2, 1.4.10: at 320 pixels only tables scroll, in boxes of their own."""
    tally = a_tally(tenant="a-tenant-whose-name-is-longer-than-any-phone-is-wide-" + "x" * 200)
    wide, width = "document.scrollingElement.scrollWidth", 320

    async with dashboard(tally) as (page, url):
        under_way(tally)
        await page.screen(width, 700, scale=2)
        await page.open(url)
        await is_live(page)
        for place in PLACES:
            await at(page, place)
            assert await page.look(wide) <= width, place
        for dialog in ("help", "token-dialog"):
            await page.look(f"document.getElementById('{dialog}').showModal()")
            box = await page.look(
                f"(({{ left, right }}) => [left, right])"
                f"(document.getElementById('{dialog}').getBoundingClientRect())"
            )
            assert 0 <= box[0] < box[1] <= width, dialog
            await page.look(f"document.getElementById('{dialog}').close()")
        assert page.problems == []
