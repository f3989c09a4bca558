"""What a test of the draft is here, and what it finds: figures, tables in the draft's columns, charts."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec

if TYPE_CHECKING:
    from llmtap.bench.run.session import BenchSession

__all__ = ["BenchTest", "ChartSeries", "ChartSpec", "Mark", "ReportTable", "TestResult"]

P = TypeVar("P", bound=msgspec.Struct)


class ReportTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table as people read it; figures to compute with are in `Found.measurements`."""

    caption: str
    """Which of the draft's it is, where it is one: `Table 1: TTFT Results`."""
    heads: list[str]
    rows: list[list[str]]


class ChartSeries(msgspec.Struct, frozen=True, kw_only=True):
    """A line, or points, of a chart."""

    name: str
    x: list[float | str]
    y: list[float | None]
    low: list[float | None] = []
    """With `high`, the interval around each y; empty where there is none."""
    high: list[float | None] = []


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A place on the x axis that has a name: the knee, the limit of an SLO."""

    x: float
    says: str


class ChartSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be drawn; how is `report/`'s."""

    title: str
    kind: Literal["line", "cdf", "histogram", "bars", "steps", "points"]
    x_title: str
    y_title: str
    series: list[ChartSeries]
    marks: list[Mark] = []
    log_x: bool = False
    log_y: bool = False


@dataclass(slots=True)
class TestResult:
    """What a test came to."""

    measurements: dict[str, Any] = field(default_factory=dict)
    """By name, as public JSON: times in seconds, shares 0 to 1, None where it could not be measured. A figure
    with an interval is `{"value": .., "low": .., "high": .., "n": .., "level": 0.95}`."""
    tables: list[ReportTable] = field(default_factory=list)
    charts: list[ChartSpec] = field(default_factory=list)
    configuration: dict[str, str] = field(default_factory=dict)
    """Lines of the configuration summary (5.1.5.1) that only this test knows."""
    notes: list[str] = field(default_factory=list)
    """What a reader has to know to read the figures."""
    deviations: list[str] = field(default_factory=list)
    """Where the procedure was left, and why: the report lists them (C.1 Notes, C.2 part 5)."""
    itl_option: str | None = None
    """By which option of 4.6.3 its gaps were taken, `A` or `A + C`; None: as the loads' own results say."""


@dataclass(frozen=True, slots=True)
class BenchTest(Generic[P]):
    """One test of seed 000, section 5."""

    name: str
    """As the command line has it: `ttft`, `prefix-cache`."""
    section: str
    """`5.1`"""
    title: str
    """The draft's own: `Time to First Token`."""
    params: type[P]
    """Its setup parameters. Every field has a `Meta(description=...)`; one that the draft wants defined and
    that has no sensible default is `T | None = None` and is named by `check` when it is missing."""
    run: "Callable[[BenchSession, P], Awaitable[TestResult]]"
    quick: Mapping[str, Any] = field(default_factory=dict)
    """Parameters as `--quick` has them, where the user sets none."""
    forfeits: tuple[str, ...] = ()
    """Ids of requirements (compliance/) that `quick` gives up."""
    check: "Callable[[BenchSession, P], None] | None" = None
    """Raises ConfigError, which names the parameter, before anything is sent."""
    arms: tuple[str, ...] = ()
    """Configurations of the SUT that it compares, by name: a `[arms.NAME]` each in the bench file. `check`
    says what is missing where one of them is."""
    arms_any: tuple[str, ...] = ()
    """More of them, of which it wants at least one."""
