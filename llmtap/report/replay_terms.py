"""What the figures of a replay rest on, in words: the plan, the load, the window, the counting, the sender.

A figure that leaves the page, printed or as a screenshot, takes its caption along, so each says the most of
it; the page says all.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from llmtap.report.sweep import number
from llmtap.report.system import scraped_said
from llmtap.report.terminal import milliseconds
from llmtap.units import format_bytes

__all__ = [
    "RATES", "all_of", "clocks_said", "connections_said", "heading_of", "plan_rows", "process_said",
    "rests_on", "retries_said",
]  # fmt: skip

RATES: Final = (
    "Rates of requests: asked is the mean that the arrival process was given; planned is what it came to when"
    " it was drawn, as far as there was time for it; sent is how much of that left in time: what latencies"
    " are told at; ended counts answers over the whole window, its drain included."
)
"""Difference between `arrivals` and `load`; llmtap/load/replay/result.py has their names in JSON."""
_MODES: Final = {"open": "open loop", "closed": "closed loop"}
_DEPTH_MAX: Final = 8
_ALWAYS: Final = ("load", "window", "arrivals", "sent to", "uncertainty")


def heading_of(result: Mapping[str, Any]) -> str:
    """What was sent where."""
    plan = result.get("plan") or {}
    return f"Replay of {_name(plan)} to {plan.get('target', '?')}"


def plan_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Term and text; terms without a text are left out."""
    plan = result.get("plan") or {}
    rows = [
        ("trace" if plan.get("trace") else "workload", _name(plan)),
        ("sent to", _target(plan)),
        ("requests", _requests(result)),
        ("retries", retries_said(result.get("load") or {})),
        ("arrivals", _arrivals(plan)),
        ("load", _load(result)),
        ("window", _window(result)),
        ("seed", _text(plan.get("seed"))),
        ("prompts", _prompts(plan)),
        ("answers", _answers(plan)),
        ("lengths", _lengths(result)),
        ("warm-up", _warm_up(result)),
        ("ITL", _itl(result)),
        ("tokens", _tokens(result)),
        ("smooth goodput", _smooth(result)),
        ("objectives", _text((result.get("goodput") or {}).get("objectives"))),
        ("sender", _sender(result)),
        ("clocks", clocks_said(result.get("sender") or {})),
        ("server metrics", scraped_said((result.get("system") or {}).get("summary") or {})),
        ("uncertainty", _uncertainty(result)),
    ]
    return [(term, text) for term, text in rows if text]


def rests_on(result: Mapping[str, Any], samples: str, says: Sequence[str] = ()) -> list[str]:
    """One figure's caption, in parts. `says` are terms of `plan_rows` that it needs beside those that every
    figure does."""
    rows = dict(plan_rows(result))
    told = [
        rows[term] if term in ("load", "ITL") else f"{term} {rows[term]}"
        for term in (*says, *_ALWAYS)
        if term in rows
    ]
    return [samples, *told] if samples else told


def all_of(told: Mapping[str, Any], *parts: str) -> list[tuple[str, str]]:
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
    elif value == {}:
        yield path, "none"
    else:
        yield path, _text(value) or "-"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return f"({', '.join(_text(one) or '-' for one in value)})"
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _name(plan: Mapping[str, Any]) -> str:
    return str(plan.get("trace") or (plan.get("workload") or {}).get("name") or "?")


def _target(plan: Mapping[str, Any]) -> str:
    body = plan.get("body") or {}
    said = [str(plan["target"])] if plan.get("target") else []
    said += [f"{name} {body[name]}" for name in ("endpoint", "model") if body.get(name)]
    if plan.get("connections"):
        said.append(f"connections {plan['connections']}")
    return ", ".join(said)


def _requests(result: Mapping[str, Any]) -> str:
    load, plan = result.get("load") or {}, result.get("plan") or {}
    if load.get("planned") is None:
        return ""
    said = [f"{load.get('sent', 0):,} of {load['planned']:,} sent"]
    if plan.get("conversations"):
        said.append(f"{plan['conversations']:,} conversations, whose later turns wait for the answer before")
    said += [f"{load[name]:,} {name}" for name in ("skipped", "dropped", "unsent") if load.get(name)]
    retries = load.get("retries") or {}
    if isinstance(retries, Mapping) and retries.get("n"):
        said.append(_counted(retries["n"], "retry", "retries"))
    if load.get("stopped"):
        said.append(f"stopped: {load['stopped']}")
    return ", ".join(said)


