import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.sim.latency import SEED_MODEL, LatencyModel
from llmtap.sim.sweep.fitting import GridError, GridPoint, fit_batches, load_grid

GRID = [(b, length) for b in (1, 2, 4, 8, 16, 32) for length in (128, 256, 512, 1024, 2048)]
"""Seed 004, 3.2."""


def grid_of(model: LatencyModel) -> list[GridPoint]:
    return [(b, n, (model.alpha_ns + n * model.step_ns(b)) / 1e9) for b, n in GRID]


@pytest.mark.parametrize(
    ("size", "length", "seconds"),
    [
        (1, 0, 0.059653),
        (1, 150, 0.920953),
        (2, 1000, 0.059653 + 5.742 * 1.158),
        (8, 1580, 11.64052054),
    ],
)
def test_a_batch_takes_alpha_and_beta_for_each_token_of_its_longest(
    size: int, length: int, seconds: float
) -> None:
    assert SEED_MODEL.batch_ns(size, length) == round(seconds * 1e9)


def test_no_batch_is_slower_between_tokens_than_beta_times_one_and_gamma() -> None:
    """So the seed's token SLA of 10 ms cannot be violated, and 10 ms - 5 ms <= every step <= 10 ms + 5 ms."""
    steps = [SEED_MODEL.step_ns(b) for b in range(1, 129)]
    assert steps == sorted(steps)
    assert 5_000_000 < steps[0] == 5_742_000
    assert steps[-1] < 5_742_000 * 1.316 < 7_557_000 < 10_000_000


def test_the_gain_that_the_seed_calls_twenty_is_eight() -> None:
    """Seed 004, 5.5: four requests of 5 tokens instead of four whose longest has 100."""
    assert SEED_MODEL.batch_ns(4, 100) / SEED_MODEL.batch_ns(4, 5) == pytest.approx(8.09, abs=0.005)


@pytest.mark.parametrize(("b", "n", "measured"), [(1, 128, 0.080), (8, 512, 0.222), (32, 1024, 0.485)])
def test_the_rows_that_the_seed_shows_are_not_of_the_model_that_it_gives(
    b: int, n: int, measured: float
) -> None:
    assert 9 < SEED_MODEL.batch_ns(b, n) / 1e9 / measured < 18


@given(
    st.floats(1e5, 1e9), st.floats(1e3, 1e8), st.floats(0, 2)
)  # fmt: skip
def test_a_fit_to_a_models_own_grid_is_that_model(alpha: float, beta: float, gamma: float) -> None:
    found = fit_batches(grid_of(LatencyModel(alpha, beta, gamma)))
    assert found.model.alpha_ns == pytest.approx(alpha, rel=1e-6)
    assert found.model.beta_ns == pytest.approx(beta, rel=1e-9)
    assert found.model.gamma == pytest.approx(gamma, rel=1e-6, abs=1e-9)
    assert (found.part.points, found.part.r2) == (30, pytest.approx(1, abs=1e-12))
    assert found.part.error_max < 1e-9


def test_a_fit_tells_how_good_it_is() -> None:
    noise = random.Random(7)
    points = [(b, n, s * noise.gauss(1, 0.05)) for b, n, s in grid_of(SEED_MODEL)]
    found = fit_batches(points)
    assert found.model.beta_ns == pytest.approx(SEED_MODEL.beta_ns, rel=0.1)
    assert 0.98 < found.part.r2 < 0.9999
    assert 0.02 < found.part.error_max < 1


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(1, 100, 1.0)],
        [(4, 100, 1.0), (4, 200, 2.0), (4, 300, 3.0)],  # one batch size
        [(1, 100, 1.0), (2, 100, 1.5), (4, 100, 2.0)],  # one length
        [(1, 100, 3.0), (1, 200, 2.0), (2, 100, 3.0), (2, 200, 2.0)],  # longer is quicker
    ],
)
def test_a_grid_that_does_not_tell_the_model_is_refused(points: list[GridPoint]) -> None:
    with pytest.raises(GridError):
        fit_batches(points)


def test_a_grid_is_read_by_the_names_of_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "grid.csv"
    path.write_text("std,mean_latency_sec,batch_size,max_seq_len\n0.1,0.080,1,128\n\n0.1,0.485,32,1024\n")
    assert load_grid(path) == [(1, 128, 0.080), (32, 1024, 0.485)]
    path.write_text("b,L,seconds\n2,10,0.5\n")
    assert load_grid(path) == [(2, 10, 0.5)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "line 1: no column is called batch_size or b"),
        ("b,L\n1,2\n", "line 1: no column is called mean_latency_sec or seconds or latency_s"),
        ("b,L,seconds\n1,2\n", "line 2: expected"),
        ("b,L,seconds\n1,2,3\nx,2,3\n", "line 3: expected"),
        ("b,L,seconds\n0,2,3\n", "line 2: a batch of 0"),
        ("b,L,seconds\n1,2,nan\n", "line 2: a batch of 1"),
    ],
)
def test_a_grid_that_is_none_is_refused_with_the_line(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "grid.csv"
    path.write_text(text)
    with pytest.raises(GridError, match=problem):
        load_grid(path)


def test_a_grid_by_which_large_batches_take_no_time_is_refused() -> None:
    with pytest.raises(GridError, match="less than no time"):
        fit_batches([(1, 128, 3.0), (8, 512, 2.0), (32, 1_024, 1.0), (4, 2_048, 0.5), (1, 4_096, 9.0)])
