"""Which exchanges were measured: exact, whatever happens to the meter.

Every exchange gets a number, without gaps. It is then in exactly one of these states:

    open -> closed, waiting for the meter's acknowledgement -> measured
      \\____________________\\____> dropped, for one reason

so that `opened = measured + dropped + unsettled` holds at any moment. An exchange counts as measured only
when the meter has acknowledged the batch with its last frame; what a dying meter took with it is dropped.
What a dying relay took with it nobody has counted here: see `Reckoning` in `meter/relays.py`.
"""

__all__ = ["Ledger"]


class Ledger:
    """Counts of one relay, since it started."""

    __slots__ = ("_closed", "_live", "dropped", "measured", "opened")

    def __init__(self) -> None:
        self.opened = 0
        self.measured = 0
        self.dropped: dict[str, int] = {}
        self._live: set[int] = set()
        self._closed: dict[int, int] = {}

    @property
    def unsettled(self) -> int:
        """Exchanges neither measured nor dropped yet."""
        return len(self._live) + sum(self._closed.values())

    @property
    def live(self) -> set[int]:
        """Exchanges whose frames go to the meter now."""
        return self._live

    def open(self) -> int:
        """A new exchange's number; it counts as dropped unless `begin` follows."""
        self.opened += 1
        return self.opened

    def begin(self, seq: int) -> None:
        """Its frames go to the meter from now on."""
        self._live.add(seq)

    def close(self, seq: int, batch_no: int) -> None:
        """Its last frame is in batch `batch_no`."""
        self._live.discard(seq)
        self._closed[batch_no] = self._closed.get(batch_no, 0) + 1

    def drop(self, seq: int, reason: str) -> None:
        """It is not, or no longer, measured."""
        self._live.discard(seq)
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def acknowledge(self, batch_no: int) -> None:
        """The meter has digested every batch up to this one."""
        for number in [n for n in self._closed if n <= batch_no]:
            self.measured += self._closed.pop(number)

    def lose_meter(self) -> None:
        """What the meter had not acknowledged is lost, and so is every exchange still running."""
        lost = self.unsettled
        self._live.clear()
        self._closed.clear()
        if lost:
            self.dropped["meter_lost"] = self.dropped.get("meter_lost", 0) + lost
