"""Run benchmark tests one by one: check parameters, resume or refuse earlier results, measure, and report.

`cli/bench.py` calls `Bench.run` with the names of tests; it starts the server if the bench file has a
command, runs the tests and their self-tests, and returns the JSON document of all reports; each report is
also stored in the results folder. Parameters, workloads, arrivals and servers are checked before anything is
sent. If several tests are chosen, one that cannot run is skipped and checked again in its turn, since an
earlier test may find what it lacks. Results with equal parameters are resumed; results with other parameters
are replaced only with `--again`.
"""

import hashlib
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from llmtap.bench.report.report import ASKED, date_of, document_of, is_results, report_of, versions
from llmtap.bench.run.figures import Cell, latency_columns, table_of, text
from llmtap.bench.run.levels import latency_rows
from llmtap.bench.run.session import (
    BASELINE,
    RESULT,
    BenchSession,
    Folder,
    Interrupted,
    SessionWatcher,
    time_said,
)
from llmtap.bench.run.test import BenchTest, TestResult, test_named
from llmtap.bench.selftest import run_selftest, selftest_load
from llmtap.bench.sut.start import ModelLoad, model_load_said, started
from llmtap.bench.sut.sut import BenchFile, params_told, without_keys
from llmtap.clock import Clock, SystemClock
from llmtap.errors import ConfigError
from llmtap.load.replay.plan import AT_ONCE
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.latency import DEFAULT_BENEFIT
from llmtap.report.values import leaves
from llmtap.workload.arrivals import parse_arrivals
from llmtap.workload.registry import is_workload, workload_named

TEST_ASKED: Final = "asked.json"
SERVER_LOG: Final = "server.log"
SHOWN_MAX: Final = 3
ORDER: Final = (
    "throughput", "ttft", "tradeoff", "itl", "capacity", "fairness", "prefix-cache", "memory-pressure",
    "long-context", "guardrail-overhead",
)  # fmt: skip
"""Throughput comes first, since most loads are a share of its result."""
SEEDS_APART: Final = 1_000_000
"""Difference between the seeds of two runs; loads of a test use the seeds between."""
_KEYS: Final = {
    "--endpoint": "target.endpoint", "--tokenizer": "target.tokenizer", "--model": "target.model",
    "--api-key-env": "target.key_env", "--header": "target.headers", "--ca": "target.ca",
    "--server": "target.server", "--metrics": "target.metrics",
}  # fmt: skip
_STOPPED_COLUMNS: Final[Mapping[str, Cell]] = {
    "Load": text("name"),
    "Requests": text("n", ","),
    **latency_columns("ttft p50", "ttft p99", "tpot p50", "tpot p99", "e2e p50", "e2e p99"),
}


