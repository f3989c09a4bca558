"""Requirements on figures: their parsing, what they decide of results, and the exit codes."""

from typing import Any

import pytest

from llmtap.errors import ConfigError, ExitCode
from llmtap.gates.requirements import Requirements, exit_code


def result(**more: Any) -> dict[str, Any]:
    """Return a Summary of 200 requests, 2 of which failed."""
    latencies = {"n": 200, "mean": 0.12, "p50": 0.1, "p99": 0.5, "max": 0.9, "marks": ["p99"]}
    return {
        "n": 200,
        "outcomes": {"complete": 190, "refused": 8, "upstream_error": 2},
        "metrics": {"ttft": latencies, "tpot": latencies, "e2e": latencies},
        "goodput": {"objectives": "ttft:300ms", "attainment": 0.97, "requests_per_second": 4.0},
        "load": {"achieved_rps": 5.0},
        "tokens": {"output_per_second": 100.0, "source": {"usage": 198}},
        "refusals": {"share": 0.04},
        **more,
    }


def states(texts: str, of: dict[str, Any]) -> list[str]:
    return [row.state for row in Requirements.parse([texts]).judge(of)]


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("ttft_p99<=500ms", "met"),
        ("ttft_p99<500ms", "missed"),
        ("ttft_p99 <= 0.5s", "met"),
        ("ttft_mean<=119ms", "missed"),
        ("e2e_max<1s", "met"),
        ("attainment>=97%", "met"),
        ("attainment>=0.971", "missed"),
        ("error_rate<=1%", "met"),
        ("error_rate<0.01", "missed"),
        ("goodput>=4", "met"),
        ("achieved_rps>5", "missed"),
        ("requests>=200", "met"),
        ("refusal_rate<=4%", "met"),
        ("output_tokens_per_second>=100", "met"),
        ("ttft_p999<=1s", "not_valid"),
        ("tbc_p99<=1s", "not_valid"),
        ("ttft_scheduled_p99<=1s", "not_valid"),
        ("smooth_goodput>0", "not_valid"),
    ],
)
def test_a_requirement_is_met_missed_or_not_valid(text: str, state: str) -> None:
    assert states(text, result()) == [state]


def test_a_share_in_percent_is_exact() -> None:
    of = result(goodput={"objectives": "ttft:1s", "attainment": 999 / 1_000})
    assert states("attainment>=99.9%", of) == ["met"]


def test_several_requirements_are_separated_by_blanks_or_commas() -> None:
    rows = Requirements.parse(["attainment>=0.9, ttft_p50<=1s", "error_rate<=1%"]).judge(result(), "run 1")
    assert [row.requirement for row in rows] == ["attainment>=0.9", "ttft_p50<=1s", "error_rate<=1%"]
    assert {row.of for row in rows} == {"run 1"}
    assert [row.value for row in rows] == [0.97, 0.1, 0.01]


def test_percentiles_of_requirements_are_those_that_a_run_must_record() -> None:
    assert Requirements.parse(["ttft_p97<1s e2e_p99.5<1s tpot_mean<1s"]).percentiles == {
        "p97": 0.97,
        "p995": 0.995,
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "ttft_p99",
        "ttft_p99=500ms",
        "ttft_p99<=500",
        "ttft_p99<=",
        "ttft<=1s",
        "ttft_p0<=1s",
        "ttft_p100<=1s",
        "attainment>=101%",
        "attainment>=97ms",
        "goodput>=5%",
        "nothing>=1",
        "5<ttft_p99",
        "error_rate<=-1%",
        "ttft_p99<=500ms or e2e_p99<=1s",
        "error_rate<=nan",
        "goodput>=inf",
        "error_rate<=\N{ARABIC-INDIC DIGIT ZERO}",
        "error_rate<=1",
        "error_rate<=100%",
        "attainment>=0",
        "refusal_rate<0%",
        "attainment>1",
    ],
)
def test_a_requirement_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Requirements.parse([text])
    assert caught.value.place == "--require"


def test_goodput_needs_objectives() -> None:
    requirements = Requirements.parse(["attainment>=0.99"])
    requirements.check_objectives("ttft:500ms")
    with pytest.raises(ConfigError):
        requirements.check_objectives(None)
    assert states("attainment>=0.1%", result(goodput=None)) == ["not_valid"]


def verdict(*findings: dict[str, Any], **figures: str) -> dict[str, Any]:
    return {
        "figures": {
            name: {"state": state, "error": 0.002, "findings": ["late"]} for name, state in figures.items()
        },
        "findings": [{"what": "late", "says": "a finding"}, *findings],
        "failed": any(one["failed"] for one in findings),
        "valid": False,
    }


def test_a_figure_is_judged_by_its_own_validity() -> None:
    judged = verdict(ttft="valid", tpot="not_valid", e2e="doubtful")
    of = result(verdict=judged)
    requirements = Requirements.parse(["ttft_p99<=1s tpot_p99<=1s e2e_p99<=1s"])
    rows = requirements.judge(of)
    assert [row.state for row in rows] == ["met", "not_valid", "met"]
    assert [row.validity for row in rows] == ["valid", "not_valid", "doubtful"]
    assert rows[0].few
    assert exit_code(judged, rows) == ExitCode.NOT_VALID
    assert exit_code(judged, [rows[0]]) == ExitCode.OK, "other figures than TTFT are not required"
    assert exit_code(judged, []) == ExitCode.NOT_VALID


def test_goodput_is_not_valid_with_the_figure_of_a_bound() -> None:
    of = result(verdict=verdict(ttft="not_valid", goodput="valid"))
    assert states("attainment>=0.5", of) == ["not_valid"]


def test_counts_by_chunks_are_not_valid_in_a_capture() -> None:
    of = result(tokens={"output_per_second": 100.0, "source": {"usage": 90, "chunks": 10}})
    assert states("tpot_p50<=1s output_tokens_per_second>1 ttft_p50<=1s", of) == [
        "not_valid",
        "not_valid",
        "met",
    ]


def failed(share: float) -> dict[str, Any]:
    return {"what": "failed", "figure": share, "failed": True, "says": "requests failed"}


def test_an_error_rate_decides_how_many_requests_may_fail() -> None:
    some, every = verdict(failed(0.01)), verdict(failed(1.0))
    met = Requirements.parse(["error_rate<=1%"]).judge(result())
    missed = Requirements.parse(["error_rate<=0.5%"]).judge(result())
    other = Requirements.parse(["ttft_p99<=1s"]).judge(result())
    assert exit_code(some, met) == ExitCode.OK
    assert exit_code(some, missed) == ExitCode.MISSED
    assert exit_code(some, other) == ExitCode.FAILED
    assert exit_code(every, missed) == ExitCode.FAILED


def test_a_missed_requirement_comes_before_one_that_is_not_valid() -> None:
    rows = Requirements.parse(["ttft_p99<=1ms tbc_p99<=1s"]).judge(result())
    assert exit_code(None, rows) == ExitCode.MISSED


@pytest.mark.parametrize(("sender", "rate"), [({"clock": "kernel"}, 3 / 10), (None, 2 / 9)])
def test_a_cancelled_request_is_an_error_of_a_load_and_none_of_a_capture(sender: Any, rate: float) -> None:
    outcomes = {"complete": 7, "truncated": 2, "client_cancelled": 1, "tap_error": 5}
    (row,) = Requirements.parse(["error_rate<=99%"]).judge(result(outcomes=outcomes, sender=sender))
    assert row.value == pytest.approx(rate)
