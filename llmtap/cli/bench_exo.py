"""`llmtap bench exo` (rates over a grid, as defined by exo-bench) and `llmtap bench grid` (batch times).

Both commands run an `ExoBench` (`bench/exo/mode.py`) and print a table with notes, or write JSON or CSV.
"""

import asyncio
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer
from msgspec import Meta, Struct

from llmtap.cli.bench import bench
from llmtap.cli.flags import command
from llmtap.cli.options import HeaderOptions, Json
from llmtap.cli.shared import (
    Outputs,
    ReceivedSignals,
    SeveralValues,
    exit_codes,
    json_text,
    loop_signals,
    print_rich,
)
from llmtap.errors import ConfigError, ExitCode
from llmtap.load.options import AnswerTimeout, BodyFields, CaFile, ModelName, Tokenizer
from llmtap.options.fields import opt
from llmtap.units import NS_PER_S, Duration, format_bytes

if TYPE_CHECKING:
    from llmtap.bench.exo.grid import MeasuredGrid
    from llmtap.bench.exo.mode import ExoBench, ExoGrid
    from llmtap.bench.exo.result import ExoResult, Spread
    from llmtap.bench.exo.server import PlacementFilter
    from llmtap.report.document import Note, Table

CODES = [code for code in ExitCode if code is not ExitCode.MISSED]
"""Exit codes of both commands. They have no objectives, so they never exit with MISSED."""

EPILOG = """Each point of the grid --pp x --tg x --concurrency is measured --repeat times, with its requests
sent at the same instant. Rates use the timings that the server reports (exo, llama.cpp), otherwise the
client's clock; each run reports which.

--instance-meta, --sharding, --min-nodes and --max-nodes are for exo servers. With any of them, exo loads the
model as a new instance, which is removed at the end. Other instances remain.

Examples:

  llmtap bench exo --target http://127.0.0.1:8000 --pp 512 4096 --tg 128 --repeat 3 --warmup 1

  llmtap bench exo --target http://127.0.0.1:52415 --pp 512 --tg 128 --instance-meta jaccl --sharding tensor

  llmtap bench exo --target http://127.0.0.1:8000 --pp 512 --tg 128 --concurrency 1 4 --use-prefix-cache

""" + exit_codes(*CODES)

GRID_EPILOG = """The grid is --batch x --pp x --tg. In each cell, --warmup unmeasured batches are sent, then
--repeat measured batches. All requests of a batch have the same length and different text, and are sent at
the same instant. A cell is not valid, and is left out of the file, if a request failed, an answer did not
have exactly --tg tokens, or not all requests ran at the same time. The latency model is fitted to the valid
cells, and its constants are printed. `llmtap sim run --latency` fits the same model to the CSV file.

Examples:

  llmtap bench grid --target http://127.0.0.1:8000 --batch 1 2 4 8 16 --pp 128 --tg 64 128 256 --csv grid.csv

  llmtap sim run chat --latency grid.csv --reading length=output --scheduler static_fifo,dynamic_no_bins

""" + exit_codes(*CODES)


