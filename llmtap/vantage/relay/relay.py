"""Main program of a relay process: its listeners, client connections and upstreams, from start to drain.

The supervisor runs it as `python -m llmtap.vantage.relay`. It reads a RelaySetup as JSON from stdin, and
inherits the listening sockets, so no connection is refused while it restarts. It drains and ends on SIGTERM,
on SIGUSR1 when other relays have taken over its sockets, or when stdin closes because the supervisor is gone.
If a task for time limits or reports fails, it ends at once, and the supervisor starts another.
"""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import uvloop

from llmtap import native
from llmtap.channel.experiment import Experiment, read_switch
from llmtap.clock import Clock, SystemClock
from llmtap.net.lag import make_lag_meter
from llmtap.net.listener import Listener, failure_text, name_of, raise_file_limit
from llmtap.net.pool import Origin, Pool, Route, parse_origin
from llmtap.net.stream import KERNEL_FLOOR_NS, Stream, keep_stamps_on, open_stream
from llmtap.net.tls import TlsStream, client_context, server_context
from llmtap.vantage.relay.connection import ClientConnection
from llmtap.vantage.relay.experiment_router import ExperimentRouter
from llmtap.vantage.relay.forwarding import ForwardingThread
from llmtap.vantage.relay.options import RelayOptions
from llmtap.vantage.relay.upload import RelayContext
from llmtap.vantage.reporter import (
    PROBE_GRAIN_NS,
    PROBE_NS,
    STATUS_S,
    ChildSetup,
    Reporter,
    begin_child,
    on_orphaned,
)

SWEEP_S = 0.25
UPSTREAM_CHECK_S = 2.0
"""Time between two checks whether the upstream accepts connections, if readiness depends on it."""
SWEEP_SLICE = 256
"""Number of connections checked in one step, so that a sweep over ten thousand does not block the event loop
for milliseconds."""
BRIEFING_S = 0.5
"""Time that a new relay waits for the state of the experiment; the meter answers in milliseconds."""
LAST_REQUEST_NS = 5_000_000_000
"""Time that an idle client has for one more request after new relays have taken over.

The response to this request has `Connection: close`, so that no later request meets a closed connection. 5 s
is the keep-alive time of uvicorn and Node.js: clients expect that a connection that was idle for longer may
be closed.
"""
ORPHAN_DRAIN_S = 20.0
"""Maximum drain time after the supervisor has died: all processes, the meter last, must end within 30 s."""

log = logging.getLogger(__name__)


class _UpstreamCheck:
    """Check of one upstream: opens a connection to it, closes it at once, and logs each change."""

    def __init__(self, origin: Origin, pool: Pool) -> None:
        self.url = f"{'https' if origin.tls else 'http'}://{origin.authority.decode()}"
        self.pool = pool
        """Pool of the upstream's connections, which the check uses to connect."""
        pool.on_change = self._on_change

    def start_check(self) -> None:
        self.pool.connect(self)

    def _on_change(self, error: OSError | None) -> None:
        if error is None:
            log.info("event=upstream_reachable upstream=%s", self.url)
        else:
            log.warning(
                "event=upstream_unreachable upstream=%s error=%r hint=%r",
                self.url,
                failure_text(error),
                "is the gateway running, and relay.upstream right?",
            )

    def on_connected(self, stream: Stream, took_ns: int) -> None:
        stream.close()

    def on_connect_failed(self, error: OSError) -> None: ...
    def on_data(self, data: bytes, t_ns: int) -> None: ...
    def on_eof(self) -> None: ...
    def on_lost(self, error: OSError | None) -> None: ...
    def on_drained(self) -> None: ...


