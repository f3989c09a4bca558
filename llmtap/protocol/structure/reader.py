"""Read an answer by the structure of its events.

`dialects/chooser.py` calls `infer` with the first events of an answer that no dialect fits. The reader that
`infer` returns continues to learn, because events of a new form can hold output, the usage, or the end. While
it knows no output, the chooser keeps the latest events, and calls `examine` with each new one. Afterwards, if
its table does not fit an event, and no dialect claims the event, the chooser calls `learn`. From then on, a
place that was judged to hold no output stays without output: a later change would move the time of the first
token.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import msgspec

from llmtap.protocol.delta import Delta, EventClass, ReadingLimit
from llmtap.protocol.dialects.table.declaration import DialectTable, Rule
from llmtap.protocol.dialects.table.findings import Findings
from llmtap.protocol.dialects.table.reader import TableDialect, TableReader
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.structure import names
from llmtap.protocol.structure.structure import Structure
from llmtap.protocol.structure.tables import NAME, make_table

_COUNTS: Final = re.compile(rb"[uU]sage|[tT]okens|oken_?[cC]ount|eval_count").search
_END_MARKS: Final = frozenset(text.upper().encode() for text in names.END_TEXTS if not text.isalpha())
"""Data of events that end a stream. Words without brackets are left out: they can be text of an answer."""
TABLES_MAX: Final = 32
"""Maximum number of tables that are made for one answer."""
_TABLES_CACHED: Final = 64
_NO_VERDICT: Final = (EventClass.GUARDRAIL, EventClass.REFUSAL)
_EMPTY: Final = DialectTable(
    name=NAME, source=NAME, end="none", rules=(Rule(event="-", event_class="metadata"),)
)


def infer(events: Sequence[SseEvent], *, whole: bool) -> "InferredReader | None":
    """Return a new reader for the answer that begins with these events; None if it cannot be read.

    Args:
        events: the first events of a stream, or one event that is a whole body. They are only examined: pass
            them to the reader afterwards.
        whole: no further event follows. Then None is returned if the events have no known output.
    """
    structure = Structure(events)
    for event in events:
        structure.add(event)
    table = make_table(structure, whole=whole)
    if table is None and (whole or not structure.event_count):
        return None
    return InferredReader(structure, table)


@lru_cache(_TABLES_CACHED)
def _compile(table_json: bytes) -> TableDialect:
    """Compile a table. All answers with the same table use the same result."""
    return TableDialect(msgspec.json.decode(table_json, type=DialectTable))


class InferredReader(TableReader):
    """Reader with a table that grows. It reports no verdict and no certain end."""

    __slots__ = (
        "_input_tokens",
        "_reads_usage",
        "_structure",
        "_table",
        "_tables_left",
        "knows_all",
        "knows_output",
    )

    def __init__(self, structure: Structure, table: DialectTable | None) -> None:
        super().__init__(_compile(msgspec.json.encode(table or _EMPTY)))
        self._structure = structure
        """Places that were found so far; None: the table no longer grows."""
        self._table = table
        self._reads_usage = table is not None and any(rule.usage for rule in table.rules)
        """Whether the table has a place of the usage."""
        self._tables_left = TABLES_MAX
        """How often the table may still be replaced by a larger one."""
        self._input_tokens: int | None = None
        """Latest count of prompt tokens, which later counts can lack."""
        self.knows_output = table is not None
        """Whether the table reads some output."""
        self.knows_all = False
        """Whether the events that are read now were examined before, so that they teach nothing new."""

    @property
    def name(self) -> None:
        return None

    @property
    def end_certain(self) -> bool:
        return False

    @property
    def limits(self) -> tuple[ReadingLimit, ...]:
        """Limits that were reached while the reader learned."""
        tables = () if self._tables_left else (ReadingLimit.STRUCTURE_TABLES,)
        return self._structure.limits + tables

    def read_event(self, event: SseEvent) -> Delta:
        if event.data is not None and len(event.data) < 12 and event.data.upper() in _END_MARKS:
            return Delta(EventClass.DONE, done=True)
        delta = super().read_event(event)
        if delta.parsed and (not delta.output or self._may_count(event)) and self._learn(event):
            delta = super().read_event(event)
        return self._adjust(delta)

    def learn(self, event: SseEvent, delta: Delta) -> Delta:
        """Learn from an event that was read as `delta`. Return its Delta by the table as it is afterwards."""
        return self._adjust(super().read_event(event)) if self._learn(event) else delta

    def _to_delta(self, findings: Findings) -> Delta:
        # In an unknown format, the meaning of a finish reason is uncertain: report it without a verdict.
        reason, findings.reason = findings.reason, None
        delta = super()._to_delta(findings)
        delta.finish_reason = reason
        return delta

    def _adjust(self, delta: Delta) -> Delta:
        """Correct what a generic table reads, with what is known from earlier events."""
        if delta.counts is not None:
            # A count before any output is not that of the whole answer. A later count often has no input
            # tokens: take them from an earlier count.
            delta.usage_running |= not (self._has_output or delta.done)
            if delta.counts.input is None:
                delta.counts.input = self._input_tokens
            self._input_tokens = delta.counts.input
        return _without_verdict(delta)

    def read_body(self, body: bytes) -> Delta:
        return _without_verdict(super().read_body(body))

    def _may_count(self, event: SseEvent) -> bool:
        """Return whether the event possibly counts tokens beside its text, while no rule reads counts."""
        return not self._reads_usage and event.data is not None and _COUNTS(event.data) is not None

    def examine(self, event: SseEvent) -> None:
        """Learn from an event that is kept, so that its texts can be judged when there are more of them."""
        self._structure.waits = True
        self._learn(event)
        self._structure.waits = False

    def end_examination(self) -> None:
        """Let no event that was examined become output by later events, because it is read now."""
        self._structure.judges_once = True
        self._structure.outputs()

    @property
    def first_unjudged(self) -> int:
        """As `Structure.first_unjudged`."""
        return self._structure.first_unjudged()

    @property
    def first_output(self) -> int:
        """Number of the first examined event that has a text at a place of output."""
        return min(place.indexes[0] for place in self._structure.outputs())

    def _learn(self, event: SseEvent) -> bool:
        """Add an event to the structure, and make a new table of it. Return whether the table changed."""
        structure = self._structure
        if self.knows_all or not (self._tables_left and structure.values_left and structure.add(event)):
            return False
        return self.judge()

    def judge(self) -> bool:
        """Make a table of all examined events. Return whether the table changed."""
        table = make_table(self._structure, whole=False)
        if table is None or table == self._table:
            return False
        self._tables_left -= 1
        self._table = table
        self._dialect = _compile(msgspec.json.encode(table))
        self.names_read = self._dialect.names_read
        self._sample = None
        self._reads_usage = any(rule.usage for rule in table.rules)
        self.knows_output = True
        return True


def _without_verdict(delta: Delta) -> Delta:
    """Remove verdict, refusal and their classes from a Delta: in an unknown dialect, they are not certain."""
    if delta.verdict is None and not delta.refusal and delta.event_class not in _NO_VERDICT:
        return delta
    classes = {c for c in (delta.event_class, *delta.also) if c not in _NO_VERDICT}
    if delta.content or delta.blank or delta.refusal:
        classes.add(EventClass.CONTENT)
    delta.event_class, *also = sorted(classes) or [EventClass.METADATA]
    delta.also = tuple(also)
    delta.verdict, delta.refusal = None, False
    return delta
