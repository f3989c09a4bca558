"""Supervisor of `llmtap proxy`: starts relays and meter, restarts failed ones, drains, reloads and upgrades.

The supervisor owns the listening sockets and the folder of the socket between relays and meter. On SIGTERM
it drains. On SIGHUP (reload) it starts new relays on the same sockets, and a new meter if the settings of the
meter have changed; it waits until the new processes are ready, and lets the old ones finish, so that no
connection is lost. On SIGUSR2 (hot restart) it does the same for all processes, with the installed version of
the program (`handover.py`). The old meter measures the old relays to their end, and leaves its state to the
new one (`meter/state.py`).
"""

import asyncio
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from llmtap.config import Settings, fingerprint
from llmtap.errors import ConfigError, LlmtapError
from llmtap.log import set_up
from llmtap.meter.setup import (
    CAPTURE_END_LINE,
    HANDOVER_LINE,
    SETTINGS_LINE,
    MeterSetup,
    check_no_meter_listens,
)
from llmtap.net.listener import name_of
from llmtap.supervisor import handover
from llmtap.supervisor.checks import check_settings
from llmtap.supervisor.child import (
    Child,
    back_off,
    encode_setup,
    log_not_started,
    start_with_retries,
    wait_until_ready,
)
from llmtap.supervisor.ports import Ports, notify
from llmtap.supervisor.run import ProxyRun, RelayPlaces, relay_count

METER_S: Final = 5.0
"""Maximum time to wait for the meter at the start. It is ready after 0.5 s, or after 1 s with a capture."""
GRACE_S: Final = 5.0
"""Time between the end of the time limit for draining and the kill of a child."""
SIGNAL_S: Final = 0.02
"""Time (a few rounds of the event loop) after which signals that have already arrived have certainly reached
their handlers."""
ASIDE: Final = ".old"
"""Suffix that the old meter's socket path gets while a new meter begins to listen on the path."""
_NOT_READY: Final = "not all new processes became ready"

log = logging.getLogger(__name__)


class _Plan(NamedTuple):
    """Settings, sockets and run state with which children are started."""

    settings: Settings
    ports: Ports
    run: ProxyRun
    """State that outlives the processes, such as secret keys."""


class _Generation(NamedTuple):
    """Processes that were started together. If `meter` is None, the present meter continues."""

    meter: Child | None
    relays: dict[int, Child]
    """By index: relay process."""


