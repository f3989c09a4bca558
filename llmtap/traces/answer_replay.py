"""What an answer that was played through the observer tells, in the capture's columns.

Points in time are left to the caller: a saved answer has none of its own (`record/saved.py`).
"""

from typing import Any

import msgspec

from llmtap.exchange.outcome import EventClass
from llmtap.exchange.saved import Explained

__all__ = ["answer_columns", "text_said"]


def answer_columns(explained: Explained) -> dict[str, Any]:
    """How the exchange ended, what it was, and what it counted."""
    x = explained.exchange
    refusal = x.refusal or {}
    return {
        "response_model": x.response_model, "endpoint": x.endpoint, "dialect": x.dialect, "stream": x.stream,
        "request_id": x.request_id, "status": x.status, "outcome": x.outcome.value,
        "finish_reason": x.finish_reason, "error": x.error, "retries": x.retries,
        "refusal_kind": _text(refusal.get("kind")), "refusal_source": _text(refusal.get("source")),
        "refusal_detail": _text(refusal.get("detail")),
        "refusal_confidence": _text(refusal.get("confidence")),
        "guardrail": _json(x.guardrail), "no_token_reason": x.no_token_reason,
        "input_tokens": x.tokens.input, "output_tokens": x.tokens.output,
        "input_token_source": None if x.tokens.input is None else "usage",
        "reasoning_tokens": x.tokens.reasoning, "cached_tokens": x.tokens.cached,
        "token_source": None if x.tokens.output is None else x.tokens.source.value,
        "usage": _json(x.usage), "server_timing": _json(x.server_timing),
        "unparsed_events": x.unparsed_events,
    }  # fmt: skip


def text_said(explained: Explained) -> str | None:
    """The text of the first choice; None where no event was understood to carry any."""
    parts = [
        event.delta.text
        for event in explained.events
        if event.delta.event_class in (EventClass.CONTENT, EventClass.REFUSAL)
        and event.delta.text
        and event.delta.choices[:1] in ((), (0,))
    ]
    return "".join(parts) if parts else None


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else _json(value)


def _json(value: object) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()
