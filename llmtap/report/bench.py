"""Render benchmarks for a terminal and as HTML, and comparisons of systems also as Markdown.

Input: the JSON of `bench/report/report.py` (`render_bench`, `bench_html`) and of `bench/report/compare.py`
(`render_compare`, `compare_html`, `compare_markdown`). The Markdown of a benchmark is in
`bench/report/texts.py`, which uses the sentences on compliance, deviations and findings from here.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import RenderableType

from llmtap.metrics.summary import ENDED_WELL
from llmtap.report.document import (
    Block,
    Compliance,
    DetailsBlock,
    ItemList,
    Note,
    Preformatted,
    ReportDocument,
    Section,
    Table,
    TableGroup,
    TermTable,
    Tile,
    Tiles,
    VerdictBox,
    chart_figure,
)
from llmtap.report.gates import change_rows, regression_blocks, requirement_rows, requirements_blocks
from llmtap.report.render import markdown, page_html, terminal
from llmtap.report.values import (
    FEW,
    METRIC_TITLES,
    at,
    burst_sentences,
    count_with_noun,
    figure_text,
    is_marked,
    milliseconds,
    number,
    plain_text,
)

UNMET_SHOWN: Final = 6
"""Number of unmet requirements that a terminal shows for each test; pages and Markdown have all."""
LOADS_SHOWN: Final = 3
"""Number of loads that a report names for a figure that is not valid; the JSON has all of them."""
_TITLES_MAX: Final = 3
"""Maximum number of tests that the title of a page names; for more tests, it has their number."""
_ASSETS: Final = ("replay_page.css", "bench_page.css")
_Json = Mapping[str, Any]


def finding_texts(findings: Sequence[_Json]) -> list[str]:
    """Return a line for each kind of finding of each test: its first load, and the number of other loads."""
    by_kind: dict[tuple[str, str], list[_Json]] = {}
    for finding in findings:
        by_kind.setdefault((finding["test"], finding["what"]), []).append(finding)
    texts = []
    for (test, _), (first, *others) in by_kind.items():
        more = f" and {count_with_noun(len(others), 'other load')}" if others else ""
        texts.append(f"{test}, {first['step']}{more}: {first['says']}")
    return texts


def compliance_text(report: _Json) -> str:
    """Return the compliance of a test with the methodology as text.

    Example: `conditionally compliant (61 of 61 MUST, 2 of 2 conditions, 14 of 16 SHOULD); lacking: 4.6.3-2`.
    """
    compliance = report.get("compliance") or {}
    if not compliance:
        return "not judged"
    unmet = list(compliance["why"])
    more = f" and {len(unmet) - UNMET_SHOWN:,} more" if len(unmet) > UNMET_SHOWN else ""
    lacking = f"; lacking: {', '.join(unmet[:UNMET_SHOWN])}{more}" if unmet else ""
    return f"{compliance['level']} ({_counts_text(compliance)}){lacking}"


def deviation_texts(document: _Json) -> list[str]:
    """Return a text for each deviation from the methodology, with the tests that have it.

    A deviation is noted in the report of a test, or is a requirement that the test does not meet.
    """
    tests_by_text: dict[str, list[str]] = {}
    for report in document.get("tests") or ():
        unmet = [
            f"{row['id']} {row['status']} ({row['level']}): {row['says']} Found: {row['evidence']}"
            for row in at(report, "compliance", "rows") or ()
            if row["status"] in ("not met", "cannot tell") and row["level"] not in ("MAY", "OPTIONAL")
        ]
        for text in (*(report.get("deviations") or ()), *unmet):
            tests_by_text.setdefault(text, []).append(report["test"])
    quick = ["Deviation (all tests): shortened by --quick; the figures are indicative"]
    texts = [
        f"Deviation ({', '.join(dict.fromkeys(tests))}): {text}" for text, tests in tests_by_text.items()
    ]
    return quick * bool(document.get("quick")) + texts


def _counts_text(compliance: _Json) -> str:
    kinds = {"must": "MUST", "conditions": "conditions", "should": "SHOULD"}
    # Results that earlier versions of llmtap stored have no conditions.
    counts = ((title, compliance[name]) for name, title in kinds.items() if name in compliance)
    return ", ".join(f"{count['satisfied']} of {count['n']} {title}" for title, count in counts)


def _tables_of(holder: _Json, *, breaks: bool = False) -> list[Table]:
    return [Table(t["heads"], t["rows"], t["caption"], breaks) for t in holder.get("tables") or ()]


def validity_table(report: _Json) -> Table | None:
    """Return a table of the figures that are not valid or doubtful in some loads; None if all are valid."""
    rows = []
    for figure in (at(report, "verdict", "figures") or {}).values():
        for state, loads in figure["loads"].items():
            if loads:
                error = "-" if figure["error"] is None else f"{milliseconds(figure['error'])} ms"
                shown = ", ".join(loads[:LOADS_SHOWN])
                more = f" and {len(loads) - LOADS_SHOWN:,} more" if len(loads) > LOADS_SHOWN else ""
                where = f"{len(loads):,} of {count_with_noun(figure['n'], 'load')}: {shown}{more}"
                rows.append([figure["title"], state.replace("_", " "), error, where])
    heads = ["Figure", "Validity", "Largest error", "Loads"]
    return Table(heads, rows, "Figures that are not valid or doubtful") if rows else None


def _unmet_note(row: _Json, state: str) -> Note:
    return Note(f"  {row['id']} {state}: {row['says']} {row['evidence']}", "yellow")


def render_bench(document: _Json) -> RenderableType:
    """Render the report for a terminal; the verdict comes first."""
    verdict = document.get("verdict") or {}
    blocks: list[Note | Table] = []
    if sentence := verdict.get("says"):
        style = "red" if not verdict.get("valid") or verdict.get("failed") else "none"
        blocks.append(Note(f"verdict: {sentence}", style))
    blocks += [Note(f"objective missed: {text}", "red") for text in verdict.get("missed") or ()]
    blocks += [Note(f"NOT VALID: {text}", "red") for text in finding_texts(verdict.get("findings") or ())]
    blocks += [Note(f"caution: {text}", "yellow") for text in finding_texts(verdict.get("cautions") or ())]
    unchecked = finding_texts(verdict.get("unchecked") or ())
    blocks += [Note(f"not checked: {text}", "yellow") for text in unchecked]
    blocks += [Note("")] * bool(blocks)
    for report in document.get("tests") or ():
        blocks += [Note(f"{report['section']} {report['title']}", "bold"), *_test_blocks(report), Note("")]
    for test in document.get("not_run") or ():
        blocks.append(Note(f"not run    {test['test']}: {test['why']}", "yellow"))
        if test.get("hint"):
            blocks.append(Note(f"           {test['hint']}", "yellow"))
    blocks += requirements_blocks(requirement_rows(document))
    return terminal(blocks)


def _test_blocks(report: _Json) -> Iterator[Note | Table]:
    yield from headline_notes(report)
    if settings := report.get("configuration"):
        yield Note(" · ".join(f"{name}: {value}" for name, value in settings.items()))
    yield from _tables_of(report)
    if validity := validity_table(report):
        yield validity
    yield from (Note(f"note: {note}") for note in report.get("notes") or ())
    yield from (Note(f"deviation: {text}", "yellow") for text in report.get("deviations") or ())
    if report.get("forfeits"):
        yield Note(f"--quick gives up: {', '.join(report['forfeits'])}", "yellow")
    compliance = report.get("compliance")
    if not compliance:
        return
    # Leave out the identifiers of unmet requirements: each of them gets a separate line below.
    yield Note(compliance_text({"compliance": compliance | {"why": ()}}), "bold")
    rows = [row for row in compliance["rows"] if row["id"] in compliance["why"]]
    yield from (_unmet_note(row, f"{row['level']}, {row['status']}") for row in rows[:UNMET_SHOWN])
    if len(rows) > UNMET_SHOWN:
        yield Note(f"  and {len(rows) - UNMET_SHOWN:,} more: they are in report.md and on the page", "yellow")


def bench_html(document: _Json) -> str:
    """Return the HTML page of a benchmark."""
    reports: Sequence[_Json] = document.get("tests") or ()
    sections = [
        Section(report["test"], f"{report['section']} {report['title']}", list(_test_page_blocks(report)))
        for report in reports
    ]
    if reports:
        sections.append(Section("loads", "Every load", list(load_tables(reports))))
        sections.append(Section("compliance", "Compliance", _compliance_blocks(reports)))
        sections.append(Section("again", "To do it again", list(_reproduction_blocks(document))))
    setup = [[name, str(document.get(name))] for name in ("seed", "warmup", "quick", "made")]
    blocks = [*identification_blocks(document), TermTable(setup)]
    sections.append(Section("settings", "What was run", [DetailsBlock("Set-up", blocks)]))
    titles = ", ".join(report["title"] for report in reports)
    if len(reports) > _TITLES_MAX:
        titles = f"{len(reports)} tests"
    model = at(document, "sut", "model") or at(document, "target", "model")
    title = f"Benchmark of {model or 'a server'}: {titles or 'no test was run'}"
    page = ReportDocument(title, list(_summary_blocks(document)), sections=sections)
    return page_html(page, *_ASSETS, "bench_page.js")


def headline_notes(report: _Json) -> Iterator[Note]:
    """Yield the sentences on the main result of a test; most tests have none."""
    # Results that earlier versions of llmtap stored have no headline.
    yield from (Note("", "bold", lead=sentence) for sentence in report.get("headline") or ())


def _summary_blocks(document: _Json) -> Iterator[Block]:
    for report in document.get("tests") or ():
        yield from headline_notes(report)
    yield from _verdict_blocks(document)
    yield from requirements_blocks(requirement_rows(document))


def _verdict_blocks(document: _Json) -> Iterator[Block]:
    verdict = document.get("verdict") or {}
    texts = [
        *(f"objective missed: {one}" for one in verdict.get("missed") or ()),
        *finding_texts(verdict.get("findings") or ()),
        *finding_texts(verdict.get("cautions") or ()),
    ]
    sentence = verdict.get("says") or ""
    if not verdict.get("valid"):
        yield VerdictBox(False, "Not valid.", sentence, texts)
    elif texts:
        yield VerdictBox(True, "Caution.", sentence or "The figures stand, but for:", texts, caution=True)
    else:
        yield VerdictBox(
            True,
            "Valid.",
            "Loads were sent as asked and on time, the sender had room: nothing that is checked speaks"
            " against the figures.",
        )
    yield from (Note(f"Not checked: {text}") for text in finding_texts(verdict.get("unchecked") or ()))
    results = [tile for report in document.get("tests") or () for tile in _main_tiles(report)]
    if results:
        yield Tiles(results)
    if document.get("quick"):
        yield Note("Note: tests were shortened (--quick); the demands that this gives up are not met below.")
    for test in document.get("not_run") or ():
        yield Note(f"Not run: {test['test']}, because {test['why']}.")
    tiles = [
        Tile(report["title"], compliance["level"], _counts_text(compliance), report["test"])
        for report in document.get("tests") or ()
        if (compliance := report.get("compliance"))
    ]
    if tiles:
        yield Tiles(tiles)


_HEADLINES: Final[Mapping[str, Sequence[tuple[int, str, str]]]] = {
    "ttft": [(1, "TTFT P50", "Value"), (1, "TTFT P99", "Value")],
    "throughput": [(3, "Max Output Throughput", "Value"), (3, "Sustainable Load", "Value")],
    "tradeoff": [(5, "", "Achieved (tok/s)"), (5, "", "TTFT P99")],
    "itl": [(6, "P50", ""), (6, "P99", "")],
    "fairness": [(9, "Jain's Fairness Index", "Value")],
    "prefix-cache": [(10, "Cache Disabled", "TTFT P50"), (10, "Cache (Warm)", "TTFT P50")],
    "memory-pressure": [(11, "", "Complete"), (11, "", "TTFT P99")],
    "long-context": [(12, "", "TTFT Mean"), (12, "", "ms/1K tokens")],
}
"""Figures on the tiles of each test: number of the table of the IETF draft, end of the row's label, and
head of the column ("": the last column)."""


def _main_tiles(report: _Json) -> Iterator[Tile]:
    """Yield tiles with the main figures of a test: cells of its tables, without their intervals."""
    slots = at(report, "measurements", "max_concurrency")
    if slots is not None:
        yield Tile(report["title"], f"{slots} at a time", "Max concurrent requests", report["test"])
    for number_, label, head in _HEADLINES.get(report["test"], ()):
        values = [
            (row[0], row[table["heads"].index(head) if head else -1])
            for table in report.get("tables") or ()
            if table["caption"].startswith(f"Table {number_}:") and (not head or head in table["heads"])
            for row in table["rows"]
            if row[0].endswith(label)
        ]
        if values:
            name, value = values[-1]  # The rows are in the order of their loads: show the highest load.
            about = f"{head}, {name}" if head not in ("", "Value") else name
            yield Tile(report["title"], value.partition(" (")[0], about, report["test"])


BOUNDARIES: Final = {
    "model engine": "Model Engine",
    "application gateway": "Gateway",
    "compound system": "Compound",
}
"""Names in reports for the boundary of the system under test, by its name in a bench file."""
NOT_DECLARED: Final = "not declared"


def identification_blocks(document: _Json) -> list[Block]:
    """Return blocks with the declarations of the system under test (IETF draft, C.2, item 1)."""
    sut, target = document.get("sut") or {}, document.get("target") or {}
    tokenizer, clock = sut.get("tokenizer") or {}, sut.get("clock") or {}
    declarations = {
        "Model": sut.get("model") or target.get("model"),
        "Hardware": hardware_text(sut),
        "Software": sut.get("software"),
        "SUT boundary": BOUNDARIES.get(sut.get("boundary") or ""),
        "Address": target.get("url"),
        "Tokenizer": _declared_text(tokenizer, ("name", "vocabulary", "source")),
        "Token counting": _declared_text(tokenizer, ("counting", "special", "system_prompt", "tools")),
        "Streaming": _declared_text(sut, ("protocol", "chunking")),
        "Prefix caching": {True: "on", False: "off"}.get(sut.get("prefix_cache")),  # type: ignore[arg-type]
        "Largest batch": sut.get("max_batch"),
        "Guardrails": guardrails_text(sut),
        "Clocks": _declared_text(clock, ("placement", "synchronization", "accuracy")),
    }
    rows = TermTable([[name, str(value or NOT_DECLARED)] for name, value in declarations.items()])
    return [rows, *([ItemList(notes)] if (notes := sut.get("notes")) else [])]


def _declared_text(section: _Json, names: Sequence[str]) -> str:
    """Return the named fields that a section of the declarations has, as `name: value, ...`."""
    return ", ".join(
        f"{name.replace('_', ' ')}: {section[name]}" for name in names if section.get(name) is not None
    )


def hardware_text(sut: _Json) -> str:
    """Return the accelerators, such as `H100 SXM x 8`, and the host's memory and CPU if they are declared."""
    hardware = sut.get("hardware") or {}
    accelerator, count = hardware.get("accelerator"), hardware.get("count")
    if not accelerator:
        return f"{NOT_DECLARED} (host: {hardware['cpu']})" if hardware.get("cpu") else NOT_DECLARED
    text = f"{accelerator} x {'?' if count is None else count}"
    if accelerator == "none":
        text = "no accelerator"
    more = [hardware[name] for name in ("memory", "cpu") if hardware.get(name)]
    return f"{text} ({', '.join(more)})" if more else text


