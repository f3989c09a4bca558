"""Listening sockets: their own, from systemd, and the admin port with its rules, its token and TLS."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from msgspec import structs

from llmtap.config import Settings, load_settings
from llmtap.errors import ConfigError
from llmtap.net.listener import bind, name_of
from llmtap.supervisor import ports as systemd
from llmtap.supervisor.ports import Ports, notify, take_sockets
from tests.supervisor.running import (
    CLEAN,
    LONG_S,
    READY_S,
    ROOT,
    STARTER,
    Proxy,
    gone,
    restarted,
)
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import answers, upstream

OPEN = "0.0.0.0:9464"
TOKEN = {"meter.admin_token": "a" * 48, "meter.admin_plaintext": "true"}


@pytest.mark.parametrize("handed", [False, True])
def test_a_port_for_everybody_is_not_served_without_a_token_because_the_settings_name_another(
    monkeypatch: pytest.MonkeyPatch, handed: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as admin:
        monkeypatch.setattr("llmtap.supervisor.ports.name_of", lambda sock: OPEN)
        ports = Ports([], admin, None, None if handed else OPEN)
        with pytest.raises(ConfigError, match=r"meter\.admin_token"):
            ports.check_admin(load_settings(None, {}, {"meter.admin": "127.0.0.1:9464"}))
        ports.check_admin(load_settings(None, {}, {"meter.admin": "127.0.0.1:9464"} | TOKEN))


def test_a_second_proxy_does_not_share_the_port_of_the_first() -> None:
    with bind("127.0.0.1", 0, shared=True) as first:
        listen = f"127.0.0.1:{first.getsockname()[1]}"
        for workers in (1, 2):
            settings = load_settings(
                None, {}, {"relay.listen": listen, "relay.workers": workers, "meter.admin": "127.0.0.1:0"}
            )
            with pytest.raises(ConfigError, match=r"relay\.listen"):
                Ports.open(settings, {}, os.getpid())


def test_the_sockets_behind_a_gateway_are_opened_handed_over_moved_and_closed() -> None:
    def settings(**pair: object) -> Settings:
        flags = {"relay.listen": "127.0.0.1:0", "meter.admin": "127.0.0.1:0", "pair.listen": "127.0.0.1:0"}
        return load_settings(None, {}, {**flags, **{f"pair.{key}": value for key, value in pair.items()}})

    paired = settings(upstream="http://engine", workers=2)
    first = Ports.open(paired, {}, os.getpid())
    assert [len(first.sockets_of(index, 1)) for index in range(3)] == [1, 1, 1]
    handed = first.to_state()
    ports = Ports.take(
        structs.replace(
            handed,
            clients=[os.dup(fd) for fd in handed.clients],
            admin=os.dup(handed.admin),
            back=[os.dup(fd) for fd in handed.back],
        )
    )
    assert [name_of(sock) for sock in ports.back] == [name_of(sock) for sock in first.back]
    before = ports.copy()
    ports.move_clients(paired)
    assert ports.back == before.back, "nothing has changed"
    ports.move_clients(settings(upstream="http://engine", listen="localhost:0"))
    assert [name_of(sock) in map(name_of, before.back) for sock in ports.back] == [False]
    before.close_except(ports)
    assert [sock.fileno() for sock in before.back] == [-1, -1]
    ports.move_clients(settings())
    assert ports.back == []
    with pytest.raises(OSError, match="no socket for relay 1"):
        ports.sockets_of(1, 1)
    for one in (first, ports):
        one.close()


def environ(count: int, names: str = "", pid: int | None = None) -> dict[str, str]:
    found = {"LISTEN_PID": str(os.getpid() if pid is None else pid), "LISTEN_FDS": str(count), "HOME": "/x"}
    return found | ({"LISTEN_FDNAMES": names} if names else {})


@pytest.mark.parametrize(
    "result", [{}, {"LISTEN_FDS": "1"}, environ(1, pid=1), environ(1) | {"LISTEN_FDS": "many"}]
)
def test_what_is_not_meant_for_us_is_left_alone(result: dict[str, str]) -> None:
    result = dict(result)
    assert take_sockets(result, os.getpid()) == ([], None)
    assert not {name for name in result if name.startswith("LISTEN_")}, "nor is it for a child of ours"


FIRST = 700
"""Descriptors as from 3 on, without touching those of this process."""


@pytest.mark.parametrize(
    ("names", "clients", "admin"),
    [
        ("", [0, 1], None),
        ("listen:admin", [0], 1),
        ("admin:listen", [1], 0),
        ("a:b", [0, 1], None),
        ("admin", [1], 0),
        ("admin:admin", None, None),
    ],
)
def test_a_socket_goes_where_its_name_says(
    monkeypatch: pytest.MonkeyPatch, names: str, clients: list[int] | None, admin: int | None
) -> None:
    monkeypatch.setattr(systemd, "_FIRST_FD", FIRST)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        addresses = [sock.getsockname() for sock in (one, two)]
        for i, sock in enumerate((one, two)):
            os.dup2(sock.fileno(), FIRST + i)
        result = environ(2, names)
        if clients is None:
            with pytest.raises(ConfigError, match="LISTEN_FDNAMES"):
                take_sockets(result, os.getpid())
            return
        handed = take_sockets(result, os.getpid())
        assert result == {"HOME": "/x"}
        assert [sock.getsockname() for sock in handed.clients] == [addresses[i] for i in clients]
        assert (handed.admin and handed.admin.getsockname()) == (None if admin is None else addresses[admin])
        for sock in [*handed.clients, *([handed.admin] if handed.admin else [])]:
            assert (sock.getblocking(), sock.get_inheritable()) == (False, False)
            sock.close()


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("quiet", "not a listening TCP socket"),
        ("unix", "not a listening TCP socket"),
        ("pipe", r"700 \(listen\) is not a socket"),
    ],
)
def test_what_does_not_listen_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, problem: str
) -> None:
    monkeypatch.setattr(systemd, "_FIRST_FD", FIRST)
    with socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET) as sock:
        if kind == "unix":
            sock.bind(str(tmp_path / "s"))
            sock.listen()
        read, write = os.pipe()
        os.dup2(read if kind == "pipe" else sock.fileno(), FIRST)
        with pytest.raises(ConfigError, match=problem):
            take_sockets(environ(1, "listen"), os.getpid())
    for fd in (read, write, FIRST):
        os.close(fd)


@pytest.mark.parametrize("abstract", [False, True])
def test_who_watches_is_told(tmp_path: Path, abstract: bool) -> None:
    address = f"@llmtap-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as watcher:
        watcher.bind("\0" + address[1:] if abstract else address)
        assert notify("READY=1", {"NOTIFY_SOCKET": address})
        assert watcher.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", [None, "", "/nowhere/at/all", "x"])
def test_without_a_watcher_nothing_happens(address: str | None) -> None:
    assert not notify("READY=1", {} if address is None else {"NOTIFY_SOCKET": address})


async def handed(clients: socket.socket, admin: socket.socket, *more: str, **environ: str) -> Proxy:
    """Start a proxy as systemd does, with these two sockets."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        STARTER,
        f"{clients.fileno()},{admin.fileno()}",
        sys.executable,
        "-m",
        "llmtap.cli",
        "proxy",
        *more,
        env=CLEAN | {"LISTEN_FDS": "2", "LISTEN_FDNAMES": "listen:admin", **environ},
        pass_fds=(clients.fileno(), admin.fileno()),
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    return Proxy(process, clients.getsockname()[1], admin.getsockname()[1])


