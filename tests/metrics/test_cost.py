import pytest

from llmtap.metrics.cost import Price, cost_of, tokens_per_gpu_second


def test_tokens_per_gpu_second_is_the_drafts() -> None:
    # Table 3: 2,847 tok/s on 8 GPUs are printed as 356.
    assert tokens_per_gpu_second(2847 * 60, 60.0, 8) == pytest.approx(355.875)
    assert tokens_per_gpu_second(5, 60.0, 0) is None
    assert tokens_per_gpu_second(5, 0.0, 8) is None


def test_gpus_cost_their_time_busy_or_idle() -> None:
    # Two GPUs at 3.60 an hour for 500 s: 1,000 GPU-seconds at 0.001 are 1.
    cost = cost_of(Price(gpus=2, per_gpu_hour=3.60), 500.0, output_tokens=10_000, good_tokens=4_000)
    assert cost.gpu_seconds == 1_000.0
    assert cost.spent == pytest.approx(1.0)
    assert cost.per_gpu_second == pytest.approx(0.001)
    assert cost.per_output_token == pytest.approx(1e-4)
    assert cost.per_good_token == pytest.approx(2.5e-4)
    assert cost.output_tokens_per_gpu_second == 10.0
    assert cost.output_tokens_per_unit == pytest.approx(10_000)


def test_tokens_may_be_what_is_paid_for() -> None:
    price = Price(per_million_input=2.0, per_million_output=10.0, currency="EUR")
    cost = cost_of(price, 60.0, output_tokens=100_000, good_tokens=None, input_tokens=1_000_000)
    assert (cost.currency, cost.spent) == ("EUR", 3.0)
    assert cost.per_output_token == pytest.approx(3e-5)
    assert (cost.per_good_token, cost.per_gpu_second, cost.output_tokens_per_gpu_second) == (None, None, None)


def test_nothing_served_has_no_cost_per_token() -> None:
    cost = cost_of(Price(gpus=1, per_gpu_hour=3600), 1.0, 0, 0)
    assert (cost.spent, cost.per_output_token, cost.per_good_token) == (1.0, None, None)
    assert cost.output_tokens_per_unit == 0.0


def test_a_price_is_not_below_zero() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        Price(gpus=1, per_gpu_hour=-1)
