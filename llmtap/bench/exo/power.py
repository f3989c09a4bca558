"""Power and memory of the server's machines while requests were under way.

Nodes of an exo cluster tell the power of a whole machine; else it is that of this host's GPUs, all of them,
where the server is on this host. A batch's energy is that of its window, by trapezoids of samples a second
apart, so that of a batch of a few seconds is rough.

Source: seed 003, "System Metrics".
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from typing import Any, Final

from llmtap.load.monitor.timeseries import Columns
from llmtap.metrics.cost import Energy, average_power_w, energy_of
from llmtap.units import NS_PER_S

__all__ = ["Power", "total_of"]

_NODE_POWER: Final = "power"


class Power:
    """What was sampled: of this host, if the server is on it, and of the nodes of its cluster, by id."""

    def __init__(self, local: Columns | None, nodes: Mapping[str, Columns]) -> None:
        told = [(columns, _NODE_POWER) for columns in nodes.values() if _NODE_POWER in columns.known()]
        self._local = local
        self._known = [] if local is None else local.known()
        # A machine's power has its GPUs' in it: never both.
        self._sources = told or [
            (local, name) for name in self._known if local is not None and name.endswith("_power")
        ]

    def energy(self, from_ns: int, to_ns: int) -> Energy | None:
        """Of all of them in that window; None where one of them says nothing of it."""
        found: list[Energy] = []
        for columns, name in self._sources:
            one = energy_of(columns.times_ns(), columns.column(name), from_ns=from_ns, to_ns=to_ns)
            if one is None:
                return None
            found.append(one)
        if not found:
            return None
        return Energy(
            sum(one.joules for one in found), min(one.known_ns for one in found),
            max(one.missing_ns for one in found),
        )  # fmt: skip

    def peak_memory(self, from_ns: int, to_ns: int) -> tuple[int, str] | None:
        """The most that was in use, in bytes, of samples from the last before the window to the first after
        it, and by whom."""
        if self._local is None:
            return None
        gpus = [name for name in self._known if name.startswith("gpu") and name.endswith("_memory")]
        names, whose = (gpus, "this host's GPUs") if gpus else (["server_memory"], "the server's processes")
        times_ns = self._local.times_ns()
        within = slice(max(0, bisect_right(times_ns, from_ns) - 1), bisect_left(times_ns, to_ns) + 1)
        columns = [self._local.column(name)[within] for name in names]
        sums = [sum(row) for row in zip(*columns, strict=True) if None not in row]
        return (int(max(sums)), whose) if sums else None


def total_of(windows: Iterable[Energy | None]) -> dict[str, Any] | None:
    """All joules of all windows, and the average power: joules / seconds of inference; None without any."""
    known = [window for window in windows if window is not None]
    if not known:
        return None
    return {
        "joules": sum(window.joules for window in known),
        "inference_seconds": sum(window.known_ns for window in known) / NS_PER_S,
        "average_power_w": average_power_w(known),
    }
