"""Options of a replay, and what depends on whether its target speaks HTTP, WebSocket or gRPC.

`llmtap replay` and `llmtap bench` build `ReplayOptions`; `perform.py` reads them. By the protocol of the
target: which options are refused, who makes the bodies (`maker_for`), notes for the report, where models and
metrics are found (`http_beside`).

Requests besides the load (models, metrics) have USER_AGENT as `User-Agent`, so that a recording on the way
can tell them from the load, which has none unless `--header` gives one.
"""

import asyncio
import os
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import msgspec

from llmtap import __version__
from llmtap.errors import ConfigError
from llmtap.load.bodies import BodyMaker, BodyOptions, Decode
from llmtap.load.prompt_sender import PromptMaker
from llmtap.load.sending import Spoken, check_fields, protocol_of
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.latency import DEFAULT_BENEFIT
from llmtap.net.listener import failure_said
from llmtap.net.tls import client_context
from llmtap.units import Duration

KEY_NAME: Final = "OPENAI_API_KEY"
USER_AGENT: Final = f"llmtap-replay/{__version__}"


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a plan is sent. The constructor raises ConfigError naming the option of `llmtap replay`."""

    target: str
    endpoint: str = "chat.completions"
    """Or a path."""
    model: str | None = None
    headers: list[tuple[str, str]] = []
    """May hold keys: never in a result."""
    tenant_header: str | None = None
    ca: str | None = None
    insecure: bool = False
    closed: int | None = None
    processes: int = 1
    ray: str | None = None
    """Address of a Ray cluster; None: this host."""
    fresh: bool = False
    connections: int | None = None
    """Connections opened before the start; None: estimated from the plan."""
    clock: str = "kernel"
    timeout: Duration
    connect_timeout: Duration
    duration: Duration | None = None
    drain: Duration | None = None
    retries: int = 0
    stop_errors: float | None = None
    """Share of the latest answers above which a run stops, if so many failed."""
    request_ids: str = "llmtap"
    warmup: str = "none"
    """`auto` (IETF draft, 4.5), `none` (a cold start), or a number of requests."""
    slo: str | None = None
    percentiles: dict[str, float] = {}
    """Further percentiles of each metric, by name."""
    reader: Benefit = DEFAULT_BENEFIT
    capture: str | None = None
    scrape: str | None = None
    """`none`, a URL, or None: the target's /metrics, if any."""
    texts: bool = False
    """Keep answer texts in the exchanges passed on; a capture never has them."""

    def __post_init__(self) -> None:
        for option, ns in (
            ("--timeout", self.timeout), ("--connect-timeout", self.connect_timeout),
            ("--duration", self.duration),
        ):  # fmt: skip
            if ns is not None and ns <= 0:
                raise ConfigError(option, "expected a time above 0")
        if self.drain is not None and self.drain < 0:
            raise ConfigError("--drain", "cannot be below 0")
        check_fields([(name.encode(), value.encode()) for name, value in self.headers])
        if self.tenant_header is not None:
            # RFC 9110 5.1: a field's name is a token.
            check_fields([(self.tenant_header.encode(), b"")], "--tenant-header")
        if self.ca is not None:
            _check_ca(self.ca)
        if self.scrape is not None and self.scrape != "none":
            _check_metrics(self.scrape)

    def check_tenants(self, tenants: Sequence[str]) -> None:
        """Raise ConfigError for a tenant that cannot be the value of `tenant_header`."""
        if self.tenant_header is not None:
            name = self.tenant_header.encode()
            check_fields([(name, tenant.encode()) for tenant in set(tenants)], "--tenant-header")

    def tls(self) -> ssl.SSLContext | None:
        plain = self.ca is None and not self.insecure
        return None if plain else client_context(self.ca, not self.insecure)


def read_headers(given: Sequence[str], file: Path | None, key_env: str | None) -> list[tuple[str, str]]:
    """Return the fields of `--header`, `--header-file` and the key of the environment as Authorization.

    Raises ConfigError; its text never contains a value.
    """
    lines = [("--header", line) for line in given]
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as exc:
            reason = getattr(exc, "strerror", None) or "is not UTF-8"
            raise ConfigError("--header-file", f"{file} cannot be read: {reason}") from None
        lines += [("--header-file", line) for line in text.splitlines() if line.strip()]
    fields: list[tuple[str, str]] = []
    for place, line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise ConfigError(place, "expected `Name: value`", "its value is not shown here: it may be a key")
        fields.append((name.strip(), value.strip()))
        check_fields([(name.strip().encode(), value.strip().encode())], place)
    if not any(name.lower() == "authorization" for name, _ in fields):
        key = os.environ.get(key_env or KEY_NAME, "").strip()  # `$(cat key)` is not how all set it
        if key:
            fields.append(("Authorization", f"Bearer {key}"))
            check_fields([(b"Authorization", key.encode())], "--api-key-env")
        elif key_env is not None:
            raise ConfigError("--api-key-env", f"the environment has no {key_env}")
    return fields


