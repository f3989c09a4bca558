"""Limit of a regression between two results: `report --compare --fail-if-worse [FIGURE:PERCENT]`.

A figure is worse if the whole interval of its difference is beyond the tolerance: the interval decides, not
the two values. The intervals of all judged figures have a joint level of 95 % (Bonferroni), so that a false
alarm is unlikely even with many figures. `judge_replays` judges comparisons of `load/replay/comparison.py`,
`judge_tests` those of `bench/report/compare.py`; both return public JSON.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from llmtap.errors import ConfigError, ExitCode
from llmtap.gates.figures import figure_named, validity_of
from llmtap.gates.requirements import load_failed

_Json = Mapping[str, Any]
EVERY: Final = "all"
"""Value of the option if the user names no figure."""
DEFAULT_SHARE: Final = 0.05
ALPHA: Final = 0.05
DEFAULT_FIGURES: Final = frozenset(
    {
        *(f"{metric}_{figure}" for metric in ("ttft", "tpot", "e2e") for figure in ("p50", "p99")),
        "error_rate", "attainment",
    }
)  # fmt: skip
"""Figures of replays that are judged if the user names none. Figures without a
usable interval are skipped."""
_ITEM: Final = re.compile(r"(?:([A-Za-z][\w.]*):)?(\d+(?:\.\d+)?)%?")
_UNITS: Final = {"s": "ms", "share": "%"}
_NO_INTERVAL: Final = "has no interval"
_OPEN: Final = "too few samples: the end of the interval that decides is open"


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Tolerated change of each named figure as a share of its value in the first result."""

    shares: Mapping[str, float] = field(default_factory=dict)
    """Tolerance by figure. If it is empty, `DEFAULT_FIGURES` or the main figures of benchmarks are judged."""
    default: float = DEFAULT_SHARE

    @classmethod
    def parse(cls, texts: Sequence[str], place: str = "--fail-if-worse") -> "Tolerances":
        """Parse `ttft_p99:5% tpot_p50:2`, `10%` or `all`. Raises ConfigError."""
        shares: dict[str, float] = {}
        default = DEFAULT_SHARE
        for word in " ".join(texts).replace(",", " ").split():
            if word == EVERY:
                continue
            match = _ITEM.fullmatch(word)
            if match is None:
                hint = "such as ttft_p99:5%, or 5% for every figure"
                raise ConfigError(place, f"expected FIGURE:PERCENT, got {word!r}", hint)
            if match[1] is None:
                default = float(match[2]) / 100
            else:
                shares[match[1]] = float(match[2]) / 100
        return cls(shares, default)

    def share(self, name: str) -> float:
        return self.shares.get(name, self.default)


def judge_replays(
    tolerances: Tolerances, results: Mapping[str, _Json], compare: Callable[..., _Json]
) -> list[dict[str, Any]]:
    """Judge the change of each result from the first result. `results`: by label.

    `compare`: the function `compare_replays`, called with the level of its intervals. Raises ConfigError if a
    named figure is not compared.
    """
    for name in tolerances.shares:
        figure_named(name, "--fail-if-worse")
    plain = _replay_rows(compare(results), results)
    chosen = {id(row) for row in _rows_to_judge(plain, tolerances)}
    places = [i for i, row in enumerate(plain) if id(row) in chosen]
    together = _replay_rows(compare(results, level=1 - ALPHA / max(1, len(places))), results)
    return [_judged_change(together[i], tolerances) for i in places]


def judge_tests(tolerances: Tolerances, document: _Json) -> list[dict[str, Any]]:
    """Judge the comparisons in a document of benchmarks: the named figures, or the main
    figures of each test."""
    rows = [
        {
            "of": " ".join(filter(None, (row["b_system"], test["test"], row["step"]))),
            "figure": row["figure"].lower().replace(",", "").replace(" ", "_"),
            "unit": _UNITS.get(row["unit"], ""), "better": row["better"], "main": row["key"],
            "reason": (test["invalid"] or test["unlike"] or [""])[0],
            **{name: row[name] for name in ("a", "b", "difference", "low", "high", "level")},
        }
        for test in document["tests"]
        for row in test["comparisons"]
    ]  # fmt: skip
    return [_judged_change(row, tolerances) for row in _rows_to_judge(rows, tolerances)]


def _replay_rows(document: _Json, results: Mapping[str, _Json]) -> list[dict[str, Any]]:
    rows = []
    for comparison in document["comparisons"]:
        for row in comparison["figures"]:
            figure = figure_named(row["key"], "--fail-if-worse")
            validity = [
                (label, validity_of(figure, results[label])) for label in (comparison["a"], comparison["b"])
            ]
            reasons = [f"{label}: {of.reason}" for label, of in validity if of.state == "not_valid"]
            rows.append({
                "of": comparison["b"], "figure": row["key"], "unit": figure.unit.value,
                "better": figure.better, "main": row["key"] in DEFAULT_FIGURES,
                "reason": "; ".join(reasons), "level": row["level"],
                **{name: row[name] for name in ("a", "b", "difference", "low", "high")},
            })  # fmt: skip
    return rows


def _rows_to_judge(rows: Sequence[dict[str, Any]], tolerances: Tolerances) -> Iterator[dict[str, Any]]:
    """Yield the rows to judge: the named figures, or the main figures with a usable interval.

    Raises ConfigError if a named figure is not compared.
    """
    known = dict.fromkeys(row["figure"] for row in rows)
    for name in tolerances.shares:
        if name not in known:
            hint = f"its figures are {', '.join(known)}"
            raise ConfigError("--fail-if-worse", f"the comparison has no figure {name}", hint)
    for row in rows:
        by_default = not tolerances.shares and row["main"] and _deciding_end(row) is not None
        if by_default or row["figure"] in tolerances.shares:
            yield row


def _deciding_end(row: _Json) -> float | None:
    """Return the end of the interval that decides: the one at which the figure has become worse the least."""
    end: float | None = row["low"] if row["better"] == "lower" else row["high"]
    return end


def _judged_change(row: dict[str, Any], tolerances: Tolerances) -> dict[str, Any]:
    """Return public JSON: the row, with `tolerance` (as a share of `a`), `state` and `reason` added."""
    share, end, reason = tolerances.share(row["figure"]), _deciding_end(row), row["reason"]
    if not reason and end is None:
        reason = _NO_INTERVAL if row["low"] is None and row["high"] is None else _OPEN
    if reason or end is None:
        state = "not_valid"
    else:
        worsening = end if row["better"] == "lower" else -end
        state = "worse" if worsening > share * abs(row["a"]) else "not_worse"
    row = {name: value for name, value in row.items() if name != "main"}
    return {**row, "tolerance": share, "state": state, "reason": reason}


def regression_code(verdicts: Sequence[_Json], rows: Sequence[_Json], *, differ: bool) -> ExitCode:
    """Return the exit code of a comparison. `differ`: whether the loads differ."""
    limited = any(row["figure"] == "error_rate" for row in rows)
    return ExitCode.of_run(
        failed=any(load_failed(verdict, limited=limited) for verdict in verdicts),
        missed=any(row["state"] == "worse" for row in rows),
        not_valid=differ or not rows or any(row["state"] == "not_valid" for row in rows),
    )
