"""Checks of the IETF draft's section 5: set-up, procedure and report of each of the ten tests.

A check gets the JSON of one test's report and returns a verdict. `ROWS` has the requirements with their
checks, for `judge.py`. The module is long because the requirements of section 5 are one table.
"""

from collections.abc import Mapping
from typing import Any, Final

from llmtap.bench.compliance.evidence import (
    NO_CLOSED,
    NO_OPEN,
    Check,
    ComplianceVerdict,
    Report,
    Step,
    StepFilter,
    arms_of,
    arrivals_of,
    at,
    cannot_tell,
    count_text,
    duration_text,
    each_level,
    each_load,
    has_levels,
    has_requests,
    has_value,
    is_closed_loop,
    is_declared,
    is_measured,
    is_open_loop,
    judge_levels,
    judge_loads,
    judges_value_at,
    lasts_at_least,
    levels_of,
    measured_steps,
    met,
    name_of,
    not_applicable,
    not_met,
    plural,
    requirements,
    sent_seconds,
    slots_of,
    steps,
    table,
    table_has,
    table_value,
    text,
    verdict,
    workload,
    workload_is,
)
from llmtap.bench.compliance.preparation import cold_start_text, judge_full_specification, warmups

_PERCENTILES: Final = ("P50", "P90", "P95", "P99", "P99.9")
_EDGES: Final = {0, 256, 512, 1_024, 2_048, 4_096}
_ITL_OUTPUT_MIN: Final = 50
_GAPS_MIN: Final = 5_000
_DURATION_MIN_S: Final = 60
_LEVELS_MIN: Final = 10
_RAMP_UP: Final = 0.1
_PER_SLOT_MIN: Final = 100
_COMPLETION_MIN: Final = 0.99
_PER_CLASS_MIN: Final = 500
_OUTPUT: Final = 256
_CONCURRENCY_MAX: Final = 4
_CONFIGURATIONS_MIN: Final = 4


# ---------------------------------------------------------------- draft, 5.1: TTFT


_check_workload: Final = each_load()(judge_full_specification)
"""Check that the workload of each load is one of IETF 4.3.2, or fully specified."""


_check_load_model: Final = has_value("result.load.mode", "{} loop", "the load model is not reported")


@each_load(is_open_loop, NO_OPEN)
def _judge_rate(report: Report, step: Step) -> ComplianceVerdict:
    rate = at(step, "result.plan.arrivals.rate_rps") or at(step, "result.load.planned_rps")
    return met(f"{rate:g} requests/s") if rate else not_met("no rate")


@each_load(is_closed_loop, NO_CLOSED)
def _judge_concurrency(report: Report, step: Step) -> ComplianceVerdict:
    slots = slots_of(report, step)
    missing = "how many requests at a time is not reported"
    return verdict(slots, f"{count_text(slots)} at a time", if_not_met=missing)


def _judge_hardware(report: Report) -> ComplianceVerdict:
    hardware = at(report, "sut.hardware") or {}
    if text(hardware.get("accelerator")) == "none":
        return met("no accelerator")
    lacking = [name for name in ("accelerator", "count", "memory") if not text(hardware.get(name))]
    if lacking:
        return not_met(f"sut.hardware lacks {', '.join(lacking)}")
    return met(f"{hardware['count']} x {hardware['accelerator']}, {hardware['memory']} each")


@each_load(is_open_loop, NO_OPEN)
def _judge_poisson(report: Report, step: Step) -> ComplianceVerdict:
    process = arrivals_of(step)
    evidence = f"arrivals {process}"
    return verdict(process == "poisson", evidence, if_not_met=f"{evidence}, not poisson")


def _judge_tokens_before_content(report: Report) -> ComplianceVerdict:
    figures = [at(step, "result.metrics") or {} for step in steps(report)]
    n = sum(at(one, "ttft.n") or 0 for one in figures)
    if not n:
        return cannot_tell("no first token is in the report")
    if all(
        at(one, f"ttft_any.{name}") == at(one, f"ttft.{name}") for one in figures for name in ("n", "mean")
    ):
        return not_applicable(f"content came first in all of {plural(n, 'answer')}")
    matching_notes = [note for note in map(str, report.get("notes") or ()) if "content token" in note]
    missing = "tokens came before the content, and the report does not note it"
    return verdict(matching_notes, "".join(matching_notes[:1]), if_not_met=missing)


