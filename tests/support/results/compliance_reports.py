"""Reports of tests as `llmtap bench` has them, made up: complete ones, and the same with something changed.

Results are made by llmtap itself of exchanges that were made up (`replay_result`); what a load of a benchmark
has besides is put beside them, and figures are written over where a demand asks for more than that.
"""

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any, Final

from llmtap.bench.compliance.evidence import DATA_SETS
from llmtap.bench.run.test import TESTS
from llmtap.workload.registry import report_of, workload_named
from tests.support.results.replay_results import replay_result

GONE: Final = object()
"""In place of a value: there is none."""
SUT: Final[dict[str, Any]] = {
    "boundary": "model engine",
    "model": "tiny 1.0, bf16",
    "software": "engine 2.0",
    "protocol": "SSE",
    "chunking": "one token per chunk",
    "prefix_cache": False,
    "max_batch": 64,
    "hardware": {
        "accelerator": "H100 SXM",
        "count": 8,
        "memory": "80 GB",
        "cpu": None,
        "price_per_hour": 20.0,
        "currency": "USD",
    },
    "tokenizer": {
        "name": "tiny-bpe 3",
        "vocabulary": 32_000,
        "source": "a folder",
        "counting": "native",
        "special": "excluded",
        "system_prompt": "included",
        "tools": "no tools",
    },
    "guardrails": {"input_filter": False, "output_filter": False, "names": []},
    "clock": {"placement": "same machine", "synchronization": None, "accuracy": None},
    "notes": [
        "as in production, and compared with a sample of production traffic",
        "an isolated system",
        "a recovery plan is at hand",
        "watched for failures that spread",
        "the owner agreed to publish",
    ],
}
WARM_UP: Final[dict[str, Any]] = {
    "arm": "",
    "step": "load",
    "skipped": None,
    "requests": 100,
    "failed": 0,
    "tokens": 16_000,
    "duration": 10.0,
    "enough": True,
    "before": {"outcome": "complete", "ttft": 0.3, "e2e": 1.0},
    "probes": [{"outcome": "complete", "ttft": 0.1, "e2e": 0.8}] * 3,
    "variation": {"ttft": 0.02, "e2e": 0.01},
    "stable": True,
    "problem": None,
}
TABLES: Final[dict[int, tuple[list[str], list[list[str]]]]] = {
    1: (
        ["Metric", "Value"],
        [
            ["Requests", "10000"],
            ["TTFT P50", "127 ms"],
            ["TTFT P90", "245 ms"],
            ["TTFT P95", "312 ms"],
            ["TTFT P99", "524 ms"],
            ["TTFT P99.9", "891 ms"],
            ["TTFT Mean", "156 ms"],
            ["TTFT Min", "89 ms"],
            ["TTFT Max", "1243 ms"],
        ],
    ),
    2: (
        ["Input Tokens", "P50 (ms)", "P95 (ms)", "P99 (ms)"],
        [["0-256", "95", "198", "312"], ["256-512", "142", "287", "445"]],
    ),
    3: (
        ["Metric", "Value"],
        [
            ["Max Output Throughput", "2847 tok/s"],
            ["Max Request Throughput", "18.2 req/s"],
            ["Max Input Throughput", "5123 tok/s"],
            ["Sustainable Load", "20 req/s"],
            ["Tokens per GPU-second", "356 tok/s/GPU"],
        ],
    ),
    4: (
        ["Metric", "P50", "P95", "P99"],
        [
            ["TTFT", "1 ms", "2 ms", "3 ms"],
            ["TPOT", "1 ms", "2 ms", "3 ms"],
            ["End-to-End", "1 s", "2 s", "3 s"],
        ],
    ),
    5: (
        ["Offered (r/s)", "Achieved (tok/s)", "TTFT P50", "TTFT P99", "TPOT P50", "TPOT P99", "Success"],
        [["2", "284", "95", "142", "32", "41", "100%"]],
    ),
    6: (["Metric", "Value"], [["ITL Samples", "15234"], ["ITL P50", "38 ms"], ["P99/P50 Ratio", "3.26"]]),
    7: (
        ["Concurrency", "Completion", "TTFT P99", "TPOT P99", "Errors", "Status"],
        [["8", "100%", "142 ms", "38 ms", "0", "Pass"]],
    ),
    8: (
        ["Class", "Count", "TTFT P50", "TTFT P99", "TPOT P50", "TPOT P99"],
        [["Short", "4012", "89 ms", "234 ms", "35 ms", "67 ms"]],
    ),
    9: (["Metric", "Value"], [["Jain's Fairness Index", "0.87"], ["Short Class Starvation", "0.3%"]]),
    10: (
        ["Configuration", "TTFT P50", "TTFT P95", "TTFT P99"],
        [["Cache Disabled", "1", "2", "3"], ["Cache (Cold)", "1", "2", "3"], ["Cache (Warm)", "1", "2", "3"]],
    ),
    11: (
        ["Oversub Level", "Complete", "Preempt", "Fail Rate", "TTFT P99"],
        [["110%", "98.2%", "5.2%", "1.8%", "789 ms"]],
    ),
    12: (["Context (tokens)", "TTFT Mean", "TTFT P95", "ms/1K tokens"], [["1024", "89 ms", "112 ms", "76"]]),
    13: (
        ["Configuration", "TTFT P50", "TTFT P99", "E2E P50", "E2E P99"],
        [["Baseline", "98 ms", "234 ms", "4.2 s", "8.7 s"]],
    ),
    14: (["Configuration", "Max Throughput", "Reduction"], [["Baseline", "2867 tok/s", "-"]]),
}
"""Of the draft, as reports have them."""
_OF_TEST: Final = {
    "ttft": (1, 2),
    "throughput": (3, 4),
    "tradeoff": (5,),
    "itl": (6,),
    "capacity": (7,),
    "fairness": (8, 9),
    "prefix-cache": (10,),
    "memory-pressure": (11,),
    "long-context": (12,),
    "guardrail-overhead": (13, 14),
}
WORKLOADS: Final = {
    "fairness": "synthetic-skewed",
    "prefix-cache": "code-completion",
    "memory-pressure": "long-context",
    "long-context": "long-context",
    "guardrail-overhead": "conversation",
}


