"""Sample this host during a run, in a thread: CPU and memory of sender, server and host, and the GPUs.

`SystemSampler` fills `Columns` (`timeseries.py`) from `start` to `close`; `watch.py` starts it. If no
processes of the server are named and the target has a loopback address, the server is the process that holds
its listening socket (`listening_pids`). GPUs are read through NVML (`open_gpus`, package nvidia-ml-py).

Samples that cannot be taken in time are skipped and counted. `<side>_cpu` (1: one busy CPU) and
`<side>_memory` (RSS) are those of the sender or the server with its descendants; `host_cpu` and `host_stolen`
are shares of the time of all CPUs. CPU times have a resolution of 10 ms. `gpu<i>_utilization` is the share of
the latest sample period of the GPU (up to 1 s) in which any kernel ran. `gpu<i>_power` is an average over up
to 1 s; some models measure only during a quarter of this time (arXiv 2312.02741).

Source: exo-bench's methodology, "System Metrics".
"""

import contextlib
import logging
import threading
from collections.abc import Iterable, Mapping
from importlib import import_module
from ipaddress import IPv6Address, ip_address
from typing import Any, Final, NamedTuple

import psutil

from llmtap.clock import Clock
from llmtap.load.monitor.timeseries import (
    NO_SCRAPE,
    Columns,
    SampledGpus,
    SampledProcess,
    SamplingReport,
    ScrapeReport,
    Ticks,
)
from llmtap.net.listener import failure_text
from llmtap.net.server_metrics import MonitorSeries
from llmtap.units import NS_PER_S, to_seconds

log = logging.getLogger(__name__)

SENDER: Final = "sender"
SERVER: Final = "server"
GPUS_MAX: Final = 16
_GPU_SERIES: Final = {
    "utilization": (MonitorSeries("share"), "nvmlDeviceGetUtilizationRates", "gpu", 100),
    "temperature": (MonitorSeries("celsius"), "nvmlDeviceGetTemperature", "", 1),
    "power": (MonitorSeries("watts"), "nvmlDeviceGetPowerUsage", "", 1_000),
    "memory": (MonitorSeries("bytes"), "nvmlDeviceGetMemoryInfo", "used", 1),
}
"""By name: series, NVML call, field of the call's result, and divisor that gives the unit of the series."""
_LISTED_PROCESSES_MAX: Final = 64
_CLOSE_S_MAX: Final = 2.0
"""Maximum time that `close` waits for the thread. If a GPU driver hangs, the thread is abandoned."""


class Gpus:
    """GPUs of this host, at most GPUS_MAX."""

    def __init__(self, nvml: Any) -> None:
        """`nvml` must be initialised. Raises `nvml.NVMLError`."""
        self._nvml = nvml
        """Python module of Nvidia's library."""
        n = nvml.nvmlDeviceGetCount()
        self.unread = max(0, n - GPUS_MAX)
        """Number of GPUs that are not sampled."""
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(n - self.unread)]
        """Handle of each GPU in Nvidia's library."""
        names = map(nvml.nvmlDeviceGetName, self._handles)
        # Older versions of the package return bytes.
        self.names = [name.decode(errors="replace") if isinstance(name, bytes) else name for name in names]

    def series(self) -> dict[str, MonitorSeries]:
        names = range(len(self.names))
        return {f"gpu{i}_{name}": series for i in names for name, (series, *_) in _GPU_SERIES.items()}

    def read(self) -> dict[str, float | None]:
        """Read every GPU, which takes some ms or longer. A value is None if the GPU does not report it."""
        values: dict[str, float | None] = {}
        for index, handle in enumerate(self._handles):
            for name, (_, call, field, divisor) in _GPU_SERIES.items():
                extra_args = (self._nvml.NVML_TEMPERATURE_GPU,) if name == "temperature" else ()
                try:
                    answer = getattr(self._nvml, call)(handle, *extra_args)
                except self._nvml.NVMLError:
                    values[f"gpu{index}_{name}"] = None
                else:
                    values[f"gpu{index}_{name}"] = (getattr(answer, field) if field else answer) / divisor
        return values

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


def open_gpus(nvml: Any = None) -> tuple[Gpus | None, str | None]:
    """Return the host's GPUs, or None and the reason. `nvml`: replacement for the package in tests."""
    if nvml is None:
        try:
            nvml = import_module("pynvml")
        except ImportError:
            return None, "the package nvidia-ml-py is not installed (extra: gpu)"
    try:
        nvml.nvmlInit()
        gpus = Gpus(nvml)
    except nvml.NVMLError as exc:
        return None, f"NVML is not available: {exc}"
    if not gpus.names:
        gpus.close()
        return None, "NVML reports no GPU"
    return gpus, None


