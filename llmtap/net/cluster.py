"""Connect to a Ray cluster, or start a local one, for `--ray` of `llmtap replay` and `llmtap sim run`.

`ray_cluster` yields the connected module `ray`; the callers run their tasks on it.
"""

import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import psutil

import llmtap
from llmtap.errors import ConfigError, install_hint

_CONNECT_S: Final = 5.0
_START_ATTEMPTS: Final = 2
_KILL_S: Final = 30.0
_LOOPBACK: Final = "127.0.0.1"
_OBJECT_STORE_BYTES: Final = 256 << 20
"""Size of the object store of a local Ray. A million requests take 24 MB, and bodies are sent in pieces."""
_TOKEN_HINT: Final = "if the cluster requires a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
"""Without RAY_AUTH_MODE, Ray 2.60 does not send the token to a cluster that it did not start."""


@contextmanager
def ray_cluster(address: str, workers: int | None) -> Iterator[Any]:
    """Yield the module `ray`, connected to the cluster at `auto`, `HOST:6379` or `ray://HOST:10001`.

    llmtap must be installed on the nodes of the cluster. `local` starts a cluster with `workers` CPUs on this
    machine's loopback, and ends it afterwards. Raises ConfigError about `--ray`.
    """
    # Switch off Ray's usage reports, before the import: Ray and its processes read the variable then.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local = address == "local"
    if local:
        # The value 0 makes the node listen on 127.0.0.1 only. Any program that reaches its ports can run
        # code, so set a token. Without it, Ray would store a token of its own in the home folder.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        import ray
    except ImportError:
        raise ConfigError("--ray", "needs the Python package ray", install_hint("ray")) from None
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if not local:
        _check_reachable(address)
        try:
            with _keep_signal_handler():
                ray.init(address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as exc:
            # A process listens at the address, so it has possibly refused the token. Ray reports this only in
            # its log.
            hint = _TOKEN_HINT if isinstance(exc, ConnectionError) else "check the log of the cluster"
            if address == "auto":
                hint = "start a cluster with `ray start --head`, or use --ray local"
            raise ConfigError("--ray", f"no Ray cluster answers at {address}: {_reason(exc)}", hint) from None
        try:
            yield ray
        finally:
            ray.shutdown()
        return
    with TemporaryDirectory(prefix="llmtap-ray-") as folder:
        # Let Ray's processes import llmtap from the same folder as this process, even if it is not installed.
        settings = quiet | {
            "num_cpus": workers or os.cpu_count(),
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "_temp_dir": folder,
            "runtime_env": {"env_vars": {"PYTHONPATH": _import_path()}},
        }
        try:
            with _on_loopback_only(ray):
                _start_ray(ray, settings)
            yield ray
        finally:
            _shut_down(ray, folder)


@contextmanager
def _on_loopback_only(ray: Any) -> Iterator[None]:
    """Make Ray start on loopback, even if it was imported before the environment variable was set.

    Raises ConfigError if Ray listens on other addresses.
    """
    constants = ray._private.ray_constants
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
    addresses = {node["NodeManagerAddress"] for node in ray.nodes()}
    if addresses != {_LOOPBACK}:
        raise ConfigError(
            "--ray",
            f"Ray would listen on {', '.join(sorted(addresses))}, and not only on loopback",
            "start a cluster with `ray start --head`, and use --ray auto",
        )


def _start_ray(ray: Any, settings: dict[str, Any]) -> None:
    """Start Ray. Try a second time, because a start on a busy machine can exceed Ray's limit of 30 s. Raises
    ConfigError."""
    message = ""
    for _ in range(_START_ATTEMPTS):
        try:
            with _keep_signal_handler():
                ray.init("local", **settings)
            return
        except Exception as exc:  # after a time-out, Ray raises Exception itself, and no subclass
            message = _reason(exc)
            _shut_down(ray, settings["_temp_dir"])
    problem = f"Ray did not start on this machine in {_START_ATTEMPTS} attempts: {message}"
    raise ConfigError("--ray", problem, "start a cluster with `ray start --head`, and use --ray auto")


def _reason(exc: Exception) -> str:
    """Return the first line of an error's text, or the name of its class if it has no text."""
    return next(iter(str(exc).splitlines()), type(exc).__name__)


def _shut_down(ray: Any, folder: str) -> None:
    """End the Ray that this process started, and its remaining processes: Ray kills its node after a second,
    but workers that are just starting would search for the node for minutes."""
    processes = _ray_processes(folder)
    ray.shutdown()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_KILL_S)


def _ray_processes(folder: str) -> list[psutil.Process]:
    """Return the processes of the Ray that was started with this folder."""
    processes: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if any(folder in argument for argument in child.cmdline()):
                processes += [child, *child.children(recursive=True)]
    return processes


@contextmanager
def _keep_signal_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    stopped = False
    try:
        yield
    except SystemExit:
        stopped = True
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        if stopped:
            signal.raise_signal(signal.SIGTERM)


def _check_reachable(address: str) -> None:
    """Raise ConfigError if no process listens at `address`: Ray itself would retry for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        if address != "auto":
            raise ConfigError("--ray", f"expected auto, local, HOST:PORT or ray://HOST:PORT, got {address!r}")
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as exc:
        hint = "check the address, or use --ray local"
        raise ConfigError("--ray", f"no Ray cluster answers at {address}: {exc}", hint) from None


def _import_path() -> str:
    """Return the import path for Ray's processes: that of this process, with llmtap's folder first."""
    root = str(Path(llmtap.__file__).resolve().parents[1])
    return os.pathsep.join(dict.fromkeys([root, *(path for path in sys.path if path)]))
