"""Speaker of a text: the model, or somebody else whose text the answer repeats.

Many APIs send more than the output of the model: transcripts of the user's speech, the user's messages,
earlier messages of the conversation, results of tools. A role beside the text names the speaker, or a role in
the event that begins the message.
"""

from typing import Any, Final

from llmtap.json_types import JsonObject

SPEAKERS: Final = ("role", "author", "speaker", "sender", "from", "who", "by", "source", "participant")
"""Members that name the speaker of the texts in their object."""
_SPEAKERS: Final = frozenset(SPEAKERS)
MODEL_ROLES: Final = frozenset({"assistant", "model", "ai", "bot", "agent"})
_OTHER_ROLES: Final = frozenset(
    {"user", "user_input", "system", "tool", "human", "developer", "function", "customer", "caller"}
)
_ROLE_CHARS_MAX: Final = 16
MESSAGES_MAX: Final = 256
"""Messages of one answer whose speaker is kept."""
_ID_CHARS_MAX: Final = 128


def role_of(value: JsonObject) -> str:
    """Return the role that an object names, in lower case; "" if it names none."""
    for name in SPEAKERS:
        role = value.get(name)
        if type(role) is dict:
            role = role.get("role")
        if type(role) is str and role:
            return _plain(role)
    return ""


def is_other(role: Any) -> bool:
    """Return whether a role is that of somebody else than the model."""
    return type(role) is str and _plain(role) in _OTHER_ROLES


def is_of_other(value: JsonObject) -> bool:
    """Return whether the texts of an object are those of somebody else than the model."""
    return not _SPEAKERS.isdisjoint(value) and role_of(value) in _OTHER_ROLES


def _plain(role: str) -> str:
    """Return a role in lower case and without a number, as in `user-1`."""
    return role[:_ROLE_CHARS_MAX].lower().removeprefix("role_").rstrip("0123456789").rstrip("-_:# ")


class MessageSpeakers:
    """Messages of one answer that are not the model's, by their ids."""

    __slots__ = ("_other_ids",)

    def __init__(self) -> None:
        self._other_ids: set[str | int] = set()

    def is_of_other(self, key: Any, role: Any) -> bool:
        """Return whether a message is that of somebody else than the model. `key`: its id; `role`: the role
        in this event, if there is one, else that of an earlier event decides."""
        if type(key) is not int and (type(key) is not str or len(key) > _ID_CHARS_MAX):
            return False
        if is_other(role):
            if len(self._other_ids) < MESSAGES_MAX:
                self._other_ids.add(key)
        elif role:
            self._other_ids.discard(key)
        return key in self._other_ids
