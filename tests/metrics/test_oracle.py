"""Against numbers worked out elsewhere: every case whose subject is a metric, to the last digit given.

The oracle is tests/data/oracle.
"""

import json
from itertools import product
from typing import Any

import pytest

from llmtap.metrics.deadlines import Benefit, user_idle_ns
from llmtap.metrics.latency import itl_even_ns, itl_ns, jitter_ns, tbc_max_ns, tbc_ns
from llmtap.metrics.objectives import fluidity, qoe_area_step
from llmtap.metrics.saturation import (
    UNFAIR_BELOW,
    SaturationLevel,
    capacity,
    fit_linear,
    fit_power,
    fit_quadratic,
    heavy_tail,
    incomplete,
    jain,
    jain_readings,
    knee,
    operating_point,
    peak,
    per_thousand_tokens,
    saturation_point,
    starvation,
)
from llmtap.metrics.statistics import deviation, marks, mean, percentile, percentile_by, tail_ratio
from tests.support.data import ORACLE

SMOOTH = (
    "S1_fast_constant",
    "S2_stall_after_2",
    "S3a_stall_after_10_V20",
    "S3b_stall_after_10_V10",
    "S4_slow_constant",
    "S5_output_delay_trick",
)
RULES = {
    "linear (numpy default, type 7)": "linear",
    "nearest rank (ceil(p*n), type 1)": "nearest_rank",
    "hazen (type 5)": "hazen",
    "weibull (type 6)": "weibull",
    "median unbiased (type 8)": "median_unbiased",
    "higher": "higher",
    "lower": "lower",
    "nearest": "nearest",
}


def cases(name: str) -> dict[str, dict[str, Any]]:
    return {case["id"]: case for case in json.loads((ORACLE / name).read_text())["cases"]}


@pytest.fixture(scope="module")
def ietf() -> dict[str, dict[str, Any]]:
    return cases("ietf_cases.json")


def digits(value: float | None) -> str:
    """As the oracle prints: 12 significant digits."""
    return f"{value + 0.0:.12g}"


def same(actual: float | None, expected: float | None) -> None:
    if actual is None or expected is None or isinstance(expected, bool):
        assert actual is expected
    else:
        assert digits(actual) == digits(expected)


def seconds(ns: float | None) -> float | None:
    return None if ns is None else round(ns / 1e9, 12)


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


IDLE_READINGS: dict[str, tuple[str, int, bool]] = {
    "A_arrival_Vi": ("arrival", 1, False),
    "A_arrival_Vi_clamped": ("arrival", 1, True),
    "A0_arrival_V(i-1)": ("arrival", 0, False),
    "F_first_V(i-1)": ("first", 0, False),
    "F1_first_Vi": ("first", 1, False),
    "F1_first_Vi_clamped": ("first", 1, True),
}
"""Origin, tokens of grace, clamped."""


def idle_readings(times: list[int], arrival: int, v: int) -> dict[str, int]:
    """Every reading of user idle latency that the oracle knows, in ns."""
    out: dict[str, int] = {}
    for name, (origin, grace, clamped) in IDLE_READINGS.items():
        idle = user_idle_ns(
            times, arrival if origin == "arrival" else times[0], 1, v, grace_tokens=grace, clamped=clamped
        )
        assert idle is not None
        out[name] = idle
    # Its own simulated reader equals the closed form.
    out["C_cumulative_reader"] = out["A0_arrival_V(i-1)"]
    return out


def check_request(given: dict[str, Any], expected: dict[str, Any], v: int, bounds: dict[str, int]) -> None:
    times, arrival = [ns(t) for t in given["token_times"]], ns(given["arrival"])
    n, gaps = len(times), tbc_ns(times)
    alpha = given.get("alpha", 5.0)
    assert n == expected["n"]
    same(seconds(times[0] - arrival), expected["ttft"])
    same(seconds(times[-1] - arrival), expected["e2e"])
    assert round((times[-1] - times[0]) / (n - 1) / 1e9, 12) == expected["tpot"]
    same(seconds(tbc_max_ns(gaps)), expected["tbt_max"])
    same(seconds(percentile(sorted(gaps), 0.99)), expected["tbt_p99_linear"])
    same(seconds(percentile(sorted(gaps), 0.5)), expected["tbt_p50_linear"])
    idle = idle_readings(times, arrival, v)
    assert idle.keys() == expected["idle"].keys()
    for name, value in idle.items():
        same(seconds(value), expected["idle"][name])
        same(Benefit(alpha, v).tokens(n, value), expected["benefit_seconds"][name])
        same(Benefit(alpha, v, "tokens").tokens(n, value), expected["benefit_tokens_(l/V)"][name])
    counted = fluidity(times, arrival, bounds["ttft"], bounds["tbt"])
    assert [counted.missed_deadlines, counted.deadlines] == expected["fluidity_code_missed_total"]
    same(counted.index_of_code, expected["fluidity_index_code"])
    same(counted.index_of_doc, expected["fluidity_index_doc"])
    same(qoe_area_step(times, arrival, bounds["ttft"], v), expected["qoe_area_step"])


