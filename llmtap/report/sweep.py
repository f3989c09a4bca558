"""Turn the JSON of simulated runs (`llmtap sim run`) into a table, notes on it, and the order of its curves.

A run is the public JSON of one result. `sweep_table` and `sweep_lines` are the output on a terminal;
`read_sweep` finds the axis and the lines along it, which `sweep_page.py` draws.

Settings that differ between runs are dimensions, but for those that the scheduler alone decides.
The axis is the numeric dimension with the most values; the others tell the lines apart. An option that the
scheduler does not read is None among `readings` and `serving`. Along such an axis the run is the same
everywhere: a level line.

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

_RANKED: Final = ("scheduler", "trace", "load", "servers", "router", "bins", "requests")
"""Order of dimensions: the first numeric one becomes the axis, where others have as many values."""
_OPTIONS: Final = ("readings", "serving", "model")
_SAME_RATE: Final = 0.01


@dataclass(frozen=True, slots=True)
class Dimension:
    name: str
    texts: dict[Hashable, str]
    """Each value with how it reads in a line's name, such as `8 servers`; ascending, if they are numbers."""

    @property
    def title(self) -> str:
        """For an axis or the head of a column."""
        if self.name == "load":
            return "offered load, requests/s"
        return f"{self.name}, s" if self.name in TIMES else self.name

    def text_at(self, result: Result) -> str | None:
        value = settings_of(result).get(self.name)
        return None if value is None else self.texts[value]

    def place(self, result: Result) -> Any:
        """Where on the axis the run lies: for a load, the rate that was offered."""
        if self.name == "load":
            return at(result, "load", "offered_rps")
        return settings_of(result).get(self.name)


