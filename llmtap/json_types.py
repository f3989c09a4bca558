"""JSON that other programs define, and values as a reader of our JSON gets them."""

from typing import Any, TypeAlias

import msgspec

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object in the format of another program: the body of a request or response of an API, an event of a
stream, an entry of a HAR file, a row of a trace. The sender decides its members and their types, so check
each before use. A result of llmtap is a struct instead."""


def json_value(value: object) -> Any:
    """Return a result as a reader of its JSON gets it: structs are dicts, and tuples are lists."""
    return msgspec.json.decode(msgspec.json.encode(value))
