"""The table of rules, row by row: a composition that each rejects, and its remedy."""

from __future__ import annotations

import time

import pytest

from launch.config.compose import groups
from launch.core.errors import UserError
from launch.estimate import batch
from launch.estimate.batch import fitting_batches
from launch.rules.check import RULES, check, refusals
from launch.rules.model import TOLERANCE
from launch.rules.unread import UNREAD_RULES
from launch.rules.warnings import rule_warnings
from launch.schema import Config, shapes
from tests.conftest import composed

NODES = ["runtime=slurm", "runtime.slurm.nodes=2", "runtime.slurm.interface=ib0"]

# rule -> (overrides that break it, words of the remedy)
CODE = [
    "method=grpo",
    "topology=single",
    "data=code",
    "~method.rewards.reasoning_gym",
    "+method.rewards.code_tests=1.0",
]
RAFT = [
    "hardware=mi300x",
    "model=qwen3_4b",
    "model.path=/m",
    "method=raft",
    "~method.rewards.reasoning_gym",
    "+method.rewards.accuracy=1.0",
]
BEST = ["method.selection.metric=eval_loss"]
BY_REWARD = [
    "hardware=mi300x",
    "model=qwen3_4b",
    "method=grpo",
    "method.selection.metric=eval_reward",
]
CASES = {
    "precision": (["hardware=mi210", "precision=fp8"], "precision=bf16"),
    "nf4_without_adapter": (
        ["hardware=mi300x", "precision=nf4", "model=qwen3_4b"],
        "adapter=qlora",
    ),
    "qlora_without_nf4": (["hardware=mi300x", "adapter=qlora", "precision=bf16"], "precision=nf4"),
    "adapter_without_training": (
        ["method=evaluate", "adapter=lora"],
        "adapter=none, with model.path=",
    ),
    "adapter_layers": (
        ["adapter=lora", "adapter.target_modules=[q_prj,v_proj]"],
        "adapter.target_modules=[v_proj], of q_proj, k_proj",
    ),
    "nf4_sharded": (
        ["hardware=mi300x", "adapter=qlora", "precision=nf4", "model=qwen3_4b", "topology=fsdp"],
        "topology=ddp",
    ),
    "nf4_colocate": (
        [
            "hardware=mi300x",
            "adapter=qlora",
            "precision=nf4",
            "model=qwen3_4b",
            "method=grpo",
            "topology=colocate",
        ],
        "topology=split",
    ),
    "fp8_zero3": (["hardware=mi300x", "precision=fp8", "topology=zero3"], "topology=fsdp"),
    "fp16_weights": (
        ["hardware=mi50", "precision=fp16", "precision.weights=fp16"],
        "precision.weights=fp32",
    ),
    "loss_scaling": (
        ["hardware=mi50", "precision=fp16", "precision.loss_scaling=false"],
        "loss_scaling=true",
    ),
    "bench_without_gpu": (["hardware=cpu", "method=bench/gemm"], "smoke=true"),
    "bench_dtypes": (
        ["hardware=mi50", "method=bench/gemm", "method.args.dtypes=[bf16]"],
        "[fp32,fp16]",
    ),
    "bench_lists": (
        ["hardware=mi350x", "method=bench/gemm", "method.args.shapes=[8192,8192,8192]"],
        "shapes=[[8192,8192,8192]]",
    ),
    "bench_empty_lists": (
        ["hardware=mi350x", "method=bench/gemm", "method.args.dtypes=[]"],
        "conf/method/bench/gemm.yaml",
    ),
    "bench_environments": (
        ["hardware=mi350x", "method=bench/collectives", "method.args.settings=[{}]"],
        "method.args.settings=[{",
    ),
    "tune_full_rows": (
        ["hardware=mi300x", "method=tune/batch", "model=qwen3_4b", "method.args.recipe=grpo"],
        "method.args.rows=data",
    ),
    "tune_for_rocm": (["hardware=h200", "method=tune/tunableop"], "tune/inductor"),
    "evaluated_revision": (
        ["hardware=mi300x", "model=qwen3_4b", "model.revision=main", "method=evaluate"],
        "model.path=",
    ),
    "greedy_samples": (["method=evaluate", "method.args.samples_per_prompt=4"], "temperature=0.7"),
    "lm_eval_engine": (
        [
            "hardware=mi300x",
            "method=evaluate",
            "method.args.engine=vllm",
            "method.args.lm_eval_tasks=[gsm8k]",
        ],
        "engine=transformers",
    ),
    "export_adapter": (
        ["method=export", "model.path=m", "adapter=lora"],
        "adapter.path=<run>/adapter",
    ),
    "export_gguf": (
        ["method=export", "model.path=m", "method.args.formats=[gguf]"],
        "convert_hf_to_gguf.py",
    ),
    "export_gguf_8_bits": (
        [
            "method=export",
            "model.path=m",
            "method.args.formats=[gguf]",
            "method.args.gguf_converter=c.py",
            "method.args.weights=int8",
        ],
        "llama-quantize",
    ),
    "export_push_to": (
        ["method=export", "model.path=m", "method.args.push_to=model"],
        "<owner/name>",
    ),
    "export_push_container": (
        [
            "method=export",
            "model.path=m",
            "method.args.push_to=me/model",
            "runtime=docker",
            "runtime.secrets=[]",
        ],
        "runtime.secrets",
    ),
    "raft_decides": (["method=raft", "method.args.sample.cycle=2"], "method.args.cycles=N"),
    "export_model": (["method=export"], "model.path=<run>"),
    "server_heads": (
        ["hardware=mi300x", "model=qwen3_4b", "method=grpo", "topology.server_tensor_parallel=3"],
        "divides",
    ),
    "server_cache": (
        ["hardware=mi300x", "model=qwen3_4b", "method=grpo", "topology.server_cache_gb=0.5"],
        "more of it, or a smaller topology.server_max_length",
    ),
    "filter_lengths": (
        ["data.filter.min_tokens=100", "data.filter.max_tokens=10"],
        "data.filter.min_tokens=10 data.filter.max_tokens=100",
    ),
    "save_best": (
        ["method.args.save_strategy=best"],
        "metric=eval_loss method.args.save_strategy=steps",
    ),
    "schedule_arguments": (
        [
            "method.args.lr_scheduler_type=cosine_with_min_lr",
            "method.args.lr_scheduler_kwargs={num_cycles: 1}",
        ],
        "'method.args.lr_scheduler_kwargs={min_lr_rate: 0.1}'",
    ),
    "model_parallel": (["topology.tensor_parallel=2"], "topology=fsdp"),
    "save_model": (["hardware=mi300x", "method=bench/gemm", "save_model=false"], "leave it out"),
    "num_gpus": (["hardware=mi300x", "topology=ddp", "topology.num_gpus=9"], "1 to 8"),
    "single_is_one": (["hardware=mi300x", "topology=single", "topology.num_gpus=2"], "ddp"),
    "topology_of_method": (
        ["hardware=mi300x", "method=evaluate", "topology=fsdp"],
        "topology=single",
    ),
    "several_ranks": (
        ["hardware=mi300x", "method=bench/collectives", "topology.num_gpus=1"],
        "num_gpus=2",
    ),
    "split_is_for_grpo": (["hardware=mi300x", "topology=split"], "topology=ddp"),
    "vllm": (["hardware=mi50", "method=bench/vllm", "precision=fp16"], "smoke=true"),
    "split_needs_a_trainer": (
        [
            "hardware=mi300x",
            "method=grpo",
            "topology=split",
            "topology.num_gpus=2",
            "topology.servers=2",
        ],
        "topology.servers=1",
    ),
    "split_needs_a_server": (
        ["hardware=mi300x", "method=grpo", "topology=split", "topology.servers=0"],
        "at least 1",
    ),
    "overlap_without_correction": (
        [
            "hardware=mi300x",
            "model=qwen3_4b",
            "method=grpo",
            "topology.overlap=true",
            "method.args.vllm_importance_sampling_correction=false",
        ],
        "vllm_importance_sampling_correction=true",
    ),
    "overlap_on_one_gpu": (
        [
            "hardware=mi300x",
            "model=qwen3_0_6b",
            "method=grpo",
            "topology=split",
            "topology.num_gpus=1",
            "topology.overlap=true",
        ],
        "overlap=false, or topology.num_gpus=2",
    ),
    "staleness_of_stream": (
        [
            "hardware=mi300x",
            "model=qwen3_4b",
            "method=grpo",
            "topology.overlap=stream",
            "topology.max_staleness=0",
        ],
        "topology.overlap=false",
    ),
    "server_length": (
        ["hardware=mi300x", "model=qwen3_4b", "method=grpo", "topology.server_max_length=512"],
        "more than 512 and at most",
    ),
    "two_checkpointings": (
        [
            "hardware=mi300x",
            "model=qwen3_4b",
            "topology=fsdp",
            "topology.fsdp.activation_checkpointing=true",
        ],
        "gradient_checkpointing=false",
    ),
    "strategy_of_topology": (
        ["hardware=mi300x", "topology=ddp", "topology.strategy=fsdp"],
        "topology.strategy=ddp",
    ),
    "profile_of_who_waits": (
        ["hardware=mi300x", "method=tune/batch", "profile=torch"],
        "the experiment that the tuning writes",
    ),
    "profile_hardware": (["profile=memory"], "profile=torch"),
    "rocprof_compute_alone": (
        [
            "hardware=mi300x",
            "topology=ddp",
            "profile=rocprof",
            "rocprof=compute",
            "method.args.save_strategy=no",
        ],
        "topology=single",
    ),
    "adapter_rank": (["adapter.rank=8"], "adapter=lora"),
    "selection_metric": (["method.selection.metric=eval_los"], "eval_mean_token"),
    "selection_heldout": ([*BEST, "data=jsonl", "data.path=a.jsonl"], "data.heldout_fraction=0.1"),
    "selection_streaming": (
        [
            *BEST,
            "data=jsonl",
            "data.path=a.jsonl",
            "data.heldout_fraction=0.1",
            "data.streaming=true",
        ],
        "data.heldout_path",
    ),
    "selection_saves": ([*BEST, "method.args.save_strategy=epoch"], "save_strategy=steps"),
    "selection_overlap": (
        [*BY_REWARD, "topology=split", "topology.overlap=true"],
        "topology.overlap=false",
    ),
    "groups_divide": (
        [
            "hardware=mi300x",
            "model=qwen3_4b",
            "method=grpo",
            "topology=split",
            "method.args.per_device_train_batch_size=4",
            "method.args.gradient_accumulation_steps=1",
            "method.args.num_generations=8",
        ],
        "num_generations=7",
    ),
    "groups_and_smaller_batches": (
        ["method=grpo", "method.args.auto_find_batch_size=true"],
        "find=largest_batch",
    ),
    "compiler": (
        ["hardware=mi50", "precision=fp32", "method.args.torch_compile=true"],
        "torch_compile=false",
    ),
    "compiled_layers_alone": (
        [
            "hardware=mi300x",
            "model=qwen3_4b",
            "step.compile=true",
            "method.args.use_liger_kernel=true",
        ],
        "one of them",
    ),
    "fp8_eager": (["hardware=mi300x", "precision=fp8", "step.compile=false"], "precision=bf16"),
    "packed_without_kernel": (["hardware=mi50", "step.rows=packed"], "step.rows=grouped"),
    "rows_packed_twice": (
        ["hardware=h100", "step.rows=packed", "method.args.packing=true"],
        "step.rows=padded",
    ),
    "rows_of_method": (["hardware=h100", "method=dpo", "step.rows=packed"], "grouped"),
    "checkpointed_layers_range": (
        ["hardware=h100", "model=qwen3_4b", "step.checkpointed_layers=37"],
        "1 to 36",
    ),
    "sequence_length": (["model=qwen3_4b", "method.args.max_length=50000"], "at most 40960"),
    "rewards_needed": (
        ["method=grpo", "topology=single", "~method.rewards.reasoning_gym"],
        "reasoning_gym",
    ),
    "reward_unknown": (["method=grpo", "topology=single", "method.rewards.acuracy=1"], "accuracy"),
    "rewards_weigh_nothing": ([*CODE, "method.rewards.code_tests=0.0"], "above 0"),
    "reward_negative": (["method=sample", "+method.rewards.length=-0.5"], "method=grpo"),
    "reward_chain": ([*CODE, "method.reward_chain=[format,code_tests]"], "code_tests at most once"),
    "pattern": ([*CODE, "+method.rewards.regex=1.0", "method.reward_pattern='('"], "'\\d+'"),
    "reward_column": (["method=grpo", "data=jsonl", "data.path=train.jsonl"], "data=reasoning"),
    "pairs_of_code": (["data=code", "method=dpo"], "data=jsonl"),
    "evaluation_of_code": (["data=code", "method=evaluate"], "method.rewards.code_tests=1.0"),
    "sandbox_under_slurm": ([*CODE, "runtime=slurm"], "runtime=docker"),
    "name": (["name=a/b"], "letters"),
    "secret": (["user_env.HF_TOKEN=abc"], "export HF_TOKEN"),
    "reasoning_data": (["data.num_train=null"], "at least 1"),
    "generation_data": (
        [
            "hardware=mi300x",
            "model=qwen3_4b",
            "method=grpo",
            "data.limit=6",
            "method.args.gradient_accumulation_steps=1",
        ],
        "data.num_train=7 or more",
    ),
    "evaluation_data": (["method=evaluate", "data.num_heldout=0"], "data.num_heldout="),
    "data_missing": (["data=jsonl"], "data.path="),
    "mask_in_user_env": (["hardware=mi300x", "user_env.HIP_VISIBLE_DEVICES=3"], "in your shell"),
    "model_source": (["model.init=pretrained"], "model.path="),
    "model_shape": (["hardware=mi300x", "model=qwen3_4b", "model.num_layers=12"], "init=random"),
    "model_revision": (
        ["hardware=mi300x", "model=qwen3_4b", "model.hub_id=me/mine", "model.revision=null"],
        "model.revision=<its commit",
    ),
    "model_hub_id": (
        ["hardware=mi300x", "model=qwen3_4b", "model.hub_id=Qwen/Qwen3-8B"],
        "model=qwen3_8b,",
    ),
    "find": (["find=largest_batch"], "mode=plan find=largest_batch"),
    "data_preview_alone": (["data.preview=5", "format=json"], "without format=json"),
    "data_source": (["data=mix", "data.sources=[{weight: 1.0}]"], "hub_id in each"),
    "data_weights": (
        ["data=mix", "data.sources=[{path: a.jsonl, weight: 0.7}, {path: b.jsonl, weight: 0.7}]"],
        "0.5, 0.5",
    ),
    "data_samples": (["data=samples", "data.path=a.jsonl"], "method=dpo data=samples"),
    "data_streaming": (["data.streaming=true"], "data=jsonl"),
    "max_steps_needed": (
        ["data=jsonl", "data.path=a.jsonl", "data.streaming=true", "model=qwen3_0_6b"],
        "method.args.max_steps=1000",
    ),
    "heldout_twice": (["data.heldout_fraction=0.1"], "data.num_heldout"),
    "chat_template_twice": (["model.chat_template=a", "data.chat_template=b"], "one of them"),
    "curriculum_packing": (["data.curriculum=mixed", "method.args.packing=true"], "packing=false"),
    "curriculum_pass_rates": (["data.curriculum=adaptive"], "data.pass_rates="),
    "lr_scaling": (["method.lr_scaling=sqrt"], "method.lr_reference_batch=32"),
    "task_unknown": (["data.tasks=[{name: gcd}, {name: chain_summ}]"], "chain_sum"),
    "task_level": (["data.tasks=[{name: gcd}, {name: chain_sum, level: 11}]"], "level: 0"),
    "task_field": (
        ["data.tasks=[{name: gcd, config: {min_number: 3}}]"],
        "of gcd: max_numbers, max_value, min_numbers",
    ),
    "task_worked": (
        ["data.tasks=[{name: gcd}, {name: chain_sum, worked: 0.5}]"],
        "worked=0 for answers alone",
    ),
    "image_known": (["hardware=mi300x", "container.name=foo"], "container=custom"),
    "docker_without_image": (
        ["hardware=h200", "runtime=docker", "model=qwen3_4b"],
        "container=custom",
    ),
    "image_serves_gpu": (
        ["hardware=mi50", "precision=fp16", "container=rocm"],
        "container=rocm_gfx906",
    ),
    "image_trl": (["hardware=mi300x", "container=seed_mi300x"], "container=rocm"),
    "custom_reference": (["container=custom", "container.reference=null"], "container.reference="),
    "secret_names": (
        ["runtime=docker", "container=cpu", "runtime.secrets=['my-key']"],
        "names only",
    ),
    "slurm_nodes": (
        ["hardware=mi300x", "method=grpo", "topology=split", *NODES],
        "topology=ddp or topology=fsdp",
    ),
    "slurm_nodes_docker": (
        ["hardware=mi300x", "topology=ddp", "runtime.slurm.inner=docker", *NODES],
        "runtime.slurm.python=",
    ),
    "slurm_interface": (["hardware=mi300x", "topology=ddp", *NODES[:2]], "srun ip -br address"),
    "slurm_gid_index": (
        ["hardware=mi300x", "topology=ddp", "runtime.slurm.gid_index=3", *NODES],
        "show_gids",
    ),
    "slurm_gres": (["runtime=slurm", "runtime.slurm.gres='gpu:mi300x:4'"], "gpu:mi300x"),
    "slurm_options": (["runtime=slurm", "runtime.slurm.options=['--nodes=3']"], "--exclusive"),
    "slurm_time_early": (["runtime=slurm", "runtime.slurm.time=5"], "a longer time"),
    "slurm_early_signal": (["runtime=slurm", "runtime.stop_timeout_s=900"], "above stop_timeout_s"),
}


