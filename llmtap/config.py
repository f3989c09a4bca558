"""Load all settings: defaults, configuration file, environment, flags.

A TOML file has a table for each package (`[relay]`, `[meter]`, `[log]`), and for each class of tenants
(`[slo.NAME]`). Every key is an environment variable too: `relay.idle_timeout` is `LLMTAP_RELAY_IDLE_TIMEOUT`,
`slo.gold.target` is `LLMTAP_SLO_GOLD_TARGET`.
"""

import difflib
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

from llmtap.capture.options import CaptureOptions
from llmtap.channel.experiment import ExperimentOptions
from llmtap.errors import ConfigError, raise_all
from llmtap.export.options import STANDARD_ENV, OtlpOptions
from llmtap.log import LogSetup
from llmtap.meter.options import CostOptions, MeterOptions, TenantOptions
from llmtap.metrics.slo import SloOptions, check_slos
from llmtap.units import encode_special, read_special
from llmtap.user_files import decode_json, key_lines, read_toml
from llmtap.vantage.passive.options import WatchOptions
from llmtap.vantage.relay.options import RelayOptions

__all__ = ["Loaded", "Settings", "fingerprint", "keys", "load_settings", "placed", "read_settings"]

T = TypeVar("T", bound=msgspec.Struct)
ENV_PREFIX: Final = "LLMTAP_"
SLO: Final = "slo"
"""The table whose keys are tables."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set."""

    relay: RelayOptions = RelayOptions()
    watch: WatchOptions = WatchOptions()
    meter: MeterOptions = MeterOptions()
    tenants: TenantOptions = TenantOptions()
    slo: dict[str, SloOptions] = {}
    """Classes of tenants, by name: `[slo.NAME]`."""
    cost: CostOptions = CostOptions()
    experiment: ExperimentOptions = ExperimentOptions()
    capture: CaptureOptions = CaptureOptions()
    otlp: OtlpOptions = OtlpOptions()
    log: LogSetup = LogSetup()


_TABLES: Final[dict[str, type[msgspec.Struct]]] = {
    field.name: field.type for field in msgspec.structs.fields(Settings) if field.name != SLO
}


def keys() -> dict[str, str]:
    """Return every key as `table.name`, with its help."""
    found = {}
    for table, kind in (*_TABLES.items(), (f"{SLO}.NAME", SloOptions)):
        for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]
            meta = field.type
            schema = (getattr(meta, "extra_json_schema", None) or {}) if meta else {}
            found[f"{table}.{field.name}"] = schema.get("description", "")
    return found


class Loaded(NamedTuple):
    """Settings, where each key was set, and the mistakes, whose keys keep their defaults."""

    settings: Settings
    places: dict[str, str]
    problems: list[ConfigError]


