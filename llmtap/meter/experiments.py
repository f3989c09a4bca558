"""Sample, compare and report the arms of a running A/B experiment, and turn it on and off (`Experiments`).

Relays assign requests to arms. The pipeline calls `on_assignment` with each assignment and `on_end` with each
finished exchange; `results()` compares each arm with the control as JSON for the admin API, with the
statistics of `metrics/experiment.py`. `switch` sends the switch word to every relay. An arm that is worse
than the control can switch the experiment off (`stop_worse`). A restarted meter learns from a relay whether
the experiment is on. An exchange counts in the arm that it was assigned to, even if the arm's change could
not be made or failed: exclusions would bias the comparison. Only requests for which a relay had no memory
left (`NO_ROOM`) are counted separately.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final

from msgspec import Struct, msgpack

from llmtap.channel.experiment import NO_ROOM, OWN_HEADER, Experiment, read_switch, switch_word
from llmtap.clock import Clock
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome, Reading
from llmtap.export.sinks import SeriesKey
from llmtap.meter.tenants import Labels
from llmtap.metrics.catalogue import Answers, Surface, Unit, shown_on, values_of
from llmtap.metrics.experiment import (
    FIRST_LOOK,
    ArmSample,
    Difference,
    Figure,
    SavedSample,
    mean_difference,
    mean_interval,
    quantile_difference,
    quantile_interval,
    share_difference,
    share_interval,
)
from llmtap.metrics.latency import BURST_SENSITIVE, Measured, arrives_in_bursts
from llmtap.metrics.refusals import ERRORS, error_share, is_refused, label_key, labels_document
from llmtap.metrics.statistics import Interval, anytime_p, marks, multinomial_e_log
from llmtap.metrics.summary import ENDED_WELL
from llmtap.units import NS_PER_S

_COMPARED_METRICS: Final = shown_on(Surface.EXPERIMENT)
_SINGLE_VALUE_METRICS: Final = tuple(
    metric for metric in _COMPARED_METRICS if metric.answers is Answers.STREAMS and not metric.pooled
)
_single_values: Final = values_of(_SINGLE_VALUE_METRICS)
METRICS: Final[Mapping[str, float]] = {
    **{metric.name: NS_PER_S if metric.unit is Unit.SECONDS else 1 for metric in _COMPARED_METRICS},
    "tokens_per_chunk": 1,
    "output_tokens": 1,
}
"""By metric that is compared between arms: divisor that converts recorded values to reported ones (NS_PER_S
from ns to seconds, 1 for tokens). `itl` is option B-even, only for streams whose tokens per chunk are
known; `tbc` (option A) is available for all streams."""
SHARES: Final = ("refused", "failed", "cancelled")
LABEL_SHARES: Final = tuple(name for name, _ in ERRORS.values())
"""Shares of labelled requests (wrong refusals, missed ones): compared only if a request has a label."""
LABEL_ALPHA: Final = 0.05
"""Significance level of the intervals in tables of labels (95 %), not that of the experiment (`alpha`)."""
TITLES: Final[Mapping[str, str]] = {
    **{metric.name: metric.title for metric in _COMPARED_METRICS},
    "tokens_per_chunk": "tokens per chunk",
    "output_tokens": "output tokens",
    **{share: f"{share}, share" for share in SHARES},
    **{share: f"{share.replace('_', ' ')}, share" for share in LABEL_SHARES},
}
"""By compared metric or share: its name in tables. The most important ones come first."""
QUANTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
RATIO_ALPHA: Final = 0.001
"""Significance level of the sample-ratio alarm. It is low, because the alarm invalidates all data."""
RATIO_CHECK_UNITS: Final = 64
"""Number of new units after which the sample ratio is checked again."""
WORSE_CHECK_EXCHANGES: Final = 64
"""Number of ended exchanges after which `stop_worse` is checked again."""
OPEN_SHARE_MAX: Final = 0.05
"""Maximum number of open requests of an arm, as a share of the ended ones, with which shares are judged. A
refused or failed request ends early, so too many of the first ended requests of a slow arm are refused or
failed."""
UNITS_MAX: Final = 100_000
"""Maximum number of units (conversations or tenants) that count for the sample ratio; they take 10 MB."""

_FAILED: Final = frozenset(
    {
        Outcome.CLIENT_ERROR,  # counts as a failure, because an arm's change can make the request invalid
        Outcome.UPSTREAM_ERROR,
        Outcome.UPSTREAM_RESET,
        Outcome.UPSTREAM_TIMEOUT,
        Outcome.TRUNCATED,
    }
)

SETTLE_NS: Final = 10 * NS_PER_S
"""Time after the start of a stage in which requests do not count: relays can still use the old shares."""

log = logging.getLogger(__name__)
Send = Callable[[int], None]


@dataclass(slots=True)
class _Arm:
    """Counts and figures of one arm in the present stage."""

    sample: ArmSample
    """Figures of the arm's exchanges."""
    assigned_requests: int = 0
    """Number of requests that a relay assigned to the arm."""
    own_headers: int = 0
    """Number of requests of this arm whose client itself sent a header field of another arm."""
    single_requests: int = 0
    """Number of requests that are a unit of their own, since they belong to no conversation."""
    units: int = 0
    """Number of conversations or tenants (`Experiment.unit`) that were assigned to the arm."""
    exclusions: Counter[str] = field(default_factory=Counter)
    """By reason: number of requests that were sent without the change of their arm."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """By outcome: number of finished exchanges."""
    refusals: Counter[str] = field(default_factory=Counter)
    """By kind of refusal: number of requests that the server's answer refused."""
    labels: Counter[str] = field(default_factory=Counter)
    """By label that the client gave a request, and its result (`label_key`): number of requests."""
    chunking: Counter[str] = field(default_factory=Counter)
    """Sums of events, reads and chunks, which show whether a server sends several tokens in one chunk."""
    uncertainty_ns: int = 0
    """Largest uncertainty of a timestamp in the arm's exchanges."""
    figures: dict[str, Figure] = field(default_factory=dict)
    """By metric: copy of the sample's figure. Only `copy` sets them; otherwise they are in the sample."""
    forgotten_units: int = 0
    """Number of units whose sums are no longer kept separately, because the sample is full."""

    @property
    def open_requests(self) -> int:
        """Number of assigned requests that have not ended; 0 in a capture, which has only ended ones."""
        return max(0, self.assigned_requests - self.outcomes.total() - self.exclusions[NO_ROOM])

    @property
    def has_few_open(self) -> bool:
        """Whether so few requests are open that shares of the ended ones are those of all."""
        return self.open_requests <= OPEN_SHARE_MAX * self.outcomes.total()

    def to_saved(self) -> "_SavedArm":
        counts = [getattr(self, name) for name in _COUNTS]
        counters = [dict(getattr(self, name)) for name in _COUNTERS]
        return _SavedArm(counts, counters, self.uncertainty_ns, self.sample.to_saved())

    def clear(self) -> None:
        for name in _COUNTS:
            setattr(self, name, 0)
        for name in _COUNTERS:
            getattr(self, name).clear()
        self.sample.clear()

    def merge_saved(self, saved: "_SavedArm") -> None:
        for name, n in zip(_COUNTS, saved.counts, strict=True):
            setattr(self, name, getattr(self, name) + n)
        for name, counts in zip(_COUNTERS, saved.counters, strict=True):
            getattr(self, name).update(counts)
        self.uncertainty_ns = max(self.uncertainty_ns, saved.uncertainty_ns)
        self.sample.merge_saved(saved.sample)

    def copy(self) -> "_Arm":
        return replace(
            self,
            exclusions=self.exclusions.copy(),
            outcomes=self.outcomes.copy(),
            refusals=self.refusals.copy(),
            labels=self.labels.copy(),
            chunking=self.chunking.copy(),
            figures={name: figure.copy() for name, figure in self.sample.figures.items()},
            forgotten_units=self.sample.forgotten_units,
        )


