"""Collect values of options by key from several sources, and make the structs or report all mistakes.

A schema names the tables: `{"relay": RelayOptions, "slo": dict[str, SloOptions]}`. A table is a struct, a
`dict[str, struct]` whose keys are names of tables (`[slo.gold]`), or a mapping of names to structs. The table
"" has the keys without one. A key is `relay.idle_timeout`, `slo.gold.target` or `sut.hardware.count`; the
last source that sets it wins.
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
        """Where each key was set, and where each table begins."""
        self.errors: list[ConfigError] = []
        self.wrong: set[str] = set()
        """Keys whose values have mistakes."""

    def set_place(self, key: str, place: str) -> None:
        self.places = {n: at for n, at in self.places.items() if not n.startswith((f"{key}.", f"{key}["))}
        self.places[key] = place

    def add(self, errors: Iterable[ConfigError]) -> None:
        """Add mistakes, without those that follow from the missing value of a wrong key."""
        wrong: set[str] = set()
        for error in errors:
            if not any(_names_key(f"{error.place} {error.problem}", key) for key in self.wrong):
                self.errors.append(self.with_place(error))
            if key := _KEY.match(error.place):
                wrong.add(key[0])
        self.wrong |= wrong

    def with_place(self, error: ConfigError) -> ConfigError:
        """Return a mistake with the place where its key was set."""
        name = error.place
        while name and name not in self.places:
            name = name[: max(name.rfind("."), name.rfind("["), 0)]
        if not name:
            return error
        at = self.places[name]
        # If the place is a flag, its name shows the key, so do not add the key.
        place = at if at.startswith("--") else f"{error.place} ({at})" if at else error.place
        return ConfigError(place, error.problem, error.hint)


_KEY: Final = re.compile(r"[^.\s\[]+(\.[^.\s\[]+)+")


def _names_key(text: str, key: str) -> bool:
    return re.search(rf"\b{re.escape(key)}\b", text) is not None


class OptionTables:
    """Values of options by table, and their mistakes."""

    def __init__(self, schema: Schema, *, strict: bool = False, listing: str | None = None) -> None:
        """`strict`: whether a number in a file is refused as a text. `listing`: hint for an unknown key if no
        known key is similar."""
        self.schema = schema
        self.mistakes = Mistakes()
        self.values: dict[str, dict[str, Any]] = {}
        """Values that were set, by table: `relay`, `slo.gold`."""
        self._strict = strict
        self._listing = listing

    def put(self, key: str, value: Any, place: str) -> None:
        """Set a key; a text is read by the type of the key."""
        table, rest = self._split(key)
        kind = self.kind_of(table)
        if kind is None or not rest or not all(rest):
            self._unknown(key, place, table)
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
        """Set all keys of a TOML file with this content."""
        places = {name: f"{file}, line {line}" for name, line in key_lines(file).items()}
        self.mistakes.places |= places

        def report(name: str, problem: str, hint: str | None) -> None:
            self.mistakes.errors.append(ConfigError(places.get(name, str(file)), problem, hint))

        for name, keys in content.items():
            if name not in self.schema:
                what = (
                    f"there is no table {name!r}"
                    if isinstance(keys, dict)
                    else f"{name!r} is outside a table"
                )
                report(name, what, nearest_hint(name, self.schema))
                continue
            if not isinstance(keys, dict):
                report(
                    name, f"{name!r} is outside a table", f"write a line [{name}] above the keys of the table"
                )
                continue
            tables = {name: keys}
            if not is_struct(self.schema[name]):
                tables = {f"{name}.{one}": about for one, about in keys.items()}
            for table, about in tables.items():
                self._put_table(table, about, places, report)

    def _put_table(self, table: str, about: Any, places: Mapping[str, str], report: Any) -> None:
        kind = self.kind_of(table)
        if kind is None:
            first, _, name = table.partition(".")
            report(
                table,
                f"there is no table {table!r}",
                nearest_hint(name, list(self.schema[first]), f"{first}."),
            )
            return
        if not isinstance(about, dict):
            report(table, f"{table!r} is outside a table", f"write [{table.partition('.')[0]}.NAME] above it")
            return
        values = self.values.setdefault(table, {})
        for name, value in about.items():
            if name not in kind.__struct_fields__:
                hint = self._nearest(table, name)
                report(f"{table}.{name}", f"there is no key '{table}.{name}'", hint)
                continue
            value = value.isoformat() if isinstance(value, datetime) else value
            if place := places.get(f"{table}.{name}"):
                self.mistakes.places[f"{table}.{name}"] = place
            values[name] = value

    def _split(self, key: str) -> tuple[str, list[str]]:
        """Return the name of the table of a key, and the rest."""
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
        first, _, name = table.partition(".")
        kind = self.schema.get(first)
        if isinstance(kind, Mapping):
            return kind.get(name)
        if get_origin(kind) is dict:
            return get_args(kind)[1] if name else None
        return kind if not name else None

    def _member_type(self, kind: Any, name: str, path: str, place: str) -> tuple[Any, str]:
        """Return the type and the name of a member of a table; None if there is none, which is reported."""
        inner = parts_of(kind)[0]
        if get_origin(inner) is dict:
            return get_args(inner)[1], name
        if not is_struct(inner):
            self.mistakes.errors.append(
                ConfigError(
                    place,
                    f"{path} has one value and is no table, so it has no key {name!r}",
                    f"set {path} itself",
                )
            )
            return None, name
        types = {field.name: field.type for field in msgspec.structs.fields(inner)}
        known = name.replace("-", "_")
        if known not in types:
            self._unknown(f"{path}.{name}".lstrip("."), place, path, types)
        return types.get(known), known

    def _unknown(self, key: str, place: str, table: str, names: Iterable[str] | None = None) -> None:
        name = key.rpartition(".")[2]
        hint = self._nearest(table, name, names) or self._listing
        self.mistakes.errors.append(ConfigError(place, f"there is no key {key!r}", hint))

    def _nearest(self, table: str, name: str, names: Iterable[str] | None = None) -> str | None:
        """Return the hint for the nearest key of the same table, or the same name in another table."""
        kind = self.kind_of(table)
        known = list(names if names is not None else () if kind is None else kind.__struct_fields__)
        own_table_hint = nearest_hint(name, known, f"{table}.".lstrip("."), few=not self._listing)
        other_tables = (
            other for other, kind in self.schema.items() if is_struct(kind) and name in kind.__struct_fields__
        )
        return own_table_hint or next((f"did you mean '{other}.{name}'?" for other in other_tables), None)

    def read(self) -> dict[str, Any]:
        """Return the structs by table, those of named tables as dicts. Wrong keys have their defaults; a
        table that lacks a required key is left out. The mistakes are in `mistakes`."""
        made: dict[str, Any] = {}
        for name, kind in self.schema.items():
            if is_struct(kind):
                made[name] = self._convert(name, kind, self.values.get(name, {}))
            else:
                tables = {t: held for t, held in self.values.items() if t.startswith(f"{name}.")}
                read = ((t.partition(".")[2], self._convert(t, self.kind_of(t), tables[t])) for t in tables)
                made[name] = {one: options for one, options in read if options is not None}
        return made

    def _convert(self, table: str, kind: Any, values: dict[str, Any]) -> Any:
        """Return the options without the keys that are wrong; None if a required key is missing."""
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        good = dict(values)
        for name, value in values.items():
            key = f"{table}.{name}".lstrip(".")
            if wrong := list(mistakes_in(value, fields[name].type, key, strict=self._strict)):
                self.mistakes.add(map(self._with_set_keys, wrong))
                del good[name]
        required = {name for name, field in fields.items() if field.required}
        wrong_keys = {key.rpartition(".")[2] for key in self.mistakes.wrong if key.startswith(f"{table}.")}
        self.mistakes.add(
            missing_key_error(table, name) for name in sorted(required - values.keys() - wrong_keys)
        )
        while not required - good.keys():
            try:
                return convert(kind, good)
            except msgspec.ValidationError as exc:  # each value is valid, but their combination is not
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
                # Leave out the invalid key, so that the next attempt converts the other ones.
                del good[name]
        return None if required else kind()

    def _with_set_keys(self, error: ConfigError) -> ConfigError:
        """Return a mistake of a table with the keys that were set in it, which do not fit together."""
        keys = [key for key in self.mistakes.places if key.startswith(f"{error.place}.")]
        if error.place in self.mistakes.places or not keys:
            return error
        places = [self.mistakes.with_place(ConfigError(key, "")).place for key in keys]
        return ConfigError(", ".join(places), error.problem, error.hint)
