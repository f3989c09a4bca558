"""Turn the JSON of simulated runs (`llmtap sim run`) into a table, notes on it, and the lines of charts.

A run is the public JSON of one result. `sweep_table` and `sweep_lines` are the output on a terminal;
`read_sweep` finds the axis and the lines along it, which `sweep_page.py` draws.

Settings that differ between runs are dimensions, except settings that follow from the scheduler. The axis is
the numeric dimension with the most values; each combination of the other dimensions is a line. In `readings`
and `serving`, an option that the scheduler does not read is None. If the scheduler of a run does not read the
option of the axis, the run has the same figures at each value of the axis, and is drawn as a horizontal line.

The module is long because the table, the marks of the best runs and the lines below the table use the same
columns and dimensions.
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
    setting_text,
    setting_value_text,
    sort_values,
    values_text,
)

Result = Mapping[str, Any]

_RANKED: Final = ("scheduler", "trace", "load", "servers", "router", "bins", "requests")
"""Order of the dimensions; other settings come after these. If several numeric dimensions have the most
values, the first of them is the axis."""
_OPTIONS: Final = ("readings", "serving", "model")
"""Fields of a run's JSON that contain its options."""
_SAME_RATE: Final = 0.01
"""Offered rates that differ by at most this share are shown as one rate."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """A setting that differs between the runs of a sweep."""

    name: str
    texts: dict[Hashable, str]
    """Text of each value, as in the name of a line (`8 servers`); values that are numbers are ascending."""

    @property
    def title(self) -> str:
        """Title of an axis or a column."""
        if self.name == "load":
            return "offered load, requests/s"
        return f"{self.name}, s" if self.name in TIMES else self.name

    def text_at(self, result: Result) -> str | None:
        """Return the text of a run's value; None if the run does not have this setting."""
        value = settings_of(result).get(self.name)
        return None if value is None else self.texts[value]

    def axis_value(self, result: Result) -> Any:
        """Return a run's place on the axis: the value of the setting; for `load`, the offered requests/s."""
        if self.name == "load":
            return at(result, "load", "offered_rps")
        return settings_of(result).get(self.name)


@dataclass(frozen=True, slots=True)
class Line:
    """Runs that differ only in their value on the axis, in ascending order."""

    label: str
    settings: dict[str, str]
    """Values of `Sweep.line_dimensions`, by the name of the dimension."""
    points: list[tuple[Any, Result]]
    """Each run with its value on the axis."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Runs of a sweep, arranged as lines along an axis."""

    axis: Dimension | None
    """Dimension of the axis; None if no numeric setting varies. The runs are then drawn as bars."""
    line_dimensions: list[Dimension]
    """Dimensions in which the lines differ."""
    lines: list[Line]


def read_sweep(results: Sequence[Result]) -> Sweep:
    """Find the axis and the lines of the runs. Raises ValueError if there are no runs."""
    if not results:
        raise ValueError("expected at least one result of a sweep, got none")
    varied = _varied_settings(results)
    numeric = [d for d in varied if d.name != "seed" and all(map(is_number, d.texts))]
    axis = max(numeric, key=lambda d: len(d.texts), default=None)
    line_dimensions = [d for d in varied if d is not axis]

    def line_settings(result: Result) -> dict[str, str]:
        return {d.name: text for d in line_dimensions if (text := d.text_at(result)) is not None}

    def rank(result: Result) -> list[int]:
        texts = [(d, d.text_at(result)) for d in line_dimensions]
        return [-1 if text is None else [*d.texts.values()].index(text) for d, text in texts]

    lines = []
    for _, group in groupby(sorted(results, key=rank), key=rank):
        runs = list(group)
        settings = line_settings(runs[0])
        label = ", ".join(settings.values()) or str(runs[0].get("scheduler") or "all runs")
        lines.append(Line(label, settings, _line_points(runs, axis)))
    return Sweep(axis, line_dimensions, lines)


