"""`llmtap bench exo` (rates over a grid, as defined by exo-bench) and `llmtap bench grid` (batch times).

Both run an `ExoBench` (`bench/exo/mode.py`) and print a table with notes, or write JSON or CSV.
"""

import asyncio
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtap.cli.bench import bench
from llmtap.cli.shared import (
    FAILED,
    AnswerTimeout,
    ApiKeyEnv,
    BodyFields,
    CaFile,
    Headers,
    Heard,
    Json,
    ModelName,
    Outputs,
    SeveralValues,
    flag,
    json_text,
    loop_signals,
    option,
    option_duration,
    print_rich,
)
from llmtap.errors import ConfigError
from llmtap.units import format_bytes

if TYPE_CHECKING:
    from llmtap.bench.exo.mode import ExoBench, ExoGrid
    from llmtap.bench.exo.result import ExoResult, MeasuredGrid, Spread
    from llmtap.report.document import Note, Table

EPILOG = """Each point of the grid --pp x --tg x --concurrency is measured --repeat times, with its requests
sent at the same instant. Rates use the timings that the server reports (exo, llama.cpp), otherwise the
client's clock; each run reports which.

--instance-meta, --sharding, --min-nodes and --max-nodes are for exo servers. With any of them, exo loads the
model as a new instance, which is removed at the end. Other instances remain.

Examples:

  llmtap bench exo --target http://127.0.0.1:8000 --pp 512 4096 --tg 128 --repeat 3 --warmup 1

  llmtap bench exo --target http://127.0.0.1:52415 --pp 512 --tg 128 --instance-meta jaccl --sharding tensor

  llmtap bench exo --target http://127.0.0.1:8000 --pp 512 --tg 128 --concurrency 1 4 --use-prefix-cache

Exit codes: 0 ok; 1 some requests failed (the table shows how many); 2 invalid option; 130 stopped by Ctrl-C,
143 by SIGTERM, with the results of the completed part."""

GRID_EPILOG = """The grid is --batch x --pp x --tg. In each cell, --warmup unmeasured batches are sent, then
--repeat measured batches. All requests of a batch have the same length and different text, and are sent at
the same instant. A cell is not valid, and is left out of the file, if a request failed, an answer did not
have exactly --tg tokens, or not all requests ran at the same time. The latency model is fitted to the valid
cells, and its constants are printed. `llmtap sim run --latency` fits the same model to the CSV file.

Examples:

  llmtap bench grid --target http://127.0.0.1:8000 --batch 1 2 4 8 16 --pp 128 --tg 64 128 256 --csv grid.csv

  llmtap sim run chat --latency grid.csv --reading length=output --scheduler static_fifo,dynamic_no_bins

Exit codes: 0 ok; 1 some cells are not valid; 2 invalid option; 130 stopped by Ctrl-C, 143 by SIGTERM, with
the results of the completed part."""

Target = Annotated[str, option("URL", "URL of the server: http://host:port[/prefix].")]
PromptLengths = Annotated[
    str, option("N...", "Prompt lengths in tokens, including the chat template (required).")
]
ResponseLengths = Annotated[str, option("N...", "Response lengths in tokens, at least 2 (required).")]
ServerType = Annotated[
    str,
    option(
        "auto|openai|vllm|sglang|exo",
        "Server type; decides which vendor-specific fields are sent; auto detects it.",
    ),
]
TokenizerName = Annotated[
    str | None,
    option(
        "FOLDER|FILE|tiktoken:NAME",
        "Tokenizer for exact prompt lengths: model folder (its chat template is applied), "
        "tokenizer.json or tiktoken name. Default: the tokenizer of `llmtap sim serve`; with another "
        "server, it gives only approximate lengths.",
    ),
]
PromptSeed = Annotated[
    int | None,
    option("N", "Seed for the random first words of the prompts (default: a new seed in each run).", min=0),
]


