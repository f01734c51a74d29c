"""NVIDIA's counters by NVML, the library of the driver. By ctypes: the module pynvml is not in our environment, and does no more."""

from __future__ import annotations

import ctypes
from typing import Any

# Structs and constants: nvml.h of the CUDA toolkit.
CLOCK_SM, CLOCK_MEMORY, TEMPERATURE_GPU = 1, 2, 0


class Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))  # percent of the last sixth to one second


class Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))  # bytes


class Nvml:
    """The counters of the GPU at a PCI address. Raises OSError where the library is absent, or does not answer for this GPU."""

    def __init__(self, address: str, library: str = "libnvidia-ml.so.1") -> None:
        self.library = ctypes.CDLL(library)
        self.handle = ctypes.c_void_p()
        self._must("nvmlInit_v2")
        self._must("nvmlDeviceGetHandleByPciBusId_v2", ctypes.c_char_p(address.encode()), ctypes.byref(self.handle))

    def read(self) -> dict[str, float]:
        used, memory = self._ask("nvmlDeviceGetUtilizationRates", Utilization()), self._ask("nvmlDeviceGetMemoryInfo", Memory())
        found = {
            "gpu_utilization": used and used.gpu / 100,
            "gpu_memory_bandwidth_share": used and used.memory / 100,
            "gpu_memory_used_gb": memory and memory.used / 1e9,
            "gpu_power_w": self._number("nvmlDeviceGetPowerUsage", 1e-3),
            "gpu_temperature_c": self._number("nvmlDeviceGetTemperature", 1.0, TEMPERATURE_GPU),
            "gpu_clock_mhz": self._number("nvmlDeviceGetClockInfo", 1.0, CLOCK_SM),
            "gpu_memory_clock_mhz": self._number("nvmlDeviceGetClockInfo", 1.0, CLOCK_MEMORY),
        }
        return {key: value for key, value in found.items() if value is not None}

    def energy_j(self) -> float | None:
        """Since the driver was loaded; None before Volta."""
        found = self._ask("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong())
        return None if found is None else found.value / 1e3

    def _number(self, name: str, unit: float, *which: int) -> float | None:
        found = self._ask(name, ctypes.c_uint(), *map(ctypes.c_int, which))
        return None if found is None else found.value * unit

    def _ask(self, name: str, answer: Any, *arguments: Any) -> Any:
        """`answer`, filled; None where this GPU or driver has no such counter."""
        function = getattr(self.library, name, None)
        code = None if function is None else function(self.handle, *arguments, ctypes.byref(answer))
        return answer if code == 0 else None

    def _must(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise OSError(f"NVML's {name} answers {code}")