def _judge_percentiles(report: Report) -> ComplianceVerdict:
    values = {name: table_value(table(report, 1), f"TTFT {name}") for name in _PERCENTILES}
    lacking = [name for name, value in values.items() if value is None]
    return verdict(
        not lacking,
        ", ".join(f"{name} {value}" for name, value in values.items()),
        if_not_met=f"Table 1 has no {', '.join(lacking)}",
    )


def _input_lengths_vary(report: Report) -> bool:
    distributions = [at(workload(step), "input.distribution") for step in measured_steps(report)]
    return any(name != "fixed" for name in distributions) or not distributions


def _judge_input_buckets(report: Report) -> ComplianceVerdict:
    if not _input_lengths_vary(report):
        return not_applicable("all inputs have one length")
    ranges = [(at(one, "begin"), at(one, "below")) for one in at(report, "measurements.ttft_by_input") or ()]
    if not ranges:
        return not_met("the report has no TTFT by input length")
    texts = [f"{begin}+" if below is None else f"{begin}-{below}" for begin, below in ranges]
    edges = {edge for pair in ranges for edge in pair} - {None}
    return verdict(edges <= _EDGES, f"buckets {', '.join(texts)}")


def _judge_table_by_input_length(report: Report) -> ComplianceVerdict:
    if not _input_lengths_vary(report):
        return not_applicable("all inputs have one length")
    return table_has(2, ("Input Tokens", "P50", "P95", "P99"))(report)


def _judge_sample_count(report: Report) -> ComplianceVerdict:
    samples = at(report, "measurements.ttft.n")
    requests = table_value(table(report, 1), "Requests")
    if samples is None and requests is None:
        return not_met("neither Table 1 nor the measurements tell how many samples there are")
    return met(f"{requests} requests" if samples is None else f"{count_text(samples)} samples")


def _check_configuration_line(what: str, *words: str) -> Check:
    """Return a check that the report's configuration has a line beginning with each of `words`.

    `what`: name of these lines in the evidence.
    """

    def check(report: Report) -> ComplianceVerdict:
        configuration = report.get("configuration") or {}
        lines = {str(label).lower(): value for label, raw in configuration.items() if (value := text(raw))}
        matches = [
            next((f"{k}: {v}" for k, v in lines.items() if k.startswith(word)), None) for word in words
        ]
        return verdict(None not in matches, "; ".join(map(str, matches)), if_not_met=f"{what} is missing")

    return check


def _check_all(*checks: Check) -> Check:
    """Return a check that is met if all these checks are met."""

    def check(report: Report) -> ComplianceVerdict:
        verdicts = [check_verdict(report) for check_verdict in checks]
        lacking = [check_verdict for check_verdict in verdicts if check_verdict.status != "met"]
        return lacking[0] if lacking else met("; ".join(check_verdict.evidence for check_verdict in verdicts))

    return check


def _judge_warmup_size(report: Report) -> ComplianceVerdict:
    performed = warmups(report)
    if not performed:
        cold = cold_start_text(report)
        # A cold start must skip the warm-up (draft, 4.5.3), so its report describes no warm-up.
        return not_applicable(f"cold start: {cold}") if cold else not_met("no warm-up is reported")
    requests, tokens = (performed[0].get(name) or 0 for name in ("requests", "tokens"))
    return met(f"warm-up: {plural(requests, 'request')}, {plural(tokens, 'token')}")


def _judge_ttft_charts(report: Report) -> ComplianceVerdict:
    kinds = [chart.get("kind") for chart in report.get("charts") or () if "TTFT" in str(chart.get("title"))]
    charts = [str(kind) for kind in kinds if kind in ("cdf", "histogram")]
    return verdict(charts, " and ".join(charts), if_not_met="neither histogram nor CDF of TTFT")


