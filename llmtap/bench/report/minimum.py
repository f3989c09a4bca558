"""The minimum viable report, to the letter of IETF seed 000, C.1: a page that can be pasted anywhere.

One load stands for the whole under "Test Configuration" and for TTFT and TPOT: that of the TTFT test where it
was run, else of the first test there is (`main_load.py`). Which one it is stands in the notes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from llmtap.bench.report.main_load import main_load
from llmtap.metrics.statistics import SAMPLES_MIN
from llmtap.report.bench import compliance_said, findings_said
from llmtap.report.values import milliseconds, number

__all__ = ["guardrails_said", "hardware_said", "load_said", "minimum_text", "workload_said"]

BOUNDARIES: Final = {
    "model engine": "Model Engine", "application gateway": "Gateway", "compound system": "Compound",
}  # fmt: skip
NOT_SAID: Final = "not declared"
NOT_MEASURED: Final = "not measured"
TTFT_P99_MAX: Final = 0.5
"""C.1's own bound, in seconds."""
_FOR_LATENCY: Final = ("ttft", "tradeoff", "throughput", "itl", "capacity")
_FOR_THROUGHPUT: Final = ("throughput", "tradeoff")
_Found = tuple[Mapping[str, Any], Mapping[str, Any]]


def minimum_text(document: Mapping[str, Any]) -> str:
    """The report of a benchmark's document (`bench/report.py`), as plain text."""
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    sut = document.get("sut") or {}
    main = _main_load(document)
    result: Mapping[str, Any] = {} if main is None else main[1]["result"]
    yield "=== LLM Benchmark Report (Minimum) ==="
    yield ""
    yield "System Identification:"
    yield f"- Model: {sut.get('model') or (document.get('target') or {}).get('model') or NOT_SAID}"
    yield f"- Hardware: {hardware_said(sut)}"
    yield f"- Software: {sut.get('software') or NOT_SAID}"
    yield f"- SUT Boundary: {BOUNDARIES.get(sut.get('boundary') or '', NOT_SAID)}"
    yield ""
    yield "Test Configuration:"
    yield f"- Workload: {workload_said(result)}"
    yield f"- Load Model: {NOT_SAID if main is None else load_said(main[1])}"
    yield f"- Request Count: {result.get('n', NOT_MEASURED)}"
    seconds = (result.get("window") or {}).get("seconds")
    yield f"- Test Duration: {NOT_MEASURED if seconds is None else f'{number(seconds)} seconds'}"
    yield ""
    yield "Key Results:"
    for title, metric in (("TTFT", "ttft"), ("TPOT", "tpot")):
        figures = (result.get("metrics") or {}).get(metric) or {}
        for name in ("p50", "p99"):
            yield f"- {title} {name.upper()}: {_ms(figures.get(name))}"
    most, held = _throughputs(document)
    yield f"- Max Throughput: {_tps(most)}"
    yield f"- Throughput at P99 TTFT < 500ms: {_tps(held)}"
    yield ""
    yield "Notes:"
    yield from (f"- {note}" for note in _notes(document, main))
    yield ""
    yield "=== End Report ==="


def hardware_said(sut: Mapping[str, Any]) -> str:
    """`H100 SXM x 8`, or `no accelerator`; memory and host where they are declared."""
    hardware = sut.get("hardware") or {}
    accelerator, count = hardware.get("accelerator"), hardware.get("count")
    if not accelerator:
        return f"{NOT_SAID} (host: {hardware['cpu']})" if hardware.get("cpu") else NOT_SAID
    said = f"{accelerator} x {'?' if count is None else count}"
    if accelerator == "none":
        said = "no accelerator"
    more = [hardware[name] for name in ("memory", "cpu") if hardware.get(name)]
    return f"{said} ({', '.join(more)})" if more else said


def workload_said(result: Mapping[str, Any]) -> str:
    """The workload's name, or the trace's."""
    plan = result.get("plan") or {}
    return str((plan.get("workload") or {}).get("name") or plan.get("trace") or NOT_SAID)