@pytest.mark.parametrize("name", SMOOTH)
def test_one_stream_by_every_reading(name: str) -> None:
    case = cases("smooth_goodput.json")[name]
    given = case["input"]
    bounds = {key: ns(given[f"{key}_slo"]) for key in ("ttft", "tbt", "e2e")}
    check_request(given, case["expected"], ns(given["V_seconds_per_token"]), bounds)


def test_a_set_of_streams_by_every_smooth_goodput() -> None:
    case = cases("smooth_goodput.json")["S6_goodput_set"]
    given, expected = case["input"], case["expected"]
    v = ns(given["V_seconds_per_token"])
    bounds = {key: ns(given[f"{key}_slo"]) for key in ("ttft", "tbt", "e2e")}
    requests = [(ns(r["arrival"]), [ns(t) for t in r["token_times"]]) for r in given["requests"]]
    for request, figures in zip(given["requests"], expected["per_request"], strict=True):
        check_request({**request, "alpha": given["alpha"]}, figures, v, bounds)
    for span, name, f in product(("T_makespan", "T_window_4s"), IDLE_READINGS, ("seconds", "tokens")):
        key = f"smooth_goodput[{name},f={f}]"
        if key in expected[span]:
            model = Benefit(given["alpha"], v, f)
            total = sum(
                model.tokens(len(times), idle_readings(times, arrival, v)[name]) or 0
                for arrival, times in requests
            )
            assert round(total / expected[span]["T"], 12) == expected[span][key], key


def test_delayed_and_preponed_streams() -> None:
    smooth = cases("smooth_goodput.json")
    streams = [
        *(
            (one["delivered"], one)
            for one in smooth["S5_output_delay_trick"]["expected_extra"]["paced"].values()
        ),
        *(
            (one["A_token_times"], {key.removeprefix("A_"): value for key, value in one.items()})
            for one in smooth["S7_decode_prepone"]["expected"].values()
        ),
    ]
    assert len(streams) == 7
    v = ns(smooth["S7_decode_prepone"]["input"]["V_seconds_per_token"])
    for token_times, expected in streams:
        times = [ns(t) for t in token_times]
        same(seconds(tbc_max_ns(tbc_ns(times))), expected["tbt_max"])
        same(seconds(times[-1]), expected["e2e"])
        for name, value in idle_readings(times, 0, v).items():
            same(seconds(value), expected["idle"][name])


def test_percentiles_by_every_rule(ietf: dict[str, Any]) -> None:
    case = ietf["S1_percentiles_small_n"]
    expected = case["expected"]
    values = sorted(case["input"]["ttft_ms"])
    assert values == expected["sorted"]
    assert expected["by_method"].keys() == RULES.keys()
    for printed, rule in RULES.items():
        for name, value in expected["by_method"][printed].items():
            same(percentile_by(rule, values, float(name[1:]) / 100), value)
    same(mean(values), expected["mean"])
    same(deviation(values), expected["std_pop"])
    same(deviation(values, sample=True), expected["std_sample"])
    assert (min(values), max(values)) == (expected["min"], expected["max"])
    same(tail_ratio(percentile(values, 0.5), percentile(values, 0.99)), expected["p99_over_p50_linear"])
    nearest = [percentile_by("nearest_rank", values, p) for p in (0.5, 0.99)]
    same(tail_ratio(*nearest), expected["p99_over_p50_nearest_rank"])
    assert marks(expected["n"]) == ["p50", "p90", "p95", "p99", "p999"]  # 10 samples are enough for none
    one, two = expected["edge_n1"], expected["edge_n2"]
    assert {percentile_by(rule, one["input"], p) for rule in RULES.values() for p in (0.5, 0.99)} == {42.0}
    assert (deviation(one["input"]), deviation(one["input"], sample=True)) == (0.0, None)
    same(percentile(two["input"], 0.5), two["p50_linear"])
    same(percentile(two["input"], 0.99), two["p99_linear"])
    same(percentile_by("nearest_rank", two["input"], 0.5), two["p50_nearest_rank"])
    same(percentile_by("nearest_rank", two["input"], 0.99), two["p99_nearest_rank"])


