"""The board of objectives: what is left of the budgets, how they are kept, and why not."""

from __future__ import annotations

from panels import Board, Row, bars, datasource, lines, stat, table, variable
from queries import JOB, JOB_VARIABLE, SLO, SLOTH, WHO, WHOSE, p99, rate, ratio

__all__ = ["slo_board"]


def slo_board() -> Board:
    good = rate("llmtap_slo_good_total", f'{SLO},tenant=~"$tenant"', "slo")
    events = rate("llmtap_slo_events_total", f'{SLO},tenant=~"$tenant"', "slo")
    in_range = {
        name: f'sum by (slo, tenant) (increase(llmtap_slo_{name}_total{{{SLO},tenant=~"$tenant"}}[$__range]))'
        for name in ("good", "events")
    }
    now = (
        stat(
            "Error budget left",
            "Of the 30 days' budget; below 0 more exchanges were bad than were allowed. By the"
            " rules of `llmtap slo generate`.",
            (f"slo:period_error_budget_remaining:ratio{{{SLOTH}}}", "{{sloth_slo}}"),
            unit="percentunit",
            width=6,
            steps=[("red", None), ("orange", 0.1), ("green", 0.25)],
        ),
        stat(
            "Burn rate now",
            "How many times faster than allowed the budget went in the last 5 minutes. 1 uses it up"
            " exactly at the end of 30 days.",
            (f"slo:current_burn_rate:ratio{{{SLOTH}}}", "{{sloth_slo}}"),
            width=6,
            steps=[("green", None), ("orange", 1), ("red", 6)],
        ),
        stat(
            "Attained in 30 days",
            "Share of the exchanges that met every bound of their class at once.",
            (f"1 - slo:sli_error:ratio_rate30d{{{SLOTH}}}", "{{sloth_slo}}"),
            unit="percentunit",
            width=6,
            defaults={"decimals": 3},
        ),
        stat(
            "Alerts",
            "Firing now, by severity. Each links its page of deploy/runbooks/.",
            ('count by (severity) (ALERTS{alertname=~"Llmtap.*",alertstate="firing"})', "{{severity}}"),
            width=6,
            steps=[("green", None), ("red", 1)],
        ),
    )
    kept = (
        lines(
            "Attainment",
            "Share of good exchanges, and what was promised.",
            (ratio(good, events), "{{slo}}"),
            (f"max by (slo) (llmtap_slo_target_ratio{{{SLO}}})", "{{slo}}: target"),
            unit="percentunit",
            width=12,
            low=None,
        ),
        lines(
            "Burn rates",
            "As the tap reckons them itself, by window. A page rings where both windows of a pair are"
            " above their factor: 1h and 5m above 14.4, 6h and 30m above 6, unless the class says otherwise.",
            (f"max by (slo, window) (llmtap_slo_burn_rate{{{SLO}}})", "{{slo}} {{window}}"),
            unit="short",
            width=12,
        ),
        table(
            "By class and tenant",
            "In the time shown: exchanges that counted, and the share that was good.",
            (ratio(in_range["good"], in_range["events"]), "Attained"),
            (in_range["events"], "Counted"),
            width=12,
        ),
        lines(
            "Goodput",
            "Requests per second that met all their objectives, over the last minute.",
            (f'sum(llmtap_goodput_requests_per_second{{{JOB},window="1m"}})', "goodput"),
            (rate("llmtap_exchanges_total", JOB), "all"),
            unit="reqps",
            width=12,
        ),
    )
    missed = rate("llmtap_token_deadlines_total", f'{WHO},result="missed"', "tenant")
    readers = (
        lines(
            "Smooth goodput",
            "Tokens per second minus the penalty for waits of readers, by tenant. Below 0 the waits outweigh"
            " the tokens.",
            (
                rate("llmtap_smooth_output_tokens_total", WHO, "tenant")
                + " - "
                + rate("llmtap_smooth_penalty_tokens_total", WHO, "tenant"),
                "{{tenant}}",
            ),
            unit="short",
            low=None,
        ),
        lines(
            "User idle latency",
            "Mean time per stream that a reader waits with nothing to read.",
            (
                ratio(
                    rate("llmtap_user_idle_seconds_sum", WHO, "tenant"),
                    rate("llmtap_user_idle_seconds_count", WHO, "tenant"),
                ),
                "{{tenant}}",
            ),
        ),
        lines(
            "Fluidity",
            "Share of the token deadlines that were met, of classes with bounds for the first token and for"
            " the gaps.",
            (f"1 - {ratio(missed, rate('llmtap_token_deadlines_total', WHO, 'tenant'))}", "{{tenant}}"),
            unit="percentunit",
            low=None,
        ),
    )
    why = (
        lines(
            "Time to first token",
            "p99 of streams, and the bounds of the classes. Each bound is an edge of the"
            " histogram, so that the share below it is exact.",
            (p99("llmtap_time_to_first_token_seconds", f'{WHO},kind="content"', "tenant"), "{{tenant}}"),
            (f'max by (slo) (llmtap_slo_objective_seconds{{{SLO},objective="ttft"}})', "{{slo}}: bound"),
        ),
        lines(
            "Time per output token",
            "p99, and the bounds of the classes.",
            (p99("llmtap_time_per_output_token_seconds", WHO, "tenant"), "{{tenant}}"),
            (f'max by (slo) (llmtap_slo_objective_seconds{{{SLO},objective="tpot"}})', "{{slo}}: bound"),
        ),
        bars(
            "Outcomes",
            "How exchanges ended. Errors of the upstream are bad; clients that left in time and what the"
            " tap turned away do not count.",
            (rate("llmtap_exchanges_total", WHO, "outcome"), "{{outcome}}"),
        ),
    )
    return Board(
        "llmtap-slo",
        "llmtap: objectives",
        "What tenants were promised, and how it is kept.",
        (
            datasource(),
            JOB_VARIABLE,
            variable("slo", 'label_values(llmtap_slo_target_ratio{job=~"$job"}, slo)', label="Class"),
            *WHOSE,
        ),
        (Row("Now", now), Row("Kept", kept), Row("Readers", readers), Row("Why", why)),
    )
