"""Step changes of TTFT: a lasting rise compared with the last 7 days at the same load and prompt length.

`StepDetector` takes the TTFT of each stream of one model and judges whether it has risen.

- **Residual.** A block is a period of at least BLOCK_NS with at least STREAMS_MIN streams. Its residual is
  the mean of log(TTFT) minus the mean of the last 7 days in the same cells. A cell is a prompt length (within
  a factor of 1.41) at a load (within 1.19). The load is the number of input tokens per second in the last
  minute, since the number of running streams would grow with a slow server. A residual is limited to CLIP.
- **Level.** The exponentially weighted mean of the residuals of the last LEVEL_NS, limited to -k and k. It is
  subtracted, so that a difference from earlier days that has lasted for hours is not part of a step.
- **Test.** Page's CUSUM: S = max(0, S + (residual - level - k) t), where t is the length of the block in
  UNIT_NS. A step began when S was 0 for the last time. k is half of log(RISE), so a rise below the square
  root of RISE is not reported.
- **Threshold.** Without a step, S is modelled as a Brownian motion with drift -k and the long-run variance of
  the residuals. This variance is measured with means over BATCH_NS, to include autocorrelation. For changes
  that are slower than this, k is reduced by two of their standard deviations. The threshold gives a mean time
  between false alarms of FALSE_ALARM_DAYS. It is also above the maximum of S in the last 7 days, times
  PEAK_FACTOR, because the maximum has an exponential tail for any distribution of the residuals.
- **End.** The same test, for a fall. After ACCEPTED_NS, a step is the new normal, and a new history begins.

Source: Page 1954, "Continuous inspection schemes"; Siegmund 1985, "Sequential analysis", for the mean time
between false alarms; Johnson and Bagshaw 1974, "The effect of serial correlation on the performance of CUSUM
tests".
"""

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from math import exp, log, log2, sqrt
from typing import TYPE_CHECKING, Final

from msgspec import Struct, msgpack

from llmtap.units import NS_PER_S

RISE: Final = 1.5
"""Ratio of TTFT after a step to TTFT before it for which the test is tuned: it finds this rise fastest."""
FALSE_ALARM_DAYS: Final = 100
"""Mean time between false alarms of one model, in days."""
DAY_NS: Final = 86_400 * NS_PER_S
DAYS: Final = 7
"""Number of complete days in the history, with which new streams are compared."""
HISTORY_NS_MIN: Final = DAY_NS
"""Minimum length of the history to judge TTFT; before, the state is `learning`."""
BATCHES_MIN: Final = 72
"""Minimum number of batches (half a day) to estimate the noise; before, TTFT is not judged."""
STREAMS_MIN: Final = 30
"""Minimum number of streams in a block, so that the mean of their log(TTFT) is nearly normal."""
BLOCK_NS: Final = 10 * NS_PER_S
BLOCK_NS_MAX: Final = 300 * NS_PER_S
"""Maximum length of a block. A model with fewer than STREAMS_MIN streams in this time is not judged."""
CELLS_MAX: Final = 512
"""Maximum number of cells of a model: 8 KiB a day. Streams in further cells are not judged."""
CELL_STREAMS_MIN: Final = 100
"""Minimum number of streams in a cell, so that its mean is exact enough to compare new streams with it."""
ACCEPTED_NS: Final = DAY_NS
"""Duration of a step after which its level is the new normal."""
UNIT_NS: Final = 30 * NS_PER_S
"""Unit of time of the statistic S (see the module docstring)."""
LEVEL_NS: Final = 7_200 * NS_PER_S
BATCH_NS: Final = 600 * NS_PER_S
"""Length of a batch, over which residuals are averaged: within it, they can depend on each other."""
CLIP: Final = log(2)
"""Limit of the magnitude of a residual: a larger residual counts as this value."""
THRESHOLD_MIN: Final = 0.6
"""Minimum of the threshold: below it, a TTFT that is doubled for 30 s would be a step."""
PEAK_FACTOR: Final = 1.6
"""Expected maximum of S in 100 days / expected maximum in 1 day: log(N in 100 days) / log(N in 1 day), where
N is the number of periods of UNIT_NS."""
LASTING_NS: Final = 90 * NS_PER_S
"""Minimum duration of a rise that is reported: a short spike is not a step."""
BLOCK_SHARE: Final = 0.9
"""Maximum that a block adds to S, as a share of the threshold: a spike in one long block is not a step."""
_K: Final = log(RISE) / 2
"""Allowance k of the CUSUM test: half of the logarithm of RISE."""
_LOAD_NS: Final = 60 * NS_PER_S
"""Period over which the load (input tokens per second) is measured."""
_SHORT_PROMPT: Final = 256
"""Maximum number of tokens of short prompts, which share one cell: their length hardly affects TTFT."""
_BYTES_PER_TOKEN: Final = 4
"""Number of bytes of a request body that count as a token if the server does not report the input tokens."""
_VARIANCE_MIN: Final = 1e-6
"""Minimum of the variance: with a variance of 0, the smallest change would be a step."""
_Z: Final = 1.96
"""Quantile of the normal distribution for the 95 % interval of a step's ratio."""
if TYPE_CHECKING:
    _Cells = array[float]