@dataclass(slots=True)
class Bench:
    """Run of some tests. `stop` may be called from a signal handler at any time."""

    file: BenchFile
    folder: Folder
    watcher: SessionWatcher
    seed: int = 42
    quick: bool = False
    warmup: str = "auto"
    reader: Benefit = DEFAULT_BENEFIT
    runs: int = 1
    """Independent runs of each test, each with its own warm-up and seed; seeds depend on `seed` alone."""
    first_run: int = 1
    """Run to begin with; earlier ones are in the folder."""
    again: bool = False
    """Remove all earlier runs of a test; otherwise a test with other parameters is refused."""
    command: str = ""
    """Command line, for the report."""
    selftest: bool = True
    """Measure the error of llmtap's own times after each test, at its densest load."""
    clock: Clock = field(default_factory=SystemClock)
    reported: Callable[[dict[str, Any]], None] = lambda document: None
    _session: BenchSession | None = None
    _model_load: ModelLoad | None = None
    _stopped: bool = False

    def stop(self) -> None:
        self._stopped = True
        if self._session is not None:
            self._session.stop()

    async def run(self, names: Sequence[str]) -> dict[str, Any]:
        """Run the tests and return the document (`bench/report/report.py`), which the folder has, too.

        Raises:
            ConfigError: no test can run, or the folder has other parameters.
            Interrupted: stopped before anything was measured; later the document has `stopped`.
        """
        path = self.folder.path
        others = {at.name for at in path.iterdir()} - {SERVER_LOG} if path.is_dir() else ()
        if others and not is_results(path):
            raise ConfigError("--results", f"{path} has files, and is not a results folder of llmtap bench")
        tests = [test_named(name) for name in sorted(names, key=ORDER.index)]
        lacking: dict[str, ConfigError] = {}
        for test in tests:
            session, params = self._prepared(test)
            _check_values(test, params)
            try:
                _check(test, session, params)
            except ConfigError as exc:
                lacking[test.name] = exc
            if not self.again:
                _refuse_other(session.folder, asked_of(test, params, session))
        if len(lacking) == len(tests):
            raise next(iter(lacking.values()))
        command, log = self.file.sut.start, path / SERVER_LOG
        if not command or self._stopped:
            return await self._run_all(tests, lacking)

        def check() -> None:
            if self._stopped:
                raise Interrupted("stopped while the server was started")

        self.watcher.step("start", shlex.join(command))
        async with started(command, self.file.target, log, self.clock, check) as load:
            self._model_load = load
            self.watcher.step("start", f"model load: {model_load_said(load)}")
            return await self._run_all(tests, lacking)

    async def _run_all(
        self, tests: Sequence[BenchTest[Any]], lacking: Mapping[str, ConfigError]
    ) -> dict[str, Any]:
        """`lacking`: tests that cannot run yet, and why."""
        later = {**lacking, **await self._unreached(tests)}
        if len(later) == len(tests):
            raise _as_in_file(next(exc for name, exc in later.items() if name not in lacking))
        asked = self._asked(tests)
        if self.again:  # all at once: after an interruption the command without --again goes on
            for test in tests:
                if test.name not in later:
                    self._remove(test)
        new = not self.folder.path.exists()
        self.folder.write_json(ASKED, asked)
        for name, why in lacking.items():
            self.watcher.step(name, f"will be left out, unless a test before it tells: {_said(why)}")
        if len(tests) > 1:
            self.watcher.left(self._total([test for test in tests if test.name not in later]))
        reports: list[dict[str, Any]] = []
        not_run: dict[str, dict[str, Any]] = {}
        first: ConfigError | None = None
        todo = [(test, run) for run in range(self.first_run, self.runs + 1) for test in tests]
        for i, (test, run) in enumerate(todo, 1):
            if test.name in not_run:
                continue
            session, params = self._prepared(test, run)
            begun, fresh = False, not session.folder.path.exists()
            try:
                _check(test, session, params)
                begun = True
                if run == 1:
                    if self.again and test.name in later:
                        self._remove(test)
                    session.folder.write_json(TEST_ASKED, asked_of(test, params, session))
                which = f", run {run} of {self.runs}" if self.runs > 1 else ""
                then = f", then {len(todo) - i:,} more" if i < len(todo) else ""
                title = f"{test.name} ({test.section} {test.title}){which}{then}"
                self.watcher.left(f"{title}: {_time(_seconds(test, session, params))}")
                reports.append(await self._run_one(test, session, params))
                self.reported(document_of(asked, reports, list(not_run.values())))
            except Interrupted:
                partial = self._partial(test, session, params)
                if not reports and partial is None:
                    raise
                reports += [] if partial is None else [partial]
                return document_of(asked, reports, list(not_run.values())) | {"stopped": True}
            except ConfigError as exc:
                if fresh and not session.steps:  # so that a corrected command is not refused
                    shutil.rmtree(session.folder.path, ignore_errors=True)
                why = _as_in_file(exc)
                first = first or (why if begun else None)
                not_run[test.name] = {
                    "test": test.name, "why": _said(why), "hint": why.hint, "begun": begun
                }  # fmt: skip
        if first is not None and not reports:
            if new and [at.name for at in self.folder.path.iterdir()] == [ASKED]:
                shutil.rmtree(self.folder.path, ignore_errors=True)
            raise first
        return document_of(asked, reports, list(not_run.values())) | {"stopped": False}

    def _remove(self, test: BenchTest[Any]) -> None:
        shutil.rmtree(self.folder.path / test.name, ignore_errors=True)

    async def _unreached(self, tests: Sequence[BenchTest[Any]]) -> dict[str, ConfigError]:
        """Return errors of unreachable servers by test. Servers that an `apply` command starts, and those
        of tests with results, are not asked."""
        known: dict[str, ConfigError | None] = {}
        found: dict[str, ConfigError] = {}
        for test in tests:
            session, _ = self._prepared(test)
            arms = [name for name in _arms_of(test) if name in session.arms]
            resumed = session.folder.path.exists() and not self.again
            if self._stopped or resumed or any(session.arms[name].switches for name in arms):
                continue
            for name in arms or [BASELINE]:
                url = (session.arms[name].url if name else None) or session.target.url
                if url not in known:
                    try:
                        known[url] = None
                        await session.reach(name)
                    except ConfigError as exc:
                        place = f"[arms.{name}] url" if url != session.target.url else exc.place
                        known[url] = ConfigError(place, exc.problem, exc.hint)
                if (why := known[url]) is not None:
                    found[test.name] = why
        return found

    def _total(self, tests: Sequence[BenchTest[Any]]) -> str:
        """Return the expected duration of several tests as text."""
        known = {test.name: _seconds(test, *self._prepared(test)) for test in tests}
        total = self.runs * sum(seconds or 0.0 for seconds in known.values())
        open_ = [name for name, seconds in known.items() if seconds is None]
        more = f", and the time of {', '.join(open_)}, which depends on the server" if open_ else ""
        return f"{len(tests)} tests, about {time_said(total)} in all{more}"

    def _partial(
        self, test: BenchTest[Any], session: BenchSession, params: msgspec.Struct
    ) -> dict[str, Any] | None:
        """Return the report of a stopped test, without compliance. It is not stored; the same command
        resumes the test."""
        if not session.steps:
            return None
        rows = [{"name": one.name, "n": one.n, **latency_rows(one)} for one in session.steps]
        found = TestResult(
            deviations=["the test was stopped before its end: no requirement is judged, and none is met"]
        )
        found.tables = [table_of("Loads until the test was stopped", rows, _STOPPED_COLUMNS)]
        now_ns = self.clock.wall_ns()
        report = report_of(test, params, session, found, began_ns=now_ns, ended_ns=now_ns)
        said = "the test was stopped: the last load is a part of what was planned"
        finding = {"step": session.steps[-1].name, "what": "stopped", "says": said}
        verdict = report["verdict"]
        report["compliance"] = None
        report["verdict"] = verdict | {
            "valid": False, "grade": "not valid", "findings": [finding, *verdict["findings"]],
        }  # fmt: skip
        return report

    async def _run_one(
        self, test: BenchTest[Any], session: BenchSession, params: msgspec.Struct
    ) -> dict[str, Any]:
        self._session = session
        if self._stopped:
            session.stop()
        began_ns = self.clock.wall_ns()
        try:
            found = await test.run(session, params)
        finally:
            self._session = None
        ended_ns = self.clock.wall_ns()
        checked = await self._selftest(session) if self.selftest and not self._stopped else None
        report = report_of(
            test, params, session, found, began_ns=began_ns, ended_ns=ended_ns, selftest=checked
        )
        session.folder.write_json(RESULT, report)
        return report

    async def _selftest(self, session: BenchSession) -> dict[str, Any] | None:
        """Return the self-test at the load with the most tokens per second, or the stored result."""
        steps = session.steps
        if all(step.cached for step in steps):
            earlier: dict[str, Any] | None = (session.folder.read_json(RESULT) or {}).get("selftest")
            return earlier
        densest = max(steps, key=lambda step: step.result["tokens"]["output_per_second"] or 0)
        load = selftest_load(densest.result, session.target.url, processes=session.target.processes)
        return None if load is None else await run_selftest(load)

    def _prepared(self, test: BenchTest[Any], run: int = 1) -> tuple[BenchSession, msgspec.Struct]:
        params = self.file.params_of(test, quick=self.quick)
        session = BenchSession(
            name=test.name, folder=self.folder.within(test.name).run(run), target=self.file.target,
            watcher=self.watcher, sut=self.file.sut, arms=self.file.arms,
            seed=self.seed + SEEDS_APART * (run - 1), quick=self.quick, run=run, warmup=self.warmup,
            reader=self.reader, model_load=self._model_load,
        )  # fmt: skip
        return session, params

    def _asked(self, tests: Sequence[BenchTest[Any]]) -> dict[str, Any]:
        file = self.file
        return {
            "command": self.command, "made": date_of(self.clock.wall_ns()), "results": str(self.folder.path),
            "asked": [test.name for test in tests], "quick": self.quick, "seed": self.seed,
            "runs": self.runs, "warmup": self.warmup, "versions": versions(),
            "target": without_keys(file.target),
            "sut": msgspec.to_builtins(file.sut),
            "arms": {name: without_keys(arm) for name, arm in file.arms.items()},
            "params": {test.name: params_told(file.params_of(test, quick=self.quick)) for test in tests},
        }  # fmt: skip