def settings_of(result: Result) -> dict[str, Hashable]:
    """Return the settings of a run by name."""
    settings: dict[str, Hashable] = {"scheduler": result.get("scheduler"), "trace": result.get("trace")}
    settings["load"] = _load_key(result)
    settings |= {"servers": result.get("servers"), "router": result.get("router")}
    settings |= {"requests": result.get("n"), "seed": result.get("seed")}
    for group in _OPTIONS:
        for name, value in (result.get(group) or {}).items():
            key = f"model {name}" if group == "model" else name
            settings[key] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    # Use the number of bins in the result, not the option `bins`: the option `bin_edges` overrides `bins`,
    # and some schedulers have no bins.
    settings["bins"] = len(result.get("bins") or ()) or None
    settings["objectives"] = at(result, "goodput", "objectives")
    return settings


def _varied_settings(results: Sequence[Result]) -> list[Dimension]:
    """Return the settings with at least two values, except settings that follow from the scheduler."""
    runs_by_setting: dict[str, dict[Hashable, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        for name, value in settings_of(result).items():
            if value is not None:
                runs_by_setting[name][value].append(result)
    varied = []
    for name in sorted(
        runs_by_setting, key=lambda name: _RANKED.index(name) if name in _RANKED else len(_RANKED)
    ):
        values = runs_by_setting[name]
        pairs = {(run.get("scheduler"), value) for value, runs in values.items() for run in runs}
        decided = name != "scheduler" and len(pairs) == len({scheduler for scheduler, _ in pairs})
        if len(values) > 1 and not decided:
            varied.append(
                Dimension(name, {v: _setting_text(name, v, values[v]) for v in sort_values(values)})
            )
    return varied


def _load_key(result: Result) -> Hashable:
    """Return the load that the user requested, or the offered rate if the requested load is not known.

    The requested load is the better key: two runs with the same scale have different offered rates if their
    numbers of requests differ.
    """
    offered = at(result, "load", "offered_rps")
    for name in ("asked_load", "scale"):
        if result.get(name) is not None:
            return float(result[name])
    return None if offered is None else float(f"{offered:.4g}")


def _line_points(runs: list[Result], axis: Dimension | None) -> list[tuple[Any, Result]]:
    if axis is None:
        return [(str(run.get("scheduler") or "all runs"), run) for run in runs]
    points: list[tuple[Any, Result]] = []
    for run in runs:
        if (place := axis.axis_value(run)) is not None:
            points.append((place, run))
        elif axis.name != "load":
            points += [(value, run) for value in axis.texts]
    return sorted(points, key=itemgetter(0))


def _setting_text(name: str, value: Hashable, runs: list[Result]) -> str:
    if name in ("scheduler", "trace"):
        return str(value)
    if name == "load":
        rates = [at(run, "load", "offered_rps") for run in runs]
        known = [rate for rate in rates if rate is not None]
        if known and max(known) - min(known) <= _SAME_RATE * max(known):
            return f"{number(known[0], 3)} req/s"
        return f"scale {setting_value_text(value)}"
    if name in ("servers", "bins", "requests"):
        return f"{setting_value_text(value)} {name.removesuffix('s') if value == 1 else name}"
    return setting_text(name, value)


_UNSERVED: Final = {
    "too_large": ("refused", "need more than the KV memory holds", ("kv_tokens",)),
    "late": ("given up", "had no token in time", ("ttft",)),
    "late_midway": ("given up", "had a token too late and were served no further", ("ttft", "tbt")),
}
"""By reason why requests were not served: title of the column, meaning, and options that set the limit."""
BEST: Final = "\N{BLACK STAR}"
DOUBTFUL: Final = "?"
"""Mark after each figure of a run whose latency model has a caution on its fit."""
_PERCENTILES: Final = ("p50", "p95", "p99")
"""Percentiles that are columns of the table."""
_OUTSIDE_MIN: Final = 10
"""Minimum number of requests outside their bounds for a reliable capacity: as many as the samples above the
p99 of 1,000 samples."""
COMPLETED_MIN: Final = 0.9
"""Ratio of completed to offered rate below which a run is possibly overloaded. The IETF draft, 5.2.3.1,
requires this share of completed requests."""
SEEDS_MIN: Final = 3
"""Number of seeds that a run needs to be marked as the best."""


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table of runs."""

    title: str
    text: Callable[[Result], str]
    """Function that returns the cell of a run."""
    path: tuple[str, ...] = ()
    """Path of the figure in the JSON of a result; empty: the column has no best value."""
    better: int = 0
    """1: the largest value is best; -1: the smallest value is best."""
    name: str = ""
    """Name of the figure for sentences; default: the title."""


def sweep_table(results: Sequence[Result], *, sla: bool = False) -> Table:
    """Return a table with a row for each run, in which the best figures are marked.

    `sla`: whether to add the shares of requests outside their SLA.
    """
    columns = [_Column("scheduler", lambda result: str(result["scheduler"])), *_varying_columns(results)]
    key_columns = len(columns)
    columns += _figure_columns(results, sla=sla)
    marked = {(row, i) for i, won in _best_runs(results, columns).items() for rows in won for row in rows}

    def cell(row: int, i: int) -> str:
        doubtful = DOUBTFUL * (i >= key_columns and at(results[row], "fit", "caution") is not None)
        return BEST * ((row, i) in marked) + columns[i].text(results[row]) + doubtful

    rows = [[cell(row, i) for i in range(len(columns))] for row in range(len(results))]
    return Table([column.title for column in columns], rows, key_columns=key_columns, nowrap=True)


def _varying_columns(results: Sequence[Result]) -> Iterator[_Column]:
    for d in _varied_settings(results):
        if d.name == "load":
            yield _rate_column("offered req/s", "", 0, "load", "offered_rps")
        elif d.name == "requests":
            yield _Column(d.name, lambda result: f"{result['n']:,}")
        elif d.name not in ("scheduler", "trace", "objectives"):
            yield _Column(d.name, partial(_option_text, d.name))


def _figure_columns(results: Sequence[Result], *, sla: bool) -> Iterator[_Column]:
    for title in ("refused", "given up"):
        if any(_unserved_text(title, result) != "0" for result in results):
            yield _Column(title, partial(_unserved_text, title))
    yield _rate_column("req/s", "throughput", 1, "throughput_rps")
    yield _rate_column("in+out tok/s", "tokens per second, prompts and answers", 1, "throughput_tps")
    yield from (_ms_column(f"E2E {name}", "latency", name) for name in _PERCENTILES)
    if sla:
        yield _share_column("late", "request_sla_violation", better=-1)
        yield _share_column("slow", "token_sla_violation", better=-1)
    if any(at(result, "metrics", "ttft") for result in results):
        yield _ms_column("TTFT p50", "metrics", "ttft", "p50")
        yield _ms_column("TTFT p99", "metrics", "ttft", "p99")
    if any(result.get("decode_tbt") for result in results):
        yield _ms_column("TBT p99", "decode_tbt", "p99")
    if any(at(result, "metrics", "itl") for result in results):
        option = values_text(at(result, "metrics", "itl", "option") for result in results)
        yield _ms_column(f"ITL ({option}) p99" if option else "ITL p99", "metrics", "itl", "p99")
        yield _ms_column("idle p99", "metrics", "user_idle", "p99")
        yield _ms_column("idle p99 (V i)", "metrics", "user_idle_eq4", "p99")
        yield _rate_column("smooth tok/s", "smooth goodput", 1, "smooth_goodput", "tokens_per_second")
    yield _ms_column("queue p50", "queueing", "p50")
    yield _share_column("busy", "utilization", digits=0)
    yield _Column("batch", lambda result: number(at(result, "batch_mean"), 3))
    if any(result.get("goodput") for result in results):
        yield _rate_column("goodput req/s", "goodput", 1, "goodput", "requests_per_second")
    bounds = _distinct_values(name for result in results for name in at(result, "capacity", "by") or ())
    for by in bounds:
        path, name = ("capacity", "by", by), "capacity" if bounds == ["request"] else f"capacity ({by})"
        yield _Column(f"{name} req/s", partial(_capacity_text, path), path, 1, name)


def _comparable_runs(results: Sequence[Result]) -> list[dict[Hashable, dict[Any, int]]]:
    """Return groups of runs that can be compared: for each combination of settings, the table rows by seed.

    The runs of a group have the same load, trace, and numbers of servers and requests. If each of these
    groups has only one combination of the other settings, all runs are one group.
    """
    groups: dict[Hashable, dict[Hashable, dict[Any, int]]] = defaultdict(lambda: defaultdict(dict))
    for row, result in enumerate(results):
        settings = settings_of(result)
        seed, others = settings.pop("seed"), frozenset(settings.items())
        groups[settings["load"], settings["servers"], settings["requests"], settings["trace"]][others][
            seed
        ] = row
    if all(len(values) == 1 for values in groups.values()):
        return [{others: rows for values in groups.values() for others, rows in values.items()}]
    return list(groups.values())


def _best_runs(results: Sequence[Result], columns: Sequence[_Column]) -> dict[int, list[list[int]]]:
    """Return the rows of the best run of each group, by index of the column. A run has one row for each seed.

    A run is the best if it is better than every other run of the group: over SEEDS_MIN seeds or more, the
    95 % interval of the mean difference (Student's t, paired by seed) does not contain 0.
    """
    wins: dict[int, list[list[int]]] = defaultdict(list)
    for group in _comparable_runs(results):
        seeds = set.intersection(*(set(rows) for rows in group.values()))
        if len(group) < 2 or len(seeds) < SEEDS_MIN:
            continue
        for i, column in enumerate(columns):
            values = {
                settings: [at(results[rows[seed]], *column.path) for seed in sorted(seeds)]
                for settings, rows in group.items()
            }
            known = {
                settings: figures
                for settings, figures in values.items()
                if column.better and None not in figures
            }
            if len(known) < 2:
                continue
            best = max(known, key=lambda settings: mean(known[settings]) * column.better)
            others = [figures for settings, figures in known.items() if settings != best]
            if all(_is_better(known[best], other, column.better) for other in others):
                wins[i].append([group[best][seed] for seed in seeds])
    return wins


def _is_better(a: Sequence[float], b: Sequence[float], sign: int) -> bool:
    """Return whether `a` is better than `b`, by the interval of `_best_runs`. `sign`: `_Column.better`."""
    differences = [(x - y) * sign for x, y in zip(a, b, strict=True)]
    n = len(differences)
    reach = t_quantile(0.05, n - 1) * stdev(differences) / sqrt(n)
    return mean(differences) - reach > 0


def best_runs_text(results: Sequence[Result], *, sla: bool = False) -> str:
    """Return sentences that name the best runs by each figure, or why no run is marked as the best.

    Empty if no two runs can be compared.
    """
    groups = [group for group in _comparable_runs(results) if len(group) > 1]
    if not groups:
        return ""
    columns = list(_figure_columns(results, sla=sla))
    labels = run_labels(results)
    by_label: dict[str, list[str]] = defaultdict(list)
    for i, won in _best_runs(results, columns).items():
        label, n = Counter(labels[rows[0]] for rows in won).most_common(1)[0]
        name = columns[i].name or columns[i].title
        by_label[label].append(name if n == len(groups) else f"{name} ({n} of {len(groups)})")
    ranked = sorted(by_label.items(), key=lambda item: -len(item[1]))
    if parts := [f"{label} by {_list_text(names)}" for label, names in ranked]:
        text = "; ".join(parts).replace(" by ", " was best by ", 1)
        return f"{text}. {BEST} marks the best: the 95 % interval of the difference over seeds excludes 0."
    if all(len(set.intersection(*map(set, group.values()))) < SEEDS_MIN for group in groups):
        return (
            "No run is marked as the best: one workload cannot show that a difference is more than chance."
            " Repeat a synthetic workload with several seeds, for example --seed 1,2,3,4,5."
        )
    return "No run is best by any figure: the 95 % intervals of the differences over seeds contain 0."


def run_labels(results: Sequence[Result]) -> list[str]:
    """Return a label for each run: its scheduler or, if all runs have the same, the settings that differ."""
    varied = _varied_settings(results)
    if not varied or varied[0].name == "scheduler":
        return [str(result["scheduler"]) for result in results]
    return [", ".join(text for d in varied if (text := d.text_at(result)) is not None) for result in results]


def _list_text(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def sweep_lines(results: Sequence[Result], *, sla: bool = False) -> Iterator[str]:
    """Yield the lines below the table: cautions, the best runs, meaning of the columns, common settings."""
    yield from caution_texts(results)
    if best := best_runs_text(results, sla=sla):
        yield best
    counts, offered = {f"{result['n']:,}" for result in results}, set(map(_offered_load_text, results))
    same = [f"{counts.pop()} requests"] if len(counts) == 1 else []
    same += [f"offered {offered.pop()}"] if len(offered) == 1 else []
    yield "; ".join(
        [*same, "times in ms; busy: share of the time that servers work; batch: mean requests in it"]
    )
    for router in _distinct_values(result.get("router") for result in results):
        shares = values_text(
            n
            for result in results
            if result.get("router") == router
            for n in at(result, "by_server", "requests") or ()
        )
        yield f"router {router}: servers have a batch and a KV memory each; requests per server: {shares}"
    if sla:
        request_sla = values_text(result["readings"]["request_sla"] for result in results)
        token_sla = values_text(result["readings"]["token_sla"] * 1e3 for result in results)
        yield f"late: outside the request SLA of {request_sla} s; slow: the token SLA of {token_sla} ms"
    yield from _longest_lines(results)
    for reason, (column, meaning, options) in _UNSERVED.items():
        if affected := [result for result in results if at(result, "unserved", reason)]:
            counted = values_text(at(result, "unserved", reason) for result in affected)
            runs = [result["serving"] for result in affected]
            limits = ", ".join(
                f"{name} {', '.join(_distinct_values(option_text(name, serving[name]) for serving in runs))}"
                for name in options
            )
            yield f"{column}: {counted} requests {meaning} ({limits}); they count as late"
    for allowed in _distinct_values(at(result, "capacity", "allowed") for result in results):
        yield (
            f"capacity: the highest rate at which {1 - allowed:.4g} of the requests are within their bounds"
            " (request SLA, token SLA, or slo); 0: there is none; no limit: all may come at once. It falls"
            " with more requests, as queues grow"
        )
    if objectives := values_text(at(result, "goodput", "objectives") for result in results):
        yield f"goodput: requests that met {objectives}"
    for reader in _distinct_values(reader_text(result) for result in results):
        yield f"smooth: goodput for {reader}; idle: what such a reader waited with nothing to read"
    yield from dict.fromkeys(unreliable_texts(results))
    labels = run_labels(results)
    if growing := [label for label, result in zip(labels, results, strict=True) if queue_grows(result)]:
        yield (
            f"may be overloaded: {', '.join(dict.fromkeys(growing))}: fewer requests complete per second than"
            " are offered, and most of the latency is waiting; the queue and the latencies grow with"
            " --requests"
        )
    for label, result in followed_requests(results):
        followed = result["followed"]
        size = f"request {followed['row']} ({followed['input']:,} + {followed['output']:,} tokens)"
        yield f"{size}, {label}: {', '.join(f'{k} {v} ms' for k, v in followed_figures(followed).items())}"
    yield from (f"model: {text}" for text in _distinct_values(map(model_text, results)))


_LONGEST_MAX: Final = 8
"""Maximum number of runs for which the longest answers are listed by bin; `--json` has all of them."""


def _longest_lines(results: Sequence[Result]) -> Iterator[str]:
    """Yield a line for each run with bins: the mean length of the longest answer of a batch, for all requests
    and by bin (E[max] of the multi-bin paper)."""
    binned = [
        (label, result["longest_output"])
        for label, result in zip(run_labels(results), results, strict=True)
        if at(result, "longest_output", "by_bin")
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


def caution_texts(results: Sequence[Result]) -> list[str]:
    """Return the reasons why figures are marked as DOUBTFUL."""
    return [
        f"caution: {DOUBTFUL} {text}"
        for text in _distinct_values(at(result, "fit", "caution") for result in results)
    ]


def queue_grows(result: Result) -> bool:
    """Return whether the run is possibly overloaded, so that its queue grows.

    Both conditions must be met: less than 90 % of the offered rate completes, and the median wait in the
    queue is more than half of the median latency. The second condition excludes short runs, in which the last
    responses take a large part of the time.
    """
    offered, completed = at(result, "load", "offered_rps"), result.get("throughput_rps")
    queueing, latency = at(result, "queueing", "p50"), at(result, "latency", "p50")
    if None in (offered, completed, queueing, latency):
        return False
    return bool(completed < COMPLETED_MIN * offered and queueing > latency / 2)


def unreliable_texts(results: Sequence[Result]) -> Iterator[str]:
    """Yield sentences on figures with too few requests: p99, goodput, capacities (IETF draft, 5.1.4.3)."""
    samples_min = samples_needed(SHARES["p99"])
    if few := [result["n"] for result in results if result["n"] < samples_min]:
        names = [name for name in marks(min(few)) if name in _PERCENTILES]
        names += ["goodput"] if any(result.get("goodput") for result in results) else []
        needed = f"at least {samples_min:,} are needed (--requests)"
        yield f"{MARK} not reliable: {', '.join(names)} of {values_text(few)} requests; {needed}"
    for result in results:
        allowed = at(result, "capacity", "allowed")
        if allowed is None or result["n"] * allowed >= _OUTSIDE_MIN:
            continue
        needed = f"{ceil(_OUTSIDE_MIN / allowed):,}" if allowed else "more"
        yield (
            f"not reliable: the capacity of {result['scheduler']}, by {result['n']:,} requests of which"
            f" {allowed:.4g} may be outside; at least {needed} are needed (--requests)"
        )


def followed_requests(results: Sequence[Result]) -> list[tuple[str, Result]]:
    """Return the runs that recorded the token times of one request (`followed`), with their labels."""
    return [pair for pair in zip(run_labels(results), results, strict=True) if pair[1].get("followed")]


def followed_figures(followed: Mapping[str, Any]) -> dict[str, str]:
    """Return the TTFT, E2E, median gap and longest gap of the followed request as texts in ms."""
    times = followed["token_seconds"] or [None]
    gaps = [end - start for start, end in pairwise(times)] or [None]
    figures = {"TTFT": times[0], "E2E": times[-1], "median gap": median(gaps), "longest gap": max(gaps)}
    return {name: milliseconds(value) for name, value in figures.items()}


def reader_text(result: Result) -> str | None:
    """Return a text on the assumed reader for a run's smooth goodput; None without smooth goodput."""
    smooth = result.get("smooth_goodput") or {}
    speed = smooth.get("speed_tokens_per_second")
    if speed is None:
        return None
    return f"a reader of {number(speed)} tokens/s, alpha {number(smooth['alpha'])}"


def model_text(result: Result) -> str | None:
    """Return a text with the constants of a run's latency model and the data to which they were fitted."""
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
    """Return the lowest R^2 of a fit's parts, for data that the fit did not use; None if one is unknown."""
    if not unseen:
        return None
    values = [unseen["r2"]] if "r2" in unseen else [at(part, "r2") for part in unseen.values()]
    return None if None in values else min(values)


def _offered_load_text(result: Result) -> str:
    rate = result["load"]["offered_rps"]
    return "all at once" if rate is None else f"{rate:.4g} requests/s on average"


def _option_text(name: str, result: Result) -> str:
    return option_text(name, settings_of(result).get(name))


def _unserved_text(column: str, result: Result) -> str:
    counts = (at(result, "unserved", reason) or 0 for reason, of in _UNSERVED.items() if of[0] == column)
    return f"{sum(counts):,}"


def _capacity_text(path: tuple[str, ...], result: Result) -> str:
    known = path[-1] in (at(result, *path[:-1]) or ())
    return "no limit" if known and at(result, *path) is None else number(at(result, *path))


def _distinct_values(values: Iterable[Any]) -> list[Any]:
    distinct: list[Any] = []
    for value in values:
        if value is not None and value not in distinct:
            distinct.append(value)
    return distinct


def _ms_column(title: str, *path: str) -> _Column:
    def text(result: Result) -> str:
        # `marks` names the percentiles that need more requests than the run has. It is missing in the JSON of
        # quantiles over requests, so compute it here.
        return figure_text({"marks": marks(result["n"]), **(at(result, *path[:-1]) or {})}, path[-1])

    return _Column(title, text, path, -1)


def _share_column(title: str, *path: str, digits: int = 2, better: int = 0) -> _Column:
    def text(result: Result) -> str:
        return "-" if (value := at(result, *path)) is None else f"{value:.{digits}%}"

    return _Column(title, text, path, better)


def _rate_column(title: str, name: str, better: int, *path: str) -> _Column:
    def text(result: Result) -> str:
        return number(None if (value := at(result, *path)) is None else float(value))

    return _Column(title, text, path, better, name)