def _read_numbers(flag: str, text: str) -> list[int]:
    """Return the numbers in a text such as `512,4096`, in order, each once. Raises ConfigError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not (word.isascii() and word.isdigit()):
            raise ConfigError(
                flag, f"expected whole numbers separated by commas, got {word!r}", f"such as {flag} 256,512"
            )
    return list(dict.fromkeys(map(int, words)))


def _numbers_opt(text: str, flag: str, shown: str = "") -> Any:
    return opt(text, "N...", parse=partial(_read_numbers, flag), shown=shown)


PromptLengths = Annotated[
    list[int], _numbers_opt("Prompt lengths in tokens, including the chat template (required).", "--pp")
]
ResponseLengths = Annotated[
    list[int], _numbers_opt("Response lengths in tokens, at least 2 (required).", "--tg")
]


class _ExoPoints(Struct, frozen=True, kw_only=True):
    """Options for the points of the grid that are measured."""

    pp: PromptLengths = []
    tg: ResponseLengths = []
    concurrency: Annotated[
        list[int], _numbers_opt("Numbers of concurrent requests.", "--concurrency", "1")
    ] = []
    repeat: Annotated[int, opt("Number of measurements of each point.", "N", ge=1, le=10_000)] = 1
    warmup: Annotated[
        int,
        opt(
            "Number of unmeasured warm-up requests, with the first values of --pp and --tg.",
            "N",
            ge=0,
            le=10_000,
        ),
    ] = 0
    use_prefix_cache: Annotated[
        bool,
        opt(
            "Use the server's prefix cache. This saves time, but the prefill rates of hits are approximate. "
            "Default: the cache of exo is off; with other servers, each request has a new prompt."
        ),
    ] = False


class _Placement(Struct, frozen=True, kw_only=True):
    """Options for the placement of the model on the nodes of an exo cluster."""

    instance_meta: Annotated[
        Literal["ring", "jaccl", "both"] | None,
        opt("exo only: instance type of the model; both (the default) accepts either.", "ring|jaccl|both"),
    ] = None
    sharding: Annotated[
        Literal["pipeline", "tensor", "both"] | None,
        opt(
            "exo only: sharding of that instance; both (the default) accepts either.", "pipeline|tensor|both"
        ),
    ] = None
    nodes_min: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        opt("exo only: minimum number of nodes of that instance; default 1.", "N", "--min-nodes"),
    ] = None
    nodes_max: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        opt("exo only: maximum number of nodes of that instance; default 4.", "N", "--max-nodes"),
    ] = None


class _ServerOptions(Struct, frozen=True, kw_only=True):
    """Options for the server and the requests to it."""

    target: Annotated[str, opt("URL of the server: http://host:port[/prefix].", "URL")] = ""
    model: ModelName = None
    server: Annotated[
        Literal["auto", "openai", "vllm", "sglang", "exo"],
        opt(
            "Server type; decides which vendor-specific fields are sent; auto detects it.",
            "auto|openai|vllm|sglang|exo",
        ),
    ] = "auto"
    tokenizer: Tokenizer = None
    fields: BodyFields = {}
    ca: CaFile = None
    timeout: AnswerTimeout = Duration(600 * NS_PER_S)
    seed: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        opt("Seed for the random first words of the prompts (default: a new seed in each run).", "N"),
    ] = None


@command(
    bench,
    short_help="Measure prefill and generation rates, like exo-bench.",
    epilog=EPILOG,
    cls=SeveralValues,
)
def exo(
    points: _ExoPoints,
    placement: _Placement,
    server: _ServerOptions,
    headers: HeaderOptions,
    json: Json = None,
) -> None:
    """Measure prefill and generation rates over a grid of lengths and concurrency, like exo-bench."""
    outputs = Outputs(json=json)
    from llmtap.bench.exo.mode import ExoGrid
    from llmtap.bench.exo.server import PlacementFilter
    from llmtap.report.render import terminal

    filters = {name: value for name, value in msgspec.structs.asdict(placement).items() if value is not None}
    result, signals = _run_grid(
        ExoGrid(**msgspec.structs.asdict(points)),
        server,
        headers,
        placement=PlacementFilter(**filters) if filters else None,
    )
    outputs.write_or_show({"--json": result.to_json}, lambda: print_rich(terminal(exo_blocks(result))))
    _exit_with(signals, result, not_valid=any(run.not_valid for run in result.runs))


class _GridCells(Struct, frozen=True, kw_only=True):
    """Options for the cells of the grid that are measured."""

    batch: Annotated[
        list[int],
        _numbers_opt("Batch sizes: numbers of requests sent at the same instant (required).", "--batch"),
    ] = []
    pp: PromptLengths = []
    tg: ResponseLengths = []
    repeat: Annotated[int, opt("Number of measured batches of each cell.", "N", ge=1, le=10_000)] = 5
    warmup: Annotated[
        int, opt("Number of unmeasured batches before the measured ones of each cell.", "N", ge=0, le=100)
    ] = 1
    length: Annotated[
        Literal["output", "prompt+output"],
        opt(
            "What the length column of the CSV file counts: output tokens, or prompt and output tokens. Use "
            "the same value in `llmtap sim run --reading length=...`.",
            "output|prompt+output",
        ),
    ] = "output"


@command(
    bench,
    short_help="Measure batch times, and fit the simulator's model.",
    epilog=GRID_EPILOG,
    cls=SeveralValues,
)
def grid(
    cells: _GridCells,
    server: _ServerOptions,
    headers: HeaderOptions,
    csv: Annotated[
        str | None, opt("File for the valid cells as CSV, for llmtap sim run --latency; - is stdout.", "FILE")
    ] = None,
    json: Json = None,
) -> None:
    """Measure batch times over a grid of batch sizes and lengths, and fit the simulator's latency model."""
    outputs = Outputs(json=json, csv=csv)
    from llmtap.bench.exo.grid import make_grid
    from llmtap.bench.exo.mode import ExoGrid
    from llmtap.report.render import terminal

    points = ExoGrid(
        pp=cells.pp,
        tg=cells.tg,
        concurrency=cells.batch,
        repeat=cells.repeat + cells.warmup,
        distinct_prompts=True,
    )
    try:
        points.check()
    except ConfigError as exc:
        place = "--batch" if exc.place == "--concurrency" else exc.place
        raise ConfigError(place, exc.problem, f"such as {place} 8,32") from None
    result, signals = _run_grid(points, server, headers)
    measured = make_grid(result.runs, warmup=cells.warmup, length=cells.length)
    document = {
        "length": cells.length,
        "repeat": cells.repeat,
        "warmup": cells.warmup,
        **measured.to_dict(),
        "cluster": result.cluster,
    }
    texts = {"--json": lambda: json_text(document), "--csv": lambda: measured.to_csv().rstrip("\n")}
    outputs.write_or_show(texts, lambda: print_rich(terminal(grid_blocks(measured, result))))
    _exit_with(signals, result, not_valid=any(cell.problem for cell in measured.cells))


