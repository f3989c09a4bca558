"""Defaults < quick < file < flags; and whoever mistypes is told which key, where, and what was meant."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmtap import __version__
from llmtap.bench.compliance.judge import judge
from llmtap.bench.run import test as registry
from llmtap.bench.sut.sut import BenchFile, BenchTarget, TargetArm, load_bench, without_secrets
from llmtap.bench.tests.guardrail_overhead import ARMS
from llmtap.errors import ConfigError
from llmtap.workload.prompts.text import VOCABULARY

HOUSE = Path(__file__).parents[3]
URL = "http://127.0.0.1:9"
ENDPOINTS = "chat.completions, completions, responses"


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "bench.toml"
    file.write_text(text)
    return file


def refused(file: Path | None = None, *sets: str, tests: tuple[str, ...] = ("ttft",)) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_bench(file, target=URL, sets=sets, tests=tests)
    return caught.value


def flags(*sets: str, tests: tuple[str, ...] = ("ttft",)) -> BenchFile:
    return load_bench(None, target=URL, sets=sets, tests=tests)


def params(file: BenchFile, name: str = "ttft", *, quick: bool = False) -> Any:
    return file.params_of(registry.test_named(name), quick=quick)


def test_the_example_loads_and_says_what_the_comments_beside_it_say() -> None:
    file = load_bench(HOUSE / "config/bench.toml")
    assert file.sut.hardware.accelerator == "H100 SXM"
    assert file.arms.keys() == {"cache_off", "cache_on", *ARMS}
    assert params(file).requests == 10_000
    assert [one.name for one in params(file, "fairness").classes] == ["short", "long"]


def test_the_example_of_the_embedded_engine_has_all_arms_and_declares_its_tokenizer() -> None:
    file = load_bench(HOUSE / "config/bench-sim.toml", tests=list(registry.TESTS))
    sut = file.sut
    assert file.arms.keys() == {"cache_off", "cache_on", *ARMS}
    assert file.arms["cache_on"].url != file.target.url
    assert sut.tokenizer.name == f"llmtap words, {__version__}"
    assert sut.tokenizer.vocabulary == len(VOCABULARY)
    report = {"test": "ttft", "sut": msgspec.to_builtins(sut)}
    rows = {one.requirement.id: one.verdict for one in judge(report).rows}
    for demand in ("4.4.1-1a", "4.4.1-1b", "4.4.1-1c", "4.4.2-1", "4.4.3-1a", "4.4.3-1b", "4.4.3-1c"):
        assert rows[demand].status == "met", rows[demand]


def test_each_place_gives_way_to_the_next(tmp_path: Path) -> None:
    usual = registry.test_named("ttft").params()
    assert params(flags()) == usual
    quick = params(flags(), quick=True).requests
    assert quick < usual.requests
    file = written(tmp_path, "[tests.ttft]\nrequests = 7\n")
    assert params(load_bench(file, target=URL), quick=True).requests == 7
    over = load_bench(file, target=URL, sets=["requests=8"], tests=["ttft"])
    assert params(over, quick=True).requests == 8


def test_a_flag_names_the_target_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, '[target]\nurl = "http://there:1"\n')
    assert load_bench(file).target.url == "http://there:1"
    assert load_bench(file, target=URL).target.url == URL


@pytest.mark.parametrize(
    ("text", "line", "key", "hint"),
    [
        ("[targets]\n", 1, "targets", "'target'"),
        ("sut = 3\n", 1, "sut", "[sut]"),
        ('[target]\nmodle = "x"\n', 2, "target.modle", "'target.model'"),
        ("[sut.hardware]\ncuont = 1\n", 1, "cuont", "count"),
        ("[tests.tttf]\n", 1, "tests.tttf", "'tests.ttft'"),
        ("[arms.input_fliter]\n", 1, "arms.input_fliter", "'arms.input_filter'"),
        ("[tests.ttft]\nrequest = 1\n", 2, "tests.ttft.request", "'tests.ttft.requests'"),
        ('[[tests.fairness.classes]]\nnam = "x"\n', 1, "nam", "'name'"),
    ],
)
def test_a_key_that_nobody_knows_is_named_with_the_nearest(
    tmp_path: Path, text: str, line: int, key: str, hint: str
) -> None:
    found = refused(file := written(tmp_path, text))
    assert f"{file}, line {line}" in found.place
    assert key in found.problem
    assert hint in (found.hint or "")


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        (
            "[tests.ttft]\nrequests = 0\n",
            "tests.ttft.requests",
            "expected a whole number of at least 1, got 0",
        ),
        (
            '[tests.ttft]\nrequests = "7"\n',
            "tests.ttft.requests",
            "expected a whole number of at least 1, got '7'",
        ),
        ("[tests.ttft]\nrate = inf\n", "tests.ttft.rate", "expected a finite number, got inf"),
        ('[tests.throughput]\nduration = "soon"\n', "tests.throughput.duration", "a duration"),
        ("[target]\nheaders = { a = 1 }\n", "target.headers.a", "expected a text"),
        ('[target]\nendpoint = "foo"\n', "target.endpoint", f"expected one of {ENDPOINTS}, got 'foo'"),
        ('[sut]\nprefix_cache = "yes"\n', "sut.prefix_cache", "expected true or false, got 'yes'"),
        ('[tests.fairness]\nclasses = "short"\n', "tests.fairness.classes", "expected a list, got 'short'"),
        ("[[tests.fairness.classes]]\n", "tests.fairness.classes[0]", "`name` is missing"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_its_key(
    tmp_path: Path, text: str, place: str, problem: str
) -> None:
    found = refused(file := written(tmp_path, text))
    assert found.place.startswith(f"{place} ({file}, line ")
    assert problem in found.problem


@pytest.mark.parametrize("table", ["target", "arms.full"])
def test_a_header_that_does_not_fit_is_named_without_the_others(tmp_path: Path, table: str) -> None:
    text = '{ authorization = "Bearer sk-1", x-n = 5 }'
    found = refused(written(tmp_path, f"[{table}]\nheaders = {text}\n"))
    assert found.place.startswith(f"{table}.headers.x-n (")
    assert found.problem == "expected a text"


def test_a_flag_sets_a_parameter_of_each_test_that_has_it() -> None:
    file = flags("workload=conversation", "ttft.requests=5", tests=("ttft", "throughput"))
    assert params(file).workload == params(file, "throughput").workload == "conversation"
    assert params(file).requests == 5
    assert params(flags("duration=90s", tests=("ttft", "throughput")), "throughput").duration == 90 * 10**9


def test_a_flag_sets_any_key_of_other_tables() -> None:
    file = flags(
        "target.model=tiny",
        "sut.hardware.count=8",
        "sut.prefix_cache=off",
        "target.body.top_p=0.5",
        "sut.guardrails.names=a, b",
        "arms.cache_off.url=http://x:1",
        "arms.cache_off.headers.x-cache=off",
    )
    assert file.target.model == "tiny"
    assert file.sut.hardware.count == 8
    assert file.sut.prefix_cache is False
    assert msgspec.json.decode(file.target.body["top_p"]) == 0.5
    assert file.sut.guardrails.names == ["a", "b"]
    assert file.arms["cache_off"] == TargetArm(url="http://x:1", headers={"x-cache": "off"})


def test_a_flag_reads_numbers_lists_and_none_by_the_type_of_its_parameter(tmp_path: Path) -> None:
    assert params(flags("rate=2.5")).rate == 2.5
    file = written(tmp_path, "[tests.ttft]\nrate = 1.0\n")
    assert params(load_bench(file, target=URL, sets=["rate=none"], tests=["ttft"])).rate is None
    for text in ("10,50", "[10, 50]"):
        assert params(flags(f"levels={text}", tests=("tradeoff",)), "tradeoff").levels == (10, 50)
    one = '{"name":"%s","share":0.5,"input":[1,2],"output":[3,4]}'
    classes = f"[{one % 'a'},{one % 'b'}]"
    found = params(flags(f"classes={classes}", tests=("fairness",)), "fairness").classes
    assert [one.input for one in found] == [(1, 2), (1, 2)]


@pytest.mark.parametrize(
    ("given", "place", "problem"),
    [
        ("requests", "--set", "expected NAME=VALUE"),
        ("throughput.reqests=1", "--set throughput.reqests", "there is no key"),
        ("requests=0", "--set requests", "expected a whole number of at least 1, got '0'"),
        ("rate=inf", "--set rate", "expected a finite number, got 'inf'"),
        ("target.endpoint=foo", "--set target.endpoint", f"expected one of {ENDPOINTS}, got 'foo'"),
        ("target.modle=x", "--set target.modle", "there is no key"),
        ("workload.x=1", "--set workload.x", "has a single value and is not a table"),
    ],
)
def test_a_flag_that_does_not_fit_is_named(given: str, place: str, problem: str) -> None:
    found = refused(None, given)
    assert found.place == place
    assert problem in found.problem


def test_results_have_no_keys_in_them() -> None:
    target = BenchTarget(
        url="http://me:secret1@host:1/v1?key=secret2",
        metrics="http://host/metrics?token=secret3",
        headers={"Authorization": "Bearer secret4", "X-Api-Key": "secret5", "x-team": "perf"},
        body={"api_key": msgspec.Raw(b'"secret6"'), "max_tokens": msgspec.Raw(b"7")},
    )
    told = without_secrets(target)
    assert "secret" not in str(told)
    assert told["url"] == "http://host:1/v1"
    assert told["headers"]["x-team"] == "perf"
    assert told["body"]["max_tokens"] == 7
    assert "secret" not in str(without_secrets(TargetArm(headers={"cookie": "secret"})))
    assert without_secrets(BenchTarget(url="http://h", metrics="none"))["metrics"] == "none"
