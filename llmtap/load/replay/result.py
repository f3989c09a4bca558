"""Result of a replay as public JSON: Summary, plan, timeliness, and the senders.

`perform.py` adds every exchange to `RunObservations` after the run, and calls `result_of`, which joins them
with the totals of the sending processes (`LoadResult`).

The result has the fields of a Summary, and in addition: `plan` (all settings needed to send the same load
again), `dispatch_lateness`, `corrected` (latencies from the scheduled time), `phases` of a request,
`concurrency`, `ttft_uncertainties`, `answers` (number by kind of content), `quantiles`, `timeline`, `lengths`
(by the server's count), `tasks` (conversations), `error_statuses`, `sender`, `verdict`, and if known
`warmup`, `system`, `baseline`.

Rates are in requests per second. The rates of `arrivals`, and in an open loop `planned_rps` and
`offered_rps`, count only requests that do not wait for an earlier answer.

| name | requests and time that it counts |
| --- | --- |
| `plan.arrivals.rate_rps` | the arrival process: the requested mean, around which arrivals are drawn |
| `arrivals.planned.rate_rps` | the whole plan, as it was drawn: gaps / span (`statistics.rate_rps`) |
| `arrivals.sent.rate_rps` | requests sent: gaps / span; `punctuality.rate_ratio` is sent / planned |
| `load.planned_rps` | requests that were due before the run was stopped: gaps / span of the plan |
| `load.offered_rps` | of these, requests sent by then: gaps / span of the plan; None if all are due at once |
| | closed loop: requests that were sent / the window |
| `load.achieved_rps` | exchanges that ended / the window, which ends with the last answer |
| `load.sending_rps` | exchanges that ended by the last dispatch / `load.sending`, the time until then |

`load.stop_condition` is the condition of `--stop-when` that ended the load, or null.

`load.due` is the number of planned requests that were due when the plan ended or the run was stopped.
`load.in_time` is the number of these that had been sent by then; `sent_share` is in_time / due.
"""

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
import numpy as np

from llmtap.clock import WallAnchor
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome, TokenSource
from llmtap.json_types import json_value
from llmtap.load.replay.findings import findings
from llmtap.load.replay.verdict import verdict_of
from llmtap.load.tally import LoadTally
from llmtap.load.workers.worker_pool import LoadResult
from llmtap.metrics.histogram import Histogram
from llmtap.metrics.latency import e2e_ns, ttft_ns
from llmtap.metrics.statistics import arrival_figures, punctuality, rate_rps, summarise_ns
from llmtap.metrics.summary import ENDED_WELL
from llmtap.units import NS_PER_S, to_seconds
from llmtap.version import __version__
from llmtap.workload.destinations import NO_TEXT
from llmtap.workload.requests import Requests

PHASES: Final = ("connect", "send", "wait", "receive")
"""Phases of a request, as in `timings` of HAR 1.2. `connect`: opening a connection, if no open one was used.
Then `send` until the last byte was sent, `wait` until the first byte of the body, and `receive` until the end
of the response."""
TURNS_MAX: Final = 20
"""Maximum number of rows in the table of turns; the last row contains all later turns."""


@dataclass(slots=True)
class _Task:
    """One conversation: its requests, and its time from the first to the last."""

    requests: int = 0
    ended_well: int = 0
    """Number of requests of the conversation that ended well."""
    submit_ns: int = 1 << 62
    """Time of the first submission; a large number before it."""
    end_ns: int = 0


@dataclass(slots=True)
class _Turn:
    """Latencies of all requests with the same place in their conversations."""

    ttft: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)


