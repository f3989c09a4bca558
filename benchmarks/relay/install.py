"""Puts the gateways that are measured on request under build/, each in a place of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable

from instrument import BUILD

__all__ = ["INSTALLERS"]


def _litellm() -> None:
    environment = BUILD / "litellm-venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip = [environment / "bin/pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "litellm[proxy]"], check=True)


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


INSTALLERS: dict[str, Callable[[], None]] = {"litellm": _litellm, "portkey": _portkey}
