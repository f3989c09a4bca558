"""Perform a replay plan: prepare bodies, warm the server up, send and monitor the load, return the result.

`Replay` takes a `ReplayPlan` (`plan.py`) and a `LoadPlan` (`load/options.py`); `run` returns the result as
public JSON (`result.py`), with the comparison to recorded answers (`baseline.py`), and writes a capture if
one is configured. Used by `llmtap replay`, `llmtap demo`, `llmtap bench` and the self-test. The load itself
is sent by `workers/worker_pool.py`. In the order of the IETF draft, 4.5 and 5: bodies are prepared before the
load and exchanges are read after it, and no figure includes the warm-up.
"""

import asyncio
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pyarrow as pa

from llmtap.capture.csv_file import write_csv
from llmtap.capture.schema import CaptureInfo
from llmtap.capture.store.parquet import BATCH_ROWS, RunWriter, check_place
from llmtap.capture.store.rows import to_batch
from llmtap.clock import SystemClock, WallAnchor
from llmtap.errors import ConfigError, LlmtapError
from llmtap.exchange.exchange import Exchange, RequestShape, Turn
from llmtap.json_types import json_value
from llmtap.load.bodies import PreparedBodies, limit_of_body, model_ids, prepare, server_of
from llmtap.load.endpoint_check import NO_ENDPOINT, endpoint_error, is_unanswerable
from llmtap.load.host_limits import check_connections
from llmtap.load.monitor.watch import LoadMonitor
from llmtap.load.options import BodyOptions, LoadPlan
from llmtap.load.prompt_sender import check_target
from llmtap.load.replay.baseline import Baseline, read_recorded
from llmtap.load.replay.options import USER_AGENT, AnyMaker, check_listening, http_url_of, maker_for, notes_of
from llmtap.load.replay.plan import ReplayPlan, reverse_words
from llmtap.load.replay.result import ObservedLengths, RunObservations, result_of
from llmtap.load.sending import protocol_of, shown_url
from llmtap.load.warmup import WarmUpOptions, warm_up
from llmtap.load.workers.ray_worker import RayMember
from llmtap.load.workers.worker_handle import LocalMember, Progress, WorkerSetup
from llmtap.load.workers.worker_pool import STOPPED, LoadResult, Member, WorkerPool
from llmtap.metrics.objectives import Objectives
from llmtap.net.bounded_body import read_at_most
from llmtap.net.cluster import ray_cluster
from llmtap.net.listener import ADMIN_PORT, ERROR_FIELD, failure_text
from llmtap.options.fields import flags_given
from llmtap.workload.requests import Requests

CONNECTIONS_MAX: Final = 1_000
"""Maximum number of connections opened before the load; further ones are opened on demand."""
PATHS_MAX: Final = 20
"""Maximum number of request paths in a result."""
HOLD_NS: Final = 2_000_000_000
"""Assumed duration of an answer, for estimating the number of connections."""


class ProgressListener(Protocol):
    """Receiver of the progress of a replay."""

    def on_preparing(self, done: int, of: int) -> None:
        """Receive how many of the request bodies are made."""
        ...

    def on_warming(self, how: str, done: int = 0, of: int | None = None, what: str = "requests") -> None:
        """`how`: value of `--warmup`. `done` of at most `of` have ended. `what`: `requests` or `probes`."""
        ...

    def on_sending(self, progress: Progress, planned: int | None) -> None:
        """`planned`: number of requests of the load; None if only its duration is known."""
        ...

    def on_writing_capture(self, done: int, of: int) -> None:
        """Receive how many of the exchanges are written to a capture."""
        ...

    def on_comparing(self, done: int, of: int | None) -> None:
        """Receive how many of the recorded answers are compared with those of the replay."""
        ...


class ReplayStopped(LlmtapError):
    """The replay was stopped before there was anything to report."""


class ReplayStage(Enum):
    """Stage of a replay; decides what a stop does."""

    PREPARING = "preparing"
    """Nothing was sent yet, so the replay can be aborted."""
    SENDING = "sending"
    """The warm-up or the load is sent; `stop` ends this stage."""
    REPORTING = "reporting"
    """The load is over; results are read and written."""


