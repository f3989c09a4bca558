"""Hot restart (SIGUSR2): replace the running supervisor by the installed version, in the same process.

`supervisor.py` calls the steps. The new program first runs with `--check` (`try_out`); if that fails, the old
one continues. The state for the new program contains secret keys and salts, so it is in a memfd, and an
environment variable has only the number of its descriptor. Listening sockets and the stdin of the children
stay open across execve(2). Signals are blocked from just before execve until the new program handles them.
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
from llmtap.supervisor.child import ChildState
from llmtap.supervisor.ports import PortsState
from llmtap.supervisor.run import ProxyRun, RelayPlaces
from llmtap.units import decode_special, encode_special

FORMAT: Final = 1
"""Version of `Handover`. Increase it with an incompatible change; other versions are then refused."""
_VARIABLE: Final = "LLMTAP_HANDOVER"
_BLOCKED_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
TRY_S: Final = 60.0
"""Time limit of the new program's check (`try_out`). It takes one second, or several on a busy machine."""
MESSAGE_CHARS_MAX: Final = 500
"""Maximum length of the check's message in the log."""


class _Format(msgspec.Struct):
    format: int
    """Version of a Handover, which is read before its other fields."""


class Handover(msgspec.Struct, kw_only=True):
    """State that one supervisor leaves to the next supervisor in the same process."""

    format: int = FORMAT
    pid: int
    """Process id of the supervisor, by which other processes that inherit the environment variable see that
    they must ignore the state."""
    run: ProxyRun
    tap_path: str
    """Path of the meter's socket, on which it receives frames from the relays."""
    drain_s: float
    """Time limit for draining the present relays, in seconds."""
    ports: PortsState
    children: list[ChildState]
    places: RelayPlaces | None = None
    """Numbers and sides of the present relays; None: the state is of an older version without this field."""


def take_handover(environ: MutableMapping[str, str], pid: int) -> Handover | None:
    """Return the state that the previous supervisor left for process `pid`, if any. Raises ConfigError."""
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
                _VARIABLE, "was written by a version with an incompatible hot restart", "restart the proxy"
            )
        handover = msgspec.json.decode(data, type=Handover, dec_hook=decode_special)
    except msgspec.MsgspecError as exc:
        raise ConfigError(_VARIABLE, f"cannot be read: {exc}", "restart the proxy") from None
    return handover if handover.pid == pid else None


def command_line() -> list[str]:
    """Return the command line of this program. After an upgrade, the same command starts the new version."""
    return [sys.executable, *sys.orig_argv[1:]]


async def try_out(handover: Handover, argv: list[str]) -> str | None:
    """Run the installed program with `--check`, which checks the configuration and the handover. Return its
    error message; None if the check passes."""
    try:
        fd = _write_handover(handover)
    except OSError as exc:
        return f"the handover cannot be written: {exc.strerror}"
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            "--check",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=_new_environment(fd),
            pass_fds=(fd,),
        )
    except OSError as exc:
        return f"{argv[0]} cannot be run: {exc.strerror}"
    finally:
        os.close(fd)
    try:
        _, message = await asyncio.wait_for(process.communicate(), TRY_S)
    except TimeoutError:
        return f"the new program did not finish its --check within {TRY_S:g} s"
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode == 0:
        return None
    text = message.decode(errors="replace").strip()[-MESSAGE_CHARS_MAX:]
    return text or f"--check of the new program ended with status {process.returncode}, without a message"


def replace_process(handover: Handover, argv: list[str]) -> NoReturn:
    """Replace this process by the installed program. If it raises OSError, nothing has changed."""
    fd = _write_handover(handover)
    ports = handover.ports
    fds = [fd, *ports.all_fds, *(child.stdin for child in handover.children)]
    try:
        _let_inherit(fds, True)
        os.execve(argv[0], argv, _new_environment(fd))
    except OSError:
        _let_inherit(fds, False)
        os.close(fd)
        raise


def block_signals() -> None:
    """Block the supervisor's signals until `unblock_signals` is called, here or in the next program."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)


def unblock_signals() -> None:
    """Unblock the supervisor's signals. Signals that arrived while they were blocked are delivered now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED_SIGNALS)


def _write_handover(handover: Handover) -> int:
    """Return the descriptor of a memfd that contains the state."""
    fd = os.memfd_create("llmtap-handover")
    with open(fd, "wb", closefd=False) as file:
        file.write(msgspec.json.encode(handover, enc_hook=encode_special))
    return fd


def _new_environment(fd: int) -> dict[str, str]:
    return {**os.environ, _VARIABLE: str(fd)}


def _let_inherit(fds: Iterable[int], inherit: bool) -> None:
    """Set whether new processes inherit file descriptors."""
    for fd in fds:
        with contextlib.suppress(OSError):  # the stdin of a child that has just ended is closed
            os.set_inheritable(fd, inherit)