def guardrails_text(sut: _Json) -> str:
    """Return the state and names of prompt and response filters (IETF draft, 4.8.1)."""
    guardrails = sut.get("guardrails") or {}
    states = {True: "on", False: "off", None: NOT_DECLARED}
    filters = [f"{side} filter {states[guardrails.get(f'{side}_filter')]}" for side in ("input", "output")]
    return ", ".join([*filters, *(guardrails.get("names") or ())])


def _test_page_blocks(report: _Json) -> Iterator[Block]:
    if charts := report.get("charts"):
        yield chart_figure(report["test"], charts)
    tables = _tables_of(report, breaks=True)
    if validity := validity_table(report):
        tables.append(validity)
    if tables:
        yield TableGroup(tables)
    notes = [*(report.get("notes") or ()), *(f"Deviation: {one}" for one in report.get("deviations") or ())]
    if notes:
        yield ItemList(notes, "notes")
    yield DetailsBlock("Set-up of this test", configuration_blocks(report))


def configuration_blocks(report: _Json) -> list[Block]:
    """Return blocks with the configuration, parameters and arms of a test (IETF draft, C.2, item 2)."""
    rows = [(name, str(value)) for name, value in (report.get("configuration") or {}).items()]
    rows += [(name, plain_text(value)) for name, value in (report.get("params") or {}).items()]
    arms = [[name, arm.get("about") or "-"] for name, arm in (report.get("arms") or {}).items()]
    return [TermTable(rows), *([Table(["Arm", "What it is"], arms)] if arms else [])]


