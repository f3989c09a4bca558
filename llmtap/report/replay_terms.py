"""Turn the JSON of a replay into sentences on the basis of its figures: plan, load, window, sender.

For `replay.py`: `plan_rows` gives the rows of the settings, `rests_on` the caption of a chart, functions with
`_said` one sentence each. The report of a benchmark uses the sentence on the self-test.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from llmtap.report.summary import scraped_said
from llmtap.report.values import at, counted, joined, milliseconds, number
from llmtap.units import format_bytes

RATES: Final = (
    "Rates of requests: asked is the mean rate of the arrival process; planned is the rate of the arrivals"
    " that were drawn, which differs from it if they are few; sent counts requests that left on time, and is"
    " the load of the latencies; ended counts answers over the whole window, its drain included."
)
"""Difference between `arrivals` and `load`; llmtap/load/replay/result.py has their names in JSON."""
_MODES: Final = {"open": "open loop", "closed": "closed loop"}
_DEPTH_MAX: Final = 8
_ALWAYS: Final = ("load", "window", "arrivals", "sent to", "uncertainty")
_Json = Mapping[str, Any]


def heading_of(result: _Json) -> str:
    plan = result.get("plan") or {}
    return f"Replay of {_name(plan)} to {plan.get('target', '?')}"


def plan_rows(result: _Json) -> list[tuple[str, str]]:
    """Term and text; terms without a text are left out."""
    plan, sender = result.get("plan") or {}, result.get("sender") or {}
    rows = [
        ("trace" if plan.get("trace") else "workload", _name(plan)),
        ("sent to", _target(plan)),
        ("requests", _requests(result)),
        ("retries", retries_said(result.get("load") or {})),
        ("arrivals", _arrivals(plan)),
        ("load", _load(result.get("load") or {})),
        ("window", _window(result.get("window") or {})),
        ("seed", _text(plan.get("seed"))),
        ("prompts", _prompts(plan.get("prompts") or {})),
        ("answers", _answers(plan.get("body") or {})),
        ("lengths", _lengths(result.get("lengths") or {})),
        ("warm-up", _warm_up(result.get("warmup"))),
        ("ITL", _itl(at(result, "metrics", "itl") or {})),
        ("chunks", _chunks(result.get("chunking") or {})),
        ("tokens", _tokens(result.get("tokens") or {})),
        ("smooth goodput", _smooth(result.get("smooth_goodput") or {})),
        ("objectives", _text(at(result, "goodput", "objectives"))),
        ("sender", _sender(sender)),
        ("clocks", clocks_said(sender)),
        ("server metrics", scraped_said(at(result, "system", "summary") or {})),
        ("uncertainty", _uncertainty(result.get("uncertainty"), sender.get("clock"))),
        ("error of our own times", selftest_said(result.get("selftest") or {})),
    ]
    return [(term, text) for term, text in rows if text]


def rests_on(result: _Json, samples: str, says: Sequence[str] = ()) -> list[str]:
    """One figure's caption, in parts. `says` are terms of `plan_rows` beside those of every caption."""
    rows = dict(plan_rows(result))
    told = [
        rows[term] if term in ("load", "ITL") else f"{term} {rows[term]}"
        for term in (*says, *_ALWAYS)
        if term in rows
    ]
    return [samples, *told] if samples else told


def all_of(told: _Json, *parts: str) -> list[tuple[str, str]]:
    """Every value in these parts, by its path."""
    return [row for part in parts if told.get(part) for row in _leaves(part, told[part], 0)]


def _leaves(path: str, value: Any, depth: int) -> Iterator[tuple[str, str]]:
    if depth < _DEPTH_MAX and isinstance(value, Mapping) and value:
        for name, one in value.items():
            yield from _leaves(f"{path}.{name}", one, depth + 1)
    elif depth < _DEPTH_MAX and isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        for i, one in enumerate(value, 1):
            yield from _leaves(f"{path}.{i}", one, depth + 1)
    elif isinstance(value, list):
        yield path, ", ".join(_text(one) or "-" for one in value) or "none"
    else:
        yield path, "none" if value == {} else _text(value) or "-"


