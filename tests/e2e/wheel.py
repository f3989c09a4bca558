"""Builds the wheel, and installs it and the sources where there is no compiler: `make wheel`.

    make wheel        # the wheel is in dist/ then

1. Build the wheel with the extension; the build fails without it.
2. It has every file of data of the package. Install it into a fresh environment in which no compiler can be
   found. `llmtap --version` must say `native`, a shipped table of a dialect and a user's one must read an
   answer, and a stream through the tap must be measured with the compiled implementation.
3. Build a wheel from the source distribution without a compiler, in a folder where an earlier build left the
   extension, and install it into another such environment. Its name must be that of any platform, and
   everything must say `python`.

Exits 1 and names what is wrong. About 3 minutes, most of them for packages. Standard library only.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from parts.script import LOGS, REPOSITORY, ROOT, carry_out, phase
from parts.servers import Failure, Server, get_json, port_free, proxy_argv, run_to_end, stream_once

HOME = ROOT / "wheel"
DIST = REPOSITORY / "dist"
RUN_S_MAX = 1_200
INSTALL_S_MAX = 600
READY_S_MAX = 60
COUNTED_S_MAX = 30
TOKENS = 20
SOURCES = {
    "_native.pyx",
    "gaps.c",
    "gaps.h",
    "gaps.pxi",
    "heads.c",
    "heads.h",
    "heads.pxi",
    "matcher.c",
    "matcher.h",
    "meter.pxi",
}

DATA = ("toml", "yaml", "csv", "html", "css", "js", "svg", "md", "pyi")
"""Kinds of files of the package that are no code."""
OLLAMA_ANSWER = b"""\
{"model":"m","message":{"role":"assistant","content":"a"},"done":false}
{"model":"m","message":{"role":"assistant","content":"b"},"done":false}
{"model":"m","message":{"role":"assistant","content":""},"done":true,"done_reason":"stop","eval_count":2}
"""
ACME_ANSWER = b"""\
data: {"acme":"text","words":"a"}

data: {"acme":"text","words":"b"}

data: {"acme":"end","used":2}

"""
ACME_TABLE = """\
name = "acme.chat"
source = "invented"
end = "done"
match = "acme"

[[rules]]
event = "text"
content = "words"

[[rules]]
event = "end"
event_class = "done"
usage = "."

[counts]
output = "used"
"""


def without_compiler(environment: Path) -> dict[str, str]:
    """Variables with which only the programs of this environment are found."""
    hidden = dict.fromkeys(("CC", "CXX", "LDSHARED"), "/nonexistent")
    return {**hidden, "PATH": str(environment / "bin"), "LLMTAP_BUILD": "", "LLMTAP_NATIVE": ""}


def make_environment(name: str) -> Path:
    environment = HOME / name
    shutil.rmtree(environment, ignore_errors=True)
    run_to_end(
        f"venv-{name}",
        [sys.executable, "-m", "venv", str(environment)],
        logs=LOGS,
        env={},
        cwd=HOME,
        limit_s=INSTALL_S_MAX,
    )
    return environment


def pip(environment: Path, name: str, *arguments: str, env: dict[str, str]) -> None:
    argv = [str(environment / "bin/python"), "-m", "pip", "--disable-pip-version-check", *arguments]
    run_to_end(name, argv, logs=LOGS, env=env, cwd=HOME, limit_s=INSTALL_S_MAX)


def build() -> tuple[Path, Path]:
    """Return the wheel and the source distribution, both new in dist/."""
    environment = make_environment("build")
    pip(environment, "wheel-tool", "install", "build", env={})
    new = HOME / "dist"
    shutil.rmtree(new, ignore_errors=True)
    # The wheel is built from the source distribution, which shows that nothing is missing in it.
    argv = [str(environment / "bin/python"), "-m", "build", "--outdir", str(new), str(REPOSITORY)]
    env = {"LLMTAP_BUILD": "native"}
    run_to_end("wheel-build", argv, logs=LOGS, env=env, cwd=HOME, limit_s=INSTALL_S_MAX)
    (wheel,), (sdist,) = new.glob("*.whl"), new.glob("*.tar.gz")
    DIST.mkdir(exist_ok=True)
    for path in DIST.glob("llmtap-*"):
        path.unlink()
    return Path(shutil.copy2(wheel, DIST)), Path(shutil.copy2(sdist, DIST))


def unpacked(sdist: Path) -> Path:
    """Return the folder of its files. Of the archive itself pip would keep the wheel and use it again."""
    folder = HOME / "sources-unpacked"
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (found,) = folder.iterdir()
    return found


def check_files(wheel: Path, sdist: Path) -> Iterator[str]:
    """The wheel has the compiled module without its sources; the source distribution has only these."""
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name for name in archive.namelist() if name.startswith("llmtap/native/")}
    print(f"  {wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB; native: {', '.join(sorted(names))}")
    if not any(name.endswith(".so") for name in names):
        yield "the wheel has no compiled module"
        data = {name for name in archive.namelist() if name.startswith("llmtap/")}
    if strays := names & SOURCES:
        yield f"the wheel has sources of the extension: {sorted(strays)}"
    # Files that are no code are read at run time: dialect tables, alert rules, pages.
    wanted = {
        str(path.relative_to(REPOSITORY))
        for kind in DATA
        for path in (REPOSITORY / "llmtap").rglob(f"*.{kind}")
    }
    print(f"  {len(wanted)} files of data")
    if missing_data := wanted - data:
        yield f"the wheel lacks {sorted(missing_data)}"
    with tarfile.open(sdist) as archive:
        names = {Path(name).name for name in archive.getnames() if "/llmtap/native/" in name}
    if missing := SOURCES - names:
        yield f"the source distribution lacks {sorted(missing)}"
    if strays := {name for name in names if name.endswith(".so")}:
        yield f"the source distribution has {sorted(strays)}"


def built_without_compiler(sdist: Path) -> Path:
    """Return the wheel of the sources, in whose `build/` a build with a compiler left the extension."""
    environment, folder = HOME / "build", unpacked(sdist)
    for compiler, env in (("with", {"LLMTAP_BUILD": "native"}), ("without", without_compiler(environment))):
        wheels = HOME / f"wheel-{compiler}"
        shutil.rmtree(wheels, ignore_errors=True)
        pip(
            environment,
            f"wheel-{compiler}-compiler",
            "wheel",
            "--no-deps",
            "--wheel-dir",
            str(wheels),
            str(folder),
            env=env,
        )
    if not any((HOME / "wheel-with").glob("*linux*.whl")):
        raise Failure("the build with a compiler made no extension")
    (wheel,) = wheels.glob("*.whl")
    return wheel


def check_installed(name: str, package: Path, expected: str) -> Iterator[str]:
    """Install the package where no compiler is, and see which implementation runs."""
    environment = make_environment(name)
    env = without_compiler(environment)
    constraints = ["--constraint", str(REPOSITORY / "constraints.txt")]
    pip(environment, f"install-{name}", "install", *constraints, str(package), env=env)
    llmtap = environment / "bin/llmtap"
    version = subprocess.run(
        [str(llmtap), "--version"], env=env, capture_output=True, text=True, timeout=READY_S_MAX, check=False
    )
    print(f"  {version.stdout.strip()}")
    if version.returncode or not version.stdout.partition("(")[2].startswith(expected):
        yield f"{name}: --version says {version.stdout + version.stderr!r}, and not {expected}"
    yield from check_dialects(name, llmtap, env)
    yield from check_stream(name, llmtap, env, expected)


def check_dialects(name: str, llmtap: Path, env: dict[str, str]) -> Iterator[str]:
    """A shipped table reads an answer, and so does a user's table."""
    for kind, argv, answer, dialect in (
        ("shipped", (), OLLAMA_ANSWER, "ollama.native"),
        ("user's", ("--dialect", "acme.toml"), ACME_ANSWER, "acme.chat"),
    ):
        folder = HOME / "dialects"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "acme.toml").write_text(ACME_TABLE)
        (folder / "answer").write_bytes(answer)
        result = subprocess.run(
            [str(llmtap), "inspect", "answer", "--json", *argv],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=READY_S_MAX,
            check=False,
        )
        found = json.loads(result.stdout) if not result.returncode else {}
        print(f"  {kind} table: {found.get('dialect')}, {found.get('tokens', {}).get('output')} tokens")
        if (found.get("dialect"), found.get("tokens", {}).get("output")) != (dialect, 2):
            yield f"{name}: the {kind} table reads {found or result.stderr!r}"


