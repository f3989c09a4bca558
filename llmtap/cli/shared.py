"""Shared code of commands: checks of options, output files, printing, and signals.

`Outputs` writes `--json`, `--html`, `--markdown` and `--csv`; `stoppable` handles Ctrl-C, SIGTERM and SIGHUP.
`cli/options.py` declares the options that several commands have.
"""

import difflib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Final

from typer.core import TyperCommand

from llmtap.errors import ConfigError, ExitCode, install_hint, printable
from llmtap.user_files import open_private

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llmtap.report.document import Table

STDOUT: Final = "-"
_LINE_MAX: Final = 10_000
"""Width of tables in a pipe or a file: larger than any row, so that no row is wrapped."""
_SIGNAL_EXIT: Final = 128
"""A command that a signal ended has this exit code plus the number of the signal, as in shells."""


# ---------------------------------------------------------------- messages on stderr


def print_message(text: str) -> None:
    """Print a message on stderr. Escape control characters, which text from files and servers can contain."""
    print(f"llmtap: {printable_lines(text)}", file=sys.stderr, flush=True)


def print_line(text: str, out: Any = None) -> None:
    """Print a line of a result on `out` (default: stdout). Control characters are escaped."""
    print(printable_lines(text), file=out or sys.stdout)


def printable_lines(text: str) -> str:
    """Escape all control characters except line ends."""
    return "\n".join(map(printable, text.split("\n")))


# ---------------------------------------------------------------- output files


class Outputs:
    """Files of `--json`, `--html`, `--markdown` and `--csv`; `-` is stdout.

    The constructor checks, before a long run, that the files can be written. Raises ConfigError.
    """

    def __init__(
        self,
        *,
        json: str | None = None,
        html: str | None = None,
        markdown: str | None = None,
        csv: str | None = None,
    ) -> None:
        named = {"--json": json, "--html": html, "--markdown": markdown, "--csv": csv}
        to_stdout = [option for option, name in named.items() if name == STDOUT]
        if len(to_stdout) > 1:
            raise ConfigError(
                to_stdout[1], f"cannot be written to stdout together with {to_stdout[0]}", "name a file"
            )
        self.stdout_option = to_stdout[0] if to_stdout else None
        """Option whose text is printed on standard output; None: standard output has the normal report."""
        self.files = {option: Path(name) for option, name in named.items() if name not in (None, STDOUT)}
        """By option: file of the output."""
        for option, place in self.files.items():
            if not place.parent.is_dir():
                raise ConfigError(option, f"the folder {place.parent} does not exist", "create it")
            existed = place.exists()
            try:
                place.open("ab").close()
                if not existed:
                    place.unlink()
            except OSError as exc:
                raise _write_error(option, place, exc) from None

    def write(self, texts: Mapping[str, Callable[[], str]]) -> None:
        """Write all requested files. `texts`: by option, a function that returns the text of its file."""
        for option, place in self.files.items():
            write_output(option, place, texts[option]())

    def write_or_show(self, texts: Mapping[str, Callable[[], str]], show: Callable[[], None]) -> None:
        """Write all requested files. Then print the text of the option whose file is `-`; if no option has
        this file, call `show`, which prints the normal report."""
        self.write(texts)
        if self.stdout_option is None:
            show()
        else:
            print(texts[self.stdout_option]())


def exit_codes(*codes: ExitCode) -> str:
    """Return the paragraph on exit codes in a command's help. `codes`: codes to list; default: all."""
    return "Exit codes: " + "; ".join(f"{code} {code.meaning}" for code in codes or ExitCode) + "."


def check_capture_place(to: str) -> None:
    """Raise ConfigError if a capture cannot be written to the folder or URL `to`."""
    from llmtap.capture.store.parquet import check_place

    if not to:
        raise ConfigError(
            "--capture", "is empty; expected a folder or a URL", "such as --capture captures/run1"
        )
    try:
        check_place(to)
    except ConfigError as exc:
        raise ConfigError("--capture", f"{exc.place}: {exc.problem}", exc.hint) from None


def write_output(option: str, place: Path, text: str, *, private: bool = False) -> None:
    """Write a text and a line feed to a file. Raises ConfigError that names the option.

    `private`: only the owner can read a new file.
    """
    try:
        with open(place, "w", encoding="utf-8", opener=open_private if private else None) as file:
            file.write(text + "\n")
    except OSError as exc:
        raise _write_error(option, place, exc) from None


