"""Starts relays and meter, restarts what dies, drains on SIGTERM, reloads on SIGHUP.

The supervisor owns what must outlive its children: the listening sockets (so that connections wait instead
of being refused while a relay restarts) and the folder of the tap's socket. A reload starts a new set of
relays on the same sockets, waits until they are ready, and lets the old ones drain: no connection is lost.
"""

import asyncio
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from llmtap.capture.tokenizer import load_tokenizer
from llmtap.clock import SystemClock
from llmtap.config import Settings, fingerprint
from llmtap.errors import ConfigError, LlmtapError
from llmtap.meter.ending import RENEW
from llmtap.meter.socket_path import check_socket_path, need_no_meter
from llmtap.meter.tenants import host_salt
from llmtap.net.listener import bind, is_free, parse_address
from llmtap.net.pool import parse_origin
from llmtap.net.tls import client_context, server_context
from llmtap.relay.process import RelaySetup
from llmtap.supervisor.child import Child
from llmtap.supervisor.systemd import notify, take_sockets
from llmtap.tap.experiment import Experiment, resolve
from llmtap.units import encode_special

__all__ = ["Supervisor", "check_measuring", "check_settings", "name_of", "new_capture_id"]

BACKOFF_S = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
HEALTHY_S = 10.0
"""A child that lived this long starts again at once."""
HEAD_BYTES_MIN = 256
METER_S = 5.0
"""How long relays wait for the meter at the start; it takes half a second, or one with a capture."""
GRACE_S = 5.0
"""On top of the drain limit, before a child is killed."""

log = logging.getLogger(__name__)


def check_settings(settings: Settings) -> None:
    """Find what only a look at the world can find, before anything starts.

    Raises ConfigError.
    """
    relay = settings.relay
    if not relay.upstream:
        raise ConfigError(
            "relay.upstream", "the gateway's URL is missing", "give --upstream http://HOST:PORT"
        )
    origin = parse_origin(relay.upstream, "relay.upstream")
    if bool(relay.tls_certificate) != bool(relay.tls_key):
        raise ConfigError("relay.tls_key", "tls_certificate and tls_key go together")
    if relay.tls_certificate and relay.tls_key:
        server_context(relay.tls_certificate, relay.tls_key)
    if origin.tls or relay.upstream_ca:
        client_context(relay.upstream_ca, relay.upstream_verify)
    for key, text in (("relay.listen", relay.listen), ("meter.admin", settings.meter.admin)):
        try:
            parse_address(text)
        except ValueError as exc:
            raise ConfigError(key, str(exc)) from None
    if relay.head_bytes < HEAD_BYTES_MIN:
        raise ConfigError("relay.head_bytes", f"no request fits in {relay.head_bytes} bytes")
    check_measuring(settings)
    for key in ("idle_timeout", "head_timeout", "connect_timeout"):
        if getattr(relay, key) <= 0:
            raise ConfigError(f"relay.{key}", "must be more than 0", "for no limit to speak of, try 365d")
    if settings.experiment.enabled and not settings.experiment.arms:
        raise ConfigError("experiment.arms", "is empty, and experiment.enabled is true", "name two arms")
    upstreams = {"relay.upstream": origin}
    for i, arm in enumerate(settings.experiment.arms):
        if arm.upstream is not None:
            place = f"experiment.arms[{i}].upstream"
            upstreams[place] = parse_origin(arm.upstream, place)
    for place, found in upstreams.items():
        if (found.host, found.port) == parse_address(relay.listen):
            raise ConfigError(place, "is the tap's own address: it would forward to itself")
    host, _ = parse_address(settings.meter.admin)
    if host not in ("127.0.0.1", "::1", "localhost") and not settings.meter.admin_token:
        raise ConfigError(
            "meter.admin_token", f"is needed when the admin port listens on {host or 'every interface'}"
        )


def check_measuring(settings: Settings) -> None:
    """The part of it that is about measuring, and no proxy. Raises ConfigError."""
    if settings.meter.admin_tls_certificate and settings.meter.admin_tls_key:
        server_context(settings.meter.admin_tls_certificate, settings.meter.admin_tls_key, "meter.admin_tls_")
    if settings.meter.socket is not None:
        check_socket_path(settings.meter.socket)
    if settings.cost.gpu_hour and not settings.cost.gpus:
        raise ConfigError("cost.gpus", "is 0, and cost.gpu_hour has a price", "how many are there?")
    if settings.meter.tokenizer is not None:
        load_tokenizer(settings.meter.tokenizer)
    if settings.capture.to is not None:
        # Arrow takes 40 MB and 200 ms, so only for who captures.
        from llmtap.capture.store import check

        check(settings.capture)
    if settings.otlp.ca and not os.access(settings.otlp.ca, os.R_OK):
        raise ConfigError("otlp.ca", f"{settings.otlp.ca} cannot be read")


