"""Client of the admin API, the options of `llmtap top`, and what is shown while nobody answers."""

import asyncio
import ssl
from pathlib import Path

import pytest
import trustme

from llmtap.clock import ManualClock
from llmtap.errors import ConfigError
from llmtap.top.client import RETRY_NS, Admin, Denied, Feed, FeedLink, TopOptions, Trouble, read_token
from llmtap.top.views import VIEWS, Document
from tests.support.servers.fake_admin import FakeAdmin, fake_admin, recorded
from tests.support.traffic.exchanges import streamed


async def test_a_document_is_asked_for_with_the_token_in_a_header() -> None:
    async with fake_admin(recorded()) as fake, Admin(fake.url, "sesame") as admin:
        summary = await admin.get("summary", window="5m", by="none")
        assert summary["n"] == 0
        assert fake.asked == [("summary", {"window": "5m", "by": "none"})]
        assert fake.headers[0]["Authorization"] == "Bearer sesame"
        assert fake.headers[0]["User-Agent"].startswith("llmtap-top/")


async def refused(fake: FakeAdmin, token: str | None = None) -> Trouble:
    async with Admin(fake.url, token) as admin:
        with pytest.raises(Trouble) as caught:
            await admin.get("summary")
        return caught.value


async def test_each_refusal_says_what_it_is() -> None:
    async with fake_admin(recorded()) as fake:
        fake.status = 401
        assert (str(await refused(fake)), str(await refused(fake, "t"))) == (
            "a token is required",
            "the token is wrong",
        )
        assert isinstance(await refused(fake), Denied)
        fake.status = 404
        assert "does not exist" in str(await refused(fake))
        fake.status = 503
        assert str(await refused(fake)) == "the server answered status 503: said so"
        fake.status, fake.body = 302, b"elsewhere"
        assert str(await refused(fake, "t")) == "the server answered status 302"


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"\xff", b'{"a": ' * 100_000])
async def test_what_is_no_json_object_is_no_admin_port(body: bytes) -> None:
    async with fake_admin(recorded()) as fake:
        fake.body = body
        assert "not an admin port" in str(await refused(fake))


async def test_https_is_verified_by_the_ca_that_was_named(tmp_path: Path) -> None:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)

    fake = FakeAdmin(recorded())
    await fake.start(context)
    url = f"https://127.0.0.1:{fake.port}"
    try:
        options = TopOptions(admin=url, token="sesame", ca=str(tmp_path / "ca.pem"))
        assert not options.is_unencrypted()
        async with Admin(options.url, options.token, options.tls()) as admin:
            assert (await admin.get("summary"))["n"] == 0
        async with Admin(url) as stranger:
            with pytest.raises(Trouble, match="TLS: certificate not trusted"):
                await stranger.get("summary")
    finally:
        await fake.stop()


