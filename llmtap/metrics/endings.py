"""What came of exchanges that did not go as planned: no token at all, and tokens for nobody."""

from bisect import bisect_right
from typing import Final

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome
from llmtap.metrics.latency import Measured, output_times_ns

__all__ = ["NO_TOKEN_REASONS", "no_token_reason", "tokens_after_cancel"]

NO_TOKEN_REASONS: Final = ("refusal", "guardrail", "error", "cancelled", "rejected", "empty", "only_metadata")


def no_token_reason(x: Exchange, m: Measured) -> str | None:
    """Why the exchange never produced a token; None if it did, or if none was to be expected of it.

    `guardrail` and `refusal`: blocked before a token, by a filter or by the model itself. `error`: the
    upstream failed, was silent or was cut off. `cancelled`: the client left first. `rejected`: the tap turned
    it away. `empty`: the stream ended well and held nothing, `only_metadata`: nothing generated. None is
    expected of an answer in one piece that ended well (an embedding, a list of models). Where the tap itself
    failed (`tap_error`), nobody knows whether a token came.
    """
    if m.output_events or (not x.stream and x.outcome is Outcome.COMPLETE):
        return None
    match x.outcome:
        case Outcome.COMPLETE:
            return x.no_token_reason or "empty"
        case Outcome.REFUSED:
            kind = (x.refusal or {}).get("kind")
            return "refusal" if kind in (None, "model_refusal") else "guardrail"
        case Outcome.CLIENT_CANCELLED:
            return "cancelled"
        case Outcome.REJECTED:
            return "rejected"
        case Outcome.TAP_ERROR:
            return None
        case _:
            return "error"


def tokens_after_cancel(x: Exchange, m: Measured) -> int | None:
    """Tokens that the upstream still delivered after the client had left; None if the client stayed.

    Those of the events read after `delivered_ns`, the moment the client was found gone; an event whose
    tokens are not known counts as one. The relay drops the upstream at that moment, so more than 0 tells
    of another recorder, or of bytes that were under way.
    """
    if x.outcome is not Outcome.CLIENT_CANCELLED:
        return None
    left_ns = x.timeline.delivered_ns
    if left_ns is None:
        return 0
    times = output_times_ns(x.timeline.events)
    late = bisect_right(times, left_ns)
    return len(times) - late if m.tokens_per_chunk is None else sum(m.tokens_per_chunk[late:])
