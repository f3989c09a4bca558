"""Compare the answers of a replay with the recorded answers to the same requests.

The names `now` and `then` mean the replay and the recording. After the run `Baseline` first gets the
exchanges of the replay (`add_replayed`), then the rows of the source (`add_recorded`, called by
`read_recorded`). `to_dict` returns the differences as public JSON, the `baseline` of the result. Two replays
are compared in `comparison.py`.

- A source with answer times is read again after the run, up to the last row sent; a repeated row counts once.
- A pair is counted if both rows have the figure and both ended well. TTFT, TPOT and the longest pause are
  those of streamed answers. A row without a recorded outcome counts as ended well.
- `elapsed` is the time from arrival to the last byte, for rows without a recorded submit time. The arrival of
  a replayed request is the time at which it was sent.
- E2E is reported for all pairs and for those of equal output length.
- A difference is now - then. Its uncertainty is the sum of the uncertainties of both exchanges and 1 us,
  because a capture rounds times to microseconds.
- There is no significance test: rows of one load are not independent. `llmtap bench` has tests.

Memory: 56 bytes per row; differences go into histograms (error 0.1 %).
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from llmtap.capture.schema import CaptureInfo
from llmtap.capture.store.rows import exchanges_of
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import TokenSource
from llmtap.metrics.histogram import Histogram
from llmtap.metrics.latency import e2e_ns, output_times_ns, tbc_max_ns, tbc_ns, tpot_ns, ttft_ns
from llmtap.metrics.statistics import summarise_ns
from llmtap.metrics.summary import ENDED_WELL
from llmtap.traces.registry import open_trace
from llmtap.units import NS_PER_S
from llmtap.version import __version__
from llmtap.workload.requests import Requests
from llmtap.workload.trace import Trace

FIGURES: Final = ("ttft", "tpot", "tbc_max", "e2e", "e2e_same_length", "elapsed")
SHARES: Final = {"p5": 0.05, "p50": 0.5, "p95": 0.95}
LENGTH_DIFFERENCE_MAX: Final = 0.05
"""Maximum relative difference between two output lengths that count as similar."""
DISSIMILAR_SHARE_MAX: Final = 0.05
"""If more than this share of the pairs have dissimilar lengths, E2E is not comparable at p5 and p95."""
MODELS_MAX: Final = 5
"""Maximum number of model names kept for each side (replay, recording)."""
_COMPARED: Final = ("ttft", "tpot", "tbc_max", "e2e", "elapsed", "output", "uncertainty")
_NONE: Final = -1
_SENT, _ENDED_WELL = 1, 2
_SIDES: Final = ("then", "now", "difference")
_MICROSECOND: Final = 1_000
_NO_INFO: Final = CaptureInfo()


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """Source that contains the recorded answers to the requests."""

    place: str
    """Name of the file or folder."""
    format: str
    source_rows: "array[int]"
    """For each request, the number of its row in the source. Further requests repeat these rows."""


def find_recorded_answers(trace: Trace, place: str, count: int) -> RecordedAnswer | None:
    """Return the source with the recorded answers to the first `count` requests of a trace.

    None if the trace has no answer times, or if it is a pipe, which cannot be read twice.
    """
    readable_twice = "://" in place or Path(place).is_file() or Path(place).is_dir()
    if not trace.has_answer_times or not readable_twice:
        return None
    return RecordedAnswer(place, trace.format, trace.source_rows[:count])


class Baseline:
    """Comparison of replayed and recorded answers, by row. Add all replayed exchanges (`add_replayed`) before
    the recorded ones (`add_recorded`)."""

    def __init__(self, recorded: RecordedAnswer) -> None:
        self.recorded = recorded
        """Where the recorded answers come from."""
        n = len(recorded.source_rows)
        self._replayed_values = {name: array("q", [_NONE]) * n for name in _COMPARED}
        """By figure: value of each row in the replay; `_NONE` if it has none."""
        self._row_states = bytearray(n)
        """By row: flags whether its request was sent and ended well; 0: not sent."""
        self.found_count = 0
        """Number of sent rows that were found in the source when it was read again."""
        self._repeat_count = self._unknown_outcomes = 0
        """Number of requests whose row was sent before, and of rows whose recorded outcome is unknown."""
        self._has_times = False
        """Whether the trace has times of the recorded answers to compare with."""
        self._ended_by_side = {"both": 0, "then": 0, "now": 0, "neither": 0}
        """Number of requests that ended well in the recording (`then`), the replay (`now`) or both."""
        self._histograms = {side: {name: Histogram() for name in FIGURES} for side in _SIDES}
        """By side and figure: values of the compared requests."""
        self._slower_counts: Counter[str] = Counter()
        """By figure: number of requests that took longer in the replay."""
        self._uncertainty = Histogram()
        """Uncertainty of each compared difference, in ns."""
        self._lengths = {"n": 0, "equal": 0, "near": 0}
        """Numbers of answers that are compared, equally long, and nearly equally long."""
        self._models: dict[str, set[str]] = {"then": set(), "now": set()}
        """Names of the models in the recording (`then`) and in the replay (`now`)."""

    def add_replayed(self, row: int, x: Exchange) -> None:
        if row >= len(self._row_states):
            self._repeat_count += 1
            return
        self._add_model("now", x)
        self._row_states[row] = _SENT | (_ENDED_WELL if x.outcome in ENDED_WELL else 0)
        for name, value in _figures(x).items():
            if value is not None:
                self._replayed_values[name][row] = value

    def was_sent(self, row: int) -> bool:
        return bool(self._row_states[row])

    def add_recorded(self, row: int, x: Exchange, *, outcome: bool = True, uncertainty: bool = True) -> None:
        """Add a row's recorded exchange. `outcome`, `uncertainty`: whether the source has these fields."""
        self.found_count += 1
        self._add_model("then", x)
        self._unknown_outcomes += not outcome
        then = _figures(x)
        values = {name: column[row] for name, column in self._replayed_values.items()}
        now = {name: None if value == _NONE else value for name, value in values.items()}
        if x.timeline.submit_ns is not None:
            then["elapsed"] = None
        self._has_times = self._has_times or any(then.get(name) is not None for name in FIGURES)
        well_then, well_now = x.outcome in ENDED_WELL, bool(self._row_states[row] & _ENDED_WELL)
        if not (well_then and well_now):
            self._ended_by_side["then" if well_then else "now" if well_now else "neither"] += 1
            return
        self._ended_by_side["both"] += 1
        if uncertainty and then["uncertainty"] is not None and now["uncertainty"] is not None:
            self._uncertainty.record(then["uncertainty"] + now["uncertainty"] + _MICROSECOND)
        old, new = then["output"], now["output"]
        if old is not None and new is not None:
            self._lengths["n"] += 1
            self._lengths["equal"] += old == new
            self._lengths["near"] += abs(new - old) <= LENGTH_DIFFERENCE_MAX * max(old, new)
            if old == new:
                then["e2e_same_length"], now["e2e_same_length"] = then["e2e"], now["e2e"]
        for name in FIGURES:
            before, after = then.get(name), now.get(name)
            if before is not None and after is not None:
                for side, ns in zip(_SIDES, (before, after, after - before), strict=True):
                    self._histograms[side][name].record(ns)
                self._slower_counts[name] += after > before

    def to_dict(self, info: CaptureInfo = _NO_INFO) -> dict[str, object] | None:
        """Return public JSON in seconds; None if no row has answer times. `info`: metadata of the source."""
        if not self._has_times:
            return None
        missing = sum(map(bool, self._row_states)) - self.found_count
        n, near = self._lengths["n"], self._lengths["near"]
        comparable = n - near <= DISSIMILAR_SHARE_MAX * n if n else None
        return {
            "requests": {"compared": self.found_count, "not_found": missing, "repeated": self._repeat_count},
            "ended_well": dict(self._ended_by_side),
            "pairs": {name: self._pair_figures(name) for name in FIGURES},
            "output_tokens": {**self._lengths, "comparable": comparable},
            "uncertainty": summarise_ns(self._uncertainty) if self._uncertainty.n else None,
            "notes": list(self._notes(missing, info, comparable=comparable)),
        }

    def _add_model(self, side: str, x: Exchange) -> None:
        if x.model and len(self._models[side]) < MODELS_MAX:
            self._models[side].add(x.model)

    def _pair_figures(self, name: str) -> dict[str, object]:
        """Return public JSON of one figure in the recording, in the replay, and of the difference."""
        n = self._histograms["difference"][name].n
        sides = {side: _percentiles_s(by_name[name]) for side, by_name in self._histograms.items()}
        return {"n": n, **sides, "slower": self._slower_counts[name] / n if n else None}

    def _notes(self, missing: int, info: CaptureInfo, *, comparable: bool | None) -> Iterator[str]:
        if missing:
            yield f"{missing:,} rows were not found again: the source has changed meanwhile"
        if self._repeat_count:
            yield f"{self._repeat_count:,} requests were rows that came again: they are compared once"
        if self._unknown_outcomes:
            yield f"of {self._unknown_outcomes:,} rows the source does not say how they ended: taken for well"
        counts = {name: histogram.n for name, histogram in self._histograms["difference"].items()}
        if counts["elapsed"]:
            yield "the source does not say when requests were submitted: elapsed counts from arrival"
        if comparable is False:
            apart = self._lengths["n"] - self._lengths["near"]
            yield (
                f"{apart:,} of {self._lengths['n']:,} answers are longer or shorter than they were by more"
                f" than {LENGTH_DIFFERENCE_MAX:.0%}: E2E cannot be compared, but for those of the same length"
            )
        elif comparable is None and (counts["e2e"] or counts["elapsed"]):
            yield "whether answers are as long as they were is not known: E2E may not be comparable"
        then, now = (", ".join(sorted(models)) for models in self._models.values())
        if then and now and then != now:
            yield f"the model was {then} then, and is {now} now"
        if info.tap_version not in ("", __version__):
            yield f"then measured by llmtap {info.tap_version}, now by {__version__}"
        yield (
            "server, network and machine of then are not recorded: if they are not those of now, differences"
            " are theirs, too"
        )


