"""Read the settings of `llmtap proxy`, `meter` and `watch` from all their sources, and check them.

Sources, each before those that it overrides: flags, `LLMTAP_` environment variables, the TOML file, two
`OTEL_` variables, defaults. The file has a table for each field of `Settings` (`[relay]`, `[tenants]`) and
for each class of tenants (`[slo.NAME]`). `relay.idle_timeout` is also `LLMTAP_RELAY_IDLE_TIMEOUT`,
`slo.gold.target` is `LLMTAP_SLO_GOLD_TARGET`. The result is a `Settings`, or a ConfigError with all mistakes
and their places. `llmtap slo generate` uses the objectives of the same file. The other commands (`replay`,
`sim`, `bench`) have options of their own.
"""

import difflib
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from llmtap.capture.options import CaptureOptions
from llmtap.channel.experiment import ExperimentOptions
from llmtap.errors import ConfigError, failures, raise_all
from llmtap.export.options import STANDARD_ENV, OtlpOptions
from llmtap.log import LogSetup
from llmtap.meter.options import CostOptions, MeterOptions, TenantOptions
from llmtap.metrics.slo import SloOptions, check_slos
from llmtap.settings import in_words
from llmtap.units import encode_special, read_special
from llmtap.user_files import decode_json, key_lines, read_toml
from llmtap.vantage.passive.options import WatchOptions
from llmtap.vantage.relay.options import RelayOptions

T = TypeVar("T", bound=msgspec.Struct)
ENV_PREFIX: Final = "LLMTAP_"
SLO: Final = "slo"
"""The table whose keys are tables."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of llmtap; one field for each table of the configuration file."""

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


class Mistakes:
    """All mistakes in one configuration, each with the place where its key was set."""

    def __init__(self) -> None:
        self.places: dict[str, str] = {}
        """Where each key was set, and where each table begins."""
        self.found: list[ConfigError] = []
        self._wrong: set[str] = set()

    def set_place(self, key: str, place: str) -> None:
        self.places = {n: at for n, at in self.places.items() if not n.startswith((f"{key}.", f"{key}["))}
        self.places[key] = place

    def add(self, errors: Iterable[ConfigError]) -> None:
        """Add mistakes, without those that follow from the missing value of a wrong key."""
        wrong: set[str] = set()
        for error in errors:
            if not any(_names(f"{error.place} {error.problem}", key) for key in self._wrong):
                self.found.append(self._placed(error))
            if key := _KEY.match(error.place):
                wrong.add(key[0])
        self._wrong |= wrong

    def _placed(self, error: ConfigError) -> ConfigError:
        name = error.place
        while name and name not in self.places:
            name = name[: max(name.rfind("."), name.rfind("["), 0)]
        if not name:
            return error
        return ConfigError(f"{error.place} ({self.places[name]})", error.problem, error.hint)


_KEY: Final = re.compile(rf"{SLO}\.[^.\s]+\.\w+|\w+\.\w+")


def _names(text: str, key: str) -> bool:
    return re.search(rf"\b{re.escape(key)}\b", text) is not None


class Loaded(NamedTuple):
    """Settings and their mistakes; wrong keys have their defaults."""

    settings: Settings
    mistakes: Mistakes

    def checked(self, *problems: Iterable[ConfigError]) -> Settings:
        """Return the settings. Raises one ConfigError for these problems and the mistakes of loading."""
        for errors in problems:
            self.mistakes.add(errors)
        raise_all(self.mistakes.found)
        return self.settings


