"""Reject settings that do not work with one another: one row names them, the reason, the remedy.

A row applies if every setting has its value: one value, one of a tuple, or what a function accepts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from launch.config.compose import leaf
from launch.machine.placement import needs_sandbox, num_trainers, shares_gpu
from launch.rules.rule import Rule, Text
from launch.rules.selection import first_metric
from launch.rules.topology import several
from launch.schema import Config
from launch.schema.enums import Vendor
from launch.schema.trainer_args import argument


def given(value: Any) -> bool:
    return value not in (None, False, 0, "none", [], {})


def absent(value: Any) -> bool:
    return not given(value)


def above_1(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _not_positive(value: Any) -> bool:
    return not value or value <= 0


def _has_gguf(value: Any) -> bool:
    return "gguf" in (value or [])


@dataclass(frozen=True)
class Conflict:
    name: str
    settings: dict[str, Any]  # key -> its value, a tuple of values, or a function of the value
    why: str
    remedy: Text
    when: Callable[[Config], bool] = lambda config: True

    def rule(self) -> Rule:
        return Rule(self.name, self._applies, self._message, self.remedy)

    def _applies(self, config: Config) -> bool:
        return self.when(config) and all(
            allowed(value) if callable(allowed) else value in allowed
            for allowed, value in (
                (
                    allowed if callable(allowed) or isinstance(allowed, tuple) else (allowed,),
                    setting(config, key),
                )
                for key, allowed in self.settings.items()
            )
        )

    def _message(self, config: Config) -> str:
        shown = [
            f"{key.removesuffix('.name')}={_shown(setting(config, key))}" for key in self.settings
        ]
        return f"{' with '.join(shown)}: {self.why}"


def setting(config: Config, key: str) -> Any:
    """Return a key's value, or an argument's default; an enum's member becomes its name."""
    group, _, name = key.rpartition(".")
    value = argument(config, name) if group == "method.args" else leaf(config, key)
    return value.name if isinstance(value, Enum) else value


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _trains(config: Config) -> bool:
    return config.method.trains


def _selects(config: Config) -> bool:
    return bool(config.method.held_out_metrics)


def _is_job(config: Config) -> bool:
    return config.runtime.name == "slurm"


def _pair(name: str, first: str, second: str, remedy: str, is_first: Any = given) -> list[Conflict]:
    """Return the rows of two settings of which neither works without the other."""
    why = "each needs the other"
    return [
        Conflict(name, {first: is_first, second: absent}, why, remedy),
        Conflict(name, {first: lambda value: not is_first(value), second: given}, why, remedy),
    ]


