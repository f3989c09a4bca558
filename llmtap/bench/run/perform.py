"""Run benchmark tests one by one: check parameters, resume or refuse earlier results, measure, and report.

`cli/bench.py` calls `Bench.run` with the names of tests; it starts the server if the bench file has a
command, runs the tests and their self-tests, and returns the JSON document of all reports; each report is
also stored in the results folder. Parameters, workloads, arrivals and servers are checked before anything is
sent. If several tests are chosen, a test that cannot run is checked again before its turn, because an earlier
test can measure a missing value; it is skipped if it still cannot run. Results with equal parameters are
resumed; results with other parameters are replaced only with `--again`.
"""

import hashlib
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_type_hints

import msgspec

from llmtap.bench.compliance.evidence import plural
from llmtap.bench.report.documents import (
    BenchDocument,
    BenchFinding,
    BenchReport,
    BenchSetup,
    NotRun,
)
from llmtap.bench.report.report import (
    SETUP_FILE,
    date_of,
    document_of,
    is_results_folder,
    report_of,
    versions,
)
from llmtap.bench.run.figures import Cell, attribute_cell, latency_columns, table_of
from llmtap.bench.run.levels import Latencies, latency_rows
from llmtap.bench.run.pace import Pace
from llmtap.bench.run.session import (
    BASELINE,
    RESULT,
    BenchSession,
    Folder,
    Interrupted,
    SessionWatcher,
    request_kind,
)
from llmtap.bench.run.test import BenchTest, TestResult, test_named
from llmtap.bench.selftest import run_selftest, selftest_load
from llmtap.bench.sut.clock_offset import read_clock_offset
from llmtap.bench.sut.start import ModelLoad, model_load_text, running_server
from llmtap.bench.sut.sut import BenchFile, params_document, without_secrets
from llmtap.clock import Clock, SystemClock
from llmtap.errors import ConfigError
from llmtap.json_types import json_value
from llmtap.load.replay.plan import AT_ONCE
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.latency import DEFAULT_BENEFIT
from llmtap.report.values import leaves
from llmtap.units import to_seconds
from llmtap.workload.arrivals import parse_arrivals
from llmtap.workload.registry import is_workload, workload_named

TEST_SETUP_FILE: Final = "asked.json"
SERVER_LOG: Final = "server.log"
DIFFERENCES_MAX: Final = 3
ORDER: Final = (
    "throughput",
    "ttft",
    "tradeoff",
    "itl",
    "capacity",
    "fairness",
    "prefix-cache",
    "memory-pressure",
    "long-context",
    "guardrail-overhead",
)
"""Order of the tests. Throughput comes first, because the loads of most tests are a share of its result."""
RUN_SEED_STEP: Final = 1_000_000
"""Difference between the seeds of two successive runs. Loads of a run use the seeds in between."""
_FILE_KEYS: Final = {
    "--endpoint": "target.endpoint",
    "--tokenizer": "target.tokenizer",
    "--model": "target.model",
    "--api-key-env": "target.key_env",
    "--header": "target.headers",
    "--ca": "target.ca",
    "--server": "target.server",
    "--metrics": "target.metrics",
}
"""By option that an error of the load generator names: the key of the bench file with the same meaning."""
_STOPPED_COLUMNS: Final[Mapping[str, Cell]] = {
    "Load": attribute_cell("name"),
    "Requests": attribute_cell("n", ","),
    **latency_columns("ttft p50", "ttft p99", "tpot p50", "tpot p99", "e2e p50", "e2e p99"),
}


class _StoppedLoad(Latencies, frozen=True, kw_only=True):
    """Row of the table of a test that was stopped: latencies of one complete load."""

    name: str
    n: int


