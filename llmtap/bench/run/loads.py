"""A load of a benchmark test: its requests, their rate or concurrency, and the file of exact requests.

`make_load` makes a `Load` of a workload for the tests; `session.py` sends it, and calls `write_requests`. The
file `requests.jsonl.gz` has a line for each request (IETF 4.3.3): `row`, `arrival` (seconds, or null),
`after` (row whose response it waits for, or null) and `body`, byte for byte. Above `BYTES_MAX` only the
digest is stored.
"""

import gzip
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import Any, Final

import msgspec

from llmtap.load.bodies import Prepared
from llmtap.load.replay.plan import ReplayPlan, ReplayQuestion, make_plan
from llmtap.units import NS_PER_S, to_seconds
from llmtap.workload.requests import Requests

SPARE_SHARE = 1.25
"""Factor on the expected number of arrivals, since a Poisson process may have more."""
SPARE = 50


@dataclass(slots=True, kw_only=True)
class Load:
    plan: ReplayPlan
    closed: int | None = None
    """Concurrent requests of a closed loop; None: an open loop with the plan's arrivals."""
    rate_rps: float | None = None
    """Rate of the plan's arrivals."""
    duration_ns: int | None = None
    """Maximum duration of sending; None: until the end of the plan."""
    class_of: Callable[[int], str | None] = lambda row: None
    """Request class of a row, if requests have classes."""
    about: dict[str, object] = field(default_factory=dict)
    """Further properties of the load, as the results show them."""

    def fingerprint(self) -> str:
        requests = self.plan.requests
        digest = hashlib.sha256()
        for column in (requests.arrival_ns, requests.input, requests.output, requests.after):
            digest.update(column.tobytes())
            digest.update(b"|")
        digest.update(repr((self.closed, self.duration_ns, self.plan.describe(), self.about)).encode())
        return digest.hexdigest()[:16]


def make_load(
    workload: str, *, seed: int, rate_rps: float | None = None, slots: int | None = None,
    requests: int | None = None, duration_s: float | None = None, arrivals: str = "poisson",
    tokenizer: str | None = None, chat: bool = True, output_tokens: int | None = None,
) -> Load:  # fmt: skip
    """Make a workload in an open loop at `rate_rps` (IETF 4.2.3), or in a closed loop of `slots` (4.2.4).

    `requests`: their maximum; default: enough for `duration_s`. `output_tokens`: of every answer.
    """
    if requests is None:
        assert rate_rps is not None and duration_s is not None
        requests = ceil(rate_rps * duration_s * SPARE_SHARE) + SPARE
    plan = make_plan(
        ReplayQuestion(
            source=workload, requests=requests, rate_rps=rate_rps, closed=slots is not None, seed=seed,
            arrivals=None if rate_rps is None else arrivals, tokenizer=tokenizer, chat=chat,
        )
    )  # fmt: skip
    if output_tokens is not None:
        for row in range(len(plan.requests.output)):
            plan.requests.output[row] = output_tokens
    duration_ns = None if duration_s is None else round(duration_s * NS_PER_S)
    return Load(plan=plan, closed=slots, rate_rps=rate_rps, duration_ns=duration_ns)


FILE: Final = "requests.jsonl.gz"
BYTES_MAX: Final = 64 << 20
"""Bytes of a load's bodies; 1,000 requests of 500 tokens are about 3 MB."""
_LEVEL: Final = 3
"""Prompts of random words shrink to about a third at any level."""


def write_requests(
    prepared: Prepared, requests: Requests, folder: Path, *, planned: bool, bytes_max: int = BYTES_MAX
) -> dict[str, Any]:
    """Write the requests; return JSON with the `sha256` of all bodies. `planned`: whether arrivals are."""
    digest, total = sha256(), prepared.bytes_total
    kept = total <= bytes_max
    if kept:
        # No name and no date, so that equal requests give equal files.
        with (folder / FILE).open("wb") as raw, gzip.GzipFile("", "wb", _LEVEL, raw, mtime=0) as file:
            for row, body in _bodies(prepared):
                digest.update(body)
                after = requests.after[row] if requests.after else -1
                line = {
                    "row": row, "arrival": to_seconds(requests.arrival_ns[row]) if planned else None,
                    "after": None if after < 0 else after, "body": msgspec.Raw(body or b"null"),
                }  # fmt: skip
                file.write(msgspec.json.encode(line) + b"\n")
    else:
        for _, body in _bodies(prepared):
            digest.update(body)
    return {
        "file": FILE if kept else None, "rows": len(prepared), "bytes": total, "sha256": digest.hexdigest(),
    }  # fmt: skip


def _bodies(prepared: Prepared) -> Iterator[tuple[int, bytes]]:
    for row, (begin, end) in enumerate(zip(prepared.begins, prepared.ends, strict=True)):
        yield row, os.pread(prepared.fd, end - begin, begin)