@dataclass(slots=True)
class Replay:
    """One replay. `stop` can be called from a signal handler at any time."""

    plan: ReplayPlan
    load: LoadPlan
    listener: ProgressListener
    notes: list[str] = field(default_factory=list)
    """Sentences about the plan and the target, for reports."""
    on_prepared: Callable[[PreparedBodies], None] | None = None
    """Function called with all bodies, in the order of the rows, before anything is sent."""
    start_recording: Callable[[LoadResult], Callable[[int, Exchange], None]] | None = None
    """Function called after the load; it returns a function that is called with each row and exchange."""
    stage: ReplayStage = ReplayStage.PREPARING
    """Present stage, which decides what `stop` does."""
    _pool: WorkerPool | None = None
    """Sending processes of the measured load; None outside of it."""
    _warmup_task: asyncio.Task[dict[str, object]] | None = None
    """Task of the warm-up, which `stop` cancels; None outside of it."""
    _is_stopped: bool = False
    """Whether `stop` was called."""

    def stop(self) -> None:
        """Send no more requests and wait for the answers in flight. A second call ends the replay at once."""
        self._is_stopped = True
        if self._warmup_task is not None:
            self._warmup_task.cancel()  # This has no effect if the warm-up has ended already.
        if self._pool is not None:
            self._pool.stop()

    async def run(self) -> dict[str, Any]:
        """Run the replay and return public JSON. Raises ConfigError before anything is sent."""
        load, target, measuring = self.load, self.load.target, self.load.measuring
        closed = load.schedule.closed is not None
        writer_place = measuring.capture
        check_target(self._worker_setup(-1, load.bodies))
        target.check_tenants(self.plan.requests.tenants)
        self._check_host()
        if (slo := self._objectives_text()) != measuring.slo:
            self.notes.append(f"with --retries, bounds count from the scheduled time: {slo}")
        if writer_place is not None:
            try:
                check_place(writer_place)
            except ConfigError as exc:
                raise ConfigError("--capture", f"{exc.place}: {exc.problem}", exc.hint) from None
        body = await self._complete_by_server(load.bodies.with_settings(self.plan.settings))
        maker = maker_for(target.url, body, self.plan.decode)
        requests = self.plan.requests
        with (
            self._member_factory() as create_member,
            prepare(requests, self.plan.prompts, maker, self.listener.on_preparing) as prepared,
        ):
            self._note_endpoints(prepared)
            if self.on_prepared is not None:
                self.on_prepared(prepared)
            exact = maker.output_exact and not requests.bodies
            setup = self._worker_setup(prepared.fd, body, exact_output=exact)
            warmed = await self._run_warmup(prepared, maker, body)
            http_url = http_url_of(target.url)
            scraped = measuring.scrape != "none" and (measuring.scrape or http_url) is not None
            watch = LoadMonitor(
                SystemClock(),
                http_url or target.url,
                metrics=measuring.scrape,
                scrape=scraped,
                headers={"User-Agent": USER_AGENT},
                tls=target.tls(),
            )
            watch.start()
            anchor = WallAnchor.sample(SystemClock())
            with WorkerPool(
                setup,
                requests,
                (prepared.begins, prepared.ends),
                processes=load.sending.processes,
                paths=prepared.paths,
                keep=True,
                create_member=create_member,
            ) as pool:
                self._pool = pool
                if self._is_stopped:
                    pool.stop()
                planned = planned_within(requests, load.schedule.duration, closed=closed)
                outcome = await pool.run(lambda p: self.listener.on_sending(p, planned))
                if outcome.stopped == NO_ENDPOINT:
                    await watch.close(outcome.began_ns)
                    raise endpoint_error(next(x for _, x in pool.exchanges() if is_unanswerable(x)))
                if self._is_stopped:
                    # Record the stop even if every request had been sent: a reader of the result must see it.
                    outcome.stopped = outcome.stopped or STOPPED
                series = await watch.close(outcome.began_ns)
                self.stage = ReplayStage.REPORTING
                details: dict[str, object] = {"warmup": warmed}
                tokens = _output_tokens(outcome)
                summary = series.summary(tokens=tokens)
                details["system"] = json_value({"summary": summary, "series": series.samples()})
                seen = RunObservations(requests, prepared.tokens, ObservedLengths(output_wanted=exact))
                baseline = None if self.plan.baseline is None else Baseline(self.plan.baseline)
                keep = None if self.start_recording is None else self.start_recording(outcome)
                read = 0
                for row, x in pool.exchanges():
                    read += 1
                    seen.add(row, x)
                    if keep is not None:
                        keep(row, x)
                    if baseline is not None:
                        baseline.add_replayed(row, x)
                details["unread"] = outcome.tally.summary.n - read
                if writer_place is not None:
                    details["capture"] = {
                        "to": writer_place,
                        "rows": self._write_capture(pool, seen, writer_place),
                    }
                if measuring.csv is not None:
                    self._write_csv(pool, measuring.csv)
        details["baseline"] = None if baseline is None else self._compare_with(baseline)
        plan = {
            **self.plan.describe(),
            "body": _body_stats(maker, prepared),
            "prompts": prepared.lengths.describe(),
            "target": shown_url(target.url),
            "connections": "fresh" if load.sending.fresh else "kept",
            "ray": load.sending.ray,
            "notes": [*self.plan.notes, *notes_of(target.url), *self.notes],
        }
        unstamped = urlsplit(target.url).scheme in ("https", "wss", "grpc", "grpcs")
        return result_of(
            outcome,
            seen,
            plan=plan,
            closed=closed,
            clock="mono" if unstamped else load.sending.clock,
            anchor=anchor,
            details=details,
            percentiles=measuring.percentiles,
        )

    async def check_reachable(self) -> None:
        """Check that there is a usable server. Raises the same errors as `run`."""
        check_target(self._worker_setup(-1, self.load.bodies))
        await self._complete_by_server(self.load.bodies)

    async def run_warmup(self) -> dict[str, object]:
        """Run the warm-up alone and return its result. Raises the same errors as `run`."""
        check_target(self._worker_setup(-1, self.load.bodies))
        body = await self._complete_by_server(self.load.bodies.with_settings(self.plan.settings))
        return await self._run_warmup(None, maker_for(self.load.target.url, body, self.plan.decode), body)

    def _note_endpoints(self, prepared: PreparedBodies) -> None:
        """Add a note if prompts of a data set are sent to another endpoint than the user named."""
        requests = self.plan.requests
        recorded = requests.paths or [""] * len(requests)
        others = sum(bool(sent) and not own for own, sent in zip(recorded, prepared.paths, strict=False))
        if others and "--endpoint" in flags_given(self.load.bodies):
            self.notes.append(
                f"{others:,} prompts have a body of another endpoint than --endpoint: sent there"
            )

    @contextmanager
    def _member_factory(self) -> Iterator[Callable[[], Member]]:
        """Yield the function that creates sending processes."""
        address = self.load.sending.ray
        if address is None:
            yield LocalMember
            return
        with ray_cluster(address, self.load.sending.processes) as ray:
            yield partial(RayMember, ray)

    async def _complete_by_server(self, body: BodyOptions) -> BodyOptions:
        """Return the options with the model and the server type from the server's own list of models."""
        if body.model is not None and body.server != "auto":
            return body
        target = self.load.target
        spoken = protocol_of(target.url)
        if spoken != "http":
            await check_listening(target.url)
        http_url = http_url_of(target.url)
        if http_url is None:
            return body
        url = http_url.rstrip("/")
        url += "/models" if url.endswith("/v1") else "/v1/models"
        own_headers = {name: value for name, value in target.headers if name.lower() != "user-agent"}
        headers = {**own_headers, "User-Agent": USER_AGENT}
        tls = target.tls() or True
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
                session.get(url, headers=headers, ssl=tls) as response,
            ):
                status = response.status
                if response.headers.get(ERROR_FIELD) == ADMIN_PORT:
                    raise ConfigError(
                        "--target",
                        f"{shown_url(target.url)} is the admin port of llmtap",
                        "use the address of its proxy (relay.listen), such as http://127.0.0.1:8080",
                    )
                raw = await read_at_most(response) if status == 200 else b""
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            if spoken != "http":
                return body  # A gRPC or WebSocket server need not answer HTTP on the same port.
            message = failure_text(exc)
            trust = "give the CA of the server with --ca FILE, or use --insecure to accept every certificate"
            reach = "check that the server runs and that the URL is right"
            hint = trust if message.startswith("TLS: certificate") else reach
            place = shown_url(target.url)
            raise ConfigError("--target", f"{place} cannot be reached: {message}", hint) from None
        server_type = server_of(raw)
        models = model_ids(raw)
        if body.server == "auto" and server_type != "auto":
            body = msgspec.structs.replace(body, server=server_type)
        if body.model is None and self.plan.needs_model:
            if len(models) != 1 and spoken != "http":
                return body  # No error: the URL of the target possibly names the model.
            if len(models) != 1:
                problem = (
                    "lists no model"
                    if status == 200
                    else f"answered status {status} to a request for its models"
                )
                offered = f"offers {', '.join(models[:8])}" if models else problem
                hint = f"check the path of --target: the request was sent to {shown_url(url)}"
                raise ConfigError(
                    "--model",
                    f"is missing: the server {offered}",
                    hint if status == 404 else "such as --model NAME",
                )
            body = msgspec.structs.replace(body, model=models[0], replace_model=False)
        return body

    def _worker_setup(self, bodies_fd: int, body: BodyOptions, *, exact_output: bool = False) -> WorkerSetup:
        load, change = self.load, msgspec.structs.replace
        ids = f"{load.sending.request_ids}-{secrets.token_hex(4)}"
        worker_load = change(
            load,
            bodies=change(
                body,
                model=None if self.plan.requests.bodies else body.model,
                tokenizer=body.tokenizer if load.sending.ray is None else None,
            ),
            sending=change(load.sending, request_ids=ids),
            measuring=change(load.measuring, slo=self._objectives_text()),
        )
        return WorkerSetup(
            load=worker_load,
            exact_output=exact_output,
            bodies_fd=bodies_fd,
            spill_fd=None,
            open=self._connection_count(),
            check_endpoint=len(set(self.plan.requests.paths)) <= 1,
        )

    def _objectives_text(self) -> str | None:
        """Return the objectives. With retries, their bounds count from the scheduled time.

        If they counted from the last attempt, a server that refuses requests and answers them later would
        look as good as one that answers at once.
        """
        slo, retries = self.load.measuring.slo, self.load.sending.retries
        return slo if slo is None or not retries else Objectives.parse(slo).from_schedule().text

    def _check_host(self) -> None:
        """Check the limits of this host. Raises ConfigError if they do not allow the load."""
        if self.load.sending.ray is not None or protocol_of(self.load.target.url) == "grpc":
            return
        n = len(self.plan.requests)
        closed = self.load.schedule.closed
        certain = self._in_flight_max(0) if closed is None else min(closed, n)
        likely = self._in_flight_max(HOLD_NS) if closed is None else certain
        note = check_connections(certain, likely, self.load.sending.processes)
        if note is not None:
            self.notes.append(note)

    def _connection_count(self) -> int:
        sending, closed = self.load.sending, self.load.schedule.closed
        if sending.fresh:
            return 0
        if sending.connections is not None:
            return sending.connections
        return min(self._in_flight_max(HOLD_NS) if closed is None else closed, CONNECTIONS_MAX)

    def _in_flight_max(self, hold_ns: int) -> int:
        """Return the maximum number of simultaneous requests if each answer takes `hold_ns`."""
        requests, duration_ns = self.plan.requests, self.load.schedule.duration
        if duration_ns is not None or requests.after:
            rows = [
                at_ns
                for row, at_ns in enumerate(requests.arrival_ns)
                if (not requests.after or requests.after[row] < 0)
                and (duration_ns is None or at_ns < duration_ns)
            ]
        else:
            rows = requests.arrival_ns  # type: ignore[assignment]
        most = first = 0
        for last, at_ns in enumerate(rows):
            while at_ns - rows[first] > hold_ns:
                first += 1
            most = max(most, last - first + 1)
        return most

    async def _run_warmup(
        self, prepared: PreparedBodies | None, maker: AnyMaker, body: BodyOptions
    ) -> dict[str, object]:
        """Run the warm-up: it sends the prompts of the plan with their words in reverse order, so that the
        server's cache has none of the measured prompts. `prepared`: bodies of the plan, for a cold start,
        which sends nothing."""
        self.stage = ReplayStage.SENDING
        if self._is_stopped:
            raise ReplayStopped("a signal stopped the replay before anything was sent: run the command again")
        self._warmup_task = asyncio.ensure_future(self._warm_up(prepared, maker, body))
        try:
            return await self._warmup_task
        except asyncio.CancelledError:
            raise ReplayStopped(
                "a signal stopped the replay during the warm-up, so nothing was measured: run it again"
            ) from None

    async def _warm_up(
        self, prepared: PreparedBodies | None, maker: AnyMaker, body: BodyOptions
    ) -> dict[str, object]:
        kind = self.load.sending.warmup
        if kind == "none":
            chosen = WarmUpOptions(cold=True)
        elif kind == "auto":
            chosen = WarmUpOptions()
        else:
            chosen = WarmUpOptions(requests=int(kind), requests_max=int(kind), tokens=0, probe=False)
        self.listener.on_warming(kind)
        plan = self.plan if chosen.cold else reverse_words(self.plan)
        with ExitStack() as stack:
            if prepared is None or plan is not self.plan:
                prepared = stack.enter_context(
                    prepare(plan.requests, plan.prompts, maker, self.listener.on_preparing)
                )
            setup = self._worker_setup(prepared.fd, body, exact_output=maker.output_exact)
            # Send from one process, even if the load uses more: the warm-up is for the server only.
            warmup = await warm_up(
                setup,
                plan.requests,
                (prepared.begins, prepared.ends),
                chosen,
                progress=partial(self.listener.on_warming, kind),
                paths=prepared.paths,
            )
        return warmup.to_dict()

    def _compare_with(self, baseline: Baseline) -> dict[str, object] | None:
        """Compare with the recorded answers. If the source cannot be read, add a note and return None."""
        try:
            info = read_recorded(baseline, self.plan.requests, self.listener.on_comparing)
        except (LlmtapError, ValueError) as exc:
            # Leave out `exc.place`: it can be a URL that contains an API key.
            reason = exc.problem if isinstance(exc, ConfigError) else exc
            self.notes.append(f"no comparison with the recorded answers: {reason}")
            return None
        comparison = baseline.to_dict(info)
        if comparison is None:
            reason = "has the time of its answer" if baseline.found_count else "was found again"
            self.notes.append(f"no comparison with the recorded answers: no row that was sent {reason}")
        return comparison

    def _write_capture(self, pool: WorkerPool, seen: RunObservations, place: str) -> int:
        requests = self.plan.requests
        info = CaptureInfo(
            level="shape",
            block_unit="tokens" if requests.blocks else "",
            block_size=requests.block_tokens,
            blocks="trace" if requests.blocks else "salted",
        )
        writer = RunWriter(place, seen.opened, info, meter="load")
        rows, of = 0, len(seen.sent_ns)
        for row, x in pool.exchanges():
            add_shape_and_turn(x, row, requests)
            writer.add(x)
            rows += 1
            if rows % 500 == 0:
                self.listener.on_writing_capture(rows, of)
        writer.close()
        return rows

    def _write_csv(self, pool: WorkerPool, path: str) -> None:
        requests = self.plan.requests

        def described_exchanges() -> Iterator[Exchange]:
            for row, x in pool.exchanges():
                add_shape_and_turn(x, row, requests)
                yield x

        try:
            write_csv(Path(path), _capture_batches(described_exchanges()))
        except OSError as exc:
            raise ConfigError("--csv", f"cannot write {path}: {exc.strerror}", "name another file") from None


