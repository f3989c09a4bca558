"""Relays connected to a meter (identity, last status, disconnects, lost exchanges), and load of the upstream.

The receiver and the pipeline feed `RelayBook` (`join`, `update`, `leave`); the admin port reads it for
`/readyz`, `/metrics` and summaries. `Reckoning` keeps the counts of one relay current between two reports,
for the assembler, in case the relay dies. `UpstreamLoad` requests the `/metrics` of the inference server
(vLLM, SGLang, TGI) or of llm-d's router every 5 s, and keeps the values of the last scrape for summaries and
the meter's own `/metrics`; `net/server_metrics.py` parses them. After a failed scrape there are no values.
Counters restart with the upstream.
"""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec

from llmtap.channel.frames import Hello
from llmtap.channel.status import RelayStatus
from llmtap.counts import MIDDLEWARE, PASSIVE, RELAY, fields_of
from llmtap.exchange.exchange import BACK
from llmtap.net.server_metrics import ACCEPT, SCRAPE_ERRORS, failure_reason, read_body, read_metrics_in_thread
from llmtap.units import NS_PER_S

STATUS_FRESH_NS: Final = 5 * NS_PER_S
"""Age of a relay's latest status from which the relay is not ready. Relays report twice a second."""
STATUS_LATE_NS: Final = NS_PER_S
"""Age of the latest status from which the relay or the meter is behind: twice the interval of reports."""
GONE_NS: Final = 5 * NS_PER_S
"""Time after a disconnect from which the open exchanges of a relay count as lost. A relay that is alive
connects again within this time, and counts its losses itself."""
DEATHS: Final = {
    RELAY: "the relay died, so the client got an incomplete response or none",
    MIDDLEWARE: "the application died, so the client got an incomplete response or none",
    PASSIVE: "llmtap watch died: the traffic was not affected, but the rest of it was not seen",
}
"""By kind of vantage: text on the exchanges that were lost because their vantage died."""
RELAYS_MAX: Final = 64
"""Maximum number of reported relays, so that relays that crash again and again cannot fill `/metrics`."""


@dataclass(frozen=True, slots=True)
class RelayState:
    """State of a relay at the time of a scrape."""

    name: str
    connected: bool
    status: RelayStatus | None
    implementation: str = ""
    """Name of the relay's transport: compiled or Python."""
    vantage: str = ""
    """Kind of the vantage: `relay`, `middleware` or `passive`."""
    measured_elsewhere: bool = False
    """Whether another meter measures the relay, so that this meter's capture has none of its exchanges."""


class RelayAccount(msgspec.Struct, array_like=True):
    """Data on a relay that a meter sends to the meter that replaces it, but still measures itself."""

    hello: Hello
    status: RelayStatus
    connected: bool
    """Whether the relay is connected, so that more exchanges can come."""


class Reckoning:
    """Counts of a relay: those of its latest status, updated by later frames, in case the relay dies.

    `opened = measured + dropped + running`. The running exchanges are lost if the relay dies.
    """

    __slots__ = ("_dropped_count", "_latest_status", "_opened_count", "_seq_max", "running")

    def __init__(self) -> None:
        self.running = 0
        """Number of exchanges under way."""
        self._latest_status: RelayStatus | None = None
        self._seq_max = 0
        """Latest sequence number; one that is missing below it shows a request that was dropped."""
        self._opened_count = 0
        """Number of requests opened since the latest status."""
        self._dropped_count = 0
        """Number of requests dropped since the latest status."""

    def count_opened(self, seq: int) -> None:
        self.running += 1
        self._seq_max = seq
        if self._latest_status is None or seq > self._latest_status.opened:
            self._opened_count += 1

    def count_settled(self, *, dropped: bool) -> None:
        """Count the end of an exchange. `dropped`: it was not reported, because the channel was full."""
        self.running -= 1
        self._dropped_count += dropped

    def update(self, status: RelayStatus) -> None:
        """Replace the counts by those of a status, which includes all frames before it."""
        self._latest_status = status
        self._opened_count = self._dropped_count = 0

    def final_status(self) -> RelayStatus | None:
        """Return the latest status with the counts up to the latest frame; None if there was no status."""
        last = self._latest_status
        if last is None:
            return None
        opened = max(last.opened, self._seq_max)
        # Each missing sequence number is an exchange that was dropped because the channel was full.
        overflow = self._dropped_count + opened - last.opened - self._opened_count
        dropped = dict(last.dropped)
        if overflow:
            dropped["overflow"] = dropped.get("overflow", 0) + overflow
        measured = opened - sum(dropped.values()) - self.running
        return msgspec.structs.replace(
            last, opened=opened, dropped=dropped, measured=measured, unsettled=self.running
        )


