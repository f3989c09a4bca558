"""Do the ten tests of `llmtap bench` find what was planted?

    .venv/bin/python benchmarks/bench/planted.py [--only TEST,...] [--seconds 8] [--json FILE]

For each test `llmtap sim serve` is started with a truth that is known: a schedule with given percentiles,
an engine with so many seats, filters of a known length. The test is run as a user runs it, by its command,
and what it reports is set beside the truth, with the interval that it states. Truths of engines with a queue
are those of the same engine in virtual time (`planted_cases.py`). README.md has figures.

A row holds when the truth lies in the interval. A time has come over a socket and through two processes,
which can only add to it: where the interval has a value that the way explains with 5 ms at most, the row says
`less the way`.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from planted_cases import Case, Log, Row, cases

HERE: Final = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "e2e"))

from parts.servers import Failure, Server, port_free  # noqa: E402 - tests/e2e is a folder of scripts

LLMTAP: Final = HERE.parent.parent / ".venv/bin/llmtap"
TEST_S_MAX: Final = 900
TRUTH: Final = "truth.jsonl"
UNREADABLE: Final = (Failure, subprocess.TimeoutExpired, LookupError, TypeError, ValueError, AssertionError)
"""What a case that went wrong may raise, where it is run and where its result is read."""
DOUBTED: Final = "the test says itself that some of its figures are not to be relied on"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="tests, or cases, by name: itl, itl-bimodal")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a load; the others go with it")
    parser.add_argument("--results", type=Path, help="where raw results stay; default: a scratch folder")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--llmtap", type=Path, default=LLMTAP)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the servers would stay
    wanted = set(filter(None, args.only.split(",")))
    everything = cases(args.seconds)
    if unknown := wanted - {name for case in everything for name in (case.name, case.test)}:
        parser.error(f"no test or case is called {', '.join(unknown)}")
    results = args.results or Path(tempfile.mkdtemp(prefix="llmtap-planted-"))
    results.mkdir(parents=True, exist_ok=True)
    chosen = [case for case in everything if not wanted or {case.name, case.test} & wanted]
    if there := [case.name for case in chosen if (results / case.name).exists()]:
        parser.error(f"{results} has results of {', '.join(there)}, without the truth of a new run")
    found: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for case in chosen:
        began = time.monotonic()
        try:
            of, wrong = _run(case, results, args.llmtap)
        except UNREADABLE as exc:
            of, wrong = [], f"{type(exc).__name__}: {exc}"  # the others are still to be run
        seconds = time.monotonic() - began
        _say(f"{case.name}: {seconds:.0f} s" + (f", {wrong}" if wrong else ""))
        # One line for each figure; where there is none, what went wrong.
        name = case.name + " *" * (wrong == DOUBTED)
        rows += [[name, *row.cells()] for row in of] or [[name, case.planted, "", "", "", "", "NO"]]
        found.append(
            {
                "case": case.name,
                "planted": case.planted,
                "seconds": round(seconds, 1),
                "wrong": wrong,
                "rows": [
                    {
                        "what": r.what,
                        "planted": r.planted,
                        "sent": r.sent,
                        "found": r.found,
                        "low": r.low,
                        "high": r.high,
                        "unit": "s" if r.unit == "ms" else r.unit,
                        "holds": r.holds,
                    }
                    for r in of
                ],
            }
        )
        if args.json:
            args.json.write_text(json.dumps({"machine": _machine(), "cases": found}, indent=2) + "\n")
    _print([["test", "figure", "planted", "as sent", "found", "interval", "within"], *rows])
    if any(row[0].endswith("*") for row in rows):
        print(f"\n* {DOUBTED}")
    print(f"\n{_machine()}; raw results: {results}")
    return 1 if any(row[-1] == "NO" for row in rows) else 0


def _run(case: Case, results: Path, llmtap: Path) -> tuple[list[Row], str | None]:
    """What it found, and what is to be said of that."""
    folder = results / case.name
    folder.mkdir()
    with _serving(case, folder, llmtap) as urls:
        config = folder / "bench.toml"
        arms = "".join(f"\n[arms.{name}]\n{line.format(**urls)}\n" for name, line in case.arms.items())
        config.write_text(f'[target]\nurl = "{next(iter(urls.values()))}"\n{arms}')
        command = [
            str(llmtap),
            "bench",
            case.test,
            "--config",
            str(config),
            "--quick",
            "--warmup",
            "8",
            "--results",
            str(folder / "results"),
        ]
        params = dict(case.params)
        if case.workload is not None:
            workload = folder / "workload.toml"
            workload.write_text(case.workload)
            params["workload"] = workload
        for name, value in params.items():
            command += ["--set", f"{name}={value}"]
        log = folder / "bench.log"
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
            try:
                code = process.wait(TEST_S_MAX)
            except subprocess.TimeoutExpired:
                process.terminate()
                code = process.wait(30)
            finally:
                if process.poll() is None:
                    process.terminate()
    said = " / ".join(log.read_text(errors="replace").splitlines()[-2:])
    kept = folder / "results" / case.test / "result.json"
    if code not in (0, 1) or not kept.exists():
        return [], f"exit {code}: {said}"
    return case.read(
        json.loads(kept.read_text())["measurements"], _log(folder / TRUTH)
    ), DOUBTED if code else None


@contextmanager
def _serving(case: Case, folder: Path, llmtap: Path) -> Iterator[dict[str, str]]:
    """The addresses of its servers, by name."""
    with ExitStack() as stack:
        urls: dict[str, str] = {}
        for name, options in case.servers.items():
            port = port_free()
            argv = [str(llmtap), "sim", "serve", "--listen", f"127.0.0.1:{port}", *options]
            if not urls:
                argv += ["--truth", TRUTH]
            server = Server(f"sim-{name}", argv, logs=folder, env={}, cwd=folder)
            stack.callback(server.stop)
            urls[name] = f"http://127.0.0.1:{port}"
            server.wait_ready(f"{urls[name]}/health", limit_s=60)
        yield urls


def _log(file: Path) -> Log:
    """What the target wrote down; the first line says only how its clock stands."""
    lines = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    return sorted(lines, key=lambda line: int(line["accepted_ns"]))


def _machine() -> str:
    load = os.getloadavg()[0]
    return (
        f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}, Python"
        f" {platform.python_version()}, load average {load:.1f}"
    )


def _print(lines: Sequence[Sequence[str]]) -> None:
    """Columns, for people and for Markdown."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for n, line in enumerate(lines):
        print("| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |")
        if not n:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
