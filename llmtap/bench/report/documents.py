"""Public JSON of a benchmark: the report of each test, and one document of all tests.

`report.py` makes them and reads them from a results folder; `llmtap bench --json` writes the document. Times
are in seconds.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from llmtap.bench.run.session import StoredRequests
from llmtap.bench.run.test import ChartSpec, ReportTable
from llmtap.bench.sut.clock_offset import ClockOffset
from llmtap.bench.sut.start import ModelLoad
from llmtap.bench.sut.sut import Sut
from llmtap.report.gates import RequirementRow


class BenchStep(msgspec.Struct, frozen=True, kw_only=True):
    """One load of a test, with its result."""

    name: str
    arm: str = ""
    """Configuration of the target (`[arms.NAME]`) to which it was sent; empty: the target without changes."""
    load: Mapping[str, Any] = {}
    """Rate or concurrency of the load, and further properties that the test adds (`Load.about`)."""
    cached: bool = False
    """Whether an earlier command measured the load, and this command only read the result."""
    requests: StoredRequests | None = None
    """File of the load's requests; None if they were not stored."""
    result: Mapping[str, Any]
    """Result as in `llmtap replay --json`, without its time series."""


class LoadTasks(msgspec.Struct, frozen=True):
    """End-to-end times of the tasks of a load (IETF 4.1.3).

    A task is a conversation, from its first submit to its last end; without conversations it is a request.
    Only tasks whose requests all ended well have a duration.
    """

    step: str
    """Name of the load."""
    task: str
    """What a task of this load is: `conversation` or `request`."""
    n: int
    """Number of tasks with a duration."""
    duration: Mapping[str, Any] | None
    """Statistics of the durations in seconds; None if no task has one."""


class BenchFinding(msgspec.Struct, frozen=True):
    """Finding of the load `step`: its code (`what`), such as `dispatch_lateness`, and its text (`says`)."""

    step: str
    what: str
    """Code of the finding."""
    says: str
    """The finding in one sentence."""
    share: float | UnsetType | None = UNSET
    """Share of the requests that the finding concerns, if the load's verdict has it."""


class BenchFigure(msgspec.Struct, kw_only=True):
    """Validity of one of a test's figures over all loads."""

    title: str
    """Name of the figure in texts."""
    state: str
    """Worst state over all loads (`FigureState`)."""
    requested: bool
    """Whether the test reports the figure (`BenchTest.figures`)."""
    error: float | None
    """Largest possible error in seconds, if known."""
    n: int
    """Number of loads that have the figure."""
    loads: dict[str, list[str]]
    """By state (not valid, doubtful): names of the loads in which the figure has this state."""


class ReportVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict on the figures of a test, from the verdicts of its loads."""

    valid: bool
    grade: str = ""
    """`valid`, `caution` or `not valid`."""
    failed: bool = False
    """Whether a load failed (requests failed unexpectedly, or none ended well), so that no figure counts."""
    missed: list[str] = []
    """Sentences about the objectives that no load met."""
    figures: dict[str, BenchFigure] = {}
    """By name of a figure: its validity."""
    says: str = ""
    """The verdict in one sentence; empty in results of earlier versions."""
    findings: list[BenchFinding]
    """Findings that make a requested figure not valid."""
    cautions: list[BenchFinding] = []
    """Findings that make a figure doubtful, or concern a figure that is not requested."""
    failures: list[BenchFinding] = []
    """Findings about failed requests."""
    unchecked: list[BenchFinding] = []
    """Checks of the validity that were not possible, with the reasons."""


class BenchRepeat(msgspec.Struct, frozen=True, kw_only=True):
    """Short form of the report of the second or a later run of a test."""

    test: str
    run: int = 1
    """Number of the run of the test, from 2."""
    seed: int
    began: str
    """Time of the run's start."""
    ended: str
    """Time of the run's end."""
    verdict: ReportVerdict


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of one run of a test."""

    test: str
    section: str
    """Section of the IETF draft."""
    title: str
    run: int = 1
    """Number of the run of the test, from 1."""
    quick: bool
    """Whether the test was shortened by `--quick`."""
    params: Mapping[str, Any]
    """Setup parameters of the test."""
    sut: Sut
    target: Mapping[str, Any]
    """Settings of the target. These and `arms` contain no secrets (`without_secrets`)."""
    arms: Mapping[str, Mapping[str, Any]]
    """Differences of each configured arm from the baseline, such as header fields."""
    seed: int
    warmup: str
    """Kind of warm-up that was requested, such as `auto`."""
    began: str
    """Time of the test's start."""
    ended: str
    """Time of the test's end."""
    versions: dict[str, str]
    """By name of a program: its version."""
    steps: list[BenchStep]
    warmups: list[Mapping[str, Any]]
    """Requests and times of each warm-up."""
    refused: int
    """Number of requests that guardrails refused, in all loads."""
    measurements: Mapping[str, Any]
    """Figures of the test (`TestResult.measurements`)."""
    headline: list[str] = []
    """Sentences with the main result."""
    tasks: list[LoadTasks] | None = None
    """Task times of each load; None unless the SUT is a compound system (IETF 4.1.3)."""
    tables: list[ReportTable]
    charts: list[ChartSpec]
    configuration: dict[str, str]
    """Lines of the configuration summary (IETF 5.1.5.1)."""
    round_trip: float | None = None
    """Network round trip to the target before the first load."""
    clock_offset: ClockOffset | None = None
    """Offset of this machine's clock; None: it is not synchronised."""
    model_load: ModelLoad | None = None
    """Times of the server's start; None: llmtap did not start it."""
    selftest: Mapping[str, Any] | None = None
    """Errors of the load generator's own times; None if no self-test was run."""
    notes: list[str]
    deviations: list[str]
    """Deviations from the draft's procedure, with the reasons."""
    main: str = ""
    """Name of the load that represents the test."""
    itl_option: str | None = None
    """ITL option of the test (IETF 4.6.3), such as `A`."""
    exact_requests: str | None = None
    """Where the requests are stored (IETF 4.3.3)."""
    forfeits: list[str] = []
    """Ids of the requirements that the test does not meet because of `--quick`."""
    verdict: ReportVerdict
    compliance: Mapping[str, Any] | None = None
    """JSON of a `Matrix` (`compliance/judge.py`); None if the test was stopped."""

    def to_repeat(self) -> BenchRepeat:
        """Return the members that a repeat of the test stores in a report of several runs."""
        return BenchRepeat(**{name: getattr(self, name) for name in BenchRepeat.__struct_fields__})


