"""Read the GPUs of this host through NVML (package nvidia-ml-py): utilization, memory, power and energy.

`open_gpus` returns the GPUs or why there are none; `Gpus.read` returns a reading of each. `system.py` calls
it for every sample. A value that a device does not report is None. Utilization is the share of the last
sample period (up to 1 s) in which any kernel ran. Power is an average over up to 1 s, on some models of a
quarter of the time (arXiv 2312.02741), so the energy counter is read as well.
"""

import contextlib
from importlib import import_module
from typing import Any, Final, NamedTuple

GPUS_MAX: Final = 16


class GpuReading(NamedTuple):
    utilization: float | None
    temperature_c: float | None
    power_w: float | None
    memory_used_bytes: int | None
    energy_j: float | None
    """Energy counter since the driver was loaded; from Volta on."""


class Gpus:
    def __init__(self, nvml: Any) -> None:
        """`nvml` must be initialised. Raises `nvml.NVMLError`."""
        self._nvml = nvml
        n = nvml.nvmlDeviceGetCount()
        self.names: list[str] = []
        self._handles = []
        self.unread = max(0, n - GPUS_MAX)
        for index in range(min(n, GPUS_MAX)):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = nvml.nvmlDeviceGetName(handle)
            # Older versions of the package give bytes.
            self.names.append(name.decode(errors="replace") if isinstance(name, bytes) else str(name))
            self._handles.append(handle)

    def read(self) -> list[GpuReading]:
        """Read every GPU, in the order of `names`: some ms of driver calls, or longer."""
        return [self._read(handle) for handle in self._handles]

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _read(self, handle: Any) -> GpuReading:
        nvml = self._nvml
        percent = self._ask("nvmlDeviceGetUtilizationRates", handle, of="gpu")
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", handle)
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle, of="used")
        return GpuReading(
            None if percent is None else percent / 100,
            self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            None if milliwatts is None else milliwatts / 1e3,
            None if memory is None else int(memory),
            None if millijoules is None else millijoules / 1e3,
        )

    def _ask(self, call: str, *args: Any, of: str | None = None) -> float | None:
        """Return the result of an NVML call, or a field of it; None if the device does not report it."""
        try:
            answer = getattr(self._nvml, call)(*args)
        except (self._nvml.NVMLError, AttributeError):  # an older package lacks the call
            return None
        value: float = answer if of is None else getattr(answer, of)
        return value


def open_gpus(nvml: Any = None) -> tuple[Gpus | None, str | None]:
    """Return the host's GPUs, or why there are none. `nvml`: replacement for the package in tests."""
    if nvml is None:
        try:
            nvml = import_module("pynvml")
        except ImportError:
            return None, "the package nvidia-ml-py is not installed (extra: gpu)"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as exc:
        return None, f"no NVML: {exc}"
    try:
        gpus = Gpus(nvml)
    except nvml.NVMLError as exc:
        nvml.nvmlShutdown()
        return None, f"NVML has no GPU to read: {exc}"
    if not gpus.names:
        gpus.close()
        return None, "NVML knows of no GPU"
    return gpus, None
