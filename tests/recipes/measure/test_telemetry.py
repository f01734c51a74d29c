"""Test GPU telemetry with copies of amdgpu's files and a fake pynvml."""

from __future__ import annotations

import itertools
import json
import math
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from transformers import TrainerControl, TrainerState, TrainingArguments

from recipes.measure import telemetry
from recipes.measure.metrics import Metrics
from recipes.measure.telemetry import Telemetry, amd
from recipes.rank.device import memory_now_gb
from tests.recipes.measure.test_clocks import MI300X, table

ADDRESS = "0000:05:00.0"
# Files of an AMD GPU with their content
FILES = {
    "gpu_busy_percent": "97", "mem_busy_percent": "41", "mem_info_vram_used": "150000000000",
    "mem_info_gtt_used": "2000000000", "hwmon/hwmon4/power1_average": "700000000",
    "hwmon/hwmon4/temp1_label": "edge", "hwmon/hwmon4/temp1_input": "50000",
    "hwmon/hwmon4/temp2_label": "junction", "hwmon/hwmon4/temp2_input": "82000",
    "hwmon/hwmon4/freq1_input": "1700000000", "hwmon/hwmon4/freq2_input": "1300000000",
}  # fmt: skip
EXPECTED = {
    "gpu_utilization": 0.97, "gpu_memory_bandwidth_share": 0.41, "gpu_memory_used_gb": 150.0,
    "gpu_gtt_used_gb": 2.0, "gpu_power_w": 700.0, "gpu_temperature_c": 82.0,
    "gpu_clock_mhz": 1700.0, "gpu_memory_clock_mhz": 1300.0,
}  # fmt: skip


@pytest.fixture
def gpu(tmp_path):
    """Return a function that changes files: name=content, or name=None to remove a file."""

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


def test_amdgpu_files_are_read(gpu):
    assert amd(ADDRESS, gpu())() == pytest.approx(EXPECTED)
    # MI300X: only the current power, and clocks of eight dies in gpu_metrics.
    power = {"hwmon/hwmon4/power1_average": None, "hwmon/hwmon4/power1_input": "650000000"}
    of_dies = gpu({**power, "gpu_metrics": table((1, 5), 360, MI300X)})
    expected = {**EXPECTED, "gpu_power_w": 650.0, "gpu_clock_mhz": sum(MI300X) / 8}
    assert amd(ADDRESS, of_dies)() == pytest.approx(expected)


@pytest.mark.parametrize(("gfx", "bandwidth"), [("gfx942", 0.41 * 5300), ("gfx90a", None)])
def test_bandwidth_of_gpus_that_count_it(gpu, monkeypatch, gfx, bandwidth):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(telemetry, "pci_address", lambda device: ADDRESS)
    monkeypatch.setattr(telemetry, "find_reader", lambda address: amd(address, gpu()))
    hardware = OmegaConf.create({"vendor": "amd", "gfx": gfx, "bandwidth_gb_s": 5300})
    readings = telemetry.for_this_rank(hardware).read()
    assert readings["gpu_memory_bandwidth_share"] == pytest.approx(0.41)
    assert readings.get("gpu_memory_bandwidth_gb_s") == (bandwidth and pytest.approx(bandwidth))


def test_a_partition_reports_the_power_of_its_card_and_no_energy(gpu):
    partition = Telemetry(amd(ADDRESS, gpu({"current_compute_partition": "CPX"})))
    for second in (0.0, 2.0):
        partition.sample(second)
    assert (partition.energy_j, partition.take()["card_power_w"]) == (None, 700.0)
    assert "gpu_power_w" in amd(ADDRESS, gpu({"current_compute_partition": "SPX"}))()


def test_means_and_energy(gpu):
    """Between two samples, 700 W and 500 W, the mean power counts."""
    counted = Telemetry(amd(ADDRESS, gpu()))
    for second, power in ((0.0, "700000000"), (2.0, "700000000"), (4.0, "500000000")):
        gpu({"hwmon/hwmon4/power1_average": power})
        counted.sample(100.0 + second)
    assert counted.take()["gpu_power_w"] == pytest.approx((700 + 700 + 500) / 3)
    assert counted.energy_j == pytest.approx(2 * 700 + 2 * 600)
    gpu({"gpu_busy_percent": "10"})
    assert counted.take()["gpu_utilization"] == pytest.approx(0.10)  # without a sample since
    counted.begin(200.0)
    counted.sample(201.0)
    assert counted.energy_j == pytest.approx(700)  # without what sets the steps up


