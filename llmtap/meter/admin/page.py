"""Serve the dashboard at `/` and its files at `/assets/NAME`, with ETags.

plotly.js comes from the package `plotly` (4.8 MB), and is read and compressed at the first request. The
content security policy lets the page load nothing from other hosts and be in no frame.
"""

import asyncio
import gzip
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from aiohttp import hdrs, web

INDEX: Final = "index.html"
PLOTLY: Final = "plotly.js"
_TYPES: Final = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_STATIC: Final = files("llmtap.meter.admin") / "static"

ASSETS: Final[dict[str, str]] = {
    PLOTLY: _TYPES[".js"],
    **{
        part.name: _TYPES[Path(part.name).suffix]
        for part in sorted(_STATIC.iterdir(), key=lambda part: part.name)
        if Path(part.name).suffix in _TYPES
    },
}
PATHS: Final = frozenset({"/", *(f"/assets/{name}" for name in ASSETS)})

POLICY: Final = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",  # for browsers that do not know frame-ancestors
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    hdrs.CACHE_CONTROL: "no-cache",
    hdrs.VARY: hdrs.ACCEPT_ENCODING,
}


@dataclass(frozen=True, slots=True)
class _Part:
    content_type: str
    etag: str
    zipped: bytes

    @classmethod
    def of(cls, content: bytes, content_type: str) -> "_Part":
        # mtime: the same file is the same bytes. Level 6 makes 1.5 of plotly's 4.8 MB.
        return cls(content_type, sha256(content).hexdigest()[:32], gzip.compress(content, 6, mtime=0))

    def answer(self, request: web.Request) -> web.Response:
        # Weak, as RFC 9110 8.8.1 wants it: the same for both codings.
        headers = {**HEADERS, hdrs.ETAG: f'W/"{self.etag}"'}
        known = request.if_none_match or ()
        if any(tag.value in (self.etag, "*") for tag in known):
            return web.Response(status=304, headers=headers)
        if "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, ""):
            headers[hdrs.CONTENT_ENCODING] = "gzip"
            body = self.zipped
        else:
            body = gzip.decompress(self.zipped)
        return web.Response(body=body, headers=headers, content_type=self.content_type, charset="utf-8")


def add_dashboard(app: web.Application) -> None:
    page = _Part.of((_STATIC / INDEX).read_bytes(), "text/html")
    parts = {
        name: _Part.of((_STATIC / name).read_bytes(), kind) for name, kind in ASSETS.items() if name != PLOTLY
    }

    async def index(request: web.Request) -> web.Response:
        return page.answer(request)

    async def asset(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name == PLOTLY:
            return (await asyncio.to_thread(_plotly)).answer(request)
        if name not in parts:
            raise web.HTTPNotFound(reason="the page has no such part")
        return parts[name].answer(request)

    app.router.add_get("/", index)
    app.router.add_get("/assets/{name}", asset)


@cache
def _plotly() -> _Part:
    # Found, not imported: only the file is needed, and plotly is a core dependency.
    spec = find_spec("plotly")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "package_data" / "plotly.min.js"
    return _Part.of(path.read_bytes(), ASSETS[PLOTLY])
