"""Finished exchanges, made from a few numbers."""

from collections.abc import Sequence

from llmtap.exchange.exchange import OUTPUT, EventLog, Exchange, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, Outcome, TokenSource

MS = 1_000_000


def streamed(
    *times_ms: int,
    tokens: int = 1,
    outcome: Outcome = Outcome.COMPLETE,
    model: str | None = "m",
    tenant: str = "default",
    seq: int = 1,
) -> Exchange:
    """A streamed answer with a chunk of `tokens` tokens at each time (ms after submit, at 0)."""
    log = EventLog()
    for t in times_ms:
        log.add(t * MS, EventClass.CONTENT, 100, tokens, OUTPUT)
    first, last = log.t_ns[0], log.t_ns[-1]
    x = Exchange(
        relay="r",
        seq=seq,
        arrival_wall_ns=1_700_000_000_000_000_000,
        stream=True,
        outcome=outcome,
        model=model,
        tenant=tenant,
        method="POST",
        path="/v1/chat/completions",
        status=200,
        timeline=Timeline(
            arrival_ns=0,
            submit_ns=0,
            first_byte_ns=first,
            first_token_ns=first,
            first_content_ns=first,
            last_token_ns=last,
            response_end_ns=last,
            events=log,
        ),
        tokens=Tokens(input=7, output=tokens * len(times_ms), source=TokenSource.TOKEN_IDS),
        reads=len(times_ms),
    )
    x.added.chunks_ns.extend([30_000] * len(times_ms))
    return x


def reader_wait_ns(times_ns: Sequence[int], origin_ns: int, reader_ns_per_token: int = 50_000_000) -> int:
    """Simulate a reader who starts at `origin_ns`; return the sum of all its waits."""
    free_ns, waited_ns = origin_ns, 0
    for t_ns in times_ns:
        waited_ns += max(0, t_ns - free_ns)
        free_ns = max(t_ns, free_ns) + reader_ns_per_token
    return waited_ns
