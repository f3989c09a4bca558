"""Latency objectives of an exchange (request and response): parse them, judge exchanges, count goodput.

`Objectives` holds the bounds; `Goodput` is fed exchange by exchange (by a `Summary`) and can be merged. The
share of good exchanges that a service promises (SLO) is in `slo.py`.

Written `ttft:200ms tpot:50ms e2e:30s`. A conjunction, not an average: an exchange that breaks one bound is
bad, however well it kept the others. A bound holds when the figure is at most the bound (`<=`).

Which exchanges count, by `Objectives.meets`:

| exchange | verdict |
|---|---|
| refused by the tap itself (`rejected`) | does not count: the gateway never saw it |
| lost with a relay that died (`tap_error`) | does not count: the failure is ours |
| `client_error` | does not count: the request was wrong |
| no stream, and every bound is of streams only | does not count, however it ended |
| `refused` without output | does not count: nothing was generated; refusals are reported apart (IETF 4.8.1) |
| `upstream_error`, `upstream_timeout`, `upstream_reset`, `truncated` | bad |
| `client_cancelled` | bad if a bound was already past saving when the client left, else does not count |
| a stream that ended well and brought nothing | bad |
| `complete`, `refused` otherwise | by its figures |

A bound whose figure does not apply (TPOT of a one-token answer, TTFT of a pure tool call) counts as met. The
bounds of streaming do not apply to an answer in one piece. If the upstream failed before any output, a
request for a stream counts as a stream (`Exchange.stream`): a class counts failures of the same requests as
successes. A GET or HEAD that was not streamed does not count. RFC 9110 15.5 says whose fault a status is;
408, 425 and 429 ask for the same request again: it was right, and was not served.

`Goodput` keeps one count for each set of objectives, so that tenants with different bounds can be summed.
`fluidity` and `qoe_area_step` are two rivals of user idle latency under the same bounds.

Source: chapter on SLO metrics (goodput as a conjunction), the smooth goodput paper section 2.2 and eq. 5;
Etalon (arXiv:2407.07000, docs and code of project-etalon/etalon); the area ratio is in the manner of Andes
(arXiv:2404.16283), whose text was not at hand, so it does not carry that name.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Final

from llmtap.errors import ConfigError, raise_all
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import UPSTREAM_FAILED, Outcome
from llmtap.metrics.latency import Measured, output_times_ns
from llmtap.metrics.statistics import percentile
from llmtap.protocol.inference import NOT_INFERENCE_METHODS
from llmtap.units import parse_duration_ns


def _tbc_p99_ns(m: Measured) -> float | None:
    return percentile(sorted(m.tbc_ns), 0.99)


_FIGURES: Final[Mapping[str, Callable[[Measured], float | None]]] = {
    "ttft": lambda m: m.ttft_ns,
    "ttft_any": lambda m: m.ttft_any_ns,
    "ttfb": lambda m: m.ttfb_ns,
    "tpot": lambda m: m.tpot_ns,
    "e2e": lambda m: m.e2e_ns,
    "user_idle": lambda m: m.user_idle_ns,
    "tbc_max": lambda m: m.tbc_max_ns,
    "tbc_p99": _tbc_p99_ns,
    "jitter": lambda m: m.jitter_ns,
}
BOUNDS: Final = tuple(_FIGURES)
"""Every name a bound can have, in the order of the canonical text."""
STREAMED_BOUNDS: Final = frozenset(BOUNDS) - {"ttfb", "e2e"}
"""Bounds of streams only."""

_WAITS: Final = frozenset({"ttft", "ttft_any", "ttfb", "e2e", "user_idle"})
"""Bounds that time alone breaks: without the point at bound + 1 ns an exchange can never meet them."""
_FINAL: Final = frozenset({"ttft", "ttft_any", "ttfb", "user_idle", "tbc_max"})
"""Figures that only grow during a stream, so that a broken bound stays broken."""
_NOT_COUNTED: Final = frozenset({Outcome.CLIENT_ERROR, Outcome.REJECTED, Outcome.TAP_ERROR})
_VLLM: Final[Mapping[str, str]] = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e"}
_UNITS: Final = (("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000), ("ns", 1))


@dataclass(frozen=True, slots=True)
class Objectives:
    """Bounds in ns by name, in the order of `BOUNDS`, each name at most once."""

    bounds: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str, place: str = "objectives") -> "Objectives":
        """Parse `name:duration` pairs, separated by blanks or commas; every duration needs its unit.

        Raises ConfigError with `place`, the bad pair and the known names.
        """
        known = ", ".join(BOUNDS)
        bounds: dict[str, int] = {}
        wrong: list[ConfigError] = []
        for pair in text.replace(",", " ").split():
            name, colon, duration = pair.partition(":")
            problem = hint = None
            if name not in _FIGURES:
                problem, hint = f"unknown objective {name!r} in {pair!r}", f"known are {known}"
            elif name in bounds:
                problem = f"objective {name!r} is given twice"
            elif not colon or duration[-1:].isdigit() or not duration:
                problem = f"{pair!r} needs a duration with a unit"
                hint = f"such as {name}:200ms, without a blank"
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
            hint = f"such as ttft:200ms tpot:50ms; known are {known}"
            wrong.append(ConfigError(place, "no objective is given", hint))
        raise_all(wrong)
        return cls(_ordered(bounds))

    @classmethod
    def parse_vllm(cls, text: str, place: str = "--goodput") -> "Objectives":
        """Parse objectives of `vllm bench serve --goodput`:

        `ttft:200 tpot:50`, in milliseconds. Its names are ttft, tpot and e2el. Raises ConfigError. Source:
        chapter on SLO metrics, "Goodput".
        """
        pairs = []
        for pair in text.replace(",", " ").split():
            name, colon, number = pair.partition(":")
            if name not in _VLLM or not colon or not number.replace(".", "", 1).isdigit():
                hint = f"such as {place} ttft:200 tpot:50, in ms; known are {', '.join(_VLLM)}"
                raise ConfigError(place, f"expected an objective, got {pair!r}", hint)
            pairs.append(f"{_VLLM[name]}:{number}ms")
        return cls.parse(" ".join(pairs), place)

    @property
    def text(self) -> str:
        return " ".join(f"{name}:{_duration(ns)}" for name, ns in self.bounds)

    @property
    def streams_only(self) -> bool:
        """Whether no bound applies to an answer in one piece."""
        return all(name in STREAMED_BOUNDS for name, _ in self.bounds)

    def replaced(self, **bounds_ns: int | None) -> "Objectives":
        """Return a copy with some bounds set (ns); None leaves a bound unchanged."""
        given = {name: ns for name, ns in bounds_ns.items() if ns is not None}
        assert given.keys() <= _FIGURES.keys()
        return Objectives(_ordered(dict(self.bounds) | given)) if given else self

    def broken(self, m: Measured, x: Exchange) -> tuple[str, ...]:
        """Return the names of the bounds that the exchange's figures break, whether or not it counts."""
        return tuple(
            name
            for name, bound_ns in self.bounds
            if (x.stream or name not in STREAMED_BOUNDS)
            and (figure := _FIGURES[name](m)) is not None
            and figure > bound_ns
        )

    def meets(self, m: Measured, x: Exchange) -> bool | None:
        """Return whether the exchange met every bound; None if it does not count (see the module)."""
        outcome = x.outcome
        if outcome in _NOT_COUNTED or (x.method in NOT_INFERENCE_METHODS and not x.stream):
            return None
        if not x.stream and self.streams_only:
            return None
        if outcome in UPSTREAM_FAILED:
            return False
        if outcome is Outcome.CLIENT_CANCELLED:
            return False if self._lost_by_waiting(m, x) else None
        if outcome is Outcome.REFUSED and not m.output_events:
            return None
        if x.no_token_reason in _NOTHING:
            return False
        return not self.broken(m, x)

    def _lost_by_waiting(self, m: Measured, x: Exchange) -> bool:
        """Return whether a bound was already lost when the client left.

        Means (`tpot`) and shares (`tbc_p99`, `jitter`) can recover, so they decide nothing.
        """
        t = x.timeline
        left_ns, submit_ns = t.delivered_ns, t.submit_ns
        waited_ns = None if left_ns is None or submit_ns is None else left_ns - submit_ns
        silent_ns = None if left_ns is None or t.last_token_ns is None else left_ns - t.last_token_ns
        for name, bound_ns in self.bounds:
            if not x.stream and name in STREAMED_BOUNDS:
                continue
            figure = _FIGURES[name](m)
            if figure is not None and name in _FINAL and figure > bound_ns:
                return True
            if figure is None and name in _WAITS and waited_ns is not None and waited_ns > bound_ns:
                return True
            if name == "tbc_max" and silent_ns is not None and silent_ns > bound_ns:
                return True
        return False