def load_settings(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Settings:
    """Return settings from a file (or none), the environment, and flags as `{"relay.listen": ...}`.

    Raises ConfigError, which lists all mistakes: the key, the place where it was set, and the nearest key.
    """
    loaded = read_settings(file, environ, flags)
    raise_all(loaded.problems)
    return loaded.settings


def read_settings(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Loaded:
    """Return what `load_settings` does, with all mistakes. Raises ConfigError for a file that is not TOML."""
    tables: dict[str, dict[str, Any]] = {name: {} for name in _TABLES}
    classes: dict[str, dict[str, Any]] = {}
    places: dict[str, str] = {}
    problems: list[ConfigError] = []

    def put(key: str, value: Any, place: str) -> None:
        table, _, name = key.rpartition(".")
        kind = _TABLES.get(table)
        if table.startswith(f"{SLO}."):
            kind, tables[table] = SloOptions, classes.setdefault(table.removeprefix(f"{SLO}."), {})
        if kind is not None and name in kind.__struct_fields__:
            tables[table][name] = value
            places[key] = place
        elif name:
            hint = _nearest_key(key, _all_keys(classes))
            problems.append(ConfigError(place, f"there is no key {key!r}", hint))
        else:
            problems.append(_names_a_table(table, place))

    for variable, key in STANDARD_ENV.items():
        if environ.get(variable):
            put(key, environ[variable], f"environment variable {variable}")
    if file is not None:
        for key, value, line in _in_file(file, problems):
            put(key, value, f"{file}, line {line}" if line else str(file))
    for variable, value in environ.items():
        if variable.startswith(ENV_PREFIX):
            table, _, name = variable.removeprefix(ENV_PREFIX).lower().partition("_")
            if table in _TABLES:
                put(f"{table}.{name}", _from_json(value), f"environment variable {variable}")
            elif table == SLO:
                key = f"{SLO}.{'.'.join(name.rsplit('_', 1))}"
                put(key, _from_json(value), f"environment variable {variable}")
    for key, value in flags.items():
        if value is not None:
            put(key, _from_json(value) if isinstance(value, str) else value, "command line")
    slos = {
        name: slo
        for name, content in classes.items()
        if (slo := _convert(f"{SLO}.{name}", SloOptions, content, places, problems)) is not None
    }
    try:
        check_slos(slos)
    except ConfigError as exc:
        problems.append(exc)
    made: dict[str, Any] = {
        name: _convert(name, kind, tables[name], places, problems) or kind() for name, kind in _TABLES.items()
    }
    return Loaded(Settings(**made, slo=slos), places, problems)


def _in_file(file: Path, problems: list[ConfigError]) -> Iterator[tuple[str, Any, int]]:
    """Yield each key, its value and its line (0: not found)."""
    tables = read_toml(file)
    lines = key_lines(file)

    def report(name: str, problem: str, hint: str | None) -> None:
        place = f"{file}, line {lines[name]}" if name in lines else str(file)
        problems.append(ConfigError(place, problem, hint))

    for table, content in tables.items():
        if not isinstance(content, dict):
            report(table, f"{table!r} stands outside a table", f"tables: {', '.join(_TABLES)}")
        elif table == SLO:
            for name, about in content.items():
                if not isinstance(about, dict):
                    hint = "write [slo.default] before it"
                    report(f"{SLO}.{name}", f"slo.{name} stands outside a class", hint)
                    continue
                for key, value in about.items():
                    full = f"{SLO}.{name}.{key}"
                    yield full, value, lines.get(full, 0)
        elif table not in _TABLES:
            report(table, f"there is no table {table!r}", _nearest(table, (*_TABLES, SLO)))
        else:
            for name, value in content.items():
                full = f"{table}.{name}"
                yield full, value.isoformat() if isinstance(value, datetime) else value, lines.get(full, 0)


def _nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the hint that names the nearest key or table, if one is near enough to be meant."""
    near = difflib.get_close_matches(name, known, 1, 0.8)
    return f"did you mean {near[0]!r}?" if near else None


def _nearest_key(key: str, known: list[str]) -> str | None:
    """The same for a key: in its own table, or of the same name in another one."""
    table, _, name = key.rpartition(".")
    own = _nearest(name, [k.removeprefix(f"{table}.") for k in known if k.rpartition(".")[0] == table])
    if own is not None:
        return own.replace("'", f"'{table}.", 1)
    return next((f"did you mean {k!r}?" for k in known if k.rpartition(".")[2] == name), None)


def _all_keys(classes: Iterable[str]) -> list[str]:
    kinds: dict[str, type[msgspec.Struct]] = {**_TABLES, **{f"{SLO}.{name}": SloOptions for name in classes}}
    return [f"{table}.{name}" for table, kind in kinds.items() for name in kind.__struct_fields__]


def _from_json(text: str) -> Any:
    """Read lists and tables, which the environment and flags write in JSON."""
    if text.startswith(("[", "{")):
        try:
            return decode_json(text)
        except msgspec.DecodeError:
            pass
    return text


def _convert(
    table: str, kind: type[T], values: dict[str, Any], places: dict[str, str], problems: list[ConfigError]
) -> T | None:
    """Return the options without those that do not fit; None if that makes no whole."""
    types = get_type_hints(kind, include_extras=True)
    good: dict[str, Any] = {}

    def converted(content: Any, wanted: Any, key: str) -> Any:
        # Not strict: a variable of the environment is text, whatever its key wants.
        try:
            return msgspec.convert(content, wanted, strict=False, dec_hook=read_special)
        except msgspec.ValidationError as exc:
            path = re.search(r"`\$(.*)`$", str(exc))
            hint = None if path else _choices(plain.get(key)) or _as_list(plain.get(key), content)
            error = ConfigError(key + (path[1] if path else ""), _in_words(str(exc)), hint)
        except ConfigError as exc:
            error = exc
        problems.append(placed(error, places, key))
        return None

    plain = {f"{table}.{name}": wanted for name, wanted in get_type_hints(kind).items()}
    for name, value in values.items():
        before = len(problems)
        converted(value, types[name], f"{table}.{name}")
        if len(problems) == before:
            good[name] = value
    before = len(problems)
    whole = cast("T | None", converted(good, kind, table))
    if len(good) < len(values):
        del problems[before:]  # it may lack what was wrong
    return whole


def placed(error: ConfigError, places: Mapping[str, str], key: str = "") -> ConfigError:
    """Return the error with the place where its key, or `key`, was set."""
    place = places.get(error.place, places.get(key))
    return error if place is None else ConfigError(f"{error.place} ({place})", error.problem, error.hint)


_KINDS: Final = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "array": "a list",
    "object": "a table", "null": "nothing",
}  # fmt: skip
_BOUNDS: Final = {" >= ": " of at least ", " <= ": " of at most ", " > ": " above ", " < ": " below "}


def _in_words(text: str) -> str:
    """Return msgspec's message in words of this project."""
    text = re.sub(r"\s*- at `.*`$", "", text)
    text = text.replace("Object contains unknown field ", "there is no key ")
    text = re.sub(r"Object missing required field (`.*?`)", r"the key \1 is missing", text)
    text = text.replace("Invalid enum value ", "unknown value ")
    for bound, words in _BOUNDS.items():
        text = text.replace(bound, words)
    if text.startswith("Expected"):
        text = text.replace(" | null`", "`")  # a key that can be left out
        text = re.sub(
            r"`([a-z |]+)`", lambda m: " or ".join(_KINDS.get(kind, kind) for kind in m[1].split(" | ")), text
        )
    return text[0].lower() + text[1:]


def _choices(kind: Any) -> str | None:
    """Return the hint for a key with a closed set of values."""
    choices = get_args(kind)
    if not choices or not all(isinstance(choice, str) for choice in choices):
        return None
    return f"one of {', '.join(choices)}"


def _as_list(kind: Any, value: object) -> str | None:
    """Return the hint how to write a list, for one name, or several with commas."""
    if get_origin(kind) not in (list, tuple) or not isinstance(value, str):
        return None
    shown = '[{"key": "value"}]'
    if get_args(kind)[0] is str:
        items = [item.strip(" \"'") for item in value.strip("[] ").split(",")]
        shown = msgspec.json.encode([item for item in items if item]).decode()
    return f"a list is written in JSON: {shown}"


def _names_a_table(table: str, place: str) -> ConfigError:
    """Return the error for a table without a key, such as `LLMTAP_CAPTURE`."""
    if table.startswith(SLO):
        first = f"{table.partition('.')[2] or 'NAME'}_objectives"
        table = SLO
    else:
        first = _TABLES[table].__struct_fields__[0]
    variable = f"{ENV_PREFIX}{table}_{first}".upper()
    return ConfigError(place, f"names the table {table!r}, and no key in it", f"did you mean {variable}?")


def fingerprint(settings: Settings) -> str:
    """Return a short hash of all settings, to tell two configurations apart in logs and captures."""
    text = msgspec.json.encode(settings, enc_hook=encode_special, order="sorted")
    return hashlib.sha256(text).hexdigest()[:12]
