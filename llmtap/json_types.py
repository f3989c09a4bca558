"""Type of the JSON objects of other programs, and the conversion of a result to plain JSON values."""

from typing import Any, TypeAlias

import msgspec

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object in the format of another program: the body of a request or response of an API, an event of a
stream, an entry of a HAR file, a row of a trace. The sender decides its members and their types, so check
each member before use. The results of llmtap are structs, not JsonObjects."""


def json_value(value: object) -> Any:
    """Return a result as decoding its JSON would return it: with dicts for structs, and lists for tuples."""
    return msgspec.json.decode(msgspec.json.encode(value))
