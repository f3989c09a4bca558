"""Debian's podman, with all that it keeps in one scratch folder, and a base image made on the spot."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parts.script import LOGS
from parts.servers import Failure, run_to_end, tail

BASE = "python:3.11-slim"
"""By this name Containerfile's base is looked up, so what is made here has it."""
RELEASE = "bookworm"  # its Python is 3.11
# Python's headers are a part of the image that the base stands for.
IN_BASE = ("ca-certificates", "libpython3-dev", "python3", "python3-venv", "python-is-python3")
AUTHORITIES = Path("etc/ssl/certs/ca-certificates.crt")
LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
INSIDE = "LLMTAP_E2E_MOUNTS"  # set where mounts are this run's own
CGROUPS = Path("/sys/fs/cgroup")
COMMAND_S_MAX = 120
WORK_S_MAX = 900  # the base image, or the image; each a minute or two where packages come quickly
LAST_MOMENT_S = 20


def install(packages: list[str]) -> None:
    """Debian's packages, each of which has a command of its name. Raises Failure, with what apt-get said."""

    def missing() -> list[str]:
        return [package for package in packages if not shutil.which(package)]

    if not missing():
        return
    if not shutil.which("apt-get"):
        raise Failure(f"not in PATH, and no apt-get to get Debian's: {', '.join(missing())}")
    get = ["apt-get", "install", "-y", "--no-install-recommends", *missing()]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    log = LOGS / "image-install.log"
    with log.open("wb") as out:
        # The system's package lists do where they are there and fresh.
        for command in (get, ["apt-get", "update"], get):
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=env)
            if not missing():
                return
            if command[1] == "update" and done.returncode:
                break
    raise Failure(f"Debian's packages could not be installed: {', '.join(missing())}\n{tail(log)}")