def plus(overrides: list[str]) -> Config:
    """On the CPU unless the case names hardware."""
    base = [] if any(o.startswith("hardware=") for o in overrides) else ["hardware=cpu"]
    return composed(*base, *overrides)


def test_every_rule_has_a_case():
    assert {rule.name for rule in RULES} == {*CASES, "unread"}


@pytest.mark.parametrize("name", CASES)
def test_rule_rejects_with_a_remedy(name):
    overrides, remedy = CASES[name]
    config = plus(overrides)
    assert [rule.name for rule in refusals(config)] == [name]
    with pytest.raises(UserError) as raised:
        check(config)
    message, _, use = str(raised.value).partition(" Use: ")
    assert remedy in use
    assert not message.endswith("..")


# overrides, and the key that nothing reads
UNREAD = [
    (["adapter=none", "adapter.rslora=true"], "adapter.rslora"),
    (["hardware=mi350x", "method=bench/gemm", "data=cups"], "data=cups"),
    (["hardware=mi300x", "method=bench/gemm", "model=qwen3_4b"], "model=qwen3_4b"),
    (["hardware=mi300x", "method=bench/gemm", "precision=fp32"], "precision=fp32"),
    (["hardware=mi300x", "method=tune/batch", "data=hub", "data.hub_id=a/b"], "data=hub"),
    (
        ["hardware=mi350x", "method=tune/rccl", "method.args.settings=[{A: 1}]"],
        "method.args.settings",
    ),
    (["method=evaluate", "+method.args.lm_eval_limit=4"], "method.args.lm_eval_limit"),
    (["method=export", "model.path=m", "precision=bf16"], "precision=bf16"),
    (
        ["method=export", "model.path=m", "method.args.push_private=false"],
        "method.args.push_private",
    ),
    (["method=raft", "adapter=lora", "adapter.path=runs/a/b/adapter"], "adapter.path"),
    (["hardware=mi300x", "method=grpo", "topology=ddp", "topology.servers=1"], "topology.servers"),
    (
        ["hardware=mi300x", "method=grpo", "topology=ddp", "topology.server_memory_share=0.5"],
        "topology.server_memory_share",
    ),
    (
        [
            "hardware=mi300x",
            "model=qwen3_4b",
            "method=grpo",
            "topology=split",
            "method.args.vllm_gpu_memory_utilization=0.2",
        ],
        "method.args.vllm_gpu_memory_utilization",
    ),
    (
        [
            "hardware=mi300x",
            "model=qwen3_4b",
            "method=grpo",
            "topology.overlap=true",
            "topology.max_staleness=4",
        ],
        "topology.max_staleness",
    ),
    (["hardware=cpu", "topology.numa_binding=node"], "topology.numa_binding"),
    (
        ["hardware=mi300x", "topology=ddp", "topology.zero.offload_optimizer=true"],
        "topology.zero.offload_optimizer",
    ),
    (
        ["hardware=mi300x", "topology=ddp", "topology.fsdp.cpu_offload=true"],
        "topology.fsdp.cpu_offload",
    ),
    (["debug=memory_fault"], "debug"),
    (["rocprof=sys"], "rocprof"),
    (["method.args.num_train_epochs=3"], "method.args.num_train_epochs"),
    (["method=sample", "method.selection.metric=eval_loss"], "method.selection.metric"),
    (["method.selection.patience=2"], "method.selection.patience"),
    ([*BEST, "method.selection.min_delta=0.1"], "method.selection.min_delta"),
    (["method.args.per_device_eval_batch_size=2"], "method.args.per_device_eval_batch_size"),
    (
        ["step.checkpointed_layers=2", "method.args.gradient_checkpointing=false"],
        "step.checkpointed_layers",
    ),
    (["method.rewards.accuracy=1"], "method.rewards"),
    ([*CODE, "method.reward_pattern=a"], "method.reward_pattern"),
    (["method=grpo", "method.reward_confined=false"], "method.reward_confined"),
    (["method.sandbox.time_s=3"], "method.sandbox.time_s"),
    (["data.path=train.jsonl"], "data.path"),
    (["model=qwen3_4b", "model.init=random", "model.path=/m"], "model.path"),
    (["method=evaluate", "data.preview=5"], "data.preview"),
    (["method=sample", "data.filter.max_tokens=9"], "data.filter.max_tokens"),
    (["data.pairs_per_prompt=2"], "data.pairs_per_prompt"),
    (["data.shuffle_buffer=5"], "data.shuffle_buffer"),
    (["method=dpo", "data.curriculum=mixed"], "data.curriculum"),
    (["data.pass_rates=r.json"], "data.pass_rates"),
    (["data.curriculum_args.earlier=0.2"], "data.curriculum_args.earlier"),
    (
        ["method=evaluate", "method.lr_scaling=sqrt", "method.lr_reference_batch=8"],
        "method.lr_scaling",
    ),
    (["runtime=local", "container=cpu"], "container=cpu"),
    (["runtime=local", "runtime.memory_gb=8"], "runtime.memory_gb"),
    (
        [
            "hardware=mi300x",
            "runtime=docker",
            "runtime.slurm.nodes=2",
            "runtime.slurm.inner=docker",
        ],
        "runtime.slurm.nodes",
    ),
    (["runtime=slurm", "runtime.slurm.interface=ib0"], "runtime.slurm.interface"),
    ([*CODE, "data=hub", "data.hub_id=a/b", "data.heldout_path=a.jsonl"], "data.heldout_path"),
    (["data.hub_id=a/b"], "data.hub_id"),
    (["data=jsonl", "data.path=a.jsonl", "data.num_train=5"], "data.num_train"),
    (["data.sources=[{path: a.jsonl, weight: 1.0}]"], "data.sources"),
    (
        ["method=sample", "data.curriculum=adaptive", "data.curriculum_args.memory=0.5"],
        "data.curriculum_args.memory",
    ),
    (
        ["hardware=mi300x", "topology=ddp", "+topology.server_args.max_num_seqs=8"],
        "topology.server_args",
    ),
    (
        ["hardware=mi300x", "topology=zero2", "topology.zero.offload_parameters=true"],
        "topology.zero.offload_parameters",
    ),
]


