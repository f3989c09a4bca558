"""Turn the JSON of a replay into a report for a terminal, as Markdown and as an HTML page.

Takes the public JSON (`llmtap replay --json`); parts that are missing are left out. Every chart has a table
of its figures, and a caption that states their basis; `replay_charts.py` makes the charts, `replay_terms.py`
the captions. Also renders the result of `llmtap selftest`, and, for `llmtap report CAPTURE`, the verdict of a
replay whose result lies beside its capture.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import RenderableType

from llmtap.report.document import (
    Block,
    DetailsBlock,
    FigureBlock,
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
    terms,
)
from llmtap.report.render import markdown, page_html, terminal
from llmtap.report.replay_charts import baseline_distributions, distributions_of, time_charts_of
from llmtap.report.replay_terms import (
    RATES,
    all_of,
    clocks_said,
    connections_said,
    heading_of,
    lengths_said,
    plan_rows,
    process_said,
    rests_on,
    retries_said,
    selftest_said,
    speed_said,
)
from llmtap.report.summary import bursts_caution, goodput_said, summary_blocks, system_blocks, system_warnings
from llmtap.report.values import (
    FEW,
    MARK,
    METRIC_TITLES,
    at,
    counted,
    figure_text,
    figures_text,
    is_marked,
    milliseconds,
    number,
    percentile_titles,
)
from llmtap.units import format_share

_UNJUDGED: Final = "Nobody has judged whether these figures may be believed."
_NOTHING_FOUND: Final = (
    "Nothing that is checked speaks against the figures: the load was sent as asked and on time, the sender"
    " had room, requests ended well."
)
_FINDINGS_IN_MS: Final = frozenset({"clocks", "dispatch_lateness", "uncertainty"})
_FINDINGS_IN_SHARES: Final = frozenset(
    {"rate", "sender_cpu", "failed", "prompt_tokens", "left_out", "stopped", "estimated"}
)
_FIGURES: Final = {
    "mean": "mean", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99", "p999": "p99.9", "max": "max",
}  # fmt: skip
_TERMINAL_FIGURES: Final = ("mean", "p50", "p90", "p99", "max")
_FROM_SCHEDULE: Final = ("ttft", "e2e", "user_idle")
"""Metrics that are also counted from the scheduled time."""
_TASK: Final = "task, whole conversation"
_TURN_HEADS: Final = ("turn", "n", "TTFT p50", "TTFT p99", "E2E p50", "E2E p99")
_SHARES: Final = ("fluidity_index_doc", "fluidity_index_code", "qoe_area_step", "smooth_benefit")
_NOT_LATENCIES: Final = (*_SHARES, "e2e_same_length", "elapsed")
_PAIR_HEADS: Final = (
    "pairs", "then p50", "now p50", "then p95", "now p95", "difference p5", "p50", "p95", "slower",
)  # fmt: skip
_PAIRS: Final = ("ttft", "tpot", "tbc_max", "e2e", "e2e_same_length", "elapsed")
_PAIRS_ABOUT: Final = (
    "Each row that was sent beside what it was when it was captured, seen from where that was done; a"
    " difference is now - then, of one row. Both sides of a line are the same rows: those that ended well on"
    " both. Nothing is tested here: rows of one load are not independent."
)
_Json = Mapping[str, Any]


def _judged(verdict: _Json) -> tuple[str, str]:
    """The verdict, and what stands between it and its findings."""
    if not verdict["valid"]:
        return "Not valid.", "What speaks against the figures:"
    if verdict.get("partial"):
        return "Partial.", "The requests that were sent were sent as asked; not all were:"
    if verdict.get("findings"):
        return "Caution.", "The figures stand, but for the share that each finding names:"
    return "Valid.", _NOTHING_FOUND


def _verdict(verdict: _Json | None) -> Block:
    if verdict is None:
        return Note(_UNJUDGED)
    good = verdict["valid"] and not verdict.get("partial")
    items = [_finding(finding) for finding in verdict.get("findings") or ()]
    items += [f"Not checked: {said}" for said in verdict.get("unchecked") or ()]
    return VerdictBox(good, *_judged(verdict), items)


def _finding(finding: _Json) -> str:
    """With the limit that it is beyond."""
    limit, what, says = finding.get("limit"), finding.get("what"), str(finding["says"])
    if not isinstance(limit, int | float):
        return says
    if what in _FINDINGS_IN_MS:
        return f"{says} (limit {milliseconds(limit)} ms)"
    return f"{says} (limit {f'{number(limit * 100)} %' if what in _FINDINGS_IN_SHARES else number(limit)})"


def _cautions(result: _Json) -> list[Block]:
    caution = bursts_caution(result)
    return [Note(caution, lead="Caution:")] if caution else []


def _shown(result: _Json) -> dict[str, str]:
    return percentile_titles(result.get("metrics") or {}, _FIGURES)


def _heads(result: _Json) -> tuple[str, ...]:
    return ("", "n", *_shown(result).values())


def _latency_rows(result: _Json) -> list[list[str]]:
    """In ms, marked where too few samples carry them."""
    places: list[tuple[str, tuple[str, ...]]] = []
    for name, title in METRIC_TITLES.items():
        if name not in _NOT_LATENCIES:
            places.append((title, ("metrics", name)))
        if name in _FROM_SCHEDULE:
            places.append((f"{title}, from schedule", ("corrected", name)))
    rows = []
    shown = _shown(result)
    places += [("dispatch lateness", ("dispatch_lateness",)), (_TASK, ("tasks", "duration"))]
    for title, place in places:
        figures = at(result, *place) or {}
        if figures.get("n"):
            option = figures.get("option")
            rows.append([f"{title} ({option})" if option else title, *figures_text(figures, shown)])
    return rows


def _share_rows(result: _Json) -> list[list[str]]:
    rows = []
    for name in _SHARES:
        figures = at(result, "metrics", name) or {}
        if figures.get("n"):
            marks = figures.get("marks") or ()
            # Histograms are accurate to three digits.
            digits = 4 if name == "smooth_benefit" else 3
            cells = [
                number(figures.get(f), digits) + MARK * (f in marks and figures.get(f) is not None)
                for f in _shown(result)
            ]
            rows.append([METRIC_TITLES[name], f"{figures['n']:,}", *cells])
    return rows


def _turn_rows(result: _Json) -> list[list[str]]:
    """Cells as _TURN_HEADS, in ms; none where there is but one turn."""
    turns = at(result, "tasks", "turns") or []
    rows = []
    for turn in turns if len(turns) > 1 else ():
        title = f"{turn['turn'] + 1}{' and later' if turn.get('and_later') else ''}"
        cells = [figure_text(turn[metric], name) for metric in ("ttft", "e2e") for name in ("p50", "p99")]
        rows.append([title, f"{turn['e2e']['n']:,}", *cells])
    return rows


def _outcome_rows(counts: Mapping[str, int], whole: int) -> list[list[str]]:
    return [[name, f"{n:,}", format_share(n, whole) if whole else "-"] for name, n in counts.items()]


def _pair_rows(baseline: _Json) -> list[list[str]]:
    """Cells as _PAIR_HEADS; ms. Figures of no pair are left out, and those that would be told twice."""
    rows = []
    for name in _PAIRS:
        pair = at(baseline, "pairs", name) or {}
        if not pair.get("n") or (name == "e2e_same_length" and pair["n"] == baseline["pairs"]["e2e"]["n"]):
            continue
        sides = [pair[side][figure] for figure in ("p50", "p95") for side in ("then", "now")]
        differences = [pair["difference"][figure] for figure in ("p5", "p50", "p95")]
        signed = [("+" if d is not None and d > 0 else "") + milliseconds(d) for d in differences]
        share = format_share(round(pair["slower"] * pair["n"]), pair["n"])
        rows.append([METRIC_TITLES[name], f"{pair['n']:,}", *map(milliseconds, sides), *signed, share])
    return rows


def _pairs_said(baseline: _Json) -> str:
    requests, ended = baseline.get("requests") or {}, baseline.get("ended_well") or {}
    said = [f"{ended.get('both', 0):,} of {requests.get('compared', 0):,} rows ended well then and now"]
    said += [f"{ended[side]:,} only {side}" for side in ("then", "now") if ended.get(side)]
    lengths, uncertainty = baseline.get("output_tokens") or {}, baseline.get("uncertainty") or {}
    if lengths.get("n"):
        said.append(f"{lengths['equal']:,} of {lengths['n']:,} answers as long as they were")
    if uncertainty.get("n"):
        p50, most = (milliseconds(uncertainty[figure]) for figure in ("p50", "max"))
        said.append(f"uncertainty of a difference p50 {p50} ms, max {most} ms")
    else:
        said.append("uncertainty then not known")
    return " · ".join(said)


def replay_markdown(result: _Json) -> str:
    """All of it, without an end of line at its end."""
    notes = at(result, "plan", "notes")
    summary = [_verdict(result.get("verdict")), *_cautions(result)]
    summary += [ItemList([f"Note: {n}" for n in notes])] if notes else []
    rows, shares = _latency_rows(result), _share_rows(result)
    baseline = result.get("baseline") or {}
    pairs, outcomes = _pair_rows(baseline), result.get("outcomes") or {}
    found: list[tuple[str, list[Block]]] = []
    if rows:
        found.append(("Latencies, ms", [Table(_heads(result), rows)]))
    if shares:
        found.append(("What readers had of the answers", [Table(_heads(result), shares)]))
    if found and is_marked((*rows, *shares)):
        found[-1][1].append(Note(FEW))
    if turns := _turn_rows(result):
        found.append(("By turn of the conversation, ms", [Table(_TURN_HEADS, turns)]))
    if pairs:
        found.append(("Then and now, ms", [Table(["", *_PAIR_HEADS], pairs), Note(_pairs_said(baseline))]))
    if goodput := goodput_said(result):
        found.append(("Goodput", [Note(goodput)]))
    if outcomes:
        heads = ["", "requests", "of those that ended"]
        found.append(("Outcomes", [Table(heads, _outcome_rows(outcomes, sum(outcomes.values())))]))
    if errors := result.get("errors"):
        items = ItemList([f"failed {n:,}: {error}" for error, n in errors.items()])
        (found[-1][1] if found else summary).append(items)
    if plan := plan_rows(result):
        found.append(("What was run", [TermTable(plan), Note(RATES)]))
    sections = [Section("", heading, blocks) for heading, blocks in found]
    return markdown(ReportDocument(heading_of(result), summary, sections=sections))


def replay_html(result: _Json) -> str:
    baseline = result.get("baseline")
    sections = [Section("figures-table", "Figures", list(_figures(result)))]
    sections += _distributions(result, result)
    if baseline:
        sections.append(Section("baseline", "Then and now", list(_baseline(result))))
        sections += _distributions(result, baseline, of_baseline=True)
    for chart in time_charts_of(result):
        tables = [chart.table] if chart.table and chart.table.rows else []
        rests = rests_on(result, chart.sampled)
        figure = FigureBlock(chart.key, chart.heading, chart.panels, tables, rests)
        sections.append(Section(chart.key, chart.heading, [Note(chart.about), figure]))
    if result.get("outcomes"):
        sections.append(Section("outcomes", "Outcomes", list(_outcomes(result))))
    notes = [*(at(result, "plan", "notes") or ()), *system_warnings(at(result, "system", "summary") or {})]
    tiles = list(_tiles(result))
    summary = [
        _verdict(result.get("verdict")), *_cautions(result), *(Note(f"Note: {note}") for note in notes),
        *([Tiles(tiles)] if tiles else []),
    ]  # fmt: skip
    page = ReportDocument(heading_of(result), summary, _settings(result), sections)
    return page_html(page, "replay_page.css", "replay_page.js")


def _rests(parts: Sequence[str]) -> list[Block]:
    return [Note(" · ".join(parts), css="rests")] if parts else []


def _tiles(result: _Json) -> Iterator[Tile]:
    load = result.get("load") or {}
    if load.get("planned_rps") is not None:
        planned = f"of {number(load['planned_rps'])} planned"
        if load.get("due"):
            planned += f", {format_share(load['in_time'], load['due'])} in time"
        yield Tile("Requests sent", f"{number(load['offered_rps'])}/s", planned)
    elif load.get("offered_rps") is not None:
        yield Tile("Requests sent", f"{number(load['offered_rps'])}/s", f"{load.get('sent', 0):,} in all")
    for title, place in (
        ("TTFT", ("metrics", "ttft")), ("ITL", ("metrics", "itl")), ("E2E", ("metrics", "e2e")),
        ("Dispatch lateness", ("dispatch_lateness",)),
    ):  # fmt: skip
        figures = at(result, *place) or {}
        if figures.get("n"):
            in_s = figures["p99"] >= 1
            marks = figures.get("marks") or ()
            p50, p99 = (
                number(figures[p] * (1 if in_s else 1e3), 3) + MARK * (p in marks) for p in ("p50", "p99")
            )
            option = f", option {figures['option']}" if figures.get("option") else ""
            about = f"p50 / p99 of {figures['n']:,}{option}"
            yield Tile(title, f"{p50} / {p99} {'s' if in_s else 'ms'}", about)
    tokens = result.get("tokens") or {}
    if tokens.get("output_per_second") is not None:
        sources = ", ".join(tokens.get("source") or ())
        yield Tile("Output", f"{number(tokens['output_per_second'])}/s", f"tokens, by {sources}")
    goodput = result.get("goodput") or {}
    if goodput.get("attainment") is not None:
        met = goodput_said(result).partition(", ")[2]
        yield Tile("Goodput", f"{number(goodput['requests_per_second'])}/s", met)
    smooth = result.get("smooth_goodput") or {}
    if smooth.get("tokens_per_second") is not None:
        rate = f"{number(smooth['tokens_per_second'])}/s"
        yield Tile("Smooth goodput", rate, f"tokens, of {smooth['n']:,} answers")


def _settings(result: _Json) -> list[Block]:
    rows = all_of(result, "plan", "load", "lengths", "warmup", "sender")
    rates = [Note(RATES)] if result.get("load") else []
    whole = [DetailsBlock(f"All of it ({len(rows):,} values)", [TermTable(rows)])] if rows else []
    return [*terms(plan_rows(result)), *rates, *whole]


def _figures(result: _Json) -> Iterator[Block]:
    rows, shares = _latency_rows(result), _share_rows(result)
    yield Table(_heads(result), rows, "Latencies, ms", label="Figures")
    if shares:
        yield Table(_heads(result), shares, "What readers had of the answers")
    if is_marked((*rows, *shares)):
        yield Note(FEW, css="few")
    if turns := _turn_rows(result):
        yield Table(_TURN_HEADS, turns, "By turn of the conversation, ms")
    yield from _rests(rests_on(result, "", ("ITL", "tokens", "smooth goodput", "sender")))


def _distributions(result: _Json, drawn: _Json, *, of_baseline: bool = False) -> Iterator[Section]:
    for one in baseline_distributions(drawn) if of_baseline else distributions_of(drawn):
        samples = "; ".join(f"{curve.name}: n {curve.n:,}" for curve in one.curves)
        rests = rests_on(result, samples, one.says)
        figure = FigureBlock(one.key, one.heading, one.panels, [one.table], rests, one.legend)
        yield Section(one.key, one.heading, [Note(one.about), figure])


def _baseline(result: _Json) -> Iterator[Block]:
    baseline = result["baseline"]
    yield Note(_PAIRS_ABOUT)
    if rows := _pair_rows(baseline):
        yield Table(["", *_PAIR_HEADS], rows, "Then and now, ms", label="Then and now")
    yield from (Note(f"Note: {note}") for note in baseline.get("notes") or ())
    yield from _rests(rests_on(result, _pairs_said(baseline), ("warm-up",)))


def _outcomes(result: _Json) -> Iterator[Block]:
    outcomes, load = result["outcomes"], result.get("load") or {}
    whole = sum(outcomes.values())
    heads = ["", "requests", "share of those that ended"]
    tables = [
        Table(heads, _outcome_rows(counts, whole), caption)
        for caption, counts in (
            ("How requests ended", outcomes),
            ("Refusals, by kind", at(result, "refusals", "kinds")),
            ("Answers without a token, by reason", at(result, "no_token", "reasons")),
            ("Objectives that were broken", at(result, "goodput", "broken")),
        )
        if counts
    ]
    unsent = [[name, f"{load[name]:,}"] for name in ("skipped", "dropped", "unsent") if load.get(name)]
    if unsent:
        caption = f"Of {load.get('planned', 0):,} planned, never sent"
        tables.append(Table(["", "requests"], unsent, caption))
    yield TableGroup(tables, "Outcomes")
    yield from _rests(rests_on(result, f"n {whole:,}"))


def render_replay(result: _Json) -> RenderableType:
    blocks: list[Note | Table] = [Note(_heading(result), "bold"), *summary_blocks(result), _sending(result)]
    if turns := _turn_rows(result):
        blocks.append(Table([f"{_TURN_HEADS[0]}, ms", *_TURN_HEADS[1:]], turns, nowrap=True))
    blocks += map(Note, _lines(result))
    if baseline := result.get("baseline"):
        heads = [head.replace("difference", "diff") for head in _PAIR_HEADS]
        rows = [["then and now, ms", *heads], *_pair_rows(baseline)]
        places = [i for i in range(len(rows[0])) if i not in (4, 5)]  # without the p95 of both sides
        heads, *rows = [[row[i] for i in places] for row in rows]
        blocks += [Table(heads, rows, nowrap=True), Note("baseline   " + _pairs_said(baseline))]
        blocks += [Note(f"note: {note}") for note in baseline.get("notes") or ()]
    if summary := at(result, "system", "summary"):
        blocks += system_blocks(summary)
    blocks += [Note(f"note: {note}") for note in at(result, "plan", "notes") or ()]
    return terminal([*blocks, *_verdict_lines(result.get("verdict"))])


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
    said = (
        f"{counted(load['streams'], 'stream')}, {number(load['tokens_per_second'])} tokens/s,"
        f" {number(load['duration'], 2)} s; {n - result['unmatched']:,} of {n:,} answers compared"
    )
    return terminal([lead, Note(said), Table(["error, ms", "n", "p50", "p99", "worst"], rows, nowrap=True)])


def render_verdicts(verdicts: Mapping[str, _Json]) -> RenderableType:
    blocks: list[Note | Table] = []
    for name, verdict in verdicts.items():
        blocks += [Note(f"replay     {name}", "bold"), *_verdict_lines(verdict)]
    return terminal(blocks)


def _verdict_lines(verdict: _Json | None) -> Iterator[Note]:
    if verdict is None:
        yield Note(f"verdict    {_UNJUDGED}")
        return
    colour = "red" if not verdict["valid"] else "yellow" if verdict.get("findings") else "green"
    yield Note(f"verdict    {' '.join(_judged(verdict))}", colour)
    for one in verdict.get("findings") or ():
        grave = one.get("invalidates", True)
        yield Note(f"{'NOT VALID' if grave else 'caution'}: {one['says']}", "red" if grave else "yellow")
    yield from (Note(f"not checked: {said}", "yellow") for said in verdict.get("unchecked") or ())


def _heading(result: _Json) -> str:
    plan, load = result.get("plan") or {}, result["load"]
    name = plan.get("trace") or at(plan, "workload", "name") or "?"
    arrivals = plan.get("arrivals") or {}
    how = f"arrivals {process_said(arrivals)}" if arrivals else "closed loop"
    if arrivals.get("rate_rps"):
        how += f" at {arrivals['rate_rps']:.4g} req/s"  # asked; the planned rate came of drawing it
    if speed := speed_said(arrivals):
        how += f" ({speed})"
    said = [f"{name} to {plan.get('target', '?')}", how, f"{load['sent']:,} of {load['planned']:,} sent"]
    if load.get("planned_rps") is not None:
        of = " (first turns)" if plan.get("conversations") else ""
        said.append(f"{load['offered_rps']:.4g} of {load['planned_rps']:.4g} req/s planned{of}")
    if load.get("skipped"):
        said.append(f"{load['skipped']:,} skipped: too many in flight")
    if n := at(load, "retries", "n"):
        said.append(counted(n, "retry", "retries"))
    if load.get("stopped"):
        said.append(f"stopped: {load['stopped']}")
    return " · ".join(said)


def _sending(result: _Json) -> Note | Table:
    """Dispatch lateness, and latencies from the scheduled time."""
    found = {"dispatch lateness": result.get("dispatch_lateness") or {}}
    found |= {
        f"{METRIC_TITLES[name]}, from schedule": at(result, "corrected", name) or {}
        for name in _FROM_SCHEDULE
    }
    found[_TASK] = at(result, "tasks", "duration") or {}
    rows = [
        [title, *figures_text(figures, _TERMINAL_FIGURES)]
        for title, figures in found.items()
        if figures.get("n")
    ]
    return Table(["ms", "n", *_TERMINAL_FIGURES], rows, nowrap=True) if rows else Note("")


def _lines(result: _Json) -> Iterator[str]:
    sender = result["sender"]
    processes, a_thousand = sender["processes"], sender["cpu_seconds_per_1000_tokens"]
    said = [counted(len(processes), "process", "processes")]
    said.append(f"{sum(p['cpu_seconds'] for p in processes):.2f} s of CPU")
    if a_thousand is not None:
        said.append(f"{a_thousand * 1e3:.3g} ms per 1,000 tokens")
    said += [f"stamps by {sender['clock']}", connections_said(sender)]
    yield "sending    " + " · ".join(said)
    if retries := retries_said(result.get("load") or {}):
        yield f"retries    {retries}"
    if clocks := clocks_said(sender):
        yield f"clocks     {clocks}"
    for error, n in list((result.get("errors") or {}).items())[:5]:
        yield f"failed     {n:,}: {error}"
    warm = result.get("warmup") or {}
    if warm.get("requests"):
        not_stable = "latency not probed" if warm.get("probes") == [] else "latency NOT stable"
        stable = "latency stable" if warm.get("stable") else not_stable
        yield f"warm-up    {warm['requests']:,} requests, {warm['tokens']:,} tokens, {stable}"
    elif warm.get("skipped"):
        yield f"warm-up    none: {warm['skipped']}"
    prompts = at(result, "plan", "prompts") or {}
    if prompts.get("n"):
        ways = ", ".join(prompts["ways"])
        yield f"prompts    {prompts['exact']:,} of {prompts['n']:,} of exact length by {ways}"
    lengths = result.get("lengths") or {}
    if lengths.get("input_told"):
        yield f"usage      by the server's own count: {lengths_said(lengths)}"
    if error := selftest_said(result.get("selftest") or {}):
        yield f"our error  {error}"
    if "capture" in result:
        yield f"capture    {result['capture']['rows']:,} exchanges in {result['capture']['to']}"