async def test_a_proxy_serves_the_sockets_it_was_handed_and_says_when(tmp_path: Path) -> None:
    """They stay across a hot restart and a second start; connections made in between wait."""
    loop = asyncio.get_running_loop()
    watcher = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    watcher.bind(str(tmp_path / "notify"))
    watcher.setblocking(False)
    clients, admin = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))

    async def result() -> bytes:
        return await asyncio.wait_for(loop.sock_recv(watcher, 500), LONG_S)

    with watcher, clients, admin:
        async with upstream() as up:
            path = up.on(answers(b"hello"))
            for workers in (1, 2):
                waiting = await RawClient.connect(clients.getsockname()[1])
                await waiting.send(request("GET", path))
                args = ("--upstream", up.url, "--workers", str(workers))
                proxy = await handed(clients, admin, *args, NOTIFY_SOCKET=str(tmp_path / "notify"))
                try:
                    assert (await result()).startswith(b"READY=1")
                    await proxy.ready()
                    assert (await waiting.answer()).data == b"hello"
                    waiting.close()
                    assert len(proxy.relays()) == workers
                    if workers == 1:
                        before = proxy.relays()
                        os.kill(proxy.pid, signal.SIGUSR2)
                        text = (await result()).split(b"\n")
                        assert text[0] == b"RELOADING=1"
                        assert text[1].startswith(b"MONOTONIC_USEC=")
                        assert (await result()).startswith(b"READY=1")
                        await restarted(proxy, before)
                        await gone(before)
                    assert await proxy.get(path) == b"hello"
                    proxy.process.terminate()
                    assert await result() == b"STOPPING=1"
                    assert await proxy.ended() == 0
                finally:
                    if proxy.process.returncode is None:
                        proxy.process.kill()
                        await proxy.process.wait()


async def test_a_handed_admin_port_that_others_reach_needs_a_token() -> None:
    clients, admin = socket.create_server(("127.0.0.1", 0)), socket.create_server(("0.0.0.0", 0))
    with clients, admin:
        proxy = await handed(clients, admin, "--upstream", "http://127.0.0.1:9")
        _, text = await asyncio.wait_for(proxy.process.communicate(), READY_S)
    assert proxy.process.returncode == 2
    assert b"meter.admin_token" in text