@pytest.mark.parametrize(("overrides", "key"), UNREAD)
def test_a_key_that_nothing_reads(overrides, key):
    config = plus(overrides)
    [rule] = refusals(config)
    assert rule.name == "unread"
    assert rule.message(config).startswith((f"{key} takes no effect", f"{key}, "))


def test_every_row_of_unread_keys_has_a_case():
    configs = [plus(overrides) for overrides, _ in UNREAD]
    assert [rule for rule in UNREAD_RULES if not any(map(rule.applies, configs))] == []


@pytest.mark.parametrize("method", groups()["method"])
def test_every_rule_is_asked_under_every_method(method):
    """Rules read arguments that a method may lack."""
    given = ["topology.overlap=true", "topology.fsdp.activation_checkpointing=true"]
    config = composed("hardware=mi300x", "topology=fsdp", f"method={method}", *given)
    with pytest.raises(UserError, match=r"topology\.overlap takes? no effect"):
        check(config)


QWEN = ["hardware=mi300x", "model=qwen3_4b"]
COMMIT = "model.revision=" + "a" * 40


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["model.num_parameters=7"],
            "model.num_parameters is 7, and Qwen/Qwen3-4B is loaded as it is. Use: no "
            "model.num_parameters.",
        ),
        (
            ["model.num_layers=35", "model.path=/m"],
            "model.num_parameters=3921537280 where the model of that directory has it.",
        ),
        (["model.num_parameters=3990000000"], None),  # as rounded as a published count may be
        (
            [
                "model.num_layers=12",
                "model.num_parameters=1600128512",
                "model.hub_id=me/small",
                COMMIT,
            ],
            None,
        ),
        (["model.num_layers=12", "model.init=random"], None),
        (
            ["model.hub_id=me/tuned"],
            "model.revision=1cfa9a720891 is a commit of Qwen/Qwen3-4B. Use: model=<of the same "
            "shape> model.hub_id=",
        ),
        (["model.hub_id=me/tuned", COMMIT], None),
        (
            ["model.hub_id=Qwen/Qwen3-8B", COMMIT],
            "memory and speed would be those of Qwen/Qwen3-4B. Use: model=qwen3_8b",
        ),
        (["model.hub_id=me/tuned", "model.path=/m"], None),  # which wins
        (
            ["model.revision=null", "method=evaluate"],
            "model.hub_id=Qwen/Qwen3-4B without model.revision",
        ),
        (
            ["model.name=mine", "model.num_layers=12"],
            "model=mine: the shape counts 1600128512 parameters",
        ),
        (
            ["model.name=mine", "model.hub_id=me/mine"],
            None,
        ),  # of a file that is not in conf/: nothing says what its revision is of
    ],
)
def test_a_model_that_is_loaded_is_the_one_that_is_planned(overrides, said):
    found = [
        rule.refusal(config)
        for config in [composed(*QWEN, *overrides)]
        for rule in refusals(config)
    ]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