def test_jain(ietf: dict[str, Any]) -> None:
    given, expected = ietf["S2_jain"]["input"], ietf["S2_jain"]["expected"]
    for name, values in given["vectors"].items():
        same(jain(values), expected[name])
    readings = jain_readings(given["mixed_ttft_ms"], given["isolated_median_ttft_ms"])
    same(readings.per_request, expected["reading_per_request_over_isolated_class_median"])
    same(readings.per_class, expected["reading_per_class_mean_inflation"])
    same(readings.raw, expected["reading_raw_latency_no_normalisation"])
    assert readings.inflation == expected["inflation_per_class"]
    assert jain([0, 0]) is None
    assert expected["significant_unfairness_below"] == UNFAIR_BELOW


def test_starvation(ietf: dict[str, Any]) -> None:
    given, expected = ietf["S3_starvation"]["input"]["wait_ms"], ietf["S3_starvation"]["expected"]
    for name, waits in given.items():
        found = starvation(waits)
        assert found.median == expected[name]["median"]
        assert found.threshold == expected[name]["threshold_5x"]
        assert found.starved_requests == expected[name]["starved_strict"]
        assert found.rate == expected[name]["rate_strict"]
    pooled = percentile(sorted(w for waits in given.values() for w in waits), 0.5)
    for name, waits in given.items():
        found = starvation(waits, pooled)
        assert found.rate == expected["pooled_median_reading"][name]["rate_strict"]


def test_knee_and_saturation(ietf: dict[str, Any]) -> None:
    case = ietf["S4_knee_saturation_table5"]
    expected, rows = case["expected"], case["input"]["rows"]
    ttft = [SaturationLevel(r[0], r[1], r[2], r[3], r[6] / 100) for r in rows]
    tpot = [SaturationLevel(r[0], r[1], r[4], r[5], r[6] / 100) for r in rows]
    assert knee(ttft) == expected["knee_ttft_p99"]
    assert knee(tpot) == expected["knee_tpot_p99"]
    assert 2 * min(level.p99 for level in ttft) == expected["knee_threshold_ms"]
    assert saturation_point(ttft) is expected["saturation_rule_5.3.4_first_decrease"]
    more = [*ttft, SaturationLevel(26, 2650, 1000, 5000)]
    assert saturation_point(more) == expected["saturation_with_added_level_26_2650"]
    assert peak(ttft) == expected["peak_level"] == expected["draft_says_saturation"]
    assert incomplete(ttft) is expected["5.2.3.1_completion_below_90pct_by_success_column"]
    assert ttft[0].achieved_tps / ttft[0].offered_rps == expected["tok_per_request_at_first_level"]
    assert heavy_tail(ttft) == expected["5.2.3.1_p99_gt_10x_p50_of_lowest_level"]
    assert operating_point(ttft, lambda x: x.p99 <= 500) == expected["max_load_with_ttft_p99_slo_500ms"]
    within = {t.offered_rps for t, p in zip(ttft, tpot, strict=True) if t.p99 <= 600 and p.p99 <= 100}
    found = operating_point(ttft, lambda x: x.offered_rps in within)
    assert found == expected["max_load_with_ttft_p99_600_and_tpot_p99_100"]


@pytest.mark.parametrize("which", ["mean", "p95"])
def test_scaling_fits(ietf: dict[str, Any], which: str) -> None:
    case = ietf["S5_scaling_table12"]
    given, expected = case["input"], case["expected"]
    lengths, ttft = given["context_tokens"], given[f"ttft_{which}_ms"]
    power, values = fit_power(lengths, ttft), expected[f"power_{which}"]
    assert power.k_interval is not None
    same(power.k, values["k"])
    same(power.a, values["A_ms"])
    same(power.r2_log, values["R2_log_space"])
    same(power.r2, values["R2_original_space"])
    same(power.k_error, values["k_std_err"])
    for edge, value in zip(power.k_interval, values["k_95ci_t3"], strict=True):
        same(edge, value)
    linear, values = fit_linear(lengths, ttft), expected[f"linear_{which}"]
    same(linear.slope * 1e3, values["slope_us_per_token"])
    same(linear.intercept, values["intercept_ms"])
    same(linear.r2, values["R2"])
    same(linear.origin_slope * 1e3, values["through_origin_slope_us_per_token"])
    same(linear.origin_r2, values["through_origin_R2_centered"])
    same(linear.origin_r2_uncentred, values["through_origin_R2_uncentered"])


