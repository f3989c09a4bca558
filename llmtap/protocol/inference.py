"""Decide by method and path whether a request asks a model for output; other requests are only counted.

Each vantage has `SkipRules`, made from its option `skip`, which replaces the default rules `NOT_INFERENCE`
(GET, HEAD, `/tokenize` and others); with an empty list all requests are measured. A rule is a method (such as
`GET`; it does not skip streams and WebSockets) or a path with all paths below it: `/health` covers
`/health/live`, not `/healthz`. Paths are decoded and without the query. No path rule covers a path that
gateways read in different ways (`target.py`): many gateways read `/v1/files/../chat/completions` as a chat
request, so it is measured.
"""

import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

from llmtap.errors import ConfigError
from llmtap.protocol.target import plain_path, split_target

NOT_INFERENCE_METHODS: Final = ("DELETE", "GET", "HEAD", "OPTIONS")
"""Methods of scrapes, health checks, lists and pages. APIs send requests to models by POST or WebSocket."""
NOT_INFERENCE: Final = (
    *NOT_INFERENCE_METHODS,
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
    "/v1/files",
    "/v1/uploads",
    "/v1/batches",
)
"""Default rules. `/v1/models` is not among them: POST to a path below it asks a model (Gemini, KServe)."""
TARGETS_KEPT: Final = 256
"""Maximum number of targets whose rule is cached."""
_METHOD: Final = re.compile(r"[A-Z]+")
_STREAM: Final = re.compile(r"(?:^|&)stream=(?:true|1)(?:&|$)", re.IGNORECASE)


class SkipRules:
    """Rules of the requests that are forwarded but not measured."""

    __slots__ = ("_exact_paths", "_method_bytes", "_methods", "_prefixes", "_rule_of_target")

    def __init__(self, rules: Collection[str], place: str = "skip") -> None:
        # A string is a collection of strings, too, so type checkers do not find this mistake.
        if isinstance(rules, str):
            raise ConfigError(place, f"expected a list of rules, got {rules!r}", f"write skip=({rules!r},)")
        paths = [rule for rule in rules if not _METHOD.fullmatch(rule)]
        for path in paths:
            if not path.startswith("/"):
                hint = "write a path such as /health, or a method in capitals such as GET"
                raise ConfigError(place, f"the path {path!r} must begin with /", hint)
            if "*" in path or "?" in path:
                hint = "write only the path: it includes all paths below it"
                raise ConfigError(place, f"the path {path!r} must not contain * or ?", hint)
        self._methods = frozenset(rules) - frozenset(paths)
        """Methods whose requests are not measured."""
        self._method_bytes = frozenset(method.encode() for method in self._methods)
        self._exact_paths = {path.rstrip("/") or "/": path for path in paths}
        """By path whose requests are not measured: its rule."""
        self._prefixes = tuple(f"{path}/" for path in self._exact_paths if path != "/")
        """The paths of `_exact_paths` with `/`: paths below them are not measured either."""
        self._rule_of_target = lru_cache(TARGETS_KEPT)(self._find_target_rule)
        """Returns the rule for a request's target; the latest results are kept."""

    def rule_of(
        self, method: str, path: str, query: str = "", fields: Iterable[tuple[bytes, bytes]] = ()
    ) -> str | None:
        """Return the rule that covers a request, or None. `path`: decoded; `method`: "" tests only paths."""
        return self._rule_of(method, plain_path(path, decoded=True), query, fields)

    def _rule_of(
        self, method: str, path: str | None, query: str, fields: Iterable[tuple[bytes, bytes]]
    ) -> str | None:
        """Return the rule by which a request is not measured; None: no rule fits."""
        if path is not None:
            if path in self._exact_paths:
                return self._exact_paths[path]
            if path.startswith(self._prefixes):
                return next(
                    self._exact_paths[below[:-1]] for below in self._prefixes if path.startswith(below)
                )
        if method not in self._methods or _STREAM.search(unquote(query)):
            return None
        for name, value in fields:
            low = name.lower()
            if (low == b"upgrade" and value.lower() == b"websocket") or (
                low == b"accept" and b"text/event-stream" in value.lower()
            ):
                return None
        return method

    def rule_of_head(self, method: bytes, target: bytes, fields: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Return the rule that covers the request with this head, or None."""
        if method not in self._method_bytes:
            return self._rule_of_target(target)
        path, query = split_target(target)
        return self._rule_of(method.decode(), plain_path(path), query, fields)

    def _find_target_rule(self, target: bytes) -> str | None:
        return self._rule_of("", plain_path(split_target(target)[0]), "", ())
