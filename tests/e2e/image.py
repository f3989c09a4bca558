"""The image, built by podman and started as an orchestrator starts it: `make image-check`, not `make e2e`.

The base image is made here, of Debian's packages.

Checked are what the image holds, what its processes may do, the health check, a stream through the tap to
`llmtap sim serve`, the services of compose.yaml as they stand there, and SIGTERM while a stream is under
way. Containers have loopback and nothing else. Needs root; installs podman, crun and debootstrap from Debian
where they are missing. What it makes lies in a folder that goes with it, and its mounts are seen by nobody
else. Exits 1, naming what is wrong. About 4 minutes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from parts.containers import (
    BASE,
    Podman,
    install,
    keep_mounts_apart,
    make_base,
    pod_options,
    scratch,
    service_options,
)
from parts.script import PROGRAMS, REPOSITORY, carry_out, phase
from parts.servers import Failure

IMAGE = "llmtap"  # as Containerfile and compose.yaml call it
CLIENT = PROGRAMS / "image_client.py"
DEPLOY = REPOSITORY / "deploy"
RUN_S_MAX = 1_500  # most of it is how fast packages come
READY_S_MAX = 60
TRAFFIC_S_MAX = 200
TRAFFIC_MIN = 10  # exchanges of compose.yaml's workload, before it is stopped
TOKENS = 40
TOKENS_LONG = 1_200  # some seconds, so that SIGTERM comes midway
NOBODY = "65532"
HARDENED = ["--read-only", "--read-only-tmpfs=false", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
RUN_FOLDER = "/run/llmtap"
CAPTURE_FOLDER = "/var/lib/llmtap"  # a volume of pods; elsewhere a part of the read-only root
SHARED_MEMORY = {"/dev/shm", "/dev/mqueue"}  # in every container, and in memory
OURS = ("opt/llmtap", "var/lib/llmtap", "run/llmtap")
VARIABLES = {"LLMTAP_ADMIN_TOKEN": "token-of-this-run", "LLMTAP_TENANTS_SALT": "salt-of-this-run"}
TOKEN = VARIABLES["LLMTAP_ADMIN_TOKEN"]
AS_CONTAINERFILE_SAYS = [
    f"--tmpfs={RUN_FOLDER}:mode=1777",
    "--env=LLMTAP_RELAY_UPSTREAM=http://sim:8000",
    f"--env=LLMTAP_METER_ADMIN_TOKEN={TOKEN}",
]


# ---------------------------------------------------------------- what the image says, and what it holds


def check_config(podman: Podman) -> Iterator[str]:
    (found,) = json.loads(podman.say("image", "inspect", IMAGE))
    (base,) = json.loads(podman.say("image", "inspect", BASE))
    config = found["Config"]
    print(
        f"  {found['Size'] / 1e6:.0f} MB, of which the base {base['Size'] / 1e6:.0f};"
        f" {config['Entrypoint']} {config['Cmd']} as {config['User']}"
    )
    if config["User"] != f"{NOBODY}:{NOBODY}":
        yield f"the image's user is {config['User']!r}"
    if "Healthcheck" not in found and "Healthcheck" not in config:
        yield "the image has no health check"
    if (config["Entrypoint"], config["Cmd"]) != (["llmtap"], ["proxy"]):
        yield f"the image starts {config['Entrypoint']} {config['Cmd']}"


@contextmanager
def mounted(podman: Podman, image: str) -> Iterator[Path]:
    place = Path(podman.say("image", "mount", image))
    try:
        yield place
    finally:
        podman.say("image", "umount", image)


def entries(root: Path) -> set[str]:
    """The paths of everything below, without the root's own."""
    return {
        str((Path(folder) / name).relative_to(root))
        for folder, folders, files in os.walk(root)
        for name in (*folders, *files)
    }


def check_tree(base: Path, image: Path) -> Iterator[str]:
    """What the image has on top of its base."""
    added = sorted(entries(image) - entries(base))
    strays = [path for path in added if not path.startswith(OURS) and "__pycache__" not in path]
    if strays:
        yield f"files of nobody's: {strays[:10]} and so on, {len(strays)} in all"
    for path in added:
        found = (image / path).lstat()
        if found.st_mode & (stat.S_ISUID | stat.S_ISGID):
            yield f"/{path} is setuid or setgid"
        if stat.S_ISLNK(found.st_mode):
            continue
        if str(found.st_uid) == NOBODY and path != "var/lib/llmtap":
            yield f"/{path} belongs to {NOBODY}, who runs it"
        if found.st_mode & stat.S_IWOTH and path != "run/llmtap":
            yield f"/{path} can be written by everybody"
    yield from check_packages(image)
    yield from check_compiler(image)
    yield from check_bytecode(image)


