"""State of one run of a proxy that outlives its processes, the setups of the children, and hot restart.

`ProxyRun` (names, keys, capture id) makes the RelaySetup and the MeterSetup that the children get. The state
continues across a hot restart, so that captures, experiment arms and relay names stay consistent.
`fresh_meter_setup` is for a meter without relays.

Hot restart (SIGUSR2) replaces the running supervisor by the installed version, in the same process.
`supervisor.py` calls the steps. The new program first runs with `--check` (`try_out`); if it fails, the old
one stays. The state for the new program (`Handover`) is in a memfd, whose descriptor an environment variable
names, because the state contains keys and salts. Listening sockets and the stdin of the children stay open
across execve(2). Signals are blocked from just before execve until the new program handles them.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import tempfile
from collections.abc import Iterable, MutableMapping
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from llmtap.channel.experiment import Experiment, resolve
from llmtap.clock import SystemClock
from llmtap.config import Settings, fingerprint
from llmtap.errors import ConfigError
from llmtap.meter.setup import Changeable, MeterSetup
from llmtap.meter.tenants import host_salt
from llmtap.net.pool import parse_origin
from llmtap.supervisor.child import HandedChild
from llmtap.units import decode_special, encode_special
from llmtap.vantage.relay.relay import RelaySetup

_VARIABLE: Final = "LLMTAP_HANDOVER"
_HELD: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
TRY_S: Final = 60.0
"""Time limit of the new program's check: it takes a second, or many on a busy machine."""
SAID_MAX: Final = 500
"""Maximum characters of its message that are logged."""

log = logging.getLogger(__name__)


def _new_capture_id(wall_ns: int) -> str:
    """Return the name of a capture that begins now."""
    began = datetime.fromtimestamp(wall_ns / 1e9, UTC)
    return f"{began:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"


class ProxyRun(msgspec.Struct, kw_only=True):
    """State that outlives every process of a proxy. It holds keys, so it is never in a file."""

    id: str
    folder: str
    """Folder of the tap's socket, removed at the end."""
    tenant_salt: str
    experiment_key: str
    relays: int = 0
    """Number started so far, for unique names."""
    experiment: Experiment | None = None
    experiment_of: str = ""
    """Digest of its options."""
    capture_id: str = ""
    capture_salt: str = ""
    """Stored only here: hashes of two captures cannot be compared."""
    capture_of: str = ""
    capture_met: bool = False
    """A meter has been started for the capture; later ones continue it."""

    @classmethod
    def begin(cls, settings: Settings) -> "ProxyRun":
        """Return the run of a proxy that starts by itself."""
        run = cls(
            id=secrets.token_hex(2),
            folder=tempfile.mkdtemp(prefix="llmtap-"),
            tenant_salt=host_salt() or secrets.token_hex(16),
            experiment_key=secrets.token_hex(16),
        )
        run.follow(settings)
        return run

    def follow(self, settings: Settings) -> None:
        """Start a new experiment or capture, if these settings change them."""
        of = _digest(settings.experiment)
        if of != self.experiment_of:
            self.experiment_of = of
            self.experiment = resolve(settings.experiment, self.experiment_key, SystemClock.wall_ns())
            if self.experiment is not None:
                log.info(
                    "event=experiment name=%s enabled=%s unit=%s arms=%d key_fingerprint=%s",
                    self.experiment.name, self.experiment.enabled, self.experiment.unit,
                    len(self.experiment.arms), self.experiment.key_fingerprint,
                )  # fmt: skip
        of = _digest(settings.capture)
        if of != self.capture_of:
            self.capture_of = of
            self.capture_id = _new_capture_id(SystemClock.wall_ns())
            self.capture_salt = secrets.token_hex(32)
            self.capture_met = False

    def catch_up(self, other: "ProxyRun") -> None:
        """Take over the counts of `other`, of which this is an older copy."""
        self.relays = other.relays
        if self.capture_id == other.capture_id:
            self.capture_met = other.capture_met

    def tap_path(self, settings: Settings) -> str:
        """Return the path of the meter's socket."""
        return settings.meter.socket or str(Path(self.folder) / "tap.sock")

    def relay_setup(self, settings: Settings, index: int, number: int, fds: list[int]) -> RelaySetup:
        """Return the setup of the `number`th relay of this run."""
        return RelaySetup(
            options=settings.relay,
            name=f"{self.id}.{index}.{number}",
            listen_fds=fds,
            tap_path=self.tap_path(settings),
            log=settings.log,
            experiment=self.experiment,
            asks_upstream=index == 0,
        )

    def meter_setup(self, settings: Settings, admin_fd: int, *, takes_over: bool = False) -> MeterSetup:
        """Return the setup of a meter."""
        return _meter_setup(
            settings,
            self.tenant_salt,
            socket=self.tap_path(settings),
            admin_fd=admin_fd,
            capture_id=self.capture_id,
            capture_salt=self.capture_salt,
            experiment=None if self.experiment is None else self.experiment.without_key(),
            # Totals that are exported name the server: those of one are not to become another's.
            servers=_servers(settings) if settings.otlp.exports(os.environ) else {},
            capture_after=0 if self.capture_met else self.relays,
            takes_over=takes_over,
        )


