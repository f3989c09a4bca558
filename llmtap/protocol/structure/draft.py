"""Write the table inferred from an answer as TOML, with comments for the user (`llmtap inspect --draft`)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args

import msgspec

from llmtap.protocol.dialects.table.declaration import OUTPUTS, PAYLOADS, DialectTable, End, as_texts
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.structure.candidates import (
    Candidates,
    EdgeEvent,
    find_candidates,
    integers_of,
    texts_of,
    usage_of,
)
from llmtap.protocol.structure.structure import Kind, Structure
from llmtap.protocol.structure.tables import make_table, member_path, output_path

_OUTPUTS: Final = frozenset((*OUTPUTS, *PAYLOADS))
_SAMPLE_CHARS: Final = 40
_BARE_KEY: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_END_NOTES: Final = {
    "done": "a stream without its last event counts as cut off",
    "[DONE]": "a stream without [DONE] counts as cut off",
    "finish_reason": "a stream without a finish reason counts as cut off",
    "none": "no stream counts as cut off",
}


def draft_table(
    structure: Structure, events: Sequence[SseEvent], name: str, source: str, *, text: bool = True
) -> str | None:
    """Return the table of an answer as TOML; None if the answer shows no output.

    Args:
        structure: structure of these events.
        events: all events of the answer.
        text: whether comments show the beginning of texts.
    """
    table = make_table(structure, whole=True, name=name, source=source)
    if table is None:
        return None
    notes = []
    for place in structure.outputs():
        texts = next(iter(place.texts.values()))
        sample = f", the first {_toml_value(texts[0][:_SAMPLE_CHARS])}" if text else ""
        note = f"check: {place.text_count:,} texts{sample}"
        notes.append(_Note(output_path(place, structure) or ".", place.kind, note))
    return "\n".join(_Writer(table, find_candidates(table, structure, events), notes, text=text).lines())


class _Note(NamedTuple):
    """Comment on the texts at a place of output."""

    path: str
    kind: Kind
    text: str

    def fits(self, path: str, rule: Mapping[str, Any]) -> bool:
        """Return whether a path of a rule leads to the place. `rule`: the rule as in TOML."""
        marks = {member_path(at): value for at, value in self.kind.marks}
        names = as_texts(rule.get("event", ()))
        named = not names or self.kind.event in names or not set(names).isdisjoint(marks.values())
        return path == self.path and named and rule.get("where", {}).items() <= marks.items()


class _Writer:
    """Writes the inferred table as TOML, with comments on the values that it possibly lacks."""

    def __init__(
        self, table: DialectTable, candidates: Candidates, notes: Sequence[_Note], *, text: bool
    ) -> None:
        self._table = table
        self._candidates = candidates
        """Values that the table possibly lacks."""
        self._notes = notes
        self._shows_text = text
        """Whether comments may quote texts of the answer."""
        name = table.name
        self._place = f"dialects.{name if _BARE_KEY.issuperset(name) else _toml_value(name)}"
        """Name of the table in the file."""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table in TOML, with notes on what to check."""
        raw: dict[str, Any] = msgspec.to_builtins(self._table)
        place = self._place
        notes = {
            "source": "check: the page that documents the format",
            "end": self._end_note(),
            "model": self._model_note(),
        }
        yield f"[{place}]"
        for key, value in raw.items():
            if key not in ("name", "rules", "events", "counts"):
                yield _toml_line(key, value, notes.get(key, ""))
        if "paths" not in raw:
            yield '# paths = "/v1/generate"  # check: end of the request path, if two tables fit'
        additions = self._additions()
        for number, rule in enumerate(raw.get("rules", ())):
            yield from ("", f"[[{place}.rules]]")
            for key, value in rule.items():
                if key in _OUTPUTS:
                    notes_of = (n.text for path in as_texts(value) for n in self._notes if n.fits(path, rule))
                    yield from (f"# {text}" for text in notes_of)
                yield _toml_line(key, value)
            for event, keys in additions:
                if event.rule_index == number:
                    yield from ("# check: remove `# ` where this is right", *(f"# {line}" for line in keys))
        yield from self._suggestions(additions)
        for key, table_of in (
            ("events", "check: events without output and usage"),
            ("counts", "check: in the object of usage"),
        ):
            if raw.get(key):
                yield from ("", f"[{place}.{key}]  # {table_of}")
                yield from (_toml_line(name, value) for name, value in raw[key].items())

    def _end_note(self) -> str:
        end = self._table.end
        others = ", ".join(_toml_value(other) for other in get_args(End) if other != end)
        note = f"check: {_END_NOTES[end]}; other values: {others}"
        if end != "none" or not self._candidates.last_is_unique:
            return note
        condition = self._candidates.last_events[-1].condition
        return note if condition is None else f"{note}. The last event: {_toml_line(*condition)}"

    def _model_note(self) -> str:
        if self._table.model:
            return "check: the name of the model"
        found = self._list_values(self._candidates.models)
        return f"check: no model was found. Texts in the first events, or constant: {found or 'none'}"

    def _list_values(self, values: Mapping[str, object]) -> str:
        """Return the paths and values in one line; without the values of texts if texts are not shown."""
        return ", ".join(
            _toml_value(path)
            + ("" if isinstance(value, str) and not self._shows_text else f" = {_toml_value(value)}")
            for path, value in values.items()
        )

    def _additions(self) -> list[tuple[EdgeEvent, list[str]]]:
        """Return lines with the keys that the rules of the last events lack, for one event of each rule."""
        table, last = self._table, self._candidates.last_events
        usage = None if any(rule.usage for rule in table.rules) else usage_of(last)
        has_reason = any(rule.finish_reason for rule in table.rules)
        additions: dict[object, tuple[EdgeEvent, dict[str, str]]] = {}
        for event in reversed(last):
            place = event.condition if event.rule_index is None else event.rule_index
            _, lines = additions.setdefault(place, (event, {}))
            keys = []
            if event is last[-1] and table.end == "none" and self._candidates.last_is_unique:
                keys.append(("event_class", "done", 'and end = "done" above'))
            if not has_reason and event.texts:
                path, value = next(iter(event.texts.items()))
                note = _toml_value(value) if self._shows_text else ""
                keys.append(("finish_reason", member_path(path), note))
            if usage is not None and event is usage[0]:
                keys.append(("usage", member_path(usage[1]) or ".", ""))
            for key, value, note in keys:
                lines.setdefault(key, _toml_line(key, value, note))
        return [(event, [*lines.values()]) for event, lines in reversed(additions.values()) if lines]

    def _suggestions(self, additions: Sequence[tuple[EdgeEvent, list[str]]]) -> Iterator[str]:
        """Yield comments with possible values of the missing keys, and with rules that read these values."""
        rules, last = self._table.rules, self._candidates.last_events
        missing = [
            f"# check: no `{key}` was found. {title}: {self._list_values(found) or 'none'}"
            for key, title, found in (
                ("finish_reason", "Texts that only the last events have", texts_of(last)),
                ("usage", "Integers of the last events", integers_of(last)),
            )
            if not any(getattr(rule, key) for rule in rules)
        ]
        if missing:
            yield from ("", *missing)
        examples: list[str] = []
        for event, keys in additions:
            if event.rule_index is None and event.condition is not None:
                examples += ("", f"[[{self._place}.rules]]", _toml_line(*event.condition), *keys)
        usage = None if any(rule.usage for rule in rules) else usage_of(last)
        if usage is not None and (usage[0].rule_index is not None or usage[0].condition is not None):
            examples += ("", f"[{self._place}.counts]")
            # A single integer is probably the number of output tokens.
            meanings = ("input", "output") if len(usage[2]) > 1 else ("output",)
            for meaning, (member, value) in zip(meanings, usage[2].items(), strict=False):
                examples.append(_toml_line(meaning, member, f"{value}"))
        if examples:
            yield from ("", "# check: remove `# ` where this is right; a rule is tried before `events`:")
            yield from (f"# {line}".rstrip() for line in examples[1:])


def _toml_line(key: str, value: Any, note: str = "") -> str:
    return f"{key} = {_toml_value(value)}" + (f"  # {note}" if note else "")


def _toml_value(value: Any) -> str:
    """Return a value in TOML. A list with one value is written as this value."""
    if isinstance(value, list | tuple):
        return _toml_value(value[0]) if len(value) == 1 else "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, str):
        # A JSON string is a TOML string, except for the character DEL.
        return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
    return msgspec.json.encode(value).decode()


def _toml_key(key: str) -> str:
    return key if key and _BARE_KEY.issuperset(key) else _toml_value(key)
