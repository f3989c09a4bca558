"""OpenAI's batch files: requests by the line, and their answers by the line, without times.

Requests: `{"custom_id": str, "method": "POST", "url": "/v1/chat/completions", "body": {...}}`.
Answers, in any order: `{"id": str, "custom_id": str, "response": {"status_code": int, "request_id": str,
"body": {...}} | null, "error": {"code", "message"} | null}`. The two are
formats of their own, because each holds what the other does not.

Source: OpenAI, reference of the Batch API.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO, Final, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from llmtap.exchange.saved import SavedError, explain, read_saved
from llmtap.traces.bodies import (
    ENDPOINTS,
    answer_columns,
    asked_columns,
    chat_answer,
    endpoint_of,
    read_object,
    text_said,
)  # fmt: skip
from llmtap.traces.format import FAILED, FormatError, TraceFormat, TraceWriter
from llmtap.traces.text import read_lines, start_of

__all__ = ["FORMATS"]

LINES_MAX: Final = 50_000
"""Maximum of the providers for one file."""
_FALSE: Final = msgspec.Raw(b"false")
_NULL: Final = msgspec.Raw(b"null")
_decode_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
BYTES_MAX: Final = 100_000_000
"""The smallest of the providers' limits; the largest is 200 MB."""


class _Response(msgspec.Struct):
    body: msgspec.Raw
    status_code: int = 200
    request_id: str | None = None


class _Failure(msgspec.Struct):
    code: str | int | None = None


