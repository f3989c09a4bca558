#!/usr/bin/env python3
"""Are all figures right, or marked as not valid? A server of known schedule with good and bad habits.

`truth_server.py` answers in the modes of its table and logs when it sent what. Each tool sends 40 requests
at 10 a second; its figures are compared with the log. A figure of llmtap is right if it is within 1 % or 1
ms, if its verdict says that it is not valid, or that it is doubtful by at least this error. AIPerf and
guidellm are compared where they are installed (`--install aiperf guidellm`). See README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import install  # noqa: E402
import peers  # noqa: E402
from truth_server import MODES  # noqa: E402

REQUESTS, RATE_RPS, TIMEOUT_S = 40, 10, 3
SLO_TTFT_S = 0.15
SHARE_MAX, ERROR_MAX_MS = 0.01, 1.0
RUN_S = 120
Figures = dict[str, "float | None"]
"""By the names of FIGURES: ms, counts, requests/s. None: the tool does not report it."""
FIGURES = {
    "ended well": "",
    "failed": "",
    "output tokens": "",
    "sent req/s": "",
    "TTFT p50": "ms",
    "TTFT p99": "ms",
    "TPOT p50": "ms",
    "E2E p50": "ms",
    "E2E p99": "ms",
    "TTFT met": "",
}
OF_VERDICT = {
    "output tokens": "tokens",
    "sent req/s": "load",
    "TTFT p50": "ttft",
    "TTFT p99": "ttft",
    "TPOT p50": "tpot",
    "E2E p50": "e2e",
    "E2E p99": "e2e",
    "TTFT met": "goodput",
}
"""The figure of llmtap's verdict that a figure belongs to."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--only", nargs="*", default=list(TOOLS), choices=list(TOOLS))
    parser.add_argument("--install", nargs="*", default=[], choices=["aiperf", "guidellm"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name in options.install:
        install.INSTALLERS[name]()
    if options.install:
        install.tokenizer()
    tools = {name: tool for name, tool in TOOLS.items() if name in options.only}
    for name in [name for name, tool in tools.items() if not tool.there()]:
        print(f"{name}: not installed (--install {name})", file=sys.stderr)
        del tools[name]
    rows, wrong = [], 0
    print("| mode | figure | truth |", " | ".join(tools), "|")
    print("| --- | --- | --: |", " | ".join("--:" for _ in tools), "|")
    for mode in options.modes:
        trials = {name: trial(mode, tool) for name, tool in tools.items()}
        for figure in FIGURES:
            cells = []
            for name, (truth, figures, states) in trials.items():
                judged = states.get(OF_VERDICT.get(figure, ""))
                cell, right = compared(truth[figure], figures.get(figure), judged, figure)
                wrong += not right and name == "llmtap"
                cells.append(cell)
                rows.append(
                    {
                        "mode": mode,
                        "figure": figure,
                        "tool": name,
                        "truth": truth[figure],
                        "measured": figures.get(figure),
                        "right": right,
                    }
                )
            shown = next(iter(trials.values()))[0][figure]
            print(f"| {mode} | {figure} | {number(shown)} |", " | ".join(cells), "|", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    print(
        f"{wrong} figures of llmtap are wrong and not marked" if wrong else "every figure of llmtap is right"
    )
    return 1 if wrong else 0


@dataclass(frozen=True, slots=True)
class Tool:
    there: Callable[[], bool]
    command: Callable[[str, str, Path], tuple[list[str], Mapping[str, str]]]
    """Arguments and environment from mode, URL and folder."""
    read: Callable[[Path], tuple[Figures, dict[str, Any]]]
    """Figures, and those of the tool's verdict."""


def trial(mode: str, tool: Tool) -> tuple[Figures, Figures, dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="truth-") as name:
        folder = Path(name)
        log = folder / "server.log"
        server = subprocess.Popen(
            [sys.executable, str(HERE / "truth_server.py"), mode, str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None and server.stdin is not None
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
            argv, env = tool.command(mode, url, folder)
            figures: Figures = {}
            states: dict[str, Any] = {}
            try:
                done = subprocess.run(
                    argv, env=os.environ | env, capture_output=True, text=True, timeout=RUN_S
                )
                (folder / "tool.log").write_text(done.stdout + done.stderr)
                figures, states = tool.read(folder)
            except subprocess.TimeoutExpired:
                print(f"{mode}: {argv[0]} did not end in {RUN_S} s", file=sys.stderr)
            except (OSError, KeyError, ValueError, TypeError) as exc:
                print(f"{mode}: no result ({exc!r}): {done.stderr[-400:]}", file=sys.stderr)
            server.stdin.close()
            server.wait(10)
        finally:
            server.kill()
            server.wait()
        return truth_of([json.loads(line) for line in log.read_text().splitlines()], mode), figures, states


def truth_of(entries: Sequence[Mapping[str, Any]], mode: str) -> Figures:
    """Return the figures by the log of the server. A refused request counts as part of its retry."""
    asked = [e for e in entries if e["outcome"] != "429"]
    well = [e for e in asked if e["outcome"] == "complete"]
    streams = [e for e in asked if e["sent"]]
    ttft = [(e["sent"][0] - e["read"]) / 1e6 for e in streams]
    tpot = [(e["sent"][-1] - e["sent"][0]) / 1e6 / (sum(e["tokens"]) - 1) for e in streams]
    e2e = [(e["end"] - e["read"]) / 1e6 for e in well]
    first = sorted(e["read"] for e in entries)[:REQUESTS]
    met = [e for e in well if (e["sent"][0] - e["read"]) / 1e9 <= SLO_TTFT_S]
    late = EVERY_RETRIED if mode == "retry-after" else 0
    return {
        "ended well": len(well),
        "failed": len(asked) - len(well),
        "output tokens": sum(sum(e["tokens"]) for e in asked),
        "sent req/s": (len(first) - 1) / (first[-1] - first[0]) * 1e9 if mode != "retry-after" else RATE_RPS,
        "TTFT p50": quantile(ttft, 0.5),
        "TTFT p99": quantile(ttft, 0.99),
        "TPOT p50": quantile(tpot, 0.5),
        "E2E p50": quantile(e2e, 0.5),
        "E2E p99": quantile(e2e, 0.99),
        "TTFT met": len(met) - late,
    }


EVERY_RETRIED = REQUESTS // 4
"""Requests that were answered a second late: they met no TTFT from the schedule."""


def quantile(values: Sequence[float], q: float) -> float | None:
    """Return the quantile by linear interpolation, as the tools report it."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def compared(
    truth: float | None, measured: float | None, judged: Mapping[str, Any] | None, figure: str
) -> tuple[str, bool]:
    """Return the cell of a figure, and whether it is right, or marked as not valid or as so doubtful."""
    if measured is None:
        return "-", True
    if truth is None:
        return f"{number(measured)} (no truth)", False
    error = abs(measured - truth)
    right = error <= SHARE_MAX * abs(truth) or (FIGURES[figure] == "ms" and error <= ERROR_MAX_MS)
    if right:
        return number(measured), True
    state, known = ("valid", None) if judged is None else (judged["state"], judged["error"])
    covers = known is not None and (FIGURES[figure] != "ms" or error <= known * 1e3 + ERROR_MAX_MS)
    if state == "not_valid":
        return f"{number(measured)} (marked not valid)", True
    if state == "doubtful" and covers:
        return f"{number(measured)} (doubtful, error up to {known * 1e3:.3g} ms)", True
    return f"{number(measured)} **wrong**", False


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if value < 1_000 else f"{value:,.0f}"


# ---------------------------------------------------------------- the tools


def _llmtap(mode: str, url: str, folder: Path, *more: str) -> tuple[list[str], Mapping[str, str]]:
    trace = folder / "trace.csv"
    tokens = MODES[mode].tokens
    rows = [f"2023-11-16 18:15:{i:02},10,{tokens[i % len(tokens)]}" for i in range(REQUESTS)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    argv = [sys.executable, "-m", "llmtap.cli", "replay", str(trace), "--target", url, "--no-selftest"]
    argv += [
        "--arrivals",
        "uniform",
        "--rate",
        str(RATE_RPS),
        "--metrics",
        "none",
        "--timeout",
        f"{TIMEOUT_S}s",
    ]
    argv += ["--slo", f"ttft:{SLO_TTFT_S * 1e3:g}ms", "--json", str(folder / "result.json"), *more]
    argv += ["--retries", "2"] if mode == "retry-after" else []
    return argv, {"PYTHONPATH": str(HERE.parents[1])}


def _with_tokenizer(mode: str, url: str, folder: Path) -> tuple[list[str], Mapping[str, str]]:
    return _llmtap(mode, url, folder, "--tokenizer", "sim")


def _read_llmtap(folder: Path) -> tuple[Figures, dict[str, Any]]:
    report = json.loads((folder / "result.json").read_text())
    metrics, outcomes, goodput = report["metrics"], report["outcomes"], report["goodput"]

    def ms(name: str, figure: str) -> float | None:
        value = metrics[name][figure]
        return None if value is None else value * 1e3

    well = outcomes.get("complete", 0)
    figures: Figures = {
        "ended well": well,
        "failed": sum(outcomes.values()) - well,
        "output tokens": report["tokens"]["output"],
        "sent req/s": report["load"]["offered_rps"],
        "TTFT p50": ms("ttft", "p50"),
        "TTFT p99": ms("ttft", "p99"),
        "TPOT p50": ms("tpot", "p50"),
        "E2E p50": ms("e2e", "p50"),
        "E2E p99": ms("e2e", "p99"),
        "TTFT met": goodput["met"],
    }
    return figures, report["verdict"]["figures"]


def _aiperf(mode: str, url: str, folder: Path) -> tuple[list[str], Mapping[str, str]]:
    argv = [str(peers._aiperf_home() / "bin/aiperf"), "profile", "--model", "sim-model", "--url", url]
    argv += ["--endpoint-type", "chat", "--streaming", "--tokenizer", str(install.TOKENIZER)]
    argv += ["--request-rate", str(RATE_RPS), "--arrival-pattern", "constant"]
    argv += ["--request-count", str(REQUESTS), "--isl", "10", "--osl", str(MODES[mode].tokens[0])]
    argv += [
        "--request-timeout-seconds",
        str(TIMEOUT_S),
        "--goodput",
        f"time_to_first_token:{SLO_TTFT_S * 1e3:g}",
    ]
    argv += [
        "--no-gpu-telemetry",
        "--no-server-metrics",
        "--ui",
        "none",
        "--artifact-dir",
        str(folder / "aiperf"),
    ]
    return argv, peers.AIPERF_OFFLINE


def _read_aiperf(folder: Path) -> tuple[Figures, dict[str, Any]]:
    report = json.loads((folder / "aiperf/profile_export_aiperf.json").read_text())

    def value(name: str, figure: str = "avg") -> float | None:
        found = report.get(name) or {}
        return found.get(figure)

    return {
        "ended well": value("request_count"),
        "failed": value("error_request_count") or 0,
        "output tokens": value("total_output_tokens") or value("total_osl"),
        "sent req/s": None,
        "TTFT p50": value("time_to_first_token", "p50"),
        "TTFT p99": value("time_to_first_token", "p99"),
        "TPOT p50": value("inter_token_latency", "p50"),
        "E2E p50": value("request_latency", "p50"),
        "E2E p99": value("request_latency", "p99"),
        "TTFT met": value("good_request_count"),
    }, {}


def _guidellm(mode: str, url: str, folder: Path) -> tuple[list[str], Mapping[str, str]]:
    argv = [str(install.BUILD / "guidellm/bin/guidellm"), "run", "--disable-console"]
    argv += ["--profile", f"kind=constant,rate={RATE_RPS}"]
    argv += ["--backend", f"kind=openai_http,target={url},model=sim-model,timeout={TIMEOUT_S}"]
    argv += ["--tokenizer", f"kind=hf_auto,model={install.TOKENIZER}"]
    argv += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    argv += ["--data", f"kind=synthetic_text,prompt_tokens=10,output_tokens={MODES[mode].tokens[0]}"]
    return [*argv, "--output", f"kind=json,path={folder / 'result.json'}"], peers.OFFLINE


def _read_guidellm(folder: Path) -> tuple[Figures, dict[str, Any]]:
    (report,) = json.loads((folder / "result.json").read_text())["benchmarks"]
    metrics = report["metrics"]

    def ms(name: str, figure: str, factor: float = 1.0) -> float | None:
        return metrics[name]["successful"]["percentiles"][figure] * factor

    totals = metrics["request_totals"]
    return {
        "ended well": totals["successful"],
        "failed": totals["errored"],
        "output tokens": metrics["output_token_count"]["successful"].get("total_sum"),
        "sent req/s": None,
        "TTFT p50": ms("time_to_first_token_ms", "p50"),
        "TTFT p99": ms("time_to_first_token_ms", "p99"),
        "TPOT p50": ms("inter_token_latency_ms", "p50"),
        "E2E p50": ms("request_latency", "p50", 1e3),
        "E2E p99": ms("request_latency", "p99", 1e3),
        "TTFT met": None,
    }, {}


TOOLS = {
    "llmtap": Tool(lambda: True, _llmtap, _read_llmtap),
    "llmtap --tokenizer": Tool(lambda: True, _with_tokenizer, _read_llmtap),
    "aiperf": Tool(lambda: (peers._aiperf_home() / "bin/aiperf").exists(), _aiperf, _read_aiperf),
    "guidellm": Tool(lambda: (install.BUILD / "guidellm/bin/guidellm").exists(), _guidellm, _read_guidellm),
}


if __name__ == "__main__":
    sys.exit(main())
