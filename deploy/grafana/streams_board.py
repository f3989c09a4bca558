"""The board of streams: what comes first, what comes between, how it comes, and how it ends."""

from __future__ import annotations

from panels import Board, Panel, Row, bars, datasource, heatmap, lines, quantiles
from queries import JOB, JOB_VARIABLE, NOT_INFERRED, RANGE, WHO, WHOSE, p99, rate, ratio

__all__ = ["streams_board"]


def _first_times() -> tuple[Panel, ...]:
    points = {
        "headers": ("llmtap_time_to_headers_seconds", WHO),
        "first byte": ("llmtap_time_to_first_byte_seconds", WHO),
        "first event": ("llmtap_time_to_first_event_seconds", WHO),
        "first token": ("llmtap_time_to_first_token_seconds", f'{WHO},kind="any"'),
        "first content": ("llmtap_time_to_first_token_seconds", f'{WHO},kind="content"'),
    }
    split = [
        (f"histogram_quantile(0.5, {rate(f'{metric}_bucket', labels, 'le')})", name)
        for name, (metric, labels) in points.items()
    ]
    return (
        quantiles(
            "Time to first token",
            "Submit to the first content that is not white space. With trace ids where"
            " clients send traceparent.",
            "llmtap_time_to_first_token_seconds",
            f'{WHO},kind="content"',
        ),
        lines("What comes first", "Medians from submit: each is somebody's TTFT.", *split),
        heatmap(
            "Time to first token, all",
            "The whole distribution: two bands are two populations, which no quantile shows.",
            "llmtap_time_to_first_token_seconds",
            f'{WHO},kind="content"',
        ),
    )


def _gaps() -> tuple[Panel, ...]:
    options = (
        f"sum by (le, option) (rate(llmtap_inter_token_seconds_bucket{{{WHO},{NOT_INFERRED}}}[{RANGE}]))"
    )
    return (
        quantiles(
            "Between chunks",
            "Time between events that carry output (ITL option A).",
            "llmtap_inter_chunk_seconds",
            WHO,
        ),
        lines(
            "Inter-token latency, by definition",
            "p90. A: gaps between chunks. B: the others of a chunk count as 0."
            " B-even: a chunk's gap is spread over its tokens. C: by the server's own clock.",
            (f"histogram_quantile(0.9, {options})", "{{option}}"),
        ),
        quantiles(
            "Time per output token",
            "(last token - first token) / (tokens - 1), an exchange each.",
            "llmtap_time_per_output_token_seconds",
            WHO,
        ),
        heatmap(
            "Between chunks, all",
            "A second band far above the first is chunks that were held and came in bursts.",
            "llmtap_inter_chunk_seconds",
            WHO,
        ),
        quantiles(
            "User idle latency",
            "All waits of a reader with nothing to read, from submit on, added up.",
            "llmtap_user_idle_seconds",
            WHO,
        ),
        quantiles(
            "The same, once it has begun",
            "From the first token on: the stalls in the middle.",
            "llmtap_user_idle_after_first_token_seconds",
            WHO,
        ),
    )


def _chunks() -> tuple[Panel, ...]:
    bursts, events = rate("llmtap_burst_events_total", WHO), rate("llmtap_stream_events_total", WHO)
    tokens = ratio(rate("llmtap_chunk_tokens_sum", WHO), rate("llmtap_chunk_tokens_count", WHO))
    return (
        lines(
            "Chunking",
            "Tokens in an event, events in a read. Above 1 somebody between the engine and us puts them"
            " together.",
            (tokens, "tokens per event"),
            (ratio(events, rate("llmtap_stream_reads_total", WHO)), "events per read"),
            unit="short",
        ),
        lines(
            "In bursts",
            "Share of the events that came in a burst after a hold.",
            (ratio(bursts, events), "share"),
            unit="percentunit",
        ),
        bars(
            "Tokens",
            "Output by the source of the count, and input.",
            (rate("llmtap_output_tokens_total", WHO, "source"), "output: {{source}}"),
            (rate("llmtap_input_tokens_total", WHO), "input"),
            unit="short",
        ),
        lines(
            "Silent streams",
            "Running streams that have sent no token for meter.silence_threshold: before the first token, and"
            " after it. The alert LlmtapStreamsSilent counts the latter.",
            (f"sum by (kind) (llmtap_silent_streams{{{JOB}}})", "{{kind}}"),
            (f"sum(llmtap_relay_streams{{{JOB}}})", "running"),
            unit="short",
        ),
    )


def _ends() -> tuple[Panel, ...]:
    return (
        bars(
            "Outcomes",
            "How exchanges ended.",
            (rate("llmtap_exchanges_total", WHO, "outcome"), "{{outcome}}"),
        ),
        bars(
            "Never a token",
            "Exchanges that ended without one, by reason.",
            (rate("llmtap_no_token_total", WHO, "reason"), "{{reason}}"),
        ),
        quantiles(
            "Duration",
            "Submit to last byte, of answers that ended well.",
            "llmtap_request_duration_seconds",
            WHO,
        ),
        lines(
            "Generated and not delivered",
            "Output tokens per second that the upstream counted (meter.upstream_metrics) beyond those that we"
            " saw: generated for clients that had left, if all of its traffic comes through llmtap."
            " Middleware: tokens that the application sent after the client had left.",
            (
                rate("llmtap_upstream_output_tokens_total", JOB)
                + " - "
                + rate("llmtap_output_tokens_total", JOB),
                "upstream - delivered",
            ),
            (rate("llmtap_tokens_after_cancel_total", WHO), "middleware"),
            unit="short",
            low=None,
        ),
        lines(
            "Two clocks",
            "p90 of the difference between what we saw of a duration and what the server tells of it."
            " Longer by ours: network and queues between the two.",
            (
                "histogram_quantile(0.9, "
                + rate("llmtap_server_clock_disagreement_seconds_bucket", WHO, "le, duration, longer")
                + ")",
                "{{duration}}, longer by {{longer}}",
            ),
        ),
        lines(
            "Uncertain",
            "Share of exchanges whose stamps are wider than meter.uncertainty_limit.",
            (
                ratio(rate("llmtap_uncertain_exchanges_total", WHO), rate("llmtap_exchanges_total", WHO)),
                "share",
            ),
            unit="percentunit",
        ),
    )


def _load() -> tuple[Panel, ...]:
    return (
        lines(
            "First token by tenant",
            "p99, to be seen beside the load of the upstream.",
            (p99("llmtap_time_to_first_token_seconds", f'{WHO},kind="content"', "tenant"), "{{tenant}}"),
        ),
        lines(
            "Requests in the upstream",
            "By its own /metrics (meter.upstream_metrics). Where the queue grows, latency does, too.",
            (f"sum(llmtap_upstream_running_requests{{{JOB}}})", "running"),
            (f"sum(llmtap_upstream_waiting_requests{{{JOB}}})", "waiting"),
            unit="short",
        ),
        lines(
            "KV cache of the upstream",
            "Share in use. Near 1 the upstream cannot admit a request without evicting another.",
            (f"max(llmtap_upstream_kv_cache_usage_ratio{{{JOB}}})", "in use"),
            unit="percentunit",
        ),
    )


def streams_board() -> Board:
    return Board(
        "llmtap-streams",
        "llmtap: streams",
        "What readers of streams live through, and where it comes from.",
        (datasource(), JOB_VARIABLE, *WHOSE),
        (
            Row("The first", _first_times()),
            Row("Between", _gaps()),
            Row("Load of the upstream", _load()),
            Row("Chunks and tokens", _chunks()),
            Row("The end", _ends()),
        ),
    )
