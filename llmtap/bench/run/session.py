"""Send the loads of a benchmark test and return their results, or read results that were measured before.

A test makes a `Load` (`make_load`), calls `BenchSession.measure` with it and gets a `Measurement`. The server
is first switched to the load's configuration (arm) and warmed up in it once (4.5); then `load/replay` sends
the load. Requests, result and capture are stored in the results folder (`Folder`). A `SessionWatcher` gets
the progress.

    RESULTS/
      bench.json            SUT, target, parameters, seeds, versions (without secrets)
      server.log            output of the server, if llmtap started it
      TEST/asked.json       parameters of the test's runs, to detect a change
      TEST/result.json      report of the test
      TEST/steps/NAME/      one load: step.json, requests.jsonl.gz (bodies), requests.parquet, capture/
      TEST/run-2/           the second run of a test (`--runs`)

A load is written to a temporary folder that is renamed when the load is complete. `requests.jsonl.gz` has a
line for each request (IETF 4.3.3): `row`, `arrival` (seconds, or null), `after` (row of the request whose
response it waits for, or null) and `body`, byte for byte. If the bodies exceed `BYTES_MAX`, only their digest
is stored.
"""

import asyncio
import gzip
import hashlib
import os
import shutil
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import msgspec
import pyarrow.compute as pc

from llmtap.bench.compliance.evidence import plural
from llmtap.bench.run.measurement import Measurement, MeasurementRecorder
from llmtap.bench.run.pace import ExpectedLoads, MeasuredLoad, Pace, RequestKind
from llmtap.bench.sut.detect import round_trip_ns
from llmtap.bench.sut.start import ModelLoad
from llmtap.bench.sut.sut import BenchTarget, Sut, TargetArm, TokenCounting
from llmtap.clock import SystemClock
from llmtap.errors import ConfigError, LlmtapError
from llmtap.exchange.exchange import Exchange
from llmtap.load.bodies import PreparedBodies
from llmtap.load.options import BodyOptions, LoadPlan, ScheduleOptions
from llmtap.load.replay.options import read_headers
from llmtap.load.replay.perform import ProgressListener, Replay, ReplayStopped
from llmtap.load.replay.plan import ReplayPlan, make_plan
from llmtap.load.workers.worker_pool import LoadResult
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.latency import DEFAULT_BENEFIT
from llmtap.metrics.objectives import Objectives
from llmtap.units import NS_PER_S, Duration, to_seconds
from llmtap.user_files import decode_json, open_private
from llmtap.workload.registry import is_workload
from llmtap.workload.requests import Requests

TIMEOUT: Final = Duration(600 * NS_PER_S)
CAPTURE: Final = "capture"
BASELINE: Final = ""
"""Name of the arm without changes to the target."""
RESULT: Final = "result.json"
S = TypeVar("S", bound=msgspec.Struct)


class Folder:
    """Folder with the files of a benchmark or of a test. It is created when something is written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def subfolder(self, name: str) -> "Folder":
        return Folder(self.path / name)

    def run(self, number: int) -> "Folder":
        """Return the folder of a run (numbered from 1) of this test; run 1 uses the test's own folder."""
        return self if number == 1 else self.subfolder(f"run-{number}")

    def runs(self) -> list[int]:
        """Return the numbers of the runs that have a report."""
        names = [path.name.removeprefix("run-") for path in self.path.glob("run-*")]
        numbers = [1, *(int(name) for name in names if name.isdecimal())]
        return sorted(n for n in numbers if (self.run(n).path / RESULT).is_file())

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file atomically. Raises ConfigError if its folder cannot be created."""
        temporary = self.path / f"{name}.new"
        try:
            temporary.parent.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            problem = f"cannot create the folder {temporary.parent}: {exc.strerror}"
            raise ConfigError("--results", problem, "choose a folder that this user may write to") from None
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
        os.replace(temporary, self.path / name)

    def read(self, name: str, kind: type[S]) -> S:
        """Return the content of a file that exists, as `kind`. Raises ConfigError if it has another form."""
        try:
            return msgspec.convert(self.read_json(name), kind)
        except msgspec.ValidationError as exc:
            hint = "it was edited, or another version of llmtap wrote it"
            raise ConfigError(str(self.path / name), f"is not a result of llmtap: {exc}", hint) from None

    def read_json(self, name: str) -> Any:
        """Return a JSON file's content, or None if it is missing. Raises ConfigError if it is not JSON."""
        try:
            return decode_json((self.path / name).read_bytes())
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise ConfigError(
                "--results", f"a part of the path {self.path} is a file", "choose another folder"
            ) from None
        except OSError as exc:
            raise ConfigError(
                str(self.path / name), f"cannot be read: {exc.strerror}", "check its permissions"
            ) from None
        except ValueError as exc:  # This includes errors of msgspec, and UnicodeDecodeError.
            hint = "it was edited or is damaged: restore it, or use another --results"
            raise ConfigError(str(self.path / name), f"is not JSON: {exc}", hint) from None

    def step(self, name: str) -> "Folder":
        """Return the subfolder for the files of one load."""
        return self.subfolder(f"steps/{name}")

    def begin(self, name: str) -> Path:
        """Return an empty folder for a load. `finish` renames it when the load is complete."""
        folder = self.step(f"{name}.unfinished").path
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def finish(self, name: str) -> None:
        """Rename the folder of a complete load, in place of an earlier one with this name."""
        place = self.step(name).path
        shutil.rmtree(place, ignore_errors=True)
        os.replace(self.step(f"{name}.unfinished").path, place)


