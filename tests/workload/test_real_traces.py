"""Traces of real services keep what they are when they are played at another rate: their bursts, their ties
and their lengths, as `stats.json` beside each has them."""

from collections import Counter

import pytest

from llmtap.metrics.statistics import arrival_figures, percentile
from llmtap.workload.trace import Trace, load_trace
from llmtap.workload.trace_rows import TraceParts
from tests.support.workloads.trace_files import TRACES, stats

S = 1_000_000_000
FILES = (
    "azure_llm_2023/AzureLLMInferenceTrace_conv.rows_1_12000.csv.gz",
    "azure_llm_2023/AzureLLMInferenceTrace_code.rows_1_6000.csv.gz",
    "mooncake/conversation_trace.rows_1_8000.jsonl.gz",
    "mooncake/synthetic_trace.rows_1_2500.jsonl.gz",
    "burstgpt/BurstGPT_1.rows_1_280.csv",
    "burstgpt/BurstGPT_3.rows_1_280.csv",
)


def loaded(name: str) -> Trace:
    return load_trace(str(TRACES / name), parts=TraceParts(conversations=True, names=True, bodies=True))


@pytest.mark.parametrize("name", FILES)
def test_scaling_keeps_variation_ties_and_lengths(name: str) -> None:
    trace, held, scale = loaded(name), stats(name), 7.3
    made = trace.requests_at(count=len(trace), scale=scale)
    found, arrivals = arrival_figures(made.arrival_ns), held["arrivals"]
    assert found.n == arrivals["n"]
    # Arrivals are rounded to whole ns, no gap is wrong by more than one: 1e-6 of the smallest mean gap, 2 ms.
    assert found.gap_cv == pytest.approx(arrivals["iat_cv_pop"], rel=1e-6)
    assert found.ties == pytest.approx(arrivals["zero_gap_fraction"], rel=1e-9)
    assert found.rate_rps == pytest.approx(arrivals["mean_rate_rps_(n-1)/span"] * scale, rel=1e-6)
    gaps = sorted(b - a for a, b in zip(made.arrival_ns, made.arrival_ns[1:], strict=False))
    for p, seconds in arrivals["iat_percentiles_s"].items():
        assert percentile(gaps, float(p[1:]) / 100) == pytest.approx(seconds * S / scale, rel=1e-6, abs=1)
    assert (sum(made.input), sum(made.output)) == tuple(
        held[f"{side}_tokens"]["sum"] for side in ("input", "output")
    )


def test_burstgpts_sessions_are_conversations() -> None:
    trace = loaded("burstgpt/BurstGPT_3.rows_1_280.csv")
    held = stats("burstgpt/BurstGPT_3.rows_1_280.csv")
    alone = held["rows"] - held["sessions"]["rows_with_session"]
    assert len(set(trace.sessions)) == held["sessions"]["sessions"] + alone
    assert sum(before < 0 for before in trace.requests.after) == held["sessions"]["sessions"] + alone
    assert max(Counter(trace.sessions).values()) == held["sessions"]["longest_session_rows"]
    assert Counter(trace.requests.models) == held["models"]
    for row, before in enumerate(trace.requests.after):
        if before >= 0:
            distance = trace.requests.arrival_ns[row] - trace.requests.arrival_ns[before]
            assert 0 <= trace.requests.think_ns[row] <= distance
