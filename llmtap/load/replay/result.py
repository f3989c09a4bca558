"""What came of a replay, as public JSON: a Summary, the plan, how well it was kept, and by whom.

Names that a Summary has are its own (design: "Public contract"). Beside them: `plan` (all that makes the load
again), `dispatch_lateness`, `corrected` (latencies from the scheduled time), `quantiles` (what a distribution
is drawn from), `timeline` (second by second), `lengths` (prompts and answers by the server's own count),
`error_statuses` (of upstream errors, by HTTP status), `sender`, `verdict`, and where they are known `warmup`,
`system`, `server`, `baseline`.

Rates are in requests per second. Those of `arrivals`, and in an open loop `planned_rps` and `offered_rps`,
are of requests that wait for no answer: when the others come depends on the server.

| name | what it is of |
| --- | --- |
| `plan.arrivals.rate_rps` | the process: the mean that was asked for, around which arrivals are drawn |
| `arrivals.planned.rate_rps` | the whole plan, as it was drawn: gaps / span |
| `arrivals.sent.rate_rps` | what was sent: gaps / span; `punctuality.rate_ratio` is sent / planned |
| `load.planned_rps` | what of the plan was due before the run was stopped: requests / time of the last |
| `load.offered_rps` | of these, sent by then: what latencies are told at; `sent_share` is offered / planned |
| | closed loop: what was sent / the window |
| `load.achieved_rps` | exchanges that ended / the window, which is over with the last answer |

`load.due` counts what of the plan was due until it ended or was stopped, `load.in_time` what of that was sent
by then; `sent_share` is in_time / due. Of `connections_opened`, `connections_opened_before` stood before
the first request was due; `connections_reused` counts requests on one that had served another before.
"""

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from llmtap.clock import WallAnchor
from llmtap.load.replay.observations import RunObservations
from llmtap.load.replay.timeline import timeline_of
from llmtap.load.replay.verdict import findings
from llmtap.load.tally import LoadTally
from llmtap.load.workers.worker_pool import LoadResult
from llmtap.metrics.histogram import Histogram
from llmtap.metrics.statistics import summarise_ns
from llmtap.units import NS_PER_S, to_seconds

__all__ = ["QUANTILES", "result_of"]

QUANTILES: Final = (
    *(percent / 100 for percent in range(100)), *(permille / 1_000 for permille in range(991, 1_000)),
    0.9995, 0.9999, 1.0,
)  # fmt: skip
"""Shares at which a distribution is told: even, and finer where the tail is."""
_DRAWN: Final = ("ttft", "tbc", "itl", "e2e", "user_idle")
_CORRECTED: Final = ("ttft", "e2e")
_KEPT: Final = ("planned", "sent", "skipped", "dropped", "unsent", "retries")


def result_of(
    outcome: LoadResult,
    seen: RunObservations,
    *,
    plan: Mapping[str, object],
    closed: bool,
    clock: str,
    anchor: WallAnchor,
    beside: Mapping[str, object],
) -> dict[str, Any]:
    """The result.

    Args:
        outcome: of the run.
        seen: its exchanges.
        plan: what was to be sent, as JSON.
        closed: nobody planned when requests were to be sent.
        clock: who stamped: `kernel` or `mono`.
        anchor: makes dates of the run's times.
        beside: further parts, by name.
    """
    tally = outcome.tally
    seconds = (outcome.ended_ns - outcome.began_ns) / NS_PER_S
    window = {
        "name": "replay", "seconds": seconds,
        "start": _date(anchor, outcome.began_ns), "end": _date(anchor, outcome.ended_ns),
    }  # fmt: skip
    result = tally.summary.to_dict(window, seconds, "closed" if closed else "open")
    planned_ns = array("q") if closed else seen.planned_ns()
    kept = tally.plan_dict()
    result["load"] = {
        **_dict(result["load"]), **_load(outcome, seen, planned_ns), **{name: kept[name] for name in _KEPT},
    }  # fmt: skip
    # A sender has nobody whose request it could delay, or to whom it would pass an answer on.
    result["added"] = {}
    result["lengths"] = seen.lengths.describe()
    result["uncertainties"] = seen.uncertainties()
    result["errors"] = dict(seen.errors.most_common(ERRORS_MAX))
    result["error_statuses"] = {str(status): n for status, n in sorted(seen.error_statuses.items())}
    result["arrivals"] = None if closed else seen.arrivals(outcome.began_ns)
    result["dispatch_lateness"] = summarise_ns(tally.lateness)
    result["corrected"] = tally.corrected_dict()
    result["quantiles"] = _quantiles(tally)
    result["timeline"] = timeline_of(
        seen.sent_ns,
        seen.ended_ns,
        began_ns=outcome.began_ns,
        until_ns=outcome.ended_ns,
        planned_ns=planned_ns,
    )
    result["plan"] = dict(plan)
    result["sender"] = _sender(outcome, clock, seconds)
    result.update(beside)
    found = findings(result)
    valid = not any(finding.invalidates for finding in found)
    result["verdict"] = {"valid": valid, "findings": [finding.to_dict() for finding in found]}
    return result


