"""The duration of a benchmark follows from what its loads showed, and is corrected by later ones."""

import pytest

from llmtap.bench.run.pace import REPORT_DEFAULT_S, SLOTS_DEFAULT, ExpectedLoads, Pace, expected_open_loops


def test_a_test_takes_warm_up_sending_answers_and_what_each_load_takes_beside() -> None:
    pace = Pace()
    assert not pace.is_known
    pace.add_warmup(40.0)
    pace.add_load(6.0, 14.0, 2.0)
    pace.add_load(6.0, 16.0, 4.0)
    assert pace.seconds(ExpectedLoads(0, warmups=0)) == REPORT_DEFAULT_S
    pace.add_report(7.0)
    assert pace.is_known
    # 2 warm-ups of 40 s, 4 loads of 9 s beside their sending, 24 s of sending, 10 answers of 3 s, the end.
    expected = ExpectedLoads(4, seconds=24.0, answers=10, warmups=2)
    assert pace.seconds(expected) == pytest.approx(80 + 36 + 24 + 30 + 7)


def test_an_unknown_capacity_is_guessed_by_answers_at_a_time() -> None:
    assert expected_open_loops(100, [0.5, 1.0], 10.0) == ExpectedLoads(2, seconds=30.0)
    assert expected_open_loops(100, [0.5], None) == ExpectedLoads(1, answers=200 / SLOTS_DEFAULT)
