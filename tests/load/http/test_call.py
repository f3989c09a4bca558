"""Whatever a server does, a request ends once, as one Exchange that says what happened."""

import asyncio

import pytest

import llmtap.load.http as module
from llmtap.clock import SystemClock
from llmtap.exchange.outcome import Outcome
from llmtap.load.http import HEAD_BYTES_MAX
from llmtap.load.sending import DeferredWork
from tests.support.servers.live_proxy import port_free
from tests.support.servers.loading import BODY, events, sender_to, streamed_answer
from tests.support.servers.peer import chunked, wait_until
from tests.support.servers.upstream import (
    CLOSE,
    RESET,
    Call,
    Script,
    answers,
    says,
    unanswered_port,
    upstream,
)

COMPLETE, ERROR, CANCELLED = Outcome.COMPLETE, Outcome.UPSTREAM_ERROR, Outcome.CLIENT_CANCELLED
CUT, GONE, LATE = Outcome.TRUNCATED, Outcome.UPSTREAM_RESET, Outcome.UPSTREAM_TIMEOUT

JSON = (
    b'{"id":"c","object":"chat.completion","model":"m",'
    b'"choices":[{"index":0,"message":{"content":"hi"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":3,"completion_tokens":3}}'
)
STREAM = streamed_answer(3)
SSE = b"Content-Type: text/event-stream\r\n"
HEAD = b"HTTP/1.1 200 OK\r\n" + SSE
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


def with_length(body: bytes, more: int = 0) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(body) + more) + body


def in_two_reads(first: bytes, second: bytes) -> Script:
    async def script(call: Call) -> str | None:
        await call.body()
        await call.say(first)
        await call.peer.taken()
        await call.say(second)
        return None

    return script


