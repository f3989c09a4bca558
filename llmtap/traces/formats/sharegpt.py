"""The trace format `sharegpt`: JSON conversations as arrays of turns, without times and token counts.

`[{"id": str, "conversations": [{"from": "human"|"gpt"|"system", "value": str}, ...]}, ...]`. When it is read,
each answer becomes a row, and the row's request has all turns before the answer. A conversation can have a
`system` text, which becomes the first message, and `tools` (a list, or its JSON text), which become the tools
of the request. A `function_call` with its answers (`observation`, `tool`) becomes tool calls with ids,
because servers refuse an answer whose call they cannot find. A file with one conversation per line (JSON
Lines) is read, too. When the format is written, each session becomes one conversation; if a session branches,
each branch becomes a separate conversation.

Source: vLLM's benchmark reads `conversations[0].value` and `[1].value`.
"""

import io
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, takewhile
from typing import Any, BinaryIO, Final, cast

import msgspec
import pyarrow as pa

from llmtap.json_types import JsonObject
from llmtap.traces.bodies import compact_json, messages_of, read_elements, read_object, request_columns
from llmtap.traces.format import FormatError, TraceFormat, TraceRow, TraceWriter
from llmtap.traces.sorting import group_records
from llmtap.traces.text import error_of, read_lines, start_of

_ROLES: Final = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}
"""Role by the name of a speaker, in the known copies of ShareGPT's data."""
_SPEAKERS: Final = {"user": "human", "assistant": "gpt", "system": "system", "developer": "system"}
"""Name of the speaker that is written, by role."""

Messages = list[tuple[str, str]]
"""Role and text of each message."""


class _Turn(msgspec.Struct):
    """One message of a conversation."""

    value: str
    speaker: str = msgspec.field(name="from")


class _Conversation(msgspec.Struct):
    """One conversation of the data set."""

    conversations: list[_Turn]
    id: str | int | None = None
    model: str | None = None
    system: str | None = None
    tools: Any = None


_CONVERSATION_FIELDS: Final = frozenset(f.encode_name for f in msgspec.structs.fields(_Conversation))
_TURN_FIELDS: Final = frozenset(f.encode_name for f in msgspec.structs.fields(_Turn))
_UNKNOWN_NAMES_MAX: Final = 20
"""Maximum number of unknown field names that are counted, to limit the memory."""
_FIRST_BYTES: Final = 1_024
"""Number of first bytes that show whether the file is an array, even after some white space."""
_FIRST_LINE: Final = re.compile(rb'\{\s*(?:"id"\s*:\s*(?:"[^"]*"|\d+)\s*,\s*)?"conversations"\s*:\s*\[')


# ---------------------------------------------------------------- read conversations


def _elements(file: BinaryIO) -> Iterator[Any]:
    """Yield the conversations of a JSON array, or of JSON Lines."""
    buffered: Any = file if hasattr(file, "peek") else io.BufferedReader(cast(io.RawIOBase, file))
    if not start_of(buffered.peek(_FIRST_BYTES)).startswith(b"{"):
        yield from read_elements(buffered)
        return
    for number, line in read_lines(buffered):
        try:
            yield msgspec.json.decode(line)
        except (ValueError, RecursionError) as exc:
            raise error_of(exc, number) from None


