"""Read the resident memory of this process in bytes, for the status that relays and the meter report."""

import resource


def resident_bytes() -> int:
    """Return the resident memory in bytes, or its peak where /proc does not exist."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # getrusage(2): in KiB
