"""`llmtap slo generate`: where it reads, where it writes, and what it says when it cannot."""

import sys
from pathlib import Path

import pytest
import yaml

from llmtap.cli.main import main

CONFIG = Path(__file__).parents[2] / "config" / "slo.toml"


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str | Path
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["llmtap", "slo", "generate", *map(str, args)])
    monkeypatch.delenv("LLMTAP_CONFIG", raising=False)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_rules_go_to_stdout_and_nothing_else_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run(capsys, monkeypatch, "--config", CONFIG)
    assert (code, err) == (0, "")
    assert [group["name"] for group in yaml.safe_load(out)["groups"]] == [
        "llmtap-slo-interactive", "llmtap-slo-batch", "llmtap-slo-default", "llmtap-tap",
    ]  # fmt: skip


def test_what_can_never_ring_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[slo.loose]\nobjectives = "ttft:1s"\ntarget = 0.9\n')
    code, out, err = run(capsys, monkeypatch, "--config", config)
    assert code == 0
    assert err.startswith("llmtap: warning: slo.loose: no page over 1h and 5m: ")
    assert err.count("\n") == 1
    assert yaml.safe_load(out)


def test_objectives_of_the_environment_are_read_as_the_proxy_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMTAP_SLO_GOLD_OBJECTIVES", "ttft:300ms")
    code, out, _ = run(capsys, monkeypatch, "--job", "x", "--runbooks", "https://wiki")
    assert code == 0
    assert 'llmtap_slo_events_total{job="x",slo="gold"}' in out
    assert "https://wiki/LlmtapDown.md" in out


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((), "--config: is missing: no file tells objectives"),
        (("--config", "/nowhere.toml"), "/nowhere.toml: cannot be read"),
        (("--config", CONFIG, "--job", 'a"'), "--job: 'a\"' is no name for a job"),
        (("--config", CONFIG, "--out", "/nowhere/x"), "--out: cannot write /nowhere/x"),
        (("--config", CONFIG, "--format", "sloth"), "--format: 'sloth' cannot be written"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_exit_2(
    args: tuple[str | Path, ...],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, out, err = run(capsys, monkeypatch, *args)
    assert (code, out) == (2, "")
    assert err.startswith(f"llmtap: {told}")
    assert "Traceback" not in err
