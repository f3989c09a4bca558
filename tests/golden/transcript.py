"""Run commands in this process, and write down what they print and which files they leave."""

import hashlib
import io
import json
import re
import shlex
import sys
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Final

import pyarrow.parquet as pq
import pytest

from llmtap.cli.main import main

_WIDTH: Final = "80"
_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
_LONG_FRACTION: Final = re.compile(r"(?<![\w.])-?\d+\.\d{8,}(?:e[-+]?\d+)?(?![\w.])")
_DURATIONS: Final = re.compile(r"\d+\.\d s \([\d,]+ rows/s\)|(?<=\([0-9a-f]{16}\): )\d+\.\d\d s")
"""Of a conversion, and of a job of a sweep."""
_CONVERTED: Final = re.compile(r'(?<=  "seconds": )[\d.e-]+')
_PARQUET_SIZE: Final = re.compile(r"(?<= to )[\d.,]+ \w+(?=, \(duration\))")
"""Of a file that was written: another version of Arrow makes another."""
_CAPTURE_ID: Final = re.compile(r"\d{8}T\d{6}(?:\d{3}Z-\d{8}T\d{6})?[-_][0-9a-f]{6}(?:-\d{4}-[0-9a-f]{4,8})?")
_PYTHON: Final = re.compile(r'python="[\d.]+')
_IMPLEMENTATION: Final = re.compile(
    r'(?<=implementation=")(?:native|python)(?=")|(?<="implementation": )"(?:native|python)"'
)
_REASON: Final = re.compile(r'(?<="implementation_reason": )"[^"]*"')
_INLINE: Final = re.compile(r'(<(?:script type="module"|style)>)(.*?)(</(?:script|style)>)', re.DOTALL)
_BLOCK: Final = re.compile(
    r"(?<=>)(?=<(?:article|caption|d[dlt]|details|div|fieldset|figure|h\d|label|li|p|section|svg|table|tr)\b)"
)
_FIGURES: Final = re.compile(r"(?<=[}\]]),(?=[{\[\"])")
"""Where the JSON of a page's charts is broken into lines."""


def transcript(commands: Iterable[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the commands one after the other in `folder`; return everything that a user would find.

    `COLUMNS=100 llmtap ...` runs in a terminal of that width, all others into a pipe.
    """
    monkeypatch.chdir(folder)
    for name in ("NO_COLOR", "FORCE_COLOR", "LLMTAP_CONFIG", "OPENAI_API_KEY", "LLMTAP_ADMIN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    parts = []
    for command in commands:
        before = _stamps(folder)
        parts.append(f"$ {command}\n{_run(shlex.split(command), monkeypatch)}")
        for name, stamp in _stamps(folder).items():
            if before.get(name) != stamp:
                parts.append(f"==> {name} <==\n{_ended(_text_of(folder / name))}")
    return normalised("\n".join(parts))


def normalised(text: str) -> str:
    """Return the text without what differs between machines and versions of other software."""
    text = _INLINE.sub(_digest, _ANSI.sub("", text))
    text = _CAPTURE_ID.sub("(capture)", text)
    text = _DURATIONS.sub("(duration)", _PYTHON.sub('python="(version)', text))
    text = _REASON.sub("null", _IMPLEMENTATION.sub("(implementation)", text))
    # The last digits of a float are those of the machine's mathematics library.
    text = _LONG_FRACTION.sub(lambda m: f"{float(m[0]):.7g}", text)
    text = _BLOCK.sub("\n", text)
    lines = (_FIGURES.sub(",\n", line) if 'id="page-data">' in line else line for line in text.split("\n"))
    return _ended("\n".join(line.rstrip(" ") for line in lines))


def _run(args: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    columns, separator, width = args[0].partition("=")
    if terminal := bool(separator):
        assert columns == "COLUMNS"
        args = args[1:]
    monkeypatch.setenv("COLUMNS", width or _WIDTH)
    monkeypatch.setattr(sys, "argv", args)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    out, err = _Stream(terminal=terminal), _Stream(terminal=False)
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main()
    code = f"exit {ended.value.code}\n" if ended.value.code else ""
    text = code + _ended(out.text) + (f"stderr:\n{_ended(err.text)}" if err.text else "")
    if args[1:2] == ["convert"]:
        text = _CONVERTED.sub('"(duration)"', _DURATIONS.sub("(duration)", text))
        if any(arg.endswith(".parquet") for arg in args[3:4]):
            text = _PARQUET_SIZE.sub("(size)", text)
    return text


class _Stream(io.TextIOWrapper):
    def __init__(self, *, terminal: bool) -> None:
        self._bytes = io.BytesIO()
        super().__init__(self._bytes, encoding="utf-8", newline="", write_through=True)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    @property
    def text(self) -> str:
        self.flush()
        return self._bytes.getvalue().decode()


def _stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the files below, each with what changes when it is written."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            stat = path.stat()
            found[path.relative_to(folder).as_posix()] = (stat.st_mtime_ns, stat.st_size)
    return found


def _text_of(path: Path) -> str:
    if path.suffix != ".parquet":
        return path.read_bytes().decode()
    rows = pq.read_table(path).to_pylist()
    known = ({name: value for name, value in row.items() if value is not None} for row in rows)
    return "\n".join(json.dumps(row, default=str) for row in known)


def _digest(found: re.Match[str]) -> str:
    opened, content, closed = found.groups()
    return f"{opened}({hashlib.sha256(content.encode()).hexdigest()[:12]}){closed}"


def _ended(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"
