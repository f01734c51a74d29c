"""GPU telemetry from counters as amdgpu, NVML and amdsmi have them: files, a library compiled here, a module that stands for amdsmi."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from transformers import TrainerControl, TrainerState, TrainingArguments

from recipes.common import telemetry
from recipes.common.metrics import Metrics
from recipes.common.nvml import Nvml
from recipes.common.telemetry import AmdSysfs, Telemetry
from tests.unit.test_health_clocks import MI300X, table

ADDRESS = "0000:05:00.0"
# Files of one AMD GPU, with what the kernel writes into them.
FILES = {
    "gpu_busy_percent": "97",
    "mem_busy_percent": "41",
    "mem_info_vram_used": "150000000000",
    "mem_info_gtt_used": "2000000000",
    "hwmon/hwmon4/power1_average": "700000000",
    "hwmon/hwmon4/temp1_label": "edge",
    "hwmon/hwmon4/temp1_input": "50000",
    "hwmon/hwmon4/temp2_label": "junction",
    "hwmon/hwmon4/temp2_input": "82000",
    "hwmon/hwmon4/freq1_input": "1700000000",
    "hwmon/hwmon4/freq2_input": "1300000000",
}
EXPECTED = {
    "gpu_utilization": 0.97,
    "gpu_memory_bandwidth_share": 0.41,
    "gpu_memory_used_gb": 150.0,
    "gpu_gtt_used_gb": 2.0,
    "gpu_power_w": 700.0,
    "gpu_temperature_c": 82.0,
    "gpu_clock_mhz": 1700.0,
    "gpu_memory_clock_mhz": 1300.0,
}


@pytest.fixture
def gpu(tmp_path):
    """`gpu(name=content)` writes files over FILES, `None` removes one; returns the sysfs."""

    def build(changes=None):
        for name, content in {**FILES, **(changes or {})}.items():
            file = tmp_path / "bus/pci/devices" / ADDRESS / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                file.unlink(missing_ok=True)
            else:
                file.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())
        return tmp_path

    return build


def test_amdgpu(gpu):
    assert AmdSysfs(ADDRESS, gpu()).read() == pytest.approx(EXPECTED)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # MI300X: present power only, clocks of eight dies in gpu_metrics.
        (
            {"hwmon/hwmon4/power1_average": None, "hwmon/hwmon4/power1_input": "650000000", "gpu_metrics": table((1, 5), 360, MI300X)},
            {**EXPECTED, "gpu_power_w": 650.0, "gpu_clock_mhz": sum(MI300X) / 8},
        ),
        # A GPU of one temperature, whose memory's use nobody counts.
        (
            {"hwmon/hwmon4/temp2_label": None, "mem_busy_percent": None},
            {key: value for key, value in EXPECTED.items() if key != "gpu_memory_bandwidth_share"} | {"gpu_temperature_c": 50.0},
        ),
        # A word where a number should be.
        ({"gpu_busy_percent": "N/A"}, {key: value for key, value in EXPECTED.items() if key != "gpu_utilization"}),
    ],
)
def test_amdgpu_of_other_kinds(gpu, changes, expected):
    assert AmdSysfs(ADDRESS, gpu(changes)).read() == pytest.approx(expected)


def test_a_partition_has_no_power_and_no_energy_of_its_own(gpu):
    found = Telemetry(AmdSysfs(ADDRESS, gpu({"current_compute_partition": "CPX"})))
    for second in (0.0, 2.0):
        found.sample(second)
    assert (found.energy_j, found.take()["card_power_w"]) == (None, 700.0)
    whole = AmdSysfs(ADDRESS, gpu({"current_compute_partition": "SPX"})).read()
    assert (whole["gpu_power_w"], "card_power_w" in whole) == (700.0, False)


def test_means_since_the_last_line_and_energy(gpu):
    """700 W for 2 s, then 500 W: the change counts half of each between the two samples."""
    root = gpu()
    found = Telemetry(AmdSysfs(ADDRESS, root))
    for second, power in ((0.0, "700000000"), (2.0, "700000000"), (4.0, "500000000")):
        gpu({"hwmon/hwmon4/power1_average": power})
        found.sample(100.0 + second)
    assert found.take()["gpu_power_w"] == pytest.approx((700 + 700 + 500) / 3)
    assert found.energy_j == pytest.approx(2 * 700 + 2 * 600)
    gpu({"gpu_busy_percent": "10"})
    assert found.take()["gpu_utilization"] == pytest.approx(0.10), "a line with no sample since the last one takes its own"
    found.begin(200.0)
    found.sample(201.0)
    assert found.energy_j == pytest.approx(700), "from the beginning of the steps, not of what sets them up"


def test_samples_that_nobody_takes_do_not_pile_up(gpu):
    """Only the first rank writes lines."""
    found = Telemetry(AmdSysfs(ADDRESS, gpu()))
    found.sample(0.0)
    size = len(pickle.dumps(found.sums))
    for second in range(1, 100):
        found.sample(float(second))
    assert len(pickle.dumps(found.sums)) <= size
    assert found.take()["gpu_power_w"] == pytest.approx(700)


def test_a_torch_that_does_not_name_the_address(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="AMD Instinct MI300X"))
    assert telemetry.of_this_rank("amd").source is None


def test_the_thread_samples_and_ends(gpu):
    found, twice = Telemetry(AmdSysfs(ADDRESS, gpu()), interval_s=0.001), threading.Event()
    source, number = found.source, [0]

    def read():
        number[0] += 1
        if number[0] > 2:  # the first is the caller's own
            twice.set()
        return AmdSysfs.read(source)

    source.read = read
    with found.running():
        assert twice.wait(30)
        assert [thread.name for thread in threading.enumerate()].count("telemetry") == 1
    assert "telemetry" not in [thread.name for thread in threading.enumerate()]
    assert found.energy_j > 0


def test_without_counters_nothing_is_said(tmp_path):
    assert telemetry.source(ADDRESS, tmp_path, "no-such-library.so") is None
    found = Telemetry(None)
    with found.running():
        assert found.take() == {}
    assert found.energy_j is None
    assert telemetry.energy(None, 1000) == {}


def test_energy_per_million_tokens():
    assert telemetry.energy(7.2e6, 4_000_000) == {"energy_j": 7.2e6, "energy_kwh_per_million_tokens": pytest.approx(0.5)}
    assert telemetry.energy(7.2e6, 0) == {}, "a run that was finished, started again"


def work(rank: int, folder, told: list) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = [telemetry.energy(answer[rank], 1_000_000) for answer in told]
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def test_energy_of_several_ranks(tmp_path):
    """All of them, or none: a sum without one rank's GPU would be too small and look right."""
    told = [(1000.0, 500.0), (1000.0, None)]
    torch.multiprocessing.start_processes(work, (tmp_path, told), nprocs=2, start_method="fork")  # another would import everything
    expected = [{"energy_j": 1500.0, "energy_kwh_per_million_tokens": pytest.approx(1500 / 3.6e6)}, {}]
    assert [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)] == [expected, expected]


