"""The admin API, asked: one document at a time, and what went wrong in words for who looks at a screen."""

import socket
import ssl
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import msgspec

from llmtap import __version__
from llmtap.errors import LlmtapError
from llmtap.net.failures import failure_said

__all__ = ["Admin", "Denied", "Document", "NotThere", "Trouble", "Untrusted"]

Document = dict[str, Any]

ANSWER_S: Final = 10.0
"""An hour of thousands of series takes the meter a second or two."""
DOCUMENT_BYTES_MAX: Final = 64 << 20
"""5,000 tenants in one summary."""
SAID_CHARS_MAX: Final = 200


class Trouble(LlmtapError):
    """There is no answer that could be shown; the text says why, `hint` what to try, where that is known."""

    def __init__(self, said: str, hint: str | None = None) -> None:
        super().__init__(said)
        self.hint = hint


class NotThere(Trouble):
    """The path is not known there: an older tap."""


class Denied(Trouble):
    """The admin port asks for a token, or for another one."""


class Untrusted(Trouble):
    """Its certificate is of no CA that is trusted here, or of another name."""


class Admin:
    """One admin port. Made inside a running loop, closed by `async with`.

    Args:
        url: what paths are appended to, without a slash at its end.
        token: for `Authorization: Bearer`; a redirect is never followed, so nobody else is shown it.
        tls: what verifies https where it is not the system's trust.
    """

    def __init__(self, url: str, token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        headers = {"User-Agent": f"llmtap-top/{__version__}", "Accept": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._url = url
        self._has_token = token is not None
        self._tls = tls or True
        self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=ANSWER_S))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ask no more."""
        await self._session.close()

    async def get(self, path: str, **query: str) -> Document:
        """The JSON object at a path of `/api/v1/`. Raises Trouble."""
        try:
            async with self._session.get(
                f"{self._url}/api/v1/{path}", params=query, ssl=self._tls, allow_redirects=False
            ) as response:
                body = await _bounded(response)
                if response.status != 200:
                    raise self._refused(response.status, body)
        except aiohttp.ClientConnectorCertificateError as exc:
            raise Untrusted(failure_said(exc)) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise Trouble(failure_said(exc), _hint(exc, self._url)) from None
        try:
            document = msgspec.json.decode(body)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise Trouble("what answers there is no admin port of llmtap: it does not send JSON")
        return document

    def _refused(self, status: int, body: bytes) -> Trouble:
        match status:
            case 401 | 403 if self._has_token:
                return Denied("the token is refused")
            case 401 | 403:
                # A port that has no token says with 403 which names it may be asked by.
                return Denied((status == 403 and _said(body)) or "it asks for a token")
            case 404:
                return NotThere("this tap does not know the path: it is older, or no admin port of llmtap")
        said = _said(body)
        return Trouble(f"it answers {status}" + (f": {said}" if said else ""))


def _hint(exc: Exception, url: str) -> str | None:
    """What to try, by the kind of trouble; None: nothing listens there, as far as one can tell."""
    scheme, _, rest = url.partition("://")
    inner = getattr(exc, "os_error", None) or exc
    match inner:
        case socket.gaierror():
            return "the name in --admin: is it spelt right, and known on this machine?"
        case ssl.SSLError() if scheme == "https":
            return f"if it has no TLS: --admin http://{rest}"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError() if scheme == "http":
            return f"it ended the connection without an answer; if it has TLS: --admin https://{rest}"
        case TimeoutError():
            return "is it reachable from here? A firewall may drop what is sent to it"
    return None


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > DOCUMENT_BYTES_MAX:
            raise Trouble(f"its answer is longer than {DOCUMENT_BYTES_MAX >> 20} MiB")
    return bytes(body)


def _said(body: bytes) -> str:
    """The message of an error as the admin API words it."""

    class Inner(msgspec.Struct):
        message: str = ""

    class Outer(msgspec.Struct):
        error: Inner = msgspec.field(default_factory=Inner)

    try:
        return msgspec.json.decode(body, type=Outer).error.message[:SAID_CHARS_MAX]
    except (ValueError, RecursionError):
        return ""
