"""The tables of accuracy.py, as Markdown: medians of the rounds; in bold columns the extremes, too."""

from __future__ import annotations

from statistics import median
from typing import Any

Json = dict[str, Any]

# Issue 6, "Must show".
TTFT_P99_ERROR_MS = {"closed-50": 1.0, "closed-200": 3.0, "closed-500": 10.0}
ITL_P99_ERROR_MS = 1.0
CPU_S_PER_1K_TOKENS = 0.02
RSS_MB = 200.0
ACHIEVED_MIN = 0.995
CV_OFF = 0.05

COST = "CPU s/1k tok: load, life, RSS MB (procs), others' %"


def report(result: Json) -> str:
    """Everything that is printed."""
    rows = Rows(result)
    tools = result["tools"].items()
    real_time = "at real-time priority" if result["real_time"] else "at ordinary priority"
    rounds = f"{result['rounds']} rounds, {result.get('took_s', 0) / 60:.0f} min"
    parts = [
        f"{result['when']}, {result['machine']}, server {real_time}, {rounds}",
        "\n".join(f"- {name} {tool['version']}; its ITL: {tool['itl']}" for name, tool in tools),
        "\n".join(f"- {name} was skipped: {why}" for name, why in result["skipped"].items()),
        *(rows.closed(), rows.opened(), rows.shapes(), rows.goals(), rows.confessions(), rows.failures()),
    ]
    return "\n\n".join(part for part in parts if part)


