"""Time series sampled during a load run, from the host and from the server's metrics, and their figures.

The samplers (`system.py`, `watch.py`) add samples to `Columns`. `TimeSeries` returns them as JSON arrays, and
computes figures of a window (`summary`): means, growth of counters, energy. Each sample has its own monotonic
time. Seconds in the JSON count from the start of the run; earlier samples have negative times.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite, nan
from threading import Lock
from typing import Any, Final

from llmtap.metrics.cost import GAP_NS_MAX, Energy, average_power_w, energy_of, joules_per_token
from llmtap.metrics.statistics import mean, percentile
from llmtap.net.server_metrics import MEAN_TIMES, MonitorSeries
from llmtap.units import to_seconds

SAMPLES_MAX: Final = 100_000
"""Maximum number of samples: more than a day at 1 Hz; 20 series then take 16 MB."""


@dataclass(slots=True)
class Ticks:
    """Times of a timer: a start time plus multiples of a period. Times that have passed are skipped."""

    start_ns: int
    period_ns: int
    number: int = 0

    def next(self, now_ns: int) -> tuple[float, int]:
        due = max(self.number + 1, -(-(now_ns - self.start_ns) // self.period_ns))
        skipped, self.number = due - self.number - 1, due
        return to_seconds(self.start_ns + due * self.period_ns - now_ns), skipped


class Columns:
    """Samples of several series at the same times. One thread adds samples, any thread may read them."""

    def __init__(self, series: Mapping[str, MonitorSeries]) -> None:
        self.series = dict(series)
        self.dropped = 0
        self._closed = False
        self._t_ns = array("q")
        self._took_ns = array("q")
        # An unknown value is stored as NaN.
        self._values: dict[str, array[float]] = {name: array("d") for name in series}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._t_ns)

    def add(self, t_ns: int, took_ns: int, values: Mapping[str, float | None]) -> None:
        """Add a sample of the time `t_ns`, which took `took_ns` to take; missing series get None."""
        assert values.keys() <= self.series.keys(), "a value of no series"
        with self._lock:
            if self._closed:
                return
            if len(self._t_ns) >= SAMPLES_MAX:
                self.dropped += 1
                return
            assert not self._t_ns or t_ns >= self._t_ns[-1], "samples are in order of time"
            self._t_ns.append(t_ns)
            self._took_ns.append(took_ns)
            for name, column in self._values.items():
                value = values.get(name)
                column.append(nan if value is None else value)

    def close(self) -> None:
        """Ignore further samples: a thread that hangs may add one while the columns are read."""
        with self._lock:
            self._closed = True

    def times_ns(self) -> list[int]:
        with self._lock:
            return list(self._t_ns)

    def column(self, name: str) -> list[float | None]:
        with self._lock:
            return [value if isfinite(value) else None for value in self._values[name]]

    def latest(self) -> dict[str, float]:
        with self._lock:
            return {name: v[-1] for name, v in self._values.items() if v and isfinite(v[-1])}

    def known(self) -> list[str]:
        with self._lock:
            return [name for name, column in self._values.items() if any(map(isfinite, column))]

    def to_dict(self, start_ns: int) -> dict[str, Any]:
        """Return arrays of equal length: `t` has the times of the samples in seconds since `start_ns`, the
        others have the values of each series. A series without a value is omitted."""
        series = {}
        for name in self.known():
            spec = self.series[name]
            series[name] = {"unit": spec.unit, "kind": spec.kind, "values": self.column(name)}
        return {
            "t": [to_seconds(t_ns - start_ns) for t_ns in self._t_ns],
            "took": [to_seconds(took_ns) for took_ns in self._took_ns],
            "series": series,
            "dropped": self.dropped,
        }


@dataclass(slots=True)
class TimeSeries:
    start_ns: int
    system: Columns
    server: Columns | None = None
    about: dict[str, Any] = field(default_factory=dict)
    """Metadata of the samples, as in the JSON: processes, period, failures."""

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.about,
            "system": self.system.to_dict(self.start_ns),
            "server": None if self.server is None else self.server.to_dict(self.start_ns),
        }

    def summary(
        self, *, from_ns: int | None = None, to_ns: int | None = None, tokens: int | None = None,
        gap_ns_max: int = GAP_NS_MAX,
    ) -> dict[str, Any]:  # fmt: skip
        """Return figures of the samples between two times (by default all samples), and the energy used.

        `tokens`: number of tokens generated between these times, for the energy per token.
        """
        window = (from_ns, to_ns)
        return {
            **self.about,
            "window": [None if t is None else to_seconds(t - self.start_ns) for t in window],
            "system": _series_figures(self.system, window),
            "server": None if self.server is None else _server_figures(self.server, window),
            "energy": _gpu_energy(self.system, window, tokens, gap_ns_max),
        }


_Window = tuple[int | None, int | None]


def _series_figures(columns: Columns, window: _Window) -> dict[str, dict[str, Any]]:
    times_ns = columns.times_ns()
    first = 0 if window[0] is None else bisect_left(times_ns, window[0])
    last = len(times_ns) if window[1] is None else bisect_right(times_ns, window[1])
    within = slice(first, last)
    figures = {}
    for name in columns.known():
        series, values = columns.series[name], columns.column(name)[within]
        figure: dict[str, Any] = {"unit": series.unit, "kind": series.kind}
        if series.kind == "counter":
            figure |= _counter_growth(times_ns[within], values)
        else:
            known = [value for value in values if value is not None]
            ordered = sorted(known)
            figure |= {
                "n": len(known),
                "mean": _interval_mean(times_ns, values, first) if series.kind == "interval" else mean(known),
                "p50": percentile(ordered, 0.50),
                "p95": percentile(ordered, 0.95),
                "max": ordered[-1] if ordered else None,
            }
        figures[name] = figure
    return figures


def _interval_mean(times_ns: Sequence[int], values: Sequence[float | None], first: int) -> float | None:
    weighed, weight_ns = 0.0, 0
    for at, value in enumerate(values, first):
        if value is not None and at:
            length_ns = times_ns[at] - times_ns[at - 1]
            weighed += value * length_ns
            weight_ns += length_ns
    return weighed / weight_ns if weight_ns else None


def _counter_growth(times_ns: Sequence[int], values: Sequence[float | None]) -> dict[str, Any]:
    """Return the growth of a counter. A value that falls is a restart: the counter began again at 0."""
    known = [(t_ns, value) for t_ns, value in zip(times_ns, values, strict=True) if value is not None]
    grown, restarts = 0.0, 0
    for (_, before), (_, after) in pairwise(known):
        grown += after - before if after >= before else after
        restarts += after < before
    seconds = to_seconds(known[-1][0] - known[0][0]) if known else 0.0
    return {
        "n": len(known),
        "total": grown if len(known) > 1 else None,
        "per_second": grown / seconds if seconds else None,
        "restarts": restarts,
    }


def _server_figures(columns: Columns, window: _Window) -> dict[str, Any]:
    figures: dict[str, Any] = _series_figures(columns, window)
    queries = (figures.get("prefix_queries") or {}).get("total")
    hits = (figures.get("prefix_hits") or {}).get("total")
    if queries and hits is not None:
        figures["prefix_hit_share"] = {"unit": "share", "kind": "ratio", "total": hits / queries}
    for name in MEAN_TIMES:
        seconds, n = ((figures.get(f"{name}_{what}") or {}).get("total") for what in ("seconds", "values"))
        if seconds is not None and n:
            figures[f"{name}_mean"] = {"unit": "seconds", "kind": "ratio", "total": seconds / n}
    return figures


def _gpu_energy(
    system: Columns, window: _Window, tokens: int | None, gap_ns_max: int
) -> dict[str, Any] | None:
    """Return the energy used in the window by all GPUs with known power; None if there is no such GPU."""
    used: dict[str, Energy] = {}
    for name in system.known():
        if name.endswith("_power"):
            energy = energy_of(
                system.times_ns(), system.column(name), from_ns=window[0], to_ns=window[1],
                gap_ns_max=gap_ns_max,
            )  # fmt: skip
            if energy is not None:
                used[name.removesuffix("_power")] = energy
    if not used:
        return None
    joules = sum(energy.joules for energy in used.values())
    return {
        "joules": joules,
        "seconds": max(to_seconds(energy.known_ns) for energy in used.values()),
        "seconds_missing": max(to_seconds(energy.missing_ns) for energy in used.values()),
        "power": sum(average_power_w([energy]) or 0.0 for energy in used.values()),
        "joules_per_token": joules_per_token(joules, tokens),
        "tokens": tokens,
        "devices": {device: {"joules": energy.joules} for device, energy in used.items()},
    }
