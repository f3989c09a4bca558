"""The root of llmtap's exceptions and its few children.

Three kinds of error get three treatments. Our own mistake is an `assert`. The world's (a peer that
breaks the protocol, an upstream that is away) becomes an outcome of one exchange and the run goes
on. The user's (a bad option, an unreadable file) is one sentence that names the place, with a hint,
and exit code 2.
"""

__all__ = ["ConfigError", "LlmtapError", "PeerProtocolError", "install_hint"]


class LlmtapError(Exception):
    """Root of everything llmtap raises on purpose."""


class ConfigError(LlmtapError):
    """A setting is wrong. `place` names it (`relay.head_bytes in /etc/llmtap.toml`)."""

    def __init__(self, place: str, problem: str, hint: str | None = None) -> None:
        super().__init__(f"{place}: {problem}" + (f"\nhint: {hint}" if hint else ""))
        self.place = place
        self.problem = problem
        self.hint = hint


def install_hint(name: str) -> str:
    """The hint where an optional package is missing: how the extra that brings it is installed."""
    return f"in a clone of llmtap: .venv/bin/pip install -c constraints.txt -e '.[{name}]'"


class PeerProtocolError(LlmtapError):
    """A peer broke HTTP. `status` is what a client that did so is told."""

    def __init__(self, problem: str, status: int = 400) -> None:
        super().__init__(problem)
        self.status = status