def validity_suffix(step: _Json, figure: str) -> str:
    """Return ` (not valid)` or ` (doubtful, 3.2 ms)` for a figure of a load; empty if it is valid."""
    validity = at(step, "result", "verdict", "figures", figure)
    if validity is None or validity["state"] == "valid":
        return ""
    error = "" if validity["error"] is None else f", {milliseconds(validity['error'])} ms"
    return f" ({validity['state'].replace('_', ' ')}{error})"


def load_tables(reports: Sequence[_Json]) -> Iterator[Note | Table]:
    """Yield a note on the basis of the figures, then a table of the loads of each test."""
    yield Note(
        "Each load is a folder of the results. Figures here are of all its requests over its whole time, the"
        " first 10 % and the drain included; latencies are in ms, by histograms (error at most 0.1 %). Tables"
        " of the tests are exact, leave out the first 10 % of each level of a search, and join the blocks of"
        " a configuration: their figures of the same load differ."
    )
    figures = [(metric, share) for metric in ("ttft", "tpot", "e2e") for share in ("p50", "p99")]
    heads = ["load", "n", "requests/s", "output tok/s"]
    heads += [f"{METRIC_TITLES[metric]} {share}" for metric, share in figures]
    for report in reports:
        rows = []
        for step in report.get("steps") or ():
            result = step["result"]
            outcomes = result.get("outcomes") or {}
            n, completed = sum(outcomes.values()), sum(outcomes.get(name, 0) for name in ENDED_WELL)
            rows.append(
                [
                    f"{step['name']} ({step['arm']})" if step.get("arm") else step["name"],
                    f"{result.get('n', 0):,}",
                    number(at(result, "load", "offered_rps")) + validity_suffix(step, "load"),
                    number(at(result, "tokens", "output_per_second")) + validity_suffix(step, "tokens"),
                    *(
                        figure_text(at(result, "metrics", metric) or {}, share)
                        + validity_suffix(step, metric)
                        for metric, share in figures
                    ),
                    f"{completed / n:.1%}" if n else "-",
                    milliseconds(at(result, "dispatch_lateness", "p99")),
                ]
            )
        yield Table(
            [*heads, "ended well", "late p99"],
            rows,
            f"{report['section']} {report['title']}",
            footnote=FEW if is_marked(rows) else "",
        )


