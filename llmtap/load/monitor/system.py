"""Samples of this host during a run: CPU and memory of sender and server, the host's own, and its GPUs.

A thread of its own, since the driver of a GPU may take its time to answer, and no loop should wait for
that. A sample is taken at each multiple of the period since the start; one that cannot be in time is left
out and counted, not made up for. How long a sample took is kept with it, so it can be seen whether the
watching disturbed the run.

Series (`<side>` is `sender` or `server`, `<i>` counts GPUs from 0):

- `<side>_cpu` (cpus: 1 is one CPU kept busy) and `<side>_memory` (bytes, RSS) of its processes and their
  descendants;
- `host_cpu`, `host_stolen` (share of all CPUs' time) and `host_memory` (bytes);
- `gpu<i>_utilization`, `_temperature`, `_power`, `_memory`, `_energy`, as `llmtap/load/monitor/gpu.py` says.

Source: seed 003, "System Metrics".
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any, Final

from llmtap.clock import Clock
from llmtap.load.monitor.gpu import GpuReading, Gpus, open_gpus
from llmtap.load.monitor.timeseries import Columns, MonitorSeries
from llmtap.net.failures import failure_said
from llmtap.units import NS_PER_S, to_seconds

__all__ = [
    "SENDER",
    "SERVER",
    "Group",
    "Host",
    "ObservedProcess",
    "SystemSampler",
    "groups_of",
    "is_loopback",
    "listeners",
    "read_host",
    "read_processes",
]


PROC: Final = Path("/proc")
_TICK_NS: Final = NS_PER_S // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_LISTENS: Final = "0A"
_STAT_BYTES_MAX: Final = 2_048
"""52 numbers and a name of 64 bytes."""


@dataclass(frozen=True, slots=True)
class Host:
    """The whole machine. CPU times are sums over its CPUs since it started."""

    busy_ns: int
    stolen_ns: int
    """Time in which it wanted to run and the hypervisor let another run: measurements suffer."""
    total_ns: int
    memory_used_bytes: int | None
    """Total - available; None where the kernel does not say."""


@dataclass(frozen=True, slots=True)
class ObservedProcess:
    """One process."""

    pid: int
    parent: int
    name: str
    cpu_ns: int
    """Of all its threads, and of its children that have ended and were waited for."""
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Group:
    """The processes of one side, with their descendants."""

    processes: tuple[ObservedProcess, ...]

    @property
    def cpu_ns(self) -> int:
        """Grows only, unless a process left that its parent did not wait for."""
        return sum(process.cpu_ns for process in self.processes)

    @property
    def rss_bytes(self) -> int:
        """Memory that processes share counts once for each."""
        return sum(process.rss_bytes for process in self.processes)


def read_host(proc: Path = PROC) -> Host:
    """The host's CPU time and memory. Raises OSError or ValueError where the kernel has no such files."""
    with open(proc / "stat", encoding="ascii") as file:
        name, *ticks = file.readline().split()
    if name != "cpu":
        raise ValueError("the first line of stat is not that of all CPUs")
    # user nice system idle iowait irq softirq steal; what follows, guests, is in user and nice already.
    user, nice, system, idle, iowait, irq, softirq, steal = (int(tick) for tick in ticks[:8])
    busy = user + nice + system + irq + softirq
    return Host(
        busy * _TICK_NS, steal * _TICK_NS, (busy + idle + iowait + steal) * _TICK_NS, _memory_used(proc)
    )


def read_processes(proc: Path = PROC) -> dict[int, ObservedProcess]:
    """All processes by their pid. One that ends meanwhile is left out."""
    found: dict[int, ObservedProcess] = {}
    for pid in _pids(proc):
        process = _read_process(proc, pid)
        if process is not None:
            found[pid] = process
    return found


def groups_of(processes: Mapping[int, ObservedProcess], roots: Mapping[int, str]) -> dict[str, Group]:
    """To each group the processes whose nearest forebear among the `roots` (pid -> group) is of it.

    So a server that the sender has started is the server's and not the sender's.
    """
    belongs: dict[int, str | None] = {}

    def group_of(pid: int) -> str | None:
        climbed = []
        while pid not in belongs:
            climbed.append(pid)
            if pid in roots:
                belongs[pid] = roots[pid]
            elif pid not in processes or processes[pid].parent == pid or len(climbed) > len(processes):
                belongs[pid] = None
            else:
                pid = processes[pid].parent
        for below in climbed:
            belongs[below] = belongs[pid]
        return belongs[pid]

    members: dict[str, list[ObservedProcess]] = {name: [] for name in roots.values()}
    for pid, process in processes.items():
        name = group_of(pid)
        if name is not None:
            members[name].append(process)
    return {name: Group(tuple(found)) for name, found in members.items()}


