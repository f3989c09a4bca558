"""Set up Python's `logging` in a process of llmtap: lines of `key=value` on stderr; stdout is for data.

Each process of the proxy, the meter and the watcher calls `set_up` with the `[log]` table of the
configuration at its start; supervisor and meter call it again when they reload the configuration. Modules log
with `logging.getLogger`. There is no line per chunk, and at no level does a line contain a prompt, the value
of a header or an API key.
"""

import logging
import sys
from typing import Annotated, Final, Literal

import msgspec

from llmtap.options.fields import opt

_RECORD_CHARS_MAX: Final = 16_384
"""Maximum length of a log line with its traceback: an exception can quote long text that a peer sent."""


class LogSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[log]` table of the config file."""

    level: Annotated[Literal["debug", "info", "warning", "error"], opt("minimum level of log lines")] = "info"
    """Lowest level that is logged."""


class _Formatter(logging.Formatter):
    """Formats a log record as `key=value` pairs in one line."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03d"

    def formatMessage(self, record: logging.LogRecord) -> str:
        return (
            f"ts={record.asctime} level={record.levelname.lower()} "
            f"logger={record.name.removeprefix('llmtap.')} {record.message}"
        )

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record)[:_RECORD_CHARS_MAX]

    def usesTime(self) -> bool:
        return True


def set_up(setup: LogSetup) -> None:
    """Send this process's log lines to stderr."""
    # Do not look up the thread, process and source line of a log call: no log line shows them. This saves a
    # fifth of the time of a log call, and there is one for each exchange. Source: "Optimization" in the
    # logging HOWTO of Python.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    logging.basicConfig(level=setup.level.upper(), handlers=[handler], force=True)
