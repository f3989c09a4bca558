"""Invariant: what is a combination of the columns is found again; what they do not tell is None."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.sim.sweep.fitting import least_squares, nearest, part_of

N = 12
ROW = st.lists(st.integers(-1_000, 1_000).map(float), min_size=N, max_size=N)


@given(ROW, st.lists(st.integers(-50, 50), min_size=2, max_size=2))
def test_a_combination_is_found_again(column: list[float], constants: list[int]) -> None:
    columns = [[1.0] * N, column]
    values = [constants[0] + constants[1] * x for x in column]
    solved = least_squares(columns, values)
    if len(set(column)) == 1:
        assert solved is None
    else:
        assert solved == pytest.approx(constants, abs=1e-6)


def test_it_is_the_nearest_where_none_fits() -> None:
    # By hand: y = 1 + x leaves 0.5, -0.5, -0.5, 0.5 of these, which is at a right angle to both columns.
    assert least_squares([[1.0] * 4, [0.0, 1.0, 2.0, 3.0]], [1.5, 1.5, 2.5, 4.5]) == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(
    "columns",
    [
        [[0.0] * 3],
        [[1.0] * 3, [2.0] * 3],
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0]],
        [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0 + 1e-9]],
    ],
)
def test_columns_that_are_alike_tell_nothing(columns: list[list[float]]) -> None:
    assert least_squares(columns, [1.0, 2.0, 3.0]) is None


RISING = {"one": [1.0] * 4, "up": [0.0, 1.0, 2.0, 3.0], "odd": [0.0, 1.0, 0.0, 1.0]}


@pytest.mark.parametrize(
    ("values", "needed", "found"),
    [
        ([1, 4, 5, 8], ["one"], {"one": 1.0, "up": 2.0, "odd": 1.0}),
        # 1 + 2 up - odd: without `odd` the nearest is 0.8 + 1.8 up.
        ([1, 2, 5, 6], ["one"], {"one": 0.8, "up": 1.8}),
        ([4, 3, 2, 1], ["one"], {"one": 2.5}),
        ([4, 3, 2, 1], ["one", "up"], None),
        ([-1, -1, -1, -1], ["one"], None),
    ],
)
def test_no_constant_is_below_0_and_those_needed_are_above(
    values: list[float], needed: list[str], found: dict[str, float] | None
) -> None:
    best = nearest(RISING, values, needed)
    if found is None:
        assert best is None
    else:
        assert best is not None
        assert best[0] == pytest.approx(found, abs=1e-9)
        told = [sum(found[name] * RISING[name][i] for name in found) for i in range(4)]
        assert best[1] == pytest.approx(told, abs=1e-9)


def test_how_well_it_tells_by_hand() -> None:
    part = part_of("x", [1.0, 2.0, 3.0], [1.0, 2.5, 3.0])
    assert (part.points, part.r2, part.error_max) == (3, 1 - 0.25 / 2, 0.25)
    assert part_of("x", [2.0, 2.0], [2.0, 2.0]).r2 == 1.0