# What the server sends; then the status and the output tokens.
WELL: dict[str, tuple[Script, int, int | None]] = {
    "with a length": (says(with_length(JSON)), 200, 3),
    "a stream in one write": (says(b"".join(STREAM)), 200, 3),
    "until the end": (says(HEAD + b"\r\n", *events(3), then=CLOSE), 200, 3),
    "HTTP/1.0": (says(b"HTTP/1.0 200 OK\r\n" + SSE + b"\r\n", *events(3), then=CLOSE), 200, 3),
    "no content": (says(b"HTTP/1.1 204 No Content\r\n\r\n"), 204, None),
    "100 and 103 in one write": (
        says(INTERIM + b"HTTP/1.1 103 Early\r\nLink: </a>\r\n\r\n" + b"".join(STREAM)),
        200,
        3,
    ),
    "100 in pieces of a byte": (says(*(bytes([b]) for b in INTERIM + b"".join(STREAM))), 200, 3),
    "says it will close": (says(*streamed_answer(3, fields=b"Connection: close\r\n"), then=CLOSE), 200, 3),
    "trailers": (
        says(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunked(*events(3), trailers=b"X-A: 1\r\n")),
        200,
        3,
    ),
    "more than announced": (says(with_length(JSON) + b"and more"), 200, 3),
    "more than nothing": (says(b"HTTP/1.1 204 No Content\r\n\r\nand more"), 204, None),
    "more after its chunks": (says(b"".join(STREAM) + b"and more"), 200, 3),
    "more than announced, later": (
        in_two_reads(with_length(JSON)[:-20], with_length(JSON)[-20:] + b"and more"),
        200,
        3,
    ),
    "a large head": (says(*streamed_answer(3, fields=b"X-A: " + b"a" * 60_000 + b"\r\n")), 200, 3),
}
# What the server sends; then the outcome, the status, the output tokens, and words of the error.
BADLY: dict[str, tuple[Script, Outcome, int | None, int | None, str]] = {
    "429": (answers(b"{}", status=b"429 Too Many Requests"), ERROR, 429, None, "upstream answered 429"),
    "302": (answers(b"", status=b"302 Found"), ERROR, 302, None, "a redirect"),
    "500 in chunks": (answers(b"oh", status=b"500 Oh", chunks=2), ERROR, 500, None, "upstream answered 500"),
    "closes": (says(then=CLOSE), GONE, None, None, "closed the connection without an answer"),
    "resets": (says(then=RESET), GONE, None, None, "reset the connection without an answer"),
    "closes in its head": (says(b"HTTP/1.1 20", then=CLOSE), CUT, None, None, "middle of its answer"),
    "closes before its length": (says(with_length(JSON[:50], 9), then=CLOSE), CUT, 200, None, "closed"),
    "closes in a chunk": (says(*STREAM[:2], STREAM[2][:9], then=CLOSE), CUT, 200, 1, "middle of its answer"),
    "closes before the last chunk's end": (says(*STREAM[:-1], b"0\r\n", then=CLOSE), CUT, 200, 3, "closed"),
    "a stream without an end": (
        says(STREAM[0], STREAM[1], b"0\r\n\r\n"),
        CUT,
        200,
        1,
        "without a finish reason or an end marker",
    ),
    "resets before its length": (says(with_length(JSON[:50], 9), then=RESET), GONE, 200, None, "reset"),
    "no HTTP": (says(b"220 mail\r\n"), ERROR, None, None, "sent invalid HTTP"),
    "101": (says(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n"), ERROR, None, None, "sent invalid HTTP"),
    "no chunk": (says(STREAM[0] + STREAM[1] + b"zz\r\n"), ERROR, 200, None, "sent invalid HTTP"),
    "a chunk longer than its size": (says(STREAM[0], b"1\r\nabc"), ERROR, 200, None, "sent invalid HTTP"),
    "a head without an end": (
        says(HEAD + b"A: ", *[b"a" * 65_536] * (HEAD_BYTES_MAX // 65_536 + 1)),
        ERROR,
        None,
        None,
        "longer",
    ),
    "interim heads without an end": (says(*[INTERIM * 1_000] * 12), ERROR, None, None, "over 64 interim"),
}


@pytest.mark.parametrize("case", WELL)
async def test_an_answer(case: str) -> None:
    script, status, tokens = WELL[case]
    async with upstream() as server, sender_to(server.url + server.on(script)) as to:
        for number in (1, 2):
            x = await to.ask()
            assert (x.outcome, x.status, x.tokens.output, x.error) == (COMPLETE, status, tokens, None)
            assert (x.clock, x.endpoint, x.model) == ("kernel", "chat.completions", "m")
            t = x.timeline
            # A stamp of the kernel may lie before ours of the submit, by no more than it may be off.
            assert t.arrival_ns <= t.submit_ns <= t.head_ns + x.uncertainty_ns
            assert t.head_ns <= t.response_end_ns
            if "more" in case:  # which would answer the next request
                assert (to.sender.pool.idle, server.connections) == (0, number)


@pytest.mark.parametrize("case", BADLY)
async def test_no_answer(case: str) -> None:
    script, outcome, status, tokens, words = BADLY[case]
    async with upstream() as server, sender_to(server.url + server.on(script)) as to:
        for _ in range(2):
            x = await to.ask()
            assert (x.outcome, x.status, x.tokens.output) == (outcome, status, tokens), x.error
            assert words in (x.error or "")
            assert x.timeline.submit_ns is not None


def then_silent(*pieces: bytes) -> Script:
    async def script(call: Call) -> str | None:
        await call.body()
        await call.say(*pieces)
        await call.left()
        return CLOSE

    return script


async def test_nobody_listens() -> None:
    async with sender_to(f"http://127.0.0.1:{port_free()}") as to:
        for _ in range(2):  # the second one knows the address already
            x = await to.ask()
            assert (x.outcome, x.status, x.error) == (ERROR, None, "cannot connect (Connection refused)")
            assert (x.timeline.submit_ns, x.model) == (None, "m")


async def test_the_whole_time_is_over_before_a_connection_is_there() -> None:
    async with unanswered_port() as port, sender_to(f"http://127.0.0.1:{port}", timeout_s=0.1) as to:
        x = await to.ask()
        assert (x.outcome, x.error) == (LATE, "the server did not accept a connection in time")
        assert not to.sender.pool.attempts


@pytest.mark.parametrize("cancelled", [False, True], ids=["times out", "is cancelled"])
@pytest.mark.parametrize(
    ("pieces", "tokens"),
    [([], None), ([b"HTTP/1.1 1"], None), (STREAM[:3], 2)],
    ids=["never", "in its head", "in its stream"],
)
async def test_the_answer_stops_coming(pieces: list[bytes], tokens: int | None, cancelled: bool) -> None:
    async with (
        upstream() as server,
        sender_to(server.url + server.on(then_silent(*pieces)), timeout_s=100 if cancelled else 0.2) as to,
    ):
        call = to.send()
        if cancelled:
            await wait_until(lambda: call.response_bytes == len(b"".join(pieces)) and server.calls)
            call.cancel("enough")
        x = await to.end_of(call)
        end = (CANCELLED, "enough") if cancelled else (LATE, "no end of the answer in time")
        assert (x.outcome, x.error, x.tokens.output) == (*end, tokens)
        assert x.timeline.response_end_ns is None
        call.cancel("and again")  # does nothing
        await wait_until(lambda: server.open == 0)


async def test_the_sender_is_closed_with_calls_in_every_state() -> None:
    async with upstream() as server, unanswered_port() as port:
        async with sender_to(f"http://127.0.0.1:{port}") as to:
            to.send()
            await asyncio.sleep(0)
        assert [x.outcome for _, x in to.ended] == [CANCELLED]
        async with sender_to(server.url + server.on(then_silent(*STREAM[:2]))) as to:
            begun = to.send()
            await wait_until(lambda: begun.response_bytes)
            to.send()
            to.send(b" " * 20_000_000)
        assert [x.outcome for _, x in to.ended] == [CANCELLED] * 3


@pytest.mark.parametrize("fresh", [False, True])
async def test_a_connection_is_used_again_unless_each_request_gets_its_own(fresh: bool) -> None:
    async with upstream() as server, sender_to(server.url + server.on(says(*STREAM)), fresh=fresh) as to:
        assert [(await to.ask()).outcome for _ in range(3)] == [COMPLETE] * 3
        assert [call.connection for call in server.calls] == ([1, 2, 3] if fresh else [1, 1, 1])
        assert {call.head.get("connection") for call in server.calls} == {b"close" if fresh else None}
        if not fresh:
            assert (to.sender.pool.connects, to.sender.pool.reuses) == (1, 2)


async def test_connections_are_opened_beforehand() -> None:
    async with upstream() as server, sender_to(server.url + server.on(says(*STREAM))) as to:
        assert await to.sender.open(300) == 300
        assert await to.sender.open(10) == 300, "there are enough"
        assert (await to.ask()).outcome is COMPLETE
        assert server.connections == 300


async def test_words_out_of_turn_end_a_connection() -> None:
    """They would answer the next request (RFC 9112 9.2)."""
    async with upstream() as server, sender_to(server.url + server.on(says(*STREAM))) as to:
        assert (await to.ask()).outcome is COMPLETE
        await server.calls[0].peer.send(with_length(JSON))
        await wait_until(lambda: to.sender.pool.idle == 0)
        assert (await to.ask()).outcome is COMPLETE
        assert server.connections == 2


async def test_a_connection_that_broke_unseen_costs_nothing() -> None:
    """Nothing of the request has left us when the write fails: it goes out on another connection."""
    async with upstream() as server, sender_to(server.url + server.on(says(*STREAM))) as to:
        assert (await to.ask()).outcome is COMPLETE
        peer = await server.take_over()
        peer.reset()  # and no turn of the loop until we write
        x = await to.ask()
        assert (x.outcome, to.sender.retries.total(), server.connections) == (COMPLETE, 0, 2)


async def test_a_request_that_may_have_been_read_is_not_sent_again() -> None:
    async def second_is_cut(call: Call) -> str | None:
        await call.body()
        if len(server.calls) == 2:
            return CLOSE
        await call.say(*STREAM)
        return None

    async with upstream() as server, sender_to(server.url + server.on(second_is_cut)) as to:
        assert [(await to.ask()).outcome for _ in range(3)] == [COMPLETE, GONE, COMPLETE]
        assert len(server.calls) == 3


async def test_a_slow_reader_gets_it_all_and_the_submit_is_that_of_the_last_byte() -> None:
    body = BODY[:-1] + b',"user":"' + bytes(range(97, 123)) * 200_000 + b'"}'
    begun = asyncio.Event()

    async def script(call: Call) -> str | None:
        await begun.wait()
        assert await call.body() == body
        await call.say(*STREAM)
        return None

    async with upstream() as server, sender_to(server.url + server.on(script)) as to:
        call = to.send(body)
        await wait_until(lambda: server.calls)
        begun_ns = SystemClock.mono_ns()
        begun.set()
        x = await to.end_of(call)
        assert (x.outcome, x.model) == (COMPLETE, "m")
        assert x.request_bytes > len(body)
        assert x.timeline.arrival_ns < begun_ns < x.timeline.submit_ns


async def test_an_answer_before_the_request_was_taken() -> None:
    async def script(call: Call) -> str | None:
        await call.say(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await call.peer.to_end()
        return CLOSE

    async with upstream() as server, sender_to(server.url + server.on(script)) as to:
        x = await to.ask(b"[" + b" " * 20_000_000 + b"]")
        assert (x.outcome, x.status, x.timeline.submit_ns) == (Outcome.CLIENT_ERROR, 413, None)
        assert to.sender.pool.idle == 0, "what is left of the request would be read as the next one"


@pytest.mark.parametrize("head", [HEAD, b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"])
async def test_an_answer_that_never_ends_is_given_up(head: bytes) -> None:
    sent = 0

    async def script(call: Call) -> str | None:
        nonlocal sent
        await call.body()
        await call.say(head + b"\r\n")
        while True:
            await call.say(b"data: {}\n\n" * 6_000)
            sent += 60_000

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ANSWER_BYTES_MAX", 1 << 20)
        async with upstream() as server, sender_to(server.url + server.on(script)) as sender:
            x = await sender.ask()
    assert x.outcome is ERROR
    assert x.error is not None and "longer than" in x.error
    assert x.response_bytes < 2 << 20
    assert sender.sender.early_bytes == 0


async def test_what_is_read_and_not_parsed_has_a_limit() -> None:
    most = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "EARLY_BYTES_MAX", 100_000)
        patch.setattr(DeferredWork, "is_behind", lambda self, t_ns: True)
        patch.setattr(DeferredWork, "_run_slice", lambda self: None)  # the loop has always more to read
        long = says(with_length(b" " * 4_000_000, more=1))
        async with upstream() as server, sender_to(server.url + server.on(long)) as sender:
            request = asyncio.ensure_future(sender.ask())
            while not any(call.response_bytes > 4_000_000 for call in sender.sender.calls):
                most = max(most, sender.sender.early_bytes)
                await asyncio.sleep(0)
            request.cancel()
    assert 0 < most <= 100_000 + (1 << 20), "one read above the limit"
