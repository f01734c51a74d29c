"""The complete arguments of a method's configuration class: what the user gave, plus what the other groups imply."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import yaml

from launch.command_line.mistaken import argument_meant, value_meant, word_meant
from launch.errors import UserError, near
from launch.schema import Config
from launch.schema.enums import Vendor

LOCK = Path(__file__).parents[1] / "containers/trainer_args.lock.json"
METHODS = Path(__file__).parents[1] / "conf/method"

# Arguments that another key decides; given under method.args they would contradict it.
OWNED = {
    "output_dir": "run_root=",
    "run_name": "name=",
    "seed": "seed=",
    "data_seed": "seed=",
    "bf16": "precision=bf16",
    "fp16": "precision=fp16",
    "use_cpu": "hardware=cpu",
    "report_to": "tracking=",
    "project": "tracking.project=",
    "disable_tqdm": "nothing: the launcher shows progress",
    "dataloader_num_workers": "hardware.dataloader.num_workers=",
    "dataloader_pin_memory": "hardware.dataloader.pin_memory=",
    "fsdp": "topology=fsdp",
    "fsdp_config": "topology.fsdp.<field>=",
    "deepspeed": "topology=zero2 or topology=zero3",
    "resume_from_checkpoint": "resume=",
    "use_vllm": "topology=split",
    "vllm_mode": "topology=split",
    "vllm_server_base_url": "topology=split",
    "vllm_server_host": "topology=split",
    "vllm_server_port": "topology=split",
    "vllm_group_port": "topology=split",
    "eval_strategy": "method.selection.metric=eval_loss",
    "eval_steps": "method.args.save_steps=; a model that was measured is saved",
    "eval_delay": "method.args.save_steps=; every saved model is measured",
    "eval_on_start": "method.args.save_steps=; every saved model is measured, and the first one is method=evaluate's",
    "load_best_model_at_end": "method.selection.metric=eval_loss",
    "metric_for_best_model": "method.selection.metric=",
    "greater_is_better": "method.selection.metric=",
    "reward_weights": "method.rewards.<name>=<weight>",
    "parallelism_config": "topology=fsdp; tensor, pipeline and context parallelism are not offered",
    "model_init_kwargs": "model.<field>=, precision= and hardware.attention=",
}
# Tokens that batches are filled up to where layers are compiled: kernels of a length whose divisors are known are faster, fp8's by a tenth.
COMPILED_MULTIPLE = 64
# What TRL removed, and what to use instead (TRL's migration notes; notes of transformers 5).
REPLACED = {
    "max_prompt_length": "prompts are no longer truncated: filter the data, and bound the completion by max_completion_length",
    "max_seq_length": "use max_length",
    "warmup_ratio": "use warmup_steps: a value below 1 is a share of all steps",
    "overwrite_output_dir": "every run has a directory of its own",
    "logging_dir": "the launcher sets it",
    "group_by_length": "use train_sampling_strategy=group_by_length",
    "fp16_opt_level": "Apex is gone; precision=fp16 uses torch.amp",
    "evaluation_strategy": "use method.selection.metric=eval_loss",
}
# Method -> figures that its trainer logs of held-out rows, and whether more is better
HELD_OUT_METRICS = {
    "sft": {"eval_loss": False, "eval_mean_token_accuracy": True},
    "dpo": {"eval_loss": False, "eval_rewards/accuracies": True, "eval_rewards/margins": True},
    "grpo": {"eval_reward": True},
    "raft": {"accuracy": True},  # of its cycles: launch/pipelines/cycle_choice.py
}
JSON_TYPES = {bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "dict", type(None): "null"}


@functools.cache
def lock() -> dict[str, Any]:
    """Every argument of every configuration class, as `make lock` read them from the installed packages."""
    content: dict[str, Any] = json.loads(LOCK.read_text())
    return content


def own(config: Config) -> dict[str, dict[str, Any]]:
    """Argument -> {types, default} of the method's configuration class."""
    return _of_class(config.method.config_class)


def class_of(config: Config) -> str:
    """The configuration class of what trains: a tuning's is that of the recipe that it tunes."""
    name = recipe_name(config)
    return _class_of_method(name) if name else config.method.config_class


def known(config: Config) -> dict[str, dict[str, Any]]:
    """The same, and for a tuning the arguments of the recipe that it tunes."""
    name = recipe_name(config)
    return {**_of_class(_class_of_method(name)), **own(config)} if name else own(config)


def recipe_name(config: Config) -> str | None:
    """The method whose runs are the trials of a tuning; None for every other method."""
    if config.method.kind != "tune":
        return None
    default = own(config).get("recipe", {}).get("default")
    return str(config.method.args.get("recipe", default))


