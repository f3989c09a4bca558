"""Invariants: every point is the stamp of the read that brought it, however the bytes were cut; bad bytes
never raise and never lose the timing; what the relay saw of the end stands, unless the events know more.

Long because one helper plays all these answers.
"""

import gzip
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.exchange import observer
from llmtap.exchange.exchange import BLANK, OUTPUT, Exchange
from llmtap.exchange.observer import READ_BYTES_MAX, STALL_MISSED_NS, Observer
from llmtap.exchange.outcome import EventClass, Outcome, TokenSource
from llmtap.exchange.verdict import TOKENS_MAX
from tests.exchange.streams import DONE, OK, REQUEST, ROLE, STOP, chunk, framed, observe, sse


def names(x: Exchange) -> list[str]:
    return [EventClass(c).name.lower() for c in x.timeline.events.classes]


def test_the_points_of_a_streamed_answer() -> None:
    x = observe(
        (100, b": hold on\n\n"),
        (110, ROLE),
        (120, chunk({"reasoning_content": "hm"})),
        (130, chunk({"content": "\n\n"})),
        (140, chunk({"content": "Hi"}) + chunk({"content": " you"})),
        (150, chunk({"content": "!"})[:20]),
        (160, chunk({"content": "!"})[20:]),
        (170, STOP),
        (180, DONE),
        body=b'{"model":"acme-8b","stream":true}',
    )
    t = x.timeline
    assert (t.arrival_ns, t.request_end_ns, t.submit_ns, t.head_ns) == (10, 20, 30, 40)
    assert (t.first_byte_ns, t.first_any_ns, t.first_token_ns) == (100, 100, 120)
    assert (t.first_reasoning_ns, t.first_content_ns, t.last_token_ns) == (120, 140, 160)
    assert (t.response_end_ns, t.delivered_ns, t.paused_ns) == (900, 950, 11)
    assert names(x) == [
        "keepalive",
        "role",
        "reasoning",
        "content",
        "content",
        "content",
        "content",
        "metadata",
        "done",
    ]
    assert list(t.events.t_ns) == [100, 110, 120, 130, 140, 140, 160, 170, 180]
    assert [f & BLANK for f in t.events.flags] == [0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert [bool(f & OUTPUT) for f in t.events.flags] == [n in ("reasoning", "content") for n in names(x)]
    assert t.events.sizes[1] == len(ROLE)
    assert (x.id, x.relay, x.seq, x.method, x.path) == ("r1-7", "r1", 7, "POST", "/v1/chat/completions")
    assert (x.endpoint, x.dialect, x.model, x.stream) == ("chat.completions", "openai.chat", "acme-8b", True)
    assert (x.status, x.outcome, x.finish_reason, x.error) == (200, Outcome.COMPLETE, "stop", None)
    assert (x.reads, x.uncertainty_ns, x.request_bytes, x.response_bytes) == (9, 12, 13, 14)
    assert (x.added.request_ns, x.added.first_chunk_ns, x.added.chunk_max_ns) == (5, 10, 18)
    assert list(x.added.chunks_ns) == [10, 11, 12, 13, 14, 15, 16, 17, 18]
    assert (x.tokens.output, x.tokens.source) == (5, TokenSource.CHUNKS)
    assert (x.request_id, x.clock, x.unparsed_events) == ("req-1", "mono", 0)


STREAM = b"".join([b": k\n\n", ROLE, chunk({"content": "a"}), chunk({"content": " b"}), STOP, DONE])


@given(st.integers(1, 200), st.lists(st.integers(0, 2000), max_size=10), st.booleans())
def test_every_cut_of_the_wire_bytes_gives_the_same_exchange(
    size: int, edges: list[int], coded: bool
) -> None:
    head = OK % (b"Transfer-Encoding: chunked\r\n" + (b"Content-Encoding: gzip\r\n" if coded else b""))
    wire = framed(gzip.compress(STREAM, mtime=0) if coded else STREAM, size)
    cuts = [0, *sorted(e % (len(wire) + 1) for e in edges), len(wire)]
    reads = [(100, wire[a:b]) for a, b in pairwise(cuts)]
    one, many = observe((100, wire), head=head), observe(*reads, head=head)
    assert many.timeline.events == one.timeline.events
    assert names(many) == ["keepalive", "role", "content", "content", "metadata", "done"]
    assert (many.outcome, many.tokens, many.finish_reason) == (one.outcome, one.tokens, one.finish_reason)


def test_a_read_with_nothing_but_framing_is_no_byte_of_the_body() -> None:
    x = observe(
        (100, b"%x\r\n" % len(STREAM)),
        (110, STREAM[:1]),
        (120, STREAM[1:]),
        (130, b"\r\n0\r\n"),
        (140, b"\r\n"),
        head=OK % b"Transfer-Encoding: chunked\r\n",
    )
    assert (x.timeline.first_byte_ns, x.timeline.first_any_ns, x.reads) == (110, 120, 2)
    assert list(x.added.chunks_ns) == [11, 12]


# Token counts.


def with_ids(text: str, *ids: int) -> bytes:
    return sse({"choices": [{"index": 0, "delta": {"content": text}, "token_ids": ids}]})


def with_logprobs(text: str, n: int) -> bytes:
    return sse({"choices": [{"index": 0, "delta": {"content": text}, "logprobs": {"content": [{}] * n}}]})


def running(n: int, reason: str | None = None, index: int = 0) -> bytes:
    choice = {"index": index, "delta": {"content": "x"}, "finish_reason": reason}
    return sse({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": n}})


USAGE = sse({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 40}})


@pytest.mark.parametrize(
    ("stream", "output", "source"),
    [
        (ROLE + with_ids("a b", 1, 2) + with_ids("c", 3) + USAGE, 40, TokenSource.USAGE),
        (ROLE + with_logprobs("a b", 2) + with_ids("c", 3), 1, TokenSource.TOKEN_IDS),
        (ROLE + with_logprobs("a b", 2) + with_logprobs("c", 1), 3, TokenSource.LOGPROBS),
        (running(1) + running(4) + running(6), 6, TokenSource.RUNNING_USAGE),
        (running(1) + running(4) + running(6, "stop"), 6, TokenSource.USAGE),
        (running(1) + running(2, index=1) + running(4) + running(3, "stop", 1), 7, TokenSource.RUNNING_USAGE),
        (ROLE + chunk({"content": "a"}) + chunk({"content": "b"}), 2, TokenSource.CHUNKS),
        # What has no text counts where nothing else does: a name, audio.
        (ROLE + chunk({"tool_calls": [{"function": {"name": "f"}}]}), 1, TokenSource.CHUNKS),
        (ROLE + 3 * chunk({"audio": {"data": "AAAA"}}), 3, TokenSource.CHUNKS),
        (ROLE + DONE, None, TokenSource.NONE),
    ],
)
def test_tokens_by_the_ladder(stream: bytes, output: int | None, source: TokenSource) -> None:
    x = observe((100, stream))
    assert (x.tokens.output, x.tokens.source) == (output, source)


# How it ended.

CONTENT = chunk({"content": "a"})
ERROR = sse({"error": {"message": "secret text", "type": "server_error", "code": None}})


@pytest.mark.parametrize(
    ("stream", "outcome", "error"),
    [
        (ROLE + CONTENT + STOP, Outcome.COMPLETE, ""),
        (ROLE + CONTENT + b"data: [DONE]", Outcome.COMPLETE, ""),
        (ROLE + CONTENT, Outcome.TRUNCATED, "without a finish reason or an end marker"),
        (ROLE + CONTENT + ERROR + DONE, Outcome.UPSTREAM_ERROR, "an error in its answer (server_error)"),
        (
            sse({"error": {"type": "not a word, but a text"}}),
            Outcome.UPSTREAM_ERROR,
            "an error in its answer",
        ),
        (ROLE + CONTENT + chunk({}, "content_filter") + DONE, Outcome.REFUSED, ""),
        (sse({"type": "acme_start"}), Outcome.COMPLETE, ""),
    ],
)
def test_the_events_refine_a_clean_end(stream: bytes, outcome: Outcome, error: str) -> None:
    x = observe((100, stream))
    assert (x.outcome, bool(x.error), (x.error or "").endswith(error)) == (outcome, bool(error), True)


@pytest.mark.parametrize("shown", ["client_cancelled", "upstream_reset"])
def test_an_end_that_the_relay_saw_to_be_unclean_stands(shown: str) -> None:
    finished = ROLE + chunk({}, "content_filter") + DONE
    for stream in (ROLE + CONTENT, *([] if shown == "client_cancelled" else [ROLE + ERROR, finished])):
        x = observe((100, stream), outcome=shown, end_ns=None, error="said so")
        assert (x.outcome.value, x.error) == (shown, "said so")


def test_a_client_that_hangs_up_at_an_error_did_not_cause_it() -> None:
    # The SDK of OpenAI closes the connection as soon as it has read the error event.
    x = observe((100, ROLE + CONTENT + ERROR), outcome="client_cancelled", end_ns=None, error="left")
    assert x.outcome is Outcome.UPSTREAM_ERROR
    assert x.error is not None and x.error.startswith("upstream sent an error in its answer")
    x = observe((100, b'{"err'), status=503, outcome="client_cancelled", end_ns=None, error="left")
    assert (x.outcome, x.error) == (Outcome.UPSTREAM_ERROR, "upstream answered 503")


@pytest.mark.parametrize("last", [DONE, chunk({}, "stop")])
def test_a_client_that_hangs_up_at_the_end_marker_has_it_all(last: bytes) -> None:
    # Many clients close as soon as they have read [DONE], before the last bytes of the framing.
    x = observe((100, ROLE + CONTENT + last), outcome="client_cancelled", end_ns=None, error="left")
    assert (x.outcome, x.error) == (Outcome.COMPLETE, None)
    assert x.timeline.response_end_ns == x.timeline.events.t_ns[-1]


@pytest.mark.parametrize(
    ("status", "body", "outcome", "word"),
    [
        (429, b'{"error":{"message":"m","code":"rate_limit"}}', Outcome.UPSTREAM_ERROR, " (rate_limit)"),
        (500, b"<html>oops</html>", Outcome.UPSTREAM_ERROR, ""),
        (408, b"", Outcome.UPSTREAM_ERROR, ""),
        (404, b"", Outcome.CLIENT_ERROR, ""),
        (400, b'data: {"error":{"code":"bad"}}\n\ndata: [DONE]\n\n', Outcome.CLIENT_ERROR, " (bad)"),
    ],
)
def test_an_error_status_is_the_clients_or_the_upstreams_error(
    status: int, body: bytes, outcome: Outcome, word: str
) -> None:
    x = observe((100, body), head=b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n" % (status, len(body)))
    assert (x.outcome, x.error, x.status) == (outcome, f"upstream answered {status}{word}", status)


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        (
            {"head": b"", "outcome": "upstream_error", "status": 502, "end_ns": None},
            ("POST", 502, Outcome.UPSTREAM_ERROR),
        ),
        (
            {
                "request": b"\x00\x01\r\n\r\n",
                "head": b"",
                "outcome": "rejected",
                "status": 400,
                "end_ns": None,
            },
            ("", 400, Outcome.REJECTED),
        ),
        (
            {"request": b"HEAD /v1/chat/completions HTTP/1.1\r\nHost: g\r\n\r\n"},
            ("HEAD", 200, Outcome.COMPLETE),
        ),
    ],
    ids=["made by the relay", "malformed request", "HEAD"],
)
def test_an_answer_without_a_body(beside: dict[str, Any], expected: tuple[Any, ...]) -> None:
    x = observe(**beside)
    assert (x.method, x.status, x.outcome) == expected
    assert (x.timeline.first_byte_ns, names(x)) == (None, [])


# What cannot be understood.


@pytest.mark.parametrize(
    ("head", "reads"),
    [
        (OK % b"Content-Encoding: snappy\r\n", [b"\x01\x02", b"\x03"]),
        (OK % b"Content-Encoding: gzip\r\n", [b"no gzip", b"at all"]),
        (OK % b"Transfer-Encoding: chunked\r\n", [b"zz\r\nabc", b"more"]),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
            [b"5\r\nhello", b"x"],
        ),
        (b"garbage\r\n\r\n", [b"data", b"data"]),
    ],
)
def test_a_body_that_cannot_be_followed_is_timed_by_its_reads(head: bytes, reads: list[bytes]) -> None:
    x = observe(*((100 + 10 * i, r) for i, r in enumerate(reads)), head=head)
    t = x.timeline
    assert (t.head_ns, t.first_byte_ns, t.first_any_ns, t.first_token_ns) == (40, 100, 100, None)
    assert list(t.events.t_ns) == [100, 110]
    assert list(t.events.sizes) == [len(r) for r in reads]
    assert (x.unparsed_events, x.reads, x.outcome) == (2, 2, Outcome.COMPLETE)
    assert x.error.startswith("upstream sent a body that cannot be read")
    assert observe((1, reads[0]), head=head, error="the relay's own").error == "the relay's own"