def _compliance_blocks(reports: Sequence[_Json]) -> list[Block]:
    rows = [(report["test"], row) for report in reports for row in at(report, "compliance", "rows") or ()]
    about = (
        "Every demand of the methodology that binds these tests, and what shows whether it was met. A test"
        " that meets all MUST is conditionally compliant, one that meets all SHOULD as well unconditionally."
        " Either needs all conditions: a valid result, and the minimums that the methodology states without a"
        " key word. What a report cannot show counts as not met; other procedures count for nothing."
    )
    return [Note(about), Compliance([row for _, row in rows], tests=[test for test, _ in rows])]


def _reproduction_blocks(document: _Json) -> Iterator[Block]:
    """Yield the command, versions and exact requests with which the benchmark can be repeated."""
    if document.get("command"):
        yield Preformatted(document["command"])
    rows = [(name, str(value)) for name, value in (document.get("versions") or {}).items()]
    rows.append(("results folder", str(document.get("results", "-"))))
    rows += [
        (f"requests of {report['test']}", str(report["exact_requests"]))
        for report in document.get("tests") or ()
        if report.get("exact_requests")
    ]
    yield TermTable(rows)


def render_compare(comparison: _Json) -> RenderableType:
    """Render a comparison of systems for a terminal."""
    blocks: list[Note | Table] = []
    for test in comparison["tests"]:
        blocks += [Note(_heading_text(test), "bold"), *_comparison_blocks(test), Note("")]
    blocks += [Note(text, "yellow") for text in _left_out_lines(comparison)]
    return terminal([*blocks, *regression_blocks(change_rows(comparison))])


