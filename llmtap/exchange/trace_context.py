"""Read the `traceparent` of a request, and name its span. Source: W3C Trace Context, section 3.2."""

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple

# Version 00 ends after the flags. A later version can have more fields after a dash, which are ignored.
_FIELDS: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16


@dataclass(frozen=True, slots=True)
class TraceParent:
    """Fields of a `traceparent`; `flags`: bit 0 is "sampled"."""

    trace_id: str
    span_id: str
    """Id of the span in which the client sent the request."""
    flags: int
    """Bit 0: the trace is recorded (sampled)."""

    @property
    def sampled(self) -> bool:
        return bool(self.flags & 1)


def parse_trace_parent(text: str | None) -> TraceParent | None:
    """Return the fields of a `traceparent`; None if the text is None or invalid."""
    if text is None:
        return None
    m = _FIELDS.fullmatch(text.strip(" \t"))
    if m is None:
        return None
    version, trace_id, span_id, flags, more = m.groups()
    if version == "ff" or (version == "00" and more) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return TraceParent(trace_id, span_id, int(flags, 16))


class SpanIds(NamedTuple):
    """Ids of the span of an exchange."""

    trace_id: int
    span_id: int


def span_ids_of(name: str, parent: TraceParent | None) -> SpanIds:
    """Return the ids of the span of an exchange. They are a hash of `name`, which no other exchange has, so
    they need not be stored. If the caller has sent a trace (`parent`), the trace id is the caller's."""
    digest = blake2b(name.encode(), digest_size=24).digest()
    trace_id = int.from_bytes(digest[:16]) if parent is None else int(parent.trace_id, 16)
    return SpanIds(trace_id, int.from_bytes(digest[16:]))
