"""The admin port of a proxy as others reach it: TLS, and a token."""

import asyncio
import ssl
import sys
from pathlib import Path

import pytest
import trustme
from aiohttp import ClientError, ClientSession, TCPConnector

from tests.supervisor.running import CLEAN, until
from tests.support.servers.live_proxy import port_free
from tests.support.servers.peer import scene
from tests.support.servers.upstream import upstream

TOKEN = "a-long-random-token"


@scene
async def test_it_speaks_tls_and_asks_for_the_token(tmp_path: Path) -> None:
    ca = trustme.CA()
    issued = ca.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    for pem in issued.cert_chain_pems:
        pem.write_to_path(tmp_path / "cert.pem", append=True)
    trusting = ssl.create_default_context()
    ca.configure_trust(trusting)
    listen, admin = port_free(), port_free()
    async with upstream() as up:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "llmtap.cli", "proxy", "--upstream", up.url,
            "--listen", f"127.0.0.1:{listen}", "--admin", f"0.0.0.0:{admin}",
            "--set", f"meter.admin_tls_certificate={tmp_path / 'cert.pem'}",
            "--set", f"meter.admin_tls_key={tmp_path / 'key.pem'}",
            env=CLEAN | {"LLMTAP_METER_ADMIN_TOKEN": TOKEN}, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stderr is not None
            said = await asyncio.wait_for(process.stderr.readline(), 60)
            assert f"metrics: https://0.0.0.0:{admin}/metrics".encode() in said
            assert TOKEN.encode() not in said
            url = f"https://127.0.0.1:{admin}"
            async with ClientSession(connector=TCPConnector(ssl=trusting)) as session:

                async def ready() -> bool:
                    try:
                        async with session.get(f"{url}/readyz") as answer:
                            return answer.status == 200
                    except ClientError:
                        return False

                await until(ready)
                async with session.get(f"{url}/metrics") as answer:
                    assert answer.status == 401
                about = {"Authorization": f"Bearer {TOKEN}"}
                async with session.get(f"{url}/metrics", headers=about) as answer:
                    assert answer.status == 200
                    assert "llmtap_" in await answer.text()
            async with ClientSession() as plain:
                with pytest.raises(ClientError):
                    await plain.get(f"http://127.0.0.1:{admin}/readyz")
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 60) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
