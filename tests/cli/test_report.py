import json
import sys
from pathlib import Path
from typing import Any

import pytest

from llmtap.capture.store.rows import to_batch
from llmtap.cli.main import main
from tests.support.captures import ledger, write_capture
from tests.support.data import TRACES
from tests.support.exchanges import streamed
from tests.support.stores import append, store


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str | Path
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["llmtap", "report", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    xs = [streamed(i, at_ms=10 * i, tenant="acme" if i % 2 else "globex") for i in (1, 2, 3, 5)]
    write_capture(tmp_path / "llmtap-1.parquet", xs[:2], ledger=ledger(2))
    write_capture(tmp_path / "llmtap-2.parquet", xs[2:], ledger=ledger(5))
    return tmp_path


def test_a_capture_is_summed_up(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run(capsys, monkeypatch, folder, "--by", "tenant", "--slo", "ttft:50ms")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("4 exchanges · 2 files, ")
    assert any(line.startswith("TTFT ") and " 99.0" in line for line in lines)
    assert any(line.startswith("goodput") and "0 of 4 met ttft:50ms" in line for line in lines)
    assert any(
        line.startswith("integrity  4 present · 1 missing (20.0%), 1 of them unexplained") for line in lines
    )
    assert [line.split()[:2] for line in lines[-2:]] == [["acme", "3"], ["globex", "1"]]


def test_the_same_as_json(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, monkeypatch, folder, "--json", "--by", "tenant", "--by", "model")
    told: dict[str, Any] = json.loads(out)
    assert code == 0
    assert (told["n"], told["capture"]["files"], told["capture"]["captures"]) == (4, 2, ["c1"])
    assert told["metrics"]["ttft"]["p50"] == pytest.approx(0.099)
    assert {name: part["n"] for name, part in told["by"]["tenant"].items()} == {"acme": 3, "globex": 1}
    assert set(told["by"]) == {"tenant", "model"}
    assert told["workload"]["arrivals"]["n"] == 4
    assert told["integrity"]["captures"][0]["missing"] == 1


def test_integrity_lists_the_ranges_and_fails_if_nobody_accounts_for_them(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, monkeypatch, folder, "--integrity")
    assert code == 1
    assert "    missing 1: 4" in out.splitlines()
    write_capture(folder / "llmtap-3.parquet", [], ledger=ledger(5, dropped={"overflow": 1}))
    code, out, _ = run(capsys, monkeypatch, folder, "--integrity", "--json")
    assert code == 0
    told = json.loads(out)
    assert (told["ok"], told["captures"][0]["relays"][0]["ranges"]) == (True, [[4, 4]])


def test_a_broken_file_is_an_error_that_names_it_or_is_passed_over(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "llmtap-1.parquet").write_bytes(b"no")
    code, out, err = run(capsys, monkeypatch, folder)
    assert (code, out) == (2, "")
    assert "llmtap-1.parquet: cannot be read as Parquet" in err
    code, out, _ = run(capsys, monkeypatch, folder, "--skip-broken", "--json")
    told = json.loads(out)
    assert (code, told["n"], len(told["capture"]["broken"])) == (0, 2, 1)
    code, out, _ = run(capsys, monkeypatch, folder, "--skip-broken")
    (line,) = (line for line in out.splitlines() if line.startswith("broken "))
    assert line.startswith(f"broken     {folder / 'llmtap-1.parquet'}: cannot be read as Parquet")
    code, _, _ = run(capsys, monkeypatch, folder, "--skip-broken", "--integrity")
    assert code == 1


@pytest.mark.parametrize(
    ("args", "problem"),
    [(("missing",), "does not exist"), (("",), "is an empty name"),
     ((".", " "), "is an empty name"), ((".", "--by", "colour"), "--by: 'colour' is none of tenant, model"),
     ((".", "--slo", "ttft"), "--slo"), (("trace.jsonl", "--integrity"), "has no numbers")],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence_and_exit_2(
    args: tuple[str, ...], problem: str, folder: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    Path("trace.jsonl").write_text('{"timestamp": 0}\n')
    code, out, err = run(capsys, monkeypatch, *args)
    assert (code, out) == (2, "")
    assert problem in err


def test_a_capture_that_runs_is_summed_up_with_its_spool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = store(tmp_path)
    rows, _ = to_batch([streamed(1), streamed(2)], capture="c1", level="shape")
    append(running, rows, ledger(3, unsettled=1))
    (spool,) = (tmp_path / ".spool").glob("*.spool")
    for place in (tmp_path, spool.parent, spool):
        code, out, _ = run(capsys, monkeypatch, place)
        assert code == 0
        assert out.startswith("2 exchanges · 1 file (1 still in the spool), ")
        code, out, _ = run(capsys, monkeypatch, place, "--integrity")
        assert code == 0
        assert out.startswith("2 present · 1 missing (33.3%), why is known of all · ")
    running.close(30)


def test_a_capture_of_a_later_version_is_exit_2(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_capture(folder / "llmtap-3.parquet", [streamed(6)], schema_version=99)
    code, _, err = run(capsys, monkeypatch, folder)
    assert code == 2
    assert "schema version 99" in err


def test_a_trace_of_another_tool_is_summed_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48.6805900,396,109\n"
    )
    code, out, _ = run(capsys, monkeypatch, file, "--json")
    told = json.loads(out)
    assert (code, told["n"], told["outcomes"]) == (0, 2, {"unknown": 2})
    assert told["workload"]["arrivals"]["rate_rps"] == 0.5
    assert told["workload"]["input_tokens"]["total"] == 770
    assert told["window"]["start"] == "2023-11-16T18:15:46.680590Z"
    code, out, _ = run(capsys, monkeypatch, file)
    assert "2 exchanges · from azure" in out


def test_a_slice_of_mooncakes_conversations_has_the_statistics_held_for_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = json.loads((TRACES / "mooncake" / "stats.json").read_text())
    held = next(one for one in stats if one["file"].startswith("conversation"))
    code, out, _ = run(capsys, monkeypatch, TRACES / "mooncake" / held["file"], "--json")
    told = json.loads(out)
    assert (code, told["n"]) == (0, held["rows"])
    arrivals, expected = told["workload"]["arrivals"], held["arrivals"]
    assert arrivals["seconds"] == expected["span_s"]
    assert arrivals["rate_rps"] == pytest.approx(expected["mean_rate_rps_(n-1)/span"])
    assert arrivals["gap_cv"] == pytest.approx(expected["iat_cv_pop"])
    assert arrivals["ties"] == pytest.approx(expected["zero_gap_fraction"])
    for name in ("input_tokens", "output_tokens"):
        figures = told["workload"][name]
        assert (figures["n"], figures["total"]) == (held[name]["n"], held[name]["sum"])
        for figure in ("mean", "min", "max", "p50", "p90", "p95", "p99"):
            assert figures[figure] == pytest.approx(held[name][figure]), (name, figure)
    (prefix,) = told["workload"]["prefix"]
    expected = held["prefix"]
    assert (prefix["block_size"], prefix["blocks"]) == (expected["block_size"], expected["blocks_total"])
    assert prefix["share"] == pytest.approx(expected["infinite_cache_prefix_block_hit_ratio"])