def _run_grid(
    points: "ExoGrid",
    server: _ServerOptions,
    headers: HeaderOptions,
    placement: "PlacementFilter | None" = None,
) -> "tuple[ExoResult, ReceivedSignals]":
    """Check the options, run the benchmark, and return its result and the signals that arrived."""
    if not server.target:
        raise ConfigError("--target", "is missing", "such as --target http://127.0.0.1:52415")
    from llmtap.bench.exo.mode import ExoBench, ExoOptions
    from llmtap.cli.progress import watching_progress

    points.check()
    options = ExoOptions(**msgspec.structs.asdict(server), headers=headers.fields(), placement=placement)
    signals = ReceivedSignals()
    with watching_progress() as watcher:
        result = asyncio.run(_run(ExoBench(options, points, watcher), signals))
    return result, signals


async def _run(bench: "ExoBench", signals: ReceivedSignals) -> "ExoResult":
    loop_signals(signals, bench.stop)
    return await bench.run()


def _exit_with(signals: ReceivedSignals, result: "ExoResult", *, not_valid: bool) -> None:
    raise typer.Exit(
        signals.exit_code or ExitCode.of_run(failed=_failed_count(result) > 0, not_valid=not_valid)
    )


def _failed_count(result: "ExoResult") -> int:
    """Return the number of requests that failed."""
    from llmtap.metrics.summary import ENDED_WELL

    return sum(run.outcome not in ENDED_WELL for run in result.runs)


# ---------------------------------------------------------------- tables


def exo_blocks(result: "ExoResult") -> "Iterator[Note | Table]":
    """Yield a table with a row for each point of the grid (median and range of its runs), and notes."""
    from llmtap.bench.exo.result import table_rows
    from llmtap.report.document import Note
    from llmtap.report.values import counts_text

    rows = table_rows(result.runs)
    columns = {
        "pp": [f"{row.pp_tokens:,}" for row in rows],
        "tg": [f"{row.tg:,}" for row in rows],
        "x": [f"{row.concurrency:,}" for row in rows],
        "n": [f"{row.repeats:,}" for row in rows],
        "prefill": [_spread_text(row.figures["prompt_tps"]) for row in rows],
        "generation": [_spread_text(row.figures["per_req_tps"]) for row in rows],
        "agg": [_spread_text(row.figures["agg_gen_tps"]) if row.concurrency > 1 else "" for row in rows],
        "wall": [_spread_text(row.figures["wall_s"]) for row in rows],
        "energy": [_spread_text(row.figures["joules"]) for row in rows],
        "peak memory": ["" if row.memory_bytes is None else format_bytes(row.memory_bytes) for row in rows],
        "cache hits": [counts_text(row.hits) for row in rows],
        "clock": [row.timing for row in rows],
        "failed": [f"{row.failed:,}" if row.failed else "" for row in rows],
    }
    yield _columns_table({head: cells for head, cells in columns.items() if any(cells)})
    legend = "rates in tokens/s, wall in s, energy in J; of several repeats the median and the range"
    if any(row.concurrency > 1 for row in rows):
        legend += "; agg: rate of the fastest request x concurrency"
    yield Note(legend, "dim")
    energy = result.system_metrics.energy
    if energy is not None:
        watts = f"{energy.average_power_w:,.1f} W"
        yield Note(f"energy  {energy.joules:,.1f} J in {energy.inference_seconds:,.1f} s: {watts}")
    yield from _result_notes(result)


