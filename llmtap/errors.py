"""Exceptions and exit codes of llmtap, and helpers for error messages.

A ConfigError is a mistake of the user, such as an invalid option or an unreadable file. Its message names the
place and can have a hint, and the command ends with ExitCode.USAGE. Any other LlmtapError ends a command with
ExitCode.FAILED (`cli/main.py`). A PeerProtocolError is a fault of a client or server; it decides the outcome
of one exchange. A bug in llmtap is reported by an `assert`.
"""

from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit code of a command, with its meaning. The page "Commands" of the documentation lists them."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> "ExitCode":
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    OK = 0, "ok"
    FAILED = 1, "the load failed (requests failed, the server is down), or a check failed"
    USAGE = 2, "invalid option, configuration or input file; the message names it"
    MISSED = 3, "measured, but an objective or a gate was missed"
    NOT_VALID = 4, "measured, but a requested figure is not valid; the report says which"
    HUNG_UP = 129, "stopped by SIGHUP, such as a closed terminal; the report has the completed part"
    INTERRUPTED = 130, "stopped by Ctrl-C; the report has the completed part"
    TERMINATED = 143, "stopped by SIGTERM; the report has the completed part"

    @classmethod
    def of_run(cls, *, failed: bool = False, missed: bool = False, not_valid: bool = False) -> "ExitCode":
        """Return the exit code of a run: of the first condition that holds, in the order of the arguments.

        Set `missed` only if the figure of the gate is valid: a figure that is not valid cannot miss a bound.
        """
        if failed:
            return cls.FAILED
        if missed:
            return cls.MISSED
        return cls.NOT_VALID if not_valid else cls.OK


class LlmtapError(Exception):
    """Base class of all exceptions of llmtap."""


class ConfigError(LlmtapError):
    """An option, setting or file is wrong. `place` names it: `relay.head_bytes (llmtap.toml, line 3)`."""

    def __init__(self, place: str, problem: str, hint: str | None = None) -> None:
        # A file name can contain line ends: escape them, so that the place is on one line.
        place = printable(place)
        super().__init__(f"{place}: {problem}" + (f"\nhint: {hint}" if hint else ""))
        self.place = place
        self.problem = problem
        self.hint = hint
        self.others: tuple[ConfigError, ...] = ()
        """Further mistakes that were found together with this one (`raise_all`)."""

    def all_errors(self) -> "Iterator[ConfigError]":
        """Yield this mistake and `others`, one ConfigError each."""
        yield ConfigError(self.place, self.problem, self.hint)
        yield from self.others


def printable(text: str) -> str:
    """Escape the unprintable characters of a text: text from other programs must not control the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def raise_all(errors: Iterable[ConfigError]) -> None:
    """Raise one ConfigError whose message lists all these errors. Do nothing if there are no errors."""
    error_list = list(errors)
    if error_list:
        first = ConfigError(error_list[0].place, error_list[0].problem, error_list[0].hint)
        first.args = ("\n".join(map(str, error_list)),)
        first.others = tuple(error_list[1:])
        raise first


def errors_of_check(check: Callable[..., object], *args: object) -> Iterator[ConfigError]:
    """Call `check(*args)`, and yield each mistake in the ConfigError that it raises."""
    try:
        check(*args)
    except ConfigError as exc:
        yield from exc.all_errors()


def install_hint(name: str) -> str:
    """Return the hint for a missing optional package: how to install the extra `name`."""
    return f"in a clone of llmtap: .venv/bin/pip install -c constraints.txt -e '.[{name}]'"


class PeerProtocolError(LlmtapError):
    """A client or server violated HTTP. `status`: status code of a relay's error response to the client,
    502 if the server is at fault."""

    def __init__(self, problem: str, status: int = 400) -> None:
        super().__init__(problem)
        self.status = status
