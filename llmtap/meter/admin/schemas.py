"""JSON Schemas (2020-12) of the answers of the admin API, by name (`SCHEMAS`), for `openapi.py`.

They describe the answers; nothing is validated with them while the meter runs. Durations are seconds. Objects
may gain names in later versions; none listed here goes away.
"""

from typing import Any, Final

from llmtap.exchange.outcome import EventClass, Outcome, TokenSource
from llmtap.metrics.latency import IN_SECONDS
from llmtap.metrics.statistics import SHARES
from llmtap.metrics.summary import METRICS

Schema = dict[str, Any]

TEXT: Final[Schema] = {"type": "string"}
NUMBER: Final[Schema] = {"type": "number"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
FLAG: Final[Schema] = {"type": "boolean"}
DATE: Final[Schema] = {"type": "string", "format": "date-time"}


def reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _or_null(schema: Schema) -> Schema:
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def _about(description: str, schema: Schema) -> Schema:
    return {**schema, "description": description}


def _object(
    properties: dict[str, Schema], description: str = "", *, optional: tuple[str, ...] = ()
) -> Schema:
    """Return the schema of an object; all properties but the optional ones are required."""
    required = [name for name in properties if name not in optional]
    out: Schema = {"type": "object", "properties": properties, "required": required}
    return _about(description, out) if description else out


def _map(values: Schema, description: str = "") -> Schema:
    """Return the schema of an object whose keys are data."""
    out: Schema = {"type": "object", "additionalProperties": values}
    return _about(description, out) if description else out


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_MAYBE: Final = _or_null(NUMBER)
_MAYBE_COUNT: Final = _or_null(COUNT)
_MAYBE_TEXT: Final = _or_null(TEXT)
_ANYTHING: Final[Schema] = {"type": "object", "additionalProperties": True}

_TIMELINE: Final = (
    "request_end", "submit", "head", "first_byte", "first_any", "first_token", "first_reasoning",
    "first_tool_call", "first_refusal", "first_content", "last_token", "response_end", "delivered",
)  # fmt: skip
_EXCHANGE_METRICS: Final = (*IN_SECONDS, "smooth_benefit")

_EXCHANGE: Final = _object(
    {
        "id": _about("Relay and number.", TEXT),
        "relay": _about("Relay process that observed it.", TEXT),
        "seq": _about("Number within that relay, from 1 without gaps.", COUNT),
        "arrival": _about("When the request's first byte was read.", DATE),
        "tenant": TEXT,
        "model": _about("Model named in the request, else in the answer.", _MAYBE_TEXT),
        "route": _MAYBE_TEXT,
        "arm": _about("Arm of the running experiment.", _MAYBE_TEXT),
        "unit": _about("Unit of randomisation: a keyed hash.", _MAYBE_TEXT),
        "excluded": _about("Reason why the arm's change was not made.", _MAYBE_TEXT),
        "endpoint": _MAYBE_TEXT,
        "dialect": _MAYBE_TEXT,
        "method": TEXT,
        "path": _about("Without the query.", TEXT),
        "request_id": _MAYBE_TEXT,
        "status": _MAYBE_COUNT,
        "stream": _about("The answer was an event stream, or was to be one and failed.", FLAG),
        "outcome": {"type": "string", "enum": [outcome.value for outcome in Outcome]},
        "timeline": _object(dict.fromkeys(_TIMELINE, _MAYBE), "Seconds since arrival; null: never reached."),
        "metrics": _object(
            dict.fromkeys(_EXCHANGE_METRICS, _MAYBE),
            "Seconds, smooth_benefit in tokens; null: does not apply.",
        ),
        "tokens": _object(
            {
                **dict.fromkeys(("input", "output", "reasoning", "cached"), _MAYBE_COUNT),
                "source": _about(
                    "Source of `output`.",
                    {"type": "string", "enum": [source.value for source in TokenSource]},
                ),
            }
        ),
        "chunking": _object(
            {
                **dict.fromkeys(("events", "content_events", "reads", "bursts", "burst_events"), COUNT),
                **dict.fromkeys(
                    ("events_per_read", "bytes_per_event_mean", "tokens_per_chunk_mean",
                     "single_token_share", "burst_hold_max"),
                    _MAYBE,
                ),
            }
        ),
        "padded": _about("Events carry random padding, which their sizes include.", FLAG),
        "finish_reason": _MAYBE_TEXT,
        "refusal": _or_null(reference("Refusal")),
        "guardrail": _or_null(reference("Guardrail")),
        "retries": _about("Number of times that a gateway began the answer again.", COUNT),
        "resent": _about("Number of times that the relay sent the request again on a new connection.", COUNT),
        "no_token_reason": _about("Reason why a stream has no token.", _MAYBE_TEXT),
        "usage": _about("As the provider sent it.", _or_null(_ANYTHING)),
        "server_timing": _or_null(_list(reference("ServerTime"))),
        "error": _about("One sentence that names the side at fault.", _MAYBE_TEXT),
        "clock": {"type": "string", "enum": ["kernel", "mono", "packet"]},
        "uncertainty": _about("Uncertainty of each timestamp: longest time that a byte was unread.", NUMBER),
        "uncertain": _about("`uncertainty` is above the operator's limit.", FLAG),
        "paused": _about("Time that the client's back-pressure held the stream.", NUMBER),
        "added": _object(
            dict.fromkeys(("request", "connect", "first_chunk", "chunk_max"), _MAYBE),
            "Seconds added by llmtap. `connect`: time to connect to the upstream; null for a kept"
            " connection.",
        ),
        "request_bytes": COUNT,
        "response_bytes": COUNT,
        "events": _about("With `events=1` only.", _list(reference("Event"))),
        "events_start": _about(
            "Number of events in earlier answers; absent: none.", COUNT
        ),
    },
    "One request and its answer.",
    optional=("events", "events_start"),
)  # fmt: skip

_EVENT: Final = _object(
    {
        "t": _about("Seconds since arrival: the read in which the event became complete.", NUMBER),
        "class": {"type": "string", "enum": [c.name.lower() for c in EventClass]},
        "bytes": _about("Size of the event in the decoded body.", COUNT),
        "tokens": _about("Number that the event itself declares.", _MAYBE_COUNT),
    }
)

_STREAM: Final = _object(
    {
        "id": TEXT, "tenant": TEXT, "model": _MAYBE_TEXT,
        "route": _about("Known at the end only.", _MAYBE_TEXT),
        "arm": _MAYBE_TEXT, "endpoint": _MAYBE_TEXT, "dialect": _MAYBE_TEXT,
        "stream": _about("The answer is an event stream, or is to be one.", FLAG),
        "age": _about("Seconds since arrival.", NUMBER),
        "ttft": _about("As of a finished exchange, from submit; null before the first token.", _MAYBE),
        "events": COUNT,
        "tokens": _about("From the events; a chunk without a count is one token.", COUNT),
        "since_last": _about("Seconds since the last event with output; null before the first.", _MAYBE),
        "timeline": _about(
            "Events with output within the window, as seconds since arrival and tokens. More than 200 become"
            " 200 at most: the window is cut into 200 pieces, and the events of a piece are one, at the time"
            " of the first.",
            _list({"type": "array", "prefixItems": [NUMBER, COUNT], "minItems": 2, "maxItems": 2}),
        ),
    },
    "A running exchange.",
)  # fmt: skip

_REFUSAL: Final = _object(
    {
        "kind": {"type": "string", "enum": ["model_refusal", "input_guardrail", "output_guardrail"]},
        "source": _about("Sign by which the refusal was recognised.", TEXT),
        "detail": _about("Further details: event, value, category, ...", _ANYTHING),
        "confidence": {"type": "string", "enum": ["high", "medium", "low"]},
    },
    "The answer was refused, by the model or by a guardrail.",
)

_GUARDRAIL: Final = _object(
    {
        "phase": _or_null({"type": "string", "enum": ["input", "output"]}),
        "action": {"type": "string", "enum": ["flagged", "blocked", "replaced", "redacted"]},
        "signal": _about("Sign by which the intervention was recognised.", TEXT),
        "event": _about("Index of the event with the sign.", COUNT),
        "category": _MAYBE_TEXT,
        "late": _about("Tokens had been sent to the client before.", FLAG),
        "tokens_before": COUNT,
    },
    "A filter, rail or hook acted, or flagged without acting.",
    optional=("category", "late", "tokens_before"),
)

_SERVER_TIME: Final = _object(
    {
        "name": TEXT, "ms": NUMBER, "where": TEXT, "unit": _about("Unit on the wire.", TEXT),
        "path": _MAYBE_TEXT, "event": _about("Index of the event that reported it.", COUNT),
    },
    "A duration that the server reported about its own work.",
    optional=("path", "event"),
)  # fmt: skip

_STATISTICS: Final = _object(
    {
        "n": COUNT,
        **dict.fromkeys(("mean", "min", "max", *SHARES), _MAYBE),
        "marks": _about("Percentiles that rest on too few samples (IETF 5.1.4.3).", _list(TEXT)),
        "option": _about("ITL option: A, B-even, C.", _MAYBE_TEXT),
        "samples": _map(COUNT),
        "policy": _map(COUNT),
    },
    "Seconds; null without samples.",
    optional=("option", "samples", "policy"),
)

_GOODPUT_COUNT: Final[dict[str, Schema]] = {
    "met": COUNT,
    "counted": COUNT,
    "broken": _map(COUNT, "Exchanges that broke each bound."),
    **dict.fromkeys(("attainment", "requests_per_second", "tokens_per_second", "token_attainment"), _MAYBE),
}

_SUMMARY: Final[dict[str, Schema]] = {
    "n": _about("Exchanges that ended in the window.", COUNT),
    "window": _object(
        {
            "name": TEXT, "seconds": NUMBER, "start": DATE, "end": DATE,
            "lag_max": _about("Worst event-loop lag of a relay in the window.", NUMBER),
        }
    ),
    "load": _object({"mode": TEXT, "offered_rps": _MAYBE, "achieved_rps": _MAYBE}),
    "metrics": _object(dict.fromkeys(METRICS, reference("Statistics"))),
    "added": _object(dict.fromkeys(("request", "first_chunk", "chunk"), reference("Statistics"))),
    "outcomes": _map(COUNT),
    "no_token": _object({"n": COUNT, "reasons": _map(COUNT)}, "Streams that never produced a token."),
    "tokens": _object(
        {
            **dict.fromkeys(("input", "output", "reasoning", "cached"), _MAYBE_COUNT),
            "input_per_second": _MAYBE, "output_per_second": _MAYBE,
            "source": _map(COUNT),
            "cancelled": _MAYBE_COUNT,
            "after_cancel": _about(
                "Read after the client left. Only the middleware sees them: null through a relay.",
                _MAYBE_COUNT,
            ),
        }
    ),
    "goodput": _or_null(
        _object(
            {"objectives": TEXT, **_GOODPUT_COUNT, "by": _map(_object(_GOODPUT_COUNT))},
            "Null where no objectives are configured.",
        )
    ),
    "smooth_goodput": _object(
        {
            "tokens_per_second": _MAYBE, "n": COUNT, "alpha": _MAYBE, "speed_tokens_per_second": _MAYBE,
            "idle": TEXT, "readers": _list(_ANYTHING),
        },
        "With its parameters, which are null if exchanges were judged for different readers.",
        optional=("readers",),
    ),
    "chunking": _object(
        {
            **dict.fromkeys(("events", "content_events", "reads", "chunks_with_known_tokens"), COUNT),
            **dict.fromkeys(
                ("events_per_read", "bytes_per_event_mean", "tokens_per_chunk_mean", "tokens_per_chunk_max",
                 "single_token_share"),
                _MAYBE,
            ),
            "bursts": _object({"n": COUNT, "streams": COUNT, "events": COUNT, "hold_max": _MAYBE}),
        }
    ),
    "clock_disagreement": _map(reference("Statistics"), "Ours minus the server's, by duration."),
    "refusals": _object({"n": COUNT, "share": _MAYBE, "kinds": _map(COUNT)}),
    "cost": _or_null(_ANYTHING),
    "uncertainties": _about(
        "Uncertainties of the exchanges.", reference("Statistics")
    ),
    "uncertainty": _about("Largest uncertainty, or event-loop lag of a relay if that is larger.", _MAYBE),
}  # fmt: skip

_LIVE_SUMMARY: Final = _object(
    {
        "open": _about("Exchanges that began and have not ended.", COUNT),
        "subscribers": COUNT,
        "missed": _about("Exchanges that a slow subscriber did not get, since the start.", COUNT),
        "listen": _about("Address where clients connect; null if only apps are measured.", _MAYBE_TEXT),
        **{
            name: _SUMMARY[name]
            for name in ("n", "window", "load", "outcomes", "tokens", "goodput", "smooth_goodput", "refusals")
        },
        "metrics": _map(_ANYTHING, "n, mean, p50, p95, p99 of ttft, tpot, itl, tbc, e2e, user_idle."),
        "uncertainty": _MAYBE,
    },
    "Data of `event: summary`.",
)

_IMPLEMENTATION: Final[dict[str, Schema]] = {
    "implementation": _about(
        "Implementation of the parts that can be compiled; null: not reported.",
        {"type": ["string", "null"], "enum": ["native", "python", None]},
    ),
    "implementation_reason": _about("Why it is `python`; null: `native` runs.", _MAYBE_TEXT),
}

_RELAY_STATUS: Final[dict[str, Schema]] = {
    **dict.fromkeys(
        ("opened", "measured", "unsettled", "connections", "streams", "upstream_idle", "upstream_connects",
         "upstream_reuses", "upstream_unsolicited", "accepted", "tap_pending_bytes", "rss_bytes", "bytes_up",
         "bytes_down"),
        COUNT,
    ),
    "dropped": _map(COUNT, "Exchanges that were not measured, by reason."),
    "skipped": _map(COUNT, "Requests that are not inference, by rule of `relay.skip`; not among `opened`."),
    "upstreams": _map({"type": "boolean"}, "Whether an upstream accepted the latest connection, by URL."),
    "upstream_ages": _map(NUMBER, "Time since the latest attempt to connect, in seconds, by URL."),
    "refused": _map(COUNT, "Connections and requests that were refused, by limit."),
    "cpu": _about("CPU time in seconds.", NUMBER),
    "lag_max": _about("Worst event-loop lag since its last status, in seconds.", NUMBER),
}  # fmt: skip

_WATCH_STATUS: Final[dict[str, Schema]] = {
    "side": _about(
        "Place of a passive vantage; null: unknown.",
        {"type": ["string", "null"], "enum": ["client", "server", "host", "middle", "mixed", None]},
    ),
    "packets": _map(COUNT, "Packets `captured`, and `lost` by the kernel."),
    "watched": _map(COUNT, "Connections with a request: followed, or joined late; not measured, by kind."),
    "missing_bytes": _about("Bytes of its streams that were in no packet.", COUNT),
}

SCHEMAS: Final[dict[str, Schema]] = {
    "Exchange": _EXCHANGE,
    "Event": _EVENT,
    "Refusal": _REFUSAL,
    "Guardrail": _GUARDRAIL,
    "ServerTime": _SERVER_TIME,
    "Histograms": _object(
        {
            "window": _object({"name": TEXT, "seconds": NUMBER, "start": DATE, "end": DATE}),
            "unit": TEXT, "encoding": TEXT,
            "series": _list(
                _object(
                    {
                        **dict.fromkeys(("tenant", "model", "arm", "class"), _MAYBE_TEXT),
                        "n": COUNT,
                        "histograms": _map(TEXT, "By metric; those without values are omitted."),
                    }
                )
            ),
        },
        "Histograms of latencies that other tools can merge.",
    ),
    "Exchanges": _object(
        {
            "exchanges": _list(reference("Exchange")),
            "next": _about(
                "Cursor of the rest, for `next=`; null at the end. With `events=1` the rest may begin within"
                " the last exchange: the next answer repeats it with the events that follow.",
                _MAYBE_TEXT,
            ),
        },
        "Newest first.",
    ),
    "Streams": _object(
        {
            "count": _about("Number of all running exchanges.", COUNT),
            "window": _about("Length of the timelines in seconds.", NUMBER),
            "streams": _list(reference("Stream")),
        },
        "Newest first.",
    ),
    "Stream": _STREAM,
    "Statistics": _STATISTICS,
    "SummaryPart": _object(_SUMMARY, "A Summary of a part of the exchanges."),
    "SummarySeries": _object(
        {**dict.fromkeys(("tenant", "model", "arm", "class"), _MAYBE_TEXT), **_SUMMARY},
        "A Summary of the exchanges of one tenant, model, arm and class.",
    ),
    "Summary": _object(
        {
            **_SUMMARY,
            "not_inference": _about("Requests that were forwarded and not measured (`relay.skip`).", COUNT),
            "uncertain": _object(
                {"n": COUNT, "included": FLAG, "limit": _about("`meter.uncertainty_limit`.", NUMBER)},
                "Exchanges whose uncertainty is above the limit.",
            ),
            "by": _object(
                {
                    **dict.fromkeys(("tenant", "model", "arm", "class"), _map(reference("SummaryPart"))),
                    "series": _list(reference("SummarySeries")),
                },
                "The same for each value of the labels in `by=`.",
                optional=("tenant", "model", "arm", "class", "series"),
            ),
            "slo": _map(reference("SloClass"), "By class of tenants."),
            "relays": _map(reference("Relay"), "Status of each relay."),
            "meter": _object({"version": TEXT, **_IMPLEMENTATION}, "The meter that answers."),
            "meter_errors": _map(COUNT, "What could not be measured, by kind."),
            "upstream": _about(
                "Load of the upstream by its /metrics; null if it is not scraped.",
                _or_null(_object({"values": _map(NUMBER), "failures": COUNT, "problem": _MAYBE_TEXT})),
            ),
            "capture": _about("Counts of the capture; null without one.", _or_null(_ANYTHING)),
        }
    ),
    "Relay": _about(
        "A relay. Counters exist after its first status.",
        _object(
            {
                "connected": FLAG,
                "pid": COUNT,
                "clock": {"type": "string", "enum": ["kernel", "mono", "packet"]},
                "vantage": {"type": ["string", "null"], "enum": ["relay", "middleware", "passive", None]},
                **_IMPLEMENTATION,
                **_WATCH_STATUS,
                "status_age": _about("Seconds since its last status; null before the first.", _MAYBE),
                "lost": _about("Exchanges that were open when it died.", COUNT),
                **_RELAY_STATUS,
            },
            optional=(*_RELAY_STATUS, *_WATCH_STATUS),
        ),
    ),
    "SloClass": _object(
        {
            "objectives": TEXT, "target": NUMBER, "tenants": _list(TEXT), "burn_rate_max": NUMBER,
            "windows": _map(reference("SloWindow")),
            "alarms": _list(
                _object(
                    {
                        "severity": TEXT, "long": TEXT, "short": TEXT, "burn_rate": NUMBER,
                        "reachable": FLAG, "events_min": COUNT, "ringing": FLAG,
                    }
                )
            ),
            "by": _object({"tenant": _map(_map(reference("SloWindow")))}),
        },
        "Attainment and burn rates of one class of tenants.",
    ),
    "SloWindow": _object(
        {
            "seconds": _about("Measured time: less than the window while the meter is younger.", NUMBER),
            "counted": COUNT, "good": COUNT, "attainment": _MAYBE, "burn_rate": _MAYBE, "marks": _list(TEXT),
        }
    ),
    "LiveSummary": _LIVE_SUMMARY,
    "Missed": _object(
        {"n": _about("Since the last such event.", COUNT), "total": COUNT}, "Data of `event: missed`."
    ),
    "Experiment": _object(
        {
            "state": {"type": "string", "enum": ["none", "off", "running", "ended"]},
            "name": TEXT, "enabled": FLAG, "switched_by": TEXT, "since": _MAYBE_TEXT, "until": _MAYBE_TEXT,
            "unit": TEXT, "aa": FLAG, "control": TEXT, "key_fingerprint": TEXT, "alpha": NUMBER,
            "covariate": TEXT, "stop_worse": _list(TEXT), "stopped": _ANYTHING,
            "arms": _map(_ANYTHING), "differences": _map(_ANYTHING), "comparisons": COUNT,
            "findings": _list(_ANYTHING),
            "cautions": _about(
                "Arms whose chunks arrive several at once: findings of these metrics are misleading.",
                _list(
                    _object(
                        {
                            "arm": TEXT, "metrics": _list(TEXT),
                            "events_per_read": NUMBER, "control_events_per_read": NUMBER,
                        }
                    )
                ),
            ),
            "sample_ratio": _ANYTHING, "disclosure": _ANYTHING,
        },
        "With `state` none there are no other fields.",
        optional=(
            "name", "enabled", "switched_by", "since", "until", "unit", "aa", "control", "key_fingerprint",
            "alpha", "covariate", "stop_worse", "stopped", "arms", "differences", "comparisons", "findings",
            "cautions", "sample_ratio", "disclosure",
        ),
    ),
    "Error": _object(
        {
            "error": _object(
                {"message": TEXT, "field": _about("Invalid query parameter.", _MAYBE_TEXT)}
            )
        }
    ),
}  # fmt: skip
