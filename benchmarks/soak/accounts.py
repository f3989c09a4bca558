"""Counters against the capture, and both against what clients asked. Pure but for reading the files.

| figure | from |
|---|---|
| asked | the clients' own count |
| opened, dropped by reason | the relays' last words, in the capture |
| rows | the capture's |
| lost | missing numbers that nobody accounts for: what a killed meter had acknowledged and not yet written |

`opened = rows + dropped + not kept + lost` holds by what lost is (less those that a relay gave up with a
killed meter which had kept them already). So that it says something, lost has a bound, and has to lie
around a kill; and of the last meter, which nobody killed, every counter equals the capture's sum.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import llmtap
from llmtap.capture.read.integrity import Integrity

COLUMNS = [
    "relay",
    "seq",
    "arrival_ns",
    "request_id",
    "outcome",
    "stream",
    "output_tokens",
    "token_source",
    "input_tokens",
]


@dataclass(slots=True)
class Sums:
    """Exchanges by outcome, output tokens by the source of their count, input tokens."""

    exchanges: Counter[str] = field(default_factory=Counter)
    output: Counter[str] = field(default_factory=Counter)
    input: int = 0

    def to_dict(self) -> dict[str, object]:
        return {"exchanges": dict(self.exchanges), "output": dict(self.output), "input": self.input}


@dataclass(slots=True)
class Accounts:
    """What was counted, and what is wrong with it."""

    asked: int
    retried: int
    opened: int
    rows: int
    dropped: dict[str, int]
    not_kept: dict[str, int]
    twice: int
    """Given up by a relay and kept all the same: the meter was killed before its word came."""
    lost: int
    lost_max: int
    duplicates: int
    exact: bool
    files: int
    meters: int
    counters: Sums
    """Of the last meter, by its /metrics."""
    kept: Sums
    """Of the files that it wrote."""
    compared: int
    """Whole streams whose tokens are known from both sides."""
    relays: list[dict[str, object]] = field(default_factory=list)
    """Relay by relay, as integrity tells."""
    wrong: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        told = asdict(self)
        return told | {"counters": self.counters.to_dict(), "kept": self.kept.to_dict()}


_SERIES = re.compile(
    rb"^(llmtap_exchanges_total|llmtap_output_tokens_total|llmtap_input_tokens_total)\{([^\n]*)\} (\S+)$",
    re.MULTILINE,
)


def metrics_sums(body: bytes) -> Sums:
    """The same sums of a /metrics text."""
    out = Sums()
    for name, labels, value in _SERIES.findall(body):
        n = round(float(value))
        if name == b"llmtap_exchanges_total":
            out.exchanges[_label(labels, b"outcome")] += n
        elif name == b"llmtap_output_tokens_total":
            out.output[_label(labels, b"source")] += n
        else:
            out.input += n
    for counter in (out.exchanges, out.output):
        for key in [key for key, n in counter.items() if not n]:
            del counter[key]
    return out


def _label(labels: bytes, name: bytes) -> str:
    found = re.search(name + rb'="([^"]*)"', labels)
    return "" if found is None else found[1].decode()


def table_sums(table: pa.Table) -> Sums:
    """The same sums of rows."""
    out = Sums()
    rows = zip(
        *(table[name].to_pylist() for name in ("outcome", "output_tokens", "token_source", "input_tokens")),
        strict=True,
    )
    for outcome, output, source, read in rows:
        out.exchanges[outcome] += 1
        if output:
            out.output[source] += output
        out.input += read or 0
    return out


def far_from(
    integrity: Integrity,
    rows: Mapping[str, Sequence[tuple[int, int]]],
    kills_ns: Iterable[int],
    before_ns: int,
    after_ns: int,
) -> int:
    """Missing numbers whose neighbours say that no kill was near.

    Args:
        rows: of each relay (number, arrival in ns since 1970), sorted by number.
        before_ns, after_ns: an exchange may be lost that arrived so long before a kill, or so long after.
    """
    kills = list(kills_ns)
    far = 0
    for capture in integrity.captures:
        for relay in capture.relays:
            known = rows.get(relay.relay, [])
            for first, last in relay.ranges:
                i, j = bisect_left(known, (first, 0)), bisect_left(known, (last + 1, 0))
                left, right = (known[i - 1][1] if i else None), (known[j][1] if j < len(known) else None)
                low = left if left is not None else right
                high = right if right is not None else left
                near = any(
                    low is None or high is None or (low - after_ns <= kill <= high + before_ns)
                    for kill in kills
                )
                far += 0 if near else last - first + 1
    return far


def settle(
    folder: Path,
    *,
    asked: int,
    retried: int,
    whole: set[int],
    tokens: Sequence[int],
    metrics: bytes,
    kills_ns: Sequence[int],
    lost_max: int,
    before_ns: int,
    after_ns: int,
) -> Accounts:
    """Reads the capture of the run, which has ended, and compares.

    Args:
        whole: numbers of the streams that their clients have whole; `tokens`: what each number asked for.
        metrics: the last text of /metrics, when nothing was under way any more.
        kills_ns: when meters were killed, ns since 1970.
    """
    capture = llmtap.read(folder)
    integrity = capture.integrity()
    (one,) = integrity.captures
    last_meter = max(capture.files, key=lambda file: file.info.began_ns).info.ledger.meter
    parts, kept = [], Sums()
    for file in capture.files:
        table = pq.read_table(file.path, columns=COLUMNS)
        parts.append(table)
        if file.info.ledger.meter == last_meter:
            found = table_sums(table)
            kept.exchanges += found.exchanges
            kept.output += found.output
            kept.input += found.input
    rows = pa.concat_tables(parts)
    dropped: Counter[str] = Counter()
    for relay in one.relays:
        dropped.update(relay.dropped)
    accounts = Accounts(
        asked=asked,
        retried=retried,
        opened=sum(relay.opened for relay in one.relays),
        rows=rows.num_rows,
        dropped=dict(dropped),
        not_kept=one.not_kept,
        twice=sum(max(0, sum(relay.dropped.values()) - relay.missing) for relay in one.relays),
        lost=one.unexplained,
        lost_max=lost_max,
        duplicates=one.duplicates,
        exact=one.exact,
        files=len(capture.files),
        meters=one.meters,
        counters=metrics_sums(metrics),
        kept=kept,
        compared=0,
        relays=[{k: v for k, v in asdict(relay).items() if k != "ranges"} for relay in one.relays],
    )
    numbers = _by_relay(rows)
    far = far_from(integrity, numbers, kills_ns, before_ns, after_ns)
    _judge(accounts, far, _wrong_tokens(accounts, rows, whole, tokens), integrity)
    return accounts


def _by_relay(rows: pa.Table) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    columns = (rows[name].to_pylist() for name in ("relay", "seq", "arrival_ns"))
    for relay, seq, arrival_ns in zip(*columns, strict=True):
        found.setdefault(relay, []).append((seq, arrival_ns))
    for numbers in found.values():
        numbers.sort()
    return found


def _wrong_tokens(accounts: Accounts, rows: pa.Table, whole: set[int], tokens: Sequence[int]) -> int:
    """Streams of which the capture has another number of tokens than was asked for and came whole."""
    wrong = 0
    columns = (rows[name].to_pylist() for name in ("request_id", "outcome", "stream", "output_tokens"))
    for name, outcome, stream, output in zip(*columns, strict=True):
        number = int(name.removeprefix("soak-")) if (name or "").startswith("soak-") else -1
        if stream and outcome == "complete" and number in whole:
            accounts.compared += 1
            wrong += output != tokens[number]
    return wrong


def _judge(accounts: Accounts, far: int, wrong_tokens: int, integrity: Integrity) -> None:
    a, say = accounts, accounts.wrong.append
    if not a.asked <= a.opened <= a.asked + a.retried:
        say(f"clients asked {a.asked:,} times, and again {a.retried:,} times; relays began {a.opened:,}")
    counted = a.rows + sum(a.dropped.values()) + sum(a.not_kept.values()) + a.lost - a.twice
    if counted != a.opened:
        say(f"{a.opened:,} began; rows, dropped, not kept and lost are {counted:,}")
    if a.twice > a.dropped.get("meter_lost", 0):
        say(f"{a.twice:,} were dropped and are there, more than killed meters explain")
    if not a.exact:
        say("a relay had exchanges under way at its last word: the count is not exact")
    if a.duplicates or integrity.broken:
        say(f"{a.duplicates:,} rows are there twice, {len(integrity.broken):,} files are broken")
    if a.lost > a.lost_max:
        say(f"{a.lost:,} were lost with killed meters: at most {a.lost_max:,} were to be expected")
    if far > sum(n for reason, n in a.dropped.items() if reason not in ("no_meter", "meter_lost")):
        say(f"{far:,} numbers are missing where no meter was killed")
    if a.counters != a.kept:
        say(f"the last meter counts {a.counters.to_dict()}, and has kept {a.kept.to_dict()}")
    if not a.kept.exchanges:
        say("the last meter has kept nothing: there is nothing to compare")
    if wrong_tokens:
        say(f"{wrong_tokens:,} of {a.compared:,} whole streams have another number of tokens in the capture")
