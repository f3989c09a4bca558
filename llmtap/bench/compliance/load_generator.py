"""4.1 and 4.2: what is measured, and what its load generator has to be able to do.

An ability is judged by what the report's loads show of it, not by what llmtap is known for: one that no load
of this test used is not applicable to it.
"""

from math import gcd
from typing import Final

from llmtap.bench.compliance.evidence import (
    Step,
    arrivals_of,
    at,
    count,
    declared,
    is_closed,
    is_open,
    over,
    protocol,
    seconds,
    several,
    steps,
)
from llmtap.bench.compliance.requirement import (
    MUSTS,
    Check,
    ComplianceVerdict,
    Report,
    Requirement,
    cannot_tell,
    met,
    not_applicable,
    not_met,
    row,
    worst,
)

__all__ = ["ROWS"]

_TIMES: Final = ("ttft", "ttfb", "e2e", "tbc", "tbc_max")
"""Of which the shortest and the longest are as they were stamped, not rounded into a bucket."""
AS_PLANNED: Final = 1.1
"""How much further than its plan a load may be from exponential."""
_LATE: Final = frozenset({"dispatch_lateness", "rate"})
"""Findings of a load's own verdict: requests left late, or fewer than were planned."""
WAITED: Final = 0.1
"""Of an answer's time."""
NO_OPEN: Final = "no load of this test is an open loop"
NO_CLOSED: Final = "no load of this test is a closed loop"


def _resolution(limit_ns: int, what: str) -> Check:
    """The largest step that all stamped times are multiples of, against a limit."""

    def check(report: Report) -> ComplianceVerdict:
        times = [
            at(step, f"result.metrics.{name}.{end}")
            for step in steps(report)
            for name in _TIMES
            for end in ("min", "max")
        ]
        stamped = [round(time * 1e9) for time in times if time]
        if len(stamped) < 4:
            return cannot_tell("the report has too few times to see their resolution")
        grain_ns = gcd(*stamped)
        clocks = {str(at(step, "result.sender.clock")) for step in steps(report)}
        evidence = (
            f"{len(stamped)} times of its loads are multiples of {grain_ns:,} ns, {what} needed;"
            f" stamped by {' and '.join(sorted(clocks))}"
        )
        return met(evidence) if grain_ns <= limit_ns else not_met(evidence)

    return check


def _streamed(report: Report) -> ComplianceVerdict:
    def judge(step: Step) -> ComplianceVerdict:
        stream, events = at(step, "result.plan.body.stream"), at(step, "result.chunking.events")
        if stream is False:
            return not_met("answers were asked for in one piece")
        if not events:
            return cannot_tell("no event of a stream is in the report")
        n = at(step, "result.n") or 0
        seen = f"{several(events, 'event')} of {several(n, 'answer')}"
        return met(f"{protocol(report) or 'a stream'}: {seen}")

    return over(report, judge)


def _each_chunk_timed(report: Report) -> ComplianceVerdict:
    def judge(step: Step) -> ComplianceVerdict:
        gaps, events = at(step, "result.metrics.tbc.n"), at(step, "result.chunking.content_events")
        if not gaps:
            return cannot_tell("no answer came in more than one chunk, or their times are not in the report")
        return met(f"{count(gaps)} gaps between {count(events or 0)} chunks with output, {_captured(step)}")

    return over(report, judge)


def _captured(step: Step) -> str:
    rows = at(step, "result.capture.rows")
    return f"capture of {count(rows)} exchanges" if rows else "no capture"


def _open_loop(report: Report) -> ComplianceVerdict:
    def judge(step: Step) -> ComplianceVerdict:
        planned, process = at(step, "result.arrivals.planned.n"), arrivals_of(step)
        if not planned or process is None:
            return cannot_tell("an open loop whose planned arrivals are not told")
        return met(f"{count(planned)} arrivals planned beforehand, {process}, whatever the answers did")

    return over(report, judge, is_open, NO_OPEN)


