"""A RelayStatus whose lag buckets are set, for tests that care about other fields."""

from typing import Any

from llmtap.channel.status import LAG_EDGES_NS, RelayStatus


def relay_status(**said: Any) -> RelayStatus:
    """A status in which everything is 0 but what is said."""
    return RelayStatus(**{"lag_buckets": [0] * (len(LAG_EDGES_NS) + 1), **said})