@bench.command(
    short_help="Measure prefill and generation rates, like exo-bench.", epilog=EPILOG, cls=SeveralValues
)
def exo(
    target: Target = "",
    pp: PromptLengths = "",
    tg: ResponseLengths = "",
    concurrency: Annotated[str, option("N...", "Numbers of concurrent requests.")] = "1",
    repeat: Annotated[int, option("N", "Number of measurements of each point.", min=1, max=10_000)] = 1,
    warmup: Annotated[
        int,
        option(
            "N",
            "Number of unmeasured warm-up requests, with the first values of --pp and --tg.",
            min=0,
            max=10_000,
        ),
    ] = 0,
    use_prefix_cache: Annotated[
        bool,
        flag(
            "--use-prefix-cache",
            "Use the server's prefix cache. This saves time, but the prefill rates of hits are approximate. "
            "Default: the cache of exo is off; with other servers, each batch has a new prompt.",
        ),
    ] = False,
    instance_meta: Annotated[
        str | None,
        option(
            "ring|jaccl|both",
            "exo only: instance type of the model; both (the default) accepts either.",
        ),
    ] = None,
    sharding: Annotated[
        str | None,
        option(
            "pipeline|tensor|both",
            "exo only: sharding of that instance; both (the default) accepts either.",
        ),
    ] = None,
    min_nodes: Annotated[
        int | None, option("N", "exo only: minimum number of nodes of that instance; default 1.", min=1)
    ] = None,
    max_nodes: Annotated[
        int | None, option("N", "exo only: maximum number of nodes of that instance; default 4.", min=1)
    ] = None,
    model: ModelName = None,
    server: ServerType = "auto",
    tokenizer: TokenizerName = None,
    header: Headers = None,
    api_key_env: ApiKeyEnv = None,
    body_field: BodyFields = None,
    ca: CaFile = None,
    timeout: AnswerTimeout = "10m",
    seed: PromptSeed = None,
    json: Json = None,
) -> None:
    """Measure prefill and generation rates over a grid of lengths and concurrency, like exo-bench."""
    outputs = Outputs(json=json)
    from llmtap.bench.exo.mode import ExoGrid
    from llmtap.bench.exo.server import PlacementWish
    from llmtap.metrics.summary import ENDED_WELL
    from llmtap.report.render import terminal

    points = ExoGrid(
        pp=_numbers("--pp", pp), tg=_numbers("--tg", tg), concurrency=_numbers("--concurrency", concurrency),
        repeat=repeat, warmup=warmup, use_prefix_cache=use_prefix_cache,
    )  # fmt: skip
    for name, given, choices in (
        ("--instance-meta", instance_meta, ("ring", "jaccl", "both")),
        ("--sharding", sharding, ("pipeline", "tensor", "both")),
    ):
        if given is not None and given not in choices:
            raise ConfigError(name, f"expected one of {', '.join(choices)}, got {given!r}")
    wish = {
        "instance_meta": instance_meta, "sharding": sharding, "nodes_min": min_nodes, "nodes_max": max_nodes
    }  # fmt: skip
    told: dict[str, Any] = {name: value for name, value in wish.items() if value is not None}
    result, heard = _measured(
        points, target, server, timeout, header, api_key_env, body_field,
        model=model, tokenizer=tokenizer, ca=ca, seed=seed, placement=PlacementWish(**told) if told else None,
    )  # fmt: skip
    outputs.tell({"--json": result.to_json}, lambda: print_rich(terminal(exo_blocks(result))))
    _end(heard, any(run.outcome not in ENDED_WELL for run in result.runs))


