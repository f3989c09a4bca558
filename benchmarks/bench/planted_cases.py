"""What is planted for each of the ten tests, and where its result says what was found.

A truth is a closed form where there is one (a schedule's percentiles, a formula of the engine, a number of
seats), and else that of the same engine in virtual time (`virtual_truth.py`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, inf
from statistics import NormalDist, median
from typing import Any, Final

import virtual_truth as virtual

from llmtap.metrics.statistics import percentile
from llmtap.sim.model_options import SEED_ITERATIONS
from llmtap.units import NS_PER_S as NS

WAY_S: Final = 0.005
"""What the way between engine and load generator may add to a time, on a machine that does other work too."""
DIFFERENCE_S: Final = 0.0002
"""How far two ways may differ: where answers take longer, more are under way, all a little later."""
MS: Final = 1e3
Told = Mapping[str, Any]
Log = Sequence[Mapping[str, Any]]
"""What the server wrote down of each request (`--truth`), by the time at which it was whole."""


@dataclass(frozen=True, slots=True)
class Row:
    """A figure, what was planted, and whether that lies in the interval, of which an end may be open."""

    what: str
    planted: float
    found: float | None
    low: float | None
    high: float | None
    unit: str = ""
    way_to: float | None = None
    """What it would be if the way took WAY_S; None where the way plays no part."""
    sent: float | None = None
    """What the server's own log makes of it: it may have sent later than it was to."""

    @property
    def holds(self) -> str:
        if self.low is None and self.high is None:
            return "no interval"
        low = -inf if self.low is None else self.low
        high = inf if self.high is None else self.high
        truths = {"yes": self.planted} | ({} if self.sent is None else {"as sent": self.sent})
        for says, truth in truths.items():
            if low <= truth <= high:
                return says
        if self.way_to is not None:
            first, last = min(*truths.values(), self.way_to), max(*truths.values(), self.way_to)
            return "less the way" if low <= last and first <= high else "NO"
        return "NO"

    def cells(self) -> list[str]:
        scale = MS if self.unit == "ms" else 1.0
        unit = f" {self.unit}" if self.unit else ""

        def text(value: float | None) -> str:
            return "-" if value is None else f"{value * scale:.4g}"

        is_open = self.low is not None and self.high is None
        return [
            self.what,
            text(self.planted) + unit,
            text(self.sent),
            text(self.found) + unit * (self.found is not None),
            f"{text(self.low)} to {'open' if is_open else text(self.high)}",
            self.holds,
        ]


@dataclass(frozen=True, slots=True)
class Case:
    """A test, the servers it is sent to, and what was planted in them."""

    name: str
    test: str
    planted: str
    servers: Mapping[str, Sequence[str]]
    """Options of `llmtap sim serve`, by name; the target is the first."""
    params: Mapping[str, object]
    read: Callable[[Told, Log], list[Row]]
    workload: str | None = None
    arms: Mapping[str, str] = field(default_factory=dict)
    """Lines of `[arms.NAME]`, in which `{NAME}` is the address of the server of that name."""


def figure(
    what: str,
    planted: float,
    one: Told | None,
    unit: str = "ms",
    *,
    way: float | None = None,
    sent: float | None = None,
) -> Row:
    """Of a figure with its interval, as results have them. `way` is what the way may add, if anything."""
    if one is None:
        return Row(what, planted, None, None, None, unit)
    way_to = None if way is None else (planted if sent is None else sent) + way
    return Row(what, planted, one["value"], one["low"], one["high"], unit, way_to, sent)


def between(what: str, planted: float, low: float | None, high: float | None, unit: str = "") -> Row:
    """Of a search, that found the last level which holds, and the first that does not."""
    return Row(what, planted, low, low, high, unit)


def exactly(what: str, planted: float, found: float | None, unit: str = "") -> Row:
    """Of a count, or of a yes (1) or no (0)."""
    return Row(what, planted, found, found, found, unit)


def sent_loads(log: Log) -> list[list[Mapping[str, Any]]]:
    """The requests of each load: their ids begin alike."""
    loads: dict[str, list[Mapping[str, Any]]] = {}
    for one in log:
        loads.setdefault(one["id"].rpartition("-")[0], []).append(one)
    return list(loads.values())


