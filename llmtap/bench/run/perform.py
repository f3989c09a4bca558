"""Benchmarks carried out, test by test, in the order in which later ones need what earlier ones found.

What a test cannot run without is asked for before anything is sent. Of several tests, one that cannot run is
left out and told at the end; whether it can is looked at again when it is its turn, since a test before it
may have found what was lacking.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from llmtap.bench.report.report import ASKED, RESULT, date_of, document_of, is_results, report_of, versions
from llmtap.bench.run.folder import Folder
from llmtap.bench.run.preflight import check_values, undo, unreached
from llmtap.bench.run.registry import test_named
from llmtap.bench.run.resume import asked_of, begin, clear, declared_otherwise, refuse_other
from llmtap.bench.run.session import BenchSession, SessionWatcher
from llmtap.bench.run.test import BenchTest
from llmtap.bench.sut.file import BenchFile, params_told, without_keys
from llmtap.clock import Clock, SystemClock
from llmtap.errors import ConfigError

__all__ = ["ORDER", "Bench"]

ORDER: Final = (
    "throughput", "ttft", "tradeoff", "itl", "capacity", "fairness", "prefix-cache", "memory-pressure",
    "long-context", "guardrail-overhead",
)  # fmt: skip
"""Capacity in tokens/s comes first, since most loads are a share of it; that in requests before what goes
beyond it."""

SEEDS_APART: Final = 1_000_000
"""Between those of two runs: tests count on from theirs for each of their loads."""

_KEYS: Final = {
    "--endpoint": "target.endpoint", "--tokenizer": "target.tokenizer", "--model": "target.model",
    "--api-key-env": "target.key_env", "--header": "target.headers", "--ca": "target.ca",
    "--server": "target.server", "--metrics": "target.metrics",
}  # fmt: skip


@dataclass(slots=True)
class Bench:
    """A run of some tests. `stop` may be called from a signal handler at any time."""

    file: BenchFile
    folder: Folder
    watcher: SessionWatcher
    seed: int = 42
    quick: bool = False
    warmup: str = "auto"
    runs: int = 1
    """Of each test, independent of each other: every one is warmed up anew and has a seed of its own, which
    is the same for every system that is measured with `seed`."""
    again: bool = False
    """Measured anew, whatever the folder holds of a test: all runs of it are taken away. Without it, a test
    that was measured with other parameters is refused."""
    command: str = ""
    """As it was typed, for who wants to do it again."""
    clock: Clock = field(default_factory=SystemClock)
    _session: BenchSession | None = None
    _measured: bool = False
    """A load was sent, and is in the folder."""
    _stopped: bool = False

    def stop(self) -> None:
        """What was measured is kept; `run` raises Interrupted."""
        self._stopped = True
        if self._session is not None:
            self._session.stop()

    async def run(self, names: Sequence[str]) -> dict[str, Any]:
        """Run them. Returns the document (`bench/report.py`), which is in the results folder, too.

        Raises:
            ConfigError: the one test that was asked for cannot run, or none of several can; or the folder
                has one of them, measured with other parameters. Where nothing was measured, the folder is as
                it was before, but for what `again` took away.
            Interrupted: somebody stopped it; the same call goes on where it was.
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
        """`fresh` are those of which nothing was measured yet: of others all may be there, and no server."""
        for test in chosen:
            check_values(test, self.file.params_of(test, quick=self.quick))
        lacking = dict(self._lacking(chosen))
        if len(lacking) == len(chosen):
            raise next(iter(lacking.values()))
        if not self.again:
            self._refuse_other_parameters(chosen)
        asking = [test for test in chosen if test.name in fresh or self.again] if not self._stopped else []
        missing = await unreached([(test, self._prepared(test)[0]) for test in asking])
        if len({*lacking, *missing}) == len(chosen):
            raise _as_in_file(next(iter(missing.values())))
        later = {*lacking, *missing}
        if self.again:  # all at once: after an interruption the command without --again goes on
            for test in chosen:
                if test.name not in later:
                    clear(self.folder.path / test.name)
        asked = self._asked(chosen)
        self.folder.write_json(ASKED, asked)
        for name, why in lacking.items():
            self.watcher.step(name, f"will be left out, unless a test before it tells: {_said(why)}")
        reports: list[dict[str, Any]] = []
        not_run: list[dict[str, Any]] = []
        first: ConfigError | None = None
        begun = [(test, run) for run in range(1, self.runs + 1) for test in chosen]
        for i, (test, run) in enumerate(begun):
            if run > 1 and test.name in {one["test"] for one in not_run}:
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
            self.watcher.left(said if len(begun) > 1 else "")
            try:
                reports.append(await self._run_one(test, session, params))
            except ConfigError as exc:
                if len(chosen) == 1:
                    raise _as_in_file(exc) from None
                first = first or _as_in_file(exc)
                not_run.append(_left_out(test, _as_in_file(exc), begun=True))
        if first is not None and not reports and not self._measured:
            raise first
        return document_of(asked, reports, not_run)

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
        report = report_of(test, params, session, found, began_ns=began_ns, ended_ns=self.clock.wall_ns())
        session.folder.write_json(RESULT, report)
        return report

    def _prepared(self, test: BenchTest[Any], run: int = 1) -> tuple[BenchSession, msgspec.Struct]:
        params = self.file.params_of(test, quick=self.quick)
        session = BenchSession(
            name=test.name, folder=self.folder.within(test.name).run(run), target=self.file.target,
            watcher=self.watcher, sut=self.file.sut, arms=self.file.arms,
            seed=self.seed + SEEDS_APART * (run - 1), quick=self.quick, run=run, warmup=self.warmup,
        )  # fmt: skip
        return session, params

    def _lacking(self, tests: Sequence[BenchTest[Any]]) -> Iterator[tuple[str, ConfigError]]:
        """What cannot run as things stand, and why."""
        for test in tests:
            try:
                _check(test, *self._prepared(test))
            except ConfigError as exc:
                yield test.name, exc

    def _asked(self, tests: Sequence[BenchTest[Any]]) -> dict[str, Any]:
        """All that makes it again, without keys."""
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
        """Before anything is sent: what was measured is not replaced by chance."""
        for test in tests:
            session, params = self._prepared(test)
            refuse_other(session.folder, test, asked_of(test, params, session))

    def _begin(
        self, test: BenchTest[Any], params: msgspec.Struct, session: BenchSession, *, anew: bool
    ) -> None:
        asked = asked_of(test, params, session)
        if anew:
            clear(session.folder.path)
            session.folder = Folder(session.folder.path)
        for said in declared_otherwise(session.folder, test, asked):
            self.watcher.step(test.name, f"what was measured before is told as it is declared now: {said}")
        begin(session.folder, asked)

    def _tidy(self, names: Sequence[str]) -> None:
        """Of tests that were left out no empty folders are left."""
        for path in (self.folder.path / name for name in names):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()

    def _refuse_other_folder(self) -> None:
        """Somebody else's files are not written among."""
        path = self.folder.path
        if not is_results(path) and any(path.iterdir()):
            raise ConfigError("--results", f"{path} has files, and is no results folder of llmtap bench")


def _check(test: BenchTest[Any], session: BenchSession, params: msgspec.Struct) -> None:
    """Raises ConfigError that names what is missing, and how it is given."""
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
    """An option of a replay is a key of the file here."""
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