class TaskTimes:
    """Durations of tasks (conversations), and latencies by turn."""

    def __init__(self, after: Sequence[int]) -> None:
        """`after`: for each row, the previous row of its task, always a smaller number; -1 for the first."""
        self._first_rows, self._turn_numbers = array("q"), array("q")
        """By row: first row of its conversation, and number of its turn."""
        self._tasks: dict[int, _Task] = {}
        """By first row of a conversation: its requests and times so far."""
        self._turns: list[_Turn] = []
        """By number of a turn: latencies of its requests."""
        for row, before in enumerate(after):
            self._first_rows.append(row if before < 0 else self._first_rows[before])
            self._turn_numbers.append(0 if before < 0 else self._turn_numbers[before] + 1)
            self._tasks.setdefault(self._first_rows[row], _Task()).requests += 1

    def add(self, row: int, x: Exchange) -> None:
        """Add the exchange of a row to its turn and its task."""
        t, task = x.timeline, self._tasks[self._first_rows[row]]
        number = min(self._turn_numbers[row], TURNS_MAX - 1)
        self._turns += [_Turn() for _ in range(number + 1 - len(self._turns))]
        first_ns, whole_ns = ttft_ns(t), e2e_ns(t)
        if first_ns is not None and x.stream:
            self._turns[number].ttft.record(first_ns)
        if whole_ns is not None and x.outcome in ENDED_WELL:
            assert t.submit_ns is not None and t.response_end_ns is not None
            self._turns[number].e2e.record(whole_ns)
            task.ended_well += 1
            task.submit_ns = min(task.submit_ns, t.submit_ns)
            task.end_ns = max(task.end_ns, t.response_end_ns)

    def to_dict(self) -> dict[str, object]:
        """Return public JSON; durations in seconds. `turn` counts from 0, as in a capture."""
        duration = Histogram()
        for task in self._tasks.values():
            if task.ended_well == task.requests:
                duration.record(task.end_ns - task.submit_ns)
        turns = [
            {
                "turn": number,
                "and_later": number == TURNS_MAX - 1,
                "ttft": summarise_ns(turn.ttft),
                "e2e": summarise_ns(turn.e2e),
            }
            for number, turn in enumerate(self._turns)
        ]
        return {"n": len(self._tasks), "duration": summarise_ns(duration), "turns": turns}


@dataclass(slots=True)
class ObservedLengths:
    """Comparison of the lengths that the server reports with the planned lengths, in tokens."""

    input_told: int = 0
    """Number of prompts whose length the server reported; `input_exact`: of these, as long as planned."""
    input_exact: int = 0
    """Number of prompts that are as long as planned."""
    input_off_max: int = 0
    """Largest difference between the reported and the planned length of a prompt, in tokens."""
    input_as_counted: int = 0
    """Number of prompts whose reported length equals llmtap's own count. This count can differ from the
    planned length, because the chat template alone can have more tokens than planned."""
    input_counted: int = 0
    """Sum of the tokens of these prompts by llmtap's count, or by the trace if they were not counted."""
    input_usage: int = 0
    """Sum of the tokens of these prompts as the server reports them."""
    input_apart: int = 0
    """Sum of the absolute differences between the reported and the counted length of each prompt."""
    output_told: int = 0
    """Number of answers whose length the server reported."""
    output_exact: int = 0
    """Number of answers that are as long as planned."""
    output_wanted: bool = False
    """Whether the requests require exactly the planned number of output tokens."""

    def add(self, x: Exchange, wanted_input: int, counted_input: int, wanted_output: int) -> None:
        """Add an exchange, with the planned lengths of its row. `counted_input`: -1 if not counted."""
        tokens = x.tokens
        if tokens.input is not None and wanted_input:
            self.input_told += 1
            self.input_exact += tokens.input == wanted_input
            self.input_as_counted += tokens.input == counted_input
            self.input_off_max = max(self.input_off_max, abs(tokens.input - wanted_input))
            expected = wanted_input if counted_input < 0 else counted_input
            self.input_counted += expected
            self.input_usage += tokens.input
            self.input_apart += abs(tokens.input - expected)
        if tokens.output is not None and tokens.source is TokenSource.USAGE and wanted_output:
            self.output_told += 1
            self.output_exact += tokens.output == wanted_output

    def describe(self) -> dict[str, object]:
        return asdict(self)


