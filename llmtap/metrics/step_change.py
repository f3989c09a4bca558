"""Step changes of TTFT: a lasting rise compared with the last 7 days at the same load and prompt length.

`StepDetector` takes the TTFT of each stream of one model and judges whether it has risen.

- **Residual.** A block has at least STREAMS_MIN streams and BLOCK_NS. Its residual is the mean of log(TTFT)
  minus the mean of the last 7 days in the same cells. A cell is a prompt length (within a factor of 1.41) at
  a load (within 1.19). Load is input tokens per second of the last minute, and not the number of streams in
  flight, which a slow server raises by itself. A residual is limited to CLIP.
- **Level.** The mean of the residuals of the last LEVEL_NS, weighted exponentially, from -k to k. A step is
  a change in time, so that another level than on the days before is not part of it.
- **Test.** Page's CUSUM: S = max(0, S + (residual - level - k) t), where t is the length of the block in
  UNIT_NS. The step began where S was last 0. k is half of log(RISE): a rise below the root of RISE is not
  reported.
- **Threshold.** S is that of a Brownian motion with drift -k, whose variance is the long-run variance of the
  residuals: it is measured with means over BATCH_NS, so that autocorrelation counts. Slower changes reduce k
  by two of their standard deviations. The threshold gives a mean time between false alarms of
  FALSE_ALARM_DAYS. It is also above the maximum of S in the last 7 days, times PEAK_FACTOR, since the tail
  of the maximum is exponential whatever the residuals are.
- **End.** The same test downwards. After ACCEPTED_NS a step is the new normal, and the history begins again.

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
"""Ratio of a rise that the test finds fastest, for the given rate of false alarms."""
FALSE_ALARM_DAYS: Final = 100
"""Mean time between false alarms of one model, in days."""
DAY_NS: Final = 86_400 * NS_PER_S
DAYS: Final = 7
"""Number of complete days in the history."""
HISTORY_NS_MIN: Final = DAY_NS
BATCHES_MIN: Final = 72
"""Minimum number of batches to estimate the noise: half a day."""
STREAMS_MIN: Final = 30
"""Minimum number of streams of a block: the mean of 30 logarithms is nearly normal."""
BLOCK_NS: Final = 10 * NS_PER_S
BLOCK_NS_MAX: Final = 300 * NS_PER_S
"""Maximum length of a block. A model with fewer than STREAMS_MIN streams in this time is not judged."""
CELLS_MAX: Final = 512
"""Maximum number of cells of a model: 8 KiB a day. Streams in further cells are not judged."""
CELL_STREAMS_MIN: Final = 100
"""Number of streams in a cell from which the mean of the cell is used."""
ACCEPTED_NS: Final = DAY_NS
"""Length of a step from which its level is the new normal."""
UNIT_NS: Final = 30 * NS_PER_S
LEVEL_NS: Final = 7_200 * NS_PER_S
BATCH_NS: Final = 600 * NS_PER_S
"""Length of a batch: residuals within this time may depend on each other."""
CLIP: Final = log(2)
"""Limit of a residual; a larger one counts as this."""
THRESHOLD_MIN: Final = 0.6
"""Minimum of the threshold: with a lower one, a TTFT that is doubled for 30 s would be a step."""
PEAK_FACTOR: Final = 1.6
"""Maximum of S in 100 days, divided by the maximum in 1 day: log(N of 100 days) / log(N of 1 day), N in
UNIT_NS."""
LASTING_NS: Final = 90 * NS_PER_S
"""Shortest time after which a rise is reported, if it goes on: a short spike is not a step."""
BLOCK_SHARE: Final = 0.9
"""Share of the threshold that one block adds at most, so that a spike in a long block is not a step."""
_K: Final = log(RISE) / 2
_LOAD_NS: Final = 60 * NS_PER_S
_SHORT_PROMPT: Final = 256
"""Length of a prompt, in tokens, up to which all prompts are in one cell: they take less time than the other
parts of TTFT."""
_BYTES_PER_TOKEN: Final = 4
"""Bytes of a request body that count as a token where the server does not report the tokens."""
_VARIANCE_MIN: Final = 1e-6
"""Minimum of the variance, for servers whose TTFT does not vary at all."""
_Z: Final = 1.96
if TYPE_CHECKING:
    _Cells = array[float]
else:  # Python 3.11 has no array[float] at run time.
    _Cells = array
_Part = list[float]
"""Streams of one prompt length in a block: number, sum and sum of squares of log(TTFT)."""


class StepState(StrEnum):
    LEARNING = "learning"
    """The history is too short to judge TTFT."""
    FEW = "few"
    """Too few streams come to judge TTFT."""
    NEW_LOAD = "new_load"
    """The history has too few streams at this load and prompt length."""
    STEADY = "steady"
    STEP = "step"


@dataclass(slots=True)
class StepChange:
    """A step change of TTFT, with sums over its blocks, which grow until the step ends."""

    since_ns: int
    found_ns: int
    """Time at which the test reported the step."""
    until_ns: int | None = None
    history_ns: int = 0
    """Length of the history before the step."""
    n: int = 0
    length_ns: int = 0
    log_ratio_sum: float = 0.0
    log_ttft_sum: float = 0.0
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
        """Convert the times to a clock that is `by_ns` ahead."""
        self.since_ns += by_ns
        self.found_ns += by_ns
        if self.until_ns is not None:
            self.until_ns += by_ns

    @property
    def ratio(self) -> float:
        """Geometric mean of TTFT, divided by `baseline_ns`."""
        return exp(self.log_ratio_sum / self.n)

    @property
    def ttft_ns(self) -> float:
        """Geometric mean of TTFT since the step."""
        return exp(self.log_ttft_sum / self.n)

    @property
    def baseline_ns(self) -> float:
        """Geometric mean of TTFT of the history in the same cells, at the level before the step."""
        return self.ttft_ns / self.ratio

    def ratio_interval(self) -> tuple[float, float]:
        """Return the 95 % interval of `ratio`. It allows for autocorrelation and slower changes."""
        reach = _Z * sqrt(self.variance * UNIT_NS / self.length_ns + self.slow_variance)
        return self.ratio * exp(-reach), self.ratio * exp(reach)


@dataclass(slots=True)
class _Day:
    """Sums of one day of the history."""

    cells: _Cells = field(default_factory=lambda: array("d", bytes(16 * CELLS_MAX)))
    """Two numbers for each cell: number of streams, and sum of log(TTFT)."""
    n: int = 0
    squares: float = 0.0
    """Sum of the squared differences of `n` streams from the means of their cells."""
    batches: int = 0
    excess: float = 0.0
    """Sum of the squared means of the batches, after subtraction of the level."""
    inverses: float = 0.0
    """Sum of 1 / (number of streams) over the batches."""
    pairs: int = 0
    changes: float = 0.0
    """Sum over `pairs` of consecutive batches: squared difference of their means / 2."""
    peak: float = 0.0
    """Largest value of S (see the module) on this day, outside of steps."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Variances of the residuals of a model."""

    stream: float
    """Variance of log(TTFT) of one stream about the mean of its cell."""
    batch: float
    """Variance between consecutive batches, after subtraction of the part that their streams explain."""
    slow: float
    """Variance of changes that are slower than a batch and that the level does not follow."""

    @classmethod
    def of(cls, days: Iterable[_Day]) -> "Noise | None":
        """Estimate the noise from these days. Return None for fewer than BATCHES_MIN batches."""
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
        """Return the value of S that is exceeded by chance once in FALSE_ALARM_DAYS on average.

        A Brownian motion of drift -k and variance v per unit reaches h after v (e^x - 1 - x) / (2 k^2) units
        on average, with x = 2 k h / v (Siegmund 1985).
        """
        variance = self.long_run(streams_per_ns)
        k = max(_K / 4, _K - 2 * sqrt(self.slow))
        wanted = 1 + 2 * k * k / variance * FALSE_ALARM_DAYS * DAY_NS / UNIT_NS
        x = 1.0
        for _ in range(20):
            x = log(wanted + x)
        return max(THRESHOLD_MIN, x * variance / (2 * k))


