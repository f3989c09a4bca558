"""Each demand judged from reports that meet it, that miss it, and that lack the evidence."""

from typing import Any

import pytest

from llmtap.bench.compliance.evidence import Requirement, Status
from llmtap.bench.compliance.judge import COMPARISON, REQUIREMENTS
from llmtap.bench.run.test import TESTS
from llmtap.workload.registry import workload_named
from tests.support.results.compliance_reports import GONE, changed, report_of_test

BY_ID = {row.id: row for row in REQUIREMENTS}
ONE_TEST = [row for row in REQUIREMENTS if row.subject != COMPARISON]
Case = tuple[str, str, dict[str, Any], Status, str]
"""Demand, test, what is changed in its complete report, the verdict, and words of the evidence."""
S = "steps.*.result"
OFF = {"input_filter": False, "output_filter": False}
ON = {"input_filter": True, "output_filter": True}
REMOTE = {"placement": "remote", "synchronization": "NTP (chrony)", "accuracy": "2ms"}
GATEWAY = {"sut.boundary": "application gateway"}
DATA = {"file": "a.json", "version": "sha256", "subset": "shuffled", "preprocessing": "none"}
DESCRIBED = workload_named("long-context-uniform", "tests").describe()
CLOSED = {f"{S}.load.mode": "closed"}
JAIN = "Jain\N{RIGHT SINGLE QUOTATION MARK}s Fairness Index"
LATE: dict[str, Any] = {
    f"{S}.dispatch_lateness.p99": 0.09,
    f"{S}.verdict.findings": [{"what": "dispatch_lateness"}],
}
EMPIRICAL = {"distribution": "empirical", "unit": "tokens", "of": "the data"}
TRACE: dict[str, Any] = {
    f"{S}.plan.workload": GONE,
    f"{S}.plan.trace": "a.csv",
    f"{S}.plan.lengths": {
        "input": {"distribution": "empirical", "unit": "tokens", "n": 4, "mean": 45.0, "min": 30, "max": 60},
        "output": {"distribution": "empirical", "unit": "tokens", "n": 4, "mean": 6.5},
    },
}
TIMED: dict[str, Any] = {
    "measurements.levels": [],
    f"{S}.load.stopped": "its time was up",
    f"{S}.window.seconds": 310.0,
}
LOADED = {"first_token": 12.0}
COLD: dict[str, Any] = {"warmups": [], "notes": ["a cold start is measured"]}

