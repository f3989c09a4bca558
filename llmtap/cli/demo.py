"""`llmtap demo`: simulated engine, proxy and load in one command.

Sends a replay through the proxy, shows the proxy's figures in the meantime, and prints the proxy's comparison
of the two arms of an experiment: without a guardrail, and with a guardrail that the engine simulates. Engine
and proxy are processes in separate sessions, so that Ctrl-C in the terminal reaches only the demo, which then
ends them. The module is long because it has all parts of one command: configuration, processes, load, texts.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, TypeVar

import msgspec
import typer

from llmtap import native
from llmtap.cli.flags import command
from llmtap.cli.main import app
from llmtap.cli.options import Json, ReaderOptions
from llmtap.cli.shared import Stopped, print_json, print_line, print_rich, stoppable
from llmtap.clock import SystemClock
from llmtap.errors import ConfigError, LlmtapError
from llmtap.load.options import Rate
from llmtap.meter.tenants import DEFAULT
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.summary import ENDED_WELL
from llmtap.net.listener import keep_port
from llmtap.options.fields import opt
from llmtap.units import NS_PER_S, Duration

if TYPE_CHECKING:
    from llmtap.cli.progress import LatestProgress
    from llmtap.load.replay.perform import Replay
    from llmtap.load.replay.plan import ReplayPlan

EPILOG = """TRACE is any input of `llmtap replay`: a trace, a capture, or a workload. The default is a
synthetic workload with the distributions of BurstGPT. An experiment assigns half of the requests, at random,
to a simulated guardrail; its result is printed at the end. Responses have at most 512 tokens;
responses that are incomplete 15 s after the last request are cancelled.

Examples:

  llmtap demo --keep

  llmtap demo trace.jsonl --speed 20 --seconds 2m

Exit codes: 0 ok; 1 a stream failed, or the proxy did not measure every exchange; 130 stopped by Ctrl-C, 143
by SIGTERM, with a summary of the completed part."""

WORKLOAD: Final = "bursty"
RATE_RPS: Final = 0.27
"""Mean rate of BurstGPT's trace (multi-bin paper, 3.1)."""
TOKENS_MAX: Final = 512
"""Maximum number of tokens in a response. Without it, one response in twenty would outlast the demo."""
SEED: Final = 280
"""Random seed. With it, half a minute has several bursts; with most seeds, none or one large burst."""
TRACE_ROWS: Final = 1_000
"""Maximum number of rows of a trace: more than can be sent during a demo."""
REQUESTS_FACTOR: Final = 6
"""The demo plans this many times the number of requests at the mean rate, because bursts can exceed the rate.
Requests planned after the end of the load are not sent."""
TENANTS: Final = {"acme": 6, "globex": 3, "initech": 1}
"""Tenants that the demo gives to its own requests without a tenant, with their relative shares. Requests of
other clients get none of them, so the demo can exclude those requests from its counts."""
DRAIN_S: Final = 15
"""Maximum time to wait for responses after the last request."""
READY_S: Final = 120
"""Maximum time to wait until engine and proxy are ready. If one of them ends, the demo fails at once."""
_BUSY_HINT: Final = "this machine is possibly too busy; stop other programs, and start the demo again"
END_S: Final = 10.0
"""Maximum time for a process to end after SIGTERM."""
CHECK_S: Final = 0.25
LINE_NS: Final = 5 * NS_PER_S
"""Time between two lines with figures."""
SETTLE_S: Final = 30
"""Maximum time to wait at the end of the load until the meter has measured all requests."""
LOG_CHARS_MAX: Final = 2_000
_CANCELLED: Final = "client_cancelled"
OBJECTIVES: Final = "ttft:500ms tpot:50ms"
ENGINE: Final = "150 ms to the first token, then 20 ms per token, +-30 %"
GUARDRAIL: Final = "simulated: checks the prompt (40 ms) and each block of 8 tokens (20 ms), refuses 5 %"
_CONFIG: Final = f"""
[log]
level = "warning"

[slo.default]
objectives = "{OBJECTIVES}"
target = 0.95

[experiment]
enabled = true
name = "guardrail"
unit = "request"

[[experiment.arms]]
name = "plain"

[[experiment.arms]]
name = "guarded"

[experiment.arms.headers]                 # of the simulated engine: `llmtap sim serve --keys`
x-sim-input-filter = "40ms"
x-sim-output-hold = "8"
x-sim-output-filter = "20ms"
x-sim-refusal-rate = "0.05"

[experiment.disclosure]
systems = ["simulated: a filter of prompts (40 ms), one of answers that holds 8 tokens (20 ms); refuses 5 %"]
"""

