"""Exchanges as OpenTelemetry's exporter meets them, and its reading of them."""

from llmtap.exchange.exchange import OUTPUT, Exchange
from llmtap.exchange.outcome import EventClass, TokenSource
from llmtap.export.opentelemetry.signals import CommonValues, common_values_of
from llmtap.metrics.latency import Measured, measure
from tests.support.traffic.streams import streamed

MS = 1_000_000
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


def chat(*times_ms: int, seq: int = 1, **fields: object) -> Exchange:
    """A streamed chat: handed on 10 ms after it arrived, a role before the tokens, usage after them.

    `times_ms` counts from the request's first byte.
    """
    x = streamed(*(times_ms or (110, 150, 250)), seq=seq)
    t, log = x.timeline, x.timeline.events
    t.request_end_ns, t.submit_ns = 5 * MS, 10 * MS
    tokens = list(log.t_ns)
    log.t_ns, log.classes, log.flags = log.t_ns[:0], bytearray(), bytearray()
    log.sizes, log.tokens = log.sizes[:0], log.tokens[:0]
    log.add(tokens[0] - 20 * MS, EventClass.KEEPALIVE, 9, -1, 0)
    log.add(tokens[0] - 10 * MS, EventClass.ROLE, 9, -1, 0)
    for t_ns in tokens:
        log.add(t_ns, EventClass.CONTENT, 9, 1, OUTPUT)
    log.add(tokens[-1] + 10 * MS, EventClass.USAGE, 9, -1, 0)
    log.add(tokens[-1] + 10 * MS, EventClass.DONE, 9, -1, 0)
    t.first_any_ns = t.first_byte_ns = tokens[0] - 20 * MS
    t.response_end_ns = tokens[-1] + 10 * MS
    t.delivered_ns = tokens[-1] + 11 * MS
    x.endpoint, x.dialect, x.finish_reason = "chat.completions", "openai.chat", "stop"
    x.model, x.response_model = "gpt-x", "gpt-x-2026-11-01"
    x.tokens.source = TokenSource.USAGE
    for name, value in fields.items():
        setattr(x, name, value)
    return x


def read(x: Exchange, host: str | None = None, provider: str | None = None) -> tuple[Measured, CommonValues]:
    m = measure(x)
    return m, common_values_of(x, m, host, provider)
