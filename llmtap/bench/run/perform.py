"""Run benchmark tests one by one: check parameters, resume or refuse earlier results, measure, and report.

`cli/bench.py` calls `Bench.run` with the names of tests; it starts the server if the bench file has a
command, runs the tests and their self-tests, and returns the JSON document of all reports; each report is
also stored in the results folder. Parameters, workloads, arrivals and servers are checked before anything is
sent. If several tests are chosen, one that cannot run is skipped and checked again in its turn, since an
earlier test may find what it lacks. Results with equal parameters are resumed; results with other parameters
are replaced only with `--again`.

Long because a run is one sequence: check, refuse or resume, measure, report.
"""

import hashlib
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from llmtap.bench.report.report import ASKED, date_of, document_of, is_results, report_of, versions
from llmtap.bench.run.figures import Cell, latency_columns, table_of, text
from llmtap.bench.run.folder import RESULT, Folder
from llmtap.bench.run.levels import latency_rows
from llmtap.bench.run.session import BASELINE, BenchSession, Interrupted, SessionWatcher, time_said
from llmtap.bench.run.test import BenchTest, TestResult, test_named
from llmtap.bench.selftest import run_selftest, selftest_load
from llmtap.bench.sut.file import BenchFile, params_told, without_keys
from llmtap.bench.sut.start import ModelLoad, model_load_said, started
from llmtap.clock import Clock, SystemClock
from llmtap.errors import ConfigError
from llmtap.load.replay.plan import AT_ONCE
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.latency import DEFAULT_BENEFIT
from llmtap.report.values import leaves
from llmtap.workload.arrivals import OWN_RATES, parse_arrivals
from llmtap.workload.registry import is_workload, workload_named

TEST_ASKED: Final = "asked.json"
SERVER_LOG: Final = "server.log"
SHOWN_MAX: Final = 3
_PARTS: Final = ("quick", "params", "target", "arms", "seed", "warmup", "reader", "hidden")
"""Parts of the parameters that change the measurement, in the order of messages."""
_NOTHING: Final[tuple[object, ...]] = (None, "", [])
_NAMES: Final = {
    "quick": "--quick",
    "seed": "--seed",
    "warmup": "--warmup",
    "reader": "reader",
    "hidden": "a key or a query",
}


def asked_of(test: BenchTest[Any], params: msgspec.Struct, session: BenchSession) -> dict[str, Any]:
    """Return the parameters of a test's runs as JSON. `sut` is compared only for messages.

    `hidden` is a digest of target and arms, including keys.
    """
    arms = {name: arm for name, arm in session.arms.items() if name in _arms_of(test)}
    hidden = msgspec.json.encode([session.target, arms], order="sorted")
    told = {
        "quick": session.quick, "seed": session.seed, "warmup": session.warmup,
        "reader": None if session.reader == DEFAULT_BENEFIT else session.reader.text,
        "target": without_keys(session.target),
        "arms": {name: without_keys(arm) for name, arm in arms.items()},
        "params": params_told(params), "hidden": hashlib.sha256(hidden).hexdigest()[:16],
        "sut": msgspec.to_builtins(session.sut),
    }  # fmt: skip
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(told))
    return decoded


def refuse_other(folder: Folder, test: BenchTest[Any], asked: Mapping[str, Any]) -> None:
    before = _before(folder, test)
    differing = [] if before is None else list(_differing(before, asked))
    if not differing:
        return
    told = "; ".join(
        f"{name} {_shown(was)} there, {_shown(now)} now" for name, was, now in differing[:SHOWN_MAX]
    )
    more = f"; and {len(differing) - SHOWN_MAX} more" if len(differing) > SHOWN_MAX else ""
    raise ConfigError(
        "--results",
        f"{folder.path} was measured with other parameters: {told}{more}",
        "use another --results, or --again to replace its results",
    )