_COUNTS: Final = ("assigned_requests", "own_headers", "single_requests", "units")
_COUNTERS: Final = ("exclusions", "outcomes", "refusals", "labels", "chunking")


class _SavedArm(Struct, array_like=True):
    """Saved form of an `_Arm`: `counts` has its fields in `_COUNTS`, `counters` those in `_COUNTERS`."""

    counts: list[int]
    counters: list[dict[str, int]]
    """Values of the fields in `_COUNTERS`."""
    uncertainty_ns: int
    sample: SavedSample


class _SavedExperiment(Struct, array_like=True):
    """Saved form of the experiment, for the next meter."""

    id: int
    name: str
    """Name of the experiment; empty if none was configured."""
    is_on: bool
    switched_by: str
    """What switched the experiment last: `config`, or for example `api`."""
    since_ns: int
    """Wall time of the latest switch."""
    ratio_p: float
    """Smallest p-value so far of the test that units are split as configured (sample ratio)."""
    stop_report: dict[str, object] | None
    """Why `stop_worse` switched the experiment off; None if it did not."""
    units: list[int]
    """Numbers of the units known so far, so that the next meter does not count them twice."""
    arms: dict[str, _SavedArm]
    stage_since_ns: int
    """Wall time of the start of the stage."""
    between_stages: int
    """Number of requests that do not count, because they arrived within SETTLE_NS of the stage's start."""
    earlier_stages: list[dict[str, object]]
    """JSON of the results of the stages before this one."""
    stage_age_ns: int
    """Time for which the stage has run."""
    figures_wall_ns: tuple[int, int] | None = None
    """Wall times of the first and last exchange in the figures."""


_encode: Final = msgpack.Encoder().encode
_decode: Final = msgpack.Decoder(_SavedExperiment).decode