_NEXT_STEPS: Final = """Look next:
  llmtap demo --keep                        repeat the load, and open the dashboard
  llmtap proxy --upstream http://HOST:PORT  measure your own server
  llmtap --help                             all commands"""

T = TypeVar("T")


@command(app, short_help="Run a simulated engine, a proxy and a load in one command.", epilog=EPILOG)
def demo(
    trace: Annotated[
        str,
        opt("Trace, capture or workload to send (default: a synthetic workload).", "TRACE", argument=True),
    ] = "",
    seconds: Annotated[Duration, opt("Duration of the load.", "TIME")] = Duration(30 * NS_PER_S),
    speed: Annotated[
        Rate,
        opt("Factor by which TRACE is sent faster. At 10, the default load sends 169 requests in 30 s.", "X"),
    ] = 10.0,
    *,
    reader: ReaderOptions,
    keep: Annotated[
        bool,
        opt("Keep the engine and the proxy running after the report, and repeat the load, until Ctrl-C."),
    ] = False,
    json: Json = None,
) -> None:
    """Start the simulated engine and a proxy, send requests, and show what the proxy measured."""
    if not seconds:
        raise ConfigError("--seconds", "expected a duration above 0", "such as --seconds 30s")
    try:
        with stoppable(), TemporaryDirectory(prefix="llmtap-demo-") as folder:
            # Like every Duration, `seconds` is in ns; its name is that of the option --seconds.
            demo_run = _Demo(Path(folder), trace, seconds, speed, reader.benefit(), keep, json)
            code = asyncio.run(demo_run.run())
    except Stopped as exc:
        code = exc.code
    raise typer.Exit(code)


def demo_plan(source: str, *, speed: float, seconds: float) -> "ReplayPlan":
    """Return the plan of the demo's requests. Raises ConfigError.

    `source` is a trace, a capture, or a workload, which gets the rate RATE_RPS times `speed`.
    """
    from llmtap.load.options import ScheduleOptions
    from llmtap.load.replay.plan import make_plan
    from llmtap.workload.registry import is_workload
    from llmtap.workload.trace_rows import NO_TIMES

    if is_workload(source):
        rate = RATE_RPS * speed
        count = max(REQUESTS_FACTOR, round(REQUESTS_FACTOR * rate * seconds))
        question = ScheduleOptions(source=source, requests=count, rate=rate, seed=SEED)
    else:
        question = ScheduleOptions(source=source, requests=TRACE_ROWS, speed=speed, seed=SEED)
    try:
        plan = make_plan(question)
    except ConfigError as exc:
        hint = "the demo sends a trace at its own times; to set other times, use `llmtap replay`"
        raise ConfigError(exc.place, exc.problem, hint if exc.problem == NO_TIMES else exc.hint) from None
    requests = plan.requests
    for i, tokens in enumerate(requests.output):
        requests.output[i] = min(tokens, TOKENS_MAX)
    drawn = Random(SEED).choices(list(TENANTS), list(TENANTS.values()), k=len(requests))
    requests.tenants = [own or name for own, name in zip(requests.tenants or drawn, drawn, strict=True)]
    return plan


