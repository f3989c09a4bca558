"""Rolling windows of the meter: Summaries of the last 10 s, minute, 5 minutes, hour, and since the start.

`Windows` is a sink of the pipeline; `freeze` returns one window at one moment for the admin API. A slice
(short part of a window) holds one Summary for each series. Older slices are merged and packed into bytes. A
reader takes the slices of a window and merges them in a thread of its own. `Slices`, the part without
Summaries, serves `meter/slo.py`, too.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Final, Generic, TypeVar

from msgspec import Struct, msgpack

from llmtap.clock import Clock, WallAnchor
from llmtap.exchange.exchange import Exchange
from llmtap.export.sinks import SeriesKey
from llmtap.meter.options import WINDOWS
from llmtap.meter.tenants import Labels
from llmtap.metrics.cost import Price
from llmtap.metrics.latency import Measured
from llmtap.metrics.objectives import REQUESTED, Objectives
from llmtap.metrics.summary import Summary, with_objectives
from llmtap.units import NS_PER_S, parse_duration_ns

SLICES_MAX: Final = 512
"""Maximum number of slices that wait to be merged. If there are more, all are merged when a slice begins."""

T = TypeVar("T")
Merging = Generator[None, None, T]
"""Generator that merges slices: it yields after each small piece of work, and returns the merged slice."""


@dataclass(frozen=True, slots=True)
class SliceLevel:
    """Length of a window, and of its slices (step). The step divides the window and all longer steps."""

    window_ns: int
    step_ns: int
    """Length of a slice."""


@dataclass(slots=True)
class _Slice(Generic[T]):
    """Data of one time slice."""

    start_ns: int
    level: int
    """Index of the slice's length in the levels; larger slices are made by merging."""
    data: T


