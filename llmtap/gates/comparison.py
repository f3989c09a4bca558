"""Result of a comparison of replays, as data.

`load/replay/comparison.py` computes and renders the comparison, and `regression.py` judges it. Its JSON is
the output of `llmtap report --compare --json`. Times are in seconds.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from llmtap.report.gates import JudgedChange


class ComparedResult(Struct, frozen=True):
    """One of the compared results."""

    label: str
    target: str | None
    start: str | None
    """Time at which the load began."""
    verdict: Mapping[str, Any]


class ComparedFigure(Struct, frozen=True):
    """A figure in the first result (a) and in another result (b). The difference is b - a."""

    key: str
    """Name of the figure in `figures.py`."""
    name: str
    """Name of the metric or scalar in tables."""
    option: str | None
    """Option by which ITL was computed (IETF draft, 4.6.3). Values of different options are not compared."""
    figure: str
    """Statistic of the metric, such as `p99`; `share`, `rate` or `count` for a scalar."""
    unit: str
    n_a: int
    """Number of samples in the first result."""
    a: float | None
    """Value in the first result; None if only the other result has the figure."""
    n_b: int
    """Number of samples in the other result."""
    b: float | None
    few_a: bool
    """Whether the first result has too few samples for this figure (IETF draft, 5.1.4.3)."""
    few_b: bool
    """Whether the other result has too few samples for this figure."""
    difference: float | None
    """b - a; None if either is missing."""
    low: float | None
    """Lower end of the interval of the difference; None if there are too few samples for it."""
    high: float | None
    """Upper end of the interval of the difference."""
    level: float
    """Confidence level of the interval, such as 0.95."""
    share: float | None
    """`difference` / `a`; None if either is None, or if `a` is 0."""


class BurstCaution(Struct, frozen=True):
    """Caution about a result whose chunks come in bursts, while the chunks of the other result do not."""

    label: str
    metrics: tuple[str, ...]
    """Metrics that bursts make misleading, so the comparison has no difference for them."""
    events_per_read: float
    """Number of events that arrive together, on average."""


class SetUpDifference(Struct, frozen=True):
    """A setting that differs between two results."""

    name: str
    a: Any
    """Value of the setting in the first result."""
    b: Any
    """Value of the setting in the second result."""
    load: bool
    """Whether the setting decides which requests are sent, or when."""


class PairComparison(Struct, frozen=True):
    """Comparison of two results, each named by its label."""

    a: str
    b: str
    figures: list[ComparedFigure]
    cautions: list[BurstCaution]
    set_up: list[SetUpDifference]
    """Settings that differ."""


class ReplayComparison(Struct, frozen=True):
    """Comparison of the first result with each of the other results."""

    results: list[ComparedResult]
    comparisons: list[PairComparison]
    regression: list[JudgedChange] | UnsetType = UNSET
    """Judged changes (`--fail-if-worse`); absent if none were requested."""

    @property
    def same_load(self) -> bool:
        """Whether the loads of all results are the same."""
        return not any(row.load for pair in self.comparisons for row in pair.set_up)
