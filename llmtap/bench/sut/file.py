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
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from llmtap.bench.run.test import TESTS, BenchTest, test_named
from llmtap.bench.sut.sut import BenchTarget, Sut, TargetArm
from llmtap.errors import ConfigError
from llmtap.load.sending import shown_url
from llmtap.report.values import leaves
from llmtap.units import encode_seconds, read_special, shown
from llmtap.user_files import decode_json, read_toml

_PATH: Final = re.compile(r"\s*- at `(?:key in )?\$(.*)`$")
_STEP: Final = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_EXPECTED: Final = re.compile(r"Expected `([^`]+)`(?:, got `([^`]+)`| (.+))$")
_NOUNS: Final = {
    "int": "whole number", "float": "number", "str": "text", "array": "list", "object": "table",
}  # fmt: skip
_UNKNOWN: Final = object()


def _misfit(exc: msgspec.ValidationError, kind: Any, value: Any) -> tuple[str, str, str | None]:
    """Return the path of a wrong value (`hardware.count`, `classes[0].name`), the problem, and a hint."""
    found = _PATH.search(str(exc))
    path = found[1] if found else ""
    said = _PATH.sub("", str(exc))
    kind, value = _walked(kind, value, path)
    if unknown := re.fullmatch(r"Object contains unknown field `(.+)`", said):
        path += f".{unknown[1]}"
        problem: str = f"there is no key {unknown[1]!r}"
        hint: str | None = _near(unknown[1], _names_of(kind))
    else:
        problem, hint = _told(said, kind, value)
    return path.removeprefix("."), problem, hint


