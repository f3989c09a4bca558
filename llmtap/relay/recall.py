"""Heads that come again: worked out once, then recalled by their bytes.

A client's library writes the same head for request after request, but for Content-Length, and so does a
server for its answers. What such a head says and how it goes on is found by the rules of `wire/http1.py` and
`relay/heads.py` when it comes; another is the same if every byte is, the digits of its length apart, and is
recalled. Nothing is recalled of a head that was refused, or whose body is framed otherwise.

A head is kept from its second coming on: most that carry an id never come again.
"""

import re
from typing import Final, Generic, TypeVar

from llmtap.relay.heads import request_lines, response_lines
from llmtap.relay.route import Route
from llmtap.wire.http1 import (
    Framing,
    Headers,
    RequestHead,
    ResponseHead,
    parse_request_head,
    parse_response_head,
)

__all__ = ["RequestRecall", "ResponseRecall"]

HEADS_MAX: Final = 512
HEAD_BYTES_MAX: Final = 2_048
"""With HEADS_MAX a bound of a few MiB; some KiB are usual."""
SEEN_MAX: Final = 2_048
MISSES_MAX: Final = 32
"""After so many heads in a row that were new, none is looked for in the next REST: where every head has an id
of its own, looking is in vain, and costs 1.5 us."""
REST: Final = 256
# From 1 on: a length of 0 is another framing. One that is written otherwise goes the long way.
_DIGITS: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([1-9][0-9]{0,17})\r\n")
_LENGTH: Final = Framing.LENGTH

Head = TypeVar("Head", RequestHead, ResponseHead)
Key = tuple[bytes, bytes]
"""A head before and behind the digits of its length."""


class _Known(Generic[Head]):
    """One head, and the lines it became."""

    __slots__ = ("after", "at", "before", "head", "name", "route")

    def __init__(self, head: Head) -> None:
        self.head: Head = head
        self.at, self.name = next(
            (i, n) for i, (n, _) in enumerate(head.headers) if len(n) == 14 and n.lower() == b"content-length"
        )
        self.before = self.after = b""
        self.route: Route | None = None

    def keep(self, lines: bytes, digits: bytes) -> None:
        """Keep the lines of this head; its length is written once in them, and nothing else is called so."""
        mark = b"\r\n" + self.name + b": "
        at = lines.index(mark) + len(mark)
        self.before, self.after = lines[:at], lines[at + len(digits) :]


class _Recall(Generic[Head]):
    """What both kinds share: the memory, and what was recalled last."""

    def __init__(self) -> None:
        self._known: dict[Key, _Known[Head]] = {}
        self._seen: set[int] = set()
        self._misses = 0  # since the last hit
        self._rest = 0  # heads to come that are not looked for
        self._last: _Known[Head] | None = None
        self._last_headers: Headers = []
        self._last_digits = b""

    def __len__(self) -> int:
        """Heads that are kept."""
        return len(self._known)

    def _key(self, raw: bytes) -> tuple[Key, bytes] | None:
        """What to look for, and the digits of the length; None: not worth looking."""
        if self._rest:
            self._rest -= 1
            return None
        found = _DIGITS.search(raw)
        if found is None or len(raw) > HEAD_BYTES_MAX:
            return None
        start, end = found.span(1)
        return (raw[:start], raw[end:]), found[1]

    def _learn(self, key: Key, head: Head) -> None:
        """`head` was read the long way: remember that it came, or, if it had come before, itself."""
        self._misses += 1
        if self._misses >= MISSES_MAX:
            self._misses, self._rest = 0, REST
        mark = hash(key)
        if mark not in self._seen:
            if len(self._seen) >= SEEN_MAX:
                self._seen.clear()
            self._seen.add(mark)
        elif head.framing is _LENGTH:
            if len(self._known) >= HEADS_MAX:
                self._known.clear()
            self._known[key] = _Known(head)

    def _recall(self, known: _Known[Head], digits: bytes) -> Headers:
        self._misses = 0
        headers: Headers = known.head.headers.copy()
        headers[known.at] = (known.name, digits)
        self._last, self._last_headers, self._last_digits = known, headers, digits
        return headers


class RequestRecall(_Recall[RequestHead]):
    """The heads of requests that one relay has read, and how they were sent on."""

    def parse(self, raw: bytes) -> RequestHead:
        """As `parse_request_head`."""
        place = self._key(raw)
        if place is None:
            return parse_request_head(raw)
        key, digits = place
        known = self._known.get(key)
        if known is None:
            head = parse_request_head(raw)
            self._learn(key, head)
            return head
        of = known.head
        return RequestHead(
            of.method, of.target, of.version, self._recall(known, digits), _LENGTH, int(digits),
            of.keep_alive, of.connection, of.upgrade, of.expects_continue,
        )  # fmt: skip

    def lines(
        self, head: RequestHead, route: Route, *, upgrade: bool, extra: list[tuple[bytes, bytes]]
    ) -> bytes:
        """As `request_lines` for `route`."""
        known = self._last
        # Who changes fields on their way puts other headers in their place: then these are not the same.
        if head.headers is not self._last_headers or upgrade or extra:
            known = None
        if known is not None and known.route is route:
            return b"".join((known.before, self._last_digits, known.after))
        origin = route.origin
        lines = request_lines(
            head, prefix=origin.prefix, authority=route.authority, upgrade=upgrade, extra=extra
        )
        if known is not None:
            known.route = route
            known.keep(lines, self._last_digits)
        return lines


class ResponseRecall(_Recall[ResponseHead]):
    """The heads of answers that one relay has read, and how they were handed on."""

    def parse(self, raw: bytes, method: bytes) -> ResponseHead:
        """As `parse_response_head`."""
        place = None if method == b"HEAD" else self._key(raw)  # to HEAD a length announces nothing
        if place is None:
            return parse_response_head(raw, method)
        key, digits = place
        known = self._known.get(key)
        if known is None:
            head = parse_response_head(raw, method)
            self._learn(key, head)
            return head
        of = known.head
        return ResponseHead(
            of.status, of.reason, of.version, self._recall(known, digits), _LENGTH, int(digits),
            of.keep_alive, of.connection,
        )  # fmt: skip

    def lines(self, head: ResponseHead, *, keep_alive: bool, client_11: bool, dechunk: bool) -> bytes:
        """As `response_lines`."""
        known = self._last
        usual = keep_alive and client_11 and not dechunk
        if known is None or head.headers is not self._last_headers or not usual:
            return response_lines(head, keep_alive=keep_alive, client_11=client_11, dechunk=dechunk)
        if not known.before:
            known.keep(response_lines(head, keep_alive=True, client_11=True), self._last_digits)
        return b"".join((known.before, self._last_digits, known.after))
