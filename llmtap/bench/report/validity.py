"""Judge which figures of a benchmark are valid, doubtful or not valid, from the verdicts of its loads.

`report.py` stores `verdict_of_test` in the report of each test, and `document_verdict` in the document. A
figure of a test has its worst state over all loads. A test requests the figures of `BenchTest.figures`, and
is valid if each of them is valid or doubtful in every load; a finding about another figure is a caution.
Failed requests are expected in a test that goes to the server's limits (`BenchTest.overloads`); in other
tests they mean that the load failed. `contradictions` checks the figures of a test against each other and
against the definitions of DEFINITIONS.md, "Load and length".
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from llmtap.bench.report.documents import (
    BenchFigure,
    BenchFinding,
    BenchRepeat,
    BenchReport,
    BenchStep,
    DocumentFinding,
    DocumentVerdict,
    ReportVerdict,
)
from llmtap.bench.run.levels import is_sustained
from llmtap.bench.run.test import BenchTest
from llmtap.load.replay.findings import FIGURES
from llmtap.load.replay.verdict import FigureState, figure_title, verdict_sentence
from llmtap.report.values import at, count_with_noun, number

FAILED: Final = "failed"
"""Code of the finding that a load has failed requests."""
COMPLETED_MIN: Final = 0.9
"""Share of the sent requests that must complete in a level; else it is not sustained (IETF 5.2.3.1)."""
_WORST: Final = (FigureState.NOT_VALID, FigureState.DOUBTFUL, FigureState.VALID)
_SHARES: Final = ("p50", "p95", "p99")
_MAXIMA: Final = {
    "max_output_tps": "output_tps",
    "max_request_rps": "completed_rps",
    "max_input_tps": "input_tps",
}
_Json = Mapping[str, Any]


def verdict_of_test(
    test: BenchTest[Any],
    steps: Sequence[BenchStep],
    measurements: _Json,
    missed_objectives: Sequence[str] = (),
) -> ReportVerdict:
    """Return the verdict of a test. `missed_objectives`: objectives that no load met."""
    verdicts = [(step.name, at(step.result, "verdict") or {}) for step in steps]
    by_kind: dict[str, list[BenchFinding]] = {"findings": [], "cautions": [], "failures": []}
    failed = False
    for name, verdict in verdicts:
        for finding in verdict.get("findings") or ():
            kind = _finding_kind(finding, test)
            failed |= not test.overloads if kind == "failures" else bool(finding.get("failed"))
            by_kind[kind].append(BenchFinding(name, finding["what"], finding["says"], finding.get("share")))
    answers = [at(step.result, "outcomes", name) for step in steps for name in ("complete", "refused")]
    if steps and not any(answers):
        sentence = "no request of any load ended well"
        by_kind["findings"].append(BenchFinding(steps[-1].name, "no_answers", sentence))
        failed = True
    figures = _figure_states(test, verdicts)
    last_step = steps[-1].name if steps else ""
    for what, name, sentence in contradictions(measurements):
        by_kind["findings" if what == "contradiction" else "cautions"].append(
            BenchFinding(last_step, what, sentence)
        )
        if name in figures:
            worse = FigureState.NOT_VALID if what == "contradiction" else FigureState.DOUBTFUL
            figures[name].state = min((FigureState(figures[name].state), worse), key=_WORST.index)
    return ReportVerdict(
        valid=not by_kind["findings"],
        grade=grade_of(by_kind["findings"], by_kind["cautions"]),
        failed=failed,
        missed=list(missed_objectives),
        figures=figures,
        says=_validity_text(figures, failed=failed, missed_objectives=missed_objectives),
        **by_kind,
        unchecked=[
            BenchFinding(name, "unchecked", reason)
            for name, verdict in verdicts
            for reason in verdict.get("unchecked") or ()
        ],
    )


def _finding_kind(finding: _Json, test: BenchTest[Any]) -> str:
    """Return the name of the list in `ReportVerdict` to which a finding of a load belongs."""
    if finding["what"] == FAILED:
        return "failures"
    invalidated = finding.get("spoils")
    if invalidated is None:  # An earlier version of llmtap stored `invalidates` instead.
        return "findings" if finding.get("invalidates", True) else "cautions"
    return "findings" if finding.get("failed") or set(invalidated) & set(test.figures) else "cautions"


def _figure_states(test: BenchTest[Any], verdicts: Sequence[tuple[str, _Json]]) -> dict[str, BenchFigure]:
    """Return for each figure of a test whether the load generator was good enough to measure it."""
    figures: dict[str, BenchFigure] = {}
    for name in FIGURES:
        states = [(step, one) for step, v in verdicts if (one := at(v, "figures", name)) is not None]
        if not states:
            continue
        loads = {
            state.value: [step for step, one in states if one["state"] == state]
            for state in (FigureState.NOT_VALID, FigureState.DOUBTFUL)
        }
        errors = [one["error"] for _, one in states if one.get("error") is not None]
        figures[name] = BenchFigure(
            title=figure_title(name),
            state=min((one["state"] for _, one in states), key=_WORST.index),
            requested=name in test.figures,
            error=max(errors, default=None),
            n=len(states),
            loads=loads,
        )
    return figures


def _validity_text(
    figures: Mapping[str, BenchFigure], *, failed: bool, missed_objectives: Sequence[str]
) -> str:
    prefix = "".join(f"{text}; " for text in missed_objectives)
    states = {name: one.state for name, one in figures.items() if one.requested}
    return prefix + verdict_sentence(states, failed=failed)


def document_verdict(reports: Sequence[BenchReport | BenchRepeat]) -> DocumentVerdict:
    """Return the verdict over the reports of all tests and runs."""
    by_kind = {
        kind: [
            DocumentFinding(
                report.test, _name_with_run(report, finding.step), finding.what, finding.says, finding.share
            )
            for report in reports
            for finding in getattr(report.verdict, kind)
        ]
        for kind in ("findings", "cautions", "unchecked")
    }
    verdicts = {_name_with_run(report, report.test): report.verdict for report in reports}
    sentences = {name: one.says for name, one in verdicts.items() if one.says}
    parts = [f"{name}: {sentence}" for name, sentence in sentences.items() if sentence != _ALL_VALID]
    if rest := len(sentences) - len(parts):
        parts.append(f"{count_with_noun(rest, 'other test' if parts else 'test')}: {_ALL_VALID}")
    return DocumentVerdict(
        valid=not by_kind["findings"],
        grade=grade_of(by_kind["findings"], by_kind["cautions"]),
        failed=any(one.failed for one in verdicts.values()),
        missed=[f"{name}: {text}" for name, one in verdicts.items() for text in one.missed],
        says="; ".join(parts),
        **by_kind,
    )


_ALL_VALID: Final = verdict_sentence({})


def grade_of(findings: Sequence[Any], cautions: Sequence[Any]) -> str:
    """Return the worst that the load generator's own measurements say about a load."""
    return "not valid" if findings else "caution" if cautions else "valid"


