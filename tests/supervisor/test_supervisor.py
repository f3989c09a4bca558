"""The proxy as its users start it: a process with children, signals, and somebody who kills them."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.support.servers.live_proxy import port_free
from tests.support.servers.peer import Ending, Gone, chunk, scene, wait_until
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import Call, Upstream, answers, upstream

READY_S = 60.0
"""A deadline: it costs time only where something is broken."""
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith("LLMTAP_")}


def children_of(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Running, and not just waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Proxy:
    """A running `llmtap proxy`."""

    def __init__(self, process: asyncio.subprocess.Process, listen: int, admin: int) -> None:
        self.process = process
        self.listen = listen
        self.admin = admin

    @property
    def pid(self) -> int:
        return self.process.pid

    def relays(self) -> list[int]:
        return [p for p in children_of(self.pid) if "llmtap.vantage.relay" in command_of(p) and is_alive(p)]

    def meters(self) -> list[int]:
        return [p for p in children_of(self.pid) if "llmtap.meter" in command_of(p) and is_alive(p)]

    async def client(self) -> RawClient:
        return await RawClient.connect(self.listen)

    async def get(self, path: str) -> bytes:
        client = await self.client()
        try:
            answer = await client.get(path)
            assert answer.status == 200
            return answer.data
        finally:
            client.close()

    async def told(self, path: str) -> bytes | None:
        """What the admin port says, or None while it does not."""
        try:
            client = await RawClient.connect(self.admin)
        except OSError:
            return None
        try:
            answer = await client.ask(request("GET", path, "Connection: close", host="localhost"))
        except (Gone, ConnectionError):
            return None
        finally:
            client.close()
        return answer.data if answer.status == 200 else None

    async def ready(self) -> None:
        await until(lambda: self.told("/readyz"), READY_S)

    async def refuses(self) -> bool:
        """Nobody is let in any more."""
        try:
            (await self.client()).close()
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:  # it was in the queue of a listener that closed: ask again
            pass
        return False

    async def joined(self) -> bool:
        """The relays that run speak to the meter: what they serve from now on is measured."""
        told = await self.told("/api/v1/summary")
        relays = [] if told is None else json.loads(told)["relays"].values()
        return sum(r["connected"] for r in relays) >= len(self.relays())

    async def connected(self, n: int) -> None:
        """Until so many relays speak to the meter."""

        async def enough() -> bool:
            told = await self.told("/api/v1/summary")
            relays = [] if told is None else json.loads(told)["relays"].values()
            return sum(r["connected"] and "opened" in r for r in relays) >= n

        await until(enough, READY_S)

    async def measured(self, n: int) -> None:
        """Until the meter has seen `n` exchanges."""

        async def enough() -> bool:
            told = await self.told("/api/v1/summary?window=all")
            return told is not None and json.loads(told)["n"] >= n

        await until(enough, READY_S)

    async def ended(self, seconds: float = READY_S) -> int:
        return await asyncio.wait_for(self.process.wait(), seconds)


async def until(true: object, seconds: float) -> None:
    """As wait_until, for a coroutine function."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not await true():  # type: ignore[operator]
        assert loop.time() < end, f"still not so after {seconds} s"
        await asyncio.sleep(0.05)


@asynccontextmanager
async def proxy(
    up: Upstream | None,
    *more: str,
    config: Path | None = None,
    log: Path = Path(os.devnull),
    program: Path = Path(__file__).parents[2],
    listen: int | None = None,
    level: str | None = "warning",
) -> AsyncIterator[Proxy]:
    """A proxy that is ready, and killed at the end. It logs to `log`; its package lies in `program`.

    `listen`: the port, where `config` names it; `level`: of the log, or None, where `config` does.
    """
    admin = port_free()
    args = ["--admin", f"127.0.0.1:{admin}", *more]
    if level is not None:
        args = ["--set", f"log.level={level}", *args]
    if listen is None:
        listen = port_free()
        args += ["--listen", f"127.0.0.1:{listen}"]
    if up is not None:
        args += ["--upstream", up.url]
    if config is not None:
        args += ["--config", str(config)]
    with log.open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "llmtap.cli", "proxy", *args,
            stderr=said, env=CLEAN | {"PYTHONPATH": str(program)}, cwd=program,
        )  # fmt: skip
    running = Proxy(process, listen, admin)
    family: set[int] = set()
    try:
        await running.ready()
        await wait_until(lambda: running.relays() and running.meters(), READY_S)
        await until(running.joined, READY_S)
        family.update(children_of(process.pid))
        yield running
    finally:
        family.update(children_of(process.pid))
        for pid in [process.pid, *family]:
            with contextlib.suppress(ProcessLookupError):
                if pid == process.pid or "llmtap" in command_of(pid):
                    os.kill(pid, signal.SIGKILL)
        await process.wait()


