"""Measure how exactly a stream is read by its structure: hide each known dialect, and read its fixtures.

    .venv/bin/python benchmarks/dialects/hidden.py            # table to stdout
    .venv/bin/python benchmarks/dialects/hidden.py --all      # hide all dialects at once
    .venv/bin/python benchmarks/dialects/hidden.py --streams  # the streams that are not exact

The truth is the reading by the known dialect, which `tests/protocol/test_fixtures.py` compares with the
expected results.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llmtap.exchange.exchange import OUTPUT, Exchange
from llmtap.exchange.observer import Observer
from llmtap.exchange.outcome import Outcome, TokenSource
from llmtap.protocol.delta import Reading
from llmtap.protocol.dialects.registry import BUILT_IN, Dialects

CORPUS: Final = Path(__file__).parents[2] / "tests" / "data" / "dialects"
_COLUMNS: Final = (
    "dialect hidden",
    "streams with output",
    "TTFT exact",
    "output events exact",
    "usage exact",
    "streams without text",
    "with output",
)
_NS_PER_MS: Final = 1_000_000


@dataclass(slots=True)
class Comparison:
    """A fixture, read by its dialect and with its dialect hidden."""

    name: str
    dialect: str
    truth: Exchange
    hidden: Exchange
    whole: bool
    """It is one JSON body, which has no first token of its own."""

    @property
    def has_output(self) -> bool:
        return bool(outputs(self.truth))

    @property
    def has_text(self) -> bool:
        """It has text that a model or a guardrail wrote."""
        return self.has_output or self.truth.guardrail is not None or self.truth.refusal is not None

    @property
    def ttft_exact(self) -> bool:
        """The first content comes at the same time; without content, the first output."""
        t, h = self.truth.timeline, self.hidden.timeline
        if t.first_content_ns is not None:
            return t.first_content_ns == h.first_content_ns
        return t.first_token_ns == h.first_token_ns

    @property
    def events_exact(self) -> bool:
        return outputs(self.truth) == outputs(self.hidden)

    @property
    def judged(self) -> bool:
        """The reading without the dialect calls the stream cut off, or finds a refusal that is none."""
        cut = self.hidden.outcome is Outcome.TRUNCATED
        return (cut and self.hidden.reading is not Reading.DIALECT) or (
            self.hidden.refusal is not None and self.truth.refusal is None
        )

    @property
    def usage_exact(self) -> bool | None:
        """None if the stream has no usage."""
        t, h = self.truth.tokens, self.hidden.tokens
        if t.source is not TokenSource.USAGE or not t.output:
            return None
        return (t.output, t.input) == (h.output, h.input) and h.source is t.source


def outputs(x: Exchange) -> list[int]:
    """Return the places of the events that carry output."""
    return [i for i, flags in enumerate(x.timeline.events.flags) if flags & OUTPUT]


def play(doc: dict[str, Any], body: bytes, dialects: Dialects = BUILT_IN) -> Exchange:
    """Return the exchange of a fixture, with the reads as recorded."""
    request, response = doc["request"], doc["response"]
    request_line = f"{request['method']} {request['path']} HTTP/1.1\r\nhost: g\r\n\r\n"
    observer = Observer("hidden", 1, 0, 0, request_line.encode(), dialects=dialects)
    observer.request_data(json.dumps(request["body"]).encode(), 0)
    observer.request_end(0)
    observer.on_submit(0, 0)
    fields = "".join(f"{k}: {v}\r\n" for k, v in response["headers"])
    head = f"HTTP/1.1 {response['status']} {response['reason']}\r\n{fields}\r\n"
    observer.response_head(head.encode(), round(response["headers_ms"] * _NS_PER_MS), 0)
    for chunk in doc["chunks"]:
        observer.response_data(
            body[chunk["off"] : chunk["off"] + chunk["n"]], round(chunk["t_ms"] * _NS_PER_MS), 0
        )
    end_ns = round(response["end_ms"] * _NS_PER_MS)
    clean = response["end"] == "clean"
    if clean:
        observer.response_end(end_ns)
    outcome = Outcome.COMPLETE if clean else Outcome.UPSTREAM_RESET
    return observer.finish(end_ns, outcome.value, None, None, 0, 0, 0, 0)


def without(dialect: str | None) -> Dialects:
    """Return the known dialects but this one; None: no dialect."""
    known = Dialects()
    left = tuple(d for d in known.entries if dialect is not None and getattr(d, "name", None) != dialect)
    known.entries = left  # type: ignore[misc]
    return known


def compare(*, all_hidden: bool = False) -> Iterator[Comparison]:
    """Yield each fixture that a dialect reads, with its two readings."""
    for path in sorted(CORPUS.glob("*.json")):
        doc = json.loads(path.read_text(encoding="utf-8"))
        body = (CORPUS / doc["body"]["file"]).read_bytes()
        truth = play(doc, body)
        if truth.dialect is None:
            continue
        hidden = play(doc, body, without(None if all_hidden else truth.dialect))
        yield Comparison(path.stem, truth.dialect, truth, hidden, doc["body"]["framing"] == "json")


def table(found: list[Comparison]) -> Iterator[str]:
    """Yield the lines of the table, in Markdown."""
    yield "| " + " | ".join(_COLUMNS) + " |"
    yield "|---|---|---|---|---|---|---|"
    for dialect in (*sorted({c.dialect for c in found}), ""):
        streams = [c for c in found if not c.whole and dialect in (c.dialect, "")]
        text = [c for c in streams if c.has_output]
        silent = [c for c in streams if not c.has_text]
        usage = [c for c in text if c.usage_exact is not None]
        cells = [
            dialect or "all",
            str(len(text)),
            share(sum(c.ttft_exact for c in text), len(text), dialect),
            share(sum(c.events_exact for c in text), len(text), dialect),
            f"{sum(c.usage_exact is True for c in usage)} of {len(usage)}" if usage else "-",
            str(len(silent)),
            str(sum(bool(outputs(c.hidden)) for c in silent)),
        ]
        yield "| " + " | ".join(cells) + " |"


def share(n: int, of: int, dialect: str) -> str:
    return "-" if not of else f"{n} ({n / of:.0%})" if not dialect else str(n)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="hide all dialects at once")
    parser.add_argument("--streams", action="store_true", help="list the streams that are not exact")
    options = parser.parse_args()
    found = list(compare(all_hidden=options.all))
    print("\n".join(table(found)))
    bodies = [c for c in found if c.whole]
    exact = sum(bool(outputs(c.hidden)) == c.has_output for c in bodies if c.has_output or not c.has_text)
    print(f"\nWhole JSON bodies: {exact} of {sum(c.has_output or not c.has_text for c in bodies)} right.")
    print(f"Called cut off, or refused without a refusal: {sum(c.judged for c in found)} of {len(found)}.")
    if options.streams:
        for c in found:
            wrong = not c.has_text and bool(outputs(c.hidden))
            if wrong or c.judged or (c.has_output and not (c.ttft_exact and c.events_exact)):
                print(
                    f"{c.name}: {c.hidden.reading}, output of {outputs(c.truth)} read as {outputs(c.hidden)}"
                )


if __name__ == "__main__":
    main()