SPARE_SHARE = 1.25
"""A load has this many times the expected number of arrivals, because a Poisson process can have more."""
SPARE = 50
"""Number of requests added after `SPARE_SHARE`, for short loads: their number of arrivals varies more."""


@dataclass(slots=True, kw_only=True)
class Load:
    """Requests of a load, and the times at which they are sent."""

    plan: ReplayPlan
    """Requests and the times at which they are sent."""
    slots: int | None = None
    """Number of concurrent requests of a closed loop; None: an open loop with the plan's arrivals."""
    rate_rps: float | None = None
    """Rate of the plan's arrivals."""
    duration_ns: int | None = None
    """Maximum duration of sending; None: until the end of the plan."""
    class_of: Callable[[int], str | None] = lambda row: None
    """Request class of a row, if requests have classes."""
    about: dict[str, object] = field(default_factory=dict)
    """Further properties of the load, which the results show."""

    def fingerprint(self) -> str:
        """Return a digest of the requests and their times, to find an equal load that was measured before."""
        requests = self.plan.requests
        digest = hashlib.sha256()
        for column in (requests.arrival_ns, requests.input, requests.output, requests.after):
            digest.update(column.tobytes())
            digest.update(b"|")
        digest.update(repr((self.slots, self.duration_ns, self.plan.describe(), self.about)).encode())
        return digest.hexdigest()[:16]


class OpenLoop(NamedTuple):
    """Arrival process of requests that are sent independently of responses."""

    rate_rps: float
    arrivals: str = "poisson"
    """Arrival process: poisson, uniform, gamma:cv=2, ..."""


WORDS: Final = TokenCounting()
"""Token counting with llmtap's own tokenizer, which counts words; used if the user names no tokenizer."""


def make_load(
    workload: str,
    *,
    seed: int,
    open_loop: OpenLoop | None = None,
    slots: int | None = None,
    requests: int | None = None,
    duration_s: float | None = None,
    output_tokens: int | None = None,
    counting: TokenCounting = WORDS,
) -> Load:
    """Make a load: a workload in an open loop (IETF 4.2.3), or a closed loop of `slots` (4.2.4).

    `workload`: workload, or for a closed loop also a trace. `requests`: maximum number of requests; default:
    enough for `duration_s`, or in a closed loop all requests of the source. `output_tokens`: length of every
    response; default: the lengths of the workload.
    """
    rate_rps, arrivals = (None, None) if open_loop is None else open_loop
    if requests is None and rate_rps is not None:
        assert duration_s is not None
        requests = ceil(rate_rps * duration_s * SPARE_SHARE) + SPARE
    plan = make_plan(
        ScheduleOptions(
            source=workload,
            requests=requests,
            rate=rate_rps,
            closed=slots,
            seed=seed,
            arrivals=arrivals,
        ),
        tokenizer=counting.tokenizer,
        chat=counting.chat,
    )
    if output_tokens is not None:
        for row in range(len(plan.requests.output)):
            plan.requests.output[row] = output_tokens
    duration_ns = None if duration_s is None else round(duration_s * NS_PER_S)
    return Load(plan=plan, slots=slots, rate_rps=rate_rps, duration_ns=duration_ns)


