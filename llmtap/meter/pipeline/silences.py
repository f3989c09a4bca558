"""Answer `/api/v1/silences`: streams that have sent no token for some time, and how earlier silences ended.

`SilenceBook` is a sink of the pipeline: it counts the silences of finished streams by model. It inspects the
open streams only on request, a few at a time, so that a token causes no work. Streams whose answers are not
understood are not judged. Silences are measured until the time up to which the meter knows the events of the
relay, so that a meter that is behind does not report streams as silent. `metrics/silences.py` has the
estimates.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Final, NamedTuple

import msgspec
from aiohttp import web

from llmtap.clock import Clock
from llmtap.exchange.exchange import BACK, Exchange
from llmtap.export.sinks import SeriesKey
from llmtap.meter.pipeline.exchanges import BadQuery, OpenExchange, Streams, read_fields, read_number
from llmtap.meter.relays import RelayBook
from llmtap.meter.tenants import MODEL_CHARS_MAX, UNKNOWN, Labels
from llmtap.metrics.latency import Measured
from llmtap.metrics.silences import SilenceCounts, SilenceKind, resumption_to_dict
from llmtap.units import NS_PER_S

STREAMS_DEFAULT: Final = 200
STREAMS_MAX: Final = 1_000
GROUPS_MAX: Final = 200
"""Maximum number of groups in an answer, which has those with the most silent streams."""
STREAMS_PER_ROUND: Final = 256
"""Number of streams inspected between two rounds of the event loop, in about a millisecond."""


class SilenceGroup(NamedTuple):
    """Labels by which silent streams are grouped."""

    kind: SilenceKind
    tenant: str
    model: str | None
    upstream: str | None
    """URL of the upstream; None: unknown, or the relay has several."""


@dataclass(frozen=True, slots=True)
class SilentStream:
    """An open stream that has had no token for too long."""

    id: str
    group: SilenceGroup
    arm: str | None
    age_ns: int
    """Time since the request arrived."""
    silent_ns: int
    """Time since the latest token or, before the first, since the request was sent."""
    since_read_ns: int
    """Time since the last bytes of any kind; shorter than `silent_ns` if keep-alives arrive."""
    tokens: int


class _SavedSilences(msgspec.Struct, array_like=True):
    """Saved form of the silences of one model."""

    streams: int
    """Number of finished streams."""
    kinds: dict[SilenceKind, tuple[list[int], list[int]]]
    """By kind: number of silences in each cell of the grid of durations, ended by a token, and all others."""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(dict[str, _SavedSilences]).decode


@dataclass(slots=True)
class SilenceReport:
    """Result of an inspection of all open streams."""

    running_streams: int = 0
    """Number of open streams."""
    not_judged: int = 0
    """Number of streams that cannot be judged, because their answers are not understood."""
    silent_streams: list[SilentStream] = field(default_factory=list)
    by_tenant: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By kind and label of the tenant: number of silent streams."""


