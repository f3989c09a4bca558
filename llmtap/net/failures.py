"""Why there was no connection, or no answer, in words: for readers of a report, who know no class names."""

import errno
import os
import re
import socket
import ssl
from typing import Final

__all__ = ["failure_said", "is_own_shortage"]

_ERRNO: Final = re.compile(r"\[Errno (\d+)\]")
"""In what asyncio says of several addresses that all failed: that error has no number of its own."""
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"})
"""OpenSSL's reasons where the other side answers in plain text."""
_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""socket(2), accept(2): no file descriptor left in the process or on the host, or no memory in the kernel."""


def failure_said(error: BaseException) -> str:
    """What happened: `connection refused`, `name not known`, `timed out`, `TLS: certificate not trusted`.

    An error that wraps another (aiohttp's `os_error`, `certificate_error`) is told as the one inside.
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
    """This process, or its host, has run out of what a socket takes: nobody else is to blame."""
    return error.errno in _SHORTAGES


def _begun_small(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line[:1].lower() + line[1:] if line[1:2].islower() else line  # not of an abbreviation
