"""Convert simulated requests to Exchanges, as a relay would record them, and write or summarise them.

`ExchangeMaker` makes the Exchange of a request from its token times. `VirtualMeter` gets each request that
ends in `run_virtual`, and adds its Exchange to a `Summary` and, if wanted, to a capture (`run_writer`).
Called by `simulate.py`.

Timestamps are exact virtual ns (`uncertainty_ns` 0). Arrival, end of request, submit and `scheduled` are one
moment; head, first byte and first token are another. There is one event per token, without bytes. The relay
is called `sim-<scheduler>`, its rows count from 1, and the arm is the scheduler (`report --by arm`).
A request that the scheduler gave up without a token has status 503 (`upstream_error`); later it is
`truncated`. Both miss all objectives, and `error` holds the reason.
"""

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llmtap.clock import Clock
from llmtap.exchange.exchange import OUTPUT, EventLog, Exchange, RequestShape, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, Outcome, TokenSource
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.latency import DEFAULT_BENEFIT, measure
from llmtap.metrics.objectives import Objectives
from llmtap.metrics.summary import Summary
from llmtap.sim.engine import GivenUp, RunRecord
from llmtap.workload.requests import Requests

if TYPE_CHECKING:
    from llmtap.capture.store.parquet import RunWriter

_MODEL: Final = "sim"
_CONTENT: Final = bytes((EventClass.CONTENT,))
_OUTPUT: Final = bytes((OUTPUT,))
_ONE: Final = array("l", (1,))
_NO_BYTES: Final = array("l", (0,))
_BEFORE: Final = {
    None: "given up by the scheduler",
    GivenUp.TOO_LARGE: "refused: it needs more than the KV memory holds",
    GivenUp.LATE: "given up before its first token: late",
}
_MIDWAY: Final = {None: "given up by the scheduler", GivenUp.LATE: "given up midway: a token was late"}


def relay_name(scheduler: str) -> str:
    return f"sim-{scheduler}"


class ExchangeMaker:
    def __init__(self, scheduler: str, requests: Requests, record: RunRecord | None = None) -> None:
        """`record` of the run, for reasons of giving up and cached tokens; None: unknown."""
        self._arm = scheduler
        self._relay = relay_name(scheduler)
        self._requests = requests
        self._record = RunRecord.begun(0, 0) if record is None else record

    def exchange(self, request: int, token_ns: Sequence[int], end_ns: int, *, served: bool) -> Exchange:
        """Make the Exchange of a request that is over; not `served`: it was given up."""
        requests, n = self._requests, len(token_ns)
        arrival_ns = requests.arrival_ns[request]
        stamps = array("q", token_ns)
        log = EventLog(stamps, bytearray(_CONTENT * n), _NO_BYTES * n, _ONE * n, bytearray(_OUTPUT * n))
        t = Timeline(arrival_ns, request_end_ns=arrival_ns, submit_ns=arrival_ns, events=log)
        t.response_end_ns = t.delivered_ns = end_ns
        x = Exchange(self._relay, request + 1, requests.epoch_ns + arrival_ns, t)
        x.method, x.path, x.endpoint = "POST", "/v1/chat/completions", "chat.completions"
        x.model = _MODEL
        x.arm, x.clock = self._arm, "virtual"
        x.scheduled_ns, x.dispatch_late_ns = arrival_ns, 0
        if requests.blocks:
            blocks = array("q", requests.blocks[request])
            x.asked = RequestShape(blocks=blocks, block_size=requests.block_tokens, block_unit="tokens")
        if self._record.server and self._record.server[request] >= 0:
            x.route = f"gpu-{self._record.server[request]}"
        reason = self._record.reasons.get(request)
        if not served and not n:
            x.status, x.outcome, x.error = 503, Outcome.UPSTREAM_ERROR, _BEFORE[reason]
            t.head_ns = t.first_byte_ns = end_ns
            return x
        x.status, x.stream, x.dialect, x.response_model = 200, True, "openai.chat", _MODEL
        given, column = requests.input[request], self._record.cached
        x.usage = {"prompt_tokens": given, "completion_tokens": n, "total_tokens": given + n}
        cached = column[request] if column and column[request] >= 0 else None
        if cached is not None:
            x.usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if served:
            x.tokens = Tokens(given, n, cached=cached, source=TokenSource.USAGE)
            x.finish_reason = "stop"
        else:
            # No final usage came: the last event had the counts so far.
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


class VirtualMeter:
    """Summarises the exchanges of one run in virtual time, one by one, as a `RequestWatcher`."""

    def __init__(
        self,
        maker: ExchangeMaker,
        *,
        objectives: Objectives | None = None,
        reader: Benefit = DEFAULT_BENEFIT,
        gap_max_ns: int,
        keep: Callable[[Exchange], None] | None = None,
    ) -> None:
        """`gap_max_ns`: the longest time between tokens that is not `slow`."""
        self.summary = Summary(objectives, reader)
        self._reader = reader
        self.slow = 0
        self._make = maker.exchange
        self._gap_max_ns = gap_max_ns
        self._keep = keep

    def ended(self, request: int, token_ns: Sequence[int], end_ns: int, *, served: bool) -> None:
        x = self._make(request, token_ns, end_ns, served=served)
        measured = measure(x, self._reader)
        self.summary.add(x, measured)
        if measured.tbc_max_ns is not None and measured.tbc_max_ns > self._gap_max_ns:
            self.slow += 1
        if self._keep is not None:
            self._keep(x)


def run_writer(
    to: str | Path, scheduler: str, requests: Requests, *, clock: Clock | None = None
) -> "RunWriter":
    """Return the writer of a run's capture, to a folder or a URL. Raises ConfigError of `to`. Without dates
    in the workload, arrivals count from 1970 UTC (`CaptureInfo.arrivals`)."""
    # Arrow takes a third of a second to import, and few runs are captured.
    from llmtap.capture.schema import CaptureInfo
    from llmtap.capture.store.parquet import RunWriter

    info = CaptureInfo(
        level="shape", block_unit="tokens" if requests.blocks else "", block_size=requests.block_tokens,
        arrivals="wall" if requests.epoch_ns else "trace", blocks="trace" if requests.blocks else "salted",
    )  # fmt: skip
    return RunWriter(to, {relay_name(scheduler): len(requests)}, info, meter="sim", clock=clock)
