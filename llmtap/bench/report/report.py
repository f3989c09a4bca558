"""Make the report of each benchmark test and the document of all tests (`documents.py`).

`bench/run/perform.py` calls `report_of` after each test and `document_of` at the end; `load_document` makes
the document from a results folder. Compliance is judged here; `texts.py` and `llmtap/report/bench.py` render
the document.
"""

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import msgspec

from llmtap.bench.compliance.evidence import MODEL_LOAD, at, plural
from llmtap.bench.compliance.judge import judge
from llmtap.bench.report.documents import BenchDocument, BenchReport, BenchSetup, BenchStep, LoadTasks, NotRun
from llmtap.bench.report.validity import document_verdict, verdict_of_test
from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.session import REQUESTS_FILE, RESULT, BenchSession, Folder, StoredRequests
from llmtap.bench.run.test import TESTS, BenchTest, ChartSeries, ChartSpec, ReportTable, TestResult
from llmtap.bench.sut.clock_offset import NOT_KNOWN, ClockOffset
from llmtap.bench.sut.start import model_load_text
from llmtap.bench.sut.sut import params_document, without_secrets
from llmtap.errors import ConfigError
from llmtap.json_types import json_value
from llmtap.metrics.deadlines import Benefit, user_idle_ns
from llmtap.metrics.latency import DEFAULT_BENEFIT
from llmtap.report.replay_terms import selftest_text, tpot_text
from llmtap.report.values import figures_text
from llmtap.units import NS_PER_S, to_seconds
from llmtap.version import __version__