def keep_mounts_apart() -> None:
    """Starts this program once more, with mounts that nobody else sees and that end with it."""
    if INSIDE in os.environ:
        # Containers are shown version 2, as on most machines; crun refuses one that has both.
        if not (CGROUPS / "cgroup.controllers").exists():
            subprocess.run(["mount", "-t", "cgroup2", "cgroup2", str(CGROUPS)], check=True)
        return
    argv = ["unshare", "--mount", "--propagation=private", sys.executable, *sys.argv]
    os.execvpe(argv[0], argv, {**os.environ, INSIDE: "1"})


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards, with every mount below it. /var/tmp: gigabytes, on a disk."""
    home = Path(tempfile.mkdtemp(prefix="llmtap-image-", dir="/var/tmp"))
    try:
        yield home
    finally:
        for place in reversed(mounts_below(home)):
            subprocess.run(["umount", str(place)], stderr=subprocess.DEVNULL)
        # Never delete through a mount: behind it may be something of this machine's.
        if left := mounts_below(home):
            raise Failure(f"still mounted, so {home} was left as it is: {', '.join(map(str, left))}")
        shutil.rmtree(home)


def mounts_below(home: Path) -> list[Path]:
    """In the order in which they were made."""
    rows = Path("/proc/self/mountinfo").read_text().splitlines()
    places = [Path(row.split()[4]) for row in rows]
    return [place for place in places if place.is_relative_to(home)]


class Podman:
    """The engine, with settings, images and containers of this run alone."""

    def __init__(self, home: Path, names: list[str]) -> None:
        """`names` are found at 127.0.0.1 in every container, for containers that share a network."""
        self.home = home
        (home / "tmp").mkdir()
        (home / "hosts").write_text("".join(f"127.0.0.1 {name}\n" for name in ["localhost", *names]))
        # Locks in files: those in shared memory would be one set with the machine's own podman.
        (home / "containers.conf").write_text(
            '[containers]\nhttp_proxy = false\nlog_driver = "k8s-file"\n'
            f'base_hosts_file = "{home / "hosts"}"\n'
            '[engine]\nruntime = "crun"\ncgroup_manager = "cgroupfs"\n'
            f'events_logger = "file"\nlock_type = "file"\ntmp_dir = "{home / "libpod"}"\n'
        )
        (home / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{home / "images"}"\nrunroot = "{home / "run"}"\n'
        )
        self._env = {
            **os.environ,
            "CONTAINERS_CONF": str(home / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(home / "storage.conf"),
            "TMPDIR": str(home / "tmp"),
            # There is no systemd to call health checks; who wants one runs it.
            "DISABLE_HC_SYSTEMD": "true",
        }
        self._names: list[str] = []
        self._pids: set[int] = set()

    def start(self, *args: str, **pipes: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(["podman", *args], env=self._env, text=True, **pipes)

    def run(self, *args: str, script: Path | None = None) -> subprocess.CompletedProcess[str]:
        """To its end; `script` becomes its stdin. Raises Failure where that does not come."""
        with open(script or os.devnull) as source:
            try:
                return subprocess.run(
                    ["podman", *args],
                    env=self._env,
                    text=True,
                    stdin=source,
                    capture_output=True,
                    timeout=COMMAND_S_MAX,
                )
            except subprocess.TimeoutExpired:
                raise Failure(f"podman {' '.join(args)} took over {COMMAND_S_MAX} s") from None

    def say(self, *args: str, script: Path | None = None) -> str:
        """What it prints. Raises Failure where it fails."""
        done = self.run(*args, script=script)
        if done.returncode:
            raise Failure(f"podman {' '.join(args)} ended with {done.returncode}\n{done.stderr.strip()}")
        return done.stdout.strip()

    def work(self, name: str, *args: str) -> None:
        """What takes longer: into the log of that name. Raises Failure, with its end."""
        run_to_end(name, ["podman", *args], logs=LOGS, env=self._env, cwd=self.home, limit_s=WORK_S_MAX)

    def launch(self, name: str, *args: str) -> int:
        """A container in the background; returns the pid of its first process."""
        # Podman's defaults are higher than what root may give where it is confined itself.
        files, processes = (resource.getrlimit(kind)[1] for kind in LIMITS)
        processes = min(processes, int(Path("/proc/sys/kernel/pid_max").read_text()))
        # Docker and Kubernetes add no line to /etc/passwd.
        options = ["--pull=never", "--cgroups=disabled", "--passwd=false"]
        options += [f"--ulimit=nofile={files}:{files}", f"--ulimit=nproc={processes}:{processes}"]
        self._names.append(name)
        self.say("run", "--detach", "--name", name, *options, *args)
        state = self.state(name)
        self._pids |= {state["Pid"], state["ConmonPid"]}
        return state["Pid"]

    def state(self, name: str) -> dict[str, Any]:
        return json.loads(self.say("inspect", "--format", "{{json .State}}", name))

    def logs(self, name: str) -> str:
        done = self.run("logs", name)
        return done.stdout + done.stderr

    def end(self) -> None:
        """Removes all containers, and sees to it that nothing of them runs on."""
        for name in reversed(self._names):  # a network's owner can't go before its guests
            self.run("rm", "--force", "--time=0", name)
        self.run("image", "umount", "--all")
        give_up_at = time.monotonic() + LAST_MOMENT_S
        while time.monotonic() < give_up_at and any(map(lives, self._pids)):
            time.sleep(0.05)
        for pid in filter(lives, self._pids):
            os.kill(pid, signal.SIGKILL)


def lives(pid: int) -> bool:
    return pid > 0 and Path(f"/proc/{pid}").exists()


def make_base(podman: Podman) -> None:
    """Debian with its own Python, by debootstrap, under the name of the image that it stands for."""
    home = podman.home
    root = home / "base"
    argv = ["debootstrap", "--variant=minbase", f"--include={','.join(IN_BASE)}", RELEASE, str(root)]
    run_to_end("image-debootstrap", argv, logs=LOGS, env={}, cwd=home, limit_s=WORK_S_MAX)
    # The image that this stands for has no bytecode of Python's library, either.
    for cache in [*(root / "usr/lib").glob("python3*/**/__pycache__")]:
        shutil.rmtree(cache, ignore_errors=True)
    # The mount point of what every container gets; without it, it would count as the image's.
    (root / "etc/hosts").touch()
    # pip is to reach its index as it does on this machine.
    if (Path("/") / AUTHORITIES).exists():
        shutil.copyfile(Path("/") / AUTHORITIES, root / AUTHORITIES)
    settings = ["[global]", f"cert = /{AUTHORITIES}"]
    if index := os.environ.get("PIP_INDEX_URL"):
        settings.append(f"index-url = {index}")
    (root / "etc/pip.conf").write_text("\n".join(settings) + "\n")
    left_out = [
        f"--exclude=./{place}/*" for place in ("dev", "proc", "sys", "var/cache/apt", "var/lib/apt/lists")
    ]
    tar = ["tar", "--numeric-owner", *left_out, "-C", str(root), "-cf", str(home / "base.tar"), "."]
    subprocess.run(tar, check=True)
    path = "ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
    podman.work("image-base", "import", "--change", path, str(home / "base.tar"), BASE)
    (home / "base.tar").unlink()
    shutil.rmtree(root)


def service_options(service: Mapping[str, Any], folder: Path, variables: Mapping[str, str]) -> list[str]:
    """How `podman run` says what a service of compose.yaml says; without image, command, network, limits."""

    def expand(text: object) -> str:
        return re.sub(r"\$\{(\w+):[-?]([^}]*)\}", lambda found: variables.get(found[1], found[2]), str(text))

    options = ["--read-only", "--read-only-tmpfs=false"] if service.get("read_only") else []
    options += [f"--cap-drop={name}" for name in service.get("cap_drop", ())]
    options += [f"--security-opt={text}" for text in service.get("security_opt", ())]
    options += [f"--tmpfs={text}" for text in service.get("tmpfs", ())]
    options += [f"--env={name}={expand(text)}" for name, text in service.get("environment", {}).items()]
    for volume in service.get("volumes", ()):
        source, _, rest = volume.partition(":")
        options.append(f"--volume={(folder / source).resolve()}:{rest}")
    return options


def pod_options(
    container: Mapping[str, Any],
    volumes: list[Any],
    files: Mapping[str, Path],
    secrets: Mapping[str, str],
    fields: Mapping[str, str],
) -> list[str]:
    """The same of a container in a pod.

    `files`: the folder of each ConfigMap; `secrets`: values by key; `fields`: what the downward API tells.
    """
    security = container["securityContext"]
    options = [f"--cap-drop={name}" for name in security["capabilities"]["drop"]]
    options.append(f"--user={security['runAsUser']}:{security.get('runAsGroup', security['runAsUser'])}")
    if security["readOnlyRootFilesystem"]:
        options += ["--read-only", "--read-only-tmpfs=false"]
    if not security["allowPrivilegeEscalation"]:
        options.append("--security-opt=no-new-privileges")
    known: dict[str, str] = {}
    for variable in container.get("env", ()):
        source = variable.get("valueFrom", {})
        if secret := source.get("secretKeyRef"):
            if secret.get("optional") and secret["key"] not in secrets:
                continue
            value = secrets[secret["key"]]
        elif source:
            value = fields[source["fieldRef"]["fieldPath"]]
        else:
            value = re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], variable["value"])
        known[variable["name"]] = value
    options += [f"--env={name}={value}" for name, value in known.items()]
    sources = {volume["name"]: volume for volume in volumes}
    for mount in container["volumeMounts"]:
        source, place = sources[mount["name"]], mount["mountPath"]
        if "configMap" in source:
            options.append(f"--volume={files[source['configMap']['name']]}:{place}:ro")
        else:
            size = source["emptyDir"]["sizeLimit"].removesuffix("i").lower()
            options.append(f"--tmpfs={place}:mode=0777,size={size}")
    return options
