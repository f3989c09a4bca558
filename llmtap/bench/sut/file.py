"""Read the bench file: target, declarations of the system under test, and parameters of the tests.

    [target]        where requests go: `bench/sut/sut.py`
    [sut]           what it is, with [sut.hardware], [sut.tokenizer], [sut.guardrails] and [sut.clock]
    [arms.NAME]     a configuration of it that a test compares with another
    [tests.NAME]    setup parameters of a test

`llmtap bench` calls `load_bench` with the file and its flags and gets a `BenchFile`. Priority: flags, the
file, `--quick`, the test's defaults. An unknown key or a wrong value is a ConfigError. `without_keys` and
`params_told` give the same contents as JSON for reports, without secrets.
"""

import difflib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec.inspect import type_info

from llmtap.bench.run.test import TESTS, BenchTest, test_named
from llmtap.bench.sut.sut import BenchTarget, Sut, TargetArm
from llmtap.errors import ConfigError
from llmtap.load.target import shown_url
from llmtap.report.values import leaves
from llmtap.settings import wanted
from llmtap.units import encode_seconds, read_special, shown
from llmtap.user_files import decode_json, read_toml

S = TypeVar("S", bound=msgspec.Struct)

FLAG: Final = "--set"
HIDDEN: Final = "(not shown)"
_TABLES: Final = ("target", "sut", "arms", "tests")
_Tables = Mapping[str, dict[str, Any]]
_PATH: Final = re.compile(r"\s*- at `(?:key in )?\$(.*)`$")
_STEP: Final = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_FIELD: Final = re.compile(r"Object (contains unknown|missing required) field `(.+)`")
_KINDS: Final[Mapping[str, type[msgspec.Struct]]] = {"target": BenchTarget, "sut": Sut}
_SECRET_FIELD: Final = re.compile(r"auth|cookie|api-?key|token|secret|passw|credential", re.IGNORECASE)
_SECRET_MEMBER: Final = re.compile(
    r"api_?key|secret|passw|credential|authorization|access_token", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFile:
    target: BenchTarget
    sut: Sut = field(default_factory=Sut)
    arms: Mapping[str, TargetArm] = field(default_factory=dict)
    tests: Mapping[str, msgspec.Struct] = field(default_factory=dict)
    given: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Names of the given parameters by test; the others have defaults."""

    def params_of(self, test: BenchTest[S], *, quick: bool) -> S:
        usual = test.params(**test.quick) if quick else test.params()
        named = {name: getattr(self.tests[test.name], name) for name in self.given.get(test.name, ())}
        return msgspec.structs.replace(usual, **named)


def load_bench(
    file: Path | None, *, target: str | None = None, sets: Sequence[str] = (), tests: Sequence[str] = ()
) -> BenchFile:
    """Read the file, and apply the flags. Raises ConfigError that names the key and where it was set.

    `sets` of `--set`: `NAME=VALUE` for each of `tests` that has it, `TEST.NAME=VALUE`, or a key of another
    table, such as `sut.hardware.count=8`.
    """
    where = "" if file is None else f" ({file.name})"
    content = {} if file is None else read_toml(file, "--config")
    for table, held in content.items():
        if table not in _TABLES:
            raise ConfigError(f"[{table}]{where}", "there is no such table", _near(table, _TABLES))
        if not isinstance(held, dict):
            raise ConfigError(f"{table}{where}", "stands outside a table", f"write [{table}] above it")
        for name, inner in held.items() if table in ("arms", "tests") else ():
            if not isinstance(inner, dict):
                raise ConfigError(f"{table}.{name}{where}", "stands outside a table", f"[{table}.NAME]")
            if table == "tests" and name not in TESTS:
                raise ConfigError(f"[tests.{name}]{where}", "there is no such test", _near(name, TESTS))
    tables = {table: content.get(table, {}) for table in _TABLES}
    flagged: dict[str, str] = {}
    if target is not None:
        tables["target"]["url"] = target
    read = _decoded({**tables, "target": {"url": ""} | tables["target"]}, where, flagged)
    for item in sets:
        _put(tables, flagged, item, tests)
    if "url" not in tables["target"]:
        raise ConfigError("--target", "is missing", "such as --target http://127.0.0.1:8000")
    return _decoded(tables, where, flagged) if sets else read


def without_keys(kind: BenchTarget | TargetArm) -> dict[str, Any]:
    """Return a target or an arm as JSON without keys and without passwords of URLs."""
    told: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(kind))
    for table, secret in (("headers", _SECRET_FIELD), ("body", _SECRET_MEMBER)):
        told[table] = {name: HIDDEN if secret.search(name) else value for name, value in told[table].items()}
    for name in ("url", "metrics"):
        if "://" in str(told.get(name)):  # not of metrics = "none"
            told[name] = shown_url(told[name])
    return told


def params_told(params: msgspec.Struct) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(params, enc_hook=encode_seconds)
    return told


def _decoded(tables: _Tables, where: str, flagged: Mapping[str, str]) -> BenchFile:
    """Decode all tables. `flagged`: names of flags by the path that each of them set as text."""

    def one(kind: type[S], held: Mapping[str, Any], table: str) -> S:
        for path, value in leaves(held, f"{table}."):
            if not _is_finite(value):  # no JSON, and no load can be sent at it
                raise ConfigError(place(path), f"expected a finite number, got {value}")
        try:  # by way of JSON, so that members of bodies stay unchanged (`msgspec.Raw`)
            raw = msgspec.json.encode(held)
            return msgspec.json.decode(raw, type=kind, strict=not flagged, dec_hook=read_special)
        except msgspec.ValidationError as exc:
            path, problem, hint = _misfit(exc, kind, held)
            raise ConfigError(place(f"{table}{path}"), problem, hint) from None

    def place(path: str) -> str:
        flags = (flag for key, flag in flagged.items() if f"{path}.".startswith((f"{key}.", f"{key}[")))
        return next((f"{FLAG} {flag}" for flag in flags), f"{path}{where}")

    return BenchFile(
        target=one(BenchTarget, tables["target"], "target"),
        sut=one(Sut, tables["sut"], "sut"),
        arms={name: one(TargetArm, held, f"arms.{name}") for name, held in tables["arms"].items()},
        tests={
            name: one(test_named(name).params, held, f"tests.{name}")
            for name, held in tables["tests"].items()
        },
        given={name: frozenset(held) for name, held in tables["tests"].items()},
    )


def _is_finite(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _misfit(exc: msgspec.ValidationError, kind: Any, value: Any) -> tuple[str, str, str | None]:
    """Return the path of a wrong value (`.hardware.count`, `.classes[0].name`), the problem, and a hint."""
    said, found = _PATH.sub("", str(exc)), _PATH.search(str(exc))
    path = found[1] if found else ""
    for name, index in _STEP.findall(path):
        kind = _inner_type(kind)
        if name:
            kind, value = _types(kind)[name], value[name]
        elif index == "...":  # any of a table
            kind = get_args(kind)[1]
        else:
            kinds = [one for one in get_args(kind) if one is not Ellipsis]
            kind, value = kinds[min(int(index), len(kinds) - 1)], value[int(index)]
    if key := _FIELD.fullmatch(said):
        if key[1].startswith("missing"):
            return path, f"{key[2]} is missing", None
        return f"{path}.{key[2]}", f"there is no key {key[2]!r}", _near(key[2], _types(_inner_type(kind)))
    if said.startswith(("Expected", "Invalid")):
        return path, f"expected {_expected(kind)}, got {shown(value)}", None
    return path, said[:1].lower() + said[1:], None


def _expected(kind: Any) -> str:
    inner = _inner_type(kind)
    if get_origin(inner) is Literal:
        return f"one of {', '.join(filter(None, get_args(inner)))}"
    if get_origin(inner) in (list, tuple):
        return "a list"
    return "a table" if _is_table(inner) or get_origin(inner) is dict else wanted(type_info(kind))


def _inner_type(kind: Any) -> Any:
    """Return a type without `Annotated` and without None."""
    if get_origin(kind) is Annotated:
        return _inner_type(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        rest = [one for one in get_args(kind) if one is not type(None)]
        return _inner_type(rest[0]) if len(rest) == 1 else kind
    return kind


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _types(kind: Any) -> dict[str, Any]:
    return {one.encode_name: one.type for one in msgspec.structs.fields(kind)}


def _put(tables: _Tables, flagged: dict[str, str], item: str, tests: Sequence[str]) -> None:
    """Put the text of a `--set` flag into the tables."""
    key, equals, text = item.partition("=")
    if not equals or not key:
        raise ConfigError(FLAG, f"expected NAME=VALUE, got {item!r}", "llmtap bench list")
    if text.strip().lower() in ("inf", "-inf", "infinity", "nan"):
        raise ConfigError(f"{FLAG} {key}", f"expected a finite number, got {text!r}")
    for path, kind in _set_by(key.strip(), tests):
        *within, name = path
        held: Any = tables
        for part in within:
            held = held.setdefault(part, {})
        held[name] = _from_text(kind, text.strip())
        flagged[".".join(path)] = key


def _set_by(key: str, tests: Sequence[str]) -> Iterator[tuple[list[str], Any]]:
    """Yield the path and the type of each value that a flag sets."""
    first, *rest = key.split(".")
    roots: list[tuple[list[str], Any]]
    if first in _KINDS and rest:
        roots = [([first], _KINDS[first])]
    elif first == "arms" and len(rest) > 1:
        roots = [([first, rest.pop(0)], TargetArm)]
    elif (test := first.replace("_", "-")) in TESTS and rest:
        roots = [(["tests", test], test_named(test).params)]
    else:
        rest = [first, *rest]
        every = [(["tests", test], test_named(test).params) for test in tests]
        roots = [one for one in every if first.replace("-", "_") in _types(one[1])] or every[:1]
    for path, kind in roots:
        for name in rest:
            if get_origin(kind) is dict:
                kind = get_args(kind)[1]
            elif not _is_table(kind):
                raise ConfigError(f"{FLAG} {key}", f"{path[-1]} is no table")
            else:
                name, types = name.replace("-", "_"), _types(kind)
                if name not in types:
                    raise ConfigError(f"{FLAG} {key}", "there is no such parameter", _near(name, types))
                kind = _inner_type(types[name])
            path = [*path, name]
        yield path, kind


def _from_text(kind: Any, text: str) -> Any:
    """Return the value of a flag's text: lists and tables decoded, numbers as text, which is read by type."""
    if text.startswith(("[", "{")) or kind is msgspec.Raw:
        try:
            return decode_json(text)
        except msgspec.DecodeError:
            return text
    if get_origin(kind) in (list, tuple):
        return [one.strip() for one in text.split(",") if one.strip()]
    if text == "none" and kind is not str:
        return None
    return {"on": "true", "off": "false"}.get(text, text) if kind is bool else text


def _near(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.6)
    return f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}"