@cache
def _result(closed: bool) -> dict[str, Any]:
    return replay_result(120, closed=closed)


_DATA: Final = {"file": "a.json", "version": "2023-04-12", "subset": "shuffled", "preprocessing": "none"}


@cache
def _workload(name: str) -> dict[str, Any]:
    chosen = workload_named(name, "tests")
    told = report_of(chosen, chosen.requests(10, 42), 42)
    if name not in DATA_SETS:
        return told
    # As of a file of the data set, whose texts no test needs.
    return {**told, "data": _DATA, "deviations": told["deviations"][1:]}


def step(
    name: str, *, workload: str, arm: str = "", closed: bool = False, n: int = 10_000, seconds: float = 320.0
) -> dict[str, Any]:
    """A load as a report has it."""
    result = deepcopy(_result(closed))
    told = _workload(workload)
    plan = {
        "workload": told,
        "seed": 42,
        "requests": n,
        "target": "http://127.0.0.1:8000",
        "arrivals": None if closed else {"arrivals": "poisson", "rate_rps": 20.0, "seed": 42},
        "body": {
            "endpoint": "chat.completions",
            "stream": True,
            "temperature": 0.0,
            "output_control": "max_tokens",
        },
    }
    figures: dict[str, Any] = {
        "n": n,
        "plan": plan,
        "capture": {"to": "capture", "rows": n},
        "outcomes": {"complete": n},
        "window.seconds": seconds,
        "window.end": "2023-11-14T22:18:40.000Z",
        "tokens.cached": 4_000,
        "metrics.ttft.n": n,
        "metrics.ttft_any.n": n,
        "metrics.e2e.n": n,
        "metrics.tbc.n": 9 * n,
        "metrics.tbc.min": 0.010_000_123,
        "chunking.content_events": 10 * n,
        "chunking.events": 11 * n,
        "chunking.single_token_share": 1.0,
        "chunking.chunks_with_known_tokens": 10 * n,
        "metrics.itl.policy": {"direct": n},
        "metrics.e2e.mean": 2.0,
        "warmup": {"skipped": "cold start", "requests": 0},
    }
    if not closed:
        figures["arrivals.planned.n"] = figures["arrivals.sent.n"] = n
        figures["arrivals.sent.span"] = seconds
        ks = figures["arrivals.planned.ks"] = {"distance": 0.01, "limit_95": 0.0109}
        figures["arrivals.sent.ks"] = {**ks, "rate_rps": 20.0, "rate_from": "own"}
    return {
        "name": name,
        "arm": arm,
        "load": {},
        "cached": False,
        "requests": {"file": "requests.jsonl.gz", "rows": n, "bytes": 9, "sha256": "ab" * 32},
        "result": changed(result, figures),
    }


