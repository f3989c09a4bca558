"""Shared code of commands: declarations and checks of options, output files, printing, and signals.

`Outputs` writes `--json`, `--html`, `--markdown` and `--csv`; `stoppable` handles Ctrl-C and SIGTERM; names
such as `Headers` declare options that several commands have.
"""

import difflib
import math
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import typer
from typer.core import TyperCommand

from llmtap.errors import ConfigError, install_hint
from llmtap.units import NS_PER_S, Duration, parse_duration_ns

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llmtap.metrics.deadlines import Benefit
    from llmtap.report.document import Table

FAILED: Final = 1
"""Exit code of a check that failed."""
STDOUT: Final = "-"
_SPEED_MAX: Final = 1e6
_LINE_MAX: Final = 10_000
"""Longer than any row of a table."""
_DURATION_NS_MAX: Final = 1_000 * 86_400 * NS_PER_S
"""Upper limit that timestamps can represent."""
_SIGNAL_EXIT: Final = 128
"""Added to the number of a signal, as shells do."""


# ---------------------------------------------------------------- outputs


class Outputs:
    """Files of `--json`, `--html`, `--markdown` and `--csv`; `-` is stdout.

    The constructor checks, before a long run, that the files can be written. Raises ConfigError.
    """

    def __init__(
        self, *, json: str | None = None, html: str | None = None, markdown: str | None = None,
        csv: str | None = None,
    ) -> None:  # fmt: skip
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
                raise _unwritten(option, place, exc) from None

    def write(self, texts: Mapping[str, Callable[[], str]]) -> None:
        """Write the files."""
        for option, place in self.files.items():
            write_output(option, place, texts[option]())

    def tell(self, texts: Mapping[str, Callable[[], str]], show: Callable[[], None]) -> None:
        """Write the files, and print the text for stdout, or call `show` if there is none."""
        self.write(texts)
        if self.stdout is None:
            show()
        else:
            print(texts[self.stdout]())


def need_capture(to: str) -> None:
    """Raise ConfigError if no capture can be written to `to`."""
    from llmtap.capture.store.parquet import check_place

    if not to:
        raise ConfigError("--capture", "expected a folder or a URL")
    try:
        check_place(to)
    except ConfigError as exc:
        raise ConfigError("--capture", f"{exc.place}: {exc.problem}", exc.hint) from None


def write_output(option: str, place: Path, text: str) -> None:
    """Write a text and a line feed. Raises ConfigError that names the option."""
    try:
        place.write_text(text + "\n", encoding="utf-8")
    except OSError as exc:
        raise _unwritten(option, place, exc) from None


def _unwritten(option: str, place: Path, exc: OSError) -> ConfigError:
    return ConfigError(option, f"cannot write {place}: {exc.strerror}")


def json_text(value: object) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value)).decode()


def print_json(value: object, to: str = STDOUT, out: Any = None) -> None:
    """Write a value to the file of --json, or print it to `out` (default: stdout). Raises ConfigError."""
    if to == STDOUT:
        print(json_text(value), file=out or sys.stdout)
    else:
        write_output("--json", Path(to), json_text(value))


def print_rich(shown: "RenderableType") -> None:
    """Print what rich can render. In a pipe, lines are not wrapped, so that they can be searched."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False).print(shown)
    else:
        Console(highlight=False, width=200).print(shown, soft_wrap=True)


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


def option_duration(option: str, text: str) -> Duration:
    """Return the duration of an option. Raises ConfigError that names it."""
    try:
        ns = parse_duration_ns(text)
    except (ValueError, OverflowError) as exc:
        raise ConfigError(option, str(exc)) from None
    if ns > _DURATION_NS_MAX:
        raise ConfigError(option, f"{text!r} is longer than 1,000 days")
    return Duration(ns)


def read_objectives(slo: str | None, goodput: str | None) -> str | None:
    """Return the objectives of `--slo` or `--goodput` in our own form. Raises ConfigError."""
    from llmtap.metrics.objectives import Objectives

    if slo is not None and goodput is not None:
        raise ConfigError("--goodput", "cannot be combined with --slo")
    if goodput is not None:
        return Objectives.parse_vllm(goodput).text
    return None if slo is None else Objectives.parse(slo, "--slo").text


def read_percentiles(text: str | None) -> dict[str, float]:
    """Return the shares of `--percentiles` by name. Raises ConfigError."""
    from llmtap.metrics.statistics import parse_percentiles

    return {} if text is None else parse_percentiles(text, "--percentiles")


def read_pairs(
    option: str, items: Sequence[str] | None, form: str = "KEY=VALUE", *, once: bool = False
) -> dict[str, str]:
    """Return the last value of each key. `once`: a key must not repeat. Raises ConfigError."""
    pairs: dict[str, str] = {}
    for item in items or ():
        key, separator, value = item.partition("=")
        key = key.strip()
        if not separator or not key:
            raise ConfigError(option, f"expected {form}, got {item!r}")
        if once and key in pairs:
            raise ConfigError(f"{option} {key}", "is given twice")
        pairs[key] = value.strip()
    return pairs


def need_extra(place: str, module: str, extra: str, hint: str = "") -> None:
    """Raise ConfigError if the package `module`, which the extra installs, is missing."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise ConfigError(place, f"needs {module}", install_hint(extra) + hint)


