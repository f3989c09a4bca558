"""Time series sampled during a load run, from the host and from the server's metrics, and their figures.

The samplers (`system.py`, `watch.py`) add samples to `Columns`. `TimeSeries` returns them as arrays
(`samples`), and computes figures of a window (`summary`): means, growth of counters, energy. Each sample has
its own monotonic time. Seconds in results count from the start of the run; earlier samples have negative
times.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, nan
from threading import Lock
from typing import Final

from msgspec import Struct, structs

from llmtap.metrics.cost import GAP_NS_MAX, Energy, average_power_w, energy_of, joules_per_token
from llmtap.metrics.statistics import mean, percentile
from llmtap.net.server_metrics import MEAN_TIMES, MonitorSeries
from llmtap.units import to_seconds

SAMPLES_MAX: Final = 100_000
"""Maximum number of samples: more than a day at 1 Hz; 20 series then take 16 MB."""


class SampledProcess(Struct, frozen=True):
    """A process whose CPU time was counted."""

    pid: int
    name: str
    """Name of the program."""


class SampledGpus(Struct, frozen=True):
    """The GPUs of the host."""

    devices: list[str]
    unread: int
    """Number of further GPUs, which are not sampled."""


class ScrapeReport(Struct, frozen=True):
    """How the server's metrics were read, with numbers of scrapes; `failures` are counted by reason."""

    url: str | None = None
    gave_up: bool = False
    """Whether scraping ended early, because the target has no known metrics."""
    period: float = 0.0
    """Seconds from one reading to the next."""
    scrapes: int = 0
    skipped: int = 0
    """Number of scrapes that were due while the previous scrape was in progress."""
    failed: int = 0
    """Number of failed scrapes."""
    failures: dict[str, int] = {}
    """By reason: number of failed scrapes."""
    missing: list[str] = []
    """Series that the server does not have."""


NO_SCRAPE: Final = ScrapeReport()


class SamplingReport(Struct, frozen=True):
    """How the samples were taken, with the `period` in seconds."""

    period: float = 0.0
    """Seconds from one sample to the next."""
    skipped: int = 0
    """Number of samples that were due while the previous sample was in progress."""
    processes: dict[str, list[SampledProcess]] = {}
    """By group: processes whose CPU time was counted."""
    gpu: SampledGpus | None = None
    why_not: dict[str, str] = {}
    """Reason why a part of the host could not be sampled, by the name of the part."""
    scrape: ScrapeReport = NO_SCRAPE


_UNKNOWN_SAMPLING: Final = SamplingReport()


class SampledSeries(Struct, frozen=True):
    """Values of one series at the times of the samples."""

    unit: str
    kind: str
    """`gauge` (a state) or `counter` (a growing sum)."""
    values: list[float | None]


class SampledColumns(Struct, frozen=True):
    """Arrays of equal length. A series without a value is omitted."""

    t: list[float]
    """Times of the samples in seconds since the start of the run."""
    took: list[float]
    """Time in seconds that taking each sample took."""
    series: dict[str, SampledSeries]
    dropped: int
    """Number of samples that were not stored, because `SAMPLES_MAX` samples were stored before."""


class Samples(SamplingReport, frozen=True, kw_only=True):
    """All samples of a run."""

    system: SampledColumns
    server: SampledColumns | None


class GaugeFigures(Struct, frozen=True):
    """Figures of a gauge, or of a mean over each interval between samples."""

    unit: str
    kind: str
    """`gauge`, or `mean` over each interval between samples."""
    n: int
    """Number of samples."""
    mean: float | None
    p50: float | None
    p95: float | None
    max: float | None


class CounterFigures(Struct, frozen=True):
    """Growth of a counter; `restarts` is the number of times that it began again at 0."""

    unit: str
    kind: str
    n: int
    """Number of samples."""
    total: float | None
    """Growth in the window."""
    per_second: float | None
    """Growth per second."""
    restarts: int
    """How often the counter began again at 0."""


class RatioFigure(Struct, frozen=True, kw_only=True):
    """Quotient of the growth of two counters."""

    unit: str
    kind: str = "ratio"
    total: float
    """Quotient over the whole window."""


SeriesFigures = GaugeFigures | CounterFigures | RatioFigure


class DeviceEnergy(Struct, frozen=True):
    """Energy of one GPU."""

    joules: float


