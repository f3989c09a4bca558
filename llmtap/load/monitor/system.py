"""Sample this host during a run, in a thread: CPU and memory of sender, server and host, and the GPUs.

`SystemSampler` fills `Columns` (`timeseries.py`) from `start` to `close`; `watch.py` starts it. If no
processes of the server are named, they are found by the listening socket of a target with a loopback address
(`listeners`).

Samples that cannot be taken in time are skipped and counted. `<side>_cpu` (1: one busy CPU) and
`<side>_memory` (RSS) are of sender or server with their descendants; `host_cpu` and `host_stolen` are shares
of the time of all CPUs. CPU times have a resolution of 10 ms.

Source: exo-bench's methodology, "System Metrics".
"""

import logging
import threading
from collections.abc import Collection, Iterable, Mapping
from ipaddress import IPv6Address, ip_address
from typing import Any, Final, NamedTuple

import psutil

from llmtap.clock import Clock
from llmtap.load.monitor.gpu import Gpus, open_gpus
from llmtap.load.monitor.timeseries import Columns, Ticks
from llmtap.net.listener import failure_said
from llmtap.net.server_metrics import MonitorSeries
from llmtap.units import NS_PER_S, to_seconds

log = logging.getLogger(__name__)

SENDER: Final = "sender"
SERVER: Final = "server"
_GPU_SERIES: Final = {
    # The driver's average over its own period, not since our last sample.
    "utilization": MonitorSeries("share"),
    "temperature": MonitorSeries("celsius"),
    "power": MonitorSeries("watts"),
    "memory": MonitorSeries("bytes"),
    "energy": MonitorSeries("joules", "counter"),
}
"""In the order of the fields of GpuReading."""
_NAMED_MAX: Final = 64
_SEARCHES_MAX: Final = 60
"""Searches for a server that does not listen yet: a minute at 1 Hz. Each takes some ms."""
_CLOSE_S_MAX: Final = 2.0
"""Time that `close` waits for a driver that hangs; its thread is then left behind."""


class Host(NamedTuple):
    """CPU times since boot, summed over all CPUs, and memory."""

    busy_ns: int
    stolen_ns: int
    """Time in which the hypervisor ran another guest although this one was ready to run."""
    total_ns: int
    memory_used_bytes: int
    """Total - available."""


class ObservedProcess(NamedTuple):
    pid: int
    parent: int
    name: str
    cpu_ns: int
    """CPU time of all threads, and of children that have ended and were waited for."""
    rss_bytes: int
    """Memory shared with other processes is counted in each of them."""


def read_host() -> Host:
    t, memory = psutil.cpu_times(), psutil.virtual_memory()
    # proc(5): guest time is already in user and nice.
    busy = t.user + t.nice + t.system + t.irq + t.softirq
    total = busy + t.idle + t.iowait + t.steal
    busy_ns, stolen_ns, total_ns = (round(seconds * NS_PER_S) for seconds in (busy, t.steal, total))
    return Host(busy_ns, stolen_ns, total_ns, memory.total - memory.available)


def read_processes() -> dict[int, ObservedProcess]:
    found: dict[int, ObservedProcess] = {}
    for process in psutil.process_iter(["ppid", "name", "cpu_times", "memory_info"]):
        info = process.info
        cpu, memory = info["cpu_times"], info["memory_info"]
        if cpu is not None and memory is not None:
            used_ns = round((cpu.user + cpu.system + cpu.children_user + cpu.children_system) * NS_PER_S)
            found[process.pid] = ObservedProcess(process.pid, info["ppid"], info["name"], used_ns, memory.rss)
    return found


def groups_of(
    processes: Mapping[int, ObservedProcess], roots: Mapping[int, str]
) -> dict[str, list[ObservedProcess]]:
    """Return the processes of each group: those whose nearest ancestor among `roots` (pid -> group) is in
    it."""
    members: dict[str, list[ObservedProcess]] = {name: [] for name in roots.values()}
    for process in processes.values():
        pid, seen = process.pid, set[int]()
        while pid in processes and pid not in roots and pid not in seen:
            seen.add(pid)
            pid = processes[pid].parent
        if pid in roots:
            members[roots[pid]].append(process)
    return members


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def listeners(host: str, port: int) -> tuple[list[int], str | None]:
    """Return the pids that hold a listening TCP socket which `host:port` reaches, or why there is none. Of
    processes that share a socket, the first. Sockets of other users are visible to root only."""
    if not is_loopback(host):
        return [], f"{host} is not a loopback address"
    wanted = {"127.0.0.1", "::1"} if host == "localhost" else {str(ip_address(host.strip("[]")))}
    reached = [
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr.port == port
        and _reaches(wanted, connection.laddr.ip)
    ]
    if not reached:
        return [], f"nobody listens on port {port}"
    held = sorted({pid for pid in reached if pid is not None})
    return held, None if held else f"who listens on port {port} is hidden from this user"


def _reaches(wanted: Collection[str], listening: str) -> bool:
    address = ip_address(listening)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    # A socket on :: also accepts IPv4 unless IPV6_V6ONLY is set, which the kernel does not show.
    return address.is_unspecified or str(address) in wanted or str(mapped) in wanted


