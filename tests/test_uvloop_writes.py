"""A watch on uvloop: what is written inside a callback leaves at once, not when the callback has ended.

On uvloop before 0.23 a transport's write waited for the end of the callback it was made in, so that whatever
followed it delayed the client (STYLE.md, "The way of a chunk"). The relay counts on it wherever it uses
transports, that is, for TLS. Plain sockets are the control: for them it is a system call.
"""

import asyncio
import socket
import threading

import pytest
import uvloop

BOUND_S = 30.0
"""The callback waits for the peer to have the byte. This passes only if the write waits for the callback."""


@pytest.mark.parametrize("how", ["transport", "socket"])
def test_a_write_inside_a_callback_leaves_at_once(how: str) -> None:
    near, far = socket.socketpair()
    near.setblocking(False)
    came = threading.Event()
    peer = threading.Thread(target=lambda: far.recv(1) and came.set())
    peer.start()

    async def main() -> bool:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=near)

        def callback() -> None:
            (transport.write if how == "transport" else near.send)(b"x")
            done.set_result(came.wait(BOUND_S))

        loop.call_soon(callback)
        left: bool = await done
        transport.close()
        return left

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main())
    peer.join()
    far.close()


def test_uvloop_is_new_enough() -> None:
    assert tuple(int(part) for part in uvloop.__version__.split(".")[:2]) >= (0, 23)