def _comparison_blocks(test: _Json) -> Iterator[Note | Table]:
    unmet = _unmet_rows(test)
    yield from (Note(text, "bold red") for text in _objections(test))
    yield from (Note(f"caution: {text}", "yellow") for text in _burst_cautions(test))
    yield Note(f"fair comparison: {_fairness_text(test)}", "yellow" if unmet else "none")
    yield from (_unmet_note(row, row["status"]) for row in unmet)
    if not test["tables"]:
        yield Note("nothing could be compared: no load in common, or too few requests")
    yield from _tables_of(test)
    yield from (Note(f"note: {note}") for note in test["notes"])


def compare_markdown(comparison: _Json) -> str:
    return markdown(_compare_document(comparison), special="|")


def compare_html(comparison: _Json) -> str:
    return page_html(_compare_document(comparison), *_ASSETS)


def _compare_document(comparison: _Json) -> ReportDocument:
    base, *others = (one["label"] for one in comparison["systems"])
    fair = not any(test.get("invalid") or _unmet_rows(test) for test in comparison["tests"])
    items = [
        f"{test['title']}: {'; '.join((*_objections(test), _fairness_text(test)))}"
        for test in comparison["tests"]
    ]
    tiles = []
    for test in comparison["tests"]:
        for other in test["systems"][1:]:
            findings = [
                row["finding"]
                for row in test["comparisons"]
                if row["key"] and row["b_system"] == other["label"]
            ]
            counts = [
                f"{findings.count(finding)} {finding}"
                for finding in ("worse", "better", "no difference shown", "not tested")
                if finding in findings
            ]
            about = f"of the {len(findings)} figures that the test is about"
            title = f"{other['label']}: {test['title']}"
            tiles.append(Tile(title, ", ".join(counts) or "nothing in common", about, test["test"]))
    lead = "Fair." if fair else "Not to be published as it is."
    cautions = dict.fromkeys(text for test in comparison["tests"] for text in _burst_cautions(test))
    return ReportDocument(
        f"{', '.join(others)} against {base}",
        [
            VerdictBox(fair, lead, "The checklist of section 6:", items),
            *(Note(text, lead="Caution:") for text in cautions),
            Tiles(tiles),
            *(Note(f"{text}.") for text in _left_out_lines(comparison)),
        ],
        _systems_table(comparison),
        [
            Section(test["test"], _heading_text(test), list(_comparison_page_blocks(test)))
            for test in comparison["tests"]
        ],
    )