class Rows:
    """The trials of a run, by load and tool."""

    def __init__(self, result: Json) -> None:
        self.result = result
        self.good: dict[tuple[str, str], list[Json]] = {}
        for row in result["trials"]:
            if "failed" not in row:
                self.good.setdefault((row["case"], row["tool"]), []).append(row)

    def of(self, kinds: tuple[str, ...]) -> list[tuple[str, str, list[Json]]]:
        return [
            (case, tool, self.good[case, tool])
            for case in self.result["cases"]
            for tool in self.result["tools"]
            if case.startswith(kinds) and (case, tool) in self.good
        ]

    def closed(self) -> str:
        heads = (
            "streams, tool, truth TTFT p50/p99, reported p50, **reported p99**, **error of p99 ms**, "
            "truth ITL p99, reported ITL mean, p50, p99, **error of p99 ms**, req/s, "
        )
        lines = []
        for case, tool, rows in self.of(("closed",)):
            cells = [case.removeprefix("closed-"), tool]
            cells.append("/".join(f"{mid(rows, 'truth', 'ttft_ms', q):.1f}" for q in ("p50", "p99")))
            cells += [*ttft(rows), f"{mid(rows, 'truth', 'itl_ms', 'p99'):.1f}", *itl(rows)]
            lines.append([*cells, f"{mid(rows, 'rps'):.1f}", *cost(rows)])
        return section("Closed loop, all streams in step", heads + COST, lines)

    def opened(self) -> str:
        heads = (
            "asked req/s, tool, arrivals /s, **achieved/asked** (by chance +-), truth TTFT p99, "
            "reported p50, **reported p99**, **error of p99 ms**, reported ITL mean, p50, p99, "
            "**error of p99 ms**, **gap CV**, **KS** (95 %), autocorrelation @lag (95 %), "
        )
        lines = []
        for case, tool, rows in self.of(("open",)):
            chance = 100 * 1.96 / rows[0]["seen_requests"] ** 0.5
            cells = [case.removeprefix("open-"), tool, f"{mid(rows, 'arrivals', 'rate_rps'):.1f}"]
            cells.append(f"{ranged(rows, 'achieved', scale=100)} % ({chance:.1f})")
            cells += [f"{mid(rows, 'truth', 'ttft_ms', 'p99'):.1f}", *ttft(rows), *itl(rows)]
            cells.append(ranged(rows, "arrivals", "gap_cv", digits=2))
            limit = mid(rows, "arrivals", "ks", "limit_95")
            cells.append(f"{ranged(rows, 'arrivals', 'ks', 'distance', digits=3)} ({limit:.3f})")
            lines.append([*cells, strongest(rows), *cost(rows)])
        return section("Open loop, Poisson", heads + COST, lines)

    def shapes(self) -> str:
        heads = (
            "load, tool, truth gap mean, p50, p99, reported ITL mean, p50, **p99**, what it is, "
            "chunk gaps it has besides: p99"
        )
        lines = []
        for case, tool, rows in self.of(("stall", "chunks")):
            besides = [r["more"]["chunk_gaps_ms"]["p99"] for r in rows if "chunk_gaps_ms" in r["more"]]
            option = rows[0]["more"].get("itl_option")
            cells = [case, tool, *(f"{mid(rows, 'truth', 'itl_ms', q):.1f}" for q in ("mean", "p50", "p99"))]
            cells += [f"{mid(rows, 'reported', 'itl_ms', q):.2f}" for q in ("mean", "p50")]
            cells += [ranged(rows, "reported", "itl_ms", "p99"), self.result["tools"][tool]["itl"]]
            cells[-1] += f"; here option {option}" if option else ""
            lines.append([*cells, f"{median(besides):.1f}" if besides else ""])
        return section("One stall of 500 ms among 49 gaps; four tokens to a chunk", heads, lines)

    def goals(self) -> str:
        """What issue 6 asks of llmtap, and what came of it."""
        lines: list[list[str]] = []
        for case, tool, rows in self.of(("closed",)):
            if tool != "llmtap":
                continue
            what = "error of ITL p99, ms"
            lines.append(goal(f"{case}: {what}", rows, ("error", "itl_p99_ms"), ITL_P99_ERROR_MS))
            if limit := TTFT_P99_ERROR_MS.get(case):
                lines.append(goal(f"{case}: error of TTFT p99, ms", rows, ("error", "ttft_p99_ms"), limit))
                cpu, what = ("cpu_s_per_1k_tokens", "load"), "CPU s per 1,000 tokens"
                lines.append(goal(f"{case}: {what}", rows, cpu, CPU_S_PER_1K_TOKENS, digits=4))
            lines.append(goal(f"{case}: RSS of the tree, MB", rows, ("rss_mb",), RSS_MB, digits=0))
            lines.append(self._smallest(case))
        for case, tool, rows in self.of(("open-240",)):
            if tool == "llmtap":
                lines += arrival_goals(case, rows)
        return section("What issue 6 asks of llmtap", "what, limit, seen, met", lines)

    def _smallest(self, case: str) -> list[str]:
        errors = {
            tool: abs(median(row["error"]["ttft_p99_ms"] for row in self.good[case, tool]))
            for tool in self.result["tools"]
            if (case, tool) in self.good
        }
        ranks = sorted(errors, key=errors.__getitem__)
        told = ", ".join(f"{tool} {errors[tool]:.1f}" for tool in ranks[:3])
        return [f"{case}: smallest error of TTFT p99 of all", "first", told, yes(ranks[0] == "llmtap")]

    def confessions(self) -> str:
        """Where accuracy can't hold, llmtap has to say so: its verdict and error bar, beside the truth."""
        heads = (
            "load, round, its verdict, its uncertainty ms, error of TTFT p99 ms, of ITL p99 ms, within, "
            "its reasons"
        )
        lines = []
        for case, tool, rows in self.of(("",)):
            for row in rows:
                if tool != "llmtap":
                    continue
                more, error, width_ms = row["more"], row["error"], row["more"]["uncertainty_ms"]
                worst_ms = max(abs(error["ttft_p99_ms"]), abs(error["itl_p99_ms"]))
                cells = [case, str(row["round"] + 1), "valid" if more["valid"] else "not valid"]
                cells += [f"{width_ms:.1f}", f"{error['ttft_p99_ms']:+.1f}", f"{error['itl_p99_ms']:+.1f}"]
                lines.append([*cells, yes(worst_ms <= width_ms), "; ".join(more["findings"])])
        return section("What llmtap says of itself", heads, lines)

    def failures(self) -> str:
        lines = []
        for row in self.result["trials"]:
            where = f"- {row['case']}, round {row['round'] + 1}: {row['tool']}"
            if "failed" in row:
                said = row.get("stderr", "").strip().splitlines()[-1:]
                lines.append(f"{where} failed: {'; '.join([row['failed'], *said])}")
                continue
            if row["in_other_sessions"]:
                lines.append(f"{where} has {row['in_other_sessions']} processes in sessions of their own")
            asked, seen, whole = (row[name] for name in ("asked_requests", "seen_requests", "seen_whole"))
            if not asked == seen == whole == row["reported_requests"]:
                reported = row["reported_requests"]
                lines.append(
                    f"{where} was asked for {asked}, the server had {seen} ({whole} whole), "
                    f"it reports {reported}"
                )
        return "\n".join(["### Not as asked\n", *lines]) if lines else ""


