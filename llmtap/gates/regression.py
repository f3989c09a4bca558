"""Limit of a regression between two results: `report --compare --fail-if-worse [FIGURE:PERCENT]`.

A figure is worse if the whole interval of its difference is beyond the tolerance: the interval decides, not
the two values. The intervals of all judged figures have a joint level of 95 % (Bonferroni), so that a false
alarm is unlikely even with many figures. `judge_replays` judges comparisons of `load/replay/comparison.py`,
`judge_tests` those of `bench/report/compare.py`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec.structs import asdict

from llmtap.errors import ConfigError, ExitCode
from llmtap.gates.comparison import ReplayComparison
from llmtap.gates.figures import figure_named, validity_of
from llmtap.gates.requirements import load_failed
from llmtap.report.gates import Change, JudgedChange

_Json = Mapping[str, Any]
ALL_FIGURES: Final = "all"
"""Value of the option without figure and tolerance: judge the default figures with the default tolerance."""
DEFAULT_SHARE: Final = 0.05
ALPHA: Final = 0.05
DEFAULT_FIGURES: Final = frozenset(
    {
        *(f"{metric}_{figure}" for metric in ("ttft", "tpot", "e2e") for figure in ("p50", "p99")),
        "error_rate",
        "attainment",
    }
)
"""Figures of replays that are judged by default. A figure without a usable interval is skipped."""
_ITEM: Final = re.compile(r"(?:([A-Za-z][\w.]*):)?(\d+(?:\.\d+)?)%?")
_UNITS: Final = {"s": "ms", "share": "%"}
_COPIED: Final = ("a", "b", "difference", "low", "high", "level")
"""Fields that a `Change` has in common with the compared figure, so they are copied."""
_NO_INTERVAL: Final = "has no interval"
_OPEN: Final = "too few samples: the end of the interval that decides is open"


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Tolerated worsening of each named figure, as a share of its value in the first result."""

    shares: Mapping[str, float] = field(default_factory=dict)
    """Tolerance of each named figure. If none is named, the default figures are judged."""
    default_share: float = DEFAULT_SHARE
    """Tolerance of the figures that are not named."""

    @classmethod
    def parse(cls, texts: Sequence[str], place: str = "--fail-if-worse") -> "Tolerances":
        """Parse values of the option: `ttft_p99:5% tpot_p50:2`, `10%` or `all`. Raises ConfigError."""
        shares: dict[str, float] = {}
        default = DEFAULT_SHARE
        for word in " ".join(texts).replace(",", " ").split():
            if word == ALL_FIGURES:
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
        return self.shares.get(name, self.default_share)


def judge_replays(
    tolerances: Tolerances, results: Mapping[str, _Json], compare: Callable[[float], ReplayComparison]
) -> list[JudgedChange]:
    """Judge the change from the first result to each other result. `results`: JSON by label.

    `compare`: function that compares these results, with intervals of the given confidence level. Raises
    ConfigError if a named figure is not compared.
    """
    for name in tolerances.shares:
        figure_named(name, "--fail-if-worse")
    plain = replay_changes(compare(1 - ALPHA), results)
    main = [change.figure in DEFAULT_FIGURES for change in plain]
    indexes = list(_indexes_to_judge(plain, main, tolerances))
    joint = replay_changes(compare(1 - ALPHA / max(1, len(indexes))), results)
    return [_judged_change(joint[i], tolerances) for i in indexes]


def judge_tests(tolerances: Tolerances, document: _Json) -> list[JudgedChange]:
    """Judge the named figures in a document of benchmarks, or the main figures of each test."""
    compared = [(test, row) for test in document["tests"] for row in test["comparisons"]]
    changes = [
        Change(
            of=" ".join(filter(None, (row["b_system"], test["test"], row["step"]))),
            figure=row["figure"].lower().replace(",", "").replace(" ", "_"),
            unit=_UNITS.get(row["unit"], ""),
            better=row["better"],
            reason=(test["invalid"] or test["unlike"] or [""])[0],
            **{name: row[name] for name in _COPIED},
        )
        for test, row in compared
    ]
    indexes = _indexes_to_judge(changes, [row["key"] for _, row in compared], tolerances)
    return [_judged_change(changes[i], tolerances) for i in indexes]


def replay_changes(comparison: ReplayComparison, results: Mapping[str, _Json]) -> list[Change]:
    """Return the changes in a comparison. `results`: JSON by label."""
    rows = []
    for pair in comparison.comparisons:
        for row in pair.figures:
            figure = figure_named(row.key, "--fail-if-worse")
            validity = [(label, validity_of(figure, results[label])) for label in (pair.a, pair.b)]
            reasons = [f"{label}: {of.reason}" for label, of in validity if of.state == "not_valid"]
            rows.append(
                Change(
                    of=pair.b,
                    figure=row.key,
                    unit=figure.unit.value,
                    better=figure.better,
                    reason="; ".join(reasons),
                    **{name: getattr(row, name) for name in _COPIED},
                )
            )
    return rows


def _deciding_end(change: Change) -> float | None:
    """Return the better end of the interval, or None if it has none. A figure is worse if even this end
    exceeds the tolerance."""
    return change.low if change.better == "lower" else change.high


def _indexes_to_judge(rows: Sequence[Change], main: Sequence[bool], tolerances: Tolerances) -> Iterator[int]:
    """Yield the indexes of the rows to judge: the named figures, or the main figures with a usable interval.

    `main`: whether each row has a main figure. Raises ConfigError if a named figure is not compared.
    """
    known = dict.fromkeys(row.figure for row in rows)
    for name in tolerances.shares:
        if name not in known:
            hint = f"its figures are {', '.join(known)}"
            raise ConfigError("--fail-if-worse", f"the comparison has no figure {name!r}", hint)
    for i, row in enumerate(rows):
        by_default = not tolerances.shares and main[i] and _deciding_end(row) is not None
        if by_default or row.figure in tolerances.shares:
            yield i


def _judged_change(row: Change, tolerances: Tolerances) -> JudgedChange:
    share, end, reason = tolerances.share(row.figure), _deciding_end(row), row.reason
    if not reason and end is None:
        reason = _NO_INTERVAL if row.low is None and row.high is None else _OPEN
    if reason or end is None or row.a is None:
        state = "not_valid"
    else:
        worsening = end if row.better == "lower" else -end
        state = "worse" if worsening > share * abs(row.a) else "not_worse"
    fields = asdict(row) | {"reason": reason}
    return JudgedChange(**fields, tolerance=share, state=state)


def regression_code(
    verdicts: Iterable[_Json], rows: Sequence[JudgedChange], *, loads_differ: bool
) -> ExitCode:
    """Return the exit code of a comparison. If the loads differ, the comparison is not valid."""
    limited = any(row.figure == "error_rate" for row in rows)
    return ExitCode.of_run(
        failed=any(load_failed(verdict, limited=limited) for verdict in verdicts),
        missed=any(row.state == "worse" for row in rows),
        not_valid=loads_differ or not rows or any(row.state == "not_valid" for row in rows),
    )