@dataclass(frozen=True, slots=True)
class Line:
    """Runs that differ by their place on the axis alone, in its order."""

    label: str
    of: dict[str, str]
    points: list[tuple[Any, Result]]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Runs, ordered for drawing."""

    axis: Dimension | None
    """None where no number varies: the runs stand side by side, by scheduler."""
    by: list[Dimension]
    """What tells lines apart, beside the axis."""
    lines: list[Line]


def read_sweep(results: Sequence[Result]) -> Sweep:
    """Return the sweep that the runs are. Raises ValueError where there is none."""
    if not results:
        raise ValueError("no results: there is nothing to draw")
    varied = _varied(results)
    numeric = [d for d in varied if d.name != "seed" and all(map(is_number, d.texts))]
    axis = max(numeric, key=lambda d: len(d.texts), default=None)
    by = [d for d in varied if d is not axis]

    def texts(result: Result) -> dict[str, str]:
        return {d.name: text for d in by if (text := d.text_at(result)) is not None}

    def rank(result: Result) -> list[int]:
        return [-1 if (text := d.text_at(result)) is None else [*d.texts.values()].index(text) for d in by]

    lines = []
    for _, group in groupby(sorted(results, key=rank), key=rank):
        runs = list(group)
        of = texts(runs[0])
        label = ", ".join(of.values()) or str(runs[0].get("scheduler") or "all runs")
        lines.append(Line(label, of, _points(runs, axis)))
    return Sweep(axis, by, lines)


def settings_of(result: Result) -> dict[str, Hashable]:
    """Return all that was set about a run, by name."""
    told: dict[str, Hashable] = {"scheduler": result.get("scheduler"), "trace": result.get("trace")}
    told["load"] = _load_key(result)
    told |= {"servers": result.get("servers"), "router": result.get("router")}
    told |= {"requests": result.get("n"), "seed": result.get("seed")}
    for group in _OPTIONS:
        for name, value in (result.get(group) or {}).items():
            key = f"model {name}" if group == "model" else name
            told[key] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    # Edges, where they are given, decide how many; a scheduler without bins has no such setting.
    told["bins"] = len(result.get("bins") or ()) or None
    told["objectives"] = at(result, "goodput", "objectives")
    return told


def _varied(results: Sequence[Result]) -> list[Dimension]:
    """Return the settings with two values or more that the scheduler alone does not decide."""
    found: dict[str, dict[Hashable, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        for name, value in settings_of(result).items():
            if value is not None:
                found[name][value].append(result)
    varied = []
    for name in sorted(found, key=lambda name: _RANKED.index(name) if name in _RANKED else len(_RANKED)):
        values = found[name]
        pairs = {(run.get("scheduler"), value) for value, runs in values.items() for run in runs}
        decided = name != "scheduler" and len(pairs) == len({scheduler for scheduler, _ in pairs})
        if len(values) > 1 and not decided:
            varied.append(Dimension(name, {v: _named(name, v, values[v]) for v in ordered(values)}))
    return varied


def _load_key(result: Result) -> Hashable:
    """What was asked for, if that is known: at one scale, more rows of a trace are no other load."""
    offered = at(result, "load", "offered_rps")
    for name in ("asked_load", "scale"):
        if result.get(name) is not None:
            return float(result[name])
    return None if offered is None else float(f"{offered:.4g}")


def _points(runs: list[Result], axis: Dimension | None) -> list[tuple[Any, Result]]:
    if axis is None:
        return [(str(run.get("scheduler") or "all runs"), run) for run in runs]
    points: list[tuple[Any, Result]] = []
    for run in runs:
        if (place := axis.place(run)) is not None:
            points.append((place, run))
        elif axis.name != "load":
            points += [(value, run) for value in axis.texts]
    return sorted(points, key=itemgetter(0))


def _named(name: str, value: Hashable, runs: list[Result]) -> str:
    if name in ("scheduler", "trace"):
        return str(value)
    if name == "load":
        rates = [at(run, "load", "offered_rps") for run in runs]
        told = [rate for rate in rates if rate is not None]
        if told and max(told) - min(told) <= _SAME_RATE * max(told):
            return f"{number(told[0], 3)} req/s"
        return f"scale {setting_value(value)}"
    if name in ("servers", "bins", "requests"):
        return f"{setting_value(value)} {name.removesuffix('s') if value == 1 else name}"
    return setting_text(name, value)


_UNSERVED: Final = {
    "too_large": ("refused", "need more than the KV memory holds", ("kv_tokens",)),
    "late": ("given up", "had no token in time", ("ttft",)),
    "late_midway": ("given up", "had a token too late and were served no further", ("ttft", "tbt")),
}
"""By reason: column, meaning, and the options that requests did not fit."""
BEST: Final = "\N{BLACK STAR}"
DOUBTFUL: Final = "?"
"""After each figure of a run whose latency model is not known to be good."""
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
    """Return a row for each run, with its best figures marked.

    `sla`: with requests outside their SLA.
    """
    columns = [_Column("scheduler", lambda told: str(told["scheduler"])), *_varying(results)]
    keys = len(columns)
    columns += _figure_columns(results, sla=sla)
    marked = {(row, i) for i, won in _wins(results, columns).items() for rows in won for row in rows}

    def cell(row: int, i: int) -> str:
        doubtful = DOUBTFUL * (i >= keys and at(results[row], "fit", "caution") is not None)
        return BEST * ((row, i) in marked) + columns[i].text(results[row]) + doubtful

    rows = [[cell(row, i) for i in range(len(columns))] for row in range(len(results))]
    return Table([column.title for column in columns], rows, keys=keys, nowrap=True)


def _varying(results: Sequence[Result]) -> Iterator[_Column]:
    for d in _varied(results):
        if d.name == "load":
            yield _rate("offered req/s", "", 0, "load", "offered_rps")
        elif d.name == "requests":
            yield _Column(d.name, lambda told: f"{told['n']:,}")
        elif d.name not in ("scheduler", "trace", "objectives"):
            yield _Column(d.name, partial(_option, d.name))


def _figure_columns(results: Sequence[Result], *, sla: bool) -> Iterator[_Column]:
    for title in ("refused", "given up"):
        if any(_unserved(title, told) != "0" for told in results):
            yield _Column(title, partial(_unserved, title))
    yield _rate("req/s", "throughput", 1, "throughput_rps")
    yield _rate("in+out tok/s", "tokens per second, prompts and answers", 1, "throughput_tps")
    yield from (_ms(f"E2E {name}", "latency", name) for name in _PERCENTILES)
    if sla:
        yield _share("late", "request_sla_violation", better=-1)
        yield _share("slow", "token_sla_violation", better=-1)
    if any(at(told, "metrics", "ttft") for told in results):
        yield _ms("TTFT p50", "metrics", "ttft", "p50")
        yield _ms("TTFT p99", "metrics", "ttft", "p99")
    if any(told.get("decode_tbt") for told in results):
        yield _ms("TBT p99", "decode_tbt", "p99")
    if any(at(told, "metrics", "itl") for told in results):
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
        groups[of["load"], of["servers"], of["requests"], of["trace"]][rest][seed] = row
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
    labels = run_labels(results)
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


def run_labels(results: Sequence[Result]) -> list[str]:
    """Return what names each run: its scheduler, or what differs if all have one scheduler."""
    varied = _varied(results)
    if not varied or varied[0].name == "scheduler":
        return [str(told["scheduler"]) for told in results]
    return [", ".join(text for d in varied if (text := d.text_at(told)) is not None) for told in results]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def sweep_lines(results: Sequence[Result], *, sla: bool = False) -> Iterator[str]:
    """Yield which run was best, the meaning of the figures, and what is the same for all of them."""
    yield from cautions(results)
    if best := best_said(results, sla=sla):
        yield best
    counts, offered = {f"{told['n']:,}" for told in results}, set(map(_offered, results))
    same = [f"{counts.pop()} requests"] if len(counts) == 1 else []
    same += [f"offered {offered.pop()}"] if len(offered) == 1 else []
    yield "; ".join(
        [*same, "times in ms; busy: share of the time that servers work; batch: mean requests in it"]
    )
    for router in _each(told.get("router") for told in results):
        shares = values_text(
            n
            for told in results
            if told.get("router") == router
            for n in at(told, "by_server", "requests") or ()
        )
        yield f"router {router}: servers have a batch and a KV memory each; requests per server: {shares}"
    if sla:
        request_sla = values_text(told["readings"]["request_sla"] for told in results)
        token_sla = values_text(told["readings"]["token_sla"] * 1e3 for told in results)
        yield f"late: outside the request SLA of {request_sla} s; slow: the token SLA of {token_sla} ms"
    yield from _longest_lines(results)
    for reason, (column, meaning, options) in _UNSERVED.items():
        if found := [told for told in results if at(told, "unserved", reason)]:
            counted = values_text(at(told, "unserved", reason) for told in found)
            limits = ", ".join(
                f"{name} {', '.join(_each(option_text(name, told['serving'][name]) for told in found))}"
                for name in options
            )
            yield f"{column}: {counted} requests {meaning} ({limits}); they count as late"
    for allowed in _each(at(told, "capacity", "allowed") for told in results):
        yield (
            f"capacity: the highest rate at which {1 - allowed:.4g} of the requests are within their bounds"
            " (request SLA, token SLA, or slo); 0: there is none; no limit: all may come at once. It falls"
            " with more requests, as queues grow"
        )
    if objectives := values_text(at(told, "goodput", "objectives") for told in results):
        yield f"goodput: requests that met {objectives}"
    for reader in _each(reader_text(told) for told in results):
        yield f"smooth: goodput for {reader}; idle: what such a reader waited with nothing to read"
    yield from dict.fromkeys(unreliable_said(results))
    labels = run_labels(results)
    if growing := [label for label, told in zip(labels, results, strict=True) if queue_grows(told)]:
        yield (
            f"may be overloaded: {', '.join(dict.fromkeys(growing))}: fewer requests complete per second than"
            " are offered, and most of the latency is waiting; the queue and the latencies grow with"
            " --requests"
        )
    for label, told in followed_requests(results):
        one = told["followed"]
        size = f"request {one['row']} ({one['input']:,} + {one['output']:,} tokens)"
        yield f"{size}, {label}: {', '.join(f'{k} {v} ms' for k, v in followed_figures(one).items())}"
    yield from (f"model: {text}" for text in _each(map(model_text, results)))


_LONGEST_MAX: Final = 8
"""Maximum number of runs whose longest answers are listed by bin; `--json` has all."""


def _longest_lines(results: Sequence[Result]) -> Iterator[str]:
    """Yield the mean longest answer of the batches of each bin (E[max] of the multi-bin paper)."""
    binned = [
        (label, told["longest_output"])
        for label, told in zip(run_labels(results), results, strict=True)
        if at(told, "longest_output", "by_bin")
    ]
    if len(binned) > _LONGEST_MAX:
        return
    for label, longest in binned:
        mean_all, mean_bins, drawn_all, drawn_bins = (
            text
            for name in ("mean", "expected")
            for text in (
                number(longest[name], 3),
                ", ".join(number(one[name], 3) for one in longest["by_bin"]),
            )
        )
        yield (
            f"{label}: longest answer of a batch, mean {mean_all} tokens, by bin {mean_bins}; of as many"
            f" requests drawn from all {drawn_all}, by bin {drawn_bins}"
        )


def cautions(results: Sequence[Result]) -> list[str]:
    """Return why figures with DOUBTFUL are doubtful."""
    return [f"caution: {DOUBTFUL} {text}" for text in _each(at(told, "fit", "caution") for told in results)]


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
    return [one for one in zip(run_labels(results), results, strict=True) if one[1].get("followed")]


def followed_figures(followed: Mapping[str, Any]) -> dict[str, str]:
    """Return the latencies of the followed request in ms: TTFT, E2E, median and longest gap."""
    times = followed["token_seconds"] or [None]
    gaps = [later - sooner for sooner, later in pairwise(times)] or [None]
    found = {"TTFT": times[0], "E2E": times[-1], "median gap": median(gaps), "longest gap": max(gaps)}
    return {name: milliseconds(value) for name, value in found.items()}


def reader_text(result: Result) -> str | None:
    """Return the reader of a run's smooth goodput."""
    smooth = result.get("smooth_goodput") or {}
    speed = smooth.get("speed_tokens_per_second")
    if speed is None:
        return None
    return f"a reader of {number(speed)} tokens/s, alpha {number(smooth['alpha'])}"


