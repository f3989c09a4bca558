"""`llmtap bench`: the ten tests of the IETF draft, the bench file, and the list of requirements.

Defines a command for each test, `all`, `list`, `init` and `compliance`. A run of tests is
`bench/run/perform.py`; this module reads its options and writes and prints the reports. `llmtap report` uses
`compare_folders` and `bench_texts`. `llmtap bench exo` and `grid` are in `bench_exo.py`.
"""

import asyncio
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from llmtap.bench.run.test import TESTS
from llmtap.cli.main import app
from llmtap.cli.shared import (
    FAILED,
    Alpha,
    ApiKeyEnv,
    Heard,
    IdleCost,
    Json,
    NoSelftest,
    Outputs,
    ReaderGrace,
    ReaderSpeed,
    Seed,
    argument,
    flag,
    json_text,
    loop_signals,
    need_extra,
    need_warmup,
    option,
    print_rich,
    reader_of,
    write_output,
)
from llmtap.errors import ConfigError

if TYPE_CHECKING:
    from llmtap.bench.run.perform import Bench
    from llmtap.bench.sut.sut import BenchFile
    from llmtap.cli.progress import ProgressLines

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

Exit codes: 0 ok; 1 a result is invalid (the report says which), or a test failed; 2 invalid option or missing
parameter; 130 stopped by Ctrl-C, 143 by SIGTERM; completed loads are kept."""

bench = typer.Typer(
    name="bench", no_args_is_help=True, rich_markup_mode=None, epilog=GROUP_EPILOG,
    help="Measure a server with the ten tests of the IETF draft \"LLM Benchmarking Methodology\" (January "
    "2026), and report which of its requirements were met.",
)  # fmt: skip
app.add_typer(bench, short_help="Run the ten tests of the IETF draft on LLM benchmarking.")


def _run(
    context: typer.Context,
    target: Annotated[
        str | None,
        option(
            "URL",
            "URL of the server: http://host:port[/prefix], ws:// or grpc://. Default: target.url of the "
            "bench file.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        option(
            "FILE",
            "Bench file: TOML file with the system under test and test parameters; example: "
            "config/bench.toml.",
        ),
    ] = None,
    results: Annotated[
        Path | None,
        option(
            "DIR",
            "Results folder; an existing one is resumed. Default: a new folder in bench-results/.",
        ),
    ] = None,
    again: Annotated[
        bool, flag("--again", "Repeat the tests: their existing results in --results are removed first.")
    ] = False,
    against: Annotated[
        Path | None,
        option(
            "FILE",
            "Bench file of a second system. Each run tests both systems, one after the other; at least 3 "
            "runs are made, even if --runs is lower. The report compares the systems. The results "
            "folder then contains a subfolder for each system.",
        ),
    ] = None,
    quick: Annotated[
        bool,
        flag(
            "--quick",
            "Run a shorter version; the report lists the requirements that the short version cannot meet.",
        ),
    ] = False,
    assign: Annotated[
        list[str] | None,
        option(
            "NAME=VALUE",
            "Test parameter: rate=10 for every selected test that has it, or ttft.requests=10000 for one "
            "test. Or a key of the bench file, such as target.model=NAME. May be repeated.",
            "--set",
        ),
    ] = None,
    seed: Seed = 42,
    runs: Annotated[
        int,
        option(
            "N",
            "Number of independent runs of each test, each with its own seed. When llmtap "
            "report --compare compares two systems, each run is one sample; with fewer than 3 runs of a "
            "system, each request is one sample.",
            min=1,
            max=100,
        ),
    ] = 1,
    warmup: Annotated[
        str,
        option(
            "auto|none|N",
            "Warm-up before the measurement. auto: at least 100 requests and "
            "10,000 output tokens, then until latency is stable (IETF draft, 4.5). N: N "
            "requests, without a stability check. none: cold start.",
        ),
    ] = "auto",
    reader_speed: ReaderSpeed = None,
    alpha: Alpha = None,
    idle_cost: IdleCost = None,
    reader_grace: ReaderGrace = None,
    no_selftest: NoSelftest = False,
    json: Json = None,
    html: Annotated[
        str | None,
        option("FILE", "File for an HTML report with charts and the compliance matrix; - is stdout."),
    ] = None,
    markdown: Annotated[
        str | None,
        option("FILE", "File for the full report (IETF draft, appendix C.2) as Markdown; - is stdout."),
    ] = None,
) -> None:
    need_extra("llmtap bench", "scipy", "bench")
    outputs = Outputs(json=json, html=html, markdown=markdown)
    need_warmup(warmup)
    reader = reader_of(reader_speed, alpha, idle_cost, reader_grace)
    if again and results is None:
        raise ConfigError("--again", "requires --results with the folder of existing results")
    from llmtap.bench.report.report import load_document
    from llmtap.bench.report.texts import minimum_text
    from llmtap.bench.run.perform import Bench
    from llmtap.bench.run.session import Folder, Interrupted
    from llmtap.bench.sut.sut import load_bench
    from llmtap.cli.progress import watching_progress

    name = context.info_name or ""
    names = list(TESTS) if name == _ALL else [name]
    file = load_bench(config, target=target, sets=assign or (), tests=names)
    place = results if results is not None else _fresh_folder(name)
    command = _command(place)
    heard = Heard()
    how: dict[str, Any] = {
        "seed": seed, "quick": quick, "warmup": warmup, "command": command, "reader": reader,
        "selftest": not no_selftest,
    }  # fmt: skip
    if against is not None:
        systems = {"a": file, "b": load_bench(against, target=None, sets=assign or (), tests=names)}
        with watching_progress() as watcher:
            _alternate(systems, place, names, watcher, heard, runs=max(runs, 3), again=again, **how)
        if heard.code is not None:
            _stopped(place, command, heard)
        if not compare_folders(place / "a", [place / "b"], outputs):
            raise typer.Exit(FAILED)
        return

    def keep(document: dict[str, Any]) -> None:
        """Write the pages in the folder, which cover all of its tests, including earlier runs."""
        whole = document
        if document["tests"] and not document.get("stopped"):
            whole = load_document(place) | {"not_run": document["not_run"]}
        write_output("--results", place / "report.md", bench_texts(whole)["--markdown"]())
        write_output("--results", place / "minimum.txt", minimum_text(whole).rstrip("\n"))

    def written(document: dict[str, Any]) -> None:
        keep(document)
        outputs.write(bench_texts(document))

    with watching_progress() as watcher:
        one = Bench(file, Folder(place), watcher, runs=runs, again=again, reported=written, **how)
        try:
            document = asyncio.run(_performed(one, watcher, names, heard))
        except Interrupted:
            document = {"tests": [], "stopped": True}
    if document["tests"] or not document["stopped"]:
        keep(document)
        outputs.tell(bench_texts(document), lambda: _show(document, place))
    if document.get("stopped"):
        _stopped(place, command, heard)
    if not document["verdict"]["valid"] or any(one["begun"] for one in document["not_run"]):
        raise typer.Exit(FAILED)


_ABOUT: Final = {
    "ttft":
        "Sends requests at a rate, or with a fixed concurrency. Reports percentiles and the distribution of"
        " TTFT.",
    "throughput":
        "Raises the load until the server no longer sustains it. Reports the highest sustained load and its"
        " output tokens per second.",
    "tradeoff":
        "Measures the maximum request rate, then sends loads of 10 to 120 % of it. Reports latency and"
        " throughput of each load.",
    "itl":
        "Sends loads of 25 to 90 % of the maximum request rate, measured by `llmtap bench throughput` in the"
        " same results folder, or given by --set max_rate=N. Reports the distribution of the gaps between"
        " tokens, and the jitter, of each load.",
    "capacity":
        "Raises the number of concurrent requests. Reports the highest number at which enough requests"
        " complete and the P99 of TTFT is within its limit.",
    "fairness":
        "Sends short and long requests: each class alone, then both together. Reports how much each class"
        " slows the other, and fairness indexes.",
    "prefix-cache":
        "Sends prompts that share prefixes: with the cache off, with an empty cache, and with a filled cache."
        " Reports the hit rate, and how much the cache reduces TTFT and raises throughput.",
    "memory-pressure":
        "Sends loads of 100 to 150 % of the server's maximum number of concurrent requests, measured by"
        " `llmtap bench capacity` in the same results folder, or given by --set capacity=N. Reports latency,"
        " failures, preemptions and recovery.",
    "long-context":
        "Sends prompts of 1,024 to 131,072 tokens. Reports TTFT and throughput by length, and the function"
        " that fits the growth of TTFT best.",
    "guardrail-overhead":
        "Sends the same requests to the server without and with guardrails. Reports the latency that each"
        " guardrail adds, and the throughput that it costs.",
}  # fmt: skip
"""What each test sends and reports, with the default parameters."""

for _name, (_section, _title) in TESTS.items():
    bench.command(
        _name, help=f"{_title} (IETF draft, {_section}).\n\n{_ABOUT[_name]}",
        short_help=f"{_section} {_title}", epilog=TEST_EPILOG,
    )(_run)  # fmt: skip
bench.command(
    _ALL, help="Run all ten tests in order of their dependencies, and list the tests that could not run.",
    short_help="Run all ten tests, in order of their dependencies.", epilog=TEST_EPILOG,
)(_run)  # fmt: skip


@bench.command("list")
def show_tests(
    tests: Annotated[list[str] | None, argument("TEST...", "Test names (default: all).")] = None,
) -> None:
    """List the tests with their sections and parameters."""
    need_extra("llmtap bench", "scipy", "bench")
    from llmtap.bench.run.test import tests_said

    for line in tests_said(tests or None):
        print(line)


@bench.command(
    short_help="Query a server and write a bench file.",
    epilog="Example:\n\n  llmtap bench init --target http://127.0.0.1:8000 bench.toml",
)
def init(
    file: Annotated[Path, argument("FILE", "Output file; - is stdout.")] = Path("bench.toml"),
    target: Annotated[str, option("URL", "URL of the server to query.")] = "",
    api_key_env: ApiKeyEnv = None,
    ca: Annotated[
        str | None, option("FILE", "PEM file of the CA to trust instead of the system's CAs.")
    ] = None,
    force: Annotated[bool, flag("--force", "Overwrite FILE if it exists.")] = False,
) -> None:
    """Query a server, and write a bench file with its properties.

    The file has placeholders for what you must declare yourself.
    """
    if not target:
        raise ConfigError("--target", "is missing", "such as --target http://127.0.0.1:8000")
    to_stdout = str(file) == "-"
    if not to_stdout and file.exists() and not force:
        raise ConfigError(str(file), "already exists", "--force replaces it")
    from llmtap.bench.sut.detect import detect, starter_text
    from llmtap.bench.sut.sut import BenchTarget

    found = asyncio.run(detect(BenchTarget(url=target, key_env=api_key_env, ca=ca)))
    text = starter_text(found)
    if to_stdout:
        print(text, end="")
        return
    write_output("FILE", file, text.rstrip("\n"))
    known = ", ".join(key for key in found.facts if key.startswith("sut."))
    print(f"llmtap: wrote {file}; the server told {known or 'nothing'}: the comments say what is to be added")


async def _performed(
    one: "Bench", watcher: "ProgressLines", names: list[str], heard: Heard
) -> dict[str, Any]:
    def stop() -> None:
        watcher.stopping()
        one.stop()

    loop_signals(heard, stop)
    return await one.run(names)


def _alternate(
    systems: "dict[str, BenchFile]", place: Path, names: list[str], watcher: "ProgressLines", heard: Heard, *,
    runs: int, again: bool, **how: Any,
) -> None:  # fmt: skip
    """Measure one run of each system after the other, in turn first; until a signal stops it."""
    from llmtap.bench.run.perform import Bench
    from llmtap.bench.run.session import Folder, Interrupted

    for run in range(1, runs + 1):
        for i, label in enumerate(sorted(systems, reverse=run % 2 == 0), 1):
            number = f"{(run - 1) * len(systems) + i} of {runs * len(systems)}"
            watcher.left(f"{number}: run {run} of {runs}, system {label}")
            one = Bench(
                systems[label], Folder(place / label), watcher, runs=run, first_run=run,
                again=again and run == 1, **how,
            )  # fmt: skip
            try:
                asyncio.run(_performed(one, watcher, names, heard))
            except Interrupted:
                pass
            if heard.code is not None:
                return


def _stopped(place: Path, command: str, heard: Heard) -> NoReturn:
    print(f"llmtap: stopped; the complete loads are in {place}. To continue:\n  {command}", file=sys.stderr)
    assert heard.code is not None
    raise typer.Exit(heard.code)


def compare_folders(base: Path, others: Sequence[Path], outputs: Outputs) -> bool:
    """Report results folders against the first, and whether all runs are valid; exit 1 where loads differ."""
    from llmtap.bench.report.compare import compare_results
    from llmtap.report.bench import compare_html, compare_markdown, render_compare

    told = compare_results(base, others)
    texts = {
        "--json": lambda: json_text(told), "--html": lambda: compare_html(told),
        "--markdown": lambda: compare_markdown(told),
    }  # fmt: skip
    outputs.tell(texts, lambda: print_rich(render_compare(told)))
    if any(test["unlike"] for test in told["tests"]):  # systems that had other loads are no comparison
        raise typer.Exit(FAILED)
    return not any(test["invalid"] for test in told["tests"])


def _fresh_folder(name: str) -> Path:
    from datetime import UTC, datetime

    from llmtap.clock import SystemClock
    from llmtap.units import NS_PER_S

    at = datetime.fromtimestamp(SystemClock.wall_ns() / NS_PER_S, UTC)
    return Path("bench-results") / f"{at:%Y%m%dT%H%M%SZ}-{name}"


def _command(place: Path) -> str:
    """As it was typed, with the results folder and without --again, so that it goes on."""
    given = [arg for arg in sys.argv[1:] if arg != "--again"]
    if not any(arg == "--results" or arg.startswith("--results=") for arg in given):
        given = [*given, "--results", str(place)]
    return shlex.join(["llmtap", *given])


def bench_texts(document: dict[str, Any]) -> dict[str, Callable[[], str]]:

    def html() -> str:
        from llmtap.report.bench import bench_html

        return bench_html(document)

    def markdown() -> str:
        from llmtap.bench.report.texts import full_markdown

        return full_markdown(document).rstrip("\n")

    return {"--json": lambda: json_text(document), "--html": html, "--markdown": markdown}


def _show(document: dict[str, Any], folder: Path) -> None:

    from llmtap.bench.report.texts import minimum_text
    from llmtap.report.bench import render_bench

    print_rich(render_bench(document))
    print(minimum_text(document), end="")
    if document["repeats"]:
        print("runs: what is shown is the first; llmtap report RESULTS --compare OTHER uses all")
    print(f"results: {folder}")
