"""Deadlines of tokens, the reader who waits for them, and what an answer is worth to that reader.

Seed 001 sees every objective as a deadline d_i for each token i, to be met by its time t_i (eq. 1). Three
policies set d_i: from the token before (eq. 2), one for all (eq. 3), and a reader's speed (eq. 4). The
longest delay behind the reader's deadlines is the user idle latency (eq. 6), from which follow benefit
(eq. 7) and smooth goodput (eq. 8).

The paper leaves open from where a reader's deadlines count and whether the first token has one of its own;
`origin_ns` (submit, or the first token's stamp) and `grace_tokens` say it. Ours is submit and 0: exactly the
time a reader, simulated, has nothing to read (`reader_wait_ns`). The paper's V i is `grace_tokens=1`.

Stamps and durations are ns of one clock; a reader's V is ns per token, though the paper calls it a speed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from operator import le, sub
from typing import Final

__all__ = [
    "ALPHA", "READER_NS_PER_TOKEN", "Benefit", "attainment", "e2e_deadlines_ns", "idle_ns", "meets_deadlines",
    "output_delay_ns", "reader_wait_ns", "reading_deadlines_ns", "request_goodput", "smooth_goodput",
    "token_goodput", "tokens_in_time", "ttft_tbt_deadlines_ns", "user_idle_ns",
]  # fmt: skip

READER_NS_PER_TOKEN: Final = 50_000_000
"""V of seed 001, eq. 4: a reader of 20 tokens per second (5.1) needs 50 ms for each."""
ALPHA: Final = 5.0
"""Weight of a second of waiting against one token (seed 001, 5.1)."""


# ---------------------------------------------------------------- the three policies


def ttft_tbt_deadlines_ns(times_ns: Sequence[int], origin_ns: int, ttft_ns: int, tbt_ns: int) -> list[int]:
    """Eq. 2: origin + TTFT for the first token, then always the token before + TBT."""
    return [origin_ns + ttft_ns, *(t_ns + tbt_ns for t_ns in times_ns[:-1])] if times_ns else []


def e2e_deadlines_ns(n: int, origin_ns: int, e2e_ns: int) -> list[int]:
    """Eq. 3: the same for each of `n` tokens, so that only the last can miss it first."""
    return [origin_ns + e2e_ns] * n


def reading_deadlines_ns(
    n: int, origin_ns: int, reader_ns_per_token: int = READER_NS_PER_TOKEN, grace_tokens: int = 0
) -> list[int]:
    """Eq. 4: when a reader who starts at `origin_ns` has read all tokens before the i-th.

    V (i - 1), or the paper's V i with `grace_tokens=1`.
    """
    first_ns = origin_ns + grace_tokens * reader_ns_per_token
    return [first_ns + i * reader_ns_per_token for i in range(n)]


def meets_deadlines(times_ns: Sequence[int], deadlines_ns: Sequence[int]) -> bool:
    """Eq. 1: every token at its deadline or before."""
    return tokens_in_time(times_ns, deadlines_ns) == len(times_ns)


def tokens_in_time(times_ns: Sequence[int], deadlines_ns: Sequence[int]) -> int:
    """How many tokens came at their deadline or before."""
    assert len(times_ns) == len(deadlines_ns)
    return sum(map(le, times_ns, deadlines_ns))


# ---------------------------------------------------------------- the reader


def idle_ns(times_ns: Sequence[int], deadlines_ns: Sequence[int]) -> int | None:
    """Eq. 6 to the letter, under any policy: max of t_i - d_i, negative if all came early.

    None without tokens.
    """
    late_ns: Iterable[int] = map(sub, times_ns, deadlines_ns)
    return max(late_ns, default=None)


def user_idle_ns(
    times_ns: Sequence[int],
    origin_ns: int | None,
    tokens: Sequence[int] | float = 1,
    reader_ns_per_token: int = READER_NS_PER_TOKEN,
    *,
    grace_tokens: int = 0,
    clamped: bool = True,
) -> int | None:
    """How long a reader who needs V per token waits with nothing to read, from `origin_ns` (submit) on.

    max over tokens i of (t_i - origin - V (i - 1)), never below 0 when `clamped`. `tokens` says how many
    tokens each chunk brings: one number for all of them, or one for each. All tokens of a chunk share its
    stamp, so only the first of each can decide. None without an origin or without output.

    Source: seed 001, eq. 4 and 6, in the reading that equals a simulated reader. With `grace_tokens=1` it is
    the paper's V i, smaller by V. With the first token's stamp as origin TTFT is forgiven.
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


