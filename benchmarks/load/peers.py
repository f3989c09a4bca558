"""The load generators: how each is told what to do, and where it says what it saw.

Each is asked in its own words for the same load, and what it reports is taken from its own result file, in
ms. Who is not installed is skipped with the reason.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cases import PROMPT_TOKENS, TTFT_MS, Case
from install import AIPERF_ELSEWHERE, BUILD, TOKENIZER, python_of
from truth_log import quantile

HERE = Path(__file__).resolve().parent
SSE_LOAD = HERE.parent / "relay/build/sse_load"
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "NO_PROXY": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# AIPerf 0.13 takes no folder for a tokenizer under HF_HUB_OFFLINE: the hub is where nobody listens instead.
AIPERF_OFFLINE = OFFLINE | {"HF_HUB_OFFLINE": "", "HF_ENDPOINT": "http://127.0.0.1:9"}

CHUNK_GAPS = "gaps between chunks"
REQUEST_MEANS = "a mean per request"


@dataclass(frozen=True, slots=True)
class Job:
    """One run of one tool. What it writes goes into `folder`."""

    url: str
    case: Case
    seed: int
    folder: Path
    llmtap: tuple[str, ...] = ()  # more options for llmtap


@dataclass(frozen=True, slots=True)
class Command:
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """What a tool says: times in ms, with mean, p50 and p99.

    `schedule_ns`: when its plan wanted requests out, in order, where the plan can be known.
    """

    requests: int
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    more: dict[str, Any] = field(default_factory=dict)
    schedule_ns: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """`itl` says what it calls inter-token latency. `starts_s`: how long it may take to get under way."""

    name: str
    itl: str
    find: Callable[[], str | None]  # its reason to be absent, None if it is there
    version: Callable[[], str]
    command: Callable[[Job], Command]
    read: Callable[[Job, str], Report]  # the second: its stdout
    open_loop: bool = True
    statuses: tuple[int, ...] = (0,)  # of a run that gave a result
    starts_s: float = 60


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def _installed(name: str) -> Callable[[], str | None]:
    return lambda: None if python_of(name).exists() else f"not installed (--install {name})"


def _version(folder: Path, package: str) -> Callable[[], str]:
    def find() -> str:
        (info,) = folder.glob(f"lib/python*/site-packages/{package}-*.dist-info")
        return info.name.removesuffix(".dist-info").rpartition("-")[2]

    return find


def _in(name: str, package: str) -> Callable[[], str]:
    return _version(BUILD / name, package)


def _client_version(name: str) -> Callable[[], str]:
    return lambda: (BUILD / name / "client/version").read_text()


# ---------------------------------------------------------------- llmtap


def _llmtap(job: Job) -> Command:
    case = job.case
    rows = (f"2023-11-16 18:15:4{i},{PROMPT_TOKENS},{case.tokens}" for i in range(2))
    trace = job.folder / "trace.csv"  # in Azure's form, and repeated; its times don't count
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    load = (
        ["--closed", str(case.streams)]
        if case.streams
        else ["--arrivals", "poisson", "--rate", str(case.rate_rps)]
    )
    argv = [sys.executable, "-m", "llmtap.cli", "replay", str(trace), "--target", job.url, *load]
    argv += ["--requests", str(case.requests), "--seed", str(job.seed), "--model", "sim-model"]
    argv += ["--metrics", "none", "--json", str(job.folder / "result.json"), *job.llmtap]
    return Command(argv, {"PYTHONPATH": str(HERE.parents[1])})


def _read_llmtap(job: Job, stdout: str) -> Report:
    told = _json(job.folder / "result.json")

    def ms(name: str) -> dict[str, float]:
        return {q: told["metrics"][name][q] * 1e3 for q in ("mean", "p50", "p99")}

    late = told["dispatch_lateness"] or {}
    more = {
        "lateness_ms": {q: late[q] * 1e3 for q in ("p50", "p99", "max") if late.get(q) is not None},
        "uncertainty_ms": told["uncertainty"] * 1e3,
        "valid": told["verdict"]["valid"],
        "findings": [finding["says"] for finding in told["verdict"]["findings"]],
        "itl_option": told["metrics"]["itl"]["option"],
        "chunk_gaps_ms": ms("tbc"),
        "sender": told["sender"],
    }
    return Report(told["n"], ms("ttft"), ms("itl"), more, _schedule(job.case, job.seed, told["load"]))


def _schedule(case: Case, seed: int, load: dict[str, Any]) -> list[int] | None:
    """When the plan wanted each request out, drawn here once more; None where that is another plan."""
    if not case.rate_rps:
        return None
    from llmtap.workload.arrivals import parse_arrivals

    endless = parse_arrivals("poisson", rate_rps=case.rate_rps, seed=seed)
    planned = list(itertools.islice(endless, case.requests))
    rate_rps = (case.requests - 1) / (planned[-1] - planned[0]) * 1e9
    same = load["planned_rps"] and math.isclose(load["planned_rps"], rate_rps)
    return planned if same else None


def _llmtap_there() -> str | None:
    try:
        import llmtap.load.replay.perform  # noqa: F401
    except ImportError as exc:
        return f"{exc}: run this with the interpreter llmtap is installed for"
    return None


# ---------------------------------------------------------------- the C reference


def _sse_load(job: Job) -> Command:
    case = job.case
    load = (
        ["--concurrency", str(case.streams), "--in-step"] if case.streams else ["--rate", str(case.rate_rps)]
    )
    # Without usage: it would count that event, which comes at once, as a token.
    argv = [str(SSE_LOAD), "--url", f"{job.url}/v1/chat/completions", *load]
    argv += ["--requests", str(case.requests), "--ttft-ms", str(TTFT_MS), "--itl-ms", "20"]
    argv += ["--tokens", str(case.tokens), "--tokens-per-event", str(case.tokens_per_event)]
    return Command([*argv, "--drain-s", "0", "--seed", str(job.seed)])


def _read_sse_load(job: Job, stdout: str) -> Report:
    told = json.loads(stdout)

    def ms(name: str) -> dict[str, float]:
        return {q: told[name][q] / 1e3 for q in ("mean", "p50", "p99")}

    more = {"event_latency_us": told["latency_us"], "shed": told["shed"], "whole": told["integrity"]["ok"]}
    return Report(told["requests_total"], ms("first_event_us"), ms("gap_us"), more)


# ---------------------------------------------------------------- vLLM, SGLang


def _vllm(job: Job) -> Command:
    case = job.case
    load = (
        ["--max-concurrency", str(case.streams)] if case.streams else ["--request-rate", str(case.rate_rps)]
    )
    argv = [str(python_of("vllm")), str(HERE / "engineless.py"), "vllm", "--backend", "openai-chat"]
    argv += ["--base-url", job.url, "--endpoint", "/v1/chat/completions", "--model", "sim-model"]
    argv += ["--tokenizer", str(TOKENIZER), "--dataset-name", "random"]
    argv += [
        "--random-input-len",
        str(PROMPT_TOKENS),
        "--random-output-len",
        str(case.tokens),
        "--ignore-eos",
    ]
    argv += ["--num-prompts", str(case.requests), *load, "--seed", str(job.seed), "--disable-tqdm"]
    argv += ["--ready-check-timeout-sec", "0", "--metric-percentiles", "50,99", "--save-result"]
    return Command([*argv, "--result-dir", str(job.folder), "--result-filename", "result.json"], OFFLINE)


def _read_bench(path: Path) -> Report:
    """SGLang's clients took over vLLM's names."""
    told = _json(path)

    def ms(name: str) -> dict[str, float]:
        return {"mean": told[f"mean_{name}"], "p50": told[f"median_{name}"], "p99": told[f"p99_{name}"]}

    return Report(told["completed"], ms("ttft_ms"), ms("itl_ms"))


def _sglang(client: str) -> Callable[[Job], Command]:
    def command(job: Job) -> Command:
        case = job.case
        load = (
            ["--max-concurrency", str(case.streams)]
            if case.streams
            else ["--request-rate", str(case.rate_rps)]
        )
        argv = [str(python_of("sglang")), str(HERE / "engineless.py"), client, "--backend", "sglang-oai-chat"]
        argv += ["--base-url", job.url, "--model", "sim-model", "--tokenizer", str(TOKENIZER)]
        argv += ["--dataset-name", "random-ids", "--random-input-len", str(PROMPT_TOKENS)]
        argv += ["--random-output-len", str(case.tokens), "--random-range-ratio", "1"]
        argv += ["--num-prompts", str(case.requests), *load, "--seed", str(job.seed), "--disable-tqdm"]
        argv += ["--warmup-requests", "0", "--ready-check-timeout-sec", "0"]
        return Command([*argv, "--output-file", str(job.folder / "result.json")], OFFLINE)

    return command


# ---------------------------------------------------------------- AIPerf


def _aiperf_home() -> Path:
    own = BUILD / "aiperf"
    return own if own.exists() else AIPERF_ELSEWHERE


def _aiperf(job: Job) -> Command:
    case = job.case
    load = (
        ["--concurrency", str(case.streams)]
        if case.streams
        else ["--request-rate", str(case.rate_rps), "--arrival-pattern", "poisson"]
    )
    argv = [str(_aiperf_home() / "bin/aiperf"), "profile", "--model", "sim-model", "--url", job.url]
    argv += ["--endpoint-type", "chat", "--streaming", "--tokenizer", str(TOKENIZER), *load]
    argv += ["--request-count", str(case.requests), "--random-seed", str(job.seed)]
    argv += ["--isl", str(PROMPT_TOKENS), "--osl", str(case.tokens), "--extra-inputs", "ignore_eos:true"]
    argv += ["--no-gpu-telemetry", "--no-server-metrics", "--ui", "none"]
    return Command([*argv, "--artifact-dir", str(job.folder / "aiperf")], AIPERF_OFFLINE)


def _read_aiperf(job: Job, stdout: str) -> Report:
    told = _json(job.folder / "aiperf/profile_export_aiperf.json")

    def ms(name: str) -> dict[str, float]:
        return {"mean": told[name]["avg"], "p50": told[name]["p50"], "p99": told[name]["p99"]}

    more = {"chunk_gaps_ms": ms("inter_chunk_latency")}  # in this file, and not on the console
    return Report(
        int(told["request_count"]["avg"]), ms("time_to_first_token"), ms("inter_token_latency"), more
    )


# ---------------------------------------------------------------- guidellm


def _guidellm(job: Job) -> Command:
    case = job.case
    load = f"kind=concurrent,streams={case.streams}" if case.streams else f"kind=poisson,rate={case.rate_rps}"
    argv = [str(BUILD / "guidellm/bin/guidellm"), "run", "--disable-console", "--profile", load]
    argv += ["--backend", f"kind=openai_http,target={job.url},model=sim-model"]
    argv += ["--tokenizer", f"kind=hf_auto,model={TOKENIZER}"]
    argv += ["--constraint", f"kind=max_requests,count={case.requests}"]
    argv += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={case.tokens}"]
    return Command([*argv, "--output", f"kind=json,path={job.folder / 'result.json'}"], OFFLINE)


def _read_guidellm(job: Job, stdout: str) -> Report:
    (told,) = _json(job.folder / "result.json")["benchmarks"]
    metrics = told["metrics"]

    def ms(name: str) -> dict[str, float]:
        of = metrics[name]["successful"]
        return {"mean": of["mean"], "p50": of["percentiles"]["p50"], "p99": of["percentiles"]["p99"]}

    requests = metrics["request_totals"]["successful"]
    return Report(requests, ms("time_to_first_token_ms"), ms("inter_token_latency_ms"))


# ---------------------------------------------------------------- locust


def _locust(job: Job) -> Command:
    case = job.case
    assert case.streams
    argv = [str(BUILD / "locust/bin/locust"), "-f", str(HERE / "locust_user.py"), "--headless"]
    argv += ["--host", job.url, "-u", str(case.streams), "-r", str(case.streams), "--only-summary"]
    env = {
        "LOAD_USERS": str(case.streams),
        "LOAD_TURNS": str(case.requests // case.streams),
        "LOAD_TOKENS": str(case.tokens),
        "LOAD_RESULT": str(job.folder / "result.json"),
    }
    return Command(argv, OFFLINE | env)


def _read_locust(job: Job, stdout: str) -> Report:
    told = _json(job.folder / "result.json")

    def ms(name: str) -> dict[str, float]:
        values = told[name]
        return {
            "mean": sum(values) / len(values),
            "p50": quantile(values, 0.5),
            "p99": quantile(values, 0.99),
        }

    return Report(len(told["ttft_ms"]), ms("ttft_ms"), ms("itl_ms"))


def _llmtap_version() -> str:
    from importlib.metadata import version

    return version("llmtap")


def _result(job: Job, stdout: str) -> Report:
    return _read_bench(job.folder / "result.json")


TOOLS = [
    Tool(
        "llmtap",
        "gaps between chunks, spread over a chunk's tokens where these are known",
        _llmtap_there,
        _llmtap_version,
        _llmtap,
        _read_llmtap,
        statuses=(0, 1, 4),  # 1: requests failed; 4: by its own verdict a figure is not valid
    ),
    Tool("sse_load (C)", CHUNK_GAPS, lambda: None, lambda: "of here", _sse_load, _read_sse_load, starts_s=10),
    Tool("vllm bench serve", CHUNK_GAPS, _installed("vllm"), _client_version("vllm"), _vllm, _result),
    Tool(
        "sglang serving",
        CHUNK_GAPS,
        _installed("sglang"),
        _client_version("sglang"),
        _sglang("sglang"),
        _result,
    ),
    Tool(
        "sglang Rust",
        CHUNK_GAPS,
        _installed("sglang"),
        _client_version("sglang"),
        _sglang("sglang-rust"),
        _result,
    ),
    Tool(
        "aiperf",
        REQUEST_MEANS,
        lambda: None if (_aiperf_home() / "bin/aiperf").exists() else "not installed (--install aiperf)",
        lambda: _version(_aiperf_home(), "aiperf")(),
        _aiperf,
        _read_aiperf,
        starts_s=120,
    ),
    Tool(
        "guidellm",
        REQUEST_MEANS,
        _installed("guidellm"),
        _in("guidellm", "guidellm"),
        _guidellm,
        _read_guidellm,
        starts_s=180,
    ),
    Tool(
        "locust",
        "what the user's code takes, here gaps between chunks",
        _installed("locust"),
        _in("locust", "locust"),
        _locust,
        _read_locust,
        open_loop=False,
    ),
]