LENGTH_SAMPLES: Final = 256
"""Number of requests of a workload from which the mean response length is estimated."""


def request_kind(test: str, params: msgspec.Struct) -> RequestKind:
    """Return the kind of the requests that a test sends, to estimate its duration."""
    workload = getattr(params, "workload", test)
    tokens = getattr(params, "output_tokens", None)
    return RequestKind(workload, _mean_output_tokens(workload) if tokens is None else tokens)


@cache
def _mean_output_tokens(workload: str) -> float | None:
    """Return the mean response length of a named workload; None for a trace or a data set."""
    if ":" in workload or not is_workload(workload):
        return None
    try:
        return fmean(make_load(workload, slots=1, requests=LENGTH_SAMPLES, seed=0).plan.requests.output)
    except ConfigError:
        return None  # Ignore the error: the check of the test reports it (`BenchTest.check`).


REQUESTS_FILE: Final = "requests.jsonl.gz"
BYTES_MAX: Final = 64 << 20
"""Maximum total size of stored request bodies of a load; 1,000 requests of 500 tokens have about 3 MB."""
_GZIP_LEVEL: Final = 3
"""Compression level. It is low, because prompts of random words shrink to about a third at any level."""


class StoredRequests(msgspec.Struct, frozen=True):
    """Requests of a load: their number (`rows`), the total size (`bytes`) of their bodies, and their file."""

    file: str | None
    """Name of the file; None if the bodies are larger than `BYTES_MAX`."""
    rows: int
    bytes: int
    """Total size of the bodies."""
    sha256: str
    """Digest of all bodies."""


def write_requests(
    prepared: PreparedBodies, requests: Requests, folder: Path, *, planned: bool, bytes_max: int = BYTES_MAX
) -> StoredRequests:
    """Write the requests to a file in `folder`, if their bodies have at most `bytes_max` bytes.

    `planned`: whether the requests have planned arrivals (open loop).
    """
    digest, total = hashlib.sha256(), prepared.bytes_total
    is_stored = total <= bytes_max
    if is_stored:
        # Write no name and no date into the gzip header, so that equal requests give equal files.
        with (
            open(folder / REQUESTS_FILE, "wb", opener=open_private) as raw,
            gzip.GzipFile("", "wb", _GZIP_LEVEL, raw, mtime=0) as file,
        ):
            for row, body in _bodies(prepared):
                digest.update(body)
                after = requests.after[row] if requests.after else -1
                line = {
                    "row": row,
                    "arrival": to_seconds(requests.arrival_ns[row]) if planned else None,
                    "after": None if after < 0 else after,
                    "body": msgspec.Raw(body or b"null"),
                }
                file.write(msgspec.json.encode(line) + b"\n")
    else:
        for _, body in _bodies(prepared):
            digest.update(body)
    file_name = REQUESTS_FILE if is_stored else None
    return StoredRequests(file_name, len(prepared), total, digest.hexdigest())


def _bodies(prepared: PreparedBodies) -> Iterator[tuple[int, bytes]]:
    for row, (begin, end) in enumerate(zip(prepared.begins, prepared.ends, strict=True)):
        yield row, os.pread(prepared.fd, end - begin, begin)


class Interrupted(LlmtapError):
    """The user stopped the test. Its complete loads are stored; the same command measures only the others."""


class SessionWatcher(ProgressListener, Protocol):
    def step(self, name: str, message: str, seconds: float | None = None) -> None:
        """Report the start of a load or another step. `message`: its description; `seconds`: its duration."""
        ...

    def report_remaining(self, text: str) -> None:
        """Report the part of a test or benchmark that is still to be done."""
        ...

    def estimate_remaining(self, seconds: float) -> None:
        """Set the estimated time until the end of the benchmark, which progress lines show."""
        ...


