"""Puts the load generators that llmtap is compared with under build/, each in an environment of its own.

Two come without the inference engine that they are shipped with: of vLLM's and SGLang's wheels only the
folders of their benchmark clients are unpacked, unchanged, and `engineless.py` stands in for the rest.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE / "build"
TOKENIZER = BUILD / "tokenizer"
AIPERF_ELSEWHERE = HERE.parents[1] / ".e2e/bench"

# What the two clients import; versions are those that were current on 2026-11-22.
CLIENT_PACKAGES = [
    "aiohttp==3.14.5",
    "numpy==2.4.6",
    "pillow==12.3.0",
    "pybase64==1.4.3",
    "requests==2.34.2",
    "tqdm==4.70.1",
    "transformers==5.23.0",
]
VLLM = "vllm==0.33.0"
VLLM_FOLDERS = ("vllm/benchmarks/",)
SGLANG = "sglang==0.5.23"
RUST = "sglang/srt/rust_extensions/_bench."
SGLANG_FOLDERS = ("sglang/benchmark/", RUST)
# The last torch that comes without CUDA; guidellm itself is content with any.
GUIDELLM = ["guidellm==0.8.1", "torch==2.13.0"]
AIPERF = ["aiperf==0.13.0"]
LOCUST = ["locust==2.47.0"]


def python_of(name: str) -> Path:
    """The interpreter of a tool's environment, there or not."""
    return BUILD / name / "bin/python"


def _environment(name: str, *packages: str) -> None:
    """Makes build/NAME anew. What has no wheel fails: nothing is compiled here."""
    folder = BUILD / name
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python_of(name), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*pip, *packages], check=True)


def _client_of(wheel: str, folders: tuple[str, ...], name: str, *more: str) -> None:
    _environment(name, *CLIENT_PACKAGES, *more)
    pip = [python_of(name), "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    with tempfile.TemporaryDirectory() as there:
        subprocess.run([*pip, "--dest", there, wheel], check=True)
        (file,) = Path(there).glob("*.whl")
        with zipfile.ZipFile(file) as archive:
            wanted = [member for member in archive.namelist() if member.startswith(folders)]
            archive.extractall(BUILD / name / "client", wanted)
    (BUILD / name / "client/version").write_text(wheel.rpartition("==")[2])


def tokenizer() -> None:
    """Makes the tokenizer that the tools are given, with whichever of them can."""
    if TOKENIZER.exists():
        return
    able = [python_of(name) for name in ("vllm", "sglang", "aiperf", "guidellm")]
    for python in (*able, AIPERF_ELSEWHERE / "bin/python"):
        if python.exists():
            subprocess.run([python, HERE / "tiny_tokenizer.py", TOKENIZER], check=True)
            return


INSTALLERS: dict[str, Callable[[], None]] = {
    "vllm": lambda: _client_of(VLLM, VLLM_FOLDERS, "vllm", "regex==2026.11.15"),
    "sglang": lambda: _client_of(SGLANG, SGLANG_FOLDERS, "sglang", "msgspec==0.22.0", "orjson==3.11.9"),
    "aiperf": lambda: _environment("aiperf", *AIPERF),
    "guidellm": lambda: _environment("guidellm", *GUIDELLM),
    "locust": lambda: _environment("locust", *LOCUST),
}
