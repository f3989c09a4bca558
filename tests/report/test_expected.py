"""Reports of unusual results are as in the files of `expected/`; those of usual ones: `tests/golden/`."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from llmtap.bench.report.compare import compare_results
from llmtap.bench.report.texts import full_markdown, minimum_text
from llmtap.metrics.summary import Summary
from llmtap.report.bench import bench_html, compare_html, compare_markdown, render_bench, render_compare
from llmtap.report.capture import render_capture, render_integrity
from llmtap.report.document import chart_panel, chart_table
from llmtap.report.experiment import demo_blocks, experiment_lines
from llmtap.report.render import terminal
from llmtap.report.replay import render_replay, render_verdicts, replay_html, replay_markdown
from llmtap.report.replay_terms import basis_texts, plan_rows
from llmtap.report.summary import render_summary, system_blocks, system_warnings
from llmtap.report.sweep import sweep_lines, sweep_table
from llmtap.report.sweep_page import sweep_html
from tests.report.results import (
    CAPTURES,
    INTEGRITIES,
    SWEPT,
    SYSTEMS,
    TERMS,
    compared_rows,
    experiment,
    summarised,
)
from tests.report.simulated_runs import flights, run
from tests.support.expected import check_expected
from tests.support.results.bench_documents import CHARTS, bench_document, bench_report, load_step
from tests.support.results.bench_results import results_folder
from tests.support.results.pages import Page
from tests.support.results.replay_results import replay_result

Json = dict[str, Any]
_POINTS = ("x", "y", "texts", "low", "high")
GOOD = replay_result()
FINDINGS = [
    {"test": "ttft", "step": "load", "what": "rate", "says": "too few left"},
    {"test": "ttft", "step": "other", "what": "rate", "says": "too few left, too"},
]


def shown(block: RenderableType, width: int = 100) -> str:
    console = Console(width=width, no_color=True, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(block)
    return capture.get()


def page(text: str) -> str:
    """The headings, the captions and the tables of a page; of its plots, the ends of each line."""
    made = Page(text)
    parts = [*made.headings, *(f"{key}: {said}" for key, said in made.captions.items())]
    parts += [f"{key} | {' | '.join(row)}" for key, rows in made.tables.items() for row in rows]
    for name, plot in made.figures["plots"].items():
        parts.append(
            f"{name} {json.dumps({part: value for part, value in plot.items() if part != 'series'})}"
        )
        for one in plot["series"]:
            ends = {part: [one[part][0], one[part][-1], len(one[part])] for part in ("x", "y") if one[part]}
            rest = {part: value for part, value in one.items() if part not in _POINTS}
            parts.append(f"{name} {json.dumps(rest | ends)}")
    return "\n".join(parts)


def replay() -> Iterator[str]:
    findings = [
        {"what": "dispatch_lateness", "limit": 0.002, "says": "all was late"},
        {"what": "rate", "limit": 0.995, "says": "too few left"},
        {"what": "lost", "limit": 0, "says": "one died\x1b"},
        {"what": "prompt_tokens", "limit": 0.01, "says": "tokens differ", "invalidates": False},
    ]
    bad: Json = {"valid": False, "partial": False, "findings": findings, "unchecked": ["bursts"]}
    stopped = GOOD["load"] | {
        "planned": 500,
        "stopped": "the time was up",
        "retries": {"n": 2, "reasons": {"503": 2}},
    }
    results: dict[str, Json] = {
        "failed": replay_result(failed=3),
        "late": replay_result(60, late_ms=500),
        "few": replay_result(5),
        "many": replay_result(2_000, failed=30),
        "closed": replay_result(closed=True),
        "invalid": GOOD | {"verdict": bad},
        "stopped": GOOD | {"load": stopped},
        "compared": GOOD | {"baseline": compared_rows()},
        "compared, other lengths": GOOD | {"baseline": compared_rows((9, 3))},
    }
    for name, result in results.items():
        yield from (f"# {name}", shown(render_replay(result), 80), replay_markdown(result))
    for name in ("closed", "compared"):
        yield from (f"# page: {name}", page(replay_html(results[name])))
    yield shown(render_verdicts({"replay-1.json": GOOD["verdict"], "replay-2\x1b.json": bad}))


def terms() -> Iterator[str]:
    for name, parts in TERMS:
        changed = {
            part: GOOD.get(part, {}) | told if isinstance(told, dict) else told
            for part, told in parts.items()
        }
        yield f"{name}: {dict(plan_rows(GOOD | changed)).get(name)}"
    yield from basis_texts(GOOD, "tokens", samples="n 120")


def summary() -> Iterator[str]:
    relays = {
        "r0": {"connected": True, "opened": 10, "measured": 7, "dropped": {"tap_full": 2}, "lag_max": 0.0021},
        "r1": {"connected": False},
    }
    empty = Summary().to_dict({"name": "1m", "seconds": 0.0}, 0.0)
    for told in (summarised(20), summarised(1_000), summarised(1) | {"relays": relays}, empty):
        yield shown(render_summary(told), 80)
    for told in SYSTEMS:
        yield from (shown(terminal(system_blocks(told)), 140), *system_warnings(told))


def capture() -> Iterator[str]:
    yield from (shown(render_capture(told), 200) for told in CAPTURES)


def integrity() -> Iterator[str]:
    yield from (shown(render_integrity(told), 200) for told in INTEGRITIES)


CAUTION: Json = {
    "arm": "marked",
    "metrics": ["tpot", "tbc", "itl"],
    "events_per_read": 8.0,
    "control_events_per_read": 1.05,
}


def experiments() -> Iterator[str]:
    bursts, broken = experiment(60), experiment(60)
    bursts["cautions"] = [CAUTION]
    broken["sample_ratio"] |= {"alarm": True, "p": 1e-9}
    found = (
        {"state": "none"},
        {},
        experiment(10, slower_ms=300),
        experiment(200, slower_ms=300),
        experiment(200),
        experiment(200, refused=100),
        bursts,
        broken,
    )
    for told in found:
        yield from experiment_lines(told)


def demos() -> Iterator[str]:
    told = summarised(120)
    goodput = {"met": 119, "counted": 120, "objectives": "ttft:500ms"}
    of_tap = told | {"added": {"first_chunk": {"n": 120, "p50": 0.0001845}}, "goodput": goodput}
    exchanges = [{"uncertainty": i / 1e5} for i in range(100)]
    bursts = experiment(60) | {"cautions": [CAUTION]}
    for told in (experiment(10), experiment(60, slower_ms=179, refused=5), experiment(200), bursts):
        yield shown(terminal(demo_blocks(of_tap, told, exchanges)))


def charts() -> Iterator[str]:
    empty = CHARTS[0] | {"series": [{"name": "none", "x": [], "y": [], "low": [], "high": []}]}
    for chart in (*CHARTS, empty):
        panel, table = chart_panel(chart), chart_table(chart)
        yield from (panel.words, msgspec.json.encode(panel.plot).decode(), str(panel.legend))
        yield from map(" | ".join, (table.heads, *table.rows))


def bench() -> Iterator[str]:
    report = bench_report(deviations=["too short"], forfeits=["5.1.2.1-1"], steps=[load_step(n=200)])
    itl = bench_report("itl", section="5.4", title="Inter-Token Latency Distribution", charts=CHARTS[:3])
    closed = bench_report(steps=[load_step(closed=8, rate=None)])
    not_run = [{"test": "fairness", "why": "[arms.x] is missing", "hint": "add it", "begun": False}]
    bad = {"valid": False, "findings": FINDINGS}
    price = bench_document()
    price["sut"]["hardware"] |= {"currency": "USD", "price_per_hour": 2.5}
    documents: Sequence[Json] = (
        bench_document(report, not_run=not_run, verdict=bad, quick=True),
        bench_document(report, itl),
        bench_document(closed, sut={"hardware": {"cpu": "2 CPUs"}}),
        price,
        bench_document(sut={"hardware": {"accelerator": "none", "count": 0, "cpu": "2 CPUs"}}),
        {"tests": [], "verdict": {"valid": True}},
    )
    for document in documents:
        yield from (shown(render_bench(document)), minimum_text(document), full_markdown(document))
        yield page(bench_html(document))


def compare(tmp_path: Path) -> Iterator[str]:
    a = results_folder(tmp_path / "a", test="itl", runs=2, requests=60)
    b = results_folder(
        tmp_path / "b",
        test="itl",
        runs=2,
        requests=60,
        gaps_slower=1.1,
        changes={"params.requests": 200, "sut.hardware.count": 4, "sut.hardware.price_per_hour": 10.0},
    )
    told = msgspec.to_builtins(compare_results(a, [b]))
    for system in told["systems"]:
        system["results"] = system["label"]
    nothing = dict(told["tests"][0], tables=[], charts=[], comparisons=[], notes=[])
    for one in (told, {**told, "tests": [nothing], "left_out": [{"test": "ttft", "only": ["a"]}]}):
        yield from (shown(render_compare(one), 160), compare_markdown(one), page(compare_html(one)))


def sweep_tables() -> Iterator[str]:
    for results in SWEPT:
        for sla in (False, True):
            table = sweep_table(results, sla=sla)
            yield from (" | ".join(table.heads), *map(" | ".join, table.rows), *sweep_lines(results, sla=sla))


def sweep_pages() -> Iterator[str]:
    rates = [run(s, r) for s in ("static_fifo", "multi_bin_dynamic") for r in (3, 1, 9)]
    levels = [run("m", 1, bins=b, utilization=b / 10) for b in (2, 4)] + [run("f", 1, utilization=0.7)]
    found: dict[str, Any] = {"allowed": 0.01, "rps": 3, "by": {"request": 3}}
    capacity = [run("a", r, n=n, capacity=found) for r, n in ((1, 999), (2, 1_000))]
    set_ = flights(("shortest_predicted_first",), (1.0, 2.0), token_sla="20ms", predictor="noisy")
    own = flights(("output_delay", "continuous_batching"), (1.0,))
    times = {"row": 7, "input": 20, "output": 3, "token_seconds": [0.5, 0.6, 2.0]}
    followed = [run(s, 1, followed=times) for s in ("a", "b")]
    for results in (rates, rates[:1], levels, capacity, set_, own, followed):
        yield page(sweep_html(results))
    yield page(sweep_html([{"scheduler": "a", "n": 5, "throughput_rps": 2.5, "load": {"offered_rps": 3.0}}]))


CASES: dict[str, Callable[[], Iterator[str]]] = {
    one.__name__: one
    for one in (
        replay,
        terms,
        summary,
        capture,
        integrity,
        experiments,
        demos,
        charts,
        bench,
        sweep_tables,
        sweep_pages,
    )
}


@pytest.mark.parametrize("name", [*CASES, "compare"])
def test_reports_are_as_in_their_file(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    found = "\n".join(compare(tmp_path) if name == "compare" else CASES[name]())
    assert "\x1b" not in found
    file = Path(__file__).with_name("expected") / f"{name}.txt"
    check_expected(file, found + "\n", request.config)
