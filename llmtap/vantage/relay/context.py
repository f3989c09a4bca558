"""State that all connections and exchanges of a relay share: options, route, experiment, channel, counts."""

import asyncio
import logging
from typing import Final

from llmtap.net.pool import Route
from llmtap.protocol.inference import SkipRules
from llmtap.vantage.relay.experiment_router import ExperimentRouter
from llmtap.vantage.relay.options import RelayOptions
from llmtap.vantage.reporter import Reporter

WARN_EVERY_NS: Final = 1_000_000_000

log = logging.getLogger(__name__)


class RelayContext:
    """Options of a relay, its route to the upstream, its channel to the meter, and counts of refusals."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, options: RelayOptions, reporter: Reporter, route: Route
    ) -> None:
        self.loop = loop
        self.options = options
        self.reporter = reporter
        self.tap = reporter.tap
        self.now_ns = reporter.now_ns
        self.running = reporter.arrivals
        """The exchanges now."""
        self.route = route
        self.adds_fields = options.request_id == "make" or options.forwarded_for or options.via
        self.router: ExperimentRouter | None = None
        self.skips = SkipRules(options.skip, "relay.skip")
        self.refused: dict[str, int] = {}
        self.last_request_ns = 0
        """While the relay drains: time that an idle client connection has for one more request."""
        self._warned_ns: dict[str, int] = {}

    def refuse(self, limit: str) -> None:
        self.refused[limit] = self.refused.get(limit, 0) + 1

    def warn(self, kind: str, what: str, error: Exception | None = None) -> None:
        """Log a fault of a peer or of the system: at most one line per second and kind.

        Where the fault is ours, `error` is logged with its traceback.
        """
        now_ns = self.now_ns()
        if now_ns - self._warned_ns.get(kind, -WARN_EVERY_NS) >= WARN_EVERY_NS:
            self._warned_ns[kind] = now_ns
            log.warning("event=%s relay=%s error=%r", kind, self.reporter.name, what, exc_info=error)