else:  # Python 3.11 has no array[float] at run time.
    _Cells = array
_Part = list[float]
"""Sums over the streams of one prompt length in a block: their number, log(TTFT), and log(TTFT)^2."""


class StepState(StrEnum):
    """State of a model's `StepDetector`: whether it can judge TTFT, and its result."""

    LEARNING = "learning"
    """The history is too short to judge TTFT."""
    FEW = "few"
    """The model has too few streams to judge TTFT."""
    NEW_LOAD = "new_load"
    """The history has too few streams at this load and prompt length."""
    STEADY = "steady"
    """TTFT is as usual."""
    STEP = "step"
    """TTFT has risen, and the step has not ended."""


@dataclass(slots=True)
class StepChange:
    """A step change of TTFT, with sums over the blocks since it began; they grow until the step ends."""

    since_ns: int
    """Start of the step."""
    found_ns: int
    """Time at which the test reported the step."""
    until_ns: int | None = None
    """End of the step; None: it has not ended."""
    history_ns: int = 0
    """Length of the history before the step."""
    n: int = 0
    """Number of streams in the blocks."""
    length_ns: int = 0
    """Total length of the blocks."""
    log_ratio_sum: float = 0.0
    """Sum of log(TTFT / TTFT before the step) over the streams; `log_ttft_sum`: sum of log(TTFT)."""
    log_ttft_sum: float = 0.0
    """Sum of the logarithms of TTFT."""
    variance: float = 0.0
    """Long-run variance of a residual, per UNIT_NS."""
    slow_variance: float = 0.0
    """Variance of changes that are slower than a batch (`Noise.slow`)."""

    def add(self, other: "StepChange") -> None:
        self.n += other.n
        self.length_ns += other.length_ns
        self.log_ratio_sum += other.log_ratio_sum
        self.log_ttft_sum += other.log_ttft_sum

    def shift(self, by_ns: int) -> None:
        """Add `by_ns` to all times, to convert them to another meter's clock."""
        self.since_ns += by_ns
        self.found_ns += by_ns
        if self.until_ns is not None:
            self.until_ns += by_ns

    @property
    def ratio(self) -> float:
        """Geometric mean of TTFT since the step / `baseline_ns`."""
        return exp(self.log_ratio_sum / self.n)

    @property
    def ttft_ns(self) -> float:
        """Geometric mean of TTFT since the step."""
        return exp(self.log_ttft_sum / self.n)

    @property
    def baseline_ns(self) -> float:
        """Geometric mean of TTFT before the step, at the same loads and prompt lengths (cells)."""
        return self.ttft_ns / self.ratio

    def ratio_interval(self) -> tuple[float, float]:
        """Return the 95 % interval of `ratio`; autocorrelation and slow changes make it wider."""
        reach = _Z * sqrt(self.variance * UNIT_NS / self.length_ns + self.slow_variance)
        return self.ratio * exp(-reach), self.ratio * exp(reach)