class Experiments:
    """The experiment of the proxy: its switch, its stages, and the comparison of its arms."""

    def __init__(self, experiment: Experiment | None, clock: Clock, *, shares_known: bool = True) -> None:
        """`shares_known`: whether the weights by which requests were assigned to arms are known. If not (as
        in a capture), the sample ratio is not tested, and differences of shares have no p."""
        self._clock = clock
        self._shares_known = shares_known
        """False for a capture whose shares of the arms are unknown, so the sample ratio is not tested."""
        self._word_senders: list[Send] = []
        """One function for each connected relay; it sends a word that switches the experiment."""
        self._switched_by = "config"
        """What switched the experiment last: `config`, or for example `api`."""
        self._switch_ns = clock.wall_ns()
        """Wall time of the latest switch."""
        self._is_on = experiment is not None and experiment.enabled
        self._stop_report: dict[str, object] | None = None
        """Why `stop_worse` switched the experiment off; None if it did not."""
        self._base_experiment = experiment
        """Experiment as configured, without a stage; `experiment` has the shares of the present stage."""
        self._earlier_stages: list[dict[str, object]] = []
        """JSON of the results of the stages before this one."""
        self._begin_stage(0)

    def _begin_stage(self, stage: int) -> None:
        """Begin an empty comparison with the shares of a stage.

        Figures of different stages are never added up. The shares change with the stage, so most units of one
        arm would come from another time than those of the other arm.
        """
        experiment = None if self._base_experiment is None else self._base_experiment.at_stage(stage)
        self.experiment = experiment
        self._stage_index = stage
        self._set_stage_start()
        self._settled_ns = self._stage_mono_ns + SETTLE_NS if stage else 0
        """Time from which requests count: those shortly after a change of the shares are left out."""
        self._left_out_requests = 0
        self._unjudged_figures = [] if experiment is None else experiment.stop_worse
        """Figures of `stop_worse` that could not be judged at the latest check."""
        arms = [] if experiment is None else experiment.arms
        single = experiment is None or experiment.unit == "request"
        self._arms = {
            arm.name: _Arm(ArmSample((*METRICS, *SHARES, *LABEL_SHARES), single=single)) for arm in arms
        }
        self._known_units: set[int] | None = None if single else set()
        self._counted_units = 0
        self._sample_ratio_p = 1.0
        self._ended_exchanges = 0
        self._figures_wall_ns: tuple[int, int] | None = None
        """Wall-clock arrivals of the first and the last exchange in the figures; None without exchanges."""
        self._units_are_exported = False
        """Whether an export has contained the units, so that later exports contain only new figures."""

    def _set_stage_start(self) -> None:
        self._stage_mono_ns, self._stage_wall_ns = self._clock.mono_ns(), self._clock.wall_ns()

    @property
    def switch_state(self) -> tuple[bool, int, int]:
        """Whether the experiment is on, wall time of the latest switch in ns, and index of the stage."""
        return self._is_on, self._switch_ns, self._stage_index

    def _is_settled_at(self, t_ns: int) -> bool:
        """Return whether requests sent at a time belong to the shares now in use."""
        return t_ns >= self._settled_ns

    def _advance(self) -> None:
        """Begin the next stage if this one lasted long enough, each figure of `stop_worse` could be judged,
        and the sample ratio is as configured."""
        e = self.experiment
        if e is None or self._stage_index + 1 >= len(e.stages) or self.state != "running":
            return
        if self._unjudged_figures or self._clock.mono_ns() - self._stage_mono_ns < e.stage_time:
            return
        self._check_sample_ratio()
        if self._sample_ratio_p <= RATIO_ALPHA:
            return
        arms = {name: arm.copy() for name, arm in self._arms.items()}
        result = _experiment_result(e, arms, self._sample_ratio_p, self._has_reached_units_max)
        self._earlier_stages.append(
            {
                "number": self._stage_index + 1,
                "share": e.stages[self._stage_index],
                "from": _rfc3339_text(self._stage_wall_ns),
                "to": _rfc3339_text(self._clock.wall_ns()),
                "units": {name: arm.units for name, arm in self._arms.items()},
                "differences": result["differences"],
                "sample_ratio": result["sample_ratio"],
            }
        )
        self._begin_stage(self._stage_index + 1)
        stage, share = self._stage_index + 1, e.stages[self._stage_index]
        log.warning("event=experiment_stage name=%s stage=%d share=%g", e.name, stage, share)
        self._send_switch_word()

    def _send_switch_word(self) -> None:
        assert self.experiment is not None
        for send in self._word_senders:
            send(switch_word(self.experiment.id, self._is_on))

    @property
    def state(self) -> str:
        """State of the experiment: `none` (not configured), `off`, `running` or `ended`."""
        if self.experiment is None:
            return "none"
        if self.experiment.has_ended(self._clock.wall_ns()):
            return "ended"
        return "running" if self._is_on else "off"

    def export(self) -> Callable[[], bytes]:
        """Return a thread-safe function that packs the experiment, so that another meter can continue it."""
        e = self.experiment
        arms = {name: arm.to_saved() for name, arm in self._arms.items()}
        packed = _encode(
            _SavedExperiment(
                0 if e is None else e.id,
                "" if e is None else e.name,
                self._is_on,
                self._switched_by,
                self._switch_ns,
                self._sample_ratio_p,
                self._stop_report,
                [] if self._known_units is None or self._units_are_exported else [*self._known_units],
                arms,
                self._stage_wall_ns,
                self._left_out_requests,
                self._earlier_stages,
                self._clock.mono_ns() - self._stage_mono_ns,
                self._figures_wall_ns,
            )
        )
        return lambda: packed

    def clear(self) -> None:
        self._units_are_exported = True
        self._left_out_requests = 0
        for arm in self._arms.values():
            arm.clear()

    def keep_units(self) -> None:
        """Include all units in the next export again. Call this if the latest export could not be written."""
        self._units_are_exported = False
        for arm in self._arms.values():
            arm.sample.save_units_again()

    def absorb(self, packed: bytes, shift_ns: int, labels: Labels) -> list[str]:
        """Add the packed experiment of another meter. Return a text for each part that could not be added.

        Raises msgspec.MsgspecError.
        """
        saved = _decode(packed)
        if not saved.name:
            return []
        stage = self._absorb_stage(saved)
        if stage is None:
            return [f"experiment {saved.name} (it was changed or removed, or it had a key of its own)"]
        self._absorb_switch(saved)
        if stage != self._stage_index:
            return [f"stage {stage + 1} of experiment {saved.name} (a later one has begun)"]
        self._left_out_requests += saved.between_stages
        for name, arm in self._arms.items():
            arm.merge_saved(saved.arms[name])
        if self._known_units is not None:
            self._known_units.update(saved.units)
        self._sample_ratio_p = min(self._sample_ratio_p, saved.ratio_p)
        if self._stop_report is None and not self._is_on:
            self._stop_report = saved.stop_report
        if saved.figures_wall_ns is not None:
            self._extend_figures_period(*saved.figures_wall_ns)
        return []

    def _extend_figures_period(self, first_wall_ns: int, last_wall_ns: int) -> None:
        """Extend the period that the figures cover."""
        first_ns, last_ns = self._figures_wall_ns or (first_wall_ns, last_wall_ns)
        self._figures_wall_ns = min(first_ns, first_wall_ns), max(last_ns, last_wall_ns)

    def absorb_switch(self, packed: bytes) -> None:
        """Take from another meter's experiment only whether it is on. Raises msgspec.MsgspecError."""
        saved = _decode(packed)
        if saved.name and self._absorb_stage(saved) is not None:
            self._absorb_switch(saved)

    def _absorb_stage(self, saved: _SavedExperiment) -> int | None:
        """Begin the stage of a saved experiment if it is later than the present one. Return the index of the
        saved stage, or None if the saved experiment is not the configured one."""
        stage = None if self._base_experiment is None else self._base_experiment.stage_of(saved.id)
        if stage is not None and stage >= self._stage_index:
            if stage > self._stage_index:
                self._begin_stage(stage)
            self._earlier_stages = saved.earlier_stages
            if self._switched_by == "config" or saved.since_ns >= self._switch_ns:
                # Nobody has switched the experiment at this meter since the saved state was written, so
                # continue the saved stage. The time without a meter does not count.
                self._stage_mono_ns = self._clock.mono_ns() - saved.stage_age_ns
                self._stage_wall_ns = saved.stage_since_ns
                self._settled_ns = self._stage_mono_ns + SETTLE_NS if stage else 0
        return stage

    def _absorb_switch(self, saved: _SavedExperiment) -> None:
        # Keep our own state if somebody has switched the experiment here after the saved state was written.
        if self._switched_by == "config" or self._switch_ns < saved.since_ns:
            self._is_on, self._switched_by, self._switch_ns = saved.is_on, saved.switched_by, saved.since_ns
        self._send_switch_word()

    def switch(self, on: bool, by: str = "api") -> None:
        """Switch the experiment on or off at all relays, also at later ones. `by`: who switched."""
        assert self.experiment is not None
        log.warning("event=experiment_switched name=%s on=%s by=%s", self.experiment.name, on, by)
        if on and not self._is_on:
            self._set_stage_start()
            self._stop_report = None
        self._is_on, self._switched_by, self._switch_ns = on, by, self._clock.wall_ns()
        self._send_switch_word()

    def join(self, word: int, send: Send) -> None:
        """Register a relay. `word`: latest switch word that it received (0: none). `send` sends a word."""
        if self.experiment is None or self._base_experiment is None:
            return
        self._word_senders.append(send)
        experiment_id, on = read_switch(word)
        stage = self._base_experiment.stage_of(experiment_id) if word else None
        is_later = stage is not None and stage > self._stage_index
        if stage is not None and is_later:
            self._begin_stage(stage)
        if stage == self._stage_index and self._switched_by == "config" and on != self._is_on:
            self.switch(on, "relay")
        elif is_later:
            self._send_switch_word()
        else:
            send(switch_word(self.experiment.id, self._is_on))

    def leave(self, send: Send) -> None:
        """Remove a relay, which was registered by `join` with the function `send`."""
        if send in self._word_senders:
            self._word_senders.remove(send)

    def on_assignment(self, arm: str, unit: str, single: bool, *, own_headers: bool = False) -> None:
        """Count the assignment of a request to an arm, unless the arm is unknown or the stage has just begun
        (SETTLE_NS). `single`: whether the request is a unit of its own."""
        counts = self._arms.get(arm)
        if counts is None or not self._is_settled_at(self._clock.mono_ns()):
            return
        counts.assigned_requests += 1
        counts.single_requests += single
        if own_headers:
            assert self.experiment is not None
            # Log the first such request only, and none if the experiment is read from a capture.
            if not counts.own_headers and self._shares_known:
                log.warning(
                    "event=experiment_own_headers name=%s arm=%s stripped=%s further=counted",
                    self.experiment.name,
                    arm,
                    self.experiment.strip_headers,
                )
            counts.own_headers += 1
        if self._known_units is not None:
            number = int(unit, 16)
            if number in self._known_units or len(self._known_units) >= UNITS_MAX:
                return
            self._known_units.add(number)
        counts.units += 1
        self._counted_units += 1
        if self._counted_units % RATIO_CHECK_UNITS == 0 and self._shares_known:
            self._check_sample_ratio()

    def _check_sample_ratio(self) -> None:
        """Log an error if the arms have other shares of the units than configured."""
        assert self.experiment is not None
        was_alarming = self._sample_ratio_p <= RATIO_ALPHA
        units = {name: arm.units for name, arm in self._arms.items()}
        # Keep the smallest p so far. The p-value is anytime-valid (from an e-value), so an alarm stays valid
        # when later data look better.
        self._sample_ratio_p = min(self._sample_ratio_p, _sample_ratio_p(units, self.experiment.shares))
        if self._sample_ratio_p <= RATIO_ALPHA and not was_alarming:
            log.error(
                "event=sample_ratio_mismatch name=%s units=%s hint=%r",
                self.experiment.name,
                units,
                "the split differs from the weights: do not trust a comparison of the arms",
            )

    def on_end(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        """Add a finished exchange to the sample of its arm."""
        arm = self._arms.get(x.arm or "")
        if arm is None or x.unit is None:
            return
        if not self._is_settled_at(x.timeline.arrival_ns):
            self._left_out_requests += 1
            return
        if x.excluded == NO_ROOM:
            arm.exclusions[NO_ROOM] += 1
            return
        arm.outcomes[x.outcome.value] += 1
        if (label := label_key(x)) is not None:
            arm.labels[label] += 1
        refused = is_refused(x)
        if refused:
            arm.refusals[str((x.refusal or {}).get("kind") or "unknown")] += 1
        if x.excluded is not None and x.excluded != OWN_HEADER:
            arm.exclusions[x.excluded] += 1
        arm.uncertainty_ns = max(arm.uncertainty_ns, x.uncertainty_ns)
        self._extend_figures_period(x.arrival_wall_ns, x.arrival_wall_ns)
        values = dict(_metric_values(x, m))
        values["refused"] = (int(refused),)
        values["failed"] = (int(x.outcome in _FAILED),)
        values["cancelled"] = (int(x.outcome is Outcome.CLIENT_CANCELLED),)
        if (labelled := error_share(x)) is not None:
            values[labelled[0]] = (labelled[1],)
        arm.sample.add(int(x.unit, 16), values, x.request_bytes)
        self._ended_exchanges += 1
        if self._ended_exchanges % WORSE_CHECK_EXCHANGES == 0:
            self._stop_worse()
            self._advance()
        if x.stream:
            sizes = m.tokens_per_chunk or ()
            arm.chunking["events"] += len(x.timeline.events)
            arm.chunking["output_events"] += m.output_events
            arm.chunking["reads"] += x.reads
            arm.chunking["sized_chunks"] += len(sizes)
            arm.chunking["single_token_chunks"] += sum(1 for size in sizes if size == 1)

    def _stop_worse(self) -> None:
        """Switch the experiment off if an arm is worse than the control; false alarms: at most alpha.

        Store the names of the figures that cannot be judged yet in `_unjudged_figures`.
        """
        e = self.experiment
        if e is None or not e.stop_worse or self.state != "running":
            return
        figures = {name: arm.sample.figures for name, arm in self._arms.items()}
        others = [name for name in figures if name != e.control]
        # Bonferroni: divide by the number of tests, in all stages.
        alpha = e.alpha / (len(e.stop_worse) * len(others) * max(1, len(e.stages)))
        unjudged = []
        for name in others:
            for figure in e.stop_worse:
                metric, _, quantile = figure.partition(".")
                arm, control = figures[name][metric], figures[e.control][metric]
                is_share = metric in (*SHARES, *LABEL_SHARES)
                if is_share and not (self._arms[name].has_few_open and self._arms[e.control].has_few_open):
                    unjudged.append(figure)
                    continue
                if is_share:
                    d = share_difference(arm, control, (e.shares[name], e.shares[e.control]), alpha)
                elif quantile:
                    d = quantile_difference(arm, control, QUANTILES[quantile], alpha)
                else:
                    d = mean_difference(arm, control, alpha, adjust=e.covariate != "none")
                if d is not None and _is_worse(d, alpha):
                    log.warning("event=experiment_stopped name=%s arm=%s figure=%s", e.name, name, figure)
                    self._stop_report = {
                        "arm": name,
                        "figure": figure,
                        "at": _rfc3339_text(self._clock.wall_ns()),
                        **_difference_document(d, METRICS.get(metric, 1)),
                    }
                    self.switch(False, "stop_worse")
                    return
                units = min(arm.units, control.units)
                if units < FIRST_LOOK or d is None or (d.p is None and d.anytime is None):
                    unjudged.append(figure)
        self._unjudged_figures = unjudged

    def results(self) -> Callable[[], dict[str, object]]:
        """Return a thread-safe function that makes the public JSON of `/api/v1/experiment`."""
        e = self.experiment
        if e is None:
            return lambda: {"state": "none"}
        about: dict[str, object] = {
            "name": e.name,
            "state": self.state,
            "enabled": self._is_on,
            "switched_by": self._switched_by,
            "figures": self._arrivals_document(),
            "since": _rfc3339_text(self._switch_ns),
            "until": _rfc3339_text(e.until_wall_ns),
            "unit": e.unit,
            "aa": e.aa,
            "control": e.control,
            "key_fingerprint": e.key_fingerprint,
            "alpha": e.alpha,
            "covariate": e.covariate,
            "stop_worse": e.stop_worse,
            "strip_headers": e.strip_headers,
            "stopped": self._stop_report,
            "stage": self._stage_document(e),
        }
        arms = {name: arm.copy() for name, arm in self._arms.items()}
        ratio_p = self._sample_ratio_p if self._shares_known else None
        capped = self._has_reached_units_max
        return lambda: {**about, **_experiment_result(e, arms, ratio_p, capped)}

    def _arrivals_document(self) -> dict[str, object]:
        first_ns, last_ns = self._figures_wall_ns or (None, None)
        return {"from": _rfc3339_text(first_ns), "to": _rfc3339_text(last_ns)}

    @property
    def _has_reached_units_max(self) -> bool:
        return self._known_units is not None and len(self._known_units) >= UNITS_MAX

    def _stage_document(self, e: Experiment) -> dict[str, object] | None:
        if not e.stages:
            return None
        arm = next(name for name in self._arms if name != e.control)
        share, n, since = e.stages[self._stage_index], len(e.stages), _rfc3339_text(self._stage_wall_ns)
        sentence = f"Stage {self._stage_index + 1} of {n}: {arm} gets {100 * share:.4g} % of the units"
        if self.state != "running":
            sentence += ", but the experiment does not run now."
        elif self._stage_index + 1 == n:
            sentence += f" since {since}."
        else:
            sentence += f" since {since}. {self._next_stage_text(e)}"
        return {
            "number": self._stage_index + 1,
            "of": n,
            "share": share,
            "since": since,
            "sentence": sentence,
            "between_stages": self._left_out_requests,
            "earlier": list(self._earlier_stages),
        }

    def _next_stage_text(self, e: Experiment) -> str:
        following = f"The next stage ({100 * e.stages[self._stage_index + 1]:.4g} %)"
        if self._sample_ratio_p <= RATIO_ALPHA:
            return f"{following} does not begin, because the units are not split as configured."
        left_ns = e.stage_time - (self._clock.mono_ns() - self._stage_mono_ns)
        text = f"{following} begins if no arm is worse"
        if left_ns > 0:
            text += f", at {_rfc3339_text(self._clock.wall_ns() + left_ns)} or later"
        if self._unjudged_figures:
            text += (
                f". These figures cannot be judged yet: {', '.join(self._unjudged_figures)} (each needs"
                f" {FIRST_LOOK} units in each arm; a high percentile needs more; a share needs at most"
                f" {OPEN_SHARE_MAX:.0%} open requests)"
            )
        return f"{text}."


def _metric_values(x: Exchange, m: Measured) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield each metric that an exchange has, with its values."""
    if m.e2e_ns is not None and x.outcome in ENDED_WELL:
        yield "e2e", (m.e2e_ns,)
    if x.tokens.output is not None:
        yield "output_tokens", (x.tokens.output,)
    if not x.stream or x.reading is Reading.INFERRED:
        return
    for metric, value in zip(_SINGLE_VALUE_METRICS, _single_values(m), strict=True):
        if value is not None:
            yield metric.name, (round(value),)
    yield "tbc", m.tbc_ns
    yield "itl", m.itl_even_ns or ()
    yield "tokens_per_chunk", m.tokens_per_chunk or ()


def _experiment_result(
    e: Experiment, arms: dict[str, _Arm], ratio_p: float | None, capped: bool
) -> dict[str, object]:
    """Return the comparison of the arms as public JSON. `ratio_p`: p-value of the sample ratio, or None."""
    control = arms[e.control]
    others = {name: arm for name, arm in arms.items() if name != e.control}
    # Compare the shares of labelled requests only if there are any. This choice does not bias the comparison,
    # because clients set labels independently of the arm.
    labelled = any(arm.figures[share].n for arm in arms.values() for share in LABEL_SHARES)
    shares = (*SHARES, *LABEL_SHARES) if labelled else SHARES
    compared = [name for name in TITLES if name in METRICS or name in shares]
    comparisons = len(others) * len(compared)
    # Without the split of the units, shares have no p, so no share becomes a finding.
    splits = {
        name: None
        if ratio_p is None or not (arm.has_few_open and control.has_few_open)
        else (e.shares[name], e.shares[e.control])
        for name, arm in others.items()
    }
    differences = {
        name: _differences_document(e, arm, control, shares, splits[name]) for name, arm in others.items()
    }
    cautions = list(_cautions(e.control, arms))
    misleading = {(one["arm"], metric) for one in cautions for metric in BURST_SENSITIVE}
    findings: list[dict[str, object]] = []
    for arm_name, by_metric in differences.items():
        for metric, statistics in by_metric.items():
            if (arm_name, metric) in misleading:
                continue
            for difference in statistics.values():
                p = difference.get("p")
                if isinstance(p, float) and p <= e.alpha / comparisons:
                    findings.append({"arm": arm_name, "metric": metric, "p": p})
    units = {name: arm.units for name, arm in arms.items()}
    if ratio_p is not None:
        ratio_p = min(ratio_p, _sample_ratio_p(units, e.shares))
    return {
        "arms": {arm.name: _arm_json(e, arm.weight, arm.changes, arms[arm.name], shares) for arm in e.arms},
        "differences": differences,
        "compared": [{"name": name, "title": TITLES[name]} for name in compared],
        "units_needed": FIRST_LOOK,
        # Number of tests, by which alpha is divided (Bonferroni): of many p-values, some are small by chance.
        "comparisons": comparisons,
        "findings": findings,
        "cautions": cautions,
        "warnings": list(_warnings(e, arms)),
        "sample_ratio": {
            "units": units,
            "expected": None if ratio_p is None else e.shares,
            "p": ratio_p,
            "alpha": RATIO_ALPHA,
            "alarm": ratio_p is not None and ratio_p <= RATIO_ALPHA,
            "capped": capped,
        },
        "disclosure": {
            **e.disclosure,
            "requests_refused": sum(sum(arm.refusals.values()) for arm in arms.values()),
        },
    }


def _cautions(control: str, arms: Mapping[str, _Arm]) -> Iterator[dict[str, object]]:
    """Yield a caution for each arm whose chunks come in bursts, which distort the metrics BURST_SENSITIVE."""
    usual = _events_per_read(arms[control])
    for name, arm in arms.items():
        n = _events_per_read(arm)
        if arrives_in_bursts(n, usual):
            yield {
                "arm": name,
                "metrics": BURST_SENSITIVE,
                "events_per_read": n,
                "control_events_per_read": usual,
            }


def _warnings(e: Experiment, arms: Mapping[str, _Arm]) -> Iterator[str]:
    """Yield a sentence for each arm with requests that were not sent as the arm is configured, and for each
    with many open requests."""
    for name, arm in arms.items():
        if not arm.has_few_open and arm.outcomes.total() >= FIRST_LOOK:
            yield (
                f"{name}: {arm.open_requests:,} requests are open, and {arm.outcomes.total():,} have ended."
                " Refused and failed requests end early, so shares are not judged while more than"
                f" {OPEN_SHARE_MAX:.0%} are open."
            )
        if arm.own_headers and not e.strip_headers:
            own = {header for one in e.arms if one.name == name for header in one.headers}
            fields = sorted({header for one in e.arms for header in one.headers} - own)
            sent = " or ".join(fields) or "a header field of another arm"
            yield (
                f"{name}: the clients of {arm.own_headers:,} of {arm.assigned_requests:,} requests"
                f" sent {sent} themselves, so this arm is not clean, and differences are too small. Hint:"
                " experiment.strip_headers = true removes it."
            )
        unchanged = arm.exclusions - Counter({NO_ROOM: arm.exclusions[NO_ROOM]})
        if unchanged:
            reasons = ", ".join(f"{reason} {n:,}" for reason, n in sorted(unchanged.items()))
            yield (
                f"{name}: {unchanged.total():,} of {arm.outcomes.total():,} requests were forwarded without"
                f" the arm's change ({reasons}). They stay in the arm's figures, because leaving them out"
                " would make the arms differ, so differences are too small."
            )


def _events_per_read(arm: _Arm) -> float | None:
    c = arm.chunking
    return c["events"] / c["reads"] if c.get("reads") else None


def _arm_json(
    e: Experiment, weight: float, changes: dict[str, object], arm: _Arm, shares: Sequence[str]
) -> dict[str, object]:
    c = arm.chunking
    sized = c.get("sized_chunks", 0)
    metrics: dict[str, object] = {}
    for metric, scale in METRICS.items():
        figure = arm.figures[metric]
        h = figure.histogram
        percentiles = dict(zip(QUANTILES, h.percentiles(tuple(QUANTILES.values())), strict=True))
        intervals = {q: quantile_interval(figure, share, e.alpha) for q, share in QUANTILES.items()}
        metrics[metric] = {
            "n": figure.n,
            "units": figure.units,
            "mean": _scaled_value(h.mean, scale),
            **{q: _scaled_value(value, scale) for q, value in percentiles.items()},
            "intervals": {
                "mean": _scaled_interval(mean_interval(figure, e.alpha), scale),
                **{q: _scaled_interval(interval, scale) for q, interval in intervals.items()},
            },
            "marks": marks(figure.n) if figure.n else [],
        }
    errors = {name: share_interval(arm.figures[name], LABEL_ALPHA) for name in LABEL_SHARES}
    return {
        "weight": weight,
        "changes": {} if e.aa else changes,
        "assigned": arm.assigned_requests,
        "units": arm.units,
        "own_headers": arm.own_headers,
        "single_requests": arm.single_requests,
        "units_forgotten": arm.forgotten_units,
        "ended": sum(arm.outcomes.values()),
        "outcomes": arm.outcomes,
        "excluded": arm.exclusions,
        "metrics": metrics,
        "shares": {
            s: {
                "n": arm.figures[s].n,
                "share": arm.figures[s].mean,
                "interval": share_interval(arm.figures[s], e.alpha),
            }
            for s in shares
        },
        "refusals": arm.refusals,
        "labels": labels_document(arm.labels, errors),
        "chunking": {
            **{name: c.get(name, 0) for name in ("events", "output_events", "reads")},
            "events_per_read": _events_per_read(arm),
            "tokens_per_chunk_mean": arm.figures["tokens_per_chunk"].mean,
            "single_token_share": c["single_token_chunks"] / sized if sized else None,
        },
        "uncertainty": arm.uncertainty_ns / NS_PER_S if arm.outcomes else None,
    }


def _differences_document(
    e: Experiment, arm: _Arm, control: _Arm, shares: Sequence[str], weights: tuple[float, float] | None
) -> dict[str, dict[str, dict[str, object]]]:
    out: dict[str, dict[str, dict[str, object]]] = {}
    for metric, scale in METRICS.items():
        mine, theirs = arm.figures[metric], control.figures[metric]
        differences = {"mean": mean_difference(mine, theirs, e.alpha, adjust=e.covariate != "none")}
        for q, share in QUANTILES.items():
            differences[q] = quantile_difference(mine, theirs, share, e.alpha)
        out[metric] = {
            what: _difference_document(d, scale) for what, d in differences.items() if d is not None
        }
    for s in shares:
        d = share_difference(arm.figures[s], control.figures[s], weights, e.alpha)
        out[s] = {} if d is None else {"share": _difference_document(d, 1)}
    return out


def _difference_document(d: Difference, scale: float) -> dict[str, object]:
    anytime = _scaled_interval(d.anytime, scale)
    out: dict[str, object] = {
        "difference": d.estimate / scale,
        "interval": _scaled_interval(d.interval, scale),
        "anytime_interval": anytime,
        "different": None if anytime is None else not anytime[0] <= 0 <= anytime[1],
    }
    if d.p is not None:
        out["p"] = d.p
    if d.unadjusted is not None:
        out |= {"unadjusted_difference": d.unadjusted / scale, "variance_left": d.variance_left}
    return out


def _is_worse(d: Difference, alpha: float) -> bool:
    """Return whether the arm's value is higher, so worse. Probability of any false result: at most alpha."""
    if d.p is not None:
        return d.p <= alpha and d.estimate > 0
    return d.anytime is not None and d.anytime[0] > 0


def _sample_ratio_p(units: Mapping[str, int], shares: Mapping[str, float]) -> float:
    return anytime_p(multinomial_e_log(list(units.values()), [shares[name] for name in units]))


def _scaled_value(value: float | None, scale: float) -> float | None:
    return None if value is None else value / scale


def _scaled_interval(interval: Interval | None, scale: float) -> Interval | None:
    return None if interval is None else (interval[0] / scale, interval[1] / scale)


def _rfc3339_text(wall_ns: int | None) -> str | None:
    if wall_ns is None:
        return None
    return datetime.fromtimestamp(wall_ns / NS_PER_S, UTC).isoformat().replace("+00:00", "Z")
