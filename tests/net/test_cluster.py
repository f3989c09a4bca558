"""Which Ray is meant; what it does when there is one is in tests/sim/sweep/test_runner.py."""

import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from llmtap.errors import ConfigError
from llmtap.net import cluster
from llmtap.net.cluster import ray_cluster
from tests.support.waiting import block_until


@pytest.mark.parametrize(
    ("address", "told"),
    [
        *((there, "no Ray cluster answers at ") for there in ("127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1")),
        *((wrong, "expected auto, local") for wrong in ("somewhere", "host:", "host:port", "ray://host", "")),
    ],
)
def test_nobody_there_or_no_address(address: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())  # it is not asked
    with pytest.raises(ConfigError, match=f"--ray: {told}"), ray_cluster(address, 1):
        pass


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(ConfigError, match=r"--ray: needs the Python package ray\nhint: .*\[ray\]"),
        ray_cluster("auto", 1),
    ):
        pass


class Closed:
    """A module `ray` that is turned away, as by a cluster that wants a token."""

    def init(self, address: str, **settings: object) -> None:
        raise ConnectionError(f"Failed to connect to Ray cluster at {address}\nand more")


def test_a_cluster_that_lets_nobody_in_may_want_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", Closed())
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        answer = (
            rf"--ray: no Ray cluster answers at {address}: Failed to connect .*\nhint: .*RAY_AUTH_MODE=token"
        )
        with pytest.raises(ConfigError, match=answer), ray_cluster(address, None):
            pass


def test_where_nothing_was_found_a_token_is_no_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", Closed())
    with (
        pytest.raises(ConfigError, match="--ray: no Ray cluster answers at auto: ") as refused,
        ray_cluster("auto", None),
    ):
        pass
    assert refused.value.hint == "start a cluster with `ray start --head`, or use --ray local"


class Busy:
    """A module `ray` of a machine so busy that its node is late, so many times."""

    def __init__(self, late: int) -> None:
        self.late = late
        self.calls: list[str] = []

    def init(self, address: str, **settings: object) -> None:
        self.calls.append("init")
        if self.late:
            self.late -= 1
            raise Exception("The current node timed out during startup. This could happen\nfor reasons")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_a_ray_that_does_not_start_is_said() -> None:
    busy = Busy(2)
    with pytest.raises(
        ConfigError, match="--ray: Ray did not start on this machine in 2 attempts: The current"
    ):
        cluster._start_ray(busy, {"_temp_dir": "/folder-of-no-process"})
    assert busy.calls == ["init", "shutdown"] * 2


def test_what_ray_leaves_behind_is_ended_and_nothing_else(tmp_path: Path) -> None:
    # No shell: a bare machine may have none.
    script = "import subprocess; subprocess.run(['sleep', '600'])"
    ours, other = (
        subprocess.Popen([sys.executable, "-c", script, word]) for word in (f"--temp-dir={tmp_path}", "x")
    )
    processes = [psutil.Process(one.pid) for one in (ours, other)]
    started, kept = ([one, *block_until(one.children)] for one in processes)
    try:
        cluster._shut_down(SimpleNamespace(shutdown=lambda: None), str(tmp_path))
        assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in started)
        assert all(one.is_running() for one in kept)
    finally:
        for one in {*started, *kept}:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        ours.wait()
        other.wait()