def test_the_sampling_thread_ends(gpu, monkeypatch):
    counted, third = Telemetry(amd(ADDRESS, gpu()), interval_s=0.001), threading.Event()
    numbers, read = itertools.count(1), counted.read

    def read_and_count():
        if next(numbers) > 2:  # the first is the caller's own
            third.set()
        return read()

    monkeypatch.setattr(counted, "read", read_and_count)
    with counted.running():
        assert third.wait(30)
        assert [thread.name for thread in threading.enumerate()].count("telemetry") == 1
    assert "telemetry" not in [thread.name for thread in threading.enumerate()]
    assert counted.energy_j > 0


@pytest.mark.parametrize(("joules", "tokens", "total"), [
    ([1000.0, 500.0], 1_000_000, 1500.0),
    ([1000.0, None], 1_000_000, None),  # a sum without one rank's GPU would look right
    ([1000.0, 500.0], 0, None),  # a finished run that was started again
])  # fmt: skip
def test_energy_of_several_ranks(monkeypatch, joules, tokens, total):
    def gather(values, mine):
        values[:] = joules

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    energy = telemetry.energy(joules[0], tokens)
    assert energy.get("energy_j") == total
    assert energy.get("energy_kwh_per_million_tokens") == (total and pytest.approx(total / 3.6e6))


