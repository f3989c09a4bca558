"""A real Prometheus scrapes the tap under load: Debian's package, unpacked, not installed.

    .venv/bin/python tests/e2e/prometheus.py

`llmtap sim serve` answers, `llmtap proxy` stands in front, Prometheus scrapes its admin port every second.
Checked are the target's health, the exposition by `promtool check metrics`, counts and quantiles against the
exact ones of `/api/v1/exchanges`, native histograms by a second Prometheus, and the exemplars. Exits 1,
naming what is wrong. Minutes.
"""

from __future__ import annotations

import http.client
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from parts.alerting import SLO, check_files, compressed_rules, planted_violation
from parts.board_queries import check_boards
from parts.script import LLMTAP, LOGS, ROOT, carry_out, phase
from parts.servers import (
    LOCAL,
    Failure,
    Server,
    get_exchanges,
    get_json,
    port_free,
    proxy_argv,
    stream_once,
    tail,
)
from parts.vantages import percentile

HOME = ROOT / "prometheus"
RUN_S_MAX = 900  # from the package on; 2 minutes here, most of it waiting for an alert to ring and to end
DOWNLOAD_S_MAX = 400  # 19 MB, and package lists of 9 MB where there are none
READY_S_MAX = 120
SCRAPE_S = 1
SCRAPES_MIN = 5
FAILED_SHARE_MAX = 0.1
STREAMS = 250
CLIENTS = 8
QUANTILES = (0.5, 0.9, 0.99)
NATIVE_ERROR_MAX = 0.02


def unpacked() -> tuple[Path, Path]:
    """`prometheus` and `promtool`: those of the system, or Debian's package below `.e2e/`.

    Nothing is installed, and nobody has to be root.
    """
    system = [shutil.which(name) for name in ("prometheus", "promtool")]
    if system[0] and system[1]:
        return Path(system[0]), Path(system[1])
    folder = HOME / "package"
    there = folder / "usr/bin/prometheus", folder / "usr/bin/promtool"
    if not all(path.exists() for path in there):
        download(folder)
    return there


def download(folder: Path) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise Failure(
            "no prometheus in PATH, and no apt-get to get Debian's: install it, and promtool with it"
        )
    state = HOME / "apt"
    for path in (folder, state / "lists/partial", state / "cache/archives/partial"):
        path.mkdir(parents=True, exist_ok=True)
    lists = ["-o", f"Dir::State::Lists={state / 'lists'}", "-o", f"Dir::Cache={state / 'cache'}"]
    # The system's package lists do when they are there and fresh; else lists of our own, without root.
    ways = [[["download", "prometheus"]], [[*lists, "update"], [*lists, "download", "prometheus"]]]
    log = LOGS / "prometheus-download.log"
    with log.open("wb") as out:
        for way in ways:
            for command in way:
                argv = ["apt-get", "-o", "APT::Sandbox::User=", *command]
                done = subprocess.run(argv, cwd=HOME, stdout=out, stderr=subprocess.STDOUT)
                if done.returncode:
                    break
            packages = sorted(HOME.glob("prometheus_*.deb"))
            if packages:
                subprocess.run(["dpkg-deb", "-x", str(packages[-1]), str(folder)], check=True)
                packages[-1].unlink()
                return
    raise Failure(f"Debian's package `prometheus` could not be fetched\n{tail(log)}")


# ---------------------------------------------------------------- load


def stream_one(port: int, number: int) -> None:
    """One streamed answer to its end, with a sampled trace."""
    headers = {"traceparent": f"00-{trace_id(number)}-{number + 1:016x}-01"}
    stream_once(port, tokens=12 + number % 20, prompt=f"Stream {number}, please.", headers=headers)


def trace_id(number: int) -> str:
    return f"{0xE2E << 64 | number:032x}"