def check_known(option: str, kind: str, name: str, known: Collection[str]) -> None:
    """Raise ConfigError if `name` is not in `known`, with the nearest known name as a hint."""
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise ConfigError(option, f"no {kind} is called {name!r}; {hint}")


def need_warmup(warmup: str) -> None:
    number = warmup.isascii() and warmup.isdigit() and 0 < int(warmup) < 10**6
    if warmup not in ("auto", "none") and not number:
        raise ConfigError("--warmup", f"expected auto, none or a number of requests, got {warmup!r}")


# ---------------------------------------------------------------- signals


class Stopped(KeyboardInterrupt):
    """A signal arrived; `code` is the exit code."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = _SIGNAL_EXIT + number


@dataclass(slots=True)
class Heard:
    """Signals so far, and an optional handler that replaces raising Stopped."""

    numbers: list[int] = field(default_factory=list)
    instead: Callable[[], bool] | None = None
    """Called in the handler of a signal. False: raise Stopped."""

    @property
    def code(self) -> int | None:
        """The exit code by the first signal, or None."""
        return _SIGNAL_EXIT + self.numbers[0] if self.numbers else None


def loop_signals(heard: Heard, stop: Callable[[], None]) -> None:
    """Call `stop` in the running loop when a signal arrives."""
    import asyncio

    def handle(number: int) -> None:
        heard.numbers.append(number)
        stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, handle, number)


@contextmanager
def stoppable() -> Iterator[Heard]:
    """Raise Stopped in the main thread at Ctrl-C or SIGTERM, unless `instead` handles the signal.

    Later signals are ignored, so that they do not interrupt the cleaning up.
    """
    before: dict[int, Any] = {}
    heard = Heard()
    raised = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        heard.numbers.append(number)
        if heard.instead is not None and heard.instead():
            return
        raised = True
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(heard.numbers[0])

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            # A signal that was ignored at the start (nohup, background of a shell) stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, stop)
    try:
        yield heard
    except KeyboardInterrupt:
        # Some libraries replace our exception by their own.
        raise Stopped(heard.numbers[0] if heard.numbers else signal.SIGINT) from None
    finally:
        if not raised:
            for each, handler in before.items():
                signal.signal(each, handler)


class SeveralValues(TyperCommand):
    """Command with options of several words: `--pp 512 4096` is `--pp 512,4096`."""

    words: ClassVar[Mapping[str, str]] = {
        "--pp": r"[\d,]+", "--tg": r"[\d,]+", "--concurrency": r"[\d,]+", "--batch": r"[\d,]+",
        "--goodput": r"[a-z0-9]+:[\d.]+", "--percentiles": r"[\d.,]+",
    }  # fmt: skip
    """Form of the additional words of each option; other words are arguments of the command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        joined: list[str] = []
        form: str | None = None
        """Of further words of the last option, if it has a value."""
        for i, arg in enumerate(args):
            if form and re.fullmatch(form, arg):
                joined[-1] += f",{arg}"
                continue
            joined.append(arg)
            name, has_value, _ = arg.partition("=")
            form = self.words.get(name if has_value else args[i - 1] if i else "")
        return super().parse_args(ctx, joined)


def option(metavar: str | None, text: str, *names: str, **more: Any) -> Any:
    """Declare an option with a value. The help shows `metavar` for the value, or its type if None."""
    return typer.Option(*names, metavar=metavar, help=text, **more)


def flag(name: str, text: str, **more: Any) -> Any:
    """Declare an option without a value."""
    return typer.Option(name, help=text, **more)


def argument(metavar: str, text: str) -> Any:
    """Declare an argument."""
    return typer.Argument(metavar=metavar, help=text)


