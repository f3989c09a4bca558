"""The figures that a gate can name, their places in public JSON, and whether they are valid.

A name is one of `SCALARS`, or a metric of `METRICS` with a statistic: `ttft_p99`, `tbc_max_mean`,
`e2e_p99.5`. A result is a Summary as public JSON; the result of a load has further parts: `corrected`,
`dispatch_lateness`, `verdict`. `error_rate` is defined in DEFINITIONS.md.
"""

import csv
import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from io import StringIO
from typing import Any, Final

from llmtap.errors import ConfigError
from llmtap.metrics import catalogue
from llmtap.metrics.catalogue import Surface, Unit, shown_on
from llmtap.metrics.objectives import Objectives
from llmtap.metrics.statistics import SHARES, parse_percentiles
from llmtap.report.values import at, milliseconds, number

_Json = Mapping[str, Any]
CHUNKS_SHARE_MAX: Final = 0.07
"""Maximum share of responses whose chunks were counted as tokens. Above it, token figures are not valid."""
DOUBTFUL_ERROR_S: Final = 0.001
DOUBTFUL_ERROR_SHARE: Final = 0.01
"""Limits for results without a verdict: a figure is doubtful if its error is more than DOUBTFUL_ERROR_S
seconds and more than this share of the figure."""


class FigureUnit(Enum):
    """Unit of a figure's value."""

    TIME = "ms"
    SHARE = "%"
    NUMBER = ""


_CSV_UNITS: Final = {FigureUnit.TIME: "s", FigureUnit.SHARE: "share", FigureUnit.NUMBER: ""}


@dataclass(frozen=True, slots=True)
class FigureRow:
    """Declaration of a figure that requirements and comparisons can name."""

    name: str
    unit: FigureUnit
    better: str
    """Whether `lower` or `higher` values are better."""
    valid_with: str
    """Name of the entry in `verdict.figures` that has the state of this figure; empty if there is none."""
    value: Callable[[_Json], float | None]
    """Function that returns the value in a result: in seconds, as a share from 0 to 1, or as in the JSON."""
    has_few_samples: Callable[[_Json], bool] = lambda result: False
    """Function that returns whether the figure of a result has too few samples (IETF draft, 5.1.4.3)."""
    percentiles: Mapping[str, float] = field(default_factory=dict)
    """The percentile of the figure, in the form of `parse_percentiles`; empty for other statistics."""


NOT_ERRORS: Final = frozenset({"complete", "refused"})
_FAULT_OF_HOST: Final = "tap_error"
"""Outcome that is a fault of the measuring host, not of the server."""


def failed_and_counted(outcomes: Mapping[str, int], *, is_live: bool) -> tuple[int, int]:
    """Return the number of failed requests, and the number of all requests that count for `error_rate`."""
    outcomes = dict(outcomes)
    outcomes.pop(_FAULT_OF_HOST, None)
    if is_live:
        # A live client cancels for its own reasons, so do not count its cancelled requests. A load generator
        # cancels only requests that are too slow, so they count as failed.
        outcomes.pop("client_cancelled", None)
    n = sum(outcomes.values())
    return n - sum(outcomes.get(name, 0) for name in NOT_ERRORS), n


def _error_rate(result: _Json) -> float | None:
    failed, n = failed_and_counted(result.get("outcomes") or {}, is_live=result.get("sender") is None)
    return failed / n if n else None


def _complete_share(result: _Json) -> float | None:
    n = result.get("n")
    return (at(result, "outcomes", "complete") or 0) / n if n else None


def _value_at(*names: str) -> Callable[[_Json], float | None]:
    """Return a function that reads the value at a path of a result."""
    return lambda result: at(result, *names)


