"""Answer `/api/v1/first_token`: the parts of one exchange's wait, compared with those of the last hour.

`UsualPhases` is a sink of the pipeline. It counts the parts (`metrics/phases.py`) of the streams of each
model in slices of five minutes. The number of models is bounded by `meter.models_max`.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from aiohttp import web

from llmtap.clock import Clock
from llmtap.exchange.exchange import Exchange
from llmtap.export.sinks import SeriesKey
from llmtap.meter.pipeline.exchanges import BadQuery, Query, RecentExchanges, read_fields
from llmtap.meter.pipeline.windows import Merging, SliceLevel, Slices
from llmtap.meter.tenants import OTHER, UNKNOWN
from llmtap.metrics.latency import Measured
from llmtap.metrics.phases import (
    EXCESS_SHARE,
    STREAMS_NEEDED,
    USUAL_SHARE,
    PhaseTimes,
    PhaseVerdict,
    judge_phases,
    phases_ns,
    waited_ns,
)
from llmtap.report.first_token import first_token_sentence
from llmtap.units import NS_PER_S

WINDOW_NS: Final = 3_600 * NS_PER_S
_LEVELS: Final = (SliceLevel(WINDOW_NS, WINDOW_NS // 12),)
RULE: Final = (
    f"A part is unusual if it is longer than in {100 * USUAL_SHARE:g} % of the streams of the same model that"
    " ended in the last hour, and its excess over their median is at least"
    f" {100 * EXCESS_SHARE:g} % of the whole wait."
)
_ByModel = dict[str, PhaseTimes]


class UsualPhases:
    """Sink that counts, by model, the parts of the wait for the first token in the last hour."""

    def __init__(self, clock: Clock, recent: RecentExchanges) -> None:
        """`recent`: the newest exchanges; a request names one of these by its id."""
        self._clock = clock
        self._recent = recent
        self._slices: Slices[_ByModel] = Slices(_LEVELS, clock.mono_ns(), dict, _merge_slices, past=False)

    def on_end(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        """Count the parts of the wait of a finished exchange for its model."""
        models = self._slices.open_data(self._clock.mono_ns())
        times = models.get(key.model)
        if times is None:
            times = models[key.model] = PhaseTimes()
        times.add(x)
        self._slices.tidy()

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/api/v1/first_token", self._handle_request)

    async def _handle_request(self, request: web.Request) -> web.Response:
        fields = read_fields(request.query.items())
        for field in fields.keys() - {"id"}:
            raise BadQuery(field, "is an unknown field; known fields: id")
        if "id" not in fields:
            raise BadQuery("id", "is missing; expected the id of an exchange, such as r0-1")
        matches = self._recent.find(Query(limit=1, filters={"id": fields["id"]}))
        document = await asyncio.to_thread(self.describe(matches[0][1])) if matches else None
        body = msgspec.json.encode({"first_token": document})
        return web.Response(body=body, content_type="application/json")

    def describe(self, x: Exchange) -> Callable[[], dict[str, object]]:
        """Return a thread-safe function that makes the JSON of `/api/v1/first_token` for an exchange."""
        now_ns = self._clock.mono_ns()
        self._slices.seal(now_ns)
        slices = self._slices.window(0, now_ns)[:-1]  # without the open slice, which is empty after `seal`
        seconds = (now_ns - self._slices.window_start_ns(0, now_ns)) / NS_PER_S

        def make_document() -> dict[str, object]:
            model = x.model or UNKNOWN
            same_model = any(model in models for models in slices)
            others = _sum_times(slices, model if same_model else OTHER)
            return _document(x, others, seconds, same_model=same_model)

        return make_document


def _document(x: Exchange, others: PhaseTimes, seconds: float, *, same_model: bool) -> dict[str, object]:
    durations_ns = phases_ns(x)
    out: dict[str, object] = {
        "id": x.id,
        "model": x.model,
        "waited": waited_ns(durations_ns) / NS_PER_S,
        "parts": [_part_document(verdict) for verdict in judge_phases(durations_ns, others)],
        "n": others.n,
        "same_model": same_model,
        "n_needed": STREAMS_NEEDED,
        "window": seconds,
        "rule": RULE,
    }
    return {**out, "sentence": first_token_sentence(out)}


def _part_document(verdict: PhaseVerdict) -> dict[str, object]:
    return {
        "name": verdict.phase.name,
        "title": verdict.phase.title,
        "meaning": verdict.phase.meaning,
        "start": verdict.start_ns / NS_PER_S,
        "seconds": _seconds(verdict.duration_ns),
        "n": verdict.n,
        "median": _seconds(verdict.median_ns),
        "usual": _seconds(verdict.usual_ns),
        "unusual": verdict.is_unusual,
    }


def _seconds(ns: float | None) -> float | None:
    return None if ns is None else ns / NS_PER_S


def _sum_times(slices: Sequence[_ByModel], model: str) -> PhaseTimes:
    total = PhaseTimes()
    for models in slices:
        if (times := models.get(model)) is not None:
            total.merge(times)
    return total


def _merge_slices(slices: Sequence[_ByModel], level: int) -> Merging[_ByModel]:
    merged: _ByModel = {}
    for models in slices:
        for name, times in models.items():
            merged.setdefault(name, PhaseTimes()).merge(times)
            yield
    return merged
