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
"""Slices that may wait to be merged; if there are more, creating the next one merges all of them."""

T = TypeVar("T")
Merging = Generator[None, None, T]
"""Iterator that merges slices: yields after each small piece of work, and returns the merged slice."""


@dataclass(frozen=True, slots=True)
class SliceLevel:
    """Length of a window, and its step: a divisor of the length and of every longer level's step."""

    window_ns: int
    step_ns: int


@dataclass(slots=True)
class _Slice(Generic[T]):
    start_ns: int
    level: int
    data: T


class Slices(Generic[T]):
    """Slices of the windows, oldest first.

    `levels`: ascending. `past`: keep the data older than the longest window. `make` returns an empty slice,
    `merge` merges slices to one of a level; the level after the last is the past.
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
        self._make = make
        self._merge = merge
        self._open: _Slice[T] = _Slice(0, 0, make())
        self._sealed: list[_Slice[T]] = []
        self._past: T | None = make() if past else None
        self._job: tuple[int, int, int, int, Merging[T]] | None = None
        self._idle_at_ns = -1
        """Start of the slice that was open when `tidy` last had nothing to merge. It has nothing to merge
        until the next slice begins."""

    def __len__(self) -> int:
        return len(self._sealed) + 1

    @property
    def begin_ns(self) -> int:
        """Monotonic time at which the data begin."""
        return self._begin_ns

    def export(self, now_ns: int) -> list[tuple[int, int, T]]:
        """Return all slices as (start as monotonic time, level, data); the data never change again."""
        self.seal(now_ns)
        past = [] if self._past is None else [(self._begin_ns, len(self._levels), self._past)]
        return past + [(self._begin_ns + s.start_ns, s.level, s.data) for s in self._sealed]

    def clear(self) -> None:
        """Forget all slices except the current one."""
        self._sealed, self._job = [], None
        self._past = None if self._past is None else self._make()

    def absorb(self, begin_ns: int, slices: Iterable[tuple[int, int, T]]) -> None:
        """Add the exported slices of another meter, whose data begin at `begin_ns`, to those of this one.

        If they begin earlier, their steps become the steps of this one.
        """
        own = [(self._begin_ns + s.start_ns, s.level, s.data) for s in self._sealed]
        now_ns = self._begin_ns + self._open.start_ns
        self._begin_ns = min(begin_ns, self._begin_ns)
        self._open.start_ns = self._round_to_step(now_ns, 0)
        self._sealed = sorted(
            (
                _Slice(min(self._round_to_step(start_ns, level), self._open.start_ns), level, data)
                for start_ns, level, data in (*own, *slices)
            ),
            key=attrgetter("start_ns"),
        )
        self._job, self._idle_at_ns = None, -1

    def _round_to_step(self, start_ns: int, level: int) -> int:
        """Return the start of the nearest step of a level; all data of the past begin together."""
        if level >= len(self._levels):
            return 0
        step_ns = self._levels[level].step_ns
        return max(0, (start_ns - self._begin_ns + step_ns // 2) // step_ns * step_ns)

    def current(self, now_ns: int) -> T:
        """Return the data of the open slice, to which new exchanges are added."""
        since_ns = now_ns - self._begin_ns
        open_ = self._open
        step_ns = self._levels[0].step_ns
        if since_ns - open_.start_ns >= step_ns:
            self._sealed.append(open_)
            self._open = open_ = _Slice(since_ns // step_ns * step_ns, 0, self._make())
            while len(self._sealed) > SLICES_MAX and self.tidy():
                pass
        return open_.data

    def seal(self, now_ns: int) -> None:
        """Make the current slice final, for a reader in another thread, and begin a new one."""
        self.current(now_ns)
        self._sealed.append(self._open)
        self._open = _Slice(self._open.start_ns, 0, self._make())
        self._idle_at_ns = -1

    def window(self, level: int, now_ns: int) -> list[T]:
        """Return the slices of a window, oldest first; all but the last are final."""
        self.current(now_ns)
        first_ns = self._first_ns(level, now_ns - self._begin_ns)
        return [s.data for s in self._sealed if s.start_ns >= first_ns] + [self._open.data]

    def window_start_ns(self, level: int, now_ns: int) -> int:
        """Return the time since which a window is complete."""
        return self._begin_ns + max(0, self._first_ns(level, now_ns - self._begin_ns))

    def everything(self, now_ns: int) -> list[T]:
        """Return all data since the start, oldest first."""
        self.current(now_ns)
        past = [] if self._past is None else [self._past]
        return past + [s.data for s in self._sealed] + [self._open.data]

    def tidy(self) -> bool:
        """Do one small piece of merging. Return False if there was nothing to merge."""
        if self._job is None:
            if self._idle_at_ns == self._open.start_ns:
                return False
            self._job = self._next_job()
            if self._job is None:
                self._idle_at_ns = self._open.start_ns
                return False
        begin, end, start_ns, level, work = self._job
        try:
            next(work)
        except StopIteration as done:
            self._job = None
            if level == len(self._levels):
                self._past = done.value
                del self._sealed[begin:end]
            else:
                self._sealed[begin:end] = [_Slice(start_ns, level, done.value)]
        return True

    def _first_ns(self, level: int, since_ns: int) -> int:
        step_ns = self._levels[level].step_ns
        return since_ns // step_ns * step_ns - self._levels[level].window_ns + step_ns

    def _level_of(self, start_ns: int) -> int:
        """Return the coarsest level to which a slice with this start may be merged: the merged slice must lie
        before all shorter windows."""
        since_ns = self._open.start_ns
        if start_ns < self._first_ns(len(self._levels) - 1, since_ns):
            return len(self._levels)
        best = 0
        for level in range(1, len(self._levels)):
            step_ns = self._levels[level].step_ns
            if start_ns // step_ns * step_ns + step_ns > self._first_ns(level - 1, since_ns):
                break
            best = level
        return best

    def _next_job(self) -> tuple[int, int, int, int, Merging[T]] | None:
        past = len(self._levels)
        for (level, start_ns), group in groupby(list(enumerate(self._sealed)), self._place):
            slices = list(group)
            begin, end = slices[0][0], slices[-1][0] + 1
            data = [one.data for _, one in slices]
            if level == past and self._past is None:
                del self._sealed[begin:end]
                return self._next_job()
            if level == past and self._past is not None:
                data.insert(0, self._past)
            elif start_ns == self._open.start_ns or (len(slices) == 1 and slices[0][1].level == level):
                continue  # the slice is still open, or already merged
            return begin, end, start_ns, level, self._merge(data, level)
        return None

    def _place(self, sealed: tuple[int, _Slice[T]]) -> tuple[int, int]:
        """Return level and start of the slice into which a sealed one is merged."""
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
TIDY_EACH: Final = 4
"""Steps of merging after each exchange. Always enough: an exchange makes at most one Summary, which is merged
at most once on each level."""
TIDY_EACH_STATUS: Final = 16
"""Steps of merging at each status of a relay, twice a second, which finish the merging when exchanges stop.
"""
EVERYTHING: Final = "all"


_LABEL_FIELDS: Final = {
    "model": "model", "arm": "arm", "class": "slo", "reading": "reading", "service_tier": "service_tier",
}  # fmt: skip
"""Labels with few values (all except the tenant), with their fields of SeriesKey."""
BY: Final = ("tenant", *_LABEL_FIELDS)


@dataclass(slots=True)
class _Tile:
    """Counts and Summaries of one slice."""

    lag_ns: int = 0
    """Largest lag of any relay. This field and the sums below are not divided by series."""
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
    parts: dict[SeriesKey, Summary | bytes] = field(default_factory=dict)

    def add_sums(self, other: "_Tile") -> None:
        self.lag_ns = max(self.lag_ns, other.lag_ns)
        self.sums.update(other.sums)
        self.benefit += other.benefit


_JUDGED: Final = ("counted", "met", "benefit_n")
"""Sums of a tile that depend on objectives and on the reader."""


class _SavedSlice(Struct, array_like=True):
    """A packed slice; `start_ns` is monotonic."""

    start_ns: int
    level: int
    lag_ns: int
    sums: dict[str, int]
    benefit: float
    parts: list[tuple[SeriesKey, bytes]]


class _SavedWindows(Struct, array_like=True):
    terms: str
    """Objectives and reader by which the exchanges were judged."""
    begin_ns: int
    slices: list[_SavedSlice]
    terms_ns: int
    """Monotonic time since which `terms` apply."""
    judged_ns: dict[str, int]
    """Monotonic time since which each set of objectives applies."""


_encode: Final = msgpack.Encoder().encode
_decode: Final = msgpack.Decoder(_SavedWindows).decode


def _pack_slice(slice_: tuple[int, int, _Tile]) -> _SavedSlice:
    start_ns, level, tile = slice_
    # Pack a copy of a Summary, because packing changes the object while readers may use it.
    parts = [
        (key, one if isinstance(one, bytes) else _merged_parts([one])) for key, one in tile.parts.items()
    ]
    return _SavedSlice(start_ns, level, tile.lag_ns, dict(tile.sums), tile.benefit, parts)


@dataclass(frozen=True, slots=True)
class Rates:
    seconds: float
    n: int
    uncertain: int
    lag_ns: int
    goodput_rps: float | None
    """Goodput in requests/s; None if no exchange was judged."""
    smooth_goodput_tps: float | None
    """Smooth goodput in tokens/s; None if no stream ended."""


class Windows:
    """All windows. One thread writes; data that readers get never changes again."""

    def __init__(
        self, clock: Clock, objectives: Mapping[str, Objectives] | None = None, *, terms: str = ""
    ) -> None:
        """`terms`: text of all options by which exchanges are judged, to compare with those of another
        meter."""
        self._clock = clock
        self._objectives = objectives or {}
        self._terms = terms
        self._anchor = WallAnchor.sample(clock)
        self._slices: Slices[_Tile] = Slices(LEVELS, clock.mono_ns(), _Tile, _merge_tiles, past=True)
        self._terms_ns = self._slices.begin_ns
        """Time since which the sums of `_JUDGED` are counted: they begin anew when `terms` change."""
        self._judged_ns = {objectives.text: self._terms_ns for objectives in self._objectives.values()}
        """Time since which goodput is counted, by set of objectives."""

    def __len__(self) -> int:
        return len(self._slices)

    def on_end(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        tile = self._slices.current(self._clock.mono_ns())
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
        self._tidy(TIDY_EACH)

    def count_opened(self, n: int = 1) -> None:
        """Count exchanges that began; -1 subtracts one that is not model traffic."""
        self._slices.current(self._clock.mono_ns()).sums["opened"] += n

    def count_skipped(self, n: int) -> None:
        self._slices.current(self._clock.mono_ns()).sums["skipped"] += n

    def record_lag(self, lag_ns: int) -> None:
        tile = self._slices.current(self._clock.mono_ns())
        tile.lag_ns = max(tile.lag_ns, lag_ns)
        self._tidy(TIDY_EACH_STATUS)

    def tidy(self) -> None:
        """Do all merging that is possible now."""
        self._slices.current(self._clock.mono_ns())
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
            judged_s = (now_ns - max(start_ns, self._terms_ns)) / NS_PER_S
            n = total.sums
            rates[name] = Rates(
                (now_ns - start_ns) / NS_PER_S,
                n["n"],
                n["uncertain"],
                total.lag_ns,
                n["met"] / judged_s if n["counted"] and judged_s else None,
                total.benefit / judged_s if n["benefit_n"] and judged_s else None,
            )
        return rates

    def freeze(self, window: str) -> "FrozenWindow":
        """Return the content of a window: one of WINDOWS, or `all` since the start."""
        now_ns = self._clock.mono_ns()
        if self._slices.current(now_ns).sums["n"]:
            self._slices.seal(now_ns)
        if window == EVERYTHING:
            tiles, start_ns = self._slices.everything(now_ns), self._slices.begin_ns
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
            start=self._date(start_ns),
            end=self._date(now_ns),
            seconds=(now_ns - start_ns) / NS_PER_S,
            tiles=[*tiles[:-1], open_],
            judged_seconds={
                text: (now_ns - since_ns) / NS_PER_S
                for text, since_ns in self._judged_ns.items()
                if since_ns > start_ns
            },
        )

    def export(self) -> Callable[[], bytes]:
        """Return a function that packs the windows for another meter. Any thread may call the function."""
        terms, begin_ns = self._terms, self._slices.begin_ns
        since = self._terms_ns, dict(self._judged_ns)
        slices = self._slices.export(self._clock.mono_ns())
        return lambda: _encode(_SavedWindows(terms, begin_ns, list(map(_pack_slice, slices)), *since))

    def clear(self) -> None:
        self._slices.clear()

    def absorb(self, packed: bytes, shift_ns: int, labels: Labels) -> list[str]:
        """Add the packed windows of another meter. Return texts on the parts that could not be added.

        `shift_ns`: our monotonic time minus the other's. Raises msgspec.MsgspecError.
        """
        saved = _decode(packed)
        same_terms = saved.terms == self._terms
        known = {REQUESTED, *self._judged_ns}
        if same_terms:
            self._terms_ns = min(self._terms_ns, saved.terms_ns + shift_ns)
        for text in self._judged_ns.keys() & saved.judged_ns:
            self._judged_ns[text] = min(self._judged_ns[text], saved.judged_ns[text] + shift_ns)

        def tile_of(slice_: _SavedSlice) -> _Tile:
            tile = _Tile(slice_.lag_ns, Counter(slice_.sums), slice_.benefit)
            if not same_terms:
                tile.benefit = 0.0
                for name in _JUDGED:
                    del tile.sums[name]
            for key, part in slice_.parts:
                tenant, model, arm = labels.fold(labels.tenant(key.tenant), key.model, key.arm)
                key = key._replace(tenant=tenant, model=model, arm=arm)
                part = part if same_terms else with_objectives(part, known)
                tile.parts[key] = _merged_parts([part, tile.parts[key]]) if key in tile.parts else part
            return tile

        self._slices.current(self._clock.mono_ns())
        slices = [(one.start_ns + shift_ns, one.level, tile_of(one)) for one in saved.slices]
        self._slices.absorb(saved.begin_ns + shift_ns, slices)
        changed = "goodput of changed objectives, and goodput rates ([slo] or the reader of [meter] changed)"
        return [] if same_terms else [changed]

    def _tidy(self, pieces: int) -> None:
        for _ in range(pieces):
            if not self._slices.tidy():
                break

    def _date(self, mono_ns: int) -> str:
        seconds = self._anchor.to_wall_ns(mono_ns) / NS_PER_S
        return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class FrozenWindow:
    """Slices of a window at one moment, unchangeable."""

    name: str
    start: str
    end: str
    seconds: float
    tiles: Sequence[_Tile]
    judged_seconds: Mapping[str, float]
    """Time that goodput covers, by set of objectives, where it is less than `seconds`."""

    def to_dict(
        self, by: Collection[str] = BY, *, certain: bool = False, price: Price | None = None
    ) -> dict[str, object]:
        """Return the merged Summary as public JSON.

        Args:
            by: some of BY: adds the same summary for each tenant, model, ...
            certain: without exchanges flagged `uncertain`.
            price: costs of GPUs apply to the whole only; parts have the costs of their tokens.
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
        # Unpack one tenant after the other: all of them at once would take a gigabyte.
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
        """Yield each series with its merged Summary, in order; `certain`: without uncertain exchanges."""
        by_key = _by_key(self.tiles)
        for key in [key for key in by_key if key.uncertain]:
            parts = by_key.pop(key)
            if not certain:
                by_key.setdefault(key._replace(uncertain=False), []).extend(parts)
        for key, parts in sorted(by_key.items(), key=itemgetter(0)):
            summary = Summary()
            for part in parts:
                _add_tile(summary, part)
            yield key, summary


