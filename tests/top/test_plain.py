from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from llmtap.errors import ConfigError
from llmtap.top.client import Admin, TopOptions
from llmtap.top.plain import ROWS_MAX, probe, render_once
from tests.support.servers.fake_admin import fake_admin, recorded
from tests.support.servers.live_proxy import port_free
from tests.support.servers.peer import scene
from tests.support.traffic.exchanges import streamed


def printed(documents: dict[str, Any], width: int = 240) -> str:
    out = StringIO()
    console = Console(file=out, width=width, highlight=False, no_color=True)
    console.print(render_once({"admin": "http://tap", **documents}, width, whole=True), soft_wrap=True)
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_on_a_narrow_terminal_no_figure_is_cut_and_columns_left_out_are_named(width: int) -> None:
    documents = recorded([streamed(i, tenant=f"t{i % 3}") for i in range(1, 6)])
    out = StringIO()
    console = Console(file=out, width=width, highlight=False, no_color=True)
    console.print(render_once({"admin": "http://tap", **documents}, width))
    text = out.getvalue()
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    assert f"({width} columns have no room for: " in text
    assert "kernel clock, pid 17" in " ".join(text.split()), "a text goes on in the next line"
    whole = printed(documents).split()
    assert "run.0.1-5" in whole
    if width == 80:
        assert "refused, output tok/s; `| cat` shows all)" in " ".join(text.split())


def test_a_long_table_is_cut_and_says_so() -> None:
    text = printed(recorded([streamed(i, tenant=f"t{i:03}") for i in range(1, ROWS_MAX + 4)]))
    assert "... 3 more" in text


async def wrong(url: str) -> ConfigError:
    options = TopOptions(admin=url)
    async with Admin(url) as admin:
        with pytest.raises(ConfigError) as caught:
            await probe(options, admin)
    return caught.value


@scene
async def test_what_is_wrong_at_the_start_says_what_to_do() -> None:
    nobody = await wrong(f"http://127.0.0.1:{port_free()}")
    assert (nobody.place, "connection refused" in nobody.problem) == ("--admin", True)
    assert "llmtap proxy --upstream" in (nobody.hint or "")
    async with fake_admin({}) as fake:
        assert (await wrong(fake.url)).place == "--admin"
        plain = await wrong(fake.url.replace("http:", "https:"))
        assert "does not speak it" in plain.problem
        assert plain.hint == f"without TLS: --admin {fake.url}"
        fake.status = 401
        denied = await wrong(fake.url)
        assert denied.place == "--token-env"
        assert "$LLMTAP_ADMIN_TOKEN" in (denied.hint or "")
