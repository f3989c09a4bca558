"""What OpenTelemetry's conventions ask of an exchange, worked out once for its span and its metrics.

Times are integer ns. The operation starts with the request's first byte and ends with the answer's last byte
handed to the client: what the conventions call the caller's view, as far as the tap has one.
"""

from dataclasses import dataclass
from itertools import compress
from typing import Final

from llmtap.exchange.exchange import EventLog, Exchange
from llmtap.exchange.outcome import EventClass, Outcome, TokenSource
from llmtap.export.opentelemetry.semconv import operation_of, provider_of
from llmtap.metrics.latency import Measured
from llmtap.metrics.summary import ENDED_WELL

__all__ = ["TEXT_MAX", "Terms", "chunk_times_ns", "error_type", "terms_of"]

TEXT_MAX: Final = 256
"""Characters of a name that someone else chose: enough for any model there is, too few to do harm."""

_NO_ERROR: Final = ENDED_WELL | {Outcome.CLIENT_CANCELLED}
_COUNTED: Final = frozenset(
    {TokenSource.USAGE, TokenSource.TOKEN_IDS, TokenSource.LOGPROBS, TokenSource.RUNNING_USAGE}
)
"""Sources the conventions let us report as usage: the provider told it, or showed each token."""
_IS_CHUNK: Final = bytes(
    code not in (EventClass.KEEPALIVE.value, EventClass.DONE.value) for code in range(256)
)
"""By EventClass code: 1 where a client library hands a chunk to its caller."""


@dataclass(slots=True)
class Terms:
    """One exchange in the conventions' words; None where a term does not apply."""

    operation: str | None
    """None: no operation of a model, just HTTP."""
    provider: str | None
    model: str | None
    response_model: str | None
    error_type: str | None
    end_ns: int
    """The last point known, monotonic."""
    duration_ns: int
    first_chunk_ns: int | None
    """From the start of the operation. None when nothing was streamed."""
    chunk_times_ns: list[int]
    output_tokens: int | None
    """None where their number is an estimate."""
    server_duration_ns: int | None
    server_first_token_ns: int | None
    server_per_token_ns: int | None


def terms_of(x: Exchange, m: Measured, host: str | None, provider: str | None) -> Terms:
    """The terms of an exchange; `host` is the upstream's name, `provider` what the operator says it is."""
    t = x.timeline
    times = chunk_times_ns(t.events) if x.stream else []
    end_ns = _end_ns(x)
    well = x.outcome in ENDED_WELL and (x.status is None or x.status < 400)
    output = x.tokens.output if x.tokens.source in _COUNTED else None
    # The server's terms are those of an answer that came: from the request's last byte on, and whole.
    server = m.e2e_ns
    first_token = m.ttft_any_ns if x.stream and well else None
    operation = operation_of(x.endpoint)
    return Terms(
        operation=operation,
        provider=None if operation is None else provider or provider_of(host, x.dialect),
        model=_cut(x.model),
        response_model=_cut(x.response_model),
        error_type=error_type(x),
        end_ns=end_ns,
        duration_ns=end_ns - t.arrival_ns,
        first_chunk_ns=times[0] - t.arrival_ns if times else None,
        chunk_times_ns=times,
        output_tokens=output,
        server_duration_ns=server,
        server_first_token_ns=first_token,
        server_per_token_ns=_per_token_ns(x, server, first_token, output),
    )


def error_type(x: Exchange) -> str | None:
    """`error.type`: the status from 400 on, else the outcome where it is a failure; None where all is well.

    A client that left is no error, nor is a refusal: that answer is what the model had to say.

    Source: semantic conventions, HTTP client spans: any 4xx or 5xx is an error there; what its caller
    cancels on purpose is none.
    """
    if x.status is not None and x.status >= 400:
        return str(x.status)
    return None if x.outcome in _NO_ERROR else x.outcome.value


def chunk_times_ns(log: EventLog) -> list[int]:
    """Stamps of the events that a client library would hand on: all but keep-alives and the end marker."""
    return list(compress(log.t_ns, log.classes.translate(_IS_CHUNK)))


def _end_ns(x: Exchange) -> int:
    t = x.timeline
    points = (t.arrival_ns, t.request_end_ns, t.submit_ns, t.head_ns, t.first_byte_ns, t.response_end_ns,
              t.delivered_ns, t.events.t_ns[-1] if len(t.events) else None)  # fmt: skip
    return max(point for point in points if point is not None)


def _per_token_ns(x: Exchange, server_ns: int | None, first_ns: int | None, output: int | None) -> int | None:
    if server_ns is None or first_ns is None or output is None or output < 2:
        return None
    if x.tokens.reasoning and x.timeline.first_reasoning_ns is None:
        return None  # reasoned before the first token that we could see: not "after the first token"
    return (server_ns - first_ns) // (output - 1)


def _cut(text: str | None) -> str | None:
    return None if text is None else text[:TEXT_MAX]