def model_text(result: Result) -> str | None:
    """Return the constants of a run's latency model, and what they were fitted to."""
    if not result.get("model"):
        return None
    constants = ", ".join(f"{name} {number(value, 6)}" for name, value in result["model"].items())
    fit = result.get("fit")
    source = result.get("model_source") or "the GPU of the multi-bin batching paper"
    if fit:
        source = f"fitted to {fit.get('grid') or fit['capture']}, R^2 {number(fit['r2'], 5)}"
        if (unseen := _unseen_r2(fit.get("unseen"))) is not None:
            source += f", on data that it did not see {number(unseen, 5)}"
    return f"{constants} (in seconds but for gamma); {source}"


def _unseen_r2(unseen: Mapping[str, Any] | None) -> float | None:
    """Return the lowest R^2 of the parts of a fit, of a grid or of a capture; None if one is not known."""
    if not unseen:
        return None
    values = [unseen["r2"]] if "r2" in unseen else [at(part, "r2") for part in unseen.values()]
    return None if None in values else min(values)


def _offered(told: Result) -> str:
    rate = told["load"]["offered_rps"]
    return "all at once" if rate is None else f"{rate:.4g} requests/s on average"


def _option(name: str, told: Result) -> str:
    return option_text(name, settings_of(told).get(name))


def _unserved(column: str, told: Result) -> str:
    counts = (at(told, "unserved", reason) or 0 for reason, of in _UNSERVED.items() if of[0] == column)
    return f"{sum(counts):,}"


def _capacity(path: tuple[str, ...], told: Result) -> str:
    known = path[-1] in (at(told, *path[:-1]) or ())
    return "no limit" if known and at(told, *path) is None else number(at(told, *path))


def _each(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value is not None and value not in found:
            found.append(value)
    return found


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
