"""`llmtap bench`: the ten tests of the IETF draft, the bench file, and the list of requirements.

Defines a command for each test, `all`, `list`, `init` and `compliance`. A run of tests is
`bench/run/perform.py`; this module reads its options and writes and prints the reports. `llmtap report` uses
`compare_folders` and `bench_texts`. `llmtap bench exo` and `grid` are in `bench_exo.py`.
"""

import asyncio
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import msgspec
import typer
from msgspec import UNSET, Struct, structs

from llmtap.bench.run.test import TESTS
from llmtap.cli.flags import command
from llmtap.cli.main import app
from llmtap.cli.options import ApiKeyEnv, NoSelftest, OutputOptions, ReaderOptions, Require
from llmtap.cli.shared import (
    Outputs,
    ReceivedSignals,
    SeveralValues,
    exit_codes,
    json_text,
    loop_signals,
    need_extra,
    print_line,
    print_message,
    print_rich,
    read_objectives,
    write_output,
)
from llmtap.errors import ConfigError, ExitCode
from llmtap.json_types import json_value
from llmtap.load.options import Seed, validate_warmup
from llmtap.options.fields import opt

if TYPE_CHECKING:
    from llmtap.bench.report.documents import BenchDocument, DocumentVerdict, NotRun
    from llmtap.bench.run.perform import Bench
    from llmtap.bench.sut.sut import BenchFile
    from llmtap.cli.progress import ProgressLines
    from llmtap.gates.regression import Tolerances
    from llmtap.gates.requirements import Requirements
    from llmtap.report.gates import JudgedChange, RequirementRow

_ALL: Final = "all"

GROUP_EPILOG = """Examples:

  llmtap bench init --target http://127.0.0.1:8000

  llmtap bench ttft --config bench.toml --set rate=10 --quick --html ttft.html

  llmtap bench all --target http://127.0.0.1:8000 --quick --results results/today

  llmtap report results/today

  llmtap bench ttft --config bench.toml --runs 3 --results results/a

  llmtap report results/a --compare results/b

  llmtap bench ttft --config a.toml --against b.toml --results results/ab

Test parameters are read from a file (`llmtap bench init` writes one, config/bench.toml explains it) and from
--set; `llmtap bench list` shows the parameters of every test. Numbers such as 5.1 are sections of the IETF
draft."""

TEST_EPILOG = """The results folder contains the requests, exchanges and result of every load. The same
command with --results resumes an interrupted run; measured loads are not sent again. Other tests can use the
same folder. If the folder has results of the same test that were measured with different settings (test
parameters, target, seed, warm-up or --quick), the command ends with an error. --again replaces these results.

""" + exit_codes()

bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=GROUP_EPILOG,
    help='Measure a server with the ten tests of the IETF draft "LLM Benchmarking Methodology" (January '
    "2026), and report which of its requirements were met.",
)
app.add_typer(bench, short_help="Run the ten tests of the IETF draft on LLM benchmarking.")


