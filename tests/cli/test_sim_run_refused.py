"""What cannot be is said before anything is run, with the option's name and exit status 2."""

from pathlib import Path

import pytest

from tests.cli.traces import HEADER, Call, small_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return small_trace(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ((), "TRACE: is missing"),
        (("none.csv",), "none.csv: cannot be read: No such file"),
        (("TRACE", "--scheduler", "statik_fifo"), "--scheduler: no scheduler is called 'statik_fifo'; did"),
        (("TRACE", "--scheduler", ","), "--scheduler: names none"),
        (("TRACE", "--from", "burstgtp"), "no format to read is called 'burstgtp'; did you mean burstgpt?"),
        (("TRACE", "--scale", 0), "--scale: expected more than 0, got 0"),
        (("TRACE", "--rate", "nan"), "--rate: expected more than 0, got nan"),
        (("TRACE", "--rate", 1, "--scale", 1), "--rate: is a scale, and --scale is given"),
        (("TRACE", "--requests", -5), "--requests: expected more than 0, got -5"),
        (("TRACE", "--bins", 0), "--bins: expected a whole number from 1 to 1,024, got '0'"),
        (("TRACE", "--bins", "5,3"), "--bins: expected rising whole numbers"),
        (("TRACE", "--eps", "soon"), "--eps: expected a duration"),
        (("TRACE", "--predictor", "oracle"),
         "--predictor: expected one of perfect, prompt, noisy, shuffled, got"),
        (("TRACE", "--reading", "window"), "--reading: expected NAME=VALUE, got 'window'"),
        (("TRACE", "--reading", "windo=x"), "--reading: no reading is called 'windo'; did you mean window?"),
        (("TRACE", "--capacity", 1), "--capacity: expected a share from 0 to below 1, got 1"),
        (("TRACE", "--latency", "none.csv"), "--latency: cannot read none.csv: No such file"),
        (("TRACE", "--latency", "TRACE"), "line 1: no column is called batch_size"),
        (("TRACE", "--requests", "9" * 20), "--requests: expected at most 1,000,000,000"),
        (("TRACE", "--fit-chunk", "512"), "--fit-chunk: is of a capture that --latency names"),
        (("TRACE", "--latency", "g.csv", "--fit-chunk", "9"), "--fit-chunk: is of a capture, and g.csv is"),
        (("TRACE", "--json", "nowhere/out.json"), "--json: there is no folder nowhere"),
        (("TRACE", "--html", "nowhere/out.html"), "--html: there is no folder nowhere"),
        (("TRACE", "--requests", "1e3"), "--requests: expected a whole number, got '1e3'"),
        (("TRACE", "--requests", ","), "--requests: names none"),
        (("TRACE", "--scale", "1,two"), "--scale: expected a number, got 'two'"),
        (("TRACE", "--servers", "1,20000"), "--servers: expected at most 10,000, got 20,000"),
        (("TRACE", "--seed", "x"), "--seed: expected a whole number, got 'x'"),
        (("TRACE", "--scheduler", "continuous_batching", "--servers", "1,2"),
         "--servers: continuous_batching has one"),
        (("TRACE", "--vary", "bins"), "--vary: expected NAME=VALUE,VALUE, got 'bins'"),
        (("TRACE", "--vary", "bins="), "--vary: bins has no values"),
        (("TRACE", "--vary", "bims=1,2"), "--vary: no reading is called 'bims'; did you mean bins?"),
        (("TRACE", "--vary", "bins=1,x"), "--vary: bins: expected a whole number from 1 to 1,024, got 'x'"),
        (("TRACE", "--vary", "chunk=64,x"), "--vary: chunk: expected a whole number of at least 1, got 'x'"),
        (("TRACE", "--reading", "window=x"),
         "--reading: window: expected one of completion, arrivals, got 'x'"),
        (("TRACE", "--reading", "chunk=64"),
         "--reading: chunk is an option of serving\nhint: --serving chunk=64"),
        (("TRACE", "--serving", "bins=64"), "--serving: bins is a reading\nhint: --reading bins=64"),
        (("TRACE", "--serving", "prefix_cache=maybe"),
         "--serving: prefix_cache: expected true or false, got"),
        (("TRACE", "--seed", "-1"), "--seed: expected at least 0, got -1"),
        (("TRACE", "--seed", 2**63), "--seed: expected at most 9,223,372,036,854,775,807, got 9,223"),
        (("TRACE", "--scale", "1e300"), "--scale: expected at most 1,000,000,000, got 1e300"),
        (("TRACE", "--rate", "inf"), "--rate: expected at most 1,000,000,000, got inf"),
        (("TRACE", "--scale", "1e-12"), "--scale: the last of 60 requests would arrive after 146 years"),
        (("TRACE", "--rate", "1e-12"), "--rate: the last of 60 requests would arrive after 146 years"),
        # Options that no run would see.
        (("TRACE", "--scheduler", "chunked_prefill", "--bins", 4),
         "--bins: bins has no effect on chunked_prefill\nhint: multi_bin_dynamic would read it"),
        (("TRACE", "--scheduler", "static_fifo,chunked_prefill", "--eps", "1ms"),
         "--eps: eps has no effect on"),
        (("TRACE", "--scheduler", "chunked_prefill", "--bins", "0,9"), "--bins: bin_edges has no effect on"),
        (("TRACE", "--serving", "chunk=64"),
         "--serving: chunk has no effect on static_fifo, dynamic_no_bins, mul"),
        (("TRACE", "--vary", "prepone=1,2"), "--vary: prepone has no effect on"),
        (("TRACE", "--predictor", "noisy", "--scheduler", "static_fifo"),
         "--predictor: predictor has no effect"),
        (("TRACE", "--scheduler", "output_delay", "--serving", "ttft=2s"),
         "--serving: ttft has no effect on output_delay with give_up as it is"),
        (("TRACE", "--preset", "goodput", "--bins", 4),
         "--bins: bins has no effect on continuous_batching, chu"),
        (("TRACE", "--slo", ""), "--slo: names no objective"),
        (("TRACE", "--slo", " "), "--slo: names no objective"),
        (("chat", "--from", "azure"), "--from: chat is a workload that is drawn: it has no format"),
        (("chatt",), "chatt: cannot be read: No such file or directory\nhint: did you mean chat?"),
        (("nothing",),
         "No such file or directory\nhint: or a workload that is drawn: synthetic-uniform,"),
        (("TRACE", "--capture", "TRACE"), "--capture: TRACE: cannot be written: Not a directory"),
        (("TRACE", "--capture", "/proc/nowhere"), "--capture: /proc/nowhere: cannot be written: "),
        (("TRACE", "--capture", "s3:/bucket"), "--capture: s3:/bucket: 's3:/' begins no URL"),
        (("TRACE", "--capture", ""), "--capture: names no folder"),
        (("TRACE", "--json", "/proc/nowhere"), "--json: cannot write /proc/nowhere: "),
        (("TRACE", "--json", "."), "--json: cannot write .: Is a directory"),
        (("TRACE", "--json", "-", "--html", "-"), "--html: is written to stdout, and --json is, too"),
        (("TRACE", "--serving", "chunks=64"), "--serving: no option of serving is called 'chunks'; did you"),
        (("TRACE", "--vary", "eps=1ms", "--eps", "5ms"), "--vary: eps is set by --eps as well"),
        (("TRACE", "--vary", "bins=1", "--vary", "bins=2"), "--vary: bins is set twice"),
        (("TRACE", "--bins", "1,30", "--vary", "bins=1,2"), "--bins: gives edges, and how many bins there"),
        (("TRACE", "--preset", "gird"), "--preset: no preset is called 'gird'; did you mean grid?"),
        (("TRACE", "--preset", "methods", "--servers", 4), "--servers: servers is what --preset methods"),
        (("TRACE", "--slo", "ttft:1s", "--no-measure"), "--no-measure: objectives are of exchanges"),
        (("TRACE", "--capture", "c", "--no-measure"), "--no-measure: a capture is of exchanges"),
        (("TRACE", "--slo", "tttf:1s"), "--slo: unknown objective 'tttf'"),
        (("TRACE", "--ray", "auto", "--jobs", 2), "--jobs: how many run at a time is up to the cluster"),
        (("TRACE", "--ray", "auto", "--capture", "c"), "--capture: each node of --ray has a folder c of its"),
        (("TRACE", "--results", "nowhere/r.jsonl"), "--results: cannot open nowhere/r.jsonl"),
        (("TRACE", "--results", "TRACE"), "line 1: is no result of a sweep"),
        (("TRACE", "--latency", "capture", "--scheduler", "static_fifo"),
         "--latency: capture tells how long iterations take; static_fifo serves whole batches"),
        (("TRACE", "--latency", "g.csv", "--scheduler", "continuous_batching"),
         "--latency: g.csv tells how long whole batches take, and nothing of iterations"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(args: tuple[object, ...], problem: str, trace: Path, call: Call) -> None:
    code, out, err = call("sim", "run", *(trace if a == "TRACE" else a for a in args))
    assert (code, out) == (2, "")
    assert problem in err.replace(str(trace), "TRACE")
    assert len(err.splitlines()) <= 2


def test_a_place_for_a_capture_is_tried_before_anything_is_run(
    trace: Path, tmp_path: Path, call: Call
) -> None:
    kept = tmp_path / "r.jsonl"
    code, _, err = call("sim", "run", trace, "--capture", trace / "c", "--results", kept)
    assert (code, err) == (2, f"llmtap: --capture: {trace}/c: cannot be written: Not a directory\n")
    assert not kept.exists()
    # And for a file, of which nothing is left where another option is wrong.
    out = tmp_path / "o.json"
    assert call("sim", "run", trace, "--json", out, "--capture", trace)[0] == 2
    assert not out.exists()


def test_rows_that_come_at_once_have_no_rate(tmp_path: Path, call: Call) -> None:
    path = tmp_path / "a.csv"
    path.write_text(HEADER + "1,GPT-4,5,5,10,API log\n" * 2)
    for args, problem in (
        (("--rate", 3), "--rate: all rows arrive at once"),
        (("--requests", 3), "--requests: 3 are more than"),
        (("--capacity", 0.1), "--capacity: all rows arrive at once"),
    ):
        code, _, err = call("sim", "run", path, *args)
        assert (code, problem in err) == (2, True)
