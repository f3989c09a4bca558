"""State of a capture that cannot write: waiting rows, time until the memory is full, remedy (`PauseWatch`).

The recorder calls `update` at each turn of its thread; the admin API shows the result as `capture.pause`. The
time until the memory is full is the free memory, divided by the rate at which it has filled since the pause
began.
"""

from typing import Final

from llmtap.export.sinks import CapturePause
from llmtap.units import NS_PER_S, format_bytes

CAUSES: Final = {
    # "Too little", because the disk is not full: the recorder keeps space for the files made of its spools.
    "disk_full": ("the disk of {spool} has too little free space", "free space on this disk"),
    "folder": ("{spool} is missing or cannot be written", "create it, owned by the user of llmtap"),
    "total_bytes": (
        "its files have the size of capture.total_bytes",
        "raise capture.total_bytes, move files from {to} away, or set capture.when_full = 'oldest'",
    ),
}
"""By reason of a pause: its cause and its remedy, as texts."""
RATE_NS_MIN: Final = 5 * NS_PER_S
"""Minimum length of a pause for an estimate of the time until the memory is full; before, it is not exact."""


class PauseWatch:
    """State of one capture: whether and why it is paused.

    `memory_bytes`: maximum size of the rows that wait in memory; `spool` and `to`: the capture's folders, as
    shown to the user, without secrets.
    """

    def __init__(self, memory_bytes: int, spool: str, to: str) -> None:
        self._memory_bytes = memory_bytes
        self._folder_texts = {"spool": spool, "to": to}
        """Names of both folders, for the sentences of CAUSES."""
        self._start: tuple[int, int, int] | None = None
        """Time, waiting bytes and number of dropped exchanges at the start of the pause; None: no pause."""
        self.pause: CapturePause | None = None
        """Present pause; None while the capture runs."""

    def update(self, reason: str | None, now_ns: int, *, rows: int, n_bytes: int, dropped: int) -> None:
        """Update `pause`. `reason`: why rows cannot be written (None: they can); `rows`, `n_bytes`: number
        and size of the rows that wait in memory; `dropped`: number of exchanges dropped so far."""
        if reason is None:
            self._start = self.pause = None
            return
        if self._start is None:
            self._start = now_ns, n_bytes, dropped
        began_ns, began_bytes, began_dropped = self._start
        elapsed_ns, grown = now_ns - began_ns, n_bytes - began_bytes
        free_bytes = max(0, self._memory_bytes - n_bytes)
        lasts_s = None
        if grown > 0 and elapsed_ns >= RATE_NS_MIN:
            lasts_s = free_bytes / grown * elapsed_ns / NS_PER_S
        lost = dropped - began_dropped
        self.pause = CapturePause(
            reason,
            elapsed_ns / NS_PER_S,
            rows,
            n_bytes,
            lost,
            lasts_s,
            self._log_text(reason, rows, lost, lasts_s),
        )

    def _log_text(self, reason: str, rows: int, lost: int, lasts_s: float | None) -> str:
        cause, remedy = (text.format(**self._folder_texts) for text in CAUSES[reason])
        memory = format_bytes(self._memory_bytes)
        if lost:
            state = (
                f"{lost:,} exchanges were not captured, since the memory for waiting ones ({memory}) is full"
            )
        elif lasts_s is not None:
            state = f"at the present rate, the memory for them ({memory}) lasts for {_duration_text(lasts_s)}"
        else:
            state = f"the memory for them has {memory}"
        return (
            f"The capture is paused: {cause}. {rows:,} exchanges wait in memory; {state}."
            f" What to do: {remedy}. The capture then resumes by itself. Traffic and metrics go on."
        )


def _duration_text(seconds: float) -> str:
    """Return the text of an estimated duration, such as "about 3 min"."""
    for unit, size in (("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"about {seconds / size:.0f} {unit}"
    return f"about {seconds:.0f} s"
