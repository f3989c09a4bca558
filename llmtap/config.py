"""Load all settings: defaults, configuration file, environment, flags.

A TOML file has a table for each package (`[relay]`, `[meter]`, `[log]`), and for each class of tenants
(`[slo.NAME]`). Every key is an environment variable too: `relay.idle_timeout` is `LLMTAP_RELAY_IDLE_TIMEOUT`,
`slo.gold.target` is `LLMTAP_SLO_GOLD_TARGET`.
"""

import difflib
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from llmtap.capture.options import CaptureOptions
from llmtap.channel.experiment import ExperimentOptions
from llmtap.errors import ConfigError
from llmtap.export.options import STANDARD_ENV, OtlpOptions
from llmtap.log import LogSetup
from llmtap.meter.options import CostOptions, MeterOptions, TenantOptions
from llmtap.metrics.slo import SloOptions, check_slos
from llmtap.units import encode_special, read_special
from llmtap.user_files import decode_json, read_toml
from llmtap.vantage.passive.options import WatchOptions
from llmtap.vantage.relay.options import RelayOptions

__all__ = ["Settings", "fingerprint", "keys", "load_settings"]

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


def load_settings(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Settings:
    """Return settings from a file (or none), the environment, and flags as `{"relay.listen": ...}`.

    Raises ConfigError, which names the key, the place where it was set, and the nearest key.
    """
    tables: dict[str, dict[str, Any]] = {name: {} for name in _TABLES}
    classes: dict[str, dict[str, Any]] = {}
    places: dict[str, str] = {}

    def put(key: str, value: Any, place: str) -> None:
        table, _, name = key.rpartition(".")
        kind = _TABLES.get(table)
        if table.startswith(f"{SLO}."):
            kind, tables[table] = SloOptions, classes.setdefault(table.removeprefix(f"{SLO}."), {})
        if kind is None or name not in kind.__struct_fields__:
            if not name:
                raise _names_a_table(table, place)
            near = difflib.get_close_matches(key, _all_keys(classes), 1, 0.5)
            raise ConfigError(
                place, f"there is no key {key!r}", f"did you mean {near[0]!r}?" if near else None
            )
        tables[table][name] = _from_json(value) if isinstance(value, str) and place != str(file) else value
        places[key] = place

    for variable, key in STANDARD_ENV.items():
        if environ.get(variable):
            put(key, environ[variable], f"environment variable {variable}")
    if file is not None:
        for table, content in read_toml(file).items():
            if not isinstance(content, dict):
                raise ConfigError(
                    str(file), f"{table!r} stands outside a table", f"tables: {', '.join(_TABLES)}"
                )
            if table == SLO:
                _put_classes(content, put, str(file))
                continue
            if table not in _TABLES:
                near = difflib.get_close_matches(table, (*_TABLES, SLO), 1, 0.5)
                raise ConfigError(
                    str(file), f"there is no table {table!r}", f"did you mean {near[0]!r}?" if near else None
                )
            for name, value in content.items():
                if isinstance(value, datetime):
                    value = value.isoformat()
                put(f"{table}.{name}", value, str(file))
    for variable, value in environ.items():
        if variable.startswith(ENV_PREFIX):
            table, _, name = variable.removeprefix(ENV_PREFIX).lower().partition("_")
            if table in _TABLES:
                put(f"{table}.{name}", value, f"environment variable {variable}")
            elif table == SLO:
                put(f"{SLO}.{'.'.join(name.rsplit('_', 1))}", value, f"environment variable {variable}")
    for key, value in flags.items():
        if value is not None:
            put(key, value, "command line")
    slos = {name: _convert(f"{SLO}.{name}", SloOptions, content, places) for name, content in classes.items()}
    check_slos(slos)
    made: dict[str, Any] = {
        name: _convert(name, kind, tables[name], places) for name, kind in _TABLES.items()
    }
    return Settings(**made, slo=slos)


def _put_classes(content: dict[str, Any], put: Callable[[str, Any, str], None], place: str) -> None:
    for name, about in content.items():
        if not isinstance(about, dict):
            raise ConfigError(place, f"slo.{name} stands outside a class", "write [slo.default] before it")
        for key, value in about.items():
            put(f"{SLO}.{name}.{key}", value, place)


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


def _convert(table: str, kind: type[T], values: dict[str, Any], places: dict[str, str]) -> T:
    try:
        # Not strict: a variable of the environment is text, whatever its key wants.
        return msgspec.convert(values, kind, strict=False, dec_hook=read_special)
    except msgspec.ValidationError as exc:
        text = str(exc)
        m = re.search(r"`\$\.([a-z_]+)([^`]*)", text)
        key, place, hint = table, None, None
        if m is not None:
            key += f".{m[1]}{m[2]}"
            place = places.get(f"{table}.{m[1]}")
            if not m[2]:
                wanted = get_type_hints(kind).get(m[1])
                hint = _choices(wanted) or _as_list(wanted, values.get(m[1]))
        problem = re.sub(r"\s*- at `.*`$", "", text)
        raise ConfigError(f"{key} ({place})" if place else key, problem, hint) from None


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
