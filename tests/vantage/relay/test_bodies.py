"""Invariant: a body leaves the relay as the very bytes that came in, whatever its framing and however cut."""

import asyncio
import hashlib
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.channel.frames import FrameKind
from tests.support.data import CORPUS
from tests.support.peer import Ending, chunk, chunked, play, scene
from tests.support.proxy import Tapped, stage
from tests.support.raw_client import Answer, request
from tests.support.upstream import CLOSE, RESET, Call, Upstream, answers, says

FIXTURES = sorted(CORPUS.glob("*.sse"))

SIZES = [0, 1, 2, 1_000, 65_535, 65_536, 65_537, 1_000_000]
CLOCKS = pytest.mark.parametrize("clock", ["mono", "kernel"])


def random_bytes(n: int, seed: int = 7) -> bytes:
    return random.Random(seed).randbytes(n)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def in_random_pieces(data: bytes, seed: int, sizes: tuple[int, ...]) -> list[bytes]:
    dice = random.Random(seed)
    pieces, at = [], 0
    while at < len(data):
        n = dice.choice(sizes)
        pieces.append(data[at : at + n])
        at += n
    return pieces


# ---------------------------------------------------------------- answers


@CLOCKS
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
@scene
async def test_an_answer_of_any_framing_and_size(framing: str, size: int, clock: str) -> None:
    data = random_bytes(size)
    fields = {
        "length": b"Content-Length: %d\r\n" % size,
        "chunked": b"Transfer-Encoding: chunked\r\n",
        "close": b"",
    }
    coded = chunked(*in_random_pieces(data, 3, (1, 7, 100, 4096, 70_000))) if framing == "chunked" else data
    async with stage(clock=clock) as (up, tap):
        head = b"HTTP/1.1 200 OK\r\n" + fields[framing] + b"\r\n"
        path = up.on(says(head + coded, then=CLOSE if framing == "close" else None))
        client = await tap.client()
        answer = await client.get(path)
        assert answer.whole
        assert answer.data == data
        assert answer.body.raw == coded, "the framing itself is passed, chunk by chunk"
        assert answer.ending is (Ending.FIN if framing == "close" else None)
        recorded = await tap.meter.closed(1)
        assert recorded.answer == head + coded
        assert recorded.closing.response_bytes == len(head + coded)


@scene
async def test_ten_megabytes_both_ways() -> None:
    data = random_bytes(10_000_000)
    digest = hashlib.sha256(data).digest()
    async with stage() as (up, tap):

        async def echo(call: Call) -> None:
            body = await call.body()
            assert hashlib.sha256(body).digest() == digest
            await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body), body)

        client = await tap.client()
        answer = await client.post(up.on(echo), data)
        assert hashlib.sha256(answer.data).digest() == digest


@scene
async def test_a_coded_body_passes_coded() -> None:
    data = b"\x1f\x8b" + random_bytes(5_000)
    async with stage() as (up, tap):
        path = up.on(answers(data, fields=b"Content-Encoding: gzip\r\nContent-Type: text/event-stream\r\n"))
        answer = await (await tap.client()).get(path, "Accept-Encoding: gzip, br")
        assert answer.data == data
        assert answer.head.get("content-encoding") == b"gzip"
        assert up.call(path).head.get("accept-encoding") == b"gzip, br"


@scene
async def test_a_dribbled_answer_head_included() -> None:
    coded = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX: 1\r\n\r\n"
    coded += b"".join(chunk(b"%d" % (i % 10)) for i in range(60)) + b"0;last\r\nX-T: 1\r\n\r\n"

    async def dribble(call: Call) -> None:
        for i in range(len(coded)):
            await call.say(coded[i : i + 1])
            await asyncio.sleep(0)

    async with stage() as (up, tap):
        answer = await (await tap.client()).get(up.on(dribble))
        assert answer.data == b"".join(b"%d" % (i % 10) for i in range(60))
        assert answer.body.trailers == [(b"X-T", b"1")]
        assert coded.endswith(answer.body.raw)