class _Question(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw
    url: str
    method: str = "POST"


class _Answer(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    error: _Failure | None = None


# ---------------------------------------------------------------- reading


T = TypeVar("T")


def _decoded(file: BinaryIO, row: type[T]) -> Iterator[tuple[T, str]]:
    """Yield the lines, and their places for errors."""
    decode = msgspec.json.Decoder(row).decode
    for number, line in read_lines(file):
        try:
            yield decode(line), f"line {number}"
        except (ValueError, RecursionError) as exc:
            raise FormatError(f"line {number}: {exc}") from None


def _questions(file: BinaryIO, notes: list[str]) -> Iterator[dict[str, Any]]:
    streams, models = 0, set[str]()
    for asked, where in _decoded(file, _Question):
        text = bytes(asked.body).decode()
        body = read_object(text, f"{where}: body")
        columns = asked_columns(body)
        streams += body.get("stream") is True
        if columns["model"] is not None and len(models) < 2:
            models.add(columns["model"])
        yield {
            "id": asked.custom_id, "method": asked.method, "path": asked.url,
            "endpoint": endpoint_of(asked.url, body), "stream": body.get("stream") is True, "level": "full",
            "request_body": text, **columns,
        }  # fmt: skip
    if streams:
        notes.append(f"{streams:,} requests ask for a stream, which no batch can give")
    if len(models) > 1:
        notes.append("there is more than one model in it, which providers refuse")


def _answers(file: BinaryIO, notes: list[str]) -> Iterator[dict[str, Any]]:
    failed = 0
    for answer, where in _decoded(file, _Answer):
        row: dict[str, Any] = {"id": answer.custom_id, "level": "full"}
        if answer.response is not None:
            row |= _response_columns(answer.response, where)
        if answer.error is not None:
            failed += 1
            code = "" if answer.error.code is None else f" ({answer.error.code})"
            row |= {"outcome": "upstream_error", "error": f"the batch says that it failed{code}"}
        yield row
    if failed:
        notes.append(f"{failed:,} requests failed")


def _response_columns(response: _Response, where: str) -> dict[str, Any]:
    """Return the columns of an answer, played through the observer."""
    if not 200 <= response.status_code <= 999:
        raise FormatError(f"{where}: status_code: {response.status_code} is none")
    body = bytes(response.body)
    head = b"HTTP/1.1 %d batch\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    try:
        explained = explain(read_saved(head % (response.status_code, len(body)) + body))
    except SavedError as exc:
        raise FormatError(f"{where}: {exc}") from None
    columns = answer_columns(explained)
    return columns | {
        "request_id": response.request_id,
        "model": columns["response_model"],
        "response_text": text_said(explained),
    }


# ---------------------------------------------------------------- writing


def _write_questions(writer: TraceWriter) -> None:
    out = _Lines(writer)
    wanted = ["id", "method", "path", "endpoint", "request_body"]
    for batch in writer.batches:
        good = [_put_question(out, row) for row in batch.select(wanted).to_pylist()]
        writer.count(batch.filter(pa.array(good, pa.bool_())))
    out.close()


def _put_question(out: "_Lines", row: dict[str, Any]) -> bool:
    """Write a row, or drop it."""
    options = out.writer.options
    if row["request_body"] is None:
        return out.drop("no request body")
    # Members stay as they are spelled: only what has to go, goes.
    try:
        body = _decode_members(row["request_body"])
    except (ValueError, RecursionError):
        return out.drop("request body is no JSON object")
    url = row["path"] or ENDPOINTS.get(row["endpoint"] or endpoint_of(None, body) or "")
    if url is None:
        return out.drop("the destination of the request is unknown")
    if body.get("stream", _FALSE) != _FALSE or "stream_options" in body:
        # A batch has no streams: what asked for one gets its answer in one piece.
        out.unstreamed += 1
        for name in ("stream", "stream_options"):
            body.pop(name, None)
    if options.model is not None and (options.override_model or body.get("model", _NULL) == _NULL):
        body["model"] = msgspec.Raw(msgspec.json.encode(options.model))
    if len(out.models) < 2:
        out.models.add(bytes(body.get("model", _NULL)))
    # Without white space: a body's own line breaks would end the line.
    text = msgspec.json.format(msgspec.json.encode(body), indent=-1)
    out.put(
        {"custom_id": out.name(row["id"]), "method": row["method"] or "POST", "url": url,
         "body": msgspec.Raw(text)}
    )  # fmt: skip
    return True


def _write_answers(writer: TraceWriter) -> None:
    out = _Lines(writer)
    wanted = [
        "id", "request_id", "status", "outcome", "model", "response_model", "response_text", "finish_reason",
        "usage", "input_tokens", "output_tokens",
    ]  # fmt: skip
    for batch in writer.batches:
        put = [_put_answer(out, row) for row in batch.select(wanted).to_pylist()]
        answered = batch.filter(pa.array([kind == "response" for kind in put], pa.bool_()))
        writer.count(answered)
        # Usage wants both counts: one alone has no place.
        both = pc.and_(pc.is_valid(answered["input_tokens"]), pc.is_valid(answered["output_tokens"]))
        uncounted = answered.filter(pc.invert(pc.or_(pc.is_valid(answered["usage"]), both)))
        writer.count(uncounted.select(["input_tokens", "output_tokens"]), sign=-1)
        failed = batch.filter(pa.array([kind == "error" for kind in put], pa.bool_()))
        writer.count(failed.select(["status", "outcome"]))
    out.close(limits=False)


def _put_answer(out: "_Lines", row: dict[str, Any]) -> str | None:
    """Write a row and return its kind, `response` or `error`; None if it is dropped.

    An error is a request that failed by no decision of the client: one that the client gave up is dropped.
    """
    name, options = out.name(row["id"]), out.writer.options
    line: dict[str, Any] = {"id": f"batch_req_{name}", "custom_id": name, "response": None, "error": None}
    if row["response_text"] is None:
        status, outcome = row["status"], row["outcome"]
        if outcome not in (*FAILED, "tap_error") and (status or 200) < 400:
            out.drop("no response text")
            return None
        line["error"] = {"code": outcome or "error", "message": _failure(status, outcome)}
        out.put(line)
        return "error"
    model = row["response_model"] or row["model"]
    if options.model is not None and (options.override_model or not model):
        model = options.model
    body = {"id": f"chatcmpl-{name}", **chat_answer(row, model or "", _usage(row))}
    line["response"] = {
        "status_code": row["status"] or 200, "request_id": row["request_id"] or "", "body": body,
    }  # fmt: skip
    out.put(line)
    return "response"


def _failure(status: int | None, outcome: str | None) -> str:
    """Return a sentence on how a request failed."""
    if status is None:
        return "there was no answer"
    if status >= 400:
        return f"the answer had the status {status}"
    how = (outcome or "").replace("_", " ")
    return f"the answer began with the status {status} and was not whole ({how})"


def _usage(row: dict[str, Any]) -> Any:
    if row["usage"] is not None:
        return msgspec.Raw(msgspec.json.format(row["usage"].encode(), indent=-1))
    counts = {"prompt_tokens": row["input_tokens"], "completion_tokens": row["output_tokens"]}
    return None if None in counts.values() else {**counts, "total_tokens": sum(counts.values())}


class _Lines:
    """Lines of either kind, with unique names, and their counts."""

    def __init__(self, writer: TraceWriter) -> None:
        self.writer = writer
        self._bytes = 0
        # By hash, about 60 bytes a line.
        self._names: set[int] = set()
        self._renamed = 0
        self.models: set[bytes] = set()
        self.unstreamed = 0

    def name(self, wanted: str | None) -> str:
        """Return the row's id, or another if it has none or an earlier row has the same."""
        n = self.writer.rows
        name = wanted or f"request-{n}"
        while hash(name) in self._names:
            self._renamed += bool(wanted)
            n += 1
            name = f"{wanted or 'request'}-{n}"
        return name

    def put(self, line: dict[str, Any]) -> None:
        data = msgspec.json.encode(line) + b"\n"
        self.writer.out.write(data)
        self._names.add(hash(line["custom_id"]))
        self._bytes += len(data)
        self.writer.rows += 1

    def drop(self, reason: str) -> bool:
        self.writer.drop(reason)
        return False

    def close(self, *, limits: bool = True) -> None:
        writer, options = self.writer, self.writer.options
        if options.override_model and options.model is not None:
            writer.changed["model"] = "--model in every row"
        writer.note(self.unstreamed, "requests asked for a stream: `stream` was taken out")
        if len(self.models) > 1:
            writer.notes.append(
                "there is more than one model in it, which providers refuse: filter first, or --model"
            )
        writer.note(self._renamed, "ids were not unique, and got a number")
        if limits and writer.rows > LINES_MAX:
            writer.note(writer.rows, f"lines, where providers take {LINES_MAX:,} in a file: split it")
        if limits and self._bytes > BYTES_MAX:
            size = f"{self._bytes / 1e6:,.0f} MB"
            writer.notes.append(f"{size}, where providers take 100 to 200 MB in a file: split it")


# ---------------------------------------------------------------- telling


def _sniff(head: bytes, names: set[str], members: tuple[bytes, ...], without: str | None = None) -> bool:
    """Whether the first line has `names`; of a line longer than `head`, whether that has `members`."""
    text = start_of(head)
    try:
        line = msgspec.json.decode(text.split(b"\n", 1)[0])
    except (ValueError, RecursionError):
        line = None
    if not isinstance(line, dict):
        return text.startswith(b"{") and all(b'"%s"' % member in text for member in members)
    return names <= line.keys() and without not in line


_NO_TIME: Final = "a batch has no times"
_WHY: Final = {
    "arrival": _NO_TIME, "think time": _NO_TIME, "end of the answer": _NO_TIME, "first token": _NO_TIME,
    "times of events": _NO_TIME, "session and turn": "lines come in any order",
}  # fmt: skip
_ASKED: Final = frozenset({"request body", "message roles and sizes", "max_tokens", "model"})
_ANSWERED: Final = frozenset(
    {"response text", "usage", "input tokens", "output tokens", "outcome and status", "model"}
)

FORMATS: Final = (
    TraceFormat(
        name="openai-batch", title="OpenAI batch, requests (JSONL)", extensions=(".jsonl",),
        holds=_ASKED, needs=frozenset({"request body"}),
        why=_WHY
        | dict.fromkeys(sorted(_ANSWERED - _ASKED), "a batch's answers hold it: --to openai-batch-output"),
        sniff=lambda head, name: _sniff(head, {"custom_id", "url", "body"}, (b"custom_id", b"url", b"body")),
        info={"level": "full"}, rows=_questions, writes=_write_questions,
    ),
    TraceFormat(
        name="openai-batch-output", title="OpenAI batch, answers (JSONL)", extensions=(".jsonl",),
        holds=_ANSWERED, needs=frozenset({"response text"}),
        why=_WHY | dict.fromkeys(sorted(_ASKED - _ANSWERED), "a batch's requests hold it: --to openai-batch"),
        sniff=lambda head, name: _sniff(
            head, {"custom_id", "response"}, (b"custom_id", b"status_code"), without="body"
        ),
        info={"level": "full"}, rows=_answers, writes=_write_answers,
    ),
)  # fmt: skip
