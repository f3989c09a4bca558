"""A benchmark's document as `llmtap bench --json` writes it, small, made by hand."""

from typing import Any

CHARTS: list[dict[str, Any]] = [
    {
        "title": "TTFT by share",
        "kind": "cdf",
        "x_title": "TTFT (ms)",
        "y_title": "share of requests",
        "series": [{"name": "TTFT", "x": [50.0, 60.0, 90.0], "y": [0.25, 0.5, 1.0], "low": [], "high": []}],
        "marks": [],
        "log_x": False,
        "log_y": False,
    },
    {
        "title": "P99 by load",
        "kind": "line",
        "x_title": "offered (req/s)",
        "y_title": "TTFT P99 (ms)",
        "series": [
            {"name": "P50", "x": [1, 2, 4], "y": [50, 55, 80], "low": [48, 50, 70], "high": [52, None, 95]},
            {"name": "P99", "x": [1, 2, 4], "y": [90, None, 400], "low": [], "high": []},
        ],
        "marks": [{"x": 2, "says": "knee"}, {"x": 4, "says": "saturation"}],
        "log_x": False,
        "log_y": True,
    },
    {
        "title": "how often",
        "kind": "histogram",
        "x_title": "ITL (ms)",
        "y_title": "share of gaps",
        "series": [
            {"name": "25 %", "x": [1.0, 2.0], "y": [0.7, 0.3], "low": [], "high": []},
            {"name": "90 %", "x": [1.0, 2.0], "y": [0.4, 0.6], "low": [], "high": []},
        ],
        "marks": [],
        "log_x": False,
        "log_y": False,
    },
    {
        "title": "by arm",
        "kind": "bars",
        "x_title": "",
        "y_title": "TTFT P50 (ms)",
        "series": [{"name": "P50", "x": ["off", "on"], "y": [80, 40], "low": [75, 38], "high": [85, 44]}],
        "marks": [],
        "log_x": False,
        "log_y": False,
    },
    {
        "title": "tokens so far",
        "kind": "steps",
        "x_title": "time (s)",
        "y_title": "tokens",
        "series": [{"name": "delivered", "x": [0.0, 0.1, 0.3], "y": [0, 1, 5], "low": [], "high": []}],
        "marks": [],
        "log_x": False,
        "log_y": False,
    },
    {
        "title": "each request",
        "kind": "points",
        "x_title": "input (tokens)",
        "y_title": "TTFT (ms)",
        "series": [{"name": "requests", "x": [128, 4096], "y": [20, 900], "low": [], "high": []}],
        "marks": [],
        "log_x": True,
        "log_y": True,
    },
]
"""One of each kind."""


def load_step(
    name: str = "load",
    *,
    n: int = 1_000,
    rate: float | None = 10.0,
    closed: int | None = None,
    tps: float = 1_500.0,
    ttft_p99: float = 0.4,
    arm: str = "",
) -> dict[str, Any]:
    """One load of a report."""
    return {
        "name": name,
        "arm": arm,
        "cached": False,
        "load": {"closed": closed, "rate_rps": rate},
        "requests": {"file": "requests.jsonl.gz", "rows": n, "bytes": 9_000, "sha256": "0" * 64},
        "result": {
            "n": n,
            "window": {"seconds": 100.5},
            "plan": {"workload": {"name": "synthetic-uniform"}, "arrivals": {"arrivals": "poisson"}},
            "load": {"mode": "open" if closed is None else "closed", "offered_rps": rate},
            "metrics": {
                "ttft": {"n": n, "p50": 0.127, "p95": 0.3, "p99": ttft_p99},
                "tpot": {"n": n, "p50": 0.042, "p95": 0.06, "p99": 0.0812},
                "itl": {"n": n, "option": "A"},
                "e2e": {"n": n, "p50": 4.2, "p99": 8.75},
            },
            "tokens": {"output_per_second": tps},
            "outcomes": {"complete": n},
            "dispatch_lateness": {"p99": 0.0004},
            "verdict": {"valid": True, "findings": []},
        },
    }


def bench_report(test: str = "ttft", **more: Any) -> dict[str, Any]:
    """One test's report."""
    rows = [
        {
            "id": "4.2.1-1",
            "section": "4.2.1",
            "level": "MUST",
            "says": "Times are good to 1 ms.",
            "binds": [],
            "subject": "load generator",
            "status": "met",
            "evidence": "multiples of 1 ns",
        },
        {
            "id": "4.4.1-1a",
            "section": "4.4.1",
            "level": "MUST",
            "says": "Which tokenizer.",
            "binds": [],
            "subject": "report",
            "status": "not met",
            "evidence": "it is not stated",
        },
        {
            "id": "5.1.5.4-1",
            "section": "5.1.5.4",
            "level": "SHOULD",
            "says": "A chart.",
            "binds": ["ttft"],
            "subject": "report",
            "status": "cannot tell",
            "evidence": "no chart",
        },
    ]
    return {
        "test": test,
        "section": "5.1",
        "title": "Time to First Token",
        "quick": False,
        "params": {"requests": 1000, "rate": 10.0, "concurrency": None},
        "steps": [load_step()],
        "warmups": [],
        "refused": 2,
        "measurements": {},
        "charts": CHARTS[:1],
        "tables": [
            {
                "caption": "Table 1: TTFT Results",
                "heads": ["Metric", "Value"],
                "rows": [["TTFT P50", "127 ms"]],
            }
        ],
        "configuration": {"Workload": "synthetic-uniform, seed 42"},
        "notes": ["intervals are of 95 %"],
        "deviations": [],
        "itl_option": "A",
        "exact_requests": "steps/NAME/requests.jsonl.gz",
        "forfeits": [],
        "arms": {},
        "verdict": {"valid": True, "findings": [], "failures": []},
        "compliance": {
            "test": test,
            "level": "not compliant",
            "why": ["4.4.1-1a"],
            "deviations": [],
            "rows": rows,
            "must": {"n": 2, "satisfied": 1, "not_applicable": 0},
            "should": {"n": 1, "satisfied": 0, "not_applicable": 0},
        },
        **more,
    }


def bench_document(*reports: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Of these reports, or of one."""
    return {
        "command": "llmtap bench ttft --config bench.toml --results r",
        "made": "2026-01-02T03:04:05.678Z",
        "results": "r",
        "asked": ["ttft"],
        "quick": False,
        "seed": 42,
        "warmup": "auto",
        "versions": {"llmtap": "0.1.0", "python": "3.11.2"},
        "target": {"url": "http://127.0.0.1:8000"},
        "sut": {
            "boundary": "model engine",
            "model": "tiny, bf16",
            "software": "vLLM 0.9.1",
            "protocol": "SSE",
            "hardware": {"accelerator": "H100 SXM", "count": 8, "memory": "80 GB"},
            "guardrails": {"input_filter": False, "output_filter": None, "names": []},
        },
        "arms": {},
        "params": {"ttft": {"requests": 1000}},
        "tests": list(reports) or [bench_report()],
        "not_run": [],
        "verdict": {"valid": True, "findings": []},
        **more,
    }