def lines(metrics: Metrics, run_dir: Path, *steps: dict) -> list[dict]:
    parameter = torch.nn.Parameter(torch.ones(4))
    shape = SimpleNamespace(tie_word_embeddings=True, hidden_size=4, num_attention_heads=1, num_hidden_layers=1)
    model = SimpleNamespace(config=shape, parameters=lambda: [parameter])
    args, state = TrainingArguments(output_dir=str(run_dir), use_cpu=True, report_to="none"), TrainerState(max_steps=2)
    metrics.on_train_begin(args, state, TrainerControl())
    for step in steps:
        state.global_step += 1
        metrics.on_log(args, state, TrainerControl(), {"loss": 1.0, **step}, model=model)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def a_line(metrics: Metrics, run_dir: Path) -> dict:
    return lines(metrics, run_dir, {"num_tokens": 10.0})[0]


def settings(run_dir: Path) -> DictConfig:
    return OmegaConf.create({"run_dir": str(run_dir), "hardware": {"peak_tflops": {}}, "precision": {"compute": "fp32"}})


def test_a_line_of_metrics(gpu, tmp_path):
    found = Metrics(settings(tmp_path))
    found.telemetry = Telemetry(AmdSysfs(ADDRESS, gpu()))
    found.telemetry.energy_j = 7000.0  # while the trainer was set up
    row = a_line(found, tmp_path)
    assert {key: row[key] for key in EXPECTED} == pytest.approx(EXPECTED)
    assert found.num_tokens() == 10
    assert found.telemetry.energy_j < 7000


