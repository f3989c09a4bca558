"""Options of the relay: the `[relay]` table of the configuration file."""

from typing import Annotated, Any, Final, Literal

import msgspec

from llmtap.options.fields import opt
from llmtap.protocol.inference import NOT_INFERENCE
from llmtap.units import Bytes, Duration

S = 1_000_000_000
_NOT_ZERO: Final[Any] = {"at_least": 1_000_000, "hint": "use 365d to wait practically without a limit"}


class RelayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one relay.

    Durations are in ns here; configurations have numbers of seconds or texts such as `20s`. 0 means "no
    limit" only if the help of the option says so.
    """

    upstream: Annotated[
        str, opt("URL of the gateway: http://host:port or https://host; a path is used as a prefix")
    ] = ""
    listen: Annotated[str, opt("HOST:PORT that clients connect to")] = "127.0.0.1:8080"
    workers: Annotated[int, opt("number of relay processes, which share the port", ge=1, le=256)] = 1
    clock: Annotated[
        Literal["kernel", "mono"],
        opt("source of read timestamps: the kernel on arrival, or the relay's monotonic clock at the read"),
    ] = "kernel"
    host: Annotated[
        Literal["upstream", "client"],
        opt("Host field of forwarded requests: of the upstream URL, or as sent by the client"),
    ] = "upstream"
    request_id: Annotated[
        Literal["pass", "make"],
        opt("X-Request-Id: forward it unmodified, or also create it if it is missing"),
    ] = "pass"
    via: Annotated[bool, opt("add `Via: 1.1 llmtap`, as RFC 9110 7.6.3 requires of gateways")] = False
    forwarded_for: Annotated[bool, opt("add the client's address to X-Forwarded-For")] = False
    websocket: Annotated[bool, opt("allow upgrades to WebSocket; the tunnel is measured as well")] = True

    thread: Annotated[
        bool, opt("experimental: forward long responses in a thread of compiled code; needs clock = kernel")
    ] = False

    skip: Annotated[
        tuple[str, ...],
        opt(
            "requests that are not inference, as methods (`GET`) and paths with all below them (`/tokenize`):"
            " forwarded and counted, not measured; `[]`: measure all requests"
        ),
    ] = NOT_INFERENCE

    head_bytes: Annotated[Bytes, opt("maximum size of a request or response head", at_least=256)] = Bytes(
        65_536
    )
    head_fields: Annotated[int, opt("maximum number of field lines in a head", ge=1)] = 256
    streams: Annotated[
        int, opt("maximum number of concurrent exchanges per worker; requests above it get 503", ge=1)
    ] = 10_000
    connections: Annotated[
        int, opt("maximum number of client connections per worker; connections above it are closed", ge=1)
    ] = 20_000
    upstream_idle_connections: Annotated[int, opt("maximum number of idle upstream connections", ge=0)] = 512
    pipelined_bytes: Annotated[
        Bytes, opt("maximum bytes of pipelined requests that a client may send before a response")
    ] = Bytes(65_536)

    head_timeout: Annotated[
        Duration, opt("maximum time to receive a request head, from its first byte", **_NOT_ZERO)
    ] = Duration(20 * S)
    keepalive_timeout: Annotated[Duration, opt("idle time after which a client connection is closed")] = (
        Duration(75 * S)
    )
    # uvicorn, on which most gateways run, closes an idle connection after 5 s: the relay must close before.
    upstream_keepalive: Annotated[
        Duration,
        opt("idle time after which an upstream connection is closed; should be below the gateway's limit"),
    ] = Duration(4 * S)
    connect_timeout: Annotated[
        Duration, opt("maximum time to open an upstream connection, including TLS", **_NOT_ZERO)
    ] = Duration(5 * S)
    # The openai client gives up after 600 s by default; the proxy must not give up earlier.
    idle_timeout: Annotated[
        Duration, opt("time without any byte after which an exchange is aborted", **_NOT_ZERO)
    ] = Duration(600 * S)
    ready_needs_upstream: Annotated[
        bool, opt("/readyz answers 503 while the upstream accepts no connection; it is checked every 2 s")
    ] = False
    drain_timeout: Annotated[
        Duration, opt("maximum time for streams to finish after SIGTERM, SIGHUP or SIGUSR2")
    ] = Duration(30 * S)

    tap_bytes: Annotated[Bytes, opt("maximum bytes of frames waiting for the meter, per worker")] = Bytes(
        32 << 20
    )

    tls_certificate: Annotated[
        str | None, opt("PEM file with the certificate for client connections; enables TLS")
    ] = None
    tls_key: Annotated[str | None, opt("PEM file with the private key of tls_certificate")] = None
    upstream_ca: Annotated[str | None, opt("PEM file with the CAs to trust for the upstream")] = None
    upstream_verify: Annotated[bool, opt("verify the upstream's certificate")] = True
    upstream_server_name: Annotated[
        str | None, opt("host name for SNI and verification (default: the host of the URL)")
    ] = None
