"""Every query of every board, asked of a real Prometheus: it has to be understood, and to have an answer.

Grafana's variables are filled in as it would with All chosen. What may be empty stands in EMPTY, and why.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from parts.script import REPOSITORY

BOARDS = REPOSITORY / "deploy" / "grafana" / "boards"
FILLED = {"$__rate_interval": "1m", "$__range": "5m", "$job": "llmtap"}
EMPTY = {
    "ALERTS": "nothing has to be wrong",
    "llmtap_guardrail_events_total": "the engine refuses nothing",
    "llmtap_tap_dropped_exchanges_total": "nothing goes unmeasured",
    "llmtap_relay_refused_total": "no limit is reached",
    "llmtap_meter_errors_total": "the meter understands everything",
    "llmtap_label_overflow_total": "there is one tenant and one model",
    "llmtap_capture_dropped_exchanges_total": "the capture keeps everything",
    "llmtap_export_sent_total": "there is no receiver for spans",
    "llmtap_export_dropped_total": "there is no receiver for spans",
    "llmtap_server_clock_disagreement_seconds_bucket": "the engine tells no times of its own",
    "llmtap_tokens_after_cancel_total": "no client leaves",
    "llmtap_upstream_output_tokens_total": "the upstream's metrics are not read",
    "llmtap_upstream_running_requests": "the upstream's metrics are not read",
    "llmtap_upstream_waiting_requests": "the upstream's metrics are not read",
    "llmtap_upstream_kv_cache_usage_ratio": "the upstream's metrics are not read",
    "llmtap_answers_without_dialect_total": "every answer is of a known format",
    "llmtap_slo_not_judged_total": "every answer is of a known format",
    "llmtap_uncertain_exchanges_total": "on a quiet machine no stamp is too wide",
}
Ask = Callable[[str], list[Any]]


def check_boards(ask: Ask) -> Iterator[str]:
    """Complaints about queries that Prometheus refuses, or answers with nothing."""
    for file in sorted(BOARDS.glob("*.json")):
        board = json.loads(file.read_text())
        asked = empty = 0
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                asked += 1
                problem = _problem(ask, filled(target["expr"]))
                if problem == "has no answer" and may_be_empty(target["expr"]):
                    empty += 1
                elif problem is not None:
                    yield f"{file.name}, {panel['title']!r}: {target['expr']} {problem}"
        for variable in board["templating"]["list"]:
            m = re.fullmatch(r"label_values\((.+), (\w+)\)", variable.get("definition", ""))
            if m is not None and not ask(filled(f"count by ({m[2]}) ({m[1]})")):
                yield f"{file.name}: the variable {variable['name']} has no values"
        print(f"  {file.stem}: {asked} queries, {empty} of them empty, as they may be")


def filled(query: str) -> str:
    for name, value in FILLED.items():
        query = query.replace(name, value)
    return re.sub(r"\$\w+", ".*", query)


def may_be_empty(query: str) -> bool:
    return any(name in query for name in EMPTY)


def _problem(ask: Ask, query: str) -> str | None:
    try:
        found = ask(query)
    except OSError as error:  # urllib's HTTPError: 400 with the reason
        return f"is refused: {error}"
    if not any(not math.isnan(float(sample["value"][1])) for sample in found):
        return "has no answer"
    return None