class Host(NamedTuple):
    """CPU times since boot, summed over all CPUs, and memory."""

    busy_ns: int
    """CPU time in which a CPU had work."""
    stolen_ns: int
    """Time in which the hypervisor ran another guest although this one was ready to run."""
    total_ns: int
    """CPU time of all CPUs, with and without work."""
    memory_used_bytes: int
    """Total memory minus available memory."""


class ObservedProcess(NamedTuple):
    """One process of the host, as read."""

    pid: int
    parent: int
    """Id of the parent process."""
    name: str
    cpu_ns: int
    """CPU time of all threads, and of children that have ended and were waited for."""
    rss_bytes: int
    """Resident memory; memory that processes share is counted in each of them."""


def read_host() -> Host:
    t, memory = psutil.cpu_times(), psutil.virtual_memory()
    # proc(5): user and nice already contain the guest times, so do not add these again.
    busy = t.user + t.nice + t.system + t.irq + t.softirq
    total = busy + t.idle + t.iowait + t.steal
    busy_ns, stolen_ns, total_ns = (round(seconds * NS_PER_S) for seconds in (busy, t.steal, total))
    return Host(busy_ns, stolen_ns, total_ns, memory.total - memory.available)


def read_processes() -> dict[int, ObservedProcess]:
    processes: dict[int, ObservedProcess] = {}
    for process in psutil.process_iter(["ppid", "name", "cpu_times", "memory_info"]):
        info = process.info
        cpu, memory = info["cpu_times"], info["memory_info"]
        if cpu is not None and memory is not None:
            used_ns = round((cpu.user + cpu.system + cpu.children_user + cpu.children_system) * NS_PER_S)
            processes[process.pid] = ObservedProcess(
                process.pid, info["ppid"], info["name"], used_ns, memory.rss
            )
    return processes


def groups_of(
    processes: Mapping[int, ObservedProcess], roots: Mapping[int, str]
) -> dict[str, list[ObservedProcess]]:
    """Return the processes of each group. `roots`: group by pid.

    A process belongs to the group of the nearest of its ancestors (or itself) that is in `roots`.
    """
    members: dict[str, list[ObservedProcess]] = {name: [] for name in roots.values()}
    for process in processes.values():
        pid, visited = process.pid, set[int]()
        while pid in processes and pid not in roots and pid not in visited:
            visited.add(pid)
            pid = processes[pid].parent
        if pid in roots:
            members[roots[pid]].append(process)
    return members


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def listening_pids(host: str, port: int) -> tuple[list[int], str | None]:
    """Return the pids that listen on a TCP socket which `host:port` reaches, or [] and the reason.

    If several processes share a socket, return the first. Only root sees the sockets of other users.
    """
    if not is_loopback(host):
        return [], f"{host} is not a loopback address"
    wanted = {"127.0.0.1", "::1"} if host == "localhost" else {str(ip_address(host.strip("[]")))}
    reached = []
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            address = ip_address(connection.laddr.ip)
            mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
            # Assume that a socket on :: also accepts IPv4: whether IPV6_V6ONLY is set cannot be read.
            if address.is_unspecified or str(address) in wanted or str(mapped) in wanted:
                reached.append(connection.pid)
    if not reached:
        return [], f"no process listens on port {port}"
    pids = sorted({pid for pid in reached if pid is not None})
    return pids, None if pids else f"the process that listens on port {port} is hidden from this user"


