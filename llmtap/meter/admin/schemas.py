"""JSON Schemas (2020-12) of the answers of the admin API, by name (`SCHEMAS`), for `openapi.py`.

They describe the answers; nothing is validated with them while the meter runs. Durations are seconds. Later
versions can add names to an object, but remove none of these.

`_OBJECTS` has the objects. Each line has one property, or several of the same type: `NAME... TYPE:
DESCRIPTION`. A property whose name ends in `*` is sometimes absent. `TYPE?` is sometimes null, `list:TYPE` is
an array, `map:TYPE` is an object whose property names are data (such as tenants), `a|b` is an enumeration; a
type with a capital letter is another object.
"""

from typing import Any, Final, get_args

from llmtap.channel.status import RelayStatus
from llmtap.counts import CountField, fields_of
from llmtap.exchange.label import EXPECTED, NOT_ACCEPTED, UNKNOWN
from llmtap.exchange.outcome import EventClass, Outcome, Reading, TokenSource
from llmtap.meter.pipeline.history import FIGURES
from llmtap.metrics.catalogue import METRICS, OF_AN_EXCHANGE
from llmtap.metrics.silences import SilenceKind
from llmtap.metrics.statistics import SHARES
from llmtap.metrics.step_change import StepState

Schema = dict[str, Any]