# ---------------------------------------------------------------- draft, 5.2 and 5.3: throughput, trade-off


def _check_parameters(step_filter: StepFilter | None, if_none: str, *names: str) -> Check:
    """Return a check that the setup parameters `names` have values.

    `step_filter`: the check applies only if this selects a load; `if_none`: evidence if it selects none.
    """

    def check(report: Report) -> ComplianceVerdict:
        if not steps(report):
            return cannot_tell("the report has no loads")
        if step_filter is not None and not any(map(step_filter, measured_steps(report))):
            return not_applicable(if_none)
        values = {name: at(report, f"params.{name}") for name in names}
        lacking = [name for name, value in values.items() if value is None]
        return verdict(
            not lacking,
            ", ".join(f"{name} {text(value)}" for name, value in values.items()),
            if_not_met=f"{' and '.join(lacking)} not defined",
        )

    return check


def _judge_search_limit(report: Report) -> ComplianceVerdict:
    measurements = at(report, "measurements")
    if measurements is None or "limit" not in measurements:
        return cannot_tell("the report does not report where its search ended")
    if measurements["limit"] is None:
        return not_met("the highest load that was tried was sustained: no saturation was found")
    reasons = [one.get("why") for one in levels_of(report) if one.get("holds") is False][-1:]
    return met(
        f"{text(measurements['limit'])} was not sustained" + "".join(f": {one}" for one in reasons if one)
    )


def _judge_ramp_up(report: Report) -> ComplianceVerdict:
    windows = [one.get("window") or {} for one in levels_of(report)]
    shares = [one["from"] / one["to"] for one in windows if one.get("from") is not None and one.get("to")]
    if not shares:
        return cannot_tell("which part of each load counts is not reported")
    evidence = f"of {len(shares)} loads the first {min(shares):.0%} or more is not counted"
    return verdict(min(shares) >= _RAMP_UP - 1e-9, evidence)


@each_load(is_measured)
def _judge_all_open(report: Report, step: Step) -> ComplianceVerdict:
    return verdict(is_open_loop(step), f"{at(step, 'result.load.mode') or 'unknown'} loop")


def _level_percents(report: Report) -> list[float]:
    return sorted(float(one["percent"]) for one in levels_of(report) if one.get("percent") is not None)


@judges_value_at("measurements.levels", "the report has no levels")
def _judge_enough_levels(levels: Any) -> ComplianceVerdict:
    return verdict(len(levels) >= _LEVELS_MIN, f"{len(levels)} levels, {_LEVELS_MIN} needed")


def _judge_level_range(report: Report) -> ComplianceVerdict:
    percents = _level_percents(report)
    if not percents:
        return cannot_tell("what share of capacity the levels are is not reported")
    evidence = f"from {percents[0]:g} to {percents[-1]:g} % of capacity"
    names = ("saturation_rps", "queue_grows_from_rps")
    signs = any(at(report, f"measurements.{name}") is not None for name in names)
    if percents[0] > 10:
        return not_met(f"{evidence}: not from 10 %")
    if percents[-1] < 100 and not signs:
        return not_met(f"{evidence}, and no saturation was seen")
    return met(evidence + ", with signs of saturation" * signs)


def _judge_all_levels(report: Report) -> ComplianceVerdict:
    percents = _level_percents(report)
    if not percents:
        return cannot_tell("what share of capacity the levels are is not reported")
    return judge_levels(percents, range(10, 121, 10))


# ---------------------------------------------------------------- draft, 5.4 and 5.5: ITL, capacity