class _SystemOptions(Struct, frozen=True, kw_only=True):
    """Options for the measured systems and the results folder."""

    target: Annotated[
        str | None,
        opt(
            "URL of the server: http://host:port[/prefix], ws:// or grpc://. Default: target.url of the "
            "bench file.",
            "URL",
        ),
    ] = None
    config: Annotated[
        Path | None,
        opt(
            "Bench file: TOML file with the system under test and test parameters; example: "
            "config/bench.toml.",
            "FILE",
        ),
    ] = None
    results: Annotated[
        Path | None,
        opt("Results folder; an existing one is resumed. Default: a new folder in bench-results/.", "DIR"),
    ] = None
    again: Annotated[
        bool, opt("Repeat the tests: their existing results in --results are removed first.")
    ] = False
    against: Annotated[
        Path | None,
        opt(
            "Bench file of a second system. Each run tests both systems, one after the other; at least 3 "
            "runs are made, even if --runs is lower. The report compares the systems. The results "
            "folder then contains a subfolder for each system.",
            "FILE",
        ),
    ] = None
    assign: Annotated[
        list[str] | None,
        opt(
            "Test parameter: rate=10 for every selected test that has it, or ttft.requests=10000 for one "
            "test. Or a key of the bench file, such as target.model=NAME. May be repeated.",
            "NAME=VALUE",
            "--set",
        ),
    ] = None

    goodput: Annotated[
        str | None,
        opt(
            "Limits of each request in vLLM's form, in ms, for example ttft:200 tpot:50 e2el:30000. The "
            "throughput test searches the highest load that meets them, as with --set slo=...",
            "NAME:MS...",
        ),
    ] = None

    def assignments(self, tests: Sequence[str]) -> list[str]:
        """Return the parameters that `--set` and `--goodput` set, as NAME=VALUE. Raises ConfigError."""
        from llmtap.bench.run.test import test_named

        items = list(self.assign or ())
        if (objectives := read_objectives(None, self.goodput)) is not None:
            if not any("slo" in test_named(name).params.__struct_fields__ for name in tests):
                raise ConfigError(
                    "--goodput",
                    f"has no effect on {', '.join(tests)}",
                    "use --goodput with `llmtap bench throughput`",
                )
            if any(item.partition("=")[0].strip() in ("slo", "throughput.slo") for item in items):
                raise ConfigError("--goodput", "cannot be combined with --set slo", "use only one of them")
            items.append(f"slo={objectives}")
        return items


class _RunOptions(Struct, frozen=True, kw_only=True):
    """Options for the runs of the tests."""

    quick: Annotated[
        bool,
        opt("Run a shorter version; the report lists the requirements that the short version cannot meet."),
    ] = False
    seed: Seed = 42
    runs: Annotated[
        int,
        opt(
            "Number of independent runs of each test, each with its own seed. When llmtap "
            "report --compare compares two systems, each run is one sample; with fewer than 3 runs of a "
            "system, each request is one sample.",
            "N",
            ge=1,
            le=100,
        ),
    ] = 1
    warmup: Annotated[
        str,
        opt(
            "Warm-up before the measurement. auto: at least 100 requests and "
            "10,000 output tokens, then until latency is stable (IETF draft, 4.5). N: N "
            "requests, without a stability check. none: cold start.",
            "auto|none|N",
            parse=validate_warmup,
            shown="auto",
        ),
    ] = "auto"
    require: Require = None
    no_selftest: NoSelftest = False