def _text(value: Any) -> str:
    """All digits of a number; empty for null."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return f"({', '.join(_text(one) or '-' for one in value)})"
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _name(plan: _Json) -> str:
    return str(plan.get("trace") or at(plan, "workload", "name") or "?")


def _target(plan: _Json) -> str:
    body = plan.get("body") or {}
    said = [str(plan["target"])] if plan.get("target") else []
    said += [f"{name} {body[name]}" for name in ("endpoint", "model") if body.get(name)]
    return ", ".join(said + ([f"connections {plan['connections']}"] if plan.get("connections") else []))


def _requests(result: _Json) -> str:
    load, conversations = result.get("load") or {}, at(result, "plan", "conversations")
    if load.get("planned") is None:
        return ""
    said = [f"{load.get('sent', 0):,} of {load['planned']:,} sent"]
    if conversations:
        said.append(f"{conversations:,} conversations, whose later turns wait for the answer before")
    said += [f"{load[name]:,} {name}" for name in ("dropped", "unsent") if load.get(name)]
    if n := at(load, "retries", "n"):
        said.append(counted(n, "retry", "retries"))
    if load.get("stopped"):
        said.append(f"stopped: {load['stopped']}")
    return ", ".join(said)


def _arrivals(plan: _Json) -> str:
    if "arrivals" not in plan:
        return ""
    arrivals = plan["arrivals"]
    if not arrivals:
        return "whenever an answer has ended"
    said = [process_said(arrivals)]
    if arrivals.get("rate_rps") is not None:
        said.append(f"{number(arrivals['rate_rps'])} req/s asked")
    shown = ("arrivals", "given", "rate_rps", "scale", "speed", "recorded_rps")
    said += [speed] if (speed := speed_said(arrivals)) else []
    said += [f"{k} {_text(value)}" for k, value in arrivals.items() if k not in shown and value is not None]
    return ", ".join(said)


def process_said(arrivals: _Json) -> str:
    """An arrival process as the user wrote it, and with its own parameters where they differ."""
    process, given = str(arrivals.get("arrivals", "?")), arrivals.get("given")
    return process if given in (None, process) else f"{given} ({process})"


def speed_said(arrivals: _Json) -> str:
    """Factor between the recorded times and those asked, its option and the recorded rate; empty for 1."""
    scale, speed, recorded = (arrivals.get(name) for name in ("scale", "speed", "recorded_rps"))
    if scale is None or (scale == 1 and speed is None):
        return ""
    said = f"--speed {number(speed)}" if speed is not None else f"times divided by {number(scale)}"
    return said + (f" of {number(recorded)} req/s recorded" if recorded else "")


def _load(load: _Json) -> str:
    said = [_MODES[load["mode"]]] if load.get("mode") in _MODES else []
    if load.get("planned_rps") is not None:
        said.append(f"{number(load['offered_rps'])} of {number(load['planned_rps'])} req/s planned were sent")
    elif load.get("offered_rps") is not None:
        said.append(f"{number(load['offered_rps'])} req/s sent")
    if load.get("achieved_rps") is not None:
        said.append(f"{number(load['achieved_rps'])} req/s ended over the window")
    if load.get("sending_rps") is not None:
        said.append(f"{number(load['sending_rps'])} req/s in the {number(load['sending'])} s of sending")
    return ", ".join(said)


def _window(window: _Json) -> str:
    said = [f"{number(window['seconds'])} s"] if window.get("seconds") is not None else []
    said += [f"{window['start']} to {window.get('end', '?')}"] if window.get("start") else []
    return ", ".join(said)


def _prompts(prompts: _Json) -> str:
    if not prompts.get("n"):
        return ""
    ways = ", ".join(map(str, prompts.get("ways") or ()))
    said = f"{prompts.get('exact', 0):,} of {prompts['n']:,} of exact length" + (
        f" by {ways}" if ways else ""
    )
    low, high = prompts.get("missed_min"), prompts.get("missed_max")
    return said + (f", others off by {low:,} to {high:,} tokens" if low or high else "")


def _answers(body: _Json) -> str:
    said = []
    if body.get("stream") is not None:
        said.append("streamed" if body["stream"] else "in one piece")
    if limit := body.get("output_limit"):
        said.append(f"as long as {limit} allows" if body.get("ignore_eos") else f"at most {limit}")
    if body.get("temperature") is not None:
        said.append(f"temperature {_text(body['temperature'])}")
    return ", ".join(said)


def lengths_said(lengths: _Json) -> str:
    """How many prompts and answers had the planned length."""
    said = []
    if lengths.get("input_told"):
        off = lengths.get("input_off_max")
        said.append(f"{lengths['input_exact']:,} of {lengths['input_told']:,} prompts as long as planned")
        said[-1] += f" (at most {off:,} tokens off)" if off else ""
    if lengths.get("output_told"):
        said.append(f"{lengths['output_exact']:,} of {lengths['output_told']:,} answers")
        said[-1] += "" if lengths.get("output_wanted") else " (which the server was not told to keep to)"
    return ", ".join(said)


def _lengths(lengths: _Json) -> str:
    said = lengths_said(lengths)
    return f"{said}, by the server's own count" if said else ""


def _warm_up(warmup: _Json | None) -> str:
    if warmup is None:
        return ""
    if not warmup.get("requests"):
        return f"none ({warmup['skipped']})" if warmup.get("skipped") else "none"
    not_stable = "not probed" if warmup.get("probes") == [] else "not stable"
    said = [
        f"{warmup['requests']:,} requests, {warmup.get('tokens', 0):,} tokens",
        f"{number(warmup.get('duration'), 3)} s", "stable" if warmup.get("stable") else not_stable,
    ]  # fmt: skip
    for name, title in (("ttft", "TTFT"), ("e2e", "E2E")):
        share = at(warmup, "variation", name)
        said += [] if share is None else [f"{title} varied by {number(share * 100, 3)} %"]
    return ", ".join(said + ([str(warmup["problem"])] if warmup.get("problem") else []))


def _itl(itl: _Json) -> str:
    if not itl.get("option"):
        return ""
    policies = "; ".join(f"{policy}: {n:,}" for policy, n in (itl.get("policy") or {}).items())
    return f"ITL option {itl['option']}" + (f" ({policies})" if policies else "")


def _chunks(chunking: _Json) -> str:
    if chunking.get("events_per_read") is None:
        return ""
    said = f"{chunking['content_events']:,} of {chunking['events']:,} events carry output"
    return f"{said}, {number(chunking['events_per_read'], 3)} events a read"


def _tokens(tokens: _Json) -> str:
    said = [f"{tokens[name]:,} {name}" for name in ("input", "output") if tokens.get(name) is not None]
    sources = ", ".join(f"{source} ({n:,})" for source, n in (tokens.get("source") or {}).items())
    return ", ".join([*said, *([f"counted by {sources}"] if sources else [])])


def _smooth(smooth: _Json) -> str:
    if smooth.get("alpha") is not None:
        speed = f"reader of {number(smooth['speed_tokens_per_second'])} tokens/s"
        idle = f", idle {smooth['idle']}" if smooth.get("idle") else ""
        return f"alpha {number(smooth['alpha'])}, {speed}{idle}"
    readers = len(smooth.get("readers") or ())
    return f"{readers} readers of different speed" if readers else ""


def _sender(sender: _Json) -> str:
    processes = sender.get("processes") or []
    if not processes:
        return ""
    said = [
        counted(len(processes), "process", "processes"),
        f"at most {number(max(p['cpu_share'] for p in processes) * 100, 3)} % of a CPU each",
        f"{format_bytes(sum(p['rss_bytes'] for p in processes))} in all",
    ]
    if sender.get("cpu_seconds_per_1000_tokens") is not None:
        said.append(f"{number(sender['cpu_seconds_per_1000_tokens'], 3)} s of CPU per 1,000 tokens")
    return ", ".join([*said, connections_said(sender)])


def connections_said(sender: _Json) -> str:
    """How many there were, and how many of them before there was a request to send."""
    processes = sender.get("processes") or ()
    said = counted(sum(p["connections_opened"] for p in processes), "connection")
    before = sum(p.get("connections_opened_before") or 0 for p in processes)
    return said + (f" ({before:,} opened before the load)" if before else "")


def retries_said(load: _Json) -> str:
    """How often requests were sent again, why, and how figures count them; empty where none was."""
    n = at(load, "retries", "n")
    if not n:
        return ""
    why = joined(at(load, "retries", "reasons") or {})
    return (
        f"{n:,}{f' ({why})' if why else ''}; lateness is of first attempts, latencies count from the last"
        " ones; those from schedule have the waits in them"
    )


def clocks_said(sender: _Json) -> str:
    """How well the clocks of sending hosts agree with that of this one; empty where none has another."""
    hosts: dict[str, _Json] = {}
    for clock in sender.get("clocks") or ():
        known = hosts.get(clock["host"])
        if not clock["shared"] and (known is None or known["rtt"] < clock["rtt"]):
            hosts[clock["host"]] = clock
    said = [
        f"{host} within {milliseconds(clock['rtt'] / 2)} ms, {milliseconds(abs(clock['offset']))} ms"
        f" {'ahead' if clock['offset'] >= 0 else 'behind'}"
        for host, clock in hosts.items()
    ]
    return f"{'; '.join(said)} (allowed for)" if said else ""


def selftest_said(told: _Json) -> str:
    """The error of our own TTFT and ITL by a self-test, with its load, counts and duration."""
    load = told.get("load")
    if not load:
        return ""
    said = []
    for name, what in (("ttft", "TTFT"), ("itl", "ITL")):
        p50, p99, most = (milliseconds(told[name][figure]) for figure in ("p50", "p99", "max"))
        said.append(f"{what} p50 {p50}, p99 {p99}, worst {most} ms (n {told[name]['n']:,})")
    return (
        f"{'; '.join(said)}; self-test of {counted(load['streams'], 'stream')},"
        f" {number(load['tokens_per_second'], 3)} tokens/s, {number(load['duration'], 2)} s"
    )


def _uncertainty(seconds: float | None, clock: str | None) -> str:
    return (
        "" if seconds is None else f"{milliseconds(seconds)} ms" + (f", stamps by {clock}" if clock else "")
    )