def read_recorded(
    baseline: Baseline, requests: Requests, progress: Callable[[int, int | None], None] | None = None
) -> CaptureInfo:
    """Read from the source the rows that were sent, add them to `baseline`, and return the source's metadata.

    If a row has other lengths than the request that was sent, it counts as not found: the source has changed.
    Raises ConfigError if the source cannot be read, ValueError for an unknown enumeration value.
    """
    recorded = baseline.recorded
    source_rows = recorded.source_rows
    in_source_order = sorted(range(len(source_rows)), key=source_rows.__getitem__)
    order = [row for row in in_source_order if baseline.was_sent(row)]
    begin = done = 0
    reading = open_trace(recorded.place, source_format=recorded.format, progress=progress)
    with reading as trace:
        for batch in trace.source.batches:
            end, first = begin + batch.num_rows, done
            while done < len(order) and source_rows[order[done]] < end:
                done += 1
            if done > first:
                rows = order[first:done]
                part = batch.take(pa.array([source_rows[row] - begin for row in rows], pa.int64()))
                known = zip(
                    *(part.column(name).is_valid().to_pylist() for name in ("outcome", "uncertainty_us")),
                    strict=True,
                )
                lengths = zip(
                    *(part.column(name).to_pylist() for name in ("input_tokens", "output_tokens")),
                    strict=True,
                )
                for row, x, (outcome, sure), length in zip(
                    rows, exchanges_of(part), known, lengths, strict=True
                ):
                    planned = (requests.input[row], requests.output[row])
                    if all(n in (None, ours) for n, ours in zip(length, planned, strict=True)):
                        baseline.add_recorded(row, x, outcome=outcome, uncertainty=sure)
            begin = end
            if done == len(order):
                break
        return trace.source.info


def _figures(x: Exchange) -> dict[str, int | None]:
    """Return the figures of an exchange, by the names of `_COMPARED`; in ns, except `output` (tokens)."""
    t, tokens = x.timeline, x.tokens
    # Do not compare numbers of chunks: a server decides how many tokens are in a chunk.
    output = None if tokens.source is TokenSource.CHUNKS else tokens.output
    elapsed_ns = None if t.response_end_ns is None else max(0, t.response_end_ns - t.arrival_ns)
    ttft = tpot = pause = None
    if x.stream:
        ttft, tpot = ttft_ns(t), tpot_ns(t, tokens.output)
        pause = tbc_max_ns(tbc_ns(output_times_ns(t.events)))
    return {
        "ttft": ttft,
        "tpot": None if tpot is None else round(tpot),
        "tbc_max": pause,
        "e2e": e2e_ns(t),
        "elapsed": elapsed_ns,
        "output": output,
        "uncertainty": x.uncertainty_ns,
    }


def _percentiles_s(histogram: Histogram) -> dict[str, float | None]:
    values = histogram.percentiles(tuple(SHARES.values()))
    return {name: None if v is None else v / NS_PER_S for name, v in zip(SHARES, values, strict=True)}