class DemoStage:
    """Context in which the processes of the engine and the proxy run. `folder` gets the proxy's configuration
    and the log of both processes."""

    def __init__(self, folder: Path, reader: Benefit) -> None:
        self._folder = folder
        self._reader = reader
        """Reading speed of the assumed user, for smooth goodput."""
        self._log = folder / "log"
        """Folder of the log files of the processes."""
        self._children: list[subprocess.Popen[bytes]] = []
        """Processes of the engine and the proxy, ended at the end."""
        self._reserved_ports = [keep_port() for _ in range(3)]
        """Sockets that keep the ports of the processes free until these start."""
        self._addresses = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in self._reserved_ports]
        """Addresses of the engine, the proxy and its admin port."""
        self.engine, self.proxy, self.admin = (f"http://{address}" for address in self._addresses)

    def __enter__(self) -> Self:
        config, reader = self._folder / "llmtap.toml", self._reader
        engine, proxy, admin = self._addresses
        relay = f'upstream = "{self.engine}"\nlisten = "{proxy}"\ndrain_timeout = "1s"\n'
        meter = f'admin = "{admin}"\nalpha = {reader.alpha:g}\nreader_tokens_per_second = {reader.speed:g}\n'
        meter += f'idle_cost = "{reader.f}"\nreader_grace_tokens = {reader.grace_tokens}\n'
        config.write_text(f"[relay]\n{relay}\n[meter]\n{meter}{_CONFIG}", encoding="utf-8")
        commands = (
            ["sim", "serve", "--listen", engine, "--spread", "0.3", "--tokens", str(TOKENS_MAX)],
            ["proxy", "--config", str(config)],
        )
        # Remove the user's LLMTAP_ variables: they configure another proxy.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LLMTAP_")}
        with self._log.open("ab") as log:
            for args in commands:
                self._children.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", "llmtap.cli", *args],
                        env=environ,
                        stderr=log,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )
        return self

    def __exit__(self, *exc: object) -> None:
        # End the proxy before the engine, because the engine waits for its clients to finish.
        for child in reversed(self._children):
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        for sock in self._reserved_ports:
            sock.close()

    def check_processes(self) -> None:
        """Raise LlmtapError if a process has ended."""
        for child in self._children:
            if child.poll() is not None:
                text = self._log.read_text(encoding="utf-8", errors="replace")[-LOG_CHARS_MAX:]
                raise LlmtapError(
                    f"a process of the demo ended with status {child.returncode}: its output has the"
                    f" reason:\n{text}"
                )

    async def wait_until_ready(self, session: Any) -> None:
        """Wait until both processes answer. Raises LlmtapError after READY_S."""
        began_ns = SystemClock.mono_ns()
        line_ns = began_ns + LINE_NS
        for url in (f"{self.engine}/health", f"{self.admin}/readyz"):
            while await _fetch(session, url) is None:
                self.check_processes()
                now_ns = SystemClock.mono_ns()
                if now_ns > began_ns + READY_S * NS_PER_S:
                    raise LlmtapError(
                        f"the demo's process at {url} was not ready within {READY_S} s: {_BUSY_HINT}"
                    )
                if now_ns > line_ns:
                    line_ns += LINE_NS
                    print(f"waiting    for {url}, {(now_ns - began_ns) // NS_PER_S} s", file=sys.stderr)
                await asyncio.sleep(CHECK_S / 5)

    async def read_api(self, session: Any, path: str) -> dict[str, Any]:
        """Return a document of the admin API. Raises LlmtapError if there is no answer within READY_S."""
        url, end_ns = f"{self.admin}/api/v1/{path}", SystemClock.mono_ns() + READY_S * NS_PER_S
        while (raw := await _fetch(session, url)) is None:
            self.check_processes()
            if SystemClock.mono_ns() > end_ns:
                raise LlmtapError(f"the demo's meter did not answer {url} within {READY_S} s: {_BUSY_HINT}")
            await asyncio.sleep(CHECK_S)
        return msgspec.json.decode(raw, type=dict[str, Any])


