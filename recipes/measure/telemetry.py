"""Sample this rank's GPU during training: utilization, memory, power, temperature and clocks.

For AMD, read amdgpu's files in sysfs, as amdsmi does; for NVIDIA, use NVML through pynvml. Without
either there are no keys. For both vendors, `gpu_memory_bandwidth_share` is the share of time in
which memory was read or written.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from recipes.measure import clocks
from recipes.rank.device import device, pci_address

# The counters are means over 0.1 to 1 s; reading ten files twice a second costs under 0.1% of a
# core.
INTERVAL_S = 0.5
KWH_J = 3.6e6


class Source(Protocol):
    """Read the counters of one GPU. Missing counters are left out."""

    def read(self) -> dict[str, float]: ...

    def energy_j(self) -> float | None:
        """Return a counter of joules that only rises, or None if there is none."""


class AmdSysfs:
    """Read amdgpu's files of one GPU (kernel documentation of amdgpu)."""

    def __init__(self, address: str, sysfs: Path = Path("/sys")) -> None:
        self.address, self.sysfs = address, sysfs
        self.folder = sysfs / "bus/pci/devices" / address
        self.hwmon = next(iter(sorted(self.folder.glob("hwmon/hwmon*"))), self.folder / "hwmon")
        labels = {
            _text(path): path.name.partition("_")[0] for path in self.hwmon.glob("temp*_label")
        }
        # The junction is the hottest sensor, and throttling depends on it.
        self.temperature = labels.get("junction") or labels.get("edge") or "temp1"

    def read(self) -> dict[str, float]:
        folder, hwmon = self.folder, self.hwmon
        try:
            dies = clocks.of_device(self.address, self.sysfs)
            clock_mhz: float | None = sum(dies) / len(dies)
        except (OSError, ValueError):  # a GPU of one die
            clock_mhz = _number(1e-6, hwmon / "freq1_input")
        readings = {
            "gpu_utilization": _number(0.01, folder / "gpu_busy_percent"),
            "gpu_memory_bandwidth_share": _number(0.01, folder / "mem_busy_percent"),
            "gpu_memory_used_gb": _number(1e-9, folder / "mem_info_vram_used"),
            "gpu_gtt_used_gb": _number(1e-9, folder / "mem_info_gtt_used"),
            # MI300 and newer report only the current power.
            "gpu_power_w": _number(1e-6, hwmon / "power1_average", hwmon / "power1_input"),
            "gpu_temperature_c": _number(1e-3, hwmon / f"{self.temperature}_input"),
            "gpu_clock_mhz": clock_mhz,
            "gpu_memory_clock_mhz": _number(1e-6, hwmon / "freq2_input"),
        }
        # A partition reports its card's power, which must not be summed over ranks as energy.
        if _text(folder / "current_compute_partition") not in ("", "SPX"):
            readings["card_power_w"] = readings.pop("gpu_power_w")
        return {key: value for key, value in readings.items() if value is not None}

    def energy_j(self) -> float | None:
        return None


class Nvml:
    """Read NVIDIA's counters through pynvml."""

    def __init__(self, pynvml: Any, address: str) -> None:
        self.nvml = pynvml
        pynvml.nvmlInit()
        self.handle = pynvml.nvmlDeviceGetHandleByPciBusId(address.encode())

    def read(self) -> dict[str, float]:
        nvml, gpu = self.nvml, self.handle
        counters: dict[str, Callable[[], float]] = {
            "gpu_utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
            "gpu_memory_bandwidth_share": (
                lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).memory / 100
            ),
            "gpu_memory_used_gb": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e9,
            "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            "gpu_temperature_c": (
                lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
            ),
            "gpu_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "gpu_memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
        }
        readings = {}
        for name, counter in counters.items():
            with contextlib.suppress(nvml.NVMLError):  # this GPU has no such counter
                readings[name] = float(counter())
        return readings

    def energy_j(self) -> float | None:
        """Return the energy since the driver was loaded, or None before Volta."""
        try:
            return self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1e3
        except self.nvml.NVMLError:
            return None