def _judge_response_lengths(report: Report) -> ComplianceVerdict:
    levels = levels_of(report)
    short = sum(one.get("too_short") or 0 for one in levels)
    if short:
        return not_met(f"{plural(short, 'answer')} had fewer than {_ITL_OUTPUT_MIN} tokens: in no figure")

    def judge(report: Report, step: Step) -> ComplianceVerdict:
        output = workload(step).get("output") or {}
        requested = at(report, "params.output_tokens") or output.get("tokens") or output.get("min")
        if requested is not None and requested < _ITL_OUTPUT_MIN:
            return not_met(f"answers of {requested} tokens were requested, {_ITL_OUTPUT_MIN} needed")
        if not levels:
            return cannot_tell("the lengths of answers are not reported")
        return met(f"no answer had fewer than {_ITL_OUTPUT_MIN} tokens")

    return judge_loads(report, judge, is_measured)


@each_load(is_measured)
def _judge_gaps_without_ttft(report: Report, step: Step) -> ComplianceVerdict:
    """Judge whether no ITL includes TTFT: a response of n chunks then has at most n - 1 gaps."""
    gaps, chunks = at(step, "result.metrics.tbc.n"), at(step, "result.chunking.content_events")
    first = at(step, "result.metrics.ttft_any.n")
    if not gaps or not chunks or not first:
        return cannot_tell("the report lacks the numbers of gaps, chunks and answers")
    evidence = f"{plural(gaps, 'gap')} of {plural(chunks, 'chunk')} in {plural(first, 'answer')}"
    return verdict(gaps <= chunks - first, evidence)


@each_load(is_measured)
def _judge_gap_count(report: Report, step: Step) -> ComplianceVerdict:
    n = at(step, "result.metrics.tbc.n")
    if n is None:
        return cannot_tell("the number of gaps is not reported")
    return verdict(n >= _GAPS_MIN, f"{count_text(n)} gaps between tokens, {count_text(_GAPS_MIN)} wanted")


def _judge_capacity_criteria(report: Report) -> ComplianceVerdict:
    criteria = at(report, "measurements.criteria") or {}
    completion, ttft, memory = (criteria.get(name) for name in ("completion", "ttft_p99", "memory_errors"))
    if completion is None or ttft is None:
        return not_met("the report has no criteria of completion and TTFT P99")
    evidence = f"{completion:.0%} complete, TTFT P99 <= {duration_text(ttft)}, {text(memory)} out of memory"
    return verdict(completion >= _COMPLETION_MIN and memory == 0, evidence)


@each_level
def _judge_level_lengths(report: Report, step: Step) -> ComplianceVerdict:
    """Judge whether a level lasts 60 seconds and has 100 completions per slot; both are required."""
    time, slots, outcomes = sent_seconds(report, step), slots_of(report, step), at(step, "result.outcomes")
    if time is None or slots is None or outcomes is None:
        return cannot_tell("time, concurrency or completions are not reported")
    done = sum(outcomes.get(name) or 0 for name in ("complete", "refused")) / slots
    evidence = f"{time:.0f} s of {_DURATION_MIN_S}, {done:.0f} completions per slot of {_PER_SLOT_MIN}"
    return verdict(time >= _DURATION_MIN_S and done >= _PER_SLOT_MIN, evidence)


# ---------------------------------------------------------------- draft, 5.6 to 5.10: other tests


def _is_mixed_load(step: Step) -> bool:
    return is_measured(step) and not name_of(step).startswith("alone")


@judges_value_at("measurements.load_share", "what share of saturation the load was is not reported")
def _judge_share_of_saturation(share: Any) -> ComplianceVerdict:
    return verdict(0.695 <= share <= 0.905, f"{share:.0%} of saturation, 70% to 90% recommended")


def _classes(report: Report) -> Mapping[str, Any]:
    classes = at(report, "measurements.classes")
    return classes if isinstance(classes, Mapping) else {}


def _judge_skewed_workload(report: Report) -> ComplianceVerdict:
    """Judge the loads with all classes. A load of one class (IETF 5.6.3) is only a part of the workload."""
    result = workload_is("synthetic-skewed", step_filter=_is_mixed_load)(report)
    if result.status != "not met" or not _classes(report):
        return result
    return not_met(f"{result.evidence}; the parameter workload = synthetic-skewed sends it")


def _judge_two_classes(report: Report) -> ComplianceVerdict:
    classes = _classes(report)
    return verdict(len(classes) > 1, f"classes: {', '.join(classes) or 'none'}")


