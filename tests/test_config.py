"""Defaults < file < environment < flags; and whoever mistypes is told what, where, and what was meant."""

import re
import tomllib
from pathlib import Path
from typing import get_origin, get_type_hints

import pytest
from typer.testing import CliRunner

import llmtap.cli.tap  # noqa: F401  it adds the command
from llmtap.cli.main import app
from llmtap.config import ALL_TABLES, Settings, help_by_key, load_settings
from llmtap.errors import ConfigError
from llmtap.load.own_dialects import read_dialects
from llmtap.log import LogSetup
from llmtap.meter.options import MeterOptions, TenantRule
from llmtap.metrics.slo import SloOptions
from llmtap.options.fields import choices_of, parts_of
from llmtap.supervisor.supervisor import check_settings
from llmtap.vantage.relay.options import RelayOptions

HOUSE = Path(__file__).parents[1]
OTHERS = ("workload.toml", "bench.toml", "bench-sim.toml")
"""Of `llmtap replay` and `llmtap bench`."""
EXAMPLES = sorted(file for file in (HOUSE / "config").glob("*.toml") if file.name not in OTHERS)
S = 1_000_000_000


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "llmtap.toml"
    file.write_text(text)
    return file


def refused(file: Path | None = None, environ: dict[str, str] | None = None, **flags: object) -> ConfigError:
    named = {key.replace("__", "."): value for key, value in flags.items()}
    with pytest.raises(ConfigError) as told:
        load_settings(file, environ or {}, named)
    return told.value


# ---------------------------------------------------------------- order


def test_without_a_word_there_are_defaults() -> None:
    assert load_settings(None, {}, {}) == Settings(relay=RelayOptions(), meter=MeterOptions(), log=LogSetup())


def test_each_source_goes_before_the_one_before_it(tmp_path: Path) -> None:
    file = written(tmp_path, "[relay]\nhead_fields = 1\nworkers = 1\nstreams = 1\nvia = true\n")
    environ = {"LLMTAP_RELAY_WORKERS": "2", "LLMTAP_RELAY_STREAMS": "2", "PATH": "/bin", "LLMTAP_CONFIG": "x"}
    environ["LLMTAP_NATIVE"] = "0"  # selects the implementation, and is no key
    relay = load_settings(file, environ, {"relay.streams": 3, "relay.listen": None}).relay
    assert (relay.head_fields, relay.workers, relay.streams, relay.via) == (1, 2, 3, True)
    assert relay.listen == RelayOptions().listen, "a flag that was not given says nothing"


OTHER_THAN_DEFAULT = {
    "Duration": "5.5s",
    "Bytes": "3KiB",
    "int": "7",
    "float": "0.5",
    "str": "x",
    "list": '[{"name": "a"}, {"name": "b", "body": {"n": 2}}]',
    "tuple": '["x"]',
    "dict": '{"a": 1}',
}
SPECIAL = {
    "meter.admin": "127.0.0.1:1",
    "experiment.until": "1h",
    "experiment.schedule": "10%",
    "experiment.stop_worse": '["ttft"]',
    "otlp.endpoint": "http://127.0.0.1:4317",
    "meter.trace_url": "https://traces.example/{trace_id}",
    "meter.upstream_metrics": "http://127.0.0.1:8000/metrics",
    "meter.buckets": '{"ttft": [1, 2]}',
    "meter.window": "5m",
    "meter.idle_cost": "tokens",
    "cost.gpus": "4",
    "tenants.names": '{"key-1": "acme"}',
    "tenants.rules": '[{"header": "x-team"}]',
    "pair.back_ports": "[8000]",
    "pair.exchanges_max": "200",
    "capture.level": "none",
    "capture.memory_bytes": "2MiB",
    "capture.rotate_bytes": "1MiB",
    "capture.total_bytes": "1GiB",
    "capture.full_share": "0.25",
    "capture.full_tenants": '["x"]',
    "capture.redact": '["email"]',
    "capture.flush": "100ms",
    "capture.pair_key": "0123456789abcdef",
    "watch.interfaces": '["lo"]',
    "watch.ports": "[8000]",
    "watch.upstream_hosts": '["10.0.0.1"]',
}
"""Values of keys whose type alone does not say what is possible."""
ONLY_BESIDE = {
    "experiment.schedule": {"LLMTAP_EXPERIMENT_STOP_WORSE": '["ttft"]'},
    "capture.full_tenants": {"LLMTAP_CAPTURE_LEVEL": "full"},
    "meter.admin_tls_certificate": {"LLMTAP_METER_ADMIN_TLS_KEY": "key.pem"},
    "meter.admin_tls_key": {"LLMTAP_METER_ADMIN_TLS_CERTIFICATE": "certificate.pem"},
}


