"""What is read of a request; a capture is shown it once and whole, and gets the answer's text if it asks."""

import gzip
import json
from typing import Any

import pytest

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.protocol.http1 import RequestHead
from tests.exchange.streams import DONE, OK, ROLE, framed, observe


@pytest.mark.parametrize(
    ("target", "path", "endpoint"),
    [
        (b"/v1/chat/completions", "/v1/chat/completions", "chat.completions"),
        (b"/team/a/v1/chat/completions/?a=b", "/team/a/v1/chat/completions/", "chat.completions"),
        (b"/deployments/m/chat/completions?v=1", "/deployments/m/chat/completions", "chat.completions"),
        (b"/v1/completions", "/v1/completions", "completions"),
        (b"http://g:80/v1/completions?q", "/v1/completions", "completions"),
        (b"http://g", "/", None),
        (b"/v1/models", "/v1/models", None),
        (b"/completion", "/completion", "llamacpp.completion"),
        (b"*", "*", None),
    ],
)
def test_path_and_endpoint(target: bytes, path: str, endpoint: str | None) -> None:
    method = b"OPTIONS" if target == b"*" else b"POST"
    x = observe(request=method + b" " + target + b" HTTP/1.1\r\nHost: g\r\n\r\n")
    assert (x.path, x.endpoint) == (path, endpoint)


def post(*fields: bytes) -> bytes:
    return b"\r\n".join([b"POST /v1/chat/completions HTTP/1.1", b"Host: g", *fields, b"", b""])


BODY = b'{"messages":[],"model":"acme-8b","stream":true}'


@pytest.mark.parametrize(
    ("request_head", "body", "model"),
    [
        (post(b"Content-Length: 50"), BODY, "acme-8b"),
        (post(b"Transfer-Encoding: chunked"), framed(BODY, 7), "acme-8b"),
        (post(b"Content-Length: 50", b"Content-Encoding: gzip"), gzip.compress(BODY, mtime=0), "acme-8b"),
        (post(b"Content-Length: 50", b"Content-Encoding: lzw"), BODY, None),
        (post(b"Content-Length: 50", b"Content-Encoding: gzip"), BODY, None),
        (post(b"Transfer-Encoding: chunked"), BODY, None),
        (post(b"Content-Length: 50"), b'{"model":5,"stream":"yes"}', None),
        (post(b"Content-Length: 50"), BODY[:-5], None),
        (post(b"Content-Length: 50"), b'{"model":"\xff"}', None),
        (post(b"Content-Length: 50"), b"--boundary\r\n", None),
        (post(), b"", None),
    ],
)
def test_the_model_asked_for(request_head: bytes, body: bytes, model: str | None) -> None:
    x = observe(request=request_head, body=body, head=b"", end_ns=None, outcome="upstream_reset")
    assert x.model == model
    assert x.stream == (model is not None), "without an answer, what was asked for"


@pytest.mark.parametrize(
    ("target", "body", "stream"),
    [
        (b"/v1/chat/completions", b'{"stream":true}', True),
        (b"/v1/chat/completions", b'{"stream":false}', False),
        (b"/v1/chat/completions", b"{}", False),
        (b"/v1beta/models/g:streamGenerateContent?alt=sse", b"{}", True),
        (b"/v1beta/models/g:generateContent", b"{}", False),
        (b"/model/m/converse-stream", b"{}", True),
        (b"/model/m/invoke-with-response-stream", b"{}", True),
        (b"/generate_stream", b"{}", True),
        (b"/api/chat", b"{}", True),
        (b"/api/generate", b'{"stream":false}', False),
        (b"/v1/embeddings", b"{}", False),
    ],
)
def test_an_error_in_one_piece_is_a_stream_where_one_was_asked_for(
    target: bytes, body: bytes, stream: bool
) -> None:
    error = b'{"error":{"message":"busy"}}'
    lengths = b"Content-Length: %d\r\n\r\n" % len(error)
    head = b"HTTP/1.1 503 Busy\r\nContent-Type: application/json\r\n" + lengths
    request = b"POST %s HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n" % (target, len(body))
    x = observe((100, error), head=head, request=request, body=body)
    assert (x.outcome, x.stream) == ("upstream_error", stream)
    x = observe((100, error), head=head.replace(b"503 Busy", b"400 Bad"), request=request, body=body)
    assert (x.outcome, x.stream) == ("client_error", False)


def test_the_model_of_the_answer_serves_where_the_request_names_none() -> None:
    assert observe((100, ROLE + DONE)).model == "acme-8b-0901"
    assert observe((100, ROLE + DONE), body=BODY).model == "acme-8b"


def test_the_request_id_is_the_requests_or_else_the_answers() -> None:
    head = OK % b"X-REQUEST-ID: up-9\r\n"
    assert observe(head=head).request_id == "req-1"
    assert observe(head=head, request=post()).request_id == "up-9"
    assert observe(request=post()).request_id is None
    long = observe(request=post(b"X-Request-Id: " + b"x" * 5000)).request_id
    assert long == "x" * 256