class SystemSampler:
    """Samples the host from `start()` to `close()`. `columns` and `report()` can be used at any time."""

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
        """Open NVML, which can take a second.

        `sender`, `server`: pids; their descendants are included. Without `server`, the server is the process
        that listens at `target` (host, port), if this is a loopback address. `nvml`: replacement of pynvml
        for tests.
        """
        assert period_ns > 0
        self._clock = clock
        self._period_ns = period_ns
        self._failure_reasons: dict[str, str] = {}
        """By part of the host: why it could not be sampled."""
        self._group_by_pid = dict.fromkeys(sender, SENDER)
        """By process id: `sender` or `server`, under which its CPU time is counted."""
        if target is not None and not server:
            try:
                pids, why = listening_pids(*target)
            except (OSError, RuntimeError, psutil.Error) as exc:
                pids, why = [], failure_text(exc)
            server = [pid for pid in pids if pid not in self._group_by_pid]
            if pids and not server:
                why = "the target is served by a process of the sender"
            if why is not None:
                self._failure_reasons[SERVER] = why
        self._group_by_pid |= dict.fromkeys(server, SERVER)
        self._process_names: dict[str, dict[int, str]] = {SENDER: {}, SERVER: {}}
        """By group: names of its processes by id."""
        self._last_reading: tuple[int, Host | None, dict[str, int]] | None = None
        """Time, host and CPU times by group at the latest sample, for differences."""
        self._skipped_samples = 0
        """Number of samples that were due while the previous one was in progress."""
        self._gpus, no_gpu = open_gpus(nvml)
        if no_gpu is not None:
            self._failure_reasons["gpu"] = no_gpu
        sides = (SENDER, SERVER)
        self.columns = Columns(
            {f"{side}_cpu": MonitorSeries("cpus", "interval") for side in sides}
            | {f"{side}_memory": MonitorSeries("bytes") for side in sides}
            | {name: MonitorSeries("share", "interval") for name in ("host_cpu", "host_stolen")}
            | {"host_memory": MonitorSeries("bytes")}
            | ({} if self._gpus is None else self._gpus.series())
        )
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmtap-system", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Take a final sample and stop. Do not wait for a thread that hangs."""
        if self._stop_event.is_set():
            return
        self._stop_event.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S_MAX)
        self.columns.close()
        if self._gpus is not None and not self._thread.is_alive():
            self._gpus.close()

    def report(self, scrape: ScrapeReport = NO_SCRAPE) -> SamplingReport:
        """Return how the samples were taken. `scrape`: how the server's metrics were read."""
        return SamplingReport(
            to_seconds(self._period_ns),
            self._skipped_samples,
            {
                side: [SampledProcess(pid, name) for pid, name in list(names.items())[:_LISTED_PROCESSES_MAX]]
                for side, names in self._process_names.items()
            },
            None if self._gpus is None else SampledGpus(self._gpus.names, self._gpus.unread),
            dict(self._failure_reasons),
            scrape,
        )

    def _run(self) -> None:
        ticks = Ticks(self._clock.mono_ns(), self._period_ns)
        while True:
            try:
                self._sample()
            except Exception as exc:  # An error here must not end the run; `report` names it.
                if "sampling" not in self._failure_reasons:
                    self._failure_reasons["sampling"] = f"{type(exc).__name__}: {exc}"
                    log.warning("event=system_sample_failed error=%s", type(exc).__name__)
            if self._stop_event.is_set():
                return
            wait_s, skipped = ticks.next_wait(self._clock.mono_ns())
            self._skipped_samples += skipped
            self._stop_event.wait(wait_s)

    def _sample(self) -> None:
        began_ns = self._clock.mono_ns()
        values: dict[str, float | None] = {}
        host = None
        try:
            host = read_host()
            values["host_memory"] = host.memory_used_bytes
        except (OSError, ValueError) as exc:
            self._failure_reasons.setdefault("host", failure_text(exc))
        groups = {
            side: group for side, group in groups_of(read_processes(), self._group_by_pid).items() if group
        }
        for side, group in groups.items():
            names = self._process_names[side]
            if len(names) < _LISTED_PROCESSES_MAX:
                names.update((process.pid, process.name) for process in group)
        # Take the time before the GPUs are read, so that it is close to the time of the CPU counters.
        t_ns = (began_ns + self._clock.mono_ns()) // 2
        cpu_ns = {side: sum(process.cpu_ns for process in group) for side, group in groups.items()}
        for side, group in groups.items():
            values[f"{side}_memory"] = sum(process.rss_bytes for process in group)
        if self._last_reading is not None:
            before_ns, host_before, cpu_before_ns = self._last_reading
            for side, was_ns in cpu_before_ns.items():
                # If the total of a side fell, one of its processes has ended, and its usage is unknown.
                if t_ns > before_ns and cpu_ns.get(side, -1) >= was_ns:
                    values[f"{side}_cpu"] = (cpu_ns[side] - was_ns) / (t_ns - before_ns)
            if host is not None and host_before is not None and host.total_ns > host_before.total_ns:
                total_ns = host.total_ns - host_before.total_ns
                values["host_cpu"] = (host.busy_ns - host_before.busy_ns) / total_ns
                values["host_stolen"] = (host.stolen_ns - host_before.stolen_ns) / total_ns
        self._last_reading = (t_ns, host, cpu_ns)
        if self._gpus is not None:
            values |= self._gpus.read()
        self.columns.add(t_ns, self._clock.mono_ns() - began_ns, values)
