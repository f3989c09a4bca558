"""Model of a reader who waits for tokens: deadlines, user idle latency (total wait), benefit of an answer.

`user_idle_ns` computes the wait from the times of the tokens. `Benefit` holds the reader's speed and the
other parameters, and computes the value of an answer in tokens from its output tokens and the wait.
`latency.py` computes wait and value for each exchange. The latency bounds of an SLO are in `objectives.py`.

The smooth goodput paper does not define the start of the deadlines; here, `origin_ns` (time of submission, or
of the first token) and `grace_tokens` do. By default (submission and 0), the result is the total time in
which the reader has nothing to read. With `grace_tokens=1`, token i is due at V i, as in the paper; V is the
reader's time per token in ns.

Source: smooth goodput paper, eq. 4, 6, 7 and 8.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from operator import sub
from typing import Final

from llmtap.metrics.idle_cost import parse_idle_cost

READER_NS_PER_TOKEN: Final = 50_000_000
"""Default time that a reader needs for a token, 1/20 s: V of the smooth goodput paper (eq. 4; 5.1)."""
ALPHA: Final = 5.0
"""Default number of tokens whose value a second of waiting cancels (smooth goodput paper, 5.1)."""


def user_idle_ns(
    times_ns: Sequence[int],
    origin_ns: int | None,
    tokens: Sequence[int] | float = 1,
    reader_ns_per_token: int = READER_NS_PER_TOKEN,
    *,
    grace_tokens: int = 0,
    clamped: bool = True,
) -> int | None:
    """Return the total time in ns, from `origin_ns` on, in which the reader has nothing to read.

    It is the maximum over all tokens i of (t_i - origin - V (i - 1 + g)), where V is `reader_ns_per_token`
    and g is `grace_tokens`. A reader who has waited reads all later tokens later, so the largest delay
    includes all earlier waits. Negative, without `clamped`: each token came at least this time too early.
    `tokens`: number of tokens in each chunk, or one number for all chunks. None without an origin or without
    output. Source: smooth goodput paper, eq. 4 and 6.
    """
    if origin_ns is None or not times_ns:
        return None
    start_ns = origin_ns + grace_tokens * reader_ns_per_token
    if isinstance(tokens, int | float):
        due_ns: Iterable[int] = count(start_ns, round(reader_ns_per_token * tokens))
    else:
        read_before = accumulate(tokens, initial=0)
        due_ns = (start_ns + reader_ns_per_token * i for i in read_before)
    late_ns: Iterable[int] = map(sub, times_ns, due_ns)
    longest_ns = max(late_ns)
    return max(0, longest_ns) if clamped else longest_ns


@dataclass(frozen=True, slots=True)
class Benefit:
    """Value of an answer for a reader: n - alpha f(l), with n output tokens and a wait of l (eq. 7)."""

    alpha: float = ALPHA
    """Number of tokens that one unit of the cost f(l) outweighs."""
    reader_ns_per_token: int = READER_NS_PER_TOKEN
    """V: time in ns that the reader needs for a token."""
    f: str = "seconds"
    """Cost f(l) of a wait: a name in `idle_cost.IDLE_COSTS`, or an expression with l, V and n."""
    grace_tokens: int = 0
    """Number of tokens whose reading time is added to all deadlines; 1: token i is due at V i (eq. 4)."""

    def __post_init__(self) -> None:
        if self.reader_ns_per_token <= 0:
            raise ValueError(f"reader_ns_per_token: expected more than 0, got {self.reader_ns_per_token} ns")
        parse_idle_cost(self.f)

    @classmethod
    def at_speed(
        cls, tokens_per_s: float, alpha: float = ALPHA, f: str = "seconds", grace_tokens: int = 0
    ) -> "Benefit":
        """Return the parameters for a reader who reads `tokens_per_s` tokens per second.

        Raises ValueError unless `tokens_per_s` is above 0.
        """
        if not tokens_per_s > 0:
            raise ValueError(f"tokens_per_s: expected more than 0 tokens per second, got {tokens_per_s!r}")
        return cls(alpha, round(1e9 / tokens_per_s), f, grace_tokens)

    def tokens(self, output_tokens: int | None, idle_ns: float | None) -> float | None:
        """Return the value of an answer in tokens, n - alpha f(l): below 0 if the wait costs more than n.

        None if tokens or wait are unknown, or if f has no finite value. Source: smooth goodput paper, eq. 7.
        """
        if output_tokens is None or idle_ns is None:
            return None
        cost = parse_idle_cost(self.f).cost(idle_ns / 1e9, self.reader_ns_per_token / 1e9, output_tokens)
        return None if cost is None else output_tokens - self.alpha * cost

    @property
    def speed(self) -> float:
        """Reading speed in tokens per second."""
        return 1e9 / self.reader_ns_per_token

    @property
    def f_text(self) -> str:
        return f"f(l) = {parse_idle_cost(self.f).text}"

    @property
    def text(self) -> str:
        """Description of all parameters, for the tables of reports."""
        return f"{self.speed:g} tokens/s, alpha {self.alpha:g}, {self.f_text}, due {self.due_text}"

    @property
    def due_text(self) -> str:
        """Deadline of token i after submission, as a formula with V and i."""
        return {0: "V(i-1)", 1: "V i"}.get(self.grace_tokens, f"V(i+{self.grace_tokens - 1})")
