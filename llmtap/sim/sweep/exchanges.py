"""Simulated requests as Exchanges: what a tap would have seen of the same answers, had they passed by.

An engine in virtual time knows when each token left and nothing else: there are no bytes, no heads and no
sockets. So an Exchange of its making has these and no more:

- Stamps are virtual ns, and exact: `uncertainty_ns` is 0 and `clock` is `virtual`. The request is there at
  once: arrival, end of request and submit are one moment, and `scheduled` is, too: the workload wanted it
  then. The first token brings the head and the first byte with it.
- Each token is an event of its own, content that says it is one token, of no bytes. Where a whole batch
  serves (seed 004, 4.3), the tokens leave alpha after its start and beta h(b) apart, and the answer ends with
  the batch, which may be much later: all of its requests are complete together.
- `usage` is what a provider would have sent last. No text was made, so nobody could know why it ended; a
  trace's lengths are where models ended by themselves: `stop`.
- The relay is `sim-<scheduler>`, and numbers are rows of the workload from 1, so that ids of several runs in
  one folder differ and what is missing can be told. The arm is the scheduler: several of them on one workload
  are an experiment, and `report --by arm` compares them.

A request that the scheduler gave up is the upstream's failure, not the relay's: `rejected` is what a tap
itself turns away, and objectives do not count it. Without a token it is an answer of status 503
(`upstream_error`), from the middle of its answer a stream that stops (`truncated`). Both miss all objectives,
and `error` says why it was given up.
"""

from array import array
from collections.abc import Sequence
from typing import Final

from llmtap.exchange.exchange import OUTPUT, EventLog, Exchange, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, Outcome, TokenSource
from llmtap.exchange.request_shape import RequestShape
from llmtap.sim.engine import GivenUp, RunRecord
from llmtap.workload.requests import Requests

__all__ = ["CLOCK", "MODEL", "ExchangeMaker", "relay_name"]

CLOCK: Final = "virtual"
MODEL: Final = "sim"
_CONTENT: Final = bytes((EventClass.CONTENT,))
_OUTPUT: Final = bytes((OUTPUT,))
_ONE: Final = array("l", (1,))
_NO_BYTES: Final = array("l", (0,))
_OVERLOADED: Final = 503
_BEFORE: Final = {
    None: "given up by the scheduler",
    GivenUp.TOO_LARGE: "refused: it needs more than the KV memory holds",
    GivenUp.QUEUE_FULL: "refused: the queue was full",
    GivenUp.LATE: "given up before its first token: late",
}
"""What becomes of a request of which no token left, by the reason."""
_MIDWAY: Final = {None: "given up by the scheduler", GivenUp.LATE: "given up midway: a token was late"}


def relay_name(scheduler: str) -> str:
    """Who saw the exchanges of a run."""
    return f"sim-{scheduler}"


class ExchangeMaker:
    """Makes Exchanges of the requests of one run."""

    def __init__(self, scheduler: str, requests: Requests, played: RunRecord | None = None) -> None:
        """`played` tells, when a request is over, why it was given up and what of it was cached; None: nobody
        does."""
        self._arm = scheduler
        self._relay = relay_name(scheduler)
        self._requests = requests
        self._played = RunRecord.begun(0, 0) if played is None else played

    def exchange(self, request: int, token_ns: Sequence[int], end_ns: int, *, served: bool) -> Exchange:
        """A request that is over: when its tokens left, and when it ended; not `served`: it was given up."""
        requests, n = self._requests, len(token_ns)
        arrival_ns = requests.arrival_ns[request]
        stamps = array("q", token_ns)
        log = EventLog(stamps, bytearray(_CONTENT * n), _NO_BYTES * n, _ONE * n, bytearray(_OUTPUT * n))
        t = Timeline(arrival_ns, request_end_ns=arrival_ns, submit_ns=arrival_ns, events=log)
        t.response_end_ns = t.delivered_ns = end_ns
        x = Exchange(self._relay, request + 1, requests.epoch_ns + arrival_ns, t)
        x.method, x.path, x.endpoint = "POST", "/v1/chat/completions", "chat.completions"
        x.model = MODEL
        x.arm, x.clock = self._arm, CLOCK
        x.scheduled_ns, x.dispatch_late_ns = arrival_ns, 0
        if requests.blocks:
            x.asked = RequestShape(
                blocks=array("q", requests.blocks[request]), block_size=requests.block_tokens,
                block_unit="tokens",
            )  # fmt: skip
        reason = self._played.reasons.get(request)
        if not served and not n:
            x.status, x.outcome, x.error = _OVERLOADED, Outcome.UPSTREAM_ERROR, _BEFORE[reason]
            t.head_ns = t.first_byte_ns = end_ns
            return x
        x.status, x.stream, x.dialect, x.response_model = 200, True, "openai.chat", MODEL
        given = requests.input[request]
        x.usage = {"prompt_tokens": given, "completion_tokens": n, "total_tokens": given + n}
        cached = self._cached(request)
        if cached is not None:
            x.usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if served:
            x.tokens = Tokens(given, n, cached=cached, source=TokenSource.USAGE)
            x.finish_reason = "stop"
        else:
            # What the last event said of the tokens so far: no other usage came.
            x.tokens = Tokens(given, n, cached=cached, source=TokenSource.RUNNING_USAGE)
            x.outcome, x.error = Outcome.TRUNCATED, _MIDWAY[reason]
        if n:
            first_ns = stamps[0]
            t.head_ns = t.first_byte_ns = t.first_any_ns = first_ns
            t.first_token_ns = t.first_content_ns = first_ns
            t.last_token_ns = stamps[-1]
        else:
            x.no_token_reason = "empty"
            t.head_ns = t.first_byte_ns = end_ns
        return x

    def _cached(self, request: int) -> int | None:
        """Tokens of its prompt that a prefix cache had; None without one, and where nobody looked."""
        column = self._played.cached
        return column[request] if column and column[request] >= 0 else None
