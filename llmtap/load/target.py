"""The target of a load, read from its URL: protocol, address and path; and the head of its HTTP requests.

`parse_target` checks the URL, endpoint and header fields of `--target` and `--header`, and returns a
`LoadTarget`, which writes the head of each request. `shown_url` removes secrets from a URL for reports.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import urlsplit

from llmtap.errors import ConfigError
from llmtap.net.pool import Origin, parse_origin
from llmtap.protocol.http1 import Headers

Spoken = Literal["http", "responses", "realtime", "grpc"]
WEBSOCKET: Final = ("responses", "realtime")

PATHS: Final = {
    "chat.completions": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
}
_TOKEN: Final = frozenset(b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_OURS: Final = frozenset({b"host", b"content-length", b"content-type", b"transfer-encoding", b"connection"})


def protocol_of(url: str) -> Spoken:
    """Return the protocol of a target. A WebSocket is Realtime unless its path ends in `/responses`."""
    parts = urlsplit(url)
    match parts.scheme.lower():
        case "ws" | "wss":
            return "responses" if parts.path.rstrip("/").endswith("/responses") else "realtime"
        case "grpc" | "grpcs":
            return "grpc"
    return "http"


@dataclass(frozen=True, slots=True)
class LoadTarget:
    origin: Origin
    path: bytes
    headers: Headers = field(default_factory=list)
    """Besides Host, Content-Type and Content-Length. May hold keys: sent and shown nowhere else."""

    def head(
        self, body_bytes: int, extra: Sequence[tuple[bytes, bytes]] = (), *, close: bool = False
    ) -> bytes:
        lines = [
            b"POST " + self.origin.prefix + self.path + b" HTTP/1.1",
            b"Host: " + self.origin.authority,
            b"Content-Type: application/json",
            b"Content-Length: %d" % body_bytes,
        ]
        lines += [name + b": " + value for name, value in (*self.headers, *extra)]
        if close:
            lines.append(b"Connection: close")
        lines.append(b"\r\n")
        return b"\r\n".join(lines)


def parse_target(url: str, endpoint: str, headers: Headers) -> LoadTarget:
    """Parse `http://host:port[/prefix]`; `endpoint` is one of PATHS, or a path. A prefix ending in /v1 is the
    API's own. Raises ConfigError naming `--target` or `--header`."""
    origin = parse_origin(url, "--target")
    path = endpoint if endpoint.startswith("/") else PATHS[endpoint]
    if origin.prefix.endswith(b"/v1"):
        path = path.removeprefix("/v1")
    check_fields(headers)
    return LoadTarget(origin, path.encode(), headers)


def check_fields(headers: Headers, place: str = "--header") -> None:
    """Raise ConfigError naming `place` for a field that cannot be sent; the message has no value in it."""
    for name, value in headers:
        if not name or not _TOKEN.issuperset(name):
            raise ConfigError(place, "a field's name has letters, digits and hyphens")
        if name.lower() in _OURS:
            raise ConfigError(place, f"{name.decode()} is set by llmtap")
        if any((byte < 0x20 and byte != 0x09) or byte == 0x7F for byte in value):
            raise ConfigError(place, f"the value of {name.decode()} has control characters")


def shown_url(url: str) -> str:
    """Return a URL without user, password and query, which may be secret."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}" + (
        f":{parts.port}{parts.path}" if parts.port else parts.path
    )