class Relay:
    """One relay: listeners, client connections, upstream pools, and its channel to the meter."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        options: RelayOptions,
        *,
        name: str,
        tap_path: str,
        listen: str = "",
        experiment: Experiment | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.loop = loop
        self.options = options
        # The lag probes can miss a stall of the event loop that is shorter than the time between two probes;
        # `blind_ns` adds this time to the lag. Kernel timestamps do not need it: a missed stall affects them
        # only if two events wait in one socket, and the meter allows for that (STALL_MISSED_NS in
        # `exchange/observer.py`).
        if options.clock == "kernel":
            lag = make_lag_meter(KERNEL_FLOOR_NS)
        else:
            lag = make_lag_meter(PROBE_GRAIN_NS, blind_ns=PROBE_NS + PROBE_GRAIN_NS, turns=2)
        self._stamp_socket = keep_stamps_on() if options.clock == "kernel" else None
        """Socket that keeps the kernel's timestamps switched on; None: they are not used."""
        self.reporter = reporter = Reporter(
            loop,
            tap_path,
            options.tap_bytes,
            lag,
            clock or SystemClock(),
            name=name,
            clock_name=options.clock,
            listen=listen,
            live_counts=self._live_counts,
            on_word=self._on_word,
        )
        """Channel to the meter, with the counts of this process."""
        self.tap = reporter.tap
        self._pools: list[Pool] = []
        """Pools of connections to each upstream."""
        self._checks: list[_UpstreamCheck] = []
        """One check of each upstream."""
        origin = parse_origin(options.upstream, "relay.upstream")
        route = self._route_to(origin, options.upstream_server_name)
        self.pool = route.pool
        self.context = RelayContext(loop, options, reporter, route)
        self.forwarding: ForwardingThread | None = None
        """Thread that forwards long bodies; None: not compiled, or not wanted."""
        self._briefing = asyncio.Event()
        """Set when the meter has sent the state of the experiment, so that requests can be accepted."""
        if experiment is not None:
            arm_routes = {
                arm.name: self._route_to(parse_origin(arm.upstream, f"experiment.arms[{i}].upstream"))
                for i, arm in enumerate(experiment.arms)
                if arm.upstream is not None
            }
            what = "experiment.held_bytes is used up: requests go to the control arm, and are not counted"
            no_room = partial(self.context.warn, "no_room", what)
            self.context.router = ExperimentRouter(experiment, name, route, arm_routes, no_room)
            self.context.router.switch(experiment.enabled)
        self._server_tls = None
        if options.tls_certificate or options.tls_key:
            self._server_tls = server_context(options.tls_certificate or "", options.tls_key or "")
        self.connections: set[ClientConnection] = set()
        self._listeners: list[Listener] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._drained = asyncio.Event()
        """Set when no exchange is under way, or when the drain must end."""
        self.failure: asyncio.Future[None] = loop.create_future()
        """Future that is done if a task fails on which all connections depend; the relay then ends."""

    @property
    def flows(self) -> Iterable[Any]:
        """Exchanges that have not ended."""
        return self.reporter.arrivals.keys()

    def _route_to(self, origin: Origin, server_name: str | None = None) -> Route:
        options = self.options
        tls = client_context(options.upstream_ca, options.upstream_verify) if origin.tls else None
        pool = Pool(
            self.loop,
            origin,
            self.reporter.timebase,
            clock=options.clock,
            tls=tls,
            idle_max=options.upstream_idle_connections,
            idle_ns=options.upstream_keepalive,
            connect_ns=options.connect_timeout,
            server_name=server_name,
        )
        self._pools.append(pool)
        self._checks.append(_UpstreamCheck(origin, pool))
        return Route(origin, origin.authority if options.host == "upstream" else None, pool)

    # ---------------------------------------------------------------- the experiment

    def _on_word(self, word: int) -> None:
        """Handle a switch word of the meter: switch the experiment on or off, or to a stage. Ignore words on
        other experiments."""
        experiment_id, on = read_switch(word)
        self._briefing.set()
        router = self.context.router
        stage = None if router is None else router.experiment.stage_of(experiment_id)
        if router is not None and stage is not None:
            if word != self.reporter.switch:
                log.info(
                    "event=experiment_switched relay=%s on=%s stage=%d", self.reporter.name, on, stage + 1
                )
            self.reporter.switch, router.stage = word, stage
            router.switch(on)

    async def wait_for_briefing(self) -> None:
        """Wait up to BRIEFING_S for the meter's message whether the experiment is on."""
        self.tap.connect()
        try:
            await asyncio.wait_for(self._briefing.wait(), BRIEFING_S)
        except TimeoutError:
            log.info("event=experiment_not_briefed relay=%s", self.reporter.name)

    # ---------------------------------------------------------------- start and background tasks

    def start(self, sockets: Iterable[socket.socket]) -> None:
        """Accept connections from `sockets`, and connect to the meter."""
        self.tap.connect()
        if self.options.thread:
            self._start_thread()
        for sock in sockets:
            self._listeners.append(Listener(self.loop, sock, self._accept, self._accept_failed))
        for work in (self._sweep_for_ever, self._report_for_ever, self._check_upstreams_for_ever):
            self._start_task(work(), work.__name__).add_done_callback(self._on_vital_task_end)

    def _start_thread(self) -> None:
        """Start the forwarding thread. Without it, the event loop forwards all bodies."""
        if native.compiled is None or self.options.clock != "kernel":
            reason = native.describe() if native.compiled is None else f"relay.clock is {self.options.clock}"
            log.warning("event=no_thread relay=%s reason=%r", self.reporter.name, reason)
            return
        self.forwarding = ForwardingThread(self.loop, self.tap, self.reporter.timebase)
        self.context.forwarder = self.forwarding.forwarder

    def _start_task(self, coroutine: "asyncio._CoroutineLike[None]", name: str) -> asyncio.Task[None]:
        task = self.loop.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _on_vital_task_end(self, task: asyncio.Task[None]) -> None:
        """End the process if a periodic task fails: without the task there are no time limits or reports."""
        if not task.cancelled():
            log.critical(
                "event=relay_broken relay=%s task=%s",
                self.reporter.name,
                task.get_name(),
                exc_info=task.exception(),
            )
            if not self.failure.done():
                self.failure.set_result(None)

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now_ns = self.reporter.now_ns()
            for pool in self._pools:
                self._check(pool.sweep, now_ns)
            waiting = list(self.connections)
            for start in range(0, len(waiting), SWEEP_SLICE):
                for connection in waiting[start : start + SWEEP_SLICE]:
                    self._check(connection.check, now_ns)
                await asyncio.sleep(0)

    def _check(self, check: Callable[[int], None], now_ns: int) -> None:
        """Run the check of one connection. Log its exceptions, so that the other connections are checked."""
        try:
            check(now_ns)
        except Exception as exc:
            self.context.warn("check_failed", type(exc).__name__, exc)

    async def _report_for_ever(self) -> None:
        while True:
            await asyncio.sleep(STATUS_S)
            self.reporter.report()

    def check_upstreams(self) -> None:
        """Connect to each upstream once; log a warning if one accepts no connection."""
        for check in self._checks:
            check.start_check()

    async def _check_upstreams_for_ever(self) -> None:
        """Check all upstreams regularly with `ready_needs_upstream`, otherwise only those that are down."""
        while True:
            for check in self._checks:
                if self.options.ready_needs_upstream or check.pool.up is False:
                    check.start_check()
            await asyncio.sleep(UPSTREAM_CHECK_S)

    def _live_counts(self) -> dict[str, Any]:
        """Return the fields of RelayStatus whose values are determined only when the relay reports."""
        checked = [check for check in self._checks if check.pool.up is not None]
        return {
            "connections": len(self.connections),
            "upstream_idle": sum(pool.idle for pool in self._pools),
            "upstream_connects": sum(pool.connects for pool in self._pools),
            "upstream_reuses": sum(pool.reuses for pool in self._pools),
            "thread_loans": 0 if self.forwarding is None else self.forwarding.forwarder.lent_total,
            "upstream_unsolicited": sum(pool.unsolicited for pool in self._pools),
            "upstream_up": bool(self._checks[0].pool.up) if self.options.ready_needs_upstream else None,
            "upstreams": {check.url: check.pool.up for check in checked},
            "upstreams_tried_ns": {check.url: check.pool.tried_ns for check in checked},
        }

    # ---------------------------------------------------------------- accept connections

    def _accept(self, sock: socket.socket) -> None:
        self.reporter.counts.accepted += 1
        if len(self.connections) >= self.options.connections:
            self.context.refuse("connections")
            sock.close()
            return
        address = b""
        if self.options.forwarded_for:
            try:
                address = sock.getpeername()[0].encode()
            except OSError:
                sock.close()
                return
        connection = ClientConnection(self.context, address, self.forget)
        self.connections.add(connection)
        if self._server_tls is not None:
            self._start_task(self._accept_tls(sock, connection), "accept_tls")
            return
        stream = open_stream(self.loop, sock, connection, self.reporter.timebase, self.options.clock)
        connection.attach(stream, self.reporter.now_ns())
        self.reporter.start_probe()

    def _accept_failed(self, error: OSError) -> None:
        self.context.refuse("accept_failed")
        self.context.warn("accept_failed", str(error))

    async def _accept_tls(self, sock: socket.socket, connection: ClientConnection) -> None:
        stream = TlsStream(connection, sock)
        connection.attach(stream, self.reporter.now_ns())
        try:
            limit_s = self.options.head_timeout / 1e9
            await self.loop.connect_accepted_socket(
                lambda: stream, sock, ssl=self._server_tls, ssl_handshake_timeout=limit_s
            )
        except (OSError, TimeoutError) as exc:
            self.context.refuse("tls_handshake")
            self.context.warn("tls_handshake", f"{type(exc).__name__}: {exc}")
            self.forget(connection)
            sock.close()
        self.reporter.start_probe()

    def forget(self, connection: ClientConnection) -> None:
        """Remove a client connection that is closed."""
        self.connections.discard(connection)
        if self.reporter.draining and not self.connections:
            self._drained.set()

    # ---------------------------------------------------------------- the end of the relay

    def end_drain(self) -> None:
        """End the drain at once, or a later drain when it begins: running exchanges are cut."""
        self._drained.set()

    def let_idle_clients_wait(self, wait: bool) -> None:
        """Set whether idle clients are allowed one more request during the drain, now or when it begins."""
        self.context.last_request_ns = LAST_REQUEST_NS if wait else 0
        if self.reporter.draining:
            self._drain_connections()

    def _drain_connections(self) -> None:
        now_ns = self.reporter.now_ns()
        for connection in list(self.connections):
            connection.drain(now_ns)

    async def drain(self) -> None:
        """Accept no more connections, let exchanges finish within `drain_timeout`, then end."""
        self.reporter.draining = True
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self.tap.status(self.reporter.status())
        self._drain_connections()
        if self.connections:
            log.info("event=draining relay=%s connections=%d", self.reporter.name, len(self.connections))
            try:
                await asyncio.wait_for(self._drained.wait(), self.options.drain_timeout / 1e9)
            except TimeoutError:
                pass
            if self.context.running:
                log.warning(
                    "event=drain_timeout relay=%s cut=%d", self.reporter.name, len(self.context.running)
                )
        for connection in list(self.connections):
            connection.kill()
        if self.forwarding is not None:
            self.forwarding.close()
        for pool in self._pools:
            pool.close()
        if self._stamp_socket is not None:
            self._stamp_socket.close()
        self.tap.status(self.reporter.status())
        await self.tap.drain(2.0)
        self.tap.close()
        for task in list(self._tasks):
            task.cancel()