@dataclass(slots=True)
class Bench:
    """Runs of one or more tests on one system. `stop` can be called from a signal handler at any time."""

    file: BenchFile
    folder: Folder
    watcher: SessionWatcher
    seed: int = 42
    quick: bool = False
    """Whether all tests are shortened by `--quick`."""
    warmup: str = "auto"
    reader: Benefit = DEFAULT_BENEFIT
    """Reading speed of the assumed user, for smooth goodput."""
    runs: int = 1
    """Number of independent runs of each test. Each has its own warm-up, and a seed derived from `seed`."""
    first_run: int = 1
    """Number of the first run to perform; earlier runs are in the folder."""
    again: bool = False
    """Remove all earlier runs of a test. Otherwise, earlier results with other parameters are an error."""
    command: str = ""
    """Command line, for the report."""
    selftest: bool = True
    """Measure the error of llmtap's own times after each test, at its densest load."""
    clock: Clock = field(default_factory=SystemClock)
    on_report: Callable[[BenchDocument], None] = lambda document: None
    """Function called with the document after each test."""
    _session: BenchSession | None = None
    """Session of the running test; `stop` stops it."""
    _model_load: ModelLoad | None = None
    _stopped: bool = False
    """Whether a signal stopped the benchmark."""
    pace: Pace = field(default_factory=Pace)
    """Measured durations, to estimate the remaining time. Two systems measured in turn share one `Pace`."""
    runs_after: int = 0
    """Number of runs of the same tests that other `Bench` objects perform after this one."""
    _queue: list[tuple[BenchTest[Any], int]] = field(default_factory=list)
    """The current test with the number of its run, and the tests that follow."""
    _tests: Sequence[BenchTest[Any]] = ()
    _excluded: set[str] = field(default_factory=set)
    """Names of tests that cannot run, even after other tests have measured missing values."""

    def stop(self) -> None:
        self._stopped = True
        if self._session is not None:
            self._session.stop()

    async def run(self, names: Sequence[str]) -> BenchDocument:
        """Run the tests and return the document (`bench/report/report.py`), which is also in the folder.

        Raises:
            ConfigError: no test can run, or the folder has results with other parameters.
            Interrupted: the run was stopped before anything was measured. If it is stopped later, `run`
                returns the document with `stopped` set.
        """
        path = self.folder.path
        others = {entry.name for entry in path.iterdir()} - {SERVER_LOG} if path.is_dir() else ()
        if others and not is_results_folder(path):
            raise ConfigError(
                "--results",
                f"{path} is neither empty nor a results folder of llmtap bench",
                "use a new or an empty folder",
            )
        tests = [test_named(name) for name in sorted(names, key=ORDER.index)]
        not_ready: dict[str, ConfigError] = {}
        for test in tests:
            session, params = self._prepare(test)
            _check_workload_and_arrivals(test, params)
            try:
                _check_test(test, session, params)
            except ConfigError as exc:
                not_ready[test.name] = exc
            if not self.again:
                _refuse_other_setup(session.folder, setup_document(test, params, session))
        if len(not_ready) == len(tests):
            raise next(iter(not_ready.values()))
        command, log = self.file.sut.start, path / SERVER_LOG
        if not command or self._stopped:
            return await self._run_all(tests, not_ready)

        def check() -> None:
            if self._stopped:
                raise Interrupted(
                    "a signal stopped the benchmark while the server was starting: run the command again"
                )

        self.watcher.step("start", shlex.join(command))
        async with running_server(command, self.file.target, log, self.clock, check) as load:
            self._model_load = load
            self.watcher.step("start", f"model load: {model_load_text(load)}")
            return await self._run_all(tests, not_ready)

    async def _run_all(
        self, tests: Sequence[BenchTest[Any]], not_ready: Mapping[str, ConfigError]
    ) -> BenchDocument:
        """Run the tests in order. `not_ready`: errors of tests that need a value of an earlier test."""
        errors = {**not_ready, **await self._connection_errors(tests)}
        if len(errors) == len(tests):
            raise _with_file_key(next(exc for name, exc in errors.items() if name not in not_ready))
        setup = self._make_setup(tests)
        if self.again:
            # Remove the results of all tests before the first one runs: after an interruption, the command
            # without --again then resumes this run.
            for test in tests:
                if test.name not in errors:
                    self._remove_results(test)
        is_new_results = not self.folder.path.exists()
        self.folder.write_json(SETUP_FILE, setup)
        for name, error in not_ready.items():
            self.watcher.step(name, f"cannot run, unless an earlier test measures it: {_error_text(error)}")
        queue = [(test, run) for run in range(self.first_run, self.runs + 1) for test in tests]
        # Exclude only tests that lack an arm. A test that lacks another value can still run, because a test
        # before it can measure this value.
        self._tests = tests
        self._excluded = errors.keys() - {
            name for name, error in not_ready.items() if not error.place.startswith("[arms.")
        }
        if len(tests) > 1:
            self.watcher.report_remaining(
                f"{plural(len(tests), 'test')}; their duration follows from the first load"
            )
        reports: list[BenchReport] = []
        not_run: dict[str, NotRun] = {}
        first: ConfigError | None = None
        for i, (test, run) in enumerate(queue, 1):
            if test.name in not_run:
                continue
            session, params = self._prepare(test, run)
            has_begun, is_new_folder = False, not session.folder.path.exists()
            try:
                _check_test(test, session, params)
                has_begun = True
                if run == 1:
                    if self.again and test.name in errors:
                        self._remove_results(test)
                    session.folder.write_json(TEST_SETUP_FILE, setup_document(test, params, session))
                run_text = f", run {run} of {self.runs}" if self.runs > 1 else ""
                rest_text = f", then {len(queue) - i:,} more" if i < len(queue) else ""
                title = f"{test.name} ({test.section} {test.title}){run_text}{rest_text}"
                self._queue = queue[i - 1 :]
                session.expected = test.expected(session, params)
                self._session = session
                session.report_remaining(title)
                reports.append(await self._run_one(test, session, params))
                self.on_report(document_of(setup, reports, list(not_run.values())))
            except Interrupted:
                partial = self._partial_report(test, session, params)
                if not reports and partial is None:
                    raise
                reports += [] if partial is None else [partial]
                document = document_of(setup, reports, list(not_run.values()))
                return msgspec.structs.replace(document, stopped=True)
            except ConfigError as exc:
                if is_new_folder and not session.steps:
                    # Remove the folder: it has the wrong parameters, and would not accept corrected ones.
                    shutil.rmtree(session.folder.path, ignore_errors=True)
                error = _with_file_key(exc)
                first = first or (error if has_begun else None)
                not_run[test.name] = NotRun(
                    test=test.name, reason=_error_text(error), hint=error.hint, begun=has_begun
                )
        if first is not None and not reports:
            if is_new_results and [entry.name for entry in self.folder.path.iterdir()] == [SETUP_FILE]:
                shutil.rmtree(self.folder.path, ignore_errors=True)
            raise first
        document = document_of(setup, reports, list(not_run.values()))
        return msgspec.structs.replace(document, stopped=False)

    def _remove_results(self, test: BenchTest[Any]) -> None:
        shutil.rmtree(self.folder.path / test.name, ignore_errors=True)

    async def _connection_errors(self, tests: Sequence[BenchTest[Any]]) -> dict[str, ConfigError]:
        """Return the error of each test whose server cannot be reached, by name of the test.

        Not checked: tests with earlier results, and tests with arms that a command (`apply`) can start.
        """
        by_url: dict[str, ConfigError | None] = {}
        errors: dict[str, ConfigError] = {}
        for test in tests:
            session, _ = self._prepare(test)
            arms = [name for name in _arms_of(test) if name in session.arms]
            resumed = session.folder.path.exists() and not self.again
            if self._stopped or resumed or any(session.arms[name].has_switch for name in arms):
                continue
            for name in arms or [BASELINE]:
                url = (session.arms[name].url if name else None) or session.target.url
                if url not in by_url:
                    try:
                        by_url[url] = None
                        await session.check_reachable(name)
                    except ConfigError as exc:
                        place = f"[arms.{name}] url" if url != session.target.url else exc.place
                        by_url[url] = ConfigError(place, exc.problem, exc.hint)
                if (error := by_url[url]) is not None:
                    errors[test.name] = error
        return errors

    def _time_left_s(self) -> float | None:
        """Return the estimated remaining time of all tests; None before the first load."""
        if not self.pace.has_measured_load or self._session is None:
            return None
        current = self._session
        left_s = self.pace.seconds(current.kind, current.expected)
        left_s += sum(self._duration_s(test, run) for test, run in self._queue[1:])
        if self.runs_after:
            left_s += self.runs_after * sum(self._duration_s(test, self.first_run) for test in self._tests)
        return left_s

    def _duration_s(self, test: BenchTest[Any], run: int) -> float:
        """Return the estimated duration of a whole test."""
        if test.name in self._excluded:
            return 0.0
        session, params = self._prepare(test, run)
        return self.pace.seconds(session.kind, test.expected(session, params))

    def _partial_report(
        self, test: BenchTest[Any], session: BenchSession, params: msgspec.Struct
    ) -> BenchReport | None:
        """Return the report of a stopped test, without compliance; None if no load was sent.

        It is not stored, because the same command resumes the test.
        """
        if not session.steps:
            return None
        rows = [_StoppedLoad(name=step.name, n=step.n, **latency_rows(step)) for step in session.steps]
        result = TestResult(
            deviations=["the test was stopped before its end: no requirement is judged, and none is met"]
        )
        result.tables = [table_of("Loads until the test was stopped", rows, _STOPPED_COLUMNS)]
        now_ns = self.clock.wall_ns()
        report = report_of(test, params, session, result, began_ns=now_ns, ended_ns=now_ns)
        message = "the test was stopped: the last load is a part of what was planned"
        finding = BenchFinding(session.steps[-1].name, "stopped", message)
        verdict = msgspec.structs.replace(
            report.verdict,
            valid=False,
            grade="not valid",
            findings=[finding, *report.verdict.findings],
            says=f"the test was stopped; {report.verdict.says}",
        )
        return msgspec.structs.replace(report, compliance=None, verdict=verdict)

    async def _run_one(
        self, test: BenchTest[Any], session: BenchSession, params: msgspec.Struct
    ) -> BenchReport:
        if self._stopped:
            session.stop()
        began_ns = self.clock.wall_ns()
        try:
            result = await test.run(session, params)
        finally:
            self._session = None
        ended_ns, end_ns = self.clock.wall_ns(), self.clock.mono_ns()
        selftest = await self._selftest(session) if self.selftest and not self._stopped else None
        report = report_of(
            test,
            params,
            session,
            result,
            began_ns=began_ns,
            ended_ns=ended_ns,
            selftest=selftest,
            clock_offset=await read_clock_offset(),
        )
        session.folder.write_json(RESULT, report)
        self.pace.add_report(to_seconds(self.clock.mono_ns() - end_ns))
        return report

    async def _selftest(self, session: BenchSession) -> Mapping[str, Any] | None:
        """Run a self-test as dense as the load with the most tokens per second, and return its result.

        If an earlier command measured all loads, return the result that it stored.
        """
        steps = session.steps
        if all(step.cached for step in steps):
            earlier: Mapping[str, Any] | None = (session.folder.read_json(RESULT) or {}).get("selftest")
            return earlier
        densest = max(steps, key=lambda step: step.result["tokens"]["output_per_second"] or 0)
        load = selftest_load(densest.result, session.target.url, processes=session.target.processes)
        return None if load is None else msgspec.to_builtins(await run_selftest(load))

    def _prepare(self, test: BenchTest[Any], run: int = 1) -> tuple[BenchSession, msgspec.Struct]:
        params = self.file.params_of(test, quick=self.quick)
        session = BenchSession(
            name=test.name,
            folder=self.folder.subfolder(test.name).run(run),
            target=self.file.target,
            watcher=self.watcher,
            sut=self.file.sut,
            arms=self.file.arms,
            seed=self.seed + RUN_SEED_STEP * (run - 1),
            quick=self.quick,
            run=run,
            warmup=self.warmup,
            reader=self.reader,
            model_load=self._model_load,
            pace=self.pace,
            kind=request_kind(test.name, params),
            time_left_s=self._time_left_s,
        )
        return session, params

    def _make_setup(self, tests: Sequence[BenchTest[Any]]) -> BenchSetup:
        file = self.file
        return BenchSetup(
            command=self.command,
            made=date_of(self.clock.wall_ns()),
            results=str(self.folder.path),
            requested_tests=[test.name for test in tests],
            quick=self.quick,
            seed=self.seed,
            runs=self.runs,
            warmup=self.warmup,
            versions=versions(),
            target=without_secrets(file.target),
            sut=file.sut,
            arms={name: without_secrets(arm) for name, arm in file.arms.items()},
            params={test.name: params_document(file.params_of(test, quick=self.quick)) for test in tests},
        )


