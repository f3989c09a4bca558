"""Tests of `llmtap bench` against a real engine, by itself and behind a real gateway.

    .venv/bin/python benchmarks/bench/real.py [--only SYSTEM,...] [--tests TEST,...] [--results DIR]
    .venv/bin/python benchmarks/bench/real.py --all    all ten tests by one `bench all`

`transformers serve` with continuous batching serves the tiny random model of `make e2e`, LiteLLM stands
before it, and the tests are sent to three systems: the engine, LiteLLM, and LiteLLM with its content filter.
The environments, the model and the command lines are those of `tests/e2e/`. Loads are short ones (`--quick`):
the report of each says which demands that gives up. The raw results stay in the results folder; what is
written to `benchmarks/reports/` is each report as Markdown, what was found as JSON, and the page where that
is small enough.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
REPOSITORY: Final = HERE.parent.parent
sys.path[:0] = [str(HERE), str(REPOSITORY / "tests" / "e2e")]

import keep  # noqa: E402
import run as e2e  # noqa: E402
from parts import environments, guardrail, script  # noqa: E402
from parts.servers import Failure, port_free  # noqa: E402

REPORTS: Final = REPOSITORY / "benchmarks/reports"
PAGE_BYTES_MAX: Final = 200_000
"""A page that is larger is not kept."""
MEASURED: Final = (0, 4)
"""Exit codes of `bench` with a report; 4: a requested figure is not valid."""
TEST_S_MAX: Final = 900
KEY_VARIABLE: Final = "LLMTAP_REAL_KEY"
ONE_SIDED: Final = {"real-input": "pre_call", "real-output": "post_call"}
"""LiteLLM's filter on one side alone, by name: the configurations that 5.10 compares."""

SUT: Final = """
[sut]
boundary = "{boundary}"
model = "Qwen2 architecture, tiny, random weights, float32"
software = "{software}"
protocol = "SSE"
prefix_cache = false
notes = ["the engine is limited to 64 blocks of KV memory and 256 tokens a batch"]

[sut.hardware]
accelerator = "none"
count = 0
cpu = "{cpus} CPUs, shared with the load generator"

[sut.tokenizer]
name = "the tiny model's own, byte level"
counting = "native"

[sut.guardrails]
input_filter = {filtered}
output_filter = {filtered}

[sut.clock]
placement = "same machine"
"""


@dataclass(frozen=True, slots=True)
class System:
    """What is tested."""

    name: str
    boundary: str
    software: str
    gateway: bool = False
    guarded: bool = False

    def config(self, url: str) -> str:
        """A bench file."""
        lines = ["[target]", f'url = "{url}"', f'model = "{e2e.MODEL}"', f'tokenizer = "{e2e.MODEL}"']
        if self.gateway:
            lines.append(f'key_env = "{KEY_VARIABLE}"')
        if self.guarded:
            lines.append(f'body = {{ guardrails = ["{guardrail.FILTER}"] }}')
        filtered = str(self.guarded).lower()
        text = (
            "\n".join(lines)
            + "\n"
            + SUT.format(
                boundary=self.boundary, software=self.software, cpus=os.cpu_count(), filtered=filtered
            )
        )
        if self.gateway and not self.guarded:
            arms = {"baseline": "", **dict(zip(("input_filter", "output_filter"), ONE_SIDED, strict=True))}
            arms["full"] = guardrail.FILTER
            for arm, filter_ in arms.items():
                names = f'["{filter_}"]' if filter_ else "[]"
                text += f"\n[arms.{arm}]\nbody = {{ guardrails = {names} }}\n"
        return text


