"""The `llmtap` command: the typer `app`, the import of the command modules, and the exit codes of errors.

Each module in `_MODULES` adds its commands to `app`. This module also defines `--version`, the order of
commands in the help, the meaning of `--json` without a file, and the output of errors. Code that several
commands use is in `cli/shared.py`.
"""

import functools
import importlib
import sys
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command

from llmtap import native
from llmtap.cli.shared import print_message
from llmtap.errors import ConfigError, ExitCode, LlmtapError
from llmtap.version import __version__

_MODULES: Final = (
    "tap",
    "watch",
    "sim",
    "sim_run",
    "replay",
    "files",
    "demo",
    "report",
    "bench",
    "bench_exo",
)
_COMMANDS: Final = (
    "proxy",
    "watch",
    "replay",
    "selftest",
    "inspect",
    "demo",
    "convert",
    "report",
    "meter",
    "top",
    "sim",
    "bench",
    "slo",
    "key-hash",
)
"""Commands in the order of the help text."""
_COMMANDS_WITH_PLACES: Final = ("convert", "demo", "inspect", "report", "top", "watch")
"""Commands whose argument can be a file, folder or URL: `--json` before it must not take it as its FILE."""


class _Group(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replace `--json` without a file by `--json=-`, and parse the arguments.

        In `_COMMANDS_WITH_PLACES`, the word after `--json` is always an argument of the command: a file of
        `--json` must follow a `=`.
        """
        has_places = args[:1] and args[0] in _COMMANDS_WITH_PLACES
        last = args.index("--") if "--" in args else len(args)
        for i, arg in enumerate(args[:last]):
            after = args[i + 1] if i + 1 < last else "--"
            if arg == "--json" and (has_places or (after.startswith("-") and after != "-")):
                args[i] = "--json=-"
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: object) -> list[str]:
        """Return the names in the order of `_COMMANDS`, whichever module was imported first."""
        return sorted(self.commands, key=_COMMANDS.index)


app = typer.Typer(
    name="llmtap",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Measure LLM traffic: forward bodies unchanged, timestamp every chunk of a response.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"llmtap {__version__} ({native.describe()})")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the version and the active implementation (native or Python).",
        ),
    ] = False,
) -> None:
    """Declare the options that come before a subcommand."""


def load_commands() -> None:
    """Import the modules of all commands, which add themselves to `app`."""
    for command in _MODULES:
        importlib.import_module(f"llmtap.cli.{command}")


@functools.cache
def root_command() -> Any:
    """Return the command `llmtap` with all subcommands. Cached: typer takes 40 ms to make it."""
    load_commands()
    return get_command(app)


def main() -> None:
    """Run a command and exit with its ExitCode."""
    try:
        root_command()()
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except ConfigError as exc:
        print_message(str(exc))
        sys.exit(ExitCode.USAGE)
    except LlmtapError as exc:
        print_message(str(exc))
        sys.exit(ExitCode.FAILED)
    except OSError as exc:
        # Code that reads or writes a file of the user raises ConfigError. This prints any other error of the
        # operating system, such as a broken disk.
        name = "" if exc.filename is None else f"{exc.filename}: "
        print_message(f"{name}{exc.strerror or exc}")
        sys.exit(ExitCode.USAGE)