@pytest.mark.parametrize(
    ("result", "place"),
    [
        ({"admin": "127.0.0.1:9464"}, "--admin"),
        ({"admin": "http://[::1"}, "--admin"),
        ({"admin": "http://user:secret@host"}, "--admin"),
        ({"admin": "http://host/?token=secret"}, "--admin"),
        ({"interval": "1ms"}, "--interval"),
        ({"ca": "/no/such/file"}, "--ca"),
    ],
)
def test_what_cannot_be_is_named_and_no_secret_told(result: dict[str, str], place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TopOptions(**result)  # type: ignore[arg-type]
    assert caught.value.place == place
    assert "secret" not in str(caught.value)


def test_the_token_is_the_variables_or_the_files(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    environ = {"LLMTAP_ADMIN_TOKEN": " usual ", "OTHER": "other"}
    assert read_token({}) is None
    assert read_token(environ) == "usual"
    assert read_token(environ, name="OTHER") == "other"
    assert read_token(environ, name="OTHER", file=file) == "from-file"


def test_a_token_that_is_none_is_refused_without_telling_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"two\nlines")
    for environ, name, path, place in (
        ({}, "MINE", None, "--token-env"),
        ({"LLMTAP_ADMIN_TOKEN": "sécret"}, None, None, "--token-env"),
        ({}, None, file, "--token-file"),
        ({}, None, tmp_path / "none", "--token-file"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_token(environ, name=name, file=path)
        assert caught.value.place == place
        assert "cret" not in str(caught.value)
        assert "lines" not in caught.value.problem


async def test_an_answer_without_end_is_given_up() -> None:
    from llmtap.top import client

    async with fake_admin(recorded()) as fake:
        before, client.DOCUMENT_BYTES_MAX = client.DOCUMENT_BYTES_MAX, 1_000  # type: ignore[misc]
        try:
            fake.body = b'{"a": "' + b"x" * 2_000 + b'"}'
            assert "longer than" in str(await refused(fake))
        finally:
            client.DOCUMENT_BYTES_MAX = before  # type: ignore[misc]


S = 1_000_000_000
BY_NAME = {view.name: view for view in VIEWS}


async def test_a_view_asks_for_what_it_shows_and_no_more() -> None:
    async with fake_admin(recorded([streamed()])) as fake, Admin(fake.url) as admin:
        feed = Feed(admin, ManualClock(), window="5m", interval_ns=S)
        wanted = {}
        for name, view in BY_NAME.items():
            fake.asked.clear()
            await feed.poll(view)
            assert fake.asked[0][0] == "summary"
            assert fake.asked[0][1]["window"] == "5m"
            wanted[name] = (fake.asked[0][1]["by"], *(path for path, _ in fake.asked[1:]))
        assert wanted == {
            "tenants": ("tenant",),
            "models": ("model",),
            "arms": ("arm", "experiment"),
            "streams": ("none", "streams"),
            "exchanges": ("none", "exchanges"),
            "refusals": ("tenant",),
            "tap": ("none",),
            "slo": ("none",),
            "silences": ("none", "silences"),
        }
        assert feed.link is FeedLink.LIVE


async def test_tries_grow_rarer_and_figures_stay() -> None:
    clock = ManualClock(now_ns=S)
    async with fake_admin(recorded([streamed()])) as fake, Admin(fake.url) as admin:
        feed = Feed(admin, clock, window="1m", interval_ns=S)
        assert (feed.link, feed.status()) == (FeedLink.CONNECTING, "CONNECTING")
        await feed.poll(VIEWS[0])
        assert feed.status().startswith("LIVE ")
        fake.status = 503
        pauses = []
        for _ in range(len(RETRY_NS) + 2):
            await feed.poll(VIEWS[0])
            before = clock.now_ns
            text = feed.status()
            assert text.startswith("DISCONNECTED ")
            assert "the server answered status 503: said so" in text
            assert "figures of " in text
            pauses.append(int(text.split("again in ")[1].split(" s")[0]) * S)
            clock.advance(pauses[-1])
            assert clock.now_ns - before == pauses[-1]
        assert pauses == [*RETRY_NS, RETRY_NS[-1], RETRY_NS[-1]]
        assert feed.status().startswith(f"DISCONNECTED {sum(pauses) // S} s")
        assert feed.documents.summary["n"] == 1
        fake.status = None
        await feed.poll(VIEWS[0])
        assert feed.link is FeedLink.LIVE


async def test_figures_that_nobody_renewed_are_stale() -> None:
    clock = ManualClock(now_ns=S)
    async with fake_admin(recorded([streamed()])) as fake, Admin(fake.url) as admin:
        feed = Feed(admin, clock, window="1m", interval_ns=2 * S)
        await feed.poll(VIEWS[0])
        clock.advance(6 * S)
        assert feed.link is FeedLink.LIVE
        clock.advance(1)
        assert feed.link is FeedLink.STALE
        assert feed.status().startswith("STALE: no answer for 6 s")
        feed.is_paused = True
        assert feed.link is FeedLink.PAUSED
        fake.status = 503
        await feed.poll(VIEWS[0])
        assert feed.status().startswith("PAUSED; the latest request failed: the server answered status 503")


class PagedAdmin:
    """Answers with these pages, one after the other."""

    def __init__(self, *pages: Document) -> None:
        self.pages = list(pages)
        self.asked: list[str | None] = []

    async def get(self, path: str, **query: str) -> Document:
        self.asked.append(query.get("next"))
        return self.pages.pop(0)


def page(start: int, events: list[int], cursor: str | None) -> Document:
    return {"exchanges": [{"id": "a", "events": events, "events_start": start}], "next": cursor}


def test_all_pages_of_an_exchange_are_read_and_none_of_another() -> None:
    admin = PagedAdmin(page(0, [1, 2], "7.2"), page(2, [3], "7.3"), page(3, [4], "7"), page(0, [9], None))
    feed = Feed(admin, ManualClock(), window="1m", interval_ns=S)  # type: ignore[arg-type]
    assert (asyncio.run(feed.exchange("a")) or {})["events"] == [1, 2, 3, 4]
    assert admin.asked == [None, "7.2", "7.3", "7"]
