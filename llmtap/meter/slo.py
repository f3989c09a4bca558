"""Count attainment and burn rates of objectives by class and tenant, as exchanges end (`SloBook`).

The pipeline calls `judge` with each measured exchange, which counts it and returns whether it met its
objectives. `/metrics` and summaries read a copy (`freeze`), with the alarms that ring. Windows are those of
burn-rate alarms: 5 and 30 minutes, 1 and 6 hours. Source: SRE Workbook, chapter 5; `metrics/slo.py` has the
definitions and the arithmetic.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import Final, NamedTuple

from msgspec import Struct, msgpack

from llmtap.clock import Clock
from llmtap.exchange.exchange import Exchange
from llmtap.meter.pipeline.windows import Merging, SliceLevel, Slices
from llmtap.meter.tenants import Labels
from llmtap.metrics.latency import Measured
from llmtap.metrics.objectives import Judgement, judge
from llmtap.metrics.slo import (
    Alarm,
    SloClass,
    SloOptions,
    TenantClasses,
    burn_rate,
    burn_rate_max,
    error_ratio,
    events_min,
)
from llmtap.units import NS_PER_S

_MINUTE: Final = 60 * NS_PER_S
BURN_WINDOWS: Final = ("5m", "30m", "1h", "6h")
_LEVELS: Final = (
    SliceLevel(5 * _MINUTE, _MINUTE // 2),
    SliceLevel(30 * _MINUTE, _MINUTE * 5 // 2),
    SliceLevel(60 * _MINUTE, 5 * _MINUTE),
    SliceLevel(360 * _MINUTE, 30 * _MINUTE),
)
REQUESTED: Final = "requested"
"""Name of the class for exchanges that have objectives only in a header field of their request."""

log = logging.getLogger(__name__)


class SloCount(NamedTuple):
    """Numbers of exchanges of a class and tenant: judged (`counted`), of these met (`good`), not judged."""

    counted: int = 0
    good: int = 0
    """Number of judged exchanges that met the objectives."""
    not_judged: int = 0
    """Exchanges that are neither counted nor good, because their answers were not understood."""
    own_faults: int = 0
    """Exchanges left out, because llmtap itself failed; they are neither counted nor good."""

    def plus(self, other: "SloCount") -> "SloCount":
        """Return the sums of both counts."""
        return SloCount(*map(add, self, other))


SloKey = tuple[str, str]
"""Names of the class and the tenant."""
_Counts = dict[SloKey, SloCount]
_SavedCount = tuple[str, str, int, int, int, int]
"""Name of the class, name of the tenant, and the fields of SloCount."""


class _SavedSlos(Struct, array_like=True):
    """Saved form of all counts."""

    terms: dict[str, str]
    """Text of the options of each class."""
    begin_ns: int
    """Monotonic time from which exchanges are counted."""
    slices: list[tuple[int, int, list[_SavedCount]]]
    """For each slice: its start (monotonic time), its level, and its counts."""
    since_ns: dict[str, int]
    """By class: monotonic time since which it is counted."""


_encode: Final = msgpack.Encoder().encode
_decode: Final = msgpack.Decoder(_SavedSlos).decode


class SloBook:
    """Counts of all classes. One thread writes; values that a reader gets never change again."""

    def __init__(self, options: Mapping[str, SloOptions], clock: Clock) -> None:
        self._clock = clock
        self.classes = {name: SloClass.of(name, slo) for name, slo in options.items()}
        self._terms = {name: repr(slo) for name, slo in options.items()}
        """By class: text of its options; counts of other options are not continued after a restart."""
        self._since_ns = dict.fromkeys(self.classes, clock.mono_ns())
        """By class: monotonic time since which it is counted. If a reload changes a class, it begins anew."""
        self._tenant_classes = TenantClasses(self.classes.values())
        self.class_of_tenant = self._tenant_classes.of
        """Returns the class of a tenant; None: it has none."""
        self._slices: Slices[_Counts] = Slices(_LEVELS, clock.mono_ns(), dict, _merge_tables, past=False)
        self._total_counts: _Counts = {}
        """Counts since the meter's start, for the metrics."""
        for slo in self.classes.values():
            for alarm in slo.unreachable_alarms:
                log.warning(
                    "event=alarm_unreachable slo=%s target=%g burn_rate=%g burn_rate_max=%.4g hint=%r",
                    slo.name,
                    slo.target,
                    alarm.factor,
                    burn_rate_max(slo.target),
                    "the alarm can never fire and is omitted",
                )

    @property
    def tenants(self) -> list[str]:
        """Names of the tenants for which the options name a class."""
        return list(self._tenant_classes.by_tenant)

    def judge(self, x: Exchange, m: Measured, slo: SloClass | None, tenant: str) -> bool | None:
        """Return whether the exchange met its objectives; None if it is not counted.

        Objectives of the request take precedence over those of its class. `tenant`: label value of the tenant
        for which the exchange is counted.
        """
        verdict = judge(None if slo is None else slo.objectives, m, x)
        if verdict is None:
            return None
        judgement = verdict[1]
        met = judgement.met
        if met is None:
            own_fault = judgement is Judgement.OWN_FAULT
            more = SloCount(not_judged=not own_fault, own_faults=own_fault)
        else:
            more = SloCount(1, met)
        key = (REQUESTED if slo is None else slo.name, tenant)
        counts = self._slices.open_data(self._clock.mono_ns())
        for table in (counts, self._total_counts):
            table[key] = table.get(key, SloCount()).plus(more)
        self._slices.tidy()
        return met

    def export(self) -> Callable[[], bytes]:
        """Return a thread-safe function that packs the windows for another meter. Counters are left out."""
        terms, begin_ns, since_ns = self._terms, self._slices.begin_ns, dict(self._since_ns)
        slices = self._slices.export(self._clock.mono_ns())

        def pack_counts() -> bytes:
            rows = [
                (start_ns, level, [(*key, *count) for key, count in table.items()])
                for start_ns, level, table in slices
            ]
            return _encode(_SavedSlos(terms, begin_ns, rows, since_ns))

        return pack_counts

    def clear(self) -> None:
        self._slices.clear()

    def absorb(self, packed: bytes, shift_ns: int, labels: Labels) -> list[str]:
        """Add the packed windows of another meter. Return a text for each class that was left out.

        `shift_ns`: our monotonic time minus the other meter's. Raises msgspec.MsgspecError.
        """
        saved = _decode(packed)
        changed = sorted(name for name, terms in saved.terms.items() if self._terms.get(name) != terms)
        for name in saved.terms.keys() - changed:
            self._since_ns[name] = min(self._since_ns[name], saved.since_ns[name] + shift_ns)

        def table_of(rows: list[_SavedCount]) -> _Counts:
            table: _Counts = {}
            for slo, tenant, *counts in rows:
                if slo not in changed:
                    key = slo, labels.tenant(tenant)
                    table[key] = table.get(key, SloCount()).plus(SloCount(*counts))
            return table

        self._slices.open_data(self._clock.mono_ns())
        slices = [(start_ns + shift_ns, level, table_of(rows)) for start_ns, level, rows in saved.slices]
        self._slices.absorb(saved.begin_ns + shift_ns, slices)
        return [f"burn rates of slo.{name} (it was changed or removed)" for name in changed]

    def freeze(self) -> "FrozenSlos":
        """Return a copy of all counts, which any thread can read."""
        now_ns = self._clock.mono_ns()
        windows = {}
        seconds: dict[str, dict[str, float]] = {name: {} for name in self.classes}
        for level, window in enumerate(BURN_WINDOWS):
            tables = self._slices.window(level, now_ns)
            windows[window] = [*tables[:-1], dict(tables[-1])]
            start_ns = self._slices.window_start_ns(level, now_ns)
            for name, since_ns in self._since_ns.items():
                seconds[name][window] = (now_ns - max(start_ns, since_ns)) / NS_PER_S
        return FrozenSlos(self.classes, dict(self._total_counts), windows, seconds)


