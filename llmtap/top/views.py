"""The views, in the order of their tabs."""

from typing import Final

from llmtap.top.exchanges import EXCHANGES, exchanges_table, refusals_table
from llmtap.top.series import EXPERIMENT, arms_table, models_table, tenants_table
from llmtap.top.streams import STREAMS, streams_table
from llmtap.top.tap import tap_table
from llmtap.top.view import View

__all__ = ["VIEWS"]

STREAMS_MAX: Final = 200
"""More than a screen has lines."""
EXCHANGES_MAX: Final = 200

VIEWS: Final = (
    View("tenants", "Tenants", tenants_table, by="tenant"),
    View("models", "Models", models_table, by="model"),
    View("arms", "Arms", arms_table, by="arm", path=EXPERIMENT),
    View(
        "streams", "Streams", streams_table,
        path=STREAMS, query={"limit": str(STREAMS_MAX)}, inspects=True,
    ),
    View(
        "exchanges", "Exchanges", exchanges_table,
        path=EXCHANGES, query={"limit": str(EXCHANGES_MAX)}, inspects=True, stands=True,
    ),
    View("refusals", "Refusals", refusals_table, by="tenant"),
    View("tap", "Tap", tap_table),
)  # fmt: skip
