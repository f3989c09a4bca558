"""Exceptions of llmtap, and helpers to collect several ConfigErrors and to name a missing package.

A ConfigError is a mistake of the user, such as an invalid option or an unreadable file: a sentence that names
the place, with a hint, and exit code 2. Another LlmtapError ends a command with exit code 1 (`cli/main.py`).
A PeerProtocolError is a fault of a client or server, and becomes the outcome of one exchange. A bug in llmtap
is an `assert`.
"""

from collections.abc import Callable, Iterable, Iterator


class LlmtapError(Exception):
    """Base class of all exceptions of llmtap."""


class ConfigError(LlmtapError):
    """A setting is wrong. `place` names it (`relay.head_bytes in /etc/llmtap.toml`)."""

    def __init__(self, place: str, problem: str, hint: str | None = None) -> None:
        super().__init__(f"{place}: {problem}" + (f"\nhint: {hint}" if hint else ""))
        self.place = place
        self.problem = problem
        self.hint = hint
        self.others: tuple[ConfigError, ...] = ()
        """The other mistakes of one check (`raise_all`)."""

    def each(self) -> "Iterator[ConfigError]":
        """Yield this mistake and `others`, one ConfigError each."""
        yield ConfigError(self.place, self.problem, self.hint)
        yield from self.others


def raise_all(errors: Iterable[ConfigError]) -> None:
    """Raise one ConfigError whose text lists all of these; nothing if there are none."""
    found = list(errors)
    if found:
        first = ConfigError(found[0].place, found[0].problem, found[0].hint)
        first.args = ("\n".join(map(str, found)),)
        first.others = tuple(found[1:])
        raise first


def failures(check: Callable[..., object], *args: object) -> Iterator[ConfigError]:
    """Yield each mistake that a check raises."""
    try:
        check(*args)
    except ConfigError as exc:
        yield from exc.each()


def install_hint(name: str) -> str:
    """Return the hint for a missing optional package: how to install the extra `name`."""
    return f"in a clone of llmtap: .venv/bin/pip install -c constraints.txt -e '.[{name}]'"


class PeerProtocolError(LlmtapError):
    """A client or server violated HTTP. `status`: status code for a client that did."""

    def __init__(self, problem: str, status: int = 400) -> None:
        super().__init__(problem)
        self.status = status
