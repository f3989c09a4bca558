"""The protobuf format, read by Google's protobuf with the fields of client_model's `metrics.proto`."""

from typing import Any, Final

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal.decoder import _DecodeVarint32  # type: ignore[attr-defined]
from google.protobuf.message_factory import GetMessageClass
from prometheus_client.parser import text_string_to_metric_families

from llmtap.export.prometheus.exposition import Exposition
from llmtap.export.prometheus.writers import CONTENT_TYPE, is_preferred
from llmtap.export.sinks import SeriesKey
from llmtap.metrics.latency import measure
from tests.export.telemetry import MS, PARENT, chat

PROMETHEUS: Final = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited,"
    "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
"""What Prometheus sends with `scrape_native_histograms`."""
_F = FieldDescriptorProto
_STRING, _DOUBLE, _UINT64, _SINT32 = _F.TYPE_STRING, _F.TYPE_DOUBLE, _F.TYPE_UINT64, _F.TYPE_SINT32
_MESSAGES: Final = {
    "LabelPair": {"name": (1, _STRING), "value": (2, _STRING)},
    "Value": {"value": (1, _DOUBLE)},
    "Timestamp": {"seconds": (1, _F.TYPE_INT64), "nanos": (2, _F.TYPE_INT32)},
    "Exemplar": {"label": (1, "*LabelPair"), "value": (2, _DOUBLE), "timestamp": (3, "Timestamp")},
    "Bucket": {"cumulative_count": (1, _UINT64), "upper_bound": (2, _DOUBLE), "exemplar": (3, "Exemplar")},
    "BucketSpan": {"offset": (1, _SINT32), "length": (2, _F.TYPE_UINT32)},
    "Histogram": {
        "sample_count": (1, _UINT64),
        "sample_sum": (2, _DOUBLE),
        "bucket": (3, "*Bucket"),
        "schema": (5, _SINT32),
        "zero_threshold": (6, _DOUBLE),
        "zero_count": (7, _UINT64),
        "positive_span": (12, "*BucketSpan"),
        "positive_delta": (13, -_F.TYPE_SINT64),
    },
    "Metric": {
        "label": (1, "*LabelPair"),
        "gauge": (2, "Value"),
        "counter": (3, "Value"),
        "histogram": (7, "Histogram"),
    },
    "MetricFamily": {
        "name": (1, _STRING),
        "help": (2, _STRING),
        "type": (3, _F.TYPE_INT32),
        "metric": (4, "*Metric"),
    },
}
"""Number and type of each field; `*` and a minus: repeated."""


def family_class() -> Any:
    file = FileDescriptorProto(name="metrics.proto", package="p", syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            repeated = kind.startswith("*") if isinstance(kind, str) else kind < 0
            added = message.field.add(name=field, number=number, label=3 if repeated else 1)
            if isinstance(kind, str):
                added.type, added.type_name = _F.TYPE_MESSAGE, f".p.{kind.lstrip('*')}"
            else:
                added.type = abs(kind)
                if repeated:
                    added.options.packed = True
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("p.MetricFamily"))


def decoded(body: bytes) -> dict[str, Any]:
    kind, at, found = family_class(), 0, {}
    while at < len(body):
        size, at = _DecodeVarint32(body, at)
        family = kind.FromString(body[at : at + size])
        found[family.name] = family
        at += size
    return found


def exposition(*, native: bool = True) -> Exposition:
    made = Exposition("1", native=native)
    for i, x in enumerate((chat(), chat(1110, 1110, 1111), chat(111_110, trace_parent=PARENT))):
        made.on_end(x, measure(x), SeriesKey("a\nb", f"m{i % 2}"), None)
    return made


def labels(metric: Any) -> dict[str, str]:
    return {pair.name: pair.value for pair in metric.label}


def test_it_says_what_the_text_says() -> None:
    frozen = exposition().freeze({"meter_frames": 7, "goodput_requests_per_second": {"1m": 0.5}})
    body, content_type = frozen.render(PROMETHEUS)
    assert content_type == CONTENT_TYPE
    told = set()
    for name, family in decoded(body).items():
        for metric in family.metric:
            who = frozenset(labels(metric).items())
            if family.type == 4:
                h = metric.histogram
                told |= {(f"{name}_count", who, h.sample_count), (f"{name}_sum", who, h.sample_sum)}
                told |= {
                    (
                        f"{name}_bucket",
                        who | {("le", repr(b.upper_bound).replace("inf", "+Inf"))},
                        b.cumulative_count,
                    )
                    for b in h.bucket
                }
            else:
                told.add((name, who, metric.counter.value if family.type == 0 else metric.gauge.value))
    by_text = {
        (sample.name, frozenset(sample.labels.items()), sample.value)
        for family in text_string_to_metric_families(frozen.render("")[0].decode())
        for sample in family.samples
    }
    assert told == by_text


def test_native_buckets_hold_the_values() -> None:
    families = decoded(exposition().freeze().render(PROMETHEUS)[0])
    found: list[tuple[float, int]] = []
    for metric in families["llmtap_inter_chunk_seconds"].metric:
        h = metric.histogram
        assert h.sample_count == h.zero_count + sum(_counts(h))
        found += zip(_bounds(h), _counts(h), strict=True)
        if labels(metric)["model"] == "m1":
            assert h.zero_count == 1, "two tokens at once"
    exact = (40 * MS, 100 * MS, MS)
    for upper, count in found:
        assert sum(upper / 2 ** (1 / 64) < v / 1e9 <= upper for v in exact) == count
    assert sum(count for _, count in found) == len(exact)


def _counts(histogram: Any) -> list[int]:
    counts, total = [], 0
    for delta in histogram.positive_delta:
        total += delta
        counts.append(total)
    return counts


def _bounds(histogram: Any) -> list[float]:
    assert histogram.schema == 6
    found, i = [], 0
    for span in histogram.positive_span:
        i += span.offset
        found += [2 ** (k / 64) for k in range(i, i + span.length)]
        i += span.length
    return found


PROTOBUF = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;"


@pytest.mark.parametrize(
    ("accept", "preferred"),
    [
        (PROMETHEUS, True),
        (f"{PROTOBUF}encoding=delimited;q=0.3", True),
        (f"{PROTOBUF} encoding=text", False),
        ("text/plain, application/vnd.google.protobuf;encoding=delimited;q=0.9", False),
        ("application/vnd.google.protobuf;encoding=delimited;q=x", False),
        ("", False),
        ("*/*", False),
    ],
)
def test_protobuf_is_for_who_prefers_it(accept: str, preferred: bool) -> None:
    assert is_preferred(accept) is preferred