def _inner_type(kind: Any) -> Any:
    """Return a type without `Annotated` and without None."""
    if get_origin(kind) is Annotated:
        return _inner_type(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        rest = [one for one in get_args(kind) if one is not type(None)]
        return _inner_type(rest[0]) if len(rest) == 1 else kind
    return kind


def _is_finite(value: Any) -> bool:
    """Whether no number in it is infinite or NaN: JSON has neither, and no load can be sent at one."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _walked(kind: Any, value: Any, path: str) -> tuple[Any, Any]:
    for name, index in _STEP.findall(path):
        kind = _inner_type(kind)
        if name:
            kind = {one.encode_name: one.type for one in msgspec.structs.fields(kind)}.get(name)
            value = value.get(name, _UNKNOWN) if isinstance(value, dict) else _UNKNOWN
            continue
        at = int(index) if index.isdigit() else None
        kinds = [one for one in get_args(kind) if one is not Ellipsis]
        if get_origin(kind) is dict:
            kind = kinds[1]
        elif kinds:
            kind = kinds[at if at is not None and at < len(kinds) else -1]
        known = at is not None and isinstance(value, list | tuple) and at < len(value)
        value = value[at] if known else _UNKNOWN
    return _inner_type(kind), value


def _told(said: str, kind: Any, value: Any) -> tuple[str, str | None]:
    if said.startswith("Invalid enum value") and get_origin(kind) is Literal:
        allowed = [one for one in get_args(kind) if one]
        return f"expected one of {', '.join(map(repr, allowed))}, got {shown(value)}", _meant(
            str(value), allowed
        )
    missing = re.fullmatch(r"Object missing required field `(.+)`", said)
    if missing:
        return f"{missing[1]} is missing", None
    expected = _EXPECTED.fullmatch(said)
    if expected is None:
        return said[:1].lower() + said[1:], None
    types, got, more = expected.groups()
    wanted = [one for one in types.split(" | ") if one != "null"]
    if more:
        given = "" if value is _UNKNOWN else f", got {shown(value)}"
        return f"expected {' or '.join(map(_noun, wanted))} {more}{given}".replace(".0,", ","), None
    given = f"a {_NOUNS.get(got, got)}" if value is _UNKNOWN else shown(value)
    if wanted == ["bool"]:
        return f"expected true or false, got {given}", None
    if wanted == ["str"] and get_origin(kind) is Literal:
        return f"expected one of {', '.join(repr(one) for one in get_args(kind) if one)}, got {given}", None
    return f"expected {' or '.join(map(_noun, wanted))}, got {given}", _unquoted(value, wanted)


def _noun(name: str) -> str:
    noun = _NOUNS.get(name, name)
    return noun if noun == "text" else f"a {noun}"


def _unquoted(value: Any, wanted: Sequence[str]) -> str | None:
    if isinstance(value, str) and not {"int", "float"}.isdisjoint(wanted):
        try:
            float(value)
        except ValueError:
            return None
        return "without quotation marks" if "float" in wanted or value.lstrip("+-").isdigit() else None
    return "in quotation marks" if wanted == ["str"] and isinstance(value, int | float) else None


def _meant(text: str, allowed: Sequence[str]) -> str | None:
    """Return a hint with the nearest of the allowed values, by one of its words or as a whole."""
    words = {word: one for one in allowed for word in one.split()} | {one: one for one in allowed}
    near = difflib.get_close_matches(text, words, 1, 0.6)
    return f"did you mean {words[near[0]]!r}?" if near else None


S = TypeVar("S", bound=msgspec.Struct)

FLAG: Final = "--set"
HIDDEN: Final = "(not shown)"
_TABLES: Final = ("target", "sut", "arms", "tests")
_Tables = Mapping[str, dict[str, Any]]
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
    tables = {table: dict(content.get(table, {})) for table in _TABLES}
    for table in ("arms", "tests"):
        for name, held in tables[table].items():
            if not isinstance(held, dict):
                raise ConfigError(f"{table}.{name}{where}", "stands outside a table", f"[{table}.NAME]")
            if table == "tests" and name not in TESTS:
                raise ConfigError(f"[tests.{name}]{where}", "there is no such test", _near(name, TESTS))
            tables[table][name] = dict(held)
    _check_all(tables, where)
    for item in sets:
        _put_flag(tables, item, tests)
    if target is not None:
        tables["target"]["url"] = target
    if "url" not in tables["target"]:
        raise ConfigError("--target", "is missing", "such as --target http://127.0.0.1:8000")
    lenient = bool(sets)
    return BenchFile(
        target=_decoded(BenchTarget, tables["target"], "target", where, lenient=lenient),
        sut=_decoded(Sut, tables["sut"], "sut", where, lenient=lenient),
        arms={
            name: _decoded(TargetArm, held, f"arms.{name}", where, lenient=lenient)
            for name, held in tables["arms"].items()
        },
        tests={
            name: _decoded(test_named(name).params, held, f"tests.{name}", where, lenient=lenient)
            for name, held in tables["tests"].items()
        },
        given={name: frozenset(held) for name, held in tables["tests"].items()},
    )


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


def _check_all(tables: _Tables, where: str) -> None:
    for table, kind, held in _parts(tables):
        for path, value in leaves(held, f"{table}."):
            if not _is_finite(value):
                raise ConfigError(f"{path}{where}", f"expected a finite number, got {value}")
        if table == "target":
            held = {"url": ""} | held  # --target may set it
        _decoded(kind, held, table, where)


def _parts(
    tables: Mapping[str, dict[str, Any]],
) -> Iterator[tuple[str, type[msgspec.Struct], dict[str, Any]]]:
    yield "target", BenchTarget, tables["target"]
    yield "sut", Sut, tables["sut"]
    for name, held in tables["arms"].items():
        yield f"arms.{name}", TargetArm, held
    for name, held in tables["tests"].items():
        yield f"tests.{name}", test_named(name).params, held


def _put_flag(tables: _Tables, item: str, tests: Sequence[str]) -> None:
    """Put the value of a `--set` flag into the tables."""
    key, equals, text = item.partition("=")
    if not equals or not key:
        raise ConfigError(FLAG, f"expected NAME=VALUE, got {item!r}", "llmtap bench list")
    path = key.strip().split(".")
    names = {name.replace("-", "_"): name for name in TESTS}
    test = names.get(path[0].replace("-", "_"))
    if test is not None and len(path) > 1:
        found = [test]
        path = path[1:]
    elif path[0] in ("target", "sut", "arms") and len(path) > 1:
        root = tables[path[0]]
        kinds: dict[str, type[msgspec.Struct]] = {"target": BenchTarget, "sut": Sut, "arms": TargetArm}
        if path[0] == "arms":
            root = root.setdefault(path[1], {})
        _put(root, kinds[path[0]], path[2 if path[0] == "arms" else 1 :], text.strip(), key)
        return
    else:
        wanted = path[0].replace("-", "_")
        found = [name for name in tests if wanted in _names_of(test_named(name).params)]
    if not found:
        known = [one for name in tests for one in _names_of(test_named(name).params)]
        raise ConfigError(f"{FLAG} {key}", "there is no such parameter", _near(path[0], known))
    for name in found:
        _put(tables["tests"].setdefault(name, {}), test_named(name).params, path, text.strip(), key)


def _put(held: dict[str, Any], kind: type[msgspec.Struct], path: Sequence[str], text: str, key: str) -> None:
    types = {one.encode_name: one.type for one in msgspec.structs.fields(kind)}
    name = path[0].replace("-", "_") if path else ""
    if name not in types:
        raise ConfigError(f"{FLAG} {key}", "there is no such parameter", _near(name, types))
    if len(path) > 1:
        inner = _inner_type(types[name])
        if get_origin(inner) is dict:
            held[name] = dict(held.get(name, {})) | {".".join(path[1:]): _value(get_args(inner)[1], text)}
        elif isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            held[name] = dict(held.get(name, {}))
            _put(held[name], inner, path[1:], text, key)
            return
        else:
            raise ConfigError(f"{FLAG} {key}", f"{name} is no table")
    else:
        held[name] = _value(_inner_type(types[name]), text)
    try:
        read = _read(types[name], held[name])
    except msgspec.ValidationError as exc:
        _, problem, hint = _misfit(exc, types[name], held[name])
        raise ConfigError(f"{FLAG} {key}", problem, hint or _example(kind, name, key)) from None
    if not _is_finite(read):
        raise ConfigError(f"{FLAG} {key}", f"expected a finite number, got {text!r}")


def _value(kind: Any, text: str) -> Any:
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


def _example(kind: type[msgspec.Struct], name: str, key: str) -> str | None:
    default = next(one.default for one in msgspec.structs.fields(kind) if one.encode_name == name)
    if not isinstance(default, list | tuple) or not default:
        return None
    if isinstance(default[0], msgspec.Struct):
        return f"such as {FLAG} {key}={shlex.quote(msgspec.json.encode(default).decode())}"
    return f"such as {FLAG} {key}={','.join(map('{:g}'.format, default))}"


def _read(kind: Any, value: Any) -> Any:
    raw = msgspec.json.encode(value)
    return msgspec.json.decode(raw, type=kind, strict=False, dec_hook=read_special)


def _decoded(kind: type[S], held: Mapping[str, Any], table: str, where: str, *, lenient: bool = False) -> S:
    """Decode a table by way of JSON, so that members of bodies stay unchanged (`msgspec.Raw`)."""
    try:
        raw = msgspec.json.encode(held)
        return msgspec.json.decode(raw, type=kind, strict=not lenient, dec_hook=read_special)
    except msgspec.ValidationError as exc:
        path, problem, hint = _misfit(exc, kind, held)
        key = ".".join(part for part in (table, path) if part)
        raise ConfigError(f"{key}{where}", problem, hint) from None


def _names_of(kind: type[msgspec.Struct]) -> list[str]:
    return [one.encode_name for one in msgspec.structs.fields(kind)]


def _near(name: str, known: Sequence[str] | Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, list(known), 1, 0.6)
    return f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}"
