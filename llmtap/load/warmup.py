"""Warm up a server before measuring: one probe, requests, then probes until the latency is stable.

`warm_up` sends requests with a `WorkerPool`, as the run does, and returns the counts and the variation of the
latency (`WarmUp`). `replay/perform.py` calls it.

By default a warm-up has at least 100 requests and 10,000 output tokens, then probes until their latency
varies by less than 10 %, but at most 20,000 requests and 30 probes. A minimum that was not reached is
reported as `problem`. For a cold start nothing is sent. All probes are the same request, sent one at a time.
The variation of TTFT, and of E2E, is (longest - shortest) / mean of three consecutive probes.

Source: IETF draft, 4.5.1 (requests and tokens), 4.5.2 (stable latency) and 4.5.3 (cold start).
"""

import math
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from llmtap.clock import SystemClock
from llmtap.errors import LlmtapError
from llmtap.exchange.exchange import Exchange
from llmtap.load.endpoint_check import NO_ENDPOINT, endpoint_error, is_unanswerable
from llmtap.load.stop_conditions import StopConditions
from llmtap.load.workers.worker_handle import Progress, WorkerSetup
from llmtap.load.workers.worker_pool import WorkerPool
from llmtap.metrics.latency import measure
from llmtap.metrics.summary import ENDED_WELL
from llmtap.units import to_seconds
from llmtap.workload.requests import Requests

_Send = Callable[..., Awaitable[list[Exchange]]]
WarmUpProgress = Callable[[int, int, str], None]
"""Function called with a number that has ended, the planned number, and the unit: `requests` or `probes`."""
PROBES_COMPARED: Final = 3
"""Number of consecutive probes whose latencies are compared."""
ROUNDS_MAX: Final = 8
"""Maximum number of rounds. Each round sends the requests that are still missing, by an estimate."""


class WarmUpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How long to warm up."""

    requests: int = 100
    """Minimum number of answers that end well. Together they must have at least `tokens` output tokens."""
    tokens: int = 10_000
    """Minimum number of output tokens of all answers together."""
    slots: int = 8
    """Number of requests in flight."""
    requests_max: int = 20_000
    """Maximum number of requests: a server whose answers report no tokens never reaches `tokens`."""
    variation: float = 0.10
    """The latency is stable if three consecutive probes vary by less than this value."""
    probes_max: int = 30
    """Maximum number of probes."""
    probe: bool = True
    """Whether to send single requests until the latency is stable."""
    cold: bool = False
    """Whether to send nothing, so that a cold start is measured."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A single request, sent when no other is in flight."""

    outcome: str
    """Word of `Outcome`."""
    ttft_ns: int | None
    e2e_ns: int | None

    def to_dict(self) -> dict[str, object]:
        return {"outcome": self.outcome, "ttft": _seconds(self.ttft_ns), "e2e": _seconds(self.e2e_ns)}


@dataclass(slots=True)
class WarmUp:
    """What was sent to warm the server up, and whether that was enough."""

    skipped: str | None = None
    """Reason why no warm-up was sent; None: it was sent."""
    requests: int = 0
    """Number of answers that ended well; probes are not counted."""
    failed: int = 0
    """Number of requests that did not end well."""
    tokens: int = 0
    """Number of output tokens of all answers."""
    duration_ns: int = 0
    enough: bool = False
    """Whether the minimum numbers of answers and tokens were reached."""
    before: Probe | None = None
    """Probe before all other requests."""
    probes: list[Probe] = field(default_factory=list)
    """Single requests after the load."""
    variation_ttft: float | None = None
    """Variation of the TTFT of the latest three probes; None if one of them has no TTFT."""
    variation_e2e: float | None = None
    """Variation of E2E, as `variation_ttft`."""
    stable: bool = False
    """Whether three consecutive probes had nearly the same latency."""
    problem: str | None = None
    """What was not reached; None: the server is warm."""

    def to_dict(self) -> dict[str, object]:
        names = ("skipped", "requests", "failed", "tokens", "enough", "stable", "problem")
        return {
            **{name: getattr(self, name) for name in names},
            "duration": to_seconds(self.duration_ns),
            "before": None if self.before is None else self.before.to_dict(),
            "probes": [probe.to_dict() for probe in self.probes],
            "variation": {"ttft": self.variation_ttft, "e2e": self.variation_e2e},
        }