def sent_ttfts(load: Log) -> dict[int, list[float]]:
    """TTFT as it was sent, ascending, by the number of tokens of the answer."""
    found: dict[int, list[float]] = {}
    for one in load:
        sent = one["sent_ns"][0]
        found.setdefault(len(sent), []).append((sent[0] - one["accepted_ns"]) / NS)
    return {tokens: sorted(values) for tokens, values in found.items()}


def sent_gaps(log: Log) -> list[float]:
    """Times between tokens as they were sent, ascending."""
    return sorted((later - earlier) / NS for t in log for earlier, later in pairwise(t["sent_ns"][0]))


# ---------------------------------------------------------------- the ten


def _ttft(s: float) -> Case:
    def read(told: Told, log: Log) -> list[Row]:
        shares = {"p50": 0.5, "p90": 0.9, "p95": 0.95}
        sent = sorted((t["sent_ns"][0][0] - t["accepted_ns"]) / NS for t in log[-told["requests"] :])
        return [
            figure(
                f"TTFT {name.upper()}",
                0.1 + 0.2 * p,
                told["ttft"][name],
                way=True,
                sent=percentile(sent, p),
            )
            for name, p in shares.items()
        ]

    return Case(
        "ttft",
        "ttft",
        "uniform from 100 to 300 ms",
        {"sim": ["--ttft", "200ms", "--spread", "0.5", "--tokens", "4"]},
        {"rate": 30, "requests": round(75 * s)},
        read,
        "input = 32\noutput = 4\n",
    )


def _itl(s: float) -> Case:
    sigma = 0.4

    def read(told: Told, log: Log) -> list[Row]:
        rows, end = [], len(log)
        for level in reversed(told["levels"]):  # the last of the log are the last level's
            sent = sent_gaps(log[end - level["requests"] : end])
            end -= level["requests"]
            for name, p in {"p99": 0.99, "p90": 0.9, "p50": 0.5}.items():
                gap_s = 0.020 * exp(sigma * NormalDist().inv_cdf(p) - sigma * sigma / 2)
                what = f"ITL {name.upper()} at {level['level']:g} %"
                rows.append(figure(what, gap_s, level["itl"][name], sent=percentile(sent, p)))
        return rows[::-1]

    return Case(
        "itl",
        "itl",
        "lognormal gaps, mean 20 ms, sigma 0.4",
        {"sim": ["--set", f"pacing.jitter={sigma}"]},
        {"max_rate": 8, "levels": "50,100", "requests": round(8 * s), "output_tokens": 64},
        read,
        "input = 32\noutput = 64\n",
    )


def _bimodal(s: float) -> Case:
    shape = virtual.Shape("continuous_batching", {}, [(1.0, 600, 50)])

    def read(told: Told, log: Log) -> list[Row]:
        (level,) = told["levels"]
        truth = virtual.gaps(shape, 8.0, count=2_000)
        sent = sent_gaps(log[-level["requests"] :])
        stall = (2 * SEED_ITERATIONS.beta_ns + 600 * SEED_ITERATIONS.prefill_ns) / 1e9
        modality = level["modality"] or {"unimodal": True, "modes": []}
        modes = modality["modes"]
        near = min(modes, key=lambda mode: abs(mode - stall), default=None)
        return [
            exactly("multimodal", 1, float(not modality["unimodal"])),
            *(
                figure(
                    f"ITL {name.upper()}",
                    percentile(truth, p) or 0.0,
                    level["itl"][name],
                    sent=percentile(sent, p),
                )
                for name, p in {"p50": 0.5, "p90": 0.9, "p95": 0.95}.items()
            ),
            # A mode has no interval: within 10 %, since how many decode beside a prefill varies.
            Row("mode of stalled tokens", stall, near, stall * 0.9, stall * 1.1, "ms")
            if near is not None and abs(near - stall) <= 0.1 * stall
            else exactly("mode of stalled tokens", stall, near, "ms"),
        ]

    return Case(
        "itl-bimodal",
        "itl",
        "prefills of 600 tokens stall all that decode for 59 ms",
        {"sim": ["--scheduler", "continuous_batching"]},
        {"max_rate": 8, "levels": "100", "requests": round(10 * s), "output_tokens": 50},
        read,
        "input = 600\noutput = 50\n",
    )