def put_load(port: int, streams: int) -> None:
    """`streams` streams, some at a time. Raises the first failure."""
    numbers, lock = iter(range(streams)), threading.Lock()
    failures: list[BaseException] = []

    def client() -> None:
        while not failures:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                stream_one(port, number)
            except (OSError, http.client.HTTPException, Failure) as error:
                failures.append(error)

    clients = [threading.Thread(target=client, daemon=True) for _ in range(CLIENTS)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    if failures:
        raise Failure(f"under load: {failures[0]!r}")


# ---------------------------------------------------------------- asking Prometheus


class Prometheus:
    """The HTTP API of a running server."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}/api/v1"

    def query(self, text: str) -> list[Any]:
        """The instant vector of a query."""
        found = get_json(f"{self.base}/query?{urllib.parse.urlencode({'query': text})}")
        return found["data"]["result"]

    def number(self, text: str) -> float:
        """The one value of a query; NaN where there is none."""
        found = self.query(text)
        return float(found[0]["value"][1]) if len(found) == 1 else math.nan

    def target(self) -> dict[str, Any]:
        (target,) = get_json(f"{self.base}/targets")["data"]["activeTargets"]
        return target

    def exemplars(self, metric: str) -> list[Any]:
        span = {"query": metric, "start": time.time() - 300, "end": time.time() + 1}
        return get_json(f"{self.base}/query_exemplars?{urllib.parse.urlencode(span)}")["data"]


def configure(admin: int, rules: Path | None, native: Mapping[str, object] | None = None) -> Path:
    file = HOME / ("prometheus.yml" if native is None else "native.yml")
    # JSON is YAML enough.
    job = {"job_name": "llmtap", "static_configs": [{"targets": [f"127.0.0.1:{admin}"]}], **(native or {})}
    seconds = {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s"}
    seconds["evaluation_interval"] = f"{SCRAPE_S}s"
    file.write_text(
        json.dumps({"global": seconds, "scrape_configs": [job], "rule_files": [str(rules)] if rules else []})
    )
    return file


def native_setting(binary: Path) -> dict[str, object]:
    """The key of a job that asks for native histograms: from 3.8 on; before, there is a feature flag only."""
    said = subprocess.run([str(binary), "--version"], capture_output=True, text=True)
    major, minor = map(int, re.search(r"version (\d+)\.(\d+)", said.stdout + said.stderr).groups())
    return {"scrape_native_histograms": True} if (major, minor) >= (3, 8) else {}


def prometheus_argv(binary: Path, port: int, config: Path, *features: str) -> list[str]:
    data = HOME / f"data-{port}"
    enabled = ",".join(("exemplar-storage", *features))
    shutil.rmtree(data, ignore_errors=True)
    return [
        str(binary),
        f"--config.file={config}",
        f"--storage.tsdb.path={data}",
        f"--web.listen-address=127.0.0.1:{port}",
        f"--enable-feature={enabled}",
    ]


# ---------------------------------------------------------------- checks


def check_scrapes(prometheus: Prometheus, log: Path) -> Iterator[str]:
    give_up_at = time.monotonic() + READY_S_MAX
    while (target := prometheus.target())["health"] != "up" and time.monotonic() < give_up_at:
        time.sleep(SCRAPE_S / 4)
    if target["health"] != "up" or target["lastError"]:
        yield f"the target is {target['health']}: {target['lastError']!r}"
    window = "[2m]"
    scrapes = prometheus.number(f"count_over_time(up{window})")
    if not scrapes >= SCRAPES_MIN:
        yield f"only {scrapes} scrapes"
    # A machine that stands still for a second costs the scrape of that second.
    failed = scrapes - prometheus.number(f"sum_over_time(up{window})")
    if not failed <= FAILED_SHARE_MAX * scrapes:
        yield f"{failed:.0f} of {scrapes:.0f} scrapes failed"
    scraped = prometheus.number("scrape_samples_scraped")
    kept = prometheus.number("scrape_samples_post_metric_relabeling")
    if not scraped == kept > 100:
        yield f"{scraped} samples scraped, {kept} kept"
    bad = [line for line in log.read_text(errors="replace").splitlines() if is_complaint(line)]
    yield from (f"Prometheus says: {line}" for line in bad[:5])
    took = prometheus.number(f"max_over_time(scrape_duration_seconds{window})")
    print(f"  {scrapes:.0f} scrapes, {scraped:.0f} samples each, at most {took * 1e3:.0f} ms")


def is_complaint(line: str) -> bool:
    return ("level=warn" in line or "level=error" in line) and "scrape" in line


def check_exposition(promtool: Path, admin: int) -> Iterator[str]:
    with LOCAL.open(f"http://127.0.0.1:{admin}/metrics", timeout=60) as response:
        text = response.read()
    done = subprocess.run([str(promtool), "check", "metrics"], input=text, capture_output=True, timeout=200)
    said = (done.stdout + done.stderr).decode().strip()
    if done.returncode or said:
        yield f"promtool check metrics ({done.returncode}): {said or 'no word why'}"
    print(f"  promtool check metrics: {done.returncode}, {len(text):,} bytes")


def exact_samples(exchanges: list[Any]) -> dict[str, list[float]]:
    """TTFT and time between chunks as the API tells them, exchange by exchange."""
    samples: dict[str, list[float]] = {"ttft": [], "tbc": []}
    for x in exchanges:
        samples["ttft"].append(x["metrics"]["ttft"])
        times = [event["t"] for event in x["events"] if event["class"] == "content"]
        samples["tbc"] += [b - a for a, b in pairwise(times)]
    return samples


METRICS = {
    "ttft": ("llmtap_time_to_first_token_seconds", 'kind="content"'),
    "tbc": ("llmtap_inter_chunk_seconds", ""),
}


def check_quantiles(prometheus: Prometheus, samples: dict[str, list[float]]) -> Iterator[str]:
    """Counts are equal, and every quantile is in the bucket of the exact one or in the next."""
    for name, (metric, labels) in METRICS.items():
        values = samples[name]
        count = prometheus.number(f"sum({metric}_count{{{labels}}})")
        if count != len(values):
            yield f"{metric}_count is {count}, the API has {len(values)}"
        buckets = prometheus.query(f"sum by (le) ({metric}_bucket{{{labels}}})")
        edges = sorted(float(bucket["metric"]["le"]) for bucket in buckets)
        for q in QUANTILES:
            exact = percentile(values, q)
            told = prometheus.number(f"histogram_quantile({q}, sum by (le) ({metric}_bucket{{{labels}}}))")
            off = bisect_left(edges, told) - bisect_left(edges, exact) if told == told else math.inf
            print(
                f"  {name} p{q * 100:g}: exact {exact * 1e3:.3f} ms, by Prometheus {told * 1e3:.3f} ms,"
                f" {'same bucket' if off == 0 else f'{off} buckets off'}"
            )
            if abs(off) > 1:
                yield f"{name} p{q * 100:g}: {told} by Prometheus, {exact} exactly: {off} buckets off"


ZERO_S = 1e-9
"""Values up to the zero threshold of a native histogram are equal to zero."""


def check_native_quantiles(prometheus: Prometheus, samples: dict[str, list[float]]) -> Iterator[str]:
    """Every quantile of a native histogram is within 2 % of the exact one."""
    for name, (metric, labels) in METRICS.items():
        count = prometheus.number(f"histogram_count(sum({metric}{{{labels}}}))")
        if count != len(samples[name]):
            yield f"the native {metric} counts {count}, the API has {len(samples[name])}"
        for q in QUANTILES:
            exact = percentile(samples[name], q)
            told = prometheus.number(f"histogram_quantile({q}, sum({metric}{{{labels}}}))")
            # More than half of the gaps can be zero: tokens that a busy machine delivers together.
            off = told / exact - 1 if exact else 0.0 if told <= ZERO_S else math.inf
            print(f"  native {name} p{q * 100:g}: exact {exact * 1e3:.3f} ms, by Prometheus {off:+.2%}")
            if not abs(off) <= NATIVE_ERROR_MAX:
                yield f"native {name} p{q * 100:g}: {told} by Prometheus, {exact} exactly"


def check_totals(prometheus: Prometheus, streams: int) -> Iterator[str]:
    for query, expected in {
        'sum(llmtap_exchanges_total{outcome="complete"})': streams,
        "sum(llmtap_exchanges_total)": streams,
        "sum(llmtap_tap_dropped_exchanges_total) or vector(0)": 0,
        "sum(llmtap_meter_errors_total) or vector(0)": 0,
        "sum(llmtap_output_tokens_total)": sum(12 + number % 20 for number in range(streams)),
    }.items():
        if prometheus.number(query) != expected:
            yield f"{query} is {prometheus.number(query)}, expected {expected}"


def check_exemplars(prometheus: Prometheus, streams: int) -> Iterator[str]:
    traces = {trace_id(number) for number in range(streams)}
    found = prometheus.exemplars("llmtap_time_to_first_token_seconds_bucket")
    named = [exemplar["labels"].get("trace_id") for series in found for exemplar in series["exemplars"]]
    if not named:
        yield "no exemplars: OpenMetrics was not negotiated, or not kept"
    yield from (
        f"an exemplar names the trace {name}, which nobody sent" for name in named if name not in traces
    )
    print(f"  {len(named)} exemplars of {len(set(named))} traces")


def check_rules(prometheus: Prometheus) -> Iterator[str]:
    """Prometheus has loaded every rule, and can evaluate it."""
    groups = get_json(f"{prometheus.base}/rules")["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    for rule in rules:
        if rule["health"] == "err" or rule.get("lastError"):
            yield f"the rule {rule['name']}: {rule.get('lastError')}"
    print(f"  {len(rules)} rules in {len(groups)} groups")
    if not rules:
        yield "no rules are loaded"


def run(streams: int) -> list[str]:
    HOME.mkdir(exist_ok=True)
    with phase("Prometheus, Debian's package"):
        signal.alarm(DOWNLOAD_S_MAX)
        binary, promtool = unpacked()
        signal.alarm(RUN_S_MAX)
    with phase("the rules, as they are checked in"):
        wrong: list[str] = list(check_files(promtool))
    objectives = HOME / "slo.toml"
    objectives.write_text(SLO)
    rules = compressed_rules(objectives, HOME)
    engine, listen, admin, port, native_port = (port_free() for _ in range(5))
    shutil.rmtree(HOME / "capture", ignore_errors=True)
    kept = ["--config", str(objectives), "--capture", str(HOME / "capture"), "--set", "log.level=warning"]
    kept += ["--set", "meter.native_histograms=true"]
    native = configure(admin, None, native_setting(binary))
    argvs = {
        "sim": [str(LLMTAP), "sim", "serve", "--listen", f"127.0.0.1:{engine}"],
        "tap-prometheus": proxy_argv(LLMTAP, engine, listen, admin, *kept),
        "prometheus": prometheus_argv(binary, port, configure(admin, rules)),
        "prometheus-native": prometheus_argv(binary, native_port, native, "native-histograms"),
    }
    argvs["sim"] += ["--ttft", "60ms", "--itl", "8ms", "--spread", "0.6", "--tokens", "40"]

    with ExitStack() as servers:
        running = {}
        for name, argv in argvs.items():
            server = running[name] = Server(name, argv, logs=LOGS, env={"NO_PROXY": "127.0.0.1"}, cwd=HOME)
            servers.callback(lambda server=server: wrong.extend(filter(None, [server.stop()])))
        with phase("ready"):
            running["sim"].wait_ready(f"http://127.0.0.1:{engine}/health", limit_s=READY_S_MAX)
            running["tap-prometheus"].wait_ready(f"http://127.0.0.1:{admin}/readyz", limit_s=READY_S_MAX)
            running["prometheus"].wait_ready(f"http://127.0.0.1:{port}/-/ready", limit_s=READY_S_MAX)
            running["prometheus-native"].wait_ready(
                f"http://127.0.0.1:{native_port}/-/ready", limit_s=READY_S_MAX
            )
        prometheus, by_native = Prometheus(port), Prometheus(native_port)
        with phase(f"{streams} streams, {CLIENTS} at a time"):
            put_load(listen, streams)
        with phase("the last scrapes"):
            wait_scraped(prometheus, streams)
            wait_scraped(by_native, streams)
        exchanges = get_exchanges(f"http://127.0.0.1:{admin}/api/v1")
        wrong += check_scrapes(prometheus, running["prometheus"].log)
        wrong += check_exposition(promtool, admin)
        wrong += check_quantiles(prometheus, exact_samples(exchanges))
        wrong += check_native_quantiles(by_native, exact_samples(exchanges))
        wrong += check_totals(prometheus, streams)
        wrong += check_exemplars(prometheus, streams)
        wrong += check_rules(prometheus)
        with phase("a violation, at a 60th of all windows"):
            wrong += planted_violation(listen, prometheus.query)
        with phase("every query of every board"):
            wrong += check_boards(prometheus.query)
    return wrong


def wait_scraped(prometheus: Prometheus, streams: int) -> None:
    """Until a scrape has seen the last stream, and the few scrapes that are wanted have been made."""
    give_up_at = time.monotonic() + 120 * SCRAPE_S
    while time.monotonic() < give_up_at:
        seen = prometheus.number("sum(llmtap_exchanges_total)")
        if seen >= streams and prometheus.number("count_over_time(up[2m])") >= SCRAPES_MIN:
            return
        time.sleep(SCRAPE_S / 4)


if __name__ == "__main__":
    sys.exit(carry_out("prometheus", lambda: run(STREAMS)))
