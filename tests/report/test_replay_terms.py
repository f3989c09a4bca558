"""What the figures rest on, term by term; what is not known is not said."""

from typing import Any

import pytest

from llmtap.report.replay_terms import all_of, plan_rows, rests_on
from tests.support.results.replay_results import replay_result

GOOD = replay_result()


CLOCK = {"host": "n1", "shared": False, "rtt": 0.001, "offset": -0.0025, "drift": None}
HERE = CLOCK | {"host": "here", "shared": True}
RETRIED = (
    "1 (503 1); lateness is of first attempts, latencies count from the last ones; those from schedule have"
    " the waits in them"
)
KEPT = (
    "7 of 9 prompts as long as planned (at most 3 tokens off), 2 of 9 answers (which the server was not told"
    " to keep to), by the server's own count"
)


def term(name: str, **parts: Any) -> str | None:
    return dict(plan_rows(GOOD | parts)).get(name)


@pytest.mark.parametrize(
    ("name", "parts", "text"),
    [
        ("warm-up", {"warmup": {"skipped": "cold start", "requests": 0}}, "none (cold start)"),
        ("warm-up", {"warmup": {"requests": 100, "tokens": 12_000, "duration": 4.5, "stable": True,
                                "variation": {"ttft": 0.041, "e2e": None}}},
         "100 requests, 12,000 tokens, 4.5 s, stable, TTFT varied by 4.1 %"),
        ("warm-up", {"warmup": {"requests": 9, "tokens": 8, "duration": 1, "problem": "it broke"}},
         "9 requests, 8 tokens, 1 s, not stable, it broke"),
        ("warm-up", {"warmup": {"requests": 9, "tokens": 8, "duration": 1, "probes": []}},
         "9 requests, 8 tokens, 1 s, not probed"),
        ("warm-up", {"warmup": None}, None),
        ("lengths", {"lengths": {"input_told": 9, "input_exact": 7, "input_off_max": 3, "output_told": 9,
                                 "output_exact": 2, "output_wanted": False}},
         KEPT),
        ("lengths", {"lengths": {"input_told": 0, "output_told": 0}}, None),
        ("requests", {"load": {"planned": 9, "sent": 5, "skipped": 3, "dropped": 1, "unsent": 0,
                               "retries": {"n": 2, "reasons": {}}, "stopped": "the time was up"}},
         "5 of 9 sent, 3 skipped, 1 dropped, 2 retries, stopped: the time was up"),
        ("retries", {"load": {"retries": {"n": 1, "reasons": {"503": 1}}}},
         RETRIED),
        ("retries", {"load": {"retries": {"n": 0, "reasons": {}}}}, None),
        ("arrivals", {"plan": {"arrivals": None}}, "whenever an answer has ended"),
        ("arrivals", {"plan": {"arrivals": {"arrivals": "gamma", "rate_rps": 4.0, "cv": 2.0, "seed": 1}}},
         "gamma, 4 req/s asked, cv 2, seed 1"),
        ("arrivals", {"plan": {"arrivals": {"arrivals": "gamma:burstiness=0.25", "given": "gamma:cv=2",
                                            "rate_rps": 4.0}}},
         "gamma:cv=2 (gamma:burstiness=0.25), 4 req/s asked"),
        ("load", {"load": {"mode": "open", "offered_rps": 3.0, "planned_rps": 4.0, "achieved_rps": 2.5}},
         "open loop, 3 of 4 req/s planned were sent, 2.5 req/s ended over the window"),
        ("clocks", {"sender": {"clocks": [CLOCK, CLOCK | {"rtt": 0.003}, HERE]}},
         "n1 within 1.50 ms, 2.50 ms behind (allowed for)"),
        ("server metrics", {"system": {"summary": {"scrape": {"url": "http://h/metrics", "scrapes": 31}}}},
         "http://h/metrics, 31 times"),
        ("server metrics", {"system": {"summary": {"scrape": {
            "url": "http://h/metrics", "scrapes": 1, "gave_up": True, "failures": {"status 404": 1}}}}},
         "nothing: http://h/metrics was asked once (status 404)"),
        ("server metrics", {"system": {"summary": {"scrape": {"url": None, "scrapes": 0}}}}, None),
        ("arrivals", {"plan": {}}, None),
        ("answers", {"plan": {"body": {"stream": False, "output_limit": "max_tokens", "ignore_eos": False}}},
         "in one piece, at most max_tokens"),
        ("load", {"load": {"mode": "closed", "offered_rps": 3.0, "achieved_rps": 2.5}},
         "closed loop, 3 req/s sent, 2.5 req/s ended over the window"),
        ("smooth goodput", {"smooth_goodput": {"alpha": None, "readers": [{}, {}]}},
         "2 readers of different speed"),
        ("uncertainty", {"uncertainty": 0.0123}, "12.3 ms, stamps by kernel"),
        ("uncertainty", {"uncertainty": None}, None),
    ],
)  # fmt: skip
def test_each_term(name: str, parts: dict[str, Any], text: str | None) -> None:
    assert term(name, **parts) == text


def test_a_trace_and_a_workload_are_named_as_what_they_are() -> None:
    assert term("trace") == "trace.csv"
    assert term("workload", plan={"workload": {"name": "conversation"}}) == "conversation"


def test_every_value_of_a_plan_has_a_row() -> None:
    told = {
        "plan": {"a": {"b": [1, 2.5, None, [3, 4]], "c": []}, "d": [{"e": True}, {"e": {}}], "f": None},
        "x": {"y": 1},
    }
    assert all_of(told, "plan", "none") == [
        ("plan.a.b", "1, 2.5, -, (3, 4)"), ("plan.a.c", "none"), ("plan.d.1.e", "yes"),
        ("plan.d.2.e", "none"), ("plan.f", "-"),
    ]  # fmt: skip


def test_a_caption_begins_with_its_samples_and_has_what_it_asks_for() -> None:
    parts = rests_on(GOOD, "n 120", ("tokens",))
    assert parts[0] == "n 120"
    assert parts[1].startswith("tokens ")
    assert rests_on({}, "") == []
