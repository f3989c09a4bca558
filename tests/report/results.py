"""Results that reports are made of: captures, systems, experiments and sweeps with all that may be told."""

import json
from typing import Any

import msgspec

from llmtap.clock import ManualClock
from llmtap.exchange.exchange import OUTPUT, EventLog, Exchange, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, TokenSource
from llmtap.export.sinks import SeriesKey
from llmtap.meter.experiments import Experiments
from llmtap.metrics.latency import measure
from llmtap.metrics.silences import SilenceCounts, SilenceKind
from llmtap.metrics.summary import Summary
from tests.support.results.baselines import answer, both
from tests.support.traffic.exchanges import streamed
from tests.support.traffic.experiments import an_experiment

MS = 1_000_000


def summarised(n: int) -> dict[str, object]:
    s = Summary()
    for i in range(n):
        log = EventLog()
        for t in (100 + i % 7, 140, 181):
            log.add(t * MS, EventClass.CONTENT, 10, 1, OUTPUT)
        t = Timeline(
            arrival_ns=0,
            submit_ns=0,
            first_byte_ns=log.t_ns[0],
            first_token_ns=log.t_ns[0],
            first_content_ns=log.t_ns[0],
            last_token_ns=log.t_ns[-1],
            response_end_ns=1_234 * MS,
            events=log,
        )
        x = Exchange(relay="r", seq=1, arrival_wall_ns=0, timeline=t, stream=True, uncertainty_ns=350_000)
        x.tokens = Tokens(output=3, source=TokenSource.TOKEN_IDS)
        x.added.chunks_ns.extend([12_345] * 3)
        s.add(x)
    return s.to_dict({"name": "1m", "seconds": 10.0}, 10.0)


def counter(unit: str, total: float, per_second: float) -> dict[str, Any]:
    return {"unit": unit, "kind": "counter", "n": 61, "total": total, "per_second": per_second, "restarts": 0}


def gauge(unit: str, mean: float, top: float, n: int = 60) -> dict[str, Any]:
    return {"unit": unit, "kind": "gauge", "n": n, "mean": mean, "p50": mean, "p95": top, "max": top}


TOLD: dict[str, Any] = {
    "period": 1.0,
    "skipped": 0,
    "window": [0.0, 60.0],
    "processes": {
        "sender": [{"pid": 1, "name": "python"}, {"pid": 2, "name": "python"}],
        "server": [{"pid": 3, "name": "vllm\x1b[31m"}],
    },
    "gpu": {"devices": ["NVIDIA H100"]},
    "why_not": {},
    "scrape": {
        "url": "http://h/metrics",
        "missing": ["itl_values", "kv_use"],
        "scrapes": 61,
        "failed": 0,
        "failures": {},
        "skipped": 0,
        "period": 1.0,
    },
    "system": {
        "sender_cpu": {**gauge("cpus", 0.4321, 1.0), "kind": "interval"},
        "server_memory": gauge("bytes", 3 << 30, 4 << 30),
        "host_stolen": {**gauge("share", 0.002, 0.01), "kind": "interval"},
        "gpu0_power": gauge("watts", 412.3, 698.0),
        "gpu0_temperature": gauge("celsius", 61.4, 70),
    },
    "server": {
        "running": gauge("requests", 7.25, 16),
        "kv_use": gauge("share", 0.313, 0.875),
        "generation_tokens": counter("tokens", 123_456, 2_057.6),
        "prefix_queries": counter("tokens", 10, 1),
        "prefix_hit_share": {"unit": "share", "kind": "ratio", "total": 0.42},
        "itl_mean": {"unit": "seconds", "kind": "ratio", "total": 0.02},
        "preemptions": counter("requests", 0, 0),
    },
    "energy": {
        "joules": 24_738.0,
        "seconds": 60.0,
        "seconds_missing": 0.0,
        "power": 412.3,
        "tokens": 123_456,
        "joules_per_token": 0.2004,
        "devices": {},
    },
}
DOUBTFUL: dict[str, Any] = {
    **TOLD,
    "scrape": {"scrapes": 60, "failed": 3, "failures": {"status 503": 2, "no answer in time": 1}},
    "system": {"host_stolen": {**gauge("share", 0.034, 0.2), "kind": "interval"}},
    "energy": {**TOLD["energy"], "seconds_missing": 7.5, "joules_per_token": None},
    "gpu": None,
    "why_not": {"gpu": "no NVML: Driver Not Loaded", "server": "10.0.0.1 is not a loopback address"},
}
SYSTEMS: list[dict[str, Any]] = [TOLD, DOUBTFUL, {}, {"system": {}, "server": None, "energy": None}]