async def warm_up(
    setup: WorkerSetup,
    requests: Requests,
    bodies: "tuple[array[int], array[int]]",
    options: WarmUpOptions | None = None,
    progress: WarmUpProgress = lambda done, planned, unit: None,
    paths: Sequence[str] = (),
) -> WarmUp:
    """Send the rows of `requests` in their order, without regard to times and turns. The probe is row 0.

    `bodies` and `paths` are the same as in `WorkerPool`. Raises the errors of `WorkerPool.run`, and
    ConfigError if the target lacks the endpoint.
    """
    options = options or WarmUpOptions()
    if options.cold:
        return WarmUp(skipped="cold start")
    if not len(requests):
        return WarmUp(skipped="there is nothing to send")

    async def send(
        rows: Sequence[int], slots: int, listener: Callable[[Progress], None] | None = None
    ) -> list[Exchange]:
        return await _send_rows(setup, requests, bodies, paths, rows, slots, listener)

    result = WarmUp()
    if options.probe:
        (result.before,) = await _send_probes(send, 1)
    sent = 0
    for _ in range(ROUNDS_MAX):
        n = min(_missing_requests(result, options), options.requests_max - sent)
        if n <= 0:
            break
        began_ns = SystemClock.mono_ns()
        rows = [number % len(requests) for number in range(sent, sent + n)]
        for x in await send(rows, options.slots, partial(_round_listener, progress, sent, sent + n)):
            if x.outcome in ENDED_WELL:
                result.requests += 1
                result.tokens += x.tokens.output or 0
            else:
                result.failed += 1
        result.duration_ns += SystemClock.mono_ns() - began_ns
        sent += n
        if not result.requests:
            break
    result.enough = _missing_requests(result, options) == 0
    if not result.requests:
        result.problem = f"none of {result.failed} requests succeeded"
        return result
    if not result.enough:
        result.problem = (
            f"{result.requests} answers (minimum {options.requests}) and {result.tokens} output tokens "
            f"(minimum {options.tokens}) after {sent} requests"
        )
    if options.probe:
        await _send_until_stable(send, result, options, progress)
        if not result.stable and result.problem is None:
            result.problem = f"latency still varies after {len(result.probes)} probes"
    return result


def _missing_requests(result: WarmUp, options: WarmUpOptions) -> int:
    """Return the number of requests still to send, estimated from the answers so far."""
    by_requests = options.requests - result.requests
    tokens_missing = options.tokens - result.tokens
    if tokens_missing <= 0 or not result.requests:
        return max(0, by_requests)
    each = result.tokens / result.requests
    return max(by_requests, 1, math.ceil(tokens_missing / each) if each else options.requests)


def _round_listener(listener: WarmUpProgress, before: int, planned: int, progress: Progress) -> None:
    listener(before + progress.ended, planned, "requests")


async def _send_until_stable(
    send: _Send, result: WarmUp, options: WarmUpOptions, progress: WarmUpProgress
) -> None:
    """Send probes until the times of the latest ones differ little, or `probes_max` are sent."""
    while len(result.probes) < options.probes_max:
        progress(len(result.probes), options.probes_max, "probes")
        for probe in await _send_probes(send, min(PROBES_COMPARED, options.probes_max - len(result.probes))):
            result.probes.append(probe)
            latest = result.probes[-PROBES_COMPARED:]
            result.variation_ttft = _relative_range([probe.ttft_ns for probe in latest])
            result.variation_e2e = _relative_range([probe.e2e_ns for probe in latest])
            known = [v for v in (result.variation_ttft, result.variation_e2e) if v is not None]
            well = all(probe.outcome in ENDED_WELL for probe in latest)
            if len(latest) == PROBES_COMPARED and well and known and max(known) < options.variation:
                result.stable = True
                return


def _relative_range(latest: Sequence[int | None]) -> float | None:
    """Return (longest - shortest) / mean; None if there are too few values."""
    known = [ns for ns in latest if ns is not None]
    if len(known) < PROBES_COMPARED or not sum(known):
        return None
    return (max(known) - min(known)) / (sum(known) / len(known))


async def _send_probes(send: _Send, n: int) -> list[Probe]:
    probes = []
    for x in await send([0] * n, 1):
        m = measure(x)
        probes.append(Probe(x.outcome.value, m.ttft_ns, m.e2e_ns))
    return probes


async def _send_rows(
    setup: WorkerSetup,
    requests: Requests,
    bodies: "tuple[array[int], array[int]]",
    paths: Sequence[str],
    rows: Sequence[int],
    slots: int,
    listener: Callable[[Progress], None] | None,
) -> list[Exchange]:
    """Send these rows in order, `slots` at a time. `bodies`: begin and end of each row's body in the file."""
    change, load = msgspec.structs.replace, setup.load
    load = change(
        load,
        schedule=change(load.schedule, closed=slots, duration=None, drain=None),
        sending=change(load.sending, stop_when=StopConditions()),
        measuring=change(load.measuring, slo=None),
    )
    setup = change(setup, load=load, open=slots, name=f"{setup.name}-warmup")
    tenants = [requests.tenants[row] for row in rows] if requests.tenants else []
    plan = Requests(array("q", [0] * len(rows)), tenants=tenants)
    begins, ends = (array("q", [column[row] for row in rows]) for column in bodies)
    own = [paths[row] for row in rows] if paths else ()
    with WorkerPool(setup, plan, (begins, ends), paths=own, keep=True) as pool:
        out = await pool.run(listener)
        if out.lost_statuses:
            status = out.lost_statuses[0]
            raise LlmtapError(f"the sending process of the warm-up ended with status {status}: run it again")
        exchanges = [x for _, x in pool.exchanges()]
    if out.stopped == NO_ENDPOINT:
        raise endpoint_error(next(x for x in exchanges if is_unanswerable(x)))
    return exchanges


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else to_seconds(ns)