class Supervisor:
    """Parent process of one proxy, which starts, restarts and replaces its relays and its meter."""

    _run: ProxyRun
    _ports: Ports

    def __init__(
        self, settings: Settings, reload: Callable[[], Settings], announce: Callable[[str, str], None]
    ) -> None:
        """`reload` reads the settings again. `announce` is called with two addresses when the proxy is ready:
        that for clients, and that of the admin port."""
        self._settings = settings
        self._reload_settings = reload
        """Function that reads the configuration again."""
        self._announce = announce
        """Function that reports the addresses to the user."""
        self._children: set[Child] = set()
        """All running children, including draining ones."""
        self._relays: dict[int, Child] = {}
        """Relays of the present generation, by index."""
        self._meter: Child | None = None
        self._meter_ready = asyncio.Event()
        """Set when the meter accepts relays."""
        self._meter_keeper: asyncio.Task[None] | None = None
        """Task that restarts the present meter (`_keep_meter`)."""
        self._tap_path = ""
        """Path of the present meter's socket."""
        self._generation = 0
        """Number of the present generation of relays. Relays of older ones drain, and are not restarted."""
        self._start_lock = asyncio.Lock()
        """Lock that is held while a child starts, so that no hot restart replaces the program meanwhile."""
        self._stop_event = asyncio.Event()
        """Set when a signal asks to stop."""
        self._change_event = asyncio.Event()
        """Set when a signal requests a reload or a hot restart."""
        self._wants_restart = False
        """Whether a signal for a hot restart came."""
        self._failed = False
        """Whether an internal task failed because of a bug; the exit status is then 1."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._end_tasks: set[asyncio.Task[None]] = set()
        """Tasks that wait for the end of replaced children."""

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT; return 0, or 1 after an internal error. Raises ConfigError."""
        handover_state = handover.take_handover(os.environ, os.getpid())
        if handover_state is None:
            if self._settings.meter.socket is not None:
                check_no_meter_listens(self._settings.meter.socket)
            self._ports = Ports.open(self._settings, os.environ, os.getpid())
            self._run = ProxyRun.begin(self._settings)
            self._tap_path = self._run.tap_path(self._settings)
        else:
            self._inherit(handover_state)
        try:
            self._listen_for_signals()
            if handover_state is None:
                self._report_start()
                await self._unless_stopped(self._start())
            else:
                await self._unless_stopped(self._take_over(handover_state.places))
                self._report_start()  # report again, because a hot restart can change the addresses
            if not self._stop_event.is_set():
                notify(f"READY=1\nSTATUS=forwarding to {self._settings.relay.upstream}")
                self._run_task(self._handle_changes_for_ever())
            await self._stop_event.wait()
            await self._stop()
        finally:
            for task in list(self._tasks):
                task.cancel()
            self._ports.close()
            shutil.rmtree(self._run.folder, ignore_errors=True)
            with suppress(OSError):
                os.unlink(self._tap_path + ASIDE)
        return 1 if self._failed else 0

    def _report_start(self) -> None:
        listen, admin = name_of(self._ports.clients[0]), name_of(self._ports.admin)
        self._announce(listen, admin)
        log.info(
            "event=start listen=%s upstream=%s admin=%s workers=%d config=%s",
            listen,
            self._settings.relay.upstream,
            admin,
            self._settings.relay.workers,
            fingerprint(self._settings),
        )

    def _inherit(self, handover_state: handover.Handover) -> None:
        """Take over the previous program's sockets and children. The children continue until new ones are
        ready."""
        self._ports = Ports.take(handover_state.ports)
        self._run = handover_state.run
        capture_id = self._run.capture_id
        self._run.follow(self._settings)
        self._tap_path = handover_state.tap_path
        for state in handover_state.children:
            child = self._register(Child.adopt(state))
            child.drain_s = handover_state.drain_s
            if state.until_s is not None:
                self._await_end(child, max(0.0, state.until_s - time.monotonic()))
            elif not state.ready:  # `_restart` has killed the child, because its `ready` line would be lost
                self._await_end(child, 0.0)
            elif state.kind == "meter":
                self._meter, child.capture_id = child, capture_id
            else:
                self._relays[state.index] = child

    def _listen_for_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop)
        loop.add_signal_handler(signal.SIGHUP, self._change_event.set)
        loop.add_signal_handler(signal.SIGUSR2, self._on_restart)
        handover.unblock_signals()

    def _on_stop(self) -> None:
        """Stop after the open exchanges; at the second signal, at once."""
        if self._stop_event.is_set():
            # At a second signal, kill the relays instead of waiting for their exchanges.
            for child in self._children:
                if child.kind == "relay":
                    child.signal(signal.SIGKILL)
        self._stop_event.set()

    def _on_restart(self) -> None:
        self._wants_restart = True
        self._change_event.set()

    def _run_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that must not fail: if it raises, the proxy stops with exit status 1."""
        task = self._create_task(work)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, ended: asyncio.Task[None]) -> None:
        error = None if ended.cancelled() else ended.exception()
        if error is not None:
            hint = "llmtap ends after the running streams have finished: start it again"
            log.error("event=supervisor_failed error=%r hint=%r", str(error), hint, exc_info=error)
            self._failed = True
            self._stop_event.set()

    def _create_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that `run` cancels at the end."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for `work`, but only until the proxy stops (`_stop` cancels it). Raises its exception."""
        task = self._create_task(work)
        stopping = asyncio.ensure_future(self._stop_event.wait())
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if task.done():
            task.result()

    # ---------------------------------------------------------------- child processes

    async def _start(self) -> None:
        """Start the first meter and the first relays."""
        self._meter_keeper = self._run_task(self._keep_meter(None))
        with suppress(TimeoutError):
            # Wait for the meter, so that the first exchanges are measured, too.
            await asyncio.wait_for(self._meter_ready.wait(), METER_S)
        fresh, _ = await self._start_relays(self._current_plan())
        if len(fresh) < relay_count(self._settings):
            problem = f"only {len(fresh)} of {relay_count(self._settings)} relays could be started"
            raise ConfigError("relay.workers", problem, "see event=relay_not_started in the log")
        self._set_relays(fresh)

    async def _start_relays(self, plan: _Plan) -> tuple[dict[int, Child], bool]:
        """Start a relay for each worker. Return the relays, and whether all of them are ready."""
        workers = relay_count(plan.settings)
        fresh: dict[int, Child] = {}
        try:
            for index in range(workers):
                fresh[index] = await self._start_relay(index, plan)
        except OSError as exc:
            log_not_started("relay", exc)
        ready = await asyncio.gather(*(wait_until_ready(child) for child in fresh.values()))
        return fresh, all(ready) and len(fresh) == workers

    def _set_relays(self, relays: dict[int, Child]) -> dict[int, Child]:
        """Make these relays the present generation. Return the relays of the previous generation."""
        self._generation += 1
        before, self._relays = self._relays, relays
        for index, child in relays.items():
            self._run_task(self._keep_relay(index, self._generation, child))
        return before

    async def _keep_relay(self, index: int, generation: int, child: Child) -> None:
        """Restart relay `index` whenever it dies, while its generation is the present one."""
        failures = 0
        while True:
            status = await child.wait()
            if generation != self._generation:
                return
            failures = await back_off(child, status, failures)
            if generation != self._generation:
                return
            child = await start_with_retries("relay", partial(self._start_relay, index))
            if generation != self._generation:
                self._drain_relay(child)
                return
            self._relays[index] = child
            await wait_until_ready(child)

    async def _keep_meter(self, child: Child | None) -> None:
        """Restart the meter `child` whenever it ends. If `child` is None, first start a meter."""
        failures = 0
        while True:
            if child is None:
                self._meter = child = await start_with_retries("meter", self._start_meter)
                self._update_meter()  # a reload has possibly changed the settings while the meter started
            if not child.is_ready:
                await child.read_ready_line()
                self._meter_ready.set()
            failures = await back_off(child, await child.wait(), failures)
            child = None

    async def _start_relay(self, index: int, plan: _Plan | None = None) -> Child:
        async with self._start_lock:
            settings, ports, run = plan or self._current_plan()
            fds = [sock.fileno() for sock in ports.sockets_of(index, settings.relay.workers)]
            # Count in `self._run`, not in the plan's copy, which can be dropped: names must be unique.
            self._run.relays += 1
            setup = run.relay_setup(settings, index, self._run.relays, fds)
            child = self._register(await Child.start("relay", setup.name, index, setup, fds))
            child.drain_s = settings.relay.drain_timeout / 1e9
            return child

    async def _start_meter(self, plan: _Plan | None = None, *, takes_over: bool = False) -> Child:
        async with self._start_lock:
            settings, ports, run = plan or self._current_plan()
            fd = ports.admin.fileno()
            setup = run.meter_setup(settings, fd, takes_over=takes_over)
            child = self._register(await Child.start("meter", "meter", 0, setup, [fd]))
            child.settings, child.capture_id = setup, setup.capture_id
            run.capture_met = True
            return child

    def _current_plan(self) -> _Plan:
        """Return the present settings, sockets and run state."""
        return _Plan(self._settings, self._ports, self._run)

    def _register(self, child: Child) -> Child:
        """Add a running process; it is removed at its end."""
        self._children.add(child)
        self._run_task(self._forget_child(child))
        return child

    async def _forget_child(self, child: Child) -> None:
        """Remove a process that has ended."""
        await child.wait_and_close()
        self._children.discard(child)

    def _drain_relay(self, child: Child) -> None:
        """Let a replaced relay finish its exchanges, within its own drain limit."""
        child.signal(signal.SIGUSR1)
        self._await_end(child, child.drain_s + GRACE_S)

    def _await_end(self, child: Child, limit_s: float) -> None:
        """Wait in a task until the child ends; kill it after `limit_s` seconds."""
        child.until_s = time.monotonic() + limit_s
        task = self._run_task(child.end_within(limit_s))
        self._end_tasks.add(task)
        task.add_done_callback(self._end_tasks.discard)

    # ---------------------------------------------------------------- reload of the configuration

    async def _handle_changes_for_ever(self) -> None:
        """Perform reloads and hot restarts, one after the other."""
        while True:
            await self._change_event.wait()
            self._change_event.clear()
            wants_restart, self._wants_restart = self._wants_restart, False
            await (self._restart() if wants_restart else self._reload())

    async def _reload(self) -> None:
        """Start relays with new settings on the same sockets. The present ones continue if a step fails."""
        with self._changed_ports() as ports:
            old, run = self._settings, msgspec.structs.replace(self._run)
            try:
                settings = self._reload_settings()
                check_settings(settings)
                ports.check_admin(settings)
                ports.move_clients(settings)
                run.follow(settings)
            except Exception as exc:
                is_bug = not isinstance(exc, LlmtapError)
                hint = "nothing has changed: correct the settings, then reload again"
                log.error("event=reload_refused error=%r hint=%r", str(exc), hint, exc_info=is_bug)
                return
            plan = _Plan(settings, ports, run)
            fresh = await self._start_generation(plan, meter=not self._can_meter_continue(plan))
            if fresh is None:
                hint = "the old processes continue; the lines before this one give the reason"
                log.error("event=reload_failed error=%r hint=%r", _NOT_READY, hint)
                return
            self._apply_plan(plan)
        set_up(settings.log)
        if settings.relay.listen != old.relay.listen and ports.listen_at is None:
            hint = "systemd opened these sockets: change the .socket unit"
            log.warning("event=reload_partial key=relay.listen hint=%r", hint)
        if settings.meter.admin != old.meter.admin:
            log.warning("event=reload_partial key=meter.admin hint='needs a hot restart: SIGUSR2'")
        retiring = self._retire_generation(fresh)
        self._update_meter()
        log.info("event=reloaded config=%s retiring=%d", fingerprint(settings), retiring)

    def _can_meter_continue(self, plan: _Plan) -> bool:
        """Return whether the present meter can continue with the settings of a plan."""
        present = None if self._meter is None else self._meter.settings
        return present is not None and present.serves(self._meter_setup(plan))

    def _meter_setup(self, plan: _Plan) -> MeterSetup:
        return plan.run.meter_setup(plan.settings, plan.ports.admin.fileno())

    async def _start_generation(self, plan: _Plan, *, meter: bool) -> _Generation | None:
        """Start relays for a plan and, if `meter` is true, a new meter before them.

        If not all of them become ready, end them and return None, so that the old processes continue.
        """
        new: Child | None = None
        relays: dict[int, Child] = {}
        ready = not meter
        if meter:
            await self._release_meter()
            with suppress(FileNotFoundError):
                os.rename(self._tap_path, self._tap_path + ASIDE)
            try:
                new = await self._start_meter(plan, takes_over=self._meter is not None)
            except OSError as exc:
                log_not_started("meter", exc)
            ready = new is not None and await wait_until_ready(new)
        if ready:
            relays, ready = await self._start_relays(plan)
        if ready:
            return _Generation(new, relays)
        for child in relays.values():
            self._drain_relay(child)
        if new is not None:
            await new.stop(GRACE_S)
        if meter:
            with suppress(FileNotFoundError):
                os.rename(self._tap_path + ASIDE, self._tap_path)
            self._meter_keeper = self._run_task(self._keep_meter(self._meter))
        return None

    async def _release_meter(self) -> None:
        """End the task that restarts the present meter, because a new meter will replace it."""
        if self._meter_keeper is not None:
            async with self._start_lock:  # wait until a meter that is just being started is registered
                self._meter_keeper.cancel()
            await asyncio.wait([self._meter_keeper])

    def _retire_generation(self, fresh: _Generation) -> int:
        """Make new processes the present ones, and let the old ones end. The caller must have applied the
        plan of the new processes before. Return the number of old relays."""
        old = self._meter if fresh.meter is not None else None
        if fresh.meter is not None:
            self._meter = fresh.meter
            self._meter_keeper = self._run_task(self._keep_meter(fresh.meter))
            if old is not None:
                if old.capture_id != self._run.capture_id:
                    old.write_line(CAPTURE_END_LINE)
                old.write_line(HANDOVER_LINE + self._run.state_folder(self._settings).encode())
        relays = self._set_relays(fresh.relays)
        for child in relays.values():
            self._drain_relay(child)
        if old is not None:
            # The old meter ends after its relays have ended, and needs time to write its last files.
            self._await_end(old, self._drain_left_s() + 2 * GRACE_S)
        if fresh.meter is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._tap_path + ASIDE)
            self._tap_path = self._run.tap_path(self._settings)
        return len(relays)

    @contextmanager
    def _changed_ports(self) -> Iterator[Ports]:
        """Yield a copy of the sockets, which the caller can change. If the copy is not applied
        (`_apply_plan`), close its new sockets at the end."""
        ports = self._ports.copy()
        try:
            yield ports
        finally:
            if ports is not self._ports:
                ports.close_except(self._ports)

    def _apply_plan(self, plan: _Plan) -> None:
        """Make a plan the present one, with which later children start."""
        before = self._ports
        plan.run.catch_up(self._run)
        self._settings, self._ports, self._run = plan
        before.close_except(plan.ports)

    def _update_meter(self) -> None:
        """If settings that a running meter can apply have changed, send them to the present meter."""
        meter = self._meter
        if meter is None or meter.settings is None:
            return
        setup = self._meter_setup(self._current_plan())
        if meter.settings.changeable != setup.changeable:
            meter.write_line(SETTINGS_LINE + encode_setup(setup.changeable))
            meter.settings = setup

    # ---------------------------------------------------------------- hot restart

    async def _restart(self) -> None:
        """Replace this program by the installed version, if that version passes its check."""
        argv = handover.command_line()
        log.info("event=restart_asked pid=%d", os.getpid())
        notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1_000}")
        problem = await handover.try_out(self._make_handover(), argv)
        if problem is None:
            async with self._start_lock:
                handover.block_signals()
                await asyncio.sleep(SIGNAL_S)  # first handle the signals that have already arrived
                if self._stop_event.is_set():
                    handover.unblock_signals()
                    return
                for child in self._children:
                    if not child.is_ready:  # the next program cannot read the `ready` line of this child
                        child.signal(signal.SIGKILL)
                try:
                    handover.replace_process(self._make_handover(), argv)
                except OSError as exc:
                    problem = f"{argv[0]} cannot be run: {exc.strerror}"
                handover.unblock_signals()
        hint = "nothing has changed: correct this, then restart again"
        log.error("event=restart_refused error=%r hint=%r", problem, hint)
        notify("READY=1")

    def _make_handover(self) -> handover.Handover:
        """Return the state that the next program needs to continue."""
        return handover.Handover(
            pid=os.getpid(),
            run=self._run,
            tap_path=self._tap_path,
            drain_s=self._settings.relay.drain_timeout / 1e9,
            ports=self._ports.to_state(),
            children=[child.to_state() for child in self._children],
            places=RelayPlaces.of(self._settings),
        )

    async def _take_over(self, places: RelayPlaces | None) -> None:
        """Start a meter and relays of this program. The old ones end when the new ones are ready. `places`:
        numbers and sides of the old relays."""
        with self._changed_ports() as ports:
            for move in (ports.move_clients, ports.move_admin):
                try:
                    move(self._settings)
                except ConfigError as exc:
                    log.error(
                        "event=restart_partial error=%r hint='the new processes keep the old address'",
                        str(exc),
                    )
            plan = _Plan(self._settings, ports, self._run)
            fresh = await self._start_generation(plan, meter=True)
            if fresh is not None:
                self._apply_plan(plan)
        if fresh is None:
            await self._fall_back(places)
            return
        self._retire_generation(fresh)
        log.info("event=restarted config=%s pid=%d", fingerprint(self._settings), os.getpid())

    def _drain_left_s(self) -> float:
        """Return the longest time in seconds that a draining relay has left; relays of different reloads can
        have different limits."""
        ends = (child.until_s for child in self._children if child.kind == "relay")
        now_s = time.monotonic()
        return max((end_s for end_s in ends if end_s is not None), default=now_s) - now_s

    async def _fall_back(self, places: RelayPlaces | None) -> None:
        """Return to the old relays, because the new ones failed to start. Until a reload, restarted relays
        get the numbers and sides of the old ones (`places`)."""
        hint = "the old relays and their meter continue; the lines before this one give the reason"
        log.error("event=restart_failed pid=%d error=%r hint=%r", os.getpid(), _NOT_READY, hint)
        if places is not None:
            self._settings = places.apply_to(self._settings)
        for index in range(relay_count(self._settings)):
            if index not in self._relays:  # the old relay with this index had died before the hot restart
                self._relays[index] = await start_with_retries("relay", partial(self._start_relay, index))
        self._set_relays(self._relays)

    # ---------------------------------------------------------------- the end of the proxy

    async def _stop(self) -> None:
        """End all children: the relays after their drain limit, then the meter."""
        notify("STOPPING=1")
        log.info("event=stopping drain_s=%s pid=%d", self._settings.relay.drain_timeout / 1e9, os.getpid())
        # Wait for children that are being started. The cancelled tasks start no other ones.
        async with self._start_lock:
            for task in self._tasks - self._end_tasks:
                task.cancel()
        self._ports.close_clients()
        for child in self._children:
            if child.kind == "relay" and child.until_s is not None:
                child.signal(signal.SIGTERM)  # close idle client connections at once
        running = sorted((c for c in self._children if c.until_s is None), key=lambda c: c.began_s)
        front, relays = self._settings.relay.workers, [c for c in running if c.kind == "relay"]
        await asyncio.gather(
            *(c.stop(c.drain_s + GRACE_S) for c in relays if c.index < front),
            asyncio.gather(*self._end_tasks, return_exceptions=True),  # `_on_task_end` reports exceptions
        )
        # Stop the relays behind the gateway later, because the last streams of the relays in front need them.
        await asyncio.gather(*(c.stop(c.drain_s + GRACE_S) for c in relays if c.index >= front))
        for child in running:
            if child.kind == "meter":
                await child.stop(GRACE_S)
        log.info("event=stopped pid=%d", os.getpid())
