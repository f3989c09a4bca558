"""The bench file: target server, declarations of the system under test (SUT), and parameters of the tests.

    [target]        where requests go
    [sut]           what it is, with [sut.hardware], [sut.tokenizer], [sut.guardrails] and [sut.clock]
    [arms.NAME]     a configuration of it that a test compares with another
    [tests.NAME]    setup parameters of a test

The structs have the keys of these tables, except those of `[tests.NAME]`, which are in the tests' modules.
`llmtap bench` calls `load_bench` with the file and its flags and gets a `BenchFile`. Priority: flags, the
file, `--quick`, the test's defaults. An unknown key or a wrong value is a ConfigError. `without_keys` and
`params_told` give the same contents as JSON for reports, without secrets. Source: IETF draft, 4.1, 4.4, 4.6
to 4.8.
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
from msgspec import Meta
from msgspec.inspect import type_info

from llmtap.bench.run.test import TESTS, BenchTest, test_named
from llmtap.errors import ConfigError
from llmtap.load.sending import shown_url
from llmtap.report.values import leaves
from llmtap.settings import wanted
from llmtap.units import encode_seconds, read_special, shown
from llmtap.user_files import decode_json, read_toml

Boundary = Literal["model engine", "application gateway", "compound system"]


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Accelerators and their price (`[sut.hardware]`)."""

    accelerator: Annotated[str | None, Meta(description="type, such as H100 SXM, or none (5.1.2.3)")] = None
    count: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="number of accelerators")] = None
    memory: Annotated[str | None, Meta(description="memory of each, such as 80 GB")] = None
    cpu: Annotated[str | None, Meta(description="CPU of the host")] = None
    price_per_hour: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="price of all hardware per hour (6.2)")
    ] = None
    currency: Annotated[str, Meta(description="currency of the price")] = "USD"


class SutTokenizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are counted (IETF 4.4)."""

    name: Annotated[str | None, Meta(description="name and version of the tokenizer (4.4.1)")] = None
    vocabulary: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="vocabulary size")] = None
    source: Annotated[str | None, Meta(description="source: a model id, a tiktoken name")] = None
    counting: Annotated[
        Literal["native", "reference"],
        Meta(description="counting of tokens (4.4.2): option A (native) or B (reference)"),
    ] = "native"
    special: Annotated[str | None, Meta(description="BOS/EOS: included or excluded (4.4.3)")] = None
    system_prompt: Annotated[str | None, Meta(description="its tokens: separate or included (4.4.3)")] = None
    tools: Annotated[str | None, Meta(description="formatting tokens of tool calls (4.4.3)")] = None


class Guardrails(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Safety systems (IETF 4.8.1)."""

    input_filter: Annotated[bool | None, Meta(description="whether prompts are filtered (4.8.1)")] = None
    output_filter: Annotated[bool | None, Meta(description="whether responses are filtered (4.8.1)")] = None
    names: Annotated[list[str], Meta(description="names of the safety systems, if known")] = []


class SutClock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Placement of the load generator, and clock synchronisation (IETF 4.7)."""

    placement: Annotated[
        Literal["same machine", "remote"] | None,
        Meta(description="place of load generator and SUT (4.7)"),
    ] = None
    synchronization: Annotated[str | None, Meta(description="method, if remote: NTP, PTP")] = None
    accuracy: Annotated[str | None, Meta(description="estimated accuracy, if remote: 2ms")] = None


class Sut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """System under test (`[sut]`). None: not declared."""

    boundary: Annotated[Boundary | None, Meta(description="boundary of the SUT (4.1)")] = None
    model: Annotated[str | None, Meta(description="name, version, quantization of the model (5.1.2.3)")] = (
        None
    )
    software: Annotated[str | None, Meta(description="engine or gateway, and version (C.1)")] = None
    protocol: Annotated[str | None, Meta(description="SSE, WebSocket or gRPC (4.6.1)")] = None
    chunking: Annotated[
        Literal["one token per chunk", "several tokens per chunk"] | None,
        Meta(description="tokens per chunk; the observed number is reported, too (4.6.2)"),
    ] = None
    prefix_cache: Annotated[bool | None, Meta(description="whether the prefix cache is on (5.1.2.3)")] = None
    max_batch: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="maximum number of running requests (5.2.4.2)"),
    ] = None
    hardware: Hardware = Hardware()
    tokenizer: SutTokenizer = SutTokenizer()
    guardrails: Guardrails = Guardrails()
    clock: SutClock = SutClock()
    notes: Annotated[list[str], Meta(description="further remarks for the reader")] = []
    start: Annotated[
        list[str],
        Meta(description="command that starts the server; its model load is measured (4.5.3)"),
    ] = []


class TargetArm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of the SUT to compare: its differences from the target (`[arms.NAME]`)."""

    about: Annotated[str, Meta(description="description for the report")] = ""
    url: Annotated[str | None, Meta(description="another URL")] = None
    headers: Annotated[dict[str, str], Meta(description="additional header fields of each request")] = {}
    body: Annotated[dict[str, msgspec.Raw], Meta(description="additional members of each body")] = {}
    apply: Annotated[
        list[str], Meta(description="command that switches the SUT; run before the arm's load")
    ] = []

    @property
    def switches(self) -> bool:
        """Whether a command switches the server, so that arms cannot alternate by request."""
        return bool(self.apply)


class BenchTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Target server (`[target]`). The API key is in the environment variable that `key_env` names."""

    url: Annotated[str, Meta(description="http://host:port[/prefix]")]
    endpoint: Annotated[
        Literal["", "chat.completions", "completions", "responses"],
        Meta(
            description="API endpoint; default: chat.completions with a tokenizer, else completions,"
            " which accepts token ids as prompts"
        ),
    ] = ""
    model: Annotated[str | None, Meta(description="model name; default: the server's only model")] = None
    server: Annotated[
        Literal["auto", "openai", "vllm", "sglang"],
        Meta(description="server type, for vendor-specific fields"),
    ] = "auto"
    tokenizer: Annotated[
        str | None, Meta(description="tokenizer of the prompts: folder, file or tiktoken:NAME")
    ] = None
    headers: Annotated[dict[str, str], Meta(description="header fields of each request")] = {}
    body: Annotated[dict[str, msgspec.Raw], Meta(description="members of each body")] = {}
    key_env: Annotated[str | None, Meta(description="environment variable of the API key")] = None
    ca: Annotated[str | None, Meta(description="file with the trusted CA (PEM)")] = None
    metrics: Annotated[str | None, Meta(description="URL of the server's metrics, or none")] = None
    processes: Annotated[int, Meta(ge=1, le=256, description="number of sending processes")] = 1

    @property
    def counting(self) -> dict[str, Any]:
        """Arguments of `make_load` that say how prompts are counted."""
        return {"tokenizer": self.tokenizer, "chat": self.endpoint == "chat.completions"}

    def __post_init__(self) -> None:
        if not self.endpoint:
            endpoint = "completions" if self.tokenizer is None else "chat.completions"
            msgspec.structs.force_setattr(self, "endpoint", endpoint)


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
        # A header may hold a key, so a table is not shown.
        got = "" if isinstance(value, dict) or path.startswith(".headers") else f", got {shown(value)}"
        return path, f"expected {_expected(kind)}{got}", None
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