def _poisson(report: Report) -> ComplianceVerdict:
    """By the middle one of its loads: by chance alone, one in twenty is beyond its limit. A plan that chance
    drew beyond it is what was to be sent."""
    loads = [step for step in steps(report) if arrivals_of(step) == "poisson"]
    if not loads:
        return not_applicable("no load of this test has Poisson arrivals")
    found = []
    for step in loads:
        sent, limit = (at(step, f"result.arrivals.sent.ks.{name}") for name in ("distance", "limit_95"))
        planned = at(step, "result.arrivals.planned.ks.distance") or 0.0
        if sent is not None and limit:
            found.append((sent / max(limit, AS_PLANNED * planned), sent, planned, limit))
    if not found:
        return cannot_tell("the gaps between requests as they were sent are not in the report")
    share, sent, planned, limit = sorted(found)[(len(found) - 1) // 2]
    evidence = (
        f"the sent gaps are {sent:.3f} from exponential (KS), the planned {planned:.3f}, {limit:.3f} at 95 %"
    )
    if len(found) > 1:
        evidence += f", in the middle one of {len(found)} loads"
    return met(evidence) if share <= 1 else not_met(evidence)


def _other_arrivals(report: Report) -> ComplianceVerdict:
    """Patterns that were used; bursty are those whose gaps vary more than a Poisson stream's."""
    named = {
        process
        for step in steps(report)
        if (process := arrivals_of(step)) is not None and process != "poisson"
    }
    if not named:
        return not_applicable("no load of this test has uniform or bursty arrivals")
    return met(f"arrivals: {', '.join(sorted(named))}")


def _closed_loop(report: Report) -> ComplianceVerdict:
    def judge(step: Step) -> ComplianceVerdict:
        flying = _in_flight(step)
        if flying is None:
            return cannot_tell("a closed loop whose answers took no time that is told")
        return met(f"closed loop with {flying:.1f} requests in flight on average (n x E2E mean / time)")

    return over(report, judge, is_closed, NO_CLOSED)


def _in_flight(step: Step) -> float | None:
    """By Little's law, of answers that came whole."""
    n, mean = at(step, "result.metrics.e2e.n"), at(step, "result.metrics.e2e.mean")
    time = at(step, "result.window.seconds")
    return n * mean / time if n and mean and time else None


def _not_delayed(report: Report) -> ComplianceVerdict:
    """Who waits for answers is late by a good part of one; a machine without free CPUs is late as well, which
    is no matter of answers, and is said by the load's own verdict."""

    def judge(step: Step) -> ComplianceVerdict:
        late, slow = at(step, "result.dispatch_lateness.p99"), at(step, "result.metrics.e2e.p50")
        if late is None:
            return cannot_tell("how late requests left is not told")
        found = {str(at(one, "what")) for one in at(step, "result.verdict.findings") or ()}
        if "lost" in found:
            return not_met("a sending process died, and its requests were not sent")
        beside = f", where an answer took {seconds(slow)} (p50)" if slow else ""
        evidence = f"requests left {seconds(late)} after their time at p99{beside}"
        waited = not slow or late >= WAITED * slow
        return not_met(evidence) if waited and found & _LATE else met(evidence)

    return over(report, judge, is_open, NO_OPEN)


def _concurrent(report: Report) -> ComplianceVerdict:
    loads = steps(report)
    processes = max((len(at(step, "result.sender.processes") or ()) for step in loads), default=0)
    if not processes:
        return cannot_tell("the report does not tell its sending processes")
    most = max(_in_flight(step) or 0.0 for step in loads)
    if most <= 1:
        return not_applicable(f"{most:.2f} requests in flight on average: none had to wait for another")
    evidence = (
        f"{most:.1f} requests in flight on average, sent by {processes} process{'es' * (processes > 1)}"
    )
    return met(evidence) if most > processes else cannot_tell(evidence)


def _recorded(what: str, *paths: str, of: str = "") -> Check:
    """Whether the capture has every exchange, and the figure that needs this of each is there."""

    def check(report: Report) -> ComplianceVerdict:
        def judge(step: Step) -> ComplianceVerdict:
            n, rows = at(step, "result.n"), at(step, "result.capture.rows")
            have = [at(step, f"result.{path}") for path in paths]
            if not n or not any(have):
                return cannot_tell(f"the report shows no {what}")
            if rows != n:
                return cannot_tell(f"of {count(n)} exchanges {count(rows or 0)} are in the capture")
            first = next(value for value in have if value)
            told = f" ({count(first)} {of})" if of and isinstance(first, int | float) else ""
            return met(f"{what}{told}: {count(n)} exchanges in the capture")

        return over(report, judge)

    return check


def _all_abilities(report: Report) -> ComplianceVerdict:
    """The introduction of 4.2 is met where all it introduces is."""
    rows = [one for one in _ABILITIES if one.level in MUSTS]
    verdicts = [one.check(report) for one in rows]
    against = [one.id for one, verdict in zip(rows, verdicts, strict=True) if verdict.status == "not met"]
    if against:
        return not_met(f"not met: {', '.join(against)}")
    gravest = worst(verdicts, "")
    if gravest.status == "cannot tell":
        return gravest
    return met(f"{len(rows)} demands of 4.2.1 to 4.2.6, none unmet")


_ABILITIES: Final = (
    row(
        "4.2.1-1", "MUST", "load generator", "Times are measured to the millisecond or finer.",
        _resolution(1_000_000, "1 ms"),
    ),
    row(
        "4.2.1-2", "RECOMMENDED", "load generator", "Gaps between tokens are measured to the microsecond.",
        _resolution(1_000, "1 us"), ("itl",),
    ),
    row(
        "4.2.2-1", "MUST", "load generator", "Answers are received as streams: SSE, WebSocket or gRPC.",
        _streamed,
    ),
    row(
        "4.2.2-2", "MUST", "load generator", "Every token or chunk gets the time of its arrival.",
        _each_chunk_timed,
    ),
    row(
        "4.2.3-1", "MUST", "load generator",
        "An open loop is possible: requests come by a distribution, independent of answers.", _open_loop,
    ),
    row("4.2.3-2", "MUST", "load generator", "Poisson arrivals are possible.", _poisson),
    row(
        "4.2.3-3", "RECOMMENDED", "load generator", "Uniform and bursty arrivals are possible.",
        _other_arrivals,
    ),
    row(
        "4.2.4-1", "MUST", "load generator",
        "A closed loop is possible: so many requests at a time, each followed by another at once.",
        _closed_loop,
    ),
    row(
        "4.2.5-1", "MUST NOT", "load generator", "In an open loop, slow answers delay no later request.",
        _not_delayed,
    ),
    row(
        "4.2.5-2", "REQUIRED", "load generator", "Requests are sent asynchronously or by several threads.",
        _concurrent,
    ),
    row(
        "4.2.6-1a", "MUST", "load generator", "Of each request: when it was submitted.",
        _recorded("time of submission", "metrics.ttfb.n", "metrics.ttft.n"),
    ),
    row(
        "4.2.6-1b", "MUST", "load generator", "Of each request: when its first token arrived.",
        _recorded("first tokens", "metrics.ttft.n", of="answers"),
    ),
    row(
        "4.2.6-1c", "MUST", "load generator", "Of each request: when each later token arrived.",
        _recorded("later tokens", "metrics.tbc.n", of="chunks"),
    ),
    row(
        "4.2.6-1d", "MUST", "load generator", "Of each request: when its last token arrived.",
        _recorded("last tokens", "metrics.e2e.n", of="answers"),
    ),
    row(
        "4.2.6-1e", "MUST", "load generator", "Of each request: how many tokens went in.",
        _recorded("input tokens", "tokens.input", of="in all"),
    ),
    row(
        "4.2.6-1f", "MUST", "load generator", "Of each request: how many tokens came out.",
        _recorded("output tokens", "tokens.output", of="in all"),
    ),
    row(
        "4.2.6-1g", "MUST", "load generator", "Of each request: whether it succeeded.",
        _recorded("outcome", "outcomes"),
    ),
)  # fmt: skip

ROWS: Final[tuple[Requirement, ...]] = (
    row(
        "4.1-1", "MUST", "setup", "The boundary of the system under test is declared beforehand.",
        declared("sut.boundary", "boundary"),
    ),
    row(
        "4.2-1", "MUST", "load generator", "The load generator does all that 4.2.1 to 4.2.6 demand.",
        _all_abilities,
    ),
    *_ABILITIES,
)  # fmt: skip
