"""Checks of the IETF draft's section 4: load generator, workloads, tokens, warm-up, clocks, guardrails.

A check gets the JSON of one test's report and returns a verdict. `ROWS` has the requirements with their
checks, for `judge.py`. An ability that no load of the test used is not applicable. Long because section 4 is
one table.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import Any, Final

from llmtap.bench.compliance.evidence import (
    DATA_SETS,
    MODEL_LOAD,
    MUSTS,
    Check,
    ComplianceVerdict,
    LoadJudge,
    Report,
    Status,
    Step,
    arrivals_of,
    at,
    cannot_tell,
    count,
    declared,
    departures,
    each_load,
    is_closed,
    is_open,
    met,
    name_of,
    not_applicable,
    not_met,
    only_at,
    over,
    protocol,
    reads,
    requirements,
    seconds,
    several,
    steps,
    text,
    verdict,
    workload,
    workload_is,
    worst,
)
from llmtap.units import NS_PER_S, parse_duration_ns

_TIMES: Final = ("ttft", "ttfb", "e2e", "tbc", "tbc_max")
"""Metrics whose minimum and maximum are exact, not rounded to a histogram bucket."""
AS_PLANNED: Final = 1.1
"""Allowed ratio of the KS distance of the sent gaps to that of the planned gaps."""
_LATE: Final = frozenset({"dispatch_lateness", "rate"})
"""Findings of a load's verdict: late requests, or fewer requests than planned."""
WAITED: Final = 0.1
NO_OPEN: Final = "no load of this test is an open loop"
NO_CLOSED: Final = "no load of this test is a closed loop"


def _resolution(limit_ns: int, what: str) -> Check:
    """Return a check of the clock resolution: the largest step that divides all times, against a limit."""

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
        return verdict(grain_ns <= limit_ns, evidence)

    return check


@each_load()
def _streamed(report: Report, step: Step) -> ComplianceVerdict:
    stream, events = at(step, "result.plan.body.stream"), at(step, "result.chunking.events")
    if stream is False:
        return not_met("answers were asked for in one piece")
    if not events:
        return cannot_tell("no event of a stream is in the report")
    n = at(step, "result.n") or 0
    seen = f"{several(events, 'event')} of {several(n, 'answer')}"
    return met(f"{protocol(report) or 'a stream'}: {seen}")


@each_load()
def _each_chunk_timed(report: Report, step: Step) -> ComplianceVerdict:
    gaps, events = at(step, "result.metrics.tbc.n"), at(step, "result.chunking.content_events")
    if not gaps:
        return cannot_tell("no answer came in more than one chunk, or their times are not in the report")
    return met(f"{count(gaps)} gaps between {count(events or 0)} chunks with output, {_captured(step)}")


def _captured(step: Step) -> str:
    rows = at(step, "result.capture.rows")
    return f"capture of {count(rows)} exchanges" if rows else "no capture"


@each_load(is_open, NO_OPEN)
def _open_loop(report: Report, step: Step) -> ComplianceVerdict:
    planned, process = at(step, "result.arrivals.planned.n"), arrivals_of(step)
    if not planned or process is None:
        return cannot_tell("an open loop whose planned arrivals are not reported")
    return met(f"{count(planned)} arrivals planned beforehand, {process}, whatever the answers did")


def _poisson_possible(report: Report) -> ComplianceVerdict:
    """Judge the median load, since one in twenty exceeds its limit by chance."""
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
    return verdict(share <= 1, evidence)


def _other_arrivals(report: Report) -> ComplianceVerdict:
    named = {
        process
        for step in steps(report)
        if (process := arrivals_of(step)) is not None and process != "poisson"
    }
    if not named:
        return not_applicable("no load of this test has uniform or bursty arrivals")
    return met(f"arrivals: {', '.join(sorted(named))}")


@each_load(is_closed, NO_CLOSED)
def _closed_loop(report: Report, step: Step) -> ComplianceVerdict:
    flying = _in_flight(step)
    if flying is None:
        return cannot_tell("a closed loop whose answers took no time that is reported")
    return met(f"closed loop with {flying:.1f} requests in flight on average (n x E2E mean / time)")


