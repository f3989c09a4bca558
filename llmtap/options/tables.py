"""Collect the values of option keys from several sources, make structs from them, and report all mistakes.

A schema names the tables: `{"relay": RelayOptions, "slo": dict[str, SloOptions]}`. A table is a struct, a
`dict[str, struct]` whose keys are names of tables (`[slo.gold]`), or a mapping of names to structs. The table
"" has the keys that belong to no table. A key is `relay.idle_timeout`, `slo.gold.target` or
`sut.hardware.count`; if several sources set it, the value of the last source is used.
"""

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, get_args, get_origin

import msgspec

from llmtap.errors import ConfigError
from llmtap.options.fields import is_struct, parts_of
from llmtap.options.values import convert, from_text, missing_key_error, mistakes_in, nearest_hint
from llmtap.user_files import key_lines

Schema = Mapping[str, Any]


class Mistakes:
    """All mistakes in one configuration, each with the place where its key was set."""

    def __init__(self) -> None:
        self.places: dict[str, str] = {}
        """By key or table: place where it was set or begins (a flag, a variable, or a file with its line)."""
        self.errors: list[ConfigError] = []
        self.wrong_keys: set[str] = set()
        """Keys whose values have mistakes."""

    def set_place(self, key: str, place: str) -> None:
        """Set the place of a key, and forget the places inside its previous value, such as `KEY[0]`."""
        self.places = {k: p for k, p in self.places.items() if not k.startswith((f"{key}.", f"{key}["))}
        self.places[key] = place

    def add(self, errors: Iterable[ConfigError]) -> None:
        """Add mistakes, except those that only follow from a key that already has a mistake."""
        wrong_keys: set[str] = set()
        for error in errors:
            if not any(_names_key(f"{error.place} {error.problem}", key) for key in self.wrong_keys):
                place = self.key_with_place(error.place)
                self.errors.append(ConfigError(place, error.problem, error.hint))
            if key := _KEY.match(error.place):
                wrong_keys.add(key[0])
        self.wrong_keys |= wrong_keys

    def key_with_place(self, key: str) -> str:
        """Return the key with the place where it, or its table, was set."""
        name = key
        while name and name not in self.places:
            name = name[: max(name.rfind("."), name.rfind("["), 0)]
        source = self.places[name] if name else ""
        # A flag such as `--rate` already shows which key is wrong, so omit the key.
        return source if source.startswith("--") else f"{key} ({source})" if source else key


# A key with its table, such as `relay.listen`: at least two names with a dot between them.
_KEY: Final = re.compile(r"[^.\s\[]+(\.[^.\s\[]+)+")


def _names_key(text: str, key: str) -> bool:
    return re.search(rf"\b{re.escape(key)}\b", text) is not None


