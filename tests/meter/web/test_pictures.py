"""Make the pictures in docs/images: `pytest tests/meter/web/test_pictures.py --screenshots docs/images`."""

import asyncio
import re
import struct
from pathlib import Path

import pytest

from tests.meter.web.pictures import LOOKS, PICTURES, make
from tests.support.browser import CHROMIUM

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    page
    for folder in ("", "docs/**/", "benchmarks/**/", "deploy/**/", "e2e/", "llmtap/**/")
    for page in ROOT.glob(f"{folder}*.md")
    if "build" not in page.parts  # what benchmarks install
)
SHOWN = re.compile(r"!\[[^\]]*\]\(([^)\s]+)|<img[^>]*\ssrc=\"([^\"]+)\"")
PNG = b"\x89PNG\r\n\x1a\n"


def size_of(picture: Path) -> tuple[int, int]:
    """Width and height in pixels, of the header (PNG 11.2.2)."""
    head = picture.read_bytes()[:24]
    assert head.startswith(PNG)
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def pixels(name: str) -> tuple[int, int]:
    """What a picture of this name has to have."""
    look = LOOKS[name.rpartition("-")[2].removesuffix(".png")]
    scale = look.get("scale", 1)
    return round(look["width"] * scale), round(look["height"] * scale)


def test_the_pictures_of_the_docs_are_those_that_are_made_here() -> None:
    there = {picture.name: size_of(picture) for picture in (ROOT / "docs" / "images").glob("*.png")}
    assert there == {name: pixels(name) for name in PICTURES}


def test_pages_show_only_pictures_that_are_there() -> None:
    found = 0
    for page in PAGES:
        for shown in SHOWN.findall(page.read_text(encoding="utf-8")):
            link = (shown[0] or shown[1]).partition("#")[0]
            if re.match(r"[a-z]+:", link):
                continue
            found += 1
            assert (page.parent / link).is_file(), f"{page.relative_to(ROOT)} shows {link}"
    assert found > 0


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_the_pictures_are_made_of_planted_traffic(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """One look, unless the pictures are wanted: `test_access.py` looks at the others."""
    wanted = request.config.getoption("--screenshots")
    looks = ["light"] if wanted is None else list(LOOKS)
    folder = tmp_path if wanted is None else Path(wanted)
    folder.mkdir(parents=True, exist_ok=True)

    async def run() -> dict[str, str]:
        async with asyncio.timeout(240):
            return await make(folder, looks)

    words = asyncio.run(run())
    assert set(words) == {name for name in PICTURES if name.endswith(tuple(f"-{look}.png" for look in looks))}
    for name in words:
        assert size_of(folder / name) == pixels(name)
    for look in looks:
        overview = words[f"overview-{look}.png"]
        # One ends every 0.1 s, also at both ends of the 55 s that are whole; five tenants.
        assert "n 551 · 1m (55 s)" in overview
        for tenant in ("acme", "chat-eu", "chat-us", "beta", "nightly"):
            assert tenant in overview
        assert "36 under way: " in words[f"streams-{look}.png"]
        assert "Every exchange was measured." in words[f"tap-{look}.png"]
        assert "output_guardrail" in words[f"chunking-{look}.png"]
        assert "Sample ratio as configured" in words[f"experiment-{look}.png"]
        assert "waits" in words[f"inspector-{look}.png"]
    # The same is told in any look: nothing of it depends on when it was asked.
    if "dark" in looks:
        for place in {name.rpartition("-")[0] for name in PICTURES} - {"streams"}:
            assert words[f"{place}-light.png"] == words[f"{place}-dark.png"], place