@dataclass(frozen=True, slots=True)
class FrozenSlos:
    """Copy of all counts at one moment, which any thread can read."""

    classes: Mapping[str, SloClass]
    total: Mapping[SloKey, SloCount]
    """Counts since the meter's start."""
    _windows: Mapping[str, Sequence[_Counts]]
    _seconds: Mapping[str, Mapping[str, float]]
    """By class and window: time in seconds that the counts cover."""

    def windows(self) -> dict[str, _Counts]:
        return {name: _sum_tables(tables) for name, tables in self._windows.items()}

    def burn_rates(self) -> dict[tuple[str, str], float]:
        """Return by class and window the burn rate of all tenants together; absent if no exchange counted."""
        rates = {}
        for window, counts in self.windows().items():
            for name, slo in self.classes.items():
                count = _class_count(counts, name)
                rate = burn_rate(error_ratio(count.good, count.counted), slo.target)
                if rate is not None:
                    rates[name, window] = rate
        return rates

    def to_dict(self) -> dict[str, object]:
        windows = self.windows()
        return {name: _class_to_dict(slo, windows, self._seconds[name]) for name, slo in self.classes.items()}


def _class_to_dict(
    slo: SloClass, windows: Mapping[str, _Counts], seconds: Mapping[str, float]
) -> dict[str, object]:
    all_of = {
        name: _window_to_dict(slo, seconds[name], _class_count(c, slo.name)) for name, c in windows.items()
    }
    tenants = sorted({tenant for counts in windows.values() for name, tenant in counts if name == slo.name})
    by_tenant = {
        tenant: {
            window: _window_to_dict(slo, seconds[window], counts.get((slo.name, tenant), SloCount()))
            for window, counts in windows.items()
        }
        for tenant in tenants
    }
    alarms: list[dict[str, object]] = []
    for alarm in (*slo.alarms, *slo.unreachable_alarms):
        of_class = _alarm_to_dict(slo, alarm, all_of)
        alarms.append(of_class)
        if not slo.per_tenant:
            continue
        of_tenants = [
            one
            for tenant, own in by_tenant.items()
            if (one := _alarm_to_dict(slo, alarm, own, tenant))["ringing"]
        ]
        of_class["ringing"] = of_class["ringing"] and len(of_tenants) != 1
        if not of_class["ringing"]:
            alarms += of_tenants
    for index, one in enumerate(alarms):
        one["inhibited"] = _is_inhibited(index, alarms)
    return {
        "objectives": slo.objectives.text,
        "target": slo.target,
        "tenants": list(slo.tenants),
        "per": "tenant" if slo.per_tenant else "class",
        "burn_rate_max": burn_rate_max(slo.target),
        "windows": all_of,
        "alarms": alarms,
        "by": {"tenant": by_tenant},
    }