def check_stream(name: str, llmtap: Path, env: dict[str, str], expected: str) -> Iterator[str]:
    """A stream of the simulated engine passes, is measured, and relay and meter say what runs."""
    engine, listen, admin = port_free(), port_free(), port_free()
    with ExitStack() as stack:
        for what, argv, ready in (
            (
                "engine",
                [str(llmtap), "sim", "serve", "--listen", f"127.0.0.1:{engine}"],
                f"http://127.0.0.1:{engine}/health",
            ),
            ("tap", proxy_argv(llmtap, engine, listen, admin), f"http://127.0.0.1:{admin}/readyz"),
        ):
            server = Server(f"{name}-{what}", argv, logs=LOGS, env=env, cwd=HOME)
            stack.callback(server.stop)
            server.wait_ready(ready, limit_s=READY_S_MAX)
        stream_once(listen, tokens=TOKENS, prompt="Hi", headers={})
        told = wait_counted(admin)
    for who, about in {"the meter": told["meter"], **told["relays"]}.items():
        if about["implementation"] != expected:
            yield f"{name}: {who} runs {about['implementation']} ({about['implementation_reason']})"
    tokens = told["tokens"]["output"]
    print(f"  one stream through the tap, {tokens} tokens counted")
    if tokens != TOKENS:
        yield f"{name}: {tokens} tokens counted instead of {TOKENS}"


def wait_counted(admin: int) -> Any:
    """The summary, once it has the exchange."""
    give_up_at = time.monotonic() + COUNTED_S_MAX
    while time.monotonic() < give_up_at:
        told = get_json(f"http://127.0.0.1:{admin}/api/v1/summary?window=all")
        if told["outcomes"].get("complete") == 1:
            return told
        time.sleep(0.1)
    raise Failure(f"the stream was not counted within {COUNTED_S_MAX} s: {told['outcomes']}")


def run() -> list[str]:
    HOME.mkdir(parents=True, exist_ok=True)
    with phase("the wheel and the source distribution"):
        wheel, sdist = build()
        wrong = list(check_files(wheel, sdist))
    with phase("the wheel, without a compiler"):
        wrong += check_installed("wheel", wheel, "native")
    with phase("the sources, without a compiler"):
        plain = built_without_compiler(sdist)
        print(f"  {plain.name}")
        if not plain.name.endswith("-py3-none-any.whl"):
            wrong.append(f"a wheel without the extension is named for a platform: {plain.name}")
        wrong += check_installed("sources", plain, "python")
    return wrong


if __name__ == "__main__":
    sys.exit(carry_out("wheel", run, limit_s=RUN_S_MAX))