def check_compiler(image: Path) -> Iterator[str]:
    """The compiler of the first stage is not in the image."""
    for name in ("cc", "gcc", "as", "ld"):
        for path in image.glob(f"usr/bin/{name}"):
            yield f"/{path.relative_to(image)} is in the image"


def check_packages(image: Path) -> Iterator[str]:
    """Those of the virtual environment are the pinned ones, and none that installs others is among them."""
    rows = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = {plain(name): version for name, _, version in (row.partition("==") for row in rows)}
    infos = sorted(image.glob("opt/llmtap/lib/python3*/site-packages/*.dist-info"))
    found = dict(info.name.removesuffix(".dist-info").split("-", 1) for info in infos)
    print(f"  {len(found)} packages: {', '.join(f'{name} {version}' for name, version in found.items())}")
    for name, version in found.items():
        if plain(name) != "llmtap" and pins.get(plain(name)) != version:
            yield f"{name} {version} is not pinned so"
    for path in sorted(image.glob("opt/llmtap/bin/pip*")):
        yield f"{path.relative_to(image)} is in the image"
    if not found:
        yield "the virtual environment has no packages"


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def check_bytecode(image: Path) -> Iterator[str]:
    """Ours and the library's: what starts with a read-only root would compile it again and again."""
    places = [*image.glob("usr/lib/python3.*/os.py"), *image.glob("usr/local/lib/python3.*/os.py")]
    places += image.glob("opt/llmtap/lib/python3.*/site-packages/llmtap/__init__.py")
    for library in (place.parent for place in places):
        name = f"/{library.relative_to(image)}"
        sources = [
            path for path in library.rglob("*.py") if "-packages" not in str(path.relative_to(library))
        ]
        cold = [path for path in sources if not [*(path.parent / "__pycache__").glob(f"{path.stem}.*.pyc")]]
        print(f"  {name}: {len(sources) - len(cold)} of {len(sources)} modules compiled")
        if cold:
            yield f"{len(cold)} modules in {name} have no bytecode, such as {cold[0].name}"


# ---------------------------------------------------------------- what runs


def ask(podman: Podman, container: str, *what: str) -> list[Any]:
    """The answers of image_client.py, run in a container."""
    said = podman.say("exec", "--interactive", container, "python", "-", *what, script=CLIENT)
    return [json.loads(line) for line in said.splitlines()]


def get(podman: Podman, url: str, *token: str) -> tuple[int, str]:
    ((status, body),) = ask(podman, "sim", "get", url, *token)
    return status, body