def _arms_of(test: BenchTest[Any]) -> tuple[str, ...]:
    return (*test.arms, *test.arms_any)


def asked_of(test: BenchTest[Any], params: msgspec.Struct, session: BenchSession) -> dict[str, Any]:
    """Return the parameters of a test's runs as JSON. `hidden`: a digest of target and arms with keys."""
    arms = {name: arm for name, arm in session.arms.items() if name in _arms_of(test)}
    hidden = msgspec.json.encode([session.target, arms], order="sorted")
    told = {
        "quick": session.quick, "params": params_told(params), "target": without_keys(session.target),
        "arms": {name: without_keys(arm) for name, arm in arms.items()},
        "seed": session.seed, "warmup": session.warmup, "reader": session.reader.text,
        "hidden": hashlib.sha256(hidden).hexdigest()[:16],
    }  # fmt: skip
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(told))
    return decoded


def _refuse_other(folder: Folder, asked: Mapping[str, Any]) -> None:
    """Raise ConfigError if the folder has results of a test with other parameters."""
    before = folder.read_json(TEST_ASKED)
    if before is None or before == asked:
        return
    was, now = dict(leaves(before)), dict(leaves(asked))
    differing = [
        f"{name.removeprefix('params.')} {_shown(was.get(name))} there, {_shown(now.get(name))} now"
        for name in dict.fromkeys((*was, *now))
        if was.get(name) != now.get(name) and name != "hidden"
    ] or ["another key or query"]
    more = f"; and {len(differing) - SHOWN_MAX} more" if len(differing) > SHOWN_MAX else ""
    raise ConfigError(
        "--results",
        f"{folder.path} was measured with other parameters: {'; '.join(differing[:SHOWN_MAX])}{more}",
        "use another --results, or --again to replace its results",
    )


