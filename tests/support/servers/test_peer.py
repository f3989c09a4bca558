"""The tests' own reader of HTTP: what it calls whole, cut or closed."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.servers.peer import (
    Ending,
    Gone,
    Head,
    Peer,
    chunk,
    chunked,
    fields_of,
    play,
    scene,
    wait_until,
)


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


def test_a_head_is_cut_into_lines_and_fields() -> None:
    head = Head.parse(b"GET / HTTP/1.1\r\nHost: a\r\nX: 1\r\nx:\t2 \r\n\r\n")
    assert head.line == b"GET / HTTP/1.1"
    assert head.fields == [(b"Host", b"a"), (b"X", b"1"), (b"x", b"2")]
    assert (head.get("host"), head.get("none"), head.all("X")) == (b"a", None, [b"1", b"2"])
    with pytest.raises(AssertionError):
        head.get("x")
    assert fields_of([b"A: b:c"]) == [(b"A", b"b:c")]


def test_chunks_are_written_as_the_standard_says() -> None:
    assert chunk(b"x" * 26) == b"1a\r\n" + b"x" * 26 + b"\r\n"
    assert chunked() == b"0\r\n\r\n"
    assert chunked(b"a", b"", b"bc", trailers=b"T: 1\r\n") == b"1\r\na\r\n2\r\nbc\r\n0\r\nT: 1\r\n\r\n"


@scene
async def test_what_is_not_used_is_kept_for_the_next_question() -> None:
    async with pair() as (near, far):
        await far.send(b"line\r\n12345rest", b" of it")
        assert await near.until(b"\r\n") == b"line\r\n"
        assert await near.exactly(5) == b"12345"
        assert await near.exactly(10) == b"rest of it"
        assert await near.silent_for(0.01)
        far.half_close()
        assert await near.to_end() == (b"", Ending.FIN)


@scene
async def test_a_chunked_body_is_read_with_its_very_bytes() -> None:
    raw = b"5;x=y\r\nhello\r\n01\r\n!\r\n0\r\nT: 1\r\n\r\n"
    async with pair() as (near, far):
        await far.send(*[raw[i : i + 1] for i in range(len(raw))], b"next")
        payload = await near.chunked_payload()
        assert (payload.data, payload.raw, payload.trailers) == (b"hello!", raw, [(b"T", b"1")])
        assert await near.exactly(4) == b"next"


@pytest.mark.parametrize("how", list(Ending))
@pytest.mark.parametrize("said", [b"5\r\nhello\r\n", b"5\r\nhello\r\n3\r\nab", b"5\r\nhello\r\n0\r\n"])
@scene
async def test_a_body_that_is_cut_is_gone_with_what_there_was(said: bytes, how: Ending) -> None:
    async with pair() as (near, far):
        await far.send(said)
        reading = asyncio.ensure_future(near.chunked_payload())
        await asyncio.sleep(0.01)
        far.reset() if how is Ending.RST else far.close()
        with pytest.raises(Gone) as gone:
            await reading
        assert gone.value.how is how
        assert gone.value.got == b"hello"


@scene
async def test_a_reader_is_not_kind_to_bad_chunks() -> None:
    async with pair() as (near, far):
        await far.send(b"3\r\nabcXX0\r\n\r\n")
        with pytest.raises(AssertionError):
            await near.chunked_payload()


@scene
async def test_waiting_has_an_end() -> None:
    with pytest.raises(AssertionError, match="still not so"):
        await wait_until(lambda: False, 0.01)
    await wait_until(lambda: True, 0)


def test_what_a_callback_raises_fails_the_test() -> None:
    async def quiet() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(0.01)

    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        play(quiet())


def test_a_task_nobody_asked_about_fails_the_test() -> None:
    async def forgets() -> None:
        async def fails() -> None:
            raise ValueError("unseen")

        task = asyncio.ensure_future(fails())
        await asyncio.sleep(0)
        del task
        await asyncio.sleep(0)

    with pytest.raises(AssertionError, match="unseen"):
        play(forgets())


def test_a_play_that_does_not_end_is_ended() -> None:
    with pytest.raises(TimeoutError):
        play(asyncio.sleep(10), limit_s=0.02)
