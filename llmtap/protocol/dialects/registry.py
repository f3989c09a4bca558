"""Choose the dialect of an answer by its content, or by the request's path where the content does not decide.

`exchange/answer.py` passes all events to `Undecided`: the first JSON decides, and the chosen reader of
`DIALECTS` gets this event and the later ones. Nothing is configured, because one gateway speaks several
dialects and knows it better than its operator.
"""

from typing import Any, Final, Protocol

from llmtap.protocol.delta import Delta, EventClass
from llmtap.protocol.dialects import bedrock
from llmtap.protocol.dialects.anthropic import Anthropic
from llmtap.protocol.dialects.cohere import Cohere
from llmtap.protocol.dialects.gemini import Gemini
from llmtap.protocol.dialects.generate import SGLang, Tgi
from llmtap.protocol.dialects.local_servers import LlamaCpp, LmStudio, Ollama
from llmtap.protocol.dialects.openai_chat import OpenAIChat
from llmtap.protocol.dialects.openai_choices import OpenAICompletions
from llmtap.protocol.dialects.openai_responses import OpenAIRealtime, OpenAIResponses
from llmtap.protocol.dialects.openai_shapes import read_frame, read_json
from llmtap.protocol.dialects.shapes import failure_in
from llmtap.protocol.sse import SseEvent


class Dialect(Protocol):
    """Reads one answer; it may remember what earlier events said. Nothing in it raises at bad bytes."""

    @property
    def name(self) -> str | None: ...

    def read_event(self, event: SseEvent) -> Delta: ...

    def read_body(self, body: bytes) -> Delta: ...


DIALECTS: Final = (
    OpenAIChat,
    OpenAICompletions,
    OpenAIResponses,
    OpenAIRealtime,
    Anthropic,
    Ollama,
    LlamaCpp,
    Tgi,
    SGLang,
    Cohere,
    LmStudio,
    Gemini,
    bedrock.BedrockConverse,
    bedrock.BedrockText,
)
"""`claim(value, path)` returns how sure a first JSON object makes it: 3 it names itself (4 where others share
its names and the path decides), 2 its shape fits, 1 only the path, 0 not ours."""


def choose(value: Any, path: str) -> Dialect | None:
    """The dialect surest of `value`, the first JSON of an answer to `path`; the earlier one of equals."""
    if isinstance(value, list) and value:
        value = value[0]  # several prompts, several answers
    if not isinstance(value, dict):
        return None
    claims = [dialect.claim(value, path) for dialect in DIALECTS]
    surest = max(claims)
    return DIALECTS[claims.index(surest)]() if surest else None


class Undecided:
    """Reader of an answer until its first JSON decides the dialect. Events of an unknown dialect count as
    unparsed."""

    __slots__ = ("_path", "chosen")

    def __init__(self, path: str) -> None:
        self._path = path
        self.chosen: Dialect | None = None

    @property
    def name(self) -> str | None:
        return None if self.chosen is None else self.chosen.name

    @property
    def names_read(self) -> frozenset[str] | None:
        """Of the members at the top of an event that may come again, those that are read: a dialect that has
        such events (`Delta.repeatable`) names them. None where nobody knows."""
        names: frozenset[str] | None = getattr(self.chosen, "names_read", None)
        return names

    @property
    def answer_id(self) -> bytes | None:
        """Id of the answer, of dialects in which a request may name the answer before it."""
        found: str | None = getattr(self.chosen, "answer_id", None)
        return None if found is None else found.encode("utf-8", "surrogatepass")

    def read_event(self, event: SseEvent) -> Delta:
        chosen = self.chosen
        delta = self._read_first(event) if chosen is None else chosen.read_event(event)
        # Events that may come again have no such member: `is_alone`, `Anthropic._read`.
        if not delta.repeatable and event.data is not None and bedrock.GUARDRAIL_ACTION in event.data:
            bedrock.add_guardrail(delta, event.data)
        return delta

    def _read_first(self, event: SseEvent) -> Delta:
        data = event.data
        if data is None or not data.lstrip().startswith(b"{"):
            return read_frame(event)
        value = read_json(data)
        self.chosen = choose(value, self._path)
        if self.chosen is not None:
            return self.chosen.read_event(event)
        return _read_unknown(value, event.event)

    def read_body(self, body: bytes) -> Delta:
        delta = self._read_whole(body)
        if bedrock.GUARDRAIL_ACTION in body:
            bedrock.add_guardrail(delta, body)
        return delta

    def _read_whole(self, body: bytes) -> Delta:
        value = read_json(body)
        self.chosen = choose(value, self._path)
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict) and "error" in value[0]:
            return _read_unknown(value[0], None)  # Google's services wrap their errors
        return _read_unknown(value, None) if self.chosen is None else self.chosen.read_body(body)


def _read_unknown(value: Any, name: bytes | None) -> Delta:
    """JSON of no dialect we know; an `error` member is an error in all of them."""
    if name == b"ping" or (isinstance(value, dict) and value.get("type") == "ping"):
        return Delta(EventClass.KEEPALIVE)
    return failure_in(value, name)
