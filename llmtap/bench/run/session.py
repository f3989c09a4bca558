"""Send the loads of a benchmark test and return their results, or read results measured before.

A test makes a `Load` (`make_load`), calls `BenchSession.measure` with it and gets a `Measurement`. The server
is first switched to the load's configuration (arm) and warmed up in it once (4.5); then `load/replay` sends
the load. Requests, result and capture are stored in the results folder (`Folder`). A `SessionWatcher` gets
the progress.

    RESULTS/
      bench.json            SUT, target, parameters, seeds, versions (no keys)
      server.log            output of the server, if llmtap started it
      TEST/asked.json       parameters of the test's runs, to recognise other ones
      TEST/result.json      report of the test
      TEST/steps/NAME/      one load: step.json, requests.jsonl.gz (bodies), requests.parquet, capture/
      TEST/run-2/           the second run of a test (`--runs`)

A load is written to a folder beside its place and renamed when it is complete. `requests.jsonl.gz` has a line
for each request (IETF 4.3.3): `row`, `arrival` (seconds, or null), `after` (row whose response it waits for,
or null) and `body`, byte for byte. Above `BYTES_MAX` only the digest is stored.
"""

import asyncio
import gzip
import hashlib
import os
import shutil
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from llmtap.bench.compliance.evidence import several
from llmtap.bench.run.measurement import Measurement, MeasurementRecorder
from llmtap.bench.sut.detect import round_trip_ns
from llmtap.bench.sut.start import ModelLoad
from llmtap.bench.sut.sut import BenchTarget, Sut, TargetArm
from llmtap.clock import SystemClock
from llmtap.errors import ConfigError, LlmtapError
from llmtap.exchange.exchange import Exchange
from llmtap.load.bodies import BodyOptions, Prepared
from llmtap.load.replay.options import ReplayOptions, read_headers
from llmtap.load.replay.perform import ProgressListener, Replay, ReplayStopped
from llmtap.load.replay.plan import ReplayPlan, ReplayQuestion, make_plan
from llmtap.load.workers.worker_pool import LoadResult
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.latency import DEFAULT_BENEFIT
from llmtap.metrics.objectives import Objectives
from llmtap.units import NS_PER_S, Duration, to_seconds
from llmtap.user_files import decode_json
from llmtap.workload.requests import Requests

TIMEOUT: Final = Duration(600 * NS_PER_S)
CAPTURE: Final = "capture"
BASELINE: Final = ""
"""Name of the arm without changes to the target."""
RESULT: Final = "result.json"


class Folder:
    """Files of a benchmark or of a test. Folders are made when something is written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def within(self, name: str) -> "Folder":
        return Folder(self.path / name)

    def run(self, number: int) -> "Folder":
        """Return the folder of a run of this test; the first run uses the test's own folder."""
        return self if number == 1 else self.within(f"run-{number}")

    def runs(self) -> list[int]:
        """Return the numbers of the runs that have a report."""
        names = [at.name.removeprefix("run-") for at in self.path.glob("run-*")]
        numbers = [1, *(int(name) for name in names if name.isdecimal())]
        return sorted(n for n in numbers if (self.run(n).path / RESULT).is_file())

    def write_json(self, name: str, value: Any) -> None:
        """Write JSON atomically. Raises ConfigError if the folder cannot be made."""
        beside = self.path / f"{name}.new"
        try:
            beside.parent.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError("--results", f"cannot make {beside.parent}: {exc.strerror}") from None
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
        os.replace(beside, self.path / name)

    def read_json(self, name: str) -> Any:
        """Return the content of a file; None if there is none. Raises ConfigError."""
        try:
            return decode_json((self.path / name).read_bytes())
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise ConfigError("--results", f"{self.path}: part of this path is a file") from None
        except ValueError as exc:  # msgspec's errors, and UnicodeDecodeError
            raise ConfigError(str(self.path / name), f"is no JSON: {exc}") from None

    def step(self, name: str) -> "Folder":
        return self.within(f"steps/{name}")

    def begin(self, name: str) -> Path:
        """Return an empty folder for a load, which `finish` moves to its place."""
        beside = self.step(f"{name}.unfinished").path
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        return beside

    def finish(self, name: str) -> None:
        place = self.step(name).path
        shutil.rmtree(place, ignore_errors=True)
        os.replace(self.step(f"{name}.unfinished").path, place)


SPARE_SHARE = 1.25
"""Factor on the expected number of arrivals, since a Poisson process may have more."""
SPARE = 50