_SCALARS: Final = (
    ("attainment", FigureUnit.SHARE, "higher", "goodput", "goodput.attainment"),
    ("goodput", FigureUnit.NUMBER, "higher", "goodput", "goodput.requests_per_second"),
    ("refusal_rate", FigureUnit.SHARE, "lower", "", "refusals.share"),
    ("requests", FigureUnit.NUMBER, "higher", "", "n"),
    ("sent_share", FigureUnit.SHARE, "higher", "load", "load.sent_share"),
    ("offered_rps", FigureUnit.NUMBER, "higher", "load", "load.offered_rps"),
    ("achieved_rps", FigureUnit.NUMBER, "higher", "load", "load.achieved_rps"),
    ("output_tokens_per_second", FigureUnit.NUMBER, "higher", "tokens", "tokens.output_per_second"),
    ("input_tokens_per_second", FigureUnit.NUMBER, "higher", "input_tokens", "tokens.input_per_second"),
    ("user_tokens_per_second", FigureUnit.NUMBER, "higher", "tpot", "concurrency.user_tokens_per_second"),
    ("concurrency", FigureUnit.NUMBER, "lower", "load", "concurrency.mean"),
    ("concurrency_effective", FigureUnit.NUMBER, "lower", "load", "concurrency.effective"),
    ("smooth_goodput", FigureUnit.NUMBER, "higher", "smooth_goodput", "smooth_goodput.tokens_per_second"),
)
"""Rows with the first four fields of a `FigureRow`, and the place of its value in public JSON."""
SCALARS: Final = {
    "error_rate": FigureRow("error_rate", FigureUnit.SHARE, "lower", "", _error_rate),
    "complete_share": FigureRow("complete_share", FigureUnit.SHARE, "higher", "", _complete_share),
    **{row[0]: FigureRow(*row[:4], _value_at(*row[4].split("."))) for row in _SCALARS},
}
METRICS: Final[Mapping[str, tuple[str, ...]]] = {
    **{
        metric.name: ("metrics", metric.name)
        for metric in shown_on(Surface.REPORT)
        if metric.unit is Unit.SECONDS
    },
    **{name: ("phases", name) for name in ("connect", "send", "wait", "receive")},
    **{f"{name}_scheduled": ("corrected", name) for name in ("ttft", "ttft_any", "e2e", "user_idle")},
    "dispatch_lateness": ("dispatch_lateness",),
}
"""Path of the statistics of each metric in a result."""
_VALID_WITH: Final = {
    **{metric.name: metric.judged_as for metric in catalogue.METRICS if metric.judged_as is not None},
    "ttft_any_scheduled": "ttft_scheduled",
    "dispatch_lateness": "",
    "connect": "",
    "send": "",
    "wait": "ttfb",
    "receive": "e2e",
}
_STATISTIC: Final = re.compile(r"(.+)_(mean|min|max|p\d+(?:\.\d+)?)")
NEEDS_OBJECTIVES: Final = frozenset({"attainment", "goodput"})
_TOKEN_FIGURES: Final = frozenset({"tpot", "tokens", "smooth_goodput"})


def figure_named(name: str, place: str) -> FigureRow:
    """Return the figure of this name. Raises ConfigError, with `place` and the nearest known name."""
    if name in SCALARS:
        return SCALARS[name]
    match = _STATISTIC.fullmatch(name)
    if match is None or match[1] not in METRICS:
        known = [*SCALARS, *(f"{metric}_{part}" for metric in METRICS for part in ("p50", "p99", "mean"))]
        near = difflib.get_close_matches(name, known, 1)
        statistics = "a metric with a statistic, such as ttft_p99, tpot_mean or e2e_max"
        hint = (
            f"did you mean {near[0]}?" if near else f"the figures are {', '.join(SCALARS)}, and {statistics}"
        )
        raise ConfigError(place, f"unknown figure {name!r}", hint)
    metric, statistic = match[1], match[2]
    percentiles: dict[str, float] = {}
    if statistic[0] == "p" and statistic not in SHARES:
        percentiles = parse_percentiles(statistic[1:], place)
        (statistic,) = percentiles
    path = METRICS[metric]
    return FigureRow(
        name,
        FigureUnit.TIME,
        "lower",
        _VALID_WITH.get(metric, metric),
        _value_at(*path, statistic),
        lambda result: statistic in (at(result, *path, "marks") or ()),
        percentiles,
    )


def every_figure(result: _Json) -> Iterator[FigureRow]:
    """Yield each figure for which a result has a value."""
    yield from (figure for figure in SCALARS.values() if figure.value(result) is not None)
    for metric, path in METRICS.items():
        for key, value in (at(result, *path) or {}).items():
            statistic = _percentile_text(key) if key[:1] == "p" else key
            if value is not None and _STATISTIC.fullmatch(f"{metric}_{statistic}"):
                yield figure_named(f"{metric}_{statistic}", "figure")


def _percentile_text(key: str) -> str:
    """Return the usual notation of a percentile's name in JSON: `p99.5` for `p995`."""
    return key if len(key) <= 3 or key in SHARES else f"{key[:3]}.{key[3:]}"


def figures_csv(result: _Json) -> str:
    """Return CSV with a row for each figure of a result, with its unit and validity. Times are in seconds."""
    file = StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("figure", "value", "unit", "n", "better", "validity", "reason"))
    for figure in every_figure(result):
        validity = validity_of(figure, result)
        writer.writerow(
            (
                figure.name,
                figure.value(result),
                _CSV_UNITS[figure.unit],
                samples_of(figure, result),
                figure.better,
                validity.state,
                validity.reason,
            )
        )
    return file.getvalue().rstrip("\n")