def grid_blocks(measured: "MeasuredGrid", result: "ExoResult") -> "Iterator[Note | Table]":
    """Yield a table with a row for each valid cell, and notes on the fitted model and the invalid cells."""
    from llmtap.report.document import Note

    cells = [cell for cell in measured.cells if cell.problem is None]
    yield _columns_table(
        {
            "batch": [f"{cell.batch:,}" for cell in cells],
            "pp": [f"{cell.prompt_tokens:,}" for cell in cells],
            "tg": [f"{cell.output_tokens:,}" for cell in cells],
            "n": [f"{cell.n:,}" for cell in cells],
            "time": [
                f"{_ms_text(cell.median_s)} ({_ms_text(cell.min_s)} - {_ms_text(cell.max_s)})"
                for cell in cells
            ],
            "uncertainty": [_ms_text(cell.uncertainty_s) for cell in cells],
            "model": [_ms_text(cell.model_s) for cell in cells],
        }
    )
    yield Note("times in ms: the median, and the range of the n batches", "dim")
    if measured.fit is None:
        yield Note(f"no model: {measured.problem}")
    else:
        model, part = measured.fit.model, measured.fit.part
        constants = (
            f"alpha {model.alpha_ns / 1e6:.4g} ms, beta {model.beta_ns / 1e6:.4g} ms, gamma {model.gamma:.4g}"
        )
        yield Note(f"model: {constants}; R2 {part.r2:.4f}, largest error {part.error_max:.1%}")
        yield Note(
            "the model is of the time of whole batches: beta and gamma contain the prefill where it grows "
            "with the lengths and the batch",
            "dim",
        )
    for cell in measured.cells:
        if cell.problem is not None:
            name = f"batch {cell.batch:,} pp {cell.prompt_tokens:,} tg {cell.output_tokens:,}"
            yield Note(f"not valid: {name}: {cell.problem}", "yellow")
    yield from _result_notes(result)


def _columns_table(columns: "dict[str, list[str]]") -> "Table":
    from llmtap.report.document import Table

    rows = zip(*columns.values(), strict=True)
    return Table(list(columns), [[cell or "-" for cell in row] for row in rows])


def _result_notes(result: "ExoResult") -> "Iterator[Note]":
    from llmtap.report.document import Note

    yield from (Note(f"note: {note}") for note in result.cluster["bench"]["notes"])
    batches = [run.batch for run in result.runs if run.concurrent_index == 0]
    findings = sorted((finding for batch in batches for finding in batch.findings), key=attrgetter("kind"))
    for _, alike in groupby(findings, key=attrgetter("kind")):
        of_kind = list(alike)
        worst = max(of_kind, key=lambda finding: abs(finding.figure - finding.limit))
        n = f"{len(of_kind):,} of {len(batches):,}"
        yield Note(f"warning: in {n} batches, at worst: {worst.text}", "yellow")
    failed = _failed_count(result)
    invalid_figures = sorted({figure for run in result.runs for figure in run.not_valid})
    if failed or invalid_figures:
        parts = [f"{failed:,} of {len(result.runs):,} requests failed"] if failed else []
        parts += [f"not valid: {', '.join(invalid_figures)}"] if invalid_figures else []
        yield Note(f"verdict: {'; '.join(parts)}", "red")
    elif result.runs:
        yield Note("verdict: all figures are valid" + " or doubtful" * bool(findings))


def _ms_text(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.4g}"


def _spread_text(spread: "Spread | None") -> str:
    from llmtap.report.values import number

    if spread is None:
        return ""
    middle, low, high = map(number, spread[1:])
    return middle if spread.n < 2 else f"{middle} ({low} - {high})"
