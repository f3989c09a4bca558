"""Declaration of a benchmark test (`BenchTest`), its result with tables and charts, and the list of tests.

Each test is a module of `bench/tests` with one `BenchTest`, whose `run` returns a `TestResult`. `mixes.py` in
the same folder makes loads for two of the tests. `TESTS` has names, sections and titles; `test_named` imports
a test's module on demand. `test_lines` returns the lines of `llmtap bench list`: parameters with meanings and
defaults.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

import msgspec

from llmtap.bench.run.pace import ExpectedLoads
from llmtap.errors import ConfigError
from llmtap.options.fields import opt, options_of, value_text
from llmtap.units import Duration

P = TypeVar("P", bound=msgspec.Struct)
Count = Annotated[int, msgspec.Meta(ge=1)]
Rate = Annotated[float, msgspec.Meta(gt=0)]
"""Rate in requests per second."""
Workload = Annotated[str, opt("reference workload (4.3.2), or FILE.toml of your own")]
ArrivalProcess = Annotated[str, opt("arrival process: poisson, uniform, gamma:cv=2 (bursty), ...")]
SlotsMax = Annotated[int, opt("highest concurrency of the search for capacity", ge=1)]
OutputTokens = Annotated[Count | None, opt("tokens of each response; default: the workload's lengths")]
TtftBound = Annotated[Duration | None, opt("SLO: largest P99 of TTFT")]
TpotBound = Annotated[Duration | None, opt("SLO: largest P99 of TPOT")]


class ReportTable(msgspec.Struct, frozen=True):
    """Table of a report, with formatted cells."""

    caption: str
    """Title above the table. For a table of the draft, it begins with its number: `Table 1: TTFT Results`."""
    heads: list[str]
    """Heads of the columns."""
    rows: list[list[str]]


class ChartSeries(msgspec.Struct, frozen=True):
    """One line or set of points of a chart; None in `y` is a gap."""

    name: str
    x: list[float | int | str]
    y: list[float | int | None]
    low: list[float | None] = []
    """Lower ends of the intervals around `y` (`high`: upper ends); empty without intervals."""
    high: list[float | None] = []
    """Upper ends of the intervals around `y`."""


class ChartMark(msgspec.Struct, frozen=True):
    """Labelled position on the x axis of a chart."""

    x: float | int
    says: str
    """Label of the position."""


class ChartSpec(msgspec.Struct, frozen=True):
    """Declaration of a chart of a report."""

    title: str
    kind: Literal["line", "cdf", "histogram", "bars", "steps", "points"]
    x_title: str
    y_title: str
    series: list[ChartSeries]
    marks: list[ChartMark] = []
    """Labelled positions on the x axis, such as the knee."""
    log_x: bool = False
    """Whether the x axis is logarithmic."""
    log_y: bool = False


@dataclass(slots=True)
class TestResult:
    """Result of one run of a test; the results of its loads are stored separately."""

    measurements: msgspec.Struct | None = None
    """Figures of the test, with times in seconds and shares from 0 to 1. Unknown values are None."""
    tables: list[ReportTable] = field(default_factory=list)
    charts: list[ChartSpec] = field(default_factory=list)
    configuration: dict[str, str] = field(default_factory=dict)
    """Lines of the configuration summary (IETF 5.1.5.1) of this test."""
    notes: list[str] = field(default_factory=list)
    deviations: list[str] = field(default_factory=list)
    """Deviations from the draft's procedure, with the reasons (IETF C.1 Notes, C.2 part 5)."""
    main: str = ""
    """Name of the load that represents the test in the minimum report (IETF C.1)."""
    missed_objectives: list[str] = field(default_factory=list)
    """Sentences about the objectives that no load met."""
    itl_option: str | None = None
    """ITL option of this test (IETF 4.6.3), such as `A` or `A + C`; None: it follows from the loads."""
    headline: list[str] = field(default_factory=list)
    """Sentences with the main result, for the top of reports; empty: the page shows the cells of tables."""

    def measurements_to_dict(self) -> Mapping[str, Any]:
        return {} if self.measurements is None else msgspec.to_builtins(self.measurements)


