"""Service tier of a request and of its answer: a class of speed and price that the client can choose.

Values come from a closed set (`TIERS`). Any other value becomes `other`, so that clients and servers cannot
create unlimited numbers of names. Anthropic's `speed` counts as a tier unless it is `standard`, because it
changes the time of a token.

Source: platform.openai.com api reference (`service_tier`); docs.anthropic.com service-tiers and fast mode;
console.groq.com service-tiers; cloud.google.com priority paygo.
"""

from typing import Any, Final

from llmtap.protocol.dialects.openai_shapes import read_json

TIERS: Final = frozenset(
    {
        "auto",
        "default",
        "flex",
        "priority",
        "scale",
        "batch",
        "standard",
        "standard_only",
        "fast",
        "on_demand",
        "performance",
        "economy",
    }
)
OTHER: Final = "other"
_HOLDERS: Final = ((), ("response",), ("usage",), ("message", "usage"), ("response", "usage"))
"""Paths of the objects that can name the tier of an answer, in chat, Responses and Anthropic's Messages."""


def tier_of(service_tier: Any, speed: Any = None) -> str | None:
    """Return the tier in the members `service_tier` and `speed`; None if they name none."""
    for value in (None if speed == "standard" else speed, service_tier):
        if isinstance(value, str) and value:
            return value if value in TIERS else OTHER
    return None


def granted_tier(data: bytes) -> str | None:
    """Return the tier that an event or a whole answer names; None if it names none."""
    if b'"service_tier"' not in data and b'"speed"' not in data:
        return None
    root = read_json(data)
    tier = None
    for path in _HOLDERS:
        value = root
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, dict):
            # Read `speed` only in `usage`: elsewhere, a member `speed` can belong to a tool or a voice.
            speed = value.get("speed") if path[-1:] == ("usage",) else None
            tier = tier_of(value.get("service_tier"), speed) or tier
    return tier
