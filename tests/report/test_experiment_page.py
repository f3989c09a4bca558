"""The report of a stored experiment: its sentence, its rows, and what speaks against it."""

from typing import Any

import pytest

from llmtap.exchange.outcome import Outcome
from llmtap.report.experiment_page import experiment_html, experiment_markdown
from tests.meter.web.dashboard import an_empty_tally
from tests.support.traffic.experiments import an_experiment
from tests.support.traffic.streams import streamed


def measured(*, units: int, added_ms: int, labels: bool = False) -> dict[str, Any]:
    """So many requests in each arm; `marked` has a later first token. With `labels`, all requests should be
    answered, and `marked` refuses two."""
    tally = an_empty_tally(an_experiment(disclosure={"guardrails": ["LG 3"], "hardware": None}))
    for seq in range(1, 2 * units + 1):
        arm = ("marked", "control")[seq % 2]
        first = 100 + seq % 7 + (added_ms if arm == "marked" else 0)
        x = streamed(first, first + 50, seq=seq)
        x.arm, x.unit = arm, f"{seq:016x}"
        if labels:
            x.label = "should-answer"
            x.outcome = Outcome.REFUSED if arm == "marked" and seq <= 4 else Outcome.COMPLETE
        tally.on_open()
        tally.experiments.on_assignment(arm, x.unit, False)
        tally.on_end(x)
    result: Any = tally.experiments.results()()
    return result


def test_the_report_begins_with_what_the_arm_adds_and_marks_findings() -> None:
    text = experiment_markdown(measured(units=90, added_ms=200))
    verdict, table = text.split("## marked compared with control")
    assert "marked adds 200 ms to the median time to first token (95 % confidence: 198 to 202 ms)" in verdict
    row = next(line for line in table.splitlines() if line.startswith("| TTFT |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert (cells[1], cells[2], cells[-1]) == ("103 ms", "303 ms", "finding")
    assert cells[3].startswith("+200 ms (")
    assert "| guardrails | LG 3 |" in table
    assert "| hardware | - |" in table


@pytest.mark.parametrize(
    ("units", "sentence"),
    [
        (90, "marked does not change the median time to first token significantly."),
        (20, "A comparison needs 50 requests of each arm; there are control 20, marked 20."),
    ],
)
def test_no_difference_and_too_few_units_are_stated(units: int, sentence: str) -> None:
    assert sentence in experiment_markdown(measured(units=units, added_ms=0))


def test_without_streams_the_end_to_end_latency_is_stated() -> None:
    result = measured(units=90, added_ms=200)
    del result["differences"]["marked"]["ttft"]
    assert "marked adds 200 ms to the median end-to-end latency" in experiment_markdown(result)


def test_a_wrong_split_and_chunks_that_come_together_speak_against_the_comparison() -> None:
    result = measured(units=90, added_ms=200)
    result["sample_ratio"] |= {"alarm": True, "units": {"control": 90, "marked": 30}}
    result["cautions"] = [{"arm": "marked", "metrics": ["tpot"], "events_per_read": 5.8}]
    text = experiment_markdown(result)
    assert "The units (control 90, marked 30) are not split as configured: compare nothing." in text
    assert "5.8 chunks come at a time" in text
    row = next(line for line in text.splitlines() if line.startswith("| TPOT |"))
    assert row.endswith("| misleading |")


def test_an_interval_for_one_look_is_marked() -> None:
    """Without 20 refusals there is no interval for all looks; means have one from 50 units on."""
    for units, of_mean in ((90, False), (20, True)):
        rows = {
            cells[1].strip(): cells[-4].strip()
            for cells in (
                line.split("|")
                for line in experiment_markdown(measured(units=units, added_ms=0, labels=True)).splitlines()
            )
            if len(cells) > 4
        }
        assert rows["refused, share"].endswith("%, one look)")
        assert rows["TTFT"].endswith("ms, one look)" if of_mean else "ms)")


def test_refusals_against_labels_are_a_table_of_each_arm() -> None:
    assert "Refusals against labels" not in experiment_markdown(measured(units=2, added_ms=0))
    text = experiment_markdown(measured(units=10, added_ms=0, labels=True))
    assert "Refused requests: marked 20.0% (4.5% to 57.3%) and control 0.0% (0.0% to 33.9%)." in text
    table = text.split("## Refusals against labels")[1].split("##")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert ["control", "should-answer", "10", "0", "0", "false positives", "0.0%, 0.0% to 33.9%"] in rows
    assert ["marked", "should-answer", "8", "2", "0", "false positives", "20.0%, 4.5% to 57.3%"] in rows


@pytest.mark.parametrize(
    ("p", "text"), [(0.0312, "0.031"), (2e-16, "2e-16"), (1e-17, "< 1e-16"), (0.0, "< 1e-16")]
)
def test_a_p_value_below_the_resolution_of_floats_has_a_bound(p: float, text: str) -> None:
    result = measured(units=90, added_ms=200)
    result["differences"]["marked"]["ttft"]["mean"]["p"] = result["sample_ratio"]["p"] = p
    table = experiment_markdown(result).replace("&lt;", "<")
    row = next(line for line in table.splitlines() if line.startswith("| TTFT |"))
    assert row.split("|")[-3].strip() == text
    assert f"p {text}" in table


def test_names_of_clients_are_escaped_on_the_page() -> None:
    result = measured(units=60, added_ms=0) | {"name": "<script>alert(1)</script>"}
    assert "<script>alert" not in experiment_html(result)


def test_a_ramp_has_its_stages_each_with_its_own_comparison() -> None:
    result = measured(units=90, added_ms=200)
    assert "Stages" not in experiment_markdown(result)
    differences = measured(units=90, added_ms=100)["differences"]
    earlier = {
        "number": 1,
        "share": 0.01,
        "from": "2026-03-01T12:00:00Z",
        "to": "2026-03-01T13:00:00Z",
        "units": {"control": 8_910, "marked": 90},
        "differences": differences,
    }
    result["stage"] = {
        "number": 2,
        "of": 3,
        "share": 0.1,
        "since": "2026-03-01T13:00:00Z",
        "between_stages": 4,
        "sentence": "Stage 2 of 3: ...",
        "earlier": [earlier],
    }
    table = experiment_markdown(result).split("## Stages")[1]
    first, second = (line for line in table.splitlines() if line.startswith(("| 1 of 3", "| 2 of 3")))
    assert "| 1 % | 2026-03-01T12:00:00Z | 2026-03-01T13:00:00Z |" in first and "+100 ms (" in first
    assert "| 10 % | 2026-03-01T13:00:00Z | running |" in second and "+200 ms (" in second
    assert "Stage 2 of 3: ..." in table and "Stages" in experiment_html(result)
