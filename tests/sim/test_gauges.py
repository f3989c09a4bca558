"""vLLM's metrics: its names, its buckets, and one label pair for all."""

from llmtap.sim.gauges import Gauges


def test_names_and_buckets_are_vllms() -> None:
    gauges = Gauges("tiny")
    gauges.began(7)
    gauges.first(30_000_000)
    gauges.gap(20_000_000)
    gauges.ended(3, 40_000_000, 90_000_000, ["stop"])
    text = gauges.text().decode()
    at = 'engine="0",model_name="tiny"'
    for line in (
        f"vllm:num_requests_running{{{at}}} 0.0",
        f"vllm:prompt_tokens_total{{{at}}} 7.0",
        f"vllm:generation_tokens_total{{{at}}} 3.0",
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.02",model_name="tiny"} 0.0',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.04",model_name="tiny"} 1.0',
        'vllm:inter_token_latency_seconds_bucket{engine="0",le="0.025",model_name="tiny"} 1.0',
        'vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3",model_name="tiny"} 1.0',
        f"vllm:request_time_per_output_token_seconds_sum{{{at}}} 0.02",
    ):
        assert line in text.splitlines()
    edges = [line for line in text.splitlines() if line.startswith("vllm:time_to_first_token_seconds_bucket")]
    assert len(edges) == 23, "22 and infinity"
    assert "kv_cache" not in text
    gauges.kv_usage(0.5)
    gauges.waiting(4)
    assert f"vllm:kv_cache_usage_perc{{{at}}} 0.5" in gauges.text().decode()
    assert f"vllm:num_requests_waiting{{{at}}} 4.0" in gauges.text().decode()


def test_a_request_that_was_not_answered_is_no_success() -> None:
    gauges = Gauges("tiny")
    gauges.began(1)
    gauges.ended(0, None, 5, [])
    text = gauges.text().decode()
    assert "request_success_total{" not in text
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in text
