"""Export finished exchanges to an OpenTelemetry receiver: one span each, and metrics.

Where exchanges end, a span is noted and the metrics are counted (nothing for a chunk but its share of one
sort). Everything else is done by a thread of its own: encoding, sending, waiting for a receiver that is away.

Nothing gets lost without being counted. Spans wait in a queue with a bound; what finds no room, what the
receiver rejects for good and what is left at the end is in `state().dropped`, by reason. Metrics are totals
since the start, so whatever a receiver missed is in what it gets next.
"""

import logging
import random
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from llmtap.clock import Clock
from llmtap.exchange.exchange import Exchange
from llmtap.export.opentelemetry.metrics import MetricRecorder, Totals
from llmtap.export.opentelemetry.otlp import (
    METRICS,
    TRACES,
    OtlpLink,
    OtlpOrigin,
    OtlpResponse,
    connect,
    encode_metrics,
    encode_spans,
)
from llmtap.export.opentelemetry.semconv import SERVICE_NAME, SERVICE_VERSION, VERSIONS
from llmtap.export.opentelemetry.spans import Span, ids_of, is_sampled, span_of, terms_of
from llmtap.export.options import OtlpOptions, parse_pairs
from llmtap.export.sinks import ExporterState, SeriesKey
from llmtap.export.trace_context import parse_trace_parent
from llmtap.metrics.latency import Measured

__all__ = ["OtlpExporter", "pause_s"]

log = logging.getLogger(__name__)