@dataclass(slots=True)
class _Relay:
    """A relay that is or was connected."""

    hello: Hello
    epoch: int
    """Number of its connection, counted over all relays."""
    connected: bool = True
    status: RelayStatus | None = None
    status_received_ns: int = 0
    """Time at which the latest status arrived."""
    disconnect_ns: int = 0
    """Time at which the connection ended."""
    open_at_disconnect: int = 0
    """Number of exchanges that were under way when the connection ended, so are lost."""
    skipped: int = 0
    """Number of requests that the relay forwarded but did not report, so far."""
    measured_elsewhere: bool = False
    """Whether the relay is measured by the meter that this one replaces, until the relay has drained."""


class RelayBook:
    """Relays by name, connected and disconnected ones."""

    def __init__(self) -> None:
        self._relays: dict[str, _Relay] = {}
        self._epoch = 0
        """Number of connections so far; a relay's latest one shows whether it has reconnected."""

    def join(self, hello: Hello) -> int:
        """Register a relay that connected with this hello. Return its connection's number, for `leave`."""
        self._epoch += 1
        known = self._relays.get(hello.relay)
        fresh = _Relay(hello, self._epoch, skipped=hello.skipped)
        if known is not None:
            fresh.status, fresh.status_received_ns = known.status, known.status_received_ns
        self._relays[hello.relay] = fresh
        self._forget_oldest()
        return self._epoch

    def update(self, name: str, status: RelayStatus, now_ns: int) -> int:
        """Store a relay's status. Return the number of requests that it skipped since the previous status."""
        relay = self._relays.get(name)
        if relay is not None:
            relay.status, relay.status_received_ns = status, now_ns
            before, relay.skipped = relay.skipped, sum(status.skipped.values())
            return relay.skipped - before
        return 0

    def has_reconnected(self, name: str, epoch: int) -> bool:
        """Return whether the relay has a newer connection than `epoch`, and is therefore alive."""
        relay = self._relays.get(name)
        return relay is not None and relay.epoch != epoch

    def leave(
        self, name: str, epoch: int, open_exchanges: int, now_ns: int, final: RelayStatus | None = None
    ) -> None:
        """Store that a relay's connection ended with this number of open exchanges.

        Ends of older connections (`epoch`) are ignored. `final`: status that replaces the last one.
        """
        relay = self._relays.get(name)
        if relay is not None and relay.epoch == epoch:
            relay.connected = False
            relay.disconnect_ns = now_ns
            relay.open_at_disconnect = open_exchanges
            if final is not None:
                relay.status = final

    def listen_url(self) -> str | None:
        """Return the URL for clients: the address of the newest relay that listens; None without one."""
        urls = (
            relay.hello.listen
            for relay in reversed(self._relays.values())
            if relay.connected and relay.hello.side != BACK
        )
        return next(filter(None, urls), None)

    def side(self, name: str) -> str | None:
        """Return the side of the gateway on which a relay is; None: it is not part of a pair."""
        relay = self._relays.get(name)
        return None if relay is None else relay.hello.side or None

    def known_ns(self) -> int | None:
        """Return the time up to which all relays of pairs have reported; None if one never reported."""
        reported = [
            0 if relay.status is None else relay.status.t_ns
            for relay in self._relays.values()
            if relay.connected and relay.hello.side and not relay.measured_elsewhere
        ]
        return min(reported, default=0) or None

    def upstream(self, name: str) -> str | None:
        """Return the URL of a relay's upstream; None if it has several, or if it is not known."""
        relay = self._relays.get(name)
        upstreams = {} if relay is None or relay.status is None else relay.status.upstreams
        return next(iter(upstreams)) if len(upstreams) == 1 else None

    def processed_ns(self, name: str, now_ns: int) -> int:
        """Return the time up to which the meter knows all events of a relay, with an error of STATUS_LATE_NS.

        Frames and statuses come in order. If the last status is old, the relay or the meter is behind.
        """
        relay = self._relays.get(name)
        status_ns = 0 if relay is None or relay.status is None else relay.status.t_ns
        return now_ns if now_ns - status_ns <= STATUS_LATE_NS or not status_ns else status_ns

    def accounts(self) -> list[RelayAccount]:
        """Return the accounts of all relays, also disconnected ones, for the meter that replaces this one."""
        return [
            RelayAccount(
                relay.hello,
                relay.status if relay.connected else _add_lost(relay.status, relay.open_at_disconnect),
                relay.connected,
            )
            for relay in self._relays.values()
            # Skip a relay that is connected to another meter: that meter sends the account itself.
            if relay.status is not None and not (relay.measured_elsewhere and relay.connected)
        ]

    def absorb(self, accounts: Iterable[RelayAccount], now_ns: int) -> None:
        """Store the accounts of relays. The meter that this one replaces still measures these relays."""
        for account in accounts:
            name = account.hello.relay
            known = self._relays.get(name)
            # Skip a relay that has connected to this meter, which then measures it.
            if known is None or known.measured_elsewhere:
                self._relays[name] = _Relay(
                    account.hello, 0, account.connected, account.status, now_ns, measured_elsewhere=True
                )
        self._forget_oldest()

    def has_ready_relay(self, now_ns: int) -> bool:
        """Return whether a connected relay reported lately, does not drain, and has no upstream down."""
        return any(
            r.connected
            and not r.measured_elsewhere
            and r.status is not None
            and not r.status.draining
            and r.status.upstream_up is not False
            and now_ns - r.status_received_ns <= STATUS_FRESH_NS
            for r in self._relays.values()
        )

    def states(self, now_ns: int) -> list[RelayState]:
        """Return the state of each relay at a monotonic time."""
        return [
            RelayState(
                name,
                _is_connected(r, now_ns),
                _status_at(r, now_ns),
                r.hello.implementation,
                r.hello.vantage,
                r.measured_elsewhere,
            )
            for name, r in self._relays.items()
        ]

    def to_dict(self, now_ns: int) -> dict[str, object]:
        """Return public JSON: by name of a relay, its latest status (without counts before the first one)."""
        return dict(_relay_documents(self._relays, now_ns))

    def _forget_oldest(self) -> None:
        gone = [name for name, relay in self._relays.items() if not relay.connected]
        for name in gone[: max(0, len(self._relays) - RELAYS_MAX)]:
            del self._relays[name]


