from typing import Any

import pytest

from llmtap.errors import ConfigError
from llmtap.top.client import PROXY_HINT, Admin, TopOptions
from llmtap.top.plain import ROWS_MAX, print_once, probe
from llmtap.top.views import Documents
from tests.support.servers.fake_admin import fake_admin, recorded
from tests.support.servers.live_proxy import port_free
from tests.support.traffic.exchanges import streamed


def printed(capsys: pytest.CaptureFixture[str], documents: dict[str, Any], *, terminal: bool = False) -> str:
    print_once("http://tap", Documents(documents["summary"], documents), terminal=terminal)
    return capsys.readouterr().out


def test_a_terminal_cuts_the_lines_and_a_pipe_has_them_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    documents = recorded([streamed(i, tenant=f"t{i % 3}") for i in range(1, 6)])
    cut = printed(capsys, documents, terminal=True)
    assert max(map(len, cut.splitlines())) == 80
    assert "run.0.1-5" not in cut
    assert "run.0.1-5" in printed(capsys, documents)


def test_a_terminal_wraps_a_warning_and_cuts_no_word_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = printed(capsys, recorded(relay=False), terminal=True)
    assert "requests are not measured. Hint: is the proxy running? See its log" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 60


def test_a_name_with_an_emoji_code_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert "team:key:a" in printed(capsys, recorded([streamed(1, tenant="team:key:a")]))


def test_a_long_table_is_cut_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, recorded([streamed(i, tenant=f"t{i:03}") for i in range(1, ROWS_MAX + 4)]))
    assert "... 3 more" in text


async def wrong(url: str) -> ConfigError:
    options = TopOptions(admin=url)
    async with Admin(url) as admin:
        with pytest.raises(ConfigError) as caught:
            await probe(options, admin)
    return caught.value


async def test_what_is_wrong_at_the_start_says_what_to_do() -> None:
    nobody = await wrong(f"http://127.0.0.1:{port_free()}")
    assert (nobody.place, "connection refused" in nobody.problem) == ("--admin", True)
    assert "llmtap proxy --upstream" in (nobody.hint or "")
    async with fake_admin({}) as fake:
        absent = await wrong(fake.url)
        assert (absent.place, absent.hint) == ("--admin", PROXY_HINT)
        fake.body = b"{}"
        assert (await wrong(fake.url)).hint == PROXY_HINT
        fake.body = None
        plain = await wrong(fake.url.replace("http:", "https:"))
        assert "does not speak it" in plain.problem
        assert plain.hint == f"without TLS: --admin {fake.url}"
        fake.status = 401
        denied = await wrong(fake.url)
        assert denied.place == "--token-env"
        assert "$LLMTAP_ADMIN_TOKEN" in (denied.hint or "")
