"""The page and its parts as they are served: by whole names, with a policy, and nothing from elsewhere."""

import re
from importlib.resources import files

import pytest

from llmtap.meter.admin.server import ASSETS
from tests.meter.admin.serving import admin_port
from tests.support.servers.raw_client import RawClient, request

OWN = {part.name: part for part in (files("llmtap.meter.admin") / "static").iterdir()}
OWN |= {name: files("llmtap.report") / name for name in ("plot.css", "plot.js")}
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


async def test_every_file_is_served_as_what_it_is() -> None:
    async with admin_port() as (_, client):
        for name in OWN:
            path = "/" if name == "index.html" else f"/assets/{name}"
            async with client.get(path) as answer:
                assert (answer.status, answer.content_type) == (200, TYPES[name.rpartition(".")[2]]), name
                assert await answer.read() == OWN[name].read_bytes()
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'self'" in policy
                assert "frame-ancestors 'none'" in policy
                assert "unsafe" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert set(OWN) - {"index.html"} == set(ASSETS) - {"metrics.js"}
        async with client.get("/assets/metrics.js") as answer:
            assert answer.content_type == "text/javascript"
            assert b'{"name":"ttft","title":"TTFT","unit":"s","streams":true}' in await answer.read()


@pytest.mark.parametrize("path", ["/", "/assets/app.js", "/assets/plot.js"])
async def test_what_a_browser_has_already_is_not_sent_again(path: str) -> None:
    async with admin_port() as (_, client):
        async with client.get(path) as answer:
            etag = answer.headers["ETag"]
            assert answer.headers["Cache-Control"] == "no-cache"
        for known in (etag, f'"other", {etag}', "*"):
            async with client.get(path, headers={"If-None-Match": known}) as answer:
                assert (answer.status, await answer.read()) == (304, b"")
                assert answer.headers["ETag"] == etag
                assert "Content-Security-Policy" in answer.headers
        async with client.get(path, headers={"If-None-Match": '"other"'}) as answer:
            assert answer.status == 200
        async with client.head(path) as answer:
            assert (answer.status, await answer.read()) == (200, b"")


async def test_page_and_parts_need_no_token_and_all_else_does() -> None:
    async with admin_port(token="s3cret") as (_, client):
        for path in ("/", *(f"/assets/{name}" for name in sorted(ASSETS))):
            async with client.get(path) as answer:
                assert answer.status == 200, path
        for path in (
            "/api/v1/summary",
            "/api/v1/streams",
            "/api/v1/live",
            "/metrics",
            "/assets/",
            "/assets",
            "/assets/other.js",
            "/index.html",
            "/assets/index.html",
        ):
            async with client.get(path, allow_redirects=False) as answer:
                assert answer.status == 401, path


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../api/v1/summary",
        "/assets/..%2fapi/v1/summary",
        "/assets/%2e%2e/api/v1/summary",
        "/assets/..%2f..%2fpage.py",
        "/assets/%2e%2e/%2e%2e/page.py",
        "/assets//etc/passwd",
        "/assets/%2fetc%2fpasswd",
        "/assets/app.js/../../../api/v1/summary",
        "/assets/app.js%00",
        "/assets/app.js/",
        "/assets/./app.js/x",
        "/api/v1/summary?/assets/app.js",
        "/api/v1/summary#/assets/app.js",
        "/api/v1/summary;/assets/app.js",
        "/assets\\..\\api\\v1\\summary",
    ],
)
async def test_no_spelling_of_a_path_comes_past_the_token(path: str) -> None:
    async with admin_port(token="s3cret") as (_, client):
        port = client.port
        assert port is not None
        raw = await RawClient.connect(port)
        answer = await raw.ask(request("GET", path, "Connection: close", host="localhost"))
        raw.close()
        # Never anything of the API or of the file system; at most a part of the page, by a longer name.
        assert answer.status in (400, 401, 404), answer.status
        assert b'"metrics"' not in answer.data
        assert b"import" not in answer.data


def test_nothing_comes_from_elsewhere() -> None:
    allowed = {
        "http://www.w3.org/2000/svg",
        "http://127.0.0.1:8000",
    }
    for name in OWN:
        text = OWN[name].read_text(encoding="utf-8")
        found = set(re.findall(r"\b(?:https?|wss?)://[^\s'\"<>)`]*", text))
        assert found <= allowed, name
        assert not re.search(r"""(?:src|href)=["']//""", text), name


def test_what_traffic_says_never_becomes_markup() -> None:
    for name in OWN:
        text = OWN[name].read_text(encoding="utf-8")
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "createContextualFragment",
            "DOMParser",
            "srcdoc",
        ):
            assert way not in text, f"{name} has {way}"
    index = OWN["index.html"].read_text(encoding="utf-8")
    assert not re.search(r"\son\w+=|\sstyle=|<style", index)
    assert all(script == "" for script in re.findall(r"<script[^>]*>(.*?)</script>", index, re.S))