def _run(
    context: typer.Context,
    system: _SystemOptions,
    how: _RunOptions,
    files: OutputOptions,
    reader: ReaderOptions,
) -> None:
    """Run the tests that the command names, write the reports, and exit with the code of the result."""
    need_extra("llmtap bench", "scipy", "bench")
    from llmtap.gates.requirements import Requirements, exit_code

    outputs = files.outputs()
    requirements = Requirements.parse(how.require)
    if requirements and system.against is not None:
        raise ConfigError("--require", "cannot be combined with --against", "use only one of them")
    if system.again and system.results is None:
        raise ConfigError(
            "--again", "requires --results with the folder of existing results", "such as --results results"
        )
    from llmtap.bench.report.report import load_document
    from llmtap.bench.report.texts import minimum_text
    from llmtap.bench.run.perform import Bench
    from llmtap.bench.run.session import Folder, Interrupted
    from llmtap.bench.sut.sut import load_bench
    from llmtap.cli.progress import watching_progress

    name = context.info_name or ""
    names = list(TESTS) if name == _ALL else [name]
    sets = system.assignments(names)
    file = load_bench(system.config, target=system.target, sets=sets, tests=names)
    place = system.results if system.results is not None else _new_folder(name)
    resume_command = _resume_command(place)
    signals = ReceivedSignals()
    options: dict[str, Any] = {
        "seed": how.seed,
        "quick": how.quick,
        "warmup": how.warmup,
        "command": resume_command,
        "reader": reader.benefit(),
        "selftest": not how.no_selftest,
    }
    if system.against is not None:
        systems = {
            "a": file,
            "b": load_bench(system.against, target=None, sets=sets, tests=names),
        }
        with watching_progress() as watcher:
            _measure_alternately(
                systems, place, names, watcher, signals, runs=max(how.runs, 3), again=system.again, **options
            )
        if signals.exit_code is not None:
            _exit_after_stop(place, resume_command, signals)
        raise typer.Exit(compare_folders(place / "a", [place / "b"], outputs))

    def write_pages(document: "BenchDocument") -> None:
        """Write the reports into the results folder; they cover all tests in it, also of earlier commands."""
        if document.tests and document.stopped is not True:
            stored = load_document(place)
            document = structs.replace(stored, not_run=document.not_run)
        shown = json_value(document)
        write_output("--results", place / "report.md", bench_texts(shown)["--markdown"]())
        write_output("--results", place / "minimum.txt", minimum_text(shown).rstrip("\n"))

    def write_report(document: "BenchDocument") -> None:
        write_pages(document)
        outputs.write(bench_texts(json_value(document)))

    with watching_progress() as watcher:
        bench_run = Bench(
            file, Folder(place), watcher, runs=how.runs, again=system.again, on_report=write_report, **options
        )
        document: BenchDocument | None = None
        with suppress(Interrupted):
            document = asyncio.run(_run_bench(bench_run, watcher, names, signals))
    if document is None:
        _exit_after_stop(place, resume_command, signals)
    rows = judge_loads(document, requirements)
    if document.tests or not document.stopped:
        write_pages(document)
        shown = json_value(structs.replace(document, requirements=rows or UNSET))
        outputs.write_or_show(bench_texts(shown), lambda: _show_report(shown, place))
    if document.stopped:
        _exit_after_stop(place, resume_command, signals)
    if requirements and not any(test.begun for test in document.not_run):
        # With requirements, only the figures that they name must be valid, not all figures of the report.
        raise typer.Exit(exit_code(None, rows))
    raise typer.Exit(exit_code_of(document.verdict, document.not_run))


def judge_loads(document: "BenchDocument", requirements: "Requirements") -> "list[RequirementRow]":
    """Judge the main load of each test, and return a row for each requirement and test."""
    return [
        row
        for report in document.tests
        for row in requirements.judge(
            next((step.result for step in report.steps if step.name == report.main), {}), report.test
        )
    ]


def exit_code_of(verdict: "DocumentVerdict", not_run: "Sequence[NotRun]") -> ExitCode:
    """Return the exit code of a benchmark. A test that began and was not completed counts as failed."""
    return ExitCode.of_run(
        failed=verdict.failed or any(test.begun for test in not_run),
        missed=bool(verdict.missed),
        not_valid=not verdict.valid,
    )


_HELP_TEXTS: Final = {
    "ttft": (
        "Sends requests at a rate, or with a fixed concurrency. Reports percentiles and the distribution of"
        " TTFT."
    ),
    "throughput": (
        "Raises the load until the server no longer sustains it. Reports the highest sustained load and its"
        " output tokens per second."
    ),
    "tradeoff": (
        "Measures the maximum request rate, then sends loads of 10 to 120 % of it. Reports latency and"
        " throughput of each load."
    ),
    "itl": (
        "Sends loads of 25 to 90 % of the maximum request rate, measured by `llmtap bench throughput` in"
        " the same results folder, or given by --set max_rate=N. Reports the distribution of the gaps"
        " between tokens, and the jitter, of each load."
    ),
    "capacity": (
        "Raises the number of concurrent requests. Reports the highest number at which enough requests"
        " complete and the P99 of TTFT is within its limit."
    ),
    "fairness": (
        "Sends short and long requests: each class alone, then both together. Reports how much each class"
        " slows the other, and fairness indexes."
    ),
    "prefix-cache": (
        "Sends prompts that share prefixes: with the cache off, with an empty cache, and with a filled"
        " cache. Reports the hit rate, and how much the cache reduces TTFT and raises throughput."
    ),
    "memory-pressure": (
        "Sends loads of 100 to 150 % of the server's maximum number of concurrent requests, measured by"
        " `llmtap bench capacity` in the same results folder, or given by --set capacity=N. Reports latency,"
        " failures, preemptions and recovery."
    ),
    "long-context": (
        "Sends prompts of 1,024 to 131,072 tokens. Reports TTFT and throughput by length, and the function"
        " that fits the growth of TTFT best."
    ),
    "guardrail-overhead": (
        "Sends the same requests to the server without and with guardrails. Reports the latency that each"
        " guardrail adds, and the throughput that it costs."
    ),
}
"""By test: its help text, which describes its loads and figures with the default parameters."""