@pytest.mark.parametrize("name", groups()["model"])
def test_every_model_counts_well_within_the_tolerance(name):
    model = composed("hardware=cpu", f"model={name}").model
    one_layer = shapes.layer_parameters(model)
    assert (
        abs(shapes.parameters(model) - model.num_parameters)
        < TOLERANCE * model.num_parameters
        < one_layer
    )


@pytest.mark.parametrize("weight", ["0", "-1", "inf", "nan"])
@pytest.mark.parametrize("data", ["reasoning", "code"])
def test_a_task_without_a_weight(data, weight):
    name = {"reasoning": "gcd", "code": "lists"}[data]
    config = composed(f"data={data}", f"data.tasks=[{{name: {name}, weight: {weight}}}]")
    with pytest.raises(UserError, match=rf"data\.tasks\[0\]\.weight={float(weight)}: out of range"):
        check(config)


@pytest.mark.parametrize(
    ("data", "worked", "refused"),
    [("reasoning", -0.1, 1), ("reasoning", 1, 0), ("code", 0.5, 1), ("code", 0, 0)],
)
def test_a_share_of_worked_rows(data, worked, refused):
    name = {"reasoning": "shuffled_cups", "code": "lists"}[data]
    found = refusals(composed(f"data={data}", f"data.tasks=[{{name: {name}, worked: {worked}}}]"))
    assert [rule.name for rule in found] == ["task_worked"] * refused


@pytest.mark.parametrize(
    ("data", "task", "said"),
    [
        (
            "code",
            "name: strigns",
            "data.tasks[0].name=strigns: data=code has no such task. Did you mean strings",
        ),
        ("code", "name: lists, level: 10", "data.tasks[0].level=10 (lists): it has levels 0 to 9"),
        ("code", "name: lists, config: {a: 1}", "data.tasks[0].config.a: lists has no such field"),
        ("reasoning", "name: gcd, level: -1", "data.tasks[0].level=-1 (gcd): it has levels 0 to 3"),
        ("reasoning", "name: acre, level: 1", "data.tasks[0].level=1 (acre): it has no curriculum"),
        (
            "reasoning",
            "name: shuffled_cups, level: -1, config: {cups: 5}",
            "data.tasks[0].level=-1 (shuffled_cups): it has no curriculum",
        ),
        ("reasoning", "name: shuffled_cups, level: 7, config: {cups: 5}", None),
        ("reasoning", "name: acre", None),
    ],
)
def test_a_task_that_its_data_does_not_have(data, task, said):
    found = refusals(config := composed(f"data={data}", f"data.tasks=[{{{task}}}]"))
    assert [rule.message(config)[: len(said)] for rule in found] == [said] if said else found == []


@pytest.mark.parametrize("weight", ["0", "-1", "inf", "nan"])
def test_a_source_without_a_weight(weight):
    sources = f"data.sources=[{{path: a.jsonl, weight: 1}}, {{path: b.jsonl, weight: {weight}}}]"
    with pytest.raises(UserError, match=rf"data\.sources\[1\]\.weight={float(weight)}: out of"):
        check(composed("data=mix", sources))


ROWS = ["data=jsonl", "data.path=train.jsonl"]


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (
            ["method=evaluate", *ROWS, "data.num_heldout=5"],
            ["evaluation_data", "unread"],
        ),
        (
            [*RAFT, *ROWS, "data.num_heldout=5"],
            ["unread"],
        ),
        (
            [*ROWS, "data.num_train=5"],
            ["unread"],
        ),
        (
            [*ROWS, "data.tasks=[{name: gcd}]"],
            ["unread"],
        ),
        (
            ["data=mix", "data.sources=[{path: a, weight: 1.0}]", "data.num_train=5"],
            ["unread"],
        ),
        (
            ["data=hub", "data.hub_id=a/b", "data.num_heldout=5"],
            ["unread"],
        ),
    ],
)
def test_what_only_generated_data_reads(overrides, names):
    """Ignored, or with num_heldout the end of the run where its held-out rows are read."""
    config = composed(*overrides)
    assert [rule.name for rule in refusals(config)] == names
    with pytest.raises(UserError, match=r"data\.(num_heldout|num_train|tasks) takes no effect"):
        check(config)