@dataclass(slots=True)
class RunObservations:
    """Data of all exchanges of a run, which are added in any order. Times are monotonic."""

    requests: Requests
    prompt_tokens: Sequence[int]
    """Number of tokens of each prompt by llmtap's count; -1 if not counted."""
    lengths: ObservedLengths = field(default_factory=ObservedLengths)
    """Lengths of prompts and answers, compared with the plan."""
    opened: "Counter[str]" = field(default_factory=Counter)
    """Number of exchanges by sending process."""
    sent_ns: "array[int]" = field(default_factory=lambda: array("q"))
    """Time at which each request was sent."""
    ended_ns: "array[int]" = field(default_factory=lambda: array("q"))
    """Time of the last byte of each exchange, or its last known time."""
    errors: "Counter[str]" = field(default_factory=Counter)
    """By text of an error: number of requests."""
    answers: "Counter[str]" = field(default_factory=Counter)
    """Number of answers that ended well, by kind: see `_ANSWERS`."""
    error_statuses: "Counter[int]" = field(default_factory=Counter)
    """Number of answers by HTTP status, from 400. Status 4xx is an error of the client (RFC 9110 15.5)."""
    phases: dict[str, Histogram] = field(default_factory=lambda: {name: Histogram() for name in PHASES})
    """By part of a request (connect, send, wait, receive): its durations."""
    user_rates: list[float] = field(default_factory=list)
    """Output tokens per second of each complete answer, from the submission to the end."""
    tasks: TaskTimes | None = field(init=False)
    """Durations of conversations (tasks); None if the load has none."""
    _first_sent_ns: dict[int, int] = field(default_factory=dict)
    """By row that is sent several times: time of its first request."""

    def __post_init__(self) -> None:
        self.tasks = TaskTimes(self.requests.after) if self.requests.after else None

    def add(self, row: int, x: Exchange) -> None:
        """Add the exchange of a row, once for each row that ended."""
        t = x.timeline
        self.opened[x.relay] += 1
        # Use the first attempt of a retried request; `arrival_ns` belongs to its last attempt.
        sent_ns = t.arrival_ns
        if x.scheduled_ns is not None and x.dispatch_late_ns is not None:
            sent_ns = x.scheduled_ns + x.dispatch_late_ns
        self.sent_ns.append(sent_ns)
        if x.error is not None:
            self.errors[x.error] += 1
        if x.outcome in _ERROR_STATUS and x.status is not None and x.status >= 400:
            self.error_statuses[x.status] += 1
        if x.outcome in ENDED_WELL:
            self._add_answer(x)
        self._add_phases(x)
        log = t.events.t_ns
        self.ended_ns.append(t.response_end_ns or (log[-1] if log else 0) or t.submit_ns or t.arrival_ns)
        requests = self.requests
        self.lengths.add(x, requests.input[row], self.prompt_tokens[row], requests.output[row])
        if not requests.after or requests.after[row] < 0:
            self._first_sent_ns[row] = sent_ns
        if self.tasks is not None:
            self.tasks.add(row, x)

    def _add_phases(self, x: Exchange) -> None:
        t, connect_ns = x.timeline, x.added.connect_ns
        if connect_ns is not None:
            self.phases["connect"].record(connect_ns)
        if t.submit_ns is None:
            return
        self.phases["send"].record(max(0, t.submit_ns - t.arrival_ns - (connect_ns or 0)))
        if t.first_byte_ns is not None:
            self.phases["wait"].record(max(0, t.first_byte_ns - t.submit_ns))
            if t.response_end_ns is not None:
                self.phases["receive"].record(max(0, t.response_end_ns - t.first_byte_ns))

    def concurrency(self, began_ns: int, until_ns: int) -> dict[str, float | None]:
        """Return public JSON: the mean number of requests in flight over the whole window (`mean`), and over
        the time with at least one in flight (`effective`), its maximum, and `user_tokens_per_second`."""
        sent, ended = (np.sort(np.asarray(times, np.int64)) for times in (self.sent_ns, self.ended_ns))
        if not len(sent) or until_ns <= began_ns:
            return dict.fromkeys(("mean", "effective", "max", "user_tokens_per_second"))
        times = np.concatenate((sent, ended))
        order = np.argsort(times, kind="stable")
        levels = np.cumsum(np.concatenate((np.ones(len(sent)), -np.ones(len(ended))))[order])
        spans = np.diff(times[order], append=times[order][-1])
        in_flight, busy_ns = float((levels * spans).sum()), float(spans[levels > 0].sum())
        return {
            "mean": in_flight / (until_ns - began_ns),
            "effective": in_flight / busy_ns if busy_ns else None,
            "max": float(levels.max()),
            "user_tokens_per_second": float(np.median(self.user_rates)) if self.user_rates else None,
        }

    def _add_answer(self, x: Exchange) -> None:
        t, answers = x.timeline, self.answers
        answers["n"] += 1
        whole_ns = e2e_ns(t)
        if x.tokens.output and whole_ns:
            self.user_rates.append(x.tokens.output / whole_ns * NS_PER_S)
        answers["streamed"] += x.stream
        has_output = t.first_token_ns is not None or bool(x.tokens.output)
        answers["output"] += has_output
        generates = x.endpoint is not None and x.endpoint not in NO_TEXT
        answers["silent"] += generates and not has_output and x.outcome is Outcome.COMPLETE
        answers["content"] += t.first_content_ns is not None
        answers["by_chunks"] += x.tokens.source is TokenSource.CHUNKS
        if t.first_content_ns is None:
            answers["reasoning_only"] += t.first_reasoning_ns is not None
            answers["tool_call_only"] += t.first_tool_call_ns is not None
            answers["refusal_only"] += t.first_refusal_ns is not None

    def planned_ns(self) -> "array[int]":
        """Return the scheduled offsets of the requests that do not wait for an earlier answer."""
        requests = self.requests
        return array("q", (requests.arrival_ns[row] for row in self._independent_rows()))

    def arrivals(self, began_ns: int) -> dict[str, object]:
        """Compare the actual and planned send times of requests that do not wait for an earlier answer."""
        planned = self.planned_ns()
        sent = [
            None if (t := self._first_sent_ns.get(row)) is None else t - began_ns
            for row in self._independent_rows()
        ]
        times = sorted(t for t in sent if t is not None)
        timing = punctuality(planned, sent)
        return {
            "planned": arrival_figures(planned).to_dict(),
            "sent": arrival_figures(times).to_dict(),
            "punctuality": {
                "rate_ratio": timing.ratio,
                "early": timing.early,
                "lateness": {name: to_seconds(ns) for name, ns in timing.late_ns.items()},
            },
        }

    def count_sent_by(self, began_ns: int, until_ns: int) -> int:
        """Return the number of requests that wait for no earlier answer and were sent by `until_ns`."""
        return sum(t - began_ns <= until_ns for t in self._first_sent_ns.values())

    def last_sent_ns(self, began_ns: int) -> int:
        """Return the send time of the last request that waits for no earlier answer, from the run's start."""
        return max(self._first_sent_ns.values(), default=began_ns) - began_ns

    def _independent_rows(self) -> Sequence[int]:
        """Return the rows that wait for no other row."""
        after = self.requests.after
        return [row for row in range(len(self.requests)) if not after or after[row] < 0]


