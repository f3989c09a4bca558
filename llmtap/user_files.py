"""Read files of users with limits on size and nesting, find the lines of TOML keys, and decode JSON.

`open_private` creates files that only their owner can read. `read_file` returns bytes. `read_toml` returns a
dict and raises ConfigError with the file, and the line if it is known. `key_lines` returns the line of each
key, for error messages. `decode_json` decodes bytes that the caller has read; it raises msgspec.DecodeError
even for JSON that is nested too deeply.
"""

import os
import re
import tomllib
from pathlib import Path
from typing import Any, Final, TypeVar, overload

import msgspec

from llmtap.errors import ConfigError

TOML_BYTES_MAX: Final = 512 << 10
"""Maximum size of a TOML file: `tomllib` takes 2.4 s for 1 MB of table headers."""
T = TypeVar("T")
DEPTH_MAX: Final = 64
"""Maximum depth of nesting in TOML: `tomllib` takes quadratic time for a key of many parts, and its recursion
for nested lists can exceed the limit of Python."""

_TOO_DEEP: Final = "is nested too deeply"
_READ_HINT: Final = "check the path and its permissions"
# Tokens of TOML that `_check_depth` needs. Strings and comments are matched only to skip them. A dot joins
# two parts of a key; each other token (`=`, `,`, a bracket or a line end) ends the key.
_TOML_TOKEN: Final = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*|[.=,\n\[\]{}]', re.DOTALL
)


def open_private(path: str, flags: int) -> int:
    """Opener for `open`: a new file has mode 0600, because it holds captured requests or their measurements.

    An existing file keeps its mode.
    """
    return os.open(path, flags, 0o600)


@overload
def decode_json(data: bytes | str) -> Any: ...
@overload
def decode_json(data: bytes | str, kind: type[T]) -> T: ...
def decode_json(data: bytes | str, kind: Any = Any) -> Any:
    """Return the JSON value in `data`. Raises msgspec.DecodeError (a ValueError), even for deep nesting."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("the JSON has more levels of lists and objects than can be read") from None


def read_file(path: Path, place: str, bytes_max: int) -> bytes:
    """Return the content of a file of at most `bytes_max` bytes. Raises ConfigError that names `place`."""
    try:
        with path.open("rb") as file:
            raw = file.read(bytes_max + 1)
    except OSError as exc:
        raise ConfigError(place, f"{path} cannot be read: {exc.strerror}", _READ_HINT) from None
    if len(raw) > bytes_max:
        raise ConfigError(
            place, f"{path} is longer than {bytes_max >> 10:,} KiB", "check whether this is the right file"
        )
    return raw


def read_toml(path: Path, place: str | None = None) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises ConfigError with the file, and the line if nesting is too deep. `place`: option to name if the file
    cannot be read.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(TOML_BYTES_MAX + 1)
    except OSError as exc:
        problem = f"{path} cannot be read" if place else "cannot be read"
        raise ConfigError(place or str(path), f"{problem}: {exc.strerror}", _READ_HINT) from None
    if len(raw) > TOML_BYTES_MAX:
        raise ConfigError(
            str(path), f"is longer than {TOML_BYTES_MAX >> 10} KiB", "check whether this is the right file"
        )
    try:
        # Decode like tomllib.load, which accepts only an open file. `utf-8-sig` also skips the byte order
        # mark with which editors on Windows begin a UTF-8 file.
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
        _check_depth(text, path)
        return tomllib.loads(text)
    except ValueError as exc:  # TOMLDecodeError, UnicodeDecodeError, or an integer with too many digits.
        problem = str(exc).partition(";")[0]
        hint = "check the syntax at this place, such as quotes and brackets"
        raise ConfigError(str(path), f"is not TOML: {problem}", hint) from None


_TOML_KEY: Final = re.compile(r"^[ \t]*(?:\[{1,2}([^\]\n]+)\]|([\w.\-\"' \t]+?)[ \t]*=)", re.MULTILINE)


def key_lines(path: Path) -> dict[str, int]:
    """Return the line number where each key and table of a TOML file first occurs, by its full name.

    The tables of an array are numbered: `experiment.arms[0].name`.
    """
    text = path.read_bytes().decode(errors="replace")
    lines: dict[str, int] = {}
    arrays: dict[str, int] = {}
    table = ""
    for match in _TOML_KEY.finditer(text):
        name = re.sub(r"[\"' \t]", "", match[1] or match[2])
        if match[1]:
            line = text.count("\n", 0, match.start()) + 1
            if match[0].lstrip().startswith("[["):
                lines.setdefault(name, line)
                arrays[name] = arrays.get(name, -1) + 1
                name = f"{name}[{arrays[name]}]"
            elif (array := name.rpartition(".")[0]) in arrays:
                name = f"{array}[{arrays[array]}]{name.removeprefix(array)}"
            table = name
        elif table:
            name = f"{table}.{name}"
        lines.setdefault(name, text.count("\n", 0, match.start()) + 1)
    return lines


def _check_depth(text: str, path: Path) -> None:
    depth = parts = 0
    for match in _TOML_TOKEN.finditer(text):
        token = match[0]
        if token == ".":
            parts += 1
        elif token in "=,\n[]{}":
            parts = 0
            # Invalid TOML can have a closing bracket without an opening one: keep the depth at 0 or above.
            depth = depth + 1 if token in "[{" else max(0, depth - 1) if token in "]}" else depth
        if depth > DEPTH_MAX or parts >= DEPTH_MAX:
            line = text.count("\n", 0, match.start()) + 1
            raise ConfigError(f"{path}, line {line}", _TOO_DEEP, f"use at most {DEPTH_MAX} levels")