def _in_flight(step: Step) -> float | None:
    n, mean = at(step, "result.metrics.e2e.n"), at(step, "result.metrics.e2e.mean")
    time = at(step, "result.window.seconds")
    return n * mean / time if n and mean and time else None


@each_load(is_open, NO_OPEN)
def _not_delayed(report: Report, step: Step) -> ComplianceVerdict:
    """Judge the dispatch lateness by the duration of a response."""
    late, slow = at(step, "result.dispatch_lateness.p99"), at(step, "result.metrics.e2e.p50")
    if late is None:
        return cannot_tell("how late requests left is not reported")
    found = {str(at(one, "what")) for one in at(step, "result.verdict.findings") or ()}
    if "lost" in found:
        return not_met("a sending process died, and its requests were not sent")
    beside = f", where an answer took {seconds(slow)} (p50)" if slow else ""
    evidence = f"requests left {seconds(late)} after their time at p99{beside}"
    waited = not slow or late >= WAITED * slow
    return not_met(evidence) if waited and found & _LATE else met(evidence)


def _concurrent(report: Report) -> ComplianceVerdict:
    loads = steps(report)
    processes = max((len(at(step, "result.sender.processes") or ()) for step in loads), default=0)
    if not processes:
        return cannot_tell("the report does not report its sending processes")
    most = max(_in_flight(step) or 0.0 for step in loads)
    if most <= 1:
        return not_applicable(f"{most:.2f} requests in flight on average: none had to wait for another")
    evidence = (
        f"{most:.1f} requests in flight on average, sent by {processes} process{'es' * (processes > 1)}"
    )
    return met(evidence) if most > processes else cannot_tell(evidence)


def _recorded(what: str, *paths: str, of: str = "") -> Check:
    @each_load()
    def check(report: Report, step: Step) -> ComplianceVerdict:
        n, rows = at(step, "result.n"), at(step, "result.capture.rows")
        first = next((value for path in paths if (value := at(step, f"result.{path}"))), None)
        if not n or not first:
            return cannot_tell(f"the report shows no {what}")
        if rows != n:
            return cannot_tell(f"of {count(n)} exchanges {count(rows or 0)} are in the capture")
        told = f" ({count(first)} {of})" if of and isinstance(first, int | float) else ""
        return met(f"{what}{told}: {count(n)} exchanges in the capture")

    return check


def _all_abilities(report: Report) -> ComplianceVerdict:
    """Judge the introduction of 4.2 by all the requirements that it introduces."""
    rows = [one for one in ROWS if one.section.startswith("4.2.") and one.level in MUSTS]
    verdicts = [one.check(report) for one in rows]
    against = [one.id for one, verdict in zip(rows, verdicts, strict=True) if verdict.status == "not met"]
    if against:
        return not_met(f"not met: {', '.join(against)}")
    gravest = worst(verdicts, "")
    if gravest.status == "cannot tell":
        return gravest
    return met(f"{len(rows)} demands of 4.2.1 to 4.2.6, none unmet")


NO_WORKLOAD: Final = "the report does not say what the requests were"


def _name(step: Step) -> str:
    return str(workload(step).get("name") or at(step, "result.plan.trace"))


def _each_custom(judge: LoadJudge) -> Check:
    def check(report: Report) -> ComplianceVerdict:
        none = "its workloads are those of 4.3.2"
        return over(report, judge, lambda step: bool(departures(report, step)), none)

    return check


@_each_custom
def _custom(report: Report, step: Step) -> ComplianceVerdict:
    return met(f"{_name(step)}: {'; '.join(departures(report, step))}")


def fully_specified(report: Report, step: Step) -> ComplianceVerdict:
    parts = [part(report, step) for part in (_input, _output, _contents, _sharing)]
    found = worst(parts, NO_WORKLOAD)
    told = f"workload {_name(step)}: lengths, contents and sharing are reported"
    return met(told) if found.status == "met" else found


