"""Values that no composition may have, looked at before any rule reads them: words outside their list, numbers out of range."""

from __future__ import annotations

import math

from launch.errors import UserError, near
from launch.schema import Config
from launch.trainer_args import class_of, known

# key -> the words it takes
WORDS = {
    "method.kind": ("trainer", "evaluator", "exporter", "bench", "tune", "cycles"),
    "model.architecture": ("qwen3", "qwen2", "llama"),
    "precision.compute": ("fp32", "fp16", "bf16", "fp8"),
    "precision.weights": ("fp32", "fp16", "bf16", "nf4"),
    "runtime.name": ("local", "docker", "slurm"),
    "topology.name": ("single", "ddp", "fsdp", "zero2", "zero3", "split", "colocate"),
    "topology.strategy": ("none", "ddp", "fsdp", "zero2", "zero3"),
    "topology.overlap": (False, True, "stream"),
    "topology.fsdp.reduce_dtype": ("fp32", "bf16"),
    "topology.fsdp.state_dict_type": ("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
    "data.kind": ("reasoning", "code", "jsonl", "hub", "mix", "samples"),
    # Those of transformers' report_to.
    "tracking.name": (
        *("none", "azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "kubeflow"),
        *("mlflow", "neptune", "swanlab", "tensorboard", "trackio", "wandb"),
    ),
    "hardware.attention": ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
}
OPEN, UNDER_ONE = 1e-9, math.nextafter(1.0, 0.0)  # as bounds: 0 and 1 themselves are out of range
# key -> the least it may be, where it has a value
LEAST = {
    "effective_batch": 1,
    "hardware.gpus_per_node": 1,
    "hardware.memory_gb": 1,
    "hardware.bandwidth_gb_s": 1,
    "hardware.dataloader.num_workers": 0,
    "model.num_layers": 1,
    "model.hidden_size": 1,
    "model.intermediate_size": 1,
    "model.num_heads": 1,
    "model.num_kv_heads": 1,
    "model.head_dim": 1,
    "model.vocab_size": 1,
    "model.max_positions": 1,
    "model.num_parameters": 1,
    "adapter.rank": 1,
    "adapter.alpha": 1,
    "runtime.stop_timeout_s": 1,
    "runtime.slurm.nodes": 1,
    "runtime.slurm.early_signal_s": 1,
    "runtime.slurm.rendezvous_timeout_s": 1,
    "runtime.slurm.gid_index": 0,
    "runtime.shm_gb": 0.064,  # docker's own
    "price_per_gpu_hour": 0,
    "runtime.memory_gb": 0.1,
    "runtime.hang_timeout_s": 1,
    "runtime.max_restarts": 0,
    "topology.num_gpus": 1,
    "topology.servers": 0,
    "topology.max_staleness": 0,
    "topology.server_tensor_parallel": 1,
    "topology.server_memory_share": 0.01,
    "topology.server_cache_gb": 0.001,
    "topology.server_max_length": 2,
    "method.sandbox.workers": 1,
    "method.sandbox.time_s": 0.1,
    "method.sandbox.memory_gb": 0.1,  # of address space: Python alone takes a part of it
    "method.sandbox.processes": 8,
    "method.sandbox.output_kb": 1,
    "method.sandbox.disk_mb": 1,
    "data.preview": 0,
    "data.pairs_per_prompt": 1,
    "data.shuffle_buffer": 1,
    "data.filter.min_tokens": 0,
    "data.filter.max_tokens": 1,
    "data.filter.max_prompt_tokens": 1,
    "method.lr_reference_batch": 1,
    "method.selection.patience": 1,
    "method.selection.min_delta": 0,
    "method.args.per_device_eval_batch_size": 1,
    "method.args.per_device_train_batch_size": 1,
    "method.args.gradient_accumulation_steps": 1,
    "method.args.num_generations": 2,  # a group of one has no mean to be above
    "method.args.num_generations_eval": 1,
    "method.args.num_train_epochs": OPEN,
    "method.args.steps_per_generation": 1,
    "method.args.generation_batch_size": 1,
    "method.args.num_iterations": 1,
    "method.args.max_length": 1,
    "method.args.max_completion_length": 1,
    "method.args.logging_steps": OPEN,
    "method.args.batch_size": 1,
    "method.args.max_new_tokens": 1,
    "method.args.samples_per_prompt": 1,
    "method.args.fail_below": OPEN,
    "method.args.num_prompts": 1,
    "method.args.per_prompt": 1,
    "method.args.cycles": 1,
    "method.args.repetitions": 1,
    "method.args.timeout_s": OPEN,
    "method.args.warmup": 0,
    "method.args.steps": 1,
    "method.args.learning_rate": 0,  # trains nothing, which measures what a run is like without learning
    "method.args.weight_decay": 0,
    "method.args.warmup_steps": 0,
    "method.args.max_grad_norm": 0,  # clips nothing
    "method.args.save_steps": OPEN,
    "method.args.save_total_limit": 0,  # keeps all
    "method.args.adam_beta1": 0,
    "method.args.adam_beta2": 0,
    "method.args.adam_epsilon": 0,
    "method.args.label_smoothing_factor": 0,
    "method.args.label_smoothing": 0,
    "method.args.neftune_noise_alpha": 0,
    "method.args.dataset_num_proc": 1,
    "method.args.torch_empty_cache_steps": 1,
}
DIVIDED = 2**31 - 1  # its divisors are tried up to its root: 46 thousand, a hundredth of a second
# key -> the most it may be: what the planner goes over one by one, and a price. Our choice, above all that is known.
MOST = {
    "hardware.gpus_per_node": 1024,  # each has a rank, with its memory and its log; a node of MI300X in CPX mode has 64
    "effective_batch": DIVIDED,
    "method.args.per_device_train_batch_size": DIVIDED,
    "method.args.generation_batch_size": DIVIDED,
    "method.args.num_generations": 100_000,  # smaller groups are tried one by one, where it divides no generation
    "method.args.timeout_s": 86_400,  # a day
    "method.args.cycles": 500,  # two or three runs each, all composed and planned first: half a minute
    "method.args.adam_beta1": UNDER_ONE,
    "method.args.adam_beta2": UNDER_ONE,
    "method.args.label_smoothing_factor": UNDER_ONE,
    "method.args.label_smoothing": UNDER_ONE,
    "price_per_gpu_hour": 1_000_000_000,  # in any currency: tens of dollars are tens of millions of the smallest ones; costs stay finite
}
# class -> argument -> (least, most), where methods have arguments of one name and mean different things
BOUNDS = {
    "trl.DPOConfig": {"beta": (OPEN, math.inf)},  # at 0 the loss is that of no model at all, or divides by it
    "trl.GRPOConfig": {
        "beta": (0, math.inf),
        "epsilon": (0, math.inf),
        "epsilon_high": (0, math.inf),
        "temperature": (OPEN, math.inf),  # logits are divided by it
        "top_p": (OPEN, 1),
        "min_p": (0, 1),
        "repetition_penalty": (OPEN, math.inf),
        "top_entropy_quantile": (0, 1),
    },
}
# Counts of steps where 1 or more, else shares of all: transformers refuses parts of a step, once every rank is up.
WHOLE = ("logging_steps", "save_steps")


def check_values(config: Config) -> None:
    """Raises UserError for the first value outside its list or range."""
    for key, words in WORDS.items():
        given = leaf(config, key)
        if given not in words:
            shown = [str(word).lower() if isinstance(word, bool) else word for word in words]
            raise UserError(f"{key}={given}: it takes {', '.join(shown)}.{near(str(given), shown)}")
    for name, given in config.method.args.items():
        if isinstance(given, float) and not math.isfinite(given):
            raise UserError(f"method.args.{name}={given}: no finite number. Use: a finite one, or null.")
        if name in WHOLE and isinstance(given, float) and given > 1 and given != int(given):
            raise UserError(f"method.args.{name}={given}: no whole number. Use: {int(given)}; a number below 1 is a share of all steps.")
    for key, (least, most) in _bounds(config).items():
        given = leaf(config, key)
        in_range = isinstance(given, (int, float)) and least <= given <= most and given < math.inf
        if isinstance(given, (int, float)) and not in_range and _is_argument(config, key):
            raise UserError(f"{key}={given}: out of range. Use: {_range(least, most)}.")


def _bounds(config: Config) -> dict[str, tuple[float, float]]:
    """Key -> (least, most). The class is looked up only where one of its own arguments is given."""
    found: dict[str, tuple[float, float]] = {key: (least, MOST.get(key, math.inf)) for key, least in LEAST.items()}
    if any(name in config.method.args for of_class in BOUNDS.values() for name in of_class):
        found |= {f"method.args.{name}": both for name, both in BOUNDS.get(class_of(config), {}).items()}
    return found


def _range(least: float, most: float) -> str:
    lower = "above 0" if least == OPEN else f"at least {least:g}"
    upper = "" if most == math.inf else " and below 1" if most == UNDER_ONE else f" and at most {most}"
    return lower + upper


def _is_argument(config: Config, key: str) -> bool:
    return not key.startswith("method.args.") or key.rsplit(".", 1)[1] in known(config)


def leaf(config: Config, key: str) -> object:
    """The value at a dotted key; None where a free key has none."""
    node: object = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part)
    return node
