"""Recorded dialects of tests/data, and an upstream that replays them with their cuts and times.

Every piece is sent in a system call of its own, when it is due or as soon after as this process gets to it.
When it really went out is noted on both sides of the call: measurements are held to that, not to the plan.
"""

import asyncio
import json
import socket
from dataclasses import dataclass, field
from functools import cached_property
from time import monotonic_ns
from typing import Any

from tests.support.data import CORPUS
from tests.support.servers.peer import Gone, Peer, chunk

NAMES = sorted(p.stem for p in CORPUS.glob("*.json"))


@dataclass(slots=True)
class Piece:
    """What one system call sends."""

    due_ms: float
    """Since the last byte of the request."""
    data: bytes
    read: int | None = None
    """Which of the recording's `chunks` it holds; None for heads, for framing, and in recordings of both."""


class Recorded:
    """One fixture."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.doc: dict[str, Any] = json.loads((CORPUS / f"{name}.json").read_text(encoding="utf-8"))
        self.body = (CORPUS / self.doc["body"]["file"]).read_bytes()

    @property
    def expect(self) -> dict[str, Any]:
        expect: dict[str, Any] = self.doc["expect"]
        return expect

    @property
    def length_ms(self) -> float:
        return float(self.doc["response"]["end_ms"])

    @property
    def clean(self) -> bool:
        return bool(self.doc["response"]["end"] == "clean")

    @property
    def decoded(self) -> bytes:
        """The body without its content-encoding."""
        file = self.doc["body"].get("decoded_file")
        return (CORPUS / file).read_bytes() if file else self.body

    def request(self, *fields: str) -> bytes:
        """The recorded request, with more fields."""
        asked = self.doc["request"]
        body = json.dumps(asked["body"]).encode()
        lines = [f"{asked['method']} {asked['path']} HTTP/1.1", "Host: gateway.test"]
        lines += [f"{name}: {value}" for name, value in asked["headers"].items()]
        lines += [f"Content-Length: {len(body)}", *fields]
        return "\r\n".join([*lines, "", ""]).encode() + body

    @cached_property
    def pieces(self) -> list[Piece]:
        """The answer on the wire, in the order in which it goes out."""
        if "raw" in self.doc:
            raw = (CORPUS / self.doc["raw"]["file"]).read_bytes()
            reads = self.doc["raw"]["reads"]
            return [Piece(r["t_ms"], raw[r["off"] : r["off"] + r["n"]]) for r in reads]
        answer = self.doc["response"]
        fields = [f"{name}: {value}" for name, value in answer["headers"]]
        chunked = answer["transfer"] == "chunked"
        if chunked:
            fields.append("transfer-encoding: chunked")
        elif answer["transfer"] == "content-length":
            fields.append(f"content-length: {len(self.body)}")
        start = f"HTTP/{answer['http_version']} {answer['status']} {answer['reason']}"
        pieces = [Piece(answer["headers_ms"], "\r\n".join([start, *fields, "", ""]).encode())]
        for i, read in enumerate(self.doc["chunks"]):
            data = self.body[read["off"] : read["off"] + read["n"]]
            pieces.append(Piece(read["t_ms"], chunk(data) if chunked else data, i))
        if chunked and self.clean:
            trailers = "".join(f"{name}: {value}\r\n" for name, value in answer.get("trailers") or ())
            pieces.append(Piece(answer["end_ms"], b"0\r\n" + trailers.encode() + b"\r\n"))
        return pieces

    @property
    def wire(self) -> bytes:
        """The whole answer, head and framing included."""
        return b"".join(p.data for p in self.pieces)


@dataclass(slots=True)
class Played:
    """When an answer really went out: ns of the monotonic clock, before and after each system call."""

    asked_ns: int
    sent: list[tuple[int, int]] = field(default_factory=list)
    """One for each piece."""

    def window(self, recorded: Recorded, first: int, last: int) -> tuple[int, int]:
        """From before the first to after the last of these of the recording's `chunks`."""
        at_ms = [recorded.doc["chunks"][i]["t_ms"] for i in (first, last)]
        if "raw" in recorded.doc:  # its pieces hold framing too, but went out at the same moments
            return self.moment(recorded, at_ms[0])[0], self.moment(recorded, at_ms[1])[1]
        spans = {p.read: span for p, span in zip(recorded.pieces, self.sent, strict=True)}
        return spans[first][0], spans[last][1]

    def moment(self, recorded: Recorded, t_ms: float) -> tuple[int, int]:
        """From before to after what was due at `t_ms`, the head left out where anything else was."""
        spans = zip(recorded.pieces[1:], self.sent[1:], strict=True)
        there = [span for piece, span in spans if piece.due_ms == t_ms] or [self.sent[0]]
        return there[0][0], there[-1][1]


class Player:
    """An upstream that answers a request with the recording its X-Request-Id names, once each.

    A recording longer than `longest_ms` is played faster, so that it lasts as long.
    """

    def __init__(self, recordings: dict[str, Recorded], longest_ms: float = 4_000.0) -> None:
        self._longest_ms = longest_ms
        self.played: dict[str, Played] = {}
        self.errors: list[BaseException] = []
        self._recordings = recordings
        self._sock = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._sock.setblocking(False)
        self._tasks = {asyncio.get_running_loop().create_task(self._accept())}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._sock.getsockname()[1]}"

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(self._sock)
            self._tasks.add(loop.create_task(self._serve(Peer(sock))))

    async def _serve(self, peer: Peer) -> None:
        try:
            while True:
                head = await peer.head()
                await peer.exactly(int(head.get("content-length") or 0))
                asked_ns = monotonic_ns()
                recorded = self._recordings[(head.get("x-request-id") or b"").decode()]
                if not await self._play(peer, recorded, Played(asked_ns)):
                    break
        except (Gone, ConnectionError):
            pass  # the proxy closes connections it no longer needs
        except Exception as exc:
            self.errors.append(exc)
        peer.close()

    async def _play(self, peer: Peer, recorded: Recorded, played: Played) -> bool:
        """Plays it; whether the connection can serve another request."""
        self.played[recorded.name] = played
        pace = min(1.0, self._longest_ms / max(recorded.length_ms, 1.0))
        for piece in recorded.pieces:
            await _until(played.asked_ns + round(piece.due_ms * pace * 1e6))
            before_ns = monotonic_ns()
            await peer.send(piece.data)
            played.sent.append((before_ns, monotonic_ns()))
        transfer = recorded.doc["response"]["transfer"]
        if recorded.clean and transfer != "close":
            return True
        await _until(played.asked_ns + round(recorded.length_ms * pace * 1e6))
        if not recorded.clean:
            peer.reset()
        return False


async def _until(due_ns: int) -> None:
    # A loop's timers are a hint, whole milliseconds and sometimes early: look at the clock again.
    while (left_ns := due_ns - monotonic_ns()) > 0:
        await asyncio.sleep(left_ns / 1e9)