@bench.command(
    short_help="Measure batch times, and fit the simulator's model.", epilog=GRID_EPILOG, cls=SeveralValues
)
def grid(
    target: Target = "",
    batch: Annotated[
        str, option("N...", "Batch sizes: numbers of requests sent at the same instant (required).")
    ] = "",
    pp: PromptLengths = "",
    tg: ResponseLengths = "",
    repeat: Annotated[int, option("N", "Number of measured batches of each cell.", min=1, max=10_000)] = 5,
    warmup: Annotated[
        int,
        option("N", "Number of unmeasured batches before the measured ones of each cell.", min=0, max=100),
    ] = 1,
    length: Annotated[
        str,
        option(
            "output|prompt+output",
            "What the length column of the CSV file counts: output tokens, or prompt and output tokens. Use "
            "the same value in `llmtap sim run --reading length=...`.",
        ),
    ] = "output",
    model: ModelName = None,
    server: ServerType = "auto",
    tokenizer: TokenizerName = None,
    header: Headers = None,
    api_key_env: ApiKeyEnv = None,
    body_field: BodyFields = None,
    ca: CaFile = None,
    timeout: AnswerTimeout = "10m",
    seed: PromptSeed = None,
    csv: Annotated[
        str | None,
        option("FILE", "File for the valid cells as CSV, for llmtap sim run --latency; - is stdout."),
    ] = None,
    json: Json = None,
) -> None:
    """Measure batch times over a grid of batch sizes and lengths, and fit the simulator's latency model."""
    outputs = Outputs(json=json, csv=csv)
    from llmtap.bench.exo.mode import ExoGrid
    from llmtap.bench.exo.result import LENGTHS, measured_grid
    from llmtap.report.render import terminal

    if length not in LENGTHS:
        raise ConfigError("--length", f"expected one of {', '.join(LENGTHS)}, got {length!r}")
    points = ExoGrid(
        pp=_numbers("--pp", pp), tg=_numbers("--tg", tg), concurrency=_numbers("--batch", batch),
        repeat=repeat + warmup, distinct_prompts=True,
    )  # fmt: skip
    try:
        points.check()
    except ConfigError as exc:
        place = "--batch" if exc.place == "--concurrency" else exc.place
        raise ConfigError(place, exc.problem, f"such as {place} 8,32") from None
    result, heard = _measured(
        points, target, server, timeout, header, api_key_env, body_field,
        model=model, tokenizer=tokenizer, ca=ca, seed=seed,
    )  # fmt: skip
    found = measured_grid(result.runs, warmup=warmup, length=length)  # type: ignore[arg-type]
    told = {
        "length": length,
        "repeat": repeat,
        "warmup": warmup,
        **found.to_dict(),
        "cluster": result.cluster,
    }
    texts = {"--json": lambda: json_text(told), "--csv": lambda: found.to_csv().rstrip("\n")}
    outputs.tell(texts, lambda: print_rich(terminal(grid_blocks(found, result))))
    _end(heard, any(cell.problem for cell in found.cells))


def _measured(
    points: "ExoGrid", target: str, server: str, timeout: str, header: list[str] | None,
    api_key_env: str | None, body_field: list[str] | None, **options: Any,
) -> "tuple[ExoResult, Heard]":  # fmt: skip
    """Run the benchmark with checked options; `options` are further fields of `ExoOptions`."""
    if not target:
        raise ConfigError("--target", "is missing", "such as --target http://127.0.0.1:52415")
    from llmtap.bench.exo.mode import ExoBench, ExoOptions
    from llmtap.bench.exo.server import KINDS
    from llmtap.cli.progress import watching_progress
    from llmtap.load.bodies import parse_body_fields
    from llmtap.load.replay.options import read_headers

    if server not in KINDS:
        raise ConfigError("--server", f"expected one of {', '.join(KINDS)}, got {server!r}")
    points.check()
    chosen = ExoOptions(
        target=target, server=server,  # type: ignore[arg-type]
        headers=read_headers(header or [], None, api_key_env), fields=parse_body_fields(body_field or []),
        timeout=option_duration("--timeout", timeout), **options,
    )  # fmt: skip
    heard = Heard()
    with watching_progress() as watcher:
        result = asyncio.run(_run(ExoBench(chosen, points, watcher), heard))
    return result, heard


async def _run(one: "ExoBench", heard: Heard) -> "ExoResult":
    loop_signals(heard, one.stop)
    return await one.run()


def _end(heard: Heard, failed: bool) -> None:
    if heard.code is not None or failed:
        raise typer.Exit(FAILED if heard.code is None else heard.code)


