"""`llmtap demo`: simulated engine, proxy and load in one command.

Sends a replay through the proxy, shows the proxy's figures meanwhile, and prints its comparison of the
requests with and without a guardrail. `demo_stage.py` starts the processes and plans the load.
"""

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from llmtap.cli.demo_stage import (
    ENGINE,
    GUARDRAIL,
    OBJECTIVES,
    TENANT_HEADER,
    DemoStage,
    burst_workload,
    demo_plan,
)
from llmtap.cli.main import app
from llmtap.cli.shared import (
    Alpha,
    IdleCost,
    Json,
    ReaderGrace,
    ReaderSpeed,
    SourceFormat,
    Stopped,
    argument,
    flag,
    option,
    option_duration,
    print_json,
    reader_of,
    stoppable,
)
from llmtap.clock import SystemClock
from llmtap.errors import ConfigError
from llmtap.meter.tenants import DEFAULT
from llmtap.metrics.deadlines import Benefit
from llmtap.units import NS_PER_S, Duration

if TYPE_CHECKING:
    from rich.console import Console

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

DRAIN_S: Final = 15
TIMEOUT_S: Final = 120
_SPEED: Final = 10.0
"""Default of --speed."""
FIRST_LOOK_S: Final = 0.25
LOOK_S: Final = 1.0
LINE_NS: Final = 5 * NS_PER_S
"""Time between two lines in a log."""
SETTLED_NS: Final = 5 * NS_PER_S
SECONDS_MAX: Final = 86_400
NOBODY: Final[Mapping[str, Any]] = {"n": 0, "outcomes": {}}
EXCHANGES_MAX: Final = 1_000
"""Maximum of one answer of the admin API. The exchanges give the uncertainties."""
COLUMNS: Final = 100
"""Width of the report if standard output is no terminal."""
_CUT: Final = "client_cancelled"

T = TypeVar("T")


@app.command(short_help="Run a simulated engine, a proxy and a load in one command.", epilog=EPILOG)
def demo(
    trace: Annotated[
        str, argument("TRACE", "Trace, capture or workload to send (default: a synthetic workload).")
    ] = "",
    seconds: Annotated[str, option("TIME", "Duration of the load.")] = "30s",
    requests: Annotated[int | None, option("N", "Maximum number of requests.", min=1, max=1_000_000)] = None,
    speed: Annotated[
        float,
        option(
            "X",
            "Factor by which TRACE is sent faster. At 10, the default load sends 169 requests in 30 s.",
        ),
    ] = _SPEED,
    from_format: SourceFormat = None,
    reader_speed: ReaderSpeed = None,
    alpha: Alpha = None,
    idle_cost: IdleCost = None,
    reader_grace: ReaderGrace = None,
    keep: Annotated[
        bool,
        flag(
            "--keep",
            "Keep the engine and the proxy running after the report, and repeat the load, until Ctrl-C.",
        ),
    ] = False,
    json: Json = None,
) -> None:
    """Start the simulated engine and a proxy, send requests, and show what the proxy measured."""
    if not 0 < speed <= 1e6:
        raise ConfigError("--speed", f"expected a number above 0, at most 1e6, got {speed:g}")
    seconds_ns = option_duration("--seconds", seconds)
    if not 0 < seconds_ns <= SECONDS_MAX * NS_PER_S:
        raise ConfigError("--seconds", f"{seconds} is not between 0 and a day")
    reader = reader_of(reader_speed, alpha, idle_cost, reader_grace)
    try:
        with stoppable(), TemporaryDirectory(prefix="llmtap-demo-") as folder:
            one = _Demo(Path(folder), trace, from_format, seconds_ns, requests, speed, reader, keep, json)
            code = asyncio.run(one.run())
    except Stopped as exc:
        raise typer.Exit(exc.code) from None
    raise typer.Exit(code)


class _Over(Exception):
    """A signal arrived during a wait."""