for _name, (_section, _title) in TESTS.items():
    command(
        bench,
        _name,
        cls=SeveralValues,
        help=f"{_title} (IETF draft, {_section}).\n\n{_HELP_TEXTS[_name]}",
        short_help=f"{_section} {_title}",
        epilog=TEST_EPILOG,
    )(_run)
command(
    bench,
    _ALL,
    cls=SeveralValues,
    help="Run all ten tests in order of their dependencies, and list the tests that could not run.",
    short_help="Run all ten tests, in order of their dependencies.",
    epilog=TEST_EPILOG,
)(_run)


@command(bench, "list")
def show_tests(
    tests: Annotated[list[str] | None, opt("Test names (default: all).", "TEST...", argument=True)] = None,
) -> None:
    """List the tests with their sections and parameters."""
    need_extra("llmtap bench", "scipy", "bench")
    from llmtap.bench.run.test import test_lines

    for line in test_lines(tests or None):
        print(line)


@command(
    bench,
    short_help="Query a server and write a bench file.",
    epilog="Example:\n\n  llmtap bench init --target http://127.0.0.1:8000 bench.toml",
)
def init(
    file: Annotated[Path, opt("Output file; - is stdout.", "FILE", argument=True)] = Path("bench.toml"),
    target: Annotated[str, opt("URL of the server to query.", "URL")] = "",
    api_key_env: ApiKeyEnv = None,
    ca: Annotated[str | None, opt("PEM file of the CA to trust instead of the system's CAs.", "FILE")] = None,
    force: Annotated[bool, opt("Overwrite FILE if it exists.")] = False,
) -> None:
    """Query a server, and write a bench file with its properties.

    The file has placeholders for what you must declare yourself.
    """
    if not target:
        raise ConfigError("--target", "is missing", "such as --target http://127.0.0.1:8000")
    to_stdout = str(file) == "-"
    if not to_stdout and file.exists() and not force:
        raise ConfigError(str(file), "already exists", "to replace the file, use --force")
    from llmtap.bench.sut.detect import detect, starter_text
    from llmtap.bench.sut.sut import BenchTarget
    from llmtap.load.sending import split_url

    split_url(target)
    server_facts = asyncio.run(detect(BenchTarget(url=target, key_env=api_key_env, ca=ca)))
    text = starter_text(server_facts)
    if to_stdout:
        print(text, end="")
        return
    write_output("FILE", file, text.rstrip("\n"))
    known = ", ".join(key for key in server_facts.facts if key.startswith("sut."))
    print_line(
        f"llmtap: wrote {file}; the server reported {known or 'nothing'}: the comments say what to add"
    )


async def _run_bench(
    bench_run: "Bench", watcher: "ProgressLines", names: list[str], signals: ReceivedSignals
) -> "BenchDocument":
    def stop() -> None:
        watcher.report_stop()
        bench_run.stop()

    loop_signals(signals, stop)
    return await bench_run.run(names)


