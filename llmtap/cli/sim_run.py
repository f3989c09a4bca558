"""`llmtap sim run`: a trace through schedulers, in virtual time."""

import difflib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from llmtap.cli.sim import sim
from llmtap.errors import ConfigError

__all__ = ["run"]

EPILOG = """TRACE is anything that `llmtap convert --list` reads, or a capture. Figures are those of seed
004's model of a GPU. The seed leaves much open, and which scheduler looks best depends on how it is read:
--readings lists the readings, and --reading sets one.

Examples:

  llmtap sim run trace.csv --scheduler static_fifo,dynamic_no_bins,multi_bin_dynamic --scale 100

  llmtap sim run trace.csv --scheduler multi_bin_dynamic --rate 27 --requests 10000 --eps 1ms --json out.json

  llmtap sim run trace.csv --reading window=arrivals --reading bin_choice=longest-queue --capacity 0.01"""

_ALL = "static_fifo,dynamic_no_bins,multi_bin_dynamic"


@sim.command(epilog=EPILOG)
def run(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="What to run.")] = "",
    source_format: Annotated[
        str | None,
        typer.Option("--from", metavar="NAME", help="Format of TRACE, where its content does not tell."),
    ] = None,
    scheduler: Annotated[str, typer.Option(metavar="NAME,...", help="Schedulers, one run each.")] = _ALL,
    scale: Annotated[
        float | None, typer.Option(metavar="X", help="Arrivals X times as dense; bursts stay bursts.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(metavar="RPS", help="The same, by the mean rate that comes of it.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(metavar="N", help="The first N rows; a shorter trace is repeated.")
    ] = None,
    bins: Annotated[
        str | None, typer.Option(metavar="K|EDGE,...", help="How many bins, or the lower edge of each.")
    ] = None,
    eps: Annotated[str | None, typer.Option(help="Half width of the band around the token SLA.")] = None,
    predictor: Annotated[
        str | None, typer.Option(metavar="perfect|prompt|noisy|shuffled", help="Of output lengths.")
    ] = None,
    reading: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Another reading; may be repeated.")
    ] = None,
    readings: Annotated[
        bool, typer.Option("--readings", help="List the readings, and what they mean.")
    ] = False,
    latency: Annotated[
        str | None,
        typer.Option(metavar="CSV", help="Grid of batch_size, max_seq_len, mean_latency_sec to fit."),
    ] = None,
    servers: Annotated[int, typer.Option(help="How many GPUs.", min=1, max=10_000)] = 1,
    capacity: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Also search the rate at which this share is outside the SLA."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of predictors that guess.")] = 42,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the summaries; - is stdout.")
    ] = None,
) -> None:
    """Run a trace through schedulers in virtual time, and compare them."""
    if readings:
        _show_readings()
        return
    if not trace:
        raise ConfigError("TRACE", "is missing", "llmtap sim run --help")
    from llmtap.sim.wind_tunnel import fly
    from llmtap.sim.workload import load_trace

    names = _schedulers(scheduler)
    if scale is not None and rate is not None:
        raise ConfigError("--rate", "is a scale, and --scale is given")
    for option, value in (("--scale", scale), ("--rate", rate), ("--requests", requests)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(option, f"expected more than 0, got {value:g}")
    if capacity is not None and not 0 <= capacity < 1:
        raise ConfigError("--capacity", f"expected a share from 0 to below 1, got {capacity:g}")
    read = _readings(reading or [], bins=bins, eps=eps, predictor=predictor)
    model, fitted = _model(latency)
    place = Path(json) if json not in (None, "-") else None
    if place is not None and not place.parent.is_dir():
        raise ConfigError("--json", f"there is no folder {place.parent}")
    told: list[dict[str, Any]] = []
    with _progress() as progress:
        given = load_trace(
            trace, count=requests, source_format=source_format, progress=progress("reading", None)
        )
        count = requests or len(given)
        factor = _factor(given, scale, rate)
        try:
            work = given.requests_at(count=count, scale=factor)
        except ValueError as exc:
            raise ConfigError("--requests", f"{count:,} are more than {trace} has, and {exc}") from None
        for name in names:
            try:
                flight = fly(
                    name, work, read, model=model, servers=servers, seed=seed, progress=progress(name, count)
                )
            except ValueError as exc:
                raise ConfigError("--reading", str(exc)) from None
            summary = flight.to_dict() | {"trace": trace, "scale": factor, "fit": fitted}
            if capacity is not None:
                summary["capacity"] = _capacity(given, count, flight, capacity)
            told.append(summary)
    _show(told, given.notes, place, as_json=json == "-")


def _schedulers(text: str) -> list[str]:
    from llmtap.sim.schedulers.registry import SCHEDULERS

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in SCHEDULERS:
            near = difflib.get_close_matches(name, SCHEDULERS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(SCHEDULERS)}"
            raise ConfigError("--scheduler", f"no scheduler is called {name!r}; {hint}")
    if not names:
        raise ConfigError("--scheduler", "names none")
    return list(dict.fromkeys(names))


def _readings(settings: list[str], **options: str | None) -> Any:
    from llmtap.sim.readings import read_settings

    given: dict[str, str] = {}
    for one in settings:
        name, found, value = one.partition("=")
        if not found:
            raise ConfigError("--reading", f"expected NAME=VALUE, got {one!r}", "llmtap sim run --readings")
        given[name] = value
    try:
        read_settings(given)
    except ValueError as exc:
        raise ConfigError("--reading", str(exc), "llmtap sim run --readings") from None
    for name, text in options.items():
        if text is not None:
            own = {"bin_edges" if name == "bins" and "," in text else name: text}
            try:
                read_settings(own)
            except ValueError as exc:
                raise ConfigError(f"--{name}", str(exc).partition(": ")[2] or str(exc)) from None
            given |= own
    return read_settings(given)


def _model(path: str | None) -> tuple[Any, dict[str, Any] | None]:
    from llmtap.sim.latency import SEED_MODEL, GridError, fit, load_grid

    if path is None:
        return SEED_MODEL, None
    try:
        fitted = fit(load_grid(path))
    except GridError as exc:
        raise ConfigError("--latency", f"{path}: {exc}") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError("--latency", f"cannot read {path}: {getattr(exc, 'strerror', exc)}") from None
    told = {"grid": path, "r2": fitted.r2, "points": fitted.points, "error_max": fitted.error_max}
    return fitted.model, told


def _factor(given: Any, scale: float | None, rate: float | None) -> float:
    if rate is None:
        return scale or 1.0
    if given.rate_rps is None:
        raise ConfigError("--rate", "all rows arrive at once: no scale makes that a rate")
    return float(rate / given.rate_rps)


def _capacity(given: Any, count: int, flight: Any, allowed: float) -> dict[str, float]:
    from llmtap.sim.wind_tunnel import capacity_rps, fly

    own_rps = given.rate_rps
    if own_rps is None:
        raise ConfigError("--capacity", "all rows arrive at once: no scale makes that a rate")

    def late(rps: float) -> float:
        work = given.requests_at(count=count, scale=rps / own_rps)
        again = fly(
            flight.name, work, flight.readings, model=flight.model, servers=flight.servers, seed=flight.seed
        )
        return again.late_share(again.latencies_ns())

    return {"allowed": allowed, "rps": capacity_rps(late, allowed, own_rps)}


@contextmanager
def _progress() -> Iterator[Callable[[str, int | None], Callable[..., None] | None]]:
    """A bar for each thing that takes long, where there is somebody to see it."""
    if not sys.stderr.isatty():
        yield lambda name, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        def begin(name: str, total: int | None) -> Callable[..., None]:
            task = bar.add_task(name, total=total)

            def told(done: int, of: int | None = None) -> None:
                bar.update(task, completed=done, total=total if of is None else of)

            return told

        yield begin


_COLUMNS = (
    "scheduler", "requests", "req/s", "tok/s", "mean s", "p50 s", "p95 s", "p99 s", "late", "slow", "busy",
    "batch", "queue p50 s", "capacity req/s",
)  # fmt: skip


def _row(told: dict[str, Any]) -> list[str]:
    latency, capacity = told["latency"], told.get("capacity")

    def rate(value: float | None) -> str:
        return "-" if value is None else f"{value:,.4g}" if value < 1_000 else f"{value:,.0f}"

    return [
        told["scheduler"], f"{told['n']:,}", rate(told["throughput_rps"]), rate(told["throughput_tps"]),
        *(f"{latency[name]:,.2f}" for name in ("mean", "p50", "p95", "p99")),
        f"{told['request_sla_violation']:.2%}", f"{told['token_sla_violation']:.2%}",
        "-" if told["utilization"] is None else f"{told['utilization']:.1%}", f"{told['batch_mean']:.2f}",
        f"{told['queueing']['p50']:,.2f}", rate(capacity["rps"]) if capacity else "",
    ]  # fmt: skip


def _show(told: list[dict[str, Any]], notes: list[str], place: Path | None, *, as_json: bool) -> None:
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(told))
    if place is not None:
        try:
            place.write_bytes(text + b"\n")
        except OSError as exc:
            raise ConfigError("--json", f"cannot write {place}: {exc.strerror}") from None
    if as_json:
        print(text.decode())
        return
    columns = _COLUMNS if "capacity" in told[0] else _COLUMNS[:-1]
    _table(columns, [_row(one)[: len(columns)] for one in told])
    first = told[0]
    print(
        f"late: outside the request SLA of {first['readings']['request_sla']:g} s; "
        f"slow: outside the token SLA of {first['readings']['token_sla'] * 1e3:g} ms. "
        f"Offered: {first['load']['offered_rps'] or 0:.4g} requests/s on average."
    )
    if first["fit"]:
        model, fitted = first["model"], first["fit"]
        print(
            f"model: alpha {model['alpha'] * 1e3:.4g} ms, beta {model['beta'] * 1e3:.4g} ms/token, "
            f"gamma {model['gamma']:.4g}; R^2 {fitted['r2']:.5f} on {fitted['points']} points, "
            f"off by {fitted['error_max']:.1%} at most"
        )
    for note in notes:
        print(f"note: {note}")


def _show_readings() -> None:
    from llmtap.sim.readings import explain

    _table(("reading", "default", "meaning"), [list(row) for row in explain()], left=3)


def _table(columns: tuple[str, ...], rows: list[list[str]], *, left: int = 1) -> None:
    if not sys.stdout.isatty():
        # For grep and awk: columns by tabs.
        for cells in (list(columns), *rows):
            print("\t".join(cells))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right")
    for cells in rows:
        table.add_row(*cells)
    Console(highlight=False, markup=False).print(table)
