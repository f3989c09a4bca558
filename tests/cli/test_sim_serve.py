"""`llmtap sim serve` and `llmtap sim tokenizer`, as one types them."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LLMTAP = [sys.executable, "-P", "-m", "llmtap.cli", "sim"]


def run(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*LLMTAP, *args], capture_output=True, text=True, timeout=200)


def test_the_tokenizer_file_counts_as_we_do(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `tokenizers` is not installed")
    from llmtap.workload.prompts.text import say

    file = tmp_path / "tokenizer.json"
    assert run("tokenizer", str(file)).returncode == 0
    assert file.stat().st_size < 100_000
    judge = tokenizers.Tokenizer.from_file(str(file))
    assert len(judge.encode("".join(say(777, "key"))).ids) == 777
    assert json.loads(run("tokenizer", "-").stdout) == json.loads(file.read_text())


def test_grpc_is_served_beside_http_and_imported_only_then() -> None:
    args = [*LLMTAP, "serve", "--listen", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            said = [server.stdout.readline().split("://")[0] for _ in range(2)]
        finally:
            server.send_signal(signal.SIGINT)
        assert said == ["llmtap sim: http", "llmtap sim: grpc"]
        assert server.wait(200) == 0
    check = "'grpc' in sys.modules, 'google.protobuf' in sys.modules"
    code = f"import sys, llmtap.sim.server.server; print({check})"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.split() == ["False", "False"]