def _read(file: BinaryIO, notes: list[str]) -> Iterator[TraceRow]:
    without_answer = without_question = strange = silent = toolless = loose = repeated = 0
    unknown: Counter[str] = Counter()
    names: set[int] = set()  # Hashes of the names, which need less memory: about 60 bytes per conversation.
    for number, element in enumerate(_elements(file)):
        try:
            talk = msgspec.convert(_with_turn_objects(element), _Conversation)
        except (ValueError, RecursionError) as exc:
            raise FormatError(str(error_of(exc, number)).replace("line", "conversation", 1)) from None
        for name in _unknown_names(element):
            if name in unknown or len(unknown) < _UNKNOWN_NAMES_MAX:
                unknown[name] += 1
        body: JsonObject = {} if talk.model is None else {"model": talk.model}
        messages = body["messages"] = [{"role": "system", "content": talk.system}] if talk.system else []
        if (tools := _tools_of(talk.tools)) is not None:
            body["tools"] = tools
        elif talk.tools not in (None, "", "[]", []):
            toolless += 1
        name = str(talk.id) if talk.id not in (None, "") else f"#{number}"
        if hash(name) in names:
            name, repeated = f"{name}#{number}", repeated + 1
        names.add(hash(name))
        count = pending = 0
        for turn, message in zip(talk.conversations, _chat_messages(talk.conversations), strict=True):
            role = message["role"]
            loose += role == "tool" and "tool_call_id" not in message
            strange += turn.speaker.lower() not in _ROLES
            if role == "assistant" and pending:
                yield {
                    "session": name,
                    "session_source": "explicit",
                    "turn": count,
                    "turn_by": "tool" if messages[-1]["role"] == "tool" else "human",
                    "endpoint": "chat.completions",
                    "level": "full",
                    "request_body": compact_json(body),
                    "response_text": turn.value,
                    **request_columns(body),
                }
                count, pending = count + 1, 0
            elif role == "assistant":
                without_question += 1
            elif role != "system":
                pending += 1
            messages.append(message)
        without_answer += pending
        silent += not count
    counts = (
        (without_answer, "turns have no answer after them, and are in no row"),
        (without_question, "answers follow no question: they are no rows, but part of later prompts"),
        (strange, "turns are by a speaker that is none of the usual, whose name became their role"),
        (silent, "conversations have no answer to anything, and became no row"),
        (loose, "answers of tools have no call of their own before them: they have no tool_call_id"),
        (repeated, "conversations have the id of an earlier one: their number was added to it"),
        (toolless, "conversations have tools that are not a list of objects: not kept"),
        *((n, f"conversations with a field {name!r} that is not kept") for name, n in unknown.items()),
    )
    notes += [f"{n:,} {what}" for n, what in counts if n]


def _chat_messages(turns: list[_Turn]) -> list[JsonObject]:
    """Return the turns as messages of a chat request. Calls of functions become tool calls if the same number
    of tool answers follows them directly."""
    messages: list[JsonObject] = [
        {"role": _ROLES.get(turn.speaker.lower(), turn.speaker), "content": turn.value} for turn in turns
    ]
    for index, turn in enumerate(turns):
        if turn.speaker.lower() != "function_call":
            continue
        calls = _calls_of(turn.value)
        answers = list(takewhile(lambda message: message["role"] == "tool", messages[index + 1 :]))
        if calls and len(calls) == len(answers):
            # Use ids of exactly nine letters and digits, because some chat templates require them.
            ids = [f"call{index + n:05}" for n in range(len(calls))]
            messages[index] = {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": id_, "type": "function", "function": call}
                    for id_, call in zip(ids, calls, strict=True)
                ],
            }
            for id_, answer in zip(ids, answers, strict=True):
                answer["tool_call_id"] = id_
    return messages


def _calls_of(text: str) -> list[JsonObject]:
    """Return the function calls in a turn, with arguments as JSON text; [] if it has another form."""
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return []
    calls = value if isinstance(value, list) else [value]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return []
    arguments = [call.get("arguments", {}) for call in calls]
    return [
        {"name": call["name"], "arguments": given if isinstance(given, str) else compact_json(given)}
        for call, given in zip(calls, arguments, strict=True)
    ]


def _with_turn_objects(element: Any) -> Any:
    """Return a conversation with turns as objects. In some copies of the data, turns are JSON texts."""
    turns = element.get("conversations") if isinstance(element, dict) else None
    if not isinstance(turns, list) or not any(isinstance(turn, str) for turn in turns):
        return element
    objects = [msgspec.json.decode(turn) if isinstance(turn, str) else turn for turn in turns]
    return {**element, "conversations": objects}


def _unknown_names(element: JsonObject) -> set[str]:
    """Return the names of the fields, of a conversation and its turns, that this module does not read."""
    of_turns = (turn.keys() - _TURN_FIELDS for turn in element["conversations"] if isinstance(turn, dict))
    return (element.keys() - _CONVERSATION_FIELDS).union(*of_turns)


def _tools_of(tools: Any) -> list[Any] | None:
    """Return tools in the form of a chat request; None without tools, or if they have another form."""
    if isinstance(tools, str):
        try:
            tools = msgspec.json.decode(tools)
        except (ValueError, RecursionError):
            return None
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
        return None
    return [
        tool if "function" in tool or "type" in tool else {"type": "function", "function": tool}
        for tool in tools
    ]


# ---------------------------------------------------------------- write conversations

_WRITTEN_COLUMNS: Final = ("capture", "session", "turn", "id", "request_body", "response_text")


