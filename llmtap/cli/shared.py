"""Shared code of commands: declarations and checks of options, output files, printing, and signals.

`Outputs` writes `--json`, `--html`, `--markdown` and `--csv`; `stoppable` handles Ctrl-C, SIGTERM and SIGHUP;
names such as `Headers` declare options that several commands have.
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
"""Width for output without a terminal: longer than any row of a table."""
_SIGNAL_EXIT: Final = 128
"""Number that is added to the number of a signal to get the exit code, as in shells."""


# ---------------------------------------------------------------- messages


def print_message(text: str) -> None:
    """Print a message on stderr. Control characters are escaped: the text may come from a
    file or a server."""
    print(f"llmtap: {printable_lines(text)}", file=sys.stderr, flush=True)


def print_line(text: str, out: Any = None) -> None:
    """Print a line of a result on `out` (default: stdout). Control characters are escaped."""
    print(printable_lines(text), file=out or sys.stdout)


def printable_lines(text: str) -> str:
    """Escape all control characters except line ends."""
    return "\n".join(map(printable, text.split("\n")))


# ---------------------------------------------------------------- outputs


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
            raise ConfigError(to_stdout[1], f"cannot be written to stdout together with {to_stdout[0]}")
        self.stdout = to_stdout[0] if to_stdout else None
        self.files = {option: Path(name) for option, name in named.items() if name not in (None, STDOUT)}
        for option, place in self.files.items():
            if not place.parent.is_dir():
                raise ConfigError(option, f"the folder {place.parent} does not exist")
            known = place.exists()
            try:
                place.open("ab").close()
                if not known:
                    place.unlink()
            except OSError as exc:
                raise _write_error(option, place, exc) from None

    def write(self, texts: Mapping[str, Callable[[], str]]) -> None:
        """Write all requested files. `texts`: by option, the function that makes the text."""
        for option, place in self.files.items():
            write_output(option, place, texts[option]())

    def write_or_show(self, texts: Mapping[str, Callable[[], str]], show: Callable[[], None]) -> None:
        """Write the files. Then print the output that goes to stdout, or call `show` if no output goes to
        stdout."""
        self.write(texts)
        if self.stdout is None:
            show()
        else:
            print(texts[self.stdout]())


def exit_codes(*codes: ExitCode) -> str:
    """Return the paragraph on exit codes for a command's help. `codes`: those of
    the command; default: all."""
    return "Exit codes: " + "; ".join(f"{code} {code.meaning}" for code in codes or ExitCode) + "."


def need_capture(to: str) -> None:
    """Raise ConfigError if no capture can be written to `to`."""
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
    """Write a text and a line feed. Raises ConfigError that names the option.

    `private`: only the owner may read a new file.
    """
    try:
        with open(place, "w", encoding="utf-8", opener=open_private if private else None) as file:
            file.write(text + "\n")
    except OSError as exc:
        raise _write_error(option, place, exc) from None


def _write_error(option: str, place: Path, exc: OSError) -> ConfigError:
    return ConfigError(option, f"cannot write {place}: {exc.strerror}")


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
    """Print a renderable of the package rich. In a pipe, lines are not wrapped, so that
    they can be searched."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False).print(renderable)
    else:
        Console(highlight=False, width=200).print(renderable, soft_wrap=True)


def print_table(table: "Table", out: Any = None) -> None:
    """Print aligned columns. In a pipe, a row is one line of any length, so that it can be searched."""
    from rich.console import Console, Group

    from llmtap.report.render import rich_table, tables_that_fit

    out = out or sys.stdout
    if out.isatty():
        console = Console(file=out, highlight=False)
        parts = tables_that_fit(table, console.width) if table.keys else [table]
        console.print(Group(*map(rich_table, parts)))
        return
    console = Console(width=_LINE_MAX, highlight=False)
    with console.capture() as captured:
        console.print(rich_table(table))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), file=out)


# ---------------------------------------------------------------- options


def read_objectives(slo: str | None, goodput: str | None) -> str | None:
    """Return the objectives of `--slo` or `--goodput` in the form of `--slo`. Raises ConfigError."""
    from llmtap.metrics.objectives import Objectives

    if slo is not None and goodput is not None:
        raise ConfigError("--goodput", "cannot be combined with --slo")
    if goodput is not None:
        return Objectives.parse_vllm(goodput).text
    return None if slo is None else Objectives.parse(slo, "--slo").text


def read_percentiles(text: str | None) -> dict[str, float]:
    """Return the percentiles of `--percentiles` as shares from 0 to 1, by name. Raises ConfigError."""
    from llmtap.metrics.statistics import parse_percentiles

    return {} if text is None else parse_percentiles(text, "--percentiles")


