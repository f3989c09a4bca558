"""Turn the JSON of a capture into tables for a terminal: its summary, or its integrity.

`llmtap report` calls `render_capture` (latencies, SLO classes, workload, silences, groups) and
`render_integrity` (exchanges present and missing, by capture and relay) with the public JSON that it prints
with `--json` and `--integrity --json`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import RenderableType

from llmtap.errors import printable
from llmtap.report.document import Note, Table
from llmtap.report.first_token import phase_table
from llmtap.report.gates import requirement_rows, requirements_blocks
from llmtap.report.render import terminal
from llmtap.report.summary import summary_blocks
from llmtap.report.values import MARK, at, count_with_noun, counts_text
from llmtap.units import format_bytes

_GROUPS_SHOWN: Final = 20
_GROUP_COLUMNS: Final = (
    ("TTFT p50", "ttft", "p50"),
    ("TTFT p99", "ttft", "p99"),
    ("TBC p99", "tbc", "p99"),
    ("E2E p50", "e2e", "p50"),
)
_NAME_CHARS: Final = 40
_MISSING_SHARE_MAX: Final = 0.01
"""Share of missing exchanges above which figures are possibly biased: the missing exchanges can be of one
kind, such as long ones, or those of the busiest minute."""
_UNREADABLE_SHOWN: Final = 20
_OPEN_SHOWN: Final = 3
_Json = Mapping[str, Any]


def render_capture(summary: _Json) -> RenderableType:
    blocks: list[Note | Table] = [Note(line, "bold") for line in _heading_lines(summary)]
    blocks += [*summary_blocks(summary), *map(Note, _workload_lines(summary.get("workload") or {}))]
    blocks += _silence_blocks(summary.get("silences") or {})
    if (phases := phase_table(summary)) is not None:
        blocks += [Note(""), phases]
    if summary.get("integrity"):
        blocks.append(Note(f"integrity  {_integrity_text(summary['integrity'])}"))
    blocks += map(Note, _unreadable_lines(at(summary, "capture", "broken") or ()))
    for label, groups in (summary.get("by") or {}).items():
        blocks += [Note(""), _group_table(label, groups)]
        if len(groups) > _GROUPS_SHOWN:
            blocks.append(Note(f"and {len(groups) - _GROUPS_SHOWN:,} more (--json has up to 1,000)"))
    blocks += requirements_blocks(requirement_rows(summary))
    return terminal(blocks)


def _heading_lines(summary: _Json) -> Iterator[str]:
    capture, window = summary.get("capture") or {}, summary.get("window") or {}
    parts = [f"{capture.get('rows', 0):,} exchanges"]
    if capture.get("back_rows"):
        parts.append(f"and {capture['back_rows']:,} behind the gateway (--by side)")
    if "files" in capture:
        spools = f" ({capture['spools']:,} still in the spool)" if capture.get("spools") else ""
        parts.append(f"{count_with_noun(capture['files'], 'file')}{spools}, {format_bytes(capture['bytes'])}")
    if len(capture.get("captures") or ()) > 1:
        parts.append(f"{len(capture['captures']):,} captures, summed up as one")
    for name, title in (("source", "from"), ("level", "level"), ("tap_version", "llmtap")):
        if capture.get(name):
            parts.append(f"{title} {', '.join(capture[name])}")
    yield " · ".join(parts)
    if window.get("start"):
        yield f"{window['start']} to {window['end']}"


def _workload_lines(workload: _Json) -> Iterator[str]:
    arrivals = workload.get("arrivals") or {}
    if arrivals.get("rate_rps") is not None:
        # Show the rate of arrivals too: the summary's rate is of the exchanges that ended.
        span = f"{_duration_text(arrivals['seconds'])}, first to last"
        parts = [f"{arrivals['rate_rps']:.3g} req/s arrived in {span}"]
        if arrivals["gap_cv"] is not None:
            parts.append(f"CV of gaps {arrivals['gap_cv']:.3g}")
        yield "arrivals   " + " · ".join(parts)
    for name in ("input", "output"):
        figures = workload.get(f"{name}_tokens") or {}
        if figures.get("n"):
            shown = " · ".join(f"{p} {figures[p]:,.0f}" for p in ("p50", "p90", "p99", "max"))
            source = counts_text(figures["source"]) or "-"
            yield f"{name:10} {figures['mean']:,.0f} tokens mean · {shown} · by {source}"
    for prefix in workload.get("prefix") or ():
        ratio = f"{prefix['hits']:,} of {prefix['blocks']:,} blocks"
        size = f"{prefix['block_size'] or '?'} {prefix['unit'] or ''}".strip()
        yield f"prefixes   {prefix['share']:.1%} shared, in a cache without end: {ratio} of {size}"
    if sessions := workload.get("sessions"):
        yield from _session_lines(sessions)


def _session_lines(sessions: _Json) -> Iterator[str]:
    turns = sessions["turns"]
    parts = [
        f"{sessions['n']:,} conversations",
        f"turns mean {turns['mean']:.3g}, p90 {turns['p90']:.3g}, max {turns['max']:,.0f}",
        f"{sessions['single_turn_share']:.1%} of one turn",
    ]
    if sessions["tool_turn_share"] is not None:
        parts.append(f"{sessions['tool_turn_share']:.1%} of turns by tools")
    yield "sessions   " + " · ".join(parts)
    for author, title in (("human", "people"), ("tool", "tools")):
        times = sessions["think"].get(author) or {}
        if times.get("n"):
            spread = ", ".join(f"{name} {_duration_text(times[name])}" for name in ("p50", "p90", "p99"))
            yield f"think time {title}: {spread} (n {times['n']:,})"


_WAITS: Final = {"first_token": "first token", "next_token": "next token"}
_SILENCE_HEADS: Final = (
    "silent for",
    "waits for",
    "silences",
    "went on",
    "share",
    "95 % interval",
    "observed for",
)


def _silence_blocks(silences: _Json) -> Iterator[Note | Table]:
    """Yield a table of the streams that continued after silences of several lengths, and time-outs."""
    kinds = {title: silences[kind] for kind, title in _WAITS.items() if at(silences, kind, "n")}
    if not kinds:
        return
    counts = "; ".join(
        f"{title}: {kind['n']:,}, {kind['n'] - kind['resumed']:,} of them until the end"
        for title, kind in kinds.items()
    )
    yield Note(f"silences   of {silences['streams']:,} streams, 0.1 s or longer, before the {counts}")
    rows = [
        [
            _duration_text(row["silence"]),
            title,
            f"{row['n']:,}",
            f"{row['resumed']:,}",
            *(
                ("-", "-", "-")
                if row["share"] is None
                else (_share_text(row["share"]), _limits_text(row), _duration_text(row["until"]))
            ),
        ]
        for title, kind in kinds.items()
        for row in kind["went_on"]
        if row["n"]
    ]
    if rows:
        yield Table(list(_SILENCE_HEADS), rows, nowrap=True)
    for title, kind in kinds.items():
        yield Note(f"time-out   {_timeout_text(title, kind['timeout'], silences['streams'])}")


def _timeout_text(title: str, timeout: _Json | None, streams: int) -> str:
    few = f"none suggested for the {title}, not enough silences"
    if timeout is None:
        return f"{few}: no 100 of one length were observed for twice as long"
    share = f"{_share_text(timeout['share'])} ({_limits_text(timeout)}) of the streams go on after"
    until = f"observed for {_duration_text(timeout['until'])}, n {timeout['n']:,}"
    silence = _duration_text(timeout["silence"])
    if not timeout["suggested"]:
        return f"{few}: {share} {silence} ({until}), and too few longer ones are known"
    ended = f"tokens ended {timeout['resumed']:,} longer silences of {streams:,} streams"
    return f"{silence} suggested for the {title}: {share} it ({until}); {ended}"


def _share_text(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.1f} %"


def _limits_text(row: _Json) -> str:
    return f"{_share_text(row['low'])} to {_share_text(row['high'])}"


def _group_table(label: str, groups: _Json) -> Table:
    rows = []
    for name, summary in list(groups.items())[:_GROUPS_SHOWN]:
        output, attained = summary["tokens"]["output"], at(summary, "goodput", "attainment")
        rows.append(
            [
                printable(name)[:_NAME_CHARS],
                f"{summary['n']:,}",
                *(_figure_text(summary["metrics"][metric], figure) for _, metric, figure in _GROUP_COLUMNS),
                "-" if output is None else f"{output:,}",
                "-" if attained is None else f"{attained:.1%}",
                f"{at(summary, 'goodput', 'not_judged') or 0:,}",
            ]
        )
    heads = [label, "n", *(title for title, _, _ in _GROUP_COLUMNS), "out tok", "SLO met", "not judged"]
    return Table(heads, rows, nowrap=True)


def _figure_text(figures: _Json, name: str) -> str:
    return _duration_text(figures[name]) + MARK * (name in figures["marks"])


def _duration_text(seconds: float | None) -> str:
    """Return a duration in the unit that suits its length: `12.3 ms`, `4.5 s`, `3 h 20 min`."""
    if seconds is None:
        return "-"
    if round(seconds * 1e3) < 1000:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def render_integrity(integrity: _Json) -> RenderableType:
    lines = [*_unreadable_lines(integrity["broken"])]
    for capture in integrity["captures"]:
        lines += _capture_lines(capture)
    style = "bold green" if integrity["ok"] else "bold red"
    return terminal([Note(_integrity_text(integrity), style), *map(Note, lines)])


def _integrity_text(integrity: _Json) -> str:
    captures = integrity["captures"]
    if not captures:
        return f"{integrity['unnumbered']:,} exchanges without numbers: missing ones cannot be counted"
    present, running, missing, unexplained, duplicates = (
        sum(capture[name] for capture in captures)
        for name in ("present", "running", "missing", "unexplained", "duplicates")
    )
    parts = [f"{present:,} present", *([f"{running:,} running"] if running else [])]
    if not missing:
        parts.append("none missing")
    else:
        share = missing / (present + missing)
        missing_text = f"{missing:,} missing ({_percent_text(share)})"
        if unexplained:
            at_least = "" if all(capture["exact"] for capture in captures) else "at least "
            parts.append(f"{missing_text}, {at_least}{unexplained:,} of them unexplained")
        else:
            parts.append(f"{missing_text}, why is known of all")
        if share > _MISSING_SHARE_MAX:
            parts.append("figures may be biased: these are not in them")
    if duplicates:
        parts.append(f"{duplicates:,} there twice")
    if integrity["broken"]:
        parts.append(f"{count_with_noun(len(integrity['broken']), 'file')} could not be read")
    if open_ := [capture["capture"] or "(no id)" for capture in captures if not capture["closed"]]:
        more = f" and {len(open_) - _OPEN_SHOWN:,} more" if len(open_) > _OPEN_SHOWN else ""
        parts.append(
            f"not closed: {', '.join(open_[:_OPEN_SHOWN])}{more}: still running, the meter or"
            " a relay was killed, or the meter ended before its application (all that it had measured is"
            " kept); exchanges that began later are not counted"
        )
    return " · ".join(parts)


def _unreadable_lines(files: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield a line for each file that could not be read."""
    for file in files[:_UNREADABLE_SHOWN]:
        yield f"broken     {file['file']}: {file['problem']}"
    if len(files) > _UNREADABLE_SHOWN:
        yield f"broken     and {len(files) - _UNREADABLE_SHOWN:,} more (--json names all)"


