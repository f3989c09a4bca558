"""Listening sockets of a proxy: opened by the supervisor, or received from systemd or the previous version.

The supervisor keeps the sockets open, and each relay inherits some of them, so that connections wait in them
while a relay restarts. Sockets from systemd keep their addresses. Sockets of the supervisor are replaced when
the configuration has another address (that of the admin port only at a hot restart). A systemd socket with
FileDescriptorName=admin is for the admin port, all others are for clients. `notify` reports the state to
systemd. Sources: sd_listen_fds(3), sd_notify(3).
"""

import errno
import os
import socket
from collections.abc import Mapping, MutableMapping
from typing import Final, NamedTuple

import msgspec

from llmtap.config import Settings
from llmtap.errors import ConfigError
from llmtap.net.listener import bind, check_free, name_of, parse_address

_FIRST_FD: Final = 3
_ADMIN: Final = "admin"
_VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


class SystemdSockets(NamedTuple):
    """Listening sockets received from systemd: those for clients (possibly none), and the admin port's."""

    clients: list[socket.socket]
    admin: socket.socket | None


def take_sockets(environ: MutableMapping[str, str], pid: int) -> SystemdSockets:
    """Return the sockets for process `pid`, and remove the variables from `environ`, because children must
    not inherit them.

    Raises ConfigError if a socket is not a listening TCP socket, or if two are named `admin`.
    """
    values = {name: environ.pop(name, "") for name in _VARIABLES}
    if values["LISTEN_PID"] != str(pid) or not values["LISTEN_FDS"].isdecimal():
        return SystemdSockets([], None)
    count = int(values["LISTEN_FDS"])
    names = values["LISTEN_FDNAMES"].split(":")
    clients: list[socket.socket] = []
    admin: socket.socket | None = None
    for i in range(count):
        name = names[i] if i < len(names) else ""
        sock = _listening_socket(_FIRST_FD + i, name)
        if name != _ADMIN:
            clients.append(sock)
        elif admin is None:
            admin = sock
        else:
            raise ConfigError(
                "LISTEN_FDNAMES",
                "two sockets are named `admin`, but there is only one admin port",
                "set FileDescriptorName=admin in one .socket unit only",
            )
    return SystemdSockets(clients, admin)


