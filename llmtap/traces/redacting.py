"""Rows with text on their way from one format to another, redacted where rules are given, counted where not.

The rules are those of a capture (`redaction.py`). A body that is no JSON cannot be redacted, and is left out.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.options import CaptureOptions
from llmtap.capture.privacy.redaction import Redactor
from llmtap.capture.schema import SCHEMA
from llmtap.errors import ConfigError
from llmtap.traces.format import TraceWritten

__all__ = ["Redacted"]

_TEXTS: Final = ("request_body", "response_text")
_ASPECTS: Final = ("request body", "response text")


class Redacted:
    """Batches passing by, with marks in their text where the rules find something."""

    def __init__(self, batches: Iterable[pa.RecordBatch], rules: tuple[str, ...]) -> None:
        """Raises ConfigError for a rule that is none."""
        self._batches = batches
        self._redactor = Redactor(_checked(rules)) if rules else None
        self.marks = 0
        self.rows = 0
        """Rows with a mark."""
        self.unreadable = 0
        """Bodies that are no JSON, and so cannot be redacted."""
        self.raw = 0
        """Rows with text that nobody redacted."""

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            texts = [pc.is_valid(batch.column(name)) for name in _TEXTS]
            with_text = pc.or_(*texts)
            if self._redactor is None:
                self.raw += pc.and_(with_text, pc.is_null(batch.column("redactions"))).true_count
            elif with_text.true_count:
                batch = self._of(batch, self._redactor)
            yield batch

    def _of(self, batch: pa.RecordBatch, redactor: Redactor) -> pa.RecordBatch:
        names = (*_TEXTS, "redactions")
        rows = []
        for body, text, marks in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
            found, more = (None, 0) if body is None else redactor.body(body.encode())
            self.unreadable += body is not None and found is None
            said, again = (None, 0) if text is None else redactor.text(text)
            self.marks += more + again
            self.rows += more + again > 0
            # A row without text has nothing that could be redacted.
            rows.append((found, said, marks if body is text is None else (marks or 0) + more + again))
        for name, values in zip(names, zip(*rows, strict=True), strict=True):
            i = batch.schema.get_field_index(name)
            batch = batch.set_column(i, SCHEMA.field(name), pa.array(values, SCHEMA.field(name).type))
        return batch

    def report(self, written: TraceWritten) -> None:
        """Tells what became of the text that was written."""
        if self.marks:
            how = f"{self.marks:,} marks in {self.rows:,} rows stand for what --redact found"
            written.changed |= dict.fromkeys(_ASPECTS, how)
        elif self._redactor is not None:
            written.notes.append("--redact found nothing to redact")
        if self.unreadable:
            written.notes.append(
                f"{self.unreadable:,} bodies are no JSON that --redact could read, and were left out"
            )
        if self.raw and any(written.told.get(name) for name in _ASPECTS):
            written.notes.append(
                f"{self.raw:,} rows have text that nobody redacted; --redact email,card,phone,key does"
            )


def _checked(rules: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return CaptureOptions(redact=rules).redact
    except ConfigError as exc:
        raise ConfigError("--redact", exc.problem, exc.hint) from None
