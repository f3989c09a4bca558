"""A model of Qwen2-7B's shape under a real engine on a GPU: latency and goodput against the request rate, and
tests 5.1, 5.3 and 5.4 of the draft at their full sample sizes.

    python benchmarks/gpu/rates.py --engine-bin VENV/bin/vllm                       on a machine with a GPU
    python benchmarks/gpu/rates.py --engine-bin "python3 -m transformers.cli.transformers" \
        --engine transformers --shape qwen2-1.5b                                    without vLLM
    python benchmarks/gpu/rates.py --engine-bin VENV/bin/transformers --engine transformers --shape small \
        --workload benchmarks/gpu/small.toml --rates 1,2,4 --requests 30 --quick    to try it without a GPU

The Python that runs this script runs llmtap, too. `--grid 1,4,16` also measures batch times (`llmtap bench
grid`) of these batch sizes, for `llmtap sim run --latency`.
`vllm serve --load-format dummy` fills the shape with random weights; `transformers serve` has them made and
saved first. Rates are run `--repeats` times in an order drawn anew each time, so that drift is no effect of
the rate. The curves are those of the smooth goodput paper, Fig. 5: goodput, smooth goodput, TTFT and time
between chunks over the rate. Results go to `--results` as JSON, as a page with the curves, and as the bench's
own reports.
"""

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
REPOSITORY: Final = HERE.parent.parent
sys.path[:0] = [str(HERE), str(REPOSITORY / "tests" / "e2e"), str(REPOSITORY)]

from model import SHAPES, make_model  # noqa: E402 - folders of scripts
from parts.servers import Failure, Server, port_free  # noqa: E402

from llmtap.report.document import (  # noqa: E402
    Axis,
    FigureBlock,
    Panel,
    Plot,
    PlotSeries,
    ReportDocument,
    Section,
)
from llmtap.report.render import page_html  # noqa: E402

