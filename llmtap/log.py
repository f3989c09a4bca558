"""Structured logs: `key=value` lines on stderr; stdout is for data.

Nothing per chunk, and nothing of a prompt, a header's value or a key, at any level.
"""

import logging
import sys
from typing import Annotated, Final, Literal

import msgspec

__all__ = ["LogSetup", "set_up"]

_RECORD_CHARS_MAX: Final = 16_384
"""Of a record with its traceback: an exception may quote what a peer sent."""


class LogSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[log]` table of the config file."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], msgspec.Meta(description="what is worth a line")
    ] = "info"


class _Formatter(logging.Formatter):
    default_msec_format = "%s.%03d"

    def formatMessage(self, record: logging.LogRecord) -> str:
        return (
            f"ts={record.asctime.replace(' ', 'T')} level={record.levelname.lower()} "
            f"room={record.name.removeprefix('llmtap.')} {record.message}"
        )

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record)[:_RECORD_CHARS_MAX]

    def usesTime(self) -> bool:
        return True


def set_up(setup: LogSetup) -> None:
    """Send this process's log lines to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    logging.basicConfig(level=setup.level.upper(), handlers=[handler], force=True)
