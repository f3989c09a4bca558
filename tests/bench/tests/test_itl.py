"""ITL as planted: shapes by hand, and servers with a steady pace, with stalls, and with chunks."""

from collections.abc import Callable
from math import sqrt
from pathlib import Path
from random import Random
from typing import Any

import pytest

from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.session import Load
from llmtap.bench.tests.itl import TEST
from tests.bench.support import Planted, measured, perform

MS = 1_000_000
DIRECT = "direct (single-token chunks); tokens by usage"
CHUNKED = "A (time between chunks); tokens by usage"


def answers(gaps: Callable[[int], list[float]], n: int = 100, policy: str = DIRECT, **more: Any) -> Any:
    """Measurements of `n` answers, whose gaps in ms `gaps` says."""

    def answer(name: str, load: Load) -> Measurement:
        rows = []
        for i in range(n):
            report = [round(gap * MS) for gap in gaps(i)]
            rows.append({"gaps_ns": report, "output_tokens": len(report) + 1, "itl_policy": policy})
        return measured(name, rows, **more)

    return answer


def test_a_level_has_the_draft_s_figures(tmp_path: Path) -> None:
    """Each answer has 98 gaps of 10 ms and a pause, of 1 to 100 ms more."""
    session = Planted(tmp_path, answers(lambda i: [10.0] * 98 + [11.0 + i]), "itl")
    result = perform(TEST, session, max_rate=8.0, levels=[50.0, 25.0])
    assert [(name, load.rate_rps) for name, load in session.loads] == [
        ("25-percent", 2.0),
        ("50-percent", 4.0),
    ]
    low, high = result.measurements_to_dict()["levels"]
    assert (low["level"], low["rate_rps"], high["level"]) == (25.0, 2.0, 50.0)
    assert low["itl"]["n"] == 9_900
    assert low["itl"]["p50"]["value"] == low["itl"]["p90"]["value"] == 0.01
    assert low["itl"]["max"] == 0.11
    # 10 ms and, once in 99, 50.5 ms more on average.
    assert low["itl"]["mean"] == pytest.approx(0.01 + 0.0505 / 99)
    # One gap in 99 is a pause: the standard deviation of an answer is its excess times sqrt(98) / 99.
    assert low["jitter"]["p50"]["value"] == pytest.approx(0.0505 * sqrt(98) / 99)
    assert low["max_pause"]["p50"]["value"] == pytest.approx(0.0605)
    assert low["max_pause"]["max"] == pytest.approx(0.11)
    table = result.tables[0]
    assert table.heads == ["Metric", "25 % (2/s)", "50 % (4/s)"]
    assert [row[0] for row in table.rows] == [
        "Samples",
        "P50",
        "P90",
        "P95",
        "P99",
        "P99.9",
        "Mean",
        "Std Dev",
        "P99/P50 Ratio",
    ]
    values = {row[0]: row[1] for row in table.rows}
    told_ms = "10.0 ms (10.0 to 10.0)"
    assert (values["Samples"], values["P50"], values["P90"]) == ("9900", told_ms, told_ms)
    assert [chart.kind for chart in result.charts] == ["cdf", "histogram", "line"]
    assert result.charts[2].series[0].x == [25.0, 50.0]
    assert result.deviations == []
    assert result.configuration["ITL measurement"].startswith("option A, direct")
    assert result.itl_option == "A (direct)"


def test_stalls_make_a_second_mode(tmp_path: Path) -> None:
    """One gap in twelve waits for a prefill of 50 ms."""

    def gaps(i: int) -> list[float]:
        random = Random(f"stall/{i}")
        return [random.gauss(60, 2) if random.random() < 1 / 12 else random.gauss(8, 0.5) for _ in range(99)]

    result = perform(TEST, Planted(tmp_path, answers(gaps), "itl"), max_rate=8.0, levels=[75.0])
    (one,) = result.measurements_to_dict()["levels"]
    assert not one["modality"]["unimodal"]
    first, *others = one["modality"]["modes"]
    assert first == pytest.approx(0.008, rel=0.05)
    assert others and all(other == pytest.approx(0.06, rel=0.1) for other in others)
    assert result.tables[-1].rows[0][:2] == ["75 %", "multimodal"]