class DocumentFinding(msgspec.Struct, frozen=True):
    """`BenchFinding` with the name of the test."""

    test: str
    step: str
    """Name of the load; of the second run of a test, for example, `run-2/NAME`."""
    what: str
    """Code of the finding."""
    says: str
    """The finding in one sentence."""
    share: float | UnsetType | None = UNSET
    """Share of the requests that the finding concerns, if known."""


class DocumentVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict over all tests: their findings, and one sentence."""

    valid: bool
    grade: str
    """`valid`, `caution` or `not valid`."""
    failed: bool
    """Whether a load failed, so that no figure of its test counts."""
    missed: list[str]
    """Sentences about the objectives that no load met."""
    says: str
    """The verdict in one sentence."""
    findings: list[DocumentFinding]
    cautions: list[DocumentFinding]
    unchecked: list[DocumentFinding]
    """Checks of the validity that were not possible."""


class BenchSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a benchmark, without API keys and other secrets."""

    command: str
    """Command line, for a later user who repeats the benchmark."""
    made: str
    """Time at which the benchmark began."""
    results: str
    """Path of the results folder."""
    requested_tests: list[str] = msgspec.field(name="asked")
    """Names of the tests to run."""
    quick: bool
    """Whether all tests are shortened by `--quick`."""
    seed: int
    runs: int
    """Number of runs of each test."""
    warmup: str
    """Kind of warm-up that was requested, such as `auto`."""
    versions: dict[str, str]
    """By name of a program: its version."""
    target: Mapping[str, Any]
    """Settings of the requests to the system, from the bench file."""
    sut: Sut
    arms: Mapping[str, Mapping[str, Any]]
    """Differences of each configured arm from the baseline, such as header fields."""
    params: Mapping[str, Mapping[str, Any]]
    """By test: its setup parameters."""


class NotRun(msgspec.Struct, frozen=True, kw_only=True):
    """A test that could not be started, or ended with an error."""

    test: str
    reason: str = msgspec.field(name="why")
    """Error that prevented the test."""
    hint: str | None
    """What the user can do; None: nothing is known."""
    begun: bool
    """Whether the error occurred after the test had been started."""


class BenchDocument(BenchSetup, frozen=True, kw_only=True):
    """Settings, reports and verdict of a benchmark."""

    tests: list[BenchReport]
    """Reports of first runs."""
    repeats: list[BenchRepeat]
    """Short reports of second and later runs."""
    not_run: list[NotRun]
    verdict: DocumentVerdict
    stopped: bool | UnsetType = UNSET
    """Whether a signal stopped the benchmark; absent if the document was read from a results folder."""
    requirements: list[RequirementRow] | UnsetType = UNSET
    """Judged requirements (`--require`); absent if there are none."""
