"""Checks of the IETF draft's section 4: load generator, workloads, tokens, warm-up, clocks, guardrails.

The check of section 2 (whether the result is valid) is also in this module.

A check gets the JSON of one test's report and returns a verdict. `ROWS` has the requirements with their
checks, for `judge.py`. A requirement about an ability that no load of the test used is not applicable. The
module is long because the requirements of section 4 are one table.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from llmtap.bench.compliance.evidence import (
    DATA_SETS,
    MODEL_LOAD,
    MUSTS,
    NO_CLOSED,
    NO_OPEN,
    Check,
    ComplianceVerdict,
    LoadJudge,
    Report,
    Status,
    Step,
    arms_of,
    arrivals_of,
    at,
    cannot_tell,
    count_text,
    duration_text,
    each_load,
    has_value,
    is_closed_loop,
    is_declared,
    is_open_loop,
    judge_loads,
    judges_value_at,
    met,
    name_of,
    not_applicable,
    not_met,
    only_for_boundary,
    plural,
    protocol,
    requirements,
    steps,
    text,
    verdict,
    workload,
    workload_differences,
    workload_is,
    workload_name,
    worst_verdict,
)
from llmtap.units import NS_PER_S, parse_duration_ns

_KS_RATIO_MAX: Final = 1.1
"""Arrivals are Poisson if the gaps as sent are at most this factor farther from the exponential distribution
(Kolmogorov-Smirnov distance) than the gaps as planned."""
_LATENESS_FINDINGS: Final = frozenset({"dispatch_lateness", "rate"})
"""Codes of findings in a load's verdict: `dispatch_lateness`: late requests; `rate`: lower than planned."""
_WAIT_SHARE_MIN: Final = 0.1
"""Smallest lateness, as a share of a response's duration, that shows that requests waited for responses."""
_REQUESTS_MIN: Final = 100
_TOKENS_MIN: Final = 10_000
"""Minimum number of output tokens of a warm-up, required in addition to `_REQUESTS_MIN` (IETF 4.5.1)."""
_VARIATION_MAX: Final = 0.10
_REFERENCE: Final = "cl100k_base"
_NTP_MAX_S: Final = 0.010
_PTP_BELOW_S: Final = 0.001
_ITL_OPTIONS: Final = {
    "A": "time between chunks",
    "B": "distributed over the tokens of a chunk",
    "C": "the server's",
}
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3,}(Z|[+-]\d\d:\d\d)")


# ---------------------------------------------------------------- draft, 2: compliance


@judges_value_at("verdict.valid", "whether the result is valid is not reported")
def _judge_validity(valid: Any) -> ComplianceVerdict:
    return verdict(valid, "the result is valid", if_not_met="the result is not valid: see its verdict")


# ---------------------------------------------------------------- draft, 4.2: load generator


_check_clock_source: Final = has_value(
    "result.sender.clock", "times in nanoseconds, stamped by the {}", "the clock of the times is not reported"
)


@each_load()
def _judge_streaming(report: Report, step: Step) -> ComplianceVerdict:
    if at(step, "result.plan.body.stream") is False:
        return not_met("answers were requested in one piece")
    events = at(step, "result.chunking.events")
    if not events:
        return cannot_tell("no event of a stream is in the report")
    answers = plural(at(step, "result.n") or 0, "answer")
    return met(f"{protocol(report) or 'a stream'}: {plural(events, 'event')} of {answers}")


@each_load()
def _judge_chunk_times(report: Report, step: Step) -> ComplianceVerdict:
    gaps, chunks = at(step, "result.metrics.tbc.n"), at(step, "result.chunking.content_events")
    if not gaps:
        return cannot_tell("no answer came in more than one chunk, or their times are not in the report")
    return met(f"{count_text(gaps)} gaps between {count_text(chunks or 0)} chunks with output")


@each_load(is_open_loop, NO_OPEN)
def _judge_open_loop(report: Report, step: Step) -> ComplianceVerdict:
    planned, process = at(step, "result.arrivals.planned.n"), arrivals_of(step)
    if not planned or process is None:
        return cannot_tell("an open loop whose planned arrivals are not reported")
    return met(f"{count_text(planned)} arrivals planned beforehand, {process}, independent of the answers")


