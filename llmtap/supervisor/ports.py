"""The listening sockets of a proxy: they outlive its relays, its meter, and the supervisor that made them.

Connections wait at them while a relay restarts, and are not refused. Those that systemd handed over stay
where they are; our own move when the configuration names another address.
"""

import socket
from collections.abc import MutableMapping

import msgspec

from llmtap.config import Settings
from llmtap.errors import ConfigError
from llmtap.net.listener import bind, is_free, parse_address
from llmtap.supervisor.systemd import take_sockets

__all__ = ["HandedPorts", "Ports", "name_of"]


class HandedPorts(msgspec.Struct, kw_only=True):
    """The sockets as one supervisor leaves them to the next: descriptors, and the addresses asked for."""

    clients: list[int]
    admin: int
    listen_at: str | None
    """None where the sockets came from outside."""
    admin_at: str | None


def name_of(sock: socket.socket) -> str:
    """HOST:PORT as bound, which tells the port where 0 was asked for."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Ports:
    """At least as many sockets for clients as there are workers, and the admin port's.

    `listen_at` and `admin_at` are the addresses as the settings named them; None where the sockets came from
    outside, and are not ours to move.
    """

    def __init__(
        self, clients: list[socket.socket], admin: socket.socket, listen_at: str | None, admin_at: str | None
    ) -> None:
        self.clients = clients
        self.admin = admin
        self.listen_at = listen_at
        self.admin_at = admin_at

    @classmethod
    def open(cls, settings: Settings, environ: MutableMapping[str, str], pid: int) -> "Ports":
        """Those that came with process `pid`, else our own. Raises ConfigError."""
        relay, meter = settings.relay, settings.meter
        handed = take_sockets(environ, pid)
        clients = handed.clients or _bind("relay.listen", relay.listen, relay.workers)
        ports = cls(
            clients,
            handed.admin or _bind("meter.admin", meter.admin, 1)[0],
            None if handed.clients else relay.listen,
            None if handed.admin else meter.admin,
        )
        ports.check_admin(settings)
        ports._share(relay.workers)
        return ports

    @classmethod
    def take(cls, handed: HandedPorts) -> "Ports":
        """Those that the supervisor before us left."""
        sockets = [socket.socket(fileno=fd) for fd in (*handed.clients, handed.admin)]
        for sock in sockets:
            sock.set_inheritable(False)
            sock.setblocking(False)
        return cls(sockets[:-1], sockets[-1], handed.listen_at, handed.admin_at)

    def to_hand(self) -> HandedPorts:
        """For `take`."""
        return HandedPorts(
            clients=[sock.fileno() for sock in self.clients],
            admin=self.admin.fileno(),
            listen_at=self.listen_at,
            admin_at=self.admin_at,
        )

    def copy(self) -> "Ports":
        """The same sockets, so that one of the two may move and the other is there to go back to."""
        return Ports(list(self.clients), self.admin, self.listen_at, self.admin_at)

    def close_but(self, others: "Ports") -> None:
        """Close the sockets that `others` does not have."""
        kept = {others.admin, *others.clients}
        for sock in (self.admin, *self.clients):
            if sock not in kept:
                sock.close()

    def move_clients(self, settings: Settings) -> None:
        """Go where the settings say, if we may, with a socket for each worker. Closes none.

        Raises ConfigError where the new address cannot be had: then nothing has changed.
        """
        relay = settings.relay
        if self.listen_at is not None:
            if relay.listen != self.listen_at:
                self.clients = _bind("relay.listen", relay.listen, relay.workers)
                self.listen_at = relay.listen
            host, port = parse_address(relay.listen)
            try:
                for _ in range(relay.workers - len(self.clients)):
                    self.clients.append(bind(host, port, shared=True))
            except OSError:
                pass  # a single worker's socket does not share its port
        self._share(relay.workers)

    def move_admin(self, settings: Settings) -> None:
        """The same for the admin port, which only a new meter can serve. Raises ConfigError."""
        at = settings.meter.admin
        if self.admin_at in (None, at):
            return
        (self.admin,) = _bind("meter.admin", at, 1)
        self.admin_at = at

    def check_admin(self, settings: Settings) -> None:
        """Raises ConfigError where a meter with these settings must not serve the admin port where it is.

        Who reaches it is told by the socket, not by the option: the rules are those of its address.
        """
        msgspec.structs.replace(settings.meter, admin=self.admin_at or name_of(self.admin))

    def of(self, index: int, workers: int) -> list[socket.socket]:
        """The sockets of worker `index`; the last one has to serve those left after a change to fewer."""
        return self.clients[index:] if index == workers - 1 else self.clients[index : index + 1]

    def close_clients(self) -> None:
        """Let nobody in any more, as far as it is ours to say."""
        for sock in self.clients:
            sock.close()
        self.clients = []

    def close(self) -> None:
        self.close_clients()
        self.admin.close()

    def _share(self, workers: int) -> None:
        """Where there are more workers than sockets, the first is served by several."""
        self.clients += [self.clients[0].dup() for _ in range(workers - len(self.clients))]


def _bind(key: str, text: str, copies: int) -> list[socket.socket]:
    host, port = parse_address(text)
    try:
        if copies == 1:
            return [bind(host, port, shared=False)]
        is_free(host, port)  # SO_REUSEPORT would let two proxies share a port without a word
        return [bind(host, port, shared=True) for _ in range(copies)]
    except OSError as exc:
        raise ConfigError(key, f"cannot listen on {text}: {exc.strerror}") from None
