"""Turn the JSON of a replay into sentences on the basis of its figures: plan, load, window, sender.

Used by `replay.py` and `replay_charts.py`: `plan_rows` returns the rows of the settings, `basis_texts` the
caption of a chart. The report of a benchmark uses the sentence on the self-test (`selftest_text`).
"""

from collections.abc import Mapping
from typing import Any, Final

from llmtap.report.summary import goodput_text, scrape_text
from llmtap.report.values import at, count_with_noun, counts_text, milliseconds, number
from llmtap.units import format_bytes

RATES: Final = (
    "Rates of requests: asked is the mean rate of the arrival process; planned is the rate of the arrivals"
    " that were drawn, which differs from it if they are few; sent counts requests that left on time, and is"
    " the load of the latencies; ended counts answers over the whole window, its drain included."
)
"""Meaning of the rates in the terms `arrivals` and `load`. `load/replay/result.py` has their JSON names."""
_COMMON_TERMS: Final = ("load", "window", "arrivals", "sent to", "uncertainty")
"""Terms that are in every caption."""
_Json = Mapping[str, Any]


def plan_rows(result: _Json) -> list[tuple[str, str]]:
    """Return the settings and the basis of the figures as terms with texts. Omit terms without a text."""
    plan, load, sender = result["plan"], result["load"], result["sender"]
    body, uncertainty = plan["body"], result["uncertainty"]
    rows = [
        (
            "sent to",
            _joined_parts(
                plan["target"],
                body["endpoint"],
                body["model"] and f"model {body['model']}",
                f"connections {plan['connections']}",
            ),
        ),
        ("requests", _requests_text(load, plan.get("conversations"))),
        ("retries", _retries_text(load["retries"])),
        ("arrivals", _arrivals_text(plan)),
        ("load", _load_text(load)),
        ("window", _window_text(result["window"])),
        ("seed", str(plan.get("seed", ""))),
        ("prompts", _prompts_text(plan["prompts"])),
        ("answers", _answers_text(body)),
        ("lengths", _lengths_text(result["lengths"])),
        ("warm-up", _warm_up_text(result["warmup"])),
        ("TPOT", tpot_text(result["metrics"]["tpot"])),
        ("ITL", _itl_text(result["metrics"]["itl"])),
        ("chunks", _chunks_text(result["chunking"])),
        ("tokens", _tokens_text(result["tokens"])),
        ("goodput", goodput_text(result) or str(at(result, "goodput", "objectives") or "")),
        ("smooth goodput", _smooth_goodput_text(result["smooth_goodput"])),
        ("sender", _sender_text(sender)),
        ("clocks", _clocks_text(sender)),
        ("server metrics", scrape_text(at(result, "system", "summary") or {})),
        ("uncertainty", uncertainty and f"{milliseconds(uncertainty)} ms, stamps by {sender['clock']}"),
        ("our own error", selftest_text(result.get("selftest"))),
        ("capture", at(result, "capture", "to") and "{rows:,} exchanges in {to}".format(**result["capture"])),
    ]
    return [(term, text) for term, text in rows if text]


def basis_texts(result: _Json, *terms: str, samples: str = "") -> list[str]:
    """Return the parts of a chart's caption. `terms`: terms to put before the terms of every caption."""
    rows = dict(plan_rows(result))
    parts = [
        rows[term] if term in ("load", "ITL") else f"{term} {rows[term]}"
        for term in (*terms, *_COMMON_TERMS)
        if term in rows
    ]
    return [samples, *parts] if samples else parts


def selftest_text(selftest: _Json | None) -> str:
    """Return the errors of TTFT and ITL in the self-test, and its load; empty if it was not run."""
    if not selftest:
        return ""
    load, parts = selftest["load"], []
    for name, title in (("ttft", "TTFT"), ("itl", "ITL")):
        p50, p99, largest = (milliseconds(selftest[name][figure]) for figure in ("p50", "p99", "max"))
        parts.append(f"{title} p50 {p50}, p99 {p99}, worst {largest} ms (n {selftest[name]['n']:,})")
    return (
        f"{'; '.join(parts)}; self-test of {count_with_noun(load['streams'], 'stream')},"
        f" {number(load['tokens_per_second'], 3)} tokens/s, {number(load['duration'], 2)} s"
    )


