"""The sampler against processes that know what they used: all of it is in the samples, on the right side."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import llmtap.load.monitor.system as module
from llmtap.clock import SystemClock
from llmtap.load.monitor.system import Host, ObservedProcess, SystemSampler
from tests.support.busy_child import busy_child
from tests.support.live_proxy import port_free
from tests.support.nvml import FakeGpu, FakeNvml

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
QUICK_NS = 20_000_000
UNTOLD = {"nvmlDeviceGetPowerUsage"}
NO_GPU = FakeNvml(fails="Driver Not Loaded")


def sampler(**more: Any) -> SystemSampler:
    return SystemSampler(SystemClock(), **{"sender": [], "nvml": NO_GPU, "period_ns": QUICK_NS, **more})


def wait(true: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"still not so after {seconds} s"
        time.sleep(0.005)


def used_ns(watch: SystemSampler, side: str) -> float:
    """The CPU time of all samples: each share by the time since the sample before."""
    times_ns, cpus = watch.columns.times_ns(), watch.columns.column(f"{side}_cpu")
    return sum(cpu * (times_ns[i] - times_ns[i - 1]) for i, cpu in enumerate(cpus) if cpu is not None)


def test_the_samples_hold_all_the_cpu_time_that_the_processes_used() -> None:
    with busy_child() as server, busy_child() as sender:
        watch = sampler(sender=[sender.pid], server=[server.pid])
        server_ns, sender_ns = -server.used_ns(), -sender.used_ns()
        watch.start()
        wait(lambda: len(watch.columns))
        server_ns += server.burn(0.4)
        sender_ns += sender.burn(0.1)
        watch.close()
    assert server_ns > 3 * sender_ns, "by their own clocks"
    # Each end of the row is right within a tick of user's and one of system's time.
    assert used_ns(watch, "server") == pytest.approx(server_ns, abs=4 * TICK_NS)
    assert used_ns(watch, "sender") == pytest.approx(sender_ns, abs=4 * TICK_NS)
    assert watch.columns.column("server_cpu")[0] is None, "no average before there is a second sample"
    assert min(m for m in watch.columns.column("server_memory") if m is not None) > 1 << 20


def test_a_server_below_the_sender_is_the_servers() -> None:
    with busy_child() as server:
        watch = sampler(sender=[os.getpid()], server=[server.pid])
        watch.start()
        wait(lambda: len(watch.columns) > 1)
        watch.close()
    sides = {side: {p["pid"] for p in told} for side, told in watch.about()["processes"].items()}
    assert sides["server"] == {server.pid}
    assert os.getpid() in sides["sender"] and server.pid not in sides["sender"]


LISTEN = """
import socket, sys
sys.stdin.readline()
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
sys.stdin.read()
"""


def test_the_server_is_found_by_its_port_once_it_listens() -> None:
    port = port_free()
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        watch = sampler(sender=[os.getpid()], target=("127.0.0.1", port))
        watch.start()
        wait(lambda: len(watch.columns) > 1)
        assert watch.about()["why_not"]["server"] == f"nobody listens on port {port}"
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "up\n"
        wait(lambda: "server_cpu" in watch.columns.latest())
        watch.close()
        child.stdin.close()
    about = watch.about()
    assert [p["pid"] for p in about["processes"]["server"]] == [child.pid]
    assert "server" not in about["why_not"]
    # Before it was there its figures are not 0 but unknown.
    assert watch.columns.column("server_memory")[0] is None


def test_nobody_is_looked_for_no_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def nobody(host: str, port: int) -> tuple[list[int], str]:
        asked.append((host, port))
        return [], "nobody listens on port 1"

    monkeypatch.setattr(module, "listeners", nobody)
    monkeypatch.setattr(module, "_SEARCHES_MAX", 3)
    watch = sampler(target=("127.0.0.1", 1))
    watch.start()
    wait(lambda: len(watch.columns) > 5)
    watch.close()
    assert asked == [("127.0.0.1", 1)] * 3
    assert watch.about()["why_not"]["server"] == "nobody listens on port 1"


def test_a_server_in_the_senders_own_process_is_not_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        watch = sampler(sender=[os.getpid()], target=server.getsockname())
        watch.start()
        wait(lambda: len(watch.columns))
        watch.close()
    about = watch.about()
    assert about["why_not"]["server"] == "it is served by a process of the sender"
    assert about["processes"]["server"] == []
    assert "sender_cpu" in watch.columns.known() and "server_cpu" not in watch.columns.known()


@pytest.mark.parametrize(
    ("target", "why"),
    [(None, "no process of it was given"), (("192.0.2.1", 80), "192.0.2.1 is not a loopback address")],
)
def test_a_server_elsewhere_is_said_to_be(target: tuple[str, int] | None, why: str) -> None:
    watch = sampler(sender=[os.getpid()], target=target)
    watch.start()
    wait(lambda: len(watch.columns))
    watch.close()
    assert watch.about()["why_not"] == {"server": why, "gpu": "no NVML: Driver Not Loaded"}


def test_a_server_that_ended_is_unknown_from_then_on() -> None:
    with busy_child() as server:
        server.burn(0.1)
        watch = sampler(server=[server.pid])
        watch.start()
        wait(lambda: "server_cpu" in watch.columns.latest())
    n = len(watch.columns)
    wait(lambda: len(watch.columns) > n + 1)
    watch.close()
    assert watch.columns.column("server_cpu")[-1] is None
    assert watch.columns.column("server_memory")[-1] is None
    assert all(cpu is None or cpu >= 0 for cpu in watch.columns.column("server_cpu"))


def test_a_side_that_lost_time_with_a_process_is_unknown_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    used_s = iter([1, 3, 2, 2, 4])  # a process that nobody waited for took a second along

    def read() -> dict[int, ObservedProcess]:
        return {7: ObservedProcess(7, 1, "server", next(used_s, 4) * 1_000_000_000, 1)}

    monkeypatch.setattr(module, "read_processes", read)
    watch = sampler(server=[7])
    watch.start()
    wait(lambda: len(watch.columns) > 4)
    watch.close()
    cpus = watch.columns.column("server_cpu")[:5]
    assert [cpu if not cpu else cpu > 0 for cpu in cpus] == [None, True, None, 0, True]


def test_the_host_and_its_gpus_are_sampled() -> None:
    told, untold = FakeGpu("A", 30, 50, [100_000, 200_000], 7, 9_000), FakeGpu("B", untold=UNTOLD)
    nvml = FakeNvml(told, untold)
    watch = sampler(nvml=nvml)
    watch.start()
    wait(lambda: len(watch.columns) > 2)
    watch.close()
    latest = watch.columns.latest()
    assert {name: latest[name] for name in latest if name.startswith("gpu0")} == {
        "gpu0_utilization": 0.3, "gpu0_temperature": 50, "gpu0_power": 200, "gpu0_memory": 7,
        "gpu0_energy": 9,
    }  # fmt: skip
    assert watch.columns.column("gpu0_power")[:2] == [100.0, 200.0]
    assert "gpu1_power" not in watch.columns.known() and "gpu1_utilization" in watch.columns.known()
    assert watch.about()["gpu"] == {"devices": ["A", "B"], "unread": 0}
    assert nvml.open == 0, "NVML is closed"
    shares = [share for share in watch.columns.column("host_cpu") if share is not None]
    assert shares and all(0 <= share <= 1 for share in shares)
    assert latest["host_memory"] > 0


def test_without_a_gpu_the_run_goes_on_and_says_why() -> None:
    watch = sampler()
    watch.start()
    wait(lambda: len(watch.columns) > 1)
    watch.close()
    about = watch.about()
    assert about["gpu"] is None
    assert about["why_not"]["gpu"] == "no NVML: Driver Not Loaded"
    assert not [name for name in watch.columns.series if name.startswith("gpu")]


def test_samples_are_in_order_and_the_end_of_the_run_is_in_them() -> None:
    watch = sampler(period_ns=3_600_000_000_000)  # an hour: only the first and the last are taken
    began_ns = SystemClock().mono_ns()
    watch.start()
    wait(lambda: len(watch.columns))
    closing_ns = SystemClock().mono_ns()
    watch.close()
    watch.close()
    first_ns, last_ns = watch.columns.times_ns()
    assert began_ns <= first_ns <= closing_ns <= last_ns <= SystemClock().mono_ns()
    assert watch.about()["skipped"] == 0
    assert all(took > 0 for took in watch.columns.to_dict(0)["took"])


class Slow(FakeNvml):
    """A driver that answers when it is let."""

    def __init__(self) -> None:
        super().__init__(FakeGpu())
        self.let = threading.Event()

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu) -> Any:
        self.let.wait(20)
        return super().nvmlDeviceGetUtilizationRates(handle)


def test_samples_that_a_slow_driver_held_up_are_left_out_and_counted() -> None:
    nvml = Slow()
    watch = sampler(nvml=nvml)
    watch.start()
    time.sleep(5 * QUICK_NS / 1e9)
    assert len(watch.columns) == 0
    nvml.let.set()
    wait(lambda: len(watch.columns) > 2)
    watch.close()
    assert watch.about()["skipped"] >= 4
    # The stamp is that of the CPU times, not of the driver's answer.
    told = watch.columns.to_dict(0)
    assert told["took"][0] >= 5 * QUICK_NS / 1e9
    assert told["t"][1] - told["t"][0] >= 4 * QUICK_NS / 1e9


def test_a_driver_that_hangs_does_not_hold_the_end_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CLOSE_S_MAX", 0.05)
    nvml = Slow()
    watch = sampler(nvml=nvml)
    watch.start()
    watch.close()
    nvml.let.set()
    watch._thread.join(20)
    assert not watch._thread.is_alive()
    assert len(watch.columns) == 0, "what comes after the end is not added"


def test_what_breaks_in_a_sample_is_told_and_the_next_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    read, calls = module.read_processes, 0

    def broken() -> Any:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise RuntimeError("torn")
        return read()

    def no_host() -> Host:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module, "read_processes", broken)
    monkeypatch.setattr(module, "read_host", no_host)
    watch = sampler(sender=[os.getpid()])
    watch.start()
    wait(lambda: len(watch.columns) > 1)
    watch.close()
    why = watch.about()["why_not"]
    assert why["sampling"] == "RuntimeError: torn"
    assert why["host"] == "permission denied"
    assert "sender_cpu" in watch.columns.known() and "host_cpu" not in watch.columns.known()


def test_a_sampler_that_was_never_started_can_be_closed() -> None:
    nvml = FakeNvml(FakeGpu())
    watch = sampler(nvml=nvml)
    watch.close()
    assert (len(watch.columns), nvml.open) == (0, 0)