def _of_class(config_class: str) -> dict[str, dict[str, Any]]:
    arguments: dict[str, dict[str, Any]] = lock()["arguments"].get(config_class, {})
    if not arguments:
        raise UserError(f"method.config_class={config_class}: not in {LOCK.name}. Run `make lock` after adding a method.")
    return arguments


@functools.cache
def _class_of_method(name: str) -> str:
    """Raises UserError for a recipe that does not exist, or is itself a tuning."""
    names = sorted(str(file.relative_to(METHODS).with_suffix("")) for file in METHODS.rglob("*.yaml"))
    names = [other for other in names if not other.startswith("tune/")]
    if name not in names:
        raise UserError(f"method.args.recipe={name}: no such recipe.{near(name, names)} Recipes: {', '.join(names)}.")
    return str(yaml.safe_load((METHODS / f"{name}.yaml").read_text())["config_class"])


def value(config: Config, name: str) -> Any:
    """An argument as the trainer will see it: given, or its default."""
    return config.method.args.get(name, known(config)[name]["default"])


def argument(config: Config, name: str) -> Any:
    """As `value`, and None where the method has no such argument."""
    return value(config, name) if name in known(config) else None


def check(config: Config) -> None:
    """Refuse what the configuration class would refuse, or another key decides. Raises UserError."""
    arguments, cls = known(config), config.method.config_class
    series = _of_series(config)
    for name, given in config.method.args.items():
        if name in OWNED and name in arguments:
            raise UserError(f"method.args.{name}={given}: decided elsewhere; set {OWNED[name]} instead.")
        if name not in arguments:
            why = f" Removed from TRL: {REPLACED[name]}." if name in REPLACED else argument_meant(name, set(arguments) - set(OWNED))
            whose = cls if cls.startswith("recipes.") else f"{cls} of TRL {lock()['trl']}"
            raise UserError(f"method.args.{name}={given}: {whose} has no such argument.{why}")
        check_value(f"method.args.{name}", given, arguments[name], cls, measured=name in series)


def check_value(key: str, given: Any, allowed: dict[str, Any], taker: str, measured: bool = False) -> None:
    """Raise UserError where `given` is not what the lock's entry of an argument allows. `taker` is the class that has the argument;
    `measured`: each item of a list is measured, so none may be there twice."""
    if not _is_of(given, allowed["types"]):
        meant = value_meant(key, given, allowed)
        raise UserError(f"{key}={given!r}: {JSON_TYPES[type(given)]}, and {taker} takes {' or '.join(allowed['types'])}.{meant}")
    _check_items(key, given, allowed, measured)
    _check_names(key, given, allowed)


def _of_series(config: Config) -> set[str]:
    """Arguments of a benchmark, or of a tuning and the benchmark that it tunes: not those of a training that it tunes."""
    if config.method.kind == "bench" or str(recipe_name(config)).startswith("bench/"):
        return {*known(config)}
    return {*own(config)} if config.method.kind == "tune" else set()


def _is_of(given: Any, types: list[str]) -> bool:
    """A whole number is a fraction, too."""
    kind = JSON_TYPES[type(given)]
    return "any" in types or kind in types or (kind == "int" and "float" in types)


def _check_items(key: str, given: Any, allowed: dict[str, Any], measured: bool) -> None:
    """Counts, alone or in a list, and what else is in a list, each of which is `measured` or not. Raises UserError."""
    is_list, items = isinstance(given, list), allowed.get("items")
    for i, one in enumerate(given if is_list else []):
        if items and not _is_of(one, items):
            raise UserError(f"{key}={given}: {JSON_TYPES[type(one)]} in it, and it is a list of {' or '.join(items)}.")
        if measured and (items or isinstance(one, list)) and one in given[:i]:
            raise UserError(f"{key}={given}: {one} is in it twice, and would be measured twice.")
    if any(type(one) is int and one < allowed.get("least", one) for one in (given if is_list else [given])):
        raise UserError(f"{key}={given}: {'each ' if is_list else ''}at least {allowed['least']}.")


def _check_names(key: str, given: Any, allowed: dict[str, Any]) -> None:
    """Of an argument that takes names, alone or in a list, or mappings with names for keys. Raises UserError."""
    known, refused = allowed.get("names"), allowed.get("refused", {})
    if given is None or not (known or refused):
        return
    listed = given if isinstance(given, list) else [given]
    for one in [str(word) for item in listed for word in (item if isinstance(item, dict) else [item])]:
        if one in refused:
            raise UserError(f"{key}: {one} {refused[one]}")
        if known and one not in known:
            raise UserError(f"{key}={one}: unknown.{word_meant(key.rpartition('.')[2], one, known)} It takes {', '.join(known)}.")


