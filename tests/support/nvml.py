"""A stand-in for NVML's Python package (nvidia-ml-py, imported as pynvml): the calls that llmtap makes, by
their names, with their units. `tests/load/monitor/test_system.py` compares it with the package.
"""

from dataclasses import dataclass, field
from typing import Any


class NVMLError(Exception):
    """Root of what NVML raises."""


@dataclass(slots=True)
class _Utilization:
    gpu: int
    memory: int = 0


@dataclass(slots=True)
class _Memory:
    used: int
    total: int = 80 << 30
    free: int = 0


@dataclass(slots=True)
class FakeGpu:
    """A device and what it tells: percent, degrees, mW, bytes."""

    name: str | bytes = "NVIDIA Fake"
    percent: int = 50
    celsius: int = 40
    milliwatts: list[int] = field(default_factory=lambda: [300_000])
    """One after another; the last one for good."""
    used: int = 1 << 30
    untold: set[str] = field(default_factory=set)
    """Names of calls it does not support."""


class FakeNvml:
    """Injected in place of the module."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *gpus: FakeGpu, fails: str | None = None) -> None:
        """`fails`: the message of nvmlInit."""
        self.gpus = gpus
        self.fails = fails
        self.open = 0
        self.reads = 0

    def nvmlInit(self) -> None:
        if self.fails is not None:
            raise NVMLError(self.fails)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetName(self, handle: FakeGpu) -> str | bytes:
        return handle.name

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu) -> _Utilization:
        return _Utilization(self._told(handle, "nvmlDeviceGetUtilizationRates", handle.percent))

    def nvmlDeviceGetTemperature(self, handle: FakeGpu, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return int(self._told(handle, "nvmlDeviceGetTemperature", handle.celsius))

    def nvmlDeviceGetPowerUsage(self, handle: FakeGpu) -> int:
        self.reads += 1
        power = handle.milliwatts[0]
        if len(handle.milliwatts) > 1:
            del handle.milliwatts[0]
        return int(self._told(handle, "nvmlDeviceGetPowerUsage", power))

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu) -> _Memory:
        return _Memory(self._told(handle, "nvmlDeviceGetMemoryInfo", handle.used))

    def _told(self, handle: FakeGpu, call: str, value: Any) -> Any:
        if call in handle.untold:
            raise NVMLError("Not Supported")
        return value
