"""Decide whether a row of a trace can be sent as an HTTP request, and give the reason if it cannot.

A row with a path is a recorded request: it is sent to its path with its body. A body without a path is a
prompt of a data set: its members decide between the endpoints of `BODY_MEMBERS`. A row without a body becomes
a prompt of the same length, if its endpoint generates text. The functions are pure.
"""

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from llmtap.exchange.request import endpoint_of

BODY_MEMBERS: Final[Mapping[str, str]] = {
    "messages": "chat.completions",
    "prompt": "completions",
    "input": "responses",
}
"""Endpoint of a body without a path, by member. If a body has several of these, the first decides."""
NO_TEXT: Final = frozenset({"embeddings", "mcp", "a2a"})
"""Endpoints whose answers are not generated text."""
_PATH: Final = re.compile(r"/[!-~]*")
"""Valid path of a request (RFC 9112 3.2: no white space and no control characters)."""
_DOT_SEGMENT: Final = re.compile(r"/(?:\.|%2e){1,2}(?=/|$)", re.IGNORECASE)
"""Path segment `.` or `..`. For `..`, a server also removes the previous segment (RFC 3986 5.2.4)."""
_decode_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def endpoint_of_body(body: bytes) -> str | None:
    """Return the endpoint for a body; None if its members do not determine it."""
    try:
        members = _decode_members(body)
    except (ValueError, RecursionError):
        return None
    return next((endpoint for name, endpoint in BODY_MEMBERS.items() if name in members), None)


def reason_unsendable(
    method: str | None, path: str | None, endpoint: str | None, body: str | None
) -> str | None:
    """Return why a row cannot be sent, as the rest of a sentence that begins with `rows`; None if it can."""
    if body is None:
        endpoint = endpoint or (None if path is None else endpoint_of(path))
        if endpoint in NO_TEXT or (endpoint is None and path is not None):
            where = path if endpoint is None else endpoint
            return f"ask {where}, which is not known to generate text, and their bodies are not recorded"
        return None
    if method not in (None, "POST"):
        return f"are {method} requests: only POST is sent"
    if path is not None and not _PATH.fullmatch(path):
        return "have a path that HTTP does not allow"
    if path is not None and _DOT_SEGMENT.search(path.partition("?")[0]):
        return "have a path with . or .., which would leave the path of the target"
    try:
        members = _decode_members(body)
    except (ValueError, RecursionError):
        return "have a body that is no JSON object"
    if path is None and not members.keys() & BODY_MEMBERS.keys():
        return f"have a body without a path and without {', '.join(BODY_MEMBERS)}"
    return None
