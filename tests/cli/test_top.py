"""`llmtap top` as one types it: in front of a real tap, and of nobody."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp

from llmtap.metrics.phases import PHASES
from llmtap.sim.server.options import SimOptions
from llmtap.units import Duration
from tests.support.servers.fake_admin import fake_admin, recorded
from tests.support.servers.live_proxy import live_proxy
from tests.support.servers.sim_engine import engine
from tests.support.traffic.exchanges import streamed

CLI = [sys.executable, "-P", "-m", "llmtap.cli"]
MS = 1_000_000
ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("LLMTAP_")}


async def top(*args: str, **environ: str) -> tuple[int | None, str, str]:
    return await call("top", *args, **environ)


async def call(*args: str, **environ: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *CLI,
        *args,
        env={**ENVIRON, **environ},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(200):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_once_of_a_real_tap_has_exchanges_and_streams_under_way() -> None:
    """Two streams are over, and one goes on while it is looked at."""
    body = {"model": "sim", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    slow = {"x-sim-itl": "200ms", "x-llm-d-inference-fairness-id": "patient"}

    options = SimOptions(ttft=Duration(5 * MS), itl=Duration(1 * MS), tokens=5)
    async with engine(options) as e, live_proxy(e.url) as proxy:
        url = f"http://127.0.0.1:{proxy.listen}/v1/chat/completions"
        for _ in range(2):
            async with e.session.post(url, json=body) as response:
                assert response.status == 200
                await response.read()
        await proxy.measured(2)
        timeout = aiohttp.ClientTimeout(total=None)
        async with e.session.post(
            url,
            json={**body, "max_tokens": 2_000},
            headers={**slow, "x-sim-tokens": "2000"},
            timeout=timeout,
        ) as response:
            await response.content.readany()
            await response.content.readany()
            admin = f"http://127.0.0.1:{proxy.admin}"
            code, out, err = await top("--admin", admin, "--once", "--json", "--window", "all")
            assert (code, err) == (0, "")
            told: dict[str, Any] = json.loads(out)
            code, text, err = await top("--admin", admin)
            assert (code, err) == (0, "")
        assert told["summary"]["n"] == 2
        assert [x["outcome"] for x in told["exchanges"]["exchanges"]] == ["complete"] * 2
        assert told["experiment"]["state"] == "none"
        [stream] = told["streams"]["streams"]
        assert (stream["tenant"], stream["model"], stream["stream"]) == ("patient", "sim", True)
        assert stream["timeline"]
        assert "n 2" in text
        assert "patient" in text
        assert "1 stream under way" in text


async def test_a_token_is_taken_from_the_environment_or_a_file_and_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file")

    async with fake_admin(recorded()) as fake:
        fake.status = 401
        code, _, err = await top("--admin", fake.url, "--once")
        assert code == 2
        assert "--token-env" in err
        assert "$LLMTAP_ADMIN_TOKEN" in err
        fake.status = None
        for args, environ, token in (
            ((), {"LLMTAP_ADMIN_TOKEN": "usual"}, "usual"),
            (("--token-env", "MINE"), {"MINE": "mine"}, "mine"),
            (("--token-file", str(file)), {}, "from-file"),
        ):
            fake.headers.clear()
            code, _, err = await top("--admin", fake.url, "--once", *args, **environ)
            assert code == 0, err
            assert {h["Authorization"] for h in fake.headers} == {f"Bearer {token}"}


def test_without_textual_once_works_and_the_screen_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['textual'] = None\n"
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'textual' else find(name, *a)\n"
        "from llmtap.cli import tap\n"
        "from llmtap.errors import ConfigError\n"
        "from llmtap.top.client import TopOptions\n"
        "import llmtap.top.plain\n"
        "try: tap._run_view(TopOptions())\n"
        "except ConfigError as exc: print(exc)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=200)
    assert "'.[top]'" in done.stdout, done.stderr


async def test_an_exchange_is_explained_by_its_id() -> None:
    documents = recorded([streamed(1), streamed(2)])
    async with fake_admin(documents) as fake:
        where = ("--admin", fake.url)
        code, out, err = await call("inspect", "run.0.1-2", *where)
        assert (code, err) == (0, "")
        assert "run.0.1-2: complete" in out
        assert all(phase.title in out for phase in PHASES)
        assert "The longest part is 'response head': 89.0 of 100 ms" in out
        code, out, err = await call("inspect", "run.0.1-2", *where, "--json")
        document = json.loads(out)
        assert (code, document["exchange"]["id"], document["first_token"]["n"]) == (0, "run.0.1-2", 2)
        fake.documents["exchanges"] = {"exchanges": [document["exchange"]] * 2, "next": None}
        code, out, err = await call("inspect", "my-request", *where)
        assert (code, "run.0.1-2: complete" in out) == (0, True)
        assert "several exchanges have the request_id my-request; the newest is shown" in err
        fake.documents["exchanges"] = {"exchanges": [], "next": None}
        code, out, err = await call("inspect", "nobody", *where)
        assert (code, out) == (2, "")
        assert "keeps no exchange with this id" in err