@pytest.mark.parametrize("key", sorted(key for key in help_by_key() if key.count(".") == 1))
def test_every_key_is_a_variable_of_the_environment(key: str) -> None:
    table, _, name = key.partition(".")
    default = getattr(getattr(Settings(), table), name)
    kind = parts_of(get_type_hints(type(getattr(Settings(), table)))[name])[0]
    others = [word for word in choices_of(kind) if word != default]
    if kind is bool:
        others = [str(not default).lower()]
    text = SPECIAL.get(key) or (others[0] if others else OTHER_THAN_DEFAULT[name_of(kind)])
    variable = f"LLMTAP_{table}_{name}".upper()
    settings = load_settings(None, {variable: text, **ONLY_BESIDE.get(key, {})}, {})
    assert getattr(getattr(settings, table), name) != default


def name_of(kind: type) -> str:
    return (get_origin(kind) or kind).__name__


# ---------------------------------------------------------------- tenants and their classes


TENANTS = """
[tenants]
max = 50
names = { "key-0f1e2d3c" = "acme" }
[[tenants.rules]]
api_key = true
[[tenants.rules]]
body = "metadata.team"
"""
CLASSES = """
[slo.gold]
objectives = "ttft:300ms tpot:40ms"
target = 0.995
tenants = ["acme"]
[slo.rest_of_us]
objectives = "ttft:2s"
"""


def test_tenants_and_classes_are_read_from_files_variables_and_flags(tmp_path: Path) -> None:
    file = written(tmp_path, TENANTS + CLASSES)
    environ = {"LLMTAP_SLO_GOLD_TARGET": "0.9", "LLMTAP_SLO_REST_OF_US_TARGET": "0.8"}
    settings = load_settings(file, environ, {"slo.gold.objectives": "e2e:30s"})
    assert settings.tenants.rules == (TenantRule(api_key=True), TenantRule(body="metadata.team"))
    assert (settings.tenants.max, settings.tenants.names) == (50, {"key-0f1e2d3c": "acme"})
    assert list(settings.slo.items()) == [
        ("gold", SloOptions(objectives="e2e:30s", target=0.9, tenants=("acme",))),
        ("rest_of_us", SloOptions(objectives="ttft:2s", target=0.8)),
    ]
    new = {"LLMTAP_SLO_NEW_OBJECTIVES": "ttft:1s", "LLMTAP_SLO_NEW_TENANTS": '["a"]'}
    assert load_settings(None, new, {}).slo == {"new": SloOptions(objectives="ttft:1s", tenants=("a",))}


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("[slo.gold]\ntarget = 0.9\n", "slo.gold", "objectives"),
        ('[slo.gold]\nobjectives = "ttft:1s"\ntarget = 0.9\nburn = {"1h" = 15}\n', "slo.gold.burn.1h", "10"),
        ('[slo]\nobjectives = "ttft:1s"\n', "llmtap.toml", "slo.objectives"),
        ('[slo.gold]\nobjectives = "ttft:1s"\ntraget = 0.9\n', "llmtap.toml", "slo.gold.traget"),
        ('[[tenants.rules]]\nheader = "a"\nbody = "b"\n', "tenants.rules[0]", "header and body"),
        ('[meter]\nrefusal_patterns = ["("]\n', "meter.refusal_patterns[0]", "regular expression"),
        ("upstream = 'http://x'\n", "llmtap.toml", "upstream"),
        ("[metr]\n", "llmtap.toml", "metr"),
        ("[capture]\nfull_tenants = 'acme, b*'\n", "capture.full_tenants", "list"),
    ],
)
def test_one_mistake_is_told_once_with_its_place(tmp_path: Path, text: str, place: str, said: str) -> None:
    told = refused(written(tmp_path, text))
    assert place in told.place and said in told.problem
    assert str(told) == str(ConfigError(told.place, told.problem, told.hint))


def test_a_tokenizer_that_is_not_there_is_found_before_the_start() -> None:
    settings = load_settings(None, {}, {"relay.upstream": "http://gw", "meter.tokenizer": "/none.json"})
    with pytest.raises(ConfigError, match=r"^meter\.tokenizer: there is no file /none\.json"):
        check_settings(settings)


