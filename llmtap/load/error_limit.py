"""When a run gives up: too many of its latest answers failed.

Source: the project's own. A load against a server that only refuses measures nothing, and a night of it less.
"""

from collections import deque

import msgspec

from llmtap.errors import ConfigError

__all__ = ["ErrorWatch", "StopErrors", "parse_stop_errors"]

LATEST = 100
LATEST_MAX = 1 << 20
_HINT = "write it like 50%, or 50%/200 for the latest 200 answers"


class StopErrors(msgspec.Struct, frozen=True):
    """Stop when more than `share` of the latest `latest` answers failed; before there are so many, never."""

    share: float
    """0 to 1, and less than 1: more than all can't fail."""
    latest: int = LATEST


def parse_stop_errors(text: str, place: str = "--stop-errors") -> StopErrors:
    """`50%`, `0.5`, `50%/200`. Raises ConfigError that names `place`."""
    whole, slash, latest = text.partition("/")
    number, percent, rest = whole.strip().partition("%")
    try:
        share = float(number) / (100 if percent else 1)
        n = int(latest) if slash else LATEST
    except ValueError:
        raise ConfigError(place, f"{text!r} is no share of errors", _HINT) from None
    if rest or not 0 <= share < 1:
        raise ConfigError(place, f"{text!r} is no share of errors: it is at least 0 % and below 100 %", _HINT)
    if not 1 <= n <= LATEST_MAX:
        raise ConfigError(place, f"{text!r}: the latest 1 to {LATEST_MAX:,} answers can be looked at", _HINT)
    return StopErrors(share, n)


class ErrorWatch:
    """Looks at answers as they end."""

    def __init__(self, rule: StopErrors) -> None:
        self._rule = rule
        self._latest: deque[bool] = deque()
        self._failed = 0

    def ended(self, *, failed: bool) -> str | None:
        """Why to stop now; None: go on."""
        rule, latest = self._rule, self._latest
        latest.append(failed)
        self._failed += failed
        if len(latest) > rule.latest:
            self._failed -= latest.popleft()
        if len(latest) == rule.latest and self._failed > rule.share * rule.latest:
            return f"{self._failed} of the latest {rule.latest} answers failed"
        return None