def declared_otherwise(folder: Folder, test: BenchTest[Any], asked: Mapping[str, Any]) -> list[str]:
    """Return declarations that differ from those of the folder's loads: `sut.model "a" there, "b" now`."""
    before = _before(folder, test) or {}
    was, now = (dict(leaves(told.get("sut") or {}, "sut.")) for told in (before, asked))
    return [
        f"{name} {_shown(value)} there, {_shown(now.get(name))} now"
        for name, value in was.items()
        if value not in _NOTHING and now.get(name) not in (*_NOTHING, value)
    ]


def _before(folder: Folder, test: BenchTest[Any]) -> dict[str, Any] | None:
    """Return the parameters of the results in a test's folder, or None."""
    asked: dict[str, Any] | None = folder.read_json(TEST_ASKED)
    report = folder.read_json(RESULT)
    if asked is not None or report is None:
        return asked
    arms = {name: arm for name, arm in (report.get("arms") or {}).items() if name in _arms_of(test)}
    return {**report, "arms": arms}


def _arms_of(test: BenchTest[Any]) -> tuple[str, ...]:
    return (*test.arms, *test.arms_any)


def _differing(before: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    shown = False
    for part in _PARTS:
        if part not in before or (part == "hidden" and shown):
            continue
        was, now = before[part], asked[part]
        if not isinstance(was, Mapping):
            if was != now:
                yield _NAMES[part], was, now
            continue
        if part == "params":  # a version between may have brought one, with its default
            now = {name: value for name, value in now.items() if name in was}
        place = "" if part == "params" else f"{part}."
        ours, theirs = dict(leaves(now, place)), dict(leaves(was, place))
        for name in dict.fromkeys((*theirs, *ours)):
            if ours.get(name) != theirs.get(name):
                shown |= part in ("target", "arms")
                yield name, theirs.get(name), ours.get(name)


def _shown(value: Any) -> str:
    return "none" if value is None else msgspec.json.encode(value).decode()


def check_values(test: BenchTest[Any], params: msgspec.Struct) -> None:
    workload, arrivals = getattr(params, "workload", None), getattr(params, "arrivals", None)
    key = f"tests.{test.name}"
    if workload is not None:
        _check_workload(workload, f"{key}.workload")
    if arrivals is not None and arrivals != AT_ONCE:
        own = arrivals.partition(":")[0].strip() in OWN_RATES
        parse_arrivals(arrivals, rate_rps=None if own else 1.0, seed=0, place=f"{key}.arrivals")


def _check_workload(text: str, place: str) -> None:
    if text.endswith(".toml"):
        if not Path(text).is_file():
            raise ConfigError(place, f"there is no file {text}")
    elif not is_workload(text) and "://" not in text and not Path(text).exists():
        workload_named(text, place)


async def unreached(tests: Sequence[tuple[BenchTest[Any], BenchSession]]) -> Mapping[str, ConfigError]:
    """Return errors of unreachable servers by test. Servers that an `apply` command starts are not asked."""
    known: dict[str, ConfigError | None] = {}
    found: dict[str, ConfigError] = {}
    for test, session in tests:
        arms = [name for name in (*test.arms, *test.arms_any) if name in session.arms]
        if any(session.arms[name].switches for name in arms):
            continue
        for name in arms or [BASELINE]:
            url = (session.arms[name].url if name else None) or session.target.url
            if url not in known:
                known[url] = await _why_not(session, name)
            why = known[url]
            if why is not None:
                found[test.name] = why
    return found


async def _why_not(session: BenchSession, arm: str) -> ConfigError | None:
    try:
        await session.reach(arm)
    except ConfigError as exc:
        own = exc.place == "--target" and arm and session.arms[arm].url
        return ConfigError(f"[arms.{arm}] url", exc.problem, exc.hint) if own else exc
    return None


def undo(folder: Folder, made: Sequence[str], asked: tuple[Path, bytes | None]) -> None:
    """Restore the results folder: remove the folders `made`, and restore the file `asked`."""
    for name in made:
        shutil.rmtree(folder.path / name, ignore_errors=True)
    file, before = asked
    if before is None:
        file.unlink(missing_ok=True)
    else:
        file.write_bytes(before)
    folder.unmake()


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
    _measured: bool = False
    """A load was sent and stored."""
    _stopped: bool = False

    def stop(self) -> None:
        self._stopped = True
        if self._session is not None:
            self._session.stop()

    async def run(self, names: Sequence[str]) -> dict[str, Any]:
        """Run the tests and return the document (`bench/report/report.py`), which the folder has, too.

        Raises:
            ConfigError: no test can run, or the folder has other parameters. If nothing was measured,
                the folder is restored.
            Interrupted: stopped before anything was measured; later the document has `stopped`.
        """
        self._refuse_other_folder()
        chosen = [test_named(name) for name in sorted(names, key=ORDER.index)]
        fresh = [test.name for test in chosen if not (self.folder.path / test.name).exists()]
        asked = self.folder.path / ASKED
        before = asked.read_bytes() if asked.exists() else None
        try:
            return await self._run(chosen, fresh)
        except ConfigError:
            if not self._measured:
                undo(self.folder, fresh, (asked, before))
            raise
        finally:
            self._tidy(fresh)

    async def _run(self, chosen: Sequence[BenchTest[Any]], fresh: Sequence[str]) -> dict[str, Any]:
        """`fresh`: names of tests without results. Servers of other tests need not be reachable."""
        for test in chosen:
            check_values(test, self.file.params_of(test, quick=self.quick))
        lacking = dict(self._lacking(chosen))
        if len(lacking) == len(chosen):
            raise next(iter(lacking.values()))
        if not self.again:
            self._refuse_other_parameters(chosen)
        if self.file.sut.start and not self._stopped:
            return await self._run_started(chosen, fresh, lacking)
        return await self._run_all(chosen, fresh, lacking)

    async def _run_started(
        self, chosen: Sequence[BenchTest[Any]], fresh: Sequence[str], lacking: Mapping[str, ConfigError]
    ) -> dict[str, Any]:
        """Start the server, measure its model load, run the tests, and stop it."""

        def check() -> None:
            if self._stopped:
                raise Interrupted("stopped while the server was started")

        log = self.folder.path / SERVER_LOG
        self.watcher.step("start", shlex.join(self.file.sut.start))
        try:
            async with started(self.file.sut.start, self.file.target, log, self.clock, check) as load:
                self._model_load = load
                self.watcher.step("start", f"model load: {model_load_said(load)}")
                return await self._run_all(chosen, fresh, lacking)
        finally:
            if not self._measured:
                log.unlink(missing_ok=True)

    async def _run_all(
        self, chosen: Sequence[BenchTest[Any]], fresh: Sequence[str], lacking: Mapping[str, ConfigError]
    ) -> dict[str, Any]:
        asking = [test for test in chosen if test.name in fresh or self.again] if not self._stopped else []
        missing = await unreached([(test, self._prepared(test)[0]) for test in asking])
        if len({*lacking, *missing}) == len(chosen):
            raise _as_in_file(next(iter(missing.values())))
        later = {*lacking, *missing}
        if self.again:  # all at once: after an interruption the command without --again goes on
            for test in chosen:
                if test.name not in later:
                    shutil.rmtree(self.folder.path / test.name, ignore_errors=True)
        asked = self._asked(chosen)
        self.folder.write_json(ASKED, asked)
        for name, why in lacking.items():
            self.watcher.step(name, f"will be left out, unless a test before it tells: {_said(why)}")
        reports: list[dict[str, Any]] = []
        not_run: list[dict[str, Any]] = []
        stopped = False
        first: ConfigError | None = None
        if len(chosen) > 1:
            self.watcher.left(self._total([test for test in chosen if test.name not in later]))
        begun = [(test, run) for run in range(self.first_run, self.runs + 1) for test in chosen]
        for i, (test, run) in enumerate(begun):
            if run > self.first_run and test.name in {one["test"] for one in not_run}:
                continue
            session, params = self._prepared(test, run)
            try:
                _check(test, session, params)
            except ConfigError as exc:
                not_run.append(_left_out(test, exc, begun=False))
                continue
            if run == 1:
                self._begin(test, params, session, anew=self.again and test.name in later)
            left = len(begun) - i - 1
            which = f", run {run} of {self.runs}" if self.runs > 1 else ""
            then = f", then {left:,} more" if left else ""
            said = f"{test.name} ({test.section} {test.title}){which}{then}"
            self.watcher.left(f"{said}: {_time(_seconds(test, session, params))}")
            try:
                reports.append(await self._run_one(test, session, params))
                self.reported(document_of(asked, reports, not_run))
            except Interrupted:
                stopped = True
                partial = self._partial(test, session, params)
                if not reports and partial is None:
                    raise
                reports += [] if partial is None else [partial]
                break
            except ConfigError as exc:
                if len(chosen) == 1:
                    raise _as_in_file(exc) from None
                first = first or _as_in_file(exc)
                not_run.append(_left_out(test, _as_in_file(exc), begun=True))
        if first is not None and not reports and not self._measured:
            raise first
        return document_of(asked, reports, not_run) | {"stopped": stopped}

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
            self._measured = self._measured or any(not step.cached for step in session.steps)
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

    def _lacking(self, tests: Sequence[BenchTest[Any]]) -> Iterator[tuple[str, ConfigError]]:
        for test in tests:
            try:
                _check(test, *self._prepared(test))
            except ConfigError as exc:
                yield test.name, exc

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

    def _refuse_other_parameters(self, tests: Sequence[BenchTest[Any]]) -> None:
        for test in tests:
            session, params = self._prepared(test)
            refuse_other(session.folder, test, asked_of(test, params, session))

    def _begin(
        self, test: BenchTest[Any], params: msgspec.Struct, session: BenchSession, *, anew: bool
    ) -> None:
        asked = asked_of(test, params, session)
        if anew:
            shutil.rmtree(session.folder.path, ignore_errors=True)
            session.folder = Folder(session.folder.path)
        for said in declared_otherwise(session.folder, test, asked):
            self.watcher.step(test.name, f"what was measured before is told as it is declared now: {said}")
        session.folder.write_json(TEST_ASKED, asked)

    def _tidy(self, names: Sequence[str]) -> None:
        for path in (self.folder.path / name for name in names):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()

    def _refuse_other_folder(self) -> None:
        path = self.folder.path
        if not is_results(path) and any(path.iterdir()):
            raise ConfigError("--results", f"{path} has files, and is not a results folder of llmtap bench")


_STOPPED_COLUMNS: Final[Mapping[str, Cell]] = {
    "Load": text("name"),
    "Requests": text("n", ","),
    **latency_columns("ttft p50", "ttft p99", "tpot p50", "tpot p99", "e2e p50", "e2e p99"),
}


def _seconds(test: BenchTest[Any], session: BenchSession, params: msgspec.Struct) -> float | None:
    return None if test.seconds is None else test.seconds(session, params)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "its time depends on the server"
    return f"about {time_said(seconds)} at most, warm-up and answers aside"


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


def _as_in_file(exc: ConfigError) -> ConfigError:
    if exc.place not in _KEYS:
        return exc
    hint = exc.hint
    for option, key in _KEYS.items():
        hint = None if hint is None else hint.replace(option, key)
    return ConfigError(_KEYS[exc.place], exc.problem, hint)


def _left_out(test: BenchTest[Any], why: ConfigError, *, begun: bool) -> dict[str, Any]:
    return {"test": test.name, "why": _said(why), "hint": why.hint, "begun": begun}


def _said(why: ConfigError) -> str:
    return f"{why.place} {why.problem}"