SYSTEMS: Final = (
    System("engine", "model engine", "transformers serve, continuous batching"),
    System("gateway", "application gateway", "LiteLLM before transformers serve", gateway=True),
    System(
        "guarded",
        "compound system",
        "LiteLLM with its content filter before transformers serve",
        gateway=True,
        guarded=True,
    ),
)
CLASSES: Final = json.dumps(
    [
        {"name": "short", "share": 0.8, "input": [8, 16], "output": [8, 16]},
        {"name": "long", "share": 0.2, "input": [64, 96], "output": [48, 64]},
    ]
)
TESTS: Final[dict[str, dict[str, object]]] = {
    "throughput": {"duration": "6s", "rate_min": 1, "rate_max": 256, "rate_step": 1},
    "ttft": {"requests": 100, "concurrency": 2},
    "itl": {"requests": 30, "levels": "25,75", "output_tokens": 64},
    "capacity": {
        "ttft_p99": "2s",
        "output_tokens": 32,
        "initial": 4,
        "maximum": 64,
        "resolution": 2,
        "duration": "4s",
        "per_slot": 2,
    },
    "fairness": {"classes": CLASSES, "duration": "10s", "requests_per_class": 10, "slots_max": 16},
    "guardrail-overhead": {"requests": 16, "repeats": 3, "levels": "25,75", "output_tokens": 24},
}
"""In this order: `itl` and `guardrail-overhead` take from `throughput` what 100 % are."""
SERVED: Final = {"fairness": ("engine", "gateway"), "guardrail-overhead": ("gateway",)}
"""Which systems a test is for, where it is not for all of them."""
ALL_TESTS: Final = """
[arms.cache_off]
url = "{uncached}"
[arms.cache_on]
[arms.baseline]
url = "{gateway}"
body = {{ guardrails = [] }}
[arms.full]
url = "{gateway}"
body = {{ guardrails = ["{filter}"] }}

[tests.throughput]
workload = "small.toml"
duration = "6s"
rate_max = 256.0
[tests.ttft]
workload = "small.toml"
requests = 100
concurrency = 2
[tests.tradeoff]
workload = "small.toml"
[tests.itl]
workload = "small.toml"
requests = 30
output_tokens = 64
[tests.capacity]
workload = "small.toml"
ttft_p99 = "2s"
output_tokens = 32
initial = 4
maximum = 64
resolution = 2
duration = "4s"
[tests.fairness]
classes = {classes}
duration = "10s"
requests_per_class = 10
slots_max = 16
[tests.prefix-cache]
workload = "code-completion"
prefix_tokens = [512, 768]
output_tokens = 16
[tests.memory-pressure]
workload = "small.toml"
output_tokens = 32
[tests.long-context]
lengths = [128, 256, 512, 1024, 1536]
[tests.guardrail-overhead]
workload = "small.toml"
requests = 16
output_tokens = 24
slots_max = 16
"""
"""Of `--all`: the tests of `bench all`, each as short as it can be."""
ALL_S_MAX: Final = 2400
UNSHARED: Final = """
from transformers.generation.configuration_utils import ContinuousBatchingConfig as Config
init = Config.__init__
Config.__init__ = lambda self, *args, **kwargs: init(self, *args, **{**kwargs, "allow_block_sharing": False})
from transformers.cli.transformers import main
main()
"""
"""`transformers` without its prefix cache, for which `transformers serve` has no option."""
WORKLOAD_FILE: Final = "small.toml"
WORKLOAD: Final = 'name = "real-small"\ninput = 32\noutput = 24\n'
"""Of all tests but those with their own classes: the engine's memory holds 64 blocks."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(s.name for s in SYSTEMS), help="systems, by name")
    parser.add_argument("--tests", default=",".join(TESTS), help="tests, by name")
    parser.add_argument("--results", type=Path, help="where raw results stay; default: a scratch folder")
    parser.add_argument("--all", action="store_true", help="run `bench all` against the engine instead")
    parser.add_argument("--reports", type=Path, default=REPORTS)
    parser.add_argument("--llmtap", type=Path, default=script.LLMTAP)
    args = parser.parse_args()
    for given, known in ((args.only, [s.name for s in SYSTEMS]), (args.tests, TESTS)):
        if unknown := set(given.split(",")) - set(known):
            parser.error(f"there is no {', '.join(sorted(unknown))}, but {', '.join(known)}")
    args.reports.mkdir(parents=True, exist_ok=True)
    results = (args.results or Path(tempfile.mkdtemp(prefix="llmtap-real-"))).resolve()
    results.mkdir(parents=True, exist_ok=True)
    _say(f"raw results: {results}")
    failed = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, script.give_up)  # else the servers would stay
    try:
        with script.alone(), _servers() as urls:
            if args.all:
                failed += _all_tested(urls, results / "all", args)
            for system in () if args.all else SYSTEMS:
                if system.name in args.only.split(","):
                    failed += _tested(system, urls[system.gateway], results, args)
    except Failure as failure:
        failed.append(str(failure))
    for line in failed:
        _say(f"FAILED {line}")
    return 1 if failed else 0


@contextmanager
def _servers() -> Iterator[tuple[str, str]]:
    """Engine and gateway, warm: their addresses."""
    environments.prepare("engine", "gateway")
    e2e.make_model()
    both: dict[str, Any] = dict(guardrail.GUARDRAILS[0])
    for name, mode in ONE_SIDED.items():
        one: dict[str, Any] = {**both, "guardrail_name": name}
        one["litellm_params"] = {**both["litellm_params"], "mode": mode}
        guardrail.GUARDRAILS.append(one)
    engine, gateway = port_free(), port_free()
    with (
        e2e.running("engine", e2e.engine_argv(engine), []) as first,
        e2e.running("gateway", e2e.gateway_argv(gateway, engine, engine), []) as second,
    ):
        first.wait_ready(f"http://127.0.0.1:{engine}/health", limit_s=e2e.READY_S_MAX)
        second.wait_ready(f"http://127.0.0.1:{gateway}/health/readiness", limit_s=e2e.READY_S_MAX)
        e2e.warm_up(engine)
        e2e.warm_up(gateway)
        yield f"http://127.0.0.1:{engine}", f"http://127.0.0.1:{gateway}"


def _tested(system: System, url: str, results: Path, args: argparse.Namespace) -> list[str]:
    """Runs its tests; tells those that failed."""
    failed = []
    folder = results / system.name
    _prepare(folder, system.config(url))
    for test, params in TESTS.items():
        if test not in args.tests.split(",") or system.name not in SERVED.get(test, (system.name,)):
            continue
        # All names are those of files in the folder: a report tells no path of this machine.
        command = [
            str(args.llmtap),
            "bench",
            test,
            "--config",
            "bench.toml",
            "--quick",
            "--warmup",
            "8",
            "--results",
            "results",
            "--markdown",
            f"{test}.md",
            "--html",
            f"{test}.html",
        ]
        if test != "fairness":
            params = {"workload": WORKLOAD_FILE, **params}
        for name, value in params.items():
            command += ["--set", f"{name}={value}"]
        began = time.monotonic()
        code, said = _run(command, folder, folder / f"{test}.log")
        _say(f"{system.name} {test}: exit {code}, {time.monotonic() - began:.0f} s")
        if code not in MEASURED:
            failed.append(f"{system.name} {test}: exit {code}: {said}")
            continue
        _keep(test, folder, args.reports / f"real-{system.name}-{test}")
    return failed


def _all_tested(urls: tuple[str, str], folder: Path, args: argparse.Namespace) -> list[str]:
    """Runs `bench all` against the engine, with a second engine that has no prefix cache, and the gateway."""
    engine, gateway = urls
    uncached = port_free()
    _, *serve = e2e.engine_argv(uncached)
    argv = [str(script.ROOT / "engine/bin/python"), "-c", UNSHARED, *serve]
    with e2e.running("engine-uncached", argv, []) as second:
        second.wait_ready(f"http://127.0.0.1:{uncached}/health", limit_s=e2e.READY_S_MAX)
        e2e.warm_up(uncached)
        config = SYSTEMS[0].config(engine).replace("prefix_cache = false", "prefix_cache = true")
        _prepare(folder, config.replace("[target]", f'[target]\nkey_env = "{KEY_VARIABLE}"'))
        with (folder / "bench.toml").open("a") as file:
            arms = {"uncached": f"http://127.0.0.1:{uncached}", "gateway": gateway}
            classes = (
                "["
                + ", ".join(
                    f'{{ name = "{one["name"]}", share = {one["share"]},'
                    f" input = {one['input']}, output = {one['output']} }}"
                    for one in json.loads(CLASSES)
                )
                + "]"
            )
            file.write(ALL_TESTS.format(**arms, filter=guardrail.FILTER, classes=classes))
        command = [
            str(args.llmtap),
            "bench",
            "all",
            "--config",
            "bench.toml",
            "--quick",
            "--warmup",
            "8",
            "--results",
            "results",
            "--html",
            "all.html",
        ]
        began = time.monotonic()
        code, said = _run(command, folder, folder / "all.log", limit_s=ALL_S_MAX)
    _say(f"all tests: exit {code}, {time.monotonic() - began:.0f} s")
    if code not in MEASURED:
        return [f"all tests: exit {code}: {said}"]
    keep.keep(folder / "results", args.reports / "real-all")
    return []


def _prepare(folder: Path, config: str) -> None:
    """Writes the bench file and the workload, and links the tokenizer."""
    folder.mkdir(exist_ok=True)
    (folder / "bench.toml").write_text(config)
    (folder / WORKLOAD_FILE).write_text(WORKLOAD)
    tokenizer = folder / e2e.MODEL
    if not tokenizer.exists():
        tokenizer.symlink_to(script.ROOT / e2e.MODEL)


def _keep(test: str, folder: Path, stem: Path) -> None:
    """The report, what the test found, and the page if it is small."""
    stem.with_suffix(".md").write_bytes((folder / f"{test}.md").read_bytes())
    found = json.loads((folder / "results" / test / "result.json").read_text())
    stem.with_suffix(".json").write_text(json.dumps(found["measurements"], indent=1) + "\n")
    page = folder / f"{test}.html"
    if page.stat().st_size <= PAGE_BYTES_MAX:
        stem.with_suffix(".html").write_bytes(page.read_bytes())


def _run(command: list[str], folder: Path, log: Path, *, limit_s: int = TEST_S_MAX) -> tuple[int, str]:
    """The exit code, and the last lines that it said."""
    with log.open("wb") as out:
        environ = {**os.environ, KEY_VARIABLE: e2e.KEY}
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ, cwd=folder)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait(30)
        finally:
            if process.poll() is None:
                process.terminate()
    return code, " / ".join(log.read_text(errors="replace").splitlines()[-3:])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