class GpuEnergy(Struct, frozen=True):
    """Energy used by all GPUs with known power, and their mean power in watts."""

    joules: float
    """Energy of all GPUs with known power."""
    seconds: float
    """Time for which the power is known; `seconds_missing`: time for which it is unknown."""
    seconds_missing: float
    """Seconds of the load without samples, whose energy is not known."""
    power: float
    """Mean power of all GPUs, in watts."""
    joules_per_token: float | None
    tokens: int | None
    devices: dict[str, DeviceEnergy]
    """By name of a GPU: its energy."""


class SamplesSummary(SamplingReport, frozen=True, kw_only=True):
    """Figures of all series in a time window, given in seconds since the start of the run."""

    window: tuple[float | None, float | None]
    system: dict[str, SeriesFigures]
    server: dict[str, SeriesFigures] | None
    energy: GpuEnergy | None


@dataclass(slots=True)
class Ticks:
    """Times of a timer: a start time plus `number` periods. Times that have passed are skipped."""

    start_ns: int
    period_ns: int
    number: int = 0
    """Number of periods since `start_ns`."""

    def next_wait(self, now_ns: int) -> tuple[float, int]:
        """Return the seconds until the next time, and the number of skipped times."""
        due = max(self.number + 1, -(-(now_ns - self.start_ns) // self.period_ns))
        skipped, self.number = due - self.number - 1, due
        return to_seconds(self.start_ns + due * self.period_ns - now_ns), skipped


class Columns:
    """Samples of several series at the same times. One thread adds samples; any thread can read them."""

    def __init__(self, series: Mapping[str, MonitorSeries]) -> None:
        self.series = dict(series)
        self.dropped = 0
        """Number of samples that did not fit."""
        self._closed = False
        """Whether no samples are added any more."""
        self._t_ns = array("q")
        """Time of each sample."""
        self._took_ns = array("q")
        """Time that each sample took to read."""
        # An unknown value is stored as NaN.
        self._values: dict[str, array[float]] = {name: array("d") for name in series}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._t_ns)

    def add(self, t_ns: int, took_ns: int, values: Mapping[str, float | None]) -> None:
        """Add a sample of the time `t_ns`. Reading it took `took_ns`. Missing series get None."""
        assert values.keys() <= self.series.keys(), f"unknown series: {values.keys() - self.series.keys()}"
        with self._lock:
            if self._closed:
                return
            if len(self._t_ns) >= SAMPLES_MAX:
                self.dropped += 1
                return
            assert not self._t_ns or t_ns >= self._t_ns[-1], "samples must be added in the order of time"
            self._t_ns.append(t_ns)
            self._took_ns.append(took_ns)
            for name, column in self._values.items():
                value = values.get(name)
                column.append(nan if value is None else value)

    def close(self) -> None:
        """Ignore further samples: a thread that hung can add one while the columns are read."""
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

    def known_series(self) -> list[str]:
        with self._lock:
            return [name for name, column in self._values.items() if any(map(isfinite, column))]

    def samples(self, start_ns: int) -> SampledColumns:
        """Return the samples; times are in seconds since `start_ns`."""
        series = {
            name: SampledSeries(self.series[name].unit, self.series[name].kind, self.column(name))
            for name in self.known_series()
        }
        return SampledColumns(
            [to_seconds(t_ns - start_ns) for t_ns in self._t_ns],
            [to_seconds(took_ns) for took_ns in self._took_ns],
            series,
            self.dropped,
        )


@dataclass(slots=True)
class TimeSeries:
    """All samples of a run, while it is measured and after."""

    start_ns: int
    system: Columns
    server: Columns | None = None
    sampling: SamplingReport = _UNKNOWN_SAMPLING
    """How the samples were taken."""

    def samples(self) -> Samples:
        return Samples(
            **structs.asdict(self.sampling),
            system=self.system.samples(self.start_ns),
            server=None if self.server is None else self.server.samples(self.start_ns),
        )

    def summary(
        self,
        *,
        from_ns: int | None = None,
        to_ns: int | None = None,
        tokens: int | None = None,
        gap_ns_max: int = GAP_NS_MAX,
    ) -> SamplesSummary:
        """Return figures of the samples between two times (by default all samples), and the energy used.

        `tokens`: number of tokens generated between these times, for the energy per token.
        """
        window = (from_ns, to_ns)
        begin, end = (None if t is None else to_seconds(t - self.start_ns) for t in window)
        return SamplesSummary(
            **structs.asdict(self.sampling),
            window=(begin, end),
            system=_series_figures(self.system, window),
            server=None if self.server is None else _server_figures(self.server, window),
            energy=_gpu_energy(self.system, window, tokens, gap_ns_max),
        )


_Window = tuple[int | None, int | None]


def _series_figures(columns: Columns, window: _Window) -> dict[str, SeriesFigures]:
    times_ns = columns.times_ns()
    first = 0 if window[0] is None else bisect_left(times_ns, window[0])
    last = len(times_ns) if window[1] is None else bisect_right(times_ns, window[1])
    within = slice(first, last)
    figures: dict[str, SeriesFigures] = {}
    for name in columns.known_series():
        series, values = columns.series[name], columns.column(name)[within]
        if series.kind == "counter":
            figures[name] = _counter_growth(series, times_ns[within], values)
            continue
        known = [value for value in values if value is not None]
        ordered = sorted(known)
        figures[name] = GaugeFigures(
            series.unit,
            series.kind,
            n=len(known),
            mean=_interval_mean(times_ns, values, first) if series.kind == "interval" else mean(known),
            p50=percentile(ordered, 0.50),
            p95=percentile(ordered, 0.95),
            max=ordered[-1] if ordered else None,
        )
    return figures


def _interval_mean(times_ns: Sequence[int], values: Sequence[float | None], first: int) -> float | None:
    """Return the mean of the values, each weighted by the time since the previous sample."""
    weighted_sum, weight_ns = 0.0, 0
    for index, value in enumerate(values, first):
        if value is not None and index:
            length_ns = times_ns[index] - times_ns[index - 1]
            weighted_sum += value * length_ns
            weight_ns += length_ns
    return weighted_sum / weight_ns if weight_ns else None


def _counter_growth(
    series: MonitorSeries, times_ns: Sequence[int], values: Sequence[float | None]
) -> CounterFigures:
    """Return the growth of a counter. A value that falls is a restart: the counter began again at 0."""
    known = [(t_ns, value) for t_ns, value in zip(times_ns, values, strict=True) if value is not None]
    grown, restarts = 0.0, 0
    for (_, before), (_, after) in pairwise(known):
        grown += after - before if after >= before else after
        restarts += after < before
    seconds = to_seconds(known[-1][0] - known[0][0]) if known else 0.0
    return CounterFigures(
        series.unit,
        series.kind,
        n=len(known),
        total=grown if len(known) > 1 else None,
        per_second=grown / seconds if seconds else None,
        restarts=restarts,
    )


def _server_figures(columns: Columns, window: _Window) -> dict[str, SeriesFigures]:
    figures = _series_figures(columns, window)

    def counter_growth(name: str) -> float | None:
        counter = figures.get(name)
        return counter.total if isinstance(counter, CounterFigures) else None

    queries, hits = counter_growth("prefix_queries"), counter_growth("prefix_hits")
    if queries and hits is not None:
        figures["prefix_hit_share"] = RatioFigure(unit="share", total=hits / queries)
    for name in MEAN_TIMES:
        seconds, n = counter_growth(f"{name}_seconds"), counter_growth(f"{name}_values")
        if seconds is not None and n:
            figures[f"{name}_mean"] = RatioFigure(unit="seconds", total=seconds / n)
    return figures


def _gpu_energy(system: Columns, window: _Window, tokens: int | None, gap_ns_max: int) -> GpuEnergy | None:
    """Return the energy used in the window by all GPUs with known power; None if there is no such GPU."""
    used: dict[str, Energy] = {}
    for name in system.known_series():
        if name.endswith("_power"):
            energy = energy_of(
                system.times_ns(),
                system.column(name),
                from_ns=window[0],
                to_ns=window[1],
                gap_ns_max=gap_ns_max,
            )
            if energy is not None:
                used[name.removesuffix("_power")] = energy
    if not used:
        return None
    joules = sum(energy.joules for energy in used.values())
    return GpuEnergy(
        joules=joules,
        seconds=max(to_seconds(energy.known_ns) for energy in used.values()),
        seconds_missing=max(to_seconds(energy.missing_ns) for energy in used.values()),
        power=sum(average_power_w([energy]) or 0.0 for energy in used.values()),
        joules_per_token=joules_per_token(joules, tokens),
        tokens=tokens,
        devices={device: DeviceEnergy(energy.joules) for device, energy in used.items()},
    )