def _meter_setup(settings: Settings, tenant_salt: str, **own: Any) -> MeterSetup:
    """Return the setup of any meter; `own`: its other fields; `tenant_salt`: if the settings have none."""
    return MeterSetup(
        options=settings.meter,
        changeable=Changeable(
            log=settings.log, config=fingerprint(settings), drain_s=settings.relay.drain_timeout / 1e9
        ),
        otlp=settings.otlp,
        tenants=settings.tenants,
        salt=settings.tenants.salt or tenant_salt,
        slo=settings.slo,
        cost=settings.cost,
        capture=settings.capture,
        **own,
    )


def fresh_meter_setup(settings: Settings, socket: str = "", admin_fd: int | None = None) -> MeterSetup:
    """Return the setup of a meter without relays, with new keys; without `socket` it reads a file."""
    return _meter_setup(
        settings, host_salt() or secrets.token_hex(16), socket=socket, admin_fd=admin_fd,
        capture_id=_new_capture_id(SystemClock.wall_ns()), capture_salt=secrets.token_hex(32),
    )  # fmt: skip


def _digest(options: msgspec.Struct) -> str:
    text = msgspec.json.encode(options, enc_hook=encode_special, order="sorted")
    return blake2b(text, digest_size=8).hexdigest()


def _servers(settings: Settings) -> dict[str, tuple[str, int]]:
    """Return host and port of the upstream by arm; under "" for all without their own."""
    urls = {"": settings.relay.upstream}
    urls |= {arm.name: arm.upstream for arm in settings.experiment.arms if arm.upstream is not None}
    origins = {arm: parse_origin(url, "upstream") for arm, url in urls.items()}
    return {arm: (origin.host, origin.port) for arm, origin in origins.items()}


class Handover(msgspec.Struct, kw_only=True):
    """State that one supervisor leaves to the next in its process."""

    pid: int
    """Process that it is for: the variable may leak into others."""
    run: ProxyRun
    tap_path: str
    drain_s: float
    """Drain limit of the relays at work."""
    port_fds: list[int]
    """`Ports.fds`"""
    children: list[HandedChild]


def take_handover(environ: MutableMapping[str, str], pid: int) -> Handover | None:
    """Return what the supervisor before us left for process `pid`, if any. Raises ConfigError."""
    text = environ.pop(_VARIABLE, "")
    if not text.isdecimal():
        return None
    fd = int(text)
    try:
        data = os.pread(fd, os.fstat(fd).st_size, 0)
        os.close(fd)
    except OSError:
        return None
    try:
        handover = msgspec.json.decode(data, type=Handover, dec_hook=decode_special)
    except msgspec.MsgspecError as exc:
        raise ConfigError(_VARIABLE, f"cannot be read: {exc}", "restart it") from None
    return handover if handover.pid == pid else None


async def try_out(handover: Handover, argv: list[str]) -> str | None:
    """Have the program on disk check configuration and handover; return what is wrong, or None."""
    try:
        fd = _written(handover)
    except OSError as exc:
        return f"the handover cannot be written: {exc.strerror}"
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, "--check",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE, env=_environment(fd), pass_fds=(fd,),
        )  # fmt: skip
    except OSError as exc:
        return f"{argv[0]} cannot be run: {exc.strerror}"
    finally:
        os.close(fd)
    try:
        _, said = await asyncio.wait_for(process.communicate(), TRY_S)
    except TimeoutError:
        return f"the new program was not done with --check within {TRY_S:g} s"
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode == 0:
        return None
    return said.decode(errors="replace").strip()[-SAID_MAX:] or f"--check ended with {process.returncode}"


def become(handover: Handover, argv: list[str]) -> NoReturn:
    """Become the program on disk. Raises OSError when that fails, and then nothing has changed."""
    fd = _written(handover)
    fds = [fd, *handover.port_fds, *(child.stdin for child in handover.children)]
    try:
        _let_inherit(fds, True)
        os.execve(argv[0], argv, _environment(fd))
    except OSError:
        _let_inherit(fds, False)
        os.close(fd)
        raise


def hold_signals() -> None:
    """Block signals until the next program, or `let_signals_in`, admits them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)


def let_signals_in() -> None:
    """Unblock signals, those included that came during the change."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)


def _written(handover: Handover) -> int:
    fd = os.memfd_create("llmtap-handover")
    with open(fd, "wb", closefd=False) as file:
        file.write(msgspec.json.encode(handover, enc_hook=encode_special))
    return fd


def _environment(fd: int) -> dict[str, str]:
    return {**os.environ, _VARIABLE: str(fd)}


def _let_inherit(fds: Iterable[int], inherit: bool) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):  # the stdin of a child that has just been buried
            os.set_inheritable(fd, inherit)