def arrival_goals(case: str, rows: list[Json]) -> list[list[str]]:
    own = [row["of_schedule"]["ratio"] for row in rows if row["of_schedule"]]
    seen = f"{min(own):.4f} at least" if own else "its plan is not known"
    met = yes(bool(own) and min(own) >= ACHIEVED_MIN)
    lines = [[f"{case}: achieved / what its schedule asked", f">= {ACHIEVED_MIN}", seen, met]]
    cv = mid(rows, "arrivals", "gap_cv")
    lines.append([f"{case}: gap CV", f"1 +- {CV_OFF}", f"{cv:.3f}", yes(abs(cv - 1) <= CV_OFF)])
    ks, limit = mid(rows, "arrivals", "ks", "distance"), mid(rows, "arrivals", "ks", "limit_95")
    return [*lines, [f"{case}: KS distance", f"{limit:.4f}", f"{ks:.4f}", yes(ks <= limit)]]


def goal(what: str, rows: list[Json], path: tuple[str, ...], limit: float, digits: int = 2) -> list[str]:
    value = mid(rows, *path)
    return [what, f"{limit:g}", ranged(rows, *path, digits=digits), yes(abs(value) <= limit)]


def yes(met: bool) -> str:
    return "yes" if met else "**no**"


def values(rows: list[Json], *path: str) -> list[float]:
    found = []
    for row in rows:
        value: Any = row
        for key in path:
            value = value[key]
        found.append(float(value))
    return found


def mid(rows: list[Json], *path: str) -> float:
    return median(values(rows, *path))


def ranged(rows: list[Json], *path: str, digits: int = 1, sign: bool = False, scale: float = 1) -> str:
    """Median (least to most)."""
    seen = [value * scale for value in values(rows, *path)]
    plus = "+" if sign else ""

    def told(value: float) -> str:
        return f"{value:{plus}.{digits}f}"

    return told(median(seen)) + (f" ({told(min(seen))}…{told(max(seen))})" if len(seen) > 1 else "")


def strongest(rows: list[Json]) -> str:
    """Of the round in the middle by size."""
    found = sorted((row["arrivals"]["autocorrelation"] for row in rows), key=lambda a: abs(a["value"]))
    of = found[len(found) // 2]
    return f"{of['value']:+.2f} @{of['lag']} ({of['limit_95']:.2f})"


def ttft(rows: list[Json]) -> list[str]:
    """p50, p99 and the error of p99, as reported."""
    p50 = f"{mid(rows, 'reported', 'ttft_ms', 'p50'):.1f}"
    error = ranged(rows, "error", "ttft_p99_ms", sign=True)
    return [p50, ranged(rows, "reported", "ttft_ms", "p99"), error]


def itl(rows: list[Json]) -> list[str]:
    """Mean, p50, p99 and the error of p99, as reported."""
    found = [
        f"{mid(rows, 'reported', 'itl_ms', q):.{digits}f}"
        for q, digits in (("mean", 2), ("p50", 2), ("p99", 1))
    ]
    return [*found, ranged(rows, "error", "itl_p99_ms", sign=True)]


def cost(rows: list[Json]) -> list[str]:
    load, life = (mid(rows, "cpu_s_per_1k_tokens", part) for part in ("load", "life"))
    processes = max(row["processes"] for row in rows)
    shares = [row["others_share"] for row in rows if row["others_share"] is not None]
    others = f"{100 * median(shares):.0f}" if shares else ""
    return [f"{load:.4f}", f"{life:.4f}", f"{max(values(rows, 'rss_mb')):.0f} ({processes})", others]


def section(title: str, heads: str, lines: list[list[str]]) -> str:
    if not lines:
        return ""
    names = heads.split(", ")
    table = ["| " + " | ".join(cells) + " |" for cells in (names, *lines)]
    table.insert(1, "|" + "--|" * len(names))
    return "\n".join([f"### {title}\n", *table])
