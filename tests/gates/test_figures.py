"""Every figure of a result as CSV."""

import csv
from io import StringIO
from typing import Any

from llmtap.gates.figures import every_figure, figure_named, figures_csv, validity_of


def test_each_figure_is_a_row_with_its_unit_samples_and_validity() -> None:
    result: dict[str, Any] = {
        "n": 4,
        "outcomes": {"complete": 3, "truncated": 1},
        "metrics": {
            "ttft": {"n": 3, "mean": 0.2, "p50": 0.1, "p995": 0.5, "p999": None, "marks": ["p995"]},
            "itl": {"n": 0, "option": "A", "mean": None},
        },
        "verdict": {
            "figures": {"ttft": {"state": "doubtful", "error": 0.003, "findings": []}},
            "findings": [],
        },
    }
    rows = {row["figure"]: row for row in csv.DictReader(StringIO(figures_csv(result)))}
    assert list(rows) == ["error_rate", "complete_share", "requests", "ttft_mean", "ttft_p50", "ttft_p99.5"]
    assert rows["error_rate"]["value"] == "0.25"
    assert (rows["ttft_p99.5"]["value"], rows["ttft_p99.5"]["unit"], rows["ttft_p99.5"]["n"]) == (
        "0.5",
        "s",
        "3",
    )
    assert rows["ttft_mean"]["validity"] == "doubtful"
    assert rows["error_rate"]["validity"] == "valid"


def test_each_name_of_a_figure_can_be_required() -> None:
    result = {"n": 1, "metrics": {"e2e": {"n": 1, "p99": 1.0, "p9995": 2.0}}}
    for figure in every_figure(result):
        assert figure_named(figure.name, "--require").value(result) == figure.value(result)


def test_figures_of_a_simulation_with_a_poor_fit_are_not_valid() -> None:
    result = {
        "n": 1,
        "metrics": {"e2e": {"n": 1, "p99": 1.0}},
        "fit": {"valid": False, "caution": "a poor fit"},
    }
    validity = validity_of(figure_named("e2e_p99", "--require"), result)
    assert (validity.state, validity.reason) == ("not_valid", "a poor fit")


def test_times_of_a_capture_with_a_large_uncertainty_are_doubtful() -> None:
    result = {"n": 1, "metrics": {"e2e": {"n": 1, "p99": 0.2}}, "uncertainties": {"p99": 0.02}}
    validity = validity_of(figure_named("e2e_p99", "--require"), result)
    assert (validity.state, validity.reason) == ("doubtful", "error up to 20.0 ms")