def is_loopback(host: str) -> bool:
    """Whether a target of this name or address is on this host for certain."""
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def listeners(host: str, port: int, proc: Path = PROC) -> tuple[list[int], str | None]:
    """The processes that hold a listening TCP socket which `host:port` reaches, and why none was found.

    A process of another user does not show its sockets, unless we are root. Where a container's port is
    forwarded, the forwarder is found.
    """
    if not is_loopback(host):
        return [], f"{host} is not a loopback address"
    addresses = (
        {ip_address("127.0.0.1"), ip_address("::1")}
        if host == "localhost"
        else {ip_address(host.strip("[]"))}
    )
    sockets = {
        f"socket:[{inode}]" for address, inode in _listening(proc, port) if _reaches(addresses, address)
    }
    if not sockets:
        return [], f"nobody listens on port {port}"
    held = [pid for pid in _pids(proc) if _holds(proc, pid, sockets)]
    return held, None if held else f"who listens on port {port} is hidden from this user"


def _pids(proc: Path) -> list[int]:
    return [int(name) for name in os.listdir(proc) if name.isdecimal()]


def _read_process(proc: Path, pid: int) -> ObservedProcess | None:
    try:
        fd = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        text = os.read(fd, _STAT_BYTES_MAX).decode("utf-8", "replace")
    except OSError:  # it ended between the two calls
        return None
    finally:
        os.close(fd)
    # proc(5), stat: the name stands in parentheses and may hold some itself; fields are counted behind it.
    head, _, rest = text.rpartition(")")
    fields = rest.split()
    if len(fields) < 22:
        return None
    user, system, ended_user, ended_system = (int(field) for field in fields[11:15])
    return ObservedProcess(
        pid, int(fields[1]), head.partition("(")[2],
        (user + system + ended_user + ended_system) * _TICK_NS, int(fields[21]) * _PAGE_BYTES,
    )  # fmt: skip


def _memory_used(proc: Path) -> int | None:
    found: dict[str, int] = {}
    try:
        with open(proc / "meminfo", encoding="ascii") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in ("MemTotal", "MemAvailable"):
                    found[name] = int(value.split()[0]) * 1024
                    if len(found) == 2:
                        return found["MemTotal"] - found["MemAvailable"]
    except (OSError, ValueError, IndexError):
        pass
    return None


def _listening(proc: Path, port: int) -> Iterator[tuple[IPv4Address | IPv6Address, str]]:
    """Local address and inode of each socket that listens on the port."""
    readers: tuple[tuple[str, Callable[[str], IPv4Address | IPv6Address]], ...] = (
        ("tcp", lambda text: IPv4Address(_words(text))),
        ("tcp6", lambda text: IPv6Address(_words(text))),
    )
    for name, read in readers:
        try:
            with open(proc / "net" / name, encoding="ascii") as file:
                lines = file.readlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            address, _, local_port = fields[1].partition(":")
            if fields[3] == _LISTENS and int(local_port, 16) == port:
                yield read(address), fields[9]


def _words(text: str) -> bytes:
    """The address: words of 32 bits, each printed as a number of this host's byte order."""
    return b"".join(
        int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)
    )  # fmt: skip


def _reaches(wanted: Collection[IPv4Address | IPv6Address], listening: IPv4Address | IPv6Address) -> bool:
    mapped = listening.ipv4_mapped if isinstance(listening, IPv6Address) else None
    # A socket on :: takes connections over IPv4 as well, unless it was told not to, which is not shown.
    return listening.is_unspecified or listening in wanted or mapped in wanted


def _holds(proc: Path, pid: int, sockets: Collection[str]) -> bool:
    folder = f"{proc}/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(f"{folder}/{name}") in sockets:
                return True
        except OSError:
            continue
    return False


log = logging.getLogger(__name__)

