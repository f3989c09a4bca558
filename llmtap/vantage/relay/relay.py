"""One relay process's whole: its listeners, connections, pool and tap, and what it says about itself."""

import asyncio
import logging
import os
import resource
import socket
from collections.abc import Callable, Iterable

import msgspec

from llmtap import native
from llmtap.channel.channel import Tap
from llmtap.channel.experiment import Experiment, read_switch
from llmtap.channel.frames import Anchored, Frame, FrameKind, Hello, RelayStatus
from llmtap.clock import Clock, SystemClock
from llmtap.memory import resident_bytes
from llmtap.net.lag import make_lag_meter
from llmtap.net.listener import Listener
from llmtap.net.pool import Origin, Pool, parse_origin
from llmtap.net.stream import Timebase, keep_stamps_on, open_stream
from llmtap.net.tls import TlsStream, client_context, server_context
from llmtap.vantage.relay.arms import ArmedFlow, ArmedFlowToHttp10, ExperimentRouter
from llmtap.vantage.relay.connection import ClientConnection
from llmtap.vantage.relay.flow import Flow
from llmtap.vantage.relay.flow_http10 import FlowToHttp10
from llmtap.vantage.relay.options import RelayOptions
from llmtap.vantage.relay.route import Route

__all__ = ["Relay"]

SWEEP_S = 0.25
SWEEP_SLICE = 256
"""Connections looked at in one go: a sweep over ten thousand must not hold the loop for milliseconds."""
STATUS_S = 0.5
PROBE_S = 0.01
"""How often the loop's lateness is probed while streams run. uvloop's timers have a grain of 1 ms."""
PROBE_GRAIN_NS = 1_000_000
KERNEL_FLOOR_NS = 50_000
"""What a kernel stamp and its mapping to the monotonic clock may be off by (measured: 13 to 18 us)."""
WARN_EVERY_NS = 1_000_000_000
BRIEFING_S = 0.5
"""How long a fresh relay waits to hear whether the experiment is on; the meter answers in milliseconds."""

log = logging.getLogger(__name__)