def samples_of(figure: FigureRow, result: _Json) -> int | None:
    match = None if figure.name in SCALARS else _STATISTIC.fullmatch(figure.name)
    n: int | None = result.get("n") if match is None else at(result, *METRICS[match[1]], "n")
    return n


def bounded_figures(result: _Json) -> dict[str, str]:
    """Return the names of the bounds in a result's objectives, by the figure that each bound judges.

    Example: the bound `tbc_p99` judges the figure `tbc`.
    """
    objectives = at(result, "goodput", "objectives") or ""
    names = (pair.partition(":")[0] for pair in objectives.split() if ":" in pair)
    return {{"tbc_p99": "tbc"}.get(name, name): name for name in names}


@dataclass(frozen=True, slots=True)
class FigureValidity:
    """Whether a figure of a result can be trusted."""

    state: str
    """State of the figure: `valid`, `doubtful` or `not_valid`."""
    reason: str = ""
    """Why the figure is doubtful or not valid; empty if it is valid."""


def validity_of(figure: FigureRow, result: _Json) -> FigureValidity:
    """Return the validity of a figure of a result, with the reason if the figure is doubtful or not valid."""
    if figure.value(result) is None:
        return FigureValidity("not_valid", _absence_reason(figure, result))
    needed = {figure.valid_with} - {""}
    if figure.name in NEEDS_OBJECTIVES:
        needed |= bounded_figures(result).keys()
    judged = at(result, "verdict", "figures")
    if judged is None:
        return _validity_of_summary(figure, result, needed)
    worst = FigureValidity("valid")
    for name in sorted(needed & judged.keys()):
        finding = judged[name]
        if finding["state"] == "not_valid":
            return FigureValidity("not_valid", _finding_text(finding, result))
        if finding["state"] == "doubtful":
            error = finding.get("error")
            text = "" if error is None else f"error up to {milliseconds(error)} ms"
            worst = FigureValidity("doubtful", text or _finding_text(finding, result))
    return worst


def _validity_of_summary(figure: FigureRow, result: _Json, needed: set[str]) -> FigureValidity:
    """Judge a figure of a result without a verdict: a capture or a simulation."""
    if at(result, "fit", "valid") is False:
        return FigureValidity("not_valid", str(at(result, "fit", "caution")))
    share = _chunks_share(result)
    if needed & _TOKEN_FIGURES and share > CHUNKS_SHARE_MAX:
        counted = f"the tokens of {number(share * 100, 3)} % of the responses are counted by chunks"
        return FigureValidity("not_valid", counted)
    value, error = figure.value(result), at(result, "uncertainties", "p99")
    error_max = max(DOUBTFUL_ERROR_S, DOUBTFUL_ERROR_SHARE * (value or 0.0))
    if figure.unit is FigureUnit.TIME and error is not None and error > error_max:
        return FigureValidity("doubtful", f"error up to {milliseconds(error)} ms")
    return FigureValidity("valid")


def _absence_reason(figure: FigureRow, result: _Json) -> str:
    if figure.name in NEEDS_OBJECTIVES and not bounded_figures(result):
        return "the result has no objectives (--slo)"
    match = _STATISTIC.fullmatch(figure.name)
    if match is not None and at(result, *METRICS[match[1]], "n"):
        return f"the result does not have this percentile (--percentiles {match[2][1:]})"
    return "the result has no value of this figure"


def _finding_text(judged: _Json, result: _Json) -> str:
    for finding in at(result, "verdict", "findings") or ():
        if finding["what"] in judged["findings"]:
            return str(finding["says"])
    return "the verdict of the result says why"


def _chunks_share(result: _Json) -> float:
    """Return the share of answers whose tokens were only counted by chunks."""
    sources = at(result, "tokens", "source") or {}
    n = sum(sources.values())
    return sources.get("chunks", 0) / n if n else 0.0


def check_objectives(figures: Mapping[str, FigureRow], objectives: str | None, place: str) -> None:
    """Raise ConfigError if one of these figures needs objectives and `objectives` has no bound."""
    for name in figures:
        if name in NEEDS_OBJECTIVES and (objectives is None or not Objectives.parse(objectives).bounds):
            hint = "set them, such as --slo 'ttft:500ms tpot:50ms'"
            raise ConfigError(place, f"the figure {name!r} needs objectives, and none are set", hint)
