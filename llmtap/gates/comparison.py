"""Result of a comparison of replays, as data.

`load/replay/comparison.py` computes and renders it, `regression.py` judges it. Its JSON is the output of
`llmtap report --compare --json`. Times are in seconds.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from llmtap.report.gates import JudgedChange


class ComparedResult(Struct, frozen=True):
    label: str
    target: str | None
    start: str | None
    verdict: Mapping[str, Any]


class ComparedFigure(Struct, frozen=True):
    """A figure of two results. A difference is b - a."""

    key: str
    """Name of the figure in `figures.py`."""
    name: str
    option: str | None
    """Option of ITL (IETF 4.6.3). Each option has its own rows, without a difference between two options."""
    figure: str
    unit: str
    n_a: int
    a: float | None
    """Value in the first result; None if only the other result has the figure."""
    n_b: int
    b: float | None
    few_a: bool
    """Whether the first result has too few samples (IETF 5.1.4.3)."""
    few_b: bool
    difference: float | None
    low: float | None
    """Lower end of the interval of the difference; None if there are too few samples for it."""
    high: float | None
    level: float
    share: float | None


class BurstCaution(Struct, frozen=True):
    """A result of which the chunks come in bursts, while those of the other result do not."""

    label: str
    metrics: tuple[str, ...]
    """Metrics that are misleading; they have no difference."""
    events_per_read: float


class SetUpDifference(Struct, frozen=True):
    """A setting that differs between two results."""

    name: str
    a: Any
    b: Any
    load: bool
    """Whether the setting decides which requests are sent, or when."""


class PairComparison(Struct, frozen=True):
    a: str
    """Label of the first result."""
    b: str
    figures: list[ComparedFigure]
    cautions: list[BurstCaution]
    set_up: list[SetUpDifference]


class ReplayComparison(Struct, frozen=True):
    """Comparison of the first result with each other one."""

    results: list[ComparedResult]
    comparisons: list[PairComparison]
    regression: list[JudgedChange] | UnsetType = UNSET
    """Judged changes (`--fail-if-worse`); absent if none were requested."""

    @property
    def same_load(self) -> bool:
        """Whether the loads of all results are the same."""
        return not any(row.load for pair in self.comparisons for row in pair.set_up)
