"""Limits of this host that a load can reach: open files of a process, and local ports.

`check_connections` compares a load with these limits before the load begins. During a load, a `LoadSender`
opens no more connections than `connections_max` allows, so that timers and name look-ups keep working; a
request that gets no connection because of a limit ends as `tap_error` with one of the texts of `HOST_LIMITS`.
"""

import errno
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from llmtap.errors import ConfigError

FILES_RESERVED: Final = 32
"""Open files of a sending process that are reserved for timers, name look-ups and pipes."""
_PORTS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_OPEN_FILES: Final = "limit of this host: open files of a process"
_ALL_FILES: Final = "limit of this host: open files of all processes"
_LOCAL_PORTS: Final = "limit of this host: local ports"
_MEMORY: Final = "limit of this host: memory for sockets"
_RAISE_FILES: Final = "raise it with ulimit -n, or use more --processes"
_RAISE_PORTS: Final = (
    "widen net.ipv4.ip_local_port_range, reuse connections, or send from several hosts (--ray)"
)
HOST_LIMITS: Final[Mapping[str, str]] = {
    _OPEN_FILES: _RAISE_FILES,
    _ALL_FILES: "raise fs.file-max",
    _LOCAL_PORTS: _RAISE_PORTS,
    _MEMORY: "raise net.ipv4.tcp_mem, or use fewer connections",
}
"""Remedy by the error text of a request that this host could not send."""
_LIMIT_BY_ERRNO: Final[Mapping[int, str]] = {
    errno.EMFILE: _OPEN_FILES,
    errno.ENFILE: _ALL_FILES,
    errno.EADDRNOTAVAIL: _LOCAL_PORTS,
    errno.ENOBUFS: _MEMORY,
    errno.ENOMEM: _MEMORY,
}


def host_limit(error: OSError) -> str | None:
    """Return the limit of this host that made a connection fail; None if the error has another cause."""
    return None if error.errno is None else _LIMIT_BY_ERRNO.get(error.errno)


def files_max() -> int:
    """Return the maximum number of files that a sending process can open.

    This is the hard limit, because the process raises its soft limit to the hard limit.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 1 << 30 if hard == resource.RLIM_INFINITY else hard


def connections_max() -> int:
    """Return the number of connections for which this process has files left."""
    return max(1, files_max() - len(os.listdir("/proc/self/fd")) - FILES_RESERVED)


def local_ports() -> int | None:
    """Return the number of connections that this host can have to one address; None if unknown."""
    try:
        first, last = map(int, _PORTS.read_text().split())
    except (OSError, ValueError):
        return None
    return max(0, last - first + 1)


def check_connections(certain: int, likely: int, processes: int) -> str | None:
    """Compare the connections of a load with the limits of this host.

    Args:
        certain: connections that the load needs at the same time, however fast the server answers.
        likely: connections that it needs at the same time, by an estimate of the server's speed.
        processes: number of sending processes.

    Raises ConfigError if the limits do not allow `certain`. Returns a note if they do not allow `likely`.
    """
    files, ports = files_max(), local_ports()
    # A sending process has about 16 files open before it connects.
    by_files = max(0, files - 16 - FILES_RESERVED) * processes
    limits = [("open files", f"{files:,} open files a process", by_files, _RAISE_FILES)]
    if ports is not None:
        limits.append(("local ports", f"{ports:,} local ports", ports, _RAISE_PORTS))
    for name, limit, connections, remedy in limits:
        if certain > connections:
            raise ConfigError(
                name, f"the load needs {certain:,} connections at once, and this host allows {limit}", remedy
            )
    for name, limit, connections, remedy in limits:
        if likely > connections:
            return (
                f"the load probably needs about {likely:,} connections at once, and this host allows {limit}"
                f" ({name}): {remedy}"
            )
    return None
