"""Settings that depend on the protocol of the target (HTTP, WebSocket or gRPC), and the header fields.

The protocol decides which options are refused, which class makes the bodies (`maker_for`), the notes for the
report, and the URL of models and metrics (`http_url_of`). `read_headers` reads the fields of `--header`.

Requests for models and metrics have the `User-Agent` USER_AGENT. Requests of the load have none, unless
`--header` sets one, so that a proxy which records both can distinguish them.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from llmtap.errors import ConfigError
from llmtap.load.bodies import BodyMaker, Decode
from llmtap.load.options import BodyOptions, LoadPlan
from llmtap.load.prompt_sender import PromptMaker
from llmtap.load.sending import Spoken, check_fields, protocol_of
from llmtap.net.listener import failure_text
from llmtap.options.fields import flags_given
from llmtap.user_files import read_file
from llmtap.version import __version__

KEY_NAME: Final = "OPENAI_API_KEY"
USER_AGENT: Final = f"llmtap-replay/{__version__}"

HEADER_FILE_BYTES_MAX: Final = 1 << 20


def read_headers(texts: Sequence[str], file: Path | None, key_env: str | None) -> list[tuple[str, str]]:
    """Return the fields of `--header` and `--header-file`, and Authorization with the key in `key_env`.

    Raises ConfigError; its message never contains the value of a field.
    """
    several = len(texts) > 1
    lines = [(f"--header, number {i}" if several else "--header", line) for i, line in enumerate(texts, 1)]
    if file is not None:
        try:
            text = read_file(file, "--header-file", HEADER_FILE_BYTES_MAX).decode()
        except UnicodeError:
            raise ConfigError("--header-file", f"{file} is not UTF-8", "save the file as UTF-8") from None
        lines += [(f"--header-file, line {i}", s) for i, s in enumerate(text.splitlines(), 1) if s.strip()]
    fields: list[tuple[str, str]] = []
    for place, line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise ConfigError(
                place, "expected `Name: value`", "the line is not shown: it can contain an API key"
            )
        fields.append((name.strip(), value.strip()))
        check_fields([(name.strip().encode(), value.strip().encode())], place)
    if not any(name.lower() == "authorization" for name, _ in fields):
        # Remove a newline at the end of the key. A shell's `$(cat key)` removes it, but other ways to set the
        # variable do not.
        key = os.environ.get(key_env or KEY_NAME, "").strip()
        if key:
            fields.append(("Authorization", f"Bearer {key}"))
            check_fields([(b"Authorization", key.encode())], "--api-key-env")
        elif key_env is not None:
            raise ConfigError(
                "--api-key-env",
                f"the environment variable {key_env} is not set, or is empty",
                "set it, or name another variable",
            )
    return fields


AnyMaker = BodyMaker | PromptMaker
REACHED_WITHIN_S: Final = 10.0
_BEHIND_GRPC: Final = (
    "gRPC's own threads stand between the wire and our stamps: what they delay is in the latencies, and in"
    " no uncertainty"
)
_NAMES: Final[Mapping[Spoken, str]] = {
    "responses": "Responses over WebSocket",
    "realtime": "Realtime",
    "grpc": "gRPC",
}
_UNUSED_BY_PROMPTS: Final = {
    "--tenant-header": "requests have no header fields of their own",
    "--label-header": "requests have no header fields of their own",
    "--body-field": "requests have no HTTP body",
    "--no-stream": "answers are always streamed",
    "--retries": "requests are not retried",
    "--dialect": "the URL names the API",
}
_UNUSED_BY_WEBSOCKETS: Final = {
    "--endpoint": "the path of the URL names the API",
    "--fresh": "a session serves one request after another",
    **_UNUSED_BY_PROMPTS,
}
_UNUSED_OPTIONS: Final[Mapping[Spoken, Mapping[str, str]]] = {
    "http": {},
    "responses": _UNUSED_BY_WEBSOCKETS,
    "realtime": _UNUSED_BY_WEBSOCKETS,
    "grpc": {
        "--endpoint": "the service has only one method",
        "--fresh": "one connection carries all calls",
        **_UNUSED_BY_PROMPTS,
        "--server": "the server is always vLLM's engine service",
        "--ca": "grpc:// has no TLS (use grpcs://)",
        "--insecure": "gRPC always verifies the certificate",
    },
}


def refuse_unused_options(load: LoadPlan) -> None:
    """Raise ConfigError for an option that the user gave and that has no effect for this target."""
    spoken = protocol_of(load.target.url)
    scheme = urlsplit(load.target.url).scheme
    flags = flags_given(load.target, load.bodies, load.sending)
    if load.bodies.stream is False:
        flags.append("--no-stream")
    for option, why in _UNUSED_OPTIONS[spoken].items():
        if option in flags and (scheme, option) != ("grpcs", "--ca"):
            raise ConfigError(
                option, f"has no effect on {scheme}:// ({_NAMES[spoken]}): {why}", f"leave out {option}"
            )


def maker_for(target: str, body: BodyOptions, decode: Decode | None) -> AnyMaker:
    spoken = protocol_of(target)
    if spoken == "http":
        return BodyMaker(body, decode=decode)
    if unsent := [name for name in body.settings if name != "ignore_eos"]:
        raise ConfigError(
            f"request.{unsent[0]}",
            f"cannot be sent over {_NAMES[spoken]}",
            f"leave out request.{unsent[0]} of the workload",
        )
    # Over gRPC, any server type accepts ignore_eos, because the service is defined by vLLM.
    accepting = {"grpc": (body.server,), "responses": ("vllm",)}.get(spoken, ("vllm", "sglang"))
    exact = body.exact_output and body.server in accepting
    return PromptMaker(spoken, model=body.model, exact_output=exact, decode=decode)


def notes_of(target: str) -> list[str]:
    """Return what must be known about results of a protocol."""
    return [_BEHIND_GRPC] if protocol_of(target) == "grpc" else []


def http_url_of(target: str) -> str | None:
    """Return the HTTP URL of the target's host and port, for models and metrics; None for gRPC."""
    parts = urlsplit(target)
    match protocol_of(target):
        case "http":
            return target
        case "responses" | "realtime":
            scheme = "https" if parts.scheme.lower() == "wss" else "http"
            return urlunsplit((scheme, parts.netloc, "", "", ""))
        case "grpc":
            return None


async def check_listening(target: str) -> None:
    """Raise ConfigError if no server listens at the target: without this check, gRPC would wait for one."""
    parts = urlsplit(target)
    port = parts.port or (443 if parts.scheme in ("wss", "grpcs") else 80)
    try:
        async with asyncio.timeout(REACHED_WITHIN_S):
            _, writer = await asyncio.open_connection(parts.hostname, port)
        writer.close()
    except (OSError, TimeoutError) as exc:
        raise ConfigError(
            "--target",
            f"{parts.scheme}://{parts.hostname}:{port} cannot be reached: {failure_text(exc)}",
            "check that the server runs and that the URL is right",
        ) from None
