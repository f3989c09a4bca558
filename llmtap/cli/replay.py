"""`llmtap replay` (send a trace, a capture or a workload to a server on time) and `llmtap selftest`.

Reads the options, runs a `Replay` (`load/replay`), adds the self-test, and writes and prints the result with
`cli/results.py`.
"""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from msgspec import Struct

from llmtap.cli.flags import command
from llmtap.cli.main import app
from llmtap.cli.options import GoalOptions, HeaderOptions, Json, NoSelftest, OutputOptions, ReaderOptions
from llmtap.cli.results import result_place, show_replay, store_result
from llmtap.cli.shared import (
    Outputs,
    ReceivedSignals,
    SeveralValues,
    Stopped,
    check_capture_place,
    exit_codes,
    figures_place,
    json_text,
    print_message,
    print_rich,
    read_percentiles,
    stoppable,
)
from llmtap.errors import ConfigError, ExitCode
from llmtap.load.options import LoadPlan
from llmtap.options.fields import opt
from llmtap.units import NS_PER_S, Duration, format_ns

if TYPE_CHECKING:
    from llmtap.cli.progress import ProgressLines
    from llmtap.load.replay.perform import Replay

EPILOG = """TRACE is a file in any format of `llmtap convert --list`, a capture, or a workload (--workloads
lists them). Requests are sent at their scheduled times, independent of earlier responses (open loop), with
two exceptions: --closed sets a concurrency; and later turns of a conversation wait for the previous response.
The report always shows how late the requests were sent.

llmtap's own requests for metrics and for the list of models have the User-Agent llmtap-replay/VERSION.

Examples:

  llmtap replay captures/ --target http://127.0.0.1:8000 --speed 2 --json=result.json

  llmtap replay azure.csv --target http://127.0.0.1:8000 --rate 10 --requests 1000 --slo "ttft:500ms"

  llmtap replay conversation --target http://127.0.0.1:8000 --rate 4 --arrivals gamma:cv=2

  llmtap replay synthetic-uniform --target http://127.0.0.1:8000 --closed 32 --tokenizer models/mine

The first signal stops sending; the second cancels the responses in flight. In both cases a report of the
completed part is written.

API keys are read from the environment (OPENAI_API_KEY, or --api-key-env) or a file (--header-file), and are
never stored in a result.

""" + exit_codes()


class _ReplayOptions(Struct, frozen=True, kw_only=True):
    """Options of this command, in addition to those of the load."""

    no_selftest: NoSelftest = False
    list_workloads: Annotated[bool, opt("List the workloads.", None, "--workloads")] = False


@command(
    app,
    short_help="Send a trace or a workload to a server, and measure the responses.",
    epilog=EPILOG,
    cls=SeveralValues,
)
def replay(
    load: LoadPlan,
    headers: HeaderOptions,
    goals: GoalOptions,
    reader: ReaderOptions,
    outputs: OutputOptions,
    options: _ReplayOptions,
) -> None:
    """Send a trace, a capture or a workload to a server, and measure the responses."""
    if options.list_workloads:
        _show_workloads()
        return
    if not load.schedule.source:
        raise ConfigError("TRACE", "is missing", "`llmtap replay --help` shows the arguments")
    if not load.target.url:
        raise ConfigError("--target", "is missing", "such as --target http://127.0.0.1:8000")
    csv, capture = load.measuring.csv, load.measuring.capture
    figures_csv_file = None if csv is None else figures_place(csv)
    Outputs(csv=csv)  # Check that the file can be written.
    files = outputs.outputs(csv=figures_csv_file)
    from llmtap.cli.progress import watching_progress
    from llmtap.gates.requirements import Requirements, exit_code
    from llmtap.load.replay.options import refuse_unused_options
    from llmtap.load.replay.perform import Replay
    from llmtap.load.replay.perform import ReplayStopped as NothingMeasured
    from llmtap.load.replay.plan import plan_of

    objectives = goals.objectives()
    requirements = Requirements.parse(goals.require)
    requirements.check_objectives(objectives)
    refuse_unused_options(load)
    change = msgspec.structs.replace
    drain = load.schedule.drain
    load = change(
        load,
        schedule=change(
            load.schedule, drain=Duration(load.sending.timeout + NS_PER_S) if drain is None else drain
        ),
        target=change(load.target, headers=headers.fields()),
        bodies=change(load.bodies, temperature=0.0),
        measuring=change(
            load.measuring,
            slo=objectives,
            percentiles=read_percentiles(goals.percentiles) | requirements.percentiles,
            reader=reader.benefit(),
        ),
    )
    if capture is not None:
        check_capture_place(capture)
        if (place := result_place(capture)) is not None:
            Outputs(json=str(place))  # Check that the file can be written.
    selftest = not options.no_selftest and load.sending.ray is None
    try:
        with stoppable() as signals:
            with watching_progress() as listener:
                replay = Replay(plan_of(load, listener.on_reading), load, listener)
                result = asyncio.run(_run(replay, listener, signals, selftest=selftest))
            rows = requirements.add_to(result)
            if capture is not None:
                store_result(capture, result)
            show_replay(files, result)
    except Stopped as exc:
        print_message("stopped")
        raise typer.Exit(exc.code) from None
    except NothingMeasured as exc:
        assert signals.exit_code is not None
        print_message(str(exc))
        raise typer.Exit(signals.exit_code) from None
    if signals.exit_code is not None:
        raise typer.Exit(signals.exit_code)
    code = exit_code(result["verdict"], rows, missed=result["load"]["stop_condition"] is not None)
    if code:
        raise typer.Exit(code)


