"""Sample this rank's GPU during training: utilization, memory, power, temperature and clocks.

For AMD, read amdgpu's files in sysfs, as amdsmi does. For NVIDIA, use NVML through pynvml. Without
these sources, metrics.jsonl has none of these readings. `gpu_memory_bandwidth_share` is the share
of the peak bandwidth on BANDWIDTH_GPUS, and elsewhere of the time that memory was read or written.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from recipes.measure import clocks
from recipes.rank.device import device, pci_address

# GPUs whose driver fills mem_busy_percent with DramBandwidthUtilization, the share of the peak
# (Linux, drivers/gpu/drm/amd/pm/swsmu/smu13/smu_v13_0_6_ppt.c and smu_v13_0_12_ppt.c).
BANDWIDTH_GPUS = ("gfx942", "gfx950")
# Counters are means over 0.1 to 1 s. Reading ten files twice a second takes under 0.1% of a core.
INTERVAL_S = 0.5
KWH_J = 3.6e6
# Reads the counters that a GPU has. `energy_j`, which only rises, is not logged.
Read = Callable[[], dict[str, float]]


def amd(address: str, sysfs: Path = Path("/sys")) -> Read:
    """Return a reader of a GPU's sysfs files, as Linux's documentation of amdgpu describes them."""
    folder = sysfs / "bus/pci/devices" / address
    hwmon = next(iter(sorted(folder.glob("hwmon/hwmon*"))), folder / "hwmon")
    labels = {_text(path): path.name.partition("_")[0] for path in hwmon.glob("temp*_label")}
    # The junction is the hottest sensor, so it determines throttling.
    temperature = labels.get("junction") or labels.get("edge") or "temp1"
    # MI300 and newer report only the current power.
    power = hwmon / ("power1_average" if (hwmon / "power1_average").is_file() else "power1_input")
    # A partition reports the power of its card, which must not be summed over ranks as energy.
    is_entire_card = _text(folder / "current_compute_partition") in ("", "SPX")
    files = {
        "gpu_utilization": (folder / "gpu_busy_percent", 0.01),
        "gpu_memory_bandwidth_share": (folder / "mem_busy_percent", 0.01),
        "gpu_memory_used_gb": (folder / "mem_info_vram_used", 1e-9),
        "gpu_gtt_used_gb": (folder / "mem_info_gtt_used", 1e-9),
        "gpu_power_w" if is_entire_card else "card_power_w": (power, 1e-6),
        "gpu_temperature_c": (hwmon / f"{temperature}_input", 1e-3),
        "gpu_clock_mhz": (hwmon / "freq1_input", 1e-6),
        "gpu_memory_clock_mhz": (hwmon / "freq2_input", 1e-6),
    }

    def read() -> dict[str, float]:
        readings = {}
        for name, (file, unit) in files.items():
            with contextlib.suppress(ValueError):
                readings[name] = float(_text(file)) * unit
        with contextlib.suppress(OSError, ValueError):  # a GPU with one die
            dies = clocks.die_clocks(address, sysfs)
            readings["gpu_clock_mhz"] = sum(dies) / len(dies)
        return readings

    return read


def nvml(pynvml: Any, address: str) -> Read:
    """Return a reader of NVIDIA's counters. The energy counter needs Volta or newer."""
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByPciBusId(address.encode())
    sm, memory = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
    counters: dict[str, Callable[[], float]] = {
        "gpu_utilization": lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
        "gpu_memory_bandwidth_share": (
            lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).memory / 100
        ),
        "gpu_memory_used_gb": lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e9,
        "gpu_power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
        "gpu_temperature_c": (
            lambda: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)
        ),
        "gpu_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(gpu, sm),
        "gpu_memory_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(gpu, memory),
        "energy_j": lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3,
    }

    def read() -> dict[str, float]:
        readings = {}
        for name, counter in counters.items():
            with contextlib.suppress(pynvml.NVMLError):  # this GPU has no such counter
                readings[name] = float(counter())
        return readings

    return read