# ---------------------------------------------------------------- mistakes


def test_an_unknown_key_names_the_nearest_and_the_place(tmp_path: Path) -> None:
    file = written(tmp_path, "[relay]\nidle_timout = 5\n")
    told = refused(file)
    assert told.place == f"{file}, line 2"
    assert "relay.idle_timout" in told.problem
    assert told.hint == "did you mean 'relay.idle_timeout'?"
    told = refused(environ={"LLMTAP_RELAY_UPSTREEM": "x"})
    assert told.place == "environment variable LLMTAP_RELAY_UPSTREEM"
    assert told.hint == "did you mean 'relay.upstream'?"
    told = refused(relay__wrkers=2)
    assert (told.place, told.hint) == ("command line", "did you mean 'relay.workers'?")
    assert refused(relay__size=2).hint is None, "nothing near"
    assert refused(relay__admin="x").hint == "did you mean 'meter.admin'?"


STREAMS = "LLMTAP_RELAY_STREAMS"
MISTAKES = """[relay]
workers = "many"   # 2
clock = "sundial"
via = 'maybe'
idle_timout = 5

[slo.gold]
objectives = "ttft:1s"
target = "high"
[[tenants.rules]]
headr = "a"
[zzz]
[log]
level = 3
"""


def test_all_mistakes_are_listed_with_their_lines(tmp_path: Path) -> None:
    file = written(tmp_path, MISTAKES)
    told = str(refused(file, {STREAMS: "-1"}, relay__streams=None)).splitlines()
    assert [line for line in told if not line.startswith("hint: ")] == [
        f"{file}, line 5: there is no key 'relay.idle_timout'",
        f"{file}, line 12: there is no table 'zzz'",
        f"relay.streams (environment variable {STREAMS}): expected a whole number of at least 1, got '-1'",
        f"relay.workers ({file}, line 2): expected a whole number from 1 to 256, got 'many'",
        f"relay.clock ({file}, line 3): expected one of kernel, mono, got 'sundial'",
        f"relay.via ({file}, line 4): expected true or false, got 'maybe'",
        f"tenants.rules[0] ({file}, line 10): there is no key `headr`",
        f"slo.gold.target ({file}, line 9): expected a number, got 'high'",
        f"log.level ({file}, line 14): expected one of debug, info, warning, error, got 3",
    ]


SEVERAL_IN_ONE_KEY = """[relay]
tls_key = "key.pem"
[slo.gold]
objectives = "ttft:500 speed:1s tpot:50ms e2e:0s"
target = 2
[slo.free]
objectives = "ttft:1s"
[slo.basic]
objectives = "ttft:2s"
[experiment]
enabled = true
[[experiment.arms]]
name = "a"
wieght = 2
[[experiment.arms]]
weight = "z"
[[tenants.rules]]
header = "a b"
[[tenants.rules]]
path = "("
[meter]
admin = "0.0.0.0:9464"
window = "7s"
[capture]
level = "all"
full_tenants = ["x"]
flush = "0s"
redact = ["emial"]
"""


def test_a_mistake_hides_no_other_one_and_causes_none(tmp_path: Path) -> None:
    file = written(tmp_path, SEVERAL_IN_ONE_KEY)
    done = CliRunner().invoke(app, ["proxy", "--check", "--config", str(file)], env={"LLMTAP_CONFIG": None})
    assert isinstance(done.exception, ConfigError)
    told = re.findall(r"^(?!hint: )(\S+)(?: \(.*, line (\d+)\))?: ", str(done.exception), re.MULTILINE)
    assert sorted((int(line or 0), key) for key, line in told) == [
        (1, "relay.upstream"),
        (2, "relay.tls_key"),
        (4, "slo.gold.objectives"),
        (4, "slo.gold.objectives"),
        (4, "slo.gold.objectives"),
        (5, "slo.gold.target"),
        (6, "slo.free.tenants"),
        (8, "slo.basic.tenants"),
        (12, "experiment.arms[0]"),
        (15, "experiment.arms[1]"),
        (16, "experiment.arms[1].weight"),
        (18, "tenants.rules[0].header"),
        (20, "tenants.rules[1].path"),
        (21, "meter.admin_tls_certificate"),
        (21, "meter.admin_token"),
        (23, "meter.window"),
        (25, "capture.level"),
        (27, "capture.flush"),
        (28, "capture.redact[0]"),
    ]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    told = refused(tmp_path / "none.toml")
    assert "none.toml" in told.place
    told = refused(tmp_path)
    assert str(tmp_path) in told.place
    told = refused(written(tmp_path, "[relay\n"))
    assert "is not TOML" in told.problem
    file = tmp_path / "latin.toml"
    file.write_bytes(b"[relay]\nupstream = 'http://caf\xe9'\n")
    assert "latin.toml" in refused(file).place


