"""A RelayStatus with every field set, for tests that care about a few of them."""

import msgspec

from llmtap.channel.frames import LAG_EDGES_NS, RelayStatus

__all__ = ["relay_status"]

_QUIET = RelayStatus(
    t_ns=0, opened=0, measured=0, dropped={}, unsettled=0, connections=0, streams=0, upstream_idle=0,
    upstream_connects=0, upstream_reuses=0, accepted=0, refused={}, tap_pending_bytes=0, cpu_ns=0,
    rss_bytes=0, lag_ns_max=0, lag_buckets=[0] * (len(LAG_EDGES_NS) + 1), lag_sum_ns=0,
    bytes_up=0, bytes_down=0,
)  # fmt: skip


def relay_status(**said: object) -> RelayStatus:
    """A status in which everything is 0 but what is said."""
    return msgspec.structs.replace(_QUIET, **said)
