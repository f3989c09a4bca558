"""Report on the fit of a latency model, and on its validity: the public JSON `fit` of a simulated run."""

from collections.abc import Mapping
from typing import Final

from msgspec import UNSET, Struct, UnsetType

from llmtap.sim.sweep.batch_grid import BatchFit
from llmtap.sim.sweep.fitting import IterationFit
from llmtap.sim.sweep.linear_fit import FitQuality, PredictionAccuracy
from llmtap.units import to_seconds


class UnseenParts(Struct, frozen=True):
    """Accuracy of each part for data that were not used for the fit; None: unknown."""

    prefill: PredictionAccuracy | None
    decode: PredictionAccuracy | None


class CaptureFitReport(Struct, frozen=True, kw_only=True):
    """Report on the fit of an `IterationModel` to a capture or trace."""

    capture: str
    """Place of the capture or trace."""
    r2: float
    """R^2 of the part with the worst fit."""
    model: dict[str, float]
    base: float | None
    """TTFT of an empty prompt on an idle engine, in seconds."""
    prefill: FitQuality
    decode: FitQuality
    unseen: UnseenParts
    """Accuracy for data that were not used for the fit."""
    valid: bool
    """Whether simulations with this model have valid figures."""
    caution: str | None
    """Reason why simulations with this model have doubtful figures; None: no reason."""


class GridFitReport(Struct, frozen=True, kw_only=True):
    """Report on the fit of a `LatencyModel` to a grid. `r2`, `points`, `error_max`: as in `FitQuality`."""

    grid: str
    """Path of the file with the measured batch times."""
    r2: float
    points: int
    """Number of durations in the fit."""
    error_max: float
    unseen: PredictionAccuracy | None
    length: str | UnsetType = UNSET
    """Tokens that the lengths of the grid count: a value of `ModelOptions.length`; absent: unknown."""
    valid: bool
    """Whether the model predicts unseen data well enough."""
    caution: str | None


FitReport = CaptureFitReport | GridFitReport


def capture_report(place: str, fit: IterationFit, *, memory_known: bool) -> CaptureFitReport:
    """Return the report. `memory_known`: whether the fit used the size of the server's KV memory."""
    parts = {"prefill": fit.prefill_unseen, "decode": fit.decode_unseen}
    valid, caution = _is_valid(parts), caution_of(parts)
    if caution is not None and not valid and not memory_known:
        caution += "; if its KV memory was the limit, --fit-kv-blocks gives a better fit"
    if fit.model_count > 1:
        several = f"the latency model is fitted to requests for {fit.model_count:,} models: is it one engine?"
        caution = several if caution is None else f"{several} {caution}"
    return CaptureFitReport(
        capture=place,
        r2=min(fit.prefill.r2, fit.decode.r2),
        model=fit.model.to_dict(),
        base=None if fit.base_ns is None else to_seconds(fit.base_ns),
        prefill=fit.prefill,
        decode=fit.decode,
        unseen=UnseenParts(fit.prefill_unseen, fit.decode_unseen),
        valid=valid,
        caution=caution,
    )


def grid_report(place: str, fit: BatchFit, length: str | None) -> GridFitReport:
    """Return the report. `length`: kind of tokens that the lengths of the grid count; None: unknown."""
    parts = {"batches": fit.unseen}
    return GridFitReport(
        grid=place,
        r2=fit.part.r2,
        points=fit.part.points,
        error_max=fit.part.error_max,
        unseen=fit.unseen,
        length=UNSET if length is None else length,
        valid=_is_valid(parts),
        caution=caution_of(parts) or _unit_caution(fit),
    )


_TOKEN_NS_MAX: Final = 500e6
"""Time per token above which the times of a grid are probably in milliseconds instead of seconds."""


def _unit_caution(fit: BatchFit) -> str | None:
    if fit.model.beta_ns < _TOKEN_NS_MAX:
        return None
    return f"a token takes {fit.model.beta_ns / 1e9:.3g} s by this grid: are its times in milliseconds?"


def _is_valid(parts: Mapping[str, PredictionAccuracy | None]) -> bool:
    return not any(part is not None and part.is_poor for part in parts.values())


def caution_of(parts: Mapping[str, PredictionAccuracy | None]) -> str | None:
    """Return the reason why figures of a fitted model are doubtful; None if all parts predict well."""
    poor = [
        f"{name}: R^2 {one.r2:.3g}, root mean square error {one.rms_error:.2g} of the mean"
        for name, one in parts.items()
        if one is not None and one.is_poor
    ]
    if poor:
        return f"the latency model predicts poorly what it was not fitted to: {'; '.join(poor)}"
    unknown = [name for name, one in parts.items() if one is None]
    if unknown:
        return (
            f"too little data to check the latency model on what it was not fitted to: {', '.join(unknown)}"
        )
    return None