def _numbers(option: str, text: str) -> list[int]:
    """`512,4096`, each once. Raises ConfigError that names the option."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not (word.isascii() and word.isdigit()):
            raise ConfigError(option, f"expected a number, got {word!r}", f"such as {option} 512,4096")
    return list(dict.fromkeys(map(int, words)))


# ---------------------------------------------------------------- tables


def exo_blocks(result: "ExoResult") -> "Iterator[Note | Table]":
    """Yield a row for each point of the grid, with the median of its repeats and their range, and notes."""
    from llmtap.bench.exo.result import rows_of
    from llmtap.report.document import Note
    from llmtap.report.values import joined

    rows = rows_of(result.runs)
    columns = {
        "pp": [f"{row.pp_tokens:,}" for row in rows],
        "tg": [f"{row.tg:,}" for row in rows],
        "x": [f"{row.concurrency:,}" for row in rows],
        "n": [f"{row.repeats:,}" for row in rows],
        "prefill": [_spread(row.figures["prompt_tps"]) for row in rows],
        "generation": [_spread(row.figures["per_req_tps"]) for row in rows],
        "agg": [_spread(row.figures["agg_gen_tps"]) if row.concurrency > 1 else "" for row in rows],
        "wall": [_spread(row.figures["wall_s"]) for row in rows],
        "energy": [_spread(row.figures["joules"]) for row in rows],
        "peak memory": ["" if row.memory_bytes is None else format_bytes(row.memory_bytes) for row in rows],
        "cache hits": [joined(row.hits) for row in rows],
        "clock": [row.timing for row in rows],
        "failed": [f"{row.failed:,}" if row.failed else "" for row in rows],
    }
    yield _table({head: cells for head, cells in columns.items() if any(cells)})
    said = "rates in tokens/s, wall in s, energy in J; of several repeats the median and the range"
    if any(row.concurrency > 1 for row in rows):
        said += "; agg: the fastest one's rate x concurrency"
    yield Note(said, "dim")
    energy = result.system_metrics["energy"]
    if energy is not None:
        joules, seconds, watts = (energy[name] for name in ("joules", "inference_seconds", "average_power_w"))
        yield Note(f"energy  {joules:,.1f} J in {seconds:,.1f} s: {watts:,.1f} W")
    yield from _notes(result)


def grid_blocks(found: "MeasuredGrid", result: "ExoResult") -> "Iterator[Note | Table]":
    """Yield a row for each valid cell, the fitted model, the cells that are not valid, and all notes."""
    from llmtap.report.document import Note

    cells = [cell for cell in found.cells if cell.problem is None]
    yield _table({
        "batch": [f"{cell.batch:,}" for cell in cells],
        "pp": [f"{cell.prompt_tokens:,}" for cell in cells],
        "tg": [f"{cell.output_tokens:,}" for cell in cells],
        "n": [f"{cell.n:,}" for cell in cells],
        "time": [f"{_ms(cell.median_s)} ({_ms(cell.min_s)} - {_ms(cell.max_s)})" for cell in cells],
        "uncertainty": [_ms(cell.uncertainty_s) for cell in cells],
        "model": [_ms(cell.model_s) for cell in cells],
    })  # fmt: skip
    yield Note("times in ms: the median, and the range of the n batches", "dim")
    if found.fit is None:
        yield Note(f"no model: {found.problem}")
    else:
        model, part = found.fit.model, found.fit.part
        constants = (
            f"alpha {model.alpha_ns / 1e6:.4g} ms, beta {model.beta_ns / 1e6:.4g} ms, gamma {model.gamma:.4g}"
        )
        yield Note(f"model: {constants}; R2 {part.r2:.4f}, largest error {part.error_max:.1%}")
        yield Note(
            "the model is of the time of whole batches: beta and gamma contain the prefill where it grows "
            "with the lengths and the batch",
            "dim",
        )
    for cell in found.cells:
        if cell.problem is not None:
            name = f"batch {cell.batch:,} pp {cell.prompt_tokens:,} tg {cell.output_tokens:,}"
            yield Note(f"not valid: {name}: {cell.problem}", "yellow")
    yield from _notes(result)


def _table(columns: "dict[str, list[str]]") -> "Table":
    from llmtap.report.document import Table

    rows = zip(*columns.values(), strict=True)
    return Table(list(columns), [[cell or "-" for cell in row] for row in rows])


def _notes(result: "ExoResult") -> "Iterator[Note]":
    from llmtap.report.document import Note

    yield from (Note(f"note: {note}") for note in result.cluster["bench"]["notes"])
    batches = [run.batch for run in result.runs if run.concurrent_index == 0]
    found = sorted((one for batch in batches for one in batch.findings), key=lambda one: one["what"])
    for _, alike in groupby(found, key=lambda one: one["what"]):
        of_kind = list(alike)
        worst = max(of_kind, key=lambda one: abs(one["figure"] - one["limit"]))
        n = f"{len(of_kind):,} of {len(batches):,}"
        yield Note(f"warning: in {n} batches, at worst: {worst['says']}", "yellow")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.4g}"


def _spread(spread: "Spread | None") -> str:
    from llmtap.report.values import number

    if spread is None:
        return ""
    middle, low, high = map(number, spread[1:])
    return middle if spread.n < 2 else f"{middle} ({low} - {high})"
