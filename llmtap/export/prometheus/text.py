"""Write histograms and counters of exchanges as text: Prometheus 0.0.4, or OpenMetrics 1.0 (with exemplars).

`exposition.py` fills a `TextWriter`. prometheus_client writes the other metrics, those of llmtap itself. A
histogram is one format string per series (0.2 us a line; prometheus_client takes 8 us). Empty labels are
omitted.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, repeat
from typing import Any

from prometheus_client.samples import Exemplar

from llmtap.export.prometheus.catalogue import CounterFamily, HistogramFamily

__all__ = ["TextWriter"]


Labels = tuple[str, ...]


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class TextWriter:
    def __init__(self, *, openmetrics: bool) -> None:
        self._openmetrics = openmetrics
        self._out: list[str] = []

    def bytes(self) -> bytes:
        return "".join(self._out).encode()

    def histogram(
        self,
        family: HistogramFamily,
        cells: Iterable[Any],
        exemplars: Mapping[Labels, Mapping[int, Exemplar]] | None = None,
    ) -> None:
        """Cells are `(label values, counts by bucket with the one beyond, sum)`; exemplars go by both."""
        name, order = family.name, _order(family.labels)
        edges = [repr(edge / family.unit) for edge in family.edges] + ["+Inf"]
        lines = [f'{name}_bucket{{%sle="{edge}"}} %d.0\n' for edge in edges]
        template = "".join(lines) + f"{name}_count%s %d.0\n{name}_sum%s %r\n"
        self._head(name, family.help, "histogram")
        for values, counts, total, *_ in cells:
            labels = _text(order, values)
            prefix = f"{labels}," if labels else ""
            braced = f"{{{labels}}}" if labels else ""
            upto = list(accumulate(counts))
            filled = template % (
                *chain.from_iterable(zip(repeat(prefix), upto)), braced, upto[-1], braced, total / family.unit
            )  # fmt: skip
            found = exemplars.get(values) if exemplars and self._openmetrics else None
            self._out.append(_with_exemplars(filled, found) if found else filled)

    def counter(self, family: CounterFamily, rows: Iterable[tuple[Labels, float]]) -> None:
        order = _order(family.labels)
        self._head(family.name if self._openmetrics else f"{family.name}_total", family.help, "counter")
        start = f"{family.name}_total"
        for values, count in rows:
            labels = _text(order, values)
            self._out.append(
                f"{start}{{{labels}}} {float(count)!r}\n" if labels else f"{start} {float(count)!r}\n"
            )

    def _head(self, name: str, text: str, kind: str) -> None:
        self._out.append(f"# HELP {name} {text}\n# TYPE {name} {kind}\n")


def _order(names: Sequence[str]) -> list[tuple[int, str]]:
    """Return label names in alphabetical order, as prometheus_client writes them, with their positions."""
    return sorted(enumerate(names), key=lambda pair: pair[1])


def _text(order: Sequence[tuple[int, str]], values: Labels) -> str:
    return ",".join([f'{name}="{_escape(value)}"' for i, name in order if (value := values[i])])


def _with_exemplars(lines: str, exemplars: Mapping[int, Exemplar]) -> str:
    split = lines.split("\n")
    for i, exemplar in exemplars.items():
        labels = ",".join(f'{name}="{value}"' for name, value in exemplar.labels.items())
        split[i] += f" # {{{labels}}} {exemplar.value!r} {exemplar.timestamp!r}"
    return "\n".join(split)