def lines(metrics: Metrics, run_dir: Path, *steps: dict) -> list[dict]:
    parameter, shape = torch.nn.Parameter(torch.ones(4)), {"tie_word_embeddings": True}
    shape |= {"hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 1}
    config = SimpleNamespace(**shape)
    config.get_text_config = lambda: config
    model = SimpleNamespace(config=config, parameters=lambda: [parameter])
    args = TrainingArguments(output_dir=str(run_dir), use_cpu=True, report_to="none")
    state = TrainerState(max_steps=2)
    metrics.on_train_begin(args, state, TrainerControl())
    for step in steps:
        state.global_step += 1
        metrics.on_log(args, state, TrainerControl(), {"loss": 1.0, **step}, model=model)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def settings(run_dir: Path) -> DictConfig:
    return OmegaConf.create(
        {"run_dir": str(run_dir), "hardware": {"peak_tflops": {}}, "precision": {"compute": "fp32"}}
    )


def test_a_line_of_metrics_has_telemetry(gpu, tmp_path):
    metrics = Metrics(settings(tmp_path))
    metrics.telemetry = Telemetry(amd(ADDRESS, gpu()))
    metrics.telemetry.energy_j = 7000.0  # while the trainer was set up
    (row,) = lines(metrics, tmp_path, {"num_tokens": 10.0})
    assert {key: row[key] for key in EXPECTED} == pytest.approx(EXPECTED)
    assert metrics.num_tokens() == 10
    assert metrics.telemetry.energy_j < 7000


def test_steps_without_new_tokens_do_not_reduce_the_count(tmp_path):
    """With num_iterations=2, GRPO generates and counts tokens only in every other step."""
    steps = ({"num_tokens": 10.0}, {}, {"num_tokens": 30.0})
    rows = lines(Metrics(settings(tmp_path)), tmp_path, *steps)
    assert [row["num_tokens"] for row in rows] == [10, 10, 30]
    assert [row["tokens_per_second"] > 0 for row in rows] == [True, False, True]


def test_the_summary_has_rates_of_all_ranks_and_per_gpu(tmp_path, monkeypatch):
    """A target of tokens_per_second_per_gpu is compared with result.json."""
    metrics = Metrics(settings(tmp_path))
    _, row = lines(metrics, tmp_path, {"num_tokens": 10.0}, {"num_tokens": 30.0})
    assert row["samples_per_second"] == pytest.approx(8 / row["step_s"])  # 8 rows in a batch
    monkeypatch.setenv("WORLD_SIZE", "2")
    figures = metrics.summary()
    assert figures["samples_per_second"] == pytest.approx(8 / figures["step_s"])
    assert figures["training_hours"] == row["time_s"] / 3600
    assert figures["tokens_per_second"] == pytest.approx(15 / figures["step_s"])
    assert figures["tokens_per_second_per_gpu"] == figures["tokens_per_second"] / 2


@pytest.mark.parametrize(("equal_shares", "warning", "num_lines"), [
    ([1.0] * 7, "last 7 step(s)", 1),
    ([1.0] * 2, "last 2 step(s)", 0),
    ([1.0] * 6 + [0.75], None, 1),
    ([1.0, 0.75] + [1.0] * 19, None, 0),
    ([1.0, 0.75] + [1.0] * 20, "last 20 step(s)", 1),
    ([1.0] * 4 + [math.nan] * 2, "no reward applies", 1),
])  # fmt: skip
def test_steps_with_equal_rewards_are_a_warning(
    tmp_path, capsys, monkeypatch, equal_shares, warning, num_lines
):
    """NaN stands for rewards that are all None. A resumed run continues the count.

    The deviation of eight rewards of 0.2 is 1.6e-8, which TRL does not count as zero.
    """
    monkeypatch.setattr(Metrics, "_speed", lambda *_: {})

    def step(share: float) -> dict:
        if math.isnan(share):  # TRL compares the deviation, which is NaN, with 0
            return {"reward": share, "reward_std": share, "frac_reward_zero_std": 0.0}
        deviation = 1.6e-8 if share == 1 else 0.25
        return {"reward": 0.5, "reward_std": deviation, "frac_reward_zero_std": 0.0}

    config = settings(tmp_path)
    config.model = {"init": "pretrained", "path": None}
    metrics = Metrics(config)
    lines(metrics, tmp_path, *map(step, equal_shares))
    assert capsys.readouterr().out.count("! no completion") == num_lines
    result = metrics.summary()
    assert (warning or "") in result.get("warning", "")
    assert ("warning" in result) == (warning is not None)
    resumed = Metrics(config)
    resumed.begin(TrainerState(global_step=len(equal_shares)))
    assert resumed.summary().get("warning") == result.get("warning")


def test_a_gpus_memory_is_in_the_line(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, size in (("memory_allocated", 2e9), ("memory_reserved", 3e9)):
        monkeypatch.setattr(torch.cuda, name, lambda size=size: size)
    assert memory_now_gb() == {"memory_allocated_gb": 2.0, "memory_reserved_gb": 3.0}


def test_the_memory_peak_includes_loading_despite_a_reset(tmp_path, monkeypatch):
    """DeepSpeed resets torch's counter during its setup.

    ZeRO-2 with offload seemed to take 7.6 GB although loading took 8.7.
    """
    counter = iter([8.7, 7.6])
    monkeypatch.setattr("recipes.measure.metrics.memory_peak_gb", lambda: next(counter))
    (row,) = lines(Metrics(settings(tmp_path)), tmp_path, {"num_tokens": 10.0})
    assert row["memory_peak_gb"] == 8.7


class NvmlError(Exception):
    """Replace pynvml.NVMLError."""


NVML = {"gpu_utilization": 0.9, "gpu_memory_bandwidth_share": 0.3, "gpu_memory_used_gb": 100.0}
NVML |= {"gpu_power_w": 650.5, "gpu_temperature_c": 61.0}
NVML |= {"gpu_clock_mhz": 1980.0, "gpu_memory_clock_mhz": 3201.0}


@pytest.fixture
def nvml(monkeypatch):
    """Return a fake pynvml for a GPU whose energy counter rises by 2 J per reading."""
    millijoules = itertools.count(5000, 2000)

    def handle(address: bytes) -> str:
        return "gpu" if address == ADDRESS.encode() else unsupported()

    module = SimpleNamespace(
        NVMLError=NvmlError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByPciBusId=handle,
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=90, memory=30),
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=100_000_000_000),
        nvmlDeviceGetPowerUsage=lambda _: 650_500,
        nvmlDeviceGetTemperature=lambda _, which: {0: 61}[which],
        nvmlDeviceGetClockInfo=lambda _, which: {1: 1980, 2: 3201}[which],
        nvmlDeviceGetTotalEnergyConsumption=lambda _: next(millijoules),
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def unsupported(*_):
    raise NvmlError("not supported")


def test_nvml_counters_are_read(tmp_path, nvml):
    read = telemetry.find_reader(ADDRESS, tmp_path)
    readings = read()
    assert readings.pop("energy_j") == 5.0
    assert readings == pytest.approx(NVML)
    counted = Telemetry(read)
    for second in range(3):
        counted.sample(float(second))
    assert counted.energy_j == pytest.approx(4.0), "from the GPU's own counter: 2 J at each look"
    counted.begin()
    counted.sample(3.0)
    assert counted.energy_j == 0.0
    assert telemetry.find_reader("0000:99:00.0", tmp_path) is None