def _systems_table(comparison: _Json) -> list[Block]:
    first = {one["label"]: one for test in comparison["tests"] for one in test["systems"]}
    rows = []
    for system in comparison["systems"]:
        sut, target = first[system["label"]]["sut"], first[system["label"]]["target"]
        cells = [
            sut.get("model") or target.get("model"),
            sut.get("software"),
            at(sut, "hardware", "accelerator"),
            at(sut, "hardware", "count"),
        ]
        cells = [target.get("url", "-"), *(cell or "-" for cell in cells), system["results"]]
        rows.append([system["label"], *map(str, cells)])
    heads = ["system", "address", "model", "software", "accelerator", "count", "results"]
    return [Table(heads, rows, "Systems")]


def _comparison_page_blocks(test: _Json) -> Iterator[Block]:
    yield from _tables_of(test, breaks=True)
    if not test["tables"]:
        yield Note("Nothing could be compared: no load in common, or too few requests.")
    yield ItemList(test["notes"], "notes")
    if test["charts"]:
        yield chart_figure(test["test"], test["charts"])
    if rates := _normalised_tables(test):
        yield from rates
        yield Note(test["normalised"][0]["method"], css="words")
    yield Compliance(test["checklist"]["rows"], "Fair comparison checklist (6)")


def _normalised_tables(test: _Json) -> list[Table]:
    rates = test["normalised"]
    if all(one["tokens_per_gpu_second"] is None and one["tokens_per_currency"] is None for one in rates):
        return []
    rows = [
        [
            one["label"],
            number(one["output_tps_max"]),
            number(one["tokens_per_gpu_second"]),
            number(one["tokens_per_currency"]) + (f" per {one['currency']}" if one["currency"] else ""),
        ]
        for one in rates
    ]
    heads = ["System", "Output tok/s, highest load, median of runs", "tok per GPU-second", "tok by price"]
    return [Table(heads, rows, "Output rates, normalised (6.2)")]


