"""Find the exchanges that a capture lacks, from its row numbers and the counts of its relays.

`reader.py` calls `check` with the metadata and rows of all files. Each relay (process that forwards traffic)
numbers its exchanges from 1 and reports its counts (`schema.CaptureLedger`). From these:

- Missing: numbers from 1 to the highest known one that no row has, without those still running.
- Explained: first by counts of drops, exact up to the relay's last report; the rest by exchanges that were
  under way then or began later, which may have ended without a row.
- Running: exchanges under way at the last report of a capture that is not closed, without those that have a
  row by now or that drops explain.
- `unexplained`: the rest, lost with a killed meter, a damaged spool, or a file that was deleted or not read.
- The tail, begun after the relay's last report and last row, is unknown. A capture that was closed has none.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.schema import CaptureInfo, CaptureLedger, RelayCount

COLUMNS = ("capture", "relay", "seq", "id")
_LATER = r"-[0-9]+\.(?:[2-9]|[1-9][0-9]+)$"
"""Matches the id of the second or a later response of a session. All its responses have the same number."""


@dataclass(slots=True)
class RelayIntegrity:
    """One relay of one capture."""

    relay: str
    opened: int
    present: int
    duplicates: int
    missing: int
    running: int
    """`unsettled`, if the capture is not closed; else 0. These exchanges are not counted as missing."""
    ranges: list[tuple[int, int]]
    """First and last number of the exchanges in each gap: a range of numbers without rows."""
    dropped: dict[str, int]
    unsettled: int
    """Exchanges that were under way at the relay's last report, have no row since, and are not explained by
    drops."""
    since: int
    """Missing exchanges that began after the relay's last report."""
    unexplained: int
    """Missing exchanges that neither drops, `unsettled` nor `since` explain."""
    exact: bool
    """Whether the number of missing exchanges is exact: there is neither `unsettled`, `since` nor a lost
    packet."""
    packets: dict[str, int] = field(default_factory=dict)
    """Only of a passive vantage: packets `captured` and `lost`; exchanges in lost packets have no number."""
    watched: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class CaptureIntegrity:
    """One capture: one start of the proxy."""

    capture: str
    relays: list[RelayIntegrity]
    meters: int
    not_kept: dict[str, int]
    damaged: dict[str, int]
    closed: bool
    """Whether the capture was ended in order, so that no later exchange is unknown."""

    @property
    def present(self) -> int:
        return sum(relay.present for relay in self.relays)

    @property
    def missing(self) -> int:
        return sum(relay.missing for relay in self.relays)

    @property
    def running(self) -> int:
        return sum(relay.running for relay in self.relays)

    @property
    def duplicates(self) -> int:
        return sum(relay.duplicates for relay in self.relays)

    @property
    def unexplained(self) -> int:
        """Number of missing exchanges that neither the counts of the relays nor those of the meters explain.
        Meters do not count by relay, so this is one number for the capture."""
        return max(0, sum(relay.unexplained for relay in self.relays) - sum(self.not_kept.values()))

    @property
    def exact(self) -> bool:
        return all(relay.exact for relay in self.relays)


