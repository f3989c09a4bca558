"""GPUs as NVML tells of them, by a stand-in with the real package's names; without NVML, a reason."""

import sys

import pytest

from llmtap.load.monitor.gpu import GPUS_MAX, GpuReading, open_gpus
from tests.support.nvml import FakeGpu, FakeNvml

CALLS = [name for name in vars(FakeNvml) if name.startswith(("nvml", "NVML"))]


def test_each_gpu_in_our_units() -> None:
    nvml = FakeNvml(
        FakeGpu("NVIDIA A", 25, 61, [123_456], 2_000, 5_500), FakeGpu(b"NVIDIA B", 100, 80, [700_000], 1, 0)
    )
    gpus, why = open_gpus(nvml)
    assert gpus is not None and why is None
    assert (gpus.names, gpus.unread, nvml.open) == (["NVIDIA A", "NVIDIA B"], 0, 1)
    assert gpus.read() == [GpuReading(0.25, 61, 123.456, 2_000, 5.5), GpuReading(1.0, 80, 700.0, 1, 0.0)]
    gpus.close()
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ("nvmlDeviceGetUtilizationRates", "utilization"),
        ("nvmlDeviceGetTemperature", "temperature_c"),
        ("nvmlDeviceGetPowerUsage", "power_w"),
        ("nvmlDeviceGetMemoryInfo", "memory_used_bytes"),
        ("nvmlDeviceGetTotalEnergyConsumption", "energy_j"),
    ],
)
def test_what_a_device_does_not_tell_is_none_and_the_rest_is_there(call: str, field: str) -> None:
    gpus, _ = open_gpus(FakeNvml(FakeGpu(untold={call})))
    (reading,) = gpus.read()
    told = {name: getattr(reading, name) for name in GpuReading._fields}
    assert [name for name, value in told.items() if value is None] == [field]


def test_more_gpus_than_the_bound_are_counted() -> None:
    gpus, _ = open_gpus(FakeNvml(*[FakeGpu()] * (GPUS_MAX + 3)))
    assert (len(gpus.names), len(gpus.read()), gpus.unread) == (GPUS_MAX, GPUS_MAX, 3)


class Broken(FakeNvml):
    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        raise self.NVMLError("GPU is lost")


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (FakeNvml(fails="Driver Not Loaded"), "no NVML: Driver Not Loaded"),
        (FakeNvml(), "NVML knows of no GPU"),
        (Broken(FakeGpu()), "NVML has no GPU to read: GPU is lost"),
    ],
)
def test_without_a_gpu_there_is_a_reason(nvml: FakeNvml, reason: str) -> None:
    assert open_gpus(nvml) == (None, reason)
    assert nvml.open == 0, "what was opened is closed"


def test_without_the_package_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_gpus() == (None, "the package nvidia-ml-py is not installed (extra: gpu)")


def test_the_stand_in_has_the_names_of_the_package() -> None:
    pynvml = pytest.importorskip("pynvml", reason="the extra `gpu` is not installed")
    assert len(CALLS) >= 11
    for name in CALLS:
        assert hasattr(pynvml, name), name
    assert pynvml.NVML_TEMPERATURE_GPU == FakeNvml.NVML_TEMPERATURE_GPU
    assert issubclass(pynvml.NVMLError, Exception)
    # On this host, whatever it has: readings, or a reason.
    gpus, why = open_gpus()
    assert (gpus is None) == (why is not None)
    if gpus is not None:
        assert len(gpus.read()) == len(gpus.names)
        gpus.close()