class _Interrupted(Exception):
    """A signal arrived during a wait."""


@dataclass(slots=True)
class _Demo:
    """One run of the demo in one event loop. It handles signals from its start to its end."""

    folder: Path
    source: str
    """Trace, capture or workload; empty: the default load."""
    duration: Duration
    speed: float
    reader: Benefit
    """Reading speed of the assumed user, for smooth goodput."""
    keep_running: bool
    """Whether engine and proxy stay after the load, until a signal."""
    json: str | None
    _listener: "LatestProgress" = field(init=False)
    """Progress of the running load, from which the line of figures is made."""
    _replay: "Replay | None" = None
    """Load that is being sent; a signal stops it."""
    _interruption: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a signal has arrived."""
    _signal: int | None = None
    """Number of the first signal that arrived; None: none."""
    _tenants: set[str] = field(default_factory=set)
    """Tenants of the demo's own requests."""
    _began_ns: int = field(default_factory=SystemClock.mono_ns)

    def __post_init__(self) -> None:
        from llmtap.cli.progress import LatestProgress

        self._listener = LatestProgress()

    async def run(self) -> int:
        """Run the demo to its end, and return the exit code. Raises ConfigError and LlmtapError."""
        import aiohttp

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, number)
        code = 0
        try:
            # Read the trace first, so that an error in it is reported before a process starts.
            plan = await self._unless_interrupted(asyncio.to_thread(self._make_plan)) if self.source else None
            with DemoStage(self.folder, self.reader) as stage:
                async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
                    code = await self._send_load(stage, session, plan)
                    if self.keep_running and not self._interruption.is_set():
                        self._print(f"Both arms: {stage.admin}/#experiment")
                        self._print("The proxy runs and the load repeats until Ctrl-C.")
                        await self._repeat_load(stage)
                        self._print(f"stopped by {signal.Signals(self._signal or signal.SIGINT).name}")
        except _Interrupted:
            self._print("stopped before the first request")
        return code if self._signal is None else 128 + self._signal

    def _stop(self, number: int) -> None:
        """Cancel the running responses, so that the summary is printed at once."""
        if self._signal is None:
            self._signal = number
            self._interruption.set()
            if self._replay is not None:
                # The first call stops sending, the second cancels the responses in flight.
                self._replay.stop()
                self._replay.stop()

    def _print(self, text: str) -> None:
        print_line(text, sys.stderr)

    async def _send_load(self, stage: DemoStage, session: Any, plan: "ReplayPlan | None") -> int:
        """Send the load, print the result, return the exit code. Raises _Interrupted if nothing was sent."""
        from llmtap.load.replay.perform import ReplayStopped as Unsent

        load = Path(self.source).name if self.source else "bursts of chat requests"
        self._print(
            f"engine     {stage.engine}   simulated: {ENGINE}\n"
            f"proxy      {stage.proxy}   llmtap, forwards and measures (OpenAI's API, model: sim)\n"
            f"dashboard  {stage.admin}/  or in a terminal: llmtap top --admin {stage.admin}\n"
            f"load       {load}; half of them go through a guardrail\n"
            f"guardrail  {GUARDRAIL}"
        )
        if note := native.missing_build():
            self._print(f"note: {note}")
        # Make the prompts while the processes start.
        start = asyncio.gather(
            asyncio.to_thread(self._make_replay, stage.proxy, plan), stage.wait_until_ready(session)
        )
        self._replay = (await self._unless_interrupted(start))[0]
        sending = asyncio.ensure_future(self._replay.run())
        try:
            await self._print_figures(sending, stage, session)
            result = sending.result()
        except Unsent:
            raise _Interrupted from None
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        summary = await self._wait_for_summary(session, stage, result["load"]["sent"])
        await self._show_result(session, stage, summary, result)
        own_requests = _own_requests(summary, self._tenants)
        if own_requests.n < summary["n"]:
            self._print("other clients also sent requests; the figures include these requests")
        problems = _measurement_problems(own_requests, result)
        for problem in problems:
            self._print(f"failed: {problem}")
        self._print(_NEXT_STEPS)
        return 1 if problems else 0

    async def _repeat_load(self, stage: DemoStage) -> None:
        """Repeat the load until a signal arrives. Raises LlmtapError if a process has ended."""
        from llmtap.load.replay.perform import ReplayStopped as Unsent

        with suppress(_Interrupted, Unsent):
            while not self._interruption.is_set():
                self._replay = await self._unless_interrupted(
                    asyncio.to_thread(self._make_replay, stage.proxy, None)
                )
                await self._replay.run()
                stage.check_processes()

    def _make_plan(self) -> "ReplayPlan":
        return demo_plan(self.source or WORKLOAD, speed=self.speed, seconds=self.duration / NS_PER_S)

    def _make_replay(self, target: str, plan: "ReplayPlan | None") -> "Replay":
        from llmtap.load.options import LoadPlan
        from llmtap.load.replay.perform import Replay

        load = LoadPlan.of(
            duration=self.duration,
            drain=Duration(DRAIN_S * NS_PER_S),
            url=target,
            tenant_header="x-llm-d-inference-fairness-id",
            server="openai",
            model="sim",
            temperature=0.0,
            timeout=Duration(120 * NS_PER_S),
            request_ids="demo",
            slo=OBJECTIVES,
            reader=self.reader,
            scrape="none",
        )
        plan = plan or self._make_plan()
        self._tenants = {tenant or DEFAULT for tenant in plan.requests.tenants or [""]}
        return Replay(plan, load, self._listener)

    async def _unless_interrupted(self, awaitable: Awaitable[T]) -> T:
        """Return the result of `awaitable`. Raises _Interrupted if a signal arrives before the result."""
        task = asyncio.ensure_future(awaitable)
        interruption = asyncio.ensure_future(self._interruption.wait())
        try:
            await asyncio.wait((task, interruption), return_when=asyncio.FIRST_COMPLETED)
            if self._interruption.is_set():
                raise _Interrupted
            return task.result()
        finally:
            task.cancel()
            interruption.cancel()
            await asyncio.gather(task, interruption, return_exceptions=True)

    async def _print_figures(
        self, sending: "asyncio.Future[dict[str, Any]]", stage: DemoStage, session: Any
    ) -> None:
        """Print a line with the proxy's figures every LINE_NS, until the load has ended."""
        next_ns = 0
        while not sending.done():
            await asyncio.wait((sending,), timeout=CHECK_S)
            stage.check_processes()
            if SystemClock.mono_ns() >= next_ns:
                summary = await _fetch_summary(session, stage)
                if summary is not None and summary["n"]:
                    self._print(self._figures_line(summary))
                    next_ns = SystemClock.mono_ns() + LINE_NS

    def _figures_line(self, summary: Mapping[str, Any]) -> str:
        from llmtap.report.values import figure_text

        elapsed_s = (SystemClock.mono_ns() - self._began_ns) / 1e9
        sent = 0 if self._listener.progress is None else self._listener.progress.sent
        text = [f"{elapsed_s:.0f} s", f"sent {sent:,}", f"measured {summary['n']:,}"]
        for title, name in (("TTFT", "ttft"), ("TBC", "tbc")):
            figures = summary["metrics"][name]
            if figures["n"]:
                text.append(f"{title} p50 {figure_text(figures, 'p50')} p99 {figure_text(figures, 'p99')} ms")
        return "  ".join(text)

    async def _wait_for_summary(self, session: Any, stage: DemoStage, sent: int) -> Mapping[str, Any]:
        """Wait until the meter has measured all requests, or SETTLE_S have passed, and return its summary."""
        end_ns = SystemClock.mono_ns() + SETTLE_S * NS_PER_S
        while True:
            stage.check_processes()
            summary = await _fetch_summary(session, stage)
            if summary is not None:
                unsettled = any(relay.get("unsettled", 1) for relay in summary["relays"].values())
                settled = _own_requests(summary, self._tenants).n >= sent and not unsettled
                if settled or SystemClock.mono_ns() > end_ns:
                    return summary
            await asyncio.sleep(0.1)

    async def _show_result(
        self, session: Any, stage: DemoStage, summary: Mapping[str, Any], result: Mapping[str, Any]
    ) -> None:
        from llmtap.report.experiment import demo_blocks
        from llmtap.report.render import terminal
        from llmtap.report.values import counts_text

        experiment = await stage.read_api(session, "experiment")
        outcomes = result["outcomes"]
        if self.json is not None:
            clients = {"n": result["n"], "outcomes": outcomes, "metrics": result["metrics"]}
            print_json({**summary, "experiment": experiment, "clients": clients}, self.json)
            return
        exchanges = (await stage.read_api(session, "exchanges?limit=1000"))["exchanges"]
        print_rich(terminal(demo_blocks(summary, experiment, exchanges)))
        self._print(f"clients      {counts_text(outcomes) or 'nothing was sent'}")
        if outcomes.get(_CANCELLED):
            why = "at the signal" if self._signal else f"{DRAIN_S} s after the last request"
            self._print(f"             {outcomes[_CANCELLED]:,} responses were cancelled {why}")