def _write_error(option: str, place: Path, exc: OSError) -> ConfigError:
    hint = "check the permissions of the folder and the free space, or name another file"
    return ConfigError(option, f"cannot write {place}: {exc.strerror}", hint)


def json_text(value: object) -> str:
    """Return a value as indented JSON."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value)).decode()


def print_json(value: object, to: str = STDOUT, out: Any = None) -> None:
    """Write a value to the file of --json, or print it to `out` (default: stdout). Raises ConfigError."""
    if to == STDOUT:
        print(json_text(value), file=out or sys.stdout)
    else:
        write_output("--json", Path(to), json_text(value))


def print_rich(renderable: "RenderableType") -> None:
    """Print a renderable of the package rich. In a pipe, do not wrap lines, so that `grep` finds them."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False).print(renderable)
    else:
        Console(highlight=False, width=200).print(renderable, soft_wrap=True)


def print_table(table: "Table", out: Any = None) -> None:
    """Print a table. In a pipe, a row is one line of any length, so that `grep` finds whole rows."""
    from rich.console import Console, Group

    from llmtap.report.render import rich_table, tables_that_fit

    out = out or sys.stdout
    if out.isatty():
        console = Console(file=out, highlight=False)
        parts = tables_that_fit(table, console.width) if table.key_columns else [table]
        console.print(Group(*map(rich_table, parts)))
        return
    console = Console(width=_LINE_MAX, highlight=False)
    with console.capture() as captured:
        console.print(rich_table(table))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), file=out)


# ---------------------------------------------------------------- options of several commands


def read_objectives(slo: str | None, goodput: str | None) -> str | None:
    """Return the objectives of `--slo` or `--goodput` in the form of `--slo`. Raises ConfigError."""
    from llmtap.metrics.objectives import Objectives

    if slo is not None and goodput is not None:
        raise ConfigError("--goodput", "cannot be combined with --slo", "use only one of them")
    if goodput is not None:
        return Objectives.parse_vllm(goodput).text
    return None if slo is None else Objectives.parse(slo, "--slo").text


def read_percentiles(text: str | None) -> dict[str, float]:
    """Return the percentiles of `--percentiles` as shares from 0 to 1, by name. Raises ConfigError."""
    from llmtap.metrics.statistics import parse_percentiles

    return {} if text is None else parse_percentiles(text, "--percentiles")


def read_pairs(
    option: str, items: Sequence[str] | None, form: str = "KEY=VALUE", *, unique: bool = False
) -> dict[str, str]:
    """Return the values of texts of the form KEY=VALUE, by key. Raises ConfigError.

    If a key is given twice, the later value counts; with `unique`, it is an error.
    """
    pairs: dict[str, str] = {}
    for item in items or ():
        key, separator, value = item.partition("=")
        key = key.strip()
        if not separator or not key:
            raise ConfigError(option, f"expected {form}, got {item!r}")
        if unique and key in pairs:
            raise ConfigError(f"{option} {key}", "is given twice", "give each name once")
        pairs[key] = value.strip()
    return pairs


def need_extra(place: str, module: str, extra: str, hint: str = "") -> None:
    """Raise ConfigError if the Python package `module` is missing. The error's hint installs `extra`."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise ConfigError(place, f"needs the Python package {module}", install_hint(extra) + hint)


def check_known(option: str, kind: str, name: str, known: Collection[str]) -> None:
    """Raise ConfigError if `name` is not in `known`, with the nearest known name as a hint."""
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
        raise ConfigError(option, f"no {kind} is called {name!r}", hint)


# ---------------------------------------------------------------- signals that stop a command


STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals after which a command stops early and reports the completed part."""