def new_capture_id(wall_ns: int) -> str:
    """The name of a capture that begins now."""
    began = datetime.fromtimestamp(wall_ns / 1e9, UTC)
    return f"{began:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"


def _bind(key: str, text: str, copies: int) -> list[socket.socket]:
    host, port = parse_address(text)
    try:
        if copies == 1:
            return [bind(host, port, shared=False)]
        is_free(host, port)  # SO_REUSEPORT would let two proxies share a port without a word
        return [bind(host, port, shared=True) for _ in range(copies)]
    except OSError as exc:
        raise ConfigError(key, f"cannot listen on {text}: {exc.strerror}") from None


def _servers(settings: Settings) -> dict[str, tuple[str, int]]:
    """Host and port of the upstream by arm; under "" of whoever has no arm, or an arm without its own."""
    urls = {"": settings.relay.upstream}
    urls |= {arm.name: arm.upstream for arm in settings.experiment.arms if arm.upstream is not None}
    origins = {arm: parse_origin(url, "upstream") for arm, url in urls.items()}
    return {arm: (origin.host, origin.port) for arm, origin in origins.items()}


def name_of(sock: socket.socket) -> str:
    """HOST:PORT as bound, which tells the port where 0 was asked for."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Supervisor:
    """The parent of one proxy."""

    def __init__(
        self, settings: Settings, reload: Callable[[], Settings], announce: Callable[[str, str], None]
    ) -> None:
        """`reload` reads the settings again; `announce` is told the addresses of clients and admin port."""
        self._settings = settings
        self._reload = reload
        self._announce = announce
        self._run_id = secrets.token_hex(2)
        self._experiment_key = secrets.token_hex(16)
        self._tenant_salt = host_salt() or secrets.token_hex(16)
        self._experiment = self._resolve_experiment()
        self._begin_capture()
        self._folder = Path(tempfile.mkdtemp(prefix="llmtap-"))
        self._sockets: list[socket.socket] = []
        self._handed = False
        """The clients' sockets came with the process (systemd): they are not ours to move."""
        self._admin: socket.socket | None = None
        self._meter: Child | None = None
        self._meter_came = asyncio.Event()
        self._meter_renewed = False
        self._relays: dict[int, Child] = {}
        self._generation = 0
        """Counts reloads; a relay of an older generation is draining and is not started again."""
        self._started = 0
        self._stopping = asyncio.Event()
        self._hang_ups = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retiring: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Until SIGTERM or SIGINT; 0 when everything ended in order. Raises ConfigError."""
        loop = asyncio.get_running_loop()
        try:
            settings = self._settings
            if settings.meter.socket is not None:
                need_no_meter(settings.meter.socket)
            self._open_sockets()
            assert self._admin is not None
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_stop)
            loop.add_signal_handler(signal.SIGHUP, self._hang_ups.set)
            listen, admin = name_of(self._sockets[0]), name_of(self._admin)
            self._announce(listen, admin)
            log.info(
                "event=start listen=%s upstream=%s admin=%s workers=%d config=%s",
                listen, settings.relay.upstream, admin, settings.relay.workers, fingerprint(settings),
            )  # fmt: skip
            self._spawn(self._keep_meter())
            await self._meter_comes()
            await self._start_generation()
            notify(f"READY=1\nSTATUS=forwarding to {settings.relay.upstream}")
            self._spawn(self._reload_for_ever())
            await self._stopping.wait()
            await self._stop()
        finally:
            for task in list(self._tasks):
                task.cancel()
            self._close_sockets()
            shutil.rmtree(self._folder, ignore_errors=True)
        return 0

    def _open_sockets(self) -> None:
        """Those that came with the process, else our own."""
        relay = self._settings.relay
        handed = take_sockets(os.environ, os.getpid())
        self._handed = bool(handed.clients)
        self._sockets = handed.clients or _bind("relay.listen", relay.listen, relay.workers)
        self._share_sockets()
        if handed.admin is not None:
            # Who reaches it is told by the socket, not by the option: the rules are those of its address.
            msgspec.structs.replace(self._settings.meter, admin=name_of(handed.admin))
        self._admin = handed.admin or _bind("meter.admin", self._settings.meter.admin, 1)[0]

    def _share_sockets(self) -> None:
        """Where there are more workers than sockets, the first is served by several."""
        missing = self._settings.relay.workers - len(self._sockets)
        self._sockets += [self._sockets[0].dup() for _ in range(missing)]

    def _resolve_experiment(self) -> Experiment | None:
        """The experiment of the present settings, the same for all children however often they start."""
        experiment = resolve(self._settings.experiment, self._experiment_key, SystemClock.wall_ns())
        if experiment is not None:
            log.info(
                "event=experiment name=%s enabled=%s unit=%s arms=%d key_fingerprint=%s",
                experiment.name, experiment.enabled, experiment.unit, len(experiment.arms),
                experiment.key_fingerprint,
            )  # fmt: skip
        return experiment

    def _begin_capture(self) -> None:
        """A new id, and a new salt that is kept here only: hashes of two captures can't be compared."""
        self._capture_id = new_capture_id(SystemClock.wall_ns())
        self._capture_salt = secrets.token_hex(32)
        self._capture_met = False
        """A meter has been started for it: a later one only goes on with it."""

    def _spawn(self, coroutine: "asyncio._CoroutineLike[None]") -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _on_stop(self) -> None:
        if self._stopping.is_set():  # asked twice: now means now
            for child in self._relays.values():
                child.signal(signal.SIGKILL)
        self._stopping.set()

    def _close_sockets(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._sockets = []
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    # ---------------------------------------------------------------- children

    @property
    def _tap_path(self) -> str:
        return self._settings.meter.socket or str(self._folder / "tap.sock")

    async def _start_generation(self) -> None:
        """Start every relay with the present settings; returns when each is ready, or has failed to be."""
        self._generation += 1
        self._relays = {}
        begun = []
        for index in range(self._settings.relay.workers):
            first_try = asyncio.Event()
            begun.append(first_try.wait())
            self._spawn(self._keep_relay(index, self._generation, first_try))
        await asyncio.gather(*begun)

    async def _keep_relay(self, index: int, generation: int, first_try: asyncio.Event) -> None:
        """Run relay `index`, again and again, while its generation is the present one."""
        failures = 0
        while generation == self._generation and not self._stopping.is_set():
            began = time.monotonic()
            child = await self._start_relay(index)
            if generation == self._generation:
                self._relays[index] = child
            else:
                self._retire(child)
            if not await child.ready():
                log.error("event=relay_not_ready relay=%s pid=%d", child.name, child.pid)
            first_try.set()
            status = await child.wait()
            if generation != self._generation or self._stopping.is_set():
                return
            failures = 0 if time.monotonic() - began > HEALTHY_S else failures + 1
            await self._back_off("relay", child, status, failures)

    async def _keep_meter(self) -> None:
        """Run the meter, again and again."""
        failures = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            self._meter = child = await self._start_meter()
            await child.ready()
            self._meter_came.set()
            status = await child.wait()
            if self._stopping.is_set():
                return
            if self._meter_renewed:
                self._meter_renewed = False
                log.info("event=meter_renewed pid=%d", child.pid)
                continue
            failures = 0 if time.monotonic() - began > HEALTHY_S else failures + 1
            await self._back_off("meter", child, status, failures)

    async def _meter_comes(self) -> None:
        """Until the meter is there: the first exchanges are measured, too. Traffic waits METER_S at most."""
        waiting = [asyncio.ensure_future(e.wait()) for e in (self._meter_came, self._stopping)]
        await asyncio.wait(waiting, timeout=METER_S, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()

    async def _back_off(self, kind: str, child: Child, status: int, failures: int) -> None:
        delay_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
        log.error(
            "event=%s_died name=%s pid=%d status=%d restart_s=%s",
            kind,
            child.name,
            child.pid,
            status,
            delay_s,
        )
        await asyncio.sleep(delay_s)

    async def _start_relay(self, index: int) -> Child:
        self._started += 1
        sockets = self._sockets[index : index + 1]
        if index == self._settings.relay.workers - 1:
            sockets = self._sockets[index:]  # after a reload to fewer workers, someone has to serve the rest
        fds = [sock.fileno() for sock in sockets]
        setup = RelaySetup(
            options=self._settings.relay,
            name=f"{self._run_id}.{index}.{self._started}",
            listen_fds=fds,
            tap_path=self._tap_path,
            log=self._settings.log,
            experiment=self._experiment,
        )
        line = msgspec.json.encode(setup, enc_hook=encode_special)
        return await Child.start(setup.name, "llmtap.relay", line, fds)

    async def _start_meter(self) -> Child:
        assert self._admin is not None
        fd = self._admin.fileno()
        after = 0 if self._capture_met else self._started
        self._capture_met = True
        setup = {
            "options": self._settings.meter,
            "socket": self._tap_path,
            "admin_fd": fd,
            "log": self._settings.log,
            "experiment": None if self._experiment is None else self._experiment.without_key(),
            "otlp": self._settings.otlp,
            "servers": _servers(self._settings),
            "tenants": self._settings.tenants,
            "salt": self._settings.tenants.salt or self._tenant_salt,
            "slo": self._settings.slo,
            "cost": self._settings.cost,
            "capture": self._settings.capture,
            "capture_id": self._capture_id,
            "capture_salt": self._capture_salt,
            "capture_after": after,
            "config": fingerprint(self._settings),
            "drain_s": self._settings.relay.drain_timeout / 1e9,
        }
        return await Child.start(
            "meter", "llmtap.meter", msgspec.json.encode(setup, enc_hook=encode_special), [fd]
        )

    def _retire(self, child: Child) -> None:
        """Let a relay of an older generation finish what it has."""
        limit_s = self._settings.relay.drain_timeout / 1e9 + GRACE_S
        task = self._spawn(child.stop(limit_s))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    # ---------------------------------------------------------------- reload

    async def _reload_for_ever(self) -> None:
        while True:
            await self._hang_ups.wait()
            self._hang_ups.clear()
            try:
                settings = self._reload()
                check_settings(settings)
            except LlmtapError as exc:
                log.error("event=reload_refused error=%r", str(exc))
                continue
            await self._apply(settings)

    async def _apply(self, settings: Settings) -> None:
        old, self._settings = self._settings, settings
        if settings.relay.listen != old.relay.listen and self._handed:
            log.warning("event=reload_partial key=relay.listen hint='its sockets came from outside'")
        elif settings.relay.listen != old.relay.listen:
            try:
                sockets = _bind("relay.listen", settings.relay.listen, settings.relay.workers)
            except ConfigError as exc:
                log.error("event=reload_refused error=%r", str(exc))
                self._settings = old
                return
            for sock in self._sockets:
                sock.close()  # the old relays have their own copies, and drain them
            self._sockets = sockets
        if settings.relay.workers > len(self._sockets):
            if not self._handed:
                host, port = parse_address(settings.relay.listen)
                try:
                    for _ in range(settings.relay.workers - len(self._sockets)):
                        self._sockets.append(bind(host, port, shared=True))
                except OSError:
                    pass  # a single worker's socket does not share its port
            self._share_sockets()
        if settings.meter.admin != old.meter.admin:
            log.warning("event=reload_partial key=meter.admin hint='needs a restart'")
        renewed = any(
            getattr(settings, table) != getattr(old, table)
            for table in ("experiment", "otlp", "tenants", "slo", "cost", "capture")
        )
        if settings.capture != old.capture:
            self._begin_capture()
        if settings.experiment != old.experiment:
            self._experiment = self._resolve_experiment()
        retiring = self._relays
        await self._start_generation()
        for child in retiring.values():
            self._retire(child)
        kept = msgspec.structs.replace(settings.meter, admin=old.meter.admin)
        if (kept != old.meter or renewed) and self._meter is not None:
            # Its watcher starts it again, with the new settings; what is under way goes unmeasured, counted.
            self._meter_renewed = True
            self._meter.signal(RENEW)
        log.info("event=reloaded config=%s retiring=%d", fingerprint(settings), len(retiring))

    # ---------------------------------------------------------------- the end

    async def _stop(self) -> None:
        notify("STOPPING=1")
        limit_s = self._settings.relay.drain_timeout / 1e9 + GRACE_S
        log.info("event=stopping drain_s=%s pid=%d", self._settings.relay.drain_timeout / 1e9, os.getpid())
        for sock in self._sockets:
            sock.close()
        self._sockets = []
        await asyncio.gather(*(c.stop(limit_s) for c in self._relays.values()), *self._retiring)
        if self._meter is not None:
            await self._meter.stop(GRACE_S)
        log.info("event=stopped pid=%d", os.getpid())
