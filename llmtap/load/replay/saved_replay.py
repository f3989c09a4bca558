"""Parts of a stored result of a replay that a comparison reads (`comparison.py`).

The names are those of the JSON that `llmtap replay --json` writes (`result.py`). Times are in seconds, rates
are per second. Figures that older versions of llmtap did not write have a default.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from llmtap.errors import ConfigError


class SavedWindow(Struct, frozen=True):
    """Member `window` of a saved result."""

    start: str | None = None


class SavedLoad(Struct, frozen=True, kw_only=True):
    """Member `load` of a saved result."""

    stopped: str | None
    """Why the load ended early; None: it ended as planned."""
    offered_rps: float | None = None
    """Requests per second that were sent."""
    achieved_rps: float | None = None
    """Requests per second that ended well."""


class SavedTokens(Struct, frozen=True):
    """Member `tokens` of a saved result."""

    output_per_second: float | None = None


class SavedGoodput(Struct, frozen=True):
    """Member `goodput` of a saved result."""

    objectives: str | None = None
    met: int = 0
    """Number of requests that met all objectives."""
    counted: int = 0
    """Number of requests that the objectives judged."""
    not_judged: int | None = None
    requests_per_second: float | None = None


class SavedMetric(Struct, frozen=True):
    """A metric of a saved result, in seconds."""

    n: int = 0
    p50: float | None = None
    p99: float | None = None
    option: str | None = None
    """How ITL was computed: option A, B or C of the IETF draft, 4.6.3."""


class SavedClock(Struct, frozen=True):
    """Clock of a host that sent requests."""

    host: str


class SavedSender(Struct, frozen=True):
    """Member `sender` of a saved result."""

    llmtap: str
    """Version of llmtap."""
    clock: str
    """Source of timestamps: `kernel` or `mono`."""
    clocks: list[SavedClock]
    """Hosts of the sending processes."""
    processes: list[object]


class SavedWarmup(Struct, frozen=True):
    """Member `warmup` of a saved result."""

    requests: int


class SavedReplay(Struct, frozen=True, kw_only=True):
    """Parts of a saved result that a comparison needs."""

    n: int
    """Number of requests."""
    plan: dict[str, Any]
    """Settings by name, some of them nested."""
    load: SavedLoad
    sender: SavedSender
    warmup: SavedWarmup
    metrics: dict[str, SavedMetric | None]
    verdict: dict[str, Any]
    window: SavedWindow = SavedWindow()
    outcomes: dict[str, int] = {}
    tokens: SavedTokens = SavedTokens()
    goodput: SavedGoodput = SavedGoodput()
    chunking: dict[str, float | dict[str, float | None] | None] = {}
    """Figures of events, reads and chunks."""
    hdr_histograms: dict[str, str] = {}
    """By metric: its values as an HdrHistogram in base64."""
    system: dict[str, Any] = {}
    """Samples of the host and of the server."""

    @classmethod
    def of(cls, result: Mapping[str, Any], place: str) -> "SavedReplay":
        """Return the parts of a result. Raises ConfigError naming `place` and the field with a wrong type."""
        try:
            return msgspec.convert({k: v for k, v in result.items() if v is not None}, cls)
        except msgspec.ValidationError as exc:
            hint = "it was edited, or another version of llmtap wrote it"
            raise ConfigError(place, f"is not a result that can be compared: {exc}", hint) from None

    def metric(self, name: str) -> SavedMetric:
        """Return the figures of a metric; without values if the result does not have it."""
        return self.metrics.get(name) or SavedMetric()