def tpot_text(tpot: _Json) -> str:
    """Return both forms of TPOT; empty if the result has only one, because an old version stored it."""
    to_end = tpot.get("to_end")
    if not to_end:
        return ""
    (last_p50, last_p99), (end_p50, end_p99) = (
        [milliseconds(one[share]) for share in ("p50", "p99")] for one in (tpot, to_end)
    )
    return (
        f"to the last token p50 {last_p50}, p99 {last_p99} ms; to the end of the response, as"
        f" (E2E - TTFT) / (n - 1), p50 {end_p50}, p99 {end_p99} ms"
    )


def _joined_parts(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part)


def _requests_text(load: _Json, conversations: int | None) -> str:
    return _joined_parts(
        f"{load['sent']:,} of {load['planned']:,} sent",
        conversations and f"{conversations:,} conversations, whose later turns wait for the answer before",
        *(f"{load[name]:,} {name}" for name in ("dropped", "unsent") if load[name]),
        load["stopped"] and f"stopped: {load['stopped']}",
    )


def _retries_text(retries: _Json) -> str:
    return retries["n"] and (
        f"{retries['n']:,} ({counts_text(retries['reasons'])}); lateness is of first attempts, latencies"
        " count from the last ones; those from schedule have the waits in them"
    )


def _arrivals_text(plan: _Json) -> str:
    """Return the arrival process as the user wrote it, with its rate and its parameters."""
    if "arrivals" not in plan:
        return ""
    if not (arrivals := plan["arrivals"]):
        return "whenever an answer has ended"
    parameters = dict(arrivals)
    process, user_text, rate, scale, speed, recorded = (
        parameters.pop(name, None)
        for name in ("arrivals", "given", "rate_rps", "scale", "speed", "recorded_rps")
    )
    faster = ""
    if scale is not None and (scale != 1 or speed is not None):
        faster = f"--speed {number(speed)}" if speed is not None else f"times divided by {number(scale)}"
        faster += f" of {number(recorded)} req/s recorded" if recorded else ""
    return _joined_parts(
        process if user_text in (None, process) else f"{user_text} ({process})",
        rate is not None and f"{number(rate)} req/s requested",
        faster,
        *(f"{name} {value}" for name, value in parameters.items() if value is not None),
    )


def _load_text(load: _Json) -> str:
    offered, planned = load.get("offered_rps"), load["planned_rps"]
    sent = offered is not None and f"{number(offered)} req/s sent"
    if planned is not None:
        sent = f"{number(offered)} of {number(planned)} req/s planned were sent"
    return _joined_parts(
        f"{load['mode']} loop",
        sent,
        load["achieved_rps"] is not None and f"{number(load['achieved_rps'])} req/s ended over the window",
        "sending" in load
        and f"{number(load['sending_rps'])} req/s in the {number(load['sending'])} s of sending",
    )


def _window_text(window: _Json) -> str:
    return f"{number(window['seconds'])} s, {window['start']} to {window['end']}"


def _prompts_text(prompts: _Json) -> str:
    low, high = prompts["missed_min"], prompts["missed_max"]
    return prompts["n"] and _joined_parts(
        f"{prompts['exact']:,} of {prompts['n']:,} of exact length by {', '.join(prompts['ways'])}",
        (low or high) and f"others off by {low:,} to {high:,} tokens",
    )


def _answers_text(body: _Json) -> str:
    limit, temperature = body.get("output_limit"), body.get("temperature")
    kinds = body.get("kinds") or {}
    recorded = kinds.get("recorded", 0)
    others = recorded < sum(kinds.values()) or not recorded
    return _joined_parts(
        others and ("streamed" if body["stream"] else "in one piece"),
        recorded and f"{recorded:,} recorded requests sent as recorded",
        body.get("paths") and f"to {counts_text(body['paths'])}",
        limit and (f"as long as {limit} allows" if body["ignore_eos"] else f"at most {limit}"),
        temperature is not None and f"temperature {temperature}",
        *(f"{name} {value}" for name, value in (body.get("settings") or {}).items()),
    )


