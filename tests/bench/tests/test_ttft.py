"""TTFT as planted: by hand in a table, and by a server that says itself what it sent when."""

from pathlib import Path
from typing import Any

from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.session import Load
from llmtap.bench.tests.ttft import TEST
from llmtap.json_types import json_value
from llmtap.load.monitor.timeseries import Columns, TimeSeries
from llmtap.net.server_metrics import SERIES, read_metrics
from tests.bench.support import Planted, measured, perform

MS = 1_000_000


def session_of(tmp_path: Path, rows: list[dict[str, Any]], **result: Any) -> Planted:
    def answer(name: str, load: Load) -> Measurement:
        return measured(name, rows, **result)

    return Planted(tmp_path, answer, "ttft")


def cells(result: Any, caption: str) -> dict[str, list[str]]:
    """Rows of a table by their first cell."""
    (table,) = [table for table in result.tables if table.caption.startswith(caption)]
    assert all(len(row) == len(table.heads) for row in table.rows)
    return {row[0]: row[1:] for row in table.rows}


def test_the_draft_s_tables_have_what_was_planted(tmp_path: Path) -> None:
    """TTFT of 1 to 1,001 ms; inputs below 512 tokens have the first 400 of them."""
    rows = [
        {
            "ttft_ns": i * MS,
            "ttft_any_ns": i * MS,
            "input_tokens": 255 if i <= 200 else 256 if i <= 400 else 5_000,
        }
        for i in range(1, 1_002)
    ]
    session = session_of(tmp_path, rows, seconds=100.0)
    result = perform(TEST, session, rate=10.0, requests=20)
    assert [(name, load.rate_rps) for name, load in session.loads] == [("load", 10.0)]
    assert cells(result, "Table 1") == {
        "Requests": ["1001"],
        "TTFT P50": ["501 ms (470 to 532)"],
        "TTFT P90": ["901 ms (884 to 922)"],
        "TTFT P95": ["951 ms (938 to 965)"],
        "TTFT P99": ["991 ms (984 to 997)"],
        "TTFT P99.9": ["1,000 ms * (998 ms or more)"],
        "TTFT Mean": ["501 ms"],
        "TTFT Min": ["1.00 ms"],
        "TTFT Max": ["1,001 ms"],
    }
    buckets = cells(result, "Table 2")
    assert result.tables[1].heads == ["Input Tokens", "P50 (ms)", "P95 (ms)", "P99 (ms)"]
    assert list(buckets) == ["0-256", "256-512", "4096+"]
    assert [text.partition(" (")[0] for text in buckets["0-256"]] == ["100", "190", "198 *"]
    assert buckets["0-256"][2].endswith(" or more)")
    assert buckets["256-512"][0].startswith("300 (")
    report = result.measurements_to_dict()["ttft_by_input"]
    assert [(one["from"], one["below"], one["n"]) for one in report] == [
        (0, 256, 200),
        (256, 512, 200),
        (4_096, None, 601),
    ]
    assert any(note.startswith("*") for note in result.notes)
    assert result.measurements_to_dict()["ttft"]["marks"] == ["p999"]
    assert result.measurements_to_dict()["ttft_any"] is None
    assert [chart.kind for chart in result.charts] == ["cdf", "histogram"]
    assert result.configuration["Load model"] == "open loop, 10 requests/s, arrivals poisson"


def test_tokens_before_the_content_are_told_apart(tmp_path: Path) -> None:
    """Three of four think first; one of these never comes to the content."""
    rows = [
        {"ttft_ns": 900 * MS, "ttft_any_ns": 100 * MS},
        {"ttft_ns": 700 * MS, "ttft_any_ns": 100 * MS},
        {"ttft_any_ns": 100 * MS},
        {"ttft_ns": 300 * MS, "ttft_any_ns": 300 * MS},
    ]
    result = perform(TEST, session_of(tmp_path, rows), concurrency=2, requests=4)
    any_token = result.measurements_to_dict()["ttft_any"]
    assert any_token["answers_with_others_first"] == 3
    assert (any_token["n"], any_token["p50"]["value"]) == (4, 0.1)
    content = result.measurements_to_dict()["ttft"]
    assert (content["n"], content["p50"]["value"]) == (3, 0.7)
    (note,) = [note for note in result.notes if "another kind" in note]
    assert note.startswith("75% of answers")
    assert len(result.charts[0].series) == 2
    assert "Time to any token" in cells(result, "Components")


def test_the_server_s_histograms_are_reported_beside_ttft(tmp_path: Path) -> None:
    """Of 3 answers the server counted 2 in its queue, for 3 s in all, before the load 5 others."""
    pages = [
        """vllm:time_to_first_token_seconds_sum 9
vllm:time_to_first_token_seconds_count 5
vllm:request_queue_time_seconds_sum 1.5
vllm:request_queue_time_seconds_count 5""",
        """vllm:time_to_first_token_seconds_sum 15
vllm:time_to_first_token_seconds_count 8
vllm:request_queue_time_seconds_sum 4.5
vllm:request_queue_time_seconds_count 7""",
    ]
    server = Columns(SERIES)
    for second, page in enumerate(pages):
        server.add(second * 1_000 * MS, MS, read_metrics(page.encode()))
    summary = json_value(TimeSeries(0, Columns({}), server).summary())
    session = session_of(tmp_path, [{"ttft_ns": 2_100 * MS}] * 3, system={"summary": summary})
    result = perform(TEST, session, concurrency=2, requests=3)
    assert result.measurements_to_dict()["server_histograms"] == {
        "ttft": {"n": 3, "mean": 2.0},
        "queue": {"n": 2, "mean": 1.5},
    }
    assert cells(result, "Components of TTFT by the server's /metrics") == {
        "TTFT (server)": ["3", "2,000 ms"],
        "Queue wait (server)": ["2", "1,500 ms"],
    }


def test_answers_that_did_not_come_whole_are_counted_and_in_no_figure(tmp_path: Path) -> None:
    rows = [{"ttft_ns": MS}, {"ttft_ns": 900 * MS, "outcome": "truncated"}]
    result = perform(TEST, session_of(tmp_path, rows), concurrency=2, requests=2)
    assert (result.measurements_to_dict()["requests"], result.measurements_to_dict()["answered"]) == (2, 1)
    assert result.measurements_to_dict()["ttft"]["max"] == 0.001
    assert any("did not come whole" in note for note in result.notes)
