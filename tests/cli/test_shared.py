"""Options that commands share."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from llmtap.cli.shared import SeveralValues
from tests.cli.traces import Call
from tests.support.storage.captures import write_capture
from tests.support.traffic.exchanges import streamed

app = typer.Typer()


@app.command(cls=SeveralValues)
def command(
    place: str = "", pp: str = typer.Option(""), goodput: str = typer.Option(""), n: int = typer.Option(0)
) -> None:
    print(f"{place} {pp} {goodput} {n}")


@pytest.mark.parametrize(
    "args",
    [
        "--pp 512,4096 --goodput ttft:200,tpot:50 --n 3",
        "--pp 512 4096 --goodput ttft:200 tpot:50 --n 3",
        "--pp=512 4096 --n 3 --goodput=ttft:200 tpot:50",
    ],
)
def test_several_values_are_given_with_blanks_or_commas(args: str) -> None:
    result = CliRunner().invoke(app, args.split())
    assert result.output.split() == ["512,4096", "ttft:200,tpot:50", "3"], result.output


def test_the_goodput_of_vllm_is_in_milliseconds_and_percentiles_can_be_chosen(
    tmp_path: Path, call: Call
) -> None:
    """`streamed` has a TTFT of 99 ms and a TPOT of its gap: 20, 40, and 60 ms (seed 002, "Goodput")."""
    place = write_capture(tmp_path / "c", [streamed(i, gap_ms=gap) for i, gap in enumerate((20, 40, 60), 1)])
    args = ("report", place, "--goodput", "ttft:200", "tpot:50", "--percentiles", "25", "75", "99.5")
    code, out, err = call(*args, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["goodput"]["objectives"] == "ttft:200ms tpot:50ms"
    assert (told["goodput"]["met"], told["goodput"]["counted"]) == (2, 3)
    tpot = told["metrics"]["tpot"]
    assert [round(tpot[name], 3) for name in ("p25", "p50", "p75", "p995")] == [0.03, 0.04, 0.05, 0.06]
    _, out, _ = call(*args)
    (heads,) = (line.split() for line in out.splitlines() if line.startswith("ms "))
    assert heads == ["ms", "n", "mean", "p25", "p50", "p75", "p90", "p99", "p99.5", "max"]


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("--goodput", "ttft:200ms"), "--goodput: 'ttft:200ms' is no objective"),
        (("--goodput", "itl:20"), "--goodput: 'itl:20' is no objective"),
        (("--goodput", "ttft:1", "--slo", "ttft:1s"), "--goodput: --slo gives objectives, too"),
        (("--percentiles", "100"), "--percentiles: '100' is no percentile"),
        (("--percentiles", "fifty"), "--percentiles: 'fifty' is no percentile"),
    ],
)
def test_what_is_wrong_with_them_is_named(
    args: tuple[str, ...], problem: str, tmp_path: Path, call: Call
) -> None:
    place = write_capture(tmp_path / "c", [streamed(1)])
    code, _, err = call("report", place, *args)
    assert (code, problem in err) == (2, True), err
