"""What is asked of every load generator: the loads, and the server each of them meets."""

from __future__ import annotations

from dataclasses import dataclass

TTFT_MS = 100
ITL_MS = 20
PROMPT_TOKENS = 32
STREAMS = (1, 50, 200, 500)
RATES_RPS = (24, 96, 240)
AT_ONCE = 20  # streams of the stall and of the chunks: few, so that nothing but the definition is tested


@dataclass(frozen=True, slots=True)
class Case:
    """One load. Closed loop: `streams` begin together and, answers being equally long, stay in step."""

    name: str
    requests: int
    streams: int | None = None
    rate_rps: float | None = None  # open loop, Poisson
    tokens: int = 100
    tokens_per_event: int = 1
    stall_after: int = 0  # events, and the next one comes
    stall_ms: int = 0  # so much later

    @property
    def events(self) -> int:
        """Of an answer, without its usage."""
        return -(-self.tokens // self.tokens_per_event)

    @property
    def answer_s(self) -> float:
        gaps_ms = (self.events - 1) * ITL_MS * self.tokens_per_event
        return (TTFT_MS + gaps_ms + self.stall_ms) / 1e3

    @property
    def load_s(self) -> float:
        """About how long it takes who is in time."""
        if self.rate_rps:
            return self.requests / self.rate_rps + self.answer_s
        assert self.streams
        return self.requests / self.streams * self.answer_s

    def server(self) -> list[str]:
        """Arguments of sse_server."""
        return [
            *("--ttft-ms", str(TTFT_MS), "--itl-ms", str(ITL_MS), "--tokens", str(self.tokens)),
            *("--tokens-per-event", str(self.tokens_per_event)),
            *("--stall-after", str(self.stall_after), "--stall-ms", str(self.stall_ms)),
        ]


def cases(seconds: float) -> dict[str, Case]:
    """By name; each load lasts about `seconds`, two answers at least."""
    turns = max(2, round(seconds / Case("", 1, streams=1).answer_s))
    closed = [Case(f"closed-{n}", n * turns, streams=n) for n in STREAMS]
    opened = [Case(f"open-{rate}", round(rate * seconds), rate_rps=rate) for rate in RATES_RPS]
    # One stall among 49 gaps is 2 % of them, so p99 has to show it; among 99 it would lie on the border.
    stall = Case("stall", 3 * AT_ONCE, streams=AT_ONCE, tokens=50, stall_after=25, stall_ms=500)
    chunks = Case("chunks", 3 * AT_ONCE, streams=AT_ONCE, tokens_per_event=4)
    return {case.name: case for case in (*closed, *opened, stall, chunks)}