SETUP: list[Case] = [
    ("2-p1", "ttft", {"verdict.valid": False}, "not met", "not valid"),
    ("2-p1", "ttft", {"verdict": GONE}, "cannot tell", "not reported"),
    ("4.1-1", "ttft", {}, "met", "model engine"),
    ("4.1-1", "ttft", {"sut.boundary": None}, "not met", "sut.boundary"),
    ("4.2-1", "ttft", {f"{S}.plan.body.stream": False}, "not met", "4.2.2-1"),
    ("4.2-1", "ttft", {f"{S}.capture": GONE}, "cannot tell", "capture"),
    ("4.2.1-1", "ttft", {f"{S}.sender.clock": "kernel"}, "met", "nanoseconds, stamped by the kernel"),
    ("4.2.1-1", "ttft", {f"{S}.sender": {}}, "not met", "clock"),
    ("4.2.1-2", "itl", {f"{S}.sender.clock": None}, "not met", "clock"),
    ("4.2.2-1", "ttft", {f"{S}.plan.body.stream": False}, "not met", "one piece"),
    ("4.2.2-1", "ttft", {f"{S}.chunking": {}}, "cannot tell", "no event"),
    ("4.2.2-2", "ttft", {f"{S}.metrics.tbc.n": 0}, "cannot tell", "more than one chunk"),
    ("4.2.3-1", "capacity", {}, "not applicable", "no load of this test is an open loop"),
    ("4.2.3-1", "ttft", {f"{S}.arrivals": None}, "cannot tell", "planned arrivals"),
    ("4.2.3-2", "ttft", {}, "met", "0.010 from exponential (KS), the planned 0.010, 0.011 at 95 %"),
    ("4.2.3-2", "ttft", {f"{S}.arrivals.sent.ks.distance": 0.088}, "not met", "0.088 from exponential"),
    # A plan that chance drew beyond the limit, sent as it was planned, and sent otherwise.
    ("4.2.3-2", "ttft", {f"{S}.arrivals.sent": {}}, "cannot tell", "as they were sent"),
    ("4.2.3-2", "ttft", {f"{S}.plan.arrivals.arrivals": "uniform"}, "not applicable", "no load"),
    # One of three beyond its limit is chance, two are not.
    ("4.2.3-2", "throughput", {"steps.0.result.arrivals.sent.ks.distance": 0.02}, "met", "middle one of 3"),
    (
        "4.2.3-2",
        "throughput",
        {"steps.0.result.arrivals.sent.ks.distance": 0.02, "steps.1.result.arrivals.sent.ks.distance": 0.02},
        "not met",
        "0.020",
    ),
    ("4.2.3-3", "ttft", {f"{S}.plan.arrivals.arrivals": "gamma"}, "met", "gamma"),
    ("4.2.3-3", "ttft", {}, "not applicable", "uniform or bursty"),
    ("4.2.4-1", "capacity", {"steps": GONE}, "cannot tell", "no loads"),
    ("4.2.4-1", "capacity", {}, "met", "in flight on average"),
    ("4.2.4-1", "ttft", {}, "not applicable", "closed loop"),
    ("4.2.5-1", "ttft", {f"{S}.verdict.findings": [{"what": "lost"}]}, "not met", "died"),
    ("4.2.5-1", "ttft", {**LATE, f"{S}.metrics.e2e.p50": 0.91}, "met", "where an answer took 910 ms"),
    ("4.2.5-1", "ttft", {f"{S}.dispatch_lateness": {}}, "cannot tell", "how late"),
    ("4.2.5-2", "ttft", {}, "met", "62.5 requests in flight on average, sent by 1 process"),
    ("4.2.5-2", "ttft", {f"{S}.sender.processes": [{}] * 64}, "cannot tell", "64 processes"),
    ("4.2.5-2", "ttft", {f"{S}.metrics.e2e.mean": 0.01}, "not applicable", "0.31 requests in flight"),
    ("4.2.6-1a", "ttft", {f"{S}.capture.rows": 9_000}, "cannot tell", "of 10,000 exchanges 9,000"),
    ("4.2.6-1b", "ttft", {f"{S}.metrics.ttft.n": 0}, "cannot tell", "no first tokens"),
    ("4.2.6-1c", "ttft", {f"{S}.metrics.tbc.n": 0}, "cannot tell", "no later tokens"),
    ("4.2.6-1d", "ttft", {f"{S}.metrics.e2e.n": 0}, "cannot tell", "no last tokens"),
    ("4.2.6-1e", "ttft", {f"{S}.tokens.input": None}, "cannot tell", "no input tokens"),
    ("4.2.6-1f", "ttft", {f"{S}.tokens.output": None}, "cannot tell", "no output tokens"),
    ("4.2.6-1g", "ttft", {f"{S}.outcomes": {}}, "cannot tell", "no outcome"),
    ("4.3-1", "ttft", {f"{S}.plan.workload.name": "ours"}, "met", "ours"),
    ("4.3-1", "ttft", {}, "not applicable", "those of 4.3.2"),
    ("4.3-2", "ttft", {f"{S}.plan.workload.name": "ours"}, "met", "ours"),
    ("4.3-2", "ttft", {f"{S}.plan.workload": {"name": "ours"}}, "not met", "input lengths"),
    ("4.3.1-1a", "ttft", {}, "met", "input: uniform min 128 max 512 in tokens"),
    ("4.3.1-1a", "ttft", {f"{S}.plan.workload.input.distribution": None}, "not met", "distribution"),
    ("4.3.1-1a", "long-context", {f"{S}.plan.input_tokens": 1_024}, "met", "input: fixed, 1,024 tokens"),
    ("4.3.1-1b", "ttft", TRACE, "met", "output: empirical n 4 mean 6.5 in tokens, by max_tokens"),
    ("4.3.1-1b", "capacity", {}, "met", "output: fixed, 256 tokens, by max_tokens"),
    (
        "4.3.1-1b",
        "ttft",
        {f"{S}.plan.body.output_control": "max_tokens and stop sequence"},
        "met",
        "by max_tokens and stop sequence",
    ),
    ("4.3.1-1b", "ttft", {f"{S}.plan.body.output_control": None}, "not met", "limited"),
    ("4.3.1-1c", "ttft", {f"{S}.plan.workload.content": {}}, "not met", "domain"),
    ("4.3.1-1d", "ttft", {f"{S}.plan.workload.sharing": GONE}, "not met", "prefix"),
    ("4.3.1-1d", "ttft", {}, "met", "no prefix"),
    ("4.3.1-1d", "prefix-cache", {}, "met", "80% share a prefix: uniform min 512 max 1,024"),
    ("4.3.1-1d", "prefix-cache", {f"{S}.plan.workload.sharing.fraction": None}, "not met", "how many"),
    ("4.3.2.1-1", "ttft", {f"{S}.plan.workload.name": "conversation"}, "not met", "synthetic-uniform"),
    ("4.3.2.1-1", "ttft", {"sut.boundary": None}, "cannot tell", "boundary"),
    ("4.3.2.1-1", "ttft", GATEWAY, "not applicable", "application gateway"),
    ("4.3.2.3-1", "guardrail-overhead", GATEWAY, "met", "; A.3.2, 4.3.2.3: they do not"),
    ("4.3.2.3-1", "ttft", GATEWAY, "not met", "synthetic-uniform, not conversation"),
    ("4.3.2.5-1", "long-context", {f"{S}.plan.workload.name": "conversation"}, "not met", "long-context"),
    ("4.3.2.5-1", "long-context", {f"{S}.plan": {}}, "cannot tell", "not reported"),
    ("4.3.3-1", "ttft", {f"{S}.plan.seed": None}, "not met", "no seed"),
    ("4.3.3-2", "ttft", {"seed": None}, "not met", "seed is not stated"),
    ("4.3.3-3", "ttft", {"exact_requests": None}, "met", "made again by llmtap 1.0 with seed 42"),
    ("4.3.3-3", "ttft", {"exact_requests": None, f"{S}.plan.workload.generation": ""}, "not met", "neither"),
    *(
        case
        for item, part in (("a", "version"), ("b", "subset"), ("c", "preprocessing"))
        for case in (
            (f"4.3.3-4{item}", "ttft", {f"{S}.plan.workload.data": DATA}, "met", part),
            (f"4.3.3-4{item}", "ttft", {f"{S}.plan.workload.data": {**DATA, part: None}}, "not met", part),
            (f"4.3.3-4{item}", "ttft", {}, "not applicable", "data set"),
        )
    ),
    ("4.4.1-1a", "ttft", {"sut.tokenizer.name": None}, "not met", "tokenizer"),
    ("4.4.1-1b", "ttft", {}, "met", "32,000"),
    ("4.4.1-1b", "ttft", {"sut.tokenizer.vocabulary": None}, "not met", "vocabulary"),
    ("4.4.1-1c", "ttft", {"sut.tokenizer.source": None}, "not met", "source"),
    ("4.4.2-1", "ttft", {}, "met", "A (native)"),
    ("4.4.2-1", "ttft", {"sut.tokenizer.counting": None}, "not met", "neither"),
    ("4.4.3-1a", "ttft", {"sut.tokenizer.special": None}, "not met", "BOS"),
    ("4.4.3-1b", "ttft", {"sut.tokenizer.system_prompt": "unknown"}, "not met", "system prompt"),
    ("4.4.3-1c", "ttft", {"sut.tokenizer.tools": None}, "not met", "tool calls"),
    ("4.5.1-1a", "ttft", {"warmups.0.stable": False}, "cannot tell", "had not settled"),
    ("4.5.1-1b", "ttft", {}, "met", "100 requests of 100 and 16,000 output tokens of 10,000"),
    ("4.5.1-1b", "ttft", {"warmups.0.requests": 20}, "not met", "20 requests of 100"),
    ("4.5.1-1b", "ttft", COLD, "not applicable", "cold start"),
    ("4.5.1-1b", "prefix-cache", {"warmups.1.arm": "cache_off"}, "not met", "cache_on"),
    ("4.5.1-1c", "ttft", {"warmups.0.probes": []}, "met", "all its 100 answers had come"),
    ("4.5.1-1c", "ttft", {"warmups.0.probes": [], "warmups.0.failed": 1}, "cannot tell", "its answers"),
    ("4.5.1-1d", "prefix-cache", {}, "met", "12,000 input tokens reported as cached"),
    ("4.5.1-1d", "prefix-cache", {f"{S}.tokens.cached": None}, "cannot tell", "0 prefixes sent"),
    ("4.5.2-1a", "ttft", {}, "met", "300.0 ms before and 100.0 ms after"),
    ("4.5.2-1a", "ttft", {"warmups.0.before": None}, "not met", "no probe"),
    ("4.5.2-1a", "ttft", {"warmups.0.probes": []}, "not met", "no probe"),
    ("4.5.2-1b", "ttft", {"warmups.0.stable": False, "warmups.0.variation.ttft": 0.31}, "not met", "31.0%"),
    ("4.5.3-1", "ttft", COLD, "met", "no warm-up was made"),
    ("4.5.3-1", "ttft", {"notes": ["a cold start is measured"]}, "not met", "after a warm-up of 100"),
    ("4.5.3-1", "ttft", {}, "not applicable", "no cold start"),
    ("4.5.3-2", "ttft", {"model_load": LOADED}, "not met", "is not stated"),
    ("4.5.3-2", "ttft", COLD, "met", "cold start"),
    ("4.6.1-1", "ttft", GATEWAY, "met", "SSE"),
    ("4.6.1-1", "ttft", {**GATEWAY, "target.url": "wss://host"}, "not met", "WebSocket, not SSE"),
    ("4.6.1-2", "ttft", {}, "not met", "SSE, not gRPC"),
    ("4.6.1-2", "ttft", {"target.url": "grpc://host:1"}, "met", "gRPC"),
    ("4.6.1-2", "ttft", {"target.url": "host"}, "cannot tell", "protocol"),
    ("4.6.2-1a", "ttft", {"sut.protocol": None, "target.url": "host"}, "not met", "not reported"),
    ("4.6.2-1a", "ttft", {"sut.protocol": None}, "met", "SSE"),
    ("4.6.2-1b", "ttft", {}, "met", "100.0% of 100,000 chunks"),
    ("4.6.2-1b", "ttft", {"sut.chunking": None, f"{S}.chunking": {}}, "not met", "not reported"),
    ("4.6.2-1c", "ttft", {f"{S}.metrics.itl.policy": {}}, "cannot tell", "no gap"),
    (
        "4.6.2-1c",
        "ttft",
        {f"{S}.metrics.itl.policy": {"B-even; tokens by usage": 9}},
        "met",
        "B-even; tokens by usage: 9 answers",
    ),
    ("4.6.3-1", "ttft", {"itl_option": None}, "not met", "none of A, B and C"),
    *(
        ("4.6.3-1", "ttft", {"itl_option": variant}, "not met", "none of A, B and C")
        for variant in ("B-even", "A + B-even", "B (even)", "D")
    ),
    *(
        ("4.6.3-1", "ttft", {"itl_option": option}, "met", words)
        for option, words in (
            ("A", "time between chunks"),
            ("A (direct)", "time between chunks"),
            ("B", "distributed"),
        )
    ),
    ("4.6.3-1", "ttft", {"itl_option": "A + C", f"{S}.metrics.itl_server.n": 90}, "met", "the server's"),
    ("4.6.3-1", "ttft", {"itl_option": "C"}, "not met", "reported no times"),
    ("4.6.3-2", "ttft", {"itl_option": "C", f"{S}.metrics.itl_server.n": 90}, "met", "90 gaps"),
    ("4.6.3-2", "ttft", {f"{S}.metrics.itl_server.n": 90}, "not met", "the option is A"),
    ("4.6.3-2", "ttft", {}, "not applicable", "no times"),
    ("4.7.1-1", "ttft", {"sut.clock.placement": "remote"}, "not met", "remote"),
    ("4.7.1-1", "ttft", {"sut.clock.placement": None}, "cannot tell", "placement"),
    ("4.7.2-1", "ttft", {"sut.clock": REMOTE}, "met", "accurate to 2 ms; 10 ms needed"),
    ("4.7.2-1", "ttft", {"sut.clock": {**REMOTE, "accuracy": "< 20 ms"}}, "not met", "20 ms"),
    ("4.7.2-1", "ttft", {"sut.clock": {**REMOTE, "accuracy": "good"}}, "cannot tell", "as a time"),
    (
        "4.7.2-1",
        "ttft",
        {"sut.clock": REMOTE, "clock_offset": {"offset": -0.0004}},
        "met",
        "10 ms needed; the load generator's clock is -400 us off",
    ),
    # A declared accuracy does not stand against a measured offset.
    ("4.7.2-1", "ttft", {"sut.clock": REMOTE, "clock_offset": {"offset": -0.02}}, "not met", "-20 ms off"),
    ("4.7.2-1", "ttft", {}, "not applicable", "share a machine"),
    ("4.7.2-2", "ttft", {"sut.clock": {**REMOTE, "synchronization": "PTP"}}, "met", "PTP"),
    ("4.7.2-2", "ttft", {"sut.clock": {**REMOTE, "accuracy": "0.5ms"}}, "not met", "not by PTP"),
    ("4.7.2-2", "ttft", {"sut.clock": REMOTE}, "not applicable", "below a millisecond"),
    ("4.7.2-3", "ttft", {"sut.clock": REMOTE}, "met", "NTP (chrony), accurate to 2ms"),
    ("4.7.2-3", "ttft", {"sut.clock": {**REMOTE, "accuracy": None}}, "not met", "accuracy"),
    ("4.7.3-1", "ttft", {**GATEWAY, "sut.clock": REMOTE}, "not met", "round trip"),
    ("4.7.3-1", "ttft", {**GATEWAY, "sut.clock": REMOTE, "notes": ["RTT 0.4 ms"]}, "met", "RTT 0.4 ms"),
    ("4.7.3-2", "ttft", {"notes": ["0.4 ms were subtracted"]}, "met", "subtracted"),
    ("4.7.3-3", "ttft", {"notes": ["0.4 ms were subtracted"]}, "met", "subtracted"),
    ("4.7.3-3", "ttft", {}, "not applicable", "adjusted"),
    ("4.7.4-1", "ttft", {f"{S}.window.start": "2026-11-22T06:47:36Z"}, "not met", "06:47:36Z"),
    ("4.7.4-1", "ttft", {f"{S}.window": {}}, "cannot tell", "its start"),
    ("4.7.4-2", "ttft", {f"{S}.window.start": "yesterday"}, "not met", "yesterday"),
    ("4.8-1", "ttft", {"sut.guardrails.input_filter": None}, "not met", "input filter not declared"),
    ("4.8.1-1a", "ttft", {}, "met", "input filter: no"),
    ("4.8.1-1a", "ttft", {"sut.guardrails.input_filter": None}, "not met", "input filter"),
    ("4.8.1-1b", "ttft", {"sut.guardrails.output_filter": None}, "not met", "output filter"),
    ("4.8.1-1c", "ttft", {"sut.guardrails": {**ON, "names": ["Guard 3"]}}, "met", "Guard 3"),
    ("4.8.1-1c", "ttft", {"sut.guardrails": {**ON, "names": []}}, "not applicable", "no name is known"),
    ("4.8.1-1c", "ttft", {"sut.guardrails": {}}, "not met", "neither"),
    ("4.8.1-1d", "ttft", {"refused": 3}, "met", "3 of 10,000"),
    ("4.8.1-1d", "ttft", {"refused": None}, "not met", "not reported"),
    ("4.8.2-1", "ttft", {**GATEWAY, "sut.guardrails": ON}, "met", "on"),
    ("4.8.2-1", "ttft", {**GATEWAY, "sut.guardrails": OFF}, "not met", "off"),
    ("4.8.2-1", "ttft", {**GATEWAY, "sut.guardrails": {}}, "cannot tell", "not declared"),
    ("4.8.2-2", "ttft", {**GATEWAY, "sut.guardrails": OFF}, "met", "off"),
    ("4.8.2-2", "ttft", {**GATEWAY, "sut.guardrails": {}}, "not met", "not declared"),
    ("4.8.2-3", "guardrail-overhead", GATEWAY, "met", "full"),
    ("4.8.2-3", "guardrail-overhead", {**GATEWAY, "steps.*.arm": ""}, "not met", "the target"),
    ("7.1-1", "capacity", {"sut.notes": []}, "cannot tell", "publish"),
    ("7.2-1", "ttft", {"sut.notes": []}, "cannot tell", "synthetic-uniform"),
    ("7.4-1a", "memory-pressure", {"sut.notes": []}, "cannot tell", "isolated"),
    ("7.4-1b", "memory-pressure", {"sut.notes": []}, "cannot tell", "recovery"),
    ("7.4-1c", "memory-pressure", {"sut.notes": []}, "cannot tell", "failures"),
]