_NOTHING: Final = frozenset({"empty", "only_metadata"})
"""Streams that ended well without output: they meet no objectives."""


def _ordered(bounds: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((name, bounds[name]) for name in BOUNDS if name in bounds)


def _duration(ns: int) -> str:
    unit, scale = next((unit, scale) for unit, scale in _UNITS if ns % scale == 0)
    return f"{ns // scale}{unit}"


REQUESTED = "as requested"
"""Name of objectives that come from requests' headers only."""
_NOTHING_ASKED = Objectives(())


def judge(objectives: Objectives | None, m: Measured, x: Exchange) -> tuple[Objectives, bool] | None:
    """Return the objectives of this exchange and whether it met them.

    Its own replace those of its class. None if there are none, or it does not count (`Objectives.meets`).
    """
    asked = objectives
    if x.slo_ttft_ns is not None or x.slo_tpot_ns is not None:
        asked = (objectives or _NOTHING_ASKED).replaced(ttft=x.slo_ttft_ns, tpot=x.slo_tpot_ns)
    if asked is None:
        return None
    met = asked.meets(m, x)
    return None if met is None else (asked, met)


@dataclass(slots=True)
class GoodputCount:
    counted: int = 0
    met: int = 0
    tokens: int = 0
    good_tokens: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    """Exchanges that broke each bound; `ended`: bad by outcome."""

    def merge(self, other: "GoodputCount") -> None:
        self.counted += other.counted
        self.met += other.met
        self.tokens += other.tokens
        self.good_tokens += other.good_tokens
        self.broken.update(other.broken)

    def to_dict(self, seconds: float) -> dict[str, object]:
        """Return public JSON; rates over `seconds`."""
        return {
            "met": self.met,
            "counted": self.counted,
            "attainment": self.met / self.counted if self.counted else None,
            "requests_per_second": self.met / seconds if seconds > 0 else None,
            "tokens_per_second": self.good_tokens / seconds if seconds > 0 else None,
            "token_attainment": self.good_tokens / self.tokens if self.tokens else None,
            "broken": dict(sorted(self.broken.items())),
        }


class Goodput:
    __slots__ = ("by_objectives",)

    def __init__(self) -> None:
        self.by_objectives: dict[str, GoodputCount] = {}

    def add(self, objectives: Objectives | None, m: Measured, x: Exchange) -> bool | None:
        """Judge and count one exchange; return whether it met its objectives, None if it does not count."""
        verdict = judge(objectives, m, x)
        if verdict is None:
            return None
        asked, met = verdict
        # Bounds from headers are not part of the name: clients could make names without end.
        name = REQUESTED if objectives is None else objectives.text
        count = self.by_objectives.get(name)
        if count is None:
            count = self.by_objectives[name] = GoodputCount()
        tokens = x.tokens.output or 0
        count.counted += 1
        count.tokens += tokens
        if met:
            count.met += 1
            count.good_tokens += tokens
        else:
            count.broken.update(asked.broken(m, x) or ("ended",))
        return met

    def merge(self, other: "Goodput") -> None:
        for name, count in other.by_objectives.items():
            self.by_objectives.setdefault(name, GoodputCount()).merge(count)

    def total(self) -> GoodputCount:
        total = GoodputCount()
        for count in self.by_objectives.values():
            total.merge(count)
        return total

    def to_dict(self, seconds: float) -> dict[str, object] | None:
        """Return public JSON, None without objectives: the total, and under `by` each set of them."""
        counts = self.by_objectives
        if not counts:
            return None
        return {
            "objectives": next(iter(counts)) if len(counts) == 1 else "those of each class",
            **self.total().to_dict(seconds),
            "by": {name: count.to_dict(seconds) for name, count in sorted(counts.items())},
        }


@dataclass(frozen=True, slots=True)
class Fluidity:
    tokens: int
    in_time: int
    missed: int
    """As in Etalon's code: every deadline that passed during a late gap."""

    @property
    def doc(self) -> float:
        """Fluidity index of Etalon's documentation: tokens in time / tokens."""
        return self.in_time / self.tokens

    @property
    def deadlines(self) -> int:
        """All deadlines as in Etalon's code: met and missed."""
        return self.in_time + self.missed

    @property
    def code(self) -> float:
        """Fluidity index of Etalon's code: 1 - missed / deadlines."""
        return 1 - self.missed / self.deadlines


def fluidity(times_ns: Sequence[int], origin_ns: int, ttft_ns: int, tbt_ns: int) -> Fluidity | None:
    """Count the token deadlines met when slack is carried over; None without tokens.

    A token is in time if its gap is at most its bound plus the slack; a late one leaves no slack.

    Args:
        times_ns: stamps of the tokens. origin_ns: submit.
        ttft_ns, tbt_ns: the bounds of the first gap, which begins at the origin, and of the others.
    """
    if not times_ns:
        return None
    before_ns = times_ns[0]
    slack_ns = ttft_ns - (before_ns - origin_ns)
    late = missed = 0
    if slack_ns < 0:
        late, missed, slack_ns = 1, 1 + -slack_ns // tbt_ns, 0
    # Once for each token of each answer: few steps.
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
    """Return the area under digested tokens / area under expected tokens, 0 to 1; None without tokens.

    Token i is expected at e_i = TTFT + (i - 1) V after the origin. It is digested at c_i: when it has come
    and V after the one before, but not before e_i. Both areas are of steps and end at the later of the last
    expected and the last digested token, H: sum(H - c_i) / sum(H - e_i), or 1 if that divides by 0.
    """
    if not times_ns:
        return None
    n = len(times_ns)
    e_ns = origin_ns + ttft_ns
    # The sums of all e_i and all c_i, from which the areas follow.
    expected_ns = n * e_ns + reader_ns_per_token * (n * (n - 1) // 2)
    digested_ns = 0
    read_ns = c_ns = times_ns[0]
    for t_ns in times_ns:  # once for each token of each answer: few steps
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
    fluidity: Fluidity
    qoe_area_step: float


def experience_of(x: Exchange, m: Measured, objectives: Objectives) -> Experience | None:
    """Return fluidity and area ratio of a stream, by the bounds of its objectives and its reader.

    The first token's bound is `ttft`, or else `ttft_any`; that of the others `tbc_max`, or else `tpot`.
    None without the two, without output or submit. A chunk with unknown tokens counts as one token.
    """
    bounded = _bounded(x, m, objectives)
    if bounded is None:
        return None
    times_ns, submit_ns, ttft_ns, tbt_ns = bounded
    counted = fluidity(times_ns, submit_ns, ttft_ns, tbt_ns)
    area = qoe_area_step(times_ns, submit_ns, ttft_ns, m.benefit.reader_ns_per_token)
    return None if counted is None or area is None else Experience(counted, area)


def fluidity_of(x: Exchange, m: Measured, objectives: Objectives) -> Fluidity | None:
    """Return the token deadlines of a stream alone, by the bounds that `experience_of` names."""
    bounded = _bounded(x, m, objectives)
    return None if bounded is None else fluidity(*bounded)


def _bounded(x: Exchange, m: Measured, objectives: Objectives) -> tuple[list[int], int, int, int] | None:
    """Return the stamps of the tokens, the time of submission, and the bounds of the first and later gaps."""
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
