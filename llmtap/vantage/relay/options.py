"""What can be set about the relay: the `[relay]` table of the config file."""

from typing import Annotated, Literal

import msgspec

from llmtap.units import Bytes, Duration

__all__ = ["RelayOptions"]

S = 1_000_000_000


def _help(text: str, ge: int | None = None, le: int | None = None) -> msgspec.Meta:
    return msgspec.Meta(description=text, ge=ge, le=le)


class RelayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One relay's settings. Durations are ns inside, seconds or text outside; 0 switches a limit off
    only where the help says so."""

    upstream: Annotated[
        str, _help("URL of the gateway: http://host:port or https://host, a path is a prefix")
    ] = ""
    listen: Annotated[str, _help("HOST:PORT that clients connect to")] = "127.0.0.1:8080"
    workers: Annotated[int, _help("relay processes sharing the port", ge=1, le=256)] = 1
    clock: Annotated[
        Literal["kernel", "mono"],
        _help("who stamps a read: the kernel on arrival, or the relay when it gets to it"),
    ] = "kernel"
    host: Annotated[
        Literal["upstream", "client"], _help("the Host field sent on: the upstream's, or the client's own")
    ] = "upstream"
    request_id: Annotated[
        Literal["pass", "make"], _help("X-Request-Id: pass what is there, or make one where it is missing")
    ] = "pass"
    via: Annotated[bool, _help("add `Via: 1.1 llmtap`, as RFC 9110 7.6.3 asks of gateways")] = False
    forwarded_for: Annotated[bool, _help("add the client's address to X-Forwarded-For")] = False
    websocket: Annotated[bool, _help("let requests upgrade to WebSocket; the tunnel is timed too")] = True

    head_bytes: Annotated[Bytes, _help("longest request or response head")] = Bytes(65_536)
    head_fields: Annotated[int, _help("most field lines in a head", ge=1)] = 256
    streams: Annotated[int, _help("most exchanges at a time per worker; more get 503", ge=1)] = 10_000
    connections: Annotated[int, _help("most client connections per worker; more are closed", ge=1)] = 20_000
    upstream_idle_connections: Annotated[int, _help("most idle upstream connections kept", ge=0)] = 512
    pipelined_bytes: Annotated[Bytes, _help("most bytes a client may send ahead of an answer")] = Bytes(
        65_536
    )

    head_timeout: Annotated[Duration, _help("for a request head to arrive, from its first byte")] = Duration(
        20 * S
    )
    keepalive_timeout: Annotated[Duration, _help("an idle client connection is closed after this")] = (
        Duration(75 * S)
    )
    # uvicorn, under most gateways, closes after 5 s: leave before it does.
    upstream_keepalive: Annotated[
        Duration, _help("an idle upstream connection is closed after this; below the gateway's own limit")
    ] = Duration(4 * S)
    connect_timeout: Annotated[Duration, _help("to open an upstream connection, TLS included")] = Duration(
        5 * S
    )
    # The openai client gives up after 600 s by default: never give up before it.
    idle_timeout: Annotated[Duration, _help("an exchange in which no byte moves is ended after this")] = (
        Duration(600 * S)
    )
    drain_timeout: Annotated[Duration, _help("how long streams may finish after SIGTERM")] = Duration(30 * S)

    tap_bytes: Annotated[Bytes, _help("most bytes of frames waiting for the meter, per worker")] = Bytes(
        32 << 20
    )

    tls_certificate: Annotated[str | None, _help("PEM file: listen with TLS")] = None
    tls_key: Annotated[str | None, _help("PEM file: the key of tls_certificate")] = None
    upstream_ca: Annotated[str | None, _help("PEM file with the CAs to trust for the upstream")] = None
    upstream_verify: Annotated[bool, _help("verify the upstream's certificate")] = True
    upstream_server_name: Annotated[str | None, _help("name for SNI and verification, if not the URL's")] = (
        None
    )