def complete(config: Config, run_dir: Path, ports: tuple[int, int]) -> dict[str, Any]:
    """Keyword arguments of the configuration class, nothing left to a default that the composition decides.

    `ports` are the server's and that of its weight transfer.
    """
    implied = {
        "output_dir": str(run_dir / "checkpoints"),
        "seed": config.seed,
        "data_seed": config.seed,
        # accelerate turns what is sharded into DDP where this is set; recipes/smoke then says that the ranks have no GPU.
        "use_cpu": config.hardware.vendor == Vendor.none and config.topology.strategy in ("none", "ddp"),
        "bf16": config.precision.compute in ("bf16", "fp8"),
        "fp16": config.precision.compute == "fp16",
        "report_to": config.tracking.name,
        "run_name": config.name,
        "project": config.tracking.project or "huggingface",
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,  # it would show 0.0 for a loss that is no number; recipes/common/metrics.py ends the run there
        "pad_to_multiple_of": COMPILED_MULTIPLE if config.step.compile else "auto",
        "dataloader_num_workers": config.hardware.dataloader.num_workers,
        "dataloader_pin_memory": config.hardware.dataloader.pin_memory,
        **_strategy(config),
        **_generation(config, ports),
        **_selection(config),
    }
    names = own(config)
    given = {k: v for k, v in config.method.args.items() if k in names}  # those of a tuning's recipe are not its own
    return {**{k: v for k, v in implied.items() if k in names}, **given}


def epochs_and_steps(config: Config) -> bool:
    """Whether both bounds of a training are given: transformers takes max_steps and ignores the other without a word."""
    args = config.method.args
    return args.get("num_train_epochs") is not None and (args.get("max_steps") or -1) > 0


def _strategy(config: Config) -> dict[str, Any]:
    topology = config.topology
    if topology.strategy == "fsdp":
        fsdp = topology.fsdp
        return {
            "fsdp": True,
            "fsdp_config": {
                "version": 2,
                "reshard_after_forward": fsdp.reshard_after_forward,
                "cpu_offload": fsdp.cpu_offload,
                "activation_checkpointing": fsdp.activation_checkpointing,
                "state_dict_type": fsdp.state_dict_type,
            },
            # Gradients on the host are reduced over all ranks there, to be clipped: RCCL alone has no such collective.
            **({"ddp_backend": "cuda:nccl,cpu:gloo"} if fsdp.cpu_offload and config.hardware.vendor != Vendor.none else {}),
        }
    if topology.strategy in ("zero2", "zero3"):
        return {"deepspeed": _deepspeed(config)}
    # Every weight that is trained takes part in every loss: looking for others costs each step a walk, and torch warns that it found none.
    # A single rank too: torchrun starts it, and accelerate then wraps its model.
    return {"ddp_find_unused_parameters": False}


def _selection(config: Config) -> dict[str, Any]:
    """Held-out rows are measured where the model is saved, so that the best one is there to be loaded."""
    metric = config.method.selection.metric
    if metric is None:
        return {}
    return {
        "eval_strategy": "steps",
        "eval_steps": value(config, "save_steps"),
        "metric_for_best_model": metric,
        "greater_is_better": HELD_OUT_METRICS[config.method.name][metric],
        "per_device_eval_batch_size": value(config, "per_device_train_batch_size"),
        "num_generations_eval": 1,  # grpo: a group has no use where nothing is trained
    }


def _deepspeed(config: Config) -> dict[str, Any]:
    """`auto` is filled by transformers from the trainer's own arguments."""
    stage = int(config.topology.strategy[-1])
    # Stage 2 would reduce gradients on a stream of its own, and has used buffers that were given away by then (DeepSpeed#5294, #7965);
    # on four H200s it was no slower without (docs/results/topologies.md).
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": stage == 3, "contiguous_gradients": True}
    if config.topology.zero.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": config.hardware.dataloader.pin_memory}
    if config.topology.zero.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": config.hardware.dataloader.pin_memory}
    if zero["stage"] == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    content: dict[str, Any] = {
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    if config.hardware.vendor == Vendor.none:
        content["zero_force_ds_cpu_optimizer"] = (
            False  # torch's own: DeepSpeed's for offload is compiled, and the cpu image has no compiler
        )
    if config.hardware.vendor == Vendor.amd:
        # bf16 gradients reduced in bf16 give silent NaN on ROCm (huggingface/accelerate#4025).
        content["communication_data_type"] = "fp32"
    return content


def _generation(config: Config, ports: tuple[int, int]) -> dict[str, Any]:
    if config.topology.name == "colocate":
        return {"use_vllm": True, "vllm_mode": "colocate"}
    if config.topology.servers == 0:
        return {}
    return {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": f"http://127.0.0.1:{ports[0]}",
        "vllm_group_port": ports[1],
        # TRL's own mode multiplies the ratios of a completion's tokens, and drops it above 3: meant for rounding, not for older weights.
        **({"vllm_importance_sampling_mode": "token_truncate"} if config.topology.overlap else {}),
    }
