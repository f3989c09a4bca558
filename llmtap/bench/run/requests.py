"""The exact requests of a load, kept beside what came of them (IETF 4.3.3: publish what was sent).

`requests.jsonl.gz` has a line for each row of the plan: `row`, `arrival` (seconds from the start; null where
nobody planned it), `after` (the row whose answer it waits for, or null) and `body`, byte for byte as it was
sent. Where the bodies of a load are more than `BYTES_MAX`, only their digest is kept: the same version of
llmtap makes them again from the plan in `step.json`, and the digest tells whether they are the same.
"""

import gzip
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import msgspec

from llmtap.load.bodies import Prepared
from llmtap.units import to_seconds
from llmtap.workload.requests import Requests

__all__ = ["BYTES_MAX", "FILE", "write_requests"]

FILE: Final = "requests.jsonl.gz"
BYTES_MAX: Final = 64 << 20
"""Of a load's bodies. 1,000 requests of 500 tokens are some 3 MB: 20 prompts of 128K tokens are kept, a day
of traffic is not."""
_LEVEL: Final = 3
"""Prompts of random words shrink to about a third at any level."""


def write_requests(
    prepared: Prepared, requests: Requests, folder: Path, *, planned: bool, bytes_max: int = BYTES_MAX
) -> dict[str, Any]:
    """Keeps them; says what was kept, as JSON: `sha256` is of all bodies, in the order of their rows.

    Args:
        planned: arrivals were, which those of a closed loop are not.
    """
    digest, total = sha256(), prepared.bytes_total
    kept = total <= bytes_max
    if kept:
        # Without a name and a date in it, so that the same requests are the same file.
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