class Slow:
    """A stream of many events over a second or so."""

    def __init__(self, count: int = 60, pause_s: float = 0.02) -> None:
        self._count = count
        self._pause_s = pause_s

    async def __call__(self, call: Call) -> None:
        await call.body()
        await call.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(self._count):
            await call.say(chunk(b"hello"))
            await asyncio.sleep(self._pause_s)
        await call.say(b"0\r\n\r\n")


# ---------------------------------------------------------------- a proxy that lives and dies


@scene
async def test_sigterm_lets_streams_end_and_nobody_in() -> None:
    async with upstream() as up, proxy(up) as tap:
        client = await tap.client()
        await client.send(request("GET", up.on(Slow())))
        await client.head()
        idle = await tap.client()
        relays, meters = tap.relays(), tap.meters()
        os.kill(tap.pid, signal.SIGTERM)
        assert (await idle.to_end())[1] is Ending.FIN
        await until(tap.refuses, READY_S)
        payload = await client.chunked_payload()
        assert payload.data == b"hello" * 60
        assert await tap.ended() == 0
        assert not any(is_alive(p) for p in relays + meters)


@scene
async def test_the_live_feed_tells_where_clients_connect() -> None:
    async with (
        upstream() as up,
        proxy(up) as tap,
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{tap.admin}/api/v1/live") as live,
    ):
        async for line in live.content:
            if line.startswith(b"data: "):
                assert json.loads(line[6:])["listen"] == f"http://127.0.0.1:{tap.listen}"
                return
    pytest.fail("the feed ended")


@scene
async def test_sigterm_twice_means_now() -> None:
    async with upstream() as up, proxy(up, "--set", "relay.drain_timeout=1h") as tap:
        client = await tap.client()
        await client.send(request("GET", up.on(Slow(100_000))))
        await client.head()
        idle = await tap.client()
        assert (await idle.get(up.on(answers()))).status == 200
        os.kill(tap.pid, signal.SIGTERM)
        await idle.to_end()  # the first word has been heard: two at once would be one
        assert tap.process.returncode is None
        os.kill(tap.pid, signal.SIGTERM)
        await tap.ended()


@scene
async def test_a_drain_has_a_limit() -> None:
    async with upstream() as up, proxy(up, "--set", "relay.drain_timeout=300ms") as tap:
        client = await tap.client()
        await client.send(request("GET", up.on(Slow(100_000))))
        await client.head()
        os.kill(tap.pid, signal.SIGTERM)
        assert await tap.ended() == 0
        with pytest.raises(Gone):
            await client.chunked_payload()


@scene
async def test_a_killed_relay_is_started_again_and_its_port_never_refuses() -> None:
    async with upstream() as up, proxy(up) as tap:
        path = up.on(answers(b"here"))
        for _ in range(2):
            (before,) = tap.relays()
            os.kill(before, signal.SIGKILL)
            # Whoever comes in between waits in the kernel's queue.
            assert await asyncio.wait_for(tap.get(path), READY_S) == b"here"
            await wait_until(lambda old=before: tap.relays() and old not in tap.relays(), READY_S)
        assert tap.meters()


# ---------------------------------------------------------------- reload


def config_for(file: Path, url: str, *lines: str) -> None:
    file.write_text("\n".join([f'[relay]\nupstream = "{url}"', *lines]) + "\n")


@scene
async def test_sighup_changes_the_upstream_without_a_failed_request(tmp_path: Path) -> None:
    file = tmp_path / "llmtap.toml"
    async with upstream() as old, upstream() as new:
        path = old.on(answers(b"old"))
        assert new.on(answers(b"new")) == path
        slow = old.on(Slow(80))
        config_for(file, old.url)
        async with proxy(None, config=file) as tap:
            stop = asyncio.Event()
            seen: list[bytes] = []

            async def ask_on_and_on(keep: bool) -> None:
                client = await tap.client()
                while not stop.is_set():
                    try:
                        answer = await client.get(path)
                    except (Gone, ConnectionError):
                        # An idle connection may be closed; a client that keeps them has to live with it.
                        assert keep
                        client.close()
                        client = await tap.client()
                        answer = await client.get(path)
                    assert answer.status == 200, answer.data
                    seen.append(answer.data)
                    if not keep or answer.head.get("connection") == b"close":
                        client.close()
                        client = await tap.client()
                client.close()

            load = [asyncio.ensure_future(ask_on_and_on(i % 2 == 0)) for i in range(6)]
            streaming = await tap.client()
            await streaming.send(request("GET", slow))
            await streaming.head()
            await wait_until(lambda: len(seen) > 50)
            (before,) = tap.relays()
            config_for(file, new.url)
            os.kill(tap.pid, signal.SIGHUP)
            await wait_until(lambda: b"new" in seen, READY_S)
            assert (await streaming.chunked_payload()).data == b"hello" * 80, "the old stream ends in order"
            await wait_until(lambda: before not in tap.relays(), READY_S)
            asked = len(seen)
            await wait_until(lambda: len(seen) > asked + 100)
            stop.set()
            await asyncio.gather(*load)
            assert set(seen) == {b"old", b"new"}
            assert seen[-50:] == [b"new"] * 50