class Relay:
    """The data plane of one process."""

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
        self.name = name
        self._listen = listen
        self.adds_fields = options.request_id == "make" or options.forwarded_for or options.via
        clock = SystemClock() if clock is None else clock
        self.now_ns = clock.mono_ns
        # A stall between two probes goes unseen up to their distance. With kernel stamps it does not move a
        # stamp, unless it is so long that two events wait in one socket and share the later one's.
        probe_ns = int(PROBE_S * 1e9) + PROBE_GRAIN_NS
        if options.clock == "kernel":
            self.lag = make_lag_meter(KERNEL_FLOOR_NS, blind_ns=probe_ns, blind_from_ns=probe_ns)
        else:
            self.lag = make_lag_meter(PROBE_GRAIN_NS, blind_ns=probe_ns, turns=2)
        self._stamped = keep_stamps_on() if options.clock == "kernel" else None
        self._timebase = Timebase(clock, self.lag)
        self._told_anchor = self._timebase.anchor
        self.tap = Tap(loop, tap_path, options.tap_bytes, self._hello, self._on_word, self._anchor_news)
        origin = parse_origin(options.upstream, "relay.upstream")
        self.route = self._route_to(origin, options.upstream_server_name)
        self.pool = self.route.pool
        self._pools = [self.pool]
        # What an experiment changes about a request is in other kinds of Flow: without one nothing is asked.
        self.flow_kind: type[Flow] = Flow
        self.flow_kind_10: type[Flow] = FlowToHttp10
        self.split: ExperimentRouter | None = None
        self._switch = 0
        self._briefing = asyncio.Event()
        if experiment is not None:
            routes = self._arm_routes(experiment)
            self.split = ExperimentRouter(experiment, name, self.route, routes, self._no_room)
            self.switch_experiment(experiment.enabled)
        self._server_tls = None
        if options.tls_certificate or options.tls_key:
            self._server_tls = server_context(options.tls_certificate or "", options.tls_key or "")
        self.connections: set[ClientConnection] = set()
        self.flows: set[Flow] = set()
        self.draining = False
        self.bytes_up = 0
        self.bytes_down = 0
        self._accepted = 0
        self._refused: dict[str, int] = {}
        self._warned_ns: dict[str, int] = {}
        self._listeners: list[Listener] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._probe: asyncio.TimerHandle | None = None
        self._probe_due_ns = 0
        self._drained = asyncio.Event()
        self.broken: asyncio.Future[None] = loop.create_future()
        """Done once a task that all connections depend on has failed."""

    def _route_to(self, origin: Origin, server_name: str | None) -> Route:
        options = self.options
        pool = Pool(
            self.loop,
            origin,
            self._timebase,
            clock=options.clock,
            idle_max=options.upstream_idle_connections,
            idle_ns=options.upstream_keepalive,
            connect_ns=options.connect_timeout,
            tls=client_context(options.upstream_ca, options.upstream_verify) if origin.tls else None,
            server_name=server_name,
        )
        return Route(origin, origin.authority if options.host == "upstream" else None, pool)

    def _arm_routes(self, experiment: Experiment) -> dict[str, Route]:
        """Connections of their own for arms with an upstream of their own."""
        routes: dict[str, Route] = {}
        for i, arm in enumerate(experiment.arms):
            if arm.upstream is not None:
                origin = parse_origin(arm.upstream, f"experiment.arms[{i}].upstream")
                routes[arm.name] = route = self._route_to(origin, None)
                self._pools.append(route.pool)
        return routes

    # ---------------------------------------------------------------- the experiment

    def switch_experiment(self, on: bool) -> None:
        """From the next request on, deal requests to arms, or no more."""
        on = on and self.split is not None and self.split.running()
        self.flow_kind = ArmedFlow if on else Flow
        self.flow_kind_10 = ArmedFlowToHttp10 if on else FlowToHttp10

    def _no_room(self) -> None:
        self.warn("no_room", "experiment.held_bytes is used up: requests go the control arm's way, excluded")

    def _on_word(self, word: int) -> None:
        """The meter says whether the experiment is on; a word about another experiment says nothing here."""
        told_id, on = read_switch(word)
        self._briefing.set()
        if self.split is not None and told_id == self.split.experiment.id:
            if word != self._switch:
                log.info("event=experiment_switched relay=%s on=%s", self.name, on)
            self._switch = word
            self.switch_experiment(on)

    async def briefed(self) -> None:
        """Wait for the meter's word on the experiment before the first request; not for long."""
        self.tap.connect()
        try:
            await asyncio.wait_for(self._briefing.wait(), BRIEFING_S)
        except TimeoutError:
            log.info("event=experiment_not_briefed relay=%s", self.name)

    def start(self, sockets: Iterable[socket.socket]) -> None:
        """Accept from `sockets`, and look for the meter."""
        self.tap.connect()
        for sock in sockets:
            self._listeners.append(Listener(self.loop, sock, self._accept, self._accept_failed))
        for work in (self._sweep_for_ever, self._report_for_ever):
            self._keep(work(), work.__name__).add_done_callback(self._vital_over)

    def _keep(self, coroutine: "asyncio._CoroutineLike[None]", name: str) -> asyncio.Task[None]:
        task = self.loop.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _vital_over(self, task: asyncio.Task[None]) -> None:
        """Without time-outs, or unheard, a relay still looks well: better that its process ends."""
        if not task.cancelled():
            log.critical(
                "event=relay_broken relay=%s task=%s", self.name, task.get_name(), exc_info=task.exception()
            )
            if not self.broken.done():
                self.broken.set_result(None)

    # ---------------------------------------------------------------- accepting

    def _accept(self, sock: socket.socket) -> None:
        self._accepted += 1
        if len(self.connections) >= self.options.connections:
            self.refuse("connections")
            sock.close()
            return
        address = b""
        if self.options.forwarded_for:
            try:
                address = sock.getpeername()[0].encode()
            except OSError:
                sock.close()
                return
        connection = ClientConnection(self, address)
        self.connections.add(connection)
        if self._server_tls is not None:
            self._keep(self._accept_tls(sock, connection), "accept_tls")
            return
        stream = open_stream(self.loop, sock, connection, self._timebase, self.options.clock)
        connection.attach(stream, self.now_ns())
        if self._probe is None:
            self._start_probe()

    def _accept_failed(self, error: OSError) -> None:
        self.refuse("accept_failed")
        self.warn("accept_failed", str(error))

    async def _accept_tls(self, sock: socket.socket, connection: ClientConnection) -> None:
        stream = TlsStream(connection)
        connection.attach(stream, self.now_ns())
        try:
            await self.loop.connect_accepted_socket(
                lambda: stream,
                sock,
                ssl=self._server_tls,
                ssl_handshake_timeout=self.options.head_timeout / 1e9,
            )
        except (OSError, TimeoutError) as exc:
            self.refuse("tls_handshake")
            self.warn("tls_handshake", f"{type(exc).__name__}: {exc}")
            self.forget(connection)
            sock.close()
        if self._probe is None:
            self._start_probe()

    def forget(self, connection: ClientConnection) -> None:
        """A client's connection is closed."""
        self.connections.discard(connection)
        if self.draining and not self.connections:
            self._drained.set()

    def refuse(self, limit: str) -> None:
        """Count a connection or request that was turned away."""
        self._refused[limit] = self._refused.get(limit, 0) + 1

    def warn(self, kind: str, what: str, error: Exception | None = None) -> None:
        """Log a fault of the world: at most one line a second of a kind, so that an outage fills no disk.

        Where the fault is ours, `error` says where.
        """
        now_ns = self.now_ns()
        if now_ns - self._warned_ns.get(kind, -WARN_EVERY_NS) >= WARN_EVERY_NS:
            self._warned_ns[kind] = now_ns
            log.warning("event=%s relay=%s error=%r", kind, self.name, what, exc_info=error)

    # ---------------------------------------------------------------- the loop's lateness

    def _start_probe(self) -> None:
        self._probe_due_ns = self.now_ns() + int(PROBE_S * 1e9)
        self._probe = self.loop.call_later(PROBE_S, self._on_probe)

    def _on_probe(self) -> None:
        now_ns = self.now_ns()
        late_ns = now_ns - self._probe_due_ns
        # Timers have a grain of 1 ms and may be early by it: only what exceeds it is known to be lateness.
        if self.options.clock == "mono" or late_ns > PROBE_GRAIN_NS:
            self.lag.note(now_ns, max(0, late_ns - PROBE_GRAIN_NS))
        if self.flows:
            self._start_probe()
        else:
            self._probe = None

    # ---------------------------------------------------------------- time-outs and reports

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now_ns = self.now_ns()
            for pool in self._pools:
                self._check(pool.sweep, now_ns)
            if self.flows and self._probe is None:
                self._start_probe()
            waiting = list(self.connections)
            for start in range(0, len(waiting), SWEEP_SLICE):
                for connection in waiting[start : start + SWEEP_SLICE]:
                    self._check(connection.check, now_ns)
                await asyncio.sleep(0)

    def _check(self, check: Callable[[int], None], now_ns: int) -> None:
        """A mistake of ours about one connection must not take the time-outs from all others."""
        try:
            check(now_ns)
        except Exception as exc:
            self.warn("check_failed", type(exc).__name__, exc)

    async def _report_for_ever(self) -> None:
        while True:
            await asyncio.sleep(STATUS_S)
            self._timebase.resample()
            oldest_ns = min((f.arrival_ns for f in self.flows), default=self.now_ns())
            self.lag.forget_before(oldest_ns)
            self.tap.status(self.status())

    def status(self) -> RelayStatus:
        """This relay now, and since it started."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        tap = self.tap
        return RelayStatus(
            t_ns=self.now_ns(),
            opened=tap.ledger.opened,
            measured=tap.ledger.measured,
            dropped=tap.ledger.dropped,
            unsettled=tap.ledger.unsettled,
            connections=len(self.connections),
            streams=len(self.flows),
            upstream_idle=sum(pool.idle for pool in self._pools),
            upstream_connects=sum(pool.connects for pool in self._pools),
            upstream_reuses=sum(pool.reuses for pool in self._pools),
            upstream_unsolicited=sum(pool.unsolicited for pool in self._pools),
            accepted=self._accepted,
            refused=self._refused,
            tap_pending_bytes=tap.pending_bytes,
            cpu_ns=int((usage.ru_utime + usage.ru_stime) * 1e9),
            rss_bytes=resident_bytes(),
            lag_ns_max=self.lag.take_max(),
            lag_buckets=self.lag.buckets,
            lag_sum_ns=self.lag.sum_ns,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            draining=self.draining,
        )

    def _hello(self) -> Hello:
        self._timebase.check()
        anchor = self._told_anchor = self._timebase.anchor
        return Hello(
            relay=self.name,
            pid=os.getpid(),
            clock=self.options.clock,
            listen=self._listen,
            anchor_mono_ns=anchor.mono_ns,
            anchor_wall_ns=anchor.wall_ns,
            anchor_steps=self._timebase.steps,
            switch=self._switch,
            implementation=native.NAME,
            implementation_reason=native.REASON,
        )

    def _anchor_news(self) -> Frame | None:
        """The frame of a new anchor, in front of every frame that it may concern."""
        timebase = self._timebase
        timebase.check()
        anchor, told = timebase.anchor, self._told_anchor
        if anchor is told:
            return None
        self._told_anchor = anchor
        moved_ns = anchor.wall_ns - told.to_wall_ns(anchor.mono_ns)
        log.warning(
            "event=wall_clock_moved relay=%s by_ms=%.3f steps=%d", self.name, moved_ns / 1e6, timebase.steps
        )
        about = msgspec.json.encode(Anchored(steps=timebase.steps, since_ns=timebase.since_ns))
        return (int(FrameKind.ANCHOR), 0, anchor.mono_ns, anchor.wall_ns, about)

    # ---------------------------------------------------------------- the end

    def hurry(self) -> None:
        """Wait no longer for exchanges: a drain, now or to come, cuts what still runs."""
        self._drained.set()

    async def drain(self) -> None:
        """Take no more connections, let exchanges finish up to `drain_timeout`, then end."""
        self.draining = True
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self.tap.status(self.status())
        for connection in list(self.connections):
            connection.drain()
        if self.connections:
            log.info("event=draining relay=%s connections=%d", self.name, len(self.connections))
            try:
                await asyncio.wait_for(self._drained.wait(), self.options.drain_timeout / 1e9)
            except TimeoutError:
                pass
            if self.flows:
                log.warning("event=drain_timeout relay=%s cut=%d", self.name, len(self.flows))
        for connection in list(self.connections):
            connection.kill()
        for pool in self._pools:
            pool.close()
        if self._stamped is not None:
            self._stamped.close()
        self.tap.status(self.status())
        await self.tap.drain(2.0)
        self.tap.close()
        for task in list(self._tasks):
            task.cancel()
