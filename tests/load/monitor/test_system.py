"""The sampler against processes that know what they used: all of it is in the samples, on the right side."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import llmtap.load.monitor.system as module
from llmtap.clock import SystemClock
from llmtap.load.monitor.system import (
    GPUS_MAX,
    Host,
    ObservedProcess,
    SystemSampler,
    groups_of,
    is_loopback,
    listening_pids,
    open_gpus,
)
from llmtap.load.monitor.timeseries import SampledGpus
from tests.support.nvml import FakeGpu, FakeNvml
from tests.support.waiting import block_until

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
QUICK_NS = 20_000_000
UNTOLD = {"nvmlDeviceGetPowerUsage"}
NO_GPU = FakeNvml(fails="Driver Not Loaded")


def sampler(**more: Any) -> SystemSampler:
    return SystemSampler(SystemClock(), **{"sender": [], "nvml": NO_GPU, "period_ns": QUICK_NS, **more})


PROGRAM = """
import sys, time
for line in sys.stdin:
    end = time.process_time() + float(line)
    while time.process_time() < end:
        pass
    print(time.process_time_ns(), flush=True)
"""


class BusyChild:
    """A process that uses CPU time when it is told to, and none between two words."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.pid = process.pid

    def burn(self, cpu_s: float) -> int:
        """Use so much; return what it has used since it began, by its own clock."""
        self._process.stdin.write(f"{cpu_s}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def busy_child() -> Iterator[BusyChild]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield BusyChild(process)
        finally:
            process.kill()


def used_ns(watch: SystemSampler, side: str) -> float:
    """The CPU time of all samples: each share by the time since the sample before."""
    times_ns, cpus = watch.columns.times_ns(), watch.columns.column(f"{side}_cpu")
    return sum(cpu * (times_ns[i] - times_ns[i - 1]) for i, cpu in enumerate(cpus) if cpu is not None)


def test_the_samples_hold_all_the_cpu_time_that_the_processes_used() -> None:
    with busy_child() as server, busy_child() as sender:
        watch = sampler(sender=[sender.pid], server=[server.pid])
        server_ns, sender_ns = -server.burn(0), -sender.burn(0)
        watch.start()
        block_until(lambda: len(watch.columns))
        server_ns += server.burn(0.4)
        sender_ns += sender.burn(0.1)
        watch.close()
    assert server_ns > 3 * sender_ns, "by their own clocks"
    # Each end of the row is right within a tick of user's and one of system's time.
    assert used_ns(watch, "server") == pytest.approx(server_ns, abs=4 * TICK_NS)
    assert used_ns(watch, "sender") == pytest.approx(sender_ns, abs=4 * TICK_NS)
    assert watch.columns.column("server_cpu")[0] is None, "no average before there is a second sample"
    assert min(m for m in watch.columns.column("server_memory") if m is not None) > 1 << 20


def test_the_server_is_found_by_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with busy_child() as child:
        monkeypatch.setattr(module, "listening_pids", lambda *at: ([child.pid], None))
        watch = sampler(sender=[os.getpid()], target=("127.0.0.1", 8_080))
        watch.start()
        block_until(lambda: "server_cpu" in watch.columns.latest())
        watch.close()
    report = watch.report()
    assert [p.pid for p in report.processes["server"]] == [child.pid]
    assert "server" not in report.why_not


def test_a_server_in_the_senders_own_process_is_not_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        watch = sampler(sender=[os.getpid()], target=server.getsockname())
        watch.start()
        block_until(lambda: len(watch.columns))
        watch.close()
    report = watch.report()
    assert report.why_not["server"] == "the target is served by a process of the sender"
    assert report.processes["server"] == []
    assert "sender_cpu" in watch.columns.known_series() and "server_cpu" not in watch.columns.known_series()


def test_a_side_that_lost_time_with_a_process_is_unknown_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    used_s = iter([1, 3, 2, 2, 4])  # a process that nobody waited for took a second along

    def read() -> dict[int, ObservedProcess]:
        return {7: ObservedProcess(7, 1, "server", next(used_s, 4) * 1_000_000_000, 1)}

    monkeypatch.setattr(module, "read_processes", read)
    watch = sampler(server=[7])
    watch.start()
    block_until(lambda: len(watch.columns) > 4)
    watch.close()
    cpus = watch.columns.column("server_cpu")[:5]
    assert [cpu if not cpu else cpu > 0 for cpu in cpus] == [None, True, None, 0, True]


def test_the_host_and_its_gpus_are_sampled() -> None:
    told, untold = FakeGpu("A", 30, 50, [100_000, 200_000], 7), FakeGpu("B", untold=UNTOLD)
    nvml = FakeNvml(told, untold)
    watch = sampler(nvml=nvml)
    watch.start()
    block_until(lambda: len(watch.columns) > 2)
    watch.close()
    latest = watch.columns.latest()
    assert {name: latest[name] for name in latest if name.startswith("gpu0")} == {
        "gpu0_utilization": 0.3,
        "gpu0_temperature": 50,
        "gpu0_power": 200,
        "gpu0_memory": 7,
    }
    assert watch.columns.column("gpu0_power")[:2] == [100.0, 200.0]
    assert (
        "gpu1_power" not in watch.columns.known_series()
        and "gpu1_utilization" in watch.columns.known_series()
    )
    assert watch.report().gpu == SampledGpus(["A", "B"], 0)
    assert nvml.open == 0, "NVML is closed"
    shares = [share for share in watch.columns.column("host_cpu") if share is not None]
    assert shares and all(0 <= share <= 1 for share in shares)
    assert latest["host_memory"] > 0


class Slow(FakeNvml):
    def __init__(self) -> None:
        super().__init__(FakeGpu())
        self.asked, self.let = threading.Event(), threading.Event()

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu) -> Any:
        self.asked.set()
        self.let.wait(20)
        return super().nvmlDeviceGetUtilizationRates(handle)


