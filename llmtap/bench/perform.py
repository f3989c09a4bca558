"""Benchmarks carried out, test by test, in the order in which later ones need what earlier ones found.

What a test cannot run without is asked for before anything is sent. Of several tests, one that cannot run is
left out and told at the end; whether it can is looked at again when it is its turn, since a test before it
may have found what was lacking.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from llmtap.bench.file import BenchFile, params_told, without_keys
from llmtap.bench.folder import Folder
from llmtap.bench.registry import test_named
from llmtap.bench.report import ASKED, RESULT, date_of, document_of, is_results, report_of, versions
from llmtap.bench.session import BASELINE, Session, Watcher
from llmtap.bench.test import BenchTest
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
    watcher: Watcher
    seed: int = 42
    quick: bool = False
    warmup: str = "auto"
    runs: int = 1
    """Of each test, independent of each other: every one is warmed up anew and has a seed of its own, which
    is the same for every system that is measured with `seed`."""
    command: str = ""
    """As it was typed, for who wants to do it again."""
    clock: Clock = field(default_factory=SystemClock)
    _session: Session | None = None
    _stopped: bool = False

    def stop(self) -> None:
        """What was measured is kept; `run` raises Interrupted."""
        self._stopped = True
        if self._session is not None:
            self._session.stop()

    async def run(self, names: Sequence[str]) -> dict[str, Any]:
        """Run them. Returns the document (`bench/report.py`), which is in the results folder, too.

        Raises:
            ConfigError: the one test that was asked for cannot run, or none of several can.
            Interrupted: somebody stopped it; the same call goes on where it was.
        """
        self._refuse_other_folder()
        chosen = [test_named(name) for name in sorted(names, key=ORDER.index)]
        lacking = dict(self._lacking(chosen))
        if len(lacking) == len(chosen):
            self._tidy(chosen)
            raise next(iter(lacking.values()))
        asked = self._asked(chosen)
        self.folder.write_json(ASKED, asked)
        for name, why in lacking.items():
            self.watcher.step(name, f"will be left out, unless a test before it tells: {_said(why)}")
        reports: list[dict[str, Any]] = []
        not_run: list[dict[str, Any]] = []
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
            left = len(begun) - i - 1
            if left:
                which = f", run {run} of {self.runs}" if self.runs > 1 else ""
                self.watcher.left(f"{test.name} ({test.section} {test.title}){which}, then {left:,} more")
            else:
                self.watcher.left("")
            try:
                reports.append(await self._run_one(test, session, params))
            except ConfigError as exc:
                if len(chosen) == 1:
                    raise _as_in_file(exc) from None
                not_run.append(_left_out(test, _as_in_file(exc), begun=True))
        return document_of(asked, reports, not_run)

    async def _run_one(
        self, test: BenchTest[Any], session: Session, params: msgspec.Struct
    ) -> dict[str, Any]:
        self._session = session
        if self._stopped:
            session.stop()
        began_ns = self.clock.wall_ns()
        try:
            found = await test.run(session, params)
        finally:
            self._session = None
        report = report_of(test, params, session, found, began_ns=began_ns, ended_ns=self.clock.wall_ns())
        session.folder.write_json(RESULT, report)
        return report

    def _prepared(self, test: BenchTest[Any], run: int = 1) -> tuple[Session, msgspec.Struct]:
        params = self.file.params_of(test, quick=self.quick)
        session = Session(
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

    def _tidy(self, tests: Sequence[BenchTest[Any]]) -> None:
        """Nothing was measured: no empty folders are left."""
        for path in (*(self.folder.path / test.name for test in tests), self.folder.path):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()

    def _refuse_other_folder(self) -> None:
        """Somebody else's files are not written among."""
        path = self.folder.path
        if not is_results(path) and any(path.iterdir()):
            raise ConfigError("--results", f"{path} has files, and is no results folder of llmtap bench")


def _check(test: BenchTest[Any], session: Session, params: msgspec.Struct) -> None:
    """Raises ConfigError that names what is missing, and how it is given."""
    for arm in test.arms:
        if arm != BASELINE and arm not in session.arms:
            raise ConfigError(
                f"[arms.{arm}]", f"is missing: {test.name} compares {', '.join(test.arms)}",
                "in the file of --config, as what differs from [target]: url, headers, body or apply",
            )  # fmt: skip
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
