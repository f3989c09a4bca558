"""Whether a run's figures may be believed, said before they are read.

A load generator that cannot keep up measures itself. Each finding names the figure, the limit and what to do.
Pure: takes the result as public JSON. The limits are ours; where a document sets one, it is named.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

__all__ = ["LIMITS", "Finding", "findings"]

LIMITS: Final = {
    "lateness_p99": 0.002,
    "lateness_of_ttft": 0.05,
    "lateness_most": 0.02,
    "rate_share": 0.995,
    "cpu_share": 0.85,
    "uncertainty_of_ttft": 0.1,
    "uncertainty_of_tbc": 1.0,
    "failed_share": 0.0,
}
"""Lateness: p99 of dispatch, in seconds, or as a share of the TTFT p50, whichever allows more, but never
above the most. Rate: what was sent of what was asked, in the time of the plan. CPU: of one CPU, by a sending
process. Uncertainty: p99 over the exchanges of a byte's worst wait, by the TTFT p50 where stamps are our own;
a kernel's are taken before the wait, but one for all that is read at once, so there it is by the time between
chunks."""


CPU_SECONDS_MIN: Final = 5.0
"""A shorter run is mostly its sender's start."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What speaks against the figures."""

    what: str
    figure: float
    limit: float
    says: str

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def findings(result: Mapping[str, Any]) -> list[Finding]:
    """What there is to say against a result, the gravest first."""
    return [
        *_lost(result),
        *_silent(result),
        *_late(result),
        *_slow(result),
        *_busy(result),
        *_unsure(result),
        *_failed(result),
    ]


def _lost(result: Mapping[str, Any]) -> Iterator[Finding]:
    lost = len(result["sender"]["lost"])
    if lost:
        yield Finding("lost", lost, 0, f"{lost} sending processes died: what they sent is in no figure")


def _silent(result: Mapping[str, Any]) -> Iterator[Finding]:
    body = (result.get("plan") or {}).get("body") or {}
    complete = (result.get("outcomes") or {}).get("complete", 0)
    if complete and body.get("stream") and not result["metrics"]["ttft"].get("n", 1):
        yield Finding(
            "no_tokens", complete, 0,
            f"{complete:,} answers ended well and none brought a token: is it an LLM server that answers?",
        )  # fmt: skip


def _late(result: Mapping[str, Any]) -> Iterator[Finding]:
    lateness = result.get("dispatch_lateness") or {}
    p99, ttft = lateness.get("p99"), _ttft(result)
    if p99 is None:
        return
    by_ttft = min(LIMITS["lateness_most"], LIMITS["lateness_of_ttft"] * (ttft or 0))
    limit = max(LIMITS["lateness_p99"], by_ttft)
    if p99 > limit:
        yield Finding(
            "dispatch_lateness", p99, limit,
            f"1 % of the requests left {_ms(p99)} or more after their time: the load was not what was asked;"
            " send from a machine with free CPUs, or with more --processes",
        )  # fmt: skip


def _slow(result: Mapping[str, Any]) -> Iterator[Finding]:
    share, skipped = result["load"].get("sent_share"), result["load"].get("skipped")
    if share is not None and share < LIMITS["rate_share"]:
        yield Finding(
            "rate", share, LIMITS["rate_share"],
            f"{share:.1%} of the requests that were planned until then had been sent when the plan ended"
            + (f"; {skipped:,} were skipped by --limit-in-flight" if skipped else ""),
        )  # fmt: skip


def _busy(result: Mapping[str, Any]) -> Iterator[Finding]:
    if result["window"]["seconds"] < CPU_SECONDS_MIN:
        return
    busiest = max((p["cpu_share"] for p in result["sender"]["processes"]), default=0.0)
    if busiest > LIMITS["cpu_share"]:
        yield Finding(
            "sender_cpu", busiest, LIMITS["cpu_share"],
            f"a sending process used {busiest:.0%} of a CPU: more --processes would say whether it held back",
        )  # fmt: skip


def _unsure(result: Mapping[str, Any]) -> Iterator[Finding]:
    """A kernel's stamp is right however late it is read; but pieces that wait together get the last one's."""
    p99 = (result.get("uncertainties") or {}).get("p99")
    if p99 is None:
        return
    kernel = result["sender"]["clock"] == "kernel"
    name, share = ("tbc", "uncertainty_of_tbc") if kernel else ("ttft", "uncertainty_of_ttft")
    figure = result["metrics"][name]["p50"]
    if figure and p99 > LIMITS[share] * figure:
        what = "pieces may have been stamped together" if kernel else "a byte may have waited unstamped"
        yield Finding(
            "uncertainty", p99, LIMITS[share] * figure,
            f"in 1 % of the exchanges {what} for {_ms(p99)} or more, at a {name.upper()} p50 of"
            f" {_ms(figure)}: the sender was not given a CPU in time",
        )  # fmt: skip


def _failed(result: Mapping[str, Any]) -> Iterator[Finding]:
    outcomes = result.get("outcomes") or {}
    n = sum(outcomes.values())
    failed = n - sum(outcomes.get(name, 0) for name in ("complete", "refused"))
    if failed:
        why = ", ".join(
            f"{name} {k:,}" for name, k in outcomes.items() if name not in ("complete", "refused")
        )
        yield Finding(
            "failed", failed / n, LIMITS["failed_share"],
            f"{failed:,} of {n:,} requests did not end well ({why}): E2E is of the others, TTFT and gaps"
            " are of whatever came",
        )  # fmt: skip


def _ttft(result: Mapping[str, Any]) -> float | None:
    value: float | None = result["metrics"]["ttft"]["p50"]
    return value


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