def _judge_poisson_possible(report: Report) -> ComplianceVerdict:
    """Judge only the load with the median distance: of twenty loads, one exceeds the 95 % limit by chance."""
    loads = [step for step in steps(report) if arrivals_of(step) == "poisson"]
    if not loads:
        return not_applicable("no load of this test has Poisson arrivals")
    ratios = []
    for step in loads:
        sent, limit = (at(step, f"result.arrivals.sent.ks.{name}") for name in ("distance", "limit_95"))
        planned = at(step, "result.arrivals.planned.ks.distance") or 0.0
        if sent is not None and limit:
            ratios.append((sent / max(limit, _KS_RATIO_MAX * planned), sent, planned, limit))
    if not ratios:
        return cannot_tell("the gaps between requests as they were sent are not in the report")
    share, sent, planned, limit = sorted(ratios)[(len(ratios) - 1) // 2]
    evidence = (
        f"the sent gaps are {sent:.3f} from exponential (KS), the planned {planned:.3f}, {limit:.3f} at 95 %"
    )
    if len(ratios) > 1:
        evidence += f", in the middle one of {len(ratios)} loads"
    return verdict(share <= 1, evidence)


def _judge_other_arrivals(report: Report) -> ComplianceVerdict:
    processes = {process for step in steps(report) if (process := arrivals_of(step)) not in (None, "poisson")}
    if not processes:
        return not_applicable("no load of this test has uniform or bursty arrivals")
    return met(f"arrivals: {', '.join(sorted(map(str, processes)))}")


@each_load(is_closed_loop, NO_CLOSED)
def _judge_closed_loop(report: Report, step: Step) -> ComplianceVerdict:
    in_flight = _mean_in_flight(step)
    if in_flight is None:
        return cannot_tell("a closed loop whose answers took no time that is reported")
    return met(f"closed loop with {in_flight:.1f} requests in flight on average (n x E2E mean / time)")


def _mean_in_flight(step: Step) -> float | None:
    n, mean = at(step, "result.metrics.e2e.n"), at(step, "result.metrics.e2e.mean")
    time = at(step, "result.window.seconds")
    return n * mean / time if n and mean and time else None


@each_load(is_open_loop, NO_OPEN)
def _judge_dispatch_lateness(report: Report, step: Step) -> ComplianceVerdict:
    """Judge whether requests wait for responses: compare the dispatch lateness with a response's duration."""
    late, slow = at(step, "result.dispatch_lateness.p99"), at(step, "result.metrics.e2e.p50")
    if late is None:
        return cannot_tell("how late requests left is not reported")
    findings = {str(at(one, "what")) for one in at(step, "result.verdict.findings") or ()}
    if "lost" in findings:
        return not_met("a sending process died, and its requests were not sent")
    comparison = f", where an answer took {duration_text(slow)} (p50)" if slow else ""
    waited = (not slow or late >= _WAIT_SHARE_MIN * slow) and findings & _LATENESS_FINDINGS
    return verdict(not waited, f"requests left {duration_text(late)} after their time at p99{comparison}")


def _judge_concurrency(report: Report) -> ComplianceVerdict:
    processes = max((len(at(step, "result.sender.processes") or ()) for step in steps(report)), default=0)
    if not processes:
        return cannot_tell("the report does not report its sending processes")
    most = max(_mean_in_flight(step) or 0.0 for step in steps(report))
    evidence = f"{most:.1f} requests in flight on average, sent by {processes} process"
    if most <= 1:
        return not_applicable(f"{most:.2f} requests in flight on average: none had to wait for another")
    return (met if most > processes else cannot_tell)(evidence + "es" * (processes > 1))


def _check_in_capture(what: str, *paths: str, of: str = "") -> Check:
    @each_load()
    def check(report: Report, step: Step) -> ComplianceVerdict:
        n, rows = at(step, "result.n"), at(step, "result.capture.rows")
        first = next((value for path in paths if (value := at(step, f"result.{path}"))), None)
        if not n or not first:
            return cannot_tell(f"the report shows no {what}")
        if rows != n:
            return cannot_tell(f"of {count_text(n)} exchanges {count_text(rows or 0)} are in the capture")
        detail = f" ({count_text(first)} {of})" if of and isinstance(first, int | float) else ""
        return met(f"{what}{detail}: {count_text(n)} exchanges in the capture")

    return check


def _judge_all_abilities(report: Report) -> ComplianceVerdict:
    """Judge the introduction of IETF 4.2: it is met if no MUST of the subsections is violated."""
    rows = [one for one in ROWS if one.section.startswith("4.2.") and one.level in MUSTS]
    verdicts = {one.id: one.check(report) for one in rows}
    against = [id for id, one in verdicts.items() if one.status == "not met"]
    if against:
        return not_met(f"not met: {', '.join(against)}")
    gravest = worst_verdict([*verdicts.values()], "")
    return gravest if gravest.status == "cannot tell" else met(f"{len(rows)} demands, none unmet")


# ---------------------------------------------------------------- draft, 4.3: workloads


def _check_custom_workloads(judge: LoadJudge) -> Check:
    if_none = "its workloads are those of 4.3.2"
    return lambda report: judge_loads(
        report, judge, lambda step: bool(workload_differences(report, step)), if_none
    )


@_check_custom_workloads
def _judge_custom_workload(report: Report, step: Step) -> ComplianceVerdict:
    return met(f"{workload_name(step)}: {'; '.join(workload_differences(report, step))}")


def judge_full_specification(report: Report, step: Step) -> ComplianceVerdict:
    """Judge whether a workload's lengths, contents and shared prefixes are all reported (IETF 4.3.1)."""
    worst_part = worst_verdict(
        [part(report, step) for part in (_judge_input, _judge_output, _judge_contents, _judge_sharing)], ""
    )
    evidence = f"workload {workload_name(step)}: lengths, contents and sharing are reported"
    return met(evidence) if worst_part.status == "met" else worst_part


def _judge_lengths(step: Step, side: str, fixed: object) -> ComplianceVerdict:
    """Judge whether distribution, parameters and unit of the lengths are reported.

    `side`: `input` or `output`. `fixed`: length of all requests, if they have one length.
    """
    description = _workload_description(step)
    if fixed:
        return met(f"{side}: fixed, {text(fixed)} tokens")
    if not description:
        trace = at(step, "result.plan.trace")
        no_trace = "the report does not say what the requests were"
        return not_met(f"{side} lengths are those of the trace {trace}" if trace else no_trace)
    lengths = description.get(side)
    if not isinstance(lengths, Mapping) or not lengths:
        return not_met(f"{workload_name(step)} does not report its {side} lengths")
    lacking = [name for name in ("distribution", "unit") if not lengths.get(name)]
    if lacking:
        return not_met(f"{side} lengths lack {' and '.join(lacking)}")
    if "within" not in lengths and not any(isinstance(one, int | float | list) for one in lengths.values()):
        return not_met(f"{side} lengths are {lengths['distribution']}, without parameters or a histogram")
    return met(f"{side}: {_lengths_text(lengths)}")


def _workload_description(step: Step) -> Mapping[str, Any]:
    return workload(step) or at(step, "result.plan.lengths") or {}


def _lengths_text(lengths: Mapping[str, Any]) -> str:
    figures = [
        f"{name} {text(value)}"
        for name, value in lengths.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return " ".join([str(lengths.get("distribution")), *figures, f"in {lengths.get('unit')}"])


def _judge_input(report: Report, step: Step) -> ComplianceVerdict:
    return _judge_lengths(step, "input", at(step, "result.plan.input_tokens"))


def _judge_output(report: Report, step: Step) -> ComplianceVerdict:
    lengths = _judge_lengths(step, "output", at(report, "params.output_tokens"))
    if lengths.status != "met":
        return lengths
    control = at(step, "result.plan.body.output_control")
    return verdict(
        control, f"{lengths.evidence}, by {control}", if_not_met="how outputs are limited is not reported"
    )


def _judge_contents(report: Report, step: Step) -> ComplianceVerdict:
    content = workload(step).get("content")
    if not isinstance(content, Mapping) or not content.get("domain"):
        return not_met("neither domain nor language of the contents is reported")
    shared = at(workload(step), "sharing.tokens") is not None
    system = "the shared context is the system prompt" if shared else "no system prompt"
    return met(f"{content['domain']}, {content.get('language') or 'no language'}; {system}")


def _judge_sharing(report: Report, step: Step) -> ComplianceVerdict:
    if "sharing" not in workload(step):
        return not_met("whether prompts share a prefix is not reported")
    sharing = workload(step)["sharing"]
    if sharing is None:
        return met("no prefix is shared")
    lengths, fraction = sharing.get("tokens"), sharing.get("fraction")
    shown = _lengths_text(lengths) if at(lengths, "distribution") else f"{text(lengths)} tokens"
    if fraction is None or not lengths:
        return not_met("how many requests share how long a prefix is not reported")
    return met(f"{fraction:.0%} share a prefix: {shown}")


@each_load()
def _judge_seed(report: Report, step: Step) -> ComplianceVerdict:
    seed, digest = at(step, "result.plan.seed"), workload(step).get("sha256")
    if seed is None:
        return not_met("the load has no seed")
    return met(f"seed {seed}" + (f", sequence sha256 {digest[:12]}" if digest else ""))


def _judge_publication(report: Report) -> ComplianceVerdict:
    def judge(report: Report, step: Step) -> ComplianceVerdict:
        description = workload(step)
        if not description.get("generation") or description.get("seed") is None:
            return not_met("neither the requests nor how they are made again is in the report")
        return met(f"made again by llmtap {at(report, 'versions.llmtap')} with seed {description['seed']}")

    exact = report.get("exact_requests")
    return met(f"the requests lie in {exact}") if exact else judge_loads(report, judge)


def _check_data_set(part: str) -> Check:
    def judge(report: Report, step: Step) -> ComplianceVerdict:
        name, data = str(workload_name(step)), workload(step).get("data")
        if not data:
            return not_met(f"{name} is to be drawn from {DATA_SETS[name]}, and no file was given")
        value = text(data.get(part))
        return verdict(value, f"{part}: {value}", if_not_met=f"{part} of the data set is not reported")

    def from_data(step: Step) -> bool:
        return bool(workload(step).get("data")) or workload_name(step) in DATA_SETS

    return lambda report: judge_loads(report, judge, from_data, "no workload is drawn from a data set")


# ---------------------------------------------------------------- draft, 4.4: tokens


def _judge_counting_method(report: Report) -> ComplianceVerdict:
    counting = str(at(report, "sut.tokenizer.counting"))
    option = {"native": "A (native)", "reference": "B (reference)"}.get(counting)
    if option is None:
        return not_met("neither option is declared (sut.tokenizer.counting)")
    sources: Counter[str] = Counter()
    for step in steps(report):
        sources.update({name: n or 0 for name, n in (at(step, "result.tokens.source") or {}).items()})
    if per_chunk := sources["chunks"]:
        return not_met(
            f"option {option} is declared, and tokens of {plural(per_chunk, 'answer')} were taken to be one"
            " each, by chunk: no tokenizer counts so"
        )
    sources_text = ", ".join(f"{source} {count_text(n)}" for source, n in sorted(sources.items()))
    return met(f"option {option}" + (f"; counts by {sources_text}" if sources_text else ""))


def _judge_reference_tokenizer(report: Report) -> ComplianceVerdict:
    """Judge whether a comparison of systems with different tokenizers counts by the reference tokenizer."""
    reports = report.get("reports")
    if reports is None:
        return not_applicable("one system: nothing is compared across tokenizers")
    names = {text(at(one, "sut.tokenizer.name")) or "unknown" for one in reports}
    methods = {str(at(one, "sut.tokenizer.counting")) for one in reports}
    if len(names) == 1 and "unknown" not in names and methods == {"native"}:
        return not_applicable(f"all systems have one tokenizer: {names.pop()}")
    return verdict(
        methods == {"reference"} and names == {_REFERENCE},
        f"option B with {_REFERENCE} for all",
        if_not_met=f"tokens counted by {', '.join(sorted(methods))}: {', '.join(sorted(names))}",
    )


# ---------------------------------------------------------------- draft, 4.5: warm-up


WarmUp = Mapping[str, Any]


def warmups(report: Report) -> Sequence[WarmUp]:
    return [one for one in report.get("warmups") or () if not one.get("skipped")]


def cold_start_text(report: Report) -> str | None:
    """Return the configuration line or note of a report that mentions a cold start, or None."""
    lines = [*(report.get("configuration") or {}).values(), *(report.get("notes") or ())]
    return next((one for one in lines if "cold start" in str(one).lower()), None)


def _each_warmup(judge: Callable[[WarmUp], ComplianceVerdict]) -> Check:
    """Return a check of all warm-ups, from a function that judges one.

    Each measured configuration (arm) needs a warm-up of its own.
    """

    def check(report: Report) -> ComplianceVerdict:
        performed, cold = warmups(report), cold_start_text(report)
        if not steps(report):
            return cannot_tell("the report has no loads")
        if not performed:
            return not_applicable(f"cold start: {cold}") if cold else not_met("no warm-up was made")
        missing = [arm for arm in arms_of(steps(report)) if arm not in arms_of(performed)]
        if missing:
            return not_met(f"no warm-up in this configuration: {', '.join(missing)}")
        return worst_verdict([judge(one) for one in performed], "")

    return check


def _judge_model_loading(warmup: WarmUp) -> ComplianceVerdict:
    """Judge by the stability of the latency whether the model is loaded: a client has no other evidence."""
    answers = plural(warmup.get("requests") or 0, "answer")
    if not warmup.get("requests"):
        return cannot_tell("it answered nothing before it was measured")
    if not warmup.get("stable"):
        return cannot_tell(f"{answers}, whose latency had not settled, or was not probed")
    return met(f"{answers} before the measurement, and a latency that had settled")


def _judge_warmup_size(warmup: WarmUp) -> ComplianceVerdict:
    n, tokens = warmup.get("requests") or 0, warmup.get("tokens") or 0
    requests, wanted = plural(n, "request"), count_text(_TOKENS_MIN)
    return verdict(
        n >= _REQUESTS_MIN and tokens >= _TOKENS_MIN,
        f"{requests} of {_REQUESTS_MIN} and {count_text(tokens)} output tokens of {wanted}",
    )


def _judge_drain(warmup: WarmUp) -> ComplianceVerdict:
    probes, n = warmup.get("probes"), warmup.get("requests")
    if probes:
        return met(f"all its answers had come: {len(probes)} probes followed, one at a time")
    if n and warmup.get("failed") == 0:
        return met(f"all its {plural(n, 'answer')} had come, and none had failed")
    return cannot_tell("nothing shows that its answers had all come")


def _judge_filled_cache(report: Report) -> ComplianceVerdict:
    """Judge whether the cache was filled: all loads sent prefixes first, or all report cached tokens."""
    warm = [step for step in steps(report) if name_of(step).endswith("/warm")]
    if not warm:
        return cannot_tell("the report has no load with a filled cache")
    primed = [at(step, "result.primed") or 0 for step in warm]
    hits = [at(step, "result.tokens.cached") or 0 for step in warm]
    evidence = (
        f"{len(warm)} warm loads: {count_text(sum(primed))} prefixes sent before them,"
        f" {count_text(sum(hits))} input tokens reported as cached"
    )
    return met(evidence) if all(primed) or all(hits) else cannot_tell(evidence)


def _judge_probes(warmup: WarmUp) -> ComplianceVerdict:
    probes = warmup.get("probes") or ()
    before, after = at(warmup, "before.ttft"), at(probes[-1], "ttft") if probes else None
    if before is None or after is None:
        return not_met("no probe before and after it has a latency")
    return met(f"a probe's TTFT was {before * 1e3:.1f} ms before and {after * 1e3:.1f} ms after")


def _judge_stability(warmup: WarmUp) -> ComplianceVerdict:
    variation = warmup.get("variation") or {}
    parts = [f"{name.upper()} {value:.1%}" for name, value in variation.items() if value is not None]
    if not parts:
        return not_met("too few probes to see their variation")
    evidence = f"consecutive probes vary by {', '.join(parts)}, less than {_VARIATION_MAX:.0%} wanted"
    return verdict(warmup.get("stable"), evidence)


def _judge_cold_start(report: Report) -> ComplianceVerdict:
    load, performed = report.get("model_load"), warmups(report)
    if load is not None:
        return met(f"model load {load['first_token']:.3g} s: to the first answer of a process just started")
    if cold_start_text(report) is None:
        return not_applicable("no cold start is measured")
    if performed:
        return not_met(
            f"a cold start is measured, after a warm-up of {count_text(performed[0].get('requests') or 0)}"
        )
    return met("a cold start is measured, and no warm-up was made")


def _judge_cold_start_label(report: Report) -> ComplianceVerdict:
    if report.get("model_load") is not None:
        line = (report.get("configuration") or {}).get(MODEL_LOAD)
        return verdict(line, f"it says: {MODEL_LOAD}: {line}", if_not_met="the model load is not stated")
    if warmups(report) or not steps(report):
        return not_applicable("no cold start is measured")
    cold = cold_start_text(report)
    no_label = "nothing was warmed up, and the report does not call it a cold start"
    return verdict(cold, f"it says: {cold}", if_not_met=no_label)


# ---------------------------------------------------------------- draft, 4.6: protocol and ITL


def _protocol_is(wanted: str) -> Check:
    def check(report: Report) -> ComplianceVerdict:
        spoken = protocol(report)
        if spoken is None:
            return cannot_tell("the target's address does not report its protocol")
        return verdict(spoken == wanted, spoken, if_not_met=f"{spoken}, not {wanted}")

    return check


def _judge_protocol(report: Report) -> ComplianceVerdict:
    declared_protocol, used_protocol = at(report, "sut.protocol"), protocol(report)
    if declared_protocol and used_protocol and used_protocol.lower() not in str(declared_protocol).lower():
        return not_met(f"{declared_protocol} is declared, and {used_protocol} was spoken")
    return verdict(
        declared_protocol or used_protocol,
        str(declared_protocol or used_protocol),
        if_not_met="the protocol is not reported",
    )


@each_load()
def _judge_chunking(report: Report, step: Step) -> ComplianceVerdict:
    declared_chunking, share = at(report, "sut.chunking"), at(step, "result.chunking.single_token_share")
    if share is None:
        return verdict(
            declared_chunking,
            str(declared_chunking),
            if_not_met="how many tokens a chunk has is not reported",
        )
    chunks = count_text(at(step, "result.chunking.chunks_with_known_tokens"))
    return met(
        f"{share:.1%} of {chunks} chunks have one token"
        + (f"; declared: {declared_chunking}" if declared_chunking else "")
    )


@each_load()
def _judge_chunk_handling(report: Report, step: Step) -> ComplianceVerdict:
    policies = at(step, "result.metrics.itl.policy") or {}
    if not policies:
        return cannot_tell("no gap between tokens was measured")
    return met("; ".join(f"{policy}: {plural(n, 'answer')}" for policy, n in policies.items()))


def _judge_itl_option(report: Report) -> ComplianceVerdict:
    """Judge the declared ITL option: `A`, `A (direct)`, `B` or `C`, or several such as `A + C`.

    The verdict on a variant that the draft does not define, such as `B-even`, is "not met".
    """
    declared_option = report.get("itl_option")
    options = [one.strip().removesuffix(" (direct)") for one in str(declared_option or "").split("+")]
    if not all(option in _ITL_OPTIONS for option in options):
        return not_met("none of A, B and C is declared (itl_option)")
    if "C" in options and not _server_gap_count(report):
        return not_met("C is declared, and the server reported no times of tokens")
    return met(f"option {declared_option}: {' and '.join(_ITL_OPTIONS[option] for option in options)}")


def _judge_server_itl(report: Report) -> ComplianceVerdict:
    gaps = _server_gap_count(report)
    if not gaps:
        return not_applicable("the server reports no times of tokens")
    option = str(report.get("itl_option"))
    evidence = f"the server reported {count_text(gaps)} gaps between tokens; the option is {option}"
    return verdict("C" in option, evidence)


def _server_gap_count(report: Report) -> int:
    return sum(at(step, "result.metrics.itl_server.n") or 0 for step in steps(report))


# ---------------------------------------------------------------- draft, 4.7: clocks and network


_NOT_PLACED: Final = "where the load generator stands is not declared (sut.clock.placement)"


@only_for_boundary("model engine")
@judges_value_at("sut.clock.placement", _NOT_PLACED)
def _judge_same_machine(placement: Any) -> ComplianceVerdict:
    return verdict(placement == "same machine", f"placement of the load generator: {placement}")


def _only_remote(check: Callable[[Report, str, str], ComplianceVerdict]) -> Check:
    """Return a check that applies only to remote load generators, from a function that judges the clocks.

    The function gets the report, and the declared method and accuracy of the clocks' synchronisation.
    """

    def check_if_applicable(report: Report) -> ComplianceVerdict:
        placement = at(report, "sut.clock.placement")
        if placement is None:
            return cannot_tell(_NOT_PLACED)
        if placement != "remote":
            return not_applicable("load generator and SUT share a machine")
        method, accuracy = (text(at(report, f"sut.clock.{one}")) for one in ("synchronization", "accuracy"))
        return check(report, method, accuracy)

    return check_if_applicable


def _accuracy_s(declared_accuracy: str) -> float | None:
    """Return the declared accuracy in seconds, from texts such as `2ms`, `< 2 ms` or `0.002`."""
    try:
        return parse_duration_ns(declared_accuracy.strip("<~ ").replace(" ", "")) / NS_PER_S
    except ValueError:
        return None


@_only_remote
def _judge_ntp(report: Report, method: str, accuracy: str) -> ComplianceVerdict:
    accuracy_s = _accuracy_s(accuracy)
    if not method:
        return cannot_tell("how clocks are synchronised is not declared (sut.clock.synchronization)")
    if "ntp" not in method.lower() and "chrony" not in method.lower():
        return not_applicable(f"clocks are synchronised by {method}")
    if accuracy_s is None:
        return cannot_tell("how well NTP does is not declared as a time (sut.clock.accuracy)")
    offset = at(report, "clock_offset.offset")
    measured = "" if offset is None else f"; the load generator's clock is {duration_text(offset)} off"
    return verdict(
        max(accuracy_s, abs(offset or 0.0)) <= _NTP_MAX_S,
        f"{method}, accurate to {duration_text(accuracy_s)}; 10 ms needed{measured}",
    )


@_only_remote
def _judge_ptp(report: Report, method: str, accuracy: str) -> ComplianceVerdict:
    accuracy_s = _accuracy_s(accuracy)
    if "ptp" in method.lower():
        return met(method)
    if accuracy_s is None or accuracy_s >= _PTP_BELOW_S:
        return not_applicable("no accuracy below a millisecond is required")
    return not_met(
        f"accurate to {duration_text(accuracy_s)} by {method or 'nothing that is declared'}, not by PTP"
    )


@_only_remote
def _judge_clock_statement(report: Report, method: str, accuracy: str) -> ComplianceVerdict:
    lacking = "accuracy" if method else "synchronization"
    return verdict(
        method and accuracy, f"{method}, accurate to {accuracy}", if_not_met=f"sut.clock lacks {lacking}"
    )


@only_for_boundary("application gateway")
@_only_remote
def _judge_round_trip_time(report: Report, method: str, accuracy: str) -> ComplianceVerdict:
    line = _find_line(report, "rtt", "round trip")
    return verdict(line, str(line), if_not_met="no round trip time of the network is in the report")


def _judge_round_trip_subtraction(report: Report) -> ComplianceVerdict:
    line = _find_line(report, "subtracted")
    return met(line) if line else not_applicable("no latency is reported as adjusted")


def _find_line(report: Report, *words: str) -> str | None:
    """Return the first configuration line or note that contains one of these words; None without a match."""
    lines = [
        *(f"{label}: {value}" for label, value in (report.get("configuration") or {}).items()),
        *(report.get("notes") or ()),
        *(at(report, "sut.notes") or ()),
    ]
    return next((line for line in map(str, lines) if any(word in line.lower() for word in words)), None)


@each_load()
def _judge_timestamps(report: Report, step: Step) -> ComplianceVerdict:
    start = at(step, "result.window.start")
    if not isinstance(start, str):
        return cannot_tell("no load has the time of its start")
    return verdict(_DATE.fullmatch(start), start)


# ---------------------------------------------------------------- draft, 4.8: guardrails


def _filter_states(report: Report) -> dict[str, bool | None]:
    return {name: at(report, f"sut.guardrails.{name}_filter") for name in ("input", "output")}


def _judge_guardrail_names(report: Report) -> ComplianceVerdict:
    names, state = text(at(report, "sut.guardrails.names")), _filter_states(report)
    if names:
        return met(names)
    if None in state.values():
        return not_met("neither names of safety systems nor whether there are any")
    return not_applicable("there are none" if not any(state.values()) else "no name is known")


def _judge_refusals(report: Report) -> ComplianceVerdict:
    refused = report.get("refused")
    if refused is None:
        return not_met("how many requests were refused is not reported")
    sent = sum(at(step, "result.n") or 0 for step in steps(report))
    return met(f"{count_text(refused)} of {plural(sent, 'request')} were refused")


def _check_filters(undeclared: Status, all_on: Status, one_on: Status, none_on: Status) -> Check:
    """Return a check of the declared input and output filters. Each argument is its status in one case."""

    def check(report: Report) -> ComplianceVerdict:
        state = _filter_states(report)
        words = {True: "on", False: "off", None: "not declared"}
        shown = ", ".join(f"{name} filter {words[value]}" for name, value in state.items())
        on = [*state.values()].count(True)
        status = undeclared if None in state.values() else (none_on, one_on, all_on)[on]
        return ComplianceVerdict(status, shown)

    return check


@only_for_boundary("application gateway")
def _judge_configurations(report: Report) -> ComplianceVerdict:
    arm_names = arms_of(steps(report))
    return verdict(len(arm_names) > 1, f"configurations measured: {', '.join(arm_names) or 'none'}")


ROWS: Final = requirements(
    {
        "2-p1": _judge_validity,
        "4.1-1": is_declared("sut.boundary", "boundary"),
        "4.2-1": _judge_all_abilities,
        "4.2.1-1": _check_clock_source,
        "4.2.1-2": _check_clock_source,
        "4.2.2-1": _judge_streaming,
        "4.2.2-2": _judge_chunk_times,
        "4.2.3-1": _judge_open_loop,
        "4.2.3-2": _judge_poisson_possible,
        "4.2.3-3": _judge_other_arrivals,
        "4.2.4-1": _judge_closed_loop,
        "4.2.5-1": _judge_dispatch_lateness,
        "4.2.5-2": _judge_concurrency,
        "4.2.6-1a": _check_in_capture("time of submission", "metrics.ttfb.n", "metrics.ttft.n"),
        "4.2.6-1b": _check_in_capture("first tokens", "metrics.ttft.n", of="answers"),
        "4.2.6-1c": _check_in_capture("later tokens", "metrics.tbc.n", of="chunks"),
        "4.2.6-1d": _check_in_capture("last tokens", "metrics.e2e.n", of="answers"),
        "4.2.6-1e": _check_in_capture("input tokens", "tokens.input", of="in all"),
        "4.2.6-1f": _check_in_capture("output tokens", "tokens.output", of="in all"),
        "4.2.6-1g": _check_in_capture("outcome", "outcomes"),
        "4.3-1": _judge_custom_workload,
        "4.3-2": _check_custom_workloads(judge_full_specification),
        "4.3.1-1a": each_load()(_judge_input),
        "4.3.1-1b": each_load()(_judge_output),
        "4.3.1-1c": each_load()(_judge_contents),
        "4.3.1-1d": each_load()(_judge_sharing),
        "4.3.2.1-1": only_for_boundary("model engine")(workload_is("synthetic-uniform")),
        "4.3.2.3-1": only_for_boundary("application gateway")(workload_is("conversation")),
        "4.3.2.5-1": workload_is("long-context", "long-context-uniform"),
        "4.3.3-1": _judge_seed,
        "4.3.3-2": is_declared("seed", "seed"),
        "4.3.3-3": _judge_publication,
        "4.3.3-4a": _check_data_set("version"),
        "4.3.3-4b": _check_data_set("subset"),
        "4.3.3-4c": _check_data_set("preprocessing"),
        "4.4.1-1a": is_declared("sut.tokenizer.name", "tokenizer"),
        "4.4.1-1b": is_declared("sut.tokenizer.vocabulary", "vocabulary"),
        "4.4.1-1c": is_declared("sut.tokenizer.source", "source"),
        "4.4.2-1": _judge_counting_method,
        "4.4.2-2": _judge_reference_tokenizer,
        "4.4.3-1a": is_declared("sut.tokenizer.special", "BOS and EOS"),
        "4.4.3-1b": is_declared("sut.tokenizer.system_prompt", "system prompt"),
        "4.4.3-1c": is_declared("sut.tokenizer.tools", "tool calls"),
        "4.5.1-1a": _each_warmup(_judge_model_loading),
        "4.5.1-1b": _each_warmup(_judge_warmup_size),
        "4.5.1-1c": _each_warmup(_judge_drain),
        "4.5.1-1d": _judge_filled_cache,
        "4.5.2-1a": _each_warmup(_judge_probes),
        "4.5.2-1b": _each_warmup(_judge_stability),
        "4.5.3-1": _judge_cold_start,
        "4.5.3-2": _judge_cold_start_label,
        "4.6.1-1": only_for_boundary("application gateway")(_protocol_is("SSE")),
        "4.6.1-2": only_for_boundary("model engine")(_protocol_is("gRPC")),
        "4.6.2-1a": _judge_protocol,
        "4.6.2-1b": _judge_chunking,
        "4.6.2-1c": _judge_chunk_handling,
        "4.6.3-1": _judge_itl_option,
        "4.6.3-2": _judge_server_itl,
        "4.7.1-1": _judge_same_machine,
        "4.7.2-1": _judge_ntp,
        "4.7.2-2": _judge_ptp,
        "4.7.2-3": _judge_clock_statement,
        "4.7.3-1": _judge_round_trip_time,
        "4.7.3-2": _judge_round_trip_subtraction,
        "4.7.3-3": _judge_round_trip_subtraction,
        "4.7.4-1": _judge_timestamps,
        "4.7.4-2": _judge_timestamps,
        "4.8-1": _check_filters("not met", "met", "met", "met"),
        "4.8.1-1a": is_declared("sut.guardrails.input_filter", "input filter"),
        "4.8.1-1b": is_declared("sut.guardrails.output_filter", "output filter"),
        "4.8.1-1c": _judge_guardrail_names,
        "4.8.1-1d": _judge_refusals,
        "4.8.2-1": only_for_boundary("application gateway")(
            _check_filters("cannot tell", "met", "met", "not met")
        ),
        "4.8.2-2": only_for_boundary("application gateway")(
            _check_filters("not met", "not applicable", "met", "met")
        ),
        # No condition is needed here: `requirements.csv` limits this check to the test of 5.10.
        "4.8.2-3": _judge_configurations,
    }
)