def _described(step: Step) -> Mapping[str, Any]:
    return workload(step) or at(step, "result.plan.lengths") or {}


def _lengths(step: Step, side: str, fixed: object) -> ComplianceVerdict:
    """Judge the distribution, parameters and unit of lengths. `fixed`: one length for all requests."""
    told = _described(step)
    if fixed:
        return met(f"{side}: fixed, {text(fixed)} tokens")
    if not told:
        trace = at(step, "result.plan.trace")
        return not_met(f"{side} lengths are those of the trace {trace}" if trace else NO_WORKLOAD)
    lengths = told.get(side)
    if not isinstance(lengths, Mapping) or not lengths:
        return not_met(f"{_name(step)} does not report its {side} lengths")
    lacking = [name for name in ("distribution", "unit") if not lengths.get(name)]
    if lacking:
        return not_met(f"{side} lengths lack {' and '.join(lacking)}")
    if (
        not any(isinstance(lengths.get(name), int | float | list) for name in lengths)
        and "within" not in lengths
    ):
        return not_met(f"{side} lengths are {lengths['distribution']}, without parameters or a histogram")
    return met(f"{side}: {_said(lengths)}")


def _said(lengths: Mapping[str, Any]) -> str:
    figures = [
        f"{name} {text(value)}"
        for name, value in lengths.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return " ".join([str(lengths.get("distribution")), *figures, f"in {lengths.get('unit')}"])


def _input(report: Report, step: Step) -> ComplianceVerdict:
    return _lengths(step, "input", at(step, "result.plan.input_tokens"))


def _output(report: Report, step: Step) -> ComplianceVerdict:
    found = _lengths(step, "output", at(report, "params.output_tokens"))
    if found.status != "met":
        return found
    control = at(_described(step), "output.control")
    return (
        met(f"{found.evidence}, by {control}")
        if control
        else not_met("how outputs are limited is not reported")
    )


def _contents(report: Report, step: Step) -> ComplianceVerdict:
    content = workload(step).get("content")
    if not isinstance(content, Mapping) or not content.get("domain"):
        return not_met("neither domain nor language of the contents is reported")
    language = content.get("language") or "no language"
    prompt = at(workload(step), "sharing.tokens")
    system = "no system prompt" if prompt is None else "the shared context is the system prompt"
    return met(f"{content['domain']}, {language}; {system}")


def _sharing(report: Report, step: Step) -> ComplianceVerdict:
    told = workload(step)
    if "sharing" not in told:
        return not_met("whether prompts share a prefix is not reported")
    sharing = told["sharing"]
    if sharing is None:
        return met("no prefix is shared")
    lengths, fraction = sharing.get("tokens"), sharing.get("fraction")
    known = lengths.get("distribution") if isinstance(lengths, Mapping) else lengths
    if fraction is None or not known:
        return not_met("how many requests share how long a prefix is not reported")
    shown = _said(lengths) if isinstance(lengths, Mapping) else f"{text(lengths)} tokens"
    return met(f"{fraction:.0%} share a prefix: {shown}")


@each_load()
def _seeded(report: Report, step: Step) -> ComplianceVerdict:
    seed, digest = at(step, "result.plan.seed"), workload(step).get("sha256")
    if seed is None:
        return not_met("the load has no seed")
    return met(f"seed {seed}" + (f", sequence sha256 {digest[:12]}" if digest else ""))


def _published(report: Report) -> ComplianceVerdict:
    exact = report.get("exact_requests")
    if exact:
        return met(f"the requests lie in {exact}")

    def judge(report: Report, step: Step) -> ComplianceVerdict:
        told = workload(step)
        if not told.get("generation") or told.get("seed") is None:
            return not_met("neither the requests nor how they are made again is in the report")
        return met(f"made again by llmtap {at(report, 'versions.llmtap')} with seed {told['seed']}")

    return over(report, judge)


def _of_data(part: str, what: str) -> Check:
    def judge(report: Report, step: Step) -> ComplianceVerdict:
        data = workload(step).get("data")
        if not data:
            return not_met(
                f"{_name(step)} is to be drawn from {DATA_SETS[_name(step)]}, and no file was given"
            )
        told = text(data.get(part))
        return met(f"{what}: {told}") if told else not_met(f"{what} of the data set is not reported")

    def from_data(step: Step) -> bool:
        return bool(workload(step).get("data")) or _name(step) in DATA_SETS

    return lambda report: over(report, judge, from_data, "no workload is drawn from a data set")


REFERENCE: Final = "cl100k_base"


def _method(report: Report) -> ComplianceVerdict:
    option = {"native": "A (native)", "reference": "B (reference)"}.get(
        str(at(report, "sut.tokenizer.counting"))
    )
    if option is None:
        return not_met("neither option is declared (sut.tokenizer.counting)")
    sources: dict[str, int] = {}
    for step in steps(report):
        for source, n in (at(step, "result.tokens.source") or {}).items():
            sources[source] = sources.get(source, 0) + (n or 0)
    guessed = sources.get("chunks", 0)
    if guessed:
        return not_met(
            f"option {option} is declared, and tokens of {several(guessed, 'answer')} were taken to be one"
            " each, by chunk: no tokenizer counts so"
        )
    told = ", ".join(f"{source} {count(n)}" for source, n in sorted(sources.items()))
    return met(f"option {option}" + (f"; counts by {told}" if told else ""))


def _reference(report: Report) -> ComplianceVerdict:
    """Judge a comparison of systems with different tokenizers."""
    reports = report.get("reports")
    if reports is None:
        return not_applicable("one system: nothing is compared across tokenizers")
    names = {text(at(one, "sut.tokenizer.name")) or "unknown" for one in reports}
    methods = {str(at(one, "sut.tokenizer.counting")) for one in reports}
    if len(names) == 1 and "unknown" not in names and methods == {"native"}:
        return not_applicable(f"all systems have one tokenizer: {names.pop()}")
    if methods == {"reference"} and names == {REFERENCE}:
        return met(f"option B with {REFERENCE} for all")
    return not_met(f"tokens counted by {', '.join(sorted(methods))}: {', '.join(sorted(names))}")


REQUESTS_MIN: Final = 100
TOKENS_MIN: Final = 10_000
"""Both apply, since the draft wants the greater of the two."""
VARIATION_MAX: Final = 0.10

WarmUp = Mapping[str, Any]


def _made(report: Report) -> Sequence[WarmUp]:
    return [one for one in report.get("warmups") or () if not one.get("skipped")]


def _says_cold(report: Report) -> str | None:
    said = [*(report.get("configuration") or {}).values(), *(report.get("notes") or ())]
    return next((one for one in said if "cold start" in str(one).lower()), None)


def _each_warmup(judge: Callable[[WarmUp], ComplianceVerdict]) -> Check:
    """Return a check over all warm-ups; each measured configuration needs its own."""

    def check(report: Report) -> ComplianceVerdict:
        made, cold = _made(report), _says_cold(report)
        if not steps(report):
            return cannot_tell("the report has no loads")
        if not made:
            return not_applicable(f"cold start: {cold}") if cold else not_met("no warm-up was made")
        cold_arms = {str(step.get("arm") or "") for step in steps(report)} - {
            str(one.get("arm") or "") for one in made
        }
        if cold_arms:
            named = ", ".join(sorted(arm or "the target" for arm in cold_arms))
            return not_met(f"no warm-up in this configuration: {named}")
        return worst([judge(one) for one in made], "")

    return check


def _loaded(warmup: WarmUp) -> ComplianceVerdict:
    """A stable latency is the only sign from outside that the model is loaded."""
    n = warmup.get("requests") or 0
    if not n:
        return cannot_tell("it answered nothing before it was measured")
    if not warmup.get("probes"):
        return cannot_tell(f"{several(n, 'answer')}, whose latency was not probed")
    if not warmup.get("stable"):
        return cannot_tell(f"{several(n, 'answer')}, whose latency had not settled")
    return met(f"{several(n, 'answer')} before the measurement, and a latency that had settled")


def _processed(warmup: WarmUp) -> ComplianceVerdict:
    n, tokens = warmup.get("requests") or 0, warmup.get("tokens") or 0
    evidence = (
        f"{several(n, 'request')} of {REQUESTS_MIN} and {count(tokens)} output tokens of {count(TOKENS_MIN)}"
    )
    return verdict(n >= REQUESTS_MIN and tokens >= TOKENS_MIN, evidence)


def _drained(warmup: WarmUp) -> ComplianceVerdict:
    probes, n, failed = (warmup.get(name) for name in ("probes", "requests", "failed"))
    if probes:
        return met(f"all its answers had come: {len(probes)} probes followed, one at a time")
    if n and failed == 0:
        return met(f"all its {several(n, 'answer')} had come, and none had failed")
    return cannot_tell("nothing shows that its answers had all come")


def _prefixes(report: Report) -> ComplianceVerdict:
    """Judge whether each warm load was primed with its prefixes, or found cached tokens."""
    warm = [step for step in steps(report) if name_of(step).endswith("/warm")]
    if not warm:
        return cannot_tell("no load is told to have found the cache filled")
    primed = [at(step, "result.primed") or 0 for step in warm]
    hits = [at(step, "result.tokens.cached") or 0 for step in warm]
    evidence = (
        f"{len(warm)} warm loads: {count(sum(primed))} prefixes sent before them, {count(sum(hits))} input"
    )
    evidence += " tokens told to come from the cache"
    return met(evidence) if all(primed) or all(hits) else cannot_tell(evidence)


def _probed(warmup: WarmUp) -> ComplianceVerdict:
    before, after = at(warmup, "before.ttft"), at(warmup, "after.ttft")
    if before is None or after is None:
        return not_met("no probe before and after it has a latency")
    return met(f"a probe's TTFT was {before * 1e3:.1f} ms before and {after * 1e3:.1f} ms after")


def _settled(warmup: WarmUp) -> ComplianceVerdict:
    told = [
        f"{name.upper()} {value:.1%}"
        for name, value in (warmup.get("variation") or {}).items()
        if value is not None
    ]
    if not told:
        return not_met("too few probes to see their variation")
    evidence = f"consecutive probes vary by {', '.join(told)}, less than {VARIATION_MAX:.0%} wanted"
    return verdict(bool(warmup.get("stable")), evidence)


def _cold_unwarmed(report: Report) -> ComplianceVerdict:
    load = report.get("model_load")
    if load is not None:
        return met(f"model load {load['first_token']:.3g} s: to the first answer of a process just started")
    cold = _says_cold(report)
    made = _made(report)
    if cold is None:
        return not_applicable("no cold start is measured")
    if made:
        return not_met(f"a cold start is measured, after a warm-up of {count(made[0].get('requests') or 0)}")
    return met("a cold start is measured, and no warm-up was made")


def _indicated(report: Report) -> ComplianceVerdict:
    if report.get("model_load") is not None:
        line = (report.get("configuration") or {}).get(MODEL_LOAD)
        return met(f"it says: {MODEL_LOAD}: {line}") if line else not_met("the model load is not stated")
    if _made(report) or not steps(report):
        return not_applicable("no cold start is measured")
    cold = _says_cold(report)
    if cold is None:
        return not_met("nothing was warmed up, and the report does not call it a cold start")
    return met(f"it says: {cold}")


OPTIONS: Final = {
    "A": "time between chunks",
    "B": "distributed over the tokens of a chunk",
    "C": "the server's",
}


def _spoken(wanted: str) -> Check:
    def check(report: Report) -> ComplianceVerdict:
        spoken = protocol(report)
        if spoken is None:
            return cannot_tell("the target's address does not report its protocol")
        return met(spoken) if spoken == wanted else not_met(f"{spoken}, not {wanted}")

    return check


def _protocol(report: Report) -> ComplianceVerdict:
    told, seen = at(report, "sut.protocol"), protocol(report)
    if told and seen and seen.lower() not in str(told).lower():
        return not_met(f"{told} is declared, and {seen} was spoken")
    return met(str(told or seen)) if told or seen else not_met("the protocol is not reported")


@each_load()
def _chunking(report: Report, step: Step) -> ComplianceVerdict:
    told = at(report, "sut.chunking")
    share, known = (
        at(step, "result.chunking.single_token_share"),
        at(step, "result.chunking.chunks_with_known_tokens"),
    )
    if share is None:
        return met(str(told)) if told else not_met("how many tokens a chunk has is not reported")
    return met(
        f"{share:.1%} of {count(known)} chunks have one token" + (f"; declared: {told}" if told else "")
    )


@each_load()
def _handling(report: Report, step: Step) -> ComplianceVerdict:
    policies = at(step, "result.metrics.itl.policy") or {}
    if not policies:
        return cannot_tell("no gap between tokens was measured")
    seen = (f"{policy}: {several(n, 'answer')}" for policy, n in policies.items())
    return met("; ".join(seen))


def _option(report: Report) -> ComplianceVerdict:
    """Judge the declared option: `A`, `B`, `C`, a variant such as `B-even`, or several: `A + B-even`."""
    told = report.get("itl_option")
    options = [one.strip()[:1].upper() for one in str(told or "").split("+")]
    if not all(option in OPTIONS for option in options):
        return not_met("none of A, B and C is declared (itl_option)")
    if "C" in options and not _told_by_server(report):
        return not_met("C is declared, and the server reported no times of tokens")
    return met(f"option {told}: {' and '.join(OPTIONS[option] for option in options)}")


def _server_side(report: Report) -> ComplianceVerdict:
    told = _told_by_server(report)
    if not told:
        return not_applicable("the server reports no times of tokens")
    option = str(report.get("itl_option"))
    evidence = f"the server reported {count(told)} gaps between tokens; the option is {option}"
    return verdict("C" in option, evidence)


def _told_by_server(report: Report) -> int:
    return sum(at(step, "result.metrics.itl_server.n") or 0 for step in steps(report))


NTP_MAX_S: Final = 0.010
PTP_BELOW_S: Final = 0.001
NOT_PLACED: Final = "where the load generator stands is not declared (sut.clock.placement)"
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3,}(Z|[+-]\d\d:\d\d)")


