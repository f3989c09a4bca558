"""Are arrivals what they are said to be? Theory against what is generated, for each process.

    .venv/bin/python benchmarks/load/arrivals.py [--seed 42] [--seconds 600] [--json FILE]

Nothing is sent: these are the plans that `llmtap replay` sends by. For each process the table has the number
of arrivals in the time, their mean gap, the gaps' coefficient of variation, their Kolmogorov-Smirnov distance
to the law that they should have, and their strongest autocorrelation of 20 lags: what theory says, with the
bounds that chance leaves once in a thousand times (99.9 %), and what came. Where the rate changes, gaps are
measured by the rate's own clock (the integral of the rate), by which they are exponential with mean 1.
`uniform` leaves nothing to chance: there the largest distance from where theory puts an arrival is told.

Theory is worked out here, apart from the code that draws. Each row has a seed of its own: the first has
--seed, the next one more. ARRIVALS.md has the last table. Exit code 1 says that a figure is beyond its bound.
"""

import argparse
import json
import math
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from llmtap.metrics.statistics import strongest_autocorrelation
from llmtap.units import NS_PER_S, format_ns
from llmtap.workload.arrivals import Arrivals, parse_arrivals

Z_999 = 3.2905267314919255
KS_999 = 1.9495
"""Times 1 / sqrt(n)."""
_LAGS = 20
AUTO_999 = 4.06
"""Times 1 / sqrt(n): the largest of 20, each at 99.995 % (Bonferroni)."""

