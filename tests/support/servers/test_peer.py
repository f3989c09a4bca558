"""The tests' own reader of HTTP: what it calls whole, cut or closed."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.servers.peer import Ending, Gone, Peer, at_end, play


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Peer, Peer]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    peers = Peer(one), Peer(other)
    try:
        yield peers
    finally:
        for peer in peers:
            peer.close()


@pytest.mark.parametrize("how", list(Ending))
@pytest.mark.parametrize("said", [b"5\r\nhello\r\n3\r\nab", b"5\r\nhello\r\n0\r\n"])
async def test_a_body_that_is_cut_is_gone_with_what_there_was(said: bytes, how: Ending) -> None:
    async with pair() as (near, far):
        await far.send(said)
        reading = asyncio.ensure_future(near.chunked_payload())
        await far.taken()
        far.reset() if how is Ending.RST else far.close()
        with pytest.raises(Gone) as gone:
            await reading
        assert gone.value.how is how
        assert gone.value.got == b"hello"


async def test_a_reader_is_not_kind_to_bad_chunks() -> None:
    async with pair() as (near, far):
        await far.send(b"3\r\nabcXX0\r\n\r\n")
        with pytest.raises(AssertionError):
            await near.chunked_payload()


def test_what_a_callback_raises_and_a_task_nobody_asked_about_fail_the_test() -> None:
    async def fails() -> None:
        raise ValueError("unseen")

    async def quiet() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(0.01)

    async def forgets() -> None:
        asyncio.ensure_future(fails())  # noqa: RUF006
        await asyncio.sleep(0.01)

    for work, said in ((quiet, "ZeroDivisionError"), (forgets, "unseen")):
        with pytest.raises(AssertionError, match=said):
            play(work())


def test_a_play_that_does_not_end_is_ended() -> None:
    with pytest.raises(TimeoutError):
        play(asyncio.sleep(10), limit_s=0.02)


def test_actions_at_the_end_run_once_also_if_the_scene_fails() -> None:
    calls: list[str] = []

    async def fail() -> None:
        at_end(lambda: calls.append("end"))
        raise LookupError("of the scene")

    with pytest.raises(LookupError):
        play(fail())
    play(asyncio.sleep(0))
    assert calls == ["end"]
