"""Load and processes of the demo: plan of the requests, the simulated engine, and the proxy in front of it.

`demo.py` uses `demo_plan` and the context `DemoStage`. The proxy runs an experiment, one arm of which has a
guardrail that the engine simulates. The processes run in their own sessions, so that Ctrl-C in the terminal
reaches only the demo, which then ends them.
"""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from llmtap.clock import SystemClock
from llmtap.errors import ConfigError, LlmtapError
from llmtap.metrics.deadlines import Benefit
from llmtap.net.listener import keep_port

if TYPE_CHECKING:
    from llmtap.load.replay.plan import ReplayPlan

RATE_RPS: Final = 0.27
"""Mean rate of BurstGPT's trace (multi-bin paper, 3.1)."""
TOKENS_MAX: Final = 512
"""Maximum length of a response, so that the demo ends. One drawn response in twenty would be longer."""
SEED: Final = 280
"""Chosen so that half a minute has several bursts. With most seeds it is empty or has one large burst."""
TRACE_ROWS: Final = 1_000
"""Default number of rows of a trace: more than a demo has time for."""
MORE: Final = 6
"""Factor of requests to draw, because bursts can exceed the mean rate. Later requests are not sent."""
TENANTS: Final = {"acme": 6, "globex": 3, "initech": 1}
"""Tenants of a trace without tenants, with their shares."""

_WORKLOAD: Final = f"""
name = "burstgpt"
about = "BurstGPT: prompts of median 251 and mean 611 tokens, answers of 34 and 123, a CV of 13.28"
arrivals = "gamma:cv=13.28"
[input]                     # lognormal: mu = ln median, sigma = sqrt(2 ln(mean / median))
distribution = "lognormal"
mu = 5.52545
sigma = 1.33402
min = 1
max = 8192
[output]
distribution = "lognormal"
mu = 3.52636
sigma = 1.60359
min = 1
max = {TOKENS_MAX}
"""


def burst_workload(folder: Path) -> Path:
    """Write the file of the default workload into the folder, and return its path."""
    place = folder / "burstgpt.toml"
    place.write_text(_WORKLOAD, encoding="utf-8")
    return place


def demo_plan(
    source: str, *, speed: float, seconds: float, requests: int | None, source_format: str | None = None
) -> "ReplayPlan":
    """Return the plan of the demo's requests. Raises ConfigError.

    `source` is a trace, a capture, or a workload, which gets the rate RATE_RPS times `speed`.
    """
    from llmtap.load.replay.plan import ReplayQuestion, make_plan
    from llmtap.workload.registry import is_workload
    from llmtap.workload.trace_rows import NO_TIMES

    if is_workload(source):
        rate = RATE_RPS * speed
        count = requests or max(MORE, round(MORE * rate * seconds))
        asked = ReplayQuestion(source=source, requests=count, rate_rps=rate, seed=SEED)
    else:
        rows = requests or TRACE_ROWS
        asked = ReplayQuestion(
            source=source, source_format=source_format, requests=rows, speed=speed, seed=SEED
        )
    try:
        plan = make_plan(asked)
    except ConfigError as exc:
        if exc.problem == NO_TIMES:
            hint = "the demo plays a trace in its own times; `llmtap replay` can give it others"
            raise ConfigError(exc.place, exc.problem, hint) from None
        raise
    if not any(plan.requests.tenants):
        shares = Random(SEED).choices(list(TENANTS), list(TENANTS.values()), k=len(plan.requests))
        plan.requests.tenants = shares
    return plan


READY_NS: Final = 30_000_000_000
END_S: Final = 10.0
LOOK_S: Final = 0.05
SAID_CHARS_MAX: Final = 2_000
TENANT_HEADER: Final = "x-llm-d-inference-fairness-id"
OBJECTIVES: Final = "ttft:500ms tpot:50ms"
ENGINE: Final = "150 ms to the first token, then 20 ms per token, +-30 %"
GUARDRAIL: Final = "simulated: checks the prompt (40 ms) and each block of 8 tokens (20 ms), refuses 5 %"

_CONFIG: Final = f"""
[relay]
drain_timeout = "1s"

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


class DemoStage:
    """Context of the engine and the proxy. `folder` gets the proxy's configuration and both logs."""

    def __init__(self, folder: Path, reader: Benefit) -> None:
        self._folder = folder
        self._reader = reader
        self.log = folder / "log"
        self._children: list[subprocess.Popen[bytes]] = []
        self._kept = [keep_port() for _ in range(3)]
        engine, proxy, admin = (f"127.0.0.1:{sock.getsockname()[1]}" for sock in self._kept)
        self.engine = f"http://{engine}"
        self.proxy = f"http://{proxy}"
        self.admin = f"http://{admin}"

    def __enter__(self) -> Self:
        config = self._folder / "llmtap.toml"
        reader = self._reader
        meter = f"alpha = {reader.alpha:g}\nreader_tokens_per_second = {reader.speed:g}\n"
        meter += f'idle_cost = "{reader.f}"\nreader_grace_tokens = {reader.grace_tokens}\n'
        config.write_text(f"[meter]\n{meter}{_CONFIG}", encoding="utf-8")
        serve = ["sim", "serve", "--listen", _address(self.engine)]
        serve += ["--spread", "0.3", "--tokens", str(TOKENS_MAX)]
        proxy = ["proxy", "--upstream", self.engine, "--listen", _address(self.proxy)]
        proxy += ["--admin", _address(self.admin), "--config", str(config), "--set", "log.level=warning"]
        # The user's variables are for the user's own proxy.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LLMTAP_")}
        with self.log.open("ab") as log:
            for args in (serve, proxy):
                self._children.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", "llmtap.cli", *args], env=environ, stderr=log,
                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
                    )
                )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The proxy first: the engine then has no client to wait for.
        for child in reversed(self._children):
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        for sock in self._kept:
            sock.close()

    def check(self) -> None:
        """Raise LlmtapError if a process has ended."""
        for child in self._children:
            if child.poll() is not None:
                said = self.log.read_text(encoding="utf-8", errors="replace")[-SAID_CHARS_MAX:]
                raise LlmtapError(f"a process of the demo ended with {child.returncode}\n{said}".strip())

    async def ready(self, session: Any) -> None:
        """Wait until both processes answer. Raises LlmtapError after READY_NS for each."""
        for url in (f"{self.engine}/health", f"{self.admin}/readyz"):
            await self._answered(session, url)

    async def _answered(self, session: Any, url: str) -> None:
        import aiohttp

        end_ns = SystemClock.mono_ns() + READY_NS
        while SystemClock.mono_ns() < end_ns:
            self.check()
            try:
                async with session.get(url, timeout=aiohttp.ClientTimeout(total=2)) as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(LOOK_S)
        raise LlmtapError(f"{url} was not ready within {READY_NS / 1e9:.0f} s")


def _address(url: str) -> str:
    return url.removeprefix("http://")
