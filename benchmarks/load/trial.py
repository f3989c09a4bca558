"""One trial: a server of its own, one tool on CPU 0, and both sides' figures beside each other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import instrument  # benchmarks/relay's
from cases import Case
from peers import Job, Report, Tool
from tree import Tree
from truth_log import Log, read_log, truth

from llmtap.metrics.statistics import arrival_figures, punctuality

END_WITHIN_S = 5
LATE = (
    4  # a tool may take so many times as long as one that is in time, and then as long as it takes to start
)
TAIL_CHARS = 1_500

Json = dict[str, Any]


class Failed(Exception):
    """The tool gave no result; holds why."""


def trial(
    tool: Tool,
    case: Case,
    *,
    seed: int,
    real_time: bool,
    llmtap: tuple[str, ...] = (),
    keep: Path | None = None,
) -> Json:
    """Figures of both sides, or {"failed": why}. `keep`: a folder for what the tool and the server wrote."""
    with tempfile.TemporaryDirectory(prefix="load-") as name:
        folder = Path(name)
        log = folder / "sent.csv"
        try:
            with instrument.server(real_time, *case.server(), "--schedule-log", str(log)) as port:
                job = Job(f"http://127.0.0.1:{port}", case, seed, folder, llmtap)
                stdout, tree, rusage_s = _run(tool, job)
                server = _stats(job.url)
            report = tool.read(job, stdout)
            return _compare(case, report, read_log(log, case), tree, rusage_s, server)
        except (Failed, OSError, ValueError, KeyError, json.JSONDecodeError) as exc:
            said = folder / "stderr"
            return {"failed": f"{type(exc).__name__}: {exc}", "stderr": _tail(said) if said.exists() else ""}
        finally:
            if keep:
                shutil.copytree(folder, keep, dirs_exist_ok=True)


def _run(tool: Tool, job: Job) -> tuple[str, Tree, float]:
    """Stdout, the tree while it lived, and CPU seconds by wait4: of the process and all it waited for."""
    command = tool.command(job)
    within_s = tool.starts_s + LATE * job.case.load_s
    out, err = job.folder / "stdout", job.folder / "stderr"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            command.argv,
            stdout=stdout,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            env=os.environ | command.env,
            cwd=job.folder,
            process_group=0,  # no session of its own, see Tree.sessions_max
            preexec_fn=lambda: os.sched_setaffinity(0, {instrument.TARGET_CPU}),
        )
    with Tree(process.pid, instrument.TARGET_CPU) as tree:
        status, rusage_s = _wait(process, within_s, tree)
    if status is None:
        raise Failed(f"not over after {within_s:.0f} s")
    if status not in tool.statuses:
        raise Failed(f"ended with {status}")
    return out.read_text(), tree, rusage_s


def _wait(process: subprocess.Popen[Any], within_s: float, tree: Tree) -> tuple[int | None, float]:
    """Exit status, None where it took too long; nothing that it started is left behind."""
    latest = time.monotonic() + within_s
    over = late = False
    status, rusage_s = 0, 0.0
    while not over:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        over = pid == process.pid
        if over:
            rusage_s = usage.ru_utime + usage.ru_stime
            process.returncode = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > latest:
            # Gently first: what a tool has in shared memory or on disk it shall clear away.
            _signal(process.pid, tree, signal.SIGKILL if late else signal.SIGTERM)
            late, latest = True, time.monotonic() + END_WITHIN_S
        else:
            time.sleep(0.02)
    _signal(process.pid, tree, signal.SIGKILL)  # whoever outlived it
    return None if late else process.returncode, rusage_s


def _signal(group: int, tree: Tree, number: int) -> None:
    """To the tool's process group, and to those of its processes that left it."""
    for send, whom in ((os.killpg, group), *((os.kill, pid) for pid in tree.members - {group})):
        try:
            send(whom, number)
        except ProcessLookupError:
            pass


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-TAIL_CHARS:]


def _stats(url: str) -> Json:
    with urllib.request.urlopen(f"{url}/sim/stats", timeout=10) as answer:
        stats: Json = json.load(answer)
    return stats


def _compare(case: Case, report: Report, log: Log, tree: Tree, rusage_s: float, server: Json) -> Json:
    # What a tool asked beforehand, to see whether somebody is there, is none of its load.
    extra = max(0, len(log.read_ns) - case.requests)
    load = Log(log.read_ns[extra:], log.sent_ns[extra:])
    whole = sum(len(stamps) == case.events for stamps in load.sent_ns)
    true = truth(load)
    tokens = whole * case.tokens
    arrivals = arrival_figures(load.read_ns, rate_rps=case.rate_rps)
    cpu_s = max(rusage_s, tree.cpu_s)
    load_cpu_s = tree.cpu_s_between(load.begin_ns, load.end_ns)
    return {
        "asked_requests": case.requests,
        "seen_requests": len(load.read_ns),
        "seen_before": extra,
        "seen_whole": whole,
        "reported_requests": report.requests,
        "truth": true,
        "reported": {"ttft_ms": report.ttft_ms, "itl_ms": report.itl_ms},
        "more": report.more,
        "error": {
            "ttft_p50_ms": report.ttft_ms["p50"] - true["ttft_ms"]["p50"],
            "ttft_p99_ms": report.ttft_ms["p99"] - true["ttft_ms"]["p99"],
            "itl_p99_ms": report.itl_ms["p99"] - true["itl_ms"]["p99"],
        },
        "rps": whole / ((load.end_ns - load.begin_ns) / 1e9),
        "arrivals": arrivals.to_dict(),
        "of_schedule": _of_schedule(report.schedule_ns, load.read_ns),
        "achieved": arrivals.rate_rps / case.rate_rps if case.rate_rps and arrivals.rate_rps else None,
        "cpu_s_per_1k_tokens": {"load": load_cpu_s / tokens * 1e3, "life": cpu_s / tokens * 1e3},
        "cpu_s": {"load": load_cpu_s, "life": cpu_s},
        "others_share": tree.others_share(load.begin_ns, load.end_ns),
        "rss_mb": tree.rss_bytes_max / 1e6,
        "processes": tree.processes_max,
        "in_other_sessions": tree.sessions_max,
        "server": {"late_us": server["late_us"], "abandoned": server["streams_abandoned"]},
    }


def _of_schedule(planned_ns: list[int] | None, read_ns: list[int]) -> Json | None:
    """What the server saw of a plan: rate achieved / asked, and lateness beyond that of the most punctual.

    The two clocks have no common start, so a lateness that all share is not seen here.
    """
    if not planned_ns or len(planned_ns) != len(read_ns):
        return None
    first = min(read - planned for planned, read in zip(planned_ns, read_ns, strict=True))
    of = punctuality(planned_ns, [read - first for read in read_ns])
    return {"ratio": of.ratio, "late_ms": {name: ns / 1e6 for name, ns in of.late_ns.items()}}
