"""What is dealt to an arm as a whole: the conversation or the tenant that a request is part of.

Told from header fields, or, for a conversation, from its opening: the system prompt and the first message of
the user, which every later request of the conversation repeats. A unit is bytes that go into a keyed
hash and nowhere else.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from llmtap.protocol.http1 import Headers, header_value

__all__ = ["named_unit", "opening_unit"]

_ABSENT = msgspec.Raw()
_NOTHING = frozenset({b"", b'""', b"[]", b"null"})


class _Body(msgspec.Struct):
    """The fields in which the dialects we know keep a conversation; their text stays raw."""

    messages: list[msgspec.Raw] = []
    system: msgspec.Raw = _ABSENT
    """Anthropic Messages."""
    instructions: msgspec.Raw = _ABSENT
    """OpenAI Responses, as is the next."""
    input: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    """Completions."""


class _Message(msgspec.Struct):
    role: Any = None
    content: msgspec.Raw = _ABSENT


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_message = msgspec.json.Decoder(_Message).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


def named_unit(headers: Headers, names: Sequence[str]) -> bytes | None:
    """Name and value of the first of these fields (lower case) that the request has, or None."""
    for name in names:
        value = header_value(headers, name.encode())
        if value:
            return name.encode() + b"\0" + value
    return None


def opening_unit(body: bytes, sender: bytes) -> bytes | None:
    """What the conversation in this JSON body began with, or None where there is no telling.

    `sender` goes into it, so that two tenants who both begin with "hello" are not one conversation.
    """
    try:
        asked = _decode_body(body)
        messages = asked.messages
        if not messages and bytes(asked.input).lstrip().startswith(b"["):
            messages = _decode_items(asked.input)
        parts = [sender, bytes(asked.system), bytes(asked.instructions)]
        if not messages:
            said = bytes(asked.input) or bytes(asked.prompt)
            return None if said in _NOTHING else b"\0".join([*parts, said])
        for raw in messages:
            message = _decode_message(raw)
            parts.append(bytes(message.content))
            if message.role == "user":
                return b"\0".join(parts)
    except (ValueError, RecursionError):
        pass
    return None
