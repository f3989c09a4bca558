"""TLS contexts for listeners and upstreams, and `TlsStream`, a Stream that asyncio encrypts."""

import asyncio
import socket
import ssl
from pathlib import Path
from typing import cast

from llmtap.clock import SystemClock
from llmtap.errors import ConfigError
from llmtap.net.stream import Handler, is_quiet
from llmtap.net.tcp_info import acked_bytes_of, has_left, received_bytes_of

mono_ns = SystemClock.mono_ns


class TlsStream(asyncio.Protocol):
    """A connection that asyncio encrypts. A read is stamped when its plain text appears.

    `write` returns False while asyncio's buffer is above its high-water mark. asyncio reads and closes
    `sock`; this class only queries its state.
    """

    __slots__ = ("_is_full", "_sock", "_transport", "closed", "handler", "resumed_ns")

    def __init__(self, handler: Handler, sock: socket.socket) -> None:
        self.handler = handler
        self._sock = sock
        self.closed = False
        """Whether `close` or `abort` was called, or the connection was lost."""
        # Stays 0: only kernel timestamps need it, and TLS data are stamped on reading.
        self.resumed_ns = 0
        self._is_full = False  # whether asyncio's buffer is above its high-water mark
        self._transport: asyncio.Transport | None = None
        """asyncio's transport; None before the TLS handshake has ended."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's, but have the same methods.
        self._transport = cast(asyncio.Transport, transport)
        if self.closed:  # the owner closed the stream during the handshake
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self.closed:
            self.handler.on_data(data, mono_ns())

    def eof_received(self) -> bool:
        if not self.closed:
            self.handler.on_eof()
        return False  # close both directions, because TLS connections are not used half-closed

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed:
            self.closed = True
            self.handler.on_lost(exc if isinstance(exc, OSError) else None)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if not self.closed:
            self.handler.on_drained()

    @property
    def pending(self) -> int:
        """Number of bytes in asyncio's buffer while it is above the high-water mark; else 0."""
        if self.closed or not self._is_full or self._transport is None:
            return 0
        return self._transport.get_write_buffer_size()

    @property
    def acked_bytes(self) -> int:
        """Number of encrypted bytes that the peer's kernel has acknowledged."""
        return acked_bytes_of(self._sock)

    @property
    def received_bytes(self) -> int:
        """Number of encrypted bytes that arrived."""
        # Only this count of the kernel includes a part of a record that waits in the TLS layer.
        return received_bytes_of(self._sock)

    @property
    def out_of_order(self) -> bool:
        """Always False: reads have no timestamps of the kernel."""
        return False  # timestamps are taken on reading, so the order of packets does not matter

    def came_at_once(self, data: bytes) -> bool:
        """Always False: the segments of decrypted data are unknown."""
        return False

    def stamped_since(self, t_ns: int) -> bool:
        """Always False: reads have no timestamps of the kernel."""
        return False

    def write(self, data: bytes) -> bool:
        if self.closed or self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("cannot write, because the TLS connection is closed: open a new one")
        self._transport.write(data)
        return not self._is_full

    @property
    def paused(self) -> bool:
        """Whether reading is suspended."""
        return self._transport is not None and not self.closed and not self._transport.is_reading()

    def pause(self) -> None:
        if self._transport and not self.closed:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport and not self.closed:
            self._transport.resume_reading()

    def shutdown_write(self) -> None:
        """Close the connection after everything is sent, because TLS cannot close one direction only."""
        self.close()

    def peer_left(self) -> bool:
        """Return False: with TLS, only a read shows that the peer has closed."""
        return False

    def look_again(self) -> None:
        """Do nothing: asyncio's transport notices a reset by itself."""

    def is_alive(self) -> bool:
        """Return False if the peer has closed, or has sent anything that is unread."""
        is_open = not self.closed and self._transport is not None and not self._transport.is_closing()
        return is_open and is_quiet(self._sock)

    def has_unread(self) -> bool:
        """Return whether the peer has sent bytes that are unread, and has not closed. After a close, the
        unread bytes are possibly only TLS's notice of the close."""
        return not self.closed and not is_quiet(self._sock) and not has_left(self._sock)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if self._transport:
                self._transport.close()

    def abort(self) -> None:
        if not self.closed:
            self.closed = True
            if self._transport:
                self._transport.abort()


def server_context(certificate: str, key: str, prefix: str = "relay.tls_") -> ssl.SSLContext:
    """Return a listener's TLS context; `prefix`: beginning of the options' names. Raises ConfigError."""
    for place, name in ((f"{prefix}certificate", certificate), (f"{prefix}key", key)):
        if not Path(name).is_file():
            raise ConfigError(place, f"there is no file {name!r}", "give the path of a PEM file")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key)
    except (ssl.SSLError, OSError) as exc:
        raise ConfigError(
            f"{prefix}certificate",
            f"{certificate} cannot be loaded with {prefix}key = {key}: {exc}",
            "both must be PEM files, and the key must belong to the certificate",
        ) from None
    return context


def client_context(ca: str | None, verify: bool) -> ssl.SSLContext:
    """Return the TLS context for connections to an upstream, whose certificate is verified with the system's
    CAs or, if `ca` (a PEM file) is given, only with these CAs. `verify` false: it is not verified.

    Raises ConfigError.
    """
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=ca)
    except (ssl.SSLError, OSError) as exc:
        raise ConfigError(
            "relay.upstream_ca",
            f"the CAs in {ca!r} cannot be read: {exc}",
            "give the path of a PEM file with certificates",
        ) from None
    context.set_alpn_protocols(["http/1.1"])
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