SEATS: Final = virtual.Shape("continuous_batching", {"seqs_max": "4"}, [(1.0, 1_000, 16)])
SEATS_SERVER: Final = ("--scheduler", "continuous_batching", "--serving", "seqs_max=4")
SEATS_WORKLOAD: Final = "input = 1000\noutput = 16\n"


def _throughput(s: float) -> Case:
    """The step is wide: whether 1 % too much is too much, no load of seconds can tell."""

    def read(told: Told, log: Log) -> list[Row]:
        truth = virtual.backlog_rps(SEATS)
        return [between("sustainable load", truth, told["sustainable_load_rps"], told["limit"], "requests/s")]

    return Case(
        "throughput",
        "throughput",
        "4 seats, prompts of 1,000 tokens",
        {"sim": SEATS_SERVER},
        {"arrivals": "uniform", "rate_min": 5, "rate_max": 40, "rate_step": 5, "duration": f"{1.25 * s:g}s"},
        read,
        SEATS_WORKLOAD,
    )


def _tradeoff(s: float) -> Case:
    percents = (25, 50, 75, 90, 150)
    rates = [8 * percent / 100 for percent in percents]

    def read(told: Told, log: Log) -> list[Row]:
        def before(rate: float | None) -> float | None:
            return None if rate is None else max((r for r in rates if r < rate - 1e-9), default=0.0)

        knee, grows = told["knee_rps"], told["queue_grows_from_rps"]
        truth = virtual.knee(SEATS, rates, s)
        assert truth is not None
        return [
            exactly("knee, the level", truth, knee, "requests/s"),
            between("knee, from the level before", virtual.backlog_rps(SEATS), before(knee), knee),
            between("queue grows, likewise", virtual.backlog_rps(SEATS), before(grows), grows),
        ]

    return Case(
        "tradeoff",
        "tradeoff",
        "the same engine",
        {"sim": SEATS_SERVER},
        {"arrivals": "uniform", "max_rate": 8, "levels": ",".join(map(str, percents)), "duration": f"{s:g}s"},
        read,
        SEATS_WORKLOAD,
    )


def _capacity(s: float) -> Case:
    def read(told: Told, log: Log) -> list[Row]:
        best, limit = told["max_concurrency"], told["limit"]
        return [between("concurrency", 6, best, None if limit is None else limit - 1)]

    return Case(
        "capacity",
        "capacity",
        "6 seats; the seventh waits for half a second",
        {"sim": ("--scheduler", "continuous_batching", "--serving", "seqs_max=6")},
        {
            "ttft_p99": "300ms",
            "output_tokens": 64,
            "initial": 4,
            "maximum": 24,
            "resolution": 1,
            "duration": f"{s / 4:g}s",
            "per_slot": 3,
        },
        read,
        "input = 8\noutput = 64\n",
    )


def _fairness(s: float, scheduler: str, short_input: int, long_input: int) -> Case:
    classes = [
        {"name": "short", "share": 0.8, "input": [short_input] * 2, "output": [3, 3]},
        {"name": "long", "share": 0.2, "input": [long_input] * 2, "output": [70, 70]},
    ]
    shape = virtual.Shape(scheduler, {}, [(0.8, short_input, 3), (0.2, long_input, 70)])

    def read(told: Told, log: Log) -> list[Row]:
        of = told["classes"]
        alone = [of[name]["alone"]["rate_rps"] for name in ("short", "long")]
        index, inflation = virtual.jain(shape, told["rate_rps"], alone)
        sent_index, sent = virtual.compared(*_mixed_and_alone(log, [one[2] for one in shape.classes]))
        jain = told["jain"] and told["jain"]["headline"]
        return [
            figure("Jain's index", index, jain, "", sent=sent_index),
            *(
                figure(
                    f"inflation at P50, {name}", inflation[i], of[name]["inflation"]["p50"], "", sent=sent[i]
                )
                for i, name in enumerate(("short", "long"))
            ),
        ]

    fair = "short wait for long" if scheduler == "static_fifo" else "nobody waits for another's answer"
    return Case(
        f"fairness-{scheduler}",
        "fairness",
        f"{scheduler}: {fair}",
        {"sim": ("--scheduler", scheduler)},
        {
            "classes": json.dumps(classes),
            "rate": 5,
            "duration": f"{3 * s:g}s",
            "requests_per_class": round(2.5 * s),
            "content": "words",
        },
        read,
    )


