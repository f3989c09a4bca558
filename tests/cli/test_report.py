"""`llmtap report` of captures, traces and benchmarks, and comparisons, as one types it."""

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

import llmtap.cli.report  # noqa: F401  it adds the command
from llmtap.capture.store.rows import to_batch
from llmtap.cli.main import app
from llmtap.errors import ConfigError, ExitCode
from llmtap.metrics import hdr
from llmtap.metrics.histogram import Histogram
from tests.cli.traces import Call
from tests.report.test_experiment_page import measured
from tests.support.data import TRACES
from tests.support.results.bench_results import results_folder
from tests.support.results.replay_results import replay_result
from tests.support.storage.captures import ledger, write_capture
from tests.support.storage.stores import append, store
from tests.support.traffic.exchanges import streamed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    xs = [streamed(i, at_ms=10 * i, tenant="acme" if i % 2 else "globex") for i in (1, 2, 3, 5)]
    write_capture(tmp_path / "llmtap-1.parquet", xs[:2], ledger=ledger(2))
    write_capture(tmp_path / "llmtap-2.parquet", xs[2:], ledger=ledger(5))
    return tmp_path


def test_the_format_of_a_trace_can_be_given_and_notes_are_shown(tmp_path: Path, call: Call) -> None:
    trace = tmp_path / "a.jsonl"
    rows = [{"timestamp": 1.5 * i, "input_length": 3, "output_length": 4} for i in range(3)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = call("report", trace)
    assert (code, "--from guidellm" in err) == (2, True)
    code, out, _ = call("report", trace, "--from", "guidellm", "--json")
    assert (code, json.loads(out)["window"]["seconds"]) == (0, 3.0)
    code, out, _ = call("report", trace, "--from", "guidellm")
    assert (code, out.count("note: 3 rows have no hash_ids")) == (0, 1)
    for more in (("--from", "nothing"), ("--from", "guidellm", "--compare", trace)):
        code, _, err = call("report", trace, *more)
        assert (code, "--from" in err) == (2, True)


def test_integrity_lists_the_ranges_and_fails_if_nobody_accounts_for_them(folder: Path, call: Call) -> None:
    code, out, _ = call("report", folder, "--integrity")
    assert code == 1
    assert "    missing 1: 4" in out.splitlines()
    write_capture(folder / "llmtap-3.parquet", [], ledger=ledger(5, dropped={"overflow": 1}))
    code, out, _ = call("report", folder, "--integrity", f"--json={folder / 'told'}")
    assert (code, out) == (0, "")
    report = json.loads((folder / "told").read_text())
    assert (report["ok"], report["captures"][0]["relays"][0]["ranges"]) == (True, [[4, 4]])


def test_a_broken_file_is_an_error_that_names_it_or_is_passed_over(folder: Path, call: Call) -> None:
    (folder / "llmtap-1.parquet").write_bytes(b"no")
    code, out, err = call("report", folder)
    assert (code, out) == (2, "")
    assert "llmtap-1.parquet: cannot be read as Parquet" in err
    code, out, _ = call("report", folder, "--skip-broken", "--json")
    report = json.loads(out)
    assert (code, report["n"], len(report["capture"]["broken"])) == (0, 2, 1)
    code, out, _ = call("report", folder, "--skip-broken")
    (line,) = (line for line in out.splitlines() if line.startswith("broken "))
    assert line.startswith(f"broken     {folder / 'llmtap-1.parquet'}: cannot be read as Parquet")
    code, _, _ = call("report", folder, "--skip-broken", "--integrity")
    assert code == 1


def test_a_capture_that_runs_is_summed_up_with_its_spool(tmp_path: Path, call: Call) -> None:
    running = store(tmp_path)
    rows, _ = to_batch([streamed(1), streamed(2)], capture="c1", level="shape")
    append(running, rows, ledger(3, unsettled=1))
    (spool,) = (tmp_path / ".spool").glob("*.spool")
    for place in (tmp_path, spool.parent, spool):
        code, out, _ = call("report", place)
        assert code == 0
        assert out.startswith("2 exchanges · 1 file (1 still in the spool), ")
        code, out, _ = call("report", place, "--integrity")
        assert code == 0
        assert out.startswith("2 present · 1 running · none missing · not closed: c1")
    running.close(30)


def test_a_slice_of_mooncakes_conversations_has_the_statistics_held_for_it(call: Call) -> None:
    stats = json.loads((TRACES / "mooncake" / "stats.json").read_text())
    held = next(one for one in stats if one["file"].startswith("conversation"))
    code, out, _ = call("report", TRACES / "mooncake" / held["file"], "--json")
    report = json.loads(out)
    assert (code, report["n"]) == (0, held["rows"])
    arrivals, expected = report["workload"]["arrivals"], held["arrivals"]
    assert arrivals["seconds"] == expected["span_s"]
    assert arrivals["rate_rps"] == pytest.approx(expected["mean_rate_rps_(n-1)/span"])
    assert arrivals["gap_cv"] == pytest.approx(expected["iat_cv_pop"])
    assert arrivals["ties"] == pytest.approx(expected["zero_gap_fraction"])
    for name in ("input_tokens", "output_tokens"):
        figures = report["workload"][name]
        assert (figures["n"], figures["total"]) == (held[name]["n"], held[name]["sum"])
        for figure in ("mean", "min", "max", "p50", "p90", "p95", "p99"):
            assert figures[figure] == pytest.approx(held[name][figure]), (name, figure)
    (prefix,) = report["workload"]["prefix"]
    expected = held["prefix"]
    assert (prefix["block_size"], prefix["blocks"]) == (expected["block_size"], expected["blocks_total"])
    assert prefix["share"] == pytest.approx(expected["infinite_cache_prefix_block_hit_ratio"])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `a`, `b` (slower by 10 %) and `c` (one run)."""
    place = tmp_path_factory.mktemp("results")
    results_folder(place / "a")
    results_folder(place / "b", slower=1.1, place_in_turn=1)
    results_folder(place / "c", runs=1)
    return place


def test_other_loads_are_named_at_the_top_and_are_not_valid(results: Path, tmp_path: Path) -> None:
    other = results_folder(tmp_path / "d", changes={"params.rate": 8.0}, place_in_turn=1)
    args = ["report", str(results / "a"), "--compare", str(other)]
    page, text = tmp_path / "d.html", tmp_path / "d.md"
    done = CliRunner().invoke(app, [*args, "--html", str(page), "--markdown", str(text)])
    assert done.exit_code == ExitCode.NOT_VALID
    assert not isinstance(done.exception, ConfigError)
    assert done.output.splitlines()[1] == "loads differ, and figures of them are not tested"
    for written in (page, text):
        assert "loads differ" in written.read_text()
    assert CliRunner().invoke(app, [*args, "--json"]).exit_code == ExitCode.NOT_VALID
    assert CliRunner().invoke(app, [*args, "--html", "-"]).exit_code == ExitCode.NOT_VALID


def test_results_of_replays_are_compared_and_other_loads_are_not_valid(tmp_path: Path, call: Call) -> None:
    for name, n, target in (("a", 400, "http://a"), ("b", 400, "http://b"), ("c", 200, "http://a")):
        result = replay_result(n)
        result["plan"]["target"] = target
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    a, b, c = (tmp_path / f"{name}.json" for name in "abc")
    page = tmp_path / "page.html"
    code, out, _ = call("report", a, "--compare", b, "--html", page)
    assert (code, out.splitlines()[-1].split()) == (0, ["target", "http://a", "http://b"])
    assert "b against a" in page.read_text()
    code, out, _ = call("report", a, "--compare", c, "--compare", b, "--json")
    assert (code, [one["b"] for one in json.loads(out)["comparisons"]]) == (
        ExitCode.NOT_VALID,
        ["c", "b"],
    )
    for other in (a, tmp_path / "none.json"):
        assert call("report", a, "--compare", other)[0] == 2
    doubtful = replay_result(400)
    doubtful["verdict"]["valid"] = False
    b.write_text(json.dumps(doubtful))
    assert call("report", a, "--compare", b)[0] == ExitCode.NOT_VALID


@pytest.mark.parametrize(
    ("field", "value", "path"),
    [
        ("sender", {"llmtap": 1}, "$.sender.llmtap"),
        ("n", "20", "$.n"),
        ("load", {}, "$.load"),
        ("metrics", {"ttft": {"n": 1, "p50": "fast"}}, "$.metrics[...].p50"),
    ],
)
def test_a_result_that_was_edited_is_named_with_its_field(
    field: str, value: object, path: str, tmp_path: Path, call: Call
) -> None:
    good, wrong = tmp_path / "good.json", tmp_path / "wrong.json"
    good.write_text(json.dumps(replay_result(20)))
    wrong.write_text(json.dumps(replay_result(20) | {field: value}))
    for places in ((good, "--compare", wrong), (wrong, "--compare", good)):
        code, _, err = call("report", *places)
        assert (code, f"{wrong}: " in err, str(good) in err, f"`{path}`" in err) == (2, True, False, True)


def test_arms_of_a_capture_are_compared_on_a_page(tmp_path: Path, folder: Path, call: Call) -> None:
    page = tmp_path / "page.html"
    code, _, err = call("report", folder, "--by", "arm", "--html", page)
    assert (code, err.startswith("llmtap: --html: the capture does not have two arms")) == (
        ExitCode.USAGE,
        True,
    )
    assert not page.exists()
    exchanges = [
        streamed(
            i,
            at_ms=10 * i,
            gap_ms=20 if i % 2 else 40,
            arm=("guarded", "plain")[i % 2],
            route=(("headers x", None)[i % 2]),
            unit=f"{i:016x}",
        )
        for i in range(1, 121)
    ]
    write_capture(folder / "arms" / "llmtap-1.parquet", exchanges, ledger=ledger(120))
    folder = folder / "arms"
    code, out, _ = call("report", folder, "--by", "arm", "--html", page)
    assert (code, "guarded compared with plain" in page.read_text()) == (0, True)
    assert "guarded does not change the median time to first token" in " ".join(out.split())
    code, out, _ = call("report", folder, "--by", "arm", "--json")
    assert json.loads(out)["experiment"]["differences"]["guarded"]["tpot"]["p50"][
        "difference"
    ] == pytest.approx(0.02, rel=0.01)
    code, _, err = call("report", folder, "--html", page)
    assert (code, "--by arm" in err) == (ExitCode.USAGE, True)


def test_a_stored_experiment_is_reported_and_an_edited_one_is_refused(tmp_path: Path, call: Call) -> None:
    result = measured(units=60, added_ms=200)
    file, page = tmp_path / "experiment.json", tmp_path / "page.html"
    file.write_bytes(msgspec.json.encode(result))
    code, out, _ = call("report", file)
    assert (code, "marked adds 200 ms" in out) == (0, True)
    call("report", file, "--html", page)
    assert "marked adds 200 ms" in page.read_text()
    for option in (("--by", "arm"), ("--csv", str(tmp_path / "x.csv"))):
        code, _, err = call("report", file, *option)
        assert code == ExitCode.USAGE
        assert f"{option[0]}: applies to captures only, not to the result of an experiment" in err
    del result["compared"]
    file.write_bytes(msgspec.json.encode(result))
    assert "the field 'compared' is missing" in call("report", file)[2]


def hdr_log(path: Path, tag: str, *values: int) -> Path:
    path.write_text(hdr.log_text({tag: hdr.encode(Histogram(values))}, 1.0))
    return path


def test_hdr_logs_are_merged_and_compared(tmp_path: Path, call: Call) -> None:
    a = hdr_log(tmp_path / "a.hlog", "ttft", *range(1_000, 2_000))
    b = hdr_log(tmp_path / "b.hlog", "ttft", *range(3_000, 5_000))
    code, out, _ = call("report", a, b, "--hlog-unit", "us", "--json")
    figures = json.loads(out)["histograms"]["ttft"]
    assert (code, figures["n"], figures["min"]) == (0, 3_000, pytest.approx(0.001, rel=0.002))
    assert figures["p50"] == pytest.approx(0.0035, rel=0.003)
    assert hdr.read_log([f"0,1,2,{figures['hdr']}"], 1)[""].n == 3_000
    code, out, _ = call("report", a, b, "--hlog-unit", "us")
    assert (code, "3,000" in out) == (0, True)
    code, out, _ = call("report", a, "--compare", b, "--json")
    rows = json.loads(out)["comparisons"][0]["figures"]
    assert [(row["tag"], row["figure"], row["n_a"], row["n_b"]) for row in rows] == [
        ("ttft", "p50", 1_000, 2_000),
        ("ttft", "p99", 1_000, 2_000),
    ]
    median = rows[0]
    assert median["difference"] == pytest.approx(2.5e-6, rel=0.003)
    assert 2.3e-6 < median["low"] < median["difference"] < median["high"] < 2.7e-6
    code, out, _ = call("report", a, "--compare", b)
    assert (code, "ttft p50" in out) == (0, True)
    # The gaps of a request depend on each other, so they have no interval.
    gaps = [hdr_log(tmp_path / f"{name}.hlog", "tbc", *range(1_000, 2_000)) for name in ("c", "d")]
    code, out, _ = call("report", gaps[0], "--compare", gaps[1], "--json")
    rows = json.loads(out)["comparisons"][0]["figures"]
    assert [(row["difference"], row["low"], row["high"]) for row in rows] == [(0, None, None)] * 2


def test_a_result_of_a_replay_becomes_an_hdr_log(tmp_path: Path, call: Call) -> None:
    result = replay_result()
    place, log = tmp_path / "replayed.json", tmp_path / "replayed.hlog"
    place.write_text(json.dumps(result))
    code, _, err = call("report", place, "--hlog", log, "--json")
    assert (code, err) == (0, "")
    code, out, _ = call("report", log, "--json")
    figures = json.loads(out)["histograms"]
    assert figures.keys() == result["hdr_histograms"].keys()
    for name, one in figures.items():
        assert one["n"] == result["metrics"][name]["n"] if name in result["metrics"] else one["n"] > 0
        if name in result["metrics"]:
            assert one["mean"] == pytest.approx(result["metrics"][name]["mean"], rel=0.01, abs=1e-6)


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (("a.hlog", "other.json"), "other.json"),
        (("a.hlog", "--compare", "other.json"), "other.json"),
        (("a.hlog", "--by", "tenant"), "--by"),
        (("a.hlog", "--csv", "x.csv"), "--csv"),
        (("a.hlog", "--fail-if-worse", "p99:5%"), "--fail-if-worse"),
        (("bad.hlog",), "bad.hlog: line 1"),
        (("missing.hlog",), "missing.hlog"),
        (("a.hlog", "a.hlog", "--compare", "a.hlog"), "--compare"),
        (("other.json", "--hlog-unit", "ms"), "--hlog-unit"),
        (("other.json", "--hlog", "y.hlog"), "--hlog"),
    ],
)
def test_options_that_do_not_apply_to_hdr_logs_are_refused(
    words: tuple[str, ...], place: str, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hdr_log(tmp_path / "a.hlog", "ttft", 5)
    (tmp_path / "bad.hlog").write_text("0.0,1.0,2.0,HISTFAAA\n")
    (tmp_path / "other.json").write_text("{}")
    code, _, err = call("report", *words)
    assert (code, place in err) == (2, True), err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--compare", "b.json", "--fail-if-worse", "ttft_p50:-5"), "got 'ttft_p50:-5'"),
        (("--compare", "b.json", "--fail-if-worse", "-5%"), "got '-5%'"),
        (("--compare", "captured"), "for a capture, use --by arm"),
    ],
)
def test_what_cannot_be_compared_is_named(
    words: tuple[str, ...], expected: str, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "captured").mkdir()
    code, _, err = call("report", "captured", *words)
    assert (code, expected in err) == (2, True), err