def _arrivals(plan: Mapping[str, Any]) -> str:
    if "arrivals" not in plan:
        return ""
    arrivals = plan["arrivals"]
    if not arrivals:
        return "whenever an answer has ended"
    said = [process_said(arrivals)]
    said += [
        f"{name} {_text(value)}"
        for name, value in arrivals.items()
        if name not in ("arrivals", "given", "rate_rps") and value is not None
    ]
    if arrivals.get("rate_rps") is not None:
        said.insert(1, f"{number(arrivals['rate_rps'])} req/s asked")
    return ", ".join(said)


def process_said(arrivals: Mapping[str, Any]) -> str:
    """A process as somebody wrote it, and with its own parameters where those are other ones."""
    process, given = str(arrivals.get("arrivals", "?")), arrivals.get("given")
    return process if given in (None, process) else f"{given} ({process})"


def _load(result: Mapping[str, Any]) -> str:
    load = result.get("load") or {}
    said = [_MODES[load["mode"]]] if load.get("mode") in _MODES else []
    if load.get("planned_rps") is not None:
        said.append(f"{number(load['offered_rps'])} of {number(load['planned_rps'])} req/s planned were sent")
    elif load.get("offered_rps") is not None:
        said.append(f"{number(load['offered_rps'])} req/s sent")
    if load.get("achieved_rps") is not None:
        said.append(f"{number(load['achieved_rps'])} req/s ended over the window")
    return ", ".join(said)


def _window(result: Mapping[str, Any]) -> str:
    window = result.get("window") or {}
    said = [f"{number(window['seconds'])} s"] if window.get("seconds") is not None else []
    if window.get("start"):
        said.append(f"{window['start']} to {window.get('end', '?')}")
    return ", ".join(said)


def _prompts(plan: Mapping[str, Any]) -> str:
    prompts = plan.get("prompts") or {}
    if not prompts.get("n"):
        return ""
    ways = ", ".join(map(str, prompts.get("ways") or ()))
    said = f"{prompts.get('exact', 0):,} of {prompts['n']:,} of exact length" + (
        f" by {ways}" if ways else ""
    )
    low, high = prompts.get("missed_min"), prompts.get("missed_max")
    return said + (f", others off by {low:,} to {high:,} tokens" if low or high else "")


def _answers(plan: Mapping[str, Any]) -> str:
    body = plan.get("body") or {}
    said = []
    if body.get("stream") is not None:
        said.append("streamed" if body["stream"] else "in one piece")
    if body.get("output_limit"):
        said.append(f"as long as {body['output_limit']} allows" if body.get("ignore_eos") else "")
        said.append("" if body.get("ignore_eos") else f"at most {body['output_limit']}")
    if body.get("temperature") is not None:
        said.append(f"temperature {_text(body['temperature'])}")
    return ", ".join(one for one in said if one)


def _lengths(result: Mapping[str, Any]) -> str:
    """By the server's own count."""
    told = result.get("lengths") or {}
    said = []
    if told.get("input_told"):
        off = told.get("input_off_max")
        said.append(f"{told['input_exact']:,} of {told['input_told']:,} prompts as long as planned")
        said[-1] += f" (at most {off:,} tokens off)" if off else ""
    if told.get("output_told"):
        said.append(f"{told['output_exact']:,} of {told['output_told']:,} answers")
        said[-1] += "" if told.get("output_wanted") else " (which the server was not told to keep to)"
    return ", ".join(said) + (", by the server's own count" if said else "")