def _fairness_text(test: _Json) -> str:
    """Return the state of the checklist: `4 of 4 MUST, 9 of 13 procedures; lacking: 6.3-p2, 6.4-p6`."""
    checklist, unmet = test["checklist"], _unmet_rows(test)
    levels = ("condition", "procedure")
    must, steps = checklist["must"], sum(row["level"] in levels for row in checklist["rows"])
    done = steps - sum(row["level"] in levels for row in unmet)
    text = f"{must['satisfied']} of {must['n']} MUST, {done} of {steps} procedures"
    return f"{text}; lacking: {', '.join(row['id'] for row in unmet)}" if unmet else text


def _objections(test: _Json) -> list[str]:
    """Return sentences on runs that are not valid, and on differences between the loads of the systems."""
    objections = list(test.get("invalid") or ())
    if test["unlike"]:
        objections.append("loads differ, and figures of them are not tested")
        objections += test["unlike"]
    return objections


def _burst_cautions(test: _Json) -> list[str]:
    """Return a caution for each system whose chunks come in bursts."""
    cautions = test.get("cautions") or ()
    sentences = [burst_sentences(one["events_per_read"], one["system"])[0] for one in cautions]
    return [f"{sentence} Compare TTFT and E2E; TBC and TPOT are not tested." for sentence in sentences]


def _unmet_rows(test: _Json) -> list[_Json]:
    return [row for row in test["checklist"]["rows"] if row["status"] in ("not met", "cannot tell")]


def _left_out_lines(comparison: _Json) -> list[str]:
    """Return lines on tests that only one of the systems has results of."""
    return [
        f"left out: {one['test']}, of which only {', '.join(one['only'])} has results"
        for one in comparison["left_out"]
    ]


def _heading_text(test: _Json) -> str:
    others = [f"{one['label']} ({count_with_noun(one['runs'], 'run')})" for one in test["systems"]]
    return f"{test['section']} {test['title']}: {', '.join(others[1:])} against {others[0]}"