LLMTAP: Final = (sys.executable, "-m", "llmtap.cli")
PATHS: Final = {"PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))}
READY_S_MAX: Final = 900
"""An engine compiles and captures graphs before it answers."""
WEIGHTS: Final = """
import sys, torch, transformers
torch.manual_seed(20)
torch.set_default_dtype(torch.bfloat16 if torch.cuda.is_available() else torch.float32)
device = "cuda" if torch.cuda.is_available() else "cpu"
with torch.device(device):
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config.from_pretrained(sys.argv[1]))
model.save_pretrained(sys.argv[1])
"""
TESTS: Final = {
    "throughput": {},
    "ttft": {"workload": "synthetic-uniform"},
    "tradeoff": {"workload": "synthetic-uniform"},
    "itl": {},
}
"""5.2 comes first: the others are at shares of what it finds."""
FIGURES: Final = {
    "goodput": "goodput (requests/s within the objectives)",
    "smooth_goodput": "smooth goodput (tokens/s)",
    "ttft_p50": "TTFT P50 (ms)",
    "ttft_p99": "TTFT P99 (ms)",
    "tbc_p50": "time between chunks P50 (ms)",
    "tbc_p99": "time between chunks P99 (ms)",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument(
        "--engine-bin",
        type=shlex.split,
        required=True,
        help='the engine\'s command; several words such as "python3 -m transformers.cli.transformers"',
    )
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen2-7b")
    parser.add_argument("--rates", default="1,2,4,6,8,10,12,16,20,24", help="requests/s")
    parser.add_argument("--requests", type=int, default=1000, help="of each run; P99 needs 1,000 (5.1.4.3)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--workload", default=str(HERE / "uniform.toml"), help="file, or name of a built-in one"
    )
    parser.add_argument("--slo", default="ttft:1s tpot:100ms")
    parser.add_argument("--tests", default=",".join(TESTS), help="of llmtap bench; empty: none")
    parser.add_argument("--grid", default="", help="batch sizes of llmtap bench grid; empty: none")
    parser.add_argument(
        "--quick", action="store_true", help="short tests; their reports say what that forfeits"
    )
    parser.add_argument("--results", type=Path, default=HERE / "build/results")
    args = parser.parse_args()
    results: Path = args.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(1))  # the engine is ended on the way out
    try:
        with _engine(args, results) as url:
            swept = _swept(args, url, results)
            _show(swept, results)
            _tested(args, url, results)
            _batches(args, url, results)
    except (Failure, subprocess.SubprocessError, OSError) as failure:
        print(f"FAILED {failure}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _engine(args: argparse.Namespace, results: Path) -> Iterator[str]:
    """Its URL, once it is ready."""
    folder = make_model(results / args.shape, args.shape)
    port = port_free()
    if args.engine == "vllm":
        argv = [*args.engine_bin, "serve", args.shape, "--load-format", "dummy", "--dtype", "bfloat16"]
        argv += ["--no-enable-prefix-caching"]
    else:
        if not list(folder.glob("*.safetensors")):
            python = _python_of(args.engine_bin[0])
            subprocess.run([python, "-c", WEIGHTS, folder], check=True, timeout=READY_S_MAX)
        # Where there is no GPU its cache would take all memory.
        limits = ["--cb-num-blocks", "64", "--cb-max-batch-tokens", "256"] if args.shape == "small" else []
        argv = [*args.engine_bin, "serve", args.shape, "--continuous-batching", *limits]
        argv += ["--device", "cpu"] if args.shape == "small" else []
    argv += ["--host", "127.0.0.1", "--port", str(port)]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    server = Server("engine", argv, logs=results, env=offline, cwd=results)
    try:
        took = server.wait_ready(f"http://127.0.0.1:{port}/health", limit_s=READY_S_MAX)
        print(f"engine ready after {took:.0f} s", file=sys.stderr)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()


def _python_of(command: str) -> str:
    """The Python that has the engine: the command itself, or the one beside a script."""
    place = Path(shutil.which(command) or command)
    if place.name.startswith("python"):
        return command
    beside = place.with_name("python3")
    return str(beside) if beside.exists() else sys.executable


def _swept(args: argparse.Namespace, url: str, results: Path) -> list[dict[str, Any]]:
    """A row for each rate and repeat."""
    rates = [float(rate) for rate in args.rates.split(",")]
    chance, rows = random.Random(42), []
    for repeat in range(args.repeats):
        for rate in chance.sample(rates, len(rates)):
            told = results / f"rate-{rate:g}-{repeat}.json"
            command = [
                *LLMTAP,
                "replay",
                args.workload,
                "--target",
                url,
                "--model",
                args.shape,
                "--tokenizer",
                str(results / args.shape),
                "--seed",
                str(repeat),
                "--slo",
                args.slo,
                "--rate",
                f"{rate:g}",
                "--requests",
                str(args.requests),
                "--warmup",
                "8",
                "--body-field",
                "temperature=1.0",
                "--json",
                str(told),
            ]
            command += ["--server", "vllm"] if args.engine == "vllm" else []
            code = subprocess.run(command, stdout=subprocess.DEVNULL, env=os.environ | PATHS).returncode
            if code not in (0, 1):  # 1: figures that the result itself doubts
                raise Failure(f"llmtap replay ended with {code}: {' '.join(command)}")
            row = _row(rate, repeat, json.loads(told.read_text()))
            rows.append(row)
            shown = " ".join(f"{name} {row[name]:.4g}" for name in FIGURES if row[name] is not None)
            print(f"rate {rate:g}, run {repeat + 1} of {args.repeats}: {shown}", file=sys.stderr)
    (results / "rates.json").write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def _row(rate: float, repeat: int, told: dict[str, Any]) -> dict[str, Any]:
    ttft, tbc = told["metrics"]["ttft"], told["metrics"]["tbc"]
    return {
        "rate": rate,
        "repeat": repeat,
        "n": told["n"],
        "outcomes": told["outcomes"],
        "achieved_rps": told["load"]["achieved_rps"],
        "valid": not told["verdict"]["findings"],
        "goodput": told["goodput"]["requests_per_second"],
        "smooth_goodput": told["smooth_goodput"]["tokens_per_second"],
        **{f"ttft_{p}": _ms(ttft.get(p)) for p in ("p50", "p99")},
        **{f"tbc_{p}": _ms(tbc.get(p)) for p in ("p50", "p99")},
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _show(rows: list[dict[str, Any]], results: Path) -> None:
    """The table of medians over the repeats, and the curves."""
    rates = sorted({row["rate"] for row in rows})
    of = {rate: [row for row in rows if row["rate"] == rate] for rate in rates}
    print("| rate | runs | valid | " + " | ".join(FIGURES) + " |")
    print("| --- " * (3 + len(FIGURES)) + "|")
    for rate, each in of.items():
        cells = [_spread([row[name] for row in each]) for name in FIGURES]
        print(f"| {rate:g} | {len(each)} | {sum(row['valid'] for row in each)} | {' | '.join(cells)} |")
    panels = []
    for name, title in FIGURES.items():
        known = [row for row in rows if row[name] is not None]
        places = [rate for rate in rates if any(row["rate"] == rate for row in known)]
        middle = [statistics.median(row[name] for row in known if row["rate"] == rate) for rate in places]
        each = PlotSeries(
            name="a run",
            x=[row["rate"] for row in known],
            y=[row[name] for row in known],
            ink="c0",
            symbols=["circle"],
            scattered=True,
        )
        medians = PlotSeries(name="median", x=places, y=middle, ink="c1")
        plot = Plot([medians, each], Axis("requests/s", zero=True), Axis(zero=True), "{y} at {x} requests/s")
        panels.append(Panel(title, f"{title} against the request rate.", plot))
    figure = FigureBlock("rates", "Against the request rate", panels, [])
    title = "Against the request rate: every run, and the medians"
    document = ReportDocument(title, sections=[Section(figure.key, figure.heading, [figure])])
    (results / "rates.html").write_text(page_html(document), encoding="utf-8")


def _spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{statistics.median(known):.4g} ({min(known):.4g} to {max(known):.4g})"


def _tested(args: argparse.Namespace, url: str, results: Path) -> None:
    for test in filter(None, args.tests.split(",")):
        command = [
            *LLMTAP,
            "bench",
            test,
            "--target",
            url,
            "--results",
            str(results / "bench"),
            "--set",
            f"target.tokenizer={results / args.shape}",
            "--set",
            f"target.model={args.shape}",
            "--html",
            str(results / f"{test}.html"),
            "--markdown",
            str(results / f"{test}.md"),
        ]
        command += [
            word for name, value in TESTS[test].items() for word in ("--set", f"{test}.{name}={value}")
        ]
        command += ["--quick"] if args.quick else []
        code = subprocess.run(command, env=os.environ | PATHS).returncode
        print(f"{test}: exit {code}", file=sys.stderr)
        if code not in (0, 1):
            raise Failure(f"llmtap bench {test} ended with {code}")


def _batches(args: argparse.Namespace, url: str, results: Path) -> None:
    if not args.grid:
        return
    command = [
        *LLMTAP,
        "bench",
        "grid",
        "--target",
        url,
        "--model",
        args.shape,
        "--tokenizer",
        str(results / args.shape),
        "--batch",
        args.grid,
        "--pp",
        "128",
        "--tg",
        "32,64,128",
        "--repeat",
        "3",
        "--csv",
        str(results / "grid.csv"),
    ]
    command += ["--server", "vllm"] if args.engine == "vllm" else []
    code = subprocess.run(command, env=os.environ | PATHS).returncode
    if code not in (0, 1):  # 1: some cells are not valid, which the table names
        raise Failure(f"llmtap bench grid ended with {code}")


if __name__ == "__main__":
    sys.exit(main())
