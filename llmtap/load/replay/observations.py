"""What one look at the exchanges of a run tells beside its tally: how late, how long, how sure.

A tally counts while requests are due; what can wait until they are over is counted here.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome, TokenSource
from llmtap.metrics.arrivals import compare, figures
from llmtap.metrics.histogram import Histogram
from llmtap.metrics.statistics import summarise_ns
from llmtap.workload.requests import Requests

__all__ = ["ObservedLengths", "RunObservations"]


@dataclass(slots=True)
class ObservedLengths:
    """How long prompts and answers were by the server's own usage, beside what was asked for."""

    input_told: int = 0
    input_exact: int = 0
    input_off_max: int = 0
    """Tokens between the two, of the worst."""
    input_as_counted: int = 0
    """As long as we had counted them beforehand: a row may ask for less than a chat template takes."""
    input_counted: int = 0
    """Tokens of those prompts as we had counted them; of a row that nobody counted, as its trace says."""
    input_usage: int = 0
    """The same by the server's usage."""
    input_apart: int = 0
    """Sum of the differences of the two, prompt by prompt, without their signs."""
    output_told: int = 0
    output_exact: int = 0
    output_wanted: bool = False
    """The server was told to make answers of exactly this length."""

    def add(self, x: Exchange, given: int, counted: int, made: int) -> None:
        """An exchange whose row has so many tokens; `counted` is -1 where nobody did."""
        told = x.tokens
        if told.input is not None and given:
            self.input_told += 1
            self.input_exact += told.input == given
            self.input_as_counted += told.input == counted
            self.input_off_max = max(self.input_off_max, abs(told.input - given))
            expected = given if counted < 0 else counted
            self.input_counted += expected
            self.input_usage += told.input
            self.input_apart += abs(told.input - expected)
        if told.output is not None and told.source is TokenSource.USAGE and made:
            self.output_told += 1
            self.output_exact += told.output == made

    def describe(self) -> dict[str, object]:
        return asdict(self)


@dataclass(slots=True)
class RunObservations:
    """All exchanges of a run, `add`ed with their rows in any order. Times are of the monotonic clock."""

    requests: Requests
    counted: Sequence[int]
    lengths: ObservedLengths = field(default_factory=ObservedLengths)
    opened: "Counter[str]" = field(default_factory=Counter)
    """By sender."""
    sent_ns: "array[int]" = field(default_factory=lambda: array("q"))
    ended_ns: "array[int]" = field(default_factory=lambda: array("q"))
    """Of the same exchanges: their last byte, or the last thing that was seen of them."""
    uncertainty: Histogram = field(default_factory=Histogram)
    errors: "Counter[str]" = field(default_factory=Counter)
    """By the sentence that says what went wrong."""
    error_statuses: "Counter[int]" = field(default_factory=Counter)
    """Of answers that are upstream errors, where HTTP said so: 4xx is about the request (RFC 9110 15.5)."""
    _first_sent_ns: dict[int, int] = field(default_factory=dict)

    def add(self, row: int, x: Exchange) -> None:
        t = x.timeline
        self.opened[x.relay] += 1
        # A request that was sent again was dispatched when it was sent first.
        sent_ns = t.arrival_ns
        if x.scheduled_ns is not None and x.dispatch_late_ns is not None:
            sent_ns = x.scheduled_ns + x.dispatch_late_ns
        self.sent_ns.append(sent_ns)
        if x.error is not None:
            self.errors[x.error] += 1
        if x.outcome is Outcome.UPSTREAM_ERROR and x.status is not None and x.status >= 400:
            self.error_statuses[x.status] += 1
        log = t.events.t_ns
        self.ended_ns.append(t.response_end_ns or (log[-1] if log else 0) or t.submit_ns or t.arrival_ns)
        self.uncertainty.record(x.uncertainty_ns)
        requests = self.requests
        self.lengths.add(x, requests.input[row], self.counted[row], requests.output[row])
        if not requests.after or requests.after[row] < 0:
            self._first_sent_ns[row] = sent_ns

    def planned_ns(self) -> "array[int]":
        """When requests were to be sent that wait for no answer, from the run's start."""
        requests = self.requests
        return array("q", (requests.arrival_ns[row] for row in self._firsts()))

    def arrivals(self, began_ns: int) -> dict[str, object]:
        """What was sent, row by row, beside what was planned; of those that wait for no answer. `rate_ratio`:
        that of what was sent / that of the plan."""
        planned = self.planned_ns()
        sent = [
            None if (t := self._first_sent_ns.get(row)) is None else t - began_ns for row in self._firsts()
        ]
        times = sorted(t for t in sent if t is not None)
        kept = compare(planned, sent).to_dict()
        punctuality = {"rate_ratio": kept["ratio"], "early": kept["early"], "lateness": kept["lateness"]}
        return {
            "planned": figures(planned).to_dict(), "sent": figures(times).to_dict(),
            "punctuality": punctuality,
        }  # fmt: skip

    def in_time(self, began_ns: int, until_ns: int) -> int:
        """How many of those had been sent by then."""
        return sum(t - began_ns <= until_ns for t in self._first_sent_ns.values())

    def last_sent_ns(self, began_ns: int) -> int:
        """When the last of those was sent, from the run's start."""
        return max(self._first_sent_ns.values(), default=began_ns) - began_ns

    def uncertainties(self) -> dict[str, object]:
        """Of the exchanges: how long a byte of each may have waited before it was read."""
        return summarise_ns(self.uncertainty)

    def _firsts(self) -> Sequence[int]:
        after = self.requests.after
        return [row for row in range(len(self.requests)) if not after or after[row] < 0]