def _warm_up(result: Mapping[str, Any]) -> str:
    warmup = result.get("warmup")
    if warmup is None:
        return ""
    if not warmup.get("requests"):
        return f"none ({warmup['skipped']})" if warmup.get("skipped") else "none"
    said = [f"{warmup['requests']:,} requests, {warmup.get('tokens', 0):,} tokens"]
    said.append(f"{number(warmup.get('duration'), 3)} s")
    not_stable = "not probed" if warmup.get("probes") == [] else "not stable"
    said.append("stable" if warmup.get("stable") else not_stable)
    said += [
        f"{name} varied by {number(share * 100, 3)} %"
        for name, share in (("TTFT", (warmup.get("variation") or {}).get("ttft")),
                            ("E2E", (warmup.get("variation") or {}).get("e2e")))
        if share is not None
    ]  # fmt: skip
    return ", ".join([*said, *([str(warmup["problem"])] if warmup.get("problem") else [])])


def _itl(result: Mapping[str, Any]) -> str:
    itl = (result.get("metrics") or {}).get("itl") or {}
    if not itl.get("option"):
        return ""
    policies = "; ".join(f"{policy}: {n:,}" for policy, n in (itl.get("policy") or {}).items())
    return f"ITL option {itl['option']}" + (f" ({policies})" if policies else "")


def _tokens(result: Mapping[str, Any]) -> str:
    tokens = result.get("tokens") or {}
    said = [f"{tokens[name]:,} {name}" for name in ("input", "output") if tokens.get(name) is not None]
    sources = ", ".join(f"{source} ({n:,})" for source, n in (tokens.get("source") or {}).items())
    return ", ".join([*said, *([f"counted by {sources}"] if sources else [])])


def _smooth(result: Mapping[str, Any]) -> str:
    smooth = result.get("smooth_goodput") or {}
    if smooth.get("alpha") is not None:
        said = (
            f"alpha {number(smooth['alpha'])}, reader of {number(smooth['speed_tokens_per_second'])} tokens/s"
        )
        return said + (f", idle {smooth['idle']}" if smooth.get("idle") else "")
    readers = len(smooth.get("readers") or ())
    return f"{readers} readers of different speed" if readers else ""


def _sender(result: Mapping[str, Any]) -> str:
    sender = result.get("sender") or {}
    processes = sender.get("processes") or []
    if not processes:
        return ""
    said = [f"{len(processes)} process{'' if len(processes) == 1 else 'es'}"]
    said.append(f"at most {number(max(p['cpu_share'] for p in processes) * 100, 3)} % of a CPU each")
    said.append(f"{format_bytes(sum(p['rss_bytes'] for p in processes))} in all")
    if sender.get("cpu_seconds_per_1000_tokens") is not None:
        said.append(f"{number(sender['cpu_seconds_per_1000_tokens'], 3)} s of CPU per 1,000 tokens")
    if any(p.get("realtime") for p in processes):
        said.append("real-time priority")
    said.append(connections_said(sender))
    return ", ".join(said)


def connections_said(sender: Mapping[str, Any]) -> str:
    """How many there were, and how many of them before there was a request to send."""
    processes = sender.get("processes") or ()
    opened = sum(p["connections_opened"] for p in processes)
    before = sum(p.get("connections_opened_before") or 0 for p in processes)
    said = _counted(opened, "connection", "connections")
    return said + (f" ({before:,} opened before the load)" if before else "")


def retries_said(load: Mapping[str, Any]) -> str:
    """How often requests were sent again, why, and what figures make of it; empty where none was."""
    retries = load.get("retries") or {}
    if not isinstance(retries, Mapping) or not retries.get("n"):
        return ""
    why = ", ".join(f"{reason} {n:,}" for reason, n in (retries.get("reasons") or {}).items())
    said = f"{retries['n']:,}" + (f" ({why})" if why else "")
    return (
        f"{said}; lateness is of first attempts, latencies count from the last ones; those from schedule have"
        " the waits in them"
    )


def clocks_said(sender: Mapping[str, Any]) -> str:
    """How well the clocks of sending hosts agree with that of this one; empty where none has another."""
    hosts: dict[str, Mapping[str, Any]] = {}
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


def _uncertainty(result: Mapping[str, Any]) -> str:
    clock = (result.get("sender") or {}).get("clock")
    if result.get("uncertainty") is None:
        return ""
    return f"{milliseconds(result['uncertainty'])} ms" + (f", stamps by {clock}" if clock else "")


def _counted(n: int, one: str, more: str) -> str:
    return f"{n:,} {one if n == 1 else more}"