def wait_until(what: str, limit_s: float, holds: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > give_up_at:
            raise Failure(f"{what}: not within {limit_s:.0f} s")
        time.sleep(0.2)


def wait_answer(podman: Podman, container: str, url: str) -> None:
    try:
        wait_until(f"{url} answers", READY_S_MAX, lambda: get(podman, url)[0] == 200)
    except Failure as failure:
        raise Failure(f"{failure}\n{podman.logs(container)}") from None


def check_processes(first: int, least: int) -> Iterator[str]:
    """Each process of a container has no privileges and cannot get any."""
    here = os.readlink(f"/proc/{first}/ns/pid")
    found = 0
    for folder in Path("/proc").iterdir():
        try:
            if not folder.name.isdigit() or os.readlink(folder / "ns/pid") != here:
                continue
            rows = (folder / "status").read_text().splitlines()
        except OSError:  # it has ended, or is nobody of ours
            continue
        told = {key: value.split() for key, _, value in (row.partition(":") for row in rows)}
        found += 1
        name = f"process {told['NSpid'][-1]} ({told['Name'][0]})"
        if set(told["Uid"] + told["Gid"]) != {NOBODY} or set(told["Groups"]) - {NOBODY}:
            yield f"{name} runs as {told['Uid']}, {told['Gid']}, {told['Groups']}"
        for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            if int(told[kind][0], 16):
                yield f"{name} has {kind} {told[kind][0]}"
        if (told["NoNewPrivs"], told["Seccomp"]) != (["1"], ["2"]):
            yield f"{name}: NoNewPrivs {told['NoNewPrivs'][0]}, Seccomp {told['Seccomp'][0]}"
    print(f"  {found} processes looked at: user, capabilities, no new privileges, seccomp")
    if found < least:
        yield f"{found} processes instead of {least}"


def check_writing(podman: Podman, container: str) -> Iterator[str]:
    """Where it may write, and what it has written."""
    (found,) = ask(podman, container, "writable")
    known = [
        folder
        for folder in found
        if folder in SHARED_MEMORY or folder.startswith((RUN_FOLDER, CAPTURE_FOLDER))
    ]
    print(f"  may write to {', '.join(known)}")
    if strays := sorted(found.keys() - set(known)):
        yield f"{container} may write to {len(strays)} folders more, such as {', '.join(strays[:5])}"
    for folder in SHARED_MEMORY & found.keys():
        if found[folder]:
            yield f"{container} has written {found[folder]} to {folder}"
    if not found.get(RUN_FOLDER):
        yield f"{container} has nothing in {RUN_FOLDER}, where its socket should be"


def check_tap(podman: Podman, container: str, first: int, reference: list[Any]) -> Iterator[str]:
    """A tap that has just started: probes, the health check, a stream, metrics by token, its confinement."""
    admin = "http://127.0.0.1:9464"
    wait_answer(podman, container, f"{admin}/readyz")
    health = podman.run("healthcheck", "run", container)
    if health.returncode:
        yield f"the health check says {health.returncode}: {health.stdout}{health.stderr}"
    if (answer := get(podman, f"{admin}/healthz")) != (200, "ok\n"):
        yield f"/healthz: {answer}"
    if (answer := ask(podman, "sim", "stream", "8080", str(TOKENS))) != reference:
        yield f"the stream differs: {answer} instead of {reference}"
    if (answer := get(podman, f"{admin}/metrics"))[0] != 401:
        yield f"/metrics without a token: {answer[0]}"
    wait_until(f"{container} counts the stream", READY_S_MAX, lambda: complete(podman) == 1)
    yield from check_implementation(podman)
    print(f"  healthy; a stream of {len(reference) - 1} pieces as it came from the engine, and counted")
    yield from check_processes(first, 3)
    yield from check_writing(podman, container)


def check_implementation(podman: Podman) -> Iterator[str]:
    """Relays and meter run the compiled code."""
    status, text = get(podman, "http://127.0.0.1:9464/api/v1/summary?window=all", TOKEN)
    if status != 200:
        raise Failure(f"/api/v1/summary with the token: {status} {text}")
    told = json.loads(text)
    for who, about in {"the meter": told["meter"], **told["relays"]}.items():
        if about["implementation"] != "native":
            yield f"{who} runs {about['implementation']}: {about['implementation_reason']}"


def complete(podman: Podman) -> int:
    """Exchanges that the tap has counted as complete."""
    status, text = get(podman, "http://127.0.0.1:9464/metrics", TOKEN)
    if status != 200:
        raise Failure(f"/metrics with the token: {status} {text}")
    rows = [row for row in text.splitlines() if row.startswith("llmtap_exchanges_total{")]
    return sum(int(float(row.rpartition("}")[2].split()[0])) for row in rows if 'outcome="complete"' in row)


def check_end(podman: Podman, container: str, patience_s: int) -> Iterator[str]:
    """Stops a tap while a stream is under way, which may finish."""
    argv = ["exec", "--interactive", "sim", "python", "-", "stream", "8080", str(TOKENS_LONG)]
    with CLIENT.open() as script:
        client = podman.start(*argv, stdin=script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert client.stdout is not None
    pieces = [client.stdout.readline()]
    if client.poll() is not None:
        yield f"the stream was over before SIGTERM: {pieces}"
    start = time.monotonic()
    yield from check_stopped(podman, container, patience_s, {0})
    took_s = time.monotonic() - start
    pieces += client.stdout
    code = client.wait()
    print(f"  SIGTERM: ended in {took_s:.1f} s; {len(pieces) - 1} of {TOKENS_LONG} pieces of the stream came")
    if code or len(pieces) - 1 != TOKENS_LONG or json.loads(pieces[-1]) is not None:
        yield f"the stream under way ended with {code} after {pieces[-3:]}"


def check_stopped(podman: Podman, container: str, patience_s: int, expected: set[int]) -> Iterator[str]:
    podman.say("stop", f"--time={patience_s}", container)
    code = podman.state(container)["ExitCode"]
    logs = podman.logs(container)
    if code not in expected:
        yield f"{container} ended with {code} on SIGTERM\n{logs}"
    if "Traceback" in logs:
        yield f"{container} ended badly:\n{logs}"


def run_services(podman: Podman) -> Iterator[str]:
    """The engine; the tap as Containerfile says; then as compose.yaml says, with its workload."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]

    def launch(name: str, *network: str) -> int:
        service = services[name]
        options = service_options(service, DEPLOY, VARIABLES)
        return podman.launch(name, *network, *options, IMAGE, *service["command"])

    with phase("the engine, as compose.yaml says"):
        first = launch("sim", "--network=none")
        wait_answer(podman, "sim", "http://127.0.0.1:8000/health")
        yield from check_processes(first, 1)
        test = services["sim"]["healthcheck"]["test"]
        if (done := podman.run("exec", "sim", *test[1:])).returncode:
            yield f"the engine's health check: {done.stderr}"
        if not podman.run("healthcheck", "run", "sim").returncode:
            yield "the image's health check finds a tap healthy that is not there"
        reference = ask(podman, "sim", "stream", "8000", str(TOKENS))
        if len(reference) < 3 or reference[-1] is not None:
            raise Failure(f"the engine's stream: {reference}")
    beside = "--network=container:sim"
    with phase("the tap, as its image says"):
        first = podman.launch("tap", beside, *HARDENED, *AS_CONTAINERFILE_SAYS, IMAGE)
        yield from check_tap(podman, "tap", first, reference)
        yield from check_end(podman, "tap", 45)
    with phase("the tap and its traffic, as compose.yaml says"):
        first = launch("llmtap", beside)
        yield from check_tap(podman, "llmtap", first, reference)
        launch("traffic", beside)
        wait_until("traffic", TRAFFIC_S_MAX, lambda: complete(podman) > TRAFFIC_MIN)
        print(f"  {complete(podman)} exchanges")
        yield from check_stopped(podman, "traffic", 60, {0, 128 + signal.SIGTERM})
        patience = services["llmtap"]["stop_grace_period"]
        yield from check_end(podman, "llmtap", int(patience.removesuffix("s")))
    for name in ("standalone", "sidecar"):
        with phase(f"the tap, as kubernetes/{name}.yaml says"):
            yield from run_pod(podman, name, beside, reference)
    yield from check_stopped(podman, "sim", 60, {0, 128 + signal.SIGTERM})


def run_pod(podman: Podman, name: str, network: str, reference: list[Any]) -> Iterator[str]:
    """The tap of a manifest: arguments, variables, mounts, confinement, and what is done before SIGTERM."""
    documents = list(yaml.safe_load_all((DEPLOY / f"kubernetes/{name}.yaml").read_text()))
    files = {}
    for document in (found for found in documents if found["kind"] == "ConfigMap"):
        folder = files[document["metadata"]["name"]] = podman.home / name
        folder.mkdir()
        for file, text in document["data"].items():
            (folder / file).write_text(text)
    (pod,) = (found["spec"]["template"]["spec"] for found in documents if found["kind"] == "Deployment")
    containers = [*pod.get("initContainers", ()), *pod["containers"]]
    (tap,) = (container for container in containers if container["name"] == "llmtap")
    secrets = {"token": TOKEN, "salt": VARIABLES["LLMTAP_TENANTS_SALT"]}
    options = pod_options(tap, pod["volumes"], files, secrets, {"metadata.name": f"{name}-0"})
    # Whatever the manifest's gateway is called, here it is the engine.
    options.append("--env=LLMTAP_RELAY_UPSTREAM=http://sim:8000")
    first = podman.launch(name, network, *options, IMAGE, *tap["args"])
    yield from check_tap(podman, name, first, reference)
    if "lifecycle" in tap:
        podman.say("exec", name, *tap["lifecycle"]["preStop"]["exec"]["command"])
    yield from check_end(podman, name, pod["terminationGracePeriodSeconds"])


def run() -> list[str]:
    if os.geteuid() != 0:
        raise Failure("only root can make a base image, and start containers of other users")
    with phase("podman, of Debian's packages"):
        install(["podman", "crun", "debootstrap"])
    wrong: list[str] = []
    with scratch() as home:
        podman = Podman(home, ["sim", "llmtap"])
        print("  " + podman.say("--version"))
        try:
            with phase("the base image"):
                make_base(podman)
            with phase("the image"):
                # Docker's format: OCI's has no health check.
                options = ["--format=docker", "--pull=never", "--isolation=chroot", "--network=host"]
                file = ["--file", str(DEPLOY / "Containerfile"), "--tag", IMAGE, str(REPOSITORY)]
                podman.work("image-build", "build", *options, *file)
            with phase("what it holds"):
                wrong += check_config(podman)
                with mounted(podman, BASE) as base, mounted(podman, IMAGE) as image:
                    wrong += check_tree(base, image)
            wrong += run_services(podman)
        finally:
            podman.end()
    return wrong


def main() -> int:
    if os.geteuid() == 0:
        keep_mounts_apart()
    return carry_out("image", run, limit_s=RUN_S_MAX)


if __name__ == "__main__":
    sys.exit(main())
