"""Turn the JSON of an A/B experiment into a report for a terminal, as HTML, and as Markdown.

`llmtap report EXPERIMENT.json` takes a stored answer of `/api/v1/experiment`; `report CAPTURE --by arm` takes
the same JSON from the rows of a capture (`meter/recorded_experiment.py`). This module makes no statistical
tests: `meter/experiments.py` has compared the arms. `experiment.py` has the lines for `llmtap top`.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from llmtap.report.document import Block, Note, ReportDocument, Section, Table, VerdictBox, term_blocks
from llmtap.report.experiment import metric_text, ttft_sentence
from llmtap.report.labels import LABELS_TITLE, labels_table
from llmtap.report.render import markdown, page_html, terminal
from llmtap.report.values import at, burst_sentences, counts_text, number, p_text

if TYPE_CHECKING:
    from rich.console import RenderableType

_Json = Mapping[str, Any]
_RECORDED: Final = (
    "Computed from a capture, which does not have the configured shares of the arms: the split of the"
    " requests is not tested, and shares have no p."
)
_ABOUT: Final = (
    "Intervals of differences of means and shares without the words `one look`, and p, are valid however"
    " often one looked at the experiment; all other intervals are valid for one look. The p of a share is"
    " exact, its interval an approximation. A finding has p at most alpha / comparisons."
)


def render_experiment(experiment: _Json) -> "RenderableType":
    document = _document(experiment)
    blocks = [block for section in document.sections for block in section.blocks]
    return terminal([Note(document.title, "bold"), *blocks, *document.summary])


def experiment_html(experiment: _Json) -> str:
    return page_html(_document(experiment))


def experiment_markdown(experiment: _Json) -> str:
    return markdown(_document(experiment))


def _document(experiment: _Json) -> ReportDocument:
    arms, control = experiment["arms"], experiment["control"]
    others = [name for name in arms if name != control]
    return ReportDocument(
        f"Experiment {experiment['name']}",
        [_verdict_box(experiment, arm) for arm in others],
        sections=[
            *(
                Section(
                    f"differences-{i}", f"{arm} compared with {control}", _difference_blocks(experiment, arm)
                )
                for i, arm in enumerate(others)
            ),
            Section("arms", "Arms", [_arms_table(experiment)]),
            *_stage_sections(experiment),
            *_label_sections(experiment),
            Section("experiment", "What was run", term_blocks(list(_setting_rows(experiment)))),
        ],
    )


def _verdict_box(experiment: _Json, arm: str) -> VerdictBox:
    """Return the effects of the arm on median TTFT and refusals, and the doubts about the comparison."""
    items = []
    ratio = experiment["sample_ratio"]
    if ratio["alarm"]:
        items.append(
            f"The units ({counts_text(ratio['units'])}) are not split as configured: compare nothing."
        )
    if stopped := experiment.get("stopped"):
        items.append(f"Stopped at {stopped['at']}: {stopped['arm']} was worse in {stopped['figure']}.")
    items += experiment.get("warnings") or ()
    items += [
        " ".join(burst_sentences(caution["events_per_read"], arm))
        for caution in experiment["cautions"]
        if caution["arm"] == arm
    ]
    sentence = f"{ttft_sentence(experiment, arm, arm)} {_refusal_sentence(experiment, arm)}".strip()
    return VerdictBox(not items, sentence, items=items, caution=not ratio["alarm"])


def _refusal_sentence(experiment: _Json, arm: str) -> str:
    """Return a sentence on the shares of refused requests; empty if neither arm refused any."""
    shares = {name: experiment["arms"][name]["shares"]["refused"] for name in (arm, experiment["control"])}
    if not any(share["share"] for share in shares.values()):
        return ""
    refused = " and ".join(f"{name} {_share_text(share)}" for name, share in shares.items())
    return f"Refused requests: {refused}."


def _difference_blocks(experiment: _Json, arm: str) -> list[Block]:
    control = experiment["control"]
    findings = {one["metric"] for one in experiment["findings"] if one["arm"] == arm}
    misleading = {metric for one in experiment["cautions"] if one["arm"] == arm for metric in one["metrics"]}
    rows = []
    for metric, title in ((one["name"], one["title"]) for one in experiment["compared"]):
        by = experiment["differences"][arm].get(metric) or {}
        tested = by.get("mean") or by.get("share") or {}
        median = by.get("p50") or {}
        p50 = [
            _value_text(metric, at(experiment["arms"][name], "metrics", metric, "p50"))
            for name in (control, arm)
        ]
        p = tested.get("p")
        rows.append(
            [
                title,
                *p50,
                _difference_text(metric, median.get("difference"), median.get("interval")),
                _tested_difference_text(metric, tested),
                "-" if p is None else p_text(p),
                "misleading" if metric in misleading else "finding" if metric in findings else "",
            ]
        )
    heads = [
        "metric",
        f"{control}, median",
        f"{arm}, median",
        "difference of medians",
        "difference of means or shares",
        "p",
        "result",
    ]
    notes = [Note(_ABOUT), *([Note(_RECORDED)] if experiment["state"] == "recorded" else [])]
    return [Table(heads, rows, label=f"Differences of {arm}"), *notes]


def _stage_sections(experiment: _Json) -> Iterator[Section]:
    """Yield a section with a comparison for each stage of a ramp so far; nothing without a ramp."""
    stage = experiment.get("stage")
    if not stage:
        return
    arm = next(name for name in experiment["arms"] if name != experiment["control"])
    now = {
        "number": stage["number"],
        "share": stage["share"],
        "from": stage["since"],
        "to": experiment["state"],
        "units": experiment["sample_ratio"]["units"],
        "differences": experiment["differences"],
    }
    rows = []
    for stage_part in (*stage["earlier"], now):
        by = stage_part["differences"][arm]
        cells = []
        for metric, statistic in (("ttft", "mean"), ("failed", "share"), ("refused", "share")):
            cells.append(_tested_difference_text(metric, by.get(metric, {}).get(statistic) or {}))
        share = f"{100 * stage_part['share']:.4g} %"
        rows.append(
            [
                f"{stage_part['number']} of {stage['of']}",
                share,
                stage_part["from"],
                stage_part["to"],
                counts_text(stage_part["units"]),
                *cells,
            ]
        )
    heads = ["stage", arm, "from", "to", "units", "TTFT, mean", "failed", "refused"]
    about = (
        "Each stage is a comparison of its own, and all other figures are of the last one. Figures of stages"
        " are not added up, because the arms have different parts of the traffic of each time."
    )
    yield Section(
        "stages", "Stages", [Note(stage["sentence"]), Table(heads, rows, label="Stages"), Note(about)]
    )


def _value_text(metric: str, value: float | None) -> str:
    return "-" if value is None else metric_text(metric, value)


def _tested_difference_text(metric: str, d: _Json) -> str:
    """Return a difference with the interval that is valid at every look, or else with that for one look."""
    anytime = d.get("anytime_interval")
    suffix = "" if anytime else ", one look"
    return _difference_text(metric, d.get("difference"), anytime or d.get("interval"), suffix)


def _difference_text(
    metric: str, value: float | None, interval: tuple[float, float] | None, suffix: str = ""
) -> str:
    if value is None:
        return "-"
    text = metric_text(metric, value, signed=True)
    if interval is None:
        return text
    low, high = (metric_text(metric, end, signed=True) for end in interval)
    return f"{text} ({low} to {high}{suffix})"


def _arms_table(experiment: _Json) -> Table:
    rows = []
    for name, arm in experiment["arms"].items():
        shares = [_share_text(arm["shares"][share]) for share in ("refused", "failed", "cancelled")]
        refusals = counts_text(arm["refusals"]) if arm["refusals"] else "none"
        counts = [f"{arm[key]:,}" for key in ("assigned", "units", "ended")]
        rows.append([name, *counts, *shares, refusals])
    heads = ["arm", "assigned", "units", "ended", "refused", "failed", "cancelled", "refusals by kind"]
    return Table(heads, rows, label="Arms")


def _label_sections(experiment: _Json) -> Iterator[Section]:
    # Experiments that an earlier version of llmtap stored have no labels.
    table = labels_table({name: arm.get("labels") for name, arm in experiment["arms"].items()}, "arm")
    if table is not None:
        yield Section("labels", LABELS_TITLE, [table])


def _share_text(share: _Json) -> str:
    if share["share"] is None:
        return "-"
    low, high = share["interval"] or (None, None)
    interval = "" if low is None else f" ({low:.1%} to {high:.1%})"
    return f"{share['share']:.1%}{interval}"


def _setting_rows(experiment: _Json) -> Iterator[list[str]]:
    switched = "" if experiment["switched_by"] is None else f", switched by {experiment['switched_by']}"
    since = "" if experiment["state"] == "recorded" else f" since {experiment.get('since') or '?'}"
    yield ["state", f"{experiment['state']}{since}{switched}"]
    figures = experiment.get("figures") or {}  # Experiments of earlier versions have no `figures`.
    yield ["requests in the figures", f"{figures.get('from') or '?'} to {figures.get('to') or '?'}"]
    if experiment["state"] != "recorded" and experiment.get("until"):
        yield ["end of the experiment", experiment["until"]]
    unit = experiment["unit"]
    yield ["unit of randomisation", "conversation or tenant" if unit == "unit" else unit]
    if experiment["aa"]:
        yield ["A/A", "both arms are treated in the same way"]
    yield ["alpha", f"{number(experiment['alpha'])}, for {experiment['comparisons']} comparisons"]
    yield ["means are compared from", f"{experiment['units_needed']} units in each arm"]
    p = experiment["sample_ratio"]["p"]
    tested = "not tested" if p is None else f"p {p_text(p)}"
    yield ["sample ratio", f"{counts_text(experiment['sample_ratio']['units'])} ({tested})"]
    if experiment["covariate"] != "none":
        yield ["covariate", experiment["covariate"]]
    for name, value in experiment["disclosure"].items():
        yield [name.replace("_", " "), _disclosure_text(value)]


def _disclosure_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return "; ".join(f"{name.replace('_', ' ')}: {_disclosure_text(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_disclosure_text, value))
    return "-" if value in (None, "") else str(value)
