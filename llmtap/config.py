"""Puts the rooms' options together: defaults, then the config file, then the environment, then flags.

One TOML file, one table per room (`[relay]`, `[meter]`, `[log]`). Every key is an environment variable
too: `relay.idle_timeout` is `LLMTAP_RELAY_IDLE_TIMEOUT`. A value that does not fit is a ConfigError that
names the key, where it was set, and the nearest key there is.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from llmtap.errors import ConfigError
from llmtap.log import LogSetup
from llmtap.meter.options import MeterOptions
from llmtap.relay.options import RelayOptions
from llmtap.units import Bytes, Duration, parse_bytes, parse_duration_ns

__all__ = ["Settings", "fingerprint", "keys", "load_settings"]

ENV_PREFIX: Final = "LLMTAP_"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set, by room."""

    relay: RelayOptions = RelayOptions()
    meter: MeterOptions = MeterOptions()
    log: LogSetup = LogSetup()


_TABLES: Final[dict[str, type[msgspec.Struct]]] = {
    "relay": RelayOptions,
    "meter": MeterOptions,
    "log": LogSetup,
}


def keys() -> dict[str, str]:
    """Every key as `table.name`, with its help."""
    found = {}
    for table, kind in _TABLES.items():
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
    places: dict[str, str] = {}

    def put(key: str, value: Any, place: str) -> None:
        table, _, name = key.partition(".")
        if table not in _TABLES or name not in _TABLES[table].__struct_fields__:
            near = difflib.get_close_matches(key, _all_keys(), 1, 0.5)
            raise ConfigError(
                place, f"there is no key {key!r}", f"did you mean {near[0]!r}?" if near else None
            )
        tables[table][name] = value
        places[key] = place

    if file is not None:
        for table, content in _read_toml(file).items():
            if not isinstance(content, dict):
                raise ConfigError(
                    str(file), f"{table!r} stands outside a table", f"tables: {', '.join(_TABLES)}"
                )
            if table not in _TABLES:
                near = difflib.get_close_matches(table, _TABLES, 1, 0.5)
                raise ConfigError(
                    str(file), f"there is no table {table!r}", f"did you mean {near[0]!r}?" if near else None
                )
            for name, value in content.items():
                put(f"{table}.{name}", value, str(file))
    for variable, value in environ.items():
        if variable.startswith(ENV_PREFIX):
            table, _, name = variable.removeprefix(ENV_PREFIX).lower().partition("_")
            if table in _TABLES:
                put(f"{table}.{name}", value, f"environment variable {variable}")
    for key, value in flags.items():
        if value is not None:
            put(key, value, "command line")
    return _convert(tables, places)


def _all_keys() -> list[str]:
    return [f"{table}.{name}" for table, kind in _TABLES.items() for name in kind.__struct_fields__]


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as f:
            return tomllib.load(f)
    except OSError as exc:
        raise ConfigError(str(file), f"cannot be read: {exc.strerror}") from None
    except ValueError as exc:  # TOMLDecodeError, or UnicodeDecodeError: TOML is UTF-8
        raise ConfigError(str(file), f"is not TOML: {exc}") from None


def _from_text(kind: type, value: object) -> object:
    if kind is Duration:
        return Duration(parse_duration_ns(value))
    if kind is Bytes:
        return Bytes(parse_bytes(value))
    raise NotImplementedError(kind.__name__)


def _convert(tables: dict[str, dict[str, Any]], places: dict[str, str]) -> Settings:
    try:
        # Not strict: a variable of the environment is text, whatever its key wants.
        return msgspec.convert(tables, Settings, strict=False, dec_hook=_from_text)
    except msgspec.ValidationError as exc:
        text = str(exc)
        m = re.search(r"\$\.([a-z_.]+)", text)
        key = m[1] if m else "?"
        problem = re.sub(r"\s*- at `.*`$", "", text)
        place = places.get(key)
        raise ConfigError(f"{key} ({place})" if place else key, problem) from None


def fingerprint(settings: Settings) -> str:
    """A short hash of all settings, to tell two configurations apart in logs and captures."""
    import hashlib

    from llmtap.units import encode_special

    text = msgspec.json.encode(settings, enc_hook=encode_special, order="sorted")
    return hashlib.sha256(text).hexdigest()[:12]