def load_said(step: Mapping[str, Any]) -> str:
    """`open-loop 10 requests/s, poisson` or `closed-loop 8 concurrent`, of one load."""
    load, plan = step.get("load") or {}, step["result"].get("plan") or {}
    if load.get("closed") is not None:
        return f"closed-loop {load['closed']:,} concurrent"
    told = step["result"].get("load") or {}
    rate = load.get("rate_rps") or told.get("planned_rps") or told.get("offered_rps")
    process = (plan.get("arrivals") or {}).get("arrivals")
    said = "open-loop" if rate is None else f"open-loop {number(rate)} requests/s"
    return f"{said}, {process}" if process else said


def guardrails_said(sut: Mapping[str, Any]) -> str:
    """Whether prompts and answers are filtered, and by what (4.8.1)."""
    guardrails = sut.get("guardrails") or {}
    words = {True: "on", False: "off", None: NOT_SAID}
    said = [
        f"{side} filter {words[guardrails.get(f'{side}_filter')]}" for side in ("input", "output")
    ]  # fmt: skip
    return ", ".join([*said, *(guardrails.get("names") or ())])


def _main_load(document: Mapping[str, Any]) -> _Found | None:
    """The report and the load that stand for the whole."""
    reports = {report["test"]: report for report in document.get("tests") or ()}
    for name in (*_FOR_LATENCY, *reports):
        load = main_load(reports[name]) if name in reports else None
        if load is not None:
            return reports[name], load
    return None


def _throughputs(document: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """The most output tokens per second that were sustained, and the most of a sustained level whose P99 of
    TTFT was below C.1's bound."""
    reports = {report["test"]: report.get("measurements") or {} for report in document.get("tests") or ()}
    levels = [level for name in _FOR_THROUGHPUT for level in (reports.get(name) or {}).get("levels") or ()]
    sustained = [level for level in levels if level["holds"] and level["output_tps"] is not None]
    held = [
        level["output_tps"]
        for level in sustained
        if (p99 := _figure(level["ttft"], "p99")) is not None and p99 < TTFT_P99_MAX
    ]
    most = (reports.get("throughput") or {}).get("max_output_tps")
    if most is None:
        most = max((level["output_tps"] for level in sustained), default=None)
    return most, max(held, default=None)


def _figure(row: Mapping[str, Any], name: str) -> float | None:
    """Of a row of percentiles, with or without their intervals."""
    figure = row.get(name)
    value: float | None = figure["value"] if isinstance(figure, Mapping) else figure
    return value


def _notes(document: Mapping[str, Any], main: _Found | None) -> Iterator[str]:
    reports: Sequence[Mapping[str, Any]] = document.get("tests") or ()
    if main is not None:
        report, step = main
        arm = f" ({step['arm']})" if step["arm"] else ""
        name = f"{report['section']} {report['title']}, load {step['name']}{arm}"
        yield f"Configuration, TTFT and TPOT are of {name}"
        figures = (step["result"].get("metrics") or {}).get("ttft") or {}
        if figures.get("n") and figures["n"] < SAMPLES_MIN["p99"]:
            least = SAMPLES_MIN["p99"]
            yield f"P99 rests on {figures['n']:,} samples; {least:,} are needed for 10 % accuracy (5.1.4.3)"
    deviations = [(report["test"], said) for report in reports for said in report.get("deviations") or ()]
    yield from (f"Deviation ({test}): {said}" for test, said in deviations)
    if document.get("quick"):
        yield "Deviation: shortened tests (--quick), whose figures are indicative"
    lacking = [report for report in reports if (report.get("compliance") or {}).get("why")]
    yield from (f"Deviation ({report['test']}): {compliance_said(report)}" for report in lacking)
    if not deviations and not lacking and not document.get("quick"):
        yield "No deviation from the methodology is known to the tests that were run"
    for said in findings_said((document.get("verdict") or {}).get("findings") or ()):
        yield f"Not to be relied on: {said}"
    yield f"Guardrails: {guardrails_said(document.get('sut') or {})}"
    refused = sum(report.get("refused") or 0 for report in reports)
    yield f"Requests refused by guardrails: {refused}"


def _ms(seconds: float | None) -> str:
    return NOT_MEASURED if seconds is None else f"{milliseconds(seconds)} ms"


def _tps(rate: float | None) -> str:
    return NOT_MEASURED if rate is None else f"{number(rate)} tok/s"
