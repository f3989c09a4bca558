"""The board of guardrails and experiments: verdicts, and arms beside each other."""

from __future__ import annotations

from panels import Board, Row, bars, datasource, lines, variable
from queries import JOB_VARIABLE, WHO, WHOSE, p99, rate, ratio

__all__ = ["guardrails_board"]


def guardrails_board() -> Board:
    who = f'{WHO},arm=~"$arm"'
    verdicts, all_of = rate("llmtap_guardrail_events_total", who), rate("llmtap_exchanges_total", who)
    refused = rate("llmtap_exchanges_total", f'{who},outcome="refused"')
    by_arm = {
        "First token, p99": p99("llmtap_time_to_first_token_seconds", f'{who},kind="content"', "arm"),
        "Between chunks, p99": p99("llmtap_inter_chunk_seconds", who, "arm"),
        "User idle latency, p99": p99("llmtap_user_idle_seconds", who, "arm"),
        "Duration, p99": p99("llmtap_request_duration_seconds", who, "arm"),
    }
    why = {
        "First token, p99": "A guardrail that reads the prompt first shows here.",
        "Between chunks, p99": "One that holds chunks back shows here, and as bursts.",
        "User idle latency, p99": "What of it readers feel.",
        "Duration, p99": "Submit to last byte, of answers that ended well.",
    }
    said = (
        bars(
            "Refusals and interventions",
            "By kind: whose it was (the model, a guardrail before or after it), or what was done.",
            (rate("llmtap_guardrail_events_total", who, "kind"), "{{kind}}"),
        ),
        bars(
            "What told it",
            "Where the verdict was read: a finish reason, a status, a header, a pattern in the text.",
            (rate("llmtap_guardrail_events_total", who, "source"), "{{source}}"),
        ),
        lines(
            "Share",
            "Of all exchanges: with a verdict, and ended as refused.",
            (ratio(verdicts, all_of), "verdict"),
            (ratio(refused, all_of), "refused"),
            unit="percentunit",
        ),
    )
    arms = (
        bars(
            "Exchanges",
            "By arm. Shares that are not what was dealt make all below worthless: /api/v1/experiment has"
            " the test (sample_ratio).",
            (rate("llmtap_exchanges_total", who, "arm"), "{{arm}}"),
        ),
        *(lines(title, why[title], (query, "{{arm}}")) for title, query in by_arm.items()),
        lines(
            "Refused",
            "Share of the exchanges of each arm.",
            (
                ratio(
                    rate("llmtap_exchanges_total", f'{who},outcome="refused"', "arm"),
                    rate("llmtap_exchanges_total", who, "arm"),
                ),
                "{{arm}}",
            ),
            unit="percentunit",
        ),
        lines(
            "In bursts",
            "Share of the events that came in a burst after a hold.",
            (
                ratio(
                    rate("llmtap_burst_events_total", who, "arm"),
                    rate("llmtap_stream_events_total", who, "arm"),
                ),
                "{{arm}}",
            ),
            unit="percentunit",
        ),
        lines(
            "Errors",
            "Share of the exchanges of each arm that the upstream failed.",
            (
                ratio(
                    rate("llmtap_exchanges_total", f'{who},outcome=~"upstream_.*|truncated"', "arm"),
                    rate("llmtap_exchanges_total", who, "arm"),
                ),
                "{{arm}}",
            ),
            unit="percentunit",
        ),
    )
    return Board(
        "llmtap-guardrails",
        "llmtap: guardrails and experiments",
        "What is refused, and what arms of an experiment differ in. For decisions take /api/v1/experiment,"
        " which has intervals and tests; curves only show where to look.",
        (
            datasource(),
            JOB_VARIABLE,
            *WHOSE,
            variable("arm", 'label_values(llmtap_exchanges_total{job=~"$job"}, arm)', label="Arm"),
        ),
        (Row("Verdicts", said), Row("Arms", arms)),
    )
