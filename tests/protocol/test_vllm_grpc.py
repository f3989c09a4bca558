"""Messages of vLLM's engine service: field numbers as in its .proto, and round trips."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.protocol.vllm_grpc import (
    METHOD,
    GrpcChunk,
    GrpcRequest,
    GrpcUsage,
    read_chunk,
    read_request,
    write_chunk,
    write_request,
)

UINT32 = st.integers(0, (1 << 32) - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
IDS = st.lists(UINT32, min_size=1).map(tuple)


def test_answers_as_vllm_writes_them() -> None:
    """By hand: chunk is field 1 and complete 2; of both, ids are field 1 (packed)."""
    assert METHOD == "/vllm.grpc.engine.VllmEngine/Generate"
    chunk = bytes((0x0A, 9, 0x0A, 3, 5, 0xAC, 0x02, 0x10, 7, 0x18, 2))
    assert read_chunk(chunk) == GrpcChunk((5, 300))
    done = b"\x0a\x02\xac\x02" + b"\x12\x06length" + bytes((0x18, 7, 0x20, 2, 0x28, 4))
    assert read_chunk(bytes((0x12, len(done))) + done) == GrpcChunk((300,), "length", GrpcUsage(7, 2, 4))
    assert read_chunk(b"") == GrpcChunk()


def test_a_request_as_vllm_reads_it() -> None:
    data = write_request(GrpcRequest("r1", "hi", max_tokens=3, ignore_eos=True))
    assert data.startswith(b"\x0a\x02r1\x1a\x02hi\x22")
    assert b"\x40\x03" in data and b"\x70\x01" in data, "max_tokens is 8, ignore_eos 14"
    assert data.endswith(b"\x28\x01"), "stream"


@given(
    st.builds(
        GrpcRequest,
        TEXT,
        TEXT,
        st.just(()),
        st.none() | UINT32,
        UINT32,
        st.booleans(),
        st.none() | st.integers(-(1 << 31), (1 << 31) - 1),
        st.lists(TEXT).map(tuple),
    )
    | st.builds(GrpcRequest, token_ids=IDS),
    st.builds(GrpcChunk, IDS) | st.builds(GrpcChunk, IDS, TEXT, st.builds(GrpcUsage, UINT32, UINT32, UINT32)),
)
def test_a_request_and_a_chunk_come_back(request_: GrpcRequest, chunk: GrpcChunk) -> None:
    assert read_request(write_request(request_)) == request_
    assert read_chunk(write_chunk(chunk)) == chunk


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05a"])
def test_anything_else_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a GenerateResponse message"):
        read_chunk(data)
    with pytest.raises(ValueError, match="not a GenerateRequest message"):
        read_request(data)
