"""The ASGI middleware between hand-written apps and a server reduced to its messages.

Invariant: what passes between app and server is what would pass without it, to the object.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap import native
from llmtap.channel.frames import FrameKind
from llmtap.exchange.outcome import Outcome
from llmtap.protocol.http1 import parse_request_head
from llmtap.vantage.middleware.asgi import Message, Receive, Scope, Send
from tests.support.servers.peer import play, wait_until
from tests.vantage.middleware.asgi import Server, asked, http_scope, said, watched

OPEN, DATA, END, SUBMIT = FrameKind.OPEN, FrameKind.REQUEST_DATA, FrameKind.REQUEST_END, FrameKind.SUBMIT
HEAD, BODY, OVER, CLOSE = (
    FrameKind.RESPONSE_HEAD,
    FrameKind.RESPONSE_DATA,
    FrameKind.RESPONSE_END,
    FrameKind.CLOSE,
)
EVENT_STREAM = [(b"content-type", b"text/event-stream")]
Tell = Callable[[Receive, Send], Awaitable[None]]


def app_of(tell: Tell) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await tell(receive, send)

    return app


async def take_all(receive: Receive) -> bytes:
    """The request's body, read as apps do."""
    body = b""
    while True:
        message = await receive()
        assert message["type"] == "http.request", message
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body


def answering(*messages: Message, reads: bool = True) -> Tell:
    async def tell(receive: Receive, send: Send) -> None:
        if reads:
            await take_all(receive)
        for message in messages:
            await send(message)

    return tell


STREAM = said(b"data: one\n\n", b"data: two\n\n", b"", headers=EVENT_STREAM)
WHOLE = said(b'{"ok":true}', headers=[(b"content-type", b"application/json"), (b"content-length", b"11")])


@pytest.mark.parametrize(
    ("request_messages", "answer", "kinds"),
    [
        pytest.param(
            asked(b"{}"), STREAM, [OPEN, DATA, END, SUBMIT, HEAD, BODY, BODY, OVER, CLOSE], id="event stream"
        ),
        pytest.param(
            asked(b"{}"), WHOLE, [OPEN, DATA, END, SUBMIT, HEAD, BODY, OVER, CLOSE], id="JSON in one piece"
        ),
        pytest.param(
            asked(b"{", b"", b"}"),
            WHOLE,
            [OPEN, DATA, DATA, END, SUBMIT, HEAD, BODY, OVER, CLOSE],
            id="a request in several messages",
        ),
        pytest.param(
            asked(b"{}"), said(status=204), [OPEN, DATA, END, SUBMIT, HEAD, OVER, CLOSE], id="no content"
        ),
        pytest.param(
            asked(b""), said(b"", status=500), [OPEN, END, SUBMIT, HEAD, OVER, CLOSE], id="an error, empty"
        ),
        pytest.param(
            asked(b"{}"),
            [*said()[:1], {"type": "http.response.body"}],
            [OPEN, DATA, END, SUBMIT, HEAD, OVER, CLOSE],
            id="messages without their optional keys",
        ),
    ],
)
async def test_an_exchange_is_told_in_the_frames_of_a_relay(
    request_messages: list[Message], answer: list[Message], kinds: list[FrameKind]
) -> None:
    async with watched(app_of(answering(*answer))) as of:
        server = await of.call(request_messages)
        assert all(a is b for a, b in zip(server.sent, answer, strict=True)), "the very objects"
        seen = await of.seen()
        assert seen.kinds == kinds
        assert seen.data(DATA) == b"".join(m["body"] for m in request_messages)
        assert seen.data(BODY) == b"".join(m.get("body", b"") for m in answer[1:])
        assert seen.closing.outcome == Outcome.COMPLETE
        assert seen.closing.status == answer[0]["status"]
        stamps = [f.t_ns for f in seen.frames]
        assert stamps == sorted(stamps)
        await wait_until(lambda: of.ledger.measured == 1)