CONFLICTS = [
    # precision
    Conflict(
        "nf4_without_adapter",
        {"precision.weights": "nf4", "adapter.name": "none"},
        "4-bit weights take no gradients",
        "adapter=qlora, or another precision",
        _trains,
    ),
    Conflict(
        "qlora_without_nf4",
        {"adapter.quantize_base": True, "precision.weights": ("fp32", "fp16", "bf16")},
        "the adapter needs a 4-bit base",
        "precision=nf4, or adapter=lora",
    ),
    Conflict(
        "nf4_sharded",
        {"precision.weights": "nf4", "topology.strategy": ("fsdp", "zero3")},
        "4-bit weights cannot be sharded",
        "topology=ddp, or precision=bf16 adapter=lora",
        _trains,
    ),
    Conflict(
        "nf4_colocate",
        {"precision.weights": "nf4", "topology.name": "colocate"},
        "vLLM's own 4-bit copy takes no merged weights",
        "topology=split, whose server has 16-bit weights; or topology=single",
        _trains,
    ),
    Conflict(
        "fp8_zero3",
        {"precision.compute": "fp8", "topology.strategy": "zero3"},
        "fp8 products keep gathered weights, so nothing is freed",
        "topology=fsdp, which shards what computes in fp8 too",
        _trains,
    ),
    Conflict(
        "fp16_weights",
        {
            "precision.compute": "fp16",
            "precision.weights": "fp16",
            "topology.strategy": ("none", "ddp"),
            "adapter.name": "none",
        },
        "torch.amp does not unscale fp16 gradients",
        "precision.weights=fp32; or an adapter, whose own weights are fp32",
        _trains,
    ),
    *_pair(
        "adapter_rank",
        "adapter.name",
        "adapter.rank",
        "adapter=lora adapter.rank=N, or adapter=none",
    ),
    # steps
    *(
        Conflict(
            "compiled_layers_alone",
            {"step.compile": True, f"method.args.{other}": True},
            "this is slower than step.compile alone",
            "one of them; step.compile=true starts in a ninth of the time of torch_compile",
        )
        for other in ("use_liger_kernel", "torch_compile")
    ),
    Conflict(
        "packed_without_kernel",
        {"step.rows": "packed", "hardware.packed_attention": None},
        "this GPU has no kernel that keeps rows apart",
        "step.rows=grouped; or hardware.packed_attention=<kernel> where you know that one works",
    ),
    *(
        Conflict(
            "rows_packed_twice",
            {"step.rows": ("packed", "grouped"), f"method.args.{other}": True},
            "rows are joined already",
            "step.rows=padded; or method.args.packing=false, to pack the rows of each step only",
        )
        for other in ("packing", "padding_free")
    ),
    Conflict(
        "two_checkpointings",
        {
            "topology.fsdp.activation_checkpointing": True,
            "method.args.gradient_checkpointing": True,
        },
        "layers would be recomputed twice",
        "method.args.gradient_checkpointing=false",
    ),
    Conflict(
        "groups_and_smaller_batches",
        {"method.args.auto_find_batch_size": True},
        "a smaller batch may cut a group of completions",
        "method.args.auto_find_batch_size=false; mode=plan find=largest_batch plans what fits",
        lambda c: c.method.generates,
    ),
    *_pair(
        "lr_scaling",
        "method.lr_scaling",
        "method.lr_reference_batch",
        "both, for example method.lr_scaling=sqrt method.lr_reference_batch=32, or none of them",
    ),
    # data
    *(
        Conflict(
            "data_streaming",
            {"data.streaming": True, key: value},
            "this needs all rows at once",
            "data.streaming=false, or data=jsonl or hub without it",
        )
        for key, value in {
            "data.kind": ("reasoning", "code", "samples", "none"),
            "data.deduplicate": given,
            "data.balance": given,
            "data.curriculum": given,
            "method.args.precompute_ref_log_probs": True,
        }.items()
    ),
    Conflict(
        "max_steps_needed",
        {"data.streaming": True, "method.args.max_steps": _not_positive},
        "nobody knows the number of rows",
        "method.args.max_steps=1000",
        _trains,
    ),
    Conflict(
        "max_steps_needed",
        {"data.curriculum": given, "method.args.max_steps": _not_positive},
        "levels change with the share of the steps",
        "method.args.max_steps=1000",
        lambda c: c.method.curriculum,
    ),
    *(
        Conflict(
            "heldout_twice",
            {"data.heldout_fraction": given, key: value},
            "these rows are held out by themselves, or not at all",
            "one of data.num_heldout, heldout_path, heldout_split and heldout_fraction",
        )
        for key, value in {
            "data.kind": ("reasoning", "code", "samples"),
            "data.heldout_path": given,
            "data.heldout_split": given,
        }.items()
    ),
    Conflict(
        "chat_template_twice",
        {"model.chat_template": given, "data.chat_template": given},
        "two templates for the same rows",
        "one of them",
    ),
    Conflict(
        "curriculum_packing",
        {"data.curriculum": given, "method.args.packing": True},
        "a packed row has many levels",
        "method.args.packing=false",
    ),
    Conflict(
        "curriculum_pass_rates",
        {"data.curriculum": "adaptive", "data.pass_rates": None},
        "this method measures no pass rates",
        "data.pass_rates=<result.json of an evaluation>, or data.curriculum=progressive",
        lambda c: c.method.curriculum and not c.method.generates,
    ),
    Conflict(
        "pairs_of_code",
        {"data.kind": "code", "method.rows": "dpo"},
        "programs make no preference pairs",
        "data=jsonl with pairs of your own, or method=sft or grpo",
    ),
    Conflict(
        "evaluation_of_code",
        {"data.kind": "code", "method.rewards": absent},
        "answers are compared, but many programs are right",
        "+method.rewards.code_tests=1.0, which runs their tests",
        lambda c: c.method.measures_model,
    ),
    # selection of the best model, which is measured when it is saved
    Conflict(
        "selection_saves",
        {"method.selection.metric": given, "method.args.save_strategy": ("no", "epoch", "best")},
        "models are measured as they are saved, by steps",
        "method.args.save_strategy=steps method.args.save_steps=100",
        lambda c: _selects(c) and c.method.trains,
    ),
    Conflict(
        "save_best",
        {"method.args.save_strategy": "best", "method.selection.metric": None},
        "a metric says which model is best",
        lambda c: f"{first_metric(c)} method.args.save_strategy=steps, to end with the best model",
    ),
    Conflict(
        "selection_streaming",
        {
            "method.selection.metric": given,
            "data.streaming": True,
            "data.heldout_fraction": given,
        },
        "a stream needs held-out rows of their own",
        "data.heldout_path, data.heldout_split, or data.streaming=false",
    ),
    # While the trainer measures, the server generates a batch. Measuring would send it newer
    # weights in the middle.
    Conflict(
        "selection_overlap",
        {"method.selection.metric": given, "topology.overlap": given},
        "two batches would be generated at once",
        "topology.overlap=false",
    ),
    # evaluations, exports, benchmarks and profiles
    Conflict(
        "greedy_samples",
        {"method.args.temperature": 0, "method.args.samples_per_prompt": above_1},
        "all samples of a prompt would be the same",
        "method.args.temperature=0.7, or samples_per_prompt=1",
    ),
    Conflict(
        "lm_eval_engine",
        {"method.args.lm_eval_tasks": given, "method.args.engine": "vllm"},
        "the harness gets the model of transformers",
        "method.args.engine=transformers for these tasks",
    ),
    *_pair(
        "export_gguf",
        "method.args.formats",
        "method.args.gguf_converter",
        "formats=[safetensors,gguf] gguf_converter=<llama.cpp>/convert_hf_to_gguf.py",
        _has_gguf,
    ),
    Conflict(
        "export_gguf_8_bits",
        {"method.args.formats": _has_gguf, "method.args.weights": ("fp8", "int8")},
        "llama.cpp has other 8 bits",
        "method.args.weights=bf16, and llama-quantize on model.gguf; or formats=[safetensors]",
    ),
    Conflict(
        "tune_for_rocm",
        {"method.name": ("tune/tunableop", "tune/miopen"), "hardware.vendor": "nvidia"},
        "it tunes ROCm's libraries",
        "an AMD GPU; method=tune/inductor and tune/batch are for this one too",
    ),
    Conflict(
        "profile_hardware",
        {"profile": "memory", "hardware.vendor": "none"},
        "it needs a GPU",
        "profile=torch",
    ),
    Conflict(
        "profile_hardware",
        {"profile": "rocprof", "hardware.vendor": ("nvidia", "none")},
        "it needs an AMD GPU",
        "profile=torch",
    ),
    Conflict(
        "rocprof_compute_alone",
        {"profile": "rocprof", "rocprof": "compute"},
        "it repeats the program, on one rank and without a checkpoint to resume from",
        lambda c: (
            "topology=single"
            + " method.args.save_strategy=no and a few method.args.max_steps" * c.method.trains
            + "; or rocprof=v3"
        ),
        lambda c: num_trainers(c) > 1 or argument(c, "save_strategy") not in (None, "no"),
    ),
    # topology
    Conflict(
        "single_is_one",
        {"topology.name": "single", "topology.num_gpus": above_1},
        "it runs on one GPU",
        lambda c: (
            f"topology={' or '.join(several(c))}"
            if several(c)
            else f"topology.num_gpus=1: method={c.method.name} runs on one"
        ),
    ),
    Conflict(
        "overlap_without_correction",
        {
            "topology.overlap": given,
            "topology.name": "split",
            "method.args.vllm_importance_sampling_correction": False,
        },
        "completions of older weights need the correction",
        "method.args.vllm_importance_sampling_correction=true, TRL's default",
    ),
    Conflict(
        "overlap_on_one_gpu",
        {"topology.overlap": given},
        "generation and training take turns on one GPU",
        "topology.overlap=false, or topology.num_gpus=2",
        shares_gpu,
    ),
    # runtime
    Conflict(
        "custom_reference",
        {"container.name": "custom", "container.reference": None},
        "the image is not named",
        "container=custom container.reference=<repository@sha256:...>",
    ),
    Conflict(
        "custom_reference",
        {"container.name": lambda name: name != "custom", "container.reference": given},
        "the reference would not be used",
        "container=custom, or no container.reference",
    ),
    Conflict(
        "sandbox_under_slurm",
        {"runtime.name": "slurm", "method.rewards": given},
        "method.rewards.code_tests needs a docker engine, which jobs rarely have",
        "runtime=local or runtime=docker on a machine with a docker engine",
        needs_sandbox,
    ),
    Conflict(
        "slurm_nodes",
        {"runtime.slurm.nodes": above_1, "topology.name": ("single", "split", "colocate")},
        "it runs on one node",
        "topology=ddp or topology=fsdp or topology=zero2 or topology=zero3; or "
        "runtime.slurm.nodes=1",
        _is_job,
    ),
    Conflict(
        "slurm_nodes_docker",
        {"runtime.slurm.nodes": above_1, "runtime.slurm.inner": "docker"},
        "containers run on one node only",
        "runtime.slurm.inner=local runtime.slurm.python=<a Python that every node sees>",
        _is_job,
    ),
    Conflict(
        "slurm_interface",
        {"runtime.slurm.nodes": above_1, "runtime.slurm.interface": None},
        "the network between nodes is not guessed",
        "runtime.slurm.interface=<name>, as in `srun ip -br address` (docs/slurm.md)",
        lambda c: _is_job(c) and c.hardware.vendor != Vendor.none,
    ),
]
CONFLICT_RULES = [row.rule() for row in CONFLICTS]