def read_summary(n: int = 3, **told: Any) -> dict[str, Any]:
    s = Summary()
    for i in range(n):
        s.add(streamed(i))
    window = {
        "name": "capture",
        "seconds": 2.0,
        "start": "2026-01-01T00:00:00Z",
        "end": "2026-01-01T00:00:02Z",
    }
    return {**s.to_dict(window, 2.0), **told}


FIGURES = {"n": 5, "mean": 7.5, "min": 1, "max": 9_000, "p50": 5, "p90": 8, "p95": 8, "p99": 8_999}
WORKLOAD: dict[str, Any] = {
    "arrivals": {"n": 5, "seconds": 7_500.0, "rate_rps": 12.345, "gap_cv": 1.234, "ties": 0.25},
    "input_tokens": {**FIGURES, "total": 40, "source": {"usage": 4, "tokenizer": 1}},
    "output_tokens": {"n": 0, "source": {}},
    "prefix": [
        {"capture": "c1", "unit": "tokens", "block_size": 512, "blocks": 4_000, "hits": 1_000, "share": 0.25}
    ],
    "sessions": {
        "n": 2,
        "exchanges": 5,
        "turns": FIGURES,
        "single_turn_share": 0.5,
        "source": {"prefix": 5},
        "think": {"all": FIGURES, "human": FIGURES, "tool": {"n": 0}},
        "tool_turn_share": 0.125,
    },
}
ABOUT = {
    "rows": 1_234,
    "files": 2,
    "bytes": 3 << 20,
    "captures": ["a", "b"],
    "level": ["shape"],
    "source": [],
    "tap_version": ["0.1.0"],
}
BROKEN = [{"file": f"llmtap-{i}.parquet", "problem": "is damaged\x1b"} for i in range(22)]
GROUPS = {
    "evil\x1b[2J" + "x" * 90: read_summary(3),
    **{f"t{i:02}": read_summary(2) for i in range(20)},
    "last": read_summary(1),
}


def silences(*groups: tuple[int, float, bool]) -> dict[str, object]:
    """Silences of the next token: their number, length in seconds, and whether a token ended them."""
    counts = SilenceCounts()
    counts.streams = 5_000
    for n, seconds, resumed in groups:
        for _ in range(n):
            counts.kinds[SilenceKind.NEXT_TOKEN].add(round(seconds * 1e9), ended=resumed)
    return counts.to_dict()


CAPTURES: list[dict[str, Any]] = [
    read_summary()
    | {"silences": silences((5_000, 0.5, True), (60, 3, True), (3, 40, True), (237, 95, False))},
    read_summary() | {"silences": silences((1_000, 20, True), (20, 95, False))},
    read_summary() | {"silences": silences((7, 20, True), (2, 700, False))},
    read_summary(capture=ABOUT, workload=WORKLOAD),
    read_summary(by={"tenant": GROUPS}),
    read_summary(capture={"rows": 1, "files": 2, "bytes": 9, "spools": 1, "broken": BROKEN}),
    read_summary(0) | {"uncertainty": None},
    read_summary(load={"mode": "recorded", "achieved_rps": 2.0}),
]


def relay(**told: Any) -> dict[str, Any]:
    return {
        "relay": "run.0.1",
        "opened": 9,
        "present": 9,
        "duplicates": 0,
        "missing": 0,
        "running": 0,
        "ranges": [],
        "dropped": {},
        "unsettled": 0,
        "since": 0,
        "unexplained": 0,
        "exact": True,
        **told,
    }


def capture(*relays: dict[str, Any], **told: Any) -> dict[str, Any]:
    relays = relays or (relay(),)
    return {
        "capture": "c1",
        "present": sum(r["present"] for r in relays),
        "missing": sum(r["missing"] for r in relays),
        "running": 0,
        "duplicates": 0,
        "unexplained": 0,
        "exact": True,
        "not_kept": {},
        "damaged": {},
        "meters": 1,
        "closed": True,
        "relays": list(relays),
        **told,
    }


def checked(*captures: dict[str, Any], **told: Any) -> dict[str, Any]:
    return {"ok": True, "unnumbered": 0, "broken": [], "captures": list(captures), **told}