def _shown(value: Any) -> str:
    return "none" if value is None else msgspec.json.encode(value).decode()


def _check_values(test: BenchTest[Any], params: msgspec.Struct) -> None:
    """Raise ConfigError if the workload or the arrivals of a test do not exist."""
    workload, arrivals = getattr(params, "workload", None), getattr(params, "arrivals", None)
    place = f"tests.{test.name}"
    if workload is not None and workload.endswith(".toml") and not Path(workload).is_file():
        raise ConfigError(f"{place}.workload", f"there is no file {workload}")
    if workload is not None and not (is_workload(workload) or "://" in workload or Path(workload).exists()):
        workload_named(workload, f"{place}.workload")
    if arrivals not in (None, AT_ONCE):
        parse_arrivals(arrivals, rate_rps=1.0, seed=0, place=f"{place}.arrivals")


def _check(test: BenchTest[Any], session: BenchSession, params: msgspec.Struct) -> None:
    if test.check is None:
        return
    try:
        test.check(session, params)
    except ConfigError as exc:
        if exc.place not in params.__struct_fields__:
            raise
        hint = f"--set {test.name}.{exc.place}=VALUE, or [tests.{test.name}] in the file of --config"
        told = hint if exc.hint is None else f"{exc.hint} ({hint})"
        raise ConfigError(f"tests.{test.name}.{exc.place}", exc.problem, told) from None


def _seconds(test: BenchTest[Any], session: BenchSession, params: msgspec.Struct) -> float | None:
    return None if test.seconds is None else test.seconds(session, params)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "its time depends on the server"
    return f"about {time_said(seconds)} at most, warm-up and answers aside"


def _as_in_file(exc: ConfigError) -> ConfigError:
    """Return an error about an option of `llmtap replay` with the key of the bench file."""
    hint = exc.hint
    for option, key in _KEYS.items() if exc.place in _KEYS else ():
        hint = None if hint is None else hint.replace(option, key)
    return ConfigError(_KEYS.get(exc.place, exc.place), exc.problem, hint)


def _said(why: ConfigError) -> str:
    return f"{why.place} {why.problem}"
