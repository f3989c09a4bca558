"""The meter as a process: told what to do in one line on stdin, ends when that pipe does.

Run by the supervisor as `python -m llmtap.meter`. The line is a MeterSetup as JSON. The admin socket is
inherited where there is one, so that it outlives this process and scrapes wait while it restarts.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import uvloop
from aiohttp import web

from llmtap import __version__
from llmtap.clock import SystemClock
from llmtap.errors import LlmtapError
from llmtap.export.options import OtlpOptions
from llmtap.log import LogSetup, set_up
from llmtap.meter.admin import admin_app
from llmtap.meter.options import CostOptions, MeterOptions, SloOptions, TenantOptions, split_address
from llmtap.meter.receiver import Receiver, listen_on
from llmtap.meter.tally import Tally
from llmtap.meter.tokenizer import load_tokenizer
from llmtap.tap.experiment import Experiment
from llmtap.units import decode_special

if TYPE_CHECKING:
    from llmtap.export.opentelemetry import OtlpExporter

__all__ = ["MeterSetup", "main"]

NICE = 5
"""A third of a relay's share when both want the same CPU: enough to keep up, not enough to rule."""

log = logging.getLogger(__name__)


class MeterSetup(msgspec.Struct, kw_only=True):
    """What a meter process needs to know."""

    options: MeterOptions
    socket: str
    """Where relays deliver their frames: the path of a unix socket."""
    admin_fd: int | None = None
    """A listening socket for the admin port; None: bind `options.admin`."""
    log: LogSetup = LogSetup()
    experiment: Experiment | None = None
    otlp: OtlpOptions = OtlpOptions()
    tenants: TenantOptions = TenantOptions()
    salt: str = ""
    """Key of the hashes that stand for API keys."""
    slo: dict[str, SloOptions] = {}
    cost: CostOptions = CostOptions()
    servers: dict[str, tuple[str, int]] = {}
    """Host and port of the upstream by arm, under "" for all others."""


def main() -> int:
    """Run until SIGTERM, or until the supervisor is gone."""
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=MeterSetup, dec_hook=decode_special)
    set_up(setup.log)
    _yield_to_relays(setup.options.priority)
    # What is alive now lives for good. Observers and exchanges make no cycles: collections can be rare. The
    # middle one is kept short: slices of many tenants outlive the first (benchmarks/meter/memory.py).
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 4, 250)
    uvloop.run(_run(setup))
    return 0


def _yield_to_relays(priority: str) -> None:
    """Make way for the relays, which may share our CPU.

    The idle policy is preempted on the spot, where a nicer process finishes its time slice first. But on a
    CPU that the relays fill it never runs, and then nothing is measured just when it matters: so it is not
    the default (benchmarks/relay/README.md has both).
    """
    if priority == "idle":
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        except OSError as exc:
            log.warning("event=priority_not_set priority=idle error=%r", str(exc))
    else:
        os.nice(NICE)


def _start_tokenizer(text: str | None) -> Callable[[str], int] | None:
    if text is None:
        return None
    try:
        return load_tokenizer(text)
    except LlmtapError as exc:  # checked at the start of the proxy; measuring goes on without
        log.error("event=tokenizer_not_loaded error=%r", str(exc))
        return None


def _start_exporter(setup: MeterSetup, tally: Tally) -> "OtlpExporter | None":
    # 25 MB and 100 ms, so only for who exports: protobuf and gRPC.
    from llmtap.export.opentelemetry import OtlpExporter

    try:
        exporter = OtlpExporter(setup.otlp, tally.clock, __version__, setup.servers)
    except LlmtapError as exc:  # measuring goes on without
        tally.failed("otlp", exc)
        return None
    tally.listeners.append(exporter)
    tally.exporters.append(exporter.state)
    exporter.start()
    log.info("event=otlp_exporter protocol=%s semconv=%s", setup.otlp.protocol, setup.otlp.semconv)
    return exporter


async def _run(setup: MeterSetup) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    # A terminal's Ctrl-C and hang-up reach the whole group; the supervisor decides what they mean, and
    # relays that drain still want to be measured.
    for number in (signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, lambda: None)
    loop.add_reader(sys.stdin.fileno(), stop.set)

    tally = Tally(
        setup.options,
        SystemClock(),
        setup.experiment,
        tenants=setup.tenants,
        salt=setup.salt,
        slos=setup.slo,
        price=setup.cost.price,
        count_tokens=_start_tokenizer(setup.options.tokenizer),
    )
    exporter = _start_exporter(setup, tally) if setup.otlp.endpoint else None
    receiver = Receiver(tally)
    await receiver.start(listen_on(setup.socket))
    runner = web.AppRunner(admin_app(tally, setup.options.admin_token), access_log=None)
    await runner.setup()
    site: web.BaseSite
    if setup.admin_fd is not None:
        site = web.SockSite(runner, socket.socket(fileno=setup.admin_fd))
    else:
        host, port = split_address(setup.options.admin, "meter.admin")
        site = web.TCPSite(runner, host, port)
    await site.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    log.info("event=meter_ready socket=%s admin=%s", setup.socket, site.name)

    await stop.wait()
    loop.remove_reader(sys.stdin.fileno())
    await receiver.close()
    if exporter is not None:
        await asyncio.to_thread(exporter.close)
    await runner.cleanup()
    try:
        os.unlink(setup.socket)
    except FileNotFoundError:
        pass
