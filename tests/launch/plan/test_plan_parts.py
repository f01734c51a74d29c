"""Test the variables, masks and host checks of a plan."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from containers import images
from launch.core.errors import HostError
from launch.execution.execute import check_host
from launch.machine import detect, placement, this_python
from launch.machine.this_python import Packages
from launch.plan import local_python, process_env
from launch.plan.planning import make_plan, prepare
from tests.conftest import composed, host_with
from tests.helpers import sysroots

RUN = Path("/runs/x/1")


def plan(*overrides: str, host=None):
    return make_plan(composed(*overrides), host or host_with(8), RUN)


def test_each_process_gets_its_own_variables():
    _, server, trainers = plan("hardware=mi300x", "model=qwen3_4b", "method=grpo").processes
    assert "NCCL_MIN_NCHANNELS" not in server.env
    assert "VLLM_SERVER_DEV_MODE" in server.env
    assert "GPU_MAX_HW_QUEUES" not in trainers.env
    (sharded,) = plan("hardware=mi300x", "model=qwen3_14b", "topology=fsdp").processes
    assert "GPU_MAX_HW_QUEUES" in sharded.env
    (single,) = plan("hardware=mi300x", "model=qwen3_4b", "topology=single").processes
    assert "NCCL_MIN_NCHANNELS" not in single.env


def test_channels_of_one_node_are_not_those_of_several():
    """RCCL uses at most 64 channels between nodes."""
    job = ("runtime=slurm", "runtime.slurm.interface=ib0", "topology=ddp")
    for hardware, nodes, channels in (
        ("mi300x", 1, "112"),
        ("mi300x", 2, None),
        ("mi355x", 2, None),
    ):
        overrides = (f"hardware={hardware}", f"runtime.slurm.nodes={nodes}", *job)
        assert plan(*overrides).processes[0].env.get("NCCL_MIN_NCHANNELS") == channels


@pytest.mark.parametrize(("overrides", "guarded"), [
    (["method=grpo", "topology=split", "topology.num_gpus=2"], {"server", "trainers"}),
    (["method=grpo", "topology=split", "topology.num_gpus=4"], {"server", "trainers"}),
    (["method=grpo", "topology=split", "topology.num_gpus=1"], set()),  # gloo carries the weights
    (["method=sft", "topology=ddp", "topology.num_gpus=2"], {"trainers"}),
    (["method=sft", "topology=single"], set()),
])  # fmt: skip
def test_radeons_communicate_without_p2p(overrides, guarded):
    radeons = ("hardware=rx7900xtx", "model=qwen3_0_6b", "hardware.gpus_per_node=4")
    env = {process.name: process.env for process in plan(*radeons, *overrides).processes}
    assert {name for name in env if env[name].get("NCCL_P2P_DISABLE") == "1"} == guarded


LEGACY_IPC = "HSA_ENABLE_IPC_MODE_LEGACY"


@pytest.mark.parametrize(("driver", "overrides", "environ", "expected"), [
    ("6.16.13", "method=grpo topology=split", {}, ("1", "launcher", False)),
    (None, "method=grpo topology=split", {}, ("0", "launcher", True)),
    (None, "method=sft topology=ddp runtime=local", {}, ("0", "launcher", False)),
    (None, "method=sft topology=single", {}, ("1", "image", False)),  # shares no memory
    ("6.16.13", "method=sft topology=ddp", {LEGACY_IPC: "0"}, ("0", "yours", True)),
    ("unloaded", "method=grpo topology=split", {}, ("1", "image", False)),
])  # fmt: skip
def test_mode_of_gpu_memory_sharing(tmp_path, driver, overrides, environ, expected):
    """Legacy IPC needs amdgpu-dkms, but the image sets it on every driver."""
    machine = sysroots.mi300x(tmp_path)
    if driver is None:
        machine.remove("sys/module/amdgpu/version")
    elif driver == "unloaded":
        machine.remove("sys/module/amdgpu")
    host = dataclasses.replace(detect.host("python", str(tmp_path)), environ=environ)
    planned = plan("hardware=mi300x", "model=qwen3_4b", *overrides.split(), host=host)
    (mode,) = {s for p in planned.processes for s in p.settings if s.name == LEGACY_IPC}
    names_image = mode.reason.endswith("; the image sets 1")
    assert (mode.value, mode.origin, names_image) == expected
    for process in (p for p in planned.processes if p.kind != "pause"):
        spec = planned.containers.get(process.name)
        assert (spec.environment if spec else process.env)[LEGACY_IPC] == mode.value


def test_variables_of_the_image():
    """They apply only in a container, and Triton caches its kernels in a writable folder."""
    halo = ("hardware=strix_halo", "model=qwen3_0_6b", "topology=single")
    entry = images.load()["rocm_strix_halo"].env
    in_image, local = (plan(*halo, f"runtime={r}").processes[0] for r in ("docker", "local"))
    origins = {s.name: s.origin for s in in_image.settings}
    assert (entry["MIOPEN_FIND_MODE"], origins["MIOPEN_FIND_MODE"]) == ("FAST", "image")
    assert in_image.env["TRITON_CACHE_DIR"].startswith(in_image.env["HOME"])
    assert "image" not in {s.origin for s in local.settings}
    assert "TRITON_CACHE_DIR" not in local.env


def test_rdna4_communicates_without_the_ll_protocol():
    for gpus, protocol in ((1, None), (2, "Simple")):
        overrides = ("hardware=r9700", f"hardware.gpus_per_node={gpus}", "method=sft")
        assert plan(*overrides).processes[0].env.get("NCCL_PROTO") == protocol


def test_amd_gpus_without_an_image_run_locally():
    settings = {h: composed(f"hardware={h}") for h in ("rx6900xt", "rx7900xtx")}
    runtimes = {h: (c.runtime.name, c.container.name) for h, c in settings.items()}
    assert runtimes == {"rx6900xt": ("local", "none"), "rx7900xtx": ("docker", "rocm_rdna")}


def test_a_value_of_the_user_takes_precedence():
    shell = host_with(8, NCCL_MIN_NCHANNELS="32", OMP_NUM_THREADS="3")
    (process,) = plan("hardware=mi300x", "topology=ddp", host=shell).processes
    assert process.env["NCCL_MIN_NCHANNELS"] == "32"
    origins = {setting.name: setting.origin for setting in process.settings}
    assert origins["NCCL_MIN_NCHANNELS"] == origins["OMP_NUM_THREADS"] == "yours"
    overrides = ("hardware=mi300x", "topology=ddp", "user_env.NCCL_MIN_NCHANNELS=16")
    assert plan(*overrides, host=shell).processes[0].env["NCCL_MIN_NCHANNELS"] == "16"


def test_order_of_the_python_path():
    own_reward = (
        "method=grpo",
        "++method.rewards={json.loads: 1.0}",
        "user_env.PYTHONPATH=/theirs",
    )
    (process,) = plan("hardware=cpu", *own_reward, host=host_with(0)).processes
    path = process.env["PYTHONPATH"].split(":")
    assert path == [str(process_env.ROOT), "/theirs", "/home/me/work"]


def test_a_split_of_one_gpu_sends_weights_over_gloo():
    """The server finds the plugin, but not the module that replaces vLLM on a CPU."""
    one, two = (
        next(
            p
            for p in plan(
                "hardware=mi300x", "method=grpo", "topology=split", f"topology.num_gpus={gpus}"
            ).processes
            if p.kind == "server"
        )
        for gpus in (1, 2)
    )
    backends = [
        json.loads(server.argv[server.argv.index("--weight-transfer-config") + 1])["backend"]
        for server in (one, two)
    ]
    assert backends == ["gloo", "nccl"]
    (_, ours) = one.env["PYTHONPATH"].split(":")
    (distribution,) = importlib.metadata.distributions(path=[ours])
    (plugin,) = distribution.entry_points
    assert (plugin.group, plugin.name) == ("vllm.general_plugins", "gloo_weights")
    module, _, function = plugin.value.partition(":")
    assert f"def {function}(" in (process_env.ROOT / f"{module.replace('.', '/')}.py").read_text()
    assert two.env["PYTHONPATH"] == str(process_env.ROOT)


@pytest.mark.parametrize(("environ", "message"), [
    ({"ROCR_VISIBLE_DEVICES": "0"}, "unset ROCR"),
    ({"HIP_VISIBLE_DEVICES": "0,0"}, "contains a GPU twice"),
    ({"HIP_VISIBLE_DEVICES": "0"}, "needs 8"),
    ({"HIP_VISIBLE_DEVICES": "GPU-abc"}, "expected indices"),
])  # fmt: skip
def test_conflicting_masks_are_rejected(environ, message):
    with pytest.raises(HostError, match=message):
        placement.visible_gpus(composed("hardware=mi300x"), host_with(8, **environ), 8)


@pytest.mark.parametrize(
    ("overrides", "gpus", "message"),
    [
        (["hardware=mi300x", "topology=single"], 0, "1 amd GPU"),
        (["hardware=h200", "topology=single"], 8, "1 nvidia GPU"),
        (["hardware=mi300x", "topology=ddp"], 4, "8 amd GPU"),
        (["hardware=mi300x", "method=grpo", "model=qwen3_4b", "topology=split"], 7, "8 amd GPU"),
        (
            (
                "hardware=mi300x method=grpo model=llama3_1_70b topology=split "
                "topology.strategy=fsdp adapter=lora topology.server_memory_share=0.5"
            ).split(),
            8,
            "server needs .* on GPU 0",
        ),
        (["hardware=rx9070xt", "model=qwen3_32b"], 8, r"\([0-9.]+ GB short\)"),
    ],
)
def test_a_host_that_cannot_run_the_plan(overrides, gpus, message):
    host = host_with(gpus)
    with pytest.raises(HostError, match=message) as raised:
        check_host(plan(*overrides, host=host), host)
    assert raised.value.exit_code == 3


@pytest.mark.parametrize(("hardware", "ours", "other"), [
    ("mi300x", "AMD_SERIALIZE_KERNEL", "CUDA_LAUNCH_BLOCKING"),
    ("strix_halo", "HSA_ENABLE_DEBUG", "CUDA_LAUNCH_BLOCKING"),
    ("h200", "CUDA_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL"),
])  # fmt: skip
def test_variables_that_reveal_a_faulting_kernel(hardware, ours, other):
    config = composed(f"hardware={hardware}", "topology=single", "debug=memory_fault")
    settings = {s.name: s for s in process_env.settings(config, host_with(1), "trainer", [0], RUN)}
    assert settings[ours].reason.startswith("debug=memory_fault: ")
    assert other not in settings
    options = settings.get("ROCM_DEBUG_AGENT_OPTIONS")
    assert hardware == "h200" or f"--save-code-objects={RUN}/logs" in options.value


def test_debug_compile_keeps_generated_code_in_the_run_directory():
    config = composed("hardware=mi300x", "topology=single", "debug=compile", "step.compile=true")
    settings = {s.name: s for s in process_env.settings(config, host_with(1), "trainer", [0], RUN)}
    assert settings["TORCH_COMPILE_DEBUG"].value == "1"
    assert settings["TORCH_COMPILE_DEBUG_DIR"].value == str(RUN)
    assert "HSA_TOOLS_LIB" not in settings


HAS = Packages("rocm", "2.13.0+rocm7.2", "0.31.0+rocm723")
CPU = HAS._replace(torch_build="cpu", torch="2.13.0+cpu")
NO_VLLM = HAS._replace(vllm=None)


@pytest.mark.parametrize(("packages", "overrides", "keys"), [
    (HAS, "method=grpo topology=split", []),
    (CPU, "method=sft", ["runtime=local"]),
    (CPU, "method=sft smoke=true", []),
    (CPU, "method=export", []),
    (CPU, "method=sft runtime=docker", []),
    (HAS._replace(torch_build=None, torch=None), "method=sft", ["runtime=local"]),
    (NO_VLLM, "method=sft", []),
    (NO_VLLM, "method=grpo topology=ddp", []),
    (NO_VLLM, "method=grpo topology=split", ["topology=split"]),
    (NO_VLLM, "method=grpo topology=colocate", ["topology=colocate"]),
    (NO_VLLM, "method=evaluate method.args.engine=vllm", ["method.args.engine=vllm"]),
    (NO_VLLM, "method=serve", ["method=serve"]),
    (CPU._replace(vllm=None), "method=grpo topology=split", ["runtime=local", "topology=split"]),
])  # fmt: skip
def test_packages_of_the_python_that_ranks_use(monkeypatch, packages, overrides, keys):
    monkeypatch.setattr(this_python, "packages", lambda: packages)
    request = ["hardware=mi300x", "model=qwen3_0_6b", "runtime=local", *overrides.split()]
    config, _ = prepare(composed(*request))
    here = dataclasses.replace(host_with(8), python=sys.executable)
    assert [line.partition(": ")[0] for line in local_python.problems(config, here)] == keys
    elsewhere = dataclasses.replace(here, python="python")
    assert not list(local_python.problems(config, elsewhere))
    if keys:
        planned = make_plan(config, here, RUN)
        assert {line.partition(": ")[0] for line in planned.warnings} >= set(keys)
        with pytest.raises(HostError, match=f"^{re.escape(keys[0])}: "):
            check_host(planned, here)
        no_gpu = dataclasses.replace(here, gpus=())  # a plan for another machine
        assert not [w for w in make_plan(config, no_gpu, RUN).warnings if "vLLM" in w]


@pytest.mark.parametrize(("lines", "build"), [
    ("cuda: Optional[str] = None\nhip: Optional[str] = '7.2.53211'", "rocm"),
    ("cuda = '13.0'\nhip: Optional[str] = None", "cuda"),
    ("cuda: Optional[str] = None\nhip: Optional[str] = None", "cpu"),
    (None, None),
])  # fmt: skip
def test_build_of_an_installed_torch(tmp_path, monkeypatch, lines, build):
    spec = None
    if lines:
        (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{lines}\n")
        spec = importlib.machinery.ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert this_python.torch_build() == build