class SavedDetector(Struct, array_like=True):
    """State of a detector for another meter."""

    step: StepChange | None
    start_ns: int
    day_ns: int
    days: list[_Day]
    places: list[tuple[int, int, int]]  # prompt length and load of a cell, and its index in `_Day.cells`
    level: float
    reference: float
    sum: float
    candidate: StepChange
    state: StepState
    block_ns: int
    parts: dict[int, _Part]
    tokens: float
    age_ns: int


# Omit the zeros at the end: cells get their indexes in ascending order.
pack_detectors: Final = msgpack.Encoder(enc_hook=lambda cells: cells.tobytes().rstrip(b"\0")).encode
unpack_detectors: Final = msgpack.Decoder(
    dict[str, SavedDetector], dec_hook=lambda _, packed: array("d", packed.ljust(16 * CELLS_MAX, b"\0"))
).decode


class StepDetector:
    """History and test of one model. Memory: at most 200 KiB."""

    def __init__(self, now_ns: int) -> None:
        self.step: StepChange | None = None
        """The latest step, which has not ended if `until_ns` is None."""
        self._begin(now_ns)

    def _begin(self, now_ns: int) -> None:
        """Begin a new history."""
        self.start_ns = self._day_ns = now_ns
        self._days = deque([_Day()], maxlen=DAYS + 1)
        self._index: dict[tuple[int, int], int] = {}
        self._free = list(reversed(range(CELLS_MAX)))
        self._recent: deque[tuple[int, float]] = deque()
        """Length in ns and number of tokens of each recent block, to compute the load."""
        self._batch: tuple[float, int, int] = (0.0, 0, 0)
        self._previous: float | None = None
        """Mean of the last batch."""
        self._level = self._reference = 0.0
        """The current level, and the level at the time when S was last 0. Residuals are compared with the
        second one, so that a step does not raise its own reference."""
        self._sum = self._peak = 0.0
        """The statistic S of the test, and its maximum since it was 0."""
        self._candidate = StepChange(now_ns, now_ns)
        """Sums over the blocks since S was 0, which become the step if S exceeds the threshold."""
        self._state = StepState.LEARNING
        self._open(now_ns)

    def _open(self, now_ns: int) -> None:
        self._block_ns = now_ns
        self._parts: dict[int, _Part] = {}
        self._n = 0
        self._tokens = 0.0
        self._age_ns = 0

    def add(
        self, now_ns: int, ttft_ns: int, input_tokens: int | None, request_bytes: int, age_ns: int = 0
    ) -> None:
        """Count a stream that ended now. `age_ns`: time since its first token."""
        if now_ns - self._block_ns >= BLOCK_NS:
            self._close(now_ns)
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
        self._n += 1
        self._tokens += tokens
        self._age_ns += age_ns

    def export(self) -> SavedDetector:
        """Return the state for another meter; it has objects of this detector, so pack it at once."""
        places = [(*cell, place) for cell, place in self._index.items()]
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
            self._tokens,
            self._age_ns,
        )

    def absorb(self, saved: SavedDetector, shift_ns: int) -> None:
        """Add the state of another meter: if its history is longer, replace ours, else add only its open
        block. `shift_ns`: our monotonic time minus the other's."""
        if saved.start_ns + shift_ns < self.start_ns:
            self._continue(saved, shift_ns)
            return
        for length, sums in saved.parts.items():
            part = self._parts.setdefault(length, [0, 0.0, 0.0])
            part[:] = [a + b for a, b in zip(part, sums, strict=True)]
            self._n += int(sums[0])
        self._tokens += saved.tokens
        self._age_ns += saved.age_ns

    def _continue(self, saved: SavedDetector, shift_ns: int) -> None:
        """Replace all but the open block; the other meter's incomplete block and batch are left out."""
        for step in (saved.step, saved.candidate):
            if step is not None:
                step.shift(shift_ns)
        self.step, self._candidate, self._state = saved.step, saved.candidate, saved.state
        self.start_ns, self._day_ns = saved.start_ns + shift_ns, saved.day_ns + shift_ns
        self._days = deque(saved.days, maxlen=DAYS + 1)
        self._index = {(length, load): place for length, load, place in saved.places}
        self._free = sorted(set(range(CELLS_MAX)) - set(self._index.values()), reverse=True)
        self._level, self._reference = saved.level, saved.reference
        is_late = self._block_ns - saved.block_ns - shift_ns > BLOCK_NS_MAX
        self._sum = self._peak = 0.0 if is_late else saved.sum

    def state(self, now_ns: int) -> StepState:
        """Return the state; a step that has lasted for ACCEPTED_NS ends here."""
        self._accept(now_ns)
        if self._state is not StepState.LEARNING and now_ns - self._block_ns > BLOCK_NS_MAX:
            return StepState.FEW
        return self._state

    def step_at(self, now_ns: int) -> StepChange | None:
        """Return the latest step; a step that has lasted for ACCEPTED_NS ends here."""
        self._accept(now_ns)
        return self.step

    def judged_step(self, now_ns: int) -> StepChange | None:
        """Return the step in progress; None if there is none, or if too few streams come to judge it."""
        return None if self.state(now_ns) is StepState.FEW else self.open_step

    def history_ns(self, now_ns: int) -> int:
        return min(now_ns - self.start_ns, DAYS * DAY_NS)

    @property
    def open_step(self) -> StepChange | None:
        step = self.step
        return step if step is not None and step.until_ns is None else None

    def _accept(self, now_ns: int) -> None:
        step = self.open_step
        if step is not None and now_ns - step.since_ns >= ACCEPTED_NS:
            step.until_ns = now_ns
            self._begin(now_ns)

    def _close(self, now_ns: int) -> None:
        """End the block if it is complete, and judge it."""
        length_ns = now_ns - self._block_ns
        if length_ns > BLOCK_NS_MAX:
            self._recent.clear()
            self._sum = 0.0
            if self._state is not StepState.LEARNING:
                self._state = StepState.FEW
        elif self._n < STREAMS_MIN:
            return
        else:
            self._judge(now_ns, length_ns)
        self._accept(now_ns)
        self._open(now_ns)
        if now_ns - self._day_ns >= DAY_NS:
            self._next_day(now_ns)

    def _next_day(self, now_ns: int) -> None:
        days = (now_ns - self._day_ns) // DAY_NS
        self._day_ns += days * DAY_NS
        self._days.extend(_Day() for _ in range(min(days, DAYS + 1)))
        for cell, place in list(self._index.items()):
            if not any(day.cells[2 * place] for day in self._days):
                del self._index[cell]
                self._free.append(place)

    def _judge(self, now_ns: int, length_ns: int) -> None:
        squares, block = self._compare(length_ns)
        if block.n < max(STREAMS_MIN, self._n) / 2:
            if self._state is not StepState.LEARNING:
                self._state = StepState.NEW_LOAD
            return
        residual = max(-CLIP, min(CLIP, block.log_ratio_sum / block.n))
        centred = residual - self._reference
        block.log_ratio_sum -= block.n * self._reference
        if self.open_step is None:
            self._learn(centred, squares, block)
            weight = length_ns / LEVEL_NS
            self._level = max(-_K, min(_K, self._level + weight * (residual - self._level)))
        self._test(now_ns, centred, block)

    def _compare(self, length_ns: int) -> tuple[float, StepChange]:
        """Return squared differences from the history, and sums, over the streams of the block that have a
        history.

        The block is added to the history, unless a step is in progress.
        """
        self._recent.append((length_ns, self._tokens))
        span_ns = sum(ns for ns, _ in self._recent)
        while span_ns - self._recent[0][0] >= _LOAD_NS:
            span_ns -= self._recent.popleft()[0]
        load = int(4 * log2(1 + sum(tokens for _, tokens in self._recent) * NS_PER_S / span_ns))
        since_ns = self._block_ns - self._age_ns // self._n
        block = StepChange(since_ns, since_ns, length_ns=length_ns)
        squares, today, is_learning = 0.0, self._days[-1].cells, self.open_step is None
        for length, (n, total, total_squares) in self._parts.items():
            place = self._index.get((length, load))
            if place is None:
                if is_learning and self._free:
                    place = self._index[length, load] = self._free.pop()
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

    def _learn(self, residual: float, squares: float, block: StepChange) -> None:
        """Add a block to the sums from which the noise is estimated."""
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
        if self._previous is not None:
            today.pairs += 1
            today.changes += (mean - self._previous) ** 2 / 2
        self._previous, self._batch = mean, (0.0, 0, 0)

    def _test(self, now_ns: int, residual: float, block: StepChange) -> None:
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
        threshold = noise.threshold(streams_per_ns)
        if self.open_step is not None:
            return threshold
        return max(threshold, PEAK_FACTOR * max(day.peak for day in self._days))
