"""Read the `/metrics` page of an inference server: a few values under common names (`SERIES`).

`read_metrics` parses a page; `meter/relays.py` and `load/monitor/` request it. The present and former metric
names of vLLM, SGLang, TGI, llm-d's router and llmtap's simulated server are known. Other lines are not
parsed, so that a scrape is cheap. Servers are not trusted, so llmtap has a parser of its own, which takes
linear time (the parser of prometheus_client is quadratic in the length of a line). `read_metrics_in_thread`
runs it in a thread.

Sources: vLLM, vllm/v1/metrics/loggers.py, docs/usage/metrics.md, pull requests 29330 and 32661 (removed
names); SGLang, python/sglang/srt/metrics/collector.py and its "Production Metrics"; TGI, "Metrics" of its
reference; llm-d-router, docs of its metrics (prefix `llm_d_epp_`).
"""

import asyncio
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Literal, NamedTuple, cast
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from llmtap.net.bounded_body import AnswerTooLong, read_at_most
from llmtap.net.listener import failure_text

ACCEPT: Final = {"Accept": "text/plain;version=0.0.4"}
BODY_BYTES_MAX: Final = 16 << 20
"""Maximum size of a page. A vLLM server with 8 engines sends about 2 MB."""
SCRAPE_ERRORS: Final = (aiohttp.ClientError, OSError, TimeoutError, ValueError)
"""Exceptions of a failed scrape; see `failure_reason`."""
Kind = Literal["interval", "gauge", "counter"]


@dataclass(frozen=True, slots=True)
class MonitorSeries:
    """Declaration of a series of samples."""

    unit: str
    """`cpus`, `share` (0 to 1), `bytes`, `celsius`, `watts`, `joules`, `requests`, `tokens`, ..."""
    kind: Kind = "gauge"
    """`interval`: average since the previous sample; `gauge`: current value; `counter`: only grows."""


_TABLE: Final = (
    (
        "running",
        "requests",
        "gauge",
        "vllm:num_requests_running sglang:num_running_reqs tgi_batch_current_size",
    ),
    ("waiting", "requests", "gauge", "vllm:num_requests_waiting sglang:num_queue_reqs tgi_queue_size"),
    # vLLM 0.9 renamed this metric, so list both names.
    (
        "kv_use",
        "share",
        "gauge",
        (
            "vllm:kv_cache_usage_perc vllm:gpu_cache_usage_perc sglang:token_usage"
            " llm_d_epp_average_kv_cache_utilization"
        ),
    ),
    # SGLang has no counter of queries. It looks up all prompt tokens, so use the counter of these.
    (
        "prefix_queries",
        "tokens",
        "counter",
        "vllm:prefix_cache_queries_total vllm:gpu_prefix_cache_queries_total sglang:prompt_tokens_total",
    ),
    (
        "prefix_hits",
        "tokens",
        "counter",
        "vllm:prefix_cache_hits_total vllm:gpu_prefix_cache_hits_total sglang:cached_tokens_total",
    ),
    ("preemptions", "requests", "counter", "vllm:num_preemptions_total sglang:num_retracted_requests_total"),
    ("preempted", "requests", "counter", "llmtap_sim:preempted_requests_total"),
    ("recovered", "requests", "counter", "llmtap_sim:recovered_requests_total"),
    ("preempted_tokens", "tokens", "counter", "llmtap_sim:preempted_tokens_total"),
    ("swapped_tokens", "tokens", "counter", "llmtap_sim:swapped_tokens_total"),
    # Only vLLM's first engine version (V0) swaps requests; SGLang never does.
    ("swapped", "requests", "gauge", "vllm:num_requests_swapped"),
    # TGI and llm-d's router count tokens only as the sums of their histograms.
    (
        "prompt_tokens",
        "tokens",
        "counter",
        (
            "vllm:prompt_tokens_total sglang:prompt_tokens_total tgi_request_input_length_sum"
            " llm_d_epp_request_input_tokens_sum"
        ),
    ),
    (
        "generation_tokens",
        "tokens",
        "counter",
        (
            "vllm:generation_tokens_total sglang:generation_tokens_total tgi_request_generated_tokens_sum"
            " llm_d_epp_request_output_tokens_sum"
        ),
    ),
    # Times that the server measured: their mean is the growth of `_seconds` divided by that of `_values`.
    (
        "ttft_seconds",
        "seconds",
        "counter",
        (
            "vllm:time_to_first_token_seconds_sum sglang:time_to_first_token_seconds_sum"
            " llm_d_epp_request_ttft_seconds_sum"
        ),
    ),
    (
        "ttft_values",
        "requests",
        "counter",
        (
            "vllm:time_to_first_token_seconds_count sglang:time_to_first_token_seconds_count"
            " llm_d_epp_request_ttft_seconds_count"
        ),
    ),
    (
        "itl_seconds",
        "seconds",
        "counter",
        (
            "vllm:inter_token_latency_seconds_sum vllm:time_per_output_token_seconds_sum"
            " sglang:inter_token_latency_seconds_sum llm_d_epp_request_streaming_itl_seconds_sum"
        ),
    ),
    (
        "itl_values",
        "gaps",
        "counter",
        (
            "vllm:inter_token_latency_seconds_count vllm:time_per_output_token_seconds_count"
            " sglang:inter_token_latency_seconds_count llm_d_epp_request_streaming_itl_seconds_count"
        ),
    ),
    (
        "queue_seconds",
        "seconds",
        "counter",
        "vllm:request_queue_time_seconds_sum sglang:queue_time_seconds_sum",
    ),
    (
        "queue_values",
        "requests",
        "counter",
        "vllm:request_queue_time_seconds_count sglang:queue_time_seconds_count",
    ),
    # SGLang has one histogram for all stages of a request: select the stage by its label.
    (
        "prefill_seconds",
        "seconds",
        "counter",
        (
            "vllm:request_prefill_time_seconds_sum"
            " sglang:per_stage_req_latency_seconds_sum{stage=prefill_forward}"
        ),
    ),
    (
        "prefill_values",
        "requests",
        "counter",
        (
            "vllm:request_prefill_time_seconds_count"
            " sglang:per_stage_req_latency_seconds_count{stage=prefill_forward}"
        ),
    ),
)
"""Name of a series, its unit and kind, and the server's metrics from which it is read: the first one that the
page has. `{LABEL=VALUE}`: only samples with this label. A share is the mean over a server's engines, any
other value is their sum."""
MEAN_TIMES: Final = ("ttft", "itl", "queue", "prefill")
"""Names of times of which llmtap reads the sum (series `NAME_seconds`) and the number of values
(`NAME_values`). The quotient is the mean."""
SERIES: Final = {name: MonitorSeries(unit, cast(Kind, kind)) for name, unit, kind, _ in _TABLE}