def _write(writer: TraceWriter) -> None:
    prompts: list[Messages] = []

    def reasons_to_drop(batch: pa.RecordBatch) -> list[str | None]:
        parsed = [_messages_of(body) for body in batch.column("request_body").to_pylist()]
        prompts[:] = [messages for messages in parsed if messages]
        return [None if messages else "request without messages" for messages in parsed]

    def turns() -> Iterator[tuple[object, int, bytes]]:
        selected, needs = (*_WRITTEN_COLUMNS, "message_roles"), _WRITTEN_COLUMNS[-2:]
        for batch in writer.rows_to_write(
            selected, needs, times="none", failed=True, reasons=reasons_to_drop
        ):
            columns = (batch.column(name).to_pylist() for name in _WRITTEN_COLUMNS)
            rows = enumerate(zip(*columns, prompts, strict=True), writer.rows - batch.num_rows)
            for n, (capture, session, turn, name, _, answer, messages) in rows:
                # A row without a session is a separate conversation, with the row number as its key.
                key = n if session is None else (capture, session)
                record = (name if session is None else session, messages, answer)
                yield key, n if turn is None else turn, msgspec.json.encode(record)

    count = branched = 0
    for group in group_records(turns()):
        branch = 0
        for branch, (name, history) in enumerate(_session_branches(group)):
            name = f"conversation-{count}" if name is None else name
            talk = {
                "id": f"{name}-branch-{branch}" if branch else name,
                "conversations": [
                    {"from": _speaker_of(role, after), "value": text}
                    for (role, text), (after, _) in pairwise([*history, ("", "")])
                ],
            }
            writer.out.write((b",\n" if count else b"[\n") + msgspec.json.encode(talk))
            count += 1
        branched += branch > 0
    writer.out.write(b"\n]\n" if count else b"[]\n")
    writer.note(
        branched,
        "sessions went on from an earlier point than their last turn: they became several conversations",
    )


def _speaker_of(role: str, role_after: str) -> str:
    """Return the name of a speaker. A turn of the model before a tool's answer is a function call."""
    if role == "assistant" and role_after == "tool":
        return "function_call"
    return _SPEAKERS.get(role, role)


def _messages_of(body: str) -> Messages | None:
    try:
        return messages_of(read_object(body, "request"))
    except FormatError:
        return None


_decode_record: Final = msgspec.json.Decoder(tuple[str | None, Messages, str]).decode


def _session_branches(records: Iterator[bytes]) -> Iterator[tuple[str | None, Messages]]:
    """Yield the name and the messages of each conversation in a session.

    A prompt that repeats all messages so far continues the conversation. An edited or repeated question
    begins another conversation.
    """
    history: Messages = []
    name: str | None = None
    for record in records:
        name, messages, answer = _decode_record(record)
        if history and not _is_continuation(history, messages):
            yield name, history
        history = [*messages, ("assistant", answer)]
    yield name, history


def _is_continuation(history: Messages, messages: Messages) -> bool:
    """Return whether a prompt repeats the history. Texts of the model can differ: clients shorten them."""
    return len(messages) > len(history) and all(
        a[0] == b[0] and (a[1] == b[1] or a[0] == "assistant")
        for a, b in zip(history, messages, strict=False)
    )


def _sniff(head: bytes, name: str) -> bool:
    text = start_of(head)
    if not text.startswith(b"["):
        return _FIRST_LINE.match(text) is not None
    return text[1:].lstrip()[:1] in (b"{", b"") and b'"conversations"' in text


_NO_TIME: Final = "it has no times"
_NO_TOKENS: Final = "lengths depend on the tokenizer: it has text instead"

FORMAT: Final = TraceFormat(
    name="sharegpt",
    title="ShareGPT conversations (JSON)",
    extensions=(".json",),
    aspects=frozenset({"session and turn", "message roles and sizes", "request body", "response text"}),
    required_aspects=frozenset({"request body", "response text"}),
    remarks={
        "model": "it has no field for it",
        "arrival": _NO_TIME,
        "think time": _NO_TIME,
        "end of the answer": _NO_TIME,
        "first token": _NO_TIME,
        "times of events": _NO_TIME,
        "input tokens": _NO_TOKENS,
        "output tokens": _NO_TOKENS,
        "usage": _NO_TOKENS,
        "request body": "only its messages' text",
    },
    sniff=_sniff,
    info={"level": "full"},
    rows=_read,
    write_rows=_write,
)