@only_at("model engine")
@reads("sut.clock.placement", NOT_PLACED)
def _same_machine(placement: Any) -> ComplianceVerdict:
    return verdict(placement == "same machine", f"placement of the load generator: {placement}")


def _only_remote(check: Check) -> Check:

    def checked(report: Report) -> ComplianceVerdict:
        placement = at(report, "sut.clock.placement")
        if placement is None:
            return cannot_tell(NOT_PLACED)
        if placement != "remote":
            return not_applicable("load generator and SUT share a machine")
        return check(report)

    return checked


def _accuracy_s(report: Report) -> float | None:
    """Return the declared accuracy in seconds, from texts such as `2ms`, `< 2 ms` or `0.002`."""
    told = text(at(report, "sut.clock.accuracy")).strip("<~ ").replace(" ", "")
    try:
        return parse_duration_ns(told) / NS_PER_S
    except ValueError:
        return None


@_only_remote
def _ntp(report: Report) -> ComplianceVerdict:
    method, accuracy_s = text(at(report, "sut.clock.synchronization")), _accuracy_s(report)
    if not method:
        return cannot_tell("how clocks are synchronised is not declared (sut.clock.synchronization)")
    if "ntp" not in method.lower() and "chrony" not in method.lower():
        return not_applicable(f"clocks are synchronised by {method}")
    if accuracy_s is None:
        return cannot_tell("how well NTP does is not declared as a time (sut.clock.accuracy)")
    evidence = f"{method}, accurate to {seconds(accuracy_s)}; 10 ms needed"
    return verdict(accuracy_s <= NTP_MAX_S, evidence)


