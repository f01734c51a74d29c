"""Compose every file of conf/; check what `auto` and smoke=true choose."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from launch.config import compose
from launch.config.request import Request
from launch.config.wording import CONF, groups
from launch.core.errors import UserError
from launch.machine import inside
from launch.plan.planning import make_plan, prepare
from launch.plan.process_env import ROOT
from launch.rules.check import refusals
from launch.schema import Config
from tests.conftest import command, composed, host_with

# overrides that an option requires
NEEDS = {
    "data/jsonl": ["data.path=train.jsonl"],
    "data/hub": ["data.hub_id=owner/name", "data.revision=c"],
    "data/mix": ["data.sources=[{path: train.jsonl, weight: 1.0}]"],
    "data/samples": ["method=dpo", "data.path=samples.jsonl"],
    "adapter/qlora": ["hardware=mi300x", "precision=nf4", "model=qwen3_4b"],
    "precision/nf4": ["hardware=mi300x", "adapter=qlora", "model=qwen3_4b"],
    "precision/fp8": ["hardware=mi300x"],
    "precision/fp16": ["hardware=mi300x"],
    "method/export": ["model.path=model"],
    "method/serve": ["hardware=mi300x"],
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
# Images that are only built and entered; a rule rejects runs in them
REJECTED = {"container/seed_mi300x": "image", "container/seed_mi350x": "image"}
OPTIONS = [f"{group}/{option}" for group, options in groups().items() for option in options]
OPTIONS.remove("model/auto")  # needs files: tests/launch/config/test_follow_files.py


@pytest.mark.parametrize("option", OPTIONS)
def test_option_composes_and_passes_the_rules(option):
    group, name = option.split("/", 1)
    needs = NEEDS.get(option, ["hardware=mi300x"] if name.startswith(("bench/", "tune/")) else [])
    base = (
        []
        if group in ("hardware", "experiment") or any(o.startswith("hardware=") for o in needs)
        else ["hardware=cpu"]
    )
    config = composed(*base, *needs, f"{group}={name}")
    assert isinstance(config, Config)
    assert [rule.name for rule in refusals(config)] == (
        [REJECTED[option]] if option in REJECTED else []
    )


def test_every_file_is_an_option_or_a_base_with_a_header():
    files = {str(f.relative_to(CONF).with_suffix("")): f.read_text() for f in CONF.rglob("*.yaml")}
    bases = {name for name in files if "/base/" in name}
    assert {*files} - bases == {*OPTIONS, "model/auto", "config"}
    everything = "".join(files.values())
    unused = [base for base in bases if f"{base.rsplit('/', 1)[1]}@_here_" not in everything]
    assert unused == []
    with_launch_line = ("hardware/", "model/", "adapter/", "precision/", "topology/", "tracking/")
    for name in {*files} - bases:
        opening = files[name].partition("\n\n")[0]
        assert opening.startswith("#"), name
        program = "python containers/build.py" if name in REJECTED else "python launch/run.py"
        assert program in files[name], name
        if name.startswith((*with_launch_line, "experiment/")):
            assert "\n# Launch:    " in f"\n{opening}", name
        if name.startswith(("hardware/", "experiment/")):
            assert "\n# Override:  " in f"\n{opening}", name


@pytest.mark.parametrize(("overrides", "topology", "precision"), [
    ("hardware=cpu", "single", "fp32"),
    ("hardware=mi300x model=qwen2_5_7b", "ddp", "bf16"),
    # its state fits, but not with the planner's error
    ("hardware=mi300x model=qwen3_8b", "fsdp", "bf16"),
    # with a reference model
    ("hardware=mi300x model=qwen2_5_7b method=dpo", "fsdp", "bf16"),
    ("hardware=mi300x model=qwen3_4b method=grpo", "split", "bf16"),
    ("hardware=mi300x model=qwen3_4b method=evaluate", "ddp", "bf16"),
    ("hardware=mi50 model=qwen3_0_6b method=grpo", "single", "fp32"),
    ("hardware=mi50 model=qwen3_4b method=evaluate", "single", "fp32"),
    ("hardware=mi50 model=qwen3_8b method=evaluate", "single", "fp16"),
    ("hardware=mi300x topology.num_gpus=1 model=qwen3_4b", "single", "bf16"),
    ("hardware=mi300x model=qwen3_4b adapter=qlora", "ddp", "nf4"),
    ("hardware=mi100 model=qwen3_4b adapter=lora", "ddp", "bf16"),
    ("hardware=mi100 model=qwen3_4b adapter=qlora", "ddp", "nf4"),
    ("hardware=mi100 model=qwen3_4b adapter=qlora precision=nf4", "ddp", "nf4"),
    (
        "hardware=mi100 model=qwen3_4b adapter=lora precision=fp16 precision.weights=nf4",
        "ddp",
        "fp16",
    ),
])  # fmt: skip
def test_automatic_topology_and_precision(overrides, topology, precision):
    config = composed(*overrides.split())
    assert (config.topology.name, config.precision.name) == (topology, precision)


@pytest.mark.parametrize(("overrides", "strategy"), [
    ("hardware=mi300x model=qwen3_4b", "ddp"),
    ("hardware=mi300x model=qwen3_8b", "fsdp"),
    ("hardware=h100 model=qwen3_4b topology.num_gpus=4 topology.servers=2", "fsdp"),
    ("hardware=h100 model=qwen3_4b topology.servers=auto", "fsdp"),
    # a single trainer
    ("hardware=h100 model=qwen3_4b topology.num_gpus=2", "ddp"),
    ("hardware=h100 model=qwen3_4b topology.num_gpus=4 topology.servers=3", "ddp"),
    ("hardware=h100 model=qwen3_4b topology.strategy=zero3", "zero3"),
    ("hardware=mi300x model=qwen3_8b adapter=lora", "ddp"),
])  # fmt: skip
@pytest.mark.parametrize("topology", [[], ["topology=split"]])
def test_strategy_of_split_depends_on_memory_and_trainers(overrides, strategy, topology):
    config = composed("method=grpo", *overrides.split(), *topology)
    assert (config.topology.name, config.topology.strategy) == ("split", strategy)


@pytest.mark.parametrize(("overrides", "strategy"), [
    ("model=qwen3_4b", "none"),
    ("model=qwen3_4b topology.num_gpus=8", "ddp"),
    ("model=qwen3_32b topology.num_gpus=8", "fsdp"),
    ("model=qwen3_4b topology.num_gpus=8 topology.strategy=zero2", "zero2"),
])  # fmt: skip
def test_strategy_of_colocated_trainers(overrides, strategy):
    grpo = ["hardware=mi300x", "method=grpo", "topology=colocate"]
    assert prepare(composed(*grpo, *overrides.split()))[0].topology.strategy == strategy


@pytest.mark.parametrize(("overrides", "runtime", "image"), [
    ("hardware=cpu", "local", "none"),
    ("hardware=h200 model=qwen3_4b", "local", "none"),
    ("hardware=mi300x model=qwen3_4b", "docker", "rocm"),
    ("hardware=mi50", "docker", "rocm_gfx906"),
    ("hardware=mi300x container=none", "local", "none"),
    ("hardware=mi300x smoke=true", "local", "none"),
    ("hardware=mi300x smoke=true runtime=docker", "docker", "cpu"),
    ("hardware=mi300x smoke=true container=rocm", "docker", "rocm"),
    ("hardware=cpu container=cpu", "docker", "cpu"),
    ("hardware=mi300x runtime=slurm model=qwen3_4b", "slurm", "none"),
    ("hardware=mi300x runtime=slurm runtime.slurm.container=docker", "slurm", "rocm"),
])  # fmt: skip
def test_automatic_runtime_and_image(overrides, runtime, image):
    config = composed(*overrides.split(), "model=qwen3_0_6b")
    assert (config.runtime.name, config.container.name) == (runtime, image)


@pytest.mark.parametrize(("overrides", "runtime"), [
    ("", "local"), ("container=rocm", "docker"), ("runtime=docker", "docker"),
])  # fmt: skip
def test_runtime_in_a_rented_container(tmp_path, monkeypatch, overrides, runtime):
    monkeypatch.setattr(inside, "ROOT", tmp_path)
    monkeypatch.delenv(inside.DOCKER_HOST, raising=False)
    for name in ("dev/kfd", ".dockerenv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    config = compose.compose(["hardware=mi300x", *overrides.split()])
    assert (config.runtime.name, config.container.name == "none") == (runtime, runtime == "local")


@pytest.mark.parametrize(
    "overrides",
    [
        "topology.num_gpus=4 hardware=mi300x topology=fsdp topology.fsdp.cpu_offload=true "
        "user_env.A=b",
        "hardware=h200 hardware=cpu ++method.args={beta:0.2} "
        "~method.args.gradient_accumulation_steps method=dpo",
        "experiment=mi50_phase1 seed=7 seed=8",
        "experiment=tiny_learning sweep=batch tracking=none",
    ],
)
def test_cached_composition_equals_hydras(overrides):
    """Compose twice, because a change to the first result must not affect the second."""
    checked = [*Request(overrides.split()).checked()]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        expected = OmegaConf.to_yaml(hydra_compose("config", checked))
    for _ in range(2):
        result = compose._compose(Request(checked))
        assert OmegaConf.to_yaml(result) == expected
        assert OmegaConf.is_struct(result)
        result.hardware.name = "changed"


def test_values_of_the_command_line():
    config = composed("hardware=cpu", "user_env.A=true", "user_env.B=1e3", "user_env.C='x y'")
    assert config.user_env == {"A": "true", "B": "1e3", "C": "x y"}, "values stay as typed"
    decay = composed("hardware=cpu", "method.args.weight_decay=0.1").method.args["weight_decay"]
    assert decay == 0.1, "free keys need no plus"
    config = composed("experiment=mi50_phase1", "seed=7", "hardware=mi60")
    assert (config.seed, config.hardware.name) == (7, "mi60"), "they override an experiment"
    assert composed("experiment=null", "hardware=cpu").method.name == "sft"


@pytest.mark.parametrize(("method", "key", "is_read"), [
    ("bench/gemm", "model.init=random", False),
    ("bench/gemm", "precision.weights=bf16", False),
    ("bench/transformer", "precision.weights=bf16", True),
    ("tune/batch", "data.limit=4", True),
])  # fmt: skip
def test_keys_of_groups_that_a_method_does_not_read_are_rejected(method, key, is_read):
    overrides = ["hardware=mi350x", f"method={method}", key]
    if is_read:
        compose.compose(overrides)
        return
    with pytest.raises(UserError, match=f"{key.partition('=')[0]} with method={method}"):
        compose.compose(overrides)


@pytest.mark.parametrize(("overrides", "warning"), [
    ("mode=plan mode=run", "mode: set 2 times. The last value is used."),
    ("seed=1 +seed=2 ++seed=3", "seed: set 3 times. The last value is used."),
    ("seed=1 seed=1", None),
    ("+method.args.x=1 ~method.args.x +method.args.x=2", None),  # deleted in between
    ("method.args={beta:1} method.args={max_steps:2}", None),  # merged
    ("seed=1,2 seed=3", "seed: set 2 times. The values of the sweep are used."),
])  # fmt: skip
def test_repeated_keys_cause_a_warning(overrides, warning):
    assert Request(overrides.split()).warnings == ([warning] if warning else [])


@pytest.mark.parametrize("prompt", [
    "Think. End with #### number.",
    "Solve the user's problem.",
    "Think, then answer.",
    'Say "yes", or #no',
    "End with: \\boxed{}.",
    'A \\"b\\\\" \\ #\\',
    "Two\nlines: #",
])  # fmt: skip
def test_text_that_needs_quotes(prompt):
    """The message has the override in quotes for a shell, and that is the text as typed."""
    with pytest.raises(UserError) as raised:
        composed(f"data.system_prompt={prompt}")
    offered = str(raised.value).rpartition("Use: ")[2].partition(", or -m")[0].removesuffix(".")
    [pasted] = shlex.split(offered)
    assert composed(pasted).data.system_prompt == prompt


@pytest.mark.parametrize("override", ["name='a", "seed=1#", "data.tasks=[{name: a", "seed=1,2"])
def test_quotes_are_offered_only_for_text(override):
    with pytest.raises(UserError) as raised:
        composed(override)
    assert '="' not in str(raised.value)


def test_the_home_directory_of_a_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert composed("data.path=~/rows.jsonl").data.path == "/home/someone/rows.jsonl"
    assert composed("user_env.X=~/a").user_env["X"] == "~/a"


def test_plan_changes_nothing_and_prints_one_object(launch, tmp_path):
    grpo = ["hardware=mi350x", "method=grpo", "model=qwen3_4b", "mode=plan"]
    plan = json.loads(launch(*grpo, "format=json").out)
    keys = "schema name run_dir hardware image runtime topology processes memory speed warnings"
    assert {*keys.split()} <= {*plan}
    assert [process["kind"] for process in plan["processes"]] == ["pause", "server", "trainer"]
    page = launch(*grpo, "verbose=true").out
    for words in ("AMD Instinct MI350X", "7 GPUs", "vllm serve", "tokens/s", "learning_rate"):
        assert words in page
    assert list(tmp_path.iterdir()) == []


def test_plan_does_not_import_the_training_stack():
    code = (
        "import sys; from launch.run import main; main(['mode=plan', 'hardware=mi350x']); "
        "stack = {'torch', 'transformers', 'trl', 'datasets', 'accelerate', 'matplotlib', "
        "'docker'}; print(sorted(stack & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_help_and_hydra_options(launch, tmp_path, monkeypatch):
    page = launch("--help")
    assert page.code == 0
    for words in ("mi350x", "experiment=quickstart", "exit codes", "\n  adapter.rank="):
        assert words in page.out
    assert max(map(len, page.out.splitlines())) <= 100
    assert "learning_rate" in command("--cfg", "job", "hardware=cpu", cwd=tmp_path).stdout
    monkeypatch.setenv("COMP_LINE", "python launch/run.py hardware=mi35")
    monkeypatch.setenv("COMP_POINT", "34")
    done = command("-sc", "query=bash", cwd=tmp_path)
    assert done.stdout.split() == ["hardware=mi350x", "hardware=mi355x"]


@pytest.mark.parametrize(("overrides", "expected"), [
    ("", True),
    ("topology.overlap=false", False),
    ("topology.num_gpus=1", None),
    ("method.selection.metric=eval_reward", None),
    ("method.args.vllm_importance_sampling_correction=false", None),
])  # fmt: skip
def test_a_split_overlaps_unless_a_rule_would_reject_it(overrides, expected):
    base = "hardware=mi300x model=qwen3_0_6b method=grpo topology=split".split()
    config = composed(*base, *overrides.split())
    assert config.topology.overlap is expected
    assert not any("overlap" in rule.name for rule in refusals(config))


@pytest.mark.parametrize(("overrides", "name"), [
    ("hardware=mi350x method=grpo model=qwen3_4b", "reasoning_hard"),
    ("hardware=mi350x method=evaluate model=qwen3_0_6b", "reasoning_hard"),
    ("hardware=mi350x method=sft model=qwen3_4b", "reasoning"),
    ("method=grpo", "reasoning"),
    ("method=grpo hardware=mi350x model=qwen3_4b data=reasoning", "reasoning"),
])  # fmt: skip
def test_generated_problems_suit_the_model(overrides, name):
    config = composed(*overrides.split())
    levels = {(task.name, task.level) for task in config.data.tasks}
    assert config.data.name == name
    assert (len(levels) > 3) == (name == "reasoning_hard")


@pytest.mark.parametrize(("experiment", "method"), [
    ("mi350x_qwen3_8b_lora", "sft"),
    ("strix_halo_sft", "sft"),
    ("mi50_lora", "sft"),
    ("one_card_sft", "sft"),
    ("rx7900xtx_grpo_gsm8k_lora", "grpo"),
])  # fmt: skip
def test_lora_has_ten_times_the_learning_rate_of_full_training(experiment, method):
    full = composed("hardware=mi300x", "model=qwen3_8b", f"method={method}").method.args
    rate = composed(f"experiment={experiment}").method.args["learning_rate"]
    assert rate == pytest.approx(10 * full["learning_rate"])


@pytest.mark.parametrize(("experiment", "rewards"), [
    ("mi300x_grpo_gsm8k", {"accuracy": 1.0}),
    ("mi350x_grpo_gsm8k", {"accuracy": 1.0}),
    ("mi300x_single_grpo_gsm8k", {"accuracy": 1.0}),
    ("rx7900xtx_grpo_gsm8k_lora", {"accuracy": 1.0}),
    ("chat_sft", {}),
    ("preferences_dpo", {}),
    ("mi50_phase3", {}),
    ("mi50_lora", {}),
    ("one_card_sft", {}),
    ("strix_halo_sft", {}),
])  # fmt: skip
def test_experiments_with_public_data_are_pinned_and_fit(experiment, rewards):
    hardware = {
        **dict.fromkeys(("chat_sft", "preferences_dpo"), ["hardware=mi300x"]),
        "one_card_sft": ["hardware=mi50_16gb"],
    }
    config = composed(f"experiment={experiment}", *hardware.get(experiment, []))
    is_unverified = config.data.hub_id == "AI-MO/NuminaMath-CoT"
    assert is_unverified or re.fullmatch("[0-9a-f]{40}", config.data.revision)
    assert config.method.rewards == rewards
    assert all(memory.fits for memory in make_plan(config, host_with(8), Path("/runs/a/1")).memory)


@pytest.mark.parametrize("content", ["seed", "- seed"])
def test_a_file_without_keys_is_rejected(tmp_path, monkeypatch, content):
    (tmp_path / "mine.yaml").write_text(content)
    files = compose._Files()
    monkeypatch.setattr(compose, "CONF", tmp_path)
    with pytest.raises(UserError, match=r"mine\.yaml: contains no keys"):
        files.load_config("mine")