def _capture_batches(described: Iterator[Exchange]) -> Iterator[pa.RecordBatch]:
    """Yield exchanges as rows of a capture."""
    for some in iter(lambda: list(islice(described, BATCH_ROWS)), []):
        batch, failed = to_batch(some, capture="", level="shape")
        if failed:
            raise failed[0]
        yield batch


def _body_stats(maker: AnyMaker, prepared: PreparedBodies) -> dict[str, object]:
    """Return a description of the bodies as JSON: their fields, the number of each kind, and their paths."""
    kinds = prepared.kinds
    return {
        **maker.describe(made=kinds["made"] > 0, streamed=kinds["recorded"] < kinds.total()),
        "kinds": {kind: kinds[kind] for kind in ("made", "data_set", "recorded")},
        "paths": dict(Counter(path for path in prepared.paths if path).most_common(PATHS_MAX)),
    }


def planned_within(requests: Requests, duration_ns: int | None, *, closed: bool) -> int | None:
    """Return the number of requests that will be sent; None if it depends on the speed of the server."""
    if duration_ns is None:
        return len(requests)
    return None if closed or requests.after else sum(ns < duration_ns for ns in requests.arrival_ns)


def add_shape_and_turn(x: Exchange, row: int, requests: Requests) -> None:
    """Add the shape of the prompt, and the turn in the conversation, to an exchange from the plan."""
    blocks = requests.blocks[row] if requests.blocks else ()
    body = requests.bodies[row] if requests.bodies else b""
    limit = limit_of_body(body) if body else max(1, requests.output[row])
    shape = RequestShape(max_tokens=limit, tokens=requests.input[row] or None)
    if blocks:
        shape.blocks = array("q", blocks)
        shape.block_size, shape.block_unit = requests.block_tokens, "tokens"
    x.shape = shape
    if requests.after:
        first, number = row, 0
        while requests.after[first] >= 0:
            first, number = requests.after[first], number + 1
        think_ns = requests.think_ns[row] if number else None
        x.turn = Turn(f"row-{first}", "explicit", number, think_ns=think_ns)


def _output_tokens(outcome: LoadResult) -> int | None:
    tokens: Any = outcome.tally.summary.to_dict({}, 0)["tokens"]
    output: int | None = tokens["output"]
    return output