TEXT: Final[Schema] = {"type": "string"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
FLAG: Final[Schema] = {"type": "boolean"}
_TYPES: Final[dict[str, Schema]] = {
    "text": TEXT,
    "count": COUNT,
    "flag": FLAG,
    "number": {"type": "number"},
    "date": {"type": "string", "format": "date-time"},
    "sample": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    "any": {"type": "object", "additionalProperties": True},
    "outcome": {"type": "string", "enum": [outcome.value for outcome in Outcome]},
    "reading": {"type": "string", "enum": [reading.value for reading in Reading]},
    "label": {"type": "string", "enum": [*EXPECTED, UNKNOWN, NOT_ACCEPTED]},
    "source": {"type": "string", "enum": [source.value for source in TokenSource]},
    "class": {"type": "string", "enum": [c.name.lower() for c in EventClass]},
    "silence": {"type": "string", "enum": [kind.value for kind in SilenceKind]},
    "point": {
        "type": "array",
        "prefixItems": [{"type": "number"}, COUNT],
        "minItems": 2,
        "maxItems": 2,
    },
}
_COUNT_TYPES: Final = {int: "count", dict[str, int]: "map:count", dict[str, bool]: "map:flag"}


def _type_of(field: CountField) -> str:
    """Return the type of a count in the notation of `_OBJECTS`."""
    if field.in_seconds:
        return "number"
    return _COUNT_TYPES.get(field.kind) or "|".join(filter(None, get_args(field.kind))) + "?"


_OBJECTS: Final = {
    "Exchange": """One request and its answer.
        id text: Relay and number.
        relay text: Relay process that observed it.
        seq count: Number within that relay, from 1 without gaps.
        arrival date: When the request's first byte was read.
        tenant method text
        path text: Without the query.
        model text?: Model named in the request, else in the answer.
        side front|back?: Side of a gateway, if the exchanges of both sides are paired.
        pair PairMember?: Null: not in a pair, or not known yet.
        arm text?: Arm of the running experiment.
        unit text?: Unit of randomisation: a keyed hash.
        excluded text?: Why the request is not as its arm is configured; `own_header`: by its client.
        label label?: What the sender of the request expects (`x-llmtap-label`).
        route endpoint dialect request_id finish_reason text?
        upstream_request_id text?: Id of the response, such as `request-id` of Anthropic.
        trace_id text?: Of the request's `traceparent`.
        trace_url* text?: Address of the trace by `meter.trace_url`; null: not configured, or no trace id.
        reading reading: How the answer was understood; `none`: its tokens are unknown.
        content_type text?: Media type of the answer.
        service_tier text?: Tier that served the request by its answer, else the requested one.
        service_tier_requested text?
        status count?
        stream flag: The answer was an event stream, or was to be one and failed.
        outcome outcome
        timeline Timeline: Seconds since arrival; null: never reached.
        metrics ExchangeMetrics: Seconds, smooth_benefit in tokens; null: does not apply.
        tokens ExchangeTokens
        chunking ExchangeChunking
        padded flag: Events carry random padding, which their sizes include.
        refusal Refusal?
        guardrail Guardrail?
        held Held?: Null: the client did not hold the stream.
        retries count: Number of times that a gateway began the answer again.
        resent count: Number of times that the relay sent the request again on a new connection.
        no_token_reason text?: Reason why a stream has no token.
        usage any?: As the provider sent it.
        server_timing list:ServerTime?
        error text?: One sentence that names the side at fault.
        clock kernel|mono|packet
        uncertainty number: Largest error of the times of the tokens, the submission and the end.
        uncertain flag: `uncertainty` is above the operator's limit.
        paused number: Time that the client's back-pressure held the stream.
        added Added
        request_bytes response_bytes count
        events* list:Event: With `events=1` only.
        events_start* count: Number of events in earlier answers; absent: none.""",
    "Timeline": """
        request_end submit head first_byte first_any first_token first_reasoning first_tool_call number?
        first_refusal first_content last_token response_end delivered number?""",
    "ExchangeMetrics": f"\n{' '.join(metric.name for metric in OF_AN_EXCHANGE)} number?",
    "ExchangeTokens": """
        input output reasoning cached count?
        source source: Source of `output`.""",
    "ExchangeChunking": """
        events content_events reads bursts burst_events count
        events_per_read bytes_per_event_mean tokens_per_chunk_mean single_token_share number?
        burst_hold_max number?""",
    "Added": """Seconds added by llmtap.
        request first_chunk chunk_max number?
        connect number?: Time to connect to the upstream; null for a kept connection.""",
    "Event": """
        t number: Seconds since arrival: the read in which the event became complete.
        class class
        bytes count: Size of the event in the decoded body.
        tokens count?: Number that the event itself declares.""",
    "Stream": """A running exchange.
        id tenant text
        side front|back?: As of a finished exchange.
        model arm endpoint dialect text?
        route text?: Known at the end only.
        stream flag: The answer is an event stream, or is to be one.
        age number: Seconds since arrival.
        ttft number?: As of a finished exchange, from submit; null before the first token.
        events count
        tokens count: From the events; a chunk without a count is one token.
        since_last number?: Seconds since the last event with output; null before the first.
        timeline list:point: Events with output within the window, as seconds since arrival and tokens. More\
 than 200 become 200 at most: the window is cut into 200 pieces, and the events of a piece are one, at the\
 time of the first.""",
    "Refusal": """The answer was refused, by the model or by a guardrail.
        kind model_refusal|input_guardrail|output_guardrail|guardrail
        source text: Sign by which the refusal was recognised.
        detail any: Further details: event, value, category, ...; stage and why if it is unknown.
        confidence high|medium|low""",
    "Guardrail": """A filter, rail or hook acted, or flagged without acting.
        phase input|output|unknown?
        action flagged|blocked|replaced|redacted
        signal text: Sign by which the intervention was recognised.
        event count: Index of the event with the sign.
        category* text?
        late* flag: Tokens had been sent to the client before.
        tokens_before* count: Number of these tokens; of chunks if their tokens are not known.""",
    "ServerTime": """A duration that the server reported about its own work.
        name where text
        ms number
        unit text: Unit on the wire.
        path* text?
        event* count: Index of the event that reported it.""",
    "Histograms": """Histograms of latencies that other tools can merge.
        window Span
        unit encoding text
        series list:HistogramSeries""",
    "Span": """
        name text
        seconds number
        start end date""",
    "HistogramSeries": """
        tenant model arm class service_tier text?
        reading reading
        n count
        histograms map:text: By metric; those without values are omitted.""",
    "History": """Points of the complete steps, the oldest first.
        step number: Length of a step.
        end number: End of the last step, in seconds since 1970.
        figures HistoryFigures""",
    "HistoryFigures": f"""By figure: a value for each step, null without samples.
        {" ".join(FIGURES)} list:sample""",
    "Exchanges": """Newest first.
        exchanges list:Exchange
        next text?: Cursor of the rest, for `next=`; null at the end. With `events=1` the rest may begin\
 within the last exchange: the next answer repeats it with the events that follow.""",
    "Streams": """Newest first.
        count count: Number of all running exchanges.
        window number: Length of the timelines in seconds.
        streams list:Stream""",
    "PairMember": """Place of an exchange in a pair of exchanges on both sides of a gateway.
        id text: Id of the exchange of the front.
        role text?: Purpose of the gateway's request (`Role` in `pairing/attempts.py`); null: the front.
        evidence list:text: Evidence that the exchange of the back belongs to it, the decisive key first.
        figures map:list:PairFigure?: By name, of the front: seconds or tokens.""",
    "PairFigure": """A value, and the range in which the true one lies.
        value low high number""",
    "Pairs": """Exchanges on both sides of a gateway: counts since the start, figures of recent pairs.
        version waiting count
        counts map:count: Exchanges, pairs, and exchanges in no pair by reason and side.
        evidence attempts text map:count
        comparable flag
        clock figures any
        arms any: Figures of each arm of an experiment, if there are several.
        slowest differences charts list:any
        recent list:GatewayPair: The newest first.""",
    "GatewayPair": """An exchange of the front with those of the back.
        front text: Its id.
        model text?
        text text: Text of the front compared with that of the delivered attempt.
        figures map:list:PairFigure
        back list:GatewayAttempt""",
    "GatewayAttempt": """A request that the gateway made.
        id text role text
        evidence list:text
        model text?
        outcome outcome
        front_chars back_chars equal_chars count""",
    "Silences": """
        threshold number: `meter.silence_threshold`.
        running count: Number of running streams.
        not_judged count: Those whose answers are not understood: they may be silent.
        count count: Number of silent streams.
        groups list:SilenceGroup: The largest first, 200 at most.
        streams list:SilentStream: The longest silence first.""",
    "SilenceGroup": """Silent streams of one kind, tenant, model and upstream.
        kind silence: Token that the streams wait for.
        tenant text
        model text?
        upstream text?: Null: the relay has several upstreams, or the vantage does not know it.
        n count
        longest number""",
    "SilentStream": """A running stream without a token.
        id text
        kind silence: Token that the stream waits for.
        tenant text
        model arm text?
        upstream text?: As in SilenceGroup.
        age number: Seconds since arrival.
        silent number: Seconds since the last event with output, or since submit.
        since_read number: Seconds since the last bytes of any kind; a small number shows keep-alives.
        tokens count: As in Stream.
        past Resumption: Streams of this model that were silent for as long, since the meter's start.""",
    "Resumption": """Streams that went on after a silence.
        silence number: Length of the silence, rounded down to a step of the grid.
        n count: Number of silences of at least this length.
        resumed count: Those that a token ended.
        until number?: Silence up to which enough streams were observed.
        share low high number?: Estimated share of the streams that go on before `until`, with its 95 %\
 interval; null: not known.""",
    "Statistics": f"""Seconds; null without samples.
        n count
        mean min max {" ".join(SHARES)} number?
        marks list:text: Percentiles that rest on too few samples (IETF 5.1.4.3).
        to_end* Statistics: TPOT to the end of the response, if its mean is more than 1 % above.
        option* text?: ITL option: A, B-even, C.
        samples* policy* map:count""",
    "SummaryPart": """A Summary of a part of the exchanges.
        n count: Exchanges that ended in the window.
        window Window
        load Load
        metrics SummaryMetrics
        added SummaryAdded
        outcomes map:count
        readings map:count: Exchanges by `reading`.
        without_dialect list:WithoutDialect: Answers of no known dialect, the most frequent first.
        inferred map:Statistics: Metrics of streams of no known dialect, inferred from their structure.
        no_token NoToken: Streams that never produced a token.
        tokens SummaryTokens
        goodput Goodput?: Null where no objectives are configured.
        smooth_goodput SmoothGoodput
        chunking Chunking
        clock_disagreement map:Statistics: Ours minus the server's, by duration.
        refusals Refusals
        labels Labels?: Refusals against the labels of requests; null if no request had a label.
        cost any?
        uncertainties Statistics: Uncertainties of the exchanges.
        uncertainty number?: Largest uncertainty of an exchange.""",
    "WithoutDialect": """Answers that no dialect reads; the next step is `llmtap inspect FILE --draft NAME`.
        reading reading: none: not understood; inferred: read by their structure.
        path text
        content_type text?
        n count""",
    "Window": """
        name text
        seconds number
        start end date
        lag_max number: Worst event-loop lag of a relay in the window.""",
    "Load": """
        mode text
        offered_rps achieved_rps number?""",
    "SummaryMetrics": f"\n{' '.join(metric.name for metric in METRICS)} Statistics",
    "SummaryAdded": "\nrequest first_chunk chunk Statistics",
    "NoToken": """
        n count
        reasons map:count""",
    "SummaryTokens": """
        input output reasoning cached cancelled count?
        input_per_second output_per_second number?
        source map:count
        after_cancel count?: Read after the client left; only the middleware sees them.""",
    "GoodputCount": """
        met counted count
        not_judged count: Neither met nor counted, since their answers were not understood.
        own_faults count: Left out, since llmtap itself failed (`rejected`, `tap_error`).
        broken map:count: Exchanges that broke each bound.
        attainment requests_per_second tokens_per_second token_attainment number?""",
    "SmoothGoodput": """With its parameters, which are null if exchanges were judged for different readers.
        tokens_per_second alpha speed_tokens_per_second number?
        tokens_per_second_eq4 number?: With token i due at V i after submit (001, equation 4 as printed).
        n count
        idle text
        readers* list:any""",
    "Chunking": """
        events content_events reads chunks_with_known_tokens count
        events_per_read bytes_per_event_mean tokens_per_chunk_mean tokens_per_chunk_max number?
        single_token_share number?
        bursts Bursts""",
    "Bursts": """
        n streams events count
        hold_max number?""",
    "Refusals": """
        n count
        share number?
        kinds map:count""",
    "Labels": f"""Requests with a label, by label and by what happened. `ignored`: number of labels that do\
 not count, because their value is unknown or their tenant may not set labels.
        {" ".join(EXPECTED)} LabelledRequests
        ignored map:count""",
    "LabelledRequests": """`share` is the share of errors among the requests that were answered or refused:\
 refusals of requests that should be answered, or answers to requests that should be refused.
        answered refused count
        undecided count: Requests that failed, were cancelled or rejected.
        share number?
        interval list:number?: 95 % interval of the share (Wilson).""",
    "Uncertain": """Exchanges whose uncertainty is above the limit.
        n count
        included flag
        limit number: `meter.uncertainty_limit`.""",
    "By": """The same for each value of the labels in `by=`.
        tenant* model* arm* class* reading* service_tier* map:SummaryPart""",
    "Meter": """The meter that answers.
        version text
        implementation native|python
        implementation_reason text?: Why it is `python`; null: `native` runs.""",
    "Upstream": """
        values map:number
        failures count
        problem text?""",
    "Relay": """A relay. Counters exist after its first status.
        connected flag
        pid count
        clock kernel|mono|packet
        vantage relay|middleware|passive?
        implementation native|python?: Implementation of the parts that can be compiled; null: not reported.
        implementation_reason text?: Why it is `python`; null: `native` runs.
        status_age number?: Seconds since its last status; null before the first.
        lost_reason* text?: What happened to the lost exchanges; null: none was lost.
        upstream_ages* map:number: Time since the latest attempt to connect, in seconds, by URL."""
    + "".join(
        f"\n{field.name}* {_type_of(field)}: {field.declaration.help}" for field in fields_of(RelayStatus)
    ),
    "SloClass": """Attainment and burn rates of one class of tenants.
        objectives text
        target burn_rate_max number
        tenants list:text
        per class|tenant: Owner of an error budget.
        windows map:SloWindow
        alarms list:SloAlarm: Of the class; per tenant, also those of tenants that ring while it does not.
        by SloTenants""",
    "SloTenants": "\ntenant map:map:SloWindow",
    "SloAlarm": """
        tenant text?: Null: of the whole class.
        severity long short text
        burn_rate number
        events_min count
        reachable ringing flag
        inhibited flag: It rings, and another alarm that rings reports the same cause.""",
    "SloWindow": """
        seconds number: Measured time: less than the window if the meter, or the class as it is, is younger.
        counted good count
        not_judged count: Neither counted nor good, since their answers were not understood.
        own_faults count: Left out, since llmtap itself failed (`rejected`, `tap_error`).
        attainment burn_rate number?
        marks list:text""",
    "TtftSteps": """Lasting rises of TTFT beside the last 7 days at the same load and prompt length.
        false_alarm_days number: Mean time between false alarms of a model, in days.
        models map:ModelSteps: By model; without those counted as `other`.""",
    "ModelSteps": f"""Steps of one model.
        state {"|".join(state.value for state in StepState)}: Others than `steady` and `step`: not judged now.
        history number: Length of the history in seconds, at most 7 days.
        step TtftStep?: The latest step; null: none since the meter's start.
        sentence text: The same as a sentence.""",
    "TtftStep": """Times in seconds since 1970; TTFT in seconds, as a geometric mean.
        since found number: Its begin, and the time of its report.
        until number?: Its end; null: it goes on, or is not judged now.
        ratio low high number: TTFT since the step, divided by `baseline`, with its 95 % interval.
        ttft number
        baseline number: TTFT expected from the history for the same load and prompt lengths.
        n count: Streams since the step.
        history number: Length of the history before the step, in seconds.""",
    "LiveSummary": """Data of `event: summary`.
        open count: Exchanges that began and have not ended.
        subscribers count
        missed count: Exchanges that a slow subscriber did not get, since the start.
        listen text?: Address where clients connect; null if only apps are measured.
        n count
        window Window
        load Load
        outcomes map:count
        tokens SummaryTokens
        goodput Goodput?
        smooth_goodput SmoothGoodput
        refusals Refusals
        metrics map:any: n, mean, p50, p95, p99 of the key metrics.
        uncertainty number?""",
    "Missed": """Data of `event: missed`.
        n count: Since the last such event.
        total count""",
    "Experiment": """With `state` none there are no other fields.
        state none|off|running|ended
        name* switched_by* unit* control* key_fingerprint* covariate* text
        since* until* text?
        enabled* aa* strip_headers* flag
        alpha* number
        comparisons* count
        stop_worse* list:text
        findings* list:any
        arms* differences* map:any
        compared* list:any: Names and titles of the metrics and shares, the most important ones first.
        units_needed* count: Units of each arm from which means are compared.
        figures* any: Arrivals of the first and last request in the figures (`from`, `to`).
        stopped* any?: Evidence of the stop by `stop_worse`; null if switched on since.
        stage* ExperimentStage?: Stage of `schedule`; null: none. All other figures are of this stage alone.
        sample_ratio* disclosure* any
        warnings* list:text: Sentences on arms with requests that are not as the arm is configured.
        cautions* list:Caution: Arms whose chunks arrive several at once: these metrics are misleading.""",
    "ExperimentStage": """
        number of count
        share number: Share of the changed arm.
        since sentence text
        between_stages count: Requests left out, since they arrived just after the begin of the stage.
        earlier list:any: Finished stages, with number, share, from, to, units, differences, sample ratio.""",
    "Caution": """
        arm text
        metrics list:text
        events_per_read control_events_per_read number""",
    "Held": """A stream that its client held, as delivered and without the time of the client, in seconds.
        pauses count
        tbc_max_delivered tbc_max_server tpot_delivered tpot_server number?""",
    "FirstTokenAnswer": """
        first_token FirstToken?: Null: the meter does not keep the exchange.""",
    "FirstToken": """Parts of the wait from the arrival of the request to its first text, in seconds.
        id text
        model text?
        waited number
        parts list:FirstTokenPart: In their order; they add up to `waited`.
        n count: Streams that the parts are compared with.
        n_needed count: Number of streams from which a part can be unusual.
        same_model flag: Whether these are streams of the same model; false: of models counted as `other`.
        window number: Seconds in which these streams ended.
        rule sentence text""",
    "FirstTokenPart": """
        name title meaning text
        start number: Begin, since arrival.
        seconds number?: Null: not reached, or unknown.
        n count
        median usual number?: Of the other streams; `usual`: not exceeded by nine of ten, null with too few.
        unusual flag""",
    "Error": "\nerror Problem",
    "Problem": """
        message text
        field text?: Invalid query parameter.""",
}
_OBJECTS["Goodput"] = _OBJECTS["GoodputCount"] + "\nobjectives text\nby map:GoodputCount"
_OBJECTS["Summary"] = (
    _OBJECTS["SummaryPart"].replace("a part of the exchanges", "a window")
    + """
        not_inference count: Requests that were forwarded and not measured (`relay.skip`).
        uncertain Uncertain
        by By
        slo map:SloClass: By class of tenants.
        ttft_steps TtftSteps: Steps of TTFT, independent of the window.
        relays map:Relay: Status of each relay.
        meter Meter
        meter_errors map:count: What could not be measured, by kind.
        reading_limits map:count: Answers whose reading reached a limit, by limit, since the start.
        upstream Upstream?: Load of the upstream by its /metrics; null if it is not scraped.
        capture any?: Counts of the capture; null without one."""
)


def reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _type_schema(text: str) -> Schema:
    """Return the schema of a type in the notation of `_OBJECTS`."""
    if text.endswith("?"):
        return {"anyOf": [_type_schema(text[:-1]), {"type": "null"}]}
    kind, _, inner = text.partition(":")
    if kind == "list":
        return {"type": "array", "items": _type_schema(inner)}
    if kind == "map":
        return {"type": "object", "additionalProperties": _type_schema(inner)}
    if "|" in text:
        return {"type": "string", "enum": text.split("|")}
    return _TYPES[text] if text in _TYPES else reference(text)


def _object_schema(text: str) -> Schema:
    about, *lines = text.split("\n")
    properties, required = {}, []
    for line in lines:
        declared, _, description = line.strip().partition(": ")
        *names, kind = declared.split()
        schema = _type_schema(kind) | ({"description": description} if description else {})
        for name in names:
            properties[name.rstrip("*")] = schema
            required += [] if name.endswith("*") else [name]
    object_schema: Schema = {"type": "object", "properties": properties, "required": required}
    return object_schema | ({"description": about} if about else {})


SCHEMAS: Final[dict[str, Schema]] = {name: _object_schema(text) for name, text in _OBJECTS.items()}
