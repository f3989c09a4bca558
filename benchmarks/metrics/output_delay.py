"""The output delay trick, replayed: holding tokens back improves tail TBT, and the reader waits as before.

A stream with stalls, as an engine makes it that lets new prefills interrupt decoding, is delivered at once
and then paced (q_1 = t_1, q_i = max(t_i, q_(i-1) + pace)). Prints a table and draws `output_delay.svg`:
deterministic, no network, nothing needed beyond llmtap itself.

    python benchmarks/metrics/output_delay.py [--svg FILE] [--seed N]

Exit 1 if the claim does not hold: for paces up to the reader's, P99 TBT must not rise and user idle latency
must not move. Source: smooth goodput paper, 3.4 and 5.3 (figure 8).
"""

import argparse
import random
import sys
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from llmtap.metrics.deadlines import READER_NS_PER_TOKEN, Benefit, user_idle_ns
from llmtap.metrics.latency import tbc_max_ns, tbc_ns
from llmtap.metrics.statistics import percentile

MS = 1_000_000
TTFT_MS, TOKENS, ITL_MS = 300, 400, 12
STALL_EVERY, STALL_MS = 25, (200, 900)
"""On average a prefill of another request interrupts every 25th token."""
TTFT_SLO_NS, TBT_SLO_NS = 500 * MS, 100 * MS


def output_delay_ns(times_ns: list[int], pace_ns: int) -> list[int]:
    """Return the delivery times: q_1 = t_1, q_i = max(t_i, q_(i-1) + pace)."""
    return list(accumulate(times_ns, lambda left_ns, t_ns: max(t_ns, left_ns + pace_ns)))


def stalling_stream(seed: int) -> list[int]:
    """Token times in ns from submit: 12 ms a token, some of them after another's prefill."""
    rng = random.Random(seed)
    t_ns, times = TTFT_MS * MS, []
    for _ in range(TOKENS):
        times.append(t_ns)
        t_ns += round(rng.gauss(ITL_MS, 1) * MS)
        if rng.random() < 1 / STALL_EVERY:
            t_ns += rng.randint(*STALL_MS) * MS
    return times


@dataclass(frozen=True, slots=True)
class Row:
    """One pace; ms unless named otherwise."""

    pace: float
    tbt_p50: float
    tbt_p99: float
    tbt_max: float
    user_idle: float
    benefit_tokens: float
    held_mean: float
    meets_slo: bool


def measure(times_ns: list[int], pace_ns: int) -> Row:
    """The stream's figures when it is delivered at that pace."""
    delivered = output_delay_ns(times_ns, pace_ns)
    gaps = sorted(tbc_ns(delivered))
    idle_ns = user_idle_ns(delivered, 0)
    benefit = Benefit().tokens(len(delivered), idle_ns)
    p50, p99 = percentile(gaps, 0.5), percentile(gaps, 0.99)
    assert idle_ns is not None and benefit is not None and p50 is not None and p99 is not None
    return Row(
        pace=pace_ns / MS,
        tbt_p50=p50 / MS,
        tbt_p99=p99 / MS,
        tbt_max=gaps[-1] / MS,
        user_idle=idle_ns / MS,
        benefit_tokens=benefit,
        held_mean=(sum(delivered) - sum(times_ns)) / len(times_ns) / MS,
        meets_slo=delivered[0] <= TTFT_SLO_NS and (tbc_max_ns(tbc_ns(delivered)) or 0) <= TBT_SLO_NS,
    )


def table(rows: list[Row]) -> str:
    """Markdown."""
    slo = f"TTFT {TTFT_SLO_NS // MS} + TBT {TBT_SLO_NS // MS}"
    columns = (
        "pace",
        "TBT P50",
        "TBT P99",
        "TBT max",
        "user idle",
        "benefit, tokens",
        "held back, mean",
        slo,
    )
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [
        f"| {row.pace:g} | {row.tbt_p50:.1f} | {row.tbt_p99:.1f} | {row.tbt_max:.1f} | {row.user_idle:.1f} |"
        f" {row.benefit_tokens:.1f} | {row.held_mean:.1f} | {'met' if row.meets_slo else 'missed'} |"
        for row in rows
    ]
    return "\n".join(lines)


# ---------------------------------------------------------------- the figure

WIDTH, HEIGHT, LEFT, TOP, PLOT_W, PLOT_H, GAP = 960, 400, 64, 48, 372, 280, 92
Points = list[tuple[float, float]]