class Slices(Generic[T]):
    """Slices of the windows, oldest first.

    `levels`: the windows, the shortest first. `past`: whether to keep data that are older than the longest
    window, as one slice of the level `len(levels)`. `make` returns the data of an empty slice, `merge` merges
    the data of slices to those of one slice of a level.
    """

    def __init__(
        self,
        levels: Sequence[SliceLevel],
        now_ns: int,
        make: Callable[[], T],
        merge: Callable[[Sequence[T], int], Merging[T]],
        *,
        past: bool,
    ) -> None:
        for shorter, longer in zip(levels, (*levels[1:], levels[-1]), strict=True):
            assert shorter.window_ns % shorter.step_ns == 0
            assert longer.step_ns % shorter.step_ns == 0
        self._levels = tuple(levels)
        self._begin_ns = now_ns
        """Time to which the start times of the slices are relative."""
        self._make_data = make
        self._merge_data = merge
        self._open_slice: _Slice[T] = _Slice(0, 0, make())
        """Slice to which exchanges are added now."""
        self._sealed_slices: list[_Slice[T]] = []
        """Complete slices, the oldest first."""
        self._past_data: T | None = make() if past else None
        """Sum of all slices that are older than the longest window; None: they are discarded."""
        self._merge_job: tuple[int, int, int, int, Merging[T]] | None = None
        """Start, end and result of the merge that runs in turns; None: none runs."""
        self._idle_since_ns = -1
        """Start of the open slice for which `tidy` found nothing to merge. It searches again in the next."""

    def __len__(self) -> int:
        return len(self._sealed_slices) + 1

    @property
    def begin_ns(self) -> int:
        """Monotonic time at which the data begin."""
        return self._begin_ns

    def export(self, now_ns: int) -> list[tuple[int, int, T]]:
        """Return all slices as (start as monotonic time, level, data); the data never change again."""
        self.seal(now_ns)
        past = [] if self._past_data is None else [(self._begin_ns, len(self._levels), self._past_data)]
        return past + [(self._begin_ns + s.start_ns, s.level, s.data) for s in self._sealed_slices]

    def clear(self) -> None:
        """Forget all slices except the open one."""
        self._sealed_slices, self._merge_job = [], None
        self._past_data = None if self._past_data is None else self._make_data()

    def absorb(self, begin_ns: int, slices: Iterable[tuple[int, int, T]]) -> None:
        """Add the exported slices of another meter, whose data begin at `begin_ns`, to those of this one.

        If the other data begin earlier, all steps are counted from their start.
        """
        own = [(self._begin_ns + s.start_ns, s.level, s.data) for s in self._sealed_slices]
        now_ns = self._begin_ns + self._open_slice.start_ns
        self._begin_ns = min(begin_ns, self._begin_ns)
        self._open_slice.start_ns = self._round_to_step(now_ns, 0)
        self._sealed_slices = sorted(
            (
                _Slice(min(self._round_to_step(start_ns, level), self._open_slice.start_ns), level, data)
                for start_ns, level, data in (*own, *slices)
            ),
            key=attrgetter("start_ns"),
        )
        self._merge_job, self._idle_since_ns = None, -1

    def _round_to_step(self, start_ns: int, level: int) -> int:
        """Return the start of the nearest step of a level, in ns after `begin_ns`; 0 for the oldest data."""
        if level >= len(self._levels):
            return 0
        step_ns = self._levels[level].step_ns
        return max(0, (start_ns - self._begin_ns + step_ns // 2) // step_ns * step_ns)

    def open_data(self, now_ns: int) -> T:
        """Return the data of the open slice, to which new exchanges are added."""
        since_ns = now_ns - self._begin_ns
        open_ = self._open_slice
        step_ns = self._levels[0].step_ns
        if since_ns - open_.start_ns >= step_ns:
            self._sealed_slices.append(open_)
            self._open_slice = open_ = _Slice(since_ns // step_ns * step_ns, 0, self._make_data())
            while len(self._sealed_slices) > SLICES_MAX and self.tidy():
                pass
        return open_.data

    def seal(self, now_ns: int) -> None:
        """Make the open slice final, for a reader in another thread, and begin a new slice."""
        self.open_data(now_ns)
        self._sealed_slices.append(self._open_slice)
        self._open_slice = _Slice(self._open_slice.start_ns, 0, self._make_data())
        self._idle_since_ns = -1

    def window(self, level: int, now_ns: int) -> list[T]:
        """Return the data of a window's slices, oldest first. Only those of the newest slice still change."""
        self.open_data(now_ns)
        first_ns = self._window_offset_ns(level, now_ns - self._begin_ns)
        return [s.data for s in self._sealed_slices if s.start_ns >= first_ns] + [self._open_slice.data]

    def window_start_ns(self, level: int, now_ns: int) -> int:
        """Return the monotonic time since which the data of a window are complete."""
        return self._begin_ns + max(0, self._window_offset_ns(level, now_ns - self._begin_ns))

    def all_data(self, now_ns: int) -> list[T]:
        """Return the data of all slices since the start, oldest first."""
        self.open_data(now_ns)
        past = [] if self._past_data is None else [self._past_data]
        return past + [s.data for s in self._sealed_slices] + [self._open_slice.data]

    def tidy(self) -> bool:
        """Do one small piece of merging. Return False if there was nothing to merge."""
        if self._merge_job is None:
            if self._idle_since_ns == self._open_slice.start_ns:
                return False
            self._merge_job = self._next_merge_job()
            if self._merge_job is None:
                self._idle_since_ns = self._open_slice.start_ns
                return False
        begin, end, start_ns, level, work = self._merge_job
        try:
            next(work)
        except StopIteration as done:
            self._merge_job = None
            if level == len(self._levels):
                self._past_data = done.value
                del self._sealed_slices[begin:end]
            else:
                self._sealed_slices[begin:end] = [_Slice(start_ns, level, done.value)]
        return True

    def _window_offset_ns(self, level: int, since_ns: int) -> int:
        """Return a window's start if it ends at `since_ns`; both times count from the start of the data."""
        step_ns = self._levels[level].step_ns
        return since_ns // step_ns * step_ns - self._levels[level].window_ns + step_ns

    def _level_of(self, start_ns: int) -> int:
        """Return the highest level to which a slice with this start can be merged. The merged slice must end
        before all shorter windows begin, because these need the single slices."""
        since_ns = self._open_slice.start_ns
        if start_ns < self._window_offset_ns(len(self._levels) - 1, since_ns):
            return len(self._levels)
        best = 0
        for level in range(1, len(self._levels)):
            step_ns = self._levels[level].step_ns
            if start_ns // step_ns * step_ns + step_ns > self._window_offset_ns(level - 1, since_ns):
                break
            best = level
        return best

    def _next_merge_job(self) -> tuple[int, int, int, int, Merging[T]] | None:
        """Return the slices to be merged next: their range, start, level and work; None if none."""
        past = len(self._levels)
        for (level, start_ns), group in groupby(list(enumerate(self._sealed_slices)), self._merge_target):
            slices = list(group)
            begin, end = slices[0][0], slices[-1][0] + 1
            data = [one.data for _, one in slices]
            if level == past and self._past_data is None:
                del self._sealed_slices[begin:end]
                return self._next_merge_job()
            if level == past and self._past_data is not None:
                data.insert(0, self._past_data)
            elif start_ns == self._open_slice.start_ns or (len(slices) == 1 and slices[0][1].level == level):
                continue  # nothing to merge: the target is the open slice, or the slice is already merged
            return begin, end, start_ns, level, self._merge_data(data, level)
        return None

    def _merge_target(self, sealed: tuple[int, _Slice[T]]) -> tuple[int, int]:
        """Return level and start of the slice into which a sealed slice is merged."""
        level = self._level_of(sealed[1].start_ns)
        if level == len(self._levels):
            return level, 0
        step_ns = self._levels[level].step_ns
        return level, sealed[1].start_ns // step_ns * step_ns


_STEPS_S: Final = (1, 5, 30, 300)
LEVELS: Final = tuple(
    SliceLevel(window_ns, step_s * NS_PER_S)
    for window_ns, step_s in zip(WINDOWS.values(), _STEPS_S, strict=True)
)
TIDY_STEPS_PER_EXCHANGE: Final = 4
"""Number of merge steps after each exchange: enough, because its Summary is merged once on each level."""
TIDY_STEPS_PER_STATUS: Final = 16
"""Number of merge steps at each status of a relay, so that merging is finished even if exchanges stop."""
WHOLE_TIME: Final = "all"
"""Name of the window since the start of the meter."""


_LABEL_FIELDS: Final = {
    "model": "model",
    "arm": "arm",
    "class": "slo",
    "reading": "reading",
    "service_tier": "service_tier",
}
"""Labels with few values (all except the tenant), with their fields of SeriesKey."""
BY: Final = ("tenant", *_LABEL_FIELDS)
"""Labels by which a summary can be split (`by=`)."""


@dataclass(slots=True)
class _Tile:
    """Counts and Summaries of one slice. Only the Summaries (`parts`) are divided by series."""

    lag_ns: int = 0
    """Largest event-loop lag of any relay."""
    sums: Counter[str] = field(default_factory=Counter)
    """Counts by name:

    - `opened`: exchanges that began
    - `n`: exchanges that ended
    - `uncertain`: ended exchanges whose uncertainty is above the limit
    - `counted`, `met`: exchanges that were judged by objectives, and those that met them
    - `skipped`: requests that a vantage did not measure because of a rule
    - `benefit_n`: streams with a benefit
    """
    benefit: float = 0.0
    """Sum of the benefits of all streams, in tokens."""
    parts: dict[SeriesKey, Summary | bytes] = field(default_factory=dict)

    def add_sums(self, other: "_Tile") -> None:
        self.lag_ns = max(self.lag_ns, other.lag_ns)
        self.sums.update(other.sums)
        self.benefit += other.benefit


_JUDGED_SUMS: Final = ("counted", "met", "benefit_n")
"""Sums of a tile that depend on the configured objectives and reader, and begin anew if these change."""


class _SavedSlice(Struct, array_like=True):
    """A packed slice; `start_ns` is a monotonic time."""

    start_ns: int
    level: int
    """Index of the window length in LEVELS; one more for the sum of all older slices."""
    lag_ns: int
    sums: dict[str, int]
    """Values of `_Tile.sums`."""
    benefit: float
    """Sum of the benefits of the answers (smooth goodput)."""
    parts: list[tuple[SeriesKey, bytes]]
    """Labels of each series, and its packed Summary."""


class _SavedWindows(Struct, array_like=True):
    """Saved form of all windows."""

    terms: str
    """Text of the objectives and the reader by which the exchanges were judged."""
    begin_ns: int
    """Monotonic time to which the start times of the slices are relative."""
    slices: list[_SavedSlice]
    terms_ns: int
    """Monotonic time since which `terms` apply."""
    judged_ns: dict[str, int]
    """By text of objectives: monotonic time since which they apply."""
    gaps: list[tuple[int, int]]
    """Begin and end of each time whose exchanges are unknown."""


_GAPS_MAX: Final = 100
"""Maximum number of gaps that are kept; the oldest ones are forgotten."""
_encode: Final = msgpack.Encoder().encode
_decode: Final = msgpack.Decoder(_SavedWindows).decode


def _pack_slice(slice_: tuple[int, int, _Tile]) -> _SavedSlice:
    start_ns, level, tile = slice_
    # Pack a copy of each Summary: packing changes the object, which other threads can be reading.
    parts = [
        (key, one if isinstance(one, bytes) else _merged_parts([one])) for key, one in tile.parts.items()
    ]
    return _SavedSlice(start_ns, level, tile.lag_ns, dict(tile.sums), tile.benefit, parts)


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a window in which `n` exchanges ended, `uncertain` of them with too large an uncertainty."""

    seconds: float
    """Length of the window."""
    n: int
    uncertain: int
    lag_ns: int
    """Largest delay of a relay's event loop during the window."""
    goodput_rps: float | None
    """Goodput in requests/s; None if no exchange was judged."""
    smooth_goodput_tps: float | None
    """Smooth goodput in tokens/s; None if no stream ended."""


class Windows:
    """All windows. One thread writes; the data that a reader gets never change again."""

    def __init__(
        self, clock: Clock, objectives: Mapping[str, Objectives] | None = None, *, terms: str = ""
    ) -> None:
        """`terms`: text of all options by which exchanges are judged: only equal terms can be added up."""
        self._clock = clock
        self._objectives = objectives or {}
        self._objective_terms = terms
        """Text of all objectives; counts that used other objectives are not continued after a restart."""
        self._wall_anchor = WallAnchor.sample(clock)
        self._slices: Slices[_Tile] = Slices(LEVELS, clock.mono_ns(), _Tile, _merge_tiles, past=True)
        self._terms_ns = self._slices.begin_ns
        """Monotonic time since which the sums of `_JUDGED_SUMS` are counted. New `terms` reset them."""
        self._judged_ns = {objectives.text: self._terms_ns for objectives in self._objectives.values()}
        """By text of the objectives: monotonic time since which goodput is counted."""
        self._own_begin_ns = self._slices.begin_ns
        self._gaps: list[tuple[int, int]] = []
        """Begin and end of each time whose exchanges are unknown, because a meter was killed."""

    def __len__(self) -> int:
        return len(self._slices)

    def on_end(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        tile = self._slices.open_data(self._clock.mono_ns())
        summary = tile.parts.get(key)
        if summary is None:
            summary = tile.parts[key] = Summary(self._objectives.get(key.slo))
        assert isinstance(summary, Summary)
        summary.add(x, m)
        sums = tile.sums
        sums["n"] += 1
        sums["uncertain"] += key.uncertain
        if m.smooth_benefit is not None and x.stream:
            tile.benefit += m.smooth_benefit
            sums["benefit_n"] += 1
        if met is not None:
            sums["counted"] += 1
            sums["met"] += met
        self._tidy(TIDY_STEPS_PER_EXCHANGE)

    def count_opened(self, n: int = 1) -> None:
        """Count `n` exchanges that began; -1 subtracts an exchange that turned out to be no model traffic."""
        self._slices.open_data(self._clock.mono_ns()).sums["opened"] += n

    def count_skipped(self, n: int) -> None:
        """Count requests that a rule excludes from measurement."""
        self._slices.open_data(self._clock.mono_ns()).sums["skipped"] += n

    def record_lag(self, lag_ns: int) -> None:
        """Note the event-loop lag that a relay reports."""
        tile = self._slices.open_data(self._clock.mono_ns())
        tile.lag_ns = max(tile.lag_ns, lag_ns)
        self._tidy(TIDY_STEPS_PER_STATUS)

    def tidy(self) -> None:
        """Do all merging that is possible now."""
        self._slices.open_data(self._clock.mono_ns())
        while self._slices.tidy():
            pass

    def rates(self) -> dict[str, Rates]:
        """Return the rates of each window, by its name."""
        now_ns = self._clock.mono_ns()
        rates = {}
        for level, name in enumerate(WINDOWS):
            total = _Tile()
            for tile in self._slices.window(level, now_ns):
                total.add_sums(tile)
            start_ns = self._slices.window_start_ns(level, now_ns)
            judged_s = self._measured_s(max(start_ns, self._terms_ns), now_ns)
            n = total.sums
            rates[name] = Rates(
                self._measured_s(start_ns, now_ns),
                n["n"],
                n["uncertain"],
                total.lag_ns,
                n["met"] / judged_s if n["counted"] and judged_s else None,
                total.benefit / judged_s if n["benefit_n"] and judged_s else None,
            )
        return rates

    def freeze(self, window: str) -> "FrozenWindow":
        """Return the present content of a window. `window`: a name of WINDOWS, or `all` (since the start)."""
        now_ns = self._clock.mono_ns()
        if self._slices.open_data(now_ns).sums["n"]:
            self._slices.seal(now_ns)
        if window == WHOLE_TIME:
            tiles, start_ns = self._slices.all_data(now_ns), self._slices.begin_ns
        else:
            level = list(WINDOWS).index(window)
            tiles = self._slices.window(level, now_ns)
            start_ns = self._slices.window_start_ns(level, now_ns)
        # Copy the sums of the open slice, because they still grow. It has no parts: after the end of an
        # exchange, `seal` began a new slice.
        open_ = _Tile()
        open_.add_sums(tiles[-1])
        return FrozenWindow(
            name=window,
            start=self._date_text(start_ns),
            end=self._date_text(now_ns),
            seconds=self._measured_s(start_ns, now_ns),
            tiles=[*tiles[:-1], open_],
            judged_seconds={
                text: self._measured_s(since_ns, now_ns)
                for text, since_ns in self._judged_ns.items()
                if since_ns > start_ns
            },
        )

    def export(self) -> Callable[[], bytes]:
        """Return a thread-safe function that packs the windows, so that another meter can continue them."""
        terms, begin_ns = self._objective_terms, self._slices.begin_ns
        since = self._terms_ns, dict(self._judged_ns)
        gaps = self._gaps
        slices = self._slices.export(self._clock.mono_ns())
        return lambda: _encode(_SavedWindows(terms, begin_ns, list(map(_pack_slice, slices)), *since, gaps))

    def clear(self) -> None:
        self._slices.clear()

    def absorb(self, packed: bytes, shift_ns: int, labels: Labels) -> list[str]:
        """Add the packed windows of another meter. Return a text for each part that could not be added.

        `shift_ns`: our monotonic time minus the other meter's. Raises msgspec.MsgspecError.
        """
        saved = _decode(packed)
        same_terms = saved.terms == self._objective_terms
        known = {REQUESTED, *self._judged_ns}
        if same_terms:
            self._terms_ns = min(self._terms_ns, saved.terms_ns + shift_ns)
        for text in self._judged_ns.keys() & saved.judged_ns:
            self._judged_ns[text] = min(self._judged_ns[text], saved.judged_ns[text] + shift_ns)

        def tile_of(slice_: _SavedSlice) -> _Tile:
            tile = _Tile(slice_.lag_ns, Counter(slice_.sums), slice_.benefit)
            if not same_terms:
                tile.benefit = 0.0
                for name in _JUDGED_SUMS:
                    del tile.sums[name]
            for key, part in slice_.parts:
                tenant, model, arm = labels.fold(labels.tenant(key.tenant), key.model, key.arm)
                key = key._replace(tenant=tenant, model=model, arm=arm)
                part = part if same_terms else with_objectives(part, known)
                tile.parts[key] = _merged_parts([part, tile.parts[key]]) if key in tile.parts else part
            return tile

        gaps = [(begin_ns + shift_ns, end_ns + shift_ns) for begin_ns, end_ns in saved.gaps]
        self._gaps = _without_overlaps([*self._gaps, *gaps])
        self._slices.open_data(self._clock.mono_ns())
        slices = [(one.start_ns + shift_ns, one.level, tile_of(one)) for one in saved.slices]
        self._slices.absorb(saved.begin_ns + shift_ns, slices)
        changed = "goodput of changed objectives, and goodput rates ([slo] or the reader of [meter] changed)"
        return [] if same_terms else [changed]

    def on_crash(self, saved_ns: int) -> None:
        """Leave out of the rates the time between the last save of a killed meter and the begin of this one:
        exchanges went on, and nothing is known of them."""
        self._gaps = _without_overlaps([*self._gaps, (saved_ns, self._own_begin_ns)])

    def _tidy(self, pieces: int) -> None:
        """Merge old slices, at most `pieces` of them at once."""
        for _ in range(pieces):
            if not self._slices.tidy():
                break

    def _measured_s(self, start_ns: int, end_ns: int) -> float:
        """Return the seconds between two times, without the gaps."""
        unknown_ns = sum(max(0, min(end, end_ns) - max(begin, start_ns)) for begin, end in self._gaps)
        return (end_ns - start_ns - unknown_ns) / NS_PER_S

    def _date_text(self, mono_ns: int) -> str:
        seconds = self._wall_anchor.to_wall_ns(mono_ns) / NS_PER_S
        return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _without_overlaps(gaps: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the gaps in order, without their common parts and without empty ones."""
    found: list[tuple[int, int]] = []
    for begin_ns, end_ns in sorted(gaps):
        begin_ns = max(begin_ns, found[-1][1]) if found else begin_ns
        if begin_ns < end_ns:
            found.append((begin_ns, end_ns))
    return found[-_GAPS_MAX:]


@dataclass(frozen=True, slots=True)
class FrozenWindow:
    """Slices of a window at one moment. They never change."""

    name: str
    start: str
    end: str
    seconds: float
    """Length of the window, without times whose exchanges are unknown."""
    tiles: Sequence[_Tile]
    """Data of the slices, the oldest first."""
    judged_seconds: Mapping[str, float]
    """By text of the objectives: time that goodput covers, where it is shorter than `seconds`."""

    def to_dict(
        self, by: Collection[str] = BY, *, certain: bool = False, price: Price | None = None
    ) -> dict[str, object]:
        """Return the merged Summary as public JSON.

        Args:
            by: labels of BY. For each value of these labels, the result has a summary of its exchanges.
            certain: whether to leave out exchanges flagged `uncertain`.
            price: prices. Only the total has costs of GPUs; the summaries by label have costs of tokens.
        """
        sums = _Tile()
        for tile in self.tiles:
            sums.add_sums(tile)
        window: dict[str, object] = {
            "name": self.name,
            "seconds": self.seconds,
            "start": self.start,
            "end": self.end,
            "lag_max": sums.lag_ns / NS_PER_S,
        }
        part_price = None if price is None else _token_price(price)

        def describe(summary: Summary) -> dict[str, object]:
            return summary.to_dict(window, self.seconds, price=part_price, judged_seconds=self.judged_seconds)

        total = Summary()
        total.opened = sums.sums["opened"]
        groups = {label: defaultdict[str, Summary](Summary) for label in _LABEL_FIELDS if label in by}
        tenants: dict[str, object] = {}
        # Unpack the Summaries of one tenant after the other: all of them at once would take a gigabyte.
        for tenant, parts in groupby(self.series(certain=certain), lambda one: one[0].tenant):
            tenant_total = Summary()
            for key, summary in parts:
                tenant_total.merge(summary)
                for label, group in groups.items():
                    if name := getattr(key, _LABEL_FIELDS[label]):
                        group[name].merge(summary)
            total.merge(tenant_total)
            if "tenant" in by and tenant:
                tenants[tenant] = describe(tenant_total)
        labels: dict[str, dict[str, object]] = {"tenant": tenants} if "tenant" in by else {}
        for label, group in groups.items():
            labels[label] = {name: describe(summary) for name, summary in sorted(group.items())}
        out = total.to_dict(window, self.seconds, by=labels, price=price, judged_seconds=self.judged_seconds)
        out["not_inference"] = sums.sums["skipped"]
        out["uncertain"] = {"n": sums.sums["uncertain"], "included": not certain}
        return out

    def series(self, *, certain: bool) -> Iterator[tuple[SeriesKey, Summary]]:
        """Yield each series with its merged Summary, by key. `certain`: leave out uncertain exchanges."""
        by_key = _parts_by_key(self.tiles)
        for key in [key for key in by_key if key.uncertain]:
            parts = by_key.pop(key)
            if not certain:
                by_key.setdefault(key._replace(uncertain=False), []).extend(parts)
        for key, parts in sorted(by_key.items(), key=itemgetter(0)):
            summary = Summary()
            for part in parts:
                _add_part(summary, part)
            yield key, summary


def window_name(text: str) -> str | None:
    """Return the name of the window with this name or length (`all`, `60s`); None if there is none."""
    if text in WINDOWS or text == WHOLE_TIME:
        return text
    try:
        length_ns = parse_duration_ns(text)
    except ValueError:
        return None
    return next((name for name, window_ns in WINDOWS.items() if window_ns == length_ns), None)


def labels_of(key: SeriesKey) -> dict[str, object]:
    """Return the labels of a series as the JSON of a summary names them."""
    return {
        "tenant": key.tenant,
        "model": key.model,
        "arm": key.arm or None,
        "class": key.slo or None,
        "reading": key.reading,
        "service_tier": key.service_tier or None,
    }


def _token_price(price: Price) -> Price | None:
    """Return the price without the costs of GPUs, which cannot be divided; None if tokens cost nothing."""
    if not (price.per_million_input or price.per_million_output):
        return None
    return Price(0, 0.0, price.per_million_input, price.per_million_output, price.currency)


def _add_part(into: Summary, part: Summary | bytes) -> None:
    if isinstance(part, bytes):
        into.merge_bytes(part)
    else:
        into.merge(part)


def _merged_parts(parts: Sequence[Summary | bytes]) -> bytes:
    summary = Summary()
    for part in parts:
        _add_part(summary, part)
    return summary.to_bytes()


def _merge_tiles(tiles: Sequence[_Tile], level: int) -> Merging[_Tile]:
    """Merge tiles to one. On the first level the result stays unpacked, because it is merged again soon."""
    out = _Tile()
    for tile in tiles:
        out.add_sums(tile)
    if level == len(LEVELS):
        # On the last level, `tiles[0]` is the merged result so far. Copy its dict, because other threads can
        # be reading it.
        out.parts = dict(tiles[0].parts)
        tiles = tiles[1:]
    for key, parts in _parts_by_key(tiles).items():
        first = out.parts.get(key)
        if first is None and len(parts) == 1 and (level == 0 or isinstance(parts[0], bytes)):
            out.parts[key] = parts[0]
            continue
        summary = Summary()
        for part in parts if first is None else (first, *parts):
            _add_part(summary, part)
        out.parts[key] = summary.to_bytes() if level else summary
        yield
    return out


def _parts_by_key(tiles: Sequence[_Tile]) -> dict[SeriesKey, list[Summary | bytes]]:
    by_key: dict[SeriesKey, list[Summary | bytes]] = {}
    for tile in tiles:
        for key, part in tile.parts.items():
            by_key.setdefault(key, []).append(part)
    return by_key