@dataclass(slots=True, kw_only=True)
class Load:
    plan: ReplayPlan
    closed: int | None = None
    """Concurrent requests of a closed loop; None: an open loop with the plan's arrivals."""
    rate_rps: float | None = None
    """Rate of the plan's arrivals."""
    duration_ns: int | None = None
    """Maximum duration of sending; None: until the end of the plan."""
    class_of: Callable[[int], str | None] = lambda row: None
    """Request class of a row, if requests have classes."""
    about: dict[str, object] = field(default_factory=dict)
    """Further properties of the load, as the results show them."""

    def fingerprint(self) -> str:
        requests = self.plan.requests
        digest = hashlib.sha256()
        for column in (requests.arrival_ns, requests.input, requests.output, requests.after):
            digest.update(column.tobytes())
            digest.update(b"|")
        digest.update(repr((self.closed, self.duration_ns, self.plan.describe(), self.about)).encode())
        return digest.hexdigest()[:16]


def make_load(
    workload: str, *, seed: int, rate_rps: float | None = None, slots: int | None = None,
    requests: int | None = None, duration_s: float | None = None, arrivals: str = "poisson",
    tokenizer: str | None = None, chat: bool = True, output_tokens: int | None = None,
) -> Load:  # fmt: skip
    """Make a workload in an open loop at `rate_rps` (IETF 4.2.3), or in a closed loop of `slots` (4.2.4).

    `requests`: their maximum; default: enough for `duration_s`. `output_tokens`: of every answer.
    """
    if requests is None:
        assert rate_rps is not None and duration_s is not None
        requests = ceil(rate_rps * duration_s * SPARE_SHARE) + SPARE
    plan = make_plan(
        ReplayQuestion(
            source=workload, requests=requests, rate_rps=rate_rps, closed=slots is not None, seed=seed,
            arrivals=None if rate_rps is None else arrivals, tokenizer=tokenizer, chat=chat,
        )
    )  # fmt: skip
    if output_tokens is not None:
        for row in range(len(plan.requests.output)):
            plan.requests.output[row] = output_tokens
    duration_ns = None if duration_s is None else round(duration_s * NS_PER_S)
    return Load(plan=plan, closed=slots, rate_rps=rate_rps, duration_ns=duration_ns)


REQUESTS_FILE: Final = "requests.jsonl.gz"
BYTES_MAX: Final = 64 << 20
"""Bytes of a load's bodies; 1,000 requests of 500 tokens are about 3 MB."""
_GZIP_LEVEL: Final = 3
"""Prompts of random words shrink to about a third at any level."""


def write_requests(
    prepared: Prepared, requests: Requests, folder: Path, *, planned: bool, bytes_max: int = BYTES_MAX
) -> dict[str, Any]:
    """Write the requests; return JSON with the `sha256` of all bodies. `planned`: whether arrivals are."""
    digest, total = hashlib.sha256(), prepared.bytes_total
    kept = total <= bytes_max
    if kept:
        # No name and no date, so that equal requests give equal files.
        with (
            (folder / REQUESTS_FILE).open("wb") as raw,
            gzip.GzipFile("", "wb", _GZIP_LEVEL, raw, mtime=0) as file,
        ):
            for row, body in _bodies(prepared):
                digest.update(body)
                after = requests.after[row] if requests.after else -1
                line = {
                    "row": row, "arrival": to_seconds(requests.arrival_ns[row]) if planned else None,
                    "after": None if after < 0 else after, "body": msgspec.Raw(body or b"null"),
                }  # fmt: skip
                file.write(msgspec.json.encode(line) + b"\n")
    else:
        for _, body in _bodies(prepared):
            digest.update(body)
    return {
        "file": REQUESTS_FILE if kept else None, "rows": len(prepared), "bytes": total,
        "sha256": digest.hexdigest(),
    }  # fmt: skip


def _bodies(prepared: Prepared) -> Iterator[tuple[int, bytes]]:
    for row, (begin, end) in enumerate(zip(prepared.begins, prepared.ends, strict=True)):
        yield row, os.pread(prepared.fd, end - begin, begin)


class Interrupted(LlmtapError):
    """The user stopped the test. Complete loads are in the results folder; the same command resumes it."""


class SessionWatcher(ProgressListener, Protocol):
    def step(self, name: str, said: str, seconds: float | None = None) -> None:
        """A load with the given duration begins, or is not sent again (`said` is "measured before")."""
        ...

    def left(self, said: str) -> None: ...