@dataclass(slots=True)
class BenchSession:
    """One run of one test. It sends the loads to the arms (configurations), and keeps the measurements."""

    name: str
    folder: Folder
    target: BenchTarget
    watcher: SessionWatcher
    """Gets the progress, to show it."""
    sut: Sut = field(default_factory=Sut)
    arms: Mapping[str, TargetArm] = field(default_factory=dict)
    """By name: configuration of the target, to which loads can be sent."""
    seed: int = 42
    quick: bool = False
    """Whether the test is shortened by `--quick`."""
    run: int = 1
    """Number of this run of the test; each run has its own seed."""
    reader: Benefit = DEFAULT_BENEFIT
    """Reading speed of the assumed user, for user idle latency and smooth goodput."""
    warmup: str = "auto"
    """Warm-up, as in `llmtap replay --warmup`: `auto` (IETF 4.5), `none` (cold start), or
    a number of requests."""
    steps: list[Measurement] = field(default_factory=list)
    """Measurements of the loads so far."""
    warmups: list[Mapping[str, Any]] = field(default_factory=list)
    """JSON of each warm-up so far, for the report."""
    refused: int = 0
    """Number of requests that guardrails refused, in all loads."""
    model_load: ModelLoad | None = None
    """Times of the server's start, if llmtap started it; else None."""
    pace: Pace = field(default_factory=Pace)
    """Measured durations, to estimate the remaining time. All sessions of a benchmark share it."""
    kind: RequestKind = field(default_factory=RequestKind)
    """Kind of the requests of this test, to estimate their duration from requests of the same kind."""
    expected: ExpectedLoads = field(default_factory=lambda: ExpectedLoads([]))
    """The loads that this run is still expected to send."""
    time_left_s: Callable[[], float | None] = lambda: None
    """Function that returns the estimated remaining time of all tests; None while it is not known."""
    _round_trips_s: dict[str, float | None] = field(default_factory=dict)
    """Network round trip in seconds by address, measured before the test's first load to it (IETF 4.7.3)."""
    _warm_arms: set[str] = field(default_factory=set)
    """Arms that were warmed up after the latest switch of the server to another arm."""
    _active_arm: str | None = None
    """Arm to which a command (`apply`) switched the server; None: no command was run yet."""
    _replay: Replay | None = None
    """Load that is being sent; `stop` stops it."""
    _stopped: bool = False
    """Whether a signal stopped the benchmark."""

    @property
    def results(self) -> Folder:
        """Folder of the whole benchmark, which has the results of all tests."""
        path = self.folder.path.parent
        return Folder(path if self.run == 1 else path.parent)

    def report_remaining(self, text: str) -> None:
        """Report the part of this test that is still to be done, and the remaining time of all tests."""
        left_s = self.time_left_s()
        self.watcher.report_remaining(
            text if left_s is None else f"{text}; about {duration_text(left_s)} left"
        )

    def stop(self) -> None:
        """End the current load; `measure` then raises Interrupted. Called from a signal handler."""
        self._stopped = True
        if self._replay is not None:
            self._replay.stop()

    def _is_stopped(self) -> bool:
        """Return `_stopped`; a method, because mypy would assume in `measure` that it is still False."""
        return self._stopped

    async def check_reachable(self, arm: str = BASELINE) -> None:
        """Raise ConfigError if the server of an arm cannot be reached or lacks the endpoint."""
        # Use a body without a model name, so that the check always requests the server's list of models.
        requests = Requests(bodies=[b"{}"], paths=["/"])
        replay = self._make_replay(Load(plan=ReplayPlan(requests, None, {})), self._arm_overlay(arm))
        bodies = BodyOptions(endpoint=replay.load.bodies.endpoint)
        replay.load = msgspec.structs.replace(replay.load, bodies=bodies)
        await replay.check_reachable()

    async def measure(
        self,
        name: str,
        load: Load,
        *,
        arm: str = BASELINE,
        slo: str | None = None,
        warm_by: Load | None = None,
        prime: Load | None = None,
    ) -> Measurement:
        """Send a load, or return its stored measurement if an equal load was measured before.

        Args:
            name: name of the load; a path with `/` if a test has many loads.
            arm: configuration of the target (`[arms.NAME]`); empty: the target without changes.
            slo: objectives of the goodput in the result.
            warm_by: load from which the warm-up takes its lengths (IETF 5.9.3); None: this load.
            prime: load that is sent first, to fill a prefix cache (5.7.3); its result is discarded.

        Raises:
            ConfigError: the arm is missing or its command fails, or the server refuses the load.
            Interrupted: `stop` was called.
        """
        if self._stopped:
            raise Interrupted(f"a signal stopped the test before the load {name}: repeat the command")
        overlay = self._arm_overlay(arm)
        fingerprint = self._fingerprint(load, arm, overlay, slo)
        step = self.folder.step(name)
        stored = step.read_json("step.json")
        if stored is not None and stored["fingerprint"] == fingerprint:
            self.watcher.step(name, "measured before")
            return self._add_step(Measurement.load(step.path, name, arm, stored["result"]), None)
        await self._switch_arm(arm, overlay)
        if (left_s := self.time_left_s()) is not None:
            self.watcher.estimate_remaining(left_s)
        self.watcher.step(name, _load_text(load), _duration_s(load))
        place = self.folder.begin(name)
        recorder: MeasurementRecorder | None = None
        stored_requests: list[StoredRequests] = []

        def start_recording(outcome: LoadResult) -> Callable[[int, Exchange], None]:
            nonlocal recorder
            objectives = None if slo is None else Objectives.parse(slo)
            recorder = MeasurementRecorder(outcome.began_ns, load.class_of, objectives, self.reader)
            return recorder.add

        url = overlay.url or self.target.url
        if url not in self._round_trips_s:
            trip_ns = await round_trip_ns(url, SystemClock())
            self._round_trips_s[url] = None if trip_ns is None else to_seconds(trip_ns)
        warmup_result: dict[str, Any] | None = None
        if self.warmup != "none" and arm not in self._warm_arms:
            # `run_warmup` uses only the lengths of this load: it sends other texts, so that no prompt of the
            # measured load is in a prefix cache.
            replay = self._make_replay(warm_by or load, overlay, warmup=self.warmup)
            warmup_began_ns = SystemClock.mono_ns()
            warmup_result = await self._perform(replay, replay.run_warmup())
            self.pace.add_warmup(to_seconds(SystemClock.mono_ns() - warmup_began_ns))
            self.expected.warmups = max(0, self.expected.warmups - 1)
        began_ns = SystemClock.mono_ns()
        if prime is not None:
            replay = self._make_replay(prime, overlay)
            await self._perform(replay, replay.run())
        replay = self._make_replay(load, overlay, slo=slo, capture=str(place / CAPTURE))
        replay.on_prepared = lambda prepared: stored_requests.append(
            write_requests(prepared, load.plan.requests, place, planned=load.slots is None)
        )
        replay.start_recording = start_recording
        result = await self._perform(replay, replay.run(), allow_partial=True)
        assert recorder is not None
        result["round_trip"] = self._round_trips_s[url]
        result["capture"]["to"] = str(step.path / CAPTURE)
        if prime is not None:
            result["primed"] = len(prime.plan.requests)
        if warmup_result is not None:
            result["warmup"] = warmup_result
            self._warm_arms.add(arm)
        measurement = Measurement(name, arm, result, recorder.table())
        if self._is_stopped():
            # Report the partial load but do not store it: the same command then sends the whole load again.
            self.steps += [measurement] if measurement.n else []
            raise Interrupted(f"a signal stopped the test during the load {name}: repeat the command")
        measurement.save(place)
        document = {
            "name": name,
            "arm": arm,
            "fingerprint": fingerprint,
            "requests": stored_requests[-1] if stored_requests else None,
            "load": {"closed": load.slots, "rate_rps": load.rate_rps, **load.about},
            "result": result,
        }
        Folder(place).write_json("step.json", document)
        self.folder.finish(name)
        return self._add_step(measurement, to_seconds(SystemClock.mono_ns() - began_ns))

    async def _perform(
        self, replay: Replay, work: Coroutine[Any, Any, dict[str, Any]], *, allow_partial: bool = False
    ) -> dict[str, Any]:
        """Run a replay so that `stop` can end it. Raises Interrupted if it was stopped."""
        self._replay = replay
        try:
            result = await work
        except ReplayStopped as exc:
            raise Interrupted(str(exc)) from None
        finally:
            self._replay = None
        if self._stopped and not allow_partial:
            raise Interrupted("a signal stopped the test before the load was measured: repeat the test")
        return result

    def _add_step(self, measurement: Measurement, duration_s: float | None) -> Measurement:
        """Add a measured load. `duration_s`: its time with preparation; None: an earlier command sent it."""
        self.steps.append(measurement)
        self.pace.add_load(self.kind, _measured_load(measurement), duration_s)
        self.expected.end_load()
        self.refused += int((measurement.result.get("outcomes") or {}).get("refused", 0))
        warmup = measurement.result.get("warmup") or {"skipped": True}
        if not warmup.get("skipped"):
            self.warmups.append({"arm": measurement.arm, "step": measurement.name, **warmup})
        return measurement

    def _arm_overlay(self, arm: str) -> TargetArm:
        """Return the configured differences of an arm from the baseline."""
        if arm == BASELINE:
            return TargetArm()
        if arm not in self.arms:
            hint = "add it to the file of --config; `llmtap bench list` shows the arms"
            raise ConfigError(f"[arms.{arm}]", f"is missing, but the test {self.name} needs this arm", hint)
        return self.arms[arm]

    async def _switch_arm(self, arm: str, overlay: TargetArm) -> None:
        """Run the arm's command (`apply`), if any, to switch the server. Raises ConfigError if it fails."""
        if not overlay.apply or self._active_arm == arm:
            return
        self.watcher.step(arm, "switching the SUT over")
        process = await asyncio.create_subprocess_exec(
            *overlay.apply,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()
        if process.returncode:
            last_lines = errors.decode(errors="replace").strip().splitlines()[-1:]
            cause = last_lines[0] if last_lines else f"it ended with status {process.returncode}"
            raise ConfigError(
                f"[arms.{arm}] apply",
                f"the command failed: {cause}",
                "run the command in a shell to see all its output",
            )
        self._active_arm = arm
        self._warm_arms.clear()

    def _make_replay(
        self,
        load: Load,
        overlay: TargetArm,
        warmup: str = "none",
        *,
        slo: str | None = None,
        capture: str | None = None,
    ) -> Replay:
        target = self.target
        headers = [*read_headers([], None, target.key_env), *target.headers.items(), *overlay.headers.items()]
        plan = LoadPlan.of(
            closed=load.slots,
            duration=None if load.duration_ns is None else Duration(load.duration_ns),
            url=overlay.url or target.url,
            headers=headers,
            ca=target.ca,
            endpoint=target.endpoint,
            server=target.server,
            model=target.model,
            tokenizer=target.tokenizer,
            temperature=0.0,
            fields={**target.body, **overlay.body},
            processes=target.processes,
            timeout=TIMEOUT,
            warmup=warmup,
            scrape=target.metrics,
            reader=self.reader,
            slo=slo,
            capture=capture,
        )
        return Replay(load.plan, plan, self.watcher)

    def _fingerprint(self, load: Load, arm: str, overlay: TargetArm, slo: str | None) -> str:
        """Return a digest of all settings that affect the measurement, so not of declarations (`[sut]`)."""
        targets = msgspec.json.encode([self.target, overlay])
        parts = (load.fingerprint(), arm, slo, self.warmup, targets, self.reader)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _measured_load(measured: Measurement) -> MeasuredLoad:
    """Return the figures by which the duration of later loads is predicted."""
    completed = measured.successful_rows()
    span_ns = pc.max(measured.table["end_ns"]).as_py() or 0
    return MeasuredLoad(
        requests=len(completed),
        span_s=to_seconds(span_ns),
        response_s=to_seconds(pc.mean(completed["e2e_ns"]).as_py() or 0),
        output_tokens=pc.mean(completed["output_tokens"]).as_py(),
    )


def _load_text(load: Load) -> str:
    requests = len(load.plan.requests)
    if load.slots is not None:
        how = f"{load.slots:,} at a time"
    elif load.rate_rps is not None:
        how = f"{load.rate_rps:g} requests/s"
    else:
        how = "at its own times"
    if load.duration_ns is not None:
        return f"{how}, {load.duration_ns / NS_PER_S:g} s"
    time = _duration_s(load)
    return f"{how}, {plural(requests, 'request')}" + ("" if time is None else f", {duration_text(time)}")


def _duration_s(load: Load) -> float | None:
    """Return the planned seconds until the last request is sent; None for a closed loop without duration."""
    if load.duration_ns is not None:
        return load.duration_ns / NS_PER_S
    arrivals = load.plan.requests.arrival_ns
    return arrivals[-1] / NS_PER_S if load.slots is None and len(arrivals) else None


def duration_text(seconds: float) -> str:
    """Format a duration as `42 min` or `90 s`."""
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
