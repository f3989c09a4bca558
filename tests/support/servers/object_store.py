"""An S3 of our own on the loopback, and a wire to it that can be slow, refuse, hang, or be cut.

The store is moto's server. The wire looks at the beginning of what the client sends: enough to tell a put.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection

from moto.server import ThreadedMotoServer

_503 = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@contextmanager
def object_store(bucket: str) -> Iterator[int]:
    """A store with that bucket; its port."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    try:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("PUT", f"/{bucket}")
        assert connection.getresponse().status == 200
        connection.close()
        yield port
    finally:
        server.stop()


class Wire:
    """Carries connections to `port`, as well as its settings let it."""

    def __init__(self, port: int) -> None:
        self.put_delay_s = 0.0
        self.answer_503 = False
        self.hang = False
        self.puts = 0
        """Requests that began with PUT and were let through."""
        self.refused = 0
        """Requests that were answered by 503 or not at all."""
        self._target = port
        self._closing = threading.Event()
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.port = 0
        self.connect()

    def connect(self) -> None:
        """The store is there (again, on the same port)."""
        self._closing = threading.Event()
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", self.port))
        self._listener.listen()
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener, self._closing), daemon=True).start()

    def cut(self) -> None:
        """The store is gone: connections are refused."""
        self._closing.set()
        if self._listener is not None:
            # On Linux this wakes the accept, too.
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for one in list(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket, closing: threading.Event) -> None:
        while not closing.is_set():
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(client, closing), daemon=True).start()

    def _carry(self, client: socket.socket, closing: threading.Event) -> None:
        with client, socket.create_connection(("127.0.0.1", self._target)) as server:
            self._open |= {client, server}
            back = threading.Thread(target=_copy, args=(server, client), daemon=True)
            back.start()
            with suppress(OSError):
                while data := client.recv(1 << 16):
                    if self.answer_503 or self.hang:
                        self.refused += 1
                        if self.hang:
                            closing.wait()
                        else:
                            client.sendall(_503)
                        break
                    if data.startswith(b"PUT "):
                        self.puts += 1
                        closing.wait(self.put_delay_s)
                    server.sendall(data)
            for one in (client, server):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            back.join(5)
            self._open -= {client, server}


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
