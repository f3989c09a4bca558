"""`llmtap bench exo`: prefill and generation rates over a grid, as defined by exo-bench."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

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
    loop_signals,
    option,
    option_duration,
    print_rich,
)
from llmtap.errors import ConfigError
from llmtap.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llmtap.bench.exo.mode import ExoBench
    from llmtap.bench.exo.result import ExoResult, ExoRow, Spread

__all__ = ["exo", "render_exo"]

EPILOG = """Each point of the grid --pp x --tg x --concurrency is measured --repeat times, with its requests
sent at the same instant. Rates use the timings that the server reports (exo, llama.cpp), otherwise the
client's clock; each run reports which.

Examples:

  llmtap bench exo --target http://127.0.0.1:8000 --pp 512 4096 --tg 128 --repeat 3 --warmup 1

  llmtap bench exo --target http://127.0.0.1:52415 --model mlx-community/Qwen3.5-27B-4bit
  --instance-meta jaccl --sharding tensor --min-nodes 2 --max-nodes 2 --pp 512 4096 --tg 128
  --repeat 3 --warmup 1

  llmtap bench exo --target http://127.0.0.1:52415 --model NAME --tokenizer models/mine --pp 1000,5000
  --tg 128 --concurrency 1,4 --use-prefix-cache --json result.json

Exit codes: 0 ok; 1 some requests failed (the table shows how many); 2 invalid option; 130 stopped by Ctrl-C,
143 by SIGTERM, with the results of the completed part."""


@bench.command(epilog=EPILOG, cls=SeveralValues)
def exo(
    target: Annotated[str, option("URL", "URL of the server: http://host:port[/prefix].")] = "",
    pp: Annotated[str, option("N...", "Prompt lengths in tokens, including the chat template.")] = "",
    tg: Annotated[str, option("N...", "Response lengths in tokens, at least 2.")] = "",
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
            "Allow hits in the server's prefix cache. This saves time, but the prefill "
            "rates of hits are approximate (default: every prompt is computed).",
        ),
    ] = False,
    distinct_prompts: Annotated[
        bool,
        flag(
            "--distinct-prompts",
            "Use a different prompt for each request of a batch (default: one prompt for the whole batch).",
        ),
    ] = False,
    instance_meta: Annotated[
        str | None, option("ring|jaccl|both", "exo only: place the model again, with this kind of instance.")
    ] = None,
    sharding: Annotated[
        str | None, option("pipeline|tensor|both", "exo only: place the model again, with this sharding.")
    ] = None,
    min_nodes: Annotated[
        int | None, option("N", "exo only: place the model again, on at least N nodes (default: 1).", min=1)
    ] = None,
    max_nodes: Annotated[
        int | None, option("N", "exo only: place the model again, on at most N nodes (default: 4).", min=1)
    ] = None,
    model: ModelName = None,
    server: Annotated[
        str,
        option(
            "auto|openai|vllm|sglang|llamacpp|exo",
            "Server type; decides which vendor-specific fields are sent (default: detected).",
        ),
    ] = "auto",
    tokenizer: Annotated[
        str | None,
        option(
            "FOLDER|FILE|tiktoken:NAME",
            "Tokenizer for exact prompt lengths: model folder (its chat template is applied), "
            "tokenizer.json or tiktoken name (default: the tokenizer of `llmtap sim serve`).",
        ),
    ] = None,
    header: Headers = None,
    api_key_env: ApiKeyEnv = None,
    body_field: BodyFields = None,
    ca: CaFile = None,
    timeout: AnswerTimeout = "10m",
    metrics: Annotated[
        str | None,
        option(
            "URL|none",
            "URL of the server's metrics, or none (default: /metrics of the server, if available).",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        option("N", "Random seed of the first words of the prompts (default: random).", min=0),
    ] = None,
    json: Json = None,
) -> None:
    """Measure prefill and generation rates over a grid of lengths and concurrency, like exo-bench."""
    if not target:
        raise ConfigError("--target", "is missing", "such as --target http://127.0.0.1:52415")
    outputs = Outputs(json=json)
    from llmtap.bench.exo.mode import ExoBench, ExoGrid, ExoOptions
    from llmtap.bench.exo.placement import PlacementWish
    from llmtap.bench.exo.server import KINDS
    from llmtap.cli.progress import watching_bench
    from llmtap.load.bodies import parse_body_fields
    from llmtap.load.replay.options import read_headers

    if server not in KINDS:
        raise ConfigError("--server", f"expected one of {', '.join(KINDS)}, got {server!r}")
    grid = ExoGrid(
        pp=_numbers("--pp", pp), tg=_numbers("--tg", tg), concurrency=_numbers("--concurrency", concurrency),
        repeat=repeat, warmup=warmup, use_prefix_cache=use_prefix_cache, distinct_prompts=distinct_prompts,
    )  # fmt: skip
    grid.check()
    for name, given, choices in (
        ("--instance-meta", instance_meta, ("ring", "jaccl", "both")),
        ("--sharding", sharding, ("pipeline", "tensor", "both")),
    ):
        if given is not None and given not in choices:
            raise ConfigError(name, f"expected one of {', '.join(choices)}, got {given!r}")
    wish = {
        "instance_meta": instance_meta, "sharding": sharding, "nodes_min": min_nodes, "nodes_max": max_nodes
    }  # fmt: skip
    told = {name: value for name, value in wish.items() if value is not None}
    options = ExoOptions(
        target=target, model=model, server=server, tokenizer=tokenizer,  # type: ignore[arg-type]
        headers=read_headers(header or [], None, api_key_env), fields=parse_body_fields(body_field or []),
        ca=ca, timeout=option_duration("--timeout", timeout), metrics=metrics, seed=seed,
        placement=PlacementWish(**told) if told else None,  # type: ignore[arg-type]
    )  # fmt: skip
    heard = Heard()
    with watching_bench() as watcher:
        one = ExoBench(options, grid, watcher)
        result = asyncio.run(_run(one, heard))
    outputs.tell({"--json": result.to_json}, lambda: print_rich(render_exo(result)))
    if one.stopped:
        assert heard.code is not None
        raise typer.Exit(heard.code)
    if any(row.failed for row in _rows(result)):
        raise typer.Exit(FAILED)


def render_exo(result: "ExoResult") -> "RenderableType":
    """A row for each point of the grid, with the median of its repeats, their range, and all notes."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = _rows(result)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    shown = [(head, cell) for head, cell in _COLUMNS if any(cell(row) for row in rows)]
    for head, _ in shown:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*(cell(row) or "-" for _, cell in shown))
    parts: list[RenderableType] = [table]
    said = "rates in tokens/s, wall in s, energy in J; of several repeats the median and the range"
    if any(row.concurrency > 1 for row in rows):
        said += "; agg: the fastest one's rate x concurrency; all/wall: all tokens by wall time"
    parts.append(Text(said, style="dim"))
    energy = result.system_metrics["energy"]
    if energy is not None:
        watts = f"{energy['average_power_w']:,.1f} W"
        parts.append(
            Text(f"energy  {energy['joules']:,.1f} J in {energy['inference_seconds']:,.1f} s: {watts}")
        )
    parts += [Text(f"note: {note}") for note in result.cluster["bench"]["notes"]]
    parts += [Text(f"beware: {line}", style="yellow") for line in _findings(result)]
    return Group(*parts)


