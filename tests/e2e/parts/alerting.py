"""The rules in a real Prometheus, with every window a 60th as long, and a violation planted in the engine.

An hour becomes a minute, so that the alarm over 1h and 5m can be awaited: it has to ring when more than
14.4 % of the last 60 seconds are bad, and to end when less of the last 5 are. When that was is reckoned from
the answers as the clients had them, one by one, not from a schedule.
"""

from __future__ import annotations

import http.client
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from parts.script import LLMTAP, REPOSITORY
from parts.servers import Failure, stream_once

SLO = """[slo.default]
objectives = "ttft:500ms tpot:2s"
target = 0.99
"""
THRESHOLD = 14.4 * 0.01
LONG_S, SHORT_S = 60.0, 5.0
COMPRESSED = 60
SECONDS = {
    "5m": 300,
    "30m": 1_800,
    "1h": 3_600,
    "2h": 7_200,
    "6h": 21_600,
    "1d": 86_400,
    "3d": 259_200,
    "30d": 2_592_000,
}
PROMETHEUS = REPOSITORY / "deploy" / "prometheus"

RATE_RPS = 12
GOOD_S = LONG_S + 6  # the long window is full, and a scrape more
BAD_S = 18
END_S_MAX = 30  # for the alert to end
EARLY_S, LATE_S = 2.0, 8.0  # a scrape, an evaluation, and how coarse five samples are; on a busy machine more
RINGING = 'ALERTS{alertname="LlmtapErrorBudgetBurn",severity="page",long="1h",alertstate="firing"}'

Query = Callable[[str], list[object]]


def compressed_rules(config: Path, folder: Path) -> Path:
    """The rules of a configuration, with windows a 60th as long, evaluated every second."""
    made = subprocess.run(
        [str(LLMTAP), "slo", "generate", "--config", str(config)], capture_output=True, text=True, timeout=60
    )
    if made.returncode or made.stderr:
        raise Failure(f"llmtap slo generate ({made.returncode}): {made.stderr}")
    text = re.sub(r"\[(\w+)\]", lambda m: f"[{_shorter(m[1])}]", made.stdout)
    text = text.replace("interval: 30s", "interval: 1s").replace("30 * sum_over_time", "1 * sum_over_time")
    file = folder / "rules.yaml"
    file.write_text(text)
    return file


def _shorter(window: str) -> str:
    return f"{SECONDS[window] // COMPRESSED}s" if window in SECONDS else window


def check_files(promtool: Path) -> Iterator[str]:
    """What is checked in, by promtool: its syntax, and the unit tests."""
    for args in (
        ["check", "rules", "llmtap-rules.yaml"],
        ["check", "config", "--syntax-only", "prometheus.yml"],
        ["test", "rules", "tests.yaml"],
    ):
        done = subprocess.run(
            [str(promtool), *args], cwd=PROMETHEUS, capture_output=True, text=True, timeout=250
        )
        print(f"  promtool {' '.join(args[:2])}: {'ok' if done.returncode == 0 else done.returncode}")
        if done.returncode:
            yield f"promtool {' '.join(args)}: {done.stdout}{done.stderr}"


class Traffic:
    """Short streams at a steady rate, whatever becomes of them; when each ended, and if it was to be bad."""

    def __init__(self, port: int) -> None:
        self.ended: list[tuple[float, bool]] = []
        self.bad = False
        self._port = port
        self._failures: list[BaseException] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        if self._failures:
            raise Failure(f"under steady load: {self._failures[0]!r}")

    def _send(self) -> None:
        with ThreadPoolExecutor(64) as pool:
            begin = time.monotonic()
            for number in range(10_000_000):
                wait = begin + number / RATE_RPS - time.monotonic()
                if self._stop.wait(max(0.0, wait)):
                    return
                pool.submit(self._one, self.bad)

    def _one(self, bad: bool) -> None:
        headers = {"x-sim-ttft-ms": "900" if bad else "20"}
        try:
            stream_once(self._port, tokens=3, prompt="Hi", headers=headers)
            self.ended.append((time.time(), bad))
        except (OSError, http.client.HTTPException, Failure) as error:
            self._failures.append(error)


def planted_violation(listen: int, query: Query) -> Iterator[str]:
    """Good traffic, bad traffic, good traffic; complaints about when the alert rang and ended."""
    with Traffic(listen) as traffic:
        early = _watch(query, GOOD_S, lambda ringing: ringing)
        traffic.check()
        if early is not None:
            yield "the alert rings before anything is wrong"
            return
        planted = time.time()
        traffic.bad = True
        rang = _watch(query, BAD_S, lambda ringing: ringing)
        rest = planted + BAD_S - time.time()
        time.sleep(max(0.0, rest))
        traffic.bad = False
        ended = _watch(query, END_S_MAX, lambda ringing: not ringing)
        time.sleep(EARLY_S)  # theory may be a little later, and wants answers to reckon with
        traffic.check()
    due = _first(traffic.ended, planted, lambda long, short: long > THRESHOLD and short > THRESHOLD)
    over = None if due is None else _first(traffic.ended, due, lambda long, short: short <= THRESHOLD)
    for what, seen, theory in (("ring", rang, due), ("end", ended, over)):
        said, wanted = _after(seen, planted), _after(theory, planted)
        print(f"  {what}: {said} after the violation began, by theory {wanted}")
        if seen is None or theory is None or not -EARLY_S <= seen - theory <= LATE_S:
            yield f"the alert was to {what} {wanted} after the violation began: {said}"


def _watch(query: Query, limit_s: float, done: Callable[[bool], bool]) -> float | None:
    """When Prometheus first says so; None if it does not in that time."""
    give_up = time.monotonic() + limit_s
    while time.monotonic() < give_up:
        if done(bool(query(RINGING))):
            return time.time()
        time.sleep(0.2)
    return None


def _first(
    ended: list[tuple[float, bool]], since: float, holds: Callable[[float, float], bool]
) -> float | None:
    """The first moment, by tenths of a second, at which it holds of the bad shares of both windows."""
    for tenth in range(round((time.time() - since) * 10)):
        at = since + tenth / 10
        long, short = (_share(ended, at - window, at) for window in (LONG_S, SHORT_S))
        if long is not None and short is not None and holds(long, short):
            return at
    return None


def _share(ended: list[tuple[float, bool]], since: float, until: float) -> float | None:
    found = [bad for at, bad in ended if since < at <= until]
    return sum(found) / len(found) if found else None


def _after(moment: float | None, since: float) -> str:
    return "never" if moment is None else f"{moment - since:.1f} s"