def _lengths_text(lengths: _Json) -> str:
    """Return a text on the number of prompts and answers that had the planned length."""
    parts = []
    if lengths["input_told"]:
        off = lengths["input_off_max"]
        parts.append(f"{lengths['input_exact']:,} of {lengths['input_told']:,} prompts as long as planned")
        parts[-1] += f" (at most {off:,} tokens off)" if off else ""
    if lengths["output_told"]:
        parts.append(f"{lengths['output_exact']:,} of {lengths['output_told']:,} answers")
        parts[-1] += "" if lengths["output_wanted"] else " (which the server was not required to keep)"
    return _joined_parts(*parts, parts and "by the server's own count")


def _warm_up_text(warmup: _Json) -> str:
    if not warmup["requests"]:
        return _joined_parts("none", warmup["skipped"], warmup.get("problem"))
    stable = "stable" if warmup["stable"] else "not stable" if warmup["probes"] else "not probed"
    return _joined_parts(
        f"{warmup['requests']:,} requests",
        f"{warmup['tokens']:,} tokens",
        f"{number(warmup['duration'], 3)} s",
        f"latency {stable}",
        *(
            f"{title} varied by {number(share * 100, 3)} %"
            for name, title in (("ttft", "TTFT"), ("e2e", "E2E"))
            if (share := warmup["variation"][name]) is not None
        ),
        warmup["problem"],
    )


def _itl_text(itl: _Json) -> str:
    policies = "; ".join(f"{policy}: {n:,}" for policy, n in (itl.get("policy") or {}).items())
    return itl["option"] and f"ITL option {itl['option']}" + (f" ({policies})" if policies else "")


def _chunks_text(chunking: _Json) -> str:
    if chunking["events_per_read"] is None:
        return ""
    text = f"{chunking['content_events']:,} of {chunking['events']:,} events carry output"
    return f"{text}, {number(chunking['events_per_read'], 3)} events a read"


def _tokens_text(tokens: _Json) -> str:
    sources = ", ".join(f"{source} ({n:,})" for source, n in tokens["source"].items())
    counts = (f"{tokens[name]:,} {name}" for name in ("input", "output") if tokens[name] is not None)
    return _joined_parts(*counts, sources and f"counted by {sources}")


def _smooth_goodput_text(smooth: _Json) -> str:
    if smooth["alpha"] is None:
        readers = len(smooth.get("readers") or ())
        return f"{readers} readers of different speed" if readers else ""
    return _joined_parts(
        f"alpha {number(smooth['alpha'])}",
        f"reader of {number(smooth['speed_tokens_per_second'])} tokens/s",
        smooth.get("idle") and f"idle {smooth['idle']}",
    )


def _sender_text(sender: _Json) -> str:
    processes, cpu_s_per_1000_tokens = sender["processes"], sender["cpu_seconds_per_1000_tokens"]
    if not processes:
        return ""
    opened_before = sum(p["connections_opened_before"] for p in processes)
    return _joined_parts(
        count_with_noun(len(processes), "process", "processes"),
        f"at most {number(max(p['cpu_share'] for p in processes) * 100, 3)} % of a CPU each",
        f"{format_bytes(sum(p['rss_bytes'] for p in processes))} in all",
        cpu_s_per_1000_tokens is not None and f"{number(cpu_s_per_1000_tokens, 3)} s of CPU per 1,000 tokens",
        count_with_noun(sum(p["connections_opened"] for p in processes), "connection")
        + (f" ({opened_before:,} opened before the load)" if opened_before else ""),
    )


def _clocks_text(sender: _Json) -> str:
    """Return the error and the offset of the clocks of other sending hosts; empty if there are no others."""
    hosts: dict[str, _Json] = {}
    for clock in sorted(sender["clocks"], key=lambda clock: float(clock["rtt"])):
        if not clock["shared"]:
            hosts[clock["host"]] = clock
    parts = [
        f"{host} within {milliseconds(clock['rtt'] / 2)} ms, {milliseconds(abs(clock['offset']))} ms"
        f" {'ahead' if clock['offset'] >= 0 else 'behind'}"
        for host, clock in hosts.items()
    ]
    return f"{'; '.join(parts)} (allowed for)" if parts else ""
