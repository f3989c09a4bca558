"""The supervisor in place of itself: the same process goes on with the program that is on disk now.

SIGUSR2 asks for it. What the new program must know lies in a file without a name or a place (memfd), whose
descriptor the environment names: keys and salts are in it, which are nobody's to read in /proc. Listening
sockets and the children's stdin stay open across execve(2), and children stay children of the same process.

Signals are held back from just before the change until the new program listens for them.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterable, MutableMapping
from typing import Final, NoReturn

import msgspec

from llmtap.errors import ConfigError
from llmtap.supervisor.child import HandedChild
from llmtap.supervisor.ports import HandedPorts
from llmtap.supervisor.run import ProxyRun
from llmtap.units import decode_special, encode_special

__all__ = [
    "Handover",
    "become",
    "command",
    "hold_signals",
    "let_signals_in",
    "take_handover",
    "try_out",
]

FORMAT: Final = 1
"""Counted up when a supervisor could misunderstand what another one of an older format left."""
_VARIABLE: Final = "LLMTAP_HANDOVER"
_HELD: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
TRY_S: Final = 60.0
"""How long the new program may take to check the configuration: a second, or many on a busy machine."""
SAID_MAX: Final = 500
"""Characters of what it said that are logged."""


class _Format(msgspec.Struct):
    format: int


class Handover(msgspec.Struct, kw_only=True):
    """What one supervisor leaves to the next in its process."""

    format: int = FORMAT
    pid: int
    """Whose it is: a variable that leaked into another process means nothing there."""
    run: ProxyRun
    tap_path: str
    drain_s: float
    """How long the relays at work let streams finish."""
    ports: HandedPorts
    children: list[HandedChild]


def take_handover(environ: MutableMapping[str, str], pid: int) -> Handover | None:
    """What the supervisor of process `pid` left for us; None where we start by ourselves.

    Raises ConfigError where it is of a format that we do not know.
    """
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
        if msgspec.json.decode(data, type=_Format).format != FORMAT:
            raise ConfigError(
                _VARIABLE, "was written by a version whose hot restart this one does not know", "restart it"
            )
        handover = msgspec.json.decode(data, type=Handover, dec_hook=decode_special)
    except msgspec.MsgspecError as exc:
        raise ConfigError(_VARIABLE, f"cannot be read: {exc}", "restart it") from None
    return handover if handover.pid == pid else None


def command() -> list[str]:
    """How this program was started; after an upgrade the same words start another one."""
    return [sys.executable, *sys.orig_argv[1:]]


async def try_out(handover: Handover, argv: list[str]) -> str | None:
    """Have the program on disk check the configuration and the handover; what is wrong, or None."""
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
    """Go on as the program on disk. Raises OSError when that cannot be, and then nothing has changed."""
    fd = _written(handover)
    ports = handover.ports
    fds = [fd, ports.admin, *ports.clients, *(child.stdin for child in handover.children)]
    try:
        _let_inherit(fds, True)
        os.execve(argv[0], argv, _environment(fd))
    except OSError:
        _let_inherit(fds, False)
        os.close(fd)
        raise


def hold_signals() -> None:
    """Those that come from now on wait for the next program, or for `let_signals_in`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)


def let_signals_in() -> None:
    """Whoever listens for signals now hears those that came during the change."""
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
