"""Read the dialects of the user: `[dialects.NAME]` of the configuration, and files of `--dialect`."""

from pathlib import Path
from typing import Any, Final

from llmtap.errors import ConfigError, raise_all
from llmtap.options.tables import Mistakes
from llmtap.protocol.dialects.table.declaration import DialectTable, decode_table
from llmtap.user_files import key_lines, read_toml

DIALECTS: Final = "dialects"
"""Name of the table that holds one table for each dialect, checked by `decode_table`."""
DIALECTS_MAX: Final = 64
"""Maximum number of a user's dialects. Each is tried on an answer in an unknown dialect, which takes time."""


def read_dialects(file: Path) -> tuple[DialectTable, ...]:
    """Return the dialects of a file: its `[dialects.NAME]` tables, or the whole file as one dialect.

    The file can be a configuration file. Raises ConfigError, which names every invalid key.
    """
    content = read_toml(file, "--dialect")
    mistakes = Mistakes()
    mistakes.places = {name: f"{file}, line {line}" for name, line in key_lines(file).items()}
    tables = content.get(DIALECTS, {str(content.get("name", file.stem)): content})
    dialects = read_tables(tables, mistakes)
    raise_all(mistakes.errors)
    return tuple(dialects.values())


def read_tables(tables: Any, mistakes: Mistakes) -> dict[str, DialectTable]:
    """Return the valid dialects in these tables, by name. Add the errors of invalid tables to `mistakes`."""
    dialects = {}
    if isinstance(tables, dict) and len(tables) > DIALECTS_MAX:
        mistakes.add(
            [
                ConfigError(
                    DIALECTS, f"has {len(tables)} dialects, at most {DIALECTS_MAX} are allowed", "remove some"
                )
            ]
        )
        return {}
    for name, table in (tables if isinstance(tables, dict) else {"": tables}).items():
        if not isinstance(table, dict):
            hint = f'write a line [{DIALECTS}.NAME] before the key, such as [{DIALECTS}."acme.chat"]'
            mistakes.add(
                [
                    ConfigError(
                        f"{DIALECTS}.{name}".rstrip("."), "is a key outside the table of a dialect", hint
                    )
                ]
            )
            continue
        try:
            dialects[name] = decode_table(table, name)
        except ConfigError as exc:
            mistakes.add(exc.all_errors())
    return dialects