def _measure_alternately(
    systems: "dict[str, BenchFile]",
    place: Path,
    names: list[str],
    watcher: "ProgressLines",
    signals: ReceivedSignals,
    *,
    runs: int,
    again: bool,
    **options: Any,
) -> None:
    """Measure run 1 of both systems, then run 2 in the opposite order, and so on; stop after a signal."""
    from llmtap.bench.run.pace import Pace
    from llmtap.bench.run.perform import Bench
    from llmtap.bench.run.session import Folder, Interrupted

    pace, done = Pace(), 0
    for run in range(1, runs + 1):
        for label in sorted(systems, reverse=run % 2 == 0):
            done += 1
            number = f"{done} of {runs * len(systems)}"
            watcher.report_remaining(f"{number}: run {run} of {runs}, system {label}")
            bench_run = Bench(
                systems[label],
                Folder(place / label),
                watcher,
                runs=run,
                first_run=run,
                again=again and run == 1,
                pace=pace,
                runs_after=runs * len(systems) - done,
                **options,
            )
            try:
                asyncio.run(_run_bench(bench_run, watcher, names, signals))
            except Interrupted:
                pass
            if signals.exit_code is not None:
                return


def _exit_after_stop(place: Path, command: str, signals: ReceivedSignals) -> NoReturn:
    print_message(f"stopped; the complete loads are in {place}. To continue:\n  {command}")
    assert signals.exit_code is not None
    raise typer.Exit(signals.exit_code)


def compare_folders(
    base: Path, others: Sequence[Path], outputs: Outputs, tolerances: "Tolerances | None" = None
) -> ExitCode:
    """Compare results folders with the folder `base`, write or print the report, and return the exit code.

    It is NOT_VALID if the loads differ or are not valid. With `tolerances`, the judged changes decide.
    """
    from llmtap.bench.report.compare import compare_results
    from llmtap.gates.regression import judge_tests, regression_code
    from llmtap.report.bench import compare_html, compare_markdown, render_compare

    result = compare_results(base, others)
    comparison = msgspec.to_builtins(result)
    judged: list[JudgedChange] = []
    if tolerances is not None:
        judged = judge_tests(tolerances, comparison)
        comparison = msgspec.to_builtins(msgspec.structs.replace(result, regression=judged))
    texts = {
        "--json": lambda: json_text(comparison),
        "--html": lambda: compare_html(comparison),
        "--markdown": lambda: compare_markdown(comparison),
    }
    outputs.write_or_show(texts, lambda: print_rich(render_compare(comparison)))
    if tolerances is not None:
        return regression_code((), judged, loads_differ=False)
    return ExitCode.of_run(not_valid=any(test.unlike or test.invalid for test in result.tests))


def _new_folder(name: str) -> Path:
    from datetime import UTC, datetime

    from llmtap.clock import SystemClock
    from llmtap.units import NS_PER_S

    now = datetime.fromtimestamp(SystemClock.wall_ns() / NS_PER_S, UTC)
    return Path("bench-results") / f"{now:%Y%m%dT%H%M%SZ}-{name}"


def _resume_command(place: Path) -> str:
    """Return the command line that resumes this run: this command line with --results and without --again."""
    arguments = [arg for arg in sys.argv[1:] if arg != "--again"]
    if not any(arg == "--results" or arg.startswith("--results=") for arg in arguments):
        arguments = [*arguments, "--results", str(place)]
    return shlex.join(["llmtap", *arguments])


def bench_texts(document: Mapping[str, Any]) -> dict[str, Callable[[], str]]:
    """Return by option (`--json`, `--html`, `--markdown`) a function that renders the document for it."""

    def html() -> str:
        from llmtap.report.bench import bench_html

        return bench_html(document)

    def markdown() -> str:
        from llmtap.bench.report.texts import full_markdown

        return full_markdown(document).rstrip("\n")

    return {"--json": lambda: json_text(document), "--html": html, "--markdown": markdown}


def _show_report(document: Mapping[str, Any], folder: Path) -> None:
    from llmtap.bench.report.texts import minimum_text
    from llmtap.report.bench import render_bench

    print_rich(render_bench(document))
    print_line(minimum_text(document).rstrip("\n"))
    if document["repeats"]:
        print("runs: the tables show the first run; llmtap report RESULTS --compare OTHER uses all runs")
    print_line(f"results: {folder}")
