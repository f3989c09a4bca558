"""A watch on uvloop: what is written inside a callback leaves at once, not when the callback has ended.

On uvloop before 0.23 a transport's write waited for the end of the callback it was made in, so that whatever
followed it delayed the client (STYLE.md, "The way of a chunk"). The relay counts on it wherever it uses
transports, that is, for TLS. Plain sockets are the control: for them it is a system call.
"""

import asyncio
import socket
import threading
import time

import pytest
import uvloop

WORK_S = 0.5
"""How long the callback goes on after its write. The peer has to have the byte in less than half of it."""


class Peer(threading.Thread):
    """The other end, on a thread of its own: writes down when its byte came."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(daemon=True)
        self._sock = sock
        self.came_at: float | None = None

    def run(self) -> None:
        self._sock.settimeout(60)
        if self._sock.recv(1):
            self.came_at = time.monotonic()


def delay_of(how: str) -> float:
    """Seconds from a write inside a callback, which then works on, to the byte at the peer."""
    near, far = socket.socketpair()
    near.setblocking(False)
    peer = Peer(far)
    peer.start()

    async def main() -> float:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=near)

        def callback() -> None:
            wrote_at = time.monotonic()
            if how == "transport":
                transport.write(b"x")
            else:
                near.send(b"x")
            while time.monotonic() - wrote_at < WORK_S:
                time.sleep(0.001)  # busy as far as the loop is concerned, but not for the other thread
            done.set_result(wrote_at)

        loop.call_soon(callback)
        wrote_at: float = await done
        await loop.run_in_executor(None, peer.join, 60)
        transport.close()
        assert peer.came_at is not None
        return peer.came_at - wrote_at

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        delay = runner.run(main())
    far.close()
    return delay


@pytest.mark.parametrize("how", ["transport", "socket"])
def test_a_write_inside_a_callback_leaves_at_once(how: str) -> None:
    # What waits for the end of its callback does so each time; a peer that gets no CPU, now and then.
    assert any(delay_of(how) < WORK_S / 2 for _ in range(5))


def test_uvloop_is_new_enough() -> None:
    assert tuple(int(part) for part in uvloop.__version__.split(".")[:2]) >= (0, 23)