BATCH_MAX: Final = 512
"""Spans in one request, as the SDKs have it: 0.7 MB at most, where receivers take 4 MiB."""
SPAN_DELAY_S: Final = 1.0
"""How long a span waits for others to go with it."""
CLOSE_S: Final = 3.0
"""For the last flush, within what the supervisor gives a meter to end."""
BACKOFF_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Between tries while the receiver is away; up to a quarter longer, so that many taps do not come at once."""
AFTER_S_MAX: Final = 60.0
"""A receiver may ask for a longer pause than ours, up to this."""


class OtlpExporter:
    """Takes exchanges on one thread, and sends what they come to from another."""

    def __init__(
        self,
        options: OtlpOptions,
        clock: Clock,
        version: str,
        servers: Mapping[str, tuple[str, int]] | None = None,
        *,
        make_link: Callable[[OtlpOptions], OtlpLink] = connect,
        span_delay_s: float = SPAN_DELAY_S,
        backoff_s: tuple[float, ...] = BACKOFF_S,
    ) -> None:
        """`servers` holds the upstream's host and port by arm, under "" for all others.

        Raises ConfigError when the link cannot be made.
        """
        self._options = options
        self._clock = clock
        self._servers = servers or {}
        self._names = VERSIONS[options.semconv]
        self._origin = OtlpOrigin(_resource(options, version), version, self._names.schema_url)
        self._recorder = MetricRecorder(self._names, options.series_max)
        self._totals = Totals(self._recorder, self._servers)
        self._start_wall_ns = clock.wall_ns()
        self._link = make_link(options)
        self._span_delay_s = span_delay_s
        self._backoff_s = backoff_s

        self._queue: deque[Span] = deque()
        self._wake = threading.Event()
        self._close_by_ns: int | None = None
        self._unsent: list[Span] = []
        """The batch that a try is being made for."""
        self._sent = self._failures = self._failed_in_a_row = 0
        self._after_s = 0.0
        self._full = 0
        """Written where exchanges end; the other counts where they are sent."""
        self._dropped: dict[str, int] = {}
        self._told: set[str] = set()
        self._metrics_due_ns = clock.mono_ns() + options.interval
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ended(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        """Takes in one finished exchange; quick, and never waits for a receiver."""
        options = self._options
        server = self._servers.get(x.arm or "") or self._servers.get("")
        terms = terms_of(x, m, None if server is None else server[0], options.provider)
        if options.metrics:
            self._recorder.record(x, m, terms)
        if not options.traces:
            return
        parent = parse_trace_parent(x.trace_parent)
        if parent is None:
            if options.sample_ratio < 1 and not is_sampled(ids_of(x)[0], options.sample_ratio):
                return
        elif options.sampler == "parent" and not parent.sampled:
            return
        if len(self._queue) + len(self._unsent) >= options.queue_max:
            self._full += 1
            return
        self._queue.append(span_of(x, terms, self._names, parent, server))
        if len(self._queue) == BATCH_MAX:
            self._wake.set()

    def state(self) -> ExporterState:
        """How it goes; from any thread."""
        dropped = dict(self._dropped)
        if self._full:
            dropped["queue_full"] = self._full
        queued = len(self._queue) + len(self._unsent)
        return ExporterState("otlp", self._sent, queued, self._failures, dropped)

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Sends what is left, for at most `limit_s`; what then remains is counted as dropped. Blocks."""
        self._close_by_ns = self._clock.mono_ns() + round(limit_s * 1e9)
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(limit_s)
        self._link.close()  # ends a request under way
        if self._thread.ident is not None:
            self._thread.join(1.0)
        self._drop("shutdown", len(self._queue) + len(self._unsent))
        self._queue.clear()
        self._unsent = []
        log.info("event=otlp_closed sent=%d dropped=%s", self._sent, self.state().dropped)

    # The thread that sends.

    def _run(self) -> None:
        while True:
            self._wake.wait(self._pause_s())
            self._wake.clear()
            closing = self._close_by_ns is not None
            try:
                self._send_spans(closing)
                if self._options.metrics and (closing or self._clock.mono_ns() >= self._metrics_due_ns):
                    self._send_metrics()
            except Exception as exc:  # ours: telemetry must not end because one batch is odd
                self._drop("refused", len(self._unsent))
                self._unsent = []
                self._metrics_due_ns = self._clock.mono_ns() + self._options.interval
                self._tell("otlp_bug", repr(exc), exc)
            if closing:
                return

    def _pause_s(self) -> float:
        """Until there is something to do."""
        if self._failed_in_a_row:
            return pause_s(self._backoff_s, self._failed_in_a_row, self._after_s)
        until_metrics = (self._metrics_due_ns - self._clock.mono_ns()) / 1e9
        pause = self._span_delay_s if self._options.traces else until_metrics
        return max(0.0, min(pause, until_metrics) if self._options.metrics else pause)

    def _send_spans(self, closing: bool) -> None:
        """Sends batches as long as there are spans and the receiver takes them."""
        while True:
            if not self._unsent:
                while self._queue and len(self._unsent) < BATCH_MAX:
                    self._unsent.append(self._queue.popleft())
            if not self._unsent or (closing and self._time_left_s() <= 0):
                return
            answer = self._send(TRACES, encode_spans(self._unsent, self._origin))
            if not answer.ok and answer.again:
                return
            n = len(self._unsent)
            self._sent += n - answer.rejected if answer.ok else 0
            self._drop("rejected" if answer.ok else "refused", answer.rejected if answer.ok else n)
            self._unsent = []

    def _send_metrics(self) -> None:
        if self._close_by_ns is not None and self._time_left_s() <= 0:
            return
        now_ns = self._clock.wall_ns()
        points = self._totals.gather()
        for body in encode_metrics(points, self._origin, self._start_wall_ns, now_ns):
            answer = self._send(METRICS, body)
            if not answer.ok and answer.again:
                return  # due still: the next try has newer totals
        self._metrics_due_ns = self._clock.mono_ns() + self._options.interval

    def _send(self, signal: str, body: bytes) -> OtlpResponse:
        timeout_s = self._options.timeout / 1e9
        if self._close_by_ns is not None:
            timeout_s = max(0.01, min(timeout_s, self._time_left_s()))
        answer = self._link.send(signal, body, timeout_s)
        self._after_s = answer.after_s
        if answer.ok:
            self._failed_in_a_row = 0
        else:
            self._failures += 1
            # What is refused for good is no reason to wait: the next batch may be fine.
            self._failed_in_a_row += answer.again
        if answer.problem:
            self._tell("otlp_rejected" if answer.ok else "otlp_failed", answer.problem)
        return answer

    def _time_left_s(self) -> float:
        assert self._close_by_ns is not None
        return (self._close_by_ns - self._clock.mono_ns()) / 1e9

    def _drop(self, reason: str, n: int) -> None:
        if n:
            self._dropped[reason] = self._dropped.get(reason, 0) + n

    def _tell(self, event: str, problem: str, exc: BaseException | None = None) -> None:
        """The first of a kind; the counts tell how often."""
        if event not in self._told:
            self._told.add(event)
            log.warning("event=%s error=%r further=counted", event, problem, exc_info=exc)


def pause_s(steps: tuple[float, ...], failures: int, after_s: float) -> float:
    """Before the next try: by the failures in a row (one at least), and as the receiver asks; bounded."""
    step = steps[min(failures, len(steps)) - 1]
    return max(step * random.uniform(1, 1.25), min(after_s, AFTER_S_MAX))


def _resource(options: OtlpOptions, version: str) -> tuple[tuple[str, str], ...]:
    """Who we are. What the operator names wins, except over `service_name`, which has its own option."""
    named = dict(parse_pairs(options.resource, "otlp.resource"))
    ours = {SERVICE_VERSION: version, "host.name": socket.gethostname()}
    if options.service_name != "llmtap" or SERVICE_NAME not in named:
        named[SERVICE_NAME] = options.service_name
    return tuple({**ours, **named}.items())