AdminAddress = Annotated[
    str | None,
    option(None, "HOST:PORT of the admin port with /metrics; default 127.0.0.1:9464. [key: meter.admin]"),
]
CaptureTo = Annotated[
    str | None,
    option(
        "DIR|URL",
        "Folder or URL for a Parquet capture of every exchange (a request with its response), by default "
        "without prompts and answers. [key: capture.to]",
    ),
]
ConfigFile = Annotated[
    Path | None,
    option(
        None,
        "TOML configuration file. An option with [key: NAME] sets that key; `llmtap proxy --keys` lists all "
        "keys.",
        envvar="LLMTAP_CONFIG",
    ),
]
CheckOnly = Annotated[bool, flag("--check", "Check the configuration and start nothing.")]
SetKeys = Annotated[
    list[str] | None,
    option(
        "KEY=VALUE",
        "Value of any configuration key, for example log.level=warning; may be repeated.",
        "--set",
    ),
]
CaFile = Annotated[str | None, option("FILE", "PEM file of the CA to trust instead of the system's CAs.")]
SourceFormat = Annotated[
    str | None,
    option(
        "NAME",
        "Format of TRACE, from `llmtap convert --list` (default: detected from its content).",
        "--from",
    ),
]
ModelName = Annotated[
    str | None,
    option("NAME", "Model name (default: the model that the server lists, if it lists exactly one)."),
]
Headers = Annotated[
    list[str] | None, option("'NAME: VALUE'", "Header field for every request; may be repeated.")
]
ApiKeyEnv = Annotated[
    str | None, option("NAME", "Environment variable with the API key (default: OPENAI_API_KEY).")
]
BodyFields = Annotated[
    list[str] | None,
    option("NAME=JSON", "Field to add to every request body, for example top_p=0.9; may be repeated."),
]
AnswerTimeout = Annotated[str, option("TIME", "Maximum duration of a complete response.")]
Slo = Annotated[
    str | None,
    option(
        "BOUNDS",
        "Limits that a request must meet to count as goodput, for example 'ttft:500ms tpot:50ms'. Other "
        "names: ttft_any, ttfb, e2e, user_idle, tbc_max, tbc_p99, jitter.",
    ),
]
VllmGoodput = Annotated[
    str | None,
    option("NAME:MS...", "The same limits in vLLM's form, in ms, for example ttft:200 tpot:50 e2el:30000."),
]
Percentiles = Annotated[
    str | None,
    option("N,...", "Additional percentiles of each metric, for example 25,75,99.5."),
]
ReaderSpeed = Annotated[
    float | None,
    option("TOKENS/S", "Reading speed for user idle latency and smooth goodput; default 20."),
]
Alpha = Annotated[
    float | None,
    option(
        "NUMBER",
        "Number of tokens that smooth goodput subtracts for each unit of waiting (see --idle-cost); default "
        "5.",
    ),
]
IdleCost = Annotated[
    str | None,
    option(
        "seconds|tokens",
        "Unit in which --alpha counts waiting: seconds, or the tokens that could have been read in that "
        "time. Default: seconds.",
    ),
]
ReaderGrace = Annotated[
    int | None,
    option(
        "TOKENS",
        "Delay that a reader accepts before a token counts as late, in reading times of one token: 2 is "
        "100 ms at 20 tokens/s. It begins when the reader needs the token; default 0.",
    ),
]


def reader_of(
    speed: float | None, alpha: float | None, idle_cost: str | None, grace: int | None
) -> "Benefit":
    """Return the reader of the four options. Raises ConfigError."""
    from llmtap.metrics.deadlines import ALPHA, IDLE_COSTS, READER_NS_PER_TOKEN, Benefit

    speed = 1e9 / READER_NS_PER_TOKEN if speed is None else speed
    alpha = ALPHA if alpha is None else alpha
    if not 0 < speed <= _SPEED_MAX:
        raise ConfigError(
            "--reader-speed", f"expected a number above 0, at most {_SPEED_MAX:g}, got {speed:g}"
        )
    if not 0 <= alpha < math.inf:
        raise ConfigError("--alpha", f"expected a number of at least 0, got {alpha:g}")
    if idle_cost is not None:
        check_known("--idle-cost", "unit", idle_cost, IDLE_COSTS)
    if grace is not None and grace < 0:
        raise ConfigError("--reader-grace", f"expected a number of at least 0, got {grace}")
    return Benefit.at_speed(speed, alpha, idle_cost or "seconds", grace or 0)


Seed = Annotated[int, option("N", "Random seed.", min=0)]
NoSelftest = Annotated[
    bool,
    flag(
        "--no-selftest",
        "Skip the self-test, which measures how accurate llmtap's TTFT and ITL are at the same load.",
    ),
]
Json = Annotated[
    str | None, option("[=FILE]", "Result as JSON: on stdout with --json, in FILE with --json=FILE.")
]
"""The file is optional: `llmtap.cli.main` adds the default."""
