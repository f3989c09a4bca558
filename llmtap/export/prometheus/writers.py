"""Write metrics in Prometheus' formats for `exposition.py`: as text (`TextWriter`) and protobuf
(`ProtobufWriter`).

`TextWriter` writes histograms and counters of exchanges as Prometheus 0.0.4 or OpenMetrics 1.0 (with
exemplars); prometheus_client writes the metrics about llmtap itself. Each series of a histogram is written
with one format string (0.2 us per line; prometheus_client takes 8 us). Empty labels are omitted.

Protobuf is the only format with native histograms. It is used if native histograms are enabled and the Accept
header of a scrape prefers protobuf (`is_preferred`). `prometheus_client` 0.26 cannot write protobuf.

Source: prometheus/client_model, `metrics.proto`; Prometheus, "Native histograms", "Exposition formats".
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, repeat
from struct import pack
from typing import Any, Final

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar

from llmtap.export.buckets import EXPONENTIAL_SCALE, ExponentialBuckets
from llmtap.export.prometheus.catalogue import CounterFamily, HistogramFamily

CONTENT_TYPE: Final = (
    "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
)
_COUNTER, _GAUGE, _HISTOGRAM = 0, 1, 4
_ZERO_THRESHOLD: Final = 2.0**-128
"""Largest value that counts as zero in a native histogram, as in Prometheus' client libraries."""

Labels = tuple[str, ...]
"""Label values of a series."""
Encoded = bytes
"""A message in the encoding of protobuf."""


def is_preferred(accept: str) -> bool:
    """Return whether an Accept header asks for protobuf before all other types."""
    best, protobuf = 0.0, 0.0
    for part in accept.split(","):
        kind, *parameters = (text.strip() for text in part.split(";"))
        quality = 1.0
        for name, _, value in (parameter.partition("=") for parameter in parameters):
            if name.strip() == "q":
                try:
                    quality = float(value)
                except ValueError:
                    quality = 0.0
        if kind == "application/vnd.google.protobuf" and "encoding=delimited" in parameters:
            protobuf = max(protobuf, quality)
        best = max(best, quality)
    return 0 < protobuf == best