class SystemSampler:
    """Samples from `start()` to `close()`. `columns` and `about()` may be read at any time."""

    def __init__(
        self,
        clock: Clock,
        *,
        sender: Iterable[int],
        server: Iterable[int] = (),
        target: tuple[str, int] | None = None,
        period_ns: int = NS_PER_S,
        nvml: Any = None,
    ) -> None:
        """Open NVML, which may take a second.

        `sender`, `server`: pids, with descendants. Without `server`, the process that listens at `target`
        (host, port) on loopback, once there is one. `nvml`: replacement of pynvml for tests.
        """
        assert period_ns > 0
        self._clock = clock
        self._period_ns = period_ns
        self._target = target
        self._roots = {**dict.fromkeys(sender, SENDER), **dict.fromkeys(server, SERVER)}
        self._searching = SERVER not in self._roots.values() and target is not None
        self._searches = 0
        self._why: dict[str, str] = {}
        if not self._searching and SERVER not in self._roots.values():
            self._why[SERVER] = "no process of it was given"
        self._named: dict[str, dict[int, str]] = {SENDER: {}, SERVER: {}}
        self._before: tuple[int, Host | None, dict[str, int]] | None = None
        self._skipped = 0
        self._gpus, no_gpu = open_gpus(nvml)
        if no_gpu is not None:
            self._why["gpu"] = no_gpu
        self.columns = Columns(_series(self._gpus))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmtap-system", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Take a last sample and stop; do not wait for a thread that hangs."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S_MAX)
        self.columns.close()
        if self._gpus is not None and not self._thread.is_alive():
            self._gpus.close()

    def about(self) -> dict[str, Any]:
        return {
            "period": to_seconds(self._period_ns),
            "skipped": self._skipped,
            "processes": {
                side: [{"pid": pid, "name": name} for pid, name in list(named.items())[:_NAMED_MAX]]
                for side, named in self._named.items()
            },
            "gpu": None if self._gpus is None else {"devices": self._gpus.names, "unread": self._gpus.unread},
            "why_not": dict(self._why),
        }

    def _run(self) -> None:
        ticks = Ticks(self._clock.mono_ns(), self._period_ns)
        while True:
            try:
                self._sample()
            except Exception as exc:  # the sampler never ends a run; it reports what is missing
                if "sampling" not in self._why:
                    self._why["sampling"] = f"{type(exc).__name__}: {exc}"
                    log.warning("system_sample error=%s", type(exc).__name__)
            if self._stop.is_set():
                return
            wait_s, skipped = ticks.next(self._clock.mono_ns())
            self._skipped += skipped
            self._stop.wait(wait_s)

    def _sample(self) -> None:
        began_ns = self._clock.mono_ns()
        values: dict[str, float | None] = {}
        host = None
        try:
            host = read_host()
            values["host_memory"] = host.memory_used_bytes
        except (OSError, ValueError) as exc:
            self._why.setdefault("host", failure_said(exc))
        groups = self._read_groups()
        # CPU times are stamped before the GPUs answer.
        t_ns = (began_ns + self._clock.mono_ns()) // 2
        cpu_ns = {side: sum(process.cpu_ns for process in group) for side, group in groups.items()}
        for side, group in groups.items():
            values[f"{side}_memory"] = sum(process.rss_bytes for process in group)
        if self._before is not None:
            before_ns, host_before, cpu_before_ns = self._before
            for side, was_ns in cpu_before_ns.items():
                # A side whose total fell has lost a process: its usage is unknown.
                if t_ns > before_ns and cpu_ns.get(side, -1) >= was_ns:
                    values[f"{side}_cpu"] = (cpu_ns[side] - was_ns) / (t_ns - before_ns)
            if host is not None and host_before is not None and host.total_ns > host_before.total_ns:
                total_ns = host.total_ns - host_before.total_ns
                values["host_cpu"] = (host.busy_ns - host_before.busy_ns) / total_ns
                values["host_stolen"] = (host.stolen_ns - host_before.stolen_ns) / total_ns
        self._before = (t_ns, host, cpu_ns)
        if self._gpus is not None:
            for index, reading in enumerate(self._gpus.read()):
                values |= {f"gpu{index}_{name}": reading[i] for i, name in enumerate(_GPU_SERIES)}
        self.columns.add(t_ns, self._clock.mono_ns() - began_ns, values)

    def _read_groups(self) -> dict[str, list[ObservedProcess]]:
        if self._searching:
            self._search()
        found = groups_of(read_processes(), self._roots)
        groups = {side: group for side, group in found.items() if group}
        for side, group in groups.items():
            named = self._named[side]
            if len(named) < _NAMED_MAX:
                named.update((process.pid, process.name) for process in group)
        return groups

    def _search(self) -> None:
        """Search for the server by its port; repeat at the next samples while nobody listens there."""
        assert self._target is not None
        pids, why = listeners(*self._target)
        ours = [pid for pid in pids if self._roots.get(pid) == SENDER]
        if ours:
            why = "it is served by a process of the sender"
        self._roots.update((pid, SERVER) for pid in pids if pid not in ours)
        self._searches += 1
        if pids or why is None or not why.startswith("nobody") or self._searches >= _SEARCHES_MAX:
            self._searching = False
        if why is None:
            self._why.pop(SERVER, None)
        else:
            self._why[SERVER] = why


def _series(gpus: Gpus | None) -> Mapping[str, MonitorSeries]:
    series = {
        **{f"{side}_cpu": MonitorSeries("cpus", "interval") for side in (SENDER, SERVER)},
        **{f"{side}_memory": MonitorSeries("bytes") for side in (SENDER, SERVER)},
        "host_cpu": MonitorSeries("share", "interval"),
        "host_stolen": MonitorSeries("share", "interval"),
        "host_memory": MonitorSeries("bytes"),
    }
    for index in range(0 if gpus is None else len(gpus.names)):
        series |= {f"gpu{index}_{name}": spec for name, spec in _GPU_SERIES.items()}
    return series