def _capture_lines(capture: _Json) -> Iterator[str]:
    closed = "" if capture["closed"] else ", not closed"
    counts = f"{capture['present']:,} present, {capture['missing']:,} missing{closed}"
    yield f"capture    {capture['capture'] or '(no id)'}: {counts}"
    not_kept = dict(capture["not_kept"])
    deleted = not_kept.pop("deleted", 0)
    if not_kept:
        yield f"  measured and not kept: {counts_text(not_kept)}"
    if deleted:
        yield f"  captured and deleted with the oldest files (capture.when_full): {deleted:,}"
    if capture["damaged"]:
        yield f"  damaged in the spool: {counts_text(capture['damaged'])}"
    if capture["meters"] > 1:
        yield f"  {capture['meters']:,} runs of the meter wrote it"
    if capture["unexplained"]:
        yield f"  unexplained: {'' if capture['exact'] else 'at least '}{capture['unexplained']:,}"
    for relay in capture["relays"]:
        if lost := relay.get("packets", {}).get("lost"):
            yield f"  packets lost: {lost:,}; an exchange whose request was lost is not counted"
        yield f"  relay {relay['relay']}: {relay['opened']:,} begun, {relay['present']:,} present"
        if relay["ranges"]:
            ranges = (f"{first}" if first == last else f"{first}-{last}" for first, last in relay["ranges"])
            running = f", running {relay['running']:,}" if relay["running"] else ""
            yield f"    missing {relay['missing']:,}{running}: {', '.join(ranges)}"
            known = [f"dropped {counts_text(relay['dropped'])}"] if relay["dropped"] else []
            known += [f"under way at its last word {relay['unsettled']:,}"] if relay["unsettled"] else []
            known += [f"begun after it {relay['since']:,}"] if relay["since"] else []
            if relay["unexplained"] and (deleted or not_kept):
                # The meter counts these exchanges for all relays together, not for each relay.
                by_meter = [counts_text(not_kept)] if not_kept else []
                by_meter += [f"in deleted files {deleted:,}"] if deleted else []
                known.append(f"by the meter, of all relays: {', '.join(by_meter)}")
            yield f"    accounted for: {', '.join(known) or 'nothing'}"
        if relay["duplicates"]:
            yield f"    there twice: {relay['duplicates']:,}"


def _percent_text(share: float) -> str:
    """Return a share in percent; a share above 0 is not rounded to 0 %, and one below 1 not to 100 %."""
    return "under 0.1%" if share < 0.001 else f"{min(share, 0.999):.1%}" if share < 1 else "all"