WITHOUT_TABLES: dict[str, Any] = {"tables": []}
PROCEDURES: list[Case] = [
    ("5.1.2-1a", "ttft", {f"{S}.plan": {}}, "not met", "does not say"),
    ("5.1.2-1b", "ttft", {f"{S}.plan.requests": None}, "not met", "number"),
    ("5.1.2-1c", "ttft", {f"{S}.load": {}}, "not met", "load model"),
    ("5.1.2-1d", "ttft", {f"{S}.plan.arrivals.rate_rps": 0, f"{S}.load.planned_rps": 0}, "not met", "rate"),
    ("5.1.2-1e", "ttft", {f"{S}.plan.arrivals": None}, "not met", "distribution"),
    ("5.1.2-1f", "ttft", {**CLOSED, "params.concurrency": 8}, "met", "8 at a time"),
    ("5.1.2-1f", "ttft", CLOSED, "not met", "at a time"),
    ("5.1.2-1g", "ttft", {"sut.boundary": None}, "not met", "boundary"),
    ("5.1.2-1h", "ttft", {"sut.model": None}, "not met", "model"),
    ("5.1.2-1i", "ttft", {}, "met", "8 x H100 SXM, 80 GB each"),
    ("5.1.2-1i", "ttft", {"sut.hardware.memory": None}, "not met", "memory"),
    ("5.1.2-1j", "ttft", {"sut.prefix_cache": None}, "not met", "prefix caching"),
    ("5.1.2.1-1a", "ttft", {f"{S}.n": 1_000}, "met", "1,000 requests, 1,000 needed"),
    ("5.1.2.1-1a", "ttft", {f"{S}.n": 100, "quick": True}, "not met", "100 requests, 1,000 needed"),
    ("5.1.2.1-1a", "ttft", {f"{S}.n": None}, "cannot tell", "number"),
    ("5.1.2.1-1b", "ttft", {f"{S}.n": 1_000}, "not met", "1,000 requests, 10,000 needed"),
    ("5.1.2.2-1", "ttft", {f"{S}.plan.arrivals.arrivals": "uniform"}, "not met", "uniform"),
    ("5.1.2.2-1", "ttft", CLOSED, "not applicable", "open loop"),
    ("5.1.3.1-1", "ttft", {f"{S}.metrics.ttft_any.mean": 0.01}, "met", "first content token"),
    ("5.1.3.1-1", "ttft", {f"{S}.metrics.ttft_any.mean": 0.01, "notes": []}, "not met", "does not note"),
    ("5.1.3.1-1", "ttft", {}, "not applicable", "all of 10,000 answers"),
    ("5.1.3.1-1", "ttft", {f"{S}.metrics": {}}, "cannot tell", "no first token"),
    ("5.1.4.1-1", "ttft", {}, "met", "P99.9 891 ms"),
    ("5.1.4.1-1", "ttft", {"tables.0.rows.5.1": "-"}, "not met", "P99.9"),
    ("5.1.4.2-1", "ttft", {"measurements.ttft_by_input.0.below": 200}, "not met", "0-200"),
    ("5.1.4.2-1", "ttft", {"measurements.ttft_by_input.0": {"begin": 4_096, "below": None}}, "met", "4096+"),
    ("5.1.4.2-1", "ttft", {f"{S}.plan.workload.input.distribution": "fixed"}, "not applicable", "one length"),
    ("5.1.4.3-1", "ttft", {"measurements": {}, **WITHOUT_TABLES}, "not met", "samples"),
    ("5.1.5-1a", "ttft", {"sut.boundary": None}, "not met", "boundary"),
    ("5.1.5-1b", "ttft", {"sut.model": None}, "not met", "model"),
    ("5.1.5-1c", "ttft", {"configuration.Workload": ""}, "not met", "the workload"),
    ("5.1.5-1d", "ttft", {"configuration.Load model": GONE}, "not met", "load model"),
    ("5.1.5-1e", "ttft", {"configuration.Test duration": GONE}, "not met", "duration"),
    ("5.1.5-1f", "ttft", {"configuration.Warm-up": GONE}, "met", "100 requests, 16,000 tokens"),
    ("5.1.5-1f", "ttft", {"configuration.Warm-up": GONE, "warmups": []}, "not met", "warm-up"),
    ("5.1.5-1f", "ttft", COLD, "not applicable", "cold start"),
    ("5.1.5-1g", "ttft", {"sut.prefix_cache": None}, "not met", "prefix"),
    ("5.1.5-1h", "ttft", {"sut.guardrails": {}}, "not met", "guardrails"),
    ("5.1.5-1i", "ttft", WITHOUT_TABLES, "not met", "Table 1"),
    ("5.1.5-1j", "ttft", WITHOUT_TABLES, "not met", "Table 2"),
    ("5.1.5.2-1", "ttft", {"tables.0.rows.8.0": "Maximum"}, "not met", "Table 1 lacks TTFT Max"),
    ("5.1.5.4-1", "ttft", {"charts.0.kind": "line"}, "not met", "CDF"),
    ("5.2.2-1a", "throughput", {f"{S}.plan": {}}, "not met", "does not say"),
    ("5.2.2-1b", "throughput", {"params.duration": None}, "not met", "duration"),
    ("5.2.2-1c", "throughput", {f"{S}.load.mode": None}, "not met", "load model"),
    ("5.2.2-1d", "throughput", {}, "met", "rate_min 1, rate_max 64"),
    ("5.2.2-1d", "throughput", {"params.rate_max": None}, "not met", "rate_max not defined"),
    ("5.2.2-1d", "throughput", CLOSED, "not applicable", "open loop"),
    ("5.2.2-1e", "throughput", {"params.rate_step": None}, "not met", "rate_step"),
    ("5.2.2-1f", "throughput", CLOSED, "met", "concurrency_max 512"),
    ("5.2.2-1f", "throughput", {**CLOSED, "params.concurrency_max": None}, "not met", "max"),
    ("5.2.2-1g", "throughput", CLOSED, "met", "concurrency_step 1"),
    ("5.2.2-1g", "throughput", {**CLOSED, "params.concurrency_step": None}, "not met", "step"),
    ("5.2.2.1-1", "throughput", {"measurements.levels.1.window.to": 61.0}, "not met", "61.0 s, 300 s needed"),
    # Answers that are waited for are no load.
    ("5.2.2.1-1", "throughput", {**TIMED, "params.duration": 299.0}, "met", "299.0 s, 300 s needed"),
    ("5.2.2.1-p1", "throughput", {"measurements.levels.1.window.to": 6.0}, "not met", "6.0 s, 60 s needed"),
    (
        "5.2.2.1-p1",
        "throughput",
        {"measurements.levels": [], f"{S}.arrivals": None, f"{S}.window": {}},
        "cannot tell",
        "how long",
    ),
    ("5.2.3.1-p1", "throughput", {}, "met", "the queue grows"),
    ("5.2.3.1-p1", "throughput", {"measurements.limit": None}, "not met", "no saturation"),
    ("5.2.3.1-p1", "throughput", {"measurements": {}}, "cannot tell", "ended"),
    ("5.2.3.2-p1", "throughput", {"measurements.levels.0.window.from": 3.0}, "not met", "first 1%"),
    ("5.2.3.2-p1", "throughput", {"measurements.levels": []}, "cannot tell", "which part"),
    ("5.2.5.1-p1", "throughput", {"tables.0.rows.4.0": "per GPU"}, "not met", "Tokens per GPU-second"),
    ("5.2.5.2-p1", "throughput", {"tables.1.heads": ["Metric", "P50", "P99"]}, "not met", "P95"),
    ("5.3.2-1", "tradeoff", {"steps.3.result.load.mode": "closed"}, "not met", "closed loop"),
    ("5.3.2-p1", "tradeoff", {"measurements.levels.2.window.to": 59.0}, "not met", "levels/030.0: 59.0 s"),
    ("5.3.2-p1", "tradeoff", {"measurements.levels.2.window.to": 59.5}, "met", "60 s needed"),
    ("5.3.2-p2", "tradeoff", {"measurements.levels.3": GONE}, "met", "11 levels, 10 needed"),
    ("5.3.2-p2", "tradeoff", {"measurements.levels": [{"percent": 10}]}, "not met", "1 levels, 10 needed"),
    ("5.3.2-p2", "tradeoff", {"measurements": {}}, "cannot tell", "no levels"),
    ("5.3.2-p3", "tradeoff", {"measurements.levels.0.percent": 15}, "not met", "not from 10 %"),
    ("5.3.2-p3", "tradeoff", {"measurements": {}}, "cannot tell", "share of capacity"),
    ("5.3.3-p1", "tradeoff", {"measurements.levels.11.percent": 115}, "not met", "without 120 %"),
    ("5.3.5-p1", "tradeoff", WITHOUT_TABLES, "not met", "Table 5"),
    ("5.4.2-1", "itl", {f"{S}.plan.workload.name": "code-completion"}, "not met", "code-completion"),
    ("5.4.2-2", "itl", {}, "met", "fewer than 50"),
    ("5.4.2-2", "itl", {"params.output_tokens": 32}, "not met", "answers of 32 tokens"),
    ("5.4.2-2", "itl", {"measurements": {}}, "cannot tell", "lengths of answers"),
    ("5.4.2-3", "itl", {"params.levels": [25.0, 75.0]}, "not met", "without 50 %, 90 %"),
    ("5.4.2-3", "itl", {"params.levels": None}, "cannot tell", "levels"),
    ("5.4.2-p1", "itl", {"steps.2.result.n": 40}, "not met", "75-percent: 40 requests, 100 needed"),
    ("5.4.2-p2", "itl", {"steps.2.result.metrics.tbc.n": 4_000}, "not met", "4,000 gaps"),
    ("5.4.2-p2", "itl", {f"{S}.metrics": {}}, "cannot tell", "number of gaps"),
    ("5.4.3-1", "itl", {"steps.0.result.metrics.tbc.n": 10_000}, "not met", "10,000 gaps of 10,000 chunks"),
    ("5.4.3-1", "itl", {f"{S}.chunking": {}}, "cannot tell", "numbers of gaps"),
    ("5.4.5-p1", "itl", WITHOUT_TABLES, "not met", "Table 6"),
    ("5.5.2-1", "capacity", {f"{S}.plan.workload.name": "conversation"}, "not met", "conversation"),
    ("5.5.2-p1", "capacity", {"params.output_tokens": None}, "not met", "answer length"),
    ("5.5.2-p2", "capacity", {}, "met", "99% complete, TTFT P99 <= 2 s, 0 out of memory"),
    ("5.5.2-p2", "capacity", {"measurements.criteria.completion": 0.9}, "not met", "90% complete"),
    ("5.5.3-p1", "capacity", {}, "met", "search/0008: 320 s of 60, 250 completions per slot of 100"),
    ("5.5.3-p1", "capacity", {"steps.1.result.outcomes.complete": 1_599}, "not met", "100 completions"),
    ("5.5.3-p1", "capacity", {"steps.1.result.outcomes": None}, "cannot tell", "completions"),
    ("5.5.5-p1", "capacity", WITHOUT_TABLES, "not met", "Table 7"),
    (
        "5.6.2-1",
        "fairness",
        {f"{S}.plan.workload.name": "request-classes"},
        "not met",
        "the parameter workload = synthetic-skewed sends it",
    ),
    ("5.6.2-1", "fairness", {"steps.1.result.plan.workload.name": "request-classes"}, "met", "skewed"),
    ("5.6.2-2", "fairness", {"measurements.load_share": 0.5}, "not met", "50% of saturation"),
    ("5.6.2-2", "fairness", {"measurements.load_share": None}, "cannot tell", "share of saturation"),
    ("5.6.2-p1", "fairness", {"measurements.classes.long": GONE}, "not met", "short"),
    ("5.6.2-p2", "fairness", {"measurements.classes.long.sent": 499}, "not met", "long 499 requests"),
    ("5.6.2-p2", "fairness", {"measurements.classes": {}}, "cannot tell", "by class"),
    ("5.6.3-p1", "fairness", {"measurements.classes.long.alone": GONE}, "not met", "long"),
    ("5.6.3-p1", "fairness", {"measurements": {}}, "cannot tell", "no classes"),
    ("5.6.3-p2", "fairness", {"steps.3.result.arrivals.sent.span": 15.0}, "not met", "15.0 s, 300 s needed"),
    ("5.6.3-p2", "fairness", {"steps.2.result.arrivals.sent.span": 15.0}, "met", "320.0 s"),
    ("5.6.5-p1", "fairness", WITHOUT_TABLES, "not met", "Table 8"),
    ("5.6.5-p2", "fairness", WITHOUT_TABLES, "not met", "Table 9"),
    ("5.6.5-p2", "fairness", {"tables.1.rows.0.0": JAIN}, "met", "Table 9"),
    ("5.7.2-1", "prefix-cache", {f"{S}.plan.workload.name": "conversation"}, "not met", "conversation"),
    ("5.7.2-2", "prefix-cache", {"steps.*.arm": "cache_on"}, "not met", "cache_on"),
    ("5.7.3-p1", "prefix-cache", {"steps.1.result.plan.texts": 7}, "not met", "1 of 3 repeats"),
    ("5.7.3-p1", "prefix-cache", {"steps.*.name": "load"}, "cannot tell", "no two loads"),
    ("5.7.5-p1", "prefix-cache", {"tables.0.rows.1.0": "Cache (Lukewarm)"}, "not met", "lacks Cache (Cold)"),
    ("5.8.2-1", "memory-pressure", {f"{S}.plan.workload.name": "conversation"}, "not met", "conversation"),
    ("5.8.2-p1", "memory-pressure", {"params.levels": [50, 100]}, "not met", "none is above it"),
    ("5.8.2-p1", "memory-pressure", {"params.levels": []}, "cannot tell", "levels"),
    ("5.8.3-p1", "memory-pressure", {"measurements.capacity_source": "given"}, "cannot tell", "given"),
    ("5.8.3-p2", "memory-pressure", {"steps.2.result.window.seconds": 30.0}, "not met", "30.0 s, 120 s"),
    ("5.8.5-p1", "memory-pressure", WITHOUT_TABLES, "not met", "Table 11"),
    ("5.9.2-1", "long-context", {f"{S}.plan.workload.name": "synthetic-uniform"}, "not met", "long-context"),
    ("5.9.2-1", "long-context", {f"{S}.plan.workload": DESCRIBED}, "met", "long-context-uniform"),
    ("5.9.2-p1", "long-context", {"params.output_tokens": 16}, "not met", "answers of 16 tokens"),
    ("5.9.2-p1", "long-context", {"params": {}}, "cannot tell", "length of answers"),
    ("5.9.2-p2", "long-context", {}, "met", "1 at a time"),
    ("5.9.2-p2", "long-context", {"params.concurrency": 8}, "not met", "8 at a time, 4 at most"),
    ("5.9.2-p2", "long-context", {"params": {}}, "cannot tell", "at a time"),
    ("5.9.2-p3", "long-context", {"steps.2.result.n": 5}, "not met", "2048-tokens: 5 requests, 20 needed"),
    ("5.9.2-p3", "long-context", {"steps.1.result.n": 5}, "met", "20 requests"),
    ("5.9.3-p1", "long-context", {"configuration.Warm-up": GONE}, "cannot tell", "warmed up"),
    ("5.9.5-p1", "long-context", WITHOUT_TABLES, "not met", "Table 12"),
    ("5.10.2-1", "guardrail-overhead", {f"{S}.plan.workload.name": "ours"}, "not met", "ours"),
    ("5.10.2-p1", "guardrail-overhead", {"steps.*.arm": "full"}, "not met", "1 configurations: full"),
    ("5.10.2-p2", "guardrail-overhead", {"params.levels": [25.0, 75.0]}, "not met", "without 50 %"),
    ("5.10.2-p2", "guardrail-overhead", {"params": {}}, "cannot tell", "levels"),
    ("5.10.5-p1", "guardrail-overhead", {"tables.0.heads.4": "E2E P95"}, "not met", "E2E P99"),
    ("5.10.5-p2", "guardrail-overhead", {"tables": []}, "not met", "Table 14"),
]
CASES = [*SETUP, *PROCEDURES]
MISSED = {"not met", "cannot tell"}


