"""Latency objectives of an exchange (request and response): parse them, judge exchanges, count goodput.

`Objectives` has the bounds. A `Summary` adds each exchange to its `Goodput`, which can be merged. The share
of good exchanges that a service promises (SLO) is in `slo.py`.

A user writes objectives as `ttft:200ms tpot:50ms e2e:30s`. An exchange is good only if it meets all bounds: a
figure meets its bound if it is at most the bound (`<=`).

`Objectives.judge` decides which exchanges count, and which are good or bad:

| exchange | verdict |
|---|---|
| `client_error` | does not count: the request was wrong |
| no stream, and every bound applies only to streams | does not count, however it ended |
| refused by the tap itself (`rejected`), or lost with a relay that died (`tap_error`) | does not count, \
because llmtap itself failed (the number is reported); bad with `count_own_faults` |
| `refused` without output | does not count: nothing was generated; refusals are reported apart (IETF 4.8.1) |
| `upstream_error`, `upstream_timeout`, `upstream_reset`, `truncated` | bad |
| `client_cancelled` | bad if a bound could not be met any more when the client left, else does not count |
| a stream that ended well without any event | bad |
| a stream that was not understood, or was read by its structure | by `ttfb` and `e2e` alone, see below |
| any other exchange (`complete`, `refused`) | by its figures |

If a stream was not understood (`Exchange.reading`), the times of its first byte and of its end are known, but
not those of its tokens. It is bad if it breaks a bound on a known figure, and good if it meets all bounds and
all their figures are known. Otherwise it is not judged and does not count. The number of such exchanges is
reported beside the share of good ones.

A bound whose figure does not apply (such as TPOT of an answer of one token) counts as met. If an answer has
no content, such as a pure tool call, the time to its first token of any kind (`ttft_any`) replaces `ttft`.
The bounds of streaming do not apply to an answer in one piece, nor to the stream of an A2A task, because the
task's texts are results of an agent. A request for a stream counts as a stream even if the upstream failed
before any output (`Exchange.stream`), so that failures and successes of a class are requests of the same
kind. A GET or HEAD request without a stream does not count. RFC 9110 15.5 defines which side is at fault for
a status; after 408, 425 and 429 the client may repeat the request: it was correct, but was not served, so it
is bad.

`Goodput` has a separate count for each set of objectives, so that counts of tenants with different bounds can
be summed. `fluidity` and `qoe_area_step` are two alternatives to user idle latency, computed with the same
bounds.

Source: chapter on SLO metrics (goodput as a conjunction); smooth goodput paper, section 2.2 and eq. 5; Etalon
(arXiv:2407.07000, docs and code of project-etalon/etalon). The area ratio resembles that of Andes
(arXiv:2404.16283); it has another name, because the text of the paper was not available to compare with.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain, repeat
from types import MappingProxyType
from typing import Final

from llmtap.errors import ConfigError, raise_all
from llmtap.exchange.exchange import A2A, Exchange
from llmtap.exchange.outcome import OWN_FAULTS, UPSTREAM_FAILED, Outcome
from llmtap.metrics.latency import Measured, output_times_ns
from llmtap.metrics.statistics import percentile
from llmtap.protocol.inference import NOT_INFERENCE_METHODS
from llmtap.units import parse_duration_ns


def _tbc_p99_ns(m: Measured) -> float | None:
    return percentile(sorted(m.tbc_ns), 0.99)


_FIGURES: Final[Mapping[str, Callable[[Measured], float | None]]] = {
    "ttft": lambda m: m.ttft_ns,
    "ttft_scheduled": lambda m: m.ttft_scheduled_ns,
    "ttft_any": lambda m: m.ttft_any_ns,
    "ttfb": lambda m: m.ttfb_ns,
    "tpot": lambda m: m.tpot_ns,
    "e2e": lambda m: m.e2e_ns,
    "e2e_scheduled": lambda m: m.e2e_scheduled_ns,
    "user_idle": lambda m: m.user_idle_ns,
    "tbc_max": lambda m: m.tbc_max_ns,
    "tbc_p99": _tbc_p99_ns,
    "jitter": lambda m: m.jitter_ns,
}
BOUNDS: Final = tuple(_FIGURES)
"""Names of all bounds, in the order of the canonical text."""
SCHEDULED_BOUNDS: Final[Mapping[str, str]] = {"ttft": "ttft_scheduled", "e2e": "e2e_scheduled"}
"""For a bound on a time since submission, the bound on the time since the scheduled start. Only requests of
the load generator have a schedule."""
STREAMED_BOUNDS: Final = frozenset(BOUNDS) - {"ttfb", "e2e", "e2e_scheduled"}
"""Bounds that apply to streams only."""

_WAITS: Final = frozenset({"ttft", "ttft_any", "ttfb", "e2e", "user_idle"})
"""Bounds on times since submission: a running exchange breaks them by waiting for longer than the bound."""
_FINAL: Final = frozenset({"ttft", "ttft_any", "ttfb", "user_idle", "tbc_max"})
"""Bounds on figures that never decrease during a stream, so that a broken bound stays broken."""
_VLLM_BOUNDS: Final[Mapping[str, str]] = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e"}
"""Bounds by their names in vLLM's benchmark."""
_UNITS: Final = (("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000), ("ns", 1))


class Judgement(Enum):
    """Result of judging an exchange by objectives."""

    GOOD = "good"
    BAD = "bad"
    NOT_JUDGED = "not judged"
    """The figure of a bound is unknown, because the answer was not understood."""
    NOT_COUNTED = "not counted"
    """The objectives do not apply to the exchange (see the table in the module docstring)."""
    OWN_FAULT = "own fault"
    """llmtap itself failed, and the objectives do not count such exchanges."""

    @property
    def met(self) -> bool | None:
        """Whether every bound is met; None if the exchange is not judged or does not count."""
        return {Judgement.GOOD: True, Judgement.BAD: False}.get(self)


@dataclass(frozen=True, slots=True)
class Objectives:
    """Latency bounds of an exchange, all of which a good exchange meets."""

    bounds: tuple[tuple[str, int], ...]
    """Name and value in ns of each bound, in the order of `BOUNDS`, each name at most once."""
    count_own_faults: bool = False
    """Whether an exchange in which llmtap itself failed is bad; otherwise it does not count."""

    @classmethod
    def parse(cls, text: str, place: str = "objectives") -> "Objectives":
        """Parse `name:duration` pairs, separated by blanks or commas; every duration needs a unit.

        Raises ConfigError naming `place`, with the invalid pairs and the known names.
        """
        known = ", ".join(BOUNDS)
        bounds: dict[str, int] = {}
        wrong: list[ConfigError] = []
        for pair in text.replace(",", " ").split():
            name, colon, duration = pair.partition(":")
            problem = hint = None
            if name not in _FIGURES:
                problem, hint = f"unknown objective {name!r} in {pair!r}", f"known objectives: {known}"
            elif name in bounds:
                problem = f"objective {name!r} is given twice"
            elif not colon or duration[-1:].isdigit() or not duration:
                problem = f"{pair!r} has no duration with a unit"
                hint = f"such as {name}:200ms, without a space"
            else:
                try:
                    bounds[name] = parse_duration_ns(duration)
                except ValueError as exc:
                    problem = f"objective {name!r}: {exc}"
                else:
                    problem = None if bounds[name] else f"objective {name!r} must be above 0"
            if problem is not None:
                wrong.append(ConfigError(place, problem, hint))
        if not bounds and not wrong:
            hint = f"such as ttft:200ms tpot:50ms; known objectives: {known}"
            wrong.append(ConfigError(place, "no objective is given", hint))
        raise_all(wrong)
        return cls(_ordered_bounds(bounds))

    @classmethod
    def parse_vllm(cls, text: str) -> "Objectives":
        """Parse objectives of `vllm bench serve --goodput`: `ttft:200 tpot:50 e2el:9000`, in milliseconds.

        Raises ConfigError. Source: chapter on SLO metrics, "Goodput".
        """
        pairs = []
        for pair in text.replace(",", " ").split():
            name, colon, number = pair.partition(":")
            if name not in _VLLM_BOUNDS or not colon or not number.replace(".", "", 1).isdigit():
                known = ", ".join(_VLLM_BOUNDS)
                hint = f"such as --goodput ttft:200 tpot:50, in ms; known objectives: {known}"
                raise ConfigError("--goodput", f"expected NAME:MILLISECONDS, got {pair!r}", hint)
            pairs.append(f"{_VLLM_BOUNDS[name]}:{number}ms")
        return cls.parse(" ".join(pairs), "--goodput")

    @property
    def text(self) -> str:
        """Canonical text, which `parse` can read: equal objectives have equal texts."""
        return " ".join(f"{name}:{_duration_text(ns)}" for name, ns in self.bounds)

    @property
    def streams_only(self) -> bool:
        """Whether no bound applies to an answer that is not streamed."""
        return all(name in STREAMED_BOUNDS for name, _ in self.bounds)

    def with_bounds(self, **bounds_ns: int | None) -> "Objectives":
        """Return a copy with these bounds (ns) added or replaced; None leaves a bound unchanged."""
        replacements = {name: ns for name, ns in bounds_ns.items() if ns is not None}
        assert replacements.keys() <= _FIGURES.keys()
        if not replacements:
            return self
        return replace(self, bounds=_ordered_bounds(dict(self.bounds) | replacements))

    def from_schedule(self) -> "Objectives":
        """Return a copy in which bounds on times since submission apply since the scheduled start."""
        bounds = {SCHEDULED_BOUNDS.get(name, name): ns for name, ns in self.bounds}
        unchanged = {n: ns for n, ns in self.bounds if n in bounds}
        return replace(self, bounds=_ordered_bounds(bounds | unchanged))

    def broken_bounds(self, m: Measured, x: Exchange) -> tuple[str, ...]:
        """Return the names of the bounds whose figures are known and too high, even if `x` does not count."""
        return tuple(
            name
            for name, bound_ns in self._known_bounds(m, x)
            if (figure := _ended_figure(name, m)) is not None and figure > bound_ns
        )

    def judge(self, m: Measured, x: Exchange) -> Judgement:
        """Judge an exchange by the bounds whose figures are known (see the table in the module docstring)."""
        outcome = x.outcome
        if outcome is Outcome.CLIENT_ERROR or (x.method in NOT_INFERENCE_METHODS and not x.stream):
            return Judgement.NOT_COUNTED
        is_stream = _is_token_stream(x)
        if not is_stream and self.streams_only:
            return Judgement.NOT_COUNTED
        if outcome in OWN_FAULTS:
            return Judgement.BAD if self.count_own_faults else Judgement.OWN_FAULT
        if outcome in UPSTREAM_FAILED:
            return Judgement.BAD
        all_known = not is_stream or m.tokens_known or not self._has_token_bounds
        if outcome is Outcome.CLIENT_CANCELLED:
            if self._was_broken_at_disconnect(m, x):
                return Judgement.BAD
            return Judgement.NOT_COUNTED if all_known else Judgement.NOT_JUDGED
        if outcome is Outcome.REFUSED and not m.output_events:
            return Judgement.NOT_COUNTED
        if x.no_token_reason == "empty":
            return Judgement.BAD
        if x.no_token_reason == "only_metadata" and is_stream and m.tokens_known:
            if not _counts_output(x):
                return Judgement.BAD
            all_known = not self._has_token_bounds
        if self.broken_bounds(m, x):
            return Judgement.BAD
        return Judgement.GOOD if all_known else Judgement.NOT_JUDGED

    def meets(self, m: Measured, x: Exchange) -> bool | None:
        """Return whether the exchange met every bound; None if it is not judged or does not count."""
        return self.judge(m, x).met

    @property
    def _has_token_bounds(self) -> bool:
        return any(name in STREAMED_BOUNDS for name, _ in self.bounds)

    def _known_bounds(self, m: Measured, x: Exchange) -> Iterator[tuple[str, int]]:
        """Yield the bounds that apply to the exchange and whose figures are known."""
        for name, bound_ns in self.bounds:
            if name not in STREAMED_BOUNDS or (m.tokens_known and _is_token_stream(x)):
                yield name, bound_ns

    def _was_broken_at_disconnect(self, m: Measured, x: Exchange) -> bool:
        """Return whether a known bound was already broken when the client disconnected.

        `tpot`, `tbc_p99` and `jitter` are not considered: they could have fallen below their bounds again.
        """
        t = x.timeline
        left_ns, submit_ns = t.delivered_ns, t.submit_ns
        waited_ns = None if left_ns is None or submit_ns is None else left_ns - submit_ns
        silent_ns = None if left_ns is None or t.last_token_ns is None else left_ns - t.last_token_ns
        for name, bound_ns in self._known_bounds(m, x):
            figure = _FIGURES[name](m)
            if figure is not None and name in _FINAL and figure > bound_ns:
                return True
            if figure is None and name in _WAITS and waited_ns is not None and waited_ns > bound_ns:
                return True
            if name == "tbc_max" and silent_ns is not None and silent_ns > bound_ns:
                return True
        return False


def _is_token_stream(x: Exchange) -> bool:
    """Return whether the answer is a stream of a model's tokens, to which the bounds of streaming apply."""
    return x.stream and x.endpoint != A2A


def _counts_output(x: Exchange) -> bool:
    """Return whether the usage has more output tokens than reasoning tokens: then there was some output."""
    return (x.tokens.output or 0) > (x.tokens.reasoning or 0)


def _ended_figure(name: str, m: Measured) -> float | None:
    """Return the figure of a bound for an ended exchange; TTFT-any replaces TTFT if there is no content."""
    figure = _FIGURES[name](m)
    return m.ttft_any_ns if figure is None and name == "ttft" else figure


def _ordered_bounds(bounds: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((name, bounds[name]) for name in BOUNDS if name in bounds)


def _duration_text(ns: int) -> str:
    unit, scale = next((unit, scale) for unit, scale in _UNITS if ns % scale == 0)
    return f"{ns // scale}{unit}"


REQUESTED = "as requested"
"""Name under which exchanges are counted whose objectives come only from headers of the request."""
_NO_BOUNDS = Objectives(())


def judge(objectives: Objectives | None, m: Measured, x: Exchange) -> tuple[Objectives, Judgement] | None:
    """Return the objectives that apply to an exchange, and its judgement by them.

    Bounds in the request's headers replace those of its class. None without objectives, or if the exchange
    does not count (`Objectives.judge`)."""
    applied = objectives
    if x.slo_ttft_ns is not None or x.slo_tpot_ns is not None:
        applied = (objectives or _NO_BOUNDS).with_bounds(ttft=x.slo_ttft_ns, tpot=x.slo_tpot_ns)
    if applied is None:
        return None
    judgement = applied.judge(m, x)
    if judgement is Judgement.NOT_COUNTED:
        return None
    return applied, judgement


@dataclass(slots=True)
class GoodputCount:
    """Counts of exchanges and their output tokens, by judgement, for one set of objectives."""

    counted: int = 0
    """Number of exchanges that count: good and bad ones."""
    met: int = 0
    """Number of good exchanges, which met all bounds."""
    tokens: int = 0
    """Number of output tokens of the exchanges that count; `good_tokens`: of the good ones."""
    good_tokens: int = 0
    """Output tokens of the exchanges that met all objectives."""
    broken: Counter[str] = field(default_factory=Counter)
    """Number of exchanges that broke each bound, by its name; under `ended`, those that ended badly."""
    not_judged: int = 0
    """Number of exchanges that do not count, because their answers were not understood."""
    own_faults: int = 0
    """Number of exchanges that do not count, because llmtap itself failed."""

    def merge(self, other: "GoodputCount") -> None:
        self.counted += other.counted
        self.met += other.met
        self.tokens += other.tokens
        self.good_tokens += other.good_tokens
        self.broken.update(other.broken)
        self.not_judged += other.not_judged
        self.own_faults += other.own_faults

    def to_dict(self, seconds: float) -> dict[str, object]:
        """Return public JSON. `seconds`: length of the time window, for the rates."""
        return {
            "met": self.met,
            "counted": self.counted,
            "not_judged": self.not_judged,
            "own_faults": self.own_faults,
            "attainment": self.met / self.counted if self.counted else None,
            "requests_per_second": self.met / seconds if seconds > 0 else None,
            "tokens_per_second": self.good_tokens / seconds if seconds > 0 else None,
            "token_attainment": self.good_tokens / self.tokens if self.tokens else None,
            "broken": dict(sorted(self.broken.items())),
        }


class Goodput:
    """Counts of good and bad exchanges, by the text of the objectives that judged them."""

    __slots__ = ("by_objectives",)

    def __init__(self) -> None:
        self.by_objectives: dict[str, GoodputCount] = {}
        """By text of the objectives: counts of the exchanges that they judged."""

    def add(self, objectives: Objectives | None, m: Measured, x: Exchange) -> bool | None:
        """Judge and count one exchange. Return whether it met its objectives; None if it does not count."""
        verdict = judge(objectives, m, x)
        if verdict is None:
            return None
        applied, judgement = verdict
        # Bounds from headers are not part of the name, because clients could create any number of names.
        name = REQUESTED if objectives is None else objectives.text
        count = self.by_objectives.get(name)
        if count is None:
            count = self.by_objectives[name] = GoodputCount()
        met = judgement.met
        if met is None:
            count.not_judged += judgement is Judgement.NOT_JUDGED
            count.own_faults += judgement is Judgement.OWN_FAULT
            return None
        tokens = x.tokens.output or 0
        count.counted += 1
        count.tokens += tokens
        if met:
            count.met += 1
            count.good_tokens += tokens
        else:
            count.broken.update(applied.broken_bounds(m, x) or ("ended",))
        return met

    def merge(self, other: "Goodput") -> None:
        for name, count in other.by_objectives.items():
            self.by_objectives.setdefault(name, GoodputCount()).merge(count)

    def total(self) -> GoodputCount:
        """Return the counts of all sets of objectives together."""
        total = GoodputCount()
        for count in self.by_objectives.values():
            total.merge(count)
        return total

    def to_dict(
        self, seconds: float, judged_seconds: Mapping[str, float] = MappingProxyType({})
    ) -> dict[str, object] | None:
        """Return public JSON: the total, and under `by` each set of objectives; None without objectives.

        `judged_seconds`: by the text of objectives, the time that their counts cover, if less than `seconds`.
        """
        counts = self.by_objectives
        if not counts:
            return None
        by = {
            name: count.to_dict(judged_seconds.get(name, seconds)) for name, count in sorted(counts.items())
        }
        total = self.total().to_dict(seconds)
        if judged_seconds:
            for rate in ("requests_per_second", "tokens_per_second"):
                rates = [value for one in by.values() if isinstance(value := one[rate], float)]
                total[rate] = sum(rates) if rates else None
        return {
            "objectives": next(iter(counts)) if len(counts) == 1 else "those of each class",
            **total,
            "by": by,
        }


@dataclass(frozen=True, slots=True)
class Fluidity:
    """Number of tokens of a stream, of tokens in time, and of missed deadlines."""

    tokens: int
    tokens_in_time: int
    """Number of tokens that arrived before their deadlines."""
    missed_deadlines: int
    """Number of deadlines that passed during late gaps, as in Etalon's code: several in a long gap."""

    @property
    def index_of_doc(self) -> float:
        """Fluidity index as in Etalon's documentation: tokens in time / tokens."""
        return self.tokens_in_time / self.tokens

    @property
    def deadlines(self) -> int:
        """Number of deadlines as in Etalon's code: those that were met, and those that were missed."""
        return self.tokens_in_time + self.missed_deadlines

    @property
    def index_of_code(self) -> float:
        """Fluidity index as in Etalon's code: 1 - missed deadlines / deadlines."""
        return 1 - self.missed_deadlines / self.deadlines


def fluidity(times_ns: Sequence[int], origin_ns: int, ttft_ns: int, tbt_ns: int) -> Fluidity | None:
    """Count the tokens in time and the missed deadlines of a stream; None without tokens.

    A token is in time if the gap before it is at most its bound plus the slack: the time by which earlier
    tokens came before their deadlines. A late token sets the slack to 0.

    Args:
        times_ns: times of the tokens.
        origin_ns: time of submission, at which the first gap begins.
        ttft_ns, tbt_ns: bound of the first gap, and bound of each later gap.
    """
    if not times_ns:
        return None
    before_ns = times_ns[0]
    slack_ns = ttft_ns - (before_ns - origin_ns)
    late = missed = 0
    if slack_ns < 0:
        late, missed, slack_ns = 1, 1 + -slack_ns // tbt_ns, 0
    # This loop runs for each token of each answer, so it must be fast.
    for t_ns in times_ns[1:]:
        gap_ns = t_ns - before_ns
        before_ns = t_ns
        if gap_ns <= tbt_ns + slack_ns:
            slack_ns += tbt_ns - gap_ns
        else:
            late += 1
            missed += (gap_ns - slack_ns) // tbt_ns
            slack_ns = 0
    return Fluidity(len(times_ns), len(times_ns) - late, missed)


def qoe_area_step(
    times_ns: Sequence[int], origin_ns: int, ttft_ns: int, reader_ns_per_token: int
) -> float | None:
    """Return area under the read tokens / area under the expected tokens, 0 to 1; None without tokens.

    Token i is expected at e_i = `ttft_ns` + (i - 1) V after the origin, where V is `reader_ns_per_token`. It
    is read at c_i: after its arrival, V after the token before, and not before e_i. Both curves are steps
    over time, and both areas end at H, the later of the last expected and the last read token. The ratio is
    sum(H - c_i) / sum(H - e_i), or 1 if the divisor is 0.
    """
    if not times_ns:
        return None
    n = len(times_ns)
    e_ns = origin_ns + ttft_ns
    # Sum of the times e_i at which the reader expects the tokens. `digested_ns` sums the times c_i below.
    expected_ns = n * e_ns + reader_ns_per_token * (n * (n - 1) // 2)
    digested_ns = 0
    read_ns = c_ns = times_ns[0]
    for t_ns in times_ns:  # This loop runs for each token of each answer, so it must be fast.
        if t_ns > read_ns:
            read_ns = t_ns
        c_ns = read_ns if read_ns > e_ns else e_ns
        digested_ns += c_ns
        read_ns += reader_ns_per_token
        e_ns += reader_ns_per_token
    end_ns = max(c_ns, e_ns - reader_ns_per_token)
    area_ns = n * end_ns - expected_ns
    return (n * end_ns - digested_ns) / area_ns if area_ns else 1.0


@dataclass(frozen=True, slots=True)
class Experience:
    """Two measures of a reader's experience with a stream, which are alternatives to user idle latency."""

    fluidity: Fluidity
    qoe_area_step: float
    """Quality of experience from 0 to 1: area below the curve of delivered tokens."""


def experience_of(x: Exchange, m: Measured, objectives: Objectives) -> Experience | None:
    """Return fluidity and area ratio of a stream, with the bounds of `objectives` and the reader of `m`.

    The bound of the first token is `ttft`, or else `ttft_any`; that of the other tokens is `tbc_max`, or else
    `tpot`. None if one of the two bounds, the output, or the time of submission is missing. A chunk with an
    unknown number of tokens counts as one token.
    """
    bounded = _bounded_stamps(x, m, objectives)
    if bounded is None:
        return None
    times_ns, submit_ns, ttft_ns, tbt_ns = bounded
    counted = fluidity(times_ns, submit_ns, ttft_ns, tbt_ns)
    area = qoe_area_step(times_ns, submit_ns, ttft_ns, m.benefit.reader_ns_per_token)
    return None if counted is None or area is None else Experience(counted, area)


def fluidity_of(x: Exchange, m: Measured, objectives: Objectives) -> Fluidity | None:
    """Return only the fluidity of a stream, with the same bounds as `experience_of`."""
    bounded = _bounded_stamps(x, m, objectives)
    return None if bounded is None else fluidity(*bounded)


def _bounded_stamps(
    x: Exchange, m: Measured, objectives: Objectives
) -> tuple[list[int], int, int, int] | None:
    """Return the times of the tokens, the time of submission, and the bounds of the first and later gaps.
    None as for `experience_of`."""
    bounds = dict(objectives.bounds)
    ttft_ns = bounds.get("ttft", bounds.get("ttft_any"))
    tbt_ns = bounds.get("tbc_max", bounds.get("tpot"))
    submit_ns = x.timeline.submit_ns
    if ttft_ns is None or tbt_ns is None or submit_ns is None:
        return None
    times_ns = output_times_ns(x.timeline.events)
    if m.tokens_per_chunk is not None and m.itl_even_ns is not m.tbc_ns:
        times_ns = list(chain.from_iterable(map(repeat, times_ns, m.tokens_per_chunk)))
    return times_ns, submit_ns, ttft_ns, tbt_ns
