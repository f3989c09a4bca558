"""What LiteLLM's own content filter costs, by an experiment on the tap: A/B, then A/A.

The arm `guarded` asks for the filter in the request's body, `control` does not. Some prompts hold a word
that the filter blocks, so the guarded arm refuses exactly those that were dealt to it. Of an answer the
filter holds back what it has to look at, so the first token comes late: the experiment has to find that,
and to find nothing when both arms are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from parts.servers import Failure

FILTER = "e2e-filter"
WORD = "quince"
GUARDRAILS = [
    {
        "guardrail_name": FILTER,
        "litellm_params": {
            "guardrail": "litellm_content_filter",
            "mode": ["pre_call", "post_call"],
            "default_on": False,
            "blocked_words": [{"keyword": WORD, "action": "BLOCK"}],
            "patterns": [{"pattern_type": "prebuilt", "pattern_name": "email", "action": "MASK"}],
        },
    }
]
"""LiteLLM's `guardrails`: in force only for requests that ask for it."""
REFUSED_EVERY = 8
"""One prompt in so many has the word."""
MS = 1e3

Run = Callable[[Path, list[dict[str, Any]]], tuple[list[Any], list[Any], dict[str, Any]]]
"""`(config file, plan) -> client's records, the tap's exchanges, the experiment's results`"""


def config(file: Path, *, aa: bool) -> None:
    """Writes the tap's config file. A/A asks for hardly any risk: a false alarm would fail this run."""
    file.write_text(
        f"""
[experiment]
enabled = true
name = "content-filter"
key = "e2e"
aa = {str(aa).lower()}
alpha = {0.001 if aa else 0.05}

[[experiment.arms]]
name = "control"

[[experiment.arms]]
name = "guarded"
body = {{ guardrails = ["{FILTER}"] }}

[experiment.disclosure]
output_filtering = "LiteLLM's content filter in the guarded arm"
"""
    )


def plan(requests: int, name: str) -> list[dict[str, Any]]:
    """Streams, one in REFUSED_EVERY of them with the word."""
    return [
        {
            "id": f"e2e-{name}-{i}",
            "kind": "stream",
            "prompt": f"Tell me about {WORD if i % REFUSED_EVERY == 0 else 'medlar'} number {i}.",
            "max_tokens": 40,
        }
        for i in range(requests)
    ]


def check(
    requests: list[dict[str, Any]],
    records: list[Any],
    exchanges: list[Any],
    found: dict[str, Any],
    *,
    aa: bool,
) -> list[str]:
    """What is wrong with the experiment's account of what happened."""
    wrong: list[str] = []
    by_id = {e["request_id"]: e for e in exchanges}
    if set(by_id) != {r["id"] for r in records}:
        raise Failure(f"{len(records)} requests were made, the tap shows {len(by_id)} of them")
    refused = 0
    for request, record in zip(requests, records, strict=True):
        exchange = by_id[record["id"]]
        due = not aa and exchange["arm"] == "guarded" and WORD in request["prompt"]
        refused += due
        kind = exchange["refusal"] and exchange["refusal"]["kind"]
        if kind != ("input_guardrail" if due else None):
            wrong.append(
                f"{record['id']} in {exchange['arm']}: refusal {exchange['refusal']}, "
                f"outcome {exchange['outcome']}; expected {'input_guardrail' if due else 'none'}"
            )
        if bool(record["error"]) != due:
            wrong.append(f"{record['id']} in {exchange['arm']}: the client saw {record['error']!r}")
    arms = found["arms"]
    for arm, shown in arms.items():
        n = sum(e["arm"] == arm for e in exchanges)
        if shown["ended"] != n or not n:
            wrong.append(f"arm {arm}: the experiment counts {shown['ended']}, the exchanges {n}")
    counted = sum(arms["guarded"]["refusals"].values())
    if counted != refused or sum(arms["control"]["refusals"].values()):
        wrong.append(f"refusals: {refused} due in the guarded arm, {counted} counted there")
    if found["sample_ratio"]["alarm"]:
        wrong.append(f"the arms did not get their shares: {found['sample_ratio']}")
    if aa and found["findings"]:
        wrong.append(f"an A/A run finds a difference: {found['findings']}")
    if not aa:
        # One look, at the end, as planned; the median, because the first answers of a gateway are slow.
        ttft = found["differences"]["guarded"]["ttft"]["p50"]
        if ttft["interval"] is None or ttft["interval"][0] <= 0:
            wrong.append(f"the filter holds answers back, and no later first token is found: {ttft}")
    return wrong


def table(found: dict[str, Any]) -> str:
    """Per metric: both arms, and the difference with both of its intervals."""
    head = (
        "",
        "control",
        "guarded",
        "difference",
        f"interval {1 - found['alpha']:.1%}",
        "anytime",
        "different",
    )
    rows = [head]
    control, guarded = (found["arms"][arm]["metrics"] for arm in ("control", "guarded"))
    for metric in ("ttft", "tbc", "user_idle", "e2e"):
        for statistic in ("mean", "p50", "p95"):
            d = found["differences"]["guarded"][metric].get(statistic)
            if d is None:
                continue
            rows.append(
                (
                    f"{metric} {statistic}, ms",
                    *(_ms(arm[metric][statistic]) for arm in (control, guarded)),
                    _ms(d["difference"]),
                    _ends(d["interval"], MS),
                    _ends(d["anytime_interval"], MS),
                    {True: "yes", False: "no", None: "-"}[d["different"]],
                )
            )
    d = found["differences"]["guarded"]["refused"].get("share")
    if d is not None:
        shares = [found["arms"][arm]["shares"]["refused"]["share"] for arm in ("control", "guarded")]
        rows.append(
            (
                "refused, share",
                *(f"{s:.3f}" for s in shares),
                f"{d['difference']:.3f}",
                _ends(d["interval"], 1),
                _ends(d["anytime_interval"], 1),
                "yes" if d["different"] else "no",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    n = ", ".join(f"{name} {arm['ended']}" for name, arm in found["arms"].items())
    return "\n".join([*lines, f"exchanges: {n}; findings: {len(found['findings'])}"])


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * MS:.1f}"


def _ends(interval: list[float] | None, scale: float) -> str:
    return "-" if interval is None else f"{interval[0] * scale:.3g} to {interval[1] * scale:.3g}"