class Panel:
    """One pair of axes at `x0`, from 0 to the given ends."""

    def __init__(self, x0: float, title: str, x_end: float, y_end: float, x_label: str, y_label: str) -> None:
        self.x0, self.x_end, self.y_end = x0, x_end, y_end
        bottom, centre, middle = TOP + PLOT_H, TOP + PLOT_H / 2, 'text-anchor="middle"'
        self.parts = [
            f'<text x="{x0}" y="{TOP - 18}" font-weight="bold">{title}</text>',
            f'<text x="{x0 + PLOT_W / 2}" y="{bottom + 40}" {middle}>{x_label}</text>',
            f'<text transform="translate({x0 - 46},{centre}) rotate(-90)" {middle}>{y_label}</text>',
        ]
        for i in range(5):
            x, y = x0 + PLOT_W * i / 4, bottom - PLOT_H * i / 4
            self.parts += [
                f'<path d="M{x0} {y}h{PLOT_W}" stroke="#ddd"/>',
                f'<text x="{x0 - 6}" y="{y + 4}" text-anchor="end">{y_end * i / 4:g}</text>',
                f'<text x="{x}" y="{bottom + 18}" {middle}>{x_end * i / 4:g}</text>',
            ]

    def line(self, points: Points, colour: str, dash: str = "") -> None:
        """A line through points in the units of the axes; what lies outside is left out."""
        shown = [
            f"{self.x0 + PLOT_W * x / self.x_end:.1f},{TOP + PLOT_H * (1 - y / self.y_end):.1f}"
            for x, y in points
            if 0 <= x <= self.x_end and 0 <= y <= self.y_end
        ]
        self.parts.append(
            f'<polyline points="{" ".join(shown)}" fill="none" stroke="{colour}" stroke-width="1.8"'
            f' stroke-dasharray="{dash}"/>'
        )

    def label(self, x: float, y: float, text: str, colour: str) -> None:
        px, py = self.x0 + PLOT_W * x / self.x_end, TOP + PLOT_H * (1 - y / self.y_end)
        self.parts.append(f'<text x="{px:.1f}" y="{py:.1f}" fill="{colour}">{text}</text>')


def figure(times_ns: list[int], sweep: list[Row]) -> str:
    """SVG: delivery over time, and the figures over the pace."""
    v_ms = READER_NS_PER_TOKEN / MS
    end_s = 24.0
    left = Panel(LEFT, "Delivery", end_s, TOKENS, "seconds since submit", "tokens delivered")
    paced = output_delay_ns(times_ns, READER_NS_PER_TOKEN)
    for times, colour in ((times_ns, "#1f77b4"), (paced, "#d62728")):
        steps = [(t / 1e9, float(i + k)) for i, t in enumerate(times) for k in (0, 1)]
        left.line(steps, colour)
    idle_s = (user_idle_ns(times_ns, 0) or 0) / 1e9
    left.line([(idle_s + i * v_ms / 1e3, float(i)) for i in range(TOKENS)], "#555", "5 4")
    left.label(1.2, TOKENS * 0.93, "as generated", "#1f77b4")
    left.label(11.6, TOKENS * 0.40, "paced at V", "#d62728")
    left.label(11.6, TOKENS * 0.33, "dashed: the reader, who waited", "#555")
    left.label(11.6, TOKENS * 0.27, f"{idle_s * 1e3:.0f} ms in all, either way", "#555")
    right = Panel(
        LEFT + PLOT_W + GAP, "What each pace does to the figures", 120, 1200, "pace, ms per token", "ms"
    )
    for name, colour in (("tbt_max", "#ff9896"), ("tbt_p99", "#d62728"), ("user_idle", "#2ca02c")):
        right.line([(row.pace, getattr(row, name)) for row in sweep], colour)
    right.line([(v_ms, 0), (v_ms, 1200)], "#555", "5 4")
    first = sweep[0]
    right.label(2, first.tbt_max + 30, "TBT max", "#ff9896")
    right.label(2, first.tbt_p99 - 60, "TBT P99", "#d62728")
    right.label(2, first.user_idle + 18, "user idle latency", "#2ca02c")
    right.label(v_ms + 1.5, 1120, f"V = {v_ms:g} ms", "#555")
    body = "\n".join(left.parts + right.parts)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return f'{head}<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'


def main() -> int:
    """Prints the table, writes the figure, and checks the claim."""
    parser = argparse.ArgumentParser(description="The output delay trick: a table and a figure.")
    parser.add_argument("--svg", type=Path, default=Path(__file__).with_name("output_delay.svg"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    times = stalling_stream(options.seed)
    print(table([measure(times, pace * MS) for pace in (0, 12, 25, 50, 60, 80, 100)]))
    sweep = [measure(times, pace * MS) for pace in range(121)]
    options.svg.write_text(figure(times, sweep), encoding="utf-8")
    print(f"\nfigure: {options.svg}", file=sys.stderr)
    fair = [row for row in sweep if row.pace * MS <= READER_NS_PER_TOKEN]
    holds = all(row.user_idle == fair[0].user_idle and row.tbt_p99 <= fair[0].tbt_p99 for row in fair)
    if not holds:
        print("the claim does not hold for this stream", file=sys.stderr)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