def _load(outcome: LoadResult, seen: RunObservations, planned_ns: Sequence[int]) -> dict[str, object]:
    """What was planned, and how much of it was sent in its time.

    Rates and the share are of requests that wait for no answer: how the others come depends on the server.
    """
    told: dict[str, object] = {
        "stopped": outcome.stopped,
        "planned_rps": None,
        "sent_share": None,
        "due": None,
        "in_time": None,
    }
    if outcome.stopped is not None:
        # What was planned until somebody stopped it.
        last_ns = seen.last_sent_ns(outcome.began_ns)
        planned_ns = planned_ns[: bisect_right(planned_ns, last_ns)]
    span_ns = planned_ns[-1] if len(planned_ns) > 1 else 0
    if span_ns:
        in_time = seen.in_time(outcome.began_ns, span_ns + GRACE_NS)
        told["due"], told["in_time"] = len(planned_ns), min(in_time, len(planned_ns))
        told["planned_rps"] = len(planned_ns) / span_ns * NS_PER_S
        told["offered_rps"] = in_time / span_ns * NS_PER_S
        told["sent_share"] = min(1.0, in_time / len(planned_ns))
    return told


ERRORS_MAX: Final = 20
GRACE_NS: Final = 10_000_000
"""The last one may be late as any."""


def _quantiles(tally: LoadTally) -> dict[str, object]:
    """In seconds, a value for each of `shares`, interpolated as everywhere; null where there was nothing."""

    def told(histogram: Histogram) -> list[float] | None:
        return [to_seconds(v) for v in histogram.percentiles(QUANTILES) if v is not None] or None

    return {
        "shares": list(QUANTILES),
        "submit": {name: told(tally.summary.histogram(name)) for name in _DRAWN},
        "schedule": {name: told(tally.corrected[name]) for name in _CORRECTED},
        "dispatch_lateness": told(tally.lateness),
    }


def _sender(outcome: LoadResult, clock: str, seconds: float) -> dict[str, object]:
    done = outcome.done
    cpu_s = sum(d.cpu_ns for d in done) / NS_PER_S
    tokens = outcome.tally.summary.to_dict({}, 0)["tokens"]
    output = _dict(tokens).get("output") or 0
    return {
        "clock": clock,
        "processes": [
            {
                "cpu_seconds": d.cpu_ns / NS_PER_S,
                "cpu_share": d.cpu_ns / NS_PER_S / seconds if seconds else 0.0,
                "rss_bytes": d.rss_bytes, "connections_opened": d.connects,
                "connections_opened_before": d.opened_before, "connections_reused": d.reuses,
                "lag_max": d.lag_max_ns / NS_PER_S, "realtime": d.realtime,
            }
            for d in done
        ],
        "cpu_seconds_per_1000_tokens": cpu_s / output * 1_000 if output else None,
        "lost": outcome.lost,
        "clocks": [clock.to_dict() for clock in outcome.clocks],
    }  # fmt: skip


def _dict(value: object) -> dict[str, Any]:
    assert isinstance(value, dict)
    return value


def _date(anchor: WallAnchor, mono_ns: int) -> str:
    at = datetime.fromtimestamp(anchor.to_wall_ns(mono_ns) / NS_PER_S, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
