"""Turn the JSON of simulated runs (`llmtap sim run`) into a table, notes on it, and the order of its curves.

A run is the public JSON of one result. `sweep_table` and `sweep_lines` are the output on a terminal;
`read_sweep` finds the axis and the lines along it, which `sweep_page.py` draws.

Of all settings, those that differ between runs are dimensions. The axis is the numeric one with the most
values. What it and the scheduler do not decide tells the lines apart; what they do decide (a fixed time makes
more requests at a higher rate) runs along the axis.

An option that a run's scheduler does not read is None among its `readings` and `serving`. Along such an axis
the run is the same everywhere: a level line.

Long because the table, its best runs and the lines below it share the columns and the dimensions.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from math import ceil, sqrt
from operator import itemgetter
from statistics import mean, median, stdev
from typing import Any, Final

from llmtap.metrics.statistics import SHARES, marks, samples_needed, t_quantile
from llmtap.report.document import Table
from llmtap.report.values import (
    MARK,
    TIMES,
    at,
    figure_text,
    is_number,
    milliseconds,
    number,
    option_text,
    ordered,
    setting_text,
    setting_value,
    values_text,
)  # fmt: skip

Result = Mapping[str, Any]

_SCHEDULER: Final = "scheduler"
_LOAD: Final = "load"
_RANKED: Final = (_LOAD, "servers", "bins", "requests")
"""Numeric dimensions in the order in which they become the axis, where they have as many values."""
_OPTIONS: Final = ("readings", "serving", "model")
_SAME_RATE: Final = 0.01
_NAMED: Final = "output_delay"
"""An option that is set by a scheduler's name: it need not be said beside that."""


@dataclass(frozen=True, slots=True)
class Dimension:
    name: str
    texts: dict[Hashable, str]
    """Each value with how it reads in a line's name, such as `8 servers`; ascending, if they are numbers."""

    @property
    def numeric(self) -> bool:
        return all(is_number(value) for value in self.texts)

    @property
    def title(self) -> str:
        """For an axis or the head of a column."""
        if self.name == _LOAD:
            return "offered load, requests/s"
        return f"{self.name}, s" if self.name in TIMES else self.name

    def at(self, result: Result) -> Hashable:
        return settings_of(result).get(self.name)

    def text_at(self, result: Result) -> str | None:
        value = self.at(result)
        return None if value is None else self.texts[value]

    def place(self, result: Result) -> Any:
        """Where on the axis the run lies: for a load, the rate that was offered."""
        if self.name == _LOAD:
            return at(result, "load", "offered_rps")
        return self.at(result)

    def unread(self, result: Result) -> bool:
        """Whether it is an option that the run's scheduler does not read."""
        groups = [result.get(group) or {} for group in _OPTIONS]
        known = self.name in result or any(self.name in group for group in groups)
        return self.name != _LOAD and known and self.at(result) is None


@dataclass(frozen=True, slots=True)
class Line:
    """Runs that differ by their place on the axis alone, in its order."""

    label: str
    of: dict[str, str]
    points: list[tuple[Any, Result]]
    level: bool = False
    """The axis is nothing to them: one run, at each of its places."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Runs, ordered for drawing."""

    axis: Dimension | None
    """None where no number varies: the runs stand side by side, by scheduler."""
    by: list[Dimension]
    """What tells lines apart, beside the axis."""
    along: list[Dimension]
    """What the axis (and the scheduler) decides."""
    lines: list[Line]


def read_sweep(results: Sequence[Result]) -> Sweep:
    """The sweep that the runs are. Raises ValueError where there is none."""
    if not results:
        raise ValueError("no results: there is nothing to draw")
    varied = _varied(results)
    numbers = [
        d for d in varied.values() if d.numeric and d.name != "seed" and not _is_scheduler_s(d, results)
    ]
    axis = max(numbers, key=lambda d: len(d.texts), default=None)
    along = [] if axis is None else [d for d in varied.values() if _is_decided(d, axis, results)]
    by = [d for d in varied.values() if d is not axis and d not in along]
    by = [d for d in by if d.name != _NAMED or not _is_scheduler_s(d, results)]
    return Sweep(axis, by, along, _lines(results, axis, by))