def test_chunks_of_several_tokens_are_called_time_between_chunks(tmp_path: Path) -> None:
    chunking = {"single_token_share": 0.1, "tokens_per_chunk_mean": 3.7, "tokens_per_chunk_max": 5}
    session = Planted(tmp_path, answers(lambda i: [30.0] * 60, policy=CHUNKED, chunking=chunking), "itl")
    result = perform(TEST, session, max_rate=8.0, levels=[50.0])
    (one,) = result.measurements_to_dict()["levels"]
    assert (one["term"], one["option"]) == ("TBC", "A")
    assert [row[0] for row in result.tables[0].rows][:2] == ["Samples", "P50"]
    assert result.tables[0].caption.startswith("Table 6: TBC Results at 50 %")
    (note,) = [note for note in result.notes if "chunks have" in note]
    assert "3.70 tokens on average, 10% of one token" in note


def test_option_b_gives_all_tokens_of_a_chunk_its_time(tmp_path: Path) -> None:
    """Chunks of 4 tokens every 40 ms: a gap of 40 ms and three of 0, as many as there are tokens less one."""

    def answer(name: str, load: Load) -> Measurement:
        row = {
            "gaps_ns": [40 * MS] * 19,
            "output_tokens": 80,
            "chunk_tokens": [4] * 20,
            "itl_policy": CHUNKED,
        }
        unknown = {**row, "chunk_tokens": None}
        return measured(name, [row] * 9 + [unknown])

    result = perform(TEST, Planted(tmp_path, answer, "itl"), max_rate=8.0, levels=[50.0], option="B")
    (level,) = result.measurements_to_dict()["levels"]
    assert (level["option"], level["term"], level["answers"], result.itl_option) == ("B", "ITL", 9, "B")
    assert level["itl"]["n"] == 9 * 79
    assert level["itl"]["mean"] == pytest.approx(0.04 * 19 / 79)
    assert (level["itl"]["p50"]["value"], level["itl"]["p90"]["value"]) == (0.0, 0.04)


@pytest.mark.parametrize(("option", "option_found", "p50"), [("auto", "C", 0.005), ("A", "A", 0.02)])
def test_the_server_s_stamps_are_taken_where_it_tells_them(
    option: str, option_found: str, p50: float, tmp_path: Path
) -> None:
    def answer(name: str, load: Load) -> Measurement:
        row = {"gaps_ns": [20 * MS] * 60, "server_gaps_ns": [5 * MS] * 60, "output_tokens": 61}
        return measured(name, [{**row, "itl_policy": f"C (the server's stamps) beside {CHUNKED}"}] * 100)

    result = perform(TEST, Planted(tmp_path, answer, "itl"), max_rate=8.0, levels=[50.0], option=option)
    (one,) = result.measurements_to_dict()["levels"]
    assert (one["option"], result.itl_option) == (option_found, option_found)
    assert one["itl"]["p50"]["value"] == p50


def test_answers_that_are_too_short_are_left_out_and_told(tmp_path: Path) -> None:
    session = Planted(tmp_path, answers(lambda i: [10.0] * (60 if i % 2 else 20)), "itl")
    result = perform(TEST, session, max_rate=8.0, levels=[50.0])
    (one,) = result.measurements_to_dict()["levels"]
    assert (one["requests"], one["answers"], one["too_short"], one["itl"]["n"]) == (100, 50, 50, 3_000)
    assert any("fewer than 50 tokens" in note for note in result.notes)
    assert len(result.deviations) == 1  # too few answers, and too few gaps
