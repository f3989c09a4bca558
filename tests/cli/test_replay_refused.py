"""`llmtap replay`: what cannot be is said before anything is sent or read, with the option's name."""

import sys
from pathlib import Path

import pytest

from llmtap.cli.main import main

TARGET = ("--target", "http://127.0.0.1:9")
"""Where nobody listens: it is never asked."""


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("--timeout", "0"), "--timeout: has to be above 0"),
        (("--timeout", "0ms"), "--timeout: has to be above 0"),
        (("--timeout", "soon"), "--timeout: expected a duration"),
        (("--timeout", "9000d"), "is longer than 1,000 days"),
        (("--timeout", "9" * 30 + "d"), "--timeout: expected a duration"),
        (("--timeout", "9" * 400), "--timeout: expected a duration"),
        (("--connect-timeout", "0s"), "--connect-timeout: has to be above 0"),
        (("--duration", "0"), "--duration: has to be above 0"),
        (("--drain", "-1s"), "--drain: expected a duration"),
        (("--ca", "nowhere.pem"), "--ca: nowhere.pem cannot be read: No such file or directory"),
        (("--metrics", "foo"), "--metrics: 'foo' is no URL of metrics"),
        (("--tenant-header", "X Y"), "--tenant-header: a field's name has letters, digits and hyphens"),
        (("--header", "X-Key sk-secret"), "--header: expected `Name: value`"),
        (("--header", "X Key: sk-secret"), "--header: a field's name has letters"),
        (("--json", "nowhere/out.json"), "--json: there is no folder nowhere"),
        (("--json", "."), "--json: cannot write .: Is a directory"),
        (("--json", "-", "--html", "-"), "--html: is written to stdout, and --json is, too"),
        (("--capture", "/proc/nowhere"), "--capture: /proc/nowhere: cannot be written"),
        (("--capture", ""), "--capture: names no folder"),
        (("--warmup", "0"), "--warmup: '0' is neither auto, none nor a number of requests"),
        (("--markdown", "nowhere/out.md"), "--markdown: there is no folder nowhere"),
        (("--closed", "4", "--limit-in-flight", "2"), "--limit-in-flight: only an open loop has one"),
        (("--window", "10m"), "--window: conversation is a workload: it has no times of its own"),
        (("--as-recorded",), "--as-recorded: conversation is a workload: it has no times of its own"),
        ((), "--rate: is missing: conversation is a workload, which has no times of its own"),
    ],
)
def test_what_is_wrong_is_named(
    args: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["llmtap", "replay", "conversation", *TARGET, *args])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert problem in said.err
    assert "secret" not in said.err
    assert len(said.err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("http://127.0.0.1:9", "connection refused"),
        ("http://gateway.invalid", "name "),
        ("ws://127.0.0.1:9", "connection refused"),
    ],
)
def test_why_a_server_cannot_be_reached_is_said_in_words(
    target: str, why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["conversation", "--target", target, "--rate", "9", "--requests", "2"]
    monkeypatch.setattr(sys, "argv", ["llmtap", "replay", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"--target: {target} cannot be reached: {why}" in said
    assert "Error" not in said


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("localhost:8000", "'localhost:8000' is no URL of a gateway"),
        ("http://", "'http://' is no URL of a gateway"),
        ("ws://", "'ws://' is no URL of a WebSocket"),
        ("grpc://127.0.0.1", "'grpc://127.0.0.1' is no address of gRPC"),
    ],
)
def test_a_target_that_is_none_is_shown_as_it_was_given(
    target: str, problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["conversation", "--target", target, "--rate", "9", "--requests", "2"]
    monkeypatch.setattr(sys, "argv", ["llmtap", "replay", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"--target: {problem}\nhint: write it like " in capsys.readouterr().err