def stream_charts(measured: Measurement, reader: Benefit = DEFAULT_BENEFIT) -> list[ChartSpec]:
    """Return charts of two streams: of the median and of the longest user idle latency.

    Each chunk is drawn with the mean number of tokens per chunk of its response.
    """
    table = measured.successful_rows().select(["ttft_any_ns", "gaps_ns", "output_tokens"])
    streams = []
    for first_ns, gaps_ns, tokens in zip(*(column.to_pylist() for column in table.columns), strict=True):
        if first_ns is not None and gaps_ns:
            tokens_per_chunk = max(1.0, (tokens or 0) / (len(gaps_ns) + 1))
            times_ns = list(accumulate([first_ns, *gaps_ns]))
            idle_ns = user_idle_ns(
                times_ns, 0, tokens_per_chunk, reader.reader_ns_per_token, grace_tokens=reader.grace_tokens
            )
            streams.append((idle_ns or 0, times_ns, tokens_per_chunk))
    streams.sort(key=lambda stream: stream[0])
    if not streams:
        return []
    chosen = {"usual": streams[(len(streams) - 1) // 2], "worst": streams[-1]}
    return [_stream_chart(name, reader, *stream) for name, stream in chosen.items()]


def reading_times_ns(times_ns: Sequence[int], per_event_ns: int) -> list[int]:
    """Return when a user begins to read each event: when it has arrived and the one before has been read.

    `per_event_ns`: time to read an event.
    """
    begins_ns: list[int] = []
    for t_ns in times_ns:
        begins_ns.append(max(t_ns, begins_ns[-1] + per_event_ns) if begins_ns else t_ns)
    return begins_ns


def _stream_chart(
    name: str, reader: Benefit, idle_ns: int, times_ns: list[int], tokens_per_chunk: float
) -> ChartSpec:
    tokens: list[float | None] = [round((i + 1) * tokens_per_chunk, 2) for i in range(len(times_ns))]
    per_event_ns = round(tokens_per_chunk * reader.reader_ns_per_token)
    grace_ns = reader.grace_tokens * reader.reader_ns_per_token
    lines = {
        "delivered": times_ns,
        f"read, at {reader.speed:g} tokens/s": reading_times_ns(times_ns, per_event_ns),
        "wanted (deadline)": [i * per_event_ns + grace_ns for i in range(len(times_ns))],
    }
    idle_eq4_ns = user_idle_ns(times_ns, 0, tokens_per_chunk, reader.reader_ns_per_token, grace_tokens=1) or 0
    title = (
        f"A stream, the {name}: its reader waits {idle_ns / 1e6:,.0f} ms in all; with token i due at V i"
        f" (001, eq. 4), {idle_eq4_ns / 1e6:,.0f} ms"
    )
    series = [ChartSeries(line, [to_seconds(ns) for ns in at_ns], tokens) for line, at_ns in lines.items()]
    return ChartSpec(title, "steps", "time since submission (s)", "tokens", series)


SETUP_FILE: Final = "bench.json"
"""File with the settings of a benchmark, in its results folder."""
_PACKAGES: Final = (
    "aiohttp",
    "uvloop",
    "httptools",
    "msgspec",
    "pyarrow",
    "numpy",
    "scipy",
    "grpcio",
    "tokenizers",
    "tiktoken",
)
_OPTION_TEXTS: Final = {
    "A": "time between chunks",
    "A (direct)": "time between chunks, nearly all of which have one token",
    "B": "all tokens of a chunk at its time",
    "C": "the server's own stamps",
}
_VARIANT: Final = "B-even"
"""Variant of ITL option B in the results of loads; it is not an option of the draft."""
_OUTPUT_CONTROL: Final = "plan.body.output_control"
_STREAM_TESTS: Final = frozenset({"ttft", "itl"})
"""Tests whose report has charts of two streams of the last load (`stream_charts`)."""
_LONG_FIELDS: Final = ("timeline", "hdr_histograms")


def report_of(
    test: BenchTest[Any],
    params: msgspec.Struct,
    session: BenchSession,
    result: TestResult,
    *,
    began_ns: int,
    ended_ns: int,
    selftest: Mapping[str, Any] | None = None,
    clock_offset: ClockOffset | None = None,
) -> BenchReport:
    """Return the report of one test with its compliance. `began_ns` and `ended_ns` are wall-clock times."""
    steps, measurements = list(_bench_steps(session)), result.measurements_to_dict()
    option = _itl_option(result, steps)
    trip = next(
        (round_trip for step in steps if (round_trip := step.result.get("round_trip")) is not None), None
    )
    charts = list(result.charts)
    if test.name in _STREAM_TESTS and session.steps:
        charts += stream_charts(session.steps[-1], session.reader)
    tasks = task_times(steps) if session.sut.boundary == "compound system" else None
    report = BenchReport(
        test=test.name,
        section=test.section,
        title=test.title,
        run=session.run,
        quick=session.quick,
        params=params_document(params),
        sut=session.sut,
        target=without_secrets(session.target),
        arms={name: without_secrets(arm) for name, arm in session.arms.items()},
        seed=session.seed,
        warmup=session.warmup,
        began=date_of(began_ns),
        ended=date_of(ended_ns),
        versions=versions(),
        steps=steps,
        warmups=session.warmups,
        refused=session.refused,
        measurements=measurements,
        headline=result.headline,
        tasks=tasks,
        tables=[*result.tables, *([] if tasks is None else [_task_table(tasks)])],
        charts=charts,
        configuration=result.configuration
        | dict(_configuration(session, steps, option, trip, selftest, clock_offset)),
        round_trip=trip,
        clock_offset=clock_offset,
        model_load=session.model_load,
        selftest=selftest,
        notes=[*result.notes, *_warmup_notes(session), *_itl_notes(steps), *_tpot_notes(steps)],
        deviations=[*result.deviations, *_workload_deviations(steps)],
        main=result.main,
        itl_option=option,
        exact_requests=_exact_requests(steps),
        forfeits=list(test.forfeits) if session.quick else [],
        verdict=verdict_of_test(test, steps, measurements, result.missed_objectives),
    )
    return msgspec.structs.replace(report, compliance=judge(json_value(report)).to_dict())


def task_times(steps: Sequence[BenchStep]) -> list[LoadTasks]:
    """Return the task times of each load: of conversations, or if it has none, of requests."""
    tasks = []
    for step in steps:
        if at(step.result, "tasks") is None:
            kind, n, duration = "request", "n", "metrics.e2e"
        else:
            kind, n, duration = "conversation", "tasks.n", "tasks.duration"
        tasks.append(LoadTasks(step.name, kind, at(step.result, n), at(step.result, duration)))
    return tasks


_TASK_SHARES: Final = ("mean", "p50", "p95", "p99")


def _task_table(tasks: Sequence[LoadTasks]) -> ReportTable:
    rows = [
        [one.step, one.task, f"{one.n:,}", *figures_text(one.duration or {"n": 0}, _TASK_SHARES)]
        for one in tasks
    ]
    heads = ["Load", "Task", "Tasks", "Completed", "Mean (ms)", "P50 (ms)", "P95 (ms)", "P99 (ms)"]
    return ReportTable("Task times of the compound system, end to end (4.1.3)", heads, rows)


def _configuration(
    session: BenchSession,
    steps: Sequence[BenchStep],
    option: str | None,
    trip: float | None,
    selftest: Mapping[str, Any] | None,
    clock_offset: ClockOffset | None,
) -> Iterator[tuple[str, str]]:
    """Yield labels and values of the configuration lines that the reports of all tests have."""
    if option is not None:
        yield "ITL option (4.6.3)", "; ".join(f"{one}: {_OPTION_TEXTS[one]}" for one in option.split(" + "))
    if controls := list(dict.fromkeys(filter(None, (at(step.result, _OUTPUT_CONTROL) for step in steps)))):
        yield "Control of output length (4.3.1)", ", ".join(controls)
    if trip is not None:
        value = f"{trip * 1e3:.3f} ms before the first load; no latency is adjusted for it"
        yield "Network round trip (4.7.3)", value
    yield "NTP offset of the load generator (4.7.2)", NOT_KNOWN if clock_offset is None else clock_offset.text
    if session.model_load is not None:
        yield MODEL_LOAD, model_load_text(session.model_load)
    if session.reader != DEFAULT_BENEFIT:
        yield "Reader", session.reader.text
    if selftest is not None:
        yield "error of our own times", selftest_text(selftest)


def document_of(
    setup: BenchSetup, reports: Sequence[BenchReport], not_run: Sequence[NotRun] = ()
) -> BenchDocument:
    """Return the document of all tests; reports of second and later runs are shortened."""
    return BenchDocument(
        **msgspec.structs.asdict(setup),
        tests=[report for report in reports if report.run == 1],
        repeats=[report.to_repeat() for report in reports if report.run > 1],
        not_run=list(not_run),
        verdict=document_verdict(reports),
    )


def _warmup_notes(session: BenchSession) -> list[str]:
    if session.warmup == "none":
        return ["cold start: the SUT was not warmed up"]
    return ["no measured prompt was sent to warm up: none was in a prefix cache for that reason"]


def _workload_deviations(steps: Sequence[BenchStep]) -> list[str]:
    """Return the deviations of the loads' workloads from the draft, without repetitions."""
    texts = (
        f"{one['section']}: the draft has {one['says']}; here {one['here']}"
        for step in steps
        for one in at(step.result, "plan.workload.deviations") or ()
    )
    return list(dict.fromkeys(texts))


def is_results_folder(folder: Path) -> bool:
    """Return whether a folder is a results folder of `llmtap bench`."""
    return (folder / SETUP_FILE).is_file()


def load_document(folder: Path) -> BenchDocument:
    """Return the document of a results folder, with the reports of all complete tests.

    Raises ConfigError if the folder has no complete test, or is not a readable results folder.
    """
    if not is_results_folder(folder):
        hint = "give the folder of --results of an earlier llmtap bench"
        raise ConfigError(
            str(folder), f"is not a results folder of llmtap bench: it has no {SETUP_FILE}", hint
        )
    results = Folder(folder)
    setup = results.read(SETUP_FILE, BenchSetup)
    reports = [
        results.subfolder(name).run(run).read(RESULT, BenchReport)
        for name in TESTS
        if (folder / name).is_dir()
        for run in results.subfolder(name).runs()
    ]
    if not reports:
        raise ConfigError(
            str(folder),
            "has no result of a complete test",
            "run the same llmtap bench command again: it continues the unfinished tests",
        )
    return document_of(setup, reports)


def versions() -> dict[str, str]:
    """Return the versions of llmtap, Python and the packages that affect measurements."""
    by_name = {
        "llmtap": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": str(os.cpu_count()),
    }
    for package in _PACKAGES:
        try:
            by_name[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return by_name


def date_of(wall_ns: int) -> str:
    """Format a wall-clock time as ISO 8601 in UTC, with milliseconds."""
    moment = datetime.fromtimestamp(wall_ns / NS_PER_S, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _bench_steps(session: BenchSession) -> Iterator[BenchStep]:
    for step in session.steps:
        stored = session.folder.read_json(f"steps/{step.name}/step.json") or {}
        yield BenchStep(
            name=step.name,
            arm=step.arm,
            load=stored.get("load") or {},
            cached=step.cached,
            requests=msgspec.convert(stored.get("requests") or None, StoredRequests | None),
            result=_short_result(step.result),
        )


def _short_result(result: Mapping[str, Any]) -> Mapping[str, Any]:
    short = {name: part for name, part in result.items() if name not in _LONG_FIELDS}
    if system := short.get("system"):
        short["system"] = {name: part for name, part in system.items() if name != "series"}
    return short


def _itl_option(result: TestResult, steps: Sequence[BenchStep]) -> str | None:
    """Return the ITL option of a test, as named in 4.6.3 of the IETF draft (A, B, C).

    By default it is A (time between chunks), which every streamed response has; None without such times.
    """
    if result.itl_option is not None:
        return result.itl_option
    return "A" if any(at(step.result, "metrics.tbc.n") for step in steps) else None


def _itl_notes(steps: Sequence[BenchStep]) -> list[str]:
    options = [str(at(step.result, "metrics.itl.option")) for step in steps]
    with_variant = sum(_VARIANT in option.split("+") for option in options)
    if not with_variant:
        return []
    note = (
        f"metrics.itl of {with_variant:,} of {plural(len(steps), 'load')} is {_VARIANT}, which is no option"
        " of 4.6.3: a chunk's gap is spread evenly over its tokens, which option B has arrive together. The"
        " declared option is of the other figures"
    )
    return [note]


def _tpot_notes(steps: Sequence[BenchStep]) -> list[str]:
    """Return a note on each load whose two forms of TPOT differ by more than 1 %."""
    return [
        f"TPOT of {step.name}: {text}"
        for step in steps
        if (text := tpot_text(at(step.result, "metrics.tpot") or {}))
    ]


def _exact_requests(steps: Sequence[BenchStep]) -> str | None:
    """Return a text on where the exact requests are stored (IETF 4.3.3), or None if none are stored."""
    files = [step.requests for step in steps if step.requests is not None]
    if not files:
        return None
    stored = [one for one in files if one.file is not None]
    text = (
        f"steps/NAME/{REQUESTS_FILE} of {len(stored):,} of {plural(len(steps), 'load')},"
        f" {plural(sum(one.rows for one in stored), 'request')} byte for byte"
    )
    if len(stored) == len(steps):
        return text
    return f"{text}; the rest is made again by llmtap {__version__} from plan, seed and digest in step.json"
