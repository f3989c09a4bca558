"""Describe a failed connection (refused, unknown name, TLS error) in a few words, for reports and errors.

`failure_said` takes an exception and returns the text; `is_own_shortage` tells a lack of file descriptors or
memory on this host from a fault of the other side.
"""

import errno
import os
import re
import socket
import ssl
from typing import Final

_ERRNO: Final = re.compile(r"\[Errno (\d+)\]")
"""asyncio's error about several addresses has the number in its text only."""
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"})
"""OpenSSL's reasons when the peer answers in plain text."""
_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""socket(2), accept(2): no file descriptor or kernel memory left here."""


def failure_said(error: BaseException) -> str:
    """Return a short text such as `connection refused` or `TLS: certificate not trusted`.

    Errors inside others (aiohttp's `os_error`, `certificate_error`) come first.
    """
    inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    match inner:
        case TimeoutError():
            return "timed out"
        case ssl.SSLCertVerificationError():
            why = str(getattr(inner, "verify_message", "")).rstrip(".")
            return "TLS: certificate not trusted" + (f" ({why})" if why else "")
        case ssl.SSLError():
            reason = getattr(inner, "reason", None) or "it failed"
            spoken = reason.replace("_", " ").lower()
            return "TLS: the server does not speak it" if reason in _NO_TLS else f"TLS: {spoken}"
        case socket.gaierror():
            again = inner.errno == socket.EAI_AGAIN
            return "name cannot be looked up at the moment" if again else "name not known"
    told = _ERRNO.search(str(inner))
    number = getattr(inner, "errno", None) or (int(told[1]) if told is not None else None)
    if number:
        return _begun_small(os.strerror(number))
    # aiohttp's errors about an answer have a `message`; their whole text repeats the URL.
    return _begun_small(str(getattr(inner, "message", "") or inner)) or type(inner).__name__


def is_own_shortage(error: OSError) -> bool:
    """Return whether this process or host has run out of file descriptors or memory for sockets."""
    return error.errno in _SHORTAGES


def _begun_small(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line[:1].lower() + line[1:] if line[1:2].islower() else line  # not of an abbreviation