def test_samples_that_a_slow_driver_held_up_are_left_out_and_counted() -> None:
    nvml = Slow()
    watch = sampler(nvml=nvml)
    watch.start()
    assert nvml.asked.wait(60)
    time.sleep(5 * QUICK_NS / 1e9)
    assert len(watch.columns) == 0
    nvml.let.set()
    block_until(lambda: len(watch.columns) > 2)
    watch.close()
    assert watch.report().skipped >= 4
    # The stamp is that of the CPU times, not of the driver's answer.
    told = watch.columns.samples(0)
    assert told.took[0] >= 5 * QUICK_NS / 1e9
    assert told.t[1] - told.t[0] >= 4 * QUICK_NS / 1e9


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
    block_until(lambda: len(watch.columns) > 1)
    watch.close()
    why = watch.report().why_not
    assert why["sampling"] == "RuntimeError: torn"
    assert why["host"] == "permission denied"
    assert "sender_cpu" in watch.columns.known_series() and "host_cpu" not in watch.columns.known_series()


def tree(*links: tuple[int, int]) -> dict[int, ObservedProcess]:
    return {pid: ObservedProcess(pid, parent, f"p{pid}", pid * 100, pid) for pid, parent in links}


@pytest.mark.parametrize(
    ("links", "roots", "expected"),
    [
        # The nearest root wins: a server that the sender has started, and one below it again.
        (
            [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (9, 1)],
            {2: "sender", 3: "server", 5: "sender"},
            {"sender": {2, 5}, "server": {3, 4}},
        ),
        # Several roots of one side, one inside the other: once each.
        ([(2, 1), (3, 2), (4, 3)], {2: "sender", 3: "sender"}, {"sender": {2, 3, 4}}),
        # A root or a parent that has gone; a parent of itself; a ring, as a torn reading may show.
        ([(2, 55), (3, 3)], {4: "sender"}, {"sender": set()}),
        ([(2, 3), (3, 2), (4, 2)], {3: "sender"}, {"sender": {2, 3, 4}}),
    ],
)
def test_each_process_belongs_to_its_nearest_root(
    links: list[tuple[int, int]], roots: dict[int, str], expected: dict[str, set[int]]
) -> None:
    groups = groups_of(tree(*links), roots)
    assert {name: {process.pid for process in group} for name, group in groups.items()} == expected


@pytest.mark.parametrize(
    ("address", "hosts"), [("127.0.0.1", ("127.0.0.1", "localhost")), ("::", ("::1", "localhost"))]
)
def test_who_listens_on_loopback_is_found(address: str, hosts: tuple[str, str]) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError as exc:
        pytest.skip(f"this host has no {family.name}: {exc}")
    with server:
        port = server.getsockname()[1]
        assert [listening_pids(host, port) for host in hosts] == [([os.getpid()], None)] * 2


