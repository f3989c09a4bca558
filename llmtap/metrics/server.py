"""The server's clock against ours: what it says of its own work, taken from what we saw of it.

Source: IETF seed 000, 4.6.3 option C; the names of the durations are those of `Exchange.server_timing`.
"""

from math import isfinite
from typing import Final

from llmtap.exchange.exchange import Exchange
from llmtap.metrics.latency import Measured

__all__ = ["DISAGREEMENTS", "clock_disagreement"]

DISAGREEMENTS: Final = ("ttft", "decode", "itl", "e2e")
"""The keys of `clock_disagreement`."""


def clock_disagreement(x: Exchange, m: Measured) -> dict[str, int]:
    """Ours minus the server's, in ns, for each duration that both know.

    Above 0 is network, queues and buffers between its clock and ours; far below 0, one of the clocks lies.

    - `ttft`: first token of any kind - submit, against the server's `ttft`, or `queue` + `prefill` where it
      tells those instead.
    - `decode`: last token - first token, against `decode`.
    - `itl`: TPOT, against `mean_itl`.
    - `e2e`: against `total`.
    """
    told = x.server_timing
    if not told:
        return {}
    server: dict[str, float] = {}
    for entry in told:
        name, ms = entry.get("name"), entry.get("ms")
        if isinstance(name, str) and isinstance(ms, int | float) and isfinite(ms):
            server.setdefault(name, ms * 1e6)
    if "ttft" not in server and "queue" in server and "prefill" in server:
        server["ttft"] = server["queue"] + server["prefill"]
    t = x.timeline
    decode_ns = (
        None if t.first_token_ns is None or t.last_token_ns is None else t.last_token_ns - t.first_token_ns
    )
    pairs = (
        ("ttft", m.ttft_any_ns, "ttft"),
        ("decode", decode_ns, "decode"),
        ("itl", m.tpot_ns, "mean_itl"),
        ("e2e", m.e2e_ns, "total"),
    )
    return {
        key: round(ours - server[name]) for key, ours, name in pairs if ours is not None and name in server
    }
