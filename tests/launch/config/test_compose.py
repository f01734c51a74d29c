"""Compose every file of conf/; check what `auto` and smoke=true choose."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from launch.config import compose
from launch.config.identity import composition_hash, has_phases
from launch.config.request import Request
from launch.config.wording import CONF, groups
from launch.core.errors import UserError
from launch.plan.environment import ROOT
from launch.plan.planning import make_plan, prepare
from launch.rules.check import refusals
from launch.schema import Config
from launch.schema.enums import Init
from launch.study import pipeline
from tests.conftest import command, composed, host_with

# What an option needs in order to work
NEEDS = {
    "data/jsonl": ["data.path=train.jsonl"],
    "data/hub": ["data.hub_id=owner/name"],
    "data/mix": ["data.sources=[{path: train.jsonl, weight: 1.0}]"],
    "data/samples": ["method=dpo", "data.path=samples.jsonl"],
    "adapter/qlora": ["hardware=mi300x", "precision=nf4", "model=qwen3_4b"],
    "precision/nf4": ["hardware=mi300x", "adapter=qlora", "model=qwen3_4b"],
    "precision/fp8": ["hardware=mi300x"],
    "precision/fp16": ["hardware=mi300x"],
    "method/export": ["model.path=model"],
    "model_method/tiny_dpo": ["method=dpo"],
    "model_method/tiny_grpo": ["method=grpo"],
    "model_method/tiny_evaluate": ["method=evaluate"],
    "model_method/tiny_sample": ["method=sample"],
    "model_method/tiny_raft": ["method=raft"],
    **{
        f"model_method/qwen3_76m_{name}": ["model=qwen3_76m", f"method={name}"]
        for name in ("dpo", "evaluate", "grpo", "raft", "sample", "sft")
    },
    "topology/ddp": ["hardware=mi300x"],
    "topology/fsdp": ["hardware=mi300x"],
    "topology/zero2": ["hardware=mi300x"],
    "topology/zero3": ["hardware=mi300x"],
    "topology/split": ["hardware=mi300x", "method=grpo"],
    "topology/colocate": ["hardware=mi300x", "method=grpo"],
    **{
        f"method/bench/{name}": ["hardware=mi300x", "model=qwen3_8b"]
        for name in ("batch_size", "checkpointing", "finetune")
    },
    "container/custom": ["container.reference=me/mine:1"],
}
# Images to build and enter; a rule says why no recipe runs in them
REFUSED = {"container/seed_mi300x": "image", "container/seed_mi350x": "image"}
OPTIONS = [f"{group}/{option}" for group, options in groups().items() for option in options]


@pytest.mark.parametrize("option", OPTIONS)
def test_option_composes_and_is_not_refused(option):
    group, name = option.split("/", 1)
    beside = NEEDS.get(option, ["hardware=mi300x"] if name.startswith(("bench/", "tune/")) else [])
    base = (
        []
        if group in ("hardware", "experiment") or any(o.startswith("hardware=") for o in beside)
        else ["hardware=cpu"]
    )
    config = composed(*base, *beside, f"{group}={name}")
    assert isinstance(config, Config)
    assert [rule.name for rule in refusals(config)] == (
        [REFUSED[option]] if option in REFUSED else []
    )


def test_every_file_is_an_option_or_a_base():
    files = {str(f.relative_to(CONF).with_suffix("")) for f in CONF.rglob("*.yaml")} - {"config"}
    bases = {f for f in files if "/base/" in f}
    assert files - bases == set(OPTIONS)
    text = "".join(f.read_text() for f in CONF.rglob("*.yaml"))
    assert [
        base for base in bases if f"{base.rsplit('/', 1)[1]}@_here_" not in text
    ] == []  # each is used


@pytest.mark.parametrize(
    "file", sorted(CONF.rglob("*.yaml")), ids=lambda f: str(f.relative_to(CONF))
)
def test_every_file_opens_with_what_it_needs(file: Path):
    text = file.read_text()
    assert text.startswith("#")
    if "/base/" not in str(file):
        assert "python launch/run.py" in text or (
            "python containers/build.py" in text and f"container/{file.stem}" in REFUSED
        )


@pytest.mark.parametrize(
    ("overrides", "chosen"),
    [
        (["hardware=cpu"], ("single", "fp32")),
        (["hardware=mi300x", "model=qwen3_4b"], ("ddp", "bf16")),
        (["hardware=mi300x", "model=qwen3_14b"], ("fsdp", "bf16")),
        (["hardware=mi300x", "model=qwen3_8b"], ("ddp", "bf16")),
        # with a reference model
        (["hardware=mi300x", "model=qwen3_8b", "method=dpo"], ("fsdp", "bf16")),
        (["hardware=mi300x", "model=qwen3_4b", "method=grpo"], ("split", "bf16")),
        (["hardware=mi300x", "model=qwen3_4b", "method=evaluate"], ("ddp", "bf16")),
        (["hardware=strix_halo", "model=qwen3_4b", "method=grpo"], ("single", "bf16")),
        (["hardware=mi50", "model=qwen3_0_6b", "method=grpo"], ("single", "fp32")),
        (["hardware=mi300x", "topology.num_gpus=1", "model=qwen3_4b"], ("single", "bf16")),
        (["hardware=mi300x", "model=qwen3_4b", "adapter=qlora"], ("ddp", "nf4")),
    ],
)
def test_auto(overrides, chosen):
    config = composed(*overrides)
    assert (config.topology.name, config.precision.name) == chosen


@pytest.mark.parametrize(
    ("overrides", "chosen"),
    [
        (["hardware=cpu"], ("local", "none")),
        (["hardware=h200", "model=qwen3_4b"], ("local", "none")),
        (["hardware=mi300x", "model=qwen3_4b"], ("docker", "rocm")),
        (["hardware=mi100", "model=qwen3_4b"], ("docker", "rocm_gfx908")),
        (["hardware=mi50"], ("docker", "rocm_gfx906")),
        (["hardware=r9700", "model=qwen3_4b"], ("docker", "rocm_rdna")),
        (["hardware=strix_halo", "model=qwen3_4b"], ("docker", "rocm_strix_halo")),
        (["hardware=mi300x", "container=none"], ("local", "none")),
        (["hardware=mi300x", "runtime=local"], ("local", "none")),
        (["hardware=mi300x", "smoke=true"], ("local", "none")),
        (["hardware=mi300x", "smoke=true", "runtime=docker"], ("docker", "cpu")),
        (["hardware=mi300x", "smoke=true", "container=rocm"], ("docker", "rocm")),
        (["hardware=cpu", "runtime=docker"], ("docker", "cpu")),
        (["hardware=cpu", "container=cpu"], ("docker", "cpu")),
        (["hardware=mi300x", "runtime=slurm", "model=qwen3_4b"], ("slurm", "none")),
        (
            ["hardware=mi300x", "runtime=slurm", "runtime.slurm.inner=docker", "model=qwen3_4b"],
            ("slurm", "rocm"),
        ),
    ],
)
def test_runtime_and_image_follow(overrides, chosen):
    config = composed(*overrides)
    assert (config.runtime.name, config.container.name) == chosen


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "topology.num_gpus=4",
            "hardware=mi300x",
            "topology=fsdp",
            "topology.fsdp.cpu_offload=true",
            "user_env.A=b",
        ],
        [
            "hardware=h200",
            "hardware=cpu",
            "++method.args={beta: 0.2}",
            "~method.args.gradient_accumulation_steps",
            "method=dpo",
        ],
        ["experiment=mi50_phase1", "seed=7", "seed=8"],
        ["experiment=tiny_learning", "sweep=batch", "tracking=none"],
    ],
)
def test_options_that_are_kept_compose_to_what_hydra_composes(overrides):
    """Compose twice: changing the first must not change the second."""
    overrides = [*Request(overrides).checked()]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        whole = OmegaConf.to_yaml(hydra_compose("config", overrides))
    for _ in range(2):
        composed = compose._compose(Request(overrides))
        assert OmegaConf.to_yaml(composed) == whole
        assert OmegaConf.is_struct(composed)
        composed.hardware.name = "changed"


def test_free_keys_need_no_plus():
    assert (
        composed("hardware=cpu", "method.args.weight_decay=0.1").method.args["weight_decay"] == 0.1
    )


def test_experiment_null_is_the_default(launch):
    assert launch("experiment=null", "mode=plan").code == 0


def test_values_of_user_env_stay_as_typed():
    config = composed("hardware=cpu", "user_env.A=true", "user_env.B=1e3", "user_env.C='x y'")
    assert config.user_env == {"A": "true", "B": "1e3", "C": "x y"}


def test_the_command_line_wins_over_an_experiment():
    assert composed("experiment=mi50_phase1", "seed=7").seed == 7
    assert composed("experiment=mi50_phase1", "hardware=mi60").hardware.name == "mi60"


@pytest.mark.parametrize(
    "overrides",
    [
        ["hardware=mi350x", "method=grpo", "model=qwen3_4b"],
        ["hardware=mi210", "precision=fp8", "model=qwen3_32b"],
        ["hardware=mi50", "precision=bf16", "model=llama3_1_70b", "method=dpo"],
        ["experiment=mi350x_qwen3_8b_fp8"],
        ["hardware=mi300x", "adapter=qlora", "precision=nf4", "model=qwen2_5_7b"],
        ["hardware=mi300x", "precision=bf16", "topology.num_gpus=8"],
        ["hardware=mi300x", "precision=bf16", "topology=fsdp", "topology.fsdp.cpu_offload=true"],
        [
            "hardware=mi300x",
            "precision=bf16",
            "topology=zero3",
            "topology.zero.offload_parameters=true",
        ],
        [
            "hardware=mi300x",
            "precision=bf16",
            "method=grpo",
            "topology=split",
            "topology.server_tensor_parallel=2",
            "method.args.num_iterations=3",
        ],
    ],
)
def test_smoke_makes_any_composition_fit_a_cpu(overrides, monkeypatch):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None
    )  # with torchao and bitsandbytes it keeps fp8 and nf4
    config, warnings = prepare(composed(*overrides, "smoke=true"))
    assert config.model.num_parameters < 1_000_000
    assert config.model.init == Init.random
    assert (config.precision.name, config.hardware.vendor.name) == ("fp32", "none")
    assert config.method.args["max_steps"] == 2
    assert any(line.startswith("smoke: in place of precision") for line in warnings)
    assert prepare(config)[0] == config  # a recorded smoke run scales down to itself


@pytest.mark.parametrize(
    ("overrides", "vllm", "shape", "said"),
    [
        (["topology=single"], False, ("single", "none", 1, 0), ""),
        (["topology=ddp"], False, ("ddp", "ddp", 2, 0), "topology.num_gpus=8: two processes"),
        (["topology=zero3", "topology.num_gpus=2"], False, ("zero3", "zero3", 2, 0), ""),
        (
            ["method=grpo", "topology=fsdp", "topology.num_gpus=4"],
            False,
            ("fsdp", "fsdp", 2, 0),
            "topology.num_gpus=4: two processes",
        ),
        (
            [
                "method=grpo",
                "topology=split",
                "topology.server_tensor_parallel=2",
                "topology.server_max_length=2048",
            ],
            False,
            ("single", "none", 1, 0),
            "topology=split: a trainer alone",
        ),
        (
            ["method=grpo", "topology=split", "topology.servers=2"],
            True,
            ("split", "ddp", 2, 1),
            "topology.num_gpus=8: two processes",
        ),
        (
            ["method=grpo", "topology=split", "topology.servers=2"],
            True,
            ("split", "ddp", 2, 1),
            "topology.servers=2",
        ),
        (
            ["method=grpo", "topology=colocate"],
            True,
            ("single", "none", 1, 0),
            "topology=colocate: transformers generates",
        ),
    ],
)
def test_smoke_keeps_the_topology(monkeypatch, overrides, vllm, shape, said):
    found = importlib.machinery.ModuleSpec("vllm", None) if vllm else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    config, warnings = prepare(
        composed("hardware=mi300x", "model=qwen3_4b", *overrides, "smoke=true")
    )
    topology = config.topology
    assert (topology.name, topology.strategy, topology.num_gpus, topology.servers) == shape
    left_out = [line for line in warnings if "smoke: in place of topology" in line]
    assert any(said in line for line in left_out) if said else left_out == []


def test_smoke_keeps_the_sizes_that_are_given():
    config, _ = prepare(
        composed(
            "smoke=true", "hardware=h200", "method=bench/gemm", "method.args.shapes=[[8,16,32]]"
        )
    )
    assert (config.method.args["shapes"], config.method.args["repetitions"]) == ([[8, 16, 32]], 3)
    config, _ = prepare(
        composed(
            "smoke=true",
            "method=sft",
            "method.args.max_length=128",
            "method.args.num_train_epochs=1",
        )
    )
    assert (config.method.args["max_length"], config.method.args["num_train_epochs"]) == (128, 1)
    assert "max_steps" not in config.method.args
    config, said = prepare(
        composed("smoke=true", "hardware=mi350x", "method=bench/gemm", "method.args.fail_below=0.9")
    )
    assert config.method.args["fail_below"] is None
    assert (
        "smoke: in place of method.args.fail_below=0.9: a CPU's figures are compared with nothing."
        in said
    )


def test_smoke_keeps_every_value_of_the_command_line_and_lists_what_it_made_smaller():
    given = ["smoke=true", "hardware=mi300x", "model=qwen3_4b", "adapter=lora", "topology=ddp"]
    kept = [
        "method.args.max_steps=7",
        "model.num_layers=3",
        "data.num_train=50",
        "adapter.rank=16",
        "effective_batch=64",
    ]
    config, said = prepare(composed(*given, *kept))
    assert (
        config.method.args["max_steps"],
        config.model.num_layers,
        config.data.num_train,
        config.adapter.rank,
    ) == (7, 3, 50, 16)
    assert (
        config.data.limit,
        config.effective_batch,
        config.method.args["gradient_accumulation_steps"],
    ) == (None, 64, 8)
    assert config.model.num_parameters < 1_000_000
    [sizes] = [line for line in said if "->" in line]
    for shrunk in (
        "model.hidden_size 2560 -> 64",
        "data.num_heldout 500 -> 8",
        "method.args.max_length ",
    ):
        assert shrunk in sizes
    assert not [key for key in kept if f"{key.partition('=')[0]} " in sizes]
    assert prepare(config)[0] == config, "a recorded smoke run scales down to itself"


@pytest.mark.parametrize(
    ("given", "most"),
    [
        (["method=sft", "model=qwen3_8b", "method.args.max_length=256"], 256),
        (["experiment=mi50_phase1"], 4 * 400),
        (["method=sft", "model=qwen3_8b"], 2048),
        # the command line's values stay
        (["method=sft", "model=qwen3_8b", "method.args.max_length=32768"], 32768),
        (["method=dpo", "model=smollm2_135m", "model.max_positions=1500"], 1500),
        (["method=dpo", "model=qwen3_76m"], 64),  # its own tokenizer
    ],
)
def test_smoke_leaves_room_for_prompts_of_more_tokens(given, most):
    config, _ = prepare(composed("smoke=true", "hardware=mi300x", "topology=single", *given))
    assert config.method.args["max_length"] == most


@pytest.mark.parametrize(
    "name", sorted(file.stem for file in (ROOT / "conf/experiment").glob("*.yaml"))
)
def test_a_smoke_run_of_every_experiment_fits_a_small_machine(name, tmp_path):
    """Check memory here, because a plan does not reject what this machine cannot hold."""
    overrides = [f"experiment={name}", "smoke=true", f"run_root={tmp_path}"]
    config, host = composed(*overrides), host_with(0)
    if has_phases(config):
        plans = list(pipeline.make_plans(config, Request(overrides), host, tmp_path).values())
    else:
        plans = [make_plan(prepare(config)[0], host, tmp_path)]
    assert max((part.total_gb for plan in plans for part in plan.memory), default=0) < 3


def test_a_smoke_run_is_the_same_run_however_it_is_shown_or_resumed():
    shown = ["mode=plan", "verbose=true", "format=json", "resume=never", "name=x", "run_root=a"]
    config = composed("smoke=true", "seed=1")
    assert composition_hash(composed("smoke=true", "seed=1", *shown)) == composition_hash(config)


def test_smoke_says_where_a_given_batch_does_not_divide_by_the_ranks_there_are():
    given = ["smoke=true", "hardware=mi300x", "model=qwen3_4b", "topology=single"]
    given.append("effective_batch=6")
    config, said = prepare(
        compose.compose([*given, "method.args.per_device_train_batch_size=1"], Request(given))
    )
    assert (config.effective_batch, config.method.args["per_device_train_batch_size"]) == (None, 4)
    assert [line for line in said if "effective_batch=6" in line] == [
        "smoke: in place of effective_batch=6: 4, 1 rank(s) x 4 x 1."
    ]


def test_smoke_keeps_the_arguments_that_are_given_for_a_part_of_raft():
    given = [
        "hardware=mi300x",
        "model=qwen3_4b",
        "method=raft",
        "smoke=true",
        "method.args.cycles=1",
    ]
    given += ["method.args.train.logging_steps=3", "method.args.sample.samples_per_prompt=5"]
    plans = pipeline.make_plans(composed(*given), Request(given), host_with(0), Path("/runs/r/1"))
    assert list(plans)[-1] == "cycle1_evaluate"
    assert plans["cycle1_train"].trainer_args["logging_steps"] == 3
    assert plans["cycle1_sample"].trainer_args["samples_per_prompt"] == 5


@pytest.mark.parametrize(
    ("overrides", "there"),
    [
        (["hardware=mi50", "experiment=mi50_phase2"], "fp16"),
        (["hardware=mi300x", "precision=fp16", "topology=fsdp"], "fp16"),
        (["hardware=mi300x", "precision=fp16", "topology=zero2"], "fp32"),
        (["hardware=mi300x", "precision=fp16", "method=grpo", "topology=split"], "fp32"),
    ],
)
def test_smoke_computes_fp16_where_a_cpu_can(overrides, there):
    config, said = prepare(composed(*overrides, "smoke=true"))
    assert (config.precision.compute, config.precision.loss_scaling) == (there, there == "fp16")
    assert any("in place of precision=fp16" in line for line in said) == (there == "fp32")
    assert prepare(config)[0] == config, "a recorded smoke run scales down to itself"


def test_smoke_says_what_would_be_refused_without_it():
    _, warnings = prepare(composed("hardware=mi210", "precision=fp8", "smoke=true"))
    assert any(
        "without smoke=true this is refused: precision=fp8 on mi210" in line for line in warnings
    )


def test_plan_changes_nothing_and_prints_one_object(tmp_path):
    done = command(
        "hardware=mi350x", "method=grpo", "model=qwen3_4b", "mode=plan", "format=json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    keys = "schema name run_dir hardware image runtime topology processes memory speed warnings"
    assert {*keys.split()} <= {*plan}
    assert [p["kind"] for p in plan["processes"]] == ["server", "trainer"]
    assert list(tmp_path.iterdir()) == []


def test_plan_imports_none_of_the_training_stack(tmp_path):
    code = (
        "import sys; sys.argv = ['run.py', 'mode=plan', 'hardware=mi350x']\n"
        "sys.path.insert(0, sys.path[0] or '.')\n"
        "from launch.run import main\n"
        "main(sys.argv[1:])\n"
        "stack = {'torch', 'transformers', 'trl', 'datasets', 'accelerate'}\n"
        "stack |= {'matplotlib', 'docker'}\n"
        "print(sorted(stack & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_help_lists_groups_options_and_examples(launch):
    done = launch("--help")
    assert done.code == 0
    for words in ("hardware=", "mi350x", "experiment=quickstart", "mode=run|plan", "exit codes"):
        assert words in done.out


def test_help_has_the_keys_that_a_newcomer_needs(launch):
    text = launch("--help").out
    keys = ["effective_batch", "topology.num_gpus", "model.path", "adapter.rank"]
    for key in (*keys, "precision.weights", "data.preview", "hardware.memory_gb"):
        assert f"\n  {key}=" in text
    assert max(map(len, text.splitlines())) <= 100


def test_completion_knows_the_options(tmp_path, monkeypatch):
    monkeypatch.setenv("COMP_LINE", "python launch/run.py hardware=mi35")
    monkeypatch.setenv("COMP_POINT", "34")
    done = command("-sc", "query=bash", cwd=tmp_path)
    assert done.stdout.split() == ["hardware=mi350x", "hardware=mi355x"]


def test_cfg_and_defaults_tree(tmp_path):
    assert "learning_rate" in command("--cfg", "job", "hardware=cpu", cwd=tmp_path).stdout
    assert (
        "hardware: mi300x"
        in command("--info", "defaults-tree", "hardware=mi300x", cwd=tmp_path).stdout
    )


def test_text_plan_shows_what_a_person_asks(launch):
    done = launch("hardware=mi300x", "method=grpo", "model=qwen3_4b", "mode=plan", "verbose=true")
    for words in (
        "8 x AMD Instinct MI300X",
        "7 rank(s)",
        "vllm serve",
        "192 GiB (206 GB) each",
        "tokens/s",
        "HSA_NO_SCRATCH_RECLAIM",
        "learning_rate",
        "!",
    ):
        assert words in done.out


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["mode=plan", "mode=run"],
            ["mode is given twice, mode=plan and mode=run: the last counts."],
        ),
        (
            ["seed=1", "+seed=2", "++seed=3"],
            ["seed is given 3 times, seed=1, seed=2 and seed=3: the last counts."],
        ),
        (
            ["model=tiny", "hardware=cpu", "model=qwen3_4b"],
            ["model is given twice, model=tiny and model=qwen3_4b: the last counts."],
        ),
        (["seed=1", "seed=1"], []),
        (["+method.args.x=1", "~method.args.x", "+method.args.x=2"], []),  # taken away in between
        (["method.args={beta: 1}", "method.args={max_steps: 2}"], []),  # merged, and both count
        (
            ["method.args={beta: 1}", "method.args.beta=2"],
            ["method.args.beta is given twice, method.args.beta=1 and method.args.beta=2: the "],
        ),
        (
            ["user_env.KEY=one", "user_env.KEY=two"],
            ["user_env.KEY is given twice: the last counts."],
        ),  # it may be a secret
        (
            ["seed=1,2", "seed=3"],
            ["seed is given twice, seed=1,2 and seed=3: seed=1,2 counts, which the sweep varies."],
        ),
        (["seed=3", "seed=1,2"], ["seed is given twice, seed=3 and seed=1,2: the last counts."]),
        (
            ["name=" + "n" * 99, "name=b"],
            ["name is given twice, name=" + "n" * 75 + "... and name=b"],
        ),
    ],
)
def test_what_is_given_twice_is_said(overrides, said):
    warnings = Request(overrides).warnings
    assert len(warnings) == len(said)
    assert all(line.startswith(words) for line, words in zip(warnings, said, strict=True))


def test_what_is_given_twice_is_said_wherever_it_is_given(launch):
    twice = ["hardware=cpu", "seed=1", "mode=plan", "seed=2"]
    line = "! seed is given twice, seed=1 and seed=2: the last counts."
    assert line in launch(*twice).out
    assert line[2:] in json.loads(launch(*twice, "format=json").out)["warnings"]
    phases = "phases=[{name: one}, {name: two}]"
    for arguments in (
        [*twice, phases, "format=json"],
        ["-m", *twice, "method.args.learning_rate=1e-4,1e-5", "format=json"],
    ):
        done = launch(*arguments)
        assert (done.code, done.err.count(line)) == (0, 1)
        json.loads(done.out)


@pytest.mark.parametrize(
    ("method", "key", "said"),
    [
        (
            "bench/gemm",
            "model.init=random",
            "model.init with method=bench/gemm: it reads nothing of model",
        ),
        ("bench/gemm", "precision.weights=bf16", "it reads nothing of precision"),
        ("bench/transformer", "data.limit=4", "it reads nothing of data"),
        ("tune/rccl", "model.num_layers=2", "it reads nothing of model"),
        ("bench/transformer", "precision.weights=bf16", None),
        ("bench/batch_size", "model.init=random", None),
        ("tune/batch", "data.limit=4", None),
    ],
)
def test_keys_of_groups_that_a_method_does_not_read_are_refused(method, key, said):
    overrides = ["hardware=mi350x", f"method={method}", key]
    if said is None:
        compose.compose(overrides)
        return
    with pytest.raises(UserError, match=said):
        compose.compose(overrides)
