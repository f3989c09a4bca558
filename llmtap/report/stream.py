"""Turn a response that was read from a file into JSON and lines: its Exchange and every event.

Used by `llmtap inspect`. Input: the `Saved` and `Explained` of `exchange/saved.py`. Output: public JSON
(`explained_to_dict`), or a headline, the rows of a table of events, and facts on the whole response
(`fact_lines`). A saved response has no times, so every duration is null. A HAR file has only totals of times,
and the output names them as totals. An exchange of a packet capture has the times of its packets.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from llmtap.errors import printable
from llmtap.exchange.saved import Explained, Saved
from llmtap.exchange.strings import clean_name, clean_word
from llmtap.metrics.latency import chunking_of, metrics_of
from llmtap.protocol.delta import Delta, EventClass, Reading
from llmtap.report.values import milliseconds

_DIALECTS: Final = {
    Reading.DIALECT: "",
    Reading.INFERRED: "dialect unknown, read by structure",
    Reading.NONE: "dialect unknown",
}
TEXT_SHOWN: Final = 60
"""Maximum number of characters of a text in a row of the table; longer texts are cut."""
_TIMELESS: Final = frozenset(
    ("events", "content_events", "bytes_per_event_mean", "tokens_per_chunk_mean", "single_token_share")
)
"""Keys of `chunking` that depend neither on times nor on the boundaries of socket reads."""


def explained_to_dict(saved: Saved, explained: Explained, *, text: bool = True) -> dict[str, object]:
    """Return the exchange in the form of `/api/v1/exchanges?events=1`, with more fields for each event.

    These fields are: place in the decoded body in bytes (`start`, `end`), text (null unless `text`), finish
    reason, additional classes (`also`), and whether the event was parsed. If the response was saved without
    times, all durations are null, except those in the totals of a HAR file.
    """
    x = explained.exchange
    document: dict[str, Any] = x.to_dict(metrics_of(x), chunking_of(x), events=True)
    if not explained.has_times:
        _remove_times(document, saved)
    for event, e in zip(document["events"], explained.events, strict=False):
        d = e.delta
        event |= {
            "start": e.start,
            "end": e.end,
            "also": [_class_name(also) for also in d.also],
            "text": (d.text or None) if text else None,
            "finish_reason": None if d.finish_reason is None else clean_word(d.finish_reason),
            "parsed": d.parsed,
        }
    document["saved"] = {
        "what": saved.what,
        "whole": saved.whole,
        "totals": saved.totals or None,
        "notes": saved.notes,
    }
    return document


def _remove_times(document: dict[str, Any], saved: Saved) -> None:
    """Set all times in the JSON of an exchange to None, except those that the totals of a HAR file give."""
    for name in ("id", "relay", "seq", "clock", "uncertainty", "paused"):
        document[name] = None
    for name in ("added", "timeline", "metrics"):
        document[name] = dict.fromkeys(document[name])
    document["chunking"] = {
        name: v if name in _TIMELESS else None for name, v in document["chunking"].items()
    }
    if saved.arrival_wall_ns is None:
        document["arrival"] = None
    wait, receive = saved.totals.get("wait"), saved.totals.get("receive")
    if wait is not None:
        document["metrics"] |= {"ttfb": wait, "e2e": None if receive is None else wait + receive}
    for event in document["events"]:
        event["t"] = None


def headline(saved: Saved, explained: Explained) -> str:
    x = explained.exchange
    parts = [saved.what, f"{len(saved.body):,} bytes", _DIALECTS[x.reading] or f"dialect {x.dialect}"]
    if x.status is not None:
        parts.append(f"status {x.status}")
    return " · ".join([*parts, f"{len(explained.events):,} events"])


def event_columns(explained: Explained) -> tuple[str, ...]:
    return ("#", *(("ms",) if explained.has_times else ()), "bytes", "class", "tokens", "adds")


def event_cells(explained: Explained, *, text: bool = True) -> Iterator[tuple[str, ...]]:
    """Yield the row of each event, with the columns of `event_columns`. `ms` is the time since submit."""
    line = explained.exchange.timeline
    times_ns = list(line.events.t_ns) if explained.has_times else []
    for i, e in enumerate(explained.events):
        d = e.delta
        ms = f"{(times_ns[i] - (line.submit_ns or 0)) / 1e6:.3f}" if i < len(times_ns) else "-"
        yield (
            str(i),
            *((ms,) if explained.has_times else ()),
            f"{e.start}-{e.end}",
            " +".join([_class_name(d.event_class), *map(_class_name, d.also)]),
            f"{d.tokens}" if d.tokens >= 0 else "",
            printable("  ".join(_delta_texts(d, text=text))),
        )


def _delta_texts(d: Delta, *, text: bool) -> Iterator[str]:
    if d.text:
        yield _quoted_text(d.text) if text else f"{len(d.text):,} characters"
    if any(d.choices):
        yield f"choice {','.join(map(str, d.choices))}"
    if d.finish_reason is not None:
        yield f"finish={clean_word(d.finish_reason)}"
    if d.counts is not None:
        usage = d.counts
        counts = (
            ("in", usage.input),
            ("out", usage.output),
            ("reasoning", usage.reasoning),
            ("cached", usage.cached),
        )
        running = "running " if d.usage_running else ""
        yield running + "usage " + " ".join(f"{name}={n}" for name, n in counts if n is not None)
    if d.error_type is not None or d.error_message is not None:
        message = f" {_quoted_text(d.error_message)}" if d.error_message and text else ""
        kind = "" if d.error_type is None else clean_word(d.error_type)
        yield f"error {kind}{message}".strip()
    if d.verdict is not None:
        verdict = d.verdict
        category = "" if verdict.category is None else clean_word(verdict.category)
        parts = (verdict.kind or verdict.action, verdict.phase, category, f"by {verdict.signal}")
        yield " ".join(filter(None, parts))
    for time in d.server_times:
        yield f"{time.name}={time.ms:g}ms"
    if d.model is not None:
        yield f"model={clean_name(d.model)}"
    if not d.parsed:
        yield "(shape not known)"


def _quoted_text(text: str) -> str:
    """Return a text as a JSON string, cut to TEXT_SHOWN characters."""
    more = f"... ({len(text):,} characters)" if len(text) > TEXT_SHOWN else ""
    return msgspec.json.encode(text[:TEXT_SHOWN].encode("utf-8", "replace").decode()).decode() + more


def fact_lines(saved: Saved, explained: Explained) -> Iterator[tuple[str, str]]:
    """Yield facts on the whole response, each as a subject and a text."""
    for subject, fact in _response_facts(saved, explained):
        yield subject, printable(fact)


def _response_facts(saved: Saved, explained: Explained) -> Iterator[tuple[str, str]]:
    def json(value: object) -> str:
        return "none" if value is None else msgspec.json.encode(value).decode()

    x = explained.exchange
    yield "outcome", x.outcome.value + (f": {x.error}" if x.error else "")
    yield "finish reason", x.finish_reason or "none"
    if x.model or x.response_model:
        yield "model", x.model or x.response_model or ""
    t = x.tokens
    counts = (("input", t.input), ("output", t.output), ("reasoning", t.reasoning), ("cached", t.cached))
    counted = [f"{name} {n:,}" for name, n in counts if n is not None]
    yield "tokens", "  ".join([*counted, f"output by {t.source.value}"]) if counted else "none"
    yield "usage", json(x.usage)
    yield "chunking", _chunking_text(explained)
    if x.no_token_reason is not None:
        yield "no token", x.no_token_reason
    if x.retries:
        yield "retries", f"{x.retries:,}: the answer began again; usage is of the last attempt"
    yield "refusal", json(x.refusal)
    yield "guardrail", json(x.guardrail)
    times = [f"{e.get('name')} {e.get('ms'):g} ms ({e.get('where')})" for e in x.server_timing or ()]
    yield "server timing", "  ".join(times) or "none"
    if x.unparsed_events:
        yield "not understood", f"{x.unparsed_events:,} events; they count for timing only"
    yield "times", _times_text(saved, explained)
    for note in saved.notes:
        yield "note", note


def _chunking_text(explained: Explained) -> str:
    chunking = chunking_of(explained.exchange)
    parts = [f"{chunking['events']:,} events, {chunking['content_events']:,} with output"]
    mean, share = chunking["tokens_per_chunk_mean"], chunking["single_token_share"]
    if isinstance(mean, float):
        parts.append(f"{mean:.3g} tokens a chunk")
    if isinstance(share, float):
        parts.append(f"{share:.0%} of one token")
    return ", ".join(parts)


def _times_text(saved: Saved, explained: Explained) -> str:
    if explained.has_times:
        m = metrics_of(explained.exchange)
        return "  ".join(f"{name} {milliseconds(m[name])} ms" for name in ("ttft", "e2e"))
    if not saved.totals:
        return "none: a saved answer does not tell when its bytes came"
    text = "  ".join(f"{name} {seconds * 1e3:.6g} ms" for name, seconds in saved.totals.items())
    return f"{text}  (the HAR's totals; it has no times of events)"


def _class_name(event_class: EventClass) -> str:
    return event_class.name.lower()