Law = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Case:
    """A process as it is written, and theory's word on it."""

    text: str
    rate_rps: float | None
    expected: Law
    """Arrivals before so many seconds."""
    shape: float = 1.0
    """Of gamma gaps; 1 is exponential."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. Each figure is what came, what theory says, and by how much it may be off."""

    arrivals: str
    rate_rps: float | None
    n: tuple[int, float, float]
    gap_mean: tuple[float, float, float] | None = None
    cv: tuple[float, float, float] | None = None
    ks: tuple[float, float] | None = None
    """And its bound."""
    autocorrelation: tuple[float, int, float] | None = None
    """Its lag, and its bound."""
    far_ns: int | None = None
    """Of `uniform`: the largest distance from theory."""

    @property
    def holds(self) -> bool:
        """All is within its bounds."""
        pairs = [
            abs(got - said) <= room for got, said, room in filter(None, (self.n, self.gap_mean, self.cv))
        ]
        if self.ks is not None:
            pairs.append(self.ks[0] <= self.ks[1])
        if self.autocorrelation is not None:
            pairs.append(abs(self.autocorrelation[0]) <= self.autocorrelation[2])
        if self.far_ns is not None:
            pairs.append(self.far_ns <= 1)
        return all(pairs)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--seconds", type=float, default=600.0, help="of each plan (600)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    rows = []
    for seed, case in enumerate(cases(), args.seed):
        arrivals = parse_arrivals(case.text, rate_rps=case.rate_rps, seed=seed)
        rows.append(row_of(case, arrivals, args.seconds))
    print(table(rows))
    print(
        f"\n{args.seconds:g} s each, seeds from {args.seed}; Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}."
    )
    beyond = [row.arrivals for row in rows if not row.holds]
    print(f"Beyond their bounds: {', '.join(beyond) or 'none'}.")
    if args.json:
        found = {"seed": args.seed, "seconds": args.seconds, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if beyond else 0


# ---------------------------------------------------------------- theory


def cases() -> list[Case]:
    def flat(rate: float) -> Law:
        return lambda t: rate * t

    bursts = on_off(92, 7, 2, 8)
    silent = on_off(120, 0, 2, 8)
    stairs = steps((10, 120), (40, 120), (20, 120), (0, 60), (30, 180))
    return [
        Case("poisson", 240, flat(240)),
        Case("poisson", 24, flat(24)),
        Case("uniform", 24, flat(24)),
        Case("gamma:burstiness=4", 24, flat(24), 4),
        Case("gamma:burstiness=1", 24, flat(24), 1),
        Case("gamma:burstiness=0.5", 24, flat(24), 0.5),
        Case("gamma:cv=3", 24, flat(24), 1 / 9),
        Case("onoff:on=2s,off=8s,idle=7", 24, bursts),
        Case("onoff:on=2s,off=8s", 24, silent),
        Case("ramp:from=1,to=50,over=500s", None, ramp(1, 50, 500)),
        Case("steps:10x120s,40x120s,20x120s,0x60s,30x180s", None, stairs),
        Case("diurnal:amplitude=0.8,period=300s", 24, diurnal(24, 0.8, 300)),
    ]


def on_off(on_rps: float, off_rps: float, on_s: float, off_s: float) -> Law:
    def expected(t: float) -> float:
        cycles, rest = divmod(t, on_s + off_s)
        per_cycle = on_rps * on_s + off_rps * off_s
        return cycles * per_cycle + on_rps * min(rest, on_s) + off_rps * max(0.0, rest - on_s)

    return expected


def ramp(from_rps: float, to_rps: float, over_s: float) -> Law:
    def expected(t: float) -> float:
        x = min(t, over_s)
        return from_rps * x + (to_rps - from_rps) * x * x / (2 * over_s) + to_rps * max(0.0, t - over_s)

    return expected


def steps(*given: tuple[float, float]) -> Law:
    def expected(t: float) -> float:
        found = 0.0
        for rate, length in given:
            found += rate * min(t, length)
            t = max(0.0, t - length)
        return found + given[-1][0] * t

    return expected


def diurnal(mean_rps: float, amplitude: float, period_s: float) -> Law:
    turn = 2 * math.pi / period_s
    return lambda t: mean_rps * (t + amplitude / turn * (1 - math.cos(turn * t)))


def gamma_law(shape: float, x: float) -> float:
    """Share of gamma values of scale 1 below x, by its series (Abramowitz and Stegun 6.5.29)."""
    if x <= 0:
        return 0.0
    term = math.exp(shape * math.log(x) - x - math.lgamma(shape + 1))
    total, k = 0.0, 0
    while term > 1e-17 * total and k < 10_000:
        total += term
        k += 1
        term *= x / (shape + k)
    return min(1.0, total)


# ---------------------------------------------------------------- what came


def row_of(case: Case, arrivals: Arrivals, seconds: float) -> Row:
    times = []
    for at_ns in arrivals:
        if at_ns >= seconds * NS_PER_S:
            break
        times.append(at_ns)
    text, mean = str(arrivals.describe()["arrivals"]), case.expected(seconds)
    if text == "uniform":
        # Arrival k is where theory has k: before it fewer, a ns later as many (but for the floats of theory).
        far = max(off_ns(case.expected, k, at_ns) for k, at_ns in enumerate(times))
        return Row(text, case.rate_rps, (len(times), mean, 1.0), far_ns=far)
    own = [0.0, *(case.expected(at_ns / NS_PER_S) for at_ns in times)]
    gaps = [b - a for a, b in pairwise(own)]
    n, k = len(gaps), case.shape
    cv = 1 / math.sqrt(k)
    gap = sum(gaps) / n
    spread = math.sqrt(sum((g - gap) ** 2 for g in gaps) / n) / gap
    # A gap is known to a ns, which is much where bursts are steep: of gaps with a CV of 3 a tenth is shorter.
    ns = 0.0 if k == 1 else (case.rate_rps or 0.0) / NS_PER_S
    far_ks = max(
        max((i + 1) / n - gamma_law(k, (g + ns) * k), gamma_law(k, (g - ns) * k) - i / n)
        for i, g in enumerate(sorted(gaps))
    )
    strongest = strongest_autocorrelation([round(g * NS_PER_S) for g in gaps], _LAGS)
    assert strongest is not None
    # A renewal process that begins with a gap: (cv^2 - 1) / 2 more than the rate says, in the long run.
    return Row(
        text,
        case.rate_rps,
        n=(len(times), mean + (cv * cv - 1) / 2, Z_999 * cv * math.sqrt(mean)),
        gap_mean=(gap, 1.0, Z_999 * cv / math.sqrt(n)),
        cv=(spread, cv, Z_999 * math.sqrt((k + 1) / (2 * n)) / k),
        ks=(far_ks, KS_999 / math.sqrt(n)),
        autocorrelation=(strongest.value, strongest.lag, AUTO_999 / math.sqrt(n)),
    )


def off_ns(expected: Law, k: int, at_ns: int) -> int:
    """By how many ns arrival k is away from where `expected` reaches k."""
    near = 1e-9 * max(1, k)
    for off in range(1_000):
        early, late = (at_ns - off) / NS_PER_S, (at_ns + off + 1) / NS_PER_S
        if expected(max(0.0, early)) <= k + near and expected(late) >= k - near:
            return off
    return 1_000


def table(rows: list[Row]) -> str:
    lines = [
        "| process | rate/s | arrivals: theory | came | mean gap | CV: theory | came | KS (bound) | strongest autocorrelation (bound) | |",  # noqa: E501
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        n, said, room = row.n
        cells = [f"`{row.arrivals}`", "-" if row.rate_rps is None else f"{row.rate_rps:g}"]
        if row.far_ns is not None:
            cells += [f"{said:,.1f}", f"{n:,}", "-", "-", "-", "-", f"off by {format_ns(row.far_ns)} at most"]
        else:
            assert row.gap_mean and row.cv and row.ks and row.autocorrelation
            value, lag, most = row.autocorrelation
            cells += [
                f"{said:,.0f} +- {room:,.0f}",
                f"{n:,}",
                f"{row.gap_mean[0]:.4f} (1 +- {row.gap_mean[2]:.4f})",
                f"{row.cv[1]:.3f} +- {row.cv[2]:.3f}",
                f"{row.cv[0]:.3f}",
                f"{row.ks[0]:.4f} ({row.ks[1]:.4f})",
                f"{value:+.3f} at {lag} ({most:.3f})",
            ]
        lines.append("| " + " | ".join([*cells, "" if row.holds else "**beyond**"]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