def read_pairs(
    option: str, items: Sequence[str] | None, form: str = "KEY=VALUE", *, once: bool = False
) -> dict[str, str]:
    """Return the value of each key; if a key repeats, the last one. Raises ConfigError.

    `once`: a repeated key is an error.
    """
    pairs: dict[str, str] = {}
    for item in items or ():
        key, separator, value = item.partition("=")
        key = key.strip()
        if not separator or not key:
            raise ConfigError(option, f"expected {form}, got {item!r}")
        if once and key in pairs:
            raise ConfigError(f"{option} {key}", "is given twice", "give each name once")
        pairs[key] = value.strip()
    return pairs


def need_extra(place: str, module: str, extra: str, hint: str = "") -> None:
    """Raise ConfigError if the package `module` is missing, with the hint to install the extra."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise ConfigError(place, f"needs the Python package {module}", install_hint(extra) + hint)


def check_known(option: str, kind: str, name: str, known: Collection[str]) -> None:
    """Raise ConfigError if `name` is not in `known`, with the nearest known name as a hint."""
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
        raise ConfigError(option, f"no {kind} is called {name!r}; {hint}")


# ---------------------------------------------------------------- signals


STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command, which then reports the part that is complete."""


class Stopped(KeyboardInterrupt):
    """A signal arrived; `code` is the exit code."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = _SIGNAL_EXIT + number


def _terminal_fds() -> tuple[int, ...]:
    return tuple(fd for fd in (1, 2) if os.isatty(fd))


@dataclass(slots=True)
class ReceivedSignals:
    """Signals that arrived, and an optional handler that is called instead of raising Stopped."""

    numbers: list[int] = field(default_factory=list)
    terminal_fds: tuple[int, ...] = field(default_factory=_terminal_fds)
    """File descriptors of standard output and standard error, if they are a terminal."""
    handler: Callable[[], bool] | None = None
    """Function called when a signal arrives. If it returns False, Stopped is raised."""

    def add(self, number: int) -> None:
        """Record a signal. After SIGHUP, redirect output to the terminal to nowhere: a write
        to it would fail."""
        self.numbers.append(number)
        if number == signal.SIGHUP:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for fd in self.terminal_fds:
                os.dup2(nowhere, fd)
            os.close(nowhere)

    @property
    def code(self) -> int | None:
        """Exit code for the first signal that arrived; None if no signal arrived."""
        return _SIGNAL_EXIT + self.numbers[0] if self.numbers else None


def loop_signals(signals: ReceivedSignals, stop: Callable[[], None]) -> None:
    """Call `stop` in the running loop when a signal arrives."""
    import asyncio

    def handle(number: int) -> None:
        signals.add(number)
        stop()

    for number in STOP_SIGNALS:
        # Do not handle a signal that was ignored at the start (nohup, background job of a shell).
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, handle, number)


@contextmanager
def stoppable() -> Iterator[ReceivedSignals]:
    """Raise Stopped in the main thread when a signal of STOPPING arrives.

    The yielded object's `handler`, if it is set, may handle the signal instead.

    Later signals are ignored, so that they do not interrupt the clean-up.
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
        # Raise Stopped again: some libraries replace it by a plain KeyboardInterrupt.
        raise Stopped(signals.numbers[0] if signals.numbers else signal.SIGINT) from None
    finally:
        if not raised:
            for each, handler in before.items():
                signal.signal(each, handler)


class SeveralValues(TyperCommand):
    """Command with options that accept several words: `--pp 512 4096` means `--pp 512,4096`."""

    words: ClassVar[Mapping[str, str]] = {
        "--pp": r"[\d,]+",
        "--tg": r"[\d,]+",
        "--concurrency": r"[\d,]+",
        "--batch": r"[\d,]+",
        "--goodput": r"[a-z0-9]+:[\d.]+",
        "--percentiles": r"[\d.,]+",
        "--fail-if-worse": r"([a-z][\w.]*:)?[\d.]+%?|all",
    }
    """Pattern of the further words of each option. Words that do not match are arguments of the command."""
    defaults: ClassVar[Mapping[str, str]] = {"--fail-if-worse": "all"}
    """Default value of each option that may be given without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        joined: list[str] = []
        form: str | None = None
        """Pattern of further words of the last option, if it has a value; else None."""
        for i, arg in enumerate(args):
            if form and re.fullmatch(form, arg):
                joined[-1] += f",{arg}"
                continue
            after = args[i + 1] if i + 1 < len(args) else ""
            if arg in self.defaults and not re.fullmatch(self.words[arg], after):
                arg = f"{arg}={self.defaults[arg]}"
            joined.append(arg)
            name, has_value, _ = arg.partition("=")
            form = self.words.get(name if has_value else args[i - 1] if i else "")
        return super().parse_args(ctx, joined)


def figures_place(csv: str) -> str:
    """Return the path of the file for the figures, in the folder of the CSV file of requests: `a.figures.csv`
    for `a.csv`."""
    if csv == STDOUT:
        raise ConfigError(
            "--csv",
            "cannot be written to standard output, because the result has two tables",
            "such as --csv result.csv",
        )
    return str(Path(csv).with_suffix("")) + ".figures.csv"
