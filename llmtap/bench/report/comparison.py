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
    """Comparison of a figure: value `a` of the base, value `b` of another system, and the difference b - a.

    Times are in seconds. The fields from `n` to `method` are those of `metrics.comparison.Comparison`.
    """

    a_system: str
    b_system: str
    step: str | None
    """Name of the load; None: the figure is of the whole test."""
    figure: str
    unit: str
    better: str
    """`lower` or `higher`: which value is the better one."""
    key: bool
    """Whether it is a main figure of the test."""
    samples: str
    """Samples that are compared: `runs` or `requests`."""
    doubtful: bool
    """Whether a system has fewer samples than the figure needs (IETF 5.1.4.3)."""
    level: float = LEVEL
    """Confidence level of the interval from `low` to `high`."""
    n: int | UnsetType = UNSET
    """Number of samples of the base (`n`), and of the other system (`m`)."""
    m: int | UnsetType = UNSET
    """Number of samples of the other system."""
    a: float | None = None
    """Value of the system `a_system`."""
    b: float | None = None
    """Value of the system `b_system`."""
    difference: float | None = None
    low: float | None = None
    """Lower end of the interval of `difference`."""
    high: float | None = None
    """Upper end of the interval of `difference`."""
    p: float | None = None
    """p-value of a test whether both systems are equal."""
    effect: float | UnsetType | None = UNSET
    """Size of the difference without unit; `effect_name` says which measure."""
    effect_name: str | UnsetType = UNSET
    """Name of the measure of `effect`."""
    paired: bool | UnsetType = UNSET
    """Whether equal requests of both systems were compared pair by pair."""
    method: str | None = None
    """Name of the statistical test."""
    p_adjusted: float | None = None
    """`p`, adjusted for the number of figures that are compared."""
    share: float | None = None
    """Difference as a share of `a`."""
    finding: str = "not tested"
    """What follows from the test, in words."""

    def discard_result(self) -> None:
        """Remove difference, interval and p-value, because the loads differ or bursts distort the figure."""
        self.difference = self.low = self.high = self.p = self.method = None


class BurstySystem(msgspec.Struct, frozen=True):
    """A system whose chunks come in larger bursts than another's, so the figures `metrics` are not tested."""

    system: str
    against: str
    """Label of the other system."""
    steps: list[str]
    """Names of the loads with bursts."""
    metrics: tuple[str, ...]
    """Names of the figures that are not tested."""
    events_per_read: float
    """Largest number of events per read in these loads."""


class ComparedSystem(msgspec.Struct, frozen=True):
    """Settings of a system, number and seeds of its runs, and whether all its runs are valid."""

    label: str
    runs: int
    """Number of runs."""
    sut: Mapping[str, Any]
    """Description of the system under test, from the bench file."""
    target: Mapping[str, Any]
    """Settings of the requests to the system, from the bench file."""
    quick: bool
    """Whether a run was shortened by `--quick`."""
    seeds: list[int]
    valid: bool
    """Whether all runs are valid."""


class NormalisedThroughput(msgspec.Struct, frozen=True):
    """Output tokens per GPU-second and per unit of money (IETF 6.2); None if GPUs or price are unknown."""

    label: str
    output_tps_max: float
    """Highest output rate of any load, in tokens per second."""
    tokens_per_gpu_second: float | None
    tokens_per_currency: float | None
    """Output tokens per unit of money, by the price of an hour."""
    currency: str | None
    method: str = "the highest output rate of any load, the median of runs; by GPUs, by an hour's price"


class TestComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of systems in one test."""

    test: str
    section: str
    """Section of the IETF draft."""
    title: str
    unlike: list[str]
    """Differences between parameters or loads; figures of loads that differ are not tested."""
    invalid: list[str]
    """Invalid runs, with the reason."""
    cautions: list[BurstySystem]
    """Systems whose bursts of chunks distort figures."""
    systems: list[ComparedSystem]
    comparisons: list[FigureComparison]
    normalised: list[NormalisedThroughput]
    """Throughput of each system by GPUs and by cost."""
    checklist: Mapping[str, Any]
    """Verdicts on the requirements for comparisons (`judge_comparison`)."""
    notes: list[str]
    tables: list[ReportTable]
    charts: list[ChartSpec]


class ResultsFolder(msgspec.Struct, frozen=True):
    """A results folder that is compared."""

    label: str
    """Name of the system in the comparison."""
    results: str
    """Path of the folder."""
    tests: list[str]


class LeftOutTest(msgspec.Struct, frozen=True):
    """A test that is not compared, because not all folders contain it."""

    test: str
    only: list[str]
    """Labels of the folders that contain it."""


class ResultsComparison(msgspec.Struct, frozen=True):
    """Comparison of results folders with the first one, in every test that all of them contain."""

    systems: list[ResultsFolder]
    tests: list[TestComparison]
    left_out: list[LeftOutTest]
    regression: list[JudgedChange] | UnsetType = UNSET
    """Judged changes (`--fail-if-worse`); absent if none were requested."""
