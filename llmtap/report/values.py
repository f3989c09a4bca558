"""Turn numbers, times and texts into cells of reports; titles of the metrics.

Used by packages that show or read results as JSON (`report`, `top`, `bench`, `load`, `sim`, `cli`): rounding,
units, the mark for too few samples, texts of simulator options, and access to JSON by path (`at`, `leaves`).
"""

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from math import floor, isfinite, log10
from typing import Any, Final

from llmtap.metrics.catalogue import METRICS
from llmtap.metrics.statistics import SHARES, samples_needed

_PERCENTILE: Final = re.compile(r"p\d+")
MARK: Final = "*"
"""Mark after a percentile that has too few samples."""
FEW: Final = f"{MARK} too few samples (IETF 5.1.4.3); needed: " + ", ".join(
    f"p{p * 100:g} {samples_needed(p):,}" for p in SHARES.values()
)
"""Footnote of a table with marked cells."""
METRIC_TITLES: Final = {
    **{metric.name: metric.title for metric in METRICS},
    "e2e_same_length": "E2E, same length",
    "elapsed": "elapsed",
}
"""Titles of metrics by their names in JSON, in the order of tables. The last two are only in comparisons."""
_UNIT_WORDS_MAX: Final = 2
"""Maximum number of words in the unit of a figure. A cell with more words counts as text."""


def at(document: object, *path: str) -> Any:
    """Return the value at a path of a JSON document; None if the path does not exist."""
    for name in path:
        if not isinstance(document, Mapping):
            return None
        document = document.get(name)
    return document


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of a JSON document that is not an object, after its path: names with dots between
    them. `prefix` is put before each path."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def number(value: float | None, digits: int = 4) -> str:
    """Format a number with `digits` significant digits, without an exponent; `-` for None and infinity."""
    if value is None or not isfinite(value):
        return "-"
    if not value or isinstance(value, int):
        return f"{value:,.0f}"
    places = max(0, digits - 1 - floor(log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def milliseconds(seconds: float | None) -> str:
    """Format seconds as milliseconds, with three significant digits and without an exponent; `-` for None."""
    if seconds is None:
        return "-"
    ms = seconds * 1e3
    if abs(ms) >= 999.5:
        return f"{ms:,.0f}"
    for digits, limit in ((0, 99.95), (1, 9.995), (2, 0.9995), (3, 0.09995)):
        if abs(ms) >= limit:
            return f"{ms:.{digits}f}"
    return f"{ms:.4f}" if ms else "0"


def percentile_titles(metrics: Mapping[str, Any], known: Mapping[str, str]) -> dict[str, str]:
    """Return the titles of the figures to show, by name: `known` and additional percentiles in `metrics`."""
    names = {name for figures in metrics.values() for name in figures or () if _PERCENTILE.fullmatch(name)}
    more = {name: f"p{float(f'{name[1:3]}.{name[3:] or 0}'):g}" for name in names - {*SHARES, *known}}
    order = {**SHARES, **{name: float(title[1:]) / 100 for name, title in more.items()}, "mean": 0, "max": 1}
    return dict(sorted({**known, **more}.items(), key=lambda item: order[item[0]]))


def eq4_text(smooth: Mapping[str, Any]) -> str:
    """Return a clause on the smooth goodput by d_i = V i (smooth goodput paper, eq. 4); empty if unknown."""
    rate = smooth.get("tokens_per_second_eq4")
    return "" if rate is None else f"; with d_i = V i (eq. 4): {number(rate, 3)}/s"


def figure_text(figures: Mapping[str, Any], name: str) -> str:
    """Return the statistic `name` of a metric in ms as text, marked if it has too few samples."""
    text = milliseconds(figures.get(name))
    return text + (MARK if name in (figures.get("marks") or ()) and text != "-" else "")


def figures_text(figures: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return the number of samples of a metric and the named statistics in ms, as texts."""
    return [f"{figures['n']:,}", *(figure_text(figures, name) for name in names)]


def is_marked(rows: Iterable[Iterable[str]]) -> bool:
    """Return whether a table has a marked cell, and therefore needs the footnote FEW."""
    return any(cell.endswith(MARK) for row in rows for cell in row)


def plain_text(value: object) -> str:
    """Return any JSON value as text: `-` for null, numbers as formatted by `number`."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(plain_text, value))
    return number(value) if isinstance(value, int | float) else str(value)


def burst_sentences(n: float, label: str = "") -> tuple[str, str]:
    """Return a caution and a recommendation for a system whose chunks arrive in bursts of `n`.

    `label`: name of the system.
    """
    prefix, possessive = (f"{label}: ", "its") if label else ("", "the")
    return (
        f"{prefix}{number(n, 2)} chunks come at a time, so {possessive} time per token looks too short.",
        "Compare the time to first token and the longest pause.",
    )


P_MIN: Final = 1e-16
"""Smallest p-value that is shown as a number. A smaller p-value can be only a rounding error, because floats
near 1 differ by about 1e-16."""


def p_text(p: float, digits: int = 2) -> str:
    """Return a p-value as text: `0.031`, or `< 1e-16`."""
    return f"{p:.{digits}g}" if p >= P_MIN else f"< {P_MIN:g}"


def count_with_noun(n: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: `1 file`, `2,000 files`. Default of `plural`: the noun with an s."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def counts_text(counts: Mapping[str, int], separator: str = ", ") -> str:
    """Return names with their counts: `refused 3, complete 1,000`."""
    return separator.join(f"{name} {n:,}" for name, n in counts.items())


def is_words(column: Iterable[str]) -> bool:
    """Return whether a column of a table contains words, which are aligned left, and not only figures."""
    return any(
        cell[:1].isalpha()
        or sum(word[:1].isalpha() for word in cell.partition("(")[0].split()) > _UNIT_WORDS_MAX
        for cell in column
    )


TIMES: Final = frozenset(
    (
        "eps",
        "token_sla",
        "request_sla",
        "swap_token",
        "attention",
        "output_delay",
        "ttft",
        "tbt",
    )
)
"""Names of simulator options whose values are in seconds."""
_UNITS: Final = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def option_text(name: str, value: Any) -> str:
    """Format the value of an option in public JSON. Options of `TIMES` get a unit; None becomes `-`."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    if name not in TIMES:
        return setting_value_text(value)
    unit, scale = next((candidate for candidate in _UNITS if value >= candidate[1]), _UNITS[0])
    return f"{number(value / scale, 6)} {unit}"


def setting_text(name: str, value: Any) -> str:
    return f"{name} {option_text(name, value)}"


def values_text(values: Iterable[Hashable], limit: int = 4) -> str:
    """Return a text with each value once, numbers ascending. More than `limit` numbers become a range."""
    distinct = sort_values(dict.fromkeys(value for value in values if value is not None))
    if len(distinct) > limit and all(map(is_number, distinct)):
        return f"{setting_value_text(distinct[0])} to {setting_value_text(distinct[-1])}"
    return ", ".join(setting_value_text(value) for value in distinct)


def sort_values(values: Iterable[Hashable]) -> list[Any]:
    """Return the values in ascending order if all are numbers; otherwise in the given order."""
    items: list[Any] = list(values)
    return sorted(items) if all(map(is_number, items)) else items


def setting_value_text(value: Hashable) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return number(value) if isinstance(value, int | float) else str(value)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