def _mixed_and_alone(
    log: Log, tokens: Sequence[int]
) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    """TTFTs as they were sent in the mix, and of each class by itself; classes by their answers' tokens."""
    loads = [sent_ttfts(load) for load in sorted(sent_loads(log), key=len)]  # warm-ups are short
    mixed = next(load for load in reversed(loads) if set(load) == set(tokens))
    alone = [next(load for load in reversed(loads) if set(load) == {n})[n] for n in tokens]
    return {i: mixed[n] for i, n in enumerate(tokens)}, dict(enumerate(alone))


def _prefix_cache(s: float) -> Case:
    own, prefix, rate = 400, 1_600, 1.5

    def read(told: Told, log: Log) -> list[Row]:
        middle = {}
        for state, tokens in {"off": own + prefix, "warm": own}.items():
            shape = virtual.Shape("continuous_batching", {}, [(1.0, tokens, 4)])
            values = virtual.ttfts(shape, rate)[0]
            middle[state] = values[len(values) // 2]
        hits, less = told["hit_rate"]["warm"], told["reduction"]["warm"]["p50"]
        return [
            Row(
                "TTFT reduction, warm, at P50",
                1 - middle["warm"] / middle["off"],
                less["value"],
                less["low"],
                less["high"],
                way_to=1 - (middle["warm"] + WAY_S) / (middle["off"] + WAY_S),
            ),
            *(
                figure(f"TTFT P50, {state}", middle[state], told["ttft"][state]["p50"], way=WAY_S)
                for state in middle
            ),
            exactly("hit rate, warm", 1.0, None if hits is None else round(hits["value"], 3)),
        ]

    engine = ("--scheduler", "continuous_batching")
    return Case(
        "prefix-cache",
        "prefix-cache",
        "1,600 of 2,000 tokens are shared, at 88 us a token",
        {"on": (*engine, "--serving", "prefix_cache=true"), "off": engine},
        {
            "prefix_tokens": f"{prefix},{prefix}",
            "prefixes": 2,
            "sharing": 1.0,
            "rate": rate,
            "requests": round(2.5 * s),
            "repeats": 2,
            "concurrency": 0,
        },
        read,
        f"input = {own}\noutput = 4\n",
        {"cache_off": 'url = "{off}"', "cache_on": 'url = "{on}"'},
    )


def _memory_pressure(s: float) -> Case:
    def read(told: Told, log: Log) -> list[Row]:
        base, more = told["levels"]
        events = more["preemption_events"]
        return [
            exactly("preempted at 100 %", 0, base["preemption_events"]),
            exactly("some preempted at 150 %", 1, None if events is None else float(events > 0)),
            exactly("complete at 150 %", 1, more["completion"] and more["completion"]["value"]),
            exactly("recovered", 1, float(told["recovered"])),
        ]

    return Case(
        "memory-pressure",
        "memory-pressure",
        "KV memory for 8 requests of 192 tokens",
        {"sim": ("--scheduler", "continuous_batching", "--serving", "kv_tokens=1600")},
        {"capacity": 8, "levels": "100,150", "duration": f"{s:g}s", "output_tokens": 96},
        read,
        "input = 96\noutput = 96\n",
    )


def _long_context(s: float) -> Case:
    thousand_s = 0.020

    def ttft_s(tokens: float) -> float:
        linear = (SEED_ITERATIONS.beta_ns + SEED_ITERATIONS.prefill_ns * tokens) / 1e9
        return linear + thousand_s * (tokens / 1000) ** 2

    def read(told: Told, log: Log) -> list[Row]:
        quadratic = told["fits"].get("quadratic")
        bend = None if quadratic is None else quadratic["c2"] * 1e9
        return [
            *(
                figure(f"mean TTFT of {one['length']}", ttft_s(one["context"]), one["ttft_mean"], way=WAY_S)
                for one in told["lengths"]
            ),
            exactly("the best fit is quadratic", 1, float(told["best_fit"] == "quadratic")),
            # A fit's terms have no intervals: within 5 %.
            Row("ns a squared token", thousand_s * 1e3, bend, thousand_s * 950, thousand_s * 1050)
            if bend is not None and abs(bend / (thousand_s * 1e3) - 1) < 0.05
            else exactly("ns a squared token", thousand_s * 1e3, bend),
        ]

    return Case(
        "long-context",
        "long-context",
        "attention: 20 ms for 1,000 tokens, and as the square",
        {"sim": ("--scheduler", "continuous_batching", "--serving", "attention=20ms")},
        {"lengths": "512,1024,2048,4096,8192", "requests": max(3, round(s * 0.75)), "output_tokens": 2},
        read,
    )


def _guardrails(s: float) -> Case:
    filter_in, filter_out, ttft, itl, hold = 0.040, 0.015, 0.100, 0.010, 4
    requests = round(5 * s)
    # Held are the first four tokens, which the fourth lets go; the last piece waits for the filter alone.
    late = {
        "input_filter": (filter_in, filter_in),
        "output_filter": ((hold - 1) * itl + filter_out, filter_out),
    }
    pairs = zip(*late.values(), strict=True)
    late["full"] = tuple(one + other for one, other in pairs)

    def read(told: Told, log: Log) -> list[Row]:
        (level,) = told["levels"]
        sent, found = _filtered(log), []
        for arm, planted in {**late, "baseline_again": (0.0, 0.0)}.items():
            for i, (metric, value) in enumerate(zip(("ttft", "e2e"), planted, strict=True)):
                shift = level["arms"][arm]["overhead"][metric]["shift"]
                if shift is not None:
                    shift = {**shift, "value": shift["difference"]}
                really = sent[round(late[arm][0], 6)][i] - sent[0.0][i] if arm in late else None
                what = f"{metric.upper()} overhead, {arm}"
                found.append(
                    figure(what, value, shift, sent=really, way=DIFFERENCE_S if arm in late else None)
                )
        return found

    def _filtered(log: Log) -> dict[float, tuple[float, float]]:
        """Medians of TTFT and E2E as they were sent, by how much later the first token was due."""
        found: dict[float, list[tuple[float, float]]] = {}
        for one in (one for load in sent_loads(log) if len(load) == requests for one in load):
            begun, sent = one["accepted_ns"], one["sent_ns"][0]
            later = round((one["due_ns"][0][0] - begun) / NS - ttft, 6)
            found.setdefault(later, []).append(((sent[0] - begun) / NS, (sent[-1] - begun) / NS))
        return {
            later: (median(t for t, _ in all_), median(e for _, e in all_)) for later, all_ in found.items()
        }

    before = f'"x-sim-input-filter" = "{filter_in * MS:g}ms"'
    after = f'"x-sim-output-hold" = "{hold}", "x-sim-output-filter" = "{filter_out * MS:g}ms"'
    return Case(
        "guardrail-overhead",
        "guardrail-overhead",
        "input 40 ms; output 15 ms for each 4 tokens",
        {"sim": ("--ttft", f"{ttft * MS:g}ms", "--itl", f"{itl * MS:g}ms")},
        {"max_rate": 20, "levels": 50, "requests": requests, "repeats": 3},
        read,
        "input = 32\noutput = 20\n",
        {
            "baseline": "",
            "input_filter": f"headers = {{{{ {before} }}}}",
            "output_filter": f"headers = {{{{ {after} }}}}",
            "full": f"headers = {{{{ {before}, {after} }}}}",
        },
    )


def cases(s: float) -> list[Case]:
    """All, with loads of about so many seconds."""
    return [
        _ttft(s),
        _throughput(s),
        _tradeoff(s),
        _itl(s),
        _bimodal(s),
        _capacity(s),
        _fairness(s, "static_fifo", 12, 50),
        _fairness(s, "continuous_batching", 600, 1_200),
        _prefix_cache(s),
        _memory_pressure(s),
        _long_context(s),
        _guardrails(s),
    ]
