"""Histograms and counters for OpenTelemetry, sent as cumulative totals.

The SDK's instruments take 10 us for each value, and there is a gap for each token: here an exchange is
counted at once when it ends. The thread on which exchanges end adds to a table of new counts; the sending
thread takes that table as a whole and adds it to its totals, so neither waits for the other longer than an
exchange takes to be counted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import sub
from threading import Lock
from typing import Final

from llmtap.exchange.exchange import Exchange
from llmtap.export.buckets import Buckets
from llmtap.export.opentelemetry.semconv import (
    ARM,
    ERROR_TYPE,
    OUTCOME,
    OVERFLOW,
    SERVER_ADDRESS,
    SERVER_PORT,
    TENANT,
    Measure,
    Semconv,
    SemconvQuantity,
)
from llmtap.export.opentelemetry.spans import TEXT_MAX, Terms
from llmtap.metrics.latency import Measured

__all__ = ["MetricRecorder", "Point", "Totals"]

Key = tuple[str | None, ...]
"""Values of the attributes, in the order of `Recorder.names`; empty: the series of what had no room."""


@dataclass(frozen=True, slots=True)
class Point:
    """One series as it stands."""

    measure: Measure
    attributes: list[tuple[str, str | bool | int]]
    cell: Buckets


class MetricRecorder:
    """Counts exchanges, on the thread where they end."""

    def __init__(self, names: Semconv, series_max: int) -> None:
        self.names: Final = (
            names.operation, names.provider, names.request_model, names.response_model, TENANT, ARM,
            ERROR_TYPE, OUTCOME,
        )  # fmt: skip
        self.measures: list[Measure] = []
        self._of: dict[SemconvQuantity, tuple[int, ...]] = {}
        for quantity, measures in names.measures.items():
            first = len(self.measures)
            self.measures += measures
            self._of[quantity] = tuple(range(first, len(self.measures)))
        self._known: list[set[Key]] = [set() for _ in self.measures]
        self._series_max = series_max
        self._lock = Lock()
        self._fresh: dict[tuple[int, Key], Buckets] = {}

    def take(self) -> dict[tuple[int, Key], Buckets]:
        """What was counted since the last call; from any thread."""
        with self._lock:
            fresh, self._fresh = self._fresh, {}
        return fresh

    def record(self, x: Exchange, m: Measured, terms: Terms) -> None:
        """Counts one exchange."""
        with self._lock:
            self._record(x, m, terms)

    def _record(self, x: Exchange, m: Measured, terms: Terms) -> None:
        add = self._add
        base = (
            terms.operation, terms.provider, terms.model, terms.response_model, x.tenant[:TEXT_MAX], x.arm
        )  # fmt: skip
        key = (*base, None, None)
        add(SemconvQuantity.EXCHANGES, (*base, terms.error_type, x.outcome.value), 1)
        if terms.operation is None:
            return
        # Only durations bear the error's type: the other terms are of answers.
        of_error = key if terms.error_type is None else (*base, terms.error_type, None)
        if terms.operation == "embeddings":
            add(SemconvQuantity.EMBEDDINGS_DURATION, of_error, terms.duration_ns)
            add(SemconvQuantity.EMBEDDINGS_TOKENS, key, x.tokens.input)
        else:
            add(SemconvQuantity.DURATION, of_error, terms.duration_ns)
            add(SemconvQuantity.INPUT_TOKENS, key, x.tokens.input)
            add(SemconvQuantity.OUTPUT_TOKENS, key, terms.output_tokens)
            add(SemconvQuantity.CACHED_TOKENS, key, x.tokens.cached)
            add(SemconvQuantity.REASONING_TOKENS, key, x.tokens.reasoning)
        add(SemconvQuantity.SERVER_DURATION, of_error, terms.server_duration_ns)
        if not x.stream:
            return
        times = terms.chunk_times_ns
        add(SemconvQuantity.FIRST_CHUNK, key, terms.first_chunk_ns)
        add(SemconvQuantity.SERVER_FIRST_TOKEN, key, terms.server_first_token_ns)
        add(SemconvQuantity.SERVER_PER_TOKEN, key, terms.server_per_token_ns)
        add(SemconvQuantity.FIRST_CONTENT, key, m.ttft_ns)
        add(SemconvQuantity.USER_IDLE, key, m.user_idle_ns)
        self._add_many(SemconvQuantity.CHUNK_GAP, key, list(map(sub, times[1:], times)))
        self._add_many(SemconvQuantity.TBC, key, m.tbc_ns)

    def _add(self, quantity: SemconvQuantity, key: Key, value: int | None) -> None:
        if value is not None:
            for i in self._of.get(quantity, ()):
                self._cell(i, key).record(value)

    def _add_many(self, quantity: SemconvQuantity, key: Key, values: Sequence[int]) -> None:
        if values:
            for i in self._of.get(quantity, ()):
                self._cell(i, key).record_many(values)

    def _cell(self, i: int, key: Key) -> Buckets:
        cell = self._fresh.get((i, key))
        if cell is not None:
            return cell
        known = self._known[i]
        if key not in known:
            if len(known) < self._series_max:
                known.add(key)
            else:
                key = ()
        return self._fresh.setdefault((i, key), Buckets(self.measures[i].instrument.edges))


class Totals:
    """Everything counted since the start, on the thread that sends."""

    def __init__(self, recorder: MetricRecorder, servers: Mapping[str, tuple[str, int]]) -> None:
        """`servers` names the upstream's host and port by arm, under "" for all others."""
        self._recorder = recorder
        self._servers = servers
        self._arm = recorder.names.index(ARM)
        self._cells: dict[tuple[int, Key], Buckets] = {}

    def gather(self) -> Iterator[Point]:
        """Every series, with what is new in it, those of one instrument together."""
        for at, cell in self._recorder.take().items():
            if at in self._cells:
                self._cells[at].merge(cell)
            else:
                self._cells[at] = cell
        measures = self._recorder.measures
        for (i, key), cell in sorted(
            self._cells.items(), key=lambda item: measures[item[0][0]].instrument.name
        ):
            yield Point(measures[i], self._attributes(measures[i], key), cell)

    def _attributes(self, measure: Measure, key: Key) -> list[tuple[str, str | bool | int]]:
        if not key:
            return [*measure.attributes, (OVERFLOW, True)]
        out: list[tuple[str, str | bool | int]] = list(measure.attributes)
        for name, value in zip(self._recorder.names, key, strict=True):
            if value is not None:
                out.append((name, value))
        server = self._servers.get(key[self._arm] or "", self._servers.get(""))
        if server is not None:
            out += ((SERVER_ADDRESS, server[0]), (SERVER_PORT, server[1]))
        return out
