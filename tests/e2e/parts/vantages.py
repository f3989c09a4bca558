"""What the two vantage points saw, and what must hold between them.

The client counts from just before its call, the tap from the moment the request had left for the upstream,
and the tap reads a chunk before the client does. So for one and the same request each of the client's figures
contains the tap's: chunk by chunk, with no tolerance (both read the host's monotonic clock).

Records are the client's (`vantage_client.py` says what is in one), exchanges the tap's (`/api/v1/exchanges`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

Record = dict[str, Any]
Exchange = dict[str, Any]

TIMED = ("stream", "usage")  # the kinds the table is made of: read to their end, without a pause before
GAP_DIFFERENCE_SHARE = 0.20
GAP_DIFFERENCE_MS = 2.0
ROUNDING_NS = 2_000  # the API's seconds are floats; a stamp survives to well below this
ORDER = ("request_end", "submit", "first_byte", "first_any", "first_token", "first_content", "last_token")


def percentile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least a share q of them does not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def client_ttfts_ms(records: Iterable[Record]) -> list[float]:
    return [r["first_ns"] / 1e6 for r in records if r["kind"] in TIMED and r["first_ns"] is not None]


def client_gaps_ms(records: Iterable[Record]) -> list[float]:
    return [(b - a) / 1e6 for r in records if r["kind"] in TIMED for a, b in pairwise(r["content_ns"])]


def tap_content_ns(exchange: Exchange) -> list[int]:
    """When the tap saw each chunk with content, since submit."""
    submit = exchange["timeline"]["submit"]
    return [round((e["t"] - submit) * 1e9) for e in exchange["events"] if e["class"] == "content"]


def tap_ttfts_ms(exchanges: Iterable[Exchange]) -> list[float]:
    return [e["metrics"]["ttft"] * 1e3 for e in exchanges if e["metrics"]["ttft"] is not None]


def tap_gaps_ms(exchanges: Iterable[Exchange]) -> list[float]:
    return [(b - a) / 1e6 for e in exchanges for a, b in pairwise(tap_content_ns(e))]


def timed(records: Iterable[Record], exchanges: Iterable[Exchange]) -> list[tuple[Record, Exchange]]:
    """The streams of the table, each with its exchange."""
    by_id = {e["request_id"]: e for e in exchanges}
    return [(r, by_id[r["id"]]) for r in records if r["kind"] in TIMED and r["id"] in by_id]


def distances_ms(records: Iterable[Record], exchanges: Iterable[Exchange]) -> list[float]:
    """Client's minus tap's time of every chunk with content, where both saw the same number of them."""
    out: list[float] = []
    for record, exchange in timed(records, exchanges):
        seen = tap_content_ns(exchange)
        if len(seen) == len(record["content_ns"]):
            out += [(c - t) / 1e6 for c, t in zip(record["content_ns"], seen, strict=True)]
    return out


def check_client(
    plan: list[dict[str, Any]],
    records: list[Record],
    reference: dict[str, str],
    *,
    usage_kinds: Iterable[str],
) -> list[str]:
    """What is wrong with the answers themselves.

    Each must have come whole, and be the text the engine gives to that prompt without anyone between.
    """
    wrong = []
    for request, record in zip(plan, records, strict=True):
        name, text = record["id"], reference.get(request["prompt"])
        if record["error"]:
            wrong.append(f"{name}: {record['error']}")
            continue
        if record["kind"] == "cancelled":
            if text is not None and not text.startswith(record["text"]):
                wrong.append(f"{name}: {record['text']!r} does not begin {text!r}")
            continue
        if text is not None and record["text"] != text:
            wrong.append(f"{name}: the text is {record['text']!r}, directly it was {text!r}")
        if record["finish_reason"] != "length":
            wrong.append(f"{name}: finish_reason is {record['finish_reason']!r}, expected 'length'")
        used = record["usage"] and record["usage"]["completion_tokens"]
        if used != request["max_tokens"] and (used is not None or record["kind"] in usage_kinds):
            wrong.append(f"{name}: usage says {used} tokens, asked for {request['max_tokens']}")
        if record["kind"] != "plain" and record["first_ns"] is None:
            wrong.append(f"{name}: a stream without content")
    return wrong


def check_tap(
    records: list[Record],
    exchanges: list[Exchange],
    summary: dict[str, Any],
    *,
    left: Iterable[str],
    same_chunks: bool,
) -> list[str]:
    """What is wrong with the tap's account of the same requests.

    `left` are the outcomes allowed where the client left midway. `same_chunks` says that the tap stands next
    to the client, so that both must see the same chunks; a gateway between them may cut anew.
    """
    wrong = _check_counts(records, exchanges, summary, left=set(left))
    by_id = {e["request_id"]: e for e in exchanges}
    for record in records:
        if record["error"] or (exchange := by_id.get(record["id"])) is None:
            continue
        wrong += _check_exchange(record, exchange, same_chunks=same_chunks)
    pairs = timed(records, exchanges)
    client, tap = client_gaps_ms(r for r, _ in pairs), tap_gaps_ms(e for _, e in pairs)
    if same_chunks and client and tap:
        at_client, at_tap = percentile(client, 0.5), percentile(tap, 0.5)
        # A client that gets no CPU reads late, now more and now less: its gaps differ by as much.
        late = distances_ms(records, exchanges)
        uneven = percentile(late, 0.9) - percentile(late, 0.1) if late else 0.0
        if abs(at_client - at_tap) > max(GAP_DIFFERENCE_MS, GAP_DIFFERENCE_SHARE * at_tap, uneven):
            wrong.append(f"the median gap is {at_client:.2f} ms at the client and {at_tap:.2f} ms at the tap")
    return wrong


def _check_counts(
    records: list[Record], exchanges: list[Exchange], summary: dict[str, Any], *, left: set[str]
) -> list[str]:
    wrong = []
    if len(exchanges) != len(records):
        wrong.append(f"the client made {len(records)} requests, the tap shows {len(exchanges)} exchanges")
    if summary["n"] != len(exchanges):
        wrong.append(f"the summary counts {summary['n']} exchanges, the list has {len(exchanges)}")
    outcomes = Counter(e["outcome"] for e in exchanges)
    if {k: n for k, n in summary["outcomes"].items() if n} != dict(outcomes):
        wrong.append(f"the summary's outcomes are {summary['outcomes']}, the list's {dict(outcomes)}")
    made = {r["id"] for r in records}
    seen = Counter(e["request_id"] for e in exchanges)
    if missing := sorted(made - set(seen)):
        wrong.append(f"the tap shows no exchange for {missing}")
    if strange := {k: n for k, n in seen.items() if k not in made or n > 1}:
        wrong.append(f"the tap shows exchanges nobody made, or made once: {strange}")
    kinds = {r["id"]: r["kind"] for r in records}
    for e in exchanges:
        allowed = left if kinds.get(e["request_id"]) == "cancelled" else {"complete"}
        if e["outcome"] not in allowed:
            error = f" ({e['error']})" if e.get("error") else ""
            wrong.append(
                f"{e['request_id']}: the tap calls it {e['outcome']!r}{error}, expected {sorted(allowed)}"
            )
    return wrong


def _check_exchange(record: Record, exchange: Exchange, *, same_chunks: bool) -> list[str]:
    name, line = record["id"], exchange["timeline"]
    wrong = []
    if exchange["status"] != 200:
        wrong.append(f"{name}: the tap shows status {exchange['status']}")
    if not exchange["model"]:
        wrong.append(f"{name}: the tap shows no model")
    if exchange["stream"] != (record["kind"] != "plain"):
        wrong.append(
            f"{name}: the tap says stream={exchange['stream']} of a request of kind {record['kind']}"
        )
    stages = [(point, line[point]) for point in ORDER if line[point] is not None]
    # Submit is stamped when the relay runs again after its send, an answer by the kernel when it comes: each
    # is as uncertain as the tap says.
    wrong += [
        f"{name}: {a} at {x} s, after {b} at {y} s; uncertain by {exchange['uncertainty']} s"
        for (a, x), (b, y) in pairwise(stages)
        if x - y > exchange["uncertainty"]
    ]
    if record["kind"] == "cancelled":
        return wrong
    used = record["usage"] and record["usage"]["completion_tokens"]
    if used is not None and exchange["tokens"]["output"] != used:
        wrong.append(f"{name}: usage says {used} tokens, the tap {exchange['tokens']}")
    if record["finish_reason"] != exchange["finish_reason"]:
        wrong.append(
            f"{name}: finish_reason {record['finish_reason']!r}, the tap {exchange['finish_reason']!r}"
        )
    if record["kind"] == "plain":
        return wrong
    ttft = exchange["metrics"]["ttft"]
    if ttft is None:
        return [*wrong, f"{name}: the tap shows no TTFT"]
    if record["first_ns"] + ROUNDING_NS < ttft * 1e9:
        wrong.append(
            f"{name}: TTFT {record['first_ns'] / 1e6:.3f} ms at the client, {ttft * 1e3:.3f} at the tap"
        )
    client, tap = record["content_ns"], tap_content_ns(exchange)
    if same_chunks and len(client) != len(tap):
        wrong.append(f"{name}: {len(client)} chunks with content at the client, {len(tap)} at the tap")
    if len(client) == len(tap):
        early = [i for i, (c, t) in enumerate(zip(client, tap, strict=True)) if c + ROUNDING_NS < t]
        if early:
            count = f"{len(early)} of {len(tap)} chunks"
            wrong.append(f"{name}: the client had {count} before the tap had read them, first #{early[0]}")
    return wrong


def _cells(values: list[float]) -> str:
    if not values:
        return " ".join(f"{'-':>8}" for _ in range(4)) + f" {0:>5}"
    # A P99 of fewer than 1,000 samples is nearly a maximum, and marked (IETF draft, 5.1.4.3).
    mark = "~" if len(values) < 1_000 else ""
    p99 = f"{mark}{percentile(values, 0.99):.2f}"
    p50, p90 = percentile(values, 0.5), percentile(values, 0.9)
    return f"{p50:8.2f} {p90:8.2f} {p99:>8} {max(values):8.2f} {len(values):5d}"


def table(rows: list[tuple[str, list[Record], list[Exchange] | None]]) -> str:
    """Two lines a path: what the client saw, what the tap saw; without a tap, one."""
    half = " ".join(f"{h:>8}" for h in ("p50", "p90", "p99", "max")) + f" {'n':>5}"
    lines = [
        f"{'':40} | {'TTFT, ms':^41} | {'gap between content chunks, ms':^41}",
        f"{'path':32} {'seen by':7} | {half} | {half}",
        "-" * 128,
    ]
    for name, records, exchanges in rows:
        seen = [("client", client_ttfts_ms(records), client_gaps_ms(records))]
        if exchanges is not None:
            mine = [e for _, e in timed(records, exchanges)]
            seen.append(("tap", tap_ttfts_ms(mine), tap_gaps_ms(mine)))
        for i, (who, ttfts, gaps) in enumerate(seen):
            lines.append(f"{'' if i else name:32} {who:7} | {_cells(ttfts)} | {_cells(gaps)}")
        if exchanges is not None and (distances := distances_ms(records, exchanges)):
            p50, p99 = percentile(distances, 0.5), percentile(distances, 0.99)
            lines.append(
                f"{'':32} client's time of a chunk - tap's: p50 {p50:.2f}, p99 {p99:.2f}, "
                f"min {min(distances):.2f}, max {max(distances):.2f} ms, n {len(distances)}"
            )
    return "\n".join(lines)