async def _fetch_summary(session: Any, stage: DemoStage) -> Mapping[str, Any] | None:
    """Return the proxy's summary of all its exchanges, or None if the meter does not answer."""
    raw = await _fetch(session, f"{stage.admin}/api/v1/summary?window=all&by=tenant")
    return None if raw is None else msgspec.json.decode(raw, type=dict[str, Any])


async def _fetch(session: Any, url: str) -> bytes | None:
    """Return the body of the response if its status is 200; else, or without a response, None."""
    import aiohttp

    try:
        async with session.get(url) as response:
            return await response.read() if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None


@dataclass(frozen=True, slots=True)
class _OwnRequests:
    """Number and outcomes of the demo's own requests."""

    n: int
    outcomes: "Counter[str]"


def _own_requests(summary: Mapping[str, Any], tenants: Collection[str]) -> _OwnRequests:
    """Return the demo's own requests in a summary of the proxy. `tenants`: tenants of the demo's requests.

    Other clients sent the requests of the tenant DEFAULT, unless it is one of `tenants`.
    """
    others = {} if DEFAULT in tenants else summary["by"]["tenant"].get(DEFAULT, {})
    outcomes = Counter(summary["outcomes"])
    outcomes.subtract(others.get("outcomes", {}))
    return _OwnRequests(summary["n"] - others.get("n", 0), outcomes)


def _measurement_problems(own_requests: _OwnRequests, result: Mapping[str, Any]) -> list[str]:
    """Return a text for each problem: broken streams (by outcome and side), and exchanges not measured."""
    problems = [
        f"{n:,} {name} (counted by the {side})"
        for side, outcomes in (("clients", result["outcomes"]), ("proxy", own_requests.outcomes))
        for name, n in outcomes.items()
        if n and name not in ENDED_WELL and name != _CANCELLED
    ]
    if problems:
        problems += [f"{n:,} x {error}" for error, n in result["errors"].items()]
    unexplained = own_requests.outcomes.get(_CANCELLED, 0) - result["outcomes"].get(_CANCELLED, 0)
    if unexplained > 0:
        problems.append(f"{unexplained:,} more responses were cancelled than the clients cancelled")
    sent = result["load"]["sent"]
    if own_requests.n != sent:
        problems.append(f"{own_requests.n:,} of {sent:,} exchanges were measured")
    return problems
