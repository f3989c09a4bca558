"""Report on the fit of a latency model: the public JSON `fit` of a simulated run, with the trust in it."""

from collections.abc import Mapping
from typing import Final

from msgspec import UNSET, Struct, UnsetType

from llmtap.sim.sweep.batch_grid import BatchFit
from llmtap.sim.sweep.fitting import IterationFit
from llmtap.sim.sweep.linear_fit import Part, Unseen
from llmtap.units import to_seconds


class UnseenParts(Struct, frozen=True):
    prefill: Unseen | None
    decode: Unseen | None


class CaptureFitReport(Struct, frozen=True, kw_only=True):
    """Fit of iterations to a capture or trace."""

    capture: str
    r2: float
    """R^2 of the part that fits worst."""
    model: dict[str, float]
    base: float | None
    """TTFT of an empty prompt on an idle engine, in seconds."""
    prefill: Part
    decode: Part
    unseen: UnseenParts
    valid: bool
    """Whether figures of simulations with this model are valid."""
    caution: str | None
    """Reason why figures of simulations with this model are doubtful; None: no reason."""


class GridFitReport(Struct, frozen=True, kw_only=True):
    """Fit of whole batches to a grid."""

    grid: str
    r2: float
    points: int
    error_max: float
    unseen: Unseen | None
    length: str | UnsetType = UNSET
    """Tokens that the lengths of the grid count, as a value of `ModelOptions.length`; absent: unknown."""
    valid: bool
    caution: str | None


FitReport = CaptureFitReport | GridFitReport


def capture_report(place: str, fit: IterationFit, *, memory_known: bool) -> CaptureFitReport:
    """`memory_known`: whether the fit knows the KV memory of the server."""
    parts = {"prefill": fit.prefill_unseen, "decode": fit.decode_unseen}
    valid, caution = _is_valid(parts), caution_of(parts)
    if caution is not None and not valid and not memory_known:
        caution += "; if its KV memory was the limit, --fit-kv-blocks gives a better fit"
    if fit.models > 1:
        several = f"the latency model is fitted to requests for {fit.models:,} models: is it one engine?"
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
    """`length`: tokens that the lengths of the grid count; None: unknown."""
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
"""Time per token above which a grid probably has milliseconds instead of seconds."""


def _unit_caution(fit: BatchFit) -> str | None:
    if fit.model.beta_ns < _TOKEN_NS_MAX:
        return None
    return f"a token takes {fit.model.beta_ns / 1e9:.3g} s by this grid: are its times in milliseconds?"


def _is_valid(parts: Mapping[str, Unseen | None]) -> bool:
    return not any(part is not None and part.is_poor for part in parts.values())


def caution_of(parts: Mapping[str, Unseen | None]) -> str | None:
    """Return the reason why figures of a fitted model are doubtful; None if no part is poor."""
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