@dataclass(slots=True)
class _Day:
    """Sums of one day of the history."""

    cells: _Cells = field(default_factory=lambda: array("d", bytes(16 * CELLS_MAX)))
    """Two entries for each cell: the number of its streams, and the sum of their log(TTFT)."""
    n: int = 0
    """Number of streams that were compared with the mean of their cell."""
    squares: float = 0.0
    """Sum of the squared differences of these streams from the means of their cells."""
    batches: int = 0
    """Number of batches in the next two sums."""
    excess: float = 0.0
    """Sum over the batches of the squared mean residual, after subtraction of the level."""
    inverses: float = 0.0
    """Sum over the batches of 1 / (number of streams)."""
    pairs: int = 0
    """Number of pairs of consecutive batches in the next sum."""
    changes: float = 0.0
    """Sum, over these pairs, of (difference of the two mean residuals)^2 / 2."""
    peak: float = 0.0
    """Maximum of S (see the module docstring) on this day, outside of steps."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Variances of the residuals of a model."""

    stream: float
    """Variance of log(TTFT) of one stream about the mean of its cell."""
    batch: float
    """Variance between consecutive batches, without the part that the variance of their streams explains."""
    slow: float
    """Variance of changes that are slower than a batch, and to which the level does not adapt."""

    @classmethod
    def of(cls, days: Iterable[_Day]) -> "Noise | None":
        """Estimate the noise from these days. Return None if they have fewer than BATCHES_MIN batches."""
        days = list(days)
        batches, pairs = sum(day.batches for day in days), sum(day.pairs for day in days)
        if batches < BATCHES_MIN or not pairs:
            return None
        stream = sum(day.squares for day in days) / sum(day.n for day in days)
        sampling = stream * sum(day.inverses for day in days) / batches
        total = max(0.0, sum(day.excess for day in days) / batches - sampling)
        batch = min(total, max(0.0, sum(day.changes for day in days) / pairs - sampling))
        return cls(stream, batch, total - batch)

    def long_run(self, streams_per_ns: float) -> float:
        """Return the long-run variance of a residual, per UNIT_NS."""
        variance = self.batch + self.stream / (streams_per_ns * BATCH_NS)
        return max(_VARIANCE_MIN, BATCH_NS / UNIT_NS * variance)

    def threshold(self, streams_per_ns: float) -> float:
        """Return the value h of S that chance exceeds once in FALSE_ALARM_DAYS on average.

        A Brownian motion with drift -k and variance v per unit of time reaches h after v (e^x - 1 - x) / (2
        k^2) units on average, where x = 2 k h / v (Siegmund 1985). The equation for x is solved by iteration.
        """
        variance = self.long_run(streams_per_ns)
        k = max(_K / 4, _K - 2 * sqrt(self.slow))
        exp_x_minus_x = 1 + 2 * k * k / variance * FALSE_ALARM_DAYS * DAY_NS / UNIT_NS
        x = 1.0
        for _ in range(20):
            x = log(exp_x_minus_x + x)
        return max(THRESHOLD_MIN, x * variance / (2 * k))


class SavedDetector(Struct, array_like=True):
    """State of a `StepDetector`, to continue it in another meter."""

    step: StepChange | None
    """Latest step; None: none was found yet."""
    start_ns: int
    """Start of the history; `day_ns`: start of its newest day."""
    day_ns: int
    """Start of the present day."""
    days: list[_Day]
    places: list[tuple[int, int, int]]
    """For each cell: its prompt length, its load, and its index in `_Day.cells`."""
    level: float
    """Current level of the logarithm of TTFT, compared with the history."""
    reference: float
    """Level at the time when S was 0 for the last time; `level`: current level."""
    sum: float
    """Statistic S of the CUSUM test (see the module docstring)."""
    candidate: StepChange
    """Step that is not certain yet."""
    state: StepState
    block_ns: int
    """Start of the open block."""
    parts: dict[int, _Part]
    """Sums over the streams of the open block, by prompt length."""
    tokens: float
    """Number of input tokens in the open block."""
    age_ns: int
    """Sum of the times from first token to end, over the streams of the open block."""


# Omit the zeros at the end of the cells: cells get their indexes in ascending order, so the last are unused.
pack_detectors: Final = msgpack.Encoder(enc_hook=lambda cells: cells.tobytes().rstrip(b"\0")).encode
unpack_detectors: Final = msgpack.Decoder(
    dict[str, SavedDetector], dec_hook=lambda _, packed: array("d", packed.ljust(16 * CELLS_MAX, b"\0"))
).decode