class OptionTables:
    """Values of options, collected by table, and the mistakes in them."""

    def __init__(self, schema: Schema, *, strict: bool = False, list_hint: str | None = None) -> None:
        """`strict`: refuse a number that a file has as a text (`"5"`). `list_hint`: hint for an unknown key
        that is similar to no known key; it names, for example, the command that lists all keys."""
        self.schema = schema
        self.mistakes = Mistakes()
        self.values: dict[str, dict[str, Any]] = {}
        """By table (`relay`, `slo.gold`): the values that were set, by name of the key."""
        self._strict = strict
        """Whether a value must have the type of its option, so that "1" is no number."""
        self._list_hint = list_hint
        """Hint for an unknown key, if no similar key exists."""

    def put(self, key: str, value: Any, place: str) -> None:
        """Set the value of a key, or add its mistakes. A text is converted to the type of the key."""
        table, rest = self._split_key(key)
        kind = self.kind_of(table)
        if kind is None or not rest or not all(rest):
            self._add_unknown_key(key, place, table)
            return
        path, values = table, self.values.setdefault(table, {})
        for i, name in enumerate(rest):
            kind, name = self._member_type(kind, name, path, place)
            if kind is None:
                return
            path = f"{path}.{name}".lstrip(".")
            if i < len(rest) - 1:
                values = values.setdefault(name, {})
        self.mistakes.set_place(path, place)
        values.pop(name, None)
        if isinstance(value, str):
            text, value = value, from_text(kind, value)
            if errors := list(mistakes_in(value, kind, path, given=text)):
                self.mistakes.add(errors)
                return
            if isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value)):
                value = convert(kind, value)
        values[name] = value

    def put_file(self, file: Path, content: Mapping[str, Any]) -> None:
        """Set all keys of a TOML file, whose decoded content is `content`, or add their mistakes."""
        places = {name: f"{file}, line {line}" for name, line in key_lines(file).items()}
        self.mistakes.places |= places

        def report(name: str, problem: str, hint: str | None) -> None:
            self.mistakes.errors.append(ConfigError(places.get(name, str(file)), problem, hint))

        for name, keys in content.items():
            if name not in self.schema:
                is_table = isinstance(keys, dict)
                problem = f"there is no table {name!r}" if is_table else f"the key {name!r} is not in a table"
                report(name, problem, nearest_hint(name, self.schema))
                continue
            if not isinstance(keys, dict):
                hint = f"write a line [{name}] above the keys of the table"
                report(name, f"{name!r} is the name of a table, not a key", hint)
                continue
            tables = {name: keys}
            if not is_struct(self.schema[name]):
                tables = {f"{name}.{one}": value for one, value in keys.items()}
            for table, table_content in tables.items():
                self._put_table(table, table_content, places, report)

    def _put_table(self, table: str, content: Any, places: Mapping[str, str], report: Any) -> None:
        """Check one table of a configuration file and store its values. `report` takes each mistake."""
        kind = self.kind_of(table)
        if kind is None:
            first, _, name = table.partition(".")
            hint = nearest_hint(name, list(self.schema[first]), f"{first}.")
            report(table, f"there is no table {table!r}", hint)
            return
        if not isinstance(content, dict):
            named = f"[{table.partition('.')[0]}.NAME]"
            report(
                table, f"the key {table!r} is not in a table {named}", f"write a line {named} above the key"
            )
            return
        values = self.values.setdefault(table, {})
        for name, value in content.items():
            if name not in kind.__struct_fields__:
                hint = self._similar_key_hint(table, name)
                report(f"{table}.{name}", f"there is no key '{table}.{name}'", hint)
                continue
            value = value.isoformat() if isinstance(value, datetime) else value
            if place := places.get(f"{table}.{name}"):
                self.mistakes.places[f"{table}.{name}"] = place
            values[name] = value

    def _split_key(self, key: str) -> tuple[str, list[str]]:
        """Split a key into the name of its table, and the parts of its name inside the table."""
        first, *rest = key.split(".")
        if first not in self.schema:
            return ("", [first, *rest]) if "" in self.schema else (key, [])
        if is_struct(self.schema[first]):
            return first, rest
        for i in range(1, len(rest)):
            kind = self.kind_of(f"{first}.{'.'.join(rest[:i])}")
            if kind is not None and rest[i] in kind.__struct_fields__:
                return f"{first}.{'.'.join(rest[:i])}", rest[i:]
        return f"{first}.{'.'.join(rest[:1])}".rstrip("."), rest[1:]

    def kind_of(self, table: str) -> type[msgspec.Struct] | None:
        """Return the struct of a table, or None if the schema has no such table."""
        first, _, name = table.partition(".")
        kind = self.schema.get(first)
        if isinstance(kind, Mapping):
            return kind.get(name)
        if get_origin(kind) is dict:
            return get_args(kind)[1] if name else None
        return kind if not name else None

    def _member_type(self, kind: Any, name: str, path: str, place: str) -> tuple[Any, str]:
        """Return the type and the name of a member of a table. If it does not exist, add a mistake."""
        inner = parts_of(kind)[0]
        if get_origin(inner) is dict:
            return get_args(inner)[1], name
        if not is_struct(inner):
            self.mistakes.errors.append(
                ConfigError(
                    place,
                    f"{path} has a single value and is not a table, so it has no key {name!r}",
                    f"set {path} itself",
                )
            )
            return None, name
        types = {field.name: field.type for field in msgspec.structs.fields(inner)}
        known = name.replace("-", "_")
        if known not in types:
            self._add_unknown_key(f"{path}.{name}".lstrip("."), place, path, types)
        return types.get(known), known

    def _add_unknown_key(self, key: str, place: str, table: str, names: Iterable[str] | None = None) -> None:
        name = key.rpartition(".")[2]
        hint = self._similar_key_hint(table, name, names) or self._list_hint
        self.mistakes.errors.append(ConfigError(place, f"there is no key {key!r}", hint))

    def _similar_key_hint(self, table: str, name: str, names: Iterable[str] | None = None) -> str | None:
        """Return a hint that names a similar key of the table, or a key with this name in another table."""
        kind = self.kind_of(table)
        known = list(names if names is not None else () if kind is None else kind.__struct_fields__)
        own_table_hint = nearest_hint(name, known, f"{table}.".lstrip("."), list_known=not self._list_hint)
        other_tables = (
            other for other, kind in self.schema.items() if is_struct(kind) and name in kind.__struct_fields__
        )
        return own_table_hint or next((f"did you mean '{other}.{name}'?" for other in other_tables), None)

    def read(self) -> dict[str, Any]:
        """Return by table its struct, or for `[slo.NAME]` a dict of structs by NAME. A wrong key has its
        default. A table that lacks a required key is None, or not in its dict. Adds to `mistakes`."""
        structs: dict[str, Any] = {}
        for name, kind in self.schema.items():
            if is_struct(kind):
                structs[name] = self._to_struct(name, kind, self.values.get(name, {}))
            else:
                tables = [t for t in self.values if t.startswith(f"{name}.")]
                named = {
                    t.partition(".")[2]: self._to_struct(t, self.kind_of(t), self.values[t]) for t in tables
                }
                structs[name] = {one: options for one, options in named.items() if options is not None}
        return structs

    def _to_struct(self, table: str, kind: Any, values: dict[str, Any]) -> Any:
        """Return a table as its struct, with defaults for wrong keys; None if a required key is missing."""
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        good = dict(values)
        for name, value in values.items():
            key = f"{table}.{name}".lstrip(".")
            if errors := list(mistakes_in(value, fields[name].type, key, strict=self._strict)):
                self.mistakes.add(map(self._with_set_keys, errors))
                del good[name]
        required = {name for name, field in fields.items() if field.required}
        wrong = {key.rpartition(".")[2] for key in self.mistakes.wrong_keys if key.startswith(f"{table}.")}
        self.mistakes.add(missing_key_error(table, name) for name in sorted(required - values.keys() - wrong))
        while not required - good.keys():
            try:
                return convert(kind, good)
            except msgspec.ValidationError as exc:  # Each value is valid, but not their combination.
                text, _, path = str(exc).partition(" - at `$")
                problem = text[0].lower() + text[1:]
                self.mistakes.add([self._with_set_keys(ConfigError(table + path.rstrip("`"), problem))])
                break
            except ConfigError as exc:
                errors = list(exc.all_errors())
            self.mistakes.add(errors)
            wrong_names = [
                n for n in good if any(_names_key(error.place, f"{table}.{n}") for error in errors)
            ]
            if not wrong_names:
                break
            for name in wrong_names:
                # Leave out the invalid keys, so that the next attempt converts the other keys.
                del good[name]
        return None if required else kind()

    def _with_set_keys(self, error: ConfigError) -> ConfigError:
        """Return a mistake of a whole table (each value is valid, but not their combination). Its place lists
        the keys that were set in the table, each with the file and line, or the option, that set it."""
        keys = [key for key in self.mistakes.places if key.startswith(f"{error.place}.")]
        if error.place in self.mistakes.places or not keys:
            return error
        places = map(self.mistakes.key_with_place, keys)
        return ConfigError(", ".join(places), error.problem, error.hint)
