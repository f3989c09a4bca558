"""Two rivals of user idle latency, under names that promise no more than was checked.

Source: Etalon (arXiv:2407.07000, docs and code of project-etalon/etalon); the area ratio is in the manner
of Andes (arXiv:2404.16283), whose text was not at hand, and so does not carry its name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from llmtap.exchange.exchange import Exchange
from llmtap.metrics.latency import Measured, output_times_ns
from llmtap.metrics.objectives import Objectives

__all__ = ["Experience", "Fluidity", "experience_of", "fluidity", "qoe_area_step"]


@dataclass(frozen=True, slots=True)
class Fluidity:
    """Token deadlines of one answer, met and missed."""

    tokens: int
    in_time: int
    missed: int
    """As Etalon's code counts: every deadline that passed during a late gap."""

    @property
    def doc(self) -> float:
        """The fluidity index of Etalon's documentation: tokens in time / tokens."""
        return self.in_time / self.tokens

    @property
    def deadlines(self) -> int:
        """All deadlines, as Etalon's code counts them: met and missed."""
        return self.in_time + self.missed

    @property
    def code(self) -> float:
        """The fluidity index of Etalon's code: 1 - missed / deadlines."""
        return 1 - self.missed / self.deadlines


def fluidity(times_ns: Sequence[int], origin_ns: int, ttft_ns: int, tbt_ns: int) -> Fluidity | None:
    """How many token deadlines were met when slack is carried over; None without tokens.

    A token is in time when its gap is at most its bound plus the slack; what it leaves over is the next
    one's slack. A late one leaves none. The two indices differ as soon as one gap spans several deadlines.

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
    """Area under what a reader has digested / area under what was expected, 0 to 1; None without tokens.

    Token i is expected at e_i = TTFT + (i - 1) V after the origin. It is digested at c_i: when it has come
    and V after the one before, but not before e_i. Both areas are of steps and end at the later of the last
    expected and the last digested token, H: sum(H - c_i) / sum(H - e_i), or 1 where that divides by 0.
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
    """Both, of one answer under one set of objectives."""

    fluidity: Fluidity
    qoe_area_step: float


def experience_of(x: Exchange, m: Measured, objectives: Objectives) -> Experience | None:
    """Both figures of a stream, by the bounds of its objectives and the reader of its user idle latency.

    The first token's bound is `ttft`, or else `ttft_any`; that of the others `tbc_max`, or else `tpot`.
    None without the two, without output or submit. A chunk whose tokens are not known counts as one token.
    """
    bounds = dict(objectives.bounds)
    ttft_ns = bounds.get("ttft", bounds.get("ttft_any"))
    tbt_ns = bounds.get("tbc_max", bounds.get("tpot"))
    submit_ns = x.timeline.submit_ns
    if ttft_ns is None or tbt_ns is None or submit_ns is None:
        return None
    times_ns = output_times_ns(x.timeline.events)
    if m.tokens_per_chunk is not None and m.itl_even_ns is not m.tbc_ns:
        times_ns = list(chain.from_iterable(map(repeat, times_ns, m.tokens_per_chunk)))
    counted = fluidity(times_ns, submit_ns, ttft_ns, tbt_ns)
    area = qoe_area_step(times_ns, submit_ns, ttft_ns, m.benefit.reader_ns_per_token)
    return None if counted is None or area is None else Experience(counted, area)
