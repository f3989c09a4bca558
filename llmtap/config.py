"""Read the settings of `llmtap proxy`, `meter` and `watch` from all their sources, and check them.

The sources, from the highest to the lowest priority: flags, `LLMTAP_` environment variables, the TOML file,
two `OTEL_` variables, defaults. The file has a table for each field of `Settings` (`[relay]`, `[tenants]`)
and for each class of tenants (`[slo.NAME]`). The variable of the key `relay.idle_timeout` is
`LLMTAP_RELAY_IDLE_TIMEOUT`, that of `slo.gold.target` is `LLMTAP_SLO_GOLD_TARGET`. The result is a
`Settings`, or a ConfigError with all mistakes and their places. `llmtap slo generate` uses the objectives of
the same file. The other commands (`replay`, `sim`, `bench`) have options of their own.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from llmtap.capture.options import CaptureOptions
from llmtap.channel.experiment import ExperimentOptions
from llmtap.errors import ConfigError, errors_of_check, raise_all
from llmtap.export.options import STANDARD_ENV, OtlpOptions
from llmtap.load.own_dialects import DIALECTS, read_tables
from llmtap.log import LogSetup
from llmtap.meter.options import CostOptions, MeterOptions, PairOptions, TenantOptions
from llmtap.metrics.slo import SloOptions, check_slos
from llmtap.options.fields import options_of
from llmtap.options.tables import Mistakes, OptionTables
from llmtap.protocol.dialects.table.declaration import Counts, DialectTable, Rule, VerdictRule
from llmtap.units import encode_special
from llmtap.user_files import read_toml
from llmtap.vantage.passive.options import WatchOptions
from llmtap.vantage.relay.options import RelayOptions

ENV_PREFIX: Final = "LLMTAP_"
SLO: Final = "slo"
"""Name of the table that contains a table for each class of tenants."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of llmtap; one field for each table of the configuration file."""

    relay: RelayOptions = RelayOptions()
    watch: WatchOptions = WatchOptions()
    pair: PairOptions = PairOptions()
    meter: MeterOptions = MeterOptions()
    tenants: TenantOptions = TenantOptions()
    slo: dict[str, SloOptions] = {}
    """Classes of tenants, by name: `[slo.NAME]`."""
    dialects: dict[str, DialectTable] = {}
    """Dialects that the user defines, by name: `[dialects.NAME]`."""
    cost: CostOptions = CostOptions()
    experiment: ExperimentOptions = ExperimentOptions()
    capture: CaptureOptions = CaptureOptions()
    otlp: OtlpOptions = OtlpOptions()
    log: LogSetup = LogSetup()


_SCHEMA: Final[dict[str, Any]] = {
    field.name: field.type for field in msgspec.structs.fields(Settings) if field.name != DIALECTS
}
ALL_TABLES: Final[dict[str, type[msgspec.Struct]]] = {
    **{name: kind for name, kind in _SCHEMA.items() if name != SLO},
    f"{SLO}.NAME": SloOptions,
    f"{DIALECTS}.NAME": DialectTable,
    f"{DIALECTS}.NAME.counts": Counts,
    f"{DIALECTS}.NAME.rules[]": Rule,
    f"{DIALECTS}.NAME.rules[].verdicts[]": VerdictRule,
}
"""The struct of each table of the file, by the table's name. `[]` in a name means each table of a list."""


def help_by_key() -> dict[str, str]:
    """Return the help text of every key, by `table.name`."""
    options = ((table, option) for table, kind in ALL_TABLES.items() for option in options_of(kind))
    return {f"{table}.{option.name}": option.meaning for table, option in options}


class LoadedSettings(NamedTuple):
    """Settings, and the mistakes in their sources. A key with a wrong value has its default."""

    settings: Settings
    mistakes: Mistakes

    def settings_or_raise(self, *problems: Iterable[ConfigError]) -> Settings:
        """Return the settings. Raises one ConfigError with all mistakes in the sources and all `problems`."""
        for errors in problems:
            self.mistakes.add(errors)
        raise_all(self.mistakes.errors)
        return self.settings


def load_settings(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Settings:
    """Return the settings from a file (or None), the environment, and flags such as `{"relay.listen": ...}`.

    Raises one ConfigError, which lists all mistakes: the key, the place where it was set, and a similar key.
    """
    return read_settings(file, environ, flags).settings_or_raise()


def read_settings(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> LoadedSettings:
    """Return the settings and all mistakes: like `load_settings`, but the mistakes are not raised.

    Raises ConfigError only for a file that cannot be read or is not TOML.
    """
    tables = OptionTables(_SCHEMA)
    mistakes = tables.mistakes
    dialects: dict[str, DialectTable] = {}
    for variable, key in STANDARD_ENV.items():
        if environ.get(variable):
            tables.put(key, environ[variable], f"environment variable {variable}")
    if file is not None:
        content = read_toml(file)
        user_dialects = content.pop(DIALECTS, {})
        tables.put_file(file, content)
        dialects = read_tables(user_dialects, mistakes)
    for variable, value in environ.items():
        if variable.startswith(ENV_PREFIX):
            table, _, name = variable.removeprefix(ENV_PREFIX).lower().partition("_")
            if table in _SCHEMA:
                name = ".".join(name.rsplit("_", 1)) if table == SLO else name
                _set_key(tables, f"{table}.{name}", value, f"environment variable {variable}")
    for key, value in flags.items():
        if value is not None:
            _set_key(tables, key, value, "command line")
    structs = tables.read()
    mistakes.add(errors_of_check(check_slos, structs[SLO]))
    return LoadedSettings(Settings(**structs, dialects=dialects), mistakes)


def _set_key(tables: OptionTables, key: str, value: Any, place: str) -> None:
    """Set a key. If it is only a table (`LLMTAP_CAPTURE`), add a mistake with a valid variable as hint."""
    table, _, name = key.rstrip(".").partition(".")
    if table in _SCHEMA and (not name or (table == SLO and "." not in name)):
        first = f"{name or 'NAME'}_objectives" if table == SLO else _SCHEMA[table].__struct_fields__[0]
        variable = f"{ENV_PREFIX}{table}_{first}".upper()
        problem = f"names the table '{key.rstrip('.')}' without a key"
        tables.mistakes.errors.append(ConfigError(place, problem, f"did you mean {variable}?"))
    else:
        tables.put(key, value, place)


def fingerprint(settings: Settings) -> str:
    """Return a short hash of all settings, to distinguish configurations in logs and captures."""
    text = msgspec.json.encode(settings, enc_hook=encode_special, order="sorted")
    return hashlib.sha256(text).hexdigest()[:12]