@_only_remote
def _ptp(report: Report) -> ComplianceVerdict:
    method, accuracy_s = text(at(report, "sut.clock.synchronization")), _accuracy_s(report)
    if "ptp" in method.lower():
        return met(method)
    if accuracy_s is None or accuracy_s >= PTP_BELOW_S:
        return not_applicable("no accuracy below a millisecond is asked for")
    return not_met(f"accurate to {seconds(accuracy_s)} by {method or 'nothing that is declared'}, not by PTP")


@_only_remote
def _stated(report: Report) -> ComplianceVerdict:
    method, accuracy = (text(at(report, f"sut.clock.{name}")) for name in ("synchronization", "accuracy"))
    if method and accuracy:
        return met(f"{method}, accurate to {accuracy}")
    return not_met("sut.clock lacks " + ("accuracy" if method else "synchronization"))


@only_at("application gateway")
@_only_remote
def _rtt(report: Report) -> ComplianceVerdict:
    said = _says(report, "rtt", "round trip")
    return met(said) if said else not_met("no round trip time of the network is in the report")


def _subtracted(report: Report) -> ComplianceVerdict:
    said = _says(report, "subtracted")
    return met(said) if said else not_applicable("no latency is said to be adjusted")


def _says(report: Report, *words: str) -> str | None:
    """Return the first note or line of the configuration that has one of these words."""
    lines = [
        *(f"{label}: {said}" for label, said in (report.get("configuration") or {}).items()),
        *(report.get("notes") or ()),
        *(at(report, "sut.notes") or ()),
    ]
    return next((line for line in map(str, lines) if any(word in line.lower() for word in words)), None)


