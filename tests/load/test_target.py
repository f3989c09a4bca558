"""Where a request goes, and the bytes of its head."""

import pytest

from llmtap.errors import ConfigError
from llmtap.load.sending import parse_target, shown_url
from llmtap.protocol.http1 import Framing, parse_request_head


@pytest.mark.parametrize(
    ("url", "endpoint", "target", "host"),
    [
        ("http://gw.test:8000", "chat.completions", b"/v1/chat/completions", b"gw.test:8000"),
        ("http://gw.test/", "completions", b"/v1/completions", b"gw.test"),
        ("https://gw.test/v1/", "chat.completions", b"/v1/chat/completions", b"gw.test"),
        ("http://gw.test/api/v1", "chat.completions", b"/api/v1/chat/completions", b"gw.test"),
        ("http://gw.test/apiv1", "chat.completions", b"/apiv1/v1/chat/completions", b"gw.test"),
        ("http://[::1]:80", "completions", b"/v1/completions", b"[::1]"),
        ("http://h:1/p", "/bench/chat/completions", b"/p/bench/chat/completions", b"h:1"),
    ],
)
def test_a_target(url: str, endpoint: str, target: bytes, host: bytes) -> None:
    head = parse_request_head(parse_target(url, endpoint, []).head(12))
    assert (head.method, head.target, head.framing, head.length) == (b"POST", target, Framing.LENGTH, 12)
    assert dict(head.headers)[b"Host"] == host
    assert head.keep_alive


def test_fields_of_the_target_and_of_one_request() -> None:
    target = parse_target(
        "http://gw.test", "completions", [(b"Authorization", b"Bearer k"), (b"X-Empty", b"")]
    )
    head = parse_request_head(target.head(0, [(b"X-Tenant", b"a\tb \xc3\xa4")], close=True))
    sent = {(b"Authorization", b"Bearer k"), (b"X-Empty", b""), (b"X-Tenant", b"a\tb \xc3\xa4")}
    assert sent <= set(head.headers)
    assert not head.keep_alive


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"", b"a"),
        (b"a b", b"c"),
        (b"\xc3\xa4", b"c"),
        (b"Host", b"x"),
        (b"content-length", b"1"),
        (b"a", b"b\r\nc: d"),
        (b"a", b"\x00"),
    ],
)
def test_fields_that_cannot_be_sent(name: bytes, value: bytes) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_target("http://gw.test", "completions", [(name, value)])
    assert refused.value.place == "--header"
    assert value.decode("latin-1") not in refused.value.problem or len(value) < 2, "values may be keys"


@pytest.mark.parametrize("url", ["", "gw.test", "ftp://gw.test", "http://gw.test?x=1"])
def test_no_target_names_the_option(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_target(url, "completions", [])
    assert refused.value.place == "--target"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://h:1/v1", "http://h:1/v1"),
        ("https://me:secret@gw.test/a?key=secret#secret", "https://gw.test/a"),
        ("http://[::1]:80/metrics", "http://[::1]:80/metrics"),
        ("ws://h/v1/realtime?model=m", "ws://h/v1/realtime"),
    ],
)
def test_a_url_is_shown_without_what_may_be_secret(url: str, shown: str) -> None:
    assert shown_url(url) == shown
