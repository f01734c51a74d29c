"""What this rank's GPU does while it trains: use, memory, power, temperature and clocks, sampled by a thread.

AMD: the files that amdgpu keeps in sysfs, or the module amdsmi where they are not there to read. NVIDIA: NVML. Where there is neither, no
key appears. `gpu_memory_bandwidth_share` is the share of time in which the memory was being read or written: what both makers count.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from recipes.common.device import device
from recipes.common.nvml import Nvml
from recipes.health import clocks

INTERVAL_S = 0.5  # amdgpu's and NVML's own means are over 0.1 to 1 s, and ten files twice a second cost less than a thousandth of a core
KWH_J = 3.6e6
WHOLE = "SPX"  # a card that is one device, not several partitions


class Source(Protocol):
    """The counters of one GPU. A counter that it does not have, or does not answer for now, is left out."""

    def read(self) -> dict[str, float]: ...

    def energy_j(self) -> float | None:
        """A counter that only rises, None where there is none."""


class AmdSysfs:
    """Files of amdgpu for the GPU in `folder` (/sys/bus/pci/devices/<address>). Source: the kernel's documentation of amdgpu."""

    def __init__(self, address: str, sysfs: Path = Path("/sys")) -> None:
        self.address, self.sysfs = address, sysfs
        self.folder = sysfs / "bus/pci/devices" / address
        self.hwmon = next(iter(sorted(self.folder.glob("hwmon/hwmon*"))), self.folder / "hwmon")
        labels = {}
        for path in sorted(self.hwmon.glob("temp*_label")):
            with contextlib.suppress(OSError, ValueError):
                labels[_text(path)] = path.name.partition("_")[0]
        self.temperature = labels.get("junction") or labels.get("edge") or "temp1"  # junction: the hottest place, which throttles

    def there(self) -> bool:
        return bool(self.read())

    def read(self) -> dict[str, float]:
        power = self._number("hwmon", "power1_average")  # of a second; newer GPUs (MI300) state the present one only
        found = {
            "gpu_utilization": _times(self._number("device", "gpu_busy_percent"), 0.01),
            "gpu_memory_bandwidth_share": _times(self._number("device", "mem_busy_percent"), 0.01),
            "gpu_memory_used_gb": _times(self._number("device", "mem_info_vram_used"), 1e-9),
            "gpu_gtt_used_gb": _times(self._number("device", "mem_info_gtt_used"), 1e-9),
            "gpu_power_w": _times(power if power is not None else self._number("hwmon", "power1_input"), 1e-6),
            "gpu_temperature_c": _times(self._number("hwmon", f"{self.temperature}_input"), 1e-3),
            "gpu_clock_mhz": self._clock_mhz(),
            "gpu_memory_clock_mhz": _times(self._number("hwmon", "freq2_input"), 1e-6),
        }
        return _of_a_card({key: value for key, value in found.items() if value is not None}, self._partition())

    def energy_j(self) -> float | None:
        return None

    def _partition(self) -> str:
        """SPX, CPX ...; GPUs of one die have no such file."""
        try:
            return _text(self.folder / "current_compute_partition")
        except OSError:
            return WHOLE

    def _clock_mhz(self) -> float | None:
        """The mean of all dies, else the one that hwmon states."""
        try:
            dies = clocks.of_device(self.address, self.sysfs)
        except (OSError, ValueError):  # a GPU of one die, or a table of another version
            return _times(self._number("hwmon", "freq1_input"), 1e-6)
        return sum(dies) / len(dies)

    def _number(self, where: str, name: str) -> float | None:
        try:
            return float(_text((self.hwmon if where == "hwmon" else self.folder) / name))
        except (OSError, ValueError):  # not every GPU and driver has every file, and a busy one answers EBUSY
            return None


class AmdSmi:
    """The module that ROCm brings, for machines whose sysfs is hidden. Raises ImportError; OSError for a GPU it does not know."""

    def __init__(self, address: str) -> None:
        self.smi: Any = importlib.import_module("amdsmi")
        try:
            self.smi.amdsmi_init()
            self.handle = self.smi.amdsmi_get_processor_handle_from_bdf(address)
        except self.smi.AmdSmiException as error:
            raise OSError(f"amdsmi: {error}") from error

    def read(self) -> dict[str, float]:
        smi, handle = self.smi, self.handle
        hot = (smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT)
        asked = {
            "gpu_utilization": (lambda: smi.amdsmi_get_gpu_activity(handle)["gfx_activity"], 0.01),
            "gpu_memory_bandwidth_share": (lambda: smi.amdsmi_get_gpu_activity(handle)["umc_activity"], 0.01),
            "gpu_memory_used_gb": (lambda: smi.amdsmi_get_gpu_memory_usage(handle, smi.AmdSmiMemoryType.VRAM), 1e-9),
            "gpu_gtt_used_gb": (lambda: smi.amdsmi_get_gpu_memory_usage(handle, smi.AmdSmiMemoryType.GTT), 1e-9),
            "gpu_power_w": (self._power_w, 1.0),
            "gpu_temperature_c": (lambda: smi.amdsmi_get_temp_metric(handle, *hot), 1.0),
            "gpu_clock_mhz": (lambda: smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX)["clk"], 1.0),
            "gpu_memory_clock_mhz": (lambda: smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.MEM)["clk"], 1.0),
        }
        answers = {key: (self._ask(question), unit) for key, (question, unit) in asked.items()}
        found = {key: answer * unit for key, (answer, unit) in answers.items() if isinstance(answer, (int, float))}  # else "N/A"
        return _of_a_card(found, self._ask(lambda: smi.amdsmi_get_gpu_compute_partition(handle)))

    def energy_j(self) -> float | None:
        return None

    def _power_w(self) -> Any:
        info = self.smi.amdsmi_get_power_info(self.handle)
        return next(
            (info[key] for key in ("current_socket_power", "average_socket_power") if isinstance(info.get(key), (int, float))), None
        )

    def _ask(self, question: Any) -> Any:
        try:
            return question()
        except (self.smi.AmdSmiException, KeyError, AttributeError, TypeError):  # names and arguments differ between ROCm 6 and 7
            return None


