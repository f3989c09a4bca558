"""Parent process of `llmtap watch`: opens packet sockets, gives up capabilities, runs a watcher and a meter.

With `pair.back_ports`, there is a watcher for each side of a gateway; but if `pair.back_ports` has all
watched ports, the front is a relay with the options of `[relay]`. With `pair.upstream`, the back is a relay,
and all watched ports are those of the gateway. A watcher inherits its packet sockets, a relay its listening
sockets, and the meter the admin port; no child has capabilities. A child that dies is started again, and a
new watcher continues in the ring buffers where the previous one stopped.
"""

import asyncio
import ctypes
import os
import pwd
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from llmtap.config import Settings
from llmtap.errors import ConfigError, errors_of_check
from llmtap.exchange.exchange import BACK, FRONT
from llmtap.log import set_up
from llmtap.meter.setup import check_no_meter_listens
from llmtap.net.listener import name_of
from llmtap.protocol.inference import SkipRules
from llmtap.supervisor.checks import back_relay_problems, check_meter, relay_problems
from llmtap.supervisor.child import Child, back_off, start_with_retries, wait_until_ready
from llmtap.supervisor.ports import bind_for, notify
from llmtap.supervisor.run import back_relay_options, fresh_meter_setup
from llmtap.units import format_bytes
from llmtap.vantage.passive.connection import pack_addresses
from llmtap.vantage.passive.options import WatchOptions
from llmtap.vantage.passive.ring import ANY, PORTS_MAX, RING_BYTES_MIN, open_adapter_clock, open_ring
from llmtap.vantage.passive.watcher import WatchSetup
from llmtap.vantage.relay.options import RelayOptions
from llmtap.vantage.relay.relay import RelaySetup

STOP_S: Final = 8.0
"""Time after SIGTERM at which a child that still runs is killed."""
_METER: Final = "meter"
_PR_SET_NO_NEW_PRIVS: Final = 38
_CAPABILITY_VERSION_3: Final = 0x20080522


def watch_problems(settings: Settings) -> Iterator[ConfigError]:
    """Yield the mistakes in the settings of `llmtap watch` on interfaces."""
    options = settings.watch
    if not options.interfaces:
        yield ConfigError("watch.interfaces", "is missing", "give --interface eth0, or --read FILE.pcap")
    known = [ANY, *(name for _, name in socket.if_nameindex())]
    for i, name in enumerate(options.interfaces):
        if name not in known:
            hint = f"the interfaces are {', '.join(known)}"
            yield ConfigError(f"watch.interfaces[{i}]", f"there is no interface {name!r}", hint)
    if not options.ports:
        yield ConfigError("watch.ports", "is missing", "give --port 8000, the port of the server")
    if len(options.ports) > PORTS_MAX:
        yield ConfigError(
            "watch.ports",
            f"has {len(options.ports):,} ports, but at most {PORTS_MAX} are possible",
            "run a second llmtap watch for the other ports",
        )
    yield from _pair_problems(settings)
    if options.ring_bytes < RING_BYTES_MIN:
        yield ConfigError(
            "watch.ring_bytes",
            f"must be at least {format_bytes(RING_BYTES_MIN)}, got {format_bytes(options.ring_bytes)}",
            'such as watch.ring_bytes = "64MiB"',
        )
    if options.user is not None:
        yield from errors_of_check(_account_of, options.user)
    if settings.experiment.enabled:
        yield ConfigError(
            "experiment.enabled",
            "llmtap watch reads packets and cannot assign requests to arms",
            "use llmtap proxy, or set it to false",
        )


def _pair_problems(settings: Settings) -> Iterator[ConfigError]:
    """Yield the mistakes in the settings of the two sides of a gateway."""
    pair, ports = settings.pair, set(settings.watch.ports)
    if pair.upstream and pair.back_ports:
        hint = "set pair.upstream for a relay, or pair.back_ports to read packets"
        yield ConfigError("pair.back_ports", "cannot be combined with pair.upstream", hint)
    elif pair.upstream:
        yield from back_relay_problems(settings, {})
    elif missing := sorted(set(pair.back_ports) - ports):
        hint = "watch.ports must have all ports that are read, so add the ports of the engines, too"
        yield ConfigError("pair.back_ports", f"has ports that watch.ports does not have: {missing}", hint)
    elif _relay_of(settings) is not None:
        yield from relay_problems(settings)