def reader_wait_ns(
    times_ns: Sequence[int], origin_ns: int, reader_ns_per_token: int = READER_NS_PER_TOKEN
) -> int:
    """All the waits of a simulated reader, added up: who starts at `origin_ns` and reads token by token.

    Equal to `user_idle_ns`; slower, and its proof.
    """
    free_ns, waited_ns = origin_ns, 0
    for t_ns in times_ns:
        if t_ns > free_ns:
            waited_ns += t_ns - free_ns
            free_ns = t_ns
        free_ns += reader_ns_per_token
    return waited_ns


def output_delay_ns(times_ns: Sequence[int], pace_ns: int) -> list[int]:
    """The output delay trick: q_1 = t_1, q_i = max(t_i, q_(i-1) + pace). Nothing leaves sooner than it came.

    It flattens the time between tokens, and for a pace up to V a reader waits exactly as long as before.

    Source: seed 001, 3.4 and 5.3.
    """
    return list(accumulate(times_ns, lambda left_ns, t_ns: max(t_ns, left_ns + pace_ns)))


# ---------------------------------------------------------------- what it is worth


@dataclass(frozen=True, slots=True)
class Benefit:
    """The parameters of eq. 7, which stand beside every figure made with them."""

    alpha: float = ALPHA
    """Weight of f against one token."""
    reader_ns_per_token: int = READER_NS_PER_TOKEN
    """V: ns that the reader needs for a token."""
    f: str | Callable[[float], float] = "seconds"
    """`seconds`: f(l) = l in seconds; `tokens`: f(l) = l / V, the tokens that could have been read
    meanwhile; or a function of l in seconds."""

    def __post_init__(self) -> None:
        if self.reader_ns_per_token <= 0:
            raise ValueError("a reader's time per token is above 0")
        if isinstance(self.f, str) and self.f not in ("seconds", "tokens"):
            raise ValueError(f"f is 'seconds', 'tokens' or a function, got {self.f!r}")

    @classmethod
    def at_speed(
        cls, tokens_per_s: float, alpha: float = ALPHA, f: str | Callable[[float], float] = "seconds"
    ) -> "Benefit":
        """For a reader of so many tokens per second. Raises ValueError unless that is above 0."""
        if not tokens_per_s > 0:
            raise ValueError(f"a reader's speed is above 0 tokens per second, got {tokens_per_s!r}")
        return cls(alpha, round(1e9 / tokens_per_s), f)

    def tokens(self, output_tokens: int | None, idle_ns: float | None) -> float | None:
        """n - alpha f(l): what an answer is worth, in tokens; below 0 when the wait outweighs them.

        None where the tokens or the wait are not known. Source: seed 001, eq. 7.
        """
        if output_tokens is None or idle_ns is None:
            return None
        if self.f == "seconds":
            return output_tokens - self.alpha * idle_ns / 1e9
        if self.f == "tokens":
            return output_tokens - self.alpha * idle_ns / self.reader_ns_per_token
        assert callable(self.f)
        return output_tokens - self.alpha * self.f(idle_ns / 1e9)

    @property
    def speed(self) -> float:
        """Tokens per second of the reader."""
        return 1e9 / self.reader_ns_per_token

    @property
    def f_text(self) -> str:
        """f in words, for people."""
        if callable(self.f):
            return f"f(l) = {getattr(self.f, '__name__', 'a function')}(l in seconds)"
        return "f(l) = l in seconds" if self.f == "seconds" else "f(l) = l / V in tokens"


def smooth_goodput(benefits: Iterable[float], seconds: float) -> float | None:
    """Eq. 8: sum of benefits / T, tokens per second; None for no time."""
    return _per_second(sum(benefits), seconds)


def token_goodput(verdicts: Iterable[bool], tokens: Iterable[int], seconds: float) -> float | None:
    """Eq. 5: tokens of the answers that met all their deadlines / T; None for no time."""
    return _per_second(sum(n for met, n in zip(verdicts, tokens, strict=True) if met), seconds)


def request_goodput(verdicts: Iterable[bool], seconds: float) -> float | None:
    """Answers that met all their bounds / T; None for no time. Source: seed 002, DistServe."""
    return _per_second(sum(verdicts), seconds)


def attainment(verdicts: Sequence[bool]) -> float | None:
    """The share of answers that met their objectives; None when none counted. Source: seed 001, 2.2."""
    return sum(verdicts) / len(verdicts) if verdicts else None


def _per_second(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None
