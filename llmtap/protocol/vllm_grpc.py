"""Encode and decode the messages of vLLM's and SGLang's gRPC services (package smg-grpc-proto, extra `grpc`).

The load generator writes requests to vLLM's service and reads its answers (`load/grpc_target.py`); the
simulated server reads requests and writes answers of both services. vLLM (`vllm serve --grpc`) and the
gateway SMG use vLLM's service. A request has text or token ids. An answer is a stream of chunks with the new
token ids and no text, then a message with finish reason and usage. SGLang's messages have the same content
under other names; a request has token ids, and no seed. Without the package, the import of this module raises
ConfigError.

Source: smg_grpc_proto/proto/vllm_engine.proto, sglang_scheduler.proto; smg_grpc_servicer/vllm/servicer.py,
which vLLM runs: the message after the chunks repeats the ids of the last chunk, and its completion_tokens
possibly counts only these ids.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError

from llmtap.errors import ConfigError, install_hint

SERVICE: Final = "vllm.grpc.engine.VllmEngine"
METHOD: Final = f"/{SERVICE}/Generate"
SGLANG_SERVICE: Final = "sglang.grpc.scheduler.SglangScheduler"
REQUEST_ID: Final = "x-request-id"
"""Key of the metadata in which the simulated server returns the id of the request."""


def _message_types() -> tuple[Any, Any]:
    """Return the modules with the messages of vLLM and of SGLang."""
    with warnings.catch_warnings():
        # The package was generated for an older protobuf. It works, but warns.
        warnings.simplefilter("ignore")
        try:
            from smg_grpc_proto.generated import sglang_scheduler_pb2, vllm_engine_pb2
        except ImportError:
            raise ConfigError(
                "gRPC", "the package smg-grpc-proto is not installed", install_hint("grpc")
            ) from None
    return vllm_engine_pb2, sglang_scheduler_pb2


_pb, _sglang = _message_types()


@dataclass(frozen=True, slots=True)
class GrpcRequest:
    """A request for one answer."""

    request_id: str = ""
    text: str = ""
    token_ids: Sequence[int] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    stop: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class GrpcUsage:
    """Token counts of an answer."""

    prompt_tokens: int
    output_tokens: int
    """Number of output tokens. vLLM possibly reports only those of the last chunk: then count all ids."""
    cached_tokens: int = 0
    """Number of prompt tokens that the server had in its prefix cache."""


@dataclass(frozen=True, slots=True)
class GrpcChunk:
    """A message of an answer. Only the last message has a finish reason and usage."""

    token_ids: Sequence[int] = ()
    finish_reason: str = ""
    usage: GrpcUsage | None = None


def write_request(request: GrpcRequest) -> bytes:
    """Encode a request to vLLM's service. Raises ValueError if a number does not fit its field."""
    params = _pb.SamplingParams(
        temperature=0.0,
        top_p=1.0,
        repetition_penalty=1.0,
        n=1,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        seed=request.seed,
        stop=request.stop,
    )
    message = _pb.GenerateRequest(request_id=request.request_id, sampling_params=params, stream=True)
    if request.token_ids:
        message.tokenized.input_ids.extend(request.token_ids)
    else:
        message.text = request.text
    return bytes(message.SerializeToString())


def read_request(data: bytes, service: str = SERVICE) -> GrpcRequest:
    """Decode a request to a service. Raises ValueError if the bytes are no such request."""
    if service == SGLANG_SERVICE:
        m = _parse_message(_sglang.GenerateRequest, data)
        p = m.sampling_params
        return GrpcRequest(
            m.request_id,
            m.tokenized.original_text,
            tuple(m.tokenized.input_ids),
            p.max_new_tokens if p.HasField("max_new_tokens") else None,
            p.min_new_tokens,
            p.ignore_eos,
            stop=tuple(p.stop),
        )
    m = _parse_message(_pb.GenerateRequest, data)
    p = m.sampling_params
    limit, seed = (getattr(p, name) if p.HasField(name) else None for name in ("max_tokens", "seed"))
    return GrpcRequest(
        m.request_id,
        m.text,
        tuple(m.tokenized.input_ids),
        limit,
        p.min_tokens,
        p.ignore_eos,
        seed,
        tuple(p.stop),
    )


def write_chunk(chunk: GrpcChunk, service: str = SERVICE, request_id: str = "") -> bytes:
    """Encode a message of an answer; only the last has usage. Only SGLang's messages have `request_id`."""
    if service == SGLANG_SERVICE:
        message = _sglang.GenerateResponse(request_id=request_id)
    else:
        message = _pb.GenerateResponse()
    if chunk.usage is None:
        message.chunk.token_ids.extend(chunk.token_ids)
        message.chunk.SetInParent()
    else:
        last, usage = message.complete, chunk.usage
        last.output_ids.extend(chunk.token_ids)
        last.finish_reason, last.prompt_tokens = chunk.finish_reason, usage.prompt_tokens
        last.completion_tokens, last.cached_tokens = usage.output_tokens, usage.cached_tokens
        last.SetInParent()
    return bytes(message.SerializeToString())


def read_chunk(data: bytes) -> GrpcChunk:
    """Decode a message of an answer of vLLM's service. Raises ValueError if the bytes are no such message."""
    m = _parse_message(_pb.GenerateResponse, data)
    if m.WhichOneof("response") != "complete":
        return GrpcChunk(tuple(m.chunk.token_ids))
    last = m.complete
    usage = GrpcUsage(last.prompt_tokens, last.completion_tokens, last.cached_tokens)
    return GrpcChunk(tuple(last.output_ids), last.finish_reason, usage)


def _parse_message(kind: Any, data: bytes) -> Any:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as exc:
        raise ValueError(f"the bytes are not a {kind.DESCRIPTOR.name} message: {exc}") from None
    return message
