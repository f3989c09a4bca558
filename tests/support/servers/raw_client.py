"""A client that sends exactly the bytes it is told to, and reads answers with a reader of its own."""

import asyncio
import socket
from dataclasses import dataclass, field

from tests.support.servers.peer import Ending, Gone, Head, Payload, Peer


def request(
    method: str,
    path: str,
    *fields: str,
    body: bytes | None = None,
    host: str | None = "client.test",
    version: str = "1.1",
) -> bytes:
    """A request; with a body comes its Content-Length."""
    lines = [f"{method} {path} HTTP/{version}"]
    if host is not None:
        lines.append(f"Host: {host}")
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, *fields, "", ""]).encode("latin-1") + (body or b"")


@dataclass(slots=True)
class Answer:
    """An answer as the client saw it."""

    head: Head
    body: Payload
    interim: list[Head]
    ending: Ending | None
    """How the connection ended while the answer was read; None: it is still open."""
    whole: bool
    """True when the answer's own framing says that nothing of it is missing."""
    fields: list[tuple[bytes, bytes]] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.head.line.split(b" ")[1])

    @property
    def data(self) -> bytes:
        return self.body.data


class RawClient(Peer):
    """A connection to the relay."""

    @classmethod
    async def connect(
        cls, port: int, *, receive_buffer: int | None = None, send_buffer: int | None = None
    ) -> "RawClient":
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        if send_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        return cls(sock)

    async def ask(self, raw: bytes) -> Answer:
        """Send a request, read its answer."""
        await self.send(raw)
        return await self.answer(raw.split(b" ", 1)[0])

    async def get(self, path: str, *fields: str) -> Answer:
        return await self.ask(request("GET", path, *fields))

    async def post(self, path: str, body: bytes, *fields: str) -> Answer:
        return await self.ask(request("POST", path, *fields, body=body))

    async def answer(self, method: bytes = b"GET") -> Answer:
        """The next final answer and the interim ones before it (RFC 9112 6.3 for where it ends).

        Raises Gone when the connection ends before the head is complete.
        """
        interim = []
        while True:
            head = await self.head()
            status = int(head.line.split(b" ")[1])
            if status >= 200 or status == 101:
                break
            interim.append(head)
        if method == b"HEAD" or status in (101, 204, 304):
            return Answer(head, Payload(), interim, None, True)
        coding = head.get("transfer-encoding")
        length = head.get("content-length")
        assert coding is None or length is None, "two framings in one answer"
        try:
            if coding is not None:
                assert coding.lower() == b"chunked"
                return Answer(head, await self.chunked_payload(), interim, None, True)
            if length is not None:
                data = await self.exactly(int(length))
                return Answer(head, Payload(data, data), interim, None, True)
        except Gone as gone:
            return Answer(head, Payload(gone.got, gone.got), interim, gone.how, False)
        data, how = await self.to_end()
        return Answer(head, Payload(data, data), interim, how, how is Ending.FIN)