def test_rows_of_ones_own_in_an_experiment_that_generates_them():
    raft = [
        "experiment=strix_halo_raft",
        "~method.rewards.reasoning_gym",
        "+method.rewards.accuracy=1.0",
    ]
    assert "unread" in [rule.name for rule in refusals(composed(*raft, *ROWS))]
    assert "unread" not in [rule.name for rule in refusals(composed(*raft, *ROWS, "data.tasks=[]"))]
    full = ["experiment=mi350x_qwen3_8b_full", *ROWS]
    assert "unread" not in [rule.name for rule in refusals(composed(*full, "data.num_train=null"))]


GRPO_OF_CODE = ["method=grpo", "topology=single", "data=code"]


@pytest.mark.parametrize(
    ("given", "remedies"),
    [
        (
            GRPO_OF_CODE,
            ["data=reasoning", "~method.rewards.reasoning_gym +method.rewards.code_tests=1.0"],
        ),
        ([*CODE, "+method.rewards.accuracy=1.0"], ["~method.rewards.accuracy"]),
        (
            [*CODE, "+method.rewards.regex=1.0"],
            [r"method.reward_pattern='\d+'", "~method.rewards.regex"],
        ),
        (
            ["method=grpo", "topology=single", "+method.rewards.code_tests=1.0"],
            ["~method.rewards.code_tests"],
        ),
        (
            ["method=grpo", "topology=single", "+method.rewards.regex=1.0"],
            [r"method.reward_pattern='\d+'"],
        ),
    ],
)
def test_a_reward_that_the_rows_lack_is_refused_with_what_is_not(given, remedies):
    config = composed("hardware=mi300x", "model=qwen3_4b", *given)
    [said] = [
        rule.refusal(config).replace(" '~", " ~").replace("' +", " +") for rule in refusals(config)
    ]
    for remedy in remedies:
        assert remedy in said.partition(" Use: ")[2]
        assert (
            refusals(composed("hardware=mi300x", "model=qwen3_4b", *given, *remedy.split())) == []
        )


def test_the_reward_that_is_proposed_where_there_is_none_fits_the_rows():
    [rule] = refusals(
        config := composed(
            "hardware=mi300x", "model=qwen3_4b", *GRPO_OF_CODE, "~method.rewards.reasoning_gym"
        )
    )
    assert rule.remedy(config).startswith("method.rewards.code_tests=1.0;")


