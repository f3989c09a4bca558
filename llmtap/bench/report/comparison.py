"""Comparison of results folders as data: the public JSON of `llmtap report --compare --json` for benchmarks.

`compare.py` computes it, `report/bench.py` renders it.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from llmtap.bench.run.test import ChartSpec, ReportTable
from llmtap.report.gates import JudgedChange

ALPHA: Final = 0.05
LEVEL: Final = 1 - ALPHA


class FigureComparison(msgspec.Struct, kw_only=True):
    """Comparison of a figure: value `a` of the base, value `b`, and the difference b - a. Times are in
    seconds."""

    a_system: str
    b_system: str
    step: str | None
    """Name of the load; None: the figure is of the whole test."""
    figure: str
    unit: str
    better: str
    key: bool
    """Whether the test is about this figure."""
    samples: str
    """Samples that are compared: `runs` or `requests`."""
    doubtful: bool
    level: float = LEVEL
    n: int | UnsetType = UNSET
    m: int | UnsetType = UNSET
    a: float | None = None
    b: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    effect: float | UnsetType | None = UNSET
    effect_name: str | UnsetType = UNSET
    paired: bool | UnsetType = UNSET
    method: str | None = None
    p_adjusted: float | None = None
    share: float | None = None
    finding: str = "not tested"

    def discard(self) -> None:
        """Remove the result of the test, if the loads differ or the figure misleads."""
        self.difference = self.low = self.high = self.p = self.method = None


class BurstySystem(msgspec.Struct, frozen=True):
    """A system of which the chunks come in bursts compared with another; figures of `metrics` are not
    tested."""

    system: str
    against: str
    steps: list[str]
    metrics: tuple[str, ...]
    events_per_read: float


class ComparedSystem(msgspec.Struct, frozen=True):
    label: str
    runs: int
    sut: Mapping[str, Any]
    target: Mapping[str, Any]
    quick: bool
    seeds: list[int]
    valid: bool


class NormalisedThroughput(msgspec.Struct, frozen=True):
    """Output tokens per GPU-second and per unit of money; None if undeclared (6.2)."""

    label: str
    output_tps_max: float
    tokens_per_gpu_second: float | None
    tokens_per_currency: float | None
    currency: str | None
    method: str = "the highest output rate of any load, the median of runs; by GPUs, by an hour's price"


class TestComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of systems in one test."""

    test: str
    section: str
    title: str
    unlike: list[str]
    """Differences between parameters or loads; figures of loads that differ are not tested."""
    invalid: list[str]
    """Invalid runs, with the reason."""
    cautions: list[BurstySystem]
    systems: list[ComparedSystem]
    comparisons: list[FigureComparison]
    normalised: list[NormalisedThroughput]
    checklist: Mapping[str, Any]
    """Compliance with 6.4, as a matrix."""
    notes: list[str]
    tables: list[ReportTable]
    charts: list[ChartSpec]


class ResultsFolder(msgspec.Struct, frozen=True):
    label: str
    results: str
    tests: list[str]


class LeftOutTest(msgspec.Struct, frozen=True):
    """A test that not all folders contain."""

    test: str
    only: list[str]


class ResultsComparison(msgspec.Struct, frozen=True):
    """Comparison of results folders with the first one, in every test that all of them contain."""

    systems: list[ResultsFolder]
    tests: list[TestComparison]
    left_out: list[LeftOutTest]
    regression: list[JudgedChange] | UnsetType = UNSET
    """Judged changes (`--fail-if-worse`); absent if none were requested."""