class Telemetry:
    """Means since the last call of `take`, and energy since `begin`. Without a source it does nothing."""

    def __init__(self, source: Source | None, interval_s: float = INTERVAL_S) -> None:
        self.source, self.interval_s = source, interval_s
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.sums: dict[str, tuple[float, int]] = {}  # with the number of samples: only the main rank takes them
        self.begin()

    def begin(self, now_s: float | None = None) -> None:
        """Forget what was before: what sets training up, DeepSpeed's compiler say, takes as long as many steps, and is none.

        Energy counts from `now_s` on where it is given, else from the first sample.
        """
        with self.lock:
            self.sums.clear()
            self.energy_j: float | None = None
            self._before: tuple[float, float] | None = None  # time and power of the sample before
            self._counter_at_start = self.source.energy_j() if self.source else None
        if self.source and now_s is not None:
            self.sample(now_s)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Samples in a thread, which ends with the block."""
        if self.source is None:
            yield
            return
        self.sample(time.monotonic())
        thread = threading.Thread(target=self._work, name="telemetry", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.ended.set()
            thread.join()
            self.sample(time.monotonic())

    def take(self) -> dict[str, float]:
        """Means of the samples since the last call; of a short step that had none, one taken now."""
        if self.source is None:
            return {}
        if not self.sums:
            self.sample(time.monotonic())
        with self.lock:
            found = {key: total / count for key, (total, count) in self.sums.items()}
            self.sums.clear()
        return {**found, **fragmentation()}

    def sample(self, now_s: float) -> None:
        """Read the counters once, at `now_s` of a clock that only rises."""
        assert self.source is not None
        read, counter = self.source.read(), self.source.energy_j()
        with self.lock:
            for key, value in read.items():
                total, count = self.sums.get(key, (0.0, 0))
                self.sums[key] = (total + value, count + 1)
            if self._counter_at_start is not None:  # one that does not answer now does later, with what was used meanwhile
                if counter is not None:
                    self.energy_j = counter - self._counter_at_start
            elif (power := read.get("gpu_power_w")) is not None:
                began, earlier = self._before or (now_s, power)
                self.energy_j = (self.energy_j or 0.0) + (now_s - began) * (earlier + power) / 2
                self._before = (now_s, power)

    def _work(self) -> None:
        while not self.ended.wait(self.interval_s):
            self.sample(time.monotonic())


def of_this_rank(vendor: str) -> Telemetry:
    """Of the GPU that this rank computes on; `none` computes on the CPU, also where there is a GPU."""
    address = pci_address() if vendor != "none" and torch.cuda.is_available() else None
    return Telemetry(source(address) if address else None)


def pci_address() -> str | None:
    """`0000:05:00.0` of this rank's GPU: no mask renumbers it. None where torch is too old to say."""
    properties = torch.cuda.get_device_properties(device())
    if not hasattr(properties, "pci_bus_id"):
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def source(address: str, sysfs: Path = Path("/sys"), nvml: str = "libnvidia-ml.so.1") -> Source | None:
    """Whatever answers for the GPU at this PCI address; None where nothing does."""
    amd = AmdSysfs(address, sysfs)
    if amd.there():
        return amd
    with contextlib.suppress(OSError):  # no NVIDIA driver, or it does not know this GPU
        return Nvml(address, nvml)
    with contextlib.suppress(ImportError, OSError):
        return AmdSmi(address)
    return None


def fragmentation() -> dict[str, float]:
    """Share of the memory that torch holds which lies in the free parts of blocks in use, and so cannot be given back."""
    if not torch.cuda.is_available():
        return {}
    stats = torch.cuda.memory_stats()
    reserved = stats.get("reserved_bytes.all.current", 0)
    return {"gpu_memory_fragmentation": stats.get("inactive_split_bytes.all.current", 0) / reserved} if reserved else {}


def energy(mine_j: float | None, num_tokens: float) -> dict[str, float]:
    """`energy_j` of all ranks' GPUs and what a million tokens took. Every rank takes part; `num_tokens` is known to the main one.

    Nothing where a rank's GPU does not tell: the sum would be too small. Nothing either where no token was trained on.
    """
    told = [mine_j]
    if dist.is_initialized():
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine_j)
    if None in told or not num_tokens:
        return {}
    return {"energy_j": sum(told), "energy_kwh_per_million_tokens": sum(told) / KWH_J / (num_tokens / 1e6)}


def _of_a_card(found: dict[str, float], partition: object) -> dict[str, float]:
    """Of a partition nobody measures the power, only that of its card: under a name of its own, and so never summed to an energy."""
    if partition not in (WHOLE, "N/A", None) and "gpu_power_w" in found:
        found["card_power_w"] = found.pop("gpu_power_w")
    return found


def _text(path: Path) -> str:
    return path.read_text().strip()


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit
