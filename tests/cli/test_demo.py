"""`llmtap demo` as one types it: short ones, to their end and broken off; and no process is left."""

import json
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmtap.cli.demo import NOBODY, _problems, _Sent
from llmtap.load.workers.worker_handle import Progress
from llmtap.units import NS_PER_S, Duration
from llmtap.workload.requests import Requests

DEMO = [sys.executable, "-P", "-m", "llmtap.cli", "demo"]
ROOT = Path(__file__).parents[2]


def descendants(mark: str) -> list[int]:
    """Processes that were started by what has this mark in its environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"TEST_MARK={mark}".encode() in environ.split(b"\0"):
                found.append(int(entry.name))
    return found


@contextmanager
def running(*args: str, mark: str) -> Iterator["subprocess.Popen[str]"]:
    environ = {**os.environ, "TEST_MARK": mark}
    with subprocess.Popen(
        [*DEMO, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environ,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
    deadline = time.monotonic() + 60
    while left := descendants(mark):
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.1)


def test_a_short_demo_shows_all_there_is() -> None:
    with running("--requests", "12", "--seconds", "4s", "--json", mark="short") as process:
        out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    told = json.loads(out)
    sent = told["clients"]["n"]
    assert told["n"] == sent == 12
    assert set(told["outcomes"]) <= {"complete", "refused"}
    assert told["experiment"]["name"] == "guardrail"
    assert sum(arm["assigned"] for arm in told["experiment"]["arms"].values()) == sent
    assert told["goodput"]["objectives"] == "ttft:500ms tpot:50ms"
    first, _, dashboard = err.splitlines()[:3]
    assert first.startswith("engine ")
    assert dashboard.startswith("dashboard  http://127.0.0.1:")
    assert any("measured" in line for line in err.splitlines()), "figures before the end"


def short_answers(folder: Path) -> str:
    """A trace of twelve requests, two a second, of six tokens each."""
    trace = folder / "trace.jsonl"
    about = {"input_length": 40, "output_length": 6}
    rows = [{"timestamp": 500 * i, "hash_ids": [i], **about} for i in range(12)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(trace)


def test_a_trace_is_played_and_the_table_and_the_verdict_printed(tmp_path: Path) -> None:
    with running(short_answers(tmp_path), "--requests", "12", "--speed", "10", mark="trace") as process:
        out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    assert "TTFT" in out
    assert "ms, by arm" in out
    assert "experiment guardrail: running, dealt by request, control plain" in out
    assert "means are compared from 50 units an arm on" in out
    assert "the clients' view: TTFT p50" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_the_summary_so_far(number: signal.Signals) -> None:
    with running("--seconds", "5m", mark=f"stop-{number}") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "measured" in line:
                break
        process.send_signal(number)
        out, err = process.communicate(timeout=250)
    assert process.returncode == 128 + number, err
    assert out.startswith("window all")
    assert "experiment guardrail" in out
    assert "failed:" not in err


def test_a_signal_before_anything_was_sent_is_no_harm() -> None:
    with running(mark="early") as process:
        assert process.stderr is not None
        process.stderr.readline()  # the engine's: processes are being started
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=250)
    assert process.returncode == 130, err
    assert "Traceback" not in err


def test_it_stays_up_when_asked_to(tmp_path: Path) -> None:
    with running(short_answers(tmp_path), "--requests", "3", "--keep", mark="keep") as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "stays up" in line:
                break
        assert any(line.startswith("the clients' view") for line in said)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=250)
    assert process.returncode == 130
    assert err == "stopped by SIGINT\n"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--speed", "0"), "llmtap: --speed: expected a number above 0"),
        (("--seconds", "soon"), "llmtap: --seconds: expected a duration"),
        (("--seconds", "2d"), "llmtap: --seconds: 2d is not between 0 and a day"),
        (("/no/such/trace.csv",), "llmtap: /no/such/trace.csv"),
        (("trace.csv", "--from", "nonsense"), "llmtap: --from: no format to read is called 'nonsense'"),
    ],
)
def test_what_does_not_fit_is_exit_2_and_named(args: tuple[str, ...], says: str) -> None:
    with running(*args, mark=f"wrong-{'-'.join(args).replace('/', '_')}") as process:
        _, err = process.communicate(timeout=250)
    assert process.returncode == 2, err
    assert err.startswith(says), "nothing is started before"


def test_what_broke_is_told_on_either_side() -> None:
    fine = {"n": 5, "outcomes": {"complete": 4, "refused": 1}}
    clients = {"outcomes": {"complete": 4, "refused": 1}, "errors": {}, "load": {"sent": 5}}
    assert _problems(fine, NOBODY, clients) == []
    cut = {"n": 5, "outcomes": {"complete": 4, "client_cancelled": 1}}
    assert _problems(cut, NOBODY, {**clients, "outcomes": {"complete": 4, "client_cancelled": 1}}) == []
    assert _problems(cut, NOBODY, clients) == ["1 answers were left by clients that cut none of them"]
    assert _problems({**fine, "n": 4}, NOBODY, clients) == ["4 of 5 exchanges were measured"]
    broken = {
        "outcomes": {"complete": 4, "truncated": 1},
        "errors": {"the server left": 1},
        "load": {"sent": 5},
    }
    assert _problems(fine, NOBODY, broken) == ["1 truncated, as the clients saw it", "1 x the server left"]
    reset = {"n": 5, "outcomes": {"complete": 4, "upstream_reset": 1}}
    assert _problems(reset, NOBODY, clients) == ["1 upstream_reset, as the tap saw it"]
    others = {"n": 2, "outcomes": {"complete": 1, "upstream_reset": 1}}
    with_others = {"n": 7, "outcomes": {"complete": 5, "refused": 1, "upstream_reset": 1}}
    assert _problems(with_others, others, clients) == []


def test_a_silence_of_the_trace_is_told_while_nothing_is_under_way() -> None:
    sent = _Sent(Duration(20 * NS_PER_S))
    assert sent.silence_ns() == 0
    sent.requests = Requests(arrival_ns=array("q", [0, NS_PER_S, 9 * NS_PER_S, 25 * NS_PER_S]))
    for n, under_way, silence_s in ((0, 0, 0), (1, 0, 1), (2, 1, 0), (2, 0, 8), (3, 0, 0), (4, 0, 0)):
        now = Progress(n, under_way, n - under_way, 0, 0, 0, None, None, None, None, None)
        sent.sending(now, 4)
        assert sent.silence_ns() == silence_s * NS_PER_S, (n, under_way)