MISSING = relay(present=5, missing=4, ranges=[(2, 2), (4, 6)])
ALL = relay(
    present=5,
    missing=4,
    ranges=[(2, 2), (4, 6)],
    dropped={"overflow": 1, "no_meter": 1},
    unsettled=1,
    since=1,
    duplicates=3,
)
MUCH = capture(
    ALL, unexplained=1, exact=False, not_kept={"disk": 2}, damaged={"batches": 1, "bytes": 70}, meters=2
)
DELETED = capture(
    relay(present=5, missing=4, ranges=[(1, 4)], unexplained=4), not_kept={"deleted": 3, "memory": 1}
)
INTEGRITIES = [
    checked(capture()),
    checked(capture(MISSING)),
    checked(capture(MISSING, unexplained=3)),
    checked(capture(MISSING, unexplained=3, exact=False)),
    checked(capture(present=99, missing=1)),
    checked(capture(present=98, missing=1)),
    checked(capture(present=9_999, missing=1)),
    checked(capture(present=0, missing=7)),
    checked(capture(duplicates=2)),
    checked(capture(), capture(capture="c2", closed=False)),
    checked(capture(), *(capture(closed=False, capture=f"c{i}") for i in range(2, 7))),
    checked(capture(), broken=[{"file": "a", "problem": "b"}]),
    checked(unnumbered=7),
    checked(DELETED),
    checked(MUCH, ok=False, broken=[{"file": "x.parquet", "problem": "is damaged"}]),
]


REFUSAL = {"kind": "output_guardrail", "source": "finish_reason", "detail": {}, "confidence": "high"}


def experiment(n: int, slower_ms: int = 0, refused: int = 0) -> dict[str, Any]:
    """`n` exchanges an arm, of which those of `marked` begin later and some are refused."""
    experiments = Experiments(an_experiment(), ManualClock())
    for i in range(n):
        for k, arm in enumerate(("control", "marked")):
            unit = f"{7919 * (2 * i + k):x}"
            x = streamed(2 * i + k + 1, 5, arm=arm, unit=unit)
            late_ms = i % 5 + (slower_ms if arm == "marked" else 0)
            events = x.timeline.events
            for place, t_ns in enumerate(events.t_ns):
                events.t_ns[place] = t_ns + late_ms * 1_000_000
            first = events.t_ns[0]
            x.timeline.first_token_ns = x.timeline.first_content_ns = first
            x.timeline.last_token_ns = events.t_ns[4]
            if arm == "marked" and i < refused:
                x.refusal = REFUSAL
            experiments.on_assignment(arm, unit, True)
            experiments.on_end(x, measure(x), SeriesKey(x.tenant, ""), None)
    told: dict[str, Any] = json.loads(msgspec.json.encode(experiments.results()()))
    return told


def compared_rows(lengths: tuple[int, int] = (5, 5)) -> dict[str, Any]:
    """21 rows that took 20 ms to the first token, and 60 to 80 now."""
    told = both([(answer(0, 20, lengths[0]), answer(0, 60 + i, lengths[1])) for i in range(21)]).to_dict()
    assert told is not None
    return told


CLOCK = {"host": "n1", "shared": False, "rtt": 0.001, "offset": -0.0025}
HERE = CLOCK | {"host": "here", "shared": True}
TERMS: list[tuple[str, dict[str, Any]]] = [
    (
        "warm-up",
        {
            "warmup": {
                "requests": 100,
                "tokens": 12_000,
                "duration": 4.5,
                "stable": True,
                "problem": None,
                "probes": [{}],
                "variation": {"ttft": 0.041, "e2e": None},
            }
        },
    ),
    (
        "warm-up",
        {
            "warmup": {
                "requests": 9,
                "tokens": 8,
                "duration": 1,
                "stable": False,
                "probes": [],
                "problem": "it broke",
                "variation": {"ttft": None, "e2e": None},
            }
        },
    ),
    (
        "lengths",
        {
            "lengths": {
                "input_told": 9,
                "input_exact": 7,
                "input_off_max": 3,
                "output_told": 9,
                "output_exact": 2,
                "output_wanted": False,
            }
        },
    ),
    ("lengths", {"lengths": {"input_told": 0, "output_told": 0}}),
    (
        "requests",
        {"load": {"planned": 9, "sent": 5, "dropped": 1, "unsent": 3, "stopped": "the time was up"}},
    ),
    ("retries", {"load": {"retries": {"n": 1, "reasons": {"503": 1}}}}),
    ("arrivals", {"plan": {"arrivals": None}}),
    ("arrivals", {"plan": {"arrivals": {"arrivals": "gamma", "rate_rps": 4.0, "cv": 2.0, "seed": 1}}}),
    (
        "arrivals",
        {"plan": {"arrivals": {"arrivals": "gamma:burstiness=0.25", "given": "gamma:cv=2", "rate_rps": 4.0}}},
    ),
    ("clocks", {"sender": {"clocks": [CLOCK, CLOCK | {"rtt": 0.003}, HERE]}}),
    ("server metrics", {"system": {"summary": {"scrape": {"url": "http://h/metrics", "scrapes": 31}}}}),
    (
        "server metrics",
        {
            "system": {
                "summary": {
                    "scrape": {
                        "url": "http://h/metrics",
                        "scrapes": 1,
                        "gave_up": True,
                        "failures": {"status 404": 1},
                    }
                }
            }
        },
    ),
    ("server metrics", {"system": {"summary": {"scrape": {"url": None, "scrapes": 0}}}}),
    (
        "answers",
        {
            "plan": {
                "body": {
                    "endpoint": "chat.completions",
                    "model": None,
                    "stream": False,
                    "output_limit": "max_tokens",
                    "ignore_eos": False,
                }
            }
        },
    ),
    ("load", {"load": {"mode": "closed", "offered_rps": 3.0, "planned_rps": None, "achieved_rps": 2.5}}),
    ("smooth goodput", {"smooth_goodput": {"alpha": None, "readers": [{}, {}]}}),
    ("uncertainty", {"uncertainty": 0.0123}),
    ("uncertainty", {"uncertainty": None}),
    ("capture", {"capture": {"to": "folder", "rows": 1_200}}),
]
"""Terms of a replay and what is replaced in its result."""