@judges_value_at("measurements.classes", "requests by class are not reported")
def _judge_per_class(classes: Any) -> ComplianceVerdict:
    sent = {name: at(one, "sent") or 0 for name, one in classes.items()}
    counts = ", ".join(f"{name} {count_text(n)}" for name, n in sent.items())
    return verdict(
        min(sent.values()) >= _PER_CLASS_MIN, f"{counts} requests, {_PER_CLASS_MIN} of each needed"
    )


@judges_value_at("measurements.classes", "no classes are reported")
def _judge_classes_alone(classes: Any) -> ComplianceVerdict:
    lacking = [name for name, one in classes.items() if not at(one, "alone.sent")]
    if lacking:
        return not_met(f"not measured alone: {', '.join(lacking)}")
    alone = ", ".join(f"{name} {count_text(one['alone']['sent'])}" for name, one in classes.items())
    return met(f"requests of each class alone: {alone}, as many tokens per second")


def _judge_cache_off_and_on(report: Report) -> ComplianceVerdict:
    arm_names = arms_of(measured_steps(report))
    both = all(any(word in arm for arm in arm_names) for word in ("off", "on"))
    return verdict(both, f"configurations measured: {', '.join(arm_names)}")


def _judge_identical_requests(report: Report) -> ComplianceVerdict:
    """Judge whether the two loads of each repeat have equal requests: `0/off` (cache off), `0/cold` (on)."""
    by_repeat: dict[str, dict[str, str]] = {}
    for step in measured_steps(report):
        repeat, _, state = name_of(step).rpartition("/")
        digest = workload(step).get("sha256")
        if state in ("off", "cold") and digest:
            plan = at(step, "result.plan")
            identity = f"sha256 {digest[:12]}, seed {plan.get('seed')}, texts {plan.get('texts')}"
            by_repeat.setdefault(repeat, {})[state] = identity
    pairs = [one for one in by_repeat.values() if len(one) == 2]
    if not pairs:
        return cannot_tell("no two loads can be held against each other")
    differing = [one for one in pairs if one["off"] != one["cold"]]
    if differing:
        return not_met(
            f"{len(differing)} of {len(pairs)} repeats: off {differing[0]['off']}; on {differing[0]['cold']}"
        )
    return met(f"{len(pairs)} repeats with the same requests off and on: {pairs[0]['off']}")


@judges_value_at("params.levels", "levels are not reported")
def _judge_oversubscription(levels: Any) -> ComplianceVerdict:
    evidence = f"{', '.join(f'{float(level):g} %' for level in levels)} of capacity"
    return verdict(max(map(float, levels)) > 100, evidence, if_not_met=f"{evidence}: none is above it")


def _judge_capacity_known(report: Report) -> ComplianceVerdict:
    capacity, source = at(report, "measurements.capacity"), str(at(report, "measurements.capacity_source"))
    if capacity is None:
        return cannot_tell("the capacity that levels are of is not reported")
    evidence = f"{count_text(capacity)} at a time: {source}"
    return met(evidence) if "5.5" in source else cannot_tell(evidence)


@judges_value_at("params.output_tokens", "the length of answers is not reported")
def _judge_output_length(tokens: Any) -> ComplianceVerdict:
    return verdict(tokens == _OUTPUT, f"answers of {count_text(tokens)} tokens, {_OUTPUT} wanted")


def _is_latency_load(step: Step) -> bool:
    return is_measured(step) and "at-a-time" not in name_of(step)


@each_load(_is_latency_load)
def _judge_low_concurrency(report: Report, step: Step) -> ComplianceVerdict:
    slots = slots_of(report, step)
    if not is_closed_loop(step):
        return not_met("no closed loop")
    if slots is None:
        return cannot_tell("how many requests were kept at a time is not reported")
    evidence = f"{slots} at a time"
    return verdict(slots <= _CONCURRENCY_MAX, evidence, if_not_met=f"{evidence}, {_CONCURRENCY_MAX} at most")