class SilenceBook:
    """Silences of finished streams, and the streams that are silent now.

    `threshold_ns`: length of a silence from which the stream is reported.
    """

    def __init__(
        self, clock: Clock, threshold_ns: int, streams: Streams, relays: RelayBook, labels: Labels
    ) -> None:
        self.threshold_ns = threshold_ns
        self.latest_report = SilenceReport()
        """Result of the latest inspection."""
        self._clock = clock
        self._streams = streams
        self._relays = relays
        self._labels = labels
        self._counts_by_model: dict[str, SilenceCounts] = {}
        """By label of the model: counts of its silences. `Labels` bounds the number of labels."""
        self._lock = asyncio.Lock()

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/api/v1/silences", self._handle_request)

    def on_end(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        if x.stream:
            self._counts_of(key.model).add(x, m)

    def export(self) -> Callable[[], bytes]:
        """Return a thread-safe function that packs the counts, so that another meter can continue them."""
        packed = _encode(
            {
                model: _SavedSilences(
                    past.streams,
                    {
                        kind: (past.kinds[kind].ended.tolist(), past.kinds[kind].censored.tolist())
                        for kind in SilenceKind
                    },
                )
                for model, past in self._counts_by_model.items()
            }
        )
        return lambda: packed

    def clear(self) -> None:
        self._counts_by_model = {}

    def absorb(self, packed: bytes, shift_ns: int, labels: Labels) -> list[str]:
        """Add the packed counts of another meter. Return no texts, since all parts can be added.

        Raises msgspec.MsgspecError.
        """
        for name, saved in _decode(packed).items():
            past = self._counts_of(labels.model(name))
            past.streams += saved.streams
            for kind, counts in saved.kinds.items():
                past.kinds[kind].merge(*counts)
        return []

    def _counts_of(self, model: str) -> SilenceCounts:
        past = self._counts_by_model.get(model)
        if past is None:
            past = self._counts_by_model[model] = SilenceCounts()
        return past

    async def refresh(self) -> SilenceReport:
        """Return a new report on all open streams, and keep it as `latest_report`."""
        async with self._lock:
            report = SilenceReport()
            for n_done, one in enumerate(self._streams.open_exchanges(), 1):
                self._inspect(one, report)
                if n_done % STREAMS_PER_ROUND == 0:
                    await asyncio.sleep(0)
            self.latest_report = report
            return report

    def _inspect(self, one: OpenExchange, report: SilenceReport) -> None:
        """Add a stream to the report: as running and, if it has no token for too long, as silent."""
        observer, arm = one
        x = observer.exchange
        t = x.timeline
        since_ns = t.submit_ns if t.last_token_ns is None else t.last_token_ns
        if x.call is not None or x.side == BACK or since_ns is None or t.response_end_ns is not None:
            return
        now_ns = self._relays.processed_ns(x.relay, self._clock.mono_ns())
        if t.last_token_ns is not None and now_ns - since_ns < self.threshold_ns:
            report.running_streams += 1
            return
        # The next call can set `last_token_ns`, so the time of the last token is read again after it.
        now = observer.running_state()
        if not now.stream:
            return
        report.running_streams += 1
        if not now.understood:
            report.not_judged += 1
            return
        kind = SilenceKind.FIRST_TOKEN if t.last_token_ns is None else SilenceKind.NEXT_TOKEN
        since_ns = since_ns if t.last_token_ns is None else t.last_token_ns
        silent_ns = now_ns - since_ns
        if silent_ns < self.threshold_ns:
            return
        report.by_tenant[kind.value, self._labels.tenant(x.tenant, trusted=False)] += 1
        report.silent_streams.append(
            SilentStream(
                x.id,
                SilenceGroup(kind, x.tenant, x.model, self._relays.upstream(x.relay)),
                arm,
                now_ns - t.arrival_ns,
                silent_ns,
                max(0, now_ns - now.last_read_ns),
                now.tokens,
            )
        )

    async def _handle_request(self, request: web.Request) -> web.Response:
        fields = read_fields(request.query.items())
        limit = read_number("limit", fields.pop("limit", str(STREAMS_DEFAULT)), STREAMS_MAX)
        for name in fields:
            raise BadQuery(name, "is an unknown field; known fields: limit")
        report = await self.refresh()
        models = {_model_label(stream.group.model) for stream in report.silent_streams}
        # Copy the counts, which change while a thread reads them.
        past = {name: self._counts_by_model[name].copy() for name in models & self._counts_by_model.keys()}

        def encode_silences() -> bytes:
            return msgspec.json.encode(self._to_dict(report, past, limit))

        return web.Response(body=await asyncio.to_thread(encode_silences), content_type="application/json")

    def _to_dict(
        self, report: SilenceReport, past: Mapping[str, SilenceCounts], limit: int
    ) -> dict[str, object]:
        longest = nlargest(limit, report.silent_streams, key=lambda stream: stream.silent_ns)
        return {
            "threshold": self.threshold_ns / NS_PER_S,
            "running": report.running_streams,
            "not_judged": report.not_judged,
            "count": len(report.silent_streams),
            "groups": _groups_to_dicts(report.silent_streams),
            "streams": [_stream_to_dict(stream, past) for stream in longest],
        }


def _groups_to_dicts(silent: list[SilentStream]) -> list[dict[str, object]]:
    groups: dict[SilenceGroup, tuple[int, int]] = {}
    for stream in silent:
        n, longest_ns = groups.get(stream.group, (0, 0))
        groups[stream.group] = n + 1, max(longest_ns, stream.silent_ns)
    most = nlargest(GROUPS_MAX, groups.items(), key=lambda group: group[1])
    return [{**group._asdict(), "n": n, "longest": longest_ns / NS_PER_S} for group, (n, longest_ns) in most]


def _stream_to_dict(stream: SilentStream, past: Mapping[str, SilenceCounts]) -> dict[str, object]:
    counts = past.get(_model_label(stream.group.model), SilenceCounts())
    return {
        "id": stream.id,
        **stream.group._asdict(),
        "arm": stream.arm,
        "age": stream.age_ns / NS_PER_S,
        "silent": stream.silent_ns / NS_PER_S,
        "since_read": stream.since_read_ns / NS_PER_S,
        "tokens": stream.tokens,
        "past": resumption_to_dict(counts.kinds[stream.group.kind], stream.silent_ns),
    }


def _model_label(model: str | None) -> str:
    return UNKNOWN if model is None else model[:MODEL_CHARS_MAX]
