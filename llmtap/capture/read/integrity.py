"""Find the exchanges that a capture lacks, from its row numbers and the counts of its relays.

`reader.py` calls `check_integrity` with the metadata and rows of all files. Each relay (process that forwards
traffic) numbers its exchanges from 1 and reports its counts (`schema.CaptureLedger`). The result has these
counts:

- Missing: numbers without a row, from 1 to the highest known number. Running exchanges are not missing.
- Running: exchanges under way at the last report of a capture that is not closed, except those that have a
  row by now or that the counts of drops explain.
- Explained: missing numbers that the relay dropped, by counts that are exact up to its last report; then
  numbers of exchanges that were under way at that report or began later, because they can end without a row.
- `unexplained`: the other missing numbers, lost with a killed meter, a damaged spool, or a file that was
  deleted or not read.

Exchanges that began after the relay's last report and last row are unknown. A closed capture has none.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.schema import CaptureInfo, CaptureLedger, RelayCount

COLUMNS = ("capture", "relay", "seq", "id")
_LATER_RESPONSE_ID = r"-[0-9]+\.(?:[2-9]|[1-9][0-9]+)$"
"""Matches the id of a session's second or later response: all have one number, but are no duplicates."""


@dataclass(slots=True)
class RelayIntegrity:
    """Counts of the exchanges of one relay in one capture."""

    relay: str
    """Name of the relay."""
    opened: int
    """Highest known number of an exchange of the relay, so the number of exchanges that it began."""
    present: int
    """Number of exchanges that have a row."""
    duplicates: int
    """Rows that have the same number as another row."""
    missing: int
    """Number of exchanges without a row whose reason is not known."""
    running: int
    """Equal to `unsettled` if the capture is not closed, else 0. These exchanges do not count as missing."""
    ranges: list[tuple[int, int]]
    """First and last of each range of missing numbers."""
    dropped: dict[str, int]
    """Exchanges that the relay dropped during the capture, by reason."""
    unsettled: int
    """Exchanges that were under way at the relay's last report, without a row, and not explained by drops."""
    since: int
    """Missing exchanges that began after the relay's last report."""
    unexplained: int
    """Missing exchanges that neither drops, `unsettled` nor `since` explain."""
    exact: bool
    """Whether the number of missing exchanges is exact: `unsettled` and `since` are 0, no packet was lost."""
    packets: dict[str, int] = field(default_factory=dict)
    """Packets `captured` and `lost`, only of a passive relay. Exchanges in lost packets have no number."""
    watched: dict[str, int] = field(default_factory=dict)
    """By kind: number of connections seen, only of a passive relay."""


@dataclass(slots=True)
class CaptureIntegrity:
    """Counts of the exchanges of one capture: all files of one start of the proxy."""

    capture: str
    relays: list[RelayIntegrity]
    meters: int
    """Number of meters that wrote files: more than 1 after a restart of the meter."""
    not_kept: dict[str, int]
    """Exchanges that meters measured but could not store, by reason."""
    damaged: dict[str, int]
    """Lost `batches` and `bytes` of damaged spools."""
    closed: bool
    """Whether the capture was closed properly, so that no later exchange is unknown."""

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
        """Number of missing exchanges that neither the relays' nor the meters' counts explain. It is known
        only for the whole capture, because meters do not count by relay."""
        return max(0, sum(relay.unexplained for relay in self.relays) - sum(self.not_kept.values()))

    @property
    def exact(self) -> bool:
        return all(relay.exact for relay in self.relays)


@dataclass(slots=True)
class Integrity:
    """Integrity of all captures that were read."""

    captures: list[CaptureIntegrity]
    unnumbered: int
    """Rows without a relay's number, such as those of a trace of another tool."""
    broken: list[tuple[str, str]] = field(default_factory=list)
    """Files that could not be read to their end: name and reason."""

    @property
    def ok(self) -> bool:
        """Whether all missing exchanges are explained, no row is a duplicate, and all files could be read."""
        return not self.broken and not any(c.unexplained or c.duplicates for c in self.captures)

    def to_dict(self) -> dict[str, object]:
        """Return the counts as public JSON."""
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


def check_integrity(
    infos: Iterable[CaptureInfo], batches: Iterable[pa.RecordBatch], broken: Sequence[tuple[str, str]] = ()
) -> Integrity:
    """Return the integrity of files from their metadata and rows (COLUMNS). Memory: 8 bytes per row."""
    infos = list(infos)
    numbers_of: dict[tuple[str, str], list[pa.Array]] = {}
    unnumbered = 0
    for batch in batches:
        # Check only rows that a relay numbered without gaps: a trace of another tool can have other numbers.
        later = pc.match_substring_regex(pc.fill_null(batch.column("id"), ""), _LATER_RESPONSE_ID)
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
    """Merge the latest counts of each relay and meter. The order of the files does not matter."""
    relays: dict[str, RelayCount] = {}
    began: dict[str, RelayCount] = {}
    meters: dict[str, dict[str, int]] = {}
    for ledger in (info.ledger for info in infos):
        for name, count in ledger.relays.items():
            if name not in relays or _progress_key(count) > _progress_key(relays[name]):
                relays[name] = count
            # `since` is the last number before the capture began. Only the first meter of a capture writes
            # it; later meters write 0. So use the largest value.
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
    """Return whether the meter that began last closed the capture. The latest file alone does not show this:
    after a hot restart, the previous meter can write a file later than the new meter."""
    files: dict[str, list[tuple[int, bool]]] = {}
    for info in infos:
        files.setdefault(info.ledger.meter, []).append((info.began_ns, info.ledger.closed))
    _, (_, closed) = max(
        ((min(entries)[0], max(entries)) for entries in files.values()), default=(0, (0, False))
    )
    return closed


def _progress_key(count: RelayCount) -> tuple[int, int, int]:
    """Return a key that orders the counts of one relay by time: exchanges begun, settled and dropped."""
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
    # An exchange that was unsettled at the last report can have a row by now. So explain missing numbers by
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
    """Yield the first and the last of each range of numbers in (before, last] that are not in `ordered`."""
    edges = pa.concat_arrays([pa.array([before], pa.int64()), ordered, pa.array([last + 1], pa.int64())])
    lower, upper = edges.slice(0, len(edges) - 1), edges.slice(1)
    far = pc.greater(pc.subtract(upper, lower), 1)
    for low, high in zip(lower.filter(far).to_pylist(), upper.filter(far).to_pylist(), strict=True):
        yield low + 1, high - 1
