"""Test the containers of process groups: golden files for every GPU, devices, mounts and secrets.

`UPDATE_GOLDEN=1 pytest <this file>` rewrites the golden files; read the diff.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
from docker.types import ContainerConfig

from containers import images
from launch.config.compose import groups
from launch.core.errors import UserError
from launch.execution import record
from launch.inputs import paths
from launch.machine import detect
from launch.plan import container
from launch.plan.check_files import check_files
from launch.plan.container import as_json, sdk_arguments
from launch.plan.planning import make_plan, prepare
from launch.plan.views import as_json as as_plan_json
from tests.conftest import composed, host_with

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parents[3] / "tests/golden/containers"
RUN = Path("/runs/golden/1")
WITHOUT_IMAGE = ("h100", "h200", "rx6800xt", "rx6900xt")
CUSTOM = [
    "container=custom",
    f"container.reference=example.org/me/vllm@sha256:{'a' * 64}",
    "runtime=docker",
]
HARDWARE = [name for name in groups()["hardware"] if name != "auto"]


def overrides(hardware: str) -> list[str]:
    own = ["runtime=docker"] if hardware == "cpu" else CUSTOM if hardware in WITHOUT_IMAGE else []
    return [f"hardware={hardware}", "method=sft", "model=qwen3_0_6b", "name=golden", *own]


def specs(*arguments: str, host=None):
    config, _ = prepare(composed(*arguments))
    return make_plan(config, host or host_with(8), RUN).containers


CASES = {name: overrides(name) for name in HARDWARE} | {
    "mi300x_split": ["hardware=mi300x", "method=grpo", "model=qwen3_4b", "name=golden"],
    "mi300x_smoke": "hardware=mi300x method=grpo model=qwen3_4b name=golden smoke=true container=rocm".split(),
}


@pytest.mark.parametrize("case", CASES)
def test_golden(case):
    host = host_with(8, HF_TOKEN="hf_sentinel", NCCL_DEBUG="WARN")
    containers = {
        name: {"plan": as_json(spec), "sdk": sdk_arguments(spec)}
        for name, spec in specs(*CASES[case], host=host).items()
    }
    config = composed(*CASES[case])
    text = json.dumps(containers, indent=1, sort_keys=True).replace(str(ROOT), "<repository>")
    if config.container.name != "custom":
        text = text.replace(images.load()[config.container.name].tag, "<tag>")
    assert "hf_sentinel" not in text
    file = GOLDEN / f"{case}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text + "\n")
    assert json.loads(text) == json.loads(file.read_text())


@pytest.mark.parametrize("hardware", ["mi300x", "rx7900xtx", "h100", "cpu"])
def test_containers_get_only_what_they_need(hardware):
    config = composed(*overrides(hardware), "method=grpo", "topology=split")
    plan = make_plan(config, host_with(8), RUN)
    pause, *others = plan.processes
    assert not plan.containers[pause.name].mounts + [*plan.containers[pause.name].devices]
    for process in others:
        spec = plan.containers[process.name]
        sent = json.dumps(sdk_arguments(spec))
        assert not [word for word in ("privileged", "docker.sock", '"/dev/dri"') if word in sent]
        assert (spec.cap_add, spec.cap_drop, spec.user) == ([], ["ALL"], "1000:1000")
        home = Path("/home/me/.cache/rocm-recipes/home", paths.image_folder(config))
        homes = {str(home), str(home.parent / "data")}
        writable = {m.source for m in spec.mounts if not m.read_only}
        # not the folder itself, which has the token of `hf auth login`
        hub = {f"/home/me/.cache/huggingface/{name}" for name in ("hub", "datasets", "xet")}
        assert writable == {str(RUN), *homes, *hub}
        gpus = [*process.gpus, *container.peer_gpus(process, plan.processes)]
        nodes = {"/dev/kfd", *(f"/dev/dri/renderD{128 + gpu}" for gpu in gpus)}
        assert set(spec.devices) == (nodes if config.hardware.gfx.startswith("gfx") else set())
        assert all(spec.devices.values()), "every device has its reason"


def test_images_share_rows_and_no_compiled_code():
    names = ("PYTHONPYCACHEPREFIX", "TORCHINDUCTOR_CACHE_DIR", "HOME")
    folders, rows = [], set()
    for tag in ("a", "b"):
        config = composed("hardware=mi300x", "container=custom", f"container.reference=me/my:{tag}")
        plan = make_plan(config, host_with(8), RUN)
        environment = plan.containers["trainers"].environment
        folders += [environment[name] for name in names]
        rows.add(plan.data_cache["directory"])
    assert len(set(folders)) == 2 * len(names)
    assert len(rows) == 1


def test_server_and_trainers_see_the_gpus_of_the_weight_transfer():
    containers = specs("hardware=mi300x", "method=grpo", "model=qwen3_4b", "topology.num_gpus=4")
    server, trainers = containers["server"], containers["trainers"]
    assert list(server.devices) == ["/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD129"]
    assert "HIP IPC" in server.devices["/dev/dri/renderD129"]
    assert set(trainers.devices) == {
        "/dev/kfd",
        *(f"/dev/dri/renderD{n}" for n in (128, 129, 130, 131)),
    }
    # Indices are renumbered in the container, and the process's own GPUs come first.
    assert server.environment["HIP_VISIBLE_DEVICES"] == "0,1"
    assert trainers.environment["HIP_VISIBLE_DEVICES"] == "1,2,3,0"
    pause = containers["pause"]
    assert (pause.network, pause.ipc, pause.pid) == ("bridge", "shareable", "private")
    for spec in (server, trainers):
        assert spec.network == spec.ipc == spec.pid == f"container:{pause.name}"
        assert "shm_size" not in sdk_arguments(spec)["host"]


@pytest.mark.parametrize("more", [[], CUSTOM])
def test_a_shared_gpu_is_once_in_the_mask(more):
    """A mask with the same GPU twice would hide all GPUs from torch."""
    hardware = "hardware=h100" if more else "hardware=mi300x"
    containers = specs(
        hardware, "method=grpo", "model=qwen3_4b", "topology=split", "topology.num_gpus=1", *more
    )
    for name in ("server", "trainers"):
        masks = {
            key: value
            for key, value in containers[name].environment.items()
            if key.endswith("VISIBLE_DEVICES")
        }
        assert set(masks.values()) == {"0"}
    if not more:
        assert "HIP IPC" not in containers["server"].devices["/dev/dri/renderD128"]


def test_detection_reads_minors_groups_and_nodes(tmp_path):
    node = tmp_path / "sys/class/kfd/kfd/topology/nodes/1"
    node.mkdir(parents=True)
    (node / "properties").write_text(
        "gfx_target_version 90402\nsimd_count 1216\nsimd_per_cu 4\ndrm_render_minor 137\n"
    )
    for path in ("etc", "dev/dri", "sys/fs/selinux"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "etc/group").write_text("root:x:0:\nvideo:x:39:me\nrender:x:993:me\nodd\n")
    for name in ("kfd", "dri/renderD137", "dri/renderD130", "dri/card1"):
        (tmp_path / "dev" / name).touch()
    (tmp_path / "sys/fs/selinux/enforce").write_text("1")
    host = detect.host("python", str(tmp_path))
    assert host.gpus[0].render_minor == 137
    assert host.gids == {"video": 39, "render": 993}
    assert list(host.device_nodes) == ["/dev/kfd", "/dev/dri/renderD130", "/dev/dri/renderD137"]
    assert host.selinux
    (spec,) = specs(
        "hardware=mi300x", "topology=single", host=dataclasses.replace(host, home="/home/me")
    ).values()
    assert {"39", "993"} <= set(spec.groups)
    assert "label=disable" in spec.security_opt
    assert not detect.host("python", str(tmp_path / "nowhere")).selinux


def test_smoke_passes_existing_device_nodes():
    arguments = ["hardware=mi300x", "smoke=true", "runtime=docker"]
    (spec,) = specs(*arguments, host=host_with(8)).values()
    assert list(spec.devices) == ["/dev/kfd", "/dev/dri/renderD128"]
    (masked,) = specs(*arguments, host=host_with(8, HIP_VISIBLE_DEVICES="6")).values()
    assert list(masked.devices) == ["/dev/kfd", "/dev/dri/renderD134"]
    (laptop,) = specs(*arguments, host=host_with(0)).values()
    assert laptop.devices == {}
    outsider = dataclasses.replace(host_with(8), member_of=(1000,))  # may not open /dev/kfd
    (without,) = specs(*arguments, host=outsider).values()
    assert (without.devices, without.groups) == ({}, [])


@pytest.mark.parametrize(("hardware", "highest", "limits"), [
    ("mi300x", {}, {"memlock": -1, "nofile": 65535, "stack": 67108864}),
    ("cpu", {}, {"nofile": 65535, "stack": 67108864}),
    # a rootless engine
    ("mi300x", {"memlock": 8 << 20, "nofile": 4096, "stack": -1},
     {"memlock": 8 << 20, "nofile": 4096, "stack": 67108864}),
    ("mi300x", {"memlock": -1, "nofile": 1 << 20, "stack": -1},
     {"memlock": -1, "nofile": 65535, "stack": 67108864}),
])  # fmt: skip
def test_limits_of_processes(hardware, highest, limits):
    (spec,) = specs(f"hardware={hardware}", "runtime=docker", "topology=single").values()
    sent = sdk_arguments(spec, highest)["host"]["ulimits"]
    assert {limit["Name"]: limit["Hard"] for limit in sent} == limits
    assert all(limit["Soft"] == limit["Hard"] for limit in sent)


@pytest.mark.parametrize(("shell", "override", "offline"), [
    ({}, [], False), ({"HF_HUB_OFFLINE": "0"}, [], False),
    ({"HF_HUB_OFFLINE": "1"}, [], True), ({}, ["user_env.HF_HUB_OFFLINE=true"], True),
])  # fmt: skip
def test_offline_runs_cannot_change_the_files_of_later_ones(shell, override, offline):
    (spec,) = specs(
        "hardware=cpu", "runtime=docker", *override, host=host_with(0, **shell)
    ).values()
    read_only = {Path(m.source).name: m.read_only for m in spec.mounts if "Hub" in m.reason}
    assert read_only == dict.fromkeys(("hub", "datasets") if offline else read_only, offline)
    assert len(read_only) == (2 if offline else 3)
    assert ("HF_DATASETS_CACHE" in spec.environment) == offline


def test_limits_and_network():
    limits = "runtime.memory_gb=2 runtime.network=none runtime.shm_gb=1"
    (spec,) = specs("hardware=cpu", "runtime=docker", *limits.split()).values()
    sent = sdk_arguments(spec)["host"]
    assert sent["mem_limit"] == sent["memswap_limit"] == 2_000_000_000
    assert (sent["network_mode"], sent["shm_size"]) == ("none", 1_000_000_000)
    # without a GPU, the engine's seccomp profile stays
    assert sent["security_opt"] == ["no-new-privileges:true"]


def test_variables_of_the_shell_are_passed_by_name():
    shell = {"NCCL_DEBUG": "INFO", "HF_HUB_OFFLINE": "1", "HF_TOKEN": "hf_sentinel", "EDITOR": "vi"}
    shell |= {"PYTHONPATH": "/home/me/lib", "HIP_VISIBLE_DEVICES": "2", "HIP_PATH": "/opt/rocm-6.2"}
    shell |= {"HF_HUB_CACHE": "/home/me/hub", "HF_HOME": "relative"}
    arguments = ("hardware=mi300x", "topology=single", "user_env.HIP_MINE=1")
    (spec,) = specs(*arguments, host=host_with(8, **shell)).values()
    expected = {"NCCL_DEBUG": "INFO", "HF_HUB_OFFLINE": "1", "HIP_MINE": "1"}
    expected |= {"HIP_VISIBLE_DEVICES": "0", "HF_HOME": "/home/me/work/relative"}
    expected |= {"PYTHONPATH": str(ROOT)}  # a shell's PYTHONPATH is for another Python
    assert {name: spec.environment.get(name) for name in expected} == expected
    # a secret, a variable of no stack, and paths of this machine
    assert not {"HF_TOKEN", "EDITOR", "HIP_PATH", "HF_HUB_CACHE"} & set(spec.environment)
    assert spec.secrets == ["HF_TOKEN"]
    assert "hf_sentinel" not in json.dumps([as_json(spec), sdk_arguments(spec)])


LISTED = {
    "HF_TOKEN_READ": "sentinel_aaaa",
    "VLLM_KEY": "sentinel_bbbb",
    "NCCL_X": "sentinel_cccc",
    "HF_ENDPOINT": "https://u:sentinel_d@x",
}


def test_the_value_of_a_listed_secret_is_nowhere():
    """These names would be passed as variables if they were not in runtime.secrets."""
    names = ",".join(LISTED)
    config, _ = prepare(composed("hardware=cpu", "runtime=docker", f"runtime.secrets=[{names}]"))
    host = host_with(0, **LISTED)
    plan = make_plan(config, host, RUN)
    run_record = record.begin(plan, host, {"id": "1"}, None)
    text = json.dumps(
        [as_plan_json(plan), run_record, [sdk_arguments(s) for s in plan.containers.values()]]
    )
    assert "sentinel" not in text
    assert set(run_record["secrets"]) == set(LISTED)
    arguments = ("hardware=cpu", "runtime=docker", f"runtime.secrets=[{names}]")
    leaking, _ = prepare(composed(*arguments, "user_env.HIP_MINE=sentinel_cccc"))
    with pytest.raises(UserError, match="user_env.HIP_MINE: contains a secret"):
        make_plan(leaking, host, RUN)


def test_targets_of_a_models_links_are_mounted(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "abc").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    (spec,) = specs("hardware=cpu", "runtime=docker", f"model.path={snapshot}").values()
    assert {m.source for m in spec.mounts if m.read_only} >= {str(snapshot), str(blobs)}


def test_nvidia_containers_get_the_gpus_of_their_masks():
    arguments = ["hardware=h100", "method=grpo", "model=qwen3_4b", "topology=split", *CUSTOM]
    containers = specs(*arguments)
    sent = {
        name: sdk_arguments(containers[name])["host"]["device_requests"][0]["device_ids"]
        for name in ("server", "trainers")
    }
    assert sent == {"server": ["0", "1"], "trainers": [str(n) for n in range(8)]}
    assert containers["server"].environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert containers["trainers"].environment["CUDA_VISIBLE_DEVICES"] == "1,2,3,4,5,6,7,0"


def test_a_reward_does_not_mount_the_home_directory():
    host = dataclasses.replace(host_with(0), cwd="/home/me")
    with pytest.raises(UserError, match="your home directory"):
        specs(
            *"hardware=cpu runtime=docker method=grpo".split(),
            "++method.rewards={mine.reward: 1}",
            host=host,
        )


LIGER = ("model=qwen3_4b", "method.args.use_liger_kernel=true")


def test_missing_liger_is_rejected(monkeypatch):
    check_files(composed("hardware=mi300x", *LIGER), all_lines=False)
    with pytest.raises(
        UserError, match="use_liger_kernel=true: the image cpu does not contain liger-kernel"
    ):
        check_files(
            composed("hardware=mi300x", "runtime=docker", "container=cpu", *LIGER), all_lines=False
        )
    in_a_job = ["runtime=slurm", "runtime.slurm.container=docker", "container=cpu"]
    with pytest.raises(
        UserError,
        match=r"Use: method\.args\.use_liger_kernel=false, or runtime\.slurm\.container=none\.",
    ):
        check_files(composed("hardware=mi300x", *in_a_job, *LIGER), all_lines=False)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)  # as if it were not installed
    with pytest.raises(UserError, match="the package liger-kernel is not installed"):
        check_files(composed("hardware=h200", *LIGER), all_lines=False)
    on_slurm = [
        "runtime=slurm",
        "runtime.slurm.container=none",
        "runtime.slurm.python=/shared/venv/bin/python",
    ]
    check_files(composed("hardware=h200", *on_slurm, *LIGER), all_lines=False)


@pytest.mark.parametrize(("override", "package", "remedy"), [
    ("method.args.optim=schedule_free_adamw", "schedulefree", "method.args.optim=adamw_torch"),
    ("method.args.optim=stable_adamw", "optimi", "pip install torch-optimi, or"),
    ("hardware.attention=flash_attention_2", "flash_attn", "hardware.attention=sdpa"),
    ("hardware.packed_attention=flash_attention_2", "flash_attn", "hardware.packed_attention=varlen"),
])  # fmt: skip
def test_missing_packages_of_optimizers_and_attention_are_rejected(
    monkeypatch, override, package, remedy
):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    check_files(composed("hardware=h200", override, "smoke=true"), all_lines=False)
    with pytest.raises(UserError, match=f"{override}: .*not installed.*{remedy}"):
        check_files(composed("hardware=h200", override), all_lines=False)


def test_a_plan_for_another_machine_only_warns_of_a_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    optimizer = "method.args.optim=schedule_free_adamw"
    config = composed("hardware=mi300x", "runtime=local", optimizer)
    [warning] = check_files(config, all_lines=False, host=host_with(0))
    assert optimizer in warning
    with pytest.raises(UserError, match=optimizer):
        check_files(config, all_lines=False, host=host_with(8))
    in_image = composed("hardware=mi300x", "runtime=docker", optimizer)
    with pytest.raises(UserError, match=optimizer):
        check_files(in_image, all_lines=False, host=host_with(0))


@pytest.mark.parametrize(("overrides", "package", "message"), [
    (["precision=fp8"], "torchao", "precision=fp8: .*make quantization.*precision=bf16"),
    (["precision=nf4", "adapter=qlora"], "bitsandbytes", "precision=nf4: .*precision=bf16"),
    (["method=bench/finetune"], "torchao",
     r"method.args.modes=full_fp8: .*method.args.modes=\[full_bf16,lora_bf16\]"),
    (["method=bench/precision"], "torchao",
     r"method.args.precisions=fp8: .*method.args.precisions=\[fp32,fp16,bf16\]"),
    (["method=bench/precision", "method.args.precisions=[nf4]"], "bitsandbytes",
     "method.args.precisions=nf4"),
    (["method.args.optim=adamw_8bit"], "bitsandbytes", "method.args.optim=adamw_8bit: .*adamw_torch"),
    (["method.args.optim=adamw_torch_4bit"], "torchao", "make quantization.*adamw_torch"),
])  # fmt: skip
def test_missing_packages_of_8_bits_and_fewer_are_rejected(
    monkeypatch, overrides, package, message
):
    model = "model=qwen3_0_6b"
    check_files(composed("hardware=mi300x", model, *overrides), all_lines=False)
    check_files(composed("hardware=mi300x", model, "smoke=true", *overrides), all_lines=False)
    with pytest.raises(UserError, match=f"image cpu does not contain {package}"):
        check_files(
            composed("hardware=mi300x", "runtime=docker", "container=cpu", model, *overrides),
            all_lines=False,
        )
    for name in ("torchao", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, name, None)  # as if they were not installed
    with pytest.raises(UserError, match=message):
        check_files(
            composed("hardware=h200", "topology=single", model, *overrides), all_lines=False
        )
    check_files(
        composed("hardware=mi210", model, "method=bench/finetune", "method.args.modes=[full_fp8]"),
        all_lines=False,
    )


def test_task_files_of_the_harness_are_mounted(tmp_path, monkeypatch):
    """Their path is relative to the directory of the command."""
    (tmp_path / "tasks").mkdir()
    monkeypatch.chdir(tmp_path)
    overrides = (
        "method=evaluate model=qwen3_4b runtime=docker method.args.lm_eval_tasks=[a]".split()
    )
    config, _ = prepare(
        composed("hardware=mi300x", *overrides, "+method.args.lm_eval_include=tasks")
    )
    plan = make_plan(config, host_with(8), RUN)
    (spec,) = plan.containers.values()
    assert [m.read_only for m in spec.mounts if m.source == str(tmp_path / "tasks")] == [True]
    assert plan.trainer_args["lm_eval_include"] == str(tmp_path / "tasks")


def test_the_data_set_of_vllms_benchmark_is_checked_and_mounted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bench = "hardware=mi300x model=qwen3_8b method=bench/vllm method.args.dataset=share.json"
    config, _ = prepare(composed(*bench.split()))
    with pytest.raises(UserError, match=r"method\.args\.dataset=.*share\.json: no such file"):
        check_files(config, all_lines=False)
    (tmp_path / "share.json").write_text("[]")
    check_files(config, all_lines=False)
    plan = make_plan(config, host_with(8), RUN)
    (spec,) = plan.containers.values()
    sources = [m.read_only for m in spec.mounts if m.source == str(tmp_path / "share.json")]
    assert sources == [True]


def test_inputs_are_mounted_read_only():
    arguments = (
        "hardware=cpu runtime=docker method=grpo data=jsonl data.path=/data/a.jsonl "
        "model.path=/models/mine"
    ).split()
    (spec,) = specs(
        *arguments,
        "~method.rewards.reasoning_gym",
        "++method.rewards={mine.reward: 1}",
        "user_env.PYTHONPATH=/home/me/lib",
    ).values()
    mounted = {m.source: m for m in spec.mounts}
    for path in ("/data/a.jsonl", "/models/mine", "/home/me/work", "/home/me/lib"):
        assert mounted[path].read_only
        assert mounted[path].target == path
    assert spec.environment["PYTHONPATH"] == f"{ROOT}:/home/me/lib:/home/me/work"


@pytest.mark.parametrize("runtime", ["local", "docker", "apptainer"])
def test_a_reward_that_ranks_will_not_find_is_rejected_with_a_remedy(
    launch, tmp_path, monkeypatch, runtime
):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "my_reward.py").write_text("def one(completions):\n    return [1.0]\n")
    words = "hardware=mi300x method=grpo topology=ddp model=qwen3_0_6b mode=plan".split()
    words += [f"runtime={runtime}", "method.rewards={my_reward.one: 1.0}"]
    unknown = launch(*words)
    assert (unknown.code, "no module 'my_reward'" in unknown.err) == (2, True)
    remedy = unknown.err.rpartition("Use: ")[2].partition("<")[0] + str(folder)
    done = launch(*words, remedy, "format=json")
    assert done.code == 0, done.err
    [process] = json.loads(done.out)["processes"]
    assert str(folder) in process["env"]["PYTHONPATH"].split(":")
    monkeypatch.syspath_prepend(folder)  # as PYTHONPATH of the shell does
    assert launch(*words).code == (0 if runtime == "local" else 2)


@pytest.mark.parametrize(
    "path", ["/data.jsonl", "/proc/self/data.jsonl", "/sys/a/b.jsonl", "/opt/recipes/a.jsonl"]
)
def test_a_mount_that_would_hide_the_system_is_rejected(path):
    with pytest.raises(UserError, match="cannot be mounted"):
        specs("hardware=cpu", "runtime=docker", "data=jsonl", f"data.path={path}")


SERVE = ("hardware=mi300x", "runtime=docker", "method=serve", "model=qwen3_0_6b")


@pytest.mark.parametrize(("words", "ports"), [
    ([], {8000: "127.0.0.1"}),
    (["method.args.host=0.0.0.0", "method.args.port=80"], {80: "0.0.0.0"}),
    (["runtime.network=host"], {}),
])  # fmt: skip
def test_only_the_port_of_a_server_is_published(words, ports):
    (spec,) = specs(*SERVE, *words).values()
    assert spec.ports == ports
    arguments = sdk_arguments(spec)
    bindings = arguments["host"].get("port_bindings", {})
    assert bindings == {port: (address, port) for port, address in ports.items()}
    assert "VLLM_SERVER_DEV_MODE" not in spec.environment, "clients could change the weights"
    other, *_ = specs("hardware=mi300x", "runtime=docker", "method=sft").values()
    assert "port_bindings" not in sdk_arguments(other)["host"]


@pytest.mark.parametrize("tty", [True, False])
def test_a_chat_reads_the_terminal_and_ends_with_it(tty):
    (spec,) = specs("hardware=mi300x", "runtime=docker", "method=chat", "model=qwen3_0_6b").values()
    spec = dataclasses.replace(spec, stdin=True, tty=tty)
    arguments = sdk_arguments(spec)["container"]
    names = ("image", "command", "detach", "stdin_open", "tty")
    created = ContainerConfig("1.41", **{name: arguments[name] for name in names})
    keys = ("OpenStdin", "StdinOnce", "Tty", "AttachStdin")
    assert [created[key] for key in keys] == [True, True, tty, True]