@dataclass(slots=True)
class Integrity:
    """Integrity of all captures that were read."""

    captures: list[CaptureIntegrity]
    unnumbered: int
    broken: list[tuple[str, str]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every missing exchange is explained, no exchange is duplicate, and every file could be
        read."""
        return not self.broken and not any(c.unexplained or c.duplicates for c in self.captures)

    def to_dict(self) -> dict[str, object]:
        """Return public JSON."""
        return {
            "ok": self.ok,
            "unnumbered": self.unnumbered,
            "broken": [{"file": file, "problem": problem} for file, problem in self.broken],
            "captures": [
                {
                    "capture": c.capture,
                    "present": c.present,
                    "missing": c.missing,
                    "running": c.running,
                    "duplicates": c.duplicates,
                    "unexplained": c.unexplained,
                    "exact": c.exact,
                    "not_kept": c.not_kept,
                    "damaged": c.damaged,
                    "meters": c.meters,
                    "closed": c.closed,
                    "relays": [asdict(relay) for relay in c.relays],
                }
                for c in self.captures
            ],
        }


def check(
    infos: Iterable[CaptureInfo], batches: Iterable[pa.RecordBatch], broken: Sequence[tuple[str, str]] = ()
) -> Integrity:
    """Return the integrity of files by their metadata and rows (COLUMNS), with 8 bytes of memory per row."""
    infos = list(infos)
    numbers_of: dict[tuple[str, str], list[pa.Array]] = {}
    unnumbered = 0
    for batch in batches:
        # Only rows with a relay's name have numbers without gaps; a trace may have numbers of its own.
        later = pc.match_substring_regex(pc.fill_null(batch.column("id"), ""), _LATER)
        known = pc.and_(pc.is_valid(batch.column("seq")), pc.is_valid(batch.column("relay")))
        numbered = batch.select(COLUMNS).filter(pc.and_not(known, later))
        unnumbered += batch.num_rows - numbered.num_rows - later.true_count
        table = pa.Table.from_batches([numbered])
        groups = pa.TableGroupBy(table, ["capture", "relay"], use_threads=False).aggregate([("seq", "list")])
        names = zip(groups.column("capture").to_pylist(), groups.column("relay").to_pylist(), strict=True)
        for (capture, relay), numbers in zip(names, groups.column("seq_list"), strict=True):
            numbers_of.setdefault((capture or "", relay), []).append(numbers.values)
    captures = sorted(
        {capture for capture, _ in numbers_of} | {info.capture for info in infos if info.ledger.relays}
    )
    checked = []
    for capture in captures:
        of_it = [info for info in infos if info.capture == capture]
        ledger = latest_ledger(of_it)
        relays = sorted({*ledger.relays, *(relay for name, relay in numbers_of if name == capture)})
        checked.append(
            CaptureIntegrity(
                capture,
                [
                    _relay_integrity(
                        relay,
                        pa.chunked_array(numbers_of.get((capture, relay), []), pa.int64()),
                        ledger.relays.get(relay),
                        closed=ledger.closed,
                    )
                    for relay in relays
                ],
                len({info.ledger.meter for info in of_it if info.ledger.meter}),
                ledger.dropped,
                _summed_counts(info.damaged for info in of_it),
                ledger.closed,
            )
        )
    return Integrity(checked, unnumbered, list(broken))


def latest_ledger(infos: Sequence[CaptureInfo]) -> CaptureLedger:
    """Merge the last report of each relay and meter. The order of the files does not matter."""
    relays: dict[str, RelayCount] = {}
    began: dict[str, RelayCount] = {}
    meters: dict[str, dict[str, int]] = {}
    for ledger in (info.ledger for info in infos):
        for name, count in ledger.relays.items():
            if name not in relays or _progress_key(count) > _progress_key(relays[name]):
                relays[name] = count
            # Only the first meter of a capture writes in `since` which numbers are older than the capture.
            # Later meters write 0, so the largest value is valid.
            if name not in began or count.since > began[name].since:
                began[name] = count
        mine = meters.setdefault(ledger.meter, {})
        for reason, n in ledger.dropped.items():
            mine[reason] = max(n, mine.get(reason, 0))
    for name, count in relays.items():
        first = began[name]
        relays[name] = msgspec.structs.replace(count, since=first.since, before=first.before)
    return CaptureLedger(relays, _summed_counts(meters.values()), closed=_ended_in_order(infos))


def _ended_in_order(infos: Sequence[CaptureInfo]) -> bool:
    """Return whether the last meter ended in order. After a hot restart, the previous meter may write its
    last file later than the new one."""
    files: dict[str, list[tuple[int, bool]]] = {}
    for info in infos:
        files.setdefault(info.ledger.meter, []).append((info.began_ns, info.ledger.closed))
    _, (_, closed) = max(
        ((min(entries)[0], max(entries)) for entries in files.values()), default=(0, (0, False))
    )
    return closed


def _progress_key(count: RelayCount) -> tuple[int, int, int]:
    """Return a key that grows with time: exchanges begun, settled and dropped."""
    return count.opened, count.opened - count.unsettled, sum(count.dropped.values())


def _summed_counts(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    out: dict[str, int] = {}
    for mapping in counts:
        for name, n in mapping.items():
            out[name] = out.get(name, 0) + n
    return out


def _relay_integrity(
    relay: str, numbers: pa.ChunkedArray, reported: RelayCount | None, *, closed: bool
) -> RelayIntegrity:
    count = RelayCount(0) if reported is None else reported
    distinct = pc.unique(numbers)
    ordered = distinct.take(pc.array_sort_indices(distinct))
    opened = max(count.opened, ordered[-1].as_py() if len(ordered) else 0)
    ranges = list(_missing_ranges(ordered.filter(pc.greater(ordered, count.since)), count.since, opened))
    absent = sum(last - first + 1 for first, last in ranges)
    since = sum(last - max(first, count.opened + 1) + 1 for first, last in ranges if last > count.opened)
    dropped = {reason: n - count.before.get(reason, 0) for reason, n in count.dropped.items()}
    dropped = {reason: n for reason, n in dropped.items() if n > 0}
    # An exchange that was unsettled at the last report may have a row by now. So explain missing numbers by
    # drops first, and only the rest by unsettled exchanges.
    unexplained = max(0, absent - since - sum(dropped.values()))
    unsettled = min(unexplained, count.unsettled)
    running = 0 if closed else unsettled
    return RelayIntegrity(
        relay,
        opened,
        len(ordered),
        len(numbers) - len(ordered),
        absent - running,
        running,
        ranges,
        dropped,
        unsettled,
        since,
        unexplained - unsettled,
        not unsettled and not since and not count.packets.get("lost"),
        count.packets,
        count.watched,
    )


def _missing_ranges(ordered: pa.Array, before: int, last: int) -> Iterable[tuple[int, int]]:
    """Yield first and last of each range of numbers after `before`, up to `last`, that are not in
    `ordered`."""
    edges = pa.concat_arrays([pa.array([before], pa.int64()), ordered, pa.array([last + 1], pa.int64())])
    lower, upper = edges.slice(0, len(edges) - 1), edges.slice(1)
    far = pc.greater(pc.subtract(upper, lower), 1)
    for low, high in zip(lower.filter(far).to_pylist(), upper.filter(far).to_pylist(), strict=True):
        yield low + 1, high - 1
