"""vLLM's metrics: its names, its buckets, and one label pair for all."""

from llmtap.sim.engine import IterationState
from llmtap.sim.server.gauges import EngineMetrics


def test_names_and_buckets_are_vllms() -> None:
    gauges = EngineMetrics("tiny")
    gauges.on_begin()
    gauges.on_prompt(7)
    gauges.on_first_token(30_000_000)
    gauges.on_gap(20_000_000)
    gauges.on_ended(3, 40_000_000, 90_000_000, ["stop"])
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
    assert "kv_cache" not in text and "prefix_cache" not in text, "a fixed schedule has neither"


def test_an_engine_says_what_runs_and_waits_and_what_its_memory_holds() -> None:
    state = IterationState(
        running=3,
        waiting=4,
        kv_used=0.5,
        preemptions=2,
        preempted_tokens=70,
        prefix_queries=100,
        prefix_hits=48,
    )
    gauges = EngineMetrics("tiny", lambda: state)
    gauges.on_begin()
    expected = {
        "num_requests_running": 3.0,
        "num_requests_waiting": 4.0,
        "kv_cache_usage_perc": 0.5,
        "num_preemptions_total": 2.0,
        "prefix_cache_queries_total": 100.0,
        "prefix_cache_hits_total": 48.0,
    }
    assert 'llmtap_sim:preempted_tokens_total{engine="0",model_name="tiny"} 70.0' in gauges.text().decode()
    for _ in range(2):  # to be asked does not count
        lines = gauges.text().decode().splitlines()
        for name, value in expected.items():
            assert f'vllm:{name}{{engine="0",model_name="tiny"}} {value}' in lines
    state.preemptions, state.running, state.waiting, state.kv_used = 5, 0, 0, 0.0
    lines = gauges.text().decode().splitlines()
    assert 'vllm:num_preemptions_total{engine="0",model_name="tiny"} 5.0' in lines
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in lines