def report_of_test(test: str) -> dict[str, Any]:
    """A complete report of a test that went by the book."""
    section, title = TESTS[test]
    steps, params, measurements = _OWN[test]()
    arms = dict.fromkeys(one["arm"] for one in steps)
    return {
        "test": test,
        "section": section,
        "title": title,
        "quick": False,
        "params": params,
        "sut": deepcopy(SUT),
        "target": {"url": "http://127.0.0.1:8000", "endpoint": "chat.completions", "server": "vllm"},
        "seed": 42,
        "warmup": "auto",
        "versions": {"llmtap": "1.0", "python": "3.11", "platform": "linux"},
        "steps": steps,
        "warmups": [{**deepcopy(WARM_UP), "arm": arm} for arm in arms],
        "refused": 0,
        "measurements": measurements,
        "tables": [
            {
                "caption": f"Table {number}: Results",
                "heads": list(TABLES[number][0]),
                "rows": [list(row) for row in TABLES[number][1]],
            }
            for number in _OF_TEST[test]
        ],
        "charts": [{"title": "TTFT of all requests", "kind": "cdf", "series": []}],
        "configuration": {
            "Workload": "synthetic-uniform, seed 42",
            "Load model": "closed loop, 8 at a time",
            "Request count": "10,000 sent",
            "Test duration": "320 s",
            "Warm-up": "requests of 128 tokens",
        },
        "notes": ["TTFT is to the first content token"],
        "deviations": [],
        "itl_option": "A",
        "exact_requests": "steps/NAME/requests.jsonl.gz of 1 of 1 loads",
        "verdict": {"valid": True, "findings": [], "failures": []},
    }


def changed(tree: Any, changes: Mapping[str, Any]) -> Any:
    """A copy with other values at `steps.0.result.n`; `steps.*.name` is of every step."""
    copy = deepcopy(tree)
    for path, value in changes.items():
        _put(copy, path.split("."), value)
    return copy


def _put(tree: Any, path: list[str], value: Any) -> None:
    name, *rest = path
    if name == "*":
        for i in range(len(tree)):
            _put(tree, [str(i), *rest], value)
        return
    key: Any = int(name) if isinstance(tree, list) else name
    if rest:
        if isinstance(tree, dict) and tree.get(key) is None:
            tree[key] = {}
        _put(tree[key], rest, value)
    elif value is GONE:
        del tree[key]
    else:
        tree[key] = deepcopy(value)


_Own = tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]


def _ttft() -> _Own:
    return (
        [step("load", workload="synthetic-uniform")],
        {"workload": "synthetic-uniform", "requests": 10_000, "rate": 20.0, "concurrency": None},
        {
            "ttft": {"n": 10_000, "p50": {"value": 0.1, "low": 0.09, "high": 0.11}},
            "ttft_by_input": [{"begin": 0, "below": 256}, {"begin": 256, "below": 512}],
        },
    )


def _throughput() -> _Own:
    names = ("search/1rps", "search/2rps", "search/4rps")
    levels = [
        {"step": name, "window": {"from": 30.0, "to": 300.0}, "holds": i < 2, "why": "the queue grows"}
        for i, name in enumerate(names)
    ]
    params = {
        "workload": "synthetic-uniform",
        "duration": 300.0,
        "mode": "open",
        "rate_min": 1.0,
        "rate_max": 64.0,
        "rate_step": 1.0,
        "concurrency_min": 1,
        "concurrency_max": 512,
        "concurrency_step": 1,
    }
    steps = [step(name, workload="synthetic-uniform") for name in names]
    return steps, params, {"limit": 4.0, "levels": levels}


