"""Turn the JSON of a replay into a report for a terminal, as Markdown and as an HTML page.

All three reports are renderings of one document, made of the public JSON (`llmtap replay --json`); only the
page has charts (`replay_charts.py`), each with a table of its figures and a caption with their basis
(`replay_terms.py`). This module also renders the result of `llmtap selftest` and, for `llmtap report
CAPTURE`, the verdict of a replay whose result is stored next to its capture.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rich.console import RenderableType

from llmtap.metrics.catalogue import Surface, Unit, shown_on
from llmtap.report.document import (
    Block,
    ItemList,
    Note,
    ReportDocument,
    Section,
    Table,
    TableGroup,
    TermTable,
    Tile,
    Tiles,
    VerdictBox,
)
from llmtap.report.gates import requirement_rows, requirements_blocks
from llmtap.report.labels import LABELS_TITLE, labels_table
from llmtap.report.render import markdown, page_html, terminal
from llmtap.report.replay_charts import distribution_sections, time_sections
from llmtap.report.replay_terms import RATES, basis_texts, plan_rows
from llmtap.report.summary import bursts_caution, goodput_text, system_blocks, system_warnings
from llmtap.report.values import (
    FEW,
    MARK,
    METRIC_TITLES,
    at,
    count_with_noun,
    eq4_text,
    figure_text,
    figures_text,
    is_marked,
    milliseconds,
    number,
    percentile_titles,
)
from llmtap.units import format_share

_NOTHING_FOUND: Final = (
    "The load was sent as requested and on time, the sender had room, and all requests ended well."
)
_FINDINGS_IN_MS: Final = frozenset(
    {"clocks", "dispatch_lateness", "uncertainty", "ttft_uncertainty", "e2e_uncertainty"}
)
_FINDINGS_IN_SHARES: Final = frozenset(
    {
        "rate",
        "sender_cpu",
        "failed",
        "prompt_tokens",
        "left_out",
        "stopped",
        "estimated",
        "no_content",
        "silent",
        "whole",
        "host_limit",
    }
)
_FIGURES: Final = {
    "mean": "mean",
    "p50": "p50",
    "p90": "p90",
    "p95": "p95",
    "p99": "p99",
    "p999": "p99.9",
    "max": "max",
}
_TERMINAL_FIGURES: Final = {name: name for name in ("mean", "p50", "p90", "p99", "max")}
_FROM_SCHEDULE: Final = ("ttft", "e2e", "user_idle")
"""Metrics that are also measured from the scheduled time."""
_TURN_HEADS: Final = ("turn", "n", "TTFT p50", "TTFT p99", "E2E p50", "E2E p99")
_SHARES: Final = tuple(metric.name for metric in shown_on(Surface.REPORT) if metric.unit is not Unit.SECONDS)
_PHASES: Final = {"connect": "connect", "send": "send", "wait": "wait", "receive": "receive"}
_PAIR_HEADS: Final = (
    "",
    "pairs",
    "then p50",
    "now p50",
    "then p95",
    "now p95",
    "diff p5",
    "p50",
    "p95",
    "slower",
)
_PAIRS: Final = ("ttft", "tpot", "tbc_max", "e2e", "e2e_same_length", "elapsed")
_PAIRS_ABOUT: Final = (
    "Each row that was sent beside what it was when it was captured, seen from where that was done; a"
    " difference is now - then, of one row. Both sides of a line are the same rows: those that ended well on"
    " both. Nothing is tested here: rows of one load are not independent."
)
_BASIS_TERMS: Final[Mapping[str, Sequence[str]]] = {
    "figures-table": ("ITL", "tokens", "smooth goodput", "sender"),
    "baseline": ("warm-up",),
    "outcomes": (),
}
"""By section of the page: the terms of its caption, in addition to the terms that every caption has."""
_Json = Mapping[str, Any]


def replay_markdown(result: _Json) -> str:
    """Return the report as Markdown, without charts and without a final line end."""
    document = _document(result, _FIGURES)
    settings = Section("", "What was run", list(document.settings))
    return markdown(replace(document, sections=[*document.sections, settings]))


def replay_html(result: _Json) -> str:
    document = _document(result, _FIGURES)
    figures, *others = (section for section in document.sections if section.key != "system")
    for section in (figures, *others):
        basis = basis_texts(result, *_BASIS_TERMS[section.key])
        section.blocks.append(Note(" · ".join(basis), css="rests"))
    sections = [figures, *distribution_sections(result), *time_sections(result), *others]
    return page_html(replace(document, sections=sections), "replay_page.css")


def render_replay(result: _Json) -> RenderableType:
    """Return the report for a terminal, with the verdict at its end."""
    document = _document(result, _TERMINAL_FIGURES)
    verdict, *about = document.summary
    blocks = [block for section in document.sections for block in section.blocks]
    return terminal([Note(document.title, "bold"), *blocks, *document.settings, *about, verdict])


def render_verdicts(verdicts: Mapping[str, _Json]) -> RenderableType:
    return terminal(
        block
        for name, verdict in verdicts.items()
        for block in (Note(f"replay {name}", "bold"), _verdict_box(verdict))
    )


def render_selftest(result: _Json) -> RenderableType:
    rows = [
        [title, *figures_text(result[name], ("p50", "p99", "max"))]
        for name, title in (("ttft", "TTFT"), ("itl", "ITL"))
    ]
    load, n = result["load"], result["n"]
    ttft, itl = (milliseconds(result[name]["p99"]) for name in ("ttft", "itl"))
    lead = Note(
        f"99 % of TTFTs are within {ttft} ms of the truth at this load, of ITLs within {itl} ms", "bold"
    )
    if result["unmatched"]:
        lead = Note(f"NOT VALID: {result['unmatched']:,} of {n:,} answers could not be compared", "red")
    details = (
        f"{count_with_noun(load['streams'], 'stream')}, {number(load['tokens_per_second'])} tokens/s,"
        f" {number(load['duration'], 2)} s; {n - result['unmatched']:,} of {n:,} answers compared"
    )
    return terminal(
        [lead, Note(details), Table(["error, ms", "n", "p50", "p99", "worst"], rows, nowrap=True)]
    )


def _document(result: _Json, known: Mapping[str, str]) -> ReportDocument:
    """Return the report as a document without charts. `known`: names and titles of the statistics to show."""
    plan, system = result["plan"], at(result, "system", "summary") or {}
    caution, notes = bursts_caution(result), [*plan["notes"], *system_warnings(system)]
    summary: list[Block] = [
        _verdict_box(result["verdict"]),
        *([Note(caution, "yellow", lead="Caution:")] if caution else []),
        *(Note(f"Note: {note}") for note in notes),
        *requirements_blocks(requirement_rows(result)),
        Tiles(list(_headline_tiles(result))),
    ]
    sections = [Section("figures-table", "Figures", list(_figure_blocks(result, known)))]
    if result["baseline"] is not None:
        sections.append(Section("baseline", "Then and now", list(_baseline_blocks(result))))
    if system:
        sections.append(Section("system", "During the run", list(system_blocks(system))))
    if result["outcomes"]:
        sections.append(Section("outcomes", "Outcomes", list(_outcome_blocks(result))))
    settings: list[Block] = [TermTable(plan_rows(result)), Note(RATES)]
    name = plan.get("trace") or at(plan, "workload", "name") or "?"
    return ReportDocument(f"Replay of {name} to {plan['target']}", summary, settings, sections)


def _verdict_box(verdict: _Json) -> VerdictBox:
    items = [_finding_text(finding) for finding in verdict["findings"]]
    items += [f"Not checked: {text}" for text in verdict["unchecked"]]
    says = verdict.get("says") or ""
    text = f"{says[:1].upper()}{says[1:]}." if says else ""  # Results of old versions have no `says`.
    if verdict.get("failed"):
        lead = "FAILED."
    elif not verdict["valid"]:
        lead = "NOT VALID."
    elif verdict["partial"]:
        lead = "Partial."
    elif verdict["findings"]:
        lead = "Caution."
    else:
        lead, text = "Valid.", f"{text} {_NOTHING_FOUND}"
    return VerdictBox(verdict["valid"] and not verdict["partial"], lead, text, items)


def _finding_text(finding: _Json) -> str:
    """Return the sentence of a finding of the verdict, with the limit that was exceeded."""
    limit, kind = finding["limit"], finding["what"]
    if kind in _FINDINGS_IN_MS:
        limit_text = f"{milliseconds(limit)} ms"
    else:
        limit_text = f"{number(limit * 100)} %" if kind in _FINDINGS_IN_SHARES else number(limit)
    return f"{finding['says']} (limit {limit_text})"


def _headline_tiles(result: _Json) -> Iterator[Tile]:
    """Yield the large figures at the top of the page."""
    load, tokens, goodput = result["load"], result["tokens"], result.get("goodput") or {}
    if load["planned_rps"] is not None:
        planned = f"of {number(load['planned_rps'])} planned"
        planned += f", {format_share(load['in_time'], load['due'])} in time"
        yield Tile("Requests sent", f"{number(load['offered_rps'])}/s", planned)
    elif load.get("offered_rps") is not None:
        yield Tile("Requests sent", f"{number(load['offered_rps'])}/s", f"{load['sent']:,} in all")
    metrics = result["metrics"]
    first = "ttft" if metrics["ttft"]["n"] else "ttft_any"
    for title, figures in (
        (METRIC_TITLES[first], metrics[first]),
        ("ITL", metrics["itl"]),
        ("E2E", metrics["e2e"]),
        ("Dispatch lateness", result["dispatch_lateness"]),
    ):
        if figures["n"]:
            factor, unit = (1, "s") if figures["p99"] >= 1 else (1e3, "ms")
            marks = figures.get("marks") or ()
            p50, p99 = (number(figures[p] * factor, 3) + MARK * (p in marks) for p in ("p50", "p99"))
            option = f", option {figures['option']}" if figures.get("option") else ""
            yield Tile(title, f"{p50} / {p99} {unit}", f"p50 / p99 of {figures['n']:,}{option}")
    states = {name: _state_text(one) for name, one in (at(result, "verdict", "figures") or {}).items()}
    if tokens["output_per_second"] is not None:
        basis = f"tokens, by {', '.join(tokens['source'])}"
        basis += f" ({states['tokens']})" if states.get("tokens") else ""
        yield Tile("Output", f"{number(tokens['output_per_second'])}/s", basis)
    if goodput.get("attainment") is not None:
        met = goodput_text(result).partition(", ")[2]
        met += f" ({states['goodput']})" if states.get("goodput") else ""
        yield Tile("Goodput", f"{number(goodput['requests_per_second'])}/s", met)
    smooth = result["smooth_goodput"]
    if smooth["tokens_per_second"] is not None:
        rate = f"{number(smooth['tokens_per_second'])}/s"
        yield Tile("Smooth goodput", rate, f"tokens, of {smooth['n']:,} answers{eq4_text(smooth)}")


def _figure_blocks(result: _Json, known: Mapping[str, str]) -> Iterator[Block]:
    metrics, shown = result["metrics"], percentile_titles(result["metrics"], known)
    candidates: list[tuple[str, str, _Json]] = []
    for metric in shown_on(Surface.REPORT):
        name, title = metric.name, metric.title
        if metric.unit is Unit.SECONDS:
            candidates.append((name, title, metrics.get(name) or {"n": 0}))
        if name in _FROM_SCHEDULE and result["corrected"] is not None:
            candidates.append((f"{name}_scheduled", f"{title}, from schedule", result["corrected"][name]))
    candidates.append(("", "dispatch lateness", result["dispatch_lateness"]))
    candidates.append(("", "task, whole conversation", at(result, "tasks", "duration") or {"n": 0}))
    states = {name: _state_text(one) for name, one in (at(result, "verdict", "figures") or {}).items()}
    stated = any(states.values())
    rows = [
        [
            f"{title} ({figures['option']})" if figures.get("option") else title,
            *figures_text(figures, shown),
            *([states.get("user_idle" if name == "user_idle_eq4" else name, "")] if stated else []),
        ]
        for name, title, figures in candidates
        if figures["n"]
    ]
    shares = [_share_row(name, metrics[name], shown) for name in _SHARES if metrics[name]["n"]]
    heads = ("", "n", *shown.values())
    yield Table(
        (*heads, "validity") if stated else heads, rows, "Latencies, ms", label="Figures", nowrap=True
    )
    if shares:
        yield Table(heads, shares, "What readers had of the answers", nowrap=True)
    if is_marked((*rows, *shares)):
        yield Note(FEW, "yellow", css="few")
    phases = [
        [title, *figures_text(figures, shown)]
        for name, title in _PHASES.items()
        if (figures := at(result, "phases", name)) and figures["n"]
    ]
    if phases:
        yield Table(heads, phases, "Phases of a request, ms", nowrap=True)
    yield from map(Note, _throughput_lines(result))
    turns = at(result, "tasks", "turns") or []
    if len(turns) > 1:
        yield Table(_TURN_HEADS, list(map(_turn_row, turns)), "By turn of the conversation, ms")


def _throughput_lines(result: _Json) -> Iterator[str]:
    """Yield the line with the throughput and the concurrency."""
    concurrency = result.get("concurrency")
    if not concurrency or concurrency["mean"] is None:
        return
    tokens = result["tokens"]
    parts = [
        f"{number(tokens[f'{name}_per_second'])} {name} tokens/s"
        for name in ("output", "input")
        if tokens.get(f"{name}_per_second") is not None
    ]
    if concurrency["user_tokens_per_second"] is not None:
        parts.append(f"{number(concurrency['user_tokens_per_second'])} output tokens/s per user (median)")
    parts.append(
        f"concurrency mean {number(concurrency['mean'])}, effective {number(concurrency['effective'])},"
        f" max {number(concurrency['max'])}"
    )
    yield "throughput     " + " · ".join(parts)


def _state_text(figure: _Json) -> str:
    """Return the state of a figure and its error; empty if it is valid."""
    if figure["state"] == "valid":
        return ""
    detail = ""
    if figure["error"] is not None:
        detail = f", error up to {milliseconds(figure['error'])} ms"
    elif figure["share"] is not None:
        detail = f", {number(figure['share'] * 100, 3)} % of the requests"
    return f"{figure['state'].replace('_', ' ')}{detail}"


def _share_row(name: str, figures: _Json, shown: Mapping[str, str]) -> list[str]:
    # Show 3 digits, the accuracy of the histograms; 4 for `smooth_benefit`, which is not from a histogram.
    digits = 4 if name == "smooth_benefit" else 3
    marks = figures.get("marks") or ()
    cells = [
        number(figures.get(f), digits) + MARK * (f in marks and figures.get(f) is not None) for f in shown
    ]
    return [METRIC_TITLES[name], f"{figures['n']:,}", *cells]


def _turn_row(turn: _Json) -> list[str]:
    """Return the cells of a turn in the columns _TURN_HEADS, in ms."""
    cells = [figure_text(turn[metric], name) for metric in ("ttft", "e2e") for name in ("p50", "p99")]
    title = f"{turn['turn'] + 1}{' and later' if turn['and_later'] else ''}"
    return [title, f"{turn['e2e']['n']:,}", *cells]


def _baseline_blocks(result: _Json) -> Iterator[Block]:
    baseline = result["baseline"]
    pairs = baseline["pairs"]
    rows = []
    for name in _PAIRS:
        pair = pairs[name]
        # Omit rows without pairs, and `e2e_same_length` if it would repeat the row `e2e`.
        if not pair["n"] or (name == "e2e_same_length" and pair["n"] == pairs["e2e"]["n"]):
            continue
        sides = [pair[side][figure] for figure in ("p50", "p95") for side in ("then", "now")]
        differences = [pair["difference"][figure] for figure in ("p5", "p50", "p95")]
        signed = ["+" * (d is not None and d > 0) + milliseconds(d) for d in differences]
        share = format_share(round(pair["slower"] * pair["n"]), pair["n"])
        rows.append([METRIC_TITLES[name], f"{pair['n']:,}", *map(milliseconds, sides), *signed, share])
    yield Note(_PAIRS_ABOUT)
    yield Table(_PAIR_HEADS, rows, "Then and now, ms", label="Then and now")
    yield from (Note(f"Note: {note}") for note in baseline["notes"])
    ended, lengths, uncertainty = (baseline[part] for part in ("ended_well", "output_tokens", "uncertainty"))
    parts = [f"{ended['both']:,} of {baseline['requests']['compared']:,} rows ended well then and now"]
    parts += [f"{ended[side]:,} only {side}" for side in ("then", "now") if ended[side]]
    if lengths["n"]:
        parts.append(f"{lengths['equal']:,} of {lengths['n']:,} answers as long as they were")
    p50, largest = (
        ("-", "-") if uncertainty is None else map(milliseconds, map(uncertainty.get, ("p50", "max")))
    )
    parts.append(f"uncertainty of a difference p50 {p50} ms, max {largest} ms")
    yield Note(" · ".join(parts))


def _outcome_blocks(result: _Json) -> Iterator[Block]:
    outcomes, load = result["outcomes"], result["load"]
    whole = sum(outcomes.values())
    tables = [
        Table(
            ["", "requests", "share of those that ended"],
            [[name, f"{n:,}", format_share(n, whole) if whole else "-"] for name, n in counts.items()],
            caption,
        )
        for caption, counts in (
            ("How requests ended", outcomes),
            ("Refusals, by kind", at(result, "refusals", "kinds")),
            ("Answers without a token, by reason", at(result, "no_token", "reasons")),
            ("Objectives that were broken", at(result, "goodput", "broken")),
        )
        if counts
    ]
    unsent = [[name, f"{load[name]:,}"] for name in ("dropped", "unsent") if load[name]]
    if unsent:
        tables.append(Table(["", "requests"], unsent, f"Of {load['planned']:,} planned, never sent"))
    if labels := labels_table({"all": result.get("labels")}, "traffic", LABELS_TITLE):
        tables.append(labels)
    yield TableGroup(tables, "Outcomes")
    if errors := result["errors"]:
        yield ItemList([f"failed {n:,}: {error}" for error, n in errors.items()])
