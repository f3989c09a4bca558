"""The trace format `sharegpt`: JSON conversations as arrays of turns, without times and token counts.

`[{"id": str, "conversations": [{"from": "human"|"gpt"|"system", "value": str}, ...]}, ...]`. Read, each
answer becomes a row whose request has all turns before it. Written, each session becomes one conversation;
where a session branches, the branches become conversations of their own.

Source: vLLM's benchmark reads `conversations[0].value` and `[1].value`.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import msgspec
import pyarrow as pa

from llmtap.traces.bodies import compact, messages_of, read_elements, read_object
from llmtap.traces.format import FormatError, TraceFormat, TraceWriter
from llmtap.traces.sorting import grouped
from llmtap.traces.text import start_of

_ROLES: Final = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bing": "assistant", "bard": "assistant", "system": "system",
    "tool": "tool", "observation": "tool", "function": "tool",
}  # fmt: skip
"""Names of speakers in the known copies."""
_SPEAKERS: Final = {"user": "human", "assistant": "gpt", "system": "system", "developer": "system"}

Messages = list[tuple[str, str]]


class _Turn(msgspec.Struct):
    value: str
    speaker: str = msgspec.field(name="from")


class _Conversation(msgspec.Struct):
    conversations: list[_Turn | str]
    id: str | int | None = None
    model: str | None = None


_decode_turn: Final = msgspec.json.Decoder(_Turn).decode


# ---------------------------------------------------------------- reading


_ODD: Final = (
    "turns were JSON strings instead of objects",
    "turns have no answer after them, and are in no row",
    "answers follow no question: they are no rows, but part of later prompts",
    "turns are by a speaker that is none of the usual, whose name became their role",
    "conversations have no answer to anything, and became no row",
)
_TEXT, _UNANSWERED, _UNASKED, _STRANGER, _SILENT = _ODD


def _read(file: BinaryIO, notes: list[str]) -> Iterator[dict[str, Any]]:
    odd = Counter[str]()
    for number, element in enumerate(read_elements(file)):
        where = f"conversation {number}"
        try:
            conversation = msgspec.convert(element, _Conversation)
        except (ValueError, RecursionError) as exc:
            raise FormatError(f"{where}: {exc}") from None
        yield from _rows(conversation, where, number, odd)
    notes += [f"{odd[what]:,} {what}" for what in _ODD if odd[what]]


def _rows(
    conversation: _Conversation, where: str, number: int, odd: Counter[str]
) -> Iterator[dict[str, Any]]:
    name = conversation.id
    session = f"#{number}" if name is None or name == "" else str(name)
    about = {} if conversation.model is None else {"model": conversation.model}
    head = compact(about)[1:-1] + ("," if about else "")
    said: list[str] = []
    roles: list[str] = []
    sizes: list[int] = []
    count = pending = 0
    for i, given in enumerate(conversation.conversations):
        turn = given
        if isinstance(turn, str):
            odd[_TEXT] += 1
            try:
                turn = _decode_turn(turn)
            except (ValueError, RecursionError) as exc:
                raise FormatError(f"{where}, turn {i}: {exc}") from None
        role = _ROLES.get(turn.speaker.lower())
        if role is None:
            odd[_STRANGER] += 1
            role = turn.speaker
        if role == "assistant" and pending:
            yield {
                "session": session, "session_source": "explicit", "turn": count,
                "turn_by": "tool" if roles[-1] == "tool" else "human",
                "endpoint": "chat.completions", "level": "full", "model": conversation.model,
                "message_roles": list(roles), "message_bytes": list(sizes), "prompt_bytes": sum(sizes),
                "request_body": f'{{{head}"messages":[{",".join(said)}]}}', "response_text": turn.value,
            }  # fmt: skip
            count, pending = count + 1, 0
        elif role == "assistant":
            odd[_UNASKED] += 1
        elif role != "system":
            pending += 1
        said.append(compact({"role": role, "content": turn.value}))
        roles.append(role)
        sizes.append(len(turn.value.encode()))
    odd[_UNANSWERED] += pending
    odd[_SILENT] += not count


# ---------------------------------------------------------------- writing


def _write(writer: TraceWriter) -> None:
    def turns() -> Iterator[tuple[object, int, bytes]]:
        for batch in writer.batches:
            columns = [batch.column(name).to_pylist() for name in _WANTED]
            found = [_turn_of(writer, *row) for row in zip(*columns, strict=True)]
            writer.count(batch.filter(pa.array([turn is not None for turn in found], pa.bool_())))
            yield from filter(None, found)

    conversations = _Conversations(writer)
    for group in grouped(turns()):
        conversations.session(group)
    conversations.close()


_WANTED: Final = ("capture", "session", "turn", "id", "request_body", "response_text")


def _turn_of(
    writer: TraceWriter, capture: str | None, session: str | None, turn: int | None, name: str | None,
    body: str | None, answer: str | None,
) -> tuple[object, int, bytes] | None:  # fmt: skip
    messages = None
    if body is None or answer is None:
        writer.drop("no request body" if body is None else "no response text")
        return None
    try:
        messages = messages_of(read_object(body, "request"))
    except FormatError:
        pass
    if not messages:
        writer.drop("request without messages")
        return None
    n = writer.rows
    writer.rows += 1
    # A row of no session is a conversation of its own.
    key = n if session is None else (capture, session)
    record = msgspec.json.encode((session if session is not None else name, messages, answer))
    return key, n if turn is None else turn, record


_decode_record: Final = msgspec.json.Decoder(tuple[str | None, Messages, str]).decode


class _Conversations:
    """Writes the turns of each session as one conversation."""

    def __init__(self, writer: TraceWriter) -> None:
        self._file = writer.out
        self._writer = writer
        self._count = 0
        self._branched = 0

    def session(self, records: Iterator[bytes]) -> None:
        """Write a session. The prompt of a turn repeats what was said in the turns before it."""
        history: Messages = []
        name: str | None = None
        branches = 0
        for record in records:
            name, messages, answer = _decode_record(record)
            if history and not _goes_on(history, messages):
                # An edited or repeated question begins another conversation.
                self._put(name, branches, history)
                branches += 1
            history = [*messages, ("assistant", answer)]
        self._put(name, branches, history)
        self._branched += branches > 0

    def close(self) -> None:
        self._file.write(b"\n]\n" if self._count else b"[]\n")
        self._writer.note(
            self._branched,
            "sessions went on from an earlier point than their last turn: they became several conversations",
        )

    def _put(self, name: str | None, branch: int, history: Messages) -> None:
        told = f"conversation-{self._count}" if name is None else name
        conversation = {
            "id": f"{told}-branch-{branch}" if branch else told,
            "conversations": [
                {"from": _SPEAKERS.get(role, role), "value": text} for role, text in history
            ],
        }  # fmt: skip
        self._file.write(b",\n" if self._count else b"[\n")
        self._file.write(msgspec.json.encode(conversation))
        self._count += 1


def _goes_on(history: Messages, messages: Messages) -> bool:
    """Whether a prompt repeats what was said. Clients shorten the model's turns: those need only be there."""
    if len(messages) <= len(history):
        return False
    return all(
        a[0] == b[0] and (a[1] == b[1] or a[0] == "assistant")
        for a, b in zip(history, messages[: len(history)], strict=True)
    )


# ---------------------------------------------------------------- telling


def _sniff(head: bytes, name: str) -> bool:
    text = start_of(head)
    if not text.startswith(b"["):
        return False
    return text[1:].lstrip()[:1] in (b"{", b"") and b'"conversations"' in text


_NO_TIME: Final = "it has no times"
_NO_TOKENS: Final = "lengths depend on the tokenizer: it has text instead"

FORMAT: Final = TraceFormat(
    name="sharegpt",
    title="ShareGPT conversations (JSON)",
    extensions=(".json",),
    holds=frozenset({"session and turn", "message roles and sizes", "request body", "response text"}),
    needs=frozenset({"request body", "response text"}),
    why={
        "model": "it has no field for it",
        "arrival": _NO_TIME, "think time": _NO_TIME, "end of the answer": _NO_TIME, "first token": _NO_TIME,
        "times of events": _NO_TIME, "input tokens": _NO_TOKENS, "output tokens": _NO_TOKENS,
        "usage": _NO_TOKENS, "request body": "only its messages' text",
    },
    sniff=_sniff,
    info={"level": "full"},
    rows=_read,
    writes=_write,
)  # fmt: skip