class _Source(NamedTuple):
    """Metric of a server, and the label that its samples must have (None: any)."""

    name: str
    label: tuple[bytes, bytes] | None
    """Name and value of the label that a sample must have; None: any."""


def _source_of(text: str) -> _Source:
    """Return the source of `NAME` or `NAME{LABEL=VALUE}`."""
    name, brace, label = text.partition("{")
    key, _, value = label.rstrip("}").encode().partition(b"=")
    return _Source(name, (key, value) if brace else None)


_SOURCES: Final = {name: [_source_of(text) for text in names.split()] for name, _, _, names in _TABLE}
LINE_BYTES_MAX: Final = 16 << 10
"""Maximum length of a line with a metric that llmtap reads; its labels take some hundred bytes."""
LINES_MAX: Final = 1 << 18
"""Maximum number of lines of a page; a page of 2 MB has 20,000."""
_NAME: Final = re.compile(
    rb"(?:%s)(?=[\s{])"
    % b"|".join(source.name.encode() for sources in _SOURCES.values() for source in sources)
)
_OPEN: Final = re.compile(rb"\s*\{")
_CLOSE: Final = re.compile(rb"\s*\}")
_LABEL: Final = re.compile(rb'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"([^"\\]*(?:\\.[^"\\]*)*)"\s*(,|(?=\}))')
_VALUE: Final = re.compile(rb"\s*([^\s_]+)(?:\s+[+-]?[0-9.eE+]+)?\s*")
"""A value and, possibly, a timestamp, which is ignored. Source: prometheus.io, "Exposition formats"."""
_COPY_LABELS: Final = (b"tp_rank", b"pp_rank", b"moe_ep_rank")
"""Labels of the ranks of one engine of SGLang. All ranks report the same value, so only one is counted."""


def metrics_url(target: str) -> str:
    """Return the URL of the metrics of the server at `target`: the path `/metrics` of its host, as all known
    servers have it."""
    url = urlsplit(target)
    return urlunsplit((url.scheme, url.netloc, "/metrics", "", ""))


