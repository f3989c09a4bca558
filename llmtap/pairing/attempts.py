"""Find, among the requests that a gateway made for a client's request, the one whose text was delivered."""

from dataclasses import dataclass
from enum import StrEnum

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import FAILED, Outcome
from llmtap.pairing.alignment import TextComparison, compare_text
from llmtap.pairing.matching import Pair, prompt_key


class Role(StrEnum):
    """Purpose of a request that the gateway made."""

    DELIVERED = "delivered"
    RETRY = "retry"
    """The attempt failed, and the delivered attempt has the same model."""
    FALLBACK = "fallback"
    """The attempt failed, and the delivered attempt has another model."""
    DISCARDED = "discarded"
    """The attempt succeeded, but the client received another answer to the same prompt."""
    SIDE_CALL = "side_call"
    """The request has another prompt, for example that of a guardrail."""


@dataclass(frozen=True, slots=True)
class GatewayAttempt:
    """A request that the gateway made for a request of a client."""

    exchange: Exchange
    role: Role
    text: TextComparison
    """Comparison of the text that the client received with the text of this attempt."""


def attempts_of(pair: Pair) -> list[GatewayAttempt]:
    """Return all attempts of a pair, in the order of their arrival."""
    texts = [compare_text(pair.front, back) for back in pair.backs]
    delivered_index = _delivered_index(pair, texts)
    main = pair.backs[-1] if delivered_index is None else pair.backs[delivered_index]
    return [
        GatewayAttempt(back, Role.DELIVERED if i == delivered_index else _role_of(back, main), text)
        for i, (back, text) in enumerate(zip(pair.backs, texts, strict=True))
    ]


def _delivered_index(pair: Pair, texts: list[TextComparison]) -> int | None:
    """Return the index of the attempt whose text was delivered; None if there is none.

    It is the attempt that has the longest text in common with the front. If no text is in common, it is the
    successful attempt whose prompt, streaming and model are most like those of the client's request; among
    equal attempts, the latest.
    """
    common = [text.common_chars for text in texts]
    if max(common) > 0:
        return common.index(max(common))
    front = pair.front
    successful = [
        (
            prompt_key(back) == prompt_key(front),
            back.stream == front.stream,
            back.model == front.model,
            i,
        )
        for i, back in enumerate(pair.backs)
        if not _has_failed(back)
    ]
    return max(successful)[-1] if successful else None


def _has_failed(x: Exchange) -> bool:
    return x.outcome in FAILED or x.outcome is Outcome.CLIENT_ERROR


def _role_of(back: Exchange, main: Exchange) -> Role:
    """Return why the gateway made another request besides the one whose answer it delivered."""
    if prompt_key(back) != prompt_key(main):
        return Role.SIDE_CALL
    if not _has_failed(back):
        return Role.DISCARDED
    return Role.RETRY if back.model == main.model else Role.FALLBACK