def test_a_composition_that_works_is_not_refused():
    assert refusals(composed("hardware=mi300x", "method=grpo", "model=qwen3_4b")) == []
    vllm = [
        "hardware=mi300x",
        "model=qwen3_4b",
        "method=evaluate",
        "method.args.engine=vllm",
        "topology.server_memory_share=0.5",
    ]
    assert refusals(composed(*vllm)) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["topology=single"], "one of the node's 8 GPUs evaluates"),
        (["data.num_heldout=500"], None),
        (
            ["data.num_heldout=300"],
            "in batches of 64: 3 of 8 ranks stay idle; method.args.batch_size=38 gives each one",
        ),
        (
            ["data.num_heldout=500", "data.limit=64"],
            "64 held-out problems in batches of 64: 7 of 8 ranks",
        ),
        (
            ["data.num_heldout=500", "method.args.lm_eval_tasks=[gsm8k]"],
            "the first of 8 ranks asks them alone",
        ),
    ],
)
def test_ranks_that_an_evaluation_leaves_idle(overrides, said):
    found = [
        line
        for line in rule_warnings(
            composed("hardware=mi300x", "model=qwen3_4b", "method=evaluate", *overrides)
        )
        if "rank" in line or "idle" in line
    ]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_filters_by_length_that_an_evaluation_does_not_read():
    lengths = ["data.filter.max_tokens=512", "data.filter.min_tokens=2"]
    said = "data.filter.min_tokens, max_tokens: lengths in tokens"
    assert [
        line
        for line in rule_warnings(composed("method=evaluate", *lengths))
        if line.startswith(said)
    ]
    assert not [line for line in rule_warnings(composed("method=sft", *lengths)) if said in line]
    assert not [
        line
        for line in rule_warnings(composed("method=evaluate", "data.filter.levels=[0]"))
        if said in line
    ]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["adapter=lora", "adapter.dropout=1"], "adapter.dropout=1.0: "),
        (["method=evaluate", "method.args.engine=vlm"], "method.args.engine=vlm: "),
        (["method=evaluate", "+method.args.top_p=0"], "method.args.top_p=0: "),
        (["method=raft", "method.args.base=old"], "method.args.base=old: "),
        (
            ["method=raft", "method.args.learning_rate_decay=0"],
            "method.args.learning_rate_decay=0: ",
        ),
        (["method=sample", "method.args.top_fraction=0"], "method.args.top_fraction=0: "),
        (["method=sample", "method.args.threshold=2"], "method.args.threshold=2: "),
        (
            ["hardware=cpu", "topology=ddp", "topology.num_gpus=100000"],
            "topology.num_gpus=100000: ",
        ),
        (
            ["hardware=mi300x", "method=grpo", "topology.server_memory_share=1.2"],
            "topology.server_memory_share=1.2: ",
        ),
        (["method.args.max_steps=0"], "method.args.max_steps=0: "),
        ([*CODE, "+method.rewards.format=1e999"], "method.rewards.format=inf: "),
        (["seed=4294967296"], "seed=4294967296: "),
        (["data.limit=0"], "data.limit=0: "),
        (
            ["data=jsonl", "data.path=a.jsonl", "data.heldout_fraction=1.0"],
            "data.heldout_fraction=1.0: ",
        ),
        (
            ["data.curriculum=mixed", "data.curriculum_args.earlier=1.5"],
            "data.curriculum_args.earlier=1.5: ",
        ),
        (["data.tasks=[{name: chain_sum}, {name: gcd, weight: 0}]"], "data.tasks[1].weight=0.0: "),
        (["topology.strategy=foo"], "topology.strategy=foo: it takes none, ddp"),
        (["precision.compute=bf61"], "Did you mean bf16"),
        (["precision.weights=foo"], "precision.weights=foo"),
        (["hardware.attention=sdap"], "Did you mean sdpa"),
        (["data.kind=foo"], "data.kind=foo"),
        (["model.architecture=qwen"], "model.architecture=qwen"),
        (["model.num_kv_heads=0"], "model.num_kv_heads=0: out of range. Use: at least 1"),
        (["topology.num_gpus=0"], "topology.num_gpus=0: out of range"),
        (["method.args.num_train_epochs=inf"], "num_train_epochs=inf: "),
        (["method.args.num_train_epochs=0"], "num_train_epochs=0: out of range"),
        (["model.num_parameters=0"], "model.num_parameters=0: out of range. Use: at least 1"),
        (["topology.server_tensor_parallel=0"], "topology.server_tensor_parallel=0"),
        (["topology.server_memory_share=0"], "topology.server_memory_share=0"),
        (["topology.server_max_length=1"], "topology.server_max_length=1"),
        (
            ["topology.fsdp.reduce_dtype=fp16"],
            "topology.fsdp.reduce_dtype=fp16: it takes fp32, bf16",
        ),
        (
            ["price_per_gpu_hour=-1"],
            "price_per_gpu_hour=-1.0: out of range. Use: at least 0 and at most 1000000000.",
        ),
        (
            ["price_per_gpu_hour=1e308"],
            "price_per_gpu_hour=1e+308: out of range. Use: at least 0 and at most 1000000000.",
        ),
        (
            ["hardware.gpus_per_node=1000000"],
            "hardware.gpus_per_node=1000000: out of range. Use: at least 1 and at most 1024.",
        ),
        (
            ["hardware=mi350x", "method=bench/collectives", "method.args.timeout_s=0"],
            "timeout_s=0: out of range. Use: above 0 and at most 86400.",
        ),
        (
            ["method=grpo", "method.args.num_generations=1000000000"],
            "num_generations=1000000000: out of range. Use: at least 2 and",
        ),
        (
            ["method=raft", "method.args.cycles=100000"],
            "method.args.cycles=100000: out of range. Use: at least 1 and at most 500.",
        ),
        (
            ["method.args.per_device_train_batch_size=1000000000000000000"],
            "train_batch_size=1000000000000000000: out of range",
        ),
        (
            ["effective_batch=1000000000000000000"],
            "effective_batch=1000000000000000000: out of range",
        ),
        (["runtime.hang_timeout_s=0"], "runtime.hang_timeout_s=0"),
        (["runtime.max_restarts=-1"], "runtime.max_restarts=-1"),
        (["hardware.memory_gb=-5"], "hardware.memory_gb=-5"),
        (["adapter=lora", "adapter.rank=0"], "adapter.rank=0"),
        (["method.args.per_device_train_batch_size=0"], "per_device_train_batch_size=0"),
        (["method.args.logging_steps=0"], "logging_steps=0"),
        (
            [*BEST, "method.selection.patience=0"],
            "method.selection.patience=0: out of range. Use: at least 1",
        ),
        ([*BEST, "method.selection.min_delta=-1"], "method.selection.min_delta=-1"),
        (
            ["method.args.eval_strategy=stepps"],
            "decided elsewhere; set method.selection.metric=eval_loss instead",
        ),
        (
            [*BEST, "method.args.eval_steps=10"],
            "set method.args.save_steps=; a model that was measured is saved",
        ),
        ([*BEST, "method.args.greater_is_better=true"], "set method.selection.metric= instead"),
        (
            ["method=grpo", "method.args.num_generations=0"],
            "num_generations=0: out of range. Use: at least 2",
        ),
        (["method=grpo", "method.args.steps_per_generation=0"], "steps_per_generation=0"),
        (["method=evaluate", "method.args.batch_size=0"], "batch_size=0"),
        (["runtime.stop_timeout_s=0"], "runtime.stop_timeout_s=0"),
        (["container=cpu", "runtime.memory_gb=0"], "runtime.memory_gb=0"),
        (["container=cpu", "runtime.shm_gb=0.01"], "runtime.shm_gb=0.01"),
        (["container=cpu", "runtime.shm_gb=inf"], "runtime.shm_gb=inf"),
        (["container=cpu", "runtime.memory_gb=nan"], "runtime.memory_gb=nan"),
        (
            ["method.args.learning_rate=-1e-4"],
            "learning_rate=-0.0001: out of range. Use: at least 0.",
        ),
        (["method.args.weight_decay=-0.1"], "weight_decay=-0.1"),
        (["method.args.warmup_steps=-1"], "warmup_steps=-1"),
        (["method.args.max_grad_norm=-1"], "max_grad_norm=-1"),
        (["method.args.save_steps=0"], "save_steps=0: out of range. Use: above 0."),
        (
            ["method.args.save_steps=2.5"],
            "save_steps=2.5: not a whole number. Use: 2; ",
        ),
        (["method.args.save_total_limit=-1"], "save_total_limit=-1"),
        (["method.args.adam_beta1=1"], "adam_beta1=1: out of range. Use: at least 0 and below 1."),
        (["method.args.adam_beta2=-0.1"], "adam_beta2=-0.1"),
        (["method.args.label_smoothing_factor=1.0"], "label_smoothing_factor=1.0"),
        (["method.args.dataset_num_proc=0"], "dataset_num_proc=0: out of range. Use: at least 1."),
        (["method=dpo", "method.args.beta=0"], "method.args.beta=0: out of range. Use: above 0."),
        (
            ["method=grpo", "method.args.beta=-0.1"],
            "method.args.beta=-0.1: out of range. Use: at least 0.",
        ),
        (
            ["method=grpo", "method.args.temperature=0"],
            "temperature=0: out of range. Use: above 0.",
        ),
        (
            ["method=grpo", "method.args.top_p=1.5"],
            "top_p=1.5: out of range. Use: above 0 and at most 1.",
        ),
        (["method=grpo", "method.args.epsilon=-0.1"], "epsilon=-0.1"),
        (
            ["method=tune/vllm", "method.args.space.num_scheduler_steps=[1,8]"],
            "space: num_scheduler_steps is gone from vLLM. Instead: ",
        ),
        (
            ["method=tune/batch", "method.args.recipe=dpo", "method.args.beta=0"],
            "method.args.beta=0: out of range",
        ),
        (
            ["method.args.lr_scheduler_type=cosin"],
            "lr_scheduler_type=cosin: unknown. Did you mean cosine? It takes linear, ",
        ),
        (["method.args.optim=adamw"], "optim=adamw: unknown. Did you mean adamw_torch? It takes"),
        (["method.args.save_strategy=step"], "save_strategy=step: unknown. Did you mean steps"),
        (["method.args.packing_strategy=bdf"], "packing_strategy=bdf: unknown. Did you mean bfd"),
        (["method.args.loss_type=nl"], "loss_type=nl: unknown. Did you mean nll"),
        (
            ["method=dpo", "method.args.loss_type=[sigmoid,stf]"],
            "loss_type=stf: unknown. Did you mean sft",
        ),
        (
            ["method=grpo", "method.args.loss_type=drgrpo"],
            "loss_type=drgrpo: unknown. Did you mean dr_grpo",
        ),
        (["method.args.max_steps=" + "9" * 400], "method.args.max_steps="),
        (["seed=" + "9" * 400], "seed="),
    ],
)
def test_values_out_of_their_list_or_range(overrides, said):
    with pytest.raises(UserError) as raised:
        check(plus(overrides))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "method.args.learning_rate=0",
            "method.args.warmup_steps=0.1",
            "method.args.max_grad_norm=0",
            "method.args.save_total_limit=0",
        ],
        [
            "method.args.save_steps=0.5",
            "method.args.logging_steps=2.0",
            "method.args.adam_beta1=0",
            "method.args.loss_type=dft",
        ],
        [
            "method=grpo",
            "method.args.top_p=1",
            "method.args.min_p=null",
            "method.args.beta=0",
            "method.args.epsilon_high=5",
        ],
        ["method=evaluate", "method.args.temperature=0"],
        ["method=dpo", "method.args.loss_type=[sigmoid,sft]", "method.args.loss_weights=[1.0,0.5]"],
        ["method.args.ddp_backend='cpu:gloo,cuda:nccl'"],
        [
            "method.args.lr_scheduler_type=cosine_with_min_lr",
            "method.args.lr_scheduler_kwargs={min_lr: 1e-6}",
        ],
        [
            "method.args.lr_scheduler_type=warmup_stable_decay",
            "method.args.lr_scheduler_kwargs={num_decay_steps: 10}",
        ],
        ["method.args.lr_scheduler_type=reduce_lr_on_plateau", *BEST],
    ],
)
def test_values_at_the_edge_of_their_range_are_taken(overrides):
    check(plus(overrides))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["topology=zero2", "topology.zero.offload_parameters=true"],
            "Use: topology=zero3, or topology.zero.offload_parameters=false.",
        ),
        (
            ["topology=ddp", "topology.zero.offload_parameters=true"],
            "Use: topology=zero3, or topology.zero",
        ),
        (
            [
                "topology=zero3",
                "topology.zero.offload_parameters=true",
                "topology.zero.offload_optimizer=true",
            ],
            None,
        ),
        (["runtime=docker", "runtime.slurm.inner=docker"], "Use: runtime=slurm, or"),
        (["runtime=slurm", "runtime.memory_gb=8"], "Use: runtime.slurm.inner=docker, or"),
        (["runtime=slurm", "container=rocm"], "Use: runtime.slurm.inner=docker, or"),
        (
            ["runtime=slurm", "runtime.slurm.inner=docker", "container=none"],
            "runtime.slurm.inner=docker without an image: mi300x has",
        ),
        (
            ["runtime=slurm", "runtime.slurm.inner=docker", "container=none"],
            "or runtime.slurm.inner=local.",
        ),
        (
            [
                *["runtime=slurm", "runtime.slurm.inner=docker", "container=rocm"],
                *["method=export", "method.args.push_to=me/model", "runtime.secrets=[]"],
            ],
            "among runtime.secrets; or runtime.slurm.inner=local.",
        ),
        (
            ["method=grpo", "topology=ddp", "topology.server_tensor_parallel=2"],
            "Use: topology=split, or topology.server_tensor_parallel=1.",
        ),
        (["topology=ddp", "topology.servers=2"], "Use: topology.servers=0."),
        (
            ["method=grpo", "hardware=mi50", "topology=ddp", "topology.servers=2"],
            "Use: topology.servers=0.",
        ),
        (
            ["topology=single", "topology.num_gpus=4"],
            "num_gpus=4. Use: topology=ddp or fsdp or zero2 or zero3.",
        ),
        (["method=evaluate", "topology=single", "topology.num_gpus=4"], "Use: topology=ddp."),
        (
            ["method=tune/inductor", "topology=single", "topology.num_gpus=4"],
            "Use: topology.num_gpus=1: method=tune/inductor runs on one.",
        ),
        (
            ["method=evaluate", "topology.fsdp.cpu_offload=true"],
            "Use: topology.fsdp.cpu_offload=false.",
        ),
        (
            ["method=evaluate", "topology.zero.offload_optimizer=true"],
            "Use: topology.zero.offload_optimizer=false.",
        ),
        (
            ["method=evaluate", "topology.zero.offload_parameters=true"],
            "Use: topology.zero.offload_parameters=false.",
        ),
        (["method=evaluate", "topology.tensor_parallel=2"], "topology.pipeline_parallel=1."),
        (["topology.pipeline_parallel=2"], "; topology=fsdp holds a model that one GPU cannot."),
        (
            ["method=grpo", "topology=single", "topology.num_gpus=4"],
            "Use: topology=ddp or fsdp or zero2 or zero3 or split.",
        ),
        (
            ["method=grpo", "topology=colocate", "topology.num_gpus=4"],
            "topology.num_gpus=4 under topology=colocate: several GPUs need a strategy. Use: "
            "topology.strategy=ddp or topology.strategy=fs",
        ),
        (
            ["method=grpo", "topology=colocate", "topology.strategy=ddp"],
            "topology.strategy=ddp under topology=colocate: one contradicts",
        ),
        (
            ["method=grpo", "method.rewards.acuracy=1"],
            "no such reward. Did you mean accuracy? Use: ",
        ),
        (
            [*BEST[:-1], "method.selection.metric=evalloss"],
            "no such figure of held-out rows. Did you mean eval_loss? Use: ",
        ),
    ],
)
def test_words_of_a_refusal(overrides, said):
    config = composed("hardware=mi300x", "model=qwen3_4b", *overrides)
    if said is None:
        return check(config)
    with pytest.raises(UserError) as raised:
        check(config)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "rules"),
    [
        (["method=bench/gemm", "method.args.shapes=[[8192,8192]]"], ["bench_lists"]),
        (["method=bench/gemm", "method.args.shapes=[[8192,8192,0]]"], ["bench_lists"]),
        (["method=bench/gemm", "method.args.shapes=[[8192,8192,8192]]"], []),
        (["method=bench/attention", "method.args.heads=[[32,8]]"], ["bench_lists"]),
        (
            ["method=bench/gemm", "method.args.shapes=[]", "method.args.fail_below=0.9"],
            ["bench_empty_lists"],
        ),
        (["method=bench/precision", "method.args.precisions=[]"], ["bench_empty_lists"]),
        (["method=bench/vllm", "method.args.settings=[]"], ["bench_empty_lists"]),
        (["method=bench/dataloader", "method.args.steps=[]"], ["bench_empty_lists"]),
        (["method=tune/batch", "method.args.checkpointing=[]"], ["bench_empty_lists"]),
        (["method=tune/inductor", "method.args.candidates=[]"], ["bench_empty_lists"]),
        (["method=tune/inductor", "method.args.candidates=null"], []),  # all
        (["method=tune/vllm", "model=qwen3_8b", "method.args.settings=[]"], ["unread"]),
        (["method=tune/vllm", "model=qwen3_8b", "~method.args.settings"], []),
        (
            ["method=tune/vllm", "model=qwen3_8b", "method.args.settings=[{max_num_seqs: 3}]"],
            ["unread"],
        ),
        (["method=tune/vllm", "method.args.lengths=[1024,128]"], ["bench_lists"]),
        (["method=tune/batch", "method.args.max_length=null"], ["tune_full_rows"]),
        (["method=tune/batch", "method.args.max_length=null", "method.args.rows=data"], []),
        (["method=tune/batch", "method.args.recipe=grpo", "method.args.rows=data"], []),
    ],
)
def test_what_a_rank_would_refuse(overrides, rules):
    assert [
        rule.name for rule in refusals(composed("hardware=mi350x", "topology=single", *overrides))
    ] == rules


