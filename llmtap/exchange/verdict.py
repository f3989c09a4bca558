"""What an exchange comes to when its answer is over: how it ended, why no token came, and its usage as kept.

Of what others wrote only figures and single words are kept: names of errors, of reasons, of counts. Text
might be anybody's.
"""

import re
from typing import Any, Final

from llmtap.exchange.bounds import BOUNDS
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import EventClass, Outcome
from llmtap.exchange.paths import holds_key
from llmtap.protocol.verdicts import MODEL_REFUSAL

__all__ = ["WORD_CHARS_MAX", "figures_of", "is_word", "judge", "no_token_reason"]

WORD_CHARS_MAX: Final = BOUNDS["usage"].chars
_WORD: Final = re.compile(rf"[A-Za-z0-9_.:/\-]{{1,{WORD_CHARS_MAX}}}")
_FIGURE_MAX: Final = 1 << 53
_USAGE_DEPTH_MAX: Final = 4
_USAGE_ITEMS_MAX: Final = 64
"""Members of a usage object, and of each object in it; the longest known has 18."""


def judge(
    x: Exchange, said: Outcome, *, done: bool, lost: str | None, error_type: str | None
) -> tuple[Outcome, str | None]:
    """The relay's outcome in the light of what the events said, and a sentence about it.

    Args:
        said: how the relay saw it end.
        done: an end marker came.
        lost: why the body could not be followed to its end.
        error_type: of an error that the events told.
    """
    if said is not Outcome.COMPLETE:
        return said, None
    about = f" ({error_type})" if error_type is not None and is_word(error_type) else ""
    if x.refusal is not None and x.refusal["confidence"] != "low":
        return Outcome.REFUSED, None
    if x.status is not None and x.status >= 400:
        return Outcome.UPSTREAM_ERROR, f"upstream answered {x.status}{about}"
    if error_type is not None:
        return Outcome.UPSTREAM_ERROR, f"upstream sent an error in its answer{about}"
    if lost is not None:
        return said, f"upstream sent a body that cannot be read: {lost}"
    if x.stream and x.dialect is not None and not done and x.finish_reason is None:
        return Outcome.TRUNCATED, "upstream ended the stream without a finish reason or an end marker"
    return said, None


def no_token_reason(x: Exchange) -> str:
    """Why a stream brought no token."""
    match x.outcome:
        case Outcome.COMPLETE:
            said = set(x.timeline.events.classes) - {EventClass.KEEPALIVE, EventClass.DONE}
            return "only_metadata" if said else "empty"
        case Outcome.REFUSED:
            kind = None if x.refusal is None else x.refusal["kind"]
            return "refusal" if kind == MODEL_REFUSAL else "guardrail"
        case Outcome.CLIENT_CANCELLED:
            return "cancelled"
        case Outcome.REJECTED:
            return "rejected"
        case _:
            return "error"


def figures_of(usage: dict[str, Any], depth: int = 1) -> dict[str, Any]:
    """A usage object as sent, as far as it is figures and single words: texts have no business in it."""
    out: dict[str, Any] = {}
    for key, value in usage.items():
        if len(out) == _USAGE_ITEMS_MAX:
            break
        if not isinstance(key, str) or not is_word(key):
            continue
        if isinstance(value, dict):
            if depth < _USAGE_DEPTH_MAX:
                out[key] = figures_of(value, depth + 1)
        elif value is None or _is_figure(value) or (isinstance(value, str) and is_word(value)):
            out[key] = value
    return out


def is_word(text: str) -> bool:
    """A name of at most WORD_CHARS_MAX characters, as programs write them, and no key."""
    return _WORD.fullmatch(text) is not None and not holds_key(text)


def _is_figure(value: Any) -> bool:
    # What every JSON reader can take: NaN is none, and beyond 2^53 not all of them are exact.
    return isinstance(value, int | float) and -_FIGURE_MAX <= value <= _FIGURE_MAX
