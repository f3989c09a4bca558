"""Decide whether the figures of a replay are valid, from its result as public JSON.

A load generator that cannot keep up measures itself. `findings` returns `Finding`s, the most serious first;
each names figure, limit and remedy, and one that `invalidates` means that the load was not the requested one.
`unchecked` names what no rule could check. Pure; `result.py` stores both as `verdict`. The limits are ours
unless a document is named.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from llmtap.load.run import TIME_UP
from llmtap.metrics.histogram import Histogram
from llmtap.metrics.latency import SPREAD_NS
from llmtap.report.values import at
from llmtap.units import NS_PER_S, SHARE_OF_MIN, format_share

LIMITS: Final = {
    "lateness_p99": 0.002,
    "lateness_of_ttft": 0.05,
    "lateness_most": 0.02,
    "rate_share": 0.995,
    "rate_missing": 3,
    "cpu_share": 0.85,
    "uncertainty_of_ttft": 0.1,
    "uncertainty_of_tbc": 1.0,
    "failed_share": 0.0,
    "clocks": 0.010,
    "prompt_tokens": 0.01,
    "prompt_tokens_most": 0.10,
}
"""Lateness: p99 of dispatch in seconds, or as a share of the TTFT p50, whichever is larger, but at most
`lateness_most`. Rate: sent / planned in the time of the plan, if more than one or two requests are missing.
CPU: share of one CPU of a sending process. Uncertainty: p99 by the TTFT p50; with kernel timestamps, which
are only wrong for data read together, by the time between chunks, or per token (`_limit`). Clocks: seconds
between sending hosts (IETF 4.7.2). Prompt tokens: sum of absolute differences between the server's and
our counts by our sum. Up to the first limit it is a token at the start of a prompt or of the template; beyond
the second the server had to prefill another load than planned."""


CAUTION_SHARE: Final = 0.07
"""Up to this share of late stamps or requests a finding is a caution."""
CPU_SECONDS_MIN: Final = 5.0
"""A shorter run consists mostly of its sender's start."""
_SERVERS_OWN: Final = frozenset({408, 425, 429})
"""4xx statuses that do not blame the request: too slow, too early, too many."""
_MERGED: Final = "several chunks may have got one timestamp"
_UNLIMITED: Final = (
    "whether several chunks got one timestamp: the chunks of an answer come in one read, so that neither the"
    " TBC p50 nor the TPOT p50 gives a limit"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem or fact that concerns the figures."""

    what: str
    figure: float
    limit: float
    says: str
    invalidates: bool = True
    """The load was not the requested one; otherwise the finding is a caution."""
    share: float | None = None
    """Share of the requests or exchanges that a stamp or dispatch beyond the limit concerns."""
    partial: bool = False
    """The load was only a part of the requested one."""

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def findings(
    result: Mapping[str, Any], *, lateness: Histogram | None = None, uncertainties: Histogram | None = None
) -> list[Finding]:
    """Return the findings of a result, the most serious first.

    `lateness`, `uncertainties`: all values of `dispatch_lateness` and `uncertainties`, in ns.
    """
    late, unsure = partial(_late, values=lateness), partial(_unsure, values=uncertainties)
    rules = (_lost, _left_out, _silent, late, _slow, _busy, unsure, _failed, _apart, _miscounted)
    return [finding for rule in rules for finding in rule(result)]


def _lost(result: Mapping[str, Any]) -> Iterator[Finding]:
    lost = len(result["sender"]["lost"])
    if lost:
        died, they = ("1 sending process", "it") if lost == 1 else (f"{lost} sending processes", "they")
        yield Finding("lost", lost, 0, f"{died} died: what {they} sent is in no figure")
    unread = result.get("unread") or 0
    if unread:
        n = (result.get("outcomes") or {}).values()
        yield Finding(
            "unread", unread, 0,
            f"the exchanges of {unread:,} of {sum(n):,} requests did not come from the sending processes:"
            " they are in the latencies and outcomes, and not in the lengths, the timeline or a capture",
        )  # fmt: skip


def _left_out(result: Mapping[str, Any]) -> Iterator[Finding]:
    plan = result.get("plan") or {}
    left, rows = plan.get("rows_left_out") or 0, plan.get("rows") or 0
    if left:
        yield Finding(
            "left_out", left / (left + rows), 0,
            f"{left:,} of the trace's {left + rows:,} rows ({left / (left + rows):.1%}) were left out: they"
            " have no arrival time, or neither a token count nor a size of the prompt",
            invalidates=False, partial=True,
        )  # fmt: skip
    load = result["load"]
    # A generated plan is longer than the duration that was set: the rest was never meant to be sent.
    as_set = load.get("stopped") == TIME_UP and "trace" not in plan
    if load.get("stopped") and load.get("unsent") and not as_set:
        yield Finding(
            "stopped", load["unsent"] / load["planned"], 0,
            f"{_part(load['unsent'], load['planned'], 'planned requests')} were not sent: it was stopped",
            invalidates=False, partial=True,
        )  # fmt: skip
    if estimated := plan.get("rows_estimated") or 0:
        yield Finding(
            "estimated", estimated / rows, 0,
            f"{_part(estimated, rows, 'rows')} of the trace have no token count: the lengths of prompts"
            " and answers are estimated, so compare latencies with the original only roughly",
            invalidates=False, share=estimated / rows,
        )  # fmt: skip


def _silent(result: Mapping[str, Any]) -> Iterator[Finding]:
    body = (result.get("plan") or {}).get("body") or {}
    complete = (result.get("outcomes") or {}).get("complete", 0)
    if complete and body.get("stream") and not result["metrics"]["ttft"].get("n", 1):
        yield Finding(
            "no_tokens", complete, 0,
            f"{complete:,} answers ended well and none brought a token: is it an LLM server that answers?",
        )  # fmt: skip


def _late(result: Mapping[str, Any], values: Histogram | None) -> Iterator[Finding]:
    lateness = result.get("dispatch_lateness") or {}
    p99, ttft = lateness.get("p99"), _ttft(result)
    if p99 is None:
        return
    by_ttft = min(LIMITS["lateness_most"], LIMITS["lateness_of_ttft"] * (ttft or 0))
    limit = max(LIMITS["lateness_p99"], by_ttft)
    if p99 > limit:
        beyond, share = _beyond(values, lateness["n"], limit)
        yield Finding(
            "dispatch_lateness", p99, limit,
            f"the p99 of the lateness of {lateness['n']:,} requests is {_ms(p99)}, and {beyond:,} of them"
            f" left later than {_ms(limit)}; send from a machine with free CPUs, or with more"
            " --processes",
            invalidates=share > CAUTION_SHARE, share=share,
        )  # fmt: skip


def _slow(result: Mapping[str, Any]) -> Iterator[Finding]:
    load = result["load"]
    share = load.get("sent_share")
    if share is None:
        return
    due, in_time = load["due"], load["in_time"]
    if share < LIMITS["rate_share"] and due - in_time >= LIMITS["rate_missing"]:
        yield Finding(
            "rate", share, LIMITS["rate_share"],
            f"{_part(in_time, due, 'requests')} that were planned until then had been sent when the plan"
            " ended",
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


def _unsure(result: Mapping[str, Any], values: Histogram | None) -> Iterator[Finding]:
    """Kernel timestamps are correct however late data is read, but data read together gets one timestamp."""
    p99, n = (at(result, "uncertainties", name) for name in ("p99", "n"))
    name, limit = _limit(result)
    if p99 is not None and limit and p99 > limit:
        beyond, of_all = _beyond(values, n, limit)
        what = "a byte may have waited unstamped" if name == "ttft" else _MERGED
        yield Finding(
            "uncertainty", p99, limit,
            f"{what}: the p99 of this error over {n:,} exchanges is {_ms(p99)}, and"
            f" {beyond:,} of them have one above {_ms(limit)}, the limit by the {name.upper()} p50;"
            " send from a machine with free CPUs",
            invalidates=of_all > CAUTION_SHARE, share=of_all,
        )  # fmt: skip


def _limit(result: Mapping[str, Any]) -> tuple[str, float]:
    """Return the metric that limits the uncertainty, and the limit in seconds; 0 if there is none.

    With kernel timestamps the limit is the time between chunks. If chunks come in bursts, most of these gaps
    are 0, and the limit is the time per token: that is the time between the chunks as they were generated, so
    a server that holds text back has the same limit as one that does not.
    """
    if result["sender"]["clock"] != "kernel":
        return "ttft", LIMITS["uncertainty_of_ttft"] * (_ttft(result) or 0)
    gap, each = (at(result, "metrics", name, "p50") or 0.0 for name in ("tbc", "tpot"))
    spread = SPREAD_NS / NS_PER_S
    name, time = ("tpot", each) if gap <= spread < each else ("tbc", gap)
    return name, LIMITS["uncertainty_of_tbc"] * time


def unchecked(result: Mapping[str, Any]) -> list[str]:
    """Return what could not be checked, each with the reason."""
    streams = at(result, "metrics", "ttft", "n") and at(result, "uncertainties", "p99") is not None
    if streams and not _limit(result)[1]:
        return [_UNLIMITED]
    return []


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
            f"{failed:,} of {n:,} requests did not end well ({why}): E2E is of the others; TTFT and gaps"
            f" are of all tokens that came{_of_requests(result)}",
        )  # fmt: skip


def _of_requests(result: Mapping[str, Any]) -> str:
    """Return the part about answers that blame the request: upstream errors, but not the server's fault."""
    blamed = {
        status: n
        for status, n in (result.get("error_statuses") or {}).items()
        if 400 <= int(status) < 500 and int(status) not in _SERVERS_OWN
    }
    if not blamed:
        return ""
    statuses = ", ".join(f"{status} ({n:,})" for status, n in blamed.items())
    return f"; {sum(blamed.values()):,} of them by answers that blame the request: status {statuses}"


def _apart(result: Mapping[str, Any]) -> Iterator[Finding]:
    """Clocks are compared by a round trip, accurate to half of it."""
    others = [clock for clock in result["sender"].get("clocks") or () if not clock["shared"]]
    hosts = len({clock["host"] for clock in others})
    apart = max((clock["rtt"] / 2 for clock in others), default=0.0)
    if apart > LIMITS["clocks"]:
        yield Finding(
            "clocks", apart, LIMITS["clocks"],
            f"the clocks of other hosts ({hosts}) are known within {_ms(apart)},"
            " and IETF 4.7.2 asks for 10 ms: when they sent is no surer than that (latencies are: each is of"
            " one clock)",
        )  # fmt: skip


def _miscounted(result: Mapping[str, Any]) -> Iterator[Finding]:
    """Two tokenizers or templates differ. Without `--tokenizer` exact lengths were not requested."""
    told = result.get("lengths") or {}
    counted, usage = told.get("input_counted") or 0, told.get("input_usage") or 0
    if not counted:
        return
    share = told["input_apart"] / counted
    if share > LIMITS["prompt_tokens"]:
        named = (result.get("plan") or {}).get("tokenizer") is not None
        grave = named and share > LIMITS["prompt_tokens_most"]
        limit = LIMITS["prompt_tokens_most" if grave else "prompt_tokens"]
        few = counted < SHARE_OF_MIN
        apart = f"{told['input_apart']:,} tokens" if few else format_share(told["input_apart"], counted)
        yield Finding(
            "prompt_tokens", share, limit,
            f"the server counted {usage:,} prompt tokens, we {counted:,}: prompt by prompt {apart} apart;"
            " --tokenizer takes the folder of the server's model",
            invalidates=grave,
        )  # fmt: skip


def _beyond(values: Histogram | None, n: int, limit: float) -> tuple[int, float]:
    """Return the number and share of `n` values above a limit in seconds; all of them if they are unknown."""
    beyond = n if values is None else values.above(limit * NS_PER_S)
    return beyond, beyond / n


def _ttft(result: Mapping[str, Any]) -> float | None:
    value: float | None = result["metrics"]["ttft"]["p50"]
    return value


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _part(k: int, n: int, things: str) -> str:
    """Format `78 of 80 requests`, or `97.51 % of the 12,000 requests`."""
    return f"{k:,} of {n:,} {things}" if n < SHARE_OF_MIN else f"{format_share(k, n)} of the {n:,} {things}"
