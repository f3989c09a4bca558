"""Requests and answers of vLLM's and SGLang's engine services over gRPC, as the simulated server has them.

`read` decodes a request; `GrpcInference` returns the messages of an answer. The fields are in
`llmtap/protocol/vllm_grpc.py`; calls and connections are in `server/grpc_service.py`. Messages are preceded
by their length as on the wire, because several may be written together.

Source: gRPC over HTTP2, "Length-Prefixed-Message".
"""

import struct
from typing import Final

from llmtap.protocol.vllm_grpc import GrpcChunk, GrpcUsage, read_request, write_chunk
from llmtap.sim.server.shapes.shape import Answer, BadRequest, Shape, SimulatedRequest
from llmtap.workload.prompts.text import token_ids

__all__ = ["PREFIX", "GrpcInference", "read"]

PREFIX: Final = struct.Struct("!BI")


def read(data: bytes, service: str) -> tuple[SimulatedRequest, str]:
    """Return a request and its id. Raises BadRequest."""
    try:
        r = read_request(data, service)
    except ValueError as exc:
        raise BadRequest(str(exc)) from None
    asked = SimulatedRequest(
        model="sim", stream=True, prompts=(r.text,), prompt_tokens=len(r.ids) or None,
        max_tokens=r.max_tokens, min_tokens=r.min_tokens, ignore_eos=r.ignore_eos, stop=tuple(r.stop),
        seed=r.seed, include_usage=True,
    )  # fmt: skip
    return asked, r.request_id


class GrpcInference(Shape):
    """Writes one answer, which has one choice and always streams. gRPC has pings and statuses of its own."""

    media_type = ""

    def __init__(self, answer: Answer, service: str, request_id: str) -> None:
        super().__init__(answer, "generate-sim")
        self._service = service
        self._request_id = request_id or self.id

    def chunk(self, index: int, first: int, last: int, final: bool) -> bytes:
        self._answer.sent[index] = last
        if first == last:
            return b""
        return self._framed(GrpcChunk([token_ids(piece)[0] for piece in self._choice.pieces[first:last]]))

    def ending(self) -> bytes:
        answer = self._answer
        usage = GrpcUsage(answer.prompt_tokens, answer.sent[0], answer.cached_tokens or 0)
        return self._framed(GrpcChunk(finish=self._choice.finish, usage=usage))

    def _framed(self, chunk: GrpcChunk) -> bytes:
        message = write_chunk(chunk, self._service, self._request_id)
        return PREFIX.pack(0, len(message)) + message
