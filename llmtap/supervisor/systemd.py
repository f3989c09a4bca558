"""What systemd and its like agree on with a service: sockets handed over, and a word when it is ready.

Sources: sd_listen_fds(3), sd_notify(3). A socket named `admin` (FileDescriptorName=) is the admin port's, all
others are the clients'. While the service is stopped they stay open: connections wait, and are not refused.
"""

import os
import socket
from collections.abc import Mapping, MutableMapping
from typing import Final, NamedTuple

from llmtap.errors import ConfigError

__all__ = ["Handed", "notify", "take_sockets"]

_FIRST_FD: Final = 3
_ADMIN: Final = "admin"
_VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


class Handed(NamedTuple):
    """Listening sockets that came with the process; empty and None where it was started by hand."""

    clients: list[socket.socket]
    admin: socket.socket | None


def take_sockets(environ: MutableMapping[str, str], pid: int) -> Handed:
    """Those that are meant for process `pid`. Forgets the variables, so that no child takes them for its own.

    Raises ConfigError where what was handed over is no listening TCP socket, or there are two admin ports.
    """
    told = {name: environ.pop(name, "") for name in _VARIABLES}
    if told["LISTEN_PID"] != str(pid) or not told["LISTEN_FDS"].isdecimal():
        return Handed([], None)
    count = int(told["LISTEN_FDS"])
    names = told["LISTEN_FDNAMES"].split(":")
    clients: list[socket.socket] = []
    admin: socket.socket | None = None
    for i in range(count):
        name = names[i] if i < len(names) else ""
        sock = _listening(_FIRST_FD + i, name)
        if name != _ADMIN:
            clients.append(sock)
        elif admin is None:
            admin = sock
        else:
            raise ConfigError("LISTEN_FDNAMES", "two sockets are named `admin`: one port is what there is")
    return Handed(clients, admin)


def _listening(fd: int, name: str) -> socket.socket:
    about = f"file descriptor {fd}" + (f" ({name})" if name else "")
    try:
        sock = socket.socket(fileno=fd)
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as exc:
        raise ConfigError("LISTEN_FDS", f"{about} is no socket: {exc.strerror}") from None
    if not listens or sock.family not in (socket.AF_INET, socket.AF_INET6):
        sock.detach()
        raise ConfigError("LISTEN_FDS", f"{about} is no listening TCP socket", "ListenStream=PORT, Accept=no")
    sock.setblocking(False)
    sock.set_inheritable(False)
    # As `net.listener.bind` does: accepted sockets inherit it.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def notify(state: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Tell who started us (`READY=1`, `STOPPING=1`), where it wants to know; whether it was told.

    Never raises: a service runs as well without being watched.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect("\0" + address[1:] if address.startswith("@") else address)
            sock.sendall(state.encode())
    except OSError:
        return False
    return True