def _relay_of(settings: Settings) -> tuple[str, RelayOptions] | None:
    """Return side and options of the relay, if a relay runs on one side of a gateway; else None."""
    pair = settings.pair
    if pair.upstream:
        return BACK, back_relay_options(settings)
    is_front = bool(pair.back_ports) and set(pair.back_ports) == set(settings.watch.ports)
    return (FRONT, settings.relay) if is_front else None


def packet_problems(settings: Settings) -> Iterator[ConfigError]:
    """Yield the mistakes in `watch.upstream_hosts` and `watch.skip`, which apply to interfaces and files."""
    for i, host in enumerate(settings.watch.upstream_hosts):
        try:
            pack_addresses([host])
        except ValueError:
            hint = "give IPv4 or IPv6 addresses, because packets have no host names"
            yield ConfigError(f"watch.upstream_hosts[{i}]", f"{host!r} is not an IP address", hint)
    yield from errors_of_check(SkipRules, settings.watch.skip, "watch.skip")


def watch(settings: Settings, announce: Callable[[str, str], None]) -> int:
    """Run until SIGTERM, Ctrl-C or a hang-up of the terminal; return the exit status. `announce` is called
    with the address of the relay (empty without a relay) and the address of the admin port.

    The caller must have checked the settings, except those of the meter: these are checked here, because only
    then the privileges have been given up. Raises ConfigError.
    """
    options = settings.watch
    if settings.meter.socket is not None:
        check_no_meter_listens(settings.meter.socket)
    sides = [_Side.open(side, side_options) for side, side_options in _options_by_side(settings)]
    relay = None
    if (side_and_options := _relay_of(settings)) is not None:
        side, relay_options = side_and_options
        key = "pair.listen" if side == BACK else "relay.listen"
        relay = _Relay(side, relay_options, bind_for(key, relay_options.listen, relay_options.workers))
    (admin,) = bind_for("meter.admin", settings.meter.admin, 1)
    drop_privileges(options.user)
    check_meter(settings)
    set_up(settings.log)
    folder = tempfile.mkdtemp(prefix="llmtap-")
    try:
        processes = _Processes(settings, sides, relay, admin, folder)
        listen = "" if relay is None else name_of(relay.sockets[0])
        return asyncio.run(processes.run(lambda: announce(listen, name_of(admin))))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _options_by_side(settings: Settings) -> list[tuple[str, WatchOptions]]:
    """Return side and options of each watcher: one watcher, or one for each side of a gateway."""
    options, back_ports = settings.watch, settings.pair.back_ports
    if (relay := _relay_of(settings)) is not None:
        return [(FRONT if relay[0] == BACK else BACK, options)]
    if not back_ports:
        return [("", options)]
    front_ports = tuple(port for port in options.ports if port not in back_ports)
    return [
        (side, msgspec.structs.replace(options, ports=ports))
        for side, ports in ((FRONT, front_ports), (BACK, back_ports))
    ]


@dataclass(frozen=True, slots=True)
class _Side:
    """Packet sockets of one watcher, and the descriptors of the clocks of its network adapters."""

    side: str
    options: WatchOptions
    packet_sockets: list[socket.socket]
    adapter_fds: list[int]
    """Descriptors of the clocks of network cards."""

    @classmethod
    def open(cls, side: str, options: WatchOptions) -> "_Side":
        sockets = [open_ring(name, options.ports, options.ring_bytes) for name in options.interfaces]
        adapter_fds = []
        if options.timestamps == "adapter":
            adapter_fds = [
                open_adapter_clock(sock, name) for sock, name in zip(sockets, options.interfaces, strict=True)
            ]
        return cls(side, options, sockets, adapter_fds)

    @property
    def packet_fds(self) -> list[int]:
        return [sock.fileno() for sock in self.packet_sockets]


@dataclass(frozen=True, slots=True)
class _Relay:
    """Relay processes on one side, each with a listening socket."""

    side: str
    options: RelayOptions
    sockets: list[socket.socket]


