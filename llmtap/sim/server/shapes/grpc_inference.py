"""The messages of llmtap's own service over gRPC (`llmtap/protocol/inference.proto`).

They have their length before them, as gRPC has them on the wire: several may leave together.

Source: gRPC over HTTP2, "Length-Prefixed-Message".
"""

import struct
from typing import Any, Final

from llmtap.protocol.inference import Counts, GrpcChunk, read_request, write_chunk
from llmtap.sim.server.shapes.shape import Answer, BadRequest, SimulatedRequest

__all__ = ["PREFIX", "GrpcInference", "read"]

PREFIX: Final = struct.Struct("!BI")
"""Whether it is compressed, which none is, and its length."""


def read(data: bytes) -> SimulatedRequest:
    """What a request asks for. Raises BadRequest."""
    try:
        r = read_request(data)
    except ValueError as exc:
        raise BadRequest(str(exc)) from None
    return SimulatedRequest(
        model=r.model or "sim", stream=True, prompts=(r.text,), prompt_tokens=len(r.ids) or None,
        max_tokens=r.max_tokens, min_tokens=r.min_tokens, ignore_eos=r.ignore_eos, stop=tuple(r.stop),
        seed=r.seed, include_usage=True,
    )  # fmt: skip


class GrpcInference:
    """Writes one answer, which has one choice."""

    media_type = ""

    def __init__(self, answer: Answer) -> None:
        self.id = f"generate-sim{answer.number}"
        self._answer = answer
        self._choice = answer.choices[0]

    def opening(self) -> bytes:
        return b""

    def chunk(self, index: int, first: int, last: int, final: bool) -> bytes:
        self._answer.sent[index] = last
        text = "".join(self._choice.pieces[first:last])
        return _framed(GrpcChunk(text, last - first, self._choice.finish if final else ""))

    def ending(self) -> bytes:
        answer = self._answer
        return _framed(GrpcChunk(counts=Counts(answer.prompt_tokens, answer.sent[0], answer.cached_tokens)))

    def keepalive(self) -> bytes:
        """gRPC has pings of its own, which no application sees."""
        return b""

    def failure(self) -> bytes:
        """The status of the call says it."""
        return b""

    def whole(self) -> dict[str, Any]:
        """An answer always streams."""
        raise NotImplementedError


def _framed(chunk: GrpcChunk) -> bytes:
    message = write_chunk(chunk)
    return PREFIX.pack(0, len(message)) + message
