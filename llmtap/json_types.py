"""Types of JSON that llmtap reads and writes but does not define."""

from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object in the format of another program: the body of a request or response of an API, an event of a
stream, an entry of a HAR file, a row of a trace. The sender decides its members and their types, so check
each before use. A result of llmtap is a struct instead."""
