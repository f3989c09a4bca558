"""Write a table as TOML, with comments that say what to check (`llmtap inspect --draft`)."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from llmtap.protocol.dialects.table.declaration import OUTPUTS, PAYLOADS, DialectTable, listed
from llmtap.protocol.structure.structure import Structure
from llmtap.protocol.structure.tables import make_table, output_path

_OUTPUTS: Final = frozenset((*OUTPUTS, *PAYLOADS))
_SAMPLE_CHARS: Final = 40
_BARE_KEY: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_END_NOTES: Final = {
    "done": "a stream without its last event counts as cut off",
    "[DONE]": "a stream without [DONE] counts as cut off",
    "finish_reason": "a stream without a finish reason counts as cut off",
    "none": "no stream counts as cut off",
}


def draft_table(structure: Structure, name: str, source: str, *, text: bool = True) -> str | None:
    """Return the table of the answer whose events `structure` has seen, as TOML; None if it shows no output.

    Args:
        text: write samples of the output as comments.
    """
    table = make_table(structure, whole=True, name=name, source=source)
    if table is None:
        return None
    notes = {}
    for place in structure.outputs():
        texts = next(iter(place.texts.values()))
        sample = f", the first {_toml_value(texts[0][:_SAMPLE_CHARS])}" if text else ""
        notes[output_path(place, structure)] = f"check: {place.count:,} texts{sample}"
    return "\n".join(_draft_lines(table, notes))


def _draft_lines(table: DialectTable, notes: Mapping[str, str]) -> Iterator[str]:
    raw: dict[str, Any] = msgspec.to_builtins(table)
    place = f"dialects.{table.name if _BARE_KEY.issuperset(table.name) else _toml_value(table.name)}"
    yield f"[{place}]"
    for key, value in raw.items():
        if key in ("name", "rules", "events", "counts"):
            continue
        note = {
            "source": "check: the page that documents the format",
            "end": f"check: {_END_NOTES[table.end]}",
        }
        yield _toml_line(key, value, note.get(key, ""))
    if "paths" not in raw:
        yield '# paths = "/v1/generate"  # check: end of the request path, if other paths have other formats'
    for rule in raw.get("rules", ()):
        yield from ("", f"[[{place}.rules]]")
        for key, value in rule.items():
            if key in _OUTPUTS:
                yield from (f"# {notes[path]}" for path in listed(value) if path in notes)
            yield _toml_line(key, value)
    for key, table_of in (
        ("events", "check: events without output and usage"),
        ("counts", "check: in the object of usage"),
    ):
        if raw.get(key):
            yield from ("", f"[{place}.{key}]  # {table_of}")
            yield from (_toml_line(name, value) for name, value in raw[key].items())


def _toml_line(key: str, value: Any, note: str = "") -> str:
    return f"{key} = {_toml_value(value)}" + (f"  # {note}" if note else "")


def _toml_value(value: Any) -> str:
    """Return a value in TOML; a list of one text is the text."""
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