# ---------------------------------------------------------------- the whole


DIALECT = """
[dialects.acme]
source = "invented"
end = "{end}"
[[dialects.acme.rules]]
content = "{path}"
[dialects.acme.events]
done = "bye"
"""


def test_dialects_of_the_user_are_checked_tables(tmp_path: Path) -> None:
    file = tmp_path / "llmtap.toml"
    file.write_text(DIALECT.format(end="done", path="a.b"))
    assert load_settings(file, {}, {}).dialects["acme"].end_certain
    assert [table.name for table in read_dialects(file)] == ["acme"]
    file.write_text(DIALECT.format(end="done", path="a["))
    for read in (lambda: load_settings(file, {}, {}), lambda: read_dialects(file)):
        with pytest.raises(ConfigError) as caught:
            read()
        assert caught.value.place == f"dialects.acme.rules[0].content ({file}, line 6)"
    file.write_text('name = "acme"\nsource = "s"\nend = "none"\n[[rules]]\ncontent = "a"\n')
    assert [table.name for table in read_dialects(file)] == ["acme"], "a file that is one table"
    file.write_text("[dialects]\nacme = 3\n")
    with pytest.raises(ConfigError, match=r"dialects\.acme"):
        load_settings(file, {}, {})


def test_every_key_has_its_line_of_help() -> None:
    told = help_by_key()
    assert len(told) == sum(len(table.__struct_fields__) for table in ALL_TABLES.values())
    assert {"slo.NAME.target", "dialects.NAME.end", "dialects.NAME.rules[].verdicts[].path"} <= told.keys()
    assert [key for key, text in told.items() if not text.strip()] == []


@pytest.mark.skipif(not EXAMPLES, reason="no examples in config/")
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda f: f.name)
def test_the_command_checks_every_example(file: Path) -> None:
    args = ["proxy", "--check", "--config", str(file), "--upstream", "http://127.0.0.1:8000"]
    done = CliRunner().invoke(app, args, env={"LLMTAP_CONFIG": None})
    assert (done.exit_code, done.output.startswith("ok (config ")) == (0, True), done.output


@pytest.mark.skipif(not (HOUSE / "config/llmtap.toml").exists(), reason="config/llmtap.toml is not here")
def test_the_commented_example_shows_every_key_with_its_default() -> None:
    file = HOUSE / "config/llmtap.toml"
    text = file.read_text()
    for key in help_by_key():
        name = key.rpartition(".")[2]
        assert re.search(rf"^(# )?(.*[{{,] )?{name} =", text, re.MULTILINE), f"{key} is not shown"
    said = tomllib.loads(text)
    assert load_settings(file, {}, {}) == Settings(), f"an example that changes something: {said}"


@pytest.mark.parametrize(
    ("flags", "place"),
    [
        ({}, "relay.upstream"),
        ({"relay.upstream": "gw:80"}, "relay.upstream"),
        ({"relay.upstream": "http://gw", "relay.listen": "8080"}, "relay.listen"),
        ({"relay.upstream": "http://gw", "relay.tls_key": "/k"}, "relay.tls_key"),
        (
            {"relay.upstream": "http://gw", "relay.tls_key": "/k", "relay.tls_certificate": "/c"},
            "relay.tls_certificate",
        ),
        ({"relay.upstream": "https://gw", "relay.upstream_ca": "/none"}, "relay.upstream_ca"),
        ({"relay.upstream": "http://gw", "meter.admin": "0.0.0.0:9464"}, "meter.admin_token"),
        ({"relay.upstream": "http://gw", "meter.admin": "9464"}, "meter.admin (command line)"),
        ({"relay.upstream": "http://gw", "cost.gpu_hour": 2.5}, "cost.gpus"),
    ],
)
def test_what_only_a_look_at_the_world_can_find(flags: dict[str, object], place: str) -> None:
    with pytest.raises(ConfigError) as told:
        check_settings(load_settings(None, {}, flags))
    assert told.value.place == place
