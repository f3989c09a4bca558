"""Commands that do not end by themselves: which they are, where they listen, when they are up."""

import shlex
from typing import Final, NamedTuple

GATEWAY: Final = "127.0.0.1:8000"
_ENDS: Final = frozenset({"--check", "--keys", "--help"})


class Lasting(NamedTuple):
    """A command that runs until somebody ends it."""

    ports: frozenset[int]
    """Who starts another server on one of these has ended this one before."""
    url: str = ""
    """It answers 200 once it is up."""
    says: str = ""
    """Or its output has this."""
    proxy: tuple[str, str] | None = None
    """Of a tap: where clients go, and its admin port."""
    watched: bool = False
    """One looks at it, and has seen enough when it is up."""


def lasting(command: str) -> Lasting | None:
    """What kind of such a command it is; None for one that ends."""
    words = shlex.split(command, comments=True)
    while words and "=" in words[0]:  # variables before the command
        del words[0]
    if not words or _ENDS & {*words}:
        return None
    words[0] = words[0].rpartition("/")[2]
    match words:
        case ["llmtap", "proxy", *rest]:
            listen = _option(rest, "--listen", "127.0.0.1:8080")
            admin = _option(rest, "--admin", "127.0.0.1:9464")
            ports = frozenset((_port(listen), _port(admin)))
            return Lasting(ports, f"http://{admin}/readyz", proxy=(listen, admin))
        case ["llmtap", "meter", *rest]:
            admin = _option(rest, "--admin", "127.0.0.1:9464")
            return Lasting(frozenset((_port(admin),)), f"http://{admin}/healthz")
        case ["llmtap", "sim", "serve", *rest]:
            listen = _option(rest, "--listen", GATEWAY)
            places = [listen, *filter(None, [_option(rest, "--grpc", "")])]
            return Lasting(frozenset(map(_port, places)), f"http://{listen}/health")
        case ["uvicorn", *rest]:
            port = int(_option(rest, "--port", "8000"))
            return Lasting(frozenset((port,)), says="Uvicorn running on")
        case ["llmtap", "demo", *rest] if "--keep" in rest:
            return Lasting(frozenset(), says="measured ", watched=True)
        case ["curl", *rest] if any("/api/v1/live" in word for word in rest):
            return Lasting(frozenset(), says="event:", watched=True)
    return None


def _option(words: list[str], name: str, default: str) -> str:
    return words[words.index(name) + 1] if name in words else default


def _port(place: str) -> int:
    return int(place.rpartition(":")[2])