@each_load()
def _dated(report: Report, step: Step) -> ComplianceVerdict:
    start = at(step, "result.window.start")
    if not isinstance(start, str):
        return cannot_tell("no load has the time of its start")
    return verdict(bool(_DATE.fullmatch(start)), start)


_FILTERS: Final = ("input_filter", "output_filter")


def _state(report: Report) -> dict[str, bool | None]:
    return {name: at(report, f"sut.guardrails.{name}") for name in _FILTERS}


def _shown(state: dict[str, bool | None]) -> str:
    words = {True: "on", False: "off", None: "not declared"}
    return ", ".join(f"{name.replace('_', ' ')} {words[value]}" for name, value in state.items())


def _named(report: Report) -> ComplianceVerdict:
    names, state = text(at(report, "sut.guardrails.names")), _state(report)
    if names:
        return met(names)
    if None in state.values():
        return not_met("neither names of safety systems nor whether there are any")
    return not_applicable("there are none" if not any(state.values()) else "no name is known")


def _refused(report: Report) -> ComplianceVerdict:
    refused = report.get("refused")
    if refused is None:
        return not_met("how many requests were refused is not reported")
    sent = sum(at(step, "result.n") or 0 for step in steps(report))
    return met(f"{count(refused)} of {several(sent, 'request')} were refused")


