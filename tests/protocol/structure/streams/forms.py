"""Streams in the form of tables, the texts of those with text, and helpers for their events.

A stream is a list of `(event name, value)`; a value that is bytes is sent as it is. In a stream with text,
the events that carry output are marked with `Out` around the value.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from llmtap.protocol.sse import SseEvent


class Out(NamedTuple):
    """An event that carries output; `kind` is its class."""

    value: Any
    kind: str = "content"


class Stream(NamedTuple):
    name: str
    events: list[SseEvent]
    output: list[int]
    """Places of the events that carry output."""
    content: list[int]
    """Of those the ones with content."""


Item = Any | tuple[str, Any]


def stream(name: str, items: list[Item]) -> Stream:
    events, output, content = [], [], []
    for i, item in enumerate(items):
        event, value = item if type(item) is tuple else (None, item)
        if isinstance(value, Out):
            output.append(i)
            if value.kind == "content":
                content.append(i)
            value = value.value
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        events.append(SseEvent(i * 100, (i + 1) * 100, data, event.encode() if event else None))
    return Stream(name, events, output, content)


LAKE = ["The", " lake", " is", " deep", " and", " cold", ",", " so", " few", " fish", " live", " there", "."]
SHORT = ["Moss", " grows", " slowly", "."]
TWO = ["High water", " is at six."]
TRAILING = ["Here ", "is ", "a ", "plan ", "for ", "the ", "week: ", "rest."]
SLICES = ["The lake i", "s deep and", " cold, so ", "few fish l", "ive there."]
CHINESE = ["湖水", "很深", "也", "很", "冷", "。"]
CODE = ["def", " f", "(", "x", "):\n", "    return", " x", " +", " ", "1"]
GERMAN = ["Der", " See", " ist", " tief", " und", " kalt", "."]
SENTENCES = ["The lake is deep. ", "It is cold. ", "Few fish live there."]
TEXTS = {
    "lake": LAKE,
    "short": SHORT,
    "two": TWO,
    "trailing": TRAILING,
    "slices": SLICES,
    "chinese": CHINESE,
    "code": CODE,
    "german": GERMAN,
    "sentences": SENTENCES,
}


def so_far(pieces: list[str]) -> list[str]:
    return ["".join(pieces[: i + 1]) for i in range(len(pieces))]


Envelope = Callable[[list[str]], list[Item]]
DONE = b"[DONE]"


def out(values: list[Any], kind: str = "content") -> list[Item]:
    return [Out(v, kind) for v in values]


def named(event: str, values: list[Any], kind: str = "content") -> list[Item]:
    return [(event, Out(v, kind)) for v in values]
