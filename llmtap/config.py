"""Puts the rooms' options together: defaults, then the config file, then the environment, then flags.

One TOML file, one table per room (`[relay]`, `[meter]`, `[log]`), and one for each class of tenants
(`[slo.NAME]`). Every key is an environment variable too: `relay.idle_timeout` is `LLMTAP_RELAY_IDLE_TIMEOUT`,
`slo.gold.target` is `LLMTAP_SLO_GOLD_TARGET`. A value that does not fit is a ConfigError that names the key,
where it was set, and the nearest key there is.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, get_args, get_origin, get_type_hints

import msgspec

from llmtap.capture.options import CaptureOptions
from llmtap.channel.experiment import ExperimentOptions
from llmtap.errors import ConfigError
from llmtap.export.options import STANDARD_ENV, OtlpOptions
from llmtap.log import LogSetup
from llmtap.meter.options import CostOptions, MeterOptions, TenantOptions
from llmtap.metrics.slo import SloOptions, check_slos
from llmtap.units import read_special
from llmtap.user_files import decode_json, read_toml
from llmtap.vantage.relay.options import RelayOptions

__all__ = ["Settings", "fingerprint", "keys", "load_settings"]

ENV_PREFIX: Final = "LLMTAP_"
SLO: Final = "slo"
"""The table whose keys are tables."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set, by room."""

    relay: RelayOptions = RelayOptions()
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
    "relay": RelayOptions,
    "meter": MeterOptions,
    "tenants": TenantOptions,
    "cost": CostOptions,
    "experiment": ExperimentOptions,
    "capture": CaptureOptions,
    "otlp": OtlpOptions,
    "log": LogSetup,
}


def keys() -> dict[str, str]:
    """Every key as `table.name`, with its help."""
    found = {}
    for table, kind in (*_TABLES.items(), (f"{SLO}.NAME", SloOptions)):
        for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]
            meta = field.type
            schema = (getattr(meta, "extra_json_schema", None) or {}) if meta else {}
            found[f"{table}.{field.name}"] = schema.get("description", "")
    return found


def load_settings(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Settings:
    """Settings from a file (or none), the environment, and flags as `{"relay.listen": ...}`.

    Raises ConfigError.
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
    slos = {name: _convert_class(name, content, places) for name, content in classes.items()}
    check_slos(slos)
    return msgspec.structs.replace(_convert({name: tables[name] for name in _TABLES}, places), slo=slos)


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
    """Where a key wants a list or a table, the environment and flags say it in JSON."""
    if text.startswith(("[", "{")):
        try:
            return decode_json(text)
        except msgspec.DecodeError:
            pass
    return text


def _convert(tables: dict[str, dict[str, Any]], places: dict[str, str]) -> Settings:
    try:
        # Not strict: a variable of the environment is text, whatever its key wants.
        return msgspec.convert(tables, Settings, strict=False, dec_hook=read_special)
    except msgspec.ValidationError as exc:
        text = str(exc)
        m = re.search(r"\$\.([a-z_]+\.[a-z_]+)([^`]*)", text)
        key = m[1] + m[2] if m else "?"
        problem = re.sub(r"\s*- at `.*`$", "", text)
        place = places.get(m[1]) if m else None
        hint = None
        if m is not None and not m[2]:
            table, _, name = m[1].partition(".")
            kind = get_type_hints(_TABLES[table]).get(name)
            hint = _choices(kind) or _as_list(kind, tables[table].get(name))
        raise ConfigError(f"{key} ({place})" if place else key, problem, hint) from None


def _choices(kind: Any) -> str | None:
    """What a key with a closed set of values may be; None for others."""
    choices = get_args(kind)
    if not choices or not all(isinstance(choice, str) for choice in choices):
        return None
    return f"one of {', '.join(choices)}"


def _as_list(kind: Any, value: object) -> str | None:
    """How a list is written, for who wrote one name, or several with commas; None for other keys."""
    if get_origin(kind) not in (list, tuple) or not isinstance(value, str):
        return None
    shown = '[{"key": "value"}]'
    if get_args(kind)[0] is str:
        items = [item.strip(" \"'") for item in value.strip("[] ").split(",")]
        shown = msgspec.json.encode([item for item in items if item]).decode()
    return f"a list is written in JSON: {shown}"


def _names_a_table(table: str, place: str) -> ConfigError:
    """What a key's name lacks: `LLMTAP_CAPTURE` names none."""
    if table.startswith(SLO):
        first = f"{table.partition('.')[2] or 'NAME'}_objectives"
        table = SLO
    else:
        first = _TABLES[table].__struct_fields__[0]
    variable = f"{ENV_PREFIX}{table}_{first}".upper()
    return ConfigError(place, f"names the table {table!r}, and no key in it", f"did you mean {variable}?")


def _convert_class(name: str, content: dict[str, Any], places: dict[str, str]) -> SloOptions:
    try:
        return msgspec.convert(content, SloOptions, strict=False)
    except msgspec.ValidationError as exc:
        text = str(exc)
        m = re.search(r"`\$\.([a-z_]+)", text)
        key = f"{SLO}.{name}" + (f".{m[1]}" if m else "")
        place = places.get(key)
        problem = re.sub(r"\s*- at `.*`$", "", text)
        hint = _as_list(get_type_hints(SloOptions).get(m[1]), content.get(m[1])) if m else None
        raise ConfigError(f"{key} ({place})" if place else key, problem, hint) from None


def fingerprint(settings: Settings) -> str:
    """A short hash of all settings, to tell two configurations apart in logs and captures."""
    import hashlib

    from llmtap.units import encode_special

    text = msgspec.json.encode(settings, enc_hook=encode_special, order="sorted")
    return hashlib.sha256(text).hexdigest()[:12]