def test_a_step_that_counts_no_tokens_takes_none_away(tmp_path):
    """GRPO counts where it generates; with num_iterations=2 every other step does not."""
    rows = lines(Metrics(settings(tmp_path)), tmp_path, {"num_tokens": 10.0}, {}, {"num_tokens": 30.0})
    assert [row["num_tokens"] for row in rows] == [10, 10, 30]
    assert [row["tokens_per_second"] > 0 for row in rows] == [True, False, True]
    assert rows[1]["tokens_per_second"] == 0


def test_the_memory_of_loading_counts_although_a_counter_begins_anew(tmp_path, monkeypatch):
    """DeepSpeed resets torch's counter when it is set up, so that ZeRO-2 with offload seemed to take 7.6 GB where loading took 8.7."""
    counter = iter([8.7, 7.6])
    monkeypatch.setattr("recipes.common.metrics.memory_peak_gb", lambda: next(counter))
    assert a_line(Metrics(settings(tmp_path)), tmp_path)["memory_peak_gb"] == 8.7


NVML = """
#include <string.h>
typedef struct { unsigned gpu, memory; } utilization;
typedef struct { unsigned long long total, free, used; } memory;
static int device; static unsigned long long energy = 5000;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **handle) {
    if (strcmp(address, "0000:05:00.0")) return 6; /* NVML_ERROR_NOT_FOUND */
    *handle = &device; return 0; }
int nvmlDeviceGetUtilizationRates(void *h, utilization *u) { if (h != &device) return 2; u->gpu = 90; u->memory = 30; return 0; }
int nvmlDeviceGetMemoryInfo(void *h, memory *m) { m->total = 141000000000; m->free = 1; m->used = 100000000000; return 0; }
int nvmlDeviceGetPowerUsage(void *h, unsigned *mw) { *mw = 650500; return 0; }
int nvmlDeviceGetTemperature(void *h, int which, unsigned *c) { *c = which == 0 ? 61 : 0; return 0; }
int nvmlDeviceGetClockInfo(void *h, int which, unsigned *mhz) { *mhz = which == 1 ? 1980 : which == 2 ? 3201 : 0; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *h, unsigned long long *mj) { *mj = energy; energy += 2000; return ENERGY; }
"""
OF_NVML = {
    "gpu_utilization": 0.9,
    "gpu_memory_bandwidth_share": 0.3,
    "gpu_memory_used_gb": 100.0,
    "gpu_power_w": 650.5,
    "gpu_temperature_c": 61.0,
    "gpu_clock_mhz": 1980.0,
    "gpu_memory_clock_mhz": 3201.0,
}