@pytest.mark.parametrize(
    ("given", "rules"),
    [
        (["programs=[]", "fail_below=0.9"], ["bench_empty_lists"]),
        (["ranks=[]"], ["bench_empty_lists"]),
        (["dtypes=[]", "settings=[]"], []),  # the hardware's, and the run's own environment
        (["settings=[3]"], ["bench_environments"]),
        (["settings=[{NCCL_ALGO: [Ring]}]"], ["bench_environments"]),
        (["settings=[{1: 2}]"], ["bench_environments"]),
        (["settings=[{NCCL_NVLS_ENABLE: true}]"], ["bench_environments"]),
        (["settings=[{NCCL_ALGO: null}]"], []),
    ],
)
def test_collectives_that_a_rank_would_refuse(given, rules):
    found = refusals(
        composed(
            "hardware=mi350x", "method=bench/collectives", *(f"method.args.{one}" for one in given)
        )
    )
    assert [rule.name for rule in found] == rules


@pytest.mark.parametrize(
    ("name", "refused"), [("vllm", True), ("collectives", True), ("gemm", False)]
)
def test_a_profile_of_a_benchmark_that_starts_processes(name, refused):
    found = refusals(composed("hardware=mi300x", f"method=bench/{name}", "profile=torch"))
    assert [rule.name for rule in found] == ["profile_of_who_waits"] * refused


def test_every_refusal_is_said_at_once():
    config = composed("hardware=mi50", "precision=bf16", "topology=split", "name=a/b")
    with pytest.raises(UserError) as raised:
        check(config)
    assert str(raised.value).count("Use: ") == len(refusals(config)) >= 3


@pytest.mark.parametrize(
    "given", ["server_cache_gb=2", "server_max_length=200", "server_tensor_parallel=3"]
)
def test_a_key_of_a_server_that_is_not_there_is_refused_once(given):
    """Also where a server would refuse its value."""
    assert [
        rule.name for rule in refusals(composed(*QWEN, "topology=ddp", f"topology.{given}"))
    ] == ["unread"]


def test_an_overlap_without_a_server_is_refused_once():
    given = [
        "method=grpo",
        "topology=ddp",
        "topology.overlap=true",
        "method.args.vllm_importance_sampling_correction=false",
    ]
    assert [rule.name for rule in refusals(composed(*QWEN, *given))] == ["unread"]


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (["servers=8"], "topology.servers=7"),
        (["server_tensor_parallel=8"], "topology.server_tensor_parallel=4"),  # 7 GPUs, and 32 heads
        (
            ["servers=2", "server_tensor_parallel=4"],
            "topology.servers=1 or topology.server_tensor_parallel=2",
        ),
        (["servers=3", "num_gpus=2"], "topology.servers=1 or topology.num_gpus=4"),
        (["servers=2", "num_gpus=1"], "topology.servers=1 or topology.num_gpus=3"),
        (
            ["servers=16", "server_tensor_parallel=16"],
            "topology.servers=1 topology.server_tensor_parallel=1",
        ),
    ],
)
def test_servers_that_take_every_gpu(given, remedy):
    """Each remedy is taken."""
    split = [
        "hardware=mi350x",
        "model=qwen3_4b",
        "method=grpo",
        "topology=split",
        *(f"topology.{one}" for one in given),
    ]
    [rule] = refusals(composed(*split))
    assert (rule.name, rule.remedy(composed(*split))) == ("split_needs_a_trainer", remedy)
    assert [refusals(composed(*split, *taken.split(" "))) for taken in remedy.split(" or ")] == [
        []
    ] * len(remedy.split(" or "))