def _filters(undeclared: Status, all_on: Status, one_on: Status, none_on: Status) -> Check:
    """Return a check of the declared filters, with a status for each combination."""

    def check(report: Report) -> ComplianceVerdict:
        state = _state(report)
        on = [*state.values()].count(True)
        status = undeclared if None in state.values() else (none_on, one_on, all_on)[on]
        return ComplianceVerdict(status, _shown(state))

    return check


@only_at("application gateway")
def _compared(report: Report) -> ComplianceVerdict:
    arms = {str(step.get("arm") or "the target") for step in steps(report)}
    evidence = f"configurations measured: {', '.join(sorted(arms)) or 'none'}"
    return verdict(len(arms) > 1, evidence)


ROWS: Final = requirements(
    {
        "4.1-1": declared("sut.boundary", "boundary"),
        "4.2-1": _all_abilities,
        "4.2.1-1": _resolution(1_000_000, "1 ms"),
        "4.2.1-2": _resolution(1_000, "1 us"),
        "4.2.2-1": _streamed,
        "4.2.2-2": _each_chunk_timed,
        "4.2.3-1": _open_loop,
        "4.2.3-2": _poisson_possible,
        "4.2.3-3": _other_arrivals,
        "4.2.4-1": _closed_loop,
        "4.2.5-1": _not_delayed,
        "4.2.5-2": _concurrent,
        "4.2.6-1a": _recorded("time of submission", "metrics.ttfb.n", "metrics.ttft.n"),
        "4.2.6-1b": _recorded("first tokens", "metrics.ttft.n", of="answers"),
        "4.2.6-1c": _recorded("later tokens", "metrics.tbc.n", of="chunks"),
        "4.2.6-1d": _recorded("last tokens", "metrics.e2e.n", of="answers"),
        "4.2.6-1e": _recorded("input tokens", "tokens.input", of="in all"),
        "4.2.6-1f": _recorded("output tokens", "tokens.output", of="in all"),
        "4.2.6-1g": _recorded("outcome", "outcomes"),
        "4.3-1": _custom,
        "4.3-2": _each_custom(fully_specified),
        "4.3.1-1a": each_load()(_input),
        "4.3.1-1b": each_load()(_output),
        "4.3.1-1c": each_load()(_contents),
        "4.3.1-1d": each_load()(_sharing),
        "4.3.2.1-1": only_at("model engine")(workload_is("synthetic-uniform")),
        "4.3.2.3-1": only_at("application gateway")(workload_is("conversation")),
        "4.3.2.5-1": workload_is("long-context", "long-context-uniform"),
        "4.3.3-1": _seeded,
        "4.3.3-2": declared("seed", "seed"),
        "4.3.3-3": _published,
        "4.3.3-4a": _of_data("version", "version"),
        "4.3.3-4b": _of_data("subset", "subset"),
        "4.3.3-4c": _of_data("preprocessing", "preprocessing"),
        "4.4.1-1a": declared("sut.tokenizer.name", "tokenizer"),
        "4.4.1-1b": declared("sut.tokenizer.vocabulary", "vocabulary"),
        "4.4.1-1c": declared("sut.tokenizer.source", "source"),
        "4.4.2-1": _method,
        "4.4.2-2": _reference,
        "4.4.3-1a": declared("sut.tokenizer.special", "BOS and EOS"),
        "4.4.3-1b": declared("sut.tokenizer.system_prompt", "system prompt"),
        "4.4.3-1c": declared("sut.tokenizer.tools", "tool calls"),
        "4.5.1-1a": _each_warmup(_loaded),
        "4.5.1-1b": _each_warmup(_processed),
        "4.5.1-1c": _each_warmup(_drained),
        "4.5.1-1d": _prefixes,
        "4.5.2-1a": _each_warmup(_probed),
        "4.5.2-1b": _each_warmup(_settled),
        "4.5.3-1": _cold_unwarmed,
        "4.5.3-2": _indicated,
        "4.6.1-1": only_at("application gateway")(_spoken("SSE")),
        "4.6.1-2": only_at("model engine")(_spoken("gRPC")),
        "4.6.2-1a": _protocol,
        "4.6.2-1b": _chunking,
        "4.6.2-1c": _handling,
        "4.6.3-1": _option,
        "4.6.3-2": _server_side,
        "4.7.1-1": _same_machine,
        "4.7.2-1": _ntp,
        "4.7.2-2": _ptp,
        "4.7.2-3": _stated,
        "4.7.3-1": _rtt,
        "4.7.3-2": _subtracted,
        "4.7.3-3": _subtracted,
        "4.7.4-1": _dated,
        "4.7.4-2": _dated,
        "4.8-1": _filters("not met", "met", "met", "met"),
        "4.8.1-1a": declared("sut.guardrails.input_filter", "input filter"),
        "4.8.1-1b": declared("sut.guardrails.output_filter", "output filter"),
        "4.8.1-1c": _named,
        "4.8.1-1d": _refused,
        "4.8.2-1": only_at("application gateway")(_filters("cannot tell", "met", "met", "not met")),
        "4.8.2-2": only_at("application gateway")(_filters("not met", "not applicable", "met", "met")),
        # One test's report can only speak of itself: comparing is what 5.10 is.
        "4.8.2-3": _compared,
    }
)
