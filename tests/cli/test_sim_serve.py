"""`llmtap sim serve` and `llmtap sim tokenizer`, as one types them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

LLMTAP = [sys.executable, "-P", "-m", "llmtap.cli", "sim"]


def run(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*LLMTAP, *args], capture_output=True, text=True, timeout=60)


def test_the_tokenizer_file_counts_as_we_do(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `tokenizers` is not installed")
    from llmtap.workload.words import say

    file = tmp_path / "tokenizer.json"
    assert run("tokenizer", str(file)).returncode == 0
    assert file.stat().st_size < 100_000
    judge = tokenizers.Tokenizer.from_file(str(file))
    assert len(judge.encode("".join(say(777, "key"))).ids) == 777
    assert json.loads(run("tokenizer", "-").stdout) == json.loads(file.read_text())


def test_keys_are_listed_with_their_help() -> None:
    listed = run("serve", "--keys").stdout
    assert "guardrails.output_hold" in listed and "faults.stall_rate" in listed


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--set", "pacing.jiter=1"), "did you mean 'pacing.jitter'?"),
        (("--set", "jitter"), "expected KEY=VALUE"),
        (("--ttft", "soon"), "ttft: "),
        (("--dialect", "klingon"), "dialect: "),
        (("--listen", "nowhere"), "expected HOST:PORT"),
        (("--listen", "127.0.0.1:0", "--truth", "/"), "--truth: cannot write"),
    ],
)
def test_what_does_not_fit_is_exit_2_and_named(args: tuple[str, ...], says: str) -> None:
    done = run("serve", *args)
    assert done.returncode == 2
    assert says in done.stderr