def _is_inhibited(index: int, alarms: Sequence[Mapping[str, object]]) -> bool:
    """Return whether another ringing alarm reports the cause of the ringing alarm at `index`.

    The rules are those that `export/rules.py` generates for Alertmanager. The other alarm is an earlier
    `page` of the same owner or, for an alarm of a tenant, an alarm of the class that is at least as severe.
    """
    target = alarms[index]
    if not target["ringing"]:
        return False
    earlier_pages = [one for one in alarms[:index] if one["tenant"] == target["tenant"]]
    of_class = [one for one in alarms if one["tenant"] is None and target["tenant"] is not None]
    return any(one["ringing"] and one["severity"] == "page" for one in earlier_pages) or any(
        one["ringing"] and (one["severity"] == "page" or target["severity"] == "ticket") for one in of_class
    )


def _window_to_dict(slo: SloClass, seconds: float, count: SloCount) -> dict[str, object]:
    counted, good, not_judged, own_faults = count
    rate = burn_rate(error_ratio(good, counted), slo.target)
    return {
        "seconds": seconds,
        "counted": counted,
        "good": good,
        "not_judged": not_judged,
        "own_faults": own_faults,
        "attainment": good / counted if counted else None,
        "burn_rate": rate,
        # Mark the burn rate as uncertain if so few exchanges counted that a single bad one makes it exceed 1.
        "marks": ["burn_rate"] if 0 < counted < events_min(slo.target, 1) else [],
    }


def _alarm_to_dict(
    slo: SloClass, alarm: Alarm, windows: Mapping[str, Mapping[str, object]], tenant: str | None = None
) -> dict[str, object]:
    long, short = _window_name(alarm.long_ns), _window_name(alarm.short_ns)
    long_rate, short_rate = windows[long]["burn_rate"], windows[short]["burn_rate"]
    assert long_rate is None or isinstance(long_rate, float)
    assert short_rate is None or isinstance(short_rate, float)
    least = events_min(slo.target, alarm.factor)
    counted = windows[long]["counted"]
    assert isinstance(counted, int)
    return {
        "tenant": tenant,
        "severity": alarm.severity,
        "long": long,
        "short": short,
        "burn_rate": alarm.factor,
        "reachable": alarm in slo.alarms,
        # Minimum number of exchanges in the long window: with fewer, a single bad one would fire the alarm.
        "events_min": least,
        "ringing": alarm in slo.alarms and counted >= least and alarm.rings(long_rate, short_rate),
    }


def _window_name(ns: int) -> str:
    return f"{ns // (60 * _MINUTE)}h" if ns % (60 * _MINUTE) == 0 else f"{ns // _MINUTE}m"


def _class_count(counts: _Counts, name: str) -> SloCount:
    """Return the counts of an SLO class, added over all tenants."""
    total = SloCount()
    for (slo, _), count in counts.items():
        if slo == name:
            total = total.plus(count)
    return total


def _sum_tables(tables: Sequence[_Counts]) -> _Counts:
    total: _Counts = {}
    for table in tables:
        for key, count in table.items():
            total[key] = total.get(key, SloCount()).plus(count)
    return total


def _merge_tables(tables: Sequence[_Counts], level: int) -> Merging[_Counts]:
    yield
    return _sum_tables(tables)