class ProtobufWriter:
    """Writes metrics as protobuf messages."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def content(self) -> bytes:
        return b"".join(self._pieces)

    def write_histogram(
        self,
        family: HistogramFamily,
        cells: Iterable[Any],
        exemplars: Mapping[Labels, Mapping[int, Exemplar]] | None = None,
    ) -> None:
        """Write a histogram.

        `cells`: `(label values, counts by bucket, sum[, native buckets])` of each series; the last bucket has
        no upper edge. `exemplars`: by label values, then by the number of the bucket.
        """
        edges = [edge / family.unit for edge in family.edges] + [float("inf")]
        metrics = []
        for values, counts, total, *native in cells:
            series_exemplars = exemplars.get(values, {}) if exemplars else {}
            cumulative = list(accumulate(counts))
            parts = [_uint_field(1, cumulative[-1]), _double_field(2, total / family.unit)]
            for i, (edge, count) in enumerate(zip(edges, cumulative, strict=True)):
                exemplar = _exemplar_message(series_exemplars[i]) if i in series_exemplars else b""
                parts.append(_message_field(3, _uint_field(1, count) + _double_field(2, edge) + exemplar))
            if native and native[0] is not None:
                parts.append(_native_histogram(native[0]))
            metrics.append(_label_fields(family.labels, values) + _message_field(7, b"".join(parts)))
        self._write_family(family.name, family.help, _HISTOGRAM, metrics)

    def write_counter(self, family: CounterFamily, rows: Iterable[tuple[Labels, float]]) -> None:
        metrics = [
            _label_fields(family.labels, values) + _message_field(3, _double_field(1, n))
            for values, n in rows
        ]
        self._write_family(f"{family.name}_total", family.help, _COUNTER, metrics)

    def write_metric(self, metric: Metric) -> None:
        """Write a counter, gauge or info metric of prometheus_client."""
        kind, field = (_COUNTER, 3) if metric.type == "counter" else (_GAUGE, 2)
        metrics = [
            _label_fields(tuple(s.labels), tuple(s.labels.values()))
            + _message_field(field, _double_field(1, s.value))
            for s in metric.samples
        ]
        suffix = {"counter": "_total", "info": "_info"}.get(metric.type, "")
        self._write_family(metric.name + suffix, metric.documentation, kind, metrics)

    def _write_family(self, name: str, help_text: str, kind: int, metrics: Sequence[Encoded]) -> None:
        if not metrics:
            return
        head = _message_field(1, name.encode()) + _message_field(2, help_text.encode()) + _uint_field(3, kind)
        body = head + b"".join([_message_field(4, metric) for metric in metrics])
        self._pieces += (_varint(len(body)), body)


def _native_histogram(buckets: ExponentialBuckets) -> bytes:
    """Return the fields of a native histogram: spans of consecutive buckets, differences of counts."""
    spans: list[tuple[int, int]] = []
    deltas: list[int] = []
    next_index, count_before = 0, 0
    for i, count in sorted(buckets.counts.items()):
        if spans and i == next_index:
            spans[-1] = spans[-1][0], spans[-1][1] + 1
        else:
            spans.append((i - next_index, 1))
        deltas.append(count - count_before)
        next_index, count_before = i + 1, count
    return b"".join(
        (
            _uint_field(5, _zigzag(EXPONENTIAL_SCALE)),
            _double_field(6, _ZERO_THRESHOLD),
            _uint_field(7, buckets.zero_count),
            *(
                _message_field(12, _uint_field(1, _zigzag(offset)) + _uint_field(2, length))
                for offset, length in spans
            ),
            _message_field(13, b"".join([_varint(_zigzag(delta)) for delta in deltas])),
        )
    )


def _exemplar_message(exemplar: Exemplar) -> bytes:
    seconds = float(exemplar.timestamp or 0)
    timestamp = _uint_field(1, int(seconds)) + _uint_field(2, int(seconds % 1 * 1e9))
    labels = _label_fields(tuple(exemplar.labels), tuple(exemplar.labels.values()))
    return _message_field(3, labels + _double_field(2, exemplar.value) + _message_field(3, timestamp))


def _label_fields(names: Sequence[str], values: Labels) -> bytes:
    pairs = [(name, value) for name, value in zip(names, values, strict=True) if value]
    return b"".join(
        [
            _message_field(
                1, _message_field(1, name.encode()) + _message_field(2, value.encode("utf-8", "replace"))
            )
            for name, value in pairs
        ]
    )


def _message_field(field: int, body: bytes) -> bytes:
    """Encode a protobuf field of bytes, a text or an inner message."""
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _double_field(field: int, value: float) -> bytes:
    """Encode a protobuf field of a float."""
    return _varint(field << 3 | 1) + pack("<d", value)


def _uint_field(field: int, value: int) -> bytes:
    """Encode a protobuf field of an unsigned integer."""
    return _varint(field << 3) + _varint(value)


def _zigzag(value: int) -> int:
    """Return the unsigned number by which protobuf encodes a signed one (ZigZag)."""
    return value << 1 if value >= 0 else -value * 2 - 1


def _varint(value: int) -> bytes:
    """Encode a number in 7 bits a byte, the lowest first (protobuf: varint)."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _escape_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class TextWriter:
    """Writes metrics of exchanges as text."""

    def __init__(self, *, openmetrics: bool) -> None:
        self._openmetrics = openmetrics
        """Whether to write OpenMetrics instead of Prometheus' own text format."""
        self._pieces: list[str] = []

    def content(self) -> bytes:
        return "".join(self._pieces).encode()

    def write_histogram(
        self,
        family: HistogramFamily,
        cells: Iterable[Any],
        exemplars: Mapping[Labels, Mapping[int, Exemplar]] | None = None,
    ) -> None:
        """Write a histogram.

        `cells`: `(label values, counts by bucket, sum)` of each series; the last bucket has no upper edge.
        `exemplars`: by label values, then by the number of the bucket.
        """
        name, order = family.name, _sorted_labels(family.labels)
        edges = [repr(edge / family.unit) for edge in family.edges] + ["+Inf"]
        lines = [f'{name}_bucket{{%sle="{edge}"}} %d.0\n' for edge in edges]
        template = "".join(lines) + f"{name}_count%s %d.0\n{name}_sum%s %r\n"
        self._write_head(name, family.help, "histogram")
        for values, counts, total, *_ in cells:
            labels = _labels_text(order, values)
            prefix = f"{labels}," if labels else ""
            braced = f"{{{labels}}}" if labels else ""
            cumulative = list(accumulate(counts))
            text = template % (
                *chain.from_iterable(zip(repeat(prefix), cumulative)),
                braced,
                cumulative[-1],
                braced,
                total / family.unit,
            )
            series_exemplars = exemplars.get(values) if exemplars and self._openmetrics else None
            self._pieces.append(_with_exemplars(text, series_exemplars) if series_exemplars else text)

    def write_counter(self, family: CounterFamily, rows: Iterable[tuple[Labels, float]]) -> None:
        order = _sorted_labels(family.labels)
        self._write_head(family.name if self._openmetrics else f"{family.name}_total", family.help, "counter")
        start = f"{family.name}_total"
        for values, count in rows:
            labels = _labels_text(order, values)
            self._pieces.append(
                f"{start}{{{labels}}} {float(count)!r}\n" if labels else f"{start} {float(count)!r}\n"
            )

    def _write_head(self, name: str, help_text: str, kind: str) -> None:
        self._pieces.append(f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n")


def _sorted_labels(names: Sequence[str]) -> list[tuple[int, str]]:
    """Return positions and label names, in the alphabetical order in which prometheus_client writes them."""
    return sorted(enumerate(names), key=lambda pair: pair[1])


def _labels_text(order: Sequence[tuple[int, str]], values: Labels) -> str:
    return ",".join([f'{name}="{_escape_label(value)}"' for i, name in order if (value := values[i])])


def _with_exemplars(lines: str, exemplars: Mapping[int, Exemplar]) -> str:
    split = lines.split("\n")
    for i, exemplar in exemplars.items():
        labels = ",".join(f'{name}="{value}"' for name, value in exemplar.labels.items())
        split[i] += f" # {{{labels}}} {exemplar.value!r} {exemplar.timestamp!r}"
    return "\n".join(split)
