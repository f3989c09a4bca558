"""Events for tests of dialects, and what a Delta says in as few words as it takes."""

import json
from typing import Any

import msgspec

from llmtap.protocol.delta import Delta, EventClass
from llmtap.protocol.sse import SseEvent

_QUIET = Delta(EventClass.METADATA)


def encode(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def event(value: Any, name: bytes | None = None) -> SseEvent:
    data = encode(value)
    return SseEvent(0, len(data) + 8, data, name)


def told(delta: Delta) -> dict[str, Any]:
    """The fields that differ from those of a Delta that says nothing, `event_class` as `is`."""
    out: dict[str, Any] = {"is": delta.event_class.name.lower()}
    for name in Delta.__struct_fields__[1:]:
        if name == "repeatable":  # no more than a promise about events to come: test_repetition.py
            continue
        value = getattr(delta, name)
        if value != getattr(_QUIET, name):
            out[name] = msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else value
    if delta.counts is not None and not delta.counts.refused:
        del out["counts"]["refused"]
    if "also" in out:
        out["also"] = [c.name.lower() for c in delta.also]
    return out