def _tradeoff() -> _Own:
    percents = range(10, 121, 10)
    pilot = step("capacity/rough/1rps", workload="synthetic-uniform", closed=True, n=50, seconds=20)
    steps = [pilot, *(step(f"levels/{one:05.1f}", workload="synthetic-uniform") for one in percents)]
    levels = [
        {"step": f"levels/{one:05.1f}", "percent": one, "window": {"from": 30, "to": 300}} for one in percents
    ]
    measurements = {"levels": levels, "saturation_rps": None, "queue_grows_from_rps": 22.0}
    return steps, {"duration": 60.0, "levels": [float(one) for one in percents]}, measurements


def _itl() -> _Own:
    levels = (25.0, 50.0, 75.0, 90.0)
    told = [{"level": one, "too_short": 0} for one in levels]
    steps = [step(f"{one:g}-percent", workload="synthetic-uniform", n=1_000) for one in levels]
    return steps, {"levels": list(levels), "output_tokens": None}, {"levels": told}


def _capacity() -> _Own:
    names = {"search/0008": 8, "search/0016": 16}
    steps = [step(name, workload="synthetic-uniform", closed=True, n=2_000) for name in names]
    replaced = step("search/0008-short", workload="synthetic-uniform", closed=True, n=10, seconds=2)
    criteria = {"ttft_p99": 2.0, "completion": 0.99, "memory_errors": 0}
    levels = [{"step": name, "concurrency": slots} for name, slots in names.items()]
    params = {"output_tokens": 256, "initial": 8, "maximum": 512, "duration": 60.0}
    return [*steps, replaced], params, {"levels": levels, "criteria": criteria}


def _fairness() -> _Own:
    names = ("capacity/0008-at-a-time", "alone/short", "alone/long", "mix")
    steps = [step(name, workload="synthetic-skewed", closed=name[0] == "c") for name in names]
    told = {
        "classes": {
            "short": {"sent": 4_012, "alone": {"sent": 3_000}},
            "long": {"sent": 988, "alone": {"sent": 700}},
        },
        "load_share": 0.8,
        "isolation": "tokens",
    }
    return steps, {"duration": 300.0}, told


def _prefix_cache() -> _Own:
    steps = [
        step(
            f"{repeat}/{state}", workload="code-completion", arm="cache_off" if state == "off" else "cache_on"
        )
        for repeat in range(3)
        for state in ("off", "cold", "warm")
    ]
    return steps, {"requests": 400}, {"ttft": {"off": {"p50": {"value": 1.0, "low": 0.9, "high": 1.1}}}}


def _memory_pressure() -> _Own:
    names = ("levels/100", "levels/110", "levels/125")
    steps = [step(name, workload="long-context", closed=True) for name in ("before", *names, "after")]
    steps[0]["result"]["window"]["seconds"] = steps[-1]["result"]["window"]["seconds"] = 5.0
    levels = [{"step": name, "concurrency": 64} for name in names]
    told = {"capacity": 64, "capacity_source": "the capacity test (5.5) in these results", "levels": levels}
    return steps, {"levels": [100, 110, 125], "duration": 120.0}, told


def _long_context() -> _Own:
    names = ("1024-tokens", "1024-tokens-8-at-a-time", "2048-tokens")
    steps = [step(name, workload="long-context", closed=True, n=20) for name in names]
    return steps, {"output_tokens": 256, "concurrency": 1, "lengths": [1_024, 2_048]}, {"lengths": []}


def _guardrail_overhead() -> _Own:
    steps = [
        step(f"{level}-percent/0/{arm}", workload="conversation", arm=arm)
        for level in (25, 50, 75)
        for arm in ("baseline", "input_filter", "output_filter", "full")
    ]
    return steps, {"levels": [25.0, 50.0, 75.0]}, {"levels": [{"level": 25.0}]}


_OWN: Final = {
    "ttft": _ttft,
    "throughput": _throughput,
    "tradeoff": _tradeoff,
    "itl": _itl,
    "capacity": _capacity,
    "fairness": _fairness,
    "prefix-cache": _prefix_cache,
    "memory-pressure": _memory_pressure,
    "long-context": _long_context,
    "guardrail-overhead": _guardrail_overhead,
}
