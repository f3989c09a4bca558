"""Two taps as two hosts of a fleet: their figures put together in every way that docs/fleet.md names.

    .venv/bin/python tests/e2e/fleet.py

Tap A is fast and busy, tap B slow and quiet, so that an average of their quantiles is plainly wrong. A real
Prometheus sums their histograms by deploy/prometheus/fleet-rules.yaml, one OTLP receiver gets both, both
captures lie in one prefix of an object store (moto's), and are read as one by llmtap, pyarrow, DuckDB and
Ray; a sweep and a replay of them run on a local Ray. All is held against the pooled exchanges. Exits 1,
naming what is wrong.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from parts.alerting import SLO
from parts.script import LLMTAP, LOGS, REPOSITORY, ROOT, carry_out, phase
from parts.servers import Failure, Server, port_free, proxy_argv, stream_once
from parts.vantages import percentile
from prometheus import DOWNLOAD_S_MAX, Prometheus, unpacked

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # it has a word to say of each process that Ray starts
sys.path.insert(1, str(REPOSITORY))  # the receiver and the store are those of the tests

from parts.fleet_readers import by_duckdb, by_llmtap, by_otlp, by_ray

from tests.support.servers.object_store import object_store
from tests.support.servers.otlp_receiver import OtlpReceiver

HOME = ROOT / "fleet"
RUN_S_MAX = 900
READY_S_MAX = 60
SCRAPED_S_MAX = 60
RAY_S_MAX = 240  # it starts in 6 s, and in a minute where others are busy
BUCKET = "fleet"
WINDOW = "10m"
QUANTILES = (0.5, 0.9, 0.99)
TOKENS = 20
TTFT = "llmtap_time_to_first_token_seconds"
KEYS = {"AWS_ACCESS_KEY_ID": "fleet", "AWS_SECRET_ACCESS_KEY": "on-loopback-only"}
ENVIRON = KEYS | {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_REGION": "us-east-1",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}


@dataclass(frozen=True, slots=True)
class Tap:
    """One host, and its traffic."""

    name: str
    streams: int
    at_once: int
    ttft_ms: tuple[int, int]


TAPS = (Tap("tap-a", 240, 8, (20, 60)), Tap("tap-b", 60, 8, (300, 900)))


# ---------------------------------------------------------------- load


def stream_one(port: int, ttft_ms: int) -> None:
    headers = {"x-sim-ttft-ms": str(ttft_ms)}
    stream_once(port, tokens=TOKENS, prompt="One of a fleet.", headers=headers)


def put_load(tap: Tap, port: int) -> None:
    dice = Random(tap.name)
    with ThreadPoolExecutor(tap.at_once) as pool:
        jobs = [pool.submit(stream_one, port, dice.randint(*tap.ttft_ms)) for _ in range(tap.streams)]
    for job in jobs:
        job.result()


# ---------------------------------------------------------------- figures


def off(edges: Sequence[float], told: float, truth: float) -> int:
    """By how many buckets a figure is off."""
    return abs(bisect_left(edges, told) - bisect_left(edges, truth))


@dataclass(slots=True)
class Told:
    """What Prometheus said, q by q: of all exchanges so far, by the recording rule, and of each tap alone."""

    edges: list[float]
    count: float
    pooled: dict[float, float]
    ruled: dict[float, float]
    alone: dict[float, list[float]]


def ask(prometheus: Prometheus) -> Told:
    buckets = prometheus.query(f'sum by (le) ({TTFT}_bucket{{kind="content"}})')
    told = Told(sorted(float(one["metric"]["le"]) for one in buckets), 0.0, {}, {}, {})
    told.count = prometheus.number(f'sum({TTFT}_count{{kind="content"}})')
    for q in QUANTILES:
        told.pooled[q] = prometheus.number(
            f'histogram_quantile({q}, sum by (le) ({TTFT}_bucket{{kind="content"}}))'
        )
        told.ruled[q] = prometheus.number(f"fleet:{TTFT}:p{q * 100:g}")
        found = prometheus.query(
            f'histogram_quantile({q}, sum by (le, instance) ({TTFT}_bucket{{kind="content"}}))'
        )
        told.alone[q] = [float(one["value"][1]) for one in found]
    return told


def check_prometheus(told: Told, ttfts_s: Sequence[float]) -> Iterator[str]:
    if told.count != len(ttfts_s):
        yield f"Prometheus counts {told.count} streams, the captures hold {len(ttfts_s)}"
    for q in QUANTILES:
        truth, mean = percentile(ttfts_s, q), sum(told.alone[q]) / len(told.alone[q])
        print(
            f"  TTFT p{q * 100:g}: exact {truth * 1e3:.0f} ms; histograms summed {told.pooled[q] * 1e3:.0f},"
            f" by the recording rule {told.ruled[q] * 1e3:.0f}; average of both taps' {mean * 1e3:.0f},"
            f" {off(told.edges, mean, truth)} buckets off"
        )
        for how, value in (("of summed histograms", told.pooled[q]), ("by the rule", told.ruled[q])):
            if value != value or off(told.edges, value, truth) > 1:
                yield f"TTFT p{q * 100:g} {how} is {value}, exactly {truth}"
    if off(told.edges, sum(told.alone[0.5]) / 2, percentile(ttfts_s, 0.5)) <= 1:
        yield "the average of both medians is near the truth: this load shows nothing"


def configure(admins: Sequence[int]) -> Path:
    """Prometheus with both taps, and the rules as they are checked in, evaluated each second over WINDOW."""
    rules = HOME / "fleet-rules.yaml"
    text = (REPOSITORY / "deploy/prometheus/fleet-rules.yaml").read_text()
    rules.write_text(text.replace("interval: 30s", "interval: 1s").replace("[5m]", f"[{WINDOW}]"))
    seconds = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    targets = [f"127.0.0.1:{admin}" for admin in admins]
    job = {"job_name": "llmtap", "static_configs": [{"targets": targets}]}
    file = HOME / "prometheus.yml"
    # JSON is YAML enough.
    file.write_text(json.dumps({"global": seconds, "scrape_configs": [job], "rule_files": [str(rules)]}))
    return file


def wait_counted(prometheus: Prometheus, streams: int) -> None:
    """Until a scrape has seen so many streams of both taps, and the rules what it saw. Raises Failure."""
    end = time.monotonic() + SCRAPED_S_MAX
    now, before = (f'sum({TTFT}_count{{kind="content"}}{ago})' for ago in ("", " offset 3s"))
    while time.monotonic() < end:
        if prometheus.number(now) >= streams and prometheus.number(before) >= streams:
            return
        time.sleep(0.5)
    raise Failure(f"Prometheus did not see {streams} streams: {prometheus.number(now)}")


# ---------------------------------------------------------------- commands over the captures


def command(name: str, argv: list[str], place: Path) -> dict[str, Any]:
    """Runs one of ours over both captures and returns its JSON. Raises Failure."""
    log = LOGS / f"fleet-{name}.log"
    place.unlink(missing_ok=True)
    with log.open("wb") as out:
        done = subprocess.run(
            [str(LLMTAP), *argv, "--json", str(place)],
            env={**os.environ, **ENVIRON},
            cwd=HOME,
            stdout=out,
            stderr=out,
            timeout=RAY_S_MAX,
        )
    if done.returncode not in (0, 1, 4) or not place.exists():
        raise Failure(f"llmtap {' '.join(argv)} ended with {done.returncode}: see {log}")
    return json.loads(place.read_text())


def check_sweep(url: str) -> Iterator[str]:
    schedulers = ("continuous_batching", "chunked_prefill")
    argv = ["sim", "run", url, "--scheduler", ",".join(schedulers), "--requests", "200", "--ray", "local"]
    told = command("sweep", argv, HOME / "sweep.json")
    found = {one["scheduler"] for one in _runs(told)}
    print(f"  a sweep on Ray: {', '.join(sorted(found))}")
    if found != set(schedulers):
        yield f"the sweep has runs of {sorted(found)}"


def _runs(told: Any) -> list[dict[str, Any]]:
    return told if isinstance(told, list) else told.get("runs", [told])


def check_replay(url: str, engine: int) -> Iterator[str]:
    n = 60
    argv = ["replay", url, "--target", f"http://127.0.0.1:{engine}", "--requests", str(n), "--rate", "20"]
    argv += ["--processes", "2", "--ray", "local", "--metrics", "none"]
    told = command("replay", argv, HOME / "replay.json")
    print(f"  a replay by two workers of Ray: {told['outcomes']}, {told['load']['sent']} sent")
    if told["outcomes"] != {"complete": n} or told["load"]["sent"] != n or told["plan"]["ray"] != "local":
        yield f"the replay came to {told['outcomes']}, {told['load']['sent']} sent of {n}"


def run() -> list[str]:
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(exist_ok=True)
    os.environ.update(ENVIRON)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # the store's own log
    with phase("Prometheus, Debian's package"):
        signal.alarm(DOWNLOAD_S_MAX)
        binary, promtool = unpacked()
        signal.alarm(RUN_S_MAX)
    wrong: list[str] = []
    rules = str(REPOSITORY / "deploy/prometheus/fleet-rules.yaml")
    done = subprocess.run(
        [str(promtool), "check", "rules", rules], capture_output=True, text=True, timeout=60
    )
    print(f"  promtool check rules: {done.returncode}")
    if done.returncode:
        wrong.append(f"promtool check rules: {done.stdout}{done.stderr}")
    (HOME / "slo.toml").write_text(SLO)
    with ExitStack() as stack:
        store = stack.enter_context(object_store(BUCKET))
        receiver = stack.enter_context(OtlpReceiver())
        url = f"s3://{BUCKET}/captures?endpoint_override=127.0.0.1:{store}&scheme=http&region=us-east-1"
        engine, port = port_free(), port_free()
        ports = {tap.name: (port_free(), port_free()) for tap in TAPS}
        servers: dict[str, Server] = {}

        def start(name: str, argv: list[str]) -> None:
            otel = {
                "OTEL_METRIC_EXPORT_INTERVAL": "1000",
                "OTEL_RESOURCE_ATTRIBUTES": f"service.instance.id={name}",
            }
            servers[name] = Server(f"fleet-{name}", argv, logs=LOGS, env=ENVIRON | otel, cwd=HOME)

        def stop(name: str) -> None:
            complaint = servers.pop(name).stop(30)
            wrong.extend([complaint] if complaint else [])

        stack.callback(lambda: [stop(name) for name in list(servers)])
        sim = [str(LLMTAP), "sim", "serve", "--listen", f"127.0.0.1:{engine}", "--itl", "8ms"]
        start("sim", [*sim, "--tokens", str(TOKENS)])
        for tap in TAPS:
            listen, admin = ports[tap.name]
            start(tap.name, tap_argv(tap, engine, listen, admin, url, receiver.port))
        admins = [admin for _, admin in ports.values()]
        start(
            "prometheus",
            [
                str(binary),
                f"--config.file={configure(admins)}",
                f"--storage.tsdb.path={HOME / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
        )
        with phase("ready"):
            servers["sim"].wait_ready(f"http://127.0.0.1:{engine}/health", limit_s=READY_S_MAX)
            for tap in TAPS:
                admin = ports[tap.name][1]
                servers[tap.name].wait_ready(f"http://127.0.0.1:{admin}/readyz", limit_s=READY_S_MAX)
            servers["prometheus"].wait_ready(f"http://127.0.0.1:{port}/-/ready", limit_s=READY_S_MAX)
        prometheus = Prometheus(port)
        with phase("one stream each, so that rates have a beginning"):
            for tap in TAPS:
                stream_one(ports[tap.name][0], tap.ttft_ms[0])
            wait_counted(prometheus, len(TAPS))
        with phase("the load"), ThreadPoolExecutor(len(TAPS)) as pool:
            for job in [pool.submit(put_load, tap, ports[tap.name][0]) for tap in TAPS]:
                job.result()
        streams = sum(tap.streams + 1 for tap in TAPS)
        with phase("the last scrapes"):
            wait_counted(prometheus, streams)
            told = ask(prometheus)
        with phase("both taps end: captures are uploaded, the last metrics sent"):
            for tap in TAPS:
                stop(tap.name)
        with phase("one prefix, read as one"):
            ttfts_s, complaints = by_llmtap(url, streams)
            wrong += complaints
        with phase("Prometheus against the pooled exchanges"):
            wrong += check_prometheus(told, ttfts_s)
        with phase("OTLP"):
            wrong += by_otlp(receiver, [tap.name for tap in TAPS], ttfts_s)
        with phase("DuckDB"):
            wrong += by_duckdb(store, BUCKET, KEYS, ttfts_s)
        with phase("Ray over the same files"):
            wrong += by_ray(url, store, KEYS, ttfts_s)
        with phase("llmtap sim run --ray, llmtap replay --ray"):
            wrong += check_sweep(url)
            wrong += check_replay(url, engine)
    return wrong


def tap_argv(tap: Tap, engine: int, listen: int, admin: int, url: str, otlp: int) -> list[str]:
    argv = proxy_argv(LLMTAP, engine, listen, admin, "--config", str(HOME / "slo.toml"), "--capture", url)
    settings = {
        "capture.spool": HOME / f"spool-{tap.name}",
        "capture.rotate_every": "2s",
        "otlp.endpoint": f"http://localhost:{otlp}",
        "log.level": "warning",
    }
    for key, value in settings.items():
        argv += ["--set", f"{key}={value}"]
    return argv


if __name__ == "__main__":
    sys.exit(carry_out("fleet", run))