@pytest.fixture
def nvml(tmp_path):
    """`nvml()` is the path of a library that answers as NVML does; `energy=3` is NVML_ERROR_NOT_SUPPORTED of its energy counter."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler, which makes the library that stands for NVML")

    def build(energy: int = 0) -> str:
        library = tmp_path / f"nvml{energy}.so"
        argv = [compiler, "-shared", "-fPIC", "-x", "c", f"-DENERGY={energy}", "-o", str(library), "-"]
        subprocess.run(argv, input=NVML, text=True, check=True)
        return str(library)

    return build


def test_nvml(tmp_path, nvml):
    found = telemetry.source(ADDRESS, tmp_path, nvml())
    assert isinstance(found, Nvml)
    assert found.read() == pytest.approx(OF_NVML)
    counted = Telemetry(found)
    counted.sample(0.0)
    counted.sample(1.0)
    assert counted.energy_j == pytest.approx(4.0), "from the GPU's own counter: 2 J at each look"
    counted.begin()
    counted.sample(2.0)
    assert counted.energy_j == pytest.approx(2.0)


def test_an_energy_counter_that_does_not_answer_for_a_while(nvml):
    """Power is not added to a counter that knows what was used meanwhile."""
    source = Nvml(ADDRESS, nvml())
    found, answer = Telemetry(source), source.energy_j
    for second, asked in ((0.0, answer), (10.0, lambda: None), (20.0, lambda: None), (30.0, answer)):
        source.energy_j = asked
        found.sample(second)
    assert found.energy_j == pytest.approx(4.0), "2 J at each look that was answered"


def test_nvml_without_an_energy_counter(nvml):
    found = Telemetry(Nvml(ADDRESS, nvml(energy=3)))
    found.sample(0.0)
    found.sample(2.0)
    assert found.energy_j == pytest.approx(2 * 650.5)


def test_nvml_that_does_not_know_the_gpu(tmp_path, nvml):
    with pytest.raises(OSError, match="nvmlDeviceGetHandleByPciBusId_v2 answers 6"):
        Nvml("0000:99:00.0", nvml())
    assert telemetry.source("0000:99:00.0", tmp_path, nvml()) is None


class SmiError(Exception):
    """amdsmi.AmdSmiException."""


def refuse(*_):
    raise SmiError("not supported")


@pytest.fixture
def amdsmi(monkeypatch):
    """Functions and keys of amdsmi's documentation (ROCm 7); power in W or "N/A", memory in bytes."""
    found = types.ModuleType("amdsmi")
    found.AmdSmiException = SmiError
    found.AmdSmiTemperatureType = SimpleNamespace(HOTSPOT=1)
    found.AmdSmiTemperatureMetric = SimpleNamespace(CURRENT=0)
    found.AmdSmiMemoryType = SimpleNamespace(VRAM=0, GTT=2)
    found.AmdSmiClkType = SimpleNamespace(GFX=0, MEM=4)
    found.amdsmi_init = lambda: None
    found.amdsmi_get_processor_handle_from_bdf = lambda address: address if address == ADDRESS else refuse()
    found.amdsmi_get_gpu_activity = lambda _: {"gfx_activity": 97, "umc_activity": 41, "mm_activity": "N/A"}
    found.amdsmi_get_gpu_memory_usage = lambda _, which: {0: 150_000_000_000, 2: 2_000_000_000}[which]
    found.amdsmi_get_power_info = lambda _: {"current_socket_power": "N/A", "average_socket_power": 700}
    found.amdsmi_get_temp_metric = lambda _, which, metric: 82
    found.amdsmi_get_clock_info = lambda _, which: {"clk": {0: 1700, 4: 1300}[which], "max_clk": 2100}
    monkeypatch.setitem(sys.modules, "amdsmi", found)
    return found


def test_amdsmi_where_sysfs_is_hidden(tmp_path, amdsmi):
    found = telemetry.source(ADDRESS, tmp_path, "no-such-library.so")
    assert isinstance(found, telemetry.AmdSmi)
    assert found.read() == pytest.approx(EXPECTED)
    amdsmi.amdsmi_get_gpu_activity = refuse
    assert set(EXPECTED) - set(found.read()) == {"gpu_utilization", "gpu_memory_bandwidth_share"}
    amdsmi.amdsmi_get_clock_info = lambda _, which: {"cur_clk": 1700}  # of ROCm 6.0
    assert not {"gpu_clock_mhz", "gpu_memory_clock_mhz"} & set(found.read())
    assert telemetry.source("0000:99:00.0", tmp_path, "no-such-library.so") is None
