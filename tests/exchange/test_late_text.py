"""Invariant: the first token of an answer that is understood late has its own time, or a known error."""

from typing import Any

from llmtap.exchange.exchange import OUTPUT, Exchange
from llmtap.exchange.outcome import Reading, ReadingLimit, TokenSource
from llmtap.protocol.dialects.chooser import REVISIONS_MAX
from tests.exchange.streams import chunk, observe, sse

WORDS = ("The", " ferry", " left", " the", " harbour", " at", " noon", ".")
STATUS = sse({"type": "status", "message": "Loading"})
REQUEST = b"POST /talk HTTP/1.1\r\nHost: g\r\n\r\n"


def answer(*events: bytes, **options: Any) -> Exchange:
    """Return the exchange of an answer whose event i came at 100 + i."""
    return observe(*((100 + i, event) for i, event in enumerate(events)), end_ns=9_000, **options)


def output_times(x: Exchange) -> list[int]:
    log = x.timeline.events
    return [t_ns for t_ns, flags in zip(log.t_ns, log.flags, strict=True) if flags & OUTPUT]


def test_text_behind_many_events_without_text_has_its_own_times() -> None:
    for request in (REQUEST, b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\n\r\n"):
        x = answer(*[STATUS] * 60, *(sse({"bit": word}) for word in WORDS), request=request)
        assert (x.reading, x.dialect) == (Reading.INFERRED, None)
        assert output_times(x) == list(range(160, 168))
        assert x.timeline.first_token_ns == 160
        assert x.reading_limits == (ReadingLimit.KEPT_EVENTS,)
        assert x.ttft_uncertainty_ns == 12, "the lag of the read, and no more"


def test_a_dialect_behind_many_events_of_another_is_read_from_its_first_event() -> None:
    x = answer(*[STATUS] * 60, *(chunk({"content": word}) for word in WORDS), request=REQUEST)
    assert (x.reading, x.dialect, output_times(x)) == (
        Reading.DIALECT,
        "openai.chat",
        [*range(160, 168)],
    )


def test_text_that_only_later_events_explain_has_a_known_error() -> None:
    """A text that grows can be that of a person, until the stream counts the tokens of a model."""
    grown = [sse({"body": " and" * i}) for i in range(1, 31)]
    usage = sse({"usage": {"input_tokens": 5, "output_tokens": 30}})
    x = answer(*grown, usage, request=REQUEST)
    assert (x.reading, x.reading_limits) == (Reading.INFERRED, (ReadingLimit.KEPT_EVENTS,))
    assert (x.tokens.output, x.tokens.source) == (30, TokenSource.USAGE)
    assert x.timeline.first_token_ns is not None
    assert x.timeline.first_token_ns - x.ttft_uncertainty_ns == 100, "the first text came at 100"
    assert x.uncertainty_ns == x.ttft_uncertainty_ns
    assert answer(*grown, request=REQUEST).reading is Reading.NONE


def test_text_in_as_many_events_as_are_tried_is_found() -> None:
    x = answer(*[STATUS] * (REVISIONS_MAX - 8), *(sse({"bit": w}) for w in WORDS * 2), request=REQUEST)
    assert output_times(x)[0] == 100 + REVISIONS_MAX - 8
    late = answer(*[STATUS] * 3 * REVISIONS_MAX, *(sse({"bit": w}) for w in WORDS), request=REQUEST)
    assert (late.reading, output_times(late)) == (Reading.NONE, [])
    assert late.reading_limits == (ReadingLimit.KEPT_EVENTS, ReadingLimit.REVISIONS)
    named = answer(
        *[STATUS] * 3 * REVISIONS_MAX, *(sse({"type": "token", "token": w}) for w in WORDS), request=REQUEST
    )
    assert output_times(named)[0] == 100 + 3 * REVISIONS_MAX, "the name shows it in the first event"