@dataclass(slots=True)
class BenchSession:
    name: str
    folder: Folder
    target: BenchTarget
    watcher: SessionWatcher
    sut: Sut = field(default_factory=Sut)
    arms: Mapping[str, TargetArm] = field(default_factory=dict)
    seed: int = 42
    quick: bool = False
    run: int = 1
    """Number of this run of the test; each run has its own seed."""
    reader: Benefit = DEFAULT_BENEFIT
    """Reader for user idle latency and smooth goodput."""
    warmup: str = "auto"
    """As `llmtap replay --warmup`: `auto` is IETF 4.5, `none` a cold start, or a number of requests."""
    steps: list[Measurement] = field(default_factory=list)
    warmups: list[dict[str, Any]] = field(default_factory=list)
    refused: int = 0
    model_load: ModelLoad | None = None
    """Of the server, if this run of the bench started it."""
    _trips: dict[str, float | None] = field(default_factory=dict)
    """Network round trip in seconds by address, measured before the test's first load to it (4.7.3)."""
    _warm: set[str] = field(default_factory=set)
    _state: str | None = None
    _replay: Replay | None = None
    _stopped: bool = False

    @property
    def results(self) -> Folder:
        """Folder of all tests, with the results of other tests."""
        path = self.folder.path.parent
        return Folder(path if self.run == 1 else path.parent)

    def stop(self) -> None:
        """End the current load; `measure` then raises Interrupted. Called from a signal handler."""
        self._stopped = True
        if self._replay is not None:
            self._replay.stop()

    def _is_stopped(self) -> bool:
        return self._stopped

    async def reach(self, arm: str = BASELINE) -> None:
        """Raise ConfigError if the server of an arm cannot be reached or lacks the endpoint."""
        # Without the model's name, so that the server is always asked for its models.
        one = self._replay_of(Load(plan=ReplayPlan(Requests(bodies=[b"{}"]), None, {})), self._overlay(arm))
        one.body = BodyOptions(endpoint=one.body.endpoint)
        await one.reach()

    async def measure(
        self, name: str, load: Load, *, arm: str = BASELINE, slo: str | None = None,
        warm_by: Load | None = None, prime: Load | None = None,
    ) -> Measurement:  # fmt: skip
        """Send a load, unless this very one was measured before. Raises Interrupted, and ConfigError.

        Args:
            name: of the step; a path with `/` where a test has many.
            arm: the configuration to send it to (`[arms.NAME]`); empty: the target as it is.
            slo: bounds by which the result's goodput counts.
            warm_by: load with the lengths of the warm-up, if not this one (5.9.3).
            prime: sent just before the load, to fill a prefix cache (5.7.3), and not kept.
        """
        if self._stopped:
            raise Interrupted("stopped")
        overlay = self._overlay(arm)
        fingerprint = self._fingerprint(load, arm, overlay, slo)
        step = self.folder.step(name)
        before = step.read_json("step.json")
        if before is not None and before["fingerprint"] == fingerprint:
            self.watcher.step(name, "measured before")
            return self._keep(Measurement.load(step.path, name, arm, before["result"]))
        await self._switch(arm, overlay)
        self.watcher.step(name, _says(load), _lasts_s(load))
        place = self.folder.begin(name)
        recorder: MeasurementRecorder | None = None
        exact: dict[str, Any] = {}

        def keeping(outcome: LoadResult) -> Callable[[int, Exchange], None]:
            nonlocal recorder
            objectives = None if slo is None else Objectives.parse(slo)
            recorder = MeasurementRecorder(outcome.began_ns, load.class_of, objectives, self.reader)
            return recorder.add

        url = overlay.url or self.target.url
        if url not in self._trips:
            trip_ns = await round_trip_ns(url, SystemClock())
            self._trips[url] = None if trip_ns is None else to_seconds(trip_ns)
        warmed: dict[str, Any] | None = None
        if self.warmup != "none" and arm not in self._warm:
            # Requests like those of the load, but not the same.
            one = self._replay_of(warm_by or load, overlay, warmup=self.warmup)
            warmed = await self._perform(one, one.warm())
        if prime is not None:
            one = self._replay_of(prime, overlay)
            await self._perform(one, one.run())
        one = self._replay_of(load, overlay, slo=slo, capture=str(place / CAPTURE))
        one.asking = lambda prepared: exact.update(
            write_requests(prepared, load.plan.requests, place, planned=load.closed is None)
        )
        one.keeping = keeping
        result = await self._perform(one, one.run(), partly=True)
        assert recorder is not None
        result["round_trip"] = self._trips[url]
        result["capture"]["to"] = str(step.path / CAPTURE)
        if prime is not None:
            result["primed"] = len(prime.plan.requests)
        if warmed is not None:
            result["warmup"] = warmed
            self._warm.add(arm)
        found = Measurement(name, arm, result, recorder.table())
        if self._is_stopped():  # reported, and sent again when the command is resumed
            self.steps += [found] if found.n else []
            raise Interrupted("stopped")
        found.save(place)
        told = {
            "name": name, "arm": arm, "fingerprint": fingerprint, "requests": exact,
            "load": {"closed": load.closed, "rate_rps": load.rate_rps, **load.about},
            "result": result,
        }  # fmt: skip
        Folder(place).write_json("step.json", told)
        self.folder.finish(name)
        return self._keep(found)

    async def _perform(
        self, one: Replay, work: Coroutine[Any, Any, dict[str, Any]], *, partly: bool = False
    ) -> dict[str, Any]:
        self._replay = one
        try:
            result = await work
        except ReplayStopped:
            raise Interrupted("stopped") from None
        finally:
            self._replay = None
        if self._stopped and not partly:
            raise Interrupted("stopped")
        return result

    def _keep(self, found: Measurement) -> Measurement:
        self.steps.append(found)
        self.refused += int((found.result.get("outcomes") or {}).get("refused", 0))
        warmup = found.result.get("warmup") or {"skipped": True}
        if not warmup.get("skipped"):
            self.warmups.append({"arm": found.arm, "step": found.name, **warmup})
        return found

    def _overlay(self, arm: str) -> TargetArm:
        if arm == BASELINE:
            return TargetArm()
        if arm not in self.arms:
            raise ConfigError(f"[arms.{arm}]", f"is missing: {self.name} compares it", "llmtap bench list")
        return self.arms[arm]

    async def _switch(self, arm: str, overlay: TargetArm) -> None:
        if not overlay.apply or self._state == arm:
            return
        self.watcher.step(arm, "switching the SUT over")
        process = await asyncio.create_subprocess_exec(
            *overlay.apply, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, said = await process.communicate()
        if process.returncode:
            last = said.decode(errors="replace").strip().splitlines()[-1:] or [f"exit {process.returncode}"]
            raise ConfigError(f"[arms.{arm}] apply", f"failed: {last[0]}")
        self._state = arm
        self._warm.clear()

    def _replay_of(self, load: Load, overlay: TargetArm, warmup: str = "none", **more: Any) -> Replay:
        target = self.target
        fields = [*read_headers([], None, target.key_env), *target.headers.items(), *overlay.headers.items()]
        options = ReplayOptions(
            target=overlay.url or target.url, endpoint=target.endpoint, model=target.model, headers=fields,
            ca=target.ca, closed=load.closed, processes=target.processes, timeout=TIMEOUT,
            connect_timeout=Duration(10 * NS_PER_S), warmup=warmup,
            duration=None if load.duration_ns is None else Duration(load.duration_ns),
            scrape=target.metrics, reader=self.reader, **more,
        )  # fmt: skip
        body = BodyOptions(
            endpoint=target.endpoint, server=target.server, model=target.model,  # type: ignore[arg-type]
            temperature=0.0, fields={**target.body, **overlay.body},
        )  # fmt: skip
        return Replay(load.plan, options, body, self.watcher)

    def _fingerprint(self, load: Load, arm: str, overlay: TargetArm, slo: str | None) -> str:
        """Return a digest of what determines the measurement, without declarations about the SUT."""
        told = msgspec.json.encode([self.target, overlay])
        parts = (load.fingerprint(), arm, slo, self.warmup, told, self.reader)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _says(load: Load) -> str:
    requests = len(load.plan.requests)
    if load.closed is not None:
        how = f"{load.closed:,} at a time"
    elif load.rate_rps is not None:
        how = f"{load.rate_rps:g} requests/s"
    else:
        how = "at its own times"
    if load.duration_ns is not None:
        return f"{how}, {load.duration_ns / NS_PER_S:g} s"
    time = _lasts_s(load)
    return f"{how}, {several(requests, 'request')}" + ("" if time is None else f", {time_said(time)}")


def _lasts_s(load: Load) -> float | None:
    """Return the time until the last request of a load is sent, if known."""
    if load.duration_ns is not None:
        return load.duration_ns / NS_PER_S
    arrivals = load.plan.requests.arrival_ns
    return arrivals[-1] / NS_PER_S if load.closed is None and len(arrivals) else None


def time_said(seconds: float) -> str:
    """Format a duration as `42 min` or `90 s`."""
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