def _check_ca(place: str) -> None:
    """Also for http:// targets: a missing file is a mistake."""
    try:
        Path(place).read_bytes()
    except OSError as exc:
        raise ConfigError("--ca", f"{place} cannot be read: {exc.strerror}") from None
    try:
        client_context(place, True)
    except ConfigError:
        raise ConfigError("--ca", f"{place} holds no certificate in PEM") from None


def _check_metrics(url: str) -> None:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        hint = "such as http://127.0.0.1:8000/metrics, or none"
        raise ConfigError("--metrics", f"expected the URL of metrics, got {url!r}", hint)


AnyMaker = BodyMaker | PromptMaker
REACHED_WITHIN_S: Final = 10.0
_BEHIND_GRPC: Final = (
    "gRPC's own threads stand between the wire and our stamps: what they delay is in the latencies, and in"
    " no uncertainty"
)
_NAMES: Final[Mapping[Spoken, str]] = {
    "responses": "Responses over WebSocket", "realtime": "Realtime", "grpc": "gRPC",
}  # fmt: skip
_NEITHER: Final = {
    "--tenant-header": "no header goes with a request",
    "--body-field": "there are no bodies",
    "--no-stream": "answers always come in pieces",
    "--retries": "nothing is sent again",
}
_OF_WEBSOCKETS: Final = {
    "--endpoint": "the path of the URL names the API",
    "--fresh": "a session serves one request after another", **_NEITHER,
}  # fmt: skip
_MEANINGLESS: Final[Mapping[Spoken, Mapping[str, str]]] = {
    "http": {}, "responses": _OF_WEBSOCKETS, "realtime": _OF_WEBSOCKETS,
    "grpc": {
        "--endpoint": "there is one method", "--fresh": "one connection carries all calls", **_NEITHER,
        "--server": "it is vLLM's engine service", "--ca": "it is spoken without TLS (grpcs:// has it)",
        "--insecure": "gRPC always verifies the certificate",
    },
}  # fmt: skip


def refuse_meaningless(target: str, given: Mapping[str, bool]) -> None:
    """Raise ConfigError naming a `given` option that has no meaning for this target."""
    spoken = protocol_of(target)
    scheme = urlsplit(target).scheme
    for option, why in _MEANINGLESS[spoken].items():
        if given.get(option) and (scheme, option) != ("grpcs", "--ca"):
            raise ConfigError(
                option, f"has no meaning for {scheme}:// ({_NAMES[spoken]}): {why}", "leave it out"
            )


def maker_for(target: str, body: BodyOptions, decode: Decode | None) -> AnyMaker:
    spoken = protocol_of(target)
    if spoken == "http":
        return BodyMaker(body, decode=decode)
    # vLLM's gRPC service knows ignore_eos; over a WebSocket these servers would.
    known = {"grpc": (body.server,), "responses": ("vllm",)}.get(spoken, ("vllm", "sglang"))
    exact = body.exact_output and body.server in known
    return PromptMaker(spoken, model=body.model, exact_output=exact, decode=decode)


def notes_of(target: str) -> list[str]:
    return [_BEHIND_GRPC] if protocol_of(target) == "grpc" else []


def http_beside(target: str) -> str | None:
    """Return the HTTP URL of the same port, for models and metrics; None for gRPC."""
    parts = urlsplit(target)
    match protocol_of(target):
        case "http":
            return target
        case "responses" | "realtime":
            scheme = "https" if parts.scheme.lower() == "wss" else "http"
            return urlunsplit((scheme, parts.netloc, "", "", ""))
        case "grpc":
            return None


async def reach(target: str) -> None:
    """Raise ConfigError if nobody listens: gRPC would wait for a server."""
    parts = urlsplit(target)
    port = parts.port or (443 if parts.scheme in ("wss", "grpcs") else 80)
    try:
        async with asyncio.timeout(REACHED_WITHIN_S):
            _, writer = await asyncio.open_connection(parts.hostname, port)
        writer.close()
    except (OSError, TimeoutError) as exc:
        raise ConfigError(
            "--target", f"{parts.scheme}://{parts.hostname}:{port} cannot be reached: {failure_said(exc)}"
        ) from None
