"""The messages of `inference.proto`: what goes into a call and what streams back, as bytes and as ours.

The message classes are built from the table below by protobuf's own runtime when this is imported, which only
those do who speak gRPC. There is no generated code: what protoc generates is bound to the version of the
runtime (it refuses one that is older, or newer by two major versions), so a file that is checked in would
have to be made again every other year with a compiler that nothing else here needs. Descriptors are data, and
what reads them has been the same since protobuf 4. `tests/protocol/test_inference.py` holds the table against
the .proto.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

__all__ = [
    "METHOD",
    "PACKAGE",
    "REQUEST_ID",
    "SERVICE",
    "Counts",
    "GrpcChunk",
    "Request",
    "file_descriptor",
    "read_chunk",
    "read_request",
    "write_chunk",
    "write_request",
]  # fmt: skip

PACKAGE: Final = "llmtap.inference.v1"
SERVICE: Final = f"{PACKAGE}.Inference"
METHOD: Final = f"/{SERVICE}/Generate"
REQUEST_ID: Final = "x-request-id"
"""Key in the metadata of a call and of its response."""

_FINISHES: Final = ("", "stop", "length", "content_filter")
"""By number of FinishReason, in OpenAI's words."""

# Each field: name, type (`?` optional, `*` repeated), oneof. Numbers count from 1 in order.
_MESSAGES: Final[Mapping[str, Sequence[tuple[str, str, str]]]] = {
    "TokenIds": (("ids", "*uint32", ""),),
    "GenerateRequest": (
        ("model", "string", ""), ("text", "string", "prompt"), ("token_ids", "TokenIds", "prompt"),
        ("max_tokens", "?uint32", ""), ("min_tokens", "uint32", ""), ("ignore_eos", "bool", ""),
        ("seed", "?int64", ""), ("stop", "*string", ""),
    ),
    "Usage": (
        ("prompt_tokens", "uint32", ""), ("output_tokens", "uint32", ""), ("cached_tokens", "?uint32", ""),
    ),
    "GenerateChunk": (
        ("text", "string", ""), ("tokens", "uint32", ""), ("finish_reason", "FinishReason", ""),
        ("usage", "Usage", ""),
    ),
}  # fmt: skip
_ENUM: Final = "FinishReason"
_SCALARS: Final = {
    "string": FieldDescriptorProto.TYPE_STRING, "uint32": FieldDescriptorProto.TYPE_UINT32,
    "int64": FieldDescriptorProto.TYPE_INT64, "bool": FieldDescriptorProto.TYPE_BOOL,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """What a call asks for. `text` and `ids` are the same thing; if there are ids, they count."""

    model: str = ""
    text: str = ""
    ids: Sequence[int] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    stop: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Counts:
    """The usage of a call."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class GrpcChunk:
    """One message of an answer."""

    text: str = ""
    tokens: int = 0
    finish: str = ""
    """`stop`, `length`, `content_filter`; `other` for what this version does not know; empty: it goes on."""
    counts: Counts | None = None


def file_descriptor() -> FileDescriptorProto:
    """`inference.proto` as protobuf has it."""
    file = FileDescriptorProto(name="llmtap/protocol/inference.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        # Real oneofs stand before those that protobuf makes of optional fields.
        oneofs = list(dict.fromkeys(oneof for _, _, oneof in fields if oneof))
        oneofs += [f"_{field}" for field, kind, _ in fields if kind.startswith("?")]
        for oneof in oneofs:
            message.oneof_decl.add(name=oneof)
        for number, (field, kind, oneof) in enumerate(fields, 1):
            added = message.field.add(name=field, number=number, json_name=_camel(field))
            bare = kind.lstrip("?*")
            repeated = kind.startswith("*")
            added.label = (
                FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
            )
            if bare in _SCALARS:
                added.type = _SCALARS[bare]
            else:
                added.type_name = f".{PACKAGE}.{bare}"
                added.type = (
                    FieldDescriptorProto.TYPE_ENUM if bare == _ENUM else FieldDescriptorProto.TYPE_MESSAGE
                )
            if kind.startswith("?"):
                added.proto3_optional = True
                oneof = f"_{field}"
            if oneof:
                added.oneof_index = oneofs.index(oneof)
    enum = file.enum_type.add(name=_ENUM)
    for number, finish in enumerate(_FINISHES):
        enum.value.add(name=f"FINISH_REASON_{finish.upper() or 'UNSPECIFIED'}", number=number)
    service = file.service.add(name="Inference")
    service.method.add(
        name="Generate", input_type=f".{PACKAGE}.GenerateRequest", output_type=f".{PACKAGE}.GenerateChunk",
        server_streaming=True,
    )  # fmt: skip
    return file


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


def _classes() -> dict[str, Any]:
    # A pool of our own: somebody else's in this process may hold the same names.
    pool = DescriptorPool()
    pool.Add(file_descriptor())
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _MESSAGES}


_CLASSES: Final = _classes()
_GenerateRequest: Final = _CLASSES["GenerateRequest"]
_GenerateChunk: Final = _CLASSES["GenerateChunk"]


def _parsed(kind: Any, data: bytes) -> Any:
    message: Message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as exc:
        raise ValueError(f"no {kind.DESCRIPTOR.name}: {exc}") from None
    return message


def write_request(request: Request) -> bytes:
    """Raises ValueError for a number that does not fit its field."""
    message = _GenerateRequest(
        model=request.model, min_tokens=request.min_tokens, ignore_eos=request.ignore_eos,
        stop=list(request.stop), max_tokens=request.max_tokens, seed=request.seed,
    )  # fmt: skip
    if request.ids:
        message.token_ids.ids.extend(request.ids)
    else:
        message.text = request.text
    return bytes(message.SerializeToString())


def read_request(data: bytes) -> Request:
    """Raises ValueError for what is no such message."""
    m = _parsed(_GenerateRequest, data)
    return Request(
        m.model, m.text, tuple(m.token_ids.ids), m.max_tokens if m.HasField("max_tokens") else None,
        m.min_tokens, m.ignore_eos, m.seed if m.HasField("seed") else None, tuple(m.stop),
    )  # fmt: skip


def write_chunk(chunk: GrpcChunk) -> bytes:
    """`finish` is one of those that are known."""
    # Field by field: that is half as long as by the constructor, and there is one for each token.
    message = _GenerateChunk()
    if chunk.text:
        message.text = chunk.text
    if chunk.tokens:
        message.tokens = chunk.tokens
    if chunk.finish:
        message.finish_reason = _FINISHES.index(chunk.finish)
    if chunk.counts is not None:
        usage = message.usage
        usage.prompt_tokens, usage.output_tokens = chunk.counts.prompt_tokens, chunk.counts.output_tokens
        usage.SetInParent()
        if chunk.counts.cached_tokens is not None:
            usage.cached_tokens = chunk.counts.cached_tokens
    return bytes(message.SerializeToString())


def read_chunk(data: bytes) -> GrpcChunk:
    """Raises ValueError for what is no such message."""
    m = _parsed(_GenerateChunk, data)
    counts = None
    if m.HasField("usage"):
        u = m.usage
        cached = u.cached_tokens if u.HasField("cached_tokens") else None
        counts = Counts(u.prompt_tokens, u.output_tokens, cached)
    number = m.finish_reason
    return GrpcChunk(m.text, m.tokens, _FINISHES[number] if number < len(_FINISHES) else "other", counts)
