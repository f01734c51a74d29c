"""Test conf/hardware against the schema, independent tables, and forbidden variables."""

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from launch.schema import TRACKERS, Config

CONF = Path(__file__).parents[2] / "conf"
NAMES = sorted(p.stem for p in (CONF / "hardware").glob("*.yaml") if p.stem != "auto")
ALLOCATORS = {"PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
# The launcher sets masks, an override breaks native targets, and AITER is off in RL.
FORBIDDEN = {
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
    "HSA_OVERRIDE_GFX_VERSION", "VLLM_ROCM_USE_AITER", "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "HSA_DISABLE_FRAGMENT_ALLOCATOR",
}  # fmt: skip

# From the makers' pages, one device per row: gfx, devices a node, GB, GB/s, units, fp32, fp16,
# bf16, fp8, fp4, link GB/s.
# An MI250X module (128 GB, 3,200 GB/s, 220 CUs, 47.9 and 383 TFLOPS, 400 GB/s) is two devices.
FIGURES = {
    "mi50": ("gfx906", 1, 32, 1024, 60, 13.3, 26.5, None, None, None, 92),
    "mi50_16gb": ("gfx906", 1, 16, 1024, 60, 13.3, 26.5, None, None, None, 92),
    "mi60": ("gfx906", 1, 32, 1024, 64, 14.7, 29.5, None, None, None, 92),
    "mi100": ("gfx908", 4, 32, 1230, 120, 23.1, 184.6, 92.3, None, None, 3 * 46),
    "mi210": ("gfx90a", 8, 64, 1600, 104, 22.6, 181, 181, None, None, 3 * 50),
    "mi250x": (
        *("gfx90a", 8, 128 / 2, 3200 / 2, 220 // 2, 47.9 / 2, 383 / 2, 383 / 2, None, None),
        400 / 2,
    ),
    "mi300a": ("gfx942", 4, 128, 5300, 6 * 38, 122.6, 980.6, 980.6, 1961, None, None),
    "mi300x": ("gfx942", 8, 192, 5300, 8 * 38, 163.4, 1307.4, 1307.4, 2614.9, None, 7 * 64),
    "mi308x": ("gfx942", 8, 192, 5300, 4 * 20, 43, 344, 344, 688, None, 7 * 64),
    "mi325x": ("gfx942", 8, 256, 6000, 8 * 38, 163.4, 1307, 1307, 2614, None, 7 * 64),
    "mi350x": ("gfx950", 8, 288, 8000, 8 * 32, 144, 2300, 2300, 4614, 9227, 7 * 76.8),
    "mi355x": ("gfx950", 8, 288, 8000, 8 * 32, 157, 2516.6, 2516.6, 5033, 10066, 7 * 76.8),
    "rx7900xtx": ("gfx1100", 1, 24, 960, 96, 61.4, 122.8, 122.8, None, None, 32),
    "rx7900xt": ("gfx1100", 1, 20, 800, 84, 51.5, 103, 103, None, None, 32),
    "w7900": ("gfx1100", 1, 48, 864, 96, 61.3, 122.6, 122.6, None, None, 32),
    "rx7800xt": ("gfx1101", 1, 16, 624, 60, 37.3, 74.6, 74.6, None, None, 32),
    "rx6800xt": ("gfx1030", 1, 16, 512, 72, 20.7, 41.5, None, None, None, 32),
    "rx6900xt": ("gfx1030", 1, 16, 512, 80, 23.0, 46.1, None, None, None, 32),
    "rx9060xt": ("gfx1200", 1, 16, 320, 32, 25.6, 102.6, 102.6, 205, None, 64),
    "rx9070xt": ("gfx1201", 1, 16, 640, 64, 48.7, 195, 195, 389, None, 64),
    "r9700": ("gfx1201", 1, 32, 640, 64, 47.8, 191, 191, 383, None, 64),
    "strix_halo": ("gfx1151", 1, 128, 256, 40, 29.7, 59.4, 59.4, None, None, None),
    "radeon_890m": ("gfx1150", 1, 32, 120, 16, 11.9, 23.8, 23.8, None, None, None),
    "h100": ("sm_90", 8, 79.2, 3350, 132, 67, 989, 989, 1979, None, 450),
    "h200": ("sm_90", 8, 141, 4800, 132, 67, 989, 989, 1979, None, 450),
}
# Four times fp32 on gfx942 (AMD), half of fp16 on Hopper (NVIDIA). No other GPU has matrix units
# for it.
TF32 = {
    "mi300a": 490.3,
    "mi300x": 653.7,
    "mi308x": 172,
    "mi325x": 653.7,
    "h100": 494.5,
    "h200": 494.5,
}
# Precisions of each GPU besides fp32, listed independently of the files, by hardware and kernels.
NO_BF16 = {"mi50", "mi50_16gb", "mi60", "rx6800xt", "rx6900xt"}
FP8 = {
    *("mi300a", "mi300x", "mi308x", "mi325x", "mi350x", "mi355x"),
    *("rx9060xt", "rx9070xt", "r9700", "h100", "h200"),
}
NO_NF4 = NO_BF16


@pytest.fixture(scope="module")
def groups():
    """Return `groups(group, option)`, which composes one option of a group onto the schema."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)

    def load(group: str, option: str) -> DictConfig:
        store.store(name="one_group", node={"defaults": ["schema", {group: option}, "_self_"]})
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("one_group")[group]

    return load


@pytest.fixture(scope="module")
def hardware(groups):
    return {name: groups("hardware", name) for name in NAMES}


def test_every_hardware_has_figures(hardware):
    assert set(hardware) == set(FIGURES) | {"cpu"}


@pytest.mark.parametrize("name", FIGURES)
def test_figures(hardware, name):
    gfx, devices, memory, bandwidth, units, fp32, fp16, bf16, fp8, fp4, link = FIGURES[name]
    group = hardware[name]
    assert OmegaConf.missing_keys(group) == set()
    assert group.name == name
    assert (group.gfx, group.gpus_per_node, group.compute_units) == (gfx, devices, units)
    assert (group.memory_gb, group.bandwidth_gb_s) == (memory, bandwidth)
    peaks = {"fp32": fp32, "tf32": TF32.get(name), "fp16": fp16, "bf16": bf16}
    peaks |= {"fp8": fp8, "fp4": fp4}
    assert dict(group.peak_tflops) == pytest.approx(
        {name: peak for name, peak in peaks.items() if peak is not None}
    )
    assert group.link_gb_s == (None if link is None else pytest.approx(link))


@pytest.mark.parametrize("name", NAMES)
def test_precisions(hardware, name):
    precisions = list(hardware[name].precisions)
    assert len(set(precisions)) == len(precisions)
    assert set(precisions) <= {"fp32", "fp16", "bf16", "fp8", "nf4"}
    assert "fp32" in precisions
    assert ("bf16" in precisions) == (name not in NO_BF16)
    assert ("fp8" in precisions) == (name in FP8)
    assert ("nf4" in precisions) == (name not in NO_NF4)
    # A rate for each that has one; a CPU's bf16 is as fast as its fp32 at best.
    assert {p for p in precisions if p != "nf4"} - set(hardware[name].peak_tflops) <= (
        {"bf16"} if name == "cpu" else set()
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_variable_has_a_value_a_reason_and_a_source(hardware, name):
    for variable, setting in hardware[name].env.items():
        assert re.fullmatch(r"[A-Z][A-Z0-9_]*", variable)
        assert setting.value, variable
        assert setting.source.strip(), variable
        assert len(setting.reason.split()) >= 3, variable
        assert re.fullmatch(r".{1,160}", setting.reason), f"{variable}: a plan shows it on one line"
    assert hardware[name].env.TOKENIZERS_PARALLELISM.value == "false"


@pytest.mark.parametrize("name", NAMES)
def test_nothing_forbidden_is_set(hardware, name):
    env = hardware[name].env
    assert set(env) & FORBIDDEN == set()
    assert len(set(env) & ALLOCATORS) <= 1
    assert not any("expandable_segments" in setting.value for setting in env.values())
    if hardware[name].vendor.name != "amd":
        assert set(env) == {"TOKENIZERS_PARALLELISM"}


@pytest.mark.parametrize("name", NAMES)
def test_rocm_fits_the_target(hardware, name):
    group = hardware[name]
    assert (group.rocm is not None) == (group.vendor.name == "amd")
    if group.rocm is not None and group.rocm.max is not None:
        assert _version(group.rocm.min) <= _version(group.rocm.max)
    if group.gfx == "gfx950":
        assert _version(group.rocm.min) >= (7, 0)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


# How packed rows are kept apart, listed independently of the files. None: grouped by length.
PACKED = dict.fromkeys(FIGURES, "varlen") | {
    "mi50": None,
    "mi50_16gb": None,
    "mi60": None,
    "mi100": None,
    "rx6800xt": None,
    "rx6900xt": None,
    "strix_halo": None,
    "cpu": "sdpa",
}


@pytest.mark.parametrize("name", NAMES)
def test_attention_of_packed_rows(hardware, name):
    group = hardware[name]
    assert group.packed_attention == PACKED[name]
    if group.packed_attention == "varlen":
        assert group.fused_attention


def test_tracking_has_the_trackers_of_transformers():
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    assert set(TRACKERS) == {"none", *INTEGRATION_TO_CALLBACK}
