"""What the kernel says of processes and of the host: CPU time, memory, who listens where (Linux, proc(5)).

Read here and not by psutil: what that would add is other systems, and llmtap runs on Linux. It reads the same
files at no smaller cost, and which side a process belongs to would be ours to work out with it, too.

CPU time comes in ticks of 10 ms, so a sample of 1 s is right within 1 % of a CPU.
"""

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final

from llmtap.units import NS_PER_S

__all__ = [
    "Group",
    "Host",
    "ObservedProcess",
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