def test_other_peoples_answers_are_not_counted_as_unparsed() -> None:
    get = b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
    read = (100, b'{"object":"list","data":[]}')
    found = observe(read, head=head, request=get), observe(read, head=head)
    assert [x.unparsed_events for x in found] == [0, 1]
    x = observe((100, sse({"type": "acme_start"})), request=get)
    assert x.unparsed_events == 1, "an event stream is expected to be understood"


def test_interim_heads_are_passed_over() -> None:
    o = Observer("r", 1, 0, 0, REQUEST)
    o.response_head(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", 40, 0)
    o.response_head(OK % b"", 50, 0)
    o.response_data(STREAM, 60, 0)
    o.response_end(60)
    x = o.finish(70, "complete", None, None, 0, 0, 0, 0)
    assert (x.status, x.timeline.head_ns, x.outcome) == (200, 50, Outcome.COMPLETE)


def test_a_tunnel_is_timed_by_what_comes_down() -> None:
    o = Observer(
        "r",
        1,
        0,
        0,
        b"GET /v1/realtime HTTP/1.1\r\nHost: g\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    )
    o.response_head(b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", 40, 0)
    o.on_upgrade(40)
    o.tunnel(b"up", None, 50, 3)
    o.tunnel(None, b"down", 60, 4)
    o.tunnel(None, b"again", 70, 5)
    x = o.finish(80, "complete", None, None, 0, 0, 100, 200)
    assert (x.status, x.reads, x.stream, x.unparsed_events) == (101, 2, False, 2)
    assert (x.timeline.first_byte_ns, list(x.timeline.events.t_ns)) == (60, [60, 70])
    assert (x.added.first_chunk_ns, x.added.chunk_max_ns) == (4, 5)


def test_a_log_has_an_end_and_the_points_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "EVENTS_MAX", 3)
    x = observe((100, ROLE), *((110 + i, CONTENT) for i in range(5)), (200, STOP + DONE))
    assert (len(x.timeline.events), x.unlogged_events, len(x.added.chunks_ns)) == (3, 5, 3)
    assert (x.timeline.last_token_ns, x.tokens.output, x.outcome) == (114, 5, Outcome.COMPLETE)


def test_tokens_by_a_tokenizer_where_the_stream_declares_none() -> None:
    def words(text: str) -> int:
        return len(text.split())

    stream = ROLE + chunk({"reasoning_content": "hm so"}) + chunk({"content": "one two three"}) + STOP + DONE
    x = observe((100, stream), count_tokens=words)
    assert (x.tokens.output, x.tokens.source) == (5, TokenSource.TOKENIZER)
    assert list(x.timeline.events.tokens) == [-1, 2, 3, -1, -1]
    padded = chunk({"content": "one"}, obfuscation="pad ding", p="abc def")
    assert observe((100, padded + STOP + DONE), count_tokens=words).tokens.output == 1
    for declared, source in ((USAGE, TokenSource.USAGE), (with_ids("a b c", 1), TokenSource.TOKEN_IDS)):
        assert observe((100, ROLE + declared + STOP), count_tokens=words).tokens.source is source


def test_a_tokenizer_that_fails_is_given_up() -> None:
    def fails(text: str) -> int:
        if text == "b":
            raise RuntimeError
        return 7

    stream = ROLE + b"".join(chunk({"content": c}) for c in "abc") + STOP + DONE
    x = observe((100, stream), count_tokens=fails)
    assert (x.tokens.output, x.tokens.source) == (3, TokenSource.CHUNKS)
    x = observe((100, ROLE + chunk({"content": "x" * 70_000}) + STOP), count_tokens=len)
    assert (x.tokens.output, x.tokens.source) == (1, TokenSource.CHUNKS)


def test_more_tokens_than_any_answer_has_are_not_believed() -> None:
    x = observe((100, running(1) + running(10**30) + running(2 + 2**30) + running(2**39) + DONE))
    assert sum(n for n in x.timeline.events.tokens if n > 0) <= TOKENS_MAX


def test_gaps_by_the_servers_own_clock() -> None:
    def step(n: int, ms: float) -> bytes:
        return chunk({"content": "a"}, timings={"predicted_n": n, "predicted_ms": ms})

    x = observe(
        (100, ROLE + step(1, 0.5)),
        (110, step(2, 30.5)),
        (120, step(4, 50.5)),
        (130, STOP + DONE),
        end_ns=10**8,
    )
    assert list(x.server_gaps_ns or ()) == [30_000_000, 10_000_000, 10_000_000]
    assert (x.tokens.output, x.tokens.source) == (4, TokenSource.RUNNING_USAGE)
    assert observe((100, STREAM)).server_gaps_ns is None


def test_a_gateway_that_begins_again_is_counted_and_the_clock_runs_on() -> None:
    def attempt(name: str, t_ns: int, text: str) -> list[tuple[int, bytes]]:
        role = chunk({"role": "assistant", "content": ""}, id=name, model="m")
        return [(t_ns, role), (t_ns + 1, chunk({"content": text}, id=name, model="m"))]

    x = observe(*attempt("A", 100, "a"), *attempt("B", 200, "b"), *attempt("B", 300, "c"), (400, STOP + DONE))
    assert (x.retries, x.timeline.first_content_ns, x.timeline.last_token_ns) == (1, 101, 301)
    assert x.to_dict({}, {})["retries"] == 1


FILTERED = chunk({}, "content_filter")


@pytest.mark.parametrize(
    ("reads", "beside", "reason"),
    [
        ([ROLE, chunk({"content": "a"}), STOP, DONE], {}, None),
        ([DONE], {}, "empty"),
        ([ROLE, STOP, DONE], {}, "only_metadata"),
        ([ROLE, FILTERED, DONE], {}, "guardrail"),
        ([ROLE, sse({"error": {"message": "m"}})], {}, "error"),
        ([ROLE], {}, "only_metadata"),
        ([ROLE], {"outcome": "client_cancelled", "end_ns": None}, "cancelled"),
    ],
)
def test_why_a_stream_brought_no_token(
    reads: list[bytes], beside: dict[str, Any], reason: str | None
) -> None:
    x = observe(*((100 + i, data) for i, data in enumerate(reads)), **beside)
    assert x.no_token_reason == x.to_dict({}, {})["no_token_reason"] == reason


def test_names_from_a_body_are_short() -> None:
    x = observe((100, chunk({"content": "a"}, "words of somebody", model="m" * 999) + DONE))
    assert (x.finish_reason, len(x.response_model or "")) == ("other", 256)


@given(
    st.lists(st.binary(max_size=40), max_size=6),
    st.sampled_from(
        [
            b"",
            b"Transfer-Encoding: chunked\r\n",
            b"Content-Encoding: gzip\r\n",
            b"Content-Encoding: br, zstd\r\n",
        ]
    ),
    st.binary(max_size=30),
)
def test_no_bytes_raise(reads: list[bytes], fields: bytes, other: bytes) -> None:
    observe(*((100, r) for r in reads), head=OK % fields, body=other)
    observe(*((100, r) for r in reads), head=other, request=other)


def test_a_stream_that_was_announced_and_never_said_a_byte_is_a_stream() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 0\r\n\r\n"
    x = observe(head=head)
    assert (x.stream, x.no_token_reason) == (True, "empty")


A, B = chunk({"content": "a"}), chunk({"content": "b"})
LONG = chunk({"content": "c" * READ_BYTES_MAX})
LATER_NS = 50 + 10 * STALL_MISSED_NS


@pytest.mark.parametrize(
    ("reads", "in_relay_ns", "in_sender_ns"),
    [
        ([(50, A), (60, B), (70, DONE)], 12, 12),  # each event has a timestamp of its own
        ([(50, ROLE + A), (60, B)], 12, 12),  # the token ends its read
        ([(65, A + B)], 65 - 30, 65 - 30),  # not before the request was submitted
        ([(50, A), (90, B + STOP + DONE)], 12, 90 - 50),
        ([(50, A), (90, B + A[:9]), (95, A[9:])], 12, 90 - 50),
        ([(50, A), (LATER_NS, A + B)], 12 + STALL_MISSED_NS, 10 * STALL_MISSED_NS),
        # The socket was not empty after the first half: a byte waits for more than a turn.
        (
            [(50, A), (60, LONG[:READ_BYTES_MAX]), (LATER_NS, LONG[READ_BYTES_MAX:] + B)],
            10 * STALL_MISSED_NS,
            10 * STALL_MISSED_NS,
        ),
    ],
)
def test_a_token_may_have_waited_for_what_shares_its_read(
    reads: list[tuple[int, bytes]], in_relay_ns: int, in_sender_ns: int
) -> None:
    assert observe(*reads, clock="kernel", paused_ns=0).uncertainty_ns == in_relay_ns
    sent = observe(*reads, clock="kernel", paused_ns=0, longest_wait=lambda since_ns, t_ns: t_ns - since_ns)
    assert sent.uncertainty_ns == in_sender_ns
    assert observe(*reads, clock="mono").uncertainty_ns == 12


@pytest.mark.parametrize("longest_wait", [None, lambda since_ns, t_ns: t_ns - since_ns])
def test_tokens_that_came_in_one_segment_have_its_time(longest_wait: Any) -> None:
    o = Observer("r1", 7, 10, 0, REQUEST, clock="kernel", longest_wait=longest_wait)
    o.request_end(20)
    o.on_submit(30, 5)
    o.response_head(OK % b"", 40, 1)
    for t_ns, data, at_once in [(50, A, False), (90, A + B, True), (95, A + B + STOP + DONE, True)]:
        o.response_data(data, t_ns, 1, at_once=at_once)
    o.response_end(95)
    assert o.finish(950, "complete", None, None, 0, 12, 13, 14).uncertainty_ns == 12


def test_a_stall_limits_the_wait_of_a_shared_read_only() -> None:
    reads = [(50, A), (LATER_NS, A + B)]
    o = Observer("r1", 7, 10, 0, REQUEST, clock="kernel")
    o.request_end(20)
    o.on_submit(30, 5)
    o.response_head(OK % b"", 40, 1)
    for t_ns, data in reads:
        o.response_data(data, t_ns, 1)
    o.response_end(LATER_NS)
    x = o.finish(None, "complete", None, None, 0, 12, 13, 14, stall_ns=500)
    assert x.uncertainty_ns == 500 + STALL_MISSED_NS


@pytest.mark.parametrize("paused_ns", [0, STALL_MISSED_NS])
def test_a_pause_for_a_slow_client_is_no_uncertainty(paused_ns: int) -> None:
    reads = [(60, LONG[:READ_BYTES_MAX]), (LATER_NS, LONG[READ_BYTES_MAX:] + B)]
    x = observe((50, A), *reads, clock="kernel", paused_ns=paused_ns)
    assert x.uncertainty_ns == 10 * STALL_MISSED_NS - paused_ns


def test_the_sender_knows_how_long_a_byte_of_a_read_waited() -> None:
    query = []

    def waited(since_ns: int, t_ns: int) -> int:
        query.append((since_ns, t_ns))
        return 15

    x = observe((50, A), (90, A + B), (100, B), (200, A + B), clock="kernel", longest_wait=waited)
    assert (query, x.uncertainty_ns) == ([(50, 90), (100, 200)], 15)