SENDER: Final = "sender"
SERVER: Final = "server"
_NAMED_MAX: Final = 64
"""Processes named for each side."""
_SEARCHES_MAX: Final = 60
"""Looks for a server that does not listen yet: a minute at 1 Hz. Each costs the kernel some ms."""
_CLOSE_S_MAX: Final = 2.0
"""A driver that hangs does not hold the end of a run; its thread is left behind."""


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
        """Opens NVML, which may take a second: before the run.

        `sender` and `server` are pids, whose descendants count with them. Without pids of the server,
        whoever listens at `target` (host, port) on loopback is taken for it, as soon as someone does.
        `nvml` stands in for the package pynvml.
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
        self._gpus: Gpus | None
        self._gpus, no_gpu = open_gpus(nvml)
        if no_gpu is not None:
            self._why["gpu"] = no_gpu
        self.columns = Columns(_series(self._gpus))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmtap-system", daemon=True)

    def start(self) -> None:
        """Take the first sample now, and then one each period."""
        self._thread.start()

    def close(self) -> None:
        """Take a last sample, so that the end of the run is in it, and end; at once if the thread hangs."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S_MAX)
        self.columns.close()
        if self._gpus is not None and not self._thread.is_alive():
            self._gpus.close()

    def about(self) -> dict[str, Any]:
        """What was watched and what was not, and why; for the JSON of a run."""
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
        start_ns = self._clock.mono_ns()
        number = 0
        while True:
            try:
                self._sample()
            except Exception as exc:  # a watcher never ends a run; what it lacks is told
                if "sampling" not in self._why:
                    self._why["sampling"] = f"{type(exc).__name__}: {exc}"
                    log.warning("system_sample error=%s", type(exc).__name__)
            if self._stop.is_set():
                return
            now_ns = self._clock.mono_ns()
            # The next multiple that is not over: a sample late by more than a period costs those in between.
            due = max(number + 1, -(-(now_ns - start_ns) // self._period_ns))
            self._skipped += due - number - 1
            number = due
            self._stop.wait(to_seconds(start_ns + number * self._period_ns - now_ns))

    def _sample(self) -> None:
        began_ns = self._clock.mono_ns()
        values: dict[str, float | None] = {}
        host = self._read_host()
        groups = self._read_groups()
        # The figures of CPU time are as of now, not of when the last GPU has answered.
        t_ns = (began_ns + self._clock.mono_ns()) // 2
        cpu_ns = {side: group.cpu_ns for side, group in groups.items()}
        for side, group in groups.items():
            values[f"{side}_memory"] = group.rss_bytes
        if host is not None:
            values["host_memory"] = host.memory_used_bytes
        if self._before is not None:
            before_ns, host_before, cpu_before_ns = self._before
            values |= _cpu_of_sides(t_ns - before_ns, cpu_before_ns, cpu_ns)
            if host is not None and host_before is not None:
                values |= _cpu_of_host(host_before, host)
        self._before = (t_ns, host, cpu_ns)
        if self._gpus is not None:
            for index, reading in enumerate(self._gpus.read()):
                values |= _of_gpu(index, reading)
        self.columns.add(t_ns, self._clock.mono_ns() - began_ns, values)

    def _read_host(self) -> Host | None:
        try:
            return read_host()
        except (OSError, ValueError) as exc:
            self._why.setdefault("host", failure_said(exc))
            return None

    def _read_groups(self) -> dict[str, Group]:
        """The sides that have processes."""
        if self._searching:
            self._search()
        told = groups_of(read_processes(), self._roots)
        groups = {side: group for side, group in told.items() if group.processes}
        for side, group in groups.items():
            named = self._named[side]
            if len(named) < _NAMED_MAX:
                named.update((process.pid, process.name) for process in group.processes)
        return groups

    def _search(self) -> None:
        """Look for the server by its port: again at the next samples while nobody listens there."""
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
        series |= {
            # An average, but over a period of the driver's, not since our last sample.
            f"gpu{index}_utilization": MonitorSeries("share"),
            f"gpu{index}_temperature": MonitorSeries("celsius"),
            f"gpu{index}_power": MonitorSeries("watts"),
            f"gpu{index}_memory": MonitorSeries("bytes"),
            f"gpu{index}_energy": MonitorSeries("joules", "counter"),
        }
    return series


def _cpu_of_sides(
    interval_ns: int, before_ns: Mapping[str, int], now_ns: Mapping[str, int]
) -> dict[str, float | None]:
    """CPUs kept busy by each side that was there before. One whose time fell has lost a process: unknown."""
    return {
        f"{side}_cpu": (now_ns[side] - was_ns) / interval_ns
        for side, was_ns in before_ns.items()
        if interval_ns > 0 and now_ns.get(side, -1) >= was_ns
    }


def _cpu_of_host(before: Host, now: Host) -> dict[str, float | None]:
    total_ns = now.total_ns - before.total_ns
    if total_ns <= 0:
        return {}
    return {
        "host_cpu": (now.busy_ns - before.busy_ns) / total_ns,
        "host_stolen": (now.stolen_ns - before.stolen_ns) / total_ns,
    }


def _of_gpu(index: int, reading: GpuReading) -> dict[str, float | None]:
    return {
        f"gpu{index}_utilization": reading.utilization,
        f"gpu{index}_temperature": reading.temperature_c,
        f"gpu{index}_power": reading.power_w,
        f"gpu{index}_memory": reading.memory_used_bytes,
        f"gpu{index}_energy": reading.energy_j,
    }