class Telemetry:
    """Collect the means of readings since the last `take`, and the energy since `begin`."""

    def __init__(self, read: Read | None, interval_s: float = INTERVAL_S) -> None:
        self.read, self.interval_s = read, interval_s
        self.lock, self.ended = threading.Lock(), threading.Event()
        # Sum and count per key. A list would grow on ranks that never call `take`.
        self.sums: dict[str, tuple[float, int]] = {}
        self.begin()

    def begin(self, now_s: float | None = None) -> None:
        """Discard earlier samples, so that setup does not count as training.

        Energy is counted from `now_s`, or from the first sample if it is None.
        """
        with self.lock:
            self.sums.clear()
            self.energy_j: float | None = None
            self._previous: tuple[float, float] | None = None  # time and power of the last sample
            self._counter_at_start: float | None = None
        if self.read and now_s is not None:
            self.sample(now_s)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Sample in a thread until the block ends."""
        if self.read is None:
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
        """Return the means since the last call. Sample now if there is no sample yet."""
        if self.read is None:
            return {}
        if not self.sums:
            self.sample(time.monotonic())
        with self.lock:
            means = {key: total / count for key, (total, count) in self.sums.items()}
            self.sums.clear()
        if torch.cuda.is_available() and (share := fragmentation(torch.cuda.memory_stats())):
            means["gpu_memory_fragmentation"] = share
        return means

    def sample(self, now_s: float) -> None:
        """Read the counters once. `now_s` is the time of a monotonic clock in seconds."""
        assert self.read is not None
        readings = self.read()
        counter = readings.pop("energy_j", None)
        with self.lock:
            for key, value in readings.items():
                total, count = self.sums.get(key, (0.0, 0))
                self.sums[key] = (total + value, count + 1)
            if counter is not None and self._previous is None:
                if self._counter_at_start is None:
                    self._counter_at_start = counter
                self.energy_j = counter - self._counter_at_start
            # Integrate the power only without an energy counter, which misses nothing.
            power = readings.get("gpu_power_w")
            if self._counter_at_start is None and power is not None:
                previous_s, previous_power = self._previous or (now_s, power)
                joules = (now_s - previous_s) * (previous_power + power) / 2
                self.energy_j = (self.energy_j or 0.0) + joules
                self._previous = (now_s, power)


def for_this_rank(hardware: DictConfig) -> Telemetry:
    """Return the telemetry of this rank's GPU. On a CPU it stays empty."""
    on_gpu = hardware.vendor != "none" and torch.cuda.is_available()
    address = pci_address(device()) if on_gpu else None
    read = find_reader(address) if address else None
    if not read or hardware.gfx not in BANDWIDTH_GPUS:
        return Telemetry(read)

    def read_with_bandwidth() -> dict[str, float]:
        readings = read()
        if (share := readings.get("gpu_memory_bandwidth_share")) is not None:
            readings["gpu_memory_bandwidth_gb_s"] = share * hardware.bandwidth_gb_s
        return readings

    return Telemetry(read_with_bandwidth)


def find_reader(address: str, sysfs: Path = Path("/sys")) -> Read | None:
    """Return a reader of the GPU at this PCI address, or None if no counter is readable."""
    read = amd(address, sysfs)
    if read():
        return read
    try:
        import pynvml  # not a dependency, but vLLM for CUDA installs it
    except ImportError:
        return None
    try:
        return nvml(pynvml, address)
    except pynvml.NVMLError:  # no driver, or another driver's GPU
        return None


def fragmentation(stats: dict[str, Any]) -> float:
    """Return the share of torch's reserved memory that is unused inside partly used segments."""
    reserved = stats.get("reserved_bytes.all.current", 0)
    return stats.get("inactive_split_bytes.all.current", 0) / reserved if reserved else 0.0


def energy(rank_j: float | None, num_tokens: float) -> dict[str, float]:
    """Return the energy of all ranks' GPUs, in total and per million tokens.

    Every rank must call this; `num_tokens` is needed on the main rank. Return {} if there are no
    tokens or a GPU has no counter, because an incomplete sum would look plausible.
    """
    joules = [rank_j]
    if dist.is_initialized():
        joules = [None] * dist.get_world_size()
        dist.all_gather_object(joules, rank_j)
    if None in joules or not num_tokens:
        return {}
    kwh_per_million = sum(joules) / KWH_J / (num_tokens / 1e6)
    return {"energy_j": sum(joules), "energy_kwh_per_million_tokens": kwh_per_million}


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # a missing file, or EBUSY from a busy GPU
        return ""
