"""Start the server under test by its command, measure its model load (IETF draft, 4.5.3), and stop it.

`bench/run/perform.py` runs all tests inside the context `running_server`, if the bench file has `sut.start`.
A `ModelLoad` has three times, which begin just before the process is created: until its port accepts a
connection, until `GET /v1/models` is answered without a server error, and until the first token of the first
request that succeeds. The first two can be up to `POLL_S` too long, because the server is polled. The third
can be up to `RETRY_S` too long if earlier requests failed, because of the pause after a failure.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from llmtap.bench.sut.detect import PROBE, round_trip_ns
from llmtap.bench.sut.sut import BenchTarget
from llmtap.clock import Clock
from llmtap.errors import ConfigError
from llmtap.exchange.exchange import Exchange
from llmtap.load.bodies import BodyMaker, model_ids
from llmtap.load.http import LoadSender
from llmtap.load.options import BodyOptions, SendingOptions
from llmtap.load.replay.options import read_headers
from llmtap.load.sending import parse_target, protocol_of
from llmtap.metrics.latency import ttft_any_ns
from llmtap.metrics.summary import ENDED_WELL
from llmtap.net.bounded_body import read_at_most
from llmtap.net.tls import client_context
from llmtap.units import NS_PER_S, Duration, to_seconds

POLL_S: Final = 0.02
RETRY_S: Final = 0.2
START_S_MAX: Final = 1800
"""Maximum time to wait for the server: loading a large model from network storage, and compiling it, can take
many minutes."""
STOP_S_MAX: Final = 60
_KEY: Final = "sut.start"
_TOKENS: Final = 8


class ModelLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a server's start, in seconds from the start of its process."""

    port_open: float
    """Time at which the port accepted a connection."""
    ready: float
    """Time at which the server listed its models."""
    first_token: float
    """Time of the first token of the first request that succeeded."""
    ttft: float | None
    """TTFT of the first request that succeeded."""
    failed_before: int
    """Number of requests that failed before the first one that succeeded."""


@asynccontextmanager
async def running_server(
    command: list[str], target: BenchTarget, log: Path, clock: Clock, check: Callable[[], None]
) -> AsyncIterator[ModelLoad]:
    """Start the server, measure its model load, and stop it at the end of the context.

    The server is stopped by SIGTERM, and then its process group by SIGKILL. Its output goes to `log`.
    `check` is called while waiting; it raises an exception to end the wait. Raises ConfigError if the server
    cannot be started, ends, or does not answer in time.
    """
    if protocol_of(target.url) != "http":
        raise ConfigError(_KEY, f"requires an HTTP target, got {target.url}", "such as http://127.0.0.1:8000")
    if await round_trip_ns(target.url, clock) is not None:
        raise ConfigError(
            _KEY, f"a server already listens at {target.url}", f"stop that server, or leave out {_KEY}"
        )
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        problem = f"cannot create the folder {log.parent}: {exc.strerror}"
        raise ConfigError("--results", problem, "choose a folder that this user may write to") from None
    began_ns = clock.mono_ns()
    with log.open("wb") as out:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as exc:
            raise ConfigError(_KEY, f"cannot start {command[0]}: {exc.strerror}", "check its path") from None

    def check_all() -> None:
        check()
        if process.returncode is not None:
            last_lines = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
            problem = f"the server ended with status {process.returncode}: {last_lines[0]}"
            raise ConfigError(_KEY, problem, f"see {log}")
        if clock.mono_ns() - began_ns > START_S_MAX * NS_PER_S:
            raise ConfigError(_KEY, f"the server did not answer within {START_S_MAX} s", f"see {log}")

    try:
        while await round_trip_ns(target.url, clock) is None:
            check_all()
            await asyncio.sleep(POLL_S)
        open_ns = clock.mono_ns()
        while (models := await _listed_models(target)) is None:
            check_all()
            await asyncio.sleep(POLL_S)
        ready_ns = clock.mono_ns()
        failed, x = -1, None
        while x is None or x.outcome not in ENDED_WELL or x.timeline.first_token_ns is None:
            failed += 1
            if failed:
                await asyncio.sleep(RETRY_S)
            x = await _first_answer(target, models, check_all)
        ttft_ns = ttft_any_ns(x.timeline)
        yield ModelLoad(
            port_open=to_seconds(open_ns - began_ns),
            ready=to_seconds(ready_ns - began_ns),
            first_token=to_seconds(x.timeline.first_token_ns - began_ns),
            ttft=None if ttft_ns is None else to_seconds(ttft_ns),
            failed_before=failed,
        )
    finally:
        await _stop_process(process)


def model_load_text(load: ModelLoad) -> str:
    """Format as `12 s to the first token (port open 2 s, ready 11.5 s), TTFT of the first request 0.5 s`."""
    steps = f"port open {load.port_open:.3g} s, ready {load.ready:.3g} s"
    first = "" if load.ttft is None else f", TTFT of the first request {load.ttft:.3g} s"
    return f"{load.first_token:.3g} s to the first token ({steps}){first}"


async def _listed_models(target: BenchTarget) -> list[str] | None:
    """Return the models that the server lists; None if it does not answer, or answers with a server error."""
    try:
        async with (
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=10), headers=read_headers([], None, target.key_env)
            ) as session,
            session.get(
                f"{target.url.rstrip('/').removesuffix('/v1')}/v1/models", ssl=client_context(target.ca, True)
            ) as response,
        ):
            return model_ids(await read_at_most(response)) if response.status < 500 else None
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


async def _first_answer(target: BenchTarget, models: list[str], check: Callable[[], None]) -> Exchange:
    """Send one request, and return its exchange, failed or not. `check` can raise to end the wait."""
    loop = asyncio.get_running_loop()
    fields = [*read_headers([], None, target.key_env), *target.headers.items()]
    headers = [(name.encode(), value.encode()) for name, value in fields]
    tls = client_context(target.ca, True) if target.url.startswith("https") else None
    sender = LoadSender(
        loop,
        parse_target(target.url, target.endpoint, headers),
        SendingOptions(timeout=Duration(START_S_MAX * NS_PER_S)),
        tls=tls,
    )
    options = BodyOptions(
        endpoint=target.endpoint,  # type: ignore[arg-type]
        server=target.server,
        model=target.model or next(iter(models), None),
        temperature=0.0,
        fields=target.body,
    )
    answered: asyncio.Future[Exchange] = loop.create_future()
    try:
        sender.send(BodyMaker(options).body(PROBE, _TOKENS), lambda call, x: answered.set_result(x))
        while not answered.done():
            check()
            await asyncio.wait({answered}, timeout=RETRY_S)
        return answered.result()
    finally:
        sender.close()


async def _stop_process(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S_MAX):
                await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