def listening(address: str, pid: int | None, status: str = psutil.CONN_LISTEN) -> Any:
    return SimpleNamespace(status=status, laddr=SimpleNamespace(ip=address, port=8_080), pid=pid)


@pytest.mark.parametrize(
    ("host", "holders"),
    [("127.0.0.1", [11, 44]), ("::1", [55]), ("[::1]", [55]), ("localhost", [11, 44, 55]), ("127.0.0.2", [])],
)
def test_only_sockets_that_the_target_reaches(
    monkeypatch: pytest.MonkeyPatch, host: str, holders: list[int]
) -> None:
    sockets = [
        listening("::ffff:127.0.0.1", 44),
        listening("127.0.0.1", 11),
        listening("192.168.0.2", 22),
        listening("127.0.0.1", 33, psutil.CONN_ESTABLISHED),
        listening("::1", 55),
    ]
    monkeypatch.setattr(psutil, "net_connections", lambda kind: sockets)
    found, why = listening_pids(host, 8_080)
    assert (found, why is None) == (holders, bool(holders))


def test_a_listener_that_is_hidden_is_told_from_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_connections", lambda kind: [listening("0.0.0.0", None)])
    hidden = "the process that listens on port 8080 is hidden from this user"
    assert listening_pids("127.0.0.1", 8_080) == ([], hidden)
    assert listening_pids("127.0.0.1", 81) == ([], "no process listens on port 81")


@pytest.mark.parametrize(
    ("host", "is_"),
    [("127.8.0.1", True), ("[::1]", True), ("10.0.0.1", False), ("", False), ("localhost.test", False)],
)
def test_what_is_loopback(host: str, is_: bool) -> None:
    assert is_loopback(host) is is_
    if not is_:
        assert listening_pids(host, 80) == ([], f"{host} is not a loopback address")


CALLS = [name for name in vars(FakeNvml) if name.startswith(("nvml", "NVML"))]


def test_each_gpu_in_our_units() -> None:
    gpus, why = open_gpus(FakeNvml(FakeGpu("NVIDIA A", 25, 61, [123_456], 2_000), *[FakeGpu()] * 19))
    assert gpus is not None and why is None
    assert len(gpus.names) == GPUS_MAX
    read = gpus.read()
    assert read.keys() == gpus.series().keys()
    assert [read[f"gpu0_{name}"] for name in ("utilization", "temperature", "power", "memory")] == [
        0.25,
        61,
        123.456,
        2_000,
    ]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("nvmlDeviceGetUtilizationRates", "utilization"),
        ("nvmlDeviceGetTemperature", "temperature"),
        ("nvmlDeviceGetPowerUsage", "power"),
        ("nvmlDeviceGetMemoryInfo", "memory"),
    ],
)
def test_what_a_device_does_not_tell_is_none_and_the_rest_is_there(call: str, name: str) -> None:
    gpus, _ = open_gpus(FakeNvml(FakeGpu(untold={call})))
    assert gpus is not None
    assert [one for one, value in gpus.read().items() if value is None] == [f"gpu0_{name}"]


class Broken(FakeNvml):
    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        raise self.NVMLError("GPU is lost")


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (FakeNvml(fails="Driver Not Loaded"), "NVML is not available: Driver Not Loaded"),
        (FakeNvml(), "NVML reports no GPU"),
        (Broken(FakeGpu()), "NVML is not available: GPU is lost"),
    ],
)
def test_without_a_gpu_there_is_a_reason(nvml: FakeNvml, reason: str) -> None:
    assert open_gpus(nvml) == (None, reason)


def test_without_the_package_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_gpus() == (None, "the package nvidia-ml-py is not installed (extra: gpu)")


def test_the_stand_in_has_the_names_of_the_package() -> None:
    pynvml = pytest.importorskip("pynvml", reason="the extra `gpu` is not installed")
    assert len(CALLS) >= 10
    for name in CALLS:
        assert hasattr(pynvml, name), name
    assert pynvml.NVML_TEMPERATURE_GPU == FakeNvml.NVML_TEMPERATURE_GPU
    assert issubclass(pynvml.NVMLError, Exception)
    # Every host gives readings, or a reason why there are none.
    gpus, why = open_gpus()
    assert (gpus is None) == (why is not None)
    if gpus is not None:
        assert gpus.read().keys() == gpus.series().keys()
        gpus.close()
