"""The documentation as a site: it builds without a warning, and fetches nothing from anywhere."""

import asyncio
import functools
import http.server
import importlib.util
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from tests.support.browser import CHROMIUM, browser

ROOT = Path(__file__).parents[2]
NAVIGATION = re.compile(r"[\w/-]+\.md")
LOADED = "location.href === '%s' && document.readyState === 'complete' && document.querySelector('article')"
CUT = "[...document.images].filter(one => one.getBoundingClientRect().right > innerWidth).map(one => one.src)"
BROKEN = "[...document.images].filter(one => one.complete && !one.naturalWidth).map(one => one.src)"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None,
    reason="mkdocs comes with `make docs`",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        timeout=250,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return folder


def test_every_page_of_the_navigation_is_there(site: Path) -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    names = NAVIGATION.findall(json.dumps(navigation))
    assert len(names) >= 10
    for name in names:
        assert (site / name).with_suffix(".html").exists(), name
    assert json.loads((site / "reference" / "openapi.json").read_text())["openapi"] == "3.1.0"


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*?\bsrc=[\"']?([^\"'\s>]+)", text)
        loaded += re.findall(r"<link\b[^>]*?\bhref=[\"']?([^\"'\s>]+)", text)
        assert [url for url in loaded if re.match(r"(\w+:)?//", url)] == [], page.name
        assert 'class="mermaid"' not in text, "a diagram that a script of elsewhere would draw"
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text()), style.name


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_a_browser_shows_pages_whole_and_asks_nobody_else(site: Path) -> None:
    asyncio.run(look(site))


async def look(site: Path) -> None:
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}/"
            async with browser() as chromium:
                page = await chromium.page()
                for name in ("index.html", "concepts.html", "reference/options.html"):
                    await page.open(url + name)
                    await page.until(LOADED % (url + name))
                    assert await page.look(BROKEN) == [], name
                for dark, scheme in ((False, "default"), (True, "slate")):
                    await page.screen(375, 800, dark=dark)
                    await page.open(f"{url}concepts.html?{scheme}")
                    await page.until(f"document.body.getAttribute('data-md-color-scheme') === '{scheme}'")
                    assert await page.look(CUT) == [], "pictures that a phone cuts"
                assert [one for one in page.requests if not one.startswith((url, "data:", "about:"))] == []
                assert page.problems == []
        finally:
            server.shutdown()
            thread.join()