@pytest.mark.parametrize(
    ("version", "headers", "expected"),
    [
        ("1.1", [("host", "a")], ((1, 1), b"a")),
        ("1.0", [], ((1, 0), None)),
        ("2", [("content-length", "2")], ((1, 1), b"")),
        ("2", [("host", "b"), ("content-length", "2")], ((1, 1), b"b")),
    ],
)
async def test_requests_of_other_versions_become_heads_that_can_be_read(
    version: str, headers: list[tuple[str, str]], expected: tuple[tuple[int, int], bytes | None]
) -> None:
    async with watched(app_of(answering(*WHOLE))) as of:
        await of.call(asked(b"{}"), http_version=version, headers=headers)
        head = parse_request_head((await of.seen()).data(OPEN))
        hosts = [value for name, value in head.headers if name == b"host"]
        assert (head.version, hosts[0] if hosts else None) == expected


@pytest.mark.parametrize("headers", [[("host", "a")], [("host", "a"), ("content-length", "0")]])
async def test_a_request_without_a_body_is_whole_at_the_call(headers: list[tuple[str, str]]) -> None:
    async with watched(app_of(answering(*WHOLE, reads=False))) as of:
        await of.call(asked(), method="GET", headers=headers)
        seen = await of.seen()
        assert seen.kinds == [OPEN, END, SUBMIT, HEAD, BODY, OVER, CLOSE]
        assert seen.one(END).t_ns == seen.one(OPEN).t_ns


async def test_what_is_read_after_the_answer_began_is_told_and_moves_no_submit() -> None:
    async def tell(receive: Receive, send: Send) -> None:
        await send(STREAM[0])
        await take_all(receive)
        for message in STREAM[1:]:
            await send(message)

    async with watched(app_of(tell)) as of:
        await of.call(asked(b"{", b"}"), headers=[("host", "a"), ("transfer-encoding", "chunked")])
        seen = await of.seen()
        assert seen.kinds == [OPEN, SUBMIT, HEAD, DATA, DATA, END, BODY, BODY, OVER, CLOSE]
        assert seen.one(SUBMIT).t_ns == seen.one(OPEN).t_ns


async def test_background_work_is_no_part_of_the_exchange() -> None:
    go_on = asyncio.Event()

    async def tell(receive: Receive, send: Send) -> None:
        await answering(*STREAM)(receive, send)
        await go_on.wait()
        raise RuntimeError("in the background")

    async with watched(app_of(tell)) as of:
        task = asyncio.create_task(of.call(asked(b"{}")))
        seen = await of.seen()
        assert not task.done()
        assert seen.closing.outcome == Outcome.COMPLETE
        go_on.set()
        with pytest.raises(RuntimeError, match="background"):
            await task
        await wait_until(lambda: of.ledger.measured == 1)


class Oops(Exception):
    pass


@pytest.mark.parametrize(
    ("messages", "error", "outcome", "status", "told"),
    [
        ([], Oops("sk-secret"), "upstream_error", 500, "the app raised Oops without an answer"),
        (STREAM[:2], Oops("sk-secret"), "truncated", 200, "the app raised Oops in the middle of its answer"),
        (
            STREAM[:1],
            asyncio.CancelledError(),
            "truncated",
            200,
            "the app was cancelled in the middle of its answer",
        ),
        (STREAM, Oops("sk-secret"), "complete", 200, None),
        ([], None, "upstream_error", 500, "the app returned without an answer"),
        (STREAM[:2], None, "truncated", 200, "the app returned in the middle of its answer"),
    ],
)
async def test_an_app_that_ends_too_early(
    messages: list[Message], error: BaseException | None, outcome: str, status: int, told: str | None
) -> None:
    async def tell(receive: Receive, send: Send) -> None:
        await answering(*messages)(receive, send)
        if error is not None:
            raise error

    async with watched(app_of(tell)) as of:
        try:
            await of.call(asked(b"{}"))
        except (Oops, asyncio.CancelledError) as raised:
            assert raised is error
        else:
            assert error is None
        closing = (await of.seen()).closing
        assert (closing.outcome, closing.status, closing.error) == (outcome, status, told)