class Stopped(KeyboardInterrupt):
    """A signal of STOP_SIGNALS ended the command; `code` is the exit code."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = _SIGNAL_EXIT + number


def _terminal_fds() -> tuple[int, ...]:
    return tuple(fd for fd in (1, 2) if os.isatty(fd))


@dataclass(slots=True)
class ReceivedSignals:
    """Signals that arrived, and an optional handler that is called before Stopped is raised."""

    numbers: list[int] = field(default_factory=list)
    """Signal numbers, in the order of arrival."""
    terminal_fds: tuple[int, ...] = field(default_factory=_terminal_fds)
    """File descriptors of standard output and standard error, if they are a terminal."""
    handler: Callable[[], bool] | None = None
    """Function called when a signal arrives. If it returns False, Stopped is raised; if True, it is not."""

    def add(self, number: int) -> None:
        """Record a signal. After SIGHUP, redirect the terminal's output to /dev/null: the terminal is closed,
        so writing to it would fail."""
        self.numbers.append(number)
        if number == signal.SIGHUP:
            devnull = os.open(os.devnull, os.O_WRONLY)
            for fd in self.terminal_fds:
                os.dup2(devnull, fd)
            os.close(devnull)

    @property
    def exit_code(self) -> int | None:
        """Exit code for the first signal that arrived; None if no signal arrived."""
        return _SIGNAL_EXIT + self.numbers[0] if self.numbers else None


def loop_signals(signals: ReceivedSignals, stop: Callable[[], None]) -> None:
    """Record each signal of STOP_SIGNALS that arrives, and then call `stop` in the running event loop."""
    import asyncio

    def handle(number: int) -> None:
        signals.add(number)
        stop()

    for number in STOP_SIGNALS:
        # A signal that is ignored at the start (nohup, background job of a shell) must stay ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, handle, number)


@contextmanager
def stoppable() -> Iterator[ReceivedSignals]:
    """Raise Stopped in the main thread when a signal of STOP_SIGNALS arrives.

    The `handler` of the yielded object can prevent this. After Stopped is raised, further signals are
    ignored, so that they do not interrupt the clean-up.
    """
    before: dict[int, Any] = {}
    signals = ReceivedSignals()
    raised = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        signals.add(number)
        if signals.handler is not None and signals.handler():
            return
        raised = True
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(signals.numbers[0])

    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, stop)
    try:
        yield signals
    except KeyboardInterrupt:
        # Some libraries replace Stopped by a plain KeyboardInterrupt, so raise Stopped again.
        raise Stopped(signals.numbers[0] if signals.numbers else signal.SIGINT) from None
    finally:
        if not raised:
            for each, handler in before.items():
                signal.signal(each, handler)


class SeveralValues(TyperCommand):
    """Command with options that accept several words: `--pp 512 4096` means `--pp 512,4096`."""

    word_patterns: ClassVar[Mapping[str, str]] = {
        "--pp": r"[\d,]+",
        "--tg": r"[\d,]+",
        "--concurrency": r"[\d,]+",
        "--batch": r"[\d,]+",
        "--goodput": r"[a-z0-9]+:[\d.]+",
        "--percentiles": r"[\d.,]+",
        # Also a wrong value, such as `ttft_p50:-5`, so that the error is about the value.
        "--fail-if-worse": r"[a-z][\w.]*:[-+\w.%]*|[-+]?[\d.]+%?|all",
    }
    """By option that takes several values: pattern of the values after the first (`16` in `--pp 8 16`). A
    word that does not match is an argument of the command."""
    bare_values: ClassVar[Mapping[str, str]] = {"--fail-if-worse": "all"}
    """By option: the value that it has if it is given without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        joined: list[str] = []
        # Pattern of further values of the last option (`--pp 8 16`); None if it takes no more values.
        pattern: str | None = None
        for i, arg in enumerate(args):
            if pattern and re.fullmatch(pattern, arg):
                joined[-1] += f",{arg}"
                continue
            after = args[i + 1] if i + 1 < len(args) else ""
            if arg in self.bare_values and not re.fullmatch(self.word_patterns[arg], after):
                arg = f"{arg}={self.bare_values[arg]}"
            joined.append(arg)
            name, has_value, _ = arg.partition("=")
            pattern = self.word_patterns.get(name if has_value else args[i - 1] if i else "")
        return super().parse_args(ctx, joined)


def figures_place(csv: str) -> str:
    """Return the name of the figures' CSV file, `a.figures.csv`, for the requests' CSV file `a.csv`."""
    if csv == STDOUT:
        raise ConfigError(
            "--csv",
            "cannot be written to standard output, because the result has two tables",
            "such as --csv result.csv",
        )
    return str(Path(csv).with_suffix("")) + ".figures.csv"