def test_scaling_by_length(ietf: dict[str, Any]) -> None:
    case = ietf["S5_scaling_table12"]
    given, expected = case["input"], case["expected"]
    lengths, ttft = given["context_tokens"], given["ttft_mean_ms"]
    quadratic = fit_quadratic(lengths, ttft)
    for name, value in (
        ("c2", quadratic.c2),
        ("c1", quadratic.c1),
        ("c0", quadratic.c0),
        ("R2", quadratic.r2),
    ):
        same(value, expected["quadratic_mean"][name])
    for thousand in (1000, 1024):
        for value, printed in zip(
            per_thousand_tokens(lengths, ttft, thousand), expected[f"ms_per_{thousand}_tokens"], strict=True
        ):
            same(value, printed)


def test_tails_and_jitter(ietf: dict[str, Any]) -> None:
    given, expected = ietf["S6_tail_ratio"]["input"], ietf["S6_tail_ratio"]["expected"]
    same(tail_ratio(given["table6"]["p50"], given["table6"]["p99"]), expected["table6_ratio"])
    values = sorted([20] * 90 + [60] * 9 + [400])
    for rule, key in (("linear", "n100_linear"), ("nearest_rank", "n100_nearest_rank")):
        for name in ("p50", "p90", "p99", "p99.9"):
            same(percentile_by(rule, values, float(name[1:]) / 100), expected[key][name])
        ratio = tail_ratio(percentile_by(rule, values, 0.5), percentile_by(rule, values, 0.99))
        same(ratio, expected[key]["ratio"])
    same(mean(values), expected["mean"])
    same(deviation(values), expected["std_pop"])
    same(deviation(values, sample=True), expected["std_sample"])
    pauses = given["pauses_per_request_ms"]
    assert [tbc_max_ns(p) for p in pauses] == expected["max_pause"]
    for gaps, population, sample in zip(
        pauses, expected["jitter_std_pop"], expected["jitter_std_sample"], strict=True
    ):
        same(jitter_ns(gaps), population)
        same(deviation(gaps, sample=True), sample)
    same(percentile(sorted(expected["max_pause"]), 0.5), expected["max_pause_p50_linear"])


def test_itl_by_every_option(ietf: dict[str, Any]) -> None:
    case = ietf["S7_chunk_timing_and_golden_workload"]
    given, expected = case["input"]["chunks"], case["expected"]
    times, tokens = [ns(t) for t, _ in given], [k for _, k in given]
    same(seconds(times[0]), expected["ttft_s"])
    assert sum(tokens) == expected["tokens"]
    for gaps, name in (
        (tbc_ns(times), "optionA_time_between_chunks"),
        (itl_ns(times, tokens), "optionB_assign_T_to_all"),
        (itl_even_ns(times, tokens), "even_spread"),
    ):
        values = expected[name]
        in_s = sorted(gap / 1e9 for gap in gaps)
        assert len(gaps) == values["samples"]
        same(mean(in_s), values["mean"])
        same(deviation(in_s), values["std_pop"])
        same(percentile(in_s, 0.5), values["p50"])
        same(percentile(in_s, 0.99), values["p99"])
        same(max(in_s), values["max"])
    same((times[-1] - times[0]) / (sum(tokens) - 1) / 1e9, expected["tpot_(last-first)/(n-1)"])
    single = tokens.count(1) / len(tokens)
    same(single, expected["single_token_chunk_fraction"])
    assert (single > 0.9) is expected["direct_measurement_allowed_>90pct_single"]


def test_capacity_search(ietf: dict[str, Any]) -> None:
    table = ietf["S7_chunk_timing_and_golden_workload"]["expected"]["capacity_binary_search_table7"]
    levels = zip(table["levels_tested"], (p / 100 for p in table["completion_pct"]), strict=True)
    assert capacity(list(levels)) == table["max_passing"]
