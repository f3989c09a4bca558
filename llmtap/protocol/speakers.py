"""Speaker of a text: the model, or another speaker, such as the user, whose text the answer repeats.

Many APIs send more than the output of the model: transcripts of the user's speech, messages of the user,
earlier messages of the conversation, results of tools. The speaker is named by a role beside the text, or by
a role in the event that begins the message.
"""

from typing import Any, Final

from llmtap.json_types import JsonObject

SPEAKERS: Final = ("role", "author", "speaker", "sender", "from", "who", "by", "source", "participant")
"""Names of members that name the speaker of the texts in the same object."""
_SPEAKERS: Final = frozenset(SPEAKERS)
MODEL_ROLES: Final = frozenset({"assistant", "model", "ai", "bot", "agent"})
_OTHER_ROLES: Final = frozenset(
    {"user", "user_input", "system", "tool", "human", "developer", "function", "customer", "caller"}
)
_ROLE_CHARS_MAX: Final = 16
MESSAGES_MAX: Final = 256
"""Maximum number of messages of one answer whose speaker is stored."""
_ID_CHARS_MAX: Final = 128


def role_of(value: JsonObject) -> str:
    """Return the role of the speaker that an object names, in lower case; "" if it names none."""
    for name in SPEAKERS:
        role = value.get(name)
        if type(role) is dict:
            role = role.get("role")
        if type(role) is str and role:
            return _plain_role(role)
    return ""


def is_other_role(role: Any) -> bool:
    """Return whether a role is that of another speaker than the model."""
    return type(role) is str and _plain_role(role) in _OTHER_ROLES


def has_other_speaker(value: JsonObject) -> bool:
    """Return whether an object names another speaker of its texts than the model."""
    return not _SPEAKERS.isdisjoint(value) and role_of(value) in _OTHER_ROLES


def _plain_role(role: str) -> str:
    """Return a role in lower case, without a prefix and a number: `user` for `ROLE_USER` or `user-1`."""
    return role[:_ROLE_CHARS_MAX].lower().removeprefix("role_").rstrip("0123456789").rstrip("-_:# ")


class MessageSpeakers:
    """Stores the ids of the messages of one answer that are not from the model."""

    __slots__ = ("_other_ids",)

    def __init__(self) -> None:
        self._other_ids: set[str | int] = set()
        """Ids of messages that are not from the model."""

    def has_other_speaker(self, key: Any, role: Any) -> bool:
        """Return whether a message has another speaker than the model. `key`: id of the message. `role`: role
        in this event; without it, the role in an earlier event of the message decides."""
        if type(key) is not int and (type(key) is not str or len(key) > _ID_CHARS_MAX):
            return False
        if is_other_role(role):
            if len(self._other_ids) < MESSAGES_MAX:
                self._other_ids.add(key)
        elif role:
            self._other_ids.discard(key)
        return key in self._other_ids
