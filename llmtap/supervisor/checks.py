"""Checks of a configuration against the system, before anything starts."""

import os
from typing import Final

from llmtap.capture.tokenizer import load_tokenizer
from llmtap.config import Settings
from llmtap.errors import ConfigError
from llmtap.meter.setup import check_socket_path
from llmtap.net.listener import parse_address
from llmtap.net.pool import parse_origin
from llmtap.net.tls import client_context, server_context

__all__ = ["check_measuring", "check_settings"]

HEAD_BYTES_MIN: Final = 256


def check_settings(settings: Settings, supervisor: int | None = None) -> None:
    """Check a proxy's settings; `supervisor`: its process, if not this one. Raises ConfigError."""
    relay = settings.relay
    if not relay.upstream:
        raise ConfigError(
            "relay.upstream",
            "the gateway's URL is missing",
            "give --upstream http://HOST:PORT, or set LLMTAP_RELAY_UPSTREAM",
        )
    origin = parse_origin(relay.upstream, "relay.upstream")
    if bool(relay.tls_certificate) != bool(relay.tls_key):
        raise ConfigError("relay.tls_key", "tls_certificate and tls_key go together")
    if relay.tls_certificate and relay.tls_key:
        server_context(relay.tls_certificate, relay.tls_key)
    if origin.tls or relay.upstream_ca:
        client_context(relay.upstream_ca, relay.upstream_verify)
    for key, text in (("relay.listen", relay.listen), ("meter.admin", settings.meter.admin)):
        try:
            parse_address(text)
        except ValueError as exc:
            raise ConfigError(key, str(exc)) from None
    if relay.head_bytes < HEAD_BYTES_MIN:
        raise ConfigError("relay.head_bytes", f"no request fits in {relay.head_bytes} bytes")
    check_measuring(settings, supervisor)
    for key in ("idle_timeout", "head_timeout", "connect_timeout"):
        if getattr(relay, key) <= 0:
            raise ConfigError(f"relay.{key}", "must be more than 0", "for no limit to speak of, try 365d")
    if settings.experiment.enabled and not settings.experiment.arms:
        raise ConfigError("experiment.arms", "is empty, and experiment.enabled is true", "name two arms")
    upstreams = {"relay.upstream": origin}
    for i, arm in enumerate(settings.experiment.arms):
        if arm.upstream is not None:
            place = f"experiment.arms[{i}].upstream"
            upstreams[place] = parse_origin(arm.upstream, place)
    for place, found in upstreams.items():
        if (found.host, found.port) == parse_address(relay.listen):
            raise ConfigError(place, "is the tap's own address: it would forward to itself")
    host, _ = parse_address(settings.meter.admin)
    if host not in ("127.0.0.1", "::1", "localhost") and not settings.meter.admin_token:
        raise ConfigError(
            "meter.admin_token", f"is needed when the admin port listens on {host or 'every interface'}"
        )


def check_measuring(settings: Settings, supervisor: int | None = None) -> None:
    """Check the settings of any meter. Raises ConfigError."""
    if settings.meter.admin_tls_certificate and settings.meter.admin_tls_key:
        server_context(settings.meter.admin_tls_certificate, settings.meter.admin_tls_key, "meter.admin_tls_")
    if settings.meter.socket is not None:
        check_socket_path(settings.meter.socket)
    if settings.cost.gpu_hour and not settings.cost.gpus:
        raise ConfigError("cost.gpus", "is 0, and cost.gpu_hour has a price", "how many are there?")
    if settings.meter.tokenizer is not None:
        load_tokenizer(settings.meter.tokenizer)
    if settings.capture.to is not None:
        # Arrow takes 40 MB and 200 ms to import.
        from llmtap.capture.store.store import check

        check(settings.capture, supervisor)
    if settings.otlp.ca and not os.access(settings.otlp.ca, os.R_OK):
        raise ConfigError("otlp.ca", f"{settings.otlp.ca} cannot be read")