@scene
async def test_sighup_with_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "llmtap.toml"
    async with upstream() as up:
        path = up.on(answers(b"here"))
        config_for(file, up.url)
        async with proxy(None, config=file) as tap:
            before = tap.relays()
            for text in ("[relay]\nupstrem = 'x'\n", "[relay\n", "[relay]\nupstream = 'nonsense'\n"):
                file.write_text(text)
                os.kill(tap.pid, signal.SIGHUP)
                await asyncio.sleep(0.3)
                assert tap.process.returncode is None
                assert tap.relays() == before
                assert await tap.get(path) == b"here"


@scene
async def test_sighup_to_more_workers_and_back(tmp_path: Path) -> None:
    file = tmp_path / "llmtap.toml"
    async with upstream() as up:
        path = up.on(answers(b"here"))
        config_for(file, up.url, "workers = 2")
        async with proxy(None, config=file) as tap:
            for workers in (3, 1):
                before = set(tap.relays())
                config_for(file, up.url, f"workers = {workers}")
                os.kill(tap.pid, signal.SIGHUP)
                await wait_until(
                    lambda n=workers, old=before: len(tap.relays()) == n and not old & set(tap.relays()),
                    READY_S,
                )
                # Each connection may land on any of the listening sockets: all of them must be served.
                for _ in range(20):
                    assert await asyncio.wait_for(tap.get(path), READY_S) == b"here"


@scene
async def test_several_workers_share_the_port() -> None:
    async with upstream() as up, proxy(up, "--workers", "2") as tap:
        await tap.connected(2)
        path = up.on(answers(b"here"))
        for _ in range(30):
            assert await tap.get(path) == b"here"
        await tap.measured(30)
        os.kill(tap.pid, signal.SIGTERM)
        assert await tap.ended() == 0


# ---------------------------------------------------------------- mistakes


async def refused(*args: str, environ: dict[str, str] | None = None) -> str:
    """What `llmtap proxy` says when it will not start; it has to end with 2."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "llmtap.cli", "proxy", *args,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**CLEAN, **(environ or {})}, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), READY_S)
    assert process.returncode == 2, err.decode()
    assert out == b""
    assert b"Traceback" not in err, err.decode()
    return err.decode()


@scene
async def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        free = f"127.0.0.1:{port_free()}"
        for workers in ("1", "2"):
            ask = [
                "--upstream",
                "http://127.0.0.1:1",
                "--listen",
                address,
                "--admin",
                free,
                "--workers",
                workers,
            ]
            told = await refused(*ask)
            assert "relay.listen" in told
            assert address in told
        told = await refused("--upstream", "http://127.0.0.1:1", "--listen", free, "--admin", address)
        assert "meter.admin" in told


@scene
async def test_mistakes_are_named_with_a_hint(tmp_path: Path) -> None:
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"[relay]\nupstream = 'http://caf\xe9'\n")
    cases: list[tuple[list[str], str, str]] = [
        ([], "relay.upstream", "hint:"),
        (["--upstream", "http://x", "--set", "nonsense"], "--set", "KEY=VALUE"),
        (["--upstream", "http://x", "--listen", "8080"], "relay.listen", "HOST:PORT"),
        (["--config", str(latin)], "latin.toml", "TOML"),
    ]
    told = await asyncio.gather(*(refused(*args) for args, _, _ in cases), return_exceptions=True)
    for said, (args, place, hint) in zip(told, cases, strict=True):
        if isinstance(said, BaseException):
            raise said
        assert place in said, (args, said)
        assert hint in said, (args, said)
    said = await refused("--upstream", "http://x", environ={"LLMTAP_RELAY_WORKERS": "x"})
    assert "LLMTAP_RELAY_WORKERS" in said


@scene
async def test_check_starts_nothing() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "llmtap.cli", "proxy", "--upstream", "http://127.0.0.1:1", "--check",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=CLEAN,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), READY_S)
    assert (process.returncode, out[:4], err) == (0, b"ok (", b"")