def _arms_of(test: BenchTest[Any]) -> tuple[str, ...]:
    return (*test.arms, *test.arms_any)


def setup_document(test: BenchTest[Any], params: msgspec.Struct, session: BenchSession) -> Mapping[str, Any]:
    """Return the settings of a test's runs as JSON, without secrets, to refuse results of other settings.

    `hidden` is a digest of target and arms with their secrets, so that a change of a secret is detected.
    """
    arms = {name: arm for name, arm in session.arms.items() if name in _arms_of(test)}
    hidden = msgspec.json.encode([session.target, arms], order="sorted")
    setup: Mapping[str, Any] = json_value(
        {
            "quick": session.quick,
            "params": params_document(params),
            "target": without_secrets(session.target),
            "arms": {name: without_secrets(arm) for name, arm in arms.items()},
            "seed": session.seed,
            "warmup": session.warmup,
            "reader": session.reader.text,
            "hidden": hashlib.sha256(hidden).hexdigest()[:16],
        }
    )
    return setup


def _refuse_other_setup(folder: Folder, setup: Mapping[str, Any]) -> None:
    """Raise ConfigError if the folder has results of a test with other parameters."""
    previous = folder.read_json(TEST_SETUP_FILE)
    if previous is None or previous == setup:
        return
    old, new = dict(leaves(previous)), dict(leaves(setup))
    differences = [
        f"{name.removeprefix('params.')}: {_value_text(old.get(name))}, now {_value_text(new.get(name))}"
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name) and name != "hidden"
    ] or ["a key or the query of a URL, which are not shown"]
    more = f"; and {len(differences) - DIFFERENCES_MAX} more" if len(differences) > DIFFERENCES_MAX else ""
    raise ConfigError(
        "--results",
        f"{folder.path} was measured with other parameters: {'; '.join(differences[:DIFFERENCES_MAX])}{more}",
        "use another --results, or --again to replace its results",
    )


