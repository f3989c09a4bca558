"""The relay as a process: told what to do in one line on stdin, ends when that pipe does.

Run by the supervisor as `python -m llmtap.vantage.relay`. The line is a RelaySetup as JSON; the listening
sockets are inherited file descriptors, so they outlive this process and no connection is refused during its
restart.
"""

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys

import msgspec
import uvloop

from llmtap import native
from llmtap.channel.experiment import Experiment
from llmtap.log import LogSetup, set_up
from llmtap.net.listener import bound_url
from llmtap.units import decode_special
from llmtap.vantage.relay.options import RelayOptions
from llmtap.vantage.relay.relay import Relay

__all__ = ["RelaySetup", "main"]

ORPHAN_DRAIN_S = 20.0
"""How long streams may finish at most once the supervisor has died: after 30 s nothing of it may be left, and
the meter ends after us."""

log = logging.getLogger(__name__)


class RelaySetup(msgspec.Struct, kw_only=True):
    """What a relay process needs to know."""

    options: RelayOptions
    name: str
    listen_fds: list[int]
    tap_path: str
    log: LogSetup
    experiment: Experiment | None = None


def main() -> int:
    """Run until SIGTERM, or until the supervisor is gone: status 0; 1 when the relay broke."""
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=RelaySetup, dec_hook=decode_special)
    set_up(setup.log)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # What is alive now lives for good; and the hot path makes no cycles, so collections can be rare.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    return uvloop.run(_run(setup))


async def _run(setup: RelaySetup) -> int:
    loop = asyncio.get_running_loop()
    options = setup.options
    socks = [socket.socket(fileno=fd) for fd in setup.listen_fds]
    relay = Relay(
        loop, options, name=setup.name, tap_path=setup.tap_path, experiment=setup.experiment,
        listen=bound_url(socks[0], tls=bool(options.tls_certificate)) if socks else "",
    )  # fmt: skip
    stop = asyncio.Event()

    def bereave() -> None:
        loop.remove_reader(sys.stdin.fileno())
        log.error("event=supervisor_lost relay=%s", setup.name)
        loop.call_later(ORPHAN_DRAIN_S, relay.hurry)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # A hang-up reaches the whole group, as a signal to a service may; the supervisor decides what it means.
    for number in (signal.SIGHUP, signal.SIGUSR2):
        loop.add_signal_handler(number, lambda: None)
    loop.add_reader(sys.stdin.fileno(), bereave)
    if setup.experiment is not None:
        await relay.briefed()  # connections wait in the kernel meanwhile
    relay.start(socks)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    log.info(
        "event=relay_ready relay=%s upstream=%s clock=%s implementation=%r",
        setup.name,
        options.upstream,
        options.clock,
        native.describe(),
    )
    stopping = loop.create_task(stop.wait())
    await asyncio.wait((stopping, relay.broken), return_when=asyncio.FIRST_COMPLETED)
    if relay.broken.done():
        # No drain: nothing might end a stream that stands still, and only when this process has ended does
        # the supervisor start another. New connections wait in the kernel until then.
        return 1
    await relay.drain()
    return 0