def load_settings(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Settings:
    """Return settings from a file (or none), the environment, and flags as `{"relay.listen": ...}`.

    Raises ConfigError, which lists all mistakes: the key, the place where it was set, and the nearest key.
    """
    return read_settings(file, environ, flags).checked()


def read_settings(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Loaded:
    """Return what `load_settings` does, with all mistakes. Raises ConfigError for a file that is not TOML."""
    tables: dict[str, dict[str, Any]] = {name: {} for name in _TABLES}
    classes: dict[str, dict[str, Any]] = {}
    mistakes = Mistakes()

    def put(key: str, value: Any, place: str) -> None:
        table, _, name = key.rpartition(".")
        kind = _TABLES.get(table)
        if table.startswith(f"{SLO}."):
            kind, tables[table] = SloOptions, classes.setdefault(table.removeprefix(f"{SLO}."), {})
        if kind is not None and name in kind.__struct_fields__:
            tables[table][name] = value
            mistakes.set_place(key, place)
        elif name:
            hint = _nearest_key(key, _all_keys(classes))
            mistakes.found.append(ConfigError(place, f"there is no key {key!r}", hint))
        else:
            mistakes.found.append(_names_a_table(table, place))

    for variable, key in STANDARD_ENV.items():
        if environ.get(variable):
            put(key, environ[variable], f"environment variable {variable}")
    if file is not None:
        content = read_toml(file)
        places = {name: f"{file}, line {line}" for name, line in key_lines(file).items()}
        for key, value in _keys_of(content, places, file, mistakes):
            put(key, value, places.get(key, str(file)))
        mistakes.places |= places
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
    slos = {name: _convert(f"{SLO}.{name}", SloOptions, told, mistakes) for name, told in classes.items()}
    known = {name: slo for name, slo in slos.items() if slo is not None}
    mistakes.add(failures(check_slos, known))
    made: dict[str, Any] = {
        name: _convert(name, kind, tables[name], mistakes) or kind() for name, kind in _TABLES.items()
    }
    return Loaded(Settings(**made, slo=known), mistakes)


def _keys_of(
    content: dict[str, Any], places: Mapping[str, str], file: Path, mistakes: Mistakes
) -> Iterator[tuple[str, Any]]:
    """Yield each key of a file with its value."""

    def report(name: str, problem: str, hint: str | None) -> None:
        mistakes.found.append(ConfigError(places.get(name, str(file)), problem, hint))

    for table, keys_of in content.items():
        if not isinstance(keys_of, dict):
            report(table, f"{table!r} is outside a table", f"tables: {', '.join(_TABLES)}")
        elif table == SLO:
            for name, about in keys_of.items():
                if isinstance(about, dict):
                    yield from ((f"{SLO}.{name}.{key}", value) for key, value in about.items())
                else:
                    hint = "write [slo.default] before it"
                    report(f"{SLO}.{name}", f"slo.{name} is outside a class of tenants", hint)
        elif table not in _TABLES:
            report(table, f"there is no table {table!r}", _nearest(table, (*_TABLES, SLO)))
        else:
            for name, value in keys_of.items():
                yield f"{table}.{name}", value.isoformat() if isinstance(value, datetime) else value


def _nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the hint that names the nearest key or table, if one is near enough to be meant."""
    near = difflib.get_close_matches(name, known, 1, 0.8)
    return f"did you mean {near[0]!r}?" if near else None


def _nearest_key(key: str, known: list[str]) -> str | None:
    """Return the hint for the nearest key of the same table, or the same name in another table."""
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


def _convert(table: str, kind: type[T], values: dict[str, Any], mistakes: Mistakes) -> T | None:
    """Return the options without the keys that are wrong; None if a key that has no default is missing."""
    types = get_type_hints(kind, include_extras=True)
    good = dict(values)
    for name, value in values.items():
        if wrong := list(_wrong_values(value, types[name], f"{table}.{name}")):
            mistakes.add(wrong)
            del good[name]
    required = {field.name for field in msgspec.structs.fields(kind) if field.required}
    mistakes.add(_missing(table, name) for name in required - values.keys())
    if required - good.keys():
        return None
    while True:
        try:
            return msgspec.convert(good, kind, strict=False, dec_hook=read_special)
        except ConfigError as exc:
            errors = list(exc.each())
        mistakes.add(errors)
        wrong_keys = [
            name for name in good if any(_names(error.place, f"{table}.{name}") for error in errors)
        ]
        if not wrong_keys:
            return None
        for name in wrong_keys:  # the next check is of the other keys
            del good[name]


def _missing(table: str, name: str) -> ConfigError:
    return ConfigError(table, f"the key `{name}` is missing")


def _wrong_values(content: Any, wanted: Any, place: str) -> Iterator[ConfigError]:
    """Yield the mistakes in a value: in each item of a list and in each key of a table."""
    whole = wanted
    while get_origin(wanted) is Annotated:
        wanted = get_args(wanted)[0]
    inside: list[tuple[Any, Any, str]] = []
    unknown: list[ConfigError] = []
    if isinstance(content, list | tuple) and get_origin(wanted) in (list, tuple):
        inside = [(item, get_args(wanted)[0], f"{place}[{i}]") for i, item in enumerate(content)]
    elif isinstance(content, dict) and isinstance(wanted, type) and issubclass(wanted, msgspec.Struct):
        types = get_type_hints(wanted, include_extras=True)
        inside = [(value, types[key], f"{place}.{key}") for key, value in content.items() if key in types]
        unknown = [
            ConfigError(place, f"there is no key `{key}`", _nearest(key, types))
            for key in content
            if key not in types
        ]
        required = [field.name for field in msgspec.structs.fields(wanted) if field.required]
        unknown += [_missing(place, name) for name in required if name not in content]
    found = [*unknown, *(error for part in inside for error in _wrong_values(*part))]
    if found:
        yield from found
        return
    # Not strict: an environment variable is always text, also for a number.
    try:
        msgspec.convert(content, whole, strict=False, dec_hook=read_special)
    except msgspec.ValidationError as exc:
        path = re.search(r"`\$(.*)`$", str(exc))
        hint = None if path else _choices(wanted) or _as_list(wanted, content)
        yield ConfigError(place + (path[1] if path else ""), in_words(exc), hint)
    except ConfigError as exc:
        yield from exc.each()


def _choices(kind: Any) -> str | None:
    """Return the hint for a key with a closed set of values."""
    choices = get_args(kind)
    if not choices or not all(isinstance(choice, str) for choice in choices):
        return None
    return f"one of {', '.join(choices)}"


def _as_list(kind: Any, value: object) -> str | None:
    """Return the hint that a list is written in JSON, with the given names as the example."""
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
    return ConfigError(place, f"names the table {table!r} without a key", f"did you mean {variable}?")


def fingerprint(settings: Settings) -> str:
    """Return a short hash of all settings, to tell two configurations apart in logs and captures."""
    text = msgspec.json.encode(settings, enc_hook=encode_special, order="sorted")
    return hashlib.sha256(text).hexdigest()[:12]