@scene
async def test_chunk_extensions_pass() -> None:
    coded = b'5;sig="a b";n=1\r\nhello\r\n0;end\r\n\r\n'
    async with stage() as (up, tap):
        path = up.on(says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + coded))
        client = await tap.client()
        for _ in range(2):
            answer = await client.get(path)
            assert (answer.data, answer.body.raw) == (b"hello", coded)


# ---------------------------------------------------------------- requests


@CLOCKS
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("framing", ["length", "chunked"])
@scene
async def test_a_request_of_any_framing_and_size(framing: str, size: int, clock: str) -> None:
    data = random_bytes(size)
    async with stage(clock=clock) as (up, tap):
        path = up.on(answers(b"got"))
        if framing == "length":
            raw, coded = request("POST", path, body=data), data
        else:
            coded = chunked(*in_random_pieces(data, 5, (1, 100, 5_000, 70_000)), trailers=b"X-T: 1\r\n")
            raw = request("POST", path, "Transfer-Encoding: chunked") + coded
        client = await tap.client()
        assert (await client.ask(raw)).data == b"got"
        payload = up.call(path).payload
        assert payload is not None
        assert payload.data == data
        assert payload.raw == coded
        recorded = await tap.meter.closed(1)
        assert recorded.request == raw
        assert recorded.closing.request_bytes == len(raw)


@scene
async def test_a_dribbled_request_head_included() -> None:
    async with stage() as (up, tap):
        path = up.on(answers())
        raw = request("POST", path, "X: 1", "Transfer-Encoding: chunked") + chunked(b"ab", b"c" * 20, b"d")
        client = await tap.client()
        for i in range(len(raw)):
            await client.send(raw[i : i + 1])
            await asyncio.sleep(0)
        assert (await client.answer()).status == 200
        assert up.call(path).payload.data == b"ab" + b"c" * 20 + b"d"  # type: ignore[union-attr]


@settings(max_examples=25, deadline=None)
@given(
    data=st.binary(max_size=3_000),
    up_cuts=st.lists(st.integers(0), max_size=5),
    down_cuts=st.lists(st.integers(0), max_size=5),
    chunk_sizes=st.lists(st.integers(1, 700), min_size=1, max_size=5),
    chunks_up=st.booleans(),
    chunks_down=st.booleans(),
)
def test_random_bodies_cut_at_random_places(
    data: bytes,
    up_cuts: list[int],
    down_cuts: list[int],
    chunk_sizes: list[int],
    chunks_up: bool,
    chunks_down: bool,
) -> None:
    """The same bytes up and down, the writes cut anywhere: also within heads, sizes and line ends."""
    pieces, at = [], 0
    while at < len(data):
        size = chunk_sizes[len(pieces) % len(chunk_sizes)]
        pieces.append(data[at : at + size])
        at += size
    coded = chunked(*pieces)

    async def one() -> None:
        async with stage() as (up, tap):

            async def echo(call: Call) -> None:
                assert await call.body() == data
                if chunks_down:
                    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + coded
                else:
                    raw = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data
                for piece in cut(raw, down_cuts):
                    await call.say(piece)
                    await asyncio.sleep(0)

            path = up.on(echo)
            if chunks_up:
                raw = request("PUT", path, "Transfer-Encoding: chunked") + coded
            else:
                raw = request("PUT", path, body=data)
            client = await tap.client()
            for _ in range(2):  # on a fresh connection to the upstream, and on a kept one
                for piece in cut(raw, up_cuts):
                    await client.send(piece)
                    await asyncio.sleep(0)
                answer = await client.answer(b"PUT")
                assert (answer.status, answer.data, answer.whole) == (200, data, True)
            assert up.connections == 1

    play(one())


@settings(max_examples=20, deadline=None)
@given(
    bodies=st.lists(st.binary(max_size=200), min_size=2, max_size=6),
    cuts=st.lists(st.integers(0), max_size=8),
    coded=st.booleans(),
)
def test_a_pipeline_cut_anywhere_is_answered_in_order(
    bodies: list[bytes], cuts: list[int], coded: bool
) -> None:
    async def one() -> None:
        async with stage() as (up, tap):

            async def echo(call: Call) -> None:
                body = await call.body()
                await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

            path = up.on(echo)
            raw = b""
            for body in bodies:
                if coded:
                    raw += request("POST", path, "Transfer-Encoding: chunked") + chunked(body)
                else:
                    raw += request("POST", path, body=body)
            client = await tap.client()
            for piece in cut(raw, cuts):
                await client.send(piece)
                await asyncio.sleep(0)
            assert [(await client.answer(b"POST")).data for _ in bodies] == bodies

    play(one())