@dataclass(frozen=True, slots=True)
class BenchTest(Generic[P]):
    """Declaration of a test with parameters of type `P`."""

    name: str
    """Name on the command line: `ttft`, `prefix-cache`."""
    params: type[P]
    """Struct of the setup parameters, with descriptions. A required parameter has the default None; `check`
    raises ConfigError if the user has not set it."""
    run: Callable[[Any, P], Awaitable[TestResult]]
    """Function that measures in a `BenchSession` with these parameters, and returns the result."""
    figures: tuple[str, ...]
    """Figures that the test reports, by their names in the verdicts of loads (`load/replay/verdict.py`)."""
    expected: Callable[[Any, P], ExpectedLoads]
    """Function that returns the loads that the test is expected to send, to estimate its duration."""
    overloads: bool = False
    """Whether the test goes to the limits of the server, where requests are expected to fail."""
    quick: Mapping[str, Any] = field(default_factory=dict)
    """By parameter: its default value with `--quick`, where this differs."""
    forfeits: tuple[str, ...] = ()
    """Ids of requirements (compliance/) that a quick run does not meet."""
    check: Callable[[Any, P], None] | None = None
    """Function, called before anything is sent, that raises ConfigError if the test cannot run."""
    arms: tuple[str, ...] = ()
    """Names of required configurations (`[arms.NAME]` of the bench file); `check` reports a missing one."""
    arms_any: tuple[str, ...] = ()
    """Names of further configurations; at least one of them is required."""

    @property
    def section(self) -> str:
        return TESTS[self.name][0]

    @property
    def title(self) -> str:
        return TESTS[self.name][1]


TESTS: Final = {
    "ttft": ("5.1", "Time to First Token"),
    "throughput": ("5.2", "Output Token Throughput"),
    "tradeoff": ("5.3", "Throughput-Latency Tradeoff"),
    "itl": ("5.4", "Inter-Token Latency Distribution"),
    "capacity": ("5.5", "Concurrent Request Capacity"),
    "fairness": ("5.6", "Scheduling Fairness"),
    "prefix-cache": ("5.7", "Prefix Cache Effectiveness"),
    "memory-pressure": ("5.8", "Memory Pressure Behavior"),
    "long-context": ("5.9", "Long Context Scaling"),
    "guardrail-overhead": ("5.10", "Guardrail Overhead"),
}
"""By name of the test: section and title in the IETF draft. The test's module has this name, with `_` for
`-`, and declares the test as `TEST`."""


def test_named(name: str) -> "BenchTest[Any]":
    """Return the test with this name. Raises ConfigError if there is none."""
    if name not in TESTS:
        raise ConfigError("TEST", f"there is no test {name!r}", f"expected one of {', '.join(TESTS)}, all")
    module = import_module(f"llmtap.bench.tests.{name.replace('-', '_')}")
    test: BenchTest[Any] = module.TEST
    return test


def test_lines(names: Sequence[str] | None = None) -> Iterator[str]:
    """Yield lines with the parameters of tests: meanings, defaults, and values with `--quick`."""
    for name in TESTS if names is None else names:
        test = test_named(name)
        yield f"{test.name}: {test.title} (IETF draft, {test.section})"
        if test.arms:
            needed = " and ".join(f"[arms.{arm}]" for arm in test.arms)
            optional = ", ".join(f"[arms.{arm}]" for arm in test.arms_any)
            yield f"  needs {needed}" + (f", and one or more of {optional}" if optional else "")
        defaults, width = test.params(), max(map(len, test.params.__struct_fields__))
        for option in options_of(test.params):
            default, name = getattr(defaults, option.name), option.name
            notes = [] if default is None else [f"default: {value_text(default)}"]
            notes += [f"--quick: {value_text(test.quick[name])}"] if name in test.quick else []
            shown = f" ({'; '.join(notes)})" * bool(notes)
            yield f"  {name:{width}}  {option.meaning_with_choices}{shown}"
        yield ""
