"""Scaling with the length of the prompt, as planted: exact laws by hand, and engines with known prefill."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.session import Load
from llmtap.bench.tests.long_context import TEST
from tests.bench.support import Planted, measured, perform

LENGTHS = [1_024, 2_048, 4_096, 8_192, 16_384]
Law = Callable[[float], float]


def served(law: Law, *, noise: float = 0.02, limit: int = 1 << 30) -> Callable[[str, Load], Measurement]:
    """A server whose TTFT in seconds is `law` of the prompt's length, with noise of that share; it refuses
    prompts longer than `limit`."""

    def answer(name: str, load: Load) -> Measurement:
        random = Random(name)
        rows: list[dict[str, Any]] = []
        for length in load.plan.requests.input:
            ttft_ns = round(law(length) * random.gauss(1, noise) * 1e9)
            report = {
                "ttft_ns": ttft_ns,
                "e2e_ns": ttft_ns + 10**9,
                "input_tokens": length,
                "output_tokens": 256,
            }
            rows.append(report if length <= limit else {"outcome": "refused", "input_tokens": length})
        return measured(name, rows, seconds=2.0, outcomes={"complete": len(rows)})

    return answer


def test_lengths_are_sent_in_ascending_order_each_with_texts_of_its_own(tmp_path: Path) -> None:
    session = Planted(tmp_path, served(lambda length: 1e-4 * length), "long-context")
    result = perform(TEST, session, lengths=[512, 256], requests=4, throughput_concurrency=2)
    assert [name for name, _ in session.loads] == [
        "256-tokens",
        "256-tokens-2-at-a-time",
        "512-tokens",
        "512-tokens-2-at-a-time",
    ]
    for name, load in session.loads:
        length = int(name.partition("-")[0])
        assert set(load.plan.requests.input) == {length}
        assert set(load.plan.requests.output) == {256}
        assert load.about["input_tokens"] == length
    texts = [load.plan.prompts.prompt(0).text for _, load in session.loads if load.plan.prompts is not None]
    assert len({text[:40] for text in texts}) == 4
    assert len({load.fingerprint() for _, load in session.loads}) == 4
    assert (
        result.measurements_to_dict()["lengths"][0]["throughput_max"]["requests_per_s"] == 3.0
    )  # 6 of 2 slots in 2 s


def limited(rps_max: float) -> Callable[[str, Load], Measurement]:
    """A server that takes 1 s for a response alone, and completes at most `rps_max` requests a second."""

    def answer(name: str, load: Load) -> Measurement:
        count, slots = len(load.plan.requests), load.slots or 1
        row = {"ttft_ns": 10**8, "e2e_ns": 10**9, "input_tokens": 1_024, "output_tokens": 16}
        return measured(name, [dict(row) for _ in range(count)], seconds=count / min(slots, rps_max))

    return answer


@pytest.mark.parametrize(
    ("rps_max", "slots_max", "tried", "maximum", "saturated"),
    [
        (6.0, 64, [1, 2, 4, 8, 16], (6.0, 8), True),
        (0.5, 64, [1, 2], (0.5, 1), True),
        (64.0, 6, [1, 2, 4, 6], (6.0, 6), False),
        (6.0, None, [1], (1.0, 1), False),
    ],
)
def test_the_concurrency_is_doubled_until_the_throughput_no_longer_grows(
    tmp_path: Path,
    rps_max: float,
    slots_max: int | None,
    tried: list[int],
    maximum: tuple[float, int],
    saturated: bool,
) -> None:
    session = Planted(tmp_path, limited(rps_max), "long-context")
    result = perform(TEST, session, lengths=[1_024], requests=4, throughput_concurrency=slots_max)
    (one,) = result.measurements_to_dict()["lengths"]
    assert [level["concurrency"] for level in one["throughput"]] == tried
    assert (one["throughput_max"]["requests_per_s"], one["throughput_max"]["concurrency"]) == maximum
    assert one["throughput_saturated"] == saturated
    assert any(text.startswith("5.9.4") for text in result.deviations) != saturated
    texts = [load.plan.prompts.prompt(0).text for _, load in session.loads if load.plan.prompts is not None]
    assert len({text[:40] for text in texts}) == len(tried)


def test_table_12_has_the_draft_s_columns(tmp_path: Path) -> None:
    session = Planted(tmp_path, served(lambda length: 68e-6 * length, noise=0), "long-context")
    result = perform(TEST, session, lengths=[1_000, 10_000], requests=20)
    table = result.tables[0]
    assert table.caption == "Table 12: Long Context Scaling"
    assert table.heads == ["Context (tokens)", "TTFT Mean", "TTFT P95", "ms/1K tokens"]
    texts = [[text.partition(" (")[0] for text in row] for row in table.rows]
    assert texts == [["1000", "68.0 ms", "68.0 ms *", "68.0"], ["10000", "680 ms", "680 ms *", "68.0"]]
    assert all(" to " in row[1] for row in table.rows)
    assert result.deviations == []


def test_a_power_law_s_exponent_lies_within_its_interval(tmp_path: Path) -> None:
    k = 1.3
    session = Planted(tmp_path, served(lambda length: 2e-5 * length**k), "long-context")
    result = perform(TEST, session, lengths=LENGTHS, throughput_concurrency=None)
    exponent = result.measurements_to_dict()["scaling_exponent"]
    assert exponent["low"] < k < exponent["high"]
    assert exponent["high"] - exponent["low"] < 0.1
    assert result.measurements_to_dict()["best_fit"] == "power"


@pytest.mark.parametrize(("bend", "best"), [(2e-10, "linear"), (2.5e-10, "quadratic")])
def test_a_law_of_more_parameters_wins_only_by_more_than_six(bend: float, best: str, tmp_path: Path) -> None:
    """The quadratic law fits better in both cases; BICs differ by 2.5 and by 8.0."""
    law = served(lambda length: 0.05 + 68e-6 * length + bend * length**2)
    session = Planted(tmp_path, law, "long-context")
    report = perform(TEST, session, lengths=LENGTHS, throughput_concurrency=None).measurements_to_dict()
    better = report["fits"]["linear"]["bic"] - report["fits"]["quadratic"]["bic"]
    assert better > 0
    assert (better > 6) == (best == "quadratic")
    assert report["best_fit"] == best


def test_what_the_sut_refuses_ends_the_test(tmp_path: Path) -> None:
    session = Planted(tmp_path, served(lambda length: 1e-4 * length, limit=4_096), "long-context")
    result = perform(TEST, session, lengths=LENGTHS, throughput_concurrency=None)
    assert [one["length"] for one in result.measurements_to_dict()["lengths"]] == [1_024, 2_048, 4_096]
    assert session.loads[-1][0] == "8192-tokens"
    assert any("no answer at 8,192 tokens" in note for note in result.notes)
    nothing = perform(TEST, session, lengths=[8_192])
    assert nothing.measurements_to_dict()["scaling_exponent"] is None
    assert nothing.charts == []


@pytest.mark.parametrize(
    ("count", "fits"), [(lambda n: 5, []), (lambda n: 5 + n // 1_000, ["power", "linear"])]
)
def test_a_server_that_counts_prompts_as_equally_long_gives_no_fit(
    count: Callable[[int], int], fits: list[str], tmp_path: Path
) -> None:
    serve = served(lambda length: 1e-4 * length)

    def answer(name: str, load: Load) -> Measurement:
        one = serve(name, load)
        counts = pa.array([count(n) for n in one.table["input_tokens"].to_pylist()])
        table = one.table.set_column(one.table.schema.get_field_index("input_tokens"), "input_tokens", counts)
        return replace(one, table=table)

    session = Planted(tmp_path, answer, "long-context")
    result = perform(TEST, session, lengths=[256, 512, 1_024], requests=4, throughput_concurrency=None)
    assert sorted(result.measurements_to_dict()["fits"]) == sorted(fits)


def test_a_linear_law_is_found_linear(tmp_path: Path) -> None:
    session = Planted(tmp_path, served(lambda length: 0.05 + 68e-6 * length), "long-context")
    result = perform(TEST, session, lengths=LENGTHS, throughput_concurrency=None)
    report = result.measurements_to_dict()
    assert report["best_fit"] == "linear"
    assert report["fits"]["linear"]["slope"] == pytest.approx(68e-6, rel=0.03)
    assert report["fits"]["linear"]["r2"] > 0.99
    assert result.notes[0].startswith("Best fit: Linear (R^2 = 0.99") or "1.0000" in result.notes[0]
    assert "microseconds per input token" in result.notes[0]