def window_name(text: str) -> str | None:
    """Return the name of a window of this length or name, such as `60s` or `all`; None if there is none."""
    if text in WINDOWS or text == EVERYTHING:
        return text
    try:
        length_ns = parse_duration_ns(text)
    except ValueError:
        return None
    return next((name for name, window_ns in WINDOWS.items() if window_ns == length_ns), None)


def names_of(key: SeriesKey) -> dict[str, object]:
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


def _add_tile(into: Summary, part: Summary | bytes) -> None:
    if isinstance(part, bytes):
        into.merge_bytes(part)
    else:
        into.merge(part)


def _merged_parts(parts: Sequence[Summary | bytes]) -> bytes:
    summary = Summary()
    for part in parts:
        _add_tile(summary, part)
    return summary.to_bytes()


def _merge_tiles(tiles: Sequence[_Tile], level: int) -> Merging[_Tile]:
    """Merge tiles to one; on the finest level the result stays unpacked, as it is merged again soon."""
    out = _Tile()
    for tile in tiles:
        out.add_sums(tile)
    if level == len(LEVELS):
        # Level `len(LEVELS)` is the past, whose first tile is the result so far. Copy its dict, since readers
        # may have it.
        out.parts = dict(tiles[0].parts)
        tiles = tiles[1:]
    for key, parts in _by_key(tiles).items():
        first = out.parts.get(key)
        if first is None and len(parts) == 1 and (level == 0 or isinstance(parts[0], bytes)):
            out.parts[key] = parts[0]
            continue
        summary = Summary()
        for part in parts if first is None else (first, *parts):
            _add_tile(summary, part)
        out.parts[key] = summary.to_bytes() if level else summary
        yield
    return out


def _by_key(tiles: Sequence[_Tile]) -> dict[SeriesKey, list[Summary | bytes]]:
    by_key: dict[SeriesKey, list[Summary | bytes]] = {}
    for tile in tiles:
        for key, part in tile.parts.items():
            by_key.setdefault(key, []).append(part)
    return by_key