@pytest.mark.parametrize("name", ["x-request-id", "Request-Id", "apim-request-id", "x-amzn-RequestId"])
def test_the_id_of_the_response_stands_beside_that_of_the_request(name: str) -> None:
    answered = observe(head=OK % f"{name}: up-9\r\n".encode())
    assert (answered.request_id, answered.upstream_request_id) == ("req-1", "up-9")
    assert observe(head=OK % b"Other-Id: up-9\r\n").upstream_request_id is None


def test_the_trace_id_is_that_of_a_valid_traceparent() -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    valid = post(f"traceparent: 00-{trace}-00f067aa0ba902b7-01".encode())
    assert observe(request=valid).trace_id == trace
    assert observe(request=post(b"traceparent: 00-x")).trace_id is None


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        ([], None),
        ([b"X-Llmtap-Label: should-refuse"], "should-refuse"),
        ([b"x-llmtap-label: should-answer", b"X-Llmtap-Label: should-answer"], "should-answer"),
        ([b"x-llmtap-label: should-answer", b"x-llmtap-label: should-refuse"], "unknown"),
        ([b"x-llmtap-label: my text"], "unknown"),
        ([b"x-llmtap-label:"], "unknown"),
        # A field that Connection names is not forwarded, and decides nothing.
        ([b"x-llmtap-label: should-refuse", b"Connection: x-llmtap-label"], None),
    ],
)
def test_the_label_is_one_of_two_words_or_unknown(fields: list[bytes], label: str | None) -> None:
    x = observe(request=post(*fields), end_ns=None)
    assert x.label == label
    assert x.to_dict({}, {})["label"] == label


def test_a_request_whose_body_never_ended_is_read_as_far_as_it_came() -> None:
    o = Observer("r", 1, 0, 0, post(b"Content-Length: 50"))
    o.request_data(BODY, 1)
    x = o.finish(None, "client_cancelled", None, None, 0, 0, 0, 0)
    assert (x.model, x.timeline.request_end_ns, x.timeline.delivered_ns) == ("acme-8b", None, None)


REQUEST_BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
ANSWER_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


def head(*fields: str, length: int = len(REQUEST_BODY)) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: x", f"content-length: {length}", *fields, "", ""]
    return "\r\n".join(lines).encode()


class Ear:
    """Notes what it hears."""

    def __init__(self, *, wants: bool) -> None:
        self.wants = wants
        self.messages: list[tuple[Exchange, RequestHead, bytes]] = []

    def __call__(self, x: Exchange, head: RequestHead, body: bytes) -> bool:
        self.messages.append((x, head, body))
        return self.wants


def events(*choices: dict[str, Any]) -> bytes:
    return b"".join(
        b"data: " + json.dumps({"model": "m", "choices": [c]}).encode() + b"\n\n" for c in choices
    )


def play_text(ear: Ear, raw: bytes, body: bytes, answer: bytes) -> Exchange:
    observer = Observer("r", 1, 0, 0, raw, on_request=ear)
    for at in range(0, len(body), 7):
        observer.request_data(body[at : at + 7], at)
    observer.request_end(50)
    observer.on_submit(60, 1)
    observer.response_head(ANSWER_HEAD, 70, 1)
    observer.response_data(answer, 80, 1)
    observer.response_end(90)
    return observer.finish(100, "complete", None, None, 0, 0, 0, 0)


def content(text: str, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": {"content": text, **more}, "finish_reason": None}


def test_the_request_is_shown_once_and_whole() -> None:
    ear = Ear(wants=False)
    x = play_text(ear, head("x-session-id: s"), REQUEST_BODY, events(content("hi")))
    ((received, seen, body),) = ear.messages
    assert received is x and body == REQUEST_BODY and (b"x-session-id", b"s") in seen.headers
    assert x.text is None, "nobody asked for the text"


@pytest.mark.parametrize("whole", [True, False])
def test_the_text_of_the_first_choice_is_kept(whole: bool) -> None:
    ear = Ear(wants=True)
    answer = events(
        content("one "), content("two ", 1), content("three"), content("", reasoning_content="hm")
    )
    if whole:
        answer = b'{"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"one three"}}]}'
    x = play_text(ear, head(), REQUEST_BODY, answer)
    assert x.text is not None and x.text.response_text == "one three"
    assert x.text.request_body is None, "whoever keeps bodies redacts them first"


def test_a_request_without_a_body_is_shown_and_a_broken_one_is_not() -> None:
    ear = Ear(wants=True)
    play_text(ear, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n", b"", b"")
    assert [body for _, _, body in ear.messages] == [b""]
    play_text(ear, b"nonsense\r\n\r\n", b"", b"")
    assert len(ear.messages) == 1


def test_events_that_are_known_by_their_bytes_are_kept_as_well() -> None:
    ear = Ear(wants=True)
    words = [f"word{i} " for i in range(200)]
    observer = Observer("r", 1, 0, 0, head(), on_request=ear)
    observer.request_data(REQUEST_BODY, 1)
    observer.request_end(1)
    observer.on_submit(2, 1)
    observer.response_head(ANSWER_HEAD, 3, 1)
    for i, word in enumerate(words):  # each in a read of its own, alike but for the word
        observer.response_data(events(content(word)), 10 + i, 1)
    observer.response_end(500)
    x = observer.finish(501, "complete", None, None, 0, 0, 0, 0)
    assert x.text is not None and x.text.response_text == "".join(words)