class RelaySetup(ChildSetup, kw_only=True):
    """Setup of a relay process."""

    options: RelayOptions
    listen_fds: list[int]
    experiment: Experiment | None = None
    checks_upstream: bool = False
    """Whether to warn at the start if the upstream accepts no connection."""


def main() -> int:
    """Run until SIGTERM, SIGUSR1 or the supervisor's end, and return 0; return 1 if a vital task failed."""
    setup = begin_child(RelaySetup)
    raise_file_limit()
    return uvloop.run(_run(setup))


async def _run(setup: RelaySetup) -> int:
    loop = asyncio.get_running_loop()
    options = setup.options
    socks = [socket.socket(fileno=fd) for fd in setup.listen_fds]
    relay = Relay(
        loop,
        options,
        name=setup.name,
        tap_path=setup.tap_path,
        experiment=setup.experiment,
        listen=f"http{'s' if options.tls_certificate else ''}://{name_of(socks[0])}" if socks else "",
    )
    relay.reporter.side = setup.side
    stop = asyncio.Event()

    def on_supervisor_lost() -> None:
        loop.call_later(ORPHAN_DRAIN_S, relay.end_drain)
        stop.set()

    def end(*, replaced: bool) -> None:
        relay.let_idle_clients_wait(replaced)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, partial(end, replaced=False))
    loop.add_signal_handler(signal.SIGUSR1, partial(end, replaced=True))
    # Ignore these signals: a hang-up, or a signal to a service, reaches the whole process group, and the
    # supervisor decides when this process ends.
    for number in (signal.SIGHUP, signal.SIGUSR2):
        loop.add_signal_handler(number, lambda: None)
    on_orphaned(loop, setup, on_supervisor_lost)
    if setup.experiment is not None:
        await relay.wait_for_briefing()  # connections wait in the kernel meanwhile
    relay.start(socks)
    if setup.checks_upstream:
        relay.check_upstreams()
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
    await asyncio.wait((stopping, relay.failure), return_when=asyncio.FIRST_COMPLETED)
    if relay.failure.done():
        # Do not drain: a task on which all connections depend has failed. If it is the one that enforces the
        # time limits, a stalled stream might never end, and the supervisor starts another relay only after
        # this process has ended. New connections wait in the kernel meanwhile.
        return 1
    await relay.drain()
    return 0