@pytest.mark.parametrize("pair", [(8, 1), (1, 8), (2, 4)])
def test_seven_ranks_and_groups_of_eight_that_divide(pair):
    """Notes of TRL 1.16: on seven ranks 4x1 and 1x4 fail; these pass."""
    config = composed(
        "hardware=mi300x",
        "model=qwen3_4b",
        "method=grpo",
        "topology=split",
        f"method.args.per_device_train_batch_size={pair[0]}",
        f"method.args.gradient_accumulation_steps={pair[1]}",
        "method.args.num_generations=8",
    )
    assert refusals(config) == []


@pytest.mark.parametrize(
    ("arguments", "remedies"),
    [
        (
            ["per_device_train_batch_size=4", "generation_batch_size=4"],
            ["Use: method.args.generation_batch_size=8;", "num_generations=4"],
        ),
        (
            ["per_device_train_batch_size=4", "generation_batch_size=12"],
            ["generation_batch_size=8 or method.args.generation_batch_size=16"],
        ),
        (
            ["per_device_train_batch_size=3", "steps_per_generation=3"],
            ["per_device_train_batch_size x steps_per_generation", "2 x 4 (8)"],
        ),
    ],
)
def test_remedies_for_groups_change_what_was_given(arguments, remedies):
    with pytest.raises(UserError) as raised:
        check(
            composed(
                "hardware=mi300x",
                "model=qwen3_4b",
                "method=grpo",
                "topology=single",
                *(f"method.args.{given}" for given in arguments),
            )
        )
    assert "method.args.num_generations=8 does not divide" in str(raised.value)
    assert all(remedy in str(raised.value) for remedy in remedies)


def test_groups_of_any_size_are_answered_at_once():
    """Trying every pair up to 20,000 took 46 s."""
    config = composed(
        "hardware=mi300x",
        "model=qwen3_4b",
        "method=grpo",
        "topology=single",
        "method.args.num_generations=10000000",
    )
    began = time.process_time()
    assert fitting_batches(config) == [(8, 1_250_000), (10, 1_000_000), (5, 2_000_000)]
    assert time.process_time() - began < 5


@pytest.mark.parametrize("size", [8, 12, 16, 24, 36, 48])
@pytest.mark.parametrize("per_device", [3, 4, 8])
@pytest.mark.parametrize("group", [4, 8])
def test_only_generation_batches_that_trl_refuses_are_rejected(size, per_device, group):
    """On one rank; whole_generations' values are taken."""
    from trl import GRPOConfig

    def refused_by_trl(size: int) -> bool:
        given = {
            "per_device_train_batch_size": per_device,
            "generation_batch_size": size,
            "num_generations": group,
        }
        try:
            GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, **given)
        except ValueError as error:
            return "must be divisible by" in str(error)
        return False

    arguments = {
        "per_device_train_batch_size": per_device,
        "generation_batch_size": size,
        "num_generations": group,
    }
    config = composed(
        "hardware=cpu",
        "method=grpo",
        "topology=single",
        *(f"method.args.{name}={n}" for name, n in arguments.items()),
    )
    ours = [rule.name for rule in refusals(config)]
    assert ours == ["groups_divide"] * (size % group != 0)
    assert refused_by_trl(size) or not ours
    assert not any(refused_by_trl(n) for n in batch.whole_generations(config))


WARNINGS = {
    "shows rows where mode=plan is left out": ["hardware=cpu", "data.preview=5", "mode=plan"],
    "twice as slow": ["hardware=strix_halo", "adapter=qlora", "precision=nf4", "model=qwen3_8b"],
    "rccl#1270": ["hardware=mi300x", "topology=ddp", "topology.num_gpus=4"],
    "collectives of 7 GPUs": ["hardware=mi350x", "method=grpo", "topology=split"],
    "expandable_segments hangs": [
        "hardware=mi300x",
        "user_env.PYTORCH_ALLOC_CONF='expandable_segments:True'",
    ],
    "expandable_segments with vLLM": [
        "hardware=h200",
        "method=grpo",
        "topology=colocate",
        "user_env.PYTORCH_ALLOC_CONF='expandable_segments:True'",
    ],
    "supported natively": ["hardware=strix_halo", "user_env.HSA_OVERRIDE_GFX_VERSION=11.0.0"],
    "accelerate holds weights that train in fp32": [
        "hardware=mi300x",
        "topology=fsdp",
        "precision=bf16",
        "precision.weights=bf16",
    ],
    "asks for no cores, and many clusters give such a job one, for all 8 rank(s) of a node": [
        "hardware=mi300x",
        "runtime=slurm",
    ],
    "pinned memory hang": ["hardware=strix_halo", "hardware.dataloader.num_workers=2"],
}


@pytest.mark.parametrize(("words", "overrides"), WARNINGS.items())
def test_warning(words, overrides):
    config = composed(*overrides)
    assert refusals(config) == []
    assert any(words in line for line in rule_warnings(config))


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        *(
            (
                ["hardware=mi300x", "topology=ddp", f"topology.num_gpus={n}"],
                n if 1 < n < 8 else None,
            )
            for n in range(1, 9)
        ),
        (["hardware=mi300x", "method=grpo", "topology.num_gpus=4"], 3),
        (["hardware=mi300x", "method=grpo", "topology.servers=2"], 6),
        (["hardware=mi300a", "topology=ddp", "topology.num_gpus=3"], 3),
        (["hardware=mi300a", "topology=ddp"], None),
        (["hardware=h200", "topology=ddp", "topology.num_gpus=4"], None),
        (
            ["hardware=mi300x", "method=evaluate", "topology.num_gpus=4"],
            None,
        ),  # its ranks do not wait for one another
    ],
)
def test_fewer_gpus_than_a_board_has_are_warned_of(overrides, ranks):
    found = [
        line
        for line in rule_warnings(composed("model=qwen3_4b", *overrides))
        if "rccl#1270" in line
    ]
    assert [line.split(" GPUs")[0] for line in found] == (
        [f"collectives of {ranks}"] if ranks else []
    )


@pytest.mark.parametrize(
    "option",
    ["--exclusive", "--exclusive=user", "--excl", "--cpus-per-task=16", "--cpus-per-gpu=8"],
)
def test_a_job_that_asks_for_cores_is_not_warned(option):
    asked = ["hardware=cpu", "runtime=slurm"]
    assert len(rule_warnings(composed(*asked, "runtime.slurm.options=['--mem=0']"))) == 1
    assert rule_warnings(composed(*asked, f"runtime.slurm.options=['--mem=0','{option}']")) == []


def test_no_warning_where_there_is_nothing_to_warn_of():
    assert rule_warnings(composed("hardware=mi300x", "topology=ddp")) == []


@pytest.mark.parametrize("name", ["PATH", "HOME", "HIP_VISIBLE_DEVICES", "MINE"])
def test_a_secret_that_the_plan_sets_itself_is_refused(name):
    found = refusals(
        composed("container=cpu", "hardware=cpu", f"runtime.secrets=[{name}]", "user_env.MINE=1")
    )
    assert [rule.name for rule in found] == ["secret_names"]
