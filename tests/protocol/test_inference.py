"""The table from which the messages are built says what `inference.proto` says, and they survive the way."""

import re
from importlib.resources import files
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from hypothesis import given
from hypothesis import strategies as st

from llmtap.protocol.inference import (
    METHOD,
    Counts,
    GrpcChunk,
    Request,
    file_descriptor,
    read_chunk,
    read_request,
    write_chunk,
    write_request,
)

PROTO = files("llmtap.protocol").joinpath("inference.proto")
_WORDS = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*|[0-9]+|[{}()=;]")


def said(text: str) -> dict[str, list[str]]:
    """What a .proto declares, a line for each thing, by whatever it is in: a reader for this one file."""
    words = _WORDS.findall(re.sub(r"//.*|\"[^\"]*\"", "", text))
    found: dict[str, list[str]] = {}
    inside: list[tuple[str, str]] = []
    line: list[str] = []
    for word in words:
        if word == "{":
            inside.append((line[0], line[1]))
            if line[0] != "oneof":
                found[" ".join(line)] = []
            line = []
        elif word == "}":
            inside.pop()
        elif word != ";":
            line.append(word)
        else:
            within = [f"{kind} {name}" for kind, name in inside if kind != "oneof"]
            oneof = [f"oneof {name}" for kind, name in inside if kind == "oneof"]
            found.setdefault(within[0] if within else "", []).append(" ".join(oneof + line))
            line = []
    return found


def told(file: FileDescriptorProto) -> dict[str, list[str]]:
    """The same of a descriptor."""
    kinds = {
        FieldDescriptorProto.TYPE_STRING: "string", FieldDescriptorProto.TYPE_UINT32: "uint32",
        FieldDescriptorProto.TYPE_INT64: "int64", FieldDescriptorProto.TYPE_BOOL: "bool",
    }  # fmt: skip
    out = {"": ["syntax =", f"package {file.package}"]}
    for service in file.service:
        out[f"service {service.name}"] = [
            f"rpc {m.name} ( {m.input_type.split('.')[-1]} ) returns "
            f"( {'stream ' * m.server_streaming}{m.output_type.split('.')[-1]} )"
            for m in service.method
        ]
    for message in file.message_type:
        fields = out[f"message {message.name}"] = []
        for f in message.field:
            kind = kinds.get(f.type) or f.type_name.removeprefix(f".{file.package}.")
            before = "repeated " if f.label == FieldDescriptorProto.LABEL_REPEATED else ""
            if f.proto3_optional:
                before = "optional "
            elif f.HasField("oneof_index"):
                before = f"oneof {message.oneof_decl[f.oneof_index].name} "
            fields.append(f"{before}{kind} {f.name} = {f.number}")
    for enum in file.enum_type:
        out[f"enum {enum.name}"] = [f"{v.name} = {v.number}" for v in enum.value]
    return out


def test_the_table_says_what_the_proto_says() -> None:
    assert told(file_descriptor()) == said(PROTO.read_text(encoding="utf-8"))


def test_a_proto_that_says_something_else_would_be_noticed() -> None:
    text = PROTO.read_text(encoding="utf-8")
    for a, b in (
        ("tokens = 2", "tokens = 5"),
        ("optional int64", "int64"),
        ("stream Gen", "Gen"),
        ("STOP", "S"),
    ):
        assert a in text
        assert said(text.replace(a, b, 1)) != told(file_descriptor())


def test_protoc_reads_the_same_out_of_it(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is not installed")
    root = Path(str(PROTO)).parents[2]
    out = tmp_path / "set"
    assert protoc.main(["", f"-I{root}", f"-o{out}", str(PROTO)]) == 0
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    (compiled,) = FileDescriptorSet.FromString(out.read_bytes()).file
    assert compiled == file_descriptor()


def test_the_method_is_the_protos() -> None:
    assert METHOD == "/llmtap.inference.v1.Inference/Generate"


UINT32 = st.integers(0, (1 << 32) - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    st.builds(
        Request, TEXT, TEXT, st.just(()), st.none() | UINT32, UINT32, st.booleans(),
        st.none() | st.integers(-(1 << 63), (1 << 63) - 1), st.lists(TEXT).map(tuple),
    )
    | st.builds(Request, ids=st.lists(UINT32, min_size=1).map(tuple))
)  # fmt: skip
def test_a_request_comes_back(request: Request) -> None:
    assert read_request(write_request(request)) == request


@given(
    st.builds(
        GrpcChunk, TEXT, UINT32, st.sampled_from(["", "stop", "length", "content_filter"]),
        st.none() | st.builds(Counts, UINT32, UINT32, st.none() | UINT32),
    )
)  # fmt: skip
def test_a_chunk_comes_back(chunk: GrpcChunk) -> None:
    assert read_chunk(write_chunk(chunk)) == chunk


def test_what_is_unknown_or_no_message_is_told() -> None:
    assert read_chunk(bytes((0x18, 99))).finish == "other"
    for data in (b"\xff", b"\x0a\x05a"):
        with pytest.raises(ValueError, match="no GenerateChunk"):
            read_chunk(data)
        with pytest.raises(ValueError, match="no GenerateRequest"):
            read_request(data)
    with pytest.raises(ValueError):
        write_request(Request(ids=(-1,)))