_ANSWERS: Final = (
    "n",
    "streamed",
    "output",
    "silent",
    "content",
    "by_chunks",
    "reasoning_only",
    "tool_call_only",
    "refusal_only",
)
"""Kinds of answers that ended well. `n`: all. `output`: has output of any kind. `silent`: has none,
although the request was for text and was not refused. `by_chunks`: its output tokens are counted as chunks.
`..._only`: has no content, but has reasoning, a tool call or a refusal; an answer can be of several kinds.
"""
PERIODS_MAX: Final = 10_000
"""Maximum number of periods in a timeline: nearly three hours at 1 s each, about 200 KB of JSON. The periods
of a longer run are longer than 1 s."""


class LoadTimeline(msgspec.Struct, frozen=True):
    """Counts for each period of a run."""

    period: float
    """Length of a period in seconds."""
    t: list[float]
    """Begin of each period in seconds since the start of the run."""
    planned: list[int] | None = msgspec.field(name="asked")
    """Number of planned requests; None without a plan."""
    sent: list[int]
    """Number of requests sent in each period."""
    ended: list[int] | None
    """Number of answers that ended in each period; None: unknown."""
    in_flight: list[int] | None
    """Maximum number of requests in flight."""


def timeline_of(
    sent_ns: Sequence[int],
    ended_ns: Sequence[int] | None,
    *,
    began_ns: int,
    until_ns: int,
    planned_ns: Sequence[int] = (),
) -> LoadTimeline:
    """Count the requests in each period of a run.

    Args:
        sent_ns: send times in any order, on the clock of `began_ns`.
        ended_ns: end times; if None, `ended` and `in_flight` are None.
        planned_ns: ascending scheduled offsets; if empty, `planned` is None.
    """
    span_ns = max(0, until_ns - began_ns)
    period_ns = NS_PER_S * max(1, -(-span_ns // (PERIODS_MAX * NS_PER_S)))
    n = max(1, -(-span_ns // period_ns))

    def period_of(times_ns: Any) -> Any:
        return np.clip((times_ns - began_ns) // period_ns, 0, n - 1)

    def count_per_period(times_ns: Any) -> Any:
        return np.bincount(period_of(times_ns), minlength=n).tolist()

    sent = np.sort(np.asarray(sent_ns, np.int64))
    planned = in_flight = None
    if planned_ns:
        # If the run was stopped, leave out the requests that were planned after the stop.
        offsets = np.asarray(planned_ns, np.int64)
        planned = count_per_period(
            began_ns + (offsets if span_ns >= offsets[-1] else offsets[offsets < span_ns])
        )
    if ended_ns is not None:
        ended = np.sort(np.asarray(ended_ns, np.int64))
        # The maximum of a period is reached at its start or just after a dispatch. An exchange that ends at
        # the same time as a dispatch does not count as in flight.
        starts = began_ns + period_ns * np.arange(n)
        open_requests = np.searchsorted(sent, starts) - np.searchsorted(ended, starts)
        levels = np.arange(1, len(sent) + 1) - np.searchsorted(ended, sent)
        np.maximum.at(open_requests, period_of(sent), levels)
        in_flight = open_requests.tolist()
    return LoadTimeline(
        period=to_seconds(period_ns),
        t=[to_seconds(i * period_ns) for i in range(n)],
        planned=planned,
        sent=count_per_period(sent),
        ended=None if ended_ns is None else count_per_period(ended),
        in_flight=in_flight,
    )


QUANTILES: Final = (
    *(percent / 100 for percent in range(100)),
    *(permille / 1_000 for permille in range(991, 1_000)),
    0.9995,
    0.9999,
    1.0,
)
"""Shares at which the quantiles of a distribution are reported: evenly spaced, and closer in the tail."""
_QUANTILE_METRICS: Final = ("ttft", "tbc", "itl", "e2e", "user_idle")
_CORRECTED: Final = ("ttft", "e2e")
_PLAN_COUNTS: Final = ("planned", "sent", "dropped", "unsent", "retries")


def result_of(
    outcome: LoadResult,
    seen: RunObservations,
    *,
    plan: Mapping[str, object],
    closed: bool,
    clock: str,
    anchor: WallAnchor,
    details: Mapping[str, object],
    percentiles: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the result as public JSON.

    Args:
        closed: whether the load is a closed loop, in which no request has a scheduled time.
        clock: source of timestamps: `kernel` or `mono`.
        details: further parts of the result, by name.
        percentiles: further percentiles of each metric, by name.
    """
    tally = outcome.tally
    seconds = (outcome.ended_ns - outcome.began_ns) / NS_PER_S
    window = {
        "name": "replay",
        "seconds": seconds,
        "start": _date_text(anchor, outcome.began_ns),
        "end": _date_text(anchor, outcome.ended_ns),
    }
    mode = "closed" if closed else "open"
    result: dict[str, Any] = tally.summary.to_dict(window, seconds, mode, percentiles=percentiles)
    planned_ns = array("q") if closed else seen.planned_ns()
    plan_counts = tally.plan_dict()
    result["load"] = {
        **result["load"],
        **_load_document(outcome, seen, planned_ns),
        **{name: plan_counts[name] for name in _PLAN_COUNTS},
    }
    # A load generator is not a proxy, so it adds no latency to the requests of clients.
    result["added"] = {}
    result["lengths"] = seen.lengths.describe()
    result["phases"] = {name: summarise_ns(histogram) for name, histogram in seen.phases.items()}
    result["concurrency"] = seen.concurrency(outcome.began_ns, outcome.ended_ns)
    result["tasks"] = None if seen.tasks is None else seen.tasks.to_dict()
    result["answers"] = {name: seen.answers[name] for name in _ANSWERS}
    result["errors"] = dict(seen.errors.most_common(ERRORS_MAX))
    result["error_statuses"] = {str(status): n for status, n in sorted(seen.error_statuses.items())}
    result["arrivals"] = None if closed else seen.arrivals(outcome.began_ns)
    result["ttft_uncertainties"] = summarise_ns(tally.ttft_uncertainties)
    result["dispatch_lateness"] = summarise_ns(tally.lateness)
    result["corrected"] = tally.corrected_dict()
    result["quantiles"] = _quantile_document(tally)
    result["hdr_histograms"] = tally.summary.hdr_histograms()
    timeline = timeline_of(
        seen.sent_ns,
        seen.ended_ns,
        began_ns=outcome.began_ns,
        until_ns=outcome.ended_ns,
        planned_ns=planned_ns,
    )
    result["timeline"] = json_value(timeline)
    result["plan"] = dict(plan)
    result["sender"] = _sender_document(outcome, clock, seconds, result["tokens"]["output"] or 0)
    result.update(details)
    problems = findings(
        result,
        lateness=tally.lateness,
        uncertainties=tally.summary.histogram("uncertainties"),
        ttft_uncertainties=tally.ttft_uncertainties,
    )
    result["verdict"] = json_value(verdict_of(problems, result))
    return result


def _load_document(
    outcome: LoadResult, seen: RunObservations, planned_ns: Sequence[int]
) -> dict[str, object]:
    """Return the planned load, and how much of it was sent in time.

    The rates and `sent_share` count only requests that do not wait for an earlier answer: the send times of
    the other requests depend on the server.
    """
    load: dict[str, object] = dict.fromkeys(("stopped", "planned_rps", "sent_share", "due", "in_time"))
    load["stopped"], load["stop_condition"] = outcome.stopped, outcome.stop_condition
    last_sent_ns = max(seen.sent_ns, default=outcome.began_ns)
    sending_ns = last_sent_ns - outcome.began_ns
    if sending_ns > 0:
        load["sending"] = sending_ns / NS_PER_S
        load["sending_rps"] = sum(t_ns <= last_sent_ns for t_ns in seen.ended_ns) / sending_ns * NS_PER_S
    if outcome.stopped is not None:
        # Count only the requests that were planned before the stop.
        last_ns = seen.last_sent_ns(outcome.began_ns)
        planned_ns = planned_ns[: bisect_right(planned_ns, last_ns)]
    span_ns = planned_ns[-1] - planned_ns[0] if len(planned_ns) > 1 else 0
    if len(planned_ns) and not span_ns:
        load["offered_rps"] = None  # Requests that are all due at one time have no rate.
    if span_ns:
        in_time = seen.count_sent_by(outcome.began_ns, planned_ns[-1] + GRACE_NS)
        load["due"], load["in_time"] = len(planned_ns), min(in_time, len(planned_ns))
        load["planned_rps"] = rate_rps(len(planned_ns), span_ns)
        load["offered_rps"] = rate_rps(in_time, span_ns)
        load["sent_share"] = min(1.0, in_time / len(planned_ns))
    return load


ERRORS_MAX: Final = 20
_ERROR_STATUS: Final = frozenset({Outcome.CLIENT_ERROR, Outcome.UPSTREAM_ERROR})
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
GRACE_NS: Final = 10_000_000
"""Allowed lateness of the last request of the plan."""


def _quantile_document(tally: LoadTally) -> dict[str, object]:
    """Return the quantiles of each metric in seconds, at the shares in QUANTILES; null without values."""

    def quantiles(histogram: Histogram) -> list[float] | None:
        return [to_seconds(v) for v in histogram.percentiles(QUANTILES) if v is not None] or None

    return {
        "shares": list(QUANTILES),
        "submit": {name: quantiles(tally.summary.histogram(name)) for name in _QUANTILE_METRICS},
        "schedule": {name: quantiles(tally.corrected[name]) for name in _CORRECTED},
        "dispatch_lateness": quantiles(tally.lateness),
    }


def _sender_document(
    outcome: LoadResult, clock: str, seconds: float, output_tokens: int
) -> dict[str, object]:
    done = outcome.reports
    cpu_s = sum(d.cpu_ns for d in done) / NS_PER_S
    return {
        "clock": clock,
        "llmtap": __version__,
        "processes": [
            {
                "cpu_seconds": d.cpu_ns / NS_PER_S,
                "cpu_share": d.cpu_ns / NS_PER_S / seconds if seconds else 0.0,
                "rss_bytes": d.rss_bytes,
                "connections_opened": d.connects,
                "connections_opened_before": d.opened_before,
                "connections_reused": d.reuses,
                "lag_max": d.lag_max_ns / NS_PER_S,
            }
            for d in done
        ],
        "cpu_seconds_per_1000_tokens": cpu_s / output_tokens * 1_000 if output_tokens else None,
        "lost": outcome.lost_statuses,
        "clocks": [clock.to_dict() for clock in outcome.clocks],
    }


def _date_text(anchor: WallAnchor, mono_ns: int) -> str:
    """Return a date in UTC, to the millisecond."""
    moment = _EPOCH + timedelta(microseconds=anchor.to_wall_ns(mono_ns) // 1_000)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
