"""What is compared with files: commands on the data of `tests/data/`, and texts that no command prints."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from typer.core import TyperGroup

from llmtap.cli.main import root_command
from llmtap.traces.registry import FORMATS
from tests.golden.texts import admin_api, capture_columns, openapi, options, telemetry, top
from tests.support.traffic.exposed import exposition_text

Case = list[str] | Callable[[], str]
DATA: Final = Path(__file__).parents[1] / "data"
_FROM_CAPTURE: Final = frozenset({"mooncake", "azure", "burstgpt", "guidellm", "inference-perf"})
"""Formats of lengths and times are written from a capture; the others hold text, and are from a HAR file."""


def _written() -> Iterator[tuple[str, list[str]]]:
    """Yield the cases of commands.txt."""
    text = Path(__file__).with_name("commands.txt").read_text(encoding="utf-8")
    for name, lines in re.findall(r"^# (\S+)\n((?:.+\n)+)", text, re.MULTILINE):
        yield name, lines.splitlines()


def _help() -> Iterator[tuple[str, list[str]]]:
    """Yield the help of every command."""
    left: list[tuple[str, Any]] = [("llmtap", root_command())]
    while left:
        name, command = left.pop()
        yield f"help/{name.replace(' ', '-')}", [f"{name} --help"]
        if isinstance(command, TyperGroup):
            left += [(f"{name} {one}", found) for one, found in command.commands.items()]


def _convert() -> Iterator[tuple[str, list[str]]]:
    """Yield each trace format: written, and read again."""
    for one in FORMATS:
        source = "capture" if one.name in _FROM_CAPTURE else "streams/session.har"
        file = f"out{one.extensions[0]}"
        if one.write_rows is not None:
            there = f"llmtap convert {source} {file} --to {one.name}"
            yield f"convert/{one.name}", [there, f"llmtap convert {file} back.parquet --from {one.name}"]


def _inspect() -> Iterator[tuple[str, list[str]]]:
    """Yield each saved stream: explained into a pipe, in a terminal, and as JSON."""
    for file in sorted((DATA / "streams").iterdir()):
        command = f"llmtap inspect streams/{file.name}" + (" --entry 1" if file.suffix == ".har" else "")
        yield f"inspect/{file.stem}", [command, f"COLUMNS=100 {command} --no-text", f"{command} --json"]


CASES: Final[dict[str, Case]] = {
    **dict(_written()),
    **dict(_help()),
    **dict(_convert()),
    **dict(_inspect()),
    "admin-api": admin_api,
    "capture-columns": capture_columns,
    "metrics": exposition_text,
    "openapi": openapi,
    "options": options,
    "telemetry": telemetry,
    "top": top,
}