@judges_value_at("configuration.Warm-up", "what it was warmed up with is not reported")
def _judge_warmup_line(line: Any) -> ComplianceVerdict:
    return met(str(line))


def _judge_four_configurations(report: Report) -> ComplianceVerdict:
    arm_names = arms_of(measured_steps(report))
    evidence = f"{len(arm_names)} configurations: {', '.join(arm_names) or 'none'}"
    wanted = f"{evidence}; none, input, output and all are wanted"
    return verdict(len(arm_names) >= _CONFIGURATIONS_MIN, evidence, if_not_met=wanted)


ROWS: Final = requirements(
    {
        "5.1.2-1a": _check_workload,
        "5.1.2-1b": has_value("result.plan.requests", "{:,} requests planned", "no number of requests"),
        "5.1.2-1c": _check_load_model,
        "5.1.2-1d": _judge_rate,
        "5.1.2-1e": has_value(
            "result.plan.arrivals.arrivals", "arrivals {}", "no arrival distribution", is_open_loop, NO_OPEN
        ),
        "5.1.2-1f": _judge_concurrency,
        "5.1.2-1g": is_declared("sut.boundary", "boundary"),
        "5.1.2-1h": is_declared("sut.model", "model"),
        "5.1.2-1i": _judge_hardware,
        "5.1.2-1j": is_declared("sut.prefix_cache", "prefix caching"),
        "5.1.2.1-1a": has_requests(1_000, " for P99"),
        # Require 10,000 requests of every report, because 5.1.4.1 of the draft requires P99.9 in each.
        "5.1.2.1-1b": has_requests(10_000, " for P99.9"),
        "5.1.2.2-1": _judge_poisson,
        "5.1.3.1-1": _judge_tokens_before_content,
        "5.1.4.1-1": _judge_percentiles,
        "5.1.4.2-1": _judge_input_buckets,
        "5.1.4.3-1": _judge_sample_count,
        "5.1.5-1a": is_declared("sut.boundary", "boundary"),
        "5.1.5-1b": _check_all(is_declared("sut.model", "model"), _judge_hardware),
        "5.1.5-1c": _check_configuration_line("the workload", "workload"),
        "5.1.5-1d": _check_configuration_line("the load model", "load model"),
        "5.1.5-1e": _check_configuration_line("requests or duration", "request", "test duration"),
        "5.1.5-1f": _judge_warmup_size,
        "5.1.5-1g": is_declared("sut.prefix_cache", "prefix caching"),
        "5.1.5-1h": _check_all(
            is_declared("sut.guardrails.input_filter", "guardrails: input filter"),
            is_declared("sut.guardrails.output_filter", "output filter"),
        ),
        "5.1.5-1i": _judge_percentiles,
        "5.1.5-1j": _judge_table_by_input_length,
        "5.1.5.2-1": table_has(
            1,
            ("Metric", "Value"),
            ("Requests", *(f"TTFT {name}" for name in (*_PERCENTILES, "Mean", "Min", "Max"))),
        ),
        "5.1.5.4-1": _judge_ttft_charts,
        "5.2.2-1a": _check_workload,
        "5.2.2-1b": _check_parameters(None, "", "duration"),
        "5.2.2-1c": _check_load_model,
        "5.2.2-1d": _check_parameters(is_open_loop, NO_OPEN, "rate_min", "rate_max"),
        "5.2.2-1e": _check_parameters(is_open_loop, NO_OPEN, "rate_step"),
        "5.2.2-1f": _check_parameters(is_closed_loop, NO_CLOSED, "concurrency_min", "concurrency_max"),
        "5.2.2-1g": _check_parameters(is_closed_loop, NO_CLOSED, "concurrency_step"),
        "5.2.2.1-1": lasts_at_least(300),
        "5.2.2.1-p1": lasts_at_least(_DURATION_MIN_S),
        "5.2.3.1-p1": _judge_search_limit,
        "5.2.3.2-p1": _judge_ramp_up,
        "5.2.5.1-p1": table_has(
            3,
            ("Metric", "Value"),
            (
                "Max Output Throughput",
                "Max Request Throughput",
                "Max Input Throughput",
                "Sustainable Load",
                "Tokens per GPU-second",
            ),
        ),
        "5.2.5.2-p1": table_has(4, ("Metric", "P50", "P95", "P99"), ("TTFT", "TPOT", "End-to-End")),
        "5.3.2-1": _judge_all_open,
        "5.3.2-p1": lasts_at_least(_DURATION_MIN_S),
        "5.3.2-p2": _judge_enough_levels,
        "5.3.2-p3": _judge_level_range,
        "5.3.3-p1": _judge_all_levels,
        "5.3.5-p1": table_has(
            5,
            ("Offered (r/s)", "Achieved (tok/s)", "TTFT P50", "TTFT P99", "TPOT P50", "TPOT P99", "Success"),
        ),
        "5.4.2-1": workload_is("synthetic-uniform", "conversation"),
        "5.4.2-2": _judge_response_lengths,
        "5.4.2-3": has_levels((25, 50, 75, 90), "saturation"),
        "5.4.2-p1": has_requests(100),
        "5.4.2-p2": _judge_gap_count,
        "5.4.3-1": _judge_gaps_without_ttft,
        "5.4.5-p1": table_has(6, ("Metric",), ("P99/P50 Ratio",)),
        "5.5.2-1": workload_is("synthetic-uniform"),
        "5.5.2-p1": is_declared("params.output_tokens", "answer length"),
        "5.5.2-p2": _judge_capacity_criteria,
        "5.5.3-p1": _judge_level_lengths,
        "5.5.5-p1": table_has(7, ("Concurrency", "Completion", "TTFT P99", "TPOT P99", "Errors", "Status")),
        "5.6.2-1": _judge_skewed_workload,
        "5.6.2-2": _judge_share_of_saturation,
        "5.6.2-p1": _judge_two_classes,
        "5.6.2-p2": _judge_per_class,
        "5.6.3-p1": _judge_classes_alone,
        "5.6.3-p2": lasts_at_least(300, _is_mixed_load),
        "5.6.5-p1": table_has(8, ("Class", "Count", "TTFT P50", "TTFT P99", "TPOT P50", "TPOT P99")),
        "5.6.5-p2": table_has(9, ("Metric", "Value"), ("Jain's Fairness Index",)),
        "5.7.2-1": workload_is("code-completion"),
        "5.7.2-2": _judge_cache_off_and_on,
        "5.7.3-p1": _judge_identical_requests,
        "5.7.5-p1": table_has(
            10,
            ("Configuration", "TTFT P50", "TTFT P95", "TTFT P99"),
            ("Cache Disabled", "Cache (Cold)", "Cache (Warm)"),
        ),
        "5.8.2-1": workload_is("long-context", "long-context-uniform"),
        "5.8.2-p1": _judge_oversubscription,
        "5.8.3-p1": _judge_capacity_known,
        "5.8.3-p2": lasts_at_least(120),
        "5.8.5-p1": table_has(11, ("Oversub Level", "Complete", "Preempt", "Fail Rate", "TTFT P99")),
        "5.9.2-1": workload_is("long-context", "long-context-uniform"),
        "5.9.2-p1": _judge_output_length,
        "5.9.2-p2": _judge_low_concurrency,
        "5.9.2-p3": has_requests(20, step_filter=_is_latency_load),
        "5.9.3-p1": _judge_warmup_line,
        "5.9.5-p1": table_has(12, ("Context (tokens)", "TTFT Mean", "TTFT P95", "ms/1K tokens")),
        "5.10.2-1": workload_is("conversation"),
        "5.10.2-p1": _judge_four_configurations,
        "5.10.2-p2": has_levels((25, 50, 75), "capacity"),
        "5.10.5-p1": table_has(13, ("Configuration", "TTFT P50", "TTFT P99", "E2E P50", "E2E P99")),
        "5.10.5-p2": table_has(14, ("Configuration", "Max Throughput", "Reduction")),
    }
)