def settings_of(result: Result) -> dict[str, Hashable]:
    """All that was set about a run, by name."""
    told: dict[str, Hashable] = {_SCHEDULER: result.get(_SCHEDULER), "trace": result.get("trace")}
    told[_LOAD] = _load_key(result)
    told |= {"servers": result.get("servers"), "requests": result.get("n"), "seed": result.get("seed")}
    for group in _OPTIONS:
        for name, value in (result.get(group) or {}).items():
            key = f"model {name}" if group == "model" else name
            told[key] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    if "bins" in result:
        # Edges, where they are given, decide how many; a scheduler without bins has no such setting.
        told["bins"] = len(result["bins"]) if result["bins"] else None
    told["objectives"] = at(result, "goodput", "objectives")
    return told


def _varied(results: Sequence[Result]) -> dict[str, Dimension]:
    """What has two values or more. That a scheduler has no such setting is no value."""
    found: dict[str, dict[Hashable, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        for name, value in settings_of(result).items():
            if value is not None:
                found[name][value].append(result)
    ranked = (_SCHEDULER, "trace", *_RANKED)
    names = [name for name in ranked if name in found] + [name for name in found if name not in ranked]
    varied = {}
    for name in names:
        values = found[name]
        if len(values) > 1:
            varied[name] = Dimension(name, {v: _named(name, v, values[v]) for v in ordered(values)})
    return varied


def _load_key(result: Result) -> Hashable:
    """What was asked for, if that is known: at one scale, more rows of a trace are no other load."""
    offered = at(result, "load", "offered_rps")
    for name in ("asked_load", "scale"):
        if result.get(name) is not None:
            return float(result[name])
    return None if offered is None else float(f"{offered:.4g}")


def _is_scheduler_s(dimension: Dimension, results: Sequence[Result]) -> bool:
    """Whether the scheduler alone tells its value: a setting of its own, as it were."""
    return _tells(lambda result: result.get(_SCHEDULER), dimension, results)


def _is_decided(dimension: Dimension, axis: Dimension, results: Sequence[Result]) -> bool:
    """Whether axis and scheduler together tell its value, and the scheduler alone does not."""
    if dimension is axis or _is_scheduler_s(dimension, results):
        return False
    return _tells(lambda result: (result.get(_SCHEDULER), axis.at(result)), dimension, results)


def _tells(key: Callable[[Result], Hashable], dimension: Dimension, results: Sequence[Result]) -> bool:
    """Whether runs of one key have one value."""
    values: dict[Hashable, Hashable] = {}
    return all(values.setdefault(key(r), dimension.at(r)) == dimension.at(r) for r in results)


def _lines(results: Sequence[Result], axis: Dimension | None, by: list[Dimension]) -> list[Line]:
    def texts(result: Result) -> dict[str, str]:
        return {d.name: text for d in by if (text := d.text_at(result)) is not None}

    ranks = [list(d.texts) for d in by]

    def rank(result: Result) -> list[int]:
        values = (d.at(result) for d in by)
        return [-1 if v is None else order.index(v) for v, order in zip(values, ranks, strict=True)]

    lines = []
    for _, group in groupby(sorted(results, key=rank), key=rank):
        runs = list(group)
        of = texts(runs[0])
        label = ", ".join(of.values()) or str(runs[0].get(_SCHEDULER) or "all runs")
        level = axis is not None and all(axis.unread(run) for run in runs)
        points = [(x, run) for x in axis.texts for run in runs] if axis and level else _points(runs, axis)
        lines.append(Line(label, of, points, level))
    return lines


def _points(runs: list[Result], axis: Dimension | None) -> list[tuple[Any, Result]]:
    if axis is None:
        return [(str(run.get(_SCHEDULER) or "all runs"), run) for run in runs]
    placed: list[tuple[Any, Result]] = [(axis.place(run), run) for run in runs]
    return sorted((point for point in placed if point[0] is not None), key=itemgetter(0))


def _named(name: str, value: Hashable, runs: list[Result]) -> str:
    if name in (_SCHEDULER, "trace"):
        return str(value)
    if name == _LOAD:
        rates = [at(run, "load", "offered_rps") for run in runs]
        told = [rate for rate in rates if rate is not None]
        if told and max(told) - min(told) <= _SAME_RATE * max(told):
            return f"{number(told[0], 3)} req/s"
        return f"scale {setting_value(value)}"
    if name in ("servers", "bins", "requests"):
        return f"{setting_value(value)} {name.removesuffix('s') if value == 1 else name}"
    return setting_text(name, value)


_UNSERVED: Final = {"refused": ("too_large", "queue_full"), "given up": ("late", "late_midway")}
"""By the reason: before a server took them up, or later."""
_UNSERVED_SAID: Final = {
    "too_large": ("refused", "need more than the KV memory holds", ("kv_tokens",)),
    "queue_full": ("refused", "came when as many waited as may", ("queue_max",)),
    "late": ("given up", "had no token in time", ("ttft",)),
    "late_midway": ("given up", "had a token too late and were served no further", ("ttft", "tbt")),
}
_SAID_OTHERWISE: Final = frozenset({_SCHEDULER, "trace", "objectives"})
BEST: Final = "\N{BLACK STAR}"
_PERCENTILES: Final = ("p50", "p95", "p99")
"""Columns of the table."""
_OUTSIDE_MIN: Final = 10
"""Requests outside their bounds that a reliable share needs: as many as 1,000 samples have above p99."""
COMPLETED_MIN: Final = 0.9
"""Completed rate by offered rate below which a run may be overloaded. The IETF draft, 5.2.3.1, has this share
for completed requests."""
SEEDS_MIN: Final = 3
"""Repeats with other seeds from which a run can be the best."""


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    text: Callable[[Result], str]
    path: tuple[str, ...] = ()
    """Place of the figure; without one there is no best value."""
    better: int = 0
    """1: the largest is best, -1: the smallest."""
    name: str = ""


def sweep_table(results: Sequence[Result], *, sla: bool = False) -> Table:
    """Return a row for each run, with its best figures marked, then mean, min and max over seeds.

    `sla`: with requests outside their SLA.
    """
    columns = [_Column("scheduler", lambda told: str(told["scheduler"])), *_varying(results)]
    keys = len(columns)
    columns += _figure_columns(results, sla=sla)
    wins = _wins(results, columns)
    marked = {(row, i) for i, won in wins.items() for rows in won for row in rows}

    def cell(row: int, i: int) -> str:
        return BEST * ((row, i) in marked) + columns[i].text(results[row])

    rows = [[cell(row, i) for i in range(len(columns))] for row in range(len(results))]
    rows += _over_seeds(results, columns)
    return Table([column.title for column in columns], rows, keys=keys, nowrap=True)


def _over_seeds(results: Sequence[Result], columns: Sequence[_Column]) -> Iterator[list[str]]:
    """Yield mean, min and max of the runs that differ by their seed alone."""
    for group in _repeats(results):
        for rows in group.values():
            runs = [results[row] for row in rows.values()]
            if len(runs) < 2:
                continue
            for name, combine in (("mean", mean), ("min", min), ("max", max)):
                combined = _combined(runs, combine)
                yield [name if column.title == "seed" else column.text(combined) for column in columns]


def _combined(values: Sequence[Any], combine: Callable[[Sequence[float]], float]) -> Any:
    """Combine JSON values of one shape number by number; of others the first is kept."""
    if all(isinstance(value, Mapping) for value in values):
        names = [name for name in values[0] if all(name in value for value in values)]
        return {name: _combined([value[name] for value in values], combine) for name in names}
    return combine(values) if all(map(is_number, values)) else values[0]


def _figure_columns(results: Sequence[Result], *, sla: bool) -> Iterator[_Column]:
    for title, reasons in _UNSERVED.items():
        if any(_count(told, *reasons) for told in results):
            yield _Column(title, partial(_unserved_text, reasons))
    yield _rate("req/s", "throughput", 1, "throughput_rps")
    yield _rate("in+out tok/s", "tokens per second, prompts and answers", 1, "throughput_tps")
    yield from (_ms(f"E2E {name}", "latency", name) for name in _PERCENTILES)
    if sla:
        yield _share("late", "request_sla_violation", better=-1)
        yield _share("slow", "token_sla_violation", better=-1)
    if any(at(told, "metrics", "ttft") for told in results):
        yield _ms("TTFT p50", "metrics", "ttft", "p50")
        yield _ms("TTFT p99", "metrics", "ttft", "p99")
        option = values_text(at(told, "metrics", "itl", "option") for told in results)
        yield _ms(f"ITL ({option}) p99" if option else "ITL p99", "metrics", "itl", "p99")
        yield _ms("idle p99", "metrics", "user_idle", "p99")
        yield _rate("smooth tok/s", "smooth goodput", 1, "smooth_goodput", "tokens_per_second")
    yield _ms("queue p50", "queueing", "p50")
    yield _share("busy", "utilization", digits=0)
    yield _Column("batch", lambda told: number(at(told, "batch_mean"), 3))
    if any(told.get("goodput") for told in results):
        yield _rate("goodput req/s", "goodput", 1, "goodput", "requests_per_second")
    bounds = _each(name for told in results for name in at(told, "capacity", "by") or ())
    for by in bounds:
        path, name = ("capacity", "by", by), "capacity" if bounds == ["request"] else f"capacity ({by})"
        yield _Column(f"{name} req/s", partial(_capacity, path), path, 1, name)


def _repeats(results: Sequence[Result]) -> list[dict[Hashable, dict[Any, int]]]:
    """Return groups of runs to compare: what each group varies, and for each value its rows by seed.

    A group has one load, number of servers and requests, and one trace; if none of these groups has two
    values, all runs are one group.
    """
    groups: dict[Hashable, dict[Hashable, dict[Any, int]]] = defaultdict(lambda: defaultdict(dict))
    for row, told in enumerate(results):
        of = settings_of(told)
        seed, rest = of.pop("seed"), frozenset(of.items())
        groups[of[_LOAD], of["servers"], of["requests"], of["trace"]][rest][seed] = row
    if all(len(values) == 1 for values in groups.values()):
        return [{rest: rows for values in groups.values() for rest, rows in values.items()}]
    return list(groups.values())


def _wins(results: Sequence[Result], columns: Sequence[_Column]) -> dict[int, list[list[int]]]:
    """Return, by column, the rows of each run that is better than all it is compared with.

    Better means that the 95 % interval of the mean difference between seeds (Student's t, in pairs of one
    seed) does not contain 0, for SEEDS_MIN seeds or more.
    """
    wins: dict[int, list[list[int]]] = defaultdict(list)
    for group in _repeats(results):
        seeds = set.intersection(*(set(rows) for rows in group.values()))
        if len(group) < 2 or len(seeds) < SEEDS_MIN:
            continue
        for i, column in enumerate(columns):
            values = {
                rest: [at(results[rows[seed]], *column.path) for seed in sorted(seeds)]
                for rest, rows in group.items()
            }
            known = {rest: one for rest, one in values.items() if column.better and None not in one}
            if len(known) < 2:
                continue
            best = max(known, key=lambda rest: mean(known[rest]) * column.better)
            others = [one for rest, one in known.items() if rest != best]
            if all(_is_better(known[best], other, column.better) for other in others):
                wins[i].append([group[best][seed] for seed in seeds])
    return wins


def _is_better(a: Sequence[float], b: Sequence[float], sign: int) -> bool:
    differences = [(x - y) * sign for x, y in zip(a, b, strict=True)]
    n = len(differences)
    reach = t_quantile(0.05, n - 1) * stdev(differences) / sqrt(n)
    return mean(differences) - reach > 0


def best_said(results: Sequence[Result], *, sla: bool = False) -> str:
    """Return a sentence on which run was best by what, or on how to find out; empty for a single run."""
    groups = [group for group in _repeats(results) if len(group) > 1]
    if not groups:
        return ""
    columns = list(_figure_columns(results, sla=sla))
    labels = [_label_of(told, results) for told in results]
    by_label: dict[str, list[str]] = defaultdict(list)
    for i, won in _wins(results, columns).items():
        label, n = Counter(labels[rows[0]] for rows in won).most_common(1)[0]
        name = columns[i].name or columns[i].title
        by_label[label].append(name if n == len(groups) else f"{name} ({n} of {len(groups)})")
    ranked = sorted(by_label.items(), key=lambda one: -len(one[1]))
    if parts := [f"{label} by {_listed(names)}" for label, names in ranked]:
        said = "; ".join(parts).replace(" by ", " was best by ", 1)
        return f"{said}. {BEST} marks the best: the 95 % interval of the difference over seeds excludes 0."
    if all(len(set.intersection(*map(set, group.values()))) < SEEDS_MIN for group in groups):
        return (
            "No run is marked as the best: one workload cannot show that a difference is more than chance."
            " Repeat a synthetic workload with several seeds, for example --seed 1,2,3,4,5."
        )
    return "No run is best by any figure: the 95 % intervals of the differences over seeds contain 0."


def _label_of(result: Result, results: Sequence[Result]) -> str:
    """Return what names a run: its scheduler, or what differs if all have one scheduler."""
    varied = _varied(results)
    if _SCHEDULER in varied or not varied:
        return str(result[_SCHEDULER])
    return ", ".join(text for d in varied.values() if (text := d.text_at(result)) is not None)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def sweep_lines(results: Sequence[Result], *, sla: bool = False) -> Iterator[str]:
    """Which run was best, the meaning of the figures, and what is the same for all of them."""
    if best := best_said(results, sla=sla):
        yield best
    offered, counts = ({of(told) for told in results} for of in (_offered, lambda told: f"{told['n']:,}"))
    same = [f"{counts.pop()} requests"] if len(counts) == 1 else []
    same += [f"offered {offered.pop()}"] if len(offered) == 1 else []
    yield "; ".join(
        [*same, "times in ms; busy: share of the time that servers work; batch: mean requests in it"]
    )
    if sla:
        request_sla = _all(results, lambda told: f"{told['readings']['request_sla']:g}")
        token_sla = _all(results, lambda told: f"{told['readings']['token_sla'] * 1e3:g}")
        yield f"late: outside the request SLA of {request_sla} s; slow: the token SLA of {token_sla} ms"
    if edges := values_text(told["readings"].get("bin_edges") or None for told in results):
        yield f"bins: by the edges given, {edges}"
    yield from _not_served(results)
    for allowed in _each(at(told, "capacity", "allowed") for told in results):
        yield (
            f"capacity: the highest rate at which {1 - allowed:.4g} of the requests are within their bounds"
            " (request SLA, token SLA, or slo); 0: there is none; no limit: all may come at once. It falls"
            " with more requests, as queues grow"
        )
    if objectives := values_text(at(told, "goodput", "objectives") for told in results):
        yield f"goodput: requests that met {objectives}"
    for reader in _each(_reader(told.get("smooth_goodput") or {}) for told in results):
        yield f"smooth: goodput for {reader}; idle: what such a reader waited with nothing to read"
    yield from dict.fromkeys(unreliable_said(results))
    if growing := [_label_of(told, results) for told in results if queue_grows(told)]:
        named = ", ".join(dict.fromkeys(growing))
        yield (
            f"may be overloaded: {named}: fewer requests complete per second than are offered, and most of"
            " the latency is waiting; the queue and the latencies grow with --requests"
        )
    for label, told in followed_requests(results):
        one = told["followed"]
        size = f"request {one['row']} ({one['input']:,} + {one['output']:,} tokens)"
        yield f"{size}, {label}: {', '.join(f'{k} {v} ms' for k, v in followed_figures(one).items())}"
    for fit, model in _each((told.get("fit"), told["model"]) for told in results):
        yield _model(fit, model)


def queue_grows(told: Result) -> bool:
    """Return whether less than 90 % of the offered rate completes, and requests wait longer than they run.

    The second condition excludes short runs, whose last responses take a large part of the time.
    """
    offered, completed = at(told, "load", "offered_rps"), told.get("throughput_rps")
    waited, whole = at(told, "queueing", "p50"), at(told, "latency", "p50")
    if None in (offered, completed, waited, whole):
        return False
    return bool(completed < COMPLETED_MIN * offered and waited > whole / 2)


def unreliable_said(results: Sequence[Result]) -> Iterator[str]:
    """Say which figures are of too few requests: p99, goodput, and capacities (IETF draft, 5.1.4.3)."""
    least = samples_needed(SHARES["p99"])
    if few := [told["n"] for told in results if told["n"] < least]:
        names = [name for name in marks(min(few)) if name in _PERCENTILES]
        names += ["goodput"] if any(told.get("goodput") for told in results) else []
        needed = f"at least {least:,} are needed (--requests)"
        yield f"{MARK} not reliable: {', '.join(names)} of {values_text(few)} requests; {needed}"
    for told in results:
        allowed = at(told, "capacity", "allowed")
        if allowed is None or told["n"] * allowed >= _OUTSIDE_MIN:
            continue
        needed = f"{ceil(_OUTSIDE_MIN / allowed):,}" if allowed else "more"
        yield (
            f"not reliable: the capacity of {told['scheduler']}, by {told['n']:,} requests of which"
            f" {allowed:.4g} may be outside; at least {needed} are needed (--requests)"
        )


def followed_requests(results: Sequence[Result]) -> list[tuple[str, Result]]:
    """Return the runs in which a request was followed, with their labels."""
    return [(_label_of(told, results), told) for told in results if told.get("followed")]


def followed_figures(followed: Mapping[str, Any]) -> dict[str, str]:
    """Return the latencies of the followed request in ms: TTFT, E2E, median and longest gap."""
    times = followed["token_seconds"]
    gaps = [later - sooner for sooner, later in pairwise(times)] or [None]
    found = {"TTFT": times[0], "E2E": times[-1]} if times else {"TTFT": None, "E2E": None}
    found |= {"median gap": median(gaps), "longest gap": max(gaps)}
    return {name: milliseconds(value) for name, value in found.items()}


def _reader(smooth: Mapping[str, Any]) -> str | None:
    speed = smooth.get("speed_tokens_per_second")
    return None if speed is None else f"a reader of {number(speed)} tokens/s, alpha {number(smooth['alpha'])}"


def _offered(told: Result) -> str:
    rate = told["load"]["offered_rps"]
    return "all at once" if rate is None else f"{rate:.4g} requests/s on average"


def _option(name: str, told: Result) -> str:
    return option_text(name, settings_of(told).get(name))


def _unserved_text(reasons: Sequence[str], told: Result) -> str:
    return f"{_count(told, *reasons):,}"


def _count(told: Result, *reasons: str) -> int:
    return sum(at(told, "unserved", reason) or 0 for reason in reasons)


def _not_served(results: Sequence[Result]) -> Iterator[str]:
    """Why requests were refused and given up, with the option that they did not fit."""
    for reason, (what, why, options) in _UNSERVED_SAID.items():
        found = [told for told in results if _count(told, reason)]
        if found:
            counts = values_text(_count(told, reason) for told in found)
            limits = [f"{name} {_limits(found, name)}" for name in options]
            several = " in a run" if len(found) > 1 else ""
            yield f"{what}: {counts} requests{several} {why} ({', '.join(limits)})"
    if any(_count(told, *_UNSERVED["refused"]) for told in results):
        yield "refused requests count as late, and in no other figure: with few requests served, few are slow"


def _limits(results: Sequence[Result], name: str) -> str:
    return ", ".join(_each(option_text(name, told["serving"][name]) for told in results))


def _varying(results: Sequence[Result]) -> Iterator[_Column]:
    settings = [settings_of(told) for told in results]
    for name in dict.fromkeys(name for one in settings for name in one):
        if len({one.get(name) for one in settings} - {None}) < 2:
            continue
        if name == _LOAD:
            yield _rate("offered req/s", "", 0, "load", "offered_rps")
        elif name == "requests":
            yield _Column(name, lambda told: f"{told['n']:,}")
        elif name not in _SAID_OTHERWISE and not name.startswith("model "):
            yield _Column(name, partial(_option, name))


def _capacity(path: tuple[str, ...], told: Result) -> str:
    known = path[-1] in (at(told, *path[:-1]) or ())
    return "no limit" if known and at(told, *path) is None else number(at(told, *path))


def _model(fit: Mapping[str, Any] | None, model: Mapping[str, float]) -> str:
    """The formula by its name, its constants, and how they came about."""
    if "alpha" in model:
        formula = "T(b, L) = alpha + beta L (1 + gamma (b - 1)/b) of a batch"
        constants = [
            f"alpha {model['alpha'] * 1e3:.4g} ms", f"beta {model['beta'] * 1e3:.4g} ms/token",
            f"gamma {model['gamma']:.4g}",
        ]  # fmt: skip
    else:
        formula = "T(p, d, c) = beta (1 + gamma (d - 1)/d) + prefill p + context c of an iteration"
        constants = [
            f"beta {model['beta'] * 1e3:.4g} ms", f"gamma {model['gamma']:.4g}",
            f"prefill {model['prefill'] * 1e6:.4g} us/token",
            f"context {model['context'] * 1e9:.4g} ns/token",
        ]  # fmt: skip
    return f"model {formula}: {', '.join(constants)}; {_fitted(fit)}"


def _fitted(fit: Mapping[str, Any] | None) -> str:
    if fit is None:
        return "the GPU of the multi-bin batching paper"
    if "grid" in fit:
        return f"R^2 {fit['r2']:.5f} on {fit['points']} points, off by {fit['error_max']:.1%} at most"
    parts = ((name, fit[name]) for name in ("prefill", "decode"))
    return "; ".join(
        f"{name} by {part['source']}: R^2 {part['r2']:.5f} on {part['points']:,} points"
        for name, part in parts
    )


def _each(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value is not None and value not in found:
            found.append(value)
    return found


def _all(results: Sequence[Result], text: Callable[[Result], str]) -> str:
    return ", ".join(_each(map(text, results)))


def _ms(title: str, *path: str) -> _Column:
    def text(told: Result) -> str:
        # Latencies over requests have no marks of their own.
        return figure_text({"marks": marks(told["n"]), **(at(told, *path[:-1]) or {})}, path[-1])

    return _Column(title, text, path, -1)


def _share(title: str, *path: str, digits: int = 2, better: int = 0) -> _Column:
    def text(told: Result) -> str:
        return "-" if (value := at(told, *path)) is None else f"{value:.{digits}%}"

    return _Column(title, text, path, better)


def _rate(title: str, name: str, better: int, *path: str) -> _Column:
    def text(told: Result) -> str:
        return number(None if (value := at(told, *path)) is None else float(value))

    return _Column(title, text, path, better, name)