def drop_privileges(user: str | None) -> None:
    """Give up all capabilities permanently, and become `user` if it is not None. Raises ConfigError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if user is not None:
        account = _account_of(user)
        if os.geteuid() != account.pw_uid:
            try:
                os.setgroups([])
                os.setgid(account.pw_gid)
                os.setuid(account.pw_uid)
            except OSError as exc:
                hint = "run as root, or leave out watch.user"
                raise ConfigError("watch.user", f"cannot run as {user!r}: {exc.strerror}", hint) from None
    # NO_NEW_PRIVS is needed, because a program that root starts would get all capabilities again.
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.capset(header, none):
        raise ConfigError(
            "watch",
            f"cannot give up the capabilities of the process: {os.strerror(ctypes.get_errno())}",
            "check whether the container or its seccomp profile forbids prctl and capset",
        )


def _account_of(name: str) -> pwd.struct_passwd:
    """Return the account of this name. Raises ConfigError."""
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise ConfigError("watch.user", f"there is no user {name!r}", "give a name of /etc/passwd") from None


class _Processes:
    """The meter, and the processes of each side."""

    def __init__(
        self,
        settings: Settings,
        sides: list[_Side],
        relay: _Relay | None,
        admin: socket.socket,
        folder: str,
    ) -> None:
        self._settings = settings
        self._sides = sides
        self._relay = relay
        path = settings.meter.socket or str(Path(folder) / "tap.sock")
        state = str(Path(folder) / "state")
        self._meter_setup = fresh_meter_setup(settings, path, admin.fileno(), state=state)
        self._run_id = secrets.token_hex(2)
        """Random part of the processes' names."""
        self._start_count = 0
        """Number of watchers and relays started so far, for unique names."""
        self._children: dict[str, Child] = {}
        """By name, the present children. A watcher has its side as name, a relay `relay-INDEX`."""

    async def run(self, announce: Callable[[], None]) -> int:
        """Start the processes, restart those that end, and return the exit status after a signal."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, stop.set)
        meter = await self._start_meter()
        if await wait_until_ready(meter):  # wait, so that the first exchanges are measured, too
            announce()
        starts: dict[str, Callable[[], Awaitable[Child]]] = {_METER: self._start_meter}
        for side in self._sides:
            starts[side.side] = partial(self._start_watcher, side)
        if self._relay is not None:
            for index in range(len(self._relay.sockets)):
                starts[f"relay-{index}"] = partial(self._start_relay, self._relay, index)
        for name, start in starts.items():
            if name != _METER:
                await wait_until_ready(await start())
        notify("READY=1\nSTATUS=watching " + ", ".join(self._settings.watch.interfaces))
        tasks = [
            loop.create_task(self._keep_running(name, child, starts[name]))
            for name, child in self._children.items()
        ]
        await stop.wait()
        notify("STOPPING=1")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Stop the relays first, so that the watchers see the end of their streams, and the meter last, so
        # that it receives the last reports.
        relays = [child for child in self._children.values() if child.kind == "relay"]
        await asyncio.gather(*(child.stop(child.drain_s + STOP_S) for child in relays))
        for name in (*(one.side for one in self._sides), _METER):
            if name in self._children:
                await self._children[name].stop(STOP_S)
        return 0

    async def _keep_running(self, name: str, child: Child, start: Callable[[], Awaitable[Child]]) -> None:
        """Start child `name` again by `start` whenever it dies."""
        failures = 0
        while True:
            status = await child.wait()
            del self._children[name]
            await child.wait_and_close()
            failures = await back_off(child, status, failures)
            child = await start_with_retries(child.kind, start)
            await wait_until_ready(child)

    async def _start_relay(self, relay: _Relay, index: int) -> Child:
        self._start_count += 1
        fd = relay.sockets[index].fileno()
        setup = RelaySetup(
            options=relay.options,
            side=relay.side,
            name=f"{self._run_id}.{index}.{self._start_count}",
            listen_fds=[fd],
            tap_path=self._meter_setup.socket,
            log=self._settings.log,
            checks_upstream=index == 0,
        )
        child = await Child.start("relay", setup.name, index, setup, [fd])
        child.drain_s = relay.options.drain_timeout / 1e9
        self._children[f"relay-{index}"] = child
        return child

    async def _start_watcher(self, side: _Side) -> Child:
        self._start_count += 1
        setup = WatchSetup(
            options=side.options,
            side=side.side,
            name=f"watch-{self._run_id}.0.{self._start_count}",
            packet_fds=side.packet_fds,
            adapter_fds=side.adapter_fds,
            tap_path=self._meter_setup.socket,
            log=self._settings.log,
        )
        fds = side.packet_fds + side.adapter_fds
        child = self._children[side.side] = await Child.start("watch", setup.name, 0, setup, fds)
        return child

    async def _start_meter(self) -> Child:
        assert self._meter_setup.admin_fd is not None
        fds = [self._meter_setup.admin_fd]
        child = self._children[_METER] = await Child.start("meter", _METER, 0, self._meter_setup, fds)
        return child
