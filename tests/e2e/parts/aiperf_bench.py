"""AIPerf as a client: what it reports of `llmtap sim serve`, beside what the server says it did.

AIPerf sends an X-Request-Id of its own with each request and writes a line for each, so that every figure can
be held against the truth of the same request.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

from parts.script import ROOT
from parts.servers import run_to_end

__all__ = ["check", "run", "table"]

REQUESTS = 100
CONCURRENCY = 8
INPUT_TOKENS = 64
OUTPUT_TOKENS = 32
RUN_S_MAX = 240  # most of it is AIPerf getting under way: 15 s here

# Nothing is fetched: the tokenizer is a folder, and the hub an address where nobody listens. HF_HUB_OFFLINE
# is empty, because under it AIPerf 0.13 takes no folder.
OFFLINE = {
    "HF_ENDPOINT": "http://127.0.0.1:9",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "",
    "NO_PROXY": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
}

Json = dict[str, Any]


def run(base_url: str, tokenizer: Path, home: Path, logs: Path) -> Json:
    """What AIPerf reports: its version, its totals, and its figures by request id."""
    folder = home / "aiperf"
    shutil.rmtree(folder, ignore_errors=True)
    argv = [str(ROOT / "bench/bin/aiperf"), "profile", "--model", "sim", "--url", base_url]
    argv += ["--endpoint-type", "chat", "--streaming", "--tokenizer", str(tokenizer)]
    argv += ["--request-count", str(REQUESTS), "--concurrency", str(CONCURRENCY), "--random-seed", "1"]
    argv += ["--isl", str(INPUT_TOKENS), "--osl", str(OUTPUT_TOKENS), "--extra-inputs", "ignore_eos:true"]
    argv += ["--no-gpu-telemetry", "--ui", "none", "--artifact-dir", str(folder)]
    run_to_end("aiperf", argv, logs=logs, env=OFFLINE, cwd=home, limit_s=RUN_S_MAX)
    lines = [json.loads(line) for line in (folder / "profile_export.jsonl").read_text().splitlines()]
    totals = json.loads((folder / "profile_export_aiperf.json").read_text())
    return {
        "version": totals["aiperf_version"],
        "totals": totals,
        "requests": {line["metadata"]["x_request_id"]: line["metrics"] for line in lines},
    }


# ---------------------------------------------------------------- against the truth

TIMES = {
    "time_to_first_token": ("TTFT, ms", lambda truth: truth["sent_ns"][0][0] - truth["accepted_ns"]),
    "inter_token_latency": ("ITL, mean of a request, ms", lambda truth: mean_gap_ns(truth["sent_ns"][0])),
    "request_latency": ("whole request, ms", lambda truth: truth["sent_ns"][0][-1] - truth["accepted_ns"]),
}
COUNTS = {
    "input_sequence_length": ("tokens of prompts", lambda truth: truth["prompt_tokens"]),
    "usage_prompt_tokens": ("the same, by usage", lambda truth: truth["prompt_tokens"]),
    "output_sequence_length": ("tokens of answers", lambda truth: len(truth["sent_ns"][0])),
    "usage_completion_tokens": ("the same, by usage", lambda truth: len(truth["sent_ns"][0])),
}


def mean_gap_ns(stamps: list[int]) -> float:
    return (stamps[-1] - stamps[0]) / (len(stamps) - 1)


def check(bench: Json, truths: dict[str, list[Json]]) -> Iterator[str]:
    """What is wrong, request by request; the table's lines are put in `bench["lines"]`.

    Counts have to be equal. No time may be shorter than the truth, except of what lies between two tokens:
    there the network's jitter goes both ways.
    """
    bench["lines"] = []
    requests, totals = bench["requests"], bench["totals"]
    if len(requests) != REQUESTS or totals["request_error_rate"]["avg"]:
        yield f"{len(requests)} of {REQUESTS} requests, {totals['request_error_rate']['avg']} % failed"
    if unknown := [name for name in requests if len(truths.get(name, [])) != 1]:
        yield f"{len(unknown)} requests that the server has not had, or more than once, such as {unknown[0]}"
        return
    for name, (told, of) in COUNTS.items():
        reported = [requests[i][name]["value"] for i in requests]
        true = [of(truths[i][0]) for i in requests]
        if reported != true:
            differing = sum(a != b for a, b in zip(reported, true, strict=True))
            yield f"{name} differs from the truth in {differing} requests"
        bench["lines"].append({"of": told, "reported": sum(reported), "true": sum(true)})
    for name, (told, of) in TIMES.items():
        true_ms = [of(truths[i][0]) / 1e6 for i in requests]
        more_ms = [requests[i][name]["value"] - true for i, true in zip(requests, true_ms, strict=True)]
        if name != "inter_token_latency" and min(more_ms) < 0:
            yield f"{name} is shorter than the truth, by up to {-min(more_ms):.3f} ms"
        bench["lines"].append({
            "of": told,
            "reported": [totals[name][q] for q in ("avg", "p50", "max")],
            "true": [fmean(true_ms), median(true_ms), max(true_ms)],
            "more": [fmean(more_ms), median(more_ms), max(more_ms)],
        })  # fmt: skip


def table(bench: Json) -> str:
    """Reported and true side by side; `more`: reported minus true, request by request."""
    heads = ("AIPerf", "p50", "max", "truth", "p50", "max", "more", "p50", "max")
    lines = [
        f"AIPerf {bench['version']}: {len(bench['requests'])} streams, {CONCURRENCY} at a time",
        ("{:28}" + 3 * " {:>9} {:>8} {:>8}").format("", *heads),
    ]
    for line in bench["lines"]:
        if isinstance(line["reported"], list):
            figures = [f"{value:.2f}" for side in ("reported", "true", "more") for value in line[side]]
            lines.append(("{:28}" + 3 * " {:>9} {:>8} {:>8}").format(line["of"], *figures))
        else:
            lines.append("{:28} {:>9} {:17} {:>9}".format(line["of"], line["reported"], "", line["true"]))
    return "\n".join(lines)