class StepDetector:
    """History and test of one model. Memory: at most 200 KiB."""

    def __init__(self, now_ns: int) -> None:
        self.step: StepChange | None = None
        """The latest step; it has not ended if its `until_ns` is None."""
        self._begin_history(now_ns)

    def _begin_history(self, now_ns: int) -> None:
        self.start_ns = self._day_ns = now_ns
        self._days = deque([_Day()], maxlen=DAYS + 1)
        self._cell_indexes: dict[tuple[int, int], int] = {}
        """Index of each cell in `_Day.cells`, by prompt length and load; `_free_indexes`: unused indexes."""
        self._free_indexes = list(reversed(range(CELLS_MAX)))
        self._recent_blocks: deque[tuple[int, float]] = deque()
        """Length in ns and number of input tokens of each recent block, to compute the load."""
        self._batch: tuple[float, int, int] = (0.0, 0, 0)
        """Sum of residuals over streams, number of streams, and length in ns of the open batch."""
        self._previous_batch_mean: float | None = None
        self._level = self._reference = 0.0
        """`_level`: current level. `_reference`: level at the time when S was 0 for the last time; residuals
        are compared with it, so that a step does not raise its own reference."""
        self._sum = self._peak = 0.0
        """`_sum`: the statistic S of the test. `_peak`: the maximum of S since S was 0."""
        self._candidate = StepChange(now_ns, now_ns)
        """Sums over the blocks since S was 0, which become the step if S exceeds the threshold."""
        self._state = StepState.LEARNING
        self._open_block(now_ns)

    def _open_block(self, now_ns: int) -> None:
        """Begin a block: streams that are tested together."""
        self._block_ns = now_ns
        self._parts: dict[int, _Part] = {}
        self._block_streams = 0
        self._block_tokens = 0.0
        self._block_age_ns = 0

    def add(
        self, now_ns: int, ttft_ns: int, input_tokens: int | None, request_bytes: int, age_ns: int = 0
    ) -> None:
        """Count a stream that ended now. `age_ns`: time since its first token."""
        if now_ns - self._block_ns >= BLOCK_NS:
            self._close_block(now_ns)
        tokens: float
        if input_tokens is None:
            tokens = request_bytes / _BYTES_PER_TOKEN
            length = -int(2 * log2(max(tokens, _SHORT_PROMPT)))
        else:
            tokens = input_tokens
            length = int(2 * log2(max(tokens, _SHORT_PROMPT)))
        value = log(max(1, ttft_ns))
        part = self._parts.get(length)
        if part is None:
            part = self._parts[length] = [0, 0.0, 0.0]
        part[0] += 1
        part[1] += value
        part[2] += value * value
        self._block_streams += 1
        self._block_tokens += tokens
        self._block_age_ns += age_ns

    def export(self) -> SavedDetector:
        """Return the state for another meter. It shares data with this object, so encode it at once."""
        places = [(*cell, place) for cell, place in self._cell_indexes.items()]
        return SavedDetector(
            self.step,
            self.start_ns,
            self._day_ns,
            list(self._days),
            places,
            self._level,
            self._reference,
            self._sum,
            self._candidate,
            self._state,
            self._block_ns,
            self._parts,
            self._block_tokens,
            self._block_age_ns,
        )

    def absorb(self, saved: SavedDetector, shift_ns: int) -> None:
        """Add the state of another meter: if its history is longer, use its history, else add its open block.

        `shift_ns`: monotonic time of this meter minus that of the other meter.
        """
        if saved.start_ns + shift_ns < self.start_ns:
            self._replace_history(saved, shift_ns)
            return
        for length, sums in saved.parts.items():
            part = self._parts.setdefault(length, [0, 0.0, 0.0])
            part[:] = [a + b for a, b in zip(part, sums, strict=True)]
            self._block_streams += int(sums[0])
        self._block_tokens += saved.tokens
        self._block_age_ns += saved.age_ns

    def _replace_history(self, saved: SavedDetector, shift_ns: int) -> None:
        """Replace all state except the open block and batch by the other meter's."""
        for step in (saved.step, saved.candidate):
            if step is not None:
                step.shift(shift_ns)
        self.step, self._candidate, self._state = saved.step, saved.candidate, saved.state
        self.start_ns, self._day_ns = saved.start_ns + shift_ns, saved.day_ns + shift_ns
        self._days = deque(saved.days, maxlen=DAYS + 1)
        self._cell_indexes = {(length, load): place for length, load, place in saved.places}
        self._free_indexes = sorted(set(range(CELLS_MAX)) - set(self._cell_indexes.values()), reverse=True)
        self._level, self._reference = saved.level, saved.reference
        is_late = self._block_ns - saved.block_ns - shift_ns > BLOCK_NS_MAX
        self._sum = self._peak = 0.0 if is_late else saved.sum

    def state(self, now_ns: int) -> StepState:
        """Return the state. A step that has lasted for ACCEPTED_NS is ended first."""
        self._end_long_step(now_ns)
        if self._state is not StepState.LEARNING and now_ns - self._block_ns > BLOCK_NS_MAX:
            return StepState.FEW
        return self._state

    def step_at(self, now_ns: int) -> StepChange | None:
        """Return the latest step. A step that has lasted for ACCEPTED_NS is ended first."""
        self._end_long_step(now_ns)
        return self.step

    def judged_step(self, now_ns: int) -> StepChange | None:
        """Return the step that has not ended; None if there is none, or too few streams to judge it."""
        return None if self.state(now_ns) is StepState.FEW else self.open_step

    def history_ns(self, now_ns: int) -> int:
        return min(now_ns - self.start_ns, DAYS * DAY_NS)

    @property
    def open_step(self) -> StepChange | None:
        step = self.step
        return step if step is not None and step.until_ns is None else None

    def _end_long_step(self, now_ns: int) -> None:
        """End a step that has lasted for ACCEPTED_NS: its level is the normal one from now on."""
        step = self.open_step
        if step is not None and now_ns - step.since_ns >= ACCEPTED_NS:
            step.until_ns = now_ns
            self._begin_history(now_ns)

    def _close_block(self, now_ns: int) -> None:
        """Judge the block and open the next one, unless the block needs more streams."""
        length_ns = now_ns - self._block_ns
        if length_ns > BLOCK_NS_MAX:
            self._recent_blocks.clear()
            self._sum = 0.0
            if self._state is not StepState.LEARNING:
                self._state = StepState.FEW
        elif self._block_streams < STREAMS_MIN:
            return
        else:
            self._judge_block(now_ns, length_ns)
        self._end_long_step(now_ns)
        self._open_block(now_ns)
        if now_ns - self._day_ns >= DAY_NS:
            self._begin_day(now_ns)

    def _begin_day(self, now_ns: int) -> None:
        """Begin a new day of the history, and forget the oldest one."""
        days = (now_ns - self._day_ns) // DAY_NS
        self._day_ns += days * DAY_NS
        self._days.extend(_Day() for _ in range(min(days, DAYS + 1)))
        for cell, place in list(self._cell_indexes.items()):
            if not any(day.cells[2 * place] for day in self._days):
                del self._cell_indexes[cell]
                self._free_indexes.append(place)

    def _judge_block(self, now_ns: int, length_ns: int) -> None:
        squares, block = self._compare_with_history(length_ns)
        if block.n < max(STREAMS_MIN, self._block_streams) / 2:
            if self._state is not StepState.LEARNING:
                self._state = StepState.NEW_LOAD
            return
        residual = max(-CLIP, min(CLIP, block.log_ratio_sum / block.n))
        centred = residual - self._reference
        block.log_ratio_sum -= block.n * self._reference
        if self.open_step is None:
            self._add_to_noise(centred, squares, block)
            weight = length_ns / LEVEL_NS
            self._level = max(-_K, min(_K, self._level + weight * (residual - self._level)))
        self._update_test(now_ns, centred, block)

    def _compare_with_history(self, length_ns: int) -> tuple[float, StepChange]:
        """Compare the streams of the block with the history of their cells, then add them to the history.

        Return the sum of squared differences, and the other sums, over the streams whose cells have a
        history. During a step, the streams are not added.
        """
        self._recent_blocks.append((length_ns, self._block_tokens))
        span_ns = sum(ns for ns, _ in self._recent_blocks)
        while span_ns - self._recent_blocks[0][0] >= _LOAD_NS:
            span_ns -= self._recent_blocks.popleft()[0]
        load = int(4 * log2(1 + sum(tokens for _, tokens in self._recent_blocks) * NS_PER_S / span_ns))
        since_ns = self._block_ns - self._block_age_ns // self._block_streams
        block = StepChange(since_ns, since_ns, length_ns=length_ns)
        squares, today, is_learning = 0.0, self._days[-1].cells, self.open_step is None
        for length, (n, total, total_squares) in self._parts.items():
            place = self._cell_indexes.get((length, load))
            if place is None:
                if is_learning and self._free_indexes:
                    place = self._cell_indexes[length, load] = self._free_indexes.pop()
                    today[2 * place], today[2 * place + 1] = n, total
                continue
            count = sum(day.cells[2 * place] for day in self._days)
            if count >= CELL_STREAMS_MIN:
                mean = sum(day.cells[2 * place + 1] for day in self._days) / count
                block.n += int(n)
                block.log_ratio_sum += total - n * mean
                block.log_ttft_sum += total
                squares += total_squares - 2 * mean * total + n * mean * mean
            if is_learning:
                today[2 * place] += n
                today[2 * place + 1] += total
        return squares, block

    def _add_to_noise(self, residual: float, squares: float, block: StepChange) -> None:
        """Add a block to the sums of the day, from which the noise is estimated."""
        today = self._days[-1]
        today.n += block.n
        today.squares += squares
        total, n, length_ns = self._batch
        total, n, length_ns = total + residual * block.n, n + block.n, length_ns + block.length_ns
        self._batch = total, n, length_ns
        if length_ns < BATCH_NS:
            return
        mean = total / n
        today.batches += 1
        today.excess += mean * mean
        today.inverses += 1 / n
        if self._previous_batch_mean is not None:
            today.pairs += 1
            today.changes += (mean - self._previous_batch_mean) ** 2 / 2
        self._previous_batch_mean, self._batch = mean, (0.0, 0, 0)

    def _update_test(self, now_ns: int, residual: float, block: StepChange) -> None:
        """Add a residual to the test for a step, and begin or end a step."""
        noise = Noise.of(self._days) if now_ns - self.start_ns >= HISTORY_NS_MIN else None
        if noise is None:
            self._state = StepState.LEARNING
            self._reference = self._level
            return
        step = self.open_step
        if self._sum == 0.0:
            self._peak = 0.0
            self._candidate = StepChange(block.since_ns, now_ns)
        self._candidate.add(block)
        if step is not None:
            step.add(block)
        streams_per_ns = block.n / block.length_ns
        threshold = self._threshold(noise, streams_per_ns)
        excess = (residual - _K if step is None else _K - residual) * block.length_ns / UNIT_NS
        self._sum = max(0.0, self._sum + min(excess, BLOCK_SHARE * threshold))
        self._peak = max(self._peak, self._sum)
        if self._sum == 0.0 and step is None:
            self._days[-1].peak = max(self._days[-1].peak, self._peak)
            self._reference = self._level
        if self._sum > threshold and excess > 0 and self._candidate.length_ns >= LASTING_NS:
            self._sum = 0.0
            if step is None:
                self._level = self._reference
                self.step = self._candidate
                self.step.found_ns = now_ns
                self.step.history_ns = self.history_ns(self.step.since_ns)
                self.step.variance = noise.long_run(streams_per_ns)
                self.step.slow_variance = noise.slow
            else:
                step.until_ns = self._candidate.since_ns
        self._state = StepState.STEADY if self.open_step is None else StepState.STEP

    def _threshold(self, noise: Noise, streams_per_ns: float) -> float:
        """Return the sum of the test above which a step is reported."""
        threshold = noise.threshold(streams_per_ns)
        if self.open_step is not None:
            return threshold
        return max(threshold, PEAK_FACTOR * max(day.peak for day in self._days))
