"""What the queries of all boards share: whose series, and how rates, shares and quantiles are written."""

from __future__ import annotations

from panels import variable

__all__ = [
    "JOB",
    "JOB_VARIABLE",
    "NOT_INFERRED",
    "RANGE",
    "SLO",
    "SLOTH",
    "WHO",
    "WHOSE",
    "p99",
    "rate",
    "ratio",
]

JOB = 'job=~"$job"'
WHO = 'job=~"$job",tenant=~"$tenant",model=~"$model"'
SLO = 'job=~"$job",slo=~"$slo"'
SLOTH = 'sloth_service=~"$job",sloth_slo=~"$slo"'
RANGE = "$__rate_interval"

JOB_VARIABLE = variable("job", "label_values(llmtap_build_info, job)", label="Job")
WHOSE = (
    variable("tenant", 'label_values(llmtap_exchanges_total{job=~"$job"}, tenant)', label="Tenant"),
    variable("model", 'label_values(llmtap_exchanges_total{job=~"$job"}, model)', label="Model"),
)


READ = (
    "llmtap_time_to_first_token_seconds",
    "llmtap_inter_chunk_seconds",
    "llmtap_inter_token_seconds",
    "llmtap_time_per_output_token_seconds",
    "llmtap_user_idle_seconds",
    "llmtap_user_idle_after_first_token_seconds",
)
"""Metrics with a label `reading`: inferred times are not shown among the others."""
NOT_INFERRED = 'reading!="inferred"'


def rate(metric: str, labels: str, by: str = "") -> str:
    """Events per second of a counter, summed."""
    group = f"by ({by}) " if by else ""
    labels = f"{labels},{NOT_INFERRED}" if metric.startswith(READ) else labels
    return f"sum {group}(rate({metric}{{{labels}}}[{RANGE}]))"


def ratio(part: str, whole: str) -> str:
    """A share; nothing where there was nothing."""
    return f"{part} / ({whole} > 0)"


def p99(metric: str, labels: str, by: str) -> str:
    return f"histogram_quantile(0.99, {rate(f'{metric}_bucket', labels, f'le, {by}')})"