def _listening_socket(fd: int, name: str) -> socket.socket:
    """Return the socket that systemd passed as a file descriptor. Raises ConfigError if it does not
    listen."""
    about = f"file descriptor {fd}" + (f" ({name})" if name else "")
    try:
        sock = socket.socket(fileno=fd)
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as exc:
        raise ConfigError(
            "LISTEN_FDS",
            f"{about} is not a socket: {exc.strerror}",
            "start llmtap from a systemd .socket unit, or unset LISTEN_FDS",
        ) from None
    if not listens or sock.family not in (socket.AF_INET, socket.AF_INET6):
        sock.detach()
        raise ConfigError(
            "LISTEN_FDS",
            f"{about} is not a listening TCP socket",
            "in the .socket unit, set ListenStream=PORT and Accept=no",
        )
    sock.setblocking(False)
    sock.set_inheritable(False)
    # Sockets that this one accepts inherit TCP_NODELAY, so set it here once (as `net.listener.bind` does).
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def notify(state: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Send a state such as `READY=1` to systemd; return whether it was sent. Never raises."""
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


class PortsState(msgspec.Struct, kw_only=True):
    """State of the sockets in a hot restart: their descriptors, and their configured addresses."""

    clients: list[int]
    """Descriptors of the sockets for clients."""
    admin: int
    """Descriptor of the admin port's socket."""
    listen_at: str | None
    """Configured address of `clients`; None if systemd opened them."""
    admin_at: str | None
    """Configured address of `admin`; None if systemd opened it."""
    back: list[int] = []
    """Sockets to which the gateway connects (`pair.listen`)."""
    back_at: str | None = None
    """Configured address of `back`; None: there are none."""

    @property
    def all_fds(self) -> list[int]:
        """All descriptors, the admin port's first."""
        return [self.admin, *self.clients, *self.back]


class Ports:
    """Listening sockets of a proxy. The fields have the same meaning as in `PortsState`.

    `clients` has at least one socket for each worker. The addresses of sockets that systemd opened do not
    change.
    """

    def __init__(
        self, clients: list[socket.socket], admin: socket.socket, listen_at: str | None, admin_at: str | None
    ) -> None:
        self.clients = clients
        self.admin = admin
        self.listen_at = listen_at
        """Configured address for clients."""
        self.admin_at = admin_at
        self.back: list[socket.socket] = []
        """Listening sockets of the second relay, behind the gateway."""
        self.back_at: str | None = None

    @classmethod
    def open(cls, settings: Settings, environ: MutableMapping[str, str], pid: int) -> "Ports":
        """Return the sockets that process `pid` inherited from systemd, or new ones. Raises ConfigError."""
        relay, meter = settings.relay, settings.meter
        inherited = take_sockets(environ, pid)
        clients = inherited.clients or bind_for("relay.listen", relay.listen, relay.workers)
        ports = cls(
            clients,
            inherited.admin or bind_for("meter.admin", meter.admin, 1)[0],
            None if inherited.clients else relay.listen,
            None if inherited.admin else meter.admin,
        )
        ports.check_admin(settings)
        ports._duplicate_for(relay.workers)
        ports._move_back(settings)
        return ports

    @classmethod
    def take(cls, inherited: PortsState) -> "Ports":
        """Return the sockets that this process had open before a hot restart."""
        sockets = [socket.socket(fileno=fd) for fd in inherited.all_fds]
        for sock in sockets:
            sock.set_inheritable(False)
            sock.setblocking(False)
        admin, n = sockets.pop(0), len(inherited.clients)
        ports = cls(sockets[:n], admin, inherited.listen_at, inherited.admin_at)
        ports.back, ports.back_at = sockets[n:], inherited.back_at
        return ports

    def to_state(self) -> PortsState:
        """Return the state from which `take` restores these sockets."""
        return PortsState(
            clients=[sock.fileno() for sock in self.clients],
            admin=self.admin.fileno(),
            listen_at=self.listen_at,
            admin_at=self.admin_at,
            back=[sock.fileno() for sock in self.back],
            back_at=self.back_at,
        )

    def copy(self) -> "Ports":
        """Return a copy with the same sockets, in which sockets can be replaced."""
        ports = Ports(list(self.clients), self.admin, self.listen_at, self.admin_at)
        ports.back, ports.back_at = list(self.back), self.back_at
        return ports

    def close_except(self, others: "Ports") -> None:
        """Close the sockets that are not in `others`."""
        sockets = {others.admin, *others.clients, *others.back}
        for sock in (self.admin, *self.clients, *self.back):
            if sock not in sockets:
                sock.close()

    def move_clients(self, settings: Settings) -> None:
        """Open sockets for all workers at the configured address, unless systemd opened the sockets. The
        previous sockets stay open.

        If it raises ConfigError, nothing has changed.
        """
        relay = settings.relay
        if self.listen_at is not None:
            if relay.listen != self.listen_at:
                self.clients = bind_for("relay.listen", relay.listen, relay.workers)
                self.listen_at = relay.listen
            host, port = parse_address(relay.listen, "relay.listen")
            try:
                for _ in range(relay.workers - len(self.clients)):
                    self.clients.append(bind(host, port, shared=True))
            except OSError:
                pass  # the port was opened for a single worker, so new sockets cannot share it
        self._duplicate_for(relay.workers)
        self._move_back(settings)

    def _move_back(self, settings: Settings) -> None:
        """Open the sockets for the gateway at `pair.listen`, if there is a relay behind the gateway."""
        pair = settings.pair
        if not pair.upstream:
            self.back, self.back_at = [], None
        elif (pair.listen, pair.workers) != (self.back_at, len(self.back)):
            if self.back_at == pair.listen:
                self.back = [self.back[0], *(self.back[0].dup() for _ in range(pair.workers - 1))]
            else:
                self.back = bind_for("pair.listen", pair.listen, pair.workers)
            self.back_at = pair.listen

    def move_admin(self, settings: Settings) -> None:
        """Open the admin port at its configured address. The caller must start a new meter to serve it.

        Raises ConfigError.
        """
        address = settings.meter.admin
        if self.admin_at in (None, address):
            return
        (self.admin,) = bind_for("meter.admin", address, 1)
        self.admin_at = address

    def check_admin(self, settings: Settings) -> None:
        """Raise ConfigError if these settings do not allow an admin port at the socket's address."""
        # MeterOptions checks the address, for example whether it needs TLS and a token.
        msgspec.structs.replace(settings.meter, admin=self.admin_at or name_of(self.admin))

    def sockets_of(self, index: int, workers: int) -> list[socket.socket]:
        """Return the sockets of relay `index`. The indexes below `workers` are relays in front of the
        gateway: each has one socket, and the last one also has all remaining sockets. The next indexes are
        relays behind the gateway, with one socket each. Raises OSError if the relay has no socket.
        """
        back_index = index - workers
        if back_index >= 0:
            sockets = self.back[back_index : back_index + 1]
        else:
            sockets = self.clients[index:] if back_index == -1 else self.clients[index : index + 1]
        if not sockets:
            raise OSError(errno.EBADF, f"no socket for relay {index}; reload or restart the proxy")
        return sockets

    def close_clients(self) -> None:
        for sock in (*self.clients, *self.back):
            sock.close()
        self.clients, self.back = [], []

    def close(self) -> None:
        self.close_clients()
        self.admin.close()

    def _duplicate_for(self, workers: int) -> None:
        """If there are more workers than sockets, add duplicates of the first socket, which they share."""
        self.clients += [self.clients[0].dup() for _ in range(workers - len(self.clients))]


def bind_for(key: str, text: str, copies: int) -> list[socket.socket]:
    """Return `copies` sockets that listen on `text`, the value of the option `key`. Raises ConfigError."""
    host, port = parse_address(text, key)
    try:
        if copies == 1:
            return [bind(host, port, shared=False)]
        check_free(host, port)  # because with SO_REUSEPORT, bind() would share the port of another proxy
        return [bind(host, port, shared=True) for _ in range(copies)]
    except OSError as exc:
        raise bind_error(key, text, exc) from None


def bind_error(key: str, text: str, error: OSError) -> ConfigError:
    """Return the error for an address (the value of the option `key`) that cannot be bound."""
    option = "--admin" if key == "meter.admin" else "--listen"
    hint = (
        f"choose another address with {option} HOST:PORT"
        if error.errno == errno.EADDRINUSE
        else "use an address of this host"
    )
    return ConfigError(f"{key} ({option})", f"cannot listen on {text}: {error.strerror}", hint)
