"""Notes for the author of a table about rules and paths without a match in a stream (`inspect --dialect`)."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from llmtap.protocol.dialects.openai_shapes import read_data
from llmtap.protocol.dialects.table.declaration import (
    OUTPUTS,
    PAYLOADS,
    Counts,
    DialectTable,
    as_texts,
    parse_path,
)
from llmtap.protocol.dialects.table.paths import follow
from llmtap.protocol.dialects.table.reader import TableDialect
from llmtap.protocol.sse import SseEvent

_KEYS: Final = (*OUTPUTS, *PAYLOADS, "tokens", "logprobs", "running_tokens", "usage", "finish_reason")
"""Keys of a rule whose paths must lead to a value in at least one event of a whole stream."""
_MODEL_DEFAULT: Final = DialectTable(name="default", source="", end="none", plain_text="content").model


def notes_on(table: DialectTable, events: Iterable[SseEvent]) -> list[str]:
    """Return a note for each rule that fits no event, and for each key whose paths lead to no value."""
    dialect = TableDialect(table)
    numbers = {id(rule): number for number, rule in enumerate(table.rules)}
    fitting: Counter[int] = Counter()
    matches: set[tuple[int, str]] = set()
    usages: list[Any] = []
    read = 0
    has_model = False
    for name, value in _event_values(dialect, events):
        compiled, inside = dialect.find_rule(value, name)
        if compiled is not None:
            read += 1
            has_model = has_model or isinstance(_first_value(table.model, inside), str)
        number = None if compiled is None else numbers.get(id(compiled.rule))
        if compiled is None or number is None:
            continue
        fitting[number] += 1
        matches |= {
            (number, key) for key in _KEYS if _first_value(getattr(compiled.rule, key), inside) is not None
        }
        usage = _first_value(compiled.rule.usage, inside)
        usages += [] if usage is None else [usage]
    return [
        *_rule_notes(table, fitting, matches),
        *([] if has_model else _model_notes(table, read)),
        *_count_notes(table, usages),
    ]


def _event_values(dialect: TableDialect, events: Iterable[SseEvent]) -> Iterator[tuple[bytes | None, Any]]:
    """Yield the name and value of each event. An array that no rule reads as a whole is several events."""
    for event in events:
        value = None if event.data is None else read_data(event.data)
        if isinstance(value, list) and dialect.find_rule(value, event.event)[0] is None:
            yield from ((event.event, one) for one in value)
        else:
            yield event.event, value


def _first_value(paths: str | tuple[str, ...], value: Any) -> Any:
    return next(
        (one for path in as_texts(paths) if (one := follow(parse_path(path))(value)) is not None), None
    )


def _rule_notes(table: DialectTable, fitting: Counter[int], matches: set[tuple[int, str]]) -> Iterator[str]:
    for number, rule in enumerate(table.rules):
        place = f"dialects.{table.name}.rules[{number}]"
        if not fitting[number]:
            yield f"{place}: fits no event"
            continue
        for key in _KEYS:
            paths = as_texts(getattr(rule, key))
            if paths and (number, key) not in matches:
                places = " or ".join(paths)
                yield f"{place}.{key}: no value at {places} in {fitting[number]:,} events of this rule"


def _model_notes(table: DialectTable, read: int) -> Iterator[str]:
    """Yield a note if the model's paths in the table lead to no value. The default path gives no note."""
    paths = as_texts(table.model)
    if paths and table.model != _MODEL_DEFAULT:
        place = f"dialects.{table.name}.model"
        yield f"{place}: no text at {' or '.join(paths)} in {read:,} events that a rule or `events` names"


def _count_notes(table: DialectTable, usages: list[Any]) -> Iterator[str]:
    place, defaults = f"dialects.{table.name}.counts", Counts()
    for key in Counts.__struct_fields__ if usages else ():
        paths = getattr(table.counts, key)
        if paths not in ((), getattr(defaults, key)) and all(_first_value(paths, u) is None for u in usages):
            yield f"{place}.{key}: no value at {' or '.join(as_texts(paths))} of the usage"
    known = (*as_texts(table.counts.input), *as_texts(table.counts.output))
    if usages and table.counts == defaults and all(_first_value(known, usage) is None for usage in usages):
        yield f"{place}: not given, and the usage has none of OpenAI's names: {', '.join(known)}"