# ---------------------------------------------------------------- the corpus of dialects


def fixture_of(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    return told


def writes_of(path: Path, told: dict[str, Any]) -> tuple[bytes, list[bytes], str | None]:
    """(coded body, the upstream's writes, what it does then) of a fixture."""
    if "raw" in told:
        raw = path.with_name(told["raw"]["file"]).read_bytes()
        writes = [raw[r["off"] : r["off"] + r["n"]] for r in told["raw"]["reads"]]
        assert b"".join(writes) == raw
        coded = raw.partition(b"\r\n\r\n")[2]
    else:
        body = path.read_bytes()
        response = told["response"]
        reads = [body[c["off"] : c["off"] + c["n"]] for c in told["chunks"]]
        assert b"".join(reads) == body
        lines = [f"HTTP/1.1 {response['status']} {response['reason']}"]
        lines += [f"{n}: {v}" for n, v in response["headers"] if n.lower() != "content-length"]
        if response["transfer"] == "chunked":
            lines.append("transfer-encoding: chunked")
            pieces = [*(chunk(r) for r in reads if r), b"0\r\n\r\n"]
        else:
            lines.append(f"content-length: {len(body)}")
            pieces = reads
        writes = ["\r\n".join([*lines, "", ""]).encode(), *pieces]
        coded = b"".join(pieces)
    ending = told["response"]["end"]
    then = RESET if ending == "reset" else CLOSE if told["response"]["transfer"] == "close" else None
    return coded, writes, then


async def play_fixture(up: Upstream, tap: Tapped, path: Path) -> tuple[Answer, dict[str, Any], bytes]:
    told = fixture_of(path)
    coded, writes, then = writes_of(path, told)

    async def script(call: Call) -> str | None:
        await call.body()
        for write in writes:
            await call.say(write)
            await asyncio.sleep(0.0005)
        if then == RESET:
            await call.peer.taken()  # or the reset would overtake the bytes
        return then

    client = await tap.client()
    body = json.dumps(told["request"]["body"]).encode()
    answer = await client.post(up.on(script), body, "Content-Type: application/json")
    client.close()
    return answer, told, coded


@scene
async def test_every_fixture_of_the_corpus_passes_byte_for_byte() -> None:
    async with stage() as (up, tap):
        for seq, path in enumerate(FIXTURES, 1):
            answer, told, coded = await play_fixture(up, tap, path)
            assert answer.status == told["response"]["status"], path.name
            body = path.read_bytes()
            if told["response"]["end"] == "clean":
                assert answer.whole, path.name
                assert answer.data == body, path.name
                assert answer.body.raw == coded, path.name
                assert hashlib.sha256(answer.data).hexdigest() == told["body"]["sha256"], path.name
            else:
                assert not answer.whole, path.name
                assert body.startswith(answer.data), path.name
            recorded = await tap.meter.closed(seq)
            seen = recorded.answer.partition(b"\r\n\r\n")[2]
            assert seen == coded, f"{path.name}: the tap saw something else than the client"


@scene
async def test_separate_writes_of_a_fixture_are_separate_stamps() -> None:
    """What the upstream paused between, the tap must not see as one."""
    path = next(p for p in FIXTURES if p.stem == "chunked_trailers")
    _, writes, _ = writes_of(path, fixture_of(path))

    async def script(call: Call) -> None:
        await call.body()
        for write in writes:
            await call.say(write)
            await call.peer.taken()
            await asyncio.sleep(0.01)

    async with stage() as (up, tap):
        client = await tap.client()
        await client.post(up.on(script), b"{}")
        recorded = await tap.meter.closed(1)
        reads = recorded.of(FrameKind.RESPONSE_DATA)
        assert [f.data for f in reads] == writes[1:]
        gaps = [b.t_ns - a.t_ns for a, b in pairwise(reads)]
        assert all(gap > 5_000_000 for gap in gaps), gaps