def _value_text(value: Any) -> str:
    return "none" if value is None else msgspec.json.encode(value).decode()


def _check_workload_and_arrivals(test: BenchTest[Any], params: msgspec.Struct) -> None:
    """Raise ConfigError if the workload or the arrivals of a test do not exist."""
    workload, arrivals = getattr(params, "workload", None), getattr(params, "arrivals", None)
    place = f"tests.{test.name}"
    if get_type_hints(type(params)).get("workload") is not str:
        workload = None  # The type of the parameter lists the workloads, so its value is already checked.
    if workload is not None and workload.endswith(".toml") and not Path(workload).is_file():
        raise ConfigError(f"{place}.workload", f"there is no file {workload}", "check the path of the file")
    if workload is not None and not (is_workload(workload) or "://" in workload or Path(workload).exists()):
        workload_named(workload, f"{place}.workload")
    if arrivals not in (None, AT_ONCE):
        parse_arrivals(arrivals, rate_rps=1.0, seed=0, place=f"{place}.arrivals")


def _check_test(test: BenchTest[Any], session: BenchSession, params: msgspec.Struct) -> None:
    """Call the check of a test. To its errors about a parameter, add where and how the user sets it."""
    if test.check is None:
        return
    try:
        test.check(session, params)
    except ConfigError as exc:
        if exc.place not in params.__struct_fields__:
            raise
        hint = f"--set {test.name}.{exc.place}=VALUE, or [tests.{test.name}] in the file of --config"
        full_hint = hint if exc.hint is None else f"{exc.hint} ({hint})"
        raise ConfigError(f"tests.{test.name}.{exc.place}", exc.problem, full_hint) from None


def _with_file_key(exc: ConfigError) -> ConfigError:
    """Replace the option of `llmtap replay` in an error by the key of the bench file."""
    hint = exc.hint
    for option, key in _FILE_KEYS.items() if exc.place in _FILE_KEYS else ():
        hint = None if hint is None else hint.replace(option, key)
    return ConfigError(_FILE_KEYS.get(exc.place, exc.place), exc.problem, hint)


def _error_text(error: ConfigError) -> str:
    return f"{error.place} {error.problem}"