@dataclass(slots=True)
class _Demo:
    """One run of the demo in one event loop. It handles signals from its start to its end."""

    folder: Path
    source: str
    source_format: str | None
    seconds: Duration
    requests: int | None
    speed: float
    reader: Benefit
    keep: bool
    json: str | None
    _console: "Console" = field(init=False)
    _sent: "LatestProgress" = field(init=False)
    _tenants: set[str] = field(default_factory=set)
    _replay: "Replay | None" = None
    _over: asyncio.Event = field(default_factory=asyncio.Event)
    _signal: int | None = None
    _began_ns: int = field(default_factory=SystemClock.mono_ns)

    def __post_init__(self) -> None:
        from rich.console import Console

        from llmtap.cli.progress import LatestProgress

        self._console = Console(stderr=True, highlight=False)
        self._sent = LatestProgress()

    async def run(self) -> int:
        """Return the exit code. Raises ConfigError and LlmtapError."""
        import aiohttp

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop, number)
        code = 0
        try:
            # Read the trace first: an error in it must be reported before a process starts.
            plan = await self._unless_over(asyncio.to_thread(self._plan)) if self.source else None
            with DemoStage(self.folder, self.reader) as stage:
                async with aiohttp.ClientSession() as session:
                    code = await self._play(stage, session, plan)
                    if self.keep and not self._over.is_set():
                        self._say("The proxy runs and the load repeats until Ctrl-C.")
                        await self._repeat(stage)
                        self._say(f"stopped by {signal.Signals(self._signal or signal.SIGINT).name}")
        except _Over:
            self._say("stopped before the first request")
        return code if self._signal is None else 128 + self._signal

    def _stop(self, number: int) -> None:
        """Cancel the running responses, so that the summary is printed at once."""
        if self._signal is None:
            self._signal = number
            self._over.set()
            if self._replay is not None:
                self._replay.stop()
                self._replay.stop()

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    async def _play(self, stage: DemoStage, session: Any, plan: "ReplayPlan | None") -> int:
        """Send the load and print the result. Raises _Over if a signal arrives before the first request."""
        from llmtap.load.replay.perform import ReplayStopped as Unsent

        self._say(f"engine     {stage.engine}   simulated: {ENGINE}")
        self._say(f"proxy      {stage.proxy}   llmtap, forwards and measures (OpenAI's API, model: sim)")
        self._say(f"dashboard  {stage.admin}/  or in a terminal: llmtap top --admin {stage.admin}")
        load = "bursts of chat requests" if not self.source else Path(self.source).name
        self._say(f"load       {load}; half of them go through a guardrail")
        self._say(f"guardrail  {GUARDRAIL}")
        # Prompts are drawn while the processes start.
        made = asyncio.gather(asyncio.to_thread(self._make, stage.proxy, plan), stage.ready(session))
        self._replay = (await self._unless_over(made))[0]
        sending = asyncio.ensure_future(self._replay.run())
        try:
            await self._watch(sending, stage, session)
            result = sending.result()
        except Unsent:
            raise _Over from None
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        summary = await self._settled(session, stage, result["load"]["sent"])
        others = self._others(summary)
        experiment = await _get(session, f"{stage.admin}/api/v1/experiment")
        newest = await _get(session, f"{stage.admin}/api/v1/exchanges?limit={EXCHANGES_MAX}")
        self._show(summary, experiment, newest["exchanges"], result)
        if others["n"]:
            sent = "1 exchange was" if others["n"] == 1 else f"{others['n']:,} exchanges were"
            self._say(f"{sent} sent by other clients; the figures contain them")
        problems = _problems(summary, others, result)
        for problem in problems:
            self._say(f"failed: {problem}")
        self._look_next(stage)
        return 1 if problems else 0

    async def _repeat(self, stage: DemoStage) -> None:
        """Repeat the load until a signal arrives. Raises LlmtapError if a process has ended."""
        from llmtap.load.replay.perform import ReplayStopped as Unsent

        with suppress(_Over, Unsent):
            while not self._over.is_set():
                self._replay = await self._unless_over(asyncio.to_thread(self._make, stage.proxy, None))
                await self._replay.run()
                stage.check()

    def _plan(self) -> "ReplayPlan":
        return demo_plan(
            self.source or str(burst_workload(self.folder)), source_format=self.source_format,
            speed=self.speed, seconds=self.seconds / NS_PER_S, requests=self.requests,
        )  # fmt: skip

    def _make(self, target: str, plan: "ReplayPlan | None") -> "Replay":
        from llmtap.load.bodies import BodyOptions
        from llmtap.load.replay.options import ReplayOptions
        from llmtap.load.replay.perform import Replay

        plan = plan or self._plan()
        self._tenants = {tenant or DEFAULT for tenant in plan.requests.tenants}
        options = ReplayOptions(
            target=target, model="sim", tenant_header=TENANT_HEADER, timeout=Duration(TIMEOUT_S * NS_PER_S),
            connect_timeout=Duration(10 * NS_PER_S), duration=self.seconds,
            drain=Duration(DRAIN_S * NS_PER_S), request_ids="demo", slo=OBJECTIVES,
            reader=self.reader, scrape="none",
        )  # fmt: skip
        body = BodyOptions(server="openai", model="sim", temperature=0.0)
        return Replay(plan, options, body, self._sent)

    async def _unless_over(self, what: Awaitable[T]) -> T:
        """Return the result of `what`. Raises _Over if a signal arrives first."""
        task, over = asyncio.ensure_future(what), asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait((task, over), return_when=asyncio.FIRST_COMPLETED)
            if self._over.is_set():
                raise _Over
            return task.result()
        finally:
            task.cancel()
            over.cancel()
            await asyncio.gather(task, over, return_exceptions=True)

    async def _watch(self, sending: "asyncio.Future[dict[str, Any]]", stage: DemoStage, session: Any) -> None:
        """Show the proxy's figures until the load has ended."""
        from rich.text import Text

        status = self._console.status(Text("sending")) if self._console.is_terminal else None
        told_ns: int | None = None
        if status is not None:
            status.start()
        try:
            while not sending.done():
                await asyncio.wait((sending,), timeout=FIRST_LOOK_S if told_ns is None else LOOK_S)
                stage.check()
                summary = await _summary(session, stage)
                if summary is None or not summary["n"]:
                    continue
                now_ns = SystemClock.mono_ns()
                if status is not None:
                    status.update(Text(self._line(summary)))
                elif told_ns is None or now_ns - told_ns >= LINE_NS:
                    self._say(self._line(summary))
                else:
                    continue
                told_ns = now_ns
        finally:
            if status is not None:
                status.stop()

    def _line(self, summary: Mapping[str, Any]) -> str:
        from llmtap.report.values import figure_text

        progress = self._sent.progress
        said = [f"{(SystemClock.mono_ns() - self._began_ns) / NS_PER_S:.0f} s"]
        if progress is not None:
            said.append(f"sent {progress.sent:,}")
        said.append(f"measured {summary['n']:,}")
        for title, name in (("TTFT", "ttft"), ("TBC", "tbc")):
            figures = summary["metrics"][name]
            if figures["n"]:
                said.append(f"{title} p50 {figure_text(figures, 'p50')} p99 {figure_text(figures, 'p99')} ms")
        return "  ".join(said)

    async def _settled(self, session: Any, stage: DemoStage, sent: int) -> dict[str, Any]:
        """Return the summary when the meter has measured all requests, or after SETTLED_NS."""
        end_ns = SystemClock.mono_ns() + SETTLED_NS
        while True:
            stage.check()
            summary = await _summary(session, stage)
            if summary is not None:
                settled = summary["n"] - self._others(summary)["n"] >= sent and not any(
                    relay.get("unsettled", 1) for relay in summary["relays"].values()
                )
                if settled or SystemClock.mono_ns() > end_ns:
                    return summary
            await asyncio.sleep(0.1)

    def _others(self, summary: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the figures of requests of other clients, which are those without a tenant name."""
        tenants = summary["by"]["tenant"]
        theirs = DEFAULT in tenants and DEFAULT not in self._tenants
        found: Mapping[str, Any] = tenants[DEFAULT] if theirs else NOBODY
        return found

    def _show(
        self, summary: Mapping[str, Any], experiment: Mapping[str, Any],
        exchanges: Sequence[Mapping[str, Any]], result: Mapping[str, Any],
    ) -> None:  # fmt: skip
        from rich.console import Console

        from llmtap.report.experiment import demo_blocks
        from llmtap.report.render import terminal
        from llmtap.report.values import joined

        outcomes = result["outcomes"]
        if self.json is not None:
            clients = {"n": result["n"], "outcomes": outcomes, "metrics": result["metrics"]}
            print_json({**summary, "experiment": experiment, "clients": clients}, self.json)
            return
        console = Console(highlight=False, width=None if sys.stdout.isatty() else COLUMNS)
        console.print(terminal(demo_blocks(summary, experiment, exchanges)))
        self._say(f"clients      {joined(outcomes) or 'nothing was sent'}")
        if outcomes.get(_CUT):
            why = "at the signal" if self._signal else f"{DRAIN_S} s after the last request"
            self._say(f"             {outcomes[_CUT]:,} responses were cancelled {why}")

    def _look_next(self, stage: DemoStage) -> None:
        self._say("Look next:")
        if self.keep:
            self._say(f"  {stage.admin}/#experiment   both arms; #streams: each stream as it is sent")
            self._say(f"  curl {stage.admin}/metrics   the same figures for Prometheus")
        else:
            self._say("  llmtap demo --keep                        repeat the load, and open the dashboard")
        self._say("  llmtap proxy --upstream http://HOST:PORT  measure your own server")
        self._say("  llmtap --help                             all commands")


async def _get(session: Any, url: str) -> Any:
    async with session.get(url) as response:
        return await response.json()


async def _summary(session: Any, stage: DemoStage) -> dict[str, Any] | None:
    """Return the summary since the start, or None if the meter does not answer."""
    import aiohttp

    url = f"{stage.admin}/api/v1/summary?window=all&by=tenant"
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=5)) as response:
            found: dict[str, Any] | None = await response.json() if response.status == 200 else None
            return found
    except (aiohttp.ClientError, TimeoutError):
        return None


def _problems(summary: Mapping[str, Any], others: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Return the faults: broken streams, seen by the clients or the proxy, and unmeasured exchanges."""
    from llmtap.metrics.summary import ENDED_WELL

    found = []
    seen = Counter(summary["outcomes"])
    seen.subtract(others["outcomes"])
    for side, outcomes in (("clients", result["outcomes"]), ("proxy", seen)):
        for name, n in outcomes.items():
            if n and name not in ENDED_WELL and name != _CUT:
                found.append(f"{n:,} {name} (counted by the {side})")
    if found:
        found += [f"{n:,} x {error}" for error, n in result["errors"].items()]
    left = seen[_CUT] - result["outcomes"].get(_CUT, 0)
    if left > 0:
        found.append(f"{left:,} more responses were cancelled than the clients cancelled")
    sent = result["load"]["sent"]
    measured = summary["n"] - others["n"]
    if measured != sent:
        found.append(f"{measured:,} of {sent:,} exchanges were measured")
    return found