async def _run(
    replay: "Replay", listener: "ProgressLines", signals: ReceivedSignals, *, selftest: bool
) -> dict[str, Any]:
    from llmtap.bench.selftest import run_selftest, selftest_load
    from llmtap.cli.progress import ReplaySignals

    signals.handler = ReplaySignals(replay, listener, asyncio.get_running_loop())
    result = await replay.run()
    load = selftest_load(result, replay.load.target.url, processes=replay.load.sending.processes)
    if selftest and load is not None and not signals.numbers:
        result["selftest"] = msgspec.to_builtins(await run_selftest(load))
    return result


@command(
    app,
    short_help="Measure how accurate llmtap's TTFT and ITL are on this host.",
    epilog="Example:\n\n  llmtap selftest --streams 64 --itl 10ms",
)
def selftest(
    streams: Annotated[int, opt("Number of concurrent streams.", "N", ge=1, le=10_000)] = 32,
    itl: Annotated[Duration, opt("Time between the tokens of a stream (varies by 30 %).", "TIME")] = Duration(
        20_000_000
    ),
    duration: Annotated[
        Duration, opt("Approximate duration; each stream repeats responses of about 1 s.", "TIME")
    ] = Duration(3 * NS_PER_S),
    processes: Annotated[int, opt("Number of client processes.", "N", ge=1, le=256)] = 1,
    json: Json = None,
) -> None:
    """Measure how accurate llmtap's TTFT and ITL measurements are on this host.

    The command reads streams from an embedded server that logs its send times. The error is the difference
    between a measured time and the time in this log.
    """
    from llmtap.bench.selftest import SelftestLoad, run_selftest
    from llmtap.report.replay import render_selftest

    for name, ns, least, limits in (
        ("--itl", itl, NS_PER_S // 1_000, "from 1 ms to 60 s"),
        ("--duration", duration, 1, "above 0 and up to 60 s"),
    ):
        if not least <= ns <= 60 * NS_PER_S:
            raise ConfigError(name, f"expected a time {limits}, got {format_ns(ns)}")
    outputs = Outputs(json=json)
    load = SelftestLoad(streams=streams, itl=itl, duration=duration, processes=processes)
    result = msgspec.to_builtins(asyncio.run(run_selftest(load)))
    outputs.write_or_show({"--json": lambda: json_text(result)}, lambda: print_rich(render_selftest(result)))
    if result["unmatched"] == result["n"]:
        raise typer.Exit(ExitCode.FAILED)


def _show_workloads() -> None:
    from llmtap.workload.registry import workload_texts

    for name, about in workload_texts().items():
        print(f"{name:24} {about}")
