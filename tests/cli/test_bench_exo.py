"""`llmtap bench exo`, as one types it: a table and the JSON, or a sentence that names the option."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llmtap.cli import bench_exo
from llmtap.cli.main import app
from llmtap.errors import ConfigError
from llmtap.sim.server.options import SimOptions
from llmtap.units import Duration
from tests.support.sim_engine import QUICK, engine

EXO = [sys.executable, "-P", "-m", "llmtap.cli", "bench", "exo"]
TIMEOUT_S = 250
NOBODY = "http://127.0.0.1:9"
assert bench_exo.exo is not None, "imported, it is one of the commands"


async def measured(*args: str, options: SimOptions = QUICK) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr of a benchmark of a server of our own."""
    async with engine(options) as server:
        process = await asyncio.create_subprocess_exec(
            *EXO, *args, "--target", server.url, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    return process.returncode, out.decode(), err.decode()


def test_a_row_for_each_point_of_the_grid_and_a_run_for_each_request(tmp_path: Path) -> None:
    place = tmp_path / "exo.json"
    args = ("--pp", "16,32", "--tg", "8", "--concurrency", "1,2", "--repeat", "2", "--warmup", "1")
    quick = SimOptions(ttft=Duration(20_000_000), itl=Duration(2_000_000))
    code, out, err = asyncio.run(measured(*args, "--json", str(place), options=quick))
    assert code == 0, err
    heads, *lines = out.splitlines()
    assert heads.split()[:5] == ["pp", "tg", "x", "n", "prefill"]
    assert [line.split()[:4] for line in lines[:4]] == [
        [pp, "8", n, "2"] for pp in ("16", "32") for n in ("1", "2")
    ]
    assert "client" in lines[0]
    result = json.loads(place.read_text())
    assert list(result) == ["runs", "cluster", "system_metrics"]
    assert len(result["runs"]) == 2 * (1 + 2) * 2
    run = result["runs"][0]
    named = {
        "elapsed_s", "output_text_preview", "stats", "model_id", "placement_sharding",
        "placement_instance_meta", "placement_nodes", "pp_tokens", "tg", "repeat_index", "concurrency",
        "concurrent_index", "prefix_cache_hit",
    }  # fmt: skip
    assert named <= run.keys(), "as seed 003 names them"
    assert run["stats"].keys() == {
        "prompt_tps", "generation_tps", "prompt_tokens", "generation_tokens", "peak_memory_usage",
    }  # fmt: skip
    assert result["system_metrics"]["local"]["system"]["t"]
    assert "warm-up" in err and "left: 8 of 8 batches" in err


def test_json_alone_on_stdout() -> None:
    code, out, err = asyncio.run(measured("--pp", "16", "--tg", "4", "--json", "-"))
    assert code == 0, err
    assert json.loads(out)["runs"][0]["tg"] == 4


def test_requests_that_fail_are_told_by_the_exit_code() -> None:
    args = ("--pp", "16", "--tg", "4", "--header", "x-sim-fault: 503")
    code, out, err = asyncio.run(measured(*args))
    assert code == 1, err
    assert out.splitlines()[0].split()[-1] == "failed"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--pp", "512", "--tg", "128"), "--target: is missing"),
        (("--tg", "128", "--target", NOBODY), "--pp: is missing"),
        (("--pp", "512", "--tg", "1", "--target", NOBODY), "--tg: 1 has no rate"),
        (("--pp", "512,x", "--tg", "8", "--target", NOBODY), "--pp: 'x' is no number"),
        (("--pp", "9", "--tg", "8", "--server", "ollama", "--target", NOBODY), "--server: 'ollama' is none"),
        (("--pp", "9", "--tg", "8", "--timeout", "soon", "--target", NOBODY), "--timeout: "),
        (("--pp", "9", "--tg", "8", "--timeout", "0s", "--target", NOBODY), "--timeout: "),
        (("--pp", "9", "--tg", "8", "--ca", "no/such.pem", "--target", NOBODY), "--ca: no/such.pem cannot"),
        (("--pp", "9", "--tg", "8", "--metrics", "here", "--target", NOBODY), "--metrics: 'here' is no"),
        (("--pp", "9", "--tg", "8", "--json", "no/such.json", "--target", NOBODY), "--json: there is no"),
        (("--pp", "9", "--tg", "8", "--target", NOBODY), "--target: http://127.0.0.1:9 cannot be reached"),
        (("--pp", "9", "--tg", "8", "--target", "grpc://127.0.0.1:9"), "--target: the exo benchmark"),
    ],
)
def test_a_wrong_option_is_named(args: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(app, ["bench", "exo", *args])
    assert isinstance(done.exception, ConfigError)  # which ends the program with 2
    assert str(done.exception).startswith(said)


def test_a_wrong_option_ends_it_with_2() -> None:
    done = subprocess.run(
        [*EXO, "--pp", "512", "--tg", "1"], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert (done.returncode, done.stderr.partition("\n")[0]) == (2, "llmtap: --target: is missing")
