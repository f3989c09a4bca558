"""Step changes of TTFT by model, for the summary, `/metrics`, the dashboard and `llmtap top`.

`StepBook` is a sink of the pipeline with a `StepDetector` (`metrics/step_change.py`) for each model. `Labels`
bounds the number of models. The history is part of the saved state, so that it goes on after a restart.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from llmtap.clock import Clock, WallAnchor
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Reading
from llmtap.export.sinks import SeriesKey
from llmtap.meter.tenants import OTHER, Labels
from llmtap.metrics.latency import Measured
from llmtap.metrics.step_change import (
    BLOCK_NS_MAX,
    DAY_NS,
    FALSE_ALARM_DAYS,
    HISTORY_NS_MIN,
    STREAMS_MIN,
    StepChange,
    StepDetector,
    StepState,
    pack_detectors,
    unpack_detectors,
)
from llmtap.units import NS_PER_S

_HOUR_NS: Final = 3_600 * NS_PER_S
_NOT_JUDGED_REASONS: Final = {
    StepState.LEARNING: f"the history is too short, {HISTORY_NS_MIN // _HOUR_NS} h are needed, half of them"
    " with traffic",
    StepState.FEW: f"fewer than {STREAMS_MIN} streams ended in {BLOCK_NS_MAX // NS_PER_S} s",
    StepState.NEW_LOAD: "the history has too few streams at this load and prompt length",
}


class StepBook:
    """Detectors of all models. One thread writes; readers get copies."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wall_anchor = WallAnchor.sample(clock)
        self._detectors: dict[str, StepDetector] = {}
        """By model: detector of lasting changes of the time to first token."""

    def on_end(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        first_ns = x.timeline.first_content_ns
        # Skip `other`, a mix of models: its TTFT changes with the mix.
        if first_ns is None or m.ttft_ns is None or not x.stream or key.model == OTHER:
            return
        if x.reading is Reading.INFERRED:
            return
        now_ns = self._clock.mono_ns()
        self._detector(key.model, now_ns).add(
            now_ns, m.ttft_ns, x.tokens.input, x.request_bytes, max(0, now_ns - first_ns)
        )

    def export(self) -> Callable[[], bytes]:
        """Return a thread-safe function that packs the detectors, so that another meter can continue them."""
        packed = pack_detectors({model: detector.export() for model, detector in self._detectors.items()})
        return lambda: packed

    def clear(self) -> None:
        self._detectors = {}

    def absorb(self, packed: bytes, shift_ns: int, labels: Labels) -> list[str]:
        """Add the packed detectors of another meter. Return no texts, since all parts can be added.

        `shift_ns`: our monotonic time minus the other meter's. Raises msgspec.MsgspecError.
        """
        for name, saved in unpack_detectors(packed).items():
            model = labels.model(name)
            if model != OTHER:
                self._detector(model, self._clock.mono_ns()).absorb(saved, shift_ns)
        return []

    def _detector(self, model: str, now_ns: int) -> StepDetector:
        detector = self._detectors.get(model)
        if detector is None:
            detector = self._detectors[model] = StepDetector(now_ns)
        return detector

    def ratios(self) -> dict[str, float]:
        """Return by model: new TTFT / earlier TTFT, for a step that still lasts and can be judged."""
        now_ns = self._clock.mono_ns()
        steps = {model: detector.judged_step(now_ns) for model, detector in self._detectors.items()}
        return {model: step.ratio for model, step in steps.items() if step is not None}

    def to_dict(self) -> dict[str, object]:
        """Return public JSON: for each model its state, as a word and a sentence, and its latest step."""
        now_ns = self._clock.mono_ns()
        return {
            "false_alarm_days": FALSE_ALARM_DAYS,
            "models": {name: self._model_json(name, one, now_ns) for name, one in self._detectors.items()},
        }

    def _model_json(self, name: str, detector: StepDetector, now_ns: int) -> dict[str, object]:
        step, state = detector.step_at(now_ns), detector.state(now_ns)
        return {
            "state": state.value,
            "history": detector.history_ns(now_ns) / NS_PER_S,
            "step": None if step is None else self._step_json(step),
            "sentence": self._sentence(name, state, detector, now_ns),
        }

    def _step_json(self, step: StepChange) -> dict[str, object]:
        low, high = step.ratio_interval()
        return {
            "since": self._wall_s(step.since_ns),
            "found": self._wall_s(step.found_ns),
            "until": None if step.until_ns is None else self._wall_s(step.until_ns),
            "ratio": step.ratio,
            "low": low,
            "high": high,
            "ttft": step.ttft_ns / NS_PER_S,
            "baseline": step.baseline_ns / NS_PER_S,
            "n": step.n,
            "history": step.history_ns / NS_PER_S,
        }

    def _sentence(self, name: str, state: StepState, detector: StepDetector, now_ns: int) -> str:
        step = detector.judged_step(now_ns)
        if step is not None:
            low, high = step.ratio_interval()
            ttft, baseline = step.ttft_ns / NS_PER_S, step.baseline_ns / NS_PER_S
            return (
                f"Since {self._time_text(step.since_ns, now_ns)} the TTFT of {name} is {step.ratio:.2f} times"
                f" ({low:.2f} to {high:.2f}) that of {_span_text(step.history_ns)} before, at the same load"
                f" and prompt length: {ttft:.3g} s instead of {baseline:.3g} s, {step.n:,} streams. On"
                f" average, one false alarm comes in {FALSE_ALARM_DAYS} days."
            )
        if state in _NOT_JUDGED_REASONS:
            return f"Steps of the TTFT of {name} are not judged now: {_NOT_JUDGED_REASONS[state]}."
        span = _span_text(detector.history_ns(now_ns))
        return f"The TTFT of {name} has no step beside {span} before, at the same load and prompt length."

    def _wall_s(self, mono_ns: int) -> float:
        """Return the wall time of a monotonic time, in seconds since 1970."""
        return self._wall_anchor.to_wall_ns(mono_ns) / NS_PER_S

    def _time_text(self, mono_ns: int, now_ns: int) -> str:
        at, now = (datetime.fromtimestamp(self._wall_s(ns), UTC) for ns in (mono_ns, now_ns))
        return f"{at:%H:%M} UTC" if at.date() == now.date() else f"{at:%Y-%m-%d %H:%M} UTC"


def _span_text(ns: int) -> str:
    return f"the {ns / DAY_NS:.0f} days" if ns >= 2 * DAY_NS else f"the {ns / _HOUR_NS:.0f} hours"