def _name_with_run(report: BenchReport | BenchRepeat, name: str) -> str:
    return name if report.run == 1 else f"run-{report.run}/{name}"


# ---------------------------------------------------------------- contradictions between figures


def contradictions(measurements: _Json) -> Iterator[tuple[str, str, str]]:
    """Yield kind, name of a figure and text for each two figures of a test that cannot both be right.

    Kind `contradiction`: the definitions exclude the two values, so one of the figures is wrong. Kind
    `too_short`: the level is too short to show which figure is right, so the sustainable load is doubtful.
    """
    levels = [level for level in measurements.get("levels") or () if isinstance(level, Mapping)]
    for level in levels:
        step = level.get("step", "a level")
        if "max_output_tps" in measurements and level.get("holds") and level.get("sustained") is False:
            yield "contradiction", "load", f"{step} passes, and is not sustained"
        for metric in ("ttft", "tpot", "e2e"):
            values = [at(level, metric, share, "value") for share in _SHARES]
            known = [value for value in values if value is not None]
            if known != sorted(known):
                yield "contradiction", metric, f"{step}: the percentiles of {metric.upper()} do not rise"
    sustained = [level for level in levels if is_sustained(level)]
    for name, of_level in _MAXIMA.items():
        maximum = measurements.get(name)
        rates = [level[of_level] for level in sustained if level.get(of_level) is not None]
        # Skip results of earlier versions, which lack `sustained`: they define the maximum in another way.
        if (
            maximum is not None
            and levels
            and "sustained" in levels[0]
            and maximum != max(rates, default=None)
        ):
            figure = "tokens" if name == "max_output_tps" else "load"
            yield "contradiction", figure, f"{name} is not the highest rate of the sustained levels"
    sent, completed = measurements.get("sustainable_load_rps"), measurements.get("completed_rps")
    if sent and completed is not None and completed < COMPLETED_MIN * sent:
        text = (
            f"the sustainable load is {number(sent)} req/s, and {number(completed)} req/s completed in its"
            " time: the level is too short to tell, and the load that the server sustains lies between them"
        )
        yield "too_short", "load", text
