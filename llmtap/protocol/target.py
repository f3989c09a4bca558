"""Read the path of a request target, for all modules that classify requests by their path. Pure.

`routed_path` returns the path by which a gateway that normalises paths routes the request; endpoint, model
and tenant are recognised by it. `plain_path` returns None for a path that gateways read in different ways, so
that no path rule can leave such a request unmeasured. The relay forwards the target byte for byte.

Source: RFC 3986 5.2.4 and 6.2.2, RFC 9112 3.2.
"""

import re
from typing import Final
from urllib.parse import unquote

_SLASH: Final = "%2F"
"""Encoded slash: a part of a segment, not its end."""
_find_unusual: Final = re.compile(r"[%;]|//|/\.").search
_find_ambiguity: Final = re.compile(r"//|[;\\%?#\x00-\x1f\x7f\ufffd]|/[. ]*\.[. ]*(?:/|\Z)").search
_find_encoded_slash: Final = re.compile(r"%(?:2f|5c)", re.IGNORECASE).search


def split_target(target: bytes) -> tuple[str, str]:
    """Return the path and the query of a target, both as sent."""
    path, _, query = target.decode("latin-1").partition("?")
    if not path.startswith("/") and "://" in path:  # RFC 9112 3.2.2: the absolute form
        path = "/" + path.partition("://")[2].partition("/")[2]
    return path, query


def routed_path(path: str) -> str:
    """Return a path decoded, and without parameters (`;a=b`), empty segments and dot segments.

    An encoded slash stays `%2F`, because it does not separate segments.
    """
    if _find_unusual(path) is None:
        return path
    out: list[str] = []
    segments = path.split("/")[1:]
    for segment in segments:
        name = unquote(segment.partition(";")[0], errors="replace").replace("/", _SLASH)
        if name == "..":
            if out:
                out.pop()
        elif name not in ("", "."):
            out.append(name)
    # RFC 3986 5.2.4: a path whose last segment is a dot segment ends in a slash.
    ends_open = unquote(segments[-1]) in ("", ".", "..") if segments else True
    return "/" + "/".join(out) + ("/" if ends_open and out else "")


def plain_path(path: str, *, decoded: bool = False) -> str | None:
    """Return a path decoded; None if recipients read it in different ways.

    Some recipients remove dot segments, merge slashes, cut `;parameters`, read `\\` or an encoded slash as a
    slash, or decode twice. `decoded`: `path` is decoded already.
    """
    if not decoded and "%" in path:
        if _find_encoded_slash(path):
            return None
        path = unquote(path, errors="replace")
    return None if _find_ambiguity(path) else path
