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

import msgspec
import uvloop
from aiohttp import web

from llmtap.clock import SystemClock
from llmtap.log import LogSetup, set_up
from llmtap.meter.admin import admin_app
from llmtap.meter.options import MeterOptions, split_address
from llmtap.meter.receiver import Receiver, listen_on
from llmtap.meter.tally import Tally
from llmtap.units import decode_special

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


def main() -> int:
    """Run until SIGTERM, or until the supervisor is gone."""
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=MeterSetup, dec_hook=decode_special)
    set_up(setup.log)
    _yield_to_relays(setup.options.priority)
    # What is alive now lives for good. Observers and exchanges make no cycles: collections can be rare.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
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


async def _run(setup: MeterSetup) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    # A terminal's Ctrl-C and hang-up reach the whole group; the supervisor decides what they mean, and
    # relays that drain still want to be measured.
    for number in (signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, lambda: None)
    loop.add_reader(sys.stdin.fileno(), stop.set)

    tally = Tally(setup.options, SystemClock())
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
    await runner.cleanup()
    try:
        os.unlink(setup.socket)
    except FileNotFoundError:
        pass
