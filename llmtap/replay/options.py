"""What a replay can be told, checked where it is told."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from llmtap.errors import ConfigError
from llmtap.load.stopping import StopErrors
from llmtap.units import Duration

__all__ = ["ReplayOptions", "read_headers"]

KEY_NAME: Final = "OPENAI_API_KEY"


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a plan is carried out; what is sent is the Plan's."""

    target: str
    endpoint: str = "chat.completions"
    model: str | None = None
    """None: the one that the server offers, if it is one; a captured body keeps its own."""
    headers: list[tuple[str, str]] = []
    """May hold keys: never in a result."""
    tenant_header: str | None = None
    ca: str | None = None
    insecure: bool = False
    closed: int | None = None
    """Slots of a closed loop; None: open loop."""
    processes: int = 1
    ray: str | None = None
    """Of the cluster where they run; None: here."""
    realtime: bool = False
    fresh: bool = False
    connections: int | None = None
    """Opened before the start; None: what the plan is likely to need."""
    clock: str = "kernel"
    timeout: Duration
    connect_timeout: Duration
    duration: Duration | None = None
    drain: Duration | None = None
    retries: int = 0
    retry_wait: Duration
    limit_in_flight: int | None = None
    """Open loop: what is due while so many are under way is skipped, and counted."""
    stop_errors: StopErrors | None = None
    request_ids: str = "llmtap"
    """What the id of each request begins with."""
    warmup: str = "none"
    """`auto` (seed 000, 4.5), `none` (a cold start), or a number of requests."""
    slo: str | None = None
    capture: str | None = None
    scrape: str | None = None
    """`none`, a URL, or None: the target's /metrics, if there is one."""


def read_headers(given: Sequence[str], file: Path | None, key_env: str | None) -> list[tuple[str, str]]:
    """Fields of `--header`, `--header-file` and the key of the environment, as Authorization.

    Raises ConfigError; its text never has a value in it.
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
    if not any(name.lower() == "authorization" for name, _ in fields):
        key = os.environ.get(key_env or KEY_NAME)
        if key:
            fields.append(("Authorization", f"Bearer {key}"))
        elif key_env is not None:
            raise ConfigError("--api-key-env", f"the environment has no {key_env}")
    return fields
