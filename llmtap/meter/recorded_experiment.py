"""Compare the arms of an experiment that a capture recorded, as `/api/v1/experiment` compares running ones.

`RecordedExperiment.from_batches` finds the arms in a first reading of the rows; `add` adds an exchange;
`to_dict` returns the same JSON as `Experiments.results`, for `llmtap report CAPTURE --by arm`. A capture does
not have the configuration: the control is the arm whose requests were not changed, and the shares of the arms
are unknown. So the sample ratio is not tested, and differences of shares have an interval but no p.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from llmtap.channel.experiment import ARMS_MAX, NO_ROOM, OWN_HEADER, Arm, ExperimentOptions, resolve
from llmtap.clock import SystemClock
from llmtap.exchange.exchange import Exchange
from llmtap.export.sinks import SeriesKey
from llmtap.meter.experiments import METRICS, Experiments
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.histogram import Histogram
from llmtap.metrics.latency import measure
from llmtap.metrics.statistics import Interval
from llmtap.units import NS_PER_S

COLUMNS: Final = ("arm", "unit", "route", "arrival_ns", "excluded")
UNITS_CHECKED_MAX: Final = 100_000
"""Maximum number of units that are searched for a unit with two rows or two arms. If no unit has two rows,
the unit of the experiment is the request: of this many conversations, some would have two requests."""
_UNCERTAINTY_NS_MIN: Final = 1_000_000
"""Smaller uncertainties of times are not reported."""
_TICK_NS: Final = 10 * NS_PER_S
"""Resolution of the times at which the shares of the arms are compared."""
_BLOCKS_MAX: Final = 10
_BLOCK_ROWS_MIN: Final = 10
"""Minimum mean number of requests of the smallest arm in a block of time."""
_SHARES_Z_MAX: Final = 6.0
"""Limit of the test whether each arm has the same share at all times: one false alarm in 1e9 captures."""
_MIXED_TIMES: Final = (
    "Each arm then has another part of the traffic of each time, so a difference may come from the time."
    " /api/v1/experiment compares each stage by itself."
)
_CONTROL_NAMES: Final = ("control", "baseline")
_NO_SERIES: Final = SeriesKey("", "")


class RecordedExperiment:
    """Experiment of a capture: its arms, and the exchanges of each.

    `routes`: by name of the arm, whether any of its requests was changed. `single`: whether each request is
    a unit of its own. `moved_units`: number of units that are in several arms, and `shares`: arm whose share
    changes over time, with its smallest and largest share, if there is one; warnings report both.
    """

    def __init__(
        self,
        routes: Mapping[str, bool],
        *,
        single: bool,
        moved_units: int,
        shares: tuple[str, float, float] | None = None,
    ) -> None:
        names = sorted(routes)
        unchanged = [name for name in names if not routes[name]]
        candidates = unchanged or names
        control = next((name for name in _CONTROL_NAMES if name in candidates), candidates[0])
        experiment = resolve(
            ExperimentOptions(
                name="recorded",
                unit="request" if single else "conversation",
                aa=True,  # else each arm must state its changes, and a capture does not record them
                control=control,
                arms=[Arm(name=name) for name in names],
            ),
            spare_key="none",
            start_wall_ns=0,
        )
        self._unit = "request" if single else "unit"
        self._is_aa = len(unchanged) == len(names)
        """Whether no arm changes its requests: an A/A experiment tests the method."""
        self._experiments = Experiments(experiment, SystemClock(), shares_known=False)
        self._moved_units = moved_units
        """Number of units with requests in more than one arm."""
        self._shares = shares
        """Arm whose share of the requests changed, with its smallest and largest share; None: no such arm."""
        self._uncertainties_ns = Histogram()

    @classmethod
    def from_batches(cls, batches: Iterable[pa.RecordBatch]) -> "RecordedExperiment | None":
        """Return the experiment of rows with the columns `COLUMNS`; None without 2 to `ARMS_MAX` arms."""
        routes: dict[str, bool] = {}
        units: set[str] = set()
        assignments: set[tuple[str, str]] = set()
        ticks: dict[int, Counter[str]] = {}
        rows = 0
        for batch in batches:
            batch = batch.filter(pc.is_valid(batch.column("arm")))
            _count_arms(batch, ticks)
            table = pa.Table.from_batches([batch.select(["arm", "route"])])
            for pair in table.group_by(["arm", "route"]).aggregate([]).to_pylist():
                routes[pair["arm"]] = routes.get(pair["arm"], False) or pair["route"] is not None
            if len(units) < UNITS_CHECKED_MAX:
                ids, arms = (batch.column(name).to_pylist() for name in ("unit", "arm"))
                units.update(ids)
                assignments.update(zip(ids, arms, strict=True))
                rows += batch.num_rows
        if not 2 <= len(routes) <= ARMS_MAX:
            return None
        single = len(units) == rows
        # Requests of one unit are all in one arm, so their shares change by chance.
        shares = _changed_share(ticks) if single else None
        return cls(routes, single=single, moved_units=len(assignments) - len(units), shares=shares)

    def add(self, x: Exchange, reader: Benefit) -> None:
        if x.arm is not None and x.unit is not None:
            self._experiments.on_assignment(x.arm, x.unit, False, own_headers=x.excluded == OWN_HEADER)
            self._uncertainties_ns.record(x.uncertainty_ns)
            self._experiments.on_end(x, measure(x, reader), _NO_SERIES, None)

    def to_dict(self, name: str, window: Mapping[str, Any]) -> dict[str, object]:
        """Return public JSON. `name`: name of the capture; `window`: its start and end, as in a Summary."""
        results: dict[str, Any] = self._experiments.results()()
        if self._least_uncertainty_ns:
            _widen(results, self._least_uncertainty_ns / NS_PER_S)
        return {
            **results,
            "warnings": [*results["warnings"], *self._warnings()],
            "name": name,
            "state": "recorded",
            "unit": self._unit,
            "aa": self._is_aa,
            "since": window["start"],
            "until": window["end"],
            "switched_by": None,
            "key_fingerprint": None,
        }

    @property
    def _least_uncertainty_ns(self) -> int:
        """Smallest uncertainty of a time in the capture, if it is large (level `coarse`); else 0."""
        least_ns = self._uncertainties_ns.min or 0
        return least_ns if least_ns >= _UNCERTAINTY_NS_MIN else 0

    def _warnings(self) -> Iterator[str]:
        """Yield a sentence if units or shares of arms changed, and one if times are uncertain."""
        if self._moved_units:
            yield (
                f"{self._moved_units:,} units are in more than one arm: this capture has several stages of a"
                f" ramp, or several experiments. {_MIXED_TIMES}"
            )
        elif self._shares is not None:
            arm, low, high = self._shares
            yield (
                f"{arm} has between {low:.1%} and {high:.1%} of the requests at different times: this capture"
                f" has several stages of a ramp, or several experiments. {_MIXED_TIMES}"
            )
        mean_ns = self._uncertainties_ns.mean or 0
        if self._least_uncertainty_ns:
            yield (
                f"Each time of this capture is uncertain by {self._least_uncertainty_ns / 1e6:,.0f} ms or"
                " more, as at the level coarse. The intervals of times include that, and smaller differences"
                " do not show."
            )
        elif mean_ns >= _UNCERTAINTY_NS_MIN:
            yield (
                f"Times of this capture are uncertain by {mean_ns / 1e6:,.0f} ms on average, and by up to"
                f" {(self._uncertainties_ns.max or 0) / 1e6:,.0f} ms. The intervals do not include that: a"
                " difference of means may be wrong by the average, and one of high percentiles by more."
            )


def _count_arms(batch: pa.RecordBatch, ticks: dict[int, Counter[str]]) -> None:
    """Count the requests of each arm by the tick of their arrival."""
    assigned = batch.filter(pc.fill_null(pc.not_equal(batch.column("excluded"), NO_ROOM), True))
    ticks_of = pc.divide(assigned.column("arrival_ns").cast(pa.int64()), _TICK_NS)
    table = pa.table({"tick": ticks_of, "arm": assigned.column("arm")})
    for row in table.group_by(["tick", "arm"]).aggregate([([], "count_all")]).to_pylist():
        ticks.setdefault(row["tick"], Counter())[row["arm"]] += row["count_all"]


def _changed_share(ticks: Mapping[int, Counter[str]]) -> tuple[str, float, float] | None:
    """Return the arm whose share changes most over time, with its smallest and largest share.

    None if the shares change as by chance (chi-square test of homogeneity, approximated by Wilson-Hilferty).
    """
    total = sum(ticks.values(), Counter[str]())
    if len(total) < 2:
        return None
    rows, blocks_max = total.total(), min(_BLOCKS_MAX, min(total.values()) // _BLOCK_ROWS_MIN)
    blocks, block = [], Counter[str]()
    for tick in sorted(ticks):
        block += ticks[tick]
        if block.total() * blocks_max >= rows:
            blocks.append(block)
            block = Counter()
    if block and blocks:
        blocks[-1] += block
    degrees = (len(blocks) - 1) * (len(total) - 1)
    if degrees < 1:
        return None
    chi2 = sum(
        (block[arm] - (expected := n * block.total() / rows)) ** 2 / expected
        for block in blocks
        for arm, n in total.items()
    )
    spread = 2 / (9 * degrees)
    if ((chi2 / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) <= _SHARES_Z_MAX:
        return None
    shares = {arm: sorted(block[arm] / block.total() for block in blocks) for arm in total}
    arm = max(shares, key=lambda name: shares[name][-1] / max(shares[name][0], 1 / rows))
    return arm, shares[arm][0], shares[arm][-1]


def _widen(results: dict[str, Any], seconds: float) -> None:
    """Widen all intervals of times by `seconds` at both ends, because each time is uncertain by `seconds`."""
    times = [metric for metric, scale in METRICS.items() if scale == NS_PER_S]
    for arm in results["arms"].values():
        for metric in times:
            intervals = arm["metrics"][metric]["intervals"]
            intervals.update({name: _widened_interval(one, seconds) for name, one in intervals.items()})
    for by_metric in results["differences"].values():
        for difference in (d for metric in times for d in by_metric[metric].values()):
            for name in ("interval", "anytime_interval"):
                difference[name] = _widened_interval(difference[name], seconds)
            if (anytime := difference["anytime_interval"]) is not None:
                difference["different"] = not anytime[0] <= 0 <= anytime[1]


def _widened_interval(interval: Interval | None, reach: float) -> Interval | None:
    return None if interval is None else (interval[0] - reach, interval[1] + reach)