def bound_by(row: Requirement) -> tuple[str, ...]:
    return row.binds or tuple(TESTS)


@pytest.mark.parametrize(
    ("id", "test", "changes", "status", "words"),
    CASES,
    ids=[f"{case[0]} {case[3]} {i}" for i, case in enumerate(CASES)],
)
def test_a_demand_is_judged_by_the_evidence(
    id: str, test: str, changes: dict[str, Any], status: Status, words: str
) -> None:
    row = BY_ID[id]
    assert test in bound_by(row)
    verdict = row.check(changed(report_of_test(test), changes))
    assert verdict.status == status, verdict
    assert words in verdict.evidence


@pytest.mark.parametrize("row", ONE_TEST, ids=lambda row: row.id)
def test_an_empty_report_meets_nothing(row: Requirement) -> None:
    for report in ({}, {"test": bound_by(row)[0], "steps": []}):
        assert row.check(report).status != "met"


def test_each_demand_is_seen_met_and_missed() -> None:
    complete = {test: report_of_test(test) for test in TESTS}
    met = {row.id for row in ONE_TEST for test in bound_by(row) if row.check(complete[test]).status == "met"}
    met |= {id for id, _, _, status, _ in CASES if status == "met"}
    missed = {id for id, _, _, status, _ in CASES if status in MISSED}
    assert {row.id for row in ONE_TEST} - met == set()
    # Nobody misses what he may do, and an adjustment that is hidden shows nowhere.
    allowed = {row.id for row in ONE_TEST if row.level == "MAY"} | {"4.2.3-3", "4.7.3-3"}
    lacking = {row.id for row in ONE_TEST} - missed - allowed
    assert lacking == {"4.2.3-3", "4.7.3-3"} - allowed


def test_the_load_of_a_search_for_capacity_is_none_of_the_levels() -> None:
    report = report_of_test("tradeoff")
    assert report["steps"][0]["name"].startswith("capacity/")
    for id in ("5.3.2-1", "5.3.2-p1"):
        assert BY_ID[id].check(report).status == "met"