def _is_connected(relay: _Relay, now_ns: int) -> bool:
    """Return whether a relay is connected to this meter, or to another meter that has lately reported it."""
    return relay.connected and not (relay.measured_elsewhere and now_ns - relay.status_received_ns > GONE_NS)


def _status_at(relay: _Relay, now_ns: int) -> RelayStatus | None:
    """Return the latest status. Open exchanges of a dead relay, which it cannot report, are added as lost."""
    status, lost = relay.status, relay.open_at_disconnect
    if relay.connected or not lost or now_ns - relay.disconnect_ns <= GONE_NS:
        return status
    return _add_lost(RelayStatus(opened=lost, unsettled=lost) if status is None else status, lost)


def _add_lost(status: RelayStatus, lost: int) -> RelayStatus:
    """Return a status in which unsettled exchanges are counted as lost."""
    unsettled = max(0, status.unsettled - lost)
    return msgspec.structs.replace(status, lost=status.lost + lost, unsettled=unsettled)


def _relay_documents(relays: dict[str, _Relay], now_ns: int) -> Iterator[tuple[str, dict[str, object]]]:
    for name, relay in relays.items():
        s = _status_at(relay, now_ns)
        about: dict[str, object] = {
            "connected": _is_connected(relay, now_ns),
            "pid": relay.hello.pid,
            "clock": relay.hello.clock,
            "vantage": relay.hello.vantage or None,
            "implementation": relay.hello.implementation or None,
            "implementation_reason": relay.hello.implementation_reason or None,
            "status_age": None if s is None else (now_ns - relay.status_received_ns) / 1e9,
        }
        if s is not None:
            vantage = relay.hello.vantage
            about["lost_reason"] = DEATHS[vantage or RELAY] if s.lost else None
            about |= {one.name: one.value(s) for one in fields_of(RelayStatus) if one.applies_to(vantage)}
            if "upstreams" in about:
                tried_ns = s.upstreams_tried_ns.items()
                about["upstream_ages"] = {url: (now_ns - t_ns) / 1e9 for url, t_ns in tried_ns}
        yield name, about


SCRAPE_PERIOD_S: Final = 5.0
SCRAPE_TIMEOUT_S: Final = 4.0


class UpstreamLoad:
    """Latest values of the upstream's own metrics."""

    def __init__(self, url: str) -> None:
        """`url`: address of the metrics. It can contain a key, so it is never reported."""
        self._url = url
        self.values: dict[str, float] = {}
        """By name in `net.server_metrics.SERIES`: latest value. Empty after a failed scrape."""
        self.failures = 0
        """Number of failed scrapes."""
        self.problem: str | None = None
        """Reason why the latest scrape failed; None if it succeeded."""

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=SCRAPE_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=ACCEPT) as session:
            while True:
                await self._scrape(session)
                await asyncio.sleep(SCRAPE_PERIOD_S)

    async def _scrape(self, session: aiohttp.ClientSession) -> None:
        try:
            async with session.get(self._url) as response:
                body = await read_body(response)
            values = await read_metrics_in_thread(body)
            problem = None if values else "the page has no metric of vLLM, SGLang or TGI"
        except SCRAPE_ERRORS as exc:
            values, problem = {}, failure_reason(exc)
        self.values, self.problem = values, problem
        self.failures += problem is not None

    def to_dict(self) -> dict[str, Any]:
        return {"values": dict(self.values), "failures": self.failures, "problem": self.problem}