@pytest.mark.parametrize("known_from", ["receive", "send"])
async def test_a_client_that_leaves(known_from: str) -> None:
    async def tell(receive: Receive, send: Send) -> None:
        await answering(*STREAM[:2])(receive, send)
        if known_from == "receive":
            assert (await receive())["type"] == "http.disconnect"
        await send(STREAM[2])

    async with watched(app_of(tell)) as of:
        server = Server(asked(b"{}"), breaks_after=2 if known_from == "send" else None)
        server.left.set()
        with pytest.raises(OSError, match="has left") if known_from == "send" else nullcontext():
            await of.app(http_scope(), server.receive, server.send)
        seen = await of.seen()
        assert seen.closing.outcome == Outcome.CLIENT_CANCELLED
        assert seen.data(BODY) == STREAM[1]["body"], "what was not delivered is not told"
        assert server.sent == STREAM[: 2 if known_from == "send" else 3], "the app is not kept from anything"


async def test_a_file_that_the_server_sends_ends_the_answer() -> None:
    message: Message = {"type": "http.response.pathsend", "path": "/nowhere"}
    async with watched(app_of(answering(WHOLE[0], message))) as of:
        assert (await of.call(asked(b"{}"))).sent == [WHOLE[0], message]
        assert (await of.seen()).closing.outcome == Outcome.COMPLETE


async def test_other_kinds_of_bytes_are_taken_as_they_are() -> None:
    body = bytearray(b"abc")
    first: Message = {"type": "http.response.body", "body": memoryview(b"123"), "more_body": True}
    async with watched(
        app_of(answering(WHOLE[0], first, {"type": "http.response.body", "body": body}))
    ) as of:
        await of.call(asked(b"{}"))
        body[:] = b"xyz"
        assert (await of.seen()).data(BODY) == b"123abc"


@given(
    request=st.lists(st.binary(max_size=40), min_size=1, max_size=6),
    answer=st.lists(st.binary(max_size=40), min_size=1, max_size=8),
)
def test_bodies_pass_untouched_wherever_they_are_cut(request: list[bytes], answer: list[bytes]) -> None:
    play(_pass_untouched(request, answer))


async def _pass_untouched(request: list[bytes], answer: list[bytes]) -> None:
    got: list[bytes] = []

    async def tell(receive: Receive, send: Send) -> None:
        got.append(await take_all(receive))
        for message in said(*answer):
            await send(message)

    async with watched(app_of(tell)) as of:
        server = await of.call(asked(*request))
        assert got == [b"".join(request)]
        assert server.sent == said(*answer)
        seen = await of.seen()
        assert seen.data(DATA) == b"".join(request)
        assert seen.data(BODY) == b"".join(answer)
        assert len(seen.of(BODY)) == sum(map(bool, answer))


# ---------------------------------------------------------------- the meter's comings and goings


async def test_a_meter_that_dies_costs_what_ran_and_is_found_again() -> None:
    go_on = asyncio.Event()

    async def tell(receive: Receive, send: Send) -> None:
        await send(STREAM[0])
        await go_on.wait()
        for message in STREAM[1:]:
            await send(message)

    async with watched(app_of(tell)) as of:
        await wait_until(lambda: of.meter.hellos)
        running = [asyncio.create_task(of.call(asked(b""))) for _ in range(3)]
        await wait_until(lambda: len(of.meter.frames) >= 3 * len((OPEN, SUBMIT, HEAD)))
        of.meter.stop()
        await wait_until(lambda: not of.emitter.tap.connected)
        assert of.ledger.dropped == {"meter_lost": 3}
        go_on.set()
        for task in running:
            assert (await task).sent == STREAM
        assert (await of.call(asked(b""))).sent == STREAM
        assert of.ledger.dropped == {"meter_lost": 3, "no_meter": 1}
        await of.meter.start()
        await wait_until(lambda: len(of.meter.hellos) == 2)
        await of.call(asked(b""))
        await wait_until(lambda: of.ledger.measured == 1)
        assert of.ledger.opened == 5
        assert of.meter.hellos[1].guest, "a meter does not wait for it at its end"
        assert of.meter.hellos[1].implementation == native.NAME