class _Sample(NamedTuple):
    """A line of a server's metrics."""

    labels: dict[bytes, bytes]
    value: float


async def read_metrics_in_thread(body: bytes) -> dict[str, float]:
    """Run `read_metrics` in a thread, so that a page of many MB does not block the event loop."""
    return await asyncio.to_thread(read_metrics, body)


def read_metrics(body: bytes) -> dict[str, float]:
    """Return the values of the series in `SERIES` that a page has. Raises ValueError for an invalid page."""
    samples: dict[str, list[_Sample]] = {}
    for number, line in enumerate(io.BytesIO(body), 1):
        if number > LINES_MAX:
            raise ValueError(f"the page has more than {LINES_MAX:,} lines, the maximum that llmtap reads")
        name = _NAME.match(line)
        if name is not None:
            metric = name[0].decode()
            if len(line) > LINE_BYTES_MAX:
                raise ValueError(
                    f"line {number}: {metric}: longer than {LINE_BYTES_MAX >> 10} KiB, the maximum"
                )
            try:
                samples.setdefault(metric, []).append(_read_sample(line, name.end()))
            except ValueError as exc:
                raise ValueError(f"line {number}: {metric}: {exc}") from None
    values = {}
    for series, sources in _SOURCES.items():
        chosen = next(filter(None, (_samples_of(source, samples) for source in sources)), None)
        if chosen is not None:
            value = _combined_value(chosen, mean=SERIES[series].unit == "share")
            if 0 <= value < inf:  # this also excludes NaN
                values[series] = value
    return values


def _samples_of(source: _Source, samples: Mapping[str, list[_Sample]]) -> list[_Sample]:
    """Return the samples of a metric that have the label of the source."""
    matches = samples.get(source.name, [])
    if source.label is None:
        return matches
    key, value = source.label
    return [sample for sample in matches if sample.labels.get(key) == value]


def _read_sample(line: bytes, at: int) -> _Sample:
    """Read the rest of a line, from `at` behind the name of its metric. Raises ValueError."""
    line.decode()  # raises UnicodeDecodeError, a ValueError, if the line is not UTF-8
    labels: dict[bytes, bytes] = {}
    brace = _OPEN.match(line, at)
    if brace is not None:
        at = brace.end()
        while (label := _LABEL.match(line, at)) is not None:
            if label[1] in labels:
                raise ValueError(f"the label {label[1].decode()} occurs twice, expected different labels")
            labels[label[1]] = label[2]
            at = label.end()
        end = _CLOSE.match(line, at)
        if end is None:
            raise ValueError('the labels are malformed, expected {NAME="VALUE", ...}')
        at = end.end()
    value = _VALUE.fullmatch(line, at)
    if value is None:
        raise ValueError("the value is missing or malformed, expected a number, or a number and a time")
    return _Sample(labels, float(value[1]))


async def read_body(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of a scrape. Raises ValueError for a status other than 200, or AnswerTooLong."""
    if response.status != 200:
        raise ValueError(f"status {response.status}, expected 200")
    return await read_at_most(response, BODY_BYTES_MAX)


def _combined_value(samples: Sequence[_Sample], *, mean: bool) -> float:
    """Return the sum, or the `mean`, of the values of several engines (label `engine` or `dp_rank`) and
    models."""
    # With priorities, SGLang reports a value for each priority, and their total under an empty priority. Then
    # use only the total.
    totals = [sample for sample in samples if sample.labels.get(b"priority") == b""]
    engines: dict[frozenset[tuple[bytes, bytes]], float] = {}
    for sample in totals or samples:
        key = frozenset((name, value) for name, value in sample.labels.items() if name not in _COPY_LABELS)
        engines[key] = max(engines.get(key, sample.value), sample.value)
    total = sum(engines.values())
    return total / len(engines) if mean else total


def failure_reason(exc: Exception) -> str:
    """Return the reason of a failed scrape, with the same text for all failures of a kind, to count them."""
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    if isinstance(exc, aiohttp.InvalidURL):
        return "no URL"
    if isinstance(exc, AnswerTooLong):
        return str(exc)
    if isinstance(exc, aiohttp.ClientError):
        return failure_text(exc)
    if isinstance(exc, UnicodeDecodeError):
        return "not text"
    text = str(exc)
    return text if text.startswith(("status ", "more than ")) else "not Prometheus' text"
