"""One run of one scheduler on one workload in virtual time; `SimulationResult` says what came of it."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from llmtap.metrics.objectives import Objectives
from llmtap.sim.engine import Engine
from llmtap.sim.latency import SEED_ITERATIONS, SEED_MODEL, IterationModel, LatencyModel
from llmtap.sim.model_options import ModelOptions
from llmtap.sim.predictors import predict
from llmtap.sim.schedulers.multi_bin_dynamic import MultiBinDynamic
from llmtap.sim.schedulers.registry import SCHEDULERS, options_read
from llmtap.sim.serving import Serving, ServingSetup, settled
from llmtap.sim.sweep.exchanges import ExchangeMaker
from llmtap.sim.sweep.metering import VirtualMeter
from llmtap.sim.sweep.simulation_result import SimulationResult
from llmtap.sim.virtual import Played, play
from llmtap.workload.requests import Requests

__all__ = ["SimulationResult", "capacity_rps", "fly"]


def fly(
    name: str,
    requests: Requests,
    readings: ModelOptions,
    *,
    model: LatencyModel = SEED_MODEL,
    iterations: IterationModel = SEED_ITERATIONS,
    serving: Serving | None = None,
    servers: int = 1,
    seed: int | None = 42,
    objectives: Objectives | None = None,
    measure: bool | None = None,
    capture: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> SimulationResult:
    """Runs a scheduler of `SCHEDULERS`; predicts first, and leaves out failed requests if they are to be.

    Args:
        model: of whole batches; `iterations` and `serving`: of schedulers that iterate.
        seed: of what is drawn; None where nothing is.
        objectives: what its exchanges are judged by; with them it is measured.
        measure: make Exchanges and sum them up. None: where the scheduler iterates, or objectives or a
            capture want them. A million whole batches take seconds, and ten times as long when measured.
        capture: folder, or URL, for its exchanges as a capture (`recording.py`).
        progress: told now and then how many arrived.

    Raises ValueError for what cannot be run, and ConfigError for a capture that cannot be written.
    """
    kind = SCHEDULERS[name]
    if kind.iterates and servers > 1:
        raise ValueError(
            f"{name} has one server: its memory and its batch are one GPU's, got {servers} servers"
        )
    if measure is None:
        measure = kind.iterates or objectives is not None or capture is not None
    elif not measure and (objectives is not None or capture is not None):
        raise ValueError("objectives and captures are of exchanges: a run without measuring makes none")
    if readings.failed == "dropped":
        requests = requests.taken([row for row, made in enumerate(requests.output) if made])
        if not requests:
            raise ValueError("all requests failed, and failed ones are dropped")
    requests = replace(requests, predicted=predict(requests, readings.predictor, seed))
    serving = settled(Serving() if serving is None else serving, name)
    scheduler = kind.build(requests, ServingSetup(model, readings, iterations, serving))
    played = Played.begun(len(requests), servers)
    recorder = meter = None
    if measure:
        if capture is not None:
            # Arrow takes a third of a second to import, and few runs are captured.
            from llmtap.sim.sweep.recording import FlightRecorder

            recorder = FlightRecorder(capture, name, requests)
        maker = ExchangeMaker(name, requests, played)
        meter = VirtualMeter(maker, objectives=objectives, gap_max_ns=readings.token_sla, keeper=recorder)
    play(
        requests,
        Engine(scheduler, servers),
        servers=servers,
        all_first=readings.same_instant == "all-first",
        gpu_first=readings.tie == "gpu-first",
        watch=meter,
        played=played,
        progress=progress,
    )
    if recorder is not None:
        recorder.close()
    flight = SimulationResult(
        name, requests, played, readings, model, servers, seed, iterations, serving, kind.iterates,
        options_read(name, readings, serving),
    )  # fmt: skip
    if meter is not None:
        flight = replace(flight, summary=meter.summary, slow=meter.slow)
    if isinstance(scheduler, MultiBinDynamic):
        return replace(flight, bins=scheduler.bins.spans, bin_limits=scheduler.limits)
    if kind.iterates:
        return replace(flight, state=getattr(scheduler, "state", None))
    return flight


def capacity_rps(
    late_share: Callable[[float], float], allowed: float, start_rps: float, *, precision: float = 0.01
) -> float | None:
    """The highest rate at which no more than `allowed` of the requests are late, to within `precision`.

    `late_share` runs the workload at a rate. The share is taken to rise with the rate. 0 where even a
    thousandth of `start_rps` is too much; None where all may come at once, and no rate is.
    """
    if late_share(math.inf) <= allowed:
        return None
    low = high = start_rps
    if late_share(start_rps) <= allowed:
        while late_share(high := high * 2) <= allowed:
            low = high
    else:
        while late_share(low := low / 2) > allowed:
            high = low
            if low < start_rps / 1_000:
                return 0.0
    while high / low > 1 + precision:
        middle = (low * high) ** 0.5
        if late_share(middle) <= allowed:
            low = middle
        else:
            high = middle
    return low
