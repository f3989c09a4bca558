"""`llmtap demo`: everything at once, on the simulated engine."""

import asyncio
import signal
import socket
import subprocess
import sys
import time
from typing import Annotated, Any

import typer

from llmtap.cli.main import app
from llmtap.errors import LlmtapError

__all__ = ["demo"]

READY_S = 30.0


@app.command(epilog="Example:\n\n  llmtap demo --streams 1000 --concurrency 100")
def demo(
    streams: Annotated[int, typer.Option(help="Streams in all.", min=1, max=100_000)] = 300,
    concurrency: Annotated[int, typer.Option(help="Streams at a time.", min=1, max=2_000)] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Start the simulated engine and the tap in front of it, send streams through, show what the tap saw."""
    from rich.console import Console

    console = Console(stderr=True)
    ports = _free_ports(3)
    engine, proxy, admin = (f"127.0.0.1:{port}" for port in ports)
    llmtap = [sys.executable, "-P", "-m", "llmtap.cli"]
    children = [
        subprocess.Popen(
            [*llmtap, "sim", "serve", "--listen", engine, "--spread", "0.3"], stdout=subprocess.DEVNULL
        )
    ]
    try:
        console.print(
            f"engine  http://{engine}   (simulated: TTFT 150 ms, ITL 20 ms, each stream varies by 30 %)"
        )
        args = [
            "proxy",
            "--upstream",
            f"http://{engine}",
            "--listen",
            proxy,
            "--admin",
            admin,
            "--set",
            "log.level=warning",
        ]
        children.append(
            subprocess.Popen(
                [*llmtap, *args],
            )
        )
        ok = asyncio.run(_run(console, children, proxy, admin, engine, streams, concurrency, as_json))
    finally:
        for child in reversed(children):
            child.send_signal(signal.SIGTERM)
        for child in children:
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
    if not ok:
        raise typer.Exit(1)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


async def _run(
    console: Any,
    children: list["subprocess.Popen[bytes]"],
    proxy: str,
    admin: str,
    engine: str,
    streams: int,
    concurrency: int,
    as_json: bool,
) -> bool:
    import statistics

    import aiohttp
    import msgspec
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from llmtap.load.closed_loop import stream_all
    from llmtap.report.terminal import render_summary

    async with aiohttp.ClientSession() as session:
        await _wait_ready(session, f"http://{engine}/health", children)
        await _wait_ready(session, f"http://{admin}/readyz", children)
        console.print(f"tap     http://{proxy}   metrics http://{admin}/metrics")
        columns = (TextColumn("streams"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("streams", total=streams)
            url = f"http://{proxy}/v1/chat/completions"
            seen = await stream_all(
                url, streams=streams, concurrency=concurrency,
                headers=lambda i: {"x-request-id": f"demo-{i}"},
                done=lambda: progress.advance(task),
            )  # fmt: skip
        summary = await _settled_summary(session, f"http://{admin}/api/v1/summary?window=all", streams)
    if as_json:
        print(msgspec.json.encode(summary).decode())
    else:
        Console().print(render_summary(summary))
        if seen.gaps_ns:
            console.print(
                f"the clients' view: TTFT p50 {statistics.median(seen.ttft_ns) / 1e6:.1f} ms, "
                f"gap p50 {statistics.median(seen.gaps_ns) / 1e6:.2f} ms, "
                f"{seen.completed} streams complete, {seen.failed} failed"
            )
    if seen.failed or summary["n"] != streams:
        console.print(f"failed: {seen.first_error or ''} (measured {summary['n']} of {streams})")
        return False
    return True


async def _wait_ready(session: Any, url: str, children: list["subprocess.Popen[bytes]"]) -> None:
    import aiohttp

    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        for child in children:
            if child.poll() is not None:
                raise LlmtapError(f"a process of the demo ended with {child.returncode}")
        try:
            async with session.get(url, timeout=aiohttp.ClientTimeout(total=2)) as response:
                if response.status == 200:
                    return
        except (aiohttp.ClientError, TimeoutError):
            pass
        await asyncio.sleep(0.05)
    raise LlmtapError(f"{url} was not ready within {READY_S:.0f} s")


async def _settled_summary(session: Any, url: str, streams: int) -> dict[str, Any]:
    """The summary, once the meter has caught up."""
    end = time.monotonic() + 5
    while True:
        async with session.get(url) as response:
            summary: dict[str, Any] = await response.json()
        settled = summary["n"] >= streams and not any(
            r.get("unsettled", 1) for r in summary["relays"].values()
        )
        if settled or time.monotonic() > end:
            return summary
        await asyncio.sleep(0.1)