TIMES = {"n": 9, "mean": 1234.567, "p50": 1.0, "p95": 2.0, "p99": 3.456}
SERVING = {"kv_tokens": 37_333, "ttft": 1.0, "tbt": 0.2}


def result(**changed: Any) -> dict[str, Any]:
    told: dict[str, Any] = {
        "scheduler": "static_fifo",
        "n": 1_000,
        "trace": "a.csv",
        "scale": 1.0,
        "servers": 1,
        "seed": 42,
        "load": {"offered_rps": 0.27012},
        "metrics": {"e2e": TIMES},
        "throughput_rps": 0.12345,
        "throughput_tps": 1234.5,
        "latency": TIMES,
        "queueing": TIMES,
        "request_sla_violation": 0.01234,
        "token_sla_violation": 0.0,
        "utilization": 0.9876,
        "batch_mean": 7.891,
        "bins": None,
        "outcomes": {"complete": 1_000},
        "model": {"alpha": 0.02, "beta": 0.001, "gamma": 0.5},
        "fit": None,
        "readings": {"request_sla": 20.0, "token_sla": 0.01, "eps": 0.005, "bins": 8},
    }
    return told | changed


MEASURED = {
    "metrics": {"e2e": TIMES, "ttft": TIMES, "itl": TIMES | {"p99": None}, "user_idle": TIMES},
    "smooth_goodput": {"tokens_per_second": 99.0, "alpha": 5.0, "speed_tokens_per_second": 20.0},
    "goodput": {"objectives": "ttft:1s", "requests_per_second": 0.1},
}
UNSERVED = {"too_large": 37, "late": 4, "late_midway": 3}
AT_ONCE = result(load={"offered_rps": None})
STRICT = result(load={"offered_rps": 3.0}, readings=result()["readings"] | {"request_sla": 5.0})
NOTHING = result(
    throughput_rps=None,
    token_sla_violation=None,
    utilization=None,
    batch_mean=None,
    latency=dict.fromkeys(TIMES),
    queueing=dict.fromkeys(TIMES),
)
PART = {"source": "gaps", "points": 1_000, "r2": 0.5, "error_max": 0.1}
ITERATING = {"beta": 0.007, "gamma": 0.3, "prefill": 9e-5, "context": 1e-9}
SWEPT: list[list[dict[str, Any]]] = [
    [result()],
    [result(), result(servers=4)],
    [result(), result(seed=43)],
    [AT_ONCE],
    [result(), AT_ONCE],
    [result(), result(scale=10.0, load={"offered_rps": 2.7012})],
    [result(), result(readings=result()["readings"] | {"eps": 0.001})],
    [result(), result(serving={"chunk": 64})],
    [result(**MEASURED), result(capacity={"rps": 3.0, "by": {"request": 3.0}})],
    [result(**MEASURED), STRICT],
    [NOTHING],
    [result(fit={"grid": "g.csv", "r2": 1.0, "points": 4, "error_max": 0.125})] * 2,
    [result(fit={"capture": "c", "r2": 0.5, "prefill": PART, "decode": PART}, model=ITERATING)],
    [result(), result(unserved=UNSERVED, serving=SERVING)],
    [
        result(unserved=UNSERVED, serving=SERVING),
        result(unserved={"too_large": 1_200}, serving=SERVING | {"kv_tokens": 100}),
    ],
    *([result(capacity={"rps": rps, "allowed": 0.05, "by": {"request": rps}})] for rps in (3.0, 0.0, None)),
]
"""Results of simulated runs, one list a table."""