class Telemetry:
    """Collect mean readings since the last `take`, and energy since `begin`."""

    def __init__(self, source: Source | None, interval_s: float = INTERVAL_S) -> None:
        self.source, self.interval_s = source, interval_s
        self.lock, self.ended = threading.Lock(), threading.Event()
        # Sum and number of samples, not a list, which would grow on ranks that never call `take`.
        self.sums: dict[str, tuple[float, int]] = {}
        self.begin()

    def begin(self, now_s: float | None = None) -> None:
        """Discard earlier samples, so that setup does not count as training.

        Energy counts from `now_s` if given, else from the first sample.
        """
        with self.lock:
            self.sums.clear()
            self.energy_j: float | None = None
            self._previous: tuple[float, float] | None = None  # time and power of the last sample
            self._counter_at_start = self.source.energy_j() if self.source else None
        if self.source and now_s is not None:
            self.sample(now_s)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Sample in a thread until the block ends."""
        if self.source is None:
            yield
            return

        def work() -> None:
            while not self.ended.wait(self.interval_s):
                self.sample(time.monotonic())

        self.sample(time.monotonic())
        thread = threading.Thread(target=work, name="telemetry", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.ended.set()
            thread.join()
            self.sample(time.monotonic())

    def take(self) -> dict[str, float]:
        """Return the means since the last call. If there was no sample since, take one now."""
        if self.source is None:
            return {}
        if not self.sums:
            self.sample(time.monotonic())
        with self.lock:
            means = {key: total / count for key, (total, count) in self.sums.items()}
            self.sums.clear()
        return {**means, **fragmentation()}

    def sample(self, now_s: float) -> None:
        """Read the counters once, at `now_s` of a monotonic clock."""
        assert self.source is not None
        readings, counter = self.source.read(), self.source.energy_j()
        with self.lock:
            for key, value in readings.items():
                total, count = self.sums.get(key, (0.0, 0))
                self.sums[key] = (total + value, count + 1)
            if self._counter_at_start is not None:
                # If the counter cannot be read now, its next value includes this time.
                if counter is not None:
                    self.energy_j = counter - self._counter_at_start
            elif (power := readings.get("gpu_power_w")) is not None:
                previous_s, previous_power = self._previous or (now_s, power)
                joules = (now_s - previous_s) * (previous_power + power) / 2
                self.energy_j = (self.energy_j or 0.0) + joules
                self._previous = (now_s, power)


def of_this_rank(vendor: str) -> Telemetry:
    """Return the telemetry of this rank's GPU, without a source for vendor `none` (the CPU)."""
    address = pci_address(device()) if vendor != "none" and torch.cuda.is_available() else None
    return Telemetry(source(address) if address else None)


def source(address: str, sysfs: Path = Path("/sys")) -> Source | None:
    """Return the source of counters for the GPU at this PCI address, or None."""
    amd = AmdSysfs(address, sysfs)
    if amd.read():
        return amd
    try:
        import pynvml  # not a dependency: vLLM's CUDA builds bring it
    except ImportError:
        return None
    try:
        return Nvml(pynvml, address)
    except pynvml.NVMLError:  # no driver, or it does not know this GPU
        return None


def fragmentation() -> dict[str, float]:
    """Return the share of torch's reserved memory that is free inside used blocks, or {}."""
    if not torch.cuda.is_available():
        return {}
    stats = torch.cuda.memory_stats()
    reserved = stats.get("reserved_bytes.all.current", 0)
    split = stats.get("inactive_split_bytes.all.current", 0)
    return {"gpu_memory_fragmentation": split / reserved} if reserved else {}


def energy(mine_j: float | None, num_tokens: float) -> dict[str, float]:
    """Return the energy of all ranks' GPUs, in total and per million tokens. Every rank must call.

    Return {} without tokens (known to the main rank), or if one GPU has no counter, because the sum
    would be too small but look plausible.
    """
    joules = [mine_j]
    if dist.is_initialized():
        joules = [None] * dist.get_world_size()
        dist.all_gather_object(joules, mine_j)
    if None in joules or not num_tokens:
        return {}
    kwh_per_million = sum(joules) / KWH_J / (num_tokens / 1e6)
    return {"energy_j": sum(joules), "energy_kwh_per_million_tokens": kwh_per_million}


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # not every GPU and driver has every file, and a busy GPU gives EBUSY
        return ""


def _number(unit: float, *files: Path) -> float | None:
    """Return the number in the first file that has one, times `unit`."""
    for file in files:
        with contextlib.suppress(ValueError):
            return float(_text(file)) * unit
    return None