def _findings(result: "ExoResult") -> Iterator[str]:
    """A line for each kind of what speaks against the figures: the worst case, and in how many batches."""
    batches = [run.batch for run in result.runs if run.concurrent_index == 0]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for batch in batches:
        for finding in batch.findings:
            by_kind.setdefault(finding["what"], []).append(finding)
    for found in by_kind.values():
        worst = max(found, key=lambda finding: abs(finding["figure"] - finding["limit"]))
        yield f"in {len(found):,} of {len(batches):,} batches, at worst: {worst['says']}"


def _spread(spread: "Spread | None", digits: int = 4) -> str:
    if spread is None:
        return ""
    middle = _short(spread.median, digits)
    if spread.n < 2:
        return middle
    return f"{middle} ({_short(spread.low, digits)} - {_short(spread.high, digits)})"


def _short(value: float, digits: int) -> str:
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def _hits(row: "ExoRow") -> str:
    return ", ".join(f"{n:,} {hit}" for hit, n in row.hits.items())


_COLUMNS: Final[Sequence[tuple[str, Callable[["ExoRow"], str]]]] = (
    ("pp", lambda row: f"{row.pp_tokens:,}"),
    ("tg", lambda row: f"{row.tg:,}"),
    ("x", lambda row: f"{row.concurrency:,}"),
    ("n", lambda row: f"{row.repeats:,}"),
    ("prefill", lambda row: _spread(row.prompt_tps)),
    ("generation", lambda row: _spread(row.per_req_tps)),
    ("agg", lambda row: _spread(row.agg_gen_tps) if row.concurrency > 1 else ""),
    ("all/wall", lambda row: _spread(row.wall_gen_tps)),
    ("wall", lambda row: _spread(row.wall_s)),
    ("energy", lambda row: _spread(row.joules)),
    ("peak memory", lambda row: "" if row.memory_bytes is None else format_bytes(row.memory_bytes)),
    ("cache hits", _hits),
    ("clock", lambda row: row.timing),
    ("failed", lambda row: f"{row.failed:,}" if row.failed else ""),
)
"""Heads, and what stands below; a column without a single figure is left out."""


async def _run(one: "ExoBench", heard: Heard) -> "ExoResult":
    loop_signals(heard, one.stop)
    return await one.run()


def _rows(result: "ExoResult") -> "list[ExoRow]":
    from llmtap.bench.exo.result import rows_of

    return rows_of(result.runs)


def _numbers(option: str, text: str) -> list[int]:
    """`512,4096`, each once. Raises ConfigError that names the option."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not (word.isascii() and word.isdigit()):
            raise ConfigError(option, f"expected a number, got {word!r}", f"such as {option} 512,4096")
    return list(dict.fromkeys(map(int, words)))
