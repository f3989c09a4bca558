"""Targets that do not speak HTTP: what they are asked beforehand, and which options mean nothing to them."""

import asyncio
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from llmtap.errors import ConfigError
from llmtap.load.bodies import BodyMaker, BodyOptions, Decode
from llmtap.load.sessions.prompt_sender import PromptMaker, Spoken, protocol_of
from llmtap.net.failures import failure_said

__all__ = ["AnyMaker", "http_beside", "maker_for", "notes_of", "protocol_of", "reach", "refuse_meaningless"]

AnyMaker = BodyMaker | PromptMaker
REACHED_WITHIN_S: Final = 10.0
_BEHIND_GRPC: Final = (
    "gRPC's own threads stand between the wire and our stamps: what they delay is in the latencies, and in"
    " no uncertainty"
)
_NAMES: Final[Mapping[Spoken, str]] = {"realtime": "Realtime", "grpc": "gRPC"}
_MEANINGLESS: Final[Mapping[Spoken, Mapping[str, str]]] = {
    "realtime": {
        "--endpoint": "a response is what is asked for",
        "--body-field": "there are no bodies",
        "--no-stream": "answers always come in pieces",
        "--fresh": "a session serves one request after another",
        "--retries": "nothing is sent again",
        "--retry-wait": "nothing is sent again",
    },
    "grpc": {
        "--endpoint": "there is one method",
        "--body-field": "there are no bodies",
        "--no-stream": "answers always come in pieces",
        "--fresh": "one connection carries all calls",
        "--retries": "nothing is sent again",
        "--retry-wait": "nothing is sent again",
        "--server": "it is llmtap's own service",
        "--ca": "it is spoken without TLS",
        "--insecure": "it is spoken without TLS",
    },
    "http": {},
}


def refuse_meaningless(target: str, given: Mapping[str, bool]) -> None:
    """Raises ConfigError that names the option which was `given` and says nothing to this target."""
    spoken = protocol_of(target)
    for option, why in _MEANINGLESS[spoken].items():
        if given.get(option):
            scheme = urlsplit(target).scheme
            raise ConfigError(
                option, f"has no meaning for {scheme}:// ({_NAMES[spoken]}): {why}", "leave it out"
            )


def maker_for(target: str, body: BodyOptions, decode: Decode | None) -> AnyMaker:
    """What makes bodies for this target."""
    spoken = protocol_of(target)
    if spoken == "http":
        return BodyMaker(body, decode=decode)
    # Our own service knows both fields; Realtime has them where the server is one of those that do.
    exact = body.exact_output and (spoken == "grpc" or body.server in ("vllm", "sglang"))
    return PromptMaker(spoken, model=body.model, exact_output=exact, decode=decode)


def notes_of(target: str) -> list[str]:
    """What is to be known of every figure that this target gives."""
    return [_BEHIND_GRPC] if protocol_of(target) == "grpc" else []


def http_beside(target: str) -> str | None:
    """HTTP at the same port, where a server of Realtime has its models and metrics; None for gRPC."""
    parts = urlsplit(target)
    match protocol_of(target):
        case "http":
            return target
        case "realtime":
            scheme = "https" if parts.scheme.lower() == "wss" else "http"
            return urlunsplit((scheme, parts.netloc, "", "", ""))
        case "grpc":
            return None


async def reach(target: str) -> None:
    """Raises ConfigError where nobody listens: gRPC would wait for a server."""
    parts = urlsplit(target)
    port = parts.port or (443 if parts.scheme == "wss" else 80)
    try:
        async with asyncio.timeout(REACHED_WITHIN_S):
            _, writer = await asyncio.open_connection(parts.hostname, port)
        writer.close()
    except (OSError, TimeoutError) as exc:
        raise ConfigError(
            "--target", f"{parts.scheme}://{parts.hostname}:{port} cannot be reached: {failure_said(exc)}"
        ) from None
