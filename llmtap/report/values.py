"""Turn numbers, times and texts from outside into cells of reports; titles of the metrics.

For whoever shows or reads results as JSON (`report`, `top`, `bench`, `load`, `sim`, `cli`): rounding, units,
the mark for too few samples, escape of control characters, texts of simulator options, and access to JSON by
path (`at`, `leaves`).
"""

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from math import floor, isfinite, log10
from typing import Any, Final

from llmtap.metrics.catalogue import METRICS
from llmtap.metrics.statistics import SHARES, samples_needed

_PERCENTILE: Final = re.compile(r"p\d+")
MARK: Final = "*"
"""Beside a percentile of too few samples."""
FEW: Final = f"{MARK} too few samples (IETF 5.1.4.3); needed: " + ", ".join(
    f"p{p * 100:g} {samples_needed(p):,}" for p in SHARES.values()
)
"""The meaning of a marked cell."""
METRIC_TITLES: Final = {
    **{metric.name: metric.title for metric in METRICS},
    "e2e_same_length": "E2E, same length",
    "elapsed": "elapsed",
}
"""By their names in JSON, in the order of tables; the last two exist in comparisons only."""
_UNIT_WORDS_MAX: Final = 2


def at(document: object, *path: str) -> Any:
    """Return the value at a path of a JSON document; None where there is none."""
    for name in path:
        if not isinstance(document, Mapping):
            return None
        document = document.get(name)
    return document


def leaves(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a JSON document that are no objects, by their path; `before` begins each path."""
    for name, held in tree.items():
        if isinstance(held, Mapping):
            yield from leaves(held, f"{before}{name}.")
        else:
            yield f"{before}{name}", held


def number(value: float | None, digits: int = 4) -> str:
    """Round to significant digits, without an exponent; `-` for None."""
    if value is None or not isfinite(value):
        return "-"
    if not value or isinstance(value, int):
        return f"{value:,.0f}"
    places = max(0, digits - 1 - floor(log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def milliseconds(seconds: float | None) -> str:
    """Milliseconds to three significant digits, without an exponent."""
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
    """Return the names of the figures to show: `known`, and further percentiles before `max`, by title."""
    names = {name for figures in metrics.values() for name in figures or () if _PERCENTILE.fullmatch(name)}
    more = {name: f"p{float(f'{name[1:3]}.{name[3:] or 0}'):g}" for name in names - {*SHARES, *known}}
    order = {**SHARES, **{name: float(title[1:]) / 100 for name, title in more.items()}, "mean": 0, "max": 1}
    return dict(sorted({**known, **more}.items(), key=lambda one: order[one[0]]))


def figure_text(figures: Mapping[str, Any], name: str) -> str:
    """One statistic of a metric in ms, marked where it rests on too few samples."""
    text = milliseconds(figures.get(name))
    return text + (MARK if name in (figures.get("marks") or ()) and text != "-" else "")


def figures_text(figures: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """The sample count and several statistics."""
    return [f"{figures['n']:,}", *(figure_text(figures, name) for name in names)]


def is_marked(rows: Iterable[Iterable[str]]) -> bool:
    """Whether a table has a marked cell, so that FEW has to stand below it."""
    return any(cell.endswith(MARK) for row in rows for cell in row)


def plain_text(value: object) -> str:
    """Any JSON value; `-` for null, numbers by `number`."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(plain_text, value))
    return number(value) if isinstance(value, int | float) else str(value)


def bursts_said(n: float, label: str = "") -> tuple[str, str]:
    """Two sentences on a system whose chunks come in bursts; `label`: its name."""
    of, whose = (f"{label}: ", "its") if label else ("", "the")
    return (
        f"{of}{number(n, 2)} chunks come at a time, so {whose} time per token looks too short.",
        "Compare the time to first token and the longest pause.",
    )


def counted(n: int, one: str, more: str = "") -> str:
    """`1 file`, `2,000 files`."""
    return f"{n:,} {one if n == 1 else more or one + 's'}"


def joined(counts: Mapping[str, int], apart: str = ", ") -> str:
    """`refused 3, complete 1,000`."""
    return apart.join(f"{name} {n:,}" for name, n in counts.items())


def is_words(column: Iterable[str]) -> bool:
    """Whether a column of a table holds words, which are aligned left, and not figures with units."""
    return any(
        cell[:1].isalpha()
        or sum(word[:1].isalpha() for word in cell.partition("(")[0].split()) > _UNIT_WORDS_MAX
        for cell in column
    )


TIMES: Final = frozenset((
    "eps", "token_sla", "request_sla", "swap_token", "attention", "output_delay", "ttft", "tbt",
))  # fmt: skip
"""Options that are seconds."""
_UNITS: Final = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def option_text(name: str, value: Any) -> str:
    """An option's value as public JSON has it; seconds with the unit that suits, `-` for None."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    if name not in TIMES:
        return setting_value(value)
    unit, scale = next((one for one in _UNITS if value >= one[1]), _UNITS[0])
    return f"{number(value / scale, 6)} {unit}"


def setting_text(name: str, value: Any) -> str:
    return f"{name} {option_text(name, value)}"


def values_text(values: Iterable[Hashable], limit: int = 4) -> str:
    """Each value once, numbers ascending, or the range of many; empty where there are none."""
    distinct = ordered(dict.fromkeys(value for value in values if value is not None))
    if len(distinct) > limit and all(map(is_number, distinct)):
        return f"{setting_value(distinct[0])} to {setting_value(distinct[-1])}"
    return ", ".join(setting_value(value) for value in distinct)


def ordered(values: Iterable[Hashable]) -> list[Any]:
    """Numbers ascending, others in their order."""
    found: list[Any] = list(values)
    return sorted(found) if all(map(is_number, found)) else found


def setting_value(value: Hashable) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return number(value) if isinstance(value, int | float) else str(value)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
